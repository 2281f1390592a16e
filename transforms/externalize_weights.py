"""Select the weights that are saved in a separate file."""

from __future__ import annotations

import onnx_ir as ir

from ..system.numbers import whole_number
from .registry import Change, transform

EXTERNAL = "requant.external_data"
"""The key of a model's metadata for the size in bytes from which a weight goes into the separate file."""
LEAST = 2**10
"""Weights with fewer bytes stay in the model: shapes and scales, which programs read when they load a model."""


@transform("externalize_weights")
def externalize_weights(model: ir.Model, *, threshold: int = LEAST) -> Change:
    """Mark the model, so that saving it puts large weights into one separate file.

    Before:  a model that is saved as one file
    After:   the same model, saved as two files; weights of `threshold` bytes and more are in the second one
        ``requant transform`` writes both files and removes the mark. ``--external-data`` sets the default threshold.
    Left alone: smaller weights, and weights below 1024 bytes for any threshold (``small``); constants in nodes, which
        `fold_constants` turns into weights.

    Options:
        threshold: The size in bytes from which a weight goes into the separate file.
    """
    change = Change()
    least = max(threshold, LEAST)
    tensors = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    sizes = [tensor.nbytes for tensor in tensors if tensor is not None and tensor.dtype is not ir.DataType.STRING]
    large = sum(size >= least for size in sizes)
    if len(sizes) > large:
        change.skipped["small"] = len(sizes) - large
    if large and model.metadata_props.get(EXTERNAL) != str(least):
        model.metadata_props[EXTERNAL] = str(least)
        change.applied = large
    return change


def external_threshold(model: ir.Model) -> int | None:
    """Return the size in bytes from which weights go into the separate file, None if the model has no mark."""
    return whole_number(model.metadata_props.get(EXTERNAL, ""))
