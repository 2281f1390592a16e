"""Decide whether an INT8 model is worth writing, and say why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...transforms.int8.reasons import ALREADY, INTEGER
from ..job import Job, Trial
from ..runtime.timing import Latency
from .judge import is_slower, promise_of

LOSES = "int8 loses too much accuracy"
SLOW = "int8 gains too little here"
WORTHWHILE = 1.02  # a smaller speed-up is within the timing noise, and not worth a loss of accuracy
MOST_DOUBT = 0.1  # a larger gain is believed, however unsure the times of a busy machine are
INTEGER_ALREADY = frozenset({ALREADY.code, INTEGER.code})  # reasons of float units that compute in integers already


@dataclass(frozen=True, slots=True)
class WhyNot:
    """Why an INT8 model is not worth writing. It is false when nothing speaks against the model.

    Code asks the fields; users read the text.

    Attributes:
        loses: How the model was judged, if it loses too much accuracy; empty otherwise.
        slow: How far its time is from a gain, with `SLOW` in front, if it gains too little; empty otherwise.
        nothing: Why there is no INT8 model that runs; empty if there is one.
    """

    loses: str = ""
    slow: str = ""
    nothing: str = ""

    def __bool__(self) -> bool:
        """Whether something speaks against the model."""
        return bool(self.loses or self.slow or self.nothing)

    def __str__(self) -> str:
        """Return all causes as text, a loss of accuracy first; empty without a cause."""
        loses = f"{LOSES}, judged by {self.loses}" if self.loses else ""
        return "; ".join(filter(None, (self.nothing, loses, self.slow)))

    @property
    def cause(self) -> str:
        """The first cause in a few words, without figures; empty without a cause."""
        return self.nothing or (LOSES if self.loses else SLOW if self.slow else "")


def why_not(job: Job, trial: Trial) -> WhyNot:
    """Return why the INT8 model is not worth writing.

    The time of a model that loses too much counts if it is clearly slower: then nothing was tried to lose less.
    """
    if not trial.candidate.plan.has_int8:
        return WhyNot(nothing=_why_nothing(trial))
    if not job.judged:  # random inputs are no evidence against a model
        return WhyNot()
    judged = promise_of(job, trial.accuracy)
    slow = too_slow(job, trial) if judged.kept or is_slower(job, trial.latencies) else ""
    return WhyNot("" if judged.kept else str(judged), slow)


def _why_nothing(trial: Trial) -> str:
    """Return why no unit of a model became int8."""
    plan = trial.candidate.plan
    more = any(plan.choices[unit.name].reason.code in INTEGER_ALREADY for unit in plan.units)
    if trial.candidate.placement.how == "rules":
        return f"nothing {'more ' if more else ''}in this model can become int8"
    return f"the placement keeps {'what is not in integers yet' if more else 'every unit'} in float"


def too_slow(job: Job, trial: Trial) -> str:
    """Return why an INT8 model is too slow; empty when it is fast enough, or its time does not count.

    A loss of accuracy needs a gain: with a relative error of 5 %, INT8 must be 1.05 times as fast as the faster float
    model. With several batch sizes, INT8 is too slow if at one of them it loses as much as it gains at any of them: the
    worst ratio to the faster model decides, as between plans. A gain within the uncertainty of the times is none.
    """
    if not job.policy.timed or not trial.latencies:
        return ""
    gains = [latency.gain for latency in trial.latencies]
    gain = max(gains) / max(1.0, 1 / min(gains))
    needed = max(WORTHWHILE, 1 + promise_of(job, trial.accuracy).error) if job.judged else WORTHWHILE
    unsure = min(max(each.uncertainty for each in trial.latencies), MOST_DOUBT)
    if gain >= max(needed, 1 + unsure):
        return ""
    first = trial.latencies[0]
    simple = "" if first.gain == first.speedup else f", {first.gain:.2f}x the speed of {job.simple_name}"
    return f"{SLOW}: {speeds_text(job, trial.latencies)}{simple}{_shortfall(gain, needed, unsure)}"


def _shortfall(gain: float, needed: float, unsure: float) -> str:
    """Return what a gain falls short of, in words; empty for a gain that is not worth a loss of accuracy at all.

    Args:
        gain: The speed-up that counts.
        needed: The speed-up that the error of the model needs.
        unsure: The uncertainty of the times, as a share.
    """
    if gain >= needed:
        return f"; the times are unsure by {100 * unsure:.0f} %, which is more"
    return f"; an error of {100 * (needed - 1):.0f} % needs {needed:.2f}x" if gain >= WORTHWHILE else ""


def speeds_text(job: Job, latencies: Sequence[Latency]) -> str:
    """Return speed-ups as text, with the batch sizes if there are several."""
    of = f" the speed of {job.opponent}"
    doubts = [f" ({each.doubt})" if each.doubt else "" for each in latencies]
    if len(latencies) == 1:
        return f"{latencies[0].speedup:.2f}x{of}{doubts[0]}"
    first, *others = (
        f"{each.speedup:.2f}x{{}} at {each.name}{told}" for each, told in zip(latencies, doubts, strict=True)
    )
    return ", ".join([first.format(of), *(text.format("") for text in others)])
