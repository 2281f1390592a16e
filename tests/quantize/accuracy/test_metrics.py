"""Metrics by name, scores over data, and two models' scores against each other."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from requant import RequantError
from requant.calibration import Sample
from requant.calibration.data.sources import Source, open_source
from requant.calibration.model.session import Array, Serialized, input_specs, open_session
from requant.cli import main
from requant.quantize.accuracy.drop import Allowance, parse_drop, reaches, same_data, versus
from requant.quantize.accuracy.metrics import (
    METRICS,
    Metric,
    Reference,
    Score,
    Scorer,
    join,
    metric_named,
    of_reference,
)
from requant.quantize.accuracy.metrics import score as score_of
from requant.quantize.accuracy.metrics.intervals import area_interval, bootstrap, students_t
from requant.quantize.accuracy.outputs import measure
from requant.quantize.accuracy.shares import binomial_p, paired_interval
from requant.quantize.accuracy.sqnr import decibels
from requant.quantize.runtime.as_file import as_file
from requant.quantize.runtime.session import Runner

EPS = 2.0**-52


def scored(metric: str | Metric, outputs: Sequence[Array], labels: Sequence[Any], **more: Any) -> Score:
    """Score a model that gives these outputs, a batch for each sample."""
    chosen = METRICS[metric] if isinstance(metric, str) else metric
    scorer = Scorer(chosen)
    feeds = more.get("feeds") or [{"x": np.zeros((len(value), 1), np.float32)} for value in outputs]
    references = more.get("references") or [None] * len(outputs)
    for index, value in enumerate(outputs):
        sample = Sample(feeds[index], labels[index], f"sample {index}")
        kept = {} if references[index] is None else chosen.kept({"out": references[index]}, sample)
        scorer.add({"out": value}, sample, kept)
    return scorer.result()


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def whole(top: int, *shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, top, shape)


# --------------------------------------------------------------------------------------------- against definitions


@pytest.mark.parametrize(("name", "k"), [("top1", 1), ("top5", 5)])
def test_a_class_is_right_among_the_k_that_score_highest(name: str, k: int) -> None:
    scores, labels = np.round(normal(40, 12), 0), whole(12, 40)  # rounded, so that scores are equal
    right = [
        label in sorted(range(12), key=lambda c: (-row[c], c))[:k] for row, label in zip(scores, labels, strict=True)
    ]
    found = scored(name, [scores], [labels])
    assert found.value == np.mean(right)
    assert found.items is not None
    assert found.items.tolist() == right


@given(st.lists(st.tuples(st.integers(-2, 3), st.integers(-1, 3)), min_size=1, max_size=30))
def test_top1_is_what_compare_counts(cases: list[tuple[int, int]]) -> None:
    """Scores of one class, of none (NaN) or of two alike, against labels with some below 0, which do not count."""
    rows = np.zeros((len(cases), 4), np.float32)
    for row, (best, _) in zip(rows, cases, strict=True):
        row[best if best >= 0 else slice(None)] = 1 if best >= 0 else np.nan if best == -1 else 0
    labels = np.asarray([label for _, label in cases])
    counted = measure(lambda _: {"out": rows}, lambda _: {"out": rows}, [Sample({}, labels, "")]).labelled
    if counted is None:
        with pytest.raises(RequantError, match="no item of 1 sample has a label that counts"):
            scored("top1", [rows], [labels])
    else:
        found = scored("top1", [rows], [labels])
        assert (found.value, found.parts is not None and len(found.parts)) == (counted.float_accuracy, counted.items)


def test_agreement_is_with_the_float_model() -> None:
    before, after = normal(30, 5), normal(30, 5) + normal(30, 5, seed=2)
    after[3] = np.nan
    found = scored("agreement", [after], [None], references=[before])
    counted = measure(lambda _: {"out": before}, lambda _: {"out": after}, [Sample({"x": np.zeros((30, 1))}, None, "")])
    assert found.value == counted.agreement
    best = of_reference(found)
    assert (best.value, METRICS["agreement"].of(best.parts)) == (1.0, 1.0)  # type: ignore[arg-type]


def test_sqnr_is_of_the_worst_output() -> None:
    metric, scorer = METRICS["sqnr"], Scorer(METRICS["sqnr"])
    exact = [{"a": normal(2, 3, seed=i), "b": normal(4, seed=i), "class": np.array([1])} for i in range(3)]
    other = [{name: value + (name == "b") for name, value in outputs.items()} for outputs in exact]
    for one, two in zip(exact, other, strict=True):
        scorer.add(two, Sample({}, None, ""), one)
    noise = {
        n: sum(float(np.sum(np.square(np.float64(o[n]) - e[n]))) for e, o in zip(exact, other, strict=True))
        for n in "ab"
    }
    assert noise["a"] == 0
    signal = sum(float(np.sum(np.square(np.float64(e["b"])))) for e in exact)
    found = scorer.result()
    # 12 terms are added up in another order, each sum off by 12 eps of itself; 10 log10(1 + x) is at most 4.35 x
    assert found.value == pytest.approx(decibels(signal, noise["b"]), abs=4.35 * 4 * 12 * EPS * 10)
    best = of_reference(found)
    assert best.value == metric.of(best.parts) == math.inf  # type: ignore[arg-type]


def test_perplexity_is_of_all_tokens_that_have_a_label() -> None:
    logits, labels = 4 * normal(3, 7, 11), whole(11, 3, 7)
    labels[0, 2:], labels[2, 0] = -100, -1
    chances = [
        math.exp(float(logits[n, t, labels[n, t]])) / sum(math.exp(float(v)) for v in logits[n, t])
        for n, t in product(range(3), range(7))
        if labels[n, t] >= 0
    ]
    found = scored("perplexity", [logits[:2], logits[2:]], [labels[:2], labels[2:]])
    # exp and log of 11 terms each are off by a few eps; the mean of 15 logarithms of at most 30 keeps that
    assert found.value == pytest.approx(math.exp(-np.mean(np.log(chances))), rel=30 * 40 * EPS)
    assert found.parts is not None
    assert found.parts[:, 1].tolist() == [2, 7, 6]
    assert found.rows is None  # a sequence is an item


@pytest.mark.parametrize("mask", [False, True])
def test_without_labels_the_next_tokens_are_foretold(mask: bool) -> None:
    tokens, logits = whole(9, 1, 6), normal(1, 6, 9)
    seen = np.array([[1, 1, 1, 1, 0, 0]])
    feed = {"input_ids": tokens, "position_ids": np.arange(6)[None]} | ({"attention_mask": seen} if mask else {})
    labels = np.append(tokens[:, 1:], [[-1]], axis=1)
    labels = np.where(np.append(seen[:, 1:], [[0]], axis=1) == 0, -1, labels) if mask else labels
    found, wanted = scored("perplexity", [logits], [None], feeds=[feed]), scored("perplexity", [logits], [labels])
    assert found.value == wanted.value
    assert "without labels" in found.notes[0]
    assert wanted.notes == ()


def test_nan_among_the_scores_makes_perplexity_infinite() -> None:
    logits = normal(1, 3, 4)
    logits[0, 1, 2] = np.nan
    assert scored("perplexity", [logits], [np.zeros((1, 3), int)]).value == math.inf


@pytest.mark.parametrize(
    ("kind", "peak"), [(np.float32, 1.0), (np.uint8, 255.0), (np.int64, 255.0), (np.uint16, 65535.0)], ids=str
)
def test_psnr_is_the_mean_over_images(kind: Any, peak: float) -> None:
    targets = (whole(200, 2, 1, 4, 5) * (1 if peak > 1 else 1 / 256)).astype(kind)
    outputs = (targets + np.array([1, 2]).reshape(2, 1, 1, 1) * peak / 128).astype(np.float32)
    found = scored("psnr", [outputs], [targets[:, 0]])  # labels without the axis of one channel
    assert found.items is not None
    # outputs are float32: off by half a unit, 2^-24 of at most twice the peak, of steps of 1/128 of the peak
    assert found.items == pytest.approx([20 * math.log10(128), 20 * math.log10(64)], abs=8.7 * 2**-23 * 128)
    assert found.value == np.mean(found.items)


def test_an_image_that_is_equal_counts_as_one_off_by_half_a_unit() -> None:
    image = np.full((1, 4), 0.5, np.float32)
    assert scored("psnr", [image], [image]).value == -20 * math.log10(2.0**-24)


@pytest.mark.parametrize("as_classes", [False, True], ids=["scores", "classes"])
def test_miou_is_of_all_pixels_together(as_classes: bool) -> None:
    scores, labels = normal(3, 4, 6, 8), whole(4, 3, 6, 8)
    labels[labels == 3] = 2  # class 3 is found, but nowhere right
    labels[0, 0, :3], labels[1, 1, 1] = 255, -1
    found = scores.argmax(1)
    outputs = found if as_classes else scores
    pixels = [
        (int(f), int(t)) for f, t in zip(found.reshape(-1), labels.reshape(-1), strict=True) if t not in (255, -1)
    ]
    shares = [sum(f == t == c for f, t in pixels) / sum(c in (f, t) for f, t in pixels) for c in range(4)]
    score = scored("miou", [outputs[:1], outputs[1:]], [labels[:1], labels[1:]])
    assert score.value == pytest.approx(np.mean(shares), rel=8 * EPS)
    assert score.items is None


def test_maps_of_different_numbers_of_classes_are_added_up() -> None:
    one, two = np.array([[[0, 1]]]), np.array([[[0, 5]]])
    assert scored("miou", [one, two], [one, two]).value == 1.0
    assert scored("miou", [one, two], [one, one]).value == (2 / 2 + 1 / 2 + 0 / 1) / 3


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=2, max_size=25))
def test_auroc_is_the_share_of_pairs_in_order(cases: list[tuple[int, int]]) -> None:
    scores, labels = (np.asarray(column) for column in zip(*cases, strict=True))
    ones, zeros = scores[labels == 1], scores[labels == 0]
    outputs = scores.astype(np.float32)[:, None]
    if not len(ones) or not len(zeros):
        with pytest.raises(RequantError, match="auroc needs labels 0 and 1; all"):
            scored("auroc", [outputs], [labels])
        return
    pairs = sum((a > b) + (a == b) / 2 for a, b in product(ones, zeros))
    assert scored("auroc", [outputs], [labels]).value == pairs / (len(ones) * len(zeros))  # numerators are exact
    two = np.concatenate([-outputs, outputs], axis=1)
    assert scored("auroc", [two], [labels]).value == pairs / (len(ones) * len(zeros))


def test_a_score_of_nan_is_the_lowest() -> None:
    assert scored("auroc", [np.array([[np.nan], [-9.0]])], [np.array([1, 0])]).value == 0.0


# --------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("metric", "output", "label", "mention"),
    [
        ("top1", normal(1, 4), None, "no label, but top1 needs one; agreement and sqnr need none"),
        ("top1", normal(1, 4), 4, "label 4, but the output has 4 classes, counted from 0"),
        ("top1", normal(1, 4), np.array([0, 3]), "labels of shape (2,) for predictions of shape (1,)"),
        ("top1", normal(1, 4), np.eye(4)[2], "for predictions of shape (1,); of one-hot labels give labels.argmax(-1)"),
        ("top1", normal(1, 4), np.array([0.5]), "labels of float64, but labels must be classes"),
        ("top1", normal(1, 1), 0, "no output holds scores per class; top1 needs one"),
        ("top5", normal(1, 5), 0, "top5 of 5 classes is always right; use top1"),
        ("agreement", normal(1, 1), None, "no output holds scores per class; use sqnr"),
        ("perplexity", normal(1, 3, 4), None, "no label, and 0 integer inputs (N, T)"),
        ("perplexity", normal(1, 3, 4), np.zeros((1, 5), int), "no output holds scores (1, 5, 'V')"),
        ("perplexity", normal(1, 3, 4), np.full((1, 3), 4), "label 4, but the output has 4 classes"),
        ("psnr", normal(1, 3, 4), np.zeros((1, 4, 4)), "no output fits a target of shape (1, 4, 4): out (1, 3, 4)"),
        ("miou", normal(1, 3, 4, 4), np.zeros((1, 5, 5), int), "no output fits a label of shape (1, 5, 5)"),
        ("miou", normal(1, 3, 4, 4), np.full((1, 4, 4), 3), "label 3, but the output has 3 classes"),
        ("auroc", normal(1, 1), 2, "label 2, but auroc needs labels 0 and 1"),
        ("auroc", normal(1, 3), np.zeros((1, 4)), "no output fits a label of shape (1, 4): out (1, 3)"),
    ],
)  # fmt: skip
def test_what_a_metric_cannot_take_is_refused_at_the_sample(
    metric: str, output: Array, label: Any, mention: str
) -> None:
    with pytest.raises(RequantError) as caught:
        scored(metric, [output], [label], references=[output] if METRICS[metric].reference else None)
    assert str(caught.value).startswith("sample 0: ")
    assert mention in str(caught.value)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------ the user's function

FUNCTIONS = """
import numpy as np
def items(outputs, labels):
    return [float(o["y"].argmax() == l) for o, l in zip(outputs, labels)]
