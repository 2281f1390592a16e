"""Fixtures and options for all tests."""

from __future__ import annotations

import gc
import math
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from requant.calibration.model import session as sessions
from requant.quantize import Latency
from requant.quantize.placement import measuring, tried_plans
from requant.quantize.runtime import clock, progress
from requant.quantize.runtime.isa import detect, resolve

Feeds = Sequence[Mapping[str, NDArray[Any]]]
Range = tuple[float, float]

# The first draw of a text in a new environment builds a table of all characters, which takes more than a second. The time
# of an example says nothing on a busy machine.
settings.register_profile("all", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.register_profile("quick", settings.get_profile("all"), max_examples=15)


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples in a run without slow tests; a test that needs more says so itself."""
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "all")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage in what is collected: it lives until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# A shell in the background ignores Ctrl-C, and nohup ignores SIGHUP. Commands that tests interrupt would inherit this.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the expected output in tests/transforms/cases/*.txt"
    )


@pytest.fixture(scope="session", autouse=True)
def _own_costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Store the costs that tests measure in a temporary folder, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REQUANT_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield


OLD = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")


@pytest.fixture(scope="session", autouse=True)
def _deprecations_in_children() -> Iterator[None]:
    """Let a deprecation be an error in child processes too: commands, and the workers of pools."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", ",".join(f"error::{name}" for name in OLD))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_stages() -> Iterator[None]:
    """Let no command in this process say where long work is: how long a test takes depends on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "GRACE", math.inf)
        patch.setattr(progress, "LONG", math.inf)
        yield


ROUNDS = 15  # of a measurement, at most
PROFILED_RUNS = 5  # of a profile, at most


@pytest.fixture(scope="session", autouse=True)
def _short_measurements() -> Iterator[None]:
    """Time models once, for a few rounds, and profile few runs.

    Other tests run at the same time, so that more rounds would not be surer.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "MOST_ROUNDS", ROUNDS)
        patch.setattr(clock, "AGAIN", 0)
        patch.setattr(measuring, "MOST_RUNS", PROFILED_RUNS)
        yield


BRIEF_MS = 0.5
SHIPPED_MS = tried_plans.LEAST_MS


@pytest.fixture(scope="session", autouse=True)
def _brief_models_by_rules() -> Iterator[None]:
    """Let rules place models of less than `BRIEF_MS`: they give the same plan each time, and measure nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tried_plans, "LEAST_MS", BRIEF_MS)
        yield


@pytest.fixture
def measured_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let brief models be placed by measured costs, as they are for users."""
    monkeypatch.setattr(tried_plans, "LEAST_MS", SHIPPED_MS)


@pytest.fixture(scope="session", autouse=True)
def _idle_threads_sleep() -> Iterator[None]:
    """Let threads of the runtime sleep while they wait: beside them run as many tests as there are cores."""
    made = ort.InferenceSession.__init__

    def sleeping(self: ort.InferenceSession, model: Any, sess_options: Any = None, *args: Any, **kwargs: Any) -> None:
        options = ort.SessionOptions() if sess_options is None else sess_options
        try:
            options.get_session_config_entry(SPINNING)
        except RuntimeError:  # nobody has chosen
            options.add_session_config_entry(SPINNING, "0")
        made(self, model, options, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort.InferenceSession, "__init__", sleeping)
        yield


SPINNING = "session.intra_op.allow_spinning"


class SetLatency(Protocol):
    """Set the latencies that are found instead of measured, on any machine."""

    def __call__(self, patch: pytest.MonkeyPatch, *, float_ms: float = 2.0, int8_ms: float = 1.0) -> None:
        """Let the float model take `float_ms` and the INT8 model `int8_ms`."""


@pytest.fixture(scope="session")
def set_latency() -> SetLatency:
    """Return `_set_latency`."""
    return _set_latency


def _set_latency(patch: pytest.MonkeyPatch, *, float_ms: float = 2.0, int8_ms: float = 1.0) -> None:
    latency = Latency(float_ms, int8_ms, float_ms, int8_ms, runs=5)
    patch.setattr("requant.quantize.steps.judge.time_models", lambda *_, **__: latency)


