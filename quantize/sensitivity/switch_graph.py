"""Write switches into a float model: If nodes that put tensors and constants into integers.

A switch is an If node; only the selected branch runs. For a unit of the plan, one branch has a float copy of the unit.
The other branch has a copy behind further switches: they select whether an input passes through QuantizeLinear and
DequantizeLinear, and whether the weights are the dequantized ones. So a unit with all switches off costs one If node,
and the runtime packs the weights of both copies. A Where, or a factor of 0 or 1 on the difference, would compute both
variants; and a convolution with computed weights runs without their packed layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from ...calibration.model.session import Array
from ...transforms.graphs.queries import constant, graph_of, nodes_by_name
from ...transforms.graphs.rewriter import add_initializer, names, remove, unused_name
from ...transforms.int8.forms import LEVELS, Lookup, lookup_rounding, lookups_of
from ...transforms.int8.ops import GATE
from ...transforms.int8.plan import Impl, Plan
from ...transforms.int8.qparams import TINY, BlockForm, QParams, asymmetric_u8
from ...transforms.int8.recurrent import keeps_input
from ...transforms.int8.units import activations

SWITCHES = "requant_switches"
FIRST_SPLIT_INPUT = 13  # since this opset the sizes of Split are an input

Rounding: TypeAlias = QParams | Lookup | BlockForm | None
"""How a tensor becomes integers: with a scale and a zero point, by a lookup, in blocks, or with the range of the run.

None stands for the last one.
"""
ROUNDED: Mapping[Impl, Rounding] = {
    **dict.fromkeys((Impl.DYNAMIC, Impl.DYNAMIC_NATIVE)),
    **dict.fromkeys((Impl.BLOCK, Impl.BLOCK_NATIVE), BlockForm()),
}
"""How forms from float to float round the input of a product."""


@dataclass(frozen=True, slots=True, order=True)
class Switch:
    """A place in the model that can be switched from float to integers.

    Attributes:
        unit: The unit that reads the tensor, or that has the constants; empty for all other readers of the tensor:
            operators that stay float in any case, and the outputs of the model.
        tensor: The tensor that passes through integers; empty for the constants of the unit.
    """

    unit: str
    tensor: str


@dataclass(frozen=True, slots=True, eq=False)
class Tap:
    """A tensor and some of its readers.

    Attributes:
        value: The tensor.
        uses: The readers, each with the index of its input.
        shown: Whether a graph output is among the readers.
        params: How the tensor becomes integers.
    """

    value: ir.Value
    uses: Sequence[tuple[ir.Node, int]]
    shown: bool
    params: Rounding

    @property
    def now(self) -> ir.Value:
        """The tensor, or the tensor that replaced it when its producer got switches."""
        found = next((node.inputs[index] for node, index in self.uses), None)
        return found or self.value


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A unit with its switches.

    Attributes:
        nodes: Its nodes.
        taps: The tensors that it reads in integers, each with its switch.
        arrays: Its dequantized constants by input index.
        constants_wire: The switch of its constants; None without constants.
        any_on: Whether any of its switches is on.
    """

    nodes: Sequence[ir.Node]
    taps: Sequence[tuple[Tap, ir.Value]]
    arrays: Mapping[int, Array]
    constants_wire: ir.Value | None
    any_on: ir.Value

    @property
    def encloses(self) -> bool:
        """Whether only its last result is read outside, so that a body can contain it."""
        inner = [output for node in self.nodes[:-1] for output in node.outputs]
        readers = {use.node for output in inner for use in output.uses()}
        single = all(len(node.outputs) == 1 for node in self.nodes)
        return single and readers <= set(self.nodes) and not any(output.is_graph_output() for output in inner)


