"""Which layers of an INT8 model are others than the baseline's, and which of them explain a line that fails."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..model.files import size_text
from .baseline import Constant, Layer, Measured
from .judge import Line, Status

SHOWN = 3
"""Layers that a line names."""
MOST_DB = 120.0
"""A loss of decibels above which nothing is left to lose."""
SAME = 1e-3
"""By how much two numbers may differ, as a share, that are written alike."""
FLOATS = ("float", "float16", "bfloat16", "double")


@dataclass(frozen=True, slots=True)
class Changed:
    """A layer that is another than in the baseline.

    Attributes:
        name: Its name.
        what: What of it changed, a few words each.
        lost_db: Decibels that its result has lost beyond what its inputs have; 0 where that is not known.
        amount: How much its constants changed: 1 is a doubling, a change of type, or a constant that is gone.
        to_float: Whether its weights are float that were integers.
        noise: The signal to noise ratio of its result before and now, in dB; None where it is not known.
    """

    name: str
    what: tuple[str, ...]
    lost_db: float = 0.0
    amount: float = 0.0
    to_float: bool = False
    noise: tuple[float, float] | None = None

    def __str__(self) -> str:
        """Return ``"conv2: output scale x2.00, SQNR 38.1 -> 24.9 dB"``."""
        told = list(self.what)
        if self.noise is not None and abs(_loss(*self.noise)) >= 0.1:
            told.append(f"SQNR {self.noise[0]:.1f} -> {self.noise[1]:.1f} dB")
        return f"{self.name}: {', '.join(told)}"


def changed_layers(now: Measured, before: Measured) -> list[Changed]:
    """Return the layers that are others than in the baseline, those first that lose most by themselves."""
    lost = {name: _loss(before.noise[name], now.noise[name]) for name in now.noise.keys() & before.noise.keys()}
    found = []
    for name in dict.fromkeys((*now.layers, *before.layers)):
        old, new = before.layers.get(name), now.layers.get(name)
        changed = _changed(name, old, new)
        if changed is None:
            continue
        own = 0.0
        if new is not None and name in lost:
            own = lost[name] - max((lost.get(each, 0.0) for each in new.after), default=0.0)
        both = (before.noise[name], now.noise[name]) if name in lost else None
        found.append(replace(changed, lost_db=max(own, 0.0), noise=both))
    return sorted(found, key=lambda row: (-round(row.lost_db, 1), -row.amount))


def _loss(before: float, now: float) -> float:
    """Return the decibels that were lost."""
    one, two = (max(-MOST_DB, min(MOST_DB, value)) for value in (before, now))
    return one - two


def _changed(name: str, old: Layer | None, new: Layer | None) -> Changed | None:
    """Return in what a layer differs; None where it does not."""
    if old is None:
        return None if new is None else Changed(name, (f"new ({new.op})",), amount=1.0)
    if new is None:
        return Changed(name, (f"gone ({old.op})",), amount=1.0)
    told: list[str] = [] if old.op == new.op else [f"{old.op} -> {new.op}"]
    most = 0.0 if old.op == new.op else 1.0
    to_float = False
    for role in dict.fromkeys((*old.constants, *new.constants)):
        one, two = old.constants.get(role), new.constants.get(role)
        if one is not None and two is not None and one.digest == two.digest and one.dtype == two.dtype:
            continue
        to_float = to_float or (role == "weight" and _was_integer(one) and not _was_integer(two))
        words, amount = _difference(role, one, two)
        told.append(words)
        most = max(most, amount)
    if to_float:
        told = [word for word in told if " scale" not in word and "zero point" not in word] or told
    return Changed(name, tuple(told), amount=most, to_float=to_float) if told else None


def _was_integer(found: Constant | None) -> bool:
    """Tell whether a constant is stored in integers."""
    return found is not None and found.dtype not in FLOATS


def _difference(role: str, one: Constant | None, two: Constant | None) -> tuple[str, float]:
    """Say in what two constants of a role differ, and how much."""
    if one is None:
        return f"{role} new", 0.5
    if two is None:
        return f"{role} gone", 1.0
    if one.dtype != two.dtype:
        return f"{role} {one.dtype} -> {two.dtype}", 1.0
    if two.dead > one.dead:
        more = two.dead - one.dead
        return f"{more} channel{'s' if more > 1 else ''} of {role} zero", 1.0
    if one.norm and not two.norm:
        return f"{role} zero", 1.0
    if "zero point" in role:
        return f"{role} {one.norm:g} -> {two.norm:g}", abs(two.norm - one.norm) / 255
    ratio = two.norm / one.norm if one.norm else math.inf
    if abs(ratio - 1) < SAME or not math.isfinite(ratio):
        return f"{role} other values", SAME
    return f"{role} x{ratio:.3g}", abs(math.log2(ratio)) if ratio > 0 else 1.0


# ------------------------------------------------------------------------------------------------------- reasons


def explained(line: Line, now: Measured, before: Measured, changed: list[Changed]) -> Line:
    """Return a line that fails with its reason and the layers that changed most; any other as it is."""
    if line.status is not Status.FAIL or line.name in ("data", "quantize"):
        return line
    if line.name == "size":
        causes = list(_grown(now.stored, before.stored, now.size - before.size))
    elif line.name in ("latency", "speedup"):
        causes = list(_kernels(now.kernels, before.kernels))
    else:
        causes = []
    worst = changed
    if line.name == "mac_share" or (line.name == "size" and any(row.to_float for row in changed)):
        worst = [row for row in changed if row.to_float] or changed
        floats = sum(row.to_float for row in changed)
        causes += [f"float weights that were integers in {floats} layer{'s' * (floats != 1)}"] if floats else []
    elif line.name in ("latency", "speedup"):
        worst = [row for row in changed if row.to_float or "new (" in row.what[0]] or changed
    elif line.name not in ("size", "opset", "layers"):
        causes += _ranges(now, before)
    elif line.name == "layers":
        worst = [row for row in changed if row.name in line.layers]
    named = tuple(str(row) for row in worst[:SHOWN])
    if not changed:
        same = now.int8_model == before.int8_model
        causes.append(
            "the INT8 model is the baseline's own: the runtime, the machine or the metric changed"
            if same
            else "no layer changed"
        )
    elif len(worst) > SHOWN:
        causes.append(f"{len(worst)} layers changed")
    return replace(line, reason="; ".join([line.reason, *causes]), layers=named)


def _ranges(now: Measured, before: Measured) -> Iterator[str]:
    """Say how many ranges are others, where that is most of them."""
    common = [
        (name, role)
        for name, layer in before.layers.items()
        for role in layer.constants
        if role in ("output scale", "input scale") and role in now.layers.get(name, layer).constants
    ]
    other = [
        (name, role)
        for name, role in common
        if name in now.layers and now.layers[name].constants[role].digest != before.layers[name].constants[role].digest
    ]
    if len(other) > 1 and 2 * len(other) > len(common):
        yield f"{len(other)} of {len(common)} ranges are others: of other calibration data, or of another model"


def _grown(now: Mapping[str, int], before: Mapping[str, int], growth: int) -> Iterator[str]:
    """Yield the constants that take more bytes than they did, the most first."""
    more = {name: size - before.get(name, 0) for name, size in now.items() if size > before.get(name, 0)}
    for name, grown in sorted(more.items(), key=lambda row: -row[1])[:SHOWN]:
        yield f"{name} " + (f"+{size_text(grown)}" if name in before else f"new, {size_text(grown)}")
    rest = growth - (sum(now.values()) - sum(before.values()))
    if 2 * rest > growth:
        yield f"{size_text(rest)} are no constants"


def _kernels(now: Mapping[str, tuple[int, float]], before: Mapping[str, tuple[int, float]]) -> Iterator[str]:
    """Yield the operators that ran more often than in the baseline, those that take most time first."""
    total = sum(spent for _, spent in now.values()) or 1.0
    more = {op: row for op, row in now.items() if row[0] > before.get(op, (0, 0.0))[0]}
    for op, (count, spent) in sorted(more.items(), key=lambda row: -row[1][1])[:SHOWN]:
        yield f"{count} {op}, where {before.get(op, (0, 0.0))[0]} ran, take {spent / total:.0%} of the time"
