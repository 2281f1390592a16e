"""The placement with the least cost: a minimum cut over the domains of units and tensors.

Two binary variables of a unit say whether it reads uint8 and whether it writes uint8. A tensor costs one QuantizeLinear
if it is written in float and any unit reads it in uint8, and one DequantizeLinear in the opposite case. The cost is a
sum of submodular terms of two binary variables; a minimum s-t cut minimises it
(Kolmogorov and Zabih, What energy functions can be minimized via graph cuts?, 2004).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...transforms.int8.plan import Impl

Node: TypeAlias = tuple[str, str]
"""A variable, which is 1 on the side of the source: its kind, and the name of its unit or tensor."""
SOURCE, SINK = ("source", ""), ("sink", "")
"""The constants 1 and 0, which are uint8 and float."""
BITS = 50
"""The sum of all costs is below 2^BITS units; float64 holds such numbers, and sums of a few, exactly."""


@dataclass(frozen=True, slots=True)
class Item:
    """A unit to be placed.

    Attributes:
        name: Its name.
        inputs: The tensors that it reads.
        outputs: The tensors that it writes.
        costs: Microseconds of each possible implementation, at least 0.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    costs: Mapping[Impl, float]


@dataclass(frozen=True, slots=True)
class Problem:
    """Units with the tensors between them.

    Attributes:
        items: The units.
        quantize: Microseconds of a QuantizeLinear of each tensor.
        dequantize: Microseconds of a DequantizeLinear of each tensor.
        model_outputs: The outputs of the model, which are read in float.
    """

    items: Sequence[Item]
    quantize: Mapping[str, float]
    dequantize: Mapping[str, float]
    model_outputs: frozenset[str] = field(default_factory=frozenset)


def weighted_sum(problems: Sequence[Problem], weights: Sequence[float]) -> Problem:
    """Return the problem whose costs are the weighted sums of the costs of problems with the same units and tensors.

    A unit has the implementations that it has in every problem.
    """
    first, weighted = problems[0], list(zip(problems, weights, strict=True))
    items = []
    for index, item in enumerate(first.items):
        forms = [impl for impl in item.costs if all(impl in each.items[index].costs for each in problems)]
        costs = {impl: math.fsum(w * each.items[index].costs[impl] for each, w in weighted) for impl in forms}
        items.append(Item(item.name, item.inputs, item.outputs, costs))
    return Problem(
        items,
        {tensor: math.fsum(w * each.quantize[tensor] for each, w in weighted) for tensor in first.quantize},
        {tensor: math.fsum(w * each.dequantize[tensor] for each, w in weighted) for tensor in first.dequantize},
        first.model_outputs,
    )


def cheapest(problem: Problem) -> dict[str, Impl]:
    """Return the implementation of each unit in a placement with the least cost."""
    graph = _Cut()
    for item in problem.items:
        _add_item(graph, item)
    written = {tensor: _output(item) for item in problem.items for tensor in item.outputs}
    readers: dict[str, list[Node]] = defaultdict(list)
    for item in problem.items:
        for tensor in item.inputs:
            readers[tensor].append(_input(item))
    for tensor in problem.model_outputs:
        readers[tensor].append(SINK)
    for tensor, variables in readers.items():
        _add_tensor(graph, problem, tensor, written.get(tensor, SINK), variables)
    ones = graph.source_side()
    return {item.name: _read_off(item, ones) for item in problem.items}


