"""Models on disk: loaded with clear errors, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from .. import RequantError
from ..calibration.files import write_atomically
from ..transforms import VerifyError
from ..transforms.graph import quiet

PROTOBUF_LIMIT = 2**31 - 2**20  # what protobuf can hold in one message, less the graph itself


def load_model(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX model; initializers in external files stay there until they are needed.

    Raises:
        RequantError: No such file, not a whole ONNX model, or an external data file is missing or too short.
    """
    file = Path(path)
    if not file.is_file():
        raise RequantError(f"{path}: " + ("is a folder, not a model" if file.is_dir() else "no such file"))
    try:
        with quiet():  # what onnx-ir would log is found, and said with the file's name, when the model is verified
            model = ir.load(file)
    except Exception as error:  # protobuf and onnx_ir raise nothing in common
        reason = " ".join(str(error).split())[:200]
        raise RequantError(f"{path}: not an ONNX model, or a truncated one ({reason})") from error
    if not model.graph.outputs:
        raise RequantError(f"{path}: not an ONNX model: it has no graph with outputs")
    for tensor in (value.const_value for value in model.graph.initializers.values()):
        if isinstance(tensor, ir.ExternalTensor):
            _check_external(path, tensor)
    NameFixPass()(model)
    return model


@contextmanager
def about(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let what is wrong inside a model say of which file it is."""
    try:
        yield
    except VerifyError as error:
        raise RequantError(f"{path}: {error}") from error


def _check_external(path: str | os.PathLike[str], tensor: ir.ExternalTensor) -> None:
    """Refuse a tensor whose data file is not there or ends too early."""
    data = Path(tensor.path)
    if not data.is_file():
        raise RequantError(
            f"{path}: external data of {tensor.name!r} is missing: no file {str(tensor.location)!r} beside the model"
        )
    end = (tensor.offset or 0) + tensor.nbytes
    if data.stat().st_size < end:
        raise RequantError(
            f"{path}: external data file {str(tensor.location)!r} ends before {tensor.name!r} does ({end} bytes wanted)"
        )


def check_output(path: str | os.PathLike[str], source: str | os.PathLike[str], *, force: bool) -> None:
    """Refuse an output path before any long work.

    Raises:
        RequantError: It is the input, it exists and `force` is not set, or its folder cannot be written to.
    """
    target = Path(path)
    try:
        exists = target.exists()
    except OSError as error:  # a name that the file system refuses
        raise RequantError(f"{path}: cannot be written: {error.strerror}") from error
    if exists and Path(source).exists() and target.samefile(source):
        raise RequantError(f"{path}: the output is the input; choose another path")
    if target.is_dir():
        raise RequantError(f"{path}: is a folder; give the path of a file")
    if exists and not force:
        raise RequantError(f"{path}: exists already; --force overwrites it")
    folder = target.parent
    if not folder.is_dir():
        raise RequantError(f"{path}: no folder {str(folder)!r} to write to")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequantError(f"{path}: cannot write to {str(folder)!r}: {error.strerror}") from error


def _weight_bytes(model: ir.Model) -> int:
    """Return the size of all initializers."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def to_bytes(model: ir.Model) -> bytes:
    """Serialize a model with its weights inside.

    Raises:
        RequantError: They are more than one ONNX message can hold.
    """
    size = _weight_bytes(model)
    if size >= PROTOBUF_LIMIT:
        raise RequantError(f"the model has {size / 2**30:.1f} GB of weights; models are quantized up to 2 GB")
    whole = ir.external_data.load_to_model(model.clone())
    return bytes(ir.to_proto(whole).SerializeToString())


def save_model(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a model; above protobuf's limit its weights go into one file ``<name>.data`` beside it.

    Raises:
        RequantError: It cannot be written; what was there before is untouched.
    """
    if _weight_bytes(model) < PROTOBUF_LIMIT:
        write_atomically(path, to_bytes(model))
        return
    target = Path(path)
    data = f"{target.name}.data"
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            ir.save(model, Path(folder) / target.name, external_data=data)
            os.replace(Path(folder) / data, target.parent / data)
            os.replace(Path(folder) / target.name, target)
    except OSError as error:
        raise RequantError(f"{path}: cannot be written: {error.strerror}") from error


def size_on_disk(path: str | os.PathLike[str]) -> int:
    """Return the bytes of a model, its external data files included."""
    model = ir.load(path)
    external = {
        t.path for t in (v.const_value for v in model.graph.initializers.values()) if isinstance(t, ir.ExternalTensor)
    }
    return Path(path).stat().st_size + sum(Path(data).stat().st_size for data in external)
