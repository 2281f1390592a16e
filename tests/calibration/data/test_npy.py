"""Headers of arrays, read by several threads."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from requant.calibration.data.npy import Stored, stored_array

THREADS, HEADERS = 4, 400


@pytest.fixture
def switches() -> Iterator[None]:
    """Let threads take turns inside a parse: garbage is looked for often, and each time code in Python runs."""

    def work(phase: str, info: dict[str, int]) -> None:
        sum(range(50))

    interval, often = sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(work)
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*often)
    gc.callbacks.remove(work)


@pytest.mark.usefixtures("switches")
def test_threads_read_headers_at_the_same_time() -> None:
    array = np.zeros((1, 3, 8, 8), np.float32)
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    content = stream.getvalue()

    def headers(_: int) -> list[Stored]:
        return [stored_array(io.BytesIO(content), len(content)) for _ in range(HEADERS)]

    with ThreadPoolExecutor(THREADS) as pool:
        found = [each for headers_of_one in pool.map(headers, range(THREADS)) for each in headers_of_one]
    assert len(found) == THREADS * HEADERS
    assert {(each.shape, each.dtype) for each in found} == {(array.shape, array.dtype)}
