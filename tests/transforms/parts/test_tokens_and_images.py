"""Reshapes between tokens and images: the same values, and channels last."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import reference

from requant.transforms import run
from requant.transforms.simplify_reshapes import simplify_reshapes

TO_IMAGES = """<ir_version: 10, opset_import: ["" : 21]>
images (float[{n}, {pixels}, {c}] x) => (float[{n}, {c}, {h}, {w}] y) <int64[4] image = {{{first}, {c}, {h}, {w}}}>
{{
  a = Transpose <perm = [0, 2, 1]> (x)
  y = Reshape(a, image)
}}
"""
TO_TOKENS = """<ir_version: 10, opset_import: ["" : 21]>
tokens (float[{n}, {c}, {h}, {w}] x) => (float[{n}, {pixels}, {c}] y) <int64[3] columns = {{{first}, {c}, {pixels}}}>
{{
  a = Reshape(x, columns)
  y = Transpose <perm = [0, 2, 1]> (a)
}}
"""
BETWEEN = """<ir_version: 10, opset_import: ["" : 21]>
between (float[{n}, {pixels}, {c}] x) => (float[{n}, {pixels}, {c}] y)
<int64[4] image = {{{first}, {c}, {h}, {w}}}, int64[3] columns = {{{first}, {c}, {pixels}}}>
{{
  a = Transpose <perm = [0, 2, 1]> (x)
  b = Reshape(a, image)
  d = Relu(b)
  e = Reshape(d, columns)
  y = Transpose <perm = [0, 2, 1]> (e)
}}
"""
"""What stands between does not depend on the order of axes."""


def kinds(model: ir.Model) -> list[str]:
    """Return the operators of a model."""
    return [node.op_type for node in model.graph]


def computed(proto: onnx.ModelProto, x: Any) -> Any:
    """Return the result of a model."""
    results: Any = reference.ReferenceEvaluator(proto).run(None, {"x": x})
    return results[0]


@given(
    text=st.sampled_from([TO_IMAGES, TO_TOKENS, BETWEEN]),
    batch=st.integers(1, 3),
    free=st.booleans(),
    lengths=st.tuples(*[st.integers(1, 5)] * 3),
)
def test_values_stay_and_channels_come_last(text: str, batch: int, free: bool, lengths: tuple[int, int, int]) -> None:
    c, h, w = lengths
    names = {"n": "N" if free else batch, "first": -1 if free else batch}
    proto = onnx.parser.parse_model(text.format(c=c, h=h, w=w, pixels=h * w, **names))
    made = ir.from_proto(proto)
    simplify_reshapes(made)
    shape = (batch, c, h, w) if text is TO_TOKENS else (batch, h * w, c)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    np.testing.assert_array_equal(computed(ir.to_proto(made), x), computed(proto, x))
    if min(lengths) > 1:
        expected = {TO_IMAGES: ["Reshape", "Transpose"], TO_TOKENS: ["Transpose", "Reshape"]}
        assert kinds(made) == expected.get(text, ["Reshape", "Transpose", "Relu", "Transpose", "Reshape"])
        assert simplify_reshapes(made).applied == 0


@pytest.mark.parametrize("batch", ["N", "2"])
def test_transposes_between_tokens_leave(batch: str) -> None:
    text = BETWEEN.format(n=batch, c=8, h=3, w=4, pixels=12, first=-1)
    made = run("simplify_reshapes sink_transposes", ir.from_onnx_text(text)).model
    assert kinds(made) == ["Reshape", "Relu", "Reshape"]
