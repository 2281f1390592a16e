"""The table of metrics by name, and metrics made of a user's function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .... import RequantError, UnknownNameError
from ....calibration.data.objects import Named, failing_at, named, on_path
from ....calibration.model.session import Array
from ....system.given import check_kind, kind_of
from ..sqnr import decibels
from . import decisions, detection, items, sequences, signals, vectors
from .metric import Decoder, Metric, Own


def _mean(sums: Array) -> Array:
    """Return means from sums of values and of weights."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums[..., 0] / sums[..., 1])


def _error_rate(sums: Array) -> Array:
    """Return errors per token of the labels, from sums of both; labels without tokens count as one token."""
    return np.asarray(sums[..., 0] / np.maximum(sums[..., 1], 1))


def _perplexity(sums: Array) -> Array:
    """Return ``exp(nats / tokens)``."""
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(_mean(sums)))


def _mean_overlap(sums: Array) -> Array:
    """Return the mean of intersection over union, over the classes that occur."""
    common, either = sums[..., 0::2], sums[..., 1::2]
    shares = common / np.maximum(either, 1)
    with np.errstate(invalid="ignore"):
        return np.asarray(shares.sum(axis=-1) / (either > 0).sum(axis=-1))


def _worst_decibels(sums: Array) -> Array:
    """Return the lowest SQNR of an output, in dB, from sums of signal and noise by turns."""
    values = np.frompyfunc(decibels, 2, 1)(sums[..., 0::2], sums[..., 1::2])
    return np.asarray(np.min(np.asarray(values, np.float64), axis=-1))


def mid_ranks(values: Array) -> Array:
    """Return the rank of each value, counted from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse])


def area(parts: Array) -> float:
    """Return the area under the ROC curve of scores and labels (k, 2). Equal scores count as half.

    By ranks (Mann and Whitney 1947): ``(sum of ranks of ones - m (m + 1) / 2) / (m n)`` for m ones and n zeros.

    Raises:
        RequantError: There are no ones, or no zeros.
    """
    ones = parts[:, 1] == 1
    m, n = int(ones.sum()), int((~ones).sum())
    if m == 0 or n == 0:
        raise RequantError(f"auroc needs labels 0 and 1; all {m + n} are {0 if m == 0 else 1}")
    return float((mid_ranks(parts[:, 0])[ones].sum() - m * (m + 1) / 2) / (m * n))


def _all_right(parts: Array) -> Array:
    """Return the contributions where every item has the score 1."""
    return np.repeat(parts[:, 1:2], 2, axis=1)


def _filling(column: slice, value: float = 0.0) -> Callable[[Array], Array]:
    """Return a function that gives some columns of contributions a value."""
    return partial(_filled, column=column, value=value)


def _filled(parts: Array, *, column: slice, value: float) -> Array:
    """Return contributions with one value in some columns."""
    filled = parts.copy()
    filled[:, column] = value
    return filled


def _against_labels_or_float(metric: Metric, **changes: Any) -> Metric:
    """Return a metric that compares with the float model's outputs where there are no labels."""
    return replace(metric, labels="used", unlabelled=replace(metric, labels="none", **changes))


def _map(name: str, about: str, at: slice) -> Metric:
    """Return a metric of boxes."""
    metric = Metric(
        name=name,
        about=f"{about}; without labels, of the float model's boxes",
        unit="share",
        items=detection.matches,
        value=partial(detection.mean_precision, at=at),
        sums=False,
        uneven=True,
    )
    return _against_labels_or_float(metric, keep=detection.sure_boxes, perfect=detection.all_found)


def _rate(name: str, about: str, words: bool) -> Metric:
    """Return an error rate of transcripts."""
    metric = Metric(
        name=name,
        about=f"{about}; without labels, of the float model's transcripts",
        higher_is_better=False,
        unit="share",
        items=partial(sequences.errors, words=words),
        value=_error_rate,
    )
    return _against_labels_or_float(
        metric, keep=partial(sequences.float_transcripts, words=words), perfect=_filling(np.s_[:1])
    )


def _recall(k: int) -> Metric:
    """Return the metric of the `k` nearest vectors."""
    return Metric(
        name=f"recall@{k}",
        about=f"share of vectors that have one of their group among the {k} nearest",
        unit="share",
        mean=True,
        items=vectors.retrieval_rows,
        value=_mean,
        settle=partial(vectors.recall_hits, k=k),
    )


