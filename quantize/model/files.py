"""Models on disk: loaded with clear errors, written whole or not at all, large weights one at a time."""

from __future__ import annotations

import gc
import mmap
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnx_ir.passes.common import NameFixPass

from ... import RequantError
from ...calibration.files import replacing
from ...calibration.session import LARGE, Serialized
from ...transforms import VerifyError
from ...transforms.externalize_weights import EXTERNAL, external_threshold
from ...transforms.graph import quiet, release
from ...transforms.tensors import external_tensors, load_tensors, tensors
from ..runtime.compiled_for import refuse_foreign
from .raw_weights import MalformedError, with_weights, without_weights

PROTOBUF_LIMIT = 2**31 - 2**20  # what protobuf can hold in one message, less the graph itself
SMALL = 2**10  # bytes of a tensor that shape inference may want to see, and that is always stored inside the model
INSIDE = 2**26  # bytes of weights that a model in memory holds itself: four copies exist while a session opens
APART = 2**16  # bytes of a tensor from which on it is read where it lies in a large file, and written by itself
ALIGNMENT = 64  # bytes; a vector register's worth, so that a mapped tensor can be computed on as it is

PathLike = str | os.PathLike[str]


def load_model(path: PathLike, *, in_place: bool = False) -> ir.Model:
    """Read an ONNX model; tensors in external files stay there until they are needed.

    Args:
        path: The file.
        in_place: Whether the large weights of a large file stay in it too, as if it were a file of external data.

    Raises:
        RequantError: No such file, not a whole ONNX model, compiled for another machine, or an external data file is
            missing, too short or outside the model's folder.
    """
    file = Path(path)
    if not file.is_file():
        raise RequantError(f"{path}: " + ("is a folder, not a model" if file.is_dir() else "no such file"))
    try:
        with quiet():  # what onnx-ir would log is found, and said with the file's name, when the model is verified
            proto = _in_place(file) if in_place and _can_stay(file) else onnx.load_model(file, load_external_data=False)
            _make_dense(proto.graph)
            model = ir.from_proto(proto)
    except Exception as error:  # protobuf and onnx_ir raise nothing in common
        inmost: BaseException = error
        while inmost.__context__ is not None:
            inmost = inmost.__context__
        if isinstance(inmost, NotImplementedError) and "Map types" in str(inmost):
            raise RequantError(
                f"{path}: has a tensor of a map type, as ZipMap gives, which cannot be read; "
                "export the model without it (skl2onnx: options={'zipmap': False})"
            ) from error
        reason = " ".join(str(inmost).split())[:200]
        raise RequantError(f"{path}: not an ONNX model, or a truncated one ({reason})") from error
    if not model.graph.outputs:
        raise RequantError(f"{path}: not an ONNX model: it has no graph with outputs")
    refuse_foreign(path, model.metadata_props)
    for tensor in external_tensors(model):
        tensor.base_dir = file.parent.absolute()
        _check_external(path, tensor)
    NameFixPass()(model)
    return model


@contextmanager
def about(path: PathLike) -> Iterator[None]:
    """Let what is wrong inside a model say of which file it is."""
    try:
        yield
    except VerifyError as error:
        raise RequantError(f"{path}: {error}") from error


def _can_stay(file: Path) -> bool:
    """Whether weights can stay in a model: it is large, and no link, which `_check_external` would not follow."""
    status = file.stat()
    return status.st_size > INSIDE and status.st_nlink == 1 and not file.is_symlink()


