"""Place by the clock: costs from profiles, the cheapest assignment, and the fastest of what came of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from ... import RequantError
from ...calibration.session import Array, ModelSource
from ...transforms.ops import OPS
from ...transforms.plan import Choice, Impl, Plan, Unit
from ...transforms.reasons import other
from ..job import Candidate, Job, Placement
from ..model.shapes import fed_shapes
from ..options.efforts import EFFORTS
from ..runtime.attribution import Owners, Spent
from ..runtime.machine import Machine
from ..runtime.profile import KernelRun, profiled
from ..runtime.session import Runner
from ..runtime.timing import interleave
from . import costs as store
from .costs import Costs
from .estimates import IMAGE, conversion, estimate
from .layouts import Turned, turned_by
from .min_cut import Item, Problem, cheapest
from .noise import noise
from .rules import Facts, able

PROFILED = 3e5  # microseconds of one profile, between so many runs:
LEAST_TIMES, MOST_TIMES = 3, 30
TURNS = 2  # profiles of each model, one after the other
ROUNDS = 4  # plans that are measured and improved upon
LEAST_MS = 0.5  # of a faster model the clock tells too little
CLEAR = 0.99  # what another plan must take of the time of the plan by rules
SHARE = 1.0  # of the seconds for the latency, to compare the plans in
MOST = 3.0  # how far conversions may be from their estimate
STRETCHES = (1.0, 2.0, 0.5)  # times the price of conversions, as long as that gives plans that were tried
SPOILT = 0.01  # of a model's time that a unit takes at least for that to matter
SLOWER = 2.0  # times its cost that a unit takes where its neighbours spoil its layout

Write: TypeAlias = Callable[[Plan], Candidate]


@dataclass(slots=True)
class Search:
    """What is known of the units of a model while their placement is looked for.

    Attributes:
        job: The job.
        facts: What the rules look at.
        rules: The plan by rules.
        options: The implementations between which a measurement may decide, by unit.
        write: Emits a plan.
        feed: What models are timed on.
        costs: What units take.
        sizes: Elements by tensor.
        noise: What each unit in integers adds to the noise at the outputs; empty where it is estimated from weights.
        weight: Microseconds that a unit of noise is worth.
        stretch: By how much conversions take longer than estimated.
        times: Runs of each profile.
        owners: Which unit a kernel belongs to.
        absorbed: Units that have no kernel of their own in float: the runtime makes them a part of the one before.
        spoilt: What units took in a plan where that was far more than their cost: behind a float neighbour a
            uint8 MaxPool runs in NCHW, in 40 times the time that it has between integer convolutions.
        turned: What the blocked layout of float convolutions costs.
    """

    job: Job
    facts: Facts
    rules: Plan
    options: Mapping[str, tuple[Impl, ...]]
    write: Write
    feed: Mapping[str, Array]
    costs: Costs
    sizes: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    weight: float = 0.0
    stretch: float = 1.0
    times: int = 3
    absorbed: set[str] = field(default_factory=set)
    spoilt: dict[tuple[str, Impl], float] = field(default_factory=dict)
    turned: Turned = field(default_factory=Turned)
    owners: Owners = field(init=False)

    def __post_init__(self) -> None:
        """Learn which unit a kernel belongs to."""
        self.owners = Owners(self.job.simple, self.rules.units)


def everything(facts: Facts, plan: Plan) -> Plan:
    """Return a plan with every unit in integers that can be."""
    options = able(facts, plan)
    widest = {
        name: Choice(Impl.U8 if Impl.U8 in forms else Impl.U8_FLOAT)
        for name, forms in options.items()
        if len(forms) > 1 and plan.choices[name].impl is not Impl.U8
    }
    return plan.with_choices(widest)


def place(
    job: Job,
    facts: Facts,
    rules: Plan,
    write: Write,
    feed: Mapping[str, Array] | None,
    noise: Mapping[str, float] | None = None,
) -> tuple[Candidate, Placement]:
    """Find the placement that the options ask for and emit it.

    Args:
        job: The job.
        facts: What the rules look at.
        rules: The plan by rules.
        write: Emits a plan.
        feed: What models are timed on; None where there is nothing.
        noise: What each tensor in uint8 adds to the noise at the outputs, where that is known.

    Raises:
        RequantError: A plan that was given does not fit.
    """
    how = job.policy.how
    if how == "all":
        return write(everything(facts, rules)), Placement("all")
    free = any(len(forms) > 1 for forms in able(facts, rules).values())
    if not free or not _costs_decide(job, facts, feed, how):
        return write(rules), Placement("rules")
    search = _begun(job, facts, rules, write, feed, _known(job, how))
    search.noise = _by_unit(search, noise or {})
    if how == "estimated":
        _weigh(search, _float_time(search), EFFORTS[job.options.effort].exchange)
        plan = _solved(search)
        return write(plan), Placement("estimated", _predicted(search, plan))
    return _measured(search)


def pricing(
    job: Job,
    facts: Facts,
    rules: Plan,
    write: Write,
    feed: Mapping[str, Array] | None,
    noise: Mapping[str, float],
) -> Callable[[float], Plan]:
    """Return what finds the cheapest plan for a price of noise: the share of the float time that all of it is worth.

    Costs are those that `place` takes; what the cache has not yet is measured now, and kept. Where costs do not decide,
    as in models with control flow, or with nothing to weigh, units are left in float, the noisiest first.

    Args:
        job: The job.
        facts: What the rules look at.
        rules: The plan by rules.
        write: Emits a plan.
        feed: What models are timed on; None where there is nothing.
        noise: What each tensor in uint8 adds to the noise at the outputs.
    """
    how = job.policy.how
    if not noise or not _costs_decide(job, facts, feed, how):
        return partial(_without_noisy, everything(facts, rules) if how == "all" else rules, noise)
    search = _begun(job, facts, rules, write, feed, _known(job, how))
    if how == "measured":
        _float_profile(search)
    if how == "measured" and _untimed(search):
        fresh = Costs(search.costs.machine)
        _measure(search, fresh)
        store.keep(fresh)
    search.absorbed = {
        name
        for name, key in search.keys.items()
        if search.costs.of(key, Impl.FLOAT) is None and _u8_cost(search, name) is not None
    }
    search.noise = _by_unit(search, noise)
    return partial(_priced, search, _float_time(search))


def _priced(search: Search, microseconds: float, exchange: float) -> Plan:
    """Return the cheapest plan where all noise is worth a share of some time."""
    _weigh(search, microseconds, exchange)
    return _solved(search)


def _costs_decide(job: Job, facts: Facts, feed: Mapping[str, Array] | None, how: str) -> bool:
    """Whether costs decide: not in models with control flow, and not by a clock with nothing to time."""
    looped = any(node.graph is not job.simple.graph for node in facts.nodes.values())
    timed = feed is not None and not job.weights.large
    return not looped and (how == "estimated" or (how == "measured" and timed))


def _known(job: Job, how: str) -> Costs:
    """Return the costs that are known before anything is measured: those of a file, of the cache, or none."""
    if job.policy.costs is not None:
        return store.read(job.policy.costs)
    machine = Machine.here(job.options.threads)
    return store.load(machine) if how == "measured" else Costs(machine)


def _float_time(search: Search) -> float:
    """Return what all units take in float, in microseconds."""
    return math.fsum(_cost(search, unit, Impl.FLOAT) for unit in search.rules.units)


def _without_noisy(plan: Plan, noise: Mapping[str, float], exchange: float) -> Plan:
    """Return a plan without the units whose tensors have more noise than ``1 / exchange`` times the mean of all."""
    known = [noise[tensor] for tensor in plan.quantized if tensor in noise]
    if not known or exchange <= 0:
        return plan
    limit = math.fsum(known) / len(known) / exchange
    noisy = {tensor for tensor in plan.quantized if noise.get(tensor, 0.0) > limit}
    changed = {
        unit.name: Choice(Impl.FLOAT, other("its tensors carry too much of the noise"))
        for unit in plan.units
        if plan.impl(unit).reads_u8 and noisy.intersection((*unit.inputs, *unit.outputs))
    }
    return _without_idle(plan.with_choices(changed))


def measured_costs(job: Job, facts: Facts, rules: Plan, write: Write, feed: Mapping[str, Array] | None) -> Costs:
    """Return what the units of a model take, measured anew.

    Raises:
        RequantError: There is nothing to run the model on, it does not run, or none of it can become int8.
    """
    fresh = Costs(Machine.here(job.options.threads))
    search = _begun(job, facts, rules, write, feed, fresh)
    if feed is None or not search.keys:
        raise RequantError(f"{job.path}: {'no data to run it on' if feed is None else 'no unit of it can become int8'}")
    _measure(search, fresh)
    if not fresh.rows:
        raise RequantError(f"{job.path}: the runtime does not run it under its profiler")
    return fresh


def _begun(job: Job, facts: Facts, rules: Plan, write: Write, feed: Mapping[str, Array] | None, known: Costs) -> Search:
    """Return a search that knows the shapes of tensors."""
    search = Search(job, facts, rules, able(facts, rules), write, feed or {}, known)
    _learn_shapes(search)
    return search


def _measure(search: Search, fresh: Costs) -> Candidate:
    """Take the costs of all units in float and in integers, in their whole models; return the model of the latter."""
    wide = search.write(everything(search.facts, search.rules))
    whole, all_ = _profiles(search, [search.job.float_source, wide.source])
    _take(search, fresh, whole, dict.fromkeys(search.options, Impl.FLOAT))
    _watch(search, fresh, wide, all_)
    gemms = {name: Choice(Impl.U8_GEMM) for name, forms in search.options.items() if Impl.U8_GEMM in forms}
    if gemms:
        plan = wide.plan.with_choices(gemms)
        spent = _profiles(search, [search.write(plan).source])[0]
        _take(search, fresh, spent, {unit.name: plan.impl(unit) for unit in plan.units})
    return wide


def _learn_shapes(search: Search) -> None:
    """Learn the shapes of tensors, as far as the model and the feed tell, and with them the keys of units."""
    search.shapes.update(fed_shapes(search.job.simple, search.feed))
    search.sizes.update({name: math.prod(shape) for name, shape in search.shapes.items()})
    for unit in search.rules.units:
        if len(search.options[unit.name]) > 1:
            search.keys[unit.name] = store.signature(unit, search.facts.nodes, search.shapes)


def _measured(search: Search) -> tuple[Candidate, Placement]:
    """Profile, cut, look at what came of it, and keep the fastest."""
    job = search.job
    by_rules = search.write(search.rules)
    tell = partial(job.progress, "measure costs")
    whole = _float_profile(search)
    if whole is None or whole.total < 1e3 * LEAST_MS:
        return by_rules, Placement("rules")
    _weigh(search, whole.total, EFFORTS[job.options.effort].exchange)
    fresh = Costs(search.costs.machine)
    steps = 3 + ROUNDS
    tell(1, steps)
    search.absorbed = search.keys.keys() - whole.units.keys()
    known = search.keys.keys() - search.absorbed
    missing = any(search.costs.of(search.keys[name], Impl.FLOAT) is None for name in known)
    candidates = {"rules": by_rules}
    if missing or _untimed(search):
        candidates["all"] = _measure(search, fresh)
    else:
        candidates["all"] = search.write(everything(search.facts, search.rules))
    tell(2, steps)
    for name, tuned in (("all", "all"), ("rules", "rules, tuned")):
        plan = _tuned(search, candidates[name].plan)
        if plan is not None:
            candidates[tuned] = search.write(plan)
    for index in range(ROUNDS):
        plan = _untried(search, candidates)
        if plan is None:
            break
        found = candidates[f"cut {index + 1}"] = search.write(plan)
        _watch(search, fresh, found, _profiles(search, [found.source])[0])
        tell(3 + index, steps)
    store.keep(fresh)
    return _fastest(search, candidates)


def _float_profile(search: Search) -> Spent | None:
    """Profile the float model, None where the runtime does not run it; learn what its blocked layout costs."""
    whole = _profiles(search, [search.job.float_source], turns=1)[0]
    if whole is not None:
        search.turned = turned_by(search.rules.units, search.shapes, whole)
    return whole


def _tuned(search: Search, plan: Plan) -> Plan | None:
    """Return a plan with its integer convolutions in the faster of their kernels; None where that is the same plan."""
    gemms = {}
    for unit in plan.units:
        cost = _gemm_cost(search, unit.name) if Impl.U8_GEMM in search.options[unit.name] else None
        if plan.impl(unit) is Impl.U8 and cost is not None and cost < _cost(search, unit, Impl.U8):
            gemms[unit.name] = Choice(Impl.U8_GEMM)
    return plan.with_choices(gemms) if gemms else None


def _untried(search: Search, candidates: Mapping[str, Candidate]) -> Plan | None:
    """Return the cheapest plan; where that was tried, the one for dearer or for cheaper conversions; None without any.

    What a conversion takes is the least certain of the costs. Plans all in float are for the whole models to tell.
    """
    for factor in STRETCHES:
        plan = _solved(search, factor)
        tried = any(_impls(other.plan) == _impls(plan) for other in candidates.values())
        if not tried and any(impl.int8 for impl in _impls(plan)):
            return plan
    return None


def _impls(plan: Plan) -> list[Impl]:
    """Return what the units of a plan become."""
    return [plan.impl(unit) for unit in plan.units]


def _fastest(search: Search, candidates: Mapping[str, Candidate]) -> tuple[Candidate, Placement]:
    """Time candidates in turns and return the fastest, with what its kernels take."""
    job = search.job
    runners = {}
    for name, candidate in candidates.items():
        try:
            runner = Runner(candidate.source, threads=job.options.threads)
            runner(search.feed)
        except RequantError:  # what the runtime does not run is no candidate
            continue
        runners[name] = partial(runner, search.feed)
    if not runners:
        return candidates["rules"], Placement("rules")
    job.progress("compare placements", 0, None)
    seconds = max(1.0, job.options.seconds * SHARE)
    times = dict(zip(runners, interleave(list(runners.values()), seconds=seconds), strict=True))
    tried = {name: 1e3 * min(each) for name, each in times.items()}
    worth = {name: each + search.weight * _noise(search, candidates[name].plan) / 1e3 for name, each in tried.items()}
    best = min(worth, key=worth.__getitem__)
    if "rules" in tried and worth[best] > CLEAR * worth["rules"]:
        best = "rules"
    spent = _profiles(search, [candidates[best].source])[0]
    predicted = spent.total / 1e3 if spent is not None else None
    return candidates[best], Placement("measured", predicted, tried)


def _profiles(search: Search, sources: Sequence[ModelSource], turns: int = TURNS) -> list[Spent | None]:
    """Return where the time of models goes, profiled in turns; None for one that the runtime does not run."""
    runs: list[list[tuple[KernelRun, ...]]] = [[] for _ in sources]
    for _ in range(turns):
        for index, source in enumerate(sources):
            # the runtime's exceptions share no base class; another plan may run
            with suppress(Exception):
                found = profiled(source, search.feed, threads=search.job.options.threads, times=search.times)
                runs[index].append(found.runs)
                search.times = min(max(int(PROFILED / found.microseconds), LEAST_TIMES), MOST_TIMES)
    return [search.owners.spent(_least(each)) if each else None for each in runs]


def _least(profiles: Sequence[tuple[KernelRun, ...]]) -> list[KernelRun]:
    """Return the kernels of several profiles of one model, each with its least time."""
    by_name: dict[str, KernelRun] = {}
    for run in (run for profile in profiles for run in profile):
        before = by_name.get(run.node, run)
        by_name[run.node] = run if run.microseconds < before.microseconds else before
    return list(by_name.values())


def _watch(search: Search, fresh: Costs, candidate: Candidate, spent: Spent | None) -> None:
    """Take the costs of a candidate's units, and how long its conversions take."""
    if spent is None:
        return
    plan = candidate.plan
    _take(search, fresh, spent, {unit.name: plan.impl(unit) for unit in plan.units})
    for unit in plan.units:
        took, impl = spent.units.get(unit.name, 0.0), plan.impl(unit)
        if took > max(SLOWER * _cost(search, unit, impl), SPOILT * spent.total):
            search.spoilt[unit.name, impl] = took
    expected = math.fsum(_conversions(search, plan))
    if expected > 0:
        turned = math.fsum(search.turned.of(unit) for unit in plan.units if not plan.impl(unit).int8)
        actual = spent.conversions + max(spent.layouts - turned, 0.0)
        search.stretch = min(max(actual / expected, 1 / MOST), MOST)


