"""Executed kernels with times and multiply-accumulates, from the runtime's optimized graph and its profile."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir
from google.protobuf.message import DecodeError

from ... import NATIVE_DOMAIN, RequantError
from ...calibration.model.session import ModelSource, describe, open_session
from ...system.scratch import check_room, scratch_folder
from ...transforms.graphs.queries import CONTROL_FLOW
from .clock import clock_of
from .macs import NUMBER, accuracy_level, counted_as, multiplies_integers, multiply_accumulates
from .session import Runner

RUNS = 3


class _Arguments(msgspec.Struct, frozen=True, gc=False):
    """What the profile says of a kernel: the operator, and the type and shape of each tensor, ``{"float": [1, 3]}``."""

    op_name: str = ""
    input_type_shape: tuple[dict[str, tuple[int, ...]], ...] = ()
    output_type_shape: tuple[dict[str, tuple[int, ...]], ...] = ()


class _Event(msgspec.Struct, frozen=True, gc=False):
    """An entry of the profile; `dur` is in microseconds. `args` is JSON text: decoded, it takes much more memory."""

    name: str
    cat: str = ""
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One node of the executed graph.

    Attributes:
        node: Its name in the executed graph.
        domain: Domain of the operator that ran, for instance ``com.microsoft.nchwc``.
        op: The executed operator.
        microseconds: Minimum kernel time over the profiled runs, times `steps`; 0 for control flow, whose kernels are
            nodes of their own: what is left of its time is mostly the work of the profiler.
        macs: Multiply-accumulates of all iterations; 0 for operators without products.
        outputs: Shapes of its outputs.
        inputs: Shapes of its inputs, without weights that the kernel has packed.
        reads: Element types of `inputs`, in the words of the profile: ``float``, ``uint8``.
        writes: Element types of its outputs.
        level: Its accuracy_level; 0 for operators that have none.
        members: The nodes of the model that it computes, if the runtime tells them; the most important one first.
        integers: Whether it multiplies integers, if the runtime tells; None if its operator and level tell.
        steps: How often it runs in a run of the model: the iterations of a Loop around it.
    """

    node: str
    domain: str
    op: str
    microseconds: float
    macs: int
    outputs: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    level: int = 0
    members: tuple[str, ...] = ()
    integers: bool | None = None
    steps: int = 1

    @property
    def title(self) -> str:
        """The operator; with the type of its first factor, if the operator does not tell whether it is an integer."""
        return self.op if self.integers is None else f"{self.op} of {self.reads[0]}"

    @property
    def integer(self) -> bool:
        """Whether it multiplies integers."""
        if self.integers is not None:
            return self.integers
        return multiplies_integers(counted_as(self.op, self.domain), self.level)


@dataclass(frozen=True, slots=True)
class Profile:
    """The kernels that ran in a model.

    Attributes:
        runs: The executed nodes in order of execution.
        microseconds: Minimum time of a whole run, with the profiler on.
        cpu: Minimum CPU time of a whole run in microseconds, with the profiler on; None with several threads.
    """

    runs: tuple[KernelRun, ...]
    microseconds: float
    cpu: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProfile(Profile):
    """The kernels that ran in a model, and their graph.

    Attributes:
        graph: The optimized graph. Files with its weights may be gone; types and shapes of the weights remain.
    """

    graph: ir.Graph


def profiled(model: ModelSource, feed: Mapping[str, Any], *, threads: int = 0, times: int = RUNS) -> GraphProfile:
    """Run `model` under the profiler, and return its nodes in order of execution.

    Shapes of weights come from the optimized graph, because the profile does not show packed weights. For weights in
    external files the optimized graph only refers to the files. The runtime names nodes that have no name in a model
    file. `load_model` names them first.

    Args:
        model: A model file, or a model in memory.
        feed: The inputs.
        threads: Threads inside one operator; 0 leaves the choice to the runtime.
        times: How often it is run.

    Raises:
        RequantError: The model cannot be loaded or run.
    """
    check_room()  # the runtime does not say what it lacks
    with scratch_folder() as folder:
        optimised = folder / "optimised.onnx"
        session = open_session(model, threads=threads, profile=folder / "profile", save_optimized=optimised)
        run = Runner.over(session, describe(model))
        spent = [_cpu_seconds(run, feed) for _ in range(times)]
        try:
            events = msgspec.json.decode(Path(session.end_profiling()).read_bytes(), type=tuple[_Event, ...])
            graph = ir.load(optimised).graph
        except (OSError, ValueError, DecodeError) as error:  # the runtime says nothing where it cannot write
            raise RequantError(f"{folder}: the runtime's profile is cut; is the disk full?") from error
        kernels = _kernels(events)
        _name_as_profiled(graph, kernels)
        nodes = {node.name: node for node in graph.all_nodes() if node.name}
        whole = min(event.dur for event in events if event.name == "model_run")
        cpu = 1e6 * min(spent) if clock_of(threads) == "cpu" else None
        return GraphProfile(tuple(_runs(kernels, nodes, times)), whole, cpu, graph=graph)


