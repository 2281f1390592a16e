"""Rules that choose a tensor's range: pure functions of statistics to ``(lo, hi)``.

To add one: a function, here or in a file of its own, and a row in `RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .. import RequantError, UnknownNameError
from .histogram import Histogram, Statistic
from .precision import Precision
from .rule_aciq import aciq
from .rule_entropy import entropy
from .rule_error import least_error
from .rule_mse import mse
from .session import Array

if TYPE_CHECKING:
    from .sums import Runs

Range: TypeAlias = tuple[float, float]

DEFAULT = Precision()


def minmax(statistic: Statistic) -> Range:
    """Return the smallest and the largest value seen."""
    return statistic.lo, statistic.hi


def percentile(statistic: Histogram, p: float) -> Range:
    """Return the range that cuts at most 100 - p % of the values off either tail.

    The upper end is the p-th percentile, the lower end the (100 - p)-th. Inside a bin the values are taken
    to be spread evenly, so either end is within one bin's width of the percentile of the values
    themselves, and within the extremes.

    Args:
        statistic: The histogram.
        p: Percentage kept at each side, in (50, 100].
    """
    edges, counts = statistic.edges, statistic.counts
    mirrored = _quantile(-edges[::-1], counts[::-1], p / 100)
    return 0.0 - mirrored, _quantile(edges, counts, p / 100)


def _quantile(edges: Array, counts: Array, share: float) -> float:
    """Return where the mass from the left reaches `share` of the whole, linear inside a bin."""
    reached = np.cumsum(counts)
    mass = share * float(reached[-1])
    bin_ = int(np.searchsorted(reached, mass))
    left, right = float(edges[bin_]), float(edges[bin_ + 1])
    inside = (mass - float(reached[bin_] - counts[bin_])) / float(counts[bin_])
    return max(right - (1 - inside) * (right - left), left)  # max: rounding must not leave the bin


def mean_minmax(statistic: Statistic, runs: Runs | None) -> Range:
    """Return the means of the smallest and of the largest values of the runs; the extremes where no runs are known.

    Args:
        statistic: The extremes of all runs, beyond which rounding must not take a mean.
        runs: The extremes of each run, added up.
    """
    if runs is None:
        return minmax(statistic)
    lo, hi = (min(max(mean, statistic.lo), statistic.hi) for mean in (runs.mean_lo, runs.mean_hi))
    return lo, hi


def auto(histogram: Histogram, runs: Runs | None, precision: Precision) -> Range:
    """Return of all other rules' ranges the one with the least expected error; of equal ones, the earlier rule's.

    Args:
        histogram: The values.
        runs: The extremes of each run, added up; None where they are not known.
        precision: The integers.
    """
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
    """The one number that a rule may take.

    Attributes:
        default: Its value when none is given.
        above: It must be larger than this.
        upto: It must not be larger than this.
    """

    default: float
    above: float
    upto: float


@dataclass(frozen=True, slots=True)
class RuleKind:
    """A row of `RULES`.

    Attributes:
        function: Takes the statistic, its number when there is a parameter, and by name what is in `takes`.
        needs_histogram: Whether `function` takes a `Histogram` only; the range of a `MinMax` is its extremes then.
        takes: What else it takes, ``runs`` (a `Runs`, or None where there are none) and ``precision``.
        parameter: What number it takes; None for none.
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
    """A rule with its number; made by `parse_rule`.

    Attributes:
        name: A key of `RULES`.
        number: The rule's number; None when it takes none.
    """

    name: str
    number: float | None = None

    @property
    def needs_histogram(self) -> bool:
        """Whether the rule can cut a range only where it gets a `Histogram`."""
        return RULES[self.name].needs_histogram

    @property
    def needs_runs(self) -> bool:
        """Whether the rule makes use of the extremes of each run."""
        return "runs" in RULES[self.name].takes

    @property
    def needs_precision(self) -> bool:
        """Whether the range depends on what it will be used for."""
        return "precision" in RULES[self.name].takes

    def __call__(self, statistic: Statistic, runs: Runs | None = None, precision: Precision = DEFAULT) -> Range:
        """Choose ``(lo, hi)``, with ``statistic.lo <= lo <= hi <= statistic.hi``.

        Of a tensor inside a body there is never more than a `MinMax`; a rule that needs a histogram cuts nothing off
        it, and the range is that of `minmax`.

        Args:
            statistic: What was seen of the tensor.
            runs: The extremes of each run, added up; without them `mean_minmax` is `minmax`.
            precision: What the range will be used for.
        """
        kind = RULES[self.name]
        if kind.needs_histogram and not isinstance(statistic, Histogram):
            return minmax(statistic)
        given = {"runs": runs, "precision": precision}
        number = () if self.number is None else (self.number,)
        return kind.function(statistic, *number, **{name: given[name] for name in kind.takes})

    def __str__(self) -> str:
        """Return the canonical text, which `parse_rule` reads back: ``"percentile(99.99)"``."""
        return self.name if self.number is None else f"{self.name}({repr(self.number).removesuffix('.0')})"


def parse_rule(text: str) -> Rule:
    """Read ``"minmax"``, ``"percentile"``, ``"percentile(99.9)"`` or ``"percentile=99.9"``.

    Raises:
        UnknownNameError: There is no such rule.
        RequantError: The number is missing, malformed or out of bounds, or the rule takes none.
    """
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
        value = float(number)
    except ValueError:
        raise RequantError(f"range rule {text!r}: {number.strip()!r} is not a number") from None
    if not parameter.above < value <= parameter.upto:
        raise RequantError(
            f"range rule {text!r}: the number must be above {parameter.above:g} and at most {parameter.upto:g}"
        )
    return value
