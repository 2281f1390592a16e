"""A float model with a switch wherever a plan puts integers: any part of the plan is tried in one session.

A switch is an If, of which only the branch that is asked for runs. Of a unit of the plan one branch holds a float copy,
and the other one a copy behind further switches: whether a tensor passes through QuantizeLinear and DequantizeLinear,
and whether the weights are the dequantized ones. So a unit all of whose switches are off costs an If and no more, and
the runtime packs the weights of either copy. A factor of 0 or 1 on the difference, or a Where, would compute both, and
a convolution whose weights are computed runs without their packed layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx_ir as ir

from .. import RequantError
from ..calibration.execution import cpus
from ..calibration.samples import Sample
from ..calibration.session import Array, Feed, open_session, runtime_message
from ..calibration.stamps import model_stamp
from ..transforms.graph import add_initializer, constant, fresh_name, graph_of, nodes_by_name, remove
from ..transforms.int8_forms import gate_params
from ..transforms.int8_weights import Adjustment, WeightWriter
from ..transforms.ops import GATE, OPS
from ..transforms.plan import Impl, Plan, Unit
from ..transforms.qparams import QParams, Scheme, asymmetric_u8, dequantize, quantize, symmetric_s8
from ..transforms.units import activations
from ..transforms.writer import Writer
from .accuracy import balance, balanced_noise, powers
from .files import Weights, serialize

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

SWITCHES = "requant_switches"
FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)")
FIRST_SPLIT_INPUT = 13  # the opset in which the sizes of Split became an input

Powers: TypeAlias = dict[str, tuple[float, float]]
"""The sums of squares of each output and of its noise."""
Constants: TypeAlias = Mapping[str, Mapping[int, Array]]
"""By unit and index of the input of its first node, the float32 values that its integers stand for."""


@dataclass(frozen=True, slots=True, order=True)
class Switch:
    """A place that can be had in float, or as it is in integers.

    Attributes:
        unit: The unit that reads the tensor, or whose constants these are; empty for all others that read the tensor:
            operators that stay float in any case, and the user.
        tensor: The tensor that passes through integers; empty for the constants of the unit.
    """

    unit: str
    tensor: str


@dataclass(frozen=True, slots=True, eq=False)
class _Tap:
    """A tensor on its way to some of its readers.

    Attributes:
        value: The tensor.
        uses: Those readers, with which of their inputs it is.
        shown: Whether a graph output is among them.
        params: Scale and zero point; None where they are found at run time.
    """

    value: ir.Value
    uses: Sequence[tuple[ir.Node, int]]
    shown: bool
    params: QParams | None

    @property
    def now(self) -> ir.Value:
        """The tensor; where the unit that makes it has got switches, what took its place."""
        found = next((node.inputs[index] for node, index in self.uses), None)
        return found or self.value


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A unit with its switches.

    Attributes:
        nodes: Its nodes.
        taps: The tensors that it reads in integers, each with its switch.
        arrays: What its constants become.
        doubled: The switch of its constants, if it has any.
        some: Whether any of these switches is on.
    """

    nodes: Sequence[ir.Node]
    taps: Sequence[tuple[_Tap, ir.Value]]
    arrays: Mapping[int, Array]
    doubled: ir.Value | None
    some: ir.Value

    @property
    def encloses(self) -> bool:
        """Whether its last result is all that anyone reads of it, so that it can stand in a body."""
        inner = [output for node in self.nodes[:-1] for output in node.outputs]
        readers = {use.node for output in inner for use in output.uses()}
        single = all(len(node.outputs) == 1 for node in self.nodes)
        return single and readers <= set(self.nodes) and not any(output.is_graph_output() for output in inner)


