"""Models for other runtimes than ONNX Runtime too: what they are spelled in, and where their pairs are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from requant import RequantError
from requant.cli import main
from requant.quantize import Options, Result, quantize_model
from requant.quantize.placement.facts import facts_of
from requant.quantize.placement.rules import choose_by
from requant.transforms.int8.plan import Impl

from ...conftest import SetLatency

# All that ONNX Runtime's kernels want otherwise: a first convolution of three channels, a gate, branches that meet, a
# Gemm whose Relu writes float, and a depthwise convolution.
TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N, 3, 16, 16] x) => (float[N, 8] y) {
    [first] a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w1)
    [swish] b = HardSwish (a)
    [left] c = Conv (b, w2)
    [right] d = Conv <pads = [1, 1, 1, 1], group = 8> (b, w3)
    [act] e = Relu (c)
    [join] f = Concat <axis = 1> (e, d)
    [pool] g = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (f)
    [second] h = Conv (g, w4)
    [gate] i = Sigmoid (h)
    [silu] j = Mul (h, i)
    [mean] k = GlobalAveragePool (j)
    [flat] l = Flatten (k)
    [full] m = Gemm (l, w5)
    [relu] n = Relu (m)
    [last] y = Erf (n)
}"""
SHAPES = {"w1": (8, 3, 3, 3), "w2": (8, 8, 1, 1), "w3": (8, 1, 3, 3), "w4": (16, 16, 1, 1), "w5": (16, 8)}


