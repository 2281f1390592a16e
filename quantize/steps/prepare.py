"""The first step of `quantize_model`: refuse impossible requests, and simplify the graph."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from ... import RequantError
from ...calibration.data.sources import DataSource
from ...calibration.model.identity import fingerprint, listed
from ...calibration.model.newer import lower
from ...calibration.model.session import open_session
from ...transforms import Pipeline, PipelineResult, StepResult
from ...transforms.graphs.queries import node_name, nodes_by_name
from ...transforms.graphs.rewriter import separate_bodies
from ...transforms.inline_functions import taken_origins
from ...transforms.int8.existing import given_params, is_finished, release_weights
from ...transforms.int8.ops import ATTENTION
from ...transforms.int8.plan import Plan
from ...transforms.remove_dynamic_quantization import WRITERS as DYNAMIC
from ...transforms.sort_by_execution_order import sort_by_execution_order
from ..accuracy.pair import timing_note
from ..job import Job
from ..kernels.library import Kernels, kernels
from ..model.files import Weights, about, load_model, serialize
from ..model.state import passed_on, state_notes
from ..model.types import add_types
from ..options.declared import Strategy
from ..options.given_ranges import GivenRanges, load_given_ranges
from ..options.options import Options
from ..options.policy import Policy
from ..options.selection import Selection
from ..placement.costs import read as read_costs
from ..placement.facts import asked_facts
from ..placement.forms import observed_plan
from ..placement.plan_file import operators_in, read_plan, unnamed
from ..placement.rules import choose, choose_by
from ..runtime.isa import resolve
from ..runtime.progress import Progress
from ..runtime.random_inputs import refusal, runs_on_none
from ..runtime.runtimes import Runtime, runtime_named
from .reference import Reference, open_reference, sessions_of
from .simplify import LITTLE, RESTORE, UNPACK, pipelines, simplify

RESTORED = (
    "{} operators of the model compute their ranges at run time; each is planned anew, as one with float weights. "
    "Outputs are compared with the model with float weights, time with the given model; the strategy dynamic leaves "
    "the operators"
)
UNPACKED = (
    "{} weights of the model are stored in integers, and computed in each run; their operators are planned anew, as "
    "with float weights. Time is compared with the given model; the strategies dynamic and weight leave the weights"
)
BECAME_FLOAT = {RESTORE: RESTORED, UNPACK: UNPACKED}
"""By transform, the note on what became float."""
AS_GIVEN = (
    "the given operators and weights stay; outputs are compared with the outputs of the same model with float weights"
)

UNJUDGED = "timed on {}; the accuracy is not measured, since random inputs cannot judge it: give data"


def prepare(
    path: str | os.PathLike[str], data: DataSource | None, options: Options, folder: Path, progress: Progress
) -> Job:
    """Load a model, check the request, and simplify the model.

    Raises:
        RequantError: The request cannot be met.
    """
    request = _Request.of(options, judged=data is not None)
    original, identity = _load(path, request, folder, progress)
    reference = open_reference(Path(path), original, folder, data, options, request.runtime)
    simple = simplify_model(
        path, original, folder, progress, portable=request.policy.portable, to_restore=request.to_restore
    )
    request.supply.check(original, simple.model)
    types, selection = _named(original, simple, options.selection)
    plan = _plan(simple.model, selection, types, request)
    weights = Weights.of(simple.model)
    float_source = serialize(simple.model, folder)
    return Job(
        path=Path(path),
        identity=identity,
        reference=float_source if simple.restored else reference.model,
        opened=sessions_of(float_source, weights) if simple.restored else reference.opened,
        timed=reference.timed,
        folder=folder,
        simple=simple.model,
        float_source=float_source,
        weights=weights,
        types=types,
        selection=selection,
        all_int8_plan=plan,
        steps=tuple(simple.steps),
        restored=simple.restored,
        model_qparams=given_params(simple.model),
        no_saturation=request.no_saturation,
        policy=request.policy,
        notes=_notes(simple, types, selection, reference, weights, request, plan),
        supply=request.supply,
        source=reference.source,
        judged=request.judged,
        random=reference.random,
        loads=reference.loads,
        options=options,
        progress=progress,
        runtime=request.runtime,
    )


def as_given(job: Job, *, simplified: bool = True) -> Job:
    """Return a job whose simplified model keeps operators that compute their ranges at run time, and integer weights.

    Its outputs are still compared with the outputs of the model with float weights.

    Args:
        job: The job.
        simplified: Whether the model is simplified at all: else only that is changed without which it does not run.

    Raises:
        RequantError: The runtime does not load the model.
    """
    original = load_model(job.path)
    sort_by_execution_order(original)
    little = None if simplified else LITTLE
    simple = simplify_model(job.path, original, job.folder, job.progress, portable=job.policy.portable, only=little)
    facts = asked_facts(simple.model, job.selection, job.types, job.options, job.policy)
    return replace(
        job,
        simple=simple.model,
        float_source=serialize(simple.model, job.folder),
        weights=Weights.of(simple.model),
        all_int8_plan=choose_by(replace(facts, static=False), simple.model),
        steps=tuple(simple.steps),
        restored={},
        model_qparams=given_params(simple.model),
        notes=(*(note for note in job.notes if note not in job.restored.values()), *([AS_GIVEN] * simplified)),
    )


@dataclass(frozen=True)
class _Request:
    """The options, with the files and the names in them resolved.

    Attributes:
        options: The options.
        judged: Whether the user gives data.
        supply: Ranges, overrides and the range rule that the user gives.
        runtime: What runs the INT8 model.
        no_saturation: Whether the target adds 8-bit products without saturation.
        policy: What decides which units become int8.
    """

    options: Options
    judged: bool
    supply: GivenRanges
    runtime: Runtime
    no_saturation: bool
    policy: Policy

    @classmethod
    def of(cls, options: Options, *, judged: bool) -> _Request:
        """Read what the options name.

        Raises:
            RequantError: A file cannot be read, or this machine does not have what the options ask for.
        """
        supply = load_given_ranges(options)
        runtime = runtime_named(options.runtime, options.precision)
        no_saturation = resolve(options.isa).exact
        attention = options.plan is None or ATTENTION in operators_in(options.plan)
        policy = Policy.of(options, exact=no_saturation, native=_has_native(options), attention=attention)
        return cls(options, judged, supply, runtime, no_saturation, policy)

    @property
    def static(self) -> bool:
        """Whether there are ranges, from the user or from the data."""
        return self.supply.known(judged=self.judged)

    @property
    def to_restore(self) -> Selection | None:
        """Where operators that compute their ranges at run time become float; None if they stay."""
        stays = not self.static or self.options.selection.strategy in (Strategy.DYNAMIC, Strategy.WEIGHT)
        return None if stays else self.options.selection


def _load(path: str | os.PathLike[str], request: _Request, folder: Path, progress: Progress) -> tuple[ir.Model, str]:
    """Return the user's model, with its nodes in order of execution, and its `fingerprint`.

    Raises:
        RequantError: It is no model; or the selected nodes or the given ranges are those of another model.
    """
    original = load_model(path)
    request.options.selection.check(original)
    identity = fingerprint(original)
    with about(path):
        sort_by_execution_order(original)  # ONNX Runtime also runs models that are not sorted
    if not request.supply.is_of(identity):
        simple = simplify_model(path, original, folder, progress, to_restore=request.to_restore).model
        raise request.supply.refuse(path, simple, choose(simple).quantized)
    return original, identity


def _has_native(options: Options) -> bool:
    """Return whether the native operators are here.

    Raises:
        RequantError: They are asked for, and are not here.
    """
    found = kernels()
    if options.wants_native and isinstance(found, str):
        raise RequantError(found)
    return isinstance(found, Kernels)


def _named(original: ir.Model, simple: Simplified, selection: Selection) -> tuple[Mapping[str, str], Selection]:
    """Return the types of the original operators, and the selection, by the names in the simplified model too."""
    types = {node_name(node): node.op_type for node in original.graph.all_nodes()}
    types |= {new: types[old] for new, old in simple.renamed.items() if old in types}
    # a node of a function body may be renamed twice: it also has the names of its first name
    twice = [(new, name) for new, old in simple.renamed.items() for inner, name in simple.origins if inner == old]
    return types, selection.renamed([*simple.renamed.items(), *simple.origins, *twice])


def _check_origin_of_costs(policy: Policy, threads: int, runtime: Runtime) -> None:
    """Refuse costs of another number of threads or of another runtime; versions and CPUs may differ.

    Raises:
        RequantError: The costs are refused, or cannot be read.
    """
    if policy.costs is None:
        return
    machine = read_costs(policy.costs).machine
    if machine.threads != threads:
        raise RequantError(f"{policy.costs}: measured on {machine.threads} threads, not {threads}")
    if machine.title != runtime.identity.title:
        raise RequantError(f"{policy.costs}: measured in {machine.described}, not in {runtime.identity.title}")


def _plan(model: ir.Model, selection: Selection, types: Mapping[str, str], request: _Request) -> Plan:
    """Return the plan whose int8 units are calibrated, after a check of the user's costs and plan.

    Raises:
        RequantError: The costs are refused, or the plan file does not fit the model.
    """
    options, policy = request.options, request.policy
    facts = replace(asked_facts(model, selection, types, options, policy), static=request.static)
    _check_origin_of_costs(policy, options.threads, request.runtime)
    plan = choose_by(facts, model)
    if policy.plan is not None:
        read_plan(policy.plan, facts, plan)  # refuse a plan that does not fit before any observation
    return observed_plan(facts, plan, all_int8=policy.all_int8, native=options.wants_native)


def _folded(model: ir.Model, selection: Selection, types: Mapping[str, str]) -> list[str]:
    """Return a note of the excluded nodes that are no longer in the simplified model; no note without any."""
    gone = sorted(set(types) - set(nodes_by_name(model)))
    excluded = [name for name in gone if selection.excludes(name) or types[name] in selection.exclude_ops]
    if not excluded:
        return []
    told = f"{types[excluded[0]]} {excluded[0]!r} is" if len(excluded) == 1 else f"{listed(excluded)} are"
    return [f"{told} excluded, but folded into other nodes by simplification"]


def _unmeasured(reference: Reference, *, judged: bool) -> list[str]:
    """Return a note if the model is not measured on the user's data, with the runtime's reason if it does not run."""
    if reference.source is None:
        return [f"not measured: {runs_on_none(refusal(reference.model))}"]
    return [] if judged else [UNJUDGED.format(reference.source.description)]


def _notes(
    simple: Simplified,
    types: Mapping[str, str],
    selection: Selection,
    reference: Reference,
    weights: Weights,
    request: _Request,
    plan: Plan,
) -> tuple[str, ...]:
    """Return what the user should know of the models, the data and the request before any unit becomes int8."""
    source = reference.source
    notes = [*simple.notes, *_folded(simple.model, selection, types), *_unmeasured(reference, judged=request.judged)]
    notes += [*reference.notes, *state_notes(source, passed_on(simple.model))]
    notes += [] if request.policy.plan is None else unnamed(request.policy.plan, plan)
    notes += filter(None, [timing_note(weights)])
    notes += request.supply.remarks(simple.model, request.options.scheme, plan.quantized)
    return tuple(notes)


@dataclass(frozen=True)
class Simplified:
    """A simplified model.

    Attributes:
        model: The simplified copy; its nodes and tensors have unique names.
        notes: Transforms that failed.
        renamed: The old names of renamed nodes.
        origins: Pairs of names of an inlined node: its name in the model, and its name in the function.
        steps: The result of each transform.
    """

    model: ir.Model
    notes: Sequence[str]
    renamed: Mapping[str, str]
    origins: Sequence[tuple[str, str]]
    steps: Sequence[StepResult]

    @property
    def restored(self) -> Mapping[str, str]:
        """By transform, a note on what was in integers in the given model and is float now."""
        counts = ((result.step.name, result.change.applied) for result in self.steps)
        return {name: BECAME_FLOAT[name].format(count) for name, count in counts if count and name in BECAME_FLOAT}


def simplify_model(
    path: str | os.PathLike[str],
    original: ir.Model,
    folder: Path,
    progress: Progress,
    *,
    portable: bool = False,
    to_restore: Selection | None = None,
    only: str | None = None,
) -> Simplified:
    """Simplify a model; all later steps use the names of its nodes and tensors.

    Args:
        path: The file of the model, for errors.
        original: The model.
        folder: A folder for temporary files.
        progress: Called with each transform.
        portable: Whether the result is for other runtimes too.
        to_restore: Where operators that compute their ranges at run time, and weights in integers, become float; None
            if they stay.
        only: The pipeline of a model whose functions are inlined; None for all that the group `simplify` does.

    Raises:
        RequantError: The runtime does not load it.
    """
    with about(path):
        inline, _ = pipelines(portable=portable)
        inlined, origins = _inlined(original, progress, inline)
        dynamic = None if to_restore is None else _stay_dynamic(inlined.model, to_restore.renamed(origins))
        _, pipeline = pipelines(portable=portable, dynamic=dynamic)
        done, notes, renamed = _simplified_to_load(inlined.model, folder, progress, only or pipeline)
    add_types(done.model, folder)
    found = Simplified(done.model, notes, renamed, origins, (*inlined.applied, *done.applied))
    return replace(found, notes=(*notes, *found.restored.values()))


def _stay_dynamic(model: ir.Model, selection: Selection) -> list[str]:
    """Return the names of the nodes that the selection excludes, if they compute their ranges at run time."""
    nodes = [node for node in model.graph.all_nodes() if node.name and (node.domain, node.op_type) in DYNAMIC]
    return sorted({str(node.name) for node in nodes if selection.leaves(node)})


def _simplified_to_load(
    original: ir.Model, folder: Path, progress: Progress, first: Pipeline | str
) -> tuple[PipelineResult, list[str], Mapping[str, str]]:
    """Return a copy that the runtime loads, simplified by `first` or `LITTLE`, notes, and old names of nodes."""
    notes: list[str] = []
    for pipeline in (first, LITTLE):
        done = simplify(original, progress, pipeline=pipeline)
        notes += [f"{result.step}: {result.error}" for result in done.applied if result.error]
        model = done.model
        lower(model)
        if not is_finished(model):
            release_weights(model)
        renamed = separate_bodies(model)
        try:
            open_session(serialize(model, folder), lean=True)
        except RequantError as error:
            if pipeline == LITTLE:
                raise
            notes.append(f"the simplified model does not load, so the model is used without simplification ({error})")
        else:
            break
    return done, notes, renamed


def _inlined(original: ir.Model, progress: Progress, inline: Pipeline) -> tuple[PipelineResult, list[tuple[str, str]]]:
    """Return a copy without functions, and for each inlined node its new name with each of its old names."""
    done = simplify(original, progress, pipeline=inline)
    origins = []
    for node in done.model.graph.all_nodes():
        origins += [(node_name(node), name) for name in taken_origins(node)]
    return done, origins
