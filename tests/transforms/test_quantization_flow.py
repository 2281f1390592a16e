"""TensorFlow's flow: quantize, log, freeze, fuse; each stage runs and computes what the one before does."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from requant import RequantError
from requant.calibration import Sample, run_logged
from requant.calibration.model.session import Array
from requant.transforms import METADATA_KEY, REGISTRY, Change, TransformError, run
from requant.transforms.int8.existing import drop_round_trips
from requant.transforms.parts.min_max_log import high_percentile, low_percentile

NodeSpec = tuple[str, list[str], str, dict[str, Any]]  # operator, inputs, output, attributes

SAMPLE_MODELS = Path(__file__).parents[2] / "sample_models"
SAMPLES = ["digits", "digits_mobile", "digits_transformer"]
ONE_NOW = ["digits", *(pytest.param(name, marks=pytest.mark.slow) for name in SAMPLES[1:])]

SIMPLIFY = "fold_constants fold_batch_norms strip_unused_nodes remove_nodes(op=Identity) merge_duplicate_nodes"
QUANTIZE = "quantize_weights(minimum_size=2) quantize_nodes"
LOGGING = """insert_logging(op=RequantizationRange, show_name=true, message="__requant_min_max:")
    insert_logging(op=ReduceMin, prefix="{inputs}", show_name=true, message="__min:")
    insert_logging(op=ReduceMax, prefix="{inputs}", show_name=true, message="__max:")"""
FREEZE = """freeze_max(min_max_log_file={log}) freeze_min(min_max_log_file={log})
    freeze_requantization_ranges(min_max_log_file={log})"""
FUSE = "fuse_quantized_conv_and_requantize fuse_quantized_matmul_and_requantize strip_unused_nodes"

WEIGHTS: dict[str, tuple[int, ...]] = {  # by the name of the initializer
    "w": (4, 3, 3, 3),
    "w1": (4, 3, 3),
    "w_grouped": (4, 2, 3, 3),
    "w_depthwise": (3, 1, 3, 3),
    "w_next": (3, 4, 3, 3),
    "b": (4,),
    "b_next": (3,),
    "m": (12, 4),
    "m_transposed": (4, 12),
    "w_small": (2, 3, 2, 2),
    "b_small": (2,),
    "m_flat": (8, 4),
    "row": (1, 4),
}
IMAGE = [2, 3, 8, 8]
SMALL: dict[str, tuple[list[int], list[NodeSpec]]] = {
    "conv": (IMAGE, [("Conv", ["x", "w", "b"], "y", {})]),
    "conv-no-bias": (IMAGE, [("Conv", ["x", "w"], "y", {})]),
    "conv-1d": ([2, 3, 9], [("Conv", ["x", "w1", "b"], "y", {"pads": [1, 1]})]),
    "conv-grouped": ([2, 4, 8, 8], [("Conv", ["x", "w_grouped", "b"], "y", {"group": 2})]),
    "conv-depthwise": (IMAGE, [("Conv", ["x", "w_depthwise", "b_next"], "y", {"group": 3})]),
    "conv-strided": (IMAGE, [("Conv", ["x", "w", "b"], "y", {"strides": [2, 1], "pads": [0, 1, 2, 1]})]),
    "conv-auto-pad": (IMAGE, [("Conv", ["x", "w", "b"], "y", {"strides": [2, 2], "auto_pad": "SAME_UPPER"})]),
    "conv-dilated": (IMAGE, [("Conv", ["x", "w", "b"], "y", {"dilations": [2, 3], "pads": [2, 3, 2, 3]})]),
    "conv-relu6": (IMAGE, [("Conv", ["x", "w", "b"], "t", {}), ("Clip", ["t", "zero", "six"], "y", {})]),
    "conv-clip": (IMAGE, [("Conv", ["x", "w", "b"], "t", {}), ("Clip", ["t", "minus", "four"], "y", {})]),
    "gemm": ([5, 12], [("Gemm", ["x", "m", "b"], "y", {})]),
    "gemm-transposed": (
        [5, 12],
        [("Gemm", ["x", "m_transposed", "row"], "t", {"transB": 1}), ("Relu", ["t"], "y", {})],
    ),
    "gemm-no-bias": ([5, 12], [("Gemm", ["x", "m"], "y", {})]),
    "matmul": ([5, 12], [("MatMul", ["x", "m"], "y", {})]),
    "matmul-batched": ([2, 5, 12], [("MatMul", ["x", "m"], "t", {}), ("Relu", ["t"], "y", {})]),
    "conv-pool-conv": (
        IMAGE,
        [
            ("Conv", ["x", "w", "b"], "c", {"pads": [1, 1, 1, 1]}),
            ("Relu", ["c"], "r", {}),
            ("MaxPool", ["r"], "p", {"kernel_shape": [2, 2], "strides": [2, 2]}),
            ("Conv", ["p", "w_next", "b_next"], "y", {}),
        ],
    ),
    "conv-flatten-gemm": (
        IMAGE,
        [
            ("Conv", ["x", "w_small", "b_small"], "c", {"strides": [4, 4]}),
            ("Relu", ["c"], "r", {}),
            ("Flatten", ["r"], "f", {}),
            ("Gemm", ["f", "m_flat", "b"], "y", {}),
        ],
    ),
}
CONVOLUTIONS = {"conv-pool-conv": 2} | {
    name: 1 for name in SMALL if name.startswith("conv") and name.count("conv") == 1
}
MATRICES = {name: 1 for name in SMALL if "gemm" in name or "matmul" in name}
each_small = pytest.mark.parametrize("name", SMALL)


def small(name: str, opset: int = 17) -> ir.Model:
    """Build a model from x to y of the given nodes, with random weights."""
    shape, nodes = SMALL[name]
    rank = 2 if nodes[-1][0] == "Gemm" else len(shape)
    generator = np.random.default_rng(7)
    values = {key: generator.normal(size=size).astype(np.float32) for key, size in WEIGHTS.items()}
    values |= {key: without_saturation(values[key], 0 if key == "m_transposed" else None) for key in values}
    values |= {key: np.asarray(bound, np.float32) for key, bound in BOUNDS.items()}
    read = {each for _, inputs, _, _ in nodes for each in inputs}
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output], name=output, **attributes) for op, inputs, output, attributes in nodes],
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)],
        [numpy_helper.from_array(values[key], key) for key in values if key in read],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return ir.from_proto(model)


def without_saturation(weights: Array, channel_axis: int | None = None) -> Array:
    """Return weights of which no neighbours have the same sign, so that no CPU saturates on them.

    A CPU without VNNI adds the products of two neighbouring weights of an output channel in 16 bits. Neighbours are rows
    of a matrix, input channels of a convolution, then its taps (`requant.transforms.int8.saturation`).

    Args:
        weights: Those of a convolution (M, C, *kernel), or a matrix.
        channel_axis: The axis of the output channels: the first of a convolution, and the last of a matrix by default.
    """
    if weights.ndim < 2:
        return weights
    axis = (0 if weights.ndim > 2 else 1) if channel_axis is None else channel_axis
    rows = np.moveaxis(np.moveaxis(weights, axis, 0), 1, -1).copy()  # (M, *kernel, C)
    flat = rows.reshape(len(rows), -1)
    pairs = flat.shape[1] // 2 * 2
    flat[:, 1:pairs:2] = -np.copysign(flat[:, 1:pairs:2], flat[:, :pairs:2])
    return np.ascontiguousarray(np.moveaxis(np.moveaxis(flat.reshape(rows.shape), -1, 1), 0, axis))


BOUNDS = {"zero": 0.0, "six": 6.0, "minus": -8.0, "four": 4.0}


def small_input(name: str) -> Array:
    return np.random.default_rng(5).uniform(-1, 2, SMALL[name][0]).astype(np.float32)


def outputs(model: ir.Model, feeds: dict[str, Array], *, optimise: bool = False) -> dict[str, Array]:
    """Run a model; as it is written unless `optimise`."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(written(model), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return {name: np.asarray(result) for name, result in zip(names, session.run(names, feeds), strict=True)}


