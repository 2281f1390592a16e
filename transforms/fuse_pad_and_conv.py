"""Move padding from Pad nodes into convolutions."""

from __future__ import annotations

import onnx_ir as ir

from .graph import computing_nodes, constant, remove
from .registry import Change, LeftAlone, transform


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
    return node.op_type == "Conv" and not node.domain and index == 0 and explicit and node.graph is pad.graph


def _spatial_pads(pad: ir.Node) -> list[int]:
    """Return the pads of the spatial axes in the order of Conv: all begins, then all ends.

    Raises:
        LeftAlone: A Conv cannot pad in this way.
    """
    if pad.attributes.get_string("mode", "constant") != "constant":
        raise LeftAlone("not-zeros")
    pads = _lengths(pad)
    rank = len(pads) // 2
    if rank < 3 or min(pads) < 0 or any(pads[axis] or pads[axis + rank] for axis in (0, 1)):
        raise LeftAlone("not-spatial")
    return pads[2:rank] + pads[rank + 2 :]


def _lengths(pad: ir.Node) -> list[int]:
    """Return the pads of a Pad with zeros for all axes: all begins, then all ends."""
    if len(pad.inputs) == 1:  # below opset 11
        if pad.attributes.get_float("value", 0.0) != 0:
            raise LeftAlone("not-zeros")
        return list(pad.attributes.get_ints("pads", ()))
    lengths, value, axes = (constant(v) if v is not None else None for v in [*pad.inputs[1:4], None, None, None][:3])
    if lengths is None or any(v is not None and constant(v) is None for v in pad.inputs[2:]):
        raise LeftAlone("dynamic")
    if value is not None and value.size and value.numpy().item() != 0:
        raise LeftAlone("not-zeros")
    pads = [int(length) for length in lengths.numpy().reshape(-1)]
    if axes is None:
        return pads
    rank = _rank(pad)
    full = [0] * (2 * rank)
    for place, axis in enumerate(int(axis) % rank for axis in axes.numpy().reshape(-1)):
        full[axis], full[axis + rank] = pads[place], pads[place + len(pads) // 2]
    return full


def _rank(pad: ir.Node) -> int:
    """Return the rank of the padded tensor: the rank of the weight of a Conv that reads it."""
    weights = [use.node.inputs[1] for use in pad.outputs[0].uses() if use.node.op_type == "Conv"]
    tensor = constant(weights[0]) if weights else None
    shape = tensor.shape if tensor is not None else weights[0].shape if weights and weights[0] is not None else None
    if shape is None:
        raise LeftAlone("other-reader")
    return len(shape)
