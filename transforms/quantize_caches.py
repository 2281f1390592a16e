"""Keep the keys and values of earlier runs in bytes, with a scale for each head and token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from .graphs.opsets import REDUCED_AXES_ARE_INPUT
from .graphs.queries import MS, graph_of, key, one_number, plain_shape, producer_of, sole_reader
from .graphs.rewriter import add_initializer, names, unused_name
from .patterns.attention import GROUP_QUERY
from .registry import Change, LeftAlone, transform

ZERO_POINT, MOST = 128, 127
AXES, ROWS = 4, 2  # (batch, heads, rows, columns)
CLIP_WITH_INPUTS = 11  # the opset from which the bounds of a Clip are inputs
PASTS: Mapping[str, tuple[int, int]] = {"Attention": (4, 5), f"{MS}.MultiHeadAttention": (6, 7), GROUP_QUERY: (3, 4)}
"""By operator: the places of the keys and the values of earlier runs. The second and third results have all rows."""


@dataclass(frozen=True, eq=False)
class FoundCache:
    """A cache of a model: an input that has the rows of earlier runs, and an output that has the new ones too.

    Attributes:
        past: The input.
        present: The output.
        fresh: The new rows, if the operator does no more than join them to the past; else None.
    """

    past: ir.Value
    present: ir.Value
    fresh: ir.Value | None = None


@dataclass(eq=False)
class _Rewrite:
    """A model that gets caches in bytes, its names, and the constants that are there already."""

    model: ir.Model
    taken: set[str]
    known: dict[str, ir.Value] = field(default_factory=dict)

    def constant(self, name: str, value: float | list[int]) -> ir.Value:
        """Return a constant: a number as float32, or axes as int64."""
        if name not in self.known:
            array = np.asarray(value, np.float32 if isinstance(value, (int, float)) else np.int64)
            self.known[name] = add_initializer(self.model.graph, unused_name(self.taken, f"caches/{name}"), array)
        return self.known[name]

    def chain(self, stem: str, steps: Mapping[str, tuple[str, list[ir.Value | str], dict[str, int]]]) -> list[ir.Node]:
        """Return new nodes; each step is an operator, what it reads, values or earlier steps, and its attributes."""
        made: dict[str, ir.Node] = {}
        for step, (op, inputs, attributes) in steps.items():
            values = [made[each].outputs[0] if isinstance(each, str) else each for each in inputs]
            name = unused_name(self.taken, f"{stem}/{step}")
            made[step] = ir.node(op, values, attributes, name=name)
            made[step].outputs[0].name = name
        return [*made.values()]

    def rounded(self, rows: ir.Value, stem: str) -> tuple[list[ir.Node], ir.Value, ir.Value]:
        """Return the nodes that round rows, the bytes, and the scale of each row."""
        number, modern = self.constant, self.model.opset_imports.get("", 0) >= REDUCED_AXES_ARE_INPUT
        axes = [self.constant("columns", [AXES - 1])] if modern else []
        uint8 = {"to": int(ir.DataType.UINT8)}
        nodes = self.chain(
            stem,
            {
                "sizes": ("Abs", [rows], {}),
                "greatest": ("ReduceMax", ["sizes", *axes], {"keepdims": 1}),
                "scale": ("Div", ["greatest", number("most", MOST)], {}),
                "divisor": ("Clip", ["scale", number("tiny", float(np.finfo(np.float32).tiny))], {}),
                "steps": ("Div", [rows, "divisor"], {}),
                "integers": ("Round", ["steps"], {}),
                "clipped": ("Clip", ["integers", number("least", -MOST), number("most", MOST)], {}),
                "lifted": ("Add", ["clipped", number("zero_point", ZERO_POINT)], {}),
                "bytes": ("Cast", ["lifted"], uint8),
            },
        )
        if not modern:
            nodes[1].attributes["axes"] = ir.AttrInt64s("axes", [AXES - 1])
        return nodes, nodes[-1].outputs[0], nodes[2].outputs[0]

    def floats(self, cache: ir.Value, scale: ir.Value) -> list[ir.Node]:
        """Return the nodes that turn a cache into floats."""
        return self.chain(
            str(cache.name),
            {
                "numbers": ("Cast", [cache], {"to": int(ir.DataType.FLOAT)}),
                "centred": ("Sub", ["numbers", self.constant("zero_point", ZERO_POINT)], {}),
                "floats": ("Mul", ["centred", scale], {}),
            },
        )


@transform("quantize_caches", changes_io=True, changes_values=True)
def quantize_caches(model: ir.Model) -> Change:
    """Turn the caches of a decoder, inputs and outputs of float32, into bytes with a scale for each head and token.

    Before:  y, present_key, ... = com.microsoft.GroupQueryAttention(q, k, v, past_key, ...)
    After:   y, all_keys, ... = com.microsoft.GroupQueryAttention(q, k, v, (past_key - 128) * past_key_scale, ...)
             present_key_scale = ReduceMax(|all_keys|) / 127
             present_key = Clip(Round(all_keys / present_key_scale), -127, 127) + 128, as uint8
        past_key and present_key keep their names; the scales (batch, heads, rows, 1) are an input and an output more
        for each cache. Rows that were rounded once stay as they are. A cache takes a quarter of the memory. The first
        run takes caches without rows, or zeros. `requant quantize` lets the native library compute attention in these
        bytes; the operators above are slower than a cache of floats.
    Before:  present_key = Concat(past_key, new_keys), which attention reads
    After:   the same, where the new keys alone are rounded
    Left alone: caches that are no input (``not-an-input``) or no output of the model (``not-an-output``), that are not
        float32 with four axes (``other-type``), and models before opset 11 (``old-opset``).
    """
    change, rewrite = Change(), _Rewrite(model, names(model))
    for past, present, fresh in [*_candidates(model)]:
        try:
            cache = _checked(model, past, present, fresh)
        except LeftAlone as reason:
            change.skip(str(reason))
            continue
        _round(rewrite, cache)
        change.applied += 1
    return change


def _candidates(model: ir.Model) -> Iterator[tuple[ir.Value | None, ir.Value, ir.Value | None]]:
    """Yield what may be a cache: the rows of earlier runs, all rows, and the new ones if they are only joined."""
    inputs = {*model.graph.inputs}
    for node in model.graph:
        for past, present in zip(PASTS.get(key(node), ()), node.outputs[1:], strict=False):
            if past < len(node.inputs) and node.inputs[past] is not None:
                yield node.inputs[past], present, None
        joins = key(node) == "Concat" and len(node.inputs) == 2 and node.inputs[0] in inputs
        if joins and node.outputs[0].is_graph_output() and node.attributes.get_int("axis", 0) in (ROWS, ROWS - AXES):
            yield node.inputs[0], node.outputs[0], node.inputs[1]


def _checked(model: ir.Model, past: ir.Value | None, present: ir.Value, fresh: ir.Value | None) -> FoundCache:
    """Return a cache.

    Raises:
        LeftAlone: It cannot be in bytes.
    """
    if past is None or past not in model.graph.inputs or past.is_graph_output():
        raise LeftAlone("not-an-input")
    if not present.is_graph_output():
        raise LeftAlone("not-an-output")
    if past.dtype is not ir.DataType.FLOAT or len(plain_shape(past) or ()) != AXES:
        raise LeftAlone("other-type")
    if model.opset_imports.get("", 0) < CLIP_WITH_INPUTS:
        raise LeftAlone("old-opset")
    return FoundCache(past, present, fresh)


def _round(rewrite: _Rewrite, cache: FoundCache) -> None:
    """Let a cache be bytes."""
    graph, present = rewrite.model.graph, cache.present
    past_scale = _scale_of(rewrite, cache.past)
    graph.inputs.insert(graph.inputs.index(cache.past) + 1, past_scale)
    _read(rewrite, cache.past, past_scale)
    producer, name, shape = present.producer(), str(present.name), present.shape
    assert producer is not None
    present.name = unused_name(rewrite.taken, f"{name}/floats")
    nodes, values, scale = rewrite.rounded(cache.fresh or present, name)
    if cache.fresh is not None:
        for past, new in ((cache.past, values), (past_scale, scale)):
            joined = unused_name(rewrite.taken, f"{past.name}/joined")
            nodes.append(ir.node("Concat", [past, new], {"axis": ROWS}, name=joined))
        values, scale = (node.outputs[0] for node in nodes[-2:])
    graph.insert_after(producer, nodes)
    values.name, values.shape, values.type = name, shape, ir.TensorType(ir.DataType.UINT8)
    scale.name = unused_name(rewrite.taken, f"{name}_scale")
    scale.shape, scale.type = _one_column(shape), ir.TensorType(ir.DataType.FLOAT)
    place = graph.outputs.index(present)
    graph.outputs[place : place + 1] = [values, scale]


def _scale_of(rewrite: _Rewrite, past: ir.Value) -> ir.Value:
    """Return the input for the scales of a cache."""
    name = unused_name(rewrite.taken, f"{past.name}_scale")
    return ir.Value(name=name, shape=_one_column(past.shape), type=ir.TensorType(ir.DataType.FLOAT))


def _one_column(shape: ir.Shape | None) -> ir.Shape | None:
    """Return the shape of the scales of a cache."""
    return None if shape is None else ir.Shape([*shape.dims[:-1], 1])


def _read(rewrite: _Rewrite, past: ir.Value, scale: ir.Value) -> None:
    """Let all readers of a cache read its floats; only its shape is read from the bytes."""
    readers = [use for use in past.uses() if use.node.op_type != "Shape"]
    nodes = rewrite.floats(past, scale)
    first = rewrite.model.graph[0]
    graph_of(first).insert_before(first, nodes)
    for use in readers:
        use.node.replace_input_with(use.idx, nodes[-1].outputs[0])
    past.type = ir.TensorType(ir.DataType.UINT8)


@dataclass(frozen=True, eq=False)
class CacheBytes:
    """What this transform writes around a cache.

    Attributes:
        values: The bytes (batch, heads, rows, columns).
        scale: The scale of each row (batch, heads, rows, 1).
        nodes: The nodes between them and the floats, in order.
    """

    values: ir.Value
    scale: ir.Value
    nodes: tuple[ir.Node, ...]


def cache_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes of a graph that turn caches in bytes into floats, and back."""
    casts = (use.node for value in graph.inputs for use in value.uses() if use.node.op_type == "Cast")
    floats = (find_floats(last.outputs[0]) for cast in casts for last in _behind(cast, ("Cast", "Sub", "Mul"))[2:])
    rows = (node.inputs[0] for node in graph if node.op_type == "Abs")
    rounded = (find_bytes(value) for value in rows if value is not None)
    return [node for found in (*floats, *rounded) if found is not None for node in found.nodes]


