"""The first step of `quantize_model`: refuse impossible requests, and simplify the graph."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from ... import RequantError
from ...calibration.session import Feed, ModelSource, newest_ir_version, open_session
from ...calibration.sources import DataSource, Source
from ...transforms import Pipeline, PipelineResult, StepResult
from ...transforms.existing import given_params, is_finished, release_weights
from ...transforms.graph import node_name, nodes_by_name, separate_bodies
from ...transforms.inline_functions import ORIGIN
from ...transforms.plan import Plan
from ..accuracy.pair import timing_note
from ..job import Job
from ..kernels.library import Kernels, kernels
from ..model.files import Weights, about, load_model, serialize
from ..model.types import add_types
from ..options.given_ranges import load_given_ranges
from ..options.options import Options
from ..options.policy import Policy
from ..options.selection import Selection
from ..placement.costs import read as read_costs
from ..placement.facts import Facts, facts_of
from ..placement.plan_file import read_plan
from ..placement.rules import all_int8_plan, choose, choose_by
from ..runtime.inputs import first_sample, open_for
from ..runtime.isa import resolve
from ..runtime.progress import Progress, silent
from ..runtime.random_inputs import generated_source
from ..runtime.session import Runner, Sessions
from .simplify import LITTLE, LOAD, WIDEN, pipelines, simplify

KEPT = 2**28
"""The float model stays open during a run where its weights have at most this number of bytes."""


def prepare(
    path: str | os.PathLike[str], data: DataSource | None, options: Options, folder: Path, progress: Progress
) -> Job:
    """Load a model, check the request, and simplify the model.

    Raises:
        RequantError: The request cannot be met.
    """
    supply = load_given_ranges(options)
    no_saturation = resolve(options.isa).exact
    policy = Policy.of(options, exact=no_saturation, native=_has_native(options))
    original = load_model(path)
    options.selection.check(original)
    if not supply.is_of(original):
        simple = make_plain(path, original, folder, progress).model
        raise supply.refuse(path, simple, choose(simple).quantized)
    reference, remarks = _reference(Path(path), original, folder)
    opened, source, feeds = _opened(reference, data, options, Weights.of(original))
    types = {node_name(node): node.op_type for node in original.graph.all_nodes()}
    plain = make_plain(path, original, folder, progress, portable=policy.portable)
    simple, renamed, origins = plain.model, plain.renamed, list(plain.origins)
    supply.check(original, simple)
    types |= {new: types[old] for new, old in renamed.items() if old in types}
    # a node of a function body may be renamed twice: it also has the names of its first name
    origins += [(new, name) for new, old in renamed.items() for inner, name in origins if inner == old]
    selection = options.selection.renamed([*renamed.items(), *origins])
    static = data is not None or supply.ranges is not None
    facts = facts_of(simple, selection, types, options.scheme.activation)
    facts = replace(
        facts,
        static=static,
        zero_points=policy.zero_points,
        portable=policy.portable,
        native=policy.native,
    )
    plan = _plan(simple, facts, policy, options.threads)
    weights = Weights.of(simple)
    notes = (*plain.notes, *_folded(simple, selection, types), *_unmeasured(source, data), *remarks)
    notes += (*filter(None, [timing_note(weights)]), *supply.remarks(simple, options.scheme))
    return Job(
        path=Path(path),
        reference=reference,
        opened=opened,
        folder=folder,
        simple=simple,
        float_source=serialize(simple, folder),
        weights=weights,
        types=types,
        selection=selection,
        all_int8_plan=plan,
        steps=tuple(plain.steps),
        model_qparams=given_params(simple),
        no_saturation=no_saturation,
        policy=policy,
        notes=notes,
        supply=supply,
        source=source,
        judged=data is not None,
        feeds=feeds,
        options=options,
        progress=progress,
    )


def _has_native(options: Options) -> bool:
    """Return whether the native operators are here.

    Raises:
        RequantError: They are asked for, and are not here.
    """
    found = kernels()
    if options.wants_native and isinstance(found, str):
        raise RequantError(found)
    return isinstance(found, Kernels)


def _plan(model: ir.Model, facts: Facts, policy: Policy, threads: int) -> Plan:
    """Return the plan whose int8 units are calibrated, after checks of the user's plan and costs.

    Raises:
        RequantError: The plan file does not fit the model, or the costs are of another number of threads.
    """
    plan = choose_by(facts, model)
    if policy.plan is not None:
        read_plan(policy.plan, facts, plan)  # refuse a plan that does not fit before any observation
    if policy.costs is not None and (measured := read_costs(policy.costs).machine.threads) != threads:
        raise RequantError(f"{policy.costs}: measured on {measured} threads, not {threads}")
    return all_int8_plan(facts, plan) if policy.all_int8 and facts.static else plan


def _folded(model: ir.Model, selection: Selection, types: Mapping[str, str]) -> list[str]:
    """Return a note for each excluded node that is no longer in the simplified model."""
    gone = sorted(set(types) - set(nodes_by_name(model)))
    return [
        f"{types[name]} {name!r} is excluded, but was folded into its neighbours by simplification"
        for name in gone
        if name in selection.exclude_nodes or types[name] in selection.exclude_ops
    ]


def _unmeasured(source: Source | None, data: DataSource | None) -> list[str]:
    """Return a note if the model is not measured on the user's data."""
    if source is None:
        return ["not measured: the model runs with none of the tried lengths of the inputs' free axes; give data"]
    return [f"measured on {source.description}: give data to judge the model by"] if data is None else []


