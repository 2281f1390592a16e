"""Types and shapes that onnx infers, with a bound on the values that it propagates.

onnx keeps one entry for each element of a tensor of one axis that may hold lengths. A few nodes can make such a tensor
arbitrarily long (Range, or a Concat of a tensor with itself, again and again), so its length is checked first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir

APART = 1000  # bytes; onnx does not need larger initializers
LONGEST = 2**22  # elements of a tensor of one axis whose values onnx may propagate
HEADROOM = 2**30  # bytes that onnx may need more than the process has


def infer(model: ir.Model) -> None:
    """Set each type and shape that onnx can infer, in place; a model that onnx cannot infer stays as it is."""
    try:
        inferred = ir.from_proto(_inferred(_message(model)))
    except Exception:  # noqa: BLE001 - onnx raises anything; the shapes stay unknown
        return
    for graph, other in zip(model.graphs(), inferred.graphs(), strict=False):
        found = ir.convenience.create_value_mapping(other)
        for name, value in ir.convenience.create_value_mapping(graph).items():
            if name in found:
                value.shape = value.shape if found[name].shape is None else found[name].shape
                dtype = found[name].dtype
                if dtype is not None and value.dtype != dtype:
                    value.dtype = dtype


def _message(model: ir.Model) -> onnx.ModelProto:
    """Return a model as a message in which large initializers are inputs; `model` does not change."""
    graph, inputs = model.graph, list(model.graph.inputs)
    before = [(value, value.const_value) for value in graph.initializers.values()]
    try:
        for value, tensor in before:
            if tensor is not None:
                value.shape = value.shape or ir.Shape(tensor.shape.numpy())
                value.type = value.type or ir.TensorType(tensor.dtype)
            if not value.is_graph_input():
                graph.inputs.append(value)
            if tensor is None or tensor.nbytes > APART:
                value.const_value = None
                graph.initializers.pop(str(value.name))
        return ir.to_proto(model)
    finally:
        graph.initializers.clear()
        for value, tensor in before:
            value.const_value = tensor
            graph.initializers.add(value)
        graph.inputs.clear()  # to delete a slice would leave the marks of an input
        graph.inputs.extend(inputs)


def _inferred(message: onnx.ModelProto) -> onnx.ModelProto:
    """Return a message with inferred types and shapes; with propagated values if their number is bounded."""
    plain = onnx.shape_inference.infer_shapes(message, data_prop=False)
    if any(_is_long(value.type) for value in plain.graph.value_info):
        return plain
    try:
        with _bounded_memory():
            return onnx.shape_inference.infer_shapes(message, data_prop=True)
    except MemoryError:  # lengths that only propagated values show
        return plain


def _is_long(kind: onnx.TypeProto) -> bool:
    """Whether a type is that of a tensor of one long axis."""
    axes = kind.tensor_type.shape.dim
    return len(axes) == 1 and axes[0].dim_value > LONGEST


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Give the process only `HEADROOM` more memory, where the system can say how much it has (Linux)."""
    if sys.platform != "linux":
        yield
        return
    import resource

    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    least = min(used + HEADROOM, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY), sys.maxsize)
    resource.setrlimit(resource.RLIMIT_AS, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
