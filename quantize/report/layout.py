"""Where the nodes of a graph stand in its picture: in layers, each below all that it reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .record import Graph

WIDTH, HEIGHT = 156, 42  # of a node, in pixels
ACROSS, DOWN = 178, 76  # from one node to the next
EDGE = 20
"""Pixels around the picture."""
MOST = 20_000
"""Points, nodes and the bends of edges, that are placed so that few edges cross; of more, nodes stand as they come."""
ROUNDS = 40

Pixels = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A node in the picture.

    Attributes:
        name: The node; of an input or output of the model, its name.
        kind: ``node``, ``input`` or ``output``.
        x: Pixels from the left to its middle.
        y: Pixels from the top to its middle.
        layer: How many nodes the longest way to it has.
    """

    name: str
    kind: str
    x: float
    y: float
    layer: int


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that one node makes and another reads.

    Attributes:
        source: Index of the box that makes it.
        target: Index of the box that reads it.
        tensor: The tensor.
        path: The line, as the ``d`` of an SVG path.
    """

    source: int
    target: int
    tensor: str
    path: str


@dataclass(frozen=True, slots=True)
class Picture:
    """The boxes and lines of a graph.

    Attributes:
        boxes: The inputs of the model, its nodes, its outputs.
        edges: The tensors between them.
        width: Pixels.
        height: Pixels.
    """

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    width: float
    height: float


def picture_of(graph: Graph) -> Picture:
    """Place the nodes of a graph."""
    names = [("input", name) for name in graph.inputs]
    names += [("node", node.name) for node in graph.nodes]
    names += [("output", name) for name in graph.outputs]
    links = _links(graph)
    layers = _layers(len(names), links)
    ways, steps, levels = _with_bends(links, layers)
    if len(levels) <= MOST:
        places = _placed(steps, levels)
    else:
        places, ways = _in_rows(layers), [[source, target] for source, target, _ in links]
    left = min((x for x, _ in places), default=0.0)
    at = [(EDGE + WIDTH / 2 + (x - left) * ACROSS, EDGE + HEIGHT / 2 + y * DOWN) for x, y in places]
    boxes = [Box(name, kind, *at[index], layers[index]) for index, (kind, name) in enumerate(names)]
    lines = [
        Edge(source, target, tensor, _line([at[index] for index in way]))
        for (source, target, tensor), way in zip(links, ways, strict=True)
    ]
    width = max((x for x, _ in at), default=0.0) + WIDTH / 2 + EDGE
    height = max((y for _, y in at), default=0.0) + HEIGHT / 2 + EDGE
    return Picture(tuple(boxes), tuple(lines), width, height)


def _links(graph: Graph) -> list[tuple[int, int, str]]:
    """Return who reads what of whom, by index: inputs, nodes, outputs."""
    first, last = len(graph.inputs), len(graph.inputs) + len(graph.nodes)
    makers = {name: index for index, name in enumerate(graph.inputs)}
    makers |= {name: first + index for index, node in enumerate(graph.nodes) for name in node.outputs}
    readers = [(first + index, name) for index, node in enumerate(graph.nodes) for name in node.inputs]
    readers += [(last + index, name) for index, name in enumerate(graph.outputs)]
    return [(makers[name], reader, name) for reader, name in readers if name in makers and makers[name] != reader]


def _layers(count: int, links: Sequence[tuple[int, int, str]]) -> list[int]:
    """Return the longest way to each box; what is read by nobody but below it comes right above its reader.

    Nodes of bodies come after their owner in the list, so that the order is found here (Kahn).
    """
    after: dict[int, list[int]] = defaultdict(list)
    waiting = [0] * count
    for source, target, _ in links:
        after[source].append(target)
        waiting[target] += 1
    ready = [index for index in range(count) if not waiting[index]]
    layers = [0] * count
    order = []
    while ready:
        index = ready.pop()
        order.append(index)
        for target in after[index]:
            layers[target] = max(layers[target], layers[index] + 1)
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    fed = {target for _, target, _ in links}
    for index in reversed(order):
        if index not in fed and after[index]:
            layers[index] = min(layers[target] for target in after[index]) - 1
    return layers


def _with_bends(
    links: Sequence[tuple[int, int, str]], layers: Sequence[int]
) -> tuple[list[list[int]], list[tuple[int, int]], list[int]]:
    """Give an edge a point in each layer that it crosses.

    Returns:
        The points of each edge; the edges between neighbours; the layer of each point.
    """
    levels = list(layers)
    ways, steps = [], []
    for source, target, _ in links:
        bends = range(len(levels), len(levels) + max(0, levels[target] - levels[source] - 1))
        levels += range(levels[source] + 1, levels[target])
        way = [source, *bends, target]
        steps += list(pairwise(way))
        ways.append(way)
    return ways, steps, levels


def _placed(steps: Sequence[tuple[int, int]], levels: Sequence[int]) -> list[Pixels]:
    """Return the place of each point by Sugiyama's method, in units of a node."""
    if not levels:
        return []
    import igraph

    drawn = igraph.Graph(len(levels), list(steps), directed=True)
    found = drawn.layout_sugiyama(layers=list(levels), hgap=1, vgap=1, maxiter=ROUNDS)
    return _apart([float(x) for x, _ in found.coords[: len(levels)]], levels)


def _in_rows(levels: Sequence[int]) -> list[Pixels]:
    """Return the place of each point in its layer, in the order in which they come."""
    taken: Counter[int] = Counter()
    places = []
    for level in levels:
        places.append((float(taken[level]), float(level)))
        taken[level] += 1
    return places


def _apart(across: Sequence[float], levels: Sequence[int]) -> list[Pixels]:
    """Push apart what Sugiyama's method has left overlapping in a layer, about the layer's middle."""
    rows: dict[int, list[int]] = defaultdict(list)
    for index in sorted(range(len(across)), key=lambda index: across[index]):
        rows[levels[index]].append(index)
    places = list(across)
    for row in rows.values():
        for one, next_ in pairwise(row):
            places[next_] = max(places[next_], places[one] + 1.0)
        pushed = sum(places[index] - across[index] for index in row) / len(row)
        for index in row:
            places[index] -= pushed
    return [(x, float(level)) for x, level in zip(places, levels, strict=True)]


def _line(points: Sequence[Pixels]) -> str:
    """Return a smooth line from the lower edge of one box to the upper edge of another, as an SVG path."""
    (x, y), (end_x, end_y) = points[0], points[-1]
    y, end_y = y + HEIGHT / 2, end_y - HEIGHT / 2
    stops = [(x, y), *points[1:-1], (end_x, end_y)]
    text = [f"M{x:g} {y:g}"]
    for (x0, y0), (x1, y1) in pairwise(stops):
        middle = (y0 + y1) / 2
        text.append(f"L{x1:g} {y1:g}" if x0 == x1 else f"C{x0:g} {middle:g} {x1:g} {middle:g} {x1:g} {y1:g}")
    return "".join(text)
