"""Layer normalizations over the channels: the fused one computes what the operators did."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from requant.calibration.model.session import Array
from requant.transforms.fuse_channel_norms import fuse_channel_norms

QUOTIENTS = (
    "r = Sqrt(p) n = Div(d, r)",
    "r = Sqrt(p) t = Sub(x, m) n = Div(t, r)",
    "r = Sqrt(p) k = ReduceMean<axes = [1]>(x) t = Sub(x, k) n = Div(t, r)",
    "r = Sqrt(p) i = Reciprocal(r) n = Mul(i, d)",
    "r = Sqrt(p) i = Div(one, r) n = Mul(d, i)",
    "r = Pow(p, half) n = Div(d, r)",
    "r = Pow(p, minus) n = Mul(d, r)",
)
NUMBERS = {"e": 1e-5, "one": 1, "two": 2, "half": 0.5, "minus": -0.5}


def normalization(quotient: str, lengths: tuple[int, ...], scale: Array | None, shift: Array | None) -> onnx.ModelProto:
    """Return a model with a normalization of x over axis 1 in several operators."""
    product, result = ("", "n") if scale is None else ("z = Mul(w, n)", "z")
    result = f"Relu({result})" if shift is None else f"Add({result}, b)"
    sizes = ",".join(map(str, lengths))
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[{sizes}] x) => (float[{sizes}] y) {{
        m = ReduceMean<axes = [1]>(x) d = Sub(x, m) s = Mul(d, d) v = ReduceMean<axes = [-{len(lengths) - 1}]>(s)
        p = Add(v, e) {quotient} {product} y = {result} }}"""
    proto = onnx.parser.parse_model(text)
    arrays = {name: np.array(number, np.float32) for name, number in NUMBERS.items()}
    arrays |= {name: array for name, array in (("w", scale), ("b", shift)) if array is not None}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return proto


@given(
    quotient=st.sampled_from(QUOTIENTS),
    channels=st.sampled_from([12, 33, 100]),
    sides=st.sampled_from([(5,), (3, 4), (2, 3, 2)]),
    offset=st.sampled_from([0.0, 30.0]),
    scaled=st.booleans(),
    shifted=st.booleans(),
    batched=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_fused_operator_computes_the_definition(
    quotient: str,
    channels: int,
    sides: tuple[int, ...],
    offset: float,
    scaled: bool,
    shifted: bool,
    batched: bool,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    x = (random.normal(size=(2, channels, *sides)) + offset).astype(np.float32)
    for_each = (*[1] * batched, channels, *[1] * len(sides))
    scale, shift = (random.normal(size=for_each).astype(np.float32) for _ in range(2))
    proto = normalization(quotient, x.shape, scale if scaled else None, shift if shifted else None)
    made = ir.from_proto(proto)
    assert fuse_channel_norms(made).applied == 1
    assert [node.op_type for node in made.graph if node.op_type != "Relu"] == [
        "Transpose",
        "LayerNormalization",
        "Transpose",
    ]
    result = np.asarray(ort.InferenceSession(ir.to_proto(made).SerializeToString()).run(None, {"x": x})[0])
    away = x.astype(np.float64) - x.astype(np.float64).mean(1, keepdims=True)
    spread = np.sqrt(np.square(away).mean(1, keepdims=True) + 1e-5)
    exact = away / spread * (scale if scaled else 1)
    exact = exact + shift if shifted else np.maximum(exact, 0)
    # x - mean loses the last bits of x, and of a sum over the channels; the division by a small spread makes it larger
    off = 2.0**-23 * (8 + np.sqrt(channels)) * (np.abs(x).max() / spread.min() + 1) * max(1, np.abs(scale).max())
    np.testing.assert_allclose(result, exact, rtol=0, atol=off)


@pytest.mark.parametrize("place", ["m", "d", "v", "r"])
def test_an_inner_tensor_that_is_an_output_stays(place: str) -> None:
    proto = normalization(QUOTIENTS[0], (1, 16, 3, 3), None, None)
    proto.graph.output.append(onnx.helper.make_tensor_value_info(place, onnx.TensorProto.FLOAT, None))
    assert fuse_channel_norms(ir.from_proto(proto)).applied == 0


@pytest.mark.parametrize("shape", [(), (3,), (3, 3), (1, 16, 3, 1)])
def test_a_factor_of_another_shape_stays_behind(shape: tuple[int, ...]) -> None:
    made = ir.from_proto(normalization(QUOTIENTS[0], (1, 16, 3, 3), np.full(shape, 2, np.float32), None))
    assert fuse_channel_norms(made).applied == 1
    assert [node.op_type for node in made.graph][-3:] == ["Transpose", "Mul", "Relu"]


@pytest.mark.parametrize("quotient", ["r = Sqrt(p) n = Mul(d, r)", "r = Pow(p, two) n = Div(d, r)"])
def test_other_formulas_stay(quotient: str) -> None:
    change = fuse_channel_norms(ir.from_proto(normalization(quotient, (1, 16, 3, 3), None, None)))
    assert (change.applied, change.skipped) == (0, {"other-numbers": 1})
