"""Replace an If whose condition is a constant by the nodes of the branch that it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import onnx_ir as ir

from ..graphs.queries import computing_nodes, constant, every_graph, graph_of, own_values
from ..graphs.rewriter import can_replace, insert_before, names, remove, replace, unused_name

BRANCHES = ("else_branch", "then_branch")  # by the condition


def take_branches(model: ir.Model, excluded: Collection[ir.Node] = ()) -> int:
    """Replace each If with a constant condition by the nodes of a branch, in place; return how many there were.

    An If inside a branch that is taken is replaced too. Tensors and nodes of the branch whose names are in use
    elsewhere get new ones.

    Args:
        model: The model.
        excluded: Nodes to leave alone.
    """
    count = 0
    while (found := _taken(model, excluded)) is not None:
        _inline(model, *found)
        count += 1
    return count


def _taken(model: ir.Model, excluded: Collection[ir.Node]) -> tuple[ir.Node, ir.Graph] | None:
    """Return the first If with a constant condition, and the branch that it takes; None if there is none."""
    for node in computing_nodes(model, "If"):
        condition = constant(node.inputs[0])
        if node in excluded or condition is None or condition.size != 1:
            continue
        return node, node.attributes[BRANCHES[bool(condition.numpy().item())]].as_graph()
    return None


def _inline(model: ir.Model, node: ir.Node, branch: ir.Graph) -> None:
    """Replace an If by the nodes of a branch."""
    _rename(model, node, branch)
    graph, results = graph_of(node), list(branch.outputs)
    while branch.outputs:
        branch.outputs.pop(0)
    for value in list(branch.initializers.values()):
        branch.initializers.pop(str(value.name))
        graph.register_initializer(value)
    moved = list(branch)
    branch.remove(moved)
    graph.insert_before(node, moved)
    for old, new in zip(node.outputs, results, strict=True):
        if not can_replace(old, new):
            new = insert_before(node, names(model), "Identity", [new], stem=f"{old.name}/copy")
        replace(old, new)
    remove(node)


def _rename(model: ir.Model, node: ir.Node, branch: ir.Graph) -> None:
    """Give the tensors and nodes of a branch new names where theirs are in use outside the If."""
    bodies = [each.as_graph() for each in node.attributes.values() if each.type is ir.AttributeType.GRAPH]
    inside = {graph for body in bodies for graph in (body, *body.subgraphs())}
    used = Counter(name for graph in every_graph(model) if graph not in inside for name in _names(graph))
    used.update(name for graph in branch.subgraphs() for name in _names(graph))
    taken = names(model)
    for each in (*own_values(branch), *branch):
        if each.name and used[each.name]:
            each.name = unused_name(taken, each.name)


def _names(graph: ir.Graph) -> list[str]:
    """Return the names of the tensors and nodes of a graph, without those of its bodies."""
    return [each.name for each in (*own_values(graph), *graph) if each.name]
