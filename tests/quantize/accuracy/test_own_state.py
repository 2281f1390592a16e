"""Models with state are compared with the state that each of them carries itself."""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner

from requant import RequantError
from requant.calibration import DataSpec, Source
from requant.calibration.data.samples import Sample, Step
from requant.cli import main
from requant.quantize import Options, Selection, compare_models, quantize_model
from requant.quantize.accuracy import pair
from requant.quantize.accuracy.compare import common_source
from requant.quantize.accuracy.metrics import METRICS, can_distribute, score
from requant.quantize.model.files import Weights
from requant.quantize.options.declared import Strategy
from requant.quantize.runtime.own_state import OwnState

SCRIPT = Path(__file__).parents[3] / "sample_models" / "streams.py"
sys.path.insert(0, str(SCRIPT.parent))
streams = importlib.import_module("streams")
sys.path.remove(str(SCRIPT.parent))

Feed = dict[str, Any]
AFTER: Mapping[str, Callable[[str], str]] = {
    "gru_stream": lambda _: "hn",
    "cached_decoder": lambda name: name.replace("past_key_values", "present"),
}


@dataclass(frozen=True)
class Quantized:
    """A sample model and its int8 model, both as files."""

    name: str
    before: Path
    after: Path

    @cached_property
    def sequences(self) -> list[list[Feed]]:
        return [sequence[:12] for sequence in list(getattr(streams, f"{self.name}_data")())[:3]]

    @property
    def source(self) -> Source:
        return common_source(self.before, self.after, self.sequences)

    def loops(self, path: Path, states: list[Feed] | None = None) -> list[dict[str, Any]]:
        """The outputs of each step, with the model's own state, or with the given inputs."""
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        found: list[dict[str, Any]] = []
        for sample in self.source:
            feed = dict(sample.feed) if states is None else states[len(found)]
            if states is None and sample.step is not None and sample.step.index:
                feed |= {link.input: found[-1][AFTER[self.name](link.input)] for link in sample.step.links}
            found.append(dict(zip(names, session.run(None, feed), strict=True)))
        return found

    def noise(self, output: str, found: list[dict[str, Any]]) -> list[float]:
        """The power of the error of each step, as a share of the power of the float model's output."""
        exact = self.loops(self.before)
        return [
            float(np.square(one[output].astype(float) - two[output]).sum() / np.square(two[output].astype(float)).sum())
            for one, two in zip(found, exact, strict=True)
        ]


