"""The rules of operators: how an error of the inputs becomes an error of the outputs.

`benchmarks.error_bounds` applies the rule of each operator in a graph. With x = x' + dx and w = w' + dw, where x' and
w' belong to the INT8 model:

- sum of products:    |dy| <= sum |dx| (|w'| + |dw|) + sum |x'| |dw| + |db|
- a + b, a * b:       |da| + |db|, |da| |b'| + |a'| |db| + |da| |db|
- max, mean, a move of values: the same operator on the bounds
- f with |f'| <= L:   L |dx|

A sum of n products also has the rounding of float results, n * eps * sum |w| |x|.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from requant.calibration.model.session import Array

Values: TypeAlias = Sequence[Array | None]

STORED = re.compile(r"/(u?int8|int32)(_\d+)?$")
"""The end of the name of a constant that the emitter stored in integers."""
PAIR = re.compile(r"/quantize(_\d+)?$")
"""The end of the name of a QuantizeLinear that the emitter inserted."""
TIE = 2.0**-14
"""The float32 rounding error of a quotient of up to 255 steps: 255 * 2 * eps. It can change how a half is rounded."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of difference between two models.

    Attributes:
        pair: The error that a quantize/dequantize pair adds, in steps.
        weight: The error of a stored constant, in steps.
        exact: Whether a pair maps equal values to equal values in both models.
    """

    pair: float
    weight: float
    exact: bool


FROM_FLOAT = Kind(pair=0.5 + TIE, weight=0.5 + TIE, exact=False)
"""INT8 against float. Calibration has seen the float values, so they lie in the range: clipping cannot add an error."""
BY_RUNTIME = Kind(pair=1.0, weight=0.0, exact=True)
"""One INT8 model run by different kernels. A difference from rounding can move a value to a neighbouring step."""


@dataclass(frozen=True, slots=True)
class Site:
    """A node with its inputs and outputs in one run.

    Attributes:
        node: The node.
        values: The inputs; None for a missing input, or an input that is not a tensor.
        errors: The bound of the error of each input, in the shape of the input.
        peaks: The largest magnitude that a pair allows for each input; 0 without a pair.
        results: The outputs.
        opsets: The operator sets of the model.
        kind: The kind of difference.
    """

    node: onnx.NodeProto
    values: Values
    errors: Values
    peaks: Sequence[float]
    results: Values
    opsets: Sequence[onnx.OperatorSetIdProto]
    kind: Kind

    def run(self, inputs: Values, node: onnx.NodeProto | None = None) -> list[Array]:
        """Run the node, or another node, on these inputs."""
        return run_node(node or self.node, inputs, self.opsets)

    def number(self, name: str, default: float) -> float:
        """Return the value of a numeric attribute."""
        attribute = next((a for a in self.node.attribute if a.name == name), None)
        return default if attribute is None else float(helper.get_attribute_value(attribute))

    def text(self, name: str, default: str) -> str:
        """Return the value of a text attribute."""
        return next((a.s.decode() for a in self.node.attribute if a.name == name), default)


Rule: TypeAlias = Callable[[Site], Sequence[Array]]


def run_node(node: onnx.NodeProto, inputs: Values, opsets: Sequence[onnx.OperatorSetIdProto]) -> list[Array]:
    """Run one node in the runtime."""
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    del alone.input[:], alone.output[:]
    alone.input.extend("" if array is None else f"in{index}" for index, array in enumerate(inputs))
    alone.output.extend(f"out{index}" if name else "" for index, name in enumerate(node.output))
    feed = {f"in{index}": array for index, array in enumerate(inputs) if array is not None}
    read = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feed.items()
    ]
    written = [onnx.ValueInfoProto(name=name) for name in alone.output if name]
    graph = helper.make_graph([alone], "one_node", read, written)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return [np.asarray(array) for array in open_model(model.SerializeToString(), optimize=False).run(None, feed)]


def open_model(model: Path | bytes, *, optimize: bool) -> ort.InferenceSession:
    """Open a session on one thread, with or without the optimizations of the runtime."""
    options = ort.SessionOptions()
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def eps(array: Array) -> float:
    """Return the relative rounding error of the element type."""
    return float(np.finfo(array.dtype if array.dtype.kind == "f" else np.float32).eps)


def _wide(array: Array | None) -> Array:
    """Return the absolute values of an array as float64."""
    assert array is not None
    return np.abs(array.astype(np.float64))


def _float32(array: Array) -> Array:
    """Return a bound as float32, rounded up."""
    return np.nextafter(array.astype(np.float32), np.float32(np.inf))


def _lengths(site: Site) -> int:
    """Return the largest number of products in a sum of a Conv, ConvTranspose or Gemm."""
    weight = site.values[1]
    assert weight is not None
    return int(weight.size // max(1, min(weight.shape[:2]))) + 1


def _products(site: Site) -> list[Array]:
    """Bound a Conv, ConvTranspose or Gemm: sums of products with a weight and a bias."""
    node = onnx.NodeProto()
    node.CopyFrom(site.node)
    for attribute in node.attribute:
        if attribute.name in ("alpha", "beta"):
            attribute.f = abs(attribute.f)
    x, w, *rest = (None if v is None else np.abs(v) for v in site.values)
    dx, dw, *drest = (None if e is None else _float32(e) for e in site.errors)
    assert w is not None and dw is not None and dx is not None
    none = [None if r is None else np.zeros_like(r) for r in rest]
    first, second = site.run([dx, w + dw, *none], node)[0], site.run([x, dw, *drest], node)[0]
    size = site.run([x, w, *rest], node)[0]
    n = _lengths(site) + 2
    total = first.astype(np.float64) + second + n * eps(size) * size
    return [total * (1 + n * eps(size)) + _corrected(site, _wide(site.errors[1]))]


def _corrected(site: Site, dw: Array) -> Array | float:
    """Bound the bias correction: it removes the mean error of weight rounding, sum dw * mean x."""
    if site.kind.exact or not site.peaks[0] or not dw.any():
        return 0.0
    if site.node.op_type == "Gemm":
        return np.asarray(dw.sum(axis=1 if site.number("transB", 0) else 0) * site.peaks[0])
    if site.node.op_type != "Conv":
        return 0.0
    shift = dw.reshape(len(dw), -1).sum(axis=1) * site.peaks[0]
    return np.asarray(shift.reshape(-1, *[1] * (dw.ndim - 2)))


def _matmul(site: Site) -> list[Array]:
    x, w, dx, dw = (_wide(array) for array in (*site.values[:2], *site.errors[:2]))
    return [_matrix_product(x, w, dx, dw)]


def _matrix_product(x: Array, w: Array, dx: Array, dw: Array) -> Array:
    """Bound a matrix product of float32."""
    n = x.shape[-1] + 2
    exact = np.matmul(x, w)
    return np.asarray(np.matmul(dx, w + dw) + np.matmul(x, dw) + n * np.finfo(np.float32).eps * exact)


def _dynamic_matmul(site: Site) -> list[Array]:
    """Bound a DynamicQuantizeMatMul.

    A step of x is 1/255 of its range, which includes zero. Clipping can add half a step.
    """
    x, stored, scale, zero = site.values[:4]
    assert x is not None and stored is not None and scale is not None
    step = (max(float(x.max(initial=0)), 0.0) - min(float(x.min(initial=0)), 0.0)) / 255
    w = np.abs((stored.astype(np.float64) - (0 if zero is None else zero.astype(np.float64))) * scale)
    dx = _wide(site.errors[0])
    if site.kind.exact:
        moved = 2.0 if dx.any() else 0.0  # an error of x also changes the range
        return [_matrix_product(np.abs(x), w, dx * 2 + moved * step, np.zeros_like(w))]
    dw = np.broadcast_to(np.abs(scale.astype(np.float64)) * site.kind.weight, w.shape)
    dw = dw if STORED.search(site.node.input[1]) else np.zeros_like(w)
    return [_matrix_product(np.abs(x).astype(np.float64), w, dx + step * (1 + TIE), dw)]


def _integer_matmul(site: Site) -> list[Array]:
    """Bound a MatMulIntegerToFloat: the product of two dequantized tensors, and a bias."""
    a, b, a_scale, b_scale, a_zero, b_zero = (*site.values, *[None] * 6)[:6]
    scales = (_wide(a_scale), _wide(b_scale))
    x, w = (_wide(q) if z is None else np.abs(q.astype(np.float64) - z) for q, z in ((a, a_zero), (b, b_zero)))  # type: ignore[union-attr]
    dx, dw = (_wide(error) * scale for error, scale in zip(site.errors[:2], scales, strict=True))
    bound = _matrix_product(x * scales[0], w * scales[1], dx, dw)
    return [bound + (_wide(site.errors[6]) if len(site.errors) > 6 and site.errors[6] is not None else 0.0)]


def _same_on_bounds(*inputs: int) -> Rule:
    """Return the rule of operators that move values, or take a maximum or a mean: run the operator on the bounds.

    Args:
        inputs: The inputs that are replaced by their bounds; none means all inputs.
    """

    def rule(site: Site) -> list[Array]:
        chosen = inputs or range(len(site.values))
        swapped = [
            _float32(error) if index in chosen and error is not None and value is not None else value
            for index, (value, error) in enumerate(zip(site.values, site.errors, strict=True))
        ]
        if site.node.op_type == "Pad" and len(swapped) > 2:
            swapped[2] = None
        node = onnx.NodeProto()
        node.CopyFrom(site.node)
        if site.node.op_type == "ReduceMin":
            node.op_type = "ReduceMax"
        elif site.node.op_type == "Pad":
            kept = [a for a in node.attribute if a.name != "value"]
            del node.attribute[:]
            node.attribute.extend(kept)
        arrays = site.run(swapped, node)
        first = [array.astype(np.float64) for array in arrays[:1]]
        return first if len(node.output) == 1 else _per_output(site, arrays)

    return rule


def _averaged(site: Site) -> list[Array]:
    """Bound a mean or a sum: the operator on the bounds, and the rounding of a sum of all elements."""
    x = site.values[0]
    assert x is not None
    (error,) = _same_on_bounds(0)(site)
    size = site.run([np.abs(x), *site.values[1:]])[0].astype(np.float64)
    return [error + x.size * eps(x) * size]


def _per_output(site: Site, found: list[Array]) -> list[Array]:
    """Return the bounds of several outputs. The outputs of a Split are values; other second outputs are indices.

    The bound of indices is infinite.
    """
    named = [name for name in site.node.output if name]
    moves = site.node.op_type == "Split"
    return [
        array.astype(np.float64) if moves or i == 0 else np.full(array.shape, np.inf)
        for i, array in enumerate(found[: len(named)])
    ]


def _added(site: Site) -> list[Array]:
    return [_broadcast_sum(_wide(error) for error in site.errors)]


def _broadcast_sum(arrays: Iterable[Array]) -> Array:
    total: Array = np.zeros(())
    for array in arrays:
        total = total + array
    return total


def _greatest(site: Site) -> list[Array]:
    """Bound a Max or Min: the largest error of the inputs."""
    total: Array = np.zeros(())
    for error in site.errors:
        total = np.maximum(total, _wide(error))
    return [total]


def _multiplied(site: Site) -> list[Array]:
    a, b, da, db = (_wide(array) for array in (*site.values[:2], *site.errors[:2]))
    return [da * b + a * db + da * db]


def _divided(site: Site) -> list[Array]:
    a, b, da, db = (_wide(array) for array in (*site.values[:2], *site.errors[:2]))
    with np.errstate(divide="ignore", invalid="ignore"):
        return [np.where(b > db, (da + a / b * db) / (b - db), np.where(da + db > 0, np.inf, 0.0))]


def _first(slope: float | Callable[[Site], float]) -> Rule:
    """Return the rule of element-wise functions of the first input whose slope is bounded."""
    return lambda site: [_wide(site.errors[0]) * (slope(site) if callable(slope) else slope)]


def _monotone(site: Site) -> list[Array]:
    """Bound a monotone element-wise function by its values at both ends of the interval."""
    x, error, y = site.values[0], site.errors[0], site.results[0]
    assert x is not None and error is not None and y is not None
    ends = [site.run([(x.astype(np.float64) + shift).astype(x.dtype)])[0] for shift in (_wide(error), -_wide(error))]
    return [np.maximum(*(np.abs(end.astype(np.float64) - y) for end in ends)) + 2 * eps(y) * _wide(y)]


def _cast(site: Site) -> list[Array]:
    """Bound a Cast: rounding to integers can add 1, and a bool can flip."""
    error, result = _wide(site.errors[0]), site.results[0]
    assert result is not None
    return [error if result.dtype.kind == "f" else np.where(error > 0, error + 1, 0.0)]


def _scattered(site: Site) -> Sequence[Array]:
    """Bound a ScatterElements or ScatterND: the operator on the bounds."""
    if site.text("reduction", "none") not in ("none", "add", "max"):
        raise ValueError("no bound for a product or a minimum")
    return _same_on_bounds(0, 2)(site)


def _spread(slope: float) -> Rule:
    """Return the rule of functions whose results depend on all elements: slope times the largest error."""
    return lambda site: [np.full(_wide(site.results[0]).shape, slope * _wide(site.errors[0]).max(initial=0))]


def _slopes(site: Site) -> list[Array]:
    """Bound a PRelu: slope * x below zero, x above zero."""
    x, slope, dx, dslope = (_wide(array) for array in (*site.values[:2], *site.errors[:2]))
    return [dx * np.maximum(slope + dslope, 1.0) + x * dslope]


def _normalised(site: Site) -> list[Array]:
    """Bound a BatchNormalization with constant statistics: gamma / sqrt(var + eps) times the error, along axis 1."""
    gamma, var = _wide(site.values[1]), site.values[4]
    assert var is not None
    gain = gamma / np.sqrt(var.astype(np.float64) + site.number("epsilon", 1e-5))
    error = _wide(site.errors[0])
    return [error * gain.reshape(-1, *[1] * (error.ndim - 2))]


def _quantized(site: Site) -> list[Array]:
    """Bound a QuantizeLinear, in steps: an inserted pair adds half a step, a pair of the input model up to one step."""
    scale = _wide(site.values[1])
    error = _wide(site.errors[0])
    steps = error / _along_axis(site, scale, error)
    ours = PAIR.search(site.node.name) is not None
    more = site.kind.pair if ours else 1.0
    if site.kind.exact or not ours:
        return [np.where(error > 0, steps + more, 0.0)]
    return [steps + more]


def _dequantized(site: Site) -> list[Array]:
    scale, error = _wide(site.values[1]), _wide(site.errors[0])
    return [error * _along_axis(site, scale, error)]


def _along_axis(site: Site, scale: Array, like: Array) -> Array:
    """Reshape scales so that they broadcast to a tensor."""
    if scale.ndim == 0 or scale.size == 1:
        return scale.reshape(())
    if scale.ndim == like.ndim:  # blocked
        return np.asarray(np.broadcast_to(scale.max(), like.shape))
    axis = int(site.number("axis", 1)) % like.ndim
    return scale.reshape([-1 if i == axis else 1 for i in range(like.ndim)])


MOVES = (
    "CenterCropPad Compress DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad Reshape "
    "ReverseSequence Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze"
).split()
SUMS = "AveragePool Col2Im GlobalAveragePool LpPool ReduceL1 ReduceL2 ReduceMean ReduceSum".split()
MONOTONE = "Acos Acosh Asin Asinh Atan Atanh Ceil Exp Floor Log Round Sign Sinh Sqrt ThresholdedRelu".split()
RULES: dict[str, Rule] = {
    **dict.fromkeys(("Conv", "FusedConv", "ConvTranspose", "Gemm"), _products),
    **dict.fromkeys(MOVES, _same_on_bounds(0)),
    **dict.fromkeys(("MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin"), _same_on_bounds(0)),
    **dict.fromkeys(SUMS, _averaged),
    **dict.fromkeys(("Scatter", "ScatterElements", "ScatterND"), _scattered),
    "MaxUnpool": _same_on_bounds(0),
    "Concat": _same_on_bounds(),
    "Where": _same_on_bounds(1, 2),
    "MatMul": _matmul,
    "DynamicQuantizeMatMul": _dynamic_matmul,
    "MatMulIntegerToFloat": _integer_matmul,
    **dict.fromkeys(("Add", "Sub", "Sum"), _added),
    **dict.fromkeys(("Max", "Min"), _greatest),
    "Mul": _multiplied,
    "Div": _divided,
    **dict.fromkeys(
        ("Relu", "Clip", "Abs", "Neg", "Tanh", "Softplus", "Softsign", "Dropout", "Sin", "Cos"), _first(1.0)
    ),
    **dict.fromkeys(MONOTONE, _monotone),
    "Cast": _cast,
    "Sigmoid": _first(0.25),
    "LeakyRelu": _first(lambda site: max(1.0, abs(site.number("alpha", 0.01)))),
    "Elu": _first(lambda site: max(1.0, abs(site.number("alpha", 1.0)))),
    "HardSigmoid": _first(lambda site: abs(site.number("alpha", 0.2))),
    "Selu": _first(lambda site: site.number("gamma", 1.0507) * max(1.0, site.number("alpha", 1.67326))),
    "Erf": _first(1.1284),  # 2 / sqrt(pi)
    "HardSwish": _first(1.5),
    "Gelu": _first(1.13),
    "PRelu": _slopes,
    "Softmax": _spread(1.0),
    "LogSoftmax": _spread(2.0),
    "TopK": _spread(1.0),  # the k-th largest value changes at most by the largest error
    "BatchNormalization": _normalised,
    "QuantizeLinear": _quantized,
    "DequantizeLinear": _dequantized,
}
LIMITED = {"Resize": ("nearest", "linear"), "GridSample": ("linear", "bilinear", "nearest")}
"""Modes in which an operator returns values of its input, or means of them."""
ROUNDED = (_products, _matmul)
"""Rules that also bound the rounding of the outputs."""


def rule_of(site: Site) -> Rule | None:
    """Return the rule of an operator; None if it has none."""
    operator = site.node.op_type
    if operator not in LIMITED:
        return RULES.get(operator)
    mode = site.text("mode", "linear" if operator == "GridSample" else "nearest")
    return _same_on_bounds(0) if mode in LIMITED[operator] else None
