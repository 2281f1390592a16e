"""OpenVINO on the CPU as a runtime: load models, run them, and profile them."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy as np

from ... import RequantError
from ...calibration.model.session import Array, ModelSource, describe
from ...system.printable import one_line
from .as_file import as_file
from .clock import clock_of
from .machine import Machine
from .openvino_kernels import fastest_of, kernels_of, measured_totals
from .profile import Profile
from .runtimes import DEFAULT, Identity, LoadedModel, Runtime

MISSING = "the runtime openvino is not installed: pip install 'requant[openvino]'"
SHAPES = 8
"""A model is compiled for each of so many sets of shapes of its inputs, and once more for all others."""
WINDOWS, LEAST_RUNS = 3, 3  # how often a model is compiled for a profile, and the runs of each
NOISE = re.compile(r"Exception from \S+:\d+:|Check '.*?' failed at \S+?:\d+:|FrontEnd API failed with \w+:")
"""What OpenVINO says of its own source in an error."""


class OpenVino(Runtime):
    """OpenVINO's CPU plug-in.

    Attributes:
        precision: In which type it computes float operators: ``f32``, or its ``default``, which is bfloat16 where the
            CPU has instructions for it.
    """

    fuses = True

    def __init__(self, precision: str = DEFAULT) -> None:
        """Find OpenVINO.

        Raises:
            RequantError: It is not installed.
        """
        if find_spec("openvino") is None:
            raise RequantError(MISSING)
        self.precision = precision

    @cached_property
    def identity(self) -> Identity:
        """Its name and version, and the type of float operators."""
        found = self.precision
        if found == DEFAULT:
            found = _core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
        return Identity("OpenVINO", _openvino().__version__.partition("-")[0], found)

    def open(self, model: ModelSource, *, threads: int = 0, lean: bool = False) -> LoadedModel:
        """Load a model; see `Runtime.open`."""
        return OpenVinoModel(model, self._settings(threads))

    def profile(self, model: ModelSource, feed: Mapping[str, Array], *, threads: int, times: int) -> Profile:
        """Run a model and read its counters; see `Runtime.profile`.

        They are whole microseconds, means over all runs of a compiled model. So the model is compiled `WINDOWS` times,
        and each kernel counts with its least mean; the first run of each is left out. With one thread the times become
        shorter in proportion: all together take at most the CPU time of the fastest run.
        """
        windows = [self._window(model, feed, threads, max(times // WINDOWS, LEAST_RUNS)) for _ in range(WINDOWS)]
        kernels = fastest_of([each.runs for each in windows])
        wall, alone = min(each.microseconds for each in windows), [each.cpu for each in windows if each.cpu is not None]
        if not alone:
            return Profile(kernels, wall)
        cpu = min(alone)
        share = min(cpu / max(math.fsum(run.microseconds for run in kernels), cpu), 1.0)
        return Profile(tuple(replace(run, microseconds=share * run.microseconds) for run in kernels), wall, cpu)

    def _window(self, model: ModelSource, feed: Mapping[str, Array], threads: int, times: int) -> Profile:
        """Compile a model, run it some times, and return what its counters say."""
        loaded = OpenVinoModel(model, {**self._settings(threads), "PERF_COUNT": True})
        loaded(feed)
        before, spent = measured_totals(loaded.executed(feed), 1), []
        for _ in range(times):
            start = time.thread_time(), time.perf_counter()
            loaded(feed)
            spent.append((time.thread_time() - start[0], time.perf_counter() - start[1]))
        graph = loaded.executed(feed)
        after = measured_totals(graph, times + 1)
        took = {name: max(total - before.get(name, 0.0), 0.0) / times for name, total in after.items()}
        cpu, wall = (1e6 * min(each) for each in zip(*spent, strict=True))
        return Profile(kernels_of(graph, took), wall, cpu if clock_of(threads) == "cpu" else None)

    def machine(self, threads: int) -> Machine:
        """Return this machine with this runtime; see `Runtime.machine`."""
        return Machine.here(threads, str(self.identity))

    def _settings(self, threads: int) -> dict[str, Any]:
        """Return the properties of a compiled model."""
        given: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
        if threads:
            given["INFERENCE_NUM_THREADS"] = threads
        return given if self.precision == DEFAULT else {**given, "INFERENCE_PRECISION_HINT": self.precision}


class _Compiled:
    """A compiled model. A request serves one thread at a time, so each concurrent run has its own."""

    def __init__(self, model: Any, settings: Mapping[str, Any]) -> None:
        self.compiled = _core().compile_model(model, "CPU", settings)
        self._idle: list[Any] = []

    def run(self, given: Mapping[str, Array]) -> Any:
        """Run a feed."""
        try:
            request = self._idle.pop()
        except IndexError:
            request = self.compiled.create_infer_request()
        found = request.infer(given, share_inputs=True)
        self._idle.append(request)
        return found


class OpenVinoModel:
    """A model in OpenVINO. It is compiled for the shapes of each feed, because free axes cost time.

    Several threads may run it at the same time.
    """

    def __init__(self, model: ModelSource, settings: Mapping[str, Any]) -> None:
        """Read a model.

        Args:
            model: The model.
            settings: The properties with which it is compiled.

        Raises:
            RequantError: OpenVINO cannot read it.
        """
        self._name, self._settings = describe(model), dict(settings)
        try:
            with as_file(model) as path:
                self._model = _core().read_model(path)
        except RuntimeError as error:
            raise RequantError(f"{self._name}: OpenVINO cannot load the model: {_reason(error)}") from error
        self.outputs = tuple(output.get_any_name() for output in self._model.outputs)
        self._inputs = {name: each.get_any_name() for each in self._model.inputs for name in each.get_names()}
        self._compiled: dict[tuple[tuple[int, ...], ...], _Compiled] = {}
        self._lock = Lock()

    def __call__(self, feed: Mapping[str, Array]) -> dict[str, Any]:
        """Run one feed.

        Raises:
            RequantError: OpenVINO refuses the feed or the model.
        """
        try:
            given = self._given(feed)
            found = self._compiled_for(given).run(given)
        except (RuntimeError, TypeError, ValueError) as error:
            raise RequantError(f"{self._name}: OpenVINO cannot run the model: {_reason(error)}") from error
        return {name: np.asarray(found[index]) for index, name in enumerate(self.outputs)}

    def executed(self, feed: Mapping[str, Array]) -> Any:
        """Return the graph that OpenVINO executed for a feed, an ``openvino.Model``."""
        return self._compiled_for(self._given(feed)).compiled.get_runtime_model()

    def _given(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Return a feed by OpenVINO's names of the inputs.

        Raises:
            ValueError: An input is missing: OpenVINO would compute with what was there before.
        """
        missing = next(
            (name for name, known in self._inputs.items() if known not in {*map(self._inputs.get, feed)}), ""
        )
        if missing:
            raise ValueError(f"input {missing!r} is missing")
        return {self._inputs[name]: array for name, array in feed.items() if name in self._inputs}

    def _compiled_for(self, given: Mapping[str, Array]) -> _Compiled:
        """Return the compiled model for the shapes of a feed."""
        shapes = tuple(np.shape(given[name]) for name in sorted(given))
        with self._lock:
            known = self._compiled.get(shapes)
            if known is None and len(self._compiled) >= SHAPES:
                shapes = ()
                known = self._compiled.get(shapes)
            if known is None:
                known = self._compiled[shapes] = _Compiled(
                    self._fitted(given) if shapes else self._model, self._settings
                )
        return known

    def _fitted(self, given: Mapping[str, Array]) -> Any:
        """Return the model with the shapes of a feed."""
        if not self._model.is_dynamic():
            return self._model
        model = self._model.clone()
        model.reshape({name: list(np.shape(array)) for name, array in given.items()})
        return model


def _openvino() -> Any:
    """Return the package ``openvino``, without its telemetry."""
    # openvino reports each import to its makers, except where this package cannot be imported
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None is the documented way
    import openvino

    return openvino


@cache
def _core() -> Any:
    """Return OpenVINO's entry point; all models share it."""
    return _openvino().Core()


def _reason(error: Exception) -> str:
    """Return what an error of OpenVINO says, in one line, without the places in its source."""
    lines = [NOISE.sub("", line).strip() for line in str(error).splitlines()]
    return one_line("; ".join(line for line in lines if line).strip("; ")) or type(error).__name__
