"""What the user wants of single nodes and operators: which may become int8, and in which form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import onnx_ir as ir

from ... import RequantError, UnknownNameError
from ...transforms.ops import Op, row_of
from ...transforms.plan import Impl, Unit


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


def offered(row: Op | None) -> list[Strategy]:
    """Return the forms that may be chosen for an operator; none for one that has no weights."""
    if row is None or not (row.dynamic or row.u8_float or row.stores):
        return []
    there = {
        Strategy.STATIC: row.u8 is not None,
        Strategy.STATIC_FLOAT: row.u8_float is not None,
        Strategy.DYNAMIC: row.dynamic is not None,
        Strategy.WEIGHT: bool(row.stores),
    }
    return [strategy for strategy, has in there.items() if has]


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
        functions = {name for _, name, _ in model.functions}
        for name in sorted((self.exclude_ops | self.include_ops) & functions):
            raise RequantError(f"{name!r} is a function of the model, which is taken apart; name operators inside it")
        for name, strategy in sorted(self.strategies.items()):
            forms = offered(row_of(nodes[name]))
            if strategy is not Strategy.AUTO and strategy not in forms:
                has = f"it can be: {', '.join(forms)}" if forms else "it has none to choose"
                raise RequantError(f"node {name!r}: a {nodes[name].op_type} cannot be {strategy}; {has}")

    def renamed(self, before: Iterable[tuple[str, str]]) -> Selection:
        """Return the selection for a model in which nodes have got new names.

        Args:
            before: Pairs of a new name and an old one; a node of an inlined function has its own and its call's.
        """
        pairs = list(before)
        excluded = {new for new, old in pairs if old in self.exclude_nodes}
        strategies = {new: self.strategies[old] for new, old in pairs if old in self.strategies}
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
        return self.strategy if self.strategy in offered(row) else Strategy.AUTO


def _all_nodes(model: ir.Model) -> list[ir.Node]:
    """Return the nodes of the graph, its bodies and the model's functions."""
    return [*model.graph.all_nodes(), *(node for f in model.functions.values() for node in f.all_nodes())]
