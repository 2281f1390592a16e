"""Replace the runtime's fused operators by the standard operators that they combine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from .graphs.inference import ALIKE, stand_ins
from .graphs.queries import (
    MS,
    computing_nodes,
    constant,
    graph_of,
    is_standard,
    node_name,
    producer_of,
    sole_reader,
    stays_finite,
)
from .graphs.rewriter import (
    add_initializer,
    derive_initializer,
    discard,
    insert_before,
    names,
    replace_by_earlier,
    unused_name,
)
from .int8.ops import CLIP_TAKES_INPUTS, GEMM_NEEDS_NO_C
from .registry import Change, LeftAlone, transform

# The activations of FusedConv and FusedGemm, with the attributes of the standard operator for their parameters.
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "Celu": ("alpha",),
    "Clip": ("min", "max"),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Selu": ("alpha", "gamma"),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": ("alpha",),
}
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})

# onnx infers nothing after most operators of com.microsoft. These results have the rank and type of the first input:
PASSES_ON = frozenset(
    "Clip Conv Erf FusedConv Identity LayerNormalization Relu Sigmoid Slice Softmax Split Tanh".split()
).union(op_type for _, op_type in ALIKE)
# These results have the highest rank of their inputs; products only if no input is a vector.
BROADCASTS = frozenset("Add Div Mul Sub".split())
PRODUCTS = frozenset("FusedMatMul MatMul TransposeMatMul".split())

Facts = tuple[int | None, ir.DataType | None]  # rank and type of a tensor; None if unknown


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the nodes that replace a fused node, before that node.

    Attributes:
        node: The fused node.
        stem: Its name.
        taken: The names in use.
        opset: The version of the standard operators.
        facts: The rank and type of each value.
    """

    node: ir.Node
    stem: str
    taken: set[str]
    opset: int
    facts: Mapping[ir.Value, Facts]

    def add(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, object] | None = None,
        domain: str = "",
    ) -> ir.Value:
        """Insert a node; return its output."""
        stem = f"{self.stem}/{op.lower()}"
        return insert_before(self.node, self.taken, op, inputs, attributes, stem=stem, domain=domain)

    def main(self, op: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, object]) -> ir.Value:
        """Insert the node that takes over the name of the fused node; return its output."""
        output = self.add(op, inputs, attributes)
        first = output.producer()
        if first is not None:
            first.name, self.node.name = self.stem, first.name
        return output

    def scalar(self, what: str, number: float) -> ir.Value:
        """Add a constant of the element type of the node.

        Raises:
            LeftAlone: The type is not known.
        """
        return add_initializer(graph_of(self.node), self.name(what), np.array(number, self.dtype().numpy()))

    def name(self, what: str) -> str:
        """Return an unused name for a constant of the node."""
        return unused_name(self.taken, f"{self.stem}/{what}")

    def dtype(self) -> ir.DataType:
        """Return the element type of the node.

        Raises:
            LeftAlone: The type is not known.
        """
        values = [value for value in (*self.node.inputs, *self.node.outputs) if value is not None]
        known = [dtype for value in values if (dtype := self.facts[value][1]) is not None]
        if not known:
            raise LeftAlone("type-unknown")
        return known[0]

    def rank(self, value: ir.Value) -> int:
        """Return the rank of a tensor.

        Raises:
            LeftAlone: The rank is not known.
        """
        rank, _ = self.facts[value]
        if rank is None:
            raise LeftAlone("rank-unknown")
        return rank


@transform("unfuse_operators", after=("fold_constants",))
def unfuse_operators(model: ir.Model) -> Change:
    """Replace fused operators of com.microsoft by standard operators that have integer kernels.

    Before:  y = FusedConv(x, W, b, z), activation Relu;  y = FusedGemm(x, W, b), activation LeakyRelu
             y = FusedMatMul(a, b), transB 1, alpha s (TransposeMatMul likewise);  y = BiasGelu(MatMul(x, W), b)
    After:   y = Relu(Add(Conv(x, W, b), z));  y = LeakyRelu(Gemm(x, W, b))
             y = Mul(MatMul(a, Transpose(b)), s), or MatMul(a, W) with W = s * transpose(b) for a constant b
             y = Gelu(Add(MatMul(x, W), b));  FastGelu with a bias likewise
        Models that the runtime has optimised and saved contain these operators. The first new node has the name of the
        fused node. Gelu is the standard operator from opset 20 on, before that the one of com.microsoft.
    Left alone: an activation that is unknown, has too few parameters, or is not in the model's opset (``activation``);
        a FusedGemm without C below opset 11 (``needs-bias``); a transposed tensor of unknown rank (``rank-unknown``) or
        of too low a rank (``rank``); a factor in a model of unknown type (``type-unknown``), or one that makes the
        weights overflow (``not-finite``); a BiasGelu or FastGelu that does not follow a MatMul with constant weights
        (``no-product``); all other operators of the domain.
    """
    change = Change()
    taken, opset = names(model), model.opset_imports.get("", 0)
    progress = opset > 0
    while progress and (nodes := list(_candidates(model))):  # onnx may infer more after an operator was replaced
        progress = False
        change.skipped.clear()
        facts = _facts(model)
        for node in nodes:
            inputs, output = tuple(node.inputs), node.outputs[0]
            try:
                result = WRITERS[node.op_type](_Writer(node, node_name(node), taken, opset, facts))
            except LeftAlone as left:
                change.skip(str(left))
                continue
            facts[result] = facts[output]
            replace_by_earlier(node, result)
            discard(*inputs)
            change.applied += 1
            progress = True
    return change


