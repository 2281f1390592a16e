"""Show inner tensors of a model as outputs."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


def show_tensors(model: ir.Model, names: Iterable[str]) -> ir.Model:
    """Return a copy of a model with further outputs.

    Args:
        model: The model; it does not change.
        names: Tensors of the main graph. Inputs, outputs and names that are not in the graph are ignored.
    """
    copy = model.clone()
    values = {str(value.name): value for node in copy.graph for value in node.outputs if value.name}
    taken = {str(value.name) for value in (*copy.graph.inputs, *copy.graph.outputs)}
    wanted = (name for name in dict.fromkeys(names) if name in values and name not in taken)
    copy.graph.outputs.extend(values[name] for name in wanted)
    return copy
