"""The run record: all that a report shows of one run, as a value and as JSON."""

from __future__ import annotations

import json
import math
import os
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from ... import RequantError

KIND = "requant run record"
SCHEMA = 1
"""The version of the record that this program writes, and the newest that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a graph.

    Attributes:
        name: Its name, unique in the graph.
        op: Its operator.
        domain: The operator's domain; empty for the standard one.
        inputs: Tensors that it reads and that are no constants; those that the bodies in it capture included.
        outputs: Tensors that it makes.
        attributes: Its attributes as text.
        constants: Its constant inputs by name, as ``float32 (16, 1, 3, 3)``.
        parameters: Elements of its constant inputs.
        bytes: Size of its constant inputs.
        body: The node in whose body it stands; empty in the main graph.
    """

    name: str
    op: str
    domain: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    parameters: int = 0
    bytes: int = 0
    body: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A model's graph as far as a picture shows it.

    Attributes:
        inputs: The model's inputs.
        outputs: The model's outputs.
        nodes: Its nodes in execution order, those of bodies after the main graph.
        values: Type and shape of each tensor of which they are known, as ``float32 (N, 3, 224, 224)``.
        facts: What is known of the whole file: opset, producer, ...
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    values: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What became of an operator with what it absorbs.

    Attributes:
        name: Name of the operator's node.
        op: The operator.
        nodes: Nodes of the graph that belong to it.
        outputs: Tensors that others read of it.
        implementation: A value of `requant.transforms.plan.Impl`.
        reason: Why it is not, or not wholly, in integers; empty where it is.
        float_us: Time of its kernels in the float model, in microseconds; None where it has none of its own.
        int8_us: The same in the output.
        float_kernels: The kernels that ran in the float model.
        int8_kernels: The kernels that ran in the output.
        relieved: Output channels whose weights lost range so that sums of 16 bits cannot saturate.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    outputs: tuple[str, ...]
    implementation: str
    reason: str = ""
    float_us: float | None = None
    int8_us: float | None = None
    float_kernels: tuple[str, ...] = ()
    int8_kernels: tuple[str, ...] = ()
    relieved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """A histogram with bins of equal width.

    Attributes:
        start: Where the first bin begins.
        width: The width of a bin.
        counts: Values per bin.
    """

    start: float
    width: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """What is known of a tensor.

    Attributes:
        name: The tensor.
        uint8: Whether it is in 8-bit integers in the output.
        lo: Lower end of the range of its integers; None where it has none.
        hi: Upper end.
        shares: The tensor whose range it has; empty where that is its own.
        least: The least value seen; None where nobody looked.
        most: The greatest value seen.
        clipped: Share of the values beyond the range, 0..1; None where there is no histogram.
        own_db: Signal over the noise that the range alone makes of it, in dB; None where there is no histogram.
        sqnr_db: Signal over noise in the output, with all that was lost before it, in dB; None where it is not known or
            there is no noise.
        alone_db: Signal over noise at the worst output when this tensor alone is in integers, in dB; None where not
            tried.
        bins: Its values; None where nobody looked.
    """

    name: str
    uint8: bool = False
    lo: float | None = None
    hi: float | None = None
    shares: str = ""
    least: float | None = None
    most: float | None = None
    clipped: float | None = None
    own_db: float | None = None
    sqnr_db: float | None = None
    alone_db: float | None = None
    bins: Bins | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The range of the weights of each output channel of a node.

    Attributes:
        node: The node.
        op: Its operator.
        tensor: The weights.
        channels: How many output channels there are.
        group: How many of them an entry of `lo` and `hi` stands for; the last one may stand for fewer.
        lo: The least weight.
        hi: The greatest weight.
    """

    node: str
    op: str
    tensor: str
    channels: int
    group: int
    lo: tuple[float, ...]
    hi: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """The time of one kind of work.

    Attributes:
        op: An operator of the model; or the conversions, the changes of layout, and the rest.
        float_us: In the float model, in microseconds.
        int8_us: In the output.
        units: How many units have it.
        int8: How many of them have integers in them.
    """

    op: str
    float_us: float
    int8_us: float
    units: int = 0
    int8: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A sample on which float and INT8 differ.

    Attributes:
        where: The sample.
        label: The right answer; empty where it is not known.
        before: What the float model says; empty where no output is a score per class.
        after: What the output says.
        broken: Whether the float model is right and the output wrong.
        sqnr_db: Signal over noise of the worst output, in dB; None where there is no noise.
        picture: The sample as a ``data:`` URI of a PNG; empty where it is no image.
    """

    where: str
    label: str = ""
    before: str = ""
    after: str = ""
    broken: bool = False
    sqnr_db: float | None = None
    picture: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Counts against labels.

    Attributes:
        items: How many items have a label.
        float_correct: How many the float model gets right.
        int8_correct: How many the output gets right.
        broken: How many the float model gets right and the output wrong.
        fixed: How many the output gets right and the float model wrong.
        interval: The 95 % confidence interval of the drop, each -1..1.
    """

    items: int
    float_correct: int
    int8_correct: int
    broken: int
    fixed: int
    interval: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Float against INT8, sample by sample.

    Attributes:
        data: What the data were.
        samples: How many samples were run.
        predictions: How many predictions there were; 0 where no output is a score per class.
        differing: How many of them differ.
        predicted_drop: The drop in accuracy that the float model's own probabilities lead to expect, -1..1; None where
            no output is a score per class.
        labelled: Counts against labels; None without labels.
        items: The worst samples, broken ones first.
    """

    data: str
    samples: int
    predictions: int = 0
    differing: int = 0
    predicted_drop: float | None = None
    labelled: Labelled | None = None
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a transform did.

    Attributes:
        step: The transform with its options.
        applied: How many rewrites were made.
        skipped: Why candidates were left alone, with counts.
        error: Why it failed; empty where it did not.
    """

    step: str
    applied: int
    skipped: dict[str, int] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the calibration data are found to be.

    Attributes:
        kind: The kind.
        name: The tensor, input or node.
        message: What, where, and what to do.
        severity: ``warning`` or ``note``.
    """

    kind: str
    name: str
    message: str
    severity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A model that a search has tried.

    Attributes:
        price: What all noise was worth, as a share of the float model's run time.
        value: The score; None where it is not finite.
        speedup: How many times faster than the float model.
        int8_units: Units that compute in integers.
        kept: Whether it keeps the bar.
    """

    price: float
    value: float | None
    speedup: float
    int8_units: int
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a search found.

    Attributes:
        metric: The metric.
        before: The float model's score; None where it is not finite.
        bar: What had to be kept; None where it is not finite.
        points: Every model that was tried.
        frontier: Those than which no other is both faster and better.
        best: The one that was chosen; None where none keeps the bar.
        seconds: How long it took.
    """

    metric: str
    before: float | None
    bar: float | None
    points: tuple[Point, ...]
    frontier: tuple[Point, ...]
    best: Point | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What came of the run, in a few numbers.

    Attributes:
        verdict: Why the output is not what was asked for; empty when it is.
        notes: What went otherwise than asked or planned.
        float_ms: Least time of the float model, in milliseconds; None where nothing could be run.
        int8_ms: Least time of the output.
        float_median_ms: Median time of the float model.
        int8_median_ms: Median time of the output.
        runs: Runs of each.
        batch: Items per run.
        threads: Threads inside one operator; 0 was the runtime's choice.
        float_bytes: Size of the float model with its external data.
        int8_bytes: Size of the output.
        samples: Samples that the outputs were compared on.
        agreement: Share of equal top-1 predictions, 0..1; None where no output is a score per class.
        predictions: How many predictions there are of those.
        sqnr_db: SQNR of the worst output; None where the outputs are equal, or were not compared.
        sqnr_db_by_output: SQNR of each output.
        mac_share_int8: Share of the multiply-accumulates in integer kernels, 0..1.
        int8_nodes: Nodes that compute or pass on integers.
        float_nodes: Nodes that stayed float.
        calibration: The range rule.
        ranges: The file that the ranges are from; empty where they are from the data.
        data: What the data were.
        format: ``qdq`` or ``qoperator``.
        placement: How it was decided what is int8.
        predicted_ms: The sum of the costs of the plan; None where nothing was measured.
        effort: How much was done for accuracy.
        corrections: What was done for it, by name.
        rejected_sqnr_db: SQNR of the worst output of the INT8 model that was not kept; None where there is none.
        rejected_speedup: How many times faster than float it was.
    """

    verdict: str = ""
    notes: tuple[str, ...] = ()
    float_ms: float | None = None
    int8_ms: float | None = None
    float_median_ms: float | None = None
    int8_median_ms: float | None = None
    runs: int = 0
    batch: int = 1
    threads: int = 1
    float_bytes: int = 0
    int8_bytes: int = 0
    samples: int = 0
    agreement: float | None = None
    predictions: int = 0
    sqnr_db: float | None = None
    sqnr_db_by_output: dict[str, float | None] = field(default_factory=dict)
    mac_share_int8: float = 0.0
    int8_nodes: int = 0
    float_nodes: int = 0
    calibration: str = ""
    ranges: str = ""
    data: str = ""
    format: str = ""
    placement: str = ""
    predicted_ms: float | None = None
    effort: str = ""
    corrections: tuple[str, ...] = ()
    rejected_sqnr_db: float | None = None
    rejected_speedup: float | None = None

    @property
    def speedup(self) -> float | None:
        """How many times faster the output is than the float model."""
        return self.float_ms / self.int8_ms if self.float_ms and self.int8_ms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All that a report shows of one run.

    Attributes:
        name: How the run is called: the output's file name without its suffix.
        model: Path of the float model.
        output: Path of the model that was written.
        created: When, in UTC, as ISO 8601.
        command: What gives the same output again, for a shell.
        headline: What came of it.
        graph: The simplified float model.
        units: What became of it.
        tensors: What is known of its tensors.
        weights: The weights by channel.
        times: Where the time goes.
        judged: Float against INT8, sample by sample; None where there are no data.
        pipeline: The transforms that ran, in order.
        findings: What the calibration data are found to be.
        search: The models that were tried; None where there was no search.
        stages: Seconds of each stage, in order.
        environment: Versions and the machine.
        remarks: What could not be gathered, and why.
    """

    name: str
    model: str
    output: str
    created: str
    command: str
    headline: Headline
    graph: Graph
    units: tuple[Unit, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    weights: tuple[Weights, ...] = ()
    times: tuple[OpTime, ...] = ()
    judged: Judged | None = None
    pipeline: tuple[Step, ...] = ()
    findings: tuple[Finding, ...] = ()
    search: Search | None = None
    stages: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values, with its kind and version."""
        return {"kind": KIND, "schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, found: Any, where: str = "the record") -> Record:
        """Read what `to_json` made.

        Raises:
            RequantError: It is none, of a newer version, or malformed.
        """
        if not isinstance(found, dict) or found.get("kind") != KIND:
            raise RequantError(f"{where}: not a run record; 'requant quantize ... --report RUN.json' writes one")
        schema = found.get("schema")
        if type(schema) is not int or schema < 1:
            raise RequantError(f"{where}: malformed run record: schema {schema!r}")
        if schema > SCHEMA:
            raise RequantError(f"{where}: run record of version {schema}; this program reads up to {SCHEMA}: update it")
        try:
            made: Record = _decoded(cls, {k: v for k, v in found.items() if k not in ("kind", "schema")}, "record")
        except ValueError as error:
            raise RequantError(f"{where}: malformed run record: {error}") from error
        return made


def load_record(path: str | os.PathLike[str]) -> Record:
    """Read a run record.

    Raises:
        RequantError: The file cannot be read, or is no run record of a version that this program knows.
    """
    name = os.fspath(path)
    try:
        found = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise RequantError(f"{name}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RequantError(f"{name}: not a run record: no JSON: {error}") from error
    return Record.from_json(found, name)


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON value as a value of a type: a dataclass, a union with None, a tuple, a dict, or a plain one.

    Raises:
        ValueError: It is none.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not type(None))
        return None if value is None else _decoded(inner, value, where)
    if is_dataclass(kind):
        return _row(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} is no list")
        return tuple(_decoded(arguments[0], each, f"{where}[{index}]") for index, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is no table")
        return {str(name): _decoded(arguments[1], each, f"{where}[{name!r}]") for name, each in value.items()}
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{where} is {str(value)[:40]!r}, not {'a number' if kind in (int, float) else kind.__name__}")
    return value


def _row(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON object as a dataclass; what it does not know is left out."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is no object")  # noqa: TRY004 - one error for all that is malformed
    missing = [each.name for each in fields(kind) if each.name not in value and _is_required(each)]
    if missing:
        raise ValueError(f"{where} has no {missing[0]!r}")
    hints = _hints(kind)
    return kind(**{name: _decoded(hints[name], value[name], f"{where}.{name}") for name in hints if name in value})


def _is_required(entry: Any) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}
