"""Copies of a model that are changed and run: loaded without external data, typed, and opened as sessions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import RequantError
from .bodies import tensors_of
from .session import LARGE, ModelSource, Serialized, describe, open_session

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxruntime import InferenceSession

OBSERVABLE = ("tensor(float)", "tensor(float16)", "tensor(double)")
"""The types of tensors that can be observed."""
SMALL = 2**10
"""Smaller tensors (in bytes) always stay inside the model, because shape inference may need their values."""
SHARED = ("FLOAT", "FLOAT16", "DOUBLE", "INT8", "UINT8", "INT32", "INT64")
"""Types of weights that the runtime accepts as arrays."""


def load_copy(model: ModelSource) -> tuple[ir.Model, Path | None]:
    """Read a model without its external data. Return the model and the folder of the external data.

    Raises:
        RequantError: The model cannot be read.
    """
    import onnx
    import onnx_ir as ir

    from .file_tensor import read_from_files
    from .onnx_files import read_proto

    try:
        if isinstance(model, bytes):
            model = Serialized(model)
        if isinstance(model, Serialized):
            return ir.from_proto(onnx.load_model_from_string(model.data)), model.folder
        copy, folder = ir.from_proto(read_proto(model)), Path(model).parent
        read_from_files(copy, folder.absolute())
        return copy, folder
    except RequantError:
        raise
    except Exception as error:  # the exceptions of protobuf, onnx_ir and the file system have no common base class
        open_session(model)  # raises the same error as other commands
        raise RequantError(f"{describe(model)}: cannot be read: {' '.join(str(error).split())}") from error


def infer_types(copy: ir.Model, names: Iterable[str], *, bodies: bool = False) -> None:
    """Infer missing types and shapes of named tensors of a main graph.

    Other tensors do not change, because onnx-ir's pass confuses the type of a sequence with that of its tensors. With
    `bodies` the tensors in bodies are inferred too.
    """
    from onnx_ir.passes.common import ShapeInferencePass

    values = tensors_of(copy.graph)
    named = {name: values[name] for name in names}
    if not bodies and all(value.type is not None and value.shape is not None for value in named.values()):
        return
    logger = logging.getLogger("onnx_ir")  # it logs every value that the pass does not change
    level = logger.level
    logger.setLevel(logging.ERROR)
    inferred_copy = copy.clone()
    try:
        # values are not propagated: they decide no type and no rank, and a few nodes can make gigabytes of them
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(inferred_copy)
    finally:
        logger.setLevel(level)
    pairs = [(named, tensors_of(inferred_copy.graph))]
    if bodies:
        inner = zip(copy.graph.subgraphs(), inferred_copy.graph.subgraphs(), strict=True)
        pairs += [(tensors_of(body), tensors_of(other)) for body, other in inner]
    for tensors, inferred in pairs:
        for name, value in tensors.items():
            value.type = value.type or inferred[name].type
            value.shape = value.shape if value.shape is not None else inferred[name].shape


def types_of(copy: ir.Model, folder: Path | None, values: Mapping[str, ir.Value], *, few: bool) -> dict[str, str]:
    """Return the runtime's name of each tensor's type. The runtime infers types that are missing in the model."""
    import onnx_ir as ir

    types = {}
    unknown = []
    for name, value in values.items():
        if value.dtype is None or not isinstance(value.type, ir.TensorType):
            unknown.append(value)
        else:
            types[name] = f"tensor({value.dtype.name.lower()})"
    if unknown:
        outputs = list(copy.graph.outputs)
        copy.graph.outputs.extend(unknown)
        session = open_copy(serialized(copy, folder), is_lean(copy, few=few), optimize=False)
        types |= {value.name: value.type for value in session.get_outputs() if value.name in values}
        copy.graph.outputs.clear()
        copy.graph.outputs.extend(outputs)
    return types


def activations(model: ModelSource) -> tuple[str, ...]:
    """Return the float tensors of a main graph that depend on the inputs, in the order of the graph.

    Raises:
        RequantError: The model cannot be read.
    """
    import onnx_ir as ir

    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)  # bodies may read any tensor outside
    copy, folder = load_copy(model)
    graph = copy.graph
    infer_types(copy, tensors_of(graph))
    fed = [value for value in graph.inputs if value.name and value.name not in graph.initializers]
    live = set(fed)
    for node in graph:
        nested = any(attribute.type in graphs for attribute in node.attributes.values())
        if nested or live.intersection(node.inputs):
            live.update(node.outputs)
    produced = (value for node in graph for value in node.outputs)
    values = {value.name: value for value in (*fed, *produced) if value.name and value in live}
    types = types_of(copy, folder, values, few=True)
    return tuple(name for name in values if types.get(name) in OBSERVABLE)


def is_lean(copy: ir.Model, *, few: bool) -> bool:
    """Return whether a session should compute on the weights in their files."""
    import onnx_ir as ir

    tensors = (value.const_value for graph in copy.graphs() for value in graph.initializers.values())
    return few and sum(tensor.nbytes for tensor in tensors if isinstance(tensor, ir.ExternalTensor)) > LARGE


def serialized(copy: ir.Model, folder: Path | None) -> Serialized:
    """Serialize a model for the runtime. External data stay in `folder`; large weights are passed as arrays.

    Weights that nothing reads stay inside: the runtime removes them, and then refuses an array for them.
    """
    import onnx_ir as ir

    shared = {}
    for name, value in copy.graph.initializers.items():
        tensor = value.const_value if value.uses() or value.is_graph_output() else None
        inside = tensor is not None and not isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= SMALL
        if tensor is not None and inside and tensor.dtype.name in SHARED:
            shared[name] = tensor
    weights = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in shared.items()}
    for name, tensor in shared.items():
        copy.graph.initializers[name].const_value = ir.ExternalTensor(
            "memory", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(weights[name].shape), name=name
        )
    data = ir.to_proto(copy).SerializeToString()
    for name, tensor in shared.items():
        copy.graph.initializers[name].const_value = tensor
    return Serialized(data, folder, weights=weights)


def open_copy(source: Serialized, lean: bool, *, optimize: bool = True, arena: bool = True) -> InferenceSession:
    """Open a session with one thread, because the number of threads changes the rounding of the observed values."""
    try:
        return open_session(source, threads=1, optimize=optimize, lean=lean, arena=arena)
    except RequantError:  # an optimization may remove a tensor that is an output
        if not optimize:
            raise
        return open_session(source, threads=1, optimize=False, lean=lean, arena=arena)
