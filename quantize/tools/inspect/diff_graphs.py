"""The differences of two graphs: of nodes, of their order, and of constants."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

import onnx_ir as ir

from ....calibration.model.bodies import graphs_in
from ....system.given import normalise_fields
from ....transforms.graphs.queries import key, node_name
from .diff_hashes import GraphLike, Hashes, is_constant, trimmed
from .diff_pairs import Pairs, changed_pairs, equal_pairs, pairs_by_name
from .diff_weights import apart, equal

Kind = Literal["format", "opset", "metadata", "input", "output", "function", "node", "weight", "order", "name"]
LONGEST = 8  # elements of a tensor attribute that is printed


@dataclass(frozen=True, slots=True)
class Ignored:
    """The differences that do not count.

    Attributes:
        names: Names of nodes, of inner tensors and of free axes.
        order: The order of independent nodes.
        metadata: ``metadata_props``, producer and documentation.
        versions: The IR version and the versions of operator sets.
    """

    names: bool = False
    order: bool = False
    metadata: bool = False
    versions: bool = False

    def __post_init__(self) -> None:
        """Refuse values of another type.

        Raises:
            RequantError: There is one.
        """
        normalise_fields(self)


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        kind: What differs: ``node``, ``weight``, ``opset``.
        change: ``-`` only in the first model, ``+`` only in the second, ``~`` different in both.
        what: The item, for instance ``conv1 (Conv)``; an item in a body follows the name of the body's node.
        text: The difference; empty for ``-`` and ``+``.
    """

    kind: Kind
    change: Literal["-", "+", "~"]
    what: str
    text: str = ""

    def __str__(self) -> str:
        """Return ``"~ node conv1 (Conv): strides [1, 1] -> [2, 2]"``."""
        return f"{self.change} {self.kind} {self.what}" + (f": {self.text}" if self.text else "")

    def to_json(self) -> dict[str, str]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class GraphPair:
    """Two graphs with their paired nodes.

    Attributes:
        one: The first graph.
        other: The second graph.
        inside: The nodes and attributes around these bodies, outermost first; empty for main graphs.
        ignored: The differences that do not count.
        hashes: The hashes of both graphs.
        pairs: The node of the second graph for each paired node of the first.
        partners: The paired nodes of the second graph.
        same: The nodes of the first graph that compute the same as their partners.
    """

    one: GraphLike
    other: GraphLike
    inside: tuple[str, ...]
    ignored: Ignored
    hashes: Hashes
    pairs: Pairs
    partners: frozenset[ir.Node]
    same: frozenset[ir.Node] = frozenset()

    def place(self, what: ir.Node | str) -> str:
        """Return the text for a node or tensor, with the bodies around it."""
        name = f"{node_name(what)} ({key(what)})" if isinstance(what, ir.Node) else what
        return " > ".join((*self.inside, name))


def graph_differences(
    one: GraphLike, other: GraphLike, inside: tuple[str, ...], ignored: Ignored, hashes: Hashes
) -> list[Difference]:
    """Return the differences of two graphs: nodes in their order, then weights.

    Args:
        one: The first graph.
        other: The second graph.
        inside: The name of the function, or the nodes around the bodies; empty for main graphs.
        ignored: The differences that do not count.
        hashes: The hashes so far; the function adds those of the graphs.
    """
    both = _paired(one, other, inside, ignored, hashes)
    found = [Difference("node", "-", both.place(node)) for node in one if node not in both.pairs]
    found += [Difference("node", "+", both.place(node)) for node in other if node not in both.partners]
    for node in one:
        if node in both.pairs and node not in both.same:
            found += _node(node, both.pairs[node], both)
    found += [] if ignored.order else _order(both)
    found += _outputs(both) if ignored.names else [*_output_names(both), *_initializers(both)]
    weights = dict.fromkeys(each for each in found if each.kind == "weight")  # a weight may have several readers
    return [*(each for each in found if each.kind != "weight"), *weights]


def _paired(one: GraphLike, other: GraphLike, inside: tuple[str, ...], ignored: Ignored, hashes: Hashes) -> GraphPair:
    """Pair the nodes of two graphs."""
    if not ignored.names:
        pairs = pairs_by_name(one, other)
        return GraphPair(one, other, inside, ignored, hashes, pairs, frozenset(pairs.values()))
    for graph in (one, other):
        hashes.add(graph, named=not inside)
    same = equal_pairs(one, other, hashes)
    pairs = same | changed_pairs(one, other, same, hashes)
    return GraphPair(one, other, inside, ignored, hashes, pairs, frozenset(pairs.values()), frozenset(same))


def _node(node: ir.Node, partner: ir.Node, both: GraphPair) -> Iterator[Difference]:
    """Compare two paired nodes."""
    place = both.place(node)
    if key(node) != key(partner):
        yield Difference("node", "~", place, f"{key(node)} -> {key(partner)}")
        return
    for name in dict.fromkeys((*node.attributes, *partner.attributes)):
        a, b = (each.attributes.get(name) for each in (node, partner))
        if both.hashes.attribute(a) != both.hashes.attribute(b):
            yield Difference("node", "~", place, f"{name} {_attribute_text(a)} -> {_attribute_text(b)}")
    yield from _inputs(node, partner, both) if both.ignored.names else _names(node, partner, place)
    theirs = _bodies(partner)
    for name, body in _bodies(node).items():
        if name in theirs:
            inside = (*both.inside, f"{node_name(node)} {name}")
            yield from graph_differences(body, theirs[name], inside, both.ignored, both.hashes)


def _bodies(node: ir.Node) -> dict[str, ir.Graph]:
    """Return the bodies of a node by attribute: ``body``, ``branches[1]``."""
    found: dict[str, ir.Graph] = {}
    for name, attr in sorted(node.attributes.items()):
        several = attr.type is ir.AttributeType.GRAPHS
        found |= {f"{name}[{i}]" if several else name: graph for i, graph in enumerate(graphs_in(attr))}
    return found


