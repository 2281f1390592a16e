"""The INT8 models also load in OpenVINO, and give the same classes as in ONNX Runtime."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from requant.calibration.model.session import Array
from requant.quantize import Options, quantize_model
from requant.transforms.int8.qparams import Scheme

with pytest.MonkeyPatch.context() as patch:  # OpenVINO sends no telemetry if this package is missing
    patch.setitem(sys.modules, "openvino_telemetry", None)
    openvino = pytest.importorskip("openvino")


SAMPLE_MODELS = Path(__file__).parent.parent / "sample_models"
DATA = SAMPLE_MODELS / "digits.npz"
EPS = float(np.finfo(np.float32).eps)

# float32 as in ONNX Runtime: by default OpenVINO computes in bfloat16 if the CPU can, and rounds activations to 8 bits
# if the weights are int8
CONFIG = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_NUM_THREADS": 1}


def run_openvino(model: bytes, feed: dict[str, Array]) -> Array:
    core = openvino.Core()
    return np.asarray(core.compile_model(core.read_model(model), "CPU", CONFIG)(feed)[0])


def run_onnxruntime(model: bytes, feed: dict[str, Array]) -> Array:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # without VNNI, int8 weights become uint8: exact
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0])


def rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        pytest.param("digits", Scheme(), id="digits", marks=pytest.mark.slow),
        pytest.param("digits", Scheme("s8", symmetric=True), id="digits-s8-symmetric", marks=pytest.mark.slow),
        pytest.param("digits", Scheme(weight="u8"), id="digits-u8-weights", marks=pytest.mark.slow),
        pytest.param("digits_transformer", Scheme(), id="digits_transformer", marks=pytest.mark.slow),
    ],
)
def test_a_quantized_model_classifies_as_in_onnxruntime(name: str, scheme: Scheme, tmp_path: Path) -> None:
    """Both runtimes compute the same exact integer sums, but their requantizations may differ by one step.

    This is less than the error of quantization, which changed the class of at most one of 797 items. So only items close
    to the border between two classes may change: at most one in a hundred.
    """
    original, output = SAMPLE_MODELS / f"{name}.onnx", tmp_path / "int8.onnx"
    options = Options(force_int8=True, samples=64, seconds=0.05, scheme=scheme, place="rules")
    result = quantize_model(original, f"{DATA}:calib", output, options)
    assert result.int8_nodes > 0
    feed = {"image": np.load(DATA)["image"]}
    expected, found = run_onnxruntime(output.read_bytes(), feed), run_openvino(output.read_bytes(), feed)
    assert np.mean(found.argmax(axis=1) == expected.argmax(axis=1)) >= 0.99
    assert rms(found - expected) <= rms(expected - run_onnxruntime(original.read_bytes(), feed))


HEAD = '<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'

X = np.random.default_rng(0).normal(size=(2, 4, 6, 6)).astype(np.float32)
ROWS = X.reshape(8, 36)
WEIGHTS = np.random.default_rng(1).integers(-127, 128, (36, 5)).astype(np.int8)
FILTERS = np.random.default_rng(2).normal(size=(8, 4, 3, 3)).astype(np.float32)
SCALES = np.linspace(0.01, 0.02, 5).astype(np.float32)
STEP, ZERO = np.asarray(0.05, np.float32), np.asarray(100, np.uint8)
INTEGERS = np.clip(np.rint(ROWS / STEP) + ZERO, 0, 255).astype(np.uint8)


def operator(text: str, opset: int = 17, **constants: Array) -> bytes:
    """Return a model from one line of ONNX text."""
    proto = onnx.parser.parse_model(HEAD.format(opset=opset) + text)
    proto.graph.initializer.extend(numpy_helper.from_array(array, key) for key, array in constants.items())
    return bytes(proto.SerializeToString())


@pytest.mark.parametrize("opset", [11, 17])
def test_pairs_of_the_runtime_s_own_domain(opset: int) -> None:
    """Before opset 13 pairs have no axis; then the operators of com.microsoft are used."""
    model = operator(
        """g (float[8,36] x) => (float[8,5] y) {
            q = com.microsoft.QuantizeLinear(x, s, z)
            d = com.microsoft.DequantizeLinear(q, s, z)
            v = com.microsoft.DequantizeLinear <axis = 1> (w, ws, wz)
            y = MatMul(d, v)
        }""",
        opset,
        s=STEP,
        z=ZERO,
        w=WEIGHTS,
        ws=SCALES,
        wz=np.zeros(5, np.int8),
    )
    steps = np.abs(INTEGERS.astype(np.float64) - int(ZERO)) @ np.abs(WEIGHTS.astype(np.float64))
    found, expected = run_openvino(model, {"x": ROWS}), run_onnxruntime(model, {"x": ROWS})
    assert (np.abs(found - expected) <= 36 * EPS * steps * STEP * SCALES).all()


def test_a_product_of_integers_into_float() -> None:
    model = operator(
        """g (uint8[8,36] x) => (float[8,5] y) {
            y = com.microsoft.MatMulIntegerToFloat(x, w, s, ws, z, wz)
        }""",
        s=STEP,
        z=ZERO,
        w=WEIGHTS,
        ws=SCALES,
        wz=np.zeros(5, np.int8),
    )
    steps = np.abs(INTEGERS.astype(np.float64) - int(ZERO)) @ np.abs(WEIGHTS.astype(np.float64))
    found, expected = run_openvino(model, {"x": INTEGERS}), run_onnxruntime(model, {"x": INTEGERS})
    assert (np.abs(found - expected) <= 36 * EPS * steps * STEP * SCALES).all()


def test_a_product_with_ranges_found_at_run_time() -> None:
    """One runtime may keep the activations in float: the bound is half a step, twice, plus float rounding."""
    model = operator(
        "g (float[8,36] x) => (float[8,5] y) { y = com.microsoft.DynamicQuantizeMatMul(x, w, ws, wz) }",
        w=WEIGHTS,
        ws=SCALES,
        wz=np.zeros(5, np.int8),
    )
    step = (max(ROWS.max(), 0) - min(ROWS.min(), 0)) / 255
    weights = np.abs(WEIGHTS.astype(np.float64)) * SCALES
    found, expected = run_openvino(model, {"x": ROWS}), run_onnxruntime(model, {"x": ROWS})
    assert (np.abs(found - expected) <= step * weights.sum(axis=0) + 36 * EPS * np.abs(ROWS) @ weights).all()


@pytest.mark.parametrize("gelu", ["QuickGelu <alpha = 1.0>", "FastGelu", "Gelu"])
def test_gelus_of_the_runtime_s_own_domain(gelu: str) -> None:
    """Return the bound for ``x`` times a function in 0..1: 16 units in the last place; both runtimes need only a few."""
    model = operator(f"g (float[8,36] x) => (float[8,36] y) {{ y = com.microsoft.{gelu} (x) }}")
    found, expected = run_openvino(model, {"x": ROWS}), run_onnxruntime(model, {"x": ROWS})
    assert (np.abs(found - expected) <= 16 * EPS * np.abs(ROWS)).all()


def test_a_convolution_that_the_runtime_leaves_in_float() -> None:
    """A FusedConv loads only with an activation; this activation changes nothing."""
    model = operator(
        """g (float[2,4,6,6] x) => (float[2,8,6,6] y) {
            y = com.microsoft.FusedConv <pads = [1,1,1,1], activation = "LeakyRelu", activation_params = [1.0]> (x, w)
        }""",
        w=FILTERS,
    )
    plain = operator(
        "g (float[2,4,6,6] x) => (float[2,8,6,6] y) { y = Conv <pads = [1,1,1,1]> (x, w) }",
        w=FILTERS,
    )
    absolute = operator(
        "g (float[2,4,6,6] x) => (float[2,8,6,6] y) { y = Conv <pads = [1,1,1,1]> (x, w) }",
        w=np.abs(FILTERS),
    )
    expected = run_onnxruntime(model, {"x": X})
    assert (expected == run_onnxruntime(plain, {"x": X})).all()
    bound = 36 * EPS * run_onnxruntime(absolute, {"x": np.abs(X)})
    assert (np.abs(run_openvino(model, {"x": X}) - expected) <= bound).all()
