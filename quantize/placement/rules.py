"""The first planner: a rule per operator. It decides; the emitters in `requant.transforms` carry out.

A unit computes in integers when the operator table has an integer form for it, the installed runtime has the kernel,
and its inputs come in uint8 or are worth a QuantizeLinear. Operators that only move values, and those that join
branches, follow their neighbours: they take uint8 where it arrives and is read on, and float elsewhere.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import onnx_ir as ir

from ...transforms.graph import bodies, computing_graphs, constant, inferred, nodes_by_name, release
from ...transforms.int8_forms import gate_obstacle
from ...transforms.ops import GATE, MS, OPS, Kernel, Op, only_moves, why_float
from ...transforms.plan import Choice, Impl, Plan, Unit
from ...transforms.reasons import FUSED_GROUP, NONE, Reason, other
from ...transforms.units import activations, units
from ..options.declared import Strategy
from ..options.selection import ORDERS, Selection
from ..runtime.kernels import uint8_kernels

# A first convolution, of few channels and without groups, is slower as a QLinearConv below this many products per
# output: on 1 or 3 channels 3x3 and 5x5 take 2.4 to 3.6 times as long in int8, a 7x7 on 3 channels 0.7 times.
LEAST_PRODUCTS = 64
FEW_CHANNELS = 8
# Branches whose ranges differ by more than this do not meet in uint8: the narrow one would keep under 4 bits.
WIDEST_SPREAD = 16.0
LEAST_STORED = 2**16  # bytes of float32 below which weights that are computed with in float stay as they are
# A smaller LSTM is slower in integers: at 128 0.8 to 0.95x, at 256 1.3 to 3.1x, at 512 3.4x.
LEAST_HIDDEN = 192
ALREADY = Reason("quantized-weights", "its weights are quantized already")
NO_RANGES = "no ranges without data"
BOTH_ACTIVATIONS = "both factors are activations, a small share of the work"
FINITE: WeakKeyDictionary[ir.TensorProtocol, bool] = WeakKeyDictionary()
MEETING = frozenset({"Add", "Concat", "AveragePool", "GlobalAveragePool"})
"""What any runtime computes in integers, besides products and what moves values."""
Obstacle = Reason | str
"""Why a unit cannot have a form; empty where it can."""
STATIC_FORMS = (Impl.U8, Impl.U8_FLOAT, Impl.U8_GEMM)
FIRST_INTEGER_OPSET = 10  # of QLinearConv and QLinearMatMul
RANKS = {"Conv": (3, 4, 5), "Gemm": (2,), f"{MS}.Attention": (2,)}


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Attributes:
        nodes: The nodes of the graph and its bodies by name.
        types: Their operator types, as they were in the user's model.
        values: Their tensors by name, with types and shapes as far as they can be inferred.
        selection: What the user allows.
        static: Whether there are, or will be, ranges.
        ranges: Observed (lo, hi) by tensor; empty before calibration.
        kept_float: Tensors that must not be uint8, with the reason.
        opset: The model's version of the standard operators.
        signed: Whether activations are int8.
        anything: Whether to allow what no rule expects to pay.
        shifted: Whether weights may have a zero point.
        portable: Whether the model is for other runtimes too.
    """

    nodes: Mapping[str, ir.Node]
    types: Mapping[str, str]
    values: Mapping[str, ir.Value]
    selection: Selection
    static: bool = True
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    kept_float: Mapping[str, str] = field(default_factory=dict)
    opset: int = FIRST_INTEGER_OPSET
    signed: bool = False
    anything: bool = False
    shifted: bool = False
    portable: bool = False


def choose(
    model: ir.Model,
    selection: Selection | None = None,
    *,
    static: bool = True,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    kept_float: Mapping[str, str] | None = None,
    types: Mapping[str, str] | None = None,
    activation: str = "u8",
) -> Plan:
    """Decide what becomes int8 in a simplified model.

    Args:
        model: All its nodes and tensors have names, unique over the graph and its bodies.
        selection: The user's wishes.
        static: Whether there are data for ranges; without them only weights and dynamic products become int8.
        ranges: Observed ranges. Without them the plan holds everything that might become int8, so that its
            ``quantized`` tensors are the ones to calibrate: ranges and `kept_float` only take units away.
        kept_float: Tensors that must stay float, with the reason.
        types: Operator types by node name in the user's own model, where simplifying has changed some.
        activation: The integer type of activations, ``u8`` or ``s8``.
    """
    facts = facts_of(model, selection, types, activation)
    return choose_by(replace(facts, static=static, ranges=ranges or {}, kept_float=kept_float or {}), model)


