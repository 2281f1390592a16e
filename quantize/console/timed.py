"""Results of `requant bench` and `requant compile` as short tables on stderr."""

from __future__ import annotations

import math

from rich.table import Table

from ...system.printable import number_of
from ..kernels.library import Kernels
from ..model.files import size_text
from ..runtime.clock import doubt
from ..runtime.timing import load_name
from ..tools.bench.bench import Bench, Timed
from ..tools.bench.compile import Compiled
from ..tools.bench.compiled_times import Change
from ..tools.bench.profile import BenchProfile
from ..tools.bench.settings import Settings
from .terminal import Terminal, headless, threads_text


def print_compiled(found: Compiled) -> None:
    """Print the result of `compile_model`."""
    console = Terminal()
    table = headless()
    target = found.target
    table.add_row("output", f"{found.output} ({found.format})")
    cpu = ", ".join(target.cpu) or "CPU features unknown"
    table.add_row("compiled for", f"ONNX Runtime {target.runtime}, {target.machine}: {cpu}")
    table.add_row("kernels", _kernels(found))
    table.add_row("probes", ", ".join(found.probes) or "none: the graph does not depend on the CPU")
    if found.identical is None:
        table.add_row("outputs", "not compared")
    elif found.identical:
        table.add_row("outputs", f"equal bit for bit on {number_of(found.samples, 'sample')} of {found.data}")
    else:
        for name, value in found.sqnr_db.items():
            shown = f"{value:.1f} dB" if math.isfinite(value) else "no difference" if value > 0 else "not finite"
            table.add_row("SQNR", f"{shown} at {name}, on {number_of(found.samples, 'sample')} of {found.data}")
    table.add_row("load", _change(found.load))
    if found.run is not None:
        table.add_row(f"run, {threads_text(found.threads)}", _change(found.run))
    table.add_row("size", f"{size_text(found.bytes_before)} -> {size_text(found.bytes_after)}")
    console.print(table)
    console.print("load the model with")
    console.print_code(found.snippet)


def _kernels(found: Compiled) -> str:
    """Return which operators a compiled model has, with the times of all that were tried."""
    tried = ", ".join(f"{form} {milliseconds:.3f} ms" for form, milliseconds in found.tried.items())
    return f"{found.kernels}" + (f" (tried: {tried})" if tried else "")


def print_kernels(found: Kernels) -> None:
    """Print the native operators of this machine, and how programs load them."""
    console = Terminal()
    available = ", ".join(found.available)
    rows = {
        "library": str(found.library),
        "operators": ", ".join(found.operators),
        "isa": f"{found.isa} (of {available})",
    }
    table = headless()
    for name, value in {**rows, **found.lines}.items():
        table.add_row(name, value)
    console.print(table)


def print_bench(found: Bench) -> None:
    """Print the result of `bench_model`."""
    console = Terminal()
    threads = threads_text(found.threads)
    timed, other = found.timed, found.other
    where = f"{found.runtime}, {load_name(found.batch, None)}, {threads}, {found.data}"
    lines = [f"{timed.model}, {where}:", _times(timed)]
    lines[1] += "" if found.rate is None else f", {found.rate:.0f} items/s"
    if other is not None:
        lines += [f"{other.model}:", _times(other)]
        lines.append(
            f"the first model is {found.ratio:.2f}x as fast by minimum times, {found.median_ratio:.2f}x by median times"
        )
    lines.append(f"load {timed.load_ms:.1f} ms, first run {timed.first_ms:.3f} ms")
    lines += [f"note: {note}" for note in (*found.notes, found.doubt) if note]
    console.print_lines(lines)
    if found.profile is not None:
        _print_profile(console, found.profile)
    if found.settings is not None:
        _print_settings(console, found.settings)


def _times(timed: Timed) -> str:
    """Return the times of a model as text."""
    return f"{timed.milliseconds:.3f} ms (median {timed.median_ms:.3f} ms of {timed.runs} runs)"


def _print_profile(console: Terminal, found: BenchProfile) -> None:
    """Print the times of operators and nodes."""
    console.print()
    console.print(
        f"with the profiler on, {found.runs} runs: {found.milliseconds:.3f} ms, kernels {found.kernels_ms:.3f} ms",
        soft_wrap=True,
    )
    table = _right_aligned("us", "share", "MMAC", "nodes")
    table.add_column("operator", no_wrap=True)
    for each in found.operators:
        macs = f"{each.macs / 1e6:.2f}" if each.macs else ""
        table.add_row(f"{each.microseconds:.0f}", f"{each.share:.1%}", macs, str(each.count), each.kernel)
    console.print(table)
    for title, nodes in (("slowest nodes", found.slowest), ("convolutions, in order of execution", found.convolutions)):
        if not nodes:
            continue
        console.print()
        console.print(title)
        table = _right_aligned("us", "share")
        for column in ("kernel", "node", "problem"):
            table.add_column(column)
        for one in nodes:
            kernel = one.kernel.removeprefix("com.microsoft.")
            table.add_row(f"{one.microseconds:.0f}", f"{one.share:.1%}", kernel, one.node, one.problem)
        console.print(table)


def _right_aligned(*columns: str) -> Table:
    """Return a table with right-aligned columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print_settings(console: Terminal, found: Settings) -> None:
    """Print the tried settings, and code for the best ones."""
    table = Table(box=None, pad_edge=False)
    for column in ("option", "value"):
        table.add_column(column, no_wrap=True)
    for column in ("before ms", "ms", "speed-up"):
        table.add_column(column, justify="right")
    table.add_column("")
    for trial in found.trials:
        told = "taken" if trial.taken else trial.reason
        if trial.before_ms is None or trial.ms is None:
            table.add_row(trial.option, str(trial.value), "", "", "", told)
        else:
            times = f"{trial.before_ms:.3f}", f"{trial.ms:.3f}", f"{trial.speedup:.2f}x"
            table.add_row(trial.option, str(trial.value), *times, told)
    console.print(table)
    console.print(f"all together: {found.default_ms:.3f} -> {found.best_ms:.3f} ms: {found.speedup:.2f}x{_told(found)}")
    console.print_code(found.snippet)


def _told(found: Change | Settings) -> str:
    """Return how unsure a speed-up is, in front of a space; empty if it is sure."""
    text = doubt(found.uncertainty)
    return f" ({text})" if text else ""


def _change(found: Change) -> str:
    """Return a time before and after as text."""
    return (
        f"{found.before_ms:.3f} -> {found.after_ms:.3f} ms: {found.speedup:.2f}x{_told(found)} "
        f"(median {found.before_median_ms:.3f} -> {found.after_median_ms:.3f} ms)"
    )