def taps_of(model: ir.Model, plan: Plan, qparams: Mapping[str, QParams]) -> dict[Switch, Tap]:
    """Return the tensors that can pass through integers, with their readers, by switch."""
    nodes = nodes_by_name(model)
    lookups = {str(node.outputs[0].name): lookup_rounding(node) for node in lookups_of(plan, nodes)}
    known: dict[str, Rounding] = {**qparams, **lookups}
    values = ir.convenience.create_value_mapping(model.graph)
    taps: dict[Switch, Tap] = {}
    for unit in plan.units:
        impl, first = plan.impl(unit), nodes[unit.nodes[0]]
        readers = [nodes[name] for name in unit.readers]
        if impl.reads_u8:
            inside = [str(first.outputs[0].name)] if unit.op == GATE else []
            for tensor in (*unit.inputs, *inside):
                params = known[plan.root(tensor)] if tensor not in inside else known.get(tensor)
                params = params or asymmetric_u8(0.0, 1.0)  # the range of a sigmoid
                taps[Switch(unit.name, tensor)] = Tap(values[tensor], _uses(readers, tensor), False, params)
        elif impl in ROUNDED and unit.op != "Gather" and not (impl is Impl.DYNAMIC_NATIVE and keeps_input(first)):
            for tensor in unit.rounded:
                taps[Switch(unit.name, tensor)] = Tap(values[tensor], _uses(readers, tensor), False, ROUNDED[impl])
    taken = {(id(node), index) for tap in taps.values() for node, index in tap.uses}
    for tensor in (each for each in plan.quantized if each in plan.produced_u8):
        value = values[tensor]
        uses = [(use.node, use.idx) for use in value.uses() if (id(use.node), use.idx) not in taken]
        if uses or is_computed_output(value):
            taps[Switch("", tensor)] = Tap(value, uses, is_computed_output(value), known[plan.root(tensor)])
    return taps


def is_computed_output(value: ir.Value) -> bool:
    """Return whether a tensor is an output of its graph, but not an input that the graph returns unchanged."""
    return value.is_graph_output() and not value.is_graph_input()


def _uses(readers: Iterable[ir.Node], tensor: str) -> list[tuple[ir.Node, int]]:
    """Return the inputs of some nodes that are a tensor and carry activations."""
    inputs = ((node, index, value) for node in readers for index, value in enumerate(node.inputs) if value is not None)
    return [(node, index) for node, index, value in inputs if value.name == tensor and value in activations(node)]


def wires_of(model: ir.Model, count: int) -> list[ir.Value]:
    """Add an input of switches, bool (count,), to a model; return each switch as a tensor of one element."""
    if not count:
        return []
    graph = model.graph
    switches = ir.val(SWITCHES, dtype=ir.DataType.BOOL, shape=[count])
    graph.inputs.append(switches)
    named = model.opset_imports.get("", 1) >= FIRST_SPLIT_INPUT
    ones, taken = np.ones(count, np.int64), names(model)
    inputs = [switches, add_initializer(graph, unused_name(taken, f"{SWITCHES}_sizes"), ones)] if named else [switches]
    attributes = {} if named else {"split": ones.tolist()}
    split = ir.node("Split", inputs, attributes, num_outputs=count, name=unused_name(taken, f"{SWITCHES}_split"))
    for index, output in enumerate(split.outputs):
        output.name, output.type, output.shape = f"{SWITCHES}_{index}", switches.type, ir.Shape([1])
    graph.insert_before(graph[0], [split])
    return list(split.outputs)


def insert_tap(tap: Tap, wire: ir.Value, stem: str) -> None:
    """Make some readers of a tensor read it through integers if `wire` is true."""
    value, producer = tap.now, tap.now.producer()
    owner = value.graph if tap.shown or not tap.uses else _home(tap)
    assert isinstance(owner, ir.Graph)  # functions are inlined
    choose = _tap_switch(tap.params, value, wire, stem)
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


def _tap_switch(params: Rounding, value: ir.Value, wire: ir.Value, stem: str) -> ir.Node:
    """Return an If whose output is a tensor through integers if `wire` is true, else the unchanged tensor."""
    return _switch(value, _integer_body(value, stem, params), wire, stem)


def _switch(value: ir.Value, then: ir.Graph, wire: ir.Value, stem: str) -> ir.Node:
    """Return an If whose output is that of the body `then` if `wire` is true, else the unchanged tensor."""
    branches = {"then_branch": then, "else_branch": _unchanged_body(value, stem)}
    choose = ir.node("If", [wire], branches, name=stem)
    result = choose.outputs[0]
    result.name, result.type, result.shape = f"{stem}_output", value.type, value.shape
    return choose


def _home(tap: Tap) -> ir.Graph:
    """Return the graph for a tap: the graph of its readers if there is only one, else the graph of the tensor."""
    graphs = {graph_of(node) for node, _ in tap.uses}
    own = tap.now.graph
    assert isinstance(own, ir.Graph)
    return graphs.pop() if len(graphs) == 1 else own


def _after_wires(graph: ir.Graph, wire: ir.Value) -> ir.Node:
    """Return the first node of a graph before which a switch is available."""
    split = wire.producer()
    nodes = iter(graph)
    first = next(nodes)
    return next(nodes) if first is split else first


