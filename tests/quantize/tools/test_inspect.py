"""`requant inspect`: what a model is made of, what a run of it costs, and what is asked for where lengths are open."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from requant.cli import main
from requant.quantize.console.inspected import dot_lines, structure_lines
from requant.quantize.model.shapes import Lengths
from requant.quantize.runtime.profile import profiled
from requant.quantize.runtime.random_inputs import generated_source
from requant.quantize.tools.inspect.inspect import inspect_model

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
DIGITS = SAMPLE_MODELS / "digits.onnx"
DATA = f"{SAMPLE_MODELS / 'digits.npz'}:calib"
sys.path.insert(0, str(SAMPLE_MODELS))
architectures = importlib.import_module("architectures")
builder = importlib.import_module("graph_builder")
sys.path.remove(str(SAMPLE_MODELS))

# Multiply-accumulates of one image as published (torchvision's GFLOPS, Ultralytics' 8.7 GFLOPs of two each), in 1e9.
LARGE = ("bert_base", "vit_b_16")


def each_but_large(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters; the large networks take a second each."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in names]


PUBLISHED = {
    "resnet50": 4.09,
    "mobilenet_v2": 0.30,
    "mobilenet_v3_large": 0.22,
    "efficientnet_b0": 0.39,
    "squeezenet1_1": 0.35,
    "vit_b_16": 17.56,
    "yolo": 4.37,
}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)], prog_name="requant")


def found_in(*arguments: object) -> Any:
    result = invoke(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def refusal(*arguments: object) -> str:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    return str(line)


def written(folder: Path, text: str) -> Path:
    """Write a model given as text; a constant without values is of zeros."""
    model = onnx.parser.parse_model(text)
    made = {name for node in model.graph.node for name in node.output}
    for info in model.graph.value_info:
        if info.name not in made:
            shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
            model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), info.name))
    path = folder / "m.onnx"
    onnx.save(model, path)
    return path


# --- published numbers


@pytest.fixture
def weightless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let networks be built without the bytes of their weights: these are in a file without blocks."""
    (tmp_path / "none.data").touch()
    os.truncate(tmp_path / "none.data", 2**30)

    def parameter(graph: Any, name: str, values: np.ndarray[Any, Any]) -> str:
        owner = graph if graph.keeps or graph.parent is None else graph.parent
        weight = owner.proto.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=values.shape)
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value="none.data")
        return name

    monkeypatch.setattr(builder.Graph, "parameter", parameter)
    monkeypatch.setattr(builder.Graph, "normal", lambda graph, name, shape, std: np.zeros(shape, np.float32))
    monkeypatch.setattr(architectures, "normalise", lambda graph, draw: None)


@pytest.mark.usefixtures("weightless")
def test_bert_base_has_109_482_240_parameters(tmp_path: Path) -> None:
    onnx.save(architectures.build("bert_base"), tmp_path / "bert.onnx")
    found = inspect_model(tmp_path / "bert.onnx")
    assert found.weights.parameters == 109_482_240
    assert (found.macs, found.depends) == (None, ("N", "sequence"))


@pytest.mark.usefixtures("weightless")
@pytest.mark.parametrize("name", each_but_large(architectures.NAMES))
def test_parameters_are_those_published(name: str, tmp_path: Path) -> None:
    onnx.save(architectures.build(name), tmp_path / "m.onnx")
    assert inspect_model(tmp_path / "m.onnx").weights.parameters == architectures.ARCHITECTURES[name].parameters


@pytest.mark.usefixtures("weightless")
@pytest.mark.parametrize("name", each_but_large(PUBLISHED))
def test_multiply_accumulates_are_those_published(name: str, tmp_path: Path) -> None:
    onnx.save(architectures.build(name), tmp_path / "m.onnx")
    found = inspect_model(tmp_path / "m.onnx", Lengths({}, {"N": 1}))
    assert found.macs is not None
    assert round(found.macs / 1e9, 2) == PUBLISHED[name]
    assert found.coverage == {"int8": 0.0, "weight-only": 0.0, "float": 1.0}


def test_multiply_accumulates_are_those_that_run() -> None:
    """A transformer has no convolution whose channels the runtime fills up."""
    path = SAMPLE_MODELS / "digits_transformer.onnx"
    source = generated_source(path)
    assert source is not None
    feed = next(iter(source)).feed
    assert inspect_model(path, Lengths.of(feed)).macs == sum(run.macs for run in profiled(path, feed, threads=1).runs)


