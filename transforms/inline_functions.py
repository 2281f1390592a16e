"""Put the contents of model-local functions where they are called."""

from __future__ import annotations

import json
from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from .functions import DOMAIN
from .graph import names, node_name, take
from .registry import Change, TransformError, transform

# Written to calls and to what functions hold, for the time of inlining: copies have both.
CALL, NAME = "requant.inline.call", "requant.inline.name"
ORIGIN = "requant.origin"
"""Metadata of a node that came out of a function: the names of the calls, outermost first, and its own, as JSON."""
GRAPHS = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})

Identifier = tuple[str, str, str]  # domain, name, overload


@transform("inline_functions")
def inline_functions(model: ir.Model) -> Change:
    """Replace every call of a model-local function by the operators of the function.

    Before:  y = my.domain.Block(x, w) of a node `block1`;  Block(a, b) => (d) { c = MatMul(a, b); d = Relu(c) }
    After:   y = Relu(block1/c), block1/c = MatMul(x, w)
        Calls in functions and in the bodies of control flow too. A function that is called no more is removed, and so
        is one that never was; each is one rewrite.
    Left alone: the functions of the domain ``requant``, which are stages of quantization; a function of another
        version of an operator set than the model, if one of its operators differs between the two (``other-opset``);
        a function that is called with a graph as attribute (``graph-attribute``); what these call
        (``called-by-function``).

    Raises:
        TransformError: Functions call each other in a circle, a call has more inputs than its function, or a function
            reads what it does not compute.
    """
    change = Change()
    order = _callees_first(model)
    _check_calls(model)
    change.applied = _drop_uncalled(model)
    kept = _kept(model, order, change)
    wanted = [name for name in order if name in model.functions and name not in kept]
    taken = {*names(model), *(name for function in model.functions.values() for name in _names_in(function))}
    change.applied += len(wanted)
    while wanted:
        leaves = {name for name in wanted if not any(callee in wanted for callee in _callees(model, name))}
        _inline(model, leaves, taken)
        wanted = [name for name in wanted if name not in leaves]
    if change.applied:
        _drop_imports(model, {domain for domain, *_ in order})
    return change


def _callees(model: ir.Model, name: Identifier) -> set[Identifier]:
    """Return the names of all operators in a function, those that are functions among them."""
    return {node.op_identifier() for node in model.functions[name].all_nodes()}


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield every node: of the graph, of functions, and of the bodies in them."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _callees_first(model: ir.Model) -> list[Identifier]:
    """Return the names of all functions, each after those that it calls.

    Raises:
        TransformError: There is no such order.
    """
    order: list[Identifier] = []
    path: list[Identifier] = []

    def visit(name: Identifier) -> None:
        if name in path:
            circle = " -> ".join(f"{domain}.{op}" for domain, op, _ in [*path[path.index(name) :], name])
            raise TransformError(f"functions of the model call each other in a circle: {circle}")
        if name in order or name not in model.functions:
            return
        path.append(name)
        for callee in sorted(_callees(model, name)):
            visit(callee)
        order.append(path.pop())

    for name in model.functions:
        visit(name)
    return order


def _check_calls(model: ir.Model) -> None:
    """Refuse a call that its function cannot serve, and a function that no call could."""
    for node in _nodes(model):
        function = model.functions.get(node.op_identifier())
        if function is not None and len(node.inputs) > len(function.inputs):
            raise TransformError(
                f"node {node_name(node)!r} calls function {node.domain}.{node.op_type} with {len(node.inputs)} inputs, "
                f"but it takes {len(function.inputs)}"
            )
    for (domain, name, _), function in model.functions.items():
        own = {function.graph, *function.subgraphs()}
        strangers = [
            value
            for node in function.all_nodes()
            for value in node.inputs
            if value is not None and value.graph not in own
        ]
        if strangers:
            raise TransformError(f"function {domain}.{name} reads {strangers[0].name!r}, which nothing in it computes")


def _drop_uncalled(model: ir.Model) -> int:
    """Remove the functions that no node of the graph needs, but those of `DOMAIN`; return how many."""
    called: set[Identifier] = set()
    waiting = [node.op_identifier() for node in model.graph.all_nodes()]
    while waiting:
        name = waiting.pop()
        if name in model.functions and name not in called:
            called.add(name)
            waiting.extend(_callees(model, name))
    uncalled = [name for name in model.functions if name not in called and name[0] != DOMAIN]
    for name in uncalled:
        del model.functions[name]
    return len(uncalled)


def _kept(model: ir.Model, order: list[Identifier], change: Change) -> set[Identifier]:
    """Return the functions that must stay, and count why."""
    kept: set[Identifier] = set()
    needed: set[Identifier] = set()  # by those
    with_graphs = {
        node.op_identifier() for node in _nodes(model) if any(a.type in GRAPHS for a in node.attributes.values())
    }
    for name in reversed(order):
        if name not in model.functions:
            continue
        reason = None
        if name[0] == DOMAIN:
            reason = "requant"
        elif name in needed:
            reason = "called-by-function"
        elif name in with_graphs:
            reason = "graph-attribute"
        elif not _imports(model, model.functions[name]):
            reason = "other-opset"
        if reason is not None:
            kept.add(name)
            needed |= _callees(model, name)
            if name[0] != DOMAIN:
                change.skip(reason)
    return kept