def number(outputs, labels):
    return len(outputs) + len(labels)
def size(path):
    import onnx
    return len(onnx.load(path).graph.node)
def error(outputs, labels, *, scale=1):
    return 3.0
error.higher_is_better = False
def fails(outputs, labels):
    raise ValueError("of no\\nuse")
def nothing(outputs, labels):
    return None
def table(outputs, labels):
    return np.zeros((2, 2))
def nan(outputs, labels):
    return float("nan")
def three(a, b, c):
    return 0
number_seven = 7
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return lambda name: f"{tmp_path / 'mine.py'}:{name}"


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A model that gives back its input: what is fed are the outputs."""
    path = tmp_path / "echo.onnx"
    text = '<ir_version: 8, opset_import: ["": 17]> echo (float[N, 4] x) => (float[N, 4] y) { y = Identity(x) }'
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def source_of(model: Path, rows: Array, labels: Sequence[Any] | None = None) -> Source:
    data = [{"x": row[None]} if labels is None else ({"x": row[None]}, labels[i]) for i, row in enumerate(rows)]
    return open_source(data, input_specs(open_session(model)))


@pytest.mark.parametrize(
    ("name", "value", "items"), [("items", 0.75, [1, 1, 0, 1]), ("number", 8.0, None), ("error", 3.0, None)]
)
def test_a_function_of_outputs_and_labels(own: Any, echo: Path, name: str, value: float, items: Any) -> None:
    metric = metric_named(own(name))
    found = score_of(metric, echo, source_of(echo, np.eye(4, dtype=np.float32), [0, 1, 0, 3]))
    assert (found.value, found.samples) == (value, 4)
    assert items is None or found.items.tolist() == items  # type: ignore[union-attr]
    assert metric.higher_is_better == (name != "error")
    assert not metric_named(own(name), lower=True).higher_is_better


@pytest.mark.parametrize("kind", ["path", "bytes", "serialized"])
def test_a_function_of_a_model(own: Any, echo: Path, kind: str) -> None:
    data = echo.read_bytes()
    model: Any = {"path": echo, "bytes": data, "serialized": Serialized(data)}[kind]
    found = score_of(metric_named(own("size")), model, source_of(echo, normal(1, 4)))
    assert (found.value, found.parts, found.samples) == (1.0, None, 0)


@pytest.mark.parametrize(
    ("name", "mention"),
    [
        ("fails", "ValueError: of no use"),
        ("nothing", "returned None, but must return a number or an array of numbers"),
        ("table", "returned an array of shape (2, 2), but must return a number or the score of each item"),
        ("nan", "returned NaN"),
    ],
)
def test_a_function_that_fails_says_so_in_one_line(own: Any, echo: Path, name: str, mention: str) -> None:
    with pytest.raises(RequantError) as caught:
        score_of(metric_named(own(name)), echo, source_of(echo, normal(2, 4)))
    assert f"metric {own(name)}" in str(caught.value)
    assert mention in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mention"),
    [
        ("top2", "top1"),
        ("missing.py:f", "missing.py: no such file"),
        ("{own}:three", "takes (a, b, c); a metric takes a model's path, or (outputs, labels)"),
        ("{own}:number_seven", "an int is not a function"),
        ("{own}:tems", "items"),
    ],
)
def test_what_is_no_metric_is_refused(own: Any, text: str, mention: str) -> None:
    with pytest.raises(RequantError) as caught:
        metric_named(text.format(own=own("")[:-1]))
    assert mention in str(caught.value)


def test_a_metric_of_ours_is_not_turned_around() -> None:
    assert metric_named("perplexity", lower=True) is METRICS["perplexity"]
    with pytest.raises(RequantError, match="higher is better"):
        metric_named("top1", lower=True)


def test_a_model_in_memory_is_written_with_its_weights(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }'
    )
    model = onnx.parser.parse_model(text)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.data")
    outside = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    with as_file(Serialized(outside.SerializeToString(), tmp_path)) as path:
        assert open_session(path).run(None, {"x": np.zeros(2, np.float32)})[0].tolist() == [1, 2]
    assert not Path(path).exists()


# ----------------------------------------------------------------------------------------------------------- scores


def test_every_metric_says_what_it_needs() -> None:
    for name, metric in METRICS.items():
        assert metric_named(name) is metric
        assert metric.labels in ("needed", "used", "none")
        assert metric.reference == (metric.labels == "none")
        assert metric.about
        assert pickle.loads(pickle.dumps(metric)).name == name  # another process may score


def test_labels_are_wanted_before_the_model_is_loaded(tmp_path: Path, echo: Path) -> None:
    source = source_of(echo, normal(2, 4))
    with pytest.raises(RequantError, match="sample 0: no label"):
        score_of(METRICS["top1"], tmp_path / "missing.onnx", source)


def test_a_reference_is_run_once_for_many_models(echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    module = "requant.quantize.accuracy.metrics.scoring.Runner"
    real: Any = Runner

    class Counted(real):  # type: ignore[misc]
        def __init__(self, model: Any, **more: Any) -> None:
            super().__init__(model, **more)
            self.model = str(model)

        def __call__(self, feed: Any) -> Any:
            runs.append(Path(self.model).name)
            return super().__call__(feed)

    monkeypatch.setattr(module, Counted)
    other = echo.with_name("other.onnx")
    other.write_bytes(echo.read_bytes())
    source = source_of(echo, normal(5, 4))
    for metric, room, expected in (
        ("agreement", 2**20, 5),
        ("sqnr", 2**20, 5),
        ("sqnr", 3 * 16, 5 + 2),
        ("sqnr", 0, 10),
    ):
        runs.clear()
        reference = Reference(METRICS[metric], echo, room=room)
        for _ in range(2):
            assert score_of(METRICS[metric], other, source, reference=reference).value in (1.0, math.inf)
        assert runs.count("echo.onnx") == expected
    assert score_of(METRICS["agreement"], other, source, reference=echo).value == 1.0
    with pytest.raises(RequantError, match="agreement compares outputs with the outputs of the float model"):
        score_of(METRICS["agreement"], other, source)


def test_labels_of_any_shape_come_from_a_file_of_arrays(tmp_path: Path) -> None:
    path = tmp_path / "map.onnx"
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2, 3, 5] x) => (float[N, 2, 3, 5] y) { y = Identity(x) }'
    )
    onnx.save(onnx.parser.parse_model(text), path)
    scores = normal(6, 2, 3, 5)
    labels = scores.argmax(1)
    labels[0, 0, 0] ^= 1
    np.savez(tmp_path / "d.npz", x=scores, labels=labels)
    np.savez(tmp_path / "images.npz", x=scores, labels=scores)
    specs = input_specs(open_session(path))
    found = score_of(METRICS["top1"], path, open_source(str(tmp_path / "d.npz"), specs))
    assert found.value == 89 / 90
    assert found.rows is not None
    assert found.rows.tolist() == [n for n in range(6) for _ in range(15)]
    assert score_of(METRICS["psnr"], path, open_source(str(tmp_path / "images.npz"), specs)).value > 144


def test_items_of_one_entry_are_added_up_where_there_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, labels = [normal(2, 3, 8, seed=i) for i in range(4)], [whole(8, 2, 3, seed=i) for i in range(4)]
    usual = scored("top1", outputs, labels)
    monkeypatch.setattr("requant.quantize.accuracy.metrics.scoring.MOST", 8)
    small = scored("top1", outputs, labels)
    assert usual.value == small.value
    assert small.parts is not None
    assert small.parts[:, 1].sum() == 24
    assert len(small.parts) <= 8 + 6
    assert versus(small, small).broken is None  # they are no longer told apart


@pytest.mark.parametrize("name", ["top1", "perplexity", "miou", "auroc"])
def test_scores_of_pieces_are_joined(name: str) -> None:
    outputs = (
        [normal(2, 3, 4, 4, seed=i) for i in range(4)]
        if name == "miou"
        else [normal(2, 3, 6, seed=i) for i in range(4)]
    )
    shape, most = {"miou": ((2, 4, 4), 3), "auroc": ((2, 3, 6), 2)}.get(name, ((2, 3), 6))
    labels = [whole(most, *shape, seed=i) for i in range(4)]
    all_of_it = scored(name, outputs, labels)
    joined = join([scored(name, outputs[:1], labels[:1]), scored(name, outputs[1:], labels[1:])])
    assert joined.value == all_of_it.value
    assert np.array_equal(joined.parts, all_of_it.parts)  # type: ignore[arg-type]
    assert (joined.rows is None) == (all_of_it.rows is None)
    assert joined.rows is None or np.array_equal(joined.rows, all_of_it.rows)  # type: ignore[arg-type]
    assert joined.samples == 4


# ----------------------------------------------------------------------------------------------------------- versus


def binary(*items: int) -> Score:
    parts = np.array([[item, 1] for item in items], float)
    return Score(METRICS["top1"], METRICS["top1"].of(parts), parts, samples=len(items))


def test_broken_and_fixed_items_are_counted() -> None:
    found = versus(binary(1, 1, 1, 0, 0, 1), binary(0, 1, 0, 1, 0, 0))
    assert (found.broken, found.fixed, found.items) == (3, 1, 6)
    assert found.drop == found.before - found.after
    assert found.relative_drop == found.drop / found.before
    assert found.p_value == binomial_p(3, 1)
    assert found.drop_interval == paired_interval(3, 1, 6)
    assert json.loads(json.dumps(found.to_json()))["drop_interval"] == list(found.drop_interval)


def test_where_lower_is_better_broken_items_are_those_that_grow() -> None:
    metric = Metric(name="error", higher_is_better=False, mean=True, value=METRICS["top1"].value)
    before, after = (Score(metric, found.value, found.parts) for found in (binary(0, 0, 1), binary(1, 1, 1)))
    found = versus(before, after)
    assert (found.broken, found.fixed) == (2, 0)
    assert found.drop > 0


def test_items_of_one_entry_are_not_independent() -> None:
    """Three tokens broken in one text and one fixed in another are one text against one."""
    rows = np.repeat(np.arange(6), 3)
    before, after = np.ones(18), np.ones(18)
    after[:3], before[4] = 0, 0
    one, two = (
        Score(METRICS["top1"], float(x.mean()), np.stack([x, np.ones(18)], axis=1), rows) for x in (before, after)
    )
    found = versus(one, two)
    assert (found.broken, found.fixed, found.p_value) == (3, 1, binomial_p(1, 1))
    assert "bootstrap of 6 entries" in found.method
    assert found.drop_interval is not None
    narrow = paired_interval(3, 1, 18)
    assert found.drop_interval[1] - found.drop_interval[0] > narrow[1] - narrow[0]


def test_only_scores_of_the_same_items_are_compared() -> None:
    with pytest.raises(RequantError, match="2 and 3 items; the scores are of different data"):
        versus(binary(1, 1), binary(1, 1, 0))
    with pytest.raises(RequantError, match="a score in top1 cannot be compared with a score in top5"):
        versus(binary(1), Score(METRICS["top5"], 1.0))


def test_a_score_without_items_has_no_interval() -> None:
    found = versus(Score(METRICS["top1"], 0.5), Score(METRICS["top1"], 0.25))
    assert (found.drop, found.relative_drop, found.drop_interval, found.broken) == (0.25, 0.5, None, None)
    assert found.method.startswith("none")


def test_an_infinite_drop_is_null_in_json() -> None:
    noisy = scored("sqnr", [normal(2, 4)] * 6, [None] * 6, references=[normal(2, 4) + 0.1] * 6)
    found = versus(of_reference(noisy), noisy)
    assert found.drop == math.inf
    told = found.to_json()
    assert (told["float"], told["drop"], told["relative_drop"], told["drop_interval"]) == (None, None, None, None)
    assert versus(noisy, noisy).drop == 0


@pytest.mark.parametrize("name", ["perplexity", "miou", "psnr", "auroc", "sqnr"])
def test_a_model_drops_nothing_against_itself(name: str) -> None:
    outputs = [normal(1, 2, 4, 4, seed=i) for i in range(8)]
    labels = [whole(2, 1, 2, 4, 4, seed=i) if name != "miou" else whole(2, 1, 4, 4, seed=i) for i in range(8)]
    outputs, labels = (
        ([o[0] for o in outputs], [la[0, :, :, 0] for la in labels]) if name == "perplexity" else (outputs, labels)
    )
    references = [value + 0.1 for value in outputs] if name == "sqnr" else None
    found = scored(name, outputs, labels, references=references)
    assert versus(found, found).drop == 0
    assert versus(found, found).drop_interval == (0.0, 0.0)


@pytest.mark.parametrize(("broken", "fixed"), [(0.03, 0.03), (0.1, 0.02), (0.01, 0.005), (0.3, 0.1)])
def test_the_interval_of_paired_shares_covers_the_truth(broken: float, fixed: float) -> None:
    """The chance of all outcomes of 60 items whose interval holds the true drop, added up."""
    n, covered = 60, 0.0
    for b in range(n + 1):
        for c in range(n + 1 - b):
            low, high = paired_interval(b, c, n)
            if low <= broken - fixed <= high:
                ways = math.comb(n, b) * math.comb(n - b, c)
                covered += ways * broken**b * fixed**c * (1 - broken - fixed) ** (n - b - c)
    assert covered >= 0.94  # 0.95 on average over what is true; counts are discrete


@pytest.mark.parametrize("n", [8, 30])
def test_the_bootstrap_covers_the_truth(n: int) -> None:
    """Of 400 samples from a normal distribution, 95 % give or take 3 sigma of 1.1 % hold its mean."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        values = random.standard_normal(n) + 5
        one, two = (np.stack([x, np.ones(n)], axis=1) for x in (values, np.zeros(n)))
        interval = bootstrap(METRICS["psnr"], one, two)
        assert interval is not None
        covered += interval[0] <= 5 <= interval[1]
    assert 0.917 <= covered / 400 <= 0.983


