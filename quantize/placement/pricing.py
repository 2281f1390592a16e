"""The costs of units, conversions and noise, in microseconds: measured, else estimated."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...calibration.model.session import Array
from ...transforms.int8.plan import Impl, Plan, Unit
from ..job import Job
from ..model.shapes import Shape
from ..options.efforts import EFFORTS
from .absorbers import absorbers_of
from .costs import Costs, signature
from .estimates import IMAGE, conversion, estimate
from .facts import Facts
from .followers import followers_of
from .forms import possible_forms
from .layouts import LayoutCosts
from .noise import Noises, noise
from .runs import shapes_for

OTHER_FORMS = (Impl.U8_GEMM, Impl.U8_NATIVE, Impl.DYNAMIC, Impl.DYNAMIC_NATIVE, Impl.BLOCK, Impl.BLOCK_NATIVE)
"""Forms that a unit has only where they are measured to be faster than its other forms."""


@dataclass(frozen=True, slots=True)
class Space:
    """The units of a model, and the implementations of each among which costs decide.

    Attributes:
        facts: The input of the rules.
        rules: The plan by rules.
        forms: The possible implementations by unit; the rules decide a unit with one.
        shapes: Shapes by tensor, as far as the model and the feed determine them.
        keys: The signature of each unit with several implementations.
        outputs: The outputs of the model.
        absorbers: The convolution that may absorb each function or sum; see `absorbers_of`.
        followers: The product behind which each follower runs, where the runtime has one kernel for both; see
            `followers_of`. The cost of the product includes the follower.
    """

    facts: Facts
    rules: Plan
    forms: Mapping[str, tuple[Impl, ...]]
    shapes: Mapping[str, Shape]
    keys: Mapping[str, str]
    outputs: frozenset[str]
    absorbers: Mapping[str, Unit] = field(default_factory=dict)
    followers: Mapping[str, Unit] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, facts: Facts, rules: Plan, feed: Mapping[str, Array] | None) -> Space:
        """Return the space of a job; without a feed, shapes come from the model alone."""
        forms, shapes = possible_forms(facts, rules), shapes_for(job, feed or {})
        followers = followers_of(rules.units, forms, shapes) if job.runtime.fuses else {}
        behind: dict[str, list[str]] = defaultdict(list)
        for unit in rules.units:
            if unit.name in followers:
                behind[followers[unit.name].name] += unit.nodes
        free = (unit for unit in rules.units if len(forms[unit.name]) > 1)
        keys = {unit.name: signature(unit, facts.nodes, shapes, behind[unit.name]) for unit in free}
        outputs = frozenset(str(v.name) for v in job.simple.graph.outputs)
        return cls(facts, rules, forms, shapes, keys, outputs, absorbers_of(facts, rules, forms), followers)


@dataclass(frozen=True, slots=True)
class Prices:
    """All values that decide the cost of a plan.

    Attributes:
        space: The units.
        costs: Measured costs.
        sizes: Elements by tensor.
        noises: The noise at the outputs that tensors in uint8 add; without any it is estimated from the weights.
        noise_price: Microseconds per unit of noise.
        stretch: Measured over estimated time of conversions.
        absorbed: Units without a kernel of their own in float: the runtime fuses each into the unit before.
        slowed: Measured time of units, in microseconds, where it was far above their cost. A uint8 MaxPool behind a
            float unit runs in NCHW, and takes 40 times as long as between integer convolutions.
        layouts: The changes of layout around float convolutions.
    """

    space: Space
    costs: Costs
    sizes: Mapping[str, int]
    noises: Noises = field(default_factory=Noises)
    noise_price: float = 0.0
    stretch: float = 1.0
    absorbed: frozenset[str] = frozenset()
    slowed: Mapping[tuple[str, Impl], float] = field(default_factory=dict)
    layouts: LayoutCosts = field(default_factory=LayoutCosts)

    @classmethod
    def of(cls, space: Space, costs: Costs, noise: Mapping[str, float]) -> Prices:
        """Return the prices before anything is measured.

        Args:
            space: The units.
            costs: The costs of earlier measurements.
            noise: The noise at the outputs that each uint8 tensor adds, as far as known.
        """
        sizes = {name: math.prod(shape) for name, shape in space.shapes.items()}
        forms = {form: known for form, known in space.facts.noise_of.items() if known}
        noises = Noises.of(space.rules, noise, forms, space.absorbers, space.facts.noise_of_weights)
        return cls(space, costs, sizes, noises)


def usual_share(job: Job, noise: float) -> float:
    """Return the price of a noise as a share of the float model's time. `Effort.exchange` says what noise costs."""
    return EFFORTS[job.options.effort].exchange * math.sqrt(min(noise, 1.0))  # a power; the exchange is of amplitudes


def with_noise_price(prices: Prices, job: Job, microseconds: float, share: float | None = None) -> Prices:
    """Return prices with a price of noise: by the options, else the price at which all noise costs a share of a time.

    Args:
        prices: The prices.
        job: The job.
        microseconds: The time.
        share: The share of this time that all noise together costs; None for the exchange of the effort, see `Effort`.
    """
    total = prices.noises.total
    share = usual_share(job, total) if share is None else share
    price = job.options.noise_weight or (share * microseconds / total if total > 0 else 0.0)
    return replace(prices, noise_price=price)


# ---------------------------------------------------------------------------------------------------------- units


def measured_int8(prices: Prices, name: str) -> float | None:
    """Return the measured cost of a unit in integers; None without one."""
    known = (measured(prices, name, impl) for impl in prices.space.forms[name] if impl.reads_u8)
    return next((cost for cost in known if cost is not None), None)


