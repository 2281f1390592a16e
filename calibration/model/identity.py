"""Fingerprints of models, digests of the computation of single tensors, and the differences between two models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...system.given import check_kind
from ...system.printable import number_of
from ...system.regular import check_stored
from .bodies import graphs_in

if TYPE_CHECKING:
    import onnx_ir as ir

DIGITS = 16
"""The number of hex digits in a tensor's digest."""
LONG = 64
"""An attribute with more numbers is one text: a forest of trees has a hundred thousand of them."""
SHOWN = 3
"""The number of tensor names in a message; further tensors are only counted."""


def fingerprint(model: ir.Model) -> str:
    """Return the SHA-256, in hex, of a model's nodes, names of values, constants and opsets.

    Doc strings, metadata, node names, inferred shapes and the storage of constants do not change it.
    Constants are read one at a time.

    Raises:
        RequantError: It is no model, or constants in external files cannot be read.
    """
    import onnx_ir as ir

    check_kind(model, ir.Model, "fingerprint takes an onnx_ir.Model, as onnx_ir.load returns it")
    return _hashed(partial(_model_parts, model)).hex()


def _model_parts(model: ir.Model, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield a model as a sequence of texts, and pass the bytes of constants to `data` in between."""
    yield repr(sorted(model.opset_imports.items()))
    yield from _graph_parts(model.graph, data)
    for identifier, function in sorted(model.functions.items()):
        yield repr(identifier)
        yield from _function_parts(function, data)


def _function_parts(function: ir.Function, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield a function as a sequence of texts."""
    yield repr(sorted(function.opset_imports.items()))
    yield repr(sorted(function.attributes))
    yield from _graph_parts(function, data)


def _graph_parts(graph: ir.Graph | ir.Function, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield a graph as a sequence of texts, and pass the bytes of constants to `data` in between."""
    for kind, values in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        yield f"{kind} {[(value.name, str(value.type), str(value.shape)) for value in values]}"
    for name, value in sorted(getattr(graph, "initializers", {}).items()):
        yield f"initializer {name}"
        if value.const_value is not None:
            yield from _tensor_parts(value.const_value, data)
    for node in graph:
        names = [value.name if value is not None else None for value in node.inputs]
        yield f"node {node.op_identifier()} {names} {[value.name for value in node.outputs]}"
        for name, attribute in sorted(node.attributes.items()):
            yield f"attribute {name} {attribute.type}"
            yield from _attribute_parts(attribute, data)


def _attribute_parts(attribute: ir.Attr, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield the value of an attribute, including tensors and graphs."""
    import onnx_ir as ir

    if attribute.is_ref():
        yield f"reference {attribute.ref_attr_name}"
        return
    values = attribute.value if isinstance(attribute.value, (list, tuple)) else [attribute.value]
    if len(values) > LONG and not isinstance(values[0], (ir.Graph, ir.TensorProtocol)):
        values = [tuple(values)]
    for value in values:
        if isinstance(value, ir.Graph):
            yield from _graph_parts(value, data)
        elif isinstance(value, ir.TensorProtocol):
            yield from _tensor_parts(value, data)
        else:
            yield repr(value)
    yield "end"


def _tensor_parts(tensor: ir.TensorProtocol, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield a tensor's type and shape, and pass its bytes to `data`."""
    import onnx_ir as ir

    yield f"tensor {tensor.dtype} {tensor.shape}"
    if isinstance(tensor, ir.ExternalTensor):
        check_stored(tensor)
    if tensor.dtype == ir.DataType.STRING:
        yield repr(tensor.numpy().tolist())
    else:
        data(tensor.tobytes())
        if isinstance(tensor, ir.ExternalTensor):
            tensor.release()  # unmaps the file; mapped pages count as memory


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences between the tensors of two models, each list in the order of the graph.

    Attributes:
        begin: Tensors of both models whose own operator differs; the operator's inputs are computed identically.
        follow: Tensors of both models that differ because they depend on a tensor in `begin`.
        theirs: Tensors that only the other model has.
        ours: Tensors that only this model has.
    """

    begin: Sequence[str]
    follow: Sequence[str]
    theirs: Sequence[str]
    ours: Sequence[str]

    def __str__(self) -> str:
        """Return the first names of each kind.

        For example ``"computed differently: 'a', and 4 tensors after it; only in the file: 'b'"``.
        """
        parts = []
        if self.begin:
            count = number_of(len(self.follow), "tensor")
            more = f", and {count} after {'it' if len(self.begin) == 1 else 'them'}" if self.follow else ""
            parts.append(f"computed differently: {listed(self.begin)}{more}")
        if self.theirs:
            parts.append(f"only in the file: {listed(self.theirs)}")
        if self.ours:
            parts.append(f"only in this model: {listed(self.ours)}")
        return "; ".join(parts) or "the tensors with ranges are equal, but other tensors, names or shapes differ"


def listed(names: Sequence[str]) -> str:
    """Return ``"'a', 'b', 'c' and 4 more"``."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


def differences(model: ir.Model, theirs: Mapping[str, str], tensors: Iterable[str]) -> Differences:
    """Compare this model's tensors with the digests of another model's.

    Args:
        model: This model.
        theirs: The digests of the other model's tensors, from `tensor_digests`.
        tensors: The names of this model's tensors to compare.
    """
    names = dict.fromkeys(tensors)
    ours = tensor_digests(model, {*names, *theirs})
    differing = {name for name, digest in theirs.items() if ours.get(name, digest) != digest}
    begin = _beginnings(model.graph, differing, set())
    return Differences(
        begin=begin,
        follow=[name for name in ours if name in differing and name not in begin],
        theirs=[name for name in theirs if name not in ours],
        ours=[name for name in names if name not in theirs],
    )


def tensor_digests(model: ir.Model, names: Iterable[str]) -> dict[str, str]:
    """Return a digest of the computation of each named tensor, as hex digits, in the order of the graph.

    A digest covers the tensor's operator with version and attributes, and the digests of the operator's inputs (a
    Merkle tree), down to constants and to the names and types of the model's inputs. Other names and shapes do not
    change it. Constants are read one at a time. Unknown names are ignored.
    """
    selected = set(names)
    functions = {name: _hashed(partial(_function_parts, function)) for name, function in model.functions.items()}
    known: dict[ir.Value, bytes] = {}
    _digest_graph(model.graph, b"", _Operators(model.opset_imports, functions), known)
    return {value.name: digest.hex()[:DIGITS] for value, digest in known.items() if value.name in selected}


@dataclass(frozen=True, slots=True)
class _Operators:
    """The definitions of a model's operators.

    Attributes:
        opsets: The version of each domain.
        functions: The digest of each model-local function.
    """

    opsets: Mapping[str, int]
    functions: Mapping[ir.OperatorIdentifier, bytes]

    def __call__(self, node: ir.Node) -> bytes:
        """Return a digest of a node's operator and attributes, without its bodies."""
        identifier = node.op_identifier()
        if identifier in self.functions:
            meaning = self.functions[identifier]
        else:
            meaning = str(self.opsets.get(node.domain)).encode()
        return _hash(repr(identifier).encode(), meaning, _hashed(partial(_plain_parts, node)))


def _plain_parts(node: ir.Node, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield the attributes of a node that are not graphs."""
    for name, attribute in sorted(node.attributes.items()):
        if not graphs_in(attribute):
            yield f"{name} {attribute.type}"
            yield from _attribute_parts(attribute, data)


def _digest_graph(graph: ir.Graph, context: bytes, operators: _Operators, known: dict[ir.Value, bytes]) -> None:
    """Add the digests of a graph's tensors to `known`.

    Args:
        graph: The main graph or a body.
        context: A digest of the node and attribute of a body, on which the body's inputs depend; empty for the main
            graph.
        operators: The definitions of the operators.
        known: The digests so far, by tensor.
    """
    for index, value in enumerate(graph.inputs):
        place = str(index) if context else str(value.name)
        known[value] = _hash(b"input", context, f"{place} {value.dtype}".encode())
    for value in graph.initializers.values():
        if value.const_value is not None:
            known[value] = _hash(b"constant", _hashed(partial(_tensor_parts, value.const_value)))
    for node in graph:
        inputs = [b"" if value is None else known.get(value, b"?") for value in node.inputs]
        whole = [_hash(operators(node), *inputs)]
        for name, body in _bodies(node):
            _digest_graph(body, _hash(whole[0], name.encode()), operators, known)
            whole.append(_hash(name.encode(), *(known.get(value, b"?") for value in body.outputs)))
        for index, value in enumerate(node.outputs):
            known[value] = _hash(*whole, str(index).encode())


def _bodies(node: ir.Node) -> list[tuple[str, ir.Graph]]:
    """Return the bodies of a node, each with its attribute and index."""
    return [
        (f"{name} {index}", body)
        for name, attribute in sorted(node.attributes.items())
        for index, body in enumerate(graphs_in(attribute))
    ]


def _beginnings(graph: ir.Graph, differing: set[str], changed: set[ir.Value]) -> list[str]:
    """Return the names of the differing tensors that depend on no other differing tensor.

    Args:
        graph: The main graph or a body.
        differing: The names of all differing tensors.
        changed: The tensors so far that differ or depend on a differing tensor; the function adds to it.
    """
    first = []
    for value in (*graph.inputs, *graph.initializers.values()):
        if value.name in differing:
            first += [value.name] * (value not in changed)
            changed.add(value)
    for node in graph:
        after = any(value in changed for value in node.inputs)
        for _, body in _bodies(node):
            changed.update(body.inputs if after else ())
            first += _beginnings(body, differing, changed)
            after |= any(value in changed for value in body.outputs)
        for value in node.outputs:
            if value.name in differing and not after:
                first.append(value.name)
            if value.name in differing or after:
                changed.add(value)
    return first


def _hash(*parts: bytes) -> bytes:
    """Return the SHA-256 of a sequence of parts with their lengths, so that different sequences differ in bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _hashed(parts: Callable[[Callable[[bytes], None]], Iterator[str]]) -> bytes:
    """Return the SHA-256 of the texts of `parts` and of the bytes that `parts` passes on between them."""
    digest = hashlib.sha256()
    for part in parts(digest.update):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