def written(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def log_lines(logged: ir.Model, feeds: Iterable[dict[str, Array]]) -> list[str]:
    """Write the log as any program could: the name of an output, and each of its values in brackets."""
    return [
        name + "".join(f"[{value!s}]" for value in values)
        for feed in feeds
        for name, values in outputs(logged, feed).items()
        if "__print__" in name
    ]


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@dataclass(frozen=True)
class Stages:
    """The models of a flow, and the lines that were logged."""

    simple: ir.Model
    dynamic: ir.Model
    logged: ir.Model
    frozen: ir.Model
    fused: ir.Model
    lines: list[str]


def flow(model: ir.Model, feeds: Iterable[dict[str, Array]], log: Path) -> Stages:
    """Take a model through all stages."""
    simple = run(SIMPLIFY, model).model
    dynamic = run(QUANTIZE, simple).model
    searched = [node.name for node in dynamic.graph if node.op_type == "ReduceMin" and "/eightbit/" in str(node.name)]
    prefix = ",".join(str(name).removesuffix("min") for name in searched)
    logged = run(LOGGING.format(inputs=prefix), dynamic).model
    lines = log_lines(logged, feeds)
    log.write_text("\n".join(lines), encoding="utf-8")
    frozen = run(FREEZE.format(log=log), dynamic).model
    return Stages(simple, dynamic, logged, frozen, run(FUSE, frozen).model, lines)


@cache
def small_stages(name: str, folder: Path) -> Stages:
    return flow(small(name), [{"x": small_input(name)}], folder / f"{name}.log")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


def error_bound(name: str) -> float:
    """Bound how far a quantized stage may be from the float model on its input, from the scales alone.

    A product of x + dx and w + dw, |dx| <= e and |dw| <= s_w / 2, is off by at most ``sum|w| e + (|x| + e) n s_w / 2``
    where n values are summed; an s32 bias by ``s_x s_w / 2``, a uint8 result by another half of its step. Relu, Clip,
    MaxPool and Flatten let no error grow. The factor at the end is for the float32 arithmetic.
    """
    model = small(name)
    feeds = {"x": small_input(name)}
    for node in list(model.graph)[:-1]:
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        model.graph.outputs.append(node.outputs[0])
    seen = {**feeds, **outputs(model, feeds)}
    error = 0.0
    for node in model.graph:
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            continue
        x, weight = seen[str(node.inputs[0].name)], node.inputs[1].const_value  # type: ignore[union-attr]
        assert weight is not None
        rows = weight.numpy()
        rows = rows if node.op_type == "Conv" or node.attributes.get_int("transB", 0) == 1 else rows.T
        rows = np.abs(rows.reshape(len(rows), -1)).astype(np.float64)
        step = (span(x) + 2 * error) / 255
        error += step / 2
        steps = rows.max(1) / 127
        growth = rows.sum(1) * error + (np.abs(x).max() + error) * rows.shape[1] * steps / 2 + step * steps / 2
        error = float(growth.max())
        readers = node.outputs[0].consumers()
        result = readers[0].outputs[0] if readers and readers[0].op_type in ("Relu", "Clip") else node.outputs[0]
        error += (span(seen[str(result.name)]) + 2 * error) / 255 / 2
    return error * 1.001


def span(values: Array) -> float:
    return float(max(values.max(), 0) - min(values.min(), 0))


STAGES = ["dynamic", "frozen", "fused"]


@each_small
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimise", [False, True], ids=["as-written", "optimised"])
def test_every_stage_computes_the_float_result_up_to_rounding(
    name: str, stage: str, optimise: bool, folder: Path
) -> None:
    feeds = {"x": small_input(name)}
    expected = outputs(small(name), feeds)["y"]
    bound = error_bound(name)
    assert bound < span(expected) / 3  # or else it would not show a wrong weight
    found = outputs(getattr(small_stages(name, folder), stage), feeds, optimise=optimise)["y"]
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= bound


@each_small
def test_a_dynamic_chain_is_quantized_once(name: str, folder: Path) -> None:
    found = operators(small_stages(name, folder).dynamic)
    assert found.count("Quantize") == 1
    assert found.count("DequantizeLinear") == 1  # none of weights is left, and none between products


@each_small
def test_logging_changes_no_output(name: str, folder: Path) -> None:
    stages, feeds = small_stages(name, folder), {"x": small_input(name)}
    assert outputs(stages.logged, feeds)["y"].tobytes() == outputs(stages.dynamic, feeds)["y"].tobytes()


@each_small
def test_frozen_on_the_logged_sample_is_dynamic_to_the_bit(name: str, folder: Path) -> None:
    stages, feeds = small_stages(name, folder), {"x": small_input(name)}
    assert not {"ReduceMin", "ReduceMax", "RequantizationRange"}.intersection(operators(stages.frozen))
    assert outputs(stages.frozen, feeds)["y"].tobytes() == outputs(stages.dynamic, feeds)["y"].tobytes()


@each_small
def test_fused_differs_from_frozen_by_one_step_at_most(name: str, folder: Path) -> None:
    stages, feeds = small_stages(name, folder), {"x": small_input(name)}
    expected = outputs(stages.frozen, feeds)["y"]
    step = output_step(stages.fused)
    assert np.abs(outputs(stages.fused, feeds)["y"] - expected).max() <= step * 1.001


def output_step(model: ir.Model) -> float:
    """Return the scale of the DequantizeLinear that computes y."""
    node = model.graph.outputs[0].producer()
    assert node is not None
    assert node.op_type == "DequantizeLinear"
    scale = node.inputs[1].const_value  # type: ignore[union-attr]
    assert scale is not None
    return float(scale.numpy())


@each_small
def test_a_fused_chain_is_one_node_per_product(name: str, folder: Path) -> None:
    fused = small_stages(name, folder).fused
    found = operators(fused)
    assert found.count("QLinearConv") == CONVOLUTIONS.get(name, int(name.startswith("conv")))
    assert found.count("QGemm") + found.count("QLinearMatMul") == MATRICES.get(name, 0)
    assert found.count("QuantizeLinear") == found.count("DequantizeLinear") == 1  # at the ends
    assert not fused.functions
    assert "requant" not in fused.opset_imports


@pytest.mark.parametrize("opset", [13, 18, 21])
def test_every_opset_with_per_channel_scales_will_do(opset: int, tmp_path: Path) -> None:
    name = "conv-flatten-gemm"
    feeds = {"x": small_input(name)}
    stages = flow(small(name, opset), [feeds], tmp_path / "log")
    expected, bound = outputs(stages.simple, feeds)["y"], error_bound(name)
    for stage in STAGES:
        assert np.abs(outputs(getattr(stages, stage), feeds)["y"] - expected).max() <= bound
    assert operators(stages.fused) == ["QuantizeLinear", "QLinearConv", "Flatten", "QGemm", "DequantizeLinear"]


@each_small
def test_a_stage_may_be_stored_in_between(name: str, folder: Path) -> None:
    stages = small_stages(name, folder)
    stored = [ir.from_proto(ir.to_proto(stage)) for stage in (stages.dynamic, stages.frozen)]
    frozen = run(FREEZE.format(log=folder / f"{name}.log"), stored[0]).model
    assert operators(frozen) == operators(stages.frozen)
    assert operators(run(FUSE, stored[1]).model) == operators(stages.fused)


def test_a_fused_bias_is_rounded_half_to_even() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[1,1,1] x) => (float[1,6,1] y)
        <int8[6,1,1] w = {127, 127, 127, 127, 127, 127}, float ws = {0.5}, int8 wz = {0},
         float[6] b = {0.25, 0.75, 1.25, -0.25, -0.75, 100.3}> {
            f = DequantizeLinear(w, ws, wz)
            [c] y = Conv(x, f, b)
        }"""
    )
    bounds = "input_min=0, input_max=255, fallback_min=0, fallback_max=255"
    fused = run(f"quantize_nodes({bounds}) fuse_quantized_conv_and_requantize", model).model
    (node,) = [node for node in fused.graph if node.op_type == "QLinearConv"]
    bias = node.inputs[8].const_value  # type: ignore[union-attr]
    assert bias is not None
    assert bias.numpy().dtype == np.int32
    assert bias.numpy().tolist() == [0, 2, 2, 0, -2, 201]  # in units of 1 * 0.5: 0.5, 1.5, 2.5, -0.5, -1.5, 200.6


def test_a_bias_too_large_for_int32_gets_coarser_weights(tmp_path: Path) -> None:
    model = small("conv")
    weight, bias = (model.graph.initializers[key].const_value for key in ("w", "b"))
    assert weight is not None
    assert bias is not None
    tiny = weight.numpy().copy()
    tiny[0] *= 1e-9
    model.graph.initializers["w"].const_value = ir.Tensor(tiny, name="w")
    feeds = {"x": small_input("conv")}
    stages = flow(model, [feeds], tmp_path / "log")
    found, expected = (outputs(made, feeds)["y"] for made in (stages.fused, stages.frozen))
    assert np.abs(found - expected).max() <= output_step(stages.fused) * 1.001
    assert np.abs(found[:, 0] - bias.numpy()[0]).max() <= output_step(stages.fused)
    (node,) = [node for node in stages.fused.graph if node.op_type == "QLinearConv"]
    stored, scale = (node.inputs[index].const_value for index in (3, 4))  # type: ignore[union-attr]
    assert stored is not None
    assert scale is not None
    assert not stored.numpy()[0].any()  # nothing beside its bias
    assert np.abs(stored.numpy()[1:]).max() == 127
    assert scale.numpy()[0] > np.abs(tiny[0]).max() / 127


ROUND_TRIPS = {
    "same": ("b = QuantizeLinear(f, s, z)", 1),
    "equal": ("b = QuantizeLinear(f, equal_s, equal_z)", 1),
    "of-the-runtimes-domain": ("b = com.microsoft.QuantizeLinear(f, s, z)", 0),
    "another-scale": ("b = QuantizeLinear(f, t, z)", 0),
    "another-zero": ("b = QuantizeLinear(f, s, zero)", 0),
    "another-type": ("b = QuantizeLinear(f, s, signed)", 0),
    "no-zero": ("b = QuantizeLinear(f, s)", 0),
}


@pytest.mark.parametrize(("quantize", "dropped"), ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
def test_a_pair_of_equal_parameters_disappears(quantize: str, dropped: int) -> None:
    model = ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g (uint8[N,2,2] a) => (float[N,4] y)
        <float s = {{0.5}}, float equal_s = {{0.5}}, float t = {{0.25}}, uint8 z = {{3}}, uint8 equal_z = {{3}},
         uint8 zero = {{0}}, int8 signed = {{3}}> {{
            f = DequantizeLinear(a, s, z) {quantize} c = Flatten(b) y = Cast <to = 1> (c)
        }}"""
    )
    assert REGISTRY["fuse_quantized_conv_and_requantize"](model).applied == dropped
    kept = [] if dropped else ["DequantizeLinear", "QuantizeLinear"]
    assert operators(model) == [*kept, "Flatten", "Cast"]


