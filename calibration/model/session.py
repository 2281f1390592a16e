"""ONNX Runtime sessions on the CPU, and the inputs of a model."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ... import NATIVE_DOMAIN, RequantError
from ...system.given import check_kind
from ...system.regular import check_file
from ...system.stderr import aside, is_moved
from .messages import STANDARD
from .newer import is_newer, lower_message

if TYPE_CHECKING:
    import onnx
    from onnxruntime import InferenceSession, NodeArg, SessionOptions

FOLDED, FOLDED_APART = 2**27, 2**29
"""Bytes of a constant that the runtime may compute when it loads any model, and one with weights in other files."""

Array: TypeAlias = npt.NDArray[Any]
"""An array of any type. `transforms`, which must not import this package, has one in `int8/qparams.py`."""
Feed: TypeAlias = Mapping[str, Array]


NAMELESS = "the model"
"""The name of a model without a file in messages."""


@dataclass(frozen=True, slots=True)
class Serialized:
    """A model in memory. Its weights may be in files.

    Attributes:
        data: The bytes of the model.
        folder: The folder of its external data; None if there are none.
        name: The model's name in messages.
        weights: Arrays of initializers that `data` marks as external. They are not copied, except by kernels that
            change the layout.
    """

    data: bytes
    folder: Path | None = None
    name: str = NAMELESS
    weights: Mapping[str, Array] = field(default_factory=dict)


ModelSource: TypeAlias = str | os.PathLike[str] | bytes | Serialized
"""A file, the bytes of a file, or a serialized model with the folder of its external data."""

SOURCE = re.compile(r"\S*/onnxruntime\S*\.(?:cc|h|cpp):\d+ [^()]*\((?:[^()]|\([^()]*\))*\)(?: const)? ?")
"""A position in the runtime's source code in an error message: file, line and the signature of a function."""

LONGEST_MESSAGE = 4096
"""The most characters of an error of the runtime that are read."""
PROVIDERS = ["CPUExecutionProvider"]  # without fallback, which prints to stdout

OPERATORS = Path(__file__).parents[2] / "quantize/kernels/lib" / platform.machine() / "librequant_kernels.so"
"""The library of the native operators; the file exists if it was built for this machine."""

LARGE = 2**30
"""A model with more bytes of weights than this should not have two copies of them in memory."""
FEW = 8
"""For at most this number of runs, packing the weights of a large model takes longer than it saves."""

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
"""The runtime's names of the types that NumPy arrays can have."""

