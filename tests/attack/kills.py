"""Kill runs at random moments, and run them again: ``python -m tests.attack.kills --count 200 --seed 1``.

``make kills`` runs this. A run that is killed leaves no half-written output and no process. The next run of the same
command succeeds, leaves nothing of the killed one, and writes the same bytes where the result depends on no measured
time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from .bases import SAMPLE_MODELS, feeds
from .case import Case, Command, Outcome, Ran
from .files import PROJECT
from .judge import Listing, left, listing
from .server import Limits, Main, Server, fresh, orphans, preload, run_all, run_command, start, wait

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
ENDED = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}
"""The exit code after each signal: for shells, 128 and the number of the signal."""
EARLY = 0.02
"""Seconds in which the system may end a command, because it has no handlers yet; shells say the same code, 128 + n."""
PATIENCE = 20.0
"""Seconds until a run must have ended after a signal."""
PLACED = ("--effort", "low", "--place", "estimated")


@dataclass(frozen=True, slots=True)
class Subject:
    """A command that is killed.

    Attributes:
        command: The command.
        outputs: The files that it writes.
        same: Those whose bytes depend on nothing that is measured.
    """

    command: Command
    outputs: tuple[str, ...]
    same: tuple[str, ...] = ()


SUBJECTS: Mapping[str, Subject] = {
    "calibrate": Subject(
        ("calibrate", "m.onnx", "--data", "d.npz", "-o", "r.json", "--log", "min_max.log", "--force"),
        ("r.json", "min_max.log"),
        ("r.json", "min_max.log"),
    ),
    "calibrate-processes": Subject(
        ("calibrate", "m.onnx", "--data", "d.npz", "-o", "r.json", "--executor", "processes", "--workers", "2", "--force"),
        ("r.json",),
        ("r.json",),
    ),
    "quantize": Subject(
        ("quantize", "m.onnx", "--data", "s.npz", "-o", "q.onnx", *PLACED, "--force", "--report", "run.html"),
        ("q.onnx", "run.html", "q.plan.json"),
    ),
    "quantize-external": Subject(
        ("quantize", "m.onnx", "--data", "s.npz", "-o", "q.onnx", *PLACED, "--force", "--force-int8", "--external-data"),
        ("q.onnx", "q.onnx.data", "q.plan.json"),
    ),
    "transform": Subject(
        ("transform", "m.onnx", "t.onnx", "--group", "simplify", "--force"), ("t.onnx",), ("t.onnx",)
    ),
    "transform-external": Subject(
        ("transform", "m.onnx", "t.onnx", "--group", "simplify", "--external-data", "--dump-dir", "steps", "--force"),
        ("t.onnx", "t.onnx.data"),
        ("t.onnx",),
    ),
    "check": Subject(("check", "p.toml", "--update"), ("q.onnx", "requant.lock.json", "junit.xml", "out.md")),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Whole:
    """An undisturbed run: its seconds, and the bytes of the outputs that do not change."""

    seconds: float
    same: Mapping[str, bytes]


def _nothing(random: Random, folder: Path) -> list[Command]:
    return []


def _inputs(work: Path) -> None:
    """Write the model, the data and the project of all subjects."""
    shutil.copy(SAMPLE_MODELS / "digits.onnx", work / "m.onnx")
    (image,) = feeds("digits").values()
    np.savez(work / "s.npz", image=image)
    np.savez(work / "d.npz", image=np.tile(image, (20, 1, 1, 1)))
    (work / "p.toml").write_text(PROJECT.replace("d.npz", "s.npz").replace('exclude_nodes = ["second"]\n', ""))
    for path in work.iterdir():  # checkpoints know data by the time of their last change
        os.utime(path, (1_700_000_000, 1_700_000_000))


def _undisturbed(name: str, root: Path, main: Main) -> Whole:
    """Run a subject once.

    Raises:
        RuntimeError: It fails.
    """
    folder, subject = root / f"whole-{name}", SUBJECTS[name]
    fresh(folder)
    _inputs(folder / "work")
    began = time.monotonic()
    ran = run_command(subject.command, folder, main, Limits())
    seconds = time.monotonic() - began
    if ran.code not in (0, 1):
        raise RuntimeError(f"{name}: exit code {ran.code}, {ran.problems}, {(folder / 'out/stderr').read_text()}")
    return Whole(seconds, {file: (folder / "work" / file).read_bytes() for file in subject.same})


def _kill(subject: Subject, folder: Path, main: Main, after: float, number: signal.Signals) -> Ran:
    """Start a subject, send it a signal, and judge what is there afterwards."""
    before = listing(folder)
    pid = start(subject.command, folder, main, Limits())
    time.sleep(after)
    os.kill(pid, number)
    told = time.monotonic()
    status, used, problem = wait(pid)
    code, problems = os.waitstatus_to_exitcode(status), [problem] if problem else []
    if time.monotonic() - told > PATIENCE:
        problems.append(f"slow: ended {time.monotonic() - told:.0f} s after {number.name}")
    if orphans():
        problems.append(f"process left: after {number.name}")
    if code not in (0, 1, ENDED[number]) and not (code == -number and after < EARLY):
        problems.append(f"exit code: {code} after {number.name}")
    problems += _after(subject, folder, before, number)
    return Ran(
        (number.name, f"after {after:.2f} s", *subject.command), code, used.ru_utime + used.ru_stime, 0, tuple(problems)
    )


def _after(subject: Subject, folder: Path, before: Listing, number: signal.Signals) -> Iterator[str]:
    """Yield what is wrong in the folder after a kill. SIGKILL may leave folders with a name that the next run sweeps."""
    after = listing(folder)
    known = {f"work/{file}" for file in subject.outputs} | {"work/q.plan.json"}
    quiet = {path: facts for path, facts in after.items() if path in known or path in before}
    yield from left(before, quiet, 0, folder)
    if number is signal.SIGKILL:
        return
    for path in (path for path in after if path not in before and path not in known):
        if not path.startswith(("out/", "home/.cache")) and ".checkpoint" not in path and "steps" not in path:
            yield f"leftover: {path} after {number.name}"


def _again(subject: Subject, folder: Path, main: Main, whole: Whole) -> Ran:
    """Run a subject again after a kill, and judge it."""
    ran = run_command(subject.command, folder, main, Limits())
    problems = list(ran.problems)
    if ran.code not in (0, 1):
        problems.append(f"again: exit code {ran.code}: {(folder / 'out/stderr').read_text()[:200]}")
    else:
        problems += [
            f"bytes: {file} differs from an undisturbed run: {_first_difference(now, whole.same[file])}"
            for file in subject.same
            if (now := (folder / "work" / file).read_bytes()) != whole.same[file]
        ]
    for path in listing(folder):
        if Path(path).name.startswith((".requant-", "requant-")) or ".checkpoint" in path or path.endswith(".tmp"):
            problems.append(f"leftover: {path} after the next run")
    return Ran(ran.command, ran.code, ran.cpu, ran.peak, tuple(problems))


def _first_difference(one: bytes, other: bytes) -> str:
    """Return the first line, and the number of lines, in which two texts differ."""
    lines = [(a, b) for a, b in zip(one.split(b"\n"), other.split(b"\n"), strict=False) if a != b]
    return (
        f"{len(lines)} lines, {lines[0][0][:80]!r} and {lines[0][1][:80]!r}"
        if lines
        else f"{len(one)} and {len(other)} bytes"
    )


def run_kill(case: Case, server: Server, main: Main) -> Outcome:
    """Kill a subject, run it again, and judge both."""
    subject, random = SUBJECTS[case.kind], case.random
    folder = server.root / f"{case.family}-{case.kind}-{case.number}"
    fresh(folder)
    _inputs(folder / "work")
    whole = WHOLE[case.kind]
    if random.random() < 0.4:  # outputs of an earlier run are there
        for file in (server.root / f"whole-{case.kind}" / "work").iterdir():
            if file.name in subject.outputs:
                shutil.copy2(file, folder / "work" / file.name)
    checkpoint_often()
    killed = _kill(subject, folder, main, random.uniform(0, 1.1) * whole.seconds, random.choice(SIGNALS))
    again = _again(subject, folder, main, whole)
    return server.tidy(folder, Outcome(case.family, case.kind, case.number, (killed, again)))


def checkpoint_often() -> None:
    """Let calibration write its checkpoint after each batch, and not every five seconds: a run takes one second."""
    from requant.calibration.runs import checkpoint

    checkpoint.SECONDS = 0.0


WHOLE: dict[str, Whole] = {}
"""The undisturbed run of each subject. Processes that fork from this one inherit it."""


def main() -> int:
    """Kill as the command line says, print the failures and a table; return 1 after a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; more disturb the moments")
    parser.add_argument("--only", choices=SUBJECTS)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    names = [options.only] if options.only else sorted(SUBJECTS)
    script = preload()
    outcomes = []
    try:
        WHOLE.update({name: _undisturbed(name, root, script) for name in names})
        kinds = (names[i % len(names)] for i in range(options.count))
        cases = (Case("kills", kind, i, options.seed, _nothing, run=run_kill) for i, kind in enumerate(kinds))
        for outcome in run_all(cases, Server(root, options.jobs)):
            outcomes.append(outcome)
            if outcome.problems:
                print(f"kill {outcome.kind}:{outcome.number} (seed {options.seed})")
                for ran in outcome.ran:
                    for problem in ran.problems:
                        print(f"    {problem}\n        {' '.join(ran.command)}", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(kill_table(outcomes))
    return 1 if any(outcome.problems for outcome in outcomes) else 0


def kill_table(outcomes: list[Outcome]) -> str:
    """Return counts by signal in markdown."""
    lines = ["| signal | kills | before the end | failures |", "|---|---|---|---|"]
    by_signal = Counter(outcome.ran[0].command[0] for outcome in outcomes if outcome.ran)
    for name in sorted(by_signal):
        found = [outcome for outcome in outcomes if outcome.ran and outcome.ran[0].command[0] == name]
        early = sum(outcome.ran[0].code not in (0, 1) for outcome in found)
        lines.append(f"| {name} | {len(found)} | {early} | {sum(bool(outcome.problems) for outcome in found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
