"""Units of an INT8 model one after the other: each sees what the integer units before it really give."""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from requant.calibration.model import session as sessions
from requant.calibration.model.session import Array, open_session
from requant.quantize import Options, quantize_model
from requant.quantize.corrections import layer_by_layer as walking
from requant.quantize.corrections.adjust import find_adjustments
from requant.quantize.corrections.bias import correct_bias
from requant.quantize.corrections.layer_by_layer import BlockLayer, Layer, walk_layers
from requant.quantize.corrections.stream import Stream
from requant.quantize.job import Candidate, Job
from requant.quantize.model.files import serialize
from requant.quantize.runtime.progress import silent
from requant.quantize.steps.prepare import prepare
from requant.quantize.steps.ranges import find_ranges
from requant.transforms.graphs.queries import constant
from requant.transforms.int8.insert_qdq import insert_qdq
from requant.transforms.int8.ops import OPS
from requant.transforms.int8.qparams import dequantize, quantize, quantize_bias
from requant.transforms.int8.weights import Adjustment

Feeds = list[dict[str, Array]]
HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
EPS = float(np.finfo(np.float32).eps)


class Case(NamedTuple):
    """A model of ONNX text, its input, its constants by name, and the units that are walked."""

    text: str
    shape: tuple[int, ...]
    constants: dict[str, tuple[int, ...]]
    walked: str


def conv(shape: str, made: str, nodes: str) -> str:
    return f"g (float[{shape}] x) => (float[{made}] y) {{ {nodes} }}"


CASES = {
    "convolutions": Case(
        conv(
            "1,8,6,6",
            "1,8,6,6",
            """[first] a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1) r = Relu(a)
            [second] c = Conv<pads = [1, 1, 1, 1]>(r, w2, b2)
            s = Add(c, r) [third] y = Conv(s, w3, b3)""",
        ),
        (1, 8, 6, 6),
        {"w1": (8, 8, 3, 3), "b1": (8,), "w2": (8, 8, 3, 3), "b2": (8,), "w3": (8, 8, 1, 1), "b3": (8,)},
        "first second third",
    ),
    "no-biases": Case(
        conv("1,8,6,6", "1,8,4,4", "[first] a = Conv(x, w1) r = Relu(a) [second] y = Conv<pads = [1, 1, 1, 1]>(r, w2)"),
        (1, 8, 6, 6),
        {"w1": (8, 8, 3, 3), "w2": (8, 8, 3, 3)},
        "first second",
    ),
    "groups": Case(
        conv(
            "1,8,6,6",
            "1,8,2,2",
            """[first] a = Conv<group = 4>(x, w1, b1)
            [depthwise] c = Conv<group = 8, pads = [1, 1, 1, 1]>(a, w2, b2)
            [last] y = Conv<group = 2, dilations = [1, 1]>(c, w3)""",
        ),
        (1, 8, 6, 6),
        {"w1": (8, 2, 3, 3), "b1": (8,), "w2": (8, 1, 3, 3), "b2": (8,), "w3": (8, 4, 3, 3)},
        "first depthwise last",
    ),
    "one-axis": Case(
        conv("1,4,12", "1,4,4", "[first] a = Conv<strides = [2]>(x, w1, b1) r = Relu(a) [second] y = Conv(r, w2)"),
        (1, 4, 12),
        {"w1": (6, 4, 3), "b1": (6,), "w2": (4, 6, 2)},
        "first second",
    ),
    "three-axes": Case(
        conv("1,4,5,5,5", "1,4,1,1,1", "[first] a = Conv(x, w1, b1) r = Relu(a) [second] y = Conv(r, w2)"),
        (1, 4, 5, 5, 5),
        {"w1": (6, 4, 3, 3, 3), "b1": (6,), "w2": (4, 6, 3, 3, 3)},
        "first second",
    ),
    "packed-pixels": Case(
        conv(
            "1,3,12,12",
            "1,4,6,6",
            "[first] a = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, w1, b1) r = Relu(a) [second] y = Conv(r, w2)",
        ),
        (1, 3, 12, 12),
        {"w1": (16, 3, 3, 3), "b1": (16,), "w2": (4, 16, 1, 1)},
        "first second",
    ),
    "the-user's-own-blocks": Case(
        conv(
            "1,1,16,16",
            "1,8,4,4",
            """[one] p = Conv(x, w0) [first_blocks] t = SpaceToDepth<blocksize = 2>(p)
            [first] a = Conv<strides = [2, 2]>(t, w1, b1) [second] y = Conv(a, w2)""",
        ),
        (1, 1, 16, 16),
        {"w0": (1, 1, 1, 1), "w1": (16, 4, 2, 2), "b1": (16,), "w2": (8, 16, 1, 1)},
        "one first second",
    ),
    "gemm": Case(
        conv("5,12", "5,6", "[first] a = Gemm<transB = 1>(x, w1, b1) r = Relu(a) [second] y = Gemm(r, w2, b2)"),
        (5, 12),
        {"w1": (10, 12), "b1": (10,), "w2": (10, 6), "b2": (6,)},
        "first second",
    ),
    "products": Case(
        conv("2,5,12", "2,5,6", "[first] a = MatMul(x, w1) r = Relu(a) [second] y = MatMul(r, w2)"),
        (2, 5, 12),
        {"w1": (12, 10), "w2": (10, 6)},
        "first second",
    ),
    "stacked-weights": Case(
        conv("2,5,12", "2,5,6", "[first] a = MatMul(x, w1) [second] y = MatMul(a, w2)"),
        (2, 5, 12),
        {"w1": (2, 12, 10), "w2": (10, 6)},
        "first second",
    ),
}
BIASED = {
    "added": Case(
        conv("2,5,12", "2,5,6", "[first] a = MatMul(x, w1) p = Add(b1, a) [second] y = MatMul(p, w2)"),
        (2, 5, 12),
        {"w1": (12, 10), "b1": (10,), "w2": (10, 6)},
        "first second",
    ),
    "float-between": Case(
        conv("5,12", "5,6", "[first] a = MatMul(x, w1) p = Add(a, b1) e = Erf(p) [second] y = MatMul(e, w2)"),
        (5, 12),
        {"w1": (12, 10), "b1": (10,), "w2": (10, 6)},
        "first second",
    ),
}


