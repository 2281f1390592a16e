"""Read an ONNX file as a message that other code may trust: complete, readable, with data for each tensor."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import onnx

from ... import RequantError
from ...system.regular import check_file, read_file
from .mend import mend
from .proto_checks import check_proto

OTHER_FORMATS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"PK\x03\x04", "a zip archive, as torch.save writes"),
    (0, b"\x1f\x8b", "a gzip archive; unpack it"),
    (0, b"\x80\x02", "a Python pickle, as torch.save wrote"),
    (0, b"\x89HDF", "an HDF5 file, as Keras writes"),
    (0, b"\x93NUMPY", "a numpy array"),
    (0, b"version https://git-lfs", "a pointer of Git LFS; 'git lfs pull' gets the file"),
    (0, b"<", "text: XML, HTML or the text form of ONNX"),
    (0, b"{", "text: JSON"),
    (4, b"ORTM", "a model in the ORT format"),
    (4, b"TFL3", "a TensorFlow Lite model"),
    (8, b"{", "a safetensors file"),
)
"""Offsets and bytes by which files of other formats are known."""


def read_proto(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Read, check and mend a model; the data of external tensors stay in their files.

    Raises:
        RequantError: There is no such file, or it is not a complete and correct ONNX message.
    """
    check_file(path)
    return parse_proto(read_file(path, most=sys.maxsize), path)


def parse_proto(
    data: bytes, path: str | os.PathLike[str], complete: Callable[[onnx.ModelProto], None] | None = None
) -> onnx.ModelProto:
    """Return the message in bytes, checked and mended.

    Args:
        data: The message.
        path: The name of the file, for errors, which are those of `read_proto`.
        complete: Adds what was cut out of the bytes.
    """
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except Exception as error:  # protobuf has an error class of its own
        reason = " ".join(str(error).split())[:200]
        if "MaxDepth" in reason:
            raise RequantError(f"{path}: its graphs lie inside each other too deeply to be read") from error
        reason = other_format(data[:32]) or f"({reason})"
        raise RequantError(f"{path}: not an ONNX model, or a truncated one {reason}") from error
    if not proto.HasField("graph") or not proto.graph.output:
        reason = other_format(data[:32])
        raise RequantError(f"{path}: not an ONNX model: it has no graph with outputs" + (reason and f" {reason}"))
    if complete is not None:
        complete(proto)
    check_proto(proto, path)
    mend(proto, path)
    return proto


def other_format(start: bytes) -> str:
    """Return what the first 32 bytes of a file look like, in parentheses; empty if that is not known."""
    found = [what for at, mark, what in OTHER_FORMATS if start[at:].startswith(mark)]
    if not found and start.isascii() and start.decode("ascii").isprintable():
        found = ["text"]
    return f"(it looks like {found[0]})" if found else ""