def test_the_bootstrap_of_a_pooled_metric_is_that_of_the_delta_method() -> None:
    """Losses of texts of unequal length: the variance of the ratio of sums, to first order."""
    random = np.random.default_rng(3)
    tokens = random.integers(20, 60, 400).astype(float)
    loss = tokens * (1.4 + 0.1 * random.standard_normal(400))
    worse = loss + tokens * (0.02 + 0.05 * random.standard_normal(400))
    one, two = (np.stack([x, tokens], axis=1) for x in (loss, worse))
    interval = bootstrap(METRICS["perplexity"], one, two)
    assert interval is not None
    before, after = (float(x.sum() / tokens.sum()) for x in (loss, worse))
    influence = (
        math.exp(after) * (worse - after * tokens) - math.exp(before) * (loss - before * tokens)
    ) / tokens.sum()
    reach = 1.96 * math.sqrt(float((influence**2).sum()))
    drop = math.exp(after) - math.exp(before)
    # 2000 draws tell a 2.5 % quantile to 1 / sqrt(2000 * 0.025) / 2.3 = 6 % of a reach, 3 sigma are 18 %
    assert interval == pytest.approx((drop - reach, drop + reach), abs=0.18 * reach)


def test_very_many_entries_are_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requant.quantize.accuracy.metrics.intervals.BLOCKS", 100)
    values = np.random.default_rng(0).standard_normal(10_000)
    one, two = (np.stack([x, np.ones(10_000)], axis=1) for x in (values, np.zeros(10_000)))
    interval = bootstrap(METRICS["psnr"], one, two)
    assert interval is not None
    assert interval[1] - interval[0] == pytest.approx(2 * 1.96 / 100, rel=0.3)  # 100 blocks tell a width to 7 %


