"""Replace a convolution with a kernel as long as its sequence by a matrix product."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import computing_nodes, constant, graph_of, node_name
from .graphs.rewriter import derive_initializer, insert_before, names, remove, replace, unused_name
from .registry import Change, LeftAlone, transform

LONG = 0.5  # the least length of a kernel, as a share of the sequence
LARGEST = 2**20  # elements of a matrix at most; 4 MiB of float32


@transform("long_conv_to_matmul", after=("fold_constants", "fuse_pad_and_conv"))
def long_conv_to_matmul(model: ir.Model) -> Change:
    """Turn a Conv of one channel whose kernel is about as long as the sequence into the product that it is.

    Before:  y = Conv(x, W, b), x of shape (N, 1, T), W of (1, 1, K), K >= T / 2
    After:   y = Add(MatMul(x, M), b), M[i, j] = W[i - j * stride + pad], 0 outside of W; M of shape (T, T')
        Most of a long kernel lies on padding, and ONNX Runtime multiplies it all. Sequences of a batch are rows of one
        product.
    Left alone: several channels, or an image (``channels``); a shorter kernel (``short``); a sequence of a free length
        (``free-length``); matrices of more than 2**20 elements (``large``); computed weights or a computed bias
        (``weight-not-constant``); padding that is not given as numbers (``auto-pad``).
    """
    change, taken = Change(), names(model)
    nodes = computing_nodes(model, "Conv")
    known = Known(model) if nodes else None
    for node in nodes:
        try:
            _replace(node, known, taken)
            change.applied += 1
        except LeftAlone as reason:
            change.skip(str(reason))
    return change


def _replace(conv: ir.Node, known: Known | None, taken: set[str]) -> None:
    """Replace one Conv.

    Raises:
        LeftAlone: It must stay.
    """
    weight, bias = constant(conv.inputs[1]), conv.inputs[2] if len(conv.inputs) > 2 else None
    if weight is None or (bias is not None and constant(bias) is None):
        raise LeftAlone("weight-not-constant")
    sizes = tuple(weight.shape.numpy())
    if len(sizes) != 3 or sizes[:2] != (1, 1) or conv.attributes.get_int("group", 1) != 1:
        raise LeftAlone("channels")
    if conv.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        raise LeftAlone("auto-pad")
    found = None if known is None else known.lengths(conv.inputs[0])
    length = None if found is None or len(found) != len(sizes) else found[-1]
    if length is None:
        raise LeftAlone("free-length")
    shape = (length, _steps(conv, length, sizes[-1]))
    if sizes[-1] < LONG * length or shape[1] < 1:
        raise LeftAlone("short")
    if shape[0] * shape[1] > LARGEST:
        raise LeftAlone("large")
    name = unused_name(taken, f"{node_name(conv)}/matrix")
    matrix = derive_initializer(graph_of(conv), name, weight, lambda array: _matrix(conv, array[0, 0], shape), shape)
    result = insert_before(conv, taken, "MatMul", [conv.inputs[0], matrix], stem=f"{node_name(conv)}/product")
    if bias is not None:
        result = insert_before(conv, taken, "Add", [result, bias], stem=f"{node_name(conv)}/sum")
    replace(conv.outputs[0], result)
    remove(conv)


def _window(conv: ir.Node) -> tuple[int, int, int, int]:
    """Return the stride, the dilation, and the padding before and behind the sequence."""
    get = conv.attributes.get_ints
    (stride,), (dilation,), (before, behind) = get("strides", (1,)), get("dilations", (1,)), get("pads", (0, 0))
    return stride, dilation, before, behind


def _steps(conv: ir.Node, length: int, kernel: int) -> int:
    """Return the number of steps of the result for a sequence of `length` steps."""
    stride, dilation, before, behind = _window(conv)
    return (length + before + behind - dilation * (kernel - 1) - 1) // stride + 1


def _matrix(conv: ir.Node, weights: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the matrix (steps of the sequence, steps of the result) of a Conv with these weights (kernel)."""
    stride, dilation, before, _ = _window(conv)
    tap, between = np.divmod(np.arange(shape[0])[:, None] - np.arange(shape[1]) * stride + before, dilation)
    meets = (between == 0) & (tap >= 0) & (tap < len(weights))
    return np.where(meets, weights[np.where(meets, tap, 0)], weights.dtype.type(0))
