"""Compile the native operators with the C++ compiler of the package ``ziglang``.

    python -m requant.quantize.kernels.build [x86_64|aarch64]
    python -m requant.quantize.kernels.build [x86_64|aarch64] --check 1000 [--sanitize] [--cpu Nehalem]

The second form builds a program that compares the kernels with their definition, and runs it; for another machine or an
older CPU under qemu. Its tensors, weights and copies end at pages without access, so that reads and writes behind them
end the program.

The compiler needs no other tool and no headers of the system. The library needs glibc 2.17 or newer, and nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

from ...calibration.model.session import OPERATORS

SOURCES = Path(__file__).parent / "native"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
OPTIONS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", *WARNINGS)
"""No contraction: a fused multiply-add rounds once where ONNX Runtime's kernels round twice."""
OPERATORS_SOURCES = tuple(
    "library attention cached_attention concat conv_transpose convolution depth_to_space group_normalization gru lines "
    "lstm matmul matmul_nbits normalization pair pool quantize recurrent resize rotary softmax table".split()
)
KERNELS = ("cpu", "together", "target_portable")
SMALL = ("-Os",)
"""Optimize for size: code for old processors and for rare tensors, and operators, whose time is in the kernels."""
AVX2 = ("-mavx2", "-mfma")
AVX512 = tuple(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "vbmi"))
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "target_avx2": AVX2,
        "target_avxvnni": (*AVX2, "-mavxvnni"),
        "target_avx512": AVX512,
        "target_amx": (*AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    },
    "aarch64": {
        "target_dotprod": ("-mcpu=generic+dotprod",),
        "target_i8mm": ("-mcpu=generic+dotprod+i8mm",),
    },
}
"""By machine the sources for further instruction sets, with the options that enable them."""
NO_TABLES = ("-fno-asynchronous-unwind-tables", "-fno-unwind-tables", "-g0")
"""No tables of the stack for functions that cannot throw: they are a hundredth of the library. Debug information, which
the compiler of ziglang adds by itself, would have them too."""
SANITIZED = ("-O1", "-g", "-fsanitize=undefined", "-fno-sanitize-recover=all")


def build(machine: str, output: Path) -> None:
    """Compile the library.

    Args:
        machine: ``x86_64`` or ``aarch64``.
        output: The library to write.

    Raises:
        CalledProcessError: The compiler failed; it has printed why.
    """
    made = _linked(
        f"{machine}-linux-gnu.2.17",
        (*OPERATORS_SOURCES, *kernels_of(machine)),
        ("-O3", "-ffunction-sections", "-fdata-sections", *NO_TABLES),
        ("-shared", "-s", "-Wl,-z,nodelete", "-Wl,--gc-sections", f"-Wl,--version-script={SOURCES / 'exports.map'}"),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    staged = output.with_suffix(".new")
    staged.write_bytes(made)
    staged.replace(output)


def build_check(machine: str, output: Path, *, sanitize: bool = False) -> None:
    """Compile the program that compares the kernels with their definition; it needs no library of the system.

    Args:
        machine: ``x86_64`` or ``aarch64``.
        output: The program to write.
        sanitize: Whether undefined behaviour ends the program.

    Raises:
        CalledProcessError: The compiler failed; it has printed why.
    """
    level = SANITIZED if sanitize else ("-O3",)
    options = (*level, "-DREQUANT_GUARDED")
    output.write_bytes(
        _linked(f"{machine}-linux-musl", ("check", "check_floats", *kernels_of(machine)), options, (*level, "-static"))
    )
    output.chmod(0o755)


def kernels_of(machine: str) -> tuple[str, ...]:
    """Return the sources of the kernels, from the smallest instruction set to the largest."""
    return (*KERNELS, *TARGETS[machine])


def _linked(target: str, sources: Sequence[str], options: Sequence[str], linked: Sequence[str]) -> bytes:
    """Compile sources and link them in this order: the linker keeps the first copy of a template."""
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", target]
    enabled = dict.fromkeys((*OPERATORS_SOURCES, "together", "target_portable"), SMALL) | {
        name: flags for each in TARGETS.values() for name, flags in each.items()
    }
    with tempfile.TemporaryDirectory() as folder:

        def compiled(name: str) -> str:
            made = f"{folder}/{name}.o"
            run([*compiler, *OPTIONS, *options, *enabled.get(name, ()), "-c", f"{SOURCES / name}.cpp", "-o", made])
            return made

        objects = [compiled(sources[0])]  # the first one also compiles the C++ library for the cache
        with ThreadPoolExecutor(cpu_count()) as pool:
            objects += pool.map(compiled, sources[1:])
        whole = Path(folder, "whole")
        run([*compiler, *linked, *objects, "-o", str(whole)])
        return whole.read_bytes()


def run(command: Sequence[str]) -> None:
    """Run a program that must succeed."""
    subprocess.run(command, check=True)


def main() -> None:
    """Build the library, or build and run the program that checks the kernels. Errors end it with one line."""
    if platform.system() != "Linux":
        sys.exit(f"error: the native operators are for Linux, not for {platform.system()}")
    if importlib.util.find_spec("ziglang") is None:
        sys.exit("error: the compiler is not installed; pip install 'requant[native]'")
    try:
        _main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error.cmd[0]} ended with {error.returncode}; its messages are above")
    except OSError as error:
        sys.exit(f"error: {error}")


def _main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description="Compile the native operators.")
    parser.add_argument("machine", nargs="?", default=platform.machine(), choices=sorted(TARGETS))
    parser.add_argument("--output", type=Path, help="The library to write.")
    parser.add_argument("--check", type=int, metavar="N", help="Compare N random convolutions with their definition.")
    parser.add_argument("--sanitize", action="store_true", help="With --check: stop at undefined behaviour.")
    parser.add_argument("--cpu", help="With --check: the CPU to emulate; qemu lists the names with -cpu help.")
    given = parser.parse_args()
    if given.check is None and (given.sanitize or given.cpu):
        parser.error(f"{'--sanitize' if given.sanitize else '--cpu'} needs --check N")
    if given.check is not None and (given.output is not None or given.check < 1):
        parser.error("--check writes no library" if given.output else "--check needs a number of at least 1")
    if given.check is None:
        build(given.machine, given.output or OPERATORS.parents[1] / given.machine / OPERATORS.name)
        return
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "check")
        build_check(given.machine, program, sanitize=given.sanitize)
        cpu = ["-cpu", given.cpu] if given.cpu else []
        emulator = [f"qemu-{given.machine}"] if cpu or given.machine != platform.machine() else []
        run([*emulator, *cpu, str(program), str(given.check)])


if __name__ == "__main__":
    main()
