"""`quantize_model`, `compare_models` and `calibrate_model` from Python: what they return, write, and leave alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from requant import RequantError
from requant.calibration import load_ranges
from requant.calibration.model.session import FEW
from requant.quantize import (
    Options,
    Result,
    Selection,
    calibrate_model,
    compare_models,
    log_model,
    merge_ranges,
    quantize_model,
)
from requant.quantize.model import files as model_files
from requant.quantize.model.writing import save_model
from requant.quantize.placement import runs
from requant.quantize.placement.runs import MOST_SAMPLES
from requant.transforms import METADATA_KEY, parse

SAMPLE_MODELS = Path(__file__).parents[2] / "sample_models"
NAMES = ["digits", "digits_mobile", "digits_transformer"]
LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:]]
SAMPLES = [
    pytest.param("digits", "qdq"),
    pytest.param("digits", "qoperator"),
    pytest.param("digits_transformer", "qdq", marks=pytest.mark.slow),
    pytest.param("digits_transformer", "qoperator", marks=pytest.mark.slow),
    pytest.param("digits_mobile", "qdq", marks=pytest.mark.slow),
    pytest.param("digits_mobile", "qoperator", marks=pytest.mark.slow),
]
DATA = SAMPLE_MODELS / "digits.npz"
CALIBRATION = f"{DATA}:calib"

Floats = NDArray[np.float32]
Feed = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def quantized(
    tmp_path_factory: pytest.TempPathFactory, set_latency: Callable[..., None]
) -> Callable[[str, str], tuple[Path, Result]]:
    """Return (output, result) of a sample model in a format, made once."""
    folder = tmp_path_factory.mktemp("int8")
    made: dict[tuple[str, str], tuple[Path, Result]] = {}

    def make(name: str, format_: str) -> tuple[Path, Result]:
        if (name, format_) not in made:
            output = folder / f"{name}_{format_}.onnx"
            with pytest.MonkeyPatch.context() as patch:
                set_latency(patch)
                options = Options(
                    format=format_, place="rules", samples=64
                )  # the clock may tell otherwise from run to run
                result = quantize_model(SAMPLE_MODELS / f"{name}.onnx", CALIBRATION, output, options)
            made[name, format_] = (output, result)
        return made[name, format_]

    return make


Quantized = Callable[[str, str], tuple[Path, Result]]


def save(path: Path, text: str, **constants: NDArray[np.generic]) -> Path:
    """Write a model of ONNX text."""
    proto = onnx.parser.parse_model(text)
    for name, array in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(proto)
    onnx.save(proto, path)
    return path


def weights(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def feeds(count: int = 6, **shapes: tuple[int, ...]) -> list[Feed]:
    generator = np.random.default_rng(3)
    return [
        {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(count)
    ]


def run(path: Path, feed: Feed) -> list[NDArray[Any]]:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, dict(feed))]


def ends(path: Path) -> list[tuple[str, str, list[Any]]]:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [(value.name, value.type, value.shape) for value in (*session.get_inputs(), *session.get_outputs())]


def operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
PRODUCT = HEAD + "net (float[N,64] x) => (float[N,64] y) {\n[first] a = MatMul(x, v)\n[last] y = MatMul(a, w)\n}"


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """Write two matrix products, one after the other."""
    return save(tmp_path / "product.onnx", PRODUCT, v=weights(64, 64), w=weights(64, 64, seed=1))


# ---------------------------------------------------------------------------------------------- sample models


@pytest.mark.parametrize(("name", "format_"), SAMPLES)
def test_a_sample_model_comes_out_valid_with_the_same_inputs_and_outputs(
    name: str, format_: str, quantized: Quantized
) -> None:
    output, result = quantized(name, format_)
    onnx.checker.check_model(output, full_check=True)
    assert ends(output) == ends(SAMPLE_MODELS / f"{name}.onnx")
    assert output.stat().st_size < (SAMPLE_MODELS / f"{name}.onnx").stat().st_size
    assert result.int8_nodes > 0
    assert result.why_not == ""


@pytest.mark.parametrize(("name", "format_"), SAMPLES)
def test_the_result_agrees_with_its_json_and_the_files(name: str, format_: str, quantized: Quantized) -> None:
    output, result = quantized(name, format_)
    found = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert found["output"] == str(output)
    assert found["format"] == format_
    assert found["int8_nodes"] == result.int8_nodes
    assert found["mac_share_int8"] == result.mac_share_int8
    assert len(found["float_nodes"]) == len({node["name"] for node in found["float_nodes"]}) == len(result.float_nodes)
    assert found["agreement"] == result.accuracy.agreement
    assert found["sqnr_db"] == min(found["sqnr_db_by_output"].values()) == result.accuracy.worst_sqnr_db
    assert found["latency"]["speedup"] == result.speedup == 2.0
    assert found["size"] == {
        "float_bytes": (SAMPLE_MODELS / f"{name}.onnx").stat().st_size,
        "int8_bytes": output.stat().st_size,
    }
    assert found["samples"] == 64  # as many as the models are compared on
    assert found["calibration"] == "auto"
    assert found["rejected"] is None


@pytest.mark.parametrize("force", [True, False])
def test_an_output_of_another_run_at_the_same_time_is_told(tmp_path: Path, force: bool) -> None:
    output = tmp_path / "out.onnx"
    options = Options(place="rules", effort="low", samples=16, seconds=0.01, force_int8=True, force=force)
    data = f"{SAMPLE_MODELS / 'digits.npz'}:calib"
    model = SAMPLE_MODELS / "digits.onnx"

    def other(*_: object) -> None:
        output.write_bytes(b"of another run")

    result = quantize_model(model, data, output, options, other)
    assert any("another run has written the output meanwhile" in note for note in result.notes) is not force
    onnx.checker.check_model(onnx.load(output))


@pytest.mark.parametrize(("name", "format_"), SAMPLES)
def test_the_pipeline_is_in_the_model_and_in_the_result(name: str, format_: str, quantized: Quantized) -> None:
    output, result = quantized(name, format_)
    (recorded,) = [entry.value for entry in onnx.load(output).metadata_props if entry.key == METADATA_KEY]
    assert recorded == result.pipeline
    steps = recorded.split()
    last = {"qdq": ["insert_qdq"], "qoperator": ["insert_qdq", "qdq_to_qoperator"]}[format_]
    assert steps[-len(last) :] == last
    simplified = recorded.removesuffix(" " + " ".join(last))
    assert str(parse(simplified)) == simplified  # in canonical form: it can be given to `requant transform`


@pytest.mark.parametrize("format_", ["qdq", "qoperator"])
def test_digits_is_computed_in_integers(format_: str, quantized: Quantized) -> None:
    _, result = quantized("digits", format_)
    assert result.mac_share_int8 >= 0.9
    assert {"QLinearConv": 1, "QGemm": 2}.items() <= result.kernels.items()
    assert {node.name for node in result.float_nodes} >= {"conv1", "relu1"}


@pytest.mark.parametrize(("name", "format_"), SAMPLES)
def test_the_test_split_is_classified_nearly_as_well(name: str, format_: str, quantized: Quantized) -> None:
    points = {"digits": 0.3, "digits_mobile": 1.0, "digits_transformer": 0.5}[name]
    output, _ = quantized(name, format_)
    found = compare_models(SAMPLE_MODELS / f"{name}.onnx", output, DATA).accuracy
    assert found.labelled is not None
    assert found.labelled.items == 797
    drop = 100 * (found.labelled.float_correct - found.labelled.int8_correct) / found.labelled.items
    assert drop <= points
    assert found.labelled.broken - found.labelled.fixed == found.labelled.float_correct - found.labelled.int8_correct
    assert found.worst_sqnr_db >= 20


@pytest.mark.parametrize("name", ["digits", *LARGE])
def test_both_formats_compute_the_same(name: str, quantized: Quantized) -> None:
    """They may differ where a value is halfway between two steps, which moves each later tensor by a step at most.

    The noise of such steps is a share of the rounding noise that both have anyway, in every tensor: the formats must
    be closer to each other than either is to the float model.
    """
    (qdq, result), (qoperator, _) = quantized(name, "qdq"), quantized(name, "qoperator")
    between = compare_models(qdq, qoperator, f"{DATA}:calib").accuracy
    assert between.agreement is not None
    assert between.agreement >= 0.99
    assert between.worst_sqnr_db >= result.accuracy.worst_sqnr_db


def test_qoperator_has_no_conversions_between_integer_operators(quantized: Quantized) -> None:
    output, _ = quantized("digits", "qoperator")
    assert {"QLinearConv", "QGemm"} <= operators(output)
    graph = onnx.load(output).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    assert not [
        node.name
        for node in graph.node
        if node.op_type == "QuantizeLinear" and made.get(node.input[0]) == "DequantizeLinear"
    ]


# ----------------------------------------------------------------------------------------------------- options


def test_an_excluded_node_keeps_its_weights_to_the_bit(tmp_path: Path, product: Path, int8_wins: None) -> None:
    output = tmp_path / "out.onnx"
    options = Options(selection=Selection(exclude_nodes=frozenset({"first"})))
    result = quantize_model(product, feeds(x=(1, 64)), output, options)
    assert [(node.name, node.reason) for node in result.float_nodes] == [("first", "excluded by name")]
    stored = {tensor.name: tensor for tensor in onnx.load(output).graph.initializer}
    original = {tensor.name: tensor for tensor in onnx.load(product).graph.initializer}
    assert numpy_helper.to_array(stored["v"]).tobytes() == numpy_helper.to_array(original["v"]).tobytes()
    assert "w" not in stored
    assert np.dtype(np.int8) in {numpy_helper.to_array(tensor).dtype for tensor in stored.values()}


def test_the_percentile_rule_narrows_the_ranges(tmp_path: Path, product: Path, int8_wins: None) -> None:
    data = feeds(20, x=(1, 64))
    data[0]["x"][0, 0] = 12.0
    scales = {}
    for rule in ("minmax", "percentile(99)"):
        result = quantize_model(product, data, tmp_path / f"{rule}.onnx", Options(calibration=rule, force_int8=True))
        assert result.calibration == rule
        tensors = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / f"{rule}.onnx").graph.initializer}
        scales[rule] = float(tensors["x/scale"])
    assert scales["minmax"] > 12 / 255
    assert scales["percentile(99)"] < 10 / 255


class Reader:
    """A source that can be read any number of times."""

    def __iter__(self) -> Iterator[Feed]:
        return iter(feeds(x=(1, 64)))


@pytest.mark.parametrize(
    "data",
    [
        lambda: feeds(x=(1, 64)),
        lambda: iter(feeds(x=(1, 64))),
        lambda: [(feed, 3) for feed in feeds(x=(1, 64))],
        lambda: lambda: iter(feeds(x=(1, 64))),
        Reader,
    ],
    ids=["list", "iterator", "pairs", "callable", "iterable"],
)
def test_every_source_of_the_same_feeds_gives_the_same_model(
    data: Callable[[], Any], tmp_path: Path, product: Path, int8_wins: None
) -> None:
    quantize_model(product, feeds(x=(1, 64)), tmp_path / "expected.onnx", Options())
    result = quantize_model(product, data(), tmp_path / "out.onnx", Options())
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "expected.onnx").read_bytes()
    assert result.samples == 6


def test_labels_of_any_kind_do_not_hinder(tmp_path: Path, int8_wins: None) -> None:
    text = HEAD + "net (float[N,64] x) => (float[N,1] y) { y = MatMul(x, w) }"
    regression = save(tmp_path / "regression.onnx", text, w=weights(64, 1))
    result = quantize_model(regression, [(feed, 0.25) for feed in feeds(x=(1, 64))], tmp_path / "out.onnx")
    assert result.accuracy.agreement is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "tflite"}, "no format 'tflite'; there are: qdq, qoperator"),
        ({"samples": 0}, "samples must be at least 1, not 0"),
        ({"batch": 0}, "batch must be at least 1, not 0"),
        ({"batch": (4, 0)}, "batch must be at least 1, not 0"),
        ({"batch": (1, 16, 1)}, "batch 1 is given more than once"),
        ({"batch": ()}, "batch needs at least one size"),
        ({"threads": -1}, "threads must be 0"),
        ({"calibration": "percentile(200)"}, "percentile"),
    ],
    ids=lambda value: str(value),
)
def test_options_that_cannot_be_met_are_refused_where_they_are_made(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequantError) as caught:
        Options(**options)
    assert said in str(caught.value)


def test_a_batch_that_the_model_cannot_run_is_refused_before_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HEAD + "net (float[N,64] x) => (float[M,64] z) {\ny = MatMul(x, w)\nz = Reshape(y, s)\n}"
    model = save(tmp_path / "fixed.onnx", text, w=weights(64, 64), s=np.array([1, 64]))
    monkeypatch.delattr("requant.quantize.steps.ranges.observe")
    with pytest.raises(RequantError, match=r"fixed\.onnx: the model fails: .*\{4,64\}"):
        quantize_model(model, feeds(x=(1, 64)), tmp_path / "out.onnx", Options(batch=4))
    assert not (tmp_path / "out.onnx").exists()


# ------------------------------------------------------------------------------------------------ good behaviour


def test_the_library_prints_nothing_and_changes_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, int8_wins: None
) -> None:
    for file in (SAMPLE_MODELS / "digits.onnx", DATA):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    quantize_model("digits.onnx", "digits.npz:calib", "out.onnx", Options(samples=4))
    compare_models("digits.onnx", "out.onnx", "digits.npz:calib")
    assert capfd.readouterr() == ("", "")
    for made in ("out.onnx", "out.plan.json"):
        (tmp_path / made).unlink()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


CAREFUL = ("try tensors alone", "try weights alone", "correct weights")
"""The stages of any effort but the least."""


@pytest.mark.usefixtures("int8_wins")
def test_progress_names_its_stages(tmp_path: Path, product: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    options = Options(seconds=0.0)
    quantize_model(product, feeds(x=(1, 64)), tmp_path / "out.onnx", options, lambda *step: told.append(step))
    stages = list(dict.fromkeys(stage.split(":")[0] for stage, _, _ in told))
    found = ["simplify", "calibrate", "choose ranges", "check data", "write model", "compare"]
    assert [stage for stage in stages if stage != "time briefly"] == [*found, *CAREFUL, "time", "inspect"]
    assert ("calibrate", 6, 6) in told


@pytest.mark.usefixtures("int8_wins")
def test_what_follows_a_stage_that_counts_has_a_name_of_its_own(tmp_path: Path, product: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    options = Options(seconds=0.0)
    done = quantize_model(product, feeds(x=(1, 64)), tmp_path / "out.onnx", options, lambda *step: told.append(step))
    stages = [stage for stage, _ in itertools.groupby(stage for stage, _, _ in told)]
    assert stages[stages.index("calibrate") + 1 :][:2] == ["choose ranges", "check data"]
    assert stages[stages.index("compare") - 1] == stages[stages.index("correct weights") + 1] == "write model"
    assert next(step for step in told if step[0] == "compare")[1] == 0
    assert stages[-1] == "inspect"
    assert {"choose ranges", "check data", "write model"} <= done.seconds.keys()


@pytest.mark.parametrize(
    ("int8_ms", "force", "corrected"), [(3.0, False, False), (3.0, True, True), (2.1, False, True)]
)
def test_weights_of_a_model_that_is_clearly_slower_are_corrected_only_by_force(
    product: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    set_latency: Callable[..., None],
    *,
    int8_ms: float,
    force: bool,
    corrected: bool,
) -> None:
    set_latency(monkeypatch, float_ms=2.0, int8_ms=int8_ms)
    told: list[str] = []
    options = Options(seconds=0.0, force_int8=force, place="rules")
    result = quantize_model(product, feeds(x=(1, 64)), tmp_path / "q.onnx", options, lambda *step: told.append(step[0]))
    assert ("correct weights" in told) is corrected
    assert result.why_not.startswith("" if force else "int8 gains too little here")


def test_the_result_says_what_was_done_for_accuracy_and_how_long_each_stage_took(tmp_path: Path, product: Path) -> None:
    result = quantize_model(product, feeds(x=(1, 64)), tmp_path / "out.onnx", Options(seconds=0.0, effort="low"))
    found = result.to_json()
    assert found["effort"]["name"] == "low"
    assert not found["effort"]["corrections"]  # a matrix product without a bias has no means to correct
    assert all(seconds >= 0 for seconds in found["seconds"].values())
    assert {"calibrate", "compare", "time", "inspect"} <= found["seconds"].keys()


@pytest.mark.slow
def test_labels_that_fit_the_predictions_are_counted(tmp_path: Path) -> None:
    data, samples = SAMPLE_MODELS / "digits.npz", 32
    result = quantize_model(SAMPLE_MODELS / "digits.onnx", data, tmp_path / "out.onnx", Options(samples=samples))
    assert result.accuracy.labelled is not None
    assert result.to_json()["items"] == result.accuracy.labelled.items == MOST_SAMPLES  # samples that gave no ranges


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", *LARGE])
def test_the_same_request_gives_the_same_bytes(
    name: str, tmp_path: Path, quantized: Quantized, int8_wins: None
) -> None:
    again = tmp_path / f"{name}.onnx"
    quantize_model(SAMPLE_MODELS / f"{name}.onnx", CALIBRATION, again, Options(place="rules", samples=64))
    assert again.read_bytes() == quantized(name, "qdq")[0].read_bytes()


# ---------------------------------------------------------------------------------------------------- the guard


def test_where_int8_loses_the_simplified_float_model_comes_out(
    tmp_path: Path, product: Path, monkeypatch: pytest.MonkeyPatch, set_latency: Callable[..., None]
) -> None:
    set_latency(monkeypatch, float_ms=1.0, int8_ms=2.0)
    output = tmp_path / "out.onnx"
    result = quantize_model(product, feeds(x=(1, 64)), output)
    assert operators(output) == {"MatMul"}
    assert result.why_not.endswith("speed of float: the output is the simplified float model")
    assert "0.50x the speed" in result.why_not
    assert result.int8_nodes == result.mac_share_int8 == 0
    assert {node.name for node in result.float_nodes} == {"first", "last"}
    assert all("0.50x" in node.reason for node in result.float_nodes)
    assert result.rejected is not None
    assert result.rejected.accuracy.worst_sqnr_db < 100 < result.accuracy.worst_sqnr_db
    assert "insert_qdq" not in result.pipeline
    json.dumps(result.to_json(), allow_nan=False)
    (feed,) = feeds(1, x=(1, 64))
    assert np.array_equal(run(output, feed)[0], run(product, feed)[0])


def test_a_model_with_nothing_to_quantize(tmp_path: Path, int8_wins: None) -> None:
    text = HEAD + "net (float[N,4] x) => (float[N,4] y) { [sine] y = Sin(x) }"
    model = save(tmp_path / "sine.onnx", text)
    for format_ in ("qdq", "qoperator"):
        output = tmp_path / f"{format_}.onnx"
        result = quantize_model(model, feeds(x=(1, 4)), output, Options(format=format_))
        assert result.why_not == "nothing in this model can become int8: the output is the simplified float model"
        assert result.rejected is None
        assert [(node.name, node.operator) for node in result.float_nodes] == [("sine", "Sin")]
        assert operators(output) == {"Sin"}
    with pytest.raises(RequantError, match="nothing to calibrate"):
        calibrate_model(model, feeds(x=(1, 4)))


# -------------------------------------------------------------------------------------------------- odd models


def quantize_here(model: Path, data: Any, **options: Any) -> tuple[Path, Result]:
    """Quantize beside the model, in both formats, and assert that what comes out is valid."""
    for format_ in ("qoperator", "qdq"):
        output = model.with_name(f"{model.stem}_{format_}.onnx")
        result = quantize_model(model, data, output, Options(format=format_, **options))
        onnx.checker.check_model(output, full_check=True)
        assert [end[:2] for end in ends(output)] == [end[:2] for end in ends(model)]
        json.dumps(result.to_json(), allow_nan=False)
    return output, result


CONVOLUTIONS = """
net (float[1,8,8,8] x) => (float[1,8,4,4] y) {
  [first] a = Conv<pads = [0, 0, 0, 0]>(x, v)
  [relu] b = Relu(a)
  [last] y = Conv(b, w)
}"""


@pytest.mark.parametrize(
    ("head", "listed"),
    [
        ('<ir_version: 3, opset_import: ["" : 8]>', True),
        ('<ir_version: 6, opset_import: ["" : 11]>', False),
        ('<ir_version: 7, opset_import: ["" : 12]>', False),
        ('<ir_version: 10, opset_import: ["" : 21]>', False),
    ],
    ids=["opset 8, IR 3", "opset 11", "opset 12", "opset 21"],
)
def test_models_of_other_opsets_get_weights_per_channel(
    head: str, listed: bool, tmp_path: Path, int8_wins: None
) -> None:
    text = head + CONVOLUTIONS
    if listed:  # before IR version 4 initializers are inputs too
        text = text.replace("x) =>", "x, float[8,8,3,3] v, float[8,8,3,3] w) =>")
    model = save(tmp_path / "old.onnx", text, v=weights(8, 8, 3, 3), w=weights(8, 8, 3, 3, seed=1))
    output, result = quantize_here(model, feeds(x=(1, 8, 8, 8)))
    assert result.int8_nodes == 3
    assert result.accuracy.worst_sqnr_db > 25
    scales = [numpy_helper.to_array(t) for t in onnx.load(output).graph.initializer if "scale" in t.name]
    assert [scale.shape for scale in scales].count((8,)) >= 2
    assert "QLinearConv" in operators(tmp_path / "old_qoperator.onnx")


def test_two_inputs_and_two_outputs(tmp_path: Path, int8_wins: None) -> None:
    text = (
        HEAD
        + """net (float[N,64] a, float[N,32] b) => (float[N,16] y, float[N,64] z) {
      [left] z = MatMul(a, v)
      [right] r = MatMul(b, w)
      [add] s = Add(z, r)
      [last] y = MatMul(s, u)
    }"""
    )
    constants = {"v": weights(64, 64), "w": weights(32, 64), "u": weights(64, 16)}
    model = save(tmp_path / "two.onnx", text, **constants)
    output, result = quantize_here(model, feeds(a=(2, 64), b=(2, 32)))
    assert set(result.accuracy.sqnr_db) == {"y", "z"}
    assert min(result.accuracy.sqnr_db.values()) > 25
    assert [value.shape for value in run(output, feeds(1, a=(5, 64), b=(5, 32))[0])] == [(5, 16), (5, 64)]


def test_height_and_width_that_vary(tmp_path: Path, int8_wins: None) -> None:
    text = (
        HEAD
        + """net (float[N,8,H,W] x) => (float[N,8,H,W] y) {
      [first] a = Conv<pads = [1, 1, 1, 1]>(x, v)
      [relu] b = Relu(a)
      [last] y = Conv<pads = [1, 1, 1, 1]>(b, w)
    }"""
    )
    model = save(tmp_path / "sizes.onnx", text, v=weights(8, 8, 3, 3), w=weights(8, 8, 3, 3, seed=1))
    data = [feeds(1, x=(1, 8, 6 + i, 9 - i))[0] for i in range(4)]
    output, result = quantize_here(model, data)
    assert result.int8_nodes == 3
    assert result.accuracy.worst_sqnr_db > 25
    assert run(output, feeds(1, x=(3, 8, 17, 5))[0])[0].shape == (3, 8, 17, 5)


ODD = {
    "whole numbers out": ("=> (int64[N] z) {\n%s\nz = ArgMax<axis = 1, keepdims = 0>(y)\n}", 25),
    "a sequence out": ("=> (seq(float[N,64]) z) {\n%s\nz = SequenceConstruct(y)\n}", None),
    "infinities out": ("=> (float[N,64] z) {\n%s\nr = Relu(y)\nz = Log(r)\n}", -np.inf),
    "NaNs out": ("=> (float[N,64] z) {\n%s\nz = Log(y)\n}", -np.inf),
    "sizes that depend on the data": ("=> (int64[2,M] z) {\n%s\nz = NonZero(y)\n}", 25),
    "an input out": ("=> (float[N,64] z, float[N,64] y) {\n%s\nz = Identity(x)\n}", 25),
    "an input is an output": ("=> (float[N,64] x, float[N,64] y) {\n%s\n}", 25),
    "an output twice": ("=> (float[N,64] y, float[N,64] z) {\n%s\nz = Identity(y)\n}", 25),
}


@pytest.mark.parametrize(("text", "decibels"), ODD.values(), ids=ODD)
def test_odd_outputs_are_no_obstacle(text: str, decibels: float | None, tmp_path: Path, int8_wins: None) -> None:
    model = save(
        tmp_path / "odd.onnx",
        HEAD + "net (float[N,64] x) " + text % "y = MatMul(x, w)",
        w=weights(64, 64),
    )
    for format_ in ("qdq", "qoperator"):
        output = tmp_path / f"{format_}.onnx"
        result = quantize_model(model, feeds(x=(1, 64)), output, Options(format=format_))
        assert (result.accuracy.worst_sqnr_db >= decibels) if decibels is not None else not result.accuracy.sqnr_db
        assert len(ends(output)) == len(ends(model))


def test_weights_and_activations_of_nothing_but_zeros(tmp_path: Path, int8_wins: None) -> None:
    model = save(tmp_path / "zeros.onnx", PRODUCT, v=np.zeros((64, 64), np.float32), w=weights(64, 64))
    output, result = quantize_here(model, [{"x": np.zeros((1, 64), np.float32)}])
    assert result.accuracy.worst_sqnr_db == np.inf
    assert not run(output, feeds(1, x=(1, 64))[0])[0].any()


def test_nodes_without_names_get_them(tmp_path: Path, int8_wins: None) -> None:
    text = HEAD + "net (float[N,64] x) => (float[N,64] y) {\na = MatMul(x, v)\ny = MatMul(a, w)\n}"
    model = save(tmp_path / "names.onnx", text, v=weights(64, 64), w=weights(64, 64, seed=1))
    output, result = quantize_here(model, feeds(x=(1, 64)))
    assert result.mac_share_int8 == 1.0
    assert "" not in {node.name for node in onnx.load(output).graph.node}


# ------------------------------------------------------------------------------------------- ranges, logs, files


def test_calibrate_model_observes_what_may_become_uint8(product: Path, tmp_path: Path) -> None:
    found = calibrate_model(product, feeds(x=(1, 64))).file
    assert set(found.ranges) == {"x", "a", "y"}  # the last product may write uint8
    assert set(calibrate_model(product, feeds(x=(1, 64)), Options(place="rules")).file.ranges) == {"x", "a"}
    values = np.concatenate([feed["x"] for feed in feeds(x=(1, 64))])
    assert found.ranges["x"] == (values.min(), values.max())
    narrow = calibrate_model(product, feeds(x=(1, 64)), Options(calibration="percentile(90)", samples=3)).file
    assert narrow.samples == 3
    assert narrow.ranges["x"][1] < found.ranges["x"][1]


def test_merged_ranges_are_those_of_one_run(product: Path, tmp_path: Path) -> None:
    from requant.calibration import save_ranges

    data = feeds(x=(1, 64))
    for name, part in (("a", data[:2]), ("b", data[2:]), ("all", data)):
        save_ranges(tmp_path / f"{name}.json", calibrate_model(product, part).file)
    merged = merge_ranges([tmp_path / "a.json", tmp_path / "b.json"]).file
    assert merged.ranges == load_ranges(tmp_path / "all.json").ranges
    assert merged.samples == 6


def test_a_log_that_cannot_be_finished_is_not_written(product: Path, tmp_path: Path) -> None:
    with pytest.raises(RequantError):
        log_model(product, feeds(x=(1, 64)), tmp_path / "some.log")
    assert not (tmp_path / "some.log").exists()


def test_a_large_model_keeps_its_weights_beside_it(
    product: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "PROTOBUF_LIMIT", 1000)
    (tmp_path / "folder").mkdir()
    output = tmp_path / "folder" / "large.onnx"
    save_model(model_files.load_model(product), output)
    assert sorted(path.name for path in output.parent.iterdir()) == ["large.onnx", "large.onnx.data"]
    (feed,) = feeds(1, x=(1, 64))
    assert np.array_equal(run(output, feed)[0], run(product, feed)[0])
    assert model_files.size_on_disk(output) == sum(path.stat().st_size for path in output.parent.iterdir())
    with pytest.raises(RequantError, match=r"gone.*cannot be written: No such file"):
        save_model(model_files.load_model(product), tmp_path / "gone" / "large.onnx")


CHAIN = HEAD + (
    "net (float[N,16,12,12] x) => (float[N,16,12,12] y) {\n"
    "[one] a = Conv <pads = [1, 1, 1, 1]> (x, u)\n"
    "[two] b = Conv <pads = [1, 1, 1, 1]> (a, v)\n"
    "[three] y = Conv <pads = [1, 1, 1, 1]> (b, w)\n}"
)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Write three convolutions, one after the other."""
    return save(
        tmp_path / "chain.onnx", CHAIN, **{name: weights(16, 16, 3, 3, seed=i) / 12 for i, name in enumerate("uvw")}
    )


