"""Compare the outputs of two models: agreement of the top-1 classes, broken and fixed items, SQNR.

This file computes the signal and the noise of whole outputs, and `parts` of the rows of outputs. `classes` compares
classes, and `tokens` computes what a language model loses.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np

from ... import RequantError
from ...calibration.data.samples import Sample
from ...calibration.model.session import Array
from ..runtime.own_state import OwnState
from ..runtime.spread import spread
from .above_half import AboveHalf
from .choices import into
from .class_scores import ClassScores
from .classes import Interval, Outputs, Tally, is_float
from .cosines import Cosines
from .labels import check_classes, class_labels
from .lengths import OtherLengths
from .parts import Rows
from .samples import EachSample, WorstSample
from .shares import binomial_p, paired_interval, score_interval
from .sqnr import FAINT, decibels, finite, output_powers
from .terms import USUAL, Terms
from .tokens import Divergence

Run = Callable[[Mapping[str, Array]], Outputs]

Watch = Callable[[Outputs, Outputs, Sample], None]


INTO_ARGMAX = into("ArgMax")
"""The end of the label of scores that are compared in place of the classes chosen from them."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """Counts against the labels.

    Attributes:
        items: The number of items with a label.
        float_correct: Items that the float model classifies correctly.
        int8_correct: Items that the INT8 model classifies correctly.
        broken: Items that only the float model classifies correctly.
        fixed: Items that only the INT8 model classifies correctly.
    """

    items: int
    float_correct: int
    int8_correct: int
    broken: int
    fixed: int

    @property
    def float_accuracy(self) -> float:
        """The share of items that the float model classifies correctly, 0..1."""
        return self.float_correct / self.items

    @property
    def int8_accuracy(self) -> float:
        """The share of items that the INT8 model classifies correctly, 0..1."""
        return self.int8_correct / self.items

    def above_chance(self, classes: int) -> bool:
        """Whether the float model is right more often than a guess; else the labels are hardly for this model."""
        return classes < 2 or self.float_accuracy > 1 / classes

    @property
    def p_value(self) -> float:
        """The probability of a split at least this uneven if broken and fixed are equally likely (exact, two-sided)."""
        return binomial_p(self.broken, self.fixed)

    @property
    def drop_interval(self) -> Interval:
        """The 95 % confidence interval of the drop in accuracy, -1..1; items count as independent of each other."""
        return paired_interval(self.broken, self.fixed, self.items)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The difference between a float and an INT8 model on the same data.

    Attributes:
        samples: The number of samples.
        scores: What the scores per class tell without labels; None if no output holds such scores.
        sqnr_db: The SQNR of each float output in dB; infinite if the outputs are equal.
        labelled: Counts against the labels; None without labels.
        whole_labelled: Counts of whole items, which are right if each of their predictions with a label is; None
            without labels, where an item has one prediction, and for maps.
        parts_db: By output that holds several quantities: its quiet part as an index, and the SQNR of this part in dB.
        low_db: The lower end of the 95 % confidence interval of each SQNR, for other data of the same kind.
        divergence: The mean Kullback-Leibler divergence of the next token's distribution, in nats; None if no output
            scores tokens.
        states: The outputs that feed the next sample. They are no results: their noise counts in the results of later
            samples, since each model carries its own state.
        worst_sample: The sample whose result has the lowest SQNR, if it is lower than the SQNR of all samples at each
            result; None if no sample stands out. Where classes judge one of several results, it is of another one.
        above_half: By float output: how many values are above 0.5 in both models, and in one of them. `quantize` and
            `compare` keep the rows of the outputs that a Sigmoid writes.
        cosines: By float output that has a vector for each item, and is known for nothing else: the cosines between
            the vectors of both models.
        replaced: By output that is not compared itself, since the model chooses it by its own scores: its own SQNR in
            dB; NaN for integers.
        saturated: The outputs whose probabilities are all nearly 0 or 1, so that their noise does not show.
            In `sqnr_db` their logits stand in their place, where both models have them.
        logits: What stands in their place in `sqnr_db`.
        other_lengths: By float output whose shape differs between the models: the samples with other lengths.
    """

    samples: int
    scores: ClassScores | None
    sqnr_db: Mapping[str, float]
    labelled: Labelled | None = None
    whole_labelled: Labelled | None = None
    parts_db: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    low_db: Mapping[str, float] = field(default_factory=dict)
    divergence: float | None = None
    states: frozenset[str] = frozenset()
    worst_sample: WorstSample | None = None
    above_half: Mapping[str, AboveHalf] = field(default_factory=dict)
    cosines: Mapping[str, Cosines] = field(default_factory=dict)
    replaced: Mapping[str, float] = field(default_factory=dict)
    saturated: frozenset[str] = frozenset()
    logits: frozenset[str] = frozenset()
    other_lengths: Mapping[str, OtherLengths] = field(default_factory=dict)

    @property
    def class_output(self) -> str:
        """The name of the output that holds scores per class; empty without one."""
        return "" if self.scores is None else self.scores.output

    @property
    def predictions(self) -> int:
        """The number of predictions; 0 if no output holds scores per class."""
        return 0 if self.scores is None else self.scores.predictions

    @property
    def changed(self) -> int:
        """The number of predictions that differ."""
        return 0 if self.scores is None else self.scores.changed

    @property
    def agreement(self) -> float | None:
        """The share of equal top-1 predictions, 0..1; None if no output holds scores per class."""
        return None if self.scores is None else self.scores.agreement

    @property
    def predicted_drop(self) -> float | None:
        """The drop of top-1 accuracy that `scores` predict, -1..1; None if no output holds scores per class."""
        return None if self.scores is None else self.scores.predicted_drop

    @property
    def agreement_interval(self) -> Interval | None:
        """The 95 % confidence interval of the agreement; predictions count as independent of each other."""
        return None if self.agreement is None else score_interval(self.agreement, self.predictions)

    @property
    def quiet_db(self) -> dict[str, float]:
        """The SQNR of each quiet part in dB, by the name of the output with the index of the part."""
        return {f"{name}{index}": value for name, (index, value) in self.parts_db.items()}

    @property
    def places_db(self) -> dict[str, float]:
        """The SQNR of each float output and of each quiet part in dB, by name."""
        return {**self.sqnr_db, **self.quiet_db}

    @property
    def results_db(self) -> dict[str, float]:
        """The SQNR of each float output that is no state, in dB; of all if there are only states."""
        return {name: self.sqnr_db[name] for name in _results(self.sqnr_db, self.states)}

    def least_db(self, output: str) -> float:
        """Return the SQNR that other data of the same kind leave an output at least, in dB, with 95 % confidence."""
        return self.low_db.get(output, self.sqnr_db[output])

    @property
    def result_parts_db(self) -> dict[str, tuple[str, float]]:
        """The `parts_db` of the outputs in `results_db`."""
        return {name: part for name, part in self.parts_db.items() if name in self.results_db}

    @property
    def worst_sqnr_db(self) -> float:
        """The lowest SQNR of a result, in dB."""
        return min(self.results_db.values(), default=math.inf)


