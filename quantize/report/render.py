"""Render records as HTML pages. Each page is one file without links to other files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from ... import NATIVE_DOMAIN
from ...system.printable import number_of, printable, printable_values
from ...transforms.int8.plan import Impl
from ..model.files import size_text
from ..runtime.match import QUANTIZERS
from ..runtime.progress import group
from .layout import HEIGHT, WIDTH, Picture, picture_of
from .losses import losses
from .numbers import NONE, decibels, microseconds, percent, times
from .record import Graph, Node, OpTime, Record, Step, Unit
from .words import (
    Card,
    accuracy_rows,
    cards,
    costs,
    costs_told,
    data_told,
    items_told,
    measured_told,
    run_rows,
    search_told,
    short_places,
)

KINDS: Mapping[Impl, tuple[str, str, str]] = {
    Impl.U8: ("u8", "INT8", "in integers, from and to 8 bits"),
    Impl.U8_GEMM: ("u8", "INT8", "in integers, as a matrix product"),
    Impl.U8_NATIVE: ("u8", "NATIVE", "in integers, in an operator of requant"),
    Impl.U8_FLOAT: ("u8f", "INT8→F", "integer products, float result"),
    Impl.DYNAMIC: ("dyn", "DYN", "integer products, ranges found at run time"),
    Impl.DYNAMIC_NATIVE: ("dyn", "NATIVE", "integer products, ranges found at run time, in an operator of requant"),
    Impl.BLOCK: ("w8", "BLOCK", "weights in blocks of integers, float to float"),
    Impl.BLOCK_NATIVE: ("w8", "NATIVE", "weights in blocks of integers, float to float, in an operator of requant"),
    Impl.WEIGHT: ("w8", "W8", "int8 weights, computed in float"),
    Impl.FLOAT: ("float", "FLOAT", "float"),
}
"""By implementation: the style of a node, its mark, and its text in the legend."""

STYLES: Mapping[str, tuple[str, str]] = {
    "u8": ("8 BIT", "computes in 8-bit integers"),
    "dyn": ("Q/DQ", "from float to integers, or back"),
    "plain": ("", "other operators"),
}
"""Styles of nodes on the page of `requant view`: the mark and the text of the legend."""

INTEGERS = ("QLinear", "QGemm", "MatMulInteger", "ConvInteger", "DynamicQuantize", "QAttention", "QLSTM", "MatMulNBits")
NATIVE_FLOATS = ("DequantizeSoftmax", "Normalization", "RotaryEmbedding", "Softmax")
"""Native operators that compute in float."""
LONGEST, BESIDE = 25, 16
"""The greatest number of characters of a name in a box without a mark, and in a box with a mark."""
OPERATOR = 20
"""The greatest number of characters of an operator in a box."""


def render_report(record: Record) -> str:
    """Return the page of one run."""
    units = {name: unit for unit in record.units for name in unit.nodes}
    picture = picture_of(record.graph)
    used = {unit.implementation for unit in record.units}
    shown: dict[str, Any] = {
        "run": record,
        "model": os.path.basename(record.model),
        "output": os.path.basename(record.output),
        "verdict": record.headline.verdict,
        "measured": measured_told(record),
        "cards": cards(record),
        "costs": costs(record),
        "costs_told": costs_told(record),
        "accuracy": accuracy_rows(record),
        "picture": picture,
        "drawn": _boxes(picture, record.graph, units),
        "legend": [_entry(*row) for impl, row in KINDS.items() if impl in used],
        "float_units": _float_units(record),
        "sqnr": _sqnr_rows(record),
        "observed": [row.name for row in record.tensors if row.bins is not None],
        "times": [_time_row(row) for row in record.times],
        "items_told": items_told(record),
        "search_told": search_told(record),
        "places": short_places([item.where for item in record.judged.items]) if record.judged else [],
        "points": _points(record),
        "steps": [_step_row(row) for row in record.pipeline if row.applied or row.error],
        "idle_steps": [_step_row(row) for row in record.pipeline if not (row.applied or row.error)],
        "stages": _stages(record.stages),
        "data_told": data_told(record),
        "environment": _facts(record),
    }
    worst = next((row.unit for row in losses(record) if row.unit), "")
    data = {
        "chosen": worst or next((node.name for node in record.graph.nodes), ""),
        "kept_float": bool(record.headline.why_not),
        **{key: asdict(record)[key] for key in ("graph", "units", "tensors", "weights", "times", "search")},
        "links": _links(picture),
    }
    return _page("report.html.j2", shown, data, sections=_sections(record, shown))


def render_comparison(records: Sequence[Record]) -> str:
    """Return the page of several runs side by side."""
    names = _names(records)
    tensors = _union([[row.name for row in record.tensors if row.sqnr_db is not None] for record in records])
    noise = [{row.name: row.sqnr_db for row in record.tensors} for record in records]
    columns = _time_columns(records, names)
    ops = _union([[row.op for row in record.times] for record in records])
    versions = _union([list(record.environment) for record in records])
    shown: dict[str, Any] = {
        "runs": records,
        "names": names,
        "verdicts": [record.headline.verdict for record in records],
        "headline": run_rows(records),
        "has_sqnr": bool(tensors),
        "sqnr": [(name, *(decibels(row.get(name)) for row in noise)) for name in tensors],
        "has_times": bool(ops),
        "time_names": [name for name, _ in columns],
        "times": [(op, *(microseconds(row.get(op)) for _, row in columns)) for op in ops],
        "environment": [_version_row(name, records) for name in versions],
    }
    data = {
        "sqnr": {"names": tensors, "runs": _series(tensors, zip(names, noise, strict=True))},
        "time": {"names": ops, "runs": _series(ops, columns)},
    }
    sections = [("summary", "Summary")]
    sections += [("noise", "Signal over noise")] if tensors else []
    sections += [("time", "Time")] if ops else []
    return _page("compare.html.j2", shown, data, sections=[*sections, ("environment", "Environment")])


def render_view(graph: Graph, name: str, path: str) -> str:
    """Return the page of a model without a run record."""
    picture = picture_of(graph)
    counts = Counter(node.op for node in graph.nodes)
    sums = {op: [node for node in graph.nodes if node.op == op] for op in counts}
    shown: dict[str, Any] = {
        "name": name,
        "told": " · ".join(f"{key} {graph.facts[key]}" for key in ("opset", "producer") if graph.facts.get(key)),
        "cards": _view_cards(graph, counts),
        "picture": picture,
        "drawn": _boxes(picture, graph, {}),
        "legend": [_entry(kind, *row) for kind, row in STYLES.items()],
        "inputs": [(each, graph.values.get(each, "?")) for each in graph.inputs],
        "outputs": [(each, graph.values.get(each, "?")) for each in graph.outputs],
        "operators": [
            (op, count, f"{sum(n.parameters for n in sums[op]):,}", size_text(sum(n.bytes for n in sums[op])))
            for op, count in counts.most_common()
        ],
        "facts": [("path", path), *graph.facts.items()],
    }
    chosen = [*(node for node in graph.nodes if node.parameters), *graph.nodes][:1]
    sections = [("summary", "Summary"), ("graph", "Graph"), ("ends", "Inputs and outputs")]
    sections += [("operators", "Operators"), ("file", "File")]
    data = {"graph": asdict(graph), "links": _links(picture), "chosen": chosen[0].name if chosen else ""}
    return _page("view.html.j2", shown, data, sections=sections)


def _view_cards(graph: Graph, counts: Counter[str]) -> list[Card]:
    """Return the summary of a model: nodes, parameters, inputs and outputs."""
    bytes_ = sum(node.bytes for node in graph.nodes)
    often = ", ".join(f"{count} {op}" for op, count in counts.most_common(2))
    integer = sum(_style(node)[0] == "u8" for node in graph.nodes)
    nodes = Card("Nodes", f"{len(graph.nodes):,}", "", (often, f"{integer or 'none'} in 8-bit integers"))
    parameters = sum(node.parameters for node in graph.nodes)
    sizes = Card("Parameters", f"{parameters:,}", "", (size_text(bytes_), f"{number_of(len(counts), 'operator')}"))
    ends = [
        Card(title if len(names) == 1 else f"{title}s", names[0] if len(names) == 1 else str(len(names)), "", lines)
        for title, names in (("Input", graph.inputs), ("Output", graph.outputs))
        if (lines := tuple(graph.values.get(name, "?") for name in names[:2])) or not names
    ]
    return [nodes, sizes, *ends]


# --------------------------------------------------------------------------------------------------------------- page


def _page(template: str, shown: Mapping[str, Any], data: Mapping[str, Any], *, sections: Sequence[object]) -> str:
    """Fill a template; all text is printable and escaped, except the CSS and scripts of this package."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # not parts of the page itself
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"db": decibels, "day": _day}
    return environment.get_template(template).render(
        **shown,
        sections=sections,
        version=version("requant"),
        css=_asset("report.css"),
        js=_asset("charts.js") + _asset("report.js"),
        data=_script_json(data),
    )


