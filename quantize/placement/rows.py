"""The rows of a result about its placement."""

from __future__ import annotations

from collections.abc import Iterator

from ..accuracy.verdict import Row
from ..job import Placement


def placement_rows(placement: Placement) -> Iterator[Row]:
    """Yield the method of placement, its trials, and the predicted time."""
    if not placement.served:
        predicted = "" if placement.predicted_ms is None else f"; sum of costs {placement.predicted_ms:.2f} ms"
        relieved = "; then units to float for accuracy" if placement.relieved else ""
        yield "placement", placement.how + _timed_plans(placement) + predicted + relieved
        return
    first = placement.served[0]
    yield "placement", f"{placement.how}: {first.chosen}, of {len(first.tried)} plans"
    for each in placement.served:
        other = f"; with its own plan, {each.own}: {each.tried[each.own]:.2f} ms" if each.own != each.chosen else ""
        yield f"placement, {each.name}", f"{each.tried[each.chosen]:.2f} ms{other}"


def _timed_plans(placement: Placement) -> str:
    """Return the chosen plan, its time, the other plans, and why a faster one was not taken; empty without timed ones."""
    tried = placement.tried
    if not placement.chosen:
        return ""
    others = [f"{name!r} {ms:.2f}" for name, ms in tried.items() if name != placement.chosen]
    text = f": {placement.chosen!r}, {tried[placement.chosen]:.2f} ms"
    text += f", of {len(tried)} plans (others: {', '.join(others)})" if others else ""
    fastest = min(tried, key=tried.__getitem__)
    if tried[fastest] == tried[placement.chosen]:
        return text
    return f"{text}; {fastest!r} gains too little for its noise, for native operators, or beside the error of the clock"
