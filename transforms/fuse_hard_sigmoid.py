"""Fuse a clipped sum and its division into a HardSigmoid, and a product with it into a HardSwish."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose

import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import (
    computing_nodes,
    constant,
    is_standard,
    node_name,
    one_number,
    producer_of,
    scaled,
    sole_reader,
)
from .graphs.rewriter import insert_before, names, remove_unread, replace_node
from .registry import Change, LeftAlone, transform
from .unfuse_gates import HALF, SLOPE

HAS_HARD_SWISH = 14  # the opset from which HardSwish is a standard operator
CLOSE = 1e-5  # exporters round 1/6 to float32


@dataclass(frozen=True, slots=True)
class _Gate:
    """A hard sigmoid, or the product of its input with it.

    Attributes:
        x: The input.
        last: The last node.
        alpha: The slope.
        beta: The value at 0.
        product: Whether the last node computes the product with the input.
    """

    x: ir.Value
    last: ir.Node
    alpha: float
    beta: float
    product: bool

    @property
    def usual(self) -> bool:
        """Whether it is the gate of the operator HardSwish."""
        return isclose(self.alpha, SLOPE, rel_tol=CLOSE) and isclose(self.beta, HALF, rel_tol=CLOSE)


@transform("fuse_hard_sigmoid", after=("fold_constants", "merge_clips"))
def fuse_hard_sigmoid(model: ir.Model) -> Change:
    """Replace a sum that is clipped and then divided by a HardSigmoid; its product with the input by a HardSwish.

    Before:  y = Div(Clip(Add(x, 3), 0, 6), 6);  z = Div(Mul(x, Clip(Add(x, 3), 0, 6)), 6)
    After:   y = HardSigmoid(x), alpha 1/6, beta 1/2;  z = HardSwish(x)
        Any constant may be added. The upper bound must be equal to the divisor, or to the reciprocal of a factor. The
        operands of sums and products may be in any order, and x may be divided instead of the product. Below opset 14,
        and with other constants, z is the product of x and a HardSigmoid. PyTorch writes y, PaddlePaddle z. HardSigmoid
        and Mul have an integer form, and the runtime computes them in half of the time of four operators.
    Left alone: a lower bound that is not 0, or an upper bound that is not the divisor (``other-bounds``); an
        intermediate result with other readers (``read-between``); constants of several elements, or with more axes than
        x; other types than float32.
    """
    change = Change()
    known = Known(model)
    taken = names(model)
    for clip in computing_nodes(model, "Clip"):
        try:
            gate = _find(clip, known)
        except LeftAlone as left:
            change.skip(str(left))
            continue
        if gate is not None:
            _fuse(gate, model.opset_imports.get("", 0), taken)
            change.applied += 1
    return change


def _find(clip: ir.Node, known: Known) -> _Gate | None:
    """Return the hard sigmoid of a Clip, or the product with it; None if the Clip belongs to neither.

    Raises:
        LeftAlone: It nearly is one.
    """
    add = producer_of(clip.inputs[0])
    if not is_standard(add, "Add"):
        return None
    x = next((value for value in add.inputs if value is not None and constant(value) is None), None)
    shift = None if x is None else _added(add, known.rank(x) or 0)
    if x is None or shift is None:
        return None
    after = sole_reader(clip.outputs[0])
    if after is None or sole_reader(add.outputs[0]) is not clip:
        raise LeftAlone("read-between")
    found = _behind_clip(after, clip.outputs[0], x, known.rank(x) or 0)
    if found is None:
        return None
    last, factor, product = found
    low, high = (_bound(clip, index, name) for index, name in ((1, "min"), (2, "max")))
    if low != 0 or high is None or high <= 0 or not isclose(high * factor, 1, rel_tol=CLOSE):
        raise LeftAlone("other-bounds")
    return _Gate(x, last, factor, shift * factor, product)


def _behind_clip(after: ir.Node, clipped: ir.Value, x: ir.Value, axes: int) -> tuple[ir.Node, float, bool] | None:
    """Return the last node, the factor, and whether x is a factor too, of what follows a Clip; None without a factor.

    Args:
        after: The only reader of the Clip.
        clipped: The result of the Clip.
        x: The input.
        axes: The number of axes of the input.
    """
    factor = _factor(after, clipped, axes)
    if factor is not None:  # clip / 6
        return after, factor, False
    if not is_standard(after, "Mul"):
        return None
    other = next((value for value in after.inputs if value is not clipped), None)
    if other is x:  # (x * clip) / 6
        scale = sole_reader(after.outputs[0])
        factor = _factor(scale, after.outputs[0], axes)
        return None if scale is None or factor is None else (scale, factor, True)
    factor = _factor(producer_of(other), x, axes)  # (x / 6) * clip
    return None if factor is None else (after, factor, True)


def _fuse(gate: _Gate, opset: int, taken: set[str]) -> None:
    """Replace the operators of a gate."""
    last, sources = gate.last, [value.producer() for value in gate.last.inputs if value is not None]
    alpha, beta = (SLOPE, HALF) if gate.usual else (gate.alpha, gate.beta)
    attributes = {"alpha": alpha, "beta": beta}
    if not gate.product:
        new = ir.node("HardSigmoid", [gate.x], attributes, name=last.name)
    elif gate.usual and opset >= HAS_HARD_SWISH:
        new = ir.node("HardSwish", [gate.x], name=last.name)
    else:
        hard = insert_before(last, taken, "HardSigmoid", [gate.x], attributes, stem=f"{node_name(last)}/gate")
        new = ir.node("Mul", [gate.x, hard], name=last.name)
    replace_node(last, new)
    remove_unread(source for source in sources if source is not gate.x.producer())


def _added(node: ir.Node, axes: int) -> float | None:
    """Return the constant operand of an Add; None without one."""
    numbers = (one_number(value, axes, ir.DataType.FLOAT) for value in node.inputs)
    return next((number for number in numbers if number is not None), None)


def _bound(clip: ir.Node, index: int, name: str) -> float | None:
    """Return a constant bound of a Clip, from the input or, in old opsets, the attribute."""
    if len(clip.inputs) == 1:
        return clip.attributes.get_float(name, None)
    return one_number(clip.inputs[index], 1, ir.DataType.FLOAT) if len(clip.inputs) > index else None


def _factor(node: ir.Node | None, x: ir.Value, axes: int) -> float | None:
    """Return the float32 constant, not 0, by which a Mul or Div multiplies `x`; None without one.

    Args:
        node: Any node, or None.
        x: The tensor.
        axes: The most axes of the constant.
    """
    found = scaled(node, axes, ir.DataType.FLOAT)
    return (found[1] or None) if found is not None and found[0] is x else None
