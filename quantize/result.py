"""The result of a quantization, as a value and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..calibration.checks.findings import Finding
from ..system.printable import number_of
from ..transforms.int8.reasons import ALREADY, IN_BLOCKS, INTEGER
from .accuracy.float_nodes import FloatNode, float_rows
from .accuracy.frontier import Frontier
from .accuracy.outputs import Accuracy, accuracy_json
from .accuracy.promise import Promise
from .accuracy.shown import as_html, as_text
from .accuracy.sqnr import decibels_text
from .accuracy.verdict import (
    MISSED,
    NO_MORE,
    NOT_INT8,
    SIMPLE,
    Row,
    accuracy_rows,
    answers_lost,
    data_row,
    latency_rows,
    promise_row,
    runtime_rows,
    score_lost,
    score_text,
    size_row,
    verdict,
)
from .job import APART, Placement
from .options.efforts import CORRECTIONS, EFFORTS
from .runtime.runtimes import Identity
from .runtime.timing import Latency, latency_json


@dataclass(frozen=True, slots=True)
class Timed:
    """The least milliseconds of a run in a runtime, at the first batch size.

    Attributes:
        float_ms: The float model.
        output_ms: What was made for this runtime.
        int8: Whether that is an INT8 model.
    """

    float_ms: float
    output_ms: float
    int8: bool


@dataclass(frozen=True, slots=True)
class Given:
    """A given model that computes its ranges at run time, beside the output and beside its own float weights.

    Attributes:
        output: The given model against the output: what changes for who replaces the one by the other.
        own: The float weights against the given model: the error that it has itself.
    """

    output: Accuracy
    own: Accuracy


@dataclass(frozen=True, slots=True)
class Rejected:
    """An INT8 model that was not written.

    Attributes:
        accuracy: Float against it.
        latencies: Float against it at each batch size; at least one.
    """

    accuracy: Accuracy
    latencies: tuple[Latency, ...]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The model that `quantize_model` wrote, with all measurements.

    Attributes:
        output: Path of the model that was written.
        format: ``qdq`` or ``qoperator``.
        calibration: The range rule; ``log`` where a log gave the ranges.
        ranges: The range file and its data; empty where the ranges are from the data.
        data: A description of the data.
        int8_nodes: Nodes that compute or move integers, absorbed nodes included.
        forms: Number of int8 units, by implementation: ``u8->u8``, ``dynamic``, ``weight-only``, ...
        mac_share_int8: Share of the executed multiply-accumulates in integer kernels, 0..1.
        kernels: Executed kernels with multiply-accumulates, by operator.
        float_nodes: Nodes that stayed float.
        relieved: By unit, output channels with a smaller weight range, so that 16-bit sums cannot saturate.
        accuracy: Float against INT8 on the calibration data; with 0 samples if the models were not run.
        latencies: Float against INT8, in alternating runs, at each batch size; empty where the models were not run.
        float_bytes: Size of the float model with its external data.
        int8_bytes: Size of the output with its external data.
        pipeline: The transforms in order, in canonical form, and ``insert_qdq``, which applies the plan.
        notes: Deviations from the request or the plan, a sentence each.
        why_not: Why the output is not the requested INT8 model; empty otherwise.
        rejected: The `accuracy` and the `latencies` of the INT8 model that was not written; None without one.
        findings: Warnings and notes about the calibration data, warnings first.
        placement: How the plan was chosen.
        search: The models that a search has tried; None without a search.
        effort: The effort for accuracy.
        corrections: The names of the corrections that changed the written model.
        seconds: The duration of each step.
        native: The native operators of the output; None without any.
        promise: Whether the output keeps the promise of accuracy; None if it was not judged.
        opponent: The model that INT8 is compared with, in words.
        simple: The third model of the latencies, in words.
        given: How far the given model is from the output, and from its float weights; None where it is a float model.
        runtime: What ran the models: name, version and precision; None where it is not known.
        runtimes: By runtime, the times of the float model and of what was made for it; empty for one runtime.
    """

    output: str
    format: str
    calibration: str
    ranges: str
    data: str
    int8_nodes: int
    forms: Mapping[str, int]
    mac_share_int8: float
    kernels: Mapping[str, int]
    float_nodes: tuple[FloatNode, ...]
    relieved: Mapping[str, int]
    accuracy: Accuracy
    latencies: tuple[Latency, ...]
    float_bytes: int
    int8_bytes: int
    pipeline: str
    notes: tuple[str, ...] = ()
    why_not: str = ""
    rejected: Rejected | None = None
    findings: tuple[Finding, ...] = ()
    placement: Placement = field(default_factory=Placement)
    search: Frontier | None = None
    effort: str = ""
    corrections: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    native: NativeUse | None = None
    promise: Promise | None = None
    opponent: str = "float"
    simple: str = SIMPLE
    given: Given | None = None
    runtime: Identity | None = None
    runtimes: Mapping[str, Timed] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The result in one sentence.

        It begins with ``NOT INT8`` where the float model was written, and with ``NO MORE INT8`` if that holds integers.
        """
        if self.why_not:
            return f"{MISSED if self.missed_goal else NO_MORE if self.held_integers else NOT_INT8}: {self.why_not}"
        if (found := self.search) is not None and found.best is not None:
            scores = score_text(found.before, found.unit), score_text(found.best.value, found.unit)
            lost = score_lost(found.metric, scores, "evaluation data")
        elif self.random:
            lost = "accuracy not measured"
        else:
            lost = answers_lost(self.accuracy, self.measured_on)
        if self.given is not None and self.search is None:
            changed = answers_lost(self.given.output, self.measured_on)
            lost += f" against its float weights, {changed} against the given model"
        text = verdict(self.latencies, (self.float_bytes, self.int8_bytes), lost, self.simple)
        alone = " and ".join(self._alone())
        return f"{text}; without the native library {alone}" if alone else text

    def _alone(self) -> Iterator[str]:
        """Yield what is worse without the native library: the time, and a missed promise of accuracy."""
        if self.native is None:
            return
        alone, first = self.native.stock_ms, self.latency
        if alone is not None and first is not None and alone > first.float_ms:
            ratio = alone / first.float_ms
            yield f"{ratio:.2g}x the time of {self.opponent}" if ratio >= SLOWER else f"as slow as {self.opponent}"
        if self.native.misses:
            yield "less accurate than promised"

    @property
    def missed_goal(self) -> bool:
        """Whether the output is the best INT8 model of a search in which no model kept the metric."""
        return bool(self.why_not and self.search is not None and self.search.best is None and self.search.points)

    @property
    def random(self) -> bool:
        """Whether the models were run on random inputs, which say nothing about accuracy."""
        return self.samples > 0 and self.promise is None

    @property
    def measured_on(self) -> str:
        """The data of the accuracy, in words."""
        if not self.samples or self.random:
            return "random inputs" if self.samples else "no data"
        if self.ranges:
            return "data that gave no ranges"
        return "held-out calibration data" if self.held_out else "calibration data"

    @property
    def held_out(self) -> bool:
        """Whether the models were judged on samples that gave no ranges."""
        return self.promise is not None and self.promise.held_out

    def rows(self) -> list[Row]:
        """Return the table: a name and a value in each row."""
        return list(_rows(self))

    def __str__(self) -> str:
        """Return the verdict and the table, as plain text."""
        return as_text(self.verdict, self.rows())

    def _repr_html_(self) -> str:
        """Return the verdict, a plot of the latencies and the table, for a notebook."""
        second = "INT8" if self.int8_nodes else "output"
        return as_html(self.verdict, self.rows(), self.latencies, second)

    @property
    def latency(self) -> Latency | None:
        """Float against INT8 at the first batch size; None where the models were not run."""
        return self.latencies[0] if self.latencies else None

    @property
    def predicted_ms(self) -> float | None:
        """The sum of the costs of the plan, in milliseconds; None without measured costs."""
        return self.placement.predicted_ms

    @property
    def speedup(self) -> float:
        """How many times faster the output is than the float model, at the first batch size; NaN if it was not run."""
        return math.nan if self.latency is None else self.latency.speedup

    @property
    def held_integers(self) -> bool:
        """Whether operators of the given model compute in integers, and still do."""
        return any(node.kind in HELD for node in self.float_nodes)

    @property
    def samples(self) -> int:
        """Samples on which the two models were compared."""
        return self.accuracy.samples

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values; an infinite SQNR is null. One batch size has no ``latencies``."""
        rejected = self.rejected
        return {
            "output": self.output,
            "format": self.format,
            "verdict": self.verdict,
            "why_not": self.why_not,
            "notes": list(self.notes),
            "findings": [finding.to_json() for finding in self.findings],
            "int8_nodes": self.int8_nodes,
            "forms": dict(self.forms),
            "mac_share_int8": self.mac_share_int8,
            "kernels": dict(self.kernels),
            "float_nodes": [
                {"name": n.name, "operator": n.operator, "reason": n.reason, "us": n.us} for n in self.float_nodes
            ],
            "relieved_channels": dict(self.relieved),
            **_measured_json(self.accuracy, self.latencies, held_out=self.held_out),
            "size": {"float_bytes": self.float_bytes, "int8_bytes": self.int8_bytes},
            "samples": self.samples,
            "calibration": self.calibration,
            "ranges": self.ranges,
            "data": self.data,
            "pipeline": self.pipeline,
            "placement": self.placement.to_json(),
            "effort": {
                "name": self.effort,
                "summary": EFFORTS[self.effort].summary if self.effort else "",
                "corrections": {name: CORRECTIONS[name].summary for name in self.corrections},
            },
            "seconds": dict(self.seconds),
            "native": self.native and self.native.to_json(),
            "runtime": "" if self.runtime is None else str(self.runtime),
            "runtimes": {name: asdict(timed) for name, timed in self.runtimes.items()},
            "promise": self.promise and self.promise.to_json(),
            "search": self.search and self.search.to_json(),
            "rejected": rejected and _measured_json(rejected.accuracy, rejected.latencies, held_out=self.held_out),
            "given": self.given and {"output": accuracy_json(self.given.output), "own": accuracy_json(self.given.own)},
        }


