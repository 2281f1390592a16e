"""Models of many kinds: the INT8 model is valid, computes the same, and is int8 where the runtime has a kernel."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from requant import RequantError
from requant.calibration.model.session import Array
from requant.quantize import Accuracy, Options, Result, Selection, Strategy, quantize_model
from requant.quantize.accuracy.pair import judge_pair, time_models
from requant.quantize.job import Evidence
from requant.quantize.runtime.profile import profiled
from requant.quantize.steps import deliver
from requant.transforms.int8.qparams import Scheme
from requant.transforms.int8.saturation import PAIR_LIMIT

from .native import needs_library
from .pairs import pair_peak

Feed = Mapping[str, Array]
PADS = "<pads = [1, 1, 1, 1]>"
LEAST_DB = 20.0  # a uniform tensor in 8 bits has 50 dB; a few layers and wide ranges lose about 20 dB


pytestmark = pytest.mark.usefixtures("int8_wins")


def written(folder: Path, body: str, opset: int = 17, ir: int = 8, **constants: tuple[int, ...] | Array) -> Path:
    """Write a model from ONNX text. Constants are arrays, or shapes of random weights that keep the variance."""
    head = f'<ir_version: {ir}, opset_import: ["" : {opset}, "com.microsoft" : 1, "my" : 1]>\n'
    model = onnx.parser.parse_model(head + body)
    random = np.random.default_rng(0)
    for name, content in constants.items():
        if isinstance(content, tuple):
            fan_in = math.prod(content[1:]) if len(content) > 2 else content[0]
            content = (random.standard_normal(content) / math.sqrt(fan_in)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(content, name))
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def images(*shape: int, **more: Array) -> list[dict[str, Array]]:
    random = np.random.default_rng(1)
    return [{"x": random.standard_normal(shape).astype(np.float32), **more} for _ in range(4)]


def quantized(model: Path, feeds: list[dict[str, Array]] | None, **options: Any) -> Result:
    """Quantize; assert that the model is valid, and that optimizations of the runtime do not change its outputs."""
    out = model.with_name("int8.onnx")
    result = quantize_model(
        model, feeds, out, Options(**{"force": True, "force_int8": True, "effort": "low", **options})
    )
    onnx.checker.check_model(out, full_check=True)
    assert result.accuracy.worst_sqnr_db >= LEAST_DB, result.accuracy
    for feed in feeds or []:
        plain, fast = run(out, feed, optimise=False), run(out, feed, optimise=True)
        for name, value in plain.items():
            if value.dtype.kind == "f" and value.size:
                noise = np.square(value.astype(np.float64) - fast[name]).sum()
                assert 10 * math.log10(np.square(value.astype(np.float64)).sum() / max(noise, 1e-30)) > LEAST_DB, name
    return result


def run(model: Path, feed: Feed, *, optimise: bool) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))


def reasons(result: Result) -> dict[str, str]:
    return {node.name: node.reason for node in result.float_nodes}


BRANCHES = f"""g (float[N,16,8,8] x, bool c) => (float[A,B,C,D] y) {{
    [stem] a = Conv{PADS}(x, w)  [relu] r = Relu(a)
    [if] y = If(c) <
        then_branch = yes () => (float[A,B,C,D] p) {{ [conv] t = Conv{PADS}(r, w1)  u = Relu(t)  p = Conv{PADS}(u, w2) }},
        else_branch = no () => (float[A,B,C,D] p) {{ [conv] t = Conv{PADS}(r, w2)  p = Relu(t) }}
    >
}}"""
WEIGHTS: dict[str, Any] = dict.fromkeys(("w", "w1", "w2"), (16, 16, 3, 3))


def test_both_branches_of_an_if_compute_in_integers(tmp_path: Path) -> None:
    model = written(tmp_path, BRANCHES, **WEIGHTS)
    feeds = [{**feed, "c": np.asarray(index % 2 == 0)} for index, feed in enumerate(images(1, 16, 8, 8))]
    result = quantized(model, feeds)
    assert result.forms == {"u8->u8": 4}
    assert result.mac_share_int8 == 1.0
    assert set(reasons(result)) == {"if"}


def test_a_branch_that_the_data_never_take_stays_float(tmp_path: Path) -> None:
    model = written(tmp_path, BRANCHES, **WEIGHTS)
    result = quantized(model, [{**feed, "c": np.asarray(True)} for feed in images(1, 16, 8, 8)])
    assert result.forms == {"u8->u8": 3}
    (reason,) = {why for name, why in reasons(result).items() if name.startswith("conv")}
    assert reason == "has no values in the calibration data"


def test_weights_of_a_branch_that_is_never_taken_may_be_large(tmp_path: Path) -> None:
    """Constants are folded before the ranges are observed, and the runtime wants no arrays for what nothing reads."""
    body = BRANCHES.replace("[if]", "[yes] c = Constant<value = bool {1}> ()\n    [if]").replace(", bool c)", ")")
    model = written(tmp_path, body.replace("p = Relu(t)", "p = Mul(t, spare)"), **WEIGHTS, spare=(16, 8, 8))
    assert quantized(model, images(1, 16, 8, 8)).forms == {"u8->u8": 3}


def test_a_node_name_excludes_its_namesakes_in_both_branches(tmp_path: Path) -> None:
    model = written(tmp_path, BRANCHES, **WEIGHTS)
    feeds = [{**feed, "c": np.asarray(index % 2 == 0)} for index, feed in enumerate(images(1, 16, 8, 8))]
    result = quantized(model, feeds, selection=Selection(exclude_nodes=frozenset({"conv"})))
    assert [why for name, why in reasons(result).items() if name.startswith("conv")] == ["excluded by name"] * 2


@pytest.mark.parametrize("carried", [False, True])
def test_a_recurrence_in_a_loop_computes_in_integers_also_with_weights_that_it_carries(
    tmp_path: Path, carried: bool
) -> None:
    body = """g (float[T,4,32] x, int64 n, float[4,32] h0) => (float[4,32] h, float[S,4,32] s) {
        t = Constant <value = bool {1}> ()
        h, s = Loop(n, t, h0) <body = step (int64 i, bool c, float[4,32] hi) => (bool go, float[4,32] ho, float[4,32] so) {
            go = Identity(c)  xi = Gather <axis = 0> (x, i)
            [in] a = MatMul(xi, w)  [state] b = MatMul(hi, u)  d = Add(a, b)  ho = Tanh(d)  so = Identity(ho)
        }>
    }"""
    if carried:  # as TensorFlow's LSTMs do
        body = body.replace("h, s = Loop(n, t, h0)", "h, v, s = Loop(n, t, h0, u)").replace("(hi, u)", "(hi, k)")
        body = body.replace("hi) =>", "hi, float[32,32] k) =>").replace("ho, float", "ho, float[32,32] k, float")
    model = written(tmp_path, body, w=(32, 32), u=(32, 32))
    feeds = images(5, 4, 32, n=np.asarray(5), h0=np.zeros((4, 32), np.float32))
    result = quantized(model, feeds)
    assert result.forms == {"u8->float": 2}
    assert result.kernels == {"MatMulIntegerToFloat": 2}


def test_functions_of_the_model_are_quantized_inside(tmp_path: Path) -> None:
    body = f"""g (float[N,16,8,8] x) => (float[N,16,8,8] y) {{ a = my.Block(x, w)  y = my.Block(a, w1) }}
    <domain: "my", opset_import: ["" : 17]>
    Block (t, k) => (r) {{ c = Conv{PADS}(t, k)  r = Relu(c) }}"""
    model = written(tmp_path, body, w=(16, 16, 3, 3), w1=(16, 16, 3, 3))
    assert quantized(model, images(1, 16, 8, 8)).kernels == {"QLinearConv": 2}


@pytest.mark.parametrize("kind", ["float16"])
def test_a_model_of_half_floats_is_quantized_and_keeps_its_inputs_and_outputs(tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(0)
    weights = [(random.standard_normal((16, 16, 3, 3)) / 12).astype(kind) for _ in range(2)]
    body = (
        f"g ({kind}[N,16,8,8] x) => ({kind}[N,16,8,8] y) {{ a = Conv{PADS}(x, w)  r = Relu(a)  y = Conv{PADS}(r, v) }}"
    )
    model = written(tmp_path, body, w=weights[0], v=weights[1])
    result = quantized(model, [{"x": feed["x"].astype(kind)} for feed in images(1, 16, 8, 8)])
    assert result.kernels == {"QLinearConv": 2}
    session = ort.InferenceSession(result.output, providers=["CPUExecutionProvider"])
    assert {port.type for port in (*session.get_inputs(), *session.get_outputs())} == {f"tensor({kind})"}


def bfloat16(array: Array, name: str) -> onnx.TensorProto:
    """Return an array as a bfloat16 initializer: the upper 16 bits of each float32."""
    halves = (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return onnx.helper.make_tensor(name, onnx.TensorProto.BFLOAT16, array.shape, halves.tobytes(), raw=True)


@pytest.mark.parametrize("inner", [False, True], ids=["weights", "weights and tensors"])
def test_a_model_of_brain_floats_is_quantized(tmp_path: Path, inner: bool) -> None:
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((16, 16, 3, 3)) / 12 for name in ("w", "v")}
    wide = ("k = Cast <to = 1> (w)  l = Cast <to = 1> (v)", "x", "b", "y = Identity(b)")
    half = ("k = Identity(w)  l = Identity(v)  h = Cast <to = 16> (x)", "h", "b", "y = Cast <to = 1> (b)")
    before, first, last, after = half if inner else wide
    body = f"""g (float[N,16,8,8] x) => (float[N,16,8,8] y) {{
        {before}  a = Conv{PADS}({first}, k)  r = Relu(a)  {last} = Conv{PADS}(r, l)  {after}
    }}"""
    proto = onnx.load(written(tmp_path, body, 22 if inner else 17, 10))
    proto.graph.initializer.extend(bfloat16(array, name) for name, array in arrays.items())
    onnx.save(proto, tmp_path / "model.onnx")
    result = quantized(tmp_path / "model.onnx", images(1, 16, 8, 8))
    assert result.kernels == {"QLinearConv": 2}
    assert result.notes == (
        ("the runtime has no kernels for bfloat16: the float model is run in float32",) if inner else ()
    )


STACK = f"""g (float[N,16,8,8] x) => (float[N,16,8,8] y) {{
    [one] a = Conv{PADS}(x, w)  [r] r = Relu(a)  [two] b = Conv{PADS}(r, w1)  [three] y = Conv{PADS}(b, w2)
}}"""


def by_another_tool(model: str, folder: Path) -> Path:
    """Write a model without requant's metadata: a model that requant wrote is finished."""
    proto = onnx.load(model)
    del proto.metadata_props[:]
    path = folder / "partly" / "model.onnx"
    path.parent.mkdir()
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
@pytest.mark.parametrize("scheme", [Scheme(), Scheme(activation="s8", symmetric=True)], ids=["u8", "s8"])
def test_a_model_that_is_partly_quantized_is_completed(tmp_path: Path, form: str, scheme: Scheme) -> None:
    feeds = images(1, 16, 8, 8)
    model = written(tmp_path, STACK, **WEIGHTS)
    first = quantized(model, feeds, format=form, scheme=scheme, selection=Selection(exclude_nodes=frozenset({"two"})))
    assert first.kernels == {"QLinearConv": 2, "Conv": 1}
    partly = by_another_tool(first.output, tmp_path)
    second = quantized(partly, feeds, format=form, scheme=scheme)
    assert second.kernels == {"QLinearConv": 3}
    whole = onnx.load(second.output).graph.node
    assert sum(node.op_type == "QuantizeLinear" for node in whole) <= (5 if form == "qdq" else 3)


