"""Sequences of samples whose state is carried, compared with a loop over ONNX Runtime."""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from requant import RequantError
from requant.calibration import Calibrator, DataSpec, Execution, Source, input_specs, observe, open_session, open_source
from requant.calibration.data import sequences as sequences_module
from requant.calibration.data.samples import DataError, Sample
from requant.calibration.data.sequences import Carrier, stretches

SCRIPT = Path(__file__).parents[3] / "sample_models" / "streams.py"
sys.path.insert(0, str(SCRIPT.parent))
streams = importlib.import_module("streams")
sys.path.remove(str(SCRIPT.parent))

Feed = dict[str, Any]
STATE: dict[str, dict[str, tuple[int, ...]]] = {"gru_stream": {"h0": (1, 1, 96)}}
STATE["cached_decoder"] = {f"past_key_values.{i}.{part}": (1, 4, 0, 16) for i in (0, 1) for part in ("key", "value")}
AFTER: Mapping[str, Callable[[str], str]] = {
    "gru_stream": lambda _: "hn",
    "cached_decoder": lambda name: name.replace("past_key_values", "present"),
}


@pytest.fixture(scope="module", params=["gru_stream", "cached_decoder"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


MODELS: dict[str, bytes] = {}


def model(name: str) -> bytes:
    if name not in MODELS:
        MODELS[name] = streams.build(name).SerializeToString()
    return MODELS[name]


def opened(name: str, data: Any) -> Source:
    return open_source(data, input_specs(open_session(model(name))), model(name))


def sequences(name: str, count: int = 3, steps: int = 5) -> list[list[Feed]]:
    return [sequence[:steps] for sequence in list(getattr(streams, f"{name}_data")())[:count]]


def looped(name: str, data: list[list[Feed]]) -> list[Feed]:
    """The inputs of each step, by a loop over ONNX Runtime as users write it."""
    session = ort.InferenceSession(model(name), providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    feeds = []
    for sequence in data:
        state = {key: np.zeros(shape, np.float32) for key, shape in STATE[name].items()}
        for step in sequence:
            feed = {**step, **state}
            if "input_ids" in step:
                past, new = state["past_key_values.0.key"].shape[2], step["input_ids"].shape[1]
                feed["attention_mask"] = np.ones((1, past + new), np.int64)
                feed["position_ids"] = np.arange(past, past + new)[None]
            feeds.append(feed)
            after = dict(zip(outputs, session.run(None, feed), strict=True))
            state = {key: after[AFTER[name](key)] for key in state}
    return feeds


def equal(found: list[Feed], expected: list[Feed]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            # the runtime may round differently with another number of threads: 1e-6 of values about 1
            np.testing.assert_allclose(one[key], other[key], rtol=0, atol=1e-5, err_msg=key)


def test_lists_are_sequences(name: str) -> None:
    data = sequences(name)
    source = opened(name, data)
    equal([sample.feed for sample in source], looped(name, data))
    assert [(s.step.sequence, s.step.index) for s in source if s.step] == [
        (5 * i, k) for i in range(3) for k in range(5)
    ]
    assert source.length == 15


@pytest.mark.parametrize("form", ["generator", "iterator", "pairs", "marked"])
def test_other_forms_of_sequences(form: str) -> None:
    data = sequences("gru_stream")
    marked = [{**step, "sequence": 7 - i} for i, sequence in enumerate(data) for step in sequence]
    forms: dict[str, Any] = {
        "generator": lambda: iter(data),
        "iterator": iter(data),
        "pairs": [[(step, 3) for step in sequence] for sequence in data],
        "marked": marked,
    }
    samples = list(opened("gru_stream", forms[form]))
    equal([sample.feed for sample in samples], looped("gru_stream", data))
    assert all((sample.label == 3) == (form == "pairs") for sample in samples)


@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_are_one_sequence_or_marked(tmp_path: Path, compressed: bool) -> None:
    data = sequences("gru_stream")
    frames = np.concatenate([step["frame"] for sequence in data for step in sequence])
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "one.npz", frame=frames)
    save(tmp_path / "marked.npz", frame=frames, sequence=np.repeat([4, 0, 9], 5).astype(np.int32))
    whole = [[step for sequence in data for step in sequence]]
    equal([s.feed for s in opened("gru_stream", str(tmp_path / "one.npz"))], looped("gru_stream", whole))
    equal([s.feed for s in opened("gru_stream", str(tmp_path / "marked.npz"))], looped("gru_stream", data))


def test_files_are_steps(tmp_path: Path) -> None:
    data = sequences("gru_stream", 1)
    for index, step in enumerate(data[0]):
        np.save(tmp_path / f"{index}.npy", step["frame"])
    equal([s.feed for s in opened("gru_stream", str(tmp_path))], looped("gru_stream", data))


def test_a_given_state_begins_a_sequence() -> None:
    (steps,) = sequences("gru_stream", 1, 6)
    start = np.full((1, 1, 96), 0.5, np.float32)
    steps[3] = {**steps[3], "h0": start}
    found = list(opened("gru_stream", steps))
    assert [sample.step.index for sample in found if sample.step] == [0, 1, 2, 0, 1, 2]
    np.testing.assert_array_equal(found[3].feed["h0"], start)
    session = open_session(model("gru_stream"), threads=1)
    np.testing.assert_array_equal(found[4].feed["h0"], session.run(["hn"], found[3].feed)[0])


def test_data_with_the_state_are_samples_by_themselves(tmp_path: Path) -> None:
    states = np.random.default_rng(0).standard_normal((4, 1, 1, 96)).astype(np.float32)
    frames = np.zeros((4, 64), np.float32)
    np.savez(tmp_path / "a.npz", frame=frames, h0=states)
    source = opened("gru_stream", str(tmp_path / "a.npz"))
    assert source.links == ()
    assert [str(link) for link in source.given] == ["hn feeds h0"]
    assert source.reference is not None
    assert [sample.step for sample in source] == [None] * 4
    np.testing.assert_array_equal([sample.feed["h0"] for sample in source], states)


def test_a_mask_over_the_own_tokens_begins_a_sequence() -> None:
    rows = np.arange(12).reshape(3, 1, 4)
    data = [{"input_ids": row, "attention_mask": np.ones((1, 4), np.int64)} for row in rows]
    found = list(opened("cached_decoder", data))
    assert [sample.feed["past_key_values.0.key"].shape[2] for sample in found] == [0, 0, 0]
    without = list(opened("cached_decoder", [{"input_ids": row} for row in rows]))
    assert [sample.feed["past_key_values.0.key"].shape[2] for sample in without] == [0, 4, 8]
    assert [sample.feed["attention_mask"].shape for sample in without] == [(1, 4), (1, 8), (1, 12)]


def test_items_of_a_batch_have_their_own_state() -> None:
    one, two = sequences("gru_stream", 2)
    both = [{"frame": np.concatenate([a["frame"], b["frame"]])} for a, b in zip(one, two, strict=True)]
    found = [sample.feed["h0"] for sample in opened("gru_stream", both)]
    apart = [feed["h0"] for feed in looped("gru_stream", [one, two])]
    for step in range(5):
        np.testing.assert_allclose(found[step], np.concatenate([apart[step], apart[5 + step]], 1), atol=1e-5)


@pytest.mark.parametrize("picked", [[0], [4], [2, 7], [5, 6, 14], [1, 13]])
@pytest.mark.parametrize("room", [0, 700, 2**28])
def test_picked_samples_have_the_state_of_their_sequence(
    name: str, picked: list[int], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences_module, "ROOM", room)
    data = sequences(name)
    expected = looped(name, data)
    source = opened(name, lambda: iter(data))
    for _ in range(2):  # the second time, some states are kept
        equal([sample.feed for sample in source.read(picked)], [expected[index] for index in picked])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The samples that the float model is run on."""
    found: list[str] = []
    outputs = Carrier._outputs

    def counted(self: Carrier, sample: Sample) -> Mapping[str, Any]:
        found.append(sample.where)
        return outputs(self, sample)

    monkeypatch.setattr(Carrier, "_outputs", counted)
    return found


def test_states_are_computed_once(runs: list[str]) -> None:
    source = opened("gru_stream", sequences("gru_stream"))
    for _ in range(3):
        list(source)
        list(source.samples(4))
    assert len(runs) == 12  # each step but the last one of each sequence


def test_statistics_do_not_depend_on_the_work(tmp_path: Path) -> None:
    data = sequences("gru_stream")
    frames = np.concatenate([step["frame"] for sequence in data for step in sequence])
    np.savez(tmp_path / "a.npz", frame=frames, sequence=np.repeat([0, 1, 2], 5))
    tensors = ["h0", "hn", "mask"]

    def seen(**settings: Any) -> Any:
        source = opened("gru_stream", str(tmp_path / "a.npz"))
        return observe(model("gru_stream"), tensors, source, histogram=True, execution=Execution(**settings))

    whole = seen(workers=1)
    states = np.concatenate([feed["h0"].ravel() for feed in looped("gru_stream", data)])
    assert whole.ranges["h0"].lo == pytest.approx(states.min(), abs=1e-5)
    assert whole.ranges["h0"].hi == pytest.approx(states.max(), abs=1e-5)
    assert states.max() > 0.1  # not the zeros of a first step
    assert seen(workers=3) == whole
    parts = [seen(workers=2, shard=(part, 2)) for part in (1, 2)]
    assert (parts[0] | parts[1]).ranges == whole.ranges


def test_a_calibrator_carries_the_state() -> None:
    data = sequences("gru_stream")
    expected = np.concatenate([feed["h0"].ravel() for feed in looped("gru_stream", data)])
    for form in (data, iter(data)):
        lo, hi = Calibrator(model("gru_stream"), ["h0"], histogram=False).observe(form).ranges()["h0"]
        assert (lo, hi) == pytest.approx((expected.min(), expected.max()), abs=1e-5)


@pytest.mark.parametrize(
    ("data", "state", "message"),
    [
        ([{"frame": np.zeros((1, 64))}], ("none",), "no array for the model's input 'h0'"),
        ([{"frame": np.zeros((1, 64))}], ("mask=h0",), "output 'mask' is"),
        ([{"frame": np.zeros((1, 63), np.float32)}], None, r"sample 0, input 'frame': expected float32 \(N, 64\)"),
        ([{"frame": np.zeros((1, 64)), "sequence": "a"}], None, "sample 0, input 'sequence': expected int64"),
        ([{"frame": np.zeros((1, 64)), "h1": 1}], None, "no input named 'h1'"),
        ([], None, "holds no samples"),
    ],
)
def test_wrong_data_are_refused(data: list[Feed], state: tuple[str, ...] | None, message: str) -> None:
    with pytest.raises(RequantError, match=message):
        list(opened("gru_stream", DataSpec(data, state=state)))


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("zzz", "; there are: frame, h0; and 'sequence' may number the sequence of each step"),
        ("fram", "; did you mean 'frame'?"),
        ("sequences", "; did you mean 'sequence'?"),
    ],
)
def test_the_marker_is_not_listed_as_an_input(tmp_path: Path, wrong: str, hint: str) -> None:
    arrays: dict[str, Any] = {wrong: np.zeros((3, 64), np.float32)}
    np.savez(tmp_path / "d.npz", **arrays)
    for data in (str(tmp_path / "d.npz"), [{wrong: np.zeros((1, 64), np.float32)}]):
        with pytest.raises(RequantError) as caught:
            list(opened("gru_stream", data))
        assert str(caught.value).endswith(f"{wrong!r}{hint}") or str(caught.value).endswith(f"the model{hint}")


def test_a_decoder_without_known_tokens_needs_its_mask() -> None:
    def specs() -> Iterator[Any]:
        for spec in input_specs(open_session(model("cached_decoder"))):
            yield type(spec)("words", spec.dtype, spec.shape) if spec.name == "input_ids" else spec

    source = open_source([{"words": np.zeros((1, 2), np.int64)}], tuple(specs()), model("cached_decoder"))
    with pytest.raises(DataError, match="give attention_mask, position_ids: they follow only from one of input_ids"):
        list(source)


@pytest.mark.parametrize(
    ("starts", "count", "expected"),
    [
        ([0], 4, [0, 1, 2, 3]),
        ([0, 10, 20], 4, [0, 1, 2, 3]),
        ([0, 2, 4], 40, [*range(20), *range(20, 40)]),
        ([0, 20], 32, [*range(16), *range(20, 36)]),
        ([0, 20], 18, [*range(18)]),
        ([0, 5, 10], 8, [0, 1, 2, 3, 5, 6, 7, 8]),
        (range(40), 3, [0, 13, 26]),
    ],
)
def test_stretches(starts: list[int], count: int, expected: list[int]) -> None:
    assert stretches(starts, range(40), count) == expected


def test_stretches_of_a_source_are_beginnings_of_sequences() -> None:
    source = opened("gru_stream", sequences("gru_stream", 6, 20)).stretches(32)
    assert [(s.step.sequence, s.step.index) for s in source if s.step] == [(q, k) for q in (0, 60) for k in range(16)]
    assert [s.step.index for s in source.stretches(4) if s.step] == [0, 1, 2, 3]


def test_a_generator_is_read_ahead_for_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sequences("gru_stream", 6, 20)
    read: list[int] = []

    def endless() -> Iterator[list[Feed]]:
        for number in itertools.count():
            read.append(number)
            yield data[number % 6]

    monkeypatch.setattr(sequences_module, "LEAST_AHEAD", 48)
    source = opened("gru_stream", endless)
    picked = source.stretches(40)
    assert max(read) == 4 * 40 // 20 - 1
    found = list(picked)
    assert [(s.step.sequence, s.step.index) for s in found if s.step] == [(q, k) for q in (0, 80) for k in range(20)]
    equal([sample.feed for sample in found], looped("gru_stream", [data[0], data[4]]))
    spread = [(s.step.sequence, s.step.index) for s in source.samples(3) if s.step]
    assert spread == [(0, 0), (0, 16), (20, 12)]  # of the first 48 samples


def test_only_the_sequences_of_picked_steps_are_run(runs: list[str]) -> None:
    data = sequences("gru_stream", 6, 20)
    source = opened("gru_stream", data).stretches(40)
    found = list(source)
    equal([sample.feed for sample in found], looped("gru_stream", [data[0], data[3]]))
    assert len(runs) == 38
