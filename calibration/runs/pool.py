"""Runs pieces of work on an executor, yields results as they arrive, and repeats failed pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeAlias, TypeVar

from ... import RequantError
from ...system.given import check_kind
from .pieces import Piece

ATTEMPTS = 3
"""How often a piece of work is tried before its failure is an error. A worker can die for external reasons."""
T = TypeVar("T")
Results: TypeAlias = Iterator[tuple[tuple[int, ...], T]]
"""The numbers of some batches and their result. Each batch occurs once."""


@contextmanager
def run_all(
    pieces: Iterable[Piece[T]], executor: Executor | Callable[[], Executor], workers: int
) -> Iterator[Results[T]]:
    """Run pieces of work in any order. On exit, pieces in flight are awaited and their results are dropped.

    A piece whose worker dies is repeated; its result counts once. A broken executor is replaced if `executor` is a
    function. An executor that is passed as an object stays open.

    Args:
        pieces: The work.
        executor: An executor, or a function that creates one.
        workers: The number of pieces that run at a time. One more piece waits.

    Raises:
        RequantError: A piece raised it, or a piece failed `ATTEMPTS` times with another error.
    """
    pool: _Pool[T] = _Pool(executor)
    try:
        yield _results(iter(pieces), pool, workers + 1)
    finally:
        pool.close()


class _Pool(Generic[T]):
    """An executor and its unfinished work."""

    def __init__(self, executor: Executor | Callable[[], Executor]) -> None:
        self._make = None if isinstance(executor, Executor) else executor
        self._executor = executor if isinstance(executor, Executor) else _made(executor)
        self.threads = isinstance(self._executor, ThreadPoolExecutor)  # threads do not die
        self.in_flight: dict[Future[T], tuple[Piece[T], int]] = {}

    def submit(self, piece: Piece[T], attempt: int) -> None:
        """Start a piece of work."""
        try:
            future = self._executor.submit(piece.work)
        except BrokenExecutor:
            self.renew()
            future = self._executor.submit(piece.work)
        self.in_flight[future] = (piece, attempt)

    def renew(self) -> None:
        """Replace a broken executor.

        Raises:
            RequantError: There is no function that creates an executor.
        """
        if self._make is None:
            raise RequantError("the executor is broken: a worker died; pass a function that creates executors")
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = _made(self._make)

    def close(self) -> None:
        """Cancel the pieces that have not started and wait for the others."""
        for future in self.in_flight:
            future.cancel()
        if self._make is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        else:
            wait(future for future in self.in_flight if not future.cancelled())


def _made(make: Callable[[], Executor]) -> Executor:
    """Return an executor that a function of the user makes.

    Raises:
        RequantError: It makes something else.
    """
    executor = make()
    check_kind(executor, Executor, "the function that makes executors must return a concurrent.futures.Executor")
    return executor


def _results(pieces: Iterator[Piece[T]], pool: _Pool[T], most: int) -> Results[T]:
    """Keep the executor busy and yield finished results."""
    again: deque[tuple[Piece[T], int]] = deque()
    while True:
        while len(pool.in_flight) < most:
            if again:
                pool.submit(*again.popleft())
            elif (piece := next(pieces, None)) is not None:
                pool.submit(piece, 1)
            else:
                break
        piece = None  # free its samples
        if not pool.in_flight:
            return
        done, _ = wait(pool.in_flight, return_when=FIRST_COMPLETED)
        for future in done:
            piece_done, attempt = pool.in_flight.pop(future)
            try:
                result = future.result()
            except RequantError:
                raise
            except Exception as error:  # executors raise any type when a worker dies or cannot be reached
                if pool.threads:
                    raise
                if attempt == ATTEMPTS:
                    message = " ".join(f"{type(error).__name__}: {error}".split())
                    if isinstance(error, BrokenExecutor):
                        message += " (a program that starts processes needs: if __name__ == '__main__')"
                    raise RequantError(f"a worker failed {ATTEMPTS} times: {message}") from error
                again.append((piece_done, attempt + 1))
            else:
                yield piece_done.numbers, result