@pytest.fixture(scope="module", params=["gru_stream", "cached_decoder"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    name = str(request.param)
    before = tmp_path_factory.mktemp(name) / "float.onnx"
    after = before.with_name("int8.onnx")
    onnx.save_model(streams.build(name), before)
    found = Quantized(name, before, after)
    options = Options(
        force_int8=True, place="rules", effort="low", seconds=0.01, selection=Selection(strategy=Strategy.STATIC_FLOAT)
    )
    result = quantize_model(before, found.sequences, after, options)
    assert result.int8_nodes
    assert any(note.startswith("state: ") for note in result.notes)
    return found


@pytest.mark.slow
def test_the_errors_of_each_model_accumulate(quantized: Quantized) -> None:
    output = {"gru_stream": "mask", "cached_decoder": "logits"}[quantized.name]
    own = quantized.loops(quantized.after)
    compared = compare_models(quantized.before, quantized.after, quantized.sequences)
    exact = quantized.loops(quantized.before)
    signal = sum(np.square(each[output].astype(float)).sum() for each in exact)
    noise = sum(np.square(one[output].astype(float) - two[output]).sum() for one, two in zip(own, exact, strict=True))
    # the loop above and requant run the same kernels, with another number of threads
    assert compared.accuracy.sqnr_db[output] == pytest.approx(10 * np.log10(signal / noise), abs=0.05)
    assert compared.accuracy.samples == len(own)
    forced = quantized.loops(quantized.after, [sample.feed for sample in quantized.source])
    fresh, late = [], []
    for steps in np.split(np.array([quantized.noise(output, own), quantized.noise(output, forced)]), 3, axis=1):
        np.testing.assert_allclose(steps[0, 0], steps[1, 0], rtol=1e-3)  # the first step has no state yet
        fresh.append(steps[1, 1:].mean())
        late.append(steps[0, 1:].mean())
    assert np.mean(late) > 1.05 * np.mean(fresh)


def test_metrics_carry_the_own_state(quantized: Quantized) -> None:
    source = quantized.source
    compared = compare_models(quantized.before, quantized.after, quantized.sequences, metric="sqnr")
    alone = score(METRICS["sqnr"], quantized.after, source, reference=quantized.before)
    assert compared.metric is not None
    assert alone.value == pytest.approx(compared.metric.after, abs=0.05)
    assert not can_distribute(Options().execution, METRICS["sqnr"], source)


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 2**20])
def test_large_models_run_in_turns(quantized: Quantized, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compare_models(quantized.before, quantized.after, quantized.sequences).accuracy.sqnr_db
    monkeypatch.setattr(pair, "ROOM", room)
    large = Weights(2**40, 1)
    found = pair.judge_pair(quantized.before, quantized.after, quantized.source, weights=large).sqnr_db
    assert found == pytest.approx(expected, abs=0.05)


def test_left_out_steps_begin_with_the_float_state(quantized: Quantized) -> None:
    samples = list(quantized.source)
    fed: list[Feed] = []

    def run(feed: Mapping[str, Any]) -> dict[str, Any]:
        fed.append(dict(feed))
        return {AFTER[quantized.name](name): np.full_like(value, 9) for name, value in feed.items()}

    own = OwnState()
    for index in (0, 1, 3, 4, 12):
        own.run(run, samples[index])
    state = next(link.input for link in samples[0].step.links) if samples[0].step else ""
    carried = [bool((feed[state] == 9).all() and feed[state].size) for feed in fed]
    assert carried == [False, quantized.name == "gru_stream", False, True, False]


def test_the_command_says_what_is_carried(quantized: Quantized, tmp_path: Path) -> None:
    data = tmp_path / "data.py"
    steps = [{key: value.tolist() for key, value in step.items()} for step in quantized.sequences[0]]
    kind = "float32" if quantized.name == "gru_stream" else "int64"
    data.write_text(
        f"import numpy as np\nSTEPS = {steps!r}\n"
        f"def feeds():\n    yield [{{k: np.array(v, np.{kind}) for k, v in step.items()}} for step in STEPS]\n"
    )
    models = [str(quantized.before), str(quantized.after)]
    result = CliRunner().invoke(main, ["compare", *models, "--data", f"{data}:feeds", "--json"])
    assert result.exit_code == 0, result.output
    state = json.loads(result.stdout)["state"]
    assert len(state) == (1 if quantized.name == "gru_stream" else 4)
    assert state[0] in ("hn feeds h0", "present.0.key feeds past_key_values.0.key")
    told = CliRunner().invoke(main, ["compare", *models, "--data", f"{data}:feeds"]).output
    word = "hn feeds h0" if len(state) == 1 else "present.*.key feeds past_key_values.*.key (2 of them)"
    assert word in " ".join(told.split())
    refused = CliRunner().invoke(main, ["compare", *models, "--data", f"{data}:feeds", "--state", "none"])
    assert refused.exit_code == 2
    assert "expected a dict of arrays" in refused.output


def test_a_named_state_is_carried_from_python(quantized: Quantized) -> None:
    source = common_source(quantized.before, quantized.after, quantized.sequences)
    asked = tuple(f"{link.output}={link.input}" for link in source.links)
    named = common_source(quantized.before, quantized.after, DataSpec(quantized.sequences, state=asked))
    assert named.links == source.links


@pytest.mark.slow
def test_calibrate_and_check_say_what_is_carried(quantized: Quantized, tmp_path: Path) -> None:
    frames = np.concatenate([next(iter(step.values())) for step in quantized.sequences[0][1:]])
    data = tmp_path / "steps.npz"
    arrays: dict[str, Any] = {next(iter(quantized.sequences[0][0])): frames}
    np.savez(data, **arrays)
    word = (
        "state: hn feeds h0" if quantized.name == "gru_stream" else "state: present.*.key feeds past_key_values.*.key"
    )
    ranges = ["calibrate", str(quantized.before), "--data", str(data), "-o", str(tmp_path / "ranges.json")]
    calibrated = CliRunner().invoke(main, ranges)
    assert calibrated.exit_code == 0, calibrated.output
    assert word in calibrated.output
    pair_ = ["--float", str(quantized.before), "--model", str(quantized.after), "--data", str(data), "--seconds", "0"]
    pair_ += ["--baseline", str(tmp_path / "lock.json")]
    assert CliRunner().invoke(main, ["check", *pair_, "--update"]).exit_code == 0
    checked = CliRunner().invoke(main, ["check", *pair_])
    assert checked.exit_code == 0, checked.output
    assert word in " ".join(checked.output.split())


@pytest.mark.parametrize("cut", [[28], [4, 8, 16], [16, *[1] * 12], [1] * 28])
def test_perplexity_does_not_depend_on_the_steps(tmp_path: Path, cut: list[int]) -> None:
    path = tmp_path / "float.onnx"
    onnx.save_model(streams.build("cached_decoder"), path)
    ids = np.random.default_rng(1).integers(0, 512, (2, 1, 28))
    ends = np.cumsum(cut)
    data = [[{"input_ids": row[:, end - n : end]} for n, end in zip(cut, ends, strict=True)] for row in ids]
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    total = 0.0
    for row in ids:
        feed = {"input_ids": row, "attention_mask": np.ones((1, 28), np.int64), "position_ids": np.arange(28)[None]}
        feed |= {
            f"past_key_values.{i}.{p}": np.zeros((1, 4, 0, 16), np.float32) for i in (0, 1) for p in ("key", "value")
        }
        logits = session.run(["logits"], feed)[0][0].astype(float)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total -= logits[np.arange(27), row[0, 1:]].sum()
    found = score(METRICS["perplexity"], path, common_source(path, path, data))
    assert found.value == pytest.approx(np.exp(total / 54), rel=1e-4)


@pytest.mark.parametrize(("count", "held_out", "judging"), [(4, True, 12), (3, False, 36)])
def test_whole_sequences_judge_that_gave_no_ranges(tmp_path: Path, count: int, held_out: bool, judging: int) -> None:
    path = tmp_path / "float.onnx"
    onnx.save_model(streams.build("gru_stream"), path)
    sequences = [sequence[:12] for sequence in list(streams.gru_stream_data())[:count]]
    options = Options(effort="low", force_int8=True, kernels="stock")
    found = quantize_model(path, sequences, tmp_path / "int8.onnx", options)
    assert found.promise is not None
    assert (found.promise.held_out, found.accuracy.samples) == (held_out, judging)


@pytest.mark.parametrize("step", [None, Step(0, 0, ())], ids=["sample", "step"])
def test_an_error_names_the_sample(step: Step | None) -> None:
    def broken(feed: object) -> dict[str, Any]:
        raise RequantError("q.onnx: the model fails: of itself")

    with pytest.raises(RequantError, match=r"^data\.npz, sample 7: q\.onnx: the model fails: of itself$"):
        OwnState().run(broken, Sample({}, None, "data.npz, sample 7", step))
