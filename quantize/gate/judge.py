"""Compare measurements with a baseline. Pure functions; each returns a line of the check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ... import RequantError
from ...system.printable import number_of
from ..accuracy.classes import Interval
from ..accuracy.drop import Allowance, versus
from ..accuracy.metrics import Metric
from ..accuracy.sqnr import finite
from ..model.files import size_text
from .baseline import UPDATE, Baseline, DataSummary, Measured, Scored, Speed, Statistics, Tolerances
from .measure import why_incomparable


class Status(StrEnum):
    """The result of one comparison."""

    OK = "ok"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One comparison with the baseline.

    Attributes:
        name: A metric, or ``data``, ``latency``, ``speedup``, ``mac_share``, ``size``, ``opset``, ``layers``, or
            ``quantize``.
        status: Whether the value is within the tolerance; ``skip`` if it cannot be compared.
        baseline: The value of the baseline, as text.
        measured: The measured value, as text.
        tolerance: The allowed loss, as text.
        value: The measured value; None if it is not a number.
        before: The value of the baseline; None if it is not a number.
        drop_interval: The 95 % confidence interval of the drop; None if it is unknown.
        reason: Why the line fails or is skipped, or a remark.
        layers: The layers that changed most; only for a line that fails.
    """

    name: str
    status: Status
    baseline: str = ""
    measured: str = ""
    tolerance: str = ""
    value: float | None = None
    before: float | None = None
    drop_interval: Interval | None = None
    reason: str = ""
    layers: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; NaN and infinity are null."""
        return {
            "name": self.name,
            "status": self.status.value,
            "baseline": finite(self.before) if self.before is not None else self.baseline or None,
            "measured": finite(self.value) if self.value is not None else self.measured or None,
            "tolerance": self.tolerance or None,
            "drop_interval": None if self.drop_interval is None else [*map(finite, self.drop_interval)],
            "reason": self.reason,
            "layers": list(self.layers),
        }


def judge(now: Measured, baseline: Baseline) -> list[Line]:
    """Compare measurements with a baseline; the lines do not name layers yet."""
    before, allowed = baseline.measured, baseline.tolerances
    data = data_line(now, before, allowed)
    other_data = data.status is Status.FAIL
    lines = [data]
    for name, scored in before.scores.items():
        lines.append(metric_line(scored, now.scores[name], allowed.drops[name], other_data=other_data))
    lines += speed_lines(now.speed, before.speed, allowed)
    lines.append(share_line(now.mac_share, before.mac_share, allowed.mac_share))
    lines.append(size_line(now.size, before.size, allowed.size))
    lines += [opset_line(now.opset, before.opset), layers_line(now, before)]
    return lines


# ------------------------------------------------------------------------------------------------------- accuracy


def exceeds(drop: float, allowed: float) -> bool:
    """Return whether a drop is larger than a tolerance, beyond the rounding of floats: not 1 - 0.99 of 0.01."""
    return drop > allowed and not math.isclose(drop, allowed, rel_tol=1e-9)


def beyond(drop: float, interval: Interval | None, allowed: float) -> bool:
    """Return whether a drop counts: it exceeds the tolerance, and its confidence interval excludes 0.

    Args:
        drop: How much worse the second of two models is on the same items.
        interval: The 95 % confidence interval of the drop; without one the drop alone decides.
        allowed: The greatest allowed drop.
    """
    return exceeds(drop, allowed) and (interval is None or interval[0] > 0)


def amount(allowed: Allowance, before: float) -> float:
    """Return the greatest allowed drop from a score, in the metric's unit."""
    if not allowed.relative:
        return allowed.amount
    return allowed.amount * abs(before) if math.isfinite(before) else 0.0


