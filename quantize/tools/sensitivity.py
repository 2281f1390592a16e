"""The effect of integers on accuracy: every unit and every tensor of a plan is tried alone."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import onnx_ir as ir

from ... import RequantError
from ...calibration.data.samples import Sample
from ...calibration.data.sources import DataSource, Source
from ...calibration.execution import Execution
from ...calibration.model.session import LARGE
from ...calibration.range_files.range_file import Data, RangeFile
from ...calibration.rules.ranges import parse_rule
from ...calibration.runs.runner import observe
from ...calibration.statistics.observations import Observations
from ...system.given import check_function, check_kind, checked_integer, names_of, or_default
from ...transforms.graphs.inference import inferred
from ...transforms.graphs.queries import nodes_by_name, plain_shape
from ...transforms.int8.plan import Plan
from ...transforms.int8.qparams import QParams
from ..accuracy.choices import GIVEN_NOTE, Reader
from ..accuracy.given_choices import layered_choices, readers_of, with_choices
from ..accuracy.probabilities import probability_outputs
from ..accuracy.promise import LEAST_DB
from ..accuracy.selected_outputs import chosen_outputs, replacements_for, selected_from, with_tensors_as_outputs
from ..accuracy.sqnr import decibels
from ..job import Evidence, Job
from ..model.files import staging
from ..options.efforts import EFFORTS
from ..options.given_ranges import precision_of
from ..options.options import Options
from ..placement.forms import all_int8_plan
from ..placement.plan_file import read_plan
from ..runtime.machine import Machine
from ..runtime.machine import folder as cache_folder
from ..runtime.progress import CALIBRATE, Progress, silent
from ..sensitivity.cache import PREFIX, Trials, digest, forget_old, trials_of
from ..sensitivity.integer_constants import integer_constants
from ..sensitivity.result import Sensitivity, TensorRow, UnitRow
from ..sensitivity.switch_graph import Switch
from ..sensitivity.switch_model import Constants, Switchboard, noises, switchboard
from ..sensitivity.verdicts import Traits, traits, unit_verdict
from ..steps.emit import plan_by_rules, scale_channels
from ..steps.prepare import prepare
from ..steps.ranges import TensorRanges, channels_of, find_ranges

KINDS = ("units", "tensors")
TRIED = 4  # samples of each trial
ROOM = LARGE // 2  # bytes; more weights stay float, because the runtime packs three copies of them
WEIGHTS_IN_FLOAT = "weights are left in float: there are too many for a second copy in memory"
NEGLIGIBLE = 0.01  # share of the noise of everything; a unit with less, left in float, can gain about 0.04 dB


def measure_sensitivity(
    model: str | os.PathLike[str],
    data: DataSource,
    options: Options | None = None,
    *,
    samples: int = TRIED,
    kinds: Collection[str] = KINDS,
    fresh: bool = False,
    progress: Progress = silent,
) -> Sensitivity:
    """Measure the effect of every unit and every tensor that can be integers on the outputs.

    One session serves all trials (`switchboard`). The cache folder keeps each finished trial, so that an interrupted
    run continues where it stopped, and a repeated run is short.

    Args:
        model: Path of the float model.
        data: A data source, as `quantize_model` takes it.
        options: See `Options`. With the placement ``rules`` or a plan, the int8 units of this plan are tried; with any
            other placement, all units that can be int8.
        samples: Number of samples of each trial, picked evenly.
        kinds: Units, tensors or both: some of `KINDS`.
        fresh: Whether to ignore the cached trials.
        progress: Called with a stage, the number of finished steps, and their total (None: unknown).

    Raises:
        RequantError: The model or the data cannot be used, or no part of the model can be integers.
    """
    began = time.monotonic()
    _check_request(samples, kinds)
    check_function(progress, "progress")
    check_kind(fresh, bool, "fresh must be True or False")
    forget_old()
    with staging(None) as folder, _resumable():
        job, source = _prepared(model, data, or_default(options, Options), folder, progress)
        seen = _observed(job, source, fresh=fresh)
        found = _ranges(job, source, seen)
        tried = list(islice(iter(source.samples(samples)), min(samples, sys.maxsize)))
        board, notes = _board(job, found, tried)
        with trials_of(board, tried, fresh=fresh) as trials:
            measured = _Measured(job, board, seen, found, trials)
            made, recalled = _try_all(measured, tried, kinds)
    noise, _ = measured.worst(board.everything)
    return Sensitivity(
        model=os.fspath(model),
        data=source.description,
        calibration=job.supply.calibration,
        calibrated=seen.samples,
        samples=len(tried),
        runtime=Machine.here(1).runtime,
        outputs=board.outputs,
        noise=noise,
        units=tuple(_unit_rows(measured)) if "units" in kinds else (),
        tensors=tuple(_tensor_rows(measured)) if "tensors" in kinds else (),
        trials=made,
        recalled=recalled,
        seconds=round(time.monotonic() - began, 3),
        notes=(*job.notes, *notes),
    )


def _check_request(samples: int, kinds: Collection[str]) -> None:
    """Refuse what is no number of samples, and kinds that are not among `KINDS`.

    Raises:
        RequantError: A value is refused.
    """
    checked_integer(samples, "samples", 1)
    names = names_of(kinds, "kinds")
    if not names or not set(names) <= set(KINDS):
        raise RequantError(f"what to try is some of {', '.join(KINDS)}, not {', '.join(names) or 'nothing'}")


def _prepared(
    model: str | os.PathLike[str], data: DataSource, options: Options, folder: Path, progress: Progress
) -> tuple[Job, Source]:
    """Return the job of a model that has something to try, with its data; arguments as of `prepare`.

    Raises:
        RequantError: The request cannot be met, or no part of the model can be integers.
    """
    job = scale_channels(prepare(model, data, options, folder, progress))
    if job.source is None or not job.all_int8_plan.quantized:
        raise RequantError(f"{model}: no tensor of this model could become uint8; there is nothing to try")
    return job, job.source


@dataclass(frozen=True)
class _Measured:
    """The switchable model with the observed values and the results of the trials.

    Attributes:
        job: The job, with the simplified float model.
        board: The model, switchable.
        seen: The observed values of its tensors.
        found: The ranges that were chosen from them.
        trials: The noise in each finished trial.
    """

    job: Job
    board: Switchboard
    seen: Observations
    found: TensorRanges
    trials: Trials

    @property
    def plan(self) -> Plan:
        """The plan that is tried."""
        return self.board.plan

    @cached_property
    def units(self) -> dict[str, frozenset[Switch]]:
        """The switches of each unit with switches."""
        names = (unit.name for unit in self.plan.units if self.plan.impl(unit).int8)
        return {name: on for name in names if (on := self.board.unit(name))}

    @cached_property
    def tensors(self) -> dict[str, frozenset[Switch]]:
        """The switches of each tensor with its own scale."""
        return {name: on for name in self.plan.observed if (on := self.board.tensor(name))}

    def worst(self, on: frozenset[Switch]) -> tuple[float, str]:
        """Return the most noise at any output in a finished trial, and the name of this output."""
        outputs = self.trials.known[digest(on)]
        return max(((_ratio(signal, noise), name) for name, (signal, noise) in outputs.items()), default=(0.0, ""))

    def noise(self, on: frozenset[Switch]) -> float | None:
        """Return the most noise at any output in a trial; None if it is not finished, or has no switch on."""
        return self.worst(on)[0] if on and digest(on) in self.trials.known else None

    def matters(self, unit: str) -> bool:
        """Return whether a unit alone makes more than a `NEGLIGIBLE` part of the noise of everything."""
        return self.worst(self.units[unit])[0] > NEGLIGIBLE * self.worst(self.board.everything)[0]

    @cached_property
    def traits(self) -> dict[str, Traits]:
        """The properties of the values of each tensor with its own scale."""
        makers = {str(value.name): node for node in nodes_by_name(self.job.simple).values() for value in node.outputs}
        found = {}
        for name in self.plan.observed:
            if name not in self.seen.ranges:
                continue
            node = makers.get(name)
            joined = [str(v.name) for v in node.inputs if v is not None] if node and node.op_type == "Concat" else []
            precision = precision_of(self.job.scheme)
            found[name] = traits(name, self.found.ranges[name], self.seen, joined, precision)
        return found


def _try_all(measured: _Measured, samples: Sequence[Sample], kinds: Collection[str]) -> tuple[int, int]:
    """Run the missing trials; return the number of all trials, and the number of cached ones.

    The first pass tries each unit and each tensor alone. For each unit that matters, the second pass tries its weights
    alone, and everything but this unit.
    """
    board, trials = measured.board, measured.trials
    before = frozenset(trials.known)
    units = measured.units if "units" in kinds else {}
    tensors = measured.tensors if "tensors" in kinds else {}
    # a unit that is the only reader of a tensor has the same switches
    alone = list(dict.fromkeys([board.everything, *units.values(), *tensors.values()]))
    _try(measured, alone, samples, "try units and tensors alone")
    noisy = [name for name in units if measured.matters(name)]
    closer = [on for name in noisy for on in (board.constants(name), board.everything - units[name]) if on]
    _try(measured, closer, samples, "try without the worst units")
    made = {digest(on) for on in (*alone, *closer)}
    return len(made), len(made & before)


def _try(measured: _Measured, planned: Sequence[frozenset[Switch]], samples: Sequence[Sample], stage: str) -> None:
    """Run the missing ones of the planned trials."""
    trials, total = measured.trials, len(planned)
    missing = [on for on in planned if digest(on) not in trials.known]
    results = noises(measured.board, missing, samples, probabilities=probability_outputs(measured.job.simple))
    for done, (on, powers) in enumerate(zip(missing, results, strict=True), total - len(missing) + 1):
        trials.add(digest(on), powers)
        measured.job.progress(stage, done, total)


def _unit_rows(measured: _Measured) -> list[UnitRow]:
    """Return the rows of all units, the worst first."""
    board, plan, known = measured.board, measured.plan, {unit.name: unit for unit in measured.plan.units}
    alone = {
        name: measured.worst(on)[0] for name, on in measured.tensors.items() if digest(on) in measured.trials.known
    }
    rows = []
    for name, on in measured.units.items():
        unit, matters = known[name], measured.matters(name)
        noise, output = measured.worst(on)
        weights = measured.noise(board.constants(name)) if matters else None
        roots = [plan.root(tensor) for tensor in unit.inputs]
        read = {t: (alone.get(t, 0.0), measured.traits[t].verdict) for t in roots if t in measured.traits}
        rows.append(
            UnitRow(
                name=name,
                operator=unit.op,
                implementation=plan.impl(unit).value,
                inputs=unit.inputs,
                noise=noise,
                output=output,
                weights_noise=weights,
                rest_noise=_rest(measured, on) if matters else None,
                verdict=unit_verdict(noise, weights, read),
            )
        )
    return sorted(rows, key=lambda row: -row.noise)


def _rest(measured: _Measured, on: frozenset[Switch]) -> float | None:
    """Return the noise with all switches on but some."""
    rest = measured.board.everything - on
    return measured.noise(rest) if rest else 0.0


def _tensor_rows(measured: _Measured) -> list[TensorRow]:
    """Return the rows of all tensors, the worst first."""
    nodes = nodes_by_name(measured.job.simple)
    makers = {str(value.name): node.op_type for node in nodes.values() for value in node.outputs}
    rows = []
    for name, on in measured.tensors.items():
        noise, output = measured.worst(on)
        lo, hi = measured.found.ranges[name]
        about = measured.traits.get(name) or Traits((lo, hi), math.inf, 0.0, 0.0, "")
        rows.append(
            TensorRow(
                name=name,
                operator=makers.get(name, "input"),
                noise=noise,
                output=output,
                rounding=about.rounding if math.isfinite(about.rounding) else None,
                lo=lo,
                hi=hi,
                least=about.seen[0],
                most=about.seen[1],
                clipped=about.clipped,
                growth=about.growth,
                verdict=about.verdict,
            )
        )
    return sorted(rows, key=lambda row: -row.noise)


def _observed(job: Job, source: Source, *, fresh: bool) -> Observations:
    """Observe all tensors that may become uint8, with histograms, and per channel where tensors have channels.

    If the data are files, the cache keeps the observations beside the trials.
    """
    axes = {
        name: axis for name, axis in _axes(job.simple).items() if name in job.all_int8_plan.quantized
    } | channels_of(job)
    return observe(
        job.float_source,
        job.all_int8_plan.quantized,
        source,
        histogram=True,
        channel_axis=axes,
        execution=_execution(job, source, fresh=fresh),
        progress=partial(job.progress, CALIBRATE),
    )


def _execution(job: Job, source: Source, *, fresh: bool) -> Execution:
    """Return how tensors are observed: with a checkpoint in the cache, if the data are files and the user gives none.

    Python objects may differ in the next run. With `fresh` the cached observations are removed.
    """
    execution = replace(job.options.execution, strict=False)
    if source.reference is None or execution.checkpoint is not None:
        return execution
    with suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        execution = replace(execution, checkpoint=cache_folder() / f"{PREFIX}ranges", kept=lambda path: None)
        if fresh:
            _forget_ranges()
    return execution


def _axes(model: ir.Model) -> dict[str, int]:
    """Return the channel axis of each tensor of the main graph with channels: 1 for feature maps, else the last.

    An axis counts only if its inferred length is a number: one of free length holds no channels, and may have another
    length in each run.
    """
    axes = {}
    for name, value in inferred(model).items():
        shape = plain_shape(value) or ()
        axis = 1 if len(shape) > 3 else -1
        if len(shape) > 1 and isinstance(shape[axis], int):
            axes[name] = axis
    return axes


def _ranges(job: Job, source: Source, seen: Observations) -> TensorRanges:
    """Choose ranges from the observations, as `quantize_model` does."""
    if job.supply.ranges is not None:
        return find_ranges(job)
    rule = job.supply.rule or parse_rule(EFFORTS[job.options.effort].rule)
    file = RangeFile.of(
        seen, rule, model="", data=Data(source.description), digests={}, precision=precision_of(job.scheme)
    )
    supply = replace(job.supply, ranges=file.overridden(job.supply.overrides))
    found = find_ranges(replace(job, supply=supply))
    return replace(found, means={name: mean for name, mean in found.means.items() if name in channels_of(job)})


def _board(job: Job, found: TensorRanges, samples: Sequence[Sample]) -> tuple[Switchboard, list[str]]:
    """Open the switchable model; return it with warnings.

    If scores select the elements of an output, and their number or order varies, or they are integers, the tensor from
    which they are selected is compared instead.

    Raises:
        RequantError: There is nothing to try, or nothing to compare.
    """
    plan = _plan(job, found)
    if not plan.has_int8:
        raise RequantError(f"{job.path}: no unit of this model can become int8; there is nothing to try")
    qparams = {name: job.scheme.activation_params(*found.ranges[name]) for name in plan.observed}
    constants = _integer_weights(job, plan, qparams, found)
    opened = partial(
        switchboard,
        plan=plan,
        qparams=qparams,
        constants=constants,
        optimize=not job.model_qparams,
        folder=job.folder,
    )
    board = opened(job.simple)
    notes = [WEIGHTS_IN_FLOAT] if constants is None else []
    replacements, given = _replacements(job, board, samples)
    readers = [*readers_of(job.simple, given), *(reader for found in replacements.values() for reader in found)]
    if replacements:
        notes.append(f"what {', '.join(map(repr, replacements))} are selected from is compared instead")
    if given:
        notes.append(GIVEN_NOTE)
    if readers:
        model = with_choices(job.simple, job.simple, given)
        board = opened(with_tensors_as_outputs(model, {each[-1]: each for each in readers}.values(), replacements))
    if not board.outputs:
        raise RequantError(f"{job.path}: has no float output to compare")
    return board, notes


def _integer_weights(job: Job, plan: Plan, qparams: Mapping[str, QParams], found: TensorRanges) -> Constants | None:
    """Return what `integer_constants` returns; None if memory has no room for a second copy of the weights."""
    if job.weights.total > ROOM:
        return None
    means = found.means if "means" in job.corrections else {}
    return integer_constants(job.simple, plan, qparams, scheme=job.scheme, means=means, exact=job.no_saturation)


def _replacements(
    job: Job, board: Switchboard, samples: Sequence[Sample]
) -> tuple[dict[str, tuple[Reader, ...]], list[str]]:
    """Return what `replacements_for` returns: tensors by the output that they replace, and nodes whose choice is given.

    Outputs count whose shape differs between samples of one shape, or between float and integers, and those that seem
    to lose too much because of their order.

    Args:
        job: The job, with the simplified float model.
        board: The model, switchable.
        samples: The samples.
    """
    model = job.simple
    chosen = chosen_outputs(model)
    if not board.outputs:
        return chosen, []
    if not chosen and not selected_from(model) and not layered_choices(model):
        return {}, []
    shapes: dict[tuple[object, ...], set[tuple[int, ...]]] = {}
    for sample in samples:
        fed = tuple(sorted((name, array.shape) for name, array in sample.feed.items()))
        for name, value in board.run(sample.feed).items():
            shapes.setdefault((name, fed), set()).add(value.shape)
    (powers,) = noises(board, [board.everything], samples, probabilities=probability_outputs(model))
    found = {name: decibels(*sums) for name, sums in powers.items()}
    incomparable = {str(name) for (name, _), lengths in shapes.items() if len(lengths) > 1}
    incomparable |= {name for name, value in found.items() if value == -math.inf}
    lost = incomparable | {name for name, value in found.items() if value < LEAST_DB}
    return replacements_for(model, lost, incomparable, gives=not job.weights.large)


def _plan(job: Job, found: TensorRanges) -> Plan:
    """Return the plan whose integer units are tried."""
    facts, rules, _ = plan_by_rules(job, found, Evidence())
    if job.policy.plan is not None:
        return read_plan(job.policy.plan, facts, rules, strict=False)
    return all_int8_plan(facts, rules) if job.policy.all_int8 else rules


@contextmanager
def _resumable() -> Iterator[None]:
    """Tell the user how to resume an interrupted run."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on where it stopped") from None


def _forget_ranges() -> None:
    """Remove the cached observations."""
    for path in cache_folder().glob(f"{PREFIX}ranges-*"):
        path.unlink(missing_ok=True)


def _ratio(signal: float, noise: float) -> float:
    """Return noise over signal; infinite if the signal is zero, or the outputs cannot be compared."""
    if noise == 0:
        return 0.0
    return noise / signal if signal > 0 and math.isfinite(noise) else math.inf