def _take(search: Search, fresh: Costs, spent: Spent | None, impls: Mapping[str, Impl]) -> None:
    """Take the costs that a profile shows, and the sizes of tensors."""
    if spent is None:
        return
    for unit in search.rules.units:
        if unit.name in spent.sizes and unit.outputs:
            search.sizes.setdefault(unit.outputs[0], spent.sizes[unit.name])
        if unit.name in spent.units and unit.name in search.keys:
            for costs in (search.costs, fresh):
                costs.put(search.keys[unit.name], impls[unit.name], spent.units[unit.name])


def _untimed(search: Search) -> bool:
    """Whether there is a unit whose time in integers, or as a matrix product of integers, is not known."""
    return any(
        _u8_cost(search, name) is None or (Impl.U8_GEMM in search.options[name] and _gemm_cost(search, name) is None)
        for name in search.keys
    )


def _gemm_cost(search: Search, name: str) -> float | None:
    """Return what a convolution takes as a matrix product of integers, None where that was not measured."""
    return search.costs.of(search.keys[name], Impl.U8_GEMM) if name in search.keys else None


def _u8_cost(search: Search, name: str) -> float | None:
    """Return what a unit takes in integers, as far as it was measured."""
    found = [search.costs.of(search.keys[name], impl) for impl in search.options[name] if impl.reads_u8]
    return next((cost for cost in found if cost is not None), None)


