"""What ran: kernels, multiply-accumulates and their integer share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from requant import RequantError
from requant.quantize import Options, quantize_model
from requant.quantize.runtime import match
from requant.quantize.runtime.kernels import uint8_kernels
from requant.quantize.runtime.profile import KernelRun, integer_share, profiled
from requant.quantize.runtime.session import Runner

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
DIGITS = SAMPLE_MODELS / "digits.onnx"
# outputs x products per output: 28 x 28 x 32 of 5 x 5 x 1; 14 x 14 x 64 of 5 x 5 x 32; 128 of 3136; 10 of 128
CONV1, CONV2, FC1, FC2 = 28 * 28 * 32 * 25, 14 * 14 * 64 * 800, 128 * 3136, 10 * 128


def image() -> NDArray[np.float32]:
    with np.load(SAMPLE_MODELS / "digits.npz") as file:
        return np.asarray(file["image"][:1])


@pytest.fixture(scope="module")
def digits_int8(tmp_path_factory: pytest.TempPathFactory, set_latency: Callable[..., None]) -> Path:
    output = tmp_path_factory.mktemp("digits") / "int8.onnx"
    with pytest.MonkeyPatch.context() as patch:  # what is faster on this machine does not matter here
        set_latency(patch)
        quantize_model(DIGITS, f"{SAMPLE_MODELS / 'digits.npz'}:calib", output, Options(samples=50))
    return output


def products(runs: tuple[KernelRun, ...]) -> list[int]:
    return [run.macs for run in runs if run.macs]


def test_the_multiply_accumulates_of_the_float_model_are_those_counted_by_hand() -> None:
    runs = profiled(DIGITS, {"image": image()}, threads=1).runs
    assert (CONV1, CONV2, FC1, FC2) == (627_200, 10_035_200, 401_408, 1_280)
    assert products(runs) == [CONV1, CONV2, FC1, FC2]
    assert integer_share(runs) == 0.0
    assert not any(run.integer for run in runs)


def test_a_batch_multiplies_them() -> None:
    runs = profiled(DIGITS, {"image": np.repeat(image(), 3, axis=0)}, threads=1).runs
    assert products(runs) == [3 * macs for macs in (CONV1, CONV2, FC1, FC2)]
    assert all(shape[0] == 3 for run in runs if run.macs for shape in run.outputs)


@pytest.mark.slow
def test_the_int8_model_does_as_many_and_most_of_them_in_integers(digits_int8: Path) -> None:
    runs = profiled(digits_int8.read_bytes(), {"image": image()}, threads=1).runs
    assert products(runs) == [CONV1, CONV2, FC1, FC2]
    assert [run.op for run in runs if run.macs][1:] == ["QLinearConv", "QGemm", "QGemm"]
    assert integer_share(runs) == (CONV2 + FC1 + FC2) / (CONV1 + CONV2 + FC1 + FC2)
    assert all(run.microseconds >= 0 for run in runs)


def test_matrix_products_of_any_rank_and_transposition_in_nodes_without_names(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[2,3,K,5] a, float[7,4] b, float[7,6] c, float[1,6,8,8] d) => (float[] y, float[4,6] z, float[] t) {
      y = MatMul(a, w)
      z = Gemm<transA = 1>(b, c)
      t = Conv<group = 3>(d, v)
    }"""
    proto = onnx.parser.parse_model(text)
    for name, shape in (("w", (5, 9)), ("v", (9, 2, 3, 3))):
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(proto, tmp_path / "m.onnx")
    shapes = {"a": (2, 3, 4, 5), "b": (7, 4), "c": (7, 6), "d": (1, 6, 8, 8)}
    runs = profiled(tmp_path / "m.onnx", {name: np.ones(shape, np.float32) for name, shape in shapes.items()}).runs
    assert sorted(products(runs)) == sorted([2 * 3 * 4 * 9 * 5, 4 * 6 * 7, 9 * 6 * 6 * 2 * 9])


def test_the_share_of_nothing_is_zero() -> None:
    assert integer_share([]) == 0.0
    assert integer_share([KernelRun("add", "", "Add", 1.0, 0, ())]) == 0.0


