"""Store equal initializers once."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import DeduplicateHashedInitializersPass

from .graphs.queries import release
from .graphs.rewriter import quiet
from .registry import Change, transform

COMPARED = 2**12
"""Number of elements up to which a tensor is always compared as a whole."""


@transform("deduplicate_initializers")
def deduplicate_initializers(model: ir.Model) -> Change:
    """Merge initializers with equal type, shape and content, within the graph and within each body.

    Before:  y = Add(MatMul(x, V), MatMul(z, W)), with V equal to W
    After:   y = Add(MatMul(x, V), MatMul(z, V))
    Left alone: initializers that a caller may override; initializers that are graph outputs; equal initializers of
        different graphs.
    """
    with quiet():
        return Change(merge_initializers(model))


def merge_initializers(model: ir.Model) -> int:
    """Merge equal initializers of each graph; return the number of initializers removed."""
    before = sum(len(graph.initializers) for graph in model.graphs())
    DeduplicateHashedInitializersPass(size_limit=max(map(_most_to_read, model.graphs())))(model)
    return before - sum(len(graph.initializers) for graph in model.graphs())


def _most_to_read(graph: ir.Graph) -> int:
    """Return the size of the largest initializer that begins like another one, at least `COMPARED`.

    The pass reads whole initializers, which is slow for large ones. Most large initializers differ in the first
    `COMPARED` elements.
    """
    seen: set[object] = set()
    most = COMPARED
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.size > COMPARED:
            begin = (tensor.dtype, tuple(tensor.shape.numpy()), tensor.numpy().reshape(-1)[:COMPARED].tobytes())
            release(tensor)
            most = max(most, tensor.size if begin in seen else 0)
            seen.add(begin)
    return most
