"""Which kernels ran: the runtime's optimised graph and profile, per node, with multiply-accumulates."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ... import RequantError
from ...calibration.session import ModelSource, Serialized, describe, open_session, runtime_message
from ..model.files import load_model, serialize

INTEGER = frozenset(
    "QLinearConv ConvInteger MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QLinearMatMul QGemm "
    "DynamicQuantizeLSTM QAttention".split()
)
RUNS = 3


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One node of the executed graph.

    Attributes:
        node: Its name in the executed graph.
        domain: Domain of the operator that ran, for instance ``com.microsoft.nchwc``.
        op: The operator that ran.
        microseconds: Least kernel time over the profiled runs, times the steps of a Loop around it.
        macs: Multiply-accumulates of all steps, 0 for what is not a convolution or a matrix product.
        outputs: Shapes of its outputs.
        inputs: Shapes of its inputs, without weights that the kernel has packed.
        reads: Element types of `inputs`, as the profile spells them: ``float``, ``uint8``.
        writes: Element types of its outputs.
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

    @property
    def integer(self) -> bool:
        """Whether its products are of integers."""
        return self.op in INTEGER


@dataclass(frozen=True, slots=True)
class Profile:
    """What the runtime made of a model, and ran.

    Attributes:
        runs: The nodes that ran, in order of execution.
        graph: The optimised graph; its weights may lie in files that are gone, their types and shapes do not.
        microseconds: Least time of a whole run, profiling included.
    """

    runs: tuple[KernelRun, ...]
    graph: ir.Graph
    microseconds: float


def executed(model: ModelSource, feed: Mapping[str, Any], *, threads: int = 0) -> tuple[KernelRun, ...]:
    """Run `model` under the profiler and return its nodes in order of execution.

    The shapes of weights are read from the runtime's optimised graph, because a kernel that has packed them no longer
    shows them. Of weights in files the runtime writes no more into that graph than where they are.

    Args:
        model: A model file; or a model in memory whose nodes all have names: it is by name that the profile and the
            graph are joined.
        feed: What it is run on.
        threads: Threads inside one operator; 0 leaves the choice to the runtime.

    Raises:
        RequantError: The model cannot be loaded or run.
    """
    return profiled(model, feed, threads=threads).runs


def profiled(model: ModelSource, feed: Mapping[str, Any], *, threads: int = 0, times: int = RUNS) -> Profile:
    """Run `model` under the profiler, `times` times; see `executed`.

    Raises:
        RequantError: The model cannot be loaded or run.
    """
    source = model if isinstance(model, (bytes, Serialized)) else serialize(load_model(model))
    with tempfile.TemporaryDirectory(prefix="requant-") as folder:
        optimised = Path(folder) / "optimised.onnx"
        session = open_session(source, threads=threads, profile=Path(folder) / "profile", save_optimized=optimised)
        try:
            for _ in range(times):
                session.run(None, dict(feed))
        except Exception as error:  # the runtime's exceptions share no base class of their own
            raise RequantError(f"{describe(source)}: the model fails: {runtime_message(error)}") from error
        events = json.loads(Path(session.end_profiling()).read_text())
        graph = ir.load(optimised).graph
        _name_as_profiled(graph, events)
        nodes = {node.name: node for node in graph.all_nodes() if node.name}
        whole = min(float(event["dur"]) for event in events if event["name"] == "model_run")
        return Profile(tuple(_runs(events, nodes, times)), graph, whole)


def _name_as_profiled(graph: ir.Graph, events: Iterable[Mapping[str, Any]]) -> None:
    """Give nodes that the runtime made without a name, where it inlines functions, the one that its profile invents.

    That is the operator and a number that grows with the order of the nodes.
    """
    unnamed: dict[str, list[ir.Node]] = defaultdict(list)
    for node in graph.all_nodes():
        if not node.name:
            unnamed[node.op_type].append(node)
    invented: dict[str, dict[str, None]] = defaultdict(dict)
    for event in events:
        name = event["name"].removesuffix("_kernel_time")
        if event.get("cat") == "Node" and re.fullmatch(rf"{event['args']['op_name']}_\d+", name):
            invented[event["args"]["op_name"]][name] = None
    for op, nodes in unnamed.items():
        if len(nodes) == len(invented[op]):
            for node, name in zip(
                nodes, sorted(invented[op], key=lambda name: int(name.rpartition("_")[2])), strict=True
            ):
                node.name = name


def _runs(events: Iterable[Mapping[str, Any]], nodes: Mapping[str, ir.Node], runs: int) -> Iterable[KernelRun]:
    """Join the profile's kernel events with the nodes of the optimised graph."""
    times: dict[str, list[float]] = defaultdict(list)
    last: dict[str, Mapping[str, Any]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            times[name].append(float(event["dur"]))
            last[name] = event["args"]
    for name, args in last.items():
        node = nodes.get(name)
        outputs = tuple(_shape(entry) for entry in args.get("output_type_shape", ()))
        inputs = [_shape(entry) for entry in args.get("input_type_shape", ())]
        reads, writes = (tuple(map(_type, args.get(f"{end}_type_shape", ()))) for end in ("input", "output"))
        steps = max(1, len(times[name]) // runs)  # in the body of a Loop a node runs many times
        macs = steps * multiply_accumulates(args["op_name"], node, inputs, outputs)
        domain = node.domain if node is not None else ""
        spent = steps * min(times[name])
        yield KernelRun(name, domain, args["op_name"], spent, macs, outputs, tuple(inputs), reads, writes)


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape in a profile's ``{"float": [1, 3]}``."""
    return tuple(next(iter(entry.values()), ()))


def _type(entry: Mapping[str, Any]) -> str:
    """Return the element type in a profile's ``{"float": [1, 3]}``."""
    return next(iter(entry), "")


Shape = tuple[int, ...]


def _convolution(node: ir.Node, inputs: list[Shape], output: Shape) -> int:
    """Each output takes a product per weight of its channel, (M, C/group, *kernel)."""
    return math.prod(output) * math.prod(_weight_shape(node, inputs, rank=len(output))[1:])


def _transposed(node: ir.Node, inputs: list[Shape], output: Shape) -> int:
    """Each input gives a product per weight of its channel, (C, M/group, *kernel)."""
    return math.prod(inputs[0]) * math.prod(_weight_shape(node, inputs, rank=len(output))[1:])


def _product(node: ir.Node, inputs: list[Shape], output: Shape) -> int:
    """Each output takes a product per element of the common axis."""
    transposed = node.attributes.get_int("transA", 0) and len(inputs[0]) > 1
    return math.prod(output) * inputs[0][-2 if transposed else -1]


def _recurrent(node: ir.Node, inputs: list[Shape], output: Shape) -> int:
    """Each step (T, N, ...) takes every weight of W and R, both of three dimensions, once."""
    weights = [v.const_value for v in node.inputs if v is not None and v.const_value is not None]
    return math.prod(inputs[0][:2]) * sum(weight.size for weight in weights if len(weight.shape) == 3)


def _attention(node: ir.Node, inputs: list[Shape], output: Shape) -> int:
    """Projections of (N, S, K) by (K, 3 H), then scores and weighted sums, S x S x H each."""
    weights = _constant_shape(node, rank=2)
    return math.prod(inputs[0]) * weights[1] + 2 * math.prod(output) * inputs[0][1]


MACS: dict[str, Callable[[ir.Node, list[Shape], Shape], int]] = {
    **dict.fromkeys("Conv FusedConv NhwcFusedConv QLinearConv ConvInteger".split(), _convolution),
    "ConvTranspose": _transposed,
    **dict.fromkeys(
        "MatMul FusedMatMul Gemm FusedGemm MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QLinearMatMul "
        "QGemm MatMulNBits".split(),
        _product,
    ),
    **dict.fromkeys(("Attention", "QAttention"), _attention),
    **dict.fromkeys("LSTM GRU RNN DynamicQuantizeLSTM".split(), _recurrent),
}
"""Multiply-accumulates of one run, from the node and the shapes of its inputs and of its first output."""


def multiply_accumulates(op: str, node: ir.Node | None, inputs: list[Shape], outputs: Sequence[Shape]) -> int:
    """Return the multiply-accumulates of one run of a node, 0 for operators that are none of `MACS`.

    Args:
        op: The operator that runs.
        node: The node with its constants.
        inputs: Shapes of its inputs, in order; without constants that a kernel has packed.
        outputs: Shapes of its outputs.
    """
    if node is None or op not in MACS or not outputs or not inputs or not inputs[0]:
        return 0
    return MACS[op](node, inputs, outputs[0])


def _weight_shape(node: ir.Node, inputs: list[Shape], rank: int) -> Shape:
    """Return the shape of the constant weight of a convolution, or of the one that is computed, its second input."""
    shape = _constant_shape(node, rank)
    if any(shape) or len(inputs) < 2 or len(inputs[1]) != rank:
        return shape
    return inputs[1]


def _constant_shape(node: ir.Node, rank: int) -> tuple[int, ...]:
    """Return the shape of the first constant input of `rank` dimensions; (0, 0) where weights are computed.

    Weights that are dequantized in every run are constant too.
    """
    for value in node.inputs:
        dq = value.producer() if value is not None else None
        held = dq.inputs[0] if dq is not None and dq.op_type == "DequantizeLinear" else value
        if held is not None and held.const_value is not None and len(held.const_value.shape) == rank:
            return tuple(int(d) for d in held.const_value.shape)  # type: ignore[arg-type]
    return (0, 0)


def integer_share(runs: Iterable[KernelRun]) -> float:
    """Return the share of multiply-accumulates in integer kernels, 0..1; 0 where there are none."""
    runs = list(runs)
    total = sum(run.macs for run in runs)
    return sum(run.macs for run in runs if run.integer) / total if total else 0.0
