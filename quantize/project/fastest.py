"""`quantize_fastest`: a model for each installed runtime, and the fastest of all as the result."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ... import RequantError
from ...calibration.sources import DataSource
from ...system.scratch import exclusive
from ..api import quantize_model
from ..model.files import check_output, load_model, staging
from ..model.writing import save_model
from ..options.declared import AUTO, RUNTIMES
from ..options.options import Options
from ..placement.plan_file import plan_path, save_plan
from ..result import Result, Timed
from ..runtime.clock import race
from ..runtime.progress import Progress, silent
from ..runtime.runtimes import DEFAULT, ONNXRUNTIME, Sessions, runtime_named
from ..steps.deliver import Run


@dataclass(frozen=True)
class _Made:
    """What was made for a runtime: the file, all that the run has computed, and the runtime."""

    path: Path
    run: Run
    result: Result

    @property
    def name(self) -> str:
        """The runtime with its version."""
        return str(self.run.job.runtime.identity)


def quantize_fastest(
    model: str | os.PathLike[str],
    data: DataSource,
    output: str | os.PathLike[str],
    options: Options | None = None,
    progress: Progress = silent,
) -> Result:
    """Quantize a model for each installed runtime, time the results in turn, and write the fastest one.

    Each result is what `quantize_model` writes for its runtime: an INT8 model that keeps the promise of accuracy and is
    faster than float there, or the simplified float model. So the output is at least as fast as every float model.

    Args:
        model: Path of the float model.
        data: The data, which are read once for each runtime.
        output: Path of the model to write; it appears whole or not at all.
        options: See `Options`; `runtime` does not count.
        progress: As for `quantize_model`.

    Raises:
        RequantError: The request cannot be met in ONNX Runtime; nothing was written. A runtime that cannot run the
            model is left out, with a note.
    """
    options = options or Options(runtime=AUTO)
    check_output(output, model, force=options.force, external=options.external_data)
    check_output(plan_path(output), model, force=options.force)
    with staging(output) as folder:
        notes: list[str] = []
        made = list(_each(model, data, folder, options, progress, notes))
        progress("compare runtimes", 0, None)
        times = _times(made, options)
        best = min(made, key=lambda each: times[each.name].output_ms)
        plan = best.run.trial.candidate.plan
        with exclusive(Path(os.path.realpath(output)).parent), save_plan(plan, plan_path(output)):
            save_model(load_model(best.path), output, external=options.external_data)
    return replace(best.result, output=os.fspath(output), runtimes=times, notes=(*best.result.notes, *notes))


def _each(
    model: str | os.PathLike[str],
    data: DataSource,
    folder: Path,
    options: Options,
    progress: Progress,
    notes: list[str],
) -> Iterator[_Made]:
    """Yield what is made for each installed runtime; ONNX Runtime comes first. Others that fail leave a note."""
    for name in RUNTIMES:
        if name != ONNXRUNTIME and find_spec(name) is None:
            continue
        runs: list[Run] = []
        precision = DEFAULT if name == ONNXRUNTIME else options.precision
        asked = replace(options, runtime=name, precision=precision, force=True)
        path = folder / name / "model.onnx"  # the folder of `staging` is locked
        path.parent.mkdir()
        try:
            result = quantize_model(model, data, path, asked, progress, runs.append)
        except RequantError as error:
            if name == ONNXRUNTIME:
                raise
            notes.append(f"{runtime_named(name).identity} is left out: {error}")
            continue
        yield _Made(path, runs[0], result)


def _times(made: list[_Made], options: Options) -> Mapping[str, Timed]:
    """Return the times of the float model and of the output in each runtime, all timed in turn on the first feed."""
    job, threads = made[0].run.job, options.threads
    if job.feed is None:
        raise RequantError(f"{job.path}: no data to time it on: --runtime {AUTO} needs --data")
    models = [(each, Sessions(source, runtime=each.run.job.runtime))
              for each in made for source in (each.run.job.timed.source, each.path)]  # fmt: skip
    runs = [partial(sessions.fresh(threads=threads), job.feed) for _, sessions in models]
    found = [1e3 * each.least for each in race(runs, seconds=options.seconds * len(made), threads=threads)]
    return {
        each.name: Timed(float_ms, output_ms, int8=not each.result.why_not)
        for each, float_ms, output_ms in zip(made, found[::2], found[1::2], strict=True)
    }
