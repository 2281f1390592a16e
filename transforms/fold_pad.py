"""Move padding from Pad nodes into poolings and into other Pad nodes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .graphs.queries import computing_nodes, constant, graph_of, node_name, producer_of, sole_reader
from .graphs.rewriter import add_initializer, discard, names, remove, unused_name
from .patterns import pads
from .registry import Change, LeftAlone, transform

PADS_ARE_INPUTS = 11  # the opset from which the lengths of a Pad are inputs
KEEPS_SIGN = frozenset(
    "AveragePool DepthToSpace Dropout Flatten GlobalAveragePool GlobalMaxPool Identity MaxPool Reshape Slice Squeeze "
    "Transpose Unsqueeze".split()
)


@transform("fold_pad", after=("fold_constants", "fuse_pad_and_conv"))
def fold_pad(model: ir.Model) -> Change:
    """Fold a Pad into a pooling that is its only reader, and merge two Pads in a row.

    Before:  y = MaxPool(Pad(Relu(x), pads=[0, 0, 1, 1, 0, 0, 1, 1])), pads 0;  z = Pad(Pad(x, p), q)
    After:   y = MaxPool(Relu(x)), pads 1;                                      z = Pad(x, p + q)
        The pads of a MaxPool are the smallest possible value: -inf is equal to this, and zero is if no element is
        negative. An AveragePool gets count_include_pad = 1, because the zeros of the Pad count. `fuse_pad_and_conv`
        does the same for convolutions.
    Left alone: padding of the batch or channel axis (``not-spatial``); negative padding, another value or another mode
        (``not-zeros``); computed lengths (``dynamic``); a Pad with several readers, or whose reader is neither pooling
        nor Pad (``other-reader``); a pooling with ceil_mode, or with pads of its own that it does not count
        (``pooling``); windows that would contain padding only (``window``); zeros before a MaxPool whose input may be
        negative (``may-be-negative``); Pads in a row with different values (``not-alike``).
    """
    change = Change()
    taken, opset = names(model), model.opset_imports.get("", 0)
    if opset < PADS_ARE_INPUTS:
        return change
    for node in computing_nodes(model, "Pad"):
        try:
            _fold(node, taken)
            change.applied += 1
        except LeftAlone as reason:
            change.skip(str(reason))
    return change


def _fold(pad: ir.Node, taken: set[str]) -> None:
    """Fold one Pad into its reader.

    Raises:
        LeftAlone: The Pad must stay.
    """
    reader = sole_reader(pad.outputs[0])
    lengths, value = _lengths(pad)
    if reader is None or reader.domain or reader.inputs[0] is not pad.outputs[0]:
        raise LeftAlone("other-reader")
    if reader.op_type == "Pad":
        _merge(pad, reader, lengths, value, taken)
    elif reader.op_type in ("MaxPool", "AveragePool"):
        _into_pooling(pad, reader, lengths, value)
    else:
        raise LeftAlone("other-reader")


def _lengths(pad: ir.Node) -> tuple[list[int], float]:
    """Return the constant pads of all axes of a Pad, all begins, then all ends; and the constant value."""
    if not pads.fills(pad):
        raise LeftAlone("not-zeros")
    found, value = pads.lengths(pad, None), pads.value(pad)
    if found is None or value is None:
        raise LeftAlone("dynamic")
    lengths = [*found[0], *found[1]]
    if min(lengths, default=0) < 0:
        raise LeftAlone("not-zeros")
    return lengths, value


def _merge(pad: ir.Node, reader: ir.Node, lengths: list[int], value: float, taken: set[str]) -> None:
    """Add the pads of a Pad to those of the Pad that reads it."""
    second, filling = _lengths(reader)
    if filling != value or len(second) != len(lengths):
        raise LeftAlone("not-alike")
    total = np.array(lengths, np.int64) + np.array(second, np.int64)
    old, name = reader.inputs[1], unused_name(taken, f"{node_name(reader)}/pads")
    reader.replace_input_with(1, add_initializer(graph_of(reader), name, total))
    reader.replace_input_with(0, pad.inputs[0])
    discard(old)
    remove(pad)


def _into_pooling(pad: ir.Node, pool: ir.Node, lengths: list[int], value: float) -> None:
    """Add the pads of a Pad to those of the pooling that reads it."""
    rank = len(lengths) // 2
    kernel = list(pool.attributes.get_ints("kernel_shape", ()))
    if rank < 3 or any(lengths[axis] or lengths[axis + rank] for axis in (0, 1)) or len(kernel) != rank - 2:
        raise LeftAlone("not-spatial")
    extra = lengths[2:rank] + lengths[rank + 2 :]
    own = list(pool.attributes.get_ints("pads", [0] * len(extra)))
    explicit = pool.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    if not explicit or pool.attributes.get_int("ceil_mode", 0) != 0 or len(pool.outputs) > 1:
        raise LeftAlone("pooling")
    total = [a + b for a, b in zip(own, extra, strict=True)]
    if any(length >= size for length, size in zip(total, kernel * 2, strict=True)):
        raise LeftAlone("window")
    if pool.op_type == "AveragePool":
        if value != 0:
            raise LeftAlone("not-zeros")
        if any(own) and pool.attributes.get_int("count_include_pad", 0) == 0:
            raise LeftAlone("pooling")
        pool.attributes["count_include_pad"] = ir.AttrInt64("count_include_pad", 1)
    elif value == 0 and not _never_negative(pad.inputs[0]):
        raise LeftAlone("may-be-negative")
    elif value not in (0, -np.inf):
        raise LeftAlone("not-zeros")
    pool.attributes["pads"] = ir.AttrInt64s("pads", total)
    pool.attributes.pop("auto_pad", None)
    pool.replace_input_with(0, pad.inputs[0])
    remove(pad)


def _never_negative(value: ir.Value | None) -> bool:
    """Whether a tensor has no negative element: it comes from a Relu or similar, through operators that keep signs."""
    node = producer_of(value)
    while node is not None and not node.domain and node.op_type in KEEPS_SIGN:
        value = node.inputs[0]
        node = producer_of(value)
    if node is None or node.domain:
        return False
    if node.op_type == "Clip":
        low = constant(node.inputs[1]) if len(node.inputs) > 1 else None
        return low is not None and bool((low.numpy() >= 0).all())
    return node.op_type in ("Abs", "Exp", "HardSigmoid", "Relu", "Sigmoid", "Softmax", "Softplus")
