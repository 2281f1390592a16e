"""Remove channels that are constant or that nothing reads."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .graphs.queries import constant
from .graphs.rewriter import names
from .parts.dead_channels import (
    ChannelFlow,
    Mask,
    Matrices,
    channel_length,
    is_depthwise,
    summands,
    used_weights,
)
from .patterns.linear import LINEAR, Weights, set_constant, set_constants, weights_of
from .registry import Change, transform

BLOCK = 16
"""Kernels compute channels in blocks of this length: 40 channels take as long as 48, and 63 longer than 64."""


@transform("prune_dead_channels", after=("fold_constants", "fold_batch_norms", "flush_denormals"))
def prune_dead_channels(model: ir.Model) -> Change:
    """Remove channels that have one value in all places, or that no weight reads, from weights and their readers.

    Before:  y = Conv(Relu(Conv(x, W, b)), V, d), W of shape (M, C, h, w) with W[m] = 0 for some m
    After:   y = Conv(Relu(Conv(x, W', b')), V', d'), without W[m], b[m] and V[:, m],
        with d' = d + c * (sum of V[:, m] over the kernel), c = Relu(b[m])
        Trained networks have many such channels: weight decay makes weights 0 that nothing needs. A class is what can
        only be removed together: channels that are added or multiplied, and those of a depthwise convolution. Poolings,
        functions of one element, a Concat, a Resize and Flatten are possible between. So many are removed that a
        multiple of 16 remains, the length of the blocks in which kernels compute. The names of nodes and tensors stay.
    Left alone: tensors of which less than a block could go (``less-than-a-block``), channels that an output, a
        reshape, a norm or another operator reads (``read-otherwise``), and constants other than 0 in front of a
        convolution that pads, of a ConvTranspose, of a MatMul, or channels that are no constant behind a sum with
        others (``not-constant-for-reader``).
    """
    change, used = Change(), used_weights(model)
    if all(mask.any(axis=1).all() and (mask.shape[1] == 1 or mask.any(axis=0).all()) for mask in used.values()):
        return change
    flow = ChannelFlow(model, used)
    gone = _chosen(flow, used, change)
    if change.applied:
        _remove(model, flow, gone)
    return change


def _chosen(flow: ChannelFlow, used: Matrices, change: Change) -> Mask:
    """Return for each class whether it is removed, and count the tensors by what happens to them."""
    removable, pinned = flow.removable(), flow.classes.pinned()
    dead, gone = np.zeros(len(removable), bool), np.zeros(len(removable), bool)
    for node in used:
        numbers = flow.numbers.get(node.outputs[0])
        if numbers is not None:
            dead[flow.classes.of(numbers)[np.isfinite(flow.fixed[node.outputs[0]])]] = True
    for bundle in flow.classes.bundles(flow.numbers.values()):
        surplus = _surplus(len(bundle), int(removable[bundle].sum()))
        if surplus:
            gone[bundle[removable[bundle]][:surplus]] = True
            change.applied += 1
        elif _surplus(len(bundle), int((dead | removable)[bundle].sum())):
            change.skip("read-otherwise" if pinned[bundle].any() else "not-constant-for-reader")
        elif removable[bundle].any():
            change.skip("less-than-a-block")
    return gone


def _surplus(count: int, removable: int) -> int:
    """Return how many channels to remove, so that whole blocks remain, at least one.

    Args:
        count: The number of channels.
        removable: How many of them could go.
    """
    kept = max(-(-(count - removable) // BLOCK) * BLOCK, BLOCK)
    return max(count - kept, 0)


def _remove(model: ir.Model, flow: ChannelFlow, gone: Mask) -> None:
    """Remove the channels of some classes from weights, constants and shapes."""
    taken = names(model)
    keeps = {value: ~gone[flow.classes.of(numbers)] for value, numbers in flow.numbers.items()}
    keeps = {value: keep for value, keep in keeps.items() if not keep.all()}
    for node in model.graph:
        source, result = node.inputs[0] if node.inputs else None, node.outputs[0]
        if node in flow.used:
            before = keeps.get(source) if source is not None else None
            after = keeps.get(result)
            if before is not None or after is not None:
                fixed = flow.fixed.get(source) if source is not None else None
                _shrink(taken, weights_of(node), (before, after), fixed)
        elif result in keeps and node.op_type not in LINEAR:
            _shrink_constants(taken, node, keeps[result], len(flow.shape(result)))
    for value, keep in keeps.items():
        if value.shape is not None:
            value.shape = ir.Shape(
                [value.shape[0], int(keep.sum()), *[value.shape[i] for i in range(2, len(value.shape))]]
            )


def _shrink(
    taken: set[str], weights: Weights, keeps: tuple[Mask | None, Mask | None], fixed: np.ndarray | None
) -> None:
    """Remove input and output channels of a linear operator.

    Args:
        taken: The names in use.
        weights: The operator.
        keeps: Which input channels stay, and which output channels; None for all.
        fixed: The values of constant input channels, NaN for others.
    """
    before, after = keeps
    node, array, bias = weights.node, weights.weight, weights.bias
    first = node.op_type == "Conv" or weights.transposed
    if before is not None and not is_depthwise(weights):
        if fixed is not None:
            inputs = np.where(before | ~np.isfinite(fixed), 0, fixed)
            added = summands(weights, inputs)
            bias = added if bias is not None or added.any() else None
        array = np.compress(before, array, axis=1 if first else 0)
    if after is not None:
        array = np.compress(after, array, axis=0 if first else 1)
        bias = None if bias is None else bias[after]
        if is_depthwise(weights):
            node.attributes["group"] = ir.AttrInt64("group", len(array))
    changed = None if bias is None or bias is weights.bias else bias.astype(array.dtype)
    set_constants(taken, node, (np.ascontiguousarray(array), changed))


def _shrink_constants(taken: set[str], node: ir.Node, keep: Mask, rank: int) -> None:
    """Remove channels from the constants of a function of one element."""
    for index, value in enumerate(node.inputs):
        tensor = constant(value)
        if value is None or tensor is None or channel_length(tensor.shape.numpy(), rank) != len(keep):
            continue
        array = tensor.numpy()
        set_constant(taken, node, index, np.compress(keep, array, axis=array.ndim + 1 - rank), f"{value.name}_kept")