def test_a_pair_whose_result_is_an_output_stays() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17]> g (uint8[N] a) => (uint8[N] b) <float s = {0.5}, uint8 z = {3}> {
            f = DequantizeLinear(a, s, z) b = QuantizeLinear(f, s, z)
        }"""
    )
    assert REGISTRY["fuse_quantized_matmul_and_requantize"](model) == Change()
    assert operators(model) == ["DequantizeLinear", "QuantizeLinear"]


@pytest.mark.parametrize(("kind", "dropped"), [("uint8", 1), ("int8", 0)])
def test_a_missing_zero_point_is_of_the_type_of_the_integers(kind: str, dropped: int) -> None:
    """Without a zero point a QuantizeLinear gives uint8, whatever the DequantizeLinear before it read."""
    model = ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 17]> g ({kind}[N] a) => (float[N] y) <float s = {{0.5}}> {{
            f = DequantizeLinear(a, s) b = QuantizeLinear(f, s) y = Cast <to = 1> (b)
        }}"""
    )
    assert drop_round_trips(model) == dropped
    assert operators(model) == [*([] if dropped else ["DequantizeLinear", "QuantizeLinear"]), "Cast"]


# --- the sample models


@cache
def digits() -> dict[str, Array]:
    with np.load(SAMPLE_MODELS / "digits.npz") as file:
        return dict(file)


