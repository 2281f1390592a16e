"""Average precision of boxes, and the detectors whose outputs are known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from requant import RequantError
from requant.calibration import Sample
from requant.calibration.model.session import Array
from requant.cli import main
from requant.quantize.accuracy.drop import versus
from requant.quantize.accuracy.metrics import Metric, Score, Scorer, fitted, metric_named, of_reference
from requant.quantize.accuracy.metrics.boxes import MOST_BOXES, overlap, read_boxes
from requant.quantize.accuracy.metrics.intervals import LEFT_OUT, jackknife, students_t

RECALLS = np.linspace(0.0, 1.0, 101)  # as pycocotools has them: 0.35 is one bit above 35 / 100

Image = tuple[Array, Array, Array]  # corners (M, 4), scores (M,), classes (M,)


def outputs_of(image: Image) -> dict[str, Array]:
    boxes, scores, classes = image
    return {"boxes": boxes.astype(np.float32), "scores": scores.astype(np.float32), "labels": classes.astype(np.int64)}


def scored(name: str, outputs: Sequence[dict[str, Array]], labels: Sequence[Any], floats: Any = None) -> Score:
    samples = [Sample({"x": np.zeros((1, 1))}, label, f"sample {i}") for i, label in enumerate(labels)]
    metric = fitted(metric_named(name), samples[0])
    scorer = Scorer(metric)
    for value, reference, sample in zip(outputs, floats or outputs, samples, strict=True):
        scorer.add(value, sample, metric.kept(reference, sample) if metric.reference else {})
    return scorer.result()


def some_images(seed: int, count: int = 4, classes: int = 3) -> tuple[list[Image], list[Array]]:
    """Return found and true boxes: most of the true boxes are found a little off, and some are made up."""
    random = np.random.default_rng(seed)
    found, truth = [], []
    for _ in range(count):
        corner, side = random.uniform(0, 60, (random.integers(0, 6), 2)), None
        side = random.uniform(5, 30, corner.shape)
        true = np.hstack([corner, corner + side])
        names = random.integers(0, classes, len(true))
        off = true + random.normal(0, 2, true.shape)
        made_up = np.sort(random.uniform(0, 90, (random.integers(0, 5), 2, 2)), axis=1).reshape(-1, 4)
        boxes = np.concatenate([off, off + 1, made_up])
        labels = np.concatenate([names, names, random.integers(0, classes, len(made_up))])
        scores = random.permutation(np.linspace(0.1, 0.9, len(boxes)).round(2))
        found.append(
            (boxes.astype(np.float32).astype(np.float64), scores.astype(np.float32).astype(np.float64), labels)
        )
        truth.append(np.hstack([true, names[:, None]]))
    return found, truth


def plain_iou(a: Array, b: Array) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = width * height
    either = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    return both / either if either > 0 else 0.0


def plain_map(found: Sequence[Image], truth: Sequence[Array], least: Sequence[float] | Array) -> float:
    """Average precision by loops: one class, one threshold and one recall at a time."""
    values = []
    for name in sorted({int(row[4]) for rows in truth for row in rows}):
        for threshold in least:
            ranked = sorted(
                (
                    (s, i, b)
                    for i, (boxes, scores, names) in enumerate(found)
                    for b, s, c in zip(boxes, scores, names, strict=True)
                    if c == name
                ),
                key=lambda row: -row[0],
            )
            free = [[row[:4] for row in rows if row[4] == name] for rows in truth]
            total, hits, points = sum(map(len, free)), 0, []
            for count, (_, image, box) in enumerate(ranked, 1):
                best = max(range(len(free[image])), key=lambda j: plain_iou(box, free[image][j]), default=None)
                if best is not None and plain_iou(box, free[image][best]) >= threshold:
                    free[image].pop(best)
                    hits += 1
                points.append((hits / total, hits / count))
            values.append(np.mean([max((p for r, p in points if r >= recall), default=0.0) for recall in RECALLS]))
    return float(np.mean(values))


def test_average_precision_by_hand() -> None:
    truth = np.array([[0, 0, 10, 10, 0], [20, 20, 30, 30, 0]], float)
    found = (
        np.array([[0, 0, 10, 10], [50, 50, 60, 60], [20, 20, 30, 28]], float),
        np.array([0.9, 0.8, 0.7]),
        np.zeros(3, int),
    )
    # at an overlap of 0.8 and below: hit, miss, hit; precision 1 up to recall 0.5 (51 points), then 2/3 (50 points)
    both, one = (51 + 50 * 2 / 3) / 101, 51 / 101
    assert scored("map50", [outputs_of(found)], [truth]).value == pytest.approx(both)
    assert scored("map75", [outputs_of(found)], [truth]).value == pytest.approx(both)
    assert scored("map", [outputs_of(found)], [truth]).value == pytest.approx((7 * both + 3 * one) / 10)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_average_precision_is_that_of_plain_loops(seed: int) -> None:
    found, truth = some_images(seed)
    if not sum(map(len, truth)):
        with pytest.raises(RequantError, match="map needs a true box"):
            scored("map", [outputs_of(image) for image in found], truth)
        return
    outputs = [outputs_of(image) for image in found]
    # box coordinates are float32 exactly, so that equal overlaps are equal in both
    assert scored("map50", outputs, truth).value == pytest.approx(plain_map(found, truth, [0.5]))
    assert scored("map", outputs, truth).value == pytest.approx(plain_map(found, truth, np.linspace(0.5, 0.95, 10)))


def test_images_of_a_batch_are_read_one_by_one() -> None:
    found, truth = some_images(3, count=2)
    most = max(len(image[0]) for image in found)
    most_true = max(map(len, truth))
    padded = {
        "boxes": np.stack([np.pad(boxes, ((0, most - len(boxes)), (0, 0))) for boxes, _, _ in found]).astype(
            np.float32
        ),
        "scores": np.stack([np.pad(scores, (0, most - len(scores))) for _, scores, _ in found]).astype(np.float32),
        "labels": np.stack([np.pad(names, (0, most - len(names))) for _, _, names in found]),
    }
    labels = np.stack([np.pad(rows, ((0, most_true - len(rows)), (0, 0)), constant_values=-1) for rows in truth])
    apart = scored("map", [outputs_of(image) for image in found], truth)
    together = scored("map", [padded], [labels])
    assert together.value == apart.value
    assert together.rows is not None
    assert set(together.rows) == {0, 1}


def test_without_labels_the_float_models_sure_boxes_are_the_truth() -> None:
    found, _ = some_images(7, count=8)
    floats = [outputs_of(image) for image in found]
    own = scored("map", floats, [None] * 8)
    assert own.value == 1.0
    assert of_reference(own).value == 1.0
    worse = [row | {"boxes": row["boxes"] + 2} for row in floats]
    after = scored("map", worse, [None] * 8, floats)
    truth = [np.hstack([boxes, names[:, None]])[scores >= 0.25] for boxes, scores, names in found]
    assert after.value == scored("map", worse, truth).value < 0.9
    compared = versus(of_reference(after), after)
    assert compared.drop == 1 - after.value
    assert compared.drop_interval is not None
    assert compared.drop_interval[0] < compared.drop < compared.drop_interval[1]
    assert compared.method == "jackknife of 8 entries of data, paired"


def test_models_that_find_different_numbers_of_boxes_are_compared() -> None:
    found, truth = some_images(11, count=6)
    before = scored("map", [outputs_of(image) for image in found], truth)
    half = [tuple(column[::2] for column in image) for image in found]
    after = scored("map", [outputs_of(image) for image in half], truth)  # type: ignore[arg-type]
    assert len(before.parts) != len(after.parts)  # type: ignore[arg-type]
    compared = versus(before, after)
    assert (compared.items, compared.broken) == (6, None)
    assert versus(before, before).drop_interval == (0.0, 0.0)
    with pytest.raises(RequantError, match="6 and 5 entries; the scores are of different data"):
        versus(before, scored("map", [outputs_of(image) for image in found[:5]], truth[:5]))
    assert (
        "too few for an interval" in versus(*[scored("map", [outputs_of(i) for i in found[:4]], truth[:4])] * 2).method
    )


@pytest.mark.parametrize("g", [7, LEFT_OUT])
def test_the_jackknife_of_a_mean_is_students_interval(g: int) -> None:
    metric = Metric(name="mean", value=lambda parts: parts[:, 0].mean(), sums=False, uneven=True)
    values = np.random.default_rng(0).standard_normal((2, g, 1))
    drops = (values[0] - values[1])[:, 0]
    reach = students_t(g - 1) * drops.std(ddof=1) / math.sqrt(g)
    found = jackknife(metric, (values[0], np.arange(g)), (values[1], np.arange(g)))
    assert found == pytest.approx((drops.mean() - reach, drops.mean() + reach))
    twice = (np.repeat(values[1], 2, axis=0), np.repeat(np.arange(g), 2))  # other items, the same means
    assert jackknife(metric, (values[0], np.arange(g)), twice) == pytest.approx(found)


def test_many_entries_are_left_out_in_blocks() -> None:
    metric = Metric(name="mean", value=lambda parts: parts[:, 0].mean(), sums=False, uneven=True)
    values = np.random.default_rng(0).standard_normal((6 * LEFT_OUT, 1))
    blocks = values.reshape(LEFT_OUT, 6).mean(axis=1)
    reach = students_t(LEFT_OUT - 1) * blocks.std(ddof=1) / math.sqrt(LEFT_OUT)
    rows = np.arange(len(values))
    found = jackknife(metric, (values, rows), (np.zeros_like(values), rows))
    assert found == pytest.approx((blocks.mean() - reach, blocks.mean() + reach))


@pytest.mark.slow
@pytest.mark.parametrize("images", [12, 60])
def test_the_interval_covers_the_truth(images: int) -> None:
    """Of 100 samples of data, 95 % give or take 3 sigma of 2.2 % hold the drop that all data have together."""
    pool, labels = some_images(0, count=1200, classes=1)
    worse = [(boxes + 1, scores, names) for boxes, scores, names in pool]
    both = [
        [scored("map50", [outputs_of(image)] * 1, [true]) for image, true in zip(of, labels, strict=True) if len(true)]
        for of in (pool, worse)
    ]
    parts = [[score.parts for score in of] for of in both]
    metric = metric_named("map50")

    def whole(which: Array) -> tuple[Score, Score]:
        scores = []
        for of in parts:
            chosen = [of[i] for i in which]
            rows = np.repeat(np.arange(len(which)), [len(each) for each in chosen])
            joined = np.concatenate(chosen)
            scores.append(Score(metric, metric.of(joined), joined, rows))
        return scores[0], scores[1]

    random, covered = np.random.default_rng(1), 0
    truth = versus(*whole(np.arange(len(parts[0])))).drop
    for _ in range(100):
        interval = versus(*whole(random.integers(len(parts[0]), size=images))).drop_interval
        assert interval is not None
        covered += interval[0] <= truth <= interval[1]
    assert covered >= 95 - 7


# ------------------------------------------------------------------------------------------------------- detectors


def centred(boxes: Array) -> Array:
    return np.hstack([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]])


def test_the_heads_of_the_yolo_family_are_decoded() -> None:
    random = np.random.default_rng(0)
    corner = random.uniform(0, 500, (200, 2))
    boxes = np.hstack([corner, corner + 12]).astype(np.float32)
    scores = np.zeros((200, 5), np.float32)
    scores[3, 1], scores[50, 4], scores[51, 4] = 0.9, 0.5, 0.4
    boxes[51] = boxes[50] + 0.25  # overlaps by more than 0.7: suppressed
    scores[3, 2] = 0.2  # another class at the same place is kept
    last = np.hstack([centred(boxes), scores]).T[None]
    first = np.hstack([centred(boxes), np.full((200, 1), 0.5), scores])[None]
    for output, factor in ((last, 1.0), (first.astype(np.float32), 0.5)):
        (found,) = read_boxes({"output0": output}, "sample 0")
        assert found.scores == pytest.approx(factor * np.array([0.9, 0.5, 0.2]))
        assert found.classes.tolist() == [1, 4, 2]
        assert found.corners == pytest.approx(boxes[[3, 50, 3]], abs=1e-3)


def test_outputs_that_are_boxes_are_taken_as_they_are() -> None:
    image = (np.array([[0, 0, 4, 4], [1, 1, 5, 5]], np.float32), np.array([0.9, 0.0]), np.array([3, 2]))
    joined = np.hstack([image[0], image[1][:, None], image[2][:, None]]).astype(np.float32)
    reals = {
        "detection_boxes": image[0][None],
        "detection_scores": image[1][None],
        "detection_classes": image[2][None] * 1.0,
    }
    count = {"num_detections": np.array([1.0], np.float32)}
    for outputs in (outputs_of(image), {"dets": joined}, {"dets": joined[None]}, reals | count):
        (found,) = read_boxes(outputs, "sample 0")
        assert (found.scores.tolist(), found.classes.tolist()) == ([pytest.approx(0.9)], [3])
        assert found.corners.tolist() == [[0, 0, 4, 4]]


def test_suppression_is_that_of_plain_loops() -> None:
    random = np.random.default_rng(2)
    corner = random.uniform(0, 40, (300, 2))
    boxes = np.hstack([corner, corner + random.uniform(8, 20, (300, 2))])
    scores = random.permutation(np.linspace(0.01, 0.99, 300))
    output = np.hstack([centred(boxes), scores[:, None]]).T[None].astype(np.float32)
    (found,) = read_boxes({"y": output}, "")
    kept: list[int] = []
    for index in np.argsort(-scores):
        if all(plain_iou(boxes[index], boxes[other]) <= 0.7 for other in kept):
            kept.append(int(index))
    assert len(kept) < MOST_BOXES
    assert found.scores == pytest.approx(scores[kept], abs=1e-6)


@given(st.integers(0, 2**32 - 1))
def test_overlap_is_symmetric_and_one_with_itself(seed: int) -> None:
    random = np.random.default_rng(seed)
    one, two = (np.sort(random.uniform(0, 9, (4, 2, 2)), axis=1).reshape(-1, 4) for _ in range(2))
    assert np.diag(overlap(one, one)) == pytest.approx(1)
    assert overlap(one, two) == pytest.approx(overlap(two, one).T)
    assert overlap(one, two) == pytest.approx(np.array([[plain_iou(a, b) for b in two] for a in one]))
    assert overlap(np.zeros((1, 4)), np.zeros((1, 4))).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("outputs", "mention"),
    [
        ({"logits": np.zeros((1, 10), np.float32)}, "no known detector has these outputs: logits (1, 10)"),
        ({"raw": -np.ones((1, 300, 15), np.float32)}, "map:FILE.py:NAME names a function that decodes them"),
        ({"raw": -np.ones((1, 15, 300), np.float32)}, "no known detector"),
        ({"boxes": np.ones((1, 9, 4), np.float32), "scores": np.ones((1, 9, 3), np.float32)}, "no known detector"),
    ],
)
def test_unknown_outputs_are_refused_in_one_line(outputs: Any, mention: str) -> None:
    with pytest.raises(RequantError) as caught:
        scored("map", [outputs], [None])
    assert str(caught.value).startswith("sample 0: ")
    assert mention in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "few"), [(slice(0, 2), 80), (slice(2, 4), 2), (slice(4, 85), 80)], ids=["centres", "sizes", "scores"]
)
def test_a_head_with_offsets_or_logarithms_or_logits_is_not_decoded(columns: slice, few: int) -> None:
    output = np.random.default_rng(0).uniform(0, 1, (1, 400, 85)).astype(np.float32)
    output[..., 4:] *= 0.02  # few candidates
    assert len(read_boxes({"output": output}, "")) == 1
    output[:, :few, columns] -= 2
    for value in (output, np.swapaxes(output, 1, 2)):
        with pytest.raises(RequantError, match="no known detector"):
            read_boxes({"output": value}, "")


def test_labels_of_another_shape_are_refused() -> None:
    image = (np.zeros((1, 4)), np.ones(1), np.zeros(1))
    with pytest.raises(RequantError, match=r"labels of shape \(1, 4\), but map needs \(M, 5\)"):
        scored("map", [outputs_of(image)], [np.zeros((1, 4))])
    with pytest.raises(RequantError, match="boxes of 1 images, but labels of 2"):
        scored("map", [outputs_of(image)], [np.zeros((2, 1, 5))])


# ------------------------------------------------------------------------------------------------ the user's decoder

DECODERS = """
import numpy as np
import onnx
import onnx.parser
def half(outputs):
    rows = outputs["raw"][0]
    return np.hstack([rows[:, :4] * 2, rows[:, 4:]])
