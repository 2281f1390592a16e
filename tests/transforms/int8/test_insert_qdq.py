"""A plan written into a graph: where the pairs stand, what the runtime makes of them, and that the result is right."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.calibration.model.session import Array
from requant.quantize.runtime.isa import detect
from requant.transforms import verify
from requant.transforms.int8.bias_correction import mean_axis, mean_shift
from requant.transforms.int8.insert_qdq import insert_qdq
from requant.transforms.int8.plan import Choice, Impl, Plan
from requant.transforms.int8.qparams import QParams, asymmetric_u8
from requant.transforms.int8.units import units

MS = "com.microsoft"
SIZES = {
    "w": (4, 3, 3, 3),
    "v": (4, 4, 3, 3),
    "b": (4,),
    "m": (6, 4),
    "mt": (4, 6),
    "row": (1, 4),
    "cube": (2, 6, 4),
    "big": (4, 1, 1, 1),
}
IMAGE, ROWS = "float[2,3,8,8] x", "float[5,6] x"


def graph(body: str, inputs: str = IMAGE, outputs: str = "float[A,B,C,D] y", opset: int = 17) -> ir.Model:
    """Build a model; its weights are those of `SIZES` that the body reads, at random."""
    random = np.random.default_rng(11)
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in SIZES.items()}
    words = set(body.replace(",", " ").replace("(", " ").replace(")", " ").split())
    constants = ", ".join(
        f"float[{','.join(map(str, array.shape))}] {name} = {{{', '.join(map(repr, array.ravel().tolist()))}}}"
        for name, array in arrays.items()
        if name in words
    )
    header = f'<ir_version: 8, opset_import: ["" : {opset}]>'
    return ir.from_onnx_text(f"{header} g ({inputs}) => ({outputs}) <{constants}> {{ {body} }}")


def plan_of(model: ir.Model, float_units: str = "", u8_float: str = "") -> Plan:
    """Plan all units in uint8 but those named, one letter each; MaxPool and Flatten share their input's scale."""
    found = units(model.graph)
    kinds = dict.fromkeys(float_units, Impl.FLOAT) | dict.fromkeys(u8_float, Impl.U8_FLOAT)
    choices = {unit.name: Choice(kinds.get(unit.name, Impl.U8)) for unit in found}
    return Plan(found, choices)


def tensors(model: ir.Model, feeds: dict[str, Array]) -> dict[str, Array]:
    """Return every tensor of a float model."""
    model = model.clone()
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = ir.TensorType(ir.DataType.FLOAT)
                model.graph.outputs.append(value)
    return {**feeds, **run(model, feeds)}


def ranges(plan: Plan, seen: dict[str, Array]) -> dict[str, QParams]:
    return {name: asymmetric_u8(float(seen[name].min()), float(seen[name].max())) for name in plan.observed}


