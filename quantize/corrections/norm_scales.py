"""Fill the range of a convolution in front of a normalization: each channel gets all of its steps.

The tensor has one range for all channels, but an instance norm takes any scale k and any shift d of a channel out
again. The rounding noise behind the norm is, for a channel with the factor g and the variance v,

    g^2 / v  D^2 / (12 k^2),

where D is the step of the common range. The range is kept, so k is greatest, and the noise least, if each channel
``k (x - d)`` has the whole range. Epsilon becomes epsilon / k^2, so that the result changes by the factor
``sqrt((v + epsilon) / (v + epsilon / k^2))``. The norm's own factor takes out its mean over the samples, and k is made
less where what is left exceeds `GREATEST_CHANGE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ...calibration.data.samples import Sample
from ...calibration.execution import Execution
from ...calibration.runs.runner import observe
from ...system.printable import number_of
from ...transforms.graphs.queries import constant, node_name
from ...transforms.graphs.rewriter import names, unused_name
from ...transforms.parts.norm_scales import NormedChannels, find_normed, scale_normed
from ..job import Job
from ..model.files import serialize
from .channel_noise import Floats
from .equalization import integer_nodes, may_scale

SAMPLES = 16
LEAST_GAIN = 0.05
"""Channels stay as they are if scales remove less than this share of the noise."""
GREATEST_FACTOR = 2.0**7
"""The greatest factor of a channel. A narrower channel may be narrow by chance."""
GREATEST_CHANGE = 1e-3
"""The greatest change of a channel by epsilon, as a share of it: 60 dB."""
TINY = 1e-30
DECAY = 0.9
"""The exponent that brings a factor nearer to 1."""
DECAYS = 50
"""The factor of a channel whose change is too great after so many exponents is 1."""


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Statistics of the channels in front of a normalization, all of shape (C,).

    Attributes:
        lo: The least value of the tensor that becomes uint8.
        hi: Its greatest value.
        least: The least variance of a sample of what the normalization reads.
        most: The greatest variance.
        mean: The mean variance.
    """

    lo: Floats
    hi: Floats
    least: Floats
    most: Floats
    mean: Floats


@dataclass(frozen=True, slots=True)
class Scales:
    """The arguments of `scale_normed`, all of shape (C,)."""

    factor: Floats
    shift: Floats
    gain: Floats


def scale_before_norms(job: Job) -> Job:
    """Return a job whose simplified model fills the ranges in front of normalizations of single channels.

    The names of nodes and tensors stay, so the plan stays valid. The job is returned as it is where nothing gains, and
    `Job.unscaled` is the job before. Tensors with ranges or QDQ pairs from the user are left alone.

    Raises:
        RequantError: The data do not fit the model.
    """
    if job.source is None or not may_scale(job):
        return job
    integer = integer_nodes(job)
    model = job.simple.clone()
    usable = [
        each
        for each in find_normed(model)
        if node_name(each.conv) in integer and not job.reserved.intersection(each.produced.tensors)
    ]
    seen = observed(model, usable, job.source.samples(SAMPLES)) if usable else {}
    taken, count = names(model), 0
    for each in usable:
        scales = choose(each, seen[each.produced.tensor]) if each.produced.tensor in seen else None
        if scales is not None:
            count += scale_normed(each, scales.factor, scales.shift, scales.gain, taken)
    if not count:
        return job
    note = f"channels of {number_of(count, 'tensor')} scaled in front of norms"
    source = serialize(model, job.folder)
    scaled = job.scaled | {"norms"}
    return replace(job, simple=model, float_source=source, notes=(*job.notes, note), scaled=scaled, unscaled=job)


