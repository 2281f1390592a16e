"""What layers compute from a choice is compared with the choice of the float model in both models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper

from requant.quantize import Options, quantize_model
from requant.quantize.accuracy.choices import BEFORE_LAYERS, GIVEN_NOTE
from requant.quantize.accuracy.given_choices import (
    given_choices,
    layered_choices,
    outputs_behind,
    readers_of,
    with_choices,
)
from requant.quantize.accuracy.selected_outputs import chosen_outputs, compared_readers, holds_scores, replacements_for
from requant.quantize.tools.sensitivity import measure_sensitivity

PLACES, BEST, WIDTH = 64, 16, 16
DETECTOR = """net (float[1,64,16] x) => (float[1,16,16] y) {
  [encode] t = MatMul(x, e)
  [score] scores = MatMul(t, s)
  [best] m = ReduceMax<axes = [2], keepdims = 0>(scores)
  [top] v, i = TopK<axis = 1>(m, k)
  [column] j = Unsqueeze(i, two)
  [wide] w = Expand(j, shape)
  [pick] q = GatherElements<axis = 1>(t, w)
  [decode] d = MatMul(q, p)
  [act] a = Relu(d)
  [last] y = MatMul(a, p) }"""
VALUES = DETECTOR.replace("=> (float[1,16,16] y)", "=> (float[1,16,16] y, float[1,16,16] z)").replace(
    "[last]", "[weigh] u = Unsqueeze(v, two) [scaled] c = Mul(q, u) [other] z = MatMul(c, p) [last]"
)
RANKED = DETECTOR.replace("=> (float[1,16,16] y)", "=> (float[1,4,16] z)").replace(
    "}",
    """[order] n = ReduceMax<axes = [2], keepdims = 0>(y)
       [again] f, g = TopK<axis = 1>(n, few)
       [rows] h = Unsqueeze(g, two)
       [broad] b = Expand(h, fewer)
       [pick2] z = GatherElements<axis = 1>(y, b) }""",
)
MASKED = """net (float[1,64,16] x) => (float[1,64,16] y) {
  [encode] t = MatMul(x, e)
  [most] c = ArgMax<axis = 2>(t)
  [number] n = Cast<to = 1>(c)
  [weigh] q = Mul(t, n)
  [decode] y = MatMul(q, p) }"""


def built(text: str, seed: int = 0, spread: float = 0.02) -> onnx.ModelProto:
    """Return a model whose places have nearly the same scores: any noise changes their order."""
    random = np.random.default_rng(seed)
    constants: dict[str, Any] = {
        "k": np.array([BEST]),
        "two": np.array([2]),
        "shape": np.array([1, BEST, WIDTH]),
        "few": np.array([4]),
        "fewer": np.array([1, 4, WIDTH]),
        "e": random.normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32),
        "s": random.normal(0, spread, (WIDTH, 8)).astype(np.float32),
        "p": random.normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32),
    }
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(constants[n]), n) for n in constants if n in read)
    onnx.checker.check_model(proto)
    return proto


def data(count: int = 16) -> list[dict[str, np.ndarray[Any, Any]]]:
    random = np.random.default_rng(1)
    return [{"x": random.normal(size=(1, PLACES, WIDTH)).astype(np.float32)} for _ in range(count)]


def run(model: ir.Model, feed: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    return [np.asarray(value) for value in session.run(None, feed)]


MODELS = {"a detector": DETECTOR, "values of the choice": VALUES, "a second choice": RANKED, "classes": MASKED}


@pytest.mark.parametrize("text", MODELS.values(), ids=MODELS)
def test_a_model_with_its_own_choices_is_the_same_model(text: str) -> None:
    model = ir.serde.deserialize_model(built(text))
    names = layered_choices(model)
    assert names == ["most" if text is MASKED else "top"]
    assert outputs_behind(model, names) == {str(value.name) for value in model.graph.outputs}
    before = ir.serde.serialize_model(model).SerializeToString()
    copy = with_choices(model, model, names)
    assert ir.serde.serialize_model(model).SerializeToString() == before
    onnx.checker.check_model(ir.serde.serialize_model(copy))
    for feed in data(3):
        for one, other in zip(run(model, feed), run(copy, feed), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("text", [DETECTOR, VALUES], ids=["indices", "values too"])
def test_another_model_takes_the_choice_of_the_float_model(text: str) -> None:
    """Weights of scores with another seed choose other places; with the given choice all layers see the same ones."""
    first, other = (ir.serde.deserialize_model(built(text)) for _ in range(2))
    scores = other.graph.initializers["s"]
    assert scores.const_value is not None
    scores.const_value = ir.tensor(-scores.const_value.numpy(), name="s")
    feed = data(1)[0]
    assert not np.array_equal(run(first, feed)[0], run(other, feed)[0])
    given = with_choices(other, first, ["top"])
    np.testing.assert_array_equal(run(first, feed)[0], run(given, feed)[0])


def test_nothing_is_given_where_no_layer_reads_a_choice() -> None:
    text = DETECTOR[: DETECTOR.index("[decode]")].replace("=> (float[1,16,16] y)", "=> (float[1,16,16] q)") + "}"
    model = ir.serde.deserialize_model(built(text))
    assert layered_choices(model) == []
    assert replacements_for(model, ["q"])[1] == []
    assert with_choices(model, model, []) is model
    assert [*chosen_outputs(model)] == ["q"]


def test_labels_tell_what_was_given() -> None:
    model = ir.serde.deserialize_model(built(RANKED))
    apart, given = replacements_for(model, ["z"])
    assert given == ["top"]
    labels = [label for *_, label in (*readers_of(model, given), *apart["z"])]
    assert labels[0] == f"m (into TopK{BEFORE_LAYERS})"
    assert holds_scores(labels[0])
    assert set(labels[1:]) == {"n (into TopK)", "y (into TopK)"}
    assert given_choices(model, labels) == given
    assert given_choices(model, labels[1:]) == []
    assert {label for *_, label in compared_readers(model, labels)} == {*labels, "m (into TopK)"} - {"m (into TopK)"}


def saved(folder: Path) -> Path:
    onnx.save(built(DETECTOR), folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize("effort", ["low", "medium"])
def test_a_decoder_of_chosen_places_keeps_the_promise(tmp_path: Path, effort: Any) -> None:
    """Index by index, rows of other places were compared: 0 dB, and the detector stayed float."""
    options = Options(effort=effort, place="rules", force_int8=True, seconds=0.1)
    found = quantize_model(saved(tmp_path), data(), tmp_path / "q.onnx", options)
    assert set(found.accuracy.sqnr_db) == {"y", f"m (into TopK{BEFORE_LAYERS})"}
    assert found.accuracy.sqnr_db["y"] > 25
    assert found.promise is not None
    assert found.promise.kept
    assert GIVEN_NOTE in found.notes
    assert [node.reason for node in found.float_nodes if node.operator == "MatMul"] == []


def test_sensitivity_gives_the_choice_too(tmp_path: Path) -> None:
    found = measure_sensitivity(saved(tmp_path), data(4), samples=4)
    assert min(row.sqnr_db for row in found.units) > 20
    assert min(row.sqnr_db for row in found.tensors) > 20
    assert GIVEN_NOTE in found.notes
