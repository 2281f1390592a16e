"""Find attention, softmax(scale * q k' + mask) v: several operators around a Softmax, or one operator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from ..graphs.queries import (
    MS,
    constant,
    integers_of,
    is_standard,
    key,
    one_number,
    producer_of,
    scaled,
    sole_reader,
    unread,
)

GROUP_QUERY = f"{MS}.GroupQueryAttention"
HEADS = (0, 2, 1, 3)
"""The permutation between (batch, rows, heads, columns) and (batch, heads, rows, columns)."""
HEADS_FIRST, ROWS_FIRST, BATCH_SECOND = 0, 1, 2
"""Orders of axes: (batch, heads, rows, columns), (batch, rows, heads, columns), (rows, batch, heads, columns)."""
LAST_AXIS = 13  # the opset from which the default axis of a Softmax is the last one
TURNS: dict[tuple[int, ...], int] = {HEADS: ROWS_FIRST, (2, 0, 1, 3): BATCH_SECOND}
"""The order of axes into which each permutation turns (batch, heads, rows, columns)."""
HEADS_OF: dict[tuple[int, ...], int] = {HEADS: ROWS_FIRST, (1, 2, 0, 3): BATCH_SECOND}
"""The order of axes from which each permutation turns into (batch, heads, rows, columns)."""
KEYS = {(0, 2, 3, 1): ROWS_FIRST, (1, 2, 3, 0): BATCH_SECOND, (0, 1, 3, 2): HEADS_FIRST, (0, 2, 1): HEADS_FIRST}
"""The permutations that turn rows of keys into columns, and the order of axes before."""
MORE_RESULTS, FACTORS = "results beside the first", "factors that are constant or equal"
HALF, UNREAD = "keys or values alone of earlier runs", "caches that nothing reads"
"""What an operator may have that attention as a unit has not."""
STANDARD = frozenset("is_causal kv_num_heads q_num_heads qk_matmul_output_mode scale softcap softmax_precision".split())
MULTI_HEAD = frozenset({"mask_filter_value", "num_heads", "scale", "unidirectional"})
"""The attributes that are known; those of newer versions, as for windows of keys, are not."""
PADDING = -10000.0  # what a MultiHeadAttention adds to the scores of padding, if it does not say it
REPEATS = frozenset({"Expand", "Tile"})
"""Operators that repeat heads of keys and values for several queries."""
CACHES = 3  # how many results an operator with a cache has: also the keys and values of all rows
PRECISE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""Types in which a softmax is at least as precise as in float32."""


@dataclass(frozen=True, eq=False)
class FoundAttention:
    """The operators of attention.

    Attributes:
        q: Queries, (batch, heads, queries, depth), or (batch, queries, depth) without heads.
        k: Keys, one in each row.
        v: Values, one in each row.
        mask: What is added to the scores; None without it. In one operator it may be booleans: which keys are seen; or
            with `hidden` int32 (batch, keys).
        scale: What the scores are multiplied by before that; None for 1 / sqrt(depth).
        orders: The order of the axes of q, k, v and of the result.
        nodes: All operators, in an order in which they can run; the last one computes the result.
        heads: How many heads of q, and of k and v, stand side by side in the last axis of (batch, rows, columns); those
            of the result do too. (0, 0) for other tensors.
        causal: Whether the first query sees the first key alone, and each query one key more than the query before it.
        zero: Whether a query that sees no key gives 0, as in one operator; a Softmax gives NaN.
        hidden: What is added to the score of a key where the mask is not above 0; None for other masks.
        bias: A constant that is added to the columns of q, k and v, one behind the other; None without it.
        past: Keys and values of earlier runs, (batch, heads, rows, columns), which come before k and v. The operator
            returns them with k and v behind them. With `causal` the first query sees them and the first key. Empty
            without them.
        cap: What scores are capped at: they become cap * tanh(score / cap) before the mask; 0 if they stay.
        windows: A constant that is added to the scores beside `mask`, (1, windows, 1, queries, keys): item b of the
            batch gets that of window b % windows. None without it.
    """

    q: ir.Value
    k: ir.Value
    v: ir.Value
    mask: ir.Value | None
    scale: float | None
    orders: tuple[int, int, int, int]
    nodes: tuple[ir.Node, ...]
    heads: tuple[int, int] = (0, 0)
    causal: bool = False
    zero: bool = False
    hidden: float | None = None
    bias: ir.Value | None = None
    past: tuple[ir.Value, ...] = ()
    cap: float = 0
    windows: ir.Value | None = None

    @property
    def inputs(self) -> tuple[ir.Value, ...]:
        """The tensors that it reads; the masks are the last ones."""
        return (self.q, self.k, self.v, *(value for value in (self.mask, self.windows) if value is not None))


