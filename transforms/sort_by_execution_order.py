"""Put nodes behind those that they read."""

from __future__ import annotations

import onnx_ir as ir

from .graph import every_graph
from .registry import Change, TransformError, transform


@transform("sort_by_execution_order", takes_unsorted=True)
def sort_by_execution_order(model: ir.Model) -> Change:
    """Sort the nodes so that each comes after those whose results it reads, as ONNX demands.

    Before:  y = Relu(t); t = Conv(x, W)
    After:   t = Conv(x, W); y = Relu(t)
        As the first step it takes a model that is not sorted, which every other transform refuses.
    Left alone: the order of nodes of which neither needs the other.

    Raises:
        TransformError: Nodes need each other's results in a cycle.
    """
    before = [(graph, tuple(graph)) for graph in every_graph(model)]
    try:
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            graph.sort()
    except ValueError as error:
        raise TransformError("nodes need each other's results in a cycle, so that none can come first") from error
    return Change(sum(old is not new for graph, nodes in before for old, new in zip(nodes, graph, strict=True)))
