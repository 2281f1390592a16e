"""Samples stay in memory after they are read once, up to a limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.calibration.data.kept import counted, kept
from requant.calibration.data.samples import Picked, Rows, Sample

BYTES = 40


@dataclass
class Data:
    """Rows that count how often each position is read; like a generator, they read all positions before it too."""

    count: int
    known: bool = True
    reads: list[int] = field(default_factory=list)

    def rows(self) -> Rows:
        return Rows("data", self.count if self.known else None, self.read)

    def read(self, picked: Picked) -> Iterator[Sample]:
        for position in range(self.count):
            self.reads.append(position)
            if picked is None or position in picked:
                yield Sample({"x": np.full(10, position, np.float32)}, None, f"sample {position}")


def places(rows: Rows, picked: Picked) -> list[int]:
    return [int(sample.feed["x"][0]) for sample in rows.read(picked)]


picks = st.one_of(st.none(), st.sets(st.integers(0, 11)).map(lambda found: tuple(sorted(found))))


@given(st.integers(0, 9), st.booleans(), st.lists(picks, max_size=5), st.integers(0, 12))
def test_the_same_samples_come_as_without_a_memory(count: int, known: bool, reads: list[Picked], room: int) -> None:
    plain, rows = Data(count, known).rows(), kept(Data(count, known).rows(), room * BYTES)
    for picked in reads:
        inside = picked if picked is None else tuple(position for position in picked if position < count)
        assert places(rows, picked) == places(plain, inside)


@given(st.integers(0, 9), st.booleans(), st.integers(0, 12))
def test_samples_are_counted_and_those_that_are_kept_are_not_read_again(count: int, known: bool, room: int) -> None:
    data, told = Data(count, known), list[int]()
    rows, size = counted(kept(data.rows(), room * BYTES), told.append)
    assert rows.length == count
    assert size == (0 if known else count * BYTES)
    assert told == ([] if known else [*range(1, count + 1)])
    read = len(data.reads)
    assert places(rows, None) == [*range(count)]
    if not known and count <= room:
        assert len(data.reads) == read == count


@pytest.mark.parametrize("known", [True, False])
def test_all_is_read_once(known: bool) -> None:
    data = Data(6, known)
    rows = kept(data.rows())
    for picked in (None, (1, 4), None, range(6), range(9)):
        assert places(rows, picked) == [p for p in picked or range(6) if p < 6]
    assert data.reads == [*range(6)]


def test_the_end_is_found_by_a_pick_behind_it() -> None:
    data = Data(3, known=False)
    rows = kept(data.rows())
    assert places(rows, range(5)) == [0, 1, 2]
    assert places(rows, None) == [0, 1, 2]
    assert data.reads == [0, 1, 2]


def test_data_beyond_the_limit_are_read_each_time() -> None:
    data = Data(6)
    rows = kept(data.rows(), 5 * BYTES)
    assert places(rows, None) == places(rows, None) == [*range(6)]
    assert places(rows, (0,)) == [0]
    assert data.reads == [*range(6), *range(6), 0]


def test_what_was_left_early_is_read_again() -> None:
    data = Data(6)
    rows = kept(data.rows())
    for _ in range(3):  # the first samples are known
        assert next(rows.read(None)).where == "sample 0"
    assert data.reads == [0]
    assert places(rows, None) == [*range(6)]
    assert places(rows, (0, 5)) == [0, 5]
    assert data.reads == [0, *range(6)]
