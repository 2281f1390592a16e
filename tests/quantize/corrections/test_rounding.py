"""Learned rounding: integers beside the exact values that cost least, and none that were learned by heart."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.calibration.model.session import Array
from requant.quantize.corrections import rounding
from requant.quantize.corrections.layer_by_layer import Layer
from requant.quantize.corrections.rounding import (
    FOLDS,
    Moments,
    _rows,
    bounds_of,
    held_back,
    learn_rounding,
    losses,
    moments_of,
    operations,
    round_columns,
    surely,
)
from requant.transforms.int8.plan import Unit
from requant.transforms.int8.qparams import QParams, Scheme, asymmetric_u8, quantize
from requant.transforms.int8.saturation import PAIR_LIMIT, prevent_saturation
from requant.transforms.int8.weights import FloatWeights

from ...pairs import pair_peak

EPS = float(np.finfo(np.float32).eps)
ZEROS = {"s8": np.asarray(0, np.int8), "u8": np.asarray(128, np.uint8)}
Problem = tuple[Moments, Array, Array, QParams]

# ------------------------------------------------------------------------------------------------------ the search


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a problem whose numbers float32 holds without rounding, whatever is summed: costs then compare exactly.

    Second moments are whole numbers, exact values whole 64ths, and the trust in what is off the diagonal is 1/2, 3/4 or
    7/8. The largest term of a cost is below 2^22 of its units, 2^-16.
    """
    size, columns = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    factors = random.integers(-2, 3, (draw(st.integers(1, 6)), size)).astype(np.float32)
    residual = random.integers(-8, 9, (size, columns)) / np.float32(4) * draw(st.sampled_from([0, 1]))
    moments = Moments(factors.T @ factors, residual.astype(np.float32), size * draw(st.sampled_from([1, 3, 7])))
    params = QParams(scale=np.ones((), np.float32), zero_point=ZEROS[draw(st.sampled_from(sorted(ZEROS)))])
    reach = draw(st.sampled_from([2, 127]))
    steps = random.integers(-64 * reach, 64 * reach + 1, (size, columns)) / 64
    ends = [0, -127, 127, -127 - 1 / 64, 127 + 1 / 64]  # on the grid, at its ends, and a little beyond
    steps[random.random(steps.shape) < 0.2] = draw(st.sampled_from(ends))
    exact = (steps + float(params.zero_point)).astype(np.float32)
    return moments, exact, np.clip(np.rint(exact), *grid(params)).astype(np.float32), params


def grid(params: QParams) -> tuple[int, int]:
    """Return the least and the greatest integer of a symmetric grid."""
    zero = int(params.zero_point)
    return zero - 127, zero + 127


def trust(moments: Moments) -> float:
    return moments.rows / (moments.rows + len(moments.columns))


def costs(moments: Moments, errors: Array) -> Array:
    """Return what the errors (K, M) of each output channel cost, in float64, written down anew."""
    share, columns = trust(moments), moments.columns.astype(np.float64)
    hessian = share * columns + (1 - share) * np.diag(np.diag(columns))
    errors = errors.astype(np.float64)
    return np.asarray(
        np.einsum("im,ij,jm->m", errors, hessian, errors) + 2 * share * (errors * moments.residual).sum(0)
    )


def solved(problem: Problem) -> Array:
    moments, exact, nearest, params = problem
    return round_columns(moments, exact, nearest, np.ones_like(exact), bounds_of(params))


@given(problem=problems())
def test_it_costs_no_more_than_the_nearest_integers(problem: Problem) -> None:
    moments, exact, nearest, _ = problem
    assert (costs(moments, solved(problem) - exact) <= costs(moments, nearest - exact)).all()


@given(problem=problems())
def test_each_integer_is_beside_its_exact_value_and_on_the_grid(problem: Problem) -> None:
    _, exact, _, params = problem
    found = solved(problem)
    assert ((found == np.floor(exact)) | (found == np.ceil(exact))).all()
    low, high = grid(params)
    assert low <= found.min()
    assert found.max() <= high


