"""Move a Squeeze of a convolution's result behind what the convolution can absorb."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import axes_of, computing_nodes, constant, graph_of, node_name, producer_of, sole_reader
from .graphs.rewriter import add_initializer, discard, names, remove, replace, unused_name
from .patterns.elementwise import BATCH_NORM, Place, channels_of
from .patterns.linear import CONVOLUTIONS
from .registry import Change, transform

CHANNELS = 1  # the axis


@transform("sink_squeezes", after=("fold_constants",))
def sink_squeezes(model: ir.Model) -> Change:
    """Move a Squeeze of a convolution's result behind functions of each value, which the convolution can absorb.

    Before:  y = Relu(Add(Squeeze(Conv(x), [2]), b)), b (1, C, 1)
    After:   y = Squeeze(Relu(Add(Conv(x), b')), [2]), b' (1, C, 1, 1)
        Keras writes a Conv1D so. Its bias, norm and activation fold into the convolution; in front of the next one the
        Squeeze meets an Unsqueeze.
    Left alone: a Squeeze of another axis than those behind the channels (``other-axes``), also where its axes or the
        rank are not known; operators of two tensors, those with a constant for another axis than the channels, and
        those that are not the only reader.
    """
    change, known, taken = Change(), Known(model), names(model)
    for squeeze in computing_nodes(model, "Squeeze"):
        source = squeeze.inputs[0]
        conv = producer_of(source)
        if conv is None or conv.domain or conv.op_type not in CONVOLUTIONS:
            continue
        rank = known.rank(source) or 0
        axes = _axes(squeeze, rank)
        if not axes or axes[0] <= CHANNELS:
            change.skip("other-axes")
            continue
        place = Place(rank - len(axes), CHANNELS)
        while (node := sole_reader(squeeze.outputs[0])) is not None and _is_function(node, place):
            _widen(node, place, axes, taken)
            squeeze = _moved(squeeze, node, taken)
            change.applied += 1
    return change


def _axes(squeeze: ir.Node, rank: int) -> list[int]:
    """Return the axes of a Squeeze of a tensor, counted from the first one, in order; none if they are not known."""
    given = axes_of(squeeze)
    return sorted(axis % rank for axis in given) if rank and given else []


def _is_function(node: ir.Node, place: Place) -> bool:
    """Whether a node is a function of each value of one tensor, which may differ by channels."""
    computed = [value for value in node.inputs if value is not None and constant(value) is None]
    return len(computed) == 1 and channels_of(node, place) > 0


def _widen(node: ir.Node, place: Place, axes: Sequence[int], taken: set[str]) -> None:
    """Give the constants of a function the axes, of length 1, that its tensor has in front of the Squeeze."""
    if node.op_type == BATCH_NORM:
        return
    for index, value in enumerate(node.inputs):
        tensor = constant(value)
        if tensor is None or tensor.size == 1:
            continue
        lengths = [*([1] * (place.rank - len(tensor.shape))), *map(int, tensor.shape.numpy())]
        for axis in axes:
            lengths.insert(axis, 1)
        name = unused_name(taken, f"{node_name(node)}/wide")
        wide = add_initializer(graph_of(node), name, tensor.numpy().reshape(lengths), tensor.dtype)
        node.replace_input_with(index, wide)
        discard(value)


def _moved(squeeze: ir.Node, node: ir.Node, taken: set[str]) -> ir.Node:
    """Move a Squeeze behind its reader; return the new Squeeze."""
    (source, *axes), before, result = squeeze.inputs, squeeze.outputs[0], node.outputs[0]
    attributes = {name: each.value for name, each in squeeze.attributes.items()}
    after = ir.node("Squeeze", [source, *axes], attributes, name=node_name(squeeze))
    graph_of(node).insert_after(node, [after])
    after.outputs[0].name = unused_name(taken, f"{node_name(squeeze)}/sunk")
    replace(result, after.outputs[0])
    node.replace_input_with([*node.inputs].index(before), source)
    after.replace_input_with(0, result)
    if result.name == after.outputs[0].name:  # of an output of the graph
        result.name = unused_name(taken, f"{node_name(node)}/wide")
    result.shape = None
    remove(squeeze)
    return after