def facts_of(
    model: ir.Model,
    selection: Selection | None = None,
    types: Mapping[str, str] | None = None,
    activation: str = "u8",
) -> Facts:
    """Return what the rules look at, of a simplified model; see `choose`."""
    nodes = nodes_by_name(model)
    return Facts(
        nodes=nodes,
        types={name: (types or {}).get(name, node.op_type) for name, node in nodes.items()},
        values=inferred(model, bodies=True),
        selection=selection or Selection(),
        opset=model.opset_imports.get("", FIRST_INTEGER_OPSET),
        signed=activation == "s8",
    )


def able(facts: Facts, plan: Plan) -> dict[str, tuple[Impl, ...]]:
    """Return between which implementations of a unit a measurement may decide, by unit name.

    Of most units that is float and every static integer form that nothing but slowness is opposed to. What the user
    has fixed, and what becomes int8 for its size, has the one that `plan` gives it.
    """
    free = replace(facts, anything=True)
    found: dict[str, tuple[Impl, ...]] = {}
    for unit in plan.units:
        row, impl = OPS.get(unit.op), plan.impl(unit)
        widest = _decide(unit, free).impl
        fixed = row is None or facts.selection.strategy_of(unit, row) is not Strategy.AUTO
        if row is None or fixed or not widest.reads_u8 or impl in (Impl.DYNAMIC, Impl.WEIGHT):
            found[unit.name] = (impl,)
            continue
        # asked for alone, a form has to do with what the unit writes too
        forms = [form for form in STATIC_FORMS if not OBSTACLES[form](unit, free, Strategy.STATIC)]
        found[unit.name] = (Impl.FLOAT, *forms) if forms else (impl,)
    return found


def choose_by(facts: Facts, model: ir.Model) -> Plan:
    """Decide by the rules what becomes int8, from what they look at."""
    found = tuple(_units(model.graph, facts.nodes, facts.opset))
    choices = {unit.name: _decide(unit, facts) for unit in found}
    _place_followers(found, choices)
    fixed = {u.name for u in found if u.op in OPS and facts.selection.strategy_of(u, OPS[u.op]) is Strategy.STATIC}
    _drop_unwanted(found, choices, _captured(model), fixed)
    if facts.portable:
        _write_float(found, choices, fixed)
    return Plan(found, choices, facts.portable)


def _units(graph: ir.Graph, nodes: Mapping[str, ir.Node], opset: int) -> Iterator[Unit]:
    """Yield the units of a graph, those of bodies before the node that runs them."""
    for unit in units(graph):
        for name in unit.nodes:
            for body in bodies(nodes[name], opset):
                yield from _units(body, nodes, opset)
        yield unit


def _decide(unit: Unit, facts: Facts) -> Choice:
    """Choose the first implementation of those that the user's strategy names to which nothing is opposed."""
    row, anchor = OPS.get(unit.op), facts.nodes[unit.nodes[0]]
    if unit.op == "group":
        return Choice(Impl.FLOAT, FUSED_GROUP)
    if row is None:
        foreign = other(f"an operator of domain {anchor.domain}") if anchor.domain else NONE
        return Choice(Impl.FLOAT, foreign or why_float(unit.op))
    refused = facts.selection.refuses(unit, facts.types)
    if refused:
        return Choice(Impl.FLOAT, other(refused))
    if unit.op == "Scan" and not bodies(anchor, facts.opset):
        return Choice(Impl.FLOAT, other("a Scan of opset 8 is not looked into"))
    if row.kind == "float" and not row.stores and row.dynamic is None:
        return Choice(Impl.FLOAT, why_float(unit.op))
    if facts.portable and row.kind == "arith" and unit.op not in MEETING:
        return Choice(Impl.FLOAT, other("other runtimes make it a part of the product before"))
    hard_swish = unit.op == GATE and anchor.op_type == "HardSigmoid"  # two kernels in float as well
    if row.slow and not facts.anything and not hard_swish:
        return Choice(Impl.FLOAT, row.slow)
    strategy = facts.selection.strategy_of(unit, row)
    reasons = []
    for impl in ORDERS[strategy]:
        reason = OBSTACLES[impl](unit, facts, strategy)
        if not reason:
            return Choice(impl)
        reasons.append(other(reason))
    telling = next((reason for reason in reasons if reason.code != NOT_OFFERED.code), NONE)
    if row.kind != "float":
        return Choice(Impl.FLOAT, telling or why_float(unit.op))
    return Choice(Impl.FLOAT, Reason(row.why.code, f"{row.why}; {telling}") if telling else row.why)