@pytest.mark.parametrize("scheme", sorted(ZEROS))
@pytest.mark.parametrize("end", [-127, 127])
def test_the_ends_of_the_grid_are_not_left(scheme: str, end: int) -> None:
    """However much it would pay: of the exact value that lies a little beyond, the other side is off the grid."""
    params = QParams(scale=np.ones((), np.float32), zero_point=ZEROS[scheme])
    exact = np.asarray([[end + np.sign(end) / 64], [0.25]], np.float32) + np.float32(params.zero_point)
    moments = Moments(np.eye(2, dtype=np.float32), np.full((2, 1), -99 * np.sign(end), np.float32), 6)
    nearest = np.clip(np.rint(exact), *grid(params)).astype(np.float32)
    other = int(params.zero_point) + (1 if end > 0 else 0)
    assert solved((moments, exact, nearest, params)).tolist() == [[end + int(params.zero_point)], [other]]


@given(problem=problems())
def test_no_single_change_costs_less(problem: Problem) -> None:
    moments, exact, _, params = problem
    found, (low, high) = solved(problem), grid(params)
    least = costs(moments, found - exact)
    for row in range(len(found)):
        other = found.copy()
        other[row] = np.floor(exact[row]) + np.ceil(exact[row]) - found[row]
        allowed = (other[row] >= low) & (other[row] <= high)
        assert (least <= costs(moments, other - exact))[allowed].all()


@given(problem=problems())
def test_groups_are_solved_as_if_alone(problem: Problem) -> None:
    """Beside a group with the opposite residual, which changes other weights and may need more sweeps."""
    moments, exact, nearest, params = problem
    other = replace(moments, residual=-moments.residual)
    columns, residual = np.stack([moments.columns] * 2), np.stack([moments.residual, other.residual])
    both = Moments(columns, residual, moments.rows)
    found = solved((both, np.stack([exact, exact]), np.stack([nearest, nearest]), params))
    assert np.array_equal(found[0], solved(problem))
    assert np.array_equal(found[1], solved((other, exact, nearest, params)))


@pytest.mark.parametrize("kind", ["groups", "convolution"])
def test_how_many_groups_are_computed_at_once_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, _ = layer(kind)
    together = learn_rounding(one)
    monkeypatch.setattr(rounding, "AT_ONCE", 1)
    alone = learn_rounding(one)
    assert together is not None
    assert alone is not None
    assert np.array_equal(together, alone)


@given(problem=problems())
def test_how_many_weights_are_multiplied_at_once_changes_nothing(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "BLOCK", 2)
        in_blocks = solved(problem)
    assert np.array_equal(in_blocks, solved(problem))


def best(problem: Problem) -> Array:
    """Return the least cost of each output channel, of all roundings of its weights."""
    moments, exact, _, params = problem
    low, high = grid(params)
    least = np.full(exact.shape[1], np.inf)
    for choice in itertools.product((np.floor, np.ceil), repeat=len(exact)):
        tried = np.stack([up(row) for up, row in zip(choice, exact, strict=True)])
        fits = ((tried >= low) & (tried <= high)).all(axis=0)
        least = np.minimum(least, np.where(fits, costs(moments, tried - exact), np.inf))
    return least


@given(problem=problems())
def test_without_a_residual_the_best_of_all_roundings_is_not_far(problem: Problem) -> None:
    """The factor is derived: ``(1 + t (K - 1)) / (1 - t)``, t the trust in what is off the diagonal.

    The nearest integers have the least error of each weight; with d the diagonal, they cost at most ``1 + t (K - 1)``
    times ``sum(d e^2)``, the largest eigenvalue of a correlation matrix being at most that, and any other rounding costs
    at least ``1 - t`` times as much.
    """
    moments, exact, nearest, params = problem
    moments = Moments(moments.columns, np.zeros_like(moments.residual), moments.rows)
    factor = (1 + trust(moments) * (len(exact) - 1)) / (1 - trust(moments))
    problem = (moments, exact, nearest, params)
    found, least = costs(moments, solved(problem) - exact), best(problem)
    assert (least <= found).all()
    assert (found <= factor * least * (1 + 1e-12)).all()  # the factor is rounded, in float64