LOAD_HINTS: Mapping[str, str] = {
    "InvalidProtobuf": "not an ONNX model, or a truncated one",
    "InvalidArgument": "not a valid ONNX model",
    "InvalidGraph": "the runtime rejects the graph",
    "NotImplemented": "an operator has no CPU kernel",
    "NoSuchFile": "a file is missing",
    "Fail": "the runtime cannot load the model",
}
"""The meaning of the runtime's exception classes while a model is loaded."""
OLDEST_OPSET = 7
"""The oldest version of the standard operator set that the runtime supports; of older ones it has some kernels."""
UNKNOWN = "is not a registered function/op"
"""What the runtime says of an operator that it does not know."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One required input of a model.

    Attributes:
        name: The input's name.
        dtype: The element type; ``str`` without a length for strings.
        shape: One entry per axis: the length, the symbol, or None.
        optional: Whether samples may lack it, because it is computed: a state, or a mask over the state.
        fed_by: The outputs that may be the state that it holds, by type and shape; None if they are not known.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...]
    optional: bool = False
    fed_by: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """Return ``"float32 (N, 3, 224, 224)"``."""
        axes = ["?" if axis is None else str(axis) for axis in self.shape]
        return f"{type_name(self.dtype)} ({', '.join(axes)}{',' if len(axes) == 1 else ''})"


def type_name(dtype: np.dtype[Any]) -> str:
    """Return the name of an element type; all strings are ``"string"``."""
    return "string" if dtype.kind in "OSU" else dtype.name


def open_session(
    model: ModelSource,
    *,
    threads: int = 0,
    optimize: bool = True,
    profile: Path | None = None,
    save_optimized: Path | None = None,
    lean: bool = False,
    arena: bool = True,
) -> InferenceSession:
    """Load a model into ONNX Runtime's CPU provider.

    A lean session does not copy weights in external data. It computes on the mapped files, where a normal session packs
    the weights into the layout of its kernels. A lean session opens at once and the system can reclaim its memory, but
    a matrix product over a few rows takes several times as long. Use it for a few runs, never to measure latency.

    Args:
        model: A file, or the bytes of one.
        threads: Threads inside one operator; 0 is the runtime's choice.
        optimize: Whether the runtime may rewrite the graph.
        profile: The path prefix of a profile that the session writes; None for no profile.
        save_optimized: The file for the runtime's optimized graph; None for no file.
        lean: Whether to compute on the weights in their files.
        arena: Whether the session keeps the memory of its runs, in a block per concurrent run that is planned from the
            shapes of the first run. Choose False if shapes vary or if most tensors are outputs.

    Raises:
        RequantError: The model cannot be loaded; the message has the file and the runtime's reason.
    """
    if not isinstance(model, (bytes, Serialized)):
        check_kind(model, (str, os.PathLike), "a model must be the path of a file or its bytes")
        check_file(model)
    options_for = partial(
        _session_options,
        threads=threads,
        optimize=optimize,
        profile=profile,
        save_optimized=save_optimized,
        lean=lean,
        arena=arena,
    )
    return _open(model, lambda source: _with_library(source, options_for(source)))


def open_without_library(model: ModelSource, *, threads: int = 0) -> InferenceSession:
    """Load a model as a program does that does not register the library of the native operators.

    Args:
        model: A file, or the bytes of one.
        threads: Threads inside one operator; 0 is the runtime's choice.

    Raises:
        RequantError: The model cannot be loaded; the message has the file and the runtime's reason.
    """
    return _open(model, partial(_session_options, threads=threads))


def _open(model: ModelSource, options_for: Callable[[ModelSource], SessionOptions]) -> InferenceSession:
    """Load a model; if its IR version or opset is too new for the runtime, load it as a model of an older version.

    Raises:
        RequantError: The model cannot be loaded.
    """
    name = describe(model)
    try:
        try:
            return _create_session(model, options_for(model))
        except Exception as error:  # the runtime's exceptions have no common base class
            if not is_newer(error):
                raise
            older = _lowered(model)
            return _create_session(older, options_for(older))
    except Exception as error:
        raise RequantError(f"{name}: {_load_hint(model, error)}: {_load_message(error)}") from error


def _load_hint(model: ModelSource, error: Exception) -> str:
    """Return what an exception means that the runtime raised while it loaded a model."""
    kind = type(error).__name__
    if kind == "NotImplemented" and (opset := _opset_of(model)) < OLDEST_OPSET:
        return (
            f"opset {opset} is older than {OLDEST_OPSET}, the oldest that the runtime supports; "
            "'requant transform' (in Python: transform_model) with convert_opset writes a newer model"
        )
    return LOAD_HINTS.get(kind, LOAD_HINTS["Fail"])


def _load_message(error: Exception) -> str:
    """Return the runtime's reason why it does not load a model; of unknown native operators, why they are unknown."""
    message = runtime_message(error)
    if f"{NATIVE_DOMAIN}:" not in message or UNKNOWN not in message:
        return message
    why = "they are not built here" if native_library() is None else "another requant compiled it; compile it again"
    return f"its native operators are unknown: {why}; see 'requant kernels'"


