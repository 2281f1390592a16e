"""`compile_model`: what ONNX Runtime makes of a model on this CPU, written to a file that loads at once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from .... import RequantError
from ....calibration.data.samples import Sample
from ....calibration.data.sources import DataSource, Source, named_files
from ....calibration.model.newer import lower
from ....calibration.model.session import open_session
from ....system.apart import check_apart
from ....system.given import check_function, check_path, checked_integer
from ....system.notes import note_written
from ....system.regular import check_replaceable
from ...accuracy.classes import Outputs
from ...accuracy.outputs import compare_outputs
from ...model.files import (
    PROTOBUF_LIMIT,
    Weights,
    check_output,
    is_ort,
    load_model,
    serialize,
    size_on_disk,
    staging,
)
from ...model.writing import save_model
from ...runtime.compiled_for import KEY, Target, this_machine
from ...runtime.configured import (
    Configured,
    Values,
    configured_runner,
    create_session,
    set_option,
    snippet,
)
from ...runtime.inputs import open_data
from ...runtime.progress import TIME, Progress, silent
from ...runtime.random_inputs import generated_source, refusal, runs_on_none
from .compiled_times import SECONDS, Change, timed
from .native import STOCK, UNCHANGED, Natives, choose, native_library, needed_library
from .probes import add_probes

COMPARED = 8  # samples whose outputs are compared


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The result of `compile_model`.

    Attributes:
        output: Path of the written model.
        format: ``onnx`` or ``ort``.
        target: The machine and runtime that it is compiled for.
        probes: The probes in its graph (`requant.quantize.tools.bench.probes.add_probes`).
        settings: The session options to load it with.
        kernels: The native operators in it: ``stock`` for none, ``own`` for those that the original has, or what was
            added (`requant.quantize.tools.bench.native.FORMS`).
        tried: The minimum time of a run with each form of native operators, in milliseconds; empty if none was tried.
        load: Load times of the original with the runtime's defaults, and of the compiled model with `settings`. The
            original runs with the library of its native operators, if it has some.
        run: Run times of both; None without inputs.
        threads: Threads inside one operator while timing.
        identical: Whether all outputs are equal bit for bit; None without inputs.
        sqnr_db: SQNR of each float output in dB; infinite without differences.
        samples: The number of samples on which outputs were compared.
        data: A text for the data.
        bytes_before: Size of the original with its external data.
        bytes_after: Size of the output with its external data.
    """

    output: str
    format: str
    target: Target
    probes: tuple[str, ...]
    settings: Values
    kernels: str
    tried: Mapping[str, float]
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
        """A Python program that loads the compiled model with `settings`."""
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
            "kernels": self.kernels,
            "tried_ms": dict(self.tried),
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
    kernels: str = "auto",
    force: bool = False,
    progress: Progress = silent,
) -> Compiled:
    """Write the graph that the runtime optimizes for this CPU, with guards, and measure the gain.

    The model computes the same as the original, with fused operators and with tensors in blocks that fill this CPU's
    registers. On another CPU it would be slow, or silently wrong: `compiled_for` and `probes` refuse it there.

    Args:
        path: Path of the model, float or quantized.
        output: Path of the model to write: in ORT format if it ends in ``.ort``, otherwise ONNX, with weights of more
            than 2 GB in a file beside it. It is written completely or not at all.
        data: A data source whose first samples are run; None for random inputs.
        threads: Threads inside one operator while timing; 0 is the runtime's choice.
        kernels: ``stock`` for operators of the runtime, ``native`` for operators of ``ai.requant``, or ``auto``: native
            where that is faster here, and where the original is. A model with native operators needs their library to
            load. What the original computes with them, ``stock`` rounds otherwise.
        force: Whether an existing output may be overwritten.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: The model cannot be compiled, or does not run on the inputs; nothing was written.
    """
    check_path(path, "a model")
    check_path(output, "an output")
    threads = checked_integer(threads, "threads", 0)
    check_function(progress, "progress")
    library = native_library(kernels, output)
    check_apart({"the output": output}, [path, *named_files(data)])
    check_output(output, path, force=force)
    original, weights, needed = _original(path, output, kernels)
    source, samples = _inputs(Path(path), data)
    feed = samples[0].feed if samples else None
    base: Values = {} if threads == 0 else {"intra_op_num_threads": threads}
    natives = None if library is None or feed is None or weights.large else Natives(library, kernels, base, feed)
    kept = {} if kernels == STOCK else needed
    made = _make(Configured(path, needed), original, kept, output, samples, natives, progress)
    del original  # models are timed without its weights in memory
    progress(TIME, 0, None)
    after = [Configured(output, {**base, **each}) for each in made.values]
    times = timed(Configured(path, {**base, **needed}), after, feed, weights)
    return Compiled(
        output=os.fspath(output),
        format="ort" if is_ort(output) else "onnx",
        target=made.target,
        probes=made.probes,
        settings=times.settings,
        kernels=made.form,
        tried=made.tried,
        load=times.load,
        run=times.run,
        threads=threads,
        identical=made.identical,
        sqnr_db=made.sqnr_db,
        samples=len(samples),
        data=source.description,
        bytes_before=size_on_disk(path),
        bytes_after=size_on_disk(output),
    )


