"""`quantize_fastest`: what it needs until all runtimes are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from requant.quantize import Options, quantize_fastest
from requant.quantize.model import files

SAMPLES = Path(__file__).parents[3] / "sample_models"


@pytest.mark.slow
def test_weights_that_moved_to_a_file_are_there_until_all_models_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A denormal weight makes another float model, whose weights are in a file because they are large."""
    model = onnx.load(SAMPLES / "digits.onnx")
    weight = max(model.graph.initializer, key=lambda each: len(each.raw_data))
    values = numpy_helper.to_array(weight).copy()
    values.flat[0] = np.float32(1e-40)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, tmp_path / "m.onnx")
    monkeypatch.setattr(files, "INSIDE", 0)
    options = Options(runtime="auto", effort="low", samples=32, seconds=0.1, batch=16)
    found = quantize_fastest(tmp_path / "m.onnx", f"{SAMPLES / 'digits.npz'}:calib", tmp_path / "q.onnx", options)
    assert any("denormal" in note for note in found.notes)
    assert str(found.runtime) in found.runtimes
