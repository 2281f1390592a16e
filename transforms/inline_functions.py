"""Replace calls of model-local functions by the nodes of the functions."""

from __future__ import annotations

import json
from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from .. import NATIVE_DOMAIN
from ..system.values import decode_json
from .graphs.calls import Identifier, callees, check_calls
from .graphs.queries import node_name
from .graphs.rewriter import names, unused_name
from .parts.functions import DOMAIN
from .registry import Change, TransformError, transform

# Metadata keys on calls and on the contents of functions while inlining runs; copies keep the metadata.
CALL, NAME = "requant.inline.call", "requant.inline.name"
ORIGIN = "requant.origin"
"""Metadata key of a node from a function: a JSON list of the calls' names, outermost first, and the node's own."""
GRAPHS = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})


@transform("inline_functions")
def inline_functions(model: ir.Model, *, native: bool = False) -> Change:
    """Replace each call of a model-local function by the nodes of the function.

    Before:  y = my.domain.Block(x, w) of a node `block1`;  Block(a, b) => (d) { c = MatMul(a, b); d = Relu(c) }
    After:   y = Relu(block1/c), block1/c = MatMul(x, w)
        Calls inside functions and inside bodies of control flow are included. Functions without calls are removed;
        each removed function counts as one rewrite.
    Left alone: functions of the domain ``requant``, which are stages of quantization, and of ``ai.requant``, which are
        native operators with the nodes that they replace; a function with another version
        of an operator set than the model, if one of its operators differs between the versions (``other-opset``); a
        function that is called with a graph as attribute (``graph-attribute``); functions that these functions call
        (``called-by-function``).

    Options:
        native: Whether native operators are replaced too.

    Raises:
        TransformError: Functions call each other in a circle, or would become too many nodes; a call has more inputs
            than its function, or a function reads a tensor that it does not compute.
    """
    change = Change()
    order = check_calls(model)
    _check_calls(model)
    own = {DOMAIN} if native else {DOMAIN, NATIVE_DOMAIN}
    change.applied = _drop_uncalled(model)
    kept = _kept(model, order, own, change)
    pending = [name for name in order if name in model.functions and name not in kept]
    taken = {*names(model), *(name for function in model.functions.values() for name in _names_in(function))}
    change.applied += len(pending)
    while pending:
        leaves = {name for name in pending if not any(callee in pending for callee in callees(model, name))}
        _inline(model, leaves, taken)
        pending = [name for name in pending if name not in leaves]
    if change.applied:
        _drop_imports(model, {domain for domain, *_ in order})
    return change


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield each node of the graph, of the functions, and of the bodies in them."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _check_calls(model: ir.Model) -> None:
    """Raise TransformError for a call with too many inputs, or a function that reads a tensor of no node in it."""
    for node in _nodes(model):
        function = model.functions.get(node.op_identifier())
        if function is not None and len(node.inputs) > len(function.inputs):
            raise TransformError(
                f"node {node_name(node)!r} calls function {node.domain}.{node.op_type} with {len(node.inputs)} inputs, "
                f"but it takes {len(function.inputs)}"
            )
    for (domain, name, _), function in model.functions.items():
        own = {function.graph, *function.subgraphs()}
        unknown = [
            value
            for node in function.all_nodes()
            for value in node.inputs
            if value is not None and value.graph not in own
        ]
        if unknown:
            raise TransformError(f"function {domain}.{name} reads {unknown[0].name!r}, which nothing in it computes")


def _drop_uncalled(model: ir.Model) -> int:
    """Remove the functions that the graph does not call, except those of `DOMAIN`; return their number."""
    called: set[Identifier] = set()
    waiting = [node.op_identifier() for node in model.graph.all_nodes()]
    while waiting:
        name = waiting.pop()
        if name in model.functions and name not in called:
            called.add(name)
            waiting.extend(callees(model, name))
    uncalled = [name for name in model.functions if name not in called and name[0] != DOMAIN]
    for name in uncalled:
        del model.functions[name]
    return len(uncalled)


def _kept(model: ir.Model, order: list[Identifier], own: set[str], change: Change) -> set[Identifier]:
    """Return the functions that must stay, and count the reasons in `change`.

    Args:
        model: The model.
        order: All functions; each comes after the functions that it calls.
        own: The domains whose functions stay without a reason.
        change: The counts.
    """
    kept: set[Identifier] = set()
    needed: set[Identifier] = set()  # functions that functions in `kept` call
    with_graphs = {
        node.op_identifier() for node in _nodes(model) if any(a.type in GRAPHS for a in node.attributes.values())
    }
    for name in reversed(order):
        if name not in model.functions:
            continue
        reason = None
        if name[0] in own:
            reason = name[0]
        elif name in needed:
            reason = "called-by-function"
        elif name in with_graphs:
            reason = "graph-attribute"
        elif not _imports(model, model.functions[name]):
            reason = "other-opset"
        if reason is not None:
            kept.add(name)
            needed |= callees(model, name)
            if name[0] not in own:
                change.skip(reason)
    return kept


