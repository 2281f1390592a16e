"""The units of a graph: nodes that become int8 together because one kernel runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..graphs.queries import constant, key, node_name, sole_reader
from ..patterns.attention import FoundAttention
from ..patterns.elementwise import channels_of, clip_bounds
from ..patterns.linear import BY_CONSTANT
from ..patterns.resizes import interpolates
from .ops import ATTENTION, FUNCTION, GATE, GATES, INTERPOLATION, OPS, Op, row_of
from .plan import Unit

# Operators that a fan-out group may contain: element-wise operators, and a reduction that feeds one.
CHEAP = frozenset(
    "Add Sub Mul Div Pow Sqrt Erf Tanh Sigmoid HardSigmoid Reciprocal ReduceMean Neg Abs Exp Softplus Cast".split()
)
GROUP_LIMIT = 16


@dataclass(frozen=True, eq=False)
class Compound:
    """Operators that form one unit.

    Attributes:
        op: The key of the unit in `OPS`.
        nodes: The operators, in order; the unit has the name of the last one.
        inputs: What they read, in the order of the unit's inputs; constants are left out.
    """

    op: str
    nodes: Sequence[ir.Node]
    inputs: Sequence[ir.Value | None]

    @classmethod
    def attention(cls, found: FoundAttention) -> Compound:
        """Return the operators of attention, with its inputs in the order of `FoundAttention`."""
        return cls(ATTENTION, found.nodes, found.inputs)


def units(graph: ir.Graph, compounds: Sequence[Compound] = ()) -> tuple[Unit, ...]:
    """Partition the nodes of `graph`, without its bodies, into units, in execution order.

    A Conv, Gemm, MatMul, Add, Mul or LeakyRelu forms a unit with the Relu or Clip that is its only reader. Element-wise
    operators between a tensor with several readers and the node where their results join (``x * sigmoid(x)``, GELU, a
    decomposed layer or RMS norm, a hard-swish) form a group: the runtime fuses them if no other node is inserted
    between them. A layer norm forms two groups: ``x - mean(x)`` and the division. Operators behind
    a function of one element that scale or shift its result by single numbers belong to its group: one table computes
    all of them.

    Args:
        graph: The graph.
        compounds: Operators that form one unit each, together with the Relu or Clip that their kernel computes.
    """
    by_last: dict[ir.Node, Unit] = {}
    taken: set[ir.Node] = set()
    for compound in compounds:
        nodes = [*compound.nodes, *_absorbed(compound.nodes[-1], OPS[compound.op], taken)]
        if compound.op == FUNCTION:
            nodes += _scaled_further(nodes, taken)
        by_last[nodes[-1]] = _unit(nodes, compound.nodes[-1], compound.inputs, op=compound.op)
        taken.update(nodes)
    for value in _values(graph):
        region = _fan_out_group(value)
        if region and not taken.intersection(region):
            region += _scaled_further(region, taken)
            by_last[region[-1]] = _unit(region, region[-1], [v for n in region for v in n.inputs], op=_kind(region))
            taken.update(region)
    for node in graph:
        if node not in taken:
            nodes = [node, *_absorbed(node, row_of(node), taken)]
            by_last[nodes[-1]] = _unit(nodes, node, activations(node), op=_operator(node))
            taken.update(nodes)
    return tuple(by_last[node] for node in graph if node in by_last)


def _scaled_further(region: list[ir.Node], taken: set[ir.Node]) -> list[ir.Node]:
    """Return the operators behind a function of one element that scale or shift its result by single numbers."""
    found: list[ir.Node] = []
    last = region[-1]
    if _kind(region) not in (FUNCTION, GATE):
        return found
    while (reader := sole_reader(last.outputs[0])) is not None and reader not in taken:
        if reader.op_type not in BY_CONSTANT or channels_of(reader, None) != 1 or len(activations(reader)) != 1:
            break
        found.append(reader)
        last = reader
    return found


def _operator(node: ir.Node) -> str:
    """Return the key of an operator, or `INTERPOLATION`."""
    return INTERPOLATION if interpolates(node) else key(node)


def _kind(region: list[ir.Node]) -> str:
    """Return the kind of a group: `GATE`, `FUNCTION` or ``"group"``; all its operators read one tensor."""
    first, last = region[0], region[-1]
    product = len(region) == 2 and last.op_type == "Mul" and set(last.inputs) == {first.inputs[0], first.outputs[0]}
    if product and first.op_type in GATES:
        return GATE
    return FUNCTION if all(channels_of(node, None) == 1 for node in region) else "group"


def activations(node: ir.Node) -> tuple[ir.Value, ...]:
    """Return the computed inputs of `node` that its operator row names as activations."""
    row = row_of(node)
    chosen = row.activations if row is not None else None
    values = node.inputs if chosen is None else [node.inputs[i] for i in chosen if i < len(node.inputs)]
    return tuple(v for v in values if v is not None and constant(v) is None)


def _unit(nodes: list[ir.Node], anchor: ir.Node, inputs: Iterable[ir.Value | None], *, op: str) -> Unit:
    """Return the unit of `nodes`, in execution order, with the name of `anchor`."""
    inner = {output for node in nodes for output in node.outputs}
    read = [v for v in inputs if v is not None and v not in inner and constant(v) is None]
    written = [o for n in nodes for o in n.outputs if n is nodes[-1] or o.is_graph_output() or _read_outside(o, nodes)]
    return Unit(
        name=node_name(anchor),
        op=op,
        nodes=tuple(map(node_name, nodes)),
        inputs=tuple(dict.fromkeys(str(v.name) for v in read)),
        outputs=tuple(str(v.name) for v in written if v.name),
    )


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the inputs of a graph and the results of its nodes, in execution order."""
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _read_outside(value: ir.Value, nodes: list[ir.Node]) -> bool:
    """Whether another node than these reads a tensor."""
    return any(use.node not in nodes for use in value.uses())


