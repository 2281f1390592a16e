"""Groups of tensors that a run takes whole: as many at a time as fit in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..data.samples import Sample
from ..model.bodies import tensors_in_bodies, tensors_of
from ..model.copies import infer_types, load_copy
from ..model.session import ModelSource
from .taps import Targets, open_tap

if TYPE_CHECKING:
    import onnx_ir as ir

OVERHEAD = 2**28
"""Bytes of a process without weights and activations."""
COPIES = 3
"""Copies of the weights in memory while a session opens: as read, as passed to the runtime, and packed."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The tensors that are taken whole, by runs of the model.

    Attributes:
        names: The tensors of each run.
        room: The number of runs of the largest group that fit in memory at a time, at least 1.
    """

    names: tuple[tuple[str, ...], ...] = ((),)
    room: int = 2**16


def groups_of(model: ModelSource, targets: Targets, sample: Sample, limit: int, batch: int) -> Groups:
    """Split the tensors that are taken whole into groups that fit a memory limit, in the order of the graph.

    The model runs once per group, up to the last tensor of the group. Unless activations are huge, there is one group.

    Args:
        model: The model.
        targets: The tensors and statistics to observe.
        sample: A sample of typical size.
        limit: The memory limit of the process in bytes. At least a quarter of it is for the tensors.
        batch: The largest number of stacked samples.

    Raises:
        UnknownNameError: The model has no such tensor.
        RequantError: The model cannot be read, or a tensor cannot be observed.
    """
    if not targets.histogram:
        return Groups()
    copy, _ = load_copy(model)
    values = tensors_of(copy.graph)
    tensors_in_bodies(copy.graph, targets.names)
    order = {name: index for index, name in enumerate(values)}
    whole = sorted((name for name in targets.tensors if name in values), key=order.__getitem__)
    infer_types(copy, whole)
    sizes = _sizes(copy, {name: values[name] for name in whole}, sample)
    if sizes is None:
        sizes = _measured_sizes(model, whole, sample, few=targets.few)
    constants = (value.const_value for graph in copy.graphs() for value in graph.initializers.values())
    weights = sum(tensor.nbytes for tensor in constants if tensor is not None)
    budget = max(limit - COPIES * weights - OVERHEAD, limit // 4) // batch
    groups: list[list[str]] = [[]]
    group_bytes = [0]
    for name in whole:
        if groups[-1] and group_bytes[-1] + sizes[name] > budget:
            groups.append([])
            group_bytes.append(0)
        groups[-1].append(name)
        group_bytes[-1] += sizes[name]
    return Groups(tuple(map(tuple, groups)), max(1, budget // max(*group_bytes, 1)))


def _sizes(copy: ir.Model, values: Mapping[str, ir.Value], sample: Sample) -> dict[str, int] | None:
    """Return each tensor's bytes for a feed, computed from the model's shapes; None if a shape is unknown."""
    symbols: dict[str, int] = {}
    for graph_input in copy.graph.inputs:
        if graph_input.name in sample.feed and graph_input.shape is not None:
            symbols |= {
                str(axis.value): length
                for axis, length in zip(graph_input.shape, sample.feed[graph_input.name].shape, strict=True)
                if not isinstance(axis, int) and axis.value
            }
    sizes = {}
    for name, value in values.items():
        if value.shape is None or value.dtype is None:
            return None
        axes = [axis if isinstance(axis, int) else symbols.get(str(axis.value)) for axis in value.shape]
        if None in axes:
            return None
        sizes[name] = math.prod(axis for axis in axes if axis is not None) * math.ceil(value.dtype.itemsize)
    return sizes


def _measured_sizes(model: ModelSource, names: Sequence[str], sample: Sample, *, few: bool) -> dict[str, int]:
    """Return each tensor's bytes as float32, measured by a run that keeps no tensor."""
    tap = open_tap(model, (), Targets(tuple(names), few=few))
    counts = dict(zip(tap.order, tap.extremes(tap.run(sample))[:, 3].tolist(), strict=True))
    fed = {name: array.nbytes for name, array in sample.feed.items()}
    return {name: int(counts[name]) * 4 if name in counts else fed.get(name, 0) for name in names}
