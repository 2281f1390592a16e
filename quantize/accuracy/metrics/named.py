"""The table of metrics by name, and metrics made of a user's function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .... import RequantError, UnknownNameError
from ....calibration.objects import failing_at, named, on_path
from ....calibration.samples import Sample
from ..classes import Array, Outputs
from ..outputs import decibels
from . import items
from .items import Items


@dataclass(frozen=True, slots=True)
class Own:
    """A user's function.

    Attributes:
        call: The function.
        takes_model: Whether it takes the path of a model; else it takes the outputs and the labels of all samples.
        folder: The folder that must be on ``sys.path`` while it runs.
    """

    call: Callable[..., Any]
    takes_model: bool
    folder: str | None = None


def _all_of_it(outputs: Outputs, where: str) -> Outputs:
    """Return the outputs."""
    return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that says how good a model is on data.

    Attributes:
        name: The name.
        about: A description, in one line.
        higher_is_better: Whether a higher number is better.
        unit: ``share`` of 1, ``dB``, or nothing.
        labels: Whether the data must have labels: ``needed``, ``used`` if there are any, or ``none``.
        reference: Whether outputs are compared with the float model's.
        mean: Whether the metric is the mean of one number per item.
        items: Returns the contributions of a sample's items, from the outputs, the sample, and the reference's outputs.
        value: Returns the metric from contributions: from their sum over items, (..., c) to (...); or, if `sums` is
            False, from all of them, (k, c).
        sums: Whether `value` takes the sum.
        keep: Returns the part of the reference's outputs that `items` needs, for a sample called `where`.
        own: The user's function, which replaces `items`.
    """

    name: str
    about: str = ""
    higher_is_better: bool = True
    unit: str = ""
    labels: str = "needed"
    reference: bool = False
    mean: bool = False
    items: Callable[[Outputs, Sample, Outputs], Items] | None = None
    value: Callable[[Array], Any]
    sums: bool = True
    keep: Callable[[Outputs, str], Outputs] = _all_of_it
    own: Own | None = None

    def of(self, parts: Array) -> float:
        """Return the metric of contributions (k, c)."""
        return float(self.value(parts.sum(axis=0) if self.sums else parts))

    def worse(self, before: float, after: float) -> float:
        """Return the loss from `before` to `after`; negative if `after` is better."""
        if before == after:  # both may be infinite
            return 0.0
        return before - after if self.higher_is_better else after - before

    def needs_labels(self) -> bool:
        """Whether data without labels are refused."""
        return self.labels == "needed"


def _mean(sums: Array) -> Array:
    """Return means from sums of values and of weights."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums[..., 0] / sums[..., 1])


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


METRICS: Mapping[str, Metric] = {
    row.name: row
    for row in (
        Metric(
            name="top1",
            about="share of items whose class scores highest",
            unit="share",
            mean=True,
            items=partial(items.top, k=1),
            value=_mean,
        ),
        Metric(
            name="top5",
            about="share of items whose class is among the five that score highest",
            unit="share",
            mean=True,
            items=partial(items.top, k=5),
            value=_mean,
        ),
        Metric(
            name="agreement",
            about="share of items with the float model's top-1 class",
            unit="share",
            labels="none",
            reference=True,
            mean=True,
            items=items.agreement,
            value=_mean,
            keep=items.top_classes,
        ),
        Metric(
            name="sqnr",
            about="signal to quantization noise of the worst output, all samples together",
            unit="dB",
            labels="none",
            reference=True,
            items=items.noise,
            value=_worst_decibels,
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
    )
}
"""The metrics of requant, by name."""


def metric_named(text: str, *, lower: bool = False) -> Metric:
    """Return a metric of `METRICS`, or a metric made of a function.

    The function takes the path of a model; or it takes the outputs, a list with a dict of arrays per sample, and the
    list of labels, None for samples without one. It returns a number, or an array with the score of each item; the
    metric is their mean. If the function has an attribute ``higher_is_better`` that is False, a lower number is better.

    Args:
        text: A key of `METRICS`, ``FILE.py:NAME`` or ``PACKAGE.MODULE:NAME``.
        lower: Whether a lower number is better; overrides the attribute of the function.

    Raises:
        RequantError: There is no such metric or function, or the function takes other arguments.
    """
    if text in METRICS:
        if lower and METRICS[text].higher_is_better:
            raise RequantError(f"metric {text!r}: higher is better; lower is only for your own functions")
        return METRICS[text]
    found = named(text)
    if found is None:
        raise UnknownNameError("metric", text, (*METRICS, "FILE.py:NAME"))
    if not callable(found.value):
        raise RequantError(f"metric {found.name}: a {type(found.value).__name__} is not a function")
    own = Own(found.value, _takes_model(found.value, found.name), found.folder)
    higher = not lower and bool(getattr(found.value, "higher_is_better", True))
    return Metric(name=text, higher_is_better=higher, labels="used", mean=True, value=_mean, own=own)


def _takes_model(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a model; else it takes outputs and labels."""
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
        raise RequantError(f"metric {name}: takes ({taken}); a metric takes a model's path, or (outputs, labels)")
    return count == 1


def own_value(metric: Metric, *arguments: object) -> tuple[float, Array | None]:
    """Call a user's function; return the metric and the contributions (k, 2), or None if it returned one number.

    Raises:
        RequantError: The function fails, or returns neither a number nor an array of numbers.
    """
    assert metric.own is not None
    place = f"metric {metric.name}"
    with failing_at(place), on_path(metric.own.folder):
        returned = metric.own.call(*arguments)
    wanted = f"{place}: returned a {type(returned).__name__}, but must return a number or an array of numbers"
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


def ideal(metric: Metric) -> float | None:
    """Return the float model's score in a metric that compares with the float model; None for other metrics."""
    return (math.inf if metric.unit == "dB" else 1.0) if metric.reference else None


__all__ = ["METRICS", "Metric", "Own", "area", "ideal", "metric_named", "mid_ranks", "own_value"]