@dataclass
class _Sums:
    """Sums over the samples.

    Attributes:
        terms: What is known beside the outputs.
        samples: The number of samples.
        classes: Sums over the predictions.
        each: Signal and noise of each float output of each sample.
        rows: Signal and noise of each of its rows, if it can have parts.
        lengths: The samples for which the lengths of an output differ.
        above_half: Counts of the values of each float output above 0.5.
        cosines: The cosines of each float output.
        tokens: The divergence of the distributions of tokens.
        correct: The labels that no model predicts, the INT8 model alone, the float model alone, and both; int64 (4,).
        whole: As `correct` for items with several predictions, of which a model predicts all labels or not.
        states: The outputs that feed the next sample.
        of_other: Whether a label was beyond the classes of the judged head, and may be one of another head.
    """

    terms: Terms = USUAL
    samples: int = 0
    classes: Tally = field(default_factory=Tally)
    each: EachSample = field(default_factory=EachSample)
    rows: dict[str, Rows] = field(default_factory=dict)
    lengths: dict[str, OtherLengths] = field(default_factory=dict)
    above_half: dict[str, AboveHalf] = field(default_factory=dict)
    cosines: dict[str, Cosines] = field(default_factory=dict)
    tokens: Divergence = field(default_factory=Divergence)
    correct: Array = field(default_factory=lambda: np.zeros(4, np.int64))
    whole: Array = field(default_factory=lambda: np.zeros(4, np.int64))
    states: frozenset[str] = frozenset()
    of_other: bool = False

    def add(self, reference: Outputs, candidate: Outputs, sample: Sample) -> None:
        """Add one sample."""
        self.samples += 1
        if sample.step is not None:
            self.states |= {link.output for link in sample.step.links}
        for name, powers in output_powers(reference, candidate, self.terms.probabilities).items():
            exact, other = reference[name], candidate[name]
            self.each.add(sample.where, name, exact.size, *powers)
            self.lengths[name] = self.lengths.get(name, OtherLengths()).with_sample(exact, other, sample.where)
            if is_float(exact):
                self.rows[name] = self.rows.get(name, Rows()).with_sample(exact, other)
                self.cosines[name] = self.cosines.get(name, Cosines()).with_sample(exact, other, sample)
                self.above_half[name] = self.above_half.get(name, AboveHalf()).with_sample(exact, other)
        self.tokens = self.tokens.with_sample(reference, candidate, sample)
        expected, actual = self.classes.add(reference, candidate, sample) or (None, None)
        if sample.label is not None:
            self._add_labels(expected, actual, sample)

    def _add_labels(self, expected: Array | None, actual: Array | None, sample: Sample) -> None:
        """Compare the predictions of both models with the labels."""
        labels = np.asarray(sample.label).reshape(-1)
        if self.of_other:
            return
        floats = self.terms.labels == "skip" and labels.dtype.kind == "f"
        if expected is None or actual is None or expected.size != labels.size or floats:
            if self.terms.labels == "skip":
                return
            count = 0 if expected is None else expected.size
            raise RequantError(
                f"{sample.where}: {labels.size} label(s) for {count} prediction(s); give one class each "
                "(of one-hot rows the argmax), or no labels"
            )
        labels = class_labels(sample).reshape(-1)
        try:
            check_classes(labels, self.classes.widths, sample.where)
        except RequantError:
            if self.terms.labels == "refuse" or len(self.classes.heads) > 1 or len(self.classes.left_out) <= 1:
                raise
            self.of_other = True  # a head beside this one has more classes: no label is of this one
            self.correct, self.whole = np.zeros_like(self.correct), np.zeros_like(self.whole)
            return
        counts = labels >= 0
        before, after = ((each.reshape(-1) == labels) for each in (expected, actual))
        self.correct += _counted(before[counts], after[counts])
        if 0 < len(expected) < labels.size:
            self.whole += _whole_items(*(each.reshape(len(expected), -1) for each in (before, after, counts)))

    def _parts_db(self) -> dict[str, tuple[str, float]]:
        """Return the SQNR of quiet parts; quiet classes are no part."""
        classes = self.classes.heads if self.classes.known else ()
        probable = self.terms.probabilities
        others = (name for name in self.rows if name not in classes and not name.endswith(INTO_ARGMAX))
        parts = {name: self.rows[name].quiet(FAINT**2 if name in probable else 0.0) for name in others}
        return {name: (part.where, decibels(part.signal, part.noise)) for name, part in parts.items() if part}

    def result(self) -> Accuracy:
        """Return the comparison of the samples so far."""
        sqnr, found, scores = self.each.sqnr_db(), self.classes, self._scores()
        results = _results(sqnr, self.states)
        by_class = scores.output if scores is not None and scores.sure else None  # classes judge this output
        return Accuracy(
            self.samples,
            scores,
            sqnr,
            labelled=_labelled(self.correct),
            whole_labelled=_labelled(self.whole) if found.known and not found.maps else None,
            parts_db=self._parts_db(),
            low_db=self.each.low_db(),
            divergence=self.tokens.mean,
            states=self.states,
            worst_sample=self.each.worst([name for name in results if name != by_class] or results),
            above_half=self.above_half,
            cosines=self._cosines(scores),
            saturated=found.saturated if found.known else frozenset(),
            other_lengths={name: each for name, each in self.lengths.items() if each.samples},
        )

    def _cosines(self, scores: ClassScores | None) -> dict[str, Cosines]:
        """Return the cosines of results whose vectors are not known to be scores per class."""
        by_class = scores is not None and (scores.sure or self.correct.any())
        known = self.classes.heads if by_class else frozenset()
        found = {name: self.cosines[name] for name in _results(self.cosines, self.states) if name not in known}
        return {name: each for name, each in found.items() if each.vectors and not name.endswith(INTO_ARGMAX)}

    def _scores(self) -> ClassScores | None:
        """Return what the scores per class tell; None without any."""
        found = self.classes
        if not found.known:
            return None
        count = found.predictions
        return ClassScores(
            output=found.output,
            classes=found.classes,
            predictions=count,
            agreement=found.equal / count,
            predicted_drop=found.lost / count,
            items=len(found.whole),
            whole_drop=statistics.fmean(found.whole),
            whole_interval=found.drop_interval,
            confidence=found.sure / count,
            maps=found.maps,
            sound=found.sound,
            left_out=tuple(sorted(found.left_out - found.heads - self.states)),
        )