# --- the sample network, by hand

CONV1, CONV2, FC1, FC2 = 28 * 28 * 32 * 25, 14 * 14 * 64 * 32 * 25, 3136 * 128, 128 * 10
PARAMETERS = 32 * 25 + 2 * 32 + 64 * 32 * 25 + 2 * 64 + (3136 * 128 + 128) + (128 * 10 + 10)


def test_the_sample_network() -> None:
    found = found_in(DIGITS, "--dim", "N=1")
    assert found["file_bytes"] == DIGITS.stat().st_size
    assert (found["ir_version"], found["opsets"]) == (8, {"ai.onnx": 17})
    assert found["inputs"] == [{"name": "image", "type": "FLOAT", "shape": ["N", 1, 28, 28]}]
    assert found["outputs"] == [{"name": "logits", "type": "FLOAT", "shape": ["N", 10]}]
    assert found["operators"] == {
        "Relu": 3,
        "Conv": 2,
        "BatchNormalization": 2,
        "MaxPool": 2,
        "Gemm": 2,
        "Flatten": 1,
    }
    assert found["weights"]["parameters"] == PARAMETERS
    assert found["weights"]["roles"]["statistic"] == {"tensors": 4, "elements": 2 * (32 + 64)}
    assert found["macs"] == CONV1 + CONV2 + FC1 + FC2
    # conv1's input and result while bn1 writes its own
    assert found["peak_activation_bytes"] == 4 * (28 * 28 + 2 * 28 * 28 * 32)
    nodes = {node["name"]: node for node in found["nodes"]}
    assert (nodes["conv2"]["macs"], nodes["conv2"]["output_bytes"]) == (CONV2, 4 * 14 * 14 * 64)
    assert nodes["conv2"]["types"] == ["FLOAT [1, 64, 14, 14]"]
    assert found["products"] == {"int8": 0, "weight-only": 0, "float": 4}


@pytest.mark.parametrize("arguments", [("--dim", "N=3"), ("--shape", "image=3,1,28,28")], ids=["dim", "shape"])
def test_costs_grow_with_the_batch(arguments: tuple[str, str]) -> None:
    assert found_in(DIGITS, *arguments)["macs"] == 3 * (CONV1 + CONV2 + FC1 + FC2)


CHOSEN = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[N,8] x, bool[N] keep, bool deep) => (float[M,4] y) {
      [where] at = NonZero(keep)
      [axis] a = Constant<value_ints = [0]>()
      [flat] rows = Squeeze(at, a)
      [choose] chosen = Gather<axis = 0>(x, rows)
      [product] p = MatMul(chosen, w)
      [branch] y = If(deep) <
        then_branch = deeper () => (float[K,4] q) { [second] q = MatMul(p, v) },
        else_branch = plain () => (float[L,4] r) { [same] r = Identity(p) }
      >
    }"""


@pytest.mark.parametrize("chosen", [0, 3])
def test_a_run_tells_the_shapes_that_follow_from_values(tmp_path: Path, chosen: int) -> None:
    proto = onnx.parser.parse_model(CHOSEN)
    for name, shape in (("w", (8, 4)), ("v", (4, 4))):
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(proto, tmp_path / "m.onnx")
    feed = {"x": np.ones((5, 8), np.float32), "keep": np.arange(5) < chosen, "deep": np.asarray(False)}
    found = inspect_model(tmp_path / "m.onnx", data=[feed])
    assert {node.name: node.macs for node in found.nodes if node.macs} == (
        {"product": chosen * 8 * 4, "second": chosen * 4 * 4} if chosen else {}
    )
    assert (found.macs, found.unknown) == (chosen * 8 * 4 + chosen * 4 * 4, ())
    lengths = Lengths({"x": (5, 8), "keep": (5,), "deep": ()})
    assert inspect_model(tmp_path / "m.onnx", lengths).unknown == (
        "the output shape of 'where' (NonZero) is unknown",
        *(f"the output shape of {name!r} ({op}) is unknown" for name, op in UNKNOWN),
    )


UNKNOWN = (
    ("flat", "Squeeze"),
    ("choose", "Gather"),
    ("product", "MatMul"),
    ("branch", "If"),
    ("second", "MatMul"),
    ("same", "Identity"),
)


def test_data_that_the_model_refuses_tell_the_shapes_of_inputs_alone(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[N,8] x, int64[M] i) => (float[K,8] y) {
        [choose] c = Gather<axis = 0>(x, i)
        [where] at = NonZero(c)
        [count] s = Shape(at)
        [wide] y = Expand(c, s) }"""
    )
    onnx.save(proto, tmp_path / "m.onnx")
    feed = {"x": np.ones((5, 8), np.float32), "i": np.array([99])}
    assert inspect_model(tmp_path / "m.onnx", data=[feed]).unknown