@pytest.mark.usefixtures("vnni")
def test_weights_that_alone_are_int8_are_taken_up_with_their_scales(tmp_path: Path) -> None:
    feeds = images(1, 16, 8, 8)
    model = written(tmp_path, STACK, **WEIGHTS)
    stored = quantized(model, feeds, selection=Selection(strategy=Strategy.WEIGHT))
    assert stored.forms == {"weight-only": 3}
    before = {i.name: numpy_helper.to_array(i) for i in onnx.load(stored.output).graph.initializer}
    partly = by_another_tool(stored.output, tmp_path)
    result = quantized(partly, feeds)
    assert result.kernels == {"QLinearConv": 3}
    after = [numpy_helper.to_array(i) for i in onnx.load(result.output).graph.initializer]
    for array in (array for array in before.values() if array.dtype == np.int8 and array.ndim == 4):
        assert any(np.array_equal(array, other) for other in after)


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 18, 21])
def test_every_opset_comes_out_in_integers(tmp_path: Path, opset: int) -> None:
    squeeze = "Squeeze <axes = [2, 3]> (p)" if opset < 13 else "Squeeze(p, axes)"
    body = f"""g (float[N,16,8,8] x) => (float[N,10] y) {{
        a = Conv{PADS}(x, w)  r = Relu(a)  p = GlobalAveragePool(r)  s = {squeeze}  y = Gemm(s, m, b)
    }}"""
    axes: dict[str, Any] = {} if opset < 13 else {"axes": np.array([2, 3])}
    model = written(tmp_path, body, opset, 3 if opset < 9 else 8, w=(16, 16, 3, 3), m=(16, 10), b=(10,), **axes)
    if opset < 9:  # in IR version 3 initializers are inputs too
        proto = onnx.load(model)
        for tensor in proto.graph.initializer:
            proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        onnx.save(proto, model)
    assert quantized(model, images(2, 16, 8, 8)).mac_share_int8 == 1.0


