"""The architectures of `sample_models` with random weights: valid in int8, mostly int8, and close to float."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from requant.quantize import Options, quantize_model

SAMPLES = Path(__file__).parents[1] / "sample_models"
LEAST_DB = 20.0
# For each architecture: the feeds, the lowest share of multiply-accumulates in integers, and the operators in float.
# First convolutions with 3 channels and 3x3 kernels, and products of two activations, are faster in float.
EXPECTED = {
    "if_branches": ("if_branches", 0.9),
    "loop_rnn": ("loop_rnn", 1.0),
    "lstm_tagger": ("lstm_tagger", 0.9),
    "squeezenet1_1": ("squeezenet1_1", 0.9),
    "mobilenet_v2": ("mobilenet_v2", 0.9),
    "mobilenet_v3_large": ("mobilenet_v3_large", 0.9),
    "efficientnet_b0": ("efficientnet_b0", 0.9),
    "resnet50": ("resnet50", 0.9),
    "yolo": ("yolo_320", 0.9),
    "yolo_nms": ("yolo_nms_320", 0.9),
    "unet": ("unet_64", 0.8),
    "llama": ("llama", 0.9),
    "vit_b_16": ("vit_b_16", 0.9),
    "bert_base": ("bert_base", 0.9),
    "cct_7": ("cct_7", 0.75),
}
# Scores before NonMaxSuppression: with random weights most are near 0. There the sigmoid turns an error of 0.3 in a
# logit (24 dB) into an error of 30 % in the score. Without NonMaxSuppression, scores and boxes are one output.
LEAST = {"yolo_nms": 10.0}
FAST = {"if_branches", "loop_rnn"}


def architectures() -> Any:
    """Import the program that builds the architectures."""
    sys.path.insert(0, str(SAMPLES))
    try:
        return importlib.import_module("architectures")
    finally:
        sys.path.remove(str(SAMPLES))


def test_every_architecture_is_expected_something() -> None:
    assert set(EXPECTED) == set(architectures().NAMES)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED]
)
def test_an_architecture_comes_out_int8_and_close_to_float(name: str, tmp_path: Path, int8_wins: None) -> None:
    feeds, share = EXPECTED[name]
    size = {} if feeds == name else {"size": int(feeds.rpartition("_")[2])}
    model, out = tmp_path / "float.onnx", tmp_path / "int8.onnx"
    onnx.save(architectures().build(name, **size), model)
    source = f"{SAMPLES / 'architectures.py'}:{feeds}_feeds"
    result = quantize_model(model, source, out, Options(place="rules", force_int8=True, samples=4))
    assert result.mac_share_int8 >= share, result.kernels
    assert result.accuracy.worst_sqnr_db >= LEAST.get(name, LEAST_DB), result.accuracy
    onnx.checker.check_model(out, full_check=True)
    feed = architectures().feeds(name, count=1, **size)[0]
    plain, fast = (run(out, feed, optimise=optimise) for optimise in (False, True))
    for before, after in zip(plain, fast, strict=True):
        assert before.shape == after.shape or name == "yolo_nms"  # the number of boxes depends on single scores
        if before.shape == after.shape:
            noise = np.square(before.astype(np.float64) - after).sum()
            assert 10 * math.log10(np.square(before.astype(np.float64)).sum() / max(noise, 1e-30)) >= LEAST_DB


def run(model: Path, feed: dict[str, np.ndarray], *, optimise: bool) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feed))
