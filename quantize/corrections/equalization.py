"""Choose scales of channels with the least expected rounding noise, from statistics of a few samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import onnx_ir as ir

from ...calibration.data.samples import Sample
from ...calibration.execution import Execution
from ...calibration.runs.runner import observe
from ...system.printable import number_of
from ...transforms.graphs.queries import node_name
from ...transforms.graphs.rewriter import names, unused_name
from ...transforms.parts.equalize import Group, equalize, groups
from ..job import Job
from ..model.files import serialize
from .channel_noise import Channels, Floats, Reader, reader_of, total

SAMPLES = 64
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
LEAST_GAIN = 0.05
"""A group keeps its channels if scales remove less than this share of its noise: the estimate is not more exact."""
NARROWEST = 2.0**-7
"""Smaller ranges, as a share of the widest, are raised to this value, because they may be chance."""
SUMS = frozenset({"Add", "Sub"})
TINY = 1e-30
CLOSE = 1e-3
"""A channel is clipped if it comes within this share of the bound of a Clip."""
ROOM = 1.125
"""A channel that is not clipped stays below the bound of a Clip by this factor, because other data may be larger."""


def equalize_channels(job: Job) -> Job:
    """Return a job whose simplified model has its channels scaled for the least noise in integers.

    The names of nodes and tensors stay, so the plan stays valid. Tensors with ranges or QDQ pairs from the user are
    left alone.

    Raises:
        RequantError: The data do not fit the model.
    """
    if job.source is None or not may_scale(job):
        return job
    model = job.simple.clone()
    usable = [group for group in groups(model) if not job.reserved.intersection(group.tensors)]
    scales = choose(usable, observed(model, usable, job.source.samples(SAMPLES)), integer_nodes(job))
    if not scales:
        return job
    equalize(model, scales)
    note = f"channels of {number_of(len(scales), 'group')} of tensors scaled for integers"
    source = serialize(model, job.folder)
    return replace(job, simple=model, float_source=source, notes=(*job.notes, note), scaled=job.scaled | {"equalize"})


def may_scale(job: Job) -> bool:
    """Whether scales of channels can be chosen: by the user's data, for ranges of these data, and small weights."""
    return job.judged and job.source is not None and job.supply.ranges is None and not job.weights.large


def integer_nodes(job: Job) -> set[str]:
    """Return the names of the nodes that read uint8 where all units are int8 that can be."""
    plan = job.all_int8_plan
    return {name for unit in plan.units if plan.impl(unit).reads_u8 for name in unit.nodes}


def observed(model: ir.Model, groups: Iterable[Group], samples: Iterable[Sample]) -> dict[str, Channels]:
    """Return the statistics of the channels that decide the scales. Tensors that are not finite are left out.

    Raises:
        RequantError: The data do not fit the model.
    """
    axes = {name: group.tensors[name] for group in groups for name in _deciding(group) if name in group.tensors}
    return channel_statistics(model, axes, samples)


def channel_statistics(model: ir.Model, axes: Mapping[str, int], samples: Iterable[Sample]) -> dict[str, Channels]:
    """Return the statistics of the channels of tensors by name. Tensors that are not finite are left out.

    Args:
        model: The model.
        axes: The channel axis of each tensor, counted from the end.
        samples: The samples.

    Raises:
        RequantError: The data do not fit the model.
    """
    if not axes:
        return {}
    probe = model.clone()
    values = ir.convenience.create_value_mapping(probe.graph, include_subgraphs=False)
    taken, squares = names(probe), {}
    for name in axes:
        square = ir.node("Mul", [values[name], values[name]], name=unused_name(taken, f"{name}_square"))
        square.outputs[0].name, squares[name] = square.name, str(square.name)
        probe.graph.append(square)
    targets = {each: axis for name, axis in axes.items() for each in (name, squares[name])}
    execution = Execution(strict=False)
    seen = observe(serialize(probe), (), samples, histogram=False, channel_axis=targets, execution=execution).channels
    return {
        name: Channels(seen[name].lo, seen[name].hi, seen[name].mean, seen[squares[name]].mean)
        for name in axes
        if name in seen and squares[name] in seen
    }


