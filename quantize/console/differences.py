"""`Differences` as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..tools.inspect.diff import Differences

FIRST = 20  # differences of each kind and change that are shown without --all


def difference_lines(found: Differences, *, everything: bool = False) -> Iterator[str]:
    """Yield one line per difference: the first of each kind, or with `everything` all."""
    if found.equal:
        yield "equal"
        return
    counts = Counter((each.kind, each.change) for each in found.found)
    shown = Counter[tuple[str, str]]()
    for each in found.found:
        key = each.kind, each.change
        shown[key] += 1
        if everything or shown[key] <= FIRST:
            yield str(each)
        elif shown[key] == counts[key]:
            yield f"{each.change} {each.kind}: {counts[key] - FIRST} more; --all lists them"