def quantized(folder: Path, **options: Any) -> tuple[Result, onnx.ModelProto]:
    """Quantize the model."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) / 2 for name, shape in SHAPES.items()}
    made = ir.from_onnx_text(TEXT, initializers=[ir.tensor(array, name=name) for name, array in weights.items()])
    ir.save(made, folder / "m.onnx")
    feeds = [{"x": rng.uniform(-1, 1, (2, 3, 16, 16)).astype(np.float32)} for _ in range(8)]
    asked = Options(**{"portable": True, "seconds": 0.01, "force": True} | options)
    result = quantize_model(folder / "m.onnx", feeds, folder / "q.onnx", asked)
    return result, onnx.load(folder / "q.onnx")


def test_operators_are_standard_and_whole(tmp_path: Path) -> None:
    _, found = quantized(tmp_path)
    assert {node.domain for node in found.graph.node} == {""}
    ops = Counter(node.op_type for node in found.graph.node if "Linear" not in node.op_type)
    assert ops == Counter(node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node)


@pytest.mark.parametrize("portable", [True, False])
def test_the_time_of_a_portable_model_decides_nothing(
    portable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_latency: SetLatency
) -> None:
    """ONNX Runtime is not the runtime that it is for."""
    set_latency(monkeypatch, float_ms=1.0, int8_ms=1.5)
    result, found = quantized(tmp_path, portable=portable, place="rules")
    assert ("int8 gains too little" in result.why_not) is not portable
    assert (result.int8_nodes > 0) is portable
    assert any("Linear" in node.op_type for node in found.graph.node) is portable


def test_the_help_says_so() -> None:
    shown = " ".join(CliRunner().invoke(main, ["quantize", "--help"]).output.split())
    assert "INT8 is written whatever its time with --portable" in shown


def test_every_product_reads_integers_and_weights_are_about_zero(tmp_path: Path) -> None:
    _, found = quantized(tmp_path)
    made = {node.output[0]: node for node in found.graph.node}
    constants = {each.name: numpy_helper.to_array(each) for each in found.graph.initializer}
    products = [node for node in found.graph.node if node.op_type in ("Conv", "Gemm")]
    assert {node.name for node in products} == {"first", "left", "right", "second", "full"}
    for node in products:
        weights = made[node.input[1]]
        assert {made[name].op_type for name in node.input} == {"DequantizeLinear"}
        assert constants[weights.input[0]].dtype == np.int8
        assert not constants[weights.input[2]].any()


def test_pairs_are_where_integers_are_read(tmp_path: Path) -> None:
    _, found = quantized(tmp_path)
    read = {
        name: [n.op_type for n in found.graph.node if name in n.input]
        for node in found.graph.node
        for name in node.output
    }
    pairs = [node.input[0] for node in found.graph.node if node.op_type == "QuantizeLinear"]
    assert read["a"] == ["HardSwish"]  # which other runtimes make a part of the convolution
    assert set(pairs) == {"x", "b", "e", "d", "f", "g", "l"}


def test_what_ruins_a_model_in_uint8_may_be_written_in_float(tmp_path: Path) -> None:
    quantized(tmp_path)
    made = ir.load(tmp_path / "m.onnx")
    facts = replace(facts_of(made), portable=True, kept_float={"a": "because", "h": "because"})
    found = choose_by(facts, made)
    assert {name: found.choices[name].impl for name in ("first", "second")} == dict.fromkeys(
        ("first", "second"), Impl.U8_FLOAT
    )


def test_what_is_joined_has_the_scale_of_the_result(tmp_path: Path) -> None:
    _, found = quantized(tmp_path)
    scales = {node.input[0]: node.input[1] for node in found.graph.node if node.op_type == "QuantizeLinear"}
    assert scales["e"] == scales["d"] == scales["f"] == scales["g"]


def test_the_speed_of_this_runtime_decides_nothing(tmp_path: Path) -> None:
    result, _ = quantized(tmp_path)
    assert result.latency is not None
    assert (result.why_not, result.placement.how) == ("", "rules")
    assert result.accuracy.worst_sqnr_db > 20  # layers of 8 bits have about 40 dB each
    assert not result.notes  # of products that this runtime computes in float


@pytest.mark.slow
def test_its_plan_is_taken_back(tmp_path: Path) -> None:
    result, found = quantized(tmp_path)
    (tmp_path / "q.plan.json").rename(tmp_path / "p.json")
    again, same = quantized(tmp_path, plan=tmp_path / "p.json")
    assert again.forms == result.forms
    assert [node.op_type for node in same.graph.node] == [node.op_type for node in found.graph.node]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fused operators": ({"format": "qoperator"}, "the format qoperator (it needs qdq)"),
    "everything": ({"place": "all"}, "the placement all (it needs measured or rules)"),
    "built-in costs": ({"place": "estimated"}, "the placement estimated (it needs measured or rules)"),
    "costs": ({"costs": "server.json"}, "given costs"),
    "two": ({"format": "qoperator", "costs": "s.json"}, "the format qoperator (it needs qdq) and given costs"),
}


@pytest.mark.parametrize(("options", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_portable_is_refused_by_its_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(RequantError) as refusal:
        Options(portable=True, **options)
    assert str(refusal.value) == f"portable does not go with {named}"


def test_recurrent_networks_stay_float(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"w": (1, 1024, 32), "r": (1, 1024, 256)}
    made = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17]>
        net (float[T, N, 32] x) => (float[T, D, N, 256] y) { [cell] y = LSTM <hidden_size = 256> (x, w, r) }""",
        initializers=[ir.tensor(rng.standard_normal(s).astype(np.float32) / 16, name=n) for n, s in shapes.items()],
    )
    ir.save(made, tmp_path / "m.onnx")
    feeds = [{"x": rng.standard_normal((4, 1, 32)).astype(np.float32)}]
    asked = Options(portable=True, seconds=0.01, force=True)
    result = quantize_model(tmp_path / "m.onnx", feeds, tmp_path / "q.onnx", asked)
    assert result.int8_nodes == 0
    assert {node.domain for node in onnx.load(tmp_path / "q.onnx").graph.node} == {""}


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    quantized(tmp_path)
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(1).uniform(-1, 1, (8, 3, 16, 16)).astype(np.float32))
    asked = ["quantize", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "-o", str(tmp_path / "o.onnx")]
    assert CliRunner().invoke(main, [*asked, "--portable", "-q"]).exit_code == 0
    refused = CliRunner().invoke(main, [*asked, "--portable", "--place", "all", "--force"])
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
