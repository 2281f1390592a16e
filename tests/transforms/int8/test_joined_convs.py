"""Two convolutions of which only the sum is read: which become one, and that the one computes the sum."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import Array, open_session
from requant.quantize import Options, quantize_model
from requant.transforms.int8.joined_convs import find_sums
from requant.transforms.int8.plan import Choice, Impl, Plan
from requant.transforms.int8.qparams import Scheme
from requant.transforms.int8.units import units

from ...native import without_library

# Two branches from one input; `f` and `g` are replaced by what a case says of them.
TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N, {channels}, 8, 8] x) => (float[N, 16, rows, columns] y{more}) {{
    [in1] a = Conv (x, v1, b1)
    [left] l = Conv {f} (a, w1, c1)
    [right] r = Conv {g} (x, w2, c2)
    [sum] {end}
}}"""
CHANNELS = 6


def model(
    f: str = "",
    g: str = "",
    *,
    left: int = 1,
    outputs: int = 16,
    channels: int = CHANNELS,
    more: str = "",
    end: str = "",
) -> ir.Model:
    """Make the model; the left kernel has `left` rows and columns, and `end` is a function of the sum."""
    rng = np.random.default_rng(0)
    shapes = {
        "v1": (5, channels, 1, 1),
        "b1": (5,),
        "w1": (outputs, 5, left, left),
        "c1": (outputs,),
        "w2": (outputs, channels, 1, 1),
        "c2": (outputs,),
    }
    tensors = [ir.tensor(rng.standard_normal(shape).astype(np.float32), name=name) for name, shape in shapes.items()]
    last = f"s = Add (l, r)\n    [end] y = {end}" if end else "y = Add (l, r)"
    text = TEXT.format(f=f, g=g, channels=channels, more=more, end=last)
    return ir.from_onnx_text(text, initializers=tensors)


def everything(made: ir.Model) -> Plan:
    """Return the plan with every operator in integers."""
    found = tuple(units(made.graph))
    return Plan(found, {unit.name: Choice(Impl.U8) for unit in found})


def test_the_sum_of_two_pointwise_convolutions_is_found() -> None:
    for strides in ("", "<strides = [2, 2]>"):
        made = model(strides, strides)
        (found,) = find_sums(made, everything(made))
        assert (found.add, found.convs, found.inputs) == ("sum", ("left", "right"), ("a", "x"))


ALONE: dict[str, dict[str, Any]] = {
    "a kernel of more than one pixel": {"f": "<pads = [1, 1, 1, 1]>", "left": 3},
    "pads": {"f": "<pads = [1, 1, 1, 1], strides = [2, 2]>", "g": "<pads = [1, 1, 1, 1], strides = [2, 2]>"},
    "named pads": {"f": '<auto_pad = "SAME_UPPER">', "g": '<auto_pad = "SAME_UPPER">'},
    "a result that is read outside": {"more": ", float[N, 16, 8, 8] l"},
    "more channels in than out": {"channels": 12},
    "one pixel for all": {"f": "<strides = [8, 8]>"},
}


@pytest.mark.parametrize("case", ALONE.values(), ids=ALONE)
def test_other_sums_are_left_alone(case: dict[str, Any]) -> None:
    made = model(**case)
    assert not find_sums(made, everything(made))


def test_what_no_cache_holds_is_left_alone() -> None:
    made = model(outputs=2**17)
    assert not find_sums(made, everything(made))


@pytest.mark.parametrize("alone", ["left", "right", "sum"])
@pytest.mark.parametrize("impl", [Impl.FLOAT, Impl.U8_GEMM])
def test_only_kernels_of_one_kind_are_joined(alone: str, impl: Impl) -> None:
    made = model()
    plan = everything(made)
    assert not find_sums(made, plan.with_choices({alone: Choice(impl)}))


def quantized(folder: Path, made: ir.Model, **options: Any) -> tuple[Path, list[dict[str, Array]]]:
    """Quantize a model with both convolutions in integers; return it with the data."""
    rng = np.random.default_rng(1)
    feeds = [{"x": rng.uniform(-1, 3, (2, CHANNELS, 8, 8)).astype(np.float32)} for _ in range(6)]
    ir.save(made, folder / "m.onnx")
    asked = Options(place="all", force_int8=True, seconds=0.01, force=True, **options)
    quantize_model(folder / "m.onnx", feeds, folder / "q.onnx", asked)
    return folder / "q.onnx", feeds


def dequantized(found: onnx.ModelProto, node: onnx.NodeProto) -> dict[str, Array]:
    """Return what the constants of a convolution between pairs stand for, in float64."""
    constants = {each.name: numpy_helper.to_array(each).astype(np.float64) for each in found.graph.initializer}
    made = {each.output[0]: each for each in found.graph.node}
    x, weights, bias = (made[name].input for name in node.input)
    (behind,) = [each for each in found.graph.node if node.output[0] in each.input]
    return {
        "weights": (constants[weights[0]][:, :, 0, 0] - constants[weights[2]][:, None])
        * constants[weights[1]][:, None],
        "bias": constants[bias[0]] * constants[bias[1]],
        "step": constants[behind.input[1]],
        "x step": constants[x[1]],
        "x zero": constants[x[2]],
    }


