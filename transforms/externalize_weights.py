"""Say which weights are to lie in a file of their own."""

from __future__ import annotations

import onnx_ir as ir

from .registry import Change, transform

EXTERNAL = "requant.external_data"
"""The key in a model's metadata under which stands from how many bytes on a weight goes into the file beside it."""
LEAST = 2**10
"""Bytes of a weight below which it stays in the model: a shape or a scale, which a loader wants to see."""


@transform("externalize_weights")
def externalize_weights(model: ir.Model, *, threshold: int = LEAST) -> Change:
    """Mark the model, so that who saves it puts large weights into one file beside it.

    Before:  a model that is saved as one file
    After:   the same model, saved as a file and one beside it with the weights of `threshold` bytes and more
        ``requant transform`` writes both, and takes the mark away. ``--external-data`` is the same with the default.
    Left alone: smaller weights, and those below 1024 bytes in any case (``small``); constants in nodes: run
        `fold_constants` first.

    Options:
        threshold: From how many bytes on a weight goes into the file.
    """
    change = Change()
    least = max(threshold, LEAST)
    held = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    sizes = [tensor.nbytes for tensor in held if tensor is not None and tensor.dtype is not ir.DataType.STRING]
    large = sum(size >= least for size in sizes)
    if len(sizes) > large:
        change.skipped["small"] = len(sizes) - large
    if large and model.metadata_props.get(EXTERNAL) != str(least):
        model.metadata_props[EXTERNAL] = str(least)
        change.applied = large
    return change


def external_threshold(model: ir.Model) -> int | None:
    """Return from how many bytes on a weight is to lie in a file, None where the model says nothing."""
    text = model.metadata_props.get(EXTERNAL, "")
    return int(text) if text.isdecimal() else None
