"""A model with two products, for tests of how products are placed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper


def write_two_products(path: Path, rows: int) -> None:
    """Write y = Relu(x v + b) w, with x (rows, 256), v (256, 512) and random weights."""
    random = np.random.default_rng(0)
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[{rows},256] x) => (float[{rows},256] y) {{ [up] a = MatMul(x, v) [bias] c = Add(a, b) [relu] r = Relu(c)
        [down] y = MatMul(r, w) }}"""
    proto = onnx.parser.parse_model(text)
    for name, shape in (("v", (256, 512)), ("b", (512,)), ("w", (512, 256))):
        proto.graph.initializer.append(numpy_helper.from_array(random.normal(0, 0.1, shape).astype(np.float32), name))
    onnx.save(proto, path)