HELD = frozenset(reason.code for reason in (ALREADY, IN_BLOCKS, INTEGER))
SLOWEST = 3  # stages whose time is shown
EXACT = "; with --kernels exact a model computes the same with and without it"
FASTER = 1.1  # a plan with stock kernels that gains less over the bodies of native operators is not named
SLOWER = 1.05  # a smaller ratio of times is told in words


def _rows(result: Result) -> Iterator[Row]:
    """Yield the rows of the table of a result; each fact once."""
    yield "output", result.output + _form(result)
    forms = ", ".join(f"{count} {form}" for form, count in result.forms.items())
    total = result.int8_nodes + len(result.float_nodes)
    yield "int8 nodes", f"{result.int8_nodes} of {total}" + (f" (units: {forms})" if forms else "")
    kernels = ", ".join(f"{count} {name}" for name, count in result.kernels.items())
    listed = f" of {kernels}" if kernels else ""
    yield "integer kernels", f"{result.mac_share_int8:.1%} of the multiply-accumulates{listed}"
    if result.runtimes:
        yield "runtime", str(result.runtime)
    else:
        yield from runtime_rows(result.runtime)
    for name, both in result.runtimes.items():
        kind = "INT8" if both.int8 else "simplified float"
        yield name, f"float {both.float_ms:.3f} ms, {kind} {both.output_ms:.3f} ms"
    if result.ranges:
        yield "ranges", result.ranges
    yield from _accuracy(result)
    for timed in result.latencies:
        yield from latency_rows(timed, result.simple)
    yield from _native(result)
    yield from result.placement.rows(None if result.latency is None else result.latency.int8_ms)
    yield from _effort(result)
    if result.relieved:
        channels = sum(result.relieved.values())
        units = f"{number_of(channels, 'channel')} of {number_of(len(result.relieved), 'operator')}"
        counted = "; their noise is counted above" if result.samples and not result.random else ""
        yield (
            "16-bit sums",
            f"{units} have coarser weights, so that 16-bit sums of this CPU cannot saturate{counted}",
        )
    yield size_row(result.float_bytes, result.int8_bytes)
    yield from _rejected(result)
    yield from float_rows(result.float_nodes)
    for note in (*result.placement.doubts, *result.notes):
        yield "note", note


