"""Targets of reshapes that a model computes from lengths become constants, and results stay."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import reference

from requant.transforms.simplify_reshapes import simplify_reshapes

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
    lengths (float[{axes}] x) => (float[{free}] y) <{constants}>
    {{ s = Shape(x) {nodes} a = Reshape(x, first) b = Transpose<perm = {perm}>(a) y = Reshape(b, second) }}"""


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Draw a model that merges axes, transposes, and splits them again, and the lengths of what it reads.

    The axes have lengths, names, or nothing; both targets are made of the lengths of axes, numbers and one -1 at most.
    """
    named = draw(st.lists(st.sampled_from(["A", "B", "C", "", "2", "3"]), min_size=1, max_size=4))
    sizes = {"A": draw(st.integers(1, 3)), "B": draw(st.integers(1, 3)), "C": draw(st.integers(1, 3)), "2": 2, "3": 3}
    lengths = [sizes.get(name) or draw(st.integers(1, 3)) for name in named]
    ends = sorted({0, len(named), *draw(st.lists(st.integers(0, len(named)), max_size=3))})
    groups = [[*range(one, other)] for one, other in pairwise(ends)]
    order = draw(st.permutations(range(len(groups))))
    constants, nodes = list[str](), list[str]()

    def number(value: int) -> str:
        constants.append(f"int64[1] c{len(constants)} = {{{value}}}")
        return f"c{len(constants) - 1}"

    def target(name: str, parts: list[list[int]]) -> None:
        rest, inputs = draw(st.integers(-1, len(parts) - 1)), list[str]()
        for place, axes in enumerate(parts):
            if place != rest and len(axes) > 1 and draw(st.booleans()):  # the first axis times the others
                inputs.append(f"{name}{place}")
                nodes.append(f"{name}{place}_one = Gather(s, {number(axes[0])})")
                others = number(prod(lengths[axis] for axis in axes[1:]))
                nodes.append(f"{name}{place} = Mul({name}{place}_one, {others})")
            elif place == rest or len(axes) > 1:
                inputs.append(number(-1 if place == rest else prod(lengths[axis] for axis in axes)))
            elif draw(st.booleans()):
                inputs.append(f"{name}{place}")
                nodes.append(f"{name}{place} = Gather(s, {number(axes[0])})")
            else:
                inputs.append(f"{name}{place}")
                nodes.append(f"{name}{place} = Slice(s, {number(axes[0])}, {number(axes[0] + 1)})")
        nodes.append(f"{name} = Concat<axis = 0>({', '.join(inputs)})")

    target("first", groups)
    target("second", [[axis] for place in order for axis in groups[place]])
    declared = [name or f"free{axis}" for axis, name in enumerate(named)]
    text = MODEL.format(
        axes=", ".join(declared),
        free=", ".join(f"y{axis}" for axis in range(len(named))),
        constants=", ".join(constants),
        nodes=" ".join(nodes),
        perm=[*order],
    )
    return text, lengths


def computed(proto: onnx.ModelProto, x: Any) -> Any:
    """Return the first result of a model."""
    results: Any = reference.ReferenceEvaluator(proto).run(None, {"x": x})
    return results[0]


@given(case=cases())
def test_results_stay(case: tuple[str, list[int]]) -> None:
    text, lengths = case
    proto = onnx.parser.parse_model(text)
    made = ir.from_proto(proto)
    simplify_reshapes(made)
    x = np.arange(prod(lengths), dtype=np.float32).reshape(lengths)
    np.testing.assert_array_equal(computed(ir.to_proto(made), x), computed(proto, x))


SWAPPED = """<ir_version: 8, opset_import: ["" : 17]>
    swapped (float[{axes}] x) => (float[a,b,c] y) <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] last = {{3}}>
    {{ s = Shape(x) m = Gather(s, zero) n = Gather(s, one) t = Concat<axis = 0>(n, m, last) y = Reshape(x, t) }}"""


@pytest.mark.parametrize("axes", ['"?","?",3', '"N","N",3', '"N","T",3', '"","",3'])
def test_a_name_of_all_axes_says_nothing(axes: str) -> None:
    """Exporters name all free axes alike; these have other lengths."""
    proto = onnx.parser.parse_model(SWAPPED.format(axes=axes))
    made = ir.from_proto(proto)
    simplify_reshapes(made)
    x = np.arange(30, dtype=np.float32).reshape(2, 5, 3)
    assert computed(ir.to_proto(made), x).shape == (5, 2, 3)


PART = """<ir_version: 8, opset_import: ["" : 17]>
    part (float[2,5,3] x) => (float[a,b] y) <int64[1] first = {0}, int64[1] rest = {-1}>
    { u = blocks.Keep(x) s = Shape<start = 1>(u) c = Cast<to = 7>(s) n = Gather(c, first)
      t = Concat<axis = 0>(n, rest) y = Reshape(u, t) }"""


def test_a_part_of_a_shape_of_unknown_rank_is_no_axis() -> None:
    """Nothing is known behind a node of an unknown domain, and the first number of this Shape is that of axis 1."""
    proto = onnx.parser.parse_model(PART.replace('["" : 17]', '["" : 17, "blocks" : 1]'))
    made = ir.from_proto(proto)
    assert simplify_reshapes(made).applied == 0
