"""The promise of accuracy: what an INT8 model may lose, and what judges it.

- Labels: the drop of top-1 accuracy is not beyond chance, or at most `SHARE` of the float model's accuracy.
- Class scores without labels, or with too few: the predicted drop of whole items is below `POINTS`, at the upper end of
  its interval. A sequence of scores, and scores of fewer than `FEWEST` items, must have `LEAST_DB` besides. Scores with
  at least `FINE_DB` pass too: on few samples, chance alone makes the interval wide. Scores without labels that are
  no probabilities may be an embedding: they must have `PART_DB` besides. Few saturated probabilities, all 0 or 1,
  that predict no drop say nothing: their logits must have `LEAST_DB`.
- Scores of the next token: on text of its own the perplexity grows by at most `OF_TOKENS`, and the output has
  `LEAST_DB`.
- Any other output: at least `LEAST_DB`, at the lower end of the interval of its SQNR. The part of it that holds smaller
  quantities, such as the scores beside the boxes of a detector, and scores into a TopK: at least `PART_DB`; of whole
  tensors too at the lower end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...system.printable import number_of
from .class_scores import ClassScores
from .classes import FEWEST
from .lengths import sqnr_text
from .outputs import Accuracy
from .selected_outputs import holds_scores, worst_place
from .sqnr import decibels_text, finite

SHARE = 0.005
"""The share of the float model's accuracy that may be lost, 0..1."""
OF_TOKENS = 0.003
"""The greatest growth of the perplexity on text of the float model's own. On the text of others it grows more: a
decoder of stories by 0.29 % on its own text, and by 0.42 % on others'. So it stays below `SHARE` there."""
POINTS = 0.005
"""The upper end of the predicted drop's interval, 0..1: 0.5 points."""
LEAST_DB = 20.0
"""The SQNR that an output needs if nothing else judges it: noise of a tenth of the signal's amplitude."""
PART_DB = 15.0
"""The SQNR that the quiet part of an output needs (`parts`): noise of 0.18 of the signal's amplitude. On a CPU with
matrix tiles the mAP75 of a YOLOv8n with 320 pixels, against the boxes of the float model, is 0.946 without this bound
(14.7 dB, 3.7x as fast as float), 0.987 with 15 dB (2.4 to 2.7x), and 0.986 with 16 dB (19.4 dB, 1.9x)."""
FINE_DB = 35.0
"""The SQNR of class scores from which no drop is expected; MobileNetV1 0.75 loses 0.5 points at 31 dB."""
LEAST_ITEMS = 4
"""The least number of items whose predicted drop judges."""
HIDDEN = "no noise shows, since the probabilities are all 0 or 1,"
"""What is said in place of the SQNR of outputs whose noise does not show."""
UNSEEN = 0.05
"""The chance that no item changes, at the share of changed items that is still called possible (the rule of three)."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Whether an INT8 model keeps the promise of accuracy.

    Attributes:
        judge: ``labels``, ``class scores``, ``perplexity`` or ``SQNR``: what decided. If the promise is missed, what
            misses it.
        kept: Whether it is kept.
        text: The measured value and its limit.
        error: The measured loss as a relative error, 0..: the amplitude of the noise over the amplitude of the signal.
            For classes, a drop of `POINTS` counts as the error at `LEAST_DB`, and other drops in proportion.
        excess: The factor by which the power of the noise must fall; at most 1 if the promise is kept.
        held_out: Whether the samples gave no ranges.
    """

    judge: str
    kept: bool
    text: str
    error: float
    excess: float
    held_out: bool = True

    def __str__(self) -> str:
        """Return the judge, the measured value and its limit."""
        return f"{self.judge}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "judge": self.judge,
            "kept": self.kept,
            "text": self.text,
            "relative_error": finite(self.error),
            "samples_gave_no_ranges": self.held_out,
        }


def promise(accuracy: Accuracy, *, held_out: bool = True) -> Promise:
    """Judge an INT8 model by its accuracy.

    Args:
        accuracy: The comparison with the float model.
        held_out: Whether the samples gave no ranges. If they did, other data may lose more: no text speaks of
            confidence.
    """
    found = _judgements(accuracy, held_out)
    leading = found[0].judge
    nearest = max((each for each in found if each.judge == leading), key=lambda each: each.excess)
    decisive = next((each for each in found if not each.kept), nearest)
    if not decisive.kept and decisive.judge != "SQNR" and accuracy.other_lengths:
        worst = max(accuracy.other_lengths.values(), key=lambda each: each.samples)
        decisive = replace(decisive, text=f"{decisive.text}; {worst}")
    return replace(decisive, error=max(each.error for each in found), held_out=held_out)


