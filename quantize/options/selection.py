"""The nodes and operators that may become int8, and their forms, as the user selects them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import onnx_ir as ir

from ... import RequantError, UnknownNameError
from ...system.given import check_kind, names_of
from ...transforms.int8.ops import Op, row_of
from ...transforms.int8.plan import Impl, Unit
from .declared import Strategy

ORDERS: Mapping[Strategy, tuple[Impl, ...]] = {
    Strategy.AUTO: (Impl.U8, Impl.U8_FLOAT, Impl.DYNAMIC, Impl.WEIGHT),
    Strategy.STATIC: (Impl.U8,),
    Strategy.STATIC_FLOAT: (Impl.U8_FLOAT,),
    Strategy.DYNAMIC: (Impl.DYNAMIC,),
    Strategy.BLOCK: (Impl.BLOCK,),
    Strategy.WEIGHT: (Impl.WEIGHT,),
}
"""The implementations that a strategy allows, the preferred ones first."""


WITHOUT_RANGES = frozenset({Strategy.DYNAMIC, Strategy.BLOCK, Strategy.WEIGHT})
"""The strategies that need no data."""


def offered(row: Op | None) -> list[Strategy]:
    """Return the strategies that an operator supports; none for an operator without weights."""
    if row is None or not (row.dynamic or row.blocks or row.u8_float or row.stores):
        return []
    supported = {
        Strategy.STATIC: row.u8 is not None,
        Strategy.STATIC_FLOAT: row.u8_float is not None,
        Strategy.DYNAMIC: row.dynamic is not None,
        Strategy.BLOCK: row.blocks is not None,
        Strategy.WEIGHT: bool(row.stores),
    }
    return [strategy for strategy, has in supported.items() if has]


@dataclass(frozen=True, slots=True)
class Selection:
    """The nodes and operators that may become int8, and their forms.

    Attributes:
        exclude_nodes: Names of nodes that stay float; ``*`` stands for any characters.
        exclude_ops: Operator types that stay float.
        include_ops: The only operator types that may become int8; empty for all.
        strategy: The int8 form of operators with weights; ``auto`` leaves the choice to the rules.
        strategies: Strategies of single nodes by name; they take precedence over `strategy`.
    """

    exclude_nodes: frozenset[str] = frozenset()
    exclude_ops: frozenset[str] = frozenset()
    include_ops: frozenset[str] = frozenset()
    strategy: Strategy = Strategy.AUTO
    strategies: Mapping[str, Strategy] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse texts where names are wanted, and unknown strategies.

        Raises:
            RequantError: A value is refused.
        """
        for name in ("exclude_nodes", "exclude_ops", "include_ops"):
            object.__setattr__(self, name, frozenset(names_of(getattr(self, name), name)))
        if self.include_ops and self.include_ops <= self.exclude_ops:
            raise RequantError(f"all included operators are excluded: {', '.join(sorted(self.include_ops))}")
        check_kind(self.strategies, Mapping, "strategies must be a mapping from names of nodes to strategies")
        for strategy in (self.strategy, *self.strategies.values()):
            if not isinstance(strategy, str) or strategy not in [*Strategy]:
                raise UnknownNameError("strategy", str(strategy), [*Strategy])

    def check(self, model: ir.Model) -> None:
        """Refuse names that `model` does not have.

        Raises:
            UnknownNameError: The model has no node or operator type of this name.
            RequantError: The operator of a node does not support its strategy.
        """
        nodes = {node.name: node for node in _all_nodes(model) if node.name}
        types = {node.op_type for node in _all_nodes(model)}
        for name in sorted(self.exclude_nodes | self.strategies.keys()):
            if name not in nodes and not (name in self.exclude_nodes and any(_fits(node, name) for node in nodes)):
                raise UnknownNameError("node", name, nodes)
        for name in sorted((self.exclude_ops | self.include_ops) - types):
            raise UnknownNameError("operator in the model", name, types)
        functions = {name for _, name, _ in model.functions}
        for name in sorted((self.exclude_ops | self.include_ops) & functions):
            raise RequantError(f"{name!r} is a function of the model, which is inlined; name operators inside it")
        for name, strategy in sorted(self.strategies.items()):
            forms = offered(row_of(nodes[name]))
            if strategy is not Strategy.AUTO and strategy not in forms:
                choices = f"it can be: {', '.join(forms)}" if forms else "it has no strategies"
                raise RequantError(f"node {name!r}: a {nodes[name].op_type} cannot be {strategy}; {choices}")

    def renamed(self, before: Iterable[tuple[str, str]]) -> Selection:
        """Return the selection for a model whose nodes were renamed.

        Args:
            before: Pairs of a new and an old name. A node of an inlined function has two pairs: one with its old name,
                one with the name of the call.
        """
        pairs = list(before)
        excluded = {new for new, old in pairs if self.excludes(old)}
        strategies = {new: self.strategies[old] for new, old in pairs if old in self.strategies}
        return replace(self, exclude_nodes=self.exclude_nodes | excluded, strategies={**self.strategies, **strategies})

    def excludes(self, node: str) -> bool:
        """Return whether the user excludes the node of this name."""
        return node in self.exclude_nodes or any(_fits(node, name) for name in self.exclude_nodes)

    def refuses(self, unit: Unit, types: Mapping[str, str]) -> str:
        """Return why the user keeps `unit` float; empty if it may become int8.

        Args:
            unit: A unit. A unit is excluded if any node in it is.
            types: Operator types by node name, as in the user's model.
        """
        if any(map(self.excludes, unit.nodes)):
            return "excluded by name"
        excluded = self.exclude_ops.intersection(types[name] for name in unit.nodes)
        if excluded:
            return f"excluded: {min(excluded)}"
        if self.include_ops and types[unit.nodes[0]] not in self.include_ops:
            return "not among the included operators"
        return ""

    def leaves(self, node: ir.Node) -> bool:
        """Whether the user excludes a node of the model, by its name or its operator."""
        excluded = self.excludes(node.name or "") or node.op_type in self.exclude_ops
        return excluded or bool(self.include_ops and node.op_type not in self.include_ops)

    def strategy_of(self, unit: Unit, row: Op) -> Strategy:
        """Return the strategy of `unit`: the strategy of its node, else of all nodes if the operator supports it."""
        own = next((self.strategies[name] for name in unit.nodes if name in self.strategies), None)
        if own is not None:
            return own
        return self.strategy if self.strategy in offered(row) else Strategy.AUTO


def _fits(node: str, name: str) -> bool:
    """Return whether the name of a node fits one in which ``*`` stands for any characters; a name without it fits none.

    >>> _fits("head/conv[0]", "head*[0]"), _fits("head", "head")
    (True, False)
    """
    return "*" in name and fnmatchcase(node, re.sub(r"([?[])", r"[\1]", name))


def _all_nodes(model: ir.Model) -> list[ir.Node]:
    """Return the nodes of the graph, of its subgraphs, and of the model's functions."""
    return [*model.graph.all_nodes(), *(node for f in model.functions.values() for node in f.all_nodes())]