@pytest.mark.parametrize(("degrees", "t"), [(4, 2.7764), (9, 2.2622), (29, 2.0452), (999, 1.9623)])
def test_students_t(degrees: int, t: float) -> None:
    assert students_t(degrees) == pytest.approx(t, rel=0.01 if degrees < 9 else 5e-4)


def test_the_interval_of_areas_is_that_of_delong() -> None:
    """By all pairs: psi is 1, 1/2 or 0; the variance is that of its means over ones and over zeros."""
    random = np.random.default_rng(5)
    labels = (np.arange(40) % 3 == 0).astype(float)
    scores = np.round(random.standard_normal((2, 40)) + labels, 1)
    one, two = (np.stack([x, labels], axis=1) for x in scores)

    def psi(x: Array) -> Array:
        ones, zeros = x[labels == 1][:, None], x[labels == 0][None]
        return np.asarray((ones > zeros) + 0.5 * (ones == zeros))

    difference = psi(scores[0]) - psi(scores[1])
    m, n = difference.shape
    variance = difference.mean(1).var(ddof=1) / m + difference.mean(0).var(ddof=1) / n
    middle, reach = difference.mean(), 1.959963984540054 * math.sqrt(variance)
    assert area_interval(one, two) == pytest.approx((middle - reach, middle + reach), abs=40 * 40 * EPS)


