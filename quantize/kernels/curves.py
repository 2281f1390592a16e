"""Functions of one tensor as lines in segments, which a native convolution computes before it rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...calibration.model.session import Array
from ...transforms.graphs.queries import constant
from .chains import Chain, exact_values
from .site import operands, parameters_of

SEGMENTS = 64
"""The number of segments; ``kSegments`` in the sources."""
PART = 2**16 // SEGMENTS
"""The number of steps in a segment: the operator rounds its input to them."""
STEP = 64  # the operator holds the lines in 1/64 of a step of the result
MOST = 2**15 - 1
SAMPLES = 32  # of the function in each segment
LARGEST = 1 / 16  # steps: a curve may differ so much from the function
SHARE = 1 / 3  # and by this part of what rounding the value in front of the function may change
BEND = 8.0  # a second difference this many times as large as those around it is a bend
LEAST_BEND = 1e-4  # steps; smaller second differences are rounding


@dataclass(frozen=True, eq=False)
class Curve:
    """A function of a real value, a line in each of some segments of one width.

    Attributes:
        lines: The result in the middle of each segment, and what half a segment adds to it; int16 (2, 64), in 1/64 of a
            step of the result, with its zero point and half a step for rounding.
        grid: Where the first segment begins, and the width; float32 (2,).
    """

    lines: Array
    grid: Array

    def __call__(self, values: Array) -> Array:
        """Return the results in steps of the result, before they are rounded down; float64."""
        origin, width = self.grid.astype(np.float64)
        places = np.clip(np.rint((values - origin) / width * PART), 0, SEGMENTS * PART - 1).astype(np.int64)
        segment, inside = np.divmod(places, PART)
        middle, slope = self.lines.astype(np.int64)[:, segment]
        away = (inside - PART // 2) * SEGMENTS
        found: Array = np.clip(middle + ((slope * away + 2**14) >> 15), -MOST - 1, MOST) / STEP
        return found


def curve_of(model: ir.Model, chain: Chain) -> Curve | None:
    """Return the curve of a function between two uint8 tensors; None for several, or if none is near enough to it.

    The segments cover the range of the first tensor. Where the function bends, one ends and the next begins. A curve is
    near enough if it differs by at most `LARGEST`, and `SHARE` of what half a step of the first tensor changes.
    """
    if chain.channels > 1:
        return None
    first = chain.nodes[0]
    if None in map(constant, operands(first)[1:]) or any(node.op_type.startswith("QLinear") for node in chain.nodes):
        return None
    params = parameters_of(first)
    step, origin = params.scale.item(), float(params.zero_point)
    low, high = -origin * step, (255 - origin) * step
    every = np.linspace(low, high, SEGMENTS * SAMPLES)
    grid = _grid(low, high, bends(every, _steps(model, chain, every)))
    if grid is None:
        return None
    inside = np.linspace(0, 1, SAMPLES)  # of a segment
    places = grid[0] + (np.arange(SEGMENTS)[:, None] + inside) * grid[1]
    wanted = _steps(model, chain, places.ravel()).reshape(places.shape)
    curve = Curve(_lines(wanted, inside), np.asarray(grid, np.float32))
    half = np.abs(np.gradient(wanted, axis=1)) * (SAMPLES - 1) * step / grid[1] / 2
    differences = np.abs(np.clip(curve(places) - 1 / 2, 0, 255) - np.clip(wanted, 0, 255))  # the result is clipped too
    return curve if (differences <= LARGEST + SHARE * half).all() else None


def _lines(wanted: Array, inside: Array) -> Array:
    """Return the lines whose largest difference from a function is the least; int16 (2, segments).

    Over a segment without an inflection, that line is parallel to the chord, in the middle between the chord and the
    parallel tangent (Chebyshev).

    Args:
        wanted: The function in steps; (segments, samples).
        inside: Where the samples are in a segment, 0 to 1.
    """
    most = MOST / STEP
    bounded = np.clip(wanted, -most, most)
    rise = bounded[:, -1] - bounded[:, 0]
    rest = bounded - rise[:, None] * (inside - 1 / 2)
    middle = (rest.max(axis=1) + rest.min(axis=1)) / 2
    lines: Array = np.rint(STEP * np.array([middle + 1 / 2, rise / 2]))
    return lines.clip(-MOST, MOST).astype(np.int16)


def steps_of(model: ir.Model, chain: Chain, integers: Array) -> Array:
    """Return the function of integers of the root, in steps of the result; float64, of their shape."""
    params = parameters_of(chain.nodes[0])
    return _steps(model, chain, (integers - float(params.zero_point)) * params.scale.item())


def _steps(model: ir.Model, chain: Chain, values: Array) -> Array:
    """Return the function of values in steps of the result, float64; the runtime computes it in float32."""
    params = parameters_of(chain.nodes[-1])
    found: Array = exact_values(model, chain, values.astype(np.float32)).astype(np.float64)
    return found / float(params.scale) + float(params.zero_point)


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
    whole, found = high - low, sorted({*found})
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
