"""The executed kernel of each node, why a product ran in float, and the causes of lost time."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from numpy.typing import ArrayLike
from onnx import helper, numpy_helper

from requant import RequantError
from requant.cli import main
from requant.quantize import Options, quantize_model
from requant.quantize.runtime.executed import Kernel
from requant.quantize.runtime.match import Match
from requant.quantize.runtime.problem import is_convolution, problem
from requant.quantize.runtime.profile import KernelRun
from requant.quantize.runtime.runtimes import Setting
from requant.quantize.tools.explain.causes import causes
from requant.quantize.tools.explain.explain import EXACT, Explanation, explain_model
from requant.quantize.tools.explain.float_reference import (
    FloatOperator,
    FloatReference,
    float_operator,
    float_references,
    timed,
)
from requant.quantize.tools.explain.why_float import Obstacle, why_rest, why_rest_float

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
DIGITS = SAMPLE_MODELS / "digits.onnx"
DATA = f"{SAMPLE_MODELS / 'digits.npz'}:calib"
NAMES = ("digits", "digits_mobile", "digits_transformer")
SCALES = np.linspace(0.01, 0.08, 8)


# ------------------------------------------------------------------------------------------ a product between DQ and Q


def product(
    op: str = "Conv",
    *,
    read: ArrayLike | None = 0.05,
    held: ArrayLike | None = 0.01,
    written: ArrayLike | None = 0.1,
    zero: int = 0,
    zero_written: int | None = None,
    dtype: Any = np.uint8,
    axis: int = 0,
    group: int = 1,
    before: str = "",
    after: str = "",
    bias: bool = False,
    also_read: str = "",
    opset: int = 17,
) -> onnx.ModelProto:
    """Write ``x -> Q -> DQ -> before -> op -> after -> Q -> DQ -> Neg``; a scale of None leaves its pair out."""
    nodes: list[onnx.NodeProto] = []
    initializers: dict[str, Any] = {}

    def pair(name: str, scale: ArrayLike, shift: int) -> str:
        initializers[f"{name}_scale"] = np.asarray(scale, np.float32)
        initializers[f"{name}_zero"] = np.full(np.shape(scale), shift, dtype)
        given = [f"{name}_scale", f"{name}_zero"]
        axes: dict[str, Any] = {"axis": 1} if np.ndim(scale) else {}
        nodes.append(helper.make_node("QuantizeLinear", [name, *given], [f"{name}_q"], f"{name}/q", **axes))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", *given], [f"{name}_dq"], f"{name}/dq", **axes))
        return f"{name}_dq"

    shape = {"Conv": (8, 8 // group, 3, 3), "ConvTranspose": (8, 8, 3, 3)}.get(op, (8, 8))
    weight = np.random.default_rng(0).integers(-60, 60, shape).astype(np.int8)
    now = "x" if read is None else pair("x", read, zero)
    if before:
        nodes.append(helper.make_node(before, [now], ["between"], "before"))
        now = "between"
    if held is None:
        initializers["w"] = weight.astype(np.float32) / 100
    else:
        initializers |= {"w_int8": weight, "w_scale": np.asarray(held, np.float32)}
        initializers["w_zero"] = np.zeros(np.shape(held), np.int8)
        axes: dict[str, Any] = {"axis": axis} if np.ndim(held) else {}
        nodes.append(helper.make_node("DequantizeLinear", ["w_int8", "w_scale", "w_zero"], ["w"], "w/dq", **axes))
    inputs = [now, "w"]
    if bias:
        initializers["b"] = np.ones(8, np.float32)
        inputs.append("b")
    window: dict[str, Any] = {"group": group, "pads": [1, 1, 1, 1]} if len(shape) == 4 else {}
    nodes.append(helper.make_node(op, inputs, ["y"], "product", **window))
    now = "y"
    if after:
        name, _, high = after.partition(":")
        if high:
            initializers |= {"low": np.float32(0), "high": np.float32(high)}
        nodes.append(helper.make_node(name, [now, "low", "high"] if high else [now], ["z"], "after"))
        now = "z"
    outputs = {"model": [now], "": []}.get(also_read, ["stranger"])
    if also_read not in ("", "model"):
        nodes.append(helper.make_node(also_read, [now], ["stranger"], "stranger"))
    if written is not None:
        now = pair(now, written, zero if zero_written is None else zero_written)
    nodes.append(helper.make_node("Neg" if written is not None else "Identity", [now], ["out"], "last"))
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", 1, (1, 8, 8, 8) if len(shape) == 4 else (4, 8))],
        [helper.make_tensor_value_info(name, 1, None) for name in ("out", *outputs)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in initializers.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def explained(model: onnx.ModelProto, folder: Path) -> Explanation:
    onnx.save(model, folder / "model.onnx")
    return explain_model(folder / "model.onnx", whole=False)


INTEGER = {
    "conv": {},
    "conv-relu": {"after": "Relu"},
    "conv-relu6": {"after": "Clip:6", "written": 6 / 255},
    "conv-int8": {"dtype": np.int8},
    "conv-int8-relu-at-its-least": {"dtype": np.int8, "zero": -128, "after": "Relu"},
    "conv-scale-per-weight-channel": {"held": SCALES},
    "conv-float-weight-that-the-runtime-quantizes": {"held": None},
    "conv-opset-11": {"opset": 11},
    "conv-opset-21": {"opset": 21},
    "matmul": {"op": "MatMul"},
    "matmul-float-out": {"op": "MatMul", "written": None},
    "matmul-scale-per-column": {"op": "MatMul", "held": SCALES, "axis": 1},
    "gemm": {"op": "Gemm", "bias": True},
    "gemm-float-out": {"op": "Gemm", "written": None},
}


@pytest.mark.parametrize("given", INTEGER.values(), ids=INTEGER)
def test_what_the_runtime_wants_becomes_an_integer_kernel(given: dict[str, Any], tmp_path: Path) -> None:
    found = explained(product(**given), tmp_path)
    (node,) = (node for node in found.nodes if node.name == "product")
    assert node.integer
    assert node.precision.startswith("u8·s8→")
    assert not node.reasons
    assert found.mac_share_int8 == 1.0


FLOAT = {
    "no-q": ({"written": None}, "no QuantizeLinear on its output, which goes to Identity 'last' in float"),
    "no-q-after-relu": ({"written": None, "after": "Relu"}, "no QuantizeLinear on its output"),
    "weight-only": ({"read": None, "written": None}, "only its weight is int8"),
    "not-quantized": ({"read": None, "held": None, "written": None}, "the model is not quantized"),
    "input-float": ({"read": None, "held": None}, "its input 'x' does not come from a DequantizeLinear"),
    "dq-not-adjacent": ({"before": "Tanh"}, "Tanh 'before' stands between the DequantizeLinear and it"),
    "relu-zero-point": ({"zero": 128, "after": "Relu"}, "zero point 128 after Relu 'after', .* only with 0"),
    "int8-relu-zero-point": ({"dtype": np.int8, "after": "Relu"}, "zero point 0 after Relu 'after', .* only with -128"),
    "clip-cuts": ({"written": 12 / 255, "after": "Clip:6"}, r"Clip 'after' to 0\.\.6 cuts into the range 0\.\.12 of"),
    "activation": ({"after": "LeakyRelu"}, "LeakyRelu 'after' stands between it and its QuantizeLinear"),
    "read-in-float": ({"also_read": "Abs"}, "its output 'y' is also read in float, by Abs 'stranger'"),
    "model-output": ({"also_read": "model"}, "its output 'y' is also read in float, by the model's output"),
    "16-bits": ({"dtype": np.uint16, "opset": 21}, "is uint16, not 8 bits wide"),
    "depthwise-per-channel-int8": ({"read": SCALES, "group": 8, "dtype": np.int8}, "its input 'x_dq' has 8 scales"),
    "depthwise-per-channel-relu": (
        {"read": SCALES, "group": 8, "zero": 128, "after": "Relu"},
        "its input 'x_dq' has 8 scales, one per channel",
    ),
    "per-channel-output": ({"written": SCALES, "after": "Relu"}, "its output 'z' has 8 scales, one per channel"),
    "transposed": ({"op": "ConvTranspose"}, "no integer kernel for ConvTranspose; a native operator of requant"),
    "transposed-groups": ({"op": "ConvTranspose", "group": 8}, "ConvTranspose; requant's native operator has no such"),
    "matmul-float-weight": ({"op": "MatMul", "held": None}, "its weight 'w' is float"),
    "matmul-relu-zero-point": ({"op": "MatMul", "zero": 128, "after": "Relu"}, "zero point 128 after Relu"),
    "matmul-read-in-float": ({"op": "MatMul", "also_read": "Abs"}, "also read in float, by Abs"),
    "matmul-per-channel": ({"op": "MatMul", "read": SCALES}, "its input 'x_dq' has 8 scales"),
    "gemm-float-bias": ({"op": "Gemm", "bias": True, "written": None}, "no QuantizeLinear on .* its bias 'b' is float"),
    "gemm-per-channel": ({"op": "Gemm", "read": SCALES}, "its input 'x_dq' has 8 scales"),
    "gemm-scale-per-row": (
        {"op": "Gemm", "held": SCALES, "bias": True},
        "its weight 'w' has a scale for each index of axis 0",
    ),
}


@pytest.mark.parametrize(("given", "reason"), FLOAT.values(), ids=FLOAT)
def test_what_keeps_a_product_in_float_is_told(given: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """The installed runtime decides that it is float; with what the reason names put right, the table above."""
    found = explained(product(**given), tmp_path)
    (node,) = (node for node in found.nodes if node.name == "product")
    assert (node.integer, node.precision) == (False, "float32")
    assert re.match(reason, node.reasons[0]) or re.search(reason, node.reasons[0])
    assert found.mac_share_int8 == 0.0


def test_a_weight_that_is_dequantized_in_every_run_is_among_the_causes(tmp_path: Path) -> None:
    found = explained(product(read=None, written=None), tmp_path)
    (dequantize,) = (node for node in found.nodes if node.name == "w/dq")
    assert (dequantize.role, dequantize.kernel) == ("run", "DequantizeLinear")
    assert any("of constants in every run" in cause.text for cause in found.causes)


def test_a_kernel_that_fails_on_scales_per_channel_is_told_with_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(RequantError, match="activation 'x' has 8 scales, but integer kernels take one"):
        explained(product(read=SCALES), tmp_path)
    np.savez(tmp_path / "x.npz", x=np.ones((1, 8, 8, 8), np.float32))
    with pytest.raises(RequantError, match=r"the model fails: .*; activation 'x' has 8 scales"):
        explain_model(tmp_path / "model.onnx", str(tmp_path / "x.npz"))


# ---------------------------------------------------------------------------------------------- nodes and their kernels


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Explanation]:
    """Explain a sample model by name, ``NAME-int8`` for the quantized one, once."""

    @functools.cache
    def explain(name: str) -> Explanation:
        stem, _, int8 = name.partition("-")
        path = SAMPLE_MODELS / f"{stem}.onnx"
        if int8:
            options = Options(samples=5, place="rules", force_int8=True, seconds=0.02)
            quantize_model(path, DATA, path := tmp_path_factory.mktemp("int8") / f"{stem}.onnx", options)
        return explain_model(path, DATA, whole=False)

    return explain


EVERY = [
    *NAMES,
    "digits-int8",
    *(pytest.param(f"{name}-int8", marks=pytest.mark.slow) for name in NAMES if name != "digits"),
]


@pytest.mark.parametrize("name", EVERY)
def test_every_node_has_a_kernel_and_every_microsecond_a_place(name: str, sample: Callable[[str], Explanation]) -> None:
    found = sample(name)
    assert Counter(node.role for node in found.nodes).keys() <= {"run", "absorbed"}
    executed = {kernel.run.node for kernel in found.kernels}
    assert all(node.executed in executed for node in found.nodes)
    names = {node.name for node in found.nodes if node.role == "run"}
    assert {node.into for node in found.nodes if node.role == "absorbed"} <= names
    inserted = [kernel for kernel in found.kernels if kernel.node is None]
    assert {kernel.kind for kernel in inserted} <= {"layout"}
    told = sum(node.microseconds for node in found.nodes) + sum(kernel.run.microseconds for kernel in inserted)
    totals = found.totals
    assert told == totals.kernels == sum(kernel.run.microseconds for kernel in found.kernels)
    assert totals.compute + totals.conversions + totals.layout + totals.rest == totals.kernels
    assert sum(node.macs for node in found.nodes) == sum(kernel.run.macs for kernel in found.kernels)


@pytest.mark.parametrize("name", ["digits", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_int8_moves_products_into_integer_kernels(name: str, sample: Callable[[str], Explanation]) -> None:
    before, after = sample(name), sample(f"{name}-int8")
    assert before.mac_share_int8 == 0.0
    assert after.mac_share_int8 > 0.5
    assert all(node.reasons for node in before.nodes if node.macs)
    assert all(bool(node.reasons) != node.integer for node in after.nodes if node.macs)
    assert sum(n.macs for n in before.nodes) == pytest.approx(sum(n.macs for n in after.nodes), rel=0.02)


def test_a_float_network_is_told_with_what_its_convolutions_absorb(sample: Callable[[str], Explanation]) -> None:
    nodes = {node.name: node for node in sample("digits").nodes}
    conv = nodes["conv2"]
    assert (conv.role, conv.kernel, conv.layout) == ("run", "com.microsoft.nchwc.Conv", "NCHWc")
    assert (conv.precision, conv.macs, conv.integer) == ("float32", 14 * 14 * 64 * 800, False)
    for name in ("bn2", "relu2"):
        assert (nodes[name].role, nodes[name].into, nodes[name].microseconds) == ("absorbed", "conv2", 0.0)
    assert (nodes["relu3"].into, nodes["fc1"].kernel) == ("fc1", "com.microsoft.FusedGemm")


def test_a_residual_sum_and_a_gelu_are_found_in_their_kernels(sample: Callable[[str], Explanation]) -> None:
    mobile = {node.name: node for node in sample("digits_mobile").nodes}
    assert (mobile["block1.add"].role, mobile["block1.add"].into) == ("absorbed", "block1.project.conv")
    transformer = {node.name: node for node in sample("digits_transformer").nodes}
    gelu = {name: node.into for name, node in transformer.items() if name.startswith("layer1.mlp.gelu")}
    assert {node for node in gelu.values() if node} == {"layer1.mlp.gelu.half"}
    assert transformer["layer1.mlp.gelu.half"].kernel == "com.microsoft.BiasGelu"
    assert transformer["layer1.mlp.fc1.add"].into == "layer1.mlp.gelu.half"
    assert transformer["layer1.attention.self.scale"].into == "layer1.attention.self.scores"


def test_pairs_and_relu_vanish_into_the_integer_convolution(tmp_path: Path) -> None:
    found = explained(product(after="Relu"), tmp_path)
    nodes = {node.name: node for node in found.nodes}
    assert (nodes["product"].kernel, nodes["product"].layout) == ("com.microsoft.QLinearConv", "NHWC")
    assert {name for name, node in nodes.items() if node.into == "product"} == {"x/dq", "w/dq", "after", "z/q"}
    assert (nodes["x/q"].role, nodes["x/q"].precision) == ("run", "f32→u8")
    assert [kernel.layout for kernel in found.kernels if kernel.kind == "layout"] == ["NHWC", "NCHW"]
    assert found.totals.layout == sum(k.run.microseconds for k in found.kernels if k.run.op == "Transpose")


def test_an_operator_that_is_taken_apart_is_told_whole(tmp_path: Path) -> None:
    found = explained(product(after="HardSwish"), tmp_path)
    (swish,) = (node for node in found.nodes if node.name == "after")
    parts = [kernel for kernel in found.kernels if kernel.node == "after"]
    assert [kernel.run.op for kernel in parts] == ["HardSigmoid", "Mul"]
    assert swish.microseconds == sum(kernel.run.microseconds for kernel in parts)


def test_a_silu_between_convolutions_is_not_theirs(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[1,8,8,8] x) => (float[1,8,8,8] y) {
        [conv1] a = Conv(x, w) [sigmoid1] b = Sigmoid(a) [mul1] c = Mul(a, b)
        [conv2] d = Conv(c, w) [sigmoid2] e = Sigmoid(d) [mul2] f = Mul(d, e) [conv3] y = Conv(f, w) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 8, 1, 1), np.float32), "w"))
    found = explained(model, tmp_path)
    assert {kernel.node: kernel.absorbs for kernel in found.kernels if kernel.node is not None} == {
        "conv1": (),
        "mul1": ("Sigmoid",),
        "conv2": (),
        "mul2": ("Sigmoid",),
        "conv3": (),
    }
    assert [node.name for node in found.nodes if node.macs] == ["conv1", "conv2", "conv3"]


def test_a_batch_norm_in_the_blocked_layout_is_its_own(tmp_path: Path) -> None:
    """The runtime computes it as a depthwise convolution, named after its result, and includes the Relu."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[1,16,8,8] x) => (float[1,16,8,8] y) {
        [conv1] a = Conv(x, w) [conv2] b = Conv(x, w) [join] c = Concat<axis = 1>(a, b)
        [bn] d = BatchNormalization(c, ones, ones, ones, ones) [relu] e = Relu(d) [conv3] y = Conv(e, v) }"""
    )
    arrays = {"w": np.ones((16, 16, 1, 1)), "v": np.ones((16, 32, 1, 1)), "ones": np.ones(32)}
    model.graph.initializer.extend(numpy_helper.from_array(v.astype(np.float32), k) for k, v in arrays.items())
    found = explained(model, tmp_path)
    nodes = {node.name: node for node in found.nodes}
    assert (nodes["bn"].role, nodes["bn"].kernel) == ("run", "com.microsoft.nchwc.Conv")
    assert nodes["bn"].microseconds > 0.0
    assert (nodes["relu"].role, nodes["relu"].into) == ("absorbed", "bn")
    assert all(kernel.node is not None for kernel in found.kernels if kernel.kind != "layout")


def test_what_is_constant_is_folded(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[2,3] x) => (float[2,3] y)
        <float[3] a = {1, 2, 3}> { [sqrt] b = Sqrt(a) [add] y = Add(x, b) }"""
    )
    roles = {node.name: node.role for node in explained(model, tmp_path).nodes}
    assert roles == {"sqrt": "folded", "add": "run"}


