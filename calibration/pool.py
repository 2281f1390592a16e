"""Pieces of work on an executor: a few in flight, results as they come, what breaks is done again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeAlias, TypeVar

from .. import RequantError
from .pieces import Piece

ATTEMPTS = 3
"""How often a piece of work is begun before its failure is the user's: a worker can die for reasons of its own."""
T = TypeVar("T")
Results: TypeAlias = Iterator[tuple[tuple[int, ...], T]]
"""The numbers of some batches, and what came of them; each batch once."""


@contextmanager
def run_all(
    pieces: Iterable[Piece[T]], executor: Executor | Callable[[], Executor], workers: int
) -> Iterator[Results[T]]:
    """Run pieces of work, in no order; those in flight when this is left are waited for, and count for nothing.

    A piece whose worker dies is begun again: it counts when it is done, once. An executor that breaks by that is made
    anew where it is given as a function; one that is given as such is left as it is, and stays open.

    Args:
        pieces: The work.
        executor: An executor, or a function that makes one.
        workers: How many pieces run at a time; one more waits.

    Raises:
        RequantError: A piece failed, or it failed `ATTEMPTS` times for another reason than the request.
    """
    pool: _Pool[T] = _Pool(executor)
    try:
        yield _results(iter(pieces), pool, workers + 1)
    finally:
        pool.close()


class _Pool(Generic[T]):
    """An executor, or what makes one, and the work that it has."""

    def __init__(self, executor: Executor | Callable[[], Executor]) -> None:
        self._make = None if isinstance(executor, Executor) else executor
        self._executor = executor if isinstance(executor, Executor) else executor()
        self.threads = isinstance(self._executor, ThreadPoolExecutor)  # which do not die
        self.flying: dict[Future[T], tuple[Piece[T], int]] = {}

    def submit(self, piece: Piece[T], attempt: int) -> None:
        """Begin a piece of work."""
        try:
            future = self._executor.submit(piece.work)
        except BrokenExecutor:
            self.renew()
            future = self._executor.submit(piece.work)
        self.flying[future] = (piece, attempt)

    def renew(self) -> None:
        """Make another executor in place of a broken one.

        Raises:
            RequantError: There is no saying how.
        """
        if self._make is None:
            raise RequantError("the executor is broken: a worker died; give a function that makes one instead")
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = self._make()

    def close(self) -> None:
        """Drop what has not begun and wait for the rest."""
        for future in self.flying:
            future.cancel()
        if self._make is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        else:
            wait(future for future in self.flying if not future.cancelled())


def _results(pieces: Iterator[Piece[T]], pool: _Pool[T], most: int) -> Results[T]:
    """Keep the executor busy and yield what is done."""
    again: deque[tuple[Piece[T], int]] = deque()
    while True:
        while len(pool.flying) < most:
            if again:
                pool.submit(*again.popleft())
            elif (piece := next(pieces, None)) is not None:
                pool.submit(piece, 1)
            else:
                break
        piece = None  # its samples
        if not pool.flying:
            return
        done, _ = wait(pool.flying, return_when=FIRST_COMPLETED)
        for future in done:
            begun, attempt = pool.flying.pop(future)
            try:
                seen = future.result()
            except RequantError:
                raise
            except Exception as error:  # whatever an executor raises when a worker dies or cannot be reached
                if pool.threads:
                    raise
                if attempt == ATTEMPTS:
                    message = " ".join(f"{type(error).__name__}: {error}".split())
                    if isinstance(error, BrokenExecutor):
                        message += " (a program that starts processes needs: if __name__ == '__main__')"
                    raise RequantError(f"a worker failed {ATTEMPTS} times: {message}") from error
                again.append((begun, attempt + 1))
            else:
                yield begun.units, seen
