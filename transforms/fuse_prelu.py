"""Write a PRelu of several operators as one LeakyRelu, or in the parts that are fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .graphs.inference import Known
from .graphs.queries import (
    computing_nodes,
    constant,
    graph_of,
    is_standard,
    node_name,
    one_number,
    producer_of,
    sole_reader,
)
from .graphs.rewriter import add_initializer, insert_before, names, remove_unread, replace_node, unused_name
from .int8.ops import CLIP_TAKES_INPUTS
from .patterns.elementwise import bounds_of
from .patterns.slopes import NO_BOUND, find_sloped
from .registry import Change, transform

COMPARED = {"Greater": 1, "GreaterOrEqual": 1, "Less": 2, "LessOrEqual": 2}
"""By operator: the input of a Where that is taken for values above 0."""


@dataclass(frozen=True, eq=False)
class _Part:
    """A multiple of the values of a tensor on one side of 0; the other values are 0.

    Attributes:
        x: The tensor.
        slopes: The factors, float32.
        perm: The order of the axes; None for that of `x`.
    """

    x: ir.Value
    slopes: NDArray[np.float32]
    perm: tuple[int, ...] | None = None


@transform("fuse_prelu", after=("fold_constants", "merge_clips"))
def fuse_prelu(model: ir.Model) -> Change:
    """Write a function of two slopes that meet at 0 in few operators, however the model writes it.

    Before:  y = Add(Relu(x), Mul(Relu(Neg(x)), -a));  y = Add(Relu(x), Mul(Mul(Sub(x, Abs(x)), 0.5), a));
             y = Where(Greater(x, 0), x, Mul(x, a)), a constant
    After:   y = LeakyRelu(x), alpha a, where a is one number
             y = Add(Relu(x), Mul(Clip(x, -infinity, 0), a)) for other slopes: one for each channel or element
        Keras, PyTorch and PaddlePaddle write PRelus so; both summands may be transposed. The runtime computes the last
        form a little faster than the first, and ten times as fast as the operator PRelu or the Where. A native operator
        computes it in integers. Values that are infinite stay, also where the absolute value made them NaN.
    Left alone: intermediate results with other readers; summands of two tensors; constants with more axes than x;
        other types than float32.
    """
    change, known, taken = Change(), Known(model), names(model)
    for node in computing_nodes(model, "Add", "Sub", "Where"):
        found = _chosen(node, known) if node.op_type == "Where" else _sum(node)
        rank = known.rank(found.x) if found is not None else None
        if found is None or rank is None or found.slopes.ndim > rank or known.dtype(found.x) is not ir.DataType.FLOAT:
            continue
        if found.slopes.ndim == rank and found.slopes.shape[0] == 1:
            found = replace(found, slopes=found.slopes[0])
        if found.slopes.size > 1 and _is_written(node, found):
            continue
        _write(node, found, taken, model.opset_imports.get("", 0))
        change.applied += 1
    return change


def _is_written(node: ir.Node, found: _Part) -> bool:
    """Whether a PRelu has the form that is written already."""
    written = find_sloped(node)
    tensor = None if written is None else constant(written.slopes)
    return tensor is not None and tuple(tensor.shape.numpy()) == found.slopes.shape


def _sum(node: ir.Node) -> _Part | None:
    """Return what an Add or Sub makes of the values below 0 of a tensor, if it leaves those above 0; else None."""
    for first, second in (node.inputs, node.inputs[::-1])[: 1 if node.op_type == "Sub" else 2]:
        above = _above(first, node)
        below = None if above is None else _below(second, node)
        if above is None or below is None or above.x is not below.x or above.perm != below.perm:
            continue
        return replace(below, slopes=-below.slopes) if node.op_type == "Sub" else below
    return None


def _inner(value: ir.Value | None, reader: ir.Node) -> ir.Node | None:
    """Return the node that computes a tensor which only one node reads, in the same graph; else None."""
    return producer_of(value) if value is not None and sole_reader(value) is reader else None


def _perm(node: ir.Node) -> tuple[int, ...] | None:
    """Return the order of the axes behind a Transpose; None if it is another node, or does not say it."""
    return tuple(node.attributes.get_ints("perm", ())) or None if is_standard(node, "Transpose") else None


def _above(value: ir.Value | None, reader: ir.Node) -> _Part | None:
    """Return the tensor whose values above 0 a tensor has; None if it has others."""
    node = _inner(value, reader)
    perm = None if node is None else _perm(node)
    if node is not None and perm is not None:
        node = _inner(node.inputs[0], node)
    if not is_standard(node, "Relu") or node.inputs[0] is None:
        return None
    return _Part(node.inputs[0], np.ones((), np.float32), perm)


def _below(value: ir.Value | None, reader: ir.Node) -> _Part | None:
    """Return the tensor that a tensor has a multiple of below 0, and the factors; None if it is something else."""
    node = _inner(value, reader)
    if node is None or node.domain or not node.inputs:
        return None
    if node.op_type in ("Mul", "Div"):
        return _multiplied(node)
    if node.op_type == "Neg":
        part = _below(node.inputs[0], node)
        return None if part is None else replace(part, slopes=-part.slopes)
    perm = _perm(node)
    if perm is not None:
        part = _below(node.inputs[0], node)
        return None if part is None or part.perm or part.slopes.ndim else replace(part, perm=perm)
    return _halved(node)


def _halved(node: ir.Node) -> _Part | None:
    """Return the tensor whose values above 0 a Relu, Clip, or the difference from the absolute value takes away."""
    x, slope = node.inputs[0], 1
    if node.op_type == "Relu":
        negated = _inner(x, node)
        x, slope = (negated.inputs[0], -1) if is_standard(negated, "Neg") else (None, 0)
    elif node.op_type == "Sub":
        x, slope = _from_absolute(node)
    elif node.op_type != "Clip" or bounds_of(node) not in [(low, 0.0) for low in NO_BOUND]:
        return None
    return None if x is None else _Part(x, np.array(slope, np.float32))


def _from_absolute(node: ir.Node) -> tuple[ir.Value | None, int]:
    """Return x and the slope of x - abs(x) or abs(x) - x below 0; no tensor if a Sub is something else."""
    for place in (0, 1):
        x, size = node.inputs[place], _inner(node.inputs[1 - place], node)
        if is_standard(size, "Abs") and size.inputs[0] is x:
            return x, 2 if place == 0 else -2
    return None, 0


def _multiplied(node: ir.Node) -> _Part | None:
    """Return what a product with a constant, or a quotient by one, has of a tensor below 0; None if something else."""
    for place in (0,) if node.op_type == "Div" else (0, 1):
        factors, part = _factors(node.inputs[1 - place]), _below(node.inputs[place], node)
        if factors is None or part is None:
            continue
        with np.errstate(all="ignore"):
            slopes = np.asarray(part.slopes * factors if node.op_type == "Mul" else part.slopes / factors, np.float32)
        return replace(part, slopes=slopes) if np.isfinite(slopes).all() else None
    return None


def _factors(value: ir.Value | None) -> NDArray[np.float32] | None:
    """Return the values of a constant of float32; None for other tensors."""
    tensor = constant(value)
    if tensor is None or tensor.dtype is not ir.DataType.FLOAT:
        return None
    found: NDArray[np.float32] = tensor.numpy()
    return found


def _chosen(node: ir.Node, known: Known) -> _Part | None:
    """Return what a Where has of a tensor below 0, if it takes the tensor above 0; None if it does something else."""
    compared = _inner(node.inputs[0], node)
    if not is_standard(compared, *COMPARED):
        return None
    x, zero = compared.inputs
    above = COMPARED[compared.op_type]
    if constant(x) is not None:
        x, zero, above = zero, x, 3 - above
    if x is None or node.inputs[above] is not x or one_number(zero, known.rank(x) or 0) != 0:
        return None
    mul = _inner(node.inputs[3 - above], node)
    if not is_standard(mul, "Mul"):
        return None
    slopes = next((found for value in mul.inputs if (found := _factors(value)) is not None), None)
    return None if slopes is None or x not in mul.inputs or not np.isfinite(slopes).all() else _Part(x, slopes)


def _constant(graph: ir.Graph, taken: set[str], stem: str, number: float) -> ir.Value:
    """Register a number as an initializer."""
    return add_initializer(graph, unused_name(taken, stem), np.array(number, np.float32))


def _write(node: ir.Node, found: _Part, taken: set[str], opset: int) -> None:
    """Replace the last node of a PRelu, and remove the others that nothing reads any more."""
    sources, stem = [value.producer() for value in node.inputs if value is not None], node_name(node)
    x = found.x
    if found.perm is not None:
        x = insert_before(node, taken, "Transpose", [x], {"perm": found.perm}, stem=f"{stem}/transposed")
    if found.slopes.size == 1:
        last = ir.node("LeakyRelu", [x], {"alpha": float(found.slopes.item())}, name=node.name)
    else:
        graph = graph_of(node)
        above = insert_before(node, taken, "Relu", [x], stem=f"{stem}/above")
        bounds = {"min": -inf, "max": 0.0}  # without `min`, the largest float would replace infinity
        limits: list[ir.Value] = []
        if opset >= CLIP_TAKES_INPUTS:
            limits = [_constant(graph, taken, f"{stem}/{name}", limit) for name, limit in bounds.items()]
        below = insert_before(node, taken, "Clip", [x, *limits], {} if limits else bounds, stem=f"{stem}/below")
        slopes = add_initializer(graph, unused_name(taken, f"{stem}/slopes"), found.slopes)
        sloped = insert_before(node, taken, "Mul", [below, slopes], stem=f"{stem}/sloped")
        last = ir.node("Add", [above, sloped], name=node.name)
    replace_node(node, last)
    remove_unread(source for source in sources if source is not found.x.producer())
