"""Time from `pip install` to the verdict on the demo, the installed size, and the start of the command line.

    make wheel
    python -m benchmarks.install dist/requant-*.whl --extra images

The environment is new, in a temporary folder. Nothing comes from the cache of pip, so that the network counts. Sizes
are those of the files, bytecode included.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

LARGEST = 8
REPEATS = 5


def main() -> None:
    """Parse the command line, install, run the demo, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path, help="the wheel to install")
    parser.add_argument("--extra", action="append", default=[], help="an extra to install; may be repeated")
    asked = parser.parse_args()
    wanted = f"{asked.wheel.resolve()}" + (f"[{','.join(asked.extra)}]" if asked.extra else "")
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), wanted)


def measure(folder: Path, wanted: str) -> None:
    """Print what installing `wanted` in a new environment in a folder takes, and the first commands."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    before, python, requant = sizes(site), venv / "bin" / "python", venv / "bin" / "requant"
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
        "--no-cache-dir",
    ]
    installed = seconds([*pip, "install", wanted], folder)
    row("pip install", *installed)
    first = seconds([requant, "demo", "first", "--no-open"], folder)
    row("requant demo, the first time", *first)
    row("from pip install to the verdict", *(one + two for one, two in zip(installed, first, strict=True)))
    row("requant demo, again", *seconds([requant, "demo", "second", "--no-open"], folder))
    row("requant --help", *min(seconds([requant, "--help"], folder) for _ in range(REPEATS)))
    bare = min(seconds([python, "-c", "pass"], folder) for _ in range(REPEATS))
    root = min(seconds([python, "-c", "import requant"], folder) for _ in range(REPEATS))
    row("import requant", *(one - two for one, two in zip(root, bare, strict=True)))
    added = sizes(site) - before
    print(f"\ninstalled: {sum(added.values()) / 1e6:.0f} MB")
    for name, size in added.most_common(LARGEST):
        print(f"  {size / 1e6:6.1f} MB  {name}")


def seconds(command: list[str | Path], folder: Path) -> tuple[float, float]:
    """Run a command in a folder; return its wall time and its CPU time in seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("REQUANT_", "PYTHON"))}
    environment["REQUANT_CACHE"] = str(folder / "cache")
    used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr}")
    return took, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime


def sizes(site: Path) -> Counter[str]:
    """Return the bytes of each package in a folder of packages; what belongs to none counts by its own name."""
    found: Counter[str] = Counter()
    for path in site.rglob("*"):
        if path.is_file():
            found[path.relative_to(site).parts[0]] += path.stat().st_size
    return found


def row(what: str, wall: float, cpu: float) -> None:
    """Print a line of the table."""
    print(f"{what:34} {wall:8.3f} s  {cpu:8.3f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
