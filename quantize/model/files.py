"""Load models, check where they may be written, and hand them to the runtime; clear errors."""

from __future__ import annotations

import gc
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from ... import RequantError
from ...calibration.model.file_tensor import read_from_files
from ...calibration.model.onnx_files import parse_proto, read_proto
from ...calibration.model.session import LARGE, Serialized
from ...calibration.runs.stamps import locations
from ...system.apart import PathLike
from ...system.given import check_kind, check_path
from ...system.notes import note
from ...system.regular import check_file, check_replaceable, reason_of
from ...system.scratch import scratch_folder
from ...transforms import VerifyError, verify
from ...transforms.graphs.queries import release
from ...transforms.graphs.rewriter import quiet
from ...transforms.graphs.tensors import external_tensors, load_tensors, tensors
from ..runtime.compiled_for import refuse_foreign
from .raw_weights import FileBytes, MalformedError, without_weights
from .side_files import home_of, refer, tensor_of, weights_of, write_side

PROTOBUF_LIMIT = 2**31 - 2**20  # bytes of weights in one protobuf message, with room for the graph
INSIDE = 2**26  # bytes of weights inside a model in memory: four copies exist while a session opens
APART = 2**16  # tensors of so many bytes stay in a large file, and are written one at a time


def load_model(path: PathLike, *, in_place: bool = False) -> ir.Model:
    """Read and verify an ONNX model; the caller may trust it. Tensors in external files are read when they are used.

    Args:
        path: The file.
        in_place: Whether the large weights of a large file also stay in the file.

    Raises:
        RequantError: The file does not exist, is not a complete and valid ONNX model, or is compiled for another
            machine; or an external data file is missing, too short or outside the model's folder.
    """
    check_path(path, "a model")
    note(model=os.fspath(path))
    proto = read_message(path)
    try:
        with quiet():  # the verification reports what onnx-ir would log
            model = ir.from_proto(proto)
            NameFixPass()(model)
        refuse_foreign(path, model.metadata_props)
        outside = read_from_files(model, Path(path).parent.absolute())
        for tensor in outside:
            _check_external(path, tensor)
        verify(model, message=proto)
    except VerifyError as error:
        raise RequantError(f"{path}: {error}") from error
    except RequantError:
        raise
    except Exception as error:  # what is still wrong in a message raises anything in onnx-ir and onnx
        raise _cannot_read(path, error) from error
    if outside and not in_place:
        load_tensors(model, keep=lambda tensor: os.path.realpath(tensor.path) != os.path.realpath(path))
    return model


def read_message(path: PathLike) -> onnx.ModelProto:
    """Return a model as a checked message in which the large weights of a large file are external data of this file.

    Raises:
        RequantError: As `load_model`, except for the verification of the graph.
    """
    check_file(path)
    return _in_place(Path(path)) if _can_stay(Path(path)) else read_proto(path)


def _cannot_read(path: PathLike, error: Exception) -> RequantError:
    """Return the error for a model that onnx-ir cannot represent."""
    inmost: BaseException = error
    while inmost.__context__ is not None:
        inmost = inmost.__context__
    if isinstance(inmost, NotImplementedError) and "Map types" in str(inmost):
        return RequantError(
            f"{path}: has a tensor of a map type, as ZipMap returns, which requant cannot read; "
            "export the model without it (skl2onnx: options={'zipmap': False})"
        )
    if isinstance(inmost, ValueError) and "invalid literal for int()" in str(inmost):  # the only texts with numbers
        text = str(inmost).partition(": ")[2][:80]
        return RequantError(f"{path}: the offset or the length of external data is no number: {text}")
    return RequantError(f"{path}: not a valid ONNX model ({' '.join(str(inmost).split())[:200]})")


@contextmanager
def about(path: PathLike) -> Iterator[None]:
    """Add the path to errors of the verification."""
    try:
        yield
    except VerifyError as error:
        raise RequantError(f"{path}: {error}") from error


def _can_stay(file: Path) -> bool:
    """Return whether weights can stay in a file: it is large, and it is no link (see `_check_external`)."""
    status = file.stat()
    return status.st_size > INSIDE and status.st_nlink == 1 and not file.is_symlink()


def _in_place(file: Path) -> onnx.ModelProto:
    """Read a model whose large weights are external data in its own file."""
    with FileBytes(file) as data:
        try:
            small, cuts = without_weights(data, APART)
        except MalformedError:  # protobuf reports the error, or can read the file
            small, cuts = data[:], []

    def refer_to_file(proto: onnx.ModelProto) -> None:
        for cut in cuts:
            tensor = proto.graph.initializer[cut.index]
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", file.name), ("offset", cut.offset), ("length", cut.length)):
                tensor.external_data.add(key=key, value=str(value))

    return parse_proto(small, file, refer_to_file)