def _cpu_seconds(run: Runner, feed: Mapping[str, Any]) -> float:
    """Run a feed and return the CPU seconds of this thread."""
    before = time.thread_time()
    run(feed)
    return time.thread_time() - before


def _kernels(events: Iterable[_Event]) -> dict[str, tuple[_Arguments, list[float]]]:
    """Return what ran last under each name of a node, and the microseconds of all its runs, in order of execution."""
    times: dict[str, list[float]] = defaultdict(list)
    last: dict[str, msgspec.Raw] = {}
    for event in events:
        if event.cat == "Node" and event.name.endswith("_kernel_time"):
            name = event.name.removesuffix("_kernel_time")
            times[name].append(event.dur)
            last[name] = event.args
    return {name: (msgspec.json.decode(text, type=_Arguments), times[name]) for name, text in last.items()}


def _name_as_profiled(graph: ir.Graph, kernels: Mapping[str, tuple[_Arguments, list[float]]]) -> None:
    """Give nameless nodes the names that the profile uses for them.

    The runtime makes nameless nodes when it inlines functions. Their name in the profile is the operator and a number
    that grows with the order of the nodes.
    """
    unnamed: dict[str, list[ir.Node]] = defaultdict(list)
    for node in graph.all_nodes():
        if not node.name:
            unnamed[node.op_type].append(node)
    invented: dict[str, list[str]] = defaultdict(list)
    for name, (args, _) in kernels.items():
        if re.fullmatch(rf"{args.op_name}_\d+", name):
            invented[args.op_name].append(name)
    for op, nodes in unnamed.items():
        if len(nodes) == len(invented[op]):
            for node, name in zip(
                nodes, sorted(invented[op], key=lambda name: int(name.rpartition("_")[2])), strict=True
            ):
                node.name = name


def _runs(
    kernels: Mapping[str, tuple[_Arguments, list[float]]], nodes: Mapping[str, ir.Node], runs: int
) -> Iterable[KernelRun]:
    """Join the kernels of the profile with the nodes of the optimised graph."""
    for name, (args, times) in kernels.items():
        node = nodes.get(name)
        inputs, outputs = (tuple(map(_shape, ends)) for ends in (args.input_type_shape, args.output_type_shape))
        reads, writes = (tuple(map(_type, ends)) for ends in (args.input_type_shape, args.output_type_shape))
        steps = max(1, len(times) // runs)  # a node in the body of a Loop runs many times
        domain = node.domain if node is not None else ""
        op = NUMBER.sub("", args.op_name) if domain == NATIVE_DOMAIN else args.op_name
        macs = steps * multiply_accumulates(counted_as(op, domain), node, inputs, outputs)
        spent = 0.0 if op in CONTROL_FLOW else steps * min(times)
        level = accuracy_level(node)
        yield KernelRun(name, domain, op, spent, macs, outputs, inputs, reads, writes, level, steps=steps)


def _shape(entry: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape in a profile's ``{"float": [1, 3]}``."""
    return next(iter(entry.values()), ())


def _type(entry: Mapping[str, tuple[int, ...]]) -> str:
    """Return the element type in a profile's ``{"float": [1, 3]}``."""
    return next(iter(entry), "")


def integer_share(runs: Iterable[KernelRun]) -> float:
    """Return the share of multiply-accumulates in integer kernels, 0..1; 0 if there are none."""
    runs = list(runs)
    total = sum(run.macs for run in runs)
    return sum(run.macs for run in runs if run.integer) / total if total else 0.0
