"""The sentences and table rows of a report."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from ...system.printable import number_of
from ..model.files import size_text
from .losses import losses
from .numbers import NONE, decibels, microseconds, milliseconds, percent, points, times
from .record import Headline, Judged, Record

T = TypeVar("T", bound=float)

NOISE = 0.02  # relative: a smaller difference of times or sizes is no reason to prefer a run


@dataclass(frozen=True, slots=True)
class Card:
    """One number of the headline.

    Attributes:
        title: The title.
        big: The number.
        unit: The text after the number, in small letters.
        lines: Details: before and after, number of runs.
    """

    title: str
    big: str
    unit: str
    lines: tuple[str, ...]


def measured_told(record: Record) -> str:
    """Say on what the verdict was measured: data, threads, batch, processor."""
    head, cpu = record.headline, record.environment.get("CPU", "").partition(" (")[0]
    data = f"on {os.path.basename(head.data)}" if head.data else "without data"
    threads = number_of(head.threads, "thread") if head.threads else "all threads"
    batch = f"batches of {head.batch}" if head.batch > 1 else ""
    timed = () if head.float_ms is None else (threads, batch, cpu)
    return ", ".join(part for part in (f"Float against INT8 {data}", *timed) if part) + "."


def cards(record: Record) -> list[Card]:
    """Return the headline: speed, accuracy, size and the share of integer products."""
    head = record.headline
    smaller = head.float_bytes / head.int8_bytes if head.int8_bytes else None
    nodes = head.int8_nodes + head.float_nodes
    return [
        _speed(head),
        _accuracy(record),
        Card("Size", times(smaller), "smaller", (f"{size_text(head.float_bytes)} → {size_text(head.int8_bytes)}",)),
        Card(
            "In integers",
            percent(head.mac_share_int8, 0),
            "of the products",
            (f"{head.int8_nodes} of {nodes} nodes", f"{head.format}, {head.calibration or 'no'} ranges"),
        ),
    ]


def _accuracy(record: Record) -> Card:
    """Return the accuracy by labels, else by equal predictions, else by SQNR."""
    head, judged = record.headline, record.judged
    noise = _noise_line(head)
    if judged is not None and judged.labelled is not None:
        found = judged.labelled
        before, after = percent(found.float_correct / found.items), percent(found.int8_correct / found.items)
        line = f"right by labels; {found.broken} broken, {found.fixed} fixed of {found.items}"
        return Card("Accuracy", f"{before} → {after}", "", (line, noise))
    if not head.samples:
        return Card("Accuracy", NONE, "", ("not measured: there are no data",))
    if head.agreement is not None:
        return Card("Accuracy", percent(head.agreement), "equal answers", (f"of {head.predictions} predictions", noise))
    big = "equal" if head.sqnr_db is None else decibels(head.sqnr_db)
    return Card("Accuracy", big, "at the worst output", (f"float against INT8 on {number_of(head.samples, 'sample')}",))


def _noise_line(head: Headline) -> str:
    """Return the SQNR as a line."""
    if not head.samples:
        return ""
    return "outputs without noise" if head.sqnr_db is None else f"{decibels(head.sqnr_db)} at the worst output"


def _speed(head: Headline) -> Card:
    """Return the speed."""
    if head.float_ms is None:
        return Card("Speed", NONE, "", ("not measured: the models could not be run",))
    lines = [f"{milliseconds(head.float_ms)} → {milliseconds(head.int8_ms)}", f"least of {head.runs} runs each"]
    if head.rejected_speedup is not None:
        lines[1] = f"rejected INT8 model: {times(head.rejected_speedup)}"
    return Card("Speed", times(head.speedup), "as fast", tuple(lines))


@dataclass(frozen=True, slots=True)
class Cost:
    """A row of the card "why not more".

    Attributes:
        what: The operator or the added work, with the number of operators.
        time: The time that is lost.
        why: The reason.
    """

    what: str
    time: str
    why: str


def costs(record: Record) -> list[Cost]:
    """Return the operators that cost most, each with the time that is lost and its reason."""
    return [
        Cost(
            what=f"{row.nodes} {row.what}" if row.nodes > 1 else row.what,
            time=microseconds(row.microseconds) if row.nodes else f"+{microseconds(row.microseconds)}",
            why=row.why,
        )
        for row in losses(record)
    ]


def costs_told(record: Record) -> str:
    """Say what the card "why not more" counts."""
    if not losses(record):
        return "Every operator gains from INT8." if record.units else "The kernels were not measured."
    model = "rejected INT8 model" if any(unit.tried for unit in record.units) else "INT8 model"
    return f"Time of a run that INT8 does not shorten, and time that it adds (+), in the {model}."


def accuracy_rows(record: Record) -> list[tuple[str, str]]:
    """Return the rows about accuracy; the drops by labels and by probabilities come first."""
    head, judged = record.headline, record.judged
    rows = _judged_rows(judged) if judged is not None else []
    if head.agreement is not None:
        rows.append(("equal predictions", f"{percent(head.agreement)} of {head.predictions}"))
    rows += [
        (f"SQNR of {name}", "no noise" if value is None else decibels(value))
        for name, value in head.sqnr_db_by_output.items()
    ]
    if head.float_median_ms is not None:
        rows.append(
            ("median time of a run", f"{milliseconds(head.float_median_ms)} → {milliseconds(head.int8_median_ms)}")
        )
    if head.effort:
        rows.append(("effort", f"{head.effort}: {', '.join(head.corrections)}" if head.corrections else head.effort))
    if head.predicted_ms is not None:
        rows.append(("time predicted from costs", milliseconds(head.predicted_ms)))
    if head.rejected_speedup is not None:
        told = f"{times(head.rejected_speedup)} as fast, {decibels(head.rejected_sqnr_db)}"
        rows.append(("rejected INT8 model", told))
    return rows


def _judged_rows(judged: Judged) -> list[tuple[str, str]]:
    """Return the drop by labels and the drop predicted without labels."""
    rows = []
    if judged.labelled is not None:
        found = judged.labelled
        low, high = found.drop_interval
        drop = (found.float_correct - found.int8_correct) / found.items
        between = f"; 95 % interval {drop_of(low).removesuffix(' points')} to {drop_of(high)}" if judged.apart else ""
        rows.append(("drop by labels", f"{drop_of(drop)} on {number_of(found.items, 'item')}{between}"))
        rows.append(("items", f"{found.broken} broken, {found.fixed} fixed"))
    if judged.predicted_drop is not None:
        rows.append(
            (
                "predicted drop, without labels",
                f"{drop_of(judged.predicted_drop)} on {number_of(judged.predictions, 'prediction')}",
            )
        )
    return rows


def drop_of(share: float) -> str:
    """Return a drop; a loss has no sign."""
    return points(share).removeprefix("+")


def items_told(record: Record) -> str:
    """Describe the order and the number of the worst samples."""
    judged = record.judged
    if judged is None:
        return ""
    kind = (
        "Samples that INT8 breaks come first, then samples with another prediction, then samples with the lowest SQNR"
        if judged.predictions
        else "Samples with the lowest SQNR at an output come first"
    )
    differing = f"; {judged.differing} of {judged.predictions} predictions differ" if judged.predictions else ""
    none = " No sample differs." if not judged.items else ""
    return f"{number_of(judged.samples, 'sample')} of {judged.data}{differing}. {kind}.{none}"


def data_told(record: Record) -> str:
    """Describe the source of the ranges."""
    head = record.headline
    if head.ranges:
        return f"Ranges from {head.ranges}."
    if not head.calibration:
        return f"No ranges were needed. Measured on {head.data}." if head.data else "No data."
    return f"{head.data}; ranges by {head.calibration}."


def search_told(record: Record) -> str:
    """Describe the result of a search."""
    found = record.search
    if found is None:
        return ""
    bar = "" if found.bar is None else f" to keep {found.metric} at {found.bar:.6g}"
    best = (
        "no model keeps it"
        if found.best is None
        else f"the fastest model that keeps it is {times(found.best.speedup)} as fast"
    )
    return f"{len(found.points)} models were tried in {found.seconds:.0f} s{bar}; {best}."


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table of several runs.

    Attributes:
        name: What is compared.
        cells: The text of each run.
        best: The runs with the best value; none where all values are equal or no value is better.
    """

    name: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()


