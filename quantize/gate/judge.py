"""What was measured against a baseline: pure functions, a line for each thing that is judged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ... import RequantError
from ..accuracy.drop import Allowance, versus
from ..accuracy.metrics import Metric
from ..accuracy.outputs import Interval, finite
from ..model.files import size_text
from .baseline import Baseline, Measured, Scored, Seen, Speed, Statistics, Tolerances
from .measure import machines_differ


class Status(StrEnum):
    """What came of judging."""

    OK = "ok"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that was judged.

    Attributes:
        name: What: ``data``, a metric, ``latency``, ``mac_share``, ``size``, ``opset``, ``quantize``.
        status: Whether it is within the tolerance; ``skip`` where it could not be judged.
        baseline: What it was, as people write it.
        measured: What it is.
        tolerance: What may be lost.
        value: What it is, as a number; None where it is none.
        before: What it was, as a number.
        interval: The 95 % confidence interval of the drop; None where none is known.
        reason: Why it fails or was skipped; what should be known of it.
        layers: The layers that changed most, of a line that fails.
    """

    name: str
    status: Status
    baseline: str = ""
    measured: str = ""
    tolerance: str = ""
    value: float | None = None
    before: float | None = None
    interval: Interval | None = None
    reason: str = ""
    layers: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; numbers that JSON does not have are null."""
        return {
            "name": self.name,
            "status": self.status.value,
            "baseline": finite(self.before) if self.before is not None else self.baseline or None,
            "measured": finite(self.value) if self.value is not None else self.measured or None,
            "tolerance": self.tolerance or None,
            "drop_interval": None if self.interval is None else [*map(finite, self.interval)],
            "reason": self.reason,
            "layers": list(self.layers),
        }


def judge(now: Measured, baseline: Baseline) -> list[Line]:
    """Judge what was measured by a baseline, without saying which layers did it."""
    before, allowed = baseline.measured, baseline.tolerances
    data = data_line(now, before, allowed)
    other = data.status is Status.FAIL
    lines = [data]
    for name, scored in before.scores.items():
        lines.append(metric_line(scored, now.scores[name], allowed.drops[name], other_data=other))
    lines += speed_lines(now.speed, before.speed, allowed)
    lines.append(share_line(now.mac_share, before.mac_share, allowed.mac_share))
    lines.append(size_line(now.size, before.size, allowed.size))
    lines += [opset_line(now.opset, before.opset), layers_line(now, before)]
    return lines


# ------------------------------------------------------------------------------------------------------- accuracy


def beyond(drop: float, interval: Interval | None, allowed: float) -> bool:
    """Tell whether a drop counts: it is more than what is allowed, and more than chance.

    Args:
        drop: How much worse the second of two models is on the same items.
        interval: The 95 % confidence interval of that; None where none is known, and the drop alone decides.
        allowed: The greatest drop.
    """
    return drop > allowed and (interval is None or interval[0] > 0)


def amount(allowed: Allowance, before: float) -> float:
    """Return the greatest drop from a score, in the metric's unit."""
    if not allowed.relative:
        return allowed.amount
    return allowed.amount * abs(before) if math.isfinite(before) else 0.0


def metric_line(before: Scored, now: Scored, allowed: Allowance, *, other_data: bool = False) -> Line:
    """Judge the INT8 model's score, item by item against that of the baseline's INT8 model."""
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
        return _with(line, Status.SKIP, "the data are not those of the baseline")
    try:
        found = versus(old, new)
        drop, interval, method = found.drop, found.interval, found.method
    except RequantError:  # another number of items, which a metric of the user's may have
        drop, interval, method = metric.worse(old.value, new.value), None, "none: not of the same items"
    line = _with(line, Status.OK, "", interval=interval)
    if not drop > amount(allowed, old.value):
        return line
    if not beyond(drop, interval, amount(allowed, old.value)):
        assert interval is not None
        ends = ", ".join(difference(metric, end) for end in interval)
        return _with(line, Status.OK, f"a drop within chance: 95 % interval {ends}")
    sure = f"95 % interval {' to '.join(difference(metric, end) for end in interval)}" if interval else method
    return _with(line, Status.FAIL, f"lost {difference(metric, drop)} ({sure})")


