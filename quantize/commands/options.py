"""Options that several commands share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ... import UnknownNameError
from .app import PATH, is_given

if TYPE_CHECKING:
    from ...calibration import Execution
    from .. import Goal

    Command = Callable[..., Any]
    Begin = Callable[..., Execution]

STRATEGIES = ("auto", "static", "static-float", "dynamic", "weight-only")


def _names(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Split names at commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _optional_names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Split names at commas, where any are given; an empty string is none of them."""
    return None if value is None else _names(ctx, param, value)


def names_option(flag: str, text: str) -> Callable[[Command], Command]:
    """Declare an option of names separated by commas."""
    return click.option(flag, default="", callback=_names, metavar="A,B", help=text)


SOURCES = "FILE.npz[:SPLIT], a folder, FILE.csv, FILE.jsonl or FILE.py:NAME; see docs/data.md."


METRICS = "top1, top5, agreement, sqnr, psnr, perplexity, miou, auroc, or FILE.py:NAME; see docs/metrics.md."


data_option = click.option("--data", required=True, metavar="SRC", help=SOURCES)


def reading_options(command: Command) -> Command:
    """Declare how ``--data`` is read; the command gets a `DataSpec` as its `data` where something is said of that."""

    @click.option(
        "--preprocess",
        metavar="'...'",
        help="Of images, .wav files or texts: 'resize=256 crop=224 scale=255', 'rate=16000', 'column=text'.",
    )
    @click.option("--tokenizer", metavar="FN", help="FILE.py:NAME, called with each text of a .csv or .jsonl file.")
    @click.option("--labels", metavar="FILE", help="A .csv file of files and labels; else sub-folders are classes.")
    @functools.wraps(command)
    def reading(
        *, data: str | None, preprocess: str | None, tokenizer: str | None, labels: str | None, **others: Any
    ) -> Any:
        given = {"preprocess": preprocess, "tokenizer": tokenizer, "labels": labels}
        if all(value is None for value in given.values()):
            return command(data=data, **others)
        if data is None:
            option = next(name for name, value in given.items() if value is not None)
            raise click.UsageError(f"--{option} says how data are read; give --data SRC")

        from ...calibration import DataSpec

        return command(data=DataSpec(data, **given), **others)

    return reading


BYTES = {"": 0, "B": 0, "K": 1, "KB": 1, "M": 2, "MB": 2, "G": 3, "GB": 3, "T": 4, "TB": 4}


def _bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read a number of bytes: ``2GB``, ``512 MiB`` or ``1000000``."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    unit = match[2].upper() if match else ""
    base, unit = (1024, unit.replace("IB", "B")) if unit.endswith("IB") else (1000, unit)
    if match is None or unit not in BYTES:
        raise click.BadParameter(f"{value!r} is no number of bytes; write for instance 2GB", ctx, param)
    return int(float(match[1]) * base ** BYTES[unit])


def _shard(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int]:
    """Read a part of a whole: ``2/3``."""
    match = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", "1/1" if value is None else value)
    if match is None or int(match[1]) > int(match[2]):
        raise click.BadParameter(f"{value!r} is no part of a whole; write i/n, for instance 2/3", ctx, param)
    return int(match[1]), int(match[2])


OF_DATA = ("preprocess", "tokenizer", "labels")