def _integer_body(value: ir.Value, stem: str, params: Rounding) -> ir.Graph:
    """Return a body whose output is a tensor through integers."""
    body = ir.Graph([], [], nodes=[], name=f"{stem}_then")
    if isinstance(params, BlockForm):
        columns = value.shape[-1] if value.shape else None
        if isinstance(columns, int) and columns % (size := params.within(columns).size) == 0:
            return _close(body, _block_nodes(body, value, stem, size), value, f"{stem}_passed")
        params = None  # rounded as a whole, with at least the error of blocks
    if isinstance(params, Lookup):
        return _close(body, _lookup_nodes(body, value, stem, params), value, f"{stem}_passed")
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
    return _close(body, [q, dq], value, f"{stem}_passed")


def _lookup_nodes(body: ir.Graph, value: ir.Value, stem: str, lookup: Lookup) -> list[ir.Node]:
    """Return the nodes that round the result of a HardSigmoid as its lookup does."""
    nodes: list[ir.Node] = []
    add, scale = partial(_append, nodes, stem), float(lookup.read.scale)
    floats = {"step": lookup.step, "scale": scale, "one": 1.0, "top": LEVELS * scale}
    known = {name: add_initializer(body, f"{stem}_{name}", np.asarray(x, np.float32)) for name, x in floats.items()}
    zero = add_initializer(body, f"{stem}_zero_point", lookup.read.zero_point)
    codes = add("QuantizeLinear", value, known["step"], zero)
    # the operator ends at 1, and the codes of the lookup go on to the last one
    add("Where", add("Less", value, known["one"]), add("DequantizeLinear", codes, known["scale"], zero), known["top"])
    return nodes


def _block_nodes(body: ir.Graph, value: ir.Value, stem: str, size: int) -> list[ir.Node]:
    """Return the nodes that round each block of the last axis as a MatMulNBits does: to 127 steps of its peak."""
    nodes: list[ir.Node] = []
    add = partial(_append, nodes, stem)
    shape = add_initializer(body, f"{stem}_shape", np.array([-1, 1, size]))
    steps, tiny = (
        add_initializer(body, f"{stem}_{name}", np.asarray(number, np.float32))
        for name, number in (("steps", 127), ("tiny", TINY))
    )
    blocks = add("Reshape", value, shape)
    peak = add("MaxPool", add("Abs", blocks), kernel_shape=[size])
    step = add("Max", add("Div", peak, steps), tiny)
    rounded = add("Mul", add("Round", add("Div", blocks, step)), step)
    add("Reshape", rounded, add("Shape", value))
    return nodes


def _append(nodes: list[ir.Node], stem: str, op: str, *inputs: ir.Value, **attributes: list[int]) -> ir.Value:
    """Append a node to `nodes`, and return its result."""
    node = ir.node(op, inputs, attributes, name=f"{stem}_{len(nodes)}")
    node.outputs[0].name = f"{stem}_{len(nodes)}_output"
    nodes.append(node)
    return node.outputs[0]


def _unchanged_body(value: ir.Value, stem: str) -> ir.Graph:
    """Return a body whose output is the unchanged tensor."""
    body = ir.Graph([], [], nodes=[], name=f"{stem}_else")
    return _close(body, [ir.node("Identity", [value], name=f"{stem}_same")], value, f"{stem}_copied")


def _close(body: ir.Graph, nodes: Sequence[ir.Node], like: ir.Value, name: str) -> ir.Graph:
    """Add nodes to a body, and the result of the last one as its output."""
    body.extend(nodes)
    output = nodes[-1].outputs[0]
    output.name, output.type = name, like.type or ir.TensorType(ir.DataType.FLOAT)
    body.outputs.append(output)
    return body


def insert_part(part: Part, stem: str) -> None:
    """Insert the switches of a unit."""
    if not part.encloses:  # a Split or an LSTM: the switches come before it
        for index, (tap, wire) in enumerate(part.taps):
            insert_tap(tap, wire, f"{stem}_tap_{index}")
        if part.constants_wire is not None:
            _choose_constants(part.nodes[0], part.arrays, part.constants_wire, stem)
        return
    nodes, last = part.nodes, part.nodes[-1]
    branches = {
        "then_branch": _switches_body(part, f"{stem}_then"),
        "else_branch": _unit_body(nodes, {}, {}, f"{stem}_else"),
    }
    choose = ir.node("If", [part.any_on], branches, name=stem)
    result, old, graph = choose.outputs[0], last.outputs[0], graph_of(last)
    result.type, result.shape, name = old.type, old.shape, old.name
    graph.insert_after(last, [choose])
    old.replace_all_uses_with(result, replace_graph_outputs=True)
    for node in reversed(nodes):
        remove(node)
    result.name = name


