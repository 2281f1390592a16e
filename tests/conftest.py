"""What all tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Feeds = Sequence[Mapping[str, NDArray[Any]]]
Range = tuple[float, float]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected output in tests/cases/*.txt")


@pytest.fixture(scope="session")
def rounding_noise() -> Callable[[onnx.ModelProto, Feeds], dict[str, float]]:
    """Return a function that tells what eight bits cost: see `_rounding_noise`."""
    return _rounding_noise


DRAWS = 4  # of noise for each feed
PARAMETERS = {"Clip", "Dropout", "Pad", "Resize"}  # their further inputs are no signals


def _rounding_noise(model: onnx.ModelProto, feeds: Feeds) -> dict[str, float]:
    """Return the squared error of each float output, summed over `feeds`, when every float tensor is rounded.

    The model runs in float with uniform noise of one step on every tensor; what is never negative stays so, as an
    unsigned integer would. A step is the range over the feeds, zero included, in 255 parts; of a constant it is the
    greatest magnitude in 63 parts, which is what is left of 127 where products are added in 16 bits.
    """
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    seen = [{**feed, **values} for feed, values in zip(feeds, _values(model, feeds), strict=True)]
    scalars = {name for node in model.graph.node for name in node.output if not np.ndim(seen[0].get(name, 0))}
    skipped = {name for node in model.graph.node if node.op_type in PARAMETERS for name in node.input[1:]} | scalars
    ranges = {n: _range([values[n] for values in seen]) for n in seen[0] if n not in skipped and _is_float(seen[0][n])}
    magnitudes = {n: float(np.abs(w).max()) for n, w in weights.items() if n not in skipped and _is_float(w) and w.ndim}
    steps = {n: (high - low) / 255 for n, (low, high) in ranges.items()} | {n: m / 63 for n, m in magnitudes.items()}
    names = [output.name for output in model.graph.output if output.name in steps]
    session = _session(_noisy(model, steps, ranges), [f"{name}//rounded" for name in names])
    random, errors = np.random.default_rng(0), dict.fromkeys(names, 0.0)
    for feed, exact in [*zip(feeds, seen, strict=True)] * DRAWS:
        arrays = {**exact, **weights}
        noise = {f"{n}//noise": step * (random.random(arrays[n].shape) - 0.5) for n, step in steps.items()}
        given = {name: np.asarray(array, np.float32) for name, array in noise.items()}
        for name, value in zip(names, session.run(None, {**feed, **given}), strict=True):
            errors[name] += float(np.sum((value.astype(np.float64) - exact[name]) ** 2)) / DRAWS
    return errors


def _noisy(model: onnx.ModelProto, steps: Mapping[str, float], ranges: Mapping[str, Range]) -> onnx.ModelProto:
    """Return `model` with a further input ``t//noise`` for each tensor t of `steps`: all readers read t//rounded."""
    shapes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    for name in steps:
        shape = shapes.get(name)
        made.graph.input.append(helper.make_tensor_value_info(f"{name}//noise", TensorProto.FLOAT, shape))
        low, high = ranges.get(name, (-1.0, 1.0))
        for end, bound in (("low", -np.inf if low else 0.0), ("high", np.inf if high else 0.0)):
            made.graph.initializer.append(numpy_helper.from_array(np.asarray(bound, np.float32), f"{name}//{end}"))

    def rounded(names: Iterable[str]) -> None:
        for name in names:
            if name in steps:
                noisy = helper.make_node("Add", [name, f"{name}//noise"], [f"{name}//noisy"])
                bounds = [f"{name}//low", f"{name}//high"]
                clipped = helper.make_node("Clip", [f"{name}//noisy", *bounds], [f"{name}//rounded"])
                made.graph.node.extend([noisy, clipped])

    rounded(dict.fromkeys(value.name for value in (*model.graph.input, *model.graph.initializer)))
    for node in model.graph.node:
        copy = made.graph.node.add()
        copy.CopyFrom(node)
        copy.input[:] = [f"{name}//rounded" if name in steps else name for name in node.input]
        rounded(node.output)
    return made


def _values(model: onnx.ModelProto, feeds: Feeds) -> list[dict[str, NDArray[Any]]]:
    """Return what the nodes of a model give on each feed, by name."""
    names = [name for node in model.graph.node for name in node.output if name]
    session = _session(model, names)
    return [dict(zip(names, session.run(None, dict(feed)), strict=True)) for feed in feeds]


def _session(model: onnx.ModelProto, outputs: Sequence[str]) -> ort.InferenceSession:
    """Load a model with other outputs, and run it as it is written."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _is_float(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float32


def _range(arrays: Sequence[NDArray[Any]]) -> Range:
    """Return the least and the greatest finite value, zero included."""
    values = np.concatenate([array[np.isfinite(array)].ravel() for array in arrays])
    return min(0.0, float(values.min(initial=0.0))), max(0.0, float(values.max(initial=0.0)))
