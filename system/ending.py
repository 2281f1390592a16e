"""How a process ends: signals that ask it to end are Ctrl-C, and a child dies with its parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that ask a command to end."""
TOGETHER = 0.5
"""Seconds within which several of them are one: a terminal and the parent send the same signal."""
BROKEN_PIPE = 128 + 13
"""The exit code when the reader of the output has ended, as in ``requant ops | head -1``."""
PR_SET_PDEATHSIG = 1  # of linux/prctl.h

_received: list[tuple[int, float]] = []
_held: list[bool] = []


def interrupt_on_signals() -> None:
    """Let `ENDING` raise KeyboardInterrupt in this process; ignored signals stay ignored, as nohup has them."""
    for each in heeded():
        signal.signal(each, _interrupt)


def heeded() -> list[int]:
    """Return which of `ENDING` this process does not ignore."""
    return [each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN]


def ignore_signals() -> None:
    """Ignore `ENDING` from here on: the command has finished."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, once for signals that arrive together, and not in a block that `holds_interrupts`."""
    now = time.monotonic()
    if not _received or now - _received[-1][1] > TOGETHER:
        _received.append((signum, now))
        if not _held:
            raise KeyboardInterrupt


@contextmanager
def holds_interrupts() -> Iterator[None]:
    """Let `interrupt_on_signals` raise KeyboardInterrupt at the end of the block, not inside it.

    For calls into libraries that an interrupt would leave half done. Only the main thread is interrupted, so the block
    does nothing in others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = len(_received)
    _held.append(True)
    try:
        yield
    finally:
        _held.pop()
    if len(_received) > before and not _held:
        raise KeyboardInterrupt


def interrupted_by() -> int:
    """Return the signal that asked this process to end; SIGINT if there was none."""
    return _received[0][0] if _received else signal.SIGINT


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that an error is, or that was being handled when it was raised; None without one.

    A library that is interrupted halfway may fail when it is closed: an executor whose thread has not started yet
    raises RuntimeError, and the interrupt is only the context of that.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__ or seen.__context__
    return seen


def interruption(signum: int) -> str:
    """Return what happened, in words: ``"interrupted"``, ``"interrupted by SIGTERM"``."""
    return "interrupted" if signum == signal.SIGINT else f"interrupted by {signal.Signals(signum).name}"


def die_with(parent: int) -> None:
    """Let the kernel kill this process when `parent` dies, on Linux; elsewhere a thread looks once a second.

    Args:
        parent: The process that must be the parent now. If it is not, it is dead already.
    """
    if not _killed_by_kernel() and hasattr(os, "fork"):
        threading.Thread(target=_outlive, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _killed_by_kernel() -> bool:
    """Ask the kernel for SIGKILL when the parent dies, and return whether it will do so."""
    if sys.platform != "linux":
        return False
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def _outlive(parent: int) -> None:
    """End this process soon after its parent."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def begin_worker(parent: int) -> None:
    """Begin a process of a pool: it dies with its parent, which also answers Ctrl-C for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
