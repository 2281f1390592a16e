"""Write what onnx-ir cannot read in another way, before it reads a model."""

from __future__ import annotations

from collections.abc import MutableSequence

import numpy as np
import onnx
from onnx import numpy_helper

LONG_NAME = "ai.onnx"
"""The long name of the standard domain, whose short name is empty."""


def mend(proto: onnx.ModelProto) -> None:
    """Make sparse initializers dense, and keep one version of each operator set, in place."""
    _make_dense(proto.graph)
    for imports in (proto.opset_import, *(function.opset_import for function in proto.functions)):
        _keep_last(imports)


def _make_dense(graph: onnx.GraphProto) -> None:
    """Replace sparse initializers with dense ones, in place: onnx-ir has no sparse tensors."""
    for sparse in graph.sparse_initializer:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        if indices.ndim == 1:  # positions in the flat array; otherwise one row of coordinates for each value
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
        graph.initializer.append(numpy_helper.from_array(dense, sparse.values.name))
    del graph.sparse_initializer[:]
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                _make_dense(body)


def _keep_last(imports: MutableSequence[onnx.OperatorSetIdProto]) -> None:
    """Keep one version of each operator set, in place: the last one, as ONNX Runtime does."""
    last = {"" if each.domain == LONG_NAME else each.domain: each.version for each in imports}
    if len(last) < len(imports):
        del imports[:]
        imports.extend(onnx.helper.make_opsetid(domain, version) for domain, version in last.items())
