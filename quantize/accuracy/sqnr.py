"""The signal and the noise of outputs as sums of squares, and their ratio in dB (SQNR)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import TypeAlias

import numpy as np

from ...calibration.model.session import Array
from .classes import Outputs, is_float

Powers: TypeAlias = tuple[float, float]
"""Sums of squares: of a signal, and of its noise."""

FAINT = 1 / 512
"""The least amplitude that the signal of an output of probabilities has: half a step of a grey value of 8 bits.

A grey image of 8 bits (sRGB, IEC 61966-2-1) has 255 steps between 0 and 1: shown as one, a mask that is fainter is
black, and uint8 with the range 0..1 rounds it to 0.
"""
SEEN = 0.1
"""A probability above this in either model is judged besides, with others of this kind alone. Programs that read
detections drop lower ones, or far higher ones: 0.25 is usual for boxes, 0.5 for speech, masks and wake words."""


def powers(exact: Array, other: Array) -> Powers:
    """Return the sums of squares of `exact` and of `exact - other`.

    Two NaN, or two equal infinities, do not differ. If the shapes differ, or if only one of two values is finite, the
    second sum is infinite or NaN.
    """
    if exact.shape == other.shape:
        wide = exact.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            difference = wide - other
            signal, noise = float(np.vdot(wide, wide)), float(np.vdot(difference, difference))
        if math.isfinite(signal) and math.isfinite(noise):  # the usual case; the code below is several times slower
            return signal, noise
    finite = exact[np.isfinite(exact)].astype(np.float64)
    signal = float(np.vdot(finite, finite))
    if exact.shape != other.shape:
        return signal, math.inf
    differs = (exact != other) & ~(np.isnan(exact) & np.isnan(other))
    difference = exact[differs].astype(np.float64) - other[differs]
    return signal, float(np.vdot(difference, difference))


def probability_powers(exact: Array, other: Array) -> tuple[Powers, Powers]:
    """Return the `powers` of probabilities, and those of the values above `SEEN` in either model.

    The amplitude of the signal counts as `FAINT` at least: no program sees an error of 0.0001 of values that are all
    0.0003. Many zeros cannot hide the loss of a rare detection: it counts in the second pair. Of arrays with different
    shapes the second pair is that of nothing.
    """
    signal, noise = powers(exact, other)
    whole = max(signal, exact.size * FAINT**2), noise
    if exact.shape != other.shape:
        return whole, (0.0, 0.0)
    seen = (exact > SEEN) | (other > SEEN)
    return whole, powers(exact[seen], other[seen])


def output_powers(
    reference: Outputs, candidate: Outputs, probabilities: Collection[str] = ()
) -> dict[str, tuple[Powers, ...]]:
    """Return the powers that judge each float output of the reference, by name; without any, outputs of numbers.

    An output has one pair, its `powers`; one of probabilities has the two of `probability_powers`. The SQNR of an
    output is the lowest of its pairs, each summed over samples. Where 1 of 200 indices is another one, the noise of
    indices is about 1 % of their power: 20 dB.

    Args:
        reference: The outputs of the float model.
        candidate: Those of the other model.
        probabilities: The outputs whose values are probabilities, see `probability_outputs`.
    """
    floats = [name for name, value in reference.items() if is_float(value)]
    others = (name for name, value in reference.items() if isinstance(value, np.ndarray) and value.dtype.kind in "biu")
    pairs = {name: (reference[name], candidate[name]) for name in floats or others}
    return {
        name: probability_powers(*both) if name in probabilities else (powers(*both),) for name, both in pairs.items()
    }


def worst_powers(pairs: Iterable[Powers]) -> Powers:
    """Return the pair of sums with the lowest SQNR."""
    return min(pairs, key=lambda pair: decibels(*pair))


def decibels(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)``; infinite without noise, minus infinite if the noise is NaN."""
    if noise == 0.0:
        return math.inf
    ratio = signal / noise  # 0 of a signal that is tiny beside the noise
    return 10.0 * math.log10(ratio) if ratio > 0.0 else -math.inf


def decibels_text(value: float) -> str:
    """Return an SQNR: ``45.5 dB``, or words for an infinite one."""
    if math.isfinite(value):
        return f"{value:.1f} dB"
    return "no difference" if value > 0 else "nothing in common"


def finite(value: float) -> float | None:
    """Return `value`; None if JSON has no number for it."""
    return value if math.isfinite(value) else None
