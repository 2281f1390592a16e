"""Which function of a model calls which, and how many nodes the calls become."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ..registry import TransformError

Identifier = tuple[str, str, str]  # domain, name, overload
MOST_NODES = 200_000
"""Nodes that a model may have when its functions are inlined, as the runtime inlines them too."""


def callees(model: ir.Model, name: Identifier) -> set[Identifier]:
    """Return the identifiers of all operators in a function, including calls of functions."""
    return {node.op_identifier() for node in model.functions[name].all_nodes()}


def check_calls(model: ir.Model) -> list[Identifier]:
    """Return the identifiers of all functions; each function comes after the functions that it calls.

    Raises:
        TransformError: Functions call each other in a circle, or become more than `MOST_NODES` nodes.
    """
    sizes: dict[Identifier, int] = {}  # nodes of a function, when the calls in it are inlined
    for start in model.functions:
        path: list[tuple[Identifier, Iterator[Identifier]]] = []
        waiting: Identifier | None = start
        while waiting is not None or path:  # no recursion: a chain of calls may be long
            if waiting is not None:
                if waiting not in sizes and waiting in model.functions:
                    _check_circle([name for name, _ in path], waiting)
                    path.append((waiting, iter(sorted(callees(model, waiting)))))
                waiting = None
                continue
            name, rest = path[-1]
            waiting = next(rest, None)
            if waiting is None:
                sizes[name] = _count(model.functions[name].all_nodes(), sizes)
                path.pop()
    if sizes:
        _count(model.graph.all_nodes(), sizes)
    return list(sizes)


def _check_circle(path: list[Identifier], name: Identifier) -> None:
    """Refuse a function that is called on the way to itself."""
    if name in path:
        circle = " -> ".join(f"{domain}.{op}" for domain, op, _ in [*path[path.index(name) :], name][:9])
        raise TransformError(f"functions of the model call each other in a circle: {circle}")


def _count(nodes: Iterator[ir.Node], sizes: dict[Identifier, int]) -> int:
    """Return the number of nodes when functions are inlined."""
    count = sum(sizes.get(node.op_identifier(), 1) for node in nodes)
    if count > MOST_NODES and any(size > 1 for size in sizes.values()):
        raise TransformError(f"the functions of the model would become more than {MOST_NODES:,} nodes")
    return count
