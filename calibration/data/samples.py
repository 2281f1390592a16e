"""Samples of data, their conversion to a model's inputs, and the type of their readers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from ... import RequantError, near
from ..model.session import Array, InputSpec, required, type_name
from ..model.state import Link

SEQUENCE = "sequence"
"""An array of whole numbers beside the inputs of a model with state: a new number begins a new sequence."""


SURROGATES = (0xD800, 0xDFFF)
"""The numbers of halves of pairs in UTF-16, which are no characters."""
MOST = 2**24
"""The most samples of a run. A small compressed file can hold far more, whose positions alone fill the memory."""


class DataError(RequantError):
    """Data that do not fit a model, or that make it compute NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Step:
    """The place of a sample in a sequence.

    Attributes:
        sequence: The position of the first sample of the sequence in the data.
        index: The number of steps before this one in the sequence.
        links: The state: the outputs that feed inputs of the next step.
        following: Of a decoder, the first tokens of the next step (N, 1); None if there is no next step, or if it is
            not read.
    """

    sequence: int
    index: int
    links: tuple[Link, ...]
    following: Array | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """One feed of a model.

    Attributes:
        feed: One array per required input, with the batch axis.
        label: The expected answer: a class, an array whose first axis is the batch, or None.
        where: The origin, for messages: ``"data.npz, sample 7"``.
        step: The place in a sequence whose state is carried; None for a sample by itself.
    """

    feed: dict[str, Array]
    label: Array | int | None
    where: str
    step: Step | None = None


Picked: TypeAlias = Sequence[int] | None
"""Ascending positions of the samples to read; None for all."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Data that can be read any number of times.

    Attributes:
        description: The name of the data in messages.
        length: The number of samples; None if it is unknown before reading.
        read: Yields the samples at the picked positions, unchecked.
        random: Whether a position can be read without reading those before it.
        foreign: Whether reading runs the user's code, which may not be thread-safe.
        starts: Returns the positions where sequences begin among a number of first samples (None: among all), and how
            many samples there are up to that number; None for samples that do not depend on each other.
    """

    description: str
    length: int | None
    read: Callable[[Picked], Iterator[Sample]]
    random: bool = False
    foreign: bool = False
    starts: Callable[[int | None], tuple[Sequence[int], int]] | None = None


def in_batches(rows: Rows, spec: InputSpec) -> Rows:
    """Stack the samples to whole batches if the model has one input with a fixed batch size.

    Args:
        rows: Samples of one entry each. Their number is known.
        spec: The model's input.

    Raises:
        DataError: The number of samples is no multiple of the batch size.
    """
    batch = spec.shape[0]
    if not isinstance(batch, int) or batch <= 1 or rows.length is None:
        return rows
    if left := rows.length % batch:
        raise DataError(
            f"{rows.description}, input {spec.name!r}: the model needs batches of {batch}, and {rows.length} samples "
            f"are no multiple: drop {left} or add {batch - left}"
        )
    length = rows.length // batch

    def read(picked: Picked) -> Iterator[Sample]:
        batches = range(length) if picked is None else picked
        entries = rows.read([index * batch + entry for index in batches for entry in range(batch)])
        while group := list(islice(entries, batch)):
            yield stacked(group)

    return replace(rows, length=length, read=read)


def with_batch_axis(sample: Sample, inputs: Sequence[InputSpec]) -> Sample:
    """Add a batch axis of 1 to each array of a sample whose input has one axis more than the array."""
    ranks = {spec.name: len(spec.shape) for spec in inputs}
    feed = {name: array[None] if array.ndim + 1 == ranks.get(name) else array for name, array in sample.feed.items()}
    if all(feed[name] is array for name, array in sample.feed.items()):
        return sample
    label = sample.label
    if isinstance(label, np.ndarray) and label.shape != (1,):  # shape (1,) is one label already
        label = label[None]
    return replace(sample, feed=feed, label=label)


def feed_layout(sample: Sample) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    """Return name, type and shape of each array. Samples with equal layouts can be stacked."""
    return [(name, array.dtype, array.shape) for name, array in sample.feed.items()]


