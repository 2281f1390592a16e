"""Which convolutions of a job are joined into one, and what that asks of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...transforms.int8_weights import Adjustment
from ...transforms.joined_convs import Sum, common_scales, find_sums
from ...transforms.plan import Plan
from ...transforms.qparams import QParams
from ..job import Job


def sums_of(job: Job, plan: Plan) -> tuple[Sum, ...]:
    """Return the sums of two convolutions in a plan that one convolution computes.

    A target that adds in 16 bits has none: other products would be neighbours. Nor is one whose operands have ranges
    of the user's, which a sum without rounding in between would not keep.
    """
    if not job.no_saturation or job.scheme.weight != "s8":
        return ()
    return tuple(each for each in find_sums(job.simple, plan) if not job.reserved.intersection(each.results))


def with_common_scales(
    job: Job, plan: Plan, qparams: Mapping[str, QParams], adjusted: Mapping[str, Adjustment]
) -> dict[str, Adjustment]:
    """Return adjustments with which the weights of convolutions that are joined have scales in common.

    Args:
        job: The job.
        plan: What of it becomes int8.
        qparams: Scale and zero point by tensor.
        adjusted: What else is adjusted, by unit.
    """
    scales = common_scales(job.simple, plan, sums_of(job, plan), qparams, job.scheme)
    least = {name: replace(adjusted.get(name, Adjustment()), least=scale) for name, scale in scales.items()}
    return {**adjusted, **least}
