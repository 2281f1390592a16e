"""Replace a mean over the spatial axes of an image by a global average pooling."""

from __future__ import annotations

import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import axes_of, code_graphs, is_standard
from .graphs.rewriter import discard, names, replace_node, unused_name
from .registry import Change, transform

IMAGES = (4, 5)


@transform("reduce_mean_to_pool", after=("fold_constants",))
def reduce_mean_to_pool(model: ir.Model) -> Change:
    """Replace a ReduceMean over all spatial axes by a GlobalAveragePool.

    Before:  y = ReduceMean(x, axes=[2, 3]), keepdims 1;  z = ReduceMean(x, axes=[2, 3]), keepdims 0;  x (N, C, H, W)
    After:   y = GlobalAveragePool(x);                    z = Flatten(GlobalAveragePool(x))
        GlobalAveragePool has an integer kernel, ReduceMean has none.
    Left alone: tensors of a rank other than 4 or 5, or of unknown rank (``not-an-image``), other axes
        (``other-axes``), computed axes (``dynamic``), other types than float32 (``not-float32``).
    """
    change = Change()
    known, taken = Known(model), names(model)
    for node in [node for graph in code_graphs(model) for node in graph]:
        if not is_standard(node, "ReduceMean") or any(a.is_ref() for a in node.attributes.values()):
            continue
        source = node.inputs[0]
        shape, dtype = known.shape(source), known.dtype(source)
        axes = axes_of(node)
        if shape is None or len(shape) not in IMAGES:
            change.skip("not-an-image")
        elif dtype is not ir.DataType.FLOAT:
            change.skip("not-float32")
        elif axes is None:
            change.skip("dynamic")
        elif sorted(axis % len(shape) for axis in axes) != list(range(2, len(shape))):
            change.skip("other-axes")
        else:
            _replace(node, taken)
            change.applied += 1
    return change


def _replace(mean: ir.Node, taken: set[str]) -> None:
    """Replace a mean by the pooling, followed by a Flatten if the mean removes the axes."""
    inputs = tuple(mean.inputs)
    pool = ir.node("GlobalAveragePool", mean.inputs[:1], name=mean.name)
    if mean.attributes.get_int("keepdims", 1):
        replace_node(mean, pool)
    else:
        stem = mean.name or str(mean.outputs[0].name)
        pool.outputs[0].name = unused_name(taken, f"{stem}/pooled")
        if mean.outputs[0].type is not None:
            pool.outputs[0].type = mean.outputs[0].type
        flatten = ir.node("Flatten", pool.outputs, {"axis": 1}, name=unused_name(taken, f"{stem}/flatten"))
        mean.graph.insert_before(mean, [pool])  # type: ignore[union-attr]
        replace_node(mean, flatten)
    discard(*inputs[1:])
