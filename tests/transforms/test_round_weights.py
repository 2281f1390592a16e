"""Weights rounded to a few equal steps: the grid, zero on it, and the tensors that stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from requant.calibration.model.session import Array
from requant.transforms import TransformError
from requant.transforms.round_weights import SMALL, round_weights


def rounded(weights: Array, **options: int) -> tuple[Array, list[str]]:
    """Return the weights of a model after `round_weights`, and why they stay."""
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[1] x) => (float[1] y) <float[{weights.size}] w = {{{", ".join(["0"] * weights.size)}}}> {{
            t = ReduceSum <keepdims = 0> (w)
            y = Mul (x, t)
        }}"""
    )
    value = model.graph.initializers["w"]
    value.const_value = ir.Tensor(weights, name="w")
    change = round_weights(model, **options)
    assert change.applied + change.skipped.total() == 1
    assert value.const_value is not None
    assert value.const_value.dtype == ir.DataType.from_numpy(weights.dtype)
    return value.const_value.numpy(), list(change.skipped)


@pytest.mark.parametrize(
    ("low", "high", "grid"),
    [
        (0.0, 3.0, [0, 1, 2, 3]),
        (-3.0, 0.0, [-3, -2, -1, 0]),
        (5.0, 8.0, [5, 6, 7, 8]),
        (5.5, 8.5, [5.5, 6.5, 7.5, 8.5]),  # zero is outside: the grid starts at the least weight
        (-8.5, -5.5, [-8.5, -7.5, -6.5, -5.5]),
        (-1.25, 1.75, [-1, 0, 1, 2]),  # shifted by a quarter of a step
        (-1.5, 1.5, [-2, -1, 0, 1]),  # half to even
    ],
)
def test_four_steps(low: float, high: float, grid: list[float]) -> None:
    weights = np.linspace(low, high, 31)
    found, left = rounded(weights, num_steps=4)
    assert not left
    assert np.unique(found).tolist() == grid
    nearest = np.array(grid)[np.abs(weights[:, None] - np.array(grid)).argmin(axis=1)]
    ties = (weights - grid[0]) % 1 == 0.5  # exactly between two steps
    assert found[~ties].tolist() == nearest[~ties].tolist()
    assert (np.abs(found - weights)[ties & (weights > grid[0]) & (weights < grid[-1])] == 0.5).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_zero_at_an_end_of_the_range_stays_zero(sign: int) -> None:
    for steps in (*range(2, 40), 58, 90):  # 0.7 / (0.7 / 57) is not 57 in float64
        found, _ = rounded(sign * np.linspace(0, 0.7, 100), num_steps=steps)
        assert found[0] == 0
        assert np.unique(found).size == steps


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_by_default_a_tensor_has_256_values(dtype: type) -> None:
    weights: Array = np.arange(257, dtype=dtype)
    found, left = rounded(weights)
    assert not left
    assert np.unique(found).size == 256
    assert rounded(weights[:256])[1] == ["few-values"]


def test_as_many_values_as_steps_stay() -> None:
    weights = np.geomspace(1, 2, 20).astype(np.float32)
    assert rounded(weights, num_steps=19)[1] == []
    found, left = rounded(weights, num_steps=20)
    assert left == ["few-values"]
    assert found.tolist() == weights.tolist()


@pytest.mark.parametrize("size", [1, SMALL - 1, SMALL])
def test_small_tensors_stay(size: int) -> None:
    assert rounded(np.linspace(-1, 1, size), num_steps=2)[1] == (["small"] if size < SMALL else [])


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_enough_to_stay(odd: float) -> None:
    weights = np.linspace(-1, 1, 40)
    weights[7] = odd
    found, left = rounded(weights, num_steps=4)
    assert left == ["not-finite"]
    np.testing.assert_array_equal(found, weights)


def test_integers_stay_and_are_not_counted() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 21]> g (int64[1] x) => (int64[17] y)
        <int64[17] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> { y = Add (x, w) }"""
    )
    assert str(round_weights(model, num_steps=2)) == "0 applied"


def test_one_step_is_no_grid() -> None:
    with pytest.raises(TransformError, match="at least 2, not 1"):
        rounded(np.linspace(-1, 1, 40), num_steps=1)
    assert np.unique(rounded(np.linspace(0, 1, 40), num_steps=2)[0]).tolist() == [0, 1]
