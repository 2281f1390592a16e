"""A bounded number of attacks, and the judge that decides about them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack.case import Family, Outcome, Ran
from tests.attack.data import DATA
from tests.attack.judge import left, listing, printed
from tests.attack.models import MODELS

ROOT = Path(__file__).parents[2]


def attack(*arguments: str) -> None:
    """Run a module of the attacks in a process of its own: it forks, and this one has threads."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, check=False, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_keep_the_contract_on_some_hostile_input() -> None:
    attack("tests.attack", "models:3", "data:2", "files:4", "places:1", "--seed", "20", "--jobs", "1")


@pytest.mark.slow
@pytest.mark.parametrize("families", [("models:106",), ("data:54", "files:117", "places:15")], ids=" ".join)
def test_commands_keep_the_contract_on_hostile_input(families: tuple[str, ...]) -> None:
    attack("tests.attack", *families, "--seed", "21", "--jobs", "1")


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_and_its_resumed_run_gives_the_same_bytes() -> None:
    attack("tests.attack.kills", "--only", "calibrate", "--count", "5", "--seed", "3")


@pytest.mark.slow
def test_every_killed_command_leaves_nothing() -> None:
    attack("tests.attack.kills", "--count", "35", "--seed", "4")


LINE = b"requant: m.onnx: no such file\n"
TRACEBACK = b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x\n'


@pytest.mark.parametrize(
    ("stdout", "stderr", "code", "expected"),
    [
        (b"", LINE, 2, []),
        (b"a table\n", b"note: few samples\n", 0, []),
        (b"", TRACEBACK, 1, ["traceback"]),
        (b"", b"", 2, ["no reason"]),
        (b"", b"something else\n" + LINE, 2, ["more lines"]),
        (b"", b"x" * 401 + b"\n", 0, ["long line"]),
        (b"\x1b[31m", b"", 0, ["control"]),
        ("\u202e".encode(), b"", 0, ["control"]),
        (b"\xff", b"", 0, ["control"]),
        (b"a\n::stop-commands::x\n", b"", 0, ["log command"]),
    ],
)
def test_the_judge_reads_what_a_command_prints(stdout: bytes, stderr: bytes, code: int, expected: list[str]) -> None:
    assert [problem.partition(":")[0] for problem in printed(stdout, stderr, code)] == expected


@pytest.mark.parametrize(
    ("path", "content", "code", "expected"),
    [
        ("work/q.json", b"{}", 0, []),
        ("work/q.json", b"{", 0, ["output"]),
        ("work/q.json", b"{}", 2, ["leftover"]),
        ("work/.requant-x", b"", 0, ["leftover"]),
        ("tmp/x", b"", 0, ["leftover"]),
        ("home/.cache/requant/costs.json", b"{}", 2, []),
        ("work/page.html", b"<html><script>alert(1)</script>", 0, ["output"]),
        ("work/page.html", b"<html><img src=x onerror=alert(7131)></html>", 0, ["output"]),
    ],
)
def test_the_judge_reads_what_a_command_leaves(
    tmp_path: Path, path: str, content: bytes, code: int, expected: list[str]
) -> None:
    before = listing(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_bytes(content)
    found = left(before, {p: s for p, s in listing(tmp_path).items() if s != (0, 0) or p == path}, code, tmp_path)
    assert [problem.partition(":")[0] for problem in found] == expected


@pytest.mark.parametrize(
    "kind", sorted({*MODELS.kinds, *DATA.kinds} - {"many-nodes", "most-nodes", "zip-bomb", "special-path"})
)
def test_a_seed_gives_the_same_files(kind: str, tmp_path: Path) -> None:
    family = MODELS if kind in MODELS.kinds else DATA
    number = sorted(family.kinds).index(kind)
    assert _digest(family, 5, number, tmp_path / "one") == _digest(family, 5, number, tmp_path / "other")


def _digest(family: Family, seed: int, number: int, folder: Path) -> str:
    """Write a case to a folder, and return a digest of its files and commands."""
    case = family.cases("any", seed)(number)
    work = folder / "work"
    work.mkdir(parents=True)
    told = hashlib.sha256(repr(case.write(case.random, work)).encode())
    for path in sorted(path for path in work.rglob("*") if path.is_file() and not path.is_symlink()):
        if path.stat().st_size < 2**30:
            told.update(str(path.relative_to(work)).encode("utf-8", "surrogateescape") + path.read_bytes())
    return told.hexdigest()


def test_an_outcome_names_every_problem() -> None:
    ran = Ran(("inspect",), 2, 0.1, 100, ("control: x",))
    assert Outcome("models", "names", 1, (ran,), "broken").problems == ["harness: broken", "control: x"]
