"""Compute tensors that do not depend on the model's inputs at conversion time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from .. import UnknownNameError
from .constant_ifs import take_branches
from .evaluation import evaluated
from .graph import QDQ, computing_nodes, constant, graph_of, is_standard, producer_of
from .inference import stand_ins
from .int8.ops import MOVES, row_of
from .registry import Change, LeftAlone, transform
from .rewriter import add_initializer, discard, remove_if_unread
from .tensors import tensors

RANDOM = frozenset(
    ["Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
BODIES = frozenset({ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS})
WEIGHT_PATH = MOVES | {"Cast", "Slice"}
"""Operators of one tensor that may stand between a weight and what reads it; a Concat may too."""
SCALING = frozenset({"Add", "Div", "Mul", "Sub"})
"""Operators that may stand there with a constant: a weight may be stored as integers with a scale and a zero point."""
RECURRENT_WEIGHTS = dict.fromkeys(("LSTM", "GRU", "RNN"), (1, 2))
"""The indices of the weights of recurrent operators; exporters put their gates in order by a Slice for each."""
GROWTH = 0.1
"""The share of its constants by which a model may grow."""
LEAST_GROWTH = 2**12
"""Bytes by which any model may grow: shapes and factors."""

MOST_WEIGHTS = 2**28
"""Bytes by which weights may grow in any model; in larger models, by the size of its constants."""
MOST_WIDENED = 8
"""How many times as long as their constants weights may be: 4 bits become float32. A mel filter bank is longer."""
MOST_NODES = 32
"""The most nodes that are judged together."""
VALUES_GIVE_SHAPE = frozenset(
    "AffineGrid BlackmanWindow CenterCropPad Col2Im ConstantOfShape DFT Expand HammingWindow HannWindow ImageDecoder"
    " MaxUnpool MelWeightMatrix OneHot Pad Range Resize STFT Tile Upsample".split()
)
"""Operators of which a few numbers can make a result of any size; without a known shape they are not computed."""

Values = Mapping[ir.Value, ir.Value]
Growing = tuple[float, Sequence[ir.Node]]
"""Nodes of which the last one needs the others, and the bytes by which the file grows if all become constants."""


@transform("fold_constants")
def fold_constants(
    model: ir.Model,
    *,
    max_size_in_bytes: int = 10 * 2**20,
    exclude_op: tuple[str, ...] = (),
    exclude_node: tuple[str, ...] = (),
) -> Change:
    """Replace each node with constant inputs, and each Shape of a known shape, by its value.

    Before:  w = Transpose(W); n = Constant(); s = Shape(x), x of shape (1, 3, 8, 8); d = Gather(Shape(z), n), z (N, 4);
             e = Slice(Shape(z), [1], [2]); y = If(true), then {t = Sqrt(x)}, else {f = Neg(x)}
    After:   w, n, s, d, e are initializers; y = Sqrt(x)
    An If with a constant condition gives way to the nodes of the branch that it takes, as the ``squeeze`` of PyTorch
        needs it where the shapes are known.
    The file grows by at most 10 % of the constants of the model, or 4 KiB: the results that make it grow least are
        stored first. Results between nodes do not count if they need not be stored, as in the standardization of a
        weight: up to 32 nodes are judged together. The weights of products and of recurrent operators, also those that
        are integers with a scale and a zero point, are stored if they grow by at most 256 MiB, or the size of all
        constants, and have at most 8 times the bytes of the constants of which they are made: 4 bits become 32.
    Left alone: results beyond this growth (``grows``); random operators; QuantizeLinear and DequantizeLinear, which
        hold the int8 weights; other control flow, except the nodes in its bodies; operators of other domains; outputs
        of graphs and bodies; results larger than both max_size_in_bytes and their inputs; operators that
        ``onnx.reference`` cannot compute, or computes in another type.

    Options:
        max_size_in_bytes: A larger result is stored only if it is no larger than the inputs of the node.
        exclude_op: Operator types to leave alone.
        exclude_node: Names of nodes to leave alone.

    Raises:
        UnknownNameError: No node has a name in exclude_node.
    """
    known = {node.name for node in computing_nodes(model) if node.name}
    for name in exclude_node:
        if name not in known:
            raise UnknownNameError("node", name, known)
    excluded = frozenset(
        node for node in computing_nodes(model) if node.op_type in exclude_op or node.name in exclude_node
    )
    folding = _Folding(model, max_size_in_bytes, excluded, _budget(model), max(_held(model), MOST_WEIGHTS))
    progress = True
    while progress:  # a Reshape to a constant shape makes the shapes behind it known
        before = folding.change.applied
        folding.change.skipped.clear()
        shapes = stand_ins(model)
        growing = folding.fold_free(shapes)
        folding.change.applied += take_branches(model, excluded)
        if folding.change.applied == before:
            growing += folding.fold_cones([node for _, (node,) in growing], shapes)
        if folding.change.applied == before:
            folding.fold_growing(growing, shapes)
        progress = folding.change.applied > before
    return folding.change


@dataclass(slots=True)
class _Folding:
    """A run of `fold_constants`.

    Attributes:
        model: The model.
        limit: The size of the largest result in bytes, unless the inputs are larger.
        excluded: Nodes to leave alone.
        left: Bytes by which the file may still grow.
        weights: Bytes by which weights may still grow.
        sizes: The size in bytes of results that were computed once, by node.
        change: What was done so far.
    """

    model: ir.Model
    limit: int
    excluded: frozenset[ir.Node]
    left: float
    weights: float
    sizes: dict[ir.Node, int] = field(default_factory=dict)
    change: Change = field(default_factory=Change)

    def fold_free(self, shapes: Values) -> list[Growing]:
        """Fold the nodes that do not make the file grow; return the others with the bytes by which they do."""
        growing: list[Growing] = []
        for node in computing_nodes(self.model):
            if not _is_candidate(node):
                continue
            try:
                if node in self.excluded:
                    raise LeftAlone("excluded")
                arrays = [] if node in self.sizes else _folded(self.model, node, shapes, self.limit)
            except LeftAlone as left:
                self.change.skip(str(left))
                continue
            if node not in self.sizes:
                self.sizes[node] = _stored_bytes(node, arrays)
            growth = self.sizes[node] - _freed_bytes(node)
            if growth > 0 and not self._may_grow([node], growth):
                growing.append((growth, [node]))
                continue
            self.left -= min(growth, 0)
            self.weights -= max(growth, 0)
            self._store(node, arrays or _folded(self.model, node, shapes, self.limit))
        return growing

    def fold_cones(self, nodes: Sequence[ir.Node], shapes: Values) -> list[Growing]:
        """Fold nodes together with those that they need, where the file does not grow by what others read of them.

        Args:
            nodes: The nodes with constant inputs.
            shapes: Values with the shapes of tensors.

        Returns:
            The other nodes, each with those that it needs, and the bytes by which the file grows.
        """
        growing: list[Growing] = []
        for cone in _cones(self.model, nodes, self.excluded):
            if any(node.graph is None for node in cone):  # part of another cone
                continue
            try:
                growth = _cone_growth(cone, shapes)
                if growth > 0 and not self._may_grow(cone, growth):
                    growing.append((growth, cone))
                    continue
                self._store_cone(cone, shapes)
            except LeftAlone:
                continue
            self.left -= min(growth, 0)
            self.weights -= max(growth, 0)
        return growing

    def fold_growing(self, growing: Sequence[Growing], shapes: Values) -> None:
        """Fold nodes as long as the file may grow, those first that make it grow least."""
        for growth, cone in sorted(growing, key=lambda each: each[0]):
            if any(node.graph is None for node in cone):  # a Shape that lost its readers, or a part of another cone
                continue
            if growth > self.left:
                if len(cone) == 1:
                    self.change.skip("grows")
                continue
            try:
                self._store_cone(cone, shapes)
            except LeftAlone:
                continue
            self.left -= growth

    def _may_grow(self, cone: Sequence[ir.Node], growth: float) -> bool:
        """Return whether nodes compute weights that may grow by some bytes."""
        read = sum(each.nbytes for each in map(constant, {v for n in cone for v in n.inputs}) if each is not None)
        return growth <= min(self.weights, (MOST_WIDENED - 1) * read) and _is_weight(cone[-1])

    def _store_cone(self, cone: Sequence[ir.Node], shapes: Values) -> None:
        """Replace nodes by initializers for what others read of them.

        Raises:
            LeftAlone: A node must stay; then all stay.
        """
        if len(cone) == 1:
            self._store(cone[0], _folded(self.model, cone[0], shapes, self.limit))
            return
        results = _cone_results(self.model, cone, shapes, self.limit)
        for node in reversed(cone):  # what is between them has no readers left, and is not stored
            if node.graph is not None:  # a Shape leaves with its last reader
                self._store(node, [results.get(value, np.empty(0)) for value in node.outputs])

    def _store(self, node: ir.Node, arrays: Sequence[np.ndarray]) -> None:
        """Replace a node by initializers."""
        _store(node, arrays)
        self.change.applied += 1


def _budget(model: ir.Model) -> float:
    """Return the bytes by which a model may grow."""
    return max(GROWTH * _held(model), LEAST_GROWTH)


def _held(model: ir.Model) -> int:
    """Return the bytes of a model's constants."""
    return sum(tensor.nbytes for tensor in tensors(model))