def metric_line(before: Scored, now: Scored, allowed: Allowance, *, other_data: bool = False) -> Line:
    """Compare the scores of the INT8 model and of the baseline's INT8 model, item by item."""
    metric, old, new = before.metric, before.after, now.after
    line = Line(
        name=metric.name,
        status=Status.OK,
        baseline=written(metric, old.value),
        measured=written(metric, new.value),
        tolerance=_allowed_text(metric, allowed),
        value=new.value,
        before=old.value,
    )
    if other_data:
        return _with(line, Status.SKIP, "the data are not the data of the baseline")
    try:
        result = versus(old, new)
        drop, interval, method = result.drop, result.drop_interval, result.method
    except RequantError:  # a metric of the user may have another number of items
        drop, interval, method = metric.worse(old.value, new.value), None, "no interval: other items"
    line = _with(line, Status.OK, "", drop_interval=interval)
    if not exceeds(drop, amount(allowed, old.value)):
        return line
    if not beyond(drop, interval, amount(allowed, old.value)):
        assert interval is not None
        ends = " to ".join(difference(metric, end) for end in interval)
        return _with(line, Status.OK, f"the drop is not significant: 95 % interval {ends}")
    evidence = f"95 % interval {' to '.join(difference(metric, end) for end in interval)}" if interval else method
    return _with(line, Status.FAIL, f"lost {difference(metric, drop)} ({evidence})")


def written(metric: Metric, value: float) -> str:
    """Return a score as text: ``99.12%``, ``38.1 dB`` or ``12.345``."""
    if metric.unit == "share":
        return f"{value:.2%}"
    return f"{value:.1f} dB" if metric.unit == "dB" else f"{value:.5g}"


def difference(metric: Metric, value: float) -> str:
    """Return a difference of scores as text: ``0.51 points``, ``1.2 dB`` or ``0.12``."""
    if metric.unit == "share":
        return f"{100 * value:.2f} points"
    return f"{value:.2f} dB" if metric.unit == "dB" else f"{value:.4g}"


def _allowed_text(metric: Metric, allowed: Allowance) -> str:
    """Return the tolerance of a metric as text."""
    return str(allowed) if allowed.relative else difference(metric, allowed.amount)


# ------------------------------------------------------------------------------------------------------- the data


def data_line(now: Measured, before: Measured, allowed: Tolerances) -> Line:
    """Compare the data with the data of the baseline. With other data, the model is not the cause of a lower score."""
    new, old = now.data, before.data
    line = Line(
        name="data",
        status=Status.OK,
        baseline=_samples(old),
        measured=_samples(new),
        tolerance=f"{allowed.inputs:.3g} std",
    )
    problem = _data_problem(new, old, "; ".join(_moved(now, before, allowed)), allowed.inputs)
    if problem:
        return _with(line, Status.FAIL, problem)
    if new.inputs != old.inputs:
        return _with(line, Status.OK, "the inputs are not bit-identical to the baseline's, but similar")
    return line


def _data_problem(new: DataSummary, old: DataSummary, moved: str, allowed: float) -> str:
    """Return why the data are not the data of the baseline; empty if they are the same.

    Args:
        new: The data.
        old: The data of the baseline.
        moved: The changed scores of the float model, which is the same as in the baseline; empty without a change.
        allowed: The greatest change of an input's mean or standard deviation, in standard deviations.
    """
    scores = f"; scores of the float model: {moved}" if moved else ""
    labels = old.labels != new.labels
    if old.samples != new.samples:
        return f"other data: {number_of(new.samples, 'sample')} instead of {old.samples}{scores}"
    changed = "; ".join(_changed_inputs(new, old, allowed)) if new.inputs != old.inputs else ""
    if changed:
        also = " and the labels" if labels else ""
        return f"other data or preprocessing: the inputs{also} changed: {changed}{scores}"
    if labels:
        problem = "the labels changed" if new.labels else "the labels are missing"
        return f"the data changed, not the model: {problem}{scores}"
    if moved and new.inputs != old.inputs:
        return f"other data or preprocessing{scores}"
    return f"same data, but another runtime or metric{scores}" if moved else ""


def _samples(seen: DataSummary) -> str:
    """Return the number of samples as text, and whether they have labels."""
    return number_of(seen.samples, "sample") + (", labels" if seen.labels else "")


