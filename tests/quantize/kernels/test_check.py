"""The kernels under emulation, with sanitizers, and beside pages that nobody may touch; most without ONNX Runtime."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import open_session
from requant.quantize import Options, quantize_model
from requant.quantize.kernels.library import Kernels

from ...native import FOUND, needs_library

SAMPLES = Path(__file__).parents[3] / "sample_models"

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


RUN = """
import sys, numpy as np, onnxruntime as ort
options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.register_custom_ops_library(sys.argv[1])
session = ort.InferenceSession(sys.argv[2], options, providers=["CPUExecutionProvider"])
np.save(sys.argv[4], session.run(None, {"image": np.load(sys.argv[3])})[0])
"""


@pytest.mark.slow
@needs_library
@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64")
def test_a_model_runs_on_a_cpu_without_avx(tmp_path: Path) -> None:
    assert isinstance(FOUND, Kernels)
    model, feed, made = (tmp_path / name for name in ("q.onnx", "x.npy", "y.npy"))
    options = Options(kernels="exact", place="all", effort="low", force_int8=True, seconds=0.01)
    quantize_model(SAMPLES / "digits.onnx", f"{SAMPLES / 'digits.npz'}:calib", model, options)
    assert NATIVE_DOMAIN in {node.domain for node in onnx.load(model).graph.node}
    image = np.load(SAMPLES / "digits.npz")["image"][:16]
    np.save(feed, image)
    command = ["qemu-x86_64", "-cpu", "Nehalem", sys.executable, "-c", RUN, FOUND.library, model, feed, made]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    (here,) = open_session(model, threads=1).run(None, {"image": image})
    np.testing.assert_array_equal(np.load(made), here)
