"""Results of `quantize`, `compare`, `costs` and `ops` as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ...calibration.checks.findings import Finding
from ...calibration.model.state import Link, summary
from ...system.printable import number_of
from ...transforms.graphs.queries import MS
from ...transforms.int8.plan import Impl
from ..accuracy.compare import Comparison
from ..accuracy.frontier import Frontier
from ..accuracy.verdict import Row
from ..placement.costs import Costs
from ..result import Result
from ..tools.inspect.operators import OperatorFacts
from .terminal import Terminal, headless, styled, threads_text

ROWS = 30  # units whose costs are shown


def print_quantized(result: Result) -> None:
    """Print the result of `quantize_model` and the models of a search on stdout; the warnings about data on stderr."""
    _print_table(result.verdict, result.rows())
    if result.search is not None:
        print_frontier(result.search)
    print_findings(result.findings)


def print_comparison(found: Comparison) -> None:
    """Print the result of `compare_models` on stdout."""
    _print_table(found.verdict, found.rows())


def _print_table(verdict: str, rows: Sequence[Row]) -> None:
    """Print a verdict and the table below it."""
    console = Terminal()
    console.print(styled((verdict, "bold")))
    console.print(headless(rows))


def print_frontier(found: Frontier) -> None:
    """Print the models of a search: speed-up, metric, the best model, and the models that another one dominates."""
    console = Terminal()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("speed-up", found.metric, "int8 units", "price of noise", ""):
        table.add_column(title, justify="left" if not title else "right")
    worth, best = set(found.frontier), found.best
    table.add_row("1.00x", f"{found.before:.6g}", "0", "", "float")
    for point in found.points:
        marks = ["best"] if point == best else []
        if point not in found.scored:
            marks += ["does not run, or has no score"]
        else:
            marks += [] if point.kept else ["misses the bar"]
            marks += [] if point in worth else ["another model is faster and better"]
        row = (f"{point.speedup:.2f}x", f"{point.value:.6g}", str(point.int8_units), f"{point.price:.3g}")
        table.add_row(*row, ", ".join(marks))
    console.print(table)
    more = "" if found.done else "; the time is up: repeat the command with --force to continue"
    bar = f"bar: {found.metric} {found.bar:.6g} on the evaluation data"
    console.print(f"{bar}, {number_of(len(found.points), 'model')} in {found.seconds:.0f} s{more}")
    if found.same_data:
        console.print(
            f"note: {found.same_data:.0%} of the evaluation data are calibration data too: the metric is too optimistic"
        )


def print_costs(found: Sequence[Costs]) -> None:
    """Print costs by machine, on stdout."""
    console = Terminal()
    if not found:
        console.print("there are no stored costs")
    for costs in found:
        machine = costs.machine
        table = Table(box=None, pad_edge=False)
        runtime = f"{machine.described}, {threads_text(machine.threads)}"
        console.print(f"{machine.cpu}, {runtime}, microseconds")
        table.add_column("unit")
        for impl in Impl:
            table.add_column(impl.value, justify="right")
        expensive = sorted(costs.rows.items(), key=lambda item: -max(item[1].values()))
        for key, row in expensive[:ROWS]:
            table.add_row(key, *(f"{row[impl.value]:.1f}" if impl.value in row else "" for impl in Impl))
        console.print(table)
        if len(expensive) > ROWS:
            console.print(f"and {len(expensive) - ROWS} cheaper units; --json lists all")


def print_operators(found: Sequence[OperatorFacts]) -> None:
    """Print operators with their kernels, on stdout."""
    table = Table(box=None, pad_edge=False)
    for column in ("operator", "becomes", "why"):
        table.add_column(column)
    for facts in found:
        kernels = [*dict.fromkeys(facts.kernels.values()), *(f"{name} (not installed)" for name in facts.missing)]
        short = [name.removeprefix(f"{MS}.") for name in kernels]  # omit the runtime's own domain
        name = f"{facts.operator} ({facts.domain})" if facts.domain else facts.operator
        table.add_row(name, ": ".join(filter(None, (facts.does, ", ".join(short)))), facts.why)
    Terminal().print(table)


def print_state(links: Sequence[Link]) -> None:
    """Print the state that is carried from sample to sample."""
    print_notes([f"state: {text}" for text in summary(links)])


def print_notes(notes: Sequence[str]) -> None:
    """Print remarks, a line each."""
    Terminal(err=True).print_lines(f"note: {note}" for note in notes)


def print_findings(found: Sequence[Finding]) -> None:
    """Print the warnings about data, with the growth of ranges that still grow."""
    console = Terminal(err=True)
    for finding in found:
        mark = ("warning:", "bold") if finding.severity == "warning" else "note:"
        console.print(styled(mark, f" {finding.message}"), soft_wrap=True)
        if finding.curve:
            console.print(_growth(finding.curve))


def _growth(curve: Sequence[tuple[int, float]]) -> Table:
    """Return a chart of the width of ranges by number of samples."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("samples", justify="right")
    table.add_column("width", justify="right")
    table.add_column(no_wrap=True)
    for samples, share in curve:
        table.add_row(str(samples), f"{share:.2f}", bar(share))
    return table


def bar(share: float, width: int = 32) -> str:
    """Return a share of 0..1 as a bar, in eighths of a column.

    >>> bar(0.5, 4), bar(0.3, 4)
    ('██', '█▎')
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
