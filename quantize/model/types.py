"""Types and shapes of inner tensors that ONNX Runtime infers where onnx cannot: behind operators of other domains."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from ... import RequantError
from ...calibration.model.session import DTYPES, open_session
from ...transforms.graphs.inference import inferred
from .files import serialize
from .shown import show_tensors


@dataclass(frozen=True, slots=True)
class InferredType:
    """What the runtime infers of a tensor.

    Attributes:
        dtype: Its element type; None for strings.
        axes: The length of each axis, the name of a free axis, or None; empty for a scalar and for an unknown rank.
    """

    dtype: ir.DataType | None
    axes: tuple[int | str | None, ...]


def runtime_types(model: ir.Model, names: Collection[str], folder: Path | None = None) -> dict[str, InferredType]:
    """Return what the runtime infers of tensors of the main graph; it loads the model, and runs nothing.

    Returns nothing if the runtime refuses the model: a tensor may have a type that an output cannot have.

    Args:
        model: The model; it does not change.
        names: The tensors.
        folder: Where large weights may be put.
    """
    if not names:
        return {}
    try:
        session = open_session(serialize(show_tensors(model, names), folder), optimize=False, lean=True)
    except RequantError:
        return {}
    found = {}
    for output in session.get_outputs():
        if output.name in names and output.type in DTYPES:
            dtype = None if output.type == "tensor(string)" else ir.DataType.from_numpy(DTYPES[output.type])
            axes = tuple(axis if isinstance(axis, (int, str)) else None for axis in output.shape or ())
            found[output.name] = InferredType(dtype, axes)
    return found


def add_types(model: ir.Model, folder: Path | None = None) -> int:
    """Set the types that neither the model nor onnx has for tensors of the main graph, in place.

    Args:
        model: A model that the runtime loads.
        folder: Where large weights may be put.

    Returns:
        How many tensors got a type.
    """
    known = inferred(model)
    values = {str(v.name): v for node in model.graph for v in node.outputs if v.name}
    unknown = [name for name in values if name not in known or known[name].dtype is None]
    count = 0
    for name, found in runtime_types(model, unknown, folder).items():
        if found.dtype is None:
            continue
        count += 1
        values[name].dtype = found.dtype
        if values[name].shape is None and found.axes:
            values[name].shape = ir.Shape([axis if isinstance(axis, int) else None for axis in found.axes])
    return count
