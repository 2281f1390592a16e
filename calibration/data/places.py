"""Pick samples at places that follow no pattern."""

from __future__ import annotations

from collections.abc import Sequence

GOLDEN = (5**0.5 - 1) / 2  # its multiples, without their whole parts, repeat no pattern and fill 0..1 evenly


def one_of_each_part(positions: Sequence[int], count: int) -> list[int]:
    """Return `count` positions, ascending, one from each of as many parts.

    The place in the part moves by the golden ratio from part to part. The same place in each part would be one kind of
    samples where kinds alternate, such as images and their mirror images: what is learned would come from the other
    kind.
    """
    found = []
    for index in range(count):
        first, end = (each * len(positions) // count for each in (index, index + 1))
        found.append(positions[first + int((index + 0.5) * GOLDEN % 1 * (end - first))])
    return found
