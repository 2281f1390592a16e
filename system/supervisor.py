"""Run a command in a child process, and turn its death into one line and an exit code.

The runtime may crash, and a crash ends the process. The parent only waits: it passes signals on, and when the child has
died it says so, removes what the child left, and ends with the child's exit code.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import BinaryIO

from . import ending, notes, stderr
from .printable import sentence

COMPLETE = "_REQUANT_COMPLETE"
"""The variable with which a shell asks for completions."""
HELP = frozenset({"-h", "--help"})
"""Help loads no model and cannot crash: it is printed sooner without a child process."""
NOTICE = 10.0
"""Seconds after Ctrl-C until the user is told how to end a command that has not ended yet: a run of the runtime may."""
GRACE = 8.0
"""Seconds that a command has to end after SIGTERM or SIGHUP; container runtimes give 10."""
CRASH = 2
"""The exit code after a crash."""
CAUSES = {
    "SIGKILL": "killed, probably by the kernel because memory ran out; choose fewer --workers or samples",
    "SIGBUS": "a mapped file has shrunk, or the disk is full",
    "SIGFPE": "an integer division that has no result",
    "SIGILL": "a library has an instruction that this CPU does not have",
    "SIGXCPU": "the limit of CPU time is reached",
}
TRACE = re.compile(r'^  File "(?P<file>[^"]+)", line \d+ in (?P<function>\w+)', re.MULTILINE)
"""A line of the stack that faulthandler writes."""


def supervised(command: Callable[[], object]) -> None:
    """Run a command in a child process and end with its exit code; never returns.

    Where there is no fork, for completions of a shell, and for help, the command runs in this process.

    Args:
        command: The command. It ends with SystemExit.
    """
    stderr.prepare_streams()
    if not hasattr(os, "fork") or COMPLETE in os.environ or HELP.intersection(sys.argv[1:]):
        ending.interrupt_on_signals()
        _run(command)
    notes.share()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would let nobody wait for a child
    parent, heeded = os.getpid(), ending.heeded()
    with _memory_file() as faults, _memory_file() as printed:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [*heeded, signal.SIGTSTP])  # until `_Watch` handles them
        child = os.fork()
        if child == 0:
            faulthandler.enable(faults)
            stderr.keep_in(printed)
            ending.die_with(parent)
            ending.interrupt_on_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _run(command)
        watch = _Watch(child, heeded)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sys.exit(watch.exit_code(watch.wait(), faults, printed))


def _memory_file() -> BinaryIO:
    """Return a file in memory, or on disk where there is none."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("requant"), "w+b")
    from tempfile import TemporaryFile

    return TemporaryFile()


def _run(command: Callable[[], object]) -> None:
    """Run a command in this process; never returns."""
    try:
        command()
        code: object = 0
    except SystemExit as end:
        code = ending.BROKEN_PIPE if isinstance(end.__context__, BrokenPipeError) else end.code  # of rich
    except KeyboardInterrupt:  # before the command has begun
        _say(ending.interruption(ending.interrupted_by()))
        code = 128 + ending.interrupted_by()
    except OSError as error:  # --help to a full disk
        _say(f"{error.filename or 'standard output'}: {error.strerror}")
        code = CRASH
    except BaseException:  # a fault of this package: the interpreter prints it, if no reader has closed stderr
        notes.note(code=1)
        raise
    ending.ignore_signals()
    faulthandler.disable()
    code = code if _flushed(told=code == CRASH) or code else CRASH
    notes.note(code=code if isinstance(code, int) else int(code is not None))
    sys.exit(code)  # type: ignore[arg-type]


def _say(text: str) -> None:
    """Print a line on stderr."""
    print(sentence(f"requant: {text}"), file=sys.stderr, flush=True)


def _flushed(*, told: bool) -> bool:
    """Return whether all output could be written; what cannot be written is dropped, or Python reports it at exit.

    Args:
        told: Whether the command has told an error: a full disk may have been it, and then the rest cannot be written.
    """
    try:
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return True
        if not told:
            _say(f"standard output: {error.strerror}{notes.also_written()}")
        return False
    return True


