"""Build a Concat from the result of an earlier one that has its first inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import computing_graphs, is_standard
from .registry import Change, transform

Parts: TypeAlias = Sequence[ir.Value | None]
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


@transform("nest_concats", after=("merge_duplicate_nodes",))
def nest_concats(model: ir.Model) -> Change:
    """Let a Concat that begins with all inputs of an earlier Concat read the result of that one.

    Before:  p = Concat(a, b);  q = Concat(a, b, c);  r = Concat(a, b, c, d)
    After:   p = Concat(a, b);  q = Concat(p, c);     r = Concat(q, d)
        A layer of a DenseNet reads all results before it: the Concat in front of the n-th layer has n inputs. With two
        it copies the same bytes. The native operator joins four tensors at most, and a chain of them has one scale.
    Left alone: a Concat along another axis or in another graph; integers, which may be lengths that other transforms
        follow, and tensors of unknown type (``not-float``).
    """
    change = Change()
    found = [each for graph in computing_graphs(model) for each in _nested(graph)]
    if not found:
        return change
    known = Known(model)
    for node, whole, rest in found:
        if known.dtype(node.outputs[0]) not in FLOATS:
            change.skip("not-float")
            continue
        for index, value in enumerate((whole, *rest)):
            node.replace_input_with(index, value)
        node.resize_inputs(1 + len(rest))
        change.applied += 1
    return change


def _nested(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value, Parts]]:
    """Yield each Concat that begins with the inputs of an earlier one, the result of that one, and the other inputs."""
    seen: dict[tuple[ir.Value | None, int], list[tuple[Parts, ir.Value]]] = {}
    for node in graph:
        if not is_standard(node, "Concat") or not node.inputs:
            continue
        parts = tuple(node.inputs)
        earlier = seen.setdefault((parts[0], node.attributes.get_int("axis", 0)), [])
        begun = [(first, whole) for first, whole in earlier if len(first) < len(parts) and parts[: len(first)] == first]
        if begun:
            first, whole = max(begun, key=lambda each: len(each[0]))
            yield node, whole, parts[len(first) :]
        earlier.append((parts, node.outputs[0]))
