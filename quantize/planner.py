"""The first planner: a rule per operator. It decides; the emitters in `requant.transforms` carry out.

A unit computes in integers when the operator table has an integer form for it, the installed runtime has the kernel,
and its inputs come in uint8 or are worth a QuantizeLinear. Operators that only move values, and those that join
branches, follow their neighbours: they take uint8 where it arrives and is read on, and float elsewhere.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from .. import UnknownNameError
from ..transforms.graph import constant, inferred
from ..transforms.ops import OPS, Op, only_moves, why_float
from ..transforms.plan import Choice, Impl, Plan, Unit
from ..transforms.units import activations, node_name, units
from .runtime.kernels import uint8_kernels

# A first convolution, of few channels and without groups, is slower as a QLinearConv below this many products per
# output: on 1 or 3 channels 3x3 and 5x5 take 2.4 to 3.6 times as long in int8, a 7x7 on 3 channels 0.7 times.
LEAST_PRODUCTS = 64
FEW_CHANNELS = 8
# Branches whose ranges differ by more than this do not meet in uint8: the narrow one would keep under 4 bits.
WIDEST_SPREAD = 16.0
ALREADY = "its weights are quantized already"
FIRST_INTEGER_OPSET = 10  # of QLinearConv and QLinearMatMul
RANKS = {"Conv": (3, 4), "Gemm": (2,), "MatMul": (2,)}


@dataclass(frozen=True, slots=True)
class Selection:
    """What the user allows to become int8.

    Attributes:
        exclude_nodes: Node names that stay float.
        exclude_ops: Operator types that stay float.
        include_ops: The only operator types that may become int8; empty for all.
    """

    exclude_nodes: frozenset[str] = frozenset()
    exclude_ops: frozenset[str] = frozenset()
    include_ops: frozenset[str] = frozenset()

    def check(self, model: ir.Model) -> None:
        """Refuse names that nothing in `model` has.

        Raises:
            UnknownNameError: A node name or an operator type that the model does not have.
        """
        nodes = {node.name for node in model.graph.all_nodes() if node.name}
        types = {node.op_type for node in model.graph.all_nodes()}
        for name in sorted(self.exclude_nodes - nodes):
            raise UnknownNameError("node", name, nodes)
        for name in sorted((self.exclude_ops | self.include_ops) - types):
            raise UnknownNameError("operator in the model", name, types)

    def refuses(self, unit: Unit, types: Mapping[str, str]) -> str:
        """Say why the user does not want `unit` in int8; empty when there is nothing against it.

        Args:
            unit: A unit; what it absorbs counts too when it comes to excluding.
            types: Operator types by node name, as the user knows them.
        """
        if self.exclude_nodes.intersection(unit.nodes):
            return "excluded by name"
        excluded = self.exclude_ops.intersection(types[name] for name in unit.nodes)
        if excluded:
            return f"excluded: {min(excluded)}"
        if self.include_ops and types[unit.nodes[0]] not in self.include_ops:
            return "not among the included operators"
        return ""


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Attributes:
        nodes: The graph's nodes by name.
        types: Their operator types, as they were in the user's model.
        values: Its tensors by name, with types and shapes as far as they can be inferred.
        selection: What the user allows.
        ranges: Observed (lo, hi) by tensor; empty before calibration.
        kept_float: Tensors that must not be uint8, with the reason.
        opset: The model's version of the standard operators.
    """

    nodes: Mapping[str, ir.Node]
    types: Mapping[str, str]
    values: Mapping[str, ir.Value]
    selection: Selection
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    kept_float: Mapping[str, str] = field(default_factory=dict)
    opset: int = FIRST_INTEGER_OPSET