# -------------------------------------------------------------------------------------------------------------- causes


def kernel(
    op: str, microseconds: float, *, kind: Any = "rest", node: str | None = None, macs: int = 0, precision: str = "u8"
) -> Kernel:
    domain, _, name = op.rpartition(".")
    run = KernelRun(node or op, domain, name, microseconds, macs, ((1, 8),), ((1, 8),), ("uint8",), ("uint8",))
    return Kernel(run, kind, node or op, name, (), "", precision, None)


NOTHING = Match({}, frozenset(), {}, {}, frozenset())


def test_causes_come_with_their_cost_and_the_dearest_first() -> None:
    ran = [
        kernel("Conv", 400.0, kind="compute", node="conv1", macs=9),
        kernel("Conv", 200.0, kind="compute", node="conv2", macs=9),
        kernel("QLinearSoftmax", 320.0),
        kernel("Transpose", 60.0, kind="layout"),
        kernel("Erf", 16.0),
        kernel("Add", 4.0),
    ]
    reasons = {name: (Obstacle("per-channel activation scales", "x"),) for name in ("conv1", "conv2")}
    softmax = FloatReference(40.0, "QLinearSoftmax on 8-bit tensors")
    found = causes(ran, NOTHING, reasons, {"QLinearSoftmax": softmax}, rest={}, exact=True)
    assert [(cause.microseconds, cause.text) for cause in found] == [
        (
            450.0,
            "2 Conv in float take 60% of the time, integers could save up to 45%: per-channel activation scales",
        ),
        (
            280.0,
            "1 QLinearSoftmax on 8-bit tensors takes 8.0x the time of the float kernel: this costs 28% of the time",
        ),
        (60.0, "1 layout change that the runtime inserted (1 Transpose) costs 6.0% of the time"),
        (16.0, "1 GELU runs as single operators: Erf takes 1.6% of the time"),
    ]
    saturating = causes(ran, NOTHING, reasons, {}, rest={}, exact=False)
    assert saturating[0].microseconds == 300.0  # of 600: pairs in 16 bits halve the time at best