@dataclass(frozen=True)
class Plain:
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


def make_plain(
    path: str | os.PathLike[str], original: ir.Model, folder: Path, progress: Progress, *, portable: bool = False
) -> Plain:
    """Simplify a model; all later steps use the names of its nodes and tensors.

    Raises:
        RequantError: The runtime does not load it.
    """
    with about(path):
        inlined, origins = _inlined(original, progress, portable=portable)
        done, notes, renamed = _plainer(inlined.model, folder, progress, portable=portable)
    add_types(done.model, folder)
    return Plain(done.model, notes, renamed, origins, (*inlined.applied, *done.applied))


def _reference(path: Path, original: ir.Model, folder: Path) -> tuple[ModelSource, list[str]]:
    """Return the float model as the runtime runs it, with notes.

    ONNX Runtime has few kernels for bfloat16: such a model is compared as float32. It does not load a Resize whose
    empty scales a caller may override: such a model is compared with constants in place of these inputs.
    """
    tensors = (value.dtype for graph in original.graphs() for node in graph for value in node.inputs if value)
    if ir.DataType.BFLOAT16 in tensors:
        pipeline, note = WIDEN, "the runtime has no kernels for bfloat16: the float model is run in float32"
    elif any(value.is_initializer() for value in original.graph.inputs):
        pipeline, note = (
            LOAD,
            "the runtime does not load the float model: its initializers are constants, not inputs",
        )
    else:
        return path, []
    try:
        open_session(path, lean=True)
    except RequantError:
        pass
    else:
        return path, []
    loadable = simplify(original, silent, pipeline=pipeline).model
    loadable.ir_version = min(loadable.ir_version, newest_ir_version())
    return serialize(loadable, folder), [note]


def _plainer(
    original: ir.Model, folder: Path, progress: Progress, *, portable: bool
) -> tuple[PipelineResult, list[str], Mapping[str, str]]:
    """Return a simplified copy that the runtime loads, notes, and the old names of renamed nodes."""
    notes: list[str] = []
    _, plain = pipelines(portable=portable)
    tried: tuple[Pipeline | str, ...] = (plain, LITTLE)
    for pipeline in tried:
        done = simplify(original, progress, pipeline=pipeline)
        notes += [f"{result.step}: {result.error}" for result in done.applied if result.error]
        model = done.model
        model.ir_version = min(model.ir_version, newest_ir_version())
        if not is_finished(model):
            release_weights(model)
        renamed = separate_bodies(model)
        try:
            open_session(serialize(model, folder), lean=True)
        except RequantError as error:
            if pipeline is LITTLE:
                raise
            notes.append(f"the simplified model does not load, so the model is used without simplification ({error})")
        else:
            break
    return done, notes, renamed


def _inlined(original: ir.Model, progress: Progress, *, portable: bool) -> tuple[PipelineResult, list[tuple[str, str]]]:
    """Return a copy without functions, and for each inlined node its new name with each of its old names."""
    inline, _ = pipelines(portable=portable)
    done = simplify(original, progress, pipeline=inline)
    origins = []
    for node in done.model.graph.all_nodes():
        names = json.loads(node.metadata_props.pop(ORIGIN, "[]"))
        origins += [(node_name(node), name) for name in names]
    return done, origins


def _opened(
    reference: ModelSource, data: DataSource | None, options: Options, weights: Weights
) -> tuple[Sessions, Source | None, tuple[Feed, ...]]:
    """Open the float model and its data, and run the first sample of each batch size.

    Returns:
        The model, the data (random inputs where none are given, None where the model runs on none), the feeds.

    Raises:
        RequantError: The model or the data cannot be used.
    """
    sessions = Sessions(reference, keep=weights.total <= KEPT)
    if data is None:
        source = generated_source(reference)
        return sessions, source, () if source is None else _feeds(source, options)
    run = Runner(reference, lean=True) if weights.large else sessions.runner(1)
    source = open_for(run, data, options.samples)
    feeds = _feeds(source, options)
    for feed in feeds:
        run(feed)
    return sessions, source, feeds


def _feeds(source: Source, options: Options) -> tuple[Feed, ...]:
    """Return the first feed of each batch size.

    Raises:
        RequantError: There is no sample, or the model's inputs have no free batch axis.
    """
    return tuple(first_sample(source, batch).feed for batch in options.batches)
