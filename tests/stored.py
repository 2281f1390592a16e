"""Constants of models: written into a network of a test, and read from a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import numpy_helper

from requant.transforms.graphs.rewriter import add_initializer


def store(model: ir.Model, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """Give a model the arrays that its nodes read by name."""
    for node in model.graph:
        for index, value in enumerate(node.inputs):
            name = None if value is None else value.name
            if name is None or name not in arrays:
                continue
            if name not in model.graph.initializers:
                add_initializer(model.graph, name, arrays[name])
            node.replace_input_with(index, model.graph.initializers[name])


def constants_of(path: Path) -> dict[str, bytes]:
    """Return the bytes of the initializers of a file by name."""
    return {each.name: numpy_helper.to_array(each).tobytes() for each in onnx.load(path).graph.initializer}