@dataclass(frozen=True)
class Switchboard:
    """A model that runs with any part of a plan in integers; made by `switchboard` or `tensor_switches`.

    Attributes:
        session: The model in the runtime, on one thread: runs at the same time do not disturb each other.
        outputs: The float outputs.
        switches: The switches, with the place of each in the input that sets them.
        parts: The units that have switches, each with the place that says whether any of these is on.
        plan: The plan whose integers can be had.
        identity: What changes when the model, its weights, scales or switches do.
    """

    session: InferenceSession
    outputs: tuple[str, ...]
    switches: Mapping[Switch, int]
    parts: Mapping[str, int] = field(default_factory=dict)
    plan: Plan = field(default_factory=lambda: Plan((), {}))
    identity: str = ""

    @property
    def everything(self) -> frozenset[Switch]:
        """All switches: the outputs are those of the integer model."""
        return frozenset(self.switches)

    def unit(self, name: str) -> frozenset[Switch]:
        """The switches of a unit: its constants, and what it reads; what it writes only where nobody reads that so."""
        outputs = {tensor for unit in self.plan.units if unit.name == name for tensor in unit.outputs}
        return frozenset(s for s in self.switches if s.unit == name or (not s.unit and s.tensor in outputs))

    def tensor(self, name: str) -> frozenset[Switch]:
        """The switches of a tensor for all who read it, or what has its scale."""
        return frozenset(s for s in self.switches if s.tensor and self.plan.root(s.tensor) == name)

    def constants(self, unit: str) -> frozenset[Switch]:
        """The switch of the constants of a unit; none where it has no constants."""
        return frozenset({Switch(unit, "")} & self.switches.keys())

    def of(self, plan: Plan) -> frozenset[Switch]:
        """Return the switches of another plan, in which fewer units are in integers, and those in the same form.

        A tensor that an integer kernel writes is in integers for all who read it, another one for those who compute
        on it in integers. What moves values keeps the scale that it has in the whole plan.
        """
        integer = {unit.name for unit in plan.units if plan.impl(unit).int8}
        return frozenset(s for s in self.switches if s.unit in integer or s.tensor in plan.produced_u8)

    def run(self, feed: Feed, on: Collection[Switch] = ()) -> dict[str, Array]:
        """Return the float outputs with some switches on.

        Raises:
            RequantError: The runtime refuses the feed.
        """
        fed = dict(feed)
        if self.switches:
            fed[SWITCHES] = np.zeros(len(self.switches) + len(self.parts), np.bool_)
            fed[SWITCHES][[self.switches[switch] for switch in on]] = True
            fed[SWITCHES][[self.parts[switch.unit] for switch in on if switch.unit]] = True
        try:
            return dict(zip(self.outputs, self.session.run(list(self.outputs), fed), strict=True))
        except Exception as error:  # the runtime's exceptions share no base class of their own
            raise RequantError(f"the model fails: {runtime_message(error)}") from error


def switchboard(
    model: ir.Model,
    plan: Plan,
    qparams: Mapping[str, QParams],
    constants: Constants | None = None,
    *,
    optimize: bool = True,
    folder: Path | None = None,
) -> Switchboard:
    """Open a session in which any part of a plan can be in integers.

    Weights are there three times, twice in float, so that those of a large model had better be left out.

    Args:
        model: The simplified float model that the plan is of.
        plan: What can be in integers.
        qparams: Scale and zero point of every tensor in ``plan.observed``.
        constants: What `integer_constants` returns; units that are not there keep their own.
        optimize: Whether the runtime may rewrite the graph: ONNX Runtime 1.31 aborts where it finds a DequantizeLinear,
            a Transpose or the like, and a reader in one of the bodies that are put in.
        folder: Where large weights may be put.

    Raises:
        RequantError: The runtime cannot load it.
    """
    copy = model.clone()
    taps = _taps(copy, plan, qparams)
    arrays = {name: found for name, found in (constants or {}).items() if found}
    switches = [*taps, *(Switch(name, "") for name in arrays)]
    parts = [unit for unit in plan.units if any(switch.unit == unit.name for switch in switches)]
    wires = _wires(copy, len(switches) + len(parts))
    wired = dict(zip(switches, wires, strict=False))
    for index, switch in enumerate(taps):
        if not switch.unit:
            _insert_tap(copy, taps[switch], wired[switch], f"requant_tap_{index}")
    nodes = nodes_by_name(copy)
    for index, (unit, some) in enumerate(zip(parts, wires[len(switches) :], strict=True)):
        part = _Part(
            [nodes[name] for name in unit.nodes],
            [(taps[switch], wired[switch]) for switch in taps if switch.unit == unit.name],
            arrays.get(unit.name, {}),
            wired.get(Switch(unit.name, "")),
            some,
        )
        _insert_part(copy, part, f"requant_unit_{index}")
    places = {unit.name: len(switches) + index for index, unit in enumerate(parts)}
    return _opened(copy, switches, places, plan, optimize=optimize, folder=folder)


