"""The arithmetic of scales and zero points, for any range that float32 can hold."""

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant import RequantError
from requant.calibration.model.session import Array
from requant.system.numbers import FLOAT_MAX
from requant.transforms.int8 import qparams
from requant.transforms.int8.qparams import (
    TINY,
    QParams,
    Scheme,
    asymmetric_u8,
    blocks,
    dequantize,
    fit_bias,
    quantize,
    quantize_bias,
    symmetric_s8,
)
from requant.transforms.parts.functions import add_functions

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
@settings(max_examples=6 * settings().max_examples)
def test_the_graph_computes_the_same_bits(bounds: tuple[float, float]) -> None:
    check_graph_agrees(*bounds)


@given(st.integers(0, 2**31), st.sampled_from([None, 0, 1, 2, -1]), st.integers(-30, 30))
@settings(max_examples=50)
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


@pytest.mark.parametrize(
    "weight_scale", [np.float32(0.25), np.array([0.25, 0.5, 4.0], np.float32)], ids=["one", "each"]
)
def test_a_bias_has_a_scale_per_channel_and_no_zero_point(weight_scale: Any) -> None:
    params = quantize_bias(np.array([8, -16, 3.0625], np.float32), 0.5, np.asarray(weight_scale))
    assert params.scale.tolist() == (np.ones(3) * weight_scale / 2).tolist()
    assert params.scale.dtype == np.float32
    assert params.zero_point.dtype == np.int32
    assert params.zero_point.tolist() == [0, 0, 0]
    assert params.axis == 0


@pytest.mark.parametrize(
    ("bounds", "scale", "zero"),
    [
        ((0.0, 510.0), 2, 0),
        ((-510.0, 0.0), 2, 255),
        ((-200.0, 310.0), 2, 100),
        ((5.0, 255.0), 1, 0),
        ((-255.0, -5.0), 1, 255),
        ((-0.5, 254.5), 1, 0),  # half to even
        ((-1.5, 253.5), 1, 2),
        ((-FLOAT_MAX, FLOAT_MAX), np.float32(FLOAT_MAX) / np.float32(255) * 2, 128),
    ],
    ids=str,
)
def test_scale_and_zero_point_of_round_ranges(bounds: tuple[float, float], scale: float, zero: int) -> None:
    params = asymmetric_u8(*bounds)
    assert params.scale == np.float32(scale)
    assert params.zero_point == zero


def test_a_scale_is_1_only_below_the_smallest_normal_float() -> None:
    assert asymmetric_u8(0.0, 255 * TINY).scale == TINY
    assert asymmetric_u8(0.0, 254 * TINY).scale == 1
    assert Scheme(symmetric=True).activation_params(-127 * TINY, 0.0).scale == TINY
    assert Scheme(symmetric=True).activation_params(-126 * TINY, 0.0).scale == 1
    weights = np.array([[127 * TINY, 0], [126 * TINY, 0], [0, 0]], np.float32)
    assert symmetric_s8(weights, 0).scale.tolist() == [TINY, 1, 1]


def test_the_scale_of_a_bias_is_a_normal_float() -> None:
    params = QParams(scale=np.array([1e-30, 1.0], np.float32), zero_point=np.zeros(2, np.int8), axis=0)
    fitted = fit_bias(params, np.zeros(2, np.float32), 1e-20)
    assert fitted.scale[0] == pytest.approx(TINY / 1e-20, rel=2e-6)
    assert fitted.scale[0] * 1e-20 >= TINY
    assert fitted.scale[1] == 1


def test_one_scale_for_all_weights_is_raised_to_that_of_the_largest_bias() -> None:
    params = QParams(scale=np.asarray(1e-12, np.float32), zero_point=np.asarray(0, np.int8))
    fitted = fit_bias(params, np.array([1, -100, 10], np.float32), 0.01)
    assert fitted.scale == pytest.approx(100 / 0.01 / 2**30, rel=1e-5)
    assert fit_bias(params, np.zeros(0, np.float32), 0.01).scale == params.scale


