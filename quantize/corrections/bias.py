"""Correct biases layer by layer: restore the mean of each output channel."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...calibration.model.session import Array
from ...transforms.int8.weights import Adjustment
from .layer_by_layer import Layer, channel_means

FEW = 2


def mean_error(expected: Iterable[Array], actual: Iterable[Array], axis: int) -> Array:
    """Return the mean error of each channel, shrunk by its uncertainty.

    Let m be the mean error over the samples and v the variance of this mean. The result is ``m max(0, 1 - v / m**2)``
    (after James and Stein, Estimation with quadratic loss, 1961; here per channel, with v instead of a known variance).

    Args:
        expected: The results of the float weights, one array per sample.
        actual: The results of the integer weights, in the same shapes.
        axis: The channel axis.

    Returns:
        float32 (C,).
    """
    errors = channel_means((e - a for e, a in zip(expected, actual, strict=True)), axis)
    mean = errors.mean(axis=0)
    if len(errors) < FEW:
        return np.asarray(mean, np.float32)
    variance = errors.var(axis=0, ddof=1) / len(errors)
    kept = np.maximum(0.0, 1.0 - np.divide(variance, mean**2, out=np.ones_like(mean), where=mean != 0))
    return np.asarray(mean * kept, np.float32)


def correct_bias(layer: Layer, integers: Array | None = None) -> tuple[Adjustment, list[Array]]:
    """Return the bias shift that compensates for rounded weights, and the layer's results with this shift.

    Float and integer weights compute the same inputs: those of the INT8 model (Nagel et al., Data-Free Quantization
    Through Weight Equalization and Bias Correction, 2019, appendix D). Errors of the inputs themselves are not
    corrected: a range that clips changes few values by much, and a shift of the mean would move all other values.

    Args:
        layer: The layer.
        integers: The weights as integers; None for the nearest ones.
    """
    actual = layer.run(integers)
    if not layer.has_bias:
        return Adjustment(stored=integers), actual
    shift = mean_error(layer.run_float(), actual, layer.channel_axis)
    shape = [1] * actual[0].ndim
    shape[layer.channel_axis] = -1
    for each in actual:
        each += shift.reshape(shape)
    return Adjustment(shift, integers), actual
