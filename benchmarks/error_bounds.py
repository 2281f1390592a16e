"""Bounds of the error of an INT8 model, derived from the scales in its graph.

A bound is computed for each tensor of one run, in the order of the graph. A quantize/dequantize pair adds an error of
half a step. Each int8 weight has an error of half a step. The rule of an operator (`benchmarks.error_rules`) computes
the errors of its outputs from the errors of its inputs.

Rounding of float results adds n * eps * sum |w| |x| for a sum of n products, and eps times the result for other
operators. An operator without a rule has exact outputs if its inputs are exact; otherwise the bound is infinite, which
means unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.error_rules import MOVES, PAIR, ROUNDED, STORED, Kind, Site, eps, open_model, rule_of
from requant.calibration.model.session import Array


@dataclass
class _State:
    """Values, error bounds and peaks, by name of the tensor."""

    values: dict[str, Array]
    errors: dict[str, Array] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)


def bounds(
    model: onnx.ModelProto, values: Mapping[str, Array], mine: Callable[[str], bool], kind: Kind
) -> dict[str, Array]:
    """Return a bound for each tensor of an INT8 model: the largest difference from the other model, in one run.

    Args:
        model: The INT8 model.
        values: The tensors of the run: inputs, initializers and results.
        mine: Whether the emitter made this name. Other names belong to the input model.
        kind: The kind of difference.
    """
    state = _State(dict(values))
    for tensor in model.graph.initializer:
        if STORED.search(tensor.name) and mine(tensor.name):
            state.errors[tensor.name] = np.full(tuple(tensor.dims), kind.weight)
    for node in model.graph.node:
        _visit(node, model, state, kind)
    return state.errors


def _visit(node: onnx.NodeProto, model: onnx.ModelProto, state: _State, kind: Kind) -> None:
    """Add the bounds of the results of one node to `state`."""
    found = [state.values.get(name) for name in node.input]
    site = Site(
        node,
        found,
        [None if v is None else state.errors.get(n, np.zeros(v.shape)) for n, v in zip(node.input, found, strict=True)],
        [state.peaks.get(name, 0.0) for name in node.input],
        [state.values.get(name) for name in node.output],
        model.opset_import,
        kind,
    )
    errors = _passed_on(site, state)
    for name, value, error in zip(node.output, site.results, errors, strict=False):
        if not name or value is None:
            continue
        error = np.broadcast_to(np.where(np.isnan(error), np.inf, error), value.shape)
        if value.dtype.kind == "f":
            error = error + np.where(np.isfinite(value), 2 * eps(value) * np.abs(value.astype(np.float64)), 0.0)
        state.errors[name] = error
    if node.op_type == "DequantizeLinear":
        state.peaks[node.output[0]] = _peak(found[0], found[1], found[2] if len(found) > 2 else None)


def _peak(stored: Array | None, scale: Array | None, zero: Array | None) -> float:
    """Return the largest magnitude that a dequantized 8-bit tensor can have; 0 for other tensors."""
    if stored is None or scale is None or stored.dtype not in (np.uint8, np.int8):
        return 0.0
    info, point = np.iinfo(stored.dtype), np.zeros(1) if zero is None else zero.astype(np.float64)
    return float(np.max(scale)) * max(info.max - float(point.min()), float(point.max()) - info.min)


def _passed_on(site: Site, state: _State) -> Sequence[Array]:
    """Return the bounds of the results, without the rounding of the results."""
    node = site.node
    off = [e for e in site.errors if e is not None and e.any()] + _captured(node, state)
    quantizes = any(_quantizes(a.g) for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)
    starts = node.op_type == "QuantizeLinear" and PAIR.search(node.name) is not None
    starts = starts or node.op_type.startswith("DynamicQuantize")
    rule = rule_of(site)
    if not off and not quantizes and not starts and rule not in ROUNDED:
        return [np.zeros(() if v is None else v.shape) + _sum_rounding(site, v) for v in site.results]
    unknown = [np.full(() if v is None else v.shape, np.inf) for v in site.results]
    if rule is None or any(v is None and name for name, v in zip(node.input, site.values, strict=True)):
        return unknown
    try:
        with np.errstate(all="ignore"):
            errors = rule(site)
            return [*errors, *unknown[len(errors) :]]
    except Exception:  # noqa: BLE001 - exceptions of the runtime have no common base class; it may reject the bounds
        return unknown


def _sum_rounding(site: Site, result: Array | None) -> float:
    """Bound the rounding of an operator with exact inputs that may sum all its inputs: n * eps * max."""
    if result is None or result.dtype.kind != "f" or site.node.op_type in MOVES or not result.size:
        return 0.0
    finite = [
        np.abs(v[np.isfinite(v)]).max(initial=0)
        for v in (*site.values, *site.results)
        if v is not None and v.dtype.kind == "f"
    ]
    n = max((v.size for v in site.values if v is not None), default=1)
    return float(n * eps(result) * max(map(float, finite), default=0.0))


def _captured(node: onnx.NodeProto, state: _State) -> list[Array]:
    """Return the nonzero bounds of the outer tensors that the bodies of a node read."""
    names = {name for a in node.attribute if a.type == onnx.AttributeProto.GRAPH for n in a.g.node for name in n.input}
    return [state.errors[name] for name in names if name in state.errors and state.errors[name].any()]


def _quantizes(graph: onnx.GraphProto) -> bool:
    """Whether a body contains a quantizing operator."""
    inside = (a.g for n in graph.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH)
    return any("Quantize" in n.op_type for n in graph.node) or any(map(_quantizes, inside))


def run_all(model: onnx.ModelProto, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Run a model without optimizations, and return every tensor of its main graph."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    have = {output.name for output in copy.graph.output}
    names = dict.fromkeys(name for node in copy.graph.node for name in node.output if name and name not in have)
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_model(copy.SerializeToString(), optimize=False)
    fetched = [output.name for output in session.get_outputs() if output.name and output.type.startswith("tensor(")]
    results = dict(zip(fetched, session.run(fetched, dict(feed)), strict=True))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in copy.graph.initializer}
    return {**constants, **feed, **{name: np.asarray(value) for name, value in results.items()}}
