"""`remove_dynamic_quantization` gives back exactly the weights that a dynamically quantized model computes with."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from requant.transforms import run
from requant.transforms.graphs.queries import constant

Array = npt.NDArray[np.float32]
RANDOM = np.random.default_rng(5)
LSTM = """<ir_version: 8, opset_import: ["" : 17]> 
    g (float[1,B,24] x, float[{d},64,24] w, float[{d},64,16] r, float[{d},128] b) => (float[1,D,B,16] y, float[D,B,16] h) {{
    [lstm] y, h = LSTM <hidden_size = 16, direction = "{way}"> (x, w, r, b)
}}"""
ATTENTION = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[1,8,32] x, float[32,96] w, float[96] b) => (float[1,8,32] y) {
    [attention] y = com.microsoft.Attention <num_heads = 4, unidirectional = 1> (x, w, b)
}"""
CONV = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1,6,9,9] x, float[8,3,3,3] w, float[8] b) => (float[1,8,5,5] y) {
    [conv] y = Conv <group = 2, strides = [2, 2], pads = [1, 1, 1, 1]> (x, w, b)
}"""
PRODUCTS = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[3,5,24] x, float[24,7] w, float[7] b) => (float[3,5,7] y) {
    [matmul] p = MatMul (x, w)
    [bias] y = Add (p, b)
}"""
TEXTS = {
    "lstm": LSTM.format(d=1, way="forward"),
    "lstm-both-ways": LSTM.format(d=2, way="bidirectional"),
    "attention": ATTENTION,
    "conv": CONV,
    "matmul": PRODUCTS,
}


def filled(text: str) -> onnx.ModelProto:
    """Return a model in which each input but the first is an initializer of random values."""
    model = onnx.parser.parse_model(text)
    x, *weights = model.graph.input
    for value in weights:
        shape = [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        array = RANDOM.normal(size=shape).astype(np.float32) / 4
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    del model.graph.input[:]
    model.graph.input.append(x)
    return model


def outputs(model: onnx.ModelProto, feed: dict[str, Array], *, level: str = "ORT_ENABLE_ALL") -> list[Array]:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    return list(ort.InferenceSession(model.SerializeToString(), options).run(None, feed))


def feed_of(model: onnx.ModelProto) -> dict[str, Array]:
    """Return activations on a grid of 1/4 that spans the range of uint8: a DynamicQuantizeLinear rounds none."""
    shape = [axis.dim_value or 3 for axis in model.graph.input[0].type.tensor_type.shape.dim]
    x = RANDOM.integers(0, 256, size=shape).astype(np.float32)
    x.flat[:2] = 0, 255
    return {"x": ((x - 100) / 128).astype(np.float32)}


@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channel"])
@pytest.mark.parametrize("weights", [QuantType.QInt8, QuantType.QUInt8], ids=["s8", "u8"])
@pytest.mark.parametrize("case", TEXTS)
def test_outputs_are_equal_where_no_activation_is_rounded(
    case: str, weights: QuantType, per_channel: bool, tmp_path: Path
) -> None:
    model = filled(TEXTS[case])
    path = tmp_path / "dynamic.onnx"
    operators = ["Conv", "MatMul", "Attention", "LSTM"]
    # 7 bits: without VNNI, pairs of 8-bit products saturate
    quantize_dynamic(model, path, operators, per_channel=per_channel, reduce_range=True, weight_type=weights)
    done = run("fold_constants remove_dynamic_quantization", ir.load(path))
    assert done.applied[1].change.applied == 1
    assert {node.op_type for node in done.model.graph} <= {"Attention", "LSTM", "Conv", "MatMul", "Add"}
    feed = feed_of(model)
    dynamic = outputs(onnx.load(path), feed)
    restored = outputs(ir.to_proto(done.model), feed)
    for before, after in zip(dynamic, restored, strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=2e-5 * np.abs(before).max())


@pytest.mark.parametrize("case", TEXTS)
def test_weights_are_at_most_half_a_step_from_those_before_the_quantization(case: str, tmp_path: Path) -> None:
    """The step of 7 bits is at most a 63rd of the largest magnitude. An LSTM's weights are transposed in the file."""
    model, path = filled(TEXTS[case]), tmp_path / "dynamic.onnx"
    quantize_dynamic(model, path, ["Conv", "MatMul", "Attention", "LSTM"], reduce_range=True)
    restored = run("fold_constants remove_dynamic_quantization", ir.load(path)).model.graph.initializers
    for name in {"w", "r"} & {each.name for each in model.graph.initializer}:
        (before,) = (onnx.numpy_helper.to_array(each) for each in model.graph.initializer if each.name == name)
        after = next(
            tensor for key, value in restored.items() if key.startswith(f"{name}_") and (tensor := constant(value))
        )
        np.testing.assert_allclose(after.numpy(), before, rtol=0, atol=np.abs(before).max() / 126 * 1.001)


@pytest.mark.parametrize("offline", [False, True], ids=["as-written", "optimized"])
def test_weights_are_the_dequantized_ones(offline: bool, tmp_path: Path) -> None:
    """Also where the runtime has fused the operators into its own before the model was saved."""
    model, path = filled(PRODUCTS), tmp_path / "dynamic.onnx"
    quantize_dynamic(model, path, per_channel=True, weight_type=QuantType.QInt8)
    loaded = onnx.load(path)
    numbers = {each.name: onnx.numpy_helper.to_array(each) for each in loaded.graph.initializer}
    expected = numbers["w_quantized"].astype(np.float32) * numbers["w_scale"]
    if offline:
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "fused.onnx")
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        ort.InferenceSession(str(path), options)
        path = tmp_path / "fused.onnx"
        assert "DynamicQuantizeMatMul" in {node.op_type for node in onnx.load(path).graph.node}
    restored = run("remove_dynamic_quantization", ir.load(path)).model
    (product,) = (node for node in restored.graph if node.op_type == "MatMul")
    weights = constant(product.inputs[1])
    assert weights is not None
    np.testing.assert_array_equal(weights.numpy(), expected)


def test_a_weight_that_two_products_read_is_written_once(tmp_path: Path) -> None:
    text = PRODUCTS.replace("[bias] y = Add (p, b)", "[second] q = MatMul (x, w)  [bias] y = Add (p, q)")
    quantize_dynamic(filled(text), tmp_path / "dynamic.onnx")
    quantized = run("remove_dynamic_quantization", ir.load(tmp_path / "dynamic.onnx")).model
    assert [value.name for value in quantized.graph.initializers.values() if value.name != "b"] == ["w_quantized/float"]


def test_large_weights_are_computed_when_they_are_read(tmp_path: Path) -> None:
    text = (
        PRODUCTS.replace("24", "1024")
        .replace("7", "2048")
        .replace('opset_import: ["" : 12048]', 'opset_import: ["" : 17]')
    )
    quantize_dynamic(filled(text), tmp_path / "dynamic.onnx")
    restored = run("remove_dynamic_quantization", ir.load(tmp_path / "dynamic.onnx")).model
    assert isinstance(restored.graph.initializers["w_quantized/float"].const_value, ir.LazyTensor)
