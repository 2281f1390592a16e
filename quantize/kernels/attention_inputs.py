"""Masks and biases of operators that are attention, in the form that the native operator takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ...transforms.graphs.inference import inferred
from ...transforms.graphs.queries import Shape, constant
from ...transforms.graphs.rewriter import add_initializer, insert_before, unused_name
from ...transforms.patterns.attention import FoundAttention

BIAS, PADDING = 3, 4  # among the inputs of a MultiHeadAttention
HEADS_AND_ROWS = np.array([1, 2], np.int64)
"""The axes of a mask (batch, heads, rows, keys) that a mask of padding does not have."""


@dataclass(eq=False)
class PlainInputs:
    """The inputs of attention without biases, and with masks that are added.

    Attributes:
        model: The model.
        shapes: Shapes of the float tensors by name; those of new tensors are noted there.
        masks: By mask and by what it adds where it hides a key, the mask that is added.
        types: The element types of the masks of the user's model, as far as they are known.
        taken: The names in the model.
    """

    model: ir.Model
    shapes: dict[str, Shape]
    taken: set[str]
    masks: dict[tuple[ir.Value, float], ir.Value] = field(default_factory=dict)
    types: dict[ir.Value, ir.DataType | None] = field(default_factory=dict)

    def of(self, found: FoundAttention) -> FoundAttention | None:
        """Return attention with such inputs; its operators change in place. None if the type of its mask is unknown.

        Before:  y = Attention(q, k, v, mask), with a mask of booleans
        After:   y = Attention(q, k, v, Where(mask, 0, -infinity))
        Before:  y = MultiHeadAttention(q, k, v, bias, padding)
        After:   y = MultiHeadAttention(Add(q, b1), Add(k, b2), Add(v, b3), , Cast(Squeeze(Equal(mask, 0)))), where
                 mask = Where(Unsqueeze(Greater(padding, 0)), 0, -10000) is (batch, 1, 1, keys): what follows it belongs
                 to the body of the function, which computes what was there
        """
        mask = found.mask
        if mask is None or len(found.nodes) > 2:  # an Add takes floats
            return self._without_bias(found)
        if (dtype := self._type_of(mask)) is ir.DataType.FLOAT:
            return self._without_bias(found)
        if found.hidden is not None and dtype is ir.DataType.INT32:
            return self._with_padding(self._without_bias(found), mask, found.hidden)
        if found.hidden is not None or dtype is not ir.DataType.BOOL:
            return None
        node = found.nodes[0]
        if (mask, -math.inf) not in self.masks:
            self.masks[mask, -math.inf] = self._added(node, mask, mask, -math.inf)
        added = self.masks[mask, -math.inf]
        node.replace_input_with(node.inputs.index(mask), added)
        return replace(found, mask=added)

    def _type_of(self, mask: ir.Value) -> ir.DataType | None:
        """Return the element type of a mask; layers that share it ask once."""
        if mask not in self.types:
            value = mask if mask.dtype is not None else inferred(self.model).get(str(mask.name), mask)
            self.types[mask] = value.dtype
        return self.types[mask]

    def _without_bias(self, found: FoundAttention) -> FoundAttention:
        """Return attention whose bias is added to q, k and v in front of it."""
        bias = constant(found.bias)
        if bias is None:
            return found
        (node,), numbers, sums = found.nodes, bias.numpy(), list[ir.Value]()
        for index, value in enumerate((found.q, found.k, found.v)):
            shape = self.shapes[str(value.name)]
            width = shape[-1]
            assert isinstance(width, int)  # else attention is no unit
            part, numbers = numbers[:width], numbers[width:]
            operand = self._constant(f"{found.nodes[0].name}/{'qkv'[index]}_bias", part)
            sums.append(self._inserted(node, "Add", [value, operand], f"{node.name}/{'qkv'[index]}"))
            self.shapes[str(sums[-1].name)] = shape
            node.replace_input_with(index, sums[-1])
        node.replace_input_with(BIAS, None)
        q, k, v = sums
        return replace(found, q=q, k=k, v=v, bias=None)

    def _with_padding(self, found: FoundAttention, padding: ir.Value, hidden: float) -> FoundAttention:
        """Return attention with an added mask in place of a padding mask. In the body, nodes turn it back."""
        (node,) = found.nodes
        stem = f"{padding.name}/padding"
        axes = self._constant(f"{stem}/axes", HEADS_AND_ROWS)
        if (padding, hidden) not in self.masks:
            zero = self._constant(f"{stem}/zero", np.zeros((), np.int32))
            seen = self._inserted(node, "Greater", [padding, zero], f"{stem}/seen", ir.DataType.BOOL)
            wide = self._inserted(node, "Unsqueeze", [seen, axes], f"{stem}/wide", ir.DataType.BOOL)
            self.masks[padding, hidden] = self._added(node, wide, padding, hidden)
        mask = self.masks[padding, hidden]
        zero = self._constant(f"{stem}/nothing", np.zeros((), np.float32))
        again = self._inserted(node, "Equal", [mask, zero], f"{stem}/equal", ir.DataType.BOOL)
        narrow = self._inserted(node, "Squeeze", [again, axes], f"{stem}/narrow", ir.DataType.BOOL)
        to = {"to": ir.DataType.INT32}
        numbers = self._inserted(node, "Cast", [narrow], f"{stem}/numbers", ir.DataType.INT32, to)
        node.replace_input_with(PADDING, numbers)
        behind = [value.producer() for value in (again, narrow, numbers)]
        return replace(found, mask=mask, nodes=(*(each for each in behind if each is not None), node))

    def _added(self, node: ir.Node, seen: ir.Value, mask: ir.Value, hidden: float) -> ir.Value:
        """Return what is added to scores in front of a node: 0 where `seen` is true, else `hidden`."""
        numbers = {"seen": 0.0, "hidden": hidden}
        values = [self._constant(f"{mask.name}/{name}", np.float32(number)) for name, number in numbers.items()]
        return self._inserted(node, "Where", [seen, *values], f"{mask.name}/added")

    def _constant(self, stem: str, array: np.ndarray | np.generic) -> ir.Value:
        """Return a new constant."""
        return add_initializer(self.model.graph, unused_name(self.taken, stem), np.asarray(array))

    def _inserted(
        self,
        place: ir.Node,
        op: str,
        inputs: Sequence[ir.Value],
        stem: str,
        dtype: ir.DataType = ir.DataType.FLOAT,
        attributes: dict[str, ir.DataType] | None = None,
    ) -> ir.Value:
        """Return the result of a new node in front of another one."""
        result = insert_before(place, self.taken, op, inputs, attributes, stem=stem)
        result.type = ir.TensorType(dtype)
        return result