def _form(result: Result) -> str:
    """Return what the output is, in parentheses."""
    if result.why_not and not result.missed_goal:
        return "" if result.int8_nodes or result.held_integers else " (float)"
    return f" ({result.format})"


def _accuracy(result: Result) -> Iterator[Row]:
    """Yield the accuracy, each number with its data; of random inputs only the SQNR."""
    where = result.measured_on
    if not result.samples:
        return
    if result.random:
        for name, value in result.accuracy.sqnr_db.items():
            yield "SQNR", f"{decibels_text(value)} at {name} ({where})"
        return
    yield data_row(result.samples, result.data)
    if result.promise is not None:
        fitted = "" if result.held_out or not result.calibration else f", which gave the ranges too{_apart(result)}"
        to = "" if result.given is None else "; against the float weights of the given model"
        yield promise_row(result.promise, where + fitted + to)
    if result.given is not None:
        changed, own = (answers_lost(each, where) for each in (result.given.output, result.given.own))
        yield (
            "given model",
            f"the output against it: {changed}; its own error, against its float weights: {own}",
        )
    shown = result.promise.judge if result.promise is not None else ""
    yield from accuracy_rows(result.accuracy, where, shown, held_out=result.held_out)


def _apart(result: Result) -> str:
    """Return how samples that gave no ranges can judge, where there are too few for that; else nothing."""
    few = not result.ranges and 1 < result.samples < APART
    return f": with {APART} samples or more a part judges alone, or those that --samples leaves out" if few else ""