def test_a_block_is_the_longest_run_of_last_axes_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qparams, "BLOCK", 12)
    every = slice(None)
    assert list(blocks((3, 4))) == [(every, every)]  # exactly a block
    assert list(blocks((13,))) == [(slice(0, 12),), (slice(12, 24),)]
    assert list(blocks((2, 5, 4))) == [
        (slice(i, i + 1), slice(start, start + 3), every) for i in (0, 1) for start in (0, 3)
    ]
    assert list(blocks((2, 13))) == [(slice(i, i + 1), slice(start, start + 12)) for i in (0, 1) for start in (0, 12)]
    assert list(blocks((3, 3, 4))) == [(slice(i, i + 1), every, every) for i in range(3)]


@pytest.mark.parametrize("taps", [9, 63, 64, 65])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_peaks_of_short_and_long_rows(axis: int, taps: int) -> None:
    weights = np.zeros((3, 4, taps), np.float32)
    weights[0, 1, 0], weights[1, 3, taps - 1], weights[2, 0, taps // 2] = 127, -254, 381
    expected = {0: {0: 1, 1: 2, 2: 3}, 1: {1: 1, 3: 2, 0: 3}, 2: {0: 1, taps - 1: 2, taps // 2: 3}}[axis]
    assert symmetric_s8(weights, axis).scale.tolist() == [expected.get(i, 1) for i in range(weights.shape[axis])]


def test_the_range_of_a_tensor_is_that_of_its_type() -> None:
    for dtype, ends in ((np.uint8, (-20.0, 490.0)), (np.int8, (-276.0, 234.0))):
        assert QParams(scale=np.asarray(2, np.float32), zero_point=np.asarray(10, dtype)).range == ends


def test_a_bias_that_fits_leaves_the_scale_alone() -> None:
    params = QParams(scale=np.array([0.1, 0.2], np.float32), zero_point=np.zeros(2, np.int8), axis=0)
    fitted = fit_bias(params, np.array([1, -1], np.float32), 0.1)
    assert fitted.scale.tobytes() == params.scale.tobytes()


def test_only_the_channel_of_an_overflowing_bias_gets_a_coarser_scale() -> None:
    params = QParams(scale=np.array([1e-12, 0.2], np.float32), zero_point=np.zeros(2, np.int8), axis=0)
    fitted = fit_bias(params, np.array([100, 100], np.float32), 0.01)
    assert fitted.scale[0] == pytest.approx(100 / 0.01 / 2**30, rel=1e-5)  # half of int32 is for the products
    assert fitted.scale[1] == params.scale[1]


# ------------------------------------------------------------------------------------------------- block by block


SHAPES = [(), (0,), (5,), (1, 1), (3, 0), (7, 5), (40, 3), (3, 40), (4, 3, 5), (2, 1, 3, 3), (5, 2, 3, 3), (1, 70, 2)]
TARGETS = [np.int8, np.uint8, np.int32]


def reference_symmetric(weights: Array, axis: int | None) -> tuple[Array, Array]:
    """The definition, on the whole array at once."""
    magnitude = np.abs(weights.astype(np.float32))
    others = None if axis is None else tuple(i for i in range(weights.ndim) if i != axis % weights.ndim)
    step = np.asarray(magnitude.max(axis=others, initial=0.0) / np.float32(127), np.float32)
    scale = np.where(step < np.float32(TINY), np.float32(1), step).astype(np.float32)
    return scale, np.zeros(scale.shape, np.int8)


def spread(params: QParams, rank: int) -> tuple[Array, Array]:
    """Scale and zero point, broadcast along the channel axis."""
    if params.axis is None:
        return params.scale, params.zero_point
    form = [-1 if i == params.axis % rank else 1 for i in range(rank)]
    return params.scale.reshape(form), params.zero_point.reshape(form)


def reference_quantize(values: Array, params: QParams) -> Array:
    scale, zero = spread(params, values.ndim)
    info = np.iinfo(params.zero_point.dtype)
    steps = np.rint(values.astype(np.float32) / scale).astype(np.float64) + zero
    return np.asarray(np.clip(steps, info.min, info.max).astype(params.zero_point.dtype))


def reference_dequantize(values: Array, params: QParams) -> Array:
    scale, zero = spread(params, values.ndim)
    return np.asarray(((values.astype(np.int64) - zero) * scale.astype(np.float64)).astype(np.float32))


def same_bits(found: Array, expected: Array) -> bool:
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def axes(rank: int) -> list[int | None]:
    return [None, *range(rank), *([-1] if rank else [])]


@pytest.fixture(params=[1, 7, 64, qparams.BLOCK], ids=lambda block: f"blocks-of-{block}")
def any_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(qparams, "BLOCK", request.param)
    return int(request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_hold_every_element_once(shape: tuple[int, ...], any_block: int) -> None:
    seen = np.zeros(shape, int)
    for index in blocks(shape):
        assert len(index) == len(shape)
        assert seen[index].size <= any_block
        seen[index] += 1
    assert (seen == 1).all()


def values_of(shape: tuple[int, ...], dtype: npt.DTypeLike, order: str) -> Array:
    random = np.random.default_rng(sum(shape))
    values = (random.normal(size=shape) * 10.0 ** random.integers(-3, 4, size=shape)).astype(dtype)
    return np.ascontiguousarray(values.T).T if order == "transposed" else values


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16], ids=lambda t: t.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_change_no_bit(shape: tuple[int, ...], dtype: npt.DTypeLike, any_block: int) -> None:
    for axis, order in itertools.product(axes(len(shape)), ("in-order", "transposed")):
        values = values_of(shape, dtype, order)
        params = symmetric_s8(values, axis)
        assert all(map(same_bits, (params.scale, params.zero_point), reference_symmetric(values, axis)))
        for target in TARGETS:
            zero = np.arange(params.scale.size).reshape(params.scale.shape) % 100
            moved = QParams(scale=params.scale, zero_point=zero.astype(target), axis=axis)
            stored = quantize(values, moved)
            assert same_bits(stored, reference_quantize(values, moved))
            assert same_bits(dequantize(stored, moved), reference_dequantize(stored, moved))


@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40),
    scale=st.floats(2**-20, 2**20, width=32),
    target=st.sampled_from(TARGETS),
    zero=st.integers(0, 127),
)
def test_any_value_is_stored_as_by_definition(
    values: list[float], scale: float, target: type[np.integer[Any]], zero: int
) -> None:
    array = np.array(values, np.float32)
    params = QParams(scale=np.asarray(scale, np.float32), zero_point=np.asarray(zero, target))
    with np.errstate(over="ignore"):  # a quotient that is no float32 is stored as the end of the range
        assert same_bits(quantize(array, params), reference_quantize(array, params))


@pytest.mark.parametrize("axis", [None, 0, 1, -1], ids=str)
@pytest.mark.parametrize(
    "work",
    [symmetric_s8, lambda values, axis: quantize(values, symmetric_s8(values, axis))],
    ids=["scales", "integers"],
)
def test_temporaries_are_small(work: Callable[..., object], axis: int | None) -> None:
    """Beside the result there are at most eight blocks of float64 and a few arrays as long as the channel axis."""
    values = np.ones((2048, 4, 1024), np.float32)
    tracemalloc.start()
    try:
        result = work(values, axis)
        peak = tracemalloc.get_traced_memory()[1] - (result.nbytes if isinstance(result, np.ndarray) else 0)
    finally:
        tracemalloc.stop()
    assert peak < 8 * qparams.BLOCK * 8 < values.nbytes


# ------------------------------------------------------------------------------------------------------- schemes

SCHEMES = [Scheme(a, w, symmetric=s) for a in ("u8", "s8") for w in ("s8", "u8") for s in (False, True)]
each_scheme = pytest.mark.parametrize(
    "scheme", SCHEMES, ids=lambda s: f"{s.activation}-{s.weight}{'-symmetric' * s.symmetric}"
)


def shift(dtype: np.dtype[Any]) -> int:
    """What must be added to an integer of `dtype` to have the uint8 of the same real value."""
    return 0 if dtype == np.uint8 else 128


@pytest.mark.parametrize(("activation", "weight"), [("u16", "s8"), ("u8", "s4"), ("", "s8"), ("U8", "s8")])
def test_an_unknown_type_is_refused(activation: str, weight: str) -> None:
    with pytest.raises(RequantError, match=r"no (activation|weight) type named"):
        Scheme(activation, weight)


@each_range
def test_the_usual_scheme_is_asymmetric_uint8(bounds: tuple[float, float]) -> None:
    found, expected = Scheme().activation_params(*bounds), asymmetric_u8(*bounds)
    assert same_bits(found.scale, expected.scale)
    assert same_bits(found.zero_point, expected.zero_point)


@each_scheme
@given(ranges)
def test_both_types_of_activations_hold_the_same_values(scheme: Scheme, bounds: tuple[float, float]) -> None:
    found = scheme.activation_params(*bounds)
    other = Scheme("u8", scheme.weight, symmetric=scheme.symmetric).activation_params(*bounds)
    assert found.zero_point.dtype == {"u8": np.uint8, "s8": np.int8}[scheme.activation]
    assert found.zero_point.shape == found.scale.shape == ()
    assert same_bits(found.scale, other.scale)
    values = points(*bounds)
    stored = quantize(values, found).astype(int) + shift(found.zero_point.dtype)
    assert stored.tolist() == quantize(values, other).tolist()
    assert found.range == other.range


@each_scheme
@given(ranges)
def test_every_scheme_loses_half_a_step_and_holds_zero(scheme: Scheme, bounds: tuple[float, float]) -> None:
    """The bound of `check_half_a_step`."""
    params, values = scheme.activation_params(*bounds), points(*bounds)
    scale = float(params.scale)
    error = np.abs(dequantize(quantize(values, params), params).astype(np.float64) - values)
    assert np.max(error) <= scale / 2 + 6 * EPS * 255.5 * scale
    assert quantize(np.zeros(1, np.float32), params)[0] == params.zero_point


@pytest.mark.parametrize(("activation", "middle"), [("u8", 128), ("s8", 0)])
def test_a_symmetric_zero_point_is_the_middle(activation: str, middle: int) -> None:
    scheme = Scheme(activation, symmetric=True)
    for lo, hi in [(-2.0, 254.0), (-254.0, 2.0), (-254.0, -2.0)]:
        params = scheme.activation_params(lo, hi)
        assert params.zero_point == middle
        assert params.scale == 2
        ends = quantize(np.array([-254, 254], np.float32), params).astype(int)
        assert (ends - middle).tolist() == [-127, 127]


@pytest.mark.parametrize(("activation", "least"), [("u8", 0), ("s8", -128)])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
def test_a_tensor_that_is_never_negative_starts_at_the_least_integer(
    activation: str, least: int, symmetric: bool
) -> None:
    params = Scheme(activation, symmetric=symmetric).activation_params(0.0, 510.0)
    assert params.zero_point == least
    assert params.scale == 2
    assert quantize(np.array([0, 510], np.float32), params).tolist() == [least, least + 255]


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("bounds", [(0.0, 0.0), (-0.0, 0.0), (-1e-45, 1e-45), (0.0, 1e-45)], ids=str)
def test_a_range_of_next_to_nothing_has_scale_one(bounds: tuple[float, float], symmetric: bool) -> None:
    assert Scheme(symmetric=symmetric).activation_params(*bounds).scale == 1


@pytest.mark.parametrize("axis", [None, 0, 1, -1], ids=str)
@each_scheme
def test_both_types_of_weights_hold_the_same_values(scheme: Scheme, axis: int | None) -> None:
    weights = values_of((6, 5, 3), np.float32, "in-order")
    params, signed = scheme.weight_params(weights, axis), symmetric_s8(weights, axis)
    assert params.axis == axis
    assert params.zero_point.dtype == {"u8": np.uint8, "s8": np.int8}[scheme.weight]
    assert same_bits(params.scale, signed.scale)
    assert set((params.zero_point.astype(int) + shift(params.zero_point.dtype)).ravel()) == {128}
    stored = quantize(weights, params).astype(int) + shift(params.zero_point.dtype)
    assert (stored - 128).tolist() == quantize(weights, signed).tolist()
    assert stored.min() >= 1  # as -127 is the least of int8
    assert same_bits(dequantize(quantize(weights, params), params), dequantize(quantize(weights, signed), signed))


@pytest.mark.parametrize("weight", ["s8", "u8"])
def test_a_bias_fits_weights_of_both_types(weight: str) -> None:
    weights = np.array([[1e-9, -1e-9], [1, 2]], np.float32)
    bias = np.array([100, 100], np.float32)
    params = Scheme(weight=weight).weight_params(weights, 0)
    fitted = fit_bias(params, bias, 0.01)
    assert same_bits(fitted.zero_point, params.zero_point)
    assert fitted.scale[0] > params.scale[0]
    assert fitted.scale[1] == params.scale[1]
    assert quantize(weights, fitted).dtype == params.zero_point.dtype
    stored = quantize(bias, quantize_bias(bias, 0.01, fitted.scale))
    assert stored.dtype == np.int32
    assert (np.abs(stored.astype(np.int64)) < 2**31 - 1).all()
