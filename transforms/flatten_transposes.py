"""Take axes of length 1 out of a Transpose where the runtime is faster without them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import computing_nodes, graph_of, node_name
from .graphs.rewriter import add_initializer, insert_before, names, replace_node, unused_name
from .registry import Change, transform


@transform("flatten_transposes", after=("fold_constants", "merge_transposes"))
def flatten_transposes(model: ir.Model) -> Change:
    """Take axes of length 1 out of a Transpose that moves several axes, if it moves a single one without them.

    Before:  y = Transpose(x, perm=[0, 3, 2, 1]), x (1, 1, 98, 128)
    After:   y = Reshape(Transpose(Reshape(x, [98, 128]), perm=[1, 0]), [1, 128, 98, 1])
        The runtime has a fast kernel where a single axis moves, whatever its place. FSMN, as in FunASR's voice
        detector, turns rows and columns of images of one row so.
    Left alone: several axes whose lengths are not known (``shape-unknown``).
    """
    change, known, taken = Change(), Known(model), names(model)
    for node in computing_nodes(model, "Transpose"):
        lengths, perm = known.lengths(node.inputs[0]), list(node.attributes.get_ints("perm", ()))
        if not perm or _moves_one(perm):
            continue
        if lengths is None or len(lengths) != len(perm) or lengths.count(None) > 1 or 0 in lengths:
            change.skip("shape-unknown")
            continue
        kept = [axis for axis in range(len(perm)) if lengths[axis] != 1]
        order = [kept.index(axis) for axis in perm if axis in kept]
        if _moves_one(order):
            _flatten(node, [lengths[axis] for axis in kept], order, [lengths[axis] for axis in perm], taken)
            change.applied += 1
    return change


def _moves_one(perm: Sequence[int]) -> bool:
    """Whether at most one axis leaves its place among the others."""
    return any(sorted(rest) == rest for axis in perm for rest in [[each for each in perm if each != axis]])


def _flatten(
    node: ir.Node,
    lengths: Sequence[int | None],
    order: Sequence[int],
    result: Sequence[int | None],
    taken: set[str],
) -> None:
    """Replace a Transpose.

    Args:
        node: The Transpose.
        lengths: The lengths of the axes of its input that are not 1; None for an unknown one.
        order: Their order in the result.
        result: The lengths of all axes of the result.
        taken: The names in the model.
    """
    stem = node_name(node)
    targets = [np.array([length or -1 for length in each], np.int64) for each in (lengths, result)]
    before, behind = (
        add_initializer(graph_of(node), unused_name(taken, f"{stem}/{word}"), target)
        for word, target in zip(("flat", "whole"), targets, strict=True)
    )
    flat = insert_before(node, taken, "Reshape", [node.inputs[0], before], stem=f"{stem}/flattened")
    turned = insert_before(node, taken, "Transpose", [flat], {"perm": [*order]}, stem=f"{stem}/turned")
    flat.type = turned.type = node.outputs[0].type
    replace_node(node, ir.node("Reshape", [turned, behind], name=stem))