def run_rows(records: Sequence[Record]) -> list[Row]:
    """Return a row for each number of the headline, with a column for each run."""
    heads = [record.headline for record in records]
    labelled = [None if record.judged is None else record.judged.labelled for record in records]
    drops = [None if record.judged is None else record.judged.predicted_drop for record in records]
    right = [None if each is None else each.int8_correct / each.items for each in labelled]
    conversions = [sum(row.int8_us for row in r.times if not row.units) if r.times else None for r in records]
    rows = [
        _better("speed", [head.speedup for head in heads], times, within=NOISE),
        _plain("float, one run", (milliseconds(head.float_ms) for head in heads)),
        _better("INT8, one run", [head.int8_ms for head in heads], milliseconds, least=True, within=NOISE),
        _plain("float file", (size_text(head.float_bytes) for head in heads)),
        _better("INT8 file", [head.int8_bytes for head in heads], size_text, least=True, within=NOISE),
        _plain("right before", (NONE if row is None else percent(row.float_correct / row.items) for row in labelled)),
        _better("right after", right, percent),
        _plain("broken, fixed", (NONE if each is None else f"{each.broken}, {each.fixed}" for each in labelled)),
        _better("predicted drop, without labels", drops, drop_of, least=True),
        _better("equal predictions", [head.agreement for head in heads], percent),
        _better("SQNR of the worst output", [head.sqnr_db for head in heads], decibels),
        _plain("products in integers", (percent(head.mac_share_int8, 1) for head in heads)),
        _plain("nodes in integers", (f"{h.int8_nodes} of {h.int8_nodes + h.float_nodes}" for h in heads)),
        _better("conversions and layout, one run", conversions, microseconds, least=True, within=NOISE),
        _plain("model", (os.path.basename(record.model) for record in records)),
        _plain("effort", (head.effort or NONE for head in heads)),
        _plain("ranges", (head.calibration or NONE for head in heads)),
        _plain("form", (head.format for head in heads)),
        _plain("placement", (head.placement for head in heads)),
    ]
    return [row for row in rows if any(cell != NONE for cell in row.cells)]