def _cost(search: Search, unit: Unit, impl: Impl) -> float:
    """Return what a unit takes: as measured, else as the other integer form does, else about."""
    if impl is Impl.FLOAT and unit.name in search.absorbed:
        return 0.0
    layout = search.turned.of(unit) if impl is Impl.FLOAT else 0.0
    return layout + _kernel_cost(search, unit, impl)


def _kernel_cost(search: Search, unit: Unit, impl: Impl) -> float:
    """Return what the kernel of a unit takes."""
    if (unit.name, impl) in search.spoilt:
        return search.spoilt[unit.name, impl]
    measured = search.costs.of(search.keys[unit.name], impl) if unit.name in search.keys else None
    if measured is None and impl.reads_u8 and unit.name in search.keys:
        measured = _u8_cost(search, unit.name)
    return estimate(unit, search.facts.nodes, search.sizes, impl) if measured is None else measured


def _solved(search: Search, factor: float = 1.0) -> Plan:
    """Return the cheapest plan by the costs known so far, if conversions took `factor` times what they seem to."""
    items = []
    for unit in search.rules.units:
        forms = search.options[unit.name]
        if len(forms) == 1:  # its own cost is none of the choices
            items.append(Item(unit.name, unit.inputs, unit.outputs, {forms[0]: 0.0}))
            continue
        extra = search.weight * _noise_of(search, unit) if search.weight else 0.0
        known = [impl for impl in forms if impl is not Impl.U8_GEMM or _gemm_cost(search, unit.name) is not None]
        costs = {impl: _cost(search, unit, impl) + (extra if impl.reads_u8 else 0.0) for impl in known}
        items.append(Item(unit.name, unit.inputs, unit.outputs, costs))
    tensors = {tensor for unit in search.rules.units for tensor in (*unit.inputs, *unit.outputs)}
    stretch = factor * search.stretch
    prices = {tensor: stretch * _quantizing(search, tensor) for tensor in tensors}
    back = {tensor: stretch * _dequantizing(search, tensor) for tensor in tensors}
    for unit in search.rules.units:  # behind an integer kernel, what float absorbs is a kernel of its own
        if unit.name in search.absorbed:
            back[unit.inputs[0]] += estimate(unit, search.facts.nodes, search.sizes, Impl.FLOAT)
    shown = frozenset(str(value.name) for value in search.job.simple.graph.outputs) & tensors
    chosen = cheapest(Problem(items, prices, back, shown))
    changed = {unit.name: _choice(search, unit, chosen[unit.name]) for unit in search.rules.units}
    return _without_idle(search.rules.with_choices({n: c for n, c in changed.items() if len(search.options[n]) > 1}))


