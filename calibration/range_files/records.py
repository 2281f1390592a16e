"""Statistics as JSON values and back, exactly. Equal statistics give equal values in equal order.

A row is the JSON form of a statistic: `of` creates it, `build` returns the statistic. Integers and finite floats
survive JSON, because `repr` writes floats exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Protocol, Self, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from ... import RequantError
from ..model.session import Array
from ..statistics.exact import HALF, ExactSum
from ..statistics.extremes import MinMax
from ..statistics.histogram import MAX_BINS, Histogram
from ..statistics.observations import Observations, Place
from ..statistics.sums import Channels, Moments, Runs
from .decoding import Count, Finite, Natural, convert, convert_rows

Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Times: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
"""A count of at least one, see `Count`."""
Block: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=62)]
"""The number of a block of samples; block 62 begins at sample 2**62 - 1."""

MAX_POWER = 40
"""A sum of fewer than 2**63 float64 values has digits only between 2**(-32 * 36) and 2**(32 * 36)."""


class SumRow(Struct, frozen=True):
    """A sum: its shape and, for each power, its digits in C order."""

    shape: list[Natural]
    digits: list[tuple[int, list[Int64]]]

    @classmethod
    def of(cls, record: ExactSum) -> Self:
        """Return the row of a sum."""
        digits = [(int(power), record.digits[power].ravel().tolist()) for power in sorted(record.digits)]
        return cls(list(record.shape), digits)

    def build(self) -> ExactSum:
        """Return the sum.

        Raises:
            ValueError: The digits are not in the unique form of a sum.
        """
        if any(left >= right for (left, _), (right, _) in pairwise(self.digits)):
            raise ValueError("the powers of the digits must ascend")
        if any(abs(power) > MAX_POWER for power, _ in self.digits):
            raise ValueError("a power is out of range")
        shape = tuple(self.shape)
        return ExactSum(shape, {power: _digits(power, values, shape) for power, values in self.digits})


def _digits(power: int, values: list[int], shape: tuple[int, ...]) -> Array:
    """Return the digits of one power, int64 of this shape.

    Raises:
        ValueError: The number of digits does not fit the shape, or a digit is out of range.
    """
    digits = np.array(values, np.int64)
    if digits.size != math.prod(shape):
        raise ValueError(f"{digits.size} digits do not fit the shape {shape}")
    if not digits.any() or digits.min() < -HALF or digits.max() >= HALF:
        raise ValueError(f"digits of power {power} are out of range")
    return digits.reshape(shape)


def _sum_of(row: SumRow, name: str, shape: tuple[int, ...]) -> ExactSum:
    """Return the sum of a row.

    Raises:
        ValueError: The sum is invalid or has another shape.
    """
    total = row.build()
    if total.shape != shape:
        raise ValueError(f"{name!r} must be of shape {shape}, not {total.shape}")
    with np.errstate(invalid="ignore"):
        if np.isnan(total.value).any():  # digits of both signs beyond float64
            raise ValueError(f"{name!r} is not a number")
    return total


class MinMaxRow(Struct, frozen=True, tag_field="kind", tag="minmax"):
    """The extremes of a tensor."""

    lo: Finite
    hi: Finite
    count: Times

    @classmethod
    def of(cls, record: MinMax) -> Self:
        """Return the row of a statistic."""
        return cls(_float(record.lo), _float(record.hi), int(record.count))

    def build(self) -> MinMax:
        """Return the statistic."""
        return MinMax(_float(self.lo), _float(self.hi), self.count)


class HistogramRow(Struct, frozen=True, tag_field="kind", tag="histogram"):
    """The histogram of a tensor."""

    lo: Finite
    hi: Finite
    exponent: int
    first: int
    counts: list[Count]

    @classmethod
    def of(cls, record: Histogram) -> Self:
        """Return the row of a histogram."""
        lo, hi = _float(record.lo), _float(record.hi)
        return cls(lo, hi, int(record.exponent), int(record.first), record.counts.tolist())

    def build(self) -> Histogram:
        """Return the histogram."""
        counts = np.array(self.counts, np.int64)
        if counts.size > MAX_BINS or sum(self.counts) > 2**53:
            raise ValueError("the counts are out of range")
        return Histogram(_float(self.lo), _float(self.hi), self.exponent, self.first, counts)


class RunsRow(Struct, frozen=True):
    """The extremes of a tensor in single runs. A block is its number, `lo` and `hi`."""

    count: Times
    ends: SumRow
    blocks: list[tuple[Block, Finite, Finite]]

    @classmethod
    def of(cls, record: Runs) -> Self:
        """Return the row of a statistic."""
        blocks = [(int(block), _float(lo), _float(hi)) for block, (lo, hi) in sorted(record.blocks.items())]
        return cls(int(record.count), SumRow.of(record.ends), blocks)

    def build(self) -> Runs:
        """Return the statistic.

        Raises:
            ValueError: The blocks are invalid or do not fit the count.
        """
        if any(lo > hi for _, lo, hi in self.blocks):
            raise ValueError("the lower end of a block is above the upper end")
        if not 0 < len(self.blocks) <= self.count:
            raise ValueError("the blocks do not fit the count")
        if any(left >= right for (left, *_), (right, *_) in pairwise(self.blocks)):
            raise ValueError("the blocks must ascend")
        blocks = {block: (_float(lo), _float(hi)) for block, lo, hi in self.blocks}
        return Runs(self.count, _sum_of(self.ends, "ends", (2,)), blocks)


class ChannelsRow(Struct, frozen=True):
    """The extremes and sums of channels."""

    lo: list[Finite]
    hi: list[Finite]
    total: SumRow
    count: Times

    @classmethod
    def of(cls, record: Channels) -> Self:
        """Return the row of a statistic."""
        lo, hi = (record.lo + 0.0).tolist(), (record.hi + 0.0).tolist()
        return cls(lo, hi, SumRow.of(record.total), int(record.count))

    def build(self) -> Channels:
        """Return the statistic.

        Raises:
            ValueError: The extremes do not fit each other.
        """
        lo, hi = (np.array(end, np.float64) + 0.0 for end in (self.lo, self.hi))
        if lo.shape != hi.shape or not (lo <= hi).all():
            raise ValueError("the channels' extremes do not fit each other")
        return Channels(lo, hi, _sum_of(self.total, "total", lo.shape), self.count)


class MomentsRow(Struct, frozen=True):
    """The sums that give mean and variance."""

    count: Times
    powers: SumRow

    @classmethod
    def of(cls, record: Moments) -> Self:
        """Return the row of a statistic."""
        return cls(int(record.count), SumRow.of(record.powers))

    def build(self) -> Moments:
        """Return the statistic.

        Raises:
            ValueError: The sum of squares is negative.
        """
        powers = _sum_of(self.powers, "powers", (2,))
        if powers.value[1] < 0:
            raise ValueError("the sum of squares is negative")
        return Moments(self.count, powers)


class PlaceRow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The position of a sample and its name in messages."""

    position: Count
    where: str

    @classmethod
    def of(cls, record: Place) -> Self:
        """Return the row of a place."""
        return cls(record.position, record.where)

    def build(self) -> Place:
        """Return the place."""
        return Place(self.position, self.where)