def test_names_may_be_anything(tmp_path: Path) -> None:
    model = onnx.load(written(tmp_path, STACK, **WEIGHTS))
    for index, node in enumerate(model.graph.node):
        node.name = ["", "/a b/ü", "/a b/ü/quantize", "x"][index]
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = {"a": "größe 1", "r": "größe 1/quantized", "b": "w/int8"}.get(name, name)
    onnx.save(model, tmp_path / "model.onnx")
    assert quantized(tmp_path / "model.onnx", images(1, 16, 8, 8)).kernels == {"QLinearConv": 3}


def test_an_inner_tensor_that_is_an_output_too(tmp_path: Path) -> None:
    body = f"""g (float[N,16,8,8] x) => (float[N,16,8,8] r, float[N,16,8,8] y, float[N,16,8,8] b) {{
        a = Conv{PADS}(x, w)  r = Relu(a)  b = Conv{PADS}(r, w)  y = Add(b, r)
    }}"""
    assert quantized(written(tmp_path, body, w=(16, 16, 3, 3)), images(1, 16, 8, 8)).kernels == {"QLinearConv": 2}


DENSE = "g (float[N,64] x) => (float[N,8] y) { [up] a = MatMul(x, w)  r = Relu(a)  [down] y = Gemm(r, m, b) }"
DENSE_WEIGHTS: dict[str, Any] = {"w": (64, 64), "m": (64, 8), "b": (8,)}