def _freed_bytes(node: ir.Node) -> int:
    """Return the size of the constants that only this node reads."""
    sources = [value for value in dict.fromkeys(node.inputs) if value is not None and not value.is_graph_output()]
    alone = [value for value in sources if all(use.node is node for use in value.uses())]
    return sum(tensor.nbytes for value in alone if (tensor := constant(value)) is not None)


def _cones(model: ir.Model, growing: Sequence[ir.Node], excluded: frozenset[ir.Node]) -> list[list[ir.Node]]:
    """Return, for each node that depends on constants alone, this node and the nodes that it needs, in order.

    Args:
        model: The model.
        growing: The nodes with constant inputs that can be computed.
        excluded: Nodes to leave alone.
    """
    cones = {node: [node] for node in growing if _has_constant_inputs(node)}
    for node in computing_nodes(model):
        if node in cones or node in excluded or node.op_type == "Constant":
            continue
        sources = [value.producer() for value in node.inputs if value is not None and constant(value) is None]
        parts = [cones[source] for source in sources if source in cones and source.graph is node.graph]
        if sources and len(parts) == len(sources) and not _why_left(node):
            cone = [*dict.fromkeys(each for part in parts for each in part), node]
            if len(cone) <= MOST_NODES:
                cones[node] = cone
    return [cone for cone in cones.values() if len(cone) > 1]