@dataclass(eq=False)
class _Operand:
    """A factor of a product, followed back to the tensor that attention reads.

    Attributes:
        value: The tensor.
        scale: What it is multiplied by on the way.
        order: The order of its axes.
        turned: The permutation that turned rows of keys into columns.
        nodes: The operators on the way, in order.
    """

    value: ir.Value
    scale: float = 1.0
    order: int = HEADS_FIRST
    turned: tuple[int, ...] = ()
    nodes: list[ir.Node] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Scores:
    """The scores that a softmax reads: the product of matrices, and what comes behind it."""

    product: ir.Node
    mask: ir.Value | None
    scale: float
    nodes: list[ir.Node]
    windows: ir.Value | None = None


@dataclass(frozen=True, eq=False)
class _Windows:
    """A mask of windows that is added to scores, and the scores before.

    Attributes:
        scores: The scores, (batch * windows, *rest).
        mask: The mask, (1, windows, 1, queries, keys).
        rest: Heads, queries and keys.
        nodes: The Reshape, the Add, and the Reshape back.
    """

    scores: ir.Value
    mask: ir.Value
    rest: list[int]
    nodes: list[ir.Node]


def find_attention(node: ir.Node) -> FoundAttention | None:
    """Return the attention around a Softmax, or that of an operator in `OPERATORS`; None if there is none.

    Its inputs are three computed tensors. No other operator reads what stands between them and the result.
    """
    if key(node) in OPERATORS:
        found = OPERATORS[key(node)](node)
        return None if isinstance(found, str) else found
    return _around(node) if is_standard(node, "Softmax") else None


def attention_among(nodes: Iterable[ir.Node]) -> FoundAttention | None:
    """Return the first attention among some nodes; None if there is none."""
    return next((found for found in map(find_attention, nodes) if found is not None), None)


def missing_form(node: ir.Node) -> str:
    """Return what an operator in `OPERATORS` has that attention as a unit has not; empty if it is attention."""
    found = OPERATORS[key(node)](node)
    return found if isinstance(found, str) else ""


# ------------------------------------------------------------------------------------------------ several operators


def _around(softmax: ir.Node) -> FoundAttention | None:
    """Return the attention around a Softmax; None if there is none."""
    shares = _shares(softmax)
    product = sole_reader(shares[-1].outputs[0])
    scores = _scores(softmax.inputs[0], softmax)
    if scores is None or not is_standard(product, "MatMul") or product.inputs[0] is not shares[-1].outputs[0]:
        return None
    q, k, v = _operand(scores.product, 0), _operand(scores.product, 1, of_keys=True), _operand(product, 1)
    tensors = {q.value, k.value, v.value}
    computed = len(tensors) == 3 and all(constant(value) is None for value in tensors)
    along_rows = softmax.attributes.get_int("axis", _default_axis(softmax)) in (-1, len(k.turned) - 1)
    if not computed or not along_rows or not k.turned or v.scale != 1:
        return None
    order, behind = _turned(product)
    return FoundAttention(
        q.value,
        k.value,
        v.value,
        scores.mask,
        q.scale * k.scale * scores.scale,
        (q.order, k.order, v.order, order),
        (*q.nodes, *k.nodes, scores.product, *scores.nodes, *shares, *v.nodes, product, *behind),
        zero=len(shares) > 1,
        windows=scores.windows,
    )


def _shares(softmax: ir.Node) -> list[ir.Node]:
    """Return a Softmax and what writes 0 where it is NaN: PyTorch writes Where(IsNaN(s), 0, s) for masked rows."""
    value = softmax.outputs[0]
    readers = [use.node for use in value.uses()]
    for check in readers:
        where = sole_reader(check.outputs[0]) if is_standard(check, "IsNaN") else None
        if is_standard(where, "Where") and {*readers} == {check, where} and not value.is_graph_output():
            condition, zero, other = where.inputs
            if (condition, other) == (check.outputs[0], value) and one_number(zero, 1) == 0:
                return [softmax, check, where]
    return [softmax]


def _turned(last: ir.Node) -> tuple[int, list[ir.Node]]:
    """Return the order of axes into which a Transpose behind a node turns its result, and the Transpose, if any."""
    turn = sole_reader(last.outputs[0])
    order = HEADS_FIRST if turn is None else TURNS.get(_permutation(turn), HEADS_FIRST)
    return order, [turn] if turn is not None and order != HEADS_FIRST else []