def measured(prices: Prices, name: str, impl: Impl) -> float | None:
    """Return the measured cost of an implementation of a unit; None without one."""
    key = prices.space.keys.get(name)
    return None if key is None else prices.costs.of(key, impl)


def has_unmeasured(prices: Prices) -> bool:
    """Return whether the cost of any unit in integers, or in one of its other integer forms, is not measured."""
    forms = prices.space.forms
    return any(
        (measured_int8(prices, name) is None and any(impl.reads_u8 for impl in forms[name]))
        or any(impl in forms[name] and measured(prices, name, impl) is None for impl in OTHER_FORMS)
        for name in prices.space.keys
    )


def lacks_float(prices: Prices, name: str) -> bool:
    """Return whether the cost of a unit in float is not measured."""
    return measured(prices, name, Impl.FLOAT) is None


def with_absorbed(prices: Prices) -> Prices:
    """Return prices where units that were measured in integers, but have no kernel in float, count as absorbed."""
    names = prices.space.keys
    found = {name for name in names if lacks_float(prices, name) and measured_int8(prices, name) is not None}
    return replace(prices, absorbed=frozenset(found))


def unit_cost(prices: Prices, unit: Unit, impl: Impl) -> float:
    """Return the cost of a unit, in microseconds; in float, with the changes of layout around a convolution."""
    if impl is not Impl.FLOAT:
        return _kernel_cost(prices, unit, impl)
    if unit.name in prices.absorbed or unit.name in prices.space.followers:
        return 0.0
    return prices.layouts.of(unit) + _kernel_cost(prices, unit, impl)


def float_time(prices: Prices) -> float:
    """Return the cost of all units in float, in microseconds."""
    return math.fsum(unit_cost(prices, unit, Impl.FLOAT) for unit in prices.space.rules.units)


def _kernel_cost(prices: Prices, unit: Unit, impl: Impl) -> float:
    """Return the cost of a kernel: as measured, else as measured for the other integer form, else as estimated."""
    if (unit.name, impl) in prices.slowed:
        return prices.slowed[unit.name, impl]
    cost = measured(prices, unit.name, impl)
    if cost is None and impl.reads_u8 and unit.name in prices.space.keys:
        cost = measured_int8(prices, unit.name)
    return estimate(unit, prices.space.facts.nodes, prices.sizes, impl) if cost is None else cost


# ---------------------------------------------------------------------------------------------------------- noise


def noise_cost(prices: Prices, unit: Unit, impl: Impl) -> float:
    """Return the price of the noise that an implementation of a unit adds, in microseconds; 0 in float."""
    if not prices.noise_price or not impl.int8:
        return 0.0
    known = prices.noises.tensors or prices.noises.forms.get(impl)
    return prices.noise_price * (prices.noises.of_unit(unit, impl) if known else noise(unit, prices.space.facts.nodes))


def noise_around(prices: Prices, unit: Unit) -> float:
    """Return the price of the noise of a unit's tensors in uint8 and of its weights, in microseconds."""
    if not prices.noise_price or not prices.noises.tensors:
        return noise_cost(prices, unit, Impl.U8)
    of_tensors = map(prices.noises.of_tensor, {*unit.inputs, *unit.outputs})
    return prices.noise_price * math.fsum((*of_tensors, prices.noises.of_weights(unit, Impl.U8)))


def plan_noise_cost(prices: Prices, plan: Plan) -> float:
    """Return the price of the noise of a plan, in microseconds."""
    if prices.noise_price and prices.noises.tensors:
        return prices.noise_price * prices.noises.of_plan(plan)
    units = (unit for unit in plan.units if unit.name in prices.space.keys)
    return math.fsum(noise_cost(prices, unit, plan.impl(unit)) for unit in units)


# ---------------------------------------------------------------------------------------------------- conversions


def quantize_cost(prices: Prices, tensor: str) -> float:
    """Return the estimated cost of a QuantizeLinear, without the change of layout that its producer's cost includes."""
    return max(_conversion(prices, tensor) - prices.layouts.output.get(tensor, 0.0), 0.0)


def dequantize_cost(prices: Prices, tensor: str) -> float:
    """Return the estimated cost of a DequantizeLinear, without the change of layout that its reader's cost includes."""
    return max(_conversion(prices, tensor) - prices.layouts.input.get(tensor, 0.0), 0.0)


def conversions_around(prices: Prices, unit: Unit) -> float:
    """Return the estimated cost of the conversions of a unit in integers whose neighbours are all float."""
    reads = (quantize_cost(prices, tensor) for tensor in {*unit.inputs})
    return math.fsum((*reads, *(dequantize_cost(prices, tensor) for tensor in {*unit.outputs})))


def conversion_costs(prices: Prices, plan: Plan) -> Iterable[float]:
    """Yield the estimated cost of each conversion of a plan, in microseconds."""
    read_float = {t for u in plan.units if not plan.impl(u).reads_u8 for t in u.inputs} | prices.space.outputs
    yield from (dequantize_cost(prices, tensor) for tensor in plan.produced_u8 & read_float)
    yield from (quantize_cost(prices, tensor) for tensor in plan.read_u8 - plan.produced_u8)


def plan_milliseconds(prices: Prices, plan: Plan) -> float:
    """Return the cost of a plan without its noise, in milliseconds."""
    units = (unit_cost(prices, unit, plan.impl(unit)) for unit in plan.units)
    return math.fsum((*units, *conversion_costs(prices, plan))) / 1e3


def _conversion(prices: Prices, tensor: str) -> float:
    """Return the estimated cost of a QuantizeLinear or a DequantizeLinear of a tensor."""
    shape = prices.space.shapes.get(tensor, ())
    image = len(shape) == IMAGE and math.prod(shape[2:]) > 1
    return conversion(prices.sizes.get(tensor, 0), image=image)
