"""Built-in costs of units, where no costs are measured."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from requant.quantize.placement.estimates import _depth


@pytest.mark.parametrize(
    ("op", "shape", "attributes", "products"),
    [
        ("Conv", (8, 4, 3, 3), {}, 36),
        ("Gemm", (32, 12), {}, 32),
        ("Gemm", (12, 32), {"transB": 1}, 32),
        ("MatMul", (32, 12), {}, 32),
        ("MatMul", (3, 32, 24), {}, 32),  # a stack of weights
        ("MatMul", (32,), {}, 32),
        ("Attention", (32, 96), {}, 32),
    ],
)
def test_products_of_one_element(op: str, shape: tuple[int, ...], attributes: dict[str, int], products: int) -> None:
    assert _depth(ir.node(op, [], attributes), shape) == products
