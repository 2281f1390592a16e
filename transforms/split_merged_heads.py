"""Give heads of attention an axis of their own, where they are merged with the batch."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .graphs.queries import computing_nodes, constant, graph_of, integers_of, made_by, node_name, one_number
from .graphs.rewriter import add_initializer, insert_before, names, remove_unread, replace, unused_name
from .patterns.lengths import SAME, Axis, Length, Lengths, standard
from .patterns.merged_heads import MERGED, SCALED, MergedHeads, merging, perm, value_of
from .registry import Change, LeftAlone, transform


@transform("split_merged_heads", after=("fold_constants",))
def split_merged_heads(model: ir.Model) -> Change:
    """Give heads an axis of their own in attention that merges them with the batch.

    Before:  q = Transpose(Reshape(x, [L, -1, D]), perm [1, 0, 2]), x (L, B, H * D); k and v likewise
             y = Reshape(Transpose(MatMul(Softmax(MatMul(q, Transpose(k))), v), perm [1, 0, 2]), [L, -1, H * D])
    After:   q = Transpose(Reshape(x, [L, -1, H, D]), perm [1, 2, 0, 3]); k and v likewise
             y = Reshape(Transpose(MatMul(Softmax(MatMul(q, Transpose(k))), v), perm [2, 0, 1, 3]), [L, -1, H * D])
        PyTorch's MultiheadAttention writes it so where it also returns the shares. The rest is attention as in other
        networks.
    Before:  q = Reshape(a, [-1, L, D]), a (B, H, L, D), and y = Reshape(MatMul(p, v), [B, H, L, D])
    After:   q = a, and y = MatMul(p, v)
        Older transformers (BART, CLIP, OPT, wav2vec2) write it so. Reshapes around the sum with a mask leave, too.
    Before:  r = GatherElements(MatMul(q, Tile(c, [B, 1, 1])), Expand(i, [B * H, L, L]), axis 2), i (1, L, L)
    After:   r = GatherElements(MatMul(a, d), Expand(i, [B, H, 1, 1]), axis 3), c (H, D, P) and d (1, H, D, P)
        DeBERTa writes scores with relative positions so; c is a constant weight. A factor like Sqrt(3 * Shape(k)[2])
        becomes a number if the length is one.
    Left alone: all operators between such Reshapes if one of them is another operator than products of matrices, sums,
        factors, a Softmax, a Transpose, and a GatherElements (``operators``), if lengths are not known to be the
        batch and the heads (``lengths``), if there are several numbers of heads (``heads``), or if a result is an
        output of a graph (``output``).
    """
    change, lengths, taken, seen = Change(), Lengths(model), names(model), set[ir.Node]()
    for reshape in computing_nodes(model, "Reshape"):
        if reshape.graph is None or reshape in seen or merging(reshape, lengths) is None:
            continue
        region = MergedHeads(graph_of(reshape), lengths)
        try:
            region.fill(reshape)
            _split(region, taken)
            change.applied += 1
        except LeftAlone as reason:
            change.skip(str(reason))
        seen |= {*region.entries.values()}
    return change


def _split(region: MergedHeads, taken: set[str]) -> None:
    """Give heads an axis of their own in a region."""
    apart = {value: _apart(value, region, taken) for value in [*region.entries, *region.weights]}
    unread = [*region.entries.values()]
    for node in region.nodes:
        unread += [maker for value in node.inputs if value is not None and (maker := value.producer()) is not None]
        for place, value in enumerate(node.inputs):
            if value in apart:
                node.replace_input_with(place, apart[value])
        _widen(node, region, taken)
    for end, splits in region.ends.items():
        if splits:
            unread += [maker for value in end.inputs if value is not None and (maker := value.producer()) is not None]
            replace(end.outputs[0], value_of(end))
    remove_unread([*unread, *region.nodes, *region.ends])


def _apart(value: ir.Value, region: MergedHeads, taken: set[str]) -> ir.Value:
    """Return a tensor that a region reads with heads apart."""
    node, heads = region.entries.get(value), region.heads
    if node is not None and node.op_type == "Reshape":
        if region.axis[value] == 0:
            return value_of(node)
        rows, merged, depth = integers_of(node.inputs[1]) or (0, 0, 0)
        target = np.array([rows, merged // heads if merged > 0 else -1, heads, depth], np.int64)
        name = unused_name(taken, f"{node_name(node)}/apart")
        target_value = add_initializer(graph_of(node), name, target)
        return insert_before(node, taken, "Reshape", [value_of(node), target_value], stem=f"{node_name(node)}/split")
    tensor = constant(value if node is None else node.inputs[0])
    assert tensor is not None
    array = tensor.numpy()
    array = array.reshape(-1, heads, *array.shape[1:])
    if {use.node.op_type for use in value.uses()} == {"MatMul"} and (array == array[:1]).all():
        array = array[:1]  # the same for all items of the batch
    return add_initializer(region.graph, unused_name(taken, f"{value.name}/apart"), array, tensor.dtype)


def _widen(node: ir.Node, region: MergedHeads, taken: set[str]) -> None:
    """Let an operator of a region compute with heads apart."""
    stem, result = node_name(node), node.outputs[0]
    result.shape = None
    if node.op_type == "Transpose":
        merged = perm(node)[region.axis[result]]
        order = [place + (place > merged) for place in perm(node)]
        order.insert(region.axis[result] + 1, merged + 1)
        node.attributes["perm"] = ir.AttrInt64s("perm", order)
        if (tensor := constant(node.inputs[0])) is not None:
            array = tensor.numpy().transpose(order)
            replace(result, add_initializer(region.graph, unused_name(taken, f"{stem}/turned"), array, tensor.dtype))
    elif "axis" in node.attributes:
        node.attributes["axis"] = ir.AttrInt64("axis", -1)
    if node.op_type == "GatherElements" and len(region.operands(node)) == 1:
        node.replace_input_with(1, _indices(node, region, taken))
    for place, value in enumerate(node.inputs if node.op_type in SCALED else ()):
        number = None if constant(value) is not None else _number(value, region.lengths)
        if number is not None and region.lengths.dtype(value) is ir.DataType.FLOAT:
            name = unused_name(taken, f"{stem}/factor")
            node.replace_input_with(place, add_initializer(region.graph, name, np.array(number, np.float32)))


def _indices(node: ir.Node, region: MergedHeads, taken: set[str]) -> ir.Value:
    """Return the indices of a GatherElements, expanded to the batch and to heads of what it gathers from."""
    stem, lengths = node_name(node), region.lengths
    source, given = region.expanded(node)

    def constant_of(number: int) -> ir.Value:
        return add_initializer(region.graph, unused_name(taken, f"{stem}/number"), np.array([number], np.int64))

    def part(length: Length) -> ir.Value:
        if not isinstance(length, Axis):
            return constant_of(length or 1)
        tensor, index = lengths.origin(length.tensor, length.index)
        shape = insert_before(node, taken, "Shape", [tensor], stem=f"{stem}/shape")
        return insert_before(node, taken, "Gather", [shape, constant_of(index)], {"axis": 0}, stem=f"{stem}/length")

    tensor = value_of(node)
    while (product := made_by(tensor, "MatMul")) is not None:  # the batch of a factor is that of the product
        tensor = value_of(product)
    batch = next(iter(lengths.of(tensor) or (None,)))
    wanted: list[Length] = [batch if isinstance(batch, int) else Axis(tensor, 0), region.heads]
    wanted += [1 if lengths.is_axis(given[axis], source, axis) else given[axis] for axis in (1, 2)]
    target = insert_before(node, taken, "Concat", [*map(part, wanted)], {"axis": 0}, stem=f"{stem}/target")
    return insert_before(node, taken, "Expand", [source, target], stem=f"{stem}/apart")


def _number(value: ir.Value | None, lengths: Lengths) -> float | None:
    """Return the number that a tensor is; None if it is not known."""
    known, node = one_number(value, MERGED), standard(value)
    if known is not None or node is None:
        return known
    if node.op_type in SAME:
        return _number(node.inputs[0], lengths)
    if node.op_type == "Sqrt":
        inner = _number(node.inputs[0], lengths)
        return None if inner is None or inner < 0 else math.sqrt(inner)
    if node.op_type == "Mul":
        factors = [_number(each, lengths) for each in node.inputs]
        return None if None in factors else math.prod(each for each in factors if each is not None)
    given = lengths.of_target(value) or []
    length = lengths.number(given[0]) if len(given) == 1 else None
    return None if length is None else float(length)
