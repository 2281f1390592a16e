"""Fold operators that scale and shift channels into the weights of convolutions and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache, partial
from math import inf

import numpy as np
import onnx_ir as ir

from .graphs.inference import stand_ins
from .graphs.queries import computing_graphs, constant, producer_of, sole_reader
from .graphs.rewriter import can_replace, names, remove, replace
from .patterns.linear import (
    AFFINE,
    BY_CONSTANT,
    LINEAR,
    SCALE_FREE,
    affine,
    channel_place,
    distinct,
    noise_before,
    scaled_inputs,
    scaled_outputs,
    set_constants,
    weights_of,
)
from .registry import Change, LeftAlone, transform

Known = Mapping[ir.Value, ir.Value]
NOISIEST = 1e-2
"""The noise behind a norm, as a share of the variance, with which uint8 in front of the norm still keeps 20 dB."""


@dataclass(frozen=True, slots=True)
class _Folding:
    """What all folds of a model share.

    Attributes:
        model: The model.
        max_gain: The largest factor by which a channel's weights may grow.
        known: Returns the values with their inferred types; None if only results of convolutions are scaled.
        taken: The names in the model; new ones are added.
    """

    model: ir.Model
    max_gain: float
    known: Callable[[], Known] | None
    taken: set[str]

    @property
    def opset(self) -> int:
        """The opset of the standard operators."""
        return self.model.opset_imports.get("", 0)


@transform("fold_batch_norms", after=("fold_constants",))
def fold_batch_norms(model: ir.Model, *, max_gain: float = inf) -> Change:
    """Fold a BatchNormalization, or a Mul, Div, Add or Sub of one constant per channel, into a linear operator.

    Before:  y = BatchNormalization(Conv(x, W, b), gamma, beta, mean, var)
             y = Add(Mul(Conv(x, W, b), s), t);           y = Conv(BatchNormalization(x, ...), W, b)
    After:   y = Conv(x, W * g, (b - mean) * g + beta),  g = gamma / sqrt(var + epsilon), shape (M,)
             y = Conv(x, W * s, b * s + t);               y = Conv(x, W * g, b + sum of W * (beta - mean * g)), g (C,)
        The same for ConvTranspose, depthwise convolutions and Gemm, for MatMul if no bias is needed, and through a
        Concat of the results of several linear operators. Before the linear operator, a Mul, Div, Add or Sub is folded
        only if it normalizes an input of the graph, or is what `lift_channel_scales` leaves of a norm: an Add or Sub
        behind a Relu, LeakyRelu, PRelu or pooling. The arithmetic is in float64; the result has the weight's type.
        Shared weights are copied. Bodies of control flow are included.
    Left alone: an intermediate tensor with other readers, or that is a graph output; a parameter that is not constant
        or not one per channel; BatchNormalization in training mode, or without a linear operator directly before or
        behind it; a shift before a convolution with padding, because the zeros are not shifted, or before a
        ConvTranspose; a norm before the linear operator that makes very unequal channels alike (``unequal-channels``):
        by its means and variances, one uint8 scale for the tensor before it would leave less than 20 dB behind it, and
        the product could not be INT8; a channel scaled by more than max_gain; results that are not finite.

    Options:
        max_gain: The largest factor by which a channel's weights may grow.
    """
    return fold(model, AFFINE, max_gain)


def fold(model: ir.Model, kinds: AbstractSet[str], max_gain: float = inf, *, numbers: bool = False) -> Change:
    """Fold the operators of some types into linear operators.

    Args:
        model: The model.
        kinds: A subset of `AFFINE`.
        max_gain: The largest factor by which a channel's weights may grow.
        numbers: Whether to fold only constants with one element, and only behind a convolution.
    """
    change = Change()
    folding = _Folding(model, max_gain, None if numbers else cache(partial(stand_ins, model)), names(model))
    progress = True
    while progress:  # after a fold, the next candidate is next to the linear operator
        progress = False
        change.skipped.clear()
        for graph in computing_graphs(model):
            for node in tuple(graph):
                if node.domain or node.op_type not in kinds or not _is_candidate(node, numbers):
                    continue
                try:
                    _fold(node, folding)
                except LeftAlone as left:
                    if str(left):
                        change.skip(str(left))
                else:
                    change.applied += 1
                    progress = True
    return change


def _is_candidate(node: ir.Node, numbers: bool) -> bool:
    """Whether a node scales or shifts a tensor by a constant."""
    if node.op_type == "BatchNormalization":
        return True
    tensors = [tensor for value in node.inputs if (tensor := constant(value)) is not None]
    return len(node.inputs) == 2 and len(tensors) == 1 and (not numbers or tensors[0].size == 1)


def _fold(node: ir.Node, folding: _Folding) -> None:
    """Fold one operator into the linear operators before it, or into the one behind it if types are known.

    Raises:
        LeftAlone: No exact fold is possible; nothing is changed.
    """
    data = node.inputs[:1] if node.op_type == "BatchNormalization" else node.inputs
    value = next((each for each in data if each is not None and constant(each) is None), None)
    if value is None:
        raise LeftAlone("")
    before, known = _linears_before(value), folding.known
    if before and (known is not None or before[0].op_type == "Conv"):
        _fold_back(folding, before, node, value)
        return
    behind = _linear_behind(node) if known is not None else None
    norm = node.op_type == "BatchNormalization"
    if known is None or behind is None or not (norm or _folds_forward(folding.model, node, value)):
        raise LeftAlone("no-linear-operator-beside" if norm else "")
    if not norm and _stretches(behind, node, known().get(value, value)):
        raise LeftAlone("not-per-channel")
    _fold_forward(folding, behind, node, value)


def _linear_behind(node: ir.Node) -> ir.Node | None:
    """Return the linear operator that is the only reader of a node's result, as its activation; None without one."""
    reader = sole_reader(node.outputs[0])
    fits = reader is not None and reader.op_type in LINEAR and not reader.domain
    return reader if reader is not None and fits and reader.inputs[0] is node.outputs[0] else None


