"""The sentences and table rows of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..model.files import size_text
from .numbers import NONE, decibels, microseconds, milliseconds, percent, points, times
from .record import Headline, Judged, Record


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


def cards(record: Record) -> list[Card]:
    """Return the headline: accuracy, speed, size and the share of integer products."""
    head = record.headline
    smaller = head.float_bytes / head.int8_bytes if head.int8_bytes else None
    nodes = head.int8_nodes + head.float_nodes
    return [
        _accuracy(record),
        _speed(head),
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
        before, after = found.float_correct / found.items, found.int8_correct / found.items
        line = f"{percent(before)} → {percent(after)} right, {found.items} items"
        return Card("Accuracy", points(after - before).removesuffix(" points"), "points of top-1", (line, noise))
    if not head.samples:
        return Card("Accuracy", NONE, "", ("not measured: there are no data",))
    if head.agreement is not None:
        return Card("Accuracy", percent(head.agreement), "agree", (f"of {head.predictions} predictions", noise))
    big = "equal" if head.sqnr_db is None else decibels(head.sqnr_db)
    return Card("Accuracy", big, "at the worst output", (f"float against INT8 on {head.samples} samples",))


def _noise_line(head: Headline) -> str:
    """Return the SQNR as a line."""
    if not head.samples:
        return ""
    noise = "outputs without noise" if head.sqnr_db is None else f"{decibels(head.sqnr_db)} at the worst output"
    return noise


def _speed(head: Headline) -> Card:
    """Return the speed."""
    if head.float_ms is None:
        return Card("Speed", NONE, "", ("not measured: the models could not be run",))
    threads = "1 thread" if head.threads == 1 else f"{head.threads} threads" if head.threads else "all threads"
    batch = f", batches of {head.batch}" if head.batch > 1 else ""
    lines = (
        f"{milliseconds(head.float_ms)} → {milliseconds(head.int8_ms)}",
        f"{head.runs} runs each, {threads}{batch}",
    )
    return Card("Speed", times(head.speedup), "as fast", lines)


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
        between = f"95 % interval {drop_of(low).removesuffix(' points')} to {drop_of(high)}"
        rows.append(("drop by labels", f"{drop_of(drop)} on {found.items} items; {between}"))
        rows.append(("items", f"{found.broken} broken, {found.fixed} fixed"))
    if judged.predicted_drop is not None:
        rows.append(
            ("predicted drop, without labels", f"{drop_of(judged.predicted_drop)} on {judged.predictions} predictions")
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
    return f"{judged.samples} samples of {judged.data}{differing}. {kind}.{none}"


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


def run_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return a row for each number of the headline, with a column for each run."""
    heads = [record.headline for record in records]
    labelled = [None if record.judged is None else record.judged.labelled for record in records]
    foretold = [None if record.judged is None else record.judged.predicted_drop for record in records]
    rows: list[tuple[str, ...]] = [
        ("model", *(record.model for record in records)),
        ("speed", *(times(head.speedup) for head in heads)),
        ("float, one run", *(milliseconds(head.float_ms) for head in heads)),
        ("INT8, one run", *(milliseconds(head.int8_ms) for head in heads)),
        ("float file", *(size_text(head.float_bytes) for head in heads)),
        ("INT8 file", *(size_text(head.int8_bytes) for head in heads)),
        ("right before", *(NONE if each is None else percent(each.float_correct / each.items) for each in labelled)),
        ("right after", *(NONE if each is None else percent(each.int8_correct / each.items) for each in labelled)),
        ("broken, fixed", *(NONE if each is None else f"{each.broken}, {each.fixed}" for each in labelled)),
        ("predicted drop, without labels", *(NONE if each is None else drop_of(each) for each in foretold)),
        ("equal predictions", *(percent(head.agreement) for head in heads)),
        ("SQNR of the worst output", *(decibels(head.sqnr_db) for head in heads)),
        ("products in integers", *(percent(head.mac_share_int8, 1) for head in heads)),
        ("nodes in integers", *(f"{h.int8_nodes} of {h.int8_nodes + h.float_nodes}" for h in heads)),
        ("effort", *(head.effort or NONE for head in heads)),
        ("ranges", *(head.calibration or NONE for head in heads)),
        ("form", *(head.format for head in heads)),
        ("placement", *(head.placement for head in heads)),
    ]
    conversions = [sum(row.int8_us for row in record.times if not row.units) for record in records]
    if any(conversions):
        rows.append(("conversions and layout, one run", *(microseconds(each) for each in conversions)))
    return [row for row in rows if any(cell != NONE for cell in row[1:])]
