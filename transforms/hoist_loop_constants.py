"""Take out of the state of a loop what every step passes on unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from .graphs.queries import bodies, computing_nodes, constant, graph_of, made_by, own_values
from .graphs.rewriter import discard, names, remove, replace, unused_name
from .registry import Change, LeftAlone, transform

IN_FRONT = {"Loop": (2, 1), "Scan": (0, 0)}
"""Inputs of a loop, and results of its body, in front of the carried tensors: steps and condition."""
MOST_COPIED = 2**28
"""Bytes of the largest constant that a body gets a copy of."""


@dataclass(frozen=True, slots=True)
class _Carried:
    """A tensor that a loop carries from step to step.

    Attributes:
        place: Its place among the carried tensors, and among the results of the loop.
        outer: The tensor of the first step, from outside.
        received: The input of the body.
        returned: The result of the body.
        result: The result of the loop.
    """

    place: int
    outer: ir.Value
    received: ir.Value
    returned: ir.Value
    result: ir.Value


@transform("hoist_loop_constants", after=("inline_functions", "remove_default_inputs"))
def hoist_loop_constants(model: ir.Model) -> Change:
    """Take out of the state of a Loop or a Scan the tensors that its body returns unchanged.

    Before:  y, v = Loop(n, true, x, W), body (i, c, a, w): c, Tanh(MatMul(a, w)), Identity(w)
    After:   y = Loop(n, true, x),       body (i, c, a):    c, Tanh(MatMul(a, W));  W is read in place of v
        TensorFlow carries the weights of an LSTM through its while loop. Products with constants have INT8 forms, and
        no step copies them. The body gets a copy of a constant up to 256 MiB, since ONNX Runtime packs the weights of a
        product when it loads a model only where they are constants of the same graph. It reads others from outside.
    Left alone: a tensor that is a result of the graph around the loop (``graph-output``) or another result of the body
        too (``other-result``); the last carried tensor of a loop without other results (``only-result``).
    """
    change, taken = Change(), names(model)
    for node in computing_nodes(model, *IN_FRONT):
        for body in bodies(node, model.opset_imports.get("", 1)):
            hoisted: list[_Carried] = []
            for each in _carried(node, body):
                if _source(each.returned) is not each.received:
                    continue
                try:
                    _check(each, body, len(hoisted) + 1 == len(node.outputs))
                except LeftAlone as reason:
                    change.skip(str(reason))
                    continue
                hoisted.append(each)
            if hoisted:
                _hoist(node, body, hoisted, taken)
                change.applied += len(hoisted)
    return change


def _carried(node: ir.Node, body: ir.Graph) -> Iterator[_Carried]:
    """Yield the tensors that a loop carries."""
    inputs, results = IN_FRONT[node.op_type]
    count = len(node.inputs) - inputs - node.attributes.get_int("num_scan_inputs", 0)
    for place in range(count):
        outer = node.inputs[inputs + place]
        if outer is not None:
            ends = body.inputs[inputs + place], body.outputs[results + place], node.outputs[place]
            yield _Carried(place, outer, *ends)


def _source(value: ir.Value) -> ir.Value:
    """Return the tensor that a chain of Identity copies."""
    while (copy := made_by(value, "Identity")) is not None and copy.inputs[0] is not None:
        value = copy.inputs[0]
    return value


def _check(each: _Carried, body: ir.Graph, last: bool) -> None:
    """Raise LeftAlone if a carried tensor must stay.

    Args:
        each: A tensor that the body returns unchanged.
        body: The body.
        last: Whether the loop would have no result without it.
    """
    if each.result.is_graph_output():
        raise LeftAlone("graph-output")
    if sum(value is each.received for value in body.outputs) > int(each.returned is each.received):
        raise LeftAlone("other-result")
    if last:
        raise LeftAlone("only-result")


def _hoist(node: ir.Node, body: ir.Graph, hoisted: Sequence[_Carried], taken: set[str]) -> None:
    """Remove carried tensors from a loop and its body; their readers read the tensors from outside."""
    inputs, results = IN_FRONT[node.op_type]
    for each in reversed(hoisted):
        body.outputs.pop(results + each.place)
        each.received.replace_all_uses_with(_inside(each.outer, body, taken))
        each.result.replace_all_uses_with(each.outer)
        body.inputs.pop(inputs + each.place)
    places = {each.place for each in hoisted}
    kept = [value for place, value in enumerate(node.outputs) if place not in places]
    rest = [value for index, value in enumerate(node.inputs) if index - inputs not in places]
    shorter = ir.Node(node.domain, node.op_type, rest, [*node.attributes.values()], num_outputs=len(kept))
    shorter.name, shorter.doc_string = node.name, node.doc_string
    shorter.metadata_props.update(node.metadata_props)
    graph_of(node).insert_after(node, [shorter])
    labels = [value.name for value in kept]
    for value, new in zip(kept, shorter.outputs, strict=True):
        replace(value, new)
    remove(node)
    for label, new in zip(labels, shorter.outputs, strict=True):
        new.name = label
    discard(*(each.outer for each in hoisted))


def _inside(outer: ir.Value, body: ir.Graph, taken: set[str]) -> ir.Value:
    """Return what a body reads in place of a tensor from outside: its own copy of a constant, else the tensor.

    The other tensors of the body, and of the bodies in it, lose the name of a tensor that they would hide.
    """
    tensor = constant(outer)
    if tensor is not None and tensor.nbytes <= MOST_COPIED:
        name = unused_name(taken, str(outer.name))
        shape = ir.Shape(tensor.shape.numpy())
        kept = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        body.register_initializer(kept)
        return kept
    for graph in (body, *body.subgraphs()):
        for value in own_values(graph):
            if value.name == outer.name:
                value.name = unused_name(taken, str(outer.name))
    return outer