METRICS: Mapping[str, Metric] = {
    row.name: row
    for row in (
        Metric(
            name="top1",
            about="share of items whose class scores highest",
            unit="share",
            mean=True,
            items=partial(items.top, k=1),
            heads=True,
            value=_mean,
        ),
        Metric(
            name="top5",
            about="share of items whose class is among the five that score highest",
            unit="share",
            mean=True,
            items=partial(items.top, k=5),
            heads=True,
            value=_mean,
        ),
        Metric(
            name="agreement",
            about="share of items with the float model's top-1 class",
            unit="share",
            labels="none",
            mean=True,
            items=items.agreement,
            value=_mean,
            keep=items.top_classes,
            perfect=_all_right,
        ),
        Metric(
            name="sqnr",
            about="signal to quantization noise of the worst output, all samples together",
            unit="dB",
            labels="none",
            items=items.noise,
            value=_worst_decibels,
            perfect=_filling(np.s_[1::2]),
        ),
        Metric(
            name="psnr",
            about="mean peak signal to noise ratio of images against their targets",
            unit="dB",
            mean=True,
            items=items.image_noise,
            value=_mean,
        ),
        Metric(
            name="perplexity",
            about="exp of the mean negative log-likelihood of tokens",
            higher_is_better=False,
            labels="used",
            items=items.losses,
            value=_perplexity,
        ),
        Metric(
            name="miou",
            about="mean over classes of intersection over union, of all pixels together",
            unit="share",
            items=items.overlaps,
            heads=True,
            value=_mean_overlap,
        ),
        Metric(
            name="auroc",
            about="area under the ROC curve of scores against labels 0 and 1",
            unit="share",
            items=items.ranked,
            value=area,
            sums=False,
        ),
        Metric(
            name="f1",
            about="mean over classes of F1; of two classes, F1 of class 1",
            unit="share",
            items=decisions.confusions,
            heads=True,
            value=decisions.mean_f1,
        ),
        Metric(
            name="cosine",
            about="mean cosine between the vectors and the float model's",
            labels="none",
            mean=True,
            items=vectors.cosines,
            value=_mean,
            keep=vectors.vectors,
            perfect=_all_right,
        ),
        *map(_recall, (1, 5, 10)),
        _map("map", "mean average precision of boxes, at overlaps of 0.50 to 0.95", np.s_[:]),
        _map("map50", "mean average precision of boxes, at an overlap of 0.50", np.s_[:1]),
        _map("map75", "mean average precision of boxes, at an overlap of 0.75", np.s_[5:6]),
        _rate("wer", "word error rate of transcripts", words=True),
        _rate("cer", "character error rate of transcripts", words=False),
        _against_labels_or_float(
            Metric(
                name="sisdr",
                about="mean scale-invariant signal-to-distortion ratio; without labels, to the float model's output",
                unit="dB",
                mean=True,
                items=signals.distortions,
                value=_mean,
            ),
            keep=signals.first_float,
            perfect=_filling(np.s_[:1], np.inf),
        ),
        _against_labels_or_float(
            Metric(
                name="mse",
                about="mean squared error; without labels, from the float model's output",
                higher_is_better=False,
                items=signals.squared_errors,
                value=_mean,
            ),
            keep=signals.first_float,
            perfect=_filling(np.s_[:1]),
        ),
    )
}
"""The metrics of requant, by name. `metric_named` also has ``recall@K`` for other K."""


def metric_named(text: str, *, lower: bool = False) -> Metric:
    """Return a metric of `METRICS`, one with the user's function for the outputs, or one made of a function.

    ``METRIC:FILE.py:NAME`` is a metric of `METRICS` that reads what a function returns for the outputs of each sample:
    a dict of arrays, or one array. The function takes a dict of outputs, or the outputs and a dict of inputs.

    ``FILE.py:NAME`` takes the path of a model; or it takes the outputs, a list with a dict of arrays per sample, and
    the list of labels, None for samples without one. It returns a number, or an array with the score of each item; the
    metric is their mean. If the function has an attribute ``higher_is_better`` that is False, a lower number is better.

    Args:
        text: A key of `METRICS`, ``recall@K``; one of these with ``:FILE.py:NAME`` or ``:PACKAGE.MODULE:NAME``; or
            ``FILE.py:NAME`` or ``PACKAGE.MODULE:NAME`` alone.
        lower: Whether a lower number is better; overrides the attribute of the function.

    Raises:
        RequantError: There is no such metric or function, or the function takes other arguments.
    """
    check_kind(text, str, "a metric must be a name or FILE.py:NAME")
    base, _, rest = text.partition(":")
    built_in = _built_in(base)
    if built_in is not None and (not rest or ":" in rest):
        if lower and built_in.higher_is_better:
            raise RequantError(f"metric {text!r}: higher is better; lower is only for your own functions")
        return built_in if not rest else built_in.decoded_by(_decoder(text, rest), text)
    found = named(text)
    if found is None:
        raise UnknownNameError("metric", text, (*METRICS, "FILE.py:NAME"))
    with failing_at(f"metric {text}"):
        _check_function(found)
        own = Own(found.value, _takes_model(found.value, found.name), found.folder)
        higher = not lower and bool(getattr(found.value, "higher_is_better", True))
    return Metric(name=text, higher_is_better=higher, labels="used", mean=True, value=_mean, own=own)