def _by_unit(search: Search, noise: Mapping[str, float]) -> dict[str, float]:
    """Return what each unit that may be int8 adds to the noise: that of what it reads, shared with the others."""
    readers = Counter(t for u in search.rules.units if len(search.options[u.name]) > 1 for t in {*u.inputs})
    return {
        u.name: math.fsum(noise.get(t, 0.0) / readers[t] for t in {*u.inputs})
        for u in search.rules.units
        if noise and len(search.options[u.name]) > 1
    }


def _weigh(search: Search, microseconds: float, exchange: float) -> None:
    """Set what noise is worth: what the options say, or with measured noise, all of it a share of some time."""
    total = math.fsum(search.noise.values())
    search.weight = search.job.options.noise_weight or (exchange * microseconds / total if total > 0 else 0.0)


def _noise_of(search: Search, unit: Unit) -> float:
    """Return what a unit in integers adds to the noise, as measured or about."""
    return search.noise.get(unit.name, 0.0) if search.noise else noise(unit, search.facts.nodes)


def _noise(search: Search, plan: Plan) -> float:
    """Return the noise of a plan."""
    units = (u for u in plan.units if plan.impl(u).reads_u8 and len(search.options[u.name]) > 1)
    return math.fsum(_noise_of(search, unit) for unit in units) if search.weight else 0.0


