"""The options of `requant quantize` and `requant check`, declared once.

The command line, the keys of ``requant.toml`` and its template are made of these tables. Nothing heavy is imported
here, so that ``--help`` and shell completion are fast.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from ... import RequantError
from .efforts import CORRECTIONS, EFFORTS

FORMATS = ("qdq", "qoperator")
TARGETS = ("auto", "vnni", "avx2")
PLACES = ("measured", "estimated", "rules", "all")
KERNELS = ("auto", "native", "exact", "stock")
BASELINE = "requant.lock.json"
SOURCES = "FILE.npz[:SPLIT], a folder, FILE.csv, FILE.jsonl or FILE.py:NAME; see docs/data.md."
METRICS = (
    "top1, top5, f1, auroc, miou, map, map50, map75, perplexity, wer, cer, recall@K, psnr, sisdr, mse, agreement, "
    "cosine, sqnr, METRIC:FILE.py:NAME or FILE.py:NAME; see docs/metrics.md."
)
UNITS: Mapping[str, int] = {"": 0, "B": 0, "K": 1, "KB": 1, "M": 2, "MB": 2, "G": 3, "GB": 3, "T": 4, "TB": 4}
"""The power of 1000, or of 1024 with an ``i`` in the unit, by unit of a memory size."""


class Strategy(StrEnum):
    """The int8 form of an operator with weights."""

    AUTO = "auto"
    STATIC = "static"
    STATIC_FLOAT = "static-float"
    DYNAMIC = "dynamic"
    BLOCK = "block"
    WEIGHT = "weight-only"


class Kind(Enum):
    """The type of an option's value: its description in errors, and the types that TOML may have for it."""

    FLAG = ("true or false", bool)
    INT = ("a whole number", int)
    INTS = ("a whole number or a list of whole numbers", int, list)
    """Whole numbers, separated by commas on the command line."""
    NUMBER = ("a number", int, float)
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
    return int(float(match[1]) * base ** UNITS[unit])


def parse_batches(text: str) -> tuple[int, ...]:
    """Return batch sizes separated by commas.

    >>> parse_batches("1, 16")
    (1, 16)

    Raises:
        RequantError: A part is not a whole number, or the sizes are refused.
    """
    parts = [part.strip() for part in text.split(",")]
    wrong = next((part for part in parts if not re.fullmatch(r"[+-]?[0-9]{1,9}", part)), None)
    if wrong is not None:
        raise RequantError(f"{wrong!r} is not a whole number; write for instance 16, or 1,16")
    sizes = tuple(map(int, parts))
    check_batches(sizes)
    return sizes


def check_batches(sizes: tuple[int, ...]) -> None:
    """Refuse batch sizes below 1, repeated sizes, and no size at all.

    Raises:
        RequantError: The sizes are refused.
    """
    if not sizes:
        raise RequantError("batch needs at least one size")
    if min(sizes) < 1:
        raise RequantError(f"batch must be at least 1, not {min(sizes)}")
    repeated = next((size for size in sizes if sizes.count(size) > 1), None)
    if repeated is not None:
        raise RequantError(f"batch {repeated} is given more than once")


