"""Spell the runtime's fused operators as the standard ones of which they were made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from .graph import (
    add_initializer,
    computing_graphs,
    constant,
    derive_initializer,
    discard,
    graph_of,
    insert_before,
    names,
    node_name,
    sole_reader,
    stand_ins,
    stays_finite,
    take,
    take_over,
)
from .ops import CLIP_TAKES_INPUTS, GEMM_NEEDS_NO_C, MS
from .registry import Change, LeftAlone, transform

# Activations inside FusedConv and FusedGemm, and the attributes of the standard operator that their parameters are.
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

# What onnx does not infer behind an operator of the runtime: who gives as many axes, and the type, of its first input,
PASSES_ON = frozenset(
    """
    BiasGelu Clip Conv Erf FastGelu FusedConv Gelu Identity LayerNormalization QuickGelu Relu Sigmoid
    SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization Slice Softmax Split Tanh
    """.split()
)
# and who gives as many axes as the input that has most; products only if no input is a vector.
BROADCASTS = frozenset("Add Div Mul Sub".split())
PRODUCTS = frozenset("FusedMatMul MatMul TransposeMatMul".split())

Facts = tuple[int | None, ir.DataType | None]  # how many axes a tensor has, and its type; None where that is unknown


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes nodes before a fused one.

    Attributes:
        node: The fused node.
        stem: Its name.
        taken: The names in use.
        opset: The version of the standard operators.
        facts: What is known of each value.
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
        """Insert an operator; return its output."""
        stem = f"{self.stem}/{op.lower()}"
        return insert_before(self.node, self.taken, op, inputs, attributes, stem=stem, domain=domain)

    def main(self, op: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, object]) -> ir.Value:
        """Insert the operator that has the name of the fused one from now on."""
        output = self.add(op, inputs, attributes)
        made = output.producer()
        if made is not None:
            made.name, self.node.name = self.stem, made.name
        return output

    def scalar(self, what: str, number: float) -> ir.Value:
        """Add a constant of the type that the node computes in.

        Raises:
            LeftAlone: The type is not known.
        """
        return add_initializer(graph_of(self.node), self.name(what), np.array(number, self.dtype().numpy()))

    def name(self, what: str) -> str:
        """Take a name for a constant of the node."""
        return take(self.taken, f"{self.stem}/{what}")

    def dtype(self) -> ir.DataType:
        """Return the type that the node computes in.

        Raises:
            LeftAlone: It is not known.
        """
        values = [value for value in (*self.node.inputs, *self.node.outputs) if value is not None]
        known = [dtype for value in values if (dtype := self.facts[value][1]) is not None]
        if not known:
            raise LeftAlone("type-unknown")
        return known[0]

    def rank(self, value: ir.Value) -> int:
        """Return how many axes a tensor has.

        Raises:
            LeftAlone: It is not known.
        """
        rank, _ = self.facts[value]
        if rank is None:
            raise LeftAlone("rank-unknown")
        return rank


@transform("unfuse_operators", after=("fold_constants",))
def unfuse_operators(model: ir.Model) -> Change:
    """Replace fused operators of the domain com.microsoft by those standard ones that have integer kernels.

    Before:  y = FusedConv(x, W, b, z), activation Relu;  y = FusedGemm(x, W, b), activation LeakyRelu
             y = FusedMatMul(a, b), transB 1, alpha s (TransposeMatMul likewise);  y = BiasGelu(MatMul(x, W), b)
    After:   y = Relu(Add(Conv(x, W, b), z));  y = LeakyRelu(Gemm(x, W, b))
             y = Mul(MatMul(a, Transpose(b)), s), or MatMul(a, W) with W = s * transpose(b) where b is constant
             y = Gelu(Add(MatMul(x, W), b));  FastGelu with a bias likewise
        They are in models that the runtime has optimised and saved. The first of the new operators has the name of the
        fused one. Gelu is the standard operator from opset 20 on, and com.microsoft's below.
    Left alone: an activation that is unknown, without its parameters, or that the model's opset has not
        (``activation``); a FusedGemm without C below opset 11 (``needs-bias``); a transposed tensor of unknown rank
        (``rank-unknown``) or of fewer axes than that wants (``rank``); a factor in a model that does not say the type
        (``type-unknown``), or that would make the weights overflow (``not-finite``); a bias before a Gelu that is
        not added to a MatMul with constant weights (``no-product``). All other operators of the domain.
    """
    change = Change()
    taken, opset = names(model), model.opset_imports.get("", 0)
    progress = opset > 0
    while progress and (nodes := list(_candidates(model))):  # onnx may infer more behind what was taken apart
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
            take_over(node, result)
            discard(*inputs)
            change.applied += 1
            progress = True
    return change


def _candidates(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the fused nodes of the graph and of bodies."""
    for graph in computing_graphs(model):
        for node in graph:
            if node.domain == MS and node.op_type in WRITERS and (node.op_type != "FastGelu" or _has(node, 1)):
                yield node


