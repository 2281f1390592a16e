"""Pipelines of transforms: parse them by the registered transforms, print them, run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass, RemoveInitializersFromInputsPass

from ... import RequantError, near
from ...system.given import check_function, check_kind, names_of
from ..int8.existing import MADE_KEY, is_finished
from ..registry import COMMON, REQUIRED, Change, Option, PipelineError, Transform, TransformError
from . import plugins
from .grammar import Scanned, Value, converted, quoted, scan, written
from .groups import SKIPPING, members
from .verify import Signature, VerifyError, check_model, signature, verify

FINISHED = "written-by-requant"
METADATA_KEY = "requant.pipeline"
IGNORE_ERRORS = Option(COMMON, bool, False)

Progress = Callable[["Step"], None]
Keep = Callable[["StepResult", ir.Model], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One transform of a pipeline, with the options that differ from their defaults, sorted by name."""

    name: str
    options: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        """Return the step as text; parsing the text gives an equal step."""
        pairs = [f"{key}={quoted(one)}" for key, value in self.options for one in written(value)]
        return f"{self.name}({', '.join(pairs)})" if pairs else self.name


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Transforms in the order in which they run.

    Attributes:
        steps: The transforms.
        skips_finished: Whether it leaves models unchanged that `requant quantize` wrote in integers.
    """

    steps: tuple[Step, ...]
    skips_finished: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        """Return the canonical text: ``parse(str(pipeline)) == pipeline``."""
        return " ".join(map(str, self.steps))


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step.

    Attributes:
        step: The step, with the inputs and outputs that `run` filled in.
        change: The report of its transform; empty when the transform failed.
        notices: Notes for the user, one sentence each.
        error: The error that ``ignore_errors=true`` ignored; None when there was none.
    """

    step: Step
    change: Change
    notices: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The rewritten model and the result of each step, in order."""

    model: ir.Model
    applied: tuple[StepResult, ...]


def parse(text: str) -> Pipeline:
    """Parse a pipeline, and check its names and values against the registered transforms.

    Raises:
        PipelineError: Bad syntax, an unknown transform or parameter, a value of the wrong type, a scalar given twice,
            a missing option, or a step before a step that must come earlier. The message shows the place and similar
            names.
    """
    check_kind(text, str, "a pipeline must be a text")
    scanned = scan(text)
    if not scanned:
        raise PipelineError("the pipeline is empty: name at least one transform")
    transforms = [_lookup(text, step) for step in scanned]
    steps = tuple(_resolve(text, step, made) for step, made in zip(scanned, transforms, strict=True))
    _check_order(text, scanned, transforms)
    return Pipeline(steps)


def parse_groups(text: str) -> Pipeline:
    """Return the pipeline of named groups, written like steps: ``"freeze(min_max_log_file=my.log) fuse"``.

    An option of a group is passed to each step that has this option, and overrides the value in the group's definition.

    Raises:
        PipelineError: Bad syntax, an unknown group, an option that no step of the group has, a value of the wrong type,
            or steps in a forbidden order. The message shows the place.
    """
    check_kind(text, str, "a pipeline must be a text")
    load_plugins()
    scanned = scan(text)
    if not scanned:
        raise PipelineError("no group is named")
    pairs = [pair for group in scanned for pair in _group_steps(text, group)]
    steps = tuple(_resolve(text, step, transform) for step, transform in pairs)
    _check_order(text, [step for step, _ in pairs], [transform for _, transform in pairs])
    return Pipeline(steps, skips_finished=all(group.name in SKIPPING for group in scanned))


def load_plugins() -> tuple[str, ...]:
    """Import the plug-ins, each once per process, and return one line for each plug-in that failed."""
    return plugins.load_plugins(parse_groups)


def lookup(name: str) -> Transform:
    """Return the transform registered as `name`, by this package or by a plug-in.

    Raises:
        UnknownNameError: No transform has this name; the message lists similar names.
    """
    return plugins.lookup(name, parse_groups)


def run(
    pipeline: Pipeline | str,
    model: ir.Model,
    *,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    check: bool = True,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> PipelineResult:
    """Run a pipeline on a copy of `model`. The copy shares the tensors; `model` itself does not change.

    The steps that ran are appended to the result's ``metadata_props["requant.pipeline"]``. A model of IR version 3
    must list its initializers as inputs; the copy has version 4 and does not list them. A pipeline that skips finished
    models (`Pipeline.skips_finished`) runs no step on them; each step reports ``written-by-requant``.

    Args:
        pipeline: The pipeline.
        model: The model.
        inputs: Tensor names for each step that has an option ``inputs`` and does not set it.
        outputs: The same for the option ``outputs``.
        check: Whether to `verify` the model before the first step and after each step; not again after a transform of
            this package that applied nothing.
        progress: Called with each step before the step runs.
        keep: Called after each step with its result and the model. Later steps edit the same model object.

    Raises:
        PipelineError: The pipeline is not valid, or no step takes the inputs or outputs.
        TransformError: A step without ``ignore_errors=true`` failed.
        VerifyError: The model is not valid before the first step or after a step.
        RequantError: It is no model, or its external data cannot be read.
    """
    check_model(model, "run")
    for name, function in (("progress", progress), ("keep", keep)):
        if function is not None:
            check_function(function, name)
    ports = {"inputs": names_of(inputs, "inputs"), "outputs": names_of(outputs, "outputs")}
    steps = _with_ports(parse(str(pipeline)).steps, ports)
    verified = check and not lookup(steps[0].name).takes_unsorted
    if verified:
        _verify_after("the model given", model, None)
    model = _working_copy(model, lookup(steps[0].name))
    if isinstance(pipeline, Pipeline) and pipeline.skips_finished and is_finished(model):
        skipped = tuple(StepResult(step, Change(skipped=Counter({FINISHED: 1}))) for step in steps)
        return PipelineResult(model, skipped)
    history = _history(model)
    applied: list[StepResult] = []
    for step in steps:
        if progress is not None:
            progress(step)
        model, result = _run_step(step, model, history, check=check, verified=verified)
        verified = verified or (check and result.error is None)
        applied.append(result)
        if result.error is None:
            history.append(step.name)
            recorded = model.metadata_props.get(METADATA_KEY, "")
            model.metadata_props[METADATA_KEY] = f"{recorded} {step}".lstrip()
            model.metadata_props.pop(MADE_KEY, None)
        if keep is not None:
            keep(result, model)
    return PipelineResult(model, tuple(applied))


def _run_step(
    step: Step, model: ir.Model, history: list[str], *, check: bool, verified: bool
) -> tuple[ir.Model, StepResult]:
    """Run one step in place; return the model, or a copy from before the step when its error is ignored.

    Args:
        step: The step.
        model: The model.
        history: The names of the transforms that ran.
        check: Whether to verify the model after the step.
        verified: Whether the model is known to be valid. Then it is verified only if the step changed it, or belongs to
            a plug-in, whose count of rewrites may be wrong.
    """
    transform = lookup(step.name)
    options: dict[str, Any] = dict(step.options)
    backup = _copy(model, transform) if options.pop(IGNORE_ERRORS.name, False) else None
    before = signature(model)
    notices = tuple(f"{step.name} should run after {name}" for name in transform.after if name not in history)
    try:
        change = transform(model, **options)
    except RequantError as error:
        if backup is None:
            raise TransformError(f"{step.name}: {error}") from error
        return backup, StepResult(step, Change(), notices, str(error))
    if check and (change.applied or not (verified and transform.own)):
        _verify_after(f"after {step.name}", model, None if transform.changes_io else before)
    return model, StepResult(step, change, notices)


def _verify_after(when: str, model: ir.Model, before: Signature | None) -> None:
    """Verify the model; `when` begins the error message."""
    try:
        verify(model, like=before)
    except VerifyError as error:
        raise VerifyError(f"{when}: {error}") from error


def _copy(model: ir.Model, transform: Transform) -> ir.Model:
    """Copy the model for a transform; onnx-ir cannot clone a graph whose nodes are not in execution order."""
    if not transform.takes_unsorted:
        return model.clone()
    copy = ir.from_proto(ir.to_proto(model))
    for name, weight in model.graph.initializers.items():  # keeps the tensor lazy, with the folder of its data
        copy.graph.initializers[name].const_value = weight.const_value
    return copy


def _working_copy(model: ir.Model, transform: Transform) -> ir.Model:
    """Copy the model for the first step, make its node names unique, and raise IR version 3 to 4.

    From IR version 4 on, an initializer is also an input only if a caller may override it.
    """
    model = _copy(model, transform)
    if "ai.onnx" in model.opset_imports:  # the long name of the standard domain; onnx-ir's nodes use the short name
        model.opset_imports.setdefault("", model.opset_imports.pop("ai.onnx"))
    names = [node.name for node in model.graph.all_nodes() if node.name]
    if len(set(names)) < len(names):
        NameFixPass()(model)
    if model.ir_version < 4:
        RemoveInitializersFromInputsPass()(model)
        model.ir_version = 4
    return model


def _history(model: ir.Model) -> list[str]:
    """Return the names of the transforms in the model's metadata, in the order in which they ran."""
    try:
        return [step.name for step in scan(model.metadata_props.get(METADATA_KEY, ""))]
    except PipelineError:  # another program wrote this key
        return []


