"""Make one product of those that read the same rows, so that these are rounded once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...calibration.model.session import Array
from ...transforms.graphs.queries import MS, constant, made_by
from ...transforms.graphs.rewriter import add_initializer, insert_before, names, remove_unread, replace, unused_name
from .products import DYNAMIC, FORMS, bias_of_form

WEIGHTS, SCALE, ZERO = 1, 2, 3  # among the inputs of DynamicQuantizeMatMul, in front of the bias
BIAS = FORMS[DYNAMIC].bias
AXES = 2  # of weights that are one matrix


@dataclass(frozen=True, eq=False)
class _Product:
    """A product of rows and constant weights.

    Attributes:
        node: The DynamicQuantizeMatMul.
        end: Its result, or that of the Add of a bias behind it.
        bias: The bias, float32 (outputs,); None without one.
    """

    node: ir.Node
    end: ir.Value
    bias: Array | None

    @property
    def outputs(self) -> int:
        """The number of output channels."""
        return int(self.numbers(WEIGHTS).shape[-1])

    def numbers(self, index: int) -> Array:
        """Return a constant input."""
        tensor = constant(self.node.inputs[index])
        assert tensor is not None
        return tensor.numpy()

    def by_channel(self, index: int) -> Array:
        """Return a constant input with a value for each output channel."""
        return np.broadcast_to(self.numbers(index).reshape(-1), (self.outputs,))


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the result of a joined product.

    Attributes:
        whole: The result of the joined product.
        first: The first column of the part.
        split: The Split that computes the part.
    """

    whole: ir.Value
    first: int
    split: ir.Node


def join_products(model: ir.Model, ends: Iterable[ir.Value], allowed: Collection[str]) -> dict[ir.Value, Part]:
    """Make one product of those that read the same rows.

    Before:  q = com.microsoft.DynamicQuantizeMatMul(x, Wq, ...) + bq;  k, v = the same of Wk and bk, Wv and bv
    After:   q, k, v = Split(com.microsoft.DynamicQuantizeMatMul(x, [Wq Wk Wv], ...) + [bq bk bv])
        The product has the name of the first one.
    Left alone: products whose weights have more axes than two.

    Args:
        model: A model.
        ends: Tensors that may be the results of products, with or without a bias.
        allowed: The names of the products that may be joined.

    Returns:
        The parts by the results that they replace.
    """
    found = [product for end in dict.fromkeys(ends) if (product := _product(end)) and product.node.name in allowed]
    rows: dict[ir.Value | None, list[_Product]] = {}
    for product in found:
        rows.setdefault(product.node.inputs[0], []).append(product)
    moved: dict[ir.Value, Part] = {}
    for products in rows.values():
        if len(products) > 1:
            moved |= _joined(model, products)
    return moved


def _product(end: ir.Value) -> _Product | None:
    """Return the product whose result a tensor is, with the bias if it has one; None if it is another tensor."""
    last = end.producer()
    found = [] if last is None else [made_by(value, DYNAMIC) for value in last.inputs]
    node = next((each for each in (made_by(end, DYNAMIC), *found) if each is not None), None)
    if node is None or end.is_graph_output():
        return None
    add, bias = bias_of_form(node) or (node, node.inputs[BIAS] if len(node.inputs) > BIAS else None)
    weights, *others = (constant(value) for value in node.inputs[WEIGHTS:BIAS])
    if add is not last or weights is None or None in others or len(weights.shape) != AXES:
        return None
    if bias is None:
        return _Product(node, end, None)
    tensor = constant(bias)
    return None if tensor is None else _Product(node, end, tensor.numpy().reshape(-1))


def _joined(model: ir.Model, products: Sequence[_Product]) -> dict[ir.Value, Part]:
    """Put one product in the place of several; return the parts of its result by the results that they replace."""
    taken, nodes = names(model), {product.node for product in products}
    first = next(node for node in model.graph if node in nodes)
    name, sizes = str(first.name), [product.outputs for product in products]

    def constant_of(what: str, parts: Sequence[Array]) -> ir.Value:
        return add_initializer(model.graph, unused_name(taken, f"{name}/joined/{what}"), np.concatenate(parts, axis=-1))

    inputs = [
        first.inputs[0],
        constant_of("int8", [product.numbers(WEIGHTS) for product in products]),
        constant_of("scale", [product.by_channel(SCALE) for product in products]),
        constant_of("zero_point", [product.by_channel(ZERO) for product in products]),
    ]
    y = insert_before(first, taken, DYNAMIC, inputs, stem=f"{name}/joined", domain=MS)
    whole = y.producer()
    if any(product.bias is not None for product in products):
        biases = [
            np.zeros(product.outputs, np.float32) if product.bias is None else product.bias for product in products
        ]
        y = insert_before(first, taken, "Add", [y, constant_of("bias", biases)], stem=f"{name}/joined/sum")
    lengths = add_initializer(model.graph, unused_name(taken, f"{name}/joined/lengths"), np.array(sizes, np.int64))
    split = ir.node(
        "Split", [y, lengths], {"axis": -1}, num_outputs=len(products), name=unused_name(taken, f"{name}/split")
    )
    model.graph.insert_before(first, [split])
    starts = np.cumsum([0, *sizes[:-1]])
    parts = {}
    for product, part, start in zip(products, split.outputs, starts, strict=True):
        replace(product.end, part)
        remove_unread([product.end.producer()])
        part.name = product.end.name
        parts[product.end] = Part(y, int(start), split)
    assert whole is not None
    whole.name = name
    return parts
