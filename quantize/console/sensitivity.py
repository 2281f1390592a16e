"""A `Sensitivity` as tables: the units and tensors that cost most accuracy, and the causes."""

from __future__ import annotations

import math

from rich.table import Table

from ...system.printable import number_of
from ..sensitivity.result import Sensitivity, TensorRow, UnitRow
from .terminal import Terminal

ROWS = 20  # units and tensors in a table without --all


def print_sensitivity(found: Sensitivity, *, everything: bool = False) -> None:
    """Print units and tensors on stdout, worst first.

    Args:
        found: The result of `measure_sensitivity`.
        everything: Whether to print all rows.
    """
    console = Terminal()
    outputs, calibrated = number_of(len(found.outputs), "output"), number_of(found.calibrated, "sample")
    console.print(
        f"all in integers: {decibels_cell(found.sqnr_db)} dB at the worst of {outputs}; "
        f"ranges by {found.calibration} on {calibrated}, each trial on {found.samples}"
    )
    if found.units:
        console.print()
        _print_units(console, found, len(found.units) if everything else ROWS)
    if found.tensors:
        console.print()
        _print_tensors(console, found, len(found.tensors) if everything else ROWS)
    for note in found.notes:
        console.print(f"note: {note}")


def decibels_cell(value: float | None) -> str:
    """Return an SQNR in dB as a cell of a table, without its unit.

    >>> decibels_cell(12.345), decibels_cell(math.inf), decibels_cell(-math.inf), decibels_cell(None)
    ('12.3', 'exact', 'lost', '')
    """
    if value is None:
        return ""
    return f"{value:.1f}" if math.isfinite(value) else "exact" if value > 0 else "lost"


def _print_units(console: Terminal, found: Sensitivity, rows: int) -> None:
    """Print the table of units."""
    console.print("units, dB")
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for column in ("alone", "gain"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("unit")
    table.add_column("operator", no_wrap=True)
    table.add_column("evidence")
    for row in found.units[:rows]:
        table.add_row(decibels_cell(row.sqnr_db), _gain(found, row), row.name, row.operator, row.verdict)
    console.print(table)
    _print_rest(console, len(found.units) - rows)


def _print_tensors(console: Terminal, found: Sensitivity, rows: int) -> None:
    """Print the table of tensors."""
    console.print("tensors, dB")
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for column in ("alone", "own"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("tensor")
    table.add_column("range", no_wrap=True)
    table.add_column("evidence")
    for row in found.tensors[:rows]:
        table.add_row(
            decibels_cell(row.sqnr_db),
            decibels_cell(row.own_sqnr_db),
            row.name,
            _range(row),
            row.verdict,
        )
    console.print(table)
    _print_rest(console, len(found.tensors) - rows)


def _gain(found: Sensitivity, row: UnitRow) -> str:
    """Return the gain in SQNR if a unit is left in float, as text."""
    gain = found.gain_db(row)
    if gain is None:
        return ""
    return f"{gain:+.1f}" if math.isfinite(gain) else "all" if gain > 0 else ""


def _range(row: TensorRow) -> str:
    """Return the range of a tensor as text."""
    return f"{row.lo:.3g}..{row.hi:.3g}"


def _print_rest(console: Terminal, left: int) -> None:
    """Print how many rows are left out."""
    if left > 0:
        console.print(f"and {left} with less noise; --all lists them")
