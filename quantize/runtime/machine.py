"""This machine: CPU name, instruction sets, cores, runtime version, the cache folder."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = "REQUANT_CACHE"
"""The environment variable that names another folder than ``~/.cache/requant``."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What costs are of.

    Attributes:
        runtime: The version of the runtime.
        cpu: The CPU as the system names it, and which instructions for products it has.
        threads: Threads inside one operator.
    """

    runtime: str
    cpu: str
    threads: int

    @classmethod
    def here(cls, threads: int) -> Machine:
        """Return this machine."""
        import onnxruntime

        found = flags()
        # one name may stand for several CPUs, as on virtual machines
        return cls(onnxruntime.__version__, f"{_cpu()} ({' '.join(found)})" if found else _cpu(), threads)

    @property
    def key(self) -> str:
        """A name for files."""
        words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.runtime} {self.cpu}").strip("-").lower()
        return f"{words}-{self.threads}"


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the CPU."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def folder() -> Path:
    """Return where costs are kept."""
    named, cache = os.environ.get(FOLDER), os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named)
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "requant"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "requant"


FLAGS = ("avx2", "avx512bw", "avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8", "asimddp", "i8mm")
"""The CPU features by which the runtime chooses its integer kernels, as Linux names them."""


def flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return which of `FLAGS` this CPU has, for display; empty where the system does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    found = {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}
    return tuple(flag for flag in FLAGS if flag in found)


def logical_cores() -> int:
    """Return how many threads the system lets this process run at a time."""
    return len(_allowed())


def physical_cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return how many cores those threads are on; `logical_cores` where the system does not say."""
    cores = set()
    for cpu in _allowed():
        try:
            cores.add((topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="utf-8"))
        except OSError:
            return logical_cores()
    return len(cores)


def _allowed() -> Sequence[int]:
    """Return the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)
