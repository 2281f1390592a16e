"""What becomes int8, as a value: units of the graph, an implementation for each, a domain for each tensor.

A `Plan` is decided elsewhere (`requant.quantize` measures and decides) and consumed here: the emitters read it
and decide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from .ops import OPS
from .reasons import NONE, Reason


class Impl(StrEnum):
    """How a unit computes: the domain it reads and the domain it writes."""

    FLOAT = "float"
    U8 = "u8->u8"  # QLinearConv, QLinearAdd, MaxPool on uint8, ...
    U8_GEMM = "u8->u8 gemm"  # QLinearConv as a matrix product, which it is where its weights have a zero point
    U8_FLOAT = "u8->float"  # MatMulIntegerToFloat, QGemm with float output, QAttention
    DYNAMIC = "dynamic"  # DynamicQuantizeMatMul: float to float, ranges found at run time, products of integers
    WEIGHT = "weight-only"  # int8 weights in the file, dequantized; the operator computes in float

    @property
    def reads_u8(self) -> bool:
        """Whether the activations come in uint8."""
        return self in (Impl.U8, Impl.U8_GEMM, Impl.U8_FLOAT)

    @property
    def writes_u8(self) -> bool:
        """Whether the results come in uint8."""
        return self in (Impl.U8, Impl.U8_GEMM)

    @property
    def int8(self) -> bool:
        """Whether anything of it is int8."""
        return self is not Impl.FLOAT


class Domain(StrEnum):
    """The form in which a tensor is produced."""

    FLOAT = "float"
    U8 = "u8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An operator with what it absorbs, or a group of operators that must stay whole.

    Attributes:
        name: Name of the operator's node (of the last node of a group); unique in the graph.
        op: Its operator as `requant.transforms.ops` calls it: ``"gate"`` for a SiLU or a hard-swish; or ``"group"``.
        nodes: Names of all nodes of the unit, in execution order.
        inputs: Names of the activation tensors that it reads.
        outputs: Names of the tensors that other units or the user read.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation of a unit, and why it is not an integer one."""

    impl: Impl
    reason: Reason = NONE


@dataclass(frozen=True)
class Plan:
    """An implementation for each unit and, following from it, a domain for each tensor.

    Attributes:
        units: Every unit of the graph, in execution order.
        choices: By unit name.
        portable: Whether other runtimes run the model too: it has none of the forms that ONNX Runtime alone wants.
    """

    units: tuple[Unit, ...]
    choices: Mapping[str, Choice]
    portable: bool = False

    def impl(self, unit: Unit) -> Impl:
        """The implementation of `unit`."""
        return self.choices[unit.name].impl

    def domain(self, tensor: str) -> Domain:
        """The form in which `tensor` is produced; graph inputs are float."""
        return Domain.U8 if tensor in self.produced_u8 else Domain.FLOAT

    @cached_property
    def produced_u8(self) -> frozenset[str]:
        """Tensors that an integer kernel writes."""
        return frozenset(t for u in self.units if self.impl(u).writes_u8 for t in u.outputs)

    @cached_property
    def read_u8(self) -> frozenset[str]:
        """Tensors that an integer kernel reads."""
        return frozenset(t for u in self.units if self.impl(u).reads_u8 for t in u.inputs)

    @property
    def quantized(self) -> tuple[str, ...]:
        """Tensors that exist as uint8 somewhere, in execution order: each needs a scale and a zero point."""
        wanted = self.produced_u8 | self.read_u8
        order = dict.fromkeys(t for u in self.units for t in (*u.inputs, *u.outputs))
        return tuple(t for t in order if t in wanted)

    @cached_property
    def scale_of(self) -> Mapping[str, str]:
        """By tensor, the one whose scale and zero point it shares: a uint8 ``MaxPool`` passes its input's on.

        In a portable model what a ``Concat`` joins has the scale of the result: other runtimes only copy.
        """
        u8 = [u for u in self.units if u.op in OPS and self.impl(u) is Impl.U8]
        shared = {output: u.inputs[0] for u in u8 if OPS[u.op].kind == "same" for output in u.outputs}
        joined = {tensor: u.outputs[0] for u in u8 if u.op == "Concat" and self.portable for tensor in u.inputs}
        return shared | joined

    def root(self, tensor: str) -> str:
        """The tensor whose range decides the scale of `tensor`."""
        while tensor in self.scale_of:
            tensor = self.scale_of[tensor]
        return tensor

    @property
    def observed(self) -> tuple[str, ...]:
        """Tensors whose range must be known, in execution order."""
        return tuple(dict.fromkeys(map(self.root, self.quantized)))

    def with_choices(self, changed: Mapping[str, Choice]) -> Plan:
        """Return this plan with some units decided otherwise."""
        return replace(self, choices={**self.choices, **changed})
