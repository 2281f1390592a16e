"""Scores of the next token, and what an INT8 model loses of their distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ...calibration.data.samples import Sample
from ...calibration.model.session import Array
from .classes import SEQUENCE, Outputs, are_probabilities, is_float

ROWS = 256
"""Rows of scores that are computed at a time, so that a large vocabulary needs little memory."""

PEAK, MOST_PEAK = 16.0, 0.25
"""The least mean of the greatest probabilities, as a multiple of that of even distributions; the most that is asked.

Hidden states of 256 values that a norm or a tanh ends, read as scores, have 10 and 2.3 times that of even ones.
"""


Pair: TypeAlias = tuple[str, str]
"""The name of an input of tokens, and of an output that may score them."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Sums over the predictions of a language model.

    Attributes:
        output: The output that holds the scores; empty without one.
        nats: The sum of the Kullback-Leibler divergences of the INT8 model's distributions from the float model's.
        predictions: The number of predictions.
        scored: The inputs of tokens that this output scores, in at least one sample.
        refused: The inputs and outputs of which a sample has a token without a score. The classes of a tagger of
            characters are more than the tokens of some words, and fewer than those of others.
    """

    output: str = ""
    nats: float = 0.0
    predictions: int = 0
    scored: frozenset[str] = frozenset()
    refused: frozenset[Pair] = frozenset()

    def with_sample(self, reference: Outputs, candidate: Outputs, sample: Sample) -> Divergence:
        """Return the sums with one more sample added; they stay as they are if it has no scores of tokens.

        Scores of tokens have the axes of an integer input of tokens (N, T), and a last axis (N, T, V) that is longer
        than every token. Their distributions have peaks: the hidden states of an encoder of few symbols may have these
        axes too.
        """
        pairs = _pairs(reference, sample)
        refused = self.refused | {pair for pair, fits in pairs.items() if not fits}
        found = _scored(reference, [pair for pair in pairs if pair not in refused])
        if found is None or self.output not in ("", found[1]):
            return replace(self, refused=refused)
        tokens, name = found
        exact, other = reference[name], candidate[name]
        nats = math.inf if exact.shape != other.shape else divergence(exact, other)
        count = math.prod(exact.shape[:-1])
        return Divergence(name, self.nats + nats, self.predictions + count, self.scored | {tokens}, refused)

    @property
    def mean(self) -> float | None:
        """The mean divergence in nats; None without predictions, or if samples have tokens without a score.

        On text that the float model would write itself, the perplexity grows by the factor ``exp(mean)``.
        """
        known = any((tokens, self.output) not in self.refused for tokens in self.scored)
        return self.nats / self.predictions if known and self.predictions else None


def _pairs(outputs: Outputs, sample: Sample) -> dict[Pair, bool]:
    """Return whether the last axis of each output (N, T, V) is longer than every token of each input (N, T)."""
    scores = {name: value for name, value in outputs.items() if is_float(value) and value.ndim == SEQUENCE}
    return {
        (given, name): bool(value.shape[-1] > tokens.max())
        for given, tokens in sample.feed.items()
        if _are_tokens(tokens)
        for name, value in scores.items()
        if value.shape[:-1] == tokens.shape
    }


def _scored(outputs: Outputs, pairs: Sequence[Pair]) -> Pair | None:
    """Return the first of the pairs whose output has distributions with peaks; None if there is none."""
    return next((pair for pair in pairs if _have_peaks(outputs[pair[1]])), None)


def _have_peaks(scores: Array) -> bool:
    """Return whether the distributions of scores (N, T, V) are far from even ones."""
    rows = scores.reshape(-1, scores.shape[-1])[:ROWS]
    greatest = np.exp(_logarithms(rows.astype(np.float64), not are_probabilities(rows)).max(axis=1))
    return bool(greatest.mean() >= min(PEAK / rows.shape[1], MOST_PEAK))


def _are_tokens(array: Array) -> bool:
    """Whether an input can hold tokens (N, T); zeros and ones are a mask."""
    if array.ndim != SEQUENCE - 1 or array.dtype.kind not in "iu" or not array.size:
        return False
    return bool(array.min() >= 0 and array.max() > 1)


def divergence(exact: Array, other: Array) -> float:
    """Return the sum of ``sum(p log(p / q))`` over rows of scores (N, T, V), in nats; infinite if it is not finite.

    Scores that are no probabilities are logits. A probability q of 0 is one that its dtype cannot hold: where p is
    larger, q counts as the least normal value of the dtype at least, 6e-5 in float16.
    """
    rows, others = (each.reshape(-1, each.shape[-1]) for each in (exact, other))
    logits = not are_probabilities(rows)
    least = -math.inf if logits else math.log(np.finfo(other.dtype).smallest_normal)
    total = 0.0
    for start in range(0, len(rows), ROWS):
        logs = [_logarithms(each[start : start + ROWS].astype(np.float64), logits) for each in (rows, others)]
        with np.errstate(invalid="ignore", over="ignore"):
            held = np.maximum(logs[1], np.minimum(logs[0], least))
            weighted = np.exp(logs[0]) * (logs[0] - held)
        total += float(np.where(np.isneginf(logs[0]), 0.0, weighted).sum())
    return max(total, 0.0) if math.isfinite(total) else math.inf  # rounding can make it a little less than 0


def _logarithms(rows: Array, logits: bool) -> Array:
    """Return the logarithms of probabilities, of rows that hold logits or probabilities."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if not logits:
            return np.asarray(np.log(rows))
        shifted = rows - rows.max(axis=1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