def test_dynamic_needs_no_data(tmp_path: Path) -> None:
    result = quantized(written(tmp_path, DENSE, **DENSE_WEIGHTS), None, selection=Selection(strategy=Strategy.DYNAMIC))
    assert result.forms == {"dynamic": 2}
    assert result.kernels == {"DynamicQuantizeMatMul": 2}
    assert result.notes == (
        f"timed on {result.data}; the accuracy is not measured, since random inputs cannot judge it: give data",
    )
    assert result.accuracy.samples == 0
    assert result.data == "random inputs (x [1, 64])"


def test_why_a_model_runs_on_no_random_inputs_is_told(tmp_path: Path) -> None:
    body = """net (float[N,M] x) => (float[7,K] y) {
      rows = Reshape(x, shape)
      y = MatMul(rows, w)
    }"""
    model = written(tmp_path, body, shape=np.array([7, 11], np.int64), w=(11, 16))
    result = quantized(model, None, selection=Selection(strategy=Strategy.DYNAMIC))
    (told,) = (note for note in result.notes if note.startswith("not measured"))
    assert told.startswith("not measured: the model runs on no random inputs; give data (Non-zero status code")
    assert "cannot be reshaped to the requested shape" in told
    assert str(model) not in told


def test_without_data_there_are_no_ranges(tmp_path: Path) -> None:
    model = written(tmp_path, DENSE, **DENSE_WEIGHTS)
    with pytest.raises(RequantError, match=r"model\.onnx: no data: give a sample"):
        quantize_model(model, None, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_a_strategy_for_one_node_wins(tmp_path: Path) -> None:
    chosen = Selection(strategy=Strategy.WEIGHT, strategies={"down": Strategy.DYNAMIC})
    result = quantized(written(tmp_path, DENSE, **DENSE_WEIGHTS), images(3, 64), selection=chosen)
    assert result.forms == {"dynamic": 1, "weight-only": 1}


def test_the_model_says_what_made_it(tmp_path: Path) -> None:
    model = written(tmp_path, DENSE, **DENSE_WEIGHTS)
    found = []
    for scale in (1, 1, 2):
        feeds = [{"x": feed["x"] * scale} for feed in images(3, 64)]
        result = quantized(model, feeds, isa="avx2", scheme=Scheme(symmetric=True), effort="medium")
        found.append({p.key: p.value for p in onnx.load(result.output).metadata_props})
    assert found[0]["requant.pipeline"] == result.pipeline
    assert found[0]["requant.version"]
    assert json.loads(found[0]["requant.options"]) == {"isa": "avx2", "symmetric": True}
    assert len(found[0]["requant.ranges"]) == 64
    assert found[0] == found[1]
    assert found[0]["requant.ranges"] != found[2]["requant.ranges"]


@pytest.mark.parametrize("activation", ["u8", "s8"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("weight", ["s8", "u8"])
def test_integer_types_are_as_asked_and_the_kernels_the_same(
    tmp_path: Path, activation: str, weight: str, symmetric: bool
) -> None:
    if (activation, weight) == ("s8", "u8"):
        with pytest.raises(RequantError, match="no kernel multiplies signed activations by unsigned weights"):
            Options(scheme=Scheme(activation, weight, symmetric))
        return
    result = quantized(
        written(tmp_path, STACK, **WEIGHTS), images(1, 16, 8, 8), scheme=Scheme(activation, weight, symmetric)
    )
    assert result.kernels == {"QLinearConv": 3}
    graph = onnx.load(result.output).graph
    types = {i.name: i.data_type for i in graph.initializer}
    uint8, int8 = onnx.TensorProto.UINT8, onnx.TensorProto.INT8
    assert types["x/zero_point"] == {"u8": uint8, "s8": int8}[activation]
    assert any(data_type == {"u8": uint8, "s8": int8}[weight] for name, data_type in types.items() if "w1/" in name)
    if symmetric:
        points = {i.name: numpy_helper.to_array(i) for i in graph.initializer if i.name.endswith("zero_point")}
        assert int(points["x/zero_point"]) == {"u8": 128, "s8": 0}[activation]
        assert int(points["r/zero_point"]) == {"u8": 0, "s8": -128}[activation]


def test_a_target_without_vnni_lowers_only_channels_that_can_saturate(tmp_path: Path) -> None:
    model = written(tmp_path, DENSE, w=(64, 64), m=np.eye(64, 8, dtype=np.float32), b=(8,))
    result = quantized(model, images(3, 64), isa="avx2")
    assert set(result.relieved) == {"up"}
    assert 0 < result.relieved["up"] <= 64
    assert not quantized(model, images(3, 64), isa="vnni").relieved


def test_both_matrices_of_an_lstm_are_lowered_for_a_target_without_vnni(tmp_path: Path) -> None:
    text = "g (float[7,2,24] x) => (float[7,1,2,16] y) { [op] y = LSTM <hidden_size = 16> (x, w, r) }"
    model = written(tmp_path, text, w=(1, 64, 24), r=(1, 64, 16))
    for isa, channels in (("avx2", range(1, 129)), ("vnni", range(1))):
        result = quantized(model, None, isa=isa, selection=Selection(strategy=Strategy.DYNAMIC))
        assert result.kernels == {"DynamicQuantizeLSTM": 1}
        assert result.relieved.get("op", 0) in channels
        weights = [numpy_helper.to_array(i) for i in onnx.load(result.output).graph.initializer]
        peaks = [pair_peak(matrix[0], -1) for matrix in weights if matrix.dtype == np.int8 and matrix.ndim == 3]
        assert [(peak > PAIR_LIMIT).any() for peak in peaks] == [isa == "vnni"] * 2


def test_a_gru_computes_in_integers_where_its_state_is_large(tmp_path: Path) -> None:
    text = "g (float[S,N,24] x) => (float[S,1,N,H] y) { [op] y = GRU <hidden_size = HIDDEN, linear_before_reset = 1> (x, w, r, b) }"
    feeds = [{"x": np.random.default_rng(seed).standard_normal((5, 2, 24)).astype(np.float32)} for seed in range(3)]
    for hidden, kernels in ((224, {"DynamicQuantizeMatMul": 2}), (192, {"GRU": 1})):
        shapes: dict[str, Any] = {"w": (1, 3 * hidden, 24), "r": (1, 3 * hidden, hidden), "b": (1, 6 * hidden)}
        model = written(tmp_path, text.replace("HIDDEN", str(hidden)).replace("H]", f"{hidden}]"), **shapes)
        result = quantized(model, feeds)
        assert result.kernels == kernels
        assert result.mac_share_int8 == float(hidden == 224)
        assert result.accuracy.worst_sqnr_db > LEAST_DB


FUNCTIONS = f"""g (float[N,16,8,8] x) => (float[N,16,8,8] y) {{ [first] a = my.Block(x, w)  [second] y = my.Block(a, w1) }}
    <domain: "my", opset_import: ["" : 17]>
    Block (t, k) => (r) {{ [conv] c = Conv{PADS}(t, k)  [relu] r = Relu(c) }}"""


@pytest.mark.parametrize(("name", "left"), [("second", 1), ("conv", 0)], ids=["a call", "a node of the function"])
def test_names_of_calls_and_of_nodes_in_functions_exclude(tmp_path: Path, name: str, left: int) -> None:
    model = written(tmp_path, FUNCTIONS, w=(16, 16, 3, 3), w1=(16, 16, 3, 3))
    result = quantized(model, images(1, 16, 8, 8), selection=Selection(exclude_nodes=frozenset({name})))
    assert result.forms.get("u8->u8", 0) == left
    assert "excluded by name" in reasons(result).values()


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(exclude_ops=frozenset({"Block"})), "'Block' is a function of the model, which is inlined"),
        (
            Selection(strategies={"first": Strategy.STATIC}),
            "node 'first': a Block cannot be static; it has no strategies",
        ),
        (Selection(strategies={"conv": Strategy.DYNAMIC}), "a Conv cannot be dynamic; it can be: static, weight-only"),
        (Selection(exclude_nodes=frozenset({"conf"})), "no node named 'conf'; did you mean 'conv'"),
        (Selection(exclude_nodes=frozenset({"onv*"})), r"no node named 'onv\*'; did you mean 'conv'"),
        (Selection(strategies={"c*": Strategy.STATIC}), r"no node named 'c\*'"),
    ],
    ids=["function", "call", "form", "name", "pattern", "pattern with a strategy"],
)
def test_what_cannot_be_chosen_is_refused_before_anything_runs(
    tmp_path: Path, selection: Selection, message: str
) -> None:
    model = written(tmp_path, FUNCTIONS, w=(16, 16, 3, 3), w1=(16, 16, 3, 3))
    with pytest.raises(RequantError, match=message):
        quantize_model(model, images(1, 16, 8, 8), tmp_path / "out.onnx", Options(selection=selection))
    assert not (tmp_path / "out.onnx").exists()


