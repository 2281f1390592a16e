"""OpenVINO as the runtime of a request: what it loads, runs and tells, and the models that are made for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from requant import RequantError
from requant.cli import main
from requant.quantize import (
    CheckOptions,
    Options,
    Setting,
    check,
    compare_models,
    quantize_fastest,
    quantize_model,
)
from requant.quantize.console.quantized import print_costs
from requant.quantize.placement import costs
from requant.quantize.placement.costs import Costs
from requant.quantize.runtime import openvino, openvino_kernels
from requant.quantize.runtime.attribution import Owners
from requant.quantize.runtime.openvino import SHAPES, OpenVino, OpenVinoModel
from requant.quantize.runtime.profile import KernelRun
from requant.quantize.runtime.runtimes import STOCK, runtime_named
from requant.transforms.int8.plan import Unit
from requant.transforms.int8.qparams import quantize as rounded
from requant.transforms.int8.qparams import symmetric_s8
from requant.transforms.int8.saturation import PAIR_LIMIT, even_channels, prevent_saturation

from ...pairs import pair_peak

pytest.importorskip("openvino")
DIGITS = Path(__file__).parents[3] / "sample_models"
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N,3,H,W] x) => (float[N,8,H,W] r) {
  s = Constant <value = float {0.02}> ()  z = Constant <value = uint8 {128}> ()
  v = Constant <value = float {0.01}> ()  n = Constant <value = int8 {0}> ()
  q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
  k = DequantizeLinear(w, v, n)
  [conv] y = Conv <pads = [1, 1, 1, 1]> (d, k)
  [relu] r = Relu(y)
}"""


def net() -> bytes:
    """Return a convolution of int8 weights, with free axes."""
    proto = onnx.parser.parse_model(NET)
    weights = np.random.default_rng(0).integers(-60, 61, (8, 3, 3, 3)).astype(np.int8)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return bytes(proto.SerializeToString())


def image(*shape: int, seed: int = 1) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=shape).astype(np.float32)}


def test_a_model_has_the_outputs_of_the_other_runtime_at_any_shape() -> None:
    model, other = OpenVino("f32").open(net(), threads=1), STOCK.open(net(), threads=1)
    assert model.outputs == other.outputs == ("r",)
    for length in range(4, 4 + SHAPES + 3):
        feed = image(2, 3, length, 5)
        found, expected = model(feed), other(feed)
        for name in model.outputs:
            # both sums are exact; each multiplies by one float and rounds once
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5)


def test_models_are_compiled_for_few_shapes_and_then_for_all() -> None:
    model = OpenVinoModel(net(), {})
    for length in range(4, 4 + SHAPES + 5):
        model(image(1, 3, length, 5))
    assert len(model._compiled) == SHAPES + 1


def test_several_threads_may_run_a_model() -> None:
    model, feeds = OpenVino("f32").open(net(), threads=1), [image(1, 3, 16, 16, seed=seed) for seed in range(64)]
    expected = [model(feed)["r"] for feed in feeds]
    with ThreadPoolExecutor(4) as workers:
        found = list(workers.map(lambda feed: model(feed)["r"], feeds * 4))
    for one, other in zip(found, expected * 4, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["missing", "text", "feed", "shape"])
def test_what_it_refuses_is_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.onnx"
    if name == "text":
        path.write_text("hello")
    elif name != "missing":
        path.write_bytes(net())
    feed = {"feed": {}, "shape": image(1, 4, 5, 5)}.get(name, image(1, 3, 5, 5))
    with pytest.raises(RequantError) as refused:
        OpenVino().open(path)(feed)
    text = str(refused.value)
    assert str(path) in text
    assert "\n" not in text
    assert ".cpp" not in text


def test_without_the_package_a_request_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino, "find_spec", lambda _: None)
    with pytest.raises(
        RequantError, match=r"^the runtime openvino is not installed: pip install 'requant\[openvino\]'$"
    ):
        runtime_named("openvino")


@pytest.mark.parametrize("name", ["auto", "openvin"])
def test_a_runtime_of_no_known_name_is_refused(name: str) -> None:
    with pytest.raises(RequantError, match=f"no runtime named '{name}'"):
        Setting(runtime=name).opened()