def _candidates(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the fused nodes of the graph and of bodies."""
    for node in computing_nodes(model):
        if node.domain == MS and node.op_type in WRITERS and (node.op_type != "FastGelu" or _has(node, 1)):
            yield node


def _has(node: ir.Node, index: int) -> bool:
    """Whether a node has an optional input."""
    return len(node.inputs) > index and node.inputs[index] is not None


def _facts(model: ir.Model) -> dict[ir.Value, Facts]:
    """Return the rank and type of every value, also after operators of com.microsoft."""
    facts: dict[ir.Value, Facts] = {
        value: (None if other.shape is None else len(other.shape), value.dtype or other.dtype)
        for value, other in stand_ins(model).items()
    }
    for graph in model.graphs():
        for node in graph:
            rank, dtype = _passed_on(node, [facts[value] for value in node.inputs if value is not None])
            for value in node.outputs:
                facts[value] = (rank if facts[value][0] is None else facts[value][0], facts[value][1] or dtype)
    return facts


def _passed_on(node: ir.Node, inputs: Sequence[Facts]) -> Facts:
    """Return the rank and type of the outputs of a node, inferred from those of its inputs."""
    ranks = [rank for rank, _ in inputs if rank is not None]
    rank, dtype = inputs[0] if inputs else (None, None)
    if node.op_type == "Transpose":
        order = node.attributes.get_ints("perm", None)
        return rank if order is None else len(order), dtype
    if node.op_type == "Reshape":
        shape = constant(node.inputs[1]) if len(node.inputs) > 1 else None
        return None if shape is None else shape.size, dtype
    if node.op_type in BROADCASTS or (node.op_type in PRODUCTS and min(ranks, default=0) > 1):
        types = [dtype for _, dtype in inputs if dtype is not None]
        return max(ranks) if ranks and len(ranks) == len(inputs) else None, types[0] if types else None
    if node.op_type in ("Gemm", "FusedGemm"):
        return 2, dtype
    return (rank, dtype) if node.op_type in PASSES_ON else (None, None)


def _conv(writer: _Writer) -> ir.Value:
    """Write a Conv, an Add of the fourth input, and the activation."""
    node = writer.node
    activation = _activation(writer, node.attributes.get_floats("activation_params", ()))
    output = writer.main("Conv", node.inputs[:3], _others(node))
    if _has(node, 3):
        output = writer.add("Add", [output, node.inputs[3]])
    return activation(output)


def _gemm(writer: _Writer) -> ir.Value:
    """Write a Gemm and the activation."""
    node = writer.node
    if not _has(node, 2) and writer.opset < GEMM_NEEDS_NO_C:
        raise LeftAlone("needs-bias")
    keys = ACTIVATIONS.get(node.attributes.get_string("activation", ""), ())
    parameters = [node.attributes.get_float(f"activation_{name}", None) for name in keys]
    activation = _activation(writer, [number for number in parameters if number is not None])
    return activation(writer.main("Gemm", node.inputs, _others(node)))


def _others(node: ir.Node) -> dict[str, ir.Attr]:
    """Return the attributes except those of the activation."""
    return {name: attribute for name, attribute in node.attributes.items() if not name.startswith("activation")}


def _activation(writer: _Writer, parameters: Sequence[float]) -> Callable[[ir.Value], ir.Value]:
    """Return a function that applies the activation of the node to a tensor.

    Raises:
        LeftAlone: There is no such standard operator.
    """
    op = writer.node.attributes.get_string("activation", "")
    if not op or (op == "LeakyRelu" and list(parameters) == [1.0]):  # with a slope of 1 the activation is the identity
        return lambda value: value
    keys = ACTIVATIONS.get(op)
    if keys is None or len(parameters) < len(keys) or not _exists(op, writer.opset):
        raise LeftAlone("activation")
    if op == "Clip" and writer.opset >= CLIP_TAKES_INPUTS:
        bounds = [writer.scalar(name, number) for name, number in zip(keys, parameters, strict=False)]
        return lambda value: writer.add(op, [value, *bounds])
    attributes = dict(zip(keys, map(float, parameters), strict=False))
    return lambda value: writer.add(op, [value], attributes)


def _exists(op: str, opset: int) -> bool:
    """Whether the standard operator set has an operator."""
    try:
        onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return False
    return True


def _matmul(writer: _Writer) -> ir.Value:
    """Write a MatMul, a Transpose for a computed operand, and a Mul by alpha unless a constant can contain alpha."""
    node = writer.node
    alpha = node.attributes.get_float("alpha", 1.0)
    orders = [_order(writer, index) for index in (0, 1)]
    takes_alpha = next((index for index in (1, 0) if _is_float(constant(node.inputs[index]))), None)
    factor = None
    if alpha != 1 and takes_alpha is None:
        factor = writer.scalar("alpha", alpha)
    elif takes_alpha is not None and not _is_float(constant(node.inputs[takes_alpha]), alpha):
        raise LeftAlone("not-finite")
    operands = [_operand(writer, index, orders[index], alpha if index == takes_alpha else 1.0) for index in (0, 1)]
    output = writer.main("MatMul", operands, {})
    return output if factor is None else writer.add("Mul", [output, factor])


def _is_float(tensor: ir.TensorProtocol | None, factor: float = 1.0) -> bool:
    """Whether a tensor is a float32 or float64 constant that stays finite when multiplied by `factor`."""
    return tensor is not None and tensor.dtype in FLOATS and stays_finite(tensor, factor)


def _order(writer: _Writer, index: int) -> list[int] | None:
    """Return the perm in which FusedMatMul reads the axes of an operand; None for the identity.

    ``transA`` swaps the last two axes, if there are two; ``transBatchA`` moves the first axis before the last one
    (contrib_ops/cpu/fused_matmul in ONNX Runtime's sources).

    Raises:
        LeftAlone: The rank is not known, or too low.
    """
    letter, value = "AB"[index], writer.node.inputs[index]
    flags = [writer.node.attributes.get_int(f"{name}{letter}", 0) for name in ("trans", "transBatch")]
    if not any(flags) or value is None:
        return None
    axes = list(range(writer.rank(value)))
    if flags[1]:
        if len(axes) < 3:
            raise LeftAlone("rank")
        axes = [*axes[1:-1], 0, axes[-1]]
    if flags[0] and len(axes) > 1:
        axes[-2:] = reversed(axes[-2:])
    return axes if axes != sorted(axes) else None


def _operand(writer: _Writer, index: int, order: list[int] | None, factor: float) -> ir.Value | None:
    """Return an operand with its axes in `order`, and multiplied by `factor`, which is 1 for a computed operand."""
    value = writer.node.inputs[index]
    tensor = constant(value)
    if value is None or (order is None and factor == 1):
        return value
    if tensor is None:
        return writer.add("Transpose", [value], {"perm": order})

    def computed(array: np.ndarray) -> np.ndarray:
        scaled = array if factor == 1 else array * factor
        return scaled if order is None else scaled.transpose(order)

    lengths = tensor.shape.numpy()
    name = unused_name(writer.taken, f"{value.name}_operand")
    shape = lengths if order is None else [lengths[axis] for axis in order]
    return derive_initializer(graph_of(writer.node), name, tensor, computed, shape)


def _gelu(writer: _Writer) -> ir.Value:
    """Write an Add and the activation, if the operator follows a MatMul with constant weights."""
    node = writer.node
    product, bias = node.inputs[:2]
    producer = producer_of(product)
    if not is_standard(producer, "MatMul") or constant(producer.inputs[1]) is None:
        raise LeftAlone("no-product")
    if product is None or sole_reader(product) is not node:
        raise LeftAlone("no-product")
    total = writer.main("Add", [product, bias], {})
    if node.op_type == "FastGelu":
        return writer.add("FastGelu", [total], domain=MS)
    return writer.add("Gelu", [total], domain="" if _exists("Gelu", writer.opset) else MS)


WRITERS: dict[str, Callable[[_Writer], ir.Value]] = {
    "BiasGelu": _gelu,
    "FastGelu": _gelu,
    "FusedConv": _conv,
    "FusedGemm": _gemm,
    "FusedMatMul": _matmul,
    "TransposeMatMul": _matmul,
}
