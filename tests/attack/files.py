"""Damaged side files: requant writes them first, then they are damaged and read again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from .bases import BASES, feeds
from .case import Command, Family, Writer
from .damage import DAMAGES, at_path
from .server import Limits, fresh, preload, run_command

BASE = "mlp"
TEMPLATES = "templates"
QUANTIZE = ("quantize", "m.onnx", "-o", "q.onnx", "--effort", "low", "--force-int8", "--force")
CALIBRATE = ("calibrate", "m.onnx", "--data", "d.npz")
DATA = ("--data", "d.npz")

OVERRIDES = """[tensors."a"]
range = [-3.0, 3.5]
[tensors."h"]
rule = "percentile(99.9)"
[tensors."r"]
float = true
"""
PROJECT = """model = "m.onnx"
output = "q.onnx"
[quantize]
data = "d.npz"
effort = "low"
place = "estimated"
force_int8 = true
exclude_nodes = ["second"]
[check]
data = "d.npz"
seconds = 0.0
metric = ["sqnr"]
junit = "junit.xml"
markdown = "out.md"
[check.tolerance]
sqnr = 0.5
size = "5%"
"""

MAKING: tuple[Command, ...] = (
    ("calibrate", "m.onnx", *DATA, "-o", "ranges.json", "--log", "min_max.log"),
    ("calibrate", "m.onnx", *DATA, "-o", "other.json", "--shard", "2/2"),
    ("calibrate", "m.onnx", *DATA, "-o", "first.json", "--shard", "1/2"),
    (*QUANTIZE, *DATA, "--report", "run.json"),
    ("costs", "measure", "m.onnx", *DATA, "-o", "costs.json"),
    ("sensitivity", "m.onnx", *DATA, "-o", "evidence.json"),
    ("transform", "m.onnx", "flow.onnx", "--transforms", "quantize_nodes"),
    ("transform", "q.onnx", "plain.onnx", "--group", "simplify"),
    ("check", "p.toml", "--update"),
)
"""The commands that write the side files. Each must succeed."""

READS: dict[str, tuple[Command, ...]] = {
    "ranges.json": (
        (*QUANTIZE, "--ranges", "ranges.json", "--place", "estimated"),
        (*QUANTIZE, *DATA, "--ranges", "ranges.json", "--place", "rules"),
        ("calibrate", "--merge", "ranges.json", "other.json", "-o", "merged.json"),
    ),
    "first.json": (("calibrate", "--merge", "first.json", "other.json", "-o", "merged.json"),),
    "m.plan.json": ((*QUANTIZE, *DATA, "--plan", "m.plan.json"),),
    "costs.json": ((*QUANTIZE, *DATA, "--costs", "costs.json"), (*QUANTIZE, "--dynamic", "--costs", "costs.json")),
    "o.toml": (
        (*QUANTIZE, *DATA, "--overrides", "o.toml", "--place", "estimated"),
        (*CALIBRATE, "-o", "new.json", "--overrides", "o.toml"),
    ),
    "o.json": ((*CALIBRATE, "-o", "new.json", "--overrides", "o.json"),),
    "min_max.log": (
        (*QUANTIZE, "--ranges", "min_max.log", "--place", "estimated"),
        ("transform", "flow.onnx", "t.onnx", "--transforms", 'freeze_max(min_max_log_file="min_max.log")'),
        ("transform", "m.onnx", "t.onnx", "--transforms", 'insert_qdq(min_max_log_file="min_max.log")'),
    ),
    "p.toml": (("check", "p.toml"), ("check", "p.toml", "--update"), ("check", "p.toml", "--json")),
    "requant.lock.json": (
        ("check", "p.toml"),
        ("check", "--float", "m.onnx", "--model", "q.onnx", *DATA, "--seconds", "0"),
        ("check", "--float", "m.onnx", "--model", "q.onnx", *DATA, "--seconds", "0", "--update"),
    ),
    "run.json": (("report", "run.json", "-o", "page.html"), ("report", "run.json", "run.json", "-o", "page.html")),
    "checkpoint": ((*CALIBRATE, "-o", "resumed.json"),),
    "costs-cache": ((*QUANTIZE, *DATA), ("costs", "show"), ("costs", "show", "--json"), ("costs", "clear")),
    "sensitivity-cache": (("sensitivity", "m.onnx", *DATA), ("sensitivity", "m.onnx", *DATA, "--json")),
}
"""The commands that read each side file."""


def prepare(root: Path) -> None:
    """Let requant write all side files in a folder of the run.

    Raises:
        RuntimeError: A command failed: there is nothing valid to damage.
    """
    folder = root / TEMPLATES
    if folder.exists():
        return
    fresh(folder)
    work, main = folder / "work", preload()
    (work / "m.onnx").write_bytes(BASES[BASE]().SerializeToString())
    np.savez(work / "d.npz", x=np.tile(feeds(BASE)["x"], (4, 1)))
    (work / "o.toml").write_text(OVERRIDES)
    (work / "o.json").write_text('{"a": {"range": [-3.0, 3.5]}, "h": {"rule": "minmax"}, "r": {"float": true}}')
    (work / "p.toml").write_text(PROJECT)
    for command in MAKING:
        ran = run_command(command, folder, main, Limits())
        if ran.code:
            text = (folder / "out" / "stderr").read_text()
            raise RuntimeError(f"requant {' '.join(command)}: exit code {ran.code}: {text}")
    _in_child(lambda: _leave(folder))
    (work / "q.plan.json").rename(work / "m.plan.json")


def _in_child(work: Callable[[], None]) -> None:
    """Run a function in a process of its own: a session starts threads, and threads do not survive a fork."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise RuntimeError("the checkpoint was not written")


def _leave(folder: Path) -> None:
    """Leave the cached costs, and what an interrupted ``requant calibrate m.onnx --data d.npz -o resumed.json`` leaves."""
    from requant.calibration.execution import Execution
    from requant.quantize import Options, calibrate_model
    from requant.quantize.placement import costs
    from requant.quantize.runtime import machine

    os.chdir(folder / "work")
    for name in (machine.FOLDER, "XDG_CACHE_HOME"):  # the cache of the tests themselves
        os.environ.pop(name, None)
    os.environ["HOME"] = str(folder / "home")
    costs.keep(costs.read("costs.json"))
    execution = Execution(checkpoint=Path(".resumed.json.checkpoint"), kept=lambda path: None)
    calibrate_model("m.onnx", "d.npz", Options(execution=execution))


def _target(side: str, folder: Path) -> Path:
    """Return the path of a side file in the folder of a case."""
    patterns = {
        "checkpoint": "work/.resumed.json.checkpoint-*",
        "costs-cache": "home/.cache/requant/costs*",
        "sensitivity-cache": "home/.cache/requant/sensitivity*",
    }
    return next(iter(sorted(folder.glob(patterns.get(side, f"work/{side}")))))


def damaged(side: str) -> Writer:
    """Return the writer of a copy of all side files, one of them damaged."""

    def write(random: Random, work: Path) -> list[Command]:
        folder = work.parent
        for name in ("work", "home"):
            shutil.copytree(folder.parent / TEMPLATES / name, folder / name, dirs_exist_ok=True)
        target = _target(side, folder)
        if random.random() < 0.06:
            at_path(random, target)
        else:
            data = target.read_bytes()
            for damage in random.sample(list(DAMAGES.values()), random.choice((1, 1, 1, 2))):
                data = damage(random, data)
            status = target.stat()
            target.write_bytes(data)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        return random.sample(READS[side], 1)

    return write


FILES = Family({side: damaged(side) for side in READS}, prepare=prepare)
