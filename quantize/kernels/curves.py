"""Functions of one tensor as piecewise polynomials, which a native convolution computes before it rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...calibration.session import Array
from ...transforms.graph import constant
from .chains import Chain, exact_values

SEGMENTS = 32
"""The number of segments; ``kSegments`` in the sources."""
SAMPLES = 48  # of the function in each segment
LARGEST = 1 / 16  # steps: a difference from the function that is always small enough
SHARE = 1 / 4  # so is this part of what rounding the value in front of the function may change
BEND = 8.0  # a second difference this many times as large as those around it is a bend
LEAST_BEND = 1e-4  # steps; smaller second differences are rounding


@dataclass(frozen=True, eq=False)
class Curve:
    """A function of a real value v, in segments of one width: c0 + t (c1 + t c2), where t = (v - origin) / width.

    Attributes:
        coefficients: c0, c1 and c2 of each segment, in steps of the result and with its zero point; float32 (3, 32).
        grid: Where the first segment begins, and the width; float32 (2,).
    """

    coefficients: Array
    grid: Array

    def __call__(self, values: Array) -> Array:
        """Return the results in steps of the result, before they are rounded; float64."""
        origin, width = self.grid.astype(np.float64)
        t = np.clip((values - origin) / width, 0, np.nextafter(np.float32(SEGMENTS), np.float32(0)))
        c0, c1, c2 = self.coefficients.astype(np.float64)[:, t.astype(np.int64)]
        found: Array = c0 + t * (c1 + t * c2)
        return found


def curve_of(model: ir.Model, chain: Chain) -> Curve | None:
    """Return the curve of a function between two uint8 tensors; None if none is near enough to it.

    The segments cover the range of the first tensor. Where the function bends, one ends and the next begins. A curve is
    near enough if it differs by `LARGEST`, or by `SHARE` of what half a step of the first tensor changes.
    """
    first = chain.nodes[0]
    scale, zero = (constant(value) for value in [*first.inputs, None, None][1:3])
    if scale is None or zero is None or any(node.op_type.startswith("QLinear") for node in chain.nodes):
        return None
    step, origin = float(scale.numpy().item()), float(zero.numpy().item())
    low, high = -origin * step, (255 - origin) * step
    every = np.linspace(low, high, SEGMENTS * SAMPLES)
    grid = _grid(low, high, bends(every, _steps(model, chain, every)))
    if grid is None:
        return None
    inside = (np.arange(SAMPLES) + 0.5) / SAMPLES  # of a segment
    starts = np.arange(SEGMENTS)
    places = starts[:, None] + inside  # of t
    wanted = _steps(model, chain, grid[0] + places.ravel() * grid[1]).reshape(places.shape)
    a0, a1, a2 = np.polynomial.polynomial.polyfit(inside, wanted.T, 2)  # of t - start
    coefficients = np.array([a0 - starts * (a1 - starts * a2), a1 - 2 * starts * a2, a2], np.float32)
    curve = Curve(coefficients, np.asarray(grid, np.float32))
    found = curve(grid[0] + places * grid[1])
    half = np.abs(np.gradient(wanted.ravel())).reshape(places.shape) * SAMPLES * step / grid[1] / 2
    differences = np.abs(np.clip(found, 0, 255) - np.clip(wanted, 0, 255))  # the result is clipped too
    return curve if (differences <= np.maximum(LARGEST, SHARE * half)).all() else None


def _steps(model: ir.Model, chain: Chain, values: Array) -> Array:
    """Return the function of values in steps of the result, float64; the runtime computes it in float32."""
    last = chain.nodes[-1]
    scale, zero = (constant(value) for value in last.inputs[1:3])
    assert scale is not None
    assert zero is not None
    found: Array = exact_values(model, chain, values.astype(np.float32)).astype(np.float64)
    return found / float(scale.numpy().item()) + float(zero.numpy().item())


def bends(values: Array, results: Array) -> list[float]:
    """Return where a function bends: its slope changes at once.

    Args:
        values: Values in equal distances, ascending.
        results: The function of the values.
    """
    second = np.abs(np.diff(results, 2))
    around = np.maximum(np.roll(second, 3), np.roll(second, -3))
    sharp = np.flatnonzero((second > LEAST_BEND) & (second > BEND * around))
    sharp = sharp[(sharp >= 3) & (sharp < len(second) - 3)]
    starts = [int(index) for place, index in enumerate(sharp) if place == 0 or index - sharp[place - 1] > 2]
    return [_between(values, results, start) for start in starts]


def _between(values: Array, results: Array, start: int) -> float:
    """Return where the lines through the values before and behind a bend meet."""
    left, right = start - 1, start + 4
    rise = [results[at + 1] - results[at] for at in (left, right)]
    step = values[1] - values[0]
    if rise[0] == rise[1]:
        return float(values[start + 1])
    gap = (results[right] - results[left] - rise[1] * (right - left)) / (rise[0] - rise[1])
    return float(np.clip(values[left] + gap * step, values[left], values[right]))


def _grid(low: float, high: float, found: list[float]) -> tuple[float, float] | None:
    """Return where the first segment begins and how wide each is, so that bends are ends; None for too many bends."""
    whole = high - low
    if len(found) > 2:
        return None
    first, last = (found[0], found[-1]) if found else (low, low)
    widths = [whole / (SEGMENTS - len(found))]
    if len(found) == 2:
        widths = [(last - first) / count for count in range(SEGMENTS, 0, -1)]
    for width in widths:
        before, behind = (np.ceil(length / width - 1e-6) for length in (first - low, high - first))
        if before + behind <= SEGMENTS:
            return float(first - before * width), width
    return None
