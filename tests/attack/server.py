"""Run thousands of commands, each in a process of its own that starts in milliseconds.

This process imports everything once and opens no session. A process for each case forks from it, writes the files of
the case, and forks the commands, which call the entry point of the installed package. Each command has limits of CPU
and address space, a session of its own, and its own home, temporary and current folder.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import pkgutil
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .case import LOOKING, Case, Command, Outcome, Ran
from .judge import CODES, left, listing, printed

Main = Callable[[], Any]

WALL_SECONDS = 240
IDLE_SECONDS = 15
"""A command that uses no CPU for so long waits for something that never comes."""
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
FOLDERS = ("work", "home", "tmp", "out")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a command may use.

    Attributes:
        cpu: Seconds; the kernel ends a process that uses more.
        address: Bytes of address space; an allocation beyond fails.
        resident: MB in memory; more is a failure of the contract.
        file: The largest file that a command can write, in bytes; -1 for any. Writing more fails as on a full disk.
        environment: Variables that replace the usual ones; None removes one.
    """

    cpu: int = 60
    address: int = 4 * 2**30
    resident: int = 1024
    file: int = -1
    environment: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Server:
    """How cases are run.

    Attributes:
        root: The folder of the cases.
        jobs: Cases at a time.
        keep: Whether the folders of failed cases stay.
        keep_all: Whether all folders stay.
        limits: What a command may use.
    """

    root: Path
    jobs: int = 2
    keep: bool = False
    keep_all: bool = False
    limits: Limits = Limits()

    def tidy(self, folder: Path, outcome: Outcome) -> Outcome:
        """Remove the folder of a case unless it stays, and return the outcome."""
        if not (self.keep_all or (self.keep and outcome.problems)):
            shutil.rmtree(folder, ignore_errors=True)
        return outcome


