"""Ranges, histograms and SQNR of tensors, and ranges of weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import onnx_ir as ir

from ...calibration.data.samples import Sample
from ...calibration.model.session import Array
from ...calibration.rules.ranges import Range
from ...calibration.runs.runner import observe
from ...calibration.statistics.histogram import Histogram
from ...calibration.statistics.observations import Observations
from ...transforms.graphs.queries import constant, nodes_by_name
from ...transforms.int8.ops import row_of
from ...transforms.int8.qparams import QParams, dequantize
from ..accuracy.classes import is_float
from ..accuracy.sqnr import decibels, powers
from ..job import Candidate, Job
from ..model.files import serialize
from ..model.shown import show_tensors
from ..options.given_ranges import precision_of
from ..placement.runs import runs_for
from ..runtime.session import Runner
from ..sensitivity.each_tensor import sqnr_by_tensor
from ..sensitivity.verdicts import traits
from ..steps.deliver import Run
from .record import Bins, Tensor, Weights

BINS = 128
LOOKED = 16  # samples for histograms, if the range rule needs no histogram
COMPARED = 4  # samples for the SQNR of each tensor
ROOM = 2**28  # bytes of tensors that one session returns
MOST = 400  # tensors that one session returns
SMALL, LARGE = 1e-30, 1e37  # between these, a sum of squares in float32 is exact enough
FLOAT_DB = 120.0  # less noise comes from the order of float sums
SECONDS = 10.0  # for trying tensors alone
CHANNELS = 256  # columns of the weights of a node


def tensors_of(run: Run) -> tuple[Tensor, ...]:
    """Return the tensors between the units of a model, in execution order."""
    plan = run.trial.candidate.plan
    names = dict.fromkeys(name for unit in plan.units for name in (*unit.inputs, *unit.outputs))
    uint8 = frozenset(plan.quantized)
    seen = _seen(run, [name for name in names if name in uint8])
    noise = noise_of(run.job, list(names), run.trial.candidate) if uint8 else {}
    return tuple(_tensor(run, seen, name, noise) for name in names)


def alone_of(run: Run) -> dict[str, float]:
    """Return the SQNR at the worst output when one tensor alone is in integers, in dB by tensor.

    The measurements of the placement are used if there are any; else the tensors are measured now.

    Raises:
        RequantError: The model fails on a sample.
    """
    job, candidate = run.job, run.trial.candidate
    if job.source is None or not job.judged or job.weights.large:
        return {}
    noise = candidate.evidence.noise
    if noise:
        return {name: -10 * math.log10(noise[name]) for name in candidate.plan.observed if noise.get(name, 0.0) > 0}
    inside = {str(value.name) for value in _values(job.simple)}
    qparams = {name: params for name, params in candidate.qparams.items() if name in inside}
    samples = list(islice(iter(job.source.samples(COMPARED)), COMPARED))
    if not qparams or not samples:
        return {}
    runs = runs_for(job, samples[0].feed, SECONDS)
    sqnr_db = sqnr_by_tensor(job.simple, qparams, samples, optimize=not job.model_qparams, runs=runs)
    return {name: value for name, value in sqnr_db.items() if math.isfinite(value)}


def _tensor(run: Run, seen: Observations, name: str, noise: Mapping[str, float | None]) -> Tensor:
    """Describe one tensor."""
    plan = run.trial.candidate.plan
    uint8 = name in plan.quantized
    root = plan.root(name)
    span = _span(run, root) if uint8 else None
    row = Tensor(name=name, uint8=uint8, shares=root if root != name else "", sqnr_db=noise.get(name))
    if span is not None:
        row = replace(row, lo=float(span[0]), hi=float(span[1]))
    statistic = seen.ranges.get(name)
    if statistic is None:
        return row
    row = replace(row, least=float(statistic.lo), most=float(statistic.hi))
    if not isinstance(statistic, Histogram):
        return row
    row = replace(row, bins=bins_of(statistic))
    if span is None:
        return row
    about = traits(name, span, seen, (), precision_of(run.job.scheme))
    own = -10 * math.log10(about.rounding) if math.isfinite(about.rounding) and about.rounding > 0 else None
    return replace(row, clipped=about.clipped, own_db=own)


def _span(run: Run, root: str) -> Range | None:
    """Return the range of the integers of a tensor; None where it is not known."""
    if root in run.ranges.ranges:
        return run.ranges.ranges[root]
    given = run.job.model_qparams
    return given[root].range if root in given else None


def _seen(run: Run, names: Sequence[str]) -> Observations:
    """Return the statistics of tensors; some samples are run again for tensors without a histogram."""
    job, seen = run.job, run.ranges.seen
    missing = [name for name in names if not isinstance(seen.ranges.get(name), Histogram)]
    if not missing or not job.judged or job.source is None or job.weights.large:
        return seen
    more = observe(job.float_source, missing, job.source.samples(LOOKED), histogram=True)
    ranges = {**seen.ranges, **{name: each for name, each in more.ranges.items() if isinstance(each, Histogram)}}
    return replace(seen, ranges=ranges)


def bins_of(histogram: Histogram) -> Bins:
    """Return a histogram of at most `BINS` bins; neighbouring bins are added up."""
    group = -(-histogram.counts.size // BINS)
    padded = np.pad(histogram.counts, (0, -histogram.counts.size % group))
    counts = padded.reshape(-1, group).sum(axis=1)
    return Bins(
        start=math.ldexp(histogram.first, histogram.exponent),
        width=histogram.width * group,
        counts=tuple(counts.tolist()),
    )


# -------------------------------------------------------------------------------------------------- signal over noise


def noise_of(job: Job, names: Sequence[str], candidate: Candidate) -> dict[str, float | None]:
    """Return the SQNR of tensors in the output, in dB; None where there is no noise."""
    if job.source is None or not job.judged or job.weights.large:
        return {}
    samples = list(islice(iter(job.source.samples(COMPARED)), COMPARED))
    output = candidate.model
    before = {str(value.name): value for value in _values(job.simple)}
    after = {str(value.name): value for value in _values(output)}
    pairs: dict[str, tuple[str, QParams | None]] = {}
    for name in names:
        integers = f"{name}/quantized"
        params = candidate.qparams.get(candidate.plan.root(name))
        if integers in after and params is not None:
            pairs[name] = (integers, params)
        elif name in after:
            pairs[name] = (name, None)
    sizes = {name: _bytes(before[name], samples[0], job.simple) for name in pairs if name in before}
    found: dict[str, float | None] = {}
    for group in _groups(sizes):
        found |= _compared(job, output, {name: pairs[name] for name in group}, samples)
    return found


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """Yield the tensors of the main graph."""
    yield from model.graph.inputs
    for node in model.graph:
        yield from node.outputs


def _bytes(value: ir.Value, sample: Sample, model: ir.Model) -> int:
    """Return the approximate bytes of a tensor; a free axis of unknown length counts as 1."""
    known: dict[str, int] = {}
    for given in model.graph.inputs:
        array = sample.feed.get(str(given.name))
        if array is not None and given.shape is not None:
            pairs = zip(given.shape, array.shape, strict=False)
            known |= {str(axis.value): length for axis, length in pairs if isinstance(axis, ir.SymbolicDim)}
    axes = value.shape if value.shape is not None else ()
    return 4 * math.prod(known.get(str(a.value), 1) if isinstance(a, ir.SymbolicDim) else int(a) for a in axes)


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield groups of tensors that are fetched together."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and (total + size > ROOM or len(group) == MOST):
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def _compared(
    job: Job, output: ir.Model, pairs: Mapping[str, tuple[str, QParams | None]], samples: Iterable[Sample]
) -> dict[str, float | None]:
    """Return the SQNR of the tensors of one group."""
    models = (show_tensors(job.simple, pairs), show_tensors(output, [name for name, _ in pairs.values()]))
    exact, integer = (Runner(serialize(model, job.folder)) for model in models)
    signal, noise = dict.fromkeys(pairs, 0.0), dict.fromkeys(pairs, 0.0)
    for sample in samples:
        first, second = ({**sample.feed, **run(sample.feed)} for run in (exact, integer))
        for name, (other, params) in pairs.items():
            one, two = first[name], second[other]
            two = dequantize(two, params) if params is not None else two
            if is_float(one) and is_float(two):
                both = _powers(one, two)
                signal[name], noise[name] = signal[name] + both[0], noise[name] + both[1]
    found = {name: decibels(signal[name], noise[name]) for name in pairs if signal[name] or noise[name]}
    return {name: value if -math.inf < value < FLOAT_DB else None for name, value in found.items()}


def _powers(exact: Array, other: Array) -> tuple[float, float]:
    """Return the sum of squares of a tensor, and the sum of squares of its difference from another tensor.

    The sums are in float32 where this is exact enough: the relative rounding error of a float32 sum of n values is at
    most n * 6e-8, and usually far less. A chart shows tenths of a decibel, which are 2 %. Squares that are too large or
    too small for float32 are summed in float64.
    """
    if exact.shape == other.shape and exact.dtype == other.dtype == np.float32:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            difference = exact - other
            both = float(np.vdot(exact, exact)), float(np.vdot(difference, difference))
        if all(SMALL < each < LARGE for each in both):
            return both
    return powers(exact, other)


# ------------------------------------------------------------------------------------------------------------ weights


def weights_of(model: ir.Model) -> tuple[Weights, ...]:
    """Return the range of the weights of each node, by output channel."""
    found = []
    for name, node in nodes_by_name(model).items():
        row = row_of(node)
        index = row.weight if row is not None and row.weight is not None else None
        value = node.inputs[index] if index is not None and index < len(node.inputs) else None
        tensor = constant(value)
        if row is None or value is None or tensor is None or len(tensor.shape) < 2:
            continue
        array = tensor.numpy()
        if not is_float(array) or not np.isfinite(array).all() or not array.size:
            continue
        axis = row.channel_axis(node)
        lo, hi, group = _by_channel(array, axis)
        found.append(
            Weights(
                node=name,
                op=node.op_type,
                tensor=str(value.name),
                channels=array.shape[axis],
                group=group,
                lo=lo,
                hi=hi,
            )
        )
    return tuple(found)


def _by_channel(array: Array, axis: int) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Return the least and the greatest weight of each group of channels, and the channels per group."""
    others = tuple(index for index in range(array.ndim) if index != axis % array.ndim)
    lo, hi = array.min(axis=others), array.max(axis=others)
    group = -(-lo.size // CHANNELS)
    starts = np.arange(0, lo.size, group)
    return _short(np.minimum.reduceat(lo, starts)), _short(np.maximum.reduceat(hi, starts)), group


def _short(values: Array) -> tuple[float, ...]:
    """Return numbers of 5 digits, as many as a chart shows."""
    return tuple(float(f"{value:.5g}") for value in values.tolist())
