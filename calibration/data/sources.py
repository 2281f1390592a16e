"""Sources of data: the values of ``--data`` as samples that can be read repeatedly."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ... import RequantError
from ...system.given import check_function, check_kind, checked_integer, names_of
from ...system.printable import number_of
from ...system.regular import check_regular
from ..execution import quarter_of_memory
from ..model.session import InputSpec, ModelSource, Serialized, open_session, output_specs, run_session
from ..model.state import Link, find_links, possible, with_feeders
from . import audio, images, text
from .arrays import SUFFIXES, array_folder, npz_file
from .media import Reading, files_below
from .objects import failing_at, named, python_object
from .onnx_sets import onnx_folder, onnx_sets
from .samples import MOST, DataError, Picked, Rows, Sample, checked, feed_layout, stacked
from .sequences import Carrier, gives_state, read_ahead, reader_inputs, stretches

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

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
"""The options of data sources, and the kinds of data that they apply to."""


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The text that names data, and the options to read them. Another process can open the same data with it.

    Attributes:
        text: ``FILE.npz``, a folder, ``FILE.csv``, ...: see `open_source`. From Python also feeds, for `state`.
        preprocess: The processing of images, sounds or records: ``"resize=256 crop=224 scale=255"``.
        tokenizer: Converts a text to a dict of arrays: ``FILE.py:NAME``, ``PACKAGE.MODULE:NAME``, or a callable, which
            must be picklable for use in other processes.
        labels: The path of a table of files and labels, for folders of images or sounds.
        state: Texts ``OUT=IN``: the outputs that feed inputs of the next sample; ``("none",)`` for samples that do not
            depend on each other; None to recognise them, see `requant.calibration.model.state`.
        memory_limit: The most bytes that one sample of a file may need; None for a quarter of the machine's memory.
    """

    text: str | Iterable[Any] | Callable[[], Iterable[Any]]
    preprocess: str | None = None
    tokenizer: str | Callable[..., Any] | None = None
    labels: str | None = None
    state: tuple[str, ...] | None = None
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        """Refuse options of another type.

        Raises:
            RequantError: There is one.
        """
        check_kind(self.preprocess, (str, NoneType), "preprocess must be a text")
        check_kind(self.labels, (str, os.PathLike, NoneType), "labels must be the path of a table")
        if not isinstance(self.tokenizer, (str, NoneType)):
            check_function(self.tokenizer, "tokenizer")
        if self.state is not None:
            object.__setattr__(self, "state", names_of(self.state, "state"))
        if self.memory_limit is not None:
            object.__setattr__(self, "memory_limit", checked_integer(self.memory_limit, "memory_limit", 1))

    @property
    def limit(self) -> int:
        """The most bytes that one sample may need."""
        return self.memory_limit or quarter_of_memory()


DataSource: TypeAlias = str | os.PathLike[str] | DataSpec | Iterable[Any] | Callable[[], Iterable[Any]]
"""A text that names data; from Python, also feeds or (feed, label) pairs, or a callable that returns them."""


