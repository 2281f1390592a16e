"""The nodes that stayed float, and the rows of the table about them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...system.printable import one_line
from .verdict import Row

REASONS = 6  # rows about float nodes; the other nodes are counted
OPERATORS = 4  # operators that a row names
FIGURES = re.compile(r"""'[^']*'|"[^"]*"|-?\d+(\.\d+)?""")
"""Names and figures in a reason: without them, the reasons of different tensors are the same."""
NAME = 80  # the most characters of the name of a node in a row


@dataclass(frozen=True, slots=True)
class FloatNode:
    """A node that stayed float, and why.

    Attributes:
        name: Its name.
        operator: Its operator.
        reason: The reason, with its figures.
        kind: The code of the reason, equal for all nodes that stayed float for the same cause; empty for a reason of
            its own.
        us: Microseconds of its kernel in a run of the output, 0 if another node's kernel computes it; None if they
            were not measured.
        whole: Whether the reason is why no INT8 model was written at all, which the first line tells.
    """

    name: str
    operator: str
    reason: str
    kind: str = ""
    us: float | None = None
    whole: bool = False


def float_rows(nodes: Iterable[FloatNode]) -> Iterator[Row]:
    """Yield a row for each kind of reason for which nodes stayed float; the nodes with the most time come first."""
    groups: dict[str, list[FloatNode]] = {}
    for node in nodes:
        each = replace(node, operator="nodes", reason="see the first line", kind="") if node.whole else node
        groups.setdefault(each.kind or FIGURES.sub("", each.reason), []).append(each)
    ranked = sorted(groups.values(), key=lambda group: (-_microseconds(group), -len(group)))
    title = "float nodes"
    for group in ranked[:REASONS]:
        yield title, _alike(group)
        title = ""
    rest = [node for group in ranked[REASONS:] for node in group]
    if rest:
        yield "", f"{len(rest)} for other reasons{_together(rest)}; --json lists all"


def _alike(nodes: Sequence[FloatNode]) -> str:
    """Return nodes that stayed float for reasons of one kind as text: their number, an example, their time."""
    example = max(nodes, key=lambda node: node.us or 0.0)
    operators = [operator for operator, _ in Counter(node.operator for node in nodes).most_common()]
    more = f" and {len(operators) - OPERATORS} more" if len(operators) > OPERATORS else ""
    named = f"({'such as ' if len(nodes) > 1 else ''}{one_line(example.name, NAME)})"
    others = ", and alike" if len({node.reason for node in nodes}) > 1 else ""
    told = f"{len(nodes)} {', '.join(operators[:OPERATORS])}{more} {named}: {example.reason}{others}"
    return f"{told}{_together(nodes)}"


def _together(nodes: Sequence[FloatNode]) -> str:
    """Return the time of nodes as text; empty if it is below a microsecond or unknown."""
    spent = _microseconds(nodes)
    return f"; {spent:.0f} us {'together' if len(nodes) > 1 else 'in a run'}" if spent >= 1 else ""


def _microseconds(nodes: Sequence[FloatNode]) -> float:
    """Return the time of nodes as far as it is known."""
    return sum(node.us or 0.0 for node in nodes)
