"""Folders ``test_data_set_*`` with ``input_*.pb``: the test data of published ONNX models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...system.regular import open_regular, size_of
from ..model.session import Array, InputSpec
from .samples import SEQUENCE, DataError, Picked, Rows, Sample, check_names

if TYPE_CHECKING:
    import onnx

INPUT = re.compile(r"input_([0-9]+)\.pb")


def onnx_sets(folder: str) -> list[Path]:
    """Return the data sets of a folder in numeric order, or the folder itself if it is one data set."""

    def number(path: Path) -> tuple[int, str]:
        digits = re.search(r"([0-9]+)$", path.name)
        return (int(digits[1]) if digits else -1, path.name)

    here = Path(folder)
    if any(INPUT.fullmatch(file.name) for file in here.iterdir()):
        return [here]
    return sorted((path for path in here.glob("test_data_set*") if path.is_dir()), key=number)


def onnx_folder(folder: str, sets: Sequence[Path], inputs: Sequence[InputSpec], limit: int) -> Rows:
    """Read data sets, one sample per set. A file may have `limit` bytes.

    ``input_K.pb`` is a TensorProto. It belongs to the input of the same name, or to the K-th input if no tensor of the
    set has the name of an input. Outputs are not read, because they are no labels.
    """

    def read(picked: Picked) -> Iterator[Sample]:
        for index in range(len(sets)) if picked is None else picked:
            yield _read_set(sets[index], index, inputs, limit)

    return Rows(folder, len(sets), read, random=True)


def _read_set(folder: Path, index: int, inputs: Sequence[InputSpec], limit: int) -> Sample:
    """Read one data set."""
    where = f"{folder}, sample {index}"
    files = {int(match[1]): file for file in folder.iterdir() if (match := INPUT.fullmatch(file.name))}
    if not files:
        raise DataError(f"{where}: has no input_0.pb")
    tensors = {number: _tensor(files[number], f"{files[number]}, sample {index}", limit) for number in sorted(files)}
    known = {spec.name for spec in inputs}
    feed: dict[str, Array] = {}
    if any(name in known for name, _ in tensors.values()):
        for number, (name, array) in tensors.items():
            if name in feed:
                raise DataError(f"{files[number]}, sample {index}: a second tensor for the model's input {name!r}")
            feed[name] = array
    else:
        inputs = [spec for spec in inputs if spec.name != SEQUENCE]
        if sorted(tensors) != list(range(len(inputs))):
            files_found, expected = ", ".join(files[number].name for number in tensors), ", ".join(sorted(known))
            raise DataError(f"{where}: has {files_found}, none named as an input; the model has inputs {expected}")
        feed = {spec.name: tensors[number][1] for number, spec in enumerate(inputs)}
    check_names(feed, inputs, where)
    return Sample(feed, None, where)


def _tensor(file: Path, where: str, limit: int) -> tuple[str, Array]:
    """Read the name and the values of a TensorProto."""
    import onnx

    tensor = onnx.TensorProto()
    with open_regular(file) as stream:
        if size_of(stream) > limit:
            raise DataError(f"{where}: has {size_of(stream)} bytes; the limit is {limit} bytes")
        content = stream.read()
    try:
        tensor.ParseFromString(content)
    except Exception as error:  # protobuf's errors have no common base class
        raise DataError(f"{where}: cannot be read as a TensorProto: {error}") from error
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
        raise DataError(f"{where}: has external data, which are not read here; store the values in the tensor")
    return tensor.name, _values(tensor, where)


def _values(tensor: onnx.TensorProto, where: str) -> Array:
    """Return the values of a tensor."""
    from onnx import numpy_helper

    try:
        if any(length < 0 for length in tensor.dims):
            raise ValueError(f"its shape is {list(tensor.dims)}")
        array = np.asarray(numpy_helper.to_array(tensor))
        if array.dtype.hasobject:  # strings are UTF-8 bytes
            texts = [value.decode() if isinstance(value, bytes) else str(value) for value in array.ravel()]
            array = np.array(texts, dtype=np.str_).reshape(array.shape)
    except Exception as error:  # onnx raises errors of many types for types and shapes that do not fit the values
        raise DataError(f"{where}: cannot be read as a TensorProto: {' '.join(str(error).split())}") from error
    return array
