"""A GRU in integers: one product of all inputs, and a Scan whose body multiplies the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ..graphs.queries import MS, graph_of, node_name
from ..graphs.rewriter import add_initializer, remove, replace
from .plan import Unit
from .qparams import Array, quantize
from .recurrent import BACKWARD
from .weights import WeightWriter

FIRST_OPSET = 13  # the opset whose Split and Unsqueeze take their lengths and axes as an input
GATES = 3  # z, r and h, in this order, in all weights and biases


@dataclass
class _Code:
    """Writes the nodes of one graph in order.

    Attributes:
        weights: Writes names and int8 weights.
        unit: The unit of the GRU.
        stem: The beginning of all names.
        graph: The graph that gets the constants.
        nodes: The nodes so far.
        count: The number of constants that became int8.
    """

    weights: WeightWriter
    unit: Unit
    stem: str
    graph: ir.Graph
    nodes: list[ir.Node] = field(default_factory=list)
    count: int = 0

    def several(
        self, outputs: int, op: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Append a node; return its outputs."""
        name = self.weights.writer.name(f"{self.stem}/{op.lower()}")
        node = ir.node(op, inputs, attributes, domain=domain, name=name, num_outputs=outputs)
        for output in node.outputs:
            output.name = self.weights.writer.name(f"{name}_output")
        self.nodes.append(node)
        return node.outputs

    def one(self, op: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Append a node with one output; return the output."""
        return self.several(1, op, *inputs, domain=domain, **attributes)[0]

    def constant(self, array: Array, what: str) -> ir.Value:
        """Return a new initializer."""
        return add_initializer(self.graph, self.weights.writer.name(f"{self.stem}/{what}"), array)

    def integers(self, *numbers: int) -> ir.Value:
        """Return a new initializer, int64 (n,)."""
        return self.constant(np.array(numbers, np.int64), "numbers")

    def product(self, x: ir.Value, matrix: Array, bias: Array | None, what: str) -> ir.Value:
        """Append a product by int8 weights (K, N), with a bias (N,); ranges of `x` are found at run time."""
        params = self.weights.without_saturation(self.unit, matrix, self.weights.params(matrix, 1), -1)
        parts = ((what, quantize(matrix, params)), (f"{what}_scale", params.scale), (f"{what}_zero", params.zero_point))
        inputs = [self.constant(array, name) for name, array in parts]
        added = None if bias is None else self.constant(bias, f"{what}_bias")
        self.count += 1
        return self.one("DynamicQuantizeMatMul", x, *inputs, added, domain=MS)


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """The float weights and biases of one direction, with the state size H.

    Attributes:
        matrix: W of the inputs, (I, 3H).
        state: R of the state, (H, 3H).
        bias: What is added to the products of the inputs, (3H,).
        state_bias: What is added to the product of the state before the reset gate, (H,); zero unless
            `linear_before_reset` is set.
    """

    matrix: Array
    state: Array
    bias: Array
    state_bias: Array

    @classmethod
    def of(cls, node: ir.Node, direction: int, weights: WeightWriter, *, reset_after: bool) -> _Weights:
        """Return the weights of a direction."""
        w, r = (weights.array(node, index)[direction] for index in (1, 2))
        size = r.shape[1]
        both = weights.array(node, 3)[direction] if len(node.inputs) > 3 and node.inputs[3] is not None else None
        of_input, of_state = np.zeros((2, GATES * size), np.float32) if both is None else both.reshape(2, -1).copy()
        later = of_state[2 * size :].copy() if reset_after else np.zeros(size, np.float32)
        of_state[2 * size :] -= later
        return cls(w.T, r.T, of_input + of_state, later)


def to_scan(node: ir.Node, unit: Unit, weights: WeightWriter) -> int:
    """Replace a GRU by integer products.

    Before:  y, h = GRU(X (S, B, I), W (D, 3H, I), R (D, 3H, H), b (D, 6H), lengths (B,), h0 (D, B, H))
    After:   p = DynamicQuantizeMatMul(X, int8 W (I, 3H D)) + b, for all steps and directions at once;
             y, h = Scan(h0, p) in each direction, whose body computes the state with DynamicQuantizeMatMul(h, int8 R)
    The recurrence follows https://onnx.ai/onnx/operators/onnx__GRU.html, ``h' = n + z (h - n)`` with
    ``n = tanh(p_h + r (h R_h + b_h))`` or, without `linear_before_reset`, ``n = tanh(p_h + (r h) R_h)``. From the
    length of its sequence on, the state of an item stays and its outputs are 0.

    Returns:
        The number of constants that became int8.
    """
    code = _Code(weights, unit, node_name(node), graph_of(node))
    reset_after = bool(node.attributes.get_int("linear_before_reset", 0))
    backward = BACKWARD[node.attributes.get_string("direction", "forward")]
    parts = [_Weights.of(node, index, weights, reset_after=reset_after) for index in range(len(backward))]
    x, _, _, _, lengths, before = [*node.inputs, *[None] * 6][:6]
    assert x is not None  # required by the operator
    size = parts[0].state.shape[0]
    matrix, bias = np.concatenate([p.matrix for p in parts], axis=1), np.concatenate([p.bias for p in parts])
    product = code.product(x, np.ascontiguousarray(matrix), bias, "w")
    sizes = code.integers(*[2 * size, size] * len(parts))
    split = code.several(2 * len(parts), "Split", product, sizes, axis=-1)
    inside = [] if lengths is None else [_mask(code, x, lengths)]
    found = []
    for index, part in enumerate(parts):
        state = _zeros(code, x, size) if before is None else _given(code, before, index, inside)
        body = _body(code, part, masked=bool(inside), reset_after=reset_after)
        scanned = [*split[2 * index : 2 * index + 2], *inside]
        found.append(_scan(code, [state, *scanned], body, backward[index]))
    _finish(node, code, [(scan[1], scan[0]) for scan in found])
    return code.count


def _scan(code: _Code, inputs: Sequence[ir.Value], body: ir.Graph, backward: int) -> Sequence[ir.Value]:
    """Append a Scan over all inputs but the first, which is the state; return the last state and all states."""
    count = len(inputs) - 1
    attributes: dict[str, Any] = {"scan_input_directions": [backward] * count, "scan_output_directions": [backward]}
    return code.several(2, "Scan", *inputs, num_scan_inputs=count, body=body, **attributes)


def _mask(code: _Code, x: ir.Value, lengths: ir.Value) -> ir.Value:
    """Return which items have not ended at each step, (S, B, 1) bool."""
    steps = code.one("Gather", code.one("Shape", x), code.constant(np.array(0, np.int64), "steps"), axis=0)
    zero, step = (code.constant(np.array(number, np.int64), "number") for number in (0, 1))
    times = code.one("Unsqueeze", code.one("Range", zero, steps, step), code.integers(1, 2))
    ends = code.one("Unsqueeze", code.one("Cast", lengths, to=ir.DataType.INT64.value), code.integers(0, 2))
    return code.one("Less", times, ends)


def _given(code: _Code, before: ir.Value, index: int, inside: Sequence[ir.Value]) -> ir.Value:
    """Return the given first state of a direction, (B, H)."""
    state = code.one("Gather", before, code.constant(np.array(index, np.int64), "direction"), axis=0)
    if not inside:
        return state
    # the last state of an item without steps is 0 in the runtime, not its first state
    started = code.one("Gather", inside[0], code.constant(np.array(0, np.int64), "first"), axis=0)
    return code.one("Where", started, state, code.constant(np.array(0, np.float32), "zero"))


def _zeros(code: _Code, x: ir.Value, size: int) -> ir.Value:
    """Return a first state of zeros, (B, H)."""
    items = x.shape[1] if x.shape is not None else None
    if isinstance(items, int):
        return code.constant(np.zeros((items, size), np.float32), "state")
    batch = code.one("Gather", code.one("Shape", x), code.integers(1), axis=0)
    shape = code.one("Concat", batch, code.integers(size), axis=0)
    return code.one("Expand", code.constant(np.zeros((1, size), np.float32), "state"), shape)


def _body(code: _Code, part: _Weights, *, masked: bool, reset_after: bool) -> ir.Graph:
    """Return the body of a Scan: the state and the products of one step, to the next state twice."""
    size = part.state.shape[0]
    state, gates, last, alive = _ports(code, size)
    name = code.weights.writer.name(f"{code.stem}/step")
    graph = ir.Graph([state, gates, last, *[alive] * masked], [], nodes=[], name=name)
    inner = _Code(code.weights, code.unit, code.stem, graph)
    if reset_after:
        bias = np.concatenate([np.zeros(2 * size, np.float32), part.state_bias])
        whole = inner.product(state, part.state, bias, "r")
        of_gates, of_last = inner.several(2, "Split", whole, inner.integers(2 * size, size), axis=-1)
    else:
        of_gates = inner.product(state, np.ascontiguousarray(part.state[:, : 2 * size]), None, "r")
    both = inner.one("Sigmoid", inner.one("Add", gates, of_gates))
    update, reset = inner.several(2, "Split", both, inner.integers(size, size), axis=-1)
    if reset_after:
        added = inner.one("Mul", reset, of_last)
    else:
        kept = inner.one("Mul", reset, state)
        added = inner.product(kept, np.ascontiguousarray(part.state[:, 2 * size :]), None, "r_last")
    new = inner.one("Tanh", inner.one("Add", last, added))
    after = inner.one("Add", new, inner.one("Mul", update, inner.one("Sub", state, new)))
    if masked:
        zero = inner.constant(np.array(0, np.float32), "zero")
        following, shown = inner.one("Where", alive, after, state), inner.one("Where", alive, after, zero)
    else:
        following, shown = after, inner.one("Identity", after)
    for output in (following, shown):
        output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([None, size])
    graph.extend(inner.nodes)
    graph.outputs.extend([following, shown])
    code.count += inner.count
    return graph


def _ports(code: _Code, size: int) -> list[ir.Value]:
    """Return the inputs of a body: the state, its gates' and its candidate's terms, and which items have not ended."""
    ports = (
        ("state", ir.DataType.FLOAT, size),
        ("gates", ir.DataType.FLOAT, 2 * size),
        ("candidate", ir.DataType.FLOAT, size),
        ("alive", ir.DataType.BOOL, 1),
    )
    return [
        ir.Value(
            name=code.weights.writer.name(f"{code.stem}/{name}"),
            type=ir.TensorType(kind),
            shape=ir.Shape([None, width]),
        )
        for name, kind, width in ports
    ]


def _finish(node: ir.Node, code: _Code, found: Sequence[tuple[ir.Value, ir.Value]]) -> None:
    """Put the code in the place of a GRU.

    Args:
        node: The GRU.
        code: The nodes so far.
        found: For each direction the states of all steps, (S, B, H), and the last state, (B, H).
    """
    ends = {}
    for index, axis in ((0, 1), (1, 0)):  # the axis of the directions in Y and in Y_h
        if index >= len(node.outputs) or not node.outputs[index].name:
            continue
        parts = [code.one("Unsqueeze", pair[index], code.integers(axis)) for pair in found]
        ends[index] = code.one("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]
    graph_of(node).insert_before(node, code.nodes)
    names = {index: node.outputs[index].name for index in ends}
    for index, value in ends.items():
        old = node.outputs[index]
        value.type, value.shape = old.type, old.shape
        replace(old, value)
    remove(node)
    for index, value in ends.items():
        value.name = names[index]