@cache
def sample_stages(name: str, folder: Path) -> Stages:
    batches = [{"image": images} for images in np.split(digits()["calib/image"][:128], 4)]
    return flow(ir.load(SAMPLE_MODELS / f"{name}.onnx"), batches, folder / f"{name}.log")


def accuracy(model: ir.Model) -> float:
    found = outputs(model, {"image": digits()["image"][:256]}, optimise=True)["logits"]
    return float(np.mean(found.argmax(1) == digits()["labels"][:256]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_NOW)
def test_every_stage_of_a_sample_is_as_accurate(name: str, folder: Path) -> None:
    stages = sample_stages(name, folder)
    expected = accuracy(stages.simple)
    for stage in STAGES:
        assert accuracy(getattr(stages, stage)) >= expected - 0.01, stage


@pytest.mark.parametrize("name", ONE_NOW)
def test_every_frozen_product_of_a_sample_is_fused(name: str, folder: Path) -> None:
    stages = sample_stages(name, folder)
    quantized = sum(op in ("ConvInteger", "MatMulInteger") for op in operators(stages.dynamic))
    found = operators(stages.fused)
    assert quantized > 0
    assert sum(op in ("QLinearConv", "QGemm", "QLinearMatMul") for op in found) == quantized
    assert not {"ConvInteger", "MatMulInteger", "Requantize", "Quantize"}.intersection(found)
    for node in stages.fused.graph:  # no pair of equal parameters is left
        before = node.inputs[0].producer() if node.op_type == "QuantizeLinear" and node.inputs[0] is not None else None
        if before is not None and before.op_type == "DequantizeLinear":
            assert [value.name for value in node.inputs[1:] if value] != [v.name for v in before.inputs[1:] if v]


@pytest.mark.parametrize("name", ONE_NOW)
def test_logging_a_sample_changes_no_output(name: str, folder: Path) -> None:
    stages, feeds = sample_stages(name, folder), {"image": digits()["image"][:8]}
    found = outputs(stages.logged, feeds)
    assert found["logits"].tobytes() == outputs(stages.dynamic, feeds)["logits"].tobytes()


# --- the log


LINES = [
    ";c/eightbit/requant_range__print__;__requant_min_max:[-1.5][2.25]",
    ";c/eightbit/requant_range__print__;__requant_min_max:[-1.25][2.5]",
    ";c/eightbit/requant_range__print__;__requant_min_max:[-1e0][+3]",
    ";x/eightbit/min__print__;__min:[-1]",
    ";x/eightbit/max__print__;__max:[1.875]",
    ";y/eightbit/requant_range__print__;__requant_min_max:[-20.887871][22.274715]",
]
RANGES = {
    "c/eightbit/requant_range/frozen_min": 0.0,  # the Relu's bound
    "c/eightbit/requant_range/frozen_max": 3.0,
    "x/eightbit/min/frozen_min_only": -1.0,
    "x/eightbit/max/frozen_max_only": 1.875,
    "y/eightbit/requant_range/frozen_min": float(np.float32(-20.887871)),
    "y/eightbit/requant_range/frozen_max": float(np.float32(22.274715)),
}
GLOG = "I0108 21:45:42.261883    1972 logging_ops.cc:79] "


def shuffled(lines: list[str]) -> str:
    lines = list(lines)
    random.Random(1).shuffle(lines)
    return "\n".join(lines)


LOGS = {
    "by-hand": "\n".join(LINES) + "\n",
    "shuffled": shuffled(LINES),
    "windows": "\r\n".join(LINES),
    "concatenated": "\n".join(LINES) + "\n" + shuffled(LINES),
    "glog": "\n".join(GLOG + line for line in LINES),
    "glued": "".join(LINES),
    "glued-with-prefix": GLOG + GLOG.join(LINES),
    "with-the-operator": "\n".join(";RequantizationRange" + line for line in LINES),
    "among-others": "\n".join(f"{line}\nstep 3; loss [0.2]\n;;__print__\n[1][2]" for line in LINES),
    "other-kinds": "\n".join(LINES) + "\n;c/eightbit/requant_range__print__;__KL:[1][2][3]\n;y__print__;[1][2]",
    "not-utf-8": "\n".join(LINES) + "\n\udcff\udcfe",
}


def frozen_ranges(model: ir.Model) -> dict[str, float]:
    """Return the constants that the freeze transforms made."""
    return {
        str(name): float(value.const_value.numpy())
        for name, value in model.graph.initializers.items()
        if "/frozen_" in str(name) and value.const_value is not None
    }


def dynamic(name: str = "conv-flatten-gemm") -> ir.Model:
    return run(QUANTIZE, small(name)).model


@pytest.mark.parametrize("text", LOGS.values(), ids=LOGS.keys())
def test_the_same_records_freeze_the_same_ranges(text: str, tmp_path: Path) -> None:
    log = tmp_path / "min_max.log"
    log.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    result = run(FREEZE.format(log=log), dynamic())
    assert frozen_ranges(result.model) == RANGES
    assert [step.change for step in result.applied] == [Change(applied=n) for n in (1, 1, 2)]


REJECTED = {
    "cut-short": ";y/eightbit/requant_range__print__;__requant_min_max:[-20",
    "no-values": ";y/eightbit/requant_range__print__;__requant_min_max:",
    "one-value": ";y/eightbit/requant_range__print__;__requant_min_max:[-20]",
    "three-values": ";y/eightbit/requant_range__print__;__requant_min_max:[-20][20][21]",
    "no-number": ";y/eightbit/requant_range__print__;__requant_min_max:[-20][many]",
    "not-finite": ";y/eightbit/requant_range__print__;__requant_min_max:[-20][inf]",
    "not-a-number": ";y/eightbit/requant_range__print__;__requant_min_max:[nan][20]",
    "beyond-float32": ";y/eightbit/requant_range__print__;__requant_min_max:[-1e39][20]",
    "upside-down": ";y/eightbit/requant_range__print__;__requant_min_max:[20][-20]",
    "interrupted": ";y/eightbit/requant_range__print__;__requant_min_max:[-20][3;y__print__;__other:[1]",
}


@pytest.mark.parametrize("line", REJECTED.values(), ids=REJECTED.keys())
def test_a_record_that_cannot_be_read_is_counted(line: str, tmp_path: Path) -> None:
    log = tmp_path / "min_max.log"
    log.write_text("\n".join([line, *LINES, line]), encoding="utf-8")
    result = run(FREEZE.format(log=log), dynamic())
    assert frozen_ranges(result.model) == RANGES
    assert result.applied[2].change == Change(applied=2, skipped={"unreadable-records": 2})  # type: ignore[arg-type]


FREEZERS = {
    "freeze_requantization_ranges": ("y/eightbit/requant_range", "__requant_min_max:[-3][4]"),
    "freeze_min": ("x/eightbit/min", "__min:[-1]"),
    "freeze_max": ("x/eightbit/max", "__max:[2]"),
}
each_freezer = pytest.mark.parametrize("name", FREEZERS)


def freeze(name: str, log: Path, *lines: str, **options: float) -> Change:
    """Freeze a fresh dynamic model by some lines."""
    log.write_text("\n".join(lines), encoding="utf-8")
    return REGISTRY[name](dynamic(), min_max_log_file=str(log), **options)


@each_freezer
@pytest.mark.parametrize("text", ["", "nothing of interest\n", ";y__print__;__KL:[1]"], ids=["empty", "other", "kind"])
def test_a_log_without_records_is_an_error(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(TransformError, match=r"min_max\.log: no line with __print__;__"):
        freeze(name, tmp_path / "min_max.log", text)


@each_freezer
def test_a_log_that_is_not_there_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(RequantError, match=r"none\.log: no such file"):
        REGISTRY[name](dynamic(), min_max_log_file=str(tmp_path / "none.log"))


@each_freezer
def test_an_unknown_name_is_an_error_that_lists_near_ones(name: str, tmp_path: Path) -> None:
    node, record = FREEZERS[name]
    with pytest.raises(TransformError, match=f"no .* named '{node}x' in the graph; did you mean '{node}'") as caught:
        freeze(name, tmp_path / "log", f";{node}__print__;{record}", f";{node}x__print__;{record}")
    assert "\n" not in str(caught.value)


@each_freezer
@pytest.mark.parametrize("other", ["f/eightbit", "y/eightbit", "y"], ids=["Flatten", "MatMulInteger", "output"])
def test_a_node_of_another_kind_is_an_error(name: str, other: str, tmp_path: Path) -> None:
    record = FREEZERS[name][1]
    with pytest.raises(TransformError, match=f"named '{other}' in the graph"):
        freeze(name, tmp_path / "log", f";{other}__print__;{record}")


def test_a_minimum_that_belongs_to_the_model_is_not_frozen(tmp_path: Path) -> None:
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[2,4] x) => (float[2,4] y, float[1,1] low)
        <int8[4,4] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8}, float s = {0.5}, int8 z = {0}> {
            f = DequantizeLinear(w, s, z)
            [low] low = ReduceMin(x)
            [m] y = MatMul(x, f)
        }"""
    )
    quantized = run("quantize_nodes", model).model
    log = tmp_path / "log"
    log.write_text(";low__print__;__min:[1]", encoding="utf-8")
    change = run(f"freeze_min(min_max_log_file={log})", quantized).applied[0].change
    assert change == Change(skipped={"not-a-range": 1, "not-in-the-log": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "low", "high"), [(1, 0, 0), (10, 1, 9), (20, 1, 19), (100, 5, 95)])
def test_percentiles_are_those_of_the_original(count: int, low: int, high: int) -> None:
    values = [float(value) for value in range(count)]
    random.Random(2).shuffle(values)
    assert (low_percentile(values, 5), high_percentile(values, 5)) == (low, high)


def test_no_percentile_keeps_the_extremes() -> None:
    assert (low_percentile([3, 1, 2], 0), high_percentile([3, 1, 2], 0)) == (1, 3)
    assert (low_percentile([3, 1, 2], 100), high_percentile([3, 1, 2], 100)) == (3, 1)


@each_freezer
def test_percentiles_are_taken_of_the_records(name: str, tmp_path: Path) -> None:
    node = FREEZERS[name][0]
    kind = FREEZERS[name][1].partition("[")[0]
    records = [f"[{-value}]" if "min:" in kind else f"[{value}]" for value in range(20)]
    if name == "freeze_requantization_ranges":
        records = [f"[{-value}][{value}]" for value in range(20)]
    log = tmp_path / "log"
    log.write_text(shuffled([f";{node}__print__;{kind}{record}" for record in records]), encoding="utf-8")
    found = frozen_ranges(run(f"{name}(min_max_log_file={log})", dynamic()).model)
    expected = {
        "freeze_requantization_ranges": [-18.0, 19.0],
        "freeze_min": [-18.0],  # not -1: the original took the wrong end
        "freeze_max": [19.0],
    }
    assert list(found.values()) == expected[name]


@pytest.mark.parametrize("percentile", [-1, 101])
@pytest.mark.parametrize("side", ["min_percentile", "max_percentile"])
def test_a_percentile_lies_between_0_and_100(side: str, percentile: float, tmp_path: Path) -> None:
    with pytest.raises(TransformError, match=f"must lie in 0..100, not {percentile}"):
        freeze("freeze_requantization_ranges", tmp_path / "log", *LINES, **{side: percentile})


def test_what_the_log_does_not_name_stays_dynamic(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(LINES[:-1]), encoding="utf-8")
    result = run(FREEZE.format(log=log), dynamic())
    assert result.applied[2].change == Change(applied=1, skipped={"not-in-the-log": 1})  # type: ignore[arg-type]
    assert operators(result.model).count("RequantizationRange") == 1
    fused = run(FUSE, result.model)
    found = operators(fused.model)
    assert found.count("QLinearConv") == found.count("MatMulInteger") == 1
    assert fused.applied[1].change.skipped == {"dynamic-range": 1}
    feeds = {"x": small_input("conv-flatten-gemm")}
    outputs(fused.model, feeds)  # a half-fused model runs


def test_freezing_twice_changes_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(LINES), encoding="utf-8")
    once = run(FREEZE.format(log=log), dynamic()).model
    again = run(FREEZE.format(log=log), once)
    assert [step.change.applied for step in again.applied] == [0, 0, 0]
    del once.metadata_props[METADATA_KEY], again.model.metadata_props[METADATA_KEY]
    assert written(again.model) == written(once)


# --- the options of quantize_nodes


def test_a_fixed_input_range_leaves_no_search_at_the_input() -> None:
    model = run(f"{QUANTIZE}(input_min=-1, input_max=2)", small("conv")).model
    assert not {"ReduceMin", "ReduceMax"}.intersection(operators(model))
    feeds = {"x": small_input("conv")}
    expected = outputs(small("conv"), feeds)["y"]
    assert np.abs(outputs(model, feeds)["y"] - expected).max() < span(expected) / 20
    wider = outputs(run(f"{QUANTIZE}(input_min=-100, input_max=200)", small("conv")).model, feeds)["y"]
    assert np.abs(wider - expected).max() > span(expected) / 20  # the range is really used


def test_fallback_bounds_leave_nothing_to_find() -> None:
    pipeline = f"{QUANTIZE}(input_min=-1, input_max=2, fallback_min=-6, fallback_max=6) {FUSE}"
    result = run(pipeline, small("conv-flatten-gemm"))
    assert operators(result.model) == ["QuantizeLinear", "QLinearConv", "Flatten", "QGemm", "DequantizeLinear"]
    found = outputs(result.model, {"x": small_input("conv-flatten-gemm")})["y"]
    assert found.max() <= 6.03  # half a step above 6
    assert found.min() >= -6.03


def test_a_relu_keeps_its_bound_within_fallback_bounds() -> None:
    pipeline = f"{QUANTIZE}(fallback_min=-6, fallback_max=60)"
    found = outputs(run(pipeline, small("matmul-batched")).model, {"x": small_input("matmul-batched")})["y"]
    assert found.min() == 0
    six = run(pipeline, small("conv-relu6")).model
    assert outputs(six, {"x": small_input("conv-relu6")})["y"].max() == 6


@pytest.mark.parametrize(
    "options",
    [
        "input_min=0",
        "input_max=1",
        "fallback_min=0",
        "fallback_max=1",
        "input_min=1, input_max=1",
        "fallback_min=2, fallback_max=1",
    ],
)
def test_half_a_range_is_an_error(options: str) -> None:
    kind = options.partition("_")[0]
    with pytest.raises(TransformError, match=f"give both {kind}_min and {kind}_max"):
        run(f"quantize_nodes({options})", small("conv"))


def test_ignored_operators_stay() -> None:
    weights = run("quantize_weights(minimum_size=2)", small("conv-flatten-gemm")).model
    result = run("quantize_nodes(ignore_op=Conv)", weights)
    assert result.applied[0].change == Change(applied=1, skipped={"ignored": 1})  # type: ignore[arg-type]
    assert {"Conv", "MatMulInteger"} <= set(operators(result.model))
    both = run("quantize_nodes(ignore_op=Conv, ignore_op=Gemm)", weights)
    assert both.applied[0].change == Change(skipped={"ignored": 2})  # type: ignore[arg-type]


LEFT_ALONE = {
    "float-weights": "y = MatMul(x, float_weights)",
    "weight-form": "f = DequantizeLinear <axis = 0> (w, scales, zeros) y = MatMul(x, f)",
    "weight-form, offset": "f = DequantizeLinear(w, scale, two) y = MatMul(x, f)",
    "batched-weights": "f = DequantizeLinear(cube, scale, zero) y = MatMul(x, f)",
    "bias-form": "f = DequantizeLinear(w, scale, zero) b = Relu(bias) y = Gemm(x, f, b)",
    "bias-form, per row": "f = DequantizeLinear(w, scale, zero) y = Gemm(x, f, column)",
    "gemm-form": "f = DequantizeLinear(w, scale, zero) y = Gemm <alpha = 0.5> (x, f, bias)",
    "gemm-form, transposed": "f = DequantizeLinear(w, scale, zero) y = Gemm <transA = 1> (x, f, bias)",
}


@pytest.mark.parametrize(("reason", "body"), LEFT_ALONE.items(), ids=LEFT_ALONE.keys())
def test_forms_without_an_integer_product_are_left_alone(reason: str, body: str) -> None:
    model = ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[2,2] x) => (float[N,2] y)
        <int8[2,2] w = {{1, 2, 3, 4}}, float scale = {{0.5}}, float[2] scales = {{0.5, 2}}, int8[2] zeros = {{0, 0}},
         int8[2,2,2] cube = {{1, 2, 3, 4, 5, 6, 7, 8}}, int8 zero = {{0}}, int8 two = {{2}}, float[2] bias = {{1, 2}},
         float[2,2] float_weights = {{1, 2, 3, 4}}, float[2,1] column = {{1, 2}}> {{ {body} }}"""
    )
    if reason == "batched-weights":
        model.graph.outputs[0].shape = ir.Shape([2, 2, 2])
    before = written(model)
    assert REGISTRY["quantize_nodes"](model) == Change(skipped={reason.partition(",")[0]: 1})  # type: ignore[arg-type]
    assert written(model) == before


