"""ONNX Runtime sessions on the CPU, and what a model wants to be fed."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import RequantError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

Array: TypeAlias = npt.NDArray[Any]
Feed: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Serialized:
    """A model in memory whose weights may lie in files.

    Attributes:
        data: The bytes of the model.
        folder: The folder of its external data; None when everything is inside.
        name: How messages call it.
        weights: Initializers that are arrays in memory: `data` says only that they are elsewhere. They are not copied,
            but by kernels that lay them out anew.
    """

    data: bytes
    folder: Path | None = None
    name: str = "the model"
    weights: Mapping[str, Array] = field(default_factory=dict)


ModelSource: TypeAlias = str | os.PathLike[str] | bytes | Serialized
"""A file, the bytes of one, or bytes with the folder of their external data."""

NEWER_IR = re.compile(r"Unsupported model IR version: \d+, max supported IR version: (\d+)")
SOURCE = re.compile(r"\S*/onnxruntime\S*\.(?:cc|h|cpp):\d+ [^()]*\((?:[^()]|\([^()]*\))*\)(?: const)? ?")
"""Where in its own source the runtime has found a fault: file, line and the whole signature of a function."""

PROVIDERS = ["CPUExecutionProvider"]  # used without fallback, which would tell of itself on stdout

LARGE = 2**30
"""Bytes of weights of which no two copies should be in memory."""
FEW = 8
"""Runs for which packing the weights of a large model does not pay."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(double)": np.dtype(np.float64),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(int16)": np.dtype(np.int16),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(uint16)": np.dtype(np.uint16),
    "tensor(uint32)": np.dtype(np.uint32),
    "tensor(uint64)": np.dtype(np.uint64),
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(string)": np.dtype(np.str_),
}
"""The runtime's names of the types that a NumPy array can feed."""