def _linears_before(value: ir.Value) -> tuple[ir.Node, ...]:
    """Return the linear operator that produces a tensor, or those whose results a Concat joins; empty without one."""
    node = value.producer()
    if node is None or node.domain:
        return ()
    if node.op_type in LINEAR:
        return (node,)
    if node.op_type != "Concat":
        return ()
    parts = [*map(producer_of, node.inputs)]
    linears = [part for part in parts if part is not None and part.op_type in LINEAR and not part.domain]
    return tuple(linears) if len(linears) == len(parts) and distinct(linears) else ()


def _folds_forward(model: ir.Model, node: ir.Node, value: ir.Value) -> bool:
    """Whether a Mul, Div, Add or Sub is folded into the linear operator behind it, where it can be."""
    activation = producer_of(value)
    rest = activation is not None and not activation.domain and activation.op_type in SCALE_FREE
    return (rest and node.op_type in ("Add", "Sub")) or _normalises_input(model, value)


def _normalises_input(model: ir.Model, value: ir.Value | None) -> bool:
    """Whether a tensor is an input of the graph, or such an input scaled and shifted by constants."""
    while value is not None and not value.is_graph_input():
        node = value.producer()
        if node is None or node.domain or node.op_type not in BY_CONSTANT or len(node.inputs) != 2:
            return False
        inner = [each for each in node.inputs if each is not None and constant(each) is None]
        value = inner[0] if len(inner) == 1 else None
    return value is not None and any(value is each for each in model.graph.inputs)


def _fold_back(folding: _Folding, linears: tuple[ir.Node, ...], node: ir.Node, value: ir.Value) -> None:
    """Change the weights of linear operators so that they include `node`, which reads their result; remove `node`."""
    joined = value.producer()
    if sole_reader(value) is not node or not can_replace(node.outputs[0], value):
        raise LeftAlone("output-shared")
    if linears[0] is not joined and not all(sole_reader(each.outputs[0]) is joined for each in linears):
        raise LeftAlone("output-shared")
    weights = [weights_of(linear) for linear in linears]
    places = {channel_place(linear, value) for linear in linears}
    place = places.pop()
    rank, last = place
    if places or (joined is not None and linears[0] is not joined and not _joins(joined, rank, last)):
        raise LeftAlone("not-per-channel")
    ends = np.cumsum([each.channels for each in weights])
    scale, shift = affine(node, value, int(ends[-1]), place, folding.opset)
    if np.max(np.abs(scale), initial=0) > folding.max_gain:
        raise LeftAlone("gain-above-maximum")
    parts = zip(weights, np.split(scale, ends[:-1]), np.split(shift, ends[:-1]), strict=True)
    for linear, constants in [(each.node, scaled_outputs(each, by, plus)) for each, by, plus in parts]:
        set_constants(folding.taken, linear, constants)
    name = node.outputs[0].name
    replace(node.outputs[0], value)
    remove(node)
    value.name = name  # the tensor of this name keeps its values


def _joins(concat: ir.Node, rank: int, last: int) -> bool:
    """Whether a Concat joins along the channel axis."""
    axis = concat.attributes.get_int("axis", 0)
    return rank > 0 and axis % rank == rank - last


def _fold_forward(folding: _Folding, linear: ir.Node, node: ir.Node, value: ir.Value) -> None:
    """Change the weights of a linear operator so that they include `node`, which produces its input; remove `node`."""
    if linear.attributes.get_int("transA", 0):
        raise LeftAlone("not-per-channel")
    weights = weights_of(linear)
    place = channel_place(linear, value)
    scale, shift = affine(node, value, weights.inputs, place, folding.opset)
    if np.max(np.abs(scale), initial=0) > folding.max_gain:
        raise LeftAlone("gain-above-maximum")
    if node.op_type == "BatchNormalization" and noise_before(node, weights.inputs) > NOISIEST:
        raise LeftAlone("unequal-channels")
    set_constants(folding.taken, linear, scaled_inputs(weights, scale, shift))
    linear.replace_input_with(0, value)
    remove(node)


def _stretches(linear: ir.Node, node: ir.Node, value: ir.Value) -> bool:
    """Whether the constant of a node may broadcast the tensor to more axes or channels."""
    tensor = next(tensor for each in node.inputs if (tensor := constant(each)) is not None)
    if not len(tensor.shape):
        return False
    rank, last = channel_place(linear, value)
    if value.shape is None or len(value.shape) != rank:
        return True
    return tensor.size > 1 and value.shape[-last] != weights_of(linear).inputs
