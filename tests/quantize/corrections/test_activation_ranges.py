"""Ranges of what an activation function reads: chosen by the error of its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from requant.calibration import Histogram, Precision, mse
from requant.calibration.model.session import Array
from requant.calibration.rules.ranges import auto
from requant.calibration.rules.result import COHERENT, least_result_error
from requant.quantize import Options
from requant.quantize.runtime.progress import silent
from requant.quantize.steps.prepare import prepare
from requant.quantize.steps.ranges import find_ranges

Function = Callable[[Array], Array]


def sigmoid(values: Array) -> Array:
    """Return the sigmoid, in float32 as it comes."""
    return np.asarray(0.5 * (1 + np.tanh(values / 2)))


FUNCTIONS: dict[str, Function] = {
    "sigmoid": sigmoid,
    "silu": lambda values: values * sigmoid(values),
    "tanh": np.tanh,
    "same": lambda values: values,
}
VALUES = np.random.default_rng(0).standard_normal(20_000).astype(np.float32) * 8 - 4


def error_of(values: Array, function: Function, span: tuple[float, float], precision: Precision) -> float:
    """Return the mean squared error of results on the values themselves, with the mean error counted as the rule does."""
    scale, zero = precision.params(*span)
    near = (np.clip(np.rint(values / np.float32(scale)) + zero, 0, precision.top) - zero) * np.float32(scale)
    error = function(near.astype(np.float32)).astype(np.float64) - function(values)
    return float(np.mean(error * error) + (COHERENT - 1) * np.mean(error) ** 2)


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("name", ["sigmoid", "silu", "tanh"])
def test_a_range_by_the_result_errs_less_on_the_values_than_one_by_the_values(name: str, symmetric: bool) -> None:
    histogram, precision = Histogram.of(VALUES), Precision(symmetric=symmetric)
    found = least_result_error(histogram, FUNCTIONS[name], precision)
    assert histogram.lo <= found[0] <= found[1] <= histogram.hi
    plain = auto(histogram, None, precision)
    assert error_of(VALUES, FUNCTIONS[name], found, precision) < error_of(VALUES, FUNCTIONS[name], plain, precision)


def test_where_the_function_is_flat_the_range_ends() -> None:
    low, high = least_result_error(Histogram.of(VALUES), sigmoid, Precision())
    assert -12 < low < 0 < high < 12  # a sigmoid is within 1e-5 of its ends there; values reach beyond 30


def test_where_nothing_is_done_to_the_values_it_is_the_least_error_of_the_values() -> None:
    histogram, precision = Histogram.of(VALUES), Precision()
    found = least_result_error(histogram, FUNCTIONS["same"], precision)
    errors = [error_of(VALUES, FUNCTIONS["same"], span, precision) for span in (found, mse(histogram, precision))]
    assert errors[0] <= 1.02 * errors[1]  # places 1.4 % apart: the error, least in between, has moved by less than 2 %


@pytest.mark.parametrize("values", [np.zeros(4), np.full(4, -3.0), np.array([1e-30, 3e38]), np.array([-5.0, -4.0])])
def test_odd_values_have_a_range_within_their_extremes(values: Array) -> None:
    histogram = Histogram.of(values.astype(np.float32))
    low, high = least_result_error(histogram, sigmoid, Precision())
    assert histogram.lo <= low <= high <= histogram.hi


TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 8, 4, 4] x) => (float[1, 8, 4, 4] y, float[1, 8, 4, 4] shown) {
    silu = Conv (x, w)
    s1 = Sigmoid (silu)
    a = Mul (silu, s1)
    alone = Conv (a, w)
    b = HardSigmoid <alpha = 0.25> (alone)
    mixed = Conv (b, w)
    c = Tanh (mixed)
    also = Conv (mixed, w)
    d = Mul (c, also)
    other = Conv (d, w)
    s2 = Sigmoid (other)
    e = Mul (d, s2)
    relu = Conv (e, w)
    f = Relu (relu)
    shown = Conv (f, w)
    s3 = Sigmoid (shown)
    y = Conv (s3, w)
}"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model in which tensors are read by activation functions in many ways."""
    proto = onnx.parser.parse_model(TEXT)
    weights = np.random.default_rng(0).standard_normal((8, 8, 1, 1)).astype(np.float32) * 4
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def ranges_of(model: Path, **options: Any) -> dict[str, tuple[float, float]]:
    random = np.random.default_rng(1)
    data = [{"x": random.standard_normal((1, 8, 4, 4)).astype(np.float32)} for _ in range(4)]
    return dict(find_ranges(prepare(model, data, Options(**options), model.parent, silent)).ranges)


def test_only_tensors_that_nothing_else_reads_have_their_range_from_a_function(model: Path) -> None:
    plain, found = ranges_of(model, corrections=()), ranges_of(model)
    assert {name for name in plain if plain[name] != found[name]} == {"silu", "alone", "other"}


@pytest.mark.parametrize(
    "options",
    [{"calibration": "mse"}, {"effort": "low"}, {"corrections": ("means",)}],
    ids=["another-rule", "low-effort", "others-asked-for"],
)
def test_a_rule_that_was_asked_for_is_kept(model: Path, options: dict[str, Any]) -> None:
    without = (
        {**options, "corrections": ()} if options.get("effort") != "low" else {**options, "corrections": ("means",)}
    )
    assert ranges_of(model, **options) == ranges_of(model, **without)


def test_a_range_of_the_users_is_kept(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[tensors.silu]\nrange = [-5.0, 5.0]\n")
    assert ranges_of(model, overrides=tmp_path / "own.toml")["silu"] == (-5.0, 5.0)


def test_the_function_is_that_of_the_model_with_its_attributes(tmp_path: Path) -> None:
    """With alpha = 0.5 a HardSigmoid is flat beyond 1, with the default of 0.2 beyond 2.5."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        net (float[1, 8, 16, 16] x) => (float[1, 8, 16, 16] y) {
            wide = Conv (x, w)
            b = HardSigmoid <alpha = 0.5> (wide)
            y = Conv (b, w)
        }""")
    proto.graph.initializer.append(numpy_helper.from_array(10 * np.eye(8, dtype=np.float32)[:, :, None, None], "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    x = np.random.default_rng(1).standard_normal((1, 8, 16, 16)).astype(np.float32)
    found = find_ranges(prepare(tmp_path / "m.onnx", [{"x": x}], Options(), tmp_path, silent)).ranges
    assert -2.5 < found["wide"][0] < -0.9
    assert 0.9 < found["wide"][1] < 2.5
