"""Extract a part of a model."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedOpsetsPass

from .registry import Change, TransformError, transform
from .strip_unused_nodes import strip_unused_nodes


@transform("extract_subgraph", changes_io=True)
def extract_subgraph(model: ir.Model, *, inputs: tuple[str, ...] = (), outputs: tuple[str, ...] = ()) -> Change:
    """Reduce the model to the part of the graph between the named tensors.

    Before:  t = Relu(x); u = Conv(t, W); y = Softmax(u)
    After:   u = Conv(t, W), with input t and output u, for (inputs=t, outputs=u)
        The same as `strip_unused_nodes` with required outputs; it also removes unused functions and operator sets.
    Left alone: the inputs that the outputs need, if `inputs` is empty; the bodies of control flow.

    Options:
        inputs: The inputs of the new model, in order.
        outputs: The outputs of the new model, in order.

    Raises:
        UnknownNameError: The graph has no tensor with one of the names.
        TransformError: `outputs` is empty, the type of a new input or output is not known, or an output cannot be
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
