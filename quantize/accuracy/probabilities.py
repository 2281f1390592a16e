"""Outputs whose values are probabilities, by the operators that write them.

Values alone show nothing: the values of a regression may lie between 0 and 1 on some samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from ...transforms.graphs.inference import inferred
from ...transforms.graphs.queries import constant, is_standard, plain_shape, producer_of
from ...transforms.int8.ops import MOVES
from .sqnr import FAINT

KEEPS = MOVES | {"Cast", "Concat"}
"""Operators that write values of one kind if they read only such values."""
WITHIN = KEEPS | {"Gather", "Max", "MaxPool", "Min", "Mul", "ReduceMax", "Slice", "Split"}
"""Operators that write probabilities if they read only such: some of them, the greater one, or a product."""
SEVERAL = frozenset({"Concat", "Max", "Min", "Mul"})
"""Those of them whose inputs are all values; the other inputs are places and shapes."""
SQUASHES = frozenset({"HardSigmoid", "Sigmoid"})
"""Operators whose results lie between 0 and 1."""
LAST_AXIS = 13
"""The operator set from which a Softmax is that of one axis."""


def probability_outputs(model: ir.Model) -> frozenset[str]:
    """Return the outputs whose values are all between 0 and 1 because of the graph.

    A Sigmoid, a HardSigmoid, a Clip within these bounds or a Softmax wrote them, also behind operators that move, join
    or choose values, or multiply them with each other. A Softmax of more than ``1 / FAINT`` classes is left out: the
    values of a row add up to 1, so that all may be faint, and still tell which class is the highest.
    """

    def known(value: ir.Value) -> bool:
        node = value.producer()
        return node is not None and (node.op_type in SQUASHES or _is_clipped(node) or _is_softmax(node, model))

    return frozenset(str(each.name) for each in model.graph.outputs if comes_from(each, known, WITHIN))


def comes_from(output: ir.Value, known: Callable[[ir.Value], bool], keeps: Collection[str]) -> bool:
    """Return whether all values of a tensor come from standard operators that `known` accepts.

    Args:
        output: The tensor.
        known: Whether a result of a standard operator is of the kind that is looked for.
        keeps: The operators whose results are of this kind if what they read is.
    """
    waiting: list[ir.Value | None] = [output]
    seen: set[ir.Value | None] = set()
    while waiting:
        value = waiting.pop()
        node = producer_of(value)
        if value is None or node is None or node.domain:
            return False
        if value in seen or known(value):
            continue
        if node.op_type not in keeps:
            return False
        seen.add(value)
        waiting += node.inputs if node.op_type in SEVERAL else node.inputs[:1]
    return True


def _is_clipped(node: ir.Node) -> bool:
    """Return whether a node is a Clip to constant bounds within 0 and 1."""
    if not is_standard(node, "Clip") or len(node.inputs) < 3:
        return False
    bounds = [constant(value) for value in node.inputs[1:3]]
    low, high = (np.nan if each is None else float(each.numpy().reshape(-1)[0]) for each in bounds)
    return low >= 0.0 and high <= 1.0


def _is_softmax(node: ir.Node, model: ir.Model) -> bool:
    """Return whether a node is a Softmax of at most ``1 / FAINT`` classes."""
    if not is_standard(node, "Softmax") or model.graph.opset_imports.get("", 0) < LAST_AXIS:
        return False
    output = node.outputs[0]
    shape = plain_shape(output) or plain_shape(inferred(model).get(str(output.name))) or ()
    axis = node.attributes.get_int("axis", -1)
    length = shape[axis] if -len(shape) <= axis < len(shape) else None
    return isinstance(length, int) and length * FAINT <= 1.0
