"""Chains of elementwise operators between uint8 tensors, and the tables of 256 values that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx_ir as ir

from ...calibration.model.session import Array, open_session, run_session
from ...transforms.graphs.queries import constant
from ...transforms.patterns.elementwise import Place, channels_of
from ...transforms.spell_slow_functions import spell_body

INTEGER: Mapping[str, tuple[Mapping[int, int], int]] = {
    "QLinearSigmoid": ({0: 2}, 4),
    "QLinearLeakyRelu": ({0: 2}, 4),
    "QLinearAdd": ({0: 2, 3: 5}, 7),
    "QLinearMul": ({0: 2, 3: 5}, 7),
    "DequantizeLinear": ({0: 2}, -1),
    "QuantizeLinear": ({}, 2),
}
"""By operator: the zero point of each integer input, and that of the result; -1 for a float result."""


@dataclass(frozen=True, eq=False)
class Chain:
    """Operators that compute a tensor from one uint8 tensor, element by element.

    Attributes:
        root: The uint8 tensor.
        nodes: The operators, in order; the last one computes the tensor.
        channels: The number of functions: 1, or one for each channel.
        place: The axis of the channels; None for one function of tensors of any shape.
    """

    root: ir.Value
    nodes: tuple[ir.Node, ...]
    channels: int = 1
    place: Place | None = None


def chain_of(node: ir.Node, chains: Mapping[ir.Value, Chain], place: Place | None = None) -> Chain | None:
    """Return the chain whose last operator is a node; None if its result depends on no uint8 tensor, or on several.

    Args:
        node: The node.
        chains: The chains that compute its inputs, by input. Other inputs are constants or uint8.
        place: The axis of the channels of the tensors; None if it is unknown.
    """
    zeros, _ = INTEGER.get(node.op_type, ({}, -1))
    counts = {1 if node.op_type in INTEGER else channels_of(node, place)}
    if 0 in counts or len(node.outputs) != 1:
        return None
    roots: dict[ir.Value, None] = {}
    nodes: dict[ir.Node, None] = {}
    axes = 0  # of the constants
    for index, value in enumerate(node.inputs):
        if value is None:
            continue
        tensor = constant(value)
        if tensor is not None:
            if tensor.size != 1 and node.op_type in INTEGER:
                return None
            axes = max(axes, len(tensor.shape))
        elif value in chains:
            roots[chains[value].root] = None
            nodes |= dict.fromkeys(chains[value].nodes)
            counts.add(chains[value].channels)
        elif index in zeros and is_uint8(node, zeros[index]):
            roots[value] = None
        else:
            return None
    if len(roots) != 1:
        return None
    (root,) = roots
    rank = 1 if root.shape is None else len(root.shape)
    keeps_shape = axes <= (rank if place is None else place.rank)  # more axes would broadcast the result
    channels = max(counts)
    if not keeps_shape or len(counts - {1}) > 1:
        return None
    return Chain(root, (*nodes, node), channels, place if channels > 1 else None)


def is_uint8(node: ir.Node, zero: int) -> bool:
    """Return whether the zero point at an input of a node is uint8."""
    tensor = constant(node.inputs[zero]) if 0 <= zero < len(node.inputs) else None
    return tensor is not None and tensor.dtype is ir.DataType.UINT8


def table_of(model: ir.Model, chain: Chain) -> Array:
    """Return the 256 values of a function, as the runtime computes them without optimizations.

    Returns:
        uint8 (256,); (C, 256) for a function of each of C channels.
    """
    values = spread(np.arange(256, dtype=np.uint8), chain)
    root, constants = ir.val("x", dtype=ir.DataType.UINT8, shape=values.shape), Constants()
    copies = copied(chain.nodes, {chain.root: root}, constants.add)
    result = copies[-1].outputs[0]
    result.dtype = ir.DataType.UINT8
    found = _evaluated(model, (root, result), copies, constants, values)
    return found if chain.place is None else np.ascontiguousarray(found.reshape(256, chain.channels).T)


def spread(values: Array, chain: Chain) -> Array:
    """Return values (n,) as an input of a function: (n,), or n rows with each value in all channels."""
    place = chain.place
    if place is None:
        return values
    shape = [chain.channels if axis == place.axis else 1 for axis in range(place.rank)]
    whole = np.broadcast_to(values.reshape(-1, *[1] * (place.rank - 1)), [len(values), *shape[1:]])
    return np.ascontiguousarray(whole)


def exact_values(model: ir.Model, chain: Chain, values: Array) -> Array:
    """Return a function of float values, without the roundings in front of it, between its operators and behind it.

    Args:
        model: The model.
        chain: A function from a DequantizeLinear to a QuantizeLinear.
        values: Values of the root, dequantized; float32.
    """
    first, *inner, last = chain.nodes
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=list(values.shape))
    known, rounded = {first.outputs[0]: x}, dict[ir.Value, ir.Value]()
    nodes, constants = list[ir.Node](), Constants()
    for node in inner:
        source = node.inputs[0]
        if node.op_type == "DequantizeLinear" and source is not None:
            known[node.outputs[0]] = x if source is chain.root else known[rounded[source]]
        elif node.op_type == "QuantizeLinear" and source is not None:
            rounded[node.outputs[0]] = source
        else:
            nodes += copied([node], known, constants.add)
            known[node.outputs[0]] = nodes[-1].outputs[0]
            nodes[-1].outputs[0].name = f"t{len(nodes)}"
    source = last.inputs[0]
    assert source is not None
    result = known[source]
    return _evaluated(model, (x, result), nodes, constants, values) if nodes else values


def _evaluated(
    model: ir.Model,
    ends: tuple[ir.Value, ir.Value],
    nodes: Sequence[ir.Node],
    constants: Sequence[ir.Value],
    values: Array,
) -> Array:
    """Return what the runtime computes for values of one tensor, without optimizations."""
    source = serialized(model, ends, nodes, constants)
    found = _run(source, values.tobytes(), values.dtype.str, values.shape)
    return found.reshape(values.shape)  # constants of several axes add axes


def serialized(
    model: ir.Model, ends: tuple[ir.Value, ir.Value], nodes: Sequence[ir.Node], constants: Sequence[ir.Value]
) -> bytes:
    """Return a serialized model of some nodes alone, with functions written as the body of a native call has them.

    Args:
        model: The model that the nodes are from.
        ends: The input and the output, which is named ``y``.
        nodes: Copies of the nodes, in order.
        constants: The constants that they read.
    """
    x, result = ends
    result.name = "y"
    graph = ir.Graph(
        [x], [result], nodes=nodes, initializers=constants, opset_imports=model.opset_imports, name="alone"
    )
    spell_body(graph)
    made = ir.to_proto(ir.Model(graph, ir_version=model.ir_version))
    return bytes(made.SerializeToString(deterministic=True))


@lru_cache(maxsize=1024)
def _run(source: bytes, values: bytes, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return the result of a serialized model; the plans that a model is tried with have most tables in common."""
    session = open_session(source, threads=1, optimize=False)
    found: Array = run_session(session, ["y"], {"x": np.frombuffer(values, dtype).reshape(shape)}, "table")["y"]
    return found