NOT_OFFERED = Reason("no-such-form", "it has no such form")


def _static_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Obstacle:
    """Say why `unit`, whatever its neighbours, cannot or should not compute on uint8; empty when it can."""
    row = OPS[unit.op]
    either = row.u8_float is not None or (facts.portable and row.kind == "compute")
    either = either and strategy is not Strategy.STATIC  # it may come to write float
    touched = unit.inputs if either else (*unit.inputs, *unit.outputs)
    return _u8_obstacle(unit, facts, strategy, row.u8, touched)


def _shifted_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Obstacle:
    """Say why `unit` cannot be a convolution whose weights have a zero point."""
    node = facts.nodes[unit.nodes[0]]
    if not facts.shifted or unit.op != "Conv" or node.attributes.get_int("group", 1) != 1:
        return NOT_OFFERED
    return _static_obstacle(unit, facts, strategy)


def _static_float_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Obstacle:
    """Say why `unit` cannot read uint8 and write float."""
    row = OPS[unit.op]
    if facts.signed and row.u8 is None and row.u8_float is not None:
        return f"{row.u8_float[1]} takes unsigned activations only"
    return _u8_obstacle(unit, facts, strategy, row.u8_float, unit.inputs)


def _u8_obstacle(
    unit: Unit, facts: Facts, strategy: Strategy, kernel: Kernel | None, touched: Iterable[str]
) -> Obstacle:
    """Say what is opposed to a kernel that reads uint8; `touched` are the tensors that then are uint8."""
    if kernel is None:
        return NOT_OFFERED
    if kernel not in uint8_kernels():
        return f"the installed runtime has no {kernel[1]}"
    if any(not _is_float32(facts.values.get(name)) for name in (*unit.inputs, *unit.outputs)):
        return "its tensors are not float32"
    held = next((facts.kept_float[t] for t in touched if t in facts.kept_float), "")
    anchor = facts.nodes[unit.nodes[0]]
    return held or _ranged_obstacle(unit, facts) or _form_obstacle(unit, anchor, OPS[unit.op], facts, strategy)


def _ranged_obstacle(unit: Unit, facts: Facts) -> Obstacle:
    """Say why there can be no static parameters, or none worth having."""
    if OPS[unit.op].kind == "compute" and facts.ranges.get(unit.inputs[0], (-1.0, 1.0)) == (0.0, 0.0):
        return "its input is zero in all the data, which tells no scale"  # nor one for the bias
    if facts.opset < FIRST_INTEGER_OPSET:
        return f"opset {facts.opset} has no integer operators, and the model cannot be converted"
    return "" if facts.static else NO_RANGES


def _dynamic_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Obstacle:
    """Say why `unit` cannot find its ranges at run time; empty when it can."""
    anchor, row = facts.nodes[unit.nodes[0]], OPS[unit.op]
    if row.dynamic is None or (strategy is Strategy.AUTO and row.kind == "compute" and facts.static):
        return NOT_OFFERED
    if facts.portable:
        return f"{row.dynamic[1]} is ONNX Runtime's own"
    if row.dynamic not in uint8_kernels():
        return f"the installed runtime has no {row.dynamic[1]}"
    if any(not _is_float32(facts.values.get(name)) for name in (*unit.inputs[:1], *unit.outputs)):
        return "its tensors are not float32"
    if unit.op == "LSTM":
        return _lstm_obstacle(anchor, strategy)
    weight = constant(anchor.inputs[1])
    if weight is not None and len(weight.shape) != 2:
        return f"weights of rank {len(weight.shape)}"
    return _compute_obstacle(anchor, row)


def _slowness(node: ir.Node) -> Obstacle:
    """Say why an operator with weights is expected to be slower in integers; empty where it is not."""
    weight = constant(node.inputs[1])
    return _few_products(node, [int(d) for d in weight.shape]) if node.op_type == "Conv" and weight is not None else ""  # type: ignore[arg-type]


