"""Replace an Einsum that is a matrix product by a MatMul."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnx_ir as ir

from .graphs.inference import stand_ins
from .graphs.opsets import AXES_ARE_INPUT
from .graphs.queries import computing_nodes, constant, graph_of, node_name
from .graphs.rewriter import (
    add_initializer,
    derive_initializer,
    discard,
    insert_before,
    names,
    replace_by_earlier,
    unused_name,
)
from .registry import Change, LeftAlone, transform


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor, with a letter for each axis."""

    value: ir.Value
    letters: str


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of two tensors, with its letters by role.

    Attributes:
        left: Activations.
        right: Activations, or constant weights.
        out: The letters of the result.
        batch: The letters of both tensors and the result, in the order of the result.
        rows: The letters of `left` and the result only, in the order of the result.
        columns: The letters of `right` and the result only, in the order of the result.
        inner: The letters of both tensors that are summed over, in the order of `left`.
    """

    left: _Tensor
    right: _Tensor
    out: str
    batch: str
    rows: str
    columns: str
    inner: str


@dataclass(slots=True)
class _Writer:
    """Inserts nodes before an Einsum.

    Attributes:
        node: The Einsum.
        stem: The name of the Einsum.
        taken: The names in use.
        opset: The version of the standard operators.
        lengths: The length of each letter; None for an unknown length.
    """

    node: ir.Node
    stem: str
    taken: set[str]
    opset: int
    lengths: Mapping[str, int | None] = field(default_factory=dict)

    def add(self, op: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        """Insert a node; return its output."""
        return insert_before(self.node, self.taken, op, inputs, attributes, stem=f"{self.stem}/{op.lower()}")

    def integers(self, what: str, numbers: Iterable[int]) -> ir.Value:
        """Add a constant vector of int64."""
        name = unused_name(self.taken, f"{self.stem}/{what}")
        return add_initializer(graph_of(self.node), name, np.array(list(numbers), np.int64))

    def over_axes(self, op: str, value: ir.Value, axes: Sequence[int], **attributes: object) -> ir.Value:
        """Insert a Squeeze, Unsqueeze or ReduceSum."""
        if self.opset >= AXES_ARE_INPUT:
            return self.add(op, value, self.integers("axes", axes), **attributes)
        return self.add(op, value, axes=list(axes), **attributes)

    def ordered(self, tensor: _Tensor, letters: str) -> ir.Value:
        """Return a tensor with its axes in the order `letters`; insert a Transpose if necessary."""
        if tensor.letters == letters:
            return tensor.value
        return self.add("Transpose", tensor.value, perm=[tensor.letters.index(letter) for letter in letters])

    def summed(self, tensor: _Tensor, kept: str) -> _Tensor:
        """Insert a ReduceSum over the letters that are not in `kept`."""
        axes = [axis for axis, letter in enumerate(tensor.letters) if letter not in kept]
        if not axes:
            return tensor
        value = self.over_axes("ReduceSum", tensor.value, axes, keepdims=0)
        return _Tensor(value, "".join(letter for letter in tensor.letters if letter in kept))

    def length(self, letters: str) -> int | None:
        """Return the product of the lengths of letters; None if a length is not known."""
        known = [self.lengths.get(letter) for letter in letters]
        return None if None in known else prod(length for length in known if length is not None)

    def reshaped(self, value: ir.Value, copied: int, lengths: Sequence[int | None]) -> ir.Value:
        """Insert a Reshape that keeps the first `copied` lengths and sets the others; one of these may be unknown."""
        shape = [0] * copied + [-1 if length is None else length for length in lengths]
        return self.add("Reshape", value, self.integers("shape", shape))


@transform("einsum_to_matmul", after=("fold_constants",))
def einsum_to_matmul(model: ir.Model) -> Change:
    """Replace an Einsum of two operands by MatMul, and an Einsum of one operand by ReduceSum and Transpose.

    Before:  y = Einsum(q, k), "bqhd,bkhd->bhqk";  z = Einsum(x, W), "bqhd,hdm->bqm";  t = Einsum(s), "ij->j"
    After:   y = MatMul(Transpose(q, [0, 2, 1, 3]), Transpose(k, [0, 2, 3, 1]))
             z = MatMul(Reshape(x, [0, 0, H * D]), W'), W' = W as (H * D, M);  t = ReduceSum(s, axes=[0])
        A constant becomes the second operand; its axes are arranged for the product at conversion time. Letters of only
        one operand that are not in the result are summed first. Each letter is assumed to have one length, unless the
        lengths are known to differ.
    Left alone: an axis of length 0, for which a Reshape would copy another length (``empty``); three operands or more
        (``operands``); an ellipsis (``ellipsis``); a letter twice in one operand (``repeated-letter``); a letter of the
        result that no operand has (``new-letter``); two constants (``constants``); no letter to sum over
        (``no-product``); a letter with two lengths (``stretched``); several axes to merge or split, if more than one of
        them has an unknown length (``dynamic``).
    """
    change = Change()
    nodes = computing_nodes(model, "Einsum")
    if not nodes:
        return change
    shapes = {value: other.shape for value, other in stand_ins(model).items()}
    taken, opset = names(model), model.opset_imports.get("", 0)
    for node in nodes:
        inputs = tuple(node.inputs)
        try:
            operands, out = _parsed(node)
            writer = _Writer(node, node_name(node), taken, opset, _lengths(operands, shapes))
            if len(operands) == 2:
                result = _multiplied(writer, _product(operands[0], operands[1], out))
            else:
                result = _rearranged(writer, operands[0], out)
        except LeftAlone as left:
            change.skip(str(left))
            continue
        replace_by_earlier(node, result)
        discard(*inputs)
        change.applied += 1
    return change


def _parsed(node: ir.Node) -> tuple[list[_Tensor], str]:
    """Return the operands with their letters, and the letters of the result.

    Raises:
        LeftAlone: The equation is neither a product of two operands nor a sum of one.
    """
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    if "." in equation:
        raise LeftAlone("ellipsis")
    text, arrow, out = equation.partition("->")
    terms = text.split(",")
    values = [value for value in node.inputs if value is not None]
    if len(terms) > 2 or len(terms) != len(values):
        raise LeftAlone("operands")
    if not arrow:  # ONNX: the letters that occur once, in alphabetical order
        out = "".join(sorted(letter for letter in set(text) - {","} if text.count(letter) == 1))
    if any(len(set(term)) < len(term) for term in (*terms, out)):
        raise LeftAlone("repeated-letter")
    if not set(out) <= set(text):
        raise LeftAlone("new-letter")
    return [_Tensor(value, term) for value, term in zip(values, terms, strict=True)], out


def _lengths(operands: Sequence[_Tensor], shapes: Mapping[ir.Value, ir.Shape | None]) -> dict[str, int | None]:
    """Return the length of each letter with a known length.

    Raises:
        LeftAlone: A letter has two lengths, or length 0.
    """
    lengths: dict[str, int | None] = {}
    for tensor in operands:
        shape = shapes.get(tensor.value)
        for letter, length in zip(tensor.letters, shape.dims if shape is not None else (), strict=False):
            if isinstance(length, int) and lengths.setdefault(letter, length) != length:
                raise LeftAlone("stretched")
            if length == 0:
                raise LeftAlone("empty")
    return lengths


def _rearranged(writer: _Writer, tensor: _Tensor, out: str) -> ir.Value:
    """Insert the ReduceSum and Transpose of an Einsum with one operand; return the result."""
    result = writer.ordered(writer.summed(tensor, out), out)
    return writer.add("Identity", result) if result is tensor.value else result


def _product(left: _Tensor, right: _Tensor, out: str) -> _Product:
    """Sort the letters of a product by role.

    The right operand is the constant one; without a constant, the one that has the last letter of the result.

    Raises:
        LeftAlone: The equation is not a matrix product.
    """
    constants = [constant(tensor.value) is not None for tensor in (left, right)]
    if all(constants):
        raise LeftAlone("constants")
    if constants[0] or (not constants[1] and out[-1:] and out[-1] not in right.letters):
        left, right = right, left
    both = set(left.letters) & set(right.letters)
    inner = "".join(letter for letter in left.letters if letter in both and letter not in out)
    if not inner:
        raise LeftAlone("no-product")
    batch, rows, columns = (
        "".join(letter for letter in out if letter in group)
        for group in (both, set(left.letters) - both, set(right.letters) - both)
    )
    return _Product(left, right, out, batch, rows, columns, inner)


def _multiplied(writer: _Writer, product: _Product) -> ir.Value:
    """Insert a MatMul of ``(*lead, *batch, row, inner)`` and ``(*batch, inner, columns)``; return the result.

    `lead` has all row letters but the last; MatMul broadcasts the second operand over these axes.

    Raises:
        LeftAlone: A required Reshape has more than one unknown length; nothing is inserted.
    """
    batch, columns, inner = product.batch, product.columns, product.inner
    lead, row = product.rows[:-1], product.rows[-1:]
    weights, copied = constant(product.right.value), lead + batch + row
    split = [writer.lengths.get(letter) for letter in columns]
    merges_both = weights is None and len(inner) > 1 and writer.length(inner) is None
    if len(columns) > 1 and split.count(None) > (0 if merges_both else 1):
        raise LeftAlone("dynamic")
    left = writer.ordered(writer.summed(product.left, product.out + inner), copied + inner)
    if len(inner) > 1:
        left = writer.reshaped(left, len(copied), [*([] if row else [1]), writer.length(inner)])
    elif not row:
        left = writer.over_axes("Unsqueeze", left, [len(batch)])
    right = _right(writer, product) if weights is None else _weights(writer, product, weights)
    result = writer.add("MatMul", left, right)
    matmul = result.producer()
    if matmul is not None:
        matmul.name, writer.node.name = writer.stem, matmul.name
    if len(columns) > 1:
        result = writer.reshaped(result, len(copied), split)
    elif not row or not columns:
        axes = [*([] if row else [len(batch)]), *([] if columns else [len(lead + batch) + 1])]
        result = writer.over_axes("Squeeze", result, axes)
    return writer.ordered(_Tensor(result, copied + columns), product.out)


def _right(writer: _Writer, product: _Product) -> ir.Value:
    """Return activations as ``(*batch, inner, columns)``."""
    batch, columns, inner = product.batch, product.columns, product.inner
    tensor = writer.summed(product.right, product.out + inner)
    if len(columns) == 1 and len(inner) > 1:  # a Reshape copies only leading axes, so the columns come first
        value = writer.ordered(tensor, batch + columns + inner)
        value = writer.reshaped(value, len(batch) + 1, [writer.length(inner)])
        return writer.ordered(_Tensor(value, batch + columns + inner[0]), batch + inner[0] + columns)
    value = writer.ordered(tensor, batch + inner + columns)
    if len(inner) > 1:
        return writer.reshaped(value, len(batch), [writer.length(inner), writer.length(columns)])
    if len(columns) > 1:
        return writer.reshaped(value, len(batch) + 1, [writer.length(columns)])
    return value if columns else writer.over_axes("Unsqueeze", value, [len(batch) + 1])


def _weights(writer: _Writer, product: _Product, weights: ir.TensorProtocol) -> ir.Value:
    """Return constant weights as ``(*batch, inner, columns)``; the original value if it has this form."""
    letters = product.right.letters
    order = product.batch + product.inner + product.columns
    lengths = dict(zip(letters, weights.shape.numpy(), strict=True))
    shape = [*(lengths[letter] for letter in product.batch)]
    shape += [prod(lengths[letter] for letter in group) for group in (product.inner, product.columns)]
    if letters == order and len(product.inner) == len(product.columns) == 1:
        return product.right.value
    summed = tuple(axis for axis, letter in enumerate(letters) if letter not in order)
    left = [letter for letter in letters if letter in order]

    def arranged(array: np.ndarray) -> np.ndarray:
        array = array.sum(axis=summed, dtype=np.float64 if array.dtype.kind == "f" else None) if summed else array
        return array.transpose([left.index(letter) for letter in order]).reshape(shape)

    name = unused_name(writer.taken, f"{product.right.value.name}_matrix")
    return derive_initializer(graph_of(writer.node), name, weights, arranged, shape)
