"""What is timed: batch sizes, and of decoders the prefill of a prompt and the step of one token."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner

from requant import RequantError
from requant.calibration import Source, input_specs, open_session, open_source
from requant.calibration.model.session import InputSpec
from requant.cli import main
from requant.quantize import Options, compare_models, quantize_model
from requant.quantize.runtime.inputs import items_in
from requant.quantize.runtime.loads import COMPARED, LOOKED, Load, loads_of

SCRIPT = Path(__file__).parents[3] / "sample_models" / "streams.py"
sys.path.insert(0, str(SCRIPT.parent))
streams = importlib.import_module("streams")
sys.path.remove(str(SCRIPT.parent))

Feed = dict[str, Any]
KEY = "past_key_values.0.key"
IDS = np.random.default_rng(3).integers(0, 512, (1, 100))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoder") / "float.onnx"
    onnx.save_model(streams.build("cached_decoder"), path)
    return path


def opened(model: Path, data: list[Any]) -> Source:
    return open_source(data, input_specs(open_session(model)), model)


def steps(*lengths: int) -> list[Feed]:
    ends = np.cumsum(lengths)
    return [{"input_ids": IDS[:, end - length : end]} for length, end in zip(lengths, ends, strict=True)]


def regimes(loads: tuple[Load, ...]) -> list[str]:
    return [str(load.regime) for load in loads]


def outputs(model: Path, feed: Any) -> Feed:
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(feed)), strict=True))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([16, *[1] * 8], ["prefill of 16 tokens", "step after 23 tokens"]),
        ([16], ["prefill of 16 tokens", "step after 16 tokens"]),
        ([1] * 9, ["prefill of 9 tokens", "step after 8 tokens"]),
        ([1] * 99, [f"prefill of {LOOKED} tokens", f"step after {LOOKED - 1} tokens"]),
        ([4, 4, 4], ["prefill of 4 tokens", "step after 4 tokens"]),
        ([1], ["None"]),
    ],
)
def test_both_regimes_come_from_the_first_sequence(decoder: Path, lengths: list[int], expected: list[str]) -> None:
    loads = loads_of(opened(decoder, [steps(*lengths), steps(2, 1, 1)]), (1,))
    assert regimes(loads) == expected
    for load in loads:
        outputs(decoder, load.feed)  # it runs
    if len(loads) == 2:
        prompt, step = (load.feed for load in loads)
        assert (prompt[KEY].shape[2], step["input_ids"].shape) == (0, (1, 1))
        assert step["attention_mask"].shape[1] == step[KEY].shape[2] + 1
        assert step["position_ids"].tolist() == [[step[KEY].shape[2]]]


def test_a_step_behind_a_prompt_has_the_cache_of_the_prompt(decoder: Path) -> None:
    prompt, step = (load.feed for load in loads_of(opened(decoder, [steps(16)]), (1,)))
    np.testing.assert_allclose(step[KEY], outputs(decoder, prompt)["present.0.key"], atol=1e-5)
    assert step["input_ids"].tolist() == IDS[:, 15:16].tolist()


def test_a_prompt_of_steps_gives_what_the_steps_give(decoder: Path) -> None:
    source = opened(decoder, [steps(*[1] * 9)])
    prompt, _ = (load.feed for load in loads_of(source, (1,)))
    whole = outputs(decoder, prompt)["logits"][0]
    single = np.concatenate([outputs(decoder, sample.feed)["logits"][0] for sample in source])
    np.testing.assert_allclose(whole, single, atol=1e-4)  # other kernels for many rows


def test_each_batch_size_has_both_regimes(decoder: Path) -> None:
    loads = loads_of(opened(decoder, [steps(16, 1, 1)]), (1, 4))
    assert [(load.batch, load.regime and load.regime.name) for load in loads] == [
        (1, "prefill"),
        (1, "step"),
        (4, "prefill"),
        (4, "step"),
    ]
    assert loads[3].feed[KEY].shape == (4, 4, 17, 16)
    assert outputs(decoder, loads[3].feed)["logits"].shape == (4, 1, 512)


@pytest.mark.parametrize(("lengths", "timed"), [([9, 3, 7, 1], 3), ([5, 5], 5), ([4], 4), ([2, *[8] * COMPARED, 1], 8)])
def test_a_sample_of_the_middle_size_is_timed_where_sizes_are_open(
    tmp_path: Path, lengths: list[int], timed: int
) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[N,T] x, float[N,3] c) => (float[N,T] y) { y = Relu(x) }'
    onnx.save_model(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    feeds = [{"x": np.zeros((1, length), np.float32), "c": np.zeros((1, 3), np.float32)} for length in lengths]
    one, four = loads_of(opened(tmp_path / "m.onnx", feeds), (1, 4))
    assert (one.feed["x"].shape, four.feed["x"].shape) == ((1, timed), (4, timed))
    assert (one.shapes, four.shapes) == (f"x 1x{timed}", f"x 4x{timed}")


def test_a_sample_of_several_rows_is_a_batch(tmp_path: Path) -> None:
    """The time of a sample of 25 items is the time of 25 items."""
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[N,10] x) => (float[N,10] y) { y = Relu(x) }'
    onnx.save_model(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    for rows in (25, 1):
        loads = loads_of(opened(tmp_path / "m.onnx", [{"x": np.zeros((rows, 10), np.float32)}] * 2), (1, 2))
        assert [(each.batch, each.asked, each.shapes) for each in loads] == [(rows, 1, ""), (2, 2, "")]
        assert [len(each.feed["x"]) for each in loads] == [rows, 2]


FEEDS: dict[str, tuple[dict[str, tuple[tuple[int | str, ...], tuple[int, ...]]], int | None]] = {
    "one row": ({"x": (("N", 3, 8, 8), (1, 3, 8, 8))}, 1),
    "eight rows": ({"x": (("N", 3, 8, 8), (8, 3, 8, 8))}, 8),
    "inputs agree": ({"x": (("N", 3, 8, 8), (8, 3, 8, 8)), "size": (("N", 2), (8, 2))}, 8),
    "nodes and edges": ({"x": (("nodes", 4), (6, 4)), "e": (("edges", 2), (9, 2))}, None),
    "a fixed table beside it": ({"x": (("N", 4), (8, 4)), "table": ((5, 4), (5, 4))}, 8),
    "positions beside tokens": ({"ids": (("N", "T"), (2, 7)), "at": (("T",), (7,))}, 2),
    "a fixed batch": ({"x": ((8, 3, 8, 8), (8, 3, 8, 8)), "step": ((1,), (1,))}, 8),
    "fixed rows differ": ({"x": ((8, 4), (8, 4)), "h": ((2, 4), (2, 4))}, None),
    "channels or time": ({"x": ((3, 8, 8), (3, 8, 8))}, None),
    "a fixed batch of one": ({"x": ((1, 8, 8), (1, 8, 8))}, 1),
    "a state": ({"x": ((4, 8), (4, 8)), "state": ((2, 4, 8), (2, 4, 8))}, 4),
    "no rows": ({"x": ((), ()), "wave": ((16,), (16,))}, 1),
}


@pytest.mark.parametrize(("inputs", "items"), FEEDS.values(), ids=FEEDS)
def test_the_items_of_a_feed_are_the_rows_of_its_batch_axes(
    inputs: dict[str, tuple[tuple[int | str, ...], tuple[int, ...]]], items: int | None
) -> None:
    specs = [InputSpec(name, np.dtype("float32"), declared) for name, (declared, _) in inputs.items()]
    feed = {name: np.zeros(shape, np.float32) for name, (_, shape) in inputs.items()}
    assert items_in(specs, feed, {"state"}) == items


ROWS: dict[str, tuple[str, int, str]] = {
    "a sample of eight": ("N", 8, "latency, batch 8"),
    "a fixed batch of eight": ("8", 8, "latency, batch 8"),
    "one row": ("N", 1, "latency, batch 1"),
}


@pytest.mark.parametrize(("axis", "rows", "label"), ROWS.values(), ids=ROWS)
def test_the_table_counts_the_items_that_were_timed(tmp_path: Path, axis: str, rows: int, label: str) -> None:
    model, data = relu(tmp_path, f"float[{axis},10] x"), tmp_path / "data"
    data.mkdir()
    for index in range(4):
        np.savez(data / f"{index}.npz", x=np.full((rows, 10), index, np.float32))
    asked = ["compare", str(model), str(model), "--data", str(data)]
    shown = CliRunner().invoke(main, asked)
    assert shown.exit_code == 0, shown.output
    assert label in shown.output
    found = json.loads(CliRunner().invoke(main, [*asked, "--json"]).stdout)["latency"]
    assert found["batch"] == rows
    assert found["float_items_per_second"] == pytest.approx(1e3 * rows / found["float_ms"])


def test_the_table_has_no_items_per_second_where_rows_differ(tmp_path: Path) -> None:
    model = relu(tmp_path, "float[N,10] x, float[E,10] e")
    np.savez(tmp_path / "sample.npz", x=np.ones((3, 10), np.float32), e=np.ones((5, 10), np.float32))
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "sample.npz").rename(data / "sample.npz")
    shown = CliRunner().invoke(main, ["compare", str(model), str(model), "--data", str(data)])
    assert shown.exit_code == 0, shown.output
    assert "latency, one sample" in shown.output
    assert "timed on x 3x10, e 5x10" in shown.output
    assert "items/s" not in shown.output


def relu(folder: Path, inputs: str) -> Path:
    """Save a model that applies Relu to each of its inputs."""
    names = [each.split()[-1] for each in inputs.split(", ")]
    outputs = ", ".join(
        each.replace(f" {name}", f" {name}y") for each, name in zip(inputs.split(", "), names, strict=True)
    )
    nodes = " ".join(f"{name}y = Relu({name})" for name in names)
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    onnx.save_model(onnx.parser.parse_model(text), folder / "m.onnx")
    return folder / "m.onnx"


def test_other_models_have_no_regimes(tmp_path: Path) -> None:
    path = tmp_path / "gru.onnx"
    onnx.save_model(streams.build("gru_stream"), path)
    source = opened(path, list(streams.gru_stream_data()))
    assert regimes(loads_of(source, (1,))) == ["None"]
    with pytest.raises(RequantError, match="first axis is fixed, so the model takes no batch of 4"):
        loads_of(source, (1, 4))


@pytest.mark.slow
def test_results_show_both_regimes(decoder: Path) -> None:
    data = [steps(16, 1, 1, 1), steps(8, 1, 1)]
    after = decoder.with_name("int8.onnx")
    options = Options(force_int8=True, force=True, place="rules", effort="low", seconds=0.01, kernels="stock")
    result = quantize_model(decoder, data, after, options)
    found = result.to_json()["latencies"]
    assert [each["regime"] for each in found] == [
        {"name": "prefill", "tokens": 16, "past": 0},
        {"name": "step", "tokens": 1, "past": 18},
    ]
    assert found[0]["float_items_per_second"] == pytest.approx(16e3 / found[0]["float_ms"])
    compared = compare_models(decoder, after, data).to_json()
    assert [each["regime"]["name"] for each in compared["latencies"]] == ["prefill", "step"]
    assert json.loads(json.dumps(compared)) == compared


def test_the_table_has_a_row_for_each_regime(decoder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "prompts.npz", input_ids=IDS.reshape(5, 20), sequence=np.arange(5))
    output = tmp_path / "q.onnx"
    asked = ["quantize", str(decoder), "-o", str(output), "--data", str(tmp_path / "prompts.npz"), "--force-int8"]
    result = CliRunner().invoke(main, [*asked, "--place", "rules", "--effort", "low"])
    assert result.exit_code == 0, result.output
    assert "latency, prefill of 20 tokens" in result.output
    assert "latency, step after 20 tokens" in result.output
