"""Rewrite the parts of a model that onnx-ir, onnx's checker or this project cannot read.

ONNX Runtime runs these models as they are, and gives the same results before and after.
"""

from __future__ import annotations

import heapq
import math
import os
from collections import Counter
from collections.abc import Iterator, MutableSequence

import numpy as np
import onnx
from onnx import numpy_helper

from ... import RequantError
from .messages import STANDARD, bodies, with_inner

RUNTIME_DOMAINS = ("com.microsoft", "com.microsoft.nchwc")
"""Domains that ONNX Runtime imports by itself."""
MOST_DENSE, MOST_TIMES = 2**26, 2**10
"""The most bytes of a sparse tensor that is made dense, and the most times of its own size. The larger limit counts."""


def mend(proto: onnx.ModelProto, path: str | os.PathLike[str] = "the model") -> None:
    """Write a model as the rest of the project expects it, in place.

    Sparse initializers become dense; a negative length is a free axis; a type without an element type is dropped. Of
    two initializers of a name, and of two versions of an operator set, the last one stays, as in ONNX Runtime; the
    operator sets that the runtime imports are imported. Nodes are sorted by execution order; a graph has a name.

    Raises:
        RequantError: The nodes form a cycle, or a sparse initializer is not valid or too large.
    """
    try:
        for graph in _graphs(proto):
            _make_dense(graph)
            _drop_repeated(graph)
            _free_axes(graph)
            graph.name = graph.name or "graph"
            _sort(graph.node)
        for function in proto.functions:
            _sort(function.node)
    except ValueError as error:
        raise RequantError(f"{path}: not a valid ONNX model: {error}") from error
    for imports in (proto.opset_import, *(function.opset_import for function in proto.functions)):
        _keep_last(imports)
    _name_domains(proto)


def _graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph and all bodies, also those in functions."""
    yield proto.graph
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in with_inner(nodes):
            yield from bodies(node)


def _make_dense(graph: onnx.GraphProto) -> None:
    """Replace sparse initializers with dense ones, in place: onnx-ir has no sparse tensors."""
    for sparse in graph.sparse_initializer:
        name = sparse.values.name
        try:
            graph.initializer.append(numpy_helper.from_array(_dense(sparse), name))
        except Exception as error:  # numpy and onnx raise anything for indices and types that do not fit
            raise ValueError(f"the sparse initializer {name!r} cannot be made dense: {error}") from error
    del graph.sparse_initializer[:]


def _dense(sparse: onnx.SparseTensorProto) -> np.ndarray:
    """Return a sparse tensor as an array."""
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dims, held = tuple(sparse.dims), values.nbytes + indices.nbytes
    if any(length < 0 for length in dims) or math.prod(dims) * values.itemsize > max(MOST_DENSE, MOST_TIMES * held):
        raise ValueError(f"{held} bytes would have the shape {list(dims)[:8]}")
    dense = np.zeros(dims, values.dtype)
    if indices.ndim == 1:  # positions in the flat array; otherwise one row of coordinates for each value
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return dense


def _drop_repeated(graph: onnx.GraphProto) -> None:
    """Keep the last initializer of each name, in place."""
    last = {tensor.name: place for place, tensor in enumerate(graph.initializer)}
    if len(last) < len(graph.initializer):
        kept = set(last.values())
        for place in reversed(range(len(graph.initializer))):
            if place not in kept:
                del graph.initializer[place]


def _free_axes(graph: onnx.GraphProto) -> None:
    """Clear negative lengths, and types without an element type, in place."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        _free_type(value.type)
        if value.type.HasField("tensor_type") and not value.type.tensor_type.elem_type:
            value.ClearField("type")


def _free_type(kind: onnx.TypeProto) -> None:
    """Clear the negative lengths in a type, also in the type of a sequence's or an optional's elements."""
    which = kind.WhichOneof("value")
    if which in ("sequence_type", "optional_type"):
        _free_type(getattr(kind, which).elem_type)
    elif which in ("tensor_type", "sparse_tensor_type"):
        for axis in getattr(kind, which).shape.dim:
            if axis.HasField("dim_value") and axis.dim_value < 0:
                axis.ClearField("dim_value")


def _sort(nodes: MutableSequence[onnx.NodeProto]) -> None:
    """Sort nodes by execution order, in place; the order of the file decides where the graph does not.

    Raises:
        ValueError: The nodes form a cycle, or two of them compute one tensor.
    """
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    needs = [{makers[name] for name in _read(node) if name in makers} for node in nodes]
    if all(max(before, default=-1) < place for place, before in enumerate(needs)):
        return
    readers: dict[int, list[int]] = {}
    for place, before in enumerate(needs):
        for maker in before:
            readers.setdefault(maker, []).append(place)
    waiting = [len(before) for before in needs]
    ready = [place for place, count in enumerate(waiting) if not count]
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for reader in readers.get(order[-1], ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        stuck = nodes[next(place for place, count in enumerate(waiting) if count)]
        counts = Counter(name for node in nodes for name in node.output if name)
        if counts and (most := counts.most_common(1)[0])[1] > 1:
            raise ValueError(f"two nodes compute the tensor {most[0]!r}")
        raise ValueError(f"the nodes form a cycle with node {stuck.name!r} ({stuck.op_type})")
    copies = [nodes[place] for place in order]
    fresh = onnx.GraphProto(node=copies)
    del nodes[:]
    nodes.extend(fresh.node)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node reads, also in its bodies, where a name of the body may hide an outer one."""
    yield from node.input
    for body in bodies(node):
        own = {value.name for value in (*body.input, *body.initializer)}
        own.update(name for inner in body.node for name in inner.output)
        inside = (name for inner in body.node for name in _read(inner))
        yield from (name for name in (*inside, *(value.name for value in body.output)) if name not in own)


def _keep_last(imports: MutableSequence[onnx.OperatorSetIdProto]) -> None:
    """Keep one version of each operator set under its short name, in place: the last one, as ONNX Runtime does."""
    last = {"" if each.domain == STANDARD else each.domain: each.version for each in imports}
    if len(last) < len(imports) or any(each.domain == STANDARD for each in imports):
        del imports[:]
        imports.extend(onnx.helper.make_opsetid(domain, version) for domain, version in last.items())


def _name_domains(proto: onnx.ModelProto) -> None:
    """Use the short name of the standard domain, and import the operator sets that ONNX Runtime imports, in place.

    Plans for several devices are dropped too: they mean nothing to one CPU.
    """
    del proto.configuration[:]
    used = set()
    for node in with_inner((*proto.graph.node, *(node for function in proto.functions for node in function.node))):
        node.ClearField("device_configurations")
        if node.domain == STANDARD:
            node.domain = ""
        used.add(node.domain)
    used -= {each.domain for each in proto.opset_import}
    for domain in RUNTIME_DOMAINS:
        if domain in used:
            proto.opset_import.append(onnx.helper.make_opsetid(domain, 1))
