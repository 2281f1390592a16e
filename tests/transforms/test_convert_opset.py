"""Raising a model's opset: the same results, and nothing else touched."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant.transforms import REGISTRY, Change, TransformError, run, signature, verify
from requant.transforms.parts.functions import add_functions

convert_opset = REGISTRY["convert_opset"]

RANDOM = np.random.default_rng(6)
CONSTANTS = {
    "w": RANDOM.normal(size=(4, 3, 3, 3)).astype(np.float32),
    **{name: RANDOM.uniform(0.5, 1, 4).astype(np.float32) for name in ("b", "g", "z", "v")},
    "factors": np.array([1, 1, 2, 2], np.float32),
    "six": np.array(6, np.float32),
}
BODIES = {
    8: """{
        c = Conv <pads = [1, 1, 1, 1]> (x, w, b)
        n = BatchNormalization(c, g, z, z, v)
        r = Clip <min = 0.0, max = 6.0> (n)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
        s = Slice <axes = [2], starts = [0], ends = [1]> (p)
        q = Squeeze <axes = [2]> (s)
        u = Unsqueeze <axes = [0]> (q)
        y = ReduceSum <axes = [3], keepdims = 1> (u)
    }""",
    9: """{
        c = Conv(x, w)
        n = Upsample <mode = "nearest"> (c, factors)
        f = Flatten(n)
        y = Softmax <axis = 1> (f)
    }""",
    11: """{
        c = Conv(x, w)
        r = Clip(c, six)
        s = Squeeze(r)
        a, d = Split <axis = 1, split = [1, 3]> (r)
        y = ReduceSum <axes = [2, 3]> (d)
    }""",
}


def model(opset: int) -> ir.Model:
    """Build a model of an old opset from x to y, with some weights."""
    text = f'<ir_version: 4, opset_import: ["" : {opset}]> g (float[1,3,6,6] x) => (float[] y) {BODIES[opset]}'
    made = ir.from_onnx_text(text)
    for value in {value for node in made.graph for value in node.inputs if value is not None}:
        if value.name in CONSTANTS:
            value.const_value = ir.Tensor(CONSTANTS[value.name], name=value.name)
            made.graph.register_initializer(value)
    rank = result(made).ndim
    made.graph.outputs[0].shape = ir.Shape([None] * rank)
    return made


def result(model: ir.Model) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(written(model), options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(2).normal(size=(1, 3, 6, 6)).astype(np.float32)
    return np.asarray(session.run(["y"], {"x": x})[0])


def written(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


@pytest.mark.parametrize("opset", BODIES)
@pytest.mark.parametrize("to", [13, 17])
def test_an_old_model_computes_the_same(opset: int, to: int) -> None:
    before = model(opset)
    expected, ports = result(before), signature(before)
    after = run(f"convert_opset(to={to})", before)
    assert after.applied[0].change == Change(applied=1)
    assert after.model.opset_imports[""] == to
    assert signature(after.model) == ports
    found = result(after.model)
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()


def test_names_and_metadata_stay() -> None:
    made = model(8)
    for node in made.graph:
        node.name = f"node_of_{node.outputs[0].name}"
    made.metadata_props["author"] = "somebody"
    weights = {name: value.const_value for name, value in made.graph.initializers.items()}
    convert_opset(made)
    assert {node.name for node in made.graph} >= {"node_of_c", "node_of_r", "node_of_y"}
    assert made.metadata_props["author"] == "somebody"
    assert made.graph.name == "g"
    for name, tensor in weights.items():
        after = made.graph.initializers[name].const_value
        assert tensor is not None
        assert after is not None
        assert np.array_equal(after.numpy(), tensor.numpy())


@pytest.mark.parametrize("opset", [13, 17])
def test_a_model_that_is_new_enough_stays(opset: int) -> None:
    made = ir.from_onnx_text(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[N] x) => (float[N] y) {{ y = Relu(x) }}'
    )
    before = written(made)
    assert convert_opset(made) == Change()
    assert written(made) == before


def test_operators_of_other_domains_are_not_touched() -> None:
    made = ir.from_onnx_text(
        """<ir_version: 7, opset_import: ["" : 11, "my.domain" : 3, "com.microsoft" : 1]>
        g (float[2,1,4] x) => (float[2,4] y) <float[4] w = {1, 2, 3, 4}> {
            [a] t = my.domain.Anything <level = 3, name = "so"> (x, w)
            [b] u = com.microsoft.Gelu(t)
            [c] y = Squeeze <axes = [1]> (u)
        }"""
    )
    before = [
        (n.name, n.op_type, n.domain, [v.name for v in n.inputs if v], str(n.attributes))
        for n in made.graph
        if n.domain
    ]
    assert convert_opset(made) == Change(applied=1)
    after = [
        (n.name, n.op_type, n.domain, [v.name for v in n.inputs if v], str(n.attributes))
        for n in made.graph
        if n.domain
    ]
    assert after == before
    assert made.opset_imports == {"": 13, "my.domain": 3, "com.microsoft": 1}
    assert len(made.graph.node("c").inputs) == 2
    verify(made)


def test_a_model_without_standard_operators_stays() -> None:
    made = ir.from_onnx_text(
        '<ir_version: 7, opset_import: ["my.domain" : 3]> g (float[N] x) => (float[N] y) { y = my.domain.Anything(x) }'
    )
    assert convert_opset(made) == Change()


def test_an_operator_without_a_conversion_is_named() -> None:
    made = ir.from_onnx_text('<ir_version: 4, opset_import: ["" : 8]> g (float[N] x) => (float[N] y) { y = Relu(x) }')
    made.graph.node(0).op_type = "NoSuchOperator"
    with pytest.raises(TransformError, match=r"opset 8 cannot be converted to 13: .*NoSuchOperator") as caught:
        convert_opset(made)
    assert "\n" not in str(caught.value)


def test_a_converted_model_can_be_quantized() -> None:
    pipeline = "convert_opset fold_batch_norms quantize_weights(minimum_size=2) quantize_nodes"
    result_of = run(pipeline, model(8))
    assert [node.op_type for node in result_of.model.graph].count("ConvInteger") == 1
    expected = result(model(8))
    assert np.abs(result(result_of.model) - expected).max() < 0.05 * np.abs(expected).max()


UP, DOWN, BOTH = "{1, 1, 1.7, 2}", "{1, 1, 0.6, 0.5}", "{1, 1, 2, 0.5}"


def resized(mode: str, scales: str) -> ir.Model:
    return ir.from_onnx_text(
        f"""<ir_version: 5, opset_import: ["" : 10]> g (float[1,3,6,6] x) => (float[?,?,?,?] y) <float[4] s = {scales}> {{
            y = Resize <mode = "{mode}"> (x, s)
        }}"""
    )


@pytest.mark.parametrize(("mode", "scales"), [("nearest", UP), ("nearest", DOWN), ("linear", UP), ("linear", DOWN)])
def test_an_old_resize_samples_where_it_did(mode: str, scales: str) -> None:
    made = resized(mode, scales)
    expected = result(made)
    convert_opset(made)
    assert np.abs(result(made) - expected).max() <= 1e-6 * np.abs(expected).max()


def test_a_resize_that_rounds_both_ways_has_no_conversion() -> None:
    with pytest.raises(TransformError, match="may round up and down"):
        convert_opset(resized("nearest", BOTH))


def test_what_the_converter_makes_invalid_is_no_conversion() -> None:
    made = ir.from_onnx_text(
        """<ir_version: 4, opset_import: ["" : 9]> g (float[1,3] x) => (float[1,6] y) {
            y = Pad <mode = "edge", pads = [0, 1, 0, 2], value = 0.5> (x)
        }"""
    )
    before = written(made)
    with pytest.raises(TransformError, match=r"opset 9 cannot be converted to 13: .*Pad"):
        convert_opset(made)
    assert written(made) == before


def test_functions_are_inlined_because_the_converter_loses_them() -> None:
    made = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 11, "f" : 1]> g (float[1,4] x) => (float[4] y) { y = f.Flat (x) }
        <domain: "f", opset_import: ["" : 11]> Flat (a) => (b) { b = Squeeze <axes: ints = [0]> (a) }"""
    )
    result = run("convert_opset", made)
    assert not result.model.functions
    assert [len(node.inputs) for node in result.model.graph if node.op_type == "Squeeze"] == [2]  # axes are one of them


def test_functions_of_quantization_are_of_the_opset_they_were_made_for() -> None:
    made = ir.from_onnx_text('<ir_version: 8, opset_import: ["" : 13]> g (float[4] x) => (float[4] y) { y = Relu (x) }')
    add_functions(made)
    with pytest.raises(
        TransformError, match=r"opset 13 cannot be converted to 17: the model has functions, requant\.Quantize"
    ):
        convert_opset(made, to=17)
