"""The sample that is timed where the work of a model depends on its data: one on which models do the same work.

A loop until a condition makes more or fewer steps in INT8. A table reader made 170 steps in place of 24 on one sample,
and about as many as in float on the others: the times of that sample say nothing of both models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...calibration.data.samples import Sample
from ...calibration.data.sources import Source
from ...calibration.model.session import Feed
from ...transforms.graphs.queries import computing_nodes
from .inputs import repeated
from .loads import Load, by_size, load_of, shapes_text
from .runtimes import LoadedModel

SIZED_BY_DATA = ("Loop", "NonZero", "NonMaxSuppression", "Unique", "Compress")
"""Operators whose work, or the size of whose results, depends on the values of tensors."""
ALIKE = 1.05
"""Outputs whose sizes differ by a factor up to this one have the same length: the work differs by as much at most."""


def work_depends_on_data(model: ir.Model) -> bool:
    """Return whether the values of the inputs of a model may decide how much it computes."""
    return bool(computing_nodes(model, *SIZED_BY_DATA))


def agreeing(load: Load, source: Source, models: Sequence[LoadedModel]) -> Load:
    """Return a load for which models return outputs of about the same size; the given one if they do for it.

    Of `COMPARED` samples it is the first one whose outputs are `ALIKE`, else that whose outputs are most alike.
    Decoders keep their load: their cache has the lengths of the inputs.

    Args:
        load: What is timed otherwise.
        source: The data.
        models: The models that are timed.

    Raises:
        RequantError: A model refuses a feed.
    """
    if load.regime is not None or source.links:
        return load
    usual = apart(models, load.feed)
    least, best = usual, None
    for sample in _from_the_middle(source):
        if least <= ALIKE:
            break
        found = apart(models, sample.feed)
        if found < least:
            least, best = found, sample
    return load if best is None else _load_of(best, load, source, f"{_factor(least)} apart, not {_factor(usual)}")


def apart(models: Sequence[LoadedModel], feed: Feed) -> float:
    """Return the greatest factor between the sizes that models return of the same output; 1 if all are equal."""
    sizes: dict[str, list[int]] = {}
    for model in models:
        for name, value in model(feed).items():
            sizes.setdefault(name, []).append(_size(value))
    return max(((1 + max(each)) / (1 + min(each)) for each in sizes.values()), default=1.0)


def _size(value: Any) -> int:
    """Return the number of elements of an output, which may be a sequence of tensors or nothing."""
    if isinstance(value, list):
        return sum(map(_size, value))
    return 0 if value is None else int(np.size(value))


def _from_the_middle(source: Source) -> Iterator[Sample]:
    """Yield the first samples of a source, those of a middle size first."""
    samples = by_size(source)
    middle = (len(samples) - 1) / 2
    places = sorted(range(len(samples)), key=lambda place: math.fabs(place - middle))
    return (samples[place] for place in places)


def _load_of(sample: Sample, load: Load, source: Source, why: str) -> Load:
    """Return a load with the inputs of a sample."""
    feed = sample.feed if load.asked == 1 else repeated(source, sample.feed, load.asked)
    found = load_of(source, feed, load.asked, load.regime)
    place = sample.where.rpartition("/")[2]
    told = f"{place}, where the lengths of outputs are {why} as on the usual sample"
    return replace(found, shapes=shapes_text(source, feed, found.batch), sample=told)


def _factor(value: float) -> str:
    """Return a factor as text: ``7.1x``."""
    return f"{value:.2f}x" if value < 2 else f"{value:.1f}x"