def _asset(name: str) -> str:
    """Return a file of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _script_json(data: Mapping[str, Any]) -> str:
    """Return JSON for a script element, without ``<``, ``>`` and ``&``: no name can end the script.

    Names are printable, as they are in the attributes of the page that the script looks up.
    """
    text = json.dumps(printable_values(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sections(record: Record, shown: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the sections of a report, with their titles in the navigation."""
    return [
        (name, text)
        for name, text, there in (
            ("summary", "Summary", True),
            ("graph", "Graph", True),
            ("noise", "Signal over noise", shown["sqnr"]),
            ("histogram", "Values", shown["observed"]),
            ("weights", "Weights", record.weights),
            ("time", "Time", record.times),
            ("items", "Worst samples", record.judged),
            ("search", "Search", record.search),
            ("pipeline", "Pipeline", True),
            ("data-findings", "Data", True),
            ("environment", "Environment", True),
        )
        if there
    ]


# -------------------------------------------------------------------------------------------------------------- graph


@dataclass(frozen=True, slots=True)
class Drawn:
    """The values of a box in the template."""

    name: str
    of: str
    kind: str
    label: str
    sub: str
    tag: str
    spoken: str
    x: float
    y: float
    left: float
    top: float
    width: float = WIDTH
    height: float = HEIGHT


