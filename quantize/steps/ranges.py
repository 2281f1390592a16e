"""Find the range of each tensor: observed on data, read from a range file or a log, or set by the user."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ...calibration.checks import denormals, normalisation
from ...calibration.checks.denormals import denormal_shares
from ...calibration.checks.findings import Finding, explain_broken, findings, growth, probe
from ...calibration.model.identity import tensor_digests
from ...calibration.model.session import Array
from ...calibration.range_files.log import Log
from ...calibration.range_files.range_file import Data, RangeFile
from ...calibration.rules.ranges import Range
from ...calibration.runs.runner import observe
from ...calibration.statistics.observations import Observations, Place
from ...calibration.statistics.sums import Channels
from ...transforms.graphs.queries import nodes_by_name
from ...transforms.int8.bias_correction import mean_axis
from ...transforms.int8.ops import OPS
from ...transforms.int8.plan import Plan
from ..corrections.activation_ranges import ranges_by_results
from ..job import Job
from ..model.no_evidence import no_evidence
from ..model.shapes import of_shapes_alone
from ..options.given_ranges import precision_of
from ..runtime.progress import CALIBRATE, CHECK, CHOOSE, OBSERVE_MEANS

GROWTH = ("growing", "few")
"""Kinds of findings about the growth of ranges."""
OF_ALL = (*GROWTH, "duplicates")
"""Kinds of findings that need all samples: a shard may have few samples, or copies, but the whole data may not."""


@dataclass(frozen=True, slots=True)
class TensorRanges:
    """The ranges and statistics of the tensors of a plan.

    Attributes:
        ranges: The range of each tensor that has one.
        without: By tensor without a range, the reason.
        means: Channel means for the correction of biases.
        overridden: Tensors with a range that the user sets.
        findings: Warnings and notes about the observed data.
        seen: The observed statistics, or the statistics of the range file.
        by_results: Tensors with a range that the results of the function that reads them have changed.
    """

    ranges: Mapping[str, Range] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    means: Mapping[str, Array] = field(default_factory=dict)
    overridden: frozenset[str] = frozenset()
    findings: tuple[Finding, ...] = ()
    seen: Observations = field(default_factory=Observations)
    by_results: frozenset[str] = frozenset()


def observe_plan(job: Job, *, for_file: bool = False) -> RangeFile:
    """Observe the tensors that any plan may need, and choose ranges with the rule and the overrides of the user.

    Args:
        job: The model, its calibration data and the rule.
        for_file: Whether the result is for a range file, which names the model and its tensors.

    Raises:
        RequantError: The data do not fit the model.
    """
    rule, source = job.supply.rule, job.source
    execution = replace(job.options.execution, strict=False)  # tensors with NaN stay float
    if rule is None or source is None:
        raise AssertionError("where ranges are observed there are data and a rule")
    job.progress(CALIBRATE, 0, None)  # the first sample waits for the sessions
    histogram = rule.needs_histogram or job.supply.overrides.needs_histogram
    seen = observe(
        job.float_source,
        job.all_int8_plan.quantized,  # with tensors that share a scale now: a later plan may split the group
        source,
        histogram=histogram,
        channel_axis=channels_of(job),
        execution=execution,
        progress=partial(job.progress, CALIBRATE),
    )
    job.progress(CHOOSE, 0, None)
    file = RangeFile.of(
        seen,
        rule,
        model=job.identity if for_file else "",
        data=Data(
            source.description,
            execution.batch,
            () if execution.shard == (1, 1) else (execution.shard,),
            execution.histogram_values if histogram else None,
        ),
        digests=tensor_digests(job.simple, job.all_int8_plan.quantized) if for_file else {},
        precision=precision_of(job.scheme),
    )
    return file.overridden(job.supply.overrides)


def inspect_data(job: Job, seen: Observations, causes: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return the probable mistakes in the observed data and in the model.

    Tensors whose values the graph alone decides, or that nothing uses, say nothing about the data. At most
    `normalisation.SAMPLES` samples are read again. An error in a check only removes its findings: it does not end the
    run.

    Args:
        job: The job, with data.
        seen: The observed statistics.
        causes: Why tensors are NaN or infinite, from `causes_of`.
    """
    if job.source is None:
        return ()
    job.progress(CHECK, 0, None)
    probed = None
    with suppress(Exception):  # Probe the user's model: simplification folds BatchNormalization.
        probed = probe(job.reference, job.source.samples(normalisation.SAMPLES))
    denormal: Mapping[str, float] = {}
    if not job.weights.large:  # the check opens a session of its own
        with suppress(Exception):
            denormal = denormal_shares(job.float_source, seen.ranges, job.source.samples(denormals.SAMPLES))
    found: tuple[Finding, ...] = ()
    with suppress(Exception):
        names = [spec.name for spec in job.source.inputs]
        found = findings(
            seen.without(no_evidence(job.simple)), probed=probed, inputs=names, causes=causes, denormal=denormal
        )
    return found if job.options.execution.shard == (1, 1) else _of_a_part(found)


