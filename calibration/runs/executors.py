"""Executors by name: threads, processes and a Dask cluster."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from ... import RequantError, UnknownNameError
from ...system.ending import begin_worker, holds_interrupts
from ...system.imports import safe_children
from ..execution import cpus

if TYPE_CHECKING:
    from distributed import Client

EXECUTORS = ("threads", "processes", "dask")
CONNECT_SECONDS = 10.0
"""The timeout for the connection to a scheduler."""


@contextmanager
def executor_named(
    name: str, workers: int | None = None, scheduler: str | None = None
) -> Iterator[Executor | Callable[[], Executor] | None]:
    """Yield an executor for `Execution`, and close it at the end of the block.

    Args:
        name: ``threads``, ``processes`` or ``dask``.
        workers: The number of workers; None for one per CPU. A running cluster has its own number.
        scheduler: The address of a Dask scheduler, ``tcp://host:8786``; None starts a temporary cluster here.

    Raises:
        UnknownNameError: There is no such executor.
        RequantError: Another executor than dask gets a scheduler, the scheduler cannot be reached, or Dask is not
            installed.
    """
    if name not in EXECUTORS:
        raise UnknownNameError("executor", name, EXECUTORS)
    if scheduler is not None and name != "dask":
        raise RequantError(f"only the executor dask has a scheduler, and the executor is {name}; choose dask")
    if name == "threads":
        yield None
    elif name == "processes":
        # a fork would copy the runtime's threads in an undefined state
        yield partial(
            _ProcessPool,
            workers or cpus(),
            mp_context=get_context("spawn"),
            initializer=begin_worker,
            initargs=(os.getpid(),),
        )
    else:
        with _client(workers, scheduler) as client:
            yield client.get_executor(pure=False)  # runs a failed piece again instead of returning its stored result


class _ProcessPool(ProcessPoolExecutor):
    """A pool whose processes import nothing from the current folder.

    They start while work is submitted; a process that tracks semaphores starts with the pool.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with safe_children():
            super().__init__(*args, **kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a call. An interrupt waits until the threads and processes that this may start can be ended."""
        with holds_interrupts(), safe_children():
            return super().submit(*args, **kwargs)


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, because this process ends them and their tracebacks would be noise."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _client(workers: int | None, scheduler: str | None) -> Iterator[Client]:
    """Connect to a cluster, or start a cluster on this machine."""
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise RequantError("the executor dask needs Dask: pip install 'requant[dask]'") from error
    if scheduler is None:
        with safe_children():  # to the end: a worker that dies is started again
            with _ignoring_interrupts():
                cluster = LocalCluster(
                    n_workers=workers or cpus(), threads_per_worker=1, dashboard_address="127.0.0.1:0"
                )
            with cluster, Client(cluster) as client:
                yield client
        return
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise RequantError(f"{scheduler}: no Dask scheduler answers: {' '.join(str(error).split())}") from error
    with client:
        yield client


def width(executor: Executor | Callable[[], Executor] | None) -> int | None:
    """Return how many pieces of work an executor runs in parallel; None if unknown."""
    client = getattr(executor, "_client", None)
    if client is not None:  # Dask's
        return sum(client.ncores().values()) or None
    workers = getattr(executor, "_max_workers", None)
    return workers if isinstance(workers, int) else None