def stacked(group: Sequence[Sample]) -> Sample:
    """Stack samples along the batch axis.

    Raises:
        DataError: Their shapes differ.
    """
    first, last = group[0], group[-1]
    labels: Array | None = None
    if first.label is not None:
        labels = np.concatenate([np.atleast_1d(sample.label) for sample in group])  # type: ignore[arg-type]
    if len(group) == 1:
        return replace(first, label=labels)
    where = f"{first.where} to {last.where}"
    try:
        feed = {name: np.concatenate([sample.feed[name] for sample in group]) for name in first.feed}
    except ValueError as error:
        raise DataError(f"{where}: arrays of different shapes cannot be stacked: {error}") from error
    return Sample(feed, labels, where)


def checked(sample: Sample, inputs: Sequence[InputSpec]) -> Sample:
    """Return a sample with exactly the arrays of the model's inputs; optional ones may be missing.

    float64 becomes float32 if the input is float32. Integers change their width if no value changes. There is no other
    conversion.

    Raises:
        DataError: A name, type, shape or value does not fit the input.
    """
    check_names(sample.feed, inputs, sample.where)
    present = [spec for spec in inputs if spec.name in sample.feed]
    feed = {spec.name: _checked_array(sample.feed[spec.name], spec, sample.where) for spec in present}
    return replace(sample, feed=feed)


def missing(
    spec: InputSpec, given: Iterable[str], used: Iterable[str], inputs: Sequence[InputSpec], prefix: str = ""
) -> str:
    """Return what may help where an input has no array: a similar name that no other input uses, or a state.

    Args:
        spec: The input.
        given: The names of all arrays.
        used: The names that other inputs use.
        inputs: The model's inputs.
        prefix: What the names of the arrays begin with.
    """
    names = [*given]
    free = [other for other in names if other not in {*used}]
    hint = near(prefix + spec.name, free) if free or not names else ""
    several = len([*required(inputs)]) > 1
    if not several or not names or spec.fed_by == ():
        return hint
    pair = f"{spec.fed_by[0]}={spec.name}" if spec.fed_by and len(spec.fed_by) == 1 else f"OUT={spec.name}"
    return f"{hint}; if an output of the model feeds it: --state {pair} (in Python: DataSpec(state=['{pair}']))"


def nearest(name: str, inputs: Sequence[InputSpec]) -> str:
    """Return what is near to a name that is no input: similar names, or all inputs of the model.

    The marker `SEQUENCE` is an array of the data and no input of the model. It is told apart from the inputs.

    Args:
        name: The wrong name.
        inputs: The inputs that data may give.
    """
    own = [spec.name for spec in inputs if spec.name != SEQUENCE or not spec.optional]
    every = [spec.name for spec in inputs]
    similar = near(name, every)
    if len(own) == len(every) or repr(SEQUENCE) in similar:
        return similar
    listed = near(name, own)
    return listed if "did you mean" in listed else f"{listed}; and {SEQUENCE!r} may number the sequence of each step"


def check_names(names: Mapping[str, object], inputs: Sequence[InputSpec], where: str) -> None:
    """Check that every required input has an array and that there are no other arrays.

    Raises:
        DataError: A name is unknown or missing; the message lists similar names.
    """
    known = [spec.name for spec in inputs]
    for name in names:
        if name not in known:
            raise DataError(f"{where}: the model has no input named {name!r}{nearest(str(name), inputs)}")
    for spec in required(inputs):
        if spec.name not in names:
            hint = missing(spec, names, known, inputs)
            raise DataError(f"{where}: no array for the model's input {spec.name!r}{hint}")


