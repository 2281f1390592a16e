"""Give each operator its own copy of its weights."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.queries import computing_graphs, constant, node_name
from .graphs.rewriter import names, unused_name
from .int8.ops import row_of
from .registry import Change, transform


@transform("split_shared_weights")
def split_shared_weights(model: ir.Model) -> Change:
    """Copy a weight or bias that several operators read, so that each operator has its own.

    Before:  y = Conv(Relu(Conv(x, W, b)), W, b)
    After:   y = Conv(Relu(Conv(x, W, b)), W_2, b_2)
        Folding, equalizing or rounding the weights of one layer then does not change other layers.
        `deduplicate_initializers` does the opposite.
    Left alone: constants that a reader does not use as weight or bias; initializers that a caller may override or that
        are graph outputs; Constant nodes: run `fold_constants` first.
    """
    change = Change()
    taken = names(model)
    for graph in computing_graphs(model):
        for weight in tuple(graph.initializers.values()):
            tensor = constant(weight)
            if tensor is None or weight.is_graph_output():
                continue
            readers = list(dict.fromkeys(use.node for use in weight.uses()))
            if len(readers) < 2 or not all(_has_weight(reader, weight) for reader in readers):
                continue
            for reader in sorted(readers, key=node_name)[1:]:
                _give_copy(graph, reader, weight, tensor, unused_name(taken, f"{weight.name}"))
                change.applied += 1
    return change


def _has_weight(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node reads `value` only as its weight or bias."""
    row = row_of(node)
    places = {index for index, each in enumerate(node.inputs) if each is value}
    return row is not None and row.weight is not None and places <= {row.weight, row.bias, 2}


def _give_copy(graph: ir.Graph, reader: ir.Node, weight: ir.Value, tensor: ir.TensorProtocol, name: str) -> None:
    """Make one reader read a new initializer with the same tensor."""
    own = ir.Value(name=name, type=weight.type, shape=weight.shape, const_value=tensor)
    graph.register_initializer(own)
    for index, value in enumerate(reader.inputs):
        if value is weight:
            reader.replace_input_with(index, own)