@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("strides", ["", "<strides = [2, 2]>"])
@pytest.mark.parametrize("fmt", ["qdq", "qoperator"])
def test_the_sum_comes_from_one_kernel(tmp_path: Path, strides: str, fmt: str) -> None:
    path, feeds = quantized(tmp_path, model(strides, strides), format=fmt)
    ops = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert (ops["Concat"], ops["MaxPool"]) == (1, 2 * bool(strides))
    assert (ops["Add"] + ops["QLinearAdd"], ops["Conv"] + ops["QLinearConv"]) == (0, 2)
    (given,) = open_session(path).run(None, feeds[0])
    (wanted,) = open_session(tmp_path / "m.onnx").run(None, feeds[0])
    noise = np.square(given - wanted).mean() / np.square(wanted).mean()
    assert noise < 1e-3  # 30 dB: three tensors of 8 bits have more than 40


@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("strides", ["", "<strides = [2, 2]>"])
@pytest.mark.parametrize("clip", ["", "Relu (s)"])
def test_native_operators_compute_the_sum(tmp_path: Path, strides: str, clip: str) -> None:
    """The bodies of the operators, which other runtimes compute, give the same integers."""
    made = model(strides, strides, end=clip)
    path, feeds = quantized(tmp_path, made, kernels="exact")
    nodes = onnx.load(path).graph.node
    native = Counter(node.op_type.split("_")[0] for node in nodes if node.domain == NATIVE_DOMAIN)
    assert native == {"Convolution": 2, "Concat": 1, **({"MaxPool": 2} if strides else {})}
    assert {node.op_type for node in nodes if not node.domain} <= {"QuantizeLinear", "DequantizeLinear", "Transpose"}
    (given,) = open_session(path).run(None, feeds[0])
    (body,) = without_library(path, optimize=True).run(None, feeds[0])
    np.testing.assert_array_equal(given, body)
    (wanted,) = open_session(tmp_path / "m.onnx").run(None, feeds[0])
    assert np.square(given - wanted).mean() < 1e-3 * np.square(wanted).mean()


@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("impl", [Impl.U8, Impl.U8_GEMM])
def test_the_sum_is_rounded_once(tmp_path: Path, impl: Impl) -> None:
    """Of the integers that go in, each sum is off by half a step of the result, and by the rounding of float32.

    Two convolutions and an Add would be off by half a step of each of three tensors.
    """
    units = {"in1": Impl.U8, "left": impl, "right": impl, "sum": Impl.U8}
    (tmp_path / "p.json").write_text(json.dumps({"schema": 1, "units": units}))
    path, feeds = quantized(tmp_path, model(), corrections=(), plan=tmp_path / "p.json")
    found = onnx.load(path)
    (joined,) = [node for node in found.graph.node if node.op_type == "Concat"]
    (conv,) = [node for node in found.graph.node if node.name.endswith("/sum")]
    found.graph.output.append(onnx.helper.make_empty_tensor_value_info(joined.output[0]))
    given, integers = open_session(found.SerializeToString()).run(None, feeds[0])
    told = dequantized(found, conv)
    x = (integers.astype(np.float64) - told["x zero"]) * told["x step"]
    wanted = np.einsum("nchw,mc->nmhw", x, told["weights"]) + told["bias"][:, None, None]
    assert np.abs(given - wanted).max() <= told["step"] / 2 * (1 + 1e-5)


@pytest.mark.parametrize("options", [{"isa": "avx2"}, {"scheme": Scheme(weight="u8")}], ids=["16-bit", "u8-weights"])
def test_targets_that_join_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    path, _ = quantized(tmp_path, model(), **options)
    assert "Concat" not in {node.op_type for node in onnx.load(path).graph.node}


def test_a_range_of_the_users_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[tensors."l"]\nrange = [-1.0, 1.0]\n')
    path, _ = quantized(tmp_path, model(), overrides=tmp_path / "mine.toml")
    assert "Concat" not in {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.usefixtures("vnni")
def test_signed_activations(tmp_path: Path) -> None:
    path, feeds = quantized(tmp_path, model(), scheme=Scheme(activation="s8"))
    assert "Concat" in {node.op_type for node in onnx.load(path).graph.node}
    (given,) = open_session(path).run(None, feeds[0])
    (wanted,) = open_session(tmp_path / "m.onnx").run(None, feeds[0])
    assert np.square(given - wanted).mean() < 1e-3 * np.square(wanted).mean()
