"""The plan of an INT8 model: the units of a graph and the implementation of each.

`requant.quantize` makes a `Plan`; the emitters in `requant.transforms` carry it out and decide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from .ops import ATTENTION, FUNCTION, GATE, OPS
from .reasons import NONE, Reason


class Impl(StrEnum):
    """How a unit computes: the type that it reads and the type that it writes."""

    FLOAT = "float"
    U8 = "u8->u8"  # QLinearConv, QLinearAdd, MaxPool on uint8, ...
    U8_GEMM = "u8->u8 gemm"  # QLinearConv with a weight zero point, which the runtime computes as a matrix product
    U8_NATIVE = "u8->u8 native"  # an operator of ai.requant, as a function whose body is the form U8 or U8_GEMM
    U8_FLOAT = "u8->float"  # MatMulIntegerToFloat, QGemm with float output, QAttention
    DYNAMIC = "dynamic"  # DynamicQuantizeMatMul: float to float with integer products; finds ranges at run time
    DYNAMIC_NATIVE = "dynamic native"  # an operator of ai.requant; its body: DYNAMIC; float for attention, GRU and LSTM
    BLOCK = "block"  # MatMulNBits, GatherBlockQuantized: weights in blocks, float to float, products of integers
    BLOCK_NATIVE = "block native"  # an operator of ai.requant, as a function whose body is the form BLOCK
    WEIGHT = "weight-only"  # int8 weights in the file, dequantized; the operator computes in float

    @property
    def reads_u8(self) -> bool:
        """Whether the unit reads uint8 activations."""
        return self in (Impl.U8, Impl.U8_GEMM, Impl.U8_NATIVE, Impl.U8_FLOAT)

    @property
    def writes_u8(self) -> bool:
        """Whether the unit writes uint8 results."""
        return self in (Impl.U8, Impl.U8_GEMM, Impl.U8_NATIVE)

    @property
    def native(self) -> bool:
        """Whether an operator of ai.requant computes the unit."""
        return self in (Impl.U8_NATIVE, *NATIVE_PRODUCTS.values())

    @property
    def in_blocks(self) -> bool:
        """Whether the weights of the unit are in blocks."""
        return self in (Impl.BLOCK, Impl.BLOCK_NATIVE)

    @property
    def int8(self) -> bool:
        """Whether the unit uses int8 at all."""
        return self is not Impl.FLOAT


NATIVE_PRODUCTS: Mapping[Impl, Impl] = {Impl.DYNAMIC: Impl.DYNAMIC_NATIVE, Impl.BLOCK: Impl.BLOCK_NATIVE}
"""By form from float to float, the form of the native operator that computes the same."""


class Domain(StrEnum):
    """The element type that the producer of a tensor writes."""

    FLOAT = "float"
    U8 = "u8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An operator with what it absorbs, or a group of operators that must stay whole.

    Attributes:
        name: Name of the operator's node (of the last node of a group); unique in the graph.
        op: Its key in `requant.transforms.int8.ops.OPS`; ``"gate"`` for a SiLU or a hard-swish; ``"group"`` for others.
        nodes: Names of all nodes of the unit, in execution order.
        inputs: Names of the activation tensors that the unit reads.
        outputs: Names of its results that other units or the user read.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def readers(self) -> tuple[str, ...]:
        """Names of the nodes that may read its inputs."""
        return self.nodes if self.op in (ATTENTION, FUNCTION, GATE) else self.nodes[:1]

    @property
    def rounded(self) -> tuple[str, ...]:
        """The inputs that forms from float to float round; the last input of attention may be a mask."""
        row = OPS.get(self.op)
        return self.inputs[: 1 if row is None else row.rounds]


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation of a unit.

    Attributes:
        impl: The implementation.
        reason: Why the unit is float.
        body: The form of the body of a native operator from uint8 to uint8, `Impl.U8` or `Impl.U8_GEMM`: a runtime
            without the library computes it.
    """

    impl: Impl
    reason: Reason = NONE
    body: Impl = Impl.U8