LOAD_HINTS: Mapping[str, str] = {
    "InvalidProtobuf": "not an ONNX model, or a truncated one",
    "InvalidArgument": "not a valid ONNX model",
    "InvalidGraph": "the runtime rejects the graph",
    "NotImplemented": "an operator has no CPU kernel",
    "NoSuchFile": "a file is missing",
    "Fail": "the runtime cannot load the model",
}
"""What each of the runtime's exception classes means while a model is loaded."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One required input of a model.

    Attributes:
        name: The input's name.
        dtype: Its element type; ``str`` of no fixed length for strings.
        shape: One entry per axis: the length, the symbol, or None.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...]

    def __str__(self) -> str:
        """Return ``"float32 (N, 3, 224, 224)"``."""
        axes = ["?" if axis is None else str(axis) for axis in self.shape]
        return f"{type_name(self.dtype)} ({', '.join(axes)}{',' if len(axes) == 1 else ''})"


def type_name(dtype: np.dtype[Any]) -> str:
    """Return the name of an element type without the length of its strings."""
    return "string" if dtype.kind in "OSU" else dtype.name


def open_session(
    model: ModelSource,
    *,
    threads: int = 0,
    optimize: bool = True,
    profile: Path | None = None,
    save_optimized: Path | None = None,
    lean: bool = False,
    patterns: bool = True,
) -> InferenceSession:
    """Load a model into ONNX Runtime's CPU provider.

    A lean session makes no copy of weights in external data: it computes on the mapped files, where a usual one packs
    the weights into the layout of its kernels. It opens at once and the system can take its memory back, but a
    matrix product over a few rows takes several times as long: for a handful of runs, never to tell a latency.

    Args:
        model: A file, or the bytes of one.
        threads: Threads inside one operator; 0 leaves the choice to the runtime.
        optimize: Whether the runtime may rewrite the graph.
        profile: Prefix of the path of a profile that the session writes; None for no profile.
        save_optimized: Where the runtime writes the graph that it made of the model; None for nowhere.
        lean: Whether to compute on the weights as they are in the files.
        patterns: Whether memory for a run is taken as one block, planned from the shapes of the first run. It is held
            once for each run at a time, and is of little use where shapes vary or most tensors are outputs.

    Raises:
        RequantError: The model cannot be loaded; the message names the file and the runtime's reason.
    """
    import onnxruntime as ort

    name = describe(model)
    if not isinstance(model, (bytes, Serialized)) and not Path(model).is_file():
        raise RequantError(f"{name}: " + ("is a folder, not a model" if Path(model).is_dir() else "no such file"))
    options = ort.SessionOptions()
    options.log_severity_level = 4  # failures arrive as exceptions; the runtime need not print them as well
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = patterns
    if lean:
        options.add_session_config_entry("session.disable_prepacking", "1")
        # the level above reorders the weights of convolutions
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = os.fspath(profile)
    if save_optimized is not None:
        options.optimized_model_filepath = os.fspath(save_optimized)
    if isinstance(model, Serialized) and model.folder is not None:
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, os.fspath(model.folder.resolve()))
    weights = dict(model.weights) if isinstance(model, Serialized) else {}
    if weights:
        options.add_external_initializers(list(weights), list(map(ort.OrtValue.ortvalue_from_numpy, weights.values())))
    try:
        session = ort.InferenceSession(_loadable(model), options, providers=PROVIDERS, enable_fallback=0)
        weakref.finalize(session, weights.clear)  # they must live as long
        return session
    except Exception as error:  # the runtime's exceptions share no base class of their own
        newest = NEWER_IR.search(str(error))
        if newest is not None:
            older = _of_ir_version(model, int(newest[1]))
            return open_session(
                older,
                threads=threads,
                optimize=optimize,
                profile=profile,
                save_optimized=save_optimized,
                lean=lean,
                patterns=patterns,
            )
        hint = LOAD_HINTS.get(type(error).__name__, "the runtime cannot load the model")
        raise RequantError(f"{name}: {hint}: {runtime_message(error)}") from error


def _of_ir_version(model: ModelSource, version: int) -> Serialized:
    """Return a model whose IR version is newer than the runtime as one of an older version.

    IR versions add types and fields; they change no meaning. A model that uses what the runtime does not know is
    refused for that.
    """
    import onnx

    if isinstance(model, Serialized):
        proto, folder = onnx.load_model_from_string(model.data), model.folder
    elif isinstance(model, bytes):
        proto, folder = onnx.load_model_from_string(model), None
    else:
        proto, folder = onnx.load_model(model, load_external_data=False), Path(model).parent
    proto.ir_version = version
    weights = model.weights if isinstance(model, Serialized) else {}
    return Serialized(proto.SerializeToString(), folder, describe(model), weights)


@cache
def newest_ir_version() -> int:
    """Return the newest IR version that the installed runtime loads."""
    import onnx
    import onnxruntime as ort

    future = onnx.helper.make_model(onnx.GraphProto(), ir_version=2**31 - 1)
    try:
        ort.InferenceSession(future.SerializeToString(), providers=PROVIDERS, enable_fallback=0)
    except Exception as error:  # noqa: BLE001 - the runtime's exceptions share no base class of their own
        newest = NEWER_IR.search(str(error))
        if newest is not None:
            return int(newest[1])
    return 2**31 - 1  # a runtime that does not mind


def _loadable(model: ModelSource) -> str | bytes:
    """Return what the runtime takes: a path or bytes."""
    if isinstance(model, Serialized):
        return model.data
    return model if isinstance(model, bytes) else os.fspath(model)


def give_back() -> None:
    """Return memory that was freed to the system; the C library of Linux keeps it for what may come."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def describe(model: ModelSource) -> str:
    """Return how error messages call a model: its path, or ``"the model"`` when it came as bytes."""
    if isinstance(model, Serialized):
        return model.name
    return "the model" if isinstance(model, bytes) else os.fspath(model)


def runtime_message(error: Exception) -> str:
    """Return an exception of the runtime as one line without its code and source positions."""
    text = " ".join(str(error).split())
    text = re.sub(r"^.*\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)  # nested failures carry several; keep the inmost
    text = re.sub(r"^Load model from .*? failed:", "", text)
    text = SOURCE.sub("", text)
    text = re.sub(r"\b\w+\.(?:cc|h):\d+ \w+ ", "", text)
    return text.strip() or type(error).__name__


def input_specs(session: InferenceSession) -> tuple[InputSpec, ...]:
    """Return the inputs that must be fed, in the model's order.

    Initializers that are listed among the graph's inputs (all of them are before IR version 4) have a
    value already and are left out.

    Raises:
        RequantError: An input is no tensor, or of a type that NumPy lacks.
    """
    specs = []
    for value in session.get_inputs():
        if value.type not in DTYPES:
            raise RequantError(f"input {value.name!r} is a {value.type}, which cannot be fed from arrays")
        shape = tuple(axis if isinstance(axis, (int, str)) else None for axis in value.shape)
        specs.append(InputSpec(value.name, DTYPES[value.type], shape))
    return tuple(specs)
