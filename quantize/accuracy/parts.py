"""Outputs that hold several quantities along one axis, for instance the boxes and the scores of a detector.

Boxes in pixels have a thousand times the amplitude of scores, so that the SQNR of the whole output says nothing of the
scores: at 38 dB, those of a YOLOv8n had 13 dB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...calibration.model.session import Array
from .classes import class_axis

GAP = 1e3
"""The ratio of powers (30 dB) between two rows that hold different quantities."""
QUIET = 1e-3
"""The power of a channel is raised to this share of the largest one: noise in a channel near zero says little."""
VALUES = 32
"""The least number of values per row: the power of fewer values is chance."""


class Part(NamedTuple):
    """The rows of an output with the smaller values.

    Attributes:
        where: The rows as an index: ``[:, 4:84]``, or ``[:, ...]`` if other rows are between them.
        signal: The sum of squares of the float model's values.
        noise: The sum of squares of the difference.
    """

    where: str
    signal: float
    noise: float


@dataclass(frozen=True, slots=True)
class Rows:
    """Sums over samples of the powers of an output's rows.

    Attributes:
        signal: The sum of squares of each row, (R,) float64; None before the first sample.
        noise: The same of the difference.
        filled: How many values of each row are not 0, (R,) int64.
        values: The number of values.
        axis: The axis of the rows.
        even: Whether all samples have the same rows, with finite values.
    """

    signal: Array | None = None
    noise: Array | None = None
    filled: Array | None = None
    values: int = 0
    axis: int = 0
    even: bool = True

    def with_sample(self, exact: Array, other: Array) -> Rows:
        """Return the sums with one more sample added."""
        if not self.even or exact.ndim < 2 or exact.shape != other.shape:
            return Rows(even=False)
        axis = self.axis or _row_axis(exact)
        with np.errstate(invalid="ignore", over="ignore"):
            signal, noise = squares(exact, axis), squares(exact.astype(np.float64) - other, axis)
        filled = _filled(exact, axis)
        if self.signal is not None and self.noise is not None:
            if axis >= exact.ndim or len(signal) != len(self.signal):
                return Rows(even=False)
            signal, noise, filled = signal + self.signal, noise + self.noise, filled + self.filled
        if not (np.isfinite(signal).all() and np.isfinite(noise).all()):
            return Rows(even=False)
        return Rows(signal, noise, filled, self.values + exact.size, axis)

    def quiet(self, least: float = 0.0) -> Part | None:
        """Return the part of the output with the smaller values; None if the output is of one kind.

        Args:
            least: The mean square that each row has at least.
        """
        if self.signal is None or self.noise is None or self.filled is None:
            return None
        signal = np.maximum(self.signal, least * self.values / len(self.signal))
        rows = quiet_rows(signal, self.filled, self.values)
        if rows is None:
            return None
        where = ":, " * self.axis + _index(rows)
        return Part(f"[{where}]", float(signal[rows].sum()), float(self.noise[rows].sum()))


def _row_axis(output: Array) -> int:
    """Return the axis along which an output may hold several quantities: the shorter one of two, else the channels."""
    if output.ndim == 3:
        return 1 if output.shape[1] < output.shape[2] else 2
    return class_axis(output)


def _index(rows: Array) -> str:
    """Return the index of rows in ascending order: a slice, or dots if other rows are between them."""
    first, end = int(rows[0]), int(rows[-1]) + 1
    return f"{first}:{end}" if len(rows) == end - first else "..."


def quiet_rows(signal: Array, filled: Array, values: int) -> Array | None:
    """Return the rows that hold a quantity of less power, in ascending order.

    The rows are sorted by power. If the largest ratio of one row to the row before it is at least `GAP`, these are the
    rows before this gap. Rows of zeros, for more than half, belong to neither part: a channel behind a Relu that is
    hardly ever above 0 has little power, and is no other quantity.

    Args:
        signal: The sum of squares of each row, (R,) float64.
        filled: How many values of each row are not 0, (R,) int64.
        values: The number of values in all rows.

    Returns:
        The indices of the rows, (Q,) int64; None without a gap, or with fewer than `VALUES` values per row.
    """
    order = np.argsort(signal, kind="stable")
    order = order[(signal[order] > 0) & (2 * len(signal) * filled[order] >= values)]
    if values < VALUES * len(signal) or len(order) < 2:
        return None
    with np.errstate(over="ignore"):
        gaps = signal[order[1:]] / signal[order[:-1]]
    widest = int(np.argmax(gaps))
    return np.sort(order[: widest + 1]) if gaps[widest] >= GAP else None


@dataclass(frozen=True, slots=True)
class Balance:
    """Weights of an output's rows that give all of its parts, or all of its channels, the same power.

    Attributes:
        weights: The weight of each row, (R,) float64. They keep the power of the whole output.
        axis: The axis of the rows.
    """

    weights: Array
    axis: int

    def noise(self, exact: Array, other: Array) -> float:
        """Return the weighted sum of squares of a difference; 0 if the shapes differ."""
        if exact.shape != other.shape:
            return 0.0
        with np.errstate(invalid="ignore", over="ignore"):
            return float(np.vdot(squares(exact.astype(np.float64) - other, self.axis), self.weights))


def balance(outputs: Sequence[Array], least: float = 0.0) -> Balance | None:
    """Return the weights that give both parts of an output the same power, or all channels of an output without parts.

    The channels are on the `class_axis`.

    Args:
        outputs: The output, an array per sample.
        least: The mean square that each channel has at least.

    Returns:
        The weights; None if an output has no channels, is not finite, or has fewer than `VALUES` values per channel.
    """
    if any(each.ndim < 2 or each.ndim != outputs[0].ndim for each in outputs):
        return None
    return _of_parts(outputs, least) or _of_channels(outputs, least)


def _of_parts(outputs: Sequence[Array], least: float) -> Balance | None:
    """Return the weights of an output with a quiet part, half of the power for each part; None without one."""
    axis = _row_axis(outputs[0])
    signal = _summed(outputs, axis, least)
    if signal is None:
        return None
    filled = np.sum([_filled(each, axis) for each in outputs], axis=0)
    rows = quiet_rows(signal, filled, sum(each.size for each in outputs))
    if rows is None:
        return None
    quiet = np.zeros(len(signal), bool)
    quiet[rows] = True
    half = signal.sum() / 2
    return Balance(np.where(quiet, half / signal[quiet].sum(), half / signal[~quiet].sum()), axis)


def _of_channels(outputs: Sequence[Array], least: float) -> Balance | None:
    """Return the weights of the channels; None with too few values or without a signal."""
    axis = class_axis(outputs[0])
    signal = _summed(outputs, axis, least)
    if signal is None or sum(each.size for each in outputs) < VALUES * len(signal) or not signal.any():
        return None
    loud = np.maximum(signal, QUIET * signal.max())
    return Balance(signal.sum() / (len(signal) * loud), axis)


def _summed(outputs: Sequence[Array], axis: int, least: float) -> Array | None:
    """Return the sum of squares of each row over all samples; None if rows differ in number or are not finite.

    Args:
        outputs: The output, an array per sample.
        axis: The axis of the rows.
        least: The mean square that each row has at least.
    """
    if len({each.shape[axis] for each in outputs}) != 1 or not outputs[0].shape[axis]:
        return None
    total = np.sum([squares(each, axis) for each in outputs], axis=0)
    total = np.maximum(total, least * sum(each.size for each in outputs) / len(total))
    return total if np.isfinite(total).all() else None


def squares(output: Array, axis: int) -> Array:
    """Return the sum of squares of each row along an axis, (R,) float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        each = np.square(output, dtype=np.float64)
    return np.asarray(each.sum(axis=_others(output, axis)))


def _filled(output: Array, axis: int) -> Array:
    """Return how many values of each row along an axis are not 0, (R,) int64."""
    return np.asarray(np.count_nonzero(output, axis=_others(output, axis)))


def _others(output: Array, axis: int) -> tuple[int, ...]:
    """Return all axes but one."""
    return tuple(each for each in range(output.ndim) if each != axis)
