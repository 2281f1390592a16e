"""Multiply the queries of attention by the scale of each head, in place of the scores."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import computing_nodes, constant, made_by, node_name, sole_reader
from .graphs.rewriter import can_replace, insert_before, names, remove, replace
from .registry import Change, LeftAlone, transform

MATRIX = 2  # the last axes, which a product multiplies


@transform("lift_head_scales", after=("fold_constants",))
def lift_head_scales(model: ir.Model) -> Change:
    """Move a factor for each matrix from the result of a product to its first operand.

    Before:  y = Mul(MatMul(q, k), s), q of shape (N, H, R, D), k of shape (N, H, D, C), s of shape (H, 1, 1), C > D
    After:   y = MatMul(Mul(q, s), k)
        Cosine attention, as in Swin V2, has such a scale. The queries have fewer values than the scores, and the rest
        is attention as in other networks.
    Left alone: a product that another operator reads too (``shared``), whose result has no more values than the first
        operand, or of unknown shape or type (``not-wider``); a constant operand (``constant``).
    """
    change, known, taken = Change(), Known(model), names(model)
    for mul in computing_nodes(model, "Mul"):
        for result, factor in (mul.inputs, [*reversed(mul.inputs)]):
            product = made_by(result, "MatMul")
            if product is None or product.domain or factor is None or not _is_of_heads(factor):
                continue
            try:
                _lift(mul, product, factor, known, taken)
                change.applied += 1
            except LeftAlone as reason:
                change.skip(str(reason))
            break
    return change


def _is_of_heads(factor: ir.Value) -> bool:
    """Whether a tensor is a constant with a number for each matrix, and with several numbers."""
    tensor = constant(factor)
    return tensor is not None and tensor.size > 1 and tuple(tensor.shape.numpy())[-MATRIX:] == (1, 1)


def _lift(mul: ir.Node, product: ir.Node, factor: ir.Value, known: Known, taken: set[str]) -> None:
    """Move one factor.

    Raises:
        LeftAlone: It must stay.
    """
    first = product.inputs[0]
    if sole_reader(product.outputs[0]) is not mul or not can_replace(mul.outputs[0], product.outputs[0]):
        raise LeftAlone("shared")
    if first is None or constant(first) is not None:
        raise LeftAlone("constant")
    tensor, before, after = constant(factor), known.lengths(first), known.lengths(product.outputs[0])
    assert tensor is not None
    if known.dtype(first) is not ir.DataType.FLOAT or not before or not after or len(before) != len(after):
        raise LeftAlone("not-wider")
    of_heads = [*map(int, tensor.shape.numpy())][:-MATRIX]
    outer = before[:-MATRIX][-len(of_heads) :]
    repeats = len(outer) == len(of_heads) and all(one in (1, each) for one, each in zip(of_heads, outer, strict=True))
    if not repeats or before[-1] is None or after[-1] is None or before[-1] >= after[-1]:
        raise LeftAlone("not-wider")
    scaled = insert_before(product, taken, "Mul", [first, factor], stem=f"{node_name(mul)}/lifted")
    scaled.type, scaled.shape = ir.TensorType(ir.DataType.FLOAT), known.shape(first)
    product.replace_input_with(0, scaled)
    replace(mul.outputs[0], product.outputs[0])
    remove(mul)
