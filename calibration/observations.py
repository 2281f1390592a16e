"""What running a model over data has shown, and how two such records become one."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from .. import RequantError
from .extremes import MinMax
from .histogram import Histogram, Statistic
from .sums import Channels, Moments, Runs


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A sample: where it stands in the data, and how messages call it.

    Attributes:
        position: Its position in the whole of the data, from 0.
        where: ``"data.npz, sample 7"``.
    """

    position: int
    where: str


@dataclass(frozen=True, slots=True)
class Observations:
    """What a run over data has seen; ``|`` is exact, associative and commutative.

    Attributes:
        ranges: The statistic of each observed tensor that had values.
        runs: The same tensors run by run.
        channels: Extremes and means of the channels, of the tensors of which they were asked for.
        moments: Mean and variance of each float input.
        broken: Tensors that held NaN or infinity, with the first sample that made them do so; they have no range.
        repeated: Feeds by digest: the first place of each, and how often it came.
        samples: How many samples were run.
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
            RequantError: A tensor has statistics of different kinds, or not of as many channels.
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


T = TypeVar("T")


def _without(statistics: Mapping[str, T], names: Container[str]) -> dict[str, T]:
    """Return the statistics of other tensors than these."""
    return {name: statistic for name, statistic in statistics.items() if name not in names}


Merged = TypeVar("Merged", MinMax | Histogram, Runs, Channels, Moments)


def merge(left: Mapping[str, Merged], right: Mapping[str, Merged]) -> dict[str, Merged]:
    """Merge the statistics of each tensor; one that only one side has seen is kept as it is.

    Raises:
        RequantError: The two statistics of a tensor are not of one kind, or not of as many channels.
    """
    merged = dict(left)
    for name, statistic in right.items():
        try:
            merged[name] = merged[name] | statistic if name in merged else statistic  # type: ignore[operator]
        except TypeError:
            raise RequantError(f"tensor {name!r}: a histogram cannot be merged with min and max alone") from None
        except ValueError as error:
            raise RequantError(f"tensor {name!r} {error}") from None
    return merged
