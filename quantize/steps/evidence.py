"""Measure, before the plan is decided, the error at the outputs with one tensor in uint8, or weights in int8."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ... import RequantError
from ...calibration.data.samples import Sample
from ...transforms.graphs.queries import constant
from ...transforms.int8.ops import OPS
from ...transforms.int8.plan import Impl, Plan, Unit
from ...transforms.int8.reasons import ALREADY
from ...transforms.int8.recurrent import STATES, keeps_input
from ..accuracy.given_choices import given_choices, with_choices
from ..accuracy.logits import logits_of
from ..accuracy.outputs import Accuracy
from ..accuracy.selected_outputs import compared_readers, with_tensors_as_outputs
from ..job import Candidate, Evidence, Job
from ..options.efforts import ADJUSTING, EFFORTS
from ..placement.facts import Facts
from ..placement.forms import FLOAT_FORMS, all_int8_plan, possible_forms
from ..placement.runs import runs_within
from ..runtime.progress import TRY_TENSORS, TRY_WEIGHTS, WRITE, Adding
from ..sensitivity.each_tensor import Integers, ruinous, sqnr_by_tensor, sqnr_by_weight
from ..sensitivity.integer_constants import integer_constants
from ..sensitivity.switch_graph import ROUNDED
from ..sensitivity.switch_model import Constants
from .emit import plan_by_rules
from .judge import measure_accuracy
from .ranges import TensorRanges

TRIAL_SAMPLES = 4  # samples of each trial
TICK = 1e-6  # seconds: the least time of a run, because the CPU clock may not have moved
TRIED_FOR = {Impl.DYNAMIC_NATIVE: Impl.DYNAMIC, Impl.BLOCK_NATIVE: Impl.BLOCK}
"""A form that is not tried has the noise of this form: the range of a row is at most the range of its tensor.

Attention rounds rows of k and columns of v to 127 steps on each side of 0: where all values have one sign, the step may
be twice that of the form that is tried.
"""
NOISE_LEFT = 0.1
"""The noise of weights that learned rounding and biases leave, about.

