"""Weights that saturate in 16-bit sums are found and relieved: against a simulation of VPMADDUBSW."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.calibration.model.session import Array
from requant.transforms.int8 import saturation
from requant.transforms.int8.qparams import QParams, Scheme, quantize, symmetric_s8
from requant.transforms.int8.saturation import PAIR_LIMIT, pair_partners, prevent_saturation

from ...pairs import pair_peak


def accumulate(activations: Array, weights: Array) -> Array:
    """Multiply uint8 (R, K) by int8 (K, N) as kernels without VNNI do: VPMADDUBSW, VPMADDWD with ones, VPADDD."""
    a, w = activations.astype(np.int64), weights.astype(np.int64)
    if a.shape[1] % 2:
        a, w = np.pad(a, ((0, 0), (0, 1))), np.pad(w, ((0, 1), (0, 0)))
    products = a[:, :, None] * w[None]
    return np.asarray(np.clip(products[:, ::2] + products[:, 1::2], -(2**15), 2**15 - 1).sum(axis=1))


def multiply(activations: Array, weights: Array) -> Array:
    return activations.astype(np.int64) @ weights.astype(np.int64)


def worst_inputs(depth: int) -> Array:
    """For each pair of neighbours, activations of 255 at both and of 0 elsewhere, and at each of them alone."""
    rows = [np.full(depth, 255)]
    for first, second in [*pairwise(range(depth)), *((i, i) for i in range(depth))]:
        row = np.zeros(depth, int)
        row[[first, second]] = 255
        rows.append(row)
    return np.array(rows, np.uint8)


def arranged(matrix: Array, layout: str) -> tuple[Array, int, int]:
    """Return the weights (K, N) in a layout, the axis of their channels, and the groups."""
    depth, count = matrix.shape
    if layout == "matmul":
        return matrix, -1, 1
    if layout == "gemm-transposed":
        return np.ascontiguousarray(matrix.T), 0, 1
    if layout == "stack":  # of two, the second twice as sparse
        return np.stack([matrix, np.where(np.arange(depth)[:, None] % 4 < 2, matrix, 0)]), -1, 1
    kernel = {"conv-1x1": (1, 1), "conv-1d": (2,), "conv-2d": (2, 3), "conv-grouped": (2, 1)}[layout]
    taps = int(np.prod(kernel))
    weights = np.zeros((count, depth // taps, *kernel), matrix.dtype)
    for k, n in product(range(depth // taps * taps), range(count)):  # K = tap * channels + channel
        weights[(n, k % (depth // taps), *np.unravel_index(k // (depth // taps), kernel))] = matrix[k, n]
    return weights, 0, count if layout == "conv-grouped" else 1


LAYOUTS = ["matmul", "gemm-transposed", "stack", "conv-1x1", "conv-1d", "conv-2d", "conv-grouped"]
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@st.composite
def int8_matrices(draw: st.DrawFn) -> Array:
    """Matrices (K, N) with sums on both sides of the limit; K is 2 or more channels for every layout."""
    depth, count = 12 * draw(st.integers(1, 2)), draw(st.integers(1, 3))
    near = st.one_of(st.sampled_from([-128, -127, -65, -64, -63, 63, 64, 65, 127]), st.integers(-128, 127))
    values = draw(st.lists(near, min_size=depth * count, max_size=depth * count))
    return np.array(values, np.int8).reshape(depth, count)


@each_layout
@given(matrix=int8_matrices())
def test_the_partner_of_each_weight_is_the_one_of_its_pair(layout: str, matrix: Array) -> None:
    weights, axis, group = arranged(matrix, layout)
    partners = pair_partners(weights, axis, group=group)
    paired = partners[partners >= 0]
    assert partners[paired].tolist() == np.flatnonzero(partners >= 0).tolist()


@pytest.mark.parametrize("shape", [(4, 1, 3, 3), (2, 1)], ids=["depthwise", "one weight"])
def test_weights_without_a_pair_have_no_partner(shape: tuple[int, ...]) -> None:
    assert (pair_partners(np.ones(shape, np.int8), 0, group=shape[0]) == -1).all()


@each_layout
@given(matrix=int8_matrices(), seed=st.integers(0, 2**31))
@settings(max_examples=40)
def test_a_channel_is_named_exactly_if_some_input_saturates(layout: str, matrix: Array, seed: int) -> None:
    inputs = np.random.default_rng(seed).integers(0, 256, (50, len(matrix)), np.uint8)
    inputs = np.concatenate([inputs, worst_inputs(len(matrix))])
    differs = (accumulate(inputs, matrix) != multiply(inputs, matrix)).any(axis=0)
    weights, axis, group = arranged(matrix, layout)
    assert (pair_peak(weights, axis, group=group) > PAIR_LIMIT).tolist() == differs.tolist()


@pytest.mark.parametrize(
    ("column", "peak"),
    [
        ([64, 64], 128),
        ([64, 65], 129),
        ([-64, -64], 128),
        ([-64, -65], 129),
        ([-128, -128], 256),
        ([-128, 0], 128),
        ([127, -127], 0),
        ([127, -128, 127, -128], 1),
        ([0, 127, 127, 0], 127),
        ([0, 1, 127], 1),
        ([127], 0),
    ],
    ids=str,
)
def test_the_peak_is_of_rows_2i_and_2i_plus_1(column: list[int], peak: int) -> None:
    weights = np.array(column, np.int8)[:, None]
    assert pair_peak(weights, -1).tolist() == pair_peak(weights.T, 0).tolist() == [peak]
    assert (pair_peak(weights, -1) > PAIR_LIMIT).tolist() == [peak > PAIR_LIMIT]


def test_matrices_of_a_stack_are_multiplied_on_their_own() -> None:
    stack = np.zeros((2, 3, 1), np.int8)
    stack[0, 2] = stack[1, 0] = 127  # neighbours in memory
    assert pair_peak(stack, -1).tolist() == [127]
    stack[1, 1] = 100
    assert pair_peak(stack, -1).tolist() == [227]


def test_a_convolution_pairs_input_channels_of_one_tap() -> None:
    weights = np.zeros((2, 2, 1, 2), np.int8)
    weights[0, :, 0, 0] = 127  # both channels, one tap
    weights[1, 0, 0, :] = 127  # one channel, both taps
    assert pair_peak(weights, 0).tolist() == [254, 127]


def test_with_one_input_channel_a_convolution_pairs_taps() -> None:
    weights = np.full((4, 1, 3), 127, np.int8)
    assert pair_peak(weights, 0, group=2).tolist() == [254] * 4  # two output channels per group


@pytest.mark.parametrize("channels", [1, 4])
def test_depthwise_convolutions_do_not_saturate(channels: int) -> None:
    weights = np.full((channels, 1, 3, 3), 127, np.int8)
    assert not (pair_peak(weights, 0, group=channels) > PAIR_LIMIT).any()
    params = symmetric_s8(weights, 0)
    assert prevent_saturation(params, weights.astype(np.float32), 0, group=channels) is params


def test_by_default_a_convolution_has_one_group() -> None:
    one, two = np.full((1, 1, 4), 127, np.int8), np.full((2, 1, 4), 127, np.int8)
    assert pair_peak(one, 0).tolist() == [0]  # depthwise: one input and one output channel
    assert pair_peak(two, 0).tolist() == [254, 254]
    assert ((pair_peak(one, 0) > PAIR_LIMIT).tolist(), (pair_peak(two, 0) > PAIR_LIMIT).tolist()) == (
        [False],
        [True, True],
    )
    for weights in (one, two):
        params = symmetric_s8(weights.astype(np.float32), 0)
        assert (prevent_saturation(params, weights.astype(np.float32), 0) is params) == (weights is one)


def test_uint8_weights_do_not_saturate() -> None:
    weights = np.full((4, 2), 1, np.float32)
    params = Scheme(weight="u8").weight_params(weights, 1)
    assert not (pair_peak(quantize(weights, params), 1) > PAIR_LIMIT).any()
    assert prevent_saturation(params, weights, 1) is params


@st.composite
def float_matrices(draw: st.DrawFn) -> Array:
    """Weights (K, N) of several distributions and magnitudes per channel; K is 2 or more channels for every layout."""
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    shape = (12 * draw(st.integers(1, 3)), draw(st.integers(1, 5)))
    kind = draw(st.sampled_from(["normal", "uniform", "heavy", "steps"]))
    matrix = {
        "normal": random.normal(size=shape),
        "uniform": random.uniform(-1, 1, shape),
        "heavy": random.standard_t(2, shape),
        "steps": random.integers(-4, 5, shape) / 4,  # many pairs alike, and quotients halfway between integers
    }[kind]
    return (matrix * 10.0 ** random.integers(-6, 7, shape[1])).astype(np.float32)


@each_layout
@given(matrix=float_matrices(), per_channel=st.booleans())
@settings(max_examples=40)
def test_relieved_weights_saturate_nowhere_and_lose_the_least(layout: str, matrix: Array, per_channel: bool) -> None:
    weights, axis, group = arranged(matrix, layout)
    params = symmetric_s8(weights, axis if per_channel else None)
    before = pair_peak(quantize(weights, params), axis, group=group) > PAIR_LIMIT
    relieved = prevent_saturation(params, weights, axis, group=group)
    stored = quantize(weights, relieved)
    assert not (pair_peak(stored, axis, group=group) > PAIR_LIMIT).any()
    assert (relieved.axis, relieved.scale.shape) == (params.axis, params.scale.shape)
    assert relieved.scale.dtype == np.float32
    assert relieved.zero_point is params.zero_point

    changed = relieved.scale != params.scale
    assert changed.tolist() == (before if per_channel else before.any()).tolist()
    finer = np.where(changed, np.nextafter(relieved.scale, np.float32(0)), relieved.scale)
    worse = (
        pair_peak(
            quantize(weights, QParams(scale=finer, zero_point=params.zero_point, axis=params.axis)), axis, group=group
        )
        > PAIR_LIMIT
    )
    assert (worse if per_channel else worse.any()).tolist() == changed.tolist()


@given(matrix=float_matrices(), factor=st.floats(1, 4, width=32))
def test_a_scale_that_is_raised_further_stays_without_saturation(matrix: Array, factor: float) -> None:
    relieved = prevent_saturation(symmetric_s8(matrix, 1), matrix, 1)
    coarser = QParams(scale=relieved.scale * np.float32(factor), zero_point=relieved.zero_point, axis=1)
    assert not (pair_peak(quantize(matrix, coarser), 1) > PAIR_LIMIT).any()


@given(matrix=float_matrices(), seed=st.integers(0, 2**31))
def test_sums_of_relieved_weights_are_exact(matrix: Array, seed: int) -> None:
    stored = quantize(matrix, prevent_saturation(symmetric_s8(matrix, 1), matrix, 1))
    inputs = np.random.default_rng(seed).integers(0, 256, (50, len(matrix)), np.uint8)
    inputs = np.concatenate([inputs, worst_inputs(len(matrix))])
    assert (accumulate(inputs, stored) == multiply(inputs, stored)).all()


@each_layout
@pytest.mark.parametrize("block", [1, 5, 25, 40])
def test_parts_change_nothing(layout: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.random.default_rng(block).uniform(-1, 1, (24, 7)).astype(np.float32)
    weights, axis, group = arranged(matrix, layout)
    for channel in (axis, None):
        params = symmetric_s8(weights, channel)
        stored = quantize(weights, params)
        whole = prevent_saturation(params, weights, axis, group=group).scale, pair_peak(stored, axis, group=group)
        with monkeypatch.context() as patch:
            patch.setattr(saturation, "BLOCK", block)
            parts = prevent_saturation(params, weights, axis, group=group).scale, pair_peak(stored, axis, group=group)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(whole, parts, strict=True))


def test_scales_that_clip_are_raised_too() -> None:
    weights = np.array([[10, 1], [10, 1], [1, 1]], np.float32)
    params = QParams(scale=np.array([0.01, 1], np.float32), zero_point=np.zeros(2, np.int8), axis=1)
    relieved = prevent_saturation(params, weights, 1)
    assert relieved.scale[0] == pytest.approx(10 / 64.5, rel=1e-6)  # 64 and 64: half to even
    assert relieved.scale[1] == 1


def test_the_largest_float32_weights_overflow_nothing() -> None:
    weights = np.full((2, 1), np.finfo(np.float32).max, np.float32)
    relieved = prevent_saturation(symmetric_s8(weights, 1), weights, 1)
    assert quantize(weights, relieved).tolist() == [[64], [64]]


@pytest.mark.parametrize(("shape", "axis"), [((0, 3), -1), ((3, 0), 0), ((3, 0, 1, 1), 0), ((0, 4, 3), -1)], ids=str)
def test_no_weights_do_not_saturate(shape: tuple[int, ...], axis: int) -> None:
    assert not (pair_peak(np.zeros(shape, np.int8), axis) > PAIR_LIMIT).any()
    for channel in (axis, None):
        params = symmetric_s8(np.zeros(shape, np.float32), channel)
        assert prevent_saturation(params, np.zeros(shape, np.float32), axis) is params