def _create_session(model: ModelSource, options: SessionOptions) -> InferenceSession:
    """Create a session that shares the weights in memory with the caller."""
    import onnxruntime as ort

    weights = dict(model.weights) if isinstance(model, Serialized) else {}
    if weights:
        options.add_external_initializers(list(weights), list(map(ort.OrtValue.ortvalue_from_numpy, weights.values())))
    session = start_session(_loadable(model), options)
    weakref.finalize(session, weights.clear)  # the session needs them while it lives
    return session


def start_session(model: str | bytes, options: SessionOptions) -> InferenceSession:
    """Return a session of the runtime; a command does not print what the runtime logs, which arrives as exceptions."""
    import onnxruntime as ort

    if is_moved():  # the logger of the process: a program that imports requant keeps its own
        ort.set_default_logger_severity(4)
    with aside():
        return ort.InferenceSession(model, options, providers=PROVIDERS, enable_fallback=0)


def _session_options(
    model: ModelSource,
    *,
    threads: int,
    optimize: bool = True,
    profile: Path | None = None,
    save_optimized: Path | None = None,
    lean: bool = False,
    arena: bool = True,
) -> SessionOptions:
    """Return the options of a session; the arguments are those of `open_session`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # do not print errors; they arrive as exceptions
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = options.enable_cpu_mem_arena = arena
    if lean:
        options.add_session_config_entry("session.disable_prepacking", "1")
        # the next level reorders the weights of convolutions
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = os.fspath(profile)
    if save_optimized is not None:
        options.optimized_model_filepath = os.fspath(save_optimized)
    options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", str(_most_folded(model)))
    if isinstance(model, Serialized) and model.folder is not None:
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, os.fspath(model.folder.resolve()))
    return options


def _most_folded(model: ModelSource) -> int:
    """Return the most bytes of a constant that the runtime computes while it loads a model.

    A few numbers can ask for gigabytes. Constants may double the bytes of a model; where its weights lie in other
    files, their size is not known here.
    """
    if isinstance(model, Serialized) and model.folder is not None:
        return max(FOLDED_APART, 2 * len(model.data))
    if isinstance(model, (bytes, Serialized)):
        return max(FOLDED, 2 * len(model if isinstance(model, bytes) else model.data))
    return max(FOLDED_APART, 2 * os.stat(model).st_size)


def _with_library(model: ModelSource, options: SessionOptions) -> SessionOptions:
    """Return options, with the library of the native operators if it is here and the model may need it."""
    data = model.data if isinstance(model, Serialized) else model
    library = native_library()
    if library is not None and (not isinstance(data, bytes) or NATIVE_DOMAIN.encode() in data):
        options.register_custom_ops_library(library)
    return options


@cache
def native_library() -> str | None:
    """Return the library of the native operators; None if it is not built, or does not load into this runtime."""
    import onnxruntime as ort

    try:
        ort.SessionOptions().register_custom_ops_library(os.fspath(OPERATORS))
    except Exception:  # noqa: BLE001 - the runtime's exceptions have no common base class
        return None
    return os.fspath(OPERATORS)


def _lowered(model: ModelSource) -> Serialized:
    """Return a model that is newer than the runtime with an older IR version and opset.

    Raises:
        RequantError: It means something else there.
    """
    proto, folder = _message_of(model)
    lower_message(proto)
    weights = model.weights if isinstance(model, Serialized) else {}
    return Serialized(proto.SerializeToString(), folder, describe(model), weights)


def _message_of(model: ModelSource) -> tuple[onnx.ModelProto, Path | None]:
    """Return a model as a message, and the folder of its external data.

    Raises:
        RequantError: The file is no model.
    """
    import onnx

    from .onnx_files import read_proto

    if isinstance(model, Serialized):
        return onnx.load_model_from_string(model.data), model.folder
    if isinstance(model, bytes):
        return onnx.load_model_from_string(model), None
    return read_proto(model), Path(model).parent


def _opset_of(model: ModelSource) -> int:
    """Return the version of the standard operator set of a model; `OLDEST_OPSET` if it has none."""
    versions = [each.version for each in _message_of(model)[0].opset_import if each.domain in ("", STANDARD)]
    return min(versions, default=OLDEST_OPSET)


def _loadable(model: ModelSource) -> str | bytes:
    """Return the argument for the runtime: a path or bytes."""
    if isinstance(model, Serialized):
        return model.data
    return model if isinstance(model, bytes) else os.fspath(model)


def release_memory() -> None:
    """Return freed memory to the system. On Linux, the C library keeps it otherwise."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def describe(model: ModelSource) -> str:
    """Return the name of a model in messages: its path, or `NAMELESS` for bytes."""
    if isinstance(model, Serialized):
        return model.name
    return NAMELESS if isinstance(model, bytes) else os.fspath(model)