def _scores(value: ir.Value | None, reader: ir.Node) -> _Scores | None:
    """Return the scores that a softmax reads; None if they are no product of matrices."""
    mask, scale = None, 1.0
    nodes: list[ir.Node] = []
    windows = _windows(value, reader)
    if windows is not None:
        value, reader = windows.scores, windows.nodes[0]
    while (node := _inner(value, reader)) is not None and not is_standard(node, "MatMul"):
        if (found := _scaled(node)) is not None:
            value, factor = found
            scale *= factor
        elif not nodes and (masked := _masked(node)) is not None:
            value, mask = masked
        else:
            return None
        nodes.insert(0, node)
        reader = node
    if node is None or windows is None:
        return None if node is None else _Scores(node, mask, scale, nodes)
    if _lengths(mask)[-len(windows.rest) :] != windows.rest:
        return None
    return _Scores(node, mask, scale, [*nodes, *windows.nodes], windows.mask)


def _windows(value: ir.Value | None, reader: ir.Node) -> _Windows | None:
    """Return the mask of windows in scores that a softmax reads; None without it.

    Window transformers move the windows out of the batch for that: Reshape(Add(Reshape(scores), mask)). The caller
    checks that the scores have the axes `rest` behind the first one.
    """
    back = _inner(value, reader)
    add = _inner(back.inputs[0], back) if is_standard(back, "Reshape") else None
    if back is None or not is_standard(add, "Add"):
        return None
    for one, mask in (add.inputs, [*reversed(add.inputs)]):
        apart = _inner(one, add)
        if mask is None or not is_standard(apart, "Reshape") or apart.inputs[0] is None:
            continue
        target = integers_of(apart.inputs[1]) or []
        windows, rest = target[1:2], target[2:]
        fits = _lengths(mask) == [1, *windows, 1, *rest[1:]] and (integers_of(back.inputs[1]) or [])[1:] == rest
        if fits and len(rest) == len(HEADS) - 1 and min(rest) > 1:  # an axis of length 1 might be repeated
            return _Windows(apart.inputs[0], mask, rest, [apart, add, back])
    return None


def _lengths(value: ir.Value | None) -> list[int]:
    """Return the shape of a constant; empty for other tensors."""
    tensor = constant(value)
    return [] if tensor is None else [*map(int, tensor.shape.numpy())]


