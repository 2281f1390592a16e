"""Add a mask to the scores of attention, in place of a Where that replaces scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import (
    computing_nodes,
    constant,
    graph_of,
    is_standard,
    made_by,
    node_name,
    one_number,
    producer_of,
    sole_reader,
)
from .graphs.rewriter import add_initializer, insert_before, names, remove_unread, replace_node, unused_name
from .patterns.attention import is_scaled_product
from .registry import Change, transform

HIDDEN = -1e4  # a score of at most so much has no share of a softmax, beside scores that stand in front of it
LOWEST = -1e30  # added to a score, it is all that is left of the sum in float32
SCALING = frozenset({"Add", "Div", "Mul"})


@transform("where_to_add", after=("fold_constants",))
def where_to_add(model: ir.Model) -> Change:
    """Add a mask to scores that a Where replaces by a number far below 0 in front of a Softmax.

    Before:  p = Softmax(Where(m, -1e9, MatMul(q, k)))
    After:   p = Softmax(Add(MatMul(q, k), Where(m, -1e30, 0)))
        Many networks of speech and older decoders mask so. The mask is often smaller than the scores, all layers share
        it, and the rest is attention as in other networks. Shares stay equal, also where all scores of a row are
        hidden: the sum is -1e30 for each of them.
    Before:  p = Softmax(Where(m, -1e9, Add(MatMul(q, k), r)))
    After:   p = Softmax(Add(MatMul(q, k), Where(m, -1e30, r))): one mask, as native attention takes it
    Before:  y = Where(m, 0, Softmax(Where(m, -1e9, s))), and no other operator reads the Softmax
    After:   y = Where(IsNaN(p), 0, p), p = Softmax(Add(s, Where(m, -infinity, 0)))
        A row whose scores are all hidden is 0 in both.
    Left alone: other numbers than those up to -1e4 (``not-hidden``), scores that are no products (``not-scores``) or of
        another type than float32 (``not-float32``), and scores with several readers (``shared``).
    """
    change, known, taken = Change(), Known(model), names(model)
    for softmax in computing_nodes(model, "Softmax"):
        where = made_by(softmax.inputs[0], "Where")
        if where is None or where.domain:
            continue
        found = _hidden(where)
        if found is None:
            change.skip("not-hidden")
        elif sole_reader(where.outputs[0]) is not softmax:
            change.skip("shared")
        elif known.dtype(found.scores) is not ir.DataType.FLOAT:
            change.skip("not-float32")
        elif not _is_product(found.scores):
            change.skip("not-scores")
        else:
            _add_mask(where, softmax, found, taken)
            change.applied += 1
    return change


@dataclass(frozen=True, slots=True)
class _Hidden:
    """Scores some of which a Where replaces.

    Attributes:
        scores: The scores.
        number: What replaces them.
        stay: The input of the Where that holds the scores: 1 if they stay where the condition is true, else 2.
    """

    scores: ir.Value
    number: float
    stay: int


def _hidden(where: ir.Node) -> _Hidden | None:
    """Return the scores that a Where replaces by a number far below 0; None if it does something else."""
    for stay in (2, 1):
        scores, number = where.inputs[stay], one_number(where.inputs[3 - stay], 1)
        if scores is not None and number is not None and number <= HIDDEN:
            return _Hidden(scores, number, stay)
    return None


def _is_product(value: ir.Value | None) -> bool:
    """Whether a tensor is a product of matrices, scaled or with something added."""
    while (node := producer_of(value)) is not None and not node.domain:
        if node.op_type == "MatMul":
            return True
        if node.op_type not in SCALING:
            return False
        operands = [each for each in node.inputs if one_number(each, 1) is None]
        if len(operands) > 1 and node.op_type == "Add":
            return any(_is_product(each) for each in operands)
        value = next(iter(operands), None)
    return False


def _added(scores: ir.Value, where: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return a product and what is added to it, if only a Where reads the sum; None for other scores."""
    add = made_by(scores, "Add") if sole_reader(scores) is where else None
    if add is None or add.domain:
        return None
    products = [is_scaled_product(value) for value in add.inputs]
    if sum(products) != 1:
        return None
    one, other = add.inputs if products[0] else reversed(add.inputs)
    return None if one is None or other is None or constant(other) is not None else (one, other)


def _add_mask(where: ir.Node, softmax: ir.Node, found: _Hidden, taken: set[str]) -> None:
    """Replace one Where by an Add; `merge_duplicate_nodes` gives all layers one mask."""
    guard = sole_reader(softmax.outputs[0])
    if guard is not None and not _is_guard(guard, softmax, where, found.stay):
        guard = None
    least = -math.inf if guard is not None or found.number == -math.inf else LOWEST
    graph, stem = graph_of(where), node_name(where)
    sides: list[ir.Value | None] = [where.inputs[0]] * 3
    scores, sides[found.stay] = _added(found.scores, where) or (found.scores, None)
    for place, name, number in ((3 - found.stay, "hidden", least), (found.stay, "seen", 0)):
        if name == "hidden" or sides[place] is None:
            sides[place] = add_initializer(graph, unused_name(taken, f"{stem}/{name}"), np.array(number, np.float32))
    mask = insert_before(where, taken, "Where", sides, stem=f"{stem}/mask")
    mask.type = ir.TensorType(ir.DataType.FLOAT)
    replace_node(where, ir.node("Add", [scores, mask], name=stem))
    remove_unread([found.scores.producer()])
    if guard is not None:
        is_nan = insert_before(guard, taken, "IsNaN", softmax.outputs, stem=f"{node_name(guard)}/nan")
        is_nan.type = ir.TensorType(ir.DataType.BOOL)
        shares, zero = guard.inputs[found.stay], guard.inputs[3 - found.stay]
        replace_node(guard, ir.node("Where", [is_nan, zero, shares], name=node_name(guard)))


def _is_guard(guard: ir.Node, softmax: ir.Node, where: ir.Node, stay: int) -> bool:
    """Whether a node replaces the shares of hidden scores by 0."""
    if not is_standard(guard, "Where") or guard.inputs[0] is not where.inputs[0]:
        return False
    return guard.inputs[stay] is softmax.outputs[0] and one_number(guard.inputs[3 - stay], 1) == 0