def _with_ports(steps: tuple[Step, ...], ports: Mapping[str, tuple[str, ...]]) -> tuple[Step, ...]:
    """Set the options ``inputs`` and ``outputs`` of the steps that have them and do not set them."""
    for key, names in ports.items():
        if not names:
            continue
        takers = [key in lookup(step.name).options and key not in dict(step.options) for step in steps]
        if not any(takers):
            raise PipelineError(f"{key} {', '.join(names)} were given, but no step of the pipeline takes {key}")
        steps = tuple(
            Step(step.name, tuple(sorted([*step.options, (key, names)]))) if takes else step
            for step, takes in zip(steps, takers, strict=True)
        )
    return steps


# --- text to steps: names and values against the registry


def _lookup(text: str, step: Scanned) -> Transform:
    """Find the transform of a step."""
    try:
        return lookup(step.name)
    except RequantError as error:
        raise PipelineError(str(error), text, step.at) from error


def _group_steps(text: str, group: Scanned) -> list[tuple[Scanned, Transform]]:
    """Return the steps of a group and their transforms; each step gets the options of the group that it has."""
    try:
        texts = [member.step for member in members(group.name)]
    except RequantError as error:
        raise PipelineError(str(error), text, group.at) from error
    parts = [(part, _lookup(one, part)) for one in texts for part in scan(one)]
    known = {IGNORE_ERRORS.name, *(option for _, transform in parts for option in transform.options)}
    for parameter in group.parameters:
        if parameter.key not in known:
            message = f"no step of group {group.name} has a parameter {parameter.key!r}{near(parameter.key, known)}"
            raise PipelineError(message, text, parameter.key_at)
    steps = []
    for part, transform in parts:
        takes = {IGNORE_ERRORS.name, *transform.options}
        from_group = [parameter for parameter in group.parameters if parameter.key in takes]
        keys = {parameter.key for parameter in from_group}
        own = [parameter for parameter in part.parameters if parameter.key not in keys]
        steps.append((Scanned(part.name, group.at, (*own, *from_group)), transform))
    return steps


