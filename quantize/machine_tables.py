"""What was measured on one machine, for people: short tables on stderr."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .bench import Bench
from .compile import Change, Compiled
from .runtime.settings import Settings


def print_compiled(found: Compiled) -> None:
    """Print what `compile_model` did."""
    console = Console(stderr=True, highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    target = found.target
    table.add_row("output", f"{escape(found.output)} ({found.format})")
    cpu = ", ".join(target.cpu) or "CPU features unknown"
    table.add_row("compiled for", f"ONNX Runtime {target.runtime}, {target.machine}: {cpu}")
    table.add_row("probes", ", ".join(found.probes) or "none: nothing in the graph depends on the CPU")
    if found.identical is None:
        table.add_row("outputs", "not compared: no inputs are known that the model runs on; give --data")
    elif found.identical:
        table.add_row("outputs", f"equal bit for bit on {found.samples} samples of {escape(found.data)}")
    else:
        for name, value in found.sqnr_db.items():
            shown = f"{value:.1f} dB" if math.isfinite(value) else "no difference" if value > 0 else "not finite"
            table.add_row("SQNR", f"{shown} at {escape(name)}, on {found.samples} samples of {escape(found.data)}")
    table.add_row("load", _change(found.load))
    if found.run is not None:
        table.add_row(f"run, {found.threads or 'default'} threads", _change(found.run))
    table.add_row("size", f"{found.bytes_before / 1e6:.2f} -> {found.bytes_after / 1e6:.2f} MB")
    console.print(table)
    console.print("load it with")
    _print_code(console, found.snippet)


def print_bench(found: Bench) -> None:
    """Print what `bench_model` measured."""
    console = Console(stderr=True, highlight=False)
    threads = "the runtime's threads" if found.threads == 0 else f"{found.threads} thread(s)"
    console.print(
        f"{escape(found.model)}, batch {found.batch}, {threads}, {escape(found.data)}:\n"
        f"{found.milliseconds:.3f} ms (median {found.median_ms:.3f} ms of {found.runs} runs), "
        f"{found.rate:.0f} items/s",
        soft_wrap=True,
    )
    if found.settings is not None:
        _print_settings(console, found.settings)


def _print_settings(console: Console, found: Settings) -> None:
    """Print what was tried and what to use."""
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
    console.print(f"all together: {found.default_ms:.3f} -> {found.best_ms:.3f} ms: {found.speedup:.2f}x")
    _print_code(console, found.snippet)


def _print_code(console: Console, code: str) -> None:
    """Print code so that it can be copied."""
    console.print(escape(code), soft_wrap=True)


def _change(found: Change) -> str:
    """Write a time before and after."""
    return (
        f"{found.before_ms:.3f} -> {found.after_ms:.3f} ms: {found.speedup:.2f}x "
        f"(median {found.before_median_ms:.3f} -> {found.after_median_ms:.3f} ms)"
    )
