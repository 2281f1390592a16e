"""Rules that choose a tensor's range: pure functions of statistics that return ``(lo, hi)``.

To add a rule, write a function (here or in a file of its own) and a row in `RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import TypeAlias

import numpy as np

from ... import RequantError, UnknownNameError
from ...system.given import check_kind
from ..model.session import Array
from ..statistics.extremes import MinMax
from ..statistics.histogram import Histogram, Statistic
from ..statistics.sums import Runs
from .aciq import aciq
from .entropy import entropy
from .error import check_given, least_error
from .mse import mse
from .precision import Precision

Range: TypeAlias = tuple[float, float]

DEFAULT = Precision()


def minmax(statistic: Statistic) -> Range:
    """Return the smallest and the largest observed value.

    Raises:
        RequantError: It is no statistic.
    """
    check_kind(statistic, (MinMax, Histogram), "a range rule takes a MinMax or a Histogram")
    return statistic.lo, statistic.hi


def percentile(statistic: Histogram, p: float) -> Range:
    """Return the range that cuts off at most 100 - p % of the values at either end.

    The upper end is the p-th percentile and the lower end the (100 - p)-th. The values are assumed to be spread evenly
    inside each bin. Either end is therefore within one bin width of the exact percentile, and never outside the
    extremes.

    Args:
        statistic: The histogram.
        p: The percentage to keep at either end, in (50, 100].

    Raises:
        RequantError: An argument is of another type, or p is out of range.
    """
    check_given(statistic, DEFAULT)
    check_kind(p, (int, float), "p must be a number")
    if not 50 < p <= 100:
        raise RequantError(f"p must be above 50 and at most 100, not {p:g}")
    edges, counts = statistic.edges, statistic.counts
    mirrored = _quantile(-edges[::-1], counts[::-1], p / 100)
    return 0.0 - mirrored, _quantile(edges, counts, p / 100)


def _quantile(edges: Array, counts: Array, share: float) -> float:
    """Return where the cumulative count from the left reaches `share` of the total, linear inside a bin."""
    reached = np.cumsum(counts)
    mass = share * float(reached[-1])
    bin_ = int(np.searchsorted(reached, mass))
    left, right = float(edges[bin_]), float(edges[bin_ + 1])
    inside = (mass - float(reached[bin_] - counts[bin_])) / float(counts[bin_])
    return max(right - (1 - inside) * (right - left), left)  # max keeps the rounded result inside the bin


def mean_minmax(statistic: Statistic, runs: Runs | None) -> Range:
    """Return the mean of the runs' smallest values and the mean of their largest; the extremes if `runs` is None.

    Args:
        statistic: The extremes of all runs. They limit the means against rounding.
        runs: The sums of the extremes of each run.

    Raises:
        RequantError: An argument is of another type.
    """
    check_kind(runs, (Runs, NoneType), "runs must be Runs or None")
    if runs is None:
        return minmax(statistic)
    lo, hi = (min(max(mean, statistic.lo), statistic.hi) for mean in (runs.mean_lo, runs.mean_hi))
    return lo, hi


def auto(histogram: Histogram, runs: Runs | None, precision: Precision) -> Range:
    """Return the range with the least expected error among the ranges of `CANDIDATES`. The first of equal ranges wins.

    Args:
        histogram: The values.
        runs: The sums of the extremes of each run; None if unknown.
        precision: The integers.
    """
    check_given(histogram, precision)
    return least_error(histogram, [parse_rule(text)(histogram, runs, precision) for text in CANDIDATES], precision)


CANDIDATES = (
    "minmax",
    "percentile(99.999)",
    "percentile(99.99)",
    "percentile(99.9)",
    "mean_minmax",
    "mse",
    "aciq",
    "entropy",
)
"""The rules that `auto` chooses from."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The number that a rule takes.

    Attributes:
        default: The default value.
        above: The exclusive lower bound.
        upto: The inclusive upper bound.
    """

    default: float
    above: float
    upto: float


@dataclass(frozen=True, slots=True)
class RuleKind:
    """A row of `RULES`.

    Attributes:
        function: Takes the statistic, the number if there is a parameter, and the keyword arguments in `takes`.
        needs_histogram: Whether `function` takes only a `Histogram`. The range of a `MinMax` is then its extremes.
        takes: The names of further arguments: ``runs`` (a `Runs` or None) and ``precision``.
        parameter: The number that the rule takes; None if there is none.
    """

    function: Callable[..., Range]
    needs_histogram: bool
    takes: tuple[str, ...] = ()
    parameter: Parameter | None = None


RULES: Mapping[str, RuleKind] = {
    "minmax": RuleKind(minmax, needs_histogram=False),
    "percentile": RuleKind(percentile, needs_histogram=True, parameter=Parameter(99.99, above=50, upto=100)),
    "mean_minmax": RuleKind(mean_minmax, needs_histogram=False, takes=("runs",)),
    "mse": RuleKind(mse, needs_histogram=True, takes=("precision",)),
    "aciq": RuleKind(aciq, needs_histogram=True, takes=("precision",)),
    "entropy": RuleKind(entropy, needs_histogram=True, takes=("precision",)),
    "auto": RuleKind(auto, needs_histogram=True, takes=("runs", "precision")),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule with its number; `parse_rule` creates it.

    Attributes:
        name: A key of `RULES`.
        number: The rule's number; None if it takes none.
    """

    name: str
    number: float | None = None

    @property
    def needs_histogram(self) -> bool:
        """Whether the rule needs a `Histogram` to clip a range."""
        return RULES[self.name].needs_histogram

    @property
    def needs_precision(self) -> bool:
        """Whether the range depends on the integer type."""
        return "precision" in RULES[self.name].takes

    def __call__(self, statistic: Statistic, runs: Runs | None = None, precision: Precision = DEFAULT) -> Range:
        """Choose ``(lo, hi)``, with ``statistic.lo <= lo <= hi <= statistic.hi``.

        A tensor inside a body of control flow has only a `MinMax`. A rule that needs a histogram then returns the
        extremes.

        Args:
            statistic: The statistic of the tensor.
            runs: The sums of the extremes of each run. Without them `mean_minmax` returns the extremes.
            precision: The integer type.
        """
        kind = RULES[self.name]
        if kind.needs_histogram and not isinstance(statistic, Histogram):
            return minmax(statistic)
        arguments = {"runs": runs, "precision": precision}
        number = () if self.number is None else (self.number,)
        return kind.function(statistic, *number, **{name: arguments[name] for name in kind.takes})

    def __str__(self) -> str:
        """Return the canonical text, which `parse_rule` reads: ``"percentile(99.99)"``."""
        return self.name if self.number is None else f"{self.name}({repr(self.number).removesuffix('.0')})"