def tensor_switches(
    model: ir.Model, qparams: Mapping[str, QParams], *, optimize: bool = True, folder: Path | None = None
) -> Switchboard:
    """Open a session with one switch, ``Switch("", name)``, for each of some tensors of the main graph.

    Args:
        model: A float model.
        qparams: Scale and zero point of each tensor.
        optimize: As for `switchboard`.
        folder: Where large weights may be put.

    Raises:
        RequantError: The runtime cannot load it.
    """
    copy = model.clone()
    values = ir.convenience.create_value_mapping(copy.graph, include_subgraphs=False)
    taps = {Switch("", name): _everyone(values[name], (), params) for name, params in qparams.items()}
    for index, (tap, wire) in enumerate(zip(taps.values(), _wires(copy, len(taps)), strict=True)):
        _insert_tap(copy, tap, wire, f"requant_tap_{index}")
    return _opened(copy, list(taps), {}, Plan((), {}), optimize=optimize, folder=folder)


def integer_constants(
    model: ir.Model,
    plan: Plan,
    qparams: Mapping[str, QParams],
    *,
    scheme: Scheme | None = None,
    means: Mapping[str, Array] | None = None,
    adjusted: Mapping[str, Adjustment] | None = None,
    exact: bool = True,
) -> dict[str, dict[int, Array]]:
    """Return the values that the integer constants of a plan's units stand for: weights, biases and operands.

    Arguments as of `insert_qdq`. The biases behind a MatMul, of an operator of its own, are not among them.
    """
    scheme = scheme or Scheme()
    copy = model.clone()
    adjusted = adjusted or {}
    writer = WeightWriter(
        Writer.of(copy, scheme), scheme.weight_params, means=means or {}, adjusted=adjusted, exact=exact
    )
    nodes = nodes_by_name(copy)
    qparams = _with_lookups(plan, nodes, qparams)
    found = {}
    for unit in plan.units:
        node = nodes[unit.nodes[0]]
        if plan.impl(unit).reads_u8:
            found[unit.name] = _static(node, unit, qparams[plan.root(unit.inputs[0])], scheme, writer)
        elif plan.impl(unit).int8:
            found[unit.name] = _stored(node, unit, plan.impl(unit), scheme)
    return {name: arrays for name, arrays in found.items() if arrays}


def noises(
    board: Switchboard, trials: Iterable[Collection[Switch]], samples: Sequence[Sample], workers: int | None = None
) -> Iterator[Powers]:
    """Yield for each trial, a set of switches that are on, the powers of the outputs and of their noise.

    Where the channels of an output are of different magnitudes, as where offsets of boxes and scores are joined, the
    noise counts in each channel relative to that channel's own power (`balance`), if that is more.

    Several trials run at a time; what comes of them does not depend on how many.

    Args:
        board: The model.
        trials: What is on.
        samples: What each is run on.
        workers: How many run at a time; None for one per CPU.

    Raises:
        RequantError: The model fails on a sample.
    """

    def outputs(sample: Sample, on: Collection[Switch]) -> dict[str, Array]:
        try:
            return board.run(sample.feed, on)
        except RequantError as error:
            raise RequantError(f"{sample.where}: {error}") from error

    def trial(on: Collection[Switch]) -> Powers:
        total = {name: np.zeros(3) for name in board.outputs}
        for sample, reference in zip(samples, references, strict=True):
            for name, value in outputs(sample, on).items():
                exact = reference[name]
                total[name] += (*powers(exact, value), balanced_noise(exact, value, balances[name]))
        # not np.maximum, of which NaN, the noise of what is not finite, would come too
        return {name: (float(sums[0]), float(max(sums[1], sums[2]))) for name, sums in total.items()}

    pool = ThreadPoolExecutor(workers or cpus())
    try:
        references = list(pool.map(lambda sample: outputs(sample, ()), samples))
        balances = {name: balance([reference[name] for reference in references]) for name in board.outputs}
        yield from pool.map(trial, trials)
    finally:
        pool.shutdown(cancel_futures=True)