def _plain(name: str, cells: Iterable[str]) -> Row:
    """Return a row without a better value."""
    return Row(name, tuple(cells))


def _better(
    name: str, values: Sequence[T | None], text: Callable[[T], str], *, least: bool = False, within: float = 0.0
) -> Row:
    """Return a row that marks the best value, and values that are as good.

    Args:
        name: What is compared.
        values: The value of each run; None where it is unknown.
        text: Returns a value as text; values with equal texts are equal.
        least: Whether the least value is the best.
        within: The relative difference from the best value up to which a value is as good.
    """
    cells = tuple(NONE if value is None else text(value) for value in values)
    known = {index: value for index, value in enumerate(values) if value is not None}
    if not known:
        return Row(name, cells)
    best = (min if least else max)(known.values())
    good = {index for index, value in known.items() if text(value) == text(best) or abs(value - best) <= within * best}
    return Row(name, cells, frozenset(good if len(good) < len(known) else ()))


def short_places(places: Sequence[str]) -> list[str]:
    """Return the ends of places that differ: ``sample 84`` of ``/data/calib.npz, sample 84``.

    The parts that all places begin with are left out: folders, and the file before a sample. One place keeps its last
    part.
    """
    parts = [re.split(r"(?<=/)|(?<=, )", place) for place in places]
    shared = sum(1 for _ in takewhile(lambda row: len(set(row)) == 1, zip(*parts, strict=False)))
    return ["".join(each[min(shared, len(each) - 1) :]) for each in parts]
