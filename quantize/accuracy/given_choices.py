"""Compare what layers compute from a choice, with the choice of the float model in both models.

A detector of the DETR family scores thousands of places, takes the best 300 with a TopK, and decodes them by attention.
Where two scores are nearly equal, their last bit decides which comes first: row 17 of the outputs is then another
object than row 17 of the float model's outputs, though neither is wrong. Here the INT8 model takes the entries that the
float model chooses, so that its rows are the same objects. The scores of the choice are compared by themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ...transforms.graphs.inference import inferred
from ...transforms.graphs.queries import nodes_by_name
from .choices import BEFORE_LAYERS, PREFIX, Reader, chooses, computed_inputs, into, is_layer, was_given

GIVEN = frozenset({"TopK", "ArgMax", "ArgMin", "Equal", "NonMaxSuppression"})
"""Operators whose choice is indices, or true and false: another model can take it over."""


def layered_choices(model: ir.Model) -> list[str]:
    """Return the names of the nodes of a simplified float model that choose by scores what layers then read."""
    if not any(node.op_type in GIVEN for node in model.graph):  # inference takes long
        return []
    known = inferred(model)
    read: set[ir.Value] = set()  # by layers, or by what leads to a layer
    found = []
    for node in reversed(model.graph):
        leads = any(output in read for output in node.outputs)
        if leads and node.op_type in GIVEN and chooses(node, known):
            found.append(str(node.name))
        if leads or is_layer(node):
            read |= {value for value in node.inputs if value is not None}
    return found[::-1]


def outputs_behind(model: ir.Model, names: Collection[str]) -> set[str]:
    """Return the outputs of a model that depend on some nodes."""
    behind: set[ir.Value] = set()
    for node in model.graph:
        if node.name in names or any(value in behind for value in node.inputs):
            behind |= set(node.outputs)
    return {str(output.name) for output in model.graph.outputs if output in behind}


def readers_of(model: ir.Model, names: Collection[str]) -> list[Reader]:
    """Return the float tensors by which nodes choose what layers read."""
    known = inferred(model) if names else {}
    return [
        (node.name, index, f"{value.name}{into(node.op_type, BEFORE_LAYERS)}")
        for node in model.graph
        if node.name in names
        for index, value in computed_inputs(node, known)
    ]


def given_choices(model: ir.Model, compared: Collection[str]) -> list[str]:
    """Return the choices that were given when two models were compared, from the names of what was compared."""
    if not was_given(compared):
        return []
    names = layered_choices(model)
    found = {name for name, _, label in readers_of(model, names) if label in compared}
    return [name for name in names if name in found]


def with_choices(model: ir.Model, simple: ir.Model, names: Sequence[str]) -> ir.Model:
    """Return a copy of a model in which readers of a choice read the one that the float model makes.

    Args:
        model: The float model, or the INT8 model made from it: the names of these nodes are the same.
        simple: The simplified float model; what leads to its choices becomes a part of the copy.
        names: The names of the nodes that choose; their own results stay where they are outputs of the model.
    """
    if not names:
        return model
    copy = model.clone()
    own = nodes_by_name(copy)
    made = dict(zip(names, _moved(simple, names, copy.graph), strict=True))
    for name, chosen in made.items():
        _read_instead(own[name], chosen, copy.graph)
    return copy


def _moved(simple: ir.Model, names: Sequence[str], graph: ir.Graph) -> list[ir.Node]:
    """Copy some nodes of the float model, and all that they depend on, into another graph with the same inputs."""
    float_model = simple.clone()
    source = float_model.graph
    own = nodes_by_name(float_model)
    found = [own[name] for name in names]
    source.outputs.clear()
    source.outputs.extend(output for node in found for output in node.outputs)
    RemoveUnusedNodesPass()(float_model)
    source.outputs.clear()
    inputs = {value.name: value for value in graph.inputs}
    for value in list(source.inputs):
        if value.name in inputs:
            value.replace_all_uses_with(inputs[value.name])
    nodes = list(source)
    for name, weights in list(source.initializers.items()):
        del source.initializers[name]
        if weights.uses():
            weights.name = PREFIX + name
            graph.register_initializer(weights)
    source.remove(nodes)
    for node in nodes:
        node.name = PREFIX + str(node.name)
        for output in node.outputs:
            output.name = PREFIX + str(output.name) if output.name else output.name
    graph.insert_before(graph[0], nodes)  # not between others: trials of single tensors run what is behind these alone
    return found


def _read_instead(node: ir.Node, chosen: ir.Node, graph: ir.Graph) -> None:
    """Let the readers of a node's choice read the choice of another node.

    A TopK takes its own values by these indices.
    """
    given = [*chosen.outputs]
    if node.op_type == "TopK":
        taken = ir.node(
            "GatherElements",
            [node.inputs[0], chosen.outputs[1]],
            attributes={"axis": node.attributes.get_int("axis", -1)},
            name=f"{PREFIX}taken/{node.name}",
        )
        taken.outputs[0].name = f"{PREFIX}taken/{node.outputs[0].name}"
        graph.insert_after(node, taken)
        given[0] = taken.outputs[0]
    for own, other in zip(node.outputs, given, strict=True):
        for reader, index in own.uses():
            reader.replace_input_with(index, other)
