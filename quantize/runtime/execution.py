"""Which kernels ran: the runtime's optimised graph and profile, per node, with multiply-accumulates."""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...calibration.session import open_session
from ..files import load_model, to_bytes

INTEGER = frozenset(
    "QLinearConv ConvInteger MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QLinearMatMul QGemm "
    "QAttention DynamicQuantizeLSTM".split()
)
CONVOLUTIONS = frozenset({"Conv", "FusedConv", "NhwcFusedConv", "QLinearConv", "ConvInteger"})
PRODUCTS = frozenset(
    "MatMul FusedMatMul Gemm FusedGemm MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QLinearMatMul QGemm".split()
)
RUNS = 3


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One node of the executed graph.

    Attributes:
        node: Its name in the executed graph.
        domain: Domain of the operator that ran, for instance ``com.microsoft.nchwc``.
        op: The operator that ran.
        microseconds: Least kernel time over the profiled runs.
        macs: Multiply-accumulates, 0 for what is not a convolution or a matrix product.
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


def executed(model: bytes | Path, feed: Mapping[str, Any], *, threads: int = 0) -> tuple[KernelRun, ...]:
    """Run `model` under the profiler and return its nodes in order of execution.

    Weights are read from the runtime's optimised graph, because a kernel that has packed them no longer shows them.

    Args:
        model: A model file, or the bytes of a model whose nodes all have names: it is by name that the profile and
            the graph are joined.
        feed: What it is run on.
        threads: Threads inside one operator; 0 leaves the choice to the runtime.

    Raises:
        RequantError: The model cannot be loaded.
    """
    data = model if isinstance(model, bytes) else to_bytes(load_model(model))
    with tempfile.TemporaryDirectory(prefix="requant-") as folder:
        optimised = Path(folder) / "optimised.onnx"
        session = open_session(data, threads=threads, profile=Path(folder) / "profile", save_optimized=optimised)
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
        macs = _macs(args["op_name"], node, inputs, outputs)
        domain = node.domain if node is not None else ""
        yield KernelRun(name, domain, args["op_name"], min(times[name]), macs, outputs)


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape in a profile's ``{"float": [1, 3]}``."""
    return tuple(next(iter(entry.values()), ()))


def _macs(op: str, node: ir.Node | None, inputs: list[tuple[int, ...]], outputs: tuple[tuple[int, ...], ...]) -> int:
    """Return the multiply-accumulates of one run of a node."""
    if node is None or not outputs:
        return 0
    if op in CONVOLUTIONS:
        weight = _constant_shape(node, rank=len(outputs[0]))
        return math.prod(outputs[0]) * math.prod(weight[1:]) if weight else 0
    if op in PRODUCTS and inputs:
        transposed = node.attributes.get_int("transA", 0)
        return math.prod(outputs[0]) * inputs[0][-2 if transposed and len(inputs[0]) > 1 else -1]
    return 0


def _constant_shape(node: ir.Node, rank: int) -> tuple[int, ...]:
    """Return the shape of the first constant input of `rank` dimensions."""
    for value in node.inputs:
        if value is not None and value.const_value is not None and len(value.const_value.shape) == rank:
            return tuple(int(d) for d in value.const_value.shape)  # type: ignore[arg-type]
    return ()


def integer_share(runs: Iterable[KernelRun]) -> float:
    """Return the share of multiply-accumulates in integer kernels, 0..1; 0 where there are none."""
    runs = list(runs)
    total = sum(run.macs for run in runs)
    return sum(run.macs for run in runs if run.integer) / total if total else 0.0