def test_one_matrix_as_it_is_and_transposed(tmp_path: Path) -> None:
    first = np.random.default_rng(0).standard_normal(16)
    circulant = np.stack([np.roll(first, step) for step in range(16)]).astype(
        np.float32
    )  # rows and columns have equal maxima
    body = "g (float[N,16] x) => (float[N,16] y, float[N,16] z) { y = Gemm(x, w)  z = Gemm <transB = 1> (x, w) }"
    for strategy in (Strategy.STATIC, Strategy.DYNAMIC, Strategy.WEIGHT):
        quantized(written(tmp_path, body, w=circulant), images(3, 16), selection=Selection(strategy=strategy))


BETWEEN: dict[str, str] = {
    "Resize that crops": 'Resize <mode = "nearest", coordinate_transformation_mode = "tf_crop_and_resize", extrapolation_value = 50.0> (a, roi, "", sizes)',
    "AveragePool over a cut border": "AveragePool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1, count_include_pad = 1, pads = [1, 0, 0, 1]> (a)",
    "Pad along one axis": "Pad(a, ends, zero, axis)",
    "Pad by reflection": 'Pad <mode = "reflect"> (a, all)',
    "Split and Concat": "s, t = Split <axis = 1> (a)  b = Concat <axis = 1> (t, s)",
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_stands_between_two_convolutions_gives_what_it_gives_in_float(tmp_path: Path, between: str) -> None:
    middle = between if "b =" in between else f"b = {between}"
    body = f"g (float[N,16,8,8] x) => (float[N,16,H,W] y) {{ a = Conv{PADS}(x, w)  {middle}  y = Conv{PADS}(b, w1) }}"
    constants: dict[str, Any] = {
        "roi": np.array([0, 0, -0.5, -0.5, 1, 1, 1.5, 1.5], np.float32),
        "sizes": np.array([1, 16, 12, 12]),
        "ends": np.array([1, 2]),
        "all": np.array([0, 0, 1, 1, 0, 0, 2, 2]),
        "zero": np.zeros((), np.float32),
        "axis": np.array([3]),
    }
    used = {
        name: value for name, value in constants.items() if name in between.replace(")", ",").replace(",", " ").split()
    }
    opset = 18 if ", axis)" in between else 17
    model = written(tmp_path, body, opset, w=(16, 16, 3, 3), w1=(16, 16, 3, 3), **used)
    assert quantized(model, images(1, 16, 8, 8)).kernels == {"QLinearConv": 2}


def test_a_product_of_what_the_data_leave_at_zero_finds_its_range_at_run_time_and_a_convolution_stays_float(
    tmp_path: Path,
) -> None:
    body = "g (float[N,16] x) => (float[N,8] y) { [gone] z = Sub(x, x)  [dense] y = Gemm(z, m, b) }"
    model = written(tmp_path, body, m=np.full((16, 8), 12.7, np.float32), b=np.full(8, 0.04, np.float32))
    assert quantized(model, images(3, 16)).kernels["DynamicQuantizeMatMul"] == 1
    body = "g (float[N,16,8,8] x) => (float[N,16,6,6] y) { [gone] z = Sub(x, x)  [conv] y = Conv(z, w, b) }"
    model = written(tmp_path, body, w=(16, 16, 3, 3), b=(16,))
    found = reasons(quantized(model, images(3, 16, 8, 8)))
    assert found["conv"] == "its input is zero in all the data, which gives no scale"


APART: dict[str, str] = {
    "Add": "b = Add(a, r)",
    "Mul": "b = Mul(a, r)",
    "AveragePool": "b = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a)",
    "LeakyRelu": "b = LeakyRelu <alpha = 0.1> (a)",
    "Add and Relu": "s = Add(a, r)  b = Relu(s)",
    "Sigmoid": "b = Sigmoid(a)",
    "Softmax": "b = Softmax <axis = -1> (a)",
    "Softmax behind a Cast": "f = Cast <to = 1> (a)  b = Softmax <axis = -1> (f)",
}


@pytest.mark.parametrize("form", ["qdq", pytest.param("qoperator", marks=pytest.mark.slow)])
@pytest.mark.parametrize("middle", APART.values(), ids=APART)
def test_what_is_planned_float_between_integers_runs_in_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, middle: str, form: str
) -> None:
    body = f"""g (float[N,16,8,8] x) => (float[N,16,8,8] y) {{
        c = Conv{PADS}(x, w)  r = Relu(c)  a = Conv{PADS}(r, w1)  {middle}  y = Conv{PADS}(b, w2)
    }}"""
    ops = frozenset(
        {"Add", "Mul", "AveragePool", "LeakyRelu", "Sigmoid", "Softmax"}.intersection(middle.replace("(", " ").split())
    )
    model = written(tmp_path, body, **WEIGHTS)
    result = quantized(model, images(1, 16, 8, 8), format=form, selection=Selection(exclude_ops=ops))
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(result.output, options, providers=["CPUExecutionProvider"])
    ran = {node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert ops <= ran
    assert "QLinearConv" in ran
    assert not {f"QLinear{op}" for op in ops} & ran


def test_an_int8_model_that_does_not_run_leaves_the_float_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[object] = []

    def broken(*models: object, **_: object) -> Accuracy:
        judged.append(models)
        if len(judged) == 1:
            raise RequantError("the model: the model fails: of itself")
        return Accuracy(1, None, {})

    monkeypatch.setattr("requant.quantize.steps.judge.judge_pair", broken)
    model = written(tmp_path, STACK, **WEIGHTS)
    result = quantize_model(model, images(1, 16, 8, 8), tmp_path / "out.onnx", Options(effort="low"))
    assert result.why_not.startswith("the int8 model does not run: the model: the model fails: of itself")
    assert not result.forms
    assert {p.key for p in onnx.load(tmp_path / "out.onnx").metadata_props} >= {"requant.version", "requant.options"}


@pytest.mark.parametrize("effort", ["low", "medium"])
def test_an_int8_model_that_is_not_timed_leaves_the_float_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effort: str
) -> None:
    """With more effort a short measurement comes first: it says whether weights are worth correcting."""

    def broken(models: Any, *rest: Any, **options: Any) -> Any:
        if len(models) > 2:  # an INT8 model and two float ones
            raise RequantError("the model fails: of itself")
        return time_models(models, *rest, **options)

    monkeypatch.setattr("requant.quantize.steps.judge.time_models", broken)
    options = Options(effort=effort, force_int8=True, place="rules", seconds=0.01)
    result = quantize_model(written(tmp_path, STACK, **WEIGHTS), images(1, 16, 8, 8), tmp_path / "out.onnx", options)
    assert result.why_not.startswith("the int8 model does not run: the model fails: of itself")
    assert not result.forms