def test_data_have_lengths_too() -> None:
    assert found_in(DIGITS, "--data", DATA)["macs"] == CONV1 + CONV2 + FC1 + FC2


def test_open_lengths_are_said_and_not_guessed() -> None:
    found = found_in(DIGITS)
    assert (found["macs"], found["peak_activation_bytes"], found["mac_share"]) == (None, None, None)
    assert found["depends_on"] == ["N"]
    told = invoke(DIGITS)
    assert told.exit_code == 0
    assert "depends on N: give --shape" in told.stdout
    assert refusal(DIGITS, "--nodes") == (
        f"requant: {DIGITS}: the cost of a node depends on N; give --shape, --dim or --data"
    )
    assert "10.035" in invoke(DIGITS, "--nodes", "--dim", "N=1").stdout


def test_a_node_whose_shape_cannot_be_inferred_is_named(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (seq(float[2, 3]) s) => (float[a, 3] y) {
        y = ConcatFromSequence <axis = 0> (s)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    assert refusal(tmp_path / "m.onnx", "--nodes").startswith(
        f"requant: {tmp_path / 'm.onnx'}: the cost of a node is unknown: the output shape of "
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dim", "M=1"), "no free axis named 'M'; there are: N"),
        (("--dim", "N"), "'N' is not the length of an axis; write it as batch=1"),
        (("--dim", "N=-1"), "'N=-1' is not the length of an axis; write it as batch=1"),
        (("--dim", "N=" + 30 * "9"), f"'N={30 * '9'}' is not the length of an axis; write it as batch=1"),
        (("--shape", "x=" + 30 * "9"), f"'x={30 * '9'}' is not the shape of an input; write it as input=1,3,224,224"),
        (("--dim", "N=1", "--dim", "N=2"), "axis 'N' is given two lengths"),
        (("--shape", "imag=1,1,28,28"), "no input named 'imag'; did you mean 'image'?"),
        (("--shape", "image=1,x"), "'image=1,x' is not the shape of an input; write it as input=1,3,224,224"),
        (("--shape", "image=1,28,28"), "input 'image' has the shape (N, 1, 28, 28), not (1, 28, 28)"),
        (
            ("--shape", "image=1,3,28,28"),
            "input 'image' has the shape (N, 1, 28, 28), which (1, 3, 28, 28) does not fit",
        ),
        (("--shape", "image=1,1,28,28", "--dim", "N=2"), "axis 'N' of input 'image' has two lengths, 1 and 2"),
        (
            ("--dim", "N=1", "--data", DATA),
            "lengths of axes are given twice, as options and by data; give one of the two",
        ),
        (("--json", "--dot"), "give only one of --print-structure, --dot and --json"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(arguments: tuple[str, ...], said: str) -> None:
    assert refusal(DIGITS, *arguments).removeprefix("requant: ").startswith(said)


def test_an_axis_without_a_name_is_given_by_a_shape(tmp_path: Path) -> None:
    path = written(
        tmp_path, '<ir_version: 8, opset_import: ["" : 17]> g (float[?,4] x, float[4,2] w) => (y) { y = MatMul(x, w) }'
    )
    assert found_in(path)["depends_on"] == ["axis 0 of 'x'"]
    assert found_in(path, "--shape", "x=5,4")["macs"] == 5 * 4 * 2


# --- precision

QDQ = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[2,4] x) => (float[2,6] y)
<float s = {0.5}, uint8 z = {0}, int8[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, int8 wz = {0},
 int8[4,6] v = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24}, float[6,6] u> {
  q = QuantizeLinear(x, s, z)
  d = DequantizeLinear(q, s, z)
  wd = DequantizeLinear(w, s, wz)
  [both] a = MatMul(d, wd)
  vd = DequantizeLinear(v, s, wz)
  [weights] b = MatMul(a, vd)
  [neither] y = MatMul(b, u)
}
"""


def test_the_share_of_each_precision(tmp_path: Path) -> None:
    path = written(tmp_path, QDQ)
    found = found_in(path)
    macs = {"int8": 2 * 4 * 4, "weight-only": 2 * 4 * 6, "float": 2 * 6 * 6}
    assert found["mac_share"] == {name: count / sum(macs.values()) for name, count in macs.items()}
    assert {node["name"]: node["precision"] for node in found["nodes"] if node["precision"]} == {
        "both": "int8",
        "weights": "weight-only",
        "neither": "float",
    }
    assert found["weights"]["parameters"] == 16 + 24 + 36
    assert found["weights"]["roles"]["quantization"] == {"tensors": 3, "elements": 3}
    # dequantized weights are none: q beside x, and d
    assert found["peak_activation_bytes"] == max(4 * 8 + 8 + 4 * 8, 4 * 8 + 4 * (8 + 8), 4 * 8 + 4 * (12 + 12))


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_a_model_that_requant_made(form: str, tmp_path: Path) -> None:
    from requant.quantize import Options, quantize_model

    output = tmp_path / "int8.onnx"
    quantize_model(DIGITS, DATA, output, Options(format=form, place="all", effort="low", force_int8=True, samples=4))
    found = found_in(output, "--dim", "N=1")
    assert found["mac_share"]["int8"] == 1.0
    assert found["products"] == {"int8": 4, "weight-only": 0, "float": 0}
    assert found["macs"] == CONV1 + CONV2 + FC1 + FC2
    assert found["weights"]["parameters"] == PARAMETERS - (32 + 64)  # gamma and beta made a bias
    assert found["metadata"]["requant.version"]


# --- bodies and functions

IF = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[2,4] x, bool c) => (float[2,4] y) <float[4,4] w, float[4,8] v, float[8,4] u> {
  [if] y = If(c) <
    then_branch = a () => (float[2,4] p) { [then] p = MatMul(x, w) },
    else_branch = b () => (float[2,4] r) { [one] q = MatMul(x, v) [two] r = MatMul(q, u) }
  >
}
"""
LOOP = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[2,4] x) => (float[2,4] y, float[steps,2,4] all) <int64 n = {5}, float[4,4] w> {
  yes = Constant <value = bool {1}> ()
  [loop] y, all = Loop(n, yes, x) <body = b (int64 i, bool go, float[2,4] s) => (bool on, float[2,4] t, float[2,4] u) {
    on = Identity(go)
    [inner] t = MatMul(s, w)
    u = Identity(t)
  }>
}
"""
SCAN = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[7,2,4] xs, float[2,4] start) => (float[2,4] y, float[7,2,4] all) <float[4,4] w> {
  [scan] y, all = Scan(start, xs) <num_scan_inputs = 1, body = b (float[2,4] s, float[2,4] x) => (float[2,4] t, float[2,4] u) {
    p = Add(s, x)
    [inner] t = MatMul(p, w)
    u = Identity(t)
  }>
}
"""
FUNCTION = """
<ir_version: 8, opset_import: ["" : 17, "my" : 1]>
g (float[2,4] x) => (float[2,4] y) <float[4,4] w> {
  [one] t = my.Block(x, w)
  [two] y = my.Block(t, w)
}
<domain: "my", opset_import: ["" : 17]>
Block (a, b) => (d) { [product] c = MatMul(a, b) d = Relu(c) }
"""


@pytest.mark.parametrize(
    ("text", "macs", "operators"),
    [
        (IF, 2 * 4 * 8 + 2 * 8 * 4, {"If": 1, "MatMul": 3}),
        (LOOP, 5 * 2 * 4 * 4, {"Loop": 1, "MatMul": 1, "Identity": 2, "Constant": 1}),
        (SCAN, 7 * 2 * 4 * 4, {"Scan": 1, "MatMul": 1, "Identity": 1, "Add": 1}),
        (FUNCTION, 2 * 2 * 4 * 4, {"my.Block": 2, "MatMul": 1, "Relu": 1}),
    ],
    ids=["if-dearest-branch", "loop-steps", "scan-steps", "function-per-call"],
)
def test_bodies_and_functions_are_counted(text: str, macs: int, operators: dict[str, int], tmp_path: Path) -> None:
    found = found_in(written(tmp_path, text))
    assert (found["macs"], found["operators"]) == (macs, operators)
    assert found["peak_activation_bytes"] > 0


def test_a_loop_of_unknown_length(tmp_path: Path) -> None:
    text = LOOP.replace("float[2,4] x)", "float[2,4] x, int64 n)").replace("int64 n = {5}, ", "")
    found = found_in(written(tmp_path, text))
    assert found["macs"] is None
    assert found["unknown"][0] == "the output shape of 'loop' (Loop) is unknown"
    assert "depends on how often the body of 'loop' runs" in found["unknown"]
    assert "the output shape of 'loop' (Loop) is unknown" in refusal(tmp_path / "m.onnx", "--nodes")


def test_an_operator_that_only_the_runtime_knows(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[2,4] x) => (float[2,4] y) <float[4,4] w> { t = com.microsoft.Gelu(x) y = MatMul(t, w) }""",
    )
    assert found_in(path)["macs"] == 2 * 4 * 4


def test_an_operator_that_nobody_knows(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """<ir_version: 8, opset_import: ["" : 17, "my" : 1]>
        g (float[2,4] x) => (y) <float[4,4] w> { [odd] t = my.Op(x) y = MatMul(t, w) }""",
    )
    assert found_in(path)["unknown"][0] == "the output shape of 'odd' (my.Op) is unknown"


# --- what is printed instead


def test_the_structure(tmp_path: Path) -> None:
    lines = invoke(written(tmp_path, IF), "--print-structure").stdout.splitlines()
    assert lines == [
        "x: FLOAT [2, 4] (input)",
        "c: BOOL [] (input)",
        "if (If): [c] -> [y: FLOAT [2, 4]]",
        "  then (MatMul): [x, w] -> [p: FLOAT [2, 4]]",
        "  one (MatMul): [x, v] -> [q: FLOAT [2, 8]]",
        "  two (MatMul): [q, u] -> [r: FLOAT [2, 4]]",
        "y: FLOAT [2, 4] (output)",
    ]


def test_the_order_is_that_of_execution() -> None:
    found = inspect_model(DIGITS)
    lines = list(structure_lines(found))
    seen: set[str] = {"image"}
    for node in found.nodes:
        assert node.inputs[0] in seen
        seen.update(node.outputs)
    assert len(lines) == 1 + len(found.nodes) + 1


@pytest.mark.parametrize("text", [IF, LOOP, FUNCTION, QDQ], ids=["if", "loop", "function", "qdq"])
def test_the_dot_graph_has_every_node_and_edge(text: str, tmp_path: Path) -> None:
    found = inspect_model(written(tmp_path, text))
    lines = list(dot_lines(found))
    assert (lines[0], lines[-1]) == (f'digraph "{tmp_path / "m.onnx"}" {{', "}")
    declared = {match[1] for line in lines if (match := re.match(r"  (\w+) \[(?:shape=ellipse, )?label=", line))}
    assert len(declared) == len(found.nodes) + len(found.inputs) + len(found.outputs)
    edges = [match for line in lines if (match := re.match(r"  (\w+) -> (\w+) \[", line))]
    assert {name for match in edges for name in match.groups()} == declared
    colours = {name: sum(f"fillcolor={name}]" in line for line in lines) for name in ("palegreen", "lightsalmon")}
    assert colours == {"palegreen": found.products["int8"], "lightsalmon": found.products["float"]}


def test_odd_names_are_quoted(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ['a"b'], ["c\\d"], name='n"1')],
        "g",
        [helper.make_tensor_value_info('a"b', TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("c\\d", TensorProto.FLOAT, [1])],
    )
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    assert '  n0 [label="Relu\\nn\\"1", fillcolor=white];' in dot_lines(inspect_model(tmp_path / "m.onnx"))


# --- large models


def test_large_weights_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (16384, 32768)  # 2 GB, a hole in the file
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL, dims=shape)
    weight.external_data.add(key="location", value="w.data")
    with open(tmp_path / "w.data", "wb") as file:
        file.truncate(4 * math.prod(shape))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", shape[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [weight],
    )
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")

    def read(tensor: ir.ExternalTensor) -> None:
        raise AssertionError(f"{tensor.name} is read")

    monkeypatch.setattr(ir.ExternalTensor, "numpy", read)
    monkeypatch.setattr(ir.ExternalTensor, "tobytes", read)
    found = inspect_model(tmp_path / "m.onnx", Lengths({}, {"N": 2}))
    assert found.external == {"w.data": 4 * math.prod(shape)}
    assert (found.weights.parameters, found.macs) == (math.prod(shape), 2 * math.prod(shape))
    assert found.peak_bytes == 2 * 4 * (shape[0] + shape[1])
