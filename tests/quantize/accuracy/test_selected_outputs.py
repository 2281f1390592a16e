"""Outputs that a model selects by its own scores are judged by what it selects from."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from requant.quantize import Options, Result, compare_models, quantize_model
from requant.quantize.accuracy.outputs import Accuracy
from requant.quantize.accuracy.selected_outputs import chosen_outputs, compared_readers, has_readers, replaced_notes

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
BOXES = """
      [best] m = ReduceMax<axes = [2], keepdims = 0>(scores)
      [top] v, i = TopK<axis = 1>(m, k)
      [column] j = Unsqueeze(i, two)
      [wide] e = Expand(j, shape)
      [pick] b = GatherElements<axis = 1>(boxes, e)"""
GRAPHS = {
    "a detector": (
        f"net (float[1,64,8] scores, float[1,64,4] boxes) => (float[1,16,4] y) {{{BOXES} [copy] y = Identity(b) }}",
        {"y": {"m (into TopK)", "boxes (into GatherElements)"}},
    ),
    "layers behind the choice": (
        f"net (float[1,64,8] scores, float[1,64,4] boxes) => (float[1,16,4] y) {{{BOXES} [layer] y = MatMul(b, w) }}",
        {},
    ),
    "chosen twice": (
        f"""net (float[1,64,8] scores, float[1,64,4] boxes) => (float[1,16,4] y) {{{BOXES}
          [last] n = ReduceMax<axes = [2], keepdims = 0>(b)
          [again] u, t = TopK<axis = 1>(n, k)
          [rows] r = Unsqueeze(t, two)
          [broad] f = Expand(r, shape)
          [order] y = GatherElements<axis = 1>(b, f) }}""",
        {"y": {"m (into TopK)", "boxes (into GatherElements)"}},
    ),
    "scores beside the boxes": (
        f"""net (float[1,64,4] scores, float[1,64,4] boxes) => (float[1,16,8] y) {{{BOXES}
          [all] c = GatherElements<axis = 1>(scores, e)
          [both] y = Concat<axis = 2>(b, c) }}""",
        {"y": {"m (into TopK)", "scores (into TopK)", "boxes (into GatherElements)"}},
    ),
    "boxes and scores in one": (
        """net (float[1,64,5] raw) => (float[1,16,5] y) {
          [column] s = Slice(raw, four, five, two)
          [flat] m = Squeeze(s, two)
          [top] v, i = TopK<axis = 1>(m, k)
          [wide] j = Unsqueeze(i, two)
          [rows] e = Expand(j, widest)
          [pick] y = GatherElements<axis = 1>(raw, e) }""",
        {"y": {"m (into TopK)", "raw (into GatherElements)"}},
    ),
    "classes": (
        "net (float[1,8,4,4] x) => (int64[1,1,4,4] y) { [most] y = ArgMax<axis = 1>(x) }",
        {"y": {"x (into ArgMax)"}},
    ),
    "peaks": (
        """net (float[1,1,8,8] x) => (float[1,1,8,8] y) {
          [around] p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x)
          [same] q = Equal(x, p)
          [number] c = Cast<to = 1>(q)
          [kept] y = Mul(x, c) }""",
        {"y": {"x (into Equal)"}},  # p holds values of x
    ),
    "peaks of two maps": (
        """net (float[1,1,8,8] x, float[1,1,8,8] z) => (float[1,1,8,8] y) {
          [around] p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(z)
          [same] q = Equal(x, p)
          [number] c = Cast<to = 1>(q)
          [kept] y = Mul(x, c) }""",
        {"y": {"x (into Equal)", "p (into Equal)"}},
    ),
    "one value apart": (
        "net (float[1,8] x) => (float[1,8] y) { [z] q = Equal(x, zero) [number] c = Cast<to = 1>(q) y = Mul(x, c) }",
        {},
    ),
    "nothing chosen": ("net (float[1,8] x) => (float[1,8] y) { [r] y = Relu(x) }", {}),
}
CONSTANTS: dict[str, Any] = {
    "k": np.array([16]),
    "two": np.array([2]),
    "shape": np.array([1, 16, 4]),
    "w": np.eye(4, dtype=np.float32),
    "zero": np.float32(0),
    "four": np.array([4]),
    "five": np.array([5]),
    "widest": np.array([1, 16, 5]),
}


def built(text: str, **arrays: Any) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f"{HEADER} {text}")
    read = {name for node in proto.graph.node for name in node.input}
    every = {**CONSTANTS, **arrays}
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(every[n]), n) for n in every if n in read)
    onnx.checker.check_model(proto)
    return proto


@pytest.mark.parametrize(("text", "expected"), GRAPHS.values(), ids=GRAPHS)
def test_what_an_output_is_chosen_from(text: str, expected: dict[str, set[str]]) -> None:
    model = ir.serde.deserialize_model(built(text))
    found = chosen_outputs(model)
    assert {name: {label for *_, label in readers} for name, readers in found.items()} == expected
    readers = [reader for each in found.values() for reader in each]
    assert has_readers(model, readers)
    assert not has_readers(model, [("gone", 0, "x (into gone)")])
    labels = [label for *_, label in readers]
    assert {label for *_, label in compared_readers(model, labels)} == set(labels)


def quantized(folder: Path, proto: onnx.ModelProto, *shape: int) -> Result:
    onnx.save(proto, folder / "m.onnx")
    random = np.random.default_rng(1)
    data = [{"x": random.normal(size=(1, *shape)).astype(np.float32)} for _ in range(16)]
    options = Options(effort="low", place="rules", force_int8=True)
    return quantize_model(folder / "m.onnx", data, folder / "q.onnx", options)


def test_a_map_of_classes_is_judged_by_its_scores(tmp_path: Path) -> None:
    """Integers have no SQNR: such a model was said to have the same outputs, whatever it lost."""
    weights = np.random.default_rng(0).normal(0, 0.2, (8, 16, 3, 3)).astype(np.float32)
    text = """net (float[1,16,16,16] x) => (int64[1,1,16,16] y) {
      [conv] a = Conv<pads = [1, 1, 1, 1]>(x, w)
      [most] y = ArgMax<axis = 1>(a) }"""
    found = quantized(tmp_path, built(text, w=weights), 16, 16, 16)
    assert set(found.accuracy.sqnr_db) == {"a (into ArgMax)"}
    assert 25 < found.accuracy.worst_sqnr_db < 60
    (node,) = found.float_nodes
    assert (node.name, node.operator, node.us is not None and node.us > 0) == ("most", "ArgMax", True)
    note = "the model chooses 'y' by its own scores: what it chooses from is judged in its place, a (into ArgMax)"
    assert [each for each in found.notes if "chooses" in each] == [note]  # integers have no SQNR of their own


def test_boxes_in_another_order_are_no_loss(tmp_path: Path) -> None:
    """64 candidates with nearly the same scores: any noise changes their order."""
    random = np.random.default_rng(0)
    text = f"""net (float[1,64,16] x) => (float[1,16,4] y) {{
      [score] scores = MatMul(x, s)
      [place] boxes = MatMul(x, p){BOXES}
      [copy] y = Identity(b) }}"""
    scores = (0.02 * random.normal(size=(16, 8))).astype(np.float32)
    places = random.normal(size=(16, 4)).astype(np.float32)
    found = quantized(tmp_path, built(text, s=scores, p=places), 64, 16)
    assert set(found.accuracy.sqnr_db) == {"m (into TopK)", "boxes (into GatherElements)"}
    assert found.promise is not None
    assert found.promise.kept
    (note,) = (each for each in found.notes if "chooses" in each)
    assert note.startswith("the model chooses 'y' by its own scores: what it chooses from is judged in its place, ")
    assert "boxes (into GatherElements)" in note
    assert float(re.findall(r"its own SQNR, (-?[\d.]+) dB, says little", note)[0]) < 20
    assert ("note", note) in found.rows()


def test_a_note_about_many_tensors_names_three() -> None:
    model = ir.serde.deserialize_model(built(GRAPHS["a detector"][0]))
    labels = [f"{name} (into NonMaxSuppression)" for name in "abcd"]
    cut = Accuracy(8, None, {"z": 30.0, **dict.fromkeys(labels, 40.0)}, replaced={"boxes": -math.inf})
    (note,) = replaced_notes(model, cut)
    assert f"in its place, {', '.join(labels[:3])} and 1 more; " in note
    assert "its own SQNR, nothing in common, says little" in note
    assert [*replaced_notes(model, Accuracy(8, None, {"z": 30.0}))] == []


@pytest.mark.parametrize(("noise", "told"), [(1e-2, 1), (0.0, 0)], ids=["another order", "equal"])
def test_a_comparison_says_that_an_order_means_little(tmp_path: Path, noise: float, told: int) -> None:
    random = np.random.default_rng(0)
    scores = (0.02 * random.normal(size=(16, 8))).astype(np.float32)
    places = random.normal(size=(16, 4)).astype(np.float32)
    text = f"""net (float[1,64,16] x) => (float[1,16,4] y) {{
      [score] scores = MatMul(x, s)
      [place] boxes = MatMul(x, p){BOXES}
      [copy] y = Identity(b) }}"""
    onnx.save(built(text, s=scores, p=places), tmp_path / "a.onnx")
    other = scores + noise * random.normal(size=scores.shape).astype(np.float32)
    onnx.save(built(text, s=other, p=places), tmp_path / "b.onnx")
    data = [{"x": random.normal(size=(1, 64, 16)).astype(np.float32)} for _ in range(4)]
    found = compare_models(tmp_path / "a.onnx", tmp_path / "b.onnx", data)
    assert len(found.notes) == len(found.to_json()["notes"]) == told
    assert ["chooses 'y' by its own scores" in text for name, text in found.rows() if name == "note"] == [True] * told