def findings_of_plan(job: Job, ranges: TensorRanges, plan: Plan) -> tuple[Finding, ...]:
    """Return the findings about the data; growth counts only of the ranges that a plan uses.

    A plan without static units, such as one of dynamic units, uses none: no more samples would change its model. Where
    the ranges of all tensors do not grow, those of a few that a plan uses are no finding: one sample may widen them.

    Args:
        job: The job that gave the ranges.
        ranges: The ranges.
        plan: The plan of the INT8 model that was judged.
    """
    if not any(each.kind in GROWTH for each in ranges.findings):
        return ranges.findings
    if job.source is None or job.supply.ranges is not None or job.options.execution.shard != (1, 1):
        return ranges.findings
    used = {*plan.observed} - of_shapes_alone(job.simple)
    held = job.held.length if job.held is not None else None
    grown = growth(ranges.seen.without({*ranges.seen.ranges, *ranges.seen.runs} - used), held or 0)
    found = (*(each for each in ranges.findings if each.kind not in GROWTH), *grown)
    return tuple(sorted(found, key=lambda each: each.severity != "warning"))


def inspect_file(file: RangeFile) -> tuple[Finding, ...]:
    """Return the findings about the data of a range file that need no data."""
    found: tuple[Finding, ...] = ()
    with suppress(Exception):
        found = findings(file.seen, inputs=file.seen.moments)
    return _of_a_part(found) if file.data.shards else found


def _of_a_part(found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return the findings that a part of the samples can give."""
    return tuple(finding for finding in found if finding.kind not in OF_ALL)


def causes_of(job: Job, seen: Observations) -> dict[str, str]:
    """Return why observed tensors are NaN or infinite, by tensor, where the cause can be found."""
    causes: dict[str, str] = {}
    if seen.broken and job.source is not None:
        with suppress(Exception):
            causes = explain_broken(job.float_source, job.source, seen)
    return causes


def channels_of(job: Job) -> dict[str, int]:
    """Return the tensors whose channel means correct a bias, with the axis of the channels."""
    plan, nodes = job.all_int8_plan, nodes_by_name(job.simple)
    corrected = [u for u in plan.units if plan.impl(u).reads_u8 and OPS[u.op].bias is not None]
    at_home = [u for u in corrected if nodes[u.nodes[0]].graph is job.simple.graph]
    return {u.inputs[0]: mean_axis(nodes[u.nodes[0]]) for u in at_home}


def find_ranges(job: Job) -> TensorRanges:
    """Return the ranges of all tensors that may become uint8, from the source that the user chose.

    Raises:
        RequantError: The data do not fit the model.
    """
    given, own, planned = job.supply.ranges, job.supply.overrides, job.all_int8_plan.quantized
    if not job.static or not planned:
        return TensorRanges()
    without = dict.fromkeys(planned, f"has no range in {job.supply.source}")
    causes: Mapping[str, str] = {}
    told: tuple[Finding, ...] = ()
    if isinstance(given, Log):
        ranges, seen = {**given.ranges, **own.ranges}, Observations()
    else:
        file = observe_plan(job) if given is None else given
        ranges, seen = dict(file.ranges), file.seen
        if given is None:  # a range file may be of other data
            causes = causes_of(job, seen)
            told = inspect_data(job, seen, causes)
        without |= dict.fromkeys(planned if given is None else file.digests, "has no values in the calibration data")
        without |= {name: _broken(place, causes.get(name, "")) for name, place in seen.broken.items()}
    without |= dict.fromkeys(own.floats, f"kept float by {own.source}")
    ranges = {name: span for name, span in ranges.items() if name not in own.floats}
    channels = {**_channels(job, ranges.keys() - seen.channels.keys()), **seen.channels}
    better: Mapping[str, Range] = {}
    if "results" in job.corrections and not isinstance(given, Log) and file.rule.name == "auto":
        job.progress(CHOOSE, 0, None)  # now by the results of functions
        chosen = {name: span for name, span in ranges.items() if name not in own.ranges}
        better = ranges_by_results(job, seen.ranges, chosen)
    changed = frozenset(name for name, span in better.items() if span != ranges[name])
    ranges |= better
    return TensorRanges(
        ranges,
        {name: without[name] for name in planned if name not in ranges},
        {name: channel.mean for name, channel in channels.items()},
        frozenset(own.ranges),
        told,
        seen,
        changed,
    )


def _broken(place: Place, cause: str) -> str:
    """Return which sample made a tensor NaN or infinite, with the cause where it is known."""
    return f"holds NaN or infinity: {place.where}{', ' if cause else ''}{cause}"


def _channels(job: Job, tensors: AbstractSet[str]) -> Mapping[str, Channels]:
    """Observe channel means that a range file does not have, where there are data."""
    wanted = {name: axis for name, axis in channels_of(job).items() if name in tensors}
    if not wanted or job.supply.ranges is None or not job.judged or job.source is None:
        return {}
    seen = observe(
        job.float_source,
        (),
        job.source,
        histogram=False,
        channel_axis=wanted,
        execution=replace(job.options.execution, strict=False),
        progress=partial(job.progress, OBSERVE_MEANS),
    )
    return seen.channels
