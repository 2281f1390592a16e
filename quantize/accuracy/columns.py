"""Rows of numbers whose columns differ more than the rows do: coordinates and measures, not scores per class."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from ...calibration.model.session import Array

FIXED = 0.8
"""Rows are no scores per class if the means of the columns make up more than this share of their variance.

Of the landmarks of a face, an iris, a hand and a body it is 0.86 to 0.98: a nose is always near the middle. Of the
logits of eight classifiers it is 0.00 to 0.64: no class is the greatest of all in most items. Where one is,
an SQNR judges instead.
"""


@dataclass(frozen=True, slots=True)
class Columns:
    """Sums over rows (R, C), each less its mean: a constant in all scores of a row changes no class.

    Attributes:
        rows: The number of rows.
        sums: The sum of each column, (C,) float64.
        squares: The sum of the squares of all values.
    """

    rows: int = 0
    sums: Array = field(default_factory=lambda: np.zeros(1))
    squares: float = 0.0

    def with_rows(self, rows: Array) -> Columns:
        """Return the sums with more rows (R, C) added; NaN for rows of several lengths."""
        if self.rows and rows.shape[1] != len(self.sums):
            return replace(self, squares=math.nan)
        with np.errstate(invalid="ignore", over="ignore"):
            wide = rows.astype(np.float64)
            wide -= wide.mean(axis=1, keepdims=True)
            return Columns(
                self.rows + len(rows), self.sums + wide.sum(axis=0), self.squares + float(np.vdot(wide, wide))
            )

    @property
    def share(self) -> float:
        """The share of the variance that is between the columns' means, 0..1; 0 of fewer than two rows, NaN if unknown.

        For R rows with the column sums s and the sum of squares q, it is ``b / (b + w)`` with ``b = |s|^2 / R`` and
        ``w = (q - b) R / (R - 1)``: the variance within the columns without the bias of their measured means.

        >>> round(Columns().with_rows(np.array([[1.0, 9.0], [2.0, 9.0], [1.0, 8.0]])).share, 3)
        0.994
        """
        if self.rows <= 1:
            return 0.0
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            between = np.vdot(self.sums, self.sums) / self.rows
            within = np.maximum(self.squares - between, 0.0) * self.rows / (self.rows - 1)
            return float(between / (between + within))
