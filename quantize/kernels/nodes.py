"""Nodes of native operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ... import NATIVE_DOMAIN
from ...transforms.graphs.rewriter import add_initializer
from .library import VERSION

OMITTED = f"{NATIVE_DOMAIN}/omitted"
"""The name of the initializer that stands for omitted inputs."""


def native_node(
    graph: ir.Graph,
    operator: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, ir.Attr] | None = None,
    *,
    name: str | None = None,
    results: int = 1,
) -> ir.Node:
    """Return a node of a native operator; the graph gets the import of the domain.

    The library tells ONNX Runtime the first input alone, and that more follow, which makes sessions faster to create.
    ONNX Runtime refuses omitted inputs then, so that an initializer of bool stands for each.

    Args:
        graph: The graph that the node will be part of.
        operator: The operator.
        inputs: The inputs; None for one that the node omits.
        attributes: The attributes.
        name: The name of the node.
        results: The number of outputs.
    """
    graph.opset_imports[NATIVE_DOMAIN] = VERSION
    given = list(inputs)
    while given[-1] is None:
        given.pop()
    if None in given:
        omitted = graph.initializers.get(OMITTED) or add_initializer(graph, OMITTED, np.zeros((), np.bool_))
        given = [omitted if value is None else value for value in given]
    return ir.node(operator, given, dict(attributes or {}), domain=NATIVE_DOMAIN, name=name, num_outputs=results)
