"""`diff_models`: whether two models are the same, and in what they differ.

With names, nodes are the same that give a tensor of the same name. Without, every tensor has a hash of what computes
it, down to the graph's inputs and the bits of constants: a node is the same as one that computes the same, whatever
it is called and wherever it stands, and nodes that compute the same are counted. What is left then is aligned from the
outputs backwards, so that a changed node is told as one and not as all that follow it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from ....transforms.graph import node_name
from ....transforms.verify import Port, signature
from ...model.files import load_model
from .diff_weights import apart, digest, equal, whereabouts
from .inspect import spelled

Kind = Literal["format", "opset", "metadata", "input", "output", "function", "node", "weight", "order", "name"]
GraphLike: TypeAlias = ir.Graph | ir.Function
Hash: TypeAlias = bytes
GRAPHS = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})


@dataclass(frozen=True, slots=True)
class Ignored:
    """What may differ.

    Attributes:
        names: Names of nodes, of tensors inside the graph and of free axes.
        order: The order of nodes, where the graph leaves it open.
        metadata: ``metadata_props``, producer and documentation.
        versions: The version of the format, and those of operator sets.
    """

    names: bool = False
    order: bool = False
    metadata: bool = False
    versions: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        kind: Of what: ``node``, ``weight``, ``opset``.
        change: ``-`` only in the first model, ``+`` only in the second, ``~`` in both but not the same.
        what: The thing, for instance ``conv1 (Conv)``; in a body behind the node that has it.
        text: How it differs; empty where it is in one model alone.
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
        return {"kind": self.kind, "change": self.change, "what": self.what, "text": self.text}


@dataclass(frozen=True, slots=True)
class Differences:
    """How two models differ.

    Attributes:
        first: Path of the first.
        second: Path of the second.
        found: The differences: of the models, then of nodes, in topological order, then of constants.
    """

    first: str
    second: str
    found: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether there are none."""
        return not self.found

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "first": self.first,
            "second": self.second,
            "equal": self.equal,
            "differences": [each.to_json() for each in self.found],
        }


def diff_models(
    first: str | os.PathLike[str], second: str | os.PathLike[str], ignored: Ignored | None = None
) -> Differences:
    """Tell in what two models differ; nothing is run, and large constants are read in blocks.

    How constants are stored makes no difference, nor what a model says of the types and shapes of inner tensors.

    Raises:
        RequantError: A file is not a model.
    """
    ignored = ignored or Ignored()
    one, other = load_model(first, in_place=True), load_model(second, in_place=True)
    found = [*_formats(one, other, ignored), *_ports(one, other, ignored)]
    comparison = _Comparison(ignored)
    found += comparison.graphs(one.graph, other.graph, ())
    for name in sorted({*one.functions, *other.functions}):
        called = ".".join(filter(None, name))
        if name not in one.functions or name not in other.functions:
            found.append(Difference("function", "-" if name in one.functions else "+", called))
        else:
            found += comparison.graphs(one.functions[name], other.functions[name], (called,))
    return Differences(os.fspath(first), os.fspath(second), tuple(found))


def _formats(one: ir.Model, other: ir.Model, ignored: Ignored) -> Iterator[Difference]:
    """Compare what is said of models as a whole."""
    if not ignored.versions:
        yield from _values("format", {"IR version": one.ir_version}, {"IR version": other.ir_version})
        opsets = ({domain or "ai.onnx": v for domain, v in sorted(m.opset_imports.items())} for m in (one, other))
        yield from _values("opset", *opsets)
    if not ignored.metadata:
        said = ("producer_name", "producer_version", "domain", "model_version", "doc_string")
        yield from _values("metadata", *({key: getattr(m, key) or None for key in said} for m in (one, other)))
        yield from _values("metadata", one.metadata_props, other.metadata_props)


