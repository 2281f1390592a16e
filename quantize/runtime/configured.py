"""Sessions with non-default options: open them, time them, print them as Python code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from onnxruntime import InferenceSession, SessionOptions

from ... import RequantError
from ...calibration.model.session import LOAD_HINTS, Array, runtime_message, start_session
from ...system.printable import quoted
from .session import Runner

Value: TypeAlias = int | bool | str


Values: TypeAlias = Mapping[str, Value]


ENUMERATIONS: Mapping[tuple[str, Value], str] = {
    ("graph_optimization_level", "off"): "GraphOptimizationLevel.ORT_DISABLE_ALL",
    ("graph_optimization_level", "basic"): "GraphOptimizationLevel.ORT_ENABLE_BASIC",
    ("graph_optimization_level", "extended"): "GraphOptimizationLevel.ORT_ENABLE_EXTENDED",
    ("graph_optimization_level", "all"): "GraphOptimizationLevel.ORT_ENABLE_ALL",
    ("execution_mode", "sequential"): "ExecutionMode.ORT_SEQUENTIAL",
    ("execution_mode", "parallel"): "ExecutionMode.ORT_PARALLEL",
}
"""The runtime's names of the values that are words here."""


LIBRARY = "custom_ops_library"
"""The setting that is the path of a library of operators."""

GAIN = 1.02  # a value replaces the default if runs are at least this many times as fast


@dataclass(frozen=True, slots=True)
class Configured:
    """A model and how it is loaded.

    Attributes:
        path: Its file.
        values: The session options.
    """

    path: str | os.PathLike[str]
    values: Values

    def opened(self) -> InferenceSession:
        """Load the model; see `open_configured`."""
        return open_configured(self.path, self.values)

    def run(self, feed: Mapping[str, Array]) -> Callable[[], object]:
        """Load the model, run it once, and return a function that runs it again; see `configured_run`."""
        return configured_run(self.path, self.values, feed)


def threads_of(values: Values) -> int:
    """Return the number of threads inside one operator; 0 is the runtime's choice."""
    return int(values.get("intra_op_num_threads", 0))


def configured_run(model: str | os.PathLike[str], values: Values, feed: Mapping[str, Array]) -> Callable[[], object]:
    """Load a model with these settings, run it once, and return a function that runs it again.

    Raises:
        RequantError: The runtime cannot load the model, or refuses the feed.
    """
    run = partial(configured_runner(model, values), feed)
    run()
    return run


def configured_runner(model: str | os.PathLike[str], values: Values) -> Runner:
    """Load a model with these settings.

    Raises:
        RequantError: The runtime cannot load it.
    """
    return Runner.over(open_configured(model, values), os.fspath(model))


def open_configured(model: str | os.PathLike[str], values: Values) -> InferenceSession:
    """Load a model with these settings; other options keep the runtime's defaults.

    Raises:
        RequantError: The runtime cannot load it.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # failures raise exceptions; do not print them as well
    for option, value in values.items():
        set_option(options, option, value)
    return create_session(os.fspath(model), options, os.fspath(model))


def create_session(model: str | bytes, options: SessionOptions, name: str) -> InferenceSession:
    """Load a model with the runtime's own options.

    Args:
        model: The path of a model, or the bytes of one.
        options: The options.
        name: The model in messages.

    Raises:
        RequantError: The runtime cannot load it.
    """
    try:
        return start_session(model, options)
    except Exception as error:  # the runtime's exceptions share no base class of their own
        hint = LOAD_HINTS.get(type(error).__name__, "the runtime cannot load the model")
        raise RequantError(f"{name}: {hint}: {runtime_message(error)}") from error


def set_option(options: SessionOptions, option: str, value: Value) -> None:
    """Set an attribute of the options, a configuration entry if the name has a dot, or a library of operators."""
    import onnxruntime as ort

    if option == LIBRARY:
        options.register_custom_ops_library(str(value))
        return
    if "." in option:
        options.add_session_config_entry(option, str(value))
        return
    kind, _, member = ENUMERATIONS.get((option, value), "").partition(".")
    setattr(options, option, getattr(getattr(ort, kind), member) if kind else value)


def snippet(model: str, values: Values) -> str:
    """Return a Python program that loads a model with these settings.

    >>> print(snippet("m.onnx", {"intra_op_num_threads": 1, "session.intra_op.allow_spinning": "0"}))
    import onnxruntime as ort
    <BLANKLINE>
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession("m.onnx", options, providers=["CPUExecutionProvider"])
    """
    lines = ["import onnxruntime as ort", "", "options = ort.SessionOptions()"]
    for option, value in values.items():
        name = ENUMERATIONS.get((option, value))
        if option == LIBRARY:
            lines.append(f"options.register_custom_ops_library({quoted(str(value))})")
        elif "." in option:
            lines.append(f'options.add_session_config_entry("{option}", "{value}")')
        else:
            lines.append(f"options.{option} = {value if name is None else f'ort.{name}'}")
    path = quoted(model)
    lines.append(f'session = ort.InferenceSession({path}, options, providers=["CPUExecutionProvider"])')
    return "\n".join(lines)