def test_its_name_has_version_and_precision(capsys: pytest.CaptureFixture[str]) -> None:
    identity = OpenVino("f32").identity
    assert str(identity) == f"OpenVINO {identity.version} (f32)"
    assert OpenVino().identity.precision in ("f32", "bf16", "f16")
    machine = OpenVino("f32").machine(1)
    assert machine.described == str(identity)
    assert machine.title == identity.title
    print_costs([Costs(machine), Costs(STOCK.machine(1))])
    printed = capsys.readouterr().out
    assert f"{identity}, 1 thread" in printed
    assert f"{STOCK.identity}, 1 thread" in printed
    assert "ONNX Runtime OpenVINO" not in printed
    assert STOCK.machine(1).described == str(STOCK.identity)
    assert STOCK.machine(1).title == STOCK.identity.title
    assert costs.path_of(machine) != costs.path_of(STOCK.machine(1))


# --------------------------------------------------------------------------------------------------------- profiles


def test_a_profile_tells_products_types_and_nodes() -> None:
    # so large that each step takes many of the whole microseconds that OpenVINO counts
    found = OpenVino("f32").profile(net(), image(1, 3, 160, 160), threads=1, times=20)
    (conv,) = (run for run in found.runs if run.macs)
    assert conv.integer
    assert conv.title == "Convolution of uint8"
    assert conv.macs == 8 * 160 * 160 * 3 * 9
    assert conv.members[:1] == ("conv",)
    assert math.fsum(run.microseconds for run in found.runs) <= 1.5 * found.microseconds
    assert found.cpu is not None
    units = (
        Unit(name="conv", op="Conv", nodes=("conv",), inputs=("x",), outputs=("y",)),
        Unit(name="relu", op="Relu", nodes=("relu",), inputs=("y",), outputs=("r",)),
    )
    spent = Owners(ir.from_proto(onnx.load_from_string(net())), units).spent(found.runs)
    assert spent.units["conv"] == conv.microseconds
    assert spent.conversions > 0  # of x


class Port:
    """An input or output of a layer."""

    def __init__(self, shape: tuple[int, ...], kind: str) -> None:
        self.shape, self.kind = shape, kind

    def get_partial_shape(self) -> Port:
        return self

    def get_min_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_element_type(self) -> Port:
        return self

    def get_type_name(self) -> str:
        return self.kind


class Layer:
    """A layer of an executed graph."""

    def __init__(self, name: str, ports: tuple[list[Port], list[Port]], **info: str) -> None:
        self.name, self.ends, self.info = name, ports, info

    def get_friendly_name(self) -> str:
        return self.name

    def get_rt_info(self) -> dict[str, Any]:
        return {key: Text(value) for key, value in self.info.items()}

    def inputs(self) -> list[Port]:
        return self.ends[0]

    def outputs(self) -> list[Port]:
        return self.ends[1]


class Text(str):
    def astype(self, _: type) -> str:
        return str(self)


class Graph:
    def __init__(self, *layers: Layer) -> None:
        self.layers = layers

    def get_ordered_ops(self) -> Iterator[Layer]:
        return iter(self.layers)


def layer(kind: str, reads: list[Port], writes: Port, **info: str) -> Layer:
    return Layer(kind, (reads, [writes]), layerType=kind, execTimeMcs="7", **info)