def choose(
    model: ir.Model,
    selection: Selection | None = None,
    *,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    kept_float: Mapping[str, str] | None = None,
    types: Mapping[str, str] | None = None,
) -> Plan:
    """Decide what becomes int8 in a simplified model.

    Args:
        model: All its nodes and tensors have names.
        selection: The user's wishes.
        ranges: Observed ranges. Without them the plan holds everything that might become int8, so that its
            ``quantized`` tensors are the ones to calibrate: ranges and `kept_float` only take units away.
        kept_float: Tensors that must stay float, with the reason.
        types: Operator types by node name in the user's own model, where simplifying has changed some.
    """
    nodes = {node_name(node): node for node in model.graph}
    facts = Facts(
        nodes=nodes,
        types={name: (types or {}).get(name, node.op_type) for name, node in nodes.items()},
        values=inferred(model),
        selection=selection or Selection(),
        ranges=ranges or {},
        kept_float=kept_float or {},
        opset=model.opset_imports.get("", FIRST_INTEGER_OPSET),
    )
    found = units(model.graph)
    obstacles = {unit.name: _obstacle(unit, facts) for unit in found}
    choices = {name: Choice(Impl.FLOAT, why) if why else Choice(Impl.U8) for name, why in obstacles.items()}
    _place_followers(found, choices)
    _drop_unwanted(found, choices, _captured(model.graph))
    return Plan(found, choices)


def _obstacle(unit: Unit, facts: Facts) -> str:
    """Say why `unit`, whatever its neighbours, cannot or should not compute in integers; empty when it can."""
    anchor = facts.nodes[unit.nodes[0]]
    row = OPS.get(unit.op)
    if unit.op == "group":
        return "the runtime fuses the group into one float kernel"
    if row is None or anchor.domain or row.kind == "float":
        return why_float(unit.op) if not anchor.domain else f"an operator of domain {anchor.domain}"
    refused = facts.selection.refuses(unit, facts.types)
    if refused:
        return refused
    if facts.opset < FIRST_INTEGER_OPSET:
        return f"opset {facts.opset} has no integer operators, and the model cannot be converted"
    if row.u8 not in uint8_kernels():
        return f"the installed runtime has no {row.u8 and row.u8[1]}"
    if any(not _is_float32(facts.values.get(name)) for name in (*unit.inputs, *unit.outputs)):
        return "its tensors are not float32"
    touched = unit.inputs if row.u8_float is not None else (*unit.inputs, *unit.outputs)
    held = next((facts.kept_float[t] for t in touched if t in facts.kept_float), "")
    if held:
        return held
    if row.kind == "compute":
        return _compute_obstacle(anchor, row)
    return _follower_obstacle(anchor, row, facts)


def _is_float32(value: ir.Value | None) -> bool:
    """Whether a tensor is known to be float32."""
    return value is not None and value.dtype is ir.DataType.FLOAT


def _is_dequantized(value: ir.Value | None) -> bool:
    """Whether a tensor comes out of a DequantizeLinear."""
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == "DequantizeLinear"


def _compute_obstacle(node: ir.Node, row: Op) -> str:
    """Say what keeps a Conv, Gemm or MatMul from computing in integers."""
    weight = constant(node.inputs[1])
    if weight is None and node.op_type == "MatMul" and not _is_dequantized(node.inputs[1]):
        return "both factors are activations, a small share of the work"
    if weight is None:
        return ALREADY if _is_dequantized(node.inputs[1]) else "computed weights"
    if weight.dtype is not ir.DataType.FLOAT:
        return "its weights are not float32"
    shape = [int(d) for d in weight.shape]  # type: ignore[arg-type]
    if len(shape) not in RANKS[node.op_type]:
        return f"weights of rank {len(shape)}"
    bias = node.inputs[row.bias] if row.bias is not None and len(node.inputs) > row.bias else None
    if bias is not None and constant(bias) is None:
        return "a computed bias"
    if node.op_type == "Gemm":
        return _gemm_obstacle(node, shape, bias)
    return _conv_obstacle(node, shape) if node.op_type == "Conv" else ""


def _conv_obstacle(node: ir.Node, shape: list[int]) -> str:
    """Say what makes a convolution slower in integers."""
    products = math.prod(shape[1:])
    if node.attributes.get_int("group", 1) == 1 and products < LEAST_PRODUCTS and shape[1] < FEW_CHANNELS:
        return f"{products} products per output are too few for the integer kernel"
    return ""