@pytest.mark.parametrize("ones", [1, 5])
def test_the_interval_of_areas_needs_two_items_of_each_label(ones: int) -> None:
    labels = (np.arange(6) < ones).astype(float)
    one = np.stack([np.arange(6.0), labels], axis=1)
    assert area_interval(one, one) is None


# ------------------------------------------------------------------------------------------------- what may be lost


@pytest.mark.parametrize(
    ("text", "found", "again"),
    [
        ("0.003", Allowance(0.003, False), "0.003"),
        ("0", Allowance(0.0, False), "0"),
        (" .5 ", Allowance(0.5, False), "0.5"),
        ("1e-3", Allowance(0.001, False), "0.001"),
        ("0.5%", Allowance(0.005, True), "0.5%"),
        ("2 %", Allowance(0.02, True), "2%"),
    ],
)
def test_a_drop_is_read(text: str, found: Allowance, again: str) -> None:
    assert parse_drop(text) == found
    assert str(found) == again


@pytest.mark.parametrize("text", ["", "%", "-1", "+1", "1%%", "1 point", "nan", "inf", "1e999", "0,5", "1dB", "٣"])
def test_what_is_no_drop_is_refused(text: str) -> None:
    with pytest.raises(RequantError) as caught:
        parse_drop(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "metric", "before", "bar"),
    [
        ("0.003", "top1", 0.75, 0.75 - 0.003),
        ("1%", "top1", 0.75, 0.75 - 0.01 * 0.75),
        ("1%", "perplexity", 4.0, 4.0 + 0.01 * 4.0),
        ("0.5", "psnr", 26.0, 25.5),
        ("1%", "sqnr", math.inf, 40.0),
        ("0%", "sqnr", math.inf, math.inf),
    ],
)
def test_the_bar_that_an_allowance_sets(text: str, metric: str, before: float, bar: float) -> None:
    assert parse_drop(text).bar(METRICS[metric], before) == bar
    assert reaches(METRICS[metric], bar, bar)
    worse = bar - 1 if METRICS[metric].higher_is_better else bar + 1
    assert not reaches(METRICS[metric], min(worse, 1e9), bar)