@pytest.mark.parametrize(
    ("made", "op", "integer", "macs"),
    [
        (layer("Convolution", [Port((1, 8, 4, 4), "u8"), Port((2, 6, 4, 3, 3), "i8")], Port((1, 12, 4, 4), "f32")),
         "Convolution", True, 12 * 16 * 4 * 9),
        (layer("Deconvolution", [Port((1, 8, 4, 4), "f32"), Port((8, 6, 2, 2), "f32")], Port((1, 6, 8, 8), "f32")),
         "Deconvolution", False, 8 * 16 * 6 * 4),
        (layer("FullyConnected", [Port((1, 5, 8), "f32"), Port((6, 8), "i8")], Port((1, 5, 6), "f32")),
         "FullyConnected", False, 5 * 6 * 8),
        (layer("MatMul", [Port((2, 5, 8), "u8"), Port((2, 8, 5), "i8")], Port((2, 5, 5), "f32")),
         "MatMul", True, 2 * 25 * 8),
        (layer("FakeQuantize", [Port((4,), "f32")], Port((4,), "u8")), "QuantizeLinear", False, 0),
        (layer("Convert", [Port((4,), "u8")], Port((4,), "f32")), "DequantizeLinear", False, 0),
        (layer("Reorder", [Port((4,), "u8")], Port((4,), "u8")), "ReorderInput", False, 0),
        (layer("Reorder", [Port((4,), "f32")], Port((4,), "u8")), "QuantizeLinear", False, 0),
        (layer("Subgraph", [Port((4,), "f32")], Port((4,), "u8")), "QuantizeLinear", False, 0),
        (layer("Subgraph", [Port((4,), "u8"), Port((4,), "u8")], Port((4,), "u8")), "Subgraph", False, 0),
    ],
    ids=["groups", "transposed", "weights alone", "two factors", "quantize", "convert", "layout", "both", "subgraph", "sum"],
)  # fmt: skip
def test_layers_have_operators_products_and_types(made: Layer, op: str, integer: bool, macs: int) -> None:
    (run,) = openvino_kernels.kernels_of(Graph(made), {made.name: 3.0})
    assert (run.op, run.integer, run.macs, run.microseconds) == (op, integer, macs, 3.0)


def test_names_of_nodes_lose_what_it_adds_and_untimed_layers_are_left_out() -> None:
    names = "a/WithoutBiases,b/WithoutBiases/DequantizationMultiply,a,c"
    conv = layer("Convolution", [Port((1, 1, 4, 4), "u8"), Port((1, 1, 1, 1), "i8")], Port((1, 1, 4, 4), "u8"),
                 originalLayersNames=names)  # fmt: skip
    idle = Layer("idle", ([], []), layerType="Reshape", execTimeMcs="not_executed")
    constant = Layer("constant", ([], []), layerType="Const", execTimeMcs="5")
    graph = Graph(conv, idle, constant)
    assert openvino_kernels.measured_totals(graph, 3) == {"Convolution": 21.0}
    (run,) = openvino_kernels.kernels_of(graph, {"Convolution": 1.0})
    assert run.members == ("a", "b", "c")


@pytest.mark.parametrize(("names", "node"), [("Convert_12,Multiply_7,y", "0: y"), ("Convert_12", "0: Eltwise")])
def test_a_kernel_has_the_same_name_whenever_the_model_is_compiled(names: str, node: str) -> None:
    ends = [Port((1, 8), "u8")], Port((1, 8), "f32")
    (run,) = openvino_kernels.kernels_of(Graph(layer("Eltwise", *ends, originalLayersNames=names)), {"Eltwise": 1.0})
    assert run.node == node


# ------------------------------------------------------------------------------------------------------------ models


@pytest.mark.slow
def test_a_model_is_placed_judged_and_timed_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUANT_CACHE", str(tmp_path / "cache"))
    options = Options(runtime="openvino", batch=256, samples=64, seconds=0.2, force_int8=True, effort="low")
    result = quantize_model(DIGITS / "digits.onnx", f"{DIGITS / 'digits.npz'}:calib", tmp_path / "q.onnx", options)
    assert result.runtime == OpenVino().identity
    assert result.to_json()["runtime"] == str(result.runtime)
    assert ("runtime", str(result.runtime)) in result.rows()
    assert result.placement.how == "measured"
    assert result.native is None
    assert any(name.endswith("of uint8") for name in result.kernels)
    assert result.mac_share_int8 > 0
    assert [found.machine.runtime for found in costs.kept()] == [str(result.runtime)]
    domains = {node.domain for node in onnx.load(tmp_path / "q.onnx").graph.node}
    assert domains == {""}
    metadata = {prop.key: prop.value for prop in onnx.load(tmp_path / "q.onnx").metadata_props}
    assert json.loads(metadata["requant.options"])["runtime"] == "openvino"


