"""The run record: all values in the report of one run, in memory and as JSON."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from ... import RequantError
from ...calibration.checks.findings import Finding
from ...calibration.range_files.decoding import LARGE_FILE, Finite, convert, load_json
from ...transforms.int8.plan import Impl
from ..accuracy.outputs import Labelled

KIND = "requant run record"
SCHEMA = 1
"""The version of records that this program writes, and the newest version that it reads."""
CONVERSION_ROW, LAYOUT_ROW, REST_ROW = "quantize and dequantize", "changes of layout", "other"
"""Names of kinds of work that belong to no operator of the model, see `OpTime`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a graph.

    Attributes:
        name: Its name, unique in the graph.
        op: Its operator.
        domain: The operator's domain; empty for the standard one.
        inputs: Tensors that the node and its bodies read, without constants.
        outputs: Its results.
        attributes: Its attributes as text.
        constants: Its constant inputs by name, as ``float32 (16, 1, 3, 3)``.
        parameters: Elements of its constant inputs.
        bytes: Size of its constant inputs.
        body: The node that owns the body; empty for a node of the main graph.
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
    """The graph of a model, for its picture.

    Attributes:
        inputs: The model's inputs.
        outputs: The model's outputs.
        nodes: The nodes in execution order; the nodes of bodies come after the main graph.
        values: Type and shape of each tensor, where known, as ``float32 (N, 3, 224, 224)``.
        facts: Properties of the file: opset, producer, ...
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    values: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An operator with the nodes that it absorbs.

    Attributes:
        name: Name of the operator's node.
        op: The operator.
        nodes: Nodes of the graph that belong to it.
        outputs: Its results that other units read.
        implementation: How it computes.
        reason: Why the unit computes in float, or partly in float; empty otherwise.
        float_us: Time of its kernels in the float model, in microseconds; None without a kernel of its own.
        int8_us: The same for the output.
        float_kernels: The kernels that ran in the float model.
        int8_kernels: The kernels that ran in the output.
        relieved: Output channels with a smaller weight range, so that 16-bit sums cannot saturate.
        tried: How it computed in the rejected INT8 model; None without one.
        tried_us: The time of its kernels in the rejected INT8 model.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    outputs: tuple[str, ...]
    implementation: Impl
    reason: str = ""
    float_us: Finite | None = None
    int8_us: Finite | None = None
    float_kernels: tuple[str, ...] = ()
    int8_kernels: tuple[str, ...] = ()
    relieved: int = 0
    tried: Impl | None = None
    tried_us: Finite | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """A histogram with bins of equal width.

    Attributes:
        start: The lower end of the first bin.
        width: The width of a bin.
        counts: Values per bin.
    """

    start: Finite
    width: Finite
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Ranges, noise and histogram of a tensor.

    Attributes:
        name: The tensor.
        uint8: Whether it is stored in 8 bits in the output.
        lo: Lower end of the range of its integers; None without a range.
        hi: Upper end.
        shares: The tensor that gives the range; empty if the tensor has its own range.
        least: The least observed value; None where it was not observed.
        most: The greatest observed value.
        clipped: Share of the values outside the range, 0..1; None without a histogram.
        own_db: SQNR of rounding and clipping it to its range, in dB; None without a histogram.
        sqnr_db: SQNR in the output, with all errors before it, in dB; None where it is unknown or there is no noise.
        alone_db: SQNR at the worst output when this tensor alone is in integers, in dB; None where not tried.
        bins: Its histogram; None without one.
    """

    name: str
    uint8: bool = False
    lo: Finite | None = None
    hi: Finite | None = None
    shares: str = ""
    least: Finite | None = None
    most: Finite | None = None
    clipped: Finite | None = None
    own_db: Finite | None = None
    sqnr_db: Finite | None = None
    alone_db: Finite | None = None
    bins: Bins | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The range of the weights of each output channel of a node.

    Attributes:
        node: The node.
        op: Its operator.
        tensor: The weights.
        channels: How many output channels there are.
        group: Channels per entry of `lo` and `hi`; the last entry may have fewer.
        lo: The least weight.
        hi: The greatest weight.
    """

    node: str
    op: str
    tensor: str
    channels: int
    group: int
    lo: tuple[Finite, ...]
    hi: tuple[Finite, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """The time of one kind of work.

    Attributes:
        op: An operator of the model, or the name of other work: conversions, changes of layout, the rest.
        float_us: In the float model, in microseconds.
        int8_us: In the output.
        units: Units of this operator.
        int8: How many of these units are in int8.
        tried_us: In the rejected INT8 model; None without one.
    """

    op: str
    float_us: Finite
    int8_us: Finite
    units: int = 0
    int8: int = 0
    tried_us: Finite | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A sample on which float and INT8 differ.

    Attributes:
        where: The sample.
        label: The right class; empty where it is unknown.
        before: The class that the float model predicts; empty where no output is a score per class.
        after: The class that the INT8 model predicts.
        broken: Whether the float model is right and the INT8 model wrong.
        sqnr_db: SQNR of the worst output, in dB; None without noise.
        picture: The sample as a ``data:`` URI of a PNG; empty where it is no image.
    """

    where: str
    label: str = ""
    before: str = ""
    after: str = ""
    broken: bool = False
    sqnr_db: Finite | None = None
    picture: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Float against INT8, sample by sample.

    Attributes:
        data: A description of the data.
        samples: Number of samples.
        predictions: Number of predictions; 0 where no output is a score per class.
        differing: Predictions that differ.
        predicted_drop: The drop in accuracy that follows from the float model's probabilities, -1..1; None where no
            output is a score per class.
        labelled: Counts against labels; None without labels.
        items: The worst samples, broken ones first.
        apart: Whether the samples gave no ranges. If they did, other data may lose more: there is no interval.
    """

    data: str
    samples: int
    predictions: int = 0
    differing: int = 0
    predicted_drop: Finite | None = None
    labelled: Labelled | None = None
    items: tuple[Item, ...] = ()
    apart: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of a transform.

    Attributes:
        step: The transform with its options.
        applied: Number of rewrites.
        skipped: Why candidates were left alone, with counts.
        error: Why it failed; empty otherwise.
    """

    step: str
    applied: int
    skipped: dict[str, int] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A model that a search has tried.

    Attributes:
        price: The price of all noise, as a share of the float model's run time.
        value: The score; None where it is not finite.
        speedup: How many times faster than the float model.
        int8_units: Units that compute in integers.
        kept: Whether it keeps the bar.
    """

    price: Finite
    value: Finite | None
    speedup: Finite
    int8_units: int
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The models that a search has tried.

    Attributes:
        metric: The metric.
        before: The float model's score; None where it is not finite.
        bar: The score that the model must keep; None where it is not finite.
        points: All models that were tried.
        frontier: The models for which no other model is both faster and better.
        best: The chosen model; None where none keeps the bar.
        seconds: The duration of the search.
    """

    metric: str
    before: Finite | None
    bar: Finite | None
    points: tuple[Point, ...]
    frontier: tuple[Point, ...]
    best: Point | None
    seconds: Finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The main numbers of a run.

    Attributes:
        verdict: The result in one sentence, `Result.verdict`.
        why_not: Why the output is not the requested INT8 model; empty otherwise.
        notes: Deviations from the request or from the plan.
        float_ms: Least time of the float model, in milliseconds; None where it was not timed.
        int8_ms: Least time of the output.
        float_median_ms: Median time of the float model.
        int8_median_ms: Median time of the output.
        uncertainty: How far the speed-up may be from the truth, as a share of it; None if nothing was timed.
        runs: Runs of each.
        batch: Items per run; 1 where that is not known.
        threads: Threads inside one operator; 0 is the runtime's choice.
        float_bytes: Size of the float model with its external data.
        int8_bytes: Size of the output.
        samples: Samples that the outputs were compared on.
        agreement: Share of equal top-1 predictions, 0..1; None where no output is a score per class.
        predictions: Number of top-1 predictions.
        sqnr_db: SQNR of the worst output; None where the outputs are equal or were not compared.
        sqnr_db_by_output: SQNR of each output, and of its quiet part.
        mac_share_int8: Share of the multiply-accumulates in integer kernels, 0..1.
        int8_nodes: Nodes that compute or move integers.
        float_nodes: Nodes that stayed float.
        calibration: The range rule.
        ranges: The range file; empty where the ranges are from the data.
        data: A description of the data.
        format: ``qdq`` or ``qoperator``.
        placement: How the plan was chosen, see `Placement`.
        predicted_ms: The sum of the costs of the plan; None without measured costs.
        effort: The effort for accuracy.
        corrections: The corrections, by name.
        rejected_sqnr_db: SQNR of the worst output of the rejected INT8 model; None where none was rejected.
        rejected_speedup: How many times faster than float the rejected model was.
    """

    verdict: str = ""
    why_not: str = ""
    notes: tuple[str, ...] = ()
    float_ms: Finite | None = None
    int8_ms: Finite | None = None
    float_median_ms: Finite | None = None
    int8_median_ms: Finite | None = None
    uncertainty: Finite | None = None
    runs: int = 0
    batch: int = 1
    threads: int = 1
    float_bytes: int = 0
    int8_bytes: int = 0
    samples: int = 0
    agreement: Finite | None = None
    predictions: int = 0
    sqnr_db: Finite | None = None
    sqnr_db_by_output: dict[str, Finite | None] = field(default_factory=dict)
    mac_share_int8: Finite = 0.0
    int8_nodes: int = 0
    float_nodes: int = 0
    calibration: str = ""
    ranges: str = ""
    data: str = ""
    format: str = ""
    placement: str = ""
    predicted_ms: Finite | None = None
    effort: str = ""
    corrections: tuple[str, ...] = ()
    rejected_sqnr_db: Finite | None = None
    rejected_speedup: Finite | None = None

    @property
    def speedup(self) -> float | None:
        """How many times faster the output is than the float model."""
        return self.float_ms / self.int8_ms if self.float_ms and self.int8_ms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All values in the report of one run.

    Attributes:
        name: The name of the run: the output's file name without its suffix.
        model: Path of the float model.
        output: Path of the model that was written.
        created: When, in UTC, as ISO 8601.
        command: The command line that repeats the run.
        headline: The main numbers.
        graph: The simplified float model.
        units: Its units with their implementations.
        tensors: The tensors between units.
        weights: The weights by channel.
        times: The time of each operator.
        judged: Float against INT8, sample by sample; None without data.
        pipeline: The transforms that ran, in order.
        findings: Warnings and notes about the calibration data.
        search: The models that a search has tried; None without a search.
        stages: Seconds of each stage, in order.
        environment: Versions and the machine.
        remarks: Missing parts of the record, with the reason.
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
    stages: dict[str, Finite] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, with its kind and version."""
        return {"kind": KIND, "schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, document: Any, where: str = "the record") -> Record:
        """Return the record of a document that `to_json` made; unknown entries are ignored.

        Raises:
            RequantError: The document is no record, of a newer version, or malformed.
        """
        if not isinstance(document, dict) or document.get("kind") != KIND:
            raise RequantError(f"{where}: not a run record; 'requant quantize ... --report RUN.json' writes one")
        schema = document.get("schema")
        if type(schema) is not int or schema < 1:
            raise RequantError(f"{where}: malformed run record: schema {schema!r}")
        if schema > SCHEMA:
            raise RequantError(f"{where}: run record of version {schema}; this program reads up to {SCHEMA}: update it")
        return convert(document, cls, f"{where}: malformed run record")


def load_record(path: str | os.PathLike[str]) -> Record:
    """Read a run record.

    Raises:
        RequantError: The file cannot be read, or is no run record that this program reads.
    """
    return Record.from_json(load_json(path, "run record", most=LARGE_FILE), os.fspath(path))
