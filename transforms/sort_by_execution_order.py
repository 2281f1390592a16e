"""Sort nodes by execution order."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import every_graph
from .registry import Change, TransformError, transform


@transform("sort_by_execution_order", takes_unsorted=True)
def sort_by_execution_order(model: ir.Model) -> Change:
    """Sort the nodes so that each comes after the nodes whose results it reads, as ONNX requires.

    Before:  y = Relu(t); t = Conv(x, W)
    After:   t = Conv(x, W); y = Relu(t)
        As the first step it accepts an unsorted model, which every other transform rejects.
    Left alone: the order of nodes that do not depend on each other.

    Raises:
        TransformError: The nodes form a cycle.
    """
    before = [(graph, tuple(graph)) for graph in every_graph(model)]
    try:
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            graph.sort()
    except ValueError as error:
        raise TransformError("the nodes form a cycle, so there is no execution order") from error
    return Change(sum(old is not new for graph, nodes in before for old, new in zip(nodes, graph, strict=True)))