class Constants(list[ir.Value]):
    """The constants of a graph, named ``c0``, ``c1``, ..."""

    def add(self, tensor: ir.TensorProtocol) -> ir.Value:
        """Append a constant; return it."""
        self.append(ir.Value(name=f"c{len(self)}", const_value=ir.tensor(tensor.numpy())))
        return self[-1]


def copied(
    nodes: Iterable[ir.Node], known: Mapping[ir.Value, ir.Value], add_constant: Callable[[ir.TensorProtocol], ir.Value]
) -> list[ir.Node]:
    """Return copies of nodes for another graph; their results are named ``t0``, ``t1``, ``t1_1``, ...

    Args:
        nodes: The nodes, in order.
        known: The values of the other graph that stand for values of this one.
        add_constant: Adds a constant to the other graph. All values that are not in `known`, and that none of the nodes
            computes, must be constants.
    """
    values, made = dict(known), list[ir.Node]()
    for node in nodes:
        for value in node.inputs:
            if value is not None and value not in values:
                tensor = constant(value)
                assert tensor is not None
                values[value] = add_constant(tensor)
        inputs = [None if value is None else values[value] for value in node.inputs]
        count = len(node.outputs)
        copy = ir.node(node.op_type, inputs, dict(node.attributes), domain=node.domain, num_outputs=count)
        for index, (value, same) in enumerate(zip(node.outputs, copy.outputs, strict=True)):
            same.name = f"t{len(made)}_{index}" if index else f"t{len(made)}"
            values[value] = same
        made.append(copy)
    return made
