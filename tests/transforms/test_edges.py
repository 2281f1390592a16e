"""Rare types, ranks and lengths: what a transform writes computes the same, and the runtime loads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from requant.calibration.model.session import Array
from requant.transforms import run

TYPES = {"float": np.float32, "double": np.float64, "float16": np.float16}

MODELS = {
    # a scalar has a shape, with no axes
    "an Identity of a scalar": (
        "remove_no_ops",
        "(float[2,3] x, float s) => (float[2,3] y) { t = Identity(s) y = Mul(x, t) }",
        {},
        1,
    ),
    "equal nodes with scalar results": (
        "merge_duplicate_nodes",
        "(float x) => (float y, float z) { a = Relu(x) b = Relu(x) y = Neg(a) z = Abs(b) }",
        {},
        1,
    ),
    # constants with more axes than their tensor change its rank
    "a Transpose behind a constant that adds an axis": (
        "sink_transposes",
        """(float[1,2,3,4] x) => (float[2,1,4,3,2] y) {
          t = Transpose<perm = [0, 2, 3, 1]>(x) m = Mul(t, wide) y = Transpose<perm = [0, 1, 4, 2, 3]>(m)
        }""",
        {"wide": np.array([1, 2], np.float32).reshape(2, 1, 1, 1, 1)},
        0,
    ),
    "a GELU whose constants add an axis": (
        "fuse_gelu",
        "(float[2,4] x) => (float[1,2,4] y) { d = Div(x, root) e = Erf(d) a = Add(e, one) m = Mul(x, a) y = Mul(m, half) }",
        {name: np.full((1, 1, 1), value, np.float32) for name, value in (("root", 2**0.5), ("one", 1), ("half", 0.5))},
        0,
    ),
    # kernels that the runtime has for later opsets alone
    **{
        f"a LeakyRelu of {kind} in opset {opset}": (
            "fuse_leaky_relu",
            f"({kind}[4] x) => ({kind}[4] y) {{ m = Mul(x, slope) y = Max(x, m) }}",
            {"slope": np.array(0.1, TYPES[kind])},
            applied,
            opset,
        )
        for kind, opset, applied in (("double", 15, 0), ("double", 16, 1), ("float16", 15, 1))
    },
    **{
        f"a Clip of {kind} in opset {opset}": (
            "merge_clips",
            f"({kind}[4] x) => ({kind}[4] y) {{ m = Max(x, low) y = Min(m, high) }}",
            {"low": np.array(-1, TYPES[kind]), "high": np.array(0.5, TYPES[kind])},
            applied,
            opset,
        )
        for kind, opset, applied in (("double", 11, 0), ("double", 12, 2), ("float16", 12, 2))
    },
    "an axis of length 0": (
        "einsum_to_matmul",
        '(float[2,3] x) => (float[2,2,0] y) { y = Einsum<equation = "ik,kfg->ifg">(x, none) }',
        {"none": np.zeros((3, 2, 0), np.float32)},
        0,
    ),
    "half floats whose nodes have the names of their outputs": (
        "widen_floats",
        "(float16[2,3] x) => (float16[2,3] y) { [a] a = Relu(x) [y] y = Neg(a) }",
        {},
        2,
    ),
    "a Pad that ignores its value": (
        "qdq_to_qoperator",
        """(float[1,4] x) => (float[1,6] y) {
          q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) p = Pad<mode = "edge">(d, pads, zero)
          r = QuantizeLinear(p, s, z) y = DequantizeLinear(r, s, z)
        }""",
        {
            "s": np.float32(0.05),
            "z": np.uint8(100),
            "pads": np.array([0, 1, 0, 1], np.int64),
            "zero": np.float32(0),
        },
        1,
    ),
    "scales with one axis": (
        "qdq_to_qoperator",
        """(float[1,4] x) => (float[1,4] y) {
          q = QuantizeLinear<axis = 0>(x, s, z) d = DequantizeLinear<axis = 0>(q, s, z) a = Add(d, d) r = Relu(a)
          t = QuantizeLinear<axis = 0>(r, s, z) y = DequantizeLinear<axis = 0>(t, s, z)
        }""",
        {"s": np.array([0.05], np.float32), "z": np.array([0], np.uint8)},
        1,
    ),
}


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_it_computes_the_same(case: tuple[Any, ...]) -> None:
    name, text, constants, applied, *rest = case
    opset = rest[0] if rest else 17
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(array, key) for key, array in constants.items())
    random = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for value in proto.graph.input:
        shape = [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feeds[value.name] = np.asarray(random.normal(size=shape), dtype)
    result = run(name, ir.from_proto(proto))
    assert sum(step.change.applied for step in result.applied) == applied
    before, after = (computed(each, feeds) for each in (proto, ir.to_proto(result.model)))
    for one, other in zip(before, after, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(other, one, rtol=2e-3 if one.dtype == np.float16 else 1e-6, atol=1e-6)


def computed(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """Return the outputs of a model as it is written."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(each) for each in session.run(None, feeds)]


def test_weights_that_are_not_finite_stay_float() -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[2,3] x) => (float[2,4] y) { y = MatMul(x, w) }'
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.full((3, 4), np.inf, np.float32), "w"))
    (step,) = run("quantize_weights(minimum_size=1)", ir.from_proto(proto)).applied
    assert (step.change.applied, dict(step.change.skipped)) == (0, {"not-finite": 1})