def _boxes(picture: Picture, graph: Graph, units: Mapping[str, Unit]) -> list[Drawn]:
    """Return the boxes with their texts and styles."""
    nodes = {node.name: node for node in graph.nodes}
    drawn = []
    for box in picture.boxes:
        corner = (box.x - WIDTH / 2, box.y - HEIGHT / 2)
        place = (round(box.x, 1), round(box.y, 1), round(corner[0], 1), round(corner[1], 1))
        if box.kind != "node":
            shape = graph.values.get(box.name, "")
            words = (box.kind, _cut(box.name), "", f"{box.kind} {box.name} {shape}".strip())
            drawn.append(Drawn(box.name, box.kind, "io", *words, *place))
            continue
        node, unit = nodes[box.name], units.get(box.name)
        kind, tag, text = KINDS[unit.implementation] if unit is not None else (*_style(node), "")
        head = unit is not None and box.name == unit.name
        sub = _spent(unit) if unit is not None and head else ""
        spoken = f"{node.op} {box.name}" + (f", {text}" if text else "")
        label = node.op if len(node.op) <= OPERATOR else f"{node.op[: OPERATOR - 1]}…"
        below = sub or _cut(box.name, BESIDE if tag else LONGEST)
        drawn.append(Drawn(box.name, "node", kind, label, below, tag, spoken, *place))
    return drawn


def _style(node: Node) -> tuple[str, str]:
    """Return the style and the mark of a node by its operator, for a model without a run record."""
    native = node.domain == NATIVE_DOMAIN and not node.op.startswith(NATIVE_FLOATS)
    integer = native or node.op.startswith(INTEGERS)
    kind = "dyn" if node.op in QUANTIZERS else "u8" if integer else "plain"
    return kind, STYLES[kind][0]


def _spent(unit: Unit) -> str:
    """Return the times of a unit in the float model and in the INT8 model; empty if one is unknown."""
    if unit.float_us is None or unit.int8_us is None:
        return ""
    before, after = unit.float_us, unit.int8_us
    if max(before, after) >= 1000:
        return f"{before / 1000:.3g} → {after / 1000:.3g} ms"
    return f"{before:.3g} → {after:.3g} µs"


