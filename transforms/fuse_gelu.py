"""Fuse the operators of a GELU, so that no quantize/dequantize pair separates them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose, pi, sqrt

import onnx_ir as ir

from .graphs.queries import MS, computing_nodes, constant, is_standard, one_number, producer_of, scaled, sole_reader
from .graphs.rewriter import remove, replace_node
from .registry import Change, transform

HAS_GELU = 20  # the opset from which Gelu is a standard operator
CUBE = 0.044715


@dataclass(frozen=True, slots=True)
class FoundGelu:
    """A GELU: its input, its last node, and whether it is the approximation by tanh."""

    source: ir.Value
    last: ir.Node
    tanh: bool


@transform("fuse_gelu", after=("fold_constants",))
def fuse_gelu(model: ir.Model) -> Change:
    """Replace the operators of a GELU by one operator.

    Before:  y = 0.5 * x * (1 + Erf(x / sqrt(2)))
             z = 0.5 * x * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))), with x ** 3 or x * (x * x)
    After:   y = Gelu(x);  z = Gelu(x), approximate tanh: the standard operator from opset 20 on; below it
             com.microsoft.Gelu and com.microsoft.FastGelu
        The factors may be in any order, as Mul or Div. ONNX Runtime fuses a GELU in a float graph, but not behind a
        DequantizeLinear, because it gives each reader its own copy of the DequantizeLinear.
    Left alone: other constants, or constants with more axes than x (``other-constants``); intermediate results with
        other readers; other types than float32; functions of the model.
    """
    change = Change()
    for node in computing_nodes(model, "Erf", "Tanh"):
        gelu = find_gelu(node)
        if gelu is not None:
            _fuse(model, gelu)
            change.applied += 1
        elif node.op_type == "Erf":  # most Tanh nodes are not part of a GELU
            change.skip("other-constants")
    return change


def _fuse(model: ir.Model, gelu: FoundGelu) -> None:
    """Replace the operators of a GELU by one."""
    if model.opset_imports.get("", 0) >= HAS_GELU:
        attributes = {"approximate": "tanh"} if gelu.tanh else {}
        fused = ir.node("Gelu", [gelu.source], attributes, name=gelu.last.name)
    else:
        model.opset_imports[MS] = 1
        fused = ir.node("FastGelu" if gelu.tanh else "Gelu", [gelu.source], domain=MS, name=gelu.last.name)
    waiting = list(gelu.last.inputs)
    replace_node(gelu.last, fused)
    while waiting:
        value = waiting.pop()
        node = producer_of(value)
        if value is None or value is gelu.source or value.uses() or value.is_graph_output():
            continue
        if node is None or node.graph is None:  # a constant, removed with its reader
            continue
        waiting.extend(node.inputs)
        remove(node)


def find_gelu(node: ir.Node) -> FoundGelu | None:
    """Return the GELU that contains an Erf or Tanh; None without one, or if a constant adds axes to x."""
    found = _find(node)
    return None if found is None or _adds_axes(found) else found


def _adds_axes(gelu: FoundGelu) -> bool:
    """Whether a constant has more axes than x; where these are unknown, than one."""
    shape = gelu.source.shape
    axes = 1 if shape is None else len(shape)
    waiting, most = [*gelu.last.inputs], 0
    while waiting:
        value = waiting.pop()
        tensor, node = constant(value), producer_of(value)
        if tensor is not None:
            most = max(most, len(tensor.shape))
        elif node is not None and value is not gelu.source:
            waiting += node.inputs
    return most > axes


def _find(node: ir.Node) -> FoundGelu | None:
    """Return the GELU that contains an Erf or Tanh, whatever axes its constants have; None without one."""
    tanh = node.op_type == "Tanh"
    source = _cubic(node.inputs[0]) if tanh else _scaled(node.inputs[0], 1 / sqrt(2))
    added = sole_reader(node.outputs[0])
    if source is None or added is None or added.op_type != "Add" or _added(added) != 1.0:
        return None
    last, factor, has_x = added, 1.0, False  # has_x: the product contains the factor x
    while not (has_x and isclose(factor, 0.5, rel_tol=1e-3)):
        value = last.outputs[0]
        reader = sole_reader(value)
        if not is_standard(reader, "Mul", "Div"):
            return None
        found = scaled(reader, None, ir.DataType.FLOAT)
        if found is not None:
            factor *= found[1]
        elif reader.op_type == "Mul" and not has_x:
            other = next((each for each in reader.inputs if each is not value), None)
            scale = _multiple(other, source)
            if scale is None:
                return None
            factor, has_x = factor * scale, True
        else:
            return None
        last = reader
    return FoundGelu(source, last, tanh)


def _added(node: ir.Node) -> float | None:
    """Return the constant operand of an Add; None without one."""
    return next((number for value in node.inputs if (number := _number(value)) is not None), None)


def _number(value: ir.Value | None) -> float | None:
    """Return the value of a float32 constant with one element; None for anything else."""
    return one_number(value, None, ir.DataType.FLOAT)


def _scaled(value: ir.Value | None, factor: float) -> ir.Value | None:
    """Return x if a tensor is ``factor * x``, else None."""
    found = scaled(producer_of(value), None, ir.DataType.FLOAT)
    return found[0] if found is not None and isclose(found[1], factor, rel_tol=1e-3) else None


def _multiple(value: ir.Value | None, source: ir.Value) -> float | None:
    """Return the factor f if a tensor is ``f * source``, else None."""
    if value is source:
        return 1.0
    found = scaled(producer_of(value), None, ir.DataType.FLOAT)
    return found[1] if found is not None and found[0] is source else None


def _cubic(value: ir.Value | None) -> ir.Value | None:
    """Return x if a tensor is ``sqrt(2 / pi) * (x + 0.044715 * x ** 3)``, else None."""
    total = _scaled(value, sqrt(2 / pi))
    node = producer_of(total)
    if not is_standard(node, "Add") or len(node.inputs) != 2:
        return None
    for x, cube in (node.inputs, node.inputs[::-1]):
        powered = _scaled(cube, CUBE)
        if x is not None and powered is not None and _is_cube(powered, x):
            return x
    return None


def _is_cube(value: ir.Value, x: ir.Value) -> bool:
    """Return whether a tensor is ``x ** 3`` or ``x * (x * x)``."""
    node = value.producer()
    if node is None or node.domain or len(node.inputs) != 2:
        return False
    if node.op_type == "Pow":
        return node.inputs[0] is x and _number(node.inputs[1]) == 3
    other = next((each for each in node.inputs if each is not x), None)
    square = other.producer() if other is not None and node.op_type == "Mul" and x in node.inputs else None
    return square is not None and (square.op_type, square.domain) == ("Mul", "") and {*square.inputs} == {x}
