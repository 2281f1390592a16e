"""Scale channels in front of an activation or a pooling, where the factors fold into the weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .graphs.queries import computing_nodes, constant, graph_of, is_standard, node_name, producer_of, sole_reader
from .graphs.rewriter import (
    add_initializer,
    can_replace,
    insert_before,
    names,
    replace_by_earlier,
    replace_node,
    unused_name,
)
from .patterns.linear import LINEAR, SCALE_FREE, Floats, affine, channel_place, weights_of
from .registry import Change, LeftAlone, transform

BATCH_NORM = "BatchNormalization"
FIRST_OPSET = 7  # the first one in which a Mul repeats values along axes


@dataclass(frozen=True, slots=True)
class _Chain:
    """A linear operator and the operators between it and a scale.

    Attributes:
        linear: The linear operator.
        last: The tensor that the scale reads.
        first: The first operator behind the linear one and its norm.
        inner: The results of the operators from `first` on, the last one first.
    """

    linear: ir.Node
    last: ir.Value
    first: ir.Node
    inner: tuple[ir.Value, ...]


@transform("lift_channel_scales", after=("fold_constants", "normalize_gemm", "scale_before_clip"))
def lift_channel_scales(model: ir.Model) -> Change:
    """Move factors above 0, one per channel, from behind an activation or a pooling to the linear operator before it.

    Before:  y = BatchNormalization(MaxPool(Relu(Conv(x, W, b))), gamma, beta, mean, var);  y = Mul(Relu(Conv(x, W)), s)
    After:   y = Add(MaxPool(Relu(Mul(Conv(x, W, b), g))), beta - mean * g);                y = Relu(Mul(Conv(x, W), s))
        with g = gamma / sqrt(var + epsilon). `fold_batch_norms` folds g and s, both of shape (C, 1, 1), into the
        weights. Keras models have their norms behind the activations, and tf2onnx writes such a norm as Mul and Add.
        In uint8 the channels behind a norm have similar ranges, those before it have not. Between the linear operator
        and the factors may be Relu, LeakyRelu, PRelu, MaxPool, AveragePool and their global forms, and, behind the
        linear operator, another norm.
    Left alone: an inner tensor that has other readers or is a graph output (``shared``), a factor of 0 or below
        (``not-positive``), factors that are not constant, not finite or not one per channel (``not-constant``,
        ``not-finite``, ``not-per-channel``), training mode (``training-mode``), weights that are no constants of
        float32 (``weight-not-constant``, ``not-float32``), and opsets below 7.
    """
    change, taken = Change(), names(model)
    opset = model.opset_imports.get("", 0)
    if opset < FIRST_OPSET:
        return change
    for node in computing_nodes(model, BATCH_NORM, "Div", "Mul"):
        chain = _chain_before(node)
        if chain is None:
            continue
        try:
            _lift(node, chain, opset, taken)
            change.applied += 1
        except LeftAlone as reason:
            change.skip(str(reason))
    return change


def _chain_before(node: ir.Node) -> _Chain | None:
    """Return the operators between a scale and the linear operator that it belongs to; None without any."""
    data = node.inputs[:1] if node.op_type == BATCH_NORM else node.inputs
    computed = [value for value in data if value is not None and constant(value) is None]
    if node.domain or len(computed) != 1 or len(node.inputs) < 2:
        return None
    inner, value, first = [], computed[0], None
    source = producer_of(value)
    while is_standard(source, *SCALE_FREE) and len(source.outputs) == 1 and source.inputs[0] is not None:
        inner.append(value)
        first, value = source, source.inputs[0]
        source = producer_of(value)
    if first is None:
        return None
    linear = source
    if is_standard(linear, BATCH_NORM):
        linear = producer_of(linear.inputs[0])
    fits = linear is not None and not linear.domain and linear.op_type in LINEAR and linear.graph is node.graph
    return _Chain(linear, computed[0], first, tuple(inner)) if linear is not None and fits else None


def _lift(node: ir.Node, chain: _Chain, opset: int, taken: set[str]) -> None:
    """Move one scale.

    Raises:
        LeftAlone: It must stay; nothing is changed.
    """
    start = chain.first.inputs[0]
    assert start is not None
    norm = start.producer()
    between = [start, *chain.inner] if norm is chain.linear else [chain.linear.outputs[0], start, *chain.inner]
    if any(sole_reader(value) is None for value in between) or not can_replace(node.outputs[0], chain.last):
        raise LeftAlone("shared")
    weights = weights_of(chain.linear)
    if weights.weight.dtype != np.float32:
        raise LeftAlone("not-float32")
    place = channel_place(chain.linear, start)
    if norm is not None and norm is not chain.linear:
        affine(norm, chain.linear.outputs[0], weights.channels, place, opset)  # refuses a norm that stays
    scale, shift = affine(node, chain.last, weights.channels, place, opset)
    factors, summands = _stored(scale, place[1]), _stored(shift, place[1])
    _scale_in_front(node, chain, factors, taken)
    for value in chain.inner:
        value.name = unused_name(taken, f"{value.name}/scaled")
    if summands.any():
        added = add_initializer(graph_of(node), unused_name(taken, f"{node_name(node)}/shift"), summands)
        replace_node(node, ir.node("Add", [chain.last, added], name=node_name(node)))
    else:
        replace_by_earlier(node, chain.last)


def _stored(values: Floats, last: int) -> np.ndarray:
    """Return factors or summands of channels in float32, of the shape of the channel axis and those behind it.

    Args:
        values: One for each channel.
        last: The channel axis, counted from the end.

    Raises:
        LeftAlone: One is not finite.
    """
    with np.errstate(all="ignore"):
        stored = values.astype(np.float32).reshape(-1, *[1] * (last - 1))
    if not np.isfinite(stored).all():
        raise LeftAlone("not-finite")
    return stored


def _scale_in_front(node: ir.Node, chain: _Chain, factors: np.ndarray, taken: set[str]) -> None:
    """Insert a Mul behind the linear operator of a chain and its norm.

    Raises:
        LeftAlone: A factor is not above 0.
    """
    if not (factors > 0).all():
        raise LeftAlone("not-positive")
    start, stem = chain.first.inputs[0], node_name(node)
    value = add_initializer(graph_of(node), unused_name(taken, f"{stem}/factors"), factors)
    scaled = insert_before(chain.first, taken, "Mul", [start, value], stem=f"{stem}/lifted")
    if start is not None:
        scaled.type, scaled.shape = start.type, start.shape
    chain.first.replace_input_with(0, scaled)