def of_probabilities(metric: Metric, outputs: frozenset[str]) -> Metric:
    """Return `sqnr` for a model whose outputs in `outputs` are probabilities, see `output_powers`; else the metric.

    The user's function for outputs may return anything: of its results none is known to be a probability.
    """
    if metric.items is not items.noise or metric.decode is not None or not outputs:
        return metric
    return replace(metric, items=partial(items.noise, probabilities=outputs), probabilities=outputs)


def _built_in(name: str) -> Metric | None:
    """Return the metric of a name: a row of `METRICS`, or ``recall@K``; None for other names."""
    if match := re.fullmatch(r"recall@([1-9][0-9]{0,5})", name):
        return METRICS.get(name) or _recall(int(match[1]))
    return METRICS.get(name)


def _check_function(found: Named) -> None:
    """Raise RequantError if what the user names is not a function."""
    if not callable(found.value):
        raise RequantError(f"metric {found.name}: {kind_of(found.value)} is not a function")


def _decoder(text: str, name: str) -> Decoder:
    """Return the user's function for outputs.

    Raises:
        RequantError: There is no such function, or it takes other arguments.
    """
    found = named(name)
    if found is None:
        raise RequantError(f"metric {text!r}: a function is named by FILE.py:NAME or PACKAGE.MODULE:NAME")
    with failing_at(f"metric {text}"):
        _check_function(found)
        count = _argument_count(found.value, found.name, "a function for outputs takes (outputs) or (outputs, inputs)")
    return Decoder(found.value, found.name, count == 2, found.folder)


def _takes_model(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a model; else it takes outputs and labels."""
    return _argument_count(function, name, "a metric takes a model's path, or (outputs, labels)") == 1


def _argument_count(function: Callable[..., Any], name: str, wanted: str) -> int:
    """Return the number of a function's arguments: 1 or 2.

    Raises:
        RequantError: It takes others; the message ends with `wanted`.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RequantError(f"metric {name}: its parameters are unknown: {error}") from error
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    named_only = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    count = len(needed) if needed else min(len(places), 1)
    if count not in (1, 2) or named_only:
        taken = ", ".join(p.name for p in (*needed, *named_only)) or "nothing"
        raise RequantError(f"metric {name}: takes ({taken}); {wanted}")
    return count


def own_value(metric: Metric, *arguments: object) -> tuple[float, Array | None]:
    """Call a user's function; return the metric and the contributions (k, 2), or None if it returned one number.

    Raises:
        RequantError: The function fails, or returns neither a number nor an array of numbers.
    """
    assert metric.own is not None
    place = f"metric {metric.name}"
    with failing_at(place), on_path(metric.own.folder):
        returned = metric.own.call(*arguments)
    wanted = f"{place}: returned {kind_of(returned)}, but must return a number or an array of numbers"
    if returned is None:
        raise RequantError(wanted)
    with failing_at(wanted):
        found = np.asarray(returned, np.float64)
    if found.ndim > 1 or found.size == 0 or np.isnan(found).any():
        what = "NaN" if found.size and np.isnan(found).any() else f"an array of shape {found.shape}"
        raise RequantError(f"{place}: returned {what}, but must return a number or the score of each item")
    if found.ndim == 0:
        return float(found), None
    parts = np.stack([found, np.ones_like(found)], axis=1)
    return metric.of(parts), parts


__all__ = ["METRICS", "Metric", "Own", "area", "metric_named", "mid_ranks", "own_value"]
