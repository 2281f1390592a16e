"""``requant.toml``: what is quantized and checked, written down once. Every option of the command line has its key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import RequantError, UnknownNameError
from ..runtime.progress import Progress, silent
from .baseline import tolerances
from .judge import Line, Status
from .lock import check_writable
from .run import Check, CheckOptions, judged, ready

if TYPE_CHECKING:
    from ...calibration.session import InputSpec

NAME = "requant.toml"
BASELINE = "requant.lock.json"


class Kind(StrEnum):
    """What a key holds."""

    FLAG = "true or false"
    INT = "a whole number"
    NUMBER = "a number"
    TEXT = "a text"
    NAMES = "a text, or a list of texts"
    EACH = "a text, or a list of texts "
    """As `NAMES`, where the option is given once for each."""
    TABLE = "a table of numbers or texts"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a table of the file.

    Attributes:
        name: The name of the option, with underscores.
        kind: What it holds.
        about: What it means, in a line.
        example: What stands there where nothing is said, or an example, as it is written in the file.
    """

    name: str
    kind: Kind
    about: str
    example: str


def _reading() -> tuple[Key, ...]:
    """Return the keys that say how data are read."""
    return (
        Key("preprocess", Kind.TEXT, "of images, .wav files or texts", '"resize=256 crop=224 scale=255"'),
        Key("tokenizer", Kind.TEXT, "of .csv and .jsonl files: FILE.py:NAME", '"tokens.py:encode"'),
        Key("labels", Kind.TEXT, "a .csv file of files and labels; else sub-folders are classes", '"labels.csv"'),
    )