def test_it_is_mostly_close_to_the_best() -> None:
    """Over 300 channels of six correlated inputs: how much more they cost than the best of 64 roundings each."""
    random, sums = np.random.default_rng(0), np.zeros(3)
    params = QParams(scale=np.ones((), np.float32), zero_point=ZEROS["s8"])
    for _ in range(100):
        x = random.standard_normal((200, 2)) @ random.standard_normal((2, 6)) + 0.3 * random.standard_normal((200, 6))
        moments = Moments((x.T @ x / 200).astype(np.float32), np.zeros((6, 3), np.float32), 200)
        exact = random.uniform(-20, 20, (6, 3)).astype(np.float32)
        nearest = np.rint(exact)
        problem = (moments, exact, nearest, params)
        parts = costs(moments, nearest - exact), costs(moments, solved(problem) - exact), best(problem)
        sums += [float(each.sum()) for each in parts]
    plain, found, least = sums / sums[2]
    assert least == 1
    assert found < 1.5
    assert plain > 3


# ------------------------------------------------------------------------------------------------------- its steps


def step(
    op: str, weights: Array, x: list[Array], y: list[Array], *, bias: Array | None = None, **attributes: Any
) -> Layer:
    """Return a unit that reads x in the INT8 model and gives y in the float model."""
    made = [ir.Attr(name, *_attribute(value)) for name, value in attributes.items()]
    inputs = [ir.val(name) for name in ("x", "w", *(["b"] if bias is not None else []))]
    node = ir.node(op, inputs, {each.name: each for each in made}, name="unit")
    axis = 0 if op == "Conv" or attributes.get("transB") else weights.ndim - 1
    params = Scheme().weight_params(weights, axis)

    def never(*_: Any) -> Array:
        raise AssertionError("rounding needs no runtime")

    unit = Unit(name="unit", op=op, nodes=("unit",), inputs=("x",), outputs=("y",))
    return Layer(unit, node, FloatWeights(weights, params, bias), asymmetric_u8(-4, 4), x, y, never)


