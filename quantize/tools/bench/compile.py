"""`compile_model`: what ONNX Runtime makes of a model on this CPU, written to a file that loads at once."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from .... import RequantError
from ....calibration.samples import Sample
from ....calibration.session import Array, newest_ir_version, open_session
from ....calibration.sources import DataSource, Source
from ...accuracy.outputs import Outputs, compare_outputs
from ...model.files import (
    PROTOBUF_LIMIT,
    Weights,
    check_output,
    load_model,
    save_model,
    serialize,
    size_on_disk,
    staging,
)
from ...runtime.compiled_for import KEY, Target, this_machine
from ...runtime.configured import (
    GAIN,
    Values,
    configured_run,
    configured_runner,
    create_session,
    open_configured,
    snippet,
)
from ...runtime.inputs import open_data
from ...runtime.progress import Progress, silent
from ...runtime.random_inputs import generated_source
from ...runtime.timing import interleave
from .probes import add_probes

COMPARED = 8  # samples whose outputs are compared
LOADS, MOST_LOADS = 5, 25  # of each, whatever the time, and however quick


@dataclass(frozen=True, slots=True)
class Change:
    """A time before and after.

    Attributes:
        before_ms: Least time with the original.
        after_ms: Least time with the compiled model.
        before_median_ms: Median time with the original.
        after_median_ms: Median time with the compiled model.
        count: How many times each was timed.
    """

    before_ms: float
    after_ms: float
    before_median_ms: float
    after_median_ms: float
    count: int

    @property
    def speedup(self) -> float:
        """How many times as fast the compiled model is."""
        return self.before_ms / self.after_ms

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "before_ms": self.before_ms,
            "after_ms": self.after_ms,
            "speedup": self.speedup,
            "before_median_ms": self.before_median_ms,
            "after_median_ms": self.after_median_ms,
            "count": self.count,
        }


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What `compile_model` wrote and measured.

    Attributes:
        output: Path of the model that was written.
        format: ``onnx`` or ``ort``.
        target: What it was compiled for.
        probes: What its graph probes in whatever program loads it (`requant.quantize.tools.bench.probes.add_probes`).
        settings: With which session options it is to be loaded.
        load: Loading the original with the runtime's defaults, and the compiled model with `settings`.
        run: Runs of both; None where no inputs are known.
        threads: Threads inside one operator while timing.
        identical: Whether all outputs are equal bit for bit; None where nothing could be run.
        sqnr_db: Signal to noise of each float output in dB; infinite where nothing differs.
        samples: Samples on which outputs were compared.
        data: What the data were.
        bytes_before: Size of the original with its external data.
        bytes_after: Size of the output with its external data.
    """

    output: str
    format: str
    target: Target
    probes: tuple[str, ...]
    settings: Values
    load: Change
    run: Change | None
    threads: int
    identical: bool | None
    sqnr_db: Mapping[str, float]
    samples: int
    data: str
    bytes_before: int
    bytes_after: int

    @property
    def snippet(self) -> str:
        """A Python program that loads the compiled model as it should be."""
        return snippet(self.output, self.settings)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; an infinite SQNR is null."""
        return {
            "output": self.output,
            "format": self.format,
            "compiled_for": self.target.to_json(),
            "probes": list(self.probes),
            "settings": dict(self.settings),
            "snippet": self.snippet,
            "load": self.load.to_json(),
            "run": self.run and self.run.to_json(),
            "threads": self.threads,
            "identical": self.identical,
            "sqnr_db_by_output": {n: value if math.isfinite(value) else None for n, value in self.sqnr_db.items()},
            "samples": self.samples,
            "data": self.data,
            "size": {"before_bytes": self.bytes_before, "after_bytes": self.bytes_after},
        }


def compile_model(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    data: DataSource | None = None,
    *,
    threads: int = 1,
    seconds: float = 2.0,
    force: bool = False,
    progress: Progress = silent,
) -> Compiled:
    """Write what the runtime makes of a model on this CPU, with a guard, and measure what that is worth.

    The model computes what the original computes, with fused operators and with tensors in blocks of the length of
    this CPU's registers. Elsewhere it would be slow, or wrong without a word: `guard` and `probes` refuse it there.

    Args:
        path: Path of the model, float or quantized.
        output: Path of the model to write, whole or not at all: in ORT format where it ends in ``.ort``, else ONNX,
            with its weights in a file beside it where they are more than 2 GB.
        data: A data source whose first samples are run; None for random inputs, if the model runs on any.
        threads: Threads inside one operator while timing; 0 leaves the choice to the runtime.
        seconds: How long loads are timed, and runs.
        force: Whether an existing output may be overwritten.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: The request cannot be met; nothing was written.
    """
    as_ort = Path(output).suffix.lower() == ".ort"
    check_output(output, path, force=force)
    original = load_model(path)
    if KEY in original.metadata_props:
        raise RequantError(f"{path}: is compiled already; compile the original")
    weights = Weights.of(original)
    if as_ort and weights.total > PROTOBUF_LIMIT:
        raise RequantError(f"{output}: the ORT format holds 2 GB; give a path that ends in .onnx")
    source = generated_source(Path(path)) if data is None else open_data(Path(path), data)
    samples = [] if source is None else list(islice(source, COMPARED))
    expected = _outputs(path, samples, {})  # a feed that the model refuses is found before anything is written
    with staging(output) as folder:
        progress("optimise", 0, None)
        target = this_machine()
        model = _optimised(path, original, folder)
        model.metadata_props[KEY] = json.dumps(target.to_json(), sort_keys=True)
        probes = add_probes(model)
        _write(model, output, folder if as_ort else None)
        del model, original
    found = _compare(expected, _outputs(output, samples, LEVELS[0]), samples)
    progress("time", 0, None)
    feed = samples[0].feed if samples else None
    base: Values = {} if threads == 0 else {"intra_op_num_threads": threads}
    levels = LEVELS[:1] if as_ort or weights.large else LEVELS  # a graph in ORT format is not optimised again
    settings, run = _timed_runs(
        [(path, base), *((output, {**base, **level}) for level in levels)], feed, seconds, weights
    )
    return Compiled(
        output=os.fspath(output),
        format="ort" if as_ort else "onnx",
        target=target,
        probes=probes,
        settings=settings,
        load=_timed_loads((path, base), (output, settings), seconds),
        run=run,
        threads=threads,
        identical=found[0],
        sqnr_db=found[1],
        samples=len(samples),
        data=_description(source),
        bytes_before=size_on_disk(path),
        bytes_after=size_on_disk(output),
    )


LEVELS: Sequence[Values] = ({"graph_optimization_level": "off"}, {"graph_optimization_level": "basic"})
"""With which a compiled model is loaded: as it is, or with what is constant (the probes) computed once."""


def _description(source: Source | None) -> str:
    """Return what the data are, in words."""
    return "" if source is None else source.description


def _optimised(path: str | os.PathLike[str], original: ir.Model, folder: Path) -> ir.Model:
    """Return the graph that the runtime makes of a model, with its weights in `folder`.

    Raises:
        RequantError: The runtime cannot load the model, or not write what it has made.
    """
    import onnxruntime as ort

    original.ir_version = min(original.ir_version, newest_ir_version())
    source = serialize(original, folder)
    options = ort.SessionOptions()
    options.log_severity_level = 4  # it warns that the model is for this machine, which is what was asked for
    options.optimized_model_filepath = os.fspath(folder / "optimised.onnx")
    entries = {
        "session.optimized_model_external_initializers_file_name": "optimised.data",
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        "session.disable_prepacking": "1",  # nothing is run
    }
    if source.folder is not None:
        entries["session.model_external_initializers_file_folder_path"] = os.fspath(source.folder.resolve())
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    create_session(source.data, options, os.fspath(path))
    return load_model(folder / "optimised.onnx")


def _write(model: ir.Model, output: str | os.PathLike[str], folder: Path | None) -> None:
    """Write a compiled model as ONNX, or in ORT format by way of a folder.

    Raises:
        RequantError: It cannot be written.
    """
    if folder is None:
        save_model(model, output)
        return
    plain, made = folder / "plain.onnx", folder / "made.ort"
    save_model(model, plain)
    try:
        open_session(plain, optimize=False, save_optimized=made)
    except RequantError as error:
        raise RequantError(f"{output}: the installed runtime cannot write the ORT format: {error}") from error
    os.replace(made, os.path.realpath(output))


def _outputs(path: str | os.PathLike[str], samples: Sequence[Sample], values: Values) -> list[Outputs]:
    """Run a model on one thread over samples.

    Raises:
        RequantError: The runtime cannot load the model, or refuses a sample.
    """
    run = configured_runner(path, {**values, "intra_op_num_threads": 1})
    return [run(sample.feed) for sample in samples]


def _compare(
    before: Sequence[Outputs], after: Sequence[Outputs], samples: Sequence[Sample]
) -> tuple[bool | None, Mapping[str, float]]:
    """Return whether outputs are equal bit for bit, None of none; and the SQNR of each float output."""
    if not samples:
        return None, {}
    pairs = list(zip(before, after, strict=True))
    identical = all(_same(one[name], other[name]) for one, other in pairs for name in one)
    unlabelled = (Sample(sample.feed, None, sample.where) for sample in samples)
    judged = compare_outputs((one, other, sample) for (one, other), sample in zip(pairs, unlabelled, strict=True))
    return identical, judged.sqnr_db


def _same(one: object, other: object) -> bool:
    """Whether two outputs are equal bit for bit; sequences and maps are looked into."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        like = one.dtype == other.dtype and one.shape == other.shape
        return like and (bool((one == other).all()) if one.dtype == object else one.tobytes() == other.tobytes())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _timed_runs(
    jobs: Sequence[tuple[str | os.PathLike[str], Values]],
    feed: Mapping[str, Array] | None,
    seconds: float,
    weights: Weights,
) -> tuple[Values, Change | None]:
    """Time runs of the original, the first job, and of the compiled model at one or two levels.

    Of large models only one is loaded at any time. Returns the settings with which to load the compiled one, the first
    unless another gains 1 - 1 / `GAIN`, and the times of both.
    """
    if feed is None:
        return jobs[1][1], None
    if weights.large:
        times = [interleave([configured_run(*job, feed)], seconds=seconds / len(jobs))[0] for job in jobs]
    else:
        times = interleave([configured_run(*job, feed) for job in jobs], seconds=seconds)
    best = 2 if len(jobs) > 2 and min(times[1]) >= GAIN * min(times[2]) else 1
    return jobs[best][1], _change(times[0], times[best])


def _timed_loads(
    before: tuple[str | os.PathLike[str], Values], after: tuple[str | os.PathLike[str], Values], seconds: float
) -> Change:
    """Time loading two models in turns; the end of a session is no part of its load."""
    times: tuple[list[float], list[float]] = ([], [])
    for job in (before, after):
        open_configured(*job)  # from here on the files are in memory
    end = time.perf_counter() + seconds
    while len(times[0]) < LOADS or (time.perf_counter() < end and len(times[0]) < MOST_LOADS):
        for place in (0, 1) if len(times[0]) % 2 == 0 else (1, 0):
            start = time.perf_counter()
            session = open_configured(*(before, after)[place])
            times[place].append(time.perf_counter() - start)
            del session
    return _change(*times)


def _change(before: Sequence[float], after: Sequence[float]) -> Change:
    """Return what times in seconds say."""
    return Change(
        1e3 * min(before),
        1e3 * min(after),
        1e3 * statistics.median(before),
        1e3 * statistics.median(after),
        min(len(before), len(after)),
    )
