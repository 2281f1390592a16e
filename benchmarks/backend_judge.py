"""Quantize one model of the backend suite, and judge the result."""

from __future__ import annotations

import json
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
from click.testing import CliRunner

from benchmarks.backend_cases import DYNAMIC, Feed, Task
from benchmarks.error_bounds import bounds, run_all
from benchmarks.error_rules import BY_RUNTIME, FROM_FLOAT, Kind, open_model
from benchmarks.measurements import checker_error, one_line
from requant import RequantError
from requant.calibration.model.session import Array
from requant.cli import main
from requant.quantize import Options, Selection, Strategy, quantize_model
from requant.quantize.accuracy.sqnr import decibels, powers

Outputs: TypeAlias = list[dict[str, Any]]

SECONDS = 0.005  # the time for timing; the outcomes do not depend on it
LEAST_DB = 20.0  # the lowest SQNR of int8 against float without a bound
AGREE_DB = 30.0  # the lowest SQNR of the runtime against itself without a bound
LARGEST = 2**20  # bytes; no bounds for a larger model, because bounds are useless after dozens of layers

INT8, FLOAT, REFUSED, FAILED = RESULTS = ("int8", "float", "refused", "failed")
CANNOT_RUN = "the runtime cannot run the float model"
CANNOT_FETCH = "NumPy has no type for the outputs"
UNSETTLED = "the float model is not deterministic"
NO_DTYPE = ("No corresponding Numpy type", "Numpy_type")
"""The errors of the runtime if it ran the model but cannot return a result."""
REASONS = {
    CANNOT_RUN: r"the runtime cannot load the model|the runtime rejects the graph|no CPU kernel|the model fails",
    "an input cannot be fed from arrays": r"input '.*' is a .*; arrays cannot be fed to it",
    "a sample is empty": r"got an empty array",
    "the model computes NaN or infinity": r"holds NaN or infinity",
}
"""The valid reasons of a refusal, and a pattern for their messages. The first reason is valid only if it is true."""
BOUNDED, DECIBELS = "within the bound", f"at least {LEAST_DB:.0f} dB"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a task.

    Attributes:
        name: The name of the case.
        form: The form of the model.
        operator: The tested operator.
        result: One of `RESULTS`.
        detail: How the outputs were compared, or the reason of a refusal or failure.
        message: The message of a refusal or failure.
        tightness: The largest ratio of an error to its bound; None without a bound.
        seconds: The duration.
    """

    name: str
    form: str
    operator: str
    result: str
    detail: str
    message: str = ""
    tightness: float | None = None
    seconds: float = 0.0


@dataclass
class Verdict:
    """The judgement of a result. For the attributes see `Outcome`."""

    result: str
    detail: str
    message: str = ""
    tightness: float | None = None


@dataclass(frozen=True)
class Answer:
    """The result of quantizing.

    Attributes:
        int8: Whether an operator became int8.
        refusal: The message of a refusal; else empty.
        crash: The message of a crash; else empty.
    """

    int8: bool = False
    refusal: str = ""
    crash: str = ""


def carry_out(task: Task) -> Outcome:
    """Quantize the model of a task and judge the result."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(task.model)
        try:
            found = judge(task, source, output)
        except Exception as error:  # noqa: BLE001 - an error of this program is also counted in the table
            found = Verdict(FAILED, "error in this program", last_line(error))
    seconds = round(time.perf_counter() - start, 3)
    return Outcome(
        task.name, task.form, task.operator, found.result, found.detail, found.message, found.tightness, seconds
    )


