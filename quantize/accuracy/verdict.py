"""The verdict on an INT8 model in one sentence, and the rows of the table below it.

This is the only place that writes a speed-up, a change of size, a change of answers or a drop as text. The terminal,
`str` of a result, notebooks and reports show the same words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ...system.printable import number_of
from ..model.files import size_text
from ..runtime.machine import ONNX_RUNTIME
from ..runtime.runtimes import Identity
from ..runtime.timing import Latency
from .choices import tensor_of
from .class_scores import ClassScores
from .drop import Versus
from .lengths import sqnr_text
from .outputs import Accuracy, Labelled
from .promise import HIDDEN, LEAST_DB, Promise, hidden_outputs, is_sure
from .selected_outputs import worst_place
from .sqnr import decibels_text

Row: TypeAlias = tuple[str, str]
"""A name and a value; the name is empty where a row continues the row above."""

SIMPLER = 1.2  # a simplified float model this many times as fast as the user's is named in the first line
ALIKE = 1.02  # models whose times differ by less are as fast as each other
SIMPLE, WEIGHTS = "simplified float", "float weights of the given model"
"""The names of the third timed model: for a float model, and for a model that computes ranges at run time."""
NOT_INT8 = "NOT INT8"
NO_MORE = "NO MORE INT8"
MISSED = "GOAL MISSED"

# ------------------------------------------------------------------------------------------------------------ numbers


def points(share: float) -> str:
    """Return a share of 1 in points, without a minus sign in front of zero.

    >>> points(0.0123), points(-1e-9)
    ('1.23', '0.00')
    """
    text = f"{100 * share:.2f}"
    return text.removeprefix("-") if float(text) == 0 else text


def factor(value: float) -> str:
    """Return a factor with as many digits as it is worth.

    >>> factor(12.3), factor(2.87), factor(1.042)
    ('12x', '2.9x', '1.04x')
    """
    return f"{value:.{0 if value >= 9.95 else 1 if value >= 1.095 else 2}f}x"


def _ratio(before: float, after: float, less: str, more: str, same: str) -> str:
    """Return the factor between two numbers with the word for its direction."""
    if not (before > 0 and after > 0):
        return ""
    ratio = before / after
    if f"{max(ratio, 1 / ratio):.2f}" == "1.00":
        return same
    return f"{factor(ratio)} {less}" if ratio > 1 else f"{factor(1 / ratio)} {more}"


# ----------------------------------------------------------------------------------------------------------- sentence


def verdict(latencies: Sequence[Latency], sizes: tuple[int, int], answers: str, simple: str = SIMPLE) -> str:
    """Return the sentence: ``"2.9x faster, 3.9x smaller, 0 of 64 answers changed (calibration data)"``.

    Args:
        latencies: Float against INT8 at each batch size.
        sizes: Bytes of the float model and of the INT8 model.
        answers: What the answers of the model lose, and on which data; see `answers_lost` and `score_lost`.
        simple: What the third model of the latencies is: `SIMPLE` or `WEIGHTS`.
    """
    smaller = _ratio(*sizes, "smaller", "larger", "the same size")
    return ", ".join(filter(None, (_speed(latencies, simple), smaller, answers)))


def _speed(latencies: Sequence[Latency], simple: str) -> str:
    """Return the speed-up at each batch size."""
    if not latencies:
        return "not timed"
    texts = [
        _ratio(each.float_ms, each.int8_ms, "faster", "slower", "as fast as float") + _remarks(each, simple)
        for each in latencies
    ]
    if len(texts) == 1:
        return texts[0]
    return ", ".join(f"{text} at {each.name}" for text, each in zip(texts, latencies, strict=True))


def _remarks(timed: Latency, simple: str) -> str:
    """Return the speed-up of simplified float alone, and how unsure the times are, in parentheses, or nothing.

    A speed-up by `ALIKE` is named if INT8 is not faster than simplified float by as much.
    """
    gain = timed.float_ms / (timed.simple_ms or timed.float_ms)
    beside = "" if timed.gain >= ALIKE else ": as fast as INT8" if timed.gain * ALIKE > 1 else ": faster than INT8"
    named = gain >= (ALIKE if beside else SIMPLER)
    return _in_parentheses(f"{simple} alone {factor(gain)}{beside}" if named else "", timed.doubt)


def _in_parentheses(*remarks: str) -> str:
    """Return the remarks that are not empty behind a space, in parentheses; nothing without any."""
    told = "; ".join(filter(None, remarks))
    return f" ({told})" if told else ""


def answers_lost(accuracy: Accuracy, where: str) -> str:
    """Return what the answers lose: accuracy by labels, else the number of changed classes, else the worst SQNR.

    Args:
        accuracy: Float against INT8; with 0 samples if it was not measured.
        where: The data, in words.
    """
    if not accuracy.samples:
        return "accuracy not measured"
    if accuracy.labelled is not None:
        found = accuracy.labelled
        return f"top-1 accuracy {found.float_accuracy:.2%} -> {found.int8_accuracy:.2%} ({where})"
    scores = accuracy.scores
    if scores is not None and is_sure(accuracy):
        return f"{_changed(scores)}{_behind(accuracy)} ({where})"
    if accuracy.worst_sqnr_db == math.inf:
        return f"the same outputs ({where})"
    place, (part, noise) = min(
        accuracy.result_parts_db.items(), key=lambda row: row[1][1], default=("", ("", math.inf))
    )
    if noise < accuracy.worst_sqnr_db:
        return f"SQNR {decibels_text(noise)} at {place}{part} ({where})"
    worst = accuracy.worst_sample
    single = (
        ""
        if worst is None or worst.sqnr_db >= LEAST_DB or worst.output in accuracy.other_lengths
        else f", {decibels_text(worst.sqnr_db)} at the worst sample"
    )
    at = worst_place(accuracy.results_db)
    return f"SQNR {_worst_text(accuracy)} at {at}{single} ({where})"


def _changed(scores: ClassScores) -> str:
    """Return how many answers changed; of sequences, the predictions in all items, and whether no item lost any."""
    if scores.of_items:
        return f"{scores.changed} of {scores.predictions} answers changed"
    if scores.maps:
        return f"{scores.changed} of {scores.predictions} predictions changed"
    if scores.changed and scores.whole_interval == (0.0, 0.0):
        return f"0 of {scores.items} whole items changed, {scores.changed} of {scores.predictions} predictions in them"
    return f"{scores.changed} of {scores.predictions} predictions in {number_of(scores.items, 'item')} changed"


def _worst_text(accuracy: Accuracy) -> str:
    """Return the SQNR of the worst result as text."""
    results = accuracy.results_db
    return sqnr_text(min(results, key=results.__getitem__), accuracy.worst_sqnr_db, accuracy.other_lengths)


def _behind(accuracy: Accuracy) -> str:
    """Return what stands behind the classes of saturated probabilities: the SQNR of their logits, where it is known."""
    logits = {name: accuracy.sqnr_db[name] for name in accuracy.logits}
    if not accuracy.saturated:
        return ""
    if not logits:
        return ", probabilities all 0 or 1"
    return f", SQNR {decibels_text(min(logits.values()))} at {worst_place(logits)}"


def score_lost(name: str, scores: tuple[str, str], where: str) -> str:
    """Return the change of a metric: ``"top1 99.37% -> 99.50% (test.npz)"``."""
    return f"{name} {scores[0]} -> {scores[1]} ({where})"


def versus_lost(found: Versus, where: str) -> str:
    """Return the change of a measured metric."""
    return score_lost(found.metric.name, _scores(found), where)


def score_text(value: float, unit: str) -> str:
    """Return a score of a metric; a share of 1 in percent."""
    return f"{value:.2%}" if unit == "share" else f"{value:.4f}"


def _scores(found: Versus) -> tuple[str, str]:
    """Return both scores as text."""
    return score_text(found.before, found.metric.unit), score_text(found.after, found.metric.unit)


# --------------------------------------------------------------------------------------------------------------- rows


def accuracy_rows(accuracy: Accuracy, where: str, shown: str = "", *, held_out: bool = True) -> Iterator[Row]:
    """Yield counts against labels, agreement, predicted drop and SQNR, each with its data.

    Args:
        accuracy: Float against INT8.
        where: The data, in words.
        shown: What other rows show: the name of a metric, or the judge of a promise.
        held_out: Whether the samples gave no ranges; if they did, no interval for other data is shown.
    """
    labelled = accuracy.labelled
    if labelled is not None and shown != "top1":
        yield "top-1", f"{labelled.float_accuracy:.2%} -> {labelled.int8_accuracy:.2%} ({where})"
        drop, (low, high) = labelled.float_accuracy - labelled.int8_accuracy, labelled.drop_interval
        interval = f", 95 % interval {points(low)} to {points(high)}" if held_out else ""
        yield "drop", f"{points(drop)} points ({where}){interval}"
        yield _items_row(labelled, where)
    whole = accuracy.whole_labelled
    if whole is not None:
        right = f"{whole.float_accuracy:.2%} -> {whole.int8_accuracy:.2%} with all labels right"
        yield "whole items", f"{right}, {whole.broken} broken, {whole.fixed} fixed of {whole.items} ({where})"
    scores = accuracy.scores
    if labelled is not None and scores is not None and not labelled.above_chance(scores.classes):
        yield "labels", f"float is right no more often than a guess among {scores.classes} classes: check the labels"
    by_class = labelled is not None or is_sure(accuracy)
    if by_class:  # near chance, an agreement says nothing: it may be an embedding
        yield from _class_rows(accuracy, where, shown, held_out)
    yield from _sqnr_rows(accuracy, where, shown, held_out)
    for name, found in accuracy.above_half.items():
        if found.f1 is not None:
            counted = f"{found.both} of float's {found.both + found.lost} values above 0.5 stay, {found.new} are new"
            yield "at 0.5", f"{found.f1:.1%} F1 at {name} ({where}): {counted}"
    worst = accuracy.worst_sample
    known = by_class and worst is not None and worst.output == accuracy.class_output
    if worst is not None and not known and worst.output not in accuracy.other_lengths:
        yield "worst sample", f"SQNR {decibels_text(worst.sqnr_db)} at {worst.output}: {worst.where}"
    for name, vectors in accuracy.cosines.items():
        yield "cosine", f"mean {vectors.mean:.4f}, worst {vectors.worst:.4f} at {name} ({where}): {vectors.where}"


def _sqnr_rows(accuracy: Accuracy, where: str, shown: str, held_out: bool) -> Iterator[Row]:
    """Yield the SQNR of each output and each quiet part, with the lower end of its interval where it is known.

    An output that another one is chosen from has one row, not a second one in the place of the other.

    The arguments are as for `accuracy_rows`.
    """
    places, hidden = accuracy.places_db, hidden_outputs(accuracy)
    for name, value in places.items():
        if (len(places) == 1 and shown in ("sqnr", "SQNR")) or places.get(tensor_of(name)) == value:
            continue
        kind = ", a state" if name in accuracy.states else ""
        low = accuracy.least_db(name) if name in accuracy.sqnr_db else value
        end = f", 95 % interval from {decibels_text(low)}" if held_out and low < value else ""
        told = HIDDEN if name in hidden else sqnr_text(name, value, accuracy.other_lengths)
        yield "SQNR", f"{told} at {name}{kind} ({where}){end}"


def _items_row(found: Labelled | Versus, where: str) -> Row:
    """Return the number of items that only one of the models gets right."""
    counted = f"{found.broken} broken, {found.fixed} fixed of {found.items} ({where})"
    return "items", f"{counted}, exact binomial p = {found.p_value:.3g}"


def _class_rows(accuracy: Accuracy, where: str, shown: str, held_out: bool) -> Iterator[Row]:
    """Yield the rows about classes that need no labels; the arguments are as for `accuracy_rows`."""
    scores, agreed = accuracy.scores, accuracy.agreement_interval
    if scores is None:
        return
    if agreed is not None and shown != "agreement":
        others = f"; classes of {', '.join(scores.left_out)} are not counted" if scores.left_out else ""
        interval = f", 95 % interval from {agreed[0]:.2%}" if held_out else ""
        yield "top-1 agreement", f"{scores.agreement:.2%} ({where}){interval}{others}"
    if scores.predicted_drop and shown != "class scores":
        whole = _whole(scores, held_out)
        yield "predicted drop", f"{points(scores.predicted_drop)} points, without labels ({where}){whole}"


def _whole(scores: ClassScores, held_out: bool) -> str:
    """Return the predicted drop of whole items, with its interval if `held_out`; empty if nothing is known of it."""
    low, high = scores.whole_interval
    told = [] if scores.of_items else [f"{points(scores.whole_drop)} points of whole items"]
    told += [f"95 % interval {points(low)} to {points(high)}"] if held_out else []
    return f"; {', '.join(told)}" if told else ""


def data_row(samples: int, data: str) -> Row:
    """Return the data of the accuracy, with the number of samples."""
    counted = number_of(samples, "sample")
    return "measured on", data if counted in data else f"{counted} of {data}"


def runtime_rows(runtime: Identity | None) -> Iterator[Row]:
    """Yield the runtime in which the models ran; none for ONNX Runtime, which needs no mention."""
    if runtime is not None and runtime.title != ONNX_RUNTIME:
        yield "runtime", str(runtime)


def promise_row(found: Promise, where: str) -> Row:
    """Return whether the promise of accuracy is kept, by what, and on which data."""
    return "accuracy", f"{'kept' if found.kept else 'MISSED'}, judged by {found} ({where})"


def metric_rows(found: Versus, where: str) -> Iterator[Row]:
    """Yield the scores in a metric, the drop with its interval, and the items behind it."""
    share = found.metric.unit == "share"

    def told(value: float) -> str:
        return points(value) if share else f"{value:.4f}"

    before, after = _scores(found)
    yield found.metric.name, f"{before} -> {after} ({where})"
    unit = " points" if share else " dB" if found.metric.unit == "dB" else ""
    relative = "" if found.relative_drop is None else f" ({found.relative_drop:.2%} of the float model's)"
    within = (
        "no interval"
        if found.drop_interval is None
        else f"95 % interval {told(found.drop_interval[0])} to {told(found.drop_interval[1])}"
    )
    yield "drop", f"{told(found.drop)}{unit}{relative} ({where}); {within} ({found.method})"
    if found.broken is not None:
        yield _items_row(found, where)
    for note in found.notes:
        yield "note", note


def latency_rows(timed: Latency, simple: str = SIMPLE) -> Iterator[Row]:
    """Yield a latency with its speed-up, and its throughput if that is known.

    Args:
        timed: The latency.
        simple: What the third model is, as for `verdict`.
    """
    median = f"median {timed.float_median_ms:.3f} -> {timed.int8_median_ms:.3f} ms"
    rate = ""
    if timed.float_rate is not None and timed.int8_rate is not None:
        rate = f"; {timed.float_rate:.0f} -> {timed.int8_rate:.0f} {'tokens' if timed.regime else 'items'}/s"
    least = f"{timed.float_ms:.3f} -> {timed.int8_ms:.3f} ms: {timed.speedup:.2f}x{_in_parentheses(timed.doubt)}"
    yield f"latency, {timed.name}", f"{least} ({median}{rate})"
    if timed.simple_ms is not None:
        yield "", f"{simple} {timed.simple_ms:.3f} ms: {timed.float_ms / timed.simple_ms:.2f}x"
    told = [text for text in (timed.shapes, timed.sample) if text]
    if told:
        yield "", f"timed on {' of '.join(told)}"


def size_row(float_bytes: int, int8_bytes: int) -> Row:
    """Return the sizes of both models."""
    return "size", f"{size_text(float_bytes)} -> {size_text(int8_bytes)}"