@dataclass(frozen=True, slots=True)
class Source:
    """Samples of a model's input, checked as they are read. It can be iterated over repeatedly.

    Attributes:
        inputs: The model's inputs.
        rows: The origin of the samples.
        picked: Positions of the samples to read; None for all.
        reference: The specification that opens all samples of the same data in another process; None for Python
            objects, and for samples with a carried state.
        carrier: Carries the state of the float model from sample to sample; None for samples by themselves.
        given: The state that names show, and that is not carried because the data give it with each sample.
        possible: Links that the shapes alone suggest, where neither the user nor the names tell the state.
    """

    inputs: tuple[InputSpec, ...]
    rows: Rows
    picked: Picked = None
    reference: DataSpec | None = None
    carrier: Carrier | None = None
    given: tuple[Link, ...] = ()
    possible: tuple[Link, ...] = ()

    @property
    def links(self) -> tuple[Link, ...]:
        """The state that is carried from sample to sample."""
        return () if self.carrier is None else self.carrier.links

    @property
    def description(self) -> str:
        """The name of the data in messages."""
        return (
            self.rows.description
            if self.picked is None
            else f"{self.rows.description} ({number_of(len(self.picked), 'sample')})"
        )

    @property
    def length(self) -> int | None:
        """The number of samples; None if it is unknown before reading."""
        return None if self.rows.length is None else len(self.picked) if self.picked is not None else self.rows.length

    def __iter__(self) -> Iterator[Sample]:
        """Yield every sample, checked.

        Raises:
            DataError: A sample does not fit the model, or there are no samples.
        """
        rows = self.rows.read(self.picked)
        first = next(rows, None)
        if first is None:
            raise DataError(f"{self.description}: holds no samples")
        yield checked(first, self.inputs)
        del first  # keep only the sample in use
        yield from (checked(sample, self.inputs) for sample in rows)

    def read(self, positions: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples at ascending positions, checked. Positions count from 0 among the samples of this source.

        Positions after the last sample of a source of unknown length yield nothing.

        Raises:
            RequantError: There is no such position.
            DataError: A sample does not fit the model.
        """
        if self.length is not None and positions and not 0 <= positions[-1] < self.length:
            raise RequantError(f"{self.description}: no sample {positions[-1]}; there are {self.length}")
        picked = positions if self.picked is None else [self.picked[position] for position in positions]
        yield from (checked(sample, self.inputs) for sample in self.rows.read(picked))

    def samples(self, n: int) -> Source:
        """Return `n` evenly picked samples; all if there are fewer; the first `n` if their number is unknown.

        Steps of sequences of unknown number are picked among the first ones, see `read_ahead`.

        Raises:
            RequantError: `n` is below 1, or so large that memory cannot hold the positions.
        """
        n = checked_integer(n, "samples", 1)
        n = min(n, sys.maxsize // 8)
        positions: Sequence[int] | None = self.picked
        if positions is None and self.rows.length is not None:
            positions = range(self.rows.length)
        if positions is None and self.rows.starts is not None:
            positions = range(self.rows.starts(read_ahead(n))[1])
        if positions is None:
            return replace(self, picked=range(n))
        if n >= len(positions):
            return self
        if n > MOST:
            raise RequantError(f"cannot pick {n} samples; at most {MOST} are")
        return replace(self, picked=tuple(positions[index * len(positions) // n] for index in range(n)))

    def stretches(self, n: int | None) -> Source:
        """Return `n` samples like `samples`, but in sequences of samples as many behind each other as possible.

        With None, return all samples.

        Raises:
            RequantError: `n` is below 1, or so large that memory cannot hold the positions.
        """
        if n is None:
            if (self.length or 0) > MOST:
                raise DataError(f"{self.description}: holds {self.length} samples; use at most {MOST} of them")
            return self
        if self.rows.starts is None or n < 1 or (self.length is not None and n >= self.length):
            return self.samples(n)
        starts, count = self.rows.starts(read_ahead(n) if self.length is None else None)
        positions = range(count) if self.picked is None else self.picked
        return replace(self, picked=tuple(stretches(starts, positions, n)))

    def batches(self, size: int) -> Iterator[Sample]:
        """Yield the samples in order, with neighbours stacked along the batch axis to at most `size` entries.

        Samples are stacked if their shapes agree and the first axis of every input is a batch axis: not fixed, with the
        same symbol for all inputs. Other samples come one by one. Labels are arrays of shape (B,) or (B, ...).

        Raises:
            RequantError: `size` is below 1.
            DataError: A sample does not fit the model, or there are no samples.
        """
        if size < 1:
            raise RequantError(f"cannot make batches of {size}; at least 1 is needed")
        group: list[Sample] = []
        entries = 0
        free = has_batch_axis(self.inputs)
        for sample in self:
            lengths = {len(array) for array in sample.feed.values()} if free else set()
            count = lengths.pop() if len(lengths) == 1 else size  # a sample of `size` entries stays alone
            if group and (entries + count > size or _layout(sample) != _layout(group[0])):
                yield stacked(group)
                group, entries = [], 0
            group.append(sample)
            entries += count
        yield stacked(group)


def named_files(data: DataSource | ModelSource | None) -> list[str | os.PathLike[str]]:
    """Return the texts of a data source that may name files, which no output may overwrite."""
    given = [getattr(data, each.name) for each in fields(data)] if isinstance(data, DataSpec) else [data]
    return [each for each in given if isinstance(each, (str, os.PathLike))]


def has_batch_axis(inputs: Sequence[InputSpec]) -> bool:
    """Return whether every input has a first axis that is not fixed, and all symbols of these axes are equal."""
    first = {spec.shape[0] if spec.shape else 0 for spec in inputs}
    return not any(isinstance(axis, int) for axis in first) and len(first - {None}) <= 1


def _layout(sample: Sample) -> object:
    """Return the properties that must be equal for two samples to be stacked."""
    label = None if sample.label is None else np.shape(sample.label)[1:]
    return feed_layout(sample), label, sample.label is None


def open_source(
    spec: DataSource,
    inputs: Sequence[InputSpec],
    model: ModelSource | InferenceSession | None = None,
    memory_limit: int | None = None,
) -> Source:
    """Open a source of data for a model with these inputs.

    If the model has a state, samples that lack it are steps of sequences, see `Carrier`. A state that is only
    recognised is not carried if the first two samples give it.

    Args:
        spec: ``FILE.npz``, ``FILE.npz:SPLIT``, a folder, ``FILE.csv``, ``FILE.jsonl``, ``FILE.py:NAME``,
            ``PACKAGE.MODULE:NAME``, or a `DataSpec` with one of these; from Python, also an iterable of feeds or (feed,
            label) pairs, a callable that returns one, a data set or its loader.
        inputs: The model's inputs, from `requant.calibration.input_specs`.
        model: The float model, which computes the state, or an open session of it; None for samples that do not depend
            on each other.
        memory_limit: The most bytes that one sample may need, unless the `DataSpec` says it.

    Raises:
        RequantError: There is no such source, or it does not fit the model.
    """
    if not isinstance(spec, DataSpec):
        spec = DataSpec(os.fspath(spec) if isinstance(spec, os.PathLike) else spec)
    spec = replace(spec, memory_limit=spec.memory_limit or memory_limit)
    if model is not None:
        return _open_for(model, spec, tuple(inputs))
    return Source(tuple(inputs), _open_rows(spec, inputs), reference=_reference(spec))


def _reference(spec: DataSpec) -> DataSpec | None:
    """Return the specification by which another process opens the data; None for Python objects."""
    return spec if isinstance(spec.text, str) else None


def _open_for(model: ModelSource | InferenceSession, spec: DataSpec, inputs: tuple[InputSpec, ...]) -> Source:
    """Open the data of a model. Samples are steps of sequences if it has a state that the data do not give."""
    stored = isinstance(model, (str, bytes, os.PathLike, Serialized))
    session = open_session(model, lean=True) if stored else model
    outputs = output_specs(session)
    links = find_links(spec.state, inputs, outputs)
    rows = _open_rows(spec, reader_inputs(inputs, links, outputs) if links else with_feeders(inputs, outputs))
    if not links:
        seen = possible(inputs, outputs) if spec.state is None else ()
        return Source(inputs, rows, reference=_reference(spec), possible=seen)
    if spec.state is None and gives_state(rows, links):
        return Source(inputs, _open_rows(spec, inputs), reference=_reference(spec), given=links)
    if stored:
        session = open_session(model, threads=1)
    carrier = Carrier(rows, inputs, outputs, links, partial(run_session, session))
    return Source(inputs, carrier.carried(), carrier=carrier)


def _open_rows(spec: DataSpec, inputs: Sequence[InputSpec]) -> Rows:
    """Open a source whose errors are all refusals of one line.

    Data are whatever others have written, and reading them runs decoders and the user's code. This is the one boundary
    where an error that a reader did not expect becomes a refusal that names the data and the sample.
    """
    name = spec.text if isinstance(spec.text, str) else f"a {type(spec.text).__name__}"
    with failing_at(f"{name}: cannot be opened as data"):
        return guarded(_open_kind(spec, inputs))


def guarded(rows: Rows) -> Rows:
    """Return rows whose reader raises only RequantError, and KeyboardInterrupt."""

    def read(picked: Picked) -> Iterator[Sample]:
        samples = rows.read(picked)
        for position in count():
            index = picked[position] if picked is not None and position < len(picked) else position
            with failing_at(f"{rows.description}, sample {index}: cannot be read"):
                sample = next(samples, None)
            if sample is None:
                return
            yield sample
            del sample  # keep only the sample in use

    return replace(rows, read=read)


def _open_kind(spec: DataSpec, inputs: Sequence[InputSpec]) -> Rows:
    """Open a source by its kind."""
    if isinstance(spec.text, str):
        return _open_text(spec, spec.text, inputs)
    if isinstance(spec.text, (bytes, bytearray)):
        raise DataError(f"bytes are no data source; pass {FORMS}, or an iterable of feeds")
    _refuse_unused(spec, "a Python object")
    return python_object(spec.text, inputs=inputs)


def _open_text(spec: DataSpec, name: str, inputs: Sequence[InputSpec]) -> Rows:
    """Open a source that a text names."""
    if not name:
        raise DataError(f"the data source is an empty text; pass {FORMS}")
    if os.path.isdir(name):
        return _open_folder(spec, name, inputs)
    if match := re.fullmatch(r"(.+\.npz)(?::(.+))?", name):
        _refuse_unused(spec, "a .npz file")
        check_regular(match[1])
        return npz_file(match[1], match[2], inputs, spec.limit)
    if Path(name).suffix.lower() in text.SUFFIXES:
        _refuse_unused(spec, "a text file", "preprocess", "tokenizer")
        return text.text_file(name, spec.preprocess, spec.tokenizer, inputs)
    if (target := named(name)) is not None:
        _refuse_unused(spec, "a Python object")
        return python_object(target.value, target.name, target.folder, inputs)
    if Path(name).suffix.lower() == ".npy":
        raise DataError(f"{name}: one array; put .npy files into a folder and name that, or save the arrays as .npz")
    problem = "cannot be read as data" if os.path.exists(name) else "no such file or folder"
    raise DataError(f"{name}: {problem}; a data source is {FORMS}")


def _open_folder(spec: DataSpec, path: str, inputs: Sequence[InputSpec]) -> Rows:
    """Open a folder with files of one kind.

    Raises:
        DataError: The folder has no files that can be read, or several kinds of files.
    """
    sets = onnx_sets(path)
    arrays = files_below(path, SUFFIXES, deep=False)
    deep = not sets and not arrays  # only images and sounds are read from sub-folders too
    pictures, sounds = (files_below(path, kind.SUFFIXES, deep=deep) for kind in (images, audio))
    kinds: Mapping[str, Sequence[str | Path]] = {
        "test_data_set_*": sets,
        ".npz or .npy files": arrays,
        "images": pictures,
        ".wav files": sounds,
    }
    present = [f"{kind} ({os.path.relpath(files[0], path)})" for kind, files in kinds.items() if files]
    if not present:
        raise DataError(f"{path}: the folder holds no .npz or .npy files, images, .wav files or test_data_set_*")
    if len(present) > 1:
        raise DataError(f"{path}: the folder holds {' and '.join(present)}; it must hold one kind of files")
    if sets:
        _refuse_unused(spec, "test_data_set_*")
        return onnx_folder(path, sets, inputs, spec.limit)
    if arrays:
        _refuse_unused(spec, "a folder of arrays")
        return array_folder(path, arrays, inputs, spec.limit)
    _refuse_unused(spec, "a folder of images or .wav files", "preprocess", "labels")
    read, files = (images.image_folder, pictures) if pictures else (audio.audio_folder, sounds)
    return read(path, files, Reading(spec.preprocess, spec.labels, spec.limit), inputs)


def _refuse_unused(spec: DataSpec, what: str, *used: str) -> None:
    """Refuse options that the kind of data does not use.

    Raises:
        DataError: There is such an option.
    """
    for option, of in OPTIONS.items():
        if option not in used and getattr(spec, option) is not None:
            where = spec.text if isinstance(spec.text, str) else "the data"
            raise DataError(f"{where}: {what} takes no {option}; it is for {of}")