def _opened(
    copy: ir.Model,
    switches: Sequence[Switch],
    parts: Mapping[str, int],
    plan: Plan,
    *,
    optimize: bool,
    folder: Path | None,
) -> Switchboard:
    """Open the session of a model that has its switches."""
    source = serialize(copy, folder)
    session = open_session(source, threads=1, optimize=optimize, lean=Weights.of(copy).lumpy)
    outputs = tuple(output.name for output in session.get_outputs() if output.type in FLOATS)
    places = {switch: index for index, switch in enumerate(switches)}
    return Switchboard(session, outputs, places, parts, plan, repr((model_stamp(source), switches)))


def _with_lookups(plan: Plan, nodes: Mapping[str, ir.Node], qparams: Mapping[str, QParams]) -> dict[str, QParams]:
    """Return parameters in which the result of a HardSigmoid has those of its lookup."""
    integer = (nodes[name] for unit in plan.units if plan.impl(unit).reads_u8 for name in unit.nodes)
    return {**qparams, **{str(n.outputs[0].name): gate_params(n) for n in integer if n.op_type == "HardSigmoid"}}


def _taps(model: ir.Model, plan: Plan, qparams: Mapping[str, QParams]) -> dict[Switch, _Tap]:
    """Return where tensors pass through integers."""
    nodes = nodes_by_name(model)
    qparams = _with_lookups(plan, nodes, qparams)
    values = ir.convenience.create_value_mapping(model.graph)
    taps: dict[Switch, _Tap] = {}
    for unit in plan.units:
        impl, first = plan.impl(unit), nodes[unit.nodes[0]]
        readers = [nodes[name] for name in unit.nodes] if unit.op == GATE else [first]
        if impl.reads_u8:
            inside = [str(first.outputs[0].name)] if unit.op == GATE else []
            for tensor in (*unit.inputs, *inside):
                params = qparams[plan.root(tensor)] if tensor not in inside else qparams.get(tensor)
                params = params or asymmetric_u8(0.0, 1.0)  # of a sigmoid
                taps[Switch(unit.name, tensor)] = _Tap(values[tensor], _uses(readers, tensor), False, params)
        elif impl is Impl.DYNAMIC:
            for tensor in unit.inputs[:1]:
                taps[Switch(unit.name, tensor)] = _Tap(values[tensor], _uses(readers, tensor), False, None)
    taken = [use for tap in taps.values() for use in tap.uses]
    for tensor in sorted(plan.produced_u8, key=list(plan.quantized).index):
        tap = _everyone(values[tensor], taken, qparams[plan.root(tensor)])
        if tap.uses or tap.shown:
            taps[Switch("", tensor)] = tap
    return taps


def _uses(readers: Iterable[ir.Node], tensor: str) -> list[tuple[ir.Node, int]]:
    """Return which inputs of some nodes are a tensor, and carry activations."""
    inputs = ((node, index, value) for node in readers for index, value in enumerate(node.inputs) if value is not None)
    return [(node, index) for node, index, value in inputs if value.name == tensor and value in activations(node)]


def _everyone(value: ir.Value, but: Iterable[tuple[ir.Node, int]], params: QParams) -> _Tap:
    """Return a tensor on its way to all its readers but some."""
    others = {(id(node), index) for node, index in but}
    uses = [(use.node, use.idx) for use in value.uses() if (id(use.node), use.idx) not in others]
    return _Tap(value, uses, value.is_graph_output(), params)


