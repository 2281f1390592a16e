"""Compare constants in blocks, independent of their storage."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .... import RequantError
from ....calibration.model.session import Array

BLOCK = 2**24  # bytes that are compared at once, a multiple of every element size


@dataclass(frozen=True, slots=True)
class Apart:
    """The difference of two constants of one type and shape.

    Attributes:
        differing: The number of elements with different bits.
        elements: The number of elements.
        largest: The largest absolute difference of two finite numbers; None for strings.
        finite: Whether all different numbers are finite.
    """

    differing: int
    elements: int
    largest: float | None
    finite: bool = True

    def __str__(self) -> str:
        """Return ``"3 of 800 values differ, by at most 0.25"``."""
        text = f"{self.differing} of {self.elements} values differ"
        if self.largest is None:
            return text
        rest = "" if self.finite else "; some are not finite"
        return f"{text}, by at most {self.largest:.6g}{rest}"


def digest(tensor: ir.TensorProtocol) -> bytes:
    """Return a hash of type, shape and bits of a tensor, independent of its storage."""
    found = hashlib.blake2b(repr(_kind(tensor)).encode(), digest_size=16)
    for block in _blocks(tensor):
        found.update(block)
    return found.digest()


def whereabouts(tensor: ir.TensorProtocol) -> object:
    """Return a key that is equal for the same object, and for the same part of a file."""
    if isinstance(tensor, ir.ExternalTensor):
        return os.path.realpath(tensor.path), tensor.offset or 0, _kind(tensor)
    return id(tensor)


def equal(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    if whereabouts(one) == whereabouts(other):
        return True
    if _kind(one) != _kind(other):
        return False
    return all(a == b for a, b in zip(_blocks(one), _blocks(other), strict=True))


def _kind(tensor: ir.TensorProtocol) -> tuple[str, tuple[int, ...]]:
    return ir.DataType(tensor.dtype).name, tuple(int(n) for n in tensor.shape.numpy())


def _blocks(tensor: ir.TensorProtocol) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a tensor in blocks, in the form of external data."""
    if isinstance(tensor, ir.ExternalTensor):
        yield from _from_file(tensor)
        return
    if tensor.dtype is ir.DataType.STRING:
        data = memoryview(repr(np.asarray(tensor.numpy(), object).reshape(-1).tolist()).encode())
    elif ir.DataType(tensor.dtype).bitwidth < 8 or sys.byteorder == "big":
        data = memoryview(tensor.tobytes())
    else:
        data = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data
    for start in range(0, len(data), BLOCK):
        yield data[start : start + BLOCK]


def _from_file(tensor: ir.ExternalTensor) -> Iterator[bytes]:
    """Yield the bytes of a tensor without a map of the file: mapped pages count as memory."""
    left = tensor.nbytes
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset or 0)
        while left > 0:
            block = file.read(min(BLOCK, left))
            if not block:
                raise RequantError(f"{tensor.path}: the file ends inside the data of {tensor.name!r}")
            left -= len(block)
            yield block


def apart(one: ir.TensorProtocol, other: ir.TensorProtocol) -> Apart:
    """Return the difference of two tensors of one type and shape."""
    differing, largest, finite = 0, 0.0, True
    if one.dtype is ir.DataType.STRING:
        return Apart(int((np.asarray(one.numpy()) != np.asarray(other.numpy())).sum()), int(one.size), None)
    for a, b in zip(_numbers(one), _numbers(other), strict=True):
        same = (_bits(a) == _bits(b)).all(axis=1)
        if same.all():
            continue
        differing += int((~same).sum())
        x, y = _wide(a[~same]), _wide(b[~same])
        whole = np.isfinite(x) & np.isfinite(y)
        finite = finite and bool(whole.all())
        if whole.any():
            largest = max(largest, float(np.abs(x[whole] - y[whole]).max()))
    return Apart(differing, int(one.size), largest, finite)


def _numbers(tensor: ir.TensorProtocol) -> Iterator[Array]:
    """Yield the elements of a tensor in order, in blocks."""
    dtype = ir.DataType(tensor.dtype)
    if dtype.bitwidth < 8:
        yield tensor.numpy().reshape(-1)
        return
    for block in _blocks(tensor):  # the length of a block is a multiple of the element size
        yield np.frombuffer(block, dtype.numpy())


def _bits(block: Array) -> Array:
    """Return the bytes of each element as one row."""
    return np.ascontiguousarray(block).view(np.uint8).reshape(block.size, -1)


def _wide(block: Array) -> Array:
    """Return numbers in a type whose differences do not overflow; large integers lose their last bits."""
    return block.astype(np.complex128 if block.dtype.kind == "c" else np.float64)
