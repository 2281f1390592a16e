"""Scaling and shifting the channels of activations, folded into the constants before and after them.

An activation x is written as ``x' = (x - c) / s``, with s and c per channel: what computes it has its weights and
biases divided by s, and its bias lowered by c; what reads it has its weights multiplied by s, and the contribution
of c added to its bias. No operator is added, and the model computes what it did (Nagel et al., Data-Free Quantization
Through Weight Equalization and Bias Correction, 2019, section 4.1; Xiao et al., SmoothQuant, 2023, section 4;
Wei et al., Outlier Suppression+, 2023, section 4.1). Where every s is a power of two not even rounding differs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import onnx_ir as ir

from .. import UnknownNameError
from .channel_rules import RULES
from .channel_scales import Floats, Fold, Look
from .channel_shifts import Place, Shifts, contribution, shifts_of
from .graph import add_initializer, constant, derive_initializer, discard, graph_of, inferred, names, release, take
from .ops import key
from .registry import Change, LeftAlone, TransformError


@dataclass(frozen=True)
class Group:
    """Tensors that share a scale per channel, which is free.

    Attributes:
        tensor: The name of the first of them, by which the group is called.
        channels: C, how many channels they have.
        tensors: The channel axis of each of them by name, counted from the end, in execution order.
        folds: The constants that take up the scale.
        passed: The nodes between tensors of the group, in execution order.
        ceiling: The least upper bound of a Clip between them, infinite without one. A channel keeps its values only
            where it does not reach the bound, before or after, or where its scale is 1.
        shifts: How a shift is folded; None where that cannot be done exactly.
    """

    tensor: str
    channels: int
    tensors: Mapping[str, int]
    folds: tuple[Fold, ...]
    passed: tuple[ir.Node, ...]
    ceiling: float = math.inf
    shifts: Shifts | None = None

    @property
    def readers(self) -> tuple[Fold, ...]:
        """The weights that undo the scale."""
        return tuple(fold for fold in self.folds if fold.role == "reader")

    @property
    def producers(self) -> tuple[Fold, ...]:
        """The weights that apply it."""
        return tuple(fold for fold in self.folds if fold.role == "producer")


@dataclass(frozen=True)
class Scaling:
    """What becomes of the channels of a group: ``x' = (x - shift) / scale``.

    Attributes:
        scale: Positive, shape (C,).
        shift: Shape (C,), None for none. Behind a Relu the values stay only where x is never below it.
    """

    scale: Floats
    shift: Floats | None = None


def find(model: ir.Model) -> tuple[tuple[Group, ...], Counter[str]]:
    """Return the groups of the main graph, and why others, with weights before and after them, are none.

    A group has weights that apply a scale and weights that undo it. A tensor that is an input or an output of the
    graph, is read in a body, or touches an operator without a row in `RULES` is in none, nor is what shares its scale.
    """
    look = Look(inferred(model))
    for value in model.graph.inputs:
        look.pin(value, "graph-input")
    for node in model.graph:
        _look_at(look, node)
        for value in node.outputs:
            if value.is_graph_output():
                look.pin(value, "graph-output")
            if any(use.node.graph is not model.graph for use in value.uses()):
                look.pin(value, "read-in-a-body")
    return _gathered(look)


def groups(model: ir.Model) -> tuple[Group, ...]:
    """Return the groups of tensors of the main graph that share a free scale per channel, in execution order."""
    return find(model)[0]


def equalize(model: ir.Model, chosen: Mapping[str, Scaling]) -> Change:
    """Scale and shift the channels of groups, in place.

    Before:  x = Conv(z, V, a);  y = Conv(Relu(x), W, b)
    After:   x = Conv(z, V / s, (a - c) / s);  y = Conv(Relu(x), W * s, b + W c),  s and c of shape (C,)
        The same for every producer, reader and operator between them of `RULES`. Constants that other nodes read get
        a copy.
    Left alone: a constant would not be finite.

    Args:
        model: The model.
        chosen: By `Group.tensor`.

    Raises:
        UnknownNameError: There is no such group.
        TransformError: A scale is not of the group's channels or not positive, or a shift is asked for where the
            group has no `shifts`.
    """
    change = Change()
    known = {group.tensor: group for group in groups(model)}
    taken = names(model)
    for name, scaling in chosen.items():
        if name not in known:
            raise UnknownNameError("group of channels", name, known)
        _check(known[name], scaling)
    kept = {name: s for name, s in chosen.items() if all(_finite(fold, s.scale) for fold in known[name].folds)}
    for name, scaling in kept.items():
        if scaling.shift is not None:
            _shift(known[name], scaling.shift, taken)
    known = {group.tensor: group for group in groups(model)}  # shifting gives biases to nodes that had none
    for name, scaling in kept.items():
        for fold in known[name].folds:
            _multiply(fold, fold.factor(scaling.scale), taken)
    change.applied = len(kept)
    change.skipped.update({"not-finite": len(chosen) - len(kept)} if len(chosen) > len(kept) else {})
    return change


def _look_at(look: Look, node: ir.Node) -> None:
    """Take down what a node says of the scales of its tensors; what it says nothing of is 1."""
    rule, reason = RULES.get(key(node)), f"next-to-{node.op_type}"
    free: tuple[int, ...] = ()
    try:
        if rule is None:
            raise LeftAlone(reason)
        free = rule(look, node)
    except LeftAlone as left:
        reason = str(left)
        look.pin(node.outputs[0], reason)
    for index, value in enumerate(node.inputs):
        if value is not None and index not in free:
            look.pin(value, reason)
    for value in node.outputs[1:]:
        look.pin(value, reason)


@dataclass
class _Parts:
    """What there is of a group."""

    tensors: dict[str, int] = field(default_factory=dict)
    folds: list[Fold] = field(default_factory=list)
    lengths: set[int] = field(default_factory=set)
    passed: dict[ir.Node, None] = field(default_factory=dict)
    ceiling: float = math.inf


def _gathered(look: Look) -> tuple[tuple[Group, ...], Counter[str]]:
    """Return the groups, and why others are none."""
    parts: dict[ir.Value, _Parts] = defaultdict(_Parts)
    for value, axis in look.axis.items():
        parts[look.root(value)].tensors[str(value.name)] = axis
    for value, fold in look.folds:
        parts[look.root(value)].folds.append(fold)
    for value, length in look.lengths:
        parts[look.root(value)].lengths.add(length)
    for value, node in look.passed:
        parts[look.root(value)].passed[node] = None
    for value, bound in look.ceilings:
        part = parts[look.root(value)]
        part.ceiling = min(part.ceiling, bound)
    found, skipped = [], Counter[str]()
    for root, part in parts.items():
        if {"producer", "reader"} - {fold.role for fold in part.folds}:
            continue
        if root in look.pinned or len(part.lengths) != 1:
            skipped[look.pinned.get(root, "channels-differ")] += 1
            continue
        passed, folds = tuple(part.passed), tuple(part.folds)
        name, (channels,) = next(iter(part.tensors)), part.lengths
        found.append(Group(name, channels, part.tensors, folds, passed, part.ceiling, shifts_of(folds, passed)))
    return tuple(found), skipped


def _check(group: Group, scaling: Scaling) -> None:
    """Refuse what cannot be folded.

    Raises:
        TransformError: It cannot.
    """
    shape, shift = (group.channels,), scaling.shift
    if scaling.scale.shape != shape or (shift is not None and shift.shape != shape):
        raise TransformError(
            f"tensor {group.tensor!r} has {group.channels} channels; give one scale and shift for each"
        )
    if not (np.isfinite(scaling.scale).all() and (scaling.scale > 0).all()):
        raise TransformError(f"tensor {group.tensor!r}: a scale must be positive and finite")
    if shift is not None and (group.shifts is None or not np.isfinite(shift).all()):
        raise TransformError(f"tensor {group.tensor!r}: its channels cannot be shifted without changing the result")


def _finite(fold: Fold, scale: Floats) -> bool:
    """Whether a constant times its factor can be stored in its type."""
    tensor = constant(fold.node.inputs[fold.index])
    if tensor is None:
        return False
    with np.errstate(over="ignore"):
        scaled = (tensor.numpy() * fold.factor(scale)).astype(tensor.dtype.numpy())
    release(tensor)
    return bool(np.isfinite(scaled.astype(np.float64)).all())


def _shift(group: Group, shift: Floats, taken: set[str]) -> None:
    """Subtract a vector from the channels of a group, and give back what its readers miss."""
    assert group.shifts is not None  # `_check` has refused it
    _add(group.shifts.producer, -shift, taken)
    for fold, place in group.shifts.readers:
        _add(place, contribution(fold, shift), taken)


def _multiply(fold: Fold, factor: Floats, taken: set[str]) -> None:
    """Multiply a constant."""
    if (factor == 1).all():
        return
    old = fold.node.inputs[fold.index]
    tensor = constant(old)
    assert tensor is not None  # it is a fold
    shape = np.broadcast_shapes(tuple(tensor.shape.numpy()), factor.shape)
    place = Place(fold.node, fold.index)
    name = _vacated(place, taken)
    fresh = derive_initializer(graph_of(fold.node), name, tensor, partial(np.multiply, factor), shape)
    fold.node.replace_input_with(fold.index, fresh)


def _add(place: Place, vector: Floats, taken: set[str]) -> None:
    """Add a vector to a constant, or give the node one."""
    node, index = place.node, place.index
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    tensor = constant(node.inputs[index])
    weight = constant(node.inputs[1])
    like = tensor if tensor is not None else weight
    assert like is not None  # a node that can be given a bias has weights
    before = 0.0 if tensor is None else tensor.numpy().astype(np.float64)
    array = (before + vector).astype(like.dtype.numpy())
    name = _vacated(place, taken)
    node.replace_input_with(index, add_initializer(graph_of(node), name, array, ir.DataType(like.dtype)))


def _vacated(place: Place, taken: set[str]) -> str:
    """Take a constant from a node; return a name for what comes instead: the old one where nothing has it now."""
    old = place.node.inputs[place.index]
    place.node.replace_input_with(place.index, None)
    if old is None:
        return take(taken, f"{place.node.name or place.node.op_type}_bias")
    if old.is_initializer() and not old.uses() and old.graph is place.node.graph and old.name:
        discard(old)
        return old.name
    discard(old)
    return take(taken, f"{old.name}_scaled")
