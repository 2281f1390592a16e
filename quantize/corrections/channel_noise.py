"""What rounding the channels of an activation, and the weights that read them, adds to the results: in closed form.

A product ``y_m = sum_c W_mc x_c`` of an activation in uint8 with step D and weights in int8 with steps D_m per output
channel has, with rounding errors that are uniform and independent of each other, noise of the power

    sum_m [ D^2 / 12 sum_c W_mc^2  +  D_m^2 / 12 sum_c E[x_c^2] ].

With ``x' = (x - shift) / s`` and ``W' = W s`` it is, in units of y,

    sum_m [ D(s)^2 / 12 sum_c s_c^2 W_mc^2  +  D_m(s)^2 / 12 sum_c E[(x_c - shift_c)^2] / s_c^2 ],

D(s) the step of the range of all ``x'``, D_m(s) = max_c |W_mc| s_c / 127. A channel narrower than a step is rounded to
zero, a weight below half a step too: neither error has more power than what it is the error of. What is larger is
clipped by nothing: the range is that of the extremes. A mean error of the weights is taken back by the bias
correction, where there is a bias, so that the variance stands for E[x_c^2] there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...transforms.channel_scales import Fold
from ...transforms.graph import constant, release
from ...transforms.ops import OPS

Floats = npt.NDArray[np.float64]
STEPS_U8, STEPS_S8 = 255, 127
ROWS = 256
"""Output channels of a product that are looked at, picked evenly: the others say the same of the input channels."""


@dataclass(frozen=True, slots=True)
class Channels:
    """What is known of the values of each channel of a tensor; all of shape (C,).

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

    def shifted(self, shift: Floats) -> Channels:
        """Return what is known of ``x - shift``."""
        power = np.maximum(self.power - 2 * shift * self.mean + shift**2, 0.0)
        return Channels(self.lo - shift, self.hi - shift, self.mean - shift, power)

    @property
    def reach(self) -> Floats:
        """The greatest magnitude."""
        return np.maximum(np.abs(self.lo), np.abs(self.hi))

    def rounded(self, scale: Floats) -> Floats:
        """Return the power of the error of each channel, in units of x, when ``x / scale`` becomes uint8."""
        low, high = min(0.0, float((self.lo / scale).min())), max(0.0, float((self.hi / scale).max()))
        return np.minimum(((high - low) / STEPS_U8 * scale) ** 2 / 12, self.power)


@dataclass(frozen=True, slots=True)
class Reader:
    """The weights of a product as far as its noise depends on them.

    Attributes:
        tensor: The activation that it reads.
        peaks: The greatest magnitude for each output and input channel, (M, C/groups).
        squares: The sum of squares for each output and input channel, (M, C/groups).
        taps: How many weights there are for a pair of channels.
        groups: Groups of a convolution.
        single: Whether all weights share one step.
        centred: Whether a correction of the bias takes back what the mean of the input makes of rounded weights.
        importance: What noise in each output channel counts, (M,).
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
        """What noise in each input channel counts, (C,)."""
        weighted = (self.importance[:, None] * self.squares).reshape(self.groups, -1, self.squares.shape[1])
        return np.asarray(weighted.sum(axis=1).reshape(-1))

    def noise(self, channels: Channels, scale: Floats) -> float:
        """Return the noise in the result when the input is divided by `scale` and the weights are multiplied by it."""
        activation = float(channels.rounded(scale) @ self.columns)
        power = np.maximum(channels.power - channels.mean**2, 0.0) if self.centred else channels.power
        rows = len(self.peaks) // self.groups
        scales, powers = (np.repeat(each.reshape(self.groups, -1), rows, axis=0) for each in (scale, power))
        steps = (self.peaks * scales).max(axis=1, keepdims=True) / STEPS_S8
        steps = np.full_like(steps, steps.max()) if self.single else steps
        errors = np.minimum(self.taps * (steps / scales) ** 2 / 12, self.squares)
        return activation + float(self.importance @ (errors * powers).sum(axis=1))


def reader_of(fold: Fold, importance: Floats | None = None) -> Reader | None:
    """Return what the noise of a product depends on; None where the weights are of another kind.

    Args:
        fold: Weights that read a tensor.
        importance: What noise in each output channel counts; 1 without.
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


def total(
    readers: Sequence[Reader], channels: Mapping[str, Channels], passed: Sequence[str], scale: Floats, shift: Floats
) -> float:
    """Return the noise that a group makes in the results of its readers.

    Args:
        readers: The products in integers that read the group.
        channels: What is known of each tensor that they, or sums and the like, read.
        passed: The tensors that something in integers reads that passes its channels on, once for each reader.
        scale: By what the channels are divided, (C,).
        shift: What is subtracted from them before, (C,).
    """
    known = {name: each.shifted(shift) for name, each in channels.items()}
    found = sum(reader.noise(known[reader.tensor], scale) for reader in readers)
    columns = sum(reader.columns for reader in readers)
    return float(found + sum(float(known[name].rounded(scale) @ columns) for name in passed))