def _check_external(path: PathLike, tensor: ir.ExternalTensor) -> None:
    """Refuse a tensor whose data file is outside the model's folder, missing or too short."""
    name, location = f"external data of {tensor.name!r}", os.fspath(tensor.location)
    folder = os.path.realpath(tensor.base_dir)
    file = os.path.realpath(os.path.join(folder, location.replace("\0", "?")))
    if os.path.isabs(location) or os.path.commonpath([folder, file]) != folder:
        raise RequantError(
            f"{path}: {name} lies outside the model's folder, in {location!r}; only files inside are read"
        )
    if not os.path.isfile(file):
        raise RequantError(f"{path}: {name} is missing: no file {location!r} beside the model")
    status, start = os.stat(file), tensor.offset or 0
    if status.st_nlink > 1:  # a hard link does not show that the file belongs to another folder
        raise RequantError(
            f"{path}: {name} is in {location!r}, which has other hard links; put a copy beside the model"
        )
    if start < 0 or (tensor.length is not None and tensor.length != tensor.nbytes):
        raise RequantError(
            f"{path}: {name} is recorded as {tensor.length} bytes at {start} of {location!r}, "
            f"but its type and shape need {tensor.nbytes}"
        )
    if status.st_size < start + tensor.nbytes:
        raise RequantError(
            f"{path}: external data file {location!r} ends inside {tensor.name!r}: "
            f"{start + tensor.nbytes} bytes are needed"
        )


def side_file(path: PathLike) -> Path:
    """Return the file for weights outside a model: ``<name>.data`` beside it."""
    target = Path(os.path.realpath(path))  # a link stays a link
    return target.with_name(f"{target.name}.data")


def check_output(path: PathLike, source: PathLike, *, force: bool, external: bool = False) -> None:
    """Refuse a bad output path before any long work.

    Args:
        path: The file to write.
        source: The input model.
        force: Whether an existing file may be overwritten.
        external: Whether weights go to `side_file`; if the source is too large for one file, they may go there anyway.

    Raises:
        RequantError: The path is the input or its data, the file exists and `force` is not set, or the folder cannot be
            written to.
    """
    check_path(path, "the output")
    check_kind(force, bool, "force must be True or False")
    if os.fspath(path) == "-":
        raise RequantError("-: nothing is written to standard output; give another name")
    target = Path(path)
    try:
        exists = target.exists()
    except OSError as error:  # the file system refuses the name
        raise RequantError(f"{path}: cannot be written: {reason_of(error)}") from error
    if exists and os.path.exists(source) and target.samefile(source):
        raise RequantError(f"{path}: the output would overwrite the input; choose another path")
    check_replaceable(target)
    if exists and not force:
        raise RequantError(f"{path}: exists already; --force overwrites it (in Python: force=True)")
    _check_side(target, Path(source), force=force, external=external)
    folder = target.parent
    if not os.path.isdir(folder):
        raise RequantError(f"{path}: no folder {str(folder)!r} to write to")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequantError(f"{path}: cannot write to {str(folder)!r}: {reason_of(error)}") from error


def is_ort(path: PathLike) -> bool:
    """Return whether a file is in ORT format, by its name."""
    return Path(path).suffix.lower() == ".ort"


def check_onnx_output(path: PathLike, source: PathLike, *, force: bool, external: bool = False) -> None:
    """Refuse a bad path for a model in ONNX format; the arguments are those of `check_output`.

    Raises:
        RequantError: The name is that of an ORT file, or `check_output` refuses the path.
    """
    check_output(path, source, force=force, external=external)
    if is_ort(path):
        raise RequantError(f"{path}: 'requant compile' makes .ort files of .onnx files; write an .onnx file")


def _check_side(target: Path, source: Path, *, force: bool, external: bool) -> None:
    """Refuse an output that would overwrite the input's data or another file."""
    side = side_file(target)
    if not os.path.exists(target) and not os.path.exists(side):
        return
    inputs = data_files(source)
    for file in (target, side):
        if any(os.path.exists(file) and file.samefile(data) for data in inputs):
            raise RequantError(f"{file}: holds the weights of the input {str(source)!r}; choose another output")
    stored = sum(file.stat().st_size for file in (source, *inputs) if os.path.exists(file))
    if not external and stored <= PROTOBUF_LIMIT:
        return
    if side.parent != target.parent.resolve():
        raise RequantError(f"{target}: is a link to another folder, where its weights would not be found")
    if os.path.isdir(side):
        raise RequantError(f"{side}: is a folder; the weights of {str(target)!r} would go there")
    if os.path.exists(side) and not force:
        raise RequantError(f"{side}: exists already; --force overwrites it (in Python: force=True)")