def _masked(add: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return the scores and the mask that an Add joins; None unless exactly one of its operands is a product."""
    if not is_standard(add, "Add"):
        return None
    one, other = add.inputs
    products = [_scores(value, add) is not None for value in (one, other)] if one is not other else []
    if one is None or other is None or sum(products) != 1:
        return None
    return (one, other) if products[0] else (other, one)


def _operand(product: ir.Node, index: int, *, of_keys: bool = False) -> _Operand:
    """Return a factor of a product, followed back; `of_keys`: its columns become rows."""
    value = product.inputs[index]
    assert value is not None
    operand, reader = _Operand(value), product
    while (node := _inner(operand.value, reader)) is not None:
        found, order = _scaled(node), _permutation(node)
        if found is not None:
            operand.value, factor = found
            operand.scale *= factor
        elif of_keys and not operand.turned and order in KEYS:
            operand.value, operand.order, operand.turned = _source(node), KEYS[order], order
        elif order in HEADS_OF and operand.order == HEADS_FIRST and (operand.turned or not of_keys):
            operand.value, operand.order = _source(node), HEADS_OF[order]
        else:
            break
        operand.nodes.insert(0, node)
        reader = node
    return operand


def _default_axis(softmax: ir.Node) -> int:
    """Return the axis of a Softmax that does not say it."""
    graph = softmax.graph
    return -1 if graph is None or graph.opset_imports.get("", LAST_AXIS) >= LAST_AXIS else 1


def _inner(value: ir.Value | None, reader: ir.Node) -> ir.Node | None:
    """Return the node that computes a tensor; None if there is none, or if the tensor has another reader."""
    return value.producer() if value is not None and sole_reader(value) is reader else None


def _source(node: ir.Node) -> ir.Value:
    """Return the first input of a node that has one."""
    (value,) = node.inputs
    assert value is not None
    return value


def _permutation(node: ir.Node) -> tuple[int, ...]:
    """Return the permutation of a Transpose; empty for other nodes, and if it is not written."""
    return tuple(node.attributes.get_ints("perm", ())) if is_standard(node, "Transpose") else ()


def _scaled(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return the tensor that a Mul or Div multiplies by a number other than 0, and the number; else None."""
    found = scaled(node, axes=1)
    return found if found is not None and found[1] else None


def is_scaled_product(value: ir.Value | None) -> bool:
    """Whether a tensor is a product of matrices, perhaps scaled."""
    while (node := producer_of(value)) is not None:
        if is_standard(node, "MatMul"):
            return True
        if (found := _scaled(node)) is None:
            return False
        value, _ = found
    return False


# ----------------------------------------------------------------------------------------------------- one operator


def _standard(node: ir.Node) -> FoundAttention | str:
    """Return what an Attention of opset 23 or newer computes, or what it has that attention as a unit has not."""
    q, k, v, mask, past_key, past_value, *others = padded(node, 6)
    heads = (node.attributes.get_int("q_num_heads", 0), node.attributes.get_int("kv_num_heads", 0))
    past = _past(past_key, past_value)
    scale, cap = node.attributes.get_float("scale", None), node.attributes.get_float("softcap", 0)
    attribute = unknown(node, STANDARD)
    extras = (
        (HALF, past is None),
        (UNREAD, bool(past) and len(node.outputs) < CACHES),
        ("lengths of items", any(value is not None for value in others)),
        (MORE_RESULTS, not unread(node, CACHES if past else 1)),
        (attribute, bool(attribute)),
        ("softcap below 0", cap < 0),
        ("softmax in half precision", node.attributes.get_int("softmax_precision", PRECISE[0]) not in PRECISE),
        ("scale that is not above 0", scale is not None and scale <= 0),
        (FACTORS, not are_factors(q, k, v)),
    )
    extra = next((what for what, found in extras if found), "")
    if q is None or k is None or v is None or extra:
        return extra
    order, behind = (HEADS_FIRST, []) if any(heads) or past else _turned(node)
    orders, causal = (HEADS_FIRST, HEADS_FIRST, HEADS_FIRST, order), bool(node.attributes.get_int("is_causal", 0))
    nodes = (node, *behind)
    return FoundAttention(q, k, v, mask, scale, orders, nodes, heads, causal, zero=True, past=past or (), cap=cap)


def _multi_head(node: ir.Node) -> FoundAttention | str:
    """Return what a MultiHeadAttention computes, or what it has that attention as a unit has not."""
    q, k, v, bias, padding, added, past_key, past_value, *others = padded(node, 8)
    past, causal = _past(past_key, past_value), bool(node.attributes.get_int("unidirectional", 0))
    heads = node.attributes.get_int("num_heads", 0)
    scale = node.attributes.get_float("scale", 0) or None
    attribute = unknown(node, MULTI_HEAD)
    extras = (
        (HALF, past is None),
        (UNREAD, bool(past) and len(node.outputs) < CACHES),
        ("caches in one memory", any(value is not None for value in others)),
        (MORE_RESULTS, not unread(node, CACHES if past else 1)),
        (attribute, bool(attribute)),
        # with more keys than queries it is unclear which of them a query sees
        ("order of keys", causal and not past),
        ("second mask", padding is not None and (added is not None or bool(past))),
        ("bias that is computed", bias is not None and constant(bias) is None),
        (FACTORS, not are_factors(q, k, v)),
    )
    extra = next((what for what, found in extras if found), "")
    if q is None or k is None or v is None or extra:
        return extra
    hidden = None if padding is None else node.attributes.get_float("mask_filter_value", PADDING)
    orders, mask = (HEADS_FIRST,) * 4, added if padding is None else padding
    return FoundAttention(
        q, k, v, mask, scale, orders, (node,), (heads, heads), causal, hidden=hidden, bias=bias, past=past or ()
    )


def _past(keys: ir.Value | None, values: ir.Value | None) -> tuple[ir.Value, ...] | None:
    """Return keys and values of earlier runs; nothing if there are none, and None if one of them is missing."""
    if keys is not None and values is not None:
        return (keys, values)
    return () if keys is values else None


def padded(node: ir.Node, count: int) -> list[ir.Value | None]:
    """Return the inputs of a node, at least so many; those that it does not have are None."""
    return [*node.inputs, *[None] * (count - len(node.inputs))]


def unknown(node: ir.Node, known: Collection[str]) -> str:
    """Return the name of an attribute of a node that is not known; empty if all are."""
    return min({*node.attributes}.difference(known), default="")


def are_factors(*values: ir.Value | None) -> bool:
    """Return whether tensors are computed, and no two are the same."""
    return len({*values}) == len(values) and all(value is not None and constant(value) is None for value in values)


OPERATORS: Mapping[str, Callable[[ir.Node], FoundAttention | str]] = {
    "Attention": _standard,
    f"{MS}.MultiHeadAttention": _multi_head,
}
"""Operators that are attention, by their key, and what returns it, or what it has that attention as a unit has not."""
