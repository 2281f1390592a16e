"""Cut a part out of a model."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedOpsetsPass

from .registry import Change, TransformError, transform
from .strip_unused_nodes import strip_unused_nodes


@transform("extract_subgraph", changes_io=True)
def extract_subgraph(model: ir.Model, *, inputs: tuple[str, ...] = (), outputs: tuple[str, ...] = ()) -> Change:
    """Make the part of the graph between the tensors named a model of its own.

    Before:  t = Relu(x); u = Conv(t, W); y = Softmax(u)
    After:   u = Conv(t, W), with input t and output u, for (inputs=t, outputs=u)
        It is `strip_unused_nodes` that wants to be told where to cut, and drops functions and operator sets that
        nothing needs any more.
    Left alone: without inputs, those that the outputs need; what is inside control flow.

    Options:
        inputs: The inputs that the model shall have, in this order.
        outputs: The outputs that the model shall have, in this order.

    Raises:
        UnknownNameError: No tensor of the graph has one of the names.
        TransformError: No output is named, the type of a new input or output is not known, or an output cannot be
            computed from the inputs.
    """
    if not outputs:
        raise TransformError("name the tensors to extract: extract_subgraph(outputs=...)")
    change = strip_unused_nodes(model, inputs=inputs, outputs=outputs)
    before = len(model.functions) + len(model.opset_imports)
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    RemoveUnusedOpsetsPass()(model)
    change.applied += before - len(model.functions) - len(model.opset_imports)
    return change