def written(metric: Metric, value: float) -> str:
    """Write a score: ``99.12%``, ``38.1 dB`` or ``12.345``."""
    if metric.unit == "share":
        return f"{value:.2%}"
    return f"{value:.1f} dB" if metric.unit == "dB" else f"{value:.5g}"


def difference(metric: Metric, value: float) -> str:
    """Write a difference of scores: ``0.51 points``, ``1.2 dB`` or ``0.12``."""
    if metric.unit == "share":
        return f"{100 * value:.2f} points"
    return f"{value:.2f} dB" if metric.unit == "dB" else f"{value:.4g}"


def _allowed_text(metric: Metric, allowed: Allowance) -> str:
    """Write what may be lost of a metric."""
    return str(allowed) if allowed.relative else difference(metric, allowed.amount)


# ------------------------------------------------------------------------------------------------------- the data


def data_line(now: Measured, before: Measured, allowed: Tolerances) -> Line:
    """Tell whether the data are those of the baseline; where they are not, no score can be blamed on the model."""
    new, old = now.data, before.data
    line = Line(
        name="data",
        status=Status.OK,
        baseline=_samples(old),
        measured=_samples(new),
        tolerance=f"{allowed.inputs:.3g} std",
    )
    moved = "; ".join(_moved(now, before, allowed))
    told = f"; of the float model {moved}" if moved else ""
    labels = old.labels != new.labels
    if old.samples != new.samples:
        return _with(line, Status.FAIL, f"other data: {new.samples} samples, where there were {old.samples}{told}")
    unlike = "; ".join(_unlike(new, old, allowed.inputs)) if new.inputs != old.inputs else ""
    if unlike:
        also = " and the labels" if labels else ""
        return _with(
            line, Status.FAIL, f"other data or another preprocessing: the inputs{also} changed: {unlike}{told}"
        )
    if labels:
        what = "there are no labels any more" if not new.labels else "the labels changed"
        return _with(line, Status.FAIL, f"the data or labels changed, not the model: {what}{told}")
    if moved and new.inputs != old.inputs:
        return _with(line, Status.FAIL, f"other data or another preprocessing: of the float model {moved}")
    if moved:
        return _with(
            line, Status.FAIL, f"the same data, and of the same float model {moved}: another runtime or metric"
        )
    if new.inputs != old.inputs:
        return _with(line, Status.OK, "the inputs are not the same to the bit, and alike")
    return line


def _samples(seen: Seen) -> str:
    """Say how many samples there were, with labels or without."""
    return f"{seen.samples} samples" + (", labels" if seen.labels else "")


def _moved(now: Measured, before: Measured, allowed: Tolerances) -> Iterator[str]:
    """Yield in which metrics the float model, which is the same, has got other scores."""
    for name, old in before.scores.items():
        new = now.scores[name]
        if old.metric.reference:
            continue
        change = abs(old.metric.worse(old.before, new.before))
        if change > amount(allowed.drops[name], old.before):
            yield f"{name} {written(old.metric, old.before)} -> {written(old.metric, new.before)}"


def _unlike(new: Seen, old: Seen, most: float) -> Iterator[str]:
    """Yield which inputs have other values, and how they differ."""
    for name, one in old.statistics.items():
        two = new.statistics.get(name)
        if two is None:
            yield f"{name} is gone"
        elif not _alike(one, two, most):
            yield f"{name} mean {one.mean:.4g} -> {two.mean:.4g}, deviation {one.std:.4g} -> {two.std:.4g}" + (
                "" if one.channels == two.channels or not one.channels else f", channels {_few(one)} -> {_few(two)}"
            )


def _few(found: Statistics) -> str:
    """Write the means of channels."""
    return "(" + ", ".join(f"{mean:.3g}" for mean in found.channels[:4]) + (", ...)" if found.channels[4:] else ")")


def _alike(one: Statistics, two: Statistics, most: float) -> bool:
    """Tell whether two inputs have the same mean and deviation, and channels the same means."""
    if len(one.channels) != len(two.channels):
        return False
    pairs = [(one.mean, two.mean), (one.std, two.std), *zip(one.channels, two.channels, strict=True)]
    return all(abs(a - b) <= most * one.std for a, b in pairs)


# ----------------------------------------------------------------------------------------------- speed and the file


