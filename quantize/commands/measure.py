"""Commands that run a model: `requant bench`, `compare`, `compile`, `explain` and `kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ... import RequantError
from ..options.declared import BATCH, METRICS, SOURCES
from .app import PATH, ToolCommand, is_given, option, shows_tables
from .options import (
    Decimal,
    click_option,
    force_option,
    json_option,
    lengths_options,
    lower_option,
    setting_options,
    source_options,
    threads_option,
)
from .printing import print_json
from .progress import shown_progress

if TYPE_CHECKING:
    from ...calibration import DataSpec
    from ..model.shapes import Lengths
    from ..runtime.runtimes import Setting


@click.command(cls=ToolCommand, section="measure")
@click.argument("model", type=PATH)
@option(
    "--compare",
    "other",
    group="data",
    type=PATH,
    metavar="OTHER",
    help="A second model, run alternately on the same inputs.",
)
@source_options(f"The first sample is run. {SOURCES} [default: random inputs]")
@lengths_options
@click_option(BATCH, help="Items per run.")
@setting_options
@option("--no-profile", group="speed", is_flag=True, help="Do not profile the nodes.")
@option("--settings", group="speed", is_flag=True, help="Search the fastest session options.")
@option(
    "--seconds",
    group="speed",
    type=Decimal(0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Time for --settings.",
)
@json_option
def bench(
    model: Path,
    other: Path | None,
    data: str | DataSpec | None,
    lengths: Lengths,
    batch: int,
    setting: Setting,
    no_profile: bool,
    settings: bool,
    seconds: float,
    as_json: bool,
) -> None:
    """Time MODEL on this machine, then profile its nodes.

    \b
    requant bench model_int8.onnx --compare model.onnx

    Free axes other than the batch need lengths: --shape, --dim or --data. With --settings, --threads fixes the number
    of threads; without it, the number of threads is one of the settings.
    """
    from ..tools.bench.bench import Load, Search, bench_model

    if is_given("seconds") and not settings:
        raise click.UsageError("--seconds needs --settings")
    search = Search(seconds, setting.threads if is_given("threads") else None) if settings else None
    load = Load(batch=batch, setting=setting, lengths=lengths, profile=not no_profile)
    with shown_progress() as progress:
        result = bench_model(model, data, load, other=other, search=search, progress=progress)
    if as_json:
        print_json(result.to_json())
    elif shows_tables():
        from ..console.timed import print_bench

        print_bench(result)


@click.command(cls=ToolCommand, section="measure")
@click.argument("float_model", metavar="FLOAT", type=PATH)
@click.argument("int8_model", metavar="INT8", type=PATH)
@source_options(required=True)
@option("--metric", group="accuracy", metavar="M", help=METRICS)
@lower_option
@click_option(BATCH, help="Also time runs of N items.")
@setting_options
@json_option
def compare(
    float_model: Path,
    int8_model: Path,
    data: str | DataSpec,
    metric: str | None,
    lower: bool,
    batch: int,
    setting: Setting,
    as_json: bool,
) -> None:
    """Compare INT8 with FLOAT: accuracy, noise and latency.

    \b
    requant compare model.onnx model_int8.onnx --data test.npz

    Outputs are compared with the outputs of FLOAT in ONNX Runtime. Both models are timed in --runtime.
    """
    from .. import compare_models
    from ..accuracy.metrics import metric_named

    if lower and metric is None:
        raise click.UsageError("--lower needs --metric")
    chosen = None if metric is None else metric_named(metric, lower=lower)
    with shown_progress() as progress:
        comparison = compare_models(
            float_model,
            int8_model,
            data,
            batch=batch,
            setting=setting,
            progress=progress,
            metric=chosen,
        )
    if as_json:
        print_json(comparison.to_json())
    elif shows_tables():
        from ..console.quantized import print_comparison

        print_comparison(comparison)


@click.command("compile", cls=ToolCommand, section="measure")
@click.argument("model", type=PATH)
@option("-o", "--output", type=PATH, required=True, help="The model to write: .onnx, or .ort for ORT format.")
@source_options(f"Outputs are compared on these data. {SOURCES} [default: random inputs]")
@threads_option
@option(
    "--kernels",
    group="speed",
    type=click.Choice(("auto", "native", "stock")),
    default="auto",
    show_default=True,
    help="Operators of the runtime (stock), operators of ai.requant (native), or the faster ones (auto).",
)
@json_option
@force_option
def compile_(
    model: Path, output: Path, data: str | DataSpec | None, threads: int, kernels: str, as_json: bool, force: bool
) -> None:
    """Write MODEL as ONNX Runtime optimizes it on this CPU.

    \b
    requant compile model_int8.onnx -o model_here.onnx

    The output loads faster and computes the same. Another kind of machine refuses to load it; see docs/deploy.md.
    """
    from .. import compile_model

    with shown_progress() as progress:
        compiled = compile_model(model, output, data, threads=threads, kernels=kernels, force=force, progress=progress)
    if as_json:
        print_json(compiled.to_json())
    elif shows_tables():
        from ..console.timed import print_compiled

        print_compiled(compiled)


@click.command(cls=ToolCommand, section="measure")
@click.argument("model", type=PATH)
@source_options(f"The first sample is run. {SOURCES} [default: random inputs]")
@setting_options
@option("--all", "everything", is_flag=True, help="Show every kernel, not only the slowest ones.")
@json_option
def explain(
    model: Path,
    data: str | DataSpec | None,
    setting: Setting,
    everything: bool,
    as_json: bool,
) -> None:
    """Show the kernels that MODEL runs here, and why it is slow.

    \b
    requant explain model_int8.onnx --data test.npz

    MODEL may be float, or quantized by any tool; see docs/explain.md.
    """
    from ..tools.explain.explain import explain_model

    with shown_progress() as progress:
        found = explain_model(model, data, setting=setting, progress=progress)
    if as_json:
        print_json(found.to_json())
    elif shows_tables():
        from ..console.explained import print_explanation

        print_explanation(found, everything=everything)


@click.command(cls=ToolCommand, section="measure")
@json_option
def kernels(as_json: bool) -> None:
    """Show the native operators of this machine.

    \b
    requant kernels

    The lines that load them into a program are shown too.
    """
    from ..kernels.library import Kernels
    from ..kernels.library import kernels as installed

    found = installed()
    if not isinstance(found, Kernels):
        raise RequantError(found)
    if as_json:
        print_json(found.to_json())
        return
    from ..console.timed import print_kernels

    print_kernels(found)
