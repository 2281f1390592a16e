"""Find the layers that differ from the baseline, and the changes that explain a failing line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...system.printable import number_of
from ..model.files import size_text
from .baseline import Constant, Layer, Measured
from .judge import Line, Status

SHOWN = 3
"""Number of layers that a line names."""
MOST_DB = 120.0
"""SQNRs are clipped to this value before they are compared."""
SAME = 1e-3
"""Relative difference below which two norms count as equal."""
FLOATS = ("float", "float16", "bfloat16", "double")


@dataclass(frozen=True, slots=True)
class Changed:
    """A layer that differs from the baseline.

    Attributes:
        name: The name of the layer.
        changes: The changes, a few words each.
        lost_db: The loss of SQNR at its output beyond the loss at its inputs, in dB; 0 if it is unknown.
        amount: The size of the change of its constants; 1 for a doubling, another type or a removed constant.
        to_float: Whether its weights were integers and are float now.
        is_new: Whether the baseline does not have the layer.
        noise: The SQNR of its output in the baseline and now, in dB; None if it is unknown.
    """

    name: str
    changes: tuple[str, ...]
    lost_db: float = 0.0
    amount: float = 0.0
    to_float: bool = False
    is_new: bool = False
    noise: tuple[float, float] | None = None

    def __str__(self) -> str:
        """Return ``"conv2: output scale x2.00, SQNR 38.1 -> 24.9 dB"``."""
        words = list(self.changes)
        if self.noise is not None and abs(_loss(*self.noise)) >= 0.1:
            words.append(f"SQNR {self.noise[0]:.1f} -> {self.noise[1]:.1f} dB")
        return f"{self.name}: {', '.join(words)}"


def changed_layers(now: Measured, before: Measured) -> list[Changed]:
    """Return the layers that differ from the baseline; layers with the greatest own loss of SQNR come first."""
    lost = {name: _loss(before.noise[name], now.noise[name]) for name in now.noise.keys() & before.noise.keys()}
    layers = []
    for name in dict.fromkeys((*now.layers, *before.layers)):
        old, new = before.layers.get(name), now.layers.get(name)
        changed = _changed(name, old, new)
        if changed is None:
            continue
        own = 0.0
        if new is not None and name in lost:
            own = lost[name] - max((lost.get(each, 0.0) for each in new.after), default=0.0)
        both = (before.noise[name], now.noise[name]) if name in lost else None
        layers.append(replace(changed, lost_db=max(own, 0.0), noise=both))
    return sorted(layers, key=lambda row: (-round(row.lost_db, 1), -row.amount))


def _loss(before: float, now: float) -> float:
    """Return the loss in dB."""
    one, two = (max(-MOST_DB, min(MOST_DB, value)) for value in (before, now))
    return one - two


def _changed(name: str, old: Layer | None, new: Layer | None) -> Changed | None:
    """Return the changes of a layer; None if there are none."""
    if old is None:
        return None if new is None else Changed(name, (f"new ({new.op})",), amount=1.0, is_new=True)
    if new is None:
        return Changed(name, (f"removed ({old.op})",), amount=1.0)
    words: list[str] = [] if old.op == new.op else [f"{old.op} -> {new.op}"]
    most = 0.0 if old.op == new.op else 1.0
    to_float = False
    for role in dict.fromkeys((*old.constants, *new.constants)):
        one, two = old.constants.get(role), new.constants.get(role)
        if one is not None and two is not None and one.digest == two.digest and one.dtype == two.dtype:
            continue
        to_float = to_float or (role == "weight" and _is_integer(one) and not _is_integer(two))
        text, amount = _difference(role, one, two)
        words.append(text)
        most = max(most, amount)
    if to_float:
        words = [word for word in words if " scale" not in word and "zero point" not in word] or words
    return Changed(name, tuple(words), amount=most, to_float=to_float) if words else None


def _is_integer(constant: Constant | None) -> bool:
    """Return whether a constant is stored as integers."""
    return constant is not None and constant.dtype not in FLOATS


def _difference(role: str, one: Constant | None, two: Constant | None) -> tuple[str, float]:
    """Return the difference of two constants of a role in words, and its size."""
    if one is None:
        return f"{role} new", 0.5
    if two is None:
        return f"{role} removed", 1.0
    if one.dtype != two.dtype:
        return f"{role} {one.dtype} -> {two.dtype}", 1.0
    if two.dead > one.dead:
        more = two.dead - one.dead
        return f"{number_of(more, 'channel')} of {role} zero", 1.0
    if one.norm and not two.norm:
        return f"{role} zero", 1.0
    if "zero point" in role:
        return f"{role} {one.norm:g} -> {two.norm:g}", abs(two.norm - one.norm) / 255
    ratio = two.norm / one.norm if one.norm else math.inf
    if abs(ratio - 1) < SAME or not math.isfinite(ratio):
        return f"{role} changed", SAME
    return f"{role} x{ratio:.3g}", abs(math.log2(ratio)) if ratio > 0 else 1.0


# ------------------------------------------------------------------------------------------------------- reasons


def explained(line: Line, now: Measured, before: Measured, changed: list[Changed]) -> Line:
    """Return a failing line with its causes and the layers that changed most; other lines stay unchanged."""
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
        causes += [f"weights became float in {floats} layer{'s' * (floats != 1)}"] if floats else []
    elif line.name in ("latency", "speedup"):
        worst = [row for row in changed if row.to_float or row.is_new] or changed
    elif line.name not in ("size", "opset", "layers"):
        causes += _ranges(now, before)
    elif line.name == "layers":
        worst = [row for row in changed if row.name in line.layers]
    named = tuple(str(row) for row in worst[:SHOWN])
    if not changed:
        identical = now.int8_model == before.int8_model
        causes.append(
            "the INT8 model is the same: the runtime, the machine or the metric changed"
            if identical
            else "no layer changed"
        )
    elif len(worst) > SHOWN:
        causes.append(f"{len(worst)} layers changed")
    return replace(line, reason="; ".join([line.reason, *causes]), layers=named)


def _ranges(now: Measured, before: Measured) -> Iterator[str]:
    """Yield the number of changed ranges, if most ranges changed."""
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
        yield f"{len(other)} of {len(common)} ranges changed: other calibration data, or another model"


def _grown(now: Mapping[str, int], before: Mapping[str, int], growth: int) -> Iterator[str]:
    """Yield the constants that grew, largest growth first."""
    more = {name: size - before.get(name, 0) for name, size in now.items() if size > before.get(name, 0)}
    for name, grown in sorted(more.items(), key=lambda row: -row[1])[:SHOWN]:
        yield f"{name} " + (f"+{size_text(grown)}" if name in before else f"new, {size_text(grown)}")
    rest = growth - (sum(now.values()) - sum(before.values()))
    if 2 * rest > growth:
        yield f"{size_text(rest)} outside the constants"


def _kernels(now: Mapping[str, tuple[int, float]], before: Mapping[str, tuple[int, float]]) -> Iterator[str]:
    """Yield the operators that ran more often than in the baseline, slowest first."""
    total = sum(spent for _, spent in now.values()) or 1.0
    more = {op: row for op, row in now.items() if row[0] > before.get(op, (0, 0.0))[0]}
    for op, (count, spent) in sorted(more.items(), key=lambda row: -row[1][1])[:SHOWN]:
        yield f"{count} {op} instead of {before.get(op, (0, 0.0))[0]} take {spent / total:.0%} of the time"
