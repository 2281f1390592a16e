"""The kernels in the graph that OpenVINO executed: operators, types, multiply-accumulates, nodes of the model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .profile import KernelRun

SKIPPED = frozenset({"Input", "Const", "Output"})
"""Layers that compute nothing."""
UNTIMED = "not_executed"
TYPES = {"f32": "float", "f16": "float16", "bf16": "bfloat16", "u8": "uint8", "i8": "int8", "i32": "int32"}
TYPES |= {"i64": "int64", "boolean": "bool"}
"""Element types, from OpenVINO's names to those of the profile of ONNX Runtime."""
INTEGER = frozenset({"uint8", "int8"})
PRODUCTS = frozenset({"Convolution", "Deconvolution", "FullyConnected", "MatMul"})
CONVERTING = frozenset({"FakeQuantize", "Convert", "Reorder", "Eltwise", "Subgraph"})
"""Layers that may change the element type; elementwise operators may be a part of the last two."""
MADE = re.compile(r"[A-Z][A-Za-z]*_\d+")
"""The name of a layer that OpenVINO has added; its number differs whenever the model is compiled."""
ADDED = re.compile(r"/(WithoutBiases|Dequantization\w+)$")
"""What OpenVINO adds to the name of a node."""


def measured_totals(graph: Any, runs: int) -> dict[str, float]:
    """Return the microseconds of all runs of each layer, by name, from means over a number of runs."""
    return {name: runs * float(info["execTimeMcs"]) for name, info, _ in _layers(graph) if _is_timed(info)}


def kernels_of(graph: Any, took: Mapping[str, float]) -> tuple[KernelRun, ...]:
    """Return the executed kernels.

    Args:
        graph: The executed graph, an ``openvino.Model``.
        took: Microseconds by name of the layer.
    """
    layers = (each for each in _layers(graph) if each[0] in took)
    return tuple(_kernel(place, info, op, took[name]) for place, (name, info, op) in enumerate(layers))


def fastest_of(windows: Sequence[Sequence[KernelRun]]) -> tuple[KernelRun, ...]:
    """Return the kernels of a model that was compiled several times, each with its least time.

    OpenVINO numbers layers that it makes, and the numbers differ, so that the kernels are joined by their place. A
    kernel below the resolution of its clock counts as not executed: windows with fewer kernels than others are left
    out.
    """
    most = max(map(len, windows))
    same = [each for each in windows if len(each) == most]
    return tuple(min(kernels, key=lambda run: run.microseconds) for kernels in zip(*same, strict=True))


def _layers(graph: Any) -> Iterator[tuple[str, dict[str, str], Any]]:
    """Yield the layers with their names and what OpenVINO tells of each."""
    for op in graph.get_ordered_ops():
        info = {key: value.astype(str) for key, value in op.get_rt_info().items()}
        if info.get("layerType", "") not in SKIPPED:
            yield op.get_friendly_name(), info, op


def _is_timed(info: Mapping[str, str]) -> bool:
    return info.get("execTimeMcs", UNTIMED) != UNTIMED


def _kernel(place: int, info: Mapping[str, str], op: Any, microseconds: float) -> KernelRun:
    """Return one executed layer, with a name that is the same whenever the model is compiled."""
    (inputs, reads), (outputs, writes) = _ends(op.inputs()), _ends(op.outputs())
    layer, factors = info["layerType"], reads[:2]
    members = tuple(dict.fromkeys(ADDED.sub("", ADDED.sub("", each)) for each in _names(info)))
    integers = layer in PRODUCTS and len(factors) == 2 and INTEGER.issuperset(factors)
    kind, macs = _operator(layer, reads, writes), _macs(layer, inputs, outputs)
    name = f"{place}: {next((each for each in members if not MADE.fullmatch(each)), layer)}"
    return KernelRun(name, "", kind, microseconds, macs, outputs, inputs, reads, writes, 0, members, integers)


def _names(info: Mapping[str, str]) -> list[str]:
    """Return the names of the layers of the model that a kernel computes."""
    return [each for each in info.get("originalLayersNames", "").split(",") if each]


def _ends(ports: Sequence[Any]) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Return the shapes and element types of inputs or outputs."""
    shapes = tuple(tuple(port.get_partial_shape().get_min_shape()) for port in ports)
    types = (port.get_element_type().get_type_name() for port in ports)
    return shapes, tuple(TYPES.get(name, name) for name in types)


def _operator(layer: str, reads: Sequence[str], writes: Sequence[str]) -> str:
    """Return the operator of a layer: conversions and changes of layout have the names that ONNX Runtime gives them."""
    if layer == "Reorder" and reads[:1] == writes[:1]:
        return "ReorderInput"
    if layer in ("Eltwise", "Subgraph") and INTEGER.issuperset(reads[:1]) == INTEGER.issuperset(writes[:1]):
        return layer
    if layer in CONVERTING:
        return "QuantizeLinear" if INTEGER.issuperset(writes[:1]) else "DequantizeLinear"
    return layer


def _macs(layer: str, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> int:
    """Return the multiply-accumulates of a layer; 0 for operators without products.

    Weights of a convolution are (M, C, *kernel), or (G, M/G, C/G, *kernel) with groups; those of a transposed one are
    (C, M, *kernel), or (G, C/G, M/G, *kernel).
    """
    if layer not in PRODUCTS or len(inputs) < 2 or not outputs:
        return 0
    x, w, y = inputs[0], inputs[1], outputs[0]
    if layer in ("Convolution", "Deconvolution"):
        grouped = len(w) - len(y)
        return math.prod(y if layer == "Convolution" else x) * math.prod(w[1 + grouped :])
    return math.prod(y) * x[-1]
