"""How a model is run over data: batches, workers, memory, and what becomes of an interrupted run."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from .. import RequantError

HISTOGRAM_VALUES = 1 << 14
"""Values of a tensor that a histogram counts per sample: eight times as many as it has bins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a model is run over data. Where and when the runs happen changes no bit of the statistics.

    The batch may change the last bits, because kernels round another batch in another way, and so may a memory limit
    that splits the tensors into groups, because the runtime then fuses operators in another way.

    Attributes:
        batch: Samples per run; neighbours of one shape are stacked where the model's first axes are free.
        executor: Where the runs happen: an executor, or a function that makes one and is called again when that one
            breaks; None for threads of this process. What runs elsewhere opens model and data there, by their paths.
        workers: Runs at a time; None for as many as the executor does, or one per CPU.
        first: Position of the first sample, where the data come in parts and these are not the first ones.
        memory_limit: Bytes that the process should stay below; None for a quarter of the machine's memory.
        strict: Whether NaN or infinity in an output of the model is an error. Of inner tensors that is noted.
        shard: ``(i, n)``: run only every n-th batch, beginning with the i-th, 1 <= i <= n.
        scratch: A folder that all workers see, for a model that exists in memory alone; None for the system's folder of
            temporary files.
        checkpoint: A file that holds what is done so far, written now and then, found again when the same run starts
            anew, and removed when it ends; None for none. The same run is one of the same model, settings and data:
            what a path names counts by the sizes and times of all its files. Of Python objects, and of what the code of
            FILE.py:NAME reads, only the first sample and the length can be checked: remove the file if others change.
        histogram_values: How many values of a tensor a histogram counts per sample, besides the tails; None for all. Of
            a tensor with more an evenly strided part is counted. Extremes and tails are exact all the same.
        kept: Called in the end with the path of the checkpoint, which then holds all that was seen and gives it at once
            to a run that is the same; whoever has stored the result removes it. None removes it at the end of the run.
    """

    batch: int = 1
    executor: Executor | Callable[[], Executor] | None = None
    workers: int | None = None
    first: int = 0
    memory_limit: int | None = None
    strict: bool = True
    shard: tuple[int, int] = (1, 1)
    scratch: Path | None = None
    checkpoint: Path | None = None
    histogram_values: int | None = HISTOGRAM_VALUES
    kept: Callable[[Path], object] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be done.

        Raises:
            RequantError: A number is out of range.
        """
        for name, number in (
            ("batch", self.batch),
            ("workers", self.workers),
            ("memory limit", self.memory_limit),
            ("histogram values", self.histogram_values),
        ):
            if number is not None and number < 1:
                raise RequantError(f"{name} must be at least 1, not {number}")
        if self.first < 0:
            raise RequantError(f"the first position must be at least 0, not {self.first}")
        part, parts = self.shard
        if not 1 <= part <= parts:
            raise RequantError(f"no shard {part}/{parts}: write i/n with 1 <= i <= n")


def quarter_of_memory() -> int:
    """Return a quarter of the machine's memory, or of the process's own limit where that is lower, in bytes.

    Where the system does not say how much there is, it is 1 GiB.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows has no such function
        total = 2**32
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total // 4


def cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
