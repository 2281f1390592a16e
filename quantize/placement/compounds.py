"""Divide a model into units: which nodes compute together as one operator, and which stand alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    compounds = [
        *_attentions(graph, facts),
        *_group_norms(graph, facts),
        *_sloped(graph, facts),
        *_logarithms(graph, facts),
    ]
    return tuple(_units(graph, facts, compounds))


def _units(graph: ir.Graph, facts: Facts, compounds: Sequence[Compound]) -> Iterator[Unit]:
    """Yield the units of a graph; units of a body come before the node that runs the body."""
    for unit in units(graph, compounds):
        for name in unit.nodes:
            for body in bodies(facts.nodes[name], facts.opset):
                yield from _units(body, facts, ())
        yield unit


def _group_norms(graph: ir.Graph, facts: Facts) -> list[Compound]:
    """Return the normalizations of images by groups of channels that native operators may compute."""
    norms = [node for node in graph if node.op_type in NORMS]
    if not norms or not facts.native or facts.exact or not _decides_all(facts):
        return []
    shapes = {name: plain_shape(value) or () for name, value in facts.values.items()}
    found = [find_group_norm(node, shapes) for node in norms]
    return [
        Compound(GROUP_NORM, nodes, nodes[0].inputs[:1])
        for nodes in found
        if nodes and not any(node.name in facts.selection.strategies for node in nodes)
    ]


def _sloped(graph: ir.Graph, facts: Facts) -> list[Compound]:
    """Return the PRelus of two parts that native operators may compute."""
    if not facts.native or not _decides_all(facts):
        return []
    found = [each for node in graph if (each := find_sloped(node)) is not None and not sloped_obstacle(each, facts)]
    return [
        Compound(SLOPED, each.nodes, [each.x])
        for each in found
        if not any(node.name in facts.selection.strategies for node in each.nodes)
    ]


def _logarithms(graph: ir.Graph, facts: Facts) -> list[Compound]:
    """Return the logarithms far from 0 that are tables in native operators; the sum in front of one is not rounded."""
    if not facts.native or not _decides_all(facts):
        return []
    found = [each for node in graph if (each := find_logarithm(node)) is not None]
    return [
        Compound(FUNCTION, each.nodes, [each.x])
        for each in found
        if not any(node.name in facts.selection.strategies for node in each.nodes)
    ]


def _decides_all(facts: Facts) -> bool:
    """Whether the user leaves it to the rules which operators form one unit."""
    chosen = facts.selection
    return chosen.strategy in (Strategy.AUTO, Strategy.DYNAMIC, Strategy.BLOCK) and not chosen.include_ops


def _attentions(graph: ir.Graph, facts: Facts) -> list[Compound]:
    """Return the attentions that are units; none where the user decides over the forms of operators in them."""
    if not facts.attention or not _decides_all(facts):
        return []
    found: list[Compound] = []
    taken: set[ir.Node] = set()
    for node in graph:
        each = find_attention(node)
        if each is None or taken.intersection(each.nodes):  # two may share a product
            continue
        if not any(node.name in facts.selection.strategies for node in each.nodes):
            found.append(Compound.attention(each))
            taken.update(each.nodes)
    return found