@pytest.mark.usefixtures("int8_wins")
@pytest.mark.parametrize("format_", ["qdq", "qoperator"])
def test_a_convolution_between_integer_ones_really_stays_float(format_: str, chain: Path, tmp_path: Path) -> None:
    selection = Selection(exclude_nodes=frozenset({"two"}))
    options = Options(selection=selection, format=format_, seconds=0)
    result = quantize_model(chain, feeds(x=(1, 16, 12, 12)), tmp_path / "out.onnx", options)
    assert result.kernels == {"QLinearConv": 2, "Conv": 1}
    assert result.mac_share_int8 == pytest.approx(2 / 3)
    assert result.notes == ()


@pytest.mark.usefixtures("int8_wins")
def test_what_was_excluded_by_a_type_that_simplifying_changes_stays_float(tmp_path: Path) -> None:
    text = HEAD + (
        "net (float[N,16,8,8] x) => (float[N,16,8,8] y) {\n[a] a = Conv(x, v)\n[b] b = Conv(x, v)\n"
        "[s] s = Sum(a, b)\n[c] y = Conv(s, w)\n}"
    )
    path = save(tmp_path / "sum.onnx", text, v=weights(16, 16, 1, 1), w=weights(16, 16, 1, 1, seed=1))
    options = Options(selection=Selection(exclude_ops=frozenset({"Sum"})), seconds=0)
    result = quantize_model(path, feeds(x=(1, 16, 8, 8)), tmp_path / "out.onnx", options)
    assert {node.name: node.reason for node in result.float_nodes} == {"s": "excluded: Sum"}