def _resolve(text: str, step: Scanned, transform: Transform) -> Step:
    """Check the parameters of a step against the options of its transform, and drop default values."""
    options = {**transform.options, IGNORE_ERRORS.name: IGNORE_ERRORS}
    values: dict[str, Value] = {}
    for parameter in step.parameters:
        option = options.get(parameter.key)
        if option is None:
            message = f"{step.name} has no parameter {parameter.key!r}{near(parameter.key, options)}"
            raise PipelineError(message, text, parameter.key_at)
        if option.type is not tuple and parameter.key in values:
            raise PipelineError(f"{step.name} takes one {parameter.key!r}, not two", text, parameter.key_at)
        try:
            value = converted(parameter, option)
        except ValueError as error:
            raise PipelineError(f"{step.name}: {parameter.key} {error}", text, parameter.value_at) from error
        earlier = values.get(parameter.key, ())
        values[parameter.key] = earlier + value if isinstance(value, tuple) and isinstance(earlier, tuple) else value
    for option in transform.options.values():
        if option.default is REQUIRED and option.name not in values:
            raise PipelineError(f"{step.name} needs {option.name}: {step.name}({option.name}=...)", text, step.at)
    return Step(step.name, tuple(sorted((key, v) for key, v in values.items() if v != options[key].default)))


def _check_order(text: str, scanned: Sequence[Scanned], transforms: Sequence[Transform]) -> None:
    """Refuse a step when a transform that must come before the step comes only later."""
    names = [step.name for step in scanned]
    for place, (step, transform) in enumerate(zip(scanned, transforms, strict=True)):
        for earlier in transform.after:
            if earlier in names[place + 1 :] and earlier not in names[:place]:
                message = f"{step.name} must come after {earlier}, which this pipeline runs later"
                raise PipelineError(message, text, step.at)
