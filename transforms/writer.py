"""Writing int8 into a graph: fresh names, shared constants, and weights behind a DequantizeLinear."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from .graph import add_initializer, drop_unused, names, node_name, take
from .ops import MS
from .qparams import Array, QParams, Scheme

FIRST_WITH_AXIS = 13  # the opset whose QuantizeLinear and DequantizeLinear got an axis
FIRST_WITH_TYPE = 21  # the opset whose QuantizeLinear got output_dtype


@dataclass
class Writer:
    """A model that is being written, with the names that are taken and the constants that nodes share.

    Attributes:
        model: The model.
        domain: The domain of its pairs: the runtime's own has an axis in older opsets too.
        taken: Every name of a value or a node.
        stored: What was written already, by content.
    """

    model: ir.Model
    domain: str
    taken: set[str]
    stored: dict[object, ir.Value] = field(default_factory=dict)

    @staticmethod
    def of(model: ir.Model, scheme: Scheme) -> Writer:
        """Begin to write into `model`.

        Signed activations get the runtime's own pairs from `FIRST_WITH_TYPE` on: moving a standard one before a
        Transpose, ONNX Runtime 1.31 writes its type down, and then fails to make it unsigned.
        """
        opset = model.opset_imports.get("", 0)
        standard = opset >= FIRST_WITH_AXIS and (scheme.activation == "u8" or opset < FIRST_WITH_TYPE)
        return Writer(model, "" if standard else MS, names(model))

    def name(self, stem: str) -> str:
        """Take a name that no value and no node has."""
        return take(self.taken, stem)

    def initializer(self, graph: ir.Graph, stem: str, array: Array) -> ir.Value:
        """Return an initializer of `graph`, named after `stem`."""
        return add_initializer(graph, self.name(stem), array)

    def parameters(self, graph: ir.Graph, stem: str, params: QParams) -> tuple[ir.Value, ir.Value]:
        """Return the scale and zero-point initializers of `graph` called after `stem`, made once."""
        made = []
        for part, array in (("scale", params.scale), ("zero_point", params.zero_point)):
            key = (graph, stem, part)
            if key not in self.stored:
                self.stored[key] = self.initializer(graph, f"{stem}/{part}", array)
            made.append(self.stored[key])
        return made[0], made[1]

    def like(self, dq: ir.Node, integers: ir.Value, stem: str) -> ir.Node:
        """Return a DequantizeLinear of other integers, called `stem`, with the same parameters; in no graph yet."""
        name = self.name(stem)
        made = ir.node(dq.op_type, [integers, *dq.inputs[1:]], dict(dq.attributes), domain=dq.domain, name=name)
        made.outputs[0].name = self.name(f"{name}_output")
        made.outputs[0].dtype = ir.DataType.FLOAT
        return made

    def replace_constant(self, node: ir.Node, index: int, array: Array, params: QParams, *, own: bool = False) -> None:
        """Let input `index` of `node` read a DequantizeLinear of integers; equal ones of a graph are stored once.

        Args:
            node: The node.
            index: Which of its inputs.
            array: The integers.
            params: Their scale and zero point.
            own: Whether they are made for this node: not the nearest integers to weights that others may read too.
        """
        graph = node.graph
        assert isinstance(graph, ir.Graph)  # a node that is written to stands in a graph
        old = node.inputs[index] if index < len(node.inputs) else None
        name = str(old.name) if old is not None else f"{node_name(node)}/bias"
        content = array.tobytes() if array.dtype == np.int32 else b""  # of a bias; its source and scale tell a weight
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
        """Add integers with their parameters and a DequantizeLinear to `graph`; return its output."""
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