def test_operators_in_float_that_take_most_of_the_time_are_named(tmp_path: Path) -> None:
    """A network on graphs spent 70 % of its time in ScatterElements, and causes of 1.2 % and 0.8 % were named."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    net (float[64, 64] x, int64[64, 64] i) => (float[64, 64] y) <float[64, 64] zeros = {ZEROS}>
    {
        [first] a = ScatterElements <axis = 0, reduction = "add"> (zeros, i, x)
        [second] b = ScatterElements <axis = 0, reduction = "add"> (zeros, i, a)
        [third] c = Neg (b)
        [fourth] y = Add (c, x)
    }"""
    zeros = ", ".join(["0"] * 64 * 64)
    onnx.save(onnx.parser.parse_model(text.replace("ZEROS", zeros)), tmp_path / "m.onnx")
    feed = {"x": np.ones((64, 64), np.float32), "i": np.tile(np.arange(64), (64, 1))}
    found = explain_model(tmp_path / "m.onnx", [feed], setting=Setting(threads=1))
    first = found.causes[0]
    assert re.fullmatch(
        r"2 ScatterElements in float take \d+% of the time: the runtime has no integer kernel for ScatterElements",
        first.text,
    )
    assert first.nodes == ("first", "second")
    assert first.microseconds == sum(k.run.microseconds for k in found.kernels if k.op == "ScatterElements")