def save(folder: Path, case: Case) -> Path:
    random = np.random.default_rng(7)
    proto = onnx.parser.parse_model(HEAD + case.text)
    for node in proto.graph.node:
        node.name = node.name.replace("first_blocks", "first/blocks")  # as packing would call it
    for name, shape in case.constants.items():
        array = random.standard_normal(shape) / math.sqrt(math.prod(shape[1:]))
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


def feeds(case: Case, count: int = 6) -> Feeds:
    random = np.random.default_rng(8)
    return [{"x": random.standard_normal(case.shape).astype(np.float32)} for _ in range(count)]


def made(folder: Path, case: Case, *, widen: float = 1.0, **options: Any) -> tuple[Job, Candidate]:
    """Return a job whose plan has everything in integers, and its INT8 model with nothing corrected."""
    options = {"place": "all", "effort": "medium", "calibration": "minmax", "isa": "vnni"} | options
    job = prepare(save(folder, case), feeds(case), Options(**options), folder, silent)
    ranges = {name: (widen * lo, widen * hi) for name, (lo, hi) in find_ranges(job).ranges.items()}
    qparams = {name: job.scheme.activation_params(*ranges[name]) for name in job.all_int8_plan.observed}
    candidate = Candidate(job.simple, job.all_int8_plan, qparams, b"")
    return job, Candidate(emitted(job, candidate, {}), job.all_int8_plan, qparams, b"")


def emitted(job: Job, candidate: Candidate, adjusted: dict[str, Adjustment]) -> ir.Model:
    model = job.simple.clone()
    insert_qdq(model, plan=candidate.plan, qparams=candidate.qparams, adjusted=adjusted, scheme=job.scheme)
    return model


def tapped(model: ir.Model, names: list[str], data: Feeds) -> list[dict[str, Array]]:
    """Run a model as it is written with other outputs, once for each feed."""
    copy = model.clone()
    known = {v.name: v for v in (*copy.graph.inputs, *(o for node in copy.graph for o in node.outputs))}
    copy.graph.outputs[:] = [known[name] for name in names]
    session = open_session(serialize(copy), optimize=False, lean=True)
    return [dict(zip(names, session.run(names, dict(feed)), strict=True)) for feed in data]


def distort(step: Layer) -> tuple[Adjustment, list[Array]]:
    """Change weights and bias of a unit, and give exactly what the INT8 model then gives.

    A bias that is a whole number of steps is not rounded again.
    """
    random = np.random.default_rng(len(step.unit.name))
    params, bias = step.weights.params, step.weights.bias
    nearest = quantize(step.weights.array, params).astype(np.int64)
    stored = np.clip(nearest + random.integers(-9, 10, nearest.shape), -127, 127).astype(params.zero_point.dtype)
    if OPS[step.unit.op].bias is None:
        return Adjustment(stored=stored), step.run(stored)
    steps = quantize_bias(params.scale, float(step.params.scale), params.scale)
    whole = dequantize(random.integers(-500, 500, params.scale.shape).astype(np.int32), steps)
    weights = dequantize(stored, params)
    shift = whole if bias is None else whole - bias
    return Adjustment(shift, stored), [step.product(x, weights, whole) for x in step.int8_inputs]


