"""Divide a model into units: which nodes compute together as one operator, and which stand alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from ...transforms.graphs.queries import bodies, plain_shape
from ...transforms.int8.ops import FUNCTION, GROUP_NORM, SLOPED
from ...transforms.int8.plan import Unit
from ...transforms.int8.units import Compound, units
from ...transforms.patterns.attention import find_attention
from ...transforms.patterns.group_norms import OPERATORS as NORMS
from ...transforms.patterns.group_norms import find_group_norm
from ...transforms.patterns.logarithms import find_logarithm
from ...transforms.patterns.slopes import find_sloped
from ..options.declared import Strategy
from .facts import Facts
from .native_obstacles import sloped_obstacle


def units_of(graph: ir.Graph, facts: Facts) -> tuple[Unit, ...]:
    """Return the units of a graph and of its bodies in order; units of a body come before the node that runs it."""
    compounds: list[Compound] = []
    if _decides_all(facts):
        compounds += _attentions(graph, facts) if facts.attention else []
        compounds += _native_compounds(graph, facts) if facts.native else []
    return tuple(_units(graph, facts, compounds))


def _decides_all(facts: Facts) -> bool:
    """Whether the user leaves it to the rules which operators form one unit."""
    chosen = facts.selection
    return chosen.strategy in (Strategy.AUTO, Strategy.DYNAMIC, Strategy.BLOCK) and not chosen.include_ops


def _is_free(nodes: Iterable[ir.Node], facts: Facts) -> bool:
    """Whether the user decides over the form of none of some nodes."""
    return not any(node.name in facts.selection.strategies for node in nodes)


def _units(graph: ir.Graph, facts: Facts, compounds: Sequence[Compound]) -> Iterator[Unit]:
    """Yield the units of a graph; units of a body come before the node that runs the body."""
    for unit in units(graph, compounds):
        for name in unit.nodes:
            for body in bodies(facts.nodes[name], facts.opset):
                yield from _units(body, facts, ())
        yield unit


def _native_compounds(graph: ir.Graph, facts: Facts) -> list[Compound]:
    """Return what native operators may compute as one: normalizations of images, PRelus of two parts, logarithms.

    A logarithm far from 0 is a table; the sum in front of it is not rounded.
    """
    sloped = [each for each in map(find_sloped, graph) if each is not None and not sloped_obstacle(each, facts)]
    logarithms = [each for each in map(find_logarithm, graph) if each is not None]
    found = [
        *(Compound(GROUP_NORM, nodes, nodes[0].inputs[:1]) for nodes in _group_norms(graph, facts)),
        *(Compound(SLOPED, each.nodes, [each.x]) for each in sloped),
        *(Compound(FUNCTION, each.nodes, [each.x]) for each in logarithms),
    ]
    return [each for each in found if _is_free(each.nodes, facts)]


def _group_norms(graph: ir.Graph, facts: Facts) -> list[Sequence[ir.Node]]:
    """Return the nodes of each normalization of images by groups of channels; none where native operators are exact."""
    norms = [node for node in graph if node.op_type in NORMS]
    if not norms or facts.exact:
        return []
    shapes = {name: plain_shape(value) or () for name, value in facts.values.items()}
    return [nodes for node in norms if (nodes := find_group_norm(node, shapes))]


def _attentions(graph: ir.Graph, facts: Facts) -> list[Compound]:
    """Return the attentions that are units; none where the user decides over the forms of operators in them."""
    found: list[Compound] = []
    taken: set[ir.Node] = set()
    for each in filter(None, map(find_attention, graph)):
        if not taken.intersection(each.nodes) and _is_free(each.nodes, facts):  # two may share a product
            found.append(Compound.attention(each))
            taken.update(each.nodes)
    return found
