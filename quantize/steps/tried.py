"""Keep the models that a search has tried in a file, so that an interrupted search can continue."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ... import RequantError
from ...calibration.range_files.decoding import Finite, Natural, Number, convert, load_json, plain_number
from ...system.writing import write_atomically
from ...transforms.int8.plan import Plan
from ..accuracy.frontier import Frontier, Point


@dataclass(frozen=True, slots=True)
class _Row:
    """A `Point` in the file."""

    price: Finite
    value: Number
    speedup: Finite
    int8_units: Natural
    kept: bool
    digest: str


@dataclass(frozen=True, slots=True)
class _State:
    """The file with the models that a search has tried, for the search whose digest is `key`."""

    key: str
    points: tuple[_Row, ...]


def plan_key(plan: Plan) -> str:
    """Return a digest of the implementations of a plan."""
    text = json.dumps([[unit.name, plan.impl(unit).value] for unit in plan.units])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save_tried(path: Path, key: str, frontier: Frontier) -> None:
    """Save the models that a search has tried.

    Args:
        path: The file; a link is left alone.
        key: The digest of the search.
        frontier: The models.
    """
    if path.is_symlink():  # writing would replace the file that it names
        return
    # the next run tries models without a score again
    rows = [{**asdict(point), "value": plain_number(point.value)} for point in frontier.scored]
    write_atomically(path, json.dumps({"key": key, "points": rows}).encode(), output=False)


def load_tried(path: Path, key: Callable[[], str], plan_at: Callable[[float], Plan]) -> tuple[Point, ...]:
    """Return the models that an interrupted search of the same model, data and goal has tried.

    Costs are measured again, so a price may give another plan now; then its model is tried again.

    Args:
        path: The file that `save_tried` has written.
        key: Gives the digest of the search.
        plan_at: Gives the cheapest plan at a price of noise.
    """
    try:
        found = convert(load_json(path, "state of a search"), _State, f"{path}: malformed state of a search")
    except RequantError as error:
        logging.getLogger("requant").warning("requant: %s; the search begins anew", error)
        return ()
    rows = found.points if found.key == key() else ()
    same = (row for row in rows if plan_key(plan_at(row.price)) == row.digest)
    return tuple(Point(**{**asdict(row), "value": float(row.value)}) for row in same)