def _has(node: ir.Node, index: int) -> bool:
    """Whether an optional input is there."""
    return len(node.inputs) > index and node.inputs[index] is not None


def _facts(model: ir.Model) -> dict[ir.Value, Facts]:
    """Return what is known of every value, behind the runtime's own operators too."""
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
    """Return what follows for the outputs of a node from what is known of its inputs."""
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
    """Write Conv, Add of the fourth input, and the activation."""
    node = writer.node
    activation = _activation(writer, node.attributes.get_floats("activation_params", ()))
    output = writer.main("Conv", node.inputs[:3], _others(node))
    if _has(node, 3):
        output = writer.add("Add", [output, node.inputs[3]])
    return activation(output)


def _gemm(writer: _Writer) -> ir.Value:
    """Write Gemm and the activation."""
    node = writer.node
    if not _has(node, 2) and writer.opset < GEMM_NEEDS_NO_C:
        raise LeftAlone("needs-bias")
    wanted = ACTIVATIONS.get(node.attributes.get_string("activation", ""), ())
    given = [node.attributes.get_float(f"activation_{name}", None) for name in wanted]
    activation = _activation(writer, [number for number in given if number is not None])
    return activation(writer.main("Gemm", node.inputs, _others(node)))


def _others(node: ir.Node) -> dict[str, ir.Attr]:
    """Return the attributes that are not about the activation."""
    return {name: attribute for name, attribute in node.attributes.items() if not name.startswith("activation")}


def _activation(writer: _Writer, parameters: Sequence[float]) -> Callable[[ir.Value], ir.Value]:
    """Return what writes the activation of the node behind a tensor.

    Raises:
        LeftAlone: There is no such standard operator.
    """
    op = writer.node.attributes.get_string("activation", "")
    if not op or (op == "LeakyRelu" and list(parameters) == [1.0]):  # a slope of 1 changes nothing
        return lambda value: value
    wanted = ACTIVATIONS.get(op)
    if wanted is None or len(parameters) < len(wanted) or not _exists(op, writer.opset):
        raise LeftAlone("activation")
    if op == "Clip" and writer.opset >= CLIP_TAKES_INPUTS:
        bounds = [writer.scalar(name, number) for name, number in zip(wanted, parameters, strict=False)]
        return lambda value: writer.add(op, [value, *bounds])
    attributes = dict(zip(wanted, map(float, parameters), strict=False))
    return lambda value: writer.add(op, [value], attributes)


def _exists(op: str, opset: int) -> bool:
    """Whether the standard operator set has an operator."""
    try:
        onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return False
    return True


def _matmul(writer: _Writer) -> ir.Value:
    """Write MatMul, with a Transpose of an operand that is not constant, and a Mul if no constant can take alpha."""
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
    """Whether a tensor is constant, of a type that keeps its precision at any scale, and finite times `factor`."""
    return tensor is not None and tensor.dtype in FLOATS and stays_finite(tensor, factor)


def _order(writer: _Writer, index: int) -> list[int] | None:
    """Return the order in which FusedMatMul reads the axes of an operand, None for as they are.

    ``transA`` swaps the last two axes of more than one; ``transBatchA`` moves the first one behind the others but the
    last (contrib_ops/cpu/fused_matmul in ONNX Runtime's sources).

    Raises:
        LeftAlone: The number of axes is not known, or too small.
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
    """Return an operand in another order of axes and times a factor, which only a constant can take."""
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
    name = take(writer.taken, f"{value.name}_operand")
    shape = lengths if order is None else [lengths[axis] for axis in order]
    return derive_initializer(graph_of(writer.node), name, tensor, computed, shape)


def _gelu(writer: _Writer) -> ir.Value:
    """Write Add and the activation, where the sum is that of a product with constant weights."""
    node = writer.node
    product, bias = node.inputs[:2]
    producer = product.producer() if product is not None else None
    if producer is None or producer.op_type != "MatMul" or producer.domain or constant(producer.inputs[1]) is None:
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