def _imports(model: ir.Model, function: ir.Function) -> bool:
    """Import a function's operator sets; return whether its operators are equal in the model's versions."""
    imports = {_plain(domain): version for domain, version in model.opset_imports.items()}
    for domain, version in function.opset_imports.items():
        model_version = imports.get(_plain(domain), version)
        used = {node.op_type for node in function.all_nodes() if node.domain == _plain(domain)}
        used -= {op for key, op, _ in model.functions if key == _plain(domain)}
        if version != model_version and not all(_same(op, _plain(domain), version, model_version) for op in used):
            return False
    for domain, version in function.opset_imports.items():
        if _plain(domain) not in imports:
            model.opset_imports[domain] = version
    return True


def _plain(domain: str) -> str:
    """Return a domain; the standard domain, which an import may call ``ai.onnx``, is the empty name."""
    return "" if domain == "ai.onnx" else domain


def _same(op: str, domain: str, one: int, other: int) -> bool:
    """Whether an operator has the same definition in two versions of its operator set, and onnx knows both."""
    if not domain and max(one, other) > onnx.defs.onnx_opset_version():
        return False
    try:
        return len({onnx.defs.get_schema(op, version, domain).since_version for version in (one, other)}) == 1
    except onnx.defs.SchemaError:
        return False


def _names_in(function: ir.Function) -> set[str]:
    """Return the names of the nodes and values of a function and of the bodies in it."""
    all_names = {node.name for node in function.all_nodes()} | {value.name for value in _values_in(function)}
    return {name for name in all_names if name}


def _values_in(function: ir.Function) -> Iterator[ir.Value]:
    """Yield the values of a function and of the bodies in it, without the inputs of the function."""
    for node in function.all_nodes():
        yield from node.outputs
    for body in function.subgraphs():
        yield from body.inputs
        yield from body.initializers.values()


def _inline(model: ir.Model, leaves: set[Identifier], taken: set[str]) -> None:
    """Replace each call of the functions `leaves`, which call none of the functions to inline.

    `InlinePass` makes names unique only within the graph, not in bodies; so all names are set again here.
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
    """Save the names in a function as metadata, except for its outputs, which get the names of a call's outputs."""
    function.opset_imports.clear()  # the pass would compare them with those of the model; `_imports` has done so
    for value in _values_in(function):
        value.shape = None  # the shape may differ between calls
        if value not in function.outputs:
            value.metadata_props[NAME] = value.name or ""
    for node in function.all_nodes():  # the pass is slow when functions share names
        node.metadata_props[NAME] = node.name or node.op_type
        node.name = f"{function.name}/{node.metadata_props[NAME]}"
        for value in node.outputs:
            value.name = f"{function.name}/{value.name}"


def _name_outputs(call: ir.Node, function: ir.Function, taken: set[str]) -> None:
    """Give a call as many outputs as its function, all with names, and save the name of the call as metadata."""
    results = [value.name for value in call.outputs if value.name]
    call.metadata_props[CALL] = stem = call.name or next(iter(results), function.name)
    call.resize_outputs(len(function.outputs))
    for result, source in zip(call.outputs, function.outputs, strict=True):
        result.name = result.name or unused_name(taken, f"{stem}/{source.name}")


def _end_with_nodes(function: ir.Function) -> None:
    """Make each output of a function the result of a separate node, which can take the name of a call's output."""
    seen: set[ir.Value] = set()
    for index, value in enumerate(function.outputs):
        if value in seen or value.producer() is None:
            copy = ir.node("Identity", [value], name="Identity")
            copy.outputs[0].name = f"{value.name}_output{index}"
            function.append(copy)
            function.outputs[index] = copy.outputs[0]
        seen.add(value)


def _rename(node: ir.Node, call: str, taken: set[str]) -> None:
    """Name an inlined node, its outputs and the values of its bodies ``call/name``."""
    own = node.metadata_props.pop(NAME)
    node.metadata_props[ORIGIN] = json.dumps([call, *(taken_origins(node) or [own])])
    node.name = unused_name(taken, f"{call}/{own}")
    graphs = [graph for each in node.attributes.values() if each.type in GRAPHS for graph in _graphs(each)]
    inner = [value for graph in graphs for value in [*graph.inputs, *graph.initializers.values()]]
    for value in [*node.outputs, *inner]:
        name = value.metadata_props.pop(NAME, None)
        if name is not None:
            value.name = unused_name(taken, f"{call}/{name}") if name else ""


def taken_origins(node: ir.Node) -> list[str]:
    """Remove the entry `ORIGIN` of a node, and return its names; none if it is not what `inline_functions` writes."""
    try:
        names = decode_json(node.metadata_props.pop(ORIGIN, "[]"))
    except ValueError:
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _graphs(attribute: ir.Attr) -> tuple[ir.Graph, ...]:
    """Return the bodies that an attribute holds."""
    return (attribute.as_graph(),) if attribute.type == ir.AttributeType.GRAPH else tuple(attribute.as_graphs())


def _drop_imports(model: ir.Model, domains: set[str]) -> None:
    """Remove the imports of those `domains` that no node and no function uses."""
    used = {"", *(domain for domain, *_ in model.functions), *(node.domain for node in model.graph.all_nodes())}
    for domain in domains - used:
        model.opset_imports.pop(domain, None)