def test_rare_operators_in_float_are_not_named() -> None:
    ran = [
        *(kernel(op, time, precision="float32") for op, time in (("Softmax", 30.0), ("Neg", 10.0))),
        kernel("QLinearConv", 960.0, kind="compute"),
    ]
    why = {name: why_rest_float(name) for name in ("Softmax", "Neg")}
    (found,) = causes(ran, NOTHING, {}, {}, rest=why, exact=True)
    assert found.text == (
        "1 Softmax in float takes 3.0% of the time: an integer softmax is several times slower than the float one"
    )
    assert why_rest_float("MaxPool").startswith("it has an integer kernel, which needs a DequantizeLinear")
    assert why_rest_float("Resize").startswith("only mode=nearest")
    assert why_rest_float("Sigmoid").startswith("the integer table lookup is slower")


REST = {
    "a mover": (kernel("Transpose", 1.0), "Transpose", "it only moves or selects values, which are integers already"),
    "a native mover": (kernel("ai.requant.Concat", 1.0), "Concat", "it only moves or selects values"),
    "indices": (kernel("Gather", 1.0, precision="s64"), "Gather", "it only moves or selects values"),
    "a sum": (kernel("com.microsoft.QLinearAdd", 1.0), "Add", "it computes in integers already"),
    "a Cast": (kernel("Cast", 1.0, precision="s32→f32"), "Cast", "it is no product"),
    "float": (kernel("Neg", 1.0, precision="float32"), "Neg", "the runtime has no integer kernel for Neg"),
    "native float": (
        kernel("ai.requant.Normalization", 1.0, precision="float32"),
        "Normalization",
        "a native operator",
    ),
    "a loop": (kernel("Loop", 1.0, precision="s64→f32"), "Loop", "control flow runs in float"),
}


