"""The rows of `benchmarks.accuracy`: the contenders, the goals that a row misses, and the table.

A goal of a task is a value of its metric, or a drop from the float value. This project's models must also be as fast as
the models of other quantizers that reach the goal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rich.table import Table

from benchmarks.contenders import PRODUCTS
from benchmarks.measurements import NOISE
from benchmarks.tables import plain_table


@dataclass(frozen=True, slots=True)
class Contender:
    """A quantizer with its options.

    Attributes:
        label: The name in the table.
        function: A key of `contenders.FUNCTIONS`.
        arguments: The arguments of the function, except model, feeds and output.
        wants: Skip models without this operator: another contender makes the same INT8 model of them.
        ours: Whether the quantizer is this project.
    """

    label: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    wants: str = ""
    ours: bool = False


CONTENDERS: Mapping[str, Contender] = {
    "minmax": Contender("ORT minmax", "static"),
    "products": Contender("ORT minmax, products", "static", {"operators": PRODUCTS}, wants="MatMul"),
    "percentile": Contender("ORT percentile", "static", {"percentile": 99.999}),
    "nncf": Contender("NNCF", "nncf"),
    "low": Contender("ours, low", "configured", {"options": {"effort": "low"}}, ours=True),
    "medium": Contender("ours, medium", "configured", {"options": {"effort": "medium"}}, ours=True),
    "high": Contender("ours, high", "configured", {"options": {"effort": "high"}}, ours=True),
    "plain": Contender("ours, uncorrected", "configured", {"options": {"corrections": []}}, ours=True),
}
"""The contenders, by their name in ``--contenders``."""
USUAL = ("minmax", "products", "percentile", "nncf", "low", "medium", "high")


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of the INT8 model of a task.

    Attributes:
        drop: The largest drop, in the unit of the metric; None for no limit.
        relative: Whether `drop` is a share of the float value.
        least: The lowest value; None for no limit.
        agreement: The lowest agreement with float, 0..1; None for no limit.
    """

    drop: float | None = None
    relative: bool = False
    least: float | None = None
    agreement: float | None = None

    def missed(self, row: Row, before: float) -> str:
        """Return the reason why a row misses the goal; empty if it reaches the goal. `before` is the float value."""
        if row.value is None:
            return "no model"
        bound = math.inf if self.drop is None else self.drop * (abs(before) if self.relative else 1.0)
        if row.drop is not None and row.drop > bound + 1e-12:  # values are quotients of integers
            return f"drop above {bound:.4g}"
        if self.least is not None and row.value < self.least:
            return f"below {self.least:g}"
        if self.agreement is not None and row.agreement is not None and row.agreement < self.agreement:
            return f"agreement below {self.agreement:.1%}"
        return ""


GOALS: Mapping[str, Mapping[str, Goal]] = {
    "medium": {
        "mbv1_075": Goal(drop=0.003),
        "cifar_resnet20": Goal(drop=0.001, agreement=0.993),
        "kwt1": Goal(drop=0.002),
        "yolox_nano": Goal(least=0.325),
        "superres": Goal(drop=0.4),
        "stories260k": Goal(drop=0.01, relative=True),
        "silero_vad": Goal(least=0.999),
    },
    "high": {
        "mbv1_075": Goal(drop=0.0015),
        "cifar_resnet20": Goal(drop=0.0005),
        "kwt1": Goal(drop=0.001),
        "yolox_nano": Goal(least=0.333),
        "superres": Goal(drop=0.1),
        "stories260k": Goal(drop=0.005, relative=True),
        "silero_vad": Goal(least=0.9995),
    },
}
"""The goals of this project's models, by effort and task."""


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one model.

    Attributes:
        task: The task of the kit.
        contender: ``float``, a key of `CONTENDERS`, or a correction.
        place: The placement option of this project; empty for others.
        asked: The requested number of evaluation items; None for all.
        metric: The main metric of the task.
        lower: Whether a lower value is better.
        value: The value of the metric; None without a model.
        items: The number of evaluation items.
        drop: How much worse `value` is than the float value.
        interval: The 95 % confidence interval of the drop; None if unknown.
        broken: The number of items that are right in float and wrong in INT8.
        fixed: The number of items that are wrong in float and right in INT8.
        p_value: The p-value of the exact test of `broken` against `fixed`.
        agreement: The share of equal predictions.
        sqnr_db: The SQNR of the worst output on 16 inputs; None if all outputs are equal.
        float_ms: The minimum time of the float model in the same process.
        ms: The minimum time of one run.
        seconds: The time of quantizing.
        int8: The share of multiply-accumulates in integer kernels; None if unknown.
        verdict: Why this project would write the float model instead.
        invalid: The error of the onnx checker.
        error: Why there is no model or no value.
    """

    task: str
    contender: str
    place: str = ""
    asked: int | None = None
    metric: str = ""
    lower: bool = False
    value: float | None = None
    items: int = 0
    drop: float | None = None
    interval: tuple[float, float] | None = None
    broken: int | None = None
    fixed: int | None = None
    p_value: float | None = None
    agreement: float | None = None
    sqnr_db: float | None = None
    float_ms: float | None = None
    ms: float | None = None
    seconds: float | None = None
    int8: float | None = None
    verdict: str = ""
    invalid: str = ""
    error: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies the measurement."""
        return self.task, self.contender, self.place, self.asked

    @property
    def speedup(self) -> float | None:
        """Float time over INT8 time."""
        return None if self.float_ms is None or self.ms is None else self.float_ms / self.ms