def _cone_growth(cone: Sequence[ir.Node], shapes: Values) -> float:
    """Return the bytes by which the file grows if nodes are computed and only what others read is stored.

    Raises:
        LeftAlone: The size of a result is not known.
    """
    inside = set(cone)
    stored = [value for node in cone for value in node.outputs if any(use.node not in inside for use in value.uses())]
    if not all(_has_size(shapes.get(value)) for value in stored):
        raise LeftAlone("shape-unknown")
    sources = dict.fromkeys(value for node in cone for value in node.inputs if value is not None)
    alone = [value for value in sources if not value.is_graph_output() and all(u.node in inside for u in value.uses())]
    freed = sum(tensor.nbytes for value in alone if (tensor := constant(value)) is not None)
    return sum(_expected_bytes(shapes.get(value)) for value in stored) - freed


def _cone_results(model: ir.Model, cone: Sequence[ir.Node], shapes: Values, limit: int) -> dict[ir.Value, np.ndarray]:
    """Return what nodes compute that others read.

    Raises:
        LeftAlone: A node must stay.
    """
    results: dict[ir.Value, np.ndarray] = {}
    for index, node in enumerate(cone):
        results.update(zip(node.outputs, _evaluated(model, node, shapes, limit, results), strict=True))
        done = set(cone[: index + 1])
        for value in [value for value in results if all(use.node in done for use in value.uses())]:
            del results[value]  # keeps no more results in memory than needed
    return results


def _stored_bytes(node: ir.Node, arrays: Sequence[np.ndarray]) -> int:
    """Return the size of the results of a node that must be stored; nothing for a Constant, whose tensor only moves."""
    stored = [] if node.op_type == "Constant" else zip(node.outputs, arrays, strict=True)
    return sum(array.nbytes for value, array in stored if value.name and value.uses())