def _choice(search: Search, unit: Unit, impl: Impl) -> Choice:
    """Return a choice with its reason."""
    before = search.rules.choices[unit.name]
    if impl.int8 or len(search.options[unit.name]) == 1:
        return Choice(impl) if impl.int8 else before
    slow, fast = (_cost(search, unit, form) for form in search.options[unit.name][:2])
    if slow <= fast:
        return Choice(Impl.FLOAT, other(f"float takes {slow:.0f} us here, int8 {fast:.0f} us"))
    if search.weight and search.weight * _noise_of(search, unit) > slow - fast:
        return Choice(Impl.FLOAT, other(f"int8 saves {slow - fast:.0f} us here, less than its noise is worth"))
    return Choice(Impl.FLOAT, other(f"int8 saves {slow - fast:.0f} us here, less than its conversions take"))


def _without_idle(plan: Plan) -> Plan:
    """Leave float what only moves uint8 that nothing computes on."""
    busy = any(OPS[u.op].kind == "compute" and plan.impl(u).reads_u8 for u in plan.units if u.op in OPS)
    if busy:
        return plan
    idle = {
        u.name: Choice(Impl.FLOAT, other("nothing computes in integers")) for u in plan.units if plan.impl(u).reads_u8
    }
    return plan.with_choices(idle)


