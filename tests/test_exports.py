"""Small models as exporters write them go through the commands, and compute the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from requant import NATIVE_DOMAIN
from requant.cli import main
from requant.quantize import Options, quantize_model
from requant.quantize.model.files import load_model

from .native import needs_library

FOLDER = str(Path(__file__).parent.parent / "sample_models")
sys.path.insert(0, FOLDER)
exports = importlib.import_module("exports")
sys.path.remove(FOLDER)

LEAST_DB = 20.0  # a few layers of random weights lose about 20 of the 50 dB of 8 bits
UNLOADABLE = {"resize-13-listed"}  # the runtime refuses the file itself

each_export = pytest.mark.parametrize("name", sorted(exports.EXPORTS))


@pytest.fixture
def model(name: str, tmp_path: Path) -> Path:
    path = tmp_path / f"{name}.onnx"
    onnx.save(exports.EXPORTS[name].build(), path)
    return path


def requant(*arguments: object) -> int:
    result = CliRunner().invoke(main, ["-q", *map(str, arguments)], prog_name="requant")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result.exit_code


def outputs(path: Path, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: list[NDArray[Any]] = session.run(None, dict(feed))
    return found


@each_export
def test_a_simplified_model_computes_the_same(name: str, model: Path, tmp_path: Path) -> None:
    """Within the rounding of some layers: sums of at most 300 float products of variance 1."""
    out = tmp_path / "simple.onnx"
    assert requant("transform", model, out, "--group", "simplify") == 0
    feed = exports.feed(exports.EXPORTS[name].build())
    found = outputs(out, feed)
    if name not in UNLOADABLE:
        for before, after in zip(outputs(model, feed), found, strict=True):
            np.testing.assert_allclose(
                before, after, rtol=0, atol=300 * np.finfo(np.float32).eps * np.abs(before).max()
            )


@each_export
def test_quantize_writes_a_model_that_computes_nearly_the_same(name: str, model: Path, tmp_path: Path) -> None:
    feeds = [exports.feed(exports.EXPORTS[name].build(), seed) for seed in range(4)]
    options = Options(force_int8=True, place="rules", effort="low", seconds=0.1)
    result = quantize_model(model, feeds, tmp_path / "int8.onnx", options)
    assert result.accuracy.worst_sqnr_db >= LEAST_DB
    assert result.int8_nodes > 0
    load_model(tmp_path / "int8.onnx")


@each_export
def test_calibrate_finds_ranges(name: str, model: Path, tmp_path: Path) -> None:
    feed = exports.feed(exports.EXPORTS[name].build())
    np.savez(tmp_path / "data.npz", **feed)
    if all(array.ndim and len(array) == len(next(iter(feed.values()))) for array in feed.values()):
        assert requant("calibrate", model, "--data", tmp_path / "data.npz", "-o", tmp_path / "ranges.json") == 0


def test_the_last_import_of_an_operator_set_counts(tmp_path: Path) -> None:
    """ONNX Runtime does the same; ``ai.onnx`` is another name of the standard operators."""
    path = tmp_path / "model.onnx"
    onnx.save(exports.EXPORTS["imports-two-names"].build(), path)
    assert load_model(path).opset_imports == {"": 17}


def test_a_threshold_that_a_caller_may_set_stays_an_input(tmp_path: Path) -> None:
    """It is the only initializer that is an input, and a scalar."""
    text = "g (float[N,8] x, float t = {0.5}) => (float[N,8] y) { p = MatMul(x, w)  y = Min(p, t) }"
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(exports.Export(text=text, weights={"w": (8, 8)}).build(), path)
    assert requant("transform", path, out, "--group", "simplify") == 0
    assert [value.name for value in onnx.load(out).graph.input] == ["x", "t"]


@pytest.mark.parametrize("name", ["bounds", "leaky-max"])
def test_bounds_run_inside_integer_units(name: str, model: Path, tmp_path: Path) -> None:
    feeds = [exports.feed(exports.EXPORTS[name].build(), seed) for seed in range(4)]
    options = Options(force_int8=True, place="rules", effort="low", seconds=0.1, kernels="stock")
    result = quantize_model(model, feeds, tmp_path / "int8.onnx", options)
    assert result.float_nodes == ()
    kinds = {node.op_type for node in load_model(tmp_path / "int8.onnx").graph}
    assert not kinds & {"Max", "Min"}


@pytest.mark.parametrize("bound", ["Max(x, low)", "Min(x, high)", "Max(low, x)  y = Min(high, m)", "Max(x, s)"])
def test_bounds_of_nan_and_infinity_stay(bound: str, tmp_path: Path) -> None:
    """ONNX Runtime's Clip, Max, Min and LeakyRelu agree on NaN; infinite bounds keep infinite values."""
    body = f"m = {bound}" if " y =" in bound else f"y = {bound}"
    scaled = "s = Mul(x, slope)" if "s)" in bound else ""
    constants = "<float low = {-1}, float high = {4}, float slope = {0.5}>"
    text = f"g (float[6] x) => (float[6] y) {constants} {{ {scaled} {body} }}"
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(exports.Export(text=text).build(), path)
    assert requant("transform", path, out, "--group", "simplify") == 0
    feed = {"x": np.array([np.nan, np.inf, -np.inf, -5, 0, 5], np.float32)}
    np.testing.assert_array_equal(outputs(path, feed)[0], outputs(out, feed)[0])
    assert {node.op_type for node in load_model(out).graph} <= {"Clip", "LeakyRelu"}


@pytest.mark.parametrize("name", ["paddle-hard-swish", "keras-hard-swish"])
def test_a_hard_swish_is_two_operators_and_runs_in_integers(name: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "simple.onnx"
    assert requant("transform", model, out, "--group", "simplify") == 0
    assert [node.op_type for node in load_model(out).graph] == ["Conv", "HardSigmoid", "Mul", "Conv"]
    feeds = [exports.feed(exports.EXPORTS[name].build(), seed) for seed in range(4)]
    options = Options(force_int8=True, place="rules", effort="low", seconds=0.1, kernels="stock")
    assert quantize_model(model, feeds, tmp_path / "int8.onnx", options).float_nodes == ()


@needs_library
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("sdpa-fixed", ["Attention"]),
        ("sdpa-free", ["Attention"]),
        ("multi-head", ["Attention"]),
        ("multi-head-shares", ["Attention"]),
        ("merged-heads", ["Attention"]),
        ("masked-fill", ["Attention"]),
        ("disentangled", ["Attention"]),
        ("learned-affine", ["Convolution", "Convolution"]),
    ],
)
def test_what_newer_exporters_write_is_native(name: str, calls: list[str], model: Path, tmp_path: Path) -> None:
    feeds = [exports.feed(exports.EXPORTS[name].build(), seed) for seed in range(4)]
    options = Options(force_int8=True, place="rules", effort="low", seconds=0.1, kernels="native")
    result = quantize_model(model, feeds, tmp_path / "int8.onnx", options)
    written = load_model(tmp_path / "int8.onnx").graph
    assert [node.op_type.partition("_")[0] for node in written if node.domain == NATIVE_DOMAIN] == calls
    assert not {"Gemm", "FusedGemm"} & {*result.kernels}
