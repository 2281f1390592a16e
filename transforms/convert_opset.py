"""Raise a model's opset."""

from __future__ import annotations

from math import inf

import onnx_ir as ir

from .graphs.queries import constant, is_standard, node_name
from .graphs.rewriter import discard, quiet, unused_name
from .inline_functions import inline_functions
from .pipelines.verify import VerifyError, signature, verify
from .registry import Change, TransformError, transform

SCAN_LOSES_BATCH = 9  # the first opset whose Scan has no batch axis
RESIZE_CHOOSES = 11  # the first opset whose Resize has attributes for the sampling positions
RESIZE_OMITS = 13  # the first opset whose Resize may lack the region and the scales


@transform("convert_opset")
def convert_opset(model: ir.Model, *, to: int = 13) -> Change:
    """Convert a model of an older opset to a newer one, operator by operator.

    Before:  opset 11: y = Squeeze(x, axes=[0])
    After:   opset 13: y = Squeeze(x, [0])
    13 is the first opset whose DequantizeLinear has an axis, which per-channel weights require. Model-local functions
    are inlined first, because the converter loses their calls.
    Nodes that the converter makes get the names of their first outputs.
    Left alone: models with this opset or a newer one; operators of other domains.

    Options:
        to: The target opset.

    Raises:
        TransformError: An operator has no conversion (the message names the operator or its node), or the model has
            functions that `inline_functions` leaves alone.
    """
    version = model.opset_imports.get("", to)
    if version >= to:
        return Change()
    if version < SCAN_LOSES_BATCH <= to and any(is_standard(n, "Scan") for n in model.graph.all_nodes()):
        raise TransformError(f"opset {version} cannot be converted to {to}: its Scan has a batch axis")
    inline_functions(model)
    if model.functions:
        kept = ", ".join(sorted(f"{domain}.{name}" for domain, name, _ in model.functions))
        raise TransformError(f"opset {version} cannot be converted to {to}: the model has functions, {kept}")
    import onnx.version_converter

    try:
        with quiet():
            converted = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), to))
    except Exception as error:  # the converter raises the exceptions of its C++ code
        raise TransformError(
            f"opset {version} cannot be converted to {to}: {' '.join(str(error).split())[:300]}"
        ) from error
    for old, new in zip(model.graph.outputs, converted.graph.outputs, strict=True):
        new.type, new.shape = old.type, old.shape  # the converter infers shapes
    for name, weight in model.graph.initializers.items():
        if name in converted.graph.initializers:  # keeps the tensor lazy, with the folder of its data
            converted.graph.initializers[name].const_value = weight.const_value
    for node in converted.graph.all_nodes():
        if is_standard(node, "Resize"):
            if version < RESIZE_CHOOSES <= to:
                _keep_sampling(node)
            if to >= RESIZE_OMITS:
                _omit_empty(node)
    _name_nodes(converted.graph)
    try:  # the converter keeps attributes that the new opset lacks, and wrong shapes of a Scan
        verify(converted, like=signature(model))
    except VerifyError as error:
        raise TransformError(f"opset {version} cannot be converted to {to}: {error}") from error
    model.graph = converted.graph
    model.functions.clear()
    model.functions.update(converted.functions)
    model.ir_version = max(model.ir_version, converted.ir_version, 8)
    return Change(applied=1)


def _keep_sampling(resize: ir.Node) -> None:
    """Set the attributes of a converted Resize to the sampling positions of opset 10; the defaults differ.

    Before opset 11, Resize divides coordinates by the scale. ``nearest`` then rounds down when it enlarges and up when
    it shrinks, as ONNX Runtime computes it (``GetNearestPixelFunction`` of its upsample kernel).

    Raises:
        TransformError: The Resize enlarges one axis and shrinks another, or its scales are computed.
    """
    resize.attributes["coordinate_transformation_mode"] = ir.AttrString("coordinate_transformation_mode", "asymmetric")
    if resize.attributes.get_string("mode", "nearest") != "nearest":
        return
    scales = constant(resize.inputs[2])
    least, most = (0.0, inf) if scales is None else (scales.numpy().min(), scales.numpy().max())
    if least < 1 < most:
        raise TransformError(
            f"node {resize.name!r} (Resize) may round up and down, which opset {RESIZE_CHOOSES} cannot express"
        )
    resize.attributes["nearest_mode"] = ir.AttrString("nearest_mode", "ceil" if least < 1 else "floor")


def _omit_empty(resize: ir.Node) -> None:
    """Omit the empty inputs of a converted Resize; before opset 13 an empty tensor stands for a missing input.

    From opset 13 on, the runtime refuses empty scales beside sizes if a caller may override them.
    """
    for index, value in enumerate(resize.inputs[1:], 1):
        tensor = constant(value) if value is None or not value.is_initializer() else value.const_value
        if tensor is not None and tensor.size == 0:
            resize.replace_input_with(index, None)
            discard(value)


def _name_nodes(graph: ir.Graph) -> None:
    """Give each node without a name that of its first output, which names its unit."""
    taken = {node.name for node in graph.all_nodes() if node.name}
    for node in graph.all_nodes():
        if not node.name:
            node.name = unused_name(taken, node_name(node))