def test_a_share_of_zero_is_refused() -> None:
    with pytest.raises(RequantError, match=r"top1 of the float model is 0, .* check the labels"):
        parse_drop("1%").bar(METRICS["top1"], 0.0)
    assert parse_drop("0.5").bar(METRICS["top1"], 0.0) == -0.5


def test_decibels_are_not_taken_from_infinity() -> None:
    with pytest.raises(RequantError, match="give the noise as a share of the signal: 1% is 40 dB"):
        parse_drop("3").bar(METRICS["sqnr"], math.inf)


# --------------------------------------------------------------------------------------------------- the same data


@pytest.mark.parametrize(
    ("calibration", "evaluation", "share"),
    [(range(4), range(4, 8), 0.0), (range(4), range(2, 6), 0.5), (range(8), range(4), 1.0)],
    ids=["apart", "half", "within"],
)
@pytest.mark.parametrize("batch", [1, 2], ids=["single", "in batches"])
def test_evaluation_data_among_the_calibration_data_are_found(
    echo: Path, calibration: range, evaluation: range, share: float, batch: int
) -> None:
    rows = normal(8, 4)
    specs = input_specs(open_session(echo))
    one = open_source([{"x": rows[[i]]} for i in calibration], specs)
    picked = [*evaluation]
    two = open_source([{"x": rows[picked[i : i + batch]]} for i in range(0, len(picked), batch)], specs)
    assert same_data(one, two) == share


