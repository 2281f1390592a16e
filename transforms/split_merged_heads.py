"""Give heads of attention an axis of their own, where they are merged with the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from .graph import (
    add_initializer,
    computing_nodes,
    discard,
    graph_of,
    integers_of,
    is_standard,
    made_by,
    names,
    node_name,
    remove,
    replace,
    sole_reader,
    unused_name,
)
from .patterns.attention import scaled
from .patterns.lengths import Lengths
from .registry import Change, LeftAlone, transform

MERGED, APART = 3, 4  # axes of tensors whose heads are merged with the batch, and of those with an axis for heads


@dataclass(frozen=True, eq=False)
class _Factor:
    """A factor of a product, followed back to the Reshape that merges heads with the batch.

    Attributes:
        heads: The number of heads.
        reshape: The Reshape.
        target: The target that keeps heads apart; None where the input of the Reshape has them apart.
        axis: The merged axis of its result.
        nodes: The operators between the Reshape and the product, in order.
    """

    heads: int
    reshape: ir.Node
    target: list[int] | None
    axis: int
    nodes: tuple[ir.Node, ...]


@dataclass(eq=False)
class _Chain:
    """The operators between two products.

    Attributes:
        kept: Operators that stay.
        dropped: Reshapes that leave.
        masks: The Adds whose masks have merged heads, each with the mask that has them apart.
    """

    kept: list[ir.Node] = field(default_factory=list)
    dropped: list[ir.Node] = field(default_factory=list)
    masks: list[tuple[ir.Node, ir.Value, ir.Value]] = field(default_factory=list)

    @property
    def softmaxes(self) -> list[ir.Node]:
        """The Softmax operators; attention has one."""
        return [node for node in self.kept if node.op_type == "Softmax"]


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
    Left alone: products whose heads are not found (``heads``), scores with other operators or readers (``scores``), and
        results that no Reshape or Transpose splits (``result``).
    """
    change, lengths, taken = Change(), Lengths(model), names(model)
    for product in computing_nodes(model, "MatMul"):
        if product.graph is None or len(lengths.of(product.outputs[0]) or ()) != MERGED:
            continue
        try:
            change.applied += _split(product, lengths, taken)
        except LeftAlone as reason:
            change.skip(str(reason))
    return change


def _split(product: ir.Node, lengths: Lengths, taken: set[str]) -> bool:
    """Split the heads of attention whose scores are this product; return whether there were any.

    Raises:
        LeftAlone: They stay merged.
    """
    q, k = (_factor(product, index, lengths) for index in (0, 1))
    if q is None or k is None:
        return False
    last, chain = _scores(product, q.heads, lengths)
    v = _factor(last, 1, lengths)
    if v is None or len({q.heads, k.heads, v.heads}) > 1:
        raise LeftAlone("heads")
    turned = _after(last, q.heads, lengths)
    for factor in (q, k, v):
        _apart(factor, taken)
    for softmax in chain.softmaxes:
        softmax.attributes["axis"] = ir.AttrInt64("axis", -1)
    for add, mask, apart in chain.masks:
        add.replace_input_with([*add.inputs].index(mask), apart)
    if turned.op_type == "Transpose":
        _widen(turned, axis=0)
    _forget((product, *chain.kept, *chain.dropped, last, turned))
    for reshape in [*chain.dropped, *([turned] if turned.op_type == "Reshape" else [])]:
        _drop(reshape)
    return True


def _drop(reshape: ir.Node) -> None:
    """Let the readers of a Reshape read its input."""
    (source, *targets), result = reshape.inputs, reshape.outputs[0]
    assert source is not None
    result.shape = None  # the input has another rank
    replace(result, source)
    remove(reshape)
    discard(*targets)


# -------------------------------------------------------------------------------------------------------- the factors


def _factor(product: ir.Node, index: int, lengths: Lengths) -> _Factor | None:
    """Return a factor of a product with merged heads in its first axis; None if they are not found."""
    nodes: list[ir.Node] = []
    reader, value = product, product.inputs[index]
    while value is not None and sole_reader(value) is reader and (node := value.producer()) is not None:
        if node.domain:
            return None
        if node.op_type == "Reshape":
            found = _merging(node, tuple(nodes), lengths)
            return found if found is not None and _leads(found) else None
        factor = scaled(node)
        if factor is None and (node.op_type != "Transpose" or len(_perm(node)) != MERGED):
            return None
        value, reader = factor[0] if factor is not None else node.inputs[0], node
        nodes.insert(0, node)
    return None


