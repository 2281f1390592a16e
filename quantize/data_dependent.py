"""Outputs that a model selects by its own scores: how many there are differs with the last bit of one score."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir

from ..calibration.session import Serialized
from ..transforms.graph import constant, inferred
from .accuracy import Accuracy
from .files import serialize

SELECTS = frozenset({"Compress", "NonMaxSuppression", "NonZero", "TopK", "Unique"})


def unlike(accuracy: Accuracy) -> list[str]:
    """Return the outputs that have nothing in common, for instance because they are of different length."""
    return [name for name, value in accuracy.sqnr_db.items() if value == -math.inf]


def what_is_selected_from(
    model: ir.Model, other: ir.Model, outputs: Iterable[str], folder: Path
) -> tuple[Serialized, Serialized] | None:
    """Return two models with what `SELECTS` operators read in the place of outputs; None where there is nothing.

    Args:
        model: A simplified model.
        other: The same with some of it in integers: its nodes have the same names.
        outputs: The outputs to replace.
        folder: Where large weights may be put.
    """
    known = inferred(model)
    sources = [
        (node.name, index, f"{value.name} (into {node.op_type})")
        for node in model.graph
        if node.op_type in SELECTS and not node.domain
        for index, value in enumerate(node.inputs)
        if value is not None and constant(value) is None and _is_float(known.get(str(value.name)))
    ]
    if not sources:
        return None
    first, second = (_showing(each, sources, set(outputs)) for each in (model, other))
    return serialize(first, folder), serialize(second, folder)


def _is_float(value: ir.Value | None) -> bool:
    """Whether a tensor is known to be of floats."""
    return value is not None and value.dtype is ir.DataType.FLOAT


def _showing(model: ir.Model, sources: list[tuple[str | None, int, str]], outputs: set[str]) -> ir.Model:
    """Return a copy whose outputs are inputs of its nodes, instead of some of its own."""
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
