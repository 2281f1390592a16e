"""Sigmoid, HardSigmoid, SiLU and hard-swish in integers: the kernels that run, and how near they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from requant.calibration.model.session import Array
from requant.quantize import Options, Selection, quantize_model
from requant.quantize.runtime.profile import profiled
from requant.quantize.sensitivity.switch_model import tensor_switches
from requant.transforms import verify
from requant.transforms.int8.forms import gate_obstacle, gate_params, lookup_rounding, to_lookup
from requant.transforms.int8.insert_qdq import insert_qdq
from requant.transforms.int8.plan import Choice, Impl, Plan
from requant.transforms.int8.qparams import QParams, Scheme, asymmetric_u8
from requant.transforms.int8.units import units
from requant.transforms.int8.writer import Writer
from requant.transforms.qdq_to_qoperator import qdq_to_qoperator

CODES = np.arange(256, dtype=np.uint8)
MS = "com.microsoft"
HEAD = f'<ir_version: 8, opset_import: ["" : 17, "{MS}" : 1]>'
# Scale, zero point and code meet in three float32 operations; a code is at most 255 steps from its zero point.
ROUNDING = 255 * 3 * 2.0**-24


def run(model: ir.Model, x: Array) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    proto = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    return [np.asarray(found) for found in session.run(None, {"x": x})]


def hard_sigmoid(x: Array, slope: float, height: float) -> Array:
    return np.clip(slope * x.astype(np.float64) + height, 0.0, 1.0)


# ------------------------------------------------------------------------------------------ a HardSigmoid as a lookup


def lookup(slope: float, height: float, scale: float, zero: int) -> tuple[Array, QParams]:
    """Return what the lookup gives for every code, (256,) uint8, and its parameters."""
    text = f"""{HEAD} g (uint8[256] x) => (uint8[256] y) <float s = {{{scale!r}}}, uint8 z = {{{zero}}}> {{
      d = DequantizeLinear(x, s, z)
      h = HardSigmoid <alpha = {slope!r}, beta = {height!r}> (d)
      y = QuantizeLinear(h, s, z)
    }}"""
    model = ir.from_onnx_text(text)
    (node,) = [node for node in model.graph if node.op_type == "HardSigmoid"]
    params = gate_params(node)
    to_lookup(node, Writer.of(model, Scheme()))
    assert [node.op_type for node in model.graph] == ["QLinearLeakyRelu"]
    verify(model)
    return run(model, CODES)[0], params


@pytest.mark.parametrize(("slope", "height"), [(1 / 6, 0.5), (0.2, 0.5), (0.3, 0.4)])
def test_switches_round_as_the_lookup_does(slope: float, height: float) -> None:
    """Between 1 and the middle of the last two codes the lookup has the last but one; the operator is at its end."""
    scale, zero = 0.0517, 128
    codes, params = lookup(slope, height, scale, zero)
    x = ((CODES - float(zero)) * np.float32(scale)).astype(np.float32)
    text = f"""{HEAD} g (float[256] x) => (float[256] y) {{
      h = HardSigmoid <alpha = {slope!r}, beta = {height!r}> (x)
      y = Identity(h)
    }}"""
    model = ir.from_onnx_text(text)
    board = tensor_switches(model, {"h": lookup_rounding(model.graph[0])})
    found = board.run({"x": x}, board.everything)["y"]
    line, step = slope * x.astype(np.float64) + height, step_and_excess(height)[0]
    same = (line < 1) | (line > 254.5 * step)
    assert same.sum() > 250
    np.testing.assert_array_equal(found[same], (codes * params.scale)[same])


def allowed(slope: float, height: float) -> bool:
    node = ir.node("HardSigmoid", [ir.Value(name="x")], {"alpha": slope, "beta": height})
    return not gate_obstacle(node)


def step_and_excess(height: float) -> tuple[float, float]:
    """Return the step s of the codes, and by how much the last of them, 255 s, is above 1."""
    step = height / int(255 * height)
    return step, 255 * step - 1


def float32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_subnormal=False)


GRIDS = [number / 255 for number in (1, 2, 51, 85, 127, 170, 254)]
HEIGHTS = st.one_of(float32(2.0**-7, 1 - 2.0**-7), st.sampled_from([0.5, 0.2, 0.25, *GRIDS]).map(np.float32).map(float))


@pytest.mark.slow
@settings(max_examples=150)
@given(slope=float32(2.0**-7, 64), height=HEIGHTS, scale=float32(2.0**-12, 4), zero=st.integers(0, 255))
def test_a_lookup_is_off_by_half_a_step_and_what_the_scale_is_off(
    slope: float, height: float, scale: float, zero: int
) -> None:
    """The codes are rounded to steps s and read as steps s' = 2 s / (2 + e), where the last code is e above 1.

    Of a code c the rounding is off by s / 2 at most, and the scale by c (s - s') = c s e / (2 + e) <= e / (2 + e).
    The last code takes what is beyond it: its value 1 + e / (2 + e) stands for 254.5 s to 1, which is as near.
    """
    assume(allowed(slope, height))
    codes, params = lookup(slope, height, scale, zero)
    step, excess = step_and_excess(height)
    exact = hard_sigmoid((CODES.astype(np.float64) - zero) * np.float32(scale), slope, height)
    read = codes * float(params.scale)
    assert int(params.zero_point) == 0
    assert np.abs(read - exact).max() <= step / 2 + excess / (2 + excess) + ROUNDING * step
    assert 0 <= excess <= step * (1 + 1e-9)
    assert np.all(np.diff(codes.astype(int)) >= 0)
    bottom, top = (exact == end for end in (0.0, 1.0))
    assert not codes[bottom].any()
    far = top & (slope * (CODES.astype(np.float64) - zero) * np.float32(scale) + height >= 255 * step)
    assert np.all(codes[far] == 255)
    assert np.abs(read[far] - 1).max(initial=0.0) <= float(params.scale) / 2 + 2.0**-23


@pytest.mark.parametrize(("slope", "height"), [(0.2, 0.5), (1 / 6, 0.5), (3.0, 0.2)], ids=["default", "sixth", "steep"])
def test_of_what_was_rounded_before_it_is_off_by_a_step_more(slope: float, height: float) -> None:
    """Half a step of the input, times the slope: a HardSigmoid stretches no distance more than that."""
    slope, height = float(np.float32(slope)), float(np.float32(height))
    values = np.random.default_rng(0).uniform(-4, 4, 4000).astype(np.float32)
    made = asymmetric_u8(-4.0, 4.0)
    codes = np.clip(np.rint(values / made.scale) + made.zero_point, 0, 255).astype(np.uint8)
    found, params = lookup(slope, height, float(made.scale), int(made.zero_point))
    step, excess = step_and_excess(height)
    input_step = float(made.scale)
    inside = np.abs(values) <= 4 - input_step / 2  # of what saturates there is no bound
    off = np.abs(found[codes] * float(params.scale) - hard_sigmoid(values, slope, height))[inside]
    assert off.max() <= step / 2 + excess / (2 + excess) + slope * input_step / 2 + ROUNDING * step
    assert off.max() <= step + slope * input_step / 2  # of these heights the two together are at most a step
    assert off.max() > slope * input_step / 4  # and it is no bound that anything would keep


UNUSUAL = {
    "flat": (0.0, 0.5),
    "falling": (-0.2, 0.5),
    "no height": (0.2, 0.0),
    "below a step": (0.2, 0.003),
    "full height": (0.2, 1.0),
    "negative height": (0.2, -0.5),
    "off the grid": (0.2, 0.1),  # 25.5 / 255: steps of 0.1 / 25, of which 255 are 1.02, five steps above 1
}


@pytest.mark.parametrize(("slope", "height"), UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_slope_or_height_has_no_lookup(slope: float, height: float) -> None:
    assert not allowed(slope, height)


@pytest.mark.parametrize("height", [0.5, 0.2, 0.6, 2 / 255, 254 / 255])
def test_a_usual_height_has_one(height: float) -> None:
    assert allowed(1 / 6, height)


# ------------------------------------------------------------------------------------------------- where they stand


def emitted(nodes: str, outputs: str = "y", scheme: Scheme | None = None, scale: float = 12 / 255) -> ir.Model:
    """Write all units of a model that reads x (3, 4, 5) in integers; the tensors share the range -6 to 6."""
    scheme = scheme or Scheme()
    typed = ", ".join(f"float[3,4,5] {name}" for name in outputs.split())
    model = ir.from_onnx_text(f"{HEAD} g (float[3,4,5] x) => ({typed}) {{ {nodes} }}")
    for node in model.graph:
        for output in node.outputs:
            output.dtype, output.shape = ir.DataType.FLOAT, ir.Shape((3, 4, 5))
    found = units(model.graph)
    plan = Plan(found, {unit.name: Choice(Impl.U8) for unit in found})
    zero = np.asarray(128, np.uint8) if scheme.activation == "u8" else np.asarray(0, np.int8)
    qparams = {t: QParams(scale=np.asarray(scale, np.float32), zero_point=zero) for t in plan.observed}
    insert_qdq(model, plan=plan, qparams=qparams, scheme=scheme)
    verify(model)
    return model


def draw() -> Array:
    return np.random.default_rng(2).uniform(-5.9, 5.9, (3, 4, 5)).astype(np.float32)


def kernels(model: ir.Model, x: Array) -> list[str]:
    names = [run.op for run in profiled(ir.to_proto(model).SerializeToString(), {"x": x}).runs]
    return [name for name in names if name not in ("QuantizeLinear", "DequantizeLinear", "Transpose")]


SIXTH = "HardSigmoid <alpha = 0.16666667>"
HARD, SOFT = "QLinearLeakyRelu", "QLinearSigmoid"
PLACES = {
    "the last": (f"[g] y = {SIXTH} (x)", "y", [HARD]),
    "two of one tensor": (f"[g] y = {SIXTH} (x) [h] z = HardSigmoid(x)", "y z", [HARD, HARD]),
    "one after the other": (f"[g] a = {SIXTH} (x) [h] y = HardSigmoid(a)", "y", [HARD, HARD]),
    "read in float too": (f"[g] a = {SIXTH} (x) [h] y = HardSigmoid(a)", "y a", [HARD, HARD]),
    "moved before and after": (
        f"[t] a = Transpose <perm = [0, 1, 2]> (x) [g] b = {SIXTH} (a) [u] y = Transpose <perm = [0, 1, 2]> (b)",
        "y",
        None,
    ),
    "gate": (f"[g] s = {SIXTH} (x) [m] y = Mul(x, s)", "y", [HARD, "QLinearMul"]),
    "gate the other way": (f"[g] s = {SIXTH} (x) [m] y = Mul(s, x)", "y", [HARD, "QLinearMul"]),
    "gate of a gate": (
        f"[g] s = {SIXTH} (x) [m] a = Mul(s, x) [h] t = Sigmoid(a) [n] y = Mul(a, t)",
        "y",
        [HARD, "QLinearMul", SOFT, "QLinearMul"],
    ),
    "sigmoid": ("[g] y = Sigmoid(x)", "y", [SOFT]),
    "SiLU": ("[g] s = Sigmoid(x) [m] y = Mul(x, s)", "y", [SOFT, "QLinearMul"]),
}


@pytest.mark.parametrize(("nodes", "outputs", "expected"), PLACES.values(), ids=PLACES)
def test_it_runs_in_integers_and_comes_near(nodes: str, outputs: str, expected: list[str] | None) -> None:
    """Every tensor is rounded to a step of 12 / 255, gates to one of 1 / 254; no operator here stretches by over 1.5.

    Half a step for what a tensor is rounded to, stretched by all that follow, and a step of a gate times 6, the
    greatest it is multiplied by, for each gate; a gate of a gate is the longest of them.
    """
    x, model = draw(), emitted(nodes, outputs)
    before = ir.from_onnx_text(
        f"{HEAD} g (float[3,4,5] x) => ({', '.join(f'float[3,4,5] {name}' for name in outputs.split())}) {{ {nodes} }}"
    )
    if expected is not None:
        assert sorted(kernels(model, x)) == sorted(expected)
    gates = nodes.count("Mul")
    half = 12 / 255 / 2
    bound = half
    for _ in range(max(gates, 1 + nodes.count("[h]"))):
        bound = 1.5 * bound + (6 / 254 if gates else 1 / 254) + half
    for found, exact in zip(run(model, x), run(before, x), strict=True):
        assert np.abs(found - exact).max() <= bound
        assert np.ptp(exact) > 10 * bound or not gates


@pytest.mark.parametrize(("nodes", "outputs"), [entry[:2] for entry in PLACES.values()], ids=list(PLACES))
def test_the_fused_operators_compute_the_same(nodes: str, outputs: str) -> None:
    """What the runtime makes of the pairs is what `qdq_to_qoperator` writes."""
    pairs = emitted(nodes, outputs)
    fused = pairs.clone()
    qdq_to_qoperator(fused)
    verify(fused)
    left = {node.op_type for node in fused.graph}
    assert not left & {"Sigmoid", "HardSigmoid", "Mul"}
    x = draw()
    for one, other in zip(run(pairs, x), run(fused, x), strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_hard_sigmoid_of_somebody_elses_pairs_is_left_alone() -> None:
    """With a scale that is not that of its lookup the integer operator would compute something else."""
    text = f"""{HEAD} g (uint8[256] x) => (uint8[256] y) <float s = {{0.05}}, uint8 z = {{128}}, float t = {{0.004}}, uint8 o = {{0}}> {{
      d = DequantizeLinear(x, s, z) h = HardSigmoid(d) y = QuantizeLinear(h, t, o)
    }}"""
    model = ir.from_onnx_text(text)
    before = run(model, CODES)[0]
    assert qdq_to_qoperator(model).applied == 0
    assert run(model, CODES)[0].tobytes() == before.tobytes()


# ------------------------------------------------------------------------------------------------------ whole models

GATES = {
    "SiLU": "[g1] s = Sigmoid(a) [m1] b = Mul(a, s) c = Conv(b, w) [g2] t = Sigmoid(c) [m2] d = Mul(t, c)",
    "hard-swish": f"[g1] s = {SIXTH} (a) [m1] b = Mul(a, s) c = Conv(b, w) [g2] t = {SIXTH} (c) [m2] d = Mul(t, c)",
}


def write(path: Path, nodes: str) -> tuple[Path, list[dict[str, Array]]]:
    """Write a model of three convolutions with gates between; return it with feeds."""
    text = f"net (float[1,8,10,10] x) => (float[1,8,4,4] y) {{ a = Conv(x, v) {nodes} y = Conv(d, u) }}"
    model, random = (
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}'),
        np.random.default_rng(0),
    )
    for name in "vwu":
        array = (random.standard_normal((8, 8, 3, 3)) / 6).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path, [{"x": random.standard_normal((1, 8, 10, 10)).astype(np.float32)} for _ in range(4)]


def quantized(path: Path, nodes: str, **asked: Any) -> list[str]:
    """Quantize a model of gates and return the kernels that run, layouts and pairs aside."""
    model, feeds = write(path / "float.onnx", nodes)
    options = Options(**{"force_int8": True, "force": True, "seconds": 0.0, "place": "all", **asked})
    quantize_model(model, feeds, path / "int8.onnx", options)
    names = [run.op for run in profiled(path / "int8.onnx", feeds[0], threads=1).runs]
    return [name for name in names if name not in ("QuantizeLinear", "DequantizeLinear", "Transpose")]


@pytest.mark.parametrize("format_", ["qdq", pytest.param("qoperator", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("gate", "table"), [("SiLU", SOFT), ("hard-swish", HARD)])
def test_gates_between_convolutions_run_in_integers(tmp_path: Path, gate: str, table: str, format_: str) -> None:
    conv, pair = "QLinearConv", [table, "QLinearMul"]
    assert quantized(tmp_path, GATES[gate], format=format_) == [conv, *pair, conv, *pair, conv]
    if format_ == "qoperator":
        written = [node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node]
        assert written == ["QuantizeLinear", conv, *pair, conv, *pair, conv, "DequantizeLinear"]


def test_signed_activations_have_a_sigmoid_but_no_lookup_of_a_line(tmp_path: Path) -> None:
    signed = {"scheme": Scheme(activation="s8"), "format": "qoperator"}
    assert quantized(tmp_path, GATES["SiLU"], **signed).count(SOFT) == 2
    ran = quantized(tmp_path, GATES["hard-swish"], **signed)
    assert ran.count("HardSigmoid") == 2
    assert HARD not in ran


def test_of_two_gates_one_may_stay_float(tmp_path: Path) -> None:
    """It is then one kernel, as the runtime fuses it of a float tensor, whatever the other is."""
    ran = quantized(tmp_path, GATES["SiLU"], selection=Selection(exclude_nodes=frozenset({"m2"})))
    assert (ran.count(SOFT), ran.count("QLinearMul"), ran.count("QuickGelu")) == (1, 1, 1)
    assert not {"Sigmoid", "Mul"} & {*ran}


def test_by_rule_gates_stay_float(tmp_path: Path) -> None:
    ran = quantized(tmp_path, GATES["SiLU"], place="rules")
    assert (ran.count("QuickGelu"), ran.count("QLinearConv"), SOFT in ran) == (2, 3, False)
