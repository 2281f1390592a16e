"""Each operator between DequantizeLinear and QuantizeLinear, and the operator on integers that takes its place."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant.calibration.model.session import Array
from requant.transforms import REGISTRY, Change, verify
from requant.transforms.qoperator_to_qdq import QOPS

qdq_to_qoperator = REGISTRY["qdq_to_qoperator"]
qoperator_to_qdq = REGISTRY["qoperator_to_qdq"]

HEADER = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
CONSTANTS: dict[str, Array] = {
    "xs": np.array(0.02, np.float32),
    "xz": np.array(100, np.uint8),
    "zs": np.array(0.05, np.float32),
    "zz": np.array(7, np.uint8),
    "ys": np.array(0.07, np.float32),
    "yz": np.array(120, np.uint8),
    "ys0": np.array(0.07, np.float32),
    "yz0": np.array(0, np.uint8),
    "rest": np.array(0.02, np.float32),  # as xs, in another initializer
    "same_zero": np.array(100, np.uint8),
    "ps": np.array(1 / 255, np.float32),
    "yz_s8": np.array(3, np.int8),
    "w": np.arange(-54, 54, dtype=np.int8).reshape(4, 3, 3, 3),
    "ws": np.array([0.01, 0.02, 0.03, 0.04], np.float32),
    "wz": np.zeros(4, np.int8),
    "m": np.arange(-12, 12, dtype=np.int8).reshape(6, 4),
    "mt": np.arange(-12, 12, dtype=np.int8).reshape(4, 6),
    "cube": np.arange(-24, 24, dtype=np.int8).reshape(2, 6, 4),
    "cs": np.array(0.01, np.float32),
    "cz": np.array(0, np.int8),
    "b": np.array([100, -100, 1000, 0], np.int32),
    "bs": np.float32(0.02) * np.array([0.01, 0.02, 0.03, 0.04], np.float32),
    "bz": np.zeros(4, np.int32),
    "wrong": np.array([0.01, 0.02, 0.03, 0.04], np.float32),
    "bias": np.array([1, 2, 3, 4], np.float32),
    "factors": np.array([1, 1, 2, 2], np.float32),
    "lo": np.array(0, np.float32),
    "hi": np.array(6, np.float32),
    "shape": np.array([2, 12], np.int64),
    "begin": np.array([1], np.int64),
    "end": np.array([3], np.int64),
    "axis": np.array([1], np.int64),
    "index": np.array([0, 2], np.int64),
}
X, Y = "x = DequantizeLinear(q, xs, xz)", "y = QuantizeLinear(t, ys, yz)"
Z = "z = DequantizeLinear(p, zs, zz)"
SAME = "y = QuantizeLinear(t, rest, same_zero)"
W = "f = DequantizeLinear <axis = 0> (w, ws, wz)"
M = "f = DequantizeLinear <axis = 1> (m, ws, wz)"
B = "c = DequantizeLinear <axis = 0> (b, bs, bz)"
IMAGE, ROWS = (2, 3, 4, 4), (5, 6)

# The body; the shapes of the uint8 inputs q and p; the operators it becomes.
TABLE: dict[str, tuple[str, tuple[tuple[int, ...], ...], list[str]]] = {
    "Conv": (f"{X} {W} {B} t = Conv <pads = [1, 1, 1, 1]> (x, f, c) {Y}", (IMAGE,), ["QLinearConv"]),
    "Conv-no-bias": (f"{X} {W} t = Conv(x, f) {Y}", (IMAGE,), ["QLinearConv"]),
    "Conv-empty-bias": (f'{X} {W} t = Conv(x, f, "") {Y}', (IMAGE,), ["QLinearConv"]),
    "Conv-Relu": (
        f"{X} {W} {B} s = Conv(x, f, c) t = Relu(s) y = QuantizeLinear(t, ys0, yz0)",
        (IMAGE,),
        ["QLinearConv"],
    ),
    "Conv-Clip": (
        f"{X} {W} {B} s = Conv(x, f, c) t = Clip(s, lo, hi) y = QuantizeLinear(t, xs, yz0)",
        (IMAGE,),
        ["QLinearConv"],
    ),
    "Gemm": (f"{X} {M} {B} t = Gemm(x, f, c) {Y}", (ROWS,), ["QGemm"]),
    "Gemm-no-bias": (f"{X} {M} t = Gemm(x, f) {Y}", (ROWS,), ["QGemm"]),
    "Gemm-transposed": (
        f"{X} f = DequantizeLinear <axis = 0> (mt, ws, wz) {B} t = Gemm <transB = 1> (x, f, c) {Y}",
        (ROWS,),
        ["QGemm"],
    ),
    "Gemm-float": (f"{X} {M} {B} y = Gemm(x, f, c)", (ROWS,), ["QGemm"]),
    "Gemm-Relu-float": (f"{X} {M} {B} t = Gemm(x, f, c) y = Relu(t)", (ROWS,), ["QGemm", "Relu"]),
    "MatMul": (f"{X} {M} t = MatMul(x, f) {Y}", (ROWS,), ["QLinearMatMul"]),
    "MatMul-3d": (f"{X} {M} t = MatMul(x, f) {Y}", ((2, *ROWS),), ["QLinearMatMul"]),
    "MatMul-float": (f"{X} {M} y = MatMul(x, f)", (ROWS,), ["MatMulIntegerToFloat"]),
    "MatMul-stack": (f"{X} f = DequantizeLinear(cube, cs, cz) t = MatMul(x, f) {Y}", ((2, *ROWS),), ["QLinearMatMul"]),
    "Add": (f"{X} {Z} t = Add(x, z) {Y}", (IMAGE, IMAGE), ["QLinearAdd"]),
    "Add-Relu": (
        f"{X} {Z} s = Add(x, z) t = Relu(s) y = QuantizeLinear(t, ys0, yz0)",
        (IMAGE, IMAGE),
        ["QLinearAdd"],
    ),
    "Add-broadcast": (f"{X} {Z} t = Add(x, z) {Y}", (IMAGE, (3, 1, 1)), ["QLinearAdd"]),
    "Mul": (f"{X} {Z} t = Mul(x, z) {Y}", (IMAGE, IMAGE), ["QLinearMul"]),
    "Concat": (f"{X} {Z} t = Concat <axis = 1> (x, z) {Y}", (IMAGE, IMAGE), ["QLinearConcat"]),
    "AveragePool": (
        f"{X} t = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x) {Y}",
        (IMAGE,),
        ["QLinearAveragePool"],
    ),
    "GlobalAveragePool": (f"{X} t = GlobalAveragePool(x) {Y}", (IMAGE,), ["QLinearGlobalAveragePool"]),
    "LeakyRelu": (f"{X} t = LeakyRelu <alpha = 0.1> (x) {Y}", (IMAGE,), ["QLinearLeakyRelu"]),
    "Sigmoid": (f"{X} t = Sigmoid(x) y = QuantizeLinear(t, ps, yz0)", (IMAGE,), ["QLinearSigmoid"]),
    "MaxPool": (f"{X} t = MaxPool <kernel_shape = [2, 2]> (x) {SAME}", (IMAGE,), ["MaxPool"]),
    "Flatten": (f"{X} t = Flatten(x) {SAME}", (IMAGE,), ["Flatten"]),
    "Reshape": (f"{X} t = Reshape(x, shape) {SAME}", ((2, 3, 4),), ["Reshape"]),
    "Transpose": (f"{X} t = Transpose <perm = [0, 2, 3, 1]> (x) {SAME}", (IMAGE,), ["Transpose"]),
    "Slice": (f"{X} t = Slice(x, begin, end, axis) {SAME}", (IMAGE,), ["Slice"]),
    "Gather": (f"{X} t = Gather <axis = 1> (x, index) {SAME}", (IMAGE,), ["Gather"]),
    "Unsqueeze": (f"{X} t = Unsqueeze(x, axis) {SAME}", (IMAGE,), ["Unsqueeze"]),
    "Squeeze": (f"{X} t = Squeeze(x, axis) {SAME}", ((2, 1, 4),), ["Squeeze"]),
    "DepthToSpace": (f"{X} t = DepthToSpace <blocksize = 2> (x) {SAME}", ((2, 4, 3, 3),), ["DepthToSpace"]),
    "SpaceToDepth": (f"{X} t = SpaceToDepth <blocksize = 2> (x) {SAME}", (IMAGE,), ["SpaceToDepth"]),
    "Resize": (
        f'{X} t = Resize <mode = "nearest"> (x, "", factors) {SAME}',
        (IMAGE,),
        ["Resize"],
    ),
}
each_operator = pytest.mark.parametrize(("body", "shapes", "expected"), TABLE.values(), ids=TABLE.keys())


def graph(body: str, shapes: tuple[tuple[int, ...], ...], outputs: tuple[str, ...] = ("y",)) -> ir.Model:
    """Build a model of uint8 inputs q and p; outputs y and others, integers where a QuantizeLinear computes them."""
    inputs = [f"uint8[{','.join(map(str, shape))}] {name}" for name, shape in zip("qp", shapes, strict=False)]
    integer = "int8" if "yz_s8" in body else "uint8"
    typed = [f"{integer if f'{name} = QuantizeLinear' in body else 'float'}[] {name}" for name in outputs]
    model = ir.from_onnx_text(f"{HEADER} g ({', '.join(inputs)}) => ({', '.join(typed)}) {{ {body} }}")
    nodes = {value for node in model.graph for value in node.inputs if value is not None}
    for value in list(nodes):
        if value.name in CONSTANTS and value.producer() is None and not value.is_graph_input():
            value.const_value = ir.Tensor(CONSTANTS[value.name], name=value.name)
            value.type, value.shape = ir.TensorType(value.const_value.dtype), value.const_value.shape
            model.graph.register_initializer(value)
    for output in model.graph.outputs:
        output.shape = None
    return with_ranks(model, shapes)


def with_ranks(model: ir.Model, shapes: tuple[tuple[int, ...], ...]) -> ir.Model:
    """Give the outputs the ranks that the runtime finds."""
    found = run(model, feed(shapes))
    for output in model.graph.outputs:
        output.shape = ir.Shape([None] * found[str(output.name)].ndim)
    return model


def feed(shapes: tuple[tuple[int, ...], ...]) -> dict[str, Array]:
    random = np.random.default_rng(1)
    return {name: random.integers(0, 256, shape).astype(np.uint8) for name, shape in zip("qp", shapes, strict=False)}


def run(model: ir.Model, feeds: dict[str, Array]) -> dict[str, Array]:
    """Run a model as it is written."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(written(model), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return {name: np.asarray(result) for name, result in zip(names, session.run(names, feeds), strict=True)}


