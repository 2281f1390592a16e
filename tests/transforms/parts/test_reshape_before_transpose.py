"""Reshapes that go in front of a Transpose: the same values, and how axes are split."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, reference

from requant.transforms.parts.reshape_before_transpose import split_axes
from requant.transforms.simplify_reshapes import simplify_reshapes

UNSQUEEZED = """<ir_version: 10, opset_import: ["" : 21]>
unsqueezed (float[3, 8] x) => (float[n, m, 2, 4] y)
<int64[0] none = {}, int64[1] zero = {0}, int64[1] one = {1}, int64[2] rest = {2, 4}>
{
  wide = Unsqueeze(x, none)
  shape = Shape(x)
  rows = Gather(shape, zero)
  pair = Concat <axis = 0> (rows, one, rest)
  y = Reshape(wide, pair)
}
"""
"""An Unsqueeze of no axis is an Identity."""


@st.composite
def turns(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Draw lengths of a tensor, of a reshape of it, an order of axes, and lengths of a reshape behind that."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))

    def merged(parts: list[int]) -> list[int]:
        ends = sorted({0, len(parts), *draw(st.lists(st.integers(0, len(parts)), max_size=3))})
        return [prod(parts[one:other]) for one, other in pairwise(ends)]

    first = merged(lengths)
    order = draw(st.permutations(range(len(first))))
    parts = [
        factor
        for axis in order
        for factor in draw(st.sampled_from([[first[axis]], [1, first[axis]], _halves(first[axis])]))
    ]
    return lengths, first, list(order), draw(st.sampled_from([parts, merged(parts)]))


def _halves(length: int) -> list[int]:
    return [2, length // 2] if length % 2 == 0 else [length]


def model_of(lengths: list[int], first: list[int], order: list[int], second: list[int]) -> onnx.ModelProto:
    """Return a model of a Reshape, a Transpose and a Reshape."""
    nodes = [
        helper.make_node("Reshape", ["x", "first"], ["a"], name="a"),
        helper.make_node("Transpose", ["a"], ["b"], name="b", perm=order),
        helper.make_node("Reshape", ["b", "second"], ["y"], name="c"),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", lengths), ("y", second))]
    constants = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in (("first", first), ("second", second))]
    graph = helper.make_graph(nodes, "turn", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def computed(proto: onnx.ModelProto, x: Any) -> Any:
    """Return the first result of a model."""
    results: Any = reference.ReferenceEvaluator(proto).run(None, {"x": x})
    return results[0]


@given(case=turns())
def test_values_stay_and_one_reshape_is_left(case: tuple[list[int], list[int], list[int], list[int]]) -> None:
    proto = model_of(*case)
    made = ir.from_proto(proto)
    simplify_reshapes(made)
    x = np.arange(prod(case[0]), dtype=np.float32).reshape(case[0])
    found, wanted = (computed(each, x) for each in (ir.to_proto(made), proto))
    np.testing.assert_array_equal(found, wanted)
    kinds = [node.op_type for node in made.graph]
    split = split_axes([case[1][axis] for axis in case[2]], case[3]) is not None
    assert len(kinds) <= (2 if split else 3)


def test_an_unsqueeze_may_have_no_axes() -> None:
    proto = onnx.parser.parse_model(UNSQUEEZED)
    made = ir.from_proto(proto)
    simplify_reshapes(made)
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    np.testing.assert_array_equal(computed(ir.to_proto(made), x), computed(proto, x))


@pytest.mark.parametrize(
    ("whole", "parts", "expected"),
    [
        ([10, 16, 7], [2, 5, 16, 7], [[2, 5], [16], [7]]),
        ([None, 16, 7], [None, 5, 16, 7], [[None, 5], [16], [7]]),
        ([16, None, 7], [4, 4, None, 5, 7], [[4, 4], [None, 5], [7]]),
        ([6, 1, 4], [6, 4], [[6], [], [4]]),
        ([6, 4], [6, 1, 4], [[6, 1], [4]]),
        ([10, 7], [7, 10], None),  # mixes them
        ([None, None], [4, 4], None),
        ([16, None], [None, 2], None),
        ([4, 7], [None, 7], None),  # may be 4, or may not
        ([4, 7], [4, 8], None),
        ([0, 7], [0, 7], None),
    ],
)
def test_how_axes_are_split(
    whole: list[int | None], parts: list[int | None], expected: list[list[int | None]] | None
) -> None:
    assert split_axes(whole, parts) == expected
