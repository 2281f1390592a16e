"""Split a tensor and add its parts, in place of a sum over a short axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import axes_of, computing_nodes, graph_of, made_by, node_name, sole_reader
from .graphs.rewriter import add_initializer, insert_before, names, remove_unread, replace_node, unused_name
from .registry import Change, transform

SPLIT_TAKES_LENGTHS = 13  # the opset from which the lengths are an input
LONGEST = 4  # parts; a chain of more reads and writes too much
FEWEST = 1024  # elements of a part, with which the operators are worth their calls


@transform("split_short_sums", after=("fold_constants",))
def split_short_sums(model: ir.Model) -> Change:
    """Add the parts of a tensor, in place of a ReduceSum over an axis of length 2 to 4.

    Before:  y = ReduceSum(x, axes=[1], keepdims=0),  x (1, 2, C, H, W)
    After:   a, b = Split(Reshape(x, (1, 2 * C, H, W)), axis=1); y = Add(a, b)
    Before:  y = ReduceSum(Mul(x, g), axes=[1], keepdims=0),  g (1, 2, C, 1, 1)
    After:   the same of Mul(Reshape(x, (1, 2 * C, H, W)), Reshape(g, (1, 2 * C, 1, 1)))
        ResNeSt attends so to groups of channels. The runtime adds few long rows several times more slowly than its Add,
        and an Add, a Mul and a Split of images have integer kernels. The results differ by the rounding of float32.
    Left alone: other axes, or one that is kept (``other-axes``); a batch that is not known to be 1, which the runtime
        adds fast, and longer axes or shorter rows (``no-gain``); other types than float32 (``not-float32``), and
        opsets below 13 (``opset``).
    """
    change, known, taken = Change(), Known(model), names(model)
    for node in computing_nodes(model, "ReduceSum"):
        x = node.inputs[0]
        lengths = known.lengths(x) or ()
        axes, kept = axes_of(node), node.attributes.get_int("keepdims", 1)
        if x is None or len(lengths) < 3 or axes not in ([1], [1 - len(lengths)]) or kept:
            change.skip("other-axes")
        elif known.dtype(x) is not ir.DataType.FLOAT:
            change.skip("not-float32")
        elif not _gains(lengths):
            change.skip("no-gain")
        elif model.opset_imports.get("", 0) < SPLIT_TAKES_LENGTHS:
            change.skip("opset")
        else:
            _split(node, known, taken)
            change.applied += 1
    return change


def _gains(lengths: Sequence[int | None]) -> bool:
    """Whether the sum over axis 1 of a tensor of these lengths is slower than Adds."""
    first, parts, *row = [length or 0 for length in lengths]
    return first == 1 and 2 <= parts <= LONGEST and prod(row) >= FEWEST


def _split(node: ir.Node, known: Known, taken: set[str]) -> None:
    """Replace one sum."""
    x, stem, graph = node.inputs[0], node_name(node), graph_of(node)
    _, parts, channels, *_ = known.lengths(x) or ()
    assert x is not None  # otherwise the sum is left alone
    assert parts is not None  # otherwise the sum is left alone
    product = made_by(x, "Mul")
    factors = [] if product is None or product.domain or sole_reader(x) is not node else [*product.inputs]
    sides = [known.lengths(factor) or () for factor in factors]
    if factors and all(side[:3] == (1, parts, channels) and None not in side for side in sides):
        flat = [_flat(factor, node, known, taken) for factor in factors]
        whole = insert_before(node, taken, "Mul", flat, stem=f"{stem}/product")
    else:
        whole = _flat(x, node, known, taken)
    sizes = add_initializer(graph, unused_name(taken, f"{stem}/sizes"), np.full(parts, channels, np.int64))
    split = ir.node("Split", [whole, sizes], {"axis": 1}, num_outputs=parts, name=unused_name(taken, f"{stem}/split"))
    for place, part in enumerate(split.outputs):
        part.name, part.type = unused_name(taken, f"{stem}/part_{place}"), ir.TensorType(ir.DataType.FLOAT)
    graph.insert_before(node, [split])
    total, *others = split.outputs
    for other in others[:-1]:
        total = insert_before(node, taken, "Add", [total, other], stem=f"{stem}/sum")
    replace_node(node, ir.node("Add", [total, others[-1]], name=node.name))
    remove_unread([product, x.producer(), *(factor.producer() for factor in factors if factor is not None)])


def _flat(value: ir.Value | None, place: ir.Node, known: Known, taken: set[str]) -> ir.Value:
    """Return a tensor (1, L, C, ...) as (1, L * C, ...): what a Reshape made it of, or a Reshape of it."""
    first, parts, channels, *rest = (length or 0 for length in known.lengths(value) or ())
    target = (first, parts * channels, *rest)
    reshape = made_by(value, "Reshape")
    source = None if reshape is None or reshape.domain else reshape.inputs[0]
    if source is not None and known.lengths(source) == target:
        return source
    stem = f"{node_name(place)}/flat"
    shape = add_initializer(graph_of(place), unused_name(taken, f"{stem}/shape"), np.array(target, np.int64))
    return insert_before(place, taken, "Reshape", [value, shape], stem=stem)