def observed(
    model: ir.Model, found: Sequence[NormedChannels], samples: Iterable[Sample]
) -> Mapping[str, ChannelStatistics]:
    """Return the statistics of channels by the result of their convolution. Tensors that are not finite are left out.

    Raises:
        RequantError: The data do not fit the model.
    """
    probe = model.clone()
    values = ir.convenience.create_value_mapping(probe.graph, include_subgraphs=False)
    taken, variances, axes = names(probe), dict[str, str](), dict[str, int]()
    for each in found:
        first = each.produced.tensor
        variance = _append_variance(probe.graph, values[str(each.normed.name)], taken)
        variances[first] = variance
        axes |= {_rounded_tensor(each): 1, variance: 1}
    seen = observe(
        serialize(probe), (), samples, histogram=False, channel_axis=axes, execution=Execution(strict=False)
    ).channels
    known: dict[str, ChannelStatistics] = {}
    for each in found:
        first, rounded = each.produced.tensor, _rounded_tensor(each)
        if rounded in seen and variances[first] in seen:
            span, power = seen[rounded], seen[variances[first]]
            known[first] = ChannelStatistics(span.lo, span.hi, power.lo, power.hi, power.mean)
    return known


def choose(found: NormedChannels, seen: ChannelStatistics) -> Scales | None:
    """Return the scales and shifts that fill a range; None if they remove less than `LEAST_GAIN` of the noise."""
    low, high = min(0.0, float(seen.lo.min())), max(0.0, float(seen.hi.max()))
    shift = (seen.lo + seen.hi) / 2 if found.shifts else np.zeros_like(seen.lo)
    with np.errstate(divide="ignore", invalid="ignore"):
        if found.shifts:
            widest = float((seen.hi - seen.lo).max())
            factor, width = widest / (seen.hi - seen.lo), widest
        else:
            up, down = (np.where(part > 0, most / part, np.inf) for part, most in ((seen.hi, high), (-seen.lo, -low)))
            factor, width = np.minimum(up, down), high - low
    live = (seen.least > 0) & np.isfinite(factor)
    factor = np.where(live, np.clip(factor, 1.0, GREATEST_FACTOR), 1.0)
    factor = _with_bounded_change(factor, seen, found.epsilon)
    gain = constant(found.gain.folds[0].node.inputs[1])
    assert gain is not None  # it is a fold
    weight = np.where(live, np.square(gain.numpy().astype(np.float64)) / np.maximum(seen.mean, TINY), 0.0)
    before, after = (high - low) ** 2 * weight.sum(), width**2 * (weight / factor**2).sum()
    if after > (1 - LEAST_GAIN) * before or not before:
        return None
    low_end, high_end = (_change(factor, each, found.epsilon) for each in (seen.least, seen.most))
    return Scales(factor, shift, 1 / np.sqrt(low_end * high_end))


def _with_bounded_change(factor: Floats, seen: ChannelStatistics, epsilon: float) -> Floats:
    """Return the factors, made less where epsilon would change a channel by more than `GREATEST_CHANGE`."""
    for _ in range(DECAYS):
        ends = [_change(factor, each, epsilon) for each in (seen.least, seen.most)]
        over = np.sqrt(ends[0] / ends[1]) > 1 + GREATEST_CHANGE
        if not over.any():
            return factor
        factor = np.where(over, factor**DECAY, factor)
    return np.where(over, 1.0, factor)


def _change(factor: Floats, variance: Floats, epsilon: float) -> Floats:
    """Return by which factor a normalized channel grows if what is normalized is scaled by `factor`, (C,)."""
    return np.asarray(np.sqrt((variance + epsilon) / (variance + epsilon / factor**2)))


def _append_variance(graph: ir.Graph, value: ir.Value, taken: set[str]) -> str:
    """Append the variance of each channel of a tensor (N, C, ...) to a graph; return its name, (N, C, 1, ...)."""
    made = value
    for op in ("GlobalAveragePool", "Sub", "Mul", "GlobalAveragePool"):
        inputs = {"Sub": [value, made], "Mul": [made, made]}.get(op, [made])
        node = ir.node(op, inputs, name=unused_name(taken, f"{value.name}_{op}"))
        made = node.outputs[0]
        made.name = node.name
        graph.append(node)
    return str(made.name)


def _rounded_tensor(found: NormedChannels) -> str:
    """Return the first tensor behind a convolution that becomes uint8: the result of the activation that it absorbs."""
    passed = found.produced.passed
    absorbed = passed and passed[0].op_type in ("Relu", "LeakyRelu", "PRelu")
    return str(passed[0].outputs[0].name) if absorbed else found.produced.tensor