# fmt: off  # a table: one option takes two or three lines
DATA = Option("data", Kind.TEXT, SOURCES, metavar="SRC")
READING = (
    Option(
        "preprocess",
        Kind.TEXT,
        metavar="'...'",
        sample="resize=256 crop=224 scale=255",
        help="How images, .wav files or texts are read; see docs/data.md.",
        more="For instance 'resize=256 crop=224 scale=255', 'rate=16000' or 'column=text'.",
    ),
    Option(
        "tokenizer",
        Kind.TEXT,
        metavar="FN",
        sample="tokens.py:encode",
        help="FILE.py:NAME, a function that is called with each text of a .csv or .jsonl file.",
    ),
    Option(
        "labels",
        Kind.TEXT,
        unset="each sub-folder is a class",
        metavar="FILE",
        sample="labels.csv",
        help="A .csv file with the label of each file.",
    ),
    Option(
        "state",
        Kind.EACH,
        metavar="OUT=IN",
        sample=["hn=h0"],
        unset="recognised",
        help="Outputs that feed inputs of the next sample, or none.",
        more="May be repeated, or separated by commas. See docs/data.md.",
    ),
)
"""The options to read data."""
SAMPLES = Option("samples", Kind.INT, "Use N samples, evenly spaced.", unset="all", least=1, metavar="N", sample=200)
BATCH = Option("batch", Kind.INT, "Items per run while timing.", default=1, least=1, metavar="N")
BATCHES = Option(
    "batch",
    Kind.INTS,
    metavar="N[,N...]",
    sample=[1, 16],
    unset="1",
    parse=parse_batches,
    help="Items per run while timing. Of several sizes, one plan serves all; see docs/speed.md.",
)
THREADS = Option(
    "threads", Kind.INT, "Threads while timing; 0: the runtime chooses.", default=1, least=0, most=4096, metavar="N"
)
LOWER = Option("lower", Kind.FLAG, "Lower values of --metric FILE.py:NAME are better.")
FORCE = Option("force", Kind.FLAG, "Overwrite an existing output.", project=True)
JSON = Option("json", Kind.FLAG, "Print one JSON object on stdout.")
CALIBRATION = Option(
    "calibration",
    Kind.TEXT,
    metavar="RULE",
    sample="auto",
    help="Range rule: minmax, percentile(99.99), mean_minmax, mse, aciq, entropy or auto.",
    more="[default: auto, or minmax with --effort low]",
)
OVERRIDES = Option(
    "overrides",
    Kind.TEXT,
    metavar="FILE",
    sample="ranges.toml",
    help="Your own ranges of single tensors, as TOML or JSON; they take precedence.",
)
SYMMETRIC = Option("symmetric", Kind.FLAG, "Zero points of activations lie in the middle of the type.")
EXTERNAL_DATA = Option("external_data", Kind.FLAG, "Write the weights to one file beside the model.")
INT8 = (
    SAMPLES,
    Option(
        "place",
        Kind.TEXT,
        default="measured",
        choices=PLACES,
        help="What decides which operators become int8; see docs/speed.md",
    ),
    Option(
        "kernels",
        Kind.TEXT,
        "Native operators: where they are faster, everywhere, or nowhere",
        default="auto",
        choices=KERNELS,
    ),
    CALIBRATION,
    Option(
        "effort",
        Kind.TEXT,
        default="medium",
        choices=tuple(EFFORTS),
        help="How much is done for accuracy; see docs/accuracy.md",
    ),
    Option(
        "corrections",
        Kind.NAMES,
        metavar="A,B",
        sample=[name for name, row in CORRECTIONS.items() if "medium" in row.efforts],
        help=f"Use only these: {', '.join(CORRECTIONS)}.",
        more="[default: those of --effort]",
    ),
    Option("format", Kind.TEXT, "QDQ pairs, or fused QLinear operators", default="qdq", choices=FORMATS),
    Option("exclude_nodes", Kind.NAMES, "Nodes that stay float.", metavar="A,B"),
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
    Option("isa", Kind.TEXT, "Instructions of the target CPU; auto: this CPU", default="auto", choices=TARGETS),
    Option("portable", Kind.FLAG, "For other runtimes too, such as OpenVINO: standard operators, placed by rules."),
    Option(
        "costs",
        Kind.TEXT,
        metavar="FILE",
        sample="server.json",
        help="Place by the costs of another machine, from 'requant costs measure'.",
    ),
    Option(
        "plan",
        Kind.TEXT,
        metavar="FILE",
        sample="edited.plan.json",
        help="Place single units by a plan file, an edited OUT.plan.json.",
    ),
    Option("lambda", Kind.NUMBER, "Microseconds that one unit of noise costs.", default=0.0, least=0, metavar="US"),
    EXTERNAL_DATA,
    Option("force_int8", Kind.FLAG, "Write the INT8 model even if it is not worth it; exit code 0.", project=True),
    BATCHES,
    THREADS,
)
"""The options that shape the INT8 model, and its measurement."""
SEARCH = (
    Option(
        "max_drop",
        Kind.TEXT,
        metavar="D",
        sample="0.5%",
        help="Search the fastest model that loses at most D of --metric: 0.003 or 0.5%.",
    ),
    Option("metric", Kind.TEXT, "The metric of --max-drop.", metavar="M", more=METRICS, sample="top1"),
    LOWER,
    Option(
        "eval_data",
        Kind.TEXT,
        metavar="SRC",
        sample="test.npz",
        help="Data on which --max-drop compares models; use other data than for --data.",
    ),
    Option(
        "time_budget",
        Kind.NUMBER,
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
    metavar="FILE",
    sample=["report.html"],
    help="An .html page of the run, or a .json record for 'requant report'.",
    more="May be repeated. See docs/report.md.",
)
WORKERS = (
    Option("workers", Kind.INT, "Runs at a time.", unset="one per CPU", least=1, metavar="N", sample=4),
    Option(
        "memory_limit",
        Kind.TEXT,
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
    Option("data", Kind.TEXT, SOURCES, metavar="SRC", more="Both models are measured on it.", sample="test.npz"),
    *READING,
    Option("baseline", Kind.TEXT, "The lock file.", default=BASELINE, metavar="FILE"),
    Option(
        "metric",
        Kind.EACH,
        metavar="M",
        sample=["top1"],
        help="Metrics, such as top1, map or cosine; see docs/metrics.md.",
        more=f"May be repeated: {METRICS} [default: those of the baseline]",
    ),
    LOWER,
    Option("samples", Kind.INT, "Use N samples, evenly spaced.", unset="all", least=1, metavar="N", sample=1000),
    Option("batch", Kind.INT, "Items per run while timing.", unset=AS_BEFORE, least=1, metavar="N", sample=1),
    Option(
        "threads",
        Kind.INT,
        unset=AS_BEFORE,
        least=0,
        most=4096,
        metavar="N",
        sample=1,
        help="Threads while timing; 0: the runtime chooses.",
    ),
    Option("seconds", Kind.NUMBER, "Duration of the timing; 0: no timing.", default=2.0, least=0, metavar="S"),
    Option("junit", Kind.TEXT, "A JUnit XML file to write.", metavar="FILE", sample="requant.xml"),
    Option(
        "markdown",
        Kind.TEXT,
        metavar="FILE",
        sample="requant.md",
        help="A Markdown file to write.",
        more="The summary of a GitHub job gets the same text.",
    ),
    JSON,
    Option(
        "tolerance",
        Kind.TABLE,
        metavar="NAME=X",
        help="Allowed loss, by name of a metric or of a measurement.",
        more="Measurements: latency, mac_share, size, inputs; speedup is the least speed-up. May be repeated.",
    ),
)
"""The options of `requant check`, the keys of the table ``[check]``."""
# fmt: on
