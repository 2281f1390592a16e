"""Sources of data: what ``--data`` accepts, as samples that can be read again and again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .. import RequantError
from .arrays import folder, npz_file
from .objects import python_file, python_module, python_object
from .samples import DataError, Picked, Rows, Sample, checked
from .session import Array, InputSpec

__all__ = ["DataError", "DataSource", "Sample", "Source", "open_source"]

DataSource: TypeAlias = str | os.PathLike[str] | Iterable[Any] | Callable[[], Iterable[Any]]
"""A text that names data, or from Python feeds or (feed, label) pairs, or what returns them."""

FORMS = (
    "FILE.npz, FILE.npz:SPLIT, a folder of .npz files (or of .npy files for a model with one input), "
    "FILE.py:NAME or PACKAGE.MODULE:NAME"
)


@dataclass(frozen=True, slots=True)
class Source:
    """Samples of a model's input, checked as they are read; iterate over it as often as needed.

    Attributes:
        inputs: What the model wants.
        rows: Where the samples come from.
        picked: Positions of the samples to read; None reads all.
    """

    inputs: tuple[InputSpec, ...]
    rows: Rows
    picked: Picked = None

    @property
    def description(self) -> str:
        """What it is, in words."""
        return self.rows.description if self.picked is None else f"{self.rows.description} ({len(self.picked)} samples)"

    @property
    def length(self) -> int | None:
        """How many samples there are; None when only reading will tell."""
        return None if self.rows.length is None else len(self.picked) if self.picked is not None else self.rows.length

    def __iter__(self) -> Iterator[Sample]:
        """Yield every sample, checked.

        Raises:
            DataError: A sample does not fit the model, or there is none at all.
        """
        rows = self.rows.read(self.picked)
        first = next(rows, None)
        if first is None:
            raise DataError(f"{self.description}: holds no samples")
        yield checked(first, self.inputs)
        del first  # only the sample in use is kept
        yield from (checked(sample, self.inputs) for sample in rows)

    def samples(self, n: int) -> Source:
        """Return `n` samples picked evenly, or all when there are fewer; the first `n` when their number is unknown.

        Raises:
            RequantError: `n` is below 1.
        """
        if n < 1:
            raise RequantError(f"cannot pick {n} samples; at least 1 is needed")
        have: Sequence[int] | None = self.picked
        if have is None and self.rows.length is not None:
            have = range(self.rows.length)
        if have is None:
            return replace(self, picked=range(n))
        if n >= len(have):
            return self
        return replace(self, picked=tuple(have[index * len(have) // n] for index in range(n)))

    def batches(self, size: int) -> Iterator[Sample]:
        """Yield the samples in order, neighbours stacked along the batch axis to at most `size` entries.

        Samples are stacked when their shapes agree and the first axis of every input is a batch axis: free,
        and of one symbol. Others come one by one. Labels are arrays of shape (B,) or (B, ...).

        Raises:
            RequantError: `size` is below 1.
            DataError: As when iterating.
        """
        if size < 1:
            raise RequantError(f"cannot make batches of {size}; at least 1 is needed")
        group: list[Sample] = []
        entries = 0
        free = _has_batch_axis(self.inputs)
        for sample in self:
            lengths = {len(array) for array in sample.feed.values()} if free else set()
            count = lengths.pop() if len(lengths) == 1 else size  # `size` entries leave no room for a neighbour
            if group and (entries + count > size or _layout(sample) != _layout(group[0])):
                yield _stacked(group)
                group, entries = [], 0
            group.append(sample)
            entries += count
        yield _stacked(group)


def _has_batch_axis(inputs: Sequence[InputSpec]) -> bool:
    """Tell whether every input begins with a free axis, all of one symbol where they have one."""
    first = {spec.shape[0] if spec.shape else 0 for spec in inputs}
    return not any(isinstance(axis, int) for axis in first) and len(first - {None}) <= 1


def _layout(sample: Sample) -> object:
    """Return what must be equal for two samples to be stacked."""
    label = None if sample.label is None else np.shape(sample.label)[1:]
    return [(name, array.dtype, array.shape) for name, array in sample.feed.items()], label, sample.label is None


def _stacked(group: Sequence[Sample]) -> Sample:
    """Stack samples of one layout."""
    first, last = group[0], group[-1]
    labels: Array | None = None
    if first.label is not None:
        labels = np.concatenate([np.atleast_1d(sample.label) for sample in group])  # type: ignore[arg-type]
    if len(group) == 1:
        return replace(first, label=labels)
    feed = {name: np.concatenate([sample.feed[name] for sample in group]) for name in first.feed}
    return Sample(feed, labels, f"{first.where} to {last.where}")


def open_source(spec: DataSource, inputs: Sequence[InputSpec]) -> Source:
    """Open a source of data for a model with these inputs.

    Args:
        spec: ``FILE.npz``, ``FILE.npz:SPLIT``, a folder, ``FILE.py:NAME``, ``PACKAGE.MODULE:NAME``; or from
            Python an iterable of feeds or (feed, label) pairs, or a callable that returns one.
        inputs: What the model wants; see `requant.calibration.input_specs`.

    Raises:
        RequantError: There is no such source, or it does not fit the model.
    """
    if isinstance(spec, (str, os.PathLike)):
        return Source(tuple(inputs), _open_text(os.fspath(spec), inputs))
    if isinstance(spec, (bytes, bytearray)):
        raise DataError(f"bytes are no data source; give {FORMS}, or an iterable of feeds")
    return Source(tuple(inputs), python_object(spec))


def _open_text(spec: str, inputs: Sequence[InputSpec]) -> Rows:
    """Open a source that is named by a text."""
    if not spec:
        raise DataError(f"no data source is named; give {FORMS}")
    if Path(spec).is_dir():
        return folder(spec, inputs)
    if match := re.fullmatch(r"(.+\.npz)(?::(.+))?", spec):
        if not Path(match[1]).is_file():
            raise DataError(f"{match[1]}: no such file")
        return npz_file(match[1], match[2], inputs)
    if match := re.fullmatch(r"(.+\.py):(\w+)", spec):
        return python_file(match[1], match[2])
    if match := re.fullmatch(r"([A-Za-z_][\w.]*):(\w+)", spec):
        return python_module(match[1], match[2])
    problem = "cannot be read as data" if Path(spec).exists() else "no such file or folder"
    raise DataError(f"{spec}: {problem}; a data source is {FORMS}")
