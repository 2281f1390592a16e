"""The kernels without ONNX Runtime: under emulation, with sanitizers, and beside pages that nobody may touch."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys

import pytest

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs the package ziglang")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("machine", "count", "options"),
    [
        ("x86_64", 1000, []),
        ("x86_64", 300, ["--sanitize"]),
        ("x86_64", 100, ["--cpu", "Nehalem"]),
        ("aarch64", 1000, []),
    ],
    ids=["plain", "sanitized", "old", "aarch64"],
)
def test_the_kernels_are_their_definition(machine: str, count: int, options: list[str]) -> None:
    emulated = machine != platform.machine() or "--cpu" in options
    if emulated and shutil.which(f"qemu-{machine}") is None:
        pytest.skip(f"needs qemu-{machine}")
    command = [sys.executable, "-m", "requant.quantize.kernels.build", machine, "--check", str(count)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{count} convolutions are equal on: ")
    assert done.stdout.rstrip().endswith("portable")
    if emulated:  # the emulator has all instruction sets of aarch64, and the old CPU has no AVX
        assert done.stdout.rstrip().endswith(": i8mm dotprod portable" if machine == "aarch64" else ": portable")
