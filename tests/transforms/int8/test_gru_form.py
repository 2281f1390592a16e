"""A GRU as integer products computes what the runtime's GRU computes, up to the noise of 8 bits."""

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant.calibration.model.session import Array
from requant.transforms.graphs.queries import MS
from requant.transforms.int8.gru_form import to_scan
from requant.transforms.int8.qparams import Scheme
from requant.transforms.int8.units import units
from requant.transforms.int8.weights import WeightWriter
from requant.transforms.int8.writer import Writer

STEPS, ITEMS, WIDTH, SIZE = 9, 4, 12, 16
LEAST_DB = 28.0
"""8 bits leave 30 to 40 dB here; a wrong recurrence leaves less than 20 dB."""


def feed_of(directions: int, given: str) -> dict[str, Array]:
    """Return the input and what else is given: the lengths contain 0, 1 and all steps."""
    rng = np.random.default_rng(7)
    feed: dict[str, Array] = {"x": rng.standard_normal((STEPS, ITEMS, WIDTH)).astype(np.float32)}
    if "n" in given:
        feed["n"] = np.array([STEPS, 0, 4, 1], np.int32)
    if "h" in given:
        feed["h0"] = rng.uniform(-1, 1, (directions, ITEMS, SIZE)).astype(np.float32)
    return feed


def gru(way: str, reset: int, given: str, *, free: bool) -> tuple[ir.Model, int]:
    """Return a GRU and its number of directions; with `free`, steps and items have names instead of lengths."""
    directions = 2 if way == "bidirectional" else 1
    rng = np.random.default_rng(5)
    shapes = {"w": (directions, 3 * SIZE, WIDTH), "r": (directions, 3 * SIZE, SIZE), "b": (directions, 6 * SIZE)}
    inputs = ", ".join(("b" in given) * "b" if name == "b" else name for name in ("x", "w", "r", "b"))
    inputs += f", {'n' * ('n' in given)}, {'h0' * ('h' in given)}"
    steps, items = ("S", "N") if free else (STEPS, ITEMS)
    ports = f"float[{steps},{items},{WIDTH}] x"
    ports += f", int32[{items}] n" * ("n" in given) + f", float[{directions},{items},{SIZE}] h0" * ("h" in given)
    text = f"""<ir_version: 8, opset_import: ["" : 17, "{MS}" : 1]>
    g ({ports}) => (float[{steps},{directions},{items},{SIZE}] y, float[{directions},{items},{SIZE}] h) {{
        [gru] y, h = GRU <hidden_size = {SIZE}, direction = "{way}", linear_before_reset = {reset}> ({inputs})
    }}"""
    proto = onnx.parser.parse_model(text)
    for name, shape in shapes.items():
        if name != "b" or "b" in given:
            array = rng.standard_normal(shape) / (1 if name == "b" else np.sqrt(shape[-1]))
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return ir.from_proto(proto), directions


def outputs(model: ir.Model, feed: dict[str, Array]) -> list[npt.NDArray[np.float32]]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(each) for each in session.run(None, feed)]


def rewrite(model: ir.Model) -> int:
    """Write the integer form in place; 7 bits, so that no pair of products saturates on any CPU."""
    (unit,) = units(model.graph)
    (node,) = model.graph
    writer = WeightWriter(Writer.of(model, Scheme()), Scheme().weight_params, exact=False)
    return to_scan(node, unit, writer)


@pytest.mark.parametrize("given", ["", "b", "bn", "bh", "bnh"], ids=["alone", "bias", "lengths", "state", "all"])
@pytest.mark.parametrize("reset", [0, 1], ids=["reset-first", "reset-last"])
@pytest.mark.parametrize("way", ["forward", "reverse", "bidirectional"])
def test_outputs_are_those_of_the_float_operator(way: str, reset: int, given: str) -> None:
    model, directions = gru(way, reset, given, free=False)
    feed = feed_of(directions, given)
    expected = outputs(model, feed)
    assert rewrite(model) == 1 + directions * (1 if reset else 2)
    found = outputs(model, feed)
    for before, after in zip(expected, found, strict=True):
        assert before.shape == after.shape
        noise = np.sum((after - before) ** 2, dtype=np.float64)
        assert 10 * np.log10(np.sum(before**2, dtype=np.float64) / noise) > LEAST_DB
    if "n" in given:
        ended = np.arange(STEPS)[:, None] >= feed["n"]
        assert not np.moveaxis(found[0], 2, 1)[ended].any()


@pytest.mark.parametrize("given", ["b", "bnh"])
@pytest.mark.parametrize("way", ["forward", "bidirectional"])
def test_steps_and_items_may_be_free(way: str, given: str) -> None:
    model, directions = gru(way, 1, given, free=True)
    fixed, _ = gru(way, 1, given, free=False)
    for each in (model, fixed):
        rewrite(each)
    feed = feed_of(directions, given)
    for one, other in zip(outputs(model, feed), outputs(fixed, feed), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kept", ["y", "h"])
def test_one_output_may_be_missing(kept: str) -> None:
    model, directions = gru("bidirectional", 1, "b", free=False)
    feed = feed_of(directions, "b")
    expected = dict(zip("yh", outputs(model, feed), strict=True))
    (node,) = model.graph
    node.outputs[1 if kept == "y" else 0].name = ""
    model.graph.outputs[:] = [value for value in model.graph.outputs if value.name]
    rewrite(model)
    (found,) = outputs(model, feed)
    assert found.shape == expected[kept].shape
    assert np.abs(found - expected[kept]).max() < 0.1