def _results(outputs: Iterable[str], states: Collection[str]) -> list[str]:
    """Return the outputs that are no states; all if there are only states."""
    every = list(outputs)
    return [name for name in every if name not in states] or every


def _counted(before: Array, after: Array) -> Array:
    """Return how often neither of two models is right, the second alone, the first alone, and both: int64 (4,).

    Args:
        before: Whether the first model is right, bool (items,).
        after: Whether the second model is right, bool (items,).
    """
    return np.bincount(2 * before.astype(np.uint8) + after, minlength=4)


def _whole_items(before: Array, after: Array, counts: Array) -> Array:
    """Return `_counted` of the items that have all their labels right; an item without labels is left out.

    Args:
        before: Whether the float model predicts a label, bool (items, labels).
        after: Whether the INT8 model predicts it, bool (items, labels).
        counts: Whether it counts, bool (items, labels).
    """
    labelled = counts.any(axis=1)
    first, second = (np.asarray((each | ~counts).all(axis=1))[labelled] for each in (before, after))
    return _counted(first, second)


def _labelled(correct: Array) -> Labelled | None:
    """Return the counts of `_counted` against the labels; None without labels."""
    neither, fixed, broken, both = map(int, correct)
    items = neither + fixed + broken + both
    return Labelled(items, broken + both, fixed + both, broken, fixed) if items else None