def no_blocks(layer: BlockLayer) -> tuple[Adjustment, list[Array]]:
    """Refuse a layer with weights in blocks: none of the models has one."""
    raise AssertionError(layer)


def walked(
    job: Job, candidate: Candidate, data: Feeds, correct: Callable[[Layer], tuple[Adjustment, list[Array]]]
) -> tuple[dict[str, Layer], dict[str, Adjustment]]:
    steps: dict[str, Layer] = {}

    def noted(step: Layer) -> tuple[Adjustment, list[Array]]:
        steps[step.unit.name] = step
        return correct(step)

    return steps, dict(walk_layers(job, candidate, data, noted, no_blocks))


def read_by(step: Layer, model: ir.Model) -> str:
    """Return the name of the integers that a unit reads in an emitted model, or of the pixels that are packed."""
    integers = f"{step.unit.inputs[0]}/quantized"
    names = {value.name for node in model.graph for value in node.outputs}
    return integers if integers in names else str(step.unit.inputs[0])


def integers_of(step: Layer, seen: Array) -> Array:
    return quantize(seen, step.params) if seen.dtype == np.float32 else seen


def equal(one: Sequence[Array], other: Sequence[Array]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# ------------------------------------------------------------------------------------------------ what a step sees


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_sees_what_the_int8_model_reads_once_what_was_found_is_in_it(case: Case, tmp_path: Path) -> None:
    job, candidate = made(tmp_path, case)
    steps, found = walked(job, candidate, feeds(case), distort)
    assert list(steps) == list(found) == case.walked.split()
    model = emitted(job, candidate, found)
    seen = tapped(model, list({read_by(step, model) for step in steps.values()}), feeds(case))
    for step in steps.values():
        integers = [integers_of(step, values[read_by(step, model)]) for values in seen]
        assert equal(step.int8_inputs, [dequantize(each, step.params) for each in integers]), step.unit.name
    last = steps[case.walked.split()[-1]]
    name = read_by(last, model)
    before = tapped(candidate.model, [name], feeds(case))
    assert not equal([row[name] for row in before], [row[name] for row in seen])  # it was distorted


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_only_one_step_reads_is_gone_at_the_next(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of images, the inputs and results of one layer take hundreds of megabytes."""
    job, candidate = made(tmp_path, case)
    before: list[weakref.ref[Any]] = []
    take = Stream.take

    def taken(stream: Stream, value: ir.Value) -> list[Array]:
        assert not [each for each in before if each() is not None]
        return take(stream, value)

    def noted(step: Layer) -> tuple[Adjustment, list[Array]]:
        before[:] = [weakref.ref(each) for each in (step, *step.int8_inputs)]
        return correct_bias(step)

    monkeypatch.setattr(Stream, "take", taken)
    assert len(dict(walk_layers(job, candidate, feeds(case), noted, no_blocks))) == len(case.walked.split())
    assert before


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_knows_the_float_model(case: Case, tmp_path: Path) -> None:
    job, candidate = made(tmp_path, case)
    steps, _ = walked(job, candidate, feeds(case), distort)
    rows = tapped(job.simple, [str(step.node.outputs[0].name) for step in steps.values()], feeds(case))
    seen = [{**feed, **row} for feed, row in zip(feeds(case), rows, strict=True)]
    for step in steps.values():
        assert equal(step.float_results, [row[str(step.node.outputs[0].name)] for row in seen])


def test_first_convolutions_are_packed_here(tmp_path: Path) -> None:
    """Else the cases above would not be about that."""
    counts = {}
    for name in ("packed-pixels", "the-user's-own-blocks", "convolutions"):
        _, candidate = made(tmp_path, CASES[name])
        counts[name] = [str(node.name) for node in candidate.model.graph if node.op_type == "SpaceToDepth"]
    assert counts == {
        "packed-pixels": ["first/blocks"],
        "the-user's-own-blocks": ["first/blocks"],
        "convolutions": [],
    }


@pytest.mark.parametrize("place", ["all", "rules"])
@pytest.mark.parametrize("case", BIASED.values(), ids=BIASED)
def test_the_bias_behind_a_product_is_corrected(case: Case, place: str, tmp_path: Path) -> None:
    """The INT8 model has the shift in the Add, that is behind the product's own rounding, or in another float sum."""
    job, candidate = made(tmp_path, case, widen=3.0, place=place)  # wide, so that nothing is clipped before the Add
    form = {"MatMulIntegerToFloat"} if place == "rules" else set()
    assert form == {node.op_type for node in candidate.model.graph} & {"MatMulIntegerToFloat"}
    plain, found = walked(job, candidate, feeds(case), correct_bias)
    assert list(plain) == case.walked.split()
    assert [step.has_bias for step in plain.values()] == [adjustment.shift is not None for adjustment in found.values()]
    assert [step.has_bias for step in plain.values()] == [True, False]

    def shifted(step: Layer) -> tuple[Adjustment, list[Array]]:
        given = step.run(quantize(step.weights.array, step.weights.params))
        shift = np.ones(10, np.float32) if step.has_bias else None
        return Adjustment(shift), given if shift is None else [y + shift for y in given]

    steps, adjusted = walked(job, candidate, feeds(case), shifted)
    model, step = emitted(job, candidate, adjusted), steps["second"]
    name = read_by(step, model)
    seen = [dequantize(integers_of(step, row[name]), step.params) for row in tapped(model, [name], feeds(case))]
    # each rounding of an activation differs by at most a step, that of the added constants by half of theirs, twice
    constants = job.simple.graph.initializers["b1"].const_value
    assert constants is not None
    widest = float(np.ptp([0, *constants.numpy(), *(constants.numpy() + 1)]))
    bound = sum(float(params.scale) for params in candidate.qparams.values()) + widest / 255
    assert greatest(step.int8_inputs, seen) <= bound
    assert greatest(step.int8_inputs, plain["second"].int8_inputs) > 2 * bound  # so that the shift has arrived


def greatest(one: Sequence[Array], other: Sequence[Array]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


# --------------------------------------------------------------------------------------------------- what is walked

BODY = Case(
    """g (float[4,8] x) => (float[4,8] y) {
        [outside] a = MatMul(x, w1)
        total = ReduceSum<keepdims = 0>(a)
        some = Greater(total, zero)
        c = If (some) <
            then_branch = t () => (float[4,8] u) { [inside] u = MatMul(a, w2) },
            else_branch = e () => (float[4,8] v) { v = Neg(a) }
        >
        [behind] y = MatMul(c, w1)
    }""",
    (4, 8),
    {"w1": (8, 8), "w2": (8, 8), "zero": ()},
    "outside behind",
)


def test_units_in_bodies_are_not_walked(tmp_path: Path) -> None:
    job, candidate = made(tmp_path, BODY)
    integer = [unit.name for unit in candidate.plan.units if candidate.plan.impl(unit).reads_u8]
    assert {"outside", "inside", "behind"} <= set(integer)
    assert list(walked(job, candidate, feeds(BODY), distort)[0]) == ["outside", "behind"]


def test_weights_of_two_units_get_integers_of_their_own(tmp_path: Path) -> None:
    case = Case(
        conv("5,8", "5,8", "[first] a = MatMul(x, w) r = Relu(a) [second] y = MatMul(r, w)"),
        (5, 8),
        {"w": (8, 8)},
        "first second",
    )
    job, candidate = made(tmp_path, case)
    _, found = walked(job, candidate, feeds(case), distort)
    model = emitted(job, candidate, found)

    def stored(model: ir.Model, name: str) -> Array:
        node = next(node for node in model.graph if node.name == name)
        found = [value.producer() for value in node.inputs[1:2] if value is not None]
        given = found[0].inputs[0] if found[0] is not None else node.inputs[1]
        tensor = constant(given)
        assert tensor is not None
        return tensor.numpy()

    stay = stored(candidate.model, "first")
    assert np.array_equal(stay, stored(candidate.model, "second"))
    for name in ("first", "second"):
        assert np.array_equal(stored(model, name), found[name].stored)  # type: ignore[arg-type]
    assert not np.array_equal(stored(model, "first"), stored(model, "second"))
    only = emitted(job, candidate, {"second": found["second"]})
    assert np.array_equal(stored(only, "first"), stay)
    assert np.array_equal(stored(only, "second"), found["second"].stored)  # type: ignore[arg-type]


def test_a_limit_of_memory_halves_the_samples_of_both_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["convolutions"]
    job, candidate = made(tmp_path, case)
    plain, _ = walked(job, candidate, feeds(case, 7), distort)
    each = 4 * 8 * 36  # bytes of one sample of a float tensor; of 7 samples, 14 are held behind the first, then 22.75
    for limit, counts in ((1000 * each, [7, 7, 7]), (20 * each, [7, 7, 4]), (13.5 * each, [7, 4, 4]), (1, [7, 4, 2])):
        monkeypatch.setattr(walking, "MEMORY", limit)
        steps, _ = walked(job, candidate, feeds(case, 7), distort)
        for step, count in zip(steps.values(), counts, strict=True):
            assert [len(arrays) for arrays in (step.int8_inputs, step.float_results)] == [count] * 2
            assert equal(step.int8_inputs, plain[step.unit.name].int8_inputs[:count])
    monkeypatch.setattr(walking, "MEMORY", 1000 * each)
    execution = replace(job.options.execution, memory_limit=walking.SHARE * 20 * each)
    limited, _ = walked(
        replace(job, options=replace(job.options, execution=execution)), candidate, feeds(case, 7), distort
    )
    assert [len(step.float_results) for step in limited.values()] == [7, 7, 4]


def test_another_format_is_corrected_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[dict[str, Adjustment]] = []

    def noted(job: Job, candidate: Candidate) -> dict[str, Adjustment]:
        kept.append(find_adjustments(job, candidate))
        return kept[-1]

    monkeypatch.setattr("requant.quantize.steps.emit.find_adjustments", noted)
    case = CASES["groups"]
    model = save(tmp_path, case)
    for form in ("qdq", "qoperator"):
        options = Options(place="rules", format=form, seconds=0.01, force_int8=True, force=True)
        quantize_model(model, feeds(case), tmp_path / "o.onnx", options)
    one, other = kept
    assert list(one) == list(other) == case.walked.split()
    for name, adjustment in one.items():
        assert np.array_equal(adjustment.shift, other[name].shift)  # type: ignore[arg-type]
        assert (adjustment.stored is None) == (other[name].stored is None)
        assert adjustment.stored is None or np.array_equal(adjustment.stored, other[name].stored)  # type: ignore[arg-type]


@pytest.mark.slow
def test_corrections_run_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime rounds differently on several threads: the model must not depend on the number of CPUs."""
    threads: list[object] = []
    options_of = sessions._session_options

    def recorded(*args: Any, **kwargs: Any) -> Any:
        callers = {frame.f_globals["__name__"] for frame, _ in traceback.walk_stack(None)}
        if any(caller.startswith("requant.quantize.corrections.") for caller in callers):
            threads.append(kwargs["threads"])
        return options_of(*args, **kwargs)

    monkeypatch.setattr(sessions, "_session_options", recorded)
    options = Options(place="rules", samples=8, seconds=0.0, force_int8=True)
    quantize_model(SAMPLE_MODELS / "digits.onnx", f"{SAMPLE_MODELS}/digits.npz:calib", tmp_path / "out.onnx", options)
    assert threads
    assert set(threads) == {1}


SELECTING = """<ir_version: 8, opset_import: ["" : 17]> net (float[256, 16] x) => (float[M, 16] y) {
    h = MatMul(x, w)
    first = Slice(h, zero, one, one)  above = Greater(first, nothing)  rows = Squeeze(above, one)
    found = NonZero(rows)  picked = Squeeze(found, zero)
    some = Gather(h, picked)
    y = MatMul(some, v)
}"""


def test_layers_behind_lengths_that_differ_in_int8_are_left_alone(
    tmp_path: Path, int8_wins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding moves a few values over the threshold: the second product has other rows than in float."""
    walked, made = [], walking._layer

    def layer(visit: Any, *others: Any) -> Layer:
        walked.append(str(visit.node.inputs[1].name))
        return made(visit, *others)

    monkeypatch.setattr(walking, "_layer", layer)
    proto = onnx.parser.parse_model(SELECTING)
    rng = np.random.default_rng(0)
    matrices = {name: rng.standard_normal((16, 16)).astype(np.float32) for name in "wv"}
    constants = {"zero": np.array([0]), "one": np.array([1]), "nothing": np.float32(0), **matrices}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items())
    onnx.save(proto, tmp_path / "m.onnx")
    feeds = [{"x": rng.standard_normal((256, 16)).astype(np.float32)} for _ in range(16)]
    options = Options(place="rules", force_int8=True, corrections=("rounding",), seconds=0.01)
    found = quantize_model(tmp_path / "m.onnx", feeds, tmp_path / "q.onnx", options)
    assert found.accuracy.other_lengths
    assert found.int8_nodes >= 2
    assert walked == ["w"]
