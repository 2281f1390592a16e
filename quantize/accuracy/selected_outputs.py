"""Outputs that a model selects by its own scores. Their length changes with the last bit of one score."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import onnx_ir as ir

from ...transforms.graph import constant
from ...transforms.inference import inferred
from .outputs import Accuracy

SELECTS = frozenset({"Compress", "NonMaxSuppression", "NonZero", "TopK", "Unique"})


def unlike(accuracy: Accuracy) -> list[str]:
    """Return the outputs without any signal left, for instance because their lengths differ."""
    return [name for name, value in accuracy.sqnr_db.items() if value == -math.inf]


Source = tuple[str | None, int, str]  # the name of a node, the index of its input, and a label for the tensor


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
    """Whether the type of a tensor is known and float."""
    return value is not None and value.dtype is ir.DataType.FLOAT


def showing(model: ir.Model, sources: Iterable[Source], outputs: Collection[str]) -> ir.Model:
    """Return a copy of a model in which inputs of nodes replace some outputs.

    Args:
        model: The float model, or the INT8 model made from it: the node names are the same.
        sources: The inputs of nodes that become outputs.
        outputs: The names of the outputs to remove.
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
