"""Forms of operators that only the runtime's integer layouts need."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant.transforms.int8.forms import to_integer_move
from requant.transforms.int8.runtime_workarounds import move_signed_pairs, pad_every_axis

HEADER = '<ir_version: 8, opset_import: ["" : 18]>\n'
CONSTANT = "int64[2] pads = {1, 2}, int64[1] axes = {-2}"
NODES = {
    "constant": ("p = Pad (x, pads, value, axes)", CONSTANT),
    "no-value": ('p = Pad (x, pads, "", axes)', CONSTANT),
    "reflected": ('p = Pad <mode = "reflect"> (x, pads, "", axes)', CONSTANT),
    "all-axes": ("p = Pad (x, pads)", "int64[8] pads = {0, 0, 1, 0, 0, 0, 2, 0}"),
    "computed-axes": ("a = Identity(axes) p = Pad (x, pads, value, a)", CONSTANT),
}


@pytest.mark.parametrize(
    ("case", "count"),
    [("constant", 1), ("no-value", 1), ("reflected", 1), ("all-axes", 0), ("computed-axes", 0)],
    ids=["constant", "no-value", "reflected", "all-axes", "computed-axes"],
)
def test_pads_are_spelled_out_for_every_axis(case: str, count: int) -> None:
    nodes, constants = NODES[case]
    text = f"{HEADER} g (float[1,2,4,3] x) => (float[1,2,7,3] y) <float value = {{7}}, {constants}> {{ {nodes} y = Neg(p) }}"
    model = ir.from_onnx_text(text)
    x = {"x": np.arange(24, dtype=np.float32).reshape(1, 2, 4, 3)}
    before = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, x)
    assert pad_every_axis(model) == count
    assert pad_every_axis(model) == 0
    after = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, x)
    assert np.array_equal(before, after)
    assert all(len(node.inputs) < 4 for node in model.graph if node.op_type == "Pad") == (case != "computed-axes")


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
def test_a_pad_of_bytes_has_no_float_value(mode: str) -> None:
    """Other modes than constant ignore their value; the runtime refuses it beside uint8 data."""
    pair = "QuantizeLinear(%s, s, z) %s = DequantizeLinear(%s, s, z)"
    text = f"""{HEADER} g (float[1,4] x) => (float[1,6] y)
        <float s = {{0.05}}, uint8 z = {{100}}, int64[4] pads = {{0, 1, 0, 1}}, float value = {{0.5}}> {{
            q = {pair % ("x", "d", "q")} [pad] p = Pad <mode = "{mode}"> (d, pads, value) r = {pair % ("p", "y", "r")} }}"""
    model = ir.from_onnx_text(text)
    x = {"x": np.array([[-1, 0, 1, 2]], np.float32)}
    before = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, x)
    pad = next(node for node in model.graph if node.op_type == "Pad")
    to_integer_move(pad)
    (after,) = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, x)
    assert [node.op_type for node in model.graph] == ["QuantizeLinear", "Pad", "DequantizeLinear"]
    expected = before[0] if mode != "constant" else np.where([[1, 0, 0, 0, 0, 1]], 0, before[0])
    assert np.array_equal(after, expected)  # the value of a constant Pad is 0 where requant plans it


@pytest.mark.parametrize(
    ("opset", "zero", "count"), [(21, "int8 z = {0}", 2), (20, "int8 z = {0}", 0), (21, "uint8 z = {128}", 0)]
)
def test_a_signed_pair_before_a_transpose_loads(opset: int, zero: str, count: int) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        g (float[3,4] x) => (float[4,3] y) <float s = {{0.25}}, {zero}> {{
            r = Relu(x) q = QuantizeLinear(r, s, z) d = DequantizeLinear(q, s, z) t = Transpose <perm = [1, 0]>(d) y = Neg(t)
        }}"""
    model = ir.from_onnx_text(text)
    assert move_signed_pairs(model) == count
    assert move_signed_pairs(model) == 0
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    (y,) = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": x})
    assert np.array_equal(y, -x.T)
