"""Raise a model's opset."""

from __future__ import annotations

import onnx_ir as ir

from .graph import quiet
from .registry import Change, TransformError, transform


@transform("convert_opset")
def convert_opset(model: ir.Model, *, to: int = 13) -> Change:
    """Convert a model of an older opset to a newer one, operator by operator.

    Before:  opset 11: y = Squeeze(x, axes=[0])
    After:   opset 13: y = Squeeze(x, [0])
    13 is the first opset whose DequantizeLinear has an axis, which per-channel weights need.
    Left alone: models of that opset or a newer one, and operators of other domains.

    Options:
        to: The opset wanted.

    Raises:
        TransformError: An operator has no conversion; the message names it.
    """
    version = model.opset_imports.get("", to)
    if version >= to:
        return Change()
    import onnx.version_converter

    try:
        with quiet():
            converted = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), to))
    except Exception as error:  # the converter raises what its C++ code threw
        raise TransformError(
            f"opset {version} cannot be converted to {to}: {' '.join(str(error).split())[:300]}"
        ) from error
    for old, new in zip(model.graph.outputs, converted.graph.outputs, strict=True):
        new.type, new.shape = old.type, new.shape if old.shape is None else old.shape  # the converter infers shapes
    model.graph = converted.graph
    model.functions.clear()
    model.functions.update(converted.functions)
    model.ir_version = max(model.ir_version, converted.ir_version, 8)
    return Change(applied=1)