def _moved(now: Measured, before: Measured, allowed: Tolerances) -> Iterator[str]:
    """Yield the metrics in which the score of the float model changed."""
    for name, old in before.scores.items():
        new = now.scores[name]
        if old.metric.reference:
            continue
        change = abs(old.metric.worse(old.before, new.before))
        if change > amount(allowed.drops[name], old.before):
            yield f"{name} {written(old.metric, old.before)} -> {written(old.metric, new.before)}"


def _changed_inputs(new: DataSummary, old: DataSummary, most: float) -> Iterator[str]:
    """Yield the inputs whose statistics changed, with both statistics."""
    for name, one in old.statistics.items():
        two = new.statistics.get(name)
        if two is None:
            yield f"{name} is missing"
        elif not _alike(one, two, most):
            moved = one.channels and one.channels != two.channels
            channels = f", channels {_channels(one)} -> {_channels(two)}" if moved else ""
            yield f"{name} mean {one.mean:.4g} -> {two.mean:.4g}, deviation {one.std:.4g} -> {two.std:.4g}{channels}"


def _channels(statistics: Statistics) -> str:
    """Return the means of the first channels as text."""
    more = ", ...)" if statistics.channels[4:] else ")"
    return "(" + ", ".join(f"{mean:.3g}" for mean in statistics.channels[:4]) + more


def _alike(one: Statistics, two: Statistics, most: float) -> bool:
    """Return whether two inputs have similar means, standard deviations and means of channels."""
    if len(one.channels) != len(two.channels):
        return False
    pairs = [(one.mean, two.mean), (one.std, two.std), *zip(one.channels, two.channels, strict=True)]
    return all(abs(a - b) <= most * one.std for a, b in pairs)


# ----------------------------------------------------------------------------------------------- speed and the file


def floor_of(before: Speed | None, allowed: Tolerances) -> float:
    """Return the least acceptable speed-up; 0 if any is acceptable.

    Args:
        before: A comparable speed-up of the baseline; None without one.
        allowed: The tolerances.
    """
    own = 0.0 if before is None else _least_of(before, allowed)
    return max(own, allowed.speedup or 0.0)


def _least_of(before: Speed, allowed: Tolerances) -> float:
    """Return the least speed-up that is not slower than the baseline."""
    return before.ratio * (1 - allowed.latency)


def slower(rounds: tuple[float, ...], floor: float) -> bool:
    """Return whether the speed-up of every round is below the least acceptable one."""
    return max(rounds) < floor


def _untimed(before: Speed | None, allowed: Tolerances) -> Iterator[Line]:
    """Say what is not compared where nothing was timed."""
    if allowed.speedup is not None:
        yield _skipped("speedup", "nothing was timed: 0 seconds", f"{allowed.speedup:.2f}x required")
    if before is not None:
        yield _skipped("latency", "nothing was timed: 0 seconds", f"{before.ratio:.2f}x")


def _skipped(name: str, reason: str, baseline: str = "none") -> Line:
    """Return a line that was not compared."""
    return Line(name=name, status=Status.SKIP, baseline=baseline, measured="not timed", reason=reason)


def speed_lines(now: Speed | None, before: Speed | None, allowed: Tolerances) -> Iterator[Line]:
    """Compare the speed-up with the required one, and with the baseline if it is from the same kind of machine."""
    if now is None:
        yield from _untimed(before, allowed)
        return
    if allowed.speedup is not None:
        yield _required_speedup(now, allowed.speedup)
    if before is None:
        yield _skipped("latency", f"the baseline was not timed: {UPDATE} times it")
    else:
        yield _since_baseline(now, before, allowed)


def _rounds(now: Speed) -> str:
    """Return the number of rounds with their range, as text."""
    return f"all {len(now.rounds)} rounds ({min(now.rounds):.2f}x to {max(now.rounds):.2f}x)"


def _required_speedup(now: Speed, required: float) -> Line:
    """Compare the speed-up with the required one."""
    slow = slower(now.rounds, required)
    return Line(
        name="speedup",
        status=Status.FAIL if slow else Status.OK,
        baseline=f"{required:.2f}x required",
        measured=f"{now.ratio:.2f}x",
        tolerance="none",
        value=now.ratio,
        before=required,
        reason=f"too slow in {_rounds(now)}" if slow else "",
    )


