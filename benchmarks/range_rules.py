"""The SQNR of each range rule, on real models with real data.

    python -m benchmarks.range_rules --kit FOLDER [--task NAME ...] [--calib 32] [--items 16] [--symmetric]
        [--bits 8] [--json]

The kit is a folder with a module `realkit`. Its `TASKS` have a float model, calibration feeds and evaluation feeds,
which never overlap. Each model is simplified and observed once, with histograms. Then every rule chooses the ranges of
all tensors that could become uint8. Three tables show the SQNR in dB on the evaluation feeds:

1. Outputs: the SQNR of the worst output. All operators that can be int8 are int8; biases are not corrected. Tensors in
   bodies of control flow have no histogram: they use the minmax range, except with mean_minmax. The table exists
   only for 8 bits.
2. Tensors: each tensor is quantized alone. The table shows the gain of each rule over minmax (mean, median, least and
   most, in dB), and the number of tensors with a gain or a loss above 0.05 dB.
3. Heavy-tailed tensors: the same for tensors with an observed value more than 20 standard deviations from the mean, or
   with a kurtosis above 50 (a normal distribution has 3, a Laplace distribution 6). Both come from the histogram.

The last table shows the time of each rule for one tensor.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx_ir as ir
from rich.console import Console
from rich.table import Table

from benchmarks.tables import plain_table
from requant.calibration import Histogram, Observations, observe, open_session, parse_rule
from requant.calibration.model.session import Array
from requant.calibration.rules.precision import Precision
from requant.calibration.rules.ranges import CANDIDATES, Range
from requant.quantize.accuracy.sqnr import decibels, powers
from requant.quantize.model.files import load_model, serialize
from requant.quantize.placement.rules import choose
from requant.quantize.runtime.inputs import open_data
from requant.quantize.runtime.isa import resolve
from requant.quantize.runtime.progress import silent
from requant.quantize.steps.simplify import simplify
from requant.transforms.int8.insert_qdq import insert_qdq
from requant.transforms.int8.qparams import Scheme

Feed = Mapping[str, Array]

RULES = (*CANDIDATES, "auto")
SIGMAS, KURTOSIS = 20.0, 50.0
EVEN_DB = 0.05
"""A smaller difference between two rules is ignored."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The tail of the distribution of a tensor.

    Attributes:
        sigmas: The largest distance of a value from the mean, in standard deviations.
        kurtosis: The fourth central moment over the square of the second.
    """

    sigmas: float
    kurtosis: float

    @property
    def heavy(self) -> bool:
        """Whether the tensor is in the third table."""
        return self.sigmas > SIGMAS or self.kurtosis > KURTOSIS

    @classmethod
    def of(cls, histogram: Histogram) -> Tail:
        """Return the tail of a histogram. Each value counts as the middle of its bin."""
        edges, share = histogram.edges, histogram.counts / histogram.count
        middle = (edges[1:] + edges[:-1]) / 2
        away = middle - share @ middle
        variance = float(share @ away**2)
        if not variance:
            return cls(0.0, 0.0)
        return cls(float(np.abs(away).max() / variance**0.5), float(share @ away**4) / variance**2)


@dataclass(frozen=True, slots=True)
class Row:
    """The results for one tensor.

    Attributes:
        task: The task of the model.
        tensor: The name of the tensor.
        tail: The tail of its distribution.
        ranges: The range by rule.
        sqnr: The SQNR on the evaluation feeds by rule, in dB.
    """

    task: str
    tensor: str
    tail: Tail
    ranges: dict[str, Range]
    sqnr: dict[str, float]


@dataclass(slots=True)
class Figures:
    """All results.

    Attributes:
        outputs: The SQNR of the worst output by task and rule, in dB.
        rows: The results of the tensors.
        milliseconds: The times of each rule, one per tensor.
    """

    outputs: dict[str, dict[str, float]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    milliseconds: dict[str, list[float]] = field(default_factory=lambda: {rule: [] for rule in RULES})


def ranges_of(seen: Observations, rule: str, precision: Precision, milliseconds: list[float]) -> dict[str, Range]:
    """Return the range of each tensor that had values, and append the times to `milliseconds`."""
    chosen, ranges = parse_rule(rule), {}
    for name, statistic in seen.ranges.items():
        start = time.perf_counter()
        ranges[name] = chosen(statistic, seen.runs.get(name), precision)
        if isinstance(statistic, Histogram):
            milliseconds.append(1e3 * (time.perf_counter() - start))
    return ranges


def int8_model(simple: ir.Model, ranges: Mapping[str, Range], precision: Precision) -> ir.Model:
    """Return a copy in which every operator that can be int8 is int8."""
    scheme = Scheme(symmetric=precision.symmetric)
    missing = {name: "has no values" for name in choose(simple).quantized if name not in ranges}
    plan = choose(simple, ranges=ranges, kept_float=missing)
    params = {name: scheme.activation_params(*ranges[name]) for name in plan.observed}
    model = simple.clone()
    insert_qdq(model, plan=plan, qparams=params, scheme=scheme, exact=resolve("auto").exact)
    return model


def runner(model: ir.Model, tensors: Sequence[str] = ()) -> Callable[[Feed], dict[str, Array]]:
    """Return a function that runs a model on a feed, and returns its float outputs and the given inner tensors."""
    copy = model.clone()
    values = ir.convenience.create_value_mapping(copy.graph, include_subgraphs=False)
    outputs = {value.name for value in copy.graph.outputs}
    inputs = {value.name for value in copy.graph.inputs}
    copy.graph.outputs.extend(values[name] for name in tensors if name not in outputs | inputs)
    session = open_session(serialize(copy))
    names = [output.name for output in session.get_outputs() if output.type == "tensor(float)"]

    def run(feed: Feed) -> dict[str, Array]:
        values_of_feed = dict(zip(names, session.run(names, feed), strict=True))
        return values_of_feed | {name: feed[name] for name in tensors if name in inputs}

    return run


class Noise:
    """The sums of squares of the signal and of the noise, by tensor."""

    def __init__(self) -> None:
        """Start without tensors."""
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, exact: Array, other: Array) -> None:
        """Add one array."""
        more, before = powers(exact, other), self.sums.get(name, (0.0, 0.0))
        self.sums[name] = before[0] + more[0], before[1] + more[1]

    def sqnr(self, name: str) -> float:
        """Return the SQNR of a tensor in dB."""
        return decibels(*self.sums[name])


def measure(name: str, task: Any, calib: int, items: int, precision: Precision, figures: Figures) -> None:
    """Measure one model with every rule."""
    simple = simplify(load_model(task.model), silent).model
    source = open_data(task.model, list(task.calib_feeds(calib)))
    seen = observe(serialize(simple), choose(simple).quantized, source, histogram=True)
    ranges = {rule: ranges_of(seen, rule, precision, figures.milliseconds[rule]) for rule in RULES}
    outputs, inner = {rule: Noise() for rule in RULES}, {rule: Noise() for rule in RULES}
    built = RULES if precision.bits == 8 else ()
    models = {rule: runner(int8_model(simple, ranges[rule], precision)) for rule in built}
    histograms = {tensor: seen_ for tensor, seen_ in seen.ranges.items() if isinstance(seen_, Histogram)}
    reference, tapped = runner(simple), runner(simple, tuple(histograms))
    for feed in task.eval_feeds(items):
        exact, values = reference(feed), tapped(feed)
        for rule, model in models.items():
            for output, value in model(feed).items():
                outputs[rule].add(output, exact[output], value)
        for rule in RULES:
            for tensor in histograms:
                inner[rule].add(tensor, values[tensor], rounded(values[tensor], *ranges[rule][tensor], precision))
    if models:
        figures.outputs[name] = {rule: min(map(outputs[rule].sqnr, outputs[rule].sums)) for rule in RULES}
    for tensor, histogram in histograms.items():
        sqnr = {rule: inner[rule].sqnr(tensor) for rule in RULES}
        chosen = {rule: ranges[rule][tensor] for rule in RULES}
        figures.rows.append(Row(name, tensor, Tail.of(histogram), chosen, sqnr))


def rounded(values: Array, lo: float, hi: float, precision: Precision) -> Array:
    """Return a quantized and dequantized tensor."""
    scale, zero = precision.params(lo, hi)
    stored = np.rint(np.asarray(values, np.float32) / np.float32(scale))
    return np.asarray(np.clip(stored, -zero, precision.top - zero, out=stored) * np.float32(scale))


def output_table(figures: Figures) -> Table:
    """Return the first table."""
    columns = ("", *(rule.replace("percentile", "p") for rule in RULES))
    table = plain_table("SQNR of the worst output, dB", columns, no_wrap=columns)
    for task, found in figures.outputs.items():
        table.add_row(task, *(f"{found[rule]:.1f}" for rule in RULES))
    gains = [
        statistics.mean(found[rule] - found["minmax"] for found in figures.outputs.values() if found["minmax"] < np.inf)
        for rule in RULES
    ]
    table.add_row("mean over minmax", *(f"{gain:+.1f}" for gain in gains))
    return table


def tensor_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the second or the third table."""
    gains_columns = ("gain over minmax: mean", "median", "least", "most")
    columns = ("", "mean SQNR, dB", *gains_columns, "better", "worse", "best rule")
    table = plain_table(f"{title}: {len(rows)}", columns, no_wrap=columns)
    finite = [row for row in rows if all(np.isfinite(list(row.sqnr.values())))]
    for rule in RULES if finite else ():
        gains = [row.sqnr[rule] - row.sqnr["minmax"] for row in finite]
        best = sum(row.sqnr[rule] >= max(row.sqnr.values()) - EVEN_DB for row in finite)
        counts = sum(gain > EVEN_DB for gain in gains), sum(gain < -EVEN_DB for gain in gains), best
        spread = statistics.mean(gains), statistics.median(gains), min(gains), max(gains)
        mean = statistics.mean(row.sqnr[rule] for row in finite)
        table.add_row(rule, f"{mean:.1f}", *(f"{gain:+.2f}" for gain in spread), *map(str, counts))
    return table