LEVELS: Sequence[Values] = (UNCHANGED, {"graph_optimization_level": "basic"})
"""The options to load a compiled model: unchanged, or with constants (the probes) computed once."""


def _original(
    path: str | os.PathLike[str], output: str | os.PathLike[str], asked: str
) -> tuple[ir.Model, Weights, Values]:
    """Return a model that is not compiled, the size of its weights, and what its native operators need to load.

    Raises:
        RequantError: It is compiled, or no model; or the format of the output cannot hold it.
    """
    original = load_model(path)
    if KEY in original.metadata_props:
        raise RequantError(f"{path}: the model is already compiled; compile the original")
    weights = Weights.of(original)
    if is_ort(output) and weights.total > PROTOBUF_LIMIT:
        raise RequantError(f"{output}: the ORT format holds 2 GB; give a path that ends in .onnx")
    needed = needed_library(original)
    if needed and asked != STOCK and is_ort(output):
        why = "the model has native operators; give a path that ends in .onnx, or choose the kernels 'stock'"
        raise RequantError(f"{output}: {why}")
    return original, weights, needed


def _inputs(path: Path, data: DataSource | None) -> tuple[Source, list[Sample]]:
    """Return the data and their first samples.

    Raises:
        RequantError: There are no data, and the model runs on no random inputs: it may never run.
    """
    source = generated_source(path) if data is None else open_data(path, data)
    if source is None:
        raise RequantError(f"{path}: {runs_on_none(refusal(path))}")
    return source, list(islice(source, COMPARED))


@dataclass(frozen=True, slots=True)
class _Made:
    """A compiled model that is in its file.

    Attributes:
        target: The machine and runtime that it is compiled for.
        probes: The probes in its graph.
        form: The native operators in it, or ``stock``.
        tried: The minimum time of a run with each form of native operators, in milliseconds.
        values: The session options to load it with: one for each of `LEVELS`.
        identical: Whether all outputs are equal bit for bit to those of the original; None without samples.
        sqnr_db: SQNR of each float output in dB.
    """

    target: Target
    probes: tuple[str, ...]
    form: str
    tried: Mapping[str, float]
    values: tuple[Values, ...]
    identical: bool | None
    sqnr_db: Mapping[str, float]


def _make(
    before: Configured,
    original: ir.Model,
    kept: Values,
    output: str | os.PathLike[str],
    samples: Sequence[Sample],
    natives: Natives | None,
    progress: Progress,
) -> _Made:
    """Compile a model, and write it after it has run over the samples.

    Args:
        before: The model in its file, with the session options that it needs.
        original: The model.
        kept: The session options that keep its native operators; empty if the runtime computes their bodies.
        output: The file to write.
        samples: The samples on which both models are compared.
        natives: The native operators to try; None for the runtime's own alone.
        progress: Called with the stage.

    Raises:
        RequantError: The model cannot be compiled; nothing was written.
    """
    expected = _outputs(before.path, before.values, samples)  # fails before the output is written
    with staging(output) as folder:
        progress("optimise", 0, None)
        target = this_machine()
        optimised = _optimised(before.path, original, kept, folder)
        chosen = choose(optimised, kept, natives, folder, SECONDS)
        model = chosen.model
        model.metadata_props[KEY] = json.dumps(target.to_json(), sort_keys=True)
        probes = add_probes(model)
        values = tuple({**level, **chosen.needed} for level in LEVELS)
        identical, sqnr_db = _compare(expected, _written(model, output, folder, samples, values[0]), samples)
    return _Made(target, probes, chosen.form, chosen.tried, values, identical, sqnr_db)


