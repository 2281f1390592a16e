"""Results of `quantize`, `compare`, `costs` and `ops` as tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from ...calibration.checks import Finding
from ...calibration.state import Link, summary
from ...transforms.ops import MS
from ...transforms.plan import Impl
from ..accuracy.compare import Comparison
from ..accuracy.drop import Versus
from ..accuracy.outputs import Accuracy
from ..accuracy.promise import is_sure
from ..model.files import size_text
from ..placement.costs import Costs
from ..result import Frontier, Result
from ..runtime.timing import Latency
from ..tools.inspect.operators import OperatorFacts
from .terminal import Terminal, headless, stacked, styled

ROWS = 30  # units whose costs are shown
SLOWEST = 3  # stages whose time is shown
REASONS = 12  # lines about float nodes; the others are counted


def print_quantized(result: Result) -> None:
    """Print the result of `quantize_model`, the warnings about its data, and the models of a search."""
    print_result(result)
    print_findings(result.findings)
    if result.search is not None:
        print_frontier(result.search)


def print_result(result: Result) -> None:
    """Print the result of `quantize_model`."""
    console = Terminal(err=True)
    table = headless()
    total = result.int8_nodes + len(result.float_nodes)
    kernels = ", ".join(f"{count} {name}" for name, count in result.kernels.items())
    table.add_row("output", f"{result.output} ({result.format})")
    forms = ", ".join(f"{count} {form}" for form, count in result.forms.items())
    table.add_row("int8 nodes", f"{result.int8_nodes} of {total}" + (f" (units: {forms})" if forms else ""))
    table.add_row("integer kernels", f"{result.mac_share_int8:.1%} of the multiply-accumulates ({kernels})")
    if result.ranges:
        table.add_row("ranges", result.ranges)
    _accuracy_rows(table, result.accuracy, f"on {result.accuracy.samples} samples of {result.data}")
    if result.promise is not None:
        kept = "kept" if result.promise.kept else ("missed", "bold")
        seen = "" if result.promise.apart else "; the same samples gave the ranges"
        table.add_row("accuracy", styled(kept, f", judged by {result.promise}{seen}"))
    for timed in result.latencies:
        _latency_row(table, timed)
    _native_row(table, result)
    _placement_row(table, result)
    _effort_row(table, result)
    if result.relieved:
        channels = sum(result.relieved.values())
        table.add_row("16-bit sums", f"{channels} channels of {len(result.relieved)} operators lost weight range")
    table.add_row("size", f"{size_text(result.float_bytes)} -> {size_text(result.int8_bytes)}")
    if result.rejected is not None:
        _accuracy_rows(table, result.rejected[0], "of the rejected int8 model")
        for timed in result.rejected_latencies:
            _latency_row(table, timed)
    console.print(table)
    _print_float_nodes(console, result)
    for note in (*result.placement.doubts, *result.notes):
        console.print(f"note: {note}")
    if result.verdict:
        console.print(styled(("not int8:", "bold"), f" {result.verdict}"))


def _native_row(table: Table, result: Result) -> None:
    """Add the native operators, the library that they need, and the time without it."""
    native = result.native
    if native is None:
        return
    joined = f", {native.joined} of them in one operator with a convolution" if native.joined else ""
    library = f"register {native.library}" if native.library else "their library is not here"
    table.add_row("native", f"{native.units} units{joined}; {library}, see 'requant kernels'")
    if native.stock_ms is not None and result.latency is not None:
        ratio = result.latency.float_ms / native.stock_ms
        table.add_row("", f"without this library {native.stock_ms:.3f} ms: {ratio:.2f}x")


def _effort_row(table: Table, result: Result) -> None:
    """Add the effort, its corrections, and the slowest stages."""
    if not result.seconds:
        return
    spent = sorted(((took, stage) for stage, took in result.seconds.items() if took >= 1), reverse=True)
    most = f" ({', '.join(f'{stage} {took:.0f}' for took, stage in spent[:SLOWEST])})" if spent else ""
    done = f": {', '.join(result.corrections)}" if result.corrections else ""
    table.add_row("effort", f"{result.effort}{done}; {sum(result.seconds.values()):.0f} s{most}")


def _placement_row(table: Table, result: Result) -> None:
    """Add the method of placement, its trials, and the predicted time."""
    placement = result.placement
    tried = ", ".join(f"{name} {ms:.2f} ms" for name, ms in placement.tried.items())
    predicted = "" if placement.predicted_ms is None else f"; sum of costs {placement.predicted_ms:.2f} ms"
    if not placement.served:
        relieved = "; then units to float for accuracy" if placement.relieved else ""
        table.add_row("placement", placement.how + (f" ({tried})" if tried else "") + predicted + relieved)
        return
    first = placement.served[0]
    table.add_row("placement", f"{placement.how}: {first.chosen}, of {len(first.tried)} plans")
    for each in placement.served:
        other = f"; with its own plan, {each.own}: {each.tried[each.own]:.2f} ms" if each.own != each.chosen else ""
        table.add_row(f"placement, {each.name}", f"{each.tried[each.chosen]:.2f} ms{other}")


def print_comparison(found: Comparison) -> None:
    """Print the result of `compare_models`."""
    console = Terminal(err=True)
    table = headless()
    if found.metric is not None:
        _metric_rows(table, found.metric)
    _accuracy_rows(table, found.accuracy, f"on {found.accuracy.samples} samples")
    for timed in found.latencies:
        _latency_row(table, timed)
    if found.state:
        table.add_row("state", ", ".join(summary(found.state)))
    console.print(table)


def _metric_rows(table: Table, found: Versus) -> None:
    """Add the scores in a metric, the drop with its interval, and the items behind it."""
    scale, unit, digits = (100, " points", 2) if found.metric.unit == "share" else (1, "", 4)
    unit = " dB" if found.metric.unit == "dB" else unit
    before, after = (
        (f"{found.before:.2%}", f"{found.after:.2%}") if scale == 100 else (f"{found.before:.4f}", f"{found.after:.4f}")
    )
    table.add_row(found.metric.name, f"{before} -> {after}")
    relative = "" if found.relative_drop is None else f" ({found.relative_drop:.2%} of the float model's)"
    within = (
        "; no interval"
        if found.interval is None
        else "; 95 % interval {:.{d}f} to {:.{d}f}".format(*(scale * end for end in found.interval), d=digits)
    )
    table.add_row("drop", f"{scale * found.drop:.{digits}f}{unit}{relative}{within} ({found.method})")
    if found.broken is not None:
        counted = f"{found.broken} broken, {found.fixed} fixed of {found.items}"
        table.add_row("items", f"{counted} (exact binomial p = {found.p_value:.3g})")
    for note in found.notes:
        table.add_row("note", note)


def print_frontier(found: Frontier) -> None:
    """Print the models of a search: speed-up, metric, the best model, and the models that another one dominates."""
    console = Terminal(err=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("speed-up", found.metric, "int8 units", "price of noise", ""):
        table.add_column(title, justify="left" if not title else "right")
    worth, best = set(found.frontier), found.best
    table.add_row("1.00x", f"{found.before:.6g}", "0", "", "float")
    for point in found.points:
        marks = ["best"] if point == best else []
        marks += [] if point.kept else ["misses the bar"]
        marks += [] if point in worth else ["another model is faster and better"]
        row = (f"{point.speedup:.2f}x", f"{point.value:.6g}", str(point.int8_units), f"{point.price:.3g}")
        table.add_row(*row, ", ".join(marks))
    console.print(table)
    more = "" if found.done else "; the time is up: repeat the command with --force to continue"
    console.print(f"bar: {found.metric} {found.bar:.6g}, {len(found.points)} models in {found.seconds:.0f} s{more}")
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
        table = Table(box=None, pad_edge=False, title_justify="left")
        runtime = f"ONNX Runtime {machine.runtime}, {machine.threads} thread(s)"
        table.title = f"{machine.cpu}, {runtime}, microseconds"
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
    for column, most in (("operator", 20), ("becomes", 16), ("kernels", 20), ("why", None)):
        table.add_column(column, overflow="fold", max_width=most)
    for facts in found:
        kernels = [*dict.fromkeys(facts.kernels.values()), *(f"{name} (not installed)" for name in facts.missing)]
        short = [name.removeprefix(f"{MS}.") for name in kernels]  # omit the runtime's own domain
        table.add_row(facts.name.removeprefix(f"{MS}."), facts.does, stacked(short), facts.why)
    Terminal().print(table)


def print_state(links: Sequence[Link]) -> None:
    """Print the state that is carried from sample to sample."""
    Terminal(err=True).print_lines(f"note: state: {text}" for text in summary(links))


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


def _accuracy_rows(table: Table, accuracy: Accuracy, where: str) -> None:
    """Add counts against labels, agreement, predicted drop, and SQNR."""
    labelled, agreed = accuracy.labelled, accuracy.agreement_interval
    if labelled is not None:
        before, after = labelled.float_accuracy, labelled.int8_accuracy
        table.add_row(
            "top-1", f"{before:.2%} -> {after:.2%} ({100 * (after - before):+.2f} points, {labelled.items} items)"
        )
        table.add_row(
            "items", f"{labelled.broken} broken, {labelled.fixed} fixed (exact binomial p = {labelled.p_value:.3g})"
        )
        low, high = labelled.drop_interval
        table.add_row("drop", f"{100 * (before - after):.2f} points, 95 % interval {100 * low:.2f} to {100 * high:.2f}")
    if labelled is None and not is_sure(accuracy):
        agreed = None  # near chance, an agreement says nothing: the output may be an embedding
    if accuracy.agreement is not None and agreed is not None:
        table.add_row("top-1 agreement", f"{accuracy.agreement:.2%} {where}; 95 % interval from {agreed[0]:.2%}")
    if accuracy.predicted_drop and agreed is not None:
        table.add_row("predicted drop", f"{100 * accuracy.predicted_drop:.2f} points, without labels{_whole(accuracy)}")
    for name, value in accuracy.sqnr_db.items():
        table.add_row("SQNR", f"{'no difference' if math.isinf(value) and value > 0 else f'{value:.1f} dB'} at {name}")


def _whole(accuracy: Accuracy) -> str:
    """Return the predicted drop of whole items with its interval; empty if nothing is known of it."""
    if accuracy.whole_drop is None or accuracy.whole_interval is None:
        return ""
    low, high = accuracy.whole_interval
    of_items = "" if accuracy.items == accuracy.predictions else f" {100 * accuracy.whole_drop:.2f} of whole items,"
    return f";{of_items} 95 % interval {100 * low:.2f} to {100 * high:.2f}"


def _latency_row(table: Table, timed: Latency) -> None:
    """Add a latency with its speed-up and throughput."""
    table.add_row(
        f"latency, {timed.name}",
        f"{timed.float_ms:.3f} -> {timed.int8_ms:.3f} ms: {timed.speedup:.2f}x "
        f"{f'({timed.doubt}) ' if timed.doubt else ''}"
        f"(median {timed.float_median_ms:.3f} -> {timed.int8_median_ms:.3f} ms; "
        f"{timed.float_rate:.0f} -> {timed.int8_rate:.0f} {'tokens' if timed.regime else 'items'}/s)",
    )
    if timed.simple_ms is not None:
        table.add_row("", f"simplified float {timed.simple_ms:.3f} ms: {timed.float_ms / timed.simple_ms:.2f}x")


def _print_float_nodes(console: Terminal, result: Result) -> None:
    """List the float nodes, grouped by reason."""
    if not result.float_nodes:
        return
    table = Table(title=f"{len(result.float_nodes)} nodes stayed float", box=None, title_justify="left", pad_edge=False)
    table.add_column("nodes", justify="right")
    table.add_column("operator")
    table.add_column("why", overflow="fold")
    table.add_column("example", overflow="ellipsis", no_wrap=True, max_width=28)
    groups = Counter((node.operator, node.reason) for node in result.float_nodes)
    example = {(node.operator, node.reason): node.name for node in reversed(result.float_nodes)}
    for (operator, reason), count in groups.most_common(REASONS):
        table.add_row(str(count), operator, reason, example[operator, reason])
    rest = sum(count for _, count in groups.most_common()[REASONS:])
    if rest:
        table.add_row(str(rest), "", "for other reasons; --json lists all", "")
    console.print(table)
