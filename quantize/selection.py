"""What the user wants of single nodes and operators: which may become int8, and in which form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import onnx_ir as ir

from .. import RequantError, UnknownNameError
from ..transforms.ops import Op, row_of
from ..transforms.plan import Impl, Unit


class Strategy(StrEnum):
    """How an operator with weights becomes int8."""

    AUTO = "auto"
    STATIC = "static"
    STATIC_FLOAT = "static-float"
    DYNAMIC = "dynamic"
    WEIGHT = "weight-only"


ORDERS: Mapping[Strategy, tuple[Impl, ...]] = {
    Strategy.AUTO: (Impl.U8, Impl.U8_FLOAT, Impl.DYNAMIC, Impl.WEIGHT),
    Strategy.STATIC: (Impl.U8,),
    Strategy.STATIC_FLOAT: (Impl.U8_FLOAT,),
    Strategy.DYNAMIC: (Impl.DYNAMIC,),
    Strategy.WEIGHT: (Impl.WEIGHT,),
}
"""The implementations that a strategy allows, the wanted ones first."""


def has_strategies(row: Op | None) -> bool:
    """Whether an operator can become int8 in more than one form."""
    return row is not None and bool(row.dynamic or row.u8_float or row.stores)


@dataclass(frozen=True, slots=True)
class Selection:
    """What the user allows to become int8, and how.

    Attributes:
        exclude_nodes: Node names that stay float.
        exclude_ops: Operator types that stay float.
        include_ops: The only operator types that may become int8; empty for all.
        strategy: How operators with weights become int8: by the planner's own rule, or in one form.
        strategies: The same by node name; it wins.
    """

    exclude_nodes: frozenset[str] = frozenset()
    exclude_ops: frozenset[str] = frozenset()
    include_ops: frozenset[str] = frozenset()
    strategy: Strategy = Strategy.AUTO
    strategies: Mapping[str, Strategy] = field(default_factory=dict, hash=False)

    def check(self, model: ir.Model) -> None:
        """Refuse what nothing in `model` answers to.

        Raises:
            UnknownNameError: A node name or an operator type that the model does not have.
            RequantError: A strategy for a node whose operator has none.
        """
        nodes = {node.name: node for node in _all_nodes(model) if node.name}
        types = {node.op_type for node in _all_nodes(model)}
        for name in sorted(self.exclude_nodes | self.strategies.keys()):
            if name not in nodes:
                raise UnknownNameError("node", name, nodes)
        for name in sorted((self.exclude_ops | self.include_ops) - types):
            raise UnknownNameError("operator in the model", name, types)
        for name in sorted(self.strategies):
            if not has_strategies(row_of(nodes[name])):
                raise RequantError(
                    f"node {name!r} is a {nodes[name].op_type}, which has no strategy to choose; "
                    "MatMul, Gemm, Conv, ConvTranspose, Gather, LSTM and Attention have"
                )

    def renamed(self, before: Mapping[str, str]) -> Selection:
        """Return the selection for a model in which nodes have got new names; `before` has the old ones."""
        excluded = {new for new, old in before.items() if old in self.exclude_nodes}
        strategies = {new: self.strategies[old] for new, old in before.items() if old in self.strategies}
        return replace(self, exclude_nodes=self.exclude_nodes | excluded, strategies={**self.strategies, **strategies})

    def refuses(self, unit: Unit, types: Mapping[str, str]) -> str:
        """Say why the user does not want `unit` in int8; empty when there is nothing against it.

        Args:
            unit: A unit; what it absorbs counts too when it comes to excluding.
            types: Operator types by node name, as the user knows them.
        """
        if self.exclude_nodes.intersection(unit.nodes):
            return "excluded by name"
        excluded = self.exclude_ops.intersection(types[name] for name in unit.nodes)
        if excluded:
            return f"excluded: {min(excluded)}"
        if self.include_ops and types[unit.nodes[0]] not in self.include_ops:
            return "not among the included operators"
        return ""

    def strategy_of(self, unit: Unit, row: Op) -> Strategy:
        """Return how the user wants `unit`: as named for its node, else as named for all where it has such a form."""
        own = next((self.strategies[name] for name in unit.nodes if name in self.strategies), None)
        if own is not None:
            return own
        offered = {
            Strategy.STATIC: row.u8 is not None,
            Strategy.STATIC_FLOAT: row.u8_float is not None,
            Strategy.DYNAMIC: row.dynamic is not None,
            Strategy.WEIGHT: bool(row.stores),
        }
        return self.strategy if offered.get(self.strategy, False) and has_strategies(row) else Strategy.AUTO


def _all_nodes(model: ir.Model) -> list[ir.Node]:
    """Return the nodes of the graph, its bodies and the model's functions."""
    return [*model.graph.all_nodes(), *(node for f in model.functions.values() for node in f.all_nodes())]
