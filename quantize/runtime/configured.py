"""Sessions with non-default options: open them, time them, print them as Python code."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from onnxruntime import InferenceSession, SessionOptions

from ... import RequantError
from ...calibration.session import LOAD_HINTS, PROVIDERS, Array, runtime_message

Value: TypeAlias = int | bool | str


Values: TypeAlias = Mapping[str, Value]


Block: TypeAlias = Callable[[int], Sequence[float]]
"""Runs a session a number of times and returns the seconds of each run."""


ENUMERATIONS: Mapping[tuple[str, Value], str] = {
    ("graph_optimization_level", "off"): "GraphOptimizationLevel.ORT_DISABLE_ALL",
    ("graph_optimization_level", "basic"): "GraphOptimizationLevel.ORT_ENABLE_BASIC",
    ("graph_optimization_level", "extended"): "GraphOptimizationLevel.ORT_ENABLE_EXTENDED",
    ("graph_optimization_level", "all"): "GraphOptimizationLevel.ORT_ENABLE_ALL",
    ("execution_mode", "sequential"): "ExecutionMode.ORT_SEQUENTIAL",
    ("execution_mode", "parallel"): "ExecutionMode.ORT_PARALLEL",
}
"""The runtime's names of the values that are words here."""


GAIN = 1.02  # a value replaces the default if runs are at least this many times as fast


def session_block(model: str | os.PathLike[str], values: Values, feed: Mapping[str, Array]) -> Block:
    """Load a model with these settings and return a function that times its runs.

    Raises:
        RequantError: The runtime cannot load the model, or refuses the feed.
    """
    session = open_configured(model, values)
    try:
        session.run(None, dict(feed))
    except Exception as error:  # the runtime's exceptions share no base class of their own
        raise RequantError(f"{os.fspath(model)}: the model fails: {runtime_message(error)}") from error
    return partial(timed_runs, session, dict(feed))


def timed_runs(session: InferenceSession, feed: dict[str, Array], count: int) -> list[float]:
    """Run a session `count` times and return the seconds of each run."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        session.run(None, feed)
        times.append(time.perf_counter() - start)
    return times


def open_configured(model: str | os.PathLike[str], values: Values) -> InferenceSession:
    """Load a model with these settings; other options keep the runtime's defaults.

    Raises:
        RequantError: The runtime cannot load it.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4  # failures raise exceptions; do not print them as well
    for option, value in values.items():
        _set(options, option, value)
    try:
        return ort.InferenceSession(os.fspath(model), options, providers=PROVIDERS, enable_fallback=0)
    except Exception as error:  # the runtime's exceptions share no base class of their own
        hint = LOAD_HINTS.get(type(error).__name__, "the runtime cannot load the model")
        raise RequantError(f"{os.fspath(model)}: {hint}: {runtime_message(error)}") from error


def _set(options: SessionOptions, option: str, value: Value) -> None:
    """Set an attribute of the options, or a configuration entry if the name has a dot."""
    import onnxruntime as ort

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
        if "." in option:
            lines.append(f'options.add_session_config_entry("{option}", "{value}")')
        else:
            lines.append(f"options.{option} = {value if name is None else f'ort.{name}'}")
    path = json.dumps(model, ensure_ascii=False)
    lines.append(f'session = ort.InferenceSession({path}, options, providers=["CPUExecutionProvider"])')
    return "\n".join(lines)