TOP: tuple[Key, ...] = (
    Key("model", Kind.TEXT, "the float model", '"model.onnx"'),
    Key("output", Kind.TEXT, "the INT8 model", '"model_int8.onnx"'),
    Key("quantize", Kind.TABLE, "how it is quantized; without it, the INT8 model is there already", ""),
    Key("check", Kind.TABLE, "how it is checked", ""),
)
QUANTIZE: tuple[Key, ...] = (
    Key("data", Kind.TEXT, "the sample that gives the ranges", '"calib.npz"'),
    *_reading(),
    Key("samples", Kind.INT, "use N samples, picked evenly", "200"),
    Key("place", Kind.TEXT, "what decides where int8 pays: measured, estimated, rules, all", '"measured"'),
    Key("calibration", Kind.TEXT, "the rule of ranges", '"auto"'),
    Key("effort", Kind.TEXT, "how much is done for accuracy: low, medium, high", '"medium"'),
    Key("corrections", Kind.NAMES, "only these: equalize, means, bias, rounding", '["equalize", "means", "bias"]'),
    Key("format", Kind.TEXT, "qdq or qoperator", '"qdq"'),
    Key("exclude_nodes", Kind.NAMES, "nodes that stay float", "[]"),
    Key("exclude_ops", Kind.NAMES, "operator types that stay float", "[]"),
    Key("include_ops", Kind.NAMES, "the only operator types that may become int8", "[]"),
    Key("strategy", Kind.NAMES, "auto, static, static-float, dynamic, weight-only, or NODE=STRATEGY", '["auto"]'),
    Key("dynamic", Kind.FLAG, "ranges are found at run time: no data", "false"),
    Key("ranges", Kind.TEXT, "a range file or a min/max log; data then only measure", '"ranges.json"'),
    Key("overrides", Kind.TEXT, "your own ranges of single tensors", '"ranges.toml"'),
    Key("activation", Kind.TEXT, "u8 or s8", '"u8"'),
    Key("weight", Kind.TEXT, "s8 or u8", '"s8"'),
    Key("symmetric", Kind.FLAG, "zero points of activations in the middle of the type", "false"),
    Key("isa", Kind.TEXT, "the target: auto, vnni, avx2", '"auto"'),
    Key("portable", Kind.FLAG, "for other runtimes than ONNX Runtime too", "false"),
    Key("costs", Kind.TEXT, "place by costs measured elsewhere", '"server.json"'),
    Key("plan", Kind.TEXT, "what single units become", '"edited.plan.json"'),
    Key("lambda", Kind.NUMBER, "microseconds per unit of noise", "0.0"),
    Key("max_drop", Kind.TEXT, "search the fastest model that loses at most so much of the metric", '"0.5%"'),
    Key("metric", Kind.TEXT, "for max_drop", '"top1"'),
    Key("lower", Kind.FLAG, "of a metric FILE.py:NAME a lower number is better", "false"),
    Key("eval_data", Kind.TEXT, "for max_drop: the data to judge by", '"test.npz"'),
    Key("time_budget", Kind.NUMBER, "for max_drop: seconds", "600"),
    Key("external_data", Kind.FLAG, "weights go into one file beside the output", "false"),
    Key("force_int8", Kind.FLAG, "write the INT8 model even where it is not faster: the check judges that", "true"),
    Key("report", Kind.EACH, "pages or records of the run", '["report.html"]'),
    Key("batch", Kind.INT, "items per run while timing", "1"),
    Key("threads", Kind.INT, "threads while timing; 0: the runtime's choice", "1"),
    Key("workers", Kind.INT, "runs at a time; else one per CPU", "4"),
    Key("memory_limit", Kind.TEXT, "what the process should stay below; else a quarter of the machine", '"2GB"'),
    Key("executor", Kind.TEXT, "threads, processes or dask", '"threads"'),
    Key("scheduler", Kind.TEXT, "of a Dask cluster", '"tcp://host:8786"'),
    Key("force", Kind.FLAG, "overwrite the output of the last run", "true"),
)
CHECK: tuple[Key, ...] = (
    Key(
        "data",
        Kind.TEXT,
        "what both models are measured on, with labels; other than what gave the ranges",
        '"test.npz"',
    ),
    *_reading(),
    Key("metric", Kind.EACH, "top1, top5, agreement, sqnr, psnr, perplexity, miou, auroc, FILE.py:NAME", '["top1"]'),
    Key("lower", Kind.FLAG, "of a metric FILE.py:NAME a lower number is better", "false"),
    Key("baseline", Kind.TEXT, "the lock file", f'"{BASELINE}"'),
    Key("samples", Kind.INT, "use N samples, picked evenly", "1000"),
    Key("batch", Kind.INT, "items per run while timing", "1"),
    Key("threads", Kind.INT, "threads while timing; 0: the runtime's choice", "1"),
    Key("seconds", Kind.NUMBER, "how long the latency is measured; 0: not at all", "2.0"),
    Key("junit", Kind.TEXT, "a JUnit XML file to write", '"requant.xml"'),
    Key("markdown", Kind.TEXT, "a Markdown file to write", '"requant.md"'),
    Key("json", Kind.FLAG, "one JSON object on stdout", "false"),
    Key("tolerance", Kind.TABLE, "how much may be lost, by name of a metric or of a measurement", ""),
)
TABLES: Mapping[str, tuple[Key, ...]] = {"quantize": QUANTIZE, "check": CHECK}
PYTHON: Mapping[Kind, tuple[type, ...]] = {
    Kind.FLAG: (bool,),
    Kind.INT: (int,),
    Kind.NUMBER: (int, float),
    Kind.TEXT: (str,),
    Kind.NAMES: (str, list),
    Kind.EACH: (str, list),
    Kind.TABLE: (dict,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """What is quantized and checked.

    Attributes:
        path: Where it is written; None where the command line says it all.
        model: Path of the float model.
        output: Path of the INT8 model.
        quantize: The options of ``requant quantize`` by key; None where the INT8 model is there already.
        check: The options of ``requant check`` by key.
    """

    path: Path | None
    model: str
    output: str
    quantize: Mapping[str, Any] | None = None
    check: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """What relative paths are relative to."""
        return Path() if self.path is None else self.path.parent

    @property
    def baseline(self) -> str:
        """Path of the lock file."""
        return str(self.check.get("baseline", BASELINE))

    def file(self, name: str) -> Path | None:
        """Return a file to write that a key of the table ``check`` names; None where it does not."""
        return self.folder / self.check[name] if name in self.check else None

    def with_given(self, given: Mapping[str, Any]) -> Project:
        """Return the project with what else was given, which wins.

        Args:
            given: By key of the table ``check``; or ``float`` and ``model``, the paths of the two models.
        """
        own = {name: self._seen(name, value) for name, value in given.items()}
        both = {**self.check, **{name: value for name, value in own.items() if name not in ("float", "model")}}
        if "tolerance" in given:
            both["tolerance"] = {**self.check.get("tolerance", {}), **given["tolerance"]}
        model, output = own.get("float", self.model), own.get("model", self.output)
        return replace(self, model=model, output=output, check=_checked("check", both))

    def _seen(self, name: str, value: Any) -> Any:
        """Return what was given as it is seen from the folder of the file: paths are of the current one."""
        if self.path is None or name not in PATHS:
            return value
        file = value if Path(value).exists() or name not in SOURCES else value.rpartition(":")[0]
        known = name not in SOURCES or Path(file).exists()
        return os.path.abspath(file) + value[len(file) :] if file and known else value


PATHS = ("float", "model", "baseline", "junit", "markdown", "data", "labels", "tokenizer")
SOURCES = ("data", "tokenizer")
"""Those that may name a part of a file, or no file."""


def load_project(path: str | os.PathLike[str]) -> Project:
    """Read a project.

    Raises:
        RequantError: The file is missing, no TOML, lacks a key, or has one that is unknown or of a wrong type.
    """
    name = os.fspath(path)
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RequantError(f"{name}: cannot be read: {error.strerror}; 'requant init MODEL' writes one") from error
    except ValueError as error:  # not UTF-8 or TOML; the message has the line
        raise RequantError(f"{name}: cannot be read: {' '.join(str(error).split())}") from error
    try:
        return _project(Path(path), document)
    except RequantError as error:
        raise RequantError(f"{name}: {error}") from error


def asked_project(path: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> Project:
    """Return what a file and a command line ask for together.

    Args:
        path: The file; None for none.
        given: What stands on the command line, see `Project.with_given`.

    Raises:
        RequantError: The file cannot be read, there is neither a file nor two models, or a file to write cannot be.
    """
    if path is None:
        missing = next((name for name in ("float", "model", "data") if name not in given), None)
        if missing is not None:
            raise RequantError(f"give a {NAME}, or --float FLOAT --model INT8 --data SRC: --{missing} is missing")
    found = Project(path=None, model="", output="") if path is None else load_project(path)
    found = found.with_given({name: [*value] if isinstance(value, tuple) else value for name, value in given.items()})
    check_writable(found.file("junit"), found.file("markdown"))
    return found


def _project(path: Path, document: Mapping[str, Any]) -> Project:
    """Read a whole document."""
    _check_keys("", document, TOP)
    missing = next((key.name for key in TOP[:2] if key.name not in document), None)
    if missing is not None:
        raise RequantError(f"no {missing!r}; write for instance {missing} = {_row(TOP, missing).example}")
    for table in TABLES:
        _checked(table, document.get(table, {}))
    return Project(
        path=path,
        model=document["model"],
        output=document["output"],
        quantize=document.get("quantize"),
        check=document.get("check", {}),
    )


def _checked(table: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse a key or a value that a table does not take."""
    _check_keys(table, values, TABLES[table])
    return values


def _check_keys(table: str, values: Mapping[str, Any], keys: tuple[Key, ...]) -> None:
    """Refuse a key that is unknown, or a value of another type."""
    known = {key.name: key for key in keys}
    where = f"[{table}] " if table else ""
    for name, value in values.items():
        if name not in known:
            raise UnknownNameError(f"key{f' in [{table}]' if table else ''}", name, known)
        kind = known[name].kind
        fits = isinstance(value, PYTHON[kind]) and (kind is Kind.FLAG or not isinstance(value, bool))
        if not fits or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
            raise RequantError(f"{where}{name}: {kind.value.strip()} is wanted, not {value!r}")


def _row(keys: tuple[Key, ...], name: str) -> Key:
    """Return a key by name."""
    return next(key for key in keys if key.name == name)


# ------------------------------------------------------------------------------------------------------- the check


def check_options(values: Mapping[str, Any]) -> CheckOptions:
    """Return what the table ``check`` asks for.

    Raises:
        RequantError: A number is out of range.
    """
    metrics = values.get("metric", [])
    plain = {name: values[name] for name in ("lower", "samples", "batch", "threads", "seconds") if name in values}
    named = [metrics] if isinstance(metrics, str) else metrics
    return CheckOptions(metrics=tuple(named), tolerances=values.get("tolerance", {}), **plain)


def check_project(
    project: Project | str | os.PathLike[str], *, update: bool = False, progress: Progress = silent
) -> Check:
    """Quantize what a project says, measure it, and judge it by its baseline, or write that.

    The current folder is that of the file meanwhile. Quantizing runs in a process of its own, as the command does.

    Args:
        project: The project, or the path of its file.
        update: Write the baseline.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: The project, a model, the data or the baseline cannot be used, or a metric fails.
    """
    found = project if isinstance(project, Project) else load_project(project)
    with nullcontext() if found.path is None else chdir(found.folder):
        prepared = ready(found.model, _data(found), found.baseline, update=update, options=check_options(found.check))
        made = None
        if found.quantize is not None:
            progress("quantize", 0, None)
            made = _quantized(found)
        check = judged(prepared, found.output, progress)
    if made is None:
        return check
    return replace(check, lines=(*_verdict(made), *check.lines), quantized=made)


def _data(project: Project) -> Any:
    """Return the data to check on.

    Raises:
        RequantError: There are none.
    """
    values = project.check
    if "data" not in values:
        where = "give --data SRC" if project.path is None else 'write data = "test.npz" in [check]'
        raise RequantError(f"no data to check on: {where}")
    given = {name: values[name] for name in ("preprocess", "tokenizer", "labels") if name in values}
    if not given:
        return values["data"]
    from ...calibration import DataSpec

    return DataSpec(values["data"], **given)


def _verdict(made: Mapping[str, Any]) -> Iterator[Line]:
    """Yield a line that fails where quantizing did not do what was asked."""
    if made["verdict"]:
        yield Line(name="quantize", status=Status.FAIL, baseline="int8", measured="not", reason=made["verdict"])


def quantize_arguments(project: Project) -> list[str]:
    """Return the command line that quantizes.

    >>> arguments = quantize_arguments(Project(path=None, model="m.onnx", output="q.onnx",
    ...                                        quantize={"data": "calib.npz", "exclude_ops": ["Add", "Mul"]}))
    >>> " ".join(arguments)
    'quantize m.onnx -o q.onnx --json --force --force-int8 --data calib.npz --exclude-ops Add,Mul'
    """
    values: dict[str, Any] = {"force": True, "force_int8": True, **(project.quantize or {})}
    found = ["quantize", project.model, "-o", project.output, "--json"]
    for name, value in values.items():
        flag, kind = f"--{name.replace('_', '-')}", _row(QUANTIZE, name).kind
        if kind is Kind.FLAG:
            found += [flag] if value else []
        elif kind is Kind.EACH:
            found += [part for each in ([value] if isinstance(value, str) else value) for part in (flag, each)]
        else:
            found += [flag, ",".join(value) if isinstance(value, list) else str(value)]
    return found


def _quantized(project: Project) -> dict[str, Any]:
    """Run ``requant quantize`` and return its JSON.

    Raises:
        RequantError: It refuses, or fails.
    """
    command = [sys.executable, "-m", "requant.cli", *quantize_arguments(project)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode in (0, 1):
        made: dict[str, Any] = json.loads(done.stdout)
        return made
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    told = lines[-1].removeprefix("requant: ") if lines else f"exit code {done.returncode}"
    raise RequantError(f"{project.path or 'requant quantize'}: [quantize]: {told}")


# ------------------------------------------------------------------------------------------------------- a new one


def template(model: str | os.PathLike[str], target: str | os.PathLike[str] = NAME) -> str:
    """Return a commented project for a model: every key, and what suits the model's inputs.

    Args:
        model: Path of the float model.
        target: Where the project is to be, which the path of the model is relative to.

    Raises:
        RequantError: The model cannot be loaded.
    """
    from ...calibration.session import input_specs, open_session
    from ..model.files import load_model

    load_model(model)
    session = open_session(Path(model), lean=True)
    inputs, name = input_specs(session), Path(target).name
    path = Path(os.path.relpath(model, Path(target).absolute().parent))
    chosen = _suited(inputs)
    quantize = {**chosen, "data": chosen["data"].format("calib"), "place": '"estimated"  # the same plan in every run'}
    lines = [
        f"# {name}: 'requant check {name}' quantizes {path.name}, measures both models, and compares",
        f"# with the baseline, which 'requant check {name} --update' writes. Keys are the options of 'requant",
        "# quantize' and 'requant check'; a line that is commented out shows what holds without it, or an example.",
        "#",
        *(f"# input {spec.name}: {spec}" for spec in inputs),
        f"# outputs: {', '.join(output.name for output in session.get_outputs())}",
        "",
        f"model = {json.dumps(path.as_posix())}",
        f"output = {json.dumps(path.with_name(f'{path.stem}_int8.onnx').as_posix())}",
        "",
        "[quantize]",
        *_lines(QUANTIZE, quantize),
        "",
        "[check]",
        *_lines(CHECK, {**chosen, "data": chosen["data"].format("test")}),
        "",
        '# [check.tolerance]  # what may be lost: 0.005 is half a point, "1%" a part of what the baseline has',
        *(f"# {key} = {value}" for key, value in (("top1", 0.005), ("agreement", 0.005), ("sqnr", 0.5))),
        *(f"# {key} = {value}" for key, value in tolerances({}, []).to_json().items()),
        "# speedup = 1.0  # what must be reached on any machine",
    ]
    return "\n".join(lines) + "\n"


def _suited(inputs: Sequence[InputSpec]) -> dict[str, str]:
    """Return how data for a model's inputs likely are: arrays, images, or texts."""
    if len(inputs) == 1 and len(inputs[0].shape) == 4 and 3 in (inputs[0].shape[1], inputs[0].shape[3]):
        return {"data": '"{}_images/"', "preprocess": _preprocess(inputs[0].shape)}
    if all(spec.dtype.kind == "i" and len(spec.shape) == 2 for spec in inputs):
        return {"data": '"{}.jsonl"', "tokenizer": '"tokens.py:encode"'}
    return {"data": '"{}.npz"'}


def _preprocess(shape: tuple[int | str | None, ...]) -> str:
    """Return how images become an input of a shape."""
    sizes = [axis for axis in shape[1:] if isinstance(axis, int) and axis != 3]
    size = sizes[0] if sizes else 224
    return json.dumps(f"resize={round(size * 256 / 224)} crop={size} scale=255")


def _lines(keys: tuple[Key, ...], chosen: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each key: what is chosen, and commented out what is not."""
    for key in keys:
        if key.kind is Kind.TABLE:
            continue
        if key.name in chosen:
            value, _, why = chosen[key.name].partition("  # ")
            yield f"{key.name} = {value}  # {why or key.about}"
        else:
            yield f"# {key.name} = {key.example}  # {key.about}"
