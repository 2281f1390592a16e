"""Fuse the operators of a layer normalization over the channels of an image into one between two Transposes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import computing_nodes, constant, graph_of, node_name
from .graphs.rewriter import add_initializer, insert_before, names, remove_unread, replace_node, unused_name
from .patterns.norms_in_parts import Parts, epsilon_of, find_centred, is_mean_of, of_each_place
from .registry import Change, transform

HAS_LAYER_NORMALIZATION = 17  # the first opset with the operator
CHANNELS = 1  # the axis
FEWEST = 12  # channels with which the one operator and its Transposes gain: it computes short rows slowly


@transform("fuse_channel_norms", after=("fold_constants",))
def fuse_channel_norms(model: ir.Model) -> Change:
    """Fuse a layer normalization over the channels, in several operators, into one over the last axis.

    Before:  d = Sub(x, ReduceMean(x, axes=[1])); v = ReduceMean(Mul(d, d), axes=[1]);
             y = Add(Mul(Div(d, Sqrt(Add(v, e))), w), b),  x (N, C, H, W), w and b (C, 1, 1)
    After:   y = Transpose(LayerNormalization(Transpose(x, perm=[0, 2, 3, 1]), w', b', axis=-1, epsilon=e),
                 perm=[0, 3, 1, 2]),  w' and b' (C,)
        Networks of images have it as LayerNorm2d (NAFNet, ConvNeXt, the neck and the decoder of SAM), with a Pow or two
        Subs too; sequences (N, C, L) as well. The runtime joins such operators only over the last axis. Without w, w'
        is 1. The results differ by the rounding of float32.
    Left alone: opsets below 17 (``opset``); inner tensors that others read (``read-between``); other axes
        (``other-axes``); an unknown number of channels (``unknown-channels``), and fewer than 12, with which the parts
        are faster (``narrow``); powers and summands of another formula (``other-numbers``); other types than float32
        (``not-float32``). A factor or a summand that is computed, or of another shape than w, stays behind the result.
    """
    change, known, taken = Change(), Known(model), names(model)
    for square in computing_nodes(model, "Pow", "Mul"):
        found = find_centred(square)
        if found is None:
            continue
        lengths = known.lengths(found.x) or ()
        epsilon = epsilon_of(found.chain, len(lengths))
        if known.dtype(found.x) is not ir.DataType.FLOAT:
            change.skip("not-float32")
        elif epsilon is None:
            change.skip("other-numbers")
        elif (reason := _obstacle(found, lengths)) or model.opset_imports.get("", 0) < HAS_LAYER_NORMALIZATION:
            change.skip(reason or "opset")
        else:
            _fuse(found, epsilon, lengths, taken)
            change.applied += 1
    return change


def _obstacle(found: Parts, lengths: Sequence[int | None]) -> str:
    """Return why a normalization of a tensor of these lengths is left alone; nothing if it is not."""
    if len(lengths) < 3 or not all(is_mean_of(mean, CHANNELS, len(lengths)) for mean in found.means):
        return "other-axes"
    channels = lengths[CHANNELS]
    if channels is None or channels < FEWEST:
        return "unknown-channels" if channels is None else "narrow"
    return "read-between" if found.is_read_between else ""


def _fuse(found: Parts, epsilon: float, lengths: Sequence[int | None], taken: set[str]) -> None:
    """Replace the operators of a normalization of a tensor of these lengths."""
    last, rank, channels = found.nodes[-1], len(lengths), lengths[CHANNELS]
    assert channels is not None  # otherwise there is an obstacle
    nodes, parameters = [*found.nodes], [np.ones(channels, np.float32)]
    for index, op in enumerate(("Mul", "Add")):
        step = of_each_place(last, op, CHANNELS, lengths)
        tensor = None if step is None else constant(step[1])
        if step is not None and tensor is not None:
            last = step[0]
            nodes.append(last)
            parameters[index:] = [tensor.numpy().reshape(channels)]
    stem = node_name(last)
    inputs = [
        add_initializer(graph_of(last), unused_name(taken, f"{stem}/{word}"), array)
        for word, array in zip(("scale", "shift"), parameters, strict=False)
    ]
    there, back = [0, *range(2, rank), 1], [0, rank - 1, *range(1, rank - 1)]
    x = insert_before(last, taken, "Transpose", [found.x], {"perm": there}, stem=f"{stem}/channels_last")
    attributes = {"axis": -1, "epsilon": epsilon}
    y = insert_before(last, taken, "LayerNormalization", [x, *inputs], attributes, stem=f"{stem}/normalized")
    x.type = y.type = ir.TensorType(ir.DataType.FLOAT)
    replace_node(last, ir.node("Transpose", [y], {"perm": back}, name=stem))
    remove_unread(reversed(nodes[:-1]))
