"""Compute with heads apart from the batch what stands between reshapes that merge and split them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from .graph import (
    add_initializer,
    computing_nodes,
    constant,
    graph_of,
    insert_before,
    integers_of,
    names,
    node_name,
    remove_unread,
    replace,
    unused_name,
)
from .merged_heads import ROWS_TURNED, Count, MergedHeads, merging
from .patterns.lengths import Lengths, standard
from .registry import Change, LeftAlone, transform


@transform("sink_merged_heads", after=("fold_constants",))
def sink_merged_heads(model: ir.Model) -> Change:
    """Compute with heads apart from the batch what stands between reshapes that merge and split them.

    Before:  y = Reshape(Add(MatMul(q, Transpose(k, perm [0, 2, 1])), r), [N, H, L, L]), where
             r = GatherElements(MatMul(q, Tile(c, [N, 1, 1])), Expand(i, [N * H, L, L]), axis 2), c (H, D, P),
             i (1, L, L),
             q = Reshape(a, [N * H, L, D]), a (N, H, L, D); k likewise, from b
    After:   y = Add(MatMul(a, Transpose(b, perm [0, 1, 3, 2])), s), where
             s = GatherElements(MatMul(a, c), Expand(Unsqueeze(i, [0]), [N, H, L, L]), axis 3)
        DeBERTa writes scores with relative positions so. The rest is attention as in other networks, and c is a
        constant weight. A factor like Sqrt(3 * Shape(k)[2]) becomes a number if the length is one.
    Left alone: all operators between such reshapes if one of them is another operator than products, sums, factors,
        a Softmax, a Transpose of rows and columns, and a GatherElements (``operators``), if lengths are not known to
        be those of the batch and the heads (``lengths``), or if a result is an output of a graph (``output``).
    """
    change, taken = Change(), names(model)
    progress = True
    while progress:  # behind a region the lengths of axes are known
        before = change.applied
        change.skipped.clear()
        lengths, seen = Lengths(model), set[ir.Node]()
        for reshape in computing_nodes(model, "Reshape"):
            merged = None if reshape in seen else merging(reshape, lengths)
            if merged is None or reshape.graph is None:
                continue
            region = MergedHeads(*merged, lengths, reshape.graph)
            try:
                region.fill(reshape)
                _rebuild(region, taken)
                change.applied += 1
            except LeftAlone as reason:
                change.skip(str(reason))
            seen |= {*region.entries.values(), *region.nodes}
        progress = change.applied > before
    return change


# ------------------------------------------------------------------------------------------------------ heads apart


@dataclass(eq=False)
class _Building:
    """Operators with heads apart.

    Attributes:
        region: The region with merged heads.
        taken: The names in the model.
        apart: Its tensors with heads apart. Those that all items of the batch share have no axis for it.
        shared: Its tensors that all items share.
    """

    region: MergedHeads
    taken: set[str]
    apart: dict[ir.Value, ir.Value] = field(default_factory=dict)
    shared: set[ir.Value] = field(default_factory=set)

    def enter(self, value: ir.Value, node: ir.Node) -> None:
        """Note a tensor that the region reads with heads apart."""
        source = node.inputs[0]
        assert source is not None
        if node.op_type == "Expand":
            source = self._expanded(value, node, source)
        elif node.op_type == "Tile":
            self.shared.add(value)
        self.apart[value] = source

    def weight(self, value: ir.Value, reader: ir.Node) -> None:
        """Note a constant with heads apart."""
        tensor = constant(value)
        assert tensor is not None
        array = tensor.numpy()
        name = unused_name(self.taken, f"{value.name}/apart")
        array = array.reshape(-1, self.region.heads, *array.shape[1:])
        if {use.node.op_type for use in value.uses()} == {"MatMul"} and np.array_equal(
            array, array[:1].repeat(len(array), 0)
        ):
            array = array[:1]
        self.apart[value] = add_initializer(graph_of(reader), name, array, tensor.dtype)

    def _expanded(self, value: ir.Value, node: ir.Node, source: ir.Value) -> ir.Value:
        """Return a tensor that is expanded to the batch and to heads."""
        region, stem = self.region, node_name(node)
        axes = self._constant(node, f"{stem}/axes", np.zeros(1, np.int64))
        wide = insert_before(node, self.taken, "Unsqueeze", [source, axes], stem=f"{stem}/wide")
        wide.type = value.type or source.type
        parts = [self._length(node, count) for count in region.target(value, source)]
        target = insert_before(node, self.taken, "Concat", parts, {"axis": 0}, stem=f"{stem}/target")
        target.type = ir.TensorType(ir.DataType.INT64)
        return self._named(insert_before(node, self.taken, "Expand", [wide, target], stem=f"{stem}/apart"), value)

    def _length(self, node: ir.Node, count: Count) -> ir.Value:
        """Return the length of an axis, int64 (1,), in front of a node."""
        if isinstance(count, int):
            return self._constant(node, f"{node_name(node)}/length", np.array([count], np.int64))
        tensor, axis = count if isinstance(count, tuple) else _place(self.region, node, count)
        kind, stem = ir.TensorType(ir.DataType.INT64), f"{tensor.name}/lengths"
        shape = insert_before(node, self.taken, "Shape", [tensor], stem=stem)
        index = self._constant(node, f"{stem}/axis", np.array([axis], np.int64))
        length = insert_before(node, self.taken, "Gather", [shape, index], {"axis": 0}, stem=f"{stem}/length")
        shape.type = length.type = kind
        return length

    def add(self, node: ir.Node) -> None:
        """Add the operator that does the same to heads that are apart."""
        operands, result = self.region.operands(node), node.outputs[0]
        inputs = [
            self.apart[value] if value in operands else self._factor(node, value) for value in node.inputs if value
        ]
        shared = all(value in self.shared for value in operands)
        if shared:
            self.shared.add(result)
        attributes = {name: each.value for name, each in node.attributes.items()}
        if node.op_type == "Transpose":
            attributes = {"perm": ROWS_TURNED if shared else (0, 1, 3, 2)}
        elif "axis" in attributes:
            attributes["axis"] = -1
        tensor = constant(inputs[0])
        if node.op_type == "Transpose" and tensor is not None:
            name = unused_name(self.taken, f"{inputs[0].name}/turned")
            self.apart[result] = add_initializer(
                graph_of(node), name, np.ascontiguousarray(tensor.numpy().swapaxes(-1, -2)), tensor.dtype
            )
            return
        made = insert_before(node, self.taken, node.op_type, inputs, attributes, stem=f"{node_name(node)}/apart")
        self.apart[result] = self._named(made, result, shared=shared)

    def _factor(self, node: ir.Node, value: ir.Value) -> ir.Value:
        """Return a factor as a constant, if it can be one."""
        number = None if constant(value) is not None else self.region.number(value)
        if number is None or self.region.lengths.dtype(value) is not ir.DataType.FLOAT:
            return value
        return self._constant(node, f"{node_name(node)}/factor", np.array(number, np.float32))

    def _named(self, made: ir.Value, like: ir.Value, *, shared: bool = False) -> ir.Value:
        """Give a new tensor the type and the lengths of one with merged heads; return it."""
        counts = [*([] if shared else [self.region.batch]), self.region.heads, *self.region.counts[like]]
        dtype = self.region.lengths.dtype(like)
        made.type = like.type if dtype is None else ir.TensorType(dtype)
        given = {
            length.value for x in self.region.graph.inputs for length in x.shape or () if not isinstance(length, int)
        }
        made.shape = ir.Shape([count if isinstance(count, int) or count in given else None for count in counts])
        return made

    def _constant(self, node: ir.Node, stem: str, array: np.ndarray) -> ir.Value:
        """Return a new constant."""
        return add_initializer(graph_of(node), unused_name(self.taken, stem), array)


def _place(region: MergedHeads, reader: ir.Node, name: str) -> tuple[ir.Value, int]:
    """Return a tensor in front of a node, and its axis, whose length has a name: an input, or what heads are made of.

    Raises:
        LeftAlone: None has it.
    """
    for value in region.graph.inputs:
        for axis, length in enumerate(value.shape or ()):
            if isinstance(length, ir.SymbolicDim) and length.value == name:
                return value, axis
    order = {node: place for place, node in enumerate(region.graph)}
    for source in [node.inputs[0] for node in region.entries.values() if node.op_type == "Reshape"]:
        shape = region.lengths.of(source) or ()
        if source is not None and name in shape:
            found = _origin(source, [*shape].index(name))
            maker = found[0].producer()
            if maker is None or order.get(maker, len(order)) < order[reader]:
                return found
    raise LeftAlone("lengths")


def _origin(value: ir.Value, axis: int) -> tuple[ir.Value, int]:
    """Return the tensor, and its axis, from which a Transpose and a Reshape take an axis of theirs."""
    while (node := standard(value)) is not None and node.inputs[0] is not None:
        target = integers_of(node.inputs[1]) if node.op_type == "Reshape" else None
        if node.op_type == "Transpose" and "perm" in node.attributes:
            axis = node.attributes.get_ints("perm")[axis]
        elif target is None or axis >= len(target) or target[axis] != 0:
            break
        value = node.inputs[0]
    return value, axis


def _rebuild(region: MergedHeads, taken: set[str]) -> None:
    """Replace a region by operators with heads apart.

    Raises:
        LeftAlone: A length of the target of an Expand is not that of an input; nothing is changed.
    """
    _check(region)
    building = _Building(region, taken)
    for value, node in region.entries.items():
        building.enter(value, node)
    for weight in region.weights:
        building.weight(weight, next(iter(region.nodes)))
    for node in region.nodes:
        building.add(node)
    for end in region.ends:
        replace(end.outputs[0], building.apart[region.given(end)])
    remove_unread([*region.entries.values(), *region.nodes, *region.ends])  # from the last one


def _check(region: MergedHeads) -> None:
    """Check that a region can have heads apart.

    Raises:
        LeftAlone: It cannot.
    """
    if not region.nodes or not region.ends:
        raise LeftAlone("operators")
    shared = {value for value, node in region.entries.items() if node.op_type == "Tile"}
    for node in region.nodes:
        operands = region.operands(node)
        if all(value in shared for value in operands):
            shared.add(node.outputs[0])
        elif node.op_type == "GatherElements" and not shared.isdisjoint(operands):
            raise LeftAlone("operators")
    if any(region.given(end) in shared for end in region.ends):
        raise LeftAlone("operators")
    for value, node in region.entries.items():
        if node.op_type == "Expand":
            for count in region.target(value, node.inputs[0]):
                if isinstance(count, str):
                    _place(region, node, count)
