"""Place the nodes of a graph in a picture: in layers, each node below the nodes that it reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .record import Graph

WIDTH, HEIGHT = 156, 42  # size of a node, in pixels
ACROSS, DOWN = 178, 76  # pixels between the middles of neighbouring nodes
EDGE = 20
"""Pixels of the margin around the picture."""
MOST = 20_000
"""The greatest number of nodes and bends for Sugiyama's method; larger layers keep the order of the graph."""
ROUNDS = 40

Pixels = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A node in the picture.

    Attributes:
        name: The name of the node, or of the input or output of the model.
        kind: ``node``, ``input`` or ``output``.
        x: Pixels from the left edge to the middle of the box.
        y: Pixels from the top edge to the middle of the box.
        layer: The number of its row; 0 is the top row.
    """

    name: str
    kind: str
    x: float
    y: float
    layer: int


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that one box writes and another box reads.

    Attributes:
        source: Index of the box that writes the tensor.
        target: Index of the box that reads the tensor.
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
    """Return the source, the target and the name of each tensor; box indices count inputs, then nodes, then outputs."""
    first, last = len(graph.inputs), len(graph.inputs) + len(graph.nodes)
    makers = {name: index for index, name in enumerate(graph.inputs)}
    makers |= {name: first + index for index, node in enumerate(graph.nodes) for name in node.outputs}
    readers = [(first + index, name) for index, node in enumerate(graph.nodes) for name in node.inputs]
    readers += [(last + index, name) for index, name in enumerate(graph.outputs)]
    return [(makers[name], reader, name) for reader, name in readers if name in makers and makers[name] != reader]


def _layers(count: int, links: Sequence[tuple[int, int, str]]) -> list[int]:
    """Return the layer of each box: the length of the longest path to the box.

    A box that reads no tensor comes directly above its first reader. The boxes are sorted by Kahn's algorithm, because
    the nodes of a body come after the node that owns the body.
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
    """Add a point to each edge for every layer that the edge crosses.

    Returns:
        The points of each edge; the pairs of neighbouring points; the layer of each point.
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
    """Return the position of each point by Sugiyama's method; the unit is the distance of two nodes."""
    if not levels:
        return []
    import igraph

    drawn = igraph.Graph(len(levels), list(steps), directed=True)
    found = drawn.layout_sugiyama(layers=list(levels), hgap=1, vgap=1, maxiter=ROUNDS)
    return _apart([float(x) for x, _ in found.coords[: len(levels)]], levels)


def _in_rows(levels: Sequence[int]) -> list[Pixels]:
    """Return the position of each point; the points of a layer keep their order."""
    taken: Counter[int] = Counter()
    places = []
    for level in levels:
        places.append((float(taken[level]), float(level)))
        taken[level] += 1
    return places


def _apart(across: Sequence[float], levels: Sequence[int]) -> list[Pixels]:
    """Move apart points that overlap after Sugiyama's method; the mean position of a layer does not change."""
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