def _wires(model: ir.Model, count: int) -> list[ir.Value]:
    """Give a model an input of so many switches, bool (count,), and return each of them as a tensor of one element."""
    if not count:
        return []
    graph = model.graph
    switches = ir.val(SWITCHES, dtype=ir.DataType.BOOL, shape=[count])
    graph.inputs.append(switches)
    named = model.opset_imports.get("", 1) >= FIRST_SPLIT_INPUT
    ones = np.ones(count, np.int64)
    inputs = [switches, add_initializer(graph, fresh_name(model, f"{SWITCHES}_sizes"), ones)] if named else [switches]
    attributes = {} if named else {"split": ones.tolist()}
    split = ir.node("Split", inputs, attributes, num_outputs=count, name=fresh_name(model, f"{SWITCHES}_split"))
    for index, output in enumerate(split.outputs):
        output.name, output.type, output.shape = f"{SWITCHES}_{index}", switches.type, ir.Shape([1])
    graph.insert_before(graph[0], [split])
    return list(split.outputs)


def _insert_tap(model: ir.Model, tap: _Tap, wire: ir.Value, stem: str) -> None:
    """Let some readers of a tensor read it through integers when `wire` is true."""
    value, producer = tap.now, tap.now.producer()
    owner = value.graph if tap.shown or not tap.uses else _home(tap)
    assert isinstance(owner, ir.Graph)  # functions are inlined
    choose = _tapped(value, tap.params, wire, stem)
    result = choose.outputs[0]
    if owner is value.graph and producer is not None:
        owner.insert_after(producer, [choose])
    else:
        owner.insert_before(_after_wires(owner, wire), [choose])
    for node, index in tap.uses:
        node.replace_input_with(index, result)
    if tap.shown:
        for position, output in enumerate(owner.outputs):
            if output is value:
                owner.outputs[position] = result
        result.name, value.name = value.name, f"{stem}_input"


def _tapped(value: ir.Value, params: QParams | None, wire: ir.Value, stem: str) -> ir.Node:
    """Return an If that gives a tensor through integers when `wire` is true, else as it is."""
    branches = {"then_branch": _passed(value, stem, params), "else_branch": _copied(value, stem)}
    choose = ir.node("If", [wire], branches, name=stem)
    result = choose.outputs[0]
    result.name, result.type, result.shape = f"{stem}_output", value.type, value.shape
    return choose


def _home(tap: _Tap) -> ir.Graph:
    """Return the graph in which a tap stands: that of its readers where they are in one, else that of the tensor."""
    graphs = {graph_of(node) for node, _ in tap.uses}
    own = tap.now.graph
    assert isinstance(own, ir.Graph)
    return graphs.pop() if len(graphs) == 1 else own


def _after_wires(graph: ir.Graph, wire: ir.Value) -> ir.Node:
    """Return the first node of a graph before which a switch can be read."""
    split = wire.producer()
    nodes = iter(graph)
    first = next(nodes)
    return next(nodes) if first is split else first


def _passed(value: ir.Value, stem: str, params: QParams | None) -> ir.Graph:
    """Return a body that gives a tensor through integers."""
    body = ir.Graph([], [], nodes=[], name=f"{stem}_then")
    if params is None:
        q = ir.node("DynamicQuantizeLinear", [value], num_outputs=3, name=f"{stem}_q")
        parameters = list(q.outputs[1:])
    else:
        parts = (("scale", params.scale), ("zero_point", params.zero_point))
        parameters = [add_initializer(body, f"{stem}_{part}", np.asarray(array)) for part, array in parts]
        q = ir.node("QuantizeLinear", [value, *parameters], name=f"{stem}_q")
    for index, output in enumerate(q.outputs):
        output.name = f"{stem}_q_{index}"
    dq = ir.node("DequantizeLinear", [q.outputs[0], *parameters], name=f"{stem}_dq")
    return _finished(body, [q, dq], value, f"{stem}_passed")


def _copied(value: ir.Value, stem: str) -> ir.Graph:
    """Return a body that gives a tensor as it is."""
    body = ir.Graph([], [], nodes=[], name=f"{stem}_else")
    return _finished(body, [ir.node("Identity", [value], name=f"{stem}_same")], value, f"{stem}_copied")


def _finished(body: ir.Graph, nodes: Sequence[ir.Node], like: ir.Value, name: str) -> ir.Graph:
    """Give a body its nodes and its one output, the result of the last of them."""
    body.extend(nodes)
    output = nodes[-1].outputs[0]
    output.name, output.type = name, like.type or ir.TensorType(ir.DataType.FLOAT)
    body.outputs.append(output)
    return body


