"""What an option is: its name, type, help and checks, for the command line and for ``requant.toml``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from typing import Any

from ... import RequantError
from ...system.given import MOST_ITEMS

MOST_THREADS = 2**12
"""The most threads of a session."""

GROUPS = ("data", "accuracy", "speed", "output", "advanced")
"""The groups of options in the help of a command."""
UNITS: Mapping[str, int] = {"": 0, "B": 0, "K": 1, "KB": 1, "M": 2, "MB": 2, "G": 3, "GB": 3, "T": 4, "TB": 4}
"""The power of 1000, or of 1024 with an ``i`` in the unit, by unit of a memory size."""


class Kind(Enum):
    """The type of an option's value: its description in errors, and the types that TOML may have for it."""

    FLAG = ("true or false", bool)
    INT = ("a whole number", int)
    INTS = ("a whole number or a list of whole numbers", int, list)
    """Whole numbers, separated by commas on the command line."""
    NUMBER = ("a number", int, float)
    AMOUNT = ("a number or a text", int, float, str)
    """A number, or the text of one with a unit; used as a text."""
    TEXT = ("a text", str)
    NAMES = ("a text or a list of names", str, list)
    """Names, separated by commas on the command line."""
    EACH = ("a text or a list of texts", str, list)
    """Texts; the option is repeated for each."""
    TABLE = ("a table of numbers or texts", dict)
    """Pairs; the option is repeated for each ``NAME=VALUE``."""

    @property
    def description(self) -> str:
        """The kind in words: ``"a whole number"``."""
        return str(self.value[0])

    def accepts(self, value: object) -> bool:
        """Return whether a value of a TOML file is of this kind."""
        if isinstance(value, bool) and self is not Kind.FLAG:
            return False
        item_type = int if self is Kind.INTS else str
        fit = all(type(item) is item_type for item in value) if isinstance(value, list) else True
        return fit and isinstance(value, self.value[1:])


@dataclass(frozen=True, slots=True)
class Option:
    """An option.

    Attributes:
        name: The name, with underscores.
        kind: The type of its value.
        help: Its meaning, in one line that fits beside an example of it.
        group: Its group in the help of a command, one of `GROUPS`.
        default: The value of an option that is not given; None without a default, see `unset`.
        unset: The effect of an option that is not given and has no default, in words: ``"all"``.
        choices: The only values of a text.
        least: The least value of a number.
        above: Whether a number must be more than `least`.
        most: The greatest value of a number.
        metavar: The value's name in the help of the command line; ``FILE`` completes to paths.
        more: Further help, shown by the command line alone.
        project: The default in a ``requant.toml``, if it differs.
        sample: An example value, if there is no default.
        parse: Converts the text; a RequantError refuses it.
    """

    name: str
    kind: Kind
    help: str
    group: str = "advanced"
    default: Any = None
    unset: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: bool = False
    most: float = 2**31 - 1
    metavar: str | None = None
    more: str = ""
    project: Any = None
    sample: Any = None
    parse: Callable[[str], Any] | None = None

    @property
    def flag(self) -> str:
        """The option on the command line: ``"--max-drop"``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def example(self) -> str:
        """The default, or else an example, as TOML."""
        values: tuple[Any, ...] = (self.project, self.sample, self.default, False if self.kind is Kind.FLAG else [])
        return json.dumps(next(value for value in values if value is not None))

    @property
    def comment(self) -> str:
        """The help in a ``requant.toml``: options are named by their keys."""
        choices = f" ({', '.join(self.choices)})" if self.choices else ""
        unset = f" Default: {self.unset}." if self.unset else ""
        text = f"{self.help.removesuffix('.')}{choices}.{unset}"
        return re.sub(r"--([a-z][a-z-]+)", lambda match: match[1].replace("-", "_"), text)

    def read(self, value: Any) -> Any:
        """Return a value of the command line or of a TOML file as the program uses it: lists become tuples.

        Raises:
            RequantError: The text cannot be parsed.
        """
        if isinstance(value, list | tuple):
            return tuple(value)
        if self.kind is Kind.NAMES:
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if self.kind is Kind.EACH:
            return (value,)
        if self.kind is Kind.AMOUNT:
            return str(value)
        return value if self.parse is None or not isinstance(value, str) else self.parse(value)


def parse_bytes(text: str) -> int:
    """Return a memory size in bytes.

    >>> parse_bytes("2GB"), parse_bytes("512 MiB"), parse_bytes("1000000")
    (2000000000, 536870912, 1000000)

    Raises:
        RequantError: The text is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else ""
    base, unit = (1024, unit.replace("IB", "B")) if unit.endswith("IB") else (1000, unit)
    if match is None or unit not in UNITS:
        raise RequantError(f"{text!r} is not a size in bytes; write for instance 2GB")
    size = float(match[1]) * base ** UNITS[unit]
    if size >= 2**63:
        raise RequantError(f"{text!r} is more memory than there can be; write for instance 2GB")
    return int(size)


def parse_batches(text: str) -> tuple[int, ...]:
    """Return batch sizes separated by commas.

    >>> parse_batches("1, 16")
    (1, 16)

    Raises:
        RequantError: A part is not a whole number, or the sizes are refused.
    """
    parts = [part.strip() for part in text.split(",")]
    wrong = next((part for part in parts if not re.fullmatch(r"[+-]?[0-9]{1,18}", part)), None)
    if wrong is not None:
        raise RequantError(f"{wrong!r} is not a whole number; write for instance 16, or 1,16")
    sizes = tuple(map(int, parts))
    check_batches(sizes)
    return sizes


def check_batches(sizes: tuple[int, ...]) -> None:
    """Refuse batch sizes that are no integers of 1 to `MOST_ITEMS`, repeated sizes, and no size at all.

    Raises:
        RequantError: The sizes are refused.
    """
    if not sizes:
        raise RequantError("batch needs at least one size")
    for size in sizes:
        if not isinstance(size, Integral):
            raise RequantError(f"batch must be an integer or several, not {size!r}")
    if min(sizes) < 1:
        raise RequantError(f"batch must be at least 1, not {min(sizes)}")
    if max(sizes) > MOST_ITEMS:
        raise RequantError(f"batch must be at most {MOST_ITEMS}, not {max(sizes)}")
    repeated = next((size for size in sizes if sizes.count(size) > 1), None)
    if repeated is not None:
        raise RequantError(f"batch {repeated} is given more than once")
