"""A model that requant wrote is a fixed point of `simplify` and of `quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner, Result

from requant.cli import main
from requant.quantize import Options, Selection, Strategy, quantize_model
from requant.quantize.kernels.library import Kernels, kernels

SAMPLES = Path(__file__).parent.parent / "sample_models"
DATA = f"{SAMPLES / 'digits.npz'}:calib"
FORMS: dict[str, dict[str, Any]] = {
    "qdq": {},
    "qoperator": {"format": "qoperator"},
    "native": {"kernels": "native"},
    "portable": {"portable": True},
    "dynamic": {"selection": Selection(strategy=Strategy.DYNAMIC)},
    "weights": {"selection": Selection(strategy=Strategy.WEIGHT)},
}
"""The options that make each kind of INT8 model."""

MODELS = ("digits", "digits_mobile", "digits_transformer")
SLOW = {
    *(("digits_transformer", form) for form in ("qdq", "qoperator", "native", "portable", "dynamic", "weights")),
    *(("digits_mobile", form) for form in ("qdq", "qoperator", "native", "portable")),
    *(("digits", form) for form in ("qoperator", "portable", "dynamic")),
}
PAIRS = [
    pytest.param(model, form, marks=[pytest.mark.slow] if (model, form) in SLOW else [])
    for model in MODELS
    for form in FORMS
    if (model, form) != ("digits_mobile", "weights")
]
"""Models and forms; the weights of `digits_mobile` are too small for int8 in the file alone."""


def requant(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["-q", *map(str, arguments)], prog_name="requant")


def content(path: Path) -> bytes:
    written: bytes = onnx.load(path).SerializeToString(deterministic=True)
    return written


@pytest.mark.parametrize(("model", "form"), PAIRS)
def test_a_written_model_stays_as_it_is(model: str, form: str, tmp_path: Path) -> None:
    if form == "native" and not isinstance(kernels(), Kernels):
        pytest.skip("no native operators here")
    data = None if form in ("dynamic", "weights") else DATA
    int8, simple, again = (tmp_path / f"{name}.onnx" for name in ("int8", "simple", "again"))
    few = {"samples": 4} if data else {}
    quick: dict[str, Any] = {"effort": "low", "seconds": 0.05, **few, **FORMS[form]}
    options = Options(force_int8=True, place="rules", **quick)
    assert quantize_model(SAMPLES / f"{model}.onnx", data, int8, options).int8_nodes > 0

    assert requant("transform", int8, simple, "--group", "simplify").exit_code == 0
    assert content(simple) == content(int8)

    result = quantize_model(int8, data, again, Options(**quick))
    assert not result.why_not
    assert result.notes[0].startswith("nothing left to quantize")
    assert not any("but the runtime ran" in note for note in result.notes)
    assert content(again) == content(int8)


def test_quantize_again_succeeds_and_says_why_nothing_changed(tmp_path: Path) -> None:
    int8, again = tmp_path / "int8.onnx", tmp_path / "again.onnx"
    options = Options(force_int8=True, place="rules", effort="low", seconds=0.05, samples=4)
    quantize_model(SAMPLES / "digits.onnx", DATA, int8, options)
    result = CliRunner().invoke(main, ["quantize", str(int8), "--data", DATA, "--samples", "4", "-o", str(again)])
    assert result.exit_code == 0
    assert "nothing left to quantize: requant wrote this model" in " ".join(result.output.split())


@pytest.mark.slow
def test_a_model_of_another_tool_is_simplified(tmp_path: Path) -> None:
    """Its metadata do not name requant, and nothing says that it has the forms that run fastest."""
    int8, other, simple = (tmp_path / f"{name}.onnx" for name in ("int8", "other", "simple"))
    options = Options(force_int8=True, place="rules", effort="low", seconds=0.05, samples=4, portable=True)
    quantize_model(SAMPLES / "digits_mobile.onnx", DATA, int8, options)
    model = onnx.load(int8)
    del model.metadata_props[:]
    onnx.save(model, other)
    assert requant("transform", other, simple, "--group", "simplify").exit_code == 0
    kinds = {node.op_type for node in onnx.load(simple).graph.node}
    assert "HardSigmoid" in kinds
    assert "HardSwish" not in kinds
