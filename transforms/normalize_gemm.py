"""Rewrite a Gemm with constant weights into the form that integer kernels support."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from .graphs.queries import computing_nodes, constant, graph_of, node_name, stays_finite
from .graphs.rewriter import add_initializer, derive_initializer, discard, insert_before, names, replace, unused_name
from .int8.ops import GEMM_NEEDS_NO_C
from .registry import Change, LeftAlone, transform

BROADCASTS_C = 7  # the opset from which C is broadcast by the rules of numpy
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


@transform("normalize_gemm", after=("fold_constants",))
def normalize_gemm(model: ir.Model) -> Change:
    """Fold the factors of a Gemm into its constants: it becomes ``A @ B + C`` with one number of C per column.

    Before:  y = Gemm(A, B, C), alpha a, beta b, transA 1; B constant
    After:   y = Gemm(Transpose(A), a * B, b * C), C of shape (N,), if C is constant and equal for all rows
             y = Add(Gemm(Transpose(A), a * B), b * C) if C is computed or differs between rows
        B keeps its layout: (K, N), or (N, K) with transB. A constant that other nodes read is copied first. Below
        opset 11, zeros replace a C that moves into an Add.
    Left alone: computed weights (``weight-not-constant``); weights that are neither float32 nor float64
        (``weight-not-float``); factors that make a constant overflow (``not-finite``); opsets below 7.
    """
    change = Change()
    opset = model.opset_imports.get("", 0)
    nodes = computing_nodes(model, "Gemm")
    if opset < BROADCASTS_C or not nodes:
        return change
    taken = names(model)
    for node in nodes:
        try:
            change.applied += _normalize(node, taken, opset)
        except LeftAlone as left:
            change.skip(str(left))
    return change


def _normalize(gemm: ir.Node, taken: set[str], opset: int) -> bool:
    """Normalize one Gemm; return whether it changed.

    Raises:
        LeftAlone: The Gemm cannot be normalized.
    """
    weight = constant(gemm.inputs[1])
    if weight is None:
        raise LeftAlone("weight-not-constant")
    if weight.dtype not in FLOATS:
        raise LeftAlone("weight-not-float")
    alpha, beta = (gemm.attributes.get_float(factor, 1.0) for factor in ("alpha", "beta"))
    transposed = gemm.attributes.get_int("transA", 0)
    added = gemm.inputs[2] if len(gemm.inputs) > 2 else None
    bias, columns = constant(added), weight.shape.numpy()[0 if gemm.attributes.get_int("transB", 0) else 1]
    fits = added is None or (bias is not None and bias.shape.numpy() == (columns,))
    if (alpha, beta, transposed) == (1.0, 1.0, 0) and fits:
        return False
    for tensor, factor in ((weight, alpha), (bias, beta)):
        if tensor is not None and not stays_finite(tensor, factor):
            raise LeftAlone("not-finite")
    if transposed:
        stem = f"{node_name(gemm)}/transpose"
        gemm.replace_input_with(
            0, insert_before(gemm, taken, "Transpose", gemm.inputs[:1], {"perm": [1, 0]}, stem=stem)
        )
    if alpha != 1:
        _set_constant(gemm, 1, taken, lambda array: array * alpha, weight.shape.numpy())
    if added is not None and bias is not None and beta != 0 and bias.size == (bias.shape.numpy() or (1,))[-1]:
        if beta != 1 or not fits:
            _set_constant(gemm, 2, taken, lambda array: np.resize(array * beta, columns), (columns,))
    elif added is not None:
        _drop_bias(gemm, taken, np.zeros(columns if opset < GEMM_NEEDS_NO_C else 0, weight.dtype.numpy()))
        if beta != 0:
            _add_after(gemm, added, taken, beta, weight.dtype)
        discard(added)
    for name in ("alpha", "beta", "transA"):
        gemm.attributes.pop(name, None)
    return True


def _set_constant(
    gemm: ir.Node, index: int, taken: set[str], compute: Callable[[np.ndarray], np.ndarray], shape: Sequence[int]
) -> None:
    """Replace a constant input by ``compute(input)``, under the same name if nothing else reads the old constant."""
    old, tensor = gemm.inputs[index], constant(gemm.inputs[index])
    if old is None or tensor is None:
        raise TypeError(f"input {index} of {gemm.name!r} is not constant")
    gemm.replace_input_with(index, None)
    discard(old)
    name = str(old.name) if old.graph is None else unused_name(taken, f"{old.name}_scaled")
    gemm.replace_input_with(index, derive_initializer(graph_of(gemm), name, tensor, compute, shape))


def _drop_bias(gemm: ir.Node, taken: set[str], zeros: np.ndarray) -> None:
    """Remove C, or replace it by `zeros` if they are not empty."""
    gemm.replace_input_with(2, None)
    if zeros.size:
        gemm.replace_input_with(
            2, add_initializer(graph_of(gemm), unused_name(taken, f"{node_name(gemm)}/zeros"), zeros)
        )
    else:
        gemm.resize_inputs(2)


def _add_after(gemm: ir.Node, added: ir.Value, taken: set[str], beta: float, dtype: ir.DataType) -> None:
    """Add ``beta * added`` to the product; the sum takes over the name and the readers of the product."""
    graph, product, tensor, stem = graph_of(gemm), gemm.outputs[0], constant(added), node_name(gemm)
    if beta != 1 and tensor is not None:
        name = unused_name(taken, f"{added.name}_scaled")
        added = derive_initializer(graph, name, tensor, lambda array: array * beta, tensor.shape.numpy())
    elif beta != 1:
        factor = add_initializer(graph, unused_name(taken, f"{stem}/beta"), np.array(beta, dtype.numpy()))
        added = insert_before(gemm, taken, "Mul", [added, factor], stem=f"{stem}/scale")
    total = ir.node("Add", [None, added], name=unused_name(taken, f"{stem}/add"))
    result, result_name = total.outputs[0], product.name
    result.type, result.shape = product.type, product.shape
    graph.insert_after(gemm, [total])
    replace(product, result)
    total.replace_input_with(0, product)
    product.name, result.name = unused_name(taken, f"{stem}/product"), result_name
