"""`quantize_fastest`: a model for each installed runtime, and the fastest of all as the result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ... import RequantError
from ...calibration.data.sources import DataSource
from ...system.given import check_function, or_default
from ...system.scratch import exclusive
from ..api import quantize_in
from ..model.files import load_model, staging
from ..model.writing import save_model
from ..options.declared import AUTO, RUNTIMES
from ..options.options import Options
from ..placement.plan_file import plan_path, save_plan
from ..result import Result, Timed
from ..runtime.clock import race
from ..runtime.progress import Progress, silent
from ..runtime.runtimes import DEFAULT, ONNXRUNTIME, Sessions, runtime_named
from ..steps.deliver import Run
from ..steps.files import check_files


@dataclass(frozen=True)
class _Made:
    """What was made for a runtime: the file, and all that the run has computed."""

    path: Path
    run: Run

    @property
    def result(self) -> Result:
        """The result of `quantize_model`."""
        return self.run.result

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
    faster than float there, or the simplified float model. So no runtime runs the float model faster than the output,
    as far as the clock can tell.

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
    options = or_default(options, Options)
    check_function(progress, "progress")
    check_files(model, data, output, options)
    with staging(output) as folder:
        installed = [name for name in RUNTIMES if name == ONNXRUNTIME or find_spec(name) is not None]
        found = [_quantized(model, data, folder / name, _for(options, name), progress) for name in installed]
        made = [each for each in found if isinstance(each, _Made)]
        notes = [each for each in found if isinstance(each, str)]
        progress("compare runtimes", 0, None)
        times = _times(made, options)
        best = min(made, key=lambda each: times[each.name].output_ms)
        plan = best.run.trial.candidate.plan
        with exclusive(Path(os.path.realpath(output)).parent), save_plan(plan, plan_path(output)):
            save_model(load_model(best.path), output, external=options.external_data)
    return replace(best.result, output=os.fspath(output), runtimes=times, notes=(*best.result.notes, *notes))


def _for(options: Options, runtime: str) -> Options:
    """Return the options for one runtime: only OpenVINO has a precision."""
    precision = DEFAULT if runtime == ONNXRUNTIME else options.precision
    return replace(options, runtime=runtime, precision=precision, force=True)


def _quantized(
    model: str | os.PathLike[str], data: DataSource, folder: Path, options: Options, progress: Progress
) -> _Made | str:
    """Return what is made for a runtime, in a folder of its own; a note if another one than ONNX Runtime fails."""
    path = folder / "model.onnx"  # not in the folder of `staging`, which is locked
    folder.mkdir()
    try:
        run = quantize_in(folder, model, data, path, options, progress)
    except RequantError as error:
        if options.runtime == ONNXRUNTIME:
            raise
        return f"{runtime_named(options.runtime).identity} is left out: {error}"
    return _Made(path, run)


def _times(made: list[_Made], options: Options) -> Mapping[str, Timed]:
    """Return the times of the float model and of the output in each runtime, all timed in turn on the first feed."""
    job, threads = made[0].run.job, options.threads
    if job.feed is None:
        raise RequantError(f"{job.path}: no data to time it on: the runtime {AUTO} needs data")
    models = [
        model for each in made for model in (each.run.job.timed, Sessions(each.path, runtime=each.run.job.runtime))
    ]
    runs = [partial(model.fresh(threads=threads), job.feed) for model in models]
    found = [1e3 * each.least for each in race(runs, seconds=options.seconds * len(made), threads=threads)]
    return {
        each.name: Timed(float_ms, output_ms, int8=not each.result.why_not)
        for each, float_ms, output_ms in zip(made, found[::2], found[1::2], strict=True)
    }
