"""Range files: exact round trips and merges, shards, refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from requant import RequantError
from requant.calibration import (
    Histogram,
    MinMax,
    Observations,
    RangeFile,
    Runs,
    load_ranges,
    parse_rule,
    save_ranges,
)
from requant.calibration.model.session import Array
from requant.calibration.range_files.overrides import Override, Overrides
from requant.calibration.range_files.range_file import Data, merge_files
from requant.calibration.rules.precision import Precision
from requant.calibration.statistics.histogram import Statistic
from requant.calibration.statistics.observations import Place

arrays = hnp.arrays(np.float32, st.integers(1, 9), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


def seen(rule: str, values: Mapping[str, Array], positions: tuple[int, ...] = (0,)) -> Observations:
    """Return what a run per position has seen, each of the same values."""
    kind: type[Statistic] = Histogram if parse_rule(rule).needs_histogram else MinMax
    found = Observations()
    for position in positions:
        ends = {name: np.array([[array.min(), array.max()]], np.float64) for name, array in values.items()}
        found |= Observations(
            ranges={name: kind.of(array) for name, array in values.items()},
            runs={name: Runs.of([position], end) for name, end in ends.items()},
            repeated={f"{position:02}": (Place(position, f"sample {position}"), 1)},
            samples=1,
        )
    return found


def file(rule: str = "minmax", values: Mapping[str, Array] = {}, *, model: str = "ab" * 32, **data: Any) -> RangeFile:
    positions = data.pop("positions", (0,))
    told = Data(**({"description": "data.npz"} | data))
    digests = dict.fromkeys([*values, "empty"], "01" * 8)
    return RangeFile.of(seen(rule, values, positions), parse_rule(rule), model=model, data=told, digests=digests)


A = np.array([-1.5, 0.1, 3e38], np.float32)
RULES = ["minmax", "percentile(99.9)"]


@given(array=arrays, rule=st.sampled_from(RULES), limit=st.none() | st.integers(1, 2**40))
def test_round_trip_is_exact(
    tmp_path_factory: pytest.TempPathFactory, array: Array, rule: str, limit: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "ranges.json"
    written = file(rule, {"a": array, 'b"\n/é': -array}, shards=((2, 3),), batch=4, histogram_values=limit)
    own = {"a": Override(range=(0.0, 6.0)), "empty": Override(keep_float=True), "other": Override(range=(-1.0, 1.0))}
    written = replace(written, precision=Precision(symmetric=True)).overridden(Overrides(own))
    save_ranges(path, written)
    assert load_ranges(path) == written
    before = path.read_bytes()
    save_ranges(path, load_ranges(path))
    assert path.read_bytes() == before


def test_what_is_not_known_of_a_tensor_is_left_out(tmp_path: Path) -> None:
    broken = Observations(broken={"b": Place(3, "data.npz, sample 3")}, samples=4)
    written = RangeFile.of(broken, parse_rule("minmax"), model="ab", data=Data("d"), digests={"b": "01", "c": "02"})
    save_ranges(tmp_path / "r.json", written)
    assert load_ranges(tmp_path / "r.json") == written
    assert json.loads((tmp_path / "r.json").read_text())["tensors"] == {
        "b": {"digest": "01", "broken": [3, "data.npz, sample 3"]},
        "c": {"digest": "02"},
    }


def test_no_tensors(tmp_path: Path) -> None:
    save_ranges(tmp_path / "r.json", file())
    assert load_ranges(tmp_path / "r.json") == file()


# ---------------------------------------------------------------------------------------------------- choosing


def test_ranges_are_chosen_anew_by_another_rule() -> None:
    values = {"a": np.linspace(-1, 1, 1001, dtype=np.float32)}
    assert file("percentile(99)", values).choose(parse_rule("minmax")).ranges == file("minmax", values).ranges
    narrow = file("percentile", values).choose(parse_rule("percentile(90)"))
    assert narrow == file("percentile(90)", values)
    with pytest.raises(RequantError, match=r"the rule percentile\(90\) needs histograms, and there are none"):
        file("minmax", values).choose(parse_rule("percentile(90)"))


def test_overrides_win_and_stay() -> None:
    values = {name: np.linspace(-1, 1, 1001, dtype=np.float32) for name in "abc"}
    first = {"a": Override(range=(0.0, 9.0)), "b": Override(rule=parse_rule("minmax")), "empty": Override((0.0, 1.0))}
    found = file("percentile(90)", values).overridden(Overrides(first))
    assert found.ranges["a"] == (0.0, 9.0)
    assert found.ranges["b"] == (-1.0, 1.0)
    assert found.ranges["c"] == file("percentile(90)", values).ranges["c"]
    assert found.ranges["empty"] == (0.0, 1.0)
    again = found.overridden(Overrides({"a": Override(keep_float=True)}))
    assert again.ranges == {name: span for name, span in found.ranges.items() if name != "a"}
    assert again.choose(parse_rule("percentile(80)")).ranges["b"] == (-1.0, 1.0)
    with pytest.raises(RequantError, match=r"mine.toml: a rule needs histograms"):
        file("minmax", values).overridden(Overrides({"a": Override(rule=parse_rule("percentile"))}, "mine.toml"))


# ---------------------------------------------------------------------------------------------------- merging


@given(left=arrays, right=arrays, rule=st.sampled_from(RULES))
def test_merging_files_equals_one_run(left: Array, right: Array, rule: str) -> None:
    a, b = file(rule, {"x": left, "y": left}, description="a"), file(rule, {"x": right}, description="b")
    merged = a | b
    assert merged.data == Data("a + b")
    assert merged.samples == 2
    whole = file(rule, {"x": np.concatenate([left, right]), "y": left})
    assert merged.ranges == whole.ranges
    assert merged.seen.ranges == whole.seen.ranges
    assert merged == b | a


def shards(n: int, rule: str = "minmax", samples: int = 7, **others: Any) -> list[RangeFile]:
    """Return the files of the shards of a run over some samples."""
    return [
        file(rule, {"x": A, "y": -A}, shards=((i + 1, n),), positions=tuple(range(i, samples, n)), **others)
        for i in range(n)
    ]


@pytest.mark.parametrize("rule", RULES)
def test_shards_merge_to_the_file_of_the_whole_run_in_any_order(tmp_path: Path, rule: str) -> None:
    save_ranges(tmp_path / "whole.json", file(rule, {"x": A, "y": -A}, positions=tuple(range(7))))
    for order in permutations(shards(3, rule)):
        for merged in (merge_files(order), order[0] | order[1] | order[2], order[0] | (order[1] | order[2])):
            save_ranges(tmp_path / "merged.json", merged)
            assert (tmp_path / "merged.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_overrides_survive_a_merge() -> None:
    own = Overrides({"x": Override(range=(0.0, 6.0)), "y": Override(keep_float=True)})
    merged = merge_files([part.overridden(own) for part in shards(2)])
    assert merged.ranges == {"x": (0.0, 6.0)}
    assert merged.overrides == own


def test_some_shards_make_a_file_of_some_shards() -> None:
    first, _, third = shards(3)
    merged = third | first
    assert merged.data.shards == ((1, 3), (3, 3))
    assert merged.samples == first.samples + third.samples


def test_shards_of_several_data_merge_once_each_is_complete() -> None:
    (a1, a2), (b1, b2) = shards(2, description="a"), shards(2, description="b")
    assert merge_files([a1, b2, a2, b1]) == (a1 | a2) | (b2 | b1)
    assert merge_files([a1, b2, a2, b1]).data == Data("a + b")
    with pytest.raises(RequantError, match="only shard 1/2 of 'b' is given; all its shards are needed"):
        merge_files([a1, a2, b1])


WRONG_MERGES = {
    "model": ([file(model="cd" * 32)], "ranges of two models cannot be merged: abababababab and cdcdcdcdcdcd"),
    "rule": ([file("percentile", {"a": A})], r"different rules cannot be merged: minmax and percentile\(99.99\)"),
    "kind": ([replace(file(), seen=seen("percentile", {"a": A}))], "tensor 'a': a histogram cannot be merged"),
    "batch": ([file(batch=4)], "runs with batch 1 and batch 4 cannot be merged"),
    "values": ([file(histogram_values=64)], "histograms of all and of 64 values per sample cannot be merged"),
    "precision": ([replace(file(), precision=Precision(symmetric=True))], "different precisions cannot be merged"),
    "overrides": (
        [file().overridden(Overrides({"a": Override(keep_float=True)}))],
        "different overrides cannot be merged: see tensor 'a'",
    ),
    "same run": ([file(values={"a": A})], "the same run over 'data.npz' is given twice"),
    "whole and shard": (shards(2)[:1], "'data.npz' is given both whole and as shard 1/2"),
}


@pytest.mark.parametrize(("others", "problem"), WRONG_MERGES.values(), ids=WRONG_MERGES)
def test_files_that_cannot_be_merged(others: list[RangeFile], problem: str) -> None:
    for order in ([file(values={"a": A}), *others], [*others, file(values={"a": A})]):
        with pytest.raises(RequantError) as caught:
            merge_files(order)
    assert "\n" not in str(caught.value)
    with pytest.raises(RequantError, match=problem):
        merge_files([file(values={"a": A}), *others])


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([shards(3)[0], shards(3)[1], shards(3)[0]], "shard 1/3 of 'data.npz' is given twice"),
        ([shards(3)[0], shards(2)[1]], "shards of different divisions cannot be merged: 2/2 and 1/3"),
    ],
    ids=["twice", "divisions"],
)
def test_shards_that_cannot_be_merged(files: list[RangeFile], problem: str) -> None:
    with pytest.raises(RequantError, match=problem):
        merge_files(files)


# ---------------------------------------------------------------------------------------------------- malformed files


def test_the_schema_before_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"schema": 1, "model": "ab", "source": "d", "samples": 3, "tensors": {}}')
    with pytest.raises(RequantError, match=r"r.json: range file of schema 1; this program reads 2: calibrate again"):
        load_ranges(tmp_path / "r.json")


DATA = {"description": "d", "samples": 1, "batch": 1, "shards": []}
STATISTIC = {"kind": "minmax", "lo": 0.0, "hi": 1.0, "count": 1}
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"schema": 3}, "range file of schema 3; this program reads 2"),
    ({"schema": None}, "range file of schema None"),
    ({"model": 3}, "malformed range file: 'model': expected str, got int"),
    ({"data": DATA | {"samples": "3"}}, "'data.samples': expected int, got str"),
    ({"data": DATA | {"batch": 0}}, "'data.batch': expected int >= 1"),
    ({"data": DATA | {"histogram_values": 0}}, "'data.histogram_values': expected int >= 1"),
    ({"data": DATA | {"shards": ["2"]}}, "'data.shards[0]': expected str matching regex"),
    ({"data": DATA | {"shards": ["3/2"]}}, "not shards of one run: 3/2"),
    ({"data": DATA | {"shards": ["1/2", "1/3"]}}, "not shards of one run: 1/2, 1/3"),
    ({"data": DATA | {"shards": ["1/3", "1/3"]}}, "a shard occurs twice"),
    ({"rule": "nonsense"}, "no range rule named 'nonsense'"),
    ({"precision": {"bits": 99, "symmetric": False}}, "99 bits"),
    ({"feeds": {"d": [0, "s"]}}, "feed 'd': expected array of at least length 3, got 2"),
    ({"tensors": []}, "'tensors': expected object, got array"),
    ({"tensors": {"a": 3}}, "tensor 'a': expected object, got int"),
    ({"tensors": {"a": {"statistic": STATISTIC}}}, "tensor 'a': 'lo' is missing"),
    ({"tensors": {"a": {"statistic": STATISTIC, "lo": 0.0}}}, "tensor 'a': 'hi' is missing"),
    ({"tensors": {"a": {"statistic": STATISTIC, "lo": 1, "hi": 0}}}, "tensor 'a': 'lo' is above 'hi'"),
    ({"tensors": {"a": {"statistic": STATISTIC, "lo": 1, "hi": 1e308}}}, "tensor 'a': the range is beyond float32"),
    ({"tensors": {"a": {"statistic": STATISTIC, "lo": True, "hi": 1}}}, "tensor 'a': 'lo': expected float, got bool"),
    (
        {"tensors": {"a": {"statistic": STATISTIC | {"count": 0}, "lo": 0, "hi": 1}}},
        "tensor 'a': 'statistic.count': expected int >= 1",
    ),
    ({"tensors": {"a": {"statistic": STATISTIC | {"hi": 10**400}, "lo": 0, "hi": 1}}}, "'tensors.a.statistic.hi'"),
    ({"tensors": {"a": {"digest": 3}}}, "tensor 'a': 'digest': expected str, got int"),
    ({"tensors": {"a": {"override": {"float": 1}}}}, "tensor 'a': 'float' can only be true"),
]


@pytest.mark.parametrize(("change", "problem"), MALFORMED, ids=[problem for _, problem in MALFORMED])
def test_malformed_files_are_refused_by_name(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    path = tmp_path / "r.json"
    save_ranges(path, file(values={"a": A}))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RequantError) as caught:
        load_ranges(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["schema", "model", "data", "rule", "precision", "inputs", "tensors", "feeds"])
def test_missing_entries_are_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "r.json"
    save_ranges(path, file(values={"a": A}))
    document = json.loads(path.read_text())
    del document[key]
    path.write_text(json.dumps(document))
    with pytest.raises(RequantError, match=f"'{key}'"):
        load_ranges(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "NaN", "\xff"])
def test_what_is_no_range_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RequantError, match=r"r\.json: not a range file"):
        load_ranges(path)
    with pytest.raises(RequantError, match=r"none\.json: no such file"):
        load_ranges(tmp_path / "none.json")
