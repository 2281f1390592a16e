"""The options of `requant quantize` and `requant check`, declared once.

The command line, the keys of ``requant.toml`` and its template are made of these tables. Nothing heavy is imported
here, so that ``--help`` and shell completion are fast.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from ...system.given import MOST_ITEMS
from .efforts import CORRECTIONS, EFFORTS
from .option import MOST_THREADS, Kind, Option, parse_batches, parse_bytes

FORMATS = ("qdq", "qoperator")
TARGETS = ("auto", "vnni", "avx2")
PLACES = ("measured", "estimated", "rules", "all")
KERNELS = ("auto", "native", "exact", "stock")
RUNTIMES, AUTO = ("onnxruntime", "openvino"), "auto"
PRECISIONS = ("default", "f32")
BASELINE = "requant.lock.json"
SOURCES = "FILE.npz[:SPLIT], a folder, FILE.csv, FILE.jsonl or FILE.py:NAME; see docs/data.md."
METRICS = (
    "top1, top5, f1, auroc, miou, map, map50, map75, perplexity, wer, cer, recall@K, psnr, sisdr, mse, agreement, "
    "cosine, sqnr, METRIC:FILE.py:NAME or FILE.py:NAME; see docs/metrics.md."
)


class Strategy(StrEnum):
    """The int8 form of an operator with weights."""

    AUTO = "auto"
    STATIC = "static"
    STATIC_FLOAT = "static-float"
    DYNAMIC = "dynamic"
    BLOCK = "block"
    WEIGHT = "weight-only"


# fmt: off  # a table: one option takes two or three lines
DATA = Option("data", Kind.TEXT, SOURCES, "data", metavar="SRC")
READING = (
    Option(
        "preprocess",
        Kind.TEXT,
        group="data",
        metavar="'...'",
        sample="resize=256 crop=224 scale=255",
        help="How images, .wav files or texts are read; see docs/data.md.",
        more="For instance 'resize=256 crop=224 scale=255', 'rate=16000' or 'column=text'.",
    ),
    Option(
        "tokenizer",
        Kind.TEXT,
        group="data",
        metavar="FN",
        sample="tokens.py:encode",
        help="FILE.py:NAME, a function that is called with each text of a .csv or .jsonl file.",
    ),
    Option(
        "labels",
        Kind.TEXT,
        group="data",
        unset="each sub-folder is a class",
        metavar="FILE",
        sample="labels.csv",
        help="A .csv file with the label of each file.",
    ),
    Option(
        "state",
        Kind.EACH,
        group="data",
        metavar="OUT=IN",
        sample=["hn=h0"],
        unset="recognised",
        help="Outputs that feed inputs of the next sample, or none.",
        more="May be repeated, or separated by commas. See docs/data.md.",
    ),
)
"""The options to read data."""
RUNTIME = Option(
    "runtime",
    Kind.TEXT,
    group="speed",
    default="onnxruntime",
    choices=RUNTIMES,
    help="The runtime that the model is for",
)
PRECISION = Option(
    "precision",
    Kind.TEXT,
    default="default",
    choices=PRECISIONS,
    help="OpenVINO's type of float operators",
)
SAMPLES = Option(
    "samples", Kind.INT, "Use N samples, evenly spaced.", "data", unset="all", least=1, metavar="N", sample=200
)
BATCH = Option(
    "batch", Kind.INT, "Items per run while timing.", "speed", default=1, least=1, most=MOST_ITEMS, metavar="N"
)
BATCHES = Option(
    "batch",
    Kind.INTS,
    group="speed",
    metavar="N[,N...]",
    sample=[1, 16],
    unset="1",
    parse=parse_batches,
    help="Items per run while timing. Of several sizes, one plan serves all; see docs/speed.md.",
)
THREADS = Option(
    "threads",
    Kind.INT,
    "Threads while timing; 0: the runtime chooses.",
    default=1,
    least=0,
    most=MOST_THREADS,
    metavar="N",
    group="speed",
)
LOWER = Option("lower", Kind.FLAG, "Lower values of --metric FILE.py:NAME are better.", "accuracy")
FORCE = Option("force", Kind.FLAG, "Overwrite an existing output.", "output", project=True)
JSON = Option("json", Kind.FLAG, "Print one JSON object on stdout.", "output")
CALIBRATION = Option(
    "calibration",
    Kind.TEXT,
    group="accuracy",
    metavar="RULE",
    sample="auto",
    help="Range rule: minmax, percentile(99.99), mean_minmax, mse, aciq, entropy or auto.",
    more="[default: auto, or minmax with --effort low]",
)
OVERRIDES = Option(
    "overrides",
    Kind.TEXT,
    group="accuracy",
    metavar="FILE",
    sample="ranges.toml",
    help="Your own ranges of single tensors, as TOML or JSON; they take precedence.",
)
SYMMETRIC = Option("symmetric", Kind.FLAG, "Zero points of activations lie in the middle of the type.")
EXTERNAL_DATA = Option("external_data", Kind.FLAG, "Write the weights to one file beside the model.", "output")
INT8 = (
    SAMPLES,
    Option(
        "place",
        Kind.TEXT,
        group="speed",
        default="measured",
        choices=PLACES,
        help="What decides which operators become int8; see docs/speed.md",
    ),
    Option(
        "kernels",
        Kind.TEXT,
        "Native operators: where they are faster, everywhere, or nowhere",
        group="speed",
        default="auto",
        choices=KERNELS,
    ),
    CALIBRATION,
    Option(
        "effort",
        Kind.TEXT,
        group="accuracy",
        default="medium",
        choices=tuple(EFFORTS),
        help="How much is done for accuracy; see docs/accuracy.md",
    ),
    Option(
        "corrections",
        Kind.NAMES,
        group="accuracy",
        metavar="A,B",
        sample=["bias", "rounding"],
        help=f"Use only these: {', '.join(CORRECTIONS)}.",
        more="[default: the corrections of --effort]",
    ),
    Option("format", Kind.TEXT, "QDQ pairs, or fused QLinear operators", "output", default="qdq", choices=FORMATS),
    Option("exclude_nodes", Kind.NAMES, "Nodes that stay float; 'head*' names several.", metavar="A,B"),
    Option("exclude_ops", Kind.NAMES, "Operator types that stay float.", metavar="A,B"),
    Option("include_ops", Kind.NAMES, "The only operator types that may become int8.", metavar="A,B"),
    Option(
        "strategy",
        Kind.NAMES,
        metavar="A,B",
        sample=["auto"],
        help=f"{', '.join(Strategy)}; or NODE=STRATEGY for one node.",
        more="[default: auto]",
    ),
    Option("dynamic", Kind.FLAG, "Ranges are computed at run time, without --data: --strategy dynamic."),
    Option(
        "ranges",
        Kind.TEXT,
        group="accuracy",
        metavar="FILE",
        sample="ranges.json",
        help="A range file or a min/max log; --data then only measures the result.",
    ),
    OVERRIDES,
    Option("activation", Kind.TEXT, "Integer type of activations", default="u8", choices=("u8", "s8")),
    Option(
        "block_bits",
        Kind.INT,
        "Bits of weights in blocks, 8 or 4, with --strategy block.",
        default=8,
        least=4,
        metavar="N",
    ),
    Option(
        "block_size",
        Kind.INT,
        "Weights with one scale: 16, 32, 64, 128 or 256.",
        unset="128 with 8 bits, 32 with 4",
        sample=128,
        least=16,
        metavar="N",
    ),
    Option("weight", Kind.TEXT, "Integer type of weights", default="s8", choices=("s8", "u8")),
    SYMMETRIC,
    Option(
        "isa", Kind.TEXT, "Instructions of the target CPU; auto: this CPU", "speed", default="auto", choices=TARGETS
    ),
    replace(RUNTIME, choices=(*RUNTIMES, AUTO)),
    PRECISION,
    Option(
        "portable",
        Kind.FLAG,
        "For any runtime, such as OpenVINO: standard operators, placed by rules; its time decides nothing.",
        "speed",
    ),
    Option(
        "costs",
        Kind.TEXT,
        group="speed",
        metavar="FILE",
        sample="server.json",
        help="Place by the costs of another machine, from 'requant costs measure'.",
    ),
    Option(
        "plan",
        Kind.TEXT,
        group="speed",
        metavar="FILE",
        sample="edited.plan.json",
        help="Place single units by a plan file, an edited OUT.plan.json.",
    ),
    Option(
        "lambda", Kind.NUMBER, "Microseconds that one unit of noise costs.", "speed", default=0.0, least=0, metavar="US"
    ),
    EXTERNAL_DATA,
    Option(
        "force_int8", Kind.FLAG, "Write the INT8 model even if it is not worth it; exit code 0.", "output", project=True
    ),
    BATCHES,
    THREADS,
)
"""The options that shape the INT8 model, and its measurement."""
SEARCH = (
    Option(
        "max_drop",
        Kind.AMOUNT,
        group="accuracy",
        metavar="D",
        sample="0.5%",
        help="Search the fastest model that loses at most D of --metric: 0.003 or 0.5%.",
    ),
    Option(
        "metric",
        Kind.TEXT,
        "The metric of --max-drop, such as top1, map or psnr; see docs/metrics.md.",
        "accuracy",
        metavar="M",
        sample="top1",
    ),
    LOWER,
    Option(
        "eval_data",
        Kind.TEXT,
        group="accuracy",
        metavar="SRC",
        sample="test.npz",
        help="Data on which --max-drop compares models; use other data than for --data.",
    ),
    Option(
        "time_budget",
        Kind.NUMBER,
        group="accuracy",
        unset="600",
        least=0,
        above=True,
        metavar="S",
        sample=600,
        help="Seconds after which --max-drop tries no further model.",
    ),
)
"""The search for the fastest model within a loss of accuracy."""
REPORT = Option(
    "report",
    Kind.EACH,
    group="output",
    metavar="FILE",
    sample=["report.html"],
    help="An .html page of the run, or a .json record for 'requant report'.",
    more="May be repeated. See docs/report.md.",
)
WORKERS = (
    Option("workers", Kind.INT, "Runs at a time.", "data", unset="one per CPU", least=1, metavar="N", sample=4),
    Option(
        "memory_limit",
        Kind.TEXT,
        group="data",
        metavar="SIZE",
        sample="2GB",
        parse=parse_bytes,
        help="Memory that the process should not exceed: 2GB.",
        unset="a quarter of the machine's memory",
    ),
    Option(
        "executor",
        Kind.TEXT,
        default="threads",
        choices=("threads", "processes", "dask"),
        help="Where runs happen; processes help if Python code reads the data",
    ),
    Option(
        "scheduler",
        Kind.TEXT,
        metavar="URL",
        sample="tcp://host:8786",
        help="Address of a Dask cluster: tcp://host:8786.",
        more="Without it, --executor dask starts a cluster here.",
    ),
)
"""The options to run the model over the data."""
QUANTIZE: tuple[Option, ...] = (
    Option(
        "data",
        Kind.TEXT,
        group="data",
        metavar="SRC",
        sample="calib.npz",
        help=SOURCES,
        more="Not needed with --ranges or --dynamic.",
    ),
    *READING,
    *INT8,
    *SEARCH,
    REPORT,
    *WORKERS,
    FORCE,
)
"""The options of `requant quantize`, the keys of the table ``[quantize]``."""
AS_BEFORE = "as in the baseline, or 1"
CHECK: tuple[Option, ...] = (
    Option(
        "data", Kind.TEXT, SOURCES, "data", metavar="SRC", more="Both models are measured on it.", sample="test.npz"
    ),
    *READING,
    Option("baseline", Kind.TEXT, "The lock file.", "output", default=BASELINE, metavar="FILE"),
    Option(
        "metric",
        Kind.EACH,
        group="accuracy",
        metavar="M",
        sample=["top1"],
        help="Metrics, such as top1, map or cosine; see docs/metrics.md.",
        more="May be repeated. [default: the metrics of the baseline]",
    ),
    LOWER,
    Option(
        "samples", Kind.INT, "Use N samples, evenly spaced.", "data", unset="all", least=1, metavar="N", sample=1000
    ),
    replace(BATCH, default=None, unset=AS_BEFORE, sample=1),
    Option(
        "threads",
        Kind.INT,
        group="speed",
        unset=AS_BEFORE,
        least=0,
        most=MOST_THREADS,
        metavar="N",
        sample=1,
        help="Threads while timing; 0: the runtime chooses.",
    ),
    replace(RUNTIME, default=None, unset="as in the baseline", sample="onnxruntime"),
    replace(PRECISION, default=None, unset="as in the baseline", sample="default"),
    Option("seconds", Kind.NUMBER, "Duration of the timing; 0: no timing.", "speed", default=2.0, least=0, metavar="S"),
    Option("junit", Kind.TEXT, "A JUnit XML file to write.", "output", metavar="FILE", sample="requant.xml"),
    Option(
        "markdown",
        Kind.TEXT,
        group="output",
        metavar="FILE",
        sample="requant.md",
        help="A Markdown file to write.",
        more="The summary of a GitHub job gets the same text.",
    ),
    JSON,
    Option(
        "tolerance",
        Kind.TABLE,
        group="accuracy",
        metavar="NAME=X",
        help="Allowed loss, by name of a metric or of a measurement.",
        more="Measurements: latency, mac_share, size, inputs; speedup is the least speed-up. May be repeated.",
    ),
)
"""The options of `requant check`, the keys of the table ``[check]``."""
# fmt: on