# --- quantize_weights


def test_weights_are_stored_once_per_channel_and_biases_not_at_all() -> None:
    result = run("quantize_weights(minimum_size=2)", small("conv"))
    assert result.applied[0].change == Change(applied=1, skipped={"bias": 1})  # type: ignore[arg-type]
    stored = {name: value.const_value for name, value in result.model.graph.initializers.items()}
    assert "w" not in stored
    original = small("conv").graph.initializers["w"].const_value
    values, scale = stored["w/int8"], stored["w/scale"]
    assert original is not None
    assert values is not None
    assert scale is not None
    assert scale.shape == [4]
    steps = scale.numpy().reshape(-1, 1, 1, 1)
    assert steps.ravel() == pytest.approx(np.abs(original.numpy()).max((1, 2, 3)) / 127, rel=1e-6)
    assert (np.abs(values.numpy() * steps - original.numpy()) <= steps * 0.50001).all()


def test_small_weights_stay() -> None:
    model = small("conv")
    assert REGISTRY["quantize_weights"](model) == Change(skipped={"small": 2})  # type: ignore[arg-type]


def test_weights_of_an_opset_without_per_channel_scales_stay() -> None:
    model = small("conv")
    model.graph.opset_imports[""] = 11
    skipped = REGISTRY["quantize_weights"](model, minimum_size=100).skipped
    assert skipped == {"opset-below-13": 1, "small": 1}


