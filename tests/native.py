"""What tests of native operators have in common: the mark of those that need the library, and how rows are rounded."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from requant.quantize.kernels.library import kernels

Array = NDArray[Any]
FOUND = kernels()
needs_library = pytest.mark.skipif(isinstance(FOUND, str) and not os.environ.get("CI"), reason=str(FOUND))
"""Skips a test where there is no library, and never in CI, which builds it."""


def by_row(x: Array) -> tuple[Array, Array]:
    """Return the last axis rounded to uint8 with the least range that has it and 0, minus the zero point; the steps."""
    least, most = x.min(-1, keepdims=True).clip(None, 0), x.max(-1, keepdims=True).clip(0)
    step = most / np.float32(255) - least / np.float32(255)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    zero = np.rint(-least * inverse)
    return np.clip(np.rint(x * inverse) + zero, 0, 255) - zero, step.astype(np.float64)
