"""Executors by name: threads, processes, and a Dask cluster."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

from .. import RequantError, UnknownNameError
from .execution import cpus

if TYPE_CHECKING:
    from distributed import Client

EXECUTORS = ("threads", "processes", "dask")
CONNECT_SECONDS = 10.0
"""How long a scheduler may take to answer."""


@contextmanager
def executor_named(
    name: str, workers: int | None = None, scheduler: str | None = None
) -> Iterator[Executor | Callable[[], Executor] | None]:
    """Give an executor for `Execution`, and close it afterwards.

    Args:
        name: ``threads``, ``processes`` or ``dask``.
        workers: How many; None for one per CPU. A cluster that runs already has its own.
        scheduler: Address of a Dask scheduler, ``tcp://host:8786``; None for a cluster here, gone afterwards.

    Raises:
        UnknownNameError: There is no such executor.
        RequantError: A scheduler is given to another executor, or cannot be reached, or Dask is not installed.
    """
    if name not in EXECUTORS:
        raise UnknownNameError("executor", name, EXECUTORS)
    if scheduler is not None and name != "dask":
        raise RequantError(f"a scheduler is Dask's, and the executor is {name}; choose the executor dask")
    if name == "threads":
        yield None
    elif name == "processes":
        # a fork would copy the runtime's threads in whatever state they are
        yield partial(ProcessPoolExecutor, workers or cpus(), mp_context=get_context("spawn"))
    else:
        with _client(workers, scheduler) as client:
            yield client.get_executor(pure=False)  # a piece that failed is begun again, not looked up


@contextmanager
def _deaf() -> Iterator[None]:
    """Start processes that do not hear a Ctrl-C at the terminal: this process ends them, and they would print."""
    if threading.current_thread() is not threading.main_thread():  # no other one may say what becomes of signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _client(workers: int | None, scheduler: str | None) -> Iterator[Client]:
    """Connect to a cluster, or start one on this machine."""
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise RequantError("the executor dask needs Dask: pip install 'requant[dask]'") from error
    if scheduler is None:
        with _deaf():
            cluster = LocalCluster(n_workers=workers or cpus(), threads_per_worker=1, dashboard_address="127.0.0.1:0")
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
    """Return how many pieces of work an executor does at a time, where it can be told."""
    client = getattr(executor, "_client", None)
    if client is not None:  # Dask's
        return sum(client.ncores().values()) or None
    workers = getattr(executor, "_max_workers", None)
    return workers if isinstance(workers, int) else None
