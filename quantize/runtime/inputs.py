"""Open data for a model, and stack samples to a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np

from ... import RequantError
from ...calibration.data.samples import Sample
from ...calibration.data.sources import DataSource, Source, open_source
from ...calibration.model.session import Array, InputSpec, ModelSource
from .session import Runner

UNSURE = 3
"""The rank of inputs whose fixed first axis may be channels or time: (C, H, W), (T, N, F) or (N, T, F)."""


def open_data(model: ModelSource, data: DataSource, samples: int | None = None) -> Source:
    """Open a data source for a model: all samples, or a number of evenly picked ones, see `Source.stretches`.

    Raises:
        RequantError: The runtime cannot load the model, or the source does not fit it.
    """
    return open_for(Runner(model, lean=True), data, samples)


def open_for(run: Runner, data: DataSource, samples: int | None = None, memory_limit: int | None = None) -> Source:
    """Open a source of data for a loaded model; see `open_data`. A sample may need `memory_limit` bytes.

    Raises:
        RequantError: The source does not fit the model.
    """
    return open_source(data, run.inputs, run.session, memory_limit).stretches(samples)


def first_sample(source: Source, batch: int) -> Sample:
    """Return the first feed, of `batch` items.

    Raises:
        RequantError: There is no sample, or the model's inputs have no free batch axis.
    """
    return next(iter(source)) if batch == 1 else stacked(source, batch)


def stacked(source: Source, batch: int) -> Sample:
    """Return one feed of `batch` items, repeating the samples if there are too few.

    Raises:
        RequantError: The model's inputs have no free batch axis.
    """
    sample = next(source.batches(batch))
    return replace(sample, feed=repeated(source, sample.feed, batch))


def repeated(source: Source, feed: Mapping[str, Array], batch: int) -> dict[str, Array]:
    """Return a feed of `batch` items, repeating those of a feed.

    Raises:
        RequantError: The model's inputs have no free batch axis.
    """
    free = all(spec.shape and not isinstance(spec.shape[0], int) for spec in source.inputs)
    if not free:
        fixed = next(spec for spec in source.inputs if not spec.shape or isinstance(spec.shape[0], int))
        raise RequantError(
            f"input {fixed.name!r} is {fixed}: its first axis is fixed, so the model takes no batch of {batch}"
        )
    try:
        return {name: np.resize(array, (batch, *array.shape[1:])) for name, array in feed.items()}
    except (MemoryError, ValueError) as error:  # ValueError: more bytes than an index counts
        raise RequantError(
            f"the inputs of a batch of {batch} do not fit into memory; choose a smaller batch"
        ) from error


def items_in(inputs: Iterable[InputSpec], feed: Mapping[str, Array], states: Collection[str] = ()) -> int | None:
    """Return how many items a feed has: the rows of its inputs with a batch axis.

    Return None if these differ, or if it is not known whether an axis is a batch axis. The first axis of an input of
    two or more axes is a batch axis if it is open. If no input has an open one, the fixed ones are batch axes, except
    where all inputs have `UNSURE` axes and several rows. A feed without batch axes is one item.

    Args:
        inputs: The inputs of the model.
        feed: Their arrays.
        states: The names of inputs that hold a state: their first axis may count layers.
    """
    counted = [spec for spec in inputs if spec.name in feed and spec.name not in states and len(spec.shape) > 1]
    free = [spec for spec in counted if not isinstance(spec.shape[0], int)]
    counts = {len(feed[spec.name]) for spec in free or counted}
    if len(counts) < 2:
        count = next(iter(counts), 1)
        sure = free or count == 1 or any(len(spec.shape) != UNSURE for spec in counted)
        return count if sure else None
    return None