def _switches_body(part: Part, stem: str) -> ir.Graph:
    """Return a body with a copy of a unit behind its switches."""
    places = {node: position for position, node in enumerate(part.nodes)}
    if part.constants_wire is not None and not part.taps:
        return _unit_body(part.nodes, part.arrays, {}, stem)
    body = ir.Graph([], [], nodes=[], name=stem)
    given: dict[tuple[int, int], ir.Value] = {}
    inner: list[tuple[Tap, ir.Value]] = []
    for index, (tap, wire) in enumerate(part.taps):
        if tap.value.producer() in places:
            inner.append((tap, wire))
            continue
        choose = _tap_switch(tap.params, tap.now, wire, f"{stem}_tap_{index}")
        body.append(choose)
        given |= {(places[node], position): choose.outputs[0] for node, position in tap.uses}
    if part.constants_wire is not None:
        branches = {
            "then_branch": _unit_body(part.nodes, part.arrays, given, f"{stem}_int8"),
            "else_branch": _unit_body(part.nodes, {}, given, f"{stem}_float"),
        }
        body.append(ir.node("If", [part.constants_wire], branches, name=f"{stem}_constants"))
        result, old = body[-1].outputs[0], part.nodes[-1].outputs[0]
        result.name, result.type, result.shape = f"{stem}_output", old.type, old.shape
        body.outputs.append(result)
        return body
    return _copy_unit(body, part.nodes, {}, given, inner)


def _unit_body(
    nodes: Sequence[ir.Node], arrays: Mapping[int, Array], given: Mapping[tuple[int, int], ir.Value], stem: str
) -> ir.Graph:
    """Return a body with a copy of a unit and its constants: the runtime packs only constants of the same graph.

    Args:
        nodes: The unit.
        arrays: Other constants for its first node, by input index.
        given: Other operands, by position of the node and input index.
        stem: The prefix of names.
    """
    return _copy_unit(ir.Graph([], [], nodes=[], name=stem), nodes, arrays, given)


def _copy_unit(
    body: ir.Graph,
    nodes: Sequence[ir.Node],
    arrays: Mapping[int, Array],
    given: Mapping[tuple[int, int], ir.Value],
    inner: Sequence[tuple[Tap, ir.Value]] = (),
) -> ir.Graph:
    """Append a copy of a unit to a body; `inner` are the switches of tensors between its nodes."""
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
                inputs[index] = _copy_constant(body, tensor, f"{stem}_{position}_{index}")
        made = ir.node(node.op_type, inputs, dict(node.attributes), domain=node.domain, name=f"{stem}_{position}")
        result, old = made.outputs[0], node.outputs[0]
        result.name, result.type, result.shape = f"{stem}_{position}_output", old.type, old.shape
        copies[old] = result
        body.append(made)
        for index, (tap, wire) in enumerate(inner):
            if tap.value is old:
                choose = _tap_switch(tap.params, result, wire, f"{stem}_{position}_inner_{index}")
                body.append(choose)
                copies[old] = choose.outputs[0]
    body.outputs.append(result)
    return body


def _copy_constant(body: ir.Graph, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    """Return a copy of a constant of an outer graph as an initializer of a body."""
    dtype, shape = ir.DataType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    lazy = ir.LazyTensor(lambda: tensor, dtype, shape, name=name)  # with its own name: the model uses the tensor too
    own = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=lazy)
    body.register_initializer(own)
    return own


def _choose_constants(node: ir.Node, arrays: Mapping[int, Array], wire: ir.Value, stem: str) -> None:
    """Make a node read other constants if `wire` is true."""
    for index, array in arrays.items():
        value = node.inputs[index]
        assert value is not None  # `arrays` has only inputs that exist
        body = ir.Graph([], [], nodes=[], name=f"{stem}_{index}_then")
        other = add_initializer(body, f"{stem}_{index}_array", array)
        _close(body, [ir.node("Identity", [other], name=f"{stem}_{index}_other")], value, f"{stem}_{index}_given")
        choose = _switch(value, body, wire, f"{stem}_{index}")
        graph_of(node).insert_before(node, [choose])
        node.replace_input_with(index, choose.outputs[0])
