"""A call of a native operator: the operator, its inputs and results, and the nodes that it replaces."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from ...calibration.model.session import Array
from ...transforms.graphs.queries import Shape
from .chains import Chain


def attributes_of(values: Mapping[str, int | float | Sequence[int]]) -> dict[str, ir.Attr]:
    """Return the attributes of a node by name, from their values."""
    return {each.name: each for each in ir.convenience.convert_attributes(values)}


@dataclass(frozen=True, eq=False)
class Anchor:
    """The node of a body that has the attributes of the call.

    Attributes:
        node: The node.
        beside: The names of attributes of the call that the node does not have.
    """

    node: ir.Node
    beside: Collection[str] = ()


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of a call that are computed: some of its inputs, and its result.

    Attributes:
        places: The places of these inputs among all inputs of the call.
        order: Their places among the inputs of the unit, where they are not the same.
        shapes: The shapes of these inputs and of the result in NCHW, if the operator takes NHWC; else empty.
        dtype: The element type of all of them.
        made: The element type of the result, if it is another one.
    """

    places: Sequence[int] = (0,)
    order: Sequence[int] = ()
    shapes: Sequence[Shape] = ()
    dtype: ir.DataType = ir.DataType.UINT8
    made: ir.DataType | None = None


FLOATS = Tensors(dtype=ir.DataType.FLOAT)
"""One computed input and a result, both of floats."""


@dataclass(frozen=True, eq=False)
class Results:
    """The results of a call.

    Attributes:
        count: How many outputs of the last node of the body are results.
        behind: Nodes that read results of the body, and that the call replaces too, in order.
        more: Results of these nodes.
    """

    count: int = 1
    behind: Sequence[ir.Node] = ()
    more: Sequence[ir.Value] = ()


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a native operator, and the nodes that it replaces.

    Attributes:
        operator: The operator.
        name: The name of the node.
        names: The names of the operator's inputs.
        inputs: The inputs; those that are missing at the end are omitted.
        body: The nodes that it replaces, in order.
        attributes: The attributes of the node.
        anchor: The node of the body that has the attributes; None without attributes.
        values: The values of further inputs by name: ``table``, ``curve``, ``grid``. A Table has those of its body.
        tensors: The inputs that are computed, and the result.
        results: The results.
        chain: The function that a Table computes; None for other operators.
    """

    operator: str
    name: str
    names: Sequence[str]
    inputs: Sequence[ir.Value | None]
    body: Sequence[ir.Node]
    attributes: Mapping[str, ir.Attr] = field(default_factory=dict)
    anchor: Anchor | None = None
    values: Mapping[str, Array] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=Tensors)
    results: Results = field(default_factory=Results)
    chain: Chain | None = None

    @property
    def computed(self) -> list[ir.Value]:
        """The inputs that are computed."""
        return [value for value in (self.inputs[index] for index in self.tensors.places) if value is not None]
