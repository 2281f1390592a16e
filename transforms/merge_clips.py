"""Write bounds as one Relu or Clip, which integer kernels absorb."""

from __future__ import annotations

from math import inf

import numpy as np
import onnx_ir as ir

from .graph import (
    add_initializer,
    computing_nodes,
    constant,
    discard,
    graph_of,
    names,
    node_name,
    remove,
    sole_reader,
    stand_ins,
    take,
    take_place,
)
from .ops import CLIP_TAKES_INPUTS
from .registry import Change, transform

CLIPPED = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16})
Bounds = tuple[float, float]


@transform("merge_clips", after=("fold_constants",))
def merge_clips(model: ir.Model) -> Change:
    """Replace consecutive Relu, Clip, Max and Min nodes by one Relu or Clip with the same bounds.

    Before:  y = Min(Max(x, 0), 6);  z = Clip(Relu(x), -1, 4);  u = Max(x, 0);  v = Clip(x, 0)
    After:   y = Clip(x, 0, 6);      z = Clip(x, 0, 4);         u = Relu(x);    v = Relu(x)
        A Relu or Clip after a convolution or a matrix product runs inside its integer kernel; Max and Min do not.
    Left alone: bounds that are computed or not scalars; a lower bound above the upper bound (``bounds``); a single Max
        or Min, except Max(x, 0); a tensor between two such nodes that other nodes read (``read-between``); integer
        tensors, and tensors of unknown type (``not-float``).
    """
    change = Change()
    known, taken = stand_ins(model), names(model)
    opset = model.opset_imports.get("", 0)
    for node in computing_nodes(model):
        bounds = None if node.domain else _bounds(node)
        if bounds is None:
            continue
        result = node.outputs[0]
        dtype = result.dtype or known.get(result, result).dtype
        if dtype not in CLIPPED:
            change.skip("not-float")
        elif _rewrite(node, bounds, (taken, opset, dtype), change):
            change.applied += 1
    return change


def _bounds(node: ir.Node) -> Bounds | None:
    """Return the constant bounds that a node applies to its tensor; None if the node does something else."""
    if node.op_type == "Relu":
        return 0.0, inf
    if node.op_type == "Clip":
        limits = [node.attributes.get_float("min", -inf), node.attributes.get_float("max", inf)]
        for index, value in enumerate(node.inputs[1:3]):
            if value is not None:
                limit = _number(value)
                if limit is None:
                    return None
                limits[index] = limit
        return limits[0], limits[1]
    if node.op_type not in ("Max", "Min") or len(node.inputs) != 2:
        return None
    limit = _number(node.inputs[_place(node)])
    if limit is None or constant(node.inputs[1 - _place(node)]) is not None:
        return None
    return (limit, inf) if node.op_type == "Max" else (-inf, limit)


def _place(node: ir.Node) -> int:
    """Return the index of the bound among the inputs of a Max or Min."""
    return 0 if constant(node.inputs[0]) is not None else 1


def _tensor(node: ir.Node) -> ir.Value | None:
    """Return the tensor to which a node applies its bounds."""
    return node.inputs[1 - _place(node)] if node.op_type in ("Max", "Min") else node.inputs[0]


def _number(value: ir.Value | None) -> float | None:
    """Return the value of a constant scalar; None for any other tensor and for NaN."""
    tensor = constant(value)
    number = None if tensor is None or tensor.size != 1 or len(tensor.shape) else float(tensor.numpy())
    return None if number is None or np.isnan(number) else number


def _rewrite(node: ir.Node, bounds: Bounds, facts: tuple[set[str], int, ir.DataType], change: Change) -> bool:
    """Merge a node with a bounding node before it, or rewrite it as Relu or Clip; return whether the graph changed."""
    source = _tensor(node)
    before = source.producer() if source is not None else None
    merged = None if before is None or before.domain or before.graph is not node.graph else _bounds(before)
    if merged is not None and before is not None and source is not None:
        if sole_reader(source) is not node:
            change.skip("read-between")
            merged = None
        elif merged[0] > merged[1] or bounds[0] > bounds[1]:
            change.skip("bounds")
            merged = None
    if merged is not None and before is not None:
        lo, hi = (min(max(limit, bounds[0]), bounds[1]) for limit in merged)
        _replace(node, _tensor(before), (lo, hi), facts)
        remove(before)
        return True
    plain = (node.op_type == "Max" and bounds[0] == 0) or (node.op_type == "Clip" and bounds == (0.0, inf))
    if plain:
        _replace(node, source, bounds, facts)
    return plain


def _replace(node: ir.Node, source: ir.Value | None, bounds: Bounds, facts: tuple[set[str], int, ir.DataType]) -> None:
    """Replace a node by a Relu or Clip."""
    opset = facts[1]
    inputs, name = tuple(node.inputs), node.name
    if bounds == (0.0, inf):
        new = ir.node("Relu", [source], name=name)
    elif opset < CLIP_TAKES_INPUTS:
        finite = {key: limit for key, limit in zip(("min", "max"), bounds, strict=True) if abs(limit) != inf}
        new = ir.node("Clip", [source], finite, name=name)
    else:
        limits = [_limit(node, key, limit, facts) for key, limit in zip(("min", "max"), bounds, strict=True)]
        new = ir.node("Clip", [source, *(limits if limits[1] is not None else limits[:1])], name=name)
    take_place(node, new)
    discard(*inputs)


def _limit(node: ir.Node, key: str, limit: float, facts: tuple[set[str], int, ir.DataType]) -> ir.Value | None:
    """Return a bound of a Clip as an initializer; None for an infinite bound."""
    if abs(limit) == inf:
        return None
    taken, _, dtype = facts
    return add_initializer(graph_of(node), take(taken, f"{node_name(node)}/{key}"), np.array(limit, dtype.numpy()))