def floor_of(before: Speed | None, allowed: Tolerances, machine_differs: str) -> float:
    """Return the ratio below which all rounds must be before the speed has fallen; 0 where it is not judged."""
    own = before.ratio * (1 - allowed.latency) if before is not None and not machine_differs else 0.0
    return max(own, allowed.speedup or 0.0)


def slower(rounds: tuple[float, ...], floor: float) -> bool:
    """Tell whether a speed has fallen: in every round the ratio is below the floor."""
    return max(rounds) < floor


def speed_lines(now: Speed | None, before: Speed | None, allowed: Tolerances) -> Iterator[Line]:
    """Judge the speed as a ratio, against the baseline on a machine of the kind, and the least that is asked for."""
    if now is None:
        return
    low, high = min(now.rounds), max(now.rounds)
    measured, among = f"{now.ratio:.2f}x", f"{len(now.rounds)} rounds of {low:.2f}x to {high:.2f}x"
    if allowed.speedup is not None:
        slow = slower(now.rounds, allowed.speedup)
        yield Line(
            name="speedup",
            status=Status.FAIL if slow else Status.OK,
            baseline=f"{allowed.speedup:.2f}x asked",
            measured=measured,
            tolerance="none",
            value=now.ratio,
            before=allowed.speedup,
            reason=f"too slow in each of {among}" if slow else "",
        )
    if before is None:
        return
    line = Line(
        name="latency",
        status=Status.OK,
        baseline=f"{before.ratio:.2f}x",
        measured=measured,
        tolerance=f"{allowed.latency:.3g} of it",
        value=now.ratio,
        before=before.ratio,
    )
    unlike = machines_differ(before.machine, now.machine)
    if before.batch != now.batch:
        unlike = ", ".join(filter(None, (unlike, f"batch {before.batch}, here {now.batch}")))
    if unlike:
        yield _with(line, Status.SKIP, f"the baseline is of another machine or setting: {unlike}")
    elif slower(now.rounds, floor_of(before, allowed, "")):
        one, two = before.machine.runtime, now.machine.runtime
        also = "" if one == two else f"; the baseline is of ONNX Runtime {one}, and here is {two}"
        yield _with(line, Status.FAIL, f"slower than the baseline in each of {among}{also}")
    else:
        yield line


def share_line(now: float, before: float, allowed: float) -> Line:
    """Judge the share of multiply-accumulates in integer kernels."""
    fails = before - now > allowed
    return Line(
        name="mac_share",
        status=Status.FAIL if fails else Status.OK,
        baseline=f"{before:.1%}",
        measured=f"{now:.1%}",
        tolerance=f"{100 * allowed:.3g} points",
        value=now,
        before=before,
        reason="fewer products are of integers" if fails else "",
    )


def size_line(now: int, before: int, allowed: float) -> Line:
    """Judge the bytes of the INT8 model."""
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
    """Judge the version of the standard operators: an older one is a step back."""
    fails = now < before
    return Line(
        name="opset",
        status=Status.FAIL if fails else Status.OK,
        baseline=str(before),
        measured=str(now),
        tolerance="none",
        value=now,
        before=before,
        reason=f"the INT8 model is of an older opset: {before} -> {now}" if fails else "",
    )


def layers_line(now: Measured, before: Measured) -> Line:
    """Tell whether a weight or a bias is gone, or zero, or has channels that are: no quantization does that.

    What was measured on a few thousand items may not show it.
    """
    lost = {} if now.int8_model == before.int8_model else dict(_lost(now, before))
    same = now.int8_model == before.int8_model
    names = () if same else dict.fromkeys((*now.layers, *before.layers))
    others = sum(now.layers.get(name) != before.layers.get(name) for name in names)
    return Line(
        name="layers",
        status=Status.FAIL if lost else Status.OK,
        baseline=f"{len(before.layers)}",
        measured=f"{others} changed" if others else "the same",
        tolerance="none",
        reason="constants are gone or zero: " + ", ".join(f"{role} of {name}" for name, role in lost.items())
        if lost
        else "",
        layers=tuple(lost),
    )


def _lost(now: Measured, before: Measured) -> Iterator[tuple[str, str]]:
    """Yield layers with what they have lost; a bias that is gone may be added by a node that is new behind it."""
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
    """Return a line with what came of it."""
    return replace(line, status=status, reason=reason, **more)
