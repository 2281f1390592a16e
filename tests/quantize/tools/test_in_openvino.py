"""`requant bench` and `explain` in OpenVINO, and the nodes of kernels in a runtime that names their members."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from requant.cli import main
from requant.quantize.runtime.described import described
from requant.quantize.runtime.match import constants_of
from requant.quantize.runtime.problem import problem
from requant.quantize.runtime.profile import KernelRun, Profile
from requant.quantize.tools.explain.why_float import why_float

SAMPLES = Path(__file__).parents[3] / "sample_models"
DIGITS, DATA = SAMPLES / "digits.onnx", f"{SAMPLES / 'digits.npz'}:calib"
PAIRS = """<ir_version: 8, opset_import: ["" : 17]>
net (float[1,4,8,8] x) => (float[1,8,6,6] r, float[1,4,8,8] o) <
  float s = {0.02}, uint8 z = {128}, float v = {0.01}, int8 n = {0}
> {
  [q] q = QuantizeLinear(x, s, z)
  [d] d = DequantizeLinear(q, s, z)
  [k] k = DequantizeLinear(w, v, n)
  [conv] y = Conv (d, k)
  [relu] r = Relu (y)
  [other] o = Identity (d)
}"""


def pairs() -> ir.Model:
    """Return a convolution of int8 whose result is float."""
    proto = onnx.parser.parse_model(PAIRS)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((8, 4, 3, 3), np.int8), "w"))
    return ir.from_proto(proto)


def kernel(node: str, op: str, *members: str, macs: int = 0) -> KernelRun:
    """Return a kernel that names its members."""
    inputs, outputs, types = ((1, 4, 8, 8), (8, 4, 3, 3)), ((1, 8, 6, 6),), ("uint8", "int8") if macs else ("float",)
    return KernelRun(node, "", op, 1.0, macs, outputs, inputs, types, ("float",), 0, members, bool(macs))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments], prog_name="requant", env={"COLUMNS": "160"})


def test_a_kernel_is_reported_under_the_product_that_it_names() -> None:
    runs = (
        kernel("0: q", "QuantizeLinear", "q"),
        kernel("1: reorder", "ReorderInput"),
        kernel("2: conv", "Convolution", "Multiply_12", "conv", "relu", macs=8 * 36 * 36),
    )
    (quantize, reorder, conv), match = described(pairs(), Profile(runs, 3.0))
    assert [each.kind for each in (quantize, reorder, conv)] == ["conversion", "layout", "compute"]
    assert (quantize.node, reorder.node, conv.node) == ("q", None, "conv")
    assert (conv.op, conv.absorbs, conv.precision) == ("Conv", ("DequantizeLinear", "Relu", "Identity"), "u8·s8→f32")
    assert problem(conv) == "mb1_ic4oc8_ih8oh6kh3sh1dh0ph0_iw8ow6kw3sw1dw0pw0"
    # nothing names `d` and `other`: the first belongs to its reader, the second to the kernel in front of it
    home = {"q": "0: q", "d": "2: conv", "k": None, "conv": "2: conv", "relu": "2: conv", "other": "2: conv"}
    assert match.kernels == home
    assert match.folded == {"k"}
    assert match.constants == constants_of(pairs())


def test_a_second_kernel_of_a_node_is_a_part_of_it() -> None:
    first = kernel("0: conv", "Convolution", "conv", macs=1)
    second, change = kernel("1: conv", "Math", "conv"), kernel("2: conv", "ReorderInput", "conv")
    (conv, part, layout), match = described(pairs(), Profile((first, second, change), 3.0))
    assert (conv.node, part.node, layout.node) == ("conv", "conv", None)
    assert match.parts == {"1: conv": "conv"}
    assert part.precision == "float32"
    assert described(pairs(), Profile((replace(second, writes=("uint8",)),), 1.0))[0][0].precision == "f32→u8"


def test_a_convolution_may_write_float_where_the_runtime_allows_it() -> None:
    model = pairs()
    node = next(node for node in model.graph if node.name == "conv")
    assert "no QuantizeLinear on its output" in why_float(model, node)[0].kind
    assert "did not choose it" in why_float(model, node, ends=False)[0].kind


def test_results_of_four_bits_have_a_reason() -> None:
    proto = onnx.parser.parse_model(PAIRS.replace('"" : 17', '"" : 21').replace("ir_version: 8", "ir_version: 10"))
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((8, 4, 3, 3), np.int8), "w"))
    proto.graph.initializer.append(helper.make_tensor("zero4", TensorProto.UINT4, [], [0]))
    proto.graph.node.append(helper.make_node("QuantizeLinear", ["r", "s", "zero4"], ["r4"], "last"))
    del proto.graph.output[0]
    model = ir.from_proto(proto)
    node = next(node for node in model.graph if node.name == "conv")
    assert [reason.text for reason in why_float(model, node)] == ["uint4 results have no integer kernel"]


@pytest.mark.slow
def test_a_model_is_explained_there(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    output = tmp_path / "m.onnx"
    quantized = invoke("quantize", DIGITS, "--data", DATA, "-o", output, "--portable", "--effort", "low", "-q")
    assert quantized.exit_code in (0, 1), quantized.output
    found = json.loads(invoke("explain", output, "--runtime", "openvino", "--data", DATA, "--json").stdout)
    assert found["runtime"].startswith("OpenVINO ")
    assert found["mac_share_int8"] == 1.0
    assert all(node["role"] != "gone" for node in found["nodes"])
    assert {node["precision"] for node in found["nodes"] if node["op"] == "Conv"} <= {"u8·s8→u8", "u8·s8→f32"}
    plain = invoke("explain", DIGITS, "--runtime", "openvino", "--precision", "f32").stdout
    assert "(f32)" in plain
    assert "the model is not quantized" in plain


def test_models_are_timed_there(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    arguments = ("bench", DIGITS, "--compare", DIGITS, "--data", DATA, "--runtime", "openvino")
    found = json.loads(invoke(*arguments, "--json").stdout)
    assert found["runtime"].startswith("OpenVINO ")
    assert found["compare"]["ratio"] > 0
    assert {each["kernel"] for each in found["profile"]["operators"]} >= {"Convolution", "FullyConnected"}
    assert all(each["problem"].startswith("mb1_ic") for each in found["profile"]["convolutions"])
    refused = invoke(*arguments, "--settings")
    assert (refused.exit_code, "the search for settings is of session options of ONNX Runtime" in refused.stderr) == (
        2,
        True,
    )
    compiled = tmp_path / "m.ort"
    assert invoke("compile", DIGITS, "-o", compiled).exit_code == 0
    refused = invoke("bench", compiled, "--runtime", "openvino")
    assert (refused.exit_code, "only ONNX Runtime loads files in its format" in refused.stderr) == (2, True)
    refused = invoke("bench", DIGITS, "--precision", "f32")
    assert (refused.exit_code, "the precision f32 needs the runtime openvino" in refused.stderr) == (2, True)