def _imports(model: ir.Model, function: ir.Function) -> bool:
    """Let the model import what a function imports; return whether all its operators mean the same there."""
    imports = {_plain(domain): version for domain, version in model.opset_imports.items()}
    for domain, version in function.opset_imports.items():
        wanted = imports.get(_plain(domain), version)
        used = {node.op_type for node in function.all_nodes() if node.domain == _plain(domain)}
        used -= {op for key, op, _ in model.functions if key == _plain(domain)}
        if version != wanted and not all(_same(op, _plain(domain), version, wanted) for op in used):
            return False
    for domain, version in function.opset_imports.items():
        if _plain(domain) not in imports:
            model.opset_imports[domain] = version
    return True


def _plain(domain: str) -> str:
    """Return the one name of the standard domain, which an import may spell out."""
    return "" if domain == "ai.onnx" else domain


def _same(op: str, domain: str, one: int, other: int) -> bool:
    """Whether an operator is the same in two versions of its operator set."""
    try:
        return len({onnx.defs.get_schema(op, version, domain).since_version for version in (one, other)}) == 1
    except onnx.defs.SchemaError:
        return False


def _names_in(function: ir.Function) -> set[str]:
    """Return the names of the nodes and values of a function and of the bodies in it."""
    found = {node.name for node in function.all_nodes()} | {value.name for value in _values_in(function)}
    return {name for name in found if name}


def _values_in(function: ir.Function) -> Iterator[ir.Value]:
    """Yield what a function and the bodies in it name, without the inputs of the function."""
    for node in function.all_nodes():
        yield from node.outputs
    for body in function.subgraphs():
        yield from body.inputs
        yield from body.initializers.values()


def _inline(model: ir.Model, leaves: set[Identifier], taken: set[str]) -> None:
    """Put the contents of functions that call no other such one in the place of every call of them.

    `InlinePass` makes names unique in the graph alone, and knows nothing of those in bodies, so that all get new ones.
    """
    for function in (model.functions[name] for name in leaves):
        _end_with_nodes(function)
    for call in _nodes(model):
        if call.op_identifier() in leaves:
            _name_outputs(call, model.functions[call.op_identifier()], taken)
    for function in (model.functions[name] for name in leaves):
        _mark(function)
    InlinePass(criteria=lambda function: function.identifier() in leaves)(model)
    for node in _nodes(model):
        if CALL in node.metadata_props:
            _rename(node, node.metadata_props.pop(CALL), taken)


def _mark(function: ir.Function) -> None:
    """Write down the name of all that copies must be named after, but the outputs, which take the names of a call's."""
    function.opset_imports.clear()  # the pass would compare them with those of the model; `_imports` has
    for value in _values_in(function):
        value.shape = None  # true of one call, maybe
        if value not in function.outputs:
            value.metadata_props[NAME] = value.name or ""
    for node in function.all_nodes():  # the pass tries number after number where functions have names in common
        node.metadata_props[NAME] = node.name or node.op_type
        node.name = f"{function.name}/{node.metadata_props[NAME]}"
        for value in node.outputs:
            value.name = f"{function.name}/{value.name}"


def _name_outputs(call: ir.Node, function: ir.Function, taken: set[str]) -> None:
    """Give a call an output for each of its function, all with names, and write down its own name."""
    results = [value.name for value in call.outputs if value.name]
    call.metadata_props[CALL] = stem = call.name or next(iter(results), function.name)
    call.resize_outputs(len(function.outputs))
    for result, source in zip(call.outputs, function.outputs, strict=True):
        result.name = result.name or take(taken, f"{stem}/{source.name}")


def _end_with_nodes(function: ir.Function) -> None:
    """Let each output of a function be the result of a node of its own, which can take the name of a call's output."""
    seen: set[ir.Value] = set()
    for index, value in enumerate(function.outputs):
        if value in seen or value.producer() is None:
            copy = ir.node("Identity", [value], name="Identity")
            copy.outputs[0].name = f"{value.name}_output{index}"
            function.append(copy)
            function.outputs[index] = copy.outputs[0]
        seen.add(value)


def _rename(node: ir.Node, call: str, taken: set[str]) -> None:
    """Name a node that came with a call, and what it and its bodies give, ``call/name``."""
    own = node.metadata_props.pop(NAME)
    node.metadata_props[ORIGIN] = json.dumps([call, *json.loads(node.metadata_props.get(ORIGIN, json.dumps([own])))])
    node.name = take(taken, f"{call}/{own}")
    graphs = [graph for each in node.attributes.values() if each.type in GRAPHS for graph in _graphs(each)]
    inner = [value for graph in graphs for value in [*graph.inputs, *graph.initializers.values()]]
    for value in [*node.outputs, *inner]:
        name = value.metadata_props.pop(NAME, None)
        if name is not None:
            value.name = take(taken, f"{call}/{name}") if name else ""


def _graphs(attribute: ir.Attr) -> tuple[ir.Graph, ...]:
    """Return the bodies that an attribute holds."""
    return (attribute.as_graph(),) if attribute.type == ir.AttributeType.GRAPH else tuple(attribute.as_graphs())


def _drop_imports(model: ir.Model, domains: set[str]) -> None:
    """Drop the imports of those `domains`, in which functions were, that nothing uses any more."""
    used = {"", *(domain for domain, *_ in model.functions), *(node.domain for node in model.graph.all_nodes())}
    for domain in domains - used:
        model.opset_imports.pop(domain, None)
