"""Draw the figures of docs/how-it-works.md.

    python -m website.figures

The numbers in the figures are computed: the ranges by requant's own rules, the placement by trying every choice.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from requant.calibration import Histogram, parse_rule
from website.svg import Drawing

IMAGES = Path(__file__).parents[1] / "docs" / "images"
RULES = ("minmax", "percentile(99.99)", "entropy", "mse")
UNITS = (("conv1", 9, 14), ("conv2", 60, 17), ("silu", 6, 12), ("conv3", 48, 15), ("norm", 10, 30), ("dense", 20, 7))
"""The units of the placement: name, microseconds in float, microseconds in int8."""
CONVERSION = 3
"""Microseconds of a conversion between float and uint8."""
TRIED = ((1.00, 76.1), (1.15, 76.2), (1.45, 76.0), (1.7, 76.15), (2.0, 75.95), (2.2, 75.9), (2.4, 75.45), (2.55, 74.9))
"""The models of a search: speed-up and score."""
BAR = 75.8


def ranges() -> Drawing:
    """Draw the ranges that four rules choose for a tensor with a heavy tail."""
    values = np.random.default_rng(7).standard_t(3, 60_000).astype(np.float32)
    statistic = Histogram.of(values)
    drawing = Drawing(720, 330, "Values of a tensor, and the ranges that four rules choose")
    low, high = float(values.min()), float(values.max())
    left, width = 150.0, 540.0

    def place(value: float) -> float:
        return left + (value - low) / (high - low) * width

    counts, _ = np.histogram(values, bins=120, range=(low, high))
    heights = np.log10(counts + 1) / np.log10(counts.max() + 1) * 110
    for number, height in enumerate(heights):
        drawing.box((left + number * width / 120, 150 - height), (width / 120 - 0.5, height), "pale")
    drawing.line((left, 150), (left + width, 150))
    drawing.text(left, 28, "how many values (logarithmic), a tensor with outliers", "soft")
    for row, name in enumerate(RULES):
        lo, hi = parse_rule(name)(statistic)
        y = 185 + 32 * row
        drawing.text(left - 10, y + 4, name, "ink strong", "end")
        drawing.line((place(lo), y), (place(hi), y), look="edge-a")
        for end in (lo, hi):
            drawing.line((place(end), y - 6), (place(end), y + 6), look="edge-a")
        outside = np.mean((values < lo) | (values > hi)) * 100
        step = f"step {(max(hi, 0) - min(lo, 0)) / 255:.3f}, {outside:.2f} % clipped"
        drawing.text(left + width / 2, y - 8, step, "soft small", "middle")
    drawing.text(left, 312, "a wide range has coarse steps; a narrow range clips values", "soft")
    return drawing


def placement() -> Drawing:
    """Draw the cheapest placement of a chain of units."""
    choices = list(product((0, 1), repeat=len(UNITS)))
    best = min(choices, key=_cost)
    drawing = Drawing(720, 270, "A chain of units: float or int8, with the time of each and of the conversions")
    for row, name in enumerate(("float", "int8")):
        drawing.text(20, 92 + 80 * row, name, "ink strong")
    places = [(120 + 100 * number, 88 + 80 * form) for number, form in enumerate(best)]
    drawing.line((70, 88), *places, (690, 88), look="line")
    for number, (name, *costs) in enumerate(UNITS):
        drawing.text(120 + 100 * number, 40, name, "ink strong", "middle")
        for form, cost in enumerate(costs):
            chosen = best[number] == form
            drawing.box((92 + 100 * number, 72 + 80 * form), (56, 32), ("b", "a")[form] if chosen else "pale", 6)
            drawing.text(120 + 100 * number, 92 + 80 * form, f"{cost} µs", "on strong" if chosen else "soft", "middle")
    everywhere = _cost((0,) * len(UNITS)), _cost((1,) * len(UNITS))
    drawing.text(20, 222, f"each change of row is a conversion of {CONVERSION} µs", "soft")
    total = f"all float {everywhere[0]} µs, all int8 {everywhere[1]} µs, the cheapest choice {_cost(best)} µs"
    drawing.text(20, 246, total, "ink strong")
    return drawing


def _cost(choice: tuple[int, ...]) -> int:
    """Return the microseconds of a choice of forms; the model begins and ends in float."""
    forms = (0, *choice, 0)
    changes = sum(first != second for first, second in pairwise(forms))
    return sum(costs[form] for (_, *costs), form in zip(UNITS, choice, strict=True)) + CONVERSION * changes


def corrections() -> Drawing:
    """Draw the mean error of each channel of a layer, before and after its bias is corrected."""
    random = np.random.default_rng(5)
    weights = random.normal(size=(16, 64)) * random.uniform(0.5, 2, (16, 1))
    inputs = np.maximum(random.normal(0.4, 1, (4096, 64)), 0)
    scale = np.abs(weights).max(1, keepdims=True) / 127
    error = inputs @ (np.rint(weights / scale) * scale - weights).T
    seen, other = error[:64].mean(0), error[64:].mean(0)
    drawing = Drawing(720, 300, "The mean error of each channel of a layer with rounded weights")
    top = float(np.abs(other).max())
    _bars(drawing, other / top, 110, "b", "weights rounded: each channel has a mean error of its own")
    _bars(
        drawing, (other - seen) / top, 235, "c", "bias corrected by the means on 64 samples; measured on other samples"
    )
    return drawing


def _bars(drawing: Drawing, shares: NDArray[np.float64], middle: float, look: str, title: str) -> None:
    """Draw a bar for each channel above or below a line."""
    drawing.text(20, middle - 72, title, "ink strong")
    for number, share in enumerate(shares):
        height = abs(float(share)) * 55
        drawing.box((24 + 42 * number, middle - height if share > 0 else middle), (30, max(height, 0.8)), look)
    drawing.line((18, middle), (698, middle), look="thin")


def search() -> Drawing:
    """Draw the models of a search by speed-up and score, and the bar that they must keep."""
    drawing = Drawing(720, 320, "The models of a search: speed-up and score")

    def place(speed: float, score: float) -> tuple[float, float]:
        return 90 + (speed - 0.9) / 1.8 * 590, 250 - (score - 74.7) / 1.8 * 210

    drawing.line((90, 30), (90, 250), (690, 250))
    drawing.text(690, 290, "speed-up over float", "soft", "end")
    drawing.text(20, 24, "score, %", "soft")
    drawing.line(place(0.9, BAR), place(2.7, BAR), look="edge-b dash")
    drawing.text(98, place(0.9, BAR)[1] + 18, "the bar: --max-drop", "b strong")
    front = [point for point in TRIED if not any(o[0] > point[0] and o[1] > point[1] for o in TRIED)]
    drawing.line(*(place(*point) for point in front), look="thin")
    chosen = max(point for point in TRIED if point[1] >= BAR)
    for point in TRIED:
        drawing.dot(*place(*point), 7 if point == chosen else 5, "c" if point == chosen else "a")
    x, y = place(*chosen)
    drawing.line((x, y - 10), (x, 70), look="thin")
    drawing.text(690, 60, "written: the fastest that keeps the bar", "c strong", "end")
    drawing.text(90, 304, "no other model is both faster and better than one on the thin line", "soft small")
    for speed in (1.0, 1.5, 2.0, 2.5):
        drawing.text(place(speed, 76)[0], 268, f"{speed:.1f}x", "soft small", "middle")
    return drawing


FIGURES: dict[str, Callable[[], Drawing]] = {
    "ranges": ranges,
    "placement": placement,
    "corrections": corrections,
    "search": search,
}


def main() -> None:
    """Write the figures."""
    for name, draw in FIGURES.items():
        (IMAGES / f"figure-{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