def choose(groups: Sequence[Group], known: Mapping[str, Channels], integer: Collection[str]) -> dict[str, Floats]:
    """Return the scales with the least noise, powers of two of shape (C,), by `Group.tensor`.

    Args:
        groups: The groups, in execution order.
        known: Statistics of the channels of their tensors.
        integer: Names of the nodes that compute in integers.
    """
    chosen: dict[str, Floats] = {}
    importance: dict[str, Floats] = {}
    for group in reversed(groups):  # the readers behind a depthwise convolution weigh the noise of its channels
        folds = [fold for fold in group.readers if node_name(fold.node) in integer]
        read = [reader_of(fold, importance.get(_result(fold.node)) if fold.groups > 1 else None) for fold in folds]
        readers = [reader for reader in read if reader is not None and reader.tensor in known]
        if not readers:
            continue
        columns = np.sum([reader.columns for reader in readers], axis=0)
        importance.update(dict.fromkeys(group.tensors, columns))
        summed = [name for name in _summed(group, integer) if name in known]
        if (scale := _best(group, readers, known, summed)) is not None:
            chosen[group.tensor] = scale
    return {group.tensor: chosen[group.tensor] for group in groups if group.tensor in chosen}


def _result(node: ir.Node) -> str:
    """Return the name of a node's first output."""
    return str(node.outputs[0].name)


def _deciding(group: Group) -> list[str]:
    """Return the tensors of a group that a product or a sum reads, or a Clip writes."""
    sums = [value.name for node in group.passed if node.op_type in SUMS for value in node.inputs if value is not None]
    return list(dict.fromkeys([*(fold.tensor for fold in group.readers), *map(str, sums), *_clipped(group)]))


def _clipped(group: Group) -> list[str]:
    """Return the results of the Clip nodes of a group with an upper bound."""
    return [_result(node) for node in group.passed if node.op_type == "Clip" and group.ceiling < math.inf]


def _summed(group: Group, integer: Collection[str]) -> list[str]:
    """Return the tensors of a group that sums in integers read, once per sum."""
    sums = [node for node in group.passed if node.op_type in SUMS and node_name(node) in integer]
    return [
        str(value.name) for node in sums for value in node.inputs if value is not None and value.name in group.tensors
    ]


def _best(
    group: Group, readers: Sequence[Reader], known: Mapping[str, Channels], summed: Sequence[str]
) -> Floats | None:
    """Return the scale with the least noise, (C,); None if it removes less than `LEAST_GAIN` of the noise."""
    if any(name not in known for name in _clipped(group)):
        return None
    channels = {name: known[name] for name in {*summed, *_clipped(group), *(reader.tensor for reader in readers)}}
    activations = relative(np.max([each.reach for each in channels.values()], axis=0))
    weights = relative(np.max([reader.reach / reader.reach.max(initial=TINY) for reader in readers], axis=0))
    best, least = None, total(readers, channels, summed, np.ones(group.channels)) * (1 - LEAST_GAIN)
    for a, w in product(EXPONENTS, EXPONENTS):
        scale = _allowed(group, channels, activations**a / weights**w)
        noise = total(readers, channels, summed, scale)
        if noise < least:
            best, least = scale, noise
    return best


def relative(ranges: Floats) -> Floats:
    """Return ranges relative to the widest one, each at least `NARROWEST`."""
    widest = float(ranges.max(initial=0.0))
    return np.maximum(ranges / widest, NARROWEST) if widest > 0 else np.ones_like(ranges)


def _allowed(group: Group, known: Mapping[str, Channels], scale: Floats) -> Floats:
    """Return powers of two near `scale` with which no more channels reach the bound of a Clip; clipped ones keep 1.

    Without a bound the scales are normalized to a geometric mean of 1.
    """
    scale = scale / np.exp(np.log(scale).mean())
    reach = np.max([each.hi for each in known.values()], axis=0)
    clipped = reach >= group.ceiling * (1 - CLOSE)
    if clipped.any():
        scale = np.minimum(scale / np.median(scale[clipped]), 1.0)
    least = reach * ROOM / group.ceiling  # 0 without a bound
    scale = np.exp2(np.round(np.log2(np.maximum(scale, least))))
    scale = np.where(scale < least, 2 * scale, scale)
    return np.where(clipped | ((least > 1) & (group.ceiling < math.inf)), 1.0, scale)
