"""A transform's page, made from its signature and docstring."""

from __future__ import annotations

from typing import Any

from .registry import REQUIRED, Transform


def describe(transform: Transform) -> dict[str, Any]:
    """Return a transform as plain JSON values."""
    options = [
        {
            "name": option.name,
            "type": option.type.__name__,
            "required": option.default is REQUIRED,
            "default": None if option.default is REQUIRED or option.default in (float("inf"),) else option.default,
        }
        for option in transform.options.values()
    ]
    return {
        "name": transform.name,
        "summary": transform.doc.splitlines()[0],
        "doc": transform.doc,
        "options": options,
        "after": list(transform.after),
        "changes_io": transform.changes_io,
        "changes_values": transform.changes_values,
    }


def page(transform: Transform) -> str:
    """Return what ``requant transforms NAME`` prints."""
    lines = [f"{transform.name}", "", transform.doc]
    if transform.options:
        lines += ["", "Types and defaults:"]
        for option in transform.options.values():
            kind = "names, may be repeated" if option.type is tuple else option.type.__name__
            default = "required" if option.default is REQUIRED else f"default {_shown(option.default)}"
            lines.append(f"  {option.name}: {kind}, {default}")
    if transform.after:
        lines += ["", "Comes after: " + ", ".join(transform.after)]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Write a default as a pipeline would."""
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"
