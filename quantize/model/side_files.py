"""Weights in a file beside a model: which, how they are written, and how initializers refer to them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import onnx_ir as ir

SMALL = 2**10  # smaller tensors are stored inside the model, because shape inference may read them
ALIGNMENT = 64  # bytes of a vector register, so that kernels can compute on a mapped tensor


def weights_of(model: ir.Model, least: int = SMALL) -> list[ir.Value]:
    """Return the initializers of at least `least` bytes, also in bodies; they may be stored outside the model."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    return [
        value
        for value in values
        if value.const_value is not None
        and value.const_value.dtype is not ir.DataType.STRING
        and value.const_value.nbytes >= least
    ]


def tensor_of(value: ir.Value) -> ir.TensorProtocol:
    """Return the tensor of an initializer."""
    assert value.const_value is not None
    return value.const_value


def home_of(tensor: ir.TensorProtocol | None) -> Path | None:
    """Return the folder of a tensor's external data; None for a tensor in memory."""
    return Path(tensor.base_dir).absolute() if isinstance(tensor, ir.ExternalTensor) else None


def write_side(file: BinaryIO, tensors: Iterable[ir.TensorProtocol]) -> list[int]:
    """Write the bytes of tensors, one at a time, and return their offsets."""
    offsets = []
    for tensor in tensors:
        offsets.append(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
        file.seek(offsets[-1])  # the gap is filled with zeros
        write_tensor(file, tensor)
    file.flush()
    return offsets


def write_tensor(file: BinaryIO, tensor: ir.TensorProtocol) -> None:
    """Write the bytes of a tensor at the file position; external data are copied from file to file."""
    if isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor, ir.Tensor)):
        tensor.tofile(file)
    else:
        file.write(tensor.tobytes())


def refer(weights: Iterable[ir.Value], file: Path, offsets: Iterable[int]) -> None:
    """Make initializers refer to the data in a file."""
    for value, offset in zip(weights, offsets, strict=True):
        tensor = tensor_of(value)
        value.const_value = ir.ExternalTensor(
            file.name,
            offset,
            tensor.nbytes,
            ir.DataType(tensor.dtype),
            shape=ir.Shape(tensor.shape.numpy()),
            name=str(value.name),
            doc_string=tensor.doc_string,
            base_dir=file.parent,
        )
