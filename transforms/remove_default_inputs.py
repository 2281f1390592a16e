"""Make initializers that are also inputs of the graph constants."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveInitializersFromInputsPass

from .graphs.rewriter import quiet
from .registry import Change, transform


@transform("remove_default_inputs", changes_io=True)
def remove_default_inputs(model: ir.Model) -> Change:
    """Remove every initializer from the inputs of the graph.

    Before:  graph (x, w, b) with the initializers w and b: y = Conv(x, w, b)
    After:   graph (x) with the initializers w and b
        Before IR version 4 each initializer had to be an input, and many exporters still list them. A caller may
        override such a value, so that no constant can be folded, and no weight can become int8.
    Left alone: a list that holds only scalars, as a threshold that a caller may set (``scalars``).
    """
    listed = [value for value in model.graph.inputs if value.is_initializer()]
    tensors = [value for value in listed if value.const_value is not None and len(value.const_value.shape)]
    change = Change(applied=len(listed) if tensors else 0)
    if change.applied:
        with quiet():
            RemoveInitializersFromInputsPass()(model)
    elif listed:
        change.skip("scalars")
    return change