def _lstm_obstacle(node: ir.Node, strategy: Strategy) -> Obstacle:
    """Say what keeps an LSTM from being a DynamicQuantizeLSTM."""
    weights = [constant(value) for value in node.inputs[1:3]]
    if any(tensor is None or tensor.dtype is not ir.DataType.FLOAT or not tensor.size for tensor in weights):
        return "its weights are not constants of float32"
    if not all(map(_is_finite, weights)):
        return "its weights are not finite"
    if node.attributes.get_int("layout", 0):
        return "its layout is batch first"
    hidden = node.attributes.get_int("hidden_size", 0)
    small = strategy is Strategy.AUTO and hidden < LEAST_HIDDEN
    return f"a state of {hidden} is too small for the integer kernel" if small else ""


def _stored_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Obstacle:
    """Say why the weights of `unit` are not int8 in the file while it computes in float."""
    anchor, row = facts.nodes[unit.nodes[0]], OPS[unit.op]
    if not row.stores or (strategy is Strategy.AUTO and row.kind == "compute"):
        return NOT_OFFERED
    weights = [constant(anchor.inputs[index]) for index in row.stores if index < len(anchor.inputs)]
    if any(tensor is None for tensor in weights):
        return NOT_OFFERED if unit.op == "Gather" else "computed weights"
    if any(tensor is not None and tensor.dtype is not ir.DataType.FLOAT for tensor in weights):
        return "its weights are not float32"
    if any(tensor is not None and len(tensor.shape) < 2 for tensor in weights):
        return "weights of one dimension"
    if unit.op == "Gather" and anchor.attributes.get_int("axis", 0) % len(weights[0].shape) != 0:  # type: ignore[union-attr]
        return "it does not gather rows"
    if not all(_is_finite(tensor) for tensor in weights if tensor is not None):
        return "its weights are not finite"
    least = 1 if strategy is Strategy.WEIGHT else LEAST_STORED
    small = all(tensor is not None and tensor.nbytes < least for tensor in weights)
    return "its weights are too few to matter" if small else ""


OBSTACLES = {
    Impl.U8: _static_obstacle,
    Impl.U8_GEMM: _shifted_obstacle,
    Impl.U8_FLOAT: _static_float_obstacle,
    Impl.DYNAMIC: _dynamic_obstacle,
    Impl.WEIGHT: _stored_obstacle,
}


def _form_obstacle(unit: Unit, node: ir.Node, row: Op, facts: Facts, strategy: Strategy) -> Obstacle:
    """Say what of its own form keeps an operator from computing on uint8."""
    if row.kind != "compute":
        return _follower_obstacle(node, row, facts)
    if unit.op == "MatMul" and len(activations(node)) > 1:
        allowed = strategy is not Strategy.AUTO or facts.anything
        return ALREADY if _is_dequantized(node.inputs[1]) else "" if allowed else BOTH_ACTIVATIONS
    return _compute_obstacle(node, row) or ("" if facts.anything or facts.portable else _slowness(node))


def _is_float32(value: ir.Value | None) -> bool:
    """Whether a tensor is known to be float32."""
    return value is not None and value.dtype is ir.DataType.FLOAT


def _is_dequantized(value: ir.Value | None) -> bool:
    """Whether a tensor comes out of a DequantizeLinear."""
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == "DequantizeLinear"


def _compute_obstacle(node: ir.Node, row: Op) -> Obstacle:
    """Say what keeps an operator with weights from computing in integers."""
    weight = constant(node.inputs[1])
    if weight is None:
        return ALREADY if _is_dequantized(node.inputs[1]) else "computed weights"
    if weight.dtype is not ir.DataType.FLOAT:
        return "its weights are not float32"
    shape = [int(d) for d in weight.shape]  # type: ignore[arg-type]
    if len(shape) not in RANKS.get(node.op_type, range(2, 9)):
        return f"weights of rank {len(shape)}"
    if not weight.size or not _is_finite(weight):
        return "its weights are not finite" if weight.size else "its weights are empty"
    if constant(node.inputs[0]) is not None:
        return "both its operands are constant"
    bias = node.inputs[row.bias] if row.bias is not None and len(node.inputs) > row.bias else None
    if bias is not None and constant(bias) is None:
        return "a computed bias"
    if bias is not None and not _is_finite(constant(bias)):
        return "its bias is not finite"
    rule = {"Gemm": _gemm_obstacle, "Attention": _attention_obstacle}.get(node.op_type)
    return rule(node, shape, bias) if rule is not None else ""