def _insert_part(model: ir.Model, part: _Part, stem: str) -> None:
    """Put the switches of a unit in."""
    if not part.encloses:  # a Split or an LSTM: its operands are chosen in front of it
        for index, (tap, wire) in enumerate(part.taps):
            _insert_tap(model, tap, wire, f"{stem}_tap_{index}")
        if part.doubled is not None:
            _choose_constants(part.nodes[0], part.arrays, part.doubled, stem)
        return
    nodes, last = part.nodes, part.nodes[-1]
    branches = {
        "then_branch": _switched(part, f"{stem}_then"),
        "else_branch": _branch(nodes, {}, {}, f"{stem}_else"),
    }
    choose = ir.node("If", [part.some], branches, name=stem)
    result, old, graph = choose.outputs[0], last.outputs[0], graph_of(last)
    result.type, result.shape, name = old.type, old.shape, old.name
    graph.insert_after(last, [choose])
    old.replace_all_uses_with(result, replace_graph_outputs=True)
    for node in reversed(nodes):
        remove(node)
    result.name = name


def _switched(part: _Part, stem: str) -> ir.Graph:
    """Return a body with a copy of a unit that has its switches."""
    places = {node: position for position, node in enumerate(part.nodes)}
    if part.doubled is not None and not part.taps:
        return _branch(part.nodes, part.arrays, {}, stem)
    body = ir.Graph([], [], nodes=[], name=stem)
    given: dict[tuple[int, int], ir.Value] = {}
    inner: list[tuple[_Tap, ir.Value]] = []
    for index, (tap, wire) in enumerate(part.taps):
        if tap.value.producer() in places:
            inner.append((tap, wire))
            continue
        choose = _tapped(tap.now, tap.params, wire, f"{stem}_tap_{index}")
        body.append(choose)
        given |= {(places[node], position): choose.outputs[0] for node, position in tap.uses}
    if part.doubled is not None:
        branches = {
            "then_branch": _branch(part.nodes, part.arrays, given, f"{stem}_int8"),
            "else_branch": _branch(part.nodes, {}, given, f"{stem}_float"),
        }
        body.append(ir.node("If", [part.doubled], branches, name=f"{stem}_constants"))
        result, old = body[-1].outputs[0], part.nodes[-1].outputs[0]
        result.name, result.type, result.shape = f"{stem}_output", old.type, old.shape
        body.outputs.append(result)
        return body
    return _filled(body, part.nodes, {}, given, inner)


def _branch(
    nodes: Sequence[ir.Node], arrays: Mapping[int, Array], given: Mapping[tuple[int, int], ir.Value], stem: str
) -> ir.Graph:
    """Return a body with a copy of a unit that holds all its constants: the runtime packs those of its own graph.

    Args:
        nodes: The unit.
        arrays: By index, other constants for its first node.
        given: By position of the node and index, other operands.
        stem: A name.
    """
    return _filled(ir.Graph([], [], nodes=[], name=stem), nodes, arrays, given)


def _filled(
    body: ir.Graph,
    nodes: Sequence[ir.Node],
    arrays: Mapping[int, Array],
    given: Mapping[tuple[int, int], ir.Value],
    inner: Sequence[tuple[_Tap, ir.Value]] = (),
) -> ir.Graph:
    """Append a copy of a unit to a body; `inner` are switches of tensors between its nodes."""
    stem = body.name
    copies: dict[ir.Value | None, ir.Value | None] = {}
    for position, node in enumerate(nodes):
        inputs = [given.get((position, i), copies.get(value, value)) for i, value in enumerate(node.inputs)]
        replaced = arrays if position == 0 else {}
        inputs += [None] * (max((index + 1 for index in replaced), default=0) - len(inputs))
        for index, value in enumerate(inputs):
            tensor = constant(value)
            if index in replaced:
                inputs[index] = add_initializer(body, f"{stem}_{position}_{index}", replaced[index])
            elif value is not None and tensor is not None:
                inputs[index] = _own(body, value, tensor, f"{stem}_{position}_{index}")
        made = ir.node(node.op_type, inputs, dict(node.attributes), domain=node.domain, name=f"{stem}_{position}")
        result, old = made.outputs[0], node.outputs[0]
        result.name, result.type, result.shape = f"{stem}_{position}_output", old.type, old.shape
        copies[old] = result
        body.append(made)
        for index, (tap, wire) in enumerate(inner):
            if tap.value is old:
                choose = _tapped(result, tap.params, wire, f"{stem}_{position}_inner_{index}")
                body.append(choose)
                copies[old] = choose.outputs[0]
    body.outputs.append(result)
    return body


