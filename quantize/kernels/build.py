"""Compile the native operators with the C++ compiler of the package ``ziglang``.

    python -m requant.quantize.kernels.build [x86_64|aarch64] [--sanitize]

The compiler needs no other tool and no headers of the system. The library needs glibc 2.17 or newer, and nothing else.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

from ...calibration.session import OPERATORS

SOURCES = Path(__file__).parent / "native"
OPTIONS = (
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Werror",
)
"""No contraction: a fused multiply-add rounds once where ONNX Runtime's kernels round twice."""
COMMON = ("library", "convolution", "table", "cpu", "target_portable")
AVX512 = ("f", "bw", "dq", "vl", "vnni", "vbmi")
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "target_avx2": ("-mavx2",),
        "target_avxvnni": ("-mavx2", "-mavxvnni"),
        "target_avx512": tuple(f"-mavx512{part}" for part in AVX512),
    },
    "aarch64": {},
}
"""By machine the sources for further instruction sets, with the options that enable them."""
SANITIZED = ("-O1", "-g", "-fsanitize=undefined", "-fno-sanitize-recover=all")


def build(machine: str, output: Path, *, sanitize: bool = False) -> None:
    """Compile the library.

    The linker keeps the first copy of a template that several sources compiled, so the sources are linked from the
    smallest instruction set to the largest.

    Args:
        machine: ``x86_64`` or ``aarch64``.
        output: The library to write.
        sanitize: Whether undefined behaviour ends the program.

    Raises:
        CalledProcessError: The compiler failed; it has printed why.
    """
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.2.17"]
    level = SANITIZED if sanitize else ("-O3",)
    sources = {**dict.fromkeys(COMMON, ()), **TARGETS[machine]}
    with tempfile.TemporaryDirectory() as folder:

        def compiled(name: str) -> str:
            made = f"{folder}/{name}.o"
            run([*compiler, *OPTIONS, *level, *sources[name], "-c", f"{SOURCES / name}.cpp", "-o", made])
            return made

        objects = [compiled(COMMON[0])]  # the first one also compiles the C++ library for the cache
        with ThreadPoolExecutor(cpu_count()) as pool:
            objects += pool.map(compiled, [name for name in sources if name != COMMON[0]])
        output.parent.mkdir(parents=True, exist_ok=True)
        whole = Path(folder, OPERATORS.name)
        run([*compiler, *level, *(() if sanitize else ("-s",)), "-shared", *objects, "-o", str(whole)])
        staged = output.with_suffix(".new")
        staged.write_bytes(whole.read_bytes())
        staged.replace(output)


def run(command: Sequence[str]) -> None:
    """Run the compiler."""
    subprocess.run(command, check=True)


def main() -> None:
    """Build the library for a machine; the default is this one."""
    parser = argparse.ArgumentParser(description="Compile the native operators.")
    parser.add_argument("machine", nargs="?", default=platform.machine(), choices=sorted(TARGETS))
    parser.add_argument("--output", type=Path, help="The library to write.")
    parser.add_argument("--sanitize", action="store_true", help="Stop at undefined behaviour.")
    given = parser.parse_args()
    build(given.machine, given.output or OPERATORS.parents[1] / given.machine / OPERATORS.name, sanitize=given.sanitize)


if __name__ == "__main__":
    main()
