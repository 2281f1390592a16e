"""The arithmetic of scales and zero points, for any range that float32 can hold."""

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.transforms.functions import add_functions
from requant.transforms.qparams import (
    FLOAT_MAX,
    TINY,
    QParams,
    asymmetric_u8,
    dequantize,
    fit_bias,
    quantize,
    quantize_bias,
    symmetric_s8,
)

EPS = float(np.finfo(np.float32).eps)

HUGE = FLOAT_MAX / 2  # the least and greatest step may lie half a step outside the range, and must be finite too

RANGES = [
    (0.0, 6.0),
    (-1.0, 1.0),
    (0.5, 6.0),
    (-6.0, -0.5),
    (3.0, 3.0),
    (-3.0, -3.0),
    (0.0, 0.0),
    (-0.5, 254.5),
    (-1.5, 253.5),
    (-1e-38, 1e-38),
    (0.0, 1e-45),
    (0.0, 254 * TINY),
    (0.0, 255 * TINY),
    (-HUGE, HUGE),
    (0.0, HUGE),
    (-HUGE, 0.0),
]
finite = st.floats(-HUGE, HUGE, width=32)
ranges = st.one_of(
    st.tuples(finite, finite), st.tuples(st.floats(-10, 10, width=32), st.floats(-10, 10, width=32))
).map(lambda bounds: (min(bounds), max(bounds)))
each_range = pytest.mark.parametrize("bounds", RANGES, ids=str)


def points(lo: float, hi: float) -> npt.NDArray[np.float32]:
    """Values across a range, its ends among them, none of them outside."""
    between = [lo * (1 - part) + hi * part for part in np.linspace(0, 1, 101)]
    return np.clip(np.array([lo, hi, *between], np.float32), np.float32(lo), np.float32(hi))


def check_half_a_step(lo: float, hi: float) -> None:
    """Inside the range, at most half a step is lost.

    The slack: the scale is rounded three times and zero_point and x / scale once each, all of them numbers of at most
    255.5 steps, and so is the product of steps and scale.
    """
    params, values = asymmetric_u8(lo, hi), points(lo, hi)
    scale = float(params.scale)
    error = np.abs(dequantize(quantize(values, params), params).astype(np.float64) - values)
    assert np.max(error) <= scale / 2 + 6 * EPS * 255.5 * scale


def check_zero_and_scale(lo: float, hi: float) -> None:
    params = asymmetric_u8(lo, hi)
    assert params.scale.dtype == np.float32
    assert params.scale.shape == params.zero_point.shape == ()
    assert params.zero_point.dtype == np.uint8
    assert TINY <= float(params.scale) < np.inf
    zero = quantize(np.zeros(1, np.float32), params)
    assert zero[0] == params.zero_point
    assert dequantize(zero, params)[0] == 0


@each_range
def test_special_ranges(bounds: tuple[float, float]) -> None:
    check_half_a_step(*bounds)
    check_zero_and_scale(*bounds)


@given(ranges)
@settings(deadline=None)
def test_any_range(bounds: tuple[float, float]) -> None:
    check_half_a_step(*bounds)
    check_zero_and_scale(*bounds)


def test_a_range_that_zero_bounds_uses_every_step() -> None:
    up, down = asymmetric_u8(0, 6), asymmetric_u8(-6, 0)
    assert (int(up.zero_point), int(down.zero_point)) == (0, 255)
    assert list(up.range) == pytest.approx([0, 6], rel=EPS)
    assert list(down.range) == pytest.approx([-6, 0], rel=EPS)


def test_a_range_beside_zero_is_widened_to_zero() -> None:
    assert asymmetric_u8(2, 5) == asymmetric_u8(0, 5)
    assert asymmetric_u8(-5, -2) == asymmetric_u8(-5, 0)