def time_table(figures: Figures) -> Table:
    """Return the table of times."""
    table = plain_table("milliseconds for one tensor", ("", "least", "median", "most"))
    for rule, taken in figures.milliseconds.items():
        table.add_row(rule, *(f"{figure:.2f}" for figure in (min(taken), statistics.median(taken), max(taken))))
    return table


def as_json(figures: Figures) -> dict[str, Any]:
    """Return the figures as JSON values."""
    rows = [
        {
            "task": row.task,
            "tensor": row.tensor,
            "sigmas": row.tail.sigmas,
            "kurtosis": row.tail.kurtosis,
            "ranges": row.ranges,
            "sqnr": row.sqnr,
        }
        for row in figures.rows
    ]
    return {"outputs": figures.outputs, "tensors": rows, "milliseconds": figures.milliseconds}


@click.command()
@click.option("--kit", type=click.Path(path_type=Path, exists=True, file_okay=False), envvar="REQUANT_KIT")
@click.option("--task", "tasks", multiple=True, help="A task of the kit; repeatable. [default: all]")
@click.option("--calib", default=32, show_default=True, help="Number of calibration feeds.")
@click.option("--items", default=16, show_default=True, help="Number of evaluation feeds.")
@click.option("--symmetric", is_flag=True, help="The zero point of activations is the middle of the type.")
@click.option("--bits", type=click.IntRange(2, 16), default=8, show_default=True, help="Bits of the activations.")
@click.option("--json", "json_", is_flag=True)
def main(  # one parameter per option
    kit: Path | None, tasks: tuple[str, ...], calib: int, items: int, symmetric: bool, bits: int, json_: bool
) -> None:
    """Measure and print the tables."""
    kit = kit or Path(__file__).resolve().parents[2] / "shared" / "realkit"
    if not (kit / "realkit.py").is_file():
        raise click.ClickException(f"{kit}: not a kit of real models; give the folder with --kit")
    sys.path.insert(0, os.fspath(kit))
    from realkit import TASKS  # type: ignore[import-not-found]

    console, figures = Console(width=130, stderr=json_), Figures()
    for name in tasks or TASKS:
        with console.status(name):
            measure(name, TASKS[name], calib, items, Precision(bits, symmetric), figures)
    if json_:
        json.dump(as_json(figures), sys.stdout, indent=2)
        return
    heavy = [row for row in figures.rows if row.tail.heavy]
    tables = tensor_table("Tensors", figures.rows), tensor_table("Heavy-tailed tensors", heavy)
    for table in (*([output_table(figures)] if figures.outputs else []), *tables, time_table(figures)):
        console.print(table, "")
    for row in heavy:
        gains = (f"{rule} {row.sqnr[rule] - row.sqnr['minmax']:+.1f}" for rule in ("mse", "entropy"))
        tail = f"{row.tail.sigmas:.0f} sigma, kurtosis {row.tail.kurtosis:.0f}"
        console.print(f"{row.task} {row.tensor}: {tail}; minmax {row.sqnr['minmax']:.1f} dB, {', '.join(gains)}")


if __name__ == "__main__":
    main()
