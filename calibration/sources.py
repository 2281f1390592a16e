"""Sources of data: what ``--data`` accepts, as samples that can be read again and again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .. import RequantError
from . import audio, images, text
from .arrays import array_folder, npz_file
from .media import files_below
from .objects import named, python_object
from .onnx_sets import onnx_folder, onnx_sets
from .samples import DataError, Picked, Rows, Sample, checked, stacked
from .session import InputSpec

__all__ = ["DataError", "DataSource", "DataSpec", "Sample", "Source", "open_source"]

FORMS = (
    "FILE.npz, FILE.npz:SPLIT, a folder of .npz files (or of .npy files for a model with one input), of images, of "
    ".wav files or of test_data_set_*, FILE.csv or FILE.jsonl with a tokenizer, FILE.py:NAME or PACKAGE.MODULE:NAME"
)
OPTIONS = {
    "preprocess": "folders of images or .wav files, .csv and .jsonl files",
    "tokenizer": ".csv and .jsonl files",
    "labels": "folders of images or .wav files",
}
"""What else may be said of data, and of which."""


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Data that a text names, and how they become feeds. Another process opens the same data by it.

    Attributes:
        text: ``FILE.npz``, a folder, ``FILE.csv``, ...: see `open_source`.
        preprocess: What is done to images, sounds or records: ``"resize=256 crop=224 scale=255"``.
        tokenizer: What turns a text into a dict of arrays: ``FILE.py:NAME``, ``PACKAGE.MODULE:NAME``, or a callable,
            which is pickled with the rest where that is done.
        labels: Path of a table of files and labels, for folders of images or sounds.
    """

    text: str
    preprocess: str | None = None
    tokenizer: str | Callable[..., Any] | None = None
    labels: str | None = None


DataSource: TypeAlias = str | os.PathLike[str] | DataSpec | Iterable[Any] | Callable[[], Iterable[Any]]
"""A text that names data, or from Python feeds or (feed, label) pairs, or what returns them."""


