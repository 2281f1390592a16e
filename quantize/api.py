"""`quantize_model`: a float model and sample data in, a measured INT8 model out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from .. import RequantError
from ..calibration.sources import DataSource
from .job import Evidence, Job
from .model.files import check_output, staging
from .options.declared import Strategy
from .options.options import Options
from .placement.costs import Costs
from .placement.plan_file import plan_path
from .placement.search import measured_costs
from .result import Result
from .runtime.progress import Progress, Stopwatch, silent
from .steps.deliver import deliver, deliver_searched
from .steps.emit import equalize, plan_by_rules
from .steps.judge import first_feed
from .steps.prepare import prepare
from .steps.ranges import TensorRanges, find_ranges
from .steps.search import Goal, opened, search

Look: TypeAlias = Callable[[Job, TensorRanges, Result], None]
"""Told the job, the ranges and what came of it."""


def quantize_model(
    model: str | os.PathLike[str],
    data: DataSource | None,
    output: str | os.PathLike[str],
    options: Options | None = None,
    progress: Progress = silent,
    look: Look | None = None,
) -> Result:
    """Quantize a float ONNX model and measure what came of it.

    The model is simplified, observed on the data, planned, emitted and compared with the original on the same data.
    Where INT8 is not faster than float on this machine (`WORTHWHILE`) or is far from it (`LEAST_DB`), the simplified
    float model is written and the result says so, unless ``force_int8`` is set.

    Args:
        model: Path of the float model.
        data: A data source: a path or ``FILE.npz:SPLIT`` or ``FILE.py:NAME``, an iterable of feeds, or a callable.
            None where ranges are given, or with the strategy ``dynamic`` or ``weight-only``, which need none: the model
            is then tried on random inputs, if it runs on any.
        output: Path of the model to write; it appears whole or not at all.
        options: See `Options`.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).
        look: Called when the model is written, while all that it was made from is still there.

    Raises:
        RequantError: The request cannot be met; nothing was written.
    """
    options = options or Options()
    check_output(output, model, force=options.force, external=options.external_data)
    check_output(plan_path(output), model, force=options.force)
    if options.plan is not None and os.path.realpath(options.plan) == os.path.realpath(plan_path(output)):
        raise RequantError(f"{options.plan}: is where the plan of {output} goes; give the edited one another name")
    if data is None:
        _check_without_data(model, options)
    watch = Stopwatch(progress)
    with staging(output) as folder:
        job = equalize(prepare(model, data, options, folder, watch))
        ranges = find_ranges(job)
        result = replace(deliver(job, ranges, output), findings=ranges.findings, seconds=watch.seconds())
        if look is not None:
            look(job, ranges, result)
        return result


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

    The best model found is always written: where none keeps the bar, the one with the best score, and where the fastest
    that keeps it is not faster than float (`WORTHWHILE`), the simplified float model, and the result says so.
    `Result.search` has everything that was tried. An interrupted search goes on when it is asked for again.

    Args:
        model: Path of the float model.
        data: The data that give the ranges and corrections, as `quantize_model` takes them.
        output: Path of the model to write; what was tried is kept beside it until the search is done.
        goal: The metric, how much of it may be lost, and the data to judge by.
        options: See `Options`.
        progress: As for `quantize_model`.
        look: As for `quantize_model`.

    Raises:
        RequantError: The request cannot be met; nothing was written.
    """
    options = options or Options()
    check_output(output, model, force=options.force, external=options.external_data)
    check_output(plan_path(output), model, force=options.force)
    if options.plan is not None or options.noise_weight:
        raise RequantError("a search decides what becomes int8: it takes no plan and no price of noise")
    state, watch = Path(f"{os.fspath(output)}.search.json"), Stopwatch(progress)
    with staging(output) as folder:
        job = equalize(prepare(model, data, options, folder, watch))
        source = opened(job, goal)
        ranges = find_ranges(job)
        candidate, found = search(job, ranges, goal, source, state)
        result = deliver_searched(job, candidate, found, output)
        if look is not None:
            look(job, ranges, result)
    result = replace(result, search=found, findings=ranges.findings, seconds=watch.seconds())
    if found.interrupted:
        raise KeyboardInterrupt(f"{os.fspath(output)} is the best model so far; the same command goes on with --force")
    if found.done:
        state.unlink(missing_ok=True)
    if found.best is None and found.most_accurate is not None:
        best = found.most_accurate.value
        return replace(
            result, verdict=f"no int8 model keeps {found.metric} at {found.bar:.6g}: the output has {best:.6g}"
        )
    return result


def measure_costs(
    model: str | os.PathLike[str], data: DataSource, options: Options | None = None, progress: Progress = silent
) -> Costs:
    """Measure what the units of a model take on this machine, in float and in integers, whatever is kept of before.

    Args:
        model: Path of the float model.
        data: A data source, as `quantize_model` takes it.
        options: See `Options`; where the model is placed is of no matter.
        progress: As for `quantize_model`.

    Raises:
        RequantError: The model or the data cannot be used, or there is nothing to measure.
    """
    options = replace(options or Options(), place="measured", costs=None, plan=None)
    with staging(None) as folder:
        job = prepare(model, data, options, folder, progress)
        facts, rules, write = plan_by_rules(job, find_ranges(job), Evidence())
        return measured_costs(job, facts, rules, write, first_feed(job))


def _check_without_data(model: str | os.PathLike[str], options: Options) -> None:
    """Refuse what needs ranges, or would do nothing.

    Raises:
        RequantError: The strategy needs ranges, or an option is about them.
    """
    if options.ranges is not None:
        if options.samples is not None:
            raise RequantError(f"{model}: no data, so that samples would do nothing")
        return
    if options.selection.strategy not in (Strategy.DYNAMIC, Strategy.WEIGHT):
        raise RequantError(
            f"{model}: no data: give a sample of the model's inputs, or ranges, or choose the strategy dynamic or "
            "weight-only"
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