Where all units are int8 they remove as much noise as all weights add when they are rounded to nearest: 1.0e-4 of 1.0e-4
in a ResNet-20, 3.8e-4 of 3.9e-4 in a MobileNetV1, at least 0.99 of 1.4e-3 in an ESPCN (powers relative to the outputs).
"""
LOST_DB = 0.0
"""The least SQNR that counts, in dB: noise as large as the signal. Minus infinity would be infinite noise."""
FINE_DB = 45.0  # with less noise the model is as good as float: no tensors are tried alone


def gather_evidence(job: Job, ranges: TensorRanges) -> Evidence:
    """Measure the noise of each tensor alone.

    With low effort, a given plan, a model as good as float, or one whose products are integers already
    (`only_rest_is_left`), nothing is measured. Then `deliver` tries tensors alone if the outputs of the INT8 model are
    ruined.
    """
    effort = EFFORTS[job.options.effort]
    if not effort.seconds or job.policy.plan is not None or not job.outputs_judge or job.weights.large:
        return Evidence()
    if only_rest_is_left(job.all_int8_plan):
        return Evidence()
    try:
        candidate = all_int8_candidate(job, ranges)
        accuracy = measure_accuracy(job, candidate)
    except RequantError:  # emit() reports the error
        return Evidence()
    if accuracy.worst_sqnr_db >= FINE_DB or not candidate.qparams:
        return Evidence()
    return evidence_of(job, ranges, candidate, accuracy, effort.seconds, effort.least_db)


def only_rest_is_left(plan: Plan) -> bool:
    """Whether the given model has products with integers already, and no further product can become int8.

    What is left gains little or nothing, and is not worth a trial of each tensor.
    """
    already = any(choice.reason.code == ALREADY.code for choice in plan.choices.values())
    return already and not any(_is_product(unit) and plan.impl(unit).int8 for unit in plan.units)


def _is_product(unit: Unit) -> bool:
    """Whether a unit multiplies by weights, or multiplies two tensors; a recurrent operator does so in each step."""
    return unit.op in STATES or (unit.op in OPS and OPS[unit.op].kind == "compute")


def all_int8_candidate(job: Job, ranges: TensorRanges) -> Candidate:
    """Return the model with integers wherever a plan may have them: its tensors and weights are those to try."""
    job.progress(WRITE, 0, None)
    facts, rules, write = plan_by_rules(job, ranges, Evidence())
    return write(rules if job.policy.how == "rules" else all_int8_plan(facts, rules))


def evidence_of(
    job: Job,
    ranges: TensorRanges,
    candidate: Candidate,
    accuracy: Accuracy,
    seconds: float,
    least_db: float,
) -> Evidence:
    """Measure the noise of each tensor and of the weights of each unit of a candidate alone.

    Args:
        job: The job.
        ranges: The ranges, with the means of the inputs.
        candidate: A model with integers.
        accuracy: Its accuracy; only outputs that could be compared count.
        seconds: How long each kind of trial may take, about; where the time is too short, nothing is known of it.
        least_db: A tensor that leaves at least this SQNR, in dB, may be uint8.
    """
    facts, rules, _ = plan_by_rules(job, ranges, Evidence())
    job = replace(job, progress=Adding(job.progress))
    sqnr_db = measure_tensors(job, candidate, accuracy, seconds)
    of_forms = measure_forms(job, facts, rules, accuracy, seconds)
    of_weights = measure_weights(job, ranges, candidate, accuracy, seconds)
    left = NOISE_LEFT if job.corrections >= ADJUSTING else 1.0
    as_rounded = {unit.name for unit in rules.units if unit.op in STATES}  # no correction learns these weights
    return Evidence(
        ruinous(sqnr_db, least_db),
        noise_powers(sqnr_db),
        {form: noise_powers(found) for form, found in of_forms.items()},
        {form: ruinous(found, least_db) for form, found in of_forms.items()},
        {u: power * (1.0 if u in as_rounded else left) for u, power in noise_powers(of_weights).items()},
        limit=seconds,
    )


def noise_powers(sqnr_db: Mapping[str, float]) -> dict[str, float]:
    """Return noise power over signal power from dB, by tensor; at most the ratio of `LOST_DB`."""
    return {name: 10 ** (-max(db, LOST_DB) / 10) for name, db in sqnr_db.items()}


def measure_tensors(job: Job, candidate: Candidate, accuracy: Accuracy, seconds: float = math.inf) -> dict[str, float]:
    """Return the SQNR at the worst output when one tensor of a candidate alone is uint8, in dB by tensor.

    Args:
        job: The job.
        candidate: The tensors to try are those with a scale in it, and those that have the scale of a Concat.
        accuracy: Its accuracy; only outputs that could be compared count.
        seconds: How long this may take, about; where the time is too short, the result is empty.
    """
    values = ir.convenience.create_value_mapping(job.simple.graph)  # those in bodies too
    plan, params = candidate.plan, candidate.qparams
    roots = {name: name for name in params} | {name: plan.root(name) for name in _copied_by_concats(plan)}
    known = {name: params[root] for name, root in roots.items() if name in values and root in params}
    return _try_parts(job, known, accuracy, seconds, sqnr_by_tensor, TRY_TENSORS)


def _copied_by_concats(plan: Plan) -> list[str]:
    """Return the tensors that a Concat copies: they have its scale, and their own operators round them."""
    moved = {t for unit in plan.units if unit.op in OPS and OPS[unit.op].kind == "same" for t in unit.outputs}
    wholes = {unit.outputs[0] for unit in plan.units if unit.op == "Concat"}
    return [tensor for tensor in plan.quantized if plan.root(tensor) != tensor and tensor not in moved | wholes]


def measure_forms(
    job: Job, facts: Facts, rules: Plan, accuracy: Accuracy, seconds: float = math.inf
) -> dict[Impl, dict[str, float]]:
    """Return the SQNR at the worst output when one input of products or attention alone is rounded, in dB by tensor.

    Each form that reads and writes float rounds its inputs in its own way, and has a row of the result. Only these
    units read the rounded tensor. Other readers, such as a residual, read it in float, as in a model of this form.

    Args:
        job: The job.
        facts: The input of the rules.
        rules: The plan by rules.
        accuracy: As for `measure_tensors`.
        seconds: As for `measure_tensors`.
    """
    options = possible_forms(facts, rules)
    found: dict[Impl, dict[str, float]] = {}
    home = {str(node.name) for node in job.simple.graph}
    for form in (each for each in FLOAT_FORMS if each not in TRIED_FOR):
        alike = {form, *(each for each, tried in TRIED_FOR.items() if tried is form)}
        units = [
            u for u in rules.units if alike & {*options[u.name]} and len(options[u.name]) > 1 and u.nodes[0] in home
        ]
        tensors = dict.fromkeys((tensor for unit in units for tensor in unit.rounded), ROUNDED[form])
        readers = {name for unit in units for name in unit.readers}
        if tensors:
            found[form] = _try_parts(
                job, tensors, accuracy, seconds, partial(sqnr_by_tensor, readers=readers), TRY_TENSORS
            )
    kept = _kept_inputs(job, rules)
    alike_forms = {form: found[tried] for form, tried in TRIED_FOR.items() if tried in found}
    return found | {form: {t: db for t, db in known.items() if t not in kept} for form, known in alike_forms.items()}


def _kept_inputs(job: Job, rules: Plan) -> set[str]:
    """Return the tensors that only recurrent operators read whose native form does not round them (`keeps_input`)."""
    home = {str(node.name): node for node in job.simple.graph}
    kept = {
        unit.name
        for unit in rules.units
        if unit.op in STATES and unit.nodes[0] in home and keeps_input(home[unit.nodes[0]])
    }
    inputs = {tensor for unit in rules.units if unit.name in kept for tensor in unit.rounded}
    return inputs - {tensor for unit in rules.units if unit.name not in kept for tensor in unit.rounded}


def measure_weights(
    job: Job, ranges: TensorRanges, candidate: Candidate, accuracy: Accuracy, seconds: float
) -> dict[str, float]:
    """Return the SQNR at the worst output when the weights of one unit of a candidate alone are int8, in dB by unit.

    Weights are rounded to nearest. The bias corrects what that does to mean inputs, as it does in the model.

    Args:
        job: The job.
        ranges: The ranges, with the means of the inputs.
        candidate: The units to try are those with weights that are integers in it.
        accuracy: As for `measure_tensors`.
        seconds: As for `measure_tensors`.
    """
    plan, means = candidate.plan, ranges.means if "means" in job.corrections else {}
    home = {str(node.name): node for node in job.simple.graph}  # not in bodies
    units = {u.nodes[0]: u.name for u in plan.units if u.nodes[0] in home and _has_weights(plan, u, home[u.nodes[0]])}

    def made(nodes: Collection[str]) -> Constants:
        names = {units[node]: node for node in nodes}
        constants = integer_constants(
            job.simple,
            plan,
            candidate.qparams,
            scheme=job.scheme,
            means=means,
            exact=job.no_saturation,
            units=names,
        )
        return {names[unit]: arrays for unit, arrays in constants.items()}

    sizes = {name: sum(tensor.nbytes for tensor in map(constant, home[name].inputs) if tensor) for name in units}
    integers = Integers.within(made, job.options.execution.memory_limit)
    found = _try_parts(job, sizes, accuracy, seconds, partial(sqnr_by_weight, integers=integers), TRY_WEIGHTS)
    return {units[node]: value for node, value in found.items()}


def _has_weights(plan: Plan, unit: Unit, first: ir.Node) -> bool:
    """Return whether a unit is a product, a GRU or an LSTM with weights that are integers in a plan.

    Args:
        plan: The plan.
        unit: The unit.
        first: Its first node.
    """
    row = OPS.get(unit.op)
    multiplies = row is not None and row.kind == "compute" and not row.native
    if not (multiplies or unit.op in STATES) or not plan.impl(unit).int8:
        return False
    return constant(first.inputs[1]) is not None


def _try_parts(
    job: Job,
    parts: Mapping[str, object],
    accuracy: Accuracy,
    seconds: float,
    trial: Callable[..., dict[str, float]],
    stage: str,
) -> dict[str, float]:
    """Round one part at a time; return the SQNR at the worst output that can be compared, in dB by part.

    Args:
        job: The job.
        parts: The parts, and how each is rounded.
        accuracy: As for `measure_tensors`.
        seconds: As for `measure_tensors`.
        trial: Tries the parts, as `sqnr_by_tensor` does.
        stage: What is done, for people who wait.
    """
    if job.source is None:
        return {}
    samples = list(islice(iter(job.source.samples(TRIAL_SAMPLES)), TRIAL_SAMPLES))
    progress = partial(job.progress, stage)
    progress(0, len(parts))  # the first part may wait long for its session
    runs = _affordable_runs(job, samples[0], seconds) if samples else 0.0
    found: dict[str, float] = {}
    for judged in _comparable_models(job.simple, accuracy):
        here = {*ir.convenience.create_value_mapping(judged.graph), *(node.name for node in judged.graph.all_nodes())}
        rest = {name: part for name, part in parts.items() if name in here and name not in found}
        tried = trial(judged, rest, samples, optimize=not job.model_qparams, runs=runs, progress=progress)
        if rest and not tried:
            return {}
        found |= tried
    return {name: found.get(name, math.inf) for name in parts} if found else {}  # some do not reach what is compared


def _affordable_runs(job: Job, sample: Sample, seconds: float) -> float:
    """Return the number of runs of the float model for which there is time."""
    began = time.process_time()
    job.opened.runner(1)(sample.feed)
    return runs_within(job, sample.feed, seconds, max(time.process_time() - began, TICK))


def _comparable_models(model: ir.Model, accuracy: Accuracy) -> Iterator[ir.Model]:
    """Yield the float model with outputs that can be compared: with logits in place of probabilities, then as they are.

    A part that no logit depends on is judged by the second model.

    Args:
        model: The simplified float model.
        accuracy: As for `measure_tensors`.
    """
    compared = accuracy.sqnr_db
    sources = compared_readers(model, compared)
    logits = {name: each for name, each in logits_of(model).items() if name in compared or each[-1] in compared}
    incomparable = [
        str(each.name) for each in model.graph.outputs if each.name not in compared and each.name not in logits
    ]
    given = with_choices(model, model, given_choices(model, compared))
    for replacements in (logits, {}) if logits else ({},):
        shown = {label: (name, index, label) for name, index, label in (*sources, *replacements.values())}.values()
        judged = with_tensors_as_outputs(given, shown, {*incomparable, *replacements}) if shown else given
        if shown:
            RemoveUnusedNodesPass()(judged)
        yield judged
