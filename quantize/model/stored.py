"""Store float weights in the shorter form that the given model has for them: half floats, or scaled integers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ...transforms.graphs.evaluation import evaluated
from ...transforms.graphs.queries import MS, constant, graph_of, release
from ...transforms.graphs.rewriter import (
    add_initializer,
    derive_initializer,
    drop_unused,
    insert_before,
    names,
    unused_name,
)
from ...transforms.graphs.tensors import tensors
from ...transforms.int8.existing import insert_product, is_linear, released_name, zero_point_of
from ...transforms.int8.qparams import QParams, along_axis
from ...transforms.registry import LeftAlone

FLOAT = ir.DataType.FLOAT
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
LEAST = 2**12
"""The size in bytes of the smallest float32 weight that is stored in another form."""
SPARING = 0.75
"""The largest share of these bytes that the other form may take."""
OPSET = 13
"""The least opset of the written model: its Cast reads bfloat16."""
SINCE = 7
"""The least opset of the given model: since then operators broadcast as they do now."""
CHAIN = frozenset({"Cast", "Identity", "Mul", "Div", "Add", "Sub", "Transpose", "Reshape"})
"""Operators that compute a weight from a stored one."""
READERS = frozenset({"", MS, "ai.onnx.ml"})
"""The domains of operators that may read a weight in another form; others want constants."""


def stored_as_given(model: ir.Model, given: ir.Model) -> ir.Model:
    """Return a model whose large float32 weights are stored in the form of the given model, where that is shorter.

    Before:  W (float32)
    After:   W = Cast(W, stored as float16), or W = Mul(Cast(W, stored as int8), scale), as the given model computes it
    The runtime computes W once, when it loads the model. A weight whose value would change stays as it is. A
    DequantizeLinear of the given model becomes Cast, Sub and Mul: the runtime would compute it in each run.

    Args:
        model: The model to write; it does not change.
        given: The model of the user.
    """
    chains, halves = _chains(given), _halves(given)
    if not (chains or halves) or model.opset_imports.get("", 0) < OPSET or not len(model.graph):
        return model
    copy = model.clone()
    writer = _Writer(copy.graph, copy.graph[0], names(copy), copy.opset_imports[""])
    for value in [each for each in copy.graph.initializers.values() if _may_change(each)]:
        chain = chains.get(str(value.name))
        if chain is None or not writer.compute_as(value, chain):
            writer.store_as_half(value, halves)
    return copy


def _halves(given: ir.Model) -> list[ir.DataType]:
    """Return the half types in which a model stores weights."""
    return [kind for kind in HALVES if any(t.dtype is kind and 2 * t.nbytes >= LEAST for t in tensors(given))]


def _may_change(value: ir.Value) -> bool:
    """Whether a constant is a large float32 weight that only standard operators read."""
    tensor = constant(value)
    if tensor is None or tensor.dtype is not FLOAT or tensor.nbytes < LEAST or value.is_graph_output():
        return False
    return bool(value.uses()) and all(use.node.domain in READERS for use in value.uses())


def _chains(given: ir.Model) -> dict[str, ir.Value]:
    """Return the float32 weights that a model computes from constants, by their name in the simplified model."""
    found: dict[str, ir.Value] = {}
    if given.opset_imports.get("", 0) < SINCE:
        return found
    plain = given.clone()
    taken, computed = names(plain), set[ir.Value]()
    for node in list(plain.graph):
        result = node.outputs[0]
        if is_linear(node, "DequantizeLinear"):
            if (product := _as_product(node, taken)) is not None:
                found[released_name(result)] = product
        elif _is_link(node, computed):
            computed.add(result)
            found[str(result.name)] = result
    return found


def _is_link(node: ir.Node, computed: Collection[ir.Value]) -> bool:
    """Whether a node of a chain reads constants and computed tensors alone."""
    if node.domain or node.op_type not in CHAIN:
        return False
    return all(value in computed or constant(value) is not None for value in node.inputs)


def _as_product(node: ir.Node, taken: set[str]) -> ir.Value | None:
    """Insert Cast, Sub and Mul in front of a DequantizeLinear of a constant; return the product.

    Before:  W = DequantizeLinear(W8, scale, zero)
    After:   W = Mul(Sub(Cast(W8), zero), scale)
    None for a float or blocks, and where a parameter is not constant.
    """
    data, scale, zero = constant(node.inputs[0]), constant(node.inputs[1]), zero_point_of(node)
    if data is None or scale is None or zero is None or scale.dtype is not FLOAT or "block_size" in node.attributes:
        return None
    params = QParams(scale=scale.numpy(), zero_point=zero, axis=node.attributes.get_int("axis", 1))
    graph, rank = graph_of(node), len(data.shape)

    def operand(array: np.ndarray, what: str) -> ir.Value:
        return add_initializer(
            graph, unused_name(taken, f"{node.outputs[0].name}/{what}"), along_axis(array, params, rank)
        )

    offset = operand(zero.astype(np.float32), "zero") if zero.any() else None
    return insert_product(node, taken, operand(scale.numpy(), "scale"), offset)[-1].outputs[0]


def _inputs(value: ir.Value) -> list[ir.Value]:
    """Return the inputs of the node that computes a tensor of a chain; none for a constant."""
    node = None if constant(value) is not None else value.producer()
    return [] if node is None else [each for each in node.inputs if each is not None]


def _sources(value: ir.Value) -> Iterator[ir.Value]:
    """Yield what a tensor is computed from, in order of execution, constants and the tensor itself too; each once."""
    waiting, seen = [(value, False)], set[ir.Value]()
    while waiting:
        each, done = waiting.pop()
        if done:
            yield each
        elif each not in seen:
            seen.add(each)
            waiting += [(each, True), *((source, False) for source in _inputs(each))]


@dataclass(frozen=True)
class _Writer:
    """Rewrites the weights of a model.

    Attributes:
        graph: The graph, which changes.
        first: Its first node; what computes weights comes before it.
        taken: The names in use.
        opset: The opset of the model, in which a weight is computed.
        written: The tensors of the model that stand for those of the given one.
    """

    graph: ir.Graph
    first: ir.Node
    taken: set[str]
    opset: int
    written: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def compute_as(self, weight: ir.Value, chain: ir.Value) -> bool:
        """Replace a weight by what the given model computes it from; False if that is not shorter, or not equal."""
        sources = list(_sources(chain))
        constants = [tensor for each in sources if (tensor := constant(each)) is not None]
        if sum(tensor.nbytes for tensor in constants) > SPARING * _tensor(weight).nbytes:
            return False
        if not _is_equal(_evaluated(sources, self.opset), weight):
            return False
        for each in sources:
            if each not in self.written:
                self.written[each] = self._copied(each)
        self._replace(weight, self.written[chain])
        return True

    def store_as_half(self, weight: ir.Value, kinds: list[ir.DataType]) -> bool:
        """Replace a weight by a Cast of its values in a half type that holds them; False if none does."""
        array = _tensor(weight).numpy()
        for kind in kinds:
            with np.errstate(over="ignore"):
                half = array.astype(kind.numpy())
            if _is_equal(half.astype(np.float32), weight):
                name = unused_name(self.taken, f"{weight.name}/{kind.name.lower()}")
                stored = derive_initializer(self.graph, name, _tensor(weight), np.asarray, half.shape, kind)
                to = {"to": FLOAT.value}
                cast = insert_before(self.first, self.taken, "Cast", [stored], to, stem=f"{weight.name}/float32")
                self._replace(weight, cast)
                return True
        return False

    def _copied(self, value: ir.Value) -> ir.Value:
        """Return a copy of a tensor of the given model; the copies of what it is computed from exist."""
        tensor, node = constant(value), value.producer()
        if tensor is None:
            assert node is not None
            inputs = [self.written[each] for each in _inputs(value)]
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            return insert_before(self.first, self.taken, node.op_type, inputs, attributes, stem=f"{value.name}/stored")
        name = unused_name(self.taken, f"{value.name}/stored")
        copy = ir.Value(
            name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        self.graph.register_initializer(copy)
        return copy

    def _replace(self, weight: ir.Value, other: ir.Value) -> None:
        """Let the readers of a weight read another tensor of the same type and shape."""
        other.type, other.shape = weight.type, weight.shape
        weight.replace_all_uses_with(other)
        drop_unused(self.graph, [weight])


def _tensor(weight: ir.Value) -> ir.TensorProtocol:
    """Return the tensor of a weight."""
    tensor = constant(weight)
    assert tensor is not None  # `_may_change` has seen it
    return tensor


def _is_equal(array: np.ndarray | None, weight: ir.Value) -> bool:
    """Whether an array has the type, the shape and the bits of a weight."""
    tensor = _tensor(weight)
    held = tensor.numpy()
    release(tensor)
    if array is None or array.dtype != held.dtype or array.shape != held.shape:
        return False
    return np.array_equal(array.view(np.uint32), held.view(np.uint32))


def _evaluated(sources: Sequence[ir.Value], opset: int) -> np.ndarray | None:
    """Return the last of some tensors, of which each is a constant or computed from earlier ones; None if it fails."""
    constants = {str(each.name): tensor for each in sources if (tensor := constant(each)) is not None}
    nodes = [node for each in sources if str(each.name) not in constants and (node := each.producer()) is not None]
    try:
        (result,) = evaluated(nodes, constants, [str(sources[-1].name)], {"": opset})
    except LeftAlone:
        return None
    return result if isinstance(result, np.ndarray) else None
