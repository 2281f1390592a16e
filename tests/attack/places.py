"""Valid input in bad places: full disks, read-only folders, no home, and two runs at once with one output."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from .case import Case, Command, Family, Outcome, Ran
from .files import CALIBRATE, DATA, QUANTIZE, TEMPLATES, prepare
from .judge import CODES, left, listing, printed
from .server import Limits, Main, Server, brief, fresh, orphans, run_command, start, wait

NEW_MOUNTS, PRIVATE, READ_ONLY, REMOUNT = 0x20000, 0x44000, 1, 32  # <sched.h>, <sys/mount.h>
COMMANDS: tuple[Command, ...] = (
    (*QUANTIZE, *DATA, "--place", "estimated"),
    (*QUANTIZE, *DATA, "--place", "estimated", "--external-data"),
    (*QUANTIZE, *DATA, "--place", "estimated", "--report", "run.html", "--report", "new.json"),
    (*CALIBRATE, "-o", "new_ranges.json", "--log", "new.log"),
    ("transform", "m.onnx", "t.onnx", "--group", "simplify"),
    ("transform", "m.onnx", "t.onnx", "--group", "simplify", "--external-data", "--dump-dir", "steps"),
    ("check", "p.toml", "--update"),
    ("check", "p.toml"),
    ("costs", "measure", "m.onnx", *DATA, "-o", "new_costs.json"),
    ("sensitivity", "m.onnx", *DATA, "-o", "new_evidence.json"),
    ("compile", "m.onnx", "-o", "c.onnx"),
    ("view", "m.onnx", "-o", "page.html"),
    ("explain", "m.onnx"),
    ("compare", "m.onnx", "q.onnx", *DATA),
    ("init", "m.onnx", "-o", "new.toml"),
)
"""Commands that read and write in the folder of the templates of `files`."""


def _mount(folder: Path, size: int) -> bool:
    """Put a file system of some bytes at a folder, for this process and those that it starts; False if that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS) or libc.mount(b"none", b"/", None, PRIVATE, None):
        return False
    return bool(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()) == 0)


@contextmanager
def usual(random: Random, folder: Path, limits: Limits) -> Iterator[Limits]:
    """Change nothing."""
    yield limits


@contextmanager
def largest_file(random: Random, folder: Path, limits: Limits) -> Iterator[Limits]:
    """Let writes fail when a file reaches a size."""
    yield replace(limits, file=random.choice((4_000, 10_000, 40_000, 200_000, 1_000_000)))


@contextmanager
def full_disk(random: Random, folder: Path, limits: Limits) -> Iterator[Limits]:
    """Put the working folder, or the temporary one, on a disk with little space. Without the right to, limit files."""
    name = random.choice(("work", "work", "tmp"))
    here, aside = folder / name, folder / "aside"
    here.rename(aside)
    here.mkdir()
    used = sum(4096 + path.stat().st_size // 4096 * 4096 for path in aside.rglob("*"))
    if _mount(here, used + random.choice((0, 8_192, 40_960, 200_704, 1_003_520))):
        shutil.copytree(aside, here, dirs_exist_ok=True)
    else:
        here.rmdir()
        aside.rename(here)
        limits = replace(limits, file=4_000)
    yield limits


@contextmanager
def read_only(random: Random, folder: Path, limits: Limits) -> Iterator[Limits]:
    """Forbid writing to the working folder, the home, the temporary folder, or all of them."""
    chosen = random.choice((["work"], ["home"], ["tmp"], ["work", "home", "tmp"]))
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = not libc.unshare(NEW_MOUNTS) and not libc.mount(b"none", b"/", None, PRIVATE, None)
    for path in (os.fsencode(folder / name) for name in chosen):
        bind, again = 4096, 4096 | REMOUNT | READ_ONLY
        if not (
            mounted and libc.mount(path, path, None, bind, None) == 0 and not libc.mount(path, path, None, again, None)
        ):
            os.chmod(path, 0o555)
    yield limits
    for name in chosen:
        libc.umount2(os.fsencode(folder / name), 2)
        os.chmod(folder / name, 0o755)


@contextmanager
def no_home(random: Random, folder: Path, limits: Limits) -> Iterator[Limits]:
    """Take the home and the temporary folder away, or name what is no folder."""
    (folder / "a-file").write_text("x")
    names = random.sample(("HOME", "TMPDIR", "XDG_CACHE_HOME", "REQUANT_CACHE", "PATH", "LC_ALL", "COLUMNS"), 3)
    values = (None, "/nowhere", str(folder / "a-file"), "", "relative", "\x1b[31m", "/proc")
    chosen = tuple((name, random.choice(values)) for name in names)
    yield replace(limits, environment=chosen)


PLACES: dict[str, Callable[[Random, Path, Limits], AbstractContextManager[Limits]]] = {
    "largest-file": largest_file,
    "full-disk": full_disk,
    "read-only": read_only,
    "no-home": no_home,
    "two-at-once": usual,
}
"""What is wrong with the places."""


def run_place(case: Case, server: Server, main: Main) -> Outcome:
    """Run a command in a bad place, and judge it."""
    random, folder = case.random, server.root / f"{case.family}-{case.kind}-{case.number}"
    fresh(folder)
    for name in ("work", "home"):
        shutil.copytree(server.root / TEMPLATES / name, folder / name, dirs_exist_ok=True)
    command = random.choice(COMMANDS)
    ran: tuple[Ran, ...] = ()
    fault = ""
    try:
        with PLACES[case.kind](random, folder, server.limits) as limits:
            if case.kind == "two-at-once":
                ran = _twice(command, folder, main, limits)
            else:
                ran = (run_command(command, folder, main, limits),)
    except Exception:  # noqa: BLE001 - a fault of the harness is reported, and the other cases go on
        fault = brief()
    return server.tidy(folder, Outcome(case.family, case.kind, case.number, ran, fault))


def _twice(command: Command, folder: Path, main: Main, limits: Limits) -> tuple[Ran, ...]:
    """Run a command twice at the same time. Both end well or with a reason, and every output is whole."""
    before = listing(folder)
    pids = [start(command, folder, main, limits) for _ in range(2)]
    ended = [wait(pid) for pid in pids]
    codes = [os.waitstatus_to_exitcode(status) for status, _, _ in ended]
    problems = [problem for _, _, problem in ended if problem]
    problems += [f"exit code: {code}" for code in codes if code not in CODES]
    if orphans():
        problems.append("process left: a child still ran after the command")
    text = (folder / "out" / "stderr").read_bytes()  # both write to one file: its lines are no evidence
    problems += [found for found in printed(b"", text, 0) if found.startswith("traceback")]
    problems += left(before, listing(folder), min(codes), folder)
    cpu, peak = max(u.ru_utime + u.ru_stime for _, u, _ in ended), max(u.ru_maxrss for _, u, _ in ended) / 1024
    return (Ran((*command, "(twice)"), max(codes), round(cpu, 2), round(peak), tuple(problems)),)


def _nothing(random: Random, folder: Path) -> list[Command]:
    return []


FAMILY = Family(dict.fromkeys(PLACES, _nothing), prepare=prepare, run=run_place)