def _inputs(node: ir.Node, partner: ir.Node, both: GraphPair) -> Iterator[Difference]:
    """Compare the inputs of two nodes without their names."""
    before, after = trimmed(node.inputs), trimmed(partner.inputs)
    if len(before) != len(after):
        yield Difference("node", "~", both.place(node), f"reads {len(before)} tensors -> {len(after)}")
    for a, b in zip(before, after, strict=False):
        if a is not None and b is not None:
            yield from _tensor(a, b, both, Difference("node", "~", both.place(node), "reads"))
        elif a is not b:
            yield Difference("node", "~", both.place(node), f"reads {a and a.name!r} -> {b and b.name!r}")


def _outputs(both: GraphPair) -> Iterator[Difference]:
    """Compare the outputs of two graphs, by name if all names are equal, else by position."""
    theirs = {value.name: value for value in both.other.outputs}
    named = {value.name for value in both.one.outputs} == set(theirs)
    others = [theirs[value.name] for value in both.one.outputs] if named else both.other.outputs
    for a, b in zip(both.one.outputs, others, strict=False):
        yield from _tensor(a, b, both, Difference("node", "~", both.place("outputs"), "are"))


def _tensor(a: ir.Value, b: ir.Value, both: GraphPair, difference: Difference) -> Iterator[Difference]:
    """Compare two tensors at the same place; the text of `difference` is the verb.

    Tensors that come from nodes without partners are not reported: these nodes are.
    """
    node, partner = a.producer(), b.producer()
    if node is not None and partner is not None and both.pairs.get(node) is partner:
        if a.index() == b.index():
            return
    elif both.hashes.tensor(a) == both.hashes.tensor(b):
        return
    if is_constant(a) and is_constant(b):
        yield _weight(both.place(str(a.name)), a, b)
    elif (node is None or node in both.pairs) and (partner is None or partner in both.partners):
        yield replace(difference, text=f"{difference.text} {a.name!r} -> {b.name!r}")


def _order(both: GraphPair) -> Iterator[Difference]:
    """Report the first paired node at another position."""
    paired = (node for node in both.one if node in both.pairs)
    for node, partner in zip(paired, (node for node in both.other if node in both.partners), strict=True):
        if both.pairs[node] is not partner:
            first, second = (f"{node_name(each)} ({key(each)})" for each in (node, partner))
            yield Difference("order", "~", both.place("nodes"), f"{first} is at the position of {second}")
            return


def _output_names(both: GraphPair) -> Iterator[Difference]:
    """Compare the names of the outputs of bodies and functions; the outputs of models are compared as ports."""
    names = [", ".join(str(value.name) for value in graph.outputs) for graph in (both.one, both.other)]
    if both.inside and names[0] != names[1]:
        yield Difference("node", "~", both.place("outputs"), f"are {names[0]} -> {names[1]}")


def _initializers(both: GraphPair) -> Iterator[Difference]:
    """Compare constants by name."""
    left, right = (g.initializers if isinstance(g, ir.Graph) else {} for g in (both.one, both.other))
    for name in dict.fromkeys((*left, *right)):
        if name not in left or name not in right:
            yield Difference("weight", "-" if name in left else "+", both.place(name))
            continue
        a, b = left[name].const_value, right[name].const_value
        if a is not b and (a is None or b is None or not equal(a, b)):
            yield _weight(both.place(name), left[name], right[name])


def _names(node: ir.Node, partner: ir.Node, place: str) -> Iterator[Difference]:
    """Compare the names of two nodes, of their inputs and of their outputs."""
    if node.name != partner.name and not (_is_numbered(node) and _is_numbered(partner)):
        yield Difference("name", "~", place, f"{node.name!r} -> {partner.name!r}")
    for verb, before, after in (("reads", node.inputs, partner.inputs), ("writes", node.outputs, partner.outputs)):
        a, b = ([value.name if value is not None else "" for value in trimmed(values)] for values in (before, after))
        if a != b:
            yield Difference("node", "~", place, f"{verb} {', '.join(map(str, a))} -> {', '.join(map(str, b))}")


def _is_numbered(node: ir.Node) -> bool:
    """Return whether the name of a node may be a number that it got while the file was read."""
    return re.fullmatch(rf"{re.escape(node.op_type)}(_\d+)?", node.name or "") is not None


def _weight(place: str, a: ir.Value, b: ir.Value) -> Difference:
    """Return the difference of two constants."""
    one, other = a.const_value, b.const_value
    assert one is not None
    assert other is not None
    before, after = (_type_text(tensor) for tensor in (one, other))
    if before != after:
        return Difference("weight", "~", place, f"{before} -> {after}")
    return Difference("weight", "~", f"{place} {before}", str(apart(one, other)))


def _type_text(tensor: ir.TensorProtocol) -> str:
    """Return ``"FLOAT [64, 32]"``."""
    return f"{ir.DataType(tensor.dtype).name} {[int(n) for n in tensor.shape.numpy()]}"


def _attribute_text(attr: ir.Attr | None) -> str:
    """Return the value of an attribute as a short text."""
    if attr is None:
        return "(none)"
    if attr.is_ref():
        return f"@{attr.ref_attr_name}"
    if attr.type is ir.AttributeType.TENSOR:
        tensor = attr.as_tensor()
        return _type_text(tensor) if tensor.size > LONGEST else str(tensor.numpy().tolist())
    if attr.type is ir.AttributeType.TENSORS or graphs_in(attr):
        return attr.type.name.lower()
    return str(list(attr.value) if isinstance(attr.value, (list, tuple)) else attr.value)