def test_a_weight_that_is_also_an_output_keeps_its_name() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,2] x) => (float[N,2] y, float[2,2] w)
        <float[2,2] w = {127, 2, 3, 127}> { y = MatMul(x, w) }"""
    )
    result = run("quantize_weights(minimum_size=1)", model)
    assert result.applied[0].change.applied == 1
    assert outputs(result.model, {"x": np.eye(2, dtype=np.float32)})["w"].tolist() == [[127, 2], [3, 127]]


def test_storing_weights_after_quantize_nodes_leaves_its_constants_alone() -> None:
    model = dynamic("conv")
    before = written(model)
    assert REGISTRY["quantize_weights"](model, minimum_size=1).applied == 0
    assert written(model) == before


# --- insert_logging


def logged(options: str, name: str = "conv") -> tuple[ir.Model, Change]:
    result = run(f"insert_logging({options})", dynamic(name))
    return result.model, result.applied[0].change


def new_outputs(model: ir.Model) -> list[str]:
    return [str(output.name) for output in model.graph.outputs if output.name != "y"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("show_name=true", ";y/eightbit/requant_range__print__;"),
        ("show_op=true", ";RequantizationRange;"),
        ("show_op=true, show_name=true", ";RequantizationRange;;y/eightbit/requant_range__print__;"),
        ('message="here: "', "here: "),
        (
            'show_name=true, message="__requant_min_max:"',
            ";y/eightbit/requant_range__print__;__requant_min_max:",
        ),
    ],
)
def test_a_line_begins_as_asked(options: str, line: str) -> None:
    assert new_outputs(logged(f"op=RequantizationRange, {options}")[0]) == [line]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ("op=ReduceMin", 1),
        ("op=ReduceMin, op=ReduceMax", 2),
        ('op="ReduceMin,ReduceMax"', 2),
        ("prefix=x/eightbit", 3),
        ("op=ReduceMin, prefix=x/eightbit", 1),
        ("op=ReduceMin, prefix=y/eightbit", 0),
        ("prefix=x/eightbit/m, prefix=y/eightbit/requant_range", 3),
    ],
)
def test_operators_and_prefixes_must_both_hold(options: str, count: int) -> None:
    model, change = logged(f"{options}, show_name=true")
    assert len(new_outputs(model)) == change.applied == count


def test_a_line_holds_the_values() -> None:
    model, _ = logged('prefix="x/eightbit/m,y/eightbit/requant_range", show_name=true')
    x = small_input("conv")
    found = outputs(model, {"x": x})
    assert found[";x/eightbit/min__print__;"].tolist() == [x.min()]
    assert found[";x/eightbit/max__print__;"].tolist() == [x.max()]
    lo, hi = found[";y/eightbit/requant_range__print__;"].tolist()
    step = (hi - lo) / 255
    assert found["y"].min() == pytest.approx(lo, abs=step)
    assert found["y"].max() == pytest.approx(hi, abs=step)


def test_limits_are_left_to_the_writer_of_the_log() -> None:
    model, _ = logged("op=ReduceMin, show_name=true, first_n=3, summarize=7")
    result = run("insert_logging(op=ReduceMax, show_name=true)", model).model
    low, high = ";x/eightbit/min__print__;", ";x/eightbit/max__print__;"
    assert json.loads(result.metadata_props["requant.log_first_n"]) == {low: 3, high: -1}
    assert json.loads(result.metadata_props["requant.log_summarize"]) == {low: 7, high: 1024}


def test_two_nodes_cannot_write_the_same_line() -> None:
    with pytest.raises(
        TransformError, match=r"more than one node would write the line ';RequantizationRange;'; set show_name=true"
    ):
        logged("op=RequantizationRange, show_op=true", "conv-flatten-gemm")


def test_a_line_of_nothing_is_an_error() -> None:
    with pytest.raises(TransformError, match="set show_name=true"):
        logged("op=ReduceMin")


def test_a_name_of_an_output_is_no_line() -> None:
    with pytest.raises(TransformError, match="would write the line 'y'"):
        logged("op=ReduceMin, message=y")


def test_logging_twice_logs_once() -> None:
    model, first = logged("op=ReduceMin, show_name=true")
    again = run("insert_logging(op=ReduceMin, show_name=true)", model).applied[0].change
    assert first == Change(applied=1)
    assert again == Change(skipped={"logged": 1})  # type: ignore[arg-type]


def test_the_log_of_requant_calibrate_is_the_same(folder: Path) -> None:
    stages = small_stages("conv-flatten-gemm", folder)
    lines: list[str] = []
    run_logged(written(stages.logged), [Sample({"x": small_input("conv-flatten-gemm")}, None, "x")], lines.append)
    assert sorted(lines) == sorted(f"{line}\n" for line in stages.lines)


def test_nodes_of_one_name_are_told_apart() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,2] x) => (float[1,2] y)
        <float[2,2] a = {1, 2, -3, -4}, float[2,2] b = {4, 3, -2, -1}> {
        [same] h = MatMul(x, a)
        [same] y = MatMul(h, b)
    }"""
    result = run("quantize_weights(minimum_size=4) quantize_nodes", ir.from_onnx_text(text))
    assert [node.op_type for node in result.model.graph].count("MatMulInteger") == 2
    x = np.array([[1.0, 2.0]], np.float32)
    session = ort.InferenceSession(ir.to_proto(result.model).SerializeToString(), providers=["CPUExecutionProvider"])
    a, b = np.array([[1, 2], [-3, -4]], np.float32), np.array([[4, 3], [-2, -1]], np.float32)
    exact, largest = x @ a @ b, (x @ np.abs(a) @ np.abs(b)).max()
    # two products, each of weights and activations rounded to 1/127 and 1/255 of their largest value at most
    assert np.abs(session.run(None, {"x": x})[0] - exact).max() <= largest * 2 * (1 / 127 + 1 / 255)