def _since_baseline(now: Speed, before: Speed, allowed: Tolerances) -> Line:
    """Compare the speed-up with that of the baseline; it does not count if that is from another kind of machine."""
    line = Line(
        name="latency",
        status=Status.OK,
        baseline=f"{before.ratio:.2f}x",
        measured=f"{now.ratio:.2f}x",
        tolerance=f"{allowed.latency:.3g} of it",
        value=now.ratio,
        before=before.ratio,
    )
    unlike = why_incomparable(before, now.machine, now.batch)
    if unlike:
        return _with(line, Status.SKIP, f"the baseline is from another machine or setting: {unlike}")
    if slower(now.rounds, _least_of(before, allowed)):
        one, two = before.machine.described, now.machine.described
        also = "" if one == two else f"; the baseline is from {one}, this is {two}"
        return _with(line, Status.FAIL, f"slower than the baseline in {_rounds(now)}{also}")
    return line


def share_line(now: float, before: float, allowed: float) -> Line:
    """Compare the share of multiply-accumulates in integer kernels."""
    fails = exceeds(before - now, allowed)
    return Line(
        name="mac_share",
        status=Status.FAIL if fails else Status.OK,
        baseline=f"{before:.1%}",
        measured=f"{now:.1%}",
        tolerance=f"{100 * allowed:.3g} point{'' if allowed == 0.01 else 's'}",
        value=now,
        before=before,
        reason="fewer multiply-accumulates ran in integer kernels" if fails else "",
    )


def size_line(now: int, before: int, allowed: float) -> Line:
    """Compare the size of the INT8 model in bytes."""
    fails = now > before * (1 + allowed)
    return Line(
        name="size",
        status=Status.FAIL if fails else Status.OK,
        baseline=size_text(before),
        measured=size_text(now),
        tolerance=f"{allowed:.3g} of it",
        value=now,
        before=before,
        reason=f"the file is {now / before - 1:.1%} larger" if fails and before else "",
    )


def opset_line(now: int, before: int) -> Line:
    """Compare the opset; an older one fails."""
    fails = now < before
    return Line(
        name="opset",
        status=Status.FAIL if fails else Status.OK,
        baseline=str(before),
        measured=str(now),
        tolerance="none",
        value=now,
        before=before,
        reason=f"the INT8 model has an older opset: {before} -> {now}" if fails else "",
    )


def layers_line(now: Measured, before: Measured) -> Line:
    """Compare the layers. A removed or zero weight, bias or channel fails, because quantization never causes it.

    The metrics may not show it on a few thousand items.
    """
    same = now.int8_model == before.int8_model
    lost = [] if same else list(_lost(now, before))
    names = () if same else dict.fromkeys((*now.layers, *before.layers))
    changed = sum(now.layers.get(name) != before.layers.get(name) for name in names)
    return Line(
        name="layers",
        status=Status.FAIL if lost else Status.OK,
        baseline=f"{len(before.layers)}",
        measured=f"{changed} changed" if changed else "the same",
        tolerance="none",
        reason="constants are missing or zero: " + ", ".join(f"{role} of {name}" for name, role in lost)
        if lost
        else "",
        layers=tuple(dict.fromkeys(name for name, _ in lost)),
    )


def _lost(now: Measured, before: Measured) -> Iterator[tuple[str, str]]:
    """Yield layers and their missing or zero constants; a removed bias is no loss if a new node reads the layer."""
    behind = {each for name, layer in now.layers.items() if name not in before.layers for each in layer.after}
    for name, old in before.layers.items():
        new = now.layers.get(name)
        for role in ("weight", "bias"):
            one = old.constants.get(role)
            two = None if new is None else new.constants.get(role)
            if new is None or one is None or not one.norm:
                continue
            gone = two is None and old.op == new.op and name not in behind
            if gone or (two is not None and (not two.norm or two.dead > one.dead)):
                yield name, role


def _with(line: Line, status: Status, reason: str, **more: Any) -> Line:
    """Return a line with its result."""
    return replace(line, status=status, reason=reason, **more)
