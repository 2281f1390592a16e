"""What a report tells of tensors and weights: ranges, histograms, signal over noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import onnx_ir as ir

from ...calibration.histogram import Histogram
from ...calibration.observations import Observations
from ...calibration.ranges import Range
from ...calibration.runner import observe
from ...calibration.samples import Sample
from ...calibration.session import Array
from ...transforms.graph import constant, nodes_by_name
from ...transforms.ops import row_of
from ...transforms.plan import Plan
from ...transforms.qparams import QParams, dequantize
from ..accuracy.outputs import decibels, is_float, powers
from ..job import Job
from ..model.files import serialize
from ..options.given_ranges import precision_of
from ..runtime.session import Runner
from ..sensitivity.each_tensor import alone, runs_for
from ..sensitivity.verdicts import traits
from ..steps.ranges import TensorRanges
from .record import Bins, Tensor, Weights

BINS = 128
LOOKED = 16  # samples of histograms, where the ranges needed none
COMPARED = 4  # samples of the signal over noise of each tensor
ROOM = 2**28  # bytes of tensors that a model gives at once
MOST = 400  # of them
SMALL, LARGE = 1e-30, 1e37  # between these a sum of squares in float32 has lost nothing to speak of
FLOAT_DB = 120.0  # what has less noise differs by the order of float sums
SECONDS = 10.0  # for which tensors are tried alone
CHANNELS = 256  # columns of the weights of a node


def tensors_of(job: Job, found: TensorRanges, plan: Plan, output: ir.Model) -> tuple[Tensor, ...]:
    """Tell of the tensors between the units of a model, in execution order.

    Args:
        job: The job.
        found: The ranges.
        plan: What became of the model.
        output: The model that was written.
    """
    names = dict.fromkeys(name for unit in plan.units for name in (*unit.inputs, *unit.outputs))
    uint8 = frozenset(plan.quantized)
    seen = _seen(job, found, [name for name in names if name in uint8])
    noise = noise_of(job, list(names), plan, output) if uint8 else {}
    return tuple(_tensor(job, found, plan, seen, name, noise) for name in names)


def alone_of(job: Job, plan: Plan, output: ir.Model) -> dict[str, float]:
    """Return the signal over noise at the worst output when one tensor at a time is in integers, in dB.

    Raises:
        RequantError: The model fails on a sample.
    """
    if job.source is None or not job.judged or job.weights.large:
        return {}
    inside = {str(value.name) for value in _values(job.simple)}
    held = {name: _params(output, name) for name in plan.observed if name in inside}
    qparams = {name: params for name, params in held.items() if params is not None}
    samples = list(islice(iter(job.source.samples(COMPARED)), COMPARED))
    if not qparams or not samples:
        return {}
    runs = runs_for(job, samples[0].feed, SECONDS)
    found = alone(job.simple, qparams, samples, optimize=not job.model_qparams, runs=runs)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _tensor(
    job: Job, found: TensorRanges, plan: Plan, seen: Observations, name: str, noise: Mapping[str, float | None]
) -> Tensor:
    """Tell of one tensor."""
    uint8 = name in plan.quantized
    root = plan.root(name)
    span = _span(job, found, root) if uint8 else None
    made = Tensor(name=name, uint8=uint8, shares=root if root != name else "", sqnr_db=noise.get(name))
    if span is not None:
        made = replace(made, lo=float(span[0]), hi=float(span[1]))
    statistic = seen.ranges.get(name)
    if statistic is None:
        return made
    made = replace(made, least=float(statistic.lo), most=float(statistic.hi))
    if not isinstance(statistic, Histogram):
        return made
    made = replace(made, bins=bins_of(statistic))
    if span is None:
        return made
    about = traits(name, span, seen, (), precision_of(job.scheme))
    own = -10 * math.log10(about.rounding) if math.isfinite(about.rounding) and about.rounding > 0 else None
    return replace(made, clipped=about.clipped, own_db=own)


def _span(job: Job, found: TensorRanges, root: str) -> Range | None:
    """Return the range that the integers of a tensor have, as far as it is known."""
    if root in found.ranges:
        return found.ranges[root]
    return job.model_qparams[root].range if root in job.model_qparams else None


def _seen(job: Job, found: TensorRanges, names: Sequence[str]) -> Observations:
    """Return what was seen of tensors; where nobody counted their values, some samples are run again."""
    seen = found.seen
    missing = [name for name in names if not isinstance(seen.ranges.get(name), Histogram)]
    if not missing or not job.judged or job.source is None or job.weights.large:
        return seen
    more = observe(job.float_source, missing, job.source.samples(LOOKED), histogram=True)
    ranges = {**seen.ranges, **{name: each for name, each in more.ranges.items() if isinstance(each, Histogram)}}
    return replace(seen, ranges=ranges)


def bins_of(histogram: Histogram) -> Bins:
    """Return a histogram of at most `BINS` bins: neighbours are added up."""
    group = -(-histogram.counts.size // BINS)
    padded = np.pad(histogram.counts, (0, -histogram.counts.size % group))
    counts = padded.reshape(-1, group).sum(axis=1)
    return Bins(
        start=math.ldexp(histogram.first, histogram.exponent),
        width=histogram.width * group,
        counts=tuple(counts.tolist()),
    )


# -------------------------------------------------------------------------------------------------- signal over noise


def noise_of(job: Job, names: Sequence[str], plan: Plan, output: ir.Model) -> dict[str, float | None]:
    """Return the signal over noise of tensors in the model that was written, in dB; None where there is no noise."""
    if job.source is None or not job.judged or job.weights.large:
        return {}
    samples = list(islice(iter(job.source.samples(COMPARED)), COMPARED))
    before = {str(value.name): value for value in _values(job.simple)}
    after = {str(value.name): value for value in _values(output)}
    pairs: dict[str, tuple[str, QParams | None]] = {}
    for name in names:
        integers = f"{name}/quantized"
        params = _params(output, plan.root(name))
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


def _params(output: ir.Model, root: str) -> QParams | None:
    """Return the scale and the zero point of a tensor, which the emitter has called after it."""
    held = [output.graph.initializers.get(f"{root}/{part}") for part in ("scale", "zero_point")]
    arrays = [each.const_value.numpy() for each in held if each is not None and each.const_value is not None]
    return QParams(scale=arrays[0], zero_point=arrays[1]) if len(arrays) == 2 else None


def _bytes(value: ir.Value, sample: Sample, model: ir.Model) -> int:
    """Return about how large a tensor is; free axes of unknown names count as 1."""
    known: dict[str, int] = {}
    for given in model.graph.inputs:
        array = sample.feed.get(str(given.name))
        if array is not None and given.shape is not None:
            pairs = zip(given.shape, array.shape, strict=False)
            known |= {str(axis.value): length for axis, length in pairs if isinstance(axis, ir.SymbolicDim)}
    axes = value.shape if value.shape is not None else ()
    return 4 * math.prod(known.get(str(a.value), 1) if isinstance(a, ir.SymbolicDim) else int(a) for a in axes)


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield tensors that are fetched together."""
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
    """Return the signal over noise of the tensors of one group."""
    models = (_showing(job.simple, pairs), _showing(output, [name for name, _ in pairs.values()]))
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
    """Return the sums of squares of a tensor and of its difference from another, in float32 where that will do.

    Of n values the rounding of a sum in float32 is at most n * 6e-8 of it, and by far less as a rule: a chart shows
    tenths of a decibel, 2 %. Squares that are too large or too small for float32 are summed in float64.
    """
    if exact.shape == other.shape and exact.dtype == other.dtype == np.float32:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            difference = exact - other
            both = float(np.vdot(exact, exact)), float(np.vdot(difference, difference))
        if all(SMALL < each < LARGE for each in both):
            return both
    return powers(exact, other)


def _showing(model: ir.Model, names: Iterable[str]) -> ir.Model:
    """Return a copy that gives these tensors of its main graph too."""
    copy = model.clone()
    values = {str(value.name): value for value in _values(copy)}
    fed = {str(value.name) for value in (*copy.graph.inputs, *copy.graph.outputs)}
    copy.graph.outputs.extend(values[name] for name in dict.fromkeys(names) if name not in fed)
    return copy


# ------------------------------------------------------------------------------------------------------------ weights


def weights_of(model: ir.Model) -> tuple[Weights, ...]:
    """Return the ranges of the weights of each node that has some, by output channel."""
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
    """Return the least and the greatest weight of each channel, or of so many neighbours."""
    others = tuple(index for index in range(array.ndim) if index != axis % array.ndim)
    lo, hi = array.min(axis=others), array.max(axis=others)
    group = -(-lo.size // CHANNELS)
    starts = np.arange(0, lo.size, group)
    return _short(np.minimum.reduceat(lo, starts)), _short(np.maximum.reduceat(hi, starts)), group


def _short(values: Array) -> tuple[float, ...]:
    """Return numbers of 5 digits, which are as many as a chart shows."""
    return tuple(float(f"{value:.5g}") for value in values.tolist())
