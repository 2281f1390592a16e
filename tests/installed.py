"""The wheel of this tree, installed into a new environment; the libraries are those of this environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def settings() -> dict[str, str]:
    """Return the environment variables without those that change Python, pytest or requant."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "REQUANT"))}


def install_wheel(folder: Path) -> Path:
    """Build the wheel and install it into ``folder/venv``; return the folder of its programs."""
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=skip)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run([*PIP, "wheel", *options, str(folder / "source")], check=True, cwd=folder, env=settings())
    (wheel,) = folder.glob("requant-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    programs = folder / "venv" / "bin"
    install = ["--python", str(programs / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*PIP, *install], check=True, cwd=folder, env=settings())
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return programs