@pytest.mark.parametrize(("given", "op", "reason"), REST.values(), ids=REST)
def test_every_kernel_that_is_no_product_has_a_reason(given: Kernel, op: str, reason: str) -> None:
    assert why_rest(given, op, None).startswith(reason)


def test_a_uint8_tensor_that_is_moved_for_long_is_named(tmp_path: Path) -> None:
    """A Transpose of a pixel unshuffle took 16 % of a detector's time, and no cause named it."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (uint8[1,3,64,2,64,2] x) => (uint8[1,3,2,2,64,64] y) {
        [unshuffle] y = Transpose<perm = [0, 1, 3, 5, 2, 4]>(x) }"""
    )
    onnx.save(model, tmp_path / "m.onnx")
    feed = {"x": np.ones((1, 3, 64, 2, 64, 2), np.uint8)}
    found = explain_model(tmp_path / "m.onnx", [feed])
    assert [(cause.text, cause.nodes) for cause in found.causes] == [
        (
            "1 Transpose on u8 takes 100% of the time: it only moves or selects values, which are integers already",
            ("unshuffle",),
        )
    ]


def test_the_scale_in_front_of_the_tensors_of_a_concat_is_not_what_it_reads(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        net (uint8[1,8,64,64] x, uint8[1,8,64,64] z) => (uint8[1,16,64,64] y)
        <float s = {0.1}, float t = {0.2}, uint8 o = {128}> {
        [join] y = com.microsoft.QLinearConcat<axis = 1>(s, o, x, s, o, z, t, o) }"""
    )
    onnx.save(model, tmp_path / "m.onnx")
    feed = {name: np.ones((1, 8, 64, 64), np.uint8) for name in "xz"}
    (cause,) = explain_model(tmp_path / "m.onnx", [feed]).causes
    assert cause.text.startswith("1 QLinearConcat on u8 takes ")
    assert not cause.text.endswith("it is no product")


def test_a_slow_integer_kernel_is_named_once() -> None:
    ran, reference = [kernel("QLinearSoftmax", 100.0)], FloatReference(10.0, "QLinearSoftmax on 8-bit tensors")
    (slow,) = causes(ran, NOTHING, {}, {"QLinearSoftmax": reference}, rest={"QLinearSoftmax": "why"}, exact=True)
    assert "10.0x the time of the float kernel" in slow.text
    (other,) = causes(ran, NOTHING, {}, {}, rest={"QLinearSoftmax": "why"}, exact=True)
    assert other.text == "1 QLinearSoftmax on u8 takes 100% of the time: why"


RESIZES = {
    "constant": ("nearest", "c", "it has an integer kernel, which needs a DequantizeLinear before it"),
    "computed": ("nearest", "n", "; its size is computed, and native operators need a constant one"),
    "linear": ("linear", "n", "only mode=nearest runs on uint8"),
}


@pytest.mark.parametrize(("mode", "sizes", "reason"), RESIZES.values(), ids=RESIZES)
def test_the_reason_of_a_resize_is_true_for_it(mode: str, sizes: str, reason: str, tmp_path: Path) -> None:
    """Three Resize to the nearest pixels were said to interpolate; their sizes were computed."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> net (float[1,8,32,32] x, int64[4] n) => (float[1,8,64,64] y)
        <int64[4] c = {{1, 8, 64, 64}}> {{
        [up] y = Resize<mode = "{mode}", coordinate_transformation_mode = "asymmetric">(x, , , {sizes}) }}"""
    )
    onnx.save(model, tmp_path / "m.onnx")
    feed = {"x": np.ones((1, 8, 32, 32), np.float32), "n": np.array([1, 8, 64, 64])}
    found = explain_model(tmp_path / "m.onnx", [feed], whole=False)
    (text,) = (cause.text for cause in found.causes if "Resize in float" in cause.text)
    assert reason in text
    assert ("computed" in text) is (sizes == "n" and mode == "nearest")


def test_what_cannot_be_told_from_rounding_is_no_cause() -> None:
    """Times are whole microseconds: 2 and 1 may be 1.1 and 1.9."""
    assert (
        causes(
            [kernel("QLinearMul", 2.0)], NOTHING, {}, {"QLinearMul": FloatReference(1.0, "mul")}, rest={}, exact=True
        )
        == ()
    )
    assert causes([], NOTHING, {}, {}, rest={}, exact=True) == ()


def test_pairs_around_a_float_operator_are_counted(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (uint8[1,64] x) => (uint8[1,64] y)
        <float s = {0.1}, uint8 z = {0}>
        { [dq] a = DequantizeLinear(x, s, z) [f] b = HardSigmoid(a) [q] y = QuantizeLinear(b, s, z) }"""
    )
    found = explained(model, tmp_path)
    (cause,) = (each for each in found.causes if "QuantizeLinear" in each.text)
    assert cause.text.startswith("1 DequantizeLinear and 1 QuantizeLinear around HardSigmoid cost ")
    assert cause.microseconds == found.totals.conversions