@dataclass(frozen=True)
class Plan:
    """An implementation for each unit; it determines the domain of each tensor.

    Attributes:
        units: Every unit of the graph, in execution order.
        choices: The implementation of each unit, by unit name.
        portable: Whether other runtimes run the model too: it has no form that only ONNX Runtime supports.
        results: The tensors that the user reads, and those that bodies of control flow read.
    """

    units: tuple[Unit, ...]
    choices: Mapping[str, Choice]
    portable: bool = False
    results: frozenset[str] = frozenset()

    def impl(self, unit: Unit) -> Impl:
        """The implementation of `unit`."""
        return self.choices[unit.name].impl

    def shifts(self, unit: Unit) -> bool:
        """Whether the weights of `unit` have the zero point -1, with which the runtime computes a matrix product."""
        choice = self.choices[unit.name]
        return Impl.U8_GEMM in (choice.impl, choice.body)

    @property
    def has_int8(self) -> bool:
        """Whether any unit has an int8 implementation."""
        return any(self.impl(unit).int8 for unit in self.units)

    def domain(self, tensor: str) -> Domain:
        """The element type in which `tensor` is produced; graph inputs are float."""
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
        """Tensors that an integer kernel reads or writes, in execution order: each needs a scale and a zero point."""
        u8 = self.produced_u8 | self.read_u8
        order = dict.fromkeys(t for u in self.units for t in (*u.inputs, *u.outputs))
        return tuple(t for t in order if t in u8)

    @cached_property
    def scale_of(self) -> Mapping[str, str]:
        """By tensor, the tensor whose scale and zero point it shares.

        A uint8 ``MaxPool`` keeps those of its input. A tensor that only a uint8 ``Concat`` reads, perhaps behind such
        operators, has those of the result: it is rounded once, and the ``Concat`` copies. So has the result of one
        ``Concat`` that another one reads, whatever else reads it: else the first values of a chain would be rounded in
        each link. In a portable model all inputs of a ``Concat`` have them, because other runtimes only copy.
        """
        u8 = [u for u in self.units if u.op in OPS and self.impl(u).writes_u8]
        kept = {output: u.inputs[0] for u in u8 if OPS[u.op].kind == "same" for output in u.outputs}
        joins = {u.name: u.outputs[0] for u in u8 if u.op == "Concat"}
        if self.portable:
            return kept | {tensor: joins[u.name] for u in u8 if u.name in joins for tensor in u.inputs}
        wholes, shared = {*joins.values()}, {}
        for tensor, readers in self._readers(kept).items():
            joined = readers & joins.keys()
            if len(joined) == 1 and (joined == readers or tensor in wholes):
                shared[tensor] = joins[joined.pop()]
        return kept | shared

    def _readers(self, kept: Mapping[str, str]) -> dict[str, set[str]]:
        """Return the units that read each tensor, directly or behind operators that keep its scale; "" for the user.

        Args:
            kept: The inputs of such operators, by result.
        """
        readers: dict[str, set[str]] = {_end(kept, tensor): {""} for tensor in self.results}
        for unit in self.units:
            if not kept.keys() & {*unit.outputs}:
                for tensor in unit.inputs:
                    readers.setdefault(_end(kept, tensor), set()).add(unit.name)
        return readers

    def root(self, tensor: str) -> str:
        """The tensor whose range gives the scale of `tensor`."""
        return _end(self.scale_of, tensor)

    @property
    def observed(self) -> tuple[str, ...]:
        """Tensors whose range must be known, in execution order."""
        return tuple(dict.fromkeys(map(self.root, self.quantized)))

    def with_choices(self, changed: Mapping[str, Choice]) -> Plan:
        """Return this plan with new choices for some units."""
        return replace(self, choices={**self.choices, **changed})


def _end(links: Mapping[str, str], tensor: str) -> str:
    """Follow links from a tensor to the last one."""
    while tensor in links:
        tensor = links[tensor]
    return tensor
