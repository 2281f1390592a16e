"""Networks with control flow: an If with two branches, and a Loop over time."""

from __future__ import annotations

import numpy as np
from graph_builder import Graph, batch_norm, conv, linear, reduce_mean, relu, sigmoid, token_linear
from onnx import TensorProto

BRANCH_WIDTH, BRANCH_CLASSES = 32, 10


def if_branches(graph: Graph, size: int) -> None:
    """Write a convolution, an If with two branches, and a linear layer. The condition: the input mean is above 0.

    Both branches read the output of the convolution from the outer graph. The weights of the first branch are in the
    outer graph too, as PyTorch's exporter writes them; the weights of the second branch are in its body.
    """
    width = BRANCH_WIDTH
    x = graph.input("input", TensorProto.FLOAT, ["N", 3, size, size])
    bright = graph.node(
        "Greater", reduce_mean(graph, x, [0, 1, 2, 3], at="", keepdims=0), graph.constant(0.0, at=""), at=""
    )
    x = relu(graph, batch_norm(graph, conv(graph, x, "/stem", (width, 3, 3, 3)), "/bn", width), "/relu")
    plain = graph.body("plain", keeps=False)
    y = relu(plain, conv(plain, x, "/plain/conv", (width, width, 3, 3), bias=0.0), "/plain/relu")
    plain.output("plain_out", y, TensorProto.FLOAT, ["N", width, size, size])
    separable = graph.body("separable", keeps=True)
    y = conv(separable, x, "/separable/depthwise", (width, 1, 5, 5), bias=0.0)
    y = relu(separable, y, "/separable/relu")
    y = conv(separable, y, "/separable/pointwise", (width, width, 1, 1), bias=0.0)
    separable.output("separable_out", y, TensorProto.FLOAT, ["N", width, size, size])
    x = graph.node("If", bright, at="", then_branch=plain.proto, else_branch=separable.proto)
    x = graph.node("Flatten", graph.node("GlobalAveragePool", x, at="/pool"), at="", axis=1)
    logits = linear(graph, x, "/fc", width, BRANCH_CLASSES, gain=2.0)
    graph.output("output", logits, TensorProto.FLOAT, ["N", BRANCH_CLASSES])


CELL_INPUTS, CELL_HIDDEN, CELL_OUTPUTS = 64, 128, 32


def loop_rnn(graph: Graph, _size: int) -> None:
    """Write a Loop over time around a gated cell (the minimal gated unit of Zhou et al., 2016), and a linear layer.

    The input is `input` (N, sequence, 64), the output `output` (N, sequence, 32). The body reads the input and the
    weights from the outer graph.
    """
    inputs, hidden = CELL_INPUTS, CELL_HIDDEN
    x = graph.input("input", TensorProto.FLOAT, ["N", "sequence", inputs])
    shape = graph.node("Shape", x, at="")
    steps = graph.node("Gather", shape, graph.constant(1, at=""), at="", axis=0)
    batch = graph.node("Gather", shape, graph.constant([0], at=""), at="", axis=0)
    extent = graph.node("Concat", batch, graph.constant([hidden], at=""), at="", axis=0)
    start = graph.node("ConstantOfShape", extent, at="")
    going = graph.constant(np.asarray(True), at="")
    body = _cell(graph, x)
    _, states = graph.node_with_outputs("Loop", steps, going, start, at="", outputs=2, body=body.proto)
    y = graph.node("Transpose", states, at="", perm=[1, 0, 2])
    y = token_linear(graph, y, "/head", hidden, CELL_OUTPUTS, gain=2.0)
    graph.output("output", y, TensorProto.FLOAT, ["N", "sequence", CELL_OUTPUTS])


def _cell(graph: Graph, x: str) -> Graph:
    """Write the body: f = sigmoid(W (h, x_t)), c = tanh(U (f h, x_t)), next h = h + f (c - h)."""
    inputs, hidden, at = CELL_INPUTS, CELL_HIDDEN, "/cell"
    body = graph.body("cell", keeps=False)
    step = body.input("step", TensorProto.INT64, [])
    going = body.input("going", TensorProto.BOOL, [])
    state = body.input("state", TensorProto.FLOAT, ["N", hidden])
    now = body.node("Gather", x, step, at=at, axis=1)
    both = body.node("Concat", state, now, at=at, axis=1)
    forget = sigmoid(body, token_linear(body, both, f"{at}/forget", hidden + inputs, hidden), at)
    both = body.node("Concat", body.node("Mul", forget, state, at=at), now, at=at, axis=1)
    candidate = body.node("Tanh", token_linear(body, both, f"{at}/candidate", hidden + inputs, hidden, gain=1.5), at=at)
    change = body.node("Mul", forget, body.node("Sub", candidate, state, at=at), at=at)
    after = body.node("Add", state, change, at=at)
    body.output("going_out", body.node("Identity", going, at=at), TensorProto.BOOL, [])
    body.output("state_out", after, TensorProto.FLOAT, ["N", hidden])
    body.output("state_scan", body.node("Identity", "state_out", at=at), TensorProto.FLOAT, ["N", hidden])
    return body