@pytest.mark.usefixtures("int8_wins")
def test_samples_that_do_not_judge_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUNNING", 0.0)
    text = HEAD + "net (float[N,16,8,8] x) => (float[N,16,8,8] y) { y = Conv(x, w) }"
    path = save(tmp_path / "net.onnx", text, w=weights(16, 16, 1, 1))
    result = quantize_model(path, feeds(10, x=(1, 16, 8, 8)), tmp_path / "out.onnx", Options(seconds=0))
    assert result.samples == FEW
    assert f"{FEW} samples of a list of feeds (10 samples)" in str(result)


@pytest.mark.parametrize(
    ("name", "told"), [("bn", "Mul 'bn' is excluded, but folded"), ("*", "'bn' is excluded, but"), ("b*n", "'bn' is")]
)
@pytest.mark.usefixtures("int8_wins")
def test_an_excluded_node_that_is_folded_away_is_told(tmp_path: Path, name: str, told: str) -> None:
    text = HEAD + "net (float[N,16,8,8] x) => (float[N,16,8,8] y) {\n[c] a = Conv(x, w)\n[bn] y = Mul(a, s)\n}"
    scales = np.linspace(1, 2, 16, dtype=np.float32).reshape(16, 1, 1)
    path = save(tmp_path / "net.onnx", text, w=weights(16, 16, 1, 1), s=scales)
    options = Options(selection=Selection(exclude_nodes=frozenset({name})), seconds=0)
    result = quantize_model(path, feeds(x=(1, 16, 8, 8)), tmp_path / "out.onnx", options)
    assert told in result.notes[0]
    assert bool(result.int8_nodes) == (name != "*")