def measure(
    run_float: Run,
    run_int8: Run,
    samples: Iterable[Sample],
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
    *,
    terms: Terms = USUAL,
) -> Accuracy:
    """Run both models over the samples and compare them; see `compare_outputs`.

    Several threads may call both functions at the same time, except for steps of sequences: each model carries its own
    state from step to step.

    Raises:
        RequantError: The labels of a sample do not fit the predictions.
    """
    before, after = OwnState(), OwnState()

    def run(sample: Sample) -> tuple[Outputs, Outputs, Sample]:
        return before.run(run_float, sample), after.run(run_int8, sample), sample

    rest = iter(samples)
    head = list(islice(rest, 1))
    in_order = any(sample.step is not None for sample in head)
    ordered = chain(head, rest)
    return compare_outputs(map(run, ordered) if in_order else spread(run, ordered), progress, watch, terms=terms)


def compare_outputs(
    results: Iterable[tuple[Outputs, Outputs, Sample]],
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
    *,
    terms: Terms = USUAL,
) -> Accuracy:
    """Compare the outputs of the float model and of the INT8 model for each sample.

    A label below 0 does not count.

    Args:
        results: The outputs of both models, with the sample.
        progress: Called with the number of samples so far.
        watch: Called with each of the results.
        terms: What is known beside the outputs.

    Raises:
        RequantError: The labels of a sample do not fit the predictions, and are refused.
    """
    sums = _Sums(terms)
    for reference, candidate, sample in results:
        sums.add(reference, candidate, sample)
        if watch is not None:
            watch(reference, candidate, sample)
        if progress is not None:
            progress(sums.samples)
    return sums.result()


def accuracy_json(accuracy: Accuracy, *, held_out: bool = True) -> dict[str, Any]:
    """Return plain JSON values: agreement, counts against labels, SQNR; null if a value is unknown or not finite.

    Args:
        accuracy: Float against INT8.
        held_out: Whether the samples gave no ranges; if they did, the intervals for other data are unknown.
    """
    labelled, agreed = accuracy.labelled, accuracy.agreement_interval if held_out else None
    scores, lows = accuracy.scores, accuracy.least_db if held_out else lambda _: math.nan
    return {
        "agreement": accuracy.agreement,
        "agreement_interval": agreed and list(agreed),
        "predicted_drop": accuracy.predicted_drop,
        "predicted_item_drop": scores and scores.whole_drop,
        "predicted_item_drop_interval": list(scores.whole_interval) if scores and held_out else None,
        "items": labelled and labelled.items,
        "float_accuracy": labelled and labelled.float_accuracy,
        "int8_accuracy": labelled and labelled.int8_accuracy,
        "broken": labelled and labelled.broken,
        "fixed": labelled and labelled.fixed,
        "p_value": labelled and labelled.p_value,
        "drop_interval": list(labelled.drop_interval) if labelled and held_out else None,
        "whole_items": accuracy.whole_labelled and asdict(accuracy.whole_labelled),
        "divergence": None if accuracy.divergence is None else finite(accuracy.divergence),
        "saturated": sorted(accuracy.saturated),
        "sqnr_db": finite(accuracy.worst_sqnr_db),
        "worst_sample": accuracy.worst_sample and accuracy.worst_sample.to_json(),
        "sqnr_db_by_output": {name: finite(value) for name, value in accuracy.sqnr_db.items()},
        "sqnr_low_db_by_output": {name: finite(lows(name)) for name in accuracy.sqnr_db},
        "above_half_by_output": {name: found.to_json() for name, found in accuracy.above_half.items()},
        "cosine_by_output": {name: found.to_json() for name, found in accuracy.cosines.items()},
        "other_lengths_by_output": {name: found.to_json() for name, found in accuracy.other_lengths.items()},
        "sqnr_db_by_part": {name: finite(value) for name, value in accuracy.quiet_db.items()},
    }
