"""Remove nodes whose result equals their input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import code_graphs, constant, integers_of, producer_of, unread
from .graphs.rewriter import can_replace, remove, replace
from .patterns import pads
from .registry import Change, transform
from .remove_nodes import is_training

Rule = Callable[[ir.Node, Known], bool]

SAMPLES_IN_PLACE = frozenset(
    {"align_corners", "asymmetric", "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel"}
)


@transform("remove_no_ops", after=("fold_constants",))
def remove_no_ops(model: ir.Model) -> Change:
    """Remove every node whose result equals one of its inputs.

    Before:  t = Mul(x, 1); u = Slice(t, [0], [2147483647], [2]); v = Cast(u, to=float32), u float32; y = Relu(v)
    After:   y = Relu(x)
        Removed: Identity; Dropout outside of training; Cast and CastLike to the same type; Add and Sub of 0; Mul, Div
        and Pow with 1; Transpose to the same order; Reshape, Flatten, Expand, Squeeze, Unsqueeze and Slice to the same
        known shape; Tile and Resize by 1; Pad by 0; a Slice of the whole tensor; Concat, Sum, Max, Min and Mean of one
        tensor; Split into one part; Relu, Abs, Floor, Ceil, Round or Sign of its own result; a pooling with kernel and
        strides 1. Nodes in bodies and functions are removed too.
    Left alone: a node between an input, an initializer or another output of a graph and an output of the graph, because
        both names must stay (``graph-output``); a node that may change its input.
    """
    change = Change()
    known = Known(model)
    for graph in code_graphs(model):
        for node in tuple(graph):
            rule = RULES.get(node.op_type) if not node.domain else None
            if rule is None or not _is_plain(node) or _is_training(model, node) or not rule(node, known):
                continue
            source = _operand(node)
            if source is None or not can_replace(node.outputs[0], source):
                change.skip("graph-output")
                continue
            replace(node.outputs[0], source)
            remove(node)
            change.applied += 1
    return change


def _is_plain(node: ir.Node) -> bool:
    """Whether a node has a first input, only its first result is read, and no attribute refers to a function."""
    literal = not any(attribute.is_ref() for attribute in node.attributes.values())
    return bool(node.inputs) and node.inputs[0] is not None and literal and unread(node, 1)


def _is_training(model: ir.Model, node: ir.Node) -> bool:
    return node.op_type == "Dropout" and is_training(model, node)


def _always(node: ir.Node, known: Known) -> bool:
    return True


def _alone(node: ir.Node, known: Known) -> bool:
    """Whether a node has one input and one output."""
    return len(node.inputs) == 1 and len(node.outputs) == 1


def _one_part(node: ir.Node, known: Known) -> bool:
    return len(node.outputs) == 1 and (len(node.inputs) == 1 or _shape(node.inputs[1], known) == (1,))


def _shape(value: ir.Value | None, known: Known) -> tuple[int | str, ...] | None:
    """Return the shape of a tensor if each length is a number or has a name, else None."""
    shape = known.shape(value)
    if shape is None:
        return None
    lengths = [length if isinstance(length, int) else length.value for length in shape]
    return None if None in lengths else tuple(length for length in lengths if length is not None)


def _same_type(node: ir.Node, known: Known) -> bool:
    before = known.dtype(node.inputs[0])
    if node.op_type == "CastLike":
        return before is not None and before == known.dtype(node.inputs[1])
    return before is not None and before == node.attributes.get_int("to", 0)


def _same_shape(node: ir.Node, known: Known, value: ir.Value | None = None) -> bool:
    """Whether `value`, by default the first input of a node, has the shape of its result."""
    before, after = (_shape(each, known) for each in (value or node.inputs[0], node.outputs[0]))
    return before is not None and before == after


def _in_order(node: ir.Node, known: Known) -> bool:
    order = node.attributes.get_ints("perm", None)
    if order is None:
        shape = _shape(node.inputs[0], known)
        return shape is not None and len(shape) < 2
    return list(order) == sorted(order)


def _holds(value: ir.Value | None, number: float) -> bool:
    """Whether all elements of a constant are `number`."""
    tensor = constant(value)
    if tensor is None or tensor.size == 0 or tensor.dtype is ir.DataType.STRING:
        return False
    return bool((tensor.numpy() == number).all())


def _operand(node: ir.Node) -> ir.Value | None:
    """Return the input that may equal the result: the first one, or the computed operand of an Add or Mul."""
    swapped = node.op_type in ("Add", "Mul") and len(node.inputs) == 2 and constant(node.inputs[0]) is not None
    return node.inputs[1 if swapped and constant(node.inputs[1]) is None else 0]


def _neutral(number: float) -> Rule:
    """Return the rule of an operator whose result equals one operand if the other operand is `number`.

    An operand with more axes or greater lengths would broadcast the tensor. -0.0 + 0 is 0, not -0.0: only a reader
    that divides by it can tell the difference.
    """

    def rule(node: ir.Node, known: Known) -> bool:
        if len(node.inputs) != 2 or "axis" in node.attributes or "broadcast" in node.attributes:
            return False
        value = _operand(node)
        neutral = node.inputs[1 if value is node.inputs[0] else 0]
        tensor = constant(neutral)
        if tensor is None or not _holds(neutral, number):
            return False
        if tensor.size > 1:
            return _same_shape(node, known, value)
        rank = known.rank(value)
        return not len(tensor.shape) or (rank is not None and rank >= len(tensor.shape))

    return rule


def _whole(node: ir.Node, known: Known) -> bool:
    """Whether a Slice takes the whole tensor."""
    if _same_shape(node, known) and all(isinstance(n, int) for n in _shape(node.inputs[0], known) or ()):
        steps = constant(node.inputs[4]) if len(node.inputs) > 4 else None
        return len(node.inputs) < 5 or node.inputs[4] is None or (steps is not None and bool((steps.numpy() > 0).all()))
    starts, ends = (
        node.attributes.get_ints(name, None) if len(node.inputs) == 1 else _ints(node, index)
        for index, name in ((1, "starts"), (2, "ends"))
    )
    steps_ok = len(node.inputs) < 5 or node.inputs[4] is None or _holds(node.inputs[4], 1)
    far = np.iinfo(np.int32).max
    return bool(starts and ends) and not any(starts or ()) and min(ends or (0,)) >= far and steps_ok


def _ints(node: ir.Node, index: int) -> list[int] | None:
    """Return the integers of a constant input; None if it is not constant."""
    return integers_of(node.inputs[index]) if len(node.inputs) > index else None


def _ones(attribute: str = "") -> Rule:
    """Return the rule of an operator that repeats or scales by the numbers in its second input, or in an attribute.

    The operator does nothing where all of them are 1.
    """

    def rule(node: ir.Node, known: Known) -> bool:
        if attribute and attribute in node.attributes:
            return all(number == 1 for number in node.attributes.get_floats(attribute, (0,)))
        return len(node.inputs) == 2 and _holds(node.inputs[1], 1)

    return rule


def _resized(node: ir.Node, known: Known) -> bool:
    """Whether a Resize keeps the size and samples each position in place."""
    where = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    if where not in SAMPLES_IN_PLACE or node.attributes.get_int("antialias", 0) != 0:
        return False
    scales = {2: 1, 3: 2}.get(len(node.inputs))
    if scales is not None:
        return _holds(node.inputs[scales], 1)
    shape = _shape(node.inputs[0], known)
    return _same_shape(node, known) and all(isinstance(length, int) for length in shape or ("",))


def _no_pads(node: ir.Node, known: Known) -> bool:
    lengths = pads.given_lengths(node)
    return lengths is not None and not any(lengths)


def _single(node: ir.Node, known: Known) -> bool:
    """Whether a pooling has kernel and strides 1 and no padding."""
    kernel = node.attributes.get_ints("kernel_shape", (0,))
    strides, edges = node.attributes.get_ints("strides", (1,)), node.attributes.get_ints("pads", (0,))
    explicit = node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return {*kernel, *strides} == {1} and not any(edges) and explicit


def _of_relu(node: ir.Node, known: Known) -> bool:
    before = producer_of(node.inputs[0])
    return before is not None and not before.domain and before.op_type == node.op_type


RULES: dict[str, Rule] = {
    "Identity": _always,
    "Dropout": _always,
    "Cast": _same_type,
    "CastLike": _same_type,
    "Add": _neutral(0),
    "Sub": _neutral(0),
    "Mul": _neutral(1),
    "Div": _neutral(1),
    "Pow": _neutral(1),
    "Transpose": _in_order,
    **dict.fromkeys(("Reshape", "Flatten", "Expand", "Squeeze", "Unsqueeze"), _same_shape),
    "Slice": _whole,
    "Tile": _ones(),
    "Upsample": _ones("scales"),
    "Resize": _resized,
    "Pad": _no_pads,
    **dict.fromkeys(("Concat", "Sum", "Max", "Min", "Mean"), _alone),
    "Split": _one_part,
    "AveragePool": _single,
    "MaxPool": _single,
    **dict.fromkeys(("Relu", "Abs", "Floor", "Ceil", "Round", "Sign"), _of_relu),
}