def test_a_stack_of_matrices_has_one_scale_and_a_resize_keeps_its_scales() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[1,2,4,4] x) => (float[A,B,C,D] y) <float[4] s = {1, 1, 2, 2}> {
            r = Resize <mode = "nearest"> (x, , s)
            y = MatMul(r, stack)
        }"""
    )
    weights = np.random.default_rng(5).normal(size=(2, 8, 3)).astype(np.float32)
    stack = next(value for value in model.graph.node(1).inputs if value is not None and value.name == "stack")
    stack.const_value = ir.Tensor(weights, name="stack")
    model.graph.register_initializer(stack)
    result = run("quantize_weights(minimum_size=1)", model)
    assert result.applied[0].change == Change(applied=1, skipped={"resize": 1})  # type: ignore[arg-type]
    assert [v.shape for v in result.model.graph.initializers.values() if str(v.name).endswith("/scale")] == [()]
    feeds = {"x": np.random.default_rng(6).normal(size=(1, 2, 4, 4)).astype(np.float32)}
    step = np.abs(weights).max() / 127
    bound = 8 * np.abs(feeds["x"]).max() * step  # of 8 terms, each weight off by half a step; as much again for float32
    (before,), (after,) = (list(outputs(each, feeds).values()) for each in (model, result.model))
    assert np.abs(before - after).max() <= bound


def test_names_that_are_taken_are_not_taken_again() -> None:
    model = small("conv-pool-conv")
    model.graph.node("c").name, model.graph.node("p").name = "w/dequantize", "x/eightbit/quantize"
    model.graph.node("r").outputs[0].name = "w/dequantize/eightbit:0"
    quantized = run(QUANTIZE, model).model
    nodes = [node.name for node in quantized.graph]
    assert len(set(nodes)) == len(nodes)
    assert operators(quantized).count("ConvInteger") == 2


def test_a_name_with_the_separator_of_the_log_can_be_frozen(tmp_path: Path) -> None:
    model = small("conv-pool-conv")
    for node in model.graph:
        node.name = f"{node.name};0[1]"
        for value in node.outputs:
            value.name = str(value.name) if value.is_graph_output() else f"{value.name};0[1]"
    stages = flow(model, [{"x": small_input("conv-pool-conv")}], tmp_path / "log")
    assert operators(stages.fused).count("QLinearConv") == 2
