"""Outputs that a model selects by its own scores: how many there are differs with the last bit of one score."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import onnx_ir as ir

from ...transforms.graph import constant, inferred
from .outputs import Accuracy

SELECTS = frozenset({"Compress", "NonMaxSuppression", "NonZero", "TopK", "Unique"})


def unlike(accuracy: Accuracy) -> list[str]:
    """Return the outputs that have nothing in common, for instance because they are of different length."""
    return [name for name, value in accuracy.sqnr_db.items() if value == -math.inf]


Source = tuple[str | None, int, str]  # a node's name, the index of its input, and how the tensor is called


def selected_from(model: ir.Model) -> list[Source]:
    """Return the float tensors that `SELECTS` operators of a simplified model read."""
    known = inferred(model)
    return [
        (node.name, index, f"{value.name} (into {node.op_type})")
        for node in model.graph
        if node.op_type in SELECTS and not node.domain
        for index, value in enumerate(node.inputs)
        if value is not None and constant(value) is None and _is_float(known.get(str(value.name)))
    ]


def _is_float(value: ir.Value | None) -> bool:
    """Whether a tensor is known to be of floats."""
    return value is not None and value.dtype is ir.DataType.FLOAT


def showing(model: ir.Model, sources: Iterable[Source], outputs: Collection[str]) -> ir.Model:
    """Return a copy whose outputs are inputs of its nodes, instead of some `outputs` of its own.

    It may be a model with some of it in integers: its nodes have the same names.
    """
    copy = model.clone()
    nodes = {node.name: node for node in copy.graph}
    kept = [output for output in copy.graph.outputs if output.name not in outputs]
    for name, index, label in sources:
        value = nodes[name].inputs[index]
        shown = ir.node("Identity", [value], name=label)
        shown.outputs[0].name, shown.outputs[0].type = label, ir.TensorType(ir.DataType.FLOAT)
        copy.graph.append(shown)
        kept.append(shown.outputs[0])
    copy.graph.outputs.clear()
    copy.graph.outputs.extend(kept)
    return copy
