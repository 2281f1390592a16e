"""The noise power that rounding an activation and the weights that read it adds to the results, in closed form.

A product is ``y_m = sum_c W_mc x_c``: the activation x is uint8 with step D, the weights W are int8 with the step D_m
per output channel. If the rounding errors are uniform and independent, the noise power is

    sum_m [ D^2 / 12 sum_c W_mc^2  +  D_m^2 / 12 sum_c E[x_c^2] ].

With ``x' = x / s`` and ``W' = W s`` it is, in units of y,

    sum_m [ D(s)^2 / 12 sum_c s_c^2 W_mc^2  +  D_m(s)^2 / 12 sum_c E[x_c^2] / s_c^2 ].

D(s) is the step of the range of all ``x'``, and D_m(s) = max_c |W_mc| s_c / 127. A channel narrower than a step, and a
weight below half a step, are rounded to zero, so no error has more power than the rounded value. Nothing is clipped,
because the range includes the extremes. If the product has a bias, the bias correction removes mean errors, and the
variance of x_c replaces E[x_c^2].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...transforms.graphs.queries import constant, release
from ...transforms.int8.ops import OPS
from ...transforms.patterns.channel_scales import Fold

Floats = npt.NDArray[np.float64]
STEPS_U8, STEPS_S8 = 255, 127
ROWS = 256
"""At most this many output channels of a product are used, picked evenly."""


@dataclass(frozen=True, slots=True)
class Channels:
    """Statistics of each channel of a tensor, all of shape (C,).

    Attributes:
        lo: The least value.
        hi: The greatest value.
        mean: The mean.
        power: The mean of the squares.
    """

    lo: Floats
    hi: Floats
    mean: Floats
    power: Floats

    @property
    def reach(self) -> Floats:
        """The greatest magnitude."""
        return np.maximum(np.abs(self.lo), np.abs(self.hi))

    def rounded(self, scale: Floats) -> Floats:
        """Return the error power of each channel, in units of x, if ``x / scale`` becomes uint8, (C,)."""
        low, high = min(0.0, float((self.lo / scale).min())), max(0.0, float((self.hi / scale).max()))
        return np.minimum(((high - low) / STEPS_U8 * scale) ** 2 / 12, self.power)


@dataclass(frozen=True, slots=True)
class Reader:
    """The properties of a product's weights that its noise depends on.

    Attributes:
        tensor: The activation that the product reads.
        peaks: The greatest magnitude for each output and input channel, (M, C/groups).
        squares: The sum of squares for each output and input channel, (M, C/groups).
        taps: The number of weights per pair of channels.
        groups: The groups of a convolution.
        single: Whether all weights share one step.
        centred: Whether the product has a bias, so that the bias correction removes the mean error.
        importance: The weight of the noise in each output channel, (M,).
        reach: The greatest magnitude of a weight for each input channel, (C,).
    """

    tensor: str
    peaks: Floats
    squares: Floats
    taps: int
    groups: int
    single: bool
    centred: bool
    importance: Floats
    reach: Floats

    @property
    def columns(self) -> Floats:
        """The weight of the noise in each input channel, (C,)."""
        weighted = (self.importance[:, None] * self.squares).reshape(self.groups, -1, self.squares.shape[1])
        return np.asarray(weighted.sum(axis=1).reshape(-1))

    def noise(self, channels: Channels, scale: Floats) -> float:
        """Return the noise of the result if the input is divided by `scale` and the weights are multiplied by it."""
        activation = float(channels.rounded(scale) @ self.columns)
        power = np.maximum(channels.power - channels.mean**2, 0.0) if self.centred else channels.power
        rows = len(self.peaks) // self.groups
        scales, powers = (np.repeat(each.reshape(self.groups, -1), rows, axis=0) for each in (scale, power))
        steps = (self.peaks * scales).max(axis=1, keepdims=True) / STEPS_S8
        steps = np.full_like(steps, steps.max()) if self.single else steps
        errors = np.minimum(self.taps * (steps / scales) ** 2 / 12, self.squares)
        return activation + float(self.importance @ (errors * powers).sum(axis=1))


def reader_of(fold: Fold, importance: Floats | None = None) -> Reader | None:
    """Return the properties of a product's weights; None if the node is no product of constant weights.

    Args:
        fold: Weights that read a tensor.
        importance: The weight of the noise in each output channel, (M,); 1 without.
    """
    node = fold.node
    tensor = constant(node.inputs[fold.index])
    if tensor is None or node.op_type not in ("Conv", "Gemm", "MatMul"):
        return None
    array = np.asarray(tensor.numpy(), np.float64)
    release(tensor)
    if node.op_type == "MatMul" or (node.op_type == "Gemm" and not node.attributes.get_int("transB", 0)):
        array = np.swapaxes(array, -1, -2)
    single, rank = array.ndim > 2 and node.op_type == "MatMul", array.ndim
    parts = array.reshape(-1, array.shape[-1], 1) if single or rank == 2 else array.reshape(*array.shape[:2], -1)
    peaks = np.abs(parts).max(axis=2)
    weighed = np.ones(len(parts)) if importance is None or single else importance
    reach = peaks.reshape(fold.groups, -1, peaks.shape[1]).max(axis=1).reshape(-1)
    if fold.groups == 1 and len(parts) > ROWS:
        picked = np.linspace(0, len(parts) - 1, ROWS).astype(int)
        parts, peaks, weighed = parts[picked], peaks[picked], weighed[picked] * (len(parts) / ROWS)
    return Reader(
        tensor=fold.tensor,
        peaks=peaks,
        squares=np.square(parts).sum(axis=2),
        taps=parts.shape[2],
        groups=fold.groups,
        single=single,
        centred=OPS[node.op_type].bias is not None,
        importance=weighed,
        reach=reach,
    )


def total(readers: Sequence[Reader], channels: Mapping[str, Channels], summed: Sequence[str], scale: Floats) -> float:
    """Return the noise that the rounding of a group adds to the results of its readers.

    Args:
        readers: The products in integers that read the group.
        channels: Statistics of each tensor that these products or sums read.
        summed: The tensors that sums in integers read, once per sum.
        scale: The divisor of each channel, (C,).
    """
    noise = sum(reader.noise(channels[reader.tensor], scale) for reader in readers)
    columns = sum(reader.columns for reader in readers)
    return float(noise + sum(float(channels[name].rounded(scale) @ columns) for name in summed))