def _optimised(path: str | os.PathLike[str], original: ir.Model, kept: Values, folder: Path) -> ir.Model:
    """Return the graph that the runtime optimizes, with its weights in `folder`.

    Native operators stay with their library in `kept`; else the runtime computes their bodies.

    Raises:
        RequantError: The runtime cannot load the model, or cannot write its graph.
    """
    import onnxruntime as ort

    lower(original)
    source = serialize(original, folder)
    options = ort.SessionOptions()
    options.log_severity_level = 4  # do not print the warning that the graph is for this machine
    options.optimized_model_filepath = os.fspath(folder / "optimised.onnx")
    entries = {
        "session.optimized_model_external_initializers_file_name": "optimised.data",
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        "session.disable_prepacking": "1",  # the model does not run
    }
    if source.folder is not None:
        entries["session.model_external_initializers_file_folder_path"] = os.fspath(source.folder.resolve())
    for option, value in {**entries, **kept}.items():
        set_option(options, option, value)
    try:
        create_session(source.data, options, os.fspath(path))
    except RequantError as error:
        if "Failed to write" not in str(error):
            raise
        where = f"{folder.parent}: the runtime cannot write the weights of its graph here"
        raise RequantError(f"{where}; is there space for a copy of the model?") from error
    return load_model(folder / "optimised.onnx")


def _written(
    model: ir.Model, output: str | os.PathLike[str], folder: Path, samples: Sequence[Sample], values: Values
) -> list[Outputs]:
    """Run a compiled model over samples, then write it; return its outputs.

    Raises:
        RequantError: The model cannot be written or run; the output is as it was.
    """
    inner = folder / "compiled"  # writing large weights locks their folder, and `folder` is locked
    inner.mkdir()
    plain, made = inner / "plain.onnx", inner / "made.ort"
    save_model(model, plain)
    if not is_ort(output):
        found = _outputs(plain, values, samples)
        save_model(model, output)
        return found
    try:
        open_session(plain, optimize=False, save_optimized=made)
    except RequantError as error:
        raise RequantError(f"{output}: the installed runtime cannot write the ORT format: {error}") from error
    found = _outputs(made, values, samples)
    check_replaceable(output)
    os.replace(made, os.path.realpath(output))
    note_written(output)
    return found


def _outputs(path: str | os.PathLike[str], values: Values, samples: Sequence[Sample]) -> list[Outputs]:
    """Run a model on one thread over samples.

    Raises:
        RequantError: The runtime cannot load the model, or refuses a sample.
    """
    run = configured_runner(path, {**values, "intra_op_num_threads": 1})
    return [run(sample.feed) for sample in samples]


def _compare(
    before: Sequence[Outputs], after: Sequence[Outputs], samples: Sequence[Sample]
) -> tuple[bool | None, Mapping[str, float]]:
    """Return whether outputs are equal bit for bit, None without samples, and the SQNR of each float output."""
    if not samples:
        return None, {}
    pairs = list(zip(before, after, strict=True))
    identical = all(_same(one[name], other[name]) for one, other in pairs for name in one)
    unlabelled = (Sample(sample.feed, None, sample.where) for sample in samples)
    judged = compare_outputs((one, other, sample) for (one, other), sample in zip(pairs, unlabelled, strict=True))
    return identical, judged.sqnr_db


def _same(one: object, other: object) -> bool:
    """Return whether two outputs are equal bit for bit, also inside sequences and maps."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        like = one.dtype == other.dtype and one.shape == other.shape
        return like and (bool((one == other).all()) if one.dtype == object else one.tobytes() == other.tobytes())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)