@pytest.mark.usefixtures("int8_wins")
def test_a_tensor_that_is_always_empty_stays_float(tmp_path: Path) -> None:
    text = HEAD + (
        "net (float[N,16,8,8] x) => (float[N,M,8,8] y) {\n[c] a = Conv(x, w)\n[e] e = Slice(a, start, end, axis)\n"
        "[j] j = Concat <axis = 1> (a, e)\n[d] y = Conv(j, w)\n}"
    )
    ints = {"start": np.array([0]), "end": np.array([0]), "axis": np.array([1])}
    path = save(tmp_path / "net.onnx", text, w=weights(16, 16, 1, 1), **ints)
    options = Options(selection=Selection(exclude_nodes=frozenset({"e"})), seconds=0)
    result = quantize_model(path, feeds(x=(1, 16, 8, 8)), tmp_path / "out.onnx", options)
    assert {node.name: node.reason for node in result.float_nodes}["j"] == "has no values in the calibration data"


@pytest.mark.parametrize("bad", [0, 2, 17])
def test_the_sample_on_which_the_model_fails_is_named(tmp_path: Path, bad: int) -> None:
    """The first samples are run in turns where a run before the calibration fails, the others by the calibration."""
    text = HEAD + "net (float[N,64] x, int64[M] at) => (float[M,64] z) {\ny = MatMul(x, w)\nz = Gather(y, at)\n}"
    model = save(tmp_path / "net.onnx", text, w=weights(64, 64))
    rows = np.zeros((4, 64), np.float32)
    data = [{"x": rows, "at": np.array([3 + (i == bad)] * (1 + (i == bad)))} for i in range(20)]
    with pytest.raises(RequantError) as caught:
        quantize_model(model, data, tmp_path / "out.onnx", Options(seconds=0))
    assert str(caught.value).startswith(f"a list of feeds, sample {bad}: the model fails: ")
    assert str(caught.value).count("the model") == 1


