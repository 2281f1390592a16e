"""Sum weighted pieces without a Concat of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import axes_of, computing_nodes, graph_of, is_standard, made_by, node_name, sole_reader
from .graphs.rewriter import add_initializer, insert_before, names, remove_unread, replace_by_earlier, unused_name
from .registry import Change, transform

LONGEST = 16
"""The longest piece, in elements. A Concat on the last axis copies each row of each piece by itself, and short rows
cost the most for each element."""
SPLIT_TAKES_SIZES = 13
"""The first opset in which Split has the lengths, and ReduceSum the axes, as an input."""


@transform("sum_without_concat", after=("fold_constants", "simplify_reshapes"))
def sum_without_concat(model: ir.Model) -> Change:
    """Multiply short pieces by their parts of the weights and add the products, in place of a Concat and a longer sum.

    Before:  y = ReduceSum(Mul(Concat(a, b, axis=-1), w), -1)
    After:   y = ReduceSum(Add(Mul(a, v), Mul(b, w)), -1),  v, w = Split(w, axis=-1)
    Before:  y = ReduceSum(Mul(Reshape(Concat(Unsqueeze(a, -2), Unsqueeze(b, -2), axis=-2)), w), -1), where the Reshape
             merges the last two axes
    After:   the same
        Deformable attention over several scales (Deformable DETR, RT-DETR, D-FINE, DINO, Mask2Former) has 4 samples for
        each head, channel and query in each piece. Products of another length are summed by a ReduceSum of their own.
        The results differ by the rounding of float32.
    Left alone: pieces of more than 16 elements on the last axis, or of a length that is not known (``length``), a
        Concat or a product with other readers (``shared``), weights that repeat on this axis (``weights``), other types
        than float32 (``not-float32``), and opsets below 13.
    """
    change, known, taken = Change(), Known(model), names(model)
    if model.opset_imports.get("", 0) < SPLIT_TAKES_SIZES:
        return change
    for total in computing_nodes(model, "ReduceSum"):
        found = _pieces(total, known)
        if found is None:
            continue
        reason = _reason(found, known)
        if reason is None:
            _sum_pieces(total, found, taken)
            change.applied += 1
        else:
            change.skip(reason)
    return change


@dataclass(frozen=True, slots=True)
class _Found:
    """A weighted sum of pieces.

    Attributes:
        product: The Mul.
        weights: Its operand that is not made of pieces.
        chain: The Concat, and the Reshape behind it if there is one.
        pieces: The tensors whose last axes are put together.
        lengths: The lengths of these axes; None where not known.
    """

    product: ir.Node
    weights: ir.Value
    chain: list[ir.Node]
    pieces: list[ir.Value]
    lengths: list[int | None]


def _pieces(total: ir.Node, known: Known) -> _Found | None:
    """Return the pieces that a ReduceSum sums over their last axis; None if it sums something else."""
    axes, product = axes_of(total), made_by(total.inputs[0], "Mul")
    rank = known.rank(total.inputs[0])
    if axes is None or not is_standard(product, "Mul") or not rank or not {-1, rank - 1} & {*axes}:
        return None
    for value, weights in (product.inputs, product.inputs[::-1]):
        merge = made_by(value, "Reshape")
        concat = made_by(merge.inputs[0] if merge is not None else value, "Concat")
        if concat is None or concat.domain or weights is None:
            continue
        pieces = [each for each in concat.inputs if each is not None]
        axis, axes_in = concat.attributes.get_int("axis", 0), known.rank(concat.outputs[0]) or 0
        if merge is not None and axis in (-2, axes_in - 2) and _merges(concat.outputs[0], merge.outputs[0], known):
            pieces = [source for each in pieces if (source := _unsqueezed(each, axes_in)) is not None]
        elif merge is not None or axis not in (-1, axes_in - 1):
            continue
        if len(pieces) == len(concat.inputs):
            lengths = [(known.lengths(each) or (None,))[-1] for each in pieces]
            return _Found(product, weights, [concat, *([merge] if merge else [])], pieces, lengths)
    return None


def _merges(before: ir.Value, after: ir.Value, known: Known) -> bool:
    """Whether a reshape only merges the last two axes: no more than one length in front of them may be unknown."""
    shapes = (known.shape(value) or () for value in (before, after))
    old, new = ([axis if isinstance(axis, int) else axis.value for axis in shape] for shape in shapes)
    if len(old) < 2 or len(new) != len(old) - 1:
        return False
    *front, outer, inner = old
    if not isinstance(outer, int) or not isinstance(inner, int) or outer * inner != new[-1]:
        return False
    return sum(one != other or one in (0, None) for one, other in zip(front, new, strict=False)) <= 1


def _unsqueezed(value: ir.Value, rank: int) -> ir.Value | None:
    """Return the tensor without the axis of length 1 that an Unsqueeze adds in front of its last one."""
    node = made_by(value, "Unsqueeze")
    return node.inputs[0] if node is not None and axes_of(node) in ([-2], [rank - 2]) else None


def _reason(found: _Found, known: Known) -> str | None:
    """Return why a sum stays as it is; None if it is rewritten."""
    inner = [*found.chain, found.product]
    if known.dtype(found.product.outputs[0]) is not ir.DataType.FLOAT:
        return "not-float32"
    if any(sole_reader(node.outputs[0]) is None for node in inner):
        return "shared"
    lengths = [length for length in found.lengths if length is not None]
    if len(lengths) < len(found.lengths) or max(lengths) > LONGEST or min(lengths) < 1 or len(lengths) < 2:
        return "length"
    return None if (known.lengths(found.weights) or (None,))[-1] == sum(lengths) else "weights"


def _sum_pieces(total: ir.Node, found: _Found, taken: set[str]) -> None:
    """Replace a Concat, the product and the sum."""
    graph, stem = graph_of(total), node_name(found.product)
    sizes = np.array(found.lengths, np.int64)
    lengths = add_initializer(graph, unused_name(taken, f"{stem}/lengths"), sizes)
    name = unused_name(taken, f"{stem}/split")
    split = ir.node("Split", [found.weights, lengths], {"axis": -1}, num_outputs=len(sizes), name=name)
    graph.insert_before(found.product, [split])
    groups: dict[int | None, list[ir.Value]] = {}
    for output, piece, length in zip(split.outputs, found.pieces, found.lengths, strict=True):
        output.name, output.type = unused_name(taken, f"{stem}/weights"), found.weights.type
        groups.setdefault(length, []).append(
            insert_before(found.product, taken, "Mul", [piece, output], stem=f"{stem}/product")
        )
    sums = [_added(products, found.product, taken) for products in groups.values()]
    if len(sums) == 1:
        total.replace_input_with(0, sums[0])
    else:
        attributes = {name: each.value for name, each in total.attributes.items()}
        part, axes = f"{node_name(total)}/part", total.inputs[1]
        rows = [insert_before(total, taken, "ReduceSum", [each, axes], attributes, stem=part) for each in sums]
        replace_by_earlier(total, _added(rows, total, taken))
    remove_unread([found.product])


def _added(values: Sequence[ir.Value], place: ir.Node, taken: set[str]) -> ir.Value:
    """Return the sum of some tensors, computed in front of a node."""
    for value in values:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    return reduce(
        lambda one, other: insert_before(place, taken, "Add", [one, other], stem=f"{node_name(place)}/sum"), values
    )
