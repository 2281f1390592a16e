"""Weights of the written model in the shorter form of the given model: half floats, scaled integers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from click.testing import CliRunner

from requant.calibration.model.session import Array
from requant.cli import main
from requant.quantize import Options, quantize_model
from requant.quantize.model.stored import stored_as_given
from requant.quantize.steps.simplify import pipelines, simplify
from requant.transforms.int8.existing import release_weights

WIDTH = 48
RNG = np.random.default_rng(5)
STORED = RNG.integers(-127, 128, (WIDTH, WIDTH), np.int8)
BYTES = RNG.integers(0, 256, (WIDTH, WIDTH), np.uint8)
SCALES = RNG.uniform(0.001, 0.01, WIDTH).astype(np.float32)

# the nodes that compute the weight `f` (48 x 48) of the product, and the stored form that the written model has
FORMS = {
    "scaled": ("c = Cast<to = 1>(w8) f = Mul(c, scales)", "Cast Mul"),
    "scaled on the left": ("c = Cast<to = 1>(w8) f = Mul(scales, c)", "Cast Mul"),
    "zero point": ("c = Cast<to = 1>(w8) d = Sub(c, scales) f = Mul(d, one)", "Cast Sub Mul"),
    "divided": ("c = Cast<to = 1>(u8) f = Div(c, scales)", "Cast Div"),
    "transposed": ("c = Cast<to = 1>(w8) m = Mul(c, one) f = Transpose<perm = [1, 0]>(m)", "Cast Mul Transpose"),
    "cast": ("f = Cast<to = 1>(w8)", "Cast"),
    "half": ("f = Cast<to = 1>(h)", "Cast"),
    "bfloat16": ("f = Cast<to = 1>(b)", "Cast"),
    "pairs": ("f = DequantizeLinear(w8, scale, zero)", "Cast Mul"),
    "pairs with a zero point": ("f = DequantizeLinear(u8, scale, middle)", "Cast Sub Mul"),
    "pairs per channel": ("f = DequantizeLinear<axis = 1>(w8, scales, zeros)", "Cast Mul"),
    "pairs per row": ("f = DequantizeLinear<axis = 0>(w8, scales)", "Cast Mul"),
}


def model(nodes: str, opset: int = 17) -> ir.Model:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> net (float[2,{WIDTH}] x) => (float[2,{WIDTH}] y)'
        "<float one = {0.125}, float scale = {0.03}, int8 zero = {0}, uint8 middle = {131}> {"
        f"{nodes} y = MatMul(x, f) }}"
    )
    arrays = {"w8": STORED, "u8": BYTES, "scales": SCALES, "zeros": np.zeros(WIDTH, np.int8)}
    used = {name for node in proto.graph.node for name in node.input}
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    for name, kind in (("h", ir.DataType.FLOAT16), ("b", ir.DataType.BFLOAT16)):
        tensors.append(ir.to_proto(ir.Tensor((STORED / 7).astype(kind.numpy()), name=name)))
    proto.graph.initializer.extend(each for each in tensors if each.name in used)
    return ir.from_proto(proto)


def plain(given: ir.Model) -> ir.Model:
    """Return the model that `requant quantize` writes in float."""
    done = simplify(given, lambda *_: None, pipeline=pipelines()[1])
    release_weights(done.model)
    return done.model


def run(source: ir.Model) -> Array:
    x = np.random.default_rng(0).standard_normal((2, WIDTH)).astype(np.float32)
    result = ort.InferenceSession(ir.to_proto(source).SerializeToString()).run(None, {"x": x})[0]
    assert isinstance(result, np.ndarray)
    return result


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_stored_as_the_given_model_stores_it_with_the_same_outputs(form: str) -> None:
    nodes, expected = FORMS[form]
    given = model(nodes)
    simple = plain(given)
    assert [node.op_type for node in simple.graph] == ["MatMul"]
    written = stored_as_given(simple, given)
    assert [node.op_type for node in written.graph] == [*expected.split(), "MatMul"]
    assert [node.op_type for node in simple.graph] == ["MatMul"]  # the argument does not change
    assert len(ir.to_proto(written).SerializeToString()) < 0.6 * len(ir.to_proto(simple).SerializeToString())
    np.testing.assert_array_equal(run(written), run(simple))


@pytest.mark.parametrize("form", ["scaled", "half", "pairs per row"])
def test_the_runtime_computes_the_weight_when_it_loads_the_model(form: str, tmp_path: Path) -> None:
    given = model(FORMS[form][0])
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    ort.InferenceSession(ir.to_proto(stored_as_given(plain(given), given)).SerializeToString(), options)
    assert [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node] == ["MatMul"]


def test_a_weight_that_a_transform_changed_stays_float() -> None:
    given = model(FORMS["scaled"][0])
    simple = plain(given)
    (weight,) = (value for value in simple.graph.initializers.values() if value.name == "f")
    assert weight.const_value is not None
    weight.const_value = ir.Tensor(np.nextafter(weight.const_value.numpy(), np.float32(9)), name="f")
    assert [node.op_type for node in stored_as_given(simple, given).graph] == ["MatMul"]


@pytest.mark.parametrize("tables", [(STORED / 7).astype(np.float32), None], ids=["float", "longer"])
def test_a_weight_without_a_shorter_form_stays_float(tables: Array | None) -> None:
    """A product of int8 and a float matrix is longer than its float result."""
    given = model("c = Cast<to = 1>(w8) f = Mul(c, other)" if tables is None else "f = Identity(other)")
    other = ir.Tensor(SCALES * STORED if tables is None else tables, name="other")
    value = ir.Value(name="other", const_value=other, shape=ir.Shape(other.shape), type=ir.TensorType(other.dtype))
    given.graph.register_initializer(value)
    for node in given.graph:
        for index, read in enumerate(node.inputs):
            if read is not None and read.name == "other":
                node.replace_input_with(index, value)
    assert [node.op_type for node in stored_as_given(plain(given), given).graph] == ["MatMul"]


def test_the_float_result_of_a_half_model_is_no_larger_and_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_latency: Callable[..., None]
) -> None:
    """INT8 is as fast as float here, so the simplified float model is written."""
    set_latency(monkeypatch, float_ms=1.0, int8_ms=1.0)
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> net (float16[N,48] x) => (float16[N,48] y)'
        "{ a = Sin(x) b = MatMul(a, w) c = Cos(b) y = MatMul(c, w) }"
    )
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array((STORED / 700).astype(np.float16), "w"))
    onnx.save(proto, tmp_path / "half.onnx")
    samples = np.random.default_rng(2).standard_normal((64, 48)).astype(np.float16)
    np.savez(tmp_path / "x.npz", x=samples)
    output = tmp_path / "out.onnx"
    command = ["quantize", str(tmp_path / "half.onnx"), "--data", str(tmp_path / "x.npz"), "-o", str(output), "--json"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout)["why_not"]
    assert output.stat().st_size < 1.5 * STORED.nbytes * 2
    again = CliRunner().invoke(main, ["reproduce", str(output), "--data", str(tmp_path / "x.npz")])
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(
    ("weights", "note"),
    [
        ("c = Cast<to = 1>(w8) f = Mul(c, one)", "because the given file stores its weights in fewer bits"),
        ("f = Tile(few, times)", "because it stores weights that the given file computes from fewer numbers"),
        ("f = Identity(f0)", ""),
    ],
    ids=["short", "computed", "float"],
)
def test_a_larger_output_says_why(tmp_path: Path, weights: str, note: str) -> None:
    proto = ir.to_proto(model(weights))
    floats = STORED / np.float32(7)
    others = {"f0": floats, "few": floats[: len(floats) // 8], "times": np.array([8, 1])}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in others.items() if n in weights)
    onnx.save(proto, tmp_path / "m.onnx")
    feeds = [{"x": RNG.standard_normal((2, WIDTH)).astype(np.float32)} for _ in range(8)]
    options = Options(force_int8=True, place="all", seconds=0.0, effort="low")
    result = quantize_model(tmp_path / "m.onnx", feeds, tmp_path / "q.onnx", options)
    notes = [each for each in result.notes if each.startswith("the output is larger")]
    assert (result.int8_bytes > result.float_bytes, len(notes)) == (bool(note), bool(note))
    assert all(note in each for each in notes)