def _rejected(result: Result) -> Iterator[Row]:
    """Yield the accuracy and the latency of the INT8 model that was not written."""
    if result.rejected is None:
        return
    rows = list(accuracy_rows(result.rejected.accuracy, result.measured_on, held_out=result.held_out))
    rows += (row for timed in result.rejected.latencies for row in latency_rows(timed, result.simple))
    yield from ((f"rejected {name}" if name else "", value) for name, value in rows)


def _native(result: Result) -> Iterator[Row]:
    """Yield the native operators, the library that they need, and the time without it."""
    native = result.native
    if native is None:
        return
    joined = f", {native.joined} of them in one operator with another" if native.joined else ""
    library = f"register {native.library}" if native.library else "their library is not here"
    yield "native", f"{number_of(native.units, 'unit')}{joined}; {library}, see 'requant kernels'"
    if native.stock_ms is not None and result.latency is not None:
        ratio = result.latency.float_ms / native.stock_ms
        yield "", f"without this library {native.stock_ms:.3f} ms: {ratio:.2f}x{_stock_plan(result)}"
    if native.stock_promise is not None:
        yield "", f"without this library {native.stock_promise}{EXACT if native.misses else ''}"


def _stock_plan(result: Result) -> str:
    """Return how to get a timed plan without native operators that is faster than the model without its library."""
    placement, native, latency = result.placement, result.native, result.latency
    times = [placement.tried[name] for name in placement.stock]
    if native is None or native.stock_ms is None or latency is None or not times or placement.missed:
        return ""
    # both times are relative to those of the model: the clock rate may have changed between the two measurements
    took = latency.int8_ms * min(times) / placement.tried[placement.chosen]
    return f"; --kernels stock gives a model of {took:.3f} ms" if FASTER * took < native.stock_ms else ""


def _effort(result: Result) -> Iterator[Row]:
    """Yield the effort, its corrections, and the slowest stages."""
    if not result.seconds:
        return
    spent = sorted(((took, stage) for stage, took in result.seconds.items() if took >= 1), reverse=True)
    most = f" ({', '.join(f'{stage} {took:.0f}' for took, stage in spent[:SLOWEST])})" if spent else ""
    done = f": {', '.join(result.corrections)}" if result.corrections else ""
    yield "effort", f"{result.effort}{done}; {sum(result.seconds.values()):.0f} s{most}"


def _measured_json(accuracy: Accuracy, latencies: Sequence[Latency], *, held_out: bool) -> dict[str, Any]:
    """Return what was measured of a model as plain JSON values: the first latency, and all if there are several."""
    found = [latency_json(each) for each in latencies]
    all_sizes = {"latencies": found} if len(found) > 1 else {}
    return {**accuracy_json(accuracy, held_out=held_out), "latency": found[0] if found else None, **all_sizes}


@dataclass(frozen=True, slots=True)
class NativeUse:
    """The native operators of a model.

    Attributes:
        units: The number of units that they compute.
        joined: The number of units (functions and sums) that are one operator with the convolution in front of them.
        library: The library that a program registers, see `requant kernels`; empty if it is not here.
        stock_ms: Minimum time of a run without the library; None if it was not timed.
        stock_promise: Whether the model keeps the promise of accuracy without the library; None if it was not judged.
    """

    units: int
    joined: int
    library: str
    stock_ms: float | None = None
    stock_promise: Promise | None = None

    @property
    def misses(self) -> bool:
        """Whether the model misses the promise of accuracy without the library."""
        return self.stock_promise is not None and not self.stock_promise.kept

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "stock_promise": self.stock_promise and self.stock_promise.to_json()}