def _checked_array(values: Array, spec: InputSpec, where: str) -> Array:
    """Return the array of one input with the input's type."""
    array = _converted(values, spec.dtype)
    if array is None or not _fits(values.shape, spec):
        got = f"{type_name(values.dtype)} {values.shape}"
        raise DataError(f"{where}, input {spec.name!r}: expected {spec}, got {got}{_advice(values, spec)}")
    if array.size == 0 and array.shape[0] == 0 and not isinstance(spec.shape[0], int):  # an empty batch
        raise DataError(f"{where}, input {spec.name!r}: expected {spec}, got an empty array of shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        position = tuple(int(index) for index in np.argwhere(~np.isfinite(array))[0])
        raise DataError(
            f"{where}, input {spec.name!r}: expected finite {spec.dtype}, got {values[position]} at {position}"
        )
    if array.dtype.kind == "U" and not _is_text(array):
        raise DataError(f"{where}, input {spec.name!r}: holds text that is not Unicode")
    return array


def _fits(shape: Sequence[int], spec: InputSpec) -> bool:
    """Return whether an array of a shape has the rank and the fixed lengths of an input."""
    return len(shape) == len(spec.shape) and all(
        not isinstance(want, int) or want == got for want, got in zip(spec.shape, shape, strict=True)
    )


def _advice(values: Array, spec: InputSpec) -> str:
    """Return what to do with an array that is no array of the input, as the end of a message; empty if unknown."""
    axes = range(values.ndim)
    if not _fits(values.shape, spec) and values.ndim > 2:
        for order in ((0, *axes[2:], 1), (0, axes[-1], *axes[1:-1])):
            if _fits([values.shape[axis] for axis in order], spec):
                return f"; its channels are at another place: transpose the array by {order}"
    if spec.dtype.kind == "f" and values.dtype.kind in "iu" and _fits(values.shape, spec):
        return f"; convert it to {spec.dtype} and scale it as in training"
    return ""


def _is_text(array: Array) -> bool:
    """Return whether every text of an array can be written in UTF-8, as the runtime takes it."""
    codes = np.frombuffer(array.tobytes(), np.uint32)
    return not bool(((codes > sys.maxunicode) | ((codes >= SURROGATES[0]) & (codes <= SURROGATES[1]))).any())


def _converted(values: Array, want: np.dtype[Any]) -> Array | None:
    """Return the array with elements of type `want`; None if the conversion is not allowed."""
    have = values.dtype.newbyteorder("=")
    if have.kind == "b" == want.kind:
        return np.asarray(values.view(np.uint8) != 0)  # a file may hold other bytes than 0 and 1
    if have == want or (have.kind == "U" and want.kind == "U"):
        return values.astype(have, copy=False)
    if have == np.float64 and want == np.float32:
        with np.errstate(over="ignore"):  # the result is checked for infinity
            return values.astype(want)
    if have.kind in "iu" and want.kind in "iu" and values.size:
        bounds = np.iinfo(want)
        if bounds.min <= int(values.min()) and int(values.max()) <= bounds.max:
            return values.astype(want)
    return None


def as_array(value: object, where: str) -> Array:
    """Convert a feed's value to an array. The value is anything that NumPy converts, or that has a method ``numpy``.

    Raises:
        DataError: The value is ragged, has Python objects, or is a tensor that NumPy cannot read.
    """
    if not isinstance(value, np.ndarray):
        if getattr(value, "requires_grad", False) is True:
            raise DataError(f"{where}: the tensor requires grad; pass tensor.detach()")
        if str(getattr(value, "dtype", "")).endswith("bfloat16"):
            raise DataError(f"{where}: NumPy has no bfloat16; pass tensor.float()")
    if np.ma.is_masked(value):
        raise DataError(f"{where}: a masked array, whose masked values would count; pass array.filled(value)")
    try:
        numpy = getattr(value, "numpy", None)
        array = np.asarray(numpy() if callable(numpy) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: not an array: {' '.join(str(error).split())}") from error
    if array.dtype == object and array.size and all(isinstance(each, str) for each in array.flat):
        array = array.astype(np.str_)  # pandas holds texts as objects
    if array.dtype.hasobject:
        raise DataError(f"{where}: an array of Python objects; expected numbers")
    return array


def as_label(value: object, where: str) -> Array | int | None:
    """Return a label as an int, an array of numbers with at least one axis, or None.

    Raises:
        DataError: The label has another type.
    """
    if value is None:
        return None
    if isinstance(value, np.integer):  # the usual label, of an array of them
        return int(value)
    label = as_array(value, f"{where}, label")
    if label.dtype.kind not in "biuf":
        raise DataError(f"{where}, label: expected a number or an array of numbers, got {type_name(label.dtype)}")
    return int(label) if label.ndim == 0 and label.dtype.kind in "biu" else np.atleast_1d(label)
