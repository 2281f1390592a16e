"""How a model is run over data: batches, workers, memory and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from .. import RequantError
from ..system.given import checked_integer, normalise_fields
from ..system.numbers import DIGITS

HISTOGRAM_VALUES = 1 << 14
"""The most values of a tensor that a histogram counts per sample: 8 times the number of bins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a model is run over data. Executor, workers and shards do not change a bit of the statistics.

    The batch can change the last bits, because kernels round differently for other batches. So can a memory limit that
    splits the tensors into groups, because the runtime then fuses operators differently.

    Attributes:
        batch: Samples per run. Consecutive samples of equal shape are stacked if the model's first axes are free.
        executor: An executor for the runs, or a function that makes one and is called again if the executor breaks;
            None for threads of this process. Workers in other processes open model and data by their paths.
        workers: The number of parallel runs; None for the executor's own number, or one per CPU.
        first: The position of the first sample in the whole data, if the data come in parts.
        memory_limit: The most memory of the process, in bytes; None for a quarter of the machine's memory.
        strict: Whether NaN or infinity in an output of the model is an error. In inner tensors it is only recorded.
        shard: ``(i, n)``: run only every n-th batch, starting with the i-th, 1 <= i <= n.
        scratch: A folder that all workers can read, for a model without a file; None for the system's temporary folder.
        checkpoint: A file for intermediate results; None for no file. It is written from time to time, read when the
            same run starts again, and removed at the end. A run is the same if model, settings and data are the same.
            Files of data are compared by size and time. Of Python objects and of FILE.py:NAME only the first sample and
            the length are compared: remove the checkpoint if other samples change.
        histogram_values: The most values of a tensor that a histogram counts per sample, in addition to the tails; None
            for all. From a larger tensor an evenly strided part is counted. Extremes and tails stay exact.
        kept: Called at the end with the path of the complete checkpoint. The same run then returns the stored result at
            once. The caller removes the file after it has saved the result. With None the run removes the file.
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
        """Refuse values of another type, and numbers out of range.

        Raises:
            RequantError: A value is of another type, or a number is out of range.
        """
        normalise_fields(self)
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
        if len(self.shard) != 2:
            raise RequantError(f"a shard has two numbers, its own and how many there are, not {len(self.shard)}")
        part, parts = (checked_integer(number, "a shard", 1) for number in self.shard)
        if not part <= parts < 10**DIGITS:
            raise RequantError(f"invalid shard {part}/{parts}: write i/n with 1 <= i <= n < 10^{DIGITS}")


def quarter_of_memory() -> int:
    """Return a quarter of the machine's memory, or of the process's limit if it is lower, in bytes.

    If the memory is unknown, return 1 GiB.
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
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
