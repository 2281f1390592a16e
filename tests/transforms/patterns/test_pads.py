"""The lengths and the value of a Pad, as each opset writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from requant.transforms.patterns import pads


def pad(*inputs: Any, **attributes: Any) -> ir.Node:
    """Return a Pad; None stands for an input that is left out, and text for a computed one."""
    values: list[ir.Value | None] = [ir.Value(name="x")]
    for index, given in enumerate(inputs):
        value = None if given is None else ir.Value(name=f"i{index}")
        if value is not None and not isinstance(given, str):
            value.const_value = ir.tensor(np.asarray(given))
            ir.Graph([], [], nodes=[], initializers=[value])
        values.append(value)
    return ir.node("Pad", values, attributes)


@pytest.mark.parametrize(
    ("node", "rank", "expected"),
    [
        (pad(pads=[1, 2, 3, 4], value=2.0), None, ([1, 2], [3, 4])),  # below opset 11
        (pad(np.array([1, 2, 3, 4])), 2, ([1, 2], [3, 4])),
        (pad(np.array([1, 2, 3, 4])), 3, None),
        (pad(np.array([1, 2]), None, np.array([-1])), 4, ([0, 0, 0, 1], [0, 0, 0, 2])),
        (pad(np.array([1, 2, 3, 4]), None, np.array([2, 0])), 3, ([2, 0, 1], [4, 0, 3])),
        (pad(np.array([1, 2]), None, np.array([1])), None, None),
        (pad(np.array([1, 2]), None, "computed"), 4, None),
        (pad("computed"), 4, None),
        (pad(), 4, None),
    ],
)
def test_lengths_of_all_axes(node: ir.Node, rank: int | None, expected: object) -> None:
    assert pads.lengths(node, rank) == expected


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (pad(pads=[1, 1], value=2.0), 2.0),
        (pad(pads=[1, 1]), 0.0),
        (pad(np.array([1, 1])), 0.0),
        (pad(np.array([1, 1]), None), 0.0),
        (pad(np.array([1, 1]), np.float32(3.0)), 3.0),
        (pad(np.array([1, 1]), "computed"), None),
    ],
)
def test_value(node: ir.Node, expected: float | None) -> None:
    assert pads.value(node) == expected
