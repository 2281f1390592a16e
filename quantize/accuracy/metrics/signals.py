"""Signals against their targets: the scale-invariant signal-to-distortion ratio, and the mean squared error."""

from __future__ import annotations

import math

import numpy as np

from .... import RequantError
from ....calibration.data.samples import Sample
from ....calibration.model.session import Array
from ..classes import Outputs, is_float
from .items import EXACT, Items, equal_items, fits, items_of_entries, no_fitting_output, numbers

CLEAN = -20 * math.log10(EXACT)
"""The ratio of a signal that equals its target, in dB: the distortion is half a unit of float32 everywhere."""


def first_float(outputs: Outputs, sample: Sample) -> Outputs:
    """Return the first float output of the float model, the target where there are no labels.

    Raises:
        RequantError: There is none.
    """
    for name, value in outputs.items():
        if is_float(value) and value.ndim > 0 and value.size:
            return {name: value}
    raise RequantError(f"{sample.where}: the model has no float output to compare")


def _pair(outputs: Outputs, sample: Sample, reference: Outputs) -> tuple[Array, Array]:
    """Return an output and its target, float64, in the shape of the output; with a reference an entry is one signal.

    Raises:
        RequantError: No output fits the target.
    """
    if reference:
        ((name, target),) = reference.items()
        found = outputs.get(name)
        if found is None or found.shape != target.shape:
            raise RequantError(f"{sample.where}: output {name!r} has another shape than the float model's")
        found, target = (value.reshape(len(value), -1) for value in (found, target))
    else:
        target = np.asarray(sample.label)
        found = next((value for value in numbers(outputs) if fits(target.shape, value.shape)), None)
        if found is None:
            raise no_fitting_output(sample, outputs, "target")
    return found.astype(np.float64), target.reshape(found.shape).astype(np.float64)


def distortions(outputs: Outputs, sample: Sample, reference: Outputs) -> Items:
    """Return the scale-invariant signal-to-distortion ratio of each signal, in dB. The last long axis is the time.

    ``10 log10(|a s|^2 / |a s - e|^2)`` with ``a = e s / |s|^2`` for the estimate e of the target s: Le Roux, Wisdom,
    Erdogan and Hershey, "SDR - half-baked or well done?", ICASSP 2019, equation 3. The ratio is kept within +-144.5 dB,
    half a unit of float32. A signal with NaN has minus infinity. A silent target does not count.

    Raises:
        RequantError: No output fits the target.
    """
    found, target = _pair(outputs, sample, reference)
    entries = len(found)
    length = next((n for n in reversed(found.shape[1:]) if n != 1), 1)
    found, target = (value.reshape(-1, length) for value in (found, target))
    with np.errstate(over="ignore"):
        power = np.square(target).sum(axis=1)
    heard = power > 0
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scaled = ((found * target).sum(axis=1) / power)[:, None] * target
        shares = [np.square(value).sum(axis=1) for value in (scaled, scaled - found)]
        ratio = 10 * np.log10(shares[0] / shares[1])
    ratio = np.where(shares[1] == 0, np.where(shares[0] > 0, CLEAN, -CLEAN), np.clip(ratio, -CLEAN, CLEAN))
    items = equal_items(np.where(np.isfinite(found).all(axis=1), ratio, -np.inf), entries)
    return Items(items.parts[heard], items.rows[heard])


def squared_errors(outputs: Outputs, sample: Sample, reference: Outputs) -> Items:
    """Return, for each entry, the sum of squared differences from the target, and the number of values.

    Raises:
        RequantError: No output fits the target.
    """
    found, target = (value.reshape(len(value), -1) for value in _pair(outputs, sample, reference))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.square(found - target).sum(axis=1)
    error = np.where(np.isnan(error), np.inf, error)
    return items_of_entries(np.stack([error, np.full(len(error), float(found.shape[1]))], axis=1), len(error))
