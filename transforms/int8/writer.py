"""Write int8 into a graph: unused names, shared constants, and weights followed by a DequantizeLinear."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..graphs.queries import MS, constant, node_name
from ..graphs.rewriter import add_initializer, drop_unused, names, unused_name
from .qparams import Array, QParams, Scheme

FIRST_WITH_AXIS = 13  # the opset whose QuantizeLinear and DequantizeLinear got an axis
FIRST_WITH_TYPE = 21  # the opset whose QuantizeLinear got output_dtype


@dataclass
class Writer:
    """Writes into a model; keeps track of used names and shared constants.

    Attributes:
        model: The model.
        domain: The domain of QuantizeLinear and DequantizeLinear; in com.microsoft they have an axis in any opset.
        taken: The names of all values and nodes.
        stored: The values written so far, by content.
    """

    model: ir.Model
    domain: str
    taken: set[str]
    stored: dict[object, ir.Value] = field(default_factory=dict)

    @staticmethod
    def of(model: ir.Model, scheme: Scheme) -> Writer:
        """Return a writer for `model`.

        From opset `FIRST_WITH_TYPE` on, signed activations get the operators of com.microsoft: when ONNX Runtime 1.31
        moves a standard QuantizeLinear before a Transpose, it sets output_dtype and then fails to make it unsigned.
        """
        opset = model.opset_imports.get("", 0)
        standard = opset >= FIRST_WITH_AXIS and (scheme.activation == "u8" or opset < FIRST_WITH_TYPE)
        return Writer(model, "" if standard else MS, names(model))

    def name(self, stem: str) -> str:
        """Return an unused name, based on `stem`."""
        return unused_name(self.taken, stem)

    def initializer(self, graph: ir.Graph, stem: str, array: Array) -> ir.Value:
        """Add an initializer to `graph`; its name is based on `stem`."""
        return add_initializer(graph, self.name(stem), array)

    def shared(self, key: object, graph: ir.Graph, stem: str, array: Array) -> ir.Value:
        """Return the initializer of `graph` for a key; it is added at the first call."""
        if (graph, key) not in self.stored:
            self.stored[graph, key] = self.initializer(graph, stem, array)
        return self.stored[graph, key]

    def parameters(self, graph: ir.Graph, stem: str, params: QParams) -> tuple[ir.Value, ir.Value]:
        """Return the scale and zero-point initializers of `graph` for `stem`; they are added at the first call."""
        scale = self.shared((stem, "scale"), graph, f"{stem}/scale", params.scale)
        return scale, self.shared((stem, "zero_point"), graph, f"{stem}/zero_point", params.zero_point)

    def like(self, pattern: ir.Node, value: ir.Value, stem: str, op: str = "DequantizeLinear") -> ir.Node:
        """Return a new QuantizeLinear or DequantizeLinear of `value`; it is not in a graph yet.

        Args:
            pattern: A QuantizeLinear or DequantizeLinear with the scale, the zero point and the attributes.
            value: What the new node reads.
            stem: The name of the new node is based on it.
            op: The operator of the new node.
        """
        name, zero = self.name(stem), constant(pattern.inputs[2])
        node = ir.node(op, [value, *pattern.inputs[1:]], dict(pattern.attributes), domain=pattern.domain, name=name)
        node.outputs[0].name = self.name(f"{name}_output")
        if op == "DequantizeLinear":
            node.outputs[0].dtype = ir.DataType.FLOAT
        elif zero is not None:
            node.outputs[0].dtype = ir.DataType(zero.dtype)
        return node

    def replace_constant(self, node: ir.Node, index: int, array: Array, params: QParams, *, own: bool = False) -> None:
        """Replace input `index` of `node` by dequantized integers; equal integers of a graph are stored once.

        Args:
            node: The node.
            index: The index of the input.
            array: The integers.
            params: The scale and zero point of the integers.
            own: Whether the integers are for this node only, because they are not its weights rounded to nearest.
        """
        graph = node.graph
        assert isinstance(graph, ir.Graph)  # the node is in a graph
        old = node.inputs[index] if index < len(node.inputs) else None
        name = str(old.name) if old is not None else f"{node_name(node)}/bias"
        content = array.tobytes() if array.dtype == np.int32 else b""  # source and scale do not identify a bias
        content = node_name(node).encode() if own else content
        key = (graph, old or name, params.axis, params.scale.tobytes(), params.zero_point.tobytes(), content)
        if key not in self.stored:
            self.stored[key] = self._dequantized(graph, name, array, params)
        if index >= len(node.inputs):
            node.resize_inputs(index + 1)
        node.replace_input_with(index, self.stored[key])
        if old is not None and isinstance(old.graph, ir.Graph):
            drop_unused(old.graph, (old,))

    def _dequantized(self, graph: ir.Graph, name: str, array: Array, params: QParams) -> ir.Value:
        """Add integers, their parameters and a DequantizeLinear to `graph`; return the float tensor."""
        parts = ((str(array.dtype), array), ("scale", params.scale), ("zero_point", params.zero_point))
        inputs = [self.initializer(graph, f"{name}/{part}", values) for part, values in parts]
        attributes = {} if params.axis is None else {"axis": params.axis}
        stem = str(inputs[0].name)
        called = self.name(f"{stem}/dequantize")
        dq = ir.node("DequantizeLinear", inputs, attributes, domain=self.domain, name=called)
        value = dq.outputs[0]
        value.name = self.name(f"{stem}/dequantized")
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(array.shape)
        graph.insert_before(graph[0], [dq])
        return value