def _cut(name: str, most: int = LONGEST) -> str:
    """Shorten a long name to its end: names often share their beginning."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _entry(kind: str, tag: str, text: str) -> dict[str, str]:
    """Return an entry of the legend: the style of a node, its mark, and what they mean."""
    return {"kind": kind, "tag": tag, "text": text}


def _links(picture: Picture) -> list[tuple[int, int, str]]:
    """Return the edges as indices of boxes, with the tensor."""
    return [(edge.source, edge.target, edge.tensor) for edge in picture.edges]


# ------------------------------------------------------------------------------------------------------------- tables


def _float_units(record: Record) -> list[tuple[str, ...]]:
    """Return the float units, the slowest first."""
    units = [unit for unit in record.units if unit.implementation is Impl.FLOAT]
    units.sort(key=lambda unit: -(unit.float_us or 0.0))
    return [(unit.name, unit.op, microseconds(unit.float_us), unit.reason) for unit in units]


def _sqnr_rows(record: Record) -> list[tuple[str, ...]]:
    """Return a row for each tensor with a known SQNR."""
    return [
        (
            row.name,
            "8 bits" if row.uint8 else "float",
            decibels(row.sqnr_db),
            decibels(row.own_db),
            decibels(row.alone_db),
            f"{row.lo:.4g} … {row.hi:.4g}" if row.lo is not None and row.hi is not None else NONE,
            percent(row.clipped, 3),
        )
        for row in record.tensors
        if row.sqnr_db is not None or row.own_db is not None
    ]


def _time_row(row: OpTime) -> tuple[object, ...]:
    """Return the cells of one kind of work: its times, how much faster it is in INT8, its units, and those in int8."""
    faster = row.float_us / row.int8_us if row.float_us and row.int8_us else None
    return row.op, microseconds(row.float_us), microseconds(row.int8_us), times(faster), row.units or "", row.int8 or ""


def _step_row(step: Step) -> tuple[str, str, str]:
    """Return the cells of a transform: its name, its rewrites, and its error or what it left alone."""
    left = ", ".join(f"{count} {reason}" for reason, count in sorted(step.skipped.items()))
    return step.step, str(step.applied), step.error or left


def _stages(stages: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the seconds of each stage; all transforms together are one stage."""
    joined: dict[str, float] = {}
    for stage, seconds in stages.items():
        joined[group(stage)] = joined.get(group(stage), 0.0) + seconds
    return [(name, f"{seconds:.2f}") for name, seconds in joined.items() if seconds >= 0.005]


def _facts(record: Record) -> list[tuple[str, str]]:
    """Return when and of what the output was made, with versions, the machine and the options."""
    return [
        ("made", _day(record.created)),
        ("float model", record.model),
        ("output", record.output),
        *record.environment.items(),
    ]


def _day(text: str) -> str:
    """Return a time in UTC, as people read it."""
    return text.replace("T", " ").replace("+00:00", " UTC")


def _points(record: Record) -> list[tuple[str, ...]]:
    """Return the models that a search has tried."""
    if record.search is None:
        return []
    return [
        (
            times(row.speedup),
            NONE if row.value is None else f"{row.value:.6g}",
            "yes" if row.kept else "no",
            str(row.int8_units),
            f"{row.price:.3g}",
        )
        for row in record.search.points
    ]


def _names(records: Sequence[Record]) -> list[str]:
    """Return a unique name for each run."""
    twice = Counter(record.name for record in records)
    seen: Counter[str] = Counter()
    names = []
    for record in records:
        seen[record.name] += 1
        names.append(record.name if twice[record.name] == 1 else f"{record.name} ({seen[record.name]})")
    return names


def _union(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return all names without repetitions, in the order of their first occurrence."""
    return list(dict.fromkeys(name for names in lists for name in names))


def _series(names: Sequence[str], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return each run with its values in the order of the names; None for a missing one."""
    return [{"name": name, "values": [row.get(each) for each in names]} for name, row in rows]


def _time_columns(records: Sequence[Record], names: Sequence[str]) -> list[tuple[str, dict[str, float]]]:
    """Return the times by operator of each float model and of each output; runs of one model share a float column."""
    floats = [(name, {row.op: row.float_us for row in r.times}) for name, r in zip(names, records, strict=True)]
    if len({record.model for record in records}) == 1:
        floats = [("float", floats[0][1])]
    else:
        floats = [(f"{name}, float", row) for name, row in floats]
    return floats + [
        (name, {row.op: row.int8_us for row in record.times}) for name, record in zip(names, records, strict=True)
    ]


def _version_row(name: str, records: Sequence[Record]) -> tuple[str, ...]:
    """Return the versions of a library in all runs, behind its name, which says whether they differ."""
    values = [record.environment.get(name, NONE) for record in records]
    return (name if len(set(values)) == 1 else f"{name} (differs)", *values)