@dataclass(frozen=True, slots=True)
class Source:
    """Samples of a model's input, checked as they are read; iterate over it as often as needed.

    Attributes:
        inputs: What the model wants.
        rows: Where the samples come from.
        picked: Positions of the samples to read; None reads all.
        reference: What opens the same data, before any were picked, elsewhere; None for Python objects.
    """

    inputs: tuple[InputSpec, ...]
    rows: Rows
    picked: Picked = None
    reference: DataSpec | None = None

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

    def read(self, positions: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples at ascending positions, counted from 0 among the samples of this source, checked.

        Positions behind the last sample of a source of unknown length yield nothing.

        Raises:
            RequantError: There is no such position.
            DataError: A sample does not fit the model.
        """
        if self.length is not None and positions and not 0 <= positions[-1] < self.length:
            raise RequantError(f"{self.description}: no sample {positions[-1]}; there are {self.length}")
        picked = positions if self.picked is None else [self.picked[position] for position in positions]
        yield from (checked(sample, self.inputs) for sample in self.rows.read(picked))

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
        free = has_batch_axis(self.inputs)
        for sample in self:
            lengths = {len(array) for array in sample.feed.values()} if free else set()
            count = lengths.pop() if len(lengths) == 1 else size  # `size` entries leave no room for a neighbour
            if group and (entries + count > size or _layout(sample) != _layout(group[0])):
                yield stacked(group)
                group, entries = [], 0
            group.append(sample)
            entries += count
        yield stacked(group)


def has_batch_axis(inputs: Sequence[InputSpec]) -> bool:
    """Tell whether every input begins with a free axis, all of one symbol where they have one."""
    first = {spec.shape[0] if spec.shape else 0 for spec in inputs}
    return not any(isinstance(axis, int) for axis in first) and len(first - {None}) <= 1


def _layout(sample: Sample) -> object:
    """Return what must be equal for two samples to be stacked."""
    label = None if sample.label is None else np.shape(sample.label)[1:]
    return [(name, array.dtype, array.shape) for name, array in sample.feed.items()], label, sample.label is None


def open_source(spec: DataSource, inputs: Sequence[InputSpec]) -> Source:
    """Open a source of data for a model with these inputs.

    Args:
        spec: ``FILE.npz``, ``FILE.npz:SPLIT``, a folder, ``FILE.csv``, ``FILE.jsonl``, ``FILE.py:NAME``,
            ``PACKAGE.MODULE:NAME``, or a `DataSpec` of one; or from Python an iterable of feeds or (feed, label)
            pairs, a callable that returns one, a data set or a loader of one.
        inputs: What the model wants; see `requant.calibration.input_specs`.

    Raises:
        RequantError: There is no such source, or it does not fit the model.
    """
    if isinstance(spec, (str, os.PathLike)):
        spec = DataSpec(os.fspath(spec))
    if isinstance(spec, DataSpec):
        return Source(tuple(inputs), _open_text(spec, inputs), reference=spec)
    if isinstance(spec, (bytes, bytearray)):
        raise DataError(f"bytes are no data source; give {FORMS}, or an iterable of feeds")
    return Source(tuple(inputs), python_object(spec, inputs=inputs))


def _open_text(spec: DataSpec, inputs: Sequence[InputSpec]) -> Rows:
    """Open a source that is named by a text."""
    name = spec.text
    if not name:
        raise DataError(f"no data source is named; give {FORMS}")
    if Path(name).is_dir():
        return _open_folder(spec, inputs)
    if match := re.fullmatch(r"(.+\.npz)(?::(.+))?", name):
        _refuse_unused(spec, "a .npz file")
        if not Path(match[1]).is_file():
            raise DataError(f"{match[1]}: no such file")
        return npz_file(match[1], match[2], inputs)
    if Path(name).suffix.lower() in text.SUFFIXES:
        _refuse_unused(spec, "a file of texts", "preprocess", "tokenizer")
        return text.text_file(name, spec.preprocess, spec.tokenizer, inputs)
    if (found := named(name)) is not None:
        _refuse_unused(spec, "a Python object")
        return python_object(found.value, found.name, found.folder, inputs)
    problem = "cannot be read as data" if Path(name).exists() else "no such file or folder"
    raise DataError(f"{name}: {problem}; a data source is {FORMS}")


def _open_folder(spec: DataSpec, inputs: Sequence[InputSpec]) -> Rows:
    """Open a folder by what it holds.

    Raises:
        DataError: It holds nothing that can be read, or several kinds of files.
    """
    path = spec.text
    sets = onnx_sets(path)
    arrays = sorted(entry.path for entry in os.scandir(path) if entry.name.endswith((".npz", ".npy")))
    deep = not sets and not arrays  # only images and sounds are also read from sub-folders
    pictures, sounds = (files_below(path, kind.SUFFIXES, deep=deep) for kind in (images, audio))
    kinds: Mapping[str, Sequence[str | Path]] = {
        "test_data_set_*": sets,
        ".npz or .npy files": arrays,
        "images": pictures,
        ".wav files": sounds,
    }
    held = [f"{kind} ({os.path.relpath(found[0], path)})" for kind, found in kinds.items() if found]
    if not held:
        raise DataError(f"{path}: the folder holds no .npz or .npy files, images, .wav files or test_data_set_*")
    if len(held) > 1:
        raise DataError(f"{path}: the folder holds {' and '.join(held)}; it must hold one kind")
    if sets:
        _refuse_unused(spec, "test_data_set_*")
        return onnx_folder(path, sets, inputs)
    if arrays:
        _refuse_unused(spec, "a folder of arrays")
        return array_folder(path, inputs)
    _refuse_unused(spec, "a folder of images or .wav files", "preprocess", "labels")
    read, files = (images.image_folder, pictures) if pictures else (audio.audio_folder, sounds)
    return read(path, files, spec.preprocess, spec.labels, inputs)


def _refuse_unused(spec: DataSpec, what: str, *used: str) -> None:
    """Refuse what would be given and not be used.

    Raises:
        DataError: There is such an option.
    """
    for option, of in OPTIONS.items():
        if option not in used and getattr(spec, option) is not None:
            raise DataError(f"{spec.text}: {what} takes no {option}, which is for {of}")
