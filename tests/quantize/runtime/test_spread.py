"""Calls over samples keep their order, whether they run in threads or not, and read only a few samples ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from requant.quantize.runtime import spread as module
from requant.quantize.runtime.spread import MOST, TRIED, spread


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine have four CPUs."""
    monkeypatch.setattr(module, "cpus", lambda: 4)


def slow(item: int) -> tuple[int, str]:
    """Sleep, the longer the smaller the item, so that later items would be ready first."""
    time.sleep(0.002 + 0.01 / (1 + item))
    return item, threading.current_thread().name


def test_long_calls_run_in_threads_and_keep_their_order() -> None:
    results = list(spread(slow, range(20)))
    assert [item for item, _ in results] == list(range(20))
    names = [name for _, name in results]
    here = threading.current_thread().name
    assert names[:TRIED] == [here] * TRIED
    assert here not in names[TRIED:]
    assert 1 < len(set(names[TRIED:])) <= MOST


def test_short_calls_stay_in_this_thread() -> None:
    names = list(spread(lambda _: threading.current_thread().name, range(20)))
    assert names == [threading.current_thread().name] * 20


@pytest.mark.parametrize("count", [0, 1, TRIED, TRIED + 1])
def test_few_items(count: int) -> None:
    assert [item for item, _ in spread(slow, range(count))] == list(range(count))


def test_items_are_read_a_few_ahead_only() -> None:
    read = 0

    def items() -> Iterator[int]:
        nonlocal read
        for item in range(100):
            read += 1
            yield item

    for done, _ in enumerate(spread(slow, items()), 1):
        assert read <= done + 2 * MOST + 1


def test_an_error_ends_the_calls() -> None:
    def fail(item: int) -> int:
        time.sleep(0.002)
        if item == 7:
            raise ValueError("7")
        return item

    results = spread(fail, range(1000))
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="7"):
        next(results)