def find_floats(value: ir.Value | None) -> CacheBytes | None:
    """Return the cache whose floats a tensor has; None for other tensors."""
    last = producer_of(value)
    nodes = _back(last, ("Mul", "Sub", "Cast"))
    if not nodes or _number(nodes[1]) != ZERO_POINT:
        return None
    values, scale = nodes[0].inputs[0], nodes[2].inputs[1]
    known = values is not None and scale is not None and values.dtype is ir.DataType.UINT8
    return CacheBytes(values, scale, nodes) if values is not None and scale is not None and known else None


def find_bytes(value: ir.Value) -> CacheBytes | None:
    """Return the bytes and the scales into which a tensor of floats is rounded; None if it is read otherwise."""
    readers = {use.node.op_type: use.node for use in value.uses()}
    if {*readers} != {"Abs", "Div"} or len(value.uses()) != len(readers) or value.is_graph_output():
        return None
    nodes = _behind(readers["Abs"], ("Abs", "ReduceMax", "Div", "Clip", "Div", "Round", "Clip", "Add", "Cast"))
    numbers = {2: MOST, 7: ZERO_POINT}
    if not nodes or any(_number(nodes[place]) != number for place, number in numbers.items()):
        return None
    steps, cast = nodes[4], nodes[-1]
    uint8 = cast.attributes.get_int("to", 0) == ir.DataType.UINT8
    return CacheBytes(cast.outputs[0], nodes[2].outputs[0], nodes) if steps.inputs[0] is value and uint8 else None


def _number(node: ir.Node) -> float | None:
    """Return the number that is the second input of a node."""
    return one_number(node.inputs[1], 1)


def _back(node: ir.Node | None, ops: Sequence[str]) -> tuple[ir.Node, ...]:
    """Return nodes with these operators, from the last one back along their first inputs, in order; () for others."""
    found: list[ir.Node] = []
    for op in ops:
        if node is None or key(node) != op or (found and sole_reader(node.outputs[0]) is None):
            return ()
        found.insert(0, node)
        first = node.inputs[0]
        node = producer_of(first)
    return tuple(found)


def _behind(node: ir.Node | None, ops: Sequence[str]) -> tuple[ir.Node, ...]:
    """Return nodes with these operators, each the only reader of the one before; () for others."""
    found: list[ir.Node] = []
    for op in ops:
        if node is None or key(node) != op:
            return ()
        found.append(node)
        readers = [use.node for use in node.outputs[0].uses()]
        node = readers[0] if len(readers) == 1 else None
    return tuple(found)
