"""Pages about transforms and groups, made from signatures and docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..registry import REQUIRED, Option, Transform
from .groups import GROUPS, groups_of, members
from .pipeline import parse_groups

SECTION = re.compile(r"^(Before|After|Left alone|Options|Raises|Note|Notes):[ ]*(.*)$")


def describe(transform: Transform) -> dict[str, Any]:
    """Return a transform as plain JSON values."""
    parts = sections(transform.doc)
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
        "before": parts.get("Before"),
        "result": parts.get("After"),
        "left_alone": parts.get("Left alone"),
        "options": options,
        "after": list(transform.after),
        "groups": dict(groups_of(transform.name)),
        "changes_io": transform.changes_io,
        "changes_values": transform.changes_values,
    }


def sections(doc: str) -> dict[str, str]:
    """Return the text of each section of a docstring by title; the text before the first section is under ``""``.

    >>> sections("Do it.\\n\\nBefore:  a\\nAfter:   b\\n    c\\nLeft alone: d.")
    {'': 'Do it.', 'Before': 'a', 'After': 'b\\n    c', 'Left alone': 'd.'}
    """
    texts: dict[str, list[str]] = {"": []}
    title = ""
    for line in doc.splitlines():
        match = SECTION.match(line)
        if match is not None:
            title = match[1]
        texts.setdefault(title, []).append(match[2] if match is not None else line)
    return {title: "\n".join(lines).strip("\n") for title, lines in texts.items()}


def page(transform: Transform) -> str:
    """Return the page that ``requant transforms NAME`` prints."""
    lines = [f"{transform.name}", "", transform.doc]
    if transform.options:
        lines += ["", "Types and defaults:"]
        lines += [f"  {_typed(option)}" for option in transform.options.values()]
    lines += [f"\n{sentence}" for sentence in _promises(transform)]
    if runs := groups_of(transform.name):
        lines += ["", "Groups: " + ", ".join(f"{group} (phase {phase})" for group, phase in runs)]
    if transform.after:
        lines += ["", "Comes after: " + ", ".join(transform.after)]
    return "\n".join(lines)


def _typed(option: Option) -> str:
    """Return the type and the default of an option as text."""
    kind = "names, may be repeated" if option.type is tuple else option.type.__name__
    return f"{option.name}: {kind}, " + (
        "required" if option.default is REQUIRED else f"default {_shown(option.default)}"
    )


def _promises(transform: Transform) -> list[str]:
    """Return sentences about what the transform may change."""
    io = ["Inputs or outputs of the graph may differ afterwards."] if transform.changes_io else []
    return io + (["Results may differ by more than float rounding."] if transform.changes_values else [])


def describe_group(group: str) -> dict[str, Any]:
    """Return a group as plain JSON values."""
    steps = parse_groups(group)
    pairs = zip(members(group), steps.steps, strict=True)
    return {
        "name": group,
        "pipeline": str(steps),
        "steps": [{"phase": member.phase, "step": str(step)} for member, step in pairs],
    }


REFERENCE = """\
# Transforms

<!-- Made by `requant transforms --markdown > docs/transforms.md` from the docstrings. Edit the docstrings. -->

`requant transform IN OUT --transforms 'NAME(option=value, ...) NAME'` runs transforms one after the other.
`requant transforms NAME` prints one of these pages; `requant transforms --json` prints all of them as data. Each
transform also has the option `ignore_errors=true`: if the transform fails, the run continues with the model from before
this step. Names that may be repeated are written `op=A, op=B` or `op="A,B"`. [tools.md](tools.md) explains the grammar,
and [plugins.md](plugins.md) explains how to add a transform of your own.
"""


def reference(transforms: Iterable[Transform]) -> str:
    """Return docs/transforms.md."""
    ordered = sorted(transforms, key=lambda transform: transform.name)
    lines = [REFERENCE, "## Groups", ""]
    lines += [
        "Each group stands for a pipeline, in the order of the phases; `requant transform IN OUT --group NAME` runs it."
    ]
    for group in sorted(GROUPS):
        lines += ["", f"`{group}`:", "", *(f"    {step}" for step in parse_groups(group).steps)]
    lines += ["", "## All transforms", "", "| transform | what it does |", "|---|---|"]
    for transform in ordered:
        summary = transform.doc.splitlines()[0].replace("|", "\\|")
        lines.append(f"| [`{transform.name}`](#{transform.name}) | {summary} |")
    for transform in ordered:
        lines += ["", *_chapter(transform)]
    return "\n".join(lines) + "\n"


def _chapter(transform: Transform) -> list[str]:
    """Return the chapter of docs/transforms.md about a transform; code and formulas keep their layout."""
    summary, _, rest = transform.doc.partition("\n")
    lines = [f"### {transform.name}", "", summary, ""]
    if rest.strip():
        lines += ["```text", *rest.strip("\n").splitlines(), "```", ""]
    if transform.options:
        lines += ["| option | type | default |", "|---|---|---|"]
        for option in transform.options.values():
            kind, _, default = _typed(option).partition(": ")[2].rpartition(", ")
            lines.append(f"| `{option.name}` | {kind} | {default.removeprefix('default ')} |")
        lines.append("")
    remarks = _promises(transform)
    if runs := groups_of(transform.name):
        remarks.append("Runs in " + ", ".join(f"`{group}` (phase {phase})" for group, phase in runs) + ".")
    if transform.after:
        remarks.append("Comes after " + ", ".join(f"[`{name}`](#{name})" for name in transform.after) + ".")
    return [*lines, " ".join(remarks)] if remarks else lines[:-1]


def _shown(value: Any) -> str:
    """Return a default value as pipeline text."""
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"
