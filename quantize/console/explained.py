"""An `Explanation` as tables: kernels, their times, causes."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from ...system.printable import number_of
from ..runtime.executed import Kernel
from ..runtime.isa import Isa
from ..tools.explain.explain import Explanation
from .terminal import Terminal, headless, threads_text

ROWS = 25  # kernels that are shown without --all
REASONS = 12
SHORT_OPS = {"QuantizeLinear": "Q", "DequantizeLinear": "DQ"}


def print_explanation(found: Explanation, *, everything: bool = False) -> None:
    """Print the kernels and the causes, the most expensive first, on stdout.

    Args:
        found: The result of `explain_model`.
        everything: Whether to list all kernels and causes.
    """
    console = Terminal()
    _print_kernels(console, found, len(found.kernels) if everything else ROWS)
    _print_summary(console, found)
    _print_reasons(console, found, None if everything else REASONS)
    _print_causes(console, found, None if everything else REASONS)


def _print_kernels(console: Terminal, found: Explanation, rows: int) -> None:
    """List kernels."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for column in ("µs", "share", "MMAC"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("kernel")
    table.add_column("precision", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    table.add_column("node")
    shown = sorted(found.kernels, key=lambda kernel: -kernel.run.microseconds)[:rows]
    for kernel in shown:
        spent = kernel.run.microseconds
        table.add_row(
            f"{spent:.0f}",
            _share(spent, found.totals.kernels),
            f"{kernel.run.macs / 1e6:.2f}" if kernel.run.macs else "",
            kernel.spelled.removeprefix("com.microsoft."),
            kernel.precision,
            kernel.layout,
            _node(kernel),
        )
    console.print(table)
    left = len(found.kernels) - len(shown)
    if left:
        rest = found.totals.kernels - sum(kernel.run.microseconds for kernel in shown)
        console.print(f"{left} more kernels take {_share(rest, found.totals.kernels)}; --all lists them")
    console.print()


def _node(kernel: Kernel) -> str:
    """Return the node with the operators fused into its kernel: ``conv1 + Relu, Q, 3 DQ``."""
    if kernel.node is None:
        return "(inserted by the runtime)"
    counts = Counter(SHORT_OPS.get(op, op) for op in kernel.absorbs)
    absorbed = ", ".join(op if count == 1 else f"{count} {op}" for op, count in counts.items())
    part = f" ({kernel.run.op} of {kernel.op})" if kernel.run.node != kernel.node and _is_part(kernel) else ""
    return f"{kernel.node}{part}" + (f" + {absorbed}" if absorbed else "")


def _is_part(kernel: Kernel) -> bool:
    return kernel.kind == "rest" and not kernel.absorbs and kernel.run.op != kernel.op and not kernel.run.domain


def _share(part: float, total: float) -> str:
    return f"{part / total:.1%}" if total else ""


def _print_summary(console: Terminal, found: Explanation) -> None:
    """Print totals, shares and the instruction set."""
    table = headless()
    totals = found.totals
    parts = {
        "compute": totals.compute,
        "conversions": totals.conversions,
        "layout changes": totals.layout,
        "rest": totals.rest,
    }
    listed = ", ".join(f"{name} {_share(spent, totals.kernels)}" for name, spent in parts.items())
    threads = threads_text(found.threads)
    table.add_row("kernels", f"{totals.kernels / 1000:.3f} ms on {threads}: {listed}")
    table.add_row("runtime", str(found.runtime))
    table.add_row("inputs", found.data)
    table.add_row("integer kernels", f"{found.mac_share_int8:.1%} of the multiply-accumulates")
    table.add_row("CPU", ", ".join(found.flags) or "unknown: the system does not list its features")
    sums = "in 32 bits, exactly" if found.exact else "in pairs in 16 bits, with saturation"
    name = Isa.VNNI if found.exact else Isa.AVX2
    table.add_row("probe", f"255 * 127 + 255 * 127 = {found.probe}: integer products are added {sums} ({name})")
    console.print(table)


def _print_reasons(console: Terminal, found: Explanation, most: int | None) -> None:
    """List products in float, the most expensive first."""
    nodes = sorted((node for node in found.nodes if node.reasons), key=lambda node: -node.microseconds)
    if not nodes or (not found.mac_share_int8 and len({node.reasons for node in nodes}) == 1):
        return  # the model is not quantized: one cause below covers all products
    console.print()
    console.print(f"{number_of(len(nodes), 'product')} in float")
    table = Table(box=None, pad_edge=False)
    table.add_column("µs", justify="right")
    table.add_column("node")
    table.add_column("why")
    for node in nodes[:most]:
        table.add_row(f"{node.microseconds:.0f}", f"{node.op} {node.name}", "; ".join(node.reasons))
    console.print(table)
    if most is not None and len(nodes) > most:
        console.print(f"{len(nodes) - most} more; --all lists them")


def _print_causes(console: Terminal, found: Explanation, most: int | None) -> None:
    """List the causes of lost time."""
    if not found.causes:
        return
    console.print()
    console.print("why it is slow")
    table = Table(box=None, pad_edge=False)
    table.add_column("µs", justify="right")
    table.add_column("cause")
    for cause in found.causes[:most]:
        table.add_row(f"{cause.microseconds:.0f}", cause.text)
    console.print(table)