def test_a_model_ruinous_in_float_tensors_that_does_not_run_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Accuracy | None] = []

    def ruined(*models: Any, **options: Any) -> Any:
        if len(found) == 1:
            found.append(None)
            raise RequantError("the model fails: of itself")
        accuracy = judge_pair(*models, **options)
        found.append(accuracy)
        return dataclasses.replace(accuracy, sqnr_db=dict.fromkeys(accuracy.sqnr_db, -1.0), low_db={})

    monkeypatch.setattr("requant.quantize.steps.judge.judge_pair", ruined)
    monkeypatch.setattr(deliver, "evidence_of", lambda *_: Evidence(kept_float={"x": "it ruins"}))
    options = Options(effort="low", force_int8=True, place="rules", seconds=0.01)
    result = quantize_model(written(tmp_path, STACK, **WEIGHTS), images(1, 16, 8, 8), tmp_path / "out.onnx", options)
    assert found[1] is None
    assert result.forms


def test_sparse_weights_are_weights(tmp_path: Path) -> None:
    proto = onnx.load(written(tmp_path, DENSE, w=(64, 64), b=(8,)))
    random = np.random.default_rng(0)
    places = np.sort(random.choice(64 * 8, 200, replace=False))
    values = numpy_helper.from_array(random.standard_normal(200).astype(np.float32), "m")
    indices = numpy_helper.from_array(places.astype(np.int64), "m_indices")
    proto.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [64, 8]))
    onnx.save(proto, tmp_path / "model.onnx")
    assert quantized(tmp_path / "model.onnx", images(3, 64)).mac_share_int8 == 1.0


