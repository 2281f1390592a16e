"""Scales and shifts of channels with which the integers lose least, chosen from statistics of a few samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ...calibration.execution import Execution
from ...calibration.runner import observe
from ...calibration.samples import Sample
from ...transforms.channel_shifts import ABOVE_ZERO
from ...transforms.equalize import Group, Scaling, equalize, find
from ...transforms.graph import names, node_name, take
from ..job import Job
from ..model.files import serialize
from .channel_noise import Channels, Floats, Reader, reader_of, total

SAMPLES = 64
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
LEAST_GAIN = 0.05
"""The share of a group's noise that must go; less is within what the estimate leaves out."""
NARROWEST = 2.0**-7
"""A channel, or the weights that read it, counts as no narrower than this share of the widest: that may be chance."""
SUMS = frozenset({"Add", "Sub"})
TINY = 1e-30
CLOSE = 1e-3
"""The share of the bound of a Clip within which a channel counts as clipped."""
ROOM = 1.125
"""How far below the bound of a Clip a channel stays that has not met it: other data reach farther."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done to a group.

    Attributes:
        group: The group.
        scaling: By what its channels are divided, and what is subtracted from them.
        exponents: Of the ranges of activations and of weights in the scale.
        gain: The share of the estimated noise that goes, 0..1.
    """

    group: Group
    scaling: Scaling
    exponents: tuple[float, float]
    gain: float


def equalized(job: Job, *, samples: int = SAMPLES, powers_of_two: bool = True) -> Job:
    """Return a job whose simplified model has its channels scaled and shifted for the least noise in integers.

    Names of nodes and tensors stay, and so does the plan. Tensors of which the user says something, by ranges or by
    pairs in the model, are left alone.

    Raises:
        RequantError: The data do not fit the model.
    """
    if not job.judged or job.source is None or job.supply.ranges is not None or job.weights.large:
        return job
    integer = {name for unit in job.all_int8_plan.units if job.all_int8_plan.impl(unit).reads_u8 for name in unit.nodes}
    model = job.simple.clone()
    found = find(model)[0]
    usable = [group for group in found if not job.reserved.intersection(group.tensors)]
    known = observed(model, usable, job.source.samples(samples))
    choices = choose(usable, known, integer, powers_of_two=powers_of_two)
    if not choices:
        return job
    equalize(model, {choice.group.tensor: choice.scaling for choice in choices})
    count = f"{len(choices)} group{'s' if len(choices) > 1 else ''} of tensors"
    note = f"channels of {count} scaled for integers"
    return replace(job, simple=model, float_source=serialize(model, job.folder), notes=(*job.notes, note))


def observed(model: ir.Model, groups: Iterable[Group], samples: Iterable[Sample]) -> dict[str, Channels]:
    """Observe the channels of what reads and passes on groups of tensors; what has no finite values is left out.

    Raises:
        RequantError: The data do not fit the model.
    """
    axes = {name: group.tensors[name] for group in groups for name in _looked_at(group) if name in group.tensors}
    if not axes:
        return {}
    probe = model.clone()
    values = ir.convenience.create_value_mapping(probe.graph, include_subgraphs=False)
    taken, squares = names(probe), {}
    for name in axes:
        square = ir.node("Mul", [values[name], values[name]], name=take(taken, f"{name}_square"))
        square.outputs[0].name, squares[name] = square.name, str(square.name)
        probe.graph.append(square)
    wanted = {each: axis for name, axis in axes.items() for each in (name, squares[name])}
    execution = Execution(strict=False)
    seen = observe(serialize(probe), (), samples, histogram=False, channel_axis=wanted, execution=execution).channels
    return {
        name: Channels(seen[name].lo, seen[name].hi, seen[name].mean, seen[squares[name]].mean)
        for name in axes
        if name in seen and squares[name] in seen
    }


def choose(
    groups: Sequence[Group], known: Mapping[str, Channels], integer: Collection[str], *, powers_of_two: bool = True
) -> list[Choice]:
    """Choose for each group the scales and shifts with the least noise, where that is worth it.

    Args:
        groups: The groups, in execution order.
        known: What is known of the channels of their tensors.
        integer: Names of the nodes that compute in integers.
        powers_of_two: Whether scales are, so that the float model does not change by a bit.
    """
    chosen: dict[str, Choice] = {}
    importance: dict[str, Floats] = {}
    for group in reversed(groups):  # what noise in a depthwise convolution's output counts is decided behind it
        folds = [fold for fold in group.readers if node_name(fold.node) in integer]
        read = [reader_of(fold, importance.get(_result(fold.node)) if fold.groups > 1 else None) for fold in folds]
        readers = [reader for reader in read if reader is not None and reader.tensor in known]
        if not readers:
            continue
        columns = np.sum([reader.columns for reader in readers], axis=0)
        importance.update(dict.fromkeys(group.tensors, columns))
        passed = [name for name in _added(group, integer) if name in known]
        if (choice := _best(group, readers, known, passed, powers_of_two)) is not None:
            chosen[group.tensor] = choice
    return [chosen[group.tensor] for group in groups if group.tensor in chosen]


