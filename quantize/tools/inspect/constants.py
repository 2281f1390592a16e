"""The constants of a model by role: parameters, statistics, quantization, others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir

from ....transforms.graphs.queries import constant, every_graph

Role = Literal["parameter", "statistic", "quantization", "other"]
ROLES: tuple[Role, ...] = ("parameter", "statistic", "quantization", "other")

_BINARY = (1, 2, 4, 5, 6, 7)
_UNARY = (1, 2, 3, 4)
SCALES = {
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), (1, 2)),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul"), _BINARY),
    **dict.fromkeys("QLinearSigmoid QLinearLeakyRelu QLinearAveragePool QLinearGlobalAveragePool".split(), _UNARY),
    **dict.fromkeys(("QLinearSoftmax", "QLinearReduceMean"), _UNARY),
    **dict.fromkeys(("MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "MatMulNBits"), (2, 3)),
    "GatherBlockQuantized": (2, 3),
    "MatMulIntegerToFloat": (2, 3, 4, 5),
    "QGemm": (1, 2, 4, 5, 7, 8),
    "QAttention": (3, 4, 6, 7),
    "DynamicQuantizeLSTM": (8, 9, 10, 11),
}
"""The indices of scales and zero points among the inputs, by operator."""

INT32 = {"DequantizeLinear": 0, "QLinearConv": 8, "QGemm": 6}
"""The index of the int32 bias, by operator."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The sizes of the constants of a model.

    Attributes:
        elements: The number of elements by role: ``parameter`` for values that training sets, of any stored type;
            ``statistic`` for running mean and variance; ``quantization`` for scales and zero points; ``other`` for
            shapes, indices, tables and single numbers.
        tensors: The number of tensors by role.
        bytes: The bytes by type.
    """

    elements: dict[Role, int]
    tensors: dict[Role, int]
    bytes: dict[str, int]

    @property
    def parameters(self) -> int:
        """The number of values that training sets."""
        return self.elements["parameter"]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        roles = {role: {"tensors": self.tensors[role], "elements": self.elements[role]} for role in ROLES}
        return {"parameters": self.parameters, "roles": roles, "bytes": dict(self.bytes)}


def count_weights(model: ir.Model) -> Counted:
    """Count the initializers and Constant nodes of a model, also in bodies and functions. No weight is read.

    Exporters write parameters to initializers, and shapes, factors and tables to Constant nodes. The values of Constant
    nodes count as parameters only if no initializer is a parameter.
    """
    found = [(_role(value, tensor), value.is_initializer(), tensor) for value, tensor in _constants(model)]
    initializers = any(role == "parameter" and apart for role, apart, _ in found)
    elements, tensors, sizes = Counter[Role](), Counter[Role](), Counter[str]()
    for role, apart, tensor in found:
        counted: Role = "other" if role == "parameter" and initializers and not apart else role
        elements[counted] += tensor.size
        tensors[counted] += 1
        sizes[ir.DataType(tensor.dtype).name] += tensor.nbytes if tensor.dtype is not ir.DataType.STRING else 0
    return Counted(
        {role: elements[role] for role in ROLES}, {role: tensors[role] for role in ROLES}, dict(sizes.most_common())
    )


def _constants(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Yield every constant with its value in the graph."""
    for graph in every_graph(model):
        for value in (
            *graph.initializers.values(),
            *(value for node in graph if node.op_type == "Constant" for value in node.outputs),
        ):
            tensor = value.const_value if value.is_initializer() else constant(value)
            if tensor is not None:
                yield value, tensor


def _role(value: ir.Value, tensor: ir.TensorProtocol) -> Role:
    """Return the role of a constant, from its readers and its type."""
    uses = [(use.node.op_type, use.idx) for use in value.uses()]
    if uses and all(op == "BatchNormalization" and index in (3, 4) for op, index in uses):
        return "statistic"
    if uses and all(_is_scale(op, index) for op, index in uses):
        return "quantization"
    dtype = ir.DataType(tensor.dtype)
    if not tensor.shape.dims or dtype is ir.DataType.STRING:
        return "other"
    if dtype.is_floating_point() or (dtype.bitwidth <= 8 and dtype is not ir.DataType.BOOL):
        return "parameter"
    if dtype is ir.DataType.INT32 and any(INT32.get(op) == index for op, index in uses):
        return "parameter"
    return "other"


def _is_scale(op: str, index: int) -> bool:
    """Return whether an input of an operator is a scale or a zero point."""
    if op == "QLinearConcat":  # scale and zero point of the output, then (tensor, scale, zero point) of each input
        return index < 2 or (index - 2) % 3 != 0
    return index in SCALES.get(op, ())
