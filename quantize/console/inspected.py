"""An `Inspection` as a table, as lines of text, and as a graph in the DOT language."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from ...system.printable import printable
from ..model.files import size_text
from ..tools.inspect.inspect import Inspection, NodeFacts
from .terminal import Terminal, headless

METADATA = 100  # characters of a metadata value that are shown
ROLES = {"statistic": "statistics of batch normalization", "quantization": "scales and zero points", "other": "other"}
COLOURS = {"int8": "palegreen", "weight-only": "lightyellow", "float": "lightsalmon", "": "white"}


def print_inspection(found: Inspection, *, nodes: bool = False) -> None:
    """Print an inspection on stdout.

    Args:
        found: The result of `inspect_model`.
        nodes: Whether to list the nodes with their costs.
    """
    console = Terminal()
    table = headless()
    for title, text in _rows(found):
        table.add_row(title, text)
    console.print(table)
    if nodes:
        console.print()
        console.print(_node_table(found))


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table."""
    files = [f"{name} {size_text(size)}" for name, size in found.external.items()]
    yield "model", ", ".join([f"{found.path} {size_text(found.file_bytes)}", *files])
    opsets = ", ".join(f"{domain} {version}" for domain, version in found.opsets.items())
    yield (
        "format",
        f"IR version {found.ir_version}, operators of {opsets}; by {found.producer or 'an unknown producer'}",
    )
    for title, ports in (("inputs", found.inputs), ("outputs", found.outputs)):
        for place, port in enumerate(ports):
            yield title if place == 0 else "", str(port)
    yield "operators", ", ".join(f"{count} {op}" for op, count in found.operators.items()) or "none"
    if found.functions:
        yield "functions", ", ".join(found.functions)
    stored = ", ".join(f"{dtype} {size_text(size)}" for dtype, size in found.weights.bytes.items())
    yield "parameters", f"{found.weights.parameters:,}"
    for role, title in ROLES.items():
        count = found.weights.elements[role]  # type: ignore[index]
        if count:
            yield "", f"{count:,} numbers are {title}"
    yield "constants", stored or "none"
    yield "tensors", ", ".join(f"{count} {dtype or 'of unknown type'}" for dtype, count in found.tensors.items())
    yield from _costs(found)
    for place, (key, value) in enumerate(found.metadata.items()):
        shown = value if len(value) <= METADATA else f"{value[:METADATA]}... ({len(value)} characters)"
        yield "metadata" if place == 0 else "", f"{key}: {shown}"


def _costs(found: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the costs of a run, or why they are unknown."""
    why = found.why_unknown() + (": give --shape NAME=1,3,224,224, --dim AXIS=1 or --data SRC" if found.depends else "")
    yield "macs", why if found.macs is None else f"{found.macs:,} multiply-accumulates per run"
    yield (
        "activations",
        (
            found.why_unknown()
            if found.peak_bytes is None
            else f"{size_text(found.peak_bytes)} at the same time (estimate)"
        ),
    )
    counted = found.products
    if not sum(counted.values()):
        return
    share = found.coverage
    parts = [
        f"{count} {name}" + ("" if share is None else f" ({share[name]:.1%} of the multiply-accumulates)")
        for name, count in counted.items()
        if count
    ]
    yield "products", ", ".join(parts)


def _node_table(found: Inspection) -> Table:
    """List the nodes with their costs."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("MMAC", justify="right", no_wrap=True)
    table.add_column("outputs", justify="right", no_wrap=True)
    table.add_column("runs", justify="right", no_wrap=True)
    for column in ("precision", "operator"):
        table.add_column(column, no_wrap=True)
    table.add_column("node")
    for node in found.nodes:
        table.add_row(
            f"{node.macs / 1e6:.3f}" if node.macs else "",
            "" if node.output_bytes is None else size_text(node.output_bytes),
            "" if node.steps is None else str(node.steps),
            node.precision,
            node.op,
            " > ".join((*node.inside, node.name)),
        )
    return table


def structure_lines(found: Inspection) -> Iterator[str]:
    """Yield the nodes in file order: ``name (Operator): [inputs] -> [output: FLOAT [1, 64]]``."""
    for port in found.inputs:
        yield f"{port} (input)"
    for node in found.nodes:
        outputs = ", ".join(f"{name}: {kind}" for name, kind in zip(node.outputs, node.types, strict=True) if name)
        yield f"{'  ' * len(node.inside)}{node.name} ({node.op}): [{', '.join(node.inputs)}] -> [{outputs}]"
    for port in found.outputs:
        yield f"{port} (output)"


def dot_lines(found: Inspection) -> Iterator[str]:
    """Yield the graph in the DOT language of Graphviz: integer products green, float products red."""
    yield f"digraph {_quoted(found.path)} {{"
    yield '  node [shape=box, style="filled", fillcolor=white];'
    numbers = {id(node): f"n{number}" for number, node in enumerate(found.nodes)}
    parents = {(*node.inside, node.name): numbers[id(node)] for node in found.nodes}
    sources: dict[tuple[tuple[str, ...], str], tuple[str, str]] = {}
    for number, port in enumerate(found.inputs):
        sources[(), port.name] = f"in{number}", str(port)
        yield f"  in{number} [shape=ellipse, label={_quoted(port.name)}];"
    for node in found.nodes:
        for name, kind in zip(node.outputs, node.types, strict=True):
            sources[node.inside, name] = (numbers[id(node)], f"{name}: {kind}")
    for node in found.nodes:
        colour = COLOURS[node.precision]
        yield f"  {numbers[id(node)]} [label={_quoted(node.op, node.name)}, fillcolor={colour}];"
    for node in found.nodes:
        for name in dict.fromkeys(filter(None, node.inputs)):
            if (source := _source(sources, node, name)) is not None:
                yield f"  {source[0]} -> {numbers[id(node)]} [label={_quoted(source[1])}];"
        if node.inside:
            yield f"  {parents[node.inside]} -> {numbers[id(node)]} [style=dotted, arrowhead=none];"
    for number, port in enumerate(found.outputs):
        yield f"  out{number} [shape=ellipse, label={_quoted(port.name)}];"
        if ((), port.name) in sources:
            yield f"  {sources[(), port.name][0]} -> out{number} [label={_quoted(str(port))}];"
    yield "}"


Sources = Mapping[tuple[tuple[str, ...], str], tuple[str, str]]


def _source(sources: Sources, node: NodeFacts, name: str) -> tuple[str, str] | None:
    """Return the node and text of a tensor in the graph of the node or around it; None for constants."""
    for depth in range(len(node.inside), -1, -1):
        if (node.inside[:depth], name) in sources:
            return sources[node.inside[:depth], name]
    return None


def _quoted(*lines: str) -> str:
    """Return a quoted label of several lines."""
    return '"' + "\\n".join(printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'
