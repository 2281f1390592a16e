"""Why a model is not faster: where the time of the INT8 model goes that INT8 does not shorten, and why."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...system.printable import number_of
from ...transforms.int8.plan import Impl
from .record import CONVERSION_ROW, LAYOUT_ROW, Record, Unit

SHOWN = 3
LONGEST = 40
"""The greatest number of characters of a name in a reason."""
_FIGURES = re.compile(r"[0-9.]+")
ADDED = {
    CONVERSION_ROW: "conversions between operators in integers and operators in float",
    LAYOUT_ROW: "the runtime changes the order of the axes between kernels",
}
"""Why INT8 adds work that no operator of the model needs."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Time that INT8 does not shorten, or adds.

    Attributes:
        what: The operator, or the name of the added work.
        nodes: How many operators of this kind there are; 0 for added work.
        microseconds: Their time in the INT8 model, or the added time; None where it was not measured.
        why: The reason.
        unit: The name of the operator that takes the most time; empty for added work.
    """

    what: str
    nodes: int
    microseconds: float | None
    why: str
    unit: str = ""


def losses(record: Record) -> list[Loss]:
    """Return the greatest losses of the INT8 model, also of one that was rejected, the greatest first.

    The time of an operator counts in full where it is float, or no faster in integers than in float. Of conversions and
    changes of layout the time counts that the float model does not need. Without times the most frequent come first.
    """
    found = [*_operators(record), *_added(record)]
    found.sort(key=lambda row: (-(row.microseconds or 0.0), -row.nodes))
    return found[:SHOWN]


def _operators(record: Record) -> Iterator[Loss]:
    """Yield the operators without a gain; operators of one type are one loss, with the reason that costs most."""
    groups: dict[str, list[Unit]] = defaultdict(list)
    timed = any(unit.int8_us is not None for unit in record.units)
    for unit in record.units:
        if _gains_nothing(unit) and (not timed or _spent(unit)):
            groups[unit.op].append(unit)
    for op, units in groups.items():
        spent = sum(_spent(unit) or 0.0 for unit in units) if timed else None
        slowest = max(units, key=lambda unit: _spent(unit) or 0.0)
        yield Loss(op, len(units), spent, _why(units), slowest.name)


def _why(units: Sequence[Unit]) -> str:
    """Return the reason of the units that cost most, and how many other reasons there are."""
    alike: dict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        alike[_FIGURES.sub("", _reason(unit))].append(unit)
    most = max(alike.values(), key=lambda part: sum(_spent(unit) or 0.0 for unit in part))
    first = max(most, key=lambda unit: _spent(unit) or 0.0)
    before, after = sum(unit.float_us or 0.0 for unit in most), sum(_spent(unit) or 0.0 for unit in most)
    if first.tried is not None and first.tried.int8 and before and after:
        why = f"{len(most)} of them: " if len(most) < len(units) else ""
        why += f"{before:.3g} µs in float, {after:.3g} µs in integers"
    else:
        name = first.name if len(first.name) <= LONGEST else f"…{first.name[1 - LONGEST :]}"
        why = _reason(first) + (f" ({name})" if len({_reason(unit) for unit in most}) > 1 else "")
    others = len(alike) - 1
    return f"{why}; {number_of(others, 'other reason')}" if others else why


def _added(record: Record) -> Iterator[Loss]:
    """Yield the work that INT8 adds."""
    for row in record.times:
        spent = row.int8_us if row.tried_us is None else row.tried_us
        if row.op in ADDED and not row.units and spent > row.float_us:
            yield Loss(row.op, 0, spent - row.float_us, ADDED[row.op])


def _spent(unit: Unit) -> float | None:
    """Return the time of a unit in the INT8 model, written or rejected; None without a kernel of its own."""
    return unit.int8_us if unit.tried is None else unit.tried_us


def _gains_nothing(unit: Unit) -> bool:
    """Return whether a unit is float in the INT8 model, or no faster in it than in float."""
    if (unit.tried or unit.implementation) is Impl.FLOAT:
        return True
    spent = _spent(unit)
    return unit.float_us is not None and spent is not None and spent >= unit.float_us


def _reason(unit: Unit) -> str:
    """Return why a unit gains nothing."""
    return unit.reason or "its integer kernel is no faster than its float kernel"