def run(model: ir.Model, feeds: dict[str, Array], *, optimise: bool = False) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(written(model), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return {name: np.asarray(result) for name, result in zip(names, session.run(names, feeds), strict=True)}


def written(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def executed(model: ir.Model, folder: Path) -> list[str]:
    """Return the operators that the runtime makes of a model."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 3  # the runtime warns that the file is for this machine
    ort.InferenceSession(written(model), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in ir.load(folder / "optimised.onnx").graph]


def feed(model: ir.Model) -> dict[str, Array]:
    random = np.random.default_rng(2)
    return {
        str(value.name): random.uniform(-1, 2, value.shape.numpy()).astype(np.float32)  # type: ignore[union-attr]
        for value in model.graph.inputs
    }


def quantized(model: ir.Model, plan: Plan) -> ir.Model:
    """Write a plan for this machine into a copy of a model, with the ranges of one feed."""
    result = model.clone()
    insert_qdq(result, plan=plan, qparams=ranges(plan, tensors(model, feed(model))), exact=detect().exact)
    verify(result)
    return result


def linears(model: ir.Model) -> list[tuple[str, str]]:
    """Return the operator and the tensor behind or before each pair of activations, in order."""
    return [
        (node.op_type, str(node.inputs[0].name))  # type: ignore[union-attr]
        for node in model.graph
        if node.op_type == "QuantizeLinear"
    ]


def readers(model: ir.Model, tensor: str) -> list[str]:
    values = {value.name: value for value in (*model.graph.inputs, *(o for n in model.graph for o in n.outputs))}
    return sorted(str(node.name) for node in values[tensor].consumers())


# --- where the pairs stand


def test_an_integer_chain_has_one_pair_per_tensor() -> None:
    model = graph(
        "[a] t = Conv(x, w, b) [r] u = Relu(t) [p] p = MaxPool <kernel_shape = [2, 2]> (u) [c] y = Conv(p, v, b)"
    )
    result = quantized(model, plan_of(model))
    assert linears(result) == [("QuantizeLinear", name) for name in ("x", "u", "p", "y/float")]
    assert [str(output.name) for output in result.graph.outputs] == ["y"]
    assert readers(result, "t") == ["r"]  # nothing between a Conv and its Relu
    assert readers(result, "x") == ["x/quantize"]


def test_a_tensor_has_one_pair_however_many_read_it() -> None:
    model = graph("[a] t = Conv(x, w) [c] u = Conv(t, v) [d] s = Conv(t, v) [e] y = Add(u, s)")
    result = quantized(model, plan_of(model))
    assert linears(result) == [("QuantizeLinear", name) for name in ("x", "t", "u", "s", "y/float")]
    assert readers(result, "t/dequantized") == ["c", "d"]


def test_float_readers_keep_a_float_original() -> None:
    model = graph(
        "[s] t = Sigmoid(x) [a] u = Conv(t, w) [f] z = Tanh(t) [r] y = Relu(z)",
        outputs="float[A,B,C,D] u, float[A,B,C,D] y",
    )
    result = quantized(model, plan_of(model, float_units="sfr"))
    assert readers(result, "t") == ["f", "t/quantize"]
    assert readers(result, "t/dequantized") == ["a"]
    assert [name for _, name in linears(result)] == ["t", "u/float"]


def test_all_readers_of_an_integer_result_read_it_dequantized() -> None:
    model = graph(
        """[a] t = Conv(x, w) [f] z = Tanh(t)
        [i] y = If(c) <then_branch = then () => (float[A,B,C,D] p) { [inner] p = Identity(t) },
                       else_branch = else () => (float[A,B,C,D] q) { q = Identity(z) }>""",
        inputs=f"{IMAGE}, bool c",
    )
    plan = plan_of(model, float_units="fi")
    result = model.clone()
    insert_qdq(result, plan=plan, qparams={name: asymmetric_u8(-9, 9) for name in plan.observed})
    verify(result)
    assert readers(result, "t") == ["t/quantize"]
    assert readers(result, "t/dequantized") == ["f", "inner"]


def test_float_units_get_no_pair_and_keep_their_weights() -> None:
    model = graph("[a] t = Conv(x, w, b) [c] y = Conv(t, v)")
    result = quantized(model, plan_of(model, float_units="a"))
    assert [name for _, name in linears(result)] == ["t", "y/float"]
    assert {"w", "b"} <= set(result.graph.initializers)
    assert "v" not in result.graph.initializers


def test_a_plan_in_float_changes_nothing() -> None:
    model = graph("[a] t = Conv(x, w, b) [c] y = Conv(t, v)")
    before = written(model)
    assert insert_qdq(model, plan=plan_of(model, float_units="ac"), qparams={}).applied == 0
    assert written(model) == before


def test_an_integer_output_that_is_read_again_keeps_its_name() -> None:
    model = graph("[a] t = Conv(x, w) [c] y = Conv(t, v)", outputs="float[A,B,C,D] t, float[A,B,C,D] y")
    result = quantized(model, plan_of(model))
    assert [str(output.name) for output in result.graph.outputs] == ["t", "y"]
    assert readers(result, "t") == ["c"]
    found, expected = run(result, feed(model)), run(model, feed(model))
    for name in ("t", "y"):
        assert np.abs(found[name] - expected[name]).max() < 0.05 * np.abs(expected[name]).max()


def test_shared_weights_are_stored_once_where_their_scales_agree() -> None:
    model = graph("[a] t = Conv(x, big) [c] u = Conv(t, v) [d] y = Conv(u, v)", inputs="float[2,1,9,9] x")
    result = quantized(model, plan_of(model))
    assert sum(str(name).startswith("v/") for name in result.graph.initializers) == 3  # int8, scale, zero point
    assert len({node.inputs[1] for node in result.graph if node.op_type == "Conv" and node.name in ("c", "d")}) == 1


def test_biases_of_one_name_are_stored_per_scale() -> None:
    model = graph("[a] t = Conv(x, w, b) [c] y = Conv(t, v, b)")
    result = quantized(model, plan_of(model))
    biases = {node.name: node.inputs[2] for node in result.graph if node.op_type == "Conv"}
    assert biases["a"] is not biases["c"]
    for bias in biases.values():
        assert bias is not None
        node = bias.producer()
        assert node is not None
        assert node.inputs[0].dtype is ir.DataType.INT32  # type: ignore[union-attr]


def test_a_relu_moves_behind_the_pool_whose_float_result_is_quantized() -> None:
    model = graph("[a] t = Conv(x, w) [r] u = Relu(t) [p] p = MaxPool <kernel_shape = [2, 2]> (u) [c] y = Conv(p, v)")
    result = quantized(model, plan_of(model, float_units="ap"))
    order = [node.op_type for node in result.graph if node.op_type != "DequantizeLinear"]
    assert order == ["Conv", "MaxPool", "Relu", "QuantizeLinear", "Conv", "QuantizeLinear"]
    found, expected = run(result, feed(model))["y"], run(model, feed(model))["y"]
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize(
    "outputs", ["float[A,B,C,D] y, float[A,B,C,D] u", "float[A,B,C,D] y, float[A,B,C,D] p"], ids=["relu", "pool"]
)
def test_a_relu_whose_result_the_user_reads_stays(outputs: str) -> None:
    model = graph(
        "[a] t = Conv(x, w) [r] u = Relu(t) [p] p = MaxPool <kernel_shape = [2, 2]> (u) [c] y = Conv(p, v)",
        outputs=outputs,
    )
    result = quantized(model, plan_of(model, float_units="apr"))
    order = [node.op_type for node in result.graph if node.op_type != "DequantizeLinear"]
    assert order[:3] == ["Conv", "Relu", "MaxPool"]
    for name, expected in run(model, feed(model)).items():
        assert np.abs(run(result, feed(model))[name] - expected).max() < 0.05 * np.abs(expected).max()


# --- what the runtime makes of it

KERNELS = {
    "Conv": ("[a] y = Conv(x, w, b)", IMAGE, "", "", ["QLinearConv"]),
    "Conv-Relu": ("[a] t = Conv(x, w, b) [r] y = Relu(t)", IMAGE, "", "", ["QLinearConv"]),
    "Conv-MaxPool-Conv": (
        "[a] t = Conv(x, w, b) [r] u = Relu(t) [p] p = MaxPool <kernel_shape = [2, 2]> (u) [c] y = Conv(p, v)",
        IMAGE,
        "",
        "",
        ["QLinearConv", "MaxPool", "QLinearConv"],
    ),
    "Add": (
        "[a] t = Conv(x, w) [c] u = Conv(x, w, b) [e] y = Add(t, u)",
        IMAGE,
        "",
        "",
        ["QLinearConv", "QLinearConv", "QLinearAdd"],
    ),
    "Gemm": ("[a] y = Gemm(x, m, b)", ROWS, "", "", ["QGemm"]),
    "Gemm-transposed": ("[a] y = Gemm <transB = 1> (x, mt, row)", ROWS, "", "", ["QGemm"]),
    "Gemm-float": ("[a] y = Gemm(x, m, b)", ROWS, "", "a", ["QGemm"]),
    "MatMul": ("[a] y = MatMul(x, m)", ROWS, "", "", ["QLinearMatMul"]),
    "MatMul-3d": ("[a] y = MatMul(x, m)", "float[2,5,6] x", "", "", ["QLinearMatMul"]),
    "MatMul-float": ("[a] t = MatMul(x, m) [s] y = Softmax(t)", ROWS, "s", "a", ["MatMulIntegerToFloat", "Softmax"]),
    "MatMul-3d-bias": (
        "[a] t = MatMul(x, m) [b] u = Add(t, b) [s] y = Softmax(u)",
        "float[2,5,6] x",
        "sb",
        "a",
        ["MatMulIntegerToFloat", "Add", "Softmax"],
    ),
    "MatMul-batched-weights": ("[a] y = MatMul(x, cube)", "float[2,5,6] x", "", "", ["QLinearMatMul"]),
}
each_kernel = pytest.mark.parametrize(
    ("body", "inputs", "in_float", "u8_float", "kernels"), KERNELS.values(), ids=KERNELS.keys()
)


def kernel_models(body: str, inputs: str, in_float: str, u8_float: str) -> tuple[ir.Model, ir.Model]:
    rank = 2 if "Gemm" in body else inputs.count(",") + 1
    model = graph(body, inputs, f"float[{','.join('ABCD'[:rank])}] y")
    return model, quantized(model, plan_of(model, in_float, u8_float))


@each_kernel
def test_the_runtime_runs_integer_kernels(
    body: str, inputs: str, in_float: str, u8_float: str, kernels: list[str], tmp_path: Path
) -> None:
    _, result = kernel_models(body, inputs, in_float, u8_float)
    found = executed(result, tmp_path)
    assert [op for op in found if op not in ("QuantizeLinear", "DequantizeLinear")] == kernels
    assert found.count("QuantizeLinear") == 1


@each_kernel
def test_the_runtime_computes_what_the_graph_says(
    body: str, inputs: str, in_float: str, u8_float: str, kernels: list[str]
) -> None:
    model, result = kernel_models(body, inputs, in_float, u8_float)
    simulated, real = (run(result, feed(model), optimise=optimise)["y"] for optimise in (False, True))
    expected = run(model, feed(model))["y"]
    step = (max(expected.max(), 0) - min(expected.min(), 0)) / 255
    assert np.abs(simulated - real).max() <= step * 1.001
    assert np.abs(real - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("opset", [11, 12])
def test_before_opset_13_the_pairs_are_of_the_runtimes_own_domain(opset: int, tmp_path: Path) -> None:
    model = graph("[a] t = Conv(x, w, b) [r] y = Relu(t)", opset=opset)
    result = quantized(model, plan_of(model))
    assert {node.domain for node in result.graph if "Linear" in node.op_type} == {MS}
    assert result.opset_imports == {"": opset, MS: 1}
    found, expected = run(result, feed(model))["y"], run(model, feed(model))["y"]
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    assert "QLinearConv" in executed(result, tmp_path)


# --- bias correction

CORRECTED = {
    "Conv": ("[a] y = Conv(x, w, b)", IMAGE),
    "Conv-no-bias": ("[a] y = Conv(x, w)", IMAGE),
    "Gemm": ("[a] y = Gemm(x, m, b)", ROWS),
    "Gemm-transposed": ("[a] y = Gemm <transB = 1> (x, mt)", ROWS),
}


@pytest.mark.parametrize(("body", "inputs"), CORRECTED.values(), ids=CORRECTED.keys())
def test_bias_correction_restores_the_mean(body: str, inputs: str) -> None:
    """The mean of each output channel is the float model's, up to what the rounding of the activations leaves."""
    rank = inputs.count(",") + 1
    model = graph(body, inputs, f"float[{','.join('ABCD'[:rank])}] y")
    weight = model.graph.node("a").inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    spoilt = weight.const_value.numpy().copy()
    axes = (0,) if body.endswith("(x, m, b)") else tuple(range(1, spoilt.ndim))
    spoilt[np.abs(spoilt) < 0.9 * np.abs(spoilt).max(axes, keepdims=True)] *= 0.003  # below a step: rounded to nothing
    weight.const_value = ir.Tensor(spoilt, name=weight.name)
    shape = [200, *model.graph.inputs[0].shape.numpy()[1:]]  # type: ignore[union-attr]
    x = np.random.default_rng(4).uniform(0, 2, shape).astype(np.float32)
    model.graph.inputs[0].shape = ir.Shape(["N", *shape[1:]])
    plan = plan_of(model, u8_float="a" if "Gemm" in body else "")
    qparams = ranges(plan, tensors(model, {"x": x}))
    over = tuple(i for i in range(rank) if i != 1)
    means = {"x": x.mean(over, dtype=np.float64)}
    expected, errors = run(model, {"x": x})["y"].mean(over), []
    for given_means in (means, None):
        result = model.clone()
        insert_qdq(result, plan=plan, qparams=qparams, means=given_means)
        errors.append(np.abs(run(result, {"x": x})["y"].mean(over) - expected).max())
        assert model.graph.node("a").attributes == result.graph.node("a").attributes
    assert errors[0] < errors[1] / 4


@given(
    group=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    rank=st.integers(0, 2),
    seed=st.integers(0, 999),
)
@settings(max_examples=40)
def test_the_shift_of_a_conv_is_that_of_a_constant_image(
    group: int, sizes: tuple[int, int], rank: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    error = random.normal(size=(group * sizes[0], sizes[1], *[3] * rank)).astype(np.float32)
    means = random.normal(size=group * sizes[1])
    node = ir.node("Conv", [ir.Value(name="x"), ir.Value(name="w")], {"group": group})
    expected = [
        sum(float(error[m, c].sum(dtype=np.float64)) * means[m // sizes[0] * sizes[1] + c] for c in range(sizes[1]))
        for m in range(len(error))
    ]
    found = mean_shift(node, error, means)
    assert found is not None
    assert found.dtype == np.float32
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6 * np.abs(error).sum() * np.abs(means).max())


def test_the_shift_of_a_transposed_convolution_is_the_mean_over_its_phases() -> None:
    """Of an image with equal pixels, every result of one phase is the sum of its taps."""
    error = np.random.default_rng(0).standard_normal((3, 2, 4, 6)).astype(np.float32)
    means = np.array([1.0, 10.0, 100.0])
    node = ir.node("ConvTranspose", [ir.Value(name="x"), ir.Value(name="w")], {"strides": [2, 3]})
    found = mean_shift(node, error, means)
    assert found is not None
    phases = [error[:, :, i::2, j::3].sum(axis=(2, 3)).T @ means for i in range(2) for j in range(3)]
    assert found == pytest.approx(np.mean(phases, axis=0), rel=1e-5)
    assert mean_shift(node, error, np.ones(2)) is None
    assert mean_axis(node) == 1


@pytest.mark.parametrize(("op", "transposed"), [("Gemm", False), ("Gemm", True), ("MatMul", False)])
def test_the_shift_of_a_matrix_product(op: str, transposed: bool) -> None:
    error = np.arange(6, dtype=np.float32).reshape(3, 2)
    means = np.array([1.0, 10.0, 100.0])
    node = ir.node(op, [ir.Value(name="x"), ir.Value(name="w")], {"transB": 1} if transposed else {})
    found = mean_shift(node, error.T if transposed else error, means)
    assert found is not None
    assert found.tolist() == [0 + 20 + 400, 1 + 30 + 500]


def test_means_of_another_tensor_correct_nothing() -> None:
    conv = ir.node("Conv", [ir.Value(name="x"), ir.Value(name="w")])
    assert mean_shift(conv, np.ones((4, 3, 1, 1), np.float32), np.ones(2)) is None
    gemm = ir.node("Gemm", [ir.Value(name="x"), ir.Value(name="w")])
    assert mean_shift(gemm, np.ones((4, 3), np.float32), np.ones(3)) is None
    assert mean_shift(gemm, np.ones((4, 3, 4), np.float32), np.ones(4)) is None
    grouped = ir.node("Conv", [ir.Value(name="x"), ir.Value(name="w")], {"group": 2})
    assert mean_shift(grouped, np.ones((3, 3, 1, 1), np.float32), np.ones(6)) is None
    assert mean_shift(grouped, np.ones((4, 3, 1, 1), np.float32), np.ones(3)) is None
    assert (mean_axis(conv), mean_axis(gemm)) == (1, -1)


def test_a_convolution_without_attributes_has_one_group() -> None:
    conv = ir.node("Conv", [ir.Value(name="x"), ir.Value(name="w")])
    error = np.array([[[1.0, 2.0], [4.0, 8.0]], [[0.0, -1.0], [3.0, 0.0]]], np.float32)
    found = mean_shift(conv, error, np.array([10.0, 100.0]))
    assert found is not None
    assert found.tolist() == [3 * 10 + 12 * 100, -1 * 10 + 3 * 100]


def test_a_conv_without_a_bias_gets_the_correction_as_one() -> None:
    model = graph("[a] y = Conv(x, w)")
    plan = plan_of(model)
    result = model.clone()
    insert_qdq(result, plan=plan, qparams=ranges(plan, tensors(model, feed(model))), means={"x": np.ones(3)})
    node = result.graph.node("a")
    assert len(node.inputs) == 3
    without = quantized(model, plan).graph.node("a")
    assert len(without.inputs) == 2
    verify(result)


def test_names_that_are_taken_are_not_taken_again() -> None:
    model = graph(
        """[c] c = Conv (x, w, b) [r] r = Relu(c)
        ["r/quantize"] "r/quantized" = Sigmoid(r) ["w/int8/dequantize"] "w/int8/dequantized" = Tanh("r/quantized")
        ["x/dequantize"] "x/scale" = Neg("w/int8/dequantized") [y] "x/dequantized" = Abs("x/scale")
        [d] y = Conv (r, v)""",
        outputs='float[A,B,C,D] y, float[A,B,C,D] "x/dequantized"',
    )
    feeds = {"x": np.random.default_rng(2).normal(size=(2, 3, 8, 8)).astype(np.float32)}
    plan = plan_of(model)
    plan = plan.with_choices({unit.name: Choice(Impl.FLOAT) for unit in plan.units if unit.name not in "cd"})
    seen = tensors(model, feeds)
    insert_qdq(model, plan=plan, qparams=ranges(plan, seen))
    nodes = [node.name for node in model.graph]
    assert len(set(nodes)) == len(nodes)
    verify(model)
    for name, found in run(model, feeds).items():
        assert np.abs(found - seen[name]).max() < 0.05 * np.abs(seen[name]).max()