def _merging(reshape: ir.Node, nodes: tuple[ir.Node, ...], lengths: Lengths) -> _Factor | None:
    """Return a factor behind a Reshape that merges heads with the batch; None if the Reshape does something else."""
    source, result = lengths.of(reshape.inputs[0]), lengths.of(reshape.outputs[0])
    if source is None or result is None or len(result) != MERGED:
        return None
    if _merges(source, result):
        heads = source[1]
        assert isinstance(heads, int)
        return _Factor(heads, reshape, None, 0, nodes)
    target, width = _target(reshape), source[-1] if len(source) == MERGED else None
    if target is None or not isinstance(width, int) or target[-1] < 1 or width % target[-1]:
        return None
    rows, merged, depth = target
    heads = width // depth
    keeps_rows = rows == 0 or (rows > 0 and rows == source[0])
    if heads < 2 or (merged % heads if merged > 0 else merged != -1 or not keeps_rows):
        return None
    return _Factor(heads, reshape, [rows, merged // heads if merged > 0 else -1, heads, depth], 1, nodes)


def _merges(source: Sequence[int | str | None], result: Sequence[int | str | None]) -> bool:
    """Whether lengths become others by merging the first two of four axes, the second of which is a number."""
    same = len(source) == APART and len(result) == MERGED and [*source[2:]] == [*result[1:]]
    return same and None not in source[2:] and isinstance(source[1], int) and source[1] > 1


def _target(reshape: ir.Node) -> list[int] | None:
    """Return the target of a Reshape to merged heads; None if it is not constant, or 0 is a length."""
    target = integers_of(reshape.inputs[1])
    empty = target is not None and 0 in target and reshape.attributes.get_int("allowzero", 0) == 1
    return None if target is None or len(target) != MERGED or empty else target


def _leads(factor: _Factor) -> bool:
    """Whether the merged axis is the first one that the product reads."""
    place = factor.axis
    for node in factor.nodes:
        place = _perm(node).index(place) if node.op_type == "Transpose" else place
    return place == 0


def _apart(factor: _Factor, taken: set[str]) -> None:
    """Keep the heads of a factor apart from the batch."""
    reshape, place = factor.reshape, factor.axis
    if factor.target is None:
        _drop(reshape)
    else:
        name = unused_name(taken, f"{node_name(reshape)}/apart")
        before, target = reshape.inputs[1], np.array(factor.target, np.int64)
        reshape.replace_input_with(1, add_initializer(graph_of(reshape), name, target))
        discard(before)
        _forget([reshape])
    for node in factor.nodes:
        if node.op_type == "Transpose":
            after = _perm(node).index(place)
            _widen(node, axis=place)
            place = after
    _forget(factor.nodes)


def _perm(node: ir.Node) -> tuple[int, ...]:
    """Return the permutation of a Transpose; empty if it is not written."""
    return tuple(node.attributes.get_ints("perm", ()))


def _widen(node: ir.Node, *, axis: int) -> None:
    """Let a Transpose turn two axes in place of a merged one of its input."""
    order = [place + (place > axis) for place in _perm(node)]
    at = order.index(axis)
    node.attributes["perm"] = ir.AttrInt64s("perm", [*order[: at + 1], axis + 1, *order[at + 1 :]])


def _forget(nodes: Iterable[ir.Node]) -> None:
    """Remove the shapes of results, which have one more axis now."""
    for value in (each for node in nodes for each in node.outputs):
        value.shape = None


# --------------------------------------------------------------------------------------------------------- the scores


def _scores(product: ir.Node, heads: int, lengths: Lengths) -> tuple[ir.Node, _Chain]:
    """Return the product that reads the shares of scores, and what stands between the two products.

    Raises:
        LeftAlone: Something else stands there.
    """
    chain, before, apart = _Chain(), product, False
    while (node := sole_reader(before.outputs[0])) is not None and not node.domain:
        if node.op_type == "MatMul" and not apart and len(chain.softmaxes) == 1 and node.inputs[0] is before.outputs[0]:
            return node, chain
        if node.op_type == "Reshape":
            shapes = [lengths.of(value) or () for value in (node.outputs[0], node.inputs[0])]
            one, other = reversed(shapes) if apart else shapes
            if not _merges(one, other) or one[1] != heads:
                break
            apart = not apart
            chain.dropped.append(node)
        elif not _keeps(node, before, chain, apart=apart, heads=heads, lengths=lengths):
            break
        before = node
    raise LeftAlone("scores")


def _keeps(node: ir.Node, before: ir.Node, chain: _Chain, *, apart: bool, heads: int, lengths: Lengths) -> bool:
    """Whether an operator between two products does the same to heads that are apart; add it to the chain."""
    if node.op_type == "Softmax":  # without the attribute, its default depends on the operator set
        fits = node.attributes.get_int("axis", 0) in (-1, APART - 1 if apart else MERGED - 1)
    elif node.op_type == "Add":
        fits = apart or _adds(node, before, chain, heads=heads, lengths=lengths)
    else:
        fits = scaled(node) is not None
    chain.kept.append(node)
    return fits


def _adds(add: ir.Node, before: ir.Node, chain: _Chain, *, heads: int, lengths: Lengths) -> bool:
    """Whether a mask that is added to scores with merged heads can be added where they are apart."""
    mask = next((value for value in add.inputs if value is not before.outputs[0]), None)
    shape = lengths.of(mask)
    if mask is None or shape is None:
        return False
    if len(shape) < MERGED or (len(shape) == MERGED and shape[0] == 1):
        return True
    merging = made_by(mask, "Reshape")
    source = None if merging is None or merging.domain else merging.inputs[0]
    apart = lengths.of(source) or ()
    if source is None or not _merges(apart, shape) or apart[1] != heads:
        return False
    chain.masks.append((add, mask, source))
    return True


def _after(last: ir.Node, heads: int, lengths: Lengths) -> ir.Node:
    """Return the operator that reads the result: a Reshape that splits the heads, or a Transpose before a Reshape.

    Raises:
        LeftAlone: Another operator reads it.
    """
    node = sole_reader(last.outputs[0])
    if is_standard(node, "Reshape"):
        split = lengths.of(node.outputs[0]) or ()
        merged = lengths.of(last.outputs[0]) or ()
        if _merges(split, merged) and split[1] == heads and not node.outputs[0].is_graph_output():
            return node
    if is_standard(node, "Transpose") and _perm(node) == (1, 0, 2):
        merging = sole_reader(node.outputs[0])
        target = integers_of(merging.inputs[1]) if merging is not None and merging.op_type == "Reshape" else None
        if target is not None and 0 not in target[1:]:
            return node
    raise LeftAlone("result")