def run_session(session: InferenceSession, names: Sequence[str], feed: Feed, place: str) -> dict[str, Array]:
    """Run a session and return the named outputs.

    Args:
        session: The session.
        names: The outputs; without any, the session does not run.
        feed: The inputs.
        place: The beginning of an error message: ``"data.npz, sample 7"``. `NAMELESS` is left out.

    Raises:
        RequantError: The model fails; the message has the runtime's reason.
    """
    try:
        return dict(zip(names, session.run(list(names), feed), strict=True)) if names else {}
    except Exception as error:  # the runtime's exceptions have no common base class
        start = "" if place == NAMELESS else f"{place}: "
        raise RequantError(f"{start}the model fails: {runtime_message(error)}") from error


def runtime_message(error: Exception) -> str:
    """Return an exception of the runtime as one line, without its code and source positions."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_MESSAGE:  # names of a model are in it; the expressions below take quadratic time
        text = f"{text[: LONGEST_MESSAGE // 2]} ... {text[-LONGEST_MESSAGE // 2 :]}"
    text = re.sub(r"^.*\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)  # nested errors have several; keep the innermost
    text = re.sub(r"^Load model from .*? failed:", "", text)
    text = SOURCE.sub("", text)
    text = re.sub(r"\b\w+\.(?:cc|h):\d+ \w+ ", "", text)
    return text.strip() or type(error).__name__


def input_specs(session: InferenceSession) -> tuple[InputSpec, ...]:
    """Return the required inputs in the model's order.

    Initializers may be listed among the graph's inputs (before IR version 4, all are). They have a value already and
    are left out.

    Raises:
        RequantError: It is no session, an input is no tensor, or NumPy lacks its type.
    """
    _check_session(session)
    for value in session.get_inputs():
        if value.type not in DTYPES:
            advice = "float32" if value.type.startswith("tensor(") else "a tensor"
            raise RequantError(f"input {value.name!r} is {value.type}; arrays cannot be fed to it: export {advice}")
    return _specs(session.get_inputs())


def output_specs(session: InferenceSession) -> tuple[InputSpec, ...]:
    """Return the outputs that are tensors of a type that NumPy has, as inputs that they could be.

    Raises:
        RequantError: It is no session.
    """
    _check_session(session)
    return _specs([value for value in session.get_outputs() if value.type in DTYPES])


def _check_session(session: object) -> None:
    """Refuse what is no session."""
    from onnxruntime import InferenceSession

    check_kind(session, InferenceSession, "the model must be an InferenceSession, as open_session returns it")


def _specs(values: Sequence[NodeArg]) -> tuple[InputSpec, ...]:
    """Return name, type and shape of inputs or outputs."""
    shapes = [tuple(axis if isinstance(axis, (int, str)) else None for axis in value.shape) for value in values]
    return tuple(InputSpec(value.name, DTYPES[value.type], shape) for value, shape in zip(values, shapes, strict=True))


def required(inputs: Sequence[InputSpec]) -> list[InputSpec]:
    """Return the inputs that every sample must have."""
    return [spec for spec in inputs if not spec.optional]
