"""Models that were quantized dynamically, or in their weights alone: with data they are quantized statically."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnxruntime.quantization import quantize_dynamic

from requant.cli import main
from requant.quantize import Options, Result, compare_models, quantize_model
from requant.quantize.options.declared import Strategy
from requant.quantize.options.selection import Selection
from requant.quantize.steps.calibrate import calibrate_model

SAMPLES = Path(__file__).parents[3] / "sample_models"
DATA = f"{SAMPLES / 'digits.npz'}:calib"
AT_RUN_TIME = {"ConvInteger", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger"}


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sample network, quantized dynamically by ONNX Runtime."""
    path = tmp_path_factory.mktemp("dynamic") / "dynamic.onnx"
    own = shutil.copy(SAMPLES / "digits.onnx", path.parent)  # the quantizer writes beside the model
    quantize_dynamic(own, path)
    return path


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sample network with its weights in int8, which a DequantizeLinear computes in each run."""
    path, model = tmp_path_factory.mktemp("stored") / "stored.onnx", onnx.load(SAMPLES / "digits.onnx")
    for tensor in [each for each in model.graph.initializer if len(each.dims) > 1 and each.data_type == 1]:
        weights = onnx.numpy_helper.to_array(tensor)
        scales = np.abs(weights).reshape(len(weights), -1).max(axis=1).astype(np.float32) / 127
        steps = scales.reshape(-1, *[1] * (weights.ndim - 1))
        integers = np.rint(weights / steps).astype(np.int8)
        model.graph.initializer.remove(tensor)
        model.graph.initializer.extend(
            onnx.numpy_helper.from_array(array, f"{tensor.name}/{what}")
            for what, array in (("int8", integers), ("scale", scales))
        )
        given = [f"{tensor.name}/int8", f"{tensor.name}/scale"]
        model.graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", given, [tensor.name], axis=0))
    onnx.save(model, path)
    return path


def quantized(dynamic: Path, output: Path, **options: Any) -> tuple[Result, Counter[str]]:
    """Quantize the network; return the result and the operators of the written model."""
    asked = replace(Options(place="rules", samples=16, force=True, seconds=0.01, effort="low"), **options)
    result = quantize_model(dynamic, DATA, output, asked)
    return result, Counter(node.op_type for node in onnx.load(output).graph.node)


@pytest.mark.usefixtures("int8_wins")
def test_a_dynamic_model_is_quantized_statically(dynamic: Path, tmp_path: Path) -> None:
    result, found = quantized(dynamic, tmp_path / "q.onnx")
    assert not AT_RUN_TIME & found.keys()
    assert result.int8_nodes > 0
    assert set(result.kernels) & {"QLinearConv", "MatMulIntegerToFloat"}
    assert result.accuracy.worst_sqnr_db > 25
    assert [note for note in result.notes if note.startswith("4 operators of the model compute their ranges")]
    assert result.given is not None
    beside = compare_models(dynamic, tmp_path / "q.onnx", DATA).accuracy
    assert result.given.output.worst_sqnr_db == pytest.approx(beside.worst_sqnr_db, abs=3)  # of 64 samples, not 16
    assert result.given.output.worst_sqnr_db < result.accuracy.worst_sqnr_db  # both have an error of their own
    assert "against the given model" in result.verdict


@pytest.mark.usefixtures("int8_wins")
def test_a_model_with_weights_in_integers_is_quantized_statically(stored: Path, tmp_path: Path) -> None:
    """Its outputs are those of the float weights: there is nothing to tell apart."""
    result, found = quantized(stored, tmp_path / "q.onnx")
    assert result.int8_nodes > 0
    assert set(result.kernels) & {"QLinearConv", "MatMulIntegerToFloat"}
    assert result.accuracy.worst_sqnr_db > 25
    assert [note for note in result.notes if note.startswith("4 weights of the model are stored in integers")]
    assert result.given is None
    assert found["QuantizeLinear"]


def test_weights_in_integers_stay_where_only_weights_are_asked_for(stored: Path, tmp_path: Path) -> None:
    result, _ = quantized(stored, tmp_path / "q.onnx", selection=Selection(strategy=Strategy.WEIGHT))
    assert not any("are stored in integers" in note for note in result.notes)
    types = Counter(each.data_type for each in onnx.load(tmp_path / "q.onnx").graph.initializer if len(each.dims) > 1)
    assert types[onnx.TensorProto.INT8] >= 3  # folding one grows the file by less than a tenth


@pytest.mark.parametrize(
    "strategy", [pytest.param(each, marks=pytest.mark.slow) for each in (Strategy.DYNAMIC, Strategy.WEIGHT)]
)
def test_other_strategies_leave_it_as_it_is(strategy: Strategy, dynamic: Path, tmp_path: Path) -> None:
    result, found = quantized(dynamic, tmp_path / "q.onnx", selection=Selection(strategy=strategy))
    assert found["MatMulInteger"] == found["ConvInteger"] == 2
    assert "nothing more in this model can become int8" in result.why_not


@pytest.mark.usefixtures("int8_wins")
@pytest.mark.parametrize(
    ("selection", "left"),
    [
        (Selection(exclude_nodes=frozenset({"fc1_MatMul_quant"})), {"MatMulInteger": 1}),
        pytest.param(Selection(exclude_ops=frozenset({"ConvInteger"})), {"ConvInteger": 2}, marks=pytest.mark.slow),
        pytest.param(Selection(include_ops=frozenset({"ConvInteger"})), {"MatMulInteger": 2}, marks=pytest.mark.slow),
    ],
    ids=["node", "operator", "included"],
)
def test_an_excluded_operator_stays_dynamic(
    selection: Selection, left: dict[str, int], dynamic: Path, tmp_path: Path
) -> None:
    _, found = quantized(dynamic, tmp_path / "q.onnx", selection=selection)
    assert {op: count for op, count in found.items() if op in {"MatMulInteger", "ConvInteger"}} == left


@pytest.mark.slow
def test_it_stays_dynamic_where_neither_int8_nor_float_is_faster(
    dynamic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_latency: Callable[..., None]
) -> None:
    set_latency(monkeypatch, float_ms=1.0, int8_ms=1.0)
    result, found = quantized(dynamic, tmp_path / "q.onnx")
    assert found["MatMulInteger"] == found["ConvInteger"] == 2
    assert result.why_not.startswith("int8 gains too little here: 1.00x the speed of the given model")
    assert result.why_not.endswith("the output is the simplified model")
    assert not any("get float weights" in note for note in result.notes)
    assert any(
        "outputs are compared with the outputs of the same model with float weights" in note for note in result.notes
    )
    assert not any(row.reason == "no ranges without data" for row in result.float_nodes)
    assert 20 < result.accuracy.worst_sqnr_db < 100  # against the float weights


@pytest.mark.slow
def test_it_becomes_float_where_its_ranges_ruin_the_outputs(
    dynamic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_latency: Callable[..., None]
) -> None:
    set_latency(monkeypatch, float_ms=1.0, int8_ms=1.0)
    monkeypatch.setattr("requant.quantize.steps.deliver.LEAST_GIVEN_DB", 200.0)
    result, found = quantized(dynamic, tmp_path / "q.onnx")
    assert not AT_RUN_TIME & found.keys()
    assert result.int8_nodes == 0
    assert "; the given model leaves only " in result.why_not


@pytest.mark.slow
def test_a_report_of_it_is_written(
    dynamic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_latency: Callable[..., None]
) -> None:
    set_latency(monkeypatch, float_ms=1.0, int8_ms=1.0)
    arguments = [dynamic, "--data", DATA, "-o", tmp_path / "q.onnx", "--place", "rules", "--samples", 16]
    done = CliRunner().invoke(main, ["quantize", *map(str, arguments), "--report", str(tmp_path / "run.html")])
    assert done.exit_code == 1, done.output
    assert (tmp_path / "run.html").stat().st_size > 0


@pytest.mark.usefixtures("int8_wins")
def test_a_model_that_requant_made_dynamic_stays_so(tmp_path: Path) -> None:
    by_hand = Options(selection=Selection(strategy=Strategy.DYNAMIC), place="rules", seconds=0.01)
    quantize_model(SAMPLES / "digits.onnx", None, tmp_path / "own.onnx", by_hand)
    before = Counter(node.op_type for node in onnx.load(tmp_path / "own.onnx").graph.node)
    assert before["DynamicQuantizeMatMul"] == 2
    _, after = quantized(tmp_path / "own.onnx", tmp_path / "q.onnx")
    assert after["DynamicQuantizeMatMul"] == 2


@pytest.mark.usefixtures("int8_wins")
def test_ranges_of_a_calibration_fit(dynamic: Path, tmp_path: Path) -> None:
    ranges = calibrate_model(dynamic, DATA, Options(samples=16)).file
    result = quantize_model(
        dynamic, None, tmp_path / "q.onnx", Options(ranges=ranges, place="rules", seconds=0.01, effort="low")
    )
    assert result.int8_nodes > 0
    assert not AT_RUN_TIME & {node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node}


@pytest.mark.usefixtures("int8_wins")
def test_the_nodes_may_be_in_any_order(dynamic: Path, tmp_path: Path) -> None:
    """ONNX Runtime's quantizer writes bodies of control flow whose nodes are not sorted, and its sessions run them."""
    model = onnx.load(dynamic)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    onnx.save(model, tmp_path / "turned.onnx")
    ranges = calibrate_model(tmp_path / "turned.onnx", DATA, Options(samples=16)).file
    options = Options(ranges=ranges, place="rules", seconds=0.01, effort="low")
    result = quantize_model(tmp_path / "turned.onnx", None, tmp_path / "q.onnx", options)
    assert result.int8_nodes > 0
    onnx.checker.check_model(tmp_path / "q.onnx", full_check=True)


def test_a_comparison_says_that_its_reference_is_rounded_in_every_run(dynamic: Path) -> None:
    """Its own error counts against the other model there; `quantize_model` compares with float weights."""
    own, data = SAMPLES / "digits.onnx", np.load(SAMPLES / "digits.npz")
    some = [{"image": image[None]} for image in data["image"][:16].astype(np.float32)]
    notes = compare_models(dynamic, own, some).notes
    assert [note.partition(" and rounds")[0] for note in notes] == [
        "the first model computes ranges at run time in 4 of its operators"
    ]
    assert not compare_models(own, dynamic, some).notes