@pytest.mark.slow
def test_a_search_scores_models_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    own = OpenVino.open

    def spy(self: OpenVino, model: Any, **more: Any) -> Any:
        opened.append(model)
        return own(self, model, **more)

    monkeypatch.setattr(OpenVino, "open", spy)
    data = DIGITS / "digits.npz"
    command = ["quantize", str(DIGITS / "digits.onnx"), "--data", f"{data}:calib", "-o", str(tmp_path / "q.onnx")]
    command += ["--runtime", "openvino", "--precision", "f32", "--effort", "low", "--samples", "64", "--max-drop", "2%"]
    done = CliRunner().invoke(main, [*command, "--metric", "top1", "--eval-data", f"{data}:calib", "--json"])
    assert done.exit_code in (0, 1), done.output
    found = json.loads(done.stdout)
    assert found["search"]["tried"]
    assert found["runtime"].endswith("(f32)")
    assert len(opened) > 3


def test_models_are_compared_there(tmp_path: Path) -> None:
    options = Options(portable=True, force_int8=True, samples=64, seconds=0.05, effort="low")
    model, data = DIGITS / "digits.onnx", f"{DIGITS / 'digits.npz'}:calib"
    quantize_model(model, data, tmp_path / "q.onnx", options)
    found = compare_models(model, tmp_path / "q.onnx", data, setting=Setting(runtime="openvino", precision="f32"))
    assert found.to_json()["runtime"] == dict(found.rows())["runtime"] == str(OpenVino("f32").identity)
    other = compare_models(model, tmp_path / "q.onnx", data)
    assert other.to_json()["runtime"] == str(STOCK.identity)
    assert "runtime" not in dict(other.rows())
    assert found.accuracy.sqnr_db != other.accuracy.sqnr_db  # it rounds elsewhere
    assert found.accuracy.worst_sqnr_db > 20
    command = ["compare", str(model), str(tmp_path / "q.onnx"), "--data", data, "--precision", "f32"]
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2
    assert "the precision f32 needs the runtime openvino" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "f32"}, "the precision f32 needs the runtime openvino"),
        ({"runtime": "tensorrt"}, "no runtime 'tensorrt'; there are: onnxruntime, openvino"),
        ({"runtime": "openvino", "precision": "int4"}, "no precision 'int4'; there are: default, f32"),
        ({"runtime": "openvino", "format": "qoperator"}, "only ONNX Runtime has QLinear operators"),
        ({"runtime": "openvino", "kernels": "native"}, "the kernels 'native' do not go with the runtime openvino"),
        ({"runtime": "openvino", "place": "estimated"}, "no built-in costs for the placement estimated"),
    ],
    ids=str,
)
def test_what_only_one_runtime_has_is_refused_for_the_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequantError, match=message):
        Options(**options)


