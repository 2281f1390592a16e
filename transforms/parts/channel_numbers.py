"""Numbers of channels, in classes of channels that can only be removed together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]


class Classes:
    """Classes of numbered channels, as a forest: each number points to a number of its class."""

    def __init__(self) -> None:
        """Begin without numbers."""
        self._parents: list[int] = []
        self._pinned: list[Numbers] = []

    def new(self, count: int) -> Numbers:
        """Return new numbers, each in a class of its own."""
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return np.arange(first, first + count)

    def of(self, numbers: Numbers) -> Numbers:
        """Return the class of each number: one of the numbers of this class."""
        return np.array([self._root(int(number)) for number in numbers], np.int64)

    def _root(self, number: int) -> int:
        parents = self._parents
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    def join(self, numbers: Numbers, others: Numbers) -> None:
        """Make one class of the classes of two numbers, for each place of two lists of one length."""
        for one, other in zip(self.of(numbers), others, strict=True):
            self._parents[self._root(int(other))] = self._root(int(one))

    def pin(self, numbers: Numbers) -> None:
        """Keep the classes of these numbers."""
        self._pinned.append(numbers)

    def pinned(self) -> npt.NDArray[np.bool_]:
        """Return for each number whether it is the name of a class that must stay."""
        stays = np.zeros(len(self._parents), bool)
        for numbers in self._pinned:
            stays[self.of(numbers)] = True
        return stays

    def bundles(self, tensors: Iterable[Numbers]) -> list[Numbers]:
        """Return the classes in lists: those of a list occur in the same tensors.

        Args:
            tensors: The numbers of the channels of each tensor.
        """
        group, following = np.full(len(self._parents), -1), 0
        for numbers in tensors:
            members = np.unique(self.of(numbers))
            before, place = np.unique(group[members], return_inverse=True)
            group[members] = following + place
            following += len(before)
        named = np.flatnonzero(group >= 0)
        order = named[np.argsort(group[named], kind="stable")]
        return [part for part in np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if part.size]
