"""The function of a native call: the nodes that it replaces, with their constants and attributes as parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from ... import NATIVE_DOMAIN
from ...transforms.spell_slow_functions import spell_body
from .call import Call
from .chains import copied

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


def function_of(model: ir.Model, call: Call) -> tuple[ir.Function, list[ir.Value]]:
    """Return the function of a call, and the constants that are its further inputs.

    Attributes of the node and all constants are parameters, so that one function is the body of many calls. Where there
    is no native operator the body computes slow functions in fast operators.
    """
    constants = _constants_of(call)
    formal = [ir.Value(name=name) for name in (*call.names, *(f"c{index}" for index in range(len(constants))))]
    given = zip((*call.inputs, *constants), (*formal[: len(call.inputs)], *formal[len(call.names) :]), strict=True)
    nodes, outputs = _body_of(call, {value: own for value, own in given if value is not None})
    # no node of a body is native; the import would give equal bodies different contents
    imports = {domain: version for domain, version in model.opset_imports.items() if domain != NATIVE_DOMAIN}
    graph = ir.Graph(formal, outputs, nodes=nodes, opset_imports=imports, name="body")
    spell_body(graph)
    for index, result in enumerate(graph.outputs):
        result.name = f"y{index or ''}"
    attributes = [ir.Attr(name, attribute.type, None) for name, attribute in call.attributes.items()]
    return ir.Function(NATIVE_DOMAIN, call.operator, graph=graph, attributes=attributes), constants


def _constants_of(call: Call) -> list[ir.Value]:
    """Return what the nodes of a call read and neither compute nor have among the inputs of the call."""
    nodes = [*call.body, *call.results.behind]
    known = {*call.inputs, *(value for node in nodes for value in node.outputs)}
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    return [value for value in read if value not in known]


def _body_of(call: Call, known: Mapping[ir.Value, ir.Value]) -> tuple[list[ir.Node], list[ir.Value]]:
    """Return copies of the nodes of a call, between Transposes if it computes in NHWC, and what they compute.

    Args:
        call: The call.
        known: The parameter that stands for each tensor that the nodes read.
    """
    results, in_nhwc = call.results, bool(call.tensors.shapes)
    before = [turned(known[value], TO_NCHW, "") for value in call.computed] if in_nhwc else []
    images = {value: node.outputs[0] for value, node in zip(call.computed, before, strict=False)}
    body = copied([*call.body, *results.behind], {**known, **images}, _no_constant)
    if call.anchor is not None:
        _refer_to_attributes(body[call.body.index(call.anchor.node)], call)
    last = body[len(call.body) - 1]
    after = [turned(last.outputs[0], TO_NHWC, "")] if in_nhwc else []
    more = {
        value: own
        for node, copy in zip(results.behind, body[len(call.body) :], strict=True)
        for value, own in zip(node.outputs, copy.outputs, strict=True)
    }
    outputs = [*(after or [last])[-1].outputs[: results.count], *(more[value] for value in results.more)]
    return [*before, *body, *after], outputs


def _refer_to_attributes(node: ir.Node, call: Call) -> None:
    """Give a node of the body the attributes of the call, except those that only the native operator has."""
    assert call.anchor is not None
    node.attributes.clear()
    for name, attribute in call.attributes.items():
        if name not in call.anchor.beside:
            node.attributes[name] = ir.RefAttr(name, name, attribute.type)


def _no_constant(_: ir.TensorProtocol) -> ir.Value:
    """Refuse a constant: all of them are inputs of the function."""
    raise AssertionError


def turned(x: ir.Value, order: Sequence[int], name: str) -> ir.Node:
    """Return a Transpose."""
    return ir.node("Transpose", [x], {"perm": list(order)}, name=name or None)
