"""Where integers hurt: switches for every part of a plan, and the evidence that they give."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from requant import RequantError
from requant.calibration import Sample
from requant.calibration.model.session import Array, open_session
from requant.calibration.rules.precision import Precision
from requant.calibration.statistics.histogram import Counter
from requant.calibration.statistics.observations import Observations
from requant.calibration.statistics.sums import Channels, Runs
from requant.cli import main
from requant.quantize import Options, choose, measure_sensitivity
from requant.quantize.accuracy.sqnr import decibels, powers
from requant.quantize.model.files import load_model, serialize, staging
from requant.quantize.placement.facts import facts_of
from requant.quantize.placement.forms import all_int8_plan
from requant.quantize.placement.rules import choose_by
from requant.quantize.runtime.isa import detect
from requant.quantize.runtime.progress import silent
from requant.quantize.sensitivity.cache import digest, forget_old, trials_of
from requant.quantize.sensitivity.integer_constants import integer_constants
from requant.quantize.sensitivity.switch_graph import Switch
from requant.quantize.sensitivity.switch_model import Powers, Switchboard, noises, switchboard
from requant.quantize.sensitivity.verdicts import traits, unit_verdict
from requant.quantize.steps.prepare import simplify_model
from requant.transforms.int8.insert_qdq import insert_qdq
from requant.transforms.int8.plan import Choice, Impl, Plan
from requant.transforms.int8.qparams import QParams, asymmetric_u8, dequantize, quantize, symmetric_s8

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "sample_models"
DATA = f"{MODELS / 'digits.npz'}"
HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
CHANNELS, HUGE = 32, 1e4


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUANT_CACHE", str(tmp_path / "cache"))


def build(text: str, **constants: Array) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(HEAD + text)
    for name, array in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def weights(*shape: int, seed: int = 0) -> Array:
    array = np.random.default_rng(seed).standard_normal(shape) / math.sqrt(math.prod(shape[1:]))
    return array.astype(np.float32)


def huge_channel() -> onnx.ModelProto:
    """A chain of convolutions; one channel of `b` is huge, and the weights that read it are as small."""
    w2, w3 = weights(CHANNELS, CHANNELS, 3, 3, seed=2), weights(CHANNELS, CHANNELS, 3, 3, seed=3)
    w2[5] *= HUGE
    w3[:, 5] /= HUGE
    return build(
        """net (float[N,32,8,8] x) => (float[N,32,8,8] y) {
          [first] a = Conv<pads = [1, 1, 1, 1]>(x, w1)
          [second] b = Conv<pads = [1, 1, 1, 1]>(a, w2)
          [third] c = Conv<pads = [1, 1, 1, 1]>(b, w3)
          [fourth] y = Conv<pads = [1, 1, 1, 1]>(c, w4)
        }""",
        w1=weights(CHANNELS, CHANNELS, 3, 3, seed=1),
        w2=w2,
        w3=w3,
        w4=weights(CHANNELS, CHANNELS, 3, 3, seed=4),
    )


def feeds(count: int, *shape: int) -> list[dict[str, Array]]:
    generator = np.random.default_rng(9)
    return [{"x": generator.standard_normal(shape).astype(np.float32)} for _ in range(count)]


def samples(items: list[dict[str, Array]]) -> list[Sample]:
    return [Sample(dict(feed), None, f"sample {index}") for index, feed in enumerate(items)]


def plain(path: Path) -> ir.Model:
    with staging() as folder:
        return simplify_model(path, load_model(path), folder, silent).model


def ranges(model: ir.Model, names: tuple[str, ...], items: list[Sample]) -> dict[str, tuple[float, float]]:
    """Return the extremes of tensors of a main graph."""
    shown = model.clone()
    values = ir.convenience.create_value_mapping(shown.graph)
    fed = {value.name for value in shown.graph.inputs}
    wanted = [name for name in names if name not in fed]
    shown.graph.outputs.clear()
    shown.graph.outputs.extend(values[name] for name in wanted)
    session = open_session(serialize(shown), optimize=False)
    rows = [{**sample.feed, **dict(zip(wanted, session.run(wanted, sample.feed), strict=True))} for sample in items]
    return {name: (min(r[name].min() for r in rows), max(r[name].max() for r in rows)) for name in names}


def emitted_powers(model: ir.Model, plan: Plan, qparams: Mapping[str, QParams], items: list[Sample]) -> Powers:
    """Return the powers of the outputs of a model, and of the noise of the one that the plan makes of it."""
    int8 = model.clone()
    insert_qdq(
        int8, plan=plan, qparams={name: qparams[plan.root(name)] for name in plan.observed}, exact=detect().exact
    )
    before, after = open_session(serialize(model)), open_session(serialize(int8))
    names = [output.name for output in before.get_outputs()]
    total = dict.fromkeys(names, (0.0, 0.0))
    for sample in items:
        for name, exact, value in zip(
            names, before.run(names, sample.feed), after.run(names, sample.feed), strict=True
        ):
            signal, noise = powers(exact, value)
            total[name] = (total[name][0] + signal, total[name][1] + noise)
    return total


def digits_samples(model: ir.Model, count: int) -> list[Sample]:
    images = np.load(DATA)["image"].astype(np.float32)
    (entry,) = model.graph.inputs
    picked = range(0, len(images), len(images) // count)
    return [Sample({str(entry.name): images[index : index + 1]}, None, "") for index in picked]


def board_of(path: Path, count: int = 8) -> tuple[ir.Model, Plan, dict[str, QParams], Switchboard, list[Sample]]:
    model = plain(path)
    items = digits_samples(model, count)
    facts = facts_of(model)
    widest = all_int8_plan(facts, choose_by(facts, model))
    found = replace(facts, ranges=ranges(model, widest.quantized, items))
    plan = all_int8_plan(found, choose_by(found, model))
    qparams = {name: asymmetric_u8(*found.ranges[name]) for name in plan.quantized}
    board = switchboard(model, plan, qparams, integer_constants(model, plan, qparams, exact=detect().exact))
    return model, plan, qparams, board, items


def switches_of(board: Switchboard, plan: Plan) -> frozenset[Switch]:
    """Return the switches of a plan with fewer units in integers, in the same forms.

    A tensor that an integer kernel writes is in integers for all its readers; any other tensor only for readers that
    compute in integers. An operator that moves values keeps its scale of the whole plan.
    """
    integer = {unit.name for unit in plan.units if plan.impl(unit).int8}
    return frozenset(s for s in board.switches if s.unit in integer or s.tensor in plan.produced_u8)


@pytest.mark.slow
@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("name", ["digits", "digits_mobile", "digits_transformer"])
def test_any_part_of_a_plan_has_the_noise_of_the_model_that_is_emitted_for_it(name: str) -> None:
    """Within 1 dB of both: a kernel rounds in another order, and one step here or there changes all that follows.

    The power of the noise of n independent errors has a standard deviation of sqrt(2 / n): 0.14 dB for those of 10
    outputs on 200 samples; of outputs that move together there are fewer.
    """
    model, plan, qparams, board, items = board_of(MODELS / f"{name}.onnx", 200)
    integer = [unit.name for unit in plan.units if plan.impl(unit).int8]
    assert switches_of(board, plan) == board.everything
    generator = np.random.default_rng(3)
    for share in (0.0, 0.3, 0.6):
        floats = [unit for unit in integer if generator.random() < share]
        part = plan.with_choices({unit: Choice(Impl.FLOAT) for unit in floats})
        (switched,) = noises(board, [switches_of(board, part)], items)
        emitted = emitted_powers(model, part, qparams, items)
        for output, sums in switched.items():
            assert decibels(*sums) == pytest.approx(decibels(*emitted[output]), abs=1.0), (share, output)


def test_a_unit_alone_has_the_noise_of_its_own_rounding() -> None:
    w, bias = weights(64, 48), weights(48)
    proto = build("net (float[N,64] x) => (float[N,48] y) { [only] y = Gemm(x, w, b) }", w=w, b=bias)
    model = ir.from_proto(proto)
    (feed,) = feeds(1, 4, 64)
    facts = facts_of(model)
    plan = all_int8_plan(facts, choose_by(facts, model))
    qparams = {"x": asymmetric_u8(-4, 4), "y": asymmetric_u8(-9, 9)}
    board = switchboard(model, plan, qparams, integer_constants(model, plan, qparams))
    x = dequantize(quantize(feed["x"], qparams["x"]), qparams["x"])
    scale = symmetric_s8(w, 1)
    rounded = dequantize(quantize(w, scale), scale)
    exact = feed["x"].astype(np.float64) @ w + bias
    for on, expected in (
        ({Switch("only", "x")}, x.astype(np.float64) @ w + bias),
        ({Switch("only", "x"), Switch("only", "")}, x.astype(np.float64) @ rounded + bias),
        (board.constants("only"), feed["x"].astype(np.float64) @ rounded + bias),
    ):
        found = board.run(feed, on)["y"]
        # a sum of 64 products of float32 in any order, and a bias in steps of s_x * s_w
        bound = 64 * 2**-24 * (np.abs(feed["x"]) @ np.abs(w)).max() + float(qparams["x"].scale * scale.scale.max())
        assert np.abs(found - expected).max() <= bound
        assert np.abs(found - exact).max() > 4 * bound  # or the test would show nothing
    assert np.array_equal(board.run(feed)["y"], open_session(proto.SerializeToString()).run(["y"], feed)[0])


def test_readers_of_a_tensor_are_switched_one_by_one() -> None:
    proto = build(
        """net (float[N,64] x) => (float[N,64] y, float[N,64] z) {
          [left] y = MatMul(x, w)
          [right] z = MatMul(x, w)
        }""",
        w=weights(64, 64),
    )
    model = ir.from_proto(proto)
    plan = choose(model)
    board = switchboard(model, plan, dict.fromkeys("xyz", asymmetric_u8(-4, 4)))
    (feed,) = feeds(1, 2, 64)
    off, left = board.run(feed), board.run(feed, {Switch("left", "x")})
    assert np.array_equal(off["z"], left["z"])
    assert not np.array_equal(off["y"], left["y"])
    assert board.tensor("x") == {Switch("left", "x"), Switch("right", "x")}


def test_units_in_bodies_have_switches() -> None:
    proto = build(
        """net (float[1,64] x, bool flag) => (float[1,64] y) {
          [choice] y = If(flag) <
            then_branch = yes () => (float[1,64] p) { [inside] p = MatMul(x, w) },
            else_branch = no () => (float[1,64] q) { [other] q = Neg(x) }
          >
        }""",
        w=weights(64, 64),
    )
    model = ir.from_proto(proto)
    plan = choose(model)
    qparams = {name: asymmetric_u8(-4, 4) for name in plan.observed}
    board = switchboard(model, plan, qparams, integer_constants(model, plan, qparams))
    (feed,) = feeds(1, 1, 64)
    for flag in (True, False):
        fed = {**feed, "flag": np.asarray(flag)}
        same = np.array_equal(board.run(fed)["y"], board.run(fed, board.unit("inside"))["y"])
        assert same is not flag


def test_trials_do_not_depend_on_how_many_run_at_a_time() -> None:
    _, _, _, board, items = board_of(MODELS / "digits.onnx")
    trials = [board.everything, *(board.tensor(name) for name in board.plan.observed)]
    alone, many = (list(noises(board, trials, items[:4], workers)) for workers in (1, 4))
    assert alone == many


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    onnx.save(huge_channel(), tmp_path / "chain.onnx")
    return tmp_path / "chain.onnx"


def test_the_tensor_that_ruins_ranks_first_and_its_channel_is_named(chain: Path) -> None:
    found = measure_sensitivity(chain, feeds(8, 1, CHANNELS, 8, 8), samples=2)
    assert found.tensors[0].name == "b"
    assert "one channel sets the range: channel 5 spans" in found.tensors[0].verdict
    assert found.tensors[0].sqnr_db < 10
    assert found.tensors[1].sqnr_db > 30
    first = found.units[0]
    assert first.name == "third"  # which reads it
    assert first.verdict.startswith("reads b: one channel sets")
    gain = found.gain_db(first)
    assert gain is not None
    assert gain > 20
    assert {row.name for row in found.units} == {"first", "second", "third", "fourth"}
    assert found.units[-1].rest_noise is None  # too little to show
    assert (found.samples, found.calibrated, found.recalled) == (2, 8, 0)


def test_json_has_null_for_numbers_that_json_lacks(chain: Path) -> None:
    found = measure_sensitivity(chain, feeds(4, 1, CHANNELS, 8, 8), samples=1)
    lost = replace(found, units=(replace(found.units[0], noise=math.inf), replace(found.units[1], noise=0.0)))
    rows = [json.loads(json.dumps(each.to_json(), allow_nan=False)) for each in (found, lost)]
    for row, each in zip(rows, (found, lost), strict=True):
        assert [unit["name"] for unit in row["units"]] == [unit.name for unit in each.units]
        assert [tensor["noise"] for tensor in row["tensors"]] == [tensor.noise for tensor in each.tensors]
    assert [(unit["noise"], unit["sqnr_db"]) for unit in rows[1]["units"]] == [(None, None), (0.0, None)]


@pytest.mark.parametrize("kind", ["units", "tensors"])
def test_one_kind_alone_is_what_it_is_with_the_other(chain: Path, kind: str) -> None:
    data = feeds(4, 1, CHANNELS, 8, 8)
    both = measure_sensitivity(chain, data, samples=1, fresh=True)
    one = measure_sensitivity(chain, data, samples=1, kinds=[kind], fresh=True)
    assert len(one.units) + len(one.tensors) < len(both.units) + len(both.tensors)
    assert one.tensors == (both.tensors if kind == "tensors" else ())
    assert [row.noise for row in one.units] == ([row.noise for row in both.units] if kind == "units" else [])
    assert one.trials < both.trials


def test_an_interrupted_run_goes_on_where_it_stopped(chain: Path) -> None:
    data = feeds(4, 1, CHANNELS, 8, 8)
    whole = measure_sensitivity(chain, data, samples=1, fresh=True)

    def stop(stage: str, done: int, total: int | None) -> None:
        if stage.startswith("try") and done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="goes on where it stopped"):
        measure_sensitivity(chain, data, samples=1, fresh=True, progress=stop)
    resumed = measure_sensitivity(chain, data, samples=1)
    assert 4 <= resumed.recalled < resumed.trials
    assert (resumed.units, resumed.tensors) == (whole.units, whole.tensors)
    again = measure_sensitivity(chain, data, samples=1)
    assert again.recalled == again.trials
    assert measure_sensitivity(chain, data, samples=1, fresh=True).recalled == 0


def test_outputs_that_come_in_another_number_are_told_by_what_they_are_selected_from(tmp_path: Path) -> None:
    proto = build(
        """net (float[1,64] x) => (float[M] picked) {
          [only] y = MatMul(x, w)
          flat = Reshape(y, shape)
          high = Greater(flat, zero)
          picked = Compress(flat, high)
        }""",
        w=weights(64, 64),
        shape=np.array([-1]),
        zero=np.asarray(0, np.float32),
    )
    onnx.save(proto, tmp_path / "selects.onnx")
    found = measure_sensitivity(tmp_path / "selects.onnx", feeds(4, 1, 64))
    assert "selected from is compared instead" in found.notes[-1]
    assert found.outputs == ("flat (into Compress)",)
    assert 20 < found.sqnr_db < 60


def test_integers_are_told_by_what_they_are_chosen_from(tmp_path: Path) -> None:
    text = "net (float[1,64] x) => (int64[1,1] y) { [only] a = MatMul(x, w) [most] y = ArgMax<axis = 1>(a) }"
    onnx.save(build(text, w=weights(64, 64)), tmp_path / "class.onnx")
    found = measure_sensitivity(tmp_path / "class.onnx", feeds(4, 1, 64))
    assert found.outputs == ("a (into ArgMax)",)
    assert 20 < found.sqnr_db < 60


def test_an_axis_of_free_length_holds_no_channels(tmp_path: Path) -> None:
    """Rows of images of several widths, moved to where channels are, and the last axis of another tensor."""
    proto = build(
        """net (float[1,8,n,16] x) => (float[1,n,8,16] y, float[1,8,16,n] z) {
          c = Conv<pads = [1, 1, 1, 1]>(x, w)
          t = Transpose<perm = [0, 2, 1, 3]>(c)
          u = Relu(t)
          y = MatMul(u, v)
          last = Transpose<perm = [0, 1, 3, 2]>(c)
          z = MatMul(v, last)
        }""",
        w=weights(8, 8, 3, 3),
        v=weights(16, 16, seed=1),
    )
    onnx.save(proto, tmp_path / "rows.onnx")
    lengths = [20, 24, 20, 28]
    found = measure_sensitivity(tmp_path / "rows.onnx", [feeds(1, 1, 8, length, 16)[0] for length in lengths])
    assert {row.name for row in found.tensors} >= {"x", "u"}
    assert 20 < found.sqnr_db < 60


@pytest.mark.parametrize("what", ["data", "calibration", "weights"])
def test_what_is_kept_is_not_of_other_things(chain: Path, what: str) -> None:
    data = feeds(4, 1, CHANNELS, 8, 8)
    measure_sensitivity(chain, data, samples=1)
    options = Options(calibration="percentile(99)") if what == "calibration" else Options()
    if what == "data":
        data[0]["x"] = data[0]["x"] * 0.5
    if what == "weights":
        proto = onnx.load(chain)
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights(CHANNELS, CHANNELS, 3, 3, seed=8), "w1"))
        onnx.save(proto, chain)
    assert measure_sensitivity(chain, data, options, samples=1).recalled == 0


def test_a_torn_line_costs_one_trial(chain: Path) -> None:
    data = feeds(4, 1, CHANNELS, 8, 8)
    found = measure_sensitivity(chain, data, samples=1)
    (path,) = Path(str(chain.parent / "cache")).glob("sensitivity-*.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    again = measure_sensitivity(chain, data, samples=1)
    assert again.recalled == again.trials - 1
    assert again.units == found.units
    assert measure_sensitivity(chain, data, samples=1).recalled == again.trials


def test_what_nobody_asks_for_is_forgotten(chain: Path) -> None:
    measure_sensitivity(chain, feeds(2, 1, CHANNELS, 8, 8), samples=1)
    assert forget_old() == 0
    (path,) = Path(str(chain.parent / "cache")).glob("sensitivity-*.jsonl")
    assert forget_old(path.stat().st_mtime + 31 * 24 * 3600) == 1


def test_a_cache_that_cannot_be_written_is_no_matter(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = chain.parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("REQUANT_CACHE", str(blocked))
    assert measure_sensitivity(chain, feeds(2, 1, CHANNELS, 8, 8), samples=1).recalled == 0


def test_large_weights_stay_float(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requant.quantize.tools.sensitivity.ROOM", 1000)
    found = measure_sensitivity(chain, feeds(2, 1, CHANNELS, 8, 8), samples=1)
    assert "weights are left in float" in found.notes[-1]
    assert all(row.weights_noise is None for row in found.units)


@pytest.mark.parametrize(
    ("text", "keywords", "message"),
    [
        ("net (float[N,64] x) => (float[N,64] y) { y = Exp(x) }", {}, "nothing to try"),
        ("net (float[N,64] x) => (float[N,64] y) { y = Exp(x) }", {"samples": 0}, "at least 1"),
        ("net (float[N,64] x) => (float[N,64] y) { y = Exp(x) }", {"kinds": ["layers"]}, "units, tensors"),
    ],
    ids=["no units", "no samples", "unknown kind"],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, text: str, keywords: dict[str, Any], message: str) -> None:
    onnx.save(build(text), tmp_path / "model.onnx")
    with pytest.raises(RequantError, match=message):
        measure_sensitivity(tmp_path / "model.onnx", feeds(1, 1, 64), **keywords)


def observations(arrays: Mapping[str, Array], *, growing: bool = False) -> Observations:
    """Return what a run over 16 samples sees of tensors (N, C)."""

    def histogram(array: Array) -> Any:
        counter = Counter()
        counter.add(array)
        return counter.histogram()

    def runs(array: Array) -> Runs:
        ends = np.array([[array.min(), array.max()]] * 16, np.float64)
        if growing:
            ends[:15] /= 2
        return Runs.of(list(range(16)), ends)

    return Observations(
        ranges={name: histogram(array) for name, array in arrays.items()},
        runs={name: runs(array) for name, array in arrays.items()},
        channels={name: Channels.of(array, -1) for name, array in arrays.items() if array.shape[-1] > 1},
        samples=16,
    )


def even(count: int = 4000, channels: int = 16) -> Array:
    return np.random.default_rng(1).uniform(-1, 1, (count, channels)).astype(np.float32)


def scaled(**factors: float) -> Array:
    array = even()
    for channel, factor in factors.items():
        array[:, int(channel[1:])] *= factor
    return array


VERDICTS: list[tuple[str, Array, str]] = [
    ("even", even(), ""),
    ("one channel", scaled(c3=20.0), "channel 3 spans 20x the median channel"),
    ("lost channels", scaled(c1=0.001, c2=0.002), "2 of 16 channels span less than 4 of the 255 steps"),
    (
        "outliers",
        np.random.default_rng(2).standard_t(2, (64000, 1)).astype(np.float32),
        "% of the values lie within",
    ),
]


@pytest.mark.parametrize(("array", "words"), [row[1:] for row in VERDICTS], ids=[row[0] for row in VERDICTS])
def test_what_stands_out_of_a_tensor_is_told(array: Array, words: str) -> None:
    span = float(array.min()), float(array.max())
    found = traits("t", span, observations({"t": array}), [], Precision())
    assert (words in found.verdict) if words else found.verdict == ""
    assert found.clipped == 0


def test_joined_ranges_growth_and_clipping_are_told() -> None:
    seen = observations({"joined": even(), "a": 0.05 * even(), "b": even()}, growing=True)
    found = traits("joined", (-0.5, 0.5), seen, ["a", "b"], Precision())
    assert "mixed ranges joined by Concat: -0.05..0.05 and -1..1, 20-fold" in found.verdict
    assert "the range cuts off 49." in found.verdict
    assert "% of the values, by up to 0.5;" in found.verdict
    assert "+50% range in the last doubling" in found.verdict
    outside = 0.5 - 1 / 255  # by more than a step
    assert found.clipped == pytest.approx(outside, abs=4 / math.sqrt(4 * 64000))  # four sigma of a share of one half
    assert found.growth == 0.5
    silu = np.concatenate([np.full(3000, -0.278), np.linspace(0, 2.8, 3000), [-0.3]]).astype(np.float32)[:, None]
    near = traits("silu", (-0.27, 2.8), observations({"silu": silu}), [], Precision())  # steps of 0.012
    assert (near.clipped < 0.001, "cuts off" in near.verdict) == (True, False)
    assert "mixed" not in traits("joined", (-1, 1), seen, ["b", "b"], Precision()).verdict


def test_the_rounding_of_a_tensor_is_that_of_its_integers() -> None:
    array = even()
    params = asymmetric_u8(-1.0, 1.0)
    exact = np.square(dequantize(quantize(array, params), params) - array.astype(np.float64)).mean()
    found = traits("t", (-1.0, 1.0), observations({"t": array}), [], Precision())
    assert found.rounding == pytest.approx(exact / np.square(array, dtype=np.float64).mean(), rel=0.02)


@pytest.mark.parametrize(
    ("noise", "alone", "words"),
    [
        (0.0, None, ""),
        (1.0, 0.8, "most of its noise comes from its weights"),
        (1.0, 0.1, "reads b: wide"),
        (1.0, None, "reads b: wide"),
    ],
)
def test_the_noise_of_a_unit_is_explained(noise: float, alone: float | None, words: str) -> None:
    assert unit_verdict(noise, alone, {"a": (0.1, "narrow"), "b": (0.7, "wide")}) == words


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", x=np.concatenate([feed["x"] for feed in feeds(8, 1, CHANNELS, 8, 8)]))
    return tmp_path / "data.npz"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["sensitivity", *map(str, arguments)], terminal_width=80)


def test_the_command_prints_short_tables(chain: Path, archive: Path) -> None:
    done = run(chain, "--data", archive, "--samples", 2)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert any("one channel sets" in line for line in lines)
    assert "dB at the worst of 1 output;" in lines[0]


def test_the_command_gives_one_json_object_and_a_file(chain: Path, archive: Path) -> None:
    target = chain.parent / "evidence.json"
    done = run(chain, "--data", archive, "--samples", 1, "--json", "-o", target, "--tensors")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["tensors"][0]["name"] == "b"
    assert found["units"] == []
    assert json.loads(target.read_text()) == found
    assert run(chain, "--data", archive, "-o", target).exit_code == 2  # it exists


@pytest.mark.parametrize("flags", [["--units", "--tensors"], ["--json", "--all"]], ids=" ".join)
def test_contradictions_are_refused(chain: Path, archive: Path, flags: list[str]) -> None:
    done = run(chain, "--data", archive, *flags)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1


def test_the_ranges_of_files_are_kept(chain: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(chain, "--data", archive, "--samples", 1).exit_code == 0

    def fail(*_: object) -> Iterator[None]:
        raise AssertionError

    monkeypatch.setattr("requant.calibration.runs.runner.local_pieces", fail)
    assert run(chain, "--data", archive, "--samples", 1).exit_code == 0


def test_an_interrupt_is_told_in_one_line(chain: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("requant.quantize.tools.sensitivity.noises", stop)
    done = run(chain, "--data", archive, "--samples", 1)
    assert done.exit_code == 130
    assert done.stderr.strip() == "requant: interrupted; the same command goes on where it stopped"


def test_trials_are_found_by_what_is_on() -> None:
    _, _, _, board, items = board_of(MODELS / "digits.onnx")
    key = digest(board.everything)
    assert key == digest(sorted(board.everything)) != digest(())
    for expected in (False, True):
        with trials_of(board, items[:1], fresh=False) as trials:
            assert (key in trials.known) is expected
            trials.add(key, {"y": (1.0, math.inf)})
