"""The noise that a plan adds to the outputs: measured for tensors and weights alone, else estimated from weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from ...transforms.graphs.queries import constant
from ...transforms.int8.ops import OPS
from ...transforms.int8.plan import Choice, Impl, Plan, Unit
from .absorbers import unrounded

ACTIVATION = 12 * 255.0**2 / 36  # a uniform error of 1/255 of a range of six standard deviations


@dataclass(frozen=True)
class Noises:
    """The measured noise of tensors and weights, as powers relative to the outputs. Independent errors add up.

    Attributes:
        tensors: The noise of each tensor in uint8 alone.
        forms: By form of matrix products from float to float, the noise of each input tensor.
        moved: By result of an operator that only moves values, its input: they have the same noise.
        joined: By result of a Concat, its inputs, if they all have its scale: they are rounded, and the Concat copies.
        absorbers: The convolution that may absorb each function or sum, by the name of the latter; see `absorbers_of`.
        readers: How many products read a tensor; they share its noise.
        weights: By unit, the noise of its weights in int8. Weights in blocks have scales enough to add none.
    """

    tensors: Mapping[str, float] = field(default_factory=dict)
    forms: Mapping[Impl, Mapping[str, float]] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absorbers: Mapping[str, Unit] = field(default_factory=dict)
    readers: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plan: Plan,
        tensors: Mapping[str, float],
        forms: Mapping[Impl, Mapping[str, float]],
        absorbers: Mapping[str, Unit],
        weights: Mapping[str, float],
    ) -> Noises:
        """Return the noises of a model. `plan` may be any plan of the model: only its units count."""
        moving = [unit for unit in plan.units if unit.op in OPS and OPS[unit.op].kind == "same"]
        moved = {output: unit.inputs[0] for unit in moving if unit.inputs for output in unit.outputs}
        products = [unit for unit in plan.units if unit.op in OPS and OPS[unit.op].kind == "compute"]
        readers = Counter(unit.inputs[0] for unit in products if unit.inputs)
        return cls(tensors, forms, moved, _joined(plan), absorbers, readers, weights)

    @property
    def total(self) -> float:
        """The noise of all weights plus the noise of all tensors.

        The inputs of products in one form count instead of the tensors if they have more noise: there may have been
        time to try only that form.
        """
        most = max(math.fsum(each.values()) for each in (self.tensors, *self.forms.values()))
        return most + math.fsum(self.weights.values())

    @cached_property
    def _between(self) -> frozenset[str]:
        """The tensors between a convolution and the unit that it may absorb."""
        return frozenset(each.outputs[0] for each in self.absorbers.values())

    @cached_property
    def _not_rounded_by_writer(self) -> frozenset[str]:
        """Tensors that their writer does not round: it moves rounded values, or a convolution absorbs their reader."""
        return self._between.union(self.moved, self.joined)

    def of_tensor(self, tensor: str) -> float:
        """Return the noise of a tensor that is rounded to uint8."""
        return self.tensors.get(self._known(tensor), 0.0)

    def _known(self, tensor: str) -> str:
        """Return the tensor whose noise is known in place of one that an operator only moves."""
        while tensor not in self.tensors and tensor in self.moved:
            tensor = self.moved[tensor]
        return tensor

    def of_unit(self, unit: Unit, impl: Impl) -> float:
        """Return the noise that an implementation of a unit adds, whatever the units before it are.

        A tensor is rounded by the unit that writes it in uint8, or by a QuantizeLinear (`of_tensor`). A native
        convolution does not round its result in front of a native unit that it absorbs. This function knows one of both
        implementations only. So the noise of that result belongs to the absorbed unit, if it is not native, and to a
        DequantizeLinear (`of_dequantize`).
        """
        found = self.of_weights(unit, impl)
        if impl in self.forms:
            known = self.forms[impl]
            shares = (known.get(tensor, 0.0) / max(self.readers.get(tensor, 0), 1) for tensor in unit.rounded)
            return found + math.fsum(shares)
        if impl.writes_u8:
            written = (each for each in unit.outputs if each not in self._not_rounded_by_writer)
            found += math.fsum(map(self.of_tensor, written))
        if impl.reads_u8 and impl is not Impl.U8_NATIVE and unit.name in self.absorbers:
            found += self.of_tensor(self.absorbers[unit.name].outputs[0])
        return found

    def of_weights(self, unit: Unit, impl: Impl) -> float:
        """Return the noise of the weights of an implementation of a unit."""
        return self.weights.get(unit.name, 0.0) if impl.int8 and not impl.in_blocks else 0.0

    def of_dequantize(self, tensor: str) -> float:
        """Return the noise of a tensor that is rounded only if a DequantizeLinear reads it, see `of_unit`; else 0."""
        return self.of_tensor(tensor) if tensor in self._between else 0.0

    def _rounded(self, plan: Plan, tensor: str) -> Iterator[str]:
        """Yield the tensors that a plan rounds for a uint8 tensor: itself, or the inputs of a Concat that writes it."""
        inputs = self.joined.get(tensor, ()) if tensor in plan.produced_u8 else ()
        if not inputs or any(plan.root(each) != plan.root(tensor) for each in inputs):
            yield tensor
        else:
            for each in inputs:
                yield from self._rounded(plan, each)

    def of_plan(self, plan: Plan) -> float:
        """Return the noise of a plan: of tensors that it rounds, of weights, and of products from float to float."""
        chosen = [(unit, plan.impl(unit)) for unit in plan.units]
        products = (self.of_unit(*each) if each[1] in self.forms else self.of_weights(*each) for each in chosen)
        return math.fsum((*map(self.of_tensor, sorted(self._rounded_by(plan))), *products))

    def _rounded_by(self, plan: Plan) -> set[str]:
        """Return the tensors that a plan rounds to uint8."""
        roots = set(plan.observed) - unrounded(plan, self.absorbers)
        return {part for root in roots for part in self._rounded(plan, root)}

    def raised_to(self, noise: float, plan: Plan, quiet: Sequence[Plan]) -> Noises:
        """Return noises by which a plan has a noise: what it rounds, and the plans `quiet` do not, counts more.

        The noises are returned as they are if the plan has that noise, or rounds nothing that the others do not.
        """
        found = self.of_plan(plan)
        own = self._with_factor(plan, quiet, 2.0).of_plan(plan) - found  # the noise of what this plan alone rounds
        return self._with_factor(plan, quiet, 1 + (noise - found) / own) if noise > found and own > 0 else self

    def _with_factor(self, plan: Plan, quiet: Sequence[Plan], factor: float) -> Noises:
        """Return noises in which all that `plan` rounds, and no plan of `quiet` does, counts `factor` times.

        This includes tensors in uint8, weights in int8, and the inputs of products from float to float.
        """
        units = [
            unit for unit in plan.units if plan.impl(unit).int8 and not any(each.impl(unit).int8 for each in quiet)
        ]
        others = set[str]().union(*map(self._rounded_by, quiet))
        rounded = {self._known(each) for each in self._rounded_by(plan) - others}
        read = {plan.impl(unit): {tensor for each in units for tensor in each.rounded} for unit in units}
        return replace(
            self,
            tensors=_times(self.tensors, rounded, factor),
            forms={impl: _times(known, read.get(impl, ()), factor) for impl, known in self.forms.items()},
            weights=_times(self.weights, {unit.name for unit in units}, factor),
        )


def _times(known: Mapping[str, float], names: Collection[str], factor: float) -> dict[str, float]:
    """Return noises with some of them multiplied by a factor."""
    return {name: noise * factor if name in names else noise for name, noise in known.items()}


def _joined(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the inputs of each Concat, by its result, if all of them would have its scale in a plan of uint8 alone."""
    wide = plan.with_choices({unit.name: Choice(Impl.U8) for unit in plan.units if unit.inputs})
    concats = {unit.outputs[0]: unit.inputs for unit in plan.units if unit.op == "Concat"}
    return {
        whole: inputs
        for whole, inputs in concats.items()
        if all(wide.root(each) == wide.root(whole) for each in inputs)
    }


def noise(unit: Unit, nodes: Mapping[str, ir.Node]) -> float:
    """Return the noise power that uint8 activations and int8 weights add to a unit, over the power of its result.

    Rounding to steps of d adds errors of power d**2 / 12 (Widrow, Statistical analysis of amplitude-quantized
    sampled-data systems, 1961). The steps of the weights are computed per output channel; the range of activations is
    assumed to be six standard deviations.
    """
    activations = len(unit.inputs) / ACTIVATION
    row = OPS[unit.op]
    tensor = constant(nodes[unit.nodes[0]].inputs[1]) if row.kind == "compute" else None
    if tensor is None:
        return activations
    array = np.abs(tensor.numpy().astype(np.float32))
    axis = row.channel_axis(nodes[unit.nodes[0]]) % array.ndim
    channels = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    power = np.square(channels, dtype=np.float64).mean(axis=1)
    step = channels.max(axis=1).astype(np.float64) / 127
    ratio = np.divide(step**2 / 12, power, out=np.zeros_like(power), where=power > 0)
    return activations + float(ratio.mean())
