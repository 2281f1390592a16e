"""Describe executed kernels by the nodes of the model: layout, precision, fused operators, kind of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from ... import NATIVE_DOMAIN
from .match import NCHWC, PRODUCTS, QUANTIZERS, REORDERS, Match, inserted_layout, members_of
from .profile import KernelRun

Kind = Literal["compute", "conversion", "layout", "rest"]
SHORT = {
    "float": "f32",
    "float16": "f16",
    "double": "f64",
    "bfloat16": "bf16",
    "uint8": "u8",
    "int8": "s8",
    "uint16": "u16",
    "int16": "s16",
    "int32": "s32",
    "int64": "s64",
    "bool": "u8",
    "string": "str",
}
"""Element types, from the runtime's names to oneDNN's; a bool is a byte."""

SPATIAL = frozenset(
    "Conv FusedConv NhwcFusedConv QLinearConv ConvInteger ConvTranspose MaxPool NhwcMaxPool AveragePool LpPool "
    "GlobalAveragePool GlobalMaxPool QLinearAveragePool QLinearGlobalAveragePool BatchNormalization Resize "
    "Upsample InstanceNormalization".split()
)
"""Operators on tensors with batch, channel and spatial axes."""

NATIVE_SPATIAL = (
    "AveragePool",
    "Convolution",
    "ConvTranspose",
    "DepthToSpace",
    "GlobalAveragePool",
    "GroupNormalization",
    "MaxPool",
    "Resize",
)
"""Native operators on images; the others take tensors of any layout."""

WEIGHTS = {
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QGemm", "Convolution"), 3),
    **dict.fromkeys(
        (
            *("Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose", "ConvInteger", "Gemm", "FusedGemm", "MatMul"),
            *("FusedMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "Attention"),
            *("MatMulNBits", "MultiHeadAttention", "QAttention", "LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"),
        ),
        1,
    ),
}
"""The index of the weight, or of the second factor, by operator."""

FIRST_DATA = {"QLinearConcat": 2}
"""The index of the first data input where a scale and a zero point are in front of it, by operator."""

DTYPES = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One executed kernel.

    Attributes:
        run: Its entry in the profile.
        kind: ``compute`` for products, ``conversion`` for changes of the element type, ``layout`` for changes of the
            order of axes that the runtime inserted, ``rest`` for the others.
        node: The node of the model under which it is reported; None for nodes that the runtime inserted.
        op: The operator of this node, or of the kernel.
        absorbs: The operators of the other nodes fused into it, in the order of the model.
        layout: ``NCHWc`` in blocks of channels, ``NHWC`` or ``NCHW``; empty without spatial axes.
        precision: ``float32``, ``u8·s8→u8``, ``f32→u8``.
        place: Its node in the optimized graph.
    """

    run: KernelRun
    kind: Kind
    node: str | None
    op: str
    absorbs: tuple[str, ...]
    layout: str
    precision: str
    place: ir.Node | None

    @property
    def spelled(self) -> str:
        """The kernel as ``domain.Operator``."""
        return f"{self.run.domain}.{self.run.op}" if self.run.domain else self.run.op

    @property
    def integer(self) -> bool:
        """Whether it multiplies integers."""
        return self.run.integer


def kernels(
    runs: Sequence[KernelRun], graph: ir.Graph, nodes: Mapping[str, ir.Node], match: Match
) -> tuple[Kernel, ...]:
    """Describe the executed kernels in order of execution.

    Args:
        runs: The entries of the profile.
        graph: The optimized graph.
        nodes: The nodes of the model by name.
        match: Which kernel computes which node.
    """
    places = {node.name: node for node in graph.all_nodes() if node.name}
    members = members_of(match.kernels)
    layouts = _layouts(graph, nodes)
    found = []
    for run in runs:
        place = places.get(run.node)
        node = match.principals.get(run.node) or match.parts.get(run.node)
        absorbs = tuple(nodes[name].op_type for name in members.get(run.node, []) if name != node)
        found.append(
            Kernel(
                run,
                _kind(run, place, nodes),
                node,
                nodes[node].op_type if node is not None else run.op,
                absorbs,
                layouts.get(run.node, ""),
                _precision(run, _weight(run, place)),
                place,
            )
        )
    return tuple(found)


def _kind(run: KernelRun, place: ir.Node | None, nodes: Mapping[str, ir.Node]) -> Kind:
    if run.macs or run.op in PRODUCTS:
        return "compute"
    if run.op in QUANTIZERS:
        return "conversion"
    return "layout" if place is not None and inserted_layout(place, nodes) else "rest"


def _layouts(graph: ir.Graph, nodes: Mapping[str, ir.Node]) -> dict[str, str]:
    """Return the layout in which each executed node computes, by name.

    The blocked domain and the attribute ``channels_last`` name the layout. A node that keeps its axes has the layout
    of its input. A Transpose that the runtime inserted changes between NCHW and NHWC.
    """
    tensors: dict[ir.Value, str] = {}
    found: dict[str, str] = {}
    for node in graph.all_nodes():
        before = next((tensors[v] for v in node.inputs if v is not None and tensors.get(v)), "")
        layout = _own_layout(node) or before
        after = layout
        if node.op_type in REORDERS and node.domain == NCHWC:
            layout, after = "NCHWc", "NCHWc" if node.op_type == "ReorderInput" else _plain(node)
        elif inserted_layout(node, nodes):
            layout = after = "NHWC" if node.attributes.get_ints("perm", ())[-1:] == (1,) else "NCHW"
        elif node.op_type in ("Transpose", "Reshape", "Flatten", "MatMul", "Gemm", "QGemm", "Squeeze", "Unsqueeze"):
            after = ""
        found[node.name or ""] = layout
        tensors.update(dict.fromkeys(node.outputs, after))
    return found


def _own_layout(node: ir.Node) -> str:
    if node.domain == NCHWC:
        return "NCHWc"
    if node.attributes.get_int("channels_last", 0) or node.op_type.startswith("Nhwc") or _is_native(node):
        return "NHWC"
    return "NCHW" if node.op_type in SPATIAL else ""


def _is_native(node: ir.Node) -> bool:
    """Return whether a node is a native operator on images; their layout is NHWC."""
    return node.domain == NATIVE_DOMAIN and node.op_type.startswith(NATIVE_SPATIAL)


def _plain(node: ir.Node) -> str:
    return "NHWC" if node.attributes.get_int("channels_last", 0) else "NCHW"


def _weight(run: KernelRun, place: ir.Node | None) -> str:
    """Return the short type of the second factor of a product; empty for other operators."""
    index = WEIGHTS.get(run.op)
    if index is None or place is None or index >= len(place.inputs) or (value := place.inputs[index]) is None:
        return ""
    dtype = value.const_value.dtype if value.const_value is not None else value.dtype
    if dtype is None:
        return "u8" if run.integer else "f32"
    return SHORT.get(DTYPES.get(dtype, dtype.name.lower()), dtype.name.lower())


def _precision(run: KernelRun, weight: str) -> str:
    """Return the element types that a kernel reads and writes, as text."""
    reads = run.reads[FIRST_DATA.get(run.op, 0) :]
    before, after = (SHORT.get(types[0], types[0]) if types else "" for types in (reads, run.writes))
    if {before, weight or before, after} == {"f32"}:
        return "float32"
    factors = f"{before}·{weight}" if weight else before
    return factors if before == after and not weight else f"{factors}→{after}"
