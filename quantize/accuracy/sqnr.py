"""The signal and the noise of outputs as sums of squares, and their ratio in dB (SQNR)."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from .classes import Array, Outputs, is_float

Powers: TypeAlias = tuple[float, float]
"""Sums of squares: of a signal, and of its noise."""


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


def output_powers(reference: Outputs, candidate: Outputs) -> dict[str, Powers]:
    """Return the `powers` of each float output of the reference, by name; without any, of outputs of numbers.

    Where 1 of 200 indices is another one, the noise of indices is about 1 % of their power: 20 dB.
    """
    floats = [name for name, value in reference.items() if is_float(value)]
    others = (name for name, value in reference.items() if isinstance(value, np.ndarray) and value.dtype.kind in "biu")
    return {name: powers(reference[name], candidate[name]) for name in floats or others}


def decibels(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)``; infinite without noise, minus infinite if the noise is NaN."""
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 and math.isfinite(noise) else -math.inf


def decibels_text(value: float) -> str:
    """Return an SQNR: ``45.5 dB``, or words for an infinite one."""
    if math.isfinite(value):
        return f"{value:.1f} dB"
    return "no difference" if value > 0 else "nothing in common"


def finite(value: float) -> float | None:
    """Return `value`; None if JSON has no number for it."""
    return value if math.isfinite(value) else None