def graph_parameters() -> ort.InferenceSession:
    """Run `requant.ScaleAndZeroPoint`, as the dynamic stages do."""
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17, "requant" : 1]>
        g (float lo, float hi) => (float scale, uint8 zero_point) {
            scale, zero_point = requant.ScaleAndZeroPoint(lo, hi)
        }"""
    )
    add_functions(model)
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


SESSION = graph_parameters()


def check_graph_agrees(lo: float, hi: float) -> None:
    expected = asymmetric_u8(lo, hi)
    scale, zero_point = SESSION.run(None, {"lo": np.asarray(lo, np.float32), "hi": np.asarray(hi, np.float32)})
    assert scale.tobytes() == expected.scale.tobytes()
    assert zero_point == expected.zero_point


@each_range
def test_the_graph_computes_the_same_bits_for_special_ranges(bounds: tuple[float, float]) -> None:
    check_graph_agrees(*bounds)


@given(st.one_of(ranges, st.just((-FLOAT_MAX, FLOAT_MAX))))
@settings(max_examples=300, deadline=None)
def test_the_graph_computes_the_same_bits(bounds: tuple[float, float]) -> None:
    check_graph_agrees(*bounds)


@given(st.integers(0, 2**31), st.sampled_from([None, 0, 1, 2, -1]), st.integers(-30, 30))
@settings(max_examples=50, deadline=None)
def test_symmetric_weights_lose_half_a_step_of_their_channel(seed: int, axis: int | None, exponent: int) -> None:
    random = np.random.default_rng(seed)
    weights = (random.normal(size=(4, 3, 2)) * 10.0**exponent).astype(np.float32)
    weights[1] = 0
    params = symmetric_s8(weights, axis)
    stored = quantize(weights, params)
    assert stored.dtype == np.int8
    assert not params.zero_point.any()
    assert params.scale.shape == (() if axis is None else (weights.shape[axis],))
    assert (params.scale > 0).all()
    assert np.abs(stored.astype(int)).max() == 127  # never -128
    steps = params.scale if axis is None else np.expand_dims(params.scale, [i for i in range(3) if i != axis % 3])
    assert (np.abs(dequantize(stored, params) - weights) <= steps * (0.5 + 127 * 3 * EPS)).all()


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 126 * TINY], ids=str)
def test_a_channel_of_next_to_nothing_has_scale_one(magnitude: float) -> None:
    weights = np.array([[magnitude, -magnitude], [127, 1]], np.float32)
    assert symmetric_s8(weights, 0).scale.tolist() == [1, 1]
    assert symmetric_s8(weights[:1], None).scale == 1


def test_rounding_is_half_to_even_and_saturates() -> None:
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -1e9], np.float32)
    signed = QParams(scale=np.asarray(np.float32(1)), zero_point=np.asarray(0, np.int8))
    assert quantize(values, signed).tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -128]
    unsigned = QParams(scale=np.asarray(np.float32(1)), zero_point=np.asarray(1, np.uint8))
    assert quantize(values, unsigned).tolist() == [1, 3, 3, 1, 0, 127, 129, 255, 0]  # rounded before 1 is added


def test_a_channel_axis_may_count_from_the_end() -> None:
    weights = np.array([[1, 10], [2, 20]], np.float32)
    last, second = symmetric_s8(weights, -1), symmetric_s8(weights, 1)
    assert last.scale.tolist() == second.scale.tolist()
    assert quantize(weights, last).tolist() == quantize(weights, second).tolist() == [[64, 64], [127, 127]]


@given(
    bias=st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3),
    input_exponent=st.integers(-37, 30),
    weight_exponents=st.lists(st.integers(-37, 30), min_size=3, max_size=3),
    per_channel=st.booleans(),
)
@settings(deadline=None)
def test_every_bias_fits_int32(
    bias: list[float], input_exponent: int, weight_exponents: list[int], per_channel: bool
) -> None:
    input_scale = float(np.float32(10.0**input_exponent))
    scales = np.array([10.0**exponent for exponent in weight_exponents], np.float32)
    scale = scales if per_channel else np.asarray(scales[0])
    given_ = QParams(scale=scale, zero_point=np.zeros(scale.shape, np.int8), axis=0 if per_channel else None)
    array = np.array(bias, np.float32)
    fitted = fit_bias(given_, array, input_scale)
    assert fitted.scale.shape == scale.shape
    assert (fitted.scale >= scale).all()
    product = input_scale * fitted.scale.astype(np.float64)
    assert (np.abs(array) / product < 2**31).all()
    with np.errstate(over="ignore"):  # 1e30 * 1e30: the bias is nothing beside the products
        params = quantize_bias(array, input_scale, fitted.scale)
    stored = quantize(array, params)
    assert stored.dtype == np.int32
    assert (np.abs(stored.astype(np.int64)) < 2**31 - 1).all()  # nothing was saturated


def test_a_bias_that_fits_leaves_the_scale_alone() -> None:
    params = QParams(scale=np.array([0.1, 0.2], np.float32), zero_point=np.zeros(2, np.int8), axis=0)
    fitted = fit_bias(params, np.array([1, -1], np.float32), 0.1)
    assert fitted.scale.tobytes() == params.scale.tobytes()


def test_only_the_channel_of_an_overflowing_bias_gets_a_coarser_scale() -> None:
    params = QParams(scale=np.array([1e-12, 0.2], np.float32), zero_point=np.zeros(2, np.int8), axis=0)
    fitted = fit_bias(params, np.array([100, 100], np.float32), 0.01)
    assert fitted.scale[0] == pytest.approx(100 / 0.01 / 2**30, rel=1e-5)  # half of int32 is for the products
    assert fitted.scale[1] == params.scale[1]
