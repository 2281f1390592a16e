"""Remove an Expand whose readers repeat values themselves."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import computing_nodes
from .graphs.rewriter import remove, replace
from .registry import Change, transform

REPEATING = frozenset("Add Div Equal Greater Less Max Min Mul Pow Sub Where".split())
"""Operators that repeat an operand along axes of length 1."""


@transform("remove_expands", after=("fold_constants",))
def remove_expands(model: ir.Model) -> Change:
    """Remove an Expand if each operator that reads it has another operand of the shape of its result.

    Before:  y = Div(x, Expand(n, [2, 3, 4])), x of shape (2, 3, 4), n of shape (2, 3, 1)
    After:   y = Div(x, n)
        PyTorch writes the normalization of a vector so. The Expand copies, and takes longer than the Div.
    Left alone: an Expand whose result is an output of a graph, or has a reader that may need it (``needed``).
    """
    change, known = Change(), Known(model)
    for expand in computing_nodes(model, "Expand"):
        value, source = expand.outputs[0], expand.inputs[0]
        readers = [use.node for use in value.uses()]
        if source is None or value.is_graph_output() or not all(_repeats(node, value, known) for node in readers):
            change.skip("needed")
            continue
        value.type, value.shape = source.type, source.shape
        replace(value, source)
        remove(expand)
        change.applied += 1
    return change


def _repeats(reader: ir.Node, value: ir.Value, known: Known) -> bool:
    """Whether the result of an operator has the same shape without the repetition of one of its operands."""
    if reader.op_type not in REPEATING or reader.domain:
        return False
    result = _lengths(known.shape(reader.outputs[0]))
    others = [_lengths(known.shape(other)) for other in reader.inputs if other is not value]
    return result is not None and result in others


def _lengths(shape: ir.Shape | None) -> tuple[int | str, ...] | None:
    """Return the lengths of axes, numbers or names; None if one of them is unknown."""
    lengths = [] if shape is None else [each if isinstance(each, int) else each.value for each in shape]
    known = tuple(each for each in lengths if each is not None)
    return known if shape is not None and len(known) == len(lengths) else None
