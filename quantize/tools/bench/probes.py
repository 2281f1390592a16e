"""Nodes that make a compiled graph fail on a CPU that would compute something else, in any program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ....calibration.model.session import Array, open_session
from ...runtime.isa import probe
from ...runtime.macs import INTEGER, counted_as

BLOCKED = "com.microsoft.nchwc"
"""The domain of operators on (N, C / block, H, W, block); a block of channels fills a register of the CPU."""

NAME = "requant: compiled for another CPU or runtime; compile it again here"
"""The name of the failing nodes, which the runtime quotes in its message."""

CHANNELS, KEPT, WIDTH = 32, 31, 2
"""The size of the mask. With blocks of b, the first position of channel 31 is 63 - b: each b skips other positions."""


def add_probes(model: ir.Model) -> tuple[str, ...]:
    """Make the graph fail on a CPU that would compute something else; return the names of the probes.

    Before:  any graph that the runtime has optimized
    After:   the same, and for each probe a Gather from one zero, with index 0 here and out of bounds on other CPUs

    ``layout`` is for graphs with operators of `BLOCKED`: ReorderOutput reads only zeros of a constant if blocks have
    the length of this CPU. ``products`` is for graphs with integer kernels: ``2 * 255 * 127`` saturates in 16 bits. The
    probes read constants only, so a runtime that may optimize computes them once, while it loads the model.
    """
    probes: dict[str, list[ir.Node]] = {}
    if any(node.domain == BLOCKED for node in model.graph.all_nodes()):
        probes["layout"] = _layout_probe(_picked())
    opset = model.opset_imports.get("", 0)
    if opset >= 10 and any(
        counted_as(node.op_type, node.domain) in INTEGER for node in model.graph.all_nodes()
    ):  # the first with MatMulInteger
        probes["products"] = _products_probe(probe())
    nodes = [node for probing in probes.values() for node in probing]
    for value in (value for node in nodes for value in node.inputs):
        if value is not None and value.const_value is not None:
            model.graph.register_initializer(value)
    if nodes:
        model.graph.insert_before(model.graph[0], nodes)  # fail before any other work
    return tuple(probes)


def _constant(name: str, array: Array) -> ir.Value:
    """Return an initializer."""
    name = f"requant/probe/{name}"
    return ir.Value(
        name=name,
        const_value=ir.tensor(array, name=name),
        shape=ir.Shape(array.shape),
        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
    )


def _node(op: str, inputs: Sequence[ir.Value], name: str, domain: str = "", **attributes: int) -> ir.Node:
    """Return a node with one output."""
    written = [ir.AttrInt64(key, value) for key, value in attributes.items()]
    node = ir.Node(domain, op, inputs, written, name=name)
    node.outputs[0].name = f"requant/probe/{name}"
    return node


def _layout_probe(mask: Array) -> list[ir.Node]:
    """Return nodes that fail if ReorderOutput reads a 1 of a mask (1, `CHANNELS`, 1, `WIDTH`)."""
    picked = _node("ReorderOutput", [_constant("mask", mask)], "layout_picked", BLOCKED, channels=KEPT)
    index = _node("Cast", picked.outputs, "layout_index", to=int(ir.DataType.INT64))
    zero = _constant("layout_zero", np.zeros(1, np.float32))
    return [picked, index, _node("Gather", [zero, index.outputs[0]], f"{NAME} (layout)")]


def _products_probe(total: int) -> list[ir.Node]:
    """Return nodes that fail if ``2 * 255 * 127`` is not `total`."""
    factors = [_constant("a", np.full((1, 2), 255, np.uint8)), _constant("b", np.full((2, 1), 127, np.int8))]
    products = _node("MatMulInteger", factors, "products_sum")
    expected = _constant("products_expected", np.asarray(total, np.int32))
    index = _node("Sub", [products.outputs[0], expected], "products_index")
    zero = _constant("products_zero", np.zeros(1, np.float32))
    return [products, index, _node("Gather", [zero, index.outputs[0]], f"{NAME} (products)")]


def _picked() -> Array:
    """Return a mask with 0 at the positions that ReorderOutput reads on this CPU, and 1 at all others."""
    places = np.arange(CHANNELS * WIDTH, dtype=np.float32).reshape(1, CHANNELS, 1, WIDTH)
    reorder = _node("ReorderOutput", [_constant("mask", places)], "layout_picked", BLOCKED, channels=KEPT)
    reorder.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    mask, opsets = reorder.inputs[0], {"": 13, BLOCKED: 1}
    assert mask is not None
    graph = ir.Graph([], reorder.outputs, nodes=[reorder], initializers=[mask], opset_imports=opsets, name="picked")
    model = ir.Model(graph, ir_version=8)
    session = open_session(bytes(ir.to_proto(model).SerializeToString()), threads=1, optimize=False)
    read = np.asarray(session.run(None, {})[0], np.int64)
    picked = np.ones(places.size, np.float32)
    picked[read.reshape(-1)] = 0.0
    return picked.reshape(places.shape)