def test_external_data_survive_a_change_of_opset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int8_wins: None
) -> None:
    path = save(tmp_path / "net.onnx", PRODUCT.replace(": 17", ": 11"), v=weights(64, 64), w=weights(64, 64, seed=1))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "with_data").mkdir()
    stored = tmp_path / "with_data" / "net.onnx"
    onnx.save(onnx.load(path), stored, save_as_external_data=True, location="net.data", size_threshold=0)
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = quantize_model(stored, feeds(x=(1, 64)), tmp_path / "out.onnx", Options(seconds=0))
    assert result.mac_share_int8 == 1.0
    assert "convert_opset" in result.pipeline


@pytest.mark.usefixtures("int8_wins")
def test_a_model_that_is_quantized_already_says_so(tmp_path: Path, product: Path) -> None:
    first = tmp_path / "first.onnx"
    quantize_model(product, feeds(x=(1, 64)), first, Options(seconds=0))
    again = quantize_model(first, feeds(x=(1, 64)), tmp_path / "again.onnx", Options(seconds=0))
    reasons = {node.name: node.reason for node in again.float_nodes}
    assert reasons["first"] == reasons["last"] == "its weights are quantized already"
    assert not again.why_not
    (note,) = again.notes  # that the runtime computes them in integers is no deviation from the plan
    assert note.startswith("nothing left to quantize: requant wrote this model")


def test_a_broken_graph_is_told_with_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    proto = onnx.parser.parse_model(HEAD + "net (float[4] x) => (float[4] y) { y = Relu(x) }")
    proto.graph.node[0].input[0] = "nowhere"
    onnx.save(proto, tmp_path / "broken.onnx")
    with pytest.raises(RequantError, match=r"broken\.onnx: "):
        quantize_model(tmp_path / "broken.onnx", feeds(x=(4,)), tmp_path / "out.onnx")
    with pytest.raises(RequantError, match=r"broken\.onnx: .*'nowhere'"):
        calibrate_model(tmp_path / "broken.onnx", feeds(x=(4,)))
    assert caplog.records == []  # nothing but the one line
