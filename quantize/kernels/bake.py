"""Put native operators into a graph that ONNX Runtime has optimized: tables, and convolutions with tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from ... import NATIVE_DOMAIN
from ...transforms.graphs.queries import MS, constant, has_plain_window, sole_reader
from ...transforms.graphs.rewriter import add_initializer, names, remove_unread, replace_node, unused_name
from .chains import INTEGER, Chain, chain_of, is_uint8, table_of
from .convolution_calls import CONVOLUTION, fits_operator
from .nodes import native_node

CONV_ZEROS, CONV_RESULT = (2, 5), 7
"""QLinearConv: the zero points of x and w, and that of the result."""


def bake_tables(model: ir.Model) -> int:
    """Replace chains of elementwise operators between two uint8 tensors; return how many.

    Before:  s = QLinearSigmoid(x, ...); y = QLinearMul(x, ..., s, ...)
    After:   y = ai.requant.Table(x, table), with the values that the runtime computes for 0 to 255
    Left alone: what reads two tensors, int8 tensors, and constants with more than one element.
    """
    chains: dict[ir.Value, Chain] = {}
    for node in model.graph:
        chain = chain_of(node, chains)
        if chain is not None:
            chains[node.outputs[0]] = chain
    ends = [value for value, chain in chains.items() if _is_end(value, chain, chains)]
    tables = [table_of(model, chains[value]) for value in ends]  # before any tensor is replaced
    taken = names(model)
    for value, table in zip(ends, tables, strict=True):
        constants = [add_initializer(model.graph, unused_name(taken, f"{value.name}_table"), table)]
        _compute(value, native_node(model.graph, "Table", [chains[value].root, *constants]), taken)
    return len(ends)


def bake_convolutions(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> int:
    """Replace convolutions of uint8 tensors in NHWC layout, each with the table that alone reads it; return how many.

    Before:  c = com.microsoft.QLinearConv <channels_last=1> (x, ...); y = ai.requant.Table(c, table)
    After:   y = ai.requant.Convolution(x, ..., table)
    Left alone: weights that are not int8 without their zero points or are no constants, and int8 activations.

    Args:
        model: The model.
        wanted: Whether to replace a convolution.
    """
    count, taken = 0, names(model)
    for node in [node for node in model.graph if _is_convolution(node) and wanted(node)]:
        inputs = [*node.inputs, *[None] * (len(CONVOLUTION) - len(node.inputs))]
        result = node.outputs[0]
        reader = sole_reader(result)
        if reader is not None and (reader.op_type, reader.domain) == ("Table", NATIVE_DOMAIN):
            inputs[CONVOLUTION.index("table")] = reader.inputs[1]
            result = reader.outputs[0]
        kept = {k: v for k, v in node.attributes.items() if k in ("dilations", "group", "pads", "strides")}
        _compute(result, native_node(model.graph, "Convolution", inputs, kept), taken)
        count += 1
    return count


def is_depthwise(node: ir.Node) -> bool:
    """Return whether each group of a convolution reads one channel and computes one."""
    weights = constant(node.inputs[3])
    return weights is not None and weights.shape[1] == 1 and node.attributes.get_int("group", 1) == weights.shape[0]


def _is_end(value: ir.Value, chain: Chain, chains: Mapping[ir.Value, Chain]) -> bool:
    """Return whether a tensor is uint8, and is read by more than functions of the same root."""
    node = chain.nodes[-1]
    if not is_uint8(node, INTEGER.get(node.op_type, ({}, -1))[1]):
        return False
    if value.is_graph_output():
        return True
    results = [use.node.outputs[0] for use in value.uses()]
    return any(result not in chains or chains[result].root is not chain.root for result in results)


# ----------------------------------------------------------------------------------------------------- convolutions


def _is_convolution(node: ir.Node) -> bool:
    """Return whether a node is a convolution that the native operator computes."""
    if (node.op_type, node.domain, node.attributes.get_int("channels_last", 0)) != ("QLinearConv", MS, 1):
        return False
    constants = [constant(value) for value in node.inputs[1:] if value is not None]
    if any(tensor is None for tensor in constants) or not has_plain_window(node):
        return False
    weights, zeros = constant(node.inputs[3]), constant(node.inputs[CONV_ZEROS[1]])
    assert weights is not None
    assert zeros is not None
    plain = len(weights.shape) == 4 and fits_operator(weights, zeros)
    return plain and is_uint8(node, CONV_ZEROS[0]) and is_uint8(node, CONV_RESULT)


# ------------------------------------------------------------------------------------------------------------ graph


def _compute(value: ir.Value, node: ir.Node, taken: set[str]) -> None:
    """Compute a uint8 tensor by `node` instead, and remove the nodes that nothing reads then."""
    old = value.producer()
    assert old is not None
    before = [each.producer() for each in old.inputs if each is not None]
    node.name = unused_name(taken, f"{value.name}_native")
    value.type = ir.TensorType(ir.DataType.UINT8)
    replace_node(old, node)
    remove_unread(before)
