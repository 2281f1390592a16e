"""`diff_models`: whether two models are equal, and their differences.

With names, nodes are paired by the names of their outputs. With `Ignored.names`, every tensor has a hash of the
computation that makes it, and nodes with equal hashes are paired, wherever they stand. The remaining nodes are aligned,
so that a changed node is one difference, and the nodes after it are none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir

from ....system.given import or_default
from ....transforms.pipelines.verify import Port, signature
from ...model.files import load_model
from .diff_graphs import Difference, Ignored, Kind, graph_differences
from .diff_hashes import Hashes


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences of two models.

    Attributes:
        first: Path of the first.
        second: Path of the second.
        found: The differences: of the models, then of nodes in execution order, then of constants.
    """

    first: str
    second: str
    found: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether there are no differences."""
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
    """Compare two models without running them. Large constants are read in blocks.

    The storage of constants and the recorded types and shapes of inner tensors are never differences.

    Raises:
        RequantError: A file is not a model.
    """
    ignored = or_default(ignored, Ignored, "ignored")
    one, other = load_model(first, in_place=True), load_model(second, in_place=True)
    hashes = Hashes()
    found = [*_headers(one, other, ignored), *_ports(one, other, ignored)]
    found += graph_differences(one.graph, other.graph, (), ignored, hashes)
    for key in sorted({*one.functions, *other.functions}):
        name = ".".join(filter(None, key))
        if key not in one.functions or key not in other.functions:
            found.append(Difference("function", "-" if key in one.functions else "+", name))
        else:
            found += graph_differences(one.functions[key], other.functions[key], (name,), ignored, hashes)
    return Differences(os.fspath(first), os.fspath(second), tuple(found))


def _headers(one: ir.Model, other: ir.Model, ignored: Ignored) -> Iterator[Difference]:
    """Compare versions and metadata."""
    if not ignored.versions:
        yield from _entries("format", {"IR version": one.ir_version}, {"IR version": other.ir_version})
        opsets = ({domain or "ai.onnx": v for domain, v in sorted(m.opset_imports.items())} for m in (one, other))
        yield from _entries("opset", *opsets)
    if not ignored.metadata:
        keys = ("producer_name", "producer_version", "domain", "model_version", "doc_string")
        yield from _entries("metadata", *({key: getattr(m, key) or None for key in keys} for m in (one, other)))
        yield from _entries("metadata", one.metadata_props, other.metadata_props)


def _entries(kind: Kind, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Compare entries by key; None stands for an absent entry."""
    for key in dict.fromkeys((*one, *other)):
        a, b = one.get(key), other.get(key)
        if a != b:
            change: Literal["-", "+", "~"] = "-" if b is None else "+" if a is None else "~"
            yield Difference(kind, change, key, f"{a} -> {b}" if change == "~" else str(a if b is None else b))


def _ports(one: ir.Model, other: ir.Model, ignored: Ignored) -> Iterator[Difference]:
    """Compare inputs and outputs by name; these names are never ignored."""
    before, after = signature(one), signature(other)
    sides: tuple[tuple[Kind, Sequence[Port], Sequence[Port]], ...] = (
        ("input", before.inputs, after.inputs),
        ("output", before.outputs, after.outputs),
    )
    for kind, a, b in sides:
        left, right = ({p.name: str(_without_axes(p) if ignored.names else p) for p in ports} for ports in (a, b))
        for name in dict.fromkeys((*left, *right)):
            if name not in right or name not in left:
                yield Difference(kind, "-" if name in left else "+", left.get(name, right.get(name, "")))
            elif left[name] != right[name]:
                yield Difference(kind, "~", name, f"{left[name]} -> {right[name]}")
        if left.keys() == right.keys() and [*left] != [*right]:
            yield Difference("order", "~", f"{kind}s", f"{', '.join(left)} -> {', '.join(right)}")


def _without_axes(port: Port) -> Port:
    """Return a port without the names of its axes."""
    shape = None if port.shape is None else tuple(axis if isinstance(axis, int) else None for axis in port.shape)
    return Port(port.name, port.type, shape)
