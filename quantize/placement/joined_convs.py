"""Find the convolutions of a job that are joined into one, and give their weights common scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...transforms.int8.joined_convs import Sum, common_scales, find_sums
from ...transforms.int8.plan import Plan
from ...transforms.int8.qparams import QParams
from ...transforms.int8.weights import Adjustment
from ..job import Job


def sums_of(job: Job, plan: Plan) -> tuple[Sum, ...]:
    """Return the sums of two convolutions in a plan that one convolution computes.

    There are none for a target that adds in 16 bits, because other products would be added in pairs. A sum is left out
    if the user gives the range of an operand: one convolution does not round the operands.
    """
    if not job.no_saturation or job.scheme.weight != "s8":
        return ()
    return tuple(each for each in find_sums(job.simple, plan) if not job.reserved.intersection(each.results))


def with_common_scales(
    job: Job, plan: Plan, qparams: Mapping[str, QParams], adjusted: Mapping[str, Adjustment]
) -> dict[str, Adjustment]:
    """Return adjustments that give the weights of joined convolutions common scales.

    Args:
        job: The job.
        plan: The plan.
        qparams: Scale and zero point by tensor.
        adjusted: The other adjustments, by unit.
    """
    scales = common_scales(job.simple, plan, sums_of(job, plan), qparams, job.scheme)
    least = {name: replace(adjusted.get(name, Adjustment()), least=scale) for name, scale in scales.items()}
    return {**adjusted, **least}
