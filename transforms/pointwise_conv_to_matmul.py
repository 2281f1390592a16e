"""Replace a pointwise convolution of a sequence between two Transpose nodes by a matrix product."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import computing_nodes, constant, graph_of, is_standard, made_by, node_name, sole_reader
from .graphs.rewriter import derive_initializer, insert_before, names, remove, remove_if_unread, replace, unused_name
from .registry import Change, LeftAlone, transform

SWAP = (0, 2, 1)  # the last two axes of a sequence


@transform("pointwise_conv_to_matmul", after=("fold_constants",))
def pointwise_conv_to_matmul(model: ir.Model) -> Change:
    """Turn a Conv of kernel 1 between two Transpose nodes into the product that it is.

    Before:  y = Transpose(Conv(Transpose(x), W, b)), x of shape (N, T, C), W of (F, C, 1), both perm [0, 2, 1]
    After:   y = Add(MatMul(x, W'), b), W' of shape (C, F)
        Keras keeps the channels of a sequence last, and ONNX convolves channels that come second. A product has no
        change of layout, and more integer forms.
    Left alone: a longer kernel, a stride, padding or groups (``not-pointwise``); computed weights or a computed bias
        (``weight-not-constant``); a Conv that does not read and write a swapped tensor alone, or whose result has
        another reader (``not-between-transposes``).
    """
    change, taken = Change(), names(model)
    for node in computing_nodes(model, "Conv"):
        try:
            _replace(node, taken)
            change.applied += 1
        except LeftAlone as reason:
            change.skip(str(reason))
    return change


def _replace(conv: ir.Node, taken: set[str]) -> None:
    """Replace one Conv and the Transpose nodes around it.

    Raises:
        LeftAlone: It must stay.
    """
    before, after = made_by(conv.inputs[0], "Transpose"), sole_reader(conv.outputs[0])
    if before is None or not is_standard(after, "Transpose"):
        raise LeftAlone("not-between-transposes")
    x, ends = before.inputs[0], (before, after)
    swapped = all(tuple(node.attributes.get_ints("perm", ())) == SWAP for node in ends)
    if x is None or not swapped or after.graph is not conv.graph:
        raise LeftAlone("not-between-transposes")
    weight, bias = constant(conv.inputs[1]), conv.inputs[2] if len(conv.inputs) > 2 else None
    if weight is None or (bias is not None and constant(bias) is None):
        raise LeftAlone("weight-not-constant")
    if not _is_pointwise(conv, tuple(weight.shape.numpy())):
        raise LeftAlone("not-pointwise")
    outputs, inputs, _ = weight.shape.numpy()
    name = unused_name(taken, f"{node_name(conv)}/matrix")
    matrix = derive_initializer(graph_of(conv), name, weight, lambda array: array[:, :, 0].T, (inputs, outputs))
    result = insert_before(after, taken, "MatMul", [x, matrix], stem=f"{node_name(conv)}/product")
    if bias is not None:
        result = insert_before(after, taken, "Add", [result, bias], stem=f"{node_name(conv)}/sum")
    replace(after.outputs[0], result)
    for node in (after, conv):
        remove(node)
    remove_if_unread(before)


def _is_pointwise(conv: ir.Node, shape: tuple[int, ...]) -> bool:
    """Whether a Conv computes each step of a sequence from this step alone, with weights of this shape."""
    get = conv.attributes.get_ints
    plain = not any(get("pads", ())) and set(get("strides", (1,))) == {1} and conv.attributes.get_int("group", 1) == 1
    return len(shape) == len(SWAP) and shape[-1] == 1 and plain