class FeedRow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first place of a feed, and the number of its occurrences."""

    position: Count
    where: str
    times: Times

    def build(self) -> tuple[Place, int]:
        """Return the place and the number."""
        return Place(self.position, self.where), self.times


class TensorRow(Struct, frozen=True):
    """The statistics of one tensor."""

    statistic: MinMaxRow | HistogramRow | UnsetType = UNSET
    runs: RunsRow | UnsetType = UNSET
    channels: ChannelsRow | UnsetType = UNSET
    broken: PlaceRow | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Check that a broken tensor has no statistic."""
        if self.broken is not UNSET and self.statistic is not UNSET:
            raise ValueError("both 'broken' and 'statistic'")

    @classmethod
    def of(cls, seen: Observations, name: str) -> Self:
        """Return the row of a tensor."""
        statistic = seen.ranges.get(name)
        return cls(
            HistogramRow.of(statistic) if isinstance(statistic, Histogram) else _row(MinMaxRow, statistic),
            _row(RunsRow, seen.runs.get(name)),
            _row(ChannelsRow, seen.channels.get(name)),
            _row(PlaceRow, seen.broken.get(name)),
        )


def _row(kind: Any, record: object) -> Any:
    """Return the row of a record; UNSET for None."""
    return UNSET if record is None else kind.of(record)


class ObservationsRow(Struct, frozen=True):
    """The statistics of a run. The rows are `TensorRow`, `MomentsRow` and `FeedRow`, each sorted by key."""

    samples: Count
    tensors: dict[str, Any]
    inputs: dict[str, Any]
    feeds: dict[str, Any]


def observations_to_json(seen: Observations) -> dict[str, Any]:
    """Return the statistics of a run as JSON values, see `ObservationsRow`."""
    names = sorted({*seen.ranges, *seen.runs, *seen.channels, *seen.broken})
    feeds = sorted(seen.repeated.items())
    row = ObservationsRow(
        seen.samples,
        {name: TensorRow.of(seen, name) for name in names},
        {name: MomentsRow.of(moments) for name, moments in sorted(seen.moments.items())},
        {digest: FeedRow(place.position, place.where, times) for digest, (place, times) in feeds},
    )
    return dict(msgspec.to_builtins(row))


def observations_from_json(value: object) -> Observations:
    """Return the statistics of a run from the JSON values of `observations_to_json`.

    Raises:
        RequantError: An entry is missing or invalid; the message names the tensor, input or feed.
    """
    document = convert(value, ObservationsRow, "statistics")
    tensors = convert_rows(document.tensors, TensorRow, "tensor")
    inputs = convert_rows(document.inputs, MomentsRow, "input")
    feeds = convert_rows(document.feeds, FeedRow, "feed")
    return Observations(
        ranges=_build({name: row.statistic for name, row in tensors.items()}, "tensor"),
        runs=_build({name: row.runs for name, row in tensors.items()}, "tensor"),
        channels=_build({name: row.channels for name, row in tensors.items()}, "tensor"),
        moments=_build(inputs, "input"),
        broken=_build({name: row.broken for name, row in tensors.items()}, "tensor"),
        repeated=_build(feeds, "feed"),
        samples=document.samples,
    )


T_co = TypeVar("T_co", covariant=True)


class _Row(Protocol[T_co]):
    """A row that builds a statistic."""

    def build(self) -> T_co: ...


def _build(rows: Mapping[str, _Row[T_co] | UnsetType], noun: str) -> dict[str, T_co]:
    """Return the statistics of all rows that are set.

    Raises:
        RequantError: A statistic is invalid; the message names the row.
    """
    built = {}
    for name, row in rows.items():
        if not isinstance(row, UnsetType):
            try:
                built[name] = row.build()
            except (ValueError, ArithmeticError) as error:
                raise RequantError(f"{noun} {name!r}: {error}") from error
    return built


def _float(value: float) -> float:
    """Return a plain float; -0.0 becomes 0.0."""
    return float(value) + 0.0