def _judgements(accuracy: Accuracy, held_out: bool) -> list[Promise]:
    """Return all judgements that apply, at least one, the leading one first: classes, tokens, whole outputs, parts.

    `held_out` is as for `promise`.
    """
    by_class = _by_labels(accuracy) or _by_scores(accuracy, held_out)
    classes = _of_classes(accuracy) if _replaces_sqnr(by_class, accuracy) else set[str]()
    others = {name: value for name, value in accuracy.results_db.items() if name not in classes}
    ranked = [name for name in others if holds_scores(name)]
    plain = {name: value for name, value in others.items() if not holds_scores(name)}
    by_tokens = None if accuracy.divergence is None else _by_divergence(accuracy.divergence)
    by_part = _by_part(accuracy, [*ranked, *_doubtful_scores(accuracy)], held_out)
    nothing_else = by_class is None and by_part is None
    by_sqnr = _by_sqnr(accuracy, plain, by_class, held_out) if plain or nothing_else else None
    return [each for each in (by_class, by_tokens, by_sqnr, by_part) if each is not None]


def _replaces_sqnr(by_class: Promise | None, accuracy: Accuracy) -> bool:
    """Return whether a judgement by classes is enough for the scores per class, so that their SQNR does not count."""
    scores = accuracy.scores
    many = scores is not None and scores.items >= FEWEST and scores.of_items
    return by_class is not None and (by_class.judge == "labels" or many)


def _doubtful_scores(accuracy: Accuracy) -> list[str]:
    """Return the output with scores per class if it may be an embedding, and is among the results."""
    scores = accuracy.scores
    return [scores.output] if scores is not None and not scores.sound and scores.output in accuracy.results_db else []


def _of_classes(accuracy: Accuracy) -> set[str]:
    """Return the compared tensors that hold the scores per class: the output, or logits in its place."""
    return {accuracy.class_output, *accuracy.logits}


def _by_labels(accuracy: Accuracy) -> Promise | None:
    """Judge by labels; None without labels that the float model knows, or if chance decides beside a predicted drop."""
    counts, scores = accuracy.labelled, accuracy.scores
    if counts is None or (scores is not None and not counts.above_chance(scores.classes)):
        return None
    drop = counts.float_accuracy - counts.int8_accuracy
    allowed, (low, high) = SHARE * counts.float_accuracy, counts.drop_interval
    lost = drop > allowed and low > 0
    if not lost and high > allowed and (predicts(accuracy) or accuracy.saturated):
        return None
    text = (
        f"{counts.float_accuracy:.2%} -> {counts.int8_accuracy:.2%} of {counts.items} labels, "
        f"{counts.broken} broken, {counts.fixed} fixed"
    )
    return _of_drop("labels", not lost, text, max(drop, 0.0))


def _by_scores(accuracy: Accuracy, held_out: bool) -> Promise | None:
    """Judge by the predicted drop of class scores; None if nothing predicts it. `held_out` is as for `promise`.

    Saturated probabilities that predict no drop say nothing; where they predict one, answers have changed.
    """
    scores = accuracy.scores
    if scores is None or not predicts(accuracy):
        return None
    high, fine = scores.whole_interval[1], accuracy.sqnr_db.get(scores.output, -math.inf)
    if high >= POINTS and fine >= FINE_DB:
        place = worst_place({scores.output: fine})
        return _of_worst((fine, fine), f"{decibels_text(fine)} at {place}", FINE_DB)
    whole = "" if scores.of_items else " of whole sequences"
    text = f"predicted drop {100 * scores.whole_drop:.2f} points{whole}{_from_items(scores, held_out)}"
    kept = high < POINTS
    if kept and accuracy.saturated:  # a class that changes on none of a few items may still change on others
        return None
    found = _of_drop("class scores", kept, text, max(scores.whole_drop if kept else high, 0.0))
    return found if kept else replace(found, excess=min(found.excess, (amplitude(fine) / amplitude(FINE_DB)) ** 2))


def _from_items(scores: ClassScores, held_out: bool) -> str:
    """Return what a predicted drop says of other data, in words, with the number of items behind it.

    Where no item changed, the losses have no spread that could tell it: what is sure of n items is that at most about
    3 / n of others change. `held_out` is as for `promise`.
    """
    low, high = scores.whole_interval
    counted = number_of(scores.items, "item")
    if low == high == 0.0:
        others = f": with 95 % confidence at most {1 - UNSEEN ** (1 / scores.items):.1%} of others change"
        return f", none of {counted} changed{others if held_out else ''}"
    end = f"{100 * high:.2f}"
    told = f"at most {end} with 95 % confidence" if held_out else f"{end} with the spread of the items"
    return f" from {counted}, {told}"


def predicts(accuracy: Accuracy) -> bool:
    """Whether the class scores predict a drop: there are enough of them, and they are far enough from chance.

    A map is not judged by its items: hardly ever are all pixels right.
    """
    scores = accuracy.scores
    return scores is not None and scores.items >= LEAST_ITEMS and not scores.maps and is_sure(accuracy)