def _conversion(search: Search, tensor: str) -> float:
    """Return what a QuantizeLinear or a DequantizeLinear of a tensor takes, about."""
    shape = search.shapes.get(tensor, ())
    image = len(shape) == IMAGE and math.prod(shape[2:]) > 1
    return conversion(search.sizes.get(tensor, 0), IMAGE if image else 0)


def _quantizing(search: Search, tensor: str) -> float:
    """Return what a QuantizeLinear takes, without a change of layout that counts as a part of its producer."""
    return max(_conversion(search, tensor) - search.turned.output.get(tensor, 0.0), 0.0)


def _dequantizing(search: Search, tensor: str) -> float:
    """Return what a DequantizeLinear takes, without a change of layout that counts as a part of its reader."""
    return max(_conversion(search, tensor) - search.turned.input.get(tensor, 0.0), 0.0)


def _conversions(search: Search, plan: Plan) -> Iterable[float]:
    """Return what the conversions of a plan take, about."""
    read_float = {t for u in plan.units if not plan.impl(u).reads_u8 for t in u.inputs}
    read_float |= {str(value.name) for value in search.job.simple.graph.outputs}
    yield from (_dequantizing(search, tensor) for tensor in plan.produced_u8 & read_float)
    yield from (_quantizing(search, tensor) for tensor in plan.read_u8 - plan.produced_u8)


def _predicted(search: Search, plan: Plan) -> float:
    """Return the sum of the costs of a plan, in milliseconds."""
    units = (_cost(search, unit, plan.impl(unit)) for unit in plan.units)
    return math.fsum((*units, *_conversions(search, plan))) / 1e3
