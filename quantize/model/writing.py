"""Write models: complete files or none, large weights one at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import onnx_ir as ir

from ... import RequantError
from ...system.apart import PathLike
from ...system.notes import note_written
from ...system.regular import check_replaceable, reason_of
from ...system.scratch import OLD, exclusive, scratch_folder
from ...system.writing import replacing
from ...transforms.externalize_weights import EXTERNAL, external_threshold
from ...transforms.graphs.tensors import external_tensors, load_tensors, tensors
from . import files
from .files import data_files, side_file
from .raw_weights import with_weights
from .side_files import SMALL, refer, tensor_of, weights_of, write_side, write_tensor


def save_model(model: ir.Model, path: PathLike, *, external: bool = False) -> int:
    """Write a model completely or not at all, and return its size in bytes.

    Weights are written one at a time. A model that contains its weights is one message of at most 2 GB.

    Args:
        model: The model; it does not change.
        path: The file to write.
        external: Whether weights go to `side_file`. Weights that exceed one ONNX message, and weights that
            `externalize_weights` has marked, always go there. An old model and its side file are moved away before the
            new files take their names. Without `external`, a side file of the old model is removed.

    Raises:
        RequantError: The model cannot be written; existing files are unchanged.
    """
    check_replaceable(path)
    target = Path(os.path.realpath(path))
    taken = {target, side_file(target)}
    if any(Path(os.path.realpath(tensor.path)) in taken for tensor in external_tensors(model)):
        raise RequantError(f"{path}: the file holds weights of this model; choose another path")
    copy = model.clone()
    least = external_threshold(copy)
    copy.metadata_props.pop(EXTERNAL, None)
    weights = weights_of(copy, least or SMALL)
    try:
        if external or least is not None or sum(tensor.nbytes for tensor in tensors(copy)) > files.PROTOBUF_LIMIT:
            size = _save_pair(copy, weights, target)
            note_written(Path(path).with_name(side_file(path).name))
        else:
            size = _save_alone(copy, target)
    except OSError as error:
        raise RequantError(f"{path}: cannot be written: {reason_of(error)}") from error
    note_written(path)
    return size


def _save_alone(copy: ir.Model, target: Path) -> int:
    """Write a model with its weights inside, remove the side file of the model that it replaces, and return its size.

    A side file that the replaced model does not use is not ours, and stays.
    """
    side = side_file(target)
    if not side.is_file():
        return _save_whole(copy, target)
    with exclusive(target.parent):
        stale = target.is_file() and side in data_files(target)
        size = _save_whole(copy, target)
        if stale:
            with suppress(OSError):  # the model is written, and does not need that the file is gone
                side.unlink()
    return size


def _save_whole(copy: ir.Model, target: Path) -> int:
    """Write a model with its weights inside, the bytes of ``SerializeToString``, and return its size."""
    apart = [
        (value, value.const_value)
        for value in copy.graph.initializers.values()
        if isinstance(value.const_value, (ir.ExternalTensor, ir.LazyTensor, ir.Tensor))
        and value.const_value.nbytes >= files.APART
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
                write_tensor(file, weight)
            elif isinstance(part, bytes):
                file.write(part)
        return file.tell()


def _stand_in(value: ir.Value, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    """Return a placeholder for a weight in a message without it."""
    shape = ir.Shape(tensor.shape.numpy())
    name, said = str(value.name), tensor.doc_string
    return ir.ExternalTensor("", 0, tensor.nbytes, ir.DataType(tensor.dtype), shape=shape, name=name, doc_string=said)


def _save_pair(copy: ir.Model, weights: Sequence[ir.Value], target: Path) -> int:
    """Write a model and its side file, and return their size; a new file never stands beside an old one."""
    side = side_file(target)
    with scratch_folder(target.parent) as fresh:
        old = fresh / OLD
        old.mkdir()
        with open(fresh / side.name, "xb") as file:
            offsets = write_side(file, [tensor_of(value) for value in weights])
            os.fsync(file.fileno())
        refer(weights, side, offsets)
        load_tensors(copy, keep=lambda tensor: tensor.path == os.fspath(side))
        with open(fresh / target.name, "xb") as file:
            file.write(ir.to_proto(copy).SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        size = sum((fresh / file.name).stat().st_size for file in (side, target))
        with exclusive(target.parent):
            _exchange([side, target], fresh, old)
    return size


def _exchange(places: Sequence[Path], fresh: Path, old: Path) -> None:
    """Move new files to their places, and existing files to `old`; if this fails, undo it."""
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