def _attribute(value: Any) -> tuple[ir.AttributeType, Any]:
    if isinstance(value, str):
        return ir.AttributeType.STRING, value
    return (ir.AttributeType.INT, value) if isinstance(value, int) else (ir.AttributeType.INTS, value)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 7, 6), (4, 3, 3, 2), {}),
    "strides": ((1, 3, 8, 9), (4, 3, 3, 3), {"strides": [2, 3]}),
    "dilations": ((1, 3, 9, 9), (4, 3, 3, 2), {"dilations": [2, 3]}),
    "uneven-pads": ((1, 3, 5, 5), (4, 3, 3, 3), {"pads": [0, 1, 2, 3]}),
    "groups": ((2, 6, 5, 5), (4, 3, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
    "depthwise": ((1, 4, 5, 5), (8, 1, 3, 3), {"group": 4, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "all-at-once": ((2, 4, 12, 11), (6, 2, 3, 2), {"group": 2, "strides": [2, 1], "dilations": [2, 2], "pads": [1, 2, 3, 0]}),
    "one-axis": ((2, 3, 11), (4, 3, 4), {"strides": [2], "dilations": [2], "pads": [3, 1]}),
    "three-axes": ((1, 4, 5, 6, 7), (4, 2, 2, 3, 2), {"group": 2, "strides": [1, 2, 2], "pads": [1, 0, 1, 0, 1, 1]}),
    "valid": ((1, 3, 6, 6), (4, 3, 3, 3), {"auto_pad": "VALID"}),
}  # fmt: skip


def convolved(x: Array, weights: Array, bias: Array, attributes: dict[str, Any]) -> Array:
    """Return what the runtime's Conv gives."""
    node = ir.node("Conv", [ir.val(n, dtype=ir.DataType.FLOAT, shape=[None] * a.ndim) for n, a in zip("xwb", (x, weights, bias), strict=True)], attributes)  # fmt: skip
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([v for v in node.inputs if v is not None], node.outputs, nodes=[node], opset_imports={"": 17})
    data = ir.to_proto(ir.Model(graph, ir_version=8)).SerializeToString()
    (y,) = ort.InferenceSession(data).run(None, {"x": x, "w": weights, "b": bias})
    return np.asarray(y)


@pytest.mark.parametrize("most", [100_000, 7], ids=["all", "some"])
@pytest.mark.parametrize(("shape", "kernel", "attributes"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_rows_times_weights_are_the_convolution(
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    attributes: dict[str, Any],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounding, "ROWS", 2 * most)
    random = np.random.default_rng(4)
    weights, bias = (random.standard_normal(s).astype(np.float32) for s in (kernel, kernel[:1]))
    x = [random.standard_normal(shape).astype(np.float32) for _ in range(2)]
    y = [convolved(each, weights, bias, attributes) for each in x]
    found = list(_rows(step("Conv", weights, x, y, bias=bias, **attributes)))
    groups = attributes.get("group", 1)
    matrices = weights.reshape(groups, kernel[0] // groups, -1).transpose(0, 2, 1)
    assert len(found) == 2
    for (rows, results), whole in zip(found, y, strict=True):
        assert len(rows) == len(results) == groups
        assert rows.shape[1] == min(most, whole.size // kernel[0])
        bound = 2 * (matrices.shape[1] + 2) * EPS * (np.abs(rows) @ np.abs(matrices) + 2 * np.abs(bias).max())
        assert (np.abs(rows @ matrices - results) <= bound).all()
        assert np.ptp(rows, axis=1).min() > 0  # not one position again and again


@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "transposed"])
def test_rows_times_weights_are_the_product(kind: str) -> None:
    random = np.random.default_rng(4)
    weights = random.standard_normal((12, 5)).astype(np.float32)
    bias = None if kind == "MatMul" else random.standard_normal(5).astype(np.float32)
    x = [random.standard_normal((3, 4, 12) if kind == "MatMul" else (7, 12)).astype(np.float32) for _ in range(2)]
    y = [each @ weights + (0 if bias is None else bias) for each in x]
    flipped = {"transB": 1} if kind == "transposed" else {}
    stored = weights.T.copy() if flipped else weights
    for rows, results in _rows(step("MatMul" if kind == "MatMul" else "Gemm", stored, x, y, bias=bias, **flipped)):
        bound = 2 * 14 * EPS * (np.abs(rows[0]) @ np.abs(weights) + 2 * np.abs(0 if bias is None else bias))
        assert (np.abs(rows[0] @ weights - results[0]) <= bound).all()
        assert len(rows[0]) == (12 if kind == "MatMul" else 7)


def test_moments_are_those_of_all_rows_together() -> None:
    random = np.random.default_rng(6)
    parts = [(random.standard_normal((n, 5)) + 3, random.standard_normal((n, 2)) - 1) for n in (4, 9)]
    weights = random.standard_normal((5, 2)).astype(np.float32)
    x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
    for centred in (False, True):
        u, v = (each - each.mean(axis=0) * centred for each in (x, y))
        found = moments_of((x.astype(np.float32), y.astype(np.float32)), weights, centred)
        assert found.rows == 13
        bound = 4 * 16 * EPS * (np.abs(x).max() * 5 * np.abs(weights).max() + np.abs(y).max()) * np.abs(x).max()
        assert np.abs(found.columns - u.T @ u / 13).max() <= bound
        assert np.abs(found.residual - u.T @ (u @ weights - v) / 13).max() <= bound


# ---------------------------------------------------------------------------------------------------------- layers

LAYERS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "product": ("MatMul", (24, 10), {}),
    "gemm": ("Gemm", (24, 10), {}),
    "transposed": ("Gemm", (10, 24), {"transB": 1}),
    "convolution": ("Conv", (10, 6, 2, 2), {}),
    "groups": ("Conv", (10, 12, 1, 2), {"group": 2}),
}


def alike(shape: tuple[int, ...], axis: int, samples: int, *, seed: int, mean: float | Array = 0.0) -> list[Array]:
    """Draw inputs whose channels, along an axis, have most of what is in them in common."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(samples):
        common = random.standard_normal([1 if i == axis % len(shape) else n for i, n in enumerate(shape)])
        made.append((mean + common + 0.3 * random.standard_normal(shape)).astype(np.float32))
    return made


def product(op: str, attributes: dict[str, Any]) -> Callable[[Array, Array], Array]:
    """Return a function that computes a layer without bias."""
    if op == "Conv":
        return lambda x, w: convolved(x, w, np.zeros(len(w), np.float32), attributes)
    return lambda x, w: np.asarray(x @ (w.T if attributes.get("transB") else w))


def error(op: str, attributes: dict[str, Any], one: Layer, stored: Array, x: list[Array]) -> float:
    """Return the power of what integers change of the results, for an input."""
    compute, params = product(op, attributes), one.weights.params
    shape = [-1 if i == params.axis else 1 for i in range(stored.ndim)]
    rough = stored.astype(np.float32) * params.scale.reshape(shape)
    return float(np.mean([np.square(compute(each, rough) - compute(each, one.weights.array)) for each in x]))


def layer(kind: str, *, seed: int = 1, mean: float | Array = 0.0) -> tuple[Layer, tuple[int, ...], int]:
    op, shape, attributes = LAYERS[kind]
    weights = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    inputs, axis = ((1, shape[1] * attributes.get("group", 1), 6, 6), 1) if op == "Conv" else ((25, 24), -1)
    x = alike(inputs, axis, 8, seed=2, mean=mean)
    y = [product(op, attributes)(each, weights) for each in x]
    return step(op, weights, x, y, **attributes), inputs, axis


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_loses_less_on_samples_that_were_not_seen(kind: str) -> None:
    op, _, attributes = LAYERS[kind]
    one, inputs, axis = layer(kind)
    found = learn_rounding(one, shifted=False)
    nearest = quantize(one.weights.array, one.weights.params)
    assert found is not None
    assert (found.dtype, found.shape) == (nearest.dtype, nearest.shape)
    assert np.abs(found.astype(int) - nearest).max() == 1
    assert np.abs(found.astype(int)).max() <= 127
    fresh = alike(inputs, axis, 16, seed=3)
    # the channels have a signal of 1 in common and 0.09 of their own, so that most of the error can be cancelled
    assert error(op, attributes, one, found, fresh) < 0.5 * error(op, attributes, one, nearest, fresh)


SATURATES = 17  # weights with which rounding for the least error alone saturates, in each layer


@pytest.mark.parametrize("kind", LAYERS)
def test_no_sum_of_two_products_exceeds_16_bits(kind: str) -> None:
    """On a CPU that adds in 16 bits, less is lost than with the nearest integers, and nothing saturates."""
    op, _, attributes = LAYERS[kind]
    one, inputs, axis = layer(kind, seed=SATURATES)
    channels, groups = one.weights.params.axis or 0, attributes.get("group", 1)
    params = prevent_saturation(one.weights.params, one.weights.array, channels, group=groups)
    one = replace(one, weights=replace(one.weights, params=params))
    found, free = learn_rounding(one, shifted=False, exact=False), learn_rounding(one, shifted=False)
    assert found is not None
    assert free is not None
    assert not (pair_peak(found, channels, group=groups) > PAIR_LIMIT).any()
    assert (pair_peak(free, channels, group=groups) > PAIR_LIMIT).any()  # without the limit, sums would be clipped
    fresh = alike(inputs, axis, 16, seed=3)
    nearest = quantize(one.weights.array, params)
    assert error(op, attributes, one, found, fresh) < 0.5 * error(op, attributes, one, nearest, fresh)


def test_what_the_layers_before_lost_is_made_up_for() -> None:
    """The float layer gives a fifth of a step more for each weight, which rounding to the nearest never sees."""
    one, inputs, axis = layer("product")
    weights = one.weights.array
    inputs_int8 = alike(inputs, axis, 8, seed=2)
    target = weights + 0.2 * one.weights.params.scale  # a fifth of a step is missing everywhere
    results = [x @ target for x in inputs_int8]
    lost = replace(one, int8_inputs=inputs_int8, float_results=results)
    fresh = alike(inputs, axis, 16, seed=3)

    def short(found: Array | None) -> float:
        assert found is not None
        given = found.astype(np.float32) * one.weights.params.scale
        return float(np.mean([np.square(x @ (weights + 0.2 * one.weights.params.scale) - x @ given) for x in fresh]))

    assert short(learn_rounding(lost, shifted=False)) < 0.5 * short(learn_rounding(one, shifted=False))


def test_noise_that_no_weights_explain_does_not_hide_what_rounding_gains() -> None:
    """The float layer gives what 24 weights cannot: making up for that on few rows would cost more than it gains."""
    one, inputs, axis = layer("product")
    random, x = np.random.default_rng(5), [each[:8] for each in one.int8_inputs]
    y = [each @ one.weights.array + 0.2 * random.standard_normal((8, 10)).astype(np.float32) for each in x]
    found = learn_rounding(replace(one, int8_inputs=x, float_results=y))
    fresh, nearest = alike(inputs, axis, 16, seed=3), quantize(one.weights.array, one.weights.params)
    assert found is not None
    assert error("MatMul", {}, one, found, fresh) < 0.5 * error("MatMul", {}, one, nearest, fresh)


def test_means_count_where_no_bias_makes_up_for_them() -> None:
    mean = np.resize([5.0, -5.0], 24)
    one, inputs, axis = layer("gemm", mean=mean)
    fresh = alike(inputs, axis, 16, seed=3, mean=mean)
    corrected, alone = (learn_rounding(one, shifted=shifted) for shifted in (True, False))
    assert corrected is not None
    assert alone is not None
    assert error("Gemm", {}, one, alone, fresh) < 0.5 * error("Gemm", {}, one, corrected, fresh)
    node = ir.node("MatMul", one.node.inputs)
    plain = replace(one, unit=replace(one.unit, op="MatMul"), node=node)
    assert np.array_equal(learn_rounding(plain), alone)  # type: ignore[arg-type]  # it has no bias to shift


@pytest.mark.slow
def test_what_is_learned_by_heart_is_refused() -> None:
    """The results of 64 positions are noise, in which 256 weights find what is not there.

    Each of two roundings is taken for better by chance with a probability of about 3 %: 2 standard errors of 16 parts.
    """
    taken = 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        weights = random.standard_normal((256, 8)).astype(np.float32)
        x = [random.standard_normal((16, 256)).astype(np.float32) for _ in range(4)]
        y = [each @ weights + random.standard_normal((16, 8)).astype(np.float32) for each in x]
        one = step("MatMul", weights, x, y)
        scales, nearest = (
            np.broadcast_to(one.weights.params.scale, weights.shape),
            quantize(weights, one.weights.params),
        )
        seen = moments_of((np.concatenate(x[:3]), np.concatenate(y[:3])), weights, centred=False)
        exact = weights / scales
        learned = round_columns(seen, exact, nearest.astype(np.float32), scales, bounds_of(one.weights.params))
        assert (costs(seen, scales * (learned - exact)) < costs(seen, scales * (nearest - exact))).all()  # as it seems
        taken += learn_rounding(one) is not None
    assert taken <= 2


@pytest.mark.parametrize(
    ("gains", "sure"),
    [
        ([1.0], False),
        ([1.0, 1.0], True),
        ([0.0, 0.0], False),
        ([-1.0, -1.0], False),
        ([9.0, 1.0], False),
        ([3.0, 1.0, 2.0, 2.0], True),
        ([3.0, -1.0, 2.0, 0.0], False),
    ],
    ids=str,
)
def test_a_gain_is_sure_above_two_standard_errors(gains: list[float], sure: bool) -> None:
    assert surely(np.asarray(gains)) is sure


@pytest.mark.parametrize("centred", [False, True])
def test_losses_are_squared_errors_in_parts(centred: bool) -> None:
    x, y = np.arange(40, dtype=np.float32).reshape(40, 1), np.ones((40, 2), np.float32)
    weights = np.asarray([[2, -1]], np.float32)
    errors = x @ weights - y
    errors -= errors.mean(axis=0) * centred
    found = losses(x @ weights - y, centred)
    assert len(found) == 16
    assert found[0] == np.square(errors[:3]).sum()  # whole numbers and halves: exact
    assert found.sum() == np.square(errors).sum()
    assert len(losses((x @ weights - y)[:5], centred)) == 5
    twice = np.stack([x @ weights - y] * 2)
    assert np.array_equal(losses(twice, centred), 2 * found)


REFUSED = {
    "few-samples": ("MatMul", (24, 10), (25, 24), 3, {}),
    "few-positions": ("MatMul", (72, 10), (2, 72), 8, {}),
    "pads-by-name": ("Conv", (4, 3, 3, 3), (1, 3, 6, 6), 8, {"auto_pad": "SAME_UPPER"}),
    "stacked-weights": ("MatMul", (2, 24, 10), (2, 25, 24), 8, {}),
}


@pytest.mark.parametrize(("op", "kernel", "shape", "samples", "attributes"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_looked_at_stays_nearest(
    op: str, kernel: tuple[int, ...], shape: tuple[int, ...], samples: int, attributes: dict[str, Any]
) -> None:
    weights = np.random.default_rng(1).standard_normal(kernel).astype(np.float32)
    x = alike(shape, 1 if op == "Conv" else -1, samples, seed=2)
    y = [product(op, attributes)(each, weights) for each in x]
    assert learn_rounding(step(op, weights, x, y, **attributes)) is None


@pytest.mark.parametrize(("kind", "columns", "groups"), [("gemm", 24, 1), ("transposed", 24, 1), ("convolution", 24, 1), ("groups", 24, 2)])  # fmt: skip
def test_what_it_takes_is_known_before(kind: str, columns: int, groups: int) -> None:
    """Second moments of each group, for each sweep a product with what changed, and six results to judge by."""
    one, _, _ = layer(kind)
    found = columns**2 * (rounding.ROWS + 2 * rounding.SWEEPS * 10 / groups)
    judged = 6 * columns * 10 / groups * rounding.ROWS / rounding.FOLDS
    assert operations(one) == groups * (found + judged)


@pytest.mark.parametrize("count", [0, 3, 4, 7, 64, 1000])
def test_one_of_each_fold_is_held_back(count: int) -> None:
    back = sorted(held_back(count))
    assert len(back) == count // FOLDS
    assert count % FOLDS or [position // FOLDS for position in back] == [*range(count // FOLDS)]


@pytest.mark.parametrize("period", [2, 4, 8])
def test_samples_of_every_kind_are_held_back_where_kinds_alternate(period: int) -> None:
    """Every fourth sample was held back: of kinds that alternate with period 2 or 4, one alone judged the others."""
    counts = np.bincount([position % period for position in held_back(64)], minlength=period)
    assert counts.min() >= 16 / period / 2
    assert counts.max() <= 16 / period * 2
