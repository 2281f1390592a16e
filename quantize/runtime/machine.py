"""This machine: CPU name, instruction sets, cores, runtime version, the cache folder."""

from __future__ import annotations

import logging
import os
import platform
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

MOST_THREADS = 4096
ONNX_RUNTIME = "ONNX Runtime"
FOLDER = "REQUANT_CACHE"
"""The environment variable that replaces the cache folder ``~/.cache/requant``."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine on which costs were measured.

    Attributes:
        runtime: The version of ONNX Runtime, or name, version and precision of another runtime.
        cpu: The name of the CPU, and its instructions for integer products.
        threads: Threads inside one operator.
    """

    runtime: str
    cpu: str
    threads: Annotated[int, msgspec.Meta(ge=0, le=MOST_THREADS)]

    @classmethod
    def here(cls, threads: int, runtime: str = "") -> Machine:
        """Return this machine, with ONNX Runtime or another runtime."""
        import onnxruntime

        found = flags()
        # on virtual machines, CPUs with different instructions may have the same name
        cpu = f"{_cpu()} ({' '.join(found)})" if found else _cpu()
        return cls(runtime or onnxruntime.__version__, cpu, threads)

    @property
    def title(self) -> str:
        """The name of the runtime, without its version; a version alone is one of ONNX Runtime."""
        return ONNX_RUNTIME if self.runtime[:1].isdigit() else self.runtime.partition(" ")[0]

    @property
    def described(self) -> str:
        """The runtime with its name."""
        return f"{ONNX_RUNTIME} {self.runtime}" if self.title == ONNX_RUNTIME else self.runtime

    @property
    def key(self) -> str:
        """The machine as a part of a file name."""
        words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.runtime} {self.cpu}").strip("-").lower()
        return f"{words}-{self.threads}"


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the CPU."""
    lines = _lines(cpuinfo)
    if not lines:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _lines(file: Path) -> list[str]:
    """Return the lines of a file of the system; none if there is no such file."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def folder() -> Path:
    """Return the cache folder."""
    named, cache = os.environ.get(FOLDER), os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named)
    try:
        absolute = cache and Path(cache).is_absolute()  # the XDG specification ignores others
        return (Path(cache) if cache and absolute else Path.home() / ".cache") / "requant"
    except RuntimeError:  # the user has no home directory
        return Path(tempfile.gettempdir()) / "requant"


def forgotten(error: object) -> None:
    """Note on the logger ``requant`` that a file of the cache cannot be used, and is made anew.

    Each file is noted once per process.
    """
    if str(error) not in _NOTED:
        _NOTED.add(str(error))
        logging.getLogger("requant").warning("requant: %s; the cache begins anew", error)


_NOTED: set[str] = set()
FLAGS = ("avx2", "avx512bw", "avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8", "asimddp", "i8mm")
"""The CPU features that decide between the runtime's integer kernels, by their Linux names."""


def flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return which of `FLAGS` this CPU has; empty if the system does not tell."""
    found = {
        word for line in _lines(cpuinfo) if line.lower().startswith(("flags", "features")) for word in line.split()
    }
    return tuple(flag for flag in FLAGS if flag in found)


def physical_cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the number of cores that this process may use; that of hardware threads if the system does not tell."""
    cores, allowed = set(), _allowed()
    for cpu in allowed:
        try:
            cores.add((topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="utf-8"))
        except OSError:
            return len(allowed)
    return len(cores)


def _allowed() -> Sequence[int]:
    """Return the indices of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)
