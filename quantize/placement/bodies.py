"""Place models with integers in the bodies of control flow: units have no measured costs there, so models are timed."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ...transforms.graphs.queries import computing_graphs
from ...transforms.int8.ops import MOVES
from ...transforms.int8.plan import Choice, Impl, Plan
from ..job import Candidate, Job, Placement
from ..runtime.progress import COMPARE_PLACEMENTS
from .batches import BY_RULES, fairest
from .racing import Size, least_milliseconds, on_agreeing_samples, runners_of
from .reasons import SLOWER_IN_BODY

FLOAT_BODIES = "float in bodies"
"""The name of the plan by rules with every unit of a body in float."""
SECONDS = 1.0
"""How long the models are timed at least."""


def integers_in_bodies(job: Job) -> bool:
    """Return whether units in the bodies of control flow may compute in integers.

    The costs of such units are not known. Units that only move values do not count: PyTorch writes a squeeze as an If.
    """
    inside, plan = _names_in_bodies(job.simple), job.all_int8_plan
    units = (unit for unit in plan.units if unit.op not in MOVES and plan.impl(unit) is not Impl.FLOAT)
    return any(not inside.isdisjoint(unit.nodes) for unit in units)


def with_float_bodies(model: ir.Model, plan: Plan) -> Plan:
    """Return a plan for a model with every unit of a body in float."""
    inside = _names_in_bodies(model)
    changed = [unit.name for unit in plan.units if plan.impl(unit).int8 and not inside.isdisjoint(unit.nodes)]
    return plan.with_choices(dict.fromkeys(changed, Choice(Impl.FLOAT, SLOWER_IN_BODY)))


def faster_with_bodies(sizes: Sequence[Size], plan: Plan, why: str) -> tuple[Candidate, Placement]:
    """Return the faster of two models: of a plan by rules, and of the same plan with the bodies in float.

    A loop runs the conversions of its body in each step, so that integers may cost there more than they gain.

    Args:
        sizes: The batch sizes at which they are timed.
        plan: The plan by rules.
        why: Why rules decide.
    """
    bench = sizes[0].bench
    in_float = with_float_bodies(bench.job.simple, plan)
    if not in_float.has_int8:
        return bench.candidate(plan), Placement("rules", why=why)
    candidates = {BY_RULES: bench.candidate(plan), FLOAT_BODIES: bench.candidate(in_float)}
    bench.job.progress(COMPARE_PLACEMENTS, 0, None)
    runners = runners_of(sizes, candidates)
    if not runners:
        return candidates[BY_RULES], Placement("rules", why=why)
    timed = on_agreeing_samples(sizes, runners)
    times, unsure = least_milliseconds(timed, runners, max(SECONDS, bench.job.options.seconds))
    best = fairest(times)
    return candidates[best], Placement("rules", tried=times[0], uncertainty=unsure, chosen=best, why=why)


def _names_in_bodies(model: ir.Model) -> set[str | None]:
    """Return the names of the nodes in the bodies of control flow."""
    return {node.name for graph in computing_graphs(model)[1:] for node in graph}
