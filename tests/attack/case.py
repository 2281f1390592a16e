"""What an attack is: files in a folder, and commands that read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

Command = tuple[str, ...]
Writer = Callable[[Random, Path], list[Command]]
"""Writes the files of a case to a folder, and returns the commands that read them. A pure function of the generator."""


LOOKING = ("inspect", "view", "transform", "diff")
"""The commands that do not run the model."""


@dataclass(frozen=True, slots=True)
class Case:
    """One attack.

    Attributes:
        family: ``models``, ``data`` or ``files``.
        kind: The kind of damage, a row of the family's table.
        number: The number of the case in this family.
        seed: The seed of the run; with family, kind and number it determines every byte of the case.
        write: Writes the files.
        hungry: Whether the model itself asks for much memory when it runs.
        run: Runs the case, see `server.run_case`; None for the usual way.
    """

    family: str
    kind: str
    number: int
    seed: int
    write: Writer
    hungry: bool = False
    run: Callable[..., Outcome] | None = None

    @property
    def random(self) -> Random:
        """A generator that is the same in every run."""
        return Random(f"{self.seed} {self.family} {self.kind} {self.number}")

    @property
    def name(self) -> str:
        """The argument of ``--only`` that runs this case alone."""
        return f"{self.kind}:{self.number}"


@dataclass(frozen=True, slots=True)
class Ran:
    """What one command did.

    Attributes:
        command: The command line without the program.
        code: The exit code; negative for a signal.
        cpu: Seconds of CPU, with those of child processes.
        peak: The largest resident set of one process, in MB.
        problems: What breaks the contract, as ``class: detail``.
    """

    command: Command
    code: int
    cpu: float
    peak: float
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all commands of a case did. `fault` is an error of the harness itself; it is never expected."""

    family: str
    kind: str
    number: int
    ran: tuple[Ran, ...] = ()
    fault: str = ""

    @property
    def problems(self) -> list[str]:
        """Everything that breaks the contract."""
        return [*(["harness: " + self.fault] if self.fault else []), *(p for ran in self.ran for p in ran.problems)]


@dataclass(frozen=True, slots=True)
class Family:
    """A table of kinds of damage.

    Attributes:
        kinds: The writer of each kind.
        hungry: The kinds whose models ask for much memory when they run; they may use what the system allows.
        run: Runs a case of this family; None for the usual way.
        prepare: Makes the files that writers copy, once for each run, in a folder.
    """

    kinds: Mapping[str, Writer]
    hungry: frozenset[str] = frozenset()
    run: Callable[..., Outcome] | None = None
    prepare: Callable[[Path], None] = field(default=lambda folder: None)

    def cases(self, name: str, seed: int) -> Callable[[int], Case]:
        """Return a function from a number to its case. The kinds take turns."""
        kinds = sorted(self.kinds)

        def case(number: int) -> Case:
            kind = kinds[number % len(kinds)]
            return Case(name, kind, number, seed, self.kinds[kind], kind in self.hungry, self.run)

        return case
