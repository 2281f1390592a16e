"""Curves: lines in segments, near to the function, and equal to it where it bends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from requant.quantize.kernels.chains import Chain
from requant.quantize.kernels.curves import LARGEST, SEGMENTS, SHARE, bends, curve_of
from requant.transforms.graphs.queries import constant

Array = NDArray[np.float64]
TEXT = """<ir_version: 10, opset_import: ["" : 22]>
g (uint8[N] q) => (uint8[N] r) {{ d = DequantizeLinear(q, s, z) {nodes} r = QuantizeLinear(g, p, m) }}"""
SILU = "[a] f = Sigmoid(d) f8 = QuantizeLinear(f, h, n) f9 = DequantizeLinear(f8, h, n) g = Mul(d, f9)"
FUNCTIONS: dict[str, tuple[str, Callable[[Array], Array], int]] = {
    "SiLU": (SILU, lambda v: v / (1 + np.exp(-v)), 0),
    "Sigmoid": ("g = Sigmoid(d)", lambda v: 1 / (1 + np.exp(-v)), 0),
    "Tanh": ("g = Tanh(d)", np.tanh, 0),
    "LeakyRelu": ("g = LeakyRelu <alpha = 0.1> (d)", lambda v: np.maximum(v, 0.1 * v), 1),
    "HardSwish": ("g = HardSwish(d)", lambda v: v * np.clip(v / 6 + 0.5, 0, 1), 2),
    "HardSigmoid": ("g = HardSigmoid(d)", lambda v: np.clip(0.2 * v + 0.5, 0, 1), 2),
}
RANGES = [(-4.0, 4.0), (-6.0, 13.0), (-1.0, 0.5), (0.0, 5.0)]


def made(nodes: str, low: float, high: float, results: Array) -> tuple[ir.Model, Chain, float]:
    """Return a model of a function between uint8 tensors with these ranges, its chain, and the scale of the result."""
    proto = onnx.parser.parse_model(TEXT.format(nodes=nodes))
    least, most = min(results.min(), 0.0), max(results.max(), 0.0)
    scales = {"s": (high - low) / 255, "p": (most - least) / 255, "h": 1 / 256}
    zeros = {"z": -low / scales["s"], "m": -least / scales["p"], "n": 0.0}
    read = {name for node in proto.graph.node for name in node.input}
    arrays = {name: np.asarray(value, np.float32) for name, value in scales.items()}
    arrays |= {name: np.asarray(round(value), np.uint8) for name, value in zeros.items()}
    proto.graph.initializer.extend(numpy_helper.from_array(arrays[name], name) for name in arrays if name in read)
    model = ir.from_proto(proto)
    return model, Chain(model.graph.inputs[0], tuple(model.graph)), scales["p"]


def number(model: ir.Model, name: str) -> float:
    """Return a constant of a model."""
    tensor = constant(model.graph.initializers[name])
    assert tensor is not None
    return float(tensor.numpy())


def steps(function: Callable[[Array], Array], values: Array, model: ir.Model) -> Array:
    """Return the function in steps of the result, clipped to its integers."""
    scale, zero = (number(model, name) for name in ("p", "m"))
    return np.clip(function(values) / scale + zero, 0, 255)


@pytest.mark.parametrize("span", RANGES, ids=str)
@pytest.mark.parametrize(("nodes", "function", "most"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_curve_is_near_to_its_function(
    nodes: str, function: Callable[[Array], Array], most: int, span: tuple[float, float]
) -> None:
    low, high = span
    model, chain, _ = made(nodes, low, high, function(np.linspace(low, high, 999)))
    curve = curve_of(model, chain)
    assert curve is not None
    assert curve.lines.shape == (2, SEGMENTS)
    origin, width = curve.grid
    zero = number(model, "z")
    low, high = (-zero / 255 * (high - low), (255 - zero) / 255 * (high - low))  # that of the integers
    assert origin <= low + width / 100
    assert origin + SEGMENTS * width >= high - width / 100
    values = np.linspace(low, high, 20_011)
    half = np.abs(np.gradient(steps(function, values, model), values)) * (high - low) / 255 / 2
    differences = np.abs(np.clip(curve(values) - 1 / 2, 0, 255) - steps(function, values, model))
    # a little more than promised, between the samples
    assert (differences <= 1.1 * (LARGEST + SHARE * half) + 1e-3).all()


@pytest.mark.parametrize(("nodes", "function", "most"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_bends_are_found_where_they_are(nodes: str, function: Callable[[Array], Array], most: int) -> None:
    values = np.linspace(-6, 7, 1536)
    found = bends(values, function(values) / 0.05)
    expected = {"LeakyRelu": [0.0], "HardSwish": [-3.0, 3.0], "HardSigmoid": [-2.5, 2.5]}
    names = {name: row[0] for name, row in FUNCTIONS.items()}
    (name,) = (name for name, text in names.items() if text == nodes)
    assert len(found) == most
    np.testing.assert_allclose(found, expected.get(name, []), atol=1e-3)


@pytest.mark.parametrize(
    ("nodes", "span"),
    [("a = Abs(d) b = LeakyRelu(a) c = HardSigmoid(d) e = Mul(b, c) g = Abs(e)", 7.0), ("g = Sigmoid(d)", 200.0)],
    ids=["too many bends", "too steep"],
)
def test_functions_without_a_near_curve_have_none(nodes: str, span: float) -> None:
    model, chain, _ = made(nodes, -span, span, np.asarray([0.0, 1.0]))
    assert curve_of(model, chain) is None
