"""Operators that choose entries by scores, and those that compute new quantities from what was chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import onnx_ir as ir

from ...transforms.graphs.queries import constant, is_float32
from ...transforms.int8.ops import OPS

SELECTS = frozenset({"Compress", "NonMaxSuppression", "NonZero", "TopK", "Unique"})
CHOOSES = SELECTS | {"ArgMax", "ArgMin", "Equal"}
LAYERS = frozenset({"LSTM", "GRU", "RNN", "Einsum", "If", "Loop", "Scan"})
"""Operators that compute new quantities, beside the products of `OPS`."""

INTO = " (into "
"""In the label of a tensor that is compared in place of an output, between its name and the operator that reads it."""

BEFORE_LAYERS = " before layers"
"""In the label of a tensor: layers read what is chosen by it, and both models were given the same choice."""

GIVEN_NOTE = (
    "layers compute outputs from what the model chooses by its scores; these outputs were compared with the float "
    "model's choice in both models"
)
"""What a user is told then."""

PREFIX = "requant.float/"
"""In front of the names of nodes and tensors of the float model that make a choice in another model."""

Reader: TypeAlias = tuple[str | None, int, str]
"""The name of a node, the index of its input, and a label for the tensor."""


def into(operator: str, where: str = "") -> str:
    """Return the end of the label of a tensor that an operator reads: `` (into TopK)``.

    Args:
        operator: The operator.
        where: `BEFORE_LAYERS`, or nothing.
    """
    return f"{INTO}{operator}{where})"


def is_replacement(label: str) -> bool:
    """Whether what was compared is a tensor in place of an output, from its label."""
    return INTO in label


def tensor_of(label: str) -> str:
    """Return the name of the tensor that was compared in place of an output, from its label; empty for outputs."""
    return label.partition(INTO)[0] if is_replacement(label) else ""


def is_layer(node: ir.Node) -> bool:
    """Whether a node computes new quantities from its inputs."""
    row = OPS.get(node.op_type)
    return bool(node.domain) or node.op_type in LAYERS or (row is not None and row.kind == "compute")


def chooses(node: ir.Node, known: Mapping[str, ir.Value]) -> bool:
    """Whether a node compares float scores with each other; an Equal with a constant does not.

    Args:
        node: The node.
        known: Tensors with their types, by name.
    """
    if node.op_type not in CHOOSES or node.domain:
        return False
    return len([*computed_inputs(node, known)]) >= (2 if node.op_type == "Equal" else 1)


def computed_inputs(node: ir.Node, known: Mapping[str, ir.Value]) -> Iterator[tuple[int, ir.Value]]:
    """Yield the inputs of a node that are float and not constant, with their index."""
    for index, value in enumerate(node.inputs):
        if value is not None and constant(value) is None and is_float32(known.get(str(value.name))):
            yield index, value


def was_given(compared: Iterable[str]) -> bool:
    """Whether both models were given the same choice, from the names of what was compared."""
    return any(label.endswith(f"{BEFORE_LAYERS})") for label in compared)
