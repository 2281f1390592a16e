"""Metrics of classes for models with several heads: the head that the labels fit is judged, and the output says so."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner

from requant import RequantError
from requant.calibration import Sample
from requant.calibration.model.session import Array
from requant.cli import main
from requant.quantize.accuracy.labels import check_label
from requant.quantize.accuracy.metrics import METRICS, Score, Scorer, join
from requant.quantize.accuracy.outputs import compare_outputs
from requant.quantize.accuracy.terms import Terms

FACES = """
<ir_version: 8, opset_import: ["" : 17]>
faces (float[N, 6] x) => (float[N, 2] gender, float[N, 5] age, float[N, 6] mood) <float[6, 2] g, float[6, 5] a> {
    gender = MatMul(x, g)
    age = MatMul(x, a)
    mood = Neg(x)
}
"""
OTHER = "; the labels fit 'mood' too: --metric top1:FILE.py:NAME judges what your function returns"


def scored(name: str, heads: dict[str, Array], labels: Array, parts: Sequence[slice]) -> Score:
    """Score outputs, a sample for each slice of the items."""
    scorer = Scorer(METRICS[name])
    for index, part in enumerate(parts):
        feed = {"x": np.zeros((len(labels[part]), 1), np.float32)}
        scorer.add({key: value[part] for key, value in heads.items()}, Sample(feed, labels[part], f"sample {index}"))
    return scorer.result()


def heads_of(**classes: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((40, count)).astype(np.float32) for name, count in classes.items()}


@pytest.mark.parametrize("name", ["top1", "f1"])
def test_the_first_head_that_all_labels_fit_is_judged(name: str) -> None:
    heads = heads_of(gender=2, age=5, mood=6)
    labels = np.array([0, 1] * 10 + [3, 4] * 10)  # those of the first samples fit every head
    found = scored(name, heads, labels, [slice(0, 10), slice(10, 20), slice(20, 40)])
    assert found.value == scored(name, {"age": heads["age"]}, labels, [slice(0, 40)]).value
    assert found.notes == (f"{name} judges 'age'{OTHER.replace('top1', name)}",)


def test_one_head_that_fits_is_named_alone() -> None:
    found = scored("top1", heads_of(gender=2, age=5), np.full(40, 4), [slice(0, 40)])
    assert found.notes == ("top1 judges 'age'",)
    assert scored("top1", heads_of(age=5), np.full(40, 4), [slice(0, 40)]).notes == ()


def test_labels_that_fit_no_head_are_refused() -> None:
    with pytest.raises(RequantError, match="sample 1: label 7, but the output has 2 classes"):
        scored("top1", heads_of(gender=2, age=5), np.repeat([1, 7], 20), [slice(0, 20), slice(20, 40)])
    with pytest.raises(RequantError, match="sample 0: label 7, but the output has 2 classes"):
        scored("top1", heads_of(gender=2, age=5), np.full(40, 7), [slice(0, 40)])


def test_pieces_of_the_data_are_judged_at_one_head() -> None:
    heads, labels = heads_of(gender=2, age=5, mood=6), np.array([0, 1] * 10 + [3, 4] * 10)
    halves = [{key: value[part] for key, value in heads.items()} for part in (slice(0, 20), slice(20, 40))]
    pieces = [scored("top1", half, labels[k * 20 : k * 20 + 20], [slice(0, 20)]) for k, half in enumerate(halves)]
    assert pieces[0].notes[0].startswith("top1 judges 'gender'")
    whole, joined = scored("top1", heads, labels, [slice(0, 40)]), join(pieces)
    assert (joined.value, joined.notes) == (whole.value, whole.notes)
    assert joined.items is not None
    assert whole.items is not None
    assert joined.items.tolist() == whole.items.tolist()


def test_pieces_whose_labels_fit_different_heads_are_refused() -> None:
    shapes = {"a": np.zeros((4, 2, 3), np.float32), "b": np.zeros((4, 5), np.float32)}
    pieces = [scored("top1", shapes, labels, [slice(0, 4)]) for labels in (np.zeros((4, 2), int), np.zeros((4,), int))]
    with pytest.raises(RequantError, match="no output has classes that fit the labels of all samples"):
        join(pieces)


def test_compare_names_the_head(tmp_path: Path) -> None:
    rng, model = np.random.default_rng(0), onnx.parser.parse_model(FACES)
    del model.graph.initializer[:]
    for name, count in (("g", 2), ("a", 5)):
        weight = rng.standard_normal((6, count)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    onnx.save_model(model, tmp_path / "m.onnx")
    x = rng.standard_normal((30, 6)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, labels=(x @ onnx.numpy_helper.to_array(model.graph.initializer[1])).argmax(1))
    (tmp_path / "own.py").write_text("def mood(outputs):\n    return outputs['mood']\n")
    for metric, expected in (("top1", ["100.00%", f"top1 judges 'age'{OTHER}"]), (f"top1:{tmp_path}/own.py:mood", [])):
        asked: list[Any] = ["compare", *[tmp_path / "m.onnx"] * 2, "--data", tmp_path / "d.npz", "--metric", metric]
        done = CliRunner().invoke(main, list(map(str, asked)))
        assert done.exit_code == 0, done.output
        assert all(text in " ".join(done.output.split()) for text in expected)
        assert ("judges" in done.output) == bool(expected)


def test_labels_of_another_head_do_not_judge_the_first() -> None:
    """Without a metric, labels of a later head are no reason to refuse the data of a quantization."""
    heads = heads_of(gender=2, age=5)
    results = [
        (one, one, Sample({"x": np.zeros((1, 1), np.float32)}, np.array([label]), f"sample {label}"))
        for label in (1, 4, 0)
        for one in [{name: value[:1] for name, value in heads.items()}]
    ]
    assert compare_outputs(results, terms=Terms("skip")).labelled is None
    with pytest.raises(RequantError, match="sample 4: label 4, but the output has 2 classes"):
        compare_outputs(results)
    assert check_label(*results[1][1:]).startswith("labels beyond the classes of 'gender' belong to another output")
