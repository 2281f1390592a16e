"""Switches written into a float model: the If nodes by which tensors and constants are had in integers.

A switch is an If, of which only the branch that is asked for runs. Of a unit of the plan one branch holds a float copy,
and the other one a copy behind further switches: whether a tensor passes through QuantizeLinear and DequantizeLinear,
and whether the weights are the dequantized ones. So a unit all of whose switches are off costs an If and no more, and
the runtime packs the weights of either copy. A factor of 0 or 1 on the difference, or a Where, would compute both, and
a convolution whose weights are computed runs without their packed layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...calibration.session import Array
from ...transforms.graph import add_initializer, constant, fresh_name, graph_of, nodes_by_name, remove
from ...transforms.int8_forms import gate_params
from ...transforms.ops import GATE
from ...transforms.plan import Impl, Plan
from ...transforms.qparams import QParams, asymmetric_u8
from ...transforms.units import activations

SWITCHES = "requant_switches"
FIRST_SPLIT_INPUT = 13  # the opset in which the sizes of Split became an input


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
class Tap:
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
class Part:
    """A unit with its switches.

    Attributes:
        nodes: Its nodes.
        taps: The tensors that it reads in integers, each with its switch.
        arrays: What its constants become.
        doubled: The switch of its constants, if it has any.
        some: Whether any of these switches is on.
    """

    nodes: Sequence[ir.Node]
    taps: Sequence[tuple[Tap, ir.Value]]
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


def taps_of(model: ir.Model, plan: Plan, qparams: Mapping[str, QParams]) -> dict[Switch, Tap]:
    """Return where tensors pass through integers."""
    nodes = nodes_by_name(model)
    qparams = with_lookups(plan, nodes, qparams)
    values = ir.convenience.create_value_mapping(model.graph)
    taps: dict[Switch, Tap] = {}
    for unit in plan.units:
        impl, first = plan.impl(unit), nodes[unit.nodes[0]]
        readers = [nodes[name] for name in unit.nodes] if unit.op == GATE else [first]
        if impl.reads_u8:
            inside = [str(first.outputs[0].name)] if unit.op == GATE else []
            for tensor in (*unit.inputs, *inside):
                params = qparams[plan.root(tensor)] if tensor not in inside else qparams.get(tensor)
                params = params or asymmetric_u8(0.0, 1.0)  # of a sigmoid
                taps[Switch(unit.name, tensor)] = Tap(values[tensor], _uses(readers, tensor), False, params)
        elif impl is Impl.DYNAMIC:
            for tensor in unit.inputs[:1]:
                taps[Switch(unit.name, tensor)] = Tap(values[tensor], _uses(readers, tensor), False, None)
    taken = [use for tap in taps.values() for use in tap.uses]
    for tensor in sorted(plan.produced_u8, key=list(plan.quantized).index):
        tap = everyone(values[tensor], taken, qparams[plan.root(tensor)])
        if tap.uses or tap.shown:
            taps[Switch("", tensor)] = tap
    return taps


def _uses(readers: Iterable[ir.Node], tensor: str) -> list[tuple[ir.Node, int]]:
    """Return which inputs of some nodes are a tensor, and carry activations."""
    inputs = ((node, index, value) for node in readers for index, value in enumerate(node.inputs) if value is not None)
    return [(node, index) for node, index, value in inputs if value.name == tensor and value in activations(node)]


def everyone(value: ir.Value, but: Iterable[tuple[ir.Node, int]], params: QParams) -> Tap:
    """Return a tensor on its way to all its readers but some."""
    others = {(id(node), index) for node, index in but}
    uses = [(use.node, use.idx) for use in value.uses() if (id(use.node), use.idx) not in others]
    return Tap(value, uses, value.is_graph_output(), params)


def wires_of(model: ir.Model, count: int) -> list[ir.Value]:
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


def insert_tap(model: ir.Model, tap: Tap, wire: ir.Value, stem: str) -> None:
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


def _home(tap: Tap) -> ir.Graph:
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


def insert_part(model: ir.Model, part: Part, stem: str) -> None:
    """Put the switches of a unit in."""
    if not part.encloses:  # a Split or an LSTM: its operands are chosen in front of it
        for index, (tap, wire) in enumerate(part.taps):
            insert_tap(model, tap, wire, f"{stem}_tap_{index}")
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


def _switched(part: Part, stem: str) -> ir.Graph:
    """Return a body with a copy of a unit that has its switches."""
    places = {node: position for position, node in enumerate(part.nodes)}
    if part.doubled is not None and not part.taps:
        return _branch(part.nodes, part.arrays, {}, stem)
    body = ir.Graph([], [], nodes=[], name=stem)
    given: dict[tuple[int, int], ir.Value] = {}
    inner: list[tuple[Tap, ir.Value]] = []
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
    inner: Sequence[tuple[Tap, ir.Value]] = (),
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


def with_lookups(plan: Plan, nodes: Mapping[str, ir.Node], qparams: Mapping[str, QParams]) -> dict[str, QParams]:
    """Return parameters in which the result of a HardSigmoid has those of its lookup."""
    integer = (nodes[name] for unit in plan.units if plan.impl(unit).reads_u8 for name in unit.nodes)
    return {**qparams, **{str(n.outputs[0].name): gate_params(n) for n in integer if n.op_type == "HardSigmoid"}}