@dataclass(slots=True)
class _Cut:
    """A directed graph whose edges have costs that count if their start is 1 (at the source) and their end is 0.

    Attributes:
        costs: By start and end; infinite where the pair (1, 0) is forbidden.
    """

    costs: dict[tuple[Node, Node], float] = field(default_factory=dict)

    def add(self, start: Node, end: Node, cost: float) -> None:
        """Add a cost to an edge."""
        self.costs[start, end] = self.costs.get((start, end), 0.0) + cost

    def source_side(self) -> set[Node]:
        """Return the nodes on the side of the source of a minimum cut, found by push-relabel.

        Costs become whole numbers of a unit, about 2^-50 of their sum, so that all sums and differences are exact.
        With rounded differences an edge that is full seems to have room, and the cut is not a minimum. An infinite cost
        becomes one that is greater than the sum of all others: no minimum cut contains its edge.
        """
        import igraph

        nodes = list(dict.fromkeys([SOURCE, SINK, *(node for edge in self.costs for node in edge)]))
        numbers = {node: number for number, node in enumerate(nodes)}
        _, exponent = math.frexp(math.fsum(cost for cost in self.costs.values() if cost < math.inf))
        whole = [
            round(math.ldexp(cost, BITS - exponent)) if cost < math.inf else 2**BITS for cost in self.costs.values()
        ]
        graph = igraph.Graph(len(nodes), [(numbers[a], numbers[b]) for a, b in self.costs], directed=True)
        cut = graph.mincut(numbers[SOURCE], numbers[SINK], whole)
        return {nodes[number] for number in cut.partition[0]}


def _domains(impl: Impl) -> tuple[Node, Node]:
    """Return whether an implementation reads uint8, and whether it writes uint8, as constants."""
    return SOURCE if impl.reads_u8 else SINK, SOURCE if impl.writes_u8 else SINK


def _input(item: Item) -> Node:
    """Return the variable for the inputs of a unit; a constant if all its implementations read the same."""
    reads = {_domains(impl)[0] for impl in item.costs}
    return ("reads", item.name) if len(reads) > 1 else reads.pop()


def _output(item: Item) -> Node:
    """Return the variable for the outputs of a unit: that of its inputs, one of its own, or a constant."""
    pairs = {_domains(impl) for impl in item.costs}
    writes = {written for _, written in pairs}
    if len(writes) == 1:
        return writes.pop()
    return ("reads", item.name) if all(read == written for read, written in pairs) else ("writes", item.name)


def _least(item: Item, reads: Node, writes: Node) -> float:
    """Return the least cost of an implementation with these domains; infinite without one."""
    return min((cost for impl, cost in item.costs.items() if _domains(impl) == (reads, writes)), default=math.inf)


def _add_item(graph: _Cut, item: Item) -> None:
    """Add the cost of a unit: c00 + (c10 - c00) reads + (c11 - c10) writes, where writes implies reads."""
    reads, writes = _input(item), _output(item)
    float_, mixed, u8 = _least(item, SINK, SINK), _least(item, SOURCE, SINK), _least(item, SOURCE, SOURCE)
    if writes not in (reads, SOURCE, SINK):
        if reads not in (SOURCE, SINK):
            _add_unary(graph, reads, mixed - float_)
            graph.add(writes, reads, math.inf)
        _add_unary(graph, writes, u8 - mixed)
    elif reads not in (SOURCE, SINK):
        _add_unary(graph, reads, (u8 if writes == reads else mixed) - float_)


def _add_unary(graph: _Cut, variable: Node, extra: float) -> None:
    """Add the extra cost of the value 1 over the value 0."""
    if extra > 0:
        graph.add(variable, SINK, extra)
    else:
        graph.add(SOURCE, variable, -extra)


def _add_tensor(graph: _Cut, problem: Problem, tensor: str, writer: Node, readers: Sequence[Node]) -> None:
    """Add the cost of the conversions of a tensor."""
    u8_readers = [reader for reader in readers if reader != SINK]
    if u8_readers and writer != SOURCE:
        quantized = ("quantized", tensor)
        graph.add(quantized, writer, problem.quantize[tensor])
        for reader in u8_readers:
            graph.add(reader, quantized, math.inf)
    float_readers = [reader for reader in readers if reader != SOURCE]
    if float_readers and writer != SINK:
        only_u8 = ("integers alone", tensor)
        graph.add(writer, only_u8, problem.dequantize[tensor])
        for reader in float_readers:
            graph.add(only_u8, reader, math.inf)


def _read_off(item: Item, ones: set[Node]) -> Impl:
    """Return the cheapest implementation with the domains that the cut gives a unit."""
    domains = tuple(SOURCE if variable in ones else SINK for variable in (_input(item), _output(item)))
    fitting = {impl: cost for impl, cost in item.costs.items() if _domains(impl) == domains}
    return min(fitting, key=fitting.__getitem__)