def pairs(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    """Read pairs of a name and a value: ``top1=0.5%``."""
    found = {}
    for item in value:
        name, equals, text = item.rpartition("=")
        if not (name and equals and text):
            raise click.BadParameter(f"{item!r} is no pair; write for instance top1=0.5%", ctx, param)
        found[name] = text
    return found


WORKERS = ("workers", "memory_limit", "executor", "scheduler")


EXECUTION = ("batch", "shard", *WORKERS)


def execution_options(command: Command) -> Command:
    """Declare how data are cut into runs, and `worker_options`."""
    batch = click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Samples per run.")
    shard = click.option(
        "--shard", callback=_shard, metavar="I/N", help="Only the i-th of n parts of the data; see --merge."
    )
    return batch(shard(worker_options(command)))


def worker_options(command: Command) -> Command:
    """Declare where and how a model is run over data.

    The command gets a function `begin`, to be called with the output, and with what else there is to say of an
    `Execution`, when all that costs little is checked: it starts the workers, which end with the command.
    """

    @click.option("--workers", type=click.IntRange(1), help="Runs at a time. [default: one per CPU]")
    @click.option(
        "--memory-limit",
        callback=_bytes,
        metavar="SIZE",
        help="What the process should stay below: 2GB. [default: a quarter of the machine]",
    )
    @click.option(
        "--executor",
        type=click.Choice(["threads", "processes", "dask"]),
        default="threads",
        show_default=True,
        help="Where the runs happen; processes where reading data in Python takes the time.",
    )
    @click.option(
        "--scheduler", metavar="URL", help="Of a Dask cluster: tcp://host:8786; else --executor dask starts one here."
    )
    @functools.wraps(command)
    def running(
        *, workers: int | None, memory_limit: int | None, executor: str, scheduler: str | None, **others: Any
    ) -> Any:
        context = click.get_current_context()
        name = "dask" if scheduler is not None and not is_given("executor") else executor
        if scheduler is not None and name != "dask":
            raise click.UsageError(f"--scheduler is of a Dask cluster, which --executor {name} does not use")

        def begin(output: Path, **more: Any) -> Execution:
            from ...calibration import Execution, executor_named

            made = context.with_resource(executor_named(name, workers, scheduler))
            scratch = output.absolute().parent  # a model that is in memory alone goes where all workers likely see it
            return Execution(executor=made, workers=workers, memory_limit=memory_limit, scratch=scratch, **more)

        return command(begin=begin, **others)

    return running


def lengths_options(command: Command) -> Command:
    """Declare how long the free axes of inputs are; the command gets `Lengths`."""

    @click.option("--shape", "shapes", multiple=True, metavar="NAME=1,3,224,224", help="Shape of an input; repeatable.")
    @click.option("--dim", "dims", multiple=True, metavar="AXIS=1", help="Length of a named axis; may be repeated.")
    @functools.wraps(command)
    def measured(*, shapes: tuple[str, ...], dims: tuple[str, ...], **others: Any) -> Any:
        from ..model.shapes import parse_lengths

        return command(lengths=parse_lengths(shapes, dims), **others)

    return measured


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


force_option = click.option("--force", is_flag=True, help="Overwrite an existing output.")


external_option = click.option("--external-data", is_flag=True, help="Write the weights to one file beside OUT.")


rule_option = click.option(
    "--calibration",
    metavar="RULE",
    help="minmax, percentile(99.99), mean_minmax, mse, aciq, entropy or auto. [default: auto]",
)


overrides_option = click.option(
    "--overrides", type=PATH, metavar="FILE", help="Your own ranges of single tensors, TOML or JSON, which win."
)


samples_option = click.option("--samples", type=click.IntRange(1), help="Use N samples, picked evenly. [default: all]")


threads_option = click.option(
    "--threads",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Threads while timing; 0: the runtime's choice.",
)


SELECTED = ("exclude_nodes", "exclude_ops", "include_ops")


INTEGERS = ("activation", "weight", "symmetric")


def int8_options(command: Command) -> Command:
    """Declare what the INT8 model is to be; the command gets it as its `options`."""

    @click.option(
        "--dynamic", is_flag=True, help="MatMul, Gemm and LSTM find their ranges at run time: --strategy dynamic."
    )
    @samples_option
    @click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Items per run while timing.")
    @click.option(
        "--ranges",
        type=PATH,
        metavar="FILE",
        help="A range file or a min/max log; --data then only measures the result.",
    )
    @overrides_option
    @rule_option
    @click.option("--format", "format_", type=click.Choice(["qdq", "qoperator"]), default="qdq", show_default=True)
    @names_option("--exclude-nodes", "Nodes that stay float.")
    @names_option("--exclude-ops", "Operator types that stay float.")
    @names_option("--include-ops", "The only operator types that may become int8.")
    @names_option("--strategy", f"{', '.join(STRATEGIES)}; or NODE=STRATEGY for one node. [default: auto]")
    @click.option("--activation", type=click.Choice(["u8", "s8"]), default="u8", show_default=True)
    @click.option("--weight", type=click.Choice(["s8", "u8"]), default="s8", show_default=True)
    @click.option("--symmetric", is_flag=True, help="Zero points of activations in the middle of the type.")
    @click.option(
        "--isa", type=click.Choice(["auto", "vnni", "avx2"]), default="auto", show_default=True, help="The target."
    )
    @click.option(
        "--portable", is_flag=True, help="For OpenVINO and others too: standard operators, no speed of ONNX Runtime."
    )
    @click.option(
        "--place",
        type=click.Choice(["measured", "estimated", "rules", "all"]),
        default="measured",
        show_default=True,
        help="What decides where int8 pays.",
    )
    @click.option(
        "--costs", type=PATH, metavar="FILE", help="Place by costs of another machine: 'requant costs measure'."
    )
    @click.option("--plan", type=PATH, metavar="FILE", help="What single units become: an edited OUT.plan.json.")
    @click.option(
        "--lambda",
        "noise_weight",
        type=click.FloatRange(0),
        default=0.0,
        metavar="US",
        help="Microseconds per unit of noise.",
    )
    @click.option(
        "--effort",
        type=click.Choice(["low", "medium", "high"]),
        default="medium",
        show_default=True,
        help="How much is done for accuracy; low also has --calibration minmax. See docs/accuracy.md.",
    )
    @click.option(
        "--corrections", callback=_optional_names, metavar="A,B", help="Only: results, equalize, means, bias, rounding."
    )
    @external_option
    @click.option("--force-int8", is_flag=True, help="Write the INT8 model even where it is not worth it: exit code 0.")
    @threads_option
    @force_option
    @functools.wraps(command)
    def choosing(*, dynamic: bool, strategy: tuple[str, ...], format_: str, place: str, **given: Any) -> Any:
        from .. import Options, Scheme, Selection

        overall, by_node = _strategies((*strategy, "dynamic") if dynamic else strategy)
        selected = {name: frozenset(given.pop(name)) for name in SELECTED}
        integers = {name: given.pop(name) for name in INTEGERS}
        plain = {field.name: given.pop(field.name) for field in fields(Options) if field.name in given}
        options = Options(
            selection=Selection(strategy=overall, strategies=by_node, **selected),
            scheme=Scheme(**integers),
            format=format_,
            place="estimated" if plain["costs"] is not None and not is_given("place") else place,
            **plain,
        )
        return command(options=options, **given)

    return choosing


def search_options(command: Command) -> Command:
    """Declare what a search must keep; the command gets it as its `goal`, None where no search is asked for."""

    @click.option(
        "--max-drop", metavar="D", help="Search the fastest model that loses at most D of --metric: 0.003 or 0.5%."
    )
    @click.option("--metric", metavar="M", help=f"For --max-drop: {METRICS}")
    @click.option("--lower", is_flag=True, help="Of a --metric FILE.py:NAME a lower number is better.")
    @click.option("--eval-data", metavar="SRC", help="For --max-drop: the data to judge by; other than --data.")
    @click.option(
        "--time-budget",
        type=click.FloatRange(min=0, min_open=True),
        metavar="S",
        help="For --max-drop: seconds after which no further model is tried. [default: 600]",
    )
    @functools.wraps(command)
    def searching(
        *,
        max_drop: str | None,
        metric: str | None,
        lower: bool,
        eval_data: str | None,
        time_budget: float | None,
        **others: Any,
    ) -> Any:
        return command(goal=_goal(max_drop, metric, lower, eval_data, time_budget), **others)

    return searching


def _goal(
    max_drop: str | None, metric: str | None, lower: bool, eval_data: str | None, time_budget: float | None
) -> Goal | None:
    """Return what a search must keep; None where none is asked for."""
    given = {"--metric": metric, "--eval-data": eval_data, "--lower": lower or None, "--time-budget": time_budget}
    if max_drop is None:
        if idle := next((name for name, value in given.items() if value is not None), None):
            raise click.UsageError(f"{idle} is of a search, which --max-drop asks for")
        return None
    if metric is None or eval_data is None:
        missing = "--metric M" if metric is None else "--eval-data SRC"
        raise click.UsageError(f"--max-drop searches for a model: give {missing}")
    from .. import Goal
    from ..accuracy.drop import parse_drop
    from ..accuracy.metrics import metric_named

    return Goal(
        metric=metric_named(metric, lower=lower),
        allowance=parse_drop(max_drop),
        data=eval_data,
        seconds=600.0 if time_budget is None else time_budget,
    )


def _strategies(given: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """Split ``STRATEGY`` and ``NODE=STRATEGY``; a node's name may contain ``=``."""
    from .. import Strategy

    overall, by_node = set(), {}
    for item in given:
        node, equals, name = item.rpartition("=")
        if name not in STRATEGIES:
            raise UnknownNameError("strategy", name, STRATEGIES)
        if equals:
            by_node[node] = Strategy(name)
        else:
            overall.add(Strategy(name))
    if len(overall) > 1:
        raise click.UsageError(f"one strategy for all, not {len(overall)}: {', '.join(sorted(overall))}")
    return (overall.pop() if overall else Strategy.AUTO), by_node