def _absorbed(node: ir.Node, row: Op | None, taken: set[ir.Node]) -> list[ir.Node]:
    """Return the Relu or Clip behind `node` that runs inside the kernel of the unit with this row, if any."""
    if row is None or len(node.outputs) != 1:
        return []
    reader = sole_reader(node.outputs[0])
    if reader is None or reader in taken or reader.op_type not in row.absorbs or reader.domain:
        return []
    if reader.op_type == "Clip" and clip_bounds(reader) is None:
        return []
    return [reader]


def _fan_out_group(source: ir.Value) -> list[ir.Node]:
    """Return the nodes from the readers of `source` to the first node where all their results join.

    The result is empty if `source` has one reader, if one of the nodes is not in `CHEAP`, or if there are more than
    `GROUP_LIMIT` nodes.
    """
    readers = {use.node for use in source.uses()}
    if len(readers) < 2 or source.is_graph_output():
        return []
    region: list[ir.Node] = []
    reached: set[ir.Value] = {source}
    waiting = set(readers)
    graph = source.graph
    while waiting and len(region) < GROUP_LIMIT:
        # by name, so that the result does not depend on the order of a set
        ready = next((n for n in sorted(waiting, key=node_name) if _inputs_reached(n, reached)), None)
        if ready is None or ready.op_type not in CHEAP or ready.domain or ready.graph is not graph:
            return []
        waiting.discard(ready)
        region.append(ready)
        reached.update(ready.outputs)
        if not waiting and len(region) > 1:
            return region
        if any(output.is_graph_output() for output in ready.outputs):
            return []
        waiting.update(use.node for output in ready.outputs for use in output.uses())
    return []


def _inputs_reached(node: ir.Node, reached: set[ir.Value]) -> bool:
    """Whether all activations of `node` come from the region."""
    return all(v is None or v in reached or constant(v) is not None for v in node.inputs)