def test_external_data_of_any_size_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = written(tmp_path, BRANCHES, **WEIGHTS)
    proto = onnx.load(model)
    for branch in proto.graph.node[-1].attribute:  # move the weights of a body into the body
        branch.g.initializer.add().CopyFrom(next(i for i in proto.graph.initializer if i.name == "w2"))
    del proto.graph.initializer[2]
    onnx.save(proto, model, save_as_external_data=True, location="all.data", size_threshold=0, convert_attribute=True)
    monkeypatch.chdir("/")
    feeds = [{**feed, "c": np.asarray(index % 2 == 0)} for index, feed in enumerate(images(1, 16, 8, 8))]
    assert quantized(model, feeds).forms == {"u8->u8": 4}


@pytest.mark.parametrize("place", ["weights", "bias"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_weights_that_are_not_finite_stay_float(tmp_path: Path, place: str, value: float) -> None:
    arrays: dict[str, Any] = {"m": np.ones((64, 8), np.float32), "b": np.ones(8, np.float32)}
    arrays["m" if place == "weights" else "b"].reshape(-1)[3] = value
    model = written(tmp_path, DENSE, w=(64, 64), **arrays)
    result = quantize_model(model, images(3, 64), tmp_path / "out.onnx", Options(force_int8=True))
    assert reasons(result)["down"].endswith(" not finite")


@pytest.mark.parametrize("name", ["conv", "c*v", "*conv*"])
def test_only_nodes_of_the_function_bear_its_names(tmp_path: Path, name: str) -> None:
    body = f"""g (float[N,16,8,8] x) => (float[N,16,8,8] y) {{ [call] a = my.Block(x, w)  [other] y = Conv{PADS}(a, w1) }}
    <domain: "my", opset_import: ["" : 17]> Block (t, k) => (r) {{ [conv] r = Conv{PADS}(t, k) }}"""
    model = written(tmp_path, body, w=(16, 16, 3, 3), w1=(16, 16, 3, 3))
    proto = onnx.load(model)
    proto.graph.node[1].name = "native/conv"
    onnx.save(proto, model)
    result = quantized(model, images(1, 16, 8, 8), selection=Selection(exclude_nodes=frozenset({name})))
    excluded = ["call/conv"] if name != "*conv*" else ["call/conv", "native/conv"]
    assert reasons(result) == dict.fromkeys(excluded, "excluded by name")


@pytest.mark.parametrize(
    "options",
    [Options(samples=3), Options(calibration="percentile(99)"), Options(scheme=Scheme(symmetric=True))],
    ids=["samples", "calibration", "symmetric"],
)
def test_an_option_about_ranges_is_refused_where_there_are_none(tmp_path: Path, options: Options) -> None:
    model = written(tmp_path, DENSE, **DENSE_WEIGHTS)
    asked = dataclasses.replace(options, selection=Selection(strategy=Strategy.DYNAMIC))
    with pytest.raises(RequantError, match=r"no data, so that there are no ranges, and .* would do nothing"):
        quantize_model(model, None, tmp_path / "out.onnx", asked)


def test_a_pair_that_clips_for_one_reader_clips_for_it_alone(tmp_path: Path) -> None:
    body = f"""g (float[N,16,8,8] x) => (float[N,16,8,8] y, float[N,16,8,8] z) {{
        q = QuantizeLinear(x, s, o)  d = DequantizeLinear(q, s, o)  y = Conv{PADS}(d, w)  z = Conv{PADS}(x, w1)
    }}"""
    half: dict[str, Any] = {
        "s": np.asarray(1 / 32, np.float32),
        "o": np.asarray(0, np.uint8),
    }  # negative values are clipped
    model = written(tmp_path, body, w=(16, 16, 3, 3), w1=(16, 16, 3, 3), **half)
    assert quantized(model, images(1, 16, 8, 8)).kernels == {"QLinearConv": 2}


def test_a_static_product_in_a_branch_that_the_data_never_take(tmp_path: Path) -> None:
    body = """g (float[N,64] x, bool c) => (float[A,B] y) {
        y = If(c) <then_branch = yes () => (float[A,B] p) { p = MatMul(x, w) },
                   else_branch = no () => (float[A,B] q) { q = MatMul(x, v) }>
    }"""
    model = written(tmp_path, body, w=(64, 8), v=(64, 8))
    feeds = images(3, 64, c=np.asarray(True))
    assert quantized(model, feeds, selection=Selection(strategy=Strategy.STATIC)).forms == {"u8->u8": 1}


@pytest.mark.parametrize("activation", ["Relu", "Clip"])
def test_a_gemm_that_writes_float_keeps_its_integer_kernel(tmp_path: Path, activation: str) -> None:
    """If the runtime fuses the activation with the product first, it computes the product in float."""
    limit = ", zero" if activation == "Clip" else ""
    made = onnx_ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        net (float[N, 32] x) => (float[N, 32] y) <float zero = {{0}}> {{
            [product] a = Gemm (x, w)
            [act] b = {activation} (a{limit})
            y = Erf (b)
        }}""",
        initializers=[onnx_ir.tensor(np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32), name="w")],
    )
    onnx_ir.save(made, tmp_path / "m.onnx")
    feeds = [{"x": np.random.default_rng(seed).standard_normal((4, 32)).astype(np.float32)} for seed in range(4)]
    options = Options(place="rules", force_int8=True, seconds=0.01)
    found = quantize_model(tmp_path / "m.onnx", feeds, tmp_path / "q.onnx", options)
    assert found.forms == {"u8->float": 1}
    assert "QGemm" in {run.op for run in profiled(tmp_path / "q.onnx", feeds[0]).runs}


def test_an_output_may_declare_the_lengths_of_another_input(tmp_path: Path) -> None:
    """Exporters leave the lengths of their example; the runtime warns, and computes."""
    body = f"""g (float[N,16,H,W] x) => (float[1,16,32,32] y) {{
        a = Conv{PADS}(x, w)  b = Relu(a)  c = Conv{PADS}(b, w1)  y = Relu(c) }}"""
    model = written(tmp_path, body, w=(16, 16, 3, 3), w1=(16, 16, 3, 3))
    result = quantize_model(model, images(3, 16, 8, 8), tmp_path / "out.onnx", Options(force_int8=True, place="rules"))
    assert result.kernels == {"QLinearConv": 2}
    assert run(tmp_path / "out.onnx", images(1, 16, 8, 8)[0], optimise=True)["y"].shape == (1, 16, 8, 8)


@needs_library
def test_a_concat_of_one_tensor_several_times_has_no_native_form(tmp_path: Path) -> None:
    body = f"""g (float[1,8,8,8] x) => (float[1,8,8,8] y) {{
        a = Conv{PADS}(x, w)  b = Relu(a)  c = Concat<axis = 1>(b, b, b, b)  y = Conv{PADS}(c, w1) }}"""
    model = written(tmp_path, body, w=(8, 8, 3, 3), w1=(8, 32, 3, 3))
    result = quantized(model, images(1, 8, 8, 8), kernels="native", place="all")
    assert result.kernels["Convolution"] == 2
    assert "Concat" not in result.kernels
