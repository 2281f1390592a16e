"""Outputs whose lengths differ between two models: a loop until a condition makes more or fewer steps in INT8.

Values of other lengths have no difference, and so no SQNR.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...calibration.model.session import Array
from .sqnr import decibels_text


@dataclass(frozen=True, slots=True)
class OtherLengths:
    """The samples for which an output has another shape in the INT8 model.

    Attributes:
        samples: The number of these samples.
        total: The number of all samples.
        where: The first of these samples.
        before: The shape in the float model for this sample.
        after: The shape in the INT8 model for this sample.
    """

    samples: int = 0
    total: int = 0
    where: str = ""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def with_sample(self, exact: Array, other: Array, where: str) -> OtherLengths:
        """Return the counts with one more sample added."""
        if exact.shape == other.shape:
            return replace(self, total=self.total + 1)
        first = OtherLengths(0, 0, where, exact.shape, other.shape) if not self.samples else self
        return replace(first, samples=self.samples + 1, total=self.total + 1)

    def __str__(self) -> str:
        """Return ``"lengths differ on 3 of 20 samples (44 instead of 48 on axis 1: a.npz)"``."""
        apart = [axis for axis, (one, two) in enumerate(zip(self.before, self.after, strict=False)) if one != two]
        told = f"{_shape_text(self.after)} instead of {_shape_text(self.before)}"
        if len(self.before) == len(self.after) and len(apart) == 1:
            told = f"{self.after[apart[0]]} instead of {self.before[apart[0]]} on axis {apart[0]}"
        place = self.where.rpartition("/")[2]
        return f"lengths differ on {self.samples} of {self.total} samples ({told}: {place})"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "samples": self.samples,
            "where": self.where,
            "float_shape": list(self.before),
            "int8_shape": list(self.after),
        }


def sqnr_text(output: str, value: float, lengths: Mapping[str, OtherLengths]) -> str:
    """Return the SQNR of an output as text; without one, the samples whose lengths differ, if they are why.

    Args:
        output: The name of the output.
        value: Its SQNR in dB.
        lengths: The samples whose lengths differ, by output.
    """
    if value > -math.inf or output not in lengths:
        return decibels_text(value)
    return f"unknown, since {lengths[output]}"


def _shape_text(shape: tuple[int, ...]) -> str:
    """Return ``"1x44x50"``; of a scalar ``"a scalar"``."""
    return "x".join(map(str, shape)) or "a scalar"
