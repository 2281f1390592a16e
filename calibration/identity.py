"""Which model ranges belong to: a fingerprint of the whole, a digest of what computes each tensor, and differences."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

DIGITS = 16
"""Hex digits of a tensor's digest."""
SHOWN = 3
"""Names of tensors in a message, before the others are counted."""


def fingerprint(model: ir.Model) -> str:
    """Return the SHA-256, in hex, of what a model computes with: nodes, values' names, constants, opsets.

    Doc strings, metadata, node names, inferred shapes and the way constants are stored do not matter.
    Constants are read one at a time.
    """
    return _hashed(partial(_model_parts, model)).hex()


def _model_parts(model: ir.Model, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield a model as a sequence of texts; the bytes of constants go to `data` in between."""
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
    """Yield a graph as a sequence of texts; the bytes of constants go to `data` in between."""
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
    """Yield the value of an attribute, with the tensors and graphs inside it."""
    import onnx_ir as ir

    if attribute.is_ref():
        yield f"reference {attribute.ref_attr_name}"
        return
    several = isinstance(attribute.value, (list, tuple))
    for value in attribute.value if several else [attribute.value]:
        if isinstance(value, ir.Graph):
            yield from _graph_parts(value, data)
        elif isinstance(value, ir.TensorProtocol):
            yield from _tensor_parts(value, data)
        else:
            yield repr(value)
    yield "end"


def _tensor_parts(tensor: ir.TensorProtocol, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield a tensor's type and shape, and hand its bytes to `data`."""
    import onnx_ir as ir

    yield f"tensor {tensor.dtype} {tensor.shape}"
    if tensor.dtype == ir.DataType.STRING:
        yield repr(tensor.numpy().tolist())
    else:
        data(tensor.tobytes())
        if isinstance(tensor, ir.ExternalTensor):
            tensor.release()  # the mapping, whose pages count as memory


@dataclass(frozen=True, slots=True)
class Differences:
    """How the tensors of two models differ, each in the order of the graph.

    Attributes:
        begin: Tensors of both that are computed differently, from tensors that are computed in the same way.
        follow: Tensors of both that are computed differently because one of these is among what they are computed from.
        theirs: Tensors of the other model only.
        ours: Tensors of this model only.
    """

    begin: Sequence[str]
    follow: Sequence[str]
    theirs: Sequence[str]
    ours: Sequence[str]

    def __str__(self) -> str:
        """Name a few of each: ``"computed differently: 'a', then 4 that follow from it; only in the file: 'b'"``."""
        parts = []
        if self.begin:
            those = "it" if len(self.begin) == 1 else "them"
            more = f", then {len(self.follow)} that follow from {those}" if self.follow else ""
            parts.append(f"computed differently: {listed(self.begin)}{more}")
        if self.theirs:
            parts.append(f"only in the file: {listed(self.theirs)}")
        if self.ours:
            parts.append(f"only in this model: {listed(self.ours)}")
        return "; ".join(parts) or "all tensors with ranges are computed alike, other tensors, names or shapes differ"


def listed(names: Sequence[str]) -> str:
    """Return ``"'a', 'b', 'c' and 4 more"``."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


def differences(model: ir.Model, theirs: Mapping[str, str], tensors: Iterable[str]) -> Differences:
    """Compare the digests of another model's tensors with those of `tensors` of this one."""
    wanted = dict.fromkeys(tensors)
    ours = tensor_digests(model, {*wanted, *theirs})
    differing = {name for name, digest in theirs.items() if ours.get(name, digest) != digest}
    begin = _beginnings(model.graph, differing, set())
    return Differences(
        begin=begin,
        follow=[name for name in ours if name in differing and name not in begin],
        theirs=[name for name in theirs if name not in ours],
        ours=[name for name in wanted if name not in theirs],
    )


def tensor_digests(model: ir.Model, names: Iterable[str]) -> dict[str, str]:
    """Return what computes each of the named tensors, as hex digits, in the order of the graph.

    The digest of a tensor is that of its operator with version and attributes, of constants, and of the digests of the
    operator's inputs (a Merkle tree), down to names and types of the model's inputs. Other names do not matter, nor do
    shapes. Constants are read one at a time. Names of no tensor of the graph or of a body in it are left out.
    """
    wanted = set(names)
    functions = {name: _hashed(partial(_function_parts, function)) for name, function in model.functions.items()}
    known: dict[ir.Value, bytes] = {}
    _digest_graph(model.graph, b"", _Operators(model.opset_imports, functions), known)
    return {value.name: digest.hex()[:DIGITS] for value, digest in known.items() if value.name in wanted}


@dataclass(frozen=True, slots=True)
class _Operators:
    """What operators mean in a model.

    Attributes:
        opsets: The version of each domain.
        functions: The digest of each function.
    """

    opsets: Mapping[str, int]
    functions: Mapping[ir.OperatorIdentifier, bytes]

    def __call__(self, node: ir.Node) -> bytes:
        """Return a digest of a node's operator and plain attributes; graphs inside it are left out."""
        identifier = node.op_identifier()
        if identifier in self.functions:
            meaning = self.functions[identifier]
        else:
            meaning = str(self.opsets.get(node.domain)).encode()
        return _hash(repr(identifier).encode(), meaning, _hashed(partial(_plain_parts, node)))


def _plain_parts(node: ir.Node, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield the attributes of a node that are no graphs."""
    for name, attribute in sorted(node.attributes.items()):
        if not _graphs(attribute):
            yield f"{name} {attribute.type}"
            yield from _attribute_parts(attribute, data)


def _graphs(attribute: ir.Attr) -> list[ir.Graph]:
    """Return the graphs in an attribute."""
    import onnx_ir as ir

    values = attribute.value if isinstance(attribute.value, (list, tuple)) else [attribute.value]
    return [value for value in values if isinstance(value, ir.Graph)]


def _digest_graph(graph: ir.Graph, context: bytes, operators: _Operators, known: dict[ir.Value, bytes]) -> None:
    """Find the digests of a graph's tensors; `context` is what the inputs of a body depend on, nothing at the top."""
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
    """Return the graphs inside a node, by attribute and place in it."""
    return [
        (f"{name} {index}", body)
        for name, attribute in sorted(node.attributes.items())
        for index, body in enumerate(_graphs(attribute))
    ]


def _beginnings(graph: ir.Graph, differing: set[str], changed: set[ir.Value]) -> list[str]:
    """Return the names of the differing tensors that no differing one goes into.

    Args:
        graph: A graph, or a body.
        differing: Names of tensors.
        changed: The tensors found so far that differ, or that one that differs goes into; it grows.
    """
    found = []
    for value in (*graph.inputs, *graph.initializers.values()):
        if value.name in differing:
            found += [value.name] * (value not in changed)
            changed.add(value)
    for node in graph:
        after = any(value in changed for value in node.inputs)
        for _, body in _bodies(node):
            changed.update(body.inputs if after else ())
            found += _beginnings(body, differing, changed)
            after |= any(value in changed for value in body.outputs)
        for value in node.outputs:
            if value.name in differing and not after:
                found.append(value.name)
            if value.name in differing or after:
                changed.add(value)
    return found


def _hash(*parts: bytes) -> bytes:
    """Return the SHA-256 of a sequence; lengths are part of it, so that no two sequences have the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _hashed(parts: Callable[[Callable[[bytes], None]], Iterator[str]]) -> bytes:
    """Return the SHA-256 of texts, and of the bytes that are handed over between them."""
    digest = hashlib.sha256()
    for part in parts(digest.update):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
