"""The parts of a Concat get similar ranges; the float model computes the same, and INT8 gains."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from requant.calibration.model.session import Array, open_session
from requant.quantize import Options, compare_models, quantize_model
from requant.quantize.corrections.channel_noise import Channels, reader_of
from requant.quantize.corrections.concat_scales import LEAST_GAIN, choose, scale_joined_parts
from requant.quantize.model.files import serialize
from requant.quantize.runtime.progress import silent
from requant.quantize.steps.emit import scale_channels
from requant.quantize.steps.prepare import prepare
from requant.transforms.parts.concat_scales import JoinedParts, find_joined

from ...stored import constants_of

INT8 = onnx.TensorProto.INT8
TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 4, 32, 32] x) => (float[1, 8, 32, 32] y) {
    [down] d = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w, b)
    [act] r = Relu (d)
    [up] u = ConvTranspose <strides = [2, 2], kernel_shape = [2, 2]> (r, t)
    [skip] j = Concat <axis = 1> (u, x)
    [last] y = Conv <pads = [1, 1, 1, 1]> (j, v, c)
}"""


def written(folder: Path, spread: float) -> Path:
    """Write a U-Net whose features have `spread` times the range of the image; both count alike behind the Concat."""
    random, proto = np.random.default_rng(0), onnx.parser.parse_model(TEXT)
    last = random.standard_normal((8, 12, 3, 3)) / 8
    last[:, :8] /= spread
    arrays: dict[str, Array] = {
        "w": random.standard_normal((8, 4, 3, 3)),
        "b": random.standard_normal(8),
        "t": random.standard_normal((8, 8, 2, 2)) * spread / 8,
        "v": last,
        "c": random.standard_normal(8),
    }
    for name, array in arrays.items():
        proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


def feeds(count: int = 8) -> list[dict[str, Array]]:
    random = np.random.default_rng(1)
    return [{"x": random.uniform(0, 1, (1, 4, 32, 32)).astype(np.float32)} for _ in range(count)]


def quantized(model: Path, name: str, **options: Any) -> Path:
    output = model.parent / f"{name}.onnx"
    quick = {"place": "all", "effort": "low", "seconds": 0.01, "force_int8": True, "isa": "vnni"}
    quantize_model(model, feeds(), output, Options(**{**quick, **options}))
    return output


def sqnr(model: Path, made: Path) -> float:
    return compare_models(model, made, feeds()).accuracy.worst_sqnr_db


@pytest.mark.parametrize("spread", [8, 16])
def test_int8_gains_by_default(tmp_path: Path, spread: float) -> None:
    model = written(tmp_path, spread)
    plain = quantized(model, "plain", corrections=("means",))
    assert sqnr(model, quantized(model, "scaled")) > sqnr(model, plain) + 10


def test_a_concat_of_very_different_ranges_is_in_integers(tmp_path: Path) -> None:
    model = written(tmp_path, 40)
    assert not in_integers(quantized(model, "plain", corrections=("means",)))
    made = quantized(model, "scaled")
    assert in_integers(made)
    assert sqnr(model, made) > 35


def in_integers(model: Path) -> bool:
    """Return whether the weights behind the Concat are integers."""
    stored = {each.name.partition("/")[0] for each in onnx.load(model).graph.initializer if each.data_type == INT8}
    return "v" in stored


def test_like_ranges_stay(tmp_path: Path) -> None:
    model = written(tmp_path, 1)
    job = prepare(model, feeds(), Options(effort="low"), tmp_path, silent)
    assert scale_joined_parts(job) is job
    unequal = prepare(written(tmp_path, 16), feeds(), Options(effort="low"), tmp_path, silent)
    assert scale_joined_parts(replace(unequal, judged=False)).simple is unequal.simple


def test_the_float_model_computes_the_same(tmp_path: Path) -> None:
    job = prepare(written(tmp_path, 16), feeds(), Options(effort="low"), tmp_path, silent)
    scaled = scale_channels(job)
    assert scaled.unscaled is job
    assert scaled.scaled == {"parts"}
    assert any("1 Concat scaled to similar ranges" in note for note in scaled.notes)
    before, after = (open_session(serialize(each.simple)).run(None, feeds(1)[0])[0] for each in (job, scaled))
    np.testing.assert_allclose(before, after, rtol=0, atol=1e-5)
    added = {unit.name for unit in scaled.all_int8_plan.units} - {unit.name for unit in job.all_int8_plan.units}
    assert added == {"skip/part1"}  # the factors of the other part are in the weights of the ConvTranspose


def test_a_plan_gives_the_same_model_again(tmp_path: Path) -> None:
    model = written(tmp_path, 16)
    first = quantized(model, "first")
    second = quantized(model, "second", place="rules", plan=tmp_path / "first.plan.json")
    assert constants_of(first) == constants_of(second)


def test_where_all_stays_float_the_model_has_no_factors(tmp_path: Path) -> None:
    model = written(tmp_path, 16)
    quantized(model, "first")
    plan = tmp_path / "first.plan.json"
    plan.write_text(re.sub(r'"implementation": "[^"]*"', '"implementation": "float"', plan.read_text()))
    run = quantize_model(model, feeds(), tmp_path / "float.onnx", Options(effort="low", plan=plan, seconds=0.01))
    assert run.why_not
    assert "skip/part1" not in {node.name for node in run.float_nodes}
    assert "Mul" not in {node.op_type for node in onnx.load(tmp_path / "float.onnx").graph.node}


def _directly() -> JoinedParts:
    """Return the Concat of a model without data."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 2, 4, 4] x, float[1, 1, 4, 4] z) => (float[1, 2, 4, 4] y)
        <float[2, 3, 1, 1] w = {1, 2, 3, 4, 5, 6}> { j = Concat <axis = 1> (x, z) [c] y = Conv (j, w) }"""
    return find_joined(ir.from_onnx_text(text))[0]


FOUND = _directly()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1e3), min_size=3, max_size=3),
    st.lists(st.floats(0, 1e3), min_size=3, max_size=3),
)
def test_factors_are_powers_of_two_and_remove_noise(lows: list[float], highs: list[float]) -> None:
    lo, hi = -np.asarray(lows), np.asarray(highs)
    seen = {"j": Channels(lo, hi, (lo + hi) / 2, np.square(hi - lo) / 3)}
    factors = choose(FOUND, seen, {"c"})
    assert choose(FOUND, seen, set()) is None
    assert choose(FOUND, {}, {"c"}) is None
    if factors is None:
        return
    assert factors.shape == (3,)
    assert factors.min() == 1
    assert (np.log2(factors) % 1 == 0).all()
    reader = reader_of(FOUND.readers.folds[0])
    assert reader is not None
    before, after = (reader.noise(seen["j"], scale) for scale in (np.ones(3), 1 / factors))
    assert after <= before * (1 - LEAST_GAIN)
