"""How close the kernels come to the peaks of this machine: multiply-accumulates per second, and bytes per second.

    python -m benchmarks.roofline [--only NAME] [--batch 1] [--models FOLDER] [--json]
    python -m benchmarks.roofline --peaks

The peaks are measured on one thread. The compute peak is the rate of the fastest of several large products and
convolutions, in float and in int8, native operators among them. The bandwidth peak is the rate of the fastest copy or
sum of an array. It is measured for several sizes, because a cache is faster than memory.

The time bound of a kernel is the longer of two times: its multiply-accumulates at the compute peak, and the bytes of
its inputs, weights and outputs at the bandwidth for that many bytes (Williams, Waterman and Patterson, "Roofline", CACM
52(4), 2009). The bound over the measured time is the share of the peak that the kernel reaches.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import CONTENDERS
from benchmarks.kernels import Convolution, Product
from benchmarks.measurements import load_feeds
from benchmarks.options import chosen
from benchmarks.speed import Setting, make, prepare
from benchmarks.speed_rows import GOALS
from benchmarks.tables import plain_table

if TYPE_CHECKING:
    from requant.quantize.runtime.profile import GraphProfile, KernelRun

PRODUCTS = (Product(256, 1024, 1024), Product(512, 1024, 4096), Product(512, 4096, 1024))
CONVOLUTIONS = (
    Convolution(64, 56, 3),
    Convolution(256, 28, 3),
    Convolution(512, 14, 3),
    Convolution(512, 28, 1),
    Convolution(1024, 14, 1),
)
SIZES = tuple(2**power for power in range(18, 29))
"""The working sets for which bandwidth is measured, in bytes: 256 KB to 256 MB."""
ROUNDS = 3
"""How often each product and convolution is measured, because other processes may disturb one measurement."""
REPEATS, LEAST = 7, 0.01  # the number of time measurements, and the seconds of each
VIEWS = frozenset("Reshape Squeeze Unsqueeze Flatten Identity".split())
"""Operators that move no data: they only change the shape."""
PARTIAL = frozenset("Gather Slice GatherElements GatherND".split())
"""Operators that read only as many bytes as they write."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peaks of this machine with one thread.

    Attributes:
        int8: G multiply-accumulates per second of 8-bit integers.
        float32: G multiply-accumulates per second of floats.
        bandwidth: Bytes of the working set and GB/s, in ascending order of bytes.
        kernels: G multiply-accumulates per second of each operator, at its best shape.
    """

    int8: float
    float32: float
    bandwidth: tuple[tuple[int, float], ...]
    kernels: Mapping[str, float] = field(default_factory=dict)

    def rate(self, size: int) -> float:
        """Return the highest GB/s of the working sets of at least `size` bytes; if there is none, of the largest."""
        return max((rate for bytes_, rate in self.bandwidth if bytes_ >= size), default=self.bandwidth[-1][1])


@dataclass(frozen=True, slots=True)
class Share:
    """The measured time and the bound of some kernels.

    Attributes:
        name: An operator with its domain, or a model.
        kernels: The number of kernels.
        microseconds: The measured time.
        bound: The shortest possible time, in microseconds.
        compute: The time of the multiply-accumulates at the peak, in microseconds.
        macs: The number of multiply-accumulates.
    """

    name: str
    kernels: int
    microseconds: float
    bound: float
    compute: float
    macs: int

    @property
    def reached(self) -> float:
        """The bound over the measured time, 0..1."""
        return self.bound / self.microseconds if self.microseconds else 0.0


# ------------------------------------------------------------------------------------------------------ peaks


def compute_peaks(*, integer: bool, times: int) -> dict[str, float]:
    """Return the highest G multiply-accumulates per second of each operator."""
    from requant.quantize.kernels.library import kernels
    from requant.quantize.runtime.profile import profiled

    form = "int8" if integer else "float"
    cases = [shape.case(form) for shape in (*PRODUCTS, *CONVOLUTIONS)]
    if integer and not isinstance(kernels(), str):
        cases += [shape.case("native") for shape in CONVOLUTIONS]
    rates: dict[str, float] = defaultdict(float)
    for model, feed in cases * ROUNDS:
        for run in profiled(model.SerializeToString(), feed, threads=1, times=times).runs:
            if run.macs:
                rates[run.op] = max(rates[run.op], run.macs / run.microseconds / 1e3)
    return rates


def bandwidth(size: int) -> float:
    """Return the GB/s of the faster of a copy and a sum. Each of them touches `size` bytes."""
    source, target = np.ones(size // 8, np.float32), np.ones(size // 8, np.float32)
    whole = np.ones(size // 4, np.float32)
    return size / 1e9 / min(least_time(lambda: np.copyto(target, source)), least_time(whole.sum))


def describe_processor() -> str:
    """Return the name of the processor and its instructions for integer products; ``unknown`` without a name."""
    from requant.quantize.runtime.machine import flags

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return ", ".join([name, *flags()])


def least_time(work: Callable[[], object]) -> float:
    """Return the minimum seconds of one call. Short calls are repeated, because the clock is coarse."""
    work()
    best, count = math.inf, 1
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(count):
            work()
        each = (time.perf_counter() - began) / count
        best = min(best, each)
        count = max(1, int(LEAST / best))
    return best


def measure_peaks(times: int) -> Peaks:
    """Measure this machine."""
    int8, float32 = (compute_peaks(integer=integer, times=times) for integer in (True, False))
    rates = tuple((size, bandwidth(size)) for size in SIZES)
    return Peaks(max(int8.values()), max(float32.values()), rates, {**int8, **float32})


# ---------------------------------------------------------------------------------------------------- kernels


def moved(run: KernelRun, weights: Sequence[tuple[tuple[int, ...], str, int]]) -> int:
    """Return the bytes that a kernel must move at least: its inputs, its weights and its outputs.

    Args:
        run: The kernel.
        weights: Shape, element type and bytes of the constant inputs. The profile does not show packed weights.
    """
    if run.op in VIEWS:
        return 0
    written = sum(map(size_of, run.outputs, run.writes))
    if run.op in PARTIAL:
        return 2 * written
    shown = Counter(zip(run.inputs, run.reads, strict=True)) - Counter((shape, kind) for shape, kind, _ in weights)
    read = sum(size_of(shape, kind) * count for (shape, kind), count in shown.items())
    return read + sum(size for *_, size in weights) + written


BYTES = {"float": 4, "double": 8, "float16": 2, "bfloat16": 2, "bool": 1, "int64": 8, "uint64": 8} | {
    f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32)
}
"""Bytes of an element, by the name of its type in the profile."""


def size_of(shape: tuple[int, ...], kind: str) -> int:
    """Return the bytes of a tensor; 0 for an unknown type."""
    return math.prod(shape) * BYTES.get(kind, 0)


def bound(run: KernelRun, size: int, peaks: Peaks) -> tuple[float, float]:
    """Return the shortest possible microseconds of a kernel that moves `size` bytes, and of its products alone."""
    compute = run.macs / (peaks.int8 if run.integer else peaks.float32) / 1e3
    return max(compute, size / peaks.rate(size) / 1e3), compute


def shares(profile: GraphProfile, peaks: Peaks) -> list[Share]:
    """Return times and bounds of the kernels of a model, by operator; the longest time comes first."""
    nodes = {node.name: node for node in profile.graph.all_nodes()}
    groups: dict[str, list[Share]] = defaultdict(list)
    for run in profile.runs:
        node = nodes.get(run.node)
        constants = [value.const_value for value in node.inputs if value is not None] if node is not None else []
        weights = [
            (tuple(int(d) for d in tensor.shape), tensor.dtype.name.lower(), tensor.nbytes)  # type: ignore[arg-type]
            for tensor in constants
            if tensor is not None
        ]
        least, compute = bound(run, moved(run, weights), peaks)
        name = f"{run.domain.removeprefix('com.microsoft.')}:{run.op}" if run.domain else run.op
        groups[name].append(Share(name, 1, run.microseconds, least, compute, run.macs))
    return sorted((summed(name, group) for name, group in groups.items()), key=lambda share: -share.microseconds)


def summed(name: str, parts: Iterable[Share]) -> Share:
    """Return the sum of several shares."""
    parts = list(parts)
    return Share(
        name,
        sum(part.kernels for part in parts),
        sum(part.microseconds for part in parts),
        sum(part.bound for part in parts),
        sum(part.compute for part in parts),
        sum(part.macs for part in parts),
    )


def profile_pair(setting: Setting, model: str, batch: int, times: int) -> dict[str, GraphProfile]:
    """Profile the float and the INT8 model of an architecture.

    Raises:
        click.ClickException: The architecture cannot be quantized.
    """
    from requant.quantize.runtime.profile import profiled

    file, _ = prepare(setting, model, batch)
    int8, result = make(setting, setting.folder / model, "ours", batch)
    if "error" in result:
        raise click.ClickException(f"{model}: {result['error']}")
    feed = load_feeds(str(file))[0]
    paths = {"float": setting.folder / model / "float.onnx", "int8": int8}
    return {name: profiled(path, feed, threads=1, times=times) for name, path in paths.items()}


# --------------------------------------------------------------------------------------------------- printing


def peaks_table(peaks: Peaks) -> Table:
    """Return the peaks as a table."""
    table = Table(title="peaks of one thread", box=None, pad_edge=False, title_justify="left", show_header=False)
    table.add_row("int8, G MAC/s", f"{peaks.int8:.0f}")
    table.add_row("float32, G MAC/s", f"{peaks.float32:.0f}")
    for name, rate in peaks.kernels.items():
        table.add_row(f"  {name}", f"{rate:.0f}")
    for size, rate in peaks.bandwidth:
        table.add_row(f"{size >> 10} KB, GB/s" if size < 2**20 else f"{size >> 20} MB, GB/s", f"{rate:.0f}")
    return table


def shares_table(title: str, found: Sequence[Share], least: float) -> Table:
    """Return times and bounds as a table. Operators below the share `least` of the time are summed in one row."""
    columns = ("operator", "kernels", "us", "share", "G MAC/s", "bound, us", "reached", "bound by")
    table = plain_table(title, columns, left=("operator",), no_wrap=columns)
    whole = summed("whole", found)
    rows = [share for share in found if share.microseconds >= least * whole.microseconds]
    rest = found[len(rows) :]
    for share in [*rows, *([summed(f"{len(rest)} others", rest)] if rest else []), whole]:
        rate = f"{share.macs / share.microseconds / 1e3:.0f}" if share.macs else ""
        by = "products" if 2 * share.compute > share.bound else "bytes" if share.bound else ""
        table.add_row(
            share.name,
            str(share.kernels),
            f"{share.microseconds:.0f}",
            f"{share.microseconds / whole.microseconds:.1%}",
            rate,
            f"{share.bound:.0f}",
            f"{share.reached:.0%}",
            by,
        )
    return table


@click.command()
@click.option("--only", default="", help="Architectures, separated by commas. [default: all]")
@click.option("--batch", default=1, show_default=True)
@click.option(
    "--models", type=click.Path(path_type=Path, file_okay=False), help="Keep the models in this folder; reuse them."
)
@click.option("--remake", default="ours", show_default=True, help="Contenders whose kept models are made again.")
@click.option("--times", default=20, show_default=True, help="Runs under the profiler; the minimum time counts.")
@click.option("--least", default=0.005, show_default=True, help="Sum up operators below this share of the time.")
@click.option("--peaks", "peaks_only", is_flag=True, help="Measure only the peaks of the machine.")
@click.option("--json", "as_json", is_flag=True)
def main(
    only: str, batch: int, models: Path | None, remake: str, times: int, least: float, peaks_only: bool, as_json: bool
) -> None:
    """Compare the kernels of the generated architectures with the peaks of this machine."""
    names = [] if peaks_only else chosen(only, GOALS, "architecture") or list(GOALS)
    anew = frozenset(chosen(remake, CONTENDERS, "contender")) if models is not None else frozenset()
    processor, peaks = describe_processor(), measure_peaks(times)
    console = Console(width=120)
    if not as_json:
        console.print(processor, highlight=False)
        console.print(peaks_table(peaks))
    found: dict[str, Any] = {"processor": processor, "peaks": asdict(peaks)}
    with tempfile.TemporaryDirectory() as temporary:
        setting = Setting(models or Path(temporary), CONTENDERS, remake=anew)
        for name in names:
            for kind, profile in profile_pair(setting, name, batch, times).items():
                rows = shares(profile, peaks)
                found[f"{name} {kind}"] = [{**asdict(row), "reached": row.reached} for row in rows]
                if not as_json:
                    console.print()
                    console.print(shares_table(f"{name}, {kind}, batch {batch}", rows, least))
    if as_json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