def parse_rule(text: str) -> Rule:
    """Read ``"minmax"``, ``"percentile"``, ``"percentile(99.9)"`` or ``"percentile=99.9"``.

    Raises:
        UnknownNameError: There is no such rule.
        RequantError: The number is malformed or out of bounds, or the rule takes none.
    """
    check_kind(text, str, "a rule must be a text such as 'mse'")
    match = re.fullmatch(r"\s*([^\s(=]+)\s*(?:\((.*)\)|=(.*))?\s*", text)
    if match is None:
        raise RequantError(f"cannot read the range rule {text!r}; write a name or name(number), e.g. percentile(99.9)")
    name, number = match[1], match[2] if match[2] is not None else match[3]
    if name not in RULES:
        raise UnknownNameError("range rule", name, RULES)
    parameter = RULES[name].parameter
    if parameter is None:
        if number is not None:
            raise RequantError(f"range rule {text!r}: {name} takes no number")
        return Rule(name)
    return Rule(name, parameter.default if number is None else _number(text, number, parameter))


def _number(text: str, number: str, parameter: Parameter) -> float:
    """Read the number of a rule."""
    try:
        if not number.isascii() or "_" in number:
            raise ValueError
        value = float(number)
    except ValueError:
        raise RequantError(f"range rule {text!r}: {number.strip()!r} is not a number") from None
    if not parameter.above < value <= parameter.upto:
        raise RequantError(
            f"range rule {text!r}: the number must be above {parameter.above:g} and at most {parameter.upto:g}"
        )
    return value