def last_line(error: BaseException) -> str:
    """Return the text of an exception with the last source line of this project in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    place = f"{Path(inside[-1].filename).name}:{inside[-1].lineno}" if inside else "?"
    return f"{type(error).__name__} at {place}: {one_line(error)}"


def judge(task: Task, source: Path, output: Path) -> Verdict:
    """Quantize `source` to `output`, and judge the result."""
    expected = run_float(task)
    answer = (_by_command if task.cli else _by_function)(task, source, output)
    if answer.crash:
        return Verdict(FAILED, "traceback", answer.crash)
    if answer.refusal:
        reason = reason_of(answer.refusal, expected)
        if output.exists():
            return Verdict(FAILED, "refused, but wrote an output", answer.refusal)
        return Verdict(REFUSED if reason else FAILED, reason or "no valid reason", answer.refusal)
    invalid = _invalid(source, output)
    return Verdict(FAILED, "invalid model", invalid) if invalid else compare(task, output, expected, int8=answer.int8)


def reason_of(message: str, expected: Outputs | str) -> str:
    """Return the reason of a refusal, a key of `REASONS`; empty if it is not valid."""
    reason = next((reason for reason, pattern in REASONS.items() if re.search(pattern, message)), "")
    untrue = reason == CANNOT_RUN and not isinstance(expected, str)
    return "" if "\n" in message or untrue else reason


def _by_function(task: Task, source: Path, output: Path) -> Answer:
    """Quantize with `quantize_model`."""
    selection = Selection(strategy=Strategy.DYNAMIC if task.form == DYNAMIC else Strategy.AUTO)
    options = Options(force_int8=True, seconds=SECONDS, selection=selection)
    try:
        result = quantize_model(source, None if task.form == DYNAMIC else task.feeds, output, options)
    except RequantError as error:
        return Answer(refusal=str(error))
    except Exception as error:  # noqa: BLE001 - an unexpected exception is counted as a failure
        return Answer(crash=last_line(error))
    return Answer(int8=bool(result.forms))


def _by_command(task: Task, source: Path, output: Path) -> Answer:
    """Quantize with the command line. A refusal is exit code 2 and one line on stderr."""
    arguments = ["quantize", str(source), "-o", str(output), "--force-int8", "--json"]
    if task.form == DYNAMIC:
        arguments.append("--dynamic")
    else:
        data = source.with_name("data.npz")
        names = [name for name, value in task.feeds[0].items() if isinstance(value, np.ndarray)]
        np.savez(data, allow_pickle=False, **{name: np.stack([feed[name] for feed in task.feeds]) for name in names})
        arguments += ["--data", str(data)]
    done = CliRunner().invoke(main, arguments)
    if done.exit_code == 2 and isinstance(done.exception, SystemExit):
        if done.stdout or not re.fullmatch(r"requant: [^\n]+\n", done.stderr):
            return Answer(crash=f"exit code 2, but not one line on stderr: {done.stderr!r}")
        return Answer(refusal=done.stderr.removeprefix("requant: ").strip())
    if done.exit_code:
        return Answer(crash=f"exit code {done.exit_code}" if done.exception is None else last_line(done.exception))
    return Answer(int8=bool(json.loads(done.stdout)["forms"]))


def run_float(task: Task, *, optimize: bool = True) -> Outputs | str:
    """Return the outputs of the float model, or the error of the runtime."""
    try:
        session = open_model(task.model, optimize=optimize)
        return [run(session, feed) for feed in task.feeds]
    except Exception as error:  # noqa: BLE001 - exceptions of the runtime have no common base class
        return one_line(error) or type(error).__name__


def run(session: ort.InferenceSession, feed: Feed) -> dict[str, Any]:
    """Run a session. Inputs may have types that NumPy does not have."""
    names = [output.name for output in session.get_outputs()]
    given = {name: value for name, value in feed.items() if value is not None}
    if all(not isinstance(value, np.ndarray) or value.dtype.kind in "biufU" for value in given.values()):
        return dict(zip(names, session.run(names, given), strict=True))
    values = {
        name: ort.OrtValue.ortvalue_from_numpy(value)
        if value.dtype.kind in "biufU"
        else ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value, onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
        for name, value in given.items()
    }
    return dict(zip(names, (value.numpy() for value in session.run_with_ort_values(names, values)), strict=True))


def _invalid(source: Path, output: Path) -> str:
    """Return what is wrong with the written model but not with its source; empty if nothing is wrong."""
    problem = checker_error(output)
    if problem and not checker_error(source):
        return f"checker: {problem}"
    try:
        sessions = [open_model(output, optimize=optimize) for optimize in (True, False)]
    except Exception as error:  # noqa: BLE001 - exceptions of the runtime have no common base class
        return f"does not load: {one_line(error)}"
    try:
        before = open_model(source, optimize=True)
    except Exception:  # noqa: BLE001 - the same; without the float model there is nothing to compare
        return ""
    for ends in ("get_inputs", "get_outputs"):
        old, *new = ([(e.name, e.type, e.shape) for e in getattr(s, ends)()] for s in (before, *sessions))
        if any(each != old for each in new):
            return f"{ends}: {old} became {new[0]}"
    return ""


def compare(task: Task, output: Path, expected: Outputs | str, *, int8: bool) -> Verdict:
    """Compare the outputs of the written model with the float outputs, and with its outputs without optimizations."""
    result = INT8 if int8 else FLOAT
    if isinstance(expected, str):
        return Verdict(result, CANNOT_FETCH if expected.startswith(NO_DTYPE) else CANNOT_RUN, expected)
    if not _settled(task, expected):
        return Verdict(result, UNSETTLED)
    try:
        sessions = [open_model(output, optimize=optimize) for optimize in (True, False)]
        fused, plain = ([run(session, feed) for feed in task.feeds] for session in sessions)
    except Exception as error:  # noqa: BLE001 - exceptions of the runtime have no common base class
        return Verdict(FAILED, "does not run", one_line(error))
    if not int8 and all_equal(expected, fused):
        return Verdict(FLOAT, "equal")
    found = Comparison()
    bounds_of = look_into(task, output)
    for kind, exact, other, least in ((FROM_FLOAT, expected, plain, LEAST_DB), (BY_RUNTIME, plain, fused, AGREE_DB)):
        allowed = bounds_of(kind)
        for name in exact[0]:
            triples = [(a[name], b[name], bound.get(name)) for a, b, bound in zip(exact, other, allowed, strict=True)]
            found.add(triples, least, name)
    if found.wrong:
        return Verdict(FAILED, f"{result} differs", "; ".join(found.wrong), found.tightness)
    detail = BOUNDED if found.bounded else DECIBELS
    return Verdict(result, detail if int8 else "equal but for rounding", "", found.tightness)


def _settled(task: Task, expected: Outputs) -> bool:
    """Whether a new session gives the same float outputs, and a session without optimizations nearly the same.

    Operators that draw random numbers or depend on the order of equal values do not.
    """
    again, plain = run_float(task), run_float(task, optimize=False)
    if isinstance(again, str) or isinstance(plain, str) or not all_equal(expected, again):
        return False
    pairs = [(a[name], b[name]) for a, b in zip(expected, plain, strict=True) for name in a]
    floats = [(a, b) for a, b in pairs if isinstance(a, np.ndarray) and a.dtype.kind == "f"]
    with np.errstate(invalid="ignore"):
        return all(decibels(*powers(a, b)) >= AGREE_DB for a, b in floats)


def look_into(task: Task, output: Path) -> Callable[[Kind], list[Mapping[str, Array]]]:
    """Return a function that returns the bounds for each feed; empty bounds if the tensors cannot be fetched."""
    nothing: list[Mapping[str, Array]] = [{} for _ in task.feeds]
    if output.stat().st_size > LARGEST:
        return lambda kind: nothing
    model, original = onnx.load(output), onnx.load_model_from_string(task.model)
    theirs = {tensor.name for tensor in original.graph.initializer}
    theirs |= {name for node in original.graph.node for name in (node.name, *node.output)}
    try:
        runs = [run_all(model, feed) for feed in task.feeds]
    except Exception:  # noqa: BLE001 - exceptions of the runtime have no common base class; some types have no array
        return lambda kind: nothing
    return lambda kind: [bounds(model, values, lambda name: name not in theirs, kind) for values in runs]


def all_equal(a: Any, b: Any) -> bool:
    """Whether outputs are equal; NaN equals NaN."""
    if isinstance(a, (list, tuple)):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(all_equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(all_equal(a[key], b[key]) for key in a)
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return bool(a == b)
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


@dataclass
class Comparison:
    """The result of comparing outputs.

    Attributes:
        wrong: The errors that are too large, as text.
        bounded: Whether every float output had a bound.
        tightness: The largest ratio of an error to its bound.
    """

    wrong: list[str] = field(default_factory=list)
    bounded: bool = True
    tightness: float | None = None

    def add(self, triples: Sequence[tuple[Any, Any, Array | None]], least: float, name: str) -> None:
        """Compare one output for all feeds: by its bounds, by its SQNR, or for equality.

        Args:
            triples: For each feed the expected array, the actual array, and the bound or None.
            least: The lowest SQNR without a bound, in dB.
            name: The name of the output.
        """
        signal = noise = 0.0
        unsure = False
        for before, after, bound in triples:
            if not isinstance(before, np.ndarray) or before.dtype.kind != "f":
                if not all_equal(before, after) and not _may_differ(before, after, bound):
                    self.wrong.append(f"{name}: not the same")
                continue
            if before.shape != after.shape or before.dtype != after.dtype:
                self.wrong.append(f"{name}: {before.dtype} {before.shape} became {after.dtype} {after.shape}")
                return
            if bound is None or not np.isfinite(bound).all():
                unsure = True
            elif not self._within(before, after, bound, name):
                return
            with np.errstate(invalid="ignore"):
                more = powers(before, after)
            signal, noise = signal + more[0], noise + more[1]
        if unsure:
            self.bounded = False
            if not decibels(signal, noise) >= least:
                self.wrong.append(f"{name}: {decibels(signal, noise):.1f} dB")

    def _within(self, before: Array, after: Array, bound: Array, name: str) -> bool:
        """Whether the error of an output is within its bound."""
        with np.errstate(invalid="ignore", over="ignore"):
            same = (before == after) | (np.isnan(before) & np.isnan(after))
            error = np.where(same, 0.0, np.abs(after.astype(np.float64) - before))
        share = np.where(same, 0.0, error / np.maximum(bound, np.finfo(np.float64).tiny))
        worst = np.unravel_index(int(share.argmax()), share.shape) if share.size else None
        if worst is None:
            return True
        self.tightness = max(self.tightness or 0.0, round(float(share[worst]), 4))
        if error[worst] <= bound[worst]:
            return True
        self.wrong.append(f"{name}: error {error[worst]:.3g} at {before[worst]:.4g}, bound {bound[worst]:.3g}")
        return False


def _may_differ(before: Any, after: Any, bound: Array | None) -> bool:
    """Whether an output that is not float may differ, because it depends on values with an error."""
    if bound is None or not bound.any():
        return False
    if not np.isfinite(bound).all() or before.dtype.kind not in "iu" or before.shape != after.shape:
        return True
    return bool((np.abs(before.astype(np.float64) - after) <= bound).all())


def label(outcome: Outcome) -> str:
    """Return the label of the table row that counts an outcome."""
    return f"{outcome.result}: {outcome.detail}"


def in_order(labels: Sequence[str]) -> list[str]:
    """Sort the labels of the table rows."""
    return sorted(labels, key=lambda text: (RESULTS.index(text.split(":")[0]), text))