def _own(body: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    """Return a constant of an outer graph as one of a body."""
    dtype, shape = ir.DataType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    lazy = ir.LazyTensor(lambda: tensor, dtype, shape, name=name)  # a name of its own: the tensor is the model's too
    own = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=lazy)
    body.register_initializer(own)
    return own


def _choose_constants(node: ir.Node, arrays: Mapping[int, Array], wire: ir.Value, stem: str) -> None:
    """Let a node read other constants when `wire` is true."""
    for index, array in arrays.items():
        value = node.inputs[index]
        assert value is not None  # it has been replaced by an array
        body = ir.Graph([], [], nodes=[], name=f"{stem}_{index}_then")
        other = add_initializer(body, f"{stem}_{index}_array", array)
        _finished(body, [ir.node("Identity", [other], name=f"{stem}_{index}_other")], value, f"{stem}_{index}_given")
        branches = {"then_branch": body, "else_branch": _copied(value, f"{stem}_{index}")}
        choose = ir.node("If", [wire], branches, name=f"{stem}_{index}")
        choose.outputs[0].name, choose.outputs[0].type = f"{stem}_{index}_output", value.type
        graph_of(node).insert_before(node, [choose])
        node.replace_input_with(index, choose.outputs[0])


def _static(node: ir.Node, unit: Unit, x: QParams, scheme: Scheme, writer: WeightWriter) -> dict[int, Array]:
    """Return what the constants of a unit on uint8 become."""
    row = OPS[unit.op]
    if row.kind == "compute":
        if constant(node.inputs[1]) is None:
            return {}
        writer.static(node, unit, float(x.scale))
        return {index: _behind(value) for index, value in enumerate(node.inputs) if _is_integer(value)}
    found = {}
    for index in (row.activations or range(len(node.inputs))) if row.kind == "arith" else ():
        tensor = constant(node.inputs[index])
        if tensor is not None:
            array = tensor.numpy()
            params = scheme.activation_params(float(array.min()), float(array.max()))
            found[index] = dequantize(quantize(array, params), params)
    return found


def _stored(node: ir.Node, unit: Unit, impl: Impl, scheme: Scheme) -> dict[int, Array]:
    """Return what the weights of a unit that reads float become."""
    row, found = OPS[unit.op], {}
    indices = row.stores if impl is Impl.WEIGHT else (1, 2) if unit.op == "LSTM" else (1,)
    for index in indices:
        tensor = constant(node.inputs[index])
        if tensor is None:
            continue
        array = tensor.numpy()
        if unit.op == "Gather":
            params, rows = symmetric_s8(array, 0), array
        elif unit.op == "LSTM":
            rows = array.reshape(array.shape[0] * array.shape[1], -1)
            params = scheme.weight_params(rows, 0)
        else:
            params, rows = scheme.weight_params(array, row.channel_axis(node) % array.ndim), array
        found[index] = dequantize(quantize(rows, params), params).reshape(array.shape)
    return found


def _is_integer(value: ir.Value | None) -> bool:
    """Whether a tensor is dequantized from integers of the file."""
    dq = value.producer() if value is not None else None
    return dq is not None and dq.op_type == "DequantizeLinear" and constant(dq.inputs[0]) is not None


def _behind(value: ir.Value | None) -> Array:
    """Return the values of a constant that is dequantized."""
    dq = value.producer() if value is not None else None
    assert dq is not None
    stored, scale, zero = (constant(each) for each in dq.inputs[:3])
    assert stored is not None and scale is not None and zero is not None  # the writer has put them there
    axis = dq.attributes.get_int("axis", 1) if len(scale.shape) else None
    return dequantize(stored.numpy(), QParams(scale=scale.numpy(), zero_point=zero.numpy(), axis=axis))
