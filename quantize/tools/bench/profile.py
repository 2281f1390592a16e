"""The times of the operators and nodes of a model, under the runtime's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ....calibration.model.session import Array
from ...model.files import load_model, serialize
from ...runtime.described import described
from ...runtime.executed import Kernel
from ...runtime.problem import is_convolution, problem
from ...runtime.runtimes import Setting

MOST_RUNS, LEAST_RUNS = 20, 3
SECONDS = 1.0  # the approximate duration of the profiled runs
MOST_EVENTS = 100_000  # of all runs: the runtime keeps 1.5 kB for each
SLOWEST = 10


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """The time of all kernels of one operator.

    Attributes:
        kernel: The executed operator, ``domain.Operator``.
        count: The number of its nodes in the executed graph.
        microseconds: The sum of their minimum times.
        share: This time over the time of all kernels, 0..1.
        macs: Their multiply-accumulates.
    """

    kernel: str
    count: int
    microseconds: float
    share: float
    macs: int


@dataclass(frozen=True, slots=True)
class NodeTime:
    """The time of one node.

    Attributes:
        node: Its name in the model, or in the executed graph if the runtime inserted it.
        kernel: The executed operator.
        microseconds: Its minimum time.
        share: This time over the time of all kernels, 0..1.
        macs: Its multiply-accumulates.
        problem: Its shapes in oneDNN's notation.
    """

    node: str
    kernel: str
    microseconds: float
    share: float
    macs: int
    problem: str


@dataclass(frozen=True, slots=True)
class BenchProfile:
    """The times of a run under the profiler, which slows the run down.

    Attributes:
        runs: The number of profiled runs; the time of a kernel is its minimum.
        milliseconds: Minimum time of a whole run under the profiler.
        kernels_ms: The sum of the minimum times of all kernels.
        operators: Times by operator, the slowest first.
        slowest: The slowest nodes, the slowest first.
        convolutions: Every convolution, in order of execution.
    """

    runs: int
    milliseconds: float
    kernels_ms: float
    operators: tuple[OperatorTime, ...]
    slowest: tuple[NodeTime, ...]
    convolutions: tuple[NodeTime, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def profile_model(model: Path, feed: Mapping[str, Array], setting: Setting, milliseconds: float) -> BenchProfile:
    """Run a model under the profiler.

    Args:
        model: Path of the model.
        feed: The inputs of a run.
        setting: The runtime, and its threads.
        milliseconds: The time of a run without the profiler; it sets the number of profiled runs.

    Raises:
        RequantError: The model cannot be loaded or run.
    """
    loaded = load_model(model)
    times = max(LEAST_RUNS, min(MOST_RUNS, int(1e3 * SECONDS / max(milliseconds, 1e-3))))
    times = max(1, min(times, MOST_EVENTS // max(loaded.graph.num_nodes(), 1)))
    profile = setting.opened().profile(serialize(loaded), feed, threads=setting.threads, times=times)
    ran, _ = described(loaded, profile)
    total = sum(kernel.run.microseconds for kernel in ran)
    node_times = [_node_time(kernel, total) for kernel in ran]
    groups = defaultdict[str, list[NodeTime]](list)
    for each in node_times:
        groups[each.kernel].append(each)
    operators = [
        OperatorTime(
            kernel,
            len(group),
            sum(each.microseconds for each in group),
            sum(each.share for each in group),
            sum(each.macs for each in group),
        )
        for kernel, group in groups.items()
    ]
    return BenchProfile(
        runs=times,
        milliseconds=profile.microseconds / 1e3,
        kernels_ms=total / 1e3,
        operators=tuple(sorted(operators, key=lambda each: -each.microseconds)),
        slowest=tuple(sorted(node_times, key=lambda each: -each.microseconds)[:SLOWEST]),
        convolutions=tuple(each for kernel, each in zip(ran, node_times, strict=True) if is_convolution(kernel)),
    )


def _node_time(kernel: Kernel, total: float) -> NodeTime:
    """Return the time of one kernel."""
    return NodeTime(
        node=kernel.node or kernel.run.node,
        kernel=kernel.spelled,
        microseconds=kernel.run.microseconds,
        share=kernel.run.microseconds / total if total else 0.0,
        macs=kernel.run.macs,
        problem=problem(kernel),
    )