def _is_weight(node: ir.Node) -> bool:
    """Whether a product or a recurrent operator reads the result of a node as weights: int8 needs constant ones."""
    waiting, seen = [node], {node}
    while waiting:
        for use in (use for value in waiting.pop().outputs for use in value.uses()):
            row, op = row_of(use.node), use.node.op_type
            if row is not None and row.kind == "compute" and use.idx == row.weight:
                return True
            if use.idx in RECURRENT_WEIGHTS.get(op, ()):
                return True
            if use.node not in seen and _passes_weight(use.node, use.idx):
                seen.add(use.node)
                waiting.append(use.node)
    return False


def _passes_weight(node: ir.Node, index: int) -> bool:
    """Whether a node only moves the tensor that is this input, or scales and shifts it by constants."""
    if node.op_type in SCALING:
        return all(constant(value) is not None for i, value in enumerate(node.inputs) if i != index)
    return node.op_type == "Concat" or (node.op_type in WEIGHT_PATH and index == 0)


def _is_candidate(node: ir.Node) -> bool:
    """Whether `node` depends only on constants, or only on the shape of a tensor."""
    if node.domain == "" and node.op_type in ("Shape", "Size"):
        return True
    return _is_dimension(node) or _has_constant_inputs(node)


def _has_constant_inputs(node: ir.Node) -> bool:
    """Whether all inputs of a node are constants."""
    return all(value is None or constant(value) is not None for value in node.inputs)


def _is_dimension(node: ir.Node) -> bool:
    """Whether `node` selects elements of a Shape by constants: a Gather or a Slice."""
    if not is_standard(node, "Gather", "Slice") or node.inputs[0] is None:
        return False
    if len(node.inputs) < 2 or any(constant(value) is None for value in node.inputs[1:] if value is not None):
        return False
    shape = node.inputs[0].producer()
    return is_standard(shape, "Shape")


def _why_left(node: ir.Node) -> str:
    """Return why a node stays whatever its inputs are; an empty text if it need not."""
    if node.domain != "":
        return "unknown-domain"
    if {attribute.type for attribute in node.attributes.values()} & BODIES:
        return "control-flow"
    if node.op_type in RANDOM:
        return "random"
    if node.op_type in QDQ:
        return "quantization"
    return "graph-output" if any(value.is_graph_output() for value in node.outputs) else ""


def _folded(model: ir.Model, node: ir.Node, shapes: Values, limit: int) -> list[np.ndarray]:
    """Return the values of the outputs of a candidate.

    Raises:
        LeftAlone: The node must stay.
    """
    if why := _why_left(node):
        raise LeftAlone(why)
    if node.op_type in ("Shape", "Size"):
        return [_shape_result(node, shapes)]
    if _is_dimension(node):
        return [_dimension_result(node, shapes)]
    if node.op_type == "Constant":
        tensor = constant(node.outputs[0])
        if tensor is None or tensor.dtype == ir.DataType.STRING:
            raise LeftAlone("not-a-numeric-tensor")
        return [tensor.numpy()]
    return _evaluated(model, node, shapes, limit)


def _dimensions(value: ir.Value | None, shapes: Values) -> Sequence[int | ir.SymbolicDim]:
    """Return the dimensions of a tensor, integers or symbols."""
    known = shapes.get(value, value) if value is not None else None
    if known is None or known.shape is None:
        raise LeftAlone("shape-unknown")
    return known.shape.dims


def _fixed(dimensions: Sequence[int | ir.SymbolicDim]) -> np.ndarray:
    """Return the dimensions as int64.

    Raises:
        LeftAlone: A dimension is not an integer.
    """
    if not all(isinstance(length, int) for length in dimensions):
        raise LeftAlone("shape-not-fixed")
    return np.array(dimensions, np.int64)


def _shape_result(node: ir.Node, shapes: Values) -> np.ndarray:
    """Return the value of ``Shape(x)``, with ``start`` and ``end``, or of ``Size(x)``."""
    dimensions = _dimensions(node.inputs[0], shapes)
    if node.op_type == "Size":
        return np.array(np.prod(_fixed(dimensions), dtype=np.int64))
    return _fixed(dimensions[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)])


