"""Replace meaningful names by short names without a meaning."""

from __future__ import annotations

import string
from collections.abc import Iterator
from itertools import count, product

import onnx_ir as ir

from .graphs.queries import every_graph, own_values
from .registry import Change, transform

LETTERS = string.ascii_letters


@transform("obfuscate_names")
def obfuscate_names(model: ir.Model) -> Change:
    """Give every node and tensor a short name without a meaning, and remove comments.

    Before:  encoder/attention/query: q = MatMul(hidden, W_query)
    After:   a: b = MatMul(c, d)
        Comments are the doc strings and the metadata of graphs, nodes and tensors; exporters put stack traces there.
    Left alone: the names of the graph's inputs and outputs, because callers use them; the names of operators, domains
        and functions; the metadata of the model.
    """
    kept = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    graphs = list(every_graph(model))
    named: list[ir.Value | ir.Node] = []
    for graph in graphs:
        named += [value for value in own_values(graph) if value.name and value.name not in kept]
        named += list(graph)
    fresh = _short(kept)
    renames = [(thing, next(fresh)) for thing in named]
    change = Change(sum(_strip(graph) for graph in graphs))
    changed = sum(thing.name != name for thing, name in renames)
    if changed:
        for number, (thing, _) in enumerate(renames):  # temporary names, so that no new name is still in use
            thing.name = f"requant/{number}"
        for thing, name in renames:  # rename all: a renamed initializer moves to the end of the list
            thing.name = name
    change.applied += changed
    return change


def _short(kept: set[str | None]) -> Iterator[str]:
    """Yield a, b, ..., Z, aa, ab, ... except the names in `kept`."""
    for length in count(1):
        yield from (name for name in map("".join, product(LETTERS, repeat=length)) if name not in kept)


def _strip(graph: ir.Graph) -> int:
    """Remove the comments of a graph, its nodes and its tensors; return how many of these had one."""
    stripped = 0
    for thing in (graph, *graph, *own_values(graph)):
        if thing.doc_string or thing.metadata_props:
            thing.doc_string = None
            thing.metadata_props.clear()
            stripped += 1
    return stripped
