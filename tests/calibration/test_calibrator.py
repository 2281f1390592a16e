"""The calibrator: data in parts, on several machines, from iterators, as if all of it had come at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from requant import RequantError
from requant.calibration import Calibrator, DataError, Execution, load_ranges
from requant.calibration.data.samples import Sample, checked

MODEL = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 2] x) => (float[N, 2] y) { y = Add(x, x) }""").SerializeToString()
FEEDS = [{"x": np.array([[index, -index]], np.float32)} for index in range(13)]


def calibrator(part: int = 1, parts: int = 1, **options: Any) -> Calibrator:
    return Calibrator(MODEL, execution=Execution(shard=(part, parts), **options))


def stream(feeds: list[Any]) -> Iterator[Any]:
    yield from feeds


# ---------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("batch", [1, 2])
def test_shards_of_data_that_come_in_parts_are_the_whole(batch: int) -> None:
    whole = calibrator(batch=batch).observe(FEEDS[:7]).observe(FEEDS[7:])
    first, second = (calibrator(part, 2, batch=batch).observe(FEEDS[:7]).observe(FEEDS[7:]) for part in (1, 2))
    assert first.merge(second).seen == whole.seen
    assert (
        whole.seen.runs
        == calibrator(batch=batch)
        .observe(FEEDS[:7])
        .merge(calibrator(batch=batch, first=7).observe(FEEDS[7:]))
        .seen.runs
    )


def test_positions_go_on_behind_what_was_merged() -> None:
    merged = calibrator().observe(FEEDS[:4]).merge(calibrator(first=4).observe(FEEDS[4:9])).observe(FEEDS[9:])
    assert merged.seen.runs == calibrator().observe(FEEDS).seen.runs


@pytest.mark.parametrize("source", [lambda: stream(FEEDS), lambda: lambda: FEEDS], ids=["iterator", "callable"])
def test_data_of_unknown_length_are_the_last_that_a_shard_takes(source: Any) -> None:
    whole = calibrator().observe(source()).observe(FEEDS)
    assert whole.seen.runs == calibrator().observe(FEEDS + FEEDS).seen.runs
    first, second = (calibrator(part, 2).observe(FEEDS).observe(source()) for part in (1, 2))
    with pytest.raises(RequantError, match="shard 1/2 cannot be observed after data of unknown length"):
        first.observe(FEEDS)
    assert first.merge(second).seen.runs == whole.seen.runs


def test_what_fails_moves_nothing() -> None:
    one = calibrator().observe(FEEDS[:7])
    with pytest.raises(DataError):
        one.observe([FEEDS[0], {"x": np.ones((1, 3), np.float32)}])
    assert one.observe(FEEDS[7:]).seen.runs == calibrator().observe(FEEDS).seen.runs


# ---------------------------------------------------------------------------------------------------- shards


def test_files_say_which_shards_they_are_of(tmp_path: Path) -> None:
    parts = [calibrator(part, 3).observe(FEEDS) for part in (1, 2, 3)]
    assert parts[0].save(tmp_path / "r.json").data.shards == ((1, 3),)
    assert load_ranges(tmp_path / "r.json").data.shards == ((1, 3),)
    assert parts[2].merge(parts[0]).save(tmp_path / "r.json").data.shards == ((1, 3), (3, 3))
    whole = Calibrator(MODEL).merge(parts[2]).merge(parts[1])
    assert whole.save(tmp_path / "r.json") == calibrator().observe(FEEDS).save(tmp_path / "whole.json")
    assert (tmp_path / "r.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


@pytest.mark.parametrize(
    ("one", "other", "problem"),
    [
        ((1, 2), (1, 2), "shards 1/2 and 1/2 cannot be merged: a shard occurs twice"),
        ((1, 2), (1, 3), "shards 1/2 and 1/3 cannot be merged: not shards of one run"),
        ((1, 2), (1, 1), "a shard can be merged only with other shards of the same data"),
        ((1, 1), (1, 2), "a shard can be merged only with other shards of the same data"),
    ],
    ids=["twice", "divisions", "whole", "part"],
)
def test_shards_that_do_not_go_together(one: tuple[int, int], other: tuple[int, int], problem: str) -> None:
    left, right = calibrator(*one).observe(FEEDS), calibrator(*other).observe(FEEDS)
    before = left.seen
    with pytest.raises(RequantError, match=problem):
        left.merge(right)
    assert left.seen == before


def test_shards_of_different_data() -> None:
    left, right = calibrator(1, 2).observe(FEEDS), calibrator(2, 2).observe(tuple(FEEDS))
    with pytest.raises(RequantError, match="a shard can be merged only with other shards of the same data"):
        left.merge(right)


def test_nothing_is_observed_behind_other_shards() -> None:
    left = calibrator(1, 3).observe(FEEDS).merge(calibrator(2, 3).observe(FEEDS))
    with pytest.raises(
        RequantError, match="shard 1/3 cannot be observed after 1/3, 2/3; use a calibrator per shard, then merge"
    ):
        left.observe(FEEDS)
    left.merge(calibrator(3, 3).observe(FEEDS))
    with pytest.raises(RequantError, match="shard 1/3 cannot be observed after 1/1"):
        left.observe(FEEDS)


# ---------------------------------------------------------------------------------------------------- iterators


def test_samples_of_an_iterator_are_counted() -> None:
    seen = calibrator().observe(stream(FEEDS[:3])).seen
    assert sorted((place.position, place.where) for place, _ in seen.repeated.values()) == [
        (index, f"a generator of feeds, sample {index}") for index in range(3)
    ]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"x": np.ones((1, 3), np.float32)}, "a generator of feeds, sample 2, input 'x': expected float32"),
        ({"z": np.ones((1, 2), np.float32)}, "a generator of feeds, sample 2: the model has no input named 'z'"),
        (7, "a generator of feeds, sample 2: expected a dict"),
    ],
    ids=["shape", "name", "kind"],
)
def test_a_sample_of_an_iterator_that_does_not_fit(bad: object, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        calibrator().observe(stream([*FEEDS[:2], bad]))


def test_an_iterator_that_fails() -> None:
    with pytest.raises(DataError, match="a generator of feeds: failed at sample 2: ZeroDivisionError"):
        calibrator().observe({"x": np.full((1, 2), 1 // (2 - index), np.float32)} for index in range(5))


def test_an_iterator_of_which_some_are_taken() -> None:
    items = stream(FEEDS)
    assert calibrator().observe(items, samples=3).seen.samples == 3
    assert next(items) is FEEDS[3]


def test_samples_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def counted(sample: Sample, inputs: Any) -> Sample:
        names.append(sample.where)
        return checked(sample, inputs)

    monkeypatch.setattr("requant.calibration.data.sources.checked", counted)
    calibrator().observe(stream(FEEDS[:3]))
    assert len(names) == 3


# ---------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_removed_when_its_result_is_there(tmp_path: Path) -> None:
    one = calibrator(checkpoint=tmp_path / "c").observe(FEEDS)
    assert one.seen == calibrator().observe(FEEDS).seen
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_stays_where_the_result_cannot_be_added(tmp_path: Path) -> None:
    one = calibrator(checkpoint=tmp_path / "c").merge(Calibrator(MODEL, histogram=False).observe(FEEDS[:2]))
    with pytest.raises(RequantError):
        one.observe(FEEDS)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_that_is_given_away_stays(tmp_path: Path) -> None:
    kept: list[Path] = []
    calibrator(checkpoint=tmp_path / "c", kept=kept.append).observe(FEEDS)
    assert kept == list(tmp_path.iterdir())