class _Watch:
    """The parent of a command: passes signals on, and says how the child ended."""

    def __init__(self, child: int, heeded: list[int]) -> None:
        """Handle the signals of this process from here on."""
        self.child = child
        self.asked: list[tuple[int, float]] = []
        self._signals, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)  # a signal without a handler writes no byte
        for each in heeded:
            signal.signal(each, self._end)
        signal.signal(signal.SIGALRM, self._alarm)
        signal.signal(signal.SIGTSTP, self._stop)
        signal.signal(signal.SIGCONT, self._pass_on)

    def wait(self) -> int:
        """Return the child's exit code, or minus the signal that killed it, once it has ended.

        A plain `os.waitpid` would miss a signal that comes just before it blocks: Python runs a handler only between
        two instructions of its own. Each signal, that of the child's end too, puts a byte into a pipe, which waits.
        """
        while True:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            os.read(self._signals, 1)

    def _end(self, signum: int, frame: FrameType | None) -> None:
        """Ask the child to end. SIGTERM, SIGHUP and a second Ctrl-C set a time limit, a further one kills it."""
        now = time.monotonic()
        if self.asked and now - self.asked[-1][1] <= ending.TOGETHER:
            return
        self.asked.append((signum, now))
        if len(self.asked) > 2:
            self._kill(signum, frame)
        self._pass_on(signum, frame)
        patient = signum == signal.SIGINT and len(self.asked) == 1
        signal.setitimer(signal.ITIMER_REAL, NOTICE if patient else GRACE)

    def _alarm(self, signum: int, frame: FrameType | None) -> None:
        """Tell that the child has not ended after one Ctrl-C; kill it if its time limit is over."""
        if len(self.asked) == 1 and self.asked[0][0] == signal.SIGINT:
            _say("interrupted, and waits for the step that runs; Ctrl-C again ends it")
        else:
            self._kill(signum, frame)

    def _kill(self, signum: int, frame: FrameType | None) -> None:
        self._pass_on(signal.SIGKILL, frame)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._pass_on(signum, frame)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(self.child, signum)

    def exit_code(self, code: int, faults: BinaryIO, printed: BinaryIO) -> int:
        """Return the exit code of the command; after a crash, say what happened and remove what is left.

        Args:
            code: The child's exit code, or minus the signal that killed it.
            faults: The file to which the child's fault handler wrote.
            printed: The file for what libraries wrote to stderr.
        """
        for each in (signal.SIGALRM, signal.SIGTSTP, signal.SIGCONT):
            signal.signal(each, signal.SIG_IGN)
        ending.ignore_signals()
        told = notes.read()
        if code >= 0 and told.code is not None:
            return code
        from . import scratch

        for folder in told.folders:
            scratch.sweep(folder)
        if told.code is not None:  # the command was done; its process crashed while it ended
            return told.code
        asked = self.asked[0][0] if self.asked else -code if -code in ending.ENDING else None
        if asked is not None:
            _say(f"{ending.interruption(asked)}{notes.also_written(told)}")
            return 128 + asked
        if code >= 0:  # os._exit, which no code of this package calls
            _say(f"ended by the code of a reader, a metric or a plug-in (exit code {code}){notes.also_written(told)}")
            return CRASH
        faults.seek(0)
        _say(_crash(-code, told, faults.read().decode(errors="replace"), stderr.last_line(printed)))
        return CRASH


def _crash(signum: int, told: notes.Notes, trace: str, printed: str) -> str:
    """Return one line about a crash: the library, the signal, its cause, the stage, the model, and what to do."""
    try:
        name = signal.Signals(signum).name
    except ValueError:  # a real-time signal
        name = f"signal {signum}"
    cause = f" ({found})" if (found := printed or CAUSES.get(name)) else ""
    place = f" in stage {told.stage!r}" if told.stage else ""
    about = f" with {told.model!r}" if told.model else ""
    advice = "" if name == "SIGKILL" else "; the model or its data make it crash; try another version of it"
    return f"{_library(trace)} crashed: {name}{cause}{place}{about}{advice}{notes.also_written(told)}"


def _library(trace: str) -> str:
    """Return the name of the library that crashed, from the stack of the fault handler."""
    current = trace.partition("Current thread")[2] or trace
    found = TRACE.search(current)
    if found is None:
        return "the process"
    parts = found["file"].replace("\\", "/").rpartition("/site-packages/")
    return parts[2].partition("/")[0] if parts[1] else "the process"