def _gemm_obstacle(node: ir.Node, shape: list[int], bias: ir.Value | None) -> str:
    """Say what keeps a Gemm from being a QGemm."""
    if node.attributes.get_int("transA", 0):
        return "a transposed activation"
    if node.attributes.get_float("alpha", 1.0) != 1.0 or node.attributes.get_float("beta", 1.0) != 1.0:
        return "alpha or beta is not 1"
    channels = shape[0 if node.attributes.get_int("transB", 0) else 1]
    tensor = constant(bias)
    return "" if tensor is None or tensor.size == channels else "its bias is not one value per column"


def _follower_obstacle(node: ir.Node, row: Op, facts: Facts) -> str:
    """Say what keeps an operator that follows its neighbours from running on uint8."""
    read = [v for v in activations(node) if v.name]
    if not read or (row.activations is None and any(constant(v) is not None for v in node.inputs)):
        return "a constant operand"
    if len(node.outputs) > 1:
        return "several outputs"
    if row.kind == "same" and not only_moves(node):
        return row.why
    if row.kind == "arith" and len(read) > 1:
        spread = _spread([facts.ranges[str(v.name)] for v in read if v.name in facts.ranges])
        if spread > WIDEST_SPREAD:
            return f"its inputs' ranges differ {spread:.0f}-fold"
    return ""


def _spread(ranges: Iterable[tuple[float, float]]) -> float:
    """Return the ratio of the widest range to the narrowest; 1 for fewer than two."""
    spans = [max(hi, 0.0) - min(lo, 0.0) for lo, hi in ranges]
    if len(spans) < 2:
        return 1.0
    return max(spans) / min(spans) if min(spans) > 0 else (1.0 if max(spans) == 0 else float("inf"))


def _place_followers(found: tuple[Unit, ...], choices: dict[str, Choice]) -> None:
    """Let an operator that follows its neighbours run on uint8 where that saves conversions.

    In uint8 it needs a QuantizeLinear for each input that no integer kernel writes or reads already; in float a
    DequantizeLinear for each input that an integer kernel writes, and a QuantizeLinear of its output.
    """
    computing = [u for u in found if choices[u.name].impl is Impl.U8 and OPS[u.op].kind == "compute"]
    written = {t for u in computing for t in u.outputs}
    available = written | {t for u in computing for t in u.inputs}
    for unit in found:
        if choices[unit.name].impl is Impl.FLOAT or OPS[unit.op].kind == "compute":
            continue
        if sum(t not in available for t in unit.inputs) < 1 + sum(t in written for t in unit.inputs):
            written.update(unit.outputs)
            available.update((*unit.inputs, *unit.outputs))
        else:
            choices[unit.name] = Choice(Impl.FLOAT, "its inputs come in float")


def _captured(graph: ir.Graph) -> set[str]:
    """Return the tensors that bodies of control flow read."""
    values = [value for node in graph for value in node.outputs]
    return {str(value.name) for value in values if any(use.node.graph is not graph for use in value.uses())}


def _drop_unwanted(found: tuple[Unit, ...], choices: dict[str, Choice], captured: set[str]) -> None:
    """Let followers whose uint8 nobody reads stay float, and products that nobody reads in uint8 write float.

    What moves values into a body stays in uint8: between a DequantizeLinear and a tensor that only a body reads it
    makes ONNX Runtime 1.31 abort.
    """
    readers: dict[str, list[Unit]] = defaultdict(list)
    for unit in found:
        for tensor in unit.inputs:
            readers[tensor].append(unit)
    for unit in reversed(found):
        if choices[unit.name].impl is not Impl.U8:
            continue
        wanted = any(choices[r.name].impl is not Impl.FLOAT for t in unit.outputs for r in readers[t])
        row = OPS[unit.op]
        wanted = wanted or (row.kind == "same" and not captured.isdisjoint(unit.outputs))
        if not wanted and row.kind != "compute":
            choices[unit.name] = Choice(Impl.FLOAT, "nothing after it computes in integers")
        elif not wanted and row.u8_float is not None and row.u8_float in uint8_kernels():
            choices[unit.name] = Choice(Impl.U8_FLOAT)
