"""Check what onnx-ir and onnx's checker take for granted in a message: text, tensors, data in them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import Message

from ... import RequantError

MESSAGE, STRING = 11, 9
"""Kinds of fields, as `google.protobuf.descriptor.FieldDescriptor` numbers them."""
FIELDS: dict[str, tuple[str, ...]] = {
    "float_data": ("FLOAT", "COMPLEX64"),
    "double_data": ("DOUBLE", "COMPLEX128"),
    "int64_data": ("INT64",),
    "uint64_data": ("UINT32", "UINT64"),
    "string_data": ("STRING",),
}
"""The field that holds the data of a type, if raw_data does not; `int32_data` for all other types."""
REMARKS = frozenset({"doc_string", "producer_name", "producer_version"})
"""Text without a meaning for the results."""
LIMIT = 2**40
"""Elements and bytes of one tensor; a product of lengths above 2^63 overflows in the runtime."""


def check_proto(proto: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Check the text and the tensors of a model; the bytes of raw data are counted, not read.

    Remarks that are not UTF-8, such as doc strings, are repaired in place.

    Raises:
        RequantError: A name is not UTF-8; a tensor has an unknown type, a negative length, or more or less data than
            its type and shape need.
    """
    try:
        for tensor in _tensors(proto):
            _check_tensor(tensor)
    except _WrongError as wrong:
        raise RequantError(f"{path}: not a valid ONNX model: {wrong}") from wrong


class _WrongError(ValueError):
    """What is wrong in a message."""


def _tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """Check all text below a message, and yield the tensors."""
    if isinstance(message, onnx.TensorProto):
        yield message
    for field, value in message.ListFields():  # it copies the raw data of a tensor; files have few bytes of them here
        if field.type == MESSAGE:
            for part in _each(value):
                yield from _tensors(part)
        elif field.type == STRING:
            for text in _each(value):
                if not isinstance(text, str):  # protobuf returns bytes for what is not UTF-8
                    _repair(message, field, text)


def _each(value: Any) -> Iterable[Any]:
    """Return the values of a field, repeated or not; protobuf 5 has no `FieldDescriptor.is_repeated`."""
    return (value,) if isinstance(value, str | bytes | Message) else value


def _repair(message: Any, field: Any, text: bytes) -> None:
    """Replace the wrong bytes of a remark; refuse other text."""
    shown = text.decode("utf-8", "replace")[:60]
    if field.name not in REMARKS:
        raise _WrongError(f"the field {field.name} of a {message.DESCRIPTOR.name} is not UTF-8: {shown!r}")
    setattr(message, field.name, text.decode("utf-8", "replace"))


def _check_tensor(tensor: onnx.TensorProto) -> None:
    """Check the type, the shape and the amount of data of a tensor."""
    name = f"tensor {tensor.name!r}"
    try:
        kind = ir.DataType(tensor.data_type)
    except ValueError as error:
        raise _WrongError(f"{name} has the unknown data type {tensor.data_type}") from error
    if kind is ir.DataType.UNDEFINED:
        raise _WrongError(f"{name} has no data type")
    count = math.prod(tensor.dims)
    if any(length < 0 for length in tensor.dims) or count > LIMIT:
        raise _WrongError(f"{name} has the shape {list(tensor.dims)[:8]}, which is not possible")
    text = kind is ir.DataType.STRING
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if text:
            raise _WrongError(f"{name} holds text in an external file")
        return  # the file is checked where its folder is known
    if tensor.HasField("raw_data"):
        if text:
            raise _WrongError(f"{name} holds text as raw data")
        field, found, needed = "raw_data", len(tensor.raw_data), -(-count * kind.bitwidth // 8)
    else:
        field = next((each for each, types in FIELDS.items() if kind.name in types), "int32_data")
        found, needed = len(getattr(tensor, field)), _entries(kind, count)
    if found != needed:
        raise _WrongError(f"{name} has {found} entries of {field}, but its type and shape need {needed}")


def _entries(kind: ir.DataType, count: int) -> int:
    """Return the entries of a typed field for so many elements."""
    if kind.name.startswith("COMPLEX"):
        return 2 * count
    if kind is ir.DataType.STRING or kind.bitwidth >= 8:
        return count
    return -(-count * kind.bitwidth // 8)
