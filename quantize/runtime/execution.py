"""Which kernels ran: the runtime's optimised graph and profile, per node, with multiply-accumulates."""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...calibration.session import ModelSource, Serialized, open_session
from ..files import load_model, serialize

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
    """

    node: str
    domain: str
    op: str
    microseconds: float
    macs: int
    outputs: tuple[tuple[int, ...], ...]

    @property
    def integer(self) -> bool:
        """Whether its products are of integers."""
        return self.op in INTEGER


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
        RequantError: The model cannot be loaded.
    """
    source = model if isinstance(model, (bytes, Serialized)) else serialize(load_model(model))
    with tempfile.TemporaryDirectory(prefix="requant-") as folder:
        optimised = Path(folder) / "optimised.onnx"
        session = open_session(source, threads=threads, profile=Path(folder) / "profile", save_optimized=optimised)
        for _ in range(RUNS):
            session.run(None, dict(feed))
        events = json.loads(Path(session.end_profiling()).read_text())
        nodes = {node.name: node for node in ir.load(optimised).graph.all_nodes() if node.name}
        return tuple(_runs(events, nodes))


def _runs(events: Iterable[Mapping[str, Any]], nodes: Mapping[str, ir.Node]) -> Iterable[KernelRun]:
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
        steps = max(1, len(times[name]) // RUNS)  # in the body of a Loop a node runs many times
        macs = steps * _macs(args["op_name"], node, inputs, outputs)
        domain = node.domain if node is not None else ""
        yield KernelRun(name, domain, args["op_name"], steps * min(times[name]), macs, outputs)


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape in a profile's ``{"float": [1, 3]}``."""
    return tuple(next(iter(entry.values()), ()))


Shape = tuple[int, ...]


def _convolution(node: ir.Node, inputs: list[Shape], output: Shape) -> int:
    """Each output takes a product per weight of its channel, (M, C/group, *kernel)."""
    return math.prod(output) * math.prod(_constant_shape(node, rank=len(output))[1:])


def _transposed(node: ir.Node, inputs: list[Shape], output: Shape) -> int:
    """Each input gives a product per weight of its channel, (C, M/group, *kernel)."""
    return math.prod(inputs[0]) * math.prod(_constant_shape(node, rank=len(output))[1:])


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


def _macs(op: str, node: ir.Node | None, inputs: list[Shape], outputs: tuple[Shape, ...]) -> int:
    """Return the multiply-accumulates of one run of a node, 0 for operators that are none of `MACS`."""
    if node is None or op not in MACS or not outputs or not inputs or not inputs[0]:
        return 0
    return MACS[op](node, inputs, outputs[0])


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