def data_files(path: Path) -> list[Path]:
    """Return the external data files of a model; none if the file is not a model."""
    try:
        proto = read_message(path)
    except RequantError:  # not a model; loading it reports the reason
        return []
    files = {Path(path.parent, location) for location in locations(proto)} - {path}
    return sorted(file for file in files if _is_file(file))


def _is_file(path: Path) -> bool:
    """Whether there is a file; False for a name that the file system refuses, which loading the model reports."""
    try:
        return path.is_file()
    except OSError:
        return False


def size_on_disk(path: PathLike) -> int:
    """Return the bytes of a model, including its external data files."""
    return sum(file.stat().st_size for file in (Path(path), *data_files(Path(path))))


@dataclass(frozen=True, slots=True)
class Weights:
    """The memory of a model's weights.

    Attributes:
        total: Bytes of all tensors.
        largest: Bytes of the largest tensor; a second copy exists while the runtime packs it.
    """

    total: int
    largest: int

    @classmethod
    def of(cls, model: ir.Model) -> Weights:
        """Measure a model."""
        sizes = [tensor.nbytes for tensor in tensors(model)]
        return cls(sum(sizes), max(sizes, default=0))

    @property
    def large(self) -> bool:
        """Whether two models of this size must not be in memory at once."""
        return self.total > LARGE

    @property
    def lumpy(self) -> bool:
        """Whether packing needs more than 20 % of the size of the model in addition."""
        return self.large and 5 * self.largest > self.total


@contextmanager
def staging(output: PathLike | None = None) -> Iterator[Path]:
    """Make a hidden folder beside `output` for large weights of temporary models, and remove it afterwards.

    The file system of the output has room for weights. The one of temporary files is often in memory.

    Raises:
        RequantError: It cannot be made.
    """
    beside = None if output is None else Path(os.path.realpath(output)).parent
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder(beside))
        except OSError as error:
            raise RequantError(f"{beside}: cannot be written to: {reason_of(error)}") from error
        yield folder


def serialize(model: ir.Model, folder: Path | None = None) -> Serialized:
    """Return a model in the form that the runtime opens, without a copy of large weights; see `message_of`.

    Raises:
        RequantError: The bytes exceed one ONNX message, or the file cannot be written.
    """
    message, home = message_of(model, folder)
    return Serialized(message.SerializeToString(), home)


def message_of(model: ir.Model, folder: Path | None = None) -> tuple[onnx.ModelProto, Path | None]:
    """Return a model as a message, and the folder of the external data that it refers to; None without any.

    The runtime reads external data of one folder, here the folder with most bytes; these weights stay there. Other
    weights become part of the message. If these are more than `INSIDE` bytes, they move to a file in `folder`, which
    `model` and its later clones then read; this frees the memory.

    Args:
        model: The model; it still computes the same.
        folder: A folder for weights, from `staging`; None keeps them in memory.

    Raises:
        RequantError: The bytes exceed one ONNX message, or the file cannot be written.
    """
    for tensor in external_tensors(model):
        release(tensor)
    held: Counter[Path | None] = Counter()
    for value in weights_of(model):
        held[home_of(value.const_value)] += tensor_of(value).nbytes
    home = max((place for place in held if place is not None), key=held.__getitem__, default=None)
    inside = sum(size for place, size in held.items() if place is None or place != home)
    if folder is not None and inside > INSIDE:
        home, inside = folder.absolute(), 0
        _move([value for value in weights_of(model) if home_of(value.const_value) != home], home)
    if inside > PROTOBUF_LIMIT:
        raise RequantError(f"{inside / 2**30:.1f} GB of weights are in memory; one ONNX model holds 2 GB")
    copy = model.clone()
    load_tensors(copy, keep=lambda tensor: home_of(tensor) == home)
    return ir.to_proto(copy), home


def _move(weights: Sequence[ir.Value], folder: Path) -> None:
    """Write initializers to a new file in `folder` and make them refer to the file."""
    tensors = [tensor_of(value) for value in weights]
    try:
        with open(folder / f"{secrets.token_hex(4)}.data", "xb") as file:
            offsets = write_side(file, tensors)
    except OSError as error:
        raise RequantError(f"{folder}: weights cannot be written there: {reason_of(error)}") from error
    refer(weights, Path(file.name), offsets)
    del tensors
    gc.collect()  # unused clones of the model are reference cycles, and would keep the weights


def size_text(count: int) -> str:
    """Return a number of bytes as text: ``1.82 MB``."""
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= least:
            return f"{count / least:.2f} {unit}"
    return f"{count} B"
