"""What makes an INT8 model more accurate: biases, efforts and their options, evidence in the plan, and what it is worth."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from requant import RequantError, UnknownNameError
from requant.calibration.model.session import Array, open_session
from requant.cli import main
from requant.quantize import Options, Selection, Strategy, compare_models, quantize_model
from requant.quantize.corrections.adjust import find_adjustments
from requant.quantize.corrections.bias import correct_bias, mean_error
from requant.quantize.corrections.layer_by_layer import BlockLayer, Layer, channel_means, walk_layers
from requant.quantize.job import Evidence, Job
from requant.quantize.model.files import serialize
from requant.quantize.options.efforts import CORRECTIONS, EFFORTS, chosen
from requant.quantize.placement import costs as store
from requant.quantize.placement import racing
from requant.quantize.placement.costs import Costs, signature
from requant.quantize.placement.facts import Facts
from requant.quantize.placement.forms import native_plan, stock_plan
from requant.quantize.placement.measuring import Bench, Measured, Write, with_profile
from requant.quantize.placement.noise import Noises
from requant.quantize.placement.plans_by_cost import cheapest_plan, tuned_plan
from requant.quantize.placement.pricing import Prices, Space, unit_cost
from requant.quantize.placement.racing import Size, fastest
from requant.quantize.placement.search import place
from requant.quantize.runtime.attribution import Spent
from requant.quantize.runtime.clock import Times
from requant.quantize.runtime.machine import Machine
from requant.quantize.runtime.progress import silent
from requant.quantize.steps.emit import plan_by_rules
from requant.quantize.steps.prepare import prepare
from requant.quantize.steps.ranges import find_ranges
from requant.transforms.int8.insert_qdq import insert_qdq
from requant.transforms.int8.plan import Choice, Impl, Plan
from requant.transforms.int8.qparams import quantize
from requant.transforms.int8.weights import Adjustment

Feeds = list[dict[str, Array]]
EPS = float(np.finfo(np.float32).eps)
SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 16, 8, 8] x) => (float[1, 8, 8, 8] y) {
    [first] a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    r = Relu (a)
    [second] c = Conv (r, w2, b2)
    [third] y = Conv <pads = [1, 1, 1, 1]> (c, w3, b3)
}"""
SHAPES = {"w1": (12, 16, 3, 3), "b1": (12,), "w2": (10, 12, 1, 1), "b2": (10,), "w3": (8, 10, 3, 3), "b3": (8,)}


