"""Transforms of other distributions, which the entry-point group ``requant.transforms`` names."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from .groups import GROUPS
from .registry import REGISTRY

ENTRY_POINTS = "requant.transforms"

LOADED: dict[tuple[str, str], str] = {}
"""By name and value of the entry points that were imported, what was wrong; nothing where all went well."""


def load_plugins() -> tuple[str, ...]:
    """Import what other distributions register, each once per process, in the order of their names.

    A plug-in that fails leaves nothing behind, neither transforms nor steps of groups, and nothing else fails for it:
    one line of the log ``requant`` (on stderr, where no handler takes it) says what is wrong with it.

    Returns:
        What is wrong with those that failed, a line each.
    """
    for entry in _found():
        key = entry.name, entry.value
        if key not in LOADED:
            LOADED[key] = ""  # at once: a plug-in may ask for a transform while it is imported
            LOADED[key] = _load(entry)
    return tuple(filter(None, LOADED.values()))


@cache
def _found() -> tuple[EntryPoint, ...]:
    """Return the entry points of all installed distributions."""
    return tuple(sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: (entry.name, entry.value)))


def _load(entry: EntryPoint) -> str:
    """Import a plug-in, check that the groups it joined can still run, and return what is wrong with it."""
    from .pipeline import parse_groups

    transforms, groups = dict(REGISTRY), {name: list(steps) for name, steps in GROUPS.items()}
    try:
        entry.load()
        for name in [name for name, steps in GROUPS.items() if steps != groups.get(name)]:
            parse_groups(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - anything may go wrong in somebody else's module
        for table, before in ((REGISTRY, transforms), (GROUPS, groups)):
            table.clear()
            table.update(before)  # type: ignore[arg-type]
        said = " ".join(str(error).partition("\n")[0].split())
        message = f"plug-in {entry.name!r} ({entry.value}) is left out: {type(error).__name__}: {said}"
        logging.getLogger("requant").warning("requant: %s", message)
        return message
    return ""
