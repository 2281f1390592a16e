"""A model in memory as a file, for programs that read files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ... import RequantError
from ...calibration.model.session import ModelSource, Serialized
from ...system.scratch import scratch_folder


@contextmanager
def as_file(model: ModelSource, folder: Path | None = None) -> Iterator[str]:
    """Return the path of a model. A model in memory is written into a temporary folder, in `folder`.

    Raises:
        RequantError: The file does not exist.
    """
    if not isinstance(model, (bytes, Serialized)):
        if not os.path.isfile(model):
            raise RequantError(f"{os.fspath(model)}: no such file")
        yield os.fspath(model)
        return
    with scratch_folder(folder) as scratch:
        path = os.path.join(scratch, "model.onnx")
        if isinstance(model, bytes) or (model.folder is None and not model.weights):
            Path(path).write_bytes(model if isinstance(model, bytes) else model.data)
        else:
            _write(model, path)
        yield path


def _write(model: Serialized, path: str) -> None:
    """Write a model, with its weights in files beside it."""
    import onnx
    from onnx import external_data_helper, numpy_helper

    proto = onnx.load_model_from_string(model.data)
    for tensor in proto.graph.initializer:
        if tensor.name in model.weights:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(model.weights[tensor.name]), tensor.name))
    if model.folder is not None:
        external_data_helper.load_external_data_for_model(proto, os.fspath(model.folder))
    onnx.save_model(proto, path, save_as_external_data=True)
