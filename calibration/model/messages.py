"""What several modules read from the protobuf message of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

STANDARD = "ai.onnx"
"""The long name of the standard domain, whose short name is empty."""


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the bodies of a node, without the bodies in them."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def with_inner(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, each followed by the nodes in its bodies at any depth."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from with_inner(body.node)
