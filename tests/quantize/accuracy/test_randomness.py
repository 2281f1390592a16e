"""Models that draw random numbers: one note names a node and says what to do, where the outputs depend on it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from requant.quantize import Options, compare_models, quantize_model
from requant.quantize.accuracy.randomness import random_nodes, randomness
from requant.quantize.runtime.runtimes import Sessions

NOISE = "n = Add(h, noise)"
MODELS = {
    "RandomNormalLike": f"[drawn] noise = RandomNormalLike(h) {NOISE}",
    "RandomUniformLike": f"[drawn] noise = RandomUniformLike(h) {NOISE}",
    "RandomNormal": f"[drawn] noise = RandomNormal <shape = [1, 16], seed = 7.0> () {NOISE}",
    "RandomUniform": f"[drawn] noise = RandomUniform <shape = [1, 16]> () {NOISE}",
    "Bernoulli": f"p = Sigmoid(h) [drawn] noise = Bernoulli(p) {NOISE}",
    "Multinomial": "p = Sigmoid(h) [drawn] k = Multinomial <sample_size = 99> (p) f = Cast <to = 1> (k) "
    "m = ReduceMean(f) n = Add(h, m)",
}


def saved(folder: Path, body: str, inputs: str = "") -> Path:
    """Write a product, what follows it, and a Relu."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> net (float[N, 16] x{inputs}) => (float[N, 16] y) '
        f"{{ [product] h = MatMul(x, w) {body} [last] y = Relu(n) }}"
    )
    weights = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


def feeds(count: int = 8, **more: np.ndarray) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal((1, 16)).astype(np.float32), **more} for _ in range(count)]


def note_on(path: Path, feed: dict[str, np.ndarray]) -> str:
    found = randomness(ir.load(path), partial(Sessions(path).runner, 1), feed)
    return found.note if found else ""


@pytest.mark.parametrize(("op", "body"), MODELS.items(), ids=MODELS)
def test_a_note_names_the_node(tmp_path: Path, op: str, body: str) -> None:
    found = note_on(saved(tmp_path, body), feeds()[0])
    assert f"node 'drawn' ({op})" in found
    assert " dB at y)" in found
    assert "make the numbers an input of the model, or set their scale to 0" in found


def test_a_scale_of_zero_in_the_data_leaves_nothing_to_say(tmp_path: Path) -> None:
    body = "[drawn] r = RandomNormalLike(h) noise = Mul(r, scale) n = Add(h, noise)"
    path = saved(tmp_path, body, ", float[1] scale")
    for scale in (0.0, 0.5):
        given = feeds(scale=np.array([scale], np.float32))
        assert bool(note_on(path, given[0])) is (scale > 0)


def test_a_dropout_in_training_is_tried(tmp_path: Path) -> None:
    """The runtime ignores the mode: what counts is whether two runs differ."""
    both = "yes = Constant <value = bool {1}> () half = Constant <value = float {0.5}> ()"
    path = saved(tmp_path, f"{both} [drawn] n = Dropout(h, half, yes)")
    assert [node.name for node in random_nodes(ir.load(path))] == ["drawn"]
    one, two = (Sessions(path).runner(1)(feeds()[0])["y"] for _ in range(2))
    assert bool(note_on(path, feeds()[0])) is not np.array_equal(one, two)


def test_other_models_are_not_run(tmp_path: Path) -> None:
    no, idle = "no = Constant <value = bool {0}> () half = Constant <value = float {0.5}> ()", "n = Identity(h)"
    for body in (f"{no} n = Dropout(h, half, no)", "n = Dropout(h)", idle):
        assert random_nodes(ir.load(saved(tmp_path, body))) == ()
        assert randomness(ir.load(tmp_path / "m.onnx"), lambda: pytest.fail("it was opened"), {}) is None


def test_lengths_that_differ_between_runs(tmp_path: Path) -> None:
    """Speech has a random length: there is no SQNR."""
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[N] x) => (float[1, M] y) {
        [drawn] r = RandomNormalLike(x)  zero = Constant <value_floats = [0.0]> ()
        up = Greater(r, zero)  found = NonZero(up)  y = Cast <to = 1> (found) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    assert "(in length or value at y)" in note_on(tmp_path / "m.onnx", {"x": np.zeros(999, np.float32)})


def test_nodes_in_bodies_count(tmp_path: Path) -> None:
    branches = """then_branch = one () => (float[N, 16] a) { [drawn] r = RandomNormalLike(h)  a = Add(h, r) },
                  else_branch = two () => (float[N, 16] d) { [other] s = RandomUniformLike(h)  d = Add(h, s) }"""
    path = saved(tmp_path, f"n = If (c) <{branches}>", ", bool c")
    assert "node 'drawn' (RandomNormalLike), like 1 other, draws" in note_on(path, {**feeds()[0], "c": np.array(True)})


def test_quantize_and_compare_say_it(tmp_path: Path, caplog: pytest.LogCaptureFixture, int8_wins: None) -> None:
    path = saved(tmp_path, MODELS["RandomNormalLike"])
    options = Options(effort="low", place="rules", force_int8=True, seconds=0.01)
    with caplog.at_level(logging.WARNING, "requant"):
        found = quantize_model(path, feeds(), tmp_path / "q.onnx", options)
    told = [note for note in found.notes if note.startswith("the outputs are random: node 'drawn' (RandomNormalLike)")]
    assert len(told) == 1
    assert [each.getMessage() for each in caplog.records] == [f"requant: {told[0]}"]
    compared = compare_models(path, tmp_path / "q.onnx", feeds())
    assert compared.notes[0].startswith("the outputs are random: node 'drawn' (RandomNormalLike)")


def test_nothing_judges_a_model_whose_float_runs_differ_more_than_int8_may(tmp_path: Path, int8_wins: None) -> None:
    """Units became float for an hour, one after another, to keep a promise that the float model itself misses."""
    for scale, judged in ((1.0, False), (1e-4, True)):
        drawn = f"[drawn] noise = RandomNormalLike <scale = {scale}> (h) {NOISE}"
        options = Options(effort="low", place="rules", seconds=0.01)
        found = quantize_model(saved(tmp_path, drawn), feeds(), tmp_path / f"{judged}.onnx", options)
        (note,) = (note for note in found.notes if note.startswith("the outputs are random"))
        assert note.endswith("is not judged") is not judged
        assert (found.promise is not None) is judged
        assert found.int8_nodes > 0