def test_the_profile_is_left_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profiled(DIGITS, {"image": image()})
    assert list(tmp_path.iterdir()) == []


def test_the_runtime_says_which_kernels_it_has() -> None:
    found = uint8_kernels()
    assert {("", "QLinearConv"), ("com.microsoft", "QGemm"), ("", "MaxPool")} <= found
    assert ("", "Softmax") not in found


def test_a_runner_names_its_outputs_and_says_what_fails() -> None:
    run = Runner(DIGITS)
    assert {name: value.shape for name, value in run({"image": image()}).items()} == {"logits": (1, 10)}
    with pytest.raises(RequantError, match=r"digits\.onnx: the model fails: .*tensor\(double\)"):
        run({"image": image().astype(np.float64)})


RECURRENT = """<ir_version: 8, opset_import: ["" : 17]> g (float[T,N,C] x, float[N,C,H,W] m) => (float[T,D,N,K] y, float[N,M,P,Q] z) {
    [lstm] y = LSTM <hidden_size = 5, direction = "bidirectional"> (x, w, r)
    [up] z = ConvTranspose <strides = [2, 2]> (m, k)
}"""


def test_recurrent_and_transposed_operators_count() -> None:
    model = onnx.parser.parse_model(RECURRENT)
    for name, shape in (("w", (2, 20, 3)), ("r", (2, 20, 5)), ("k", (3, 4, 2, 2))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    feed = {"x": np.ones((7, 2, 3), np.float32), "m": np.ones((1, 3, 6, 6), np.float32)}
    macs = {run.op: run.macs for run in profiled(model.SerializeToString(), feed, threads=1).runs if run.macs}
    # 7 steps of 2 items through both directions of W (20, 3) and R (20, 5); 36 places of 3 channels to 4 of 2x2 each
    assert macs == {"LSTM": 7 * 2 * 2 * 20 * (3 + 5), "ConvTranspose": 36 * 3 * 4 * 4}


def test_kernels_in_the_body_of_a_loop_count_once_per_iteration_and_the_loop_itself_takes_no_time(
    tmp_path: Path,
) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[2,64] x) => (float[2,64] y) <int64 count = {5}, bool on = {1}, float[64,64] w = {}> {
        y = Loop(count, on, x) <body = body (int64 i, bool c, float[2,64] a) => (bool go, float[2,64] b) {
            go = Identity(c)
            m = MatMul(a, w)
            b = Tanh(m)
        }>
    }"""
    proto = onnx.parser.parse_model(text)
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    proto.graph.initializer[2].CopyFrom(numpy_helper.from_array(weights / 8, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    runs = {run.op: run for run in profiled(tmp_path / "m.onnx", {"x": np.ones((2, 64), np.float32)}, threads=1).runs}
    assert (runs["Loop"].microseconds, runs["Loop"].steps) == (0.0, 1)
    assert (runs["MatMul"].steps, runs["MatMul"].macs) == (5, 5 * 2 * 64 * 64)
    assert runs["MatMul"].microseconds > 0


def test_moved_conversions_are_found_by_their_scales_at_one_look_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[ir.Node] = []
    scale_of = match._scale

    def look(node: ir.Node) -> str | None:
        looks.append(node)
        return scale_of(node)

    monkeypatch.setattr(match, "_scale", look)

    def graph(prefix: str, order: range) -> ir.Graph:
        nodes = []
        for place in order:
            inputs = [ir.val(f"{prefix}_x{place}"), ir.val(f"s{place // 2}")]  # two nodes have one scale
            nodes.append(ir.node("QuantizeLinear", inputs, name=f"{prefix}{place}"))
            nodes[-1].outputs[0].name = f"{prefix}_y{place}"
        return ir.Graph([], [], nodes=nodes, opset_imports={"": 17}, name=prefix)

    ran = graph("ran", range(39, -1, -1))
    found = match.match(ir.Model(graph("own", range(40)), ir_version=9), ran, [str(node.name) for node in ran])
    assert found.kernels == {f"own{place}": f"ran{place ^ 1}" for place in range(40)}  # the first one that ran
    assert len(looks) == 2 * 40
