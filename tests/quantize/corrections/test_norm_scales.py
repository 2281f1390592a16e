"""Channels in front of instance norms fill their range; float outputs stay within a bound, and INT8 gains."""

from __future__ import annotations

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
from requant.quantize.corrections.norm_scales import (
    GREATEST_CHANGE,
    GREATEST_FACTOR,
    ChannelStatistics,
    choose,
    scale_before_norms,
)
from requant.quantize.model.files import serialize
from requant.quantize.runtime.progress import silent
from requant.quantize.steps import deliver
from requant.quantize.steps.prepare import prepare
from requant.quantize.steps.remake import Recipe, remake
from requant.quantize.steps.worth import WhyNot
from requant.transforms.parts.norm_scales import NormedChannels, find_normed

from ...stored import constants_of

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 8, 16, 16] x) => (float[1, 8, 16, 16] y) {
    [first] t = Conv <pads = [1, 1, 1, 1]> (x, w, b)
    [norm] n = InstanceNormalization (t, g, h)
    r = Relu (n)
    [second] y = Conv <pads = [1, 1, 1, 1]> (r, v, c)
}"""


def written(folder: Path, spread: float, offset: float = 1.0) -> Path:
    """Write the model, with channels of the first convolution that differ by a factor."""
    random, proto = np.random.default_rng(0), onnx.parser.parse_model(TEXT)
    scale = np.geomspace(1, 1 / spread, 8)
    arrays: dict[str, Array] = {
        "w": random.standard_normal((8, 8, 3, 3)) / 8 * scale.reshape(-1, 1, 1, 1),
        "b": offset * random.standard_normal(8),
        "g": random.uniform(0.5, 2, 8),
        "h": random.standard_normal(8),
        "v": random.standard_normal((8, 8, 3, 3)) / 8,
        "c": random.standard_normal(8),
    }
    for name, array in arrays.items():
        proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


def feeds(count: int = 8) -> list[dict[str, Array]]:
    random = np.random.default_rng(1)
    return [{"x": random.standard_normal((1, 8, 16, 16)).astype(np.float32)} for _ in range(count)]


def quantized(model: Path, name: str, **options: Any) -> Path:
    output = model.parent / f"{name}.onnx"
    quick = {"place": "all", "effort": "low", "seconds": 0.01, "force_int8": True, "isa": "vnni"}
    quantize_model(model, feeds(), output, Options(**{**quick, **options}))
    return output


def sqnr(model: Path, made: Path) -> float:
    return compare_models(model, made, feeds()).accuracy.worst_sqnr_db


def test_int8_gains_by_default(tmp_path: Path) -> None:
    model = written(tmp_path, 30)
    plain = quantized(model, "plain", corrections=("means",))
    assert sqnr(model, quantized(model, "scaled")) > sqnr(model, plain) + 6


def test_a_plan_gives_the_same_model_again(tmp_path: Path) -> None:
    model = written(tmp_path, 30)
    first = quantized(model, "first")
    second = quantized(model, "second", place="rules", plan=tmp_path / "first.plan.json")
    assert constants_of(first) == constants_of(second)


def test_the_job_before_is_kept(tmp_path: Path) -> None:
    model = written(tmp_path, 30)
    job = prepare(model, feeds(), Options(effort="low"), tmp_path, silent)
    scaled = scale_before_norms(job)
    assert scaled.unscaled is job
    assert scaled.scaled == {"norms"}
    assert any("scaled in front of norms" in note for note in scaled.notes)


def test_float_is_written_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliver, "why_not", lambda job, trial: WhyNot(nothing="a test asks for float"))
    monkeypatch.setattr(deliver, "_given_if_faster", lambda *arguments: None)
    model = written(tmp_path, 30)
    made = quantized(model, "float", force_int8=False)
    names = {each.name: numpy_helper.to_array(each) for each in onnx.load(made).graph.initializer}
    for each in onnx.load(model).graph.initializer:
        np.testing.assert_array_equal(names[each.name], numpy_helper.to_array(each))


def test_reproduce_makes_the_same_model(tmp_path: Path) -> None:
    model, options = written(tmp_path, 30), Options(place="all", effort="low", force_int8=True)
    made = quantized(model, "made")
    recipe = Recipe(tmp_path / "made.plan.json", "int8", exact=True)
    again = ir.to_proto(remake(model, feeds(), options, recipe, tmp_path, silent))
    constants = [
        {each.name: numpy_helper.to_array(each).tobytes() for each in proto.graph.initializer}
        for proto in (onnx.load(made), again)
    ]
    assert constants[0] == constants[1]


def test_the_outputs_in_float_stay(tmp_path: Path) -> None:
    """The narrowest channels have a variance of a hundred times epsilon."""
    model = written(tmp_path, 30)
    job = prepare(model, feeds(), Options(effort="low"), tmp_path, silent)
    made = scale_before_norms(job).simple
    before, after = (open_session(source).run(None, feeds(1)[0])[0] for source in (model, serialize(made)))
    error = np.square(before - after).sum() / np.square(before).sum()
    assert error < GREATEST_CHANGE**2
    (seen,) = find_normed(made)
    assert seen.epsilon == pytest.approx(1e-5)


def test_equal_channels_are_left_alone(tmp_path: Path) -> None:
    model = written(tmp_path, 1, offset=0.0)
    job = prepare(model, feeds(), Options(effort="low"), tmp_path, silent)
    (found,) = find_normed(job.simple)
    ones = np.ones(8)
    assert choose(found, ChannelStatistics(-ones, ones, ones, ones, ones)) is None
    assert scale_before_norms(replace(job, judged=False)).simple is job.simple


def test_a_dead_channel_stays(tmp_path: Path) -> None:
    found = one(tmp_path)
    narrow = np.array([0.0, *np.full(6, 0.1), 1.0])
    scales = choose(found, ChannelStatistics(-narrow, narrow, narrow**2 / 9, narrow**2 / 9, narrow**2 / 9))
    assert scales is not None
    assert scales.factor[0] == scales.gain[0] == 1
    assert scales.factor[1:7] == pytest.approx(10)


def one(folder: Path) -> NormedChannels:
    return find_normed(prepare(written(folder, 1), feeds(), Options(), folder, silent).simple)[0]


def _directly() -> NormedChannels:
    """Return the channels of a model without data."""
    text = """<ir_version: 10, opset_import: ["" : 21]> net (float[1, 1, 4, 4] x) => (float[1, 8, 4, 4] y)
        <float[8, 1, 1, 1] w = {1, 1, 1, 1, 1, 1, 1, 1}, float[8] b = {0, 0, 0, 0, 0, 0, 0, 0},
         float[8] g = {1, 2, 1, 2, 1, 2, 1, 2}> { t = Conv (x, w, b) y = InstanceNormalization (t, g, b) }"""
    return find_normed(ir.from_onnx_text(text))[0]


FOUND = _directly()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1e-6, 1e3), min_size=8, max_size=8),
    st.lists(st.floats(-1, 1), min_size=8, max_size=8),
    st.floats(1, 50),
)
def test_ranges_never_grow_and_epsilon_is_bounded(widths: list[float], places: list[float], spread: float) -> None:
    width = np.asarray(widths)
    lo = width * (np.asarray(places) - 1)
    seen = ChannelStatistics(lo, lo + 2 * width, width**2 / 9 / spread, width**2 / 9 * spread, width**2 / 9)
    scales = choose(FOUND, seen)
    if scales is None:
        return
    assert (scales.factor >= 1).all()
    assert (scales.factor <= GREATEST_FACTOR).all()
    ends = [scales.factor * (each - scales.shift) for each in (seen.lo, seen.hi)]
    assert max(ends[1].max(), 0) - min(ends[0].min(), 0) <= (max(seen.hi.max(), 0) - min(lo.min(), 0)) * (1 + 1e-9)
    for variance in (seen.least, seen.mean, seen.most):
        small = FOUND.epsilon / scales.factor**2
        change = scales.gain * np.sqrt((variance + FOUND.epsilon) / (variance + small))
        assert np.abs(change - 1).max() <= GREATEST_CHANGE
