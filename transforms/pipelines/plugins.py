"""Transforms of other distributions, which the entry-point group ``requant.transforms`` names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points

from ... import UnknownNameError
from ...system.given import check_kind
from ..registry import REGISTRY, Transform
from .groups import GROUPS

ENTRY_POINTS = "requant.transforms"

LOADED: dict[tuple[str, str], str] = {}
"""The error of each imported entry point, by its name and value; empty where the import succeeded."""

Check = Callable[[str], object]
"""Raises an error when the group of this name has no valid pipeline."""


def load_plugins(check: Check) -> tuple[str, ...]:
    """Import the plug-ins, each once per process, in the order of their names.

    A plug-in that fails leaves no transforms and no steps of groups behind, and other plug-ins still load. The logger
    ``requant`` writes one line about the failure (to stderr when no handler is set).

    Args:
        check: Called with the name of each group that a plug-in joined.

    Returns:
        One line for each plug-in that failed.
    """
    for entry in _found():
        key = entry.name, entry.value
        if key not in LOADED:
            LOADED[key] = ""  # set before the import, which may look up a transform and so come here again
            LOADED[key] = _load(entry, check)
    return tuple(filter(None, LOADED.values()))


def lookup(name: str, check: Check) -> Transform:
    """Return the transform registered as `name`; an unknown name loads the plug-ins first.

    Args:
        name: The name of the transform.
        check: As for `load_plugins`.

    Raises:
        UnknownNameError: No transform has this name; the message lists similar names.
    """
    check_kind(name, str, "the name of a transform must be a text")
    if name not in REGISTRY:
        load_plugins(check)
    if name not in REGISTRY:
        raise UnknownNameError("transform", name, REGISTRY)
    return REGISTRY[name]


@cache
def _found() -> tuple[EntryPoint, ...]:
    """Return the entry points of all installed distributions."""
    try:
        found = list(entry_points(group=ENTRY_POINTS))
    except Exception:  # noqa: BLE001 - the list of any distribution may be damaged, and its parser raises what it meets
        found = [entry for each in distributions() for entry in _readable(each)]
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.value)))


def _readable(distribution: Distribution) -> list[EntryPoint]:
    """Return the entry points of a distribution; none if the list is damaged, with a line on the logger ``requant``."""
    try:
        return [entry for entry in distribution.entry_points if entry.group == ENTRY_POINTS]
    except Exception as error:  # noqa: BLE001 - as above
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        message = "requant: the entry_points.txt of an installed distribution is damaged, and left out: %s"
        logging.getLogger("requant").warning(message, reason)
        return []


def _load(entry: EntryPoint, check: Check) -> str:
    """Import a plug-in and check the groups that it joined; return the error message, empty on success."""
    transforms, groups = dict(REGISTRY), {name: list(steps) for name, steps in GROUPS.items()}
    try:
        entry.load()
        for name in [name for name, steps in GROUPS.items() if steps != groups.get(name)]:
            check(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in's module may raise anything
        for table, before in ((REGISTRY, transforms), (GROUPS, groups)):
            table.clear()
            table.update(before)  # type: ignore[arg-type]
        reason = " ".join(str(error).partition("\n")[0].split())
        message = f"plug-in {entry.name!r} ({entry.value}) is left out: {type(error).__name__}: {reason}"
        logging.getLogger("requant").warning("requant: %s", message)
        return message
    return ""