def written(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


@each_operator
def test_an_operator_becomes_its_integer_form(
    body: str, shapes: tuple[tuple[int, ...], ...], expected: list[str]
) -> None:
    model = graph(body, shapes)
    assert qdq_to_qoperator(model) == Change(applied=1)
    assert [node.op_type for node in model.graph] == expected
    verify(model)


@each_operator
def test_the_integer_form_computes_the_same(
    body: str, shapes: tuple[tuple[int, ...], ...], expected: list[str]
) -> None:
    """The one rounding of the integer form and that of the QuantizeLinear may fall to either side of a tie.

    What only moves values loses nothing; a float result differs by the order of the sum only.
    """
    model = graph(body, shapes)
    before = run(model, feed(shapes))["y"]
    qdq_to_qoperator(model)
    after = run(model, feed(shapes))["y"]
    assert after.dtype == before.dtype
    assert after.shape == before.shape
    if before.dtype == np.float32:
        assert np.abs(after - before).max() <= 1e-6 * np.abs(before).max() * shapes[0][-1]
    elif not expected[0].startswith("Q"):
        assert after.tobytes() == before.tobytes()
    else:
        assert np.abs(after.astype(int) - before).max() <= 1
        assert (after != before).mean() < 0.2  # ties are rare
        assert before.std() > 1  # and there is something to compare


@each_operator
def test_a_second_run_changes_nothing(body: str, shapes: tuple[tuple[int, ...], ...], expected: list[str]) -> None:
    model = graph(body, shapes)
    qdq_to_qoperator(model)
    once = written(model)
    assert qdq_to_qoperator(model).applied == 0
    assert written(model) == once


LEFT_ALONE = {
    "no-integer-form": {
        "Conv-float": f"{X} {W} {B} y = Conv(x, f, c)",
        "Concat-float": f"{X} {Z} y = Concat <axis = 1> (x, z)",
        "HardSigmoid": f"{X} t = HardSigmoid(x) y = QuantizeLinear(t, ps, yz0)",
        "Sigmoid-float": f"{X} y = Sigmoid(x)",
        "MaxPool-float": f"{X} y = MaxPool <kernel_shape = [2, 2]> (x)",
        "MaxPool-rescaled": f"{X} t = MaxPool <kernel_shape = [2, 2]> (x) {Y}",
        "MaxPool-indices": f"{X} t, i = MaxPool <kernel_shape = [2, 2]> (x) {SAME}",
        "Resize-linear": f'{X} t = Resize <mode = "linear"> (x, "", factors) {SAME}',
        "Conv-Relu-read": f"{X} {W} s = Conv(x, f) t = Relu(s) {Y} u = Neg(t)",
    },
    "float-operand": {
        "Conv-float-bias": f"{X} {W} t = Conv(x, f, bias) {Y}",
        "Add-float": f"{X} z = Cast <to = 1> (p) t = Add(x, z) {Y}",
    },
    "scales": {
        "bias-scale": f"{X} {W} c = DequantizeLinear <axis = 0> (b, wrong, bz) t = Conv(x, f, c) {Y}",
        "weight-axis": f"{X} f = DequantizeLinear <axis = 1> (square, ws, wz) t = Conv(x, f) {Y}",
    },
    "types": {
        "signed-result": f"{X} {W} {B} t = Conv(x, f, c) y = QuantizeLinear(t, ys, yz_s8)",
    },
    "read-in-float": {
        "Conv-read": f"{X} {W} t = Conv(x, f) {Y} u = Neg(t)",
    },
    "clip": {
        "Relu": f"{X} {W} s = Conv(x, f) t = Relu(s) {Y}",
        "Clip-below": f"{X} {W} s = Conv(x, f) t = Clip(s, lo, hi) y = QuantizeLinear(t, ys0, yz0)",
    },
}
CASES = [(reason, body) for reason, cases in LEFT_ALONE.items() for body in cases.values()]


@pytest.mark.parametrize(("reason", "body"), CASES, ids=[name for cases in LEFT_ALONE.values() for name in cases])
def test_what_has_no_integer_form_is_left_alone(reason: str, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONSTANTS, "square", np.ones((4, 4, 1, 1), np.int8))
    shapes = ((2, 4, 4, 4),) if "square" in body else (IMAGE, IMAGE)
    model = graph(body, shapes, ("y", "u") if "u = " in body else ("y",))
    before = written(model)
    assert qdq_to_qoperator(model) == Change(skipped={reason: 1})  # type: ignore[arg-type]
    assert written(model) == before


@pytest.mark.parametrize("factor", ["alpha", "beta"])
def test_a_gemm_with_factors_is_left_alone(factor: str) -> None:
    model = graph(f"{X} {M} {B} t = Gemm <{factor} = 0.5> (x, f, c) {Y}", (ROWS,))
    assert qdq_to_qoperator(model) == Change(skipped={"no-integer-form": 1})  # type: ignore[arg-type]


def test_a_pool_with_dilations_is_left_alone() -> None:
    model = graph(f"{X} t = AveragePool <kernel_shape = [2, 2]> (x) {Y}", (IMAGE,))
    model.graph.opset_imports[""] = 19
    pool = next(node for node in model.graph if node.op_type == "AveragePool")
    pool.attributes["dilations"] = ir.AttrInt64s("dilations", [2, 2])
    assert qdq_to_qoperator(model) == Change(skipped={"no-integer-form": 1})  # type: ignore[arg-type]


def test_operators_in_float_are_not_even_counted() -> None:
    model = graph("x = Cast <to = 1> (q) t = MaxPool <kernel_shape = [2, 2]> (x) s = Relu(t) y = Add(s, t)", (IMAGE,))
    assert qdq_to_qoperator(model) == Change()


def test_a_linear_of_another_domain_is_no_pair() -> None:
    text = f'{HEADER[:-2]}, "my.domain" : 1]> g (uint8[2,4] q, float s, uint8 z) => (uint8[2,4] y) {{ {{}} }}'
    body = "x = my.domain.DequantizeLinear(q, s, z) t = Flatten(x) y = my.domain.QuantizeLinear(t, s, z)"
    model = ir.from_onnx_text(text.replace("{}", body))
    assert qdq_to_qoperator(model) == Change()


def test_a_chain_keeps_the_names_of_its_uint8_tensors() -> None:
    body = f"{X} {W} t = Conv(x, f) h = QuantizeLinear(t, xs, xz) g = DequantizeLinear(h, xs, xz) " + (
        f"u = MaxPool <kernel_shape = [2, 2]> (g) {SAME.replace('(t', '(u')}"
    )
    model = graph(body, (IMAGE,))
    assert qdq_to_qoperator(model) == Change(applied=2)
    assert [(node.op_type, node.outputs[0].name) for node in model.graph] == [("QLinearConv", "h"), ("MaxPool", "y")]


def test_a_dequantized_tensor_that_somebody_else_reads_stays() -> None:
    model = graph(f"{X} t = Flatten(x) {SAME} u = Neg(x)", (IMAGE,), ("y", "u"))
    assert qdq_to_qoperator(model) == Change(applied=1)
    assert sorted(node.op_type for node in model.graph) == ["DequantizeLinear", "Flatten", "Neg"]
    verify(model)


def fused(model: ir.Model, feeds: dict[str, Array]) -> dict[str, Array]:
    """Run a model as the runtime optimises it."""
    session = ort.InferenceSession(written(model), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return {name: np.asarray(result) for name, result in zip(names, session.run(names, feeds), strict=True)}


BACK = {
    key: row
    for key, row in TABLE.items()
    if row[2][0] in {name.rpartition(".")[2] for name in QOPS} | {"QLinearConcat"}
}


@pytest.mark.parametrize(("body", "shapes", "expected"), BACK.values(), ids=BACK.keys())
def test_there_and_back_is_the_same_operator_with_the_same_bits(
    body: str, shapes: tuple[tuple[int, ...], ...], expected: list[str]
) -> None:
    model = graph(body, shapes)
    qdq_to_qoperator(model)
    integer = run(model, feed(shapes))["y"]
    assert qoperator_to_qdq(model) == Change(applied=1)
    verify(model)
    kinds = [node.op_type for node in model.graph if node.op_type not in ("QuantizeLinear", "DequantizeLinear")]
    assert len(kinds) == len(expected)
    assert not any(kind in expected[:1] for kind in kinds)
    assert fused(model, feed(shapes))["y"].tobytes() == integer.tobytes()  # the runtime fuses the pairs again
    assert qdq_to_qoperator(model) == Change(applied=1)
    assert [node.op_type for node in model.graph] == expected
    assert run(model, feed(shapes))["y"].tobytes() == integer.tobytes()


def test_pairs_can_be_taken_away() -> None:
    body, shapes, _ = TABLE["Conv-Relu"]
    model = graph(body, shapes)
    model.graph.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
    assert REGISTRY["remove_qdq"](model) == Change(applied=2, skipped=Counter({"not-a-pair": 1}))
    assert [node.op_type for node in model.graph] == ["DequantizeLinear", "Conv", "Relu", "QuantizeLinear"]
    weight = model.graph.node(1).inputs[1].const_value.numpy()  # type: ignore[union-attr]
    assert np.array_equal(weight, CONSTANTS["w"] * CONSTANTS["ws"].reshape(-1, 1, 1, 1))