def test_so_many_samples_are_looked_up_at_most(echo: Path) -> None:
    rows = normal(10, 4)
    assert same_data(source_of(echo, rows[::5]), source_of(echo, rows), most=2) == 1.0
    assert same_data(source_of(echo, rows[::5]), source_of(echo, rows)) == 0.2


# ------------------------------------------------------------------------------------------------- requant compare


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def pair(tmp_path: Path, echo: Path) -> tuple[Path, Path, Path]:
    """The model, one that turns the last of four rows around, and 40 labelled rows."""
    worse = tmp_path / "worse.onnx"
    text = (
        '<ir_version: 8, opset_import: ["": 17]> worse (float[N, 4] x) => (float[N, 4] y)'
        " <float[4] w = {1, 1, 1, -1}> { y = Mul(x, w) }"
    )
    onnx.save(onnx.parser.parse_model(text), worse)
    data = tmp_path / "d.npz"
    np.savez(data, x=np.tile(np.eye(4, dtype=np.float32), (10, 1)), labels=np.tile(np.arange(4), 10))
    return echo, worse, data


def test_compare_in_a_metric(pair: tuple[Path, Path, Path]) -> None:
    found = json.loads(invoke("compare", *pair[:2], "--data", pair[2], "--metric", "top1", "--json").stdout)
    assert (found["broken"], found["fixed"], found["items"]) == (10, 0, 40)
    told = found["metric"]
    assert (told["metric"], told["float"], told["int8"], told["broken"]) == ("top1", 1.0, 0.75, 10)
    assert told["drop_interval"] == found["drop_interval"] == list(paired_interval(10, 0, 40))


