"""Pairs of weights whose products a CPU without VNNI adds in 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from requant.transforms.int8.saturation import pair_partners

Array = npt.NDArray[Any]


def pair_peak(stored: Array, channel_axis: int, *, group: int = 1) -> Array:
    """Return the largest ``|w0 + w1|`` over the pairs of each output channel, (C,); 0 without pairs.

    Args:
        stored: Weights in a layout of `prevent_saturation`; uint8 weights have no pairs.
        channel_axis: The axis of the output channels.
        group: The number of groups of a convolution.
    """
    rows = stored.reshape(len(stored), -1).T if channel_axis == 0 else stored
    partners = pair_partners(stored, channel_axis, group=group)
    sums = np.abs(rows.astype(int) + np.take(rows, partners, axis=-2))[..., partners >= 0, :]
    peaks = sums.reshape(-1, rows.shape[-1]).max(axis=0, initial=0)
    return peaks if stored.dtype == np.int8 else np.zeros_like(peaks)
