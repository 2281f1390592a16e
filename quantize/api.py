"""`quantize_model`: a float model and sample data in, a measured INT8 model out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from .. import RequantError
from ..calibration.data.sources import DataSource
from ..system.given import check_function, check_kind, or_default
from .job import Evidence
from .model.files import staging
from .options.declared import AUTO
from .options.options import Options
from .options.selection import WITHOUT_RANGES
from .placement.costs import Costs
from .placement.plan_file import plan_path
from .placement.search import measured_costs
from .result import Result
from .runtime.progress import Progress, Stopwatch, silent
from .steps.deliver import Run, deliver, deliver_searched
from .steps.emit import check_given_costs, plan_by_rules, scale_channels
from .steps.files import check_files
from .steps.forecast import forecast
from .steps.hold_out import hold_out
from .steps.prepare import prepare
from .steps.ranges import find_ranges, findings_of_plan
from .steps.search import Goal, open_goal, search

Look: TypeAlias = Callable[[Run], None]
"""Called with all that a run has computed, before its temporary files are removed."""


def quantize_model(
    model: str | os.PathLike[str],
    data: DataSource | None,
    output: str | os.PathLike[str],
    options: Options | None = None,
    progress: Progress = silent,
    look: Look | None = None,
) -> Result:
    """Quantize a float ONNX model and measure the result.

    The steps: simplify the model, observe ranges on the data, decide which units become int8, emit the INT8 model, and
    compare it with the original on samples that gave no ranges. Where INT8 misses the promise of accuracy (`promise`),
    units become float until it keeps it. Where INT8 still misses it, or is not faster on this machine (`WORTHWHILE`),
    the float model is written, simplified unless that makes it slower, and `Result.why_not` says why, unless
    ``force_int8`` is set. The time of a portable model decides nothing.

    Args:
        model: Path of the float model.
        data: A data source: a path or ``FILE.npz:SPLIT`` or ``FILE.py:NAME``, an iterable of feeds, or a callable.
            None is possible with given ranges, or with the strategies ``dynamic``, ``block`` and ``weight-only``. The
            model is then timed on random inputs, if it runs on any.
        output: Path of the model to write; it appears whole or not at all.
        options: See `Options`.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).
        look: Called after the model is written, with all that the run has computed; see `Run`.

    Raises:
        RequantError: The request cannot be met; nothing was written.
    """
    options = or_default(options, Options)
    check_function(progress, "progress")
    if look is not None:
        check_function(look, "look")
    if options.runtime == AUTO:
        raise RequantError(f"quantize_model is for one runtime; quantize_fastest is for runtime={AUTO!r}")
    check_files(model, data, output, options)
    own = options.plan is not None and os.path.realpath(options.plan) == os.path.realpath(plan_path(output))
    if own and not options.force_int8:  # a float model would overwrite it
        raise RequantError(f"{options.plan}: the plan of {output} is written to this path; rename the edited plan")
    if data is None:
        _check_without_data(model, options)
    with staging(output) as folder:
        run = quantize_in(folder, model, data, output, options, progress)
        if look is not None:
            look(run)
        return run.result


def quantize_in(
    folder: Path,
    model: str | os.PathLike[str],
    data: DataSource | None,
    output: str | os.PathLike[str],
    options: Options,
    progress: Progress,
) -> Run:
    """Quantize a model as `quantize_model` does, and return all that was computed.

    Args:
        folder: A folder for large weights. The models of the run read from it as long as they are used.
        model: Path of the float model.
        data: The data.
        output: Path of the model to write.
        options: The options, for one runtime.
        progress: As for `quantize_model`.

    Raises:
        RequantError: The request cannot be met; nothing was written.
    """
    watch = Stopwatch(progress)
    job = prepare(model, data, options, folder, watch)
    check_given_costs(job)
    job = hold_out(job)
    watch.expect(forecast(job))
    job = scale_channels(job)
    ranges = find_ranges(job)
    run = deliver(job, ranges, output)
    found = findings_of_plan(job, ranges, (run.rejected or run.trial).candidate.plan)
    return replace(run, result=replace(run.result, findings=found, seconds=watch.seconds()))


def search_model(
    model: str | os.PathLike[str],
    data: DataSource,
    output: str | os.PathLike[str],
    goal: Goal,
    options: Options | None = None,
    progress: Progress = silent,
    look: Look | None = None,
) -> Result:
    """Find the fastest INT8 model that keeps a metric, and write it.

    A model is always written. Where no model keeps the metric, it is the model with the best score. Where the fastest
    model that keeps it is not faster than float (`WORTHWHILE`), it is the simplified float model. `Result.why_not` then
    says why, and `Result.search` lists all models that were tried. The same call continues an interrupted search.

    Args:
        model: Path of the float model.
        data: The data that give the ranges and corrections, as `quantize_model` takes them.
        output: Path of the model to write; the state of the search is a file beside it until the search is done.
        goal: The metric, the permitted drop, and the data for the metric.
        options: See `Options`.
        progress: As for `quantize_model`.
        look: As for `quantize_model`.

    Raises:
        RequantError: The request cannot be met; nothing was written.
    """
    options = or_default(options, Options)
    check_function(progress, "progress")
    if look is not None:
        check_function(look, "look")
    check_kind(goal, Goal, "the goal must be a Goal")
    check_files(model, data, output, options)
    if options.runtime == AUTO:
        raise RequantError(f"a search is for one runtime, not for the runtime {AUTO}")
    if options.plan is not None or options.noise_weight:
        raise RequantError("a search decides what becomes int8: it takes no plan and no price of noise")
    state, watch = Path(f"{os.fspath(output)}.search.json"), Stopwatch(progress)
    with staging(output) as folder:
        job = prepare(model, data, options, folder, watch)
        check_given_costs(job)
        job = scale_channels(hold_out(job))
        source, goal = open_goal(job, goal)
        ranges = find_ranges(job)
        candidate, frontier = search(job, ranges, goal, source, state)
        run = deliver_searched(job, ranges, candidate, frontier, output)
        if look is not None:
            look(run)
    found = findings_of_plan(job, ranges, (run.rejected or run.trial).candidate.plan)
    result = replace(run.result, search=frontier, findings=found, seconds=watch.seconds())
    if frontier.interrupted:
        raise KeyboardInterrupt(
            f"{os.fspath(output)} is the best model so far; the same with --force (in Python: force=True) resumes"
        )
    if frontier.done:
        state.unlink(missing_ok=True)
    if frontier.best is None and frontier.most_accurate is not None:
        best, bar = frontier.most_accurate.value, frontier.bar
        why_not = f"no int8 model keeps {frontier.metric} at {bar:.6g}: the output has {best:.6g}"
        return replace(result, why_not=why_not)
    return result


def measure_costs(
    model: str | os.PathLike[str], data: DataSource, options: Options | None = None, progress: Progress = silent
) -> Costs:
    """Measure the time of each unit of a model on this machine, in float and in int8, ignoring cached costs.

    Args:
        model: Path of the float model.
        data: A data source, as `quantize_model` takes it.
        options: See `Options`; placement options are ignored.
        progress: As for `quantize_model`.

    Raises:
        RequantError: The model or the data cannot be used, or there is nothing to measure.
    """
    options = replace(or_default(options, Options), place="measured", costs=None, plan=None)
    check_function(progress, "progress")
    with staging(None) as folder:
        job = prepare(model, data, options, folder, progress)
        facts, rules, write = plan_by_rules(job, find_ranges(job), Evidence())
        return measured_costs(job, facts, rules, write)


def _check_without_data(model: str | os.PathLike[str], options: Options) -> None:
    """Refuse a request that needs data, and options that have no effect without data.

    Raises:
        RequantError: The strategy needs ranges, or an option concerns the data.
    """
    if options.ranges is not None:
        if options.samples is not None:
            raise RequantError(f"{model}: no data, so that samples would do nothing")
        return
    if options.selection.strategy not in WITHOUT_RANGES:
        raise RequantError(
            f"{model}: no data: give a sample of the model's inputs, or ranges, or choose the strategy dynamic, "
            "block or weight-only"
        )
    plain = Options()
    idle = {
        "samples": options.samples != plain.samples,
        "calibration": options.calibration != plain.calibration,
        "overrides": options.overrides is not None,
        "activation": options.scheme.activation != plain.scheme.activation,
        "symmetric": options.scheme.symmetric,
    }
    if any(idle.values()):
        asked = ", ".join(name for name, given in idle.items() if given)
        raise RequantError(f"{model}: no data, so that there are no ranges, and {asked} would do nothing")