def _values(kind: Kind, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Compare entries by their keys; None is none."""
    for key in dict.fromkeys((*one, *other)):
        a, b = one.get(key), other.get(key)
        if a != b:
            change: Literal["-", "+", "~"] = "-" if b is None else "+" if a is None else "~"
            yield Difference(kind, change, key, f"{a} -> {b}" if change == "~" else str(a if b is None else b))


def _ports(one: ir.Model, other: ir.Model, ignored: Ignored) -> Iterator[Difference]:
    """Compare inputs and outputs, which have names in any case."""
    before, after = signature(one), signature(other)
    sides: tuple[tuple[Kind, Sequence[Port], Sequence[Port]], ...] = (
        ("input", before.inputs, after.inputs),
        ("output", before.outputs, after.outputs),
    )
    for kind, a, b in sides:
        left, right = ({port.name: str(_plain(port) if ignored.names else port) for port in ports} for ports in (a, b))
        for name in dict.fromkeys((*left, *right)):
            if name not in right or name not in left:
                yield Difference(kind, "-" if name in left else "+", left.get(name, right.get(name, "")))
            elif left[name] != right[name]:
                yield Difference(kind, "~", name, f"{left[name]} -> {right[name]}")
        if left.keys() == right.keys() and [*left] != [*right]:
            yield Difference("order", "~", f"{kind}s", f"{', '.join(left)} -> {', '.join(right)}")


def _plain(port: Port) -> Port:
    """Return a port without the names of its axes."""
    shape = None if port.shape is None else tuple(axis if isinstance(axis, int) else None for axis in port.shape)
    return Port(port.name, port.type, shape)


Pairs: TypeAlias = dict[ir.Node, ir.Node]


@dataclass(frozen=True, slots=True)
class _Aligned:
    """Two graphs and which node of the one is which of the other.

    Attributes:
        one: The first graph.
        other: The second graph.
        inside: The nodes and attributes whose bodies they are, outermost first.
        pairs: The partner of each node of the first that has one.
        same: Those that compute the same.
        weights: What was told of constants, by both, so that each is told of once.
        partners: The nodes of the second graph that have one.
    """

    one: GraphLike
    other: GraphLike
    inside: tuple[str, ...]
    pairs: Pairs
    same: frozenset[ir.Node] = frozenset()
    weights: dict[tuple[int, int], Difference] = field(default_factory=dict)
    partners: set[ir.Node] = field(default_factory=set)

    def place(self, what: ir.Node | str) -> str:
        """Write where something is."""
        name = _short(what) if isinstance(what, ir.Node) else what
        return " > ".join((*self.inside, name))

    def explained(self, a: ir.Value, b: ir.Value) -> bool:
        """Whether tensors differ because they come from nodes without partners, which are told of."""
        node, partner = a.producer(), b.producer()
        alone = node is not None and node not in self.pairs
        return alone or (partner is not None and partner not in self.partners)


@dataclass
class _Comparison:
    """A comparison of graphs, with what is known of their tensors so far.

    Attributes:
        ignored: What may differ.
        hashes: What computes a tensor, without names.
        constants: Hashes of constants.
        nodes: Hashes of nodes.
    """

    ignored: Ignored
    hashes: dict[ir.Value, Hash] = field(default_factory=dict)
    constants: dict[object, tuple[ir.TensorProtocol, Hash]] = field(default_factory=dict)
    nodes: dict[ir.Node, Hash] = field(default_factory=dict)

    def graphs(self, one: GraphLike, other: GraphLike, inside: tuple[str, ...]) -> list[Difference]:
        """Compare the nodes and constants of two graphs."""
        if self.ignored.names:
            self._hash_graph(one, named=not inside)
            self._hash_graph(other, named=not inside)
            both = self._aligned(one, other, inside)
        else:
            both = _Aligned(one, other, inside, _by_name(one, other))
        both.partners.update(both.pairs.values())
        found = list(_lonely(both))
        for node in one:
            if node in both.pairs and node not in both.same:
                found += self._node(node, both.pairs[node], both)
        if not self.ignored.order:
            found += _order(both)
        found += self._results(both) if self.ignored.names else [*_result_names(both), *self._initializers(both)]
        return [*found, *both.weights.values()]

    # --- hashes of what computes a tensor

    def _hash_graph(self, graph: GraphLike, *, named: bool) -> None:
        """Hash every tensor and node of a graph; inputs by name, or by place in bodies and functions."""
        for place, value in enumerate(graph.inputs):
            self.hashes[value] = _hash("input", value.name if named else place, self._constant(value.const_value))
        for node in graph:
            inputs = [self._of(value) for value in _trimmed(node.inputs)]
            bodies = [self._body(body) for _, body in _bodies(node)]
            own = (node.domain, node.op_type, node.overload, len(node.outputs), self._attributes(node))
            self.nodes[node] = _hash(*own, *inputs, *bodies)
            for place, value in enumerate(node.outputs):
                self.hashes[value] = _hash(self.nodes[node], place)

    def _body(self, body: ir.Graph) -> Hash:
        """Return a hash of a body; its nodes are counted, so that those which nothing reads are too."""
        self._hash_graph(body, named=False)
        return _hash(*(self._of(value) for value in body.outputs), *sorted(self.nodes[node] for node in body))

    def _of(self, value: ir.Value | None) -> Hash:
        """Return the hash of a tensor."""
        if value is None:
            return b""
        if value not in self.hashes:  # an initializer, which a caller may override where it is an input too
            self.hashes[value] = _hash("constant", self._constant(value.const_value))
        return self.hashes[value]

    def _constant(self, tensor: ir.TensorProtocol | None) -> Hash:
        """Return the hash of a constant."""
        if tensor is None:
            return b""
        key = whereabouts(tensor)
        if key not in self.constants:
            self.constants[key] = tensor, digest(tensor)  # with the tensor, so that its id stays its own
        return self.constants[key][1]

    def _attributes(self, node: ir.Node) -> Hash:
        """Return the hash of a node's attributes without its bodies."""
        return _hash(*sorted((name, self._attribute(attr)) for name, attr in node.attributes.items()))

    def _attribute(self, attr: ir.Attr) -> Any:
        """Return what tells an attribute from another one."""
        if attr.is_ref():
            return ("ref", attr.ref_attr_name)
        if attr.type is ir.AttributeType.TENSOR:
            return self._constant(attr.as_tensor())
        if attr.type is ir.AttributeType.TENSORS:
            return [self._constant(tensor) for tensor in attr.as_tensors()]
        if attr.type in GRAPHS:
            return (attr.type.name, "body")
        value = attr.value
        return (attr.type.name, repr(list(value) if isinstance(value, (list, tuple)) else value))

    # --- which node of the one is which of the other

    def _aligned(self, one: GraphLike, other: GraphLike, inside: tuple[str, ...]) -> _Aligned:
        """Pair the nodes of two graphs."""
        waiting = defaultdict[Hash, list[ir.Node]](list)
        for node in reversed(list(other)):
            waiting[self.nodes[node]].append(node)
        pairs: Pairs = {node: waiting[self.nodes[node]].pop() for node in one if waiting[self.nodes[node]]}
        same = frozenset(pairs)
        for strict in (True, False):
            self._from_the_end(one, other, pairs, strict=strict)
        self._from_the_start(one, other, pairs)
        return _Aligned(one, other, inside, pairs, same)

    def _from_the_end(self, one: GraphLike, other: GraphLike, pairs: Pairs, *, strict: bool) -> None:
        """Pair nodes that give what paired nodes, or the outputs, read in the same places."""
        taken = set(pairs.values())
        own, theirs = set(one), set(other)
        todo: list[tuple[ir.Value | None, ir.Value | None]] = list(_outputs(one, other))
        todo += [pair for nodes in pairs.items() for pair in zip(*(node.inputs for node in nodes), strict=False)]
        for a, b in todo:  # grows while it is read
            node, partner = (value.producer() if value is not None else None for value in (a, b))
            if node not in own or partner not in theirs or node in pairs or partner in taken:
                continue
            assert node is not None
            assert partner is not None
            if _index(a) == _index(b) and self._alike(node, partner, strict=strict):
                pairs[node] = partner
                taken.add(partner)
                todo += list(zip(node.inputs, partner.inputs, strict=True))

    def _from_the_start(self, one: GraphLike, other: GraphLike, pairs: Pairs) -> None:
        """Pair nodes of one operator that read the results of paired nodes, or the same inputs.

        Nodes between that have no partner are passed over.
        """
        taken = set(pairs.values())
        waiting = defaultdict[str, list[ir.Node]](list)
        for partner in other:
            if partner not in taken:
                waiting[spelled(partner)].append(partner)
        for node in one:
            if node in pairs:
                continue
            for partner in waiting[spelled(node)]:
                if len(node.outputs) == len(partner.outputs) and self._fed_alike(node, partner, pairs, taken):
                    pairs[node] = partner
                    taken.add(partner)
                    waiting[spelled(node)].remove(partner)
                    break

    def _alike(self, node: ir.Node, partner: ir.Node, *, strict: bool) -> bool:
        """Whether two nodes may be the same one: the operator; where strict, also attributes and constants."""
        if spelled(node) != spelled(partner) or len(node.outputs) != len(partner.outputs):
            return False
        if [v is None for v in node.inputs] != [v is None for v in partner.inputs]:
            return False
        if not strict:
            return True
        held = [tuple(self._of(v) for v in each.inputs if _held(v)) for each in (node, partner)]
        return held[0] == held[1] and self._attributes(node) == self._attributes(partner)

    def _fed_alike(self, node: ir.Node, partner: ir.Node, pairs: Pairs, taken: set[ir.Node]) -> bool:
        """Whether all computed inputs of two nodes correspond, and there is one that does."""
        inputs = [
            [_behind(v, known) for v in each.inputs if v is not None and not _held(v)]
            for each, known in ((node, pairs.keys()), (partner, taken))
        ]
        if not inputs[0] or len(inputs[0]) != len(inputs[1]):
            return False
        return all(self._correspond(a, b, pairs) for a, b in zip(*inputs, strict=True))

    def _correspond(self, a: ir.Value | None, b: ir.Value | None, pairs: Pairs) -> bool:
        """Whether two tensors are the same, or are given by paired nodes."""
        if a is None or b is None:
            return a is b
        node, partner = a.producer(), b.producer()
        if node is not None and partner is not None and pairs.get(node) is partner:
            return a.index() == b.index()
        return self._of(a) == self._of(b)

    # --- what is told

    def _node(self, node: ir.Node, partner: ir.Node, both: _Aligned) -> Iterator[Difference]:
        """Compare two nodes that are meant to be the same."""
        place = both.place(node)
        if spelled(node) != spelled(partner):
            yield Difference("node", "~", place, f"{spelled(node)} -> {spelled(partner)}")
            return
        for name in dict.fromkeys((*node.attributes, *partner.attributes)):
            a, b = (each.attributes.get(name) for each in (node, partner))
            if (None if a is None else self._attribute(a)) != (None if b is None else self._attribute(b)):
                yield Difference("node", "~", place, f"{name} {_shown(a)} -> {_shown(b)}")
        yield from self._edges(node, partner, both) if self.ignored.names else _names(node, partner, place)
        theirs = dict(_bodies(partner))
        for name, body in _bodies(node):
            if name in theirs:
                yield from self.graphs(body, theirs[name], (*both.inside, f"{node_name(node)} {name}"))

    def _edges(self, node: ir.Node, partner: ir.Node, both: _Aligned) -> Iterator[Difference]:
        """Compare what two nodes read, whatever it is called."""
        before, after = _trimmed(node.inputs), _trimmed(partner.inputs)
        if len(before) != len(after):
            yield Difference("node", "~", both.place(node), f"reads {len(before)} tensors -> {len(after)}")
        for a, b in zip(before, after, strict=False):
            if a is not None and b is not None:
                yield from self._read(a, b, both, f"{both.place(node)}: reads")
            elif a is not b:
                text = f"reads {a and a.name!r} -> {b and b.name!r}"
                yield Difference("node", "~", both.place(node), text)

    def _read(self, a: ir.Value, b: ir.Value, both: _Aligned, where: str) -> Iterator[Difference]:
        """Compare two tensors that are read in the same place."""
        if self._correspond(a, b, both.pairs):
            return
        if _held(a) and _held(b):
            key = id(a.const_value), id(b.const_value)
            if key not in both.weights:
                both.weights[key] = _weight(both.place(str(a.name)), a, b)
        elif not both.explained(a, b):
            place, _, verb = where.rpartition(": ")
            yield Difference("node", "~", place, f"{verb} {a.name!r} -> {b.name!r}")

    def _results(self, both: _Aligned) -> Iterator[Difference]:
        """Compare what graphs give, whatever it is called."""
        for a, b in _outputs(both.one, both.other):
            yield from self._read(a, b, both, f"{both.place('outputs')}: gives")

    def _initializers(self, both: _Aligned) -> Iterator[Difference]:
        """Compare constants by name."""
        left, right = (g.initializers if isinstance(g, ir.Graph) else {} for g in (both.one, both.other))
        for name in dict.fromkeys((*left, *right)):
            if name not in left or name not in right:
                yield Difference("weight", "-" if name in left else "+", both.place(name))
            elif not _equal(left[name].const_value, right[name].const_value):
                yield _weight(both.place(name), left[name], right[name])


def _lonely(both: _Aligned) -> Iterator[Difference]:
    """Tell of nodes that are in one graph alone, in the order of each."""
    for node in both.one:
        if node not in both.pairs:
            yield Difference("node", "-", both.place(node))
    for node in both.other:
        if node not in both.partners:
            yield Difference("node", "+", both.place(node))


def _equal(one: ir.TensorProtocol | None, other: ir.TensorProtocol | None) -> bool:
    return one is other or (one is not None and other is not None and equal(one, other))


def _hash(*parts: Any) -> Hash:
    """Return a hash of things that `repr` tells apart."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def _trimmed(values: Sequence[ir.Value | None]) -> Sequence[ir.Value | None]:
    """Return inputs without those left out at the end."""
    count = len(values)
    while count and values[count - 1] is None:
        count -= 1
    return values[:count]


def _bodies(node: ir.Node) -> list[tuple[str, ir.Graph]]:
    """Return the bodies of a node by attribute."""
    found: list[tuple[str, ir.Graph]] = []
    for name, attr in node.attributes.items():
        if attr.type is ir.AttributeType.GRAPH and not attr.is_ref():
            found.append((name, attr.as_graph()))
        elif attr.type is ir.AttributeType.GRAPHS and not attr.is_ref():
            found += [(f"{name}[{place}]", graph) for place, graph in enumerate(attr.as_graphs())]
    return sorted(found, key=lambda pair: pair[0])


def _outputs(one: GraphLike, other: GraphLike) -> list[tuple[ir.Value, ir.Value]]:
    """Pair what two graphs give, by name where all names agree."""
    theirs = {value.name: value for value in other.outputs}
    if {value.name for value in one.outputs} == set(theirs):
        return [(value, theirs[value.name]) for value in one.outputs]
    return list(zip(one.outputs, other.outputs, strict=False))


def _index(value: ir.Value | None) -> int | None:
    return None if value is None else value.index()


def _held(value: ir.Value | None) -> bool:
    """Whether a tensor is an initializer."""
    return value is not None and value.producer() is None and value.const_value is not None


def _behind(value: ir.Value, known: Collection[ir.Node]) -> ir.Value:
    """Return where a tensor comes from through nodes that are not known, by the first input of each."""
    node = value.producer()
    while node is not None and node not in known and node.inputs and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _by_name(one: GraphLike, other: GraphLike) -> Pairs:
    """Pair nodes of one operator and one name or with a result of one name, then others with such a result."""
    found: Pairs = {}
    taken: set[ir.Node] = set()
    for by_node, same_operator in ((False, True), (True, True), (False, False)):
        theirs: dict[str | None, ir.Node] = {}
        for partner in other:
            if partner not in taken:
                theirs.update(dict.fromkeys(_called(partner, by_node=by_node), partner))
        for node in one:
            named = [theirs[name] for name in _called(node, by_node=by_node) if name in theirs]
            if node in found or not named or named[0] in taken:
                continue
            if not same_operator or spelled(node) == spelled(named[0]):
                found[node] = named[0]
                taken.add(named[0])
    return found


def _called(node: ir.Node, *, by_node: bool) -> list[str]:
    """Return a node's name, or the names of its results."""
    if by_node:
        return [node.name] if node.name else []
    return [value.name for value in node.outputs if value.name]


def _result_names(both: _Aligned) -> Iterator[Difference]:
    """Compare the names of what bodies and functions give; those of a model are compared with its ports."""
    names = [", ".join(str(value.name) for value in graph.outputs) for graph in (both.one, both.other)]
    if both.inside and names[0] != names[1]:
        yield Difference("node", "~", both.place("outputs"), f"gives {names[0]} -> {names[1]}")


def _names(node: ir.Node, partner: ir.Node, place: str) -> Iterator[Difference]:
    """Compare the names of nodes and of what they read and give."""
    if node.name != partner.name and not (_numbered(node) and _numbered(partner)):
        yield Difference("name", "~", place, f"{node.name!r} -> {partner.name!r}")
    for title, before, after in (("reads", node.inputs, partner.inputs), ("gives", node.outputs, partner.outputs)):
        a, b = ([value.name if value is not None else "" for value in _trimmed(values)] for values in (before, after))
        if a != b:
            yield Difference("node", "~", place, f"{title} {', '.join(map(str, a))} -> {', '.join(map(str, b))}")


def _numbered(node: ir.Node) -> bool:
    """Whether a node's name may be one that it got when the file was read, because it had none."""
    return re.fullmatch(rf"{re.escape(node.op_type)}(_\d+)?", node.name or "") is not None


def _order(both: _Aligned) -> Iterator[Difference]:
    """Tell where the order of paired nodes is another one first."""
    paired = [node for node in both.one if node in both.pairs]
    for node, partner in zip(paired, (node for node in both.other if node in both.partners), strict=True):
        if both.pairs[node] is not partner:
            text = f"{_short(node)} stands where {_short(partner)} does"
            yield Difference("order", "~", both.place("nodes"), text)
            return


def _short(node: ir.Node) -> str:
    return f"{node_name(node)} ({spelled(node)})"


def _weight(place: str, a: ir.Value, b: ir.Value) -> Difference:
    """Tell how two constants differ."""
    one, other = a.const_value, b.const_value
    assert one is not None
    assert other is not None
    kinds = [f"{ir.DataType(tensor.dtype).name} {[int(n) for n in tensor.shape.numpy()]}" for tensor in (one, other)]
    if kinds[0] != kinds[1]:
        return Difference("weight", "~", place, f"{kinds[0]} -> {kinds[1]}")
    return Difference("weight", "~", f"{place} {kinds[0]}", str(apart(one, other)))


def _shown(attr: ir.Attr | None) -> str:
    """Write the value of an attribute, in short."""
    if attr is None:
        return "(none)"
    if attr.is_ref():
        return f"@{attr.ref_attr_name}"
    if attr.type is ir.AttributeType.TENSOR:
        tensor = attr.as_tensor()
        if tensor.size > 8:
            return f"{ir.DataType(tensor.dtype).name} {[int(n) for n in tensor.shape.numpy()]}"
        return str(tensor.numpy().tolist())
    value = attr.value
    if attr.type in GRAPHS or attr.type is ir.AttributeType.TENSORS:
        return attr.type.name.lower()
    return str(list(value) if isinstance(value, (list, tuple)) else value)