def test_the_float_twin_of_an_integer_convolution_has_its_shapes(tmp_path: Path) -> None:
    found = explained(product(group=8), tmp_path)
    (conv,) = (kernel for kernel in found.kernels if kernel.kind == "compute")
    twin = float_operator(conv)
    assert twin is not None
    assert (twin.op, twin.inputs, twin.weights) == ("Conv", ((1, 8, 8, 8),), ((8, 1, 3, 3),))
    assert dict(twin.attributes)["group"] == 8
    (quantize,) = (kernel for kernel in found.kernels if kernel.node == "x/q")
    assert float_operator(quantize) is None


def test_a_silu_of_two_kernels_has_one_rival(tmp_path: Path) -> None:
    pair = "{0} = QuantizeLinear({1}, s, z) [dq_{1}] {2} = DequantizeLinear({0}, s, z)"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> net (float[1,64,128] x) => (float[1,64,128] y)
        <float s = {{0.02}}, uint8 z = {{128}}> {{ {pair.format("q", "x", "a")} [sigmoid] b = Sigmoid(a)
        {pair.format("r", "b", "c")} [mul] d = Mul(a, c) {pair.format("t", "d", "y")} }}"""
    )
    found = explained(model, tmp_path)
    assert [kernel.run.op for kernel in found.kernels if kernel.kind == "rest"] == ["QLinearSigmoid", "QLinearMul"]
    ((name, reference),) = float_references(found.kernels, threads=1).items()
    assert (name, reference.partner, reference.what) == ("sigmoid", "mul", "SiLU as QLinearSigmoid and QLinearMul")
    cause, *_ = causes(found.kernels, NOTHING, {}, {name: replace(reference, microseconds=0.0)}, rest={}, exact=True)
    both = sum(kernel.run.microseconds for kernel in found.kernels if kernel.node in ("sigmoid", "mul"))
    assert (cause.microseconds, set(cause.nodes)) == (both, {"sigmoid", "mul"})


def test_twins_are_timed_alone_and_in_one_session() -> None:
    twins = [
        FloatOperator("Conv", ((1, 16, 20, 20),), ((16, 16, 3, 3),)),
        FloatOperator("Softmax", ((4, 50),), (), (("axis", -1),)),
        FloatOperator("Add", ((2, 3), (2, 3))),
    ]
    found = timed(twins, threads=1)
    assert found.keys() == set(twins)
    assert all(time >= 0 for time in found.values())
    assert timed([], threads=1) == {}


# ------------------------------------------------------------------------------------------- the shapes of the problem


def test_a_problem_is_in_the_order_of_onednn(sample: Callable[[str], Explanation], tmp_path: Path) -> None:
    float_problems = {problem(kernel) for kernel in sample("digits").kernels if is_convolution(kernel)}
    assert "mb1_ic32oc64_ih14oh14kh5sh1dh0ph2_iw14ow14kw5sw1dw0pw2" in float_problems
    kernels = explained(product(held=SCALES, group=8), tmp_path).kernels
    (conv,) = (problem(kernel) for kernel in kernels if is_convolution(kernel))
    assert conv == "g8mb1_ic8oc8_ih8oh8kh3sh1dh0ph1_iw8ow8kw3sw1dw0pw1"
    assert {problem(k) for k in kernels if k.kind in ("layout", "conversion")} == {"1x8x8x8"}
    assert [k.kind for k in kernels if k.run.op == "Transpose"] == ["layout"] * 2


# ---------------------------------------------------------------------------------------------------- the command line


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, arguments)], prog_name="requant", env={"COLUMNS": "160"})


def test_json_is_one_object_with_all_there_is_to_know(tmp_path: Path) -> None:
    onnx.save(product(after="Relu"), tmp_path / "m.onnx")
    result = run(tmp_path / "m.onnx", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["mac_share_int8"] == 1.0
    assert found["probe"]["exact"] == (found["probe"]["sum"] == EXACT)
    assert found["isa"]["name"] == ("vnni" if found["probe"]["exact"] else "avx2")
    assert {node["name"]: node["role"] for node in found["nodes"]}["product"] == "run"
    assert {entry["kind"] for entry in found["inserted"]} == {"layout"}
    assert set(found["totals"]) == {"run", "kernels", "compute", "conversions", "layout", "rest"}
    costs = [entry["microseconds"] for entry in found["findings"]]
    assert costs == sorted(costs, reverse=True)


def test_the_table_is_short_unless_all_is_asked_for() -> None:
    short = run(SAMPLE_MODELS / "digits_mobile.onnx", "--data", DATA)
    assert short.exit_code == 0, short.output
    assert re.search(r"^\d+ more kernels take .*; --all lists them$", short.stdout, re.MULTILINE)
    assert "block1.project.conv + BatchNormalization, Add" in run(SAMPLE_MODELS / "digits_mobile.onnx", "--all").stdout
    for heading in (
        "integer kernels",
        "probe",
        "why it is slow",
        "27 Conv in float take",
        "the model is not quantized",
    ):
        assert heading in short.stdout


WRONG = {
    "no-model": (["none.onnx"], "none.onnx: no such file"),
    "no-onnx": ([__file__], "not an ONNX model"),
    "other-data": ([DIGITS, "--data", "x.npz"], "x.npz"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_request_is_one_line_and_exit_code_2(
    arguments: list[object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", image=np.ones((5, 3, 7), np.float32))
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr
