"""Statistics as JSON values and back: an exact round trip, and equal statistics give equal values in equal order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any, TypeAlias

import numpy as np

from .. import RequantError
from .exact import HALF, ExactSum
from .extremes import MinMax
from .histogram import Histogram, Statistic
from .observations import Observations, Place
from .session import Array
from .sums import Channels, Moments, Runs

Record: TypeAlias = MinMax | Histogram | Runs | Channels | Moments | ExactSum
Row: TypeAlias = Mapping[str, Any]

MAX_POWER = 40
"""No sum of fewer than 2**63 float64 values has digits beyond 2**(32 * 36), or below 2**(-32 * 36)."""


def to_json(record: Record) -> dict[str, Any]:
    """Return a statistic as JSON values, its kind among them: integers, and finite floats, which `repr` keeps."""
    for name, kind in KINDS.items():
        if isinstance(record, kind.type):
            return {"kind": name, **kind.write(record)}
    raise TypeError(f"no statistic: {type(record).__name__}")


def from_json(row: object) -> Record:
    """Read a statistic back.

    Raises:
        KeyError: An entry is missing.
        TypeError: An entry is of another type.
        ValueError: The values cannot come from data, or the kind is unknown.
    """
    kind = typed(row, "kind", str)
    if kind not in KINDS:
        raise ValueError(f"unknown kind of statistic {kind!r}")
    return KINDS[kind].read(row)  # type: ignore[arg-type]


def observations_to_json(seen: Observations) -> dict[str, Any]:
    """Return all that a run has seen as JSON values.

    Keys are ``samples``, ``tensors`` (by name: ``statistic``, ``runs``, ``channels``, or ``broken``), ``inputs``
    (moments by name) and ``feeds`` (by digest: position, place, how often), each sorted.
    """
    return {
        "samples": seen.samples,
        "tensors": {name: tensor_to_json(seen, name) for name in tensors_of(seen)},
        "inputs": {name: MOMENTS.write(moments) for name, moments in sorted(seen.moments.items())},
        "feeds": {
            digest: [place.position, place.where, times] for digest, (place, times) in sorted(seen.repeated.items())
        },
    }


def observations_from_json(row: Row) -> Observations:
    """Read back what `observations_to_json` has returned.

    Raises:
        KeyError: An entry is missing.
        TypeError: An entry is of another type.
        ValueError: What a tensor, an input or a feed holds cannot come from data; the message names it.
    """
    ranges: dict[str, Statistic] = {}
    runs: dict[str, Runs] = {}
    channels: dict[str, Channels] = {}
    broken: dict[str, Place] = {}
    for name, tensor in typed(row, "tensors", dict).items():
        with_name(f"tensor {name!r}", _read_tensor, name, tensor, ranges, runs, channels, broken)
    moments = {
        name: with_name(f"input {name!r}", _read_moments, entry) for name, entry in typed(row, "inputs", dict).items()
    }
    repeated = {
        digest: with_name(f"feed {digest!r}", _read_feed, entry) for digest, entry in typed(row, "feeds", dict).items()
    }
    return Observations(ranges, runs, channels, moments, broken, repeated, natural(row, "samples", least=0))


def tensors_of(seen: Observations) -> list[str]:
    """Return the names of all tensors that something is known of, sorted."""
    return sorted({*seen.ranges, *seen.runs, *seen.channels, *seen.broken})


def tensor_to_json(seen: Observations, name: str) -> dict[str, Any]:
    """Return what was seen of one tensor as JSON values."""
    row: dict[str, Any] = {}
    if name in seen.ranges:
        row["statistic"] = to_json(seen.ranges[name])
    if name in seen.runs:
        row["runs"] = RUNS.write(seen.runs[name])
    if name in seen.channels:
        row["channels"] = CHANNELS.write(seen.channels[name])
    if name in seen.broken:
        row["broken"] = [seen.broken[name].position, seen.broken[name].where]
    return row


def _read_tensor(
    name: str,
    row: Row,
    ranges: dict[str, Statistic],
    runs: dict[str, Runs],
    channels: dict[str, Channels],
    broken: dict[str, Place],
) -> None:
    """Read what was seen of one tensor into the mappings."""
    if not isinstance(row, dict):
        raise TypeError(f"an object is wanted, not {type(row).__name__}")
    if "statistic" in row:
        statistic = from_json(row["statistic"])
        if not isinstance(statistic, MinMax | Histogram):
            raise TypeError("'statistic' must be of kind minmax or histogram")
        ranges[name] = statistic
    if "runs" in row:
        runs[name] = _read_runs(row["runs"])
    if "channels" in row:
        channels[name] = _read_channels(row["channels"])
    if "broken" in row:
        if "statistic" in row:
            raise ValueError("both 'broken' and 'statistic'")
        position, where = _tuple(row["broken"], "broken", int, str)
        broken[name] = Place(_natural(position, "broken", least=0), where)


def _read_feed(entry: object) -> tuple[Place, int]:
    """Read where a feed came first, and how often."""
    position, where, times = _tuple(entry, "feed", int, str, int)
    return Place(_natural(position, "position", least=0), where), _natural(times, "times")


def _write_extremes(record: MinMax | Histogram) -> dict[str, Any]:
    """Return the smallest and the largest value."""
    return {"lo": _float(record.lo), "hi": _float(record.hi)}


def _write_minmax(record: MinMax) -> dict[str, Any]:
    """Return min and max."""
    return {**_write_extremes(record), "count": int(record.count)}


def _read_minmax(row: Row) -> MinMax:
    """Read min and max."""
    return MinMax(number(row, "lo"), number(row, "hi"), natural(row, "count"))


def _write_histogram(record: Histogram) -> dict[str, Any]:
    """Return a histogram."""
    grid = {"exponent": int(record.exponent), "first": int(record.first), "counts": record.counts.tolist()}
    return {**_write_extremes(record), **grid}


def _read_histogram(row: Row) -> Histogram:
    """Read a histogram."""
    counts = _integers(typed(row, "counts", list), "counts")
    exponent, first = typed(row, "exponent", int), typed(row, "first", int)
    return Histogram(number(row, "lo"), number(row, "hi"), exponent, first, counts)


def _write_sum(record: ExactSum) -> dict[str, Any]:
    """Return a sum: its shape, and for each power its digits in C order."""
    digits = [[int(power), record.digits[power].ravel().tolist()] for power in sorted(record.digits)]
    return {"shape": list(record.shape), "digits": digits}


def _read_sum(row: Row) -> ExactSum:
    """Read a sum; each has only one form, so any other is refused."""
    shape = tuple(_natural(length, "shape", least=0) for length in typed(row, "shape", list))
    digits: dict[int, Array] = {}
    for entry in typed(row, "digits", list):
        power, values = _tuple(entry, "digits", int, list)
        digit = _integers(values, "digits")
        if digit.size != math.prod(shape):
            raise ValueError(f"{digit.size} digits do not fit the shape {shape}")
        if not digit.any() or digit.min() < -HALF or digit.max() >= HALF:
            raise ValueError(f"digits of power {power} are out of range")
        digits[power] = digit.reshape(shape)
    if len(digits) != len(row["digits"]) or any(left > right for left, right in pairwise(digits)):
        raise ValueError("the powers of the digits must ascend")
    if any(abs(power) > MAX_POWER for power in digits):
        raise ValueError("a power is out of range")
    return ExactSum(shape, digits)


def _write_runs(record: Runs) -> dict[str, Any]:
    """Return what single runs saw."""
    blocks = [[int(block), _float(lo), _float(hi)] for block, (lo, hi) in sorted(record.blocks.items())]
    return {"count": int(record.count), "ends": _write_sum(record.ends), "blocks": blocks}


def _read_runs(row: Row) -> Runs:
    """Read what single runs saw."""
    count, ends = natural(row, "count"), _sum_of(row, "ends", (2,))
    blocks: dict[int, tuple[float, float]] = {}
    for entry in typed(row, "blocks", list):
        block, lo, hi = _tuple(entry, "blocks", int, float, float)
        if not lo <= hi:
            raise ValueError("the lower end of a block is above the upper")
        blocks[_natural(block, "blocks", least=0)] = (lo, hi)
    if not 0 < len(blocks) <= count or len(blocks) != len(row["blocks"]):
        raise ValueError("the blocks do not fit the count")
    if any(left > right for left, right in pairwise(blocks)):
        raise ValueError("the blocks must ascend")
    return Runs(count, ends, blocks)


def _write_channels(record: Channels) -> dict[str, Any]:
    """Return extremes and sums of channels."""
    ends = {"lo": (record.lo + 0.0).tolist(), "hi": (record.hi + 0.0).tolist()}
    return {**ends, "total": _write_sum(record.total), "count": int(record.count)}


def _read_channels(row: Row) -> Channels:
    """Read extremes and sums of channels."""
    lo, hi = (np.array([_number(v, end) for v in typed(row, end, list)], np.float64) for end in ("lo", "hi"))
    if lo.shape != hi.shape or not (lo <= hi).all():
        raise ValueError("the channels' extremes do not fit each other")
    return Channels(lo, hi, _sum_of(row, "total", lo.shape), natural(row, "count"))


def _write_moments(record: Moments) -> dict[str, Any]:
    """Return the sums behind mean and variance."""
    return {"count": int(record.count), "powers": _write_sum(record.powers)}


def _read_moments(row: Row) -> Moments:
    """Read the sums behind mean and variance."""
    powers = _sum_of(row, "powers", (2,))
    if powers.value[1] < 0:
        raise ValueError("the sum of squares is negative")
    return Moments(natural(row, "count"), powers)


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of `KINDS`.

    Attributes:
        type: The class of the statistic.
        write: Returns one as JSON values.
        read: Reads one back.
    """

    type: type[Record]
    write: Callable[[Any], dict[str, Any]]
    read: Callable[[Row], Record]


RUNS = Kind(Runs, _write_runs, _read_runs)
CHANNELS = Kind(Channels, _write_channels, _read_channels)
MOMENTS = Kind(Moments, _write_moments, _read_moments)
KINDS: Mapping[str, Kind] = {
    "minmax": Kind(MinMax, _write_minmax, _read_minmax),
    "histogram": Kind(Histogram, _write_histogram, _read_histogram),
    "runs": RUNS,
    "channels": CHANNELS,
    "moments": MOMENTS,
    "sum": Kind(ExactSum, _write_sum, _read_sum),
}


def with_name(name: str, read: Callable[..., Any], *arguments: object) -> Any:
    """Call `read`; what it finds wrong is told with `name`.

    Raises:
        ValueError: Something is wrong.
    """
    try:
        return read(*arguments)
    except KeyError as error:
        raise ValueError(f"{name}: {error} is missing") from error
    except (TypeError, ValueError, OverflowError, RequantError) as error:
        raise ValueError(f"{name}: {error}") from error


def typed(row: Any, key: str, kind: type) -> Any:
    """Return ``row[key]``, which must be of `kind`."""
    if not isinstance(row, dict):
        raise TypeError(f"an object with {key!r} is wanted, not {type(row).__name__}")
    if type(row[key]) is not kind:
        raise TypeError(f"{key!r} must be of type {kind.__name__}, not {type(row[key]).__name__}")
    return row[key]


def number(row: Row, key: str) -> float:
    """Return the finite number ``row[key]``."""
    return _number(row[key], key)


def natural(row: Row, key: str, *, least: int = 1) -> int:
    """Return the integer ``row[key]``, at least `least`."""
    return _natural(row[key], key, least=least)


def _number(value: object, name: str) -> float:
    """Return a finite number; -0.0 is 0.0."""
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise TypeError(f"{name!r} must be a finite number")
    return float(value) + 0.0  # type: ignore[arg-type]


def _natural(value: object, name: str, *, least: int = 1) -> int:
    """Return an integer of at least `least`."""
    if type(value) is not int:
        raise TypeError(f"{name!r} must be of type int, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name!r} must be at least {least}, not {value}")
    return value


def _integers(values: list[object], name: str) -> Array:
    """Return integers as int64; one that does not fit raises OverflowError."""
    if not all(type(value) is int for value in values):
        raise TypeError(f"{name!r} must be integers")
    return np.array(values, np.int64)


def _tuple(entry: object, name: str, *kinds: type) -> tuple[Any, ...]:
    """Return a list with as many entries as there are kinds, each of its kind."""
    if not isinstance(entry, list) or len(entry) != len(kinds):
        raise TypeError(f"{name!r} must be lists of {len(kinds)}")
    return tuple(starmap(_as, zip(entry, kinds, [name] * len(kinds), strict=True)))


def _as(value: object, kind: type, name: str) -> object:
    """Return a value that is of `kind`."""
    if kind is float:
        return _number(value, name)
    if type(value) is not kind:
        raise TypeError(f"{name!r} must hold a {kind.__name__}, not {type(value).__name__}")
    return value


def _sum_of(row: Row, key: str, shape: tuple[int, ...]) -> ExactSum:
    """Read the sum ``row[key]``, which must have this shape."""
    total = _read_sum(typed(row, key, dict))
    if total.shape != shape:
        raise ValueError(f"{key!r} must be of shape {shape}, not {total.shape}")
    return total


def _float(value: float) -> float:
    """Return a plain float; -0.0 is 0.0, which it equals."""
    return float(value) + 0.0
