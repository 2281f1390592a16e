"""Fuse the two operators of a LeakyRelu."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import computing_nodes, producer_of, scaled
from .graphs.rewriter import remove_if_unread, replace_node
from .merge_clips import CLIPPED
from .registry import Change, transform

LEAKS_DOUBLES = 16  # the opset from which the runtime has a kernel of LeakyRelu for float64


@transform("fuse_leaky_relu", after=("fold_constants",))
def fuse_leaky_relu(model: ir.Model) -> Change:
    """Replace the larger one of x and a multiple of x by a LeakyRelu.

    Before:  y = Max(x, Mul(x, a)), a constant with one element, 0 < a < 1;  z = Max(x, Div(x, b)), b > 1
    After:   y = LeakyRelu(x), alpha a;  z = LeakyRelu(x), alpha 1 / b
        LeakyRelu has an integer kernel, and the runtime fuses it with a convolution before it. NaN and infinite values
        stay as they are.
    Left alone: other factors (``other-slope``); a factor with more axes than x; integer tensors, tensors of unknown
        type, and float64 below opset 16, for which the runtime has no LeakyRelu.
    """
    change = Change()
    known, doubles = Known(model), model.opset_imports.get("", 0) >= LEAKS_DOUBLES
    for node in computing_nodes(model, "Max"):
        result = node.outputs[0]
        dtype = known.dtype(result)
        if len(node.inputs) != 2 or dtype not in CLIPPED or (dtype is ir.DataType.DOUBLE and not doubles):
            continue
        for x, product in (node.inputs, node.inputs[::-1]):
            multiple = producer_of(product)
            source, slope = scaled(multiple, known.rank(x) or 0) or (None, 0.0)
            if source is None or source is not x:
                continue
            if not 0 < slope < 1:
                change.skip("other-slope")
                break
            replace_node(node, ir.node("LeakyRelu", [source], {"alpha": slope}, name=node.name))
            remove_if_unread(multiple)
            change.applied += 1
            break
    return change
