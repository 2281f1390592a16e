"""Types that onnx cannot infer, behind operators of other domains for instance, asked of the runtime."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ... import RequantError
from ...calibration.session import DTYPES, open_session
from ...transforms.graph import inferred
from .files import serialize
from .shown import show_tensors


def add_types(model: ir.Model, folder: Path | None = None) -> int:
    """Give the tensors of the main graph whose type neither the model nor onnx tells the runtime's, in place.

    Args:
        model: A model that the runtime loads.
        folder: Where large weights may be put.

    Returns:
        How many tensors got a type.
    """
    known = inferred(model)
    values = {str(v.name): v for node in model.graph for v in node.outputs if v.name}
    unknown = [name for name in values if name not in known or known[name].dtype is None]
    if not unknown:
        return 0
    try:
        session = open_session(serialize(show_tensors(model, unknown), folder), optimize=False, lean=True)
    except RequantError:  # a tensor of a type that is no output; then some operators stay float
        return 0
    count = 0
    for output in session.get_outputs():
        if output.name in unknown and output.type in DTYPES and output.type != "tensor(string)":
            value = values[output.name]
            value.dtype = ir.DataType.from_numpy(DTYPES[output.type])
            if value.shape is None and output.shape:
                value.shape = ir.Shape([axis if isinstance(axis, int) else None for axis in output.shape])
            count += 1
    return count
