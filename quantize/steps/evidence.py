"""What each tensor alone does to the outputs, measured before the plan is decided."""

from __future__ import annotations

import math
from functools import partial
from itertools import islice

from ... import RequantError
from ..accuracy.outputs import Accuracy
from ..accuracy.selected_outputs import selected_from, showing
from ..job import Candidate, Evidence, Job
from ..options.efforts import EFFORTS
from ..placement.rules import all_int8_plan
from ..sensitivity.each_tensor import alone, ruinous, runs_for
from .emit import plan_by_rules
from .judge import measure_accuracy
from .ranges import TensorRanges

EVIDENCE = 4  # samples for each tensor tried alone


FINE_DB = 45.0  # a model with less noise than this is as good as float: none of its tensors is worth a look


def gather_evidence(job: Job, ranges: TensorRanges) -> Evidence:
    """Find out what each tensor alone does to the outputs, before it is decided what is int8.

    With little effort, or a plan of the user's, only a model that comes out ruined is looked into (`_mended`).
    """
    effort = EFFORTS[job.options.effort]
    if not effort.seconds or job.policy.plan is not None or not job.judged or job.weights.large:
        return Evidence()
    facts, rules, write = plan_by_rules(job, ranges, Evidence())
    try:
        candidate = write(rules if job.policy.how == "rules" else all_int8_plan(facts, rules))
        accuracy = measure_accuracy(job, candidate)
    except RequantError:  # of the plan that is chosen it will be said
        return Evidence()
    if accuracy.worst_sqnr_db >= FINE_DB or not candidate.qparams:
        return Evidence()
    found = each_alone(job, candidate, accuracy, effort.seconds)
    return Evidence(ruinous(found, effort.least_db), {name: 10 ** (-value / 10) for name, value in found.items()})


def each_alone(job: Job, candidate: Candidate, accuracy: Accuracy, seconds: float = math.inf) -> dict[str, float]:
    """Return the SQNR that each tensor of a candidate alone leaves at the outputs, in dB."""
    if job.source is None:
        return {}
    samples = list(islice(iter(job.source.samples(EVIDENCE)), EVIDENCE))
    values = {value.name for value in (*job.simple.graph.inputs, *(o for n in job.simple.graph for o in n.outputs))}
    outside = {name: params for name, params in candidate.qparams.items() if name in values}
    compared = accuracy.sqnr_db
    sources = [source for source in selected_from(job.simple) if source[-1] in compared]
    unlike = [str(output.name) for output in job.simple.graph.outputs if output.name not in compared]
    judged = showing(job.simple, sources, unlike) if sources else job.simple
    told = partial(job.progress, "try tensors alone")
    runs = runs_for(job, samples[0].feed, seconds) if samples else 0
    return alone(judged, outside, samples, optimize=not job.model_qparams, runs=runs, progress=told)