def _result(node: ir.Node) -> str:
    """Return the name of what a node computes."""
    return str(node.outputs[0].name)


def _looked_at(group: Group) -> list[str]:
    """Return the tensors of a group that a product or a sum reads, or that something bends."""
    sums = [value.name for node in group.passed if node.op_type in SUMS for value in node.inputs if value is not None]
    return list(dict.fromkeys([*(fold.tensor for fold in group.readers), *map(str, sums), *_bent(group)]))


def _bent(group: Group) -> list[str]:
    """Return the tensors whose values decide what may be done: the results of a Clip, or of a Relu before a shift."""
    limits = ABOVE_ZERO if group.shifts is not None else frozenset()
    limits = limits | {"Clip"} if group.ceiling < math.inf else limits
    return [_result(node) for node in group.passed if node.op_type in limits]


def _added(group: Group, integer: Collection[str]) -> list[str]:
    """Return the tensors of a group that a sum in integers reads, once for each."""
    sums = [node for node in group.passed if node.op_type in SUMS and node_name(node) in integer]
    return [
        str(value.name) for node in sums for value in node.inputs if value is not None and value.name in group.tensors
    ]


def _best(
    group: Group, readers: Sequence[Reader], known: Mapping[str, Channels], passed: Sequence[str], rounded: bool
) -> Choice | None:
    """Return the scaling with the least noise; None where that is hardly less than without one."""
    if any(name not in known for name in _bent(group)):
        return None
    of_group = {name: known[name] for name in {*passed, *_bent(group), *(reader.tensor for reader in readers)}}
    none = np.zeros(group.channels)
    before = total(readers, of_group, passed, none + 1.0, none)
    best, least = None, before * (1 - LEAST_GAIN)
    for shift in _shifts(group, of_group):
        shifted = {name: each.shifted(none if shift is None else shift) for name, each in of_group.items()}
        activations = _wide(np.max([each.reach for each in shifted.values()], axis=0))
        weights = _wide(np.max([reader.reach / reader.reach.max(initial=TINY) for reader in readers], axis=0))
        for exponents in ((a, w) for a in EXPONENTS for w in EXPONENTS if shift is not None or a or w):
            scale = _allowed(group, shifted, activations ** exponents[0] / weights ** exponents[1], rounded)
            noise = total(readers, shifted, passed, scale, none)
            if noise < least:
                least = noise
                best = Choice(group, Scaling(scale, shift), exponents, 1 - noise / before)
    return best


def _wide(ranges: Floats) -> Floats:
    """Return ranges relative to the widest, none of them narrower than `NARROWEST`."""
    widest = float(ranges.max(initial=0.0))
    return np.maximum(ranges / widest, NARROWEST) if widest > 0 else np.ones_like(ranges)


def _shifts(group: Group, known: Mapping[str, Channels]) -> Iterator[Floats | None]:
    """Yield the shifts to try: none, and what brings the channels to the middle or down to zero."""
    yield None
    if group.shifts is None:
        return
    lo, hi = np.min([each.lo for each in known.values()], axis=0), np.max([each.hi for each in known.values()], axis=0)
    shift = np.maximum(lo, 0.0) if group.shifts.above_zero else (lo + hi) / 2
    if shift.any():
        yield shift


def _allowed(group: Group, known: Mapping[str, Channels], scale: Floats, rounded: bool) -> Floats:
    """Return scales with which no channel comes to the bound of a Clip but those that were there; these keep 1.

    Without a bound the scales are normalised to a geometric mean of 1.
    """
    scale = scale / np.exp(np.log(scale).mean())
    reach = np.max([each.hi for each in known.values()], axis=0)
    clipped = reach >= group.ceiling * (1 - CLOSE)
    if clipped.any():
        scale = np.minimum(scale / np.median(scale[clipped]), 1.0)
    least = reach * ROOM / group.ceiling  # 0 without a bound
    scale = np.maximum(scale, least)
    if rounded:
        scale = np.exp2(np.round(np.log2(scale)))
        scale = np.where(scale < least, 2 * scale, scale)
    return np.where(clipped | ((least > 1) & (group.ceiling < math.inf)), 1.0, scale)
