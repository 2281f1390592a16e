"""The whole flow on small models: quantized in a moment, and run with and without the native operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from requant.quantize import Options, quantize_model

from .test_native import load


def quantized(model: Path, **options: Any) -> tuple[Any, onnx.ModelProto]:
    """Quantize a model with the data beside it, ``data.npz``; return the result and the INT8 model."""
    quick: dict[str, Any] = {"force_int8": True, "effort": "low", "seconds": 0.05, "place": "all", "force": True}
    output = model.with_name("q.onnx")
    result = quantize_model(model, str(model.with_name("data.npz")), output, Options(**quick | options))
    return result, onnx.load(output)


def native_operators(model: onnx.ModelProto) -> list[str]:
    """Return the native operators of a model, in order."""
    return [node.op_type for node in model.graph.node if node.domain == "ai.requant"]


def check_equal(model: Path, found: onnx.ModelProto) -> None:
    """Check that native operators compute exactly what their bodies compute."""
    feed = {"x": np.load(model.with_name("data.npz"))["x"]}
    sessions = (load(found), ort.InferenceSession(found.SerializeToString()))
    here, elsewhere = (each.run(None, feed)[0] for each in sessions)
    np.testing.assert_array_equal(here, elsewhere)


def check_alike(model: Path, found: onnx.ModelProto) -> None:
    """Check that native operators compute what their bodies compute, but for few values that differ by a step."""
    feed = {"x": np.load(model.with_name("data.npz"))["x"]}
    here = load(found).run(None, feed)[0]
    elsewhere = ort.InferenceSession(found.SerializeToString()).run(None, feed)[0]
    before = ort.InferenceSession(str(model)).run(None, feed)[0]
    noise = np.square(before - elsewhere).mean()
    assert np.square(here - elsewhere).mean() < noise / 10
    assert np.square(before - here).mean() < 2 * noise