def _in_place(file: Path) -> onnx.ModelProto:
    """Read a model whose large weights are external data in its own file."""
    with open(file, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            small, cuts = without_weights(data, APART)
        except MalformedError:  # protobuf says what is wrong, or can read it all the same
            small, cuts = data[:], []
    proto: onnx.ModelProto = onnx.ModelProto.FromString(small)
    for cut in cuts:
        tensor = proto.graph.initializer[cut.index]
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", file.name), ("offset", cut.offset), ("length", cut.length)):
            tensor.external_data.add(key=key, value=str(value))
    return proto


def _make_dense(graph: onnx.GraphProto) -> None:
    """Write sparse initializers as dense ones, in place: onnx-ir has no sparse tensors."""
    for sparse in graph.sparse_initializer:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        dense = np.zeros(tuple(sparse.dims), values.dtype)
        if indices.ndim == 1:  # places in the flat array; else one row of coordinates for each value
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
        graph.initializer.append(numpy_helper.from_array(dense, sparse.values.name))
    del graph.sparse_initializer[:]
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                _make_dense(body)


def _check_external(path: PathLike, tensor: ir.ExternalTensor) -> None:
    """Refuse a tensor whose data file is outside the model's folder, is not there, or ends too early."""
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
    if status.st_nlink > 1:  # a link of this kind does not show that the file belongs elsewhere
        raise RequantError(
            f"{path}: {name} is in {location!r}, which has other hard links; put a copy beside the model"
        )
    if start < 0 or (tensor.length is not None and tensor.length != tensor.nbytes):
        raise RequantError(
            f"{path}: {name} is said to be {tensor.length} bytes at {start} of {location!r}; "
            f"its type and shape want {tensor.nbytes}"
        )
    if status.st_size < start + tensor.nbytes:
        raise RequantError(
            f"{path}: external data file {location!r} ends before {tensor.name!r} does "
            f"({start + tensor.nbytes} bytes wanted)"
        )


def side_file(path: PathLike) -> Path:
    """Return where the weights of a model go that are not stored inside it: ``<name>.data`` beside it."""
    target = Path(os.path.realpath(path))  # a link keeps pointing where it did
    return target.with_name(f"{target.name}.data")


def check_output(path: PathLike, source: PathLike, *, force: bool, external: bool = False) -> None:
    """Refuse an output path before any long work.

    Args:
        path: The file to write.
        source: The model that it is made of.
        force: Whether an existing file may be overwritten.
        external: Whether weights go into `side_file`; those of a source that is too large for one file may in any case.

    Raises:
        RequantError: It is the input or its data, it exists and `force` is not set, or its folder cannot be written to.
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
    _check_side(target, Path(source), force=force, external=external)
    folder = target.parent
    if not folder.is_dir():
        raise RequantError(f"{path}: no folder {str(folder)!r} to write to")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequantError(f"{path}: cannot write to {str(folder)!r}: {error.strerror}") from error


def _check_side(target: Path, source: Path, *, force: bool, external: bool) -> None:
    """Refuse an output that would overwrite the input's data, or any file that is not meant."""
    side = side_file(target)
    if not target.exists() and not side.exists():
        return
    inputs = _data_files(source)
    for file in (target, side):
        if any(file.exists() and file.samefile(data) for data in inputs):
            raise RequantError(f"{file}: holds the weights of the input {str(source)!r}; choose another output")
    if not external and sum(file.stat().st_size for file in (source, *inputs) if file.exists()) <= PROTOBUF_LIMIT:
        return
    if side.parent != target.parent.resolve():
        raise RequantError(f"{target}: is a link to another folder, where its weights would not be found")
    if side.is_dir():
        raise RequantError(f"{side}: is a folder; the weights of {str(target)!r} would go there")
    if side.exists() and not force:
        raise RequantError(f"{side}: exists already; --force overwrites it")


def _data_files(path: Path) -> list[Path]:
    """Return the files outside a model that hold its tensors; none where it is not a model."""
    try:
        with quiet():
            model = ir.load(path, format="protobuf")
    except Exception:  # noqa: BLE001 - not a model, for any reason; who needs one will say what is wrong
        return []
    files = {Path(path.parent, os.fspath(tensor.location)) for tensor in external_tensors(model)}
    return sorted(file for file in files if file.is_file())


def size_on_disk(path: PathLike) -> int:
    """Return the bytes of a model, its external data files included."""
    return sum(file.stat().st_size for file in (Path(path), *_data_files(Path(path))))


@dataclass(frozen=True, slots=True)
class Weights:
    """How much memory a model takes.

    Attributes:
        total: Bytes of all tensors.
        largest: Bytes of the largest one, of which a second copy exists while the runtime packs it.
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
        """Whether packing takes more than a fifth above the size of the model."""
        return self.large and 5 * self.largest > self.total


@contextmanager
def staging(output: PathLike | None = None) -> Iterator[Path]:
    """Make a hidden folder for large weights of models in work, beside `output`, and remove it afterwards.

    The file system of the output has the room, which that of temporary files, often in memory, may not have.

    Raises:
        RequantError: It cannot be made.
    """
    beside = None if output is None else Path(os.path.realpath(output)).parent
    try:
        folder = tempfile.TemporaryDirectory(dir=beside, prefix=".requant-", ignore_cleanup_errors=True)
    except OSError as error:
        raise RequantError(f"{beside}: cannot be written to: {error.strerror}") from error
    with folder as name:
        yield Path(name)


def serialize(model: ir.Model, folder: Path | None = None) -> Serialized:
    """Return a model as the runtime opens it, without a copy of large weights.

    What lies in files stays there. The runtime reads external data of one folder only: that which holds most of it.
    What is elsewhere or in memory becomes part of the bytes or, when that is more than `INSIDE`, is moved with all
    other weights into a file in `folder`: `model` and its later clones then read it from there, and the memory is free.

    Args:
        model: The model; it computes the same afterwards.
        folder: Where weights may be put, from `staging`; None keeps them in memory.

    Raises:
        RequantError: The bytes are more than one ONNX message can hold, or the file cannot be written.
    """
    for tensor in external_tensors(model):
        release(tensor)
    held: Counter[Path | None] = Counter()
    for value in _weights(model):
        held[_home(value.const_value)] += _tensor(value).nbytes
    home = max((place for place in held if place is not None), key=held.__getitem__, default=None)
    inside = sum(size for place, size in held.items() if place is None or place != home)
    if folder is not None and inside > INSIDE:
        home, inside = folder.absolute(), 0
        _move([value for value in _weights(model) if _home(value.const_value) != home], home)
    if inside > PROTOBUF_LIMIT:
        raise RequantError(f"{inside / 2**30:.1f} GB of weights are in memory; one ONNX model holds 2 GB")
    copy = model.clone()
    load_tensors(copy, keep=lambda tensor: _home(tensor) == home)
    return Serialized(bytes(ir.to_proto(copy).SerializeToString()), home)


def _move(weights: Sequence[ir.Value], folder: Path) -> None:
    """Put initializers into a new file in `folder` and let them refer to it."""
    tensors = [_tensor(value) for value in weights]
    try:
        with open(folder / f"{secrets.token_hex(4)}.data", "xb") as file:
            offsets = _write_side(file, tensors)
    except OSError as error:
        raise RequantError(f"{folder}: weights cannot be put there: {error.strerror}") from error
    _refer(weights, Path(file.name), offsets)
    del tensors
    gc.collect()  # clones of the model that are no longer used, but are cycles, would keep the weights


def save_model(model: ir.Model, path: PathLike, *, external: bool = False) -> int:
    """Write a model, and return its bytes; it appears whole or not at all.

    Weights are written one at a time. A model that holds its weights itself is one message, of at most 2 GB.

    Args:
        model: The model; it does not change.
        path: Where it is written.
        external: Whether weights go into `side_file`; those that one ONNX message cannot hold do in any case, and those
            that `externalize_weights` has marked. A model and side file that are there already are both set aside
            before the new ones take their names.

    Raises:
        RequantError: It cannot be written; what was there before is untouched.
    """
    target = Path(os.path.realpath(path))
    taken = {target, side_file(target)}
    if any(Path(os.path.realpath(tensor.path)) in taken for tensor in external_tensors(model)):
        raise RequantError(f"{path}: the model's own weights lie there; choose another path")
    copy = model.clone()
    least = external_threshold(copy)
    copy.metadata_props.pop(EXTERNAL, None)
    weights = _weights(copy, least or SMALL)
    try:
        if external or least is not None or sum(tensor.nbytes for tensor in tensors(copy)) > PROTOBUF_LIMIT:
            return _save_pair(copy, weights, target)
        return _save_whole(copy, target)
    except OSError as error:
        raise RequantError(f"{path}: cannot be written: {error.strerror}") from error


def _save_whole(copy: ir.Model, target: Path) -> int:
    """Write a model that holds its weights itself, and return its bytes: those of ``SerializeToString``."""
    apart = [
        (value, value.const_value)
        for value in copy.graph.initializers.values()
        if isinstance(value.const_value, (ir.ExternalTensor, ir.LazyTensor, ir.Tensor))
        and value.const_value.nbytes >= APART
        and value.const_value.dtype is not ir.DataType.STRING
    ]
    for value, tensor in apart:
        value.const_value = _stand_in(value, tensor)
    stand_ins = {id(value.const_value) for value, _ in apart}
    load_tensors(copy, keep=lambda tensor: id(tensor) in stand_ins)
    proto = ir.to_proto(copy)
    weights = {str(value.name): tensor for value, tensor in apart}
    held = [weights.get(tensor.name) for tensor in proto.graph.initializer]
    for one, other in zip(proto.graph.initializer, held, strict=True):
        if other is not None:
            one.ClearField("external_data")
            one.ClearField("data_location")
    data = proto.SerializeToString()
    with replacing(target) as file:
        for part in with_weights(data, [None if tensor is None else tensor.nbytes for tensor in held]):
            weight = None if isinstance(part, bytes) else held[part]
            if weight is not None:
                _write_tensor(file, weight)
            elif isinstance(part, bytes):
                file.write(part)
        return file.tell()


def _stand_in(value: ir.Value, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    """Return what stands for a weight in a message that is written without it."""
    shape = ir.Shape(tensor.shape.numpy())
    name, said = str(value.name), tensor.doc_string
    return ir.ExternalTensor("", 0, tensor.nbytes, ir.DataType(tensor.dtype), shape=shape, name=name, doc_string=said)


def _save_pair(copy: ir.Model, weights: Sequence[ir.Value], target: Path) -> int:
    """Write a model and its side file, and return their bytes; no moment shows the one with another's of the other."""
    side = side_file(target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        fresh, old = Path(name), Path(name) / "old"
        old.mkdir()
        with open(fresh / side.name, "xb") as file:
            offsets = _write_side(file, [_tensor(value) for value in weights])
            os.fsync(file.fileno())
        _refer(weights, side, offsets)
        load_tensors(copy, keep=lambda tensor: tensor.path == os.fspath(side))
        with open(fresh / target.name, "xb") as file:
            file.write(ir.to_proto(copy).SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        _exchange([side, target], fresh, old)
    return target.stat().st_size + side.stat().st_size


def _exchange(places: Sequence[Path], fresh: Path, old: Path) -> None:
    """Move files of a folder to their places, and what is there to `old`; or, where that fails, nothing."""
    before = [place for place in places if place.exists()]
    try:
        for place in reversed(before):
            os.replace(place, old / place.name)
        for place in places:
            os.replace(fresh / place.name, place)
    except OSError:
        for place in places:
            if (old / place.name).exists():
                os.replace(old / place.name, place)
            elif place not in before:
                place.unlink(missing_ok=True)
        raise


def _weights(model: ir.Model, least: int = SMALL) -> list[ir.Value]:
    """Return the initializers of at least so many bytes, in bodies too, which may be stored outside the model."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    return [
        value
        for value in values
        if value.const_value is not None
        and value.const_value.dtype is not ir.DataType.STRING
        and value.const_value.nbytes >= least
    ]


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    """Return the tensor of an initializer."""
    assert value.const_value is not None
    return value.const_value


def _home(tensor: ir.TensorProtocol | None) -> Path | None:
    """Return the folder relative to which a tensor's location is; None when it is in memory."""
    return Path(tensor.base_dir).absolute() if isinstance(tensor, ir.ExternalTensor) else None


def _write_side(file: BinaryIO, tensors: Iterable[ir.TensorProtocol]) -> list[int]:
    """Write the bytes of tensors, one at a time, and return where each begins."""
    offsets = []
    for tensor in tensors:
        offsets.append(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
        file.seek(offsets[-1])  # what is skipped reads as zeros
        _write_tensor(file, tensor)
    file.flush()
    return offsets


def _write_tensor(file: BinaryIO, tensor: ir.TensorProtocol) -> None:
    """Write the bytes of a tensor where the file stands; what comes from a file does not pass through memory."""
    if isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor, ir.Tensor)):
        tensor.tofile(file)
    else:
        file.write(tensor.tobytes())


def _refer(weights: Iterable[ir.Value], file: Path, offsets: Iterable[int]) -> None:
    """Let initializers be the data in a file."""
    for value, offset in zip(weights, offsets, strict=True):
        tensor = _tensor(value)
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


def size_text(count: int) -> str:
    """Write a number of bytes: ``1.82 MB``."""
    for unit, least in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= least:
            return f"{count / least:.2f} {unit}"
    return f"{count} B"
