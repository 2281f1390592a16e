"""Scale the channels of activations by changing the constants before and after them.

An activation x becomes ``x / s``, with s per channel. The weights and the bias that produce x are divided by s, and the
weights that read x are multiplied by s. No operator is added, and the outputs of the model do not change (Nagel et al.,
Data-Free Quantization Through Weight Equalization and Bias Correction, 2019, section 4.1; Xiao et al., SmoothQuant,
2023, section 4). If each s is a power of two, even the rounding is the same.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import onnx_ir as ir

from ... import UnknownNameError
from ..graphs.inference import inferred
from ..graphs.queries import constant, graph_of, key, release
from ..graphs.rewriter import derive_initializer, discard, names, unused_name
from ..patterns.channel_rules import RULES
from ..patterns.channel_scales import Floats, Fold, Look
from ..registry import Change, LeftAlone, TransformError


@dataclass(frozen=True)
class Group:
    """Tensors that share a free scale per channel.

    Attributes:
        tensor: The name of the first tensor, which identifies the group.
        channels: The number of channels, C.
        tensors: The channel axis of each tensor by name, counted from the end, in execution order.
        folds: The constants that absorb the scale.
        passed: The nodes between tensors of the group, in execution order.
        ceiling: The smallest upper bound of a Clip in the group, infinite without one. Scaling a channel is exact only
            if the channel does not reach the bound before or after scaling, or if the scale is 1.
    """

    tensor: str
    channels: int
    tensors: Mapping[str, int]
    folds: tuple[Fold, ...]
    passed: tuple[ir.Node, ...]
    ceiling: float = math.inf

    @property
    def readers(self) -> tuple[Fold, ...]:
        """The weights that undo the scale."""
        return tuple(fold for fold in self.folds if fold.role == "reader")

    @property
    def producers(self) -> tuple[Fold, ...]:
        """The weights that apply the scale."""
        return tuple(fold for fold in self.folds if fold.role == "producer")


def find(model: ir.Model) -> tuple[tuple[Group, ...], Counter[str]]:
    """Return the groups of the main graph, and the number of candidates that are no group, by reason.

    A group has weights that apply a scale and weights that undo it. The scale is 1, so that there is no group, for a
    tensor that is an input or an output of the graph, is read in a body, or is next to an operator without a row in
    `RULES`; and for all tensors that share its scale.
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
    return _build_groups(look)


def groups(model: ir.Model) -> tuple[Group, ...]:
    """Return the groups of the main graph, in execution order."""
    return find(model)[0]


def equalize(model: ir.Model, scales: Mapping[str, Floats]) -> Change:
    """Scale the channels of groups, in place.

    Before:  x = Conv(z, V, a);  y = Conv(Relu(x), W, b)
    After:   x = Conv(z, V / s, a / s);  y = Conv(Relu(x), W * s, b),  s of shape (C,)
        The same for each producer and reader in `RULES`, and for the operators between them. Constants with other
        readers are copied.
    Left alone: groups with a constant that would not stay finite.

    Args:
        model: The model.
        scales: The scales by `Group.tensor`, each positive, of shape (C,).

    Raises:
        UnknownNameError: No group has this name.
        TransformError: A scale does not have the group's number of channels or is not positive.
    """
    change = Change()
    known = {group.tensor: group for group in groups(model)}
    taken = names(model)
    for name, scale in scales.items():
        if name not in known:
            raise UnknownNameError("group of channels", name, known)
        _check(known[name], scale)
    for name, scale in scales.items():
        if scale_group(known[name], scale, taken):
            change.applied += 1
        else:
            change.skip("not-finite")
    return change


def scale_group(group: Group, scale: Floats, taken: set[str]) -> bool:
    """Scale the channels of a group, in place, unless a constant would not stay finite; return whether they are scaled.

    Args:
        group: The group.
        scale: Positive, of shape (C,).
        taken: The names in use, from `names`; new ones are added.
    """
    if not all(_finite(fold, scale) for fold in group.folds):
        return False
    for fold in group.folds:
        _multiply(fold, fold.factor(scale), taken)
    return True


def _look_at(look: Look, node: ir.Node) -> None:
    """Record the constraints of a node; scales that its rule does not mention are 1."""
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
    """The parts of a group, collected by its root tensor."""

    tensors: dict[str, int] = field(default_factory=dict)
    folds: list[Fold] = field(default_factory=list)
    lengths: set[int] = field(default_factory=set)
    passed: dict[ir.Node, None] = field(default_factory=dict)
    ceiling: float = math.inf


def _build_groups(look: Look) -> tuple[tuple[Group, ...], Counter[str]]:
    """Return the groups, and the number of candidates that are no group, by reason."""
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
    complete, skipped = [], Counter[str]()
    for root, part in parts.items():
        if {"producer", "reader"} - {fold.role for fold in part.folds}:
            continue
        if root in look.pinned or len(part.lengths) != 1:
            skipped[look.pinned.get(root, "channels-differ")] += 1
            continue
        passed, folds = tuple(part.passed), tuple(part.folds)
        name, (channels,) = next(iter(part.tensors)), part.lengths
        complete.append(Group(name, channels, part.tensors, folds, passed, part.ceiling))
    return tuple(complete), skipped


def _check(group: Group, scale: Floats) -> None:
    """Check that a scale fits its group.

    Raises:
        TransformError: It does not.
    """
    if scale.shape != (group.channels,):
        raise TransformError(f"tensor {group.tensor!r} has {group.channels} channels; give one scale for each")
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise TransformError(f"tensor {group.tensor!r}: a scale must be positive and finite")


def _finite(fold: Fold, scale: Floats) -> bool:
    """Whether a constant times its factor is finite in the constant's type."""
    tensor = constant(fold.node.inputs[fold.index])
    if tensor is None:
        return False
    with np.errstate(over="ignore"):
        scaled = (tensor.numpy() * fold.factor(scale)).astype(tensor.dtype.numpy())
    release(tensor)
    return bool(np.isfinite(scaled.astype(np.float64)).all())


def _multiply(fold: Fold, factor: Floats, taken: set[str]) -> None:
    """Multiply a constant by a factor; other readers keep the old constant."""
    if (factor == 1).all():
        return
    old = fold.node.inputs[fold.index]
    tensor = constant(old)
    assert tensor is not None  # a fold is a constant
    shape = np.broadcast_shapes(tuple(tensor.shape.numpy()), factor.shape)
    name = _vacated(fold, taken)
    fresh = derive_initializer(graph_of(fold.node), name, tensor, partial(np.multiply, factor), shape)
    fold.node.replace_input_with(fold.index, fresh)


def _vacated(fold: Fold, taken: set[str]) -> str:
    """Disconnect a constant from a node; return the name for its replacement: the old name if it is free."""
    old = fold.node.inputs[fold.index]
    assert old is not None  # a fold is a constant
    fold.node.replace_input_with(fold.index, None)
    if old.is_initializer() and not old.uses() and old.graph is fold.node.graph and old.name:
        discard(old)
        return old.name
    discard(old)
    return unused_name(taken, f"{old.name}_scaled")