def hidden_outputs(accuracy: Accuracy) -> frozenset[str]:
    """Return the outputs whose noise does not show: saturated probabilities without any difference."""
    return frozenset(name for name in accuracy.saturated if accuracy.sqnr_db.get(name) == math.inf)


def is_sure(accuracy: Accuracy) -> bool:
    """Whether there are class scores, and the float model's classes are far enough from chance."""
    return accuracy.scores is not None and accuracy.scores.sure


def _of_drop(judge: str, kept: bool, text: str, drop: float) -> Promise:
    """Return the judgement of a drop. Noise of twice the amplitude changes about twice as many classes."""
    ratio = drop / POINTS
    excess = (min(ratio, 1.0) if kept else max(ratio, 1.0)) ** 2
    return Promise(judge, kept, text, ratio * amplitude(LEAST_DB), excess)


def _by_divergence(nats: float) -> Promise:
    """Judge by the mean divergence of the next token's distribution.

    It grows like the power of the noise. A growth of the perplexity by `OF_TOKENS` counts as the error at `LEAST_DB`.
    """
    ratio = nats / math.log1p(OF_TOKENS)
    growth = f"+{math.expm1(nats):.2%}" if nats < 1 else "more than doubled"
    text = f"perplexity {growth} on text of the float model's own, {OF_TOKENS:.2%} are allowed"
    return Promise("perplexity", ratio <= 1, text, math.sqrt(ratio) * amplitude(LEAST_DB), ratio)


def _low_db(accuracy: Accuracy, outputs: Iterable[str], by_class: Promise | None) -> dict[str, float]:
    """Return, for each output, the value in dB that must not be too low: the lower end of the interval of its SQNR.

    Where classes or tokens of an output are judged too, this value is the SQNR itself: the other judgement has an
    interval of its own.
    """
    if accuracy.divergence is not None:
        return {name: accuracy.sqnr_db[name] for name in outputs}
    judged = accuracy.class_output if by_class is not None else None
    return {name: accuracy.sqnr_db[name] if name == judged else accuracy.least_db(name) for name in outputs}


def _by_sqnr(accuracy: Accuracy, sqnr_db: Mapping[str, float], by_class: Promise | None, held_out: bool) -> Promise:
    """Judge by the output whose SQNR has the lowest lower end.

    Args:
        accuracy: The comparison with the float model.
        sqnr_db: The SQNR of each output that counts, in dB.
        by_class: The judgement by classes; None without one.
        held_out: As for `promise`.
    """
    low_db = _low_db(accuracy, sqnr_db, by_class)
    worst = min(low_db, key=low_db.__getitem__, default="")
    mean, low = sqnr_db.get(worst, math.inf), low_db.get(worst, math.inf)
    shown = HIDDEN if worst in hidden_outputs(accuracy) else sqnr_text(worst, mean, accuracy.other_lengths)
    return _of_worst((mean, low), f"{shown} at {worst_place(low_db)}{_end(mean, low, held_out)}", LEAST_DB)


def _by_part(accuracy: Accuracy, whole: Collection[str], held_out: bool) -> Promise | None:
    """Judge by the worst of the quiet parts of outputs, and of the scores that need no more than a part.

    Args:
        accuracy: The comparison with the float model.
        whole: The outputs whose values are all such scores; each counts in place of its quiet part.
        held_out: As for `promise`.

    Returns:
        The judgement; None if there is neither a quiet part nor such an output.
    """
    parts_db = {**accuracy.result_parts_db, **{name: ("", accuracy.results_db[name]) for name in whole}}
    if not parts_db:
        return None
    low_db = {name: accuracy.least_db(name) if name in whole else value for name, (_, value) in parts_db.items()}
    name = min(low_db, key=low_db.__getitem__)
    (index, mean), low = parts_db[name], low_db[name]
    shown = sqnr_text(name, mean, accuracy.other_lengths)
    return _of_worst((mean, low), f"{shown} at {name}{index}{_end(mean, low, held_out)}", PART_DB)


def _end(mean: float, low: float, held_out: bool) -> str:
    """Return the lower end of the interval of an SQNR, in words; empty where it is the SQNR itself."""
    end = decibels_text(low)
    text = f", at least {end} with 95 % confidence" if held_out else f", {end} with the spread of the samples"
    return text if low < mean else ""


def _of_worst(measured: tuple[float, float], told: str, least: float) -> Promise:
    """Judge by an SQNR in dB and the least that is needed.

    Args:
        measured: The SQNR, and the lower end of its interval, which must not be below the least.
        told: The measured value in words.
        least: The least SQNR that keeps the promise.
    """
    mean, low = measured
    kept = low >= least
    text = f"{told}, {least:.0f} dB are needed"
    excess = (amplitude(low) / amplitude(least)) ** 2
    return Promise("SQNR", kept, text, amplitude(mean if kept else low), excess)


def amplitude(decibels: float) -> float:
    """Return the amplitude of the noise over the amplitude of the signal."""
    return 10.0 ** (-decibels / 20) if decibels > -math.inf else math.inf