@cache
def preload() -> Main:
    """Import the package with all its modules, and return the function of the console script ``requant``."""
    (script,) = entry_points(group="console_scripts", name="requant")
    main: Main = script.load()
    for package in ("requant.quantize", "requant.calibration", "requant.transforms"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith(("__main__", "pytest_plugin", ".build")):
                importlib.import_module(module.name)
    importlib.import_module("PIL.Image")
    importlib.import_module("onnxruntime")
    return main


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "VIRTUAL_ENV") if name in os.environ}
    own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "COLUMNS": "120", "LC_ALL": "C.UTF-8"}
    return {**kept, **own, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _become(command: Command, folder: Path, main: Main, limits: Limits) -> None:
    """Run a command in this process, as the console script does, and end the process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if this runs in the background of a shell
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / "out" / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder / "work")
    os.environ.clear()
    os.environ.update(_environment(folder))
    for name, value in limits.environment:
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    tempfile.tempdir = None
    sys.dont_write_bytecode = True  # the variable is read when Python starts
    sys.argv[:] = ["requant", *command]
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "rw"[n > 0], encoding="utf-8") for n in range(3))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc,assignment]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu, limits.cpu + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file, limits.file))
    resource.setrlimit(resource.RLIMIT_AS, (limits.address, limits.address))
    code = 0
    try:
        sys.exit(main())
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for text in (sys.stdout, sys.stderr):
        with suppress(Exception):
            text.flush()
    os._exit(code & 255)


def _below(pid: int) -> dict[int, float]:
    """Return the seconds of CPU of a living process and of all processes below it, by process id.

    A process that waits for the CPU counts as one that uses it now: a busy machine is no hang.
    """
    parents, seconds = {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, IndexError):
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            parents[int(entry)] = int(fields[1])
            seconds[int(entry)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            seconds[int(entry)] += time.monotonic() if fields[0] in "RD" else 0.0
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found and child not in found}:
        found |= more
    return {each: seconds.get(each, 0.0) for each in found}


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait(pid: int) -> tuple[int, resource.struct_rusage, str]:
    """Wait for a command; return its status, what it used, and why it was killed."""
    began, pause, problem = time.monotonic(), 0.002, ""
    used, since = 0.0, began
    while True:
        ended, status, usage_ = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage_, problem
        time.sleep(pause)
        pause = min(0.05, pause * 1.3)
        now = time.monotonic()
        if problem or now - since < IDLE_SECONDS / 3:
            continue
        living = _below(pid)
        spent = sum(living.values())
        if abs(spent - used) > 0.02:
            used, since = spent, now
        if now - since > IDLE_SECONDS or now - began > WALL_SECONDS:
            problem = f"hang: {now - began:.0f} s, no CPU for {now - since:.0f} s"
            _kill(living)


def orphans() -> bool:
    """Reap the processes that a command left, which are now children of this one; return whether one still ran."""
    until, left_over = time.monotonic() + 5.0, False
    with suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
            if time.monotonic() > until:
                left_over = True
                _kill(_below(os.getpid()).keys() - {os.getpid()})
    return left_over


def fresh(folder: Path) -> None:
    """Make the empty folders of a case."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)


def start(command: Command, folder: Path, main: Main, limits: Limits) -> int:
    """Start a command in the folder of its case, and return its process id."""
    pid = os.fork()
    if not pid:
        try:
            _become(command, folder, main, limits)
        finally:
            os._exit(70)
    return pid


def run_command(command: Command, folder: Path, main: Main, limits: Limits) -> Ran:
    """Run a command in the folder of its case, and judge it."""
    before = listing(folder)
    pid = start(command, folder, main, limits)
    status, used, problem = wait(pid)
    code = os.waitstatus_to_exitcode(status)
    cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    problems = [problem] if problem else []
    if orphans():
        problems.append("process left: a child still ran after the command")
    if cpu > limits.cpu - 2:
        problems.append(f"cpu: {cpu:.0f} s")
    elif code < 0 and not problem:
        problems.append(f"signal: {signal.Signals(-code).name}")
    elif code not in CODES and not problem:
        problems.append(f"exit code: {code}")
    out, err = ((folder / "out" / name).read_bytes() for name in ("stdout", "stderr"))
    problems += printed(out, err, code)
    problems += left(before, listing(folder), code, folder)
    problems += [f"memory: {peak:.0f} MB"] if peak > limits.resident else []
    return Ran(command, code, round(cpu, 2), round(peak), tuple(problems))


def _limits(server: Server, case: Case, command: Command) -> Limits:
    """Return what a command may use: the model of a hungry case may ask for all memory, where it is run."""
    if case.hungry and command[0] not in LOOKING:
        return replace(server.limits, resident=server.limits.address // 2**20)
    return server.limits


def run_case(case: Case, server: Server, main: Main) -> Outcome:
    """Write a case, run its commands, and remove its folder unless the server keeps it."""
    folder = server.root / f"{case.family}-{case.kind}-{case.number}"
    fresh(folder)
    ran: list[Ran] = []
    fault = ""
    try:
        for command in case.write(case.random, folder / "work"):
            ran.append(run_command(command, folder, main, _limits(server, case, command)))
            if server.keep_all:
                shutil.copytree(folder / "out", folder / f"out-{len(ran)}")
    except Exception:  # noqa: BLE001 - a fault of the harness is reported, and the other cases go on
        fault = brief()
    return server.tidy(folder, Outcome(case.family, case.kind, case.number, tuple(ran), fault))


def brief() -> str:
    """Return the end of the traceback of the current exception, on one line."""
    return " ".join(traceback.format_exc().split())[-400:]


def _in_process(case: Case, server: Server, main: Main, pipe: int) -> None:
    """Run a case in this process, write its outcome to a pipe, and end the process."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (server.limits.address, resource.RLIM_INFINITY))
    outcome = (case.run or run_case)(case, server, main)
    data = json.dumps(asdict(outcome)).encode("utf-8", errors="replace")
    while data:
        data = data[os.write(pipe, data) :]


def _outcome(data: bytes, case: Case) -> Outcome:
    if not data:
        return Outcome(case.family, case.kind, case.number, fault="the process of the case ended")
    found = json.loads(data)
    ran = tuple(Ran(**{**r, "command": tuple(r["command"]), "problems": tuple(r["problems"])}) for r in found["ran"])
    return Outcome(found["family"], found["kind"], found["number"], ran, found["fault"])


def run_all(cases: Iterable[Case], server: Server) -> Iterator[Outcome]:
    """Run cases, some at a time, and yield their outcomes in the order in which they end."""
    main, waiting, selector = preload(), iter(cases), selectors.DefaultSelector()
    running: dict[int, tuple[int, Case, list[bytes]]] = {}

    def start(case: Case) -> None:
        source, sink = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(source)
                _in_process(case, server, main, sink)
            finally:
                os._exit(0)
        os.close(sink)
        running[source] = (pid, case, [])
        selector.register(source, selectors.EVENT_READ)

    for case in waiting:
        start(case)
        if len(running) < server.jobs:
            continue
        yield from _ended(selector, running, least=1)
    while running:
        yield from _ended(selector, running, least=1)


def _ended(selector: Any, running: dict[int, tuple[int, Case, list[bytes]]], least: int) -> Iterator[Outcome]:
    """Read from the pipes until some cases have ended."""
    count = 0
    while count < least:
        for key, _ in selector.select():
            pid, case, parts = running[key.fd]
            data = os.read(key.fd, 2**16)
            parts.append(data)
            if not data:
                selector.unregister(key.fd)
                os.close(key.fd)
                os.waitpid(pid, 0)
                del running[key.fd]
                count += 1
                yield _outcome(b"".join(parts), case)
