"""Built-in costs of units, where no costs are measured."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from requant.quantize.placement import runs as placement_runs
from requant.quantize.placement.estimates import _depth


@pytest.mark.parametrize(
    ("op", "shape", "attributes", "products"),
    [
        ("Conv", (8, 4, 3, 3), {}, 36),
        ("ConvTranspose", (64, 32, 4, 4), {"strides": [2, 2]}, 64 * 4),
        ("ConvTranspose", (64, 1, 4), {"strides": [2], "group": 64}, 2),
        ("ConvTranspose", (64, 32, 1, 1), {"strides": [2, 2]}, 1),
        ("Gemm", (32, 12), {}, 32),
        ("Gemm", (12, 32), {"transB": 1}, 32),
        ("MatMul", (32, 12), {}, 32),
        ("MatMul", (3, 32, 24), {}, 32),  # a stack of weights
        ("MatMul", (32,), {}, 32),
        ("Attention", (32, 96), {}, 32),
    ],
)
def test_products_of_one_element(op: str, shape: tuple[int, ...], attributes: dict[str, Any], products: int) -> None:
    assert _depth(ir.node(op, [], attributes), shape) == products


NO_JOB: Any = None


@pytest.mark.parametrize(("run", "runs"), [(0.5, 12.0), (0.1, 60.0), (0.001, 100.0)])
def test_the_clock_limits_runs_that_built_in_costs_take_for_short(
    run: float, runs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 runs fit into 2 seconds by built-in costs; no more than three times the seconds are spent."""
    monkeypatch.setattr(placement_runs, "runs_for", lambda job, feed, seconds: 50 * seconds)
    assert placement_runs.runs_within(NO_JOB, {}, 2.0, run) == pytest.approx(runs)