def _is_finite(tensor: ir.TensorProtocol | None) -> bool:
    """Whether all values of a float tensor are finite; each tensor is read once."""
    if tensor is None:
        return True
    if tensor not in FINITE:
        FINITE[tensor] = bool(np.isfinite(tensor.numpy().sum(dtype=np.float64)))  # of float32 no such sum overflows
        release(tensor)
    return FINITE[tensor]


def _few_products(node: ir.Node, shape: list[int]) -> str:
    """Say what makes a convolution slower in integers."""
    products = math.prod(shape[1:])
    if node.attributes.get_int("group", 1) == 1 and products < LEAST_PRODUCTS and shape[1] < FEW_CHANNELS:
        return f"{products} products per output are too few for the integer kernel"
    return ""


def _attention_obstacle(node: ir.Node, shape: list[int], bias: ir.Value | None) -> Obstacle:
    """Say what a QAttention has not that an Attention may have."""
    spare = [value for value in node.inputs[5:] if value is not None]
    sizes = node.attributes.get_ints("qkv_hidden_sizes", None)
    rotary: list[int] = [node.attributes.get_int(name, 0) for name in ("do_rotary", "rotary_embedding_dim")]
    if spare or sizes or any(rotary):
        return "QAttention has no such attention"
    if len(node.inputs) < 3 or constant(node.inputs[2]) is None:
        return "it has no constant bias"
    return ""


def _gemm_obstacle(node: ir.Node, shape: list[int], bias: ir.Value | None) -> Obstacle:
    """Say what keeps a Gemm from being a QGemm."""
    if node.attributes.get_int("transA", 0):
        return "a transposed activation"
    if node.attributes.get_float("alpha", 1.0) != 1.0 or node.attributes.get_float("beta", 1.0) != 1.0:
        return "alpha or beta is not 1"
    channels = shape[0 if node.attributes.get_int("transB", 0) else 1]
    tensor = constant(bias)
    per_column = tensor is None or tensor.size == channels == (tensor.shape[-1] if len(tensor.shape) else 1)
    return "" if per_column else "its bias is not one value per column"


def _follower_obstacle(node: ir.Node, row: Op, facts: Facts) -> Obstacle:
    """Say what keeps an operator that follows its neighbours from running on uint8."""
    read = [v for v in activations(node) if v.name]
    if not read:
        return "a constant operand"
    if node.op_type == "HardSigmoid":
        return "a lookup of signed integers is not written" if facts.signed else gate_obstacle(node)
    if row.kind == "same":
        return _moved_obstacle(node, row, facts)
    if node.op_type == "AveragePool" and any(step != 1 for step in node.attributes.get_ints("dilations", ())):
        return "QLinearAveragePool has no dilations"
    if node.op_type == "AveragePool" and all(node.attributes.get_int(n, 0) for n in ("ceil_mode", "count_include_pad")):
        return "the integer kernel counts other padding where the last window is cut off"
    ranges = [facts.ranges[str(v.name)] for v in read if v.name in facts.ranges]
    for index in row.activations or range(len(node.inputs)):
        tensor = constant(node.inputs[index])
        if tensor is None:
            continue
        if tensor.dtype is not ir.DataType.FLOAT or not tensor.size:
            return "a constant operand that is not float32"
        values = tensor.numpy()
        if not np.isfinite(values).all():
            return "a constant operand that is not finite"
        ranges.append((float(values.min()), float(values.max())))
    spread = _spread(ranges) if node.op_type != "Mul" else 1.0  # the factors of a product keep a scale each
    return f"its inputs' ranges differ {spread:.0f}-fold" if spread > WIDEST_SPREAD else ""


def _moved_obstacle(node: ir.Node, row: Op, facts: Facts) -> Obstacle:
    """Say why an operator of kind ``same`` does not give values of its first input alone."""
    if not only_moves(node):
        return row.why or "several outputs"
    if node.op_type != "Pad" or node.attributes.get_string("mode", "constant") != "constant":
        return ""
    filling = node.inputs[2] if len(node.inputs) > 2 else None
    tensor = constant(filling)
    value = 0.0 if filling is None else None if tensor is None else float(tensor.numpy().reshape(-1)[0])
    if facts.opset < 13 or value is None:
        return "before opset 13, or with a computed value, Pad has no form on uint8"
    return "" if value == 0.0 else "it pads with another value than zero"


