"""Replace space-to-batch, a convolution and batch-to-space by a dilated convolution."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import computing_nodes, is_standard, producer_of, sole_reader
from .graphs.rewriter import can_replace, remove, replace
from .registry import Change, LeftAlone, transform

TO_BATCH = [3, 5, 0, 1, 2, 4]
TO_SPACE = [2, 3, 4, 0, 5, 1]


@dataclass(frozen=True, slots=True)
class _Moved:
    """A Reshape, Transpose and Reshape in a row.

    Attributes:
        nodes: The three nodes, in execution order.
        source: The input of the first node.
        shape: The shape after the first node, six lengths; the length of the batch is None.
        result: The shape after the last node, without the batch.
    """

    nodes: tuple[ir.Node, ir.Node, ir.Node]
    source: ir.Value
    shape: tuple[int | None, ...]
    result: tuple[int | None, ...]


@transform("flatten_atrous_conv", after=("fold_constants",))
def flatten_atrous_conv(model: ir.Model) -> Change:
    """Replace space-to-batch, Conv and batch-to-space by one Conv with dilations.

    Before:  a = Reshape(Transpose(Reshape(x, [N, C, H/b, b, W/b, b]), [3, 5, 0, 1, 2, 4]), [b*b*N, C, H/b, W/b])
             y = Reshape(Transpose(Reshape(Conv(a, W), [b, b, N, M, h, w]), [2, 3, 4, 0, 5, 1]), [N, M, h*b, w*b])
    After:   y = Conv(x, W), dilations b
        TensorFlow writes dilated convolutions in this form. `fuse_pad_and_conv` can then fuse a Pad before the Conv.
    Left alone: a Conv with strides (``strides``) or implicit pads (``pads``); lengths that are not known
        (``shape-unknown``) or do not fit together (``other-blocks``); intermediate results with other readers; other
        orders of the axes.
    """
    change = Change()
    known = Known(model)
    for conv in computing_nodes(model, "Conv"):
        nodes = _before(conv), _after(conv)
        if nodes[0] is None or nodes[1] is None:
            continue
        try:
            _flatten(conv, _moved(nodes[0], known, 0), _moved(nodes[1], known, 2), known)
            change.applied += 1
        except LeftAlone as left:
            change.skip(str(left))
    return change


Three = tuple[ir.Node, ir.Node, ir.Node]


def _above(node: ir.Node | None) -> ir.Node | None:
    """Return the producer of the first input of a node."""
    return producer_of(node.inputs[0]) if node is not None and node.inputs else None


def _before(conv: ir.Node) -> Three | None:
    """Return the nodes of a space-to-batch before a Conv; None without one."""
    last = _above(conv)
    middle = _above(last)
    first = _above(middle)
    if first is None or middle is None or last is None:
        return None
    chain = sole_reader(first.outputs[0]) is middle and sole_reader(middle.outputs[0]) is last
    fits = _are_reshapes(first, last) and chain and sole_reader(last.outputs[0]) is conv
    return (first, middle, last) if fits and _order(middle) == TO_BATCH else None


def _after(conv: ir.Node) -> Three | None:
    """Return the nodes of a batch-to-space behind a Conv; None without one."""
    first = sole_reader(conv.outputs[0])
    middle = sole_reader(first.outputs[0]) if first is not None else None
    last = sole_reader(middle.outputs[0]) if middle is not None else None
    if first is None or middle is None or last is None:
        return None
    fits = _are_reshapes(first, last) and first.inputs[0] is conv.outputs[0]
    return (first, middle, last) if fits and _order(middle) == TO_SPACE else None


def _are_reshapes(*nodes: ir.Node) -> bool:
    return all(is_standard(node, "Reshape") for node in nodes)


def _order(node: ir.Node) -> list[int]:
    return list(node.attributes.get_ints("perm", ())) if is_standard(node, "Transpose") else []


def _moved(nodes: Three, known: Known, batch: int) -> _Moved:
    """Read the shapes of three nodes; between Reshape and Transpose the batch is on axis `batch`."""
    source = nodes[0].inputs[0]
    if source is None:
        raise LeftAlone("shape-unknown")
    lengths = list(_lengths(nodes[0].outputs[0], known))
    if len(lengths) != 6 or any(length is None for axis, length in enumerate(lengths) if axis != batch):
        raise LeftAlone("shape-unknown")
    lengths[batch] = None
    return _Moved(nodes, source, tuple(lengths), _lengths(nodes[2].outputs[0], known)[1:])


def _lengths(value: ir.Value, known: Known) -> tuple[int | None, ...]:
    """Return the lengths of a tensor; None for an unknown length."""
    lengths = known.lengths(value)
    if lengths is None:
        raise LeftAlone("shape-unknown")
    return lengths


def _flatten(conv: ir.Node, before: _Moved, after: _Moved, known: Known) -> None:
    """Replace one space-to-batch, Conv and batch-to-space by a Conv with dilations.

    Raises:
        LeftAlone: The lengths do not fit together.
    """
    if any(stride != 1 for stride in conv.attributes.get_ints("strides", ())):
        raise LeftAlone("strides")
    if conv.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise LeftAlone("pads")
    _, channels, rows, block_rows, columns, block_columns = (length or 0 for length in before.shape)
    out_block_rows, out_block_columns, _, out_channels, out_rows, out_columns = (length or 0 for length in after.shape)
    factors = (block_rows, block_columns)
    expected = [
        ((out_block_rows, out_block_columns), factors),
        (_lengths(before.source, known)[1:], (channels, rows * block_rows, columns * block_columns)),
        (before.result, (channels, rows, columns)),
        (after.result, (out_channels, out_rows * block_rows, out_columns * block_columns)),
        (_lengths(conv.outputs[0], known)[1:], (out_channels, out_rows, out_columns)),
    ]
    if any(lengths != fitting for lengths, fitting in expected):
        raise LeftAlone("other-blocks")
    result = after.nodes[2].outputs[0]
    if not can_replace(result, conv.outputs[0]):
        raise LeftAlone("other-blocks")
    dilations = conv.attributes.get_ints("dilations", (1, 1))
    pads = conv.attributes.get_ints("pads", (0, 0, 0, 0))
    for name, numbers, times in (("dilations", dilations, factors), ("pads", pads, factors * 2)):
        conv.attributes[name] = ir.AttrInt64s(name, [a * b for a, b in zip(numbers, times, strict=True)])
    conv.attributes.pop("auto_pad", None)
    conv.replace_input_with(0, before.source)
    conv.outputs[0].shape = None
    replace(result, conv.outputs[0])
    for node in (*reversed(after.nodes), *reversed(before.nodes)):
        remove(node)