@pytest.fixture
def int8_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every INT8 model be twice as fast: a test is about what follows and not about this machine."""
    _set_latency(monkeypatch)


@pytest.fixture
def vnni() -> Iterator[None]:
    """Let a test run as on a CPU with VNNI."""
    with _vnni():
        yield


@pytest.fixture(scope="module")
def vnni_module() -> Iterator[None]:
    """Let all tests of a module run as on a CPU with VNNI."""
    with _vnni():
        yield


@contextmanager
def _vnni() -> Iterator[None]:
    """Let the sessions of the package add products of 8 bits exactly on every CPU, as with VNNI.

    On a CPU without VNNI the runtime then converts int8 weights to uint8 when it optimises a graph; on other CPUs the
    option changes nothing. The detected instruction set is ``vnni``.
    """
    options_of = sessions._session_options

    def exact(*args: Any, **kwargs: Any) -> ort.SessionOptions:
        options = options_of(*args, **kwargs)
        options.add_session_config_entry("session.x64quantprecision", "1")
        return options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "_session_options", exact)
        detect.cache_clear()
        yield
    detect.cache_clear()


@pytest.fixture(scope="session")
def allowed_error() -> Callable[..., dict[str, float]]:
    """Return `_allowed_error`."""
    return _allowed_error


DRAWS = 4  # the number of noise samples for each feed
PARAMETERS = {"Clip", "Dropout", "Pad", "Resize"}  # only their first input is an activation


def _allowed_error(model: onnx.ModelProto, feeds: Feeds, *, isa: str = "auto") -> dict[str, float]:
    """Return the allowed squared error of each float output, summed over `feeds`, if every tensor has 8 bits.

    Rounding errors are uniform over a step and independent, if tensors have many values. So the float model runs with
    uniform noise of one step on every tensor. A tensor that is never negative stays so, like an unsigned integer. A
    step of an activation is 1/255 of its range over the feeds, including zero. A step of a constant is 1/127 of its
    largest magnitude, or 1/63 if the CPU adds products in 16 bits.

    The sum of many such errors has a normal distribution. The root mean square of n independent errors exceeds its
    expected value by a factor of 1 + 3 / sqrt(2 n) once in a thousand times. The values of one output share earlier
    noise, so fewer errors are independent: the allowed factor is 1.2 + 3 / sqrt(n), with n the size of the output over
    all feeds.
    """
    expected = _expected_error(model, feeds, 127 if resolve(isa).exact else 63)
    return {name: error * (1.2 + 3 / size**0.5) ** 2 for name, (error, size) in expected.items()}


def _expected_error(model: onnx.ModelProto, feeds: Feeds, parts: int) -> dict[str, tuple[float, int]]:
    """Return the expected squared error and the size of each output, over all feeds."""
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    seen = [{**feed, **values} for feed, values in zip(feeds, _values(model, feeds), strict=True)]
    scalars = {name for node in model.graph.node for name in node.output if not np.ndim(seen[0].get(name, 0))}
    skipped = {name for node in model.graph.node if node.op_type in PARAMETERS for name in node.input[1:]} | scalars
    ranges = {n: _range([values[n] for values in seen]) for n in seen[0] if n not in skipped and _is_float(seen[0][n])}
    magnitudes = {n: float(np.abs(w).max()) for n, w in weights.items() if n not in skipped and _is_float(w) and w.ndim}
    steps = {n: (high - low) / 255 for n, (low, high) in ranges.items()} | {n: m / parts for n, m in magnitudes.items()}
    names = [output.name for output in model.graph.output if output.name in steps]
    session = _session(_noisy(model, steps, ranges), [f"{name}//rounded" for name in names])
    random, errors = np.random.default_rng(0), dict.fromkeys(names, 0.0)
    for feed, exact in [*zip(feeds, seen, strict=True)] * DRAWS:
        arrays = {**exact, **weights}
        noise = {f"{n}//noise": step * (random.random(arrays[n].shape) - 0.5) for n, step in steps.items()}
        given = {name: np.asarray(array, np.float32) for name, array in noise.items()}
        for name, value in zip(names, session.run(None, {**feed, **given}), strict=True):
            errors[name] += float(np.sum((value.astype(np.float64) - exact[name]) ** 2)) / DRAWS
    return {name: (errors[name], sum(np.size(exact[name]) for exact in seen)) for name in names}


def _noisy(model: onnx.ModelProto, steps: Mapping[str, float], ranges: Mapping[str, Range]) -> onnx.ModelProto:
    """Return `model` with an input ``t//noise`` for each tensor t in `steps`; readers of t read ``t//rounded``."""
    shapes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    for name in steps:
        shape = shapes.get(name)
        made.graph.input.append(helper.make_tensor_value_info(f"{name}//noise", TensorProto.FLOAT, shape))
        low, high = ranges.get(name, (-1.0, 1.0))
        low, high = (-1.0, 1.0) if low == high else (low, high)  # values that cancel in float may not cancel in int8
        for end, bound in (("low", -np.inf if low else 0.0), ("high", np.inf if high else 0.0)):
            made.graph.initializer.append(numpy_helper.from_array(np.asarray(bound, np.float32), f"{name}//{end}"))

    def rounded(names: Iterable[str]) -> None:
        for name in names:
            if name in steps:
                noisy = helper.make_node("Add", [name, f"{name}//noise"], [f"{name}//noisy"])
                bounds = [f"{name}//low", f"{name}//high"]
                clipped = helper.make_node("Clip", [f"{name}//noisy", *bounds], [f"{name}//rounded"])
                made.graph.node.extend([noisy, clipped])

    rounded(dict.fromkeys(value.name for value in (*model.graph.input, *model.graph.initializer)))
    for node in model.graph.node:
        copy = made.graph.node.add()
        copy.CopyFrom(node)
        _read_rounded(copy, steps)
        rounded(node.output)
    return made


def _read_rounded(node: onnx.NodeProto, steps: Mapping[str, float]) -> None:
    """Make a node and its bodies read the noisy copies."""
    node.input[:] = [f"{name}//rounded" if name in steps else name for name in node.input]
    for body in (attribute.g for attribute in node.attribute if attribute.HasField("g")):
        for inner in body.node:
            _read_rounded(inner, steps)


def _values(model: onnx.ModelProto, feeds: Feeds) -> list[dict[str, NDArray[Any]]]:
    """Return the results of all nodes on each feed, by name."""
    names = [name for node in model.graph.node for name in node.output if name]
    session = _session(model, names)
    return [dict(zip(names, session.run(None, dict(feed)), strict=True)) for feed in feeds]


def _session(model: onnx.ModelProto, outputs: Sequence[str]) -> ort.InferenceSession:
    """Open a model with other outputs, without the optimizations of the runtime."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _is_float(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float32


def _range(arrays: Sequence[NDArray[Any]]) -> Range:
    """Return the range of the finite values, including zero."""
    values = np.concatenate([array[np.isfinite(array)].ravel() for array in arrays])
    return min(0.0, float(values.min(initial=0.0))), max(0.0, float(values.max(initial=0.0)))
