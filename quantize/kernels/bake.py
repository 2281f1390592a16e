"""Put native operators into a graph that ONNX Runtime has optimized: tables, and convolutions with tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...calibration.session import OPERATORS_DOMAIN, Array, open_session, run_session
from ...transforms.graph import add_initializer, constant, fresh_name, remove_if_unread, sole_reader, take_place
from .library import VERSION

MS = "com.microsoft"
ELEMENTWISE = frozenset(
    "Abs Add Clip Div Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Max Min Mish Mul Neg Pow Relu Sigmoid Softplus "
    "Sqrt Sub Tanh".split()
)
"""Float operators whose result at an element depends on this element alone, apart from constants of one element."""
INTEGER: Mapping[str, tuple[Mapping[int, int], int]] = {
    "QLinearSigmoid": ({0: 2}, 4),
    "QLinearLeakyRelu": ({0: 2}, 4),
    "QLinearAdd": ({0: 2, 3: 5}, 7),
    "QLinearMul": ({0: 2, 3: 5}, 7),
    "DequantizeLinear": ({0: 2}, -1),
    "QuantizeLinear": ({}, 2),
}
"""By operator: the zero point of each integer input, and that of the result; -1 for a float result."""
CONV_INPUTS, CONV_ZEROS, CONV_RESULT = 8, (2, 5), 7
"""QLinearConv: the inputs before the bias, the zero points of x and w, and that of the result."""


@dataclass(frozen=True, eq=False)
class _Chain:
    """What a tensor is a function of, element by element.

    Attributes:
        root: The uint8 tensor.
        nodes: The nodes between the two, in order.
    """

    root: ir.Value
    nodes: tuple[ir.Node, ...]


def bake_tables(model: ir.Model) -> int:
    """Replace chains of elementwise operators between two uint8 tensors; return how many.

    Before:  s = QLinearSigmoid(x, ...); y = QLinearMul(x, ..., s, ...)
    After:   y = ai.requant.Table(x, table), with the values that the runtime computes for 0 to 255
    Left alone: what reads two tensors, int8 tensors, and constants with more than one element.
    """
    chains: dict[ir.Value, _Chain] = {}
    for node in model.graph:
        chain = _chain(node, chains)
        if chain is not None:
            chains[node.outputs[0]] = chain
    ends = [value for value, chain in chains.items() if _is_end(value, chain, chains)]
    tables = [_table(model, value, chains[value]) for value in ends]  # before any tensor is replaced
    for value, table in zip(ends, tables, strict=True):
        constants = [add_initializer(model.graph, fresh_name(model, f"{value.name}_table"), table)]
        _compute(model, value, "Table", [chains[value].root, *constants], {})
    return len(ends)


def bake_convolutions(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> int:
    """Replace convolutions of uint8 tensors in NHWC layout, each with the table that alone reads it; return how many.

    Before:  c = com.microsoft.QLinearConv <channels_last=1> (x, ...); y = ai.requant.Table(c, table)
    After:   y = ai.requant.Convolution(x, ..., table)
    Left alone: weights with a zero point, int8 activations, and weights that are no constants.

    Args:
        model: The model.
        wanted: Whether to replace a convolution.
    """
    count = 0
    for node in [node for node in model.graph if _is_convolution(node) and wanted(node)]:
        inputs = [*node.inputs, *[None] * (CONV_INPUTS + 1 - len(node.inputs))]
        result = node.outputs[0]
        reader = sole_reader(result)
        if reader is not None and (reader.op_type, reader.domain) == ("Table", OPERATORS_DOMAIN):
            inputs.append(reader.inputs[1])
            result = reader.outputs[0]
        kept = ("dilations", "group", "pads", "strides")
        _compute(model, result, "Convolution", inputs, {k: v for k, v in node.attributes.items() if k in kept})
        count += 1
    return count


def is_depthwise(node: ir.Node) -> bool:
    """Return whether each channel of a convolution has a kernel of its own."""
    weights = constant(node.inputs[3])
    return weights is not None and weights.shape[1] == 1 and node.attributes.get_int("group", 1) == weights.shape[0]


# ----------------------------------------------------------------------------------------------------------- tables


def _chain(node: ir.Node, chains: Mapping[ir.Value, _Chain]) -> _Chain | None:
    """Return what the result of a node is a function of; None if that is not one uint8 tensor."""
    zeros, _ = INTEGER.get(node.op_type, ({}, -1))
    known = node.op_type in INTEGER or (node.op_type in ELEMENTWISE and node.domain == "")
    if not known or len(node.outputs) != 1:
        return None
    roots: dict[ir.Value, None] = {}
    nodes: dict[ir.Node, None] = {}
    axes = 0  # of the constants
    for index, value in enumerate(node.inputs):
        if value is None:
            continue
        tensor = constant(value)
        if tensor is not None:
            if tensor.size != 1:
                return None
            axes = max(axes, len(tensor.shape))
        elif value in chains:
            roots[chains[value].root] = None
            nodes |= dict.fromkeys(chains[value].nodes)
        elif index in zeros and _is_uint8(node, zeros[index]):
            roots[value] = None
        else:
            return None
    if len(roots) != 1:
        return None
    (root,) = roots
    keeps_shape = axes <= (1 if root.shape is None else len(root.shape))  # more axes would broadcast the result
    return _Chain(root, (*nodes, node)) if keeps_shape else None


def _is_uint8(node: ir.Node, zero: int) -> bool:
    """Return whether the zero point at an input of a node is uint8."""
    tensor = constant(node.inputs[zero]) if 0 <= zero < len(node.inputs) else None
    return tensor is not None and tensor.dtype is ir.DataType.UINT8


def _is_end(value: ir.Value, chain: _Chain, chains: Mapping[ir.Value, _Chain]) -> bool:
    """Return whether a tensor is uint8, and is read by more than functions of the same root."""
    node = chain.nodes[-1]
    if not _is_uint8(node, INTEGER.get(node.op_type, ({}, -1))[1]):
        return False
    if value.is_graph_output():
        return True
    results = [use.node.outputs[0] for use in value.uses()]
    return any(result not in chains or chains[result].root is not chain.root for result in results)


def _table(model: ir.Model, value: ir.Value, chain: _Chain) -> Array:
    """Return the 256 values of a function, as the runtime computes them without optimizations."""
    root = ir.val("x", dtype=ir.DataType.UINT8, shape=[256])
    copies: dict[ir.Value, ir.Value] = {chain.root: root}
    constants: dict[str, ir.Value] = {}
    nodes: list[ir.Node] = []
    for node in chain.nodes:
        inputs = [None if each is None else copies.get(each) or _copied(each, constants) for each in node.inputs]
        made = ir.node(node.op_type, inputs, dict(node.attributes), domain=node.domain)
        made.outputs[0].name = f"t{len(nodes)}"
        copies[node.outputs[0]] = made.outputs[0]
        nodes.append(made)
    result = copies[value]
    result.dtype, result.name = ir.DataType.UINT8, "y"
    graph = ir.Graph(
        [root],
        [result],
        nodes=nodes,
        initializers=list(constants.values()),
        opset_imports=model.opset_imports,
        name="table",
    )
    source = bytes(ir.to_proto(ir.Model(graph, ir_version=model.ir_version)).SerializeToString())
    session = open_session(source, threads=1, optimize=False)
    values: Array = run_session(session, ["y"], {"x": np.arange(256, dtype=np.uint8)}, "table")["y"]
    return values


def _copied(value: ir.Value, constants: dict[str, ir.Value]) -> ir.Value:
    """Return a constant for another graph."""
    tensor = constant(value)
    assert tensor is not None  # a chain reads its root and constants
    name = f"c{len(constants)}"
    constants[name] = ir.Value(name=name, const_value=ir.tensor(tensor.numpy(), name=name))
    return constants[name]


# ----------------------------------------------------------------------------------------------------- convolutions


def _is_convolution(node: ir.Node) -> bool:
    """Return whether a node is a convolution that the native operator computes."""
    if (node.op_type, node.domain, node.attributes.get_int("channels_last", 0)) != ("QLinearConv", MS, 1):
        return False
    constants = [constant(value) for value in node.inputs[1:] if value is not None]
    if any(tensor is None for tensor in constants) or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return False
    weights, zeros = constant(node.inputs[3]), constant(node.inputs[CONV_ZEROS[1]])
    assert weights is not None
    assert zeros is not None
    plain = weights.dtype is ir.DataType.INT8 and len(weights.shape) == 4 and not zeros.numpy().any()
    return plain and _is_uint8(node, CONV_ZEROS[0]) and _is_uint8(node, CONV_RESULT)


# ------------------------------------------------------------------------------------------------------------ graph


def _compute(
    model: ir.Model,
    value: ir.Value,
    operator: str,
    inputs: Iterable[ir.Value | None],
    attributes: Mapping[str, ir.Attr],
) -> None:
    """Compute a tensor by a native operator instead, and remove the nodes that nothing reads then."""
    old = value.producer()
    assert old is not None
    before = [each.producer() for each in old.inputs if each is not None]
    name = fresh_name(model, f"{value.name}_native")
    value.type = ir.TensorType(ir.DataType.UINT8)
    take_place(old, ir.node(operator, list(inputs), dict(attributes), domain=OPERATORS_DOMAIN, name=name))
    while before:
        node = before.pop()
        sources = [] if node is None else [each.producer() for each in node.inputs if each is not None]
        if remove_if_unread(node):
            before += sources
    model.opset_imports[OPERATORS_DOMAIN] = VERSION
