"""The results of running a model over data, and how two results merge."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ... import RequantError
from ...system.given import check_kind
from .extremes import MinMax
from .histogram import Histogram, Statistic
from .sums import Channels, Moments, Runs


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A sample's position in the data and its name in messages.

    Attributes:
        position: The position in the whole data, from 0.
        where: The name in messages: ``"data.npz, sample 7"``.
    """

    position: int
    where: str


@dataclass(frozen=True, slots=True)
class Observations:
    """The statistics of a run over data. ``|`` is exact, associative and commutative.

    Attributes:
        ranges: The statistic of each observed tensor that has values.
        runs: The extremes per run of the same tensors.
        channels: The extremes and means per channel, for the tensors with a requested channel axis.
        moments: The mean and variance of each float input.
        broken: Tensors with NaN or infinity -> the first sample that causes it. These tensors have no statistic.
        repeated: The digest of each feed -> its first place and the number of its occurrences.
        samples: The number of samples.
    """

    ranges: Mapping[str, Statistic] = field(default_factory=dict)
    runs: Mapping[str, Runs] = field(default_factory=dict)
    channels: Mapping[str, Channels] = field(default_factory=dict)
    moments: Mapping[str, Moments] = field(default_factory=dict)
    broken: Mapping[str, Place] = field(default_factory=dict)
    repeated: Mapping[str, tuple[Place, int]] = field(default_factory=dict)
    samples: int = 0

    def __or__(self, other: Observations) -> Observations:
        """Merge two runs over different data.

        Raises:
            RequantError: A tensor has statistics of different kinds, or with different numbers of channels.
        """
        if not isinstance(other, Observations):
            return NotImplemented
        broken = dict(self.broken)
        for name, place in other.broken.items():
            broken[name] = min(broken.get(name, place), place)
        repeated = dict(self.repeated)
        for digest, (place, times) in other.repeated.items():
            first, before = repeated.get(digest, (place, 0))
            repeated[digest] = (min(first, place), before + times)
        return Observations(
            _without(merge(self.ranges, other.ranges), broken),
            _without(merge(self.runs, other.runs), broken),
            _without(merge(self.channels, other.channels), broken),
            merge(self.moments, other.moments),
            broken,
            repeated,
            self.samples + other.samples,
        )

    def without(self, names: Container[str]) -> Observations:
        """Return a copy without the ranges, extremes, channels and moments of some tensors."""
        return replace(
            self,
            ranges=_without(self.ranges, names),
            runs=_without(self.runs, names),
            channels=_without(self.channels, names),
            moments=_without(self.moments, names),
        )


T = TypeVar("T")


def _without(statistics: Mapping[str, T], names: Container[str]) -> dict[str, T]:
    """Return the statistics of all tensors except `names`."""
    return {name: statistic for name, statistic in statistics.items() if name not in names}


MERGED = "merge takes two mappings from names of tensors to statistics"
"""The error for another argument."""
KINDS: Mapping[type, str] = {
    MinMax: "min and max alone",
    Histogram: "a histogram",
    Runs: "the extremes of runs",
    Channels: "the statistics of channels",
    Moments: "moments",
}
"""What the kinds of statistics are called in an error."""
Merged = TypeVar("Merged", MinMax | Histogram, Runs, Channels, Moments)


def merge(left: Mapping[str, Merged], right: Mapping[str, Merged]) -> dict[str, Merged]:
    """Merge the statistics of each tensor. A statistic that only one side has stays as it is.

    Raises:
        RequantError: The two statistics of a tensor have different kinds, or different numbers of channels; or an
            argument is no mapping from names to statistics.
    """
    for side in (left, right):
        check_kind(side, Mapping, MERGED)
        for statistic in side.values():
            check_kind(statistic, tuple(KINDS), MERGED)
    merged = dict(left)
    for name, statistic in right.items():
        try:
            merged[name] = merged[name] | statistic if name in merged else statistic  # type: ignore[operator]
        except TypeError:
            one, two = sorted(KINDS[type(each)] for each in (statistic, merged[name]))
            raise RequantError(f"tensor {name!r}: {one} cannot be merged with {two}") from None
        except ValueError as error:
            raise RequantError(f"tensor {name!r} {error}") from None
    return merged
