"""Round weights to few values, so that a model compresses well."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .graphs.queries import computing_graphs, constant, release
from .int8.qparams import Array
from .registry import Change, TransformError, transform

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16})
SMALL = 16


@transform("round_weights", after=("fold_batch_norms",), changes_values=True)
def round_weights(model: ir.Model, *, num_steps: int = 256) -> Change:
    """Round each large float weight to equal steps over its range; the weight stays float.

    Before:  W float32, any values
    After:   W float32, W = lo + k * (hi - lo) / (num_steps - 1) with integer k;  lo, hi = min(W), max(W)
        If the range contains zero, the grid is shifted by less than half a step so that zero stays zero. The size of
        the file does not change, but the file compresses to a quarter.
    Left alone: tensors of fewer than 16 elements (``small``) or with at most num_steps values (``few-values``), tensors
        with values that are not finite (``not-finite``), integers, and initializers that a caller may override.

    Options:
        num_steps: The largest number of values of a tensor, at least 2.

    Raises:
        TransformError: num_steps is below 2.
    """
    if num_steps < 2:
        raise TransformError(f"num_steps must be at least 2, not {num_steps}")
    change = Change()
    for graph in computing_graphs(model):
        for value in graph.initializers.values():
            tensor = constant(value)
            if tensor is None or tensor.dtype not in FLOATS:
                continue
            reason = _round(value, tensor, num_steps)
            if reason:
                change.skip(reason)
            else:
                change.applied += 1
    return change


def _round(value: ir.Value, tensor: ir.TensorProtocol, steps: int) -> str:
    """Round one initializer; return the skip code if it stays, else an empty text."""
    if tensor.size < SMALL:
        return "small"
    array = tensor.numpy()
    release(tensor)
    if not np.isfinite(array).all():
        return "not-finite"
    if len(np.unique(array)) <= steps:
        return "few-values"
    value.const_value = ir.Tensor(_on_grid(array, steps), dtype=tensor.dtype, name=value.name)
    return ""


def _on_grid(array: Array, steps: int) -> Array:
    """Round to at most `steps` equally spaced values over the range of the array, with zero if it is in the range."""
    low, high = float(array.min()), float(array.max())
    step = (high - low) / (steps - 1)
    first = np.rint(low / step) if low <= 0 <= high else low / step
    steps_up = np.clip(np.rint(array.astype(np.float64) / step - first), 0, steps - 1)
    return ((steps_up + first) * step).astype(array.dtype)
