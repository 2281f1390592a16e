"""Hashes of tensors, nodes and attributes without names, for `requant diff --ignore-names`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import onnx_ir as ir

from ....calibration.model.bodies import bodies_of, graphs_in
from ....transforms.graphs.queries import key
from .diff_weights import digest, whereabouts

GraphLike: TypeAlias = ir.Graph | ir.Function
Hash: TypeAlias = bytes


@dataclass(frozen=True, slots=True)
class Hashes:
    """Hashes of the tensors and nodes of two models.

    The hash of a tensor depends on all that computes it, down to the graph's inputs and the bits of constants: tensors
    with equal hashes hold equal values, independent of names and order.

    Attributes:
        tensors: The hash of each tensor.
        nodes: The hash of each node.
        constants: The hash of each constant, with the constant itself, so that its id stays unique.
    """

    tensors: dict[ir.Value, Hash] = field(default_factory=dict)
    nodes: dict[ir.Node, Hash] = field(default_factory=dict)
    constants: dict[object, tuple[ir.TensorProtocol, Hash]] = field(default_factory=dict)

    def add(self, graph: GraphLike, *, named: bool) -> None:
        """Hash every tensor and node of a graph; its inputs by name or, in bodies and functions, by position."""
        for place, value in enumerate(graph.inputs):
            self.tensors[value] = _hash("input", value.name if named else place, self.constant(value.const_value))
        for node in graph:
            inputs = [self.tensor(value) for value in trimmed(node.inputs)]
            bodies = [self._body(body) for body in bodies_of(node)]
            own = (node.domain, node.op_type, node.overload, len(node.outputs), self._attributes(node))
            self.nodes[node] = _hash(*own, *inputs, *bodies)
            for place, value in enumerate(node.outputs):
                self.tensors[value] = _hash(self.nodes[node], place)

    def _body(self, body: ir.Graph) -> Hash:
        """Return the hash of a body: its outputs and all its nodes, also those without readers."""
        self.add(body, named=False)
        return _hash(*(self.tensor(value) for value in body.outputs), *sorted(self.nodes[node] for node in body))

    def tensor(self, value: ir.Value | None) -> Hash:
        """Return the hash of a tensor."""
        if value is None:
            return b""
        if value not in self.tensors:  # an initializer; one that is an input too is hashed as an input
            self.tensors[value] = _hash("constant", self.constant(value.const_value))
        return self.tensors[value]

    def constant(self, tensor: ir.TensorProtocol | None) -> Hash:
        """Return the hash of a constant."""
        if tensor is None:
            return b""
        key = whereabouts(tensor)
        if key not in self.constants:
            self.constants[key] = tensor, digest(tensor)
        return self.constants[key][1]

    def local(self, node: ir.Node) -> Hash:
        """Return a hash of what a node does with its computed inputs: operator, attributes and constants."""
        inputs = [self.tensor(v) if is_constant(v) else v is None for v in trimmed(node.inputs)]
        return _hash(key(node), len(node.outputs), self._attributes(node), *inputs)

    def _attributes(self, node: ir.Node) -> Hash:
        return _hash(*sorted((name, self.attribute(attr)) for name, attr in node.attributes.items()))

    def attribute(self, attr: ir.Attr | None) -> Any:
        """Return a value that is equal for equal attributes; bodies count as equal."""
        if attr is None:
            return None
        if attr.is_ref():
            return ("ref", attr.ref_attr_name)
        if attr.type is ir.AttributeType.TENSOR:
            return self.constant(attr.as_tensor())
        if attr.type is ir.AttributeType.TENSORS:
            return [self.constant(tensor) for tensor in attr.as_tensors()]
        if graphs_in(attr):
            return (attr.type.name, "body")
        value = attr.value
        return (attr.type.name, repr(list(value) if isinstance(value, (list, tuple)) else value))


def _hash(*parts: Any) -> Hash:
    """Return a hash of objects with different `repr`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def trimmed(values: Sequence[ir.Value | None]) -> Sequence[ir.Value | None]:
    """Return the inputs of a node without the absent ones at the end."""
    count = len(values)
    while count and values[count - 1] is None:
        count -= 1
    return values[:count]


def is_constant(value: ir.Value | None) -> bool:
    """Return whether a tensor is an initializer."""
    return value is not None and value.producer() is None and value.const_value is not None
