"""Statistics as JSON: exact, canonical round trips, and refusals of what cannot come from data."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from requant import RequantError
from requant.calibration.model.session import Array
from requant.calibration.range_files.decoding import convert
from requant.calibration.range_files.records import (
    ChannelsRow,
    HistogramRow,
    MinMaxRow,
    MomentsRow,
    RunsRow,
    SumRow,
    observations_from_json,
    observations_to_json,
)
from requant.calibration.statistics.exact import ExactSum
from requant.calibration.statistics.extremes import MinMax
from requant.calibration.statistics.histogram import Histogram
from requant.calibration.statistics.observations import Observations, Place
from requant.calibration.statistics.sums import Channels, Moments, Runs

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=3, max_side=5), elements=finite)


def runs(values: Array) -> Runs:
    ends = np.stack([values.reshape(len(values), -1).min(1), values.reshape(len(values), -1).max(1)], 1)
    return Runs.of(range(len(values)), ends.astype(np.float64))


MAKERS: dict[str, Callable[[Array], Any]] = {
    "minmax": MinMax.of,
    "histogram": Histogram.of,
    "runs": runs,
    "channels": lambda values: Channels.of(values, 1),
    "moments": Moments.of,
    "sum": lambda values: ExactSum.of(values.astype(np.float64)),
}


ROWS: dict[str, Any] = {
    "minmax": MinMaxRow,
    "histogram": HistogramRow,
    "runs": RunsRow,
    "channels": ChannelsRow,
    "moments": MomentsRow,
    "sum": SumRow,
}


def to_json(kind: str, record: object) -> Any:
    return msgspec.to_builtins(ROWS[kind].of(record))


def text(value: object) -> str:
    return json.dumps(value, allow_nan=False)


@pytest.mark.parametrize("kind", MAKERS)
@given(values=arrays)
def test_round_trip_of_every_statistic(kind: str, values: Array) -> None:
    written = MAKERS[kind](values)
    row = to_json(kind, written)
    read = convert(json.loads(text(row)), ROWS[kind], kind).build()
    assert read == written
    assert text(to_json(kind, read)) == text(row)
    assert row.get("kind") == (kind if kind in ("minmax", "histogram") else None)


@pytest.mark.parametrize("kind", ["minmax", "runs", "sum"])
@given(left=arrays, right=arrays)
def test_equal_statistics_give_equal_text(kind: str, left: Array, right: Array) -> None:
    if left.shape[1:] != right.shape[1:]:
        right = left[::-1]
    a, b = MAKERS[kind](left), MAKERS[kind](right)
    assert text(to_json(kind, a | b)) == text(to_json(kind, b | a))


def test_minus_zero_is_zero() -> None:
    assert text(to_json("minmax", MinMax(-0.0, 0.0, 1))) == text(to_json("minmax", MinMax(0.0, 0.0, 1)))
    read = convert({"kind": "minmax", "lo": -0.0, "hi": -0.0, "count": 1}, MinMaxRow, "row").build()
    assert str((read.lo, read.hi)) == "(0.0, 0.0)"


X = np.array([[-1.5, 0.1], [2.0, 3e38]], np.float32)


def observed(shift: int = 0) -> Observations:
    values = X / (1 + shift)
    return Observations(
        ranges={"b": MinMax.of(values), "a": Histogram.of(values)},
        runs={"b": runs(values), "a": runs(values)},
        channels={"a": Channels.of(values, 1)},
        moments={"x": Moments.of(values / 1e30)},
        broken={'c"\n': Place(3 + shift, "data.npz, sample 3")},
        repeated={f"d{shift}": (Place(shift, f"data.npz, sample {shift}"), 1), "e": (Place(9 - shift, "é"), 2)},
        samples=2,
    )


def test_round_trip_of_observations() -> None:
    seen = observed()
    row = json.loads(text(observations_to_json(seen)))
    assert observations_from_json(row) == seen
    assert text(observations_to_json(observations_from_json(row))) == text(row)
    empty = Observations()
    assert observations_from_json(observations_to_json(empty)) == empty


def test_observations_merge_to_equal_text() -> None:
    a, b = observed(), observed(1)
    whole = text(observations_to_json(a | b))
    assert text(observations_to_json(b | a)) == whole
    assert text(observations_to_json(observations_from_json(observations_to_json(a)) | b)) == whole


def change(row: Any, path: str, value: object) -> Any:
    """Return the row with one entry replaced, or removed when the value is `REMOVED`."""
    at = row
    *way, last = (int(step) if step.lstrip("-").isdigit() else step for step in path.split("/"))
    for step in way:
        at = at[step]
    if value is REMOVED:
        del at[last]
    else:
        at[last] = value
    return row


REMOVED = object()
IMPOSSIBLE = [
    ("samples", -1, r"^statistics: 'samples': expected int >= 0$"),
    ("samples", 1.0, "'samples': expected int, got float"),
    ("tensors", [], "'tensors': expected object, got array"),
    ("tensors/b", 3, "^tensor 'b': expected object, got int"),
    ("tensors/b/statistic/kind", "x", "^tensor 'b': 'statistic.kind': invalid value 'x'"),
    ("tensors/b/statistic/kind", "sum", "^tensor 'b': 'statistic.kind': invalid value 'sum'"),
    ("tensors/b/statistic/count", 0, "^tensor 'b': 'statistic.count': expected int >= 1"),
    ("tensors/b/statistic/lo", 4e38, "^tensor 'b': the smallest value is above the largest"),
    ("tensors/b/statistic/lo", True, "^tensor 'b': 'statistic.lo': expected float, got bool"),
    ("tensors/b/statistic/lo", float("nan"), "^tensor 'b': 'statistic.lo': expected float"),
    ("tensors/b/statistic/hi", REMOVED, "^tensor 'b': 'statistic': object missing required field 'hi'"),
    ("tensors/a/statistic/counts", [1.5], r"^tensor 'a': 'statistic.counts\[0\]': expected int, got float"),
    (
        "tensors/a/statistic/counts",
        [2**63],
        r"^tensor 'a': 'statistic.counts\[0\]': expected int <= 9007199254740992",
    ),
    ("tensors/a/statistic/counts", [], "^tensor 'a': the counts do not fit the grid"),
    ("tensors/a/statistic/first", 7, "^tensor 'a': the grid does not follow"),
    ("tensors/a/runs/count", 0, "^tensor 'a': 'runs.count': expected int >= 1"),
    ("tensors/a/runs/blocks", [], "^tensor 'a': the blocks do not fit the count"),
    ("tensors/a/runs/blocks/0", [0, 2.0, 1.0], "^tensor 'a': the lower end of a block is above"),
    ("tensors/a/runs/blocks/0", [5, 1.0, 1.0], "^tensor 'a': the blocks must ascend"),
    ("tensors/a/runs/ends/shape", [1, 2], r"^tensor 'a': 'ends' must be of shape \(2,\)"),
    ("tensors/a/runs/ends/digits/0/1", [0, 0], "^tensor 'a': digits of power .* are out of range"),
    ("tensors/a/runs/ends/digits/0/1", [1 << 31, 0], "^tensor 'a': digits of power .* are out of range"),
    ("tensors/a/runs/ends/digits/0/1", [-(1 << 31) - 1, 0], "^tensor 'a': digits of power .* are out of range"),
    ("tensors/a/runs/ends/digits/0/1", [1], r"^tensor 'a': 1 digits do not fit the shape"),
    ("tensors/a/runs/ends/digits/0/0", 99, "^tensor 'a': the powers of the digits must ascend"),
    ("tensors/a/runs/ends/digits", [[99, [1, 1]]], "^tensor 'a': a power is out of range"),
    ("tensors/a/channels/lo", [3e38, 3e38], "^tensor 'a': the channels' extremes do not fit"),
    ("tensors/a/channels/lo", [1], "^tensor 'a': the channels' extremes do not fit"),
    ("tensors/a/channels/count", 2**70, "expected int <= 9007199254740992"),
    ("tensors/a/broken", [0, "s"], "^tensor 'a': both 'broken' and 'statistic'"),
    ('tensors/c"\n/broken', [0], "'broken': expected array of at least length 2, got 1"),
    ("inputs/x/powers/shape", [3], "^input 'x': 2 digits do not fit the shape"),
    ("inputs/x/powers/digits/0/1/1", -5, None),
    ("feeds/e", [0, "s", 0], r"^feed 'e': '\[2\]': expected int >= 1"),
    ("feeds/e", [-1, "s", 1], r"^feed 'e': '\[0\]': expected int >= 0"),
]


@pytest.mark.parametrize(("path", "value", "problem"), IMPOSSIBLE)
def test_impossible_records_are_refused(path: str, value: object, problem: str | None) -> None:
    row = change(json.loads(text(observations_to_json(observed()))), path, value)
    if problem is None:  # nothing contradicts it
        observations_from_json(row)
    else:
        with pytest.raises(RequantError, match=problem):
            observations_from_json(row)
