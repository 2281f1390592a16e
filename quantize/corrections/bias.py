"""Bias correction, unit by unit: what the mean of each output channel has lost is given back."""

from __future__ import annotations

import numpy as np

from ...calibration.session import Array
from ...transforms.int8_weights import Adjustment
from .layer_by_layer import Step, channel_means

FEW = 2


def mean_error(wanted: list[Array], given: list[Array], axis: int) -> Array:
    """Return what the channels of a result have lost of their means, as far as the samples prove it.

    A mean over few samples is itself uncertain: with m the mean over samples and v its variance it is shrunk to
    ``m (1 - v / m**2)``, and to nothing where that is negative (after James and Stein, Estimation with quadratic loss,
    1961; here per channel, with v in the place of the known variance).

    Args:
        wanted: What is to be, one array per sample.
        given: What is.
        axis: The channel axis.

    Returns:
        float32 (C,).
    """
    errors = channel_means([w - g for w, g in zip(wanted, given, strict=True)], axis)
    mean = errors.mean(axis=0)
    if len(errors) < FEW:
        return np.asarray(mean, np.float32)
    variance = errors.var(axis=0, ddof=1) / len(errors)
    kept = np.maximum(0.0, 1.0 - np.divide(variance, mean**2, out=np.ones_like(mean), where=mean != 0))
    return np.asarray(mean * kept, np.float32)


def correct_bias(step: Step, stored: Array | None = None) -> tuple[Adjustment, list[Array]]:
    """Return the shift of a unit's bias that makes up for its rounded weights, and what its node gives then.

    The means are of what the float and the integer weights make of the same input, that of the integer layers before
    (Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction, 2019, appendix D). What the
    activations before have lost is not made up for: where a range clips, that is an error of few values, and given back
    in the mean it would move all others.

    Args:
        step: The unit.
        stored: Its weights as integers; None for the nearest ones.
    """
    given = step.run(stored)
    if not step.has_bias:
        return Adjustment(stored=stored), given
    own = [step.product(x, step.weights.array, step.weights.bias) for x in step.rough]
    shift = mean_error(own, given, step.channel_axis)
    shape = [1] * given[0].ndim
    shape[step.channel_axis] = -1
    return Adjustment(shift, stored), [each + shift.reshape(shape) for each in given]
