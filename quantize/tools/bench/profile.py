"""Where in a model the time goes: a second pass, under the runtime's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ....calibration.session import Array
from ...model.files import load_model, serialize
from ...runtime.executed import Kernel, kernels
from ...runtime.match import match
from ...runtime.problem import is_convolution, problem
from ...runtime.profile import profiled

MOST_RUNS, LEAST_RUNS = 20, 3
SECONDS = 1.0  # about as long as a pass takes
SLOWEST = 10


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """What all kernels of one operator took.

    Attributes:
        kernel: The operator that ran, ``domain.Operator``.
        count: How many nodes of the executed graph are of it.
        microseconds: The sum of their least times.
        share: Of the time in all kernels, 0..1.
        macs: Their multiply-accumulates.
    """

    kernel: str
    count: int
    microseconds: float
    share: float
    macs: int


@dataclass(frozen=True, slots=True)
class NodeTime:
    """What one node took.

    Attributes:
        node: Its name in the model; in the executed graph where the runtime inserted it.
        kernel: The operator that ran.
        microseconds: Its least time.
        share: Of the time in all kernels, 0..1.
        macs: Its multiply-accumulates.
        problem: The shapes that it computes on, as oneDNN writes them.
    """

    node: str
    kernel: str
    microseconds: float
    share: float
    macs: int
    problem: str


@dataclass(frozen=True, slots=True)
class BenchProfile:
    """Where the time of a run goes, with the profiler on: the sum is more than a run takes without.

    Attributes:
        runs: How many runs were profiled; of each kernel the least time counts.
        milliseconds: Least time of a whole run under the profiler.
        kernels_ms: The sum of the least times of all kernels.
        operators: Times by operator, most first.
        slowest: The nodes that took most, most first.
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


def profile_model(model: Path, feed: Mapping[str, Array], *, threads: int, milliseconds: float) -> BenchProfile:
    """Run a model under the profiler.

    Args:
        model: Path of the model.
        feed: What it is run on.
        threads: Threads inside one operator; 0 leaves the choice to the runtime.
        milliseconds: What a run takes without the profiler, by which the number of runs is chosen.

    Raises:
        RequantError: The model cannot be loaded or run.
    """
    times = max(LEAST_RUNS, min(MOST_RUNS, int(1e3 * SECONDS / max(milliseconds, 1e-3))))
    loaded = load_model(model)
    profile = profiled(serialize(loaded), feed, threads=threads, times=times)
    nodes = {node.name: node for node in loaded.graph.all_nodes() if node.name}
    matched = match(loaded, profile.graph, [run.node for run in profile.runs])
    ran = kernels(profile.runs, profile.graph, nodes, matched)
    total = sum(kernel.run.microseconds for kernel in ran)
    told = [_node_time(kernel, total) for kernel in ran]
    groups = defaultdict[str, list[NodeTime]](list)
    for each in told:
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
        slowest=tuple(sorted(told, key=lambda each: -each.microseconds)[:SLOWEST]),
        convolutions=tuple(each for kernel, each in zip(ran, told, strict=True) if is_convolution(kernel)),
    )


def _node_time(kernel: Kernel, total: float) -> NodeTime:
    """Describe one kernel."""
    return NodeTime(
        node=kernel.node or kernel.run.node,
        kernel=kernel.spelled,
        microseconds=kernel.run.microseconds,
        share=kernel.run.microseconds / total if total else 0.0,
        macs=kernel.run.macs,
        problem=problem(kernel),
    )