def feeds(count: int = 8) -> Feeds:
    random = np.random.default_rng(1)
    return [{"x": random.standard_normal((1, 16, 8, 8)).astype(np.float32)} for _ in range(count)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write three convolutions with biases."""
    random, proto = np.random.default_rng(0), onnx.parser.parse_model(TEXT)
    for name, shape in SHAPES.items():
        array = random.standard_normal(shape) / math.sqrt(math.prod(shape[1:]))
        proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def begun(model: Path, data: Feeds, **options: Any) -> tuple[Job, Facts, Plan, Write]:
    job = prepare(model, data, Options(**{"place": "rules", "isa": "vnni", **options}), model.parent, silent)
    return job, *plan_by_rules(job, find_ranges(job), Evidence())


def test_weights_that_two_layers_share_stay_shared(tmp_path: Path) -> None:
    """Rounded for each layer, they would be two constants, and the file larger than the float model."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[1, 16, 8, 8] x) => (float[1, 16, 8, 8] y) {
            [first] a = Conv <pads = [1, 1, 1, 1]> (x, w) r = Relu (a) [second] y = Conv <pads = [1, 1, 1, 1]> (r, w)
        }"""
    )
    weights = np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype(np.float32) / 12
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    written = [
        onnx.load(quantized(tmp_path / "m.onnx", name, corrections=named)).graph.initializer
        for name, named in (("means", ("means",)), ("rounding", ("means", "rounding")))
    ]
    sizes = [
        [t.dims for t in constants if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 4]
        for constants in written
    ]
    assert sizes == [[[16, 16, 3, 3]]] * 2


# --------------------------------------------------------------------------------------------------------- biases


def errors(rows: list[list[float]]) -> list[Array]:
    """Return what is to be in two channels of results (1, 2, 1), one for each sample."""
    return [np.asarray(row, np.float32).reshape(1, 2, 1) for row in rows]


@pytest.mark.parametrize(
    ("rows", "shift"),
    [
        ([[0.5, -2.0]], [0.5, -2.0]),  # of one sample nothing is known but its mean
        ([[0.5, -2.0], [0.5, -2.0]], [0.5, -2.0]),  # no variance: the mean is certain
        ([[1.0, -3.0], [-1.0, 3.0]], [0.0, 0.0]),  # means of 0
        ([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]),
        # mean 2, variance of the mean 8 / 2 = 4: nothing is proved; mean 4, variance of the mean 2 / 2: 4 (1 - 1 / 16)
        ([[0.0, 3.0], [4.0, 5.0]], [0.0, 3.75]),
        ([[-1.0, 1.0], [4.0, 1.0]], [0.0, 1.0]),  # less than nothing is nothing
    ],
    ids=["one-sample", "no-variance", "no-mean", "no-error", "shrunk", "not-negative"],
)
def test_a_mean_is_given_back_as_far_as_it_is_certain(rows: list[list[float]], shift: list[float]) -> None:
    nothing = [np.zeros((1, 2, 1), np.float32) for _ in rows]
    found = mean_error(errors(rows), nothing, 1)
    assert found.dtype == np.float32
    assert found.tolist() == shift
    swapped = [np.moveaxis(each, 1, -1) for each in errors(rows)]
    assert mean_error(swapped, [np.zeros_like(each) for each in swapped], -1).tolist() == shift


@pytest.mark.parametrize("samples", [1, 2, 8])
def test_channel_means_agree_after_correction(model: Path, samples: int) -> None:
    """In the emitted model, on the same integers: within what shrinking leaves, and half a step of the int32 bias.

    Shrinking leaves ``min(|m|, v / |m|)`` of a mean m with the variance v, which is never more than its standard error.
    """
    job, _, plan, write = begun(model, feeds())
    candidate, steps = write(plan), {}

    def correct(step: Layer) -> tuple[Adjustment, list[Array]]:
        steps[step.unit.name] = step
        return correct_bias(step)

    def no_blocks(step: BlockLayer) -> tuple[Adjustment, list[Array]]:
        raise AssertionError(step)

    found = dict(walk_layers(job, candidate, feeds(samples), correct, no_blocks))
    corrected = job.simple.clone()
    insert_qdq(corrected, plan=plan, qparams=candidate.qparams, adjusted=found, scheme=job.scheme)
    names = {name: next(n for n in corrected.graph if n.name == name).outputs[0] for name in steps}
    corrected.graph.outputs[:] = list(names.values())
    session = open_session(serialize(corrected), optimize=False)
    rows = [session.run([str(v.name) for v in names.values()], dict(feed)) for feed in feeds(samples)]
    assert list(steps) == ["first", "second", "third"]
    for position, step in enumerate(steps.values()):
        own = [step.product(x, step.weights.array, step.weights.bias) for x in step.int8_inputs]
        gone = channel_means([a - row[position] for a, row in zip(own, rows, strict=True)], 1)
        plain = channel_means([a - b for a, b in zip(own, step.run(_nearest(step)), strict=True)], 1)
        uncertain = plain.std(axis=0, ddof=1) / math.sqrt(samples) if samples > 1 else 0.0
        half = float(step.params.scale) * step.weights.params.scale / 2
        # behind the first unit a bias that was rounded may have moved integers that are read here: by one step at most
        moved = 0.0 if step.unit.name == "first" else _reach(step)
        reordered = step.weights.array[0].size * EPS * max(float(np.abs(a).max()) for a in own)
        assert (np.abs(gone.mean(axis=0)) <= uncertain + half + moved + reordered).all()
        if step.unit.name == "first":
            assert (np.abs(plain.mean(axis=0)) > uncertain + half + reordered).any()  # there was something to correct


def _nearest(step: Layer) -> Array:
    return quantize(step.weights.array, step.weights.params)


def _reach(step: Layer) -> Array:
    """Return what a hundredth of the integers that a unit reads can change of its means, if one step off."""
    taps = tuple(range(1, step.weights.array.ndim))
    return np.asarray(0.01 * float(step.params.scale) * np.abs(step.weights.array).sum(axis=taps))


# -------------------------------------------------------------------------------------------------------- options


def test_each_effort_takes_its_corrections() -> None:
    assert {effort: chosen(effort, None) for effort in EFFORTS} == {
        effort: {name for name, row in CORRECTIONS.items() if effort in row.efforts} for effort in EFFORTS
    }
    assert chosen("low", None) == {"norms", "parts", "means"}
    assert {"norms", "parts", "means", "bias", "rounding"} <= chosen("medium", None) <= chosen("high", None)
    assert chosen("low", ("rounding",)) == {"rounding"}
    assert chosen("high", ()) == frozenset()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"no correction named 'roundin'.*rounding"):
        Options(corrections=("bias", "roundin"))
    with pytest.raises(RequantError, match="no effort 'lo'; there are: low, medium, high"):
        Options(effort="lo")


def test_an_unknown_correction_is_told_on_the_command_line(model: Path) -> None:
    arguments = ["quantize", model, "--data", "no.npz", "-o", model.parent / "o.onnx", "--corrections", "bais"]
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code == 2
    assert "no correction named 'bais'" in result.stderr
    assert "bias" in result.stderr


def integers(path: Path | onnx.ModelProto) -> dict[str, bytes]:
    """Return the integer constants of a model by name."""
    proto = onnx.load(path) if isinstance(path, Path) else path
    return {t.name: numpy_helper.to_array(t).tobytes() for t in proto.graph.initializer if t.data_type in (3, 6)}


def quantized(model: Path, name: str, **options: Any) -> Path:
    output = model.parent / f"{name}.onnx"
    quick = {"place": "rules", "seconds": 0.01, "force_int8": True, "calibration": "minmax", "isa": "vnni"}
    quantize_model(model, feeds(), output, Options(**{**quick, **options}))
    return output


def written(model: Path, *, means: bool, **options: Any) -> dict[str, bytes]:
    """Return the constants that the plan by rules has without any correction, or with that by means alone."""
    job = prepare(
        model, feeds(), Options(place="rules", calibration="minmax", isa="vnni", **options), model.parent, silent
    )
    found = find_ranges(job)
    qparams = {name: job.scheme.activation_params(*found.ranges[name]) for name in job.all_int8_plan.observed}
    made = job.simple.clone()
    insert_qdq(made, plan=job.all_int8_plan, qparams=qparams, means=found.means if means else {}, scheme=job.scheme)
    return integers(ir.to_proto(made))


@pytest.mark.parametrize("effort", list(EFFORTS))
def test_no_corrections_are_none(model: Path, effort: str) -> None:
    assert integers(quantized(model, "none", effort=effort, corrections=())) == written(model, means=False)


def test_little_effort_is_ranges_and_means(model: Path) -> None:
    low = integers(quantized(model, "low", effort="low"))
    assert low == written(model, means=True) != written(model, means=False)
    assert low == integers(quantized(model, "means", effort="high", corrections=("means",)))
    assert low != integers(quantized(model, "medium", effort="medium"))


def test_a_correction_works_alone(model: Path) -> None:
    plain = integers(quantized(model, "plain", corrections=()))
    for name, kind in (("means", "int32"), ("bias", "int32"), ("rounding", "int8")):
        made = integers(quantized(model, name, effort="low", corrections=(name,)))
        assert made.keys() == plain.keys()
        assert {key.rpartition("/")[2] for key in made if made[key] != plain[key]} == {kind}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"effort": "medium"}, "medium: bias, rounding;"),  # no function reads a range; the biases are those of `bias`
        ({"effort": "low"}, "low: means;"),
        ({"selection": Selection(strategy=Strategy.WEIGHT)}, "medium;"),
    ],
    ids=["layer by layer", "means", "nothing in integers"],
)
def test_the_table_names_the_corrections_that_changed_the_model(
    model: Path, options: dict[str, Any], told: str
) -> None:
    quick = Options(place="rules", seconds=0.01, force_int8=True, isa="vnni", **options)
    result = quantize_model(model, feeds(), model.parent / "q.onnx", quick)
    assert dict(result.rows())["effort"].startswith(told)


@pytest.mark.parametrize(
    ("needed", "learned"),
    [((1e9, 1e13, 1e9), "first third"), ((9e11, 9e11, 9e11), "first second"), ((3e12, 1e13, 1e13), "")],
    ids=["one-too-dear", "all-together-too-dear", "each-too-dear"],
)
def test_what_rounding_may_cost_is_kept_to(
    model: Path, monkeypatch: pytest.MonkeyPatch, needed: tuple[float, float, float], learned: str
) -> None:
    """A unit that is too dear, of the 2e12 multiplications that are left, is rounded plainly; others behind it are not."""
    job, _, plan, write = begun(model, feeds())
    dear = dict(zip(("first", "second", "third"), needed, strict=True))
    monkeypatch.setattr("requant.quantize.corrections.adjust.operations", lambda step: dear[step.unit.name])
    monkeypatch.setattr("requant.quantize.corrections.adjust.learn_rounding", lambda step, **_: _nearest(step))
    found = find_adjustments(job, write(plan))
    assert EFFORTS["medium"].operations == 2e12
    assert list(found) == ["first", "second", "third"]
    assert [name for name, adjustment in found.items() if adjustment.stored is not None] == learned.split()


def test_a_piece_that_does_not_run_ends_the_corrections(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _, plan, write = begun(model, feeds())
    calls = itertools.count()

    def failing(step: Layer, stored: Array | None = None) -> tuple[Adjustment, list[Array]]:
        if next(calls) == 1:
            raise RequantError("it does not run")
        return correct_bias(step, stored)

    monkeypatch.setattr("requant.quantize.corrections.adjust.correct_bias", failing)
    assert list(find_adjustments(job, write(plan))) == ["first"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, {}),
        ({"effort": "high"}, {"effort": "high", "corrections": sorted(chosen("high", None))}),
        ({"corrections": ()}, {"corrections": []}),
        ({"corrections": ("rounding", "bias")}, {"corrections": ["bias", "rounding"]}),
        ({"corrections": tuple(sorted(chosen("medium", None)))}, {}),
        ({"effort": "low"}, {"effort": "low", "corrections": ["means", "norms", "parts"], "calibration": "minmax"}),
    ],
    ids=["default", "high", "none", "named", "the-same", "low"],
)
def test_the_model_says_what_was_done(model: Path, options: dict[str, Any], told: dict[str, Any]) -> None:
    assert Options(**options).to_json() == told
    output = quantized(model, "o", **options, calibration=None)
    props = {each.key: each.value for each in onnx.load(output).metadata_props}
    said = json.loads(props["requant.options"])
    assert {key: said[key] for key in said if key in ("effort", "corrections", "calibration")} == told


# ------------------------------------------------------------------------------------------------------- evidence

FLOAT_US = {"first": 350.0, "second": 1000.0, "third": 1000.0}
INT8_US = {"first": 310.0, "second": 100.0, "third": 100.0}


def planted(model: Path, **options: Any) -> tuple[Job, Facts, Plan, Write]:
    """Return what is to be placed by costs that leave no doubt: `first` gains 40 us of 2,350, the others 900 each."""
    _, facts, rules, _ = begun(model, feeds())
    shapes = {"x": (1, 16, 8, 8), "r": (1, 12, 8, 8), "c": (1, 10, 8, 8), "y": (1, 8, 8, 8), "a": (1, 12, 8, 8)}
    rows = [
        (signature(unit, facts.nodes, shapes), impl, times[unit.name])
        for unit in rules.units
        for impl, times in ((Impl.FLOAT, FLOAT_US), (Impl.U8, INT8_US))
    ]
    store.save(Costs(Machine.here(1)).with_times(rows), model.parent / "c.json")
    return begun(model, feeds(), place="estimated", costs=model.parent / "c.json", **options)


def prices(model: Path, job: Job, facts: Facts, rules: Plan) -> Prices:
    """Return the prices by the costs that `planted` has written."""
    return Prices.of(Space.of(job, facts, rules, feeds()[0]), store.read(model.parent / "c.json"), {})


LITTLE, MUCH = 1e-6, 1e-2
NOISES: dict[str, tuple[dict[str, float], dict[str, Any], str]] = {
    "unknown": ({}, {}, "int8"),
    "alike": ({"x": 1e-4, "r": 1e-4, "c": 1e-4}, {}, "int8"),  # a third of 2 % of 2,350 us is 16
    "planted": ({"x": MUCH, "r": LITTLE, "c": LITTLE}, {}, "float"),  # all of it, 47 us
    "little-effort": ({"x": MUCH, "r": LITTLE, "c": LITTLE}, {"effort": "low"}, "int8"),  # for which noise has no price
    "much-effort": ({"x": 1e-4, "r": 1e-4, "c": 1e-4}, {"effort": "high"}, "float"),  # a third of 20 % is 157
    "own-price": ({"x": MUCH, "r": LITTLE, "c": LITTLE}, {"noise_weight": 3000.0}, "int8"),  # 30 us
}


@pytest.mark.parametrize(("noise", "options", "wanted"), NOISES.values(), ids=NOISES)
def test_a_noisy_unit_stays_float_where_it_gains_little(
    model: Path, noise: dict[str, float], options: dict[str, Any], wanted: str
) -> None:
    job, facts, rules, write = planted(model, **options)
    found, _ = place(job, facts, rules, write, noise)
    assert {name: found.plan.choices[name].impl for name in ("second", "third")} == dict.fromkeys(
        ("second", "third"), Impl.U8
    )
    assert found.plan.choices["first"].impl is (Impl.FLOAT if wanted == "float" else Impl.U8)
    if wanted == "float":
        assert found.plan.choices["first"].reason.text == "int8 saves 40 us here, less than its noise is worth"


def test_a_noisy_tensor_is_rounded_where_float_on_both_sides_costs_more(model: Path) -> None:
    job, facts, rules, write = planted(model)
    found, _ = place(job, facts, rules, write, {"x": LITTLE, "r": MUCH, "c": LITTLE})
    assert [found.plan.choices[name].impl for name in ("first", "second")] == [Impl.U8, Impl.U8]  # 940 us against 47


def test_noise_of_a_tensor_that_only_float_reads_has_its_price(model: Path) -> None:
    """An integer kernel rounds its result, even if the reader is in float."""
    job, facts, rules, _ = planted(model)
    known = replace(prices(model, job, facts, rules), noises=Noises({"r": MUCH}), noise_price=3e5)
    slow = replace(known, slowed={("second", Impl.U8): 6000.0})
    assert [cheapest_plan(slow).choices[name].impl for name in ("first", "second")] == [Impl.FLOAT, Impl.FLOAT]
    assert cheapest_plan(replace(slow, noise_price=1.0)).choices["first"].impl is Impl.U8


def test_a_unit_is_slowed_down_by_its_neighbours_in_the_last_plan(model: Path) -> None:
    job, facts, rules, _ = planted(model)
    known = Measured.of(prices(model, job, facts, rules))
    cost = unit_cost(known.prices, next(unit for unit in rules.units if unit.name == "second"), Impl.U8)
    for took, slowed in ((9 * cost, {("second", Impl.U8): 9 * cost}), (8 * cost, {("second", Impl.U8): 8 * cost}),
                         (1.5 * cost, {})):  # fmt: skip
        known = with_profile(known, rules, Spent({"second": took}, 0.0, 0.0, 0.0))
        assert known.prices.slowed == slowed


@pytest.mark.parametrize(("noisy", "best"), [(0.0, "all"), (MUCH, "cut")], ids=["no-noise", "noise"])
def test_of_whole_models_the_noise_counts_too(
    model: Path, monkeypatch: pytest.MonkeyPatch, noisy: float, best: str
) -> None:
    """Everything in int8 takes 1.00 ms, with the noisy unit in float 1.05 ms; its noise is worth 0.1 ms."""
    job, facts, rules, write = planted(model)
    cut = rules.with_choices({"first": replace(rules.choices["first"], impl=Impl.FLOAT)})
    known = Measured.of(replace(prices(model, job, facts, rules), noises=Noises({"x": noisy}), noise_price=100 / MUCH))
    monkeypatch.setattr(racing, "race", lambda *_, **__: [Times((1.00e-3,)), Times((1.05e-3,))])
    candidates = {"all": write(rules), "cut": write(cut)}
    found, placement = fastest([Size(1, Bench.of(job, known.prices.space, write, feeds()[0]), known)], candidates)
    assert found is candidates[best]
    assert placement.tried == {"all": 1.0, "cut": 1.05}


def test_a_unit_that_its_neighbours_slow_down_is_placed_anew(model: Path) -> None:
    """By its cost, `first` gains 40 us in integers; in the plan that was tried it took 20 times that cost."""
    job, facts, rules, write = planted(model)
    known = Measured.of(prices(model, job, facts, rules))
    plan = cheapest_plan(known.prices)
    assert plan.choices["first"].impl is Impl.U8
    known = with_profile(known, write(plan).plan, Spent({**INT8_US, "first": 6000.0}, 0.0, 0.0, 0.0))
    again = cheapest_plan(known.prices)
    assert again.choices["first"].impl is Impl.FLOAT
    assert {name: again.choices[name].impl for name in ("second", "third")} == dict.fromkeys(
        ("second", "third"), Impl.U8
    )


def test_a_plan_is_tuned_to_the_faster_kernels(model: Path) -> None:
    """Where a convolution is faster as a matrix product, it becomes one; where that was not measured, it does not."""
    job, facts, rules, _ = planted(model, isa="vnni")
    known = prices(model, job, facts, rules)
    assert tuned_plan(known, rules) is None
    gemms = {"first": INT8_US["first"] / 2, "second": INT8_US["second"] * 2}
    times = [(known.space.keys[name], Impl.U8_GEMM, cost) for name, cost in gemms.items()]
    known = replace(known, costs=known.costs.with_times(times))
    tuned = tuned_plan(known, rules)
    assert tuned is not None
    changed = {name for name, choice in tuned.choices.items() if choice != rules.choices[name]}
    assert (changed, tuned.choices["first"].impl) == ({"first"}, Impl.U8_GEMM)
    assert cheapest_plan(known).choices["first"].impl is Impl.U8_GEMM


def test_a_native_convolution_has_the_body_that_is_fastest_without_the_library(model: Path) -> None:
    job, facts, rules, _ = planted(model, isa="vnni")
    known = prices(model, job, replace(facts, native=True), rules)
    costs = {"first": (1.0, INT8_US["first"] / 2), "second": (1.0, INT8_US["second"] * 2)}
    for name, both in costs.items():
        times = [
            (known.space.keys[name], impl, cost)
            for impl, cost in zip((Impl.U8_NATIVE, Impl.U8_GEMM), both, strict=True)
        ]
        known = replace(known, costs=known.costs.with_times(times))
    tuned = tuned_plan(known, rules)
    assert tuned is not None
    for plan in (tuned, cheapest_plan(known)):
        assert plan.choices["first"] == Choice(Impl.U8_NATIVE, body=Impl.U8_GEMM)
        assert plan.choices["second"] == Choice(Impl.U8_NATIVE)
        assert [stock_plan(plan).choices[name].impl for name in costs] == [Impl.U8_GEMM, Impl.U8]
        assert native_plan(known.space.facts, plan).choices["first"].body is Impl.U8_GEMM
    plain = {
        name: tuple(form for form in forms if form is not Impl.U8_GEMM) for name, forms in known.space.forms.items()
    }
    tuned = tuned_plan(replace(known, space=replace(known.space, forms=plain)), rules)  # the target would saturate
    assert tuned is not None
    assert tuned.choices["first"] == Choice(Impl.U8_NATIVE)


# ------------------------------------------------------------------------------------------------- what it is worth


@pytest.mark.slow
@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("name", ["digits", "digits_mobile", "digits_transformer"])
def test_more_effort_is_more_accurate_on_other_data(name: str, tmp_path: Path) -> None:
    data, float_model = SAMPLE_MODELS / "digits.npz", SAMPLE_MODELS / f"{name}.onnx"
    found = {}
    for effort in ("low", "medium"):
        output = tmp_path / f"{effort}.onnx"
        options = Options(place="rules", effort=effort, seconds=0.01, force_int8=True)
        quantize_model(float_model, f"{data}:calib", output, options)
        found[effort] = compare_models(float_model, output, str(data)).accuracy.worst_sqnr_db
    assert found["medium"] > found["low"]