def row_of(record: Mapping[str, Any]) -> Row:
    """Return a row from JSON; unknown keys are ignored."""
    names = {entry.name for entry in fields(Row)}
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in record.items() if n in names}
    return Row(**values)


def missed(row: Row, rows: Iterable[Row]) -> list[str]:
    """Return the goals that a row of this project misses: its accuracy, and the speed of the best other quantizer.

    The best other quantizer is the fastest one whose model is valid and reaches the accuracy goal.

    Args:
        row: The row.
        rows: All rows.
    """
    goal = GOALS.get(row.contender, {}).get(row.task)
    same = [other for other in rows if other.task == row.task and other.asked == row.asked]
    before = next((other.value for other in same if other.contender == "float"), None)
    if goal is None or before is None:
        return []
    reasons = [reason] if (reason := goal.missed(row, before)) else []
    peers = [
        other
        for other in same
        if other.contender in CONTENDERS
        and not CONTENDERS[other.contender].ours
        and not other.invalid
        and not goal.missed(other, before)
        and other.speedup is not None
    ]
    fastest = max(peers, key=lambda other: other.speedup or 0.0, default=None)
    if fastest is not None and (row.speedup or 0.0) < (fastest.speedup or 0.0) * (1 - NOISE):
        reasons.append(f"slower than {CONTENDERS[fastest.contender].label}")
    return reasons


def select(rows: Iterable[Row], tasks: Sequence[str], contenders: Collection[str], items: int | None) -> list[Row]:
    """Return the rows of these tasks, contenders and number of items, in the order of the table."""
    return ordered((r for r in rows if r.task in tasks and r.contender in contenders and r.asked == items), tasks)


def helping(rows: Sequence[Row], names: Iterable[str]) -> list[str]:
    """Return one line per correction: the tasks on which it is better or worse than no correction."""
    none = {row.task: row for row in rows if row.contender == "none" and row.drop is not None}
    lines = []
    for name in names:
        pairs = [(row, none[row.task]) for row in rows if row.contender == name and row.task in none]
        better = [row.task for row, plain in pairs if row.drop is not None and row.drop < (plain.drop or 0.0)]
        worse = [row.task for row, plain in pairs if row.drop is not None and row.drop > (plain.drop or 0.0)]
        cleaner = [
            row.task
            for row, plain in pairs
            if row.sqnr_db is not None and plain.sqnr_db is not None and row.sqnr_db > plain.sqnr_db
        ]
        lists = (f"{kind} on {', '.join(tasks) or 'none'}" for kind, tasks in (("better", better), ("worse", worse)))
        lines.append(f"{name}: {'; '.join(lists)}; less noise on {', '.join(cleaner) or 'none'}")
    return lines


def ordered(rows: Iterable[Row], tasks: Sequence[str]) -> list[Row]:
    """Sort rows by task, then float first, then in the order of `CONTENDERS`."""
    names = ["float", *CONTENDERS]
    return sorted(
        rows,
        key=lambda row: (
            tasks.index(row.task),
            names.index(row.contender) if row.contender in names else len(names),
            row.place,
        ),
    )


# ------------------------------------------------------------------------------------------------------- printing


def figure(row: Row, value: float | None, *, sign: bool = False) -> str:
    """Return a value of the metric of a row as text. Shares are in percent."""
    if value is None:
        return "-"
    plus = "+" if sign else ""
    return f"{100 * value:{plus}.2f}" if row.metric in ("top1", "finite") else f"{value:{plus}.4f}"


def times(value: float | None) -> str:
    """Return a speed-up as text."""
    return "-" if value is None else f"{value:.2f}x"


def between(row: Row) -> str:
    """Return the interval of the drop as text."""
    return "" if row.interval is None else " to ".join(figure(row, end, sign=True) for end in row.interval)


def counted(row: Row) -> str:
    """Return the numbers of broken and fixed items as text."""
    return "" if row.broken is None else f"{row.broken}/{row.fixed}"


def remarks(row: Row, rows: Sequence[Row]) -> str:
    """Return the problems of a row: an error, an invalid model, or a missed goal."""
    parts = [short(f"fails: {row.error}")] if row.error else []
    parts += [short(f"invalid: {row.invalid}")] if row.invalid else []
    parts += [short(f"not kept: {row.verdict}")] if row.verdict else []
    return "; ".join([*parts, *missed(row, rows)])


def short(text: str, most: int = 60) -> str:
    """Return the first `most` characters of a text.

    >>> short("a long story", 8)
    'a lon...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


COLUMNS = (
    *("task", "metric", "model", "value", "drop", "95 %", "broken/fixed", "p", "agreement", "SQNR dB"),
    *("speed-up", "int8", "seconds"),
)


def to_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    found = plain_table(title, COLUMNS, left=("task", "metric", "model"), no_wrap=("task", "metric", "model"))
    found.add_column("", overflow="fold")
    for row in rows:
        label = CONTENDERS[row.contender].label if row.contender in CONTENDERS else row.contender
        found.add_row(
            row.task,
            row.metric,
            label + (f" ({row.place})" if row.place not in ("", "measured") else ""),
            figure(row, row.value),
            figure(row, row.drop, sign=True) if row.contender != "float" else "",
            between(row) if row.contender != "float" else "",
            counted(row) if row.contender != "float" else "",
            "" if row.p_value is None or row.contender == "float" else f"{row.p_value:.2g}",
            "" if row.agreement is None else f"{row.agreement:.2%}",
            "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
            times(row.speedup),
            "" if row.int8 is None else f"{row.int8:.0%}",
            "" if row.seconds is None else f"{row.seconds:.0f}",
            remarks(row, rows),
        )
    return found