def _spread(ranges: Iterable[tuple[float, float]]) -> float:
    """Return the ratio of the widest range to the narrowest; 1 for fewer than two. Zero is exact on any scale."""
    spans = [span for lo, hi in ranges if (span := max(hi, 0.0) - min(lo, 0.0)) > 0]
    return max(spans) / min(spans) if spans else 1.0


def _place_followers(found: tuple[Unit, ...], choices: dict[str, Choice]) -> None:
    """Let an operator that follows its neighbours run on uint8 where that saves conversions.

    In uint8 it needs a QuantizeLinear for each input that no integer kernel writes or reads already; in float a
    DequantizeLinear for each input that an integer kernel writes, and a QuantizeLinear of its output. Matrix products
    write float as readily as uint8, so that adding or multiplying their results in uint8 saves nothing and costs a
    rounding: a transformer is faster and more accurate with nothing but its products in integers.
    """
    computing = [u for u in found if choices[u.name].impl.reads_u8 and OPS[u.op].kind == "compute"]
    written = {t for u in computing if choices[u.name].impl is Impl.U8 for t in u.outputs}
    either = {t for u in computing if OPS[u.op].u8_float is not None for t in u.outputs}
    available = written | {t for u in computing for t in u.inputs}
    for unit in found:
        if not choices[unit.name].impl.reads_u8 or OPS[unit.op].kind == "compute":
            continue
        held = [t for t in unit.inputs if t in available and t not in either]
        missing = sum(t not in available for t in unit.inputs)
        if missing < 1 + sum(t in written for t in held) and (held or OPS[unit.op].kind == "same"):
            written.update(unit.outputs)
            available.update((*unit.inputs, *unit.outputs))
            if not held:
                either.update(unit.outputs)
        else:
            choices[unit.name] = Choice(Impl.FLOAT, other("its inputs come in float"))


def _write_float(found: tuple[Unit, ...], choices: dict[str, Choice], fixed: set[str]) -> None:
    """Let products write float that nobody reads in uint8: other runtimes need no pair behind them."""
    read = {tensor for unit in found if choices[unit.name].impl.reads_u8 for tensor in unit.inputs}
    for unit in found:
        unread = read.isdisjoint(unit.outputs) and unit.name not in fixed
        if unread and choices[unit.name].impl is Impl.U8 and OPS[unit.op].kind == "compute":
            choices[unit.name] = Choice(Impl.U8_FLOAT)


def _captured(model: ir.Model) -> set[str]:
    """Return the tensors that bodies of control flow inside their own graph read."""
    values = [(value, node.graph) for graph in computing_graphs(model) for node in graph for value in node.outputs]
    return {str(value.name) for value, graph in values if any(use.node.graph is not graph for use in value.uses())}


def _drop_unwanted(found: tuple[Unit, ...], choices: dict[str, Choice], captured: set[str], fixed: set[str]) -> None:
    """Let followers whose uint8 nobody reads stay float, and products that nobody reads in uint8 write float.

    Products of which the user wants uint8 (`fixed`) keep it. What moves values into a body stays in uint8: between a
    DequantizeLinear and a tensor that only a body reads it makes ONNX Runtime 1.31 abort.
    """
    readers: dict[str, list[Unit]] = defaultdict(list)
    for unit in found:
        for tensor in unit.inputs:
            readers[tensor].append(unit)
    for unit in reversed(found):
        if choices[unit.name].impl is not Impl.U8:
            continue
        wanted = any(choices[r.name].impl.reads_u8 for t in unit.outputs for r in readers[t])
        row = OPS[unit.op]
        wanted = wanted or (row.kind == "same" and not captured.isdisjoint(unit.outputs))
        if not wanted and row.kind != "compute":
            choices[unit.name] = Choice(Impl.FLOAT, other("nothing after it computes in integers"))
        elif not wanted and unit.name not in fixed and row.u8_float is not None and row.u8_float in uint8_kernels():
            choices[unit.name] = Choice(Impl.U8_FLOAT)
