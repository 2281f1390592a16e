"""Tensors that depend on shapes alone: they say nothing about the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
from onnx import numpy_helper

from requant.quantize import Options, quantize_model
from requant.quantize.model.shapes import of_shapes_alone

POSITIONS = """<ir_version: 10, opset_import: ["" : 21]>
net (float[N,T] x) => (float[N,T,4] y) {
    axes = Constant <value_ints = [-1]> ()
    zeros = Constant <value_float = 0.0> ()
    s = Shape(x)
    e = ConstantOfShape(s)
    [places] u = Unsqueeze(e, axes)
    [last] p = MatMul(u, v)
    [column] c = Unsqueeze(x, axes)
    [first] q = MatMul(c, w)
    noise = RandomNormal <shape = [1]> ()
    more = Mul(noise, zeros)
    count = Size(x)
    true = Constant <value = bool {1}> ()
    last = Loop(count, true, zeros) <body = step (int64 i, bool go, float before) => (bool again, float after) {
        again = Identity(go)
        within = ConstantOfShape(s)
        part = ReduceMax <keepdims = 0> (within)
        after = Add(before, part)
    }>
    r = Add(q, p)
    y = Add(r, more)
}"""


def model() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(POSITIONS)
    random = np.random.default_rng(0)
    for name in "vw":
        array = random.standard_normal((1, 4)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


def test_tensors_of_shapes_alone_are_found() -> None:
    found = of_shapes_alone(ir.from_proto(model()))
    assert found >= {"axes", "zeros", "s", "e", "u", "p", "v", "w", "within", "part"}
    assert not found & {"x", "c", "q", "r", "y", "noise", "more", "again", "after", "last"}


def test_they_give_no_findings(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    random = np.random.default_rng(1)
    data = [{"x": random.standard_normal((2, 8)).astype(np.float32)} for _ in range(20)]
    result = quantize_model(tmp_path / "m.onnx", data, tmp_path / "q.onnx", Options(place="all", force_int8=True))
    named = [name for finding in result.findings for name in ("'u'", "'p'", "'e'") if name in finding.message]
    assert named == []