@pytest.mark.parametrize(("metric", "before", "after"), [("agreement", 1.0, 0.75), ("sqnr", None, decibels(40, 40.0))])
def test_compare_in_a_metric_against_the_float_model(
    pair: tuple[Path, Path, Path], metric: str, before: float | None, after: float
) -> None:
    found = json.loads(invoke("compare", *pair[:2], "--data", pair[2], "--metric", metric, "--json").stdout)["metric"]
    assert found["float"] == before
    assert found["int8"] == (after if metric == "agreement" else pytest.approx(found["int8"]))


def test_compare_with_labels_that_are_for_the_metric_alone(tmp_path: Path, pair: tuple[Path, Path, Path]) -> None:
    np.savez(tmp_path / "e.npz", x=normal(6, 4), labels=normal(6, 4))
    refused = invoke("compare", *pair[:2], "--data", tmp_path / "e.npz")
    assert refused.exit_code == 2
    done = invoke("compare", *pair[:2], "--data", tmp_path / "e.npz", "--metric", "psnr", "--json")
    found = json.loads(done.stdout)
    assert found["items"] is None
    assert found["metric"]["drop"] > 0
    assert "bootstrap of 6 entries" in found["metric"]["interval_method"]


@pytest.mark.parametrize(("name", "lower"), [("number", ()), ("items", ("--lower",)), ("size", ())])
def test_compare_by_a_function(pair: tuple[Path, Path, Path], own: Any, name: str, lower: tuple[str, ...]) -> None:
    done = invoke("compare", *pair[:2], "--data", pair[2], "--metric", own(name), *lower, "--json")
    found = json.loads(done.stdout)["metric"]
    assert found["higher_is_better"] == (not lower)
    assert found["drop"] == (-0.25 if lower else 0.0)


def test_compare_prints_the_metric(pair: tuple[Path, Path, Path]) -> None:
    done = invoke("compare", *pair[:2], "--data", pair[2], "--metric", "top1")
    first, *rows = done.stdout.splitlines()
    for words in ("100.00% -> 75.00%", "drop", "25.00 points", "95 % interval", "10 broken, 0 fixed of 40"):
        assert any(words in row for row in rows)
    assert "top1 100.00% -> 75.00%" in first
    assert sum(row.startswith(("top1 ", "drop ", "items ")) for row in rows) == 3
    assert [row for row in rows if row.startswith("top-1 ") and "->" in row] == []  # the labels are not told twice


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (["--metric", "top2"], "top2"),
        (["--metric", "auroc"], "sample 0: no output fits a label"),
        (["--lower"], "--lower needs --metric"),
    ],
)
def test_compare_refuses_in_one_line(pair: tuple[Path, Path, Path], arguments: list[str], mention: str) -> None:
    done = invoke("compare", *pair[:2], "--data", pair[2], *arguments)
    assert done.exit_code == 2
    assert mention in done.stderr
    assert done.stderr.count("\n") == 1
