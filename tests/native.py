"""What tests of native operators have in common: the mark of those that need the library, sessions, rounding."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from requant.calibration.model.session import Array
from requant.quantize.kernels.attentions import wrap_attentions
from requant.quantize.kernels.library import kernels
from requant.quantize.kernels.nodes import OMITTED
from requant.transforms.graphs.inference import inferred
from requant.transforms.graphs.queries import plain_shape
from requant.transforms.int8.units import Compound, units
from requant.transforms.patterns.attention import find_attention

FOUND = kernels()
needs_library = pytest.mark.skipif(isinstance(FOUND, str) and not os.environ.get("CI"), reason=str(FOUND))
"""Skips a test where there is no library, and never in CI, which builds it."""
NOTHING = numpy_helper.from_array(np.zeros((), np.bool_), OMITTED)
"""What stands for omitted inputs of a native operator."""


def without_library(source: ir.Model | Path, *, optimize: bool = False) -> ort.InferenceSession:
    """Load a model without the library; where it is optimized, products of 8 bits are added exactly on every CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.add_session_config_entry("session.x64quantprecision", "1")
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    data = str(source) if isinstance(source, Path) else ir.to_proto(source).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def wrap_attention(model: ir.Model) -> None:
    """Put the only attention of a model into a call of a native operator, as a plan with it does."""
    found = find_attention(next(node for node in model.graph if node.op_type == "Softmax"))
    assert found is not None
    (unit,) = (each for each in units(model.graph, [Compound.attention(found)]) if each.op == "attention")
    shapes = {name: plain_shape(value) or () for name, value in inferred(model).items()}
    assert wrap_attentions(model, [unit], shapes, join=True) == 1


def by_row(x: Array) -> tuple[Array, Array]:
    """Return the last axis rounded to uint8 with the least range that has it and 0, minus the zero point; the steps."""
    least, most = x.min(-1, keepdims=True).clip(None, 0), x.max(-1, keepdims=True).clip(0)
    step = most / np.float32(255) - least / np.float32(255)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    zero = np.rint(-least * inverse)
    return np.clip(np.rint(x * inverse) + zero, 0, 255) - zero, step.astype(np.float64)