def _dimension_result(node: ir.Node, shapes: Values) -> np.ndarray:
    """Return the value of a Gather or Slice of a Shape; only the selected dimensions must be integers."""
    value = node.inputs[0]
    shape = producer_of(value)
    if shape is None:
        raise LeftAlone("shape-unknown")
    start, end = shape.attributes.get_int("start", 0), shape.attributes.get_int("end", None)
    dimensions = _dimensions(shape.inputs[0], shapes)[start:end]
    given = [None if tensor is None else tensor.numpy() for tensor in map(constant, node.inputs[1:])]
    indices = _sliced(given, len(dimensions)) if node.op_type == "Slice" else given[0]
    if indices is None or not all(-len(dimensions) <= i < len(dimensions) for i in indices.flat):
        raise LeftAlone("index-out-of-range")
    return _fixed([dimensions[i] for i in indices.flat]).reshape(indices.shape)


def _sliced(given: Sequence[np.ndarray | None], count: int) -> np.ndarray | None:
    """Return which of some elements a Slice selects, from its starts, ends, axes and steps; None if it is malformed."""
    starts, ends, _, steps = [*given, None, None][:4]
    if starts is None or ends is None or starts.size != 1 or ends.size != 1:
        return None
    step = 1 if steps is None else int(steps.item())
    return np.arange(count)[slice(int(starts.item()), int(ends.item()), step)] if step > 0 else None


def _evaluated(
    model: ir.Model, node: ir.Node, shapes: Values, limit: int, computed: Mapping[ir.Value, np.ndarray] | None = None
) -> list[np.ndarray]:
    """Run one node in onnx's reference evaluator, with the operator sets of the model.

    Args:
        model: The model.
        node: The node.
        shapes: Values with the shapes of tensors.
        limit: The size of the largest result in bytes, unless the inputs are larger.
        computed: Inputs that are no constants of the model yet.
    """
    given = [value for value in node.inputs if value is not None]
    constants = {str(value.name): tensor for value in given if (tensor := constant(value)) is not None}
    constants |= {str(value.name): ir.tensor(computed[value]) for value in given if computed and value in computed}
    read = sum(tensor.nbytes for tensor in constants.values())
    outputs = [value for value in node.outputs if value.name]
    for value in outputs:
        _check_size(_expected_bytes(shapes.get(value)), read, limit)
        if node.op_type in VALUES_GIVE_SHAPE and not _has_size(shapes.get(value)):
            raise LeftAlone("shape-unknown")
    results = evaluated([node], constants, [str(value.name) for value in outputs], model.opset_imports)
    arrays = iter(_checked(value, result, shapes) for value, result in zip(outputs, results, strict=True))
    return [next(arrays) if value.name else np.empty(0) for value in node.outputs]


def _has_size(value: ir.Value | None) -> bool:
    """Whether each length of a tensor is known."""
    return value is not None and value.shape is not None and value.shape.is_static()


def _expected_bytes(value: ir.Value | None) -> float:
    """Return the size of a tensor in bytes; 0 if the shape or type is not known, or for texts."""
    if value is None or value.dtype in (None, ir.DataType.STRING) or value.shape is None or not _has_size(value):
        return 0
    return float(np.prod(value.shape.numpy(), dtype=np.float64) * value.dtype.itemsize)


def _check_size(size: float, read: int, limit: int) -> None:
    """Raise LeftAlone for a result larger than the limit and larger than the inputs; sizes in bytes."""
    if size > max(read, limit):
        raise LeftAlone("too-large")


def _checked(value: ir.Value, result: object, shapes: Values) -> np.ndarray:
    """Return a result as an array; raise LeftAlone if its type is not the one that onnx infers."""
    if not isinstance(result, np.ndarray | np.generic) or result.dtype.kind in "OSU":
        raise LeftAlone("not-a-numeric-tensor")
    expected = shapes.get(value)
    if expected is None or expected.dtype is None or ir.DataType.from_numpy(result.dtype) != expected.dtype:
        raise LeftAlone("type-unsure")
    return np.asarray(result)


def _store(node: ir.Node, arrays: Sequence[np.ndarray]) -> None:
    """Replace a node by initializers that have the names of its outputs."""
    graph = graph_of(node)
    inputs, outputs = tuple(node.inputs), tuple(node.outputs)
    for value, array in zip(outputs, arrays, strict=True):
        if value.name and value.uses():
            value.replace_all_uses_with(add_initializer(graph, value.name, array))
    graph.remove(node, safe=True)
    discard(*inputs)
    for source in inputs:  # removes a Shape without readers left
        shape = producer_of(source)
        if shape is not None and shape.domain == "" and shape.op_type == "Shape" and shape.graph is graph:
            remove_if_unread(shape)