def scaled(outputs, inputs):
    boxes = outputs["raw"][0]
    return {"boxes": boxes[:, :4] * inputs["x"].max(), "scores": boxes[:, 4], "labels": boxes[:, 5].astype(int)}
def ragged(outputs):
    return [rows[:count] for rows, count in zip(outputs["raw"], (2, 1))]
def fails(outputs):
    raise KeyError("no\\nsuch output")
def nothing(outputs):
    return None
def three(a, b, c):
    return a
value = 3
"""


@pytest.fixture
def decoders(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(DECODERS)
    return f"{tmp_path / 'mine.py'}"


def decoded(name: str, raw: Array, label: Any) -> float:
    metric = fitted(metric_named(name), sample := Sample({"x": np.full((1, 1), 2.0)}, label, "sample 0"))
    scorer = Scorer(metric)
    scorer.add({"raw": raw}, sample, metric.kept({"raw": raw}, sample) if metric.reference else {})
    return scorer.result().value


@pytest.mark.parametrize("name", ["half", "scaled"])
def test_the_users_function_decodes_for_any_metric(decoders: str, name: str) -> None:
    raw = np.array([[[0, 0, 5, 5, 0.9, 0.0]]], np.float32)
    label = np.array([[0, 0, 10, 10, 0.0]])
    assert decoded(f"map:{decoders}:{name}", raw, label) == 1.0
    assert decoded(f"map75:{decoders}:{name}", raw, label / 2) == 0.0
    assert decoded(f"map:{decoders}:{name}", raw, None) == 1.0
    assert metric_named(f"map:{decoders}:{name}").name == f"map:{decoders}:{name}"


def test_a_decoder_may_give_tables_of_different_lengths(decoders: str) -> None:
    raw = np.array([[[0, 0, 5, 5, 0.9, 0.0], [9, 9, 12, 12, 0.8, 0.0]]] * 2, np.float32)
    label = np.array([[[0, 0, 5, 5, 0], [9, 9, 12, 12, 0]], [[0, 0, 5, 5, 0], [-1, -1, -1, -1, -1]]], float)
    assert decoded(f"map:{decoders}:ragged", raw, label) == 1.0


@pytest.mark.parametrize(
    ("name", "mention"),
    [
        ("fails", "KeyError"),
        ("nothing", "must return an array, a list of arrays, or a dict of them"),
        ("three", "takes (a, b, c); a function for outputs takes (outputs) or (outputs, inputs)"),
        ("value", "an int is not a function"),
    ],
)
def test_a_decoder_that_fails_says_so_in_one_line(decoders: str, name: str, mention: str) -> None:
    with pytest.raises(RequantError) as caught:
        decoded(f"map:{decoders}:{name}", np.zeros((1, 1, 6), np.float32), np.zeros((1, 5)))
    assert mention in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_score_of_nan_is_no_box() -> None:
    output = np.full((1, 6, 40), np.nan, np.float32)
    (found,) = read_boxes({"y": output}, "")
    assert len(found.scores) == 0
    assert math.isclose(scored("map", [{"y": output}], [np.array([[0, 0, 1, 1, 0.0]])]).value, 0.0)


# ------------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def detectors(tmp_path: Path) -> tuple[str, str, str]:
    """A model that gives back its boxes, one that moves them by 1, and 12 images with labels."""
    for name, offset in (("float", 0), ("moved", 1)):
        text = (
            '<ir_version: 8, opset_import: ["": 17]> g (float[1, M, 6] x) => (float[1, M, 6] y)'
            f" <float[6] w = {{{offset}, {offset}, {offset}, {offset}, 0, 0}}> {{ y = Add(x, w) }}"
        )
        onnx.save(onnx.parser.parse_model(text), tmp_path / f"{name}.onnx")
    found, truth = some_images(5, count=12)
    (tmp_path / "images").mkdir()
    for index, ((boxes, scores, names), labels) in enumerate(zip(found, truth, strict=True)):
        rows = np.hstack([boxes, scores[:, None], names[:, None]]).astype(np.float32)
        padded = np.pad(rows, ((0, 1), (0, 0)))[None]
        np.savez(tmp_path / "images" / f"{index:02}.npz", x=padded, labels=labels)
    return str(tmp_path / "float.onnx"), str(tmp_path / "moved.onnx"), str(tmp_path / "images")


def test_compare_and_check_in_boxes(detectors: tuple[str, str, str], tmp_path: Path) -> None:
    floats, moved, data = detectors
    done = CliRunner().invoke(main, ["compare", floats, moved, "--data", data, "--metric", "map", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["metric"]
    assert found["float"] > found["int8"] > 0
    assert found["drop_interval"][0] < found["drop"] < found["drop_interval"][1]
    assert found["interval_method"] == "jackknife of 12 entries of data, paired"
    command = ["check", "--float", floats, "--data", data, "--baseline", str(tmp_path / "lock.json"), "--seconds", "0"]
    asked = ["--metric", "map", "--tolerance", "map=0.001"]
    written = CliRunner().invoke(main, [*command, "--model", floats, *asked, "--update"])
    assert written.exit_code == 0, written.output
    assert CliRunner().invoke(main, [*command, "--model", floats]).exit_code == 0
    failed = CliRunner().invoke(main, [*command, "--model", moved, "--json"])
    assert failed.exit_code == 1
    line = next(row for row in json.loads(failed.stdout)["lines"] if row["name"] == "map")
    assert line["status"] == "fail"
    assert line["drop_interval"][0] > 0
