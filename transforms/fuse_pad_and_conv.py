"""Move padding from Pad nodes into convolutions."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import computing_nodes, is_standard, known_shape
from .graphs.rewriter import remove
from .patterns import pads
from .registry import Change, LeftAlone, transform

LEAST_RANK = 3  # of a tensor with spatial axes


@transform("fuse_pad_and_conv", after=("fold_constants",))
def fuse_pad_and_conv(model: ir.Model) -> Change:
    """Move a Pad of zeros into the Conv nodes that read it.

    Before:  t = Pad(x, pads=[0, 0, 1, 1, 0, 0, 1, 1]); y = Conv(t, W), pads [0, 0, 0, 0]
    After:   y = Conv(x, W), pads [1, 1, 1, 1]
        Pad has no integer kernel: between two convolutions it costs a conversion to float and back.
    Left alone: padding of the batch or channel axis, or negative (``not-spatial``); another value than zero, or another
        mode (``not-zeros``); lengths that are not constant (``dynamic``); a Pad that is a graph output, or that is read
        otherwise than as the first input of a Conv with explicit pads (``other-reader``).
    """
    change = Change()
    for node in computing_nodes(model, "Pad"):
        try:
            _fuse(node)
            change.applied += 1
        except LeftAlone as reason:
            change.skip(str(reason))
    return change


def _fuse(pad: ir.Node) -> None:
    """Move one Pad into its readers.

    Raises:
        LeftAlone: The Pad must stay.
    """
    extra = _spatial_pads(pad)
    result, source = pad.outputs[0], pad.inputs[0]
    uses = list(result.uses())
    if not uses or result.is_graph_output() or not all(_takes_pads(use.node, use.idx, pad) for use in uses):
        raise LeftAlone("other-reader")
    for use in uses:
        own = use.node.attributes.get_ints("pads", [0] * len(extra))
        use.node.attributes["pads"] = ir.AttrInt64s("pads", [a + b for a, b in zip(own, extra, strict=True)])
        use.node.attributes.pop("auto_pad", None)
        use.node.replace_input_with(0, source)
    remove(pad)


def _takes_pads(node: ir.Node, index: int, pad: ir.Node) -> bool:
    """Whether a reader of the padded tensor is a convolution that can pad."""
    explicit = node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return is_standard(node, "Conv") and index == 0 and explicit and node.graph is pad.graph


def _spatial_pads(pad: ir.Node) -> list[int]:
    """Return the pads of the spatial axes in the order of Conv: all begins, then all ends.

    Raises:
        LeftAlone: A Conv cannot pad in this way.
    """
    value = pads.value(pad)
    if not pads.fills(pad) or value:
        raise LeftAlone("not-zeros")
    lengths = pads.lengths(pad, _rank(pad) if pads.selects_axes(pad) else None)
    if lengths is None or value is None:
        raise LeftAlone("dynamic")
    begins, ends = lengths
    if len(begins) < LEAST_RANK or min(*begins, *ends) < 0 or any((*begins[:2], *ends[:2])):
        raise LeftAlone("not-spatial")
    return begins[2:] + ends[2:]


def _rank(pad: ir.Node) -> int:
    """Return the rank of the padded tensor: the rank of the weight of a Conv that reads it."""
    shape = next((known_shape(use.node.inputs[1]) for use in pad.outputs[0].uses() if use.node.op_type == "Conv"), None)
    if shape is None:
        raise LeftAlone("other-reader")
    return len(shape)
