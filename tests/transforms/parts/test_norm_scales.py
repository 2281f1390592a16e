"""Channels in front of a normalization of each channel are scaled and shifted, and the model computes the same."""

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.transforms import verify
from requant.transforms.graphs.rewriter import names
from requant.transforms.parts.norm_scales import find_normed, scale_normed
from tests.transforms.parts.test_equalize import CHANNELS, feed_of, made, outputs

CONV = "t = Conv(x, k, a)"
NORM = "InstanceNormalization<epsilon = 1e-9>"
BACK = "o = Constant<value_ints = [2, 4, 8, 8]>() y = Reshape(n, o)"
FREE = {
    "directly": (f"{CONV} y = {NORM}(t, g, h)", 17, True),
    "ConvTranspose": (f"t = ConvTranspose(x, p, a) y = {NORM}(t, g, h)", 17, True),
    "depthwise": (f"t = Conv<group = 4>(x, d, a) y = {NORM}(t, g, h)", 17, True),
    "without a bias": (f"t = Conv(x, k) y = {NORM}(t, g, h)", 17, False),
    "MaxPool": (f"{CONV} u = MaxPool<kernel_shape = [2, 2]>(t) y = {NORM}(u, g, h)", 17, True),
    "Relu": (f"{CONV} r = Relu(t) y = {NORM}(r, g, h)", 17, False),
    "LeakyRelu, AveragePool": (
        f"{CONV} r = LeakyRelu(t) u = AveragePool<kernel_shape = [2, 2], pads = [1, 1, 1, 1]>(r) y = {NORM}(u, g, h)",
        17,
        False,
    ),
    "a bias that others read": (f"{CONV} u = {NORM}(t, g, a) y = Add(u, half)", 17, True),
    "group norm": (f"{CONV} y = GroupNormalization<num_groups = 4, epsilon = 1e-9>(t, g, h)", 21, True),
    "group norm in parts": (
        f"{CONV} s = Constant<value_ints = [0, 4, -1]>() r = Reshape(t, s) n = {NORM}(r, g, h) {BACK}",
        17,
        True,
    ),
}
BOUND = {
    "read by others": (f"{CONV} n = {NORM}(t, g, h) y = Add(n, t)", 17, "y"),
    "an output": (f"{CONV} y = {NORM}(t, g, h)", 17, "y t"),
    "of several channels": (f"{CONV} y = GroupNormalization<num_groups = 2>(t, g, h)", 21, "y"),
    "another operator": (f"{CONV} u = Sigmoid(t) y = {NORM}(u, g, h)", 17, "y"),
    "computed weights": (f"m = Identity(x) t = Conv(x, m) y = {NORM}(t, g, h)", 17, "y"),
    "no convolution": (f"y = {NORM}(x, g, h)", 17, "y"),
}


def folded(body: str, opset: int, results: str = "y") -> ir.Model:
    """Return a model whose Constant nodes are initializers, as `simplify` makes them."""
    return made(body, "2,4,8,8", results, opset)


@pytest.mark.parametrize("name", FREE)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_the_results_stay(name: str, data: st.DataObject) -> None:
    body, opset, shifts = FREE[name]
    model = folded(body, opset)
    before = outputs(model, feed_of((2, 4, 8, 8)))
    (found,) = find_normed(model)
    assert found.shifts is shifts
    draw = st.lists(st.floats(0.5, 64), min_size=CHANNELS, max_size=CHANNELS)
    factor, shift = (np.asarray(data.draw(draw)) for _ in range(2))
    shift = (shift - 3) / 8 if shifts else np.zeros(CHANNELS)
    assert scale_normed(found, factor, shift, np.ones(CHANNELS), names(model))
    verify(model)
    after = outputs(model, feed_of((2, 4, 8, 8)))
    assert all(np.allclose(a, b, rtol=0, atol=2e-4) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", BOUND)
def test_channels_that_are_not_free_are_not_found(name: str) -> None:
    body, opset, results = BOUND[name]
    assert find_normed(folded(body, opset, results)) == []


def test_the_gain_multiplies_the_factor_of_the_norm() -> None:
    model = folded(f"{CONV} y = {NORM}(t, g, h)", 17)
    plain, (found,) = outputs(model, feed_of((2, 4, 8, 8)))[0], find_normed(model)
    bias = found.gain.folds[0].node.inputs[2]
    assert bias is not None
    assert bias.const_value is not None
    shift = bias.const_value.numpy().reshape(1, -1, 1, 1)
    gain = np.array([1, 2, 3, 4.0])
    assert scale_normed(found, np.ones(4), np.zeros(4), gain, names(model))
    doubled = outputs(model, feed_of((2, 4, 8, 8)))[0]
    np.testing.assert_allclose(doubled - shift, (plain - shift) * gain.reshape(1, -1, 1, 1), atol=1e-5)


def test_a_constant_that_would_not_stay_finite_is_left_alone() -> None:
    model = folded(f"{CONV} y = {NORM}(t, g, h)", 17)
    before = ir.to_proto(model)
    (found,) = find_normed(model)
    assert not scale_normed(found, np.full(4, 1e39), np.zeros(4), np.ones(4), names(model))
    assert ir.to_proto(model) == before
