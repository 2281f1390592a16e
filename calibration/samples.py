"""Samples of data, the check that a model can be fed with them, and the type of their readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from .. import RequantError, near
from .session import Array, InputSpec, type_name


class DataError(RequantError):
    """Data that a model cannot be fed with, or that makes it compute NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One feed of a model.

    Attributes:
        feed: One array per required input, with the batch axis.
        label: The expected answer: a class, an array whose first axis is the batch, or None.
        where: Where it comes from, for messages: ``"data.npz, sample 7"``.
    """

    feed: dict[str, Array]
    label: Array | int | None
    where: str


Picked: TypeAlias = Sequence[int] | None
"""Ascending positions of the samples to read; None reads all."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Data that can be read any number of times.

    Attributes:
        description: What it is, in words.
        length: How many samples there are; None when only reading will tell.
        read: Yields the samples at the picked positions, unchecked.
    """

    description: str
    length: int | None
    read: Callable[[Picked], Iterator[Sample]]


def checked(sample: Sample, inputs: Sequence[InputSpec]) -> Sample:
    """Return a sample with exactly the arrays that the model wants.

    float64 becomes float32 where float32 is wanted, and integers change their width where no value changes.
    Nothing else is converted.

    Raises:
        DataError: A name, type, shape or value is not what the model wants.
    """
    check_names(sample.feed, inputs, sample.where)
    return replace(
        sample, feed={spec.name: _checked_array(sample.feed[spec.name], spec, sample.where) for spec in inputs}
    )


def check_names(names: Mapping[str, object], inputs: Sequence[InputSpec], where: str) -> None:
    """Check that there is something for every input, and nothing else.

    Raises:
        DataError: A name is unknown or missing; the message lists near names.
    """
    known = [spec.name for spec in inputs]
    for name in names:
        if name not in known:
            raise DataError(f"{where}: the model has no input named {name!r}{near(str(name), known)}")
    for name in known:
        if name not in names:
            raise DataError(f"{where}: nothing for the model's input {name!r}{near(name, names)}")


def _checked_array(values: Array, spec: InputSpec, where: str) -> Array:
    """Return the array of one input as the model wants it."""
    array = _converted(values, spec.dtype)
    fits = len(values.shape) == len(spec.shape) and all(
        not isinstance(want, int) or want == got for want, got in zip(spec.shape, values.shape, strict=True)
    )
    if array is None or not fits:
        got = f"{type_name(values.dtype)} {values.shape}"
        raise DataError(f"{where}, input {spec.name!r}: expected {spec}, got {got}")
    if array.size == 0 and array.shape[0] == 0 and not isinstance(spec.shape[0], int):  # a batch of nothing
        raise DataError(f"{where}, input {spec.name!r}: expected {spec}, got an empty array of shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        position = tuple(int(index) for index in np.argwhere(~np.isfinite(array))[0])
        raise DataError(
            f"{where}, input {spec.name!r}: expected finite {spec.dtype}, got {values[position]} at {position}"
        )
    return array


def _converted(values: Array, want: np.dtype[Any]) -> Array | None:
    """Return the array as elements of type `want`; None when that is not allowed."""
    have = values.dtype.newbyteorder("=")
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
    """Return a feed's value as an array.

    Raises:
        DataError: It is none: ragged, or of Python objects.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: not an array: {' '.join(str(error).split())}") from error
    if array.dtype.hasobject:
        raise DataError(f"{where}: an array of Python objects; it must be of numbers")
    return array


def as_label(value: object, where: str) -> Array | int | None:
    """Return a label as an int, an array of numbers with at least one axis, or None.

    Raises:
        DataError: It is none of these.
    """
    if value is None:
        return None
    label = as_array(value, f"{where}, label")
    if label.dtype.kind not in "biuf":
        raise DataError(f"{where}, label: expected a number or an array of numbers, got {type_name(label.dtype)}")
    return int(label) if label.ndim == 0 and label.dtype.kind in "biu" else np.atleast_1d(label)