def test_a_model_that_it_does_not_import_is_refused_before_long_work(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\nnet (float[N,4,4] x) => (float[N] y) {\n'
    model = onnx.parser.parse_model(text + "  a = Det(x)  y = Relu(a)\n}")
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((8, 4, 4), np.float32))
    command = ["quantize", "m.onnx", "--data", "d.npz", "-o", "q.onnx", "--runtime", "openvino"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        done = CliRunner().invoke(main, command)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = (line for line in done.stderr.splitlines() if "OpenVINO" in line)
    assert "m.onnx: OpenVINO cannot" in line
    assert not (tmp_path / "q.onnx").exists()


# -------------------------------------------------------------------------------------------------------- saturation


def test_convolutions_of_three_channels_do_not_saturate_there() -> None:
    """Channels are filled to four in each tap: pairs do not reach over taps, as they do in ONNX Runtime."""
    weights = np.zeros((4, 3, 1, 2), np.float32)
    weights[:, 0] = 1.0  # with the weight of the tap before it, the third channel: a pair in ONNX Runtime alone
    weights[:, 1, :, 0] = 1.0
    params = symmetric_s8(weights, 0)
    known = prevent_saturation(params, weights, 0)
    assert not (pair_peak(rounded(weights, known), 0) > PAIR_LIMIT).any()
    assert (pair_peak(even_channels(rounded(weights, known)), 0) <= 128).all()
    only_there = np.zeros((4, 3, 1, 2), np.float32)
    only_there[:, :2, :, 1] = 1.0  # in ONNX Runtime the second one is with the third of the same tap
    raised = prevent_saturation(
        prevent_saturation(symmetric_s8(only_there, 0), only_there, 0), even_channels(only_there), 0
    )
    assert (pair_peak(even_channels(rounded(only_there, raised)), 0) <= 128).all()
    assert even_channels(np.ones((8, 1, 3, 3))).shape == (8, 1, 3, 3)


def test_a_portable_first_convolution_is_exact_there(tmp_path: Path) -> None:
    """All weights are large and all pixels bright: each pair of products that is added in 16 bits would saturate."""
    text = (
        '<ir_version: 8, opset_import: ["" : 17]>\nnet (float[N,3,8,8] x) => (float[N,8,6,6] y) {\n  y = Conv(x, w)\n}'
    )
    model = onnx.parser.parse_model(text)
    weights = np.random.default_rng(2).uniform(0.9, 1.0, (8, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    images = np.random.default_rng(3).uniform(0.9, 1.0, (32, 3, 8, 8)).astype(np.float32)
    images[:, :, 0, 0] = 0.0
    np.savez(tmp_path / "d.npz", x=images)
    options = Options(portable=True, isa="avx2", force_int8=True, effort="low", seconds=0.05)
    quantize_model(tmp_path / "m.onnx", str(tmp_path / "d.npz"), tmp_path / "q.onnx", options)
    found = OpenVino("f32").open(tmp_path / "q.onnx", threads=1)({"x": images})["y"]
    expected = STOCK.open(tmp_path / "m.onnx", threads=1)({"x": images})["y"]
    # weights lose at most a bit: steps of 1/64 and of 1/255, which are independent
    assert np.sqrt(np.mean(np.square(found - expected))) < 0.02 * np.sqrt(np.mean(np.square(expected)))


@pytest.mark.slow
def test_a_check_runs_where_its_baseline_ran(tmp_path: Path) -> None:
    options = Options(portable=True, force_int8=True, samples=64, seconds=0.05, effort="low")
    model, data = DIGITS / "digits.onnx", f"{DIGITS / 'digits.npz'}:calib"
    output, lock = tmp_path / "q.onnx", tmp_path / "requant.lock.json"
    quantize_model(model, data, output, options)
    asked = CheckOptions(runtime="openvino", precision="f32", samples=32, seconds=0.2)
    check(model, output, data, lock, update=True, options=asked)
    identity = str(OpenVino("f32").identity)
    written = json.loads(lock.read_text())
    assert written["runtime"] == {"name": "openvino", "precision": "f32", "identity": identity}
    assert written["latency"]["machine"]["runtime"] == identity
    assert "Convolution" in written["kernels"]
    again = check(model, output, data, lock, options=CheckOptions(samples=32, seconds=0.0))
    assert again.ok
    assert again.measured.runtime == identity
    for other in (CheckOptions(runtime="onnxruntime"), CheckOptions(precision="default")):
        with pytest.raises(RequantError, match=r"measured in openvino \(f32\), not in \S+; --update .* measures anew"):
            check(model, output, data, lock, options=other)
    old = {
        key: value for key, value in written.items() if key not in ("runtime", "checksum")
    }  # of an older version: ONNX Runtime
    lock.write_text(json.dumps(old))
    with pytest.raises(RequantError, match="measured in onnxruntime, not in openvino"):
        check(model, output, data, lock, options=CheckOptions(runtime="openvino"))


@pytest.mark.slow
def test_the_fastest_of_all_runtimes_is_written(tmp_path: Path) -> None:
    command = ["quantize", str(DIGITS / "digits.onnx"), "--data", f"{DIGITS / 'digits.npz'}:calib", "--runtime", "auto"]
    command += ["-o", str(tmp_path / "q.onnx"), "--effort", "low", "--samples", "64", "--batch", "64", "--json"]
    done = CliRunner().invoke(main, command)
    found = json.loads(done.stdout)
    assert set(found["runtimes"]) == {str(STOCK.identity), str(OpenVino().identity)}
    times = {name: timed["output_ms"] for name, timed in found["runtimes"].items()}
    assert found["runtime"] == min(times, key=times.__getitem__)
    assert found["output"] == str(tmp_path / "q.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.onnx", "q.plan.json"]
    model = onnx.load(tmp_path / "q.onnx")
    assert model.graph.output[0].name == "logits"
    again = CliRunner().invoke(main, command)
    assert (again.exit_code, again.stdout) == (2, "")
    assert "--force" in again.stderr


@pytest.mark.slow
def test_a_runtime_that_cannot_run_the_model_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RequantError("no")

    monkeypatch.setattr(OpenVino, "open", refuse)
    options = Options(runtime="auto", effort="low", samples=32, seconds=0.1, batch=16)
    found = quantize_fastest(DIGITS / "digits.onnx", f"{DIGITS / 'digits.npz'}:calib", tmp_path / "q.onnx", options)
    assert list(found.runtimes) == [str(STOCK.identity)]
    assert f"{OpenVino().identity} is left out: no" in found.notes
    assert dict(found.rows())["runtime"] == str(STOCK.identity)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--report", "r.html"], "--runtime auto makes no report: name one runtime"),
        (["--portable"], "the runtime auto does not go with portable, costs or a plan: they are for one form"),
        (["--max-drop", "1%", "--metric", "top1", "--eval-data", "d.npz"], "a search is for one runtime"),
    ],
    ids=str,
)
def test_what_does_not_go_with_all_runtimes_is_refused(more: list[str], message: str, tmp_path: Path) -> None:
    command = ["quantize", str(DIGITS / "digits.onnx"), "--data", f"{DIGITS / 'digits.npz'}:calib", "--runtime", "auto"]
    done = CliRunner().invoke(main, [*command, "-o", str(tmp_path / "q.onnx"), *more])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    with pytest.raises(RequantError, match="quantize_fastest is for"):
        quantize_model(DIGITS / "digits.onnx", "d.npz", tmp_path / "q.onnx", Options(runtime="auto"))


def test_kernels_of_several_compilations_are_joined_by_their_place() -> None:
    def window(*times: float) -> list[KernelRun]:
        return [KernelRun(f"{place}: Eltwise", "", "Eltwise", each, 0, ()) for place, each in enumerate(times)]

    for windows in (
        [window(3.0, 1.0), window(2.0, 5.0), window(1.0)],
        [window(1.0), window(3.0, 5.0), window(2.0, 1.0)],
    ):
        found = openvino_kernels.fastest_of(windows)
        assert [run.microseconds for run in found] == [2.0, 1.0]
    names = [
        [run.node for run in OpenVino("f32").profile(net(), image(1, 3, 64, 64), threads=1, times=3).runs] for _ in "ab"
    ]
    assert names[0] == names[1]
    assert len(set(names[0])) == len(names[0])


@pytest.mark.slow
def test_costs_are_of_one_runtime(tmp_path: Path) -> None:
    model, data = str(DIGITS / "digits.onnx"), f"{DIGITS / 'digits.npz'}:calib"
    own, output = str(tmp_path / "own.json"), str(tmp_path / "q.onnx")
    measure = ["costs", "measure", model, "--data", data, "--batch", "64", "--samples", "16", "-o", own]
    done = CliRunner().invoke(main, [*measure, "--runtime", "openvino"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(Path(own).read_text())["runtime"] == str(OpenVino().identity)
    command = ["quantize", model, "--data", data, "-o", output, "--samples", "16", "--costs", own, "--effort", "low"]
    command += ["--batch", "64"]  # costs depend on shapes
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2
    assert f"own.json: measured in {OpenVino().identity}, not in ONNX Runtime" in refused.stderr
    placed = CliRunner().invoke(main, [*command, "--runtime", "openvino", "--force-int8", "--json"])
    assert json.loads(placed.stdout)["placement"]["how"] == "estimated"
