"""The number of samples on which weights are corrected."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from requant.quantize import Options
from requant.quantize.corrections.rounding import ROWS
from requant.quantize.corrections.samples import FEWEST, correcting_samples, walked_layers
from requant.quantize.placement.runs import MOST_SAMPLES
from requant.quantize.runtime.progress import silent
from requant.quantize.steps.prepare import prepare


def wanted(folder: Path, side: int, batch: int) -> int:
    """Return the number of samples for a convolution of images of some side, with windows of 3x3."""
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        net (float[N, 8, {side}, {side}] x) => (float[N, 8, {side}, {side}] y) {{
            y = Conv <pads = [1, 1, 1, 1]> (x, w)
        }}""")
    random = np.random.default_rng(0)
    weights = random.standard_normal((8, 8, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(proto, folder / "m.onnx")
    feeds = [{"x": random.standard_normal((1, 8, side, side)).astype(np.float32)}] * 80
    job = prepare(folder / "m.onnx", feeds, Options(place="rules", batch=batch), folder, silent)
    return correcting_samples(job, walked_layers(job, job.all_int8_plan))


@pytest.mark.parametrize("batch", [1, 4])
def test_large_images_need_few(tmp_path: Path, batch: int) -> None:
    assert wanted(tmp_path, 64, batch=batch) == FEWEST
    assert wanted(tmp_path, 23, batch=batch) == math.ceil(ROWS / 23**2)
    assert wanted(tmp_path, 8, batch=batch) == MOST_SAMPLES
