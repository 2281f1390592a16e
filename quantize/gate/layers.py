"""The constants of each layer of a model, and the SQNR of its tensors against the float model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

import numpy as np
import onnx_ir as ir

from ... import RequantError
from ...calibration.data.samples import Sample
from ...calibration.model.session import Array, Feed, ModelSource, describe, open_session, runtime_message
from ...system.apart import PathLike
from ...transforms.graphs.queries import QDQ, computing_graphs, constant, producer_of
from ..accuracy.classes import is_float
from ..accuracy.sqnr import decibels, powers
from ..model.files import Weights, load_model, serialize
from ..model.shown import show_tensors
from ..runtime.macs import NATIVE_BLOCK_PRODUCT, NATIVE_PRODUCT, NATIVE_RECURRENT, counted_as
from .baseline import Constant, Layer

DIGITS = 16
"""Number of hex digits of a digest."""
LISTED = 1024
"""Constants with fewer bytes are not listed."""
SAMPLES = 4
"""Number of samples on which tensors are compared."""
PRODUCTS = ("Conv", "ConvTranspose", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul")
INPUT = {1: "input scale", 2: "input zero point"}
WEIGHT_ZERO, OUT, OUT_ZERO = "weight zero point", "output scale", "output zero point"
STORED = {1: "weight", 2: "weight scale", 3: WEIGHT_ZERO}
RECURRENCE = {4: "recurrence", 5: "recurrence scale", 6: "recurrence zero point"}
ROLES: Mapping[str, Mapping[int, str]] = {
    **{op: {0: "left", 1: "weight", 2: "bias"} for op in PRODUCTS},
    "QLinearConv": {**INPUT, 3: "weight", 4: "weight scale", 5: WEIGHT_ZERO, 6: OUT, 7: OUT_ZERO, 8: "bias"},
    "QLinearMatMul": {**INPUT, 3: "weight", 4: "weight scale", 5: WEIGHT_ZERO, 6: OUT, 7: OUT_ZERO},
    "QGemm": {**INPUT, 3: "weight", 4: "weight scale", 5: WEIGHT_ZERO, 6: "bias", 7: OUT, 8: OUT_ZERO},
    "MatMulIntegerToFloat": {1: "weight", 2: "input scale", 3: "weight scale", 5: WEIGHT_ZERO, 6: "bias"},
    "DynamicQuantizeMatMul": {1: "weight", 2: "weight scale", 3: WEIGHT_ZERO, 4: "bias"},
    "MatMulNBits": {1: "weight", 2: "weight scale", 3: WEIGHT_ZERO, 5: "bias"},
    "GatherBlockQuantized": {0: "weight", 2: "weight scale", 3: WEIGHT_ZERO},
    "DynamicQuantizeLSTM": {1: "weight", 2: "recurrence", 3: "bias", 8: "weight scale", 10: "recurrence scale"},
    "MatMulInteger": {1: "weight"},
    "ConvInteger": {1: "weight"},
    **{op: {1: "weight", 2: "recurrence", 3: "bias"} for op in ("LSTM", "GRU", "RNN")},
    **dict.fromkeys(NATIVE_RECURRENT, STORED | RECURRENCE | {7: "bias"}),
    NATIVE_PRODUCT: STORED | {4: "bias"},
    NATIVE_BLOCK_PRODUCT: {1: "weight", 2: "weight scale", 3: "bias"},
}
"""The roles of the inputs by operator, see `counted_as`."""


def layers_of(model: ir.Model) -> dict[str, Layer]:
    """Return the layers of a model: its nodes with their constants, without QuantizeLinear and DequantizeLinear.

    The scale and zero point of a node's output belong to the layer. The scale and zero point of a model
    input are a layer with the name of the input.
    """
    layers: dict[str, Layer] = {}
    for graph in computing_graphs(model):
        for value in graph.inputs:
            if (scales := _quantized_by(value)) and value.name:
                layers[value.name] = Layer("input", scales)
        for node in graph:
            name = _row_name(node)
            if node.op_type not in QDQ and name:
                layers[name] = Layer(node.op_type, dict(_constants(node)), tuple(dict.fromkeys(_before(node))))
    return layers


def _before(node: ir.Node) -> Iterator[str]:
    """Yield the layers that a node reads, directly or through QuantizeLinear and DequantizeLinear."""
    for value in node.inputs:
        maker = producer_of(value)
        while maker is not None and maker.op_type in QDQ:
            value = maker.inputs[0]
            maker = producer_of(value)
        if maker is not None:
            yield _row_name(maker)
        elif value is not None and value.name:
            yield value.name


def _row_name(node: ir.Node) -> str:
    """Return the name of a node, or of its first output if the node has no name."""
    return node.name or str(node.outputs[0].name if node.outputs else "")


def _constants(node: ir.Node) -> Iterator[tuple[str, Constant]]:
    """Yield the constants of a node by role."""
    roles = ROLES.get(counted_as(node.op_type, node.domain), {})
    axis = _channel_axis(node)
    for place, value in enumerate(node.inputs):
        role = roles.get(place, f"input {place}")
        maker = producer_of(value)
        if maker is not None and maker.op_type == "DequantizeLinear":
            stored, scale = (constant(each) for each in maker.inputs[:2])
            if stored is not None and scale is not None:
                yield role, _stored(stored, scale, maker, axis)
                yield f"{role} scale", _scale(scale)
        elif (tensor := constant(value)) is not None and tensor.dtype is not ir.DataType.STRING:
            yield role, _scale(tensor) if role.endswith(("scale", "zero point")) else _plain(tensor, axis)
    for value in node.outputs:
        yield from _quantized_by(value).items()


def _quantized_by(value: ir.Value) -> dict[str, Constant]:
    """Return the scale and zero point of a quantized value; empty for other values."""
    for reader in value.consumers():
        if reader.op_type == "QuantizeLinear" and (scale := constant(reader.inputs[1])) is not None:
            point = constant(reader.inputs[2]) if len(reader.inputs) > 2 else None
            zero = {} if point is None else {"output zero point": _scale(point)}
            return {"output scale": _scale(scale), **zero}
    return {}


def _channel_axis(node: ir.Node) -> int:
    """Return the axis of the output channels in a node's weight."""
    if node.op_type in ("Gemm", "QGemm"):
        return 0 if node.attributes.get_int("transB", 0) else 1
    return 1 if node.op_type == "ConvTranspose" else 0 if "Conv" in node.op_type else -1


def _stored(tensor: ir.TensorProtocol, scale: ir.TensorProtocol, maker: ir.Node, axis: int) -> Constant:
    """Return a dequantized constant."""
    values, steps = tensor.numpy(), np.asarray(scale.numpy(), np.float64)
    point = constant(maker.inputs[2]) if len(maker.inputs) > 2 else None
    along = maker.attributes.get_int("axis", 1) % values.ndim if values.ndim > 1 else 0
    wide = values.astype(np.float64)
    if steps.size == 1 or (steps.ndim == 1 and values.ndim and steps.size == values.shape[along]):  # not blockwise
        wide -= _along(np.zeros(()) if point is None else np.asarray(point.numpy(), np.float64), wide.ndim, along)
        wide *= _along(steps, wide.ndim, along)
    return Constant(_type(tensor), _digest(values), _norm(wide), _dead(wide, axis))


def _along(values: Array, rank: int, axis: int) -> Array:
    """Return one value per channel in a shape that broadcasts."""
    return values.reshape([-1 if i == axis % max(rank, 1) else 1 for i in range(rank)]) if values.ndim == 1 else values


def _plain(tensor: ir.TensorProtocol, axis: int) -> Constant:
    """Return a constant with its values."""
    values = tensor.numpy()
    number = values.dtype.kind in "biuf"
    return Constant(
        _type(tensor), _digest(values), _norm(values) if number else 0.0, _dead(values, axis) if number else 0
    )


def _scale(tensor: ir.TensorProtocol) -> Constant:
    """Return a constant with the mean of scales or zero points."""
    values = tensor.numpy()
    return Constant(_type(tensor), _digest(values), float(np.mean(values, dtype=np.float64)) if values.size else 0.0)


def _type(tensor: ir.TensorProtocol) -> str:
    """Return the name of an element type."""
    return ir.DataType(tensor.dtype).name.lower()


def _digest(values: Array) -> str:
    """Return a digest of an array."""
    digest = hashlib.blake2b(repr(values.shape).encode(), digest_size=DIGITS // 2)
    digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def _norm(values: Array) -> float:
    """Return the root of the sum of squares; 0 if it is not finite."""
    flat = values.reshape(-1).astype(np.float64)
    norm = float(np.sqrt(np.dot(flat, flat)))
    return norm if np.isfinite(norm) else 0.0


def _dead(values: Array, axis: int) -> int:
    """Return the number of channels with only zeros."""
    if values.ndim < 2:
        return 0
    rest = tuple(i for i in range(values.ndim) if i != axis % values.ndim)
    return int((~values.any(axis=rest)).sum())


def stored_bytes(model: ir.Model) -> dict[str, int]:
    """Return the bytes of each constant with at least `LISTED` bytes, by name."""
    sizes = {
        str(value.name): value.const_value.nbytes
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None
    }
    return {name: size for name, size in sizes.items() if size >= LISTED}


def opset_of(model: ir.Model) -> int:
    """Return the opset of a model."""
    return model.opset_imports.get("", 0)


# ------------------------------------------------------------------------------------------------ noise of tensors


def tensor_noise(float_model: PathLike, int8_model: PathLike, samples: Iterable[Sample]) -> dict[str, float]:
    """Return the SQNR of the outputs of nodes against the float model, in dB, by name of the node.

    Tensors with the same name in both models are compared; a quantized tensor after its DequantizeLinear. The runtime
    optimizes nothing, so that all tensors exist. Models whose weights do not fit twice in memory have no result.

    Args:
        float_model: Path of the float model.
        int8_model: Path of the INT8 model.
        samples: Samples; the first `SAMPLES` are run.

    Raises:
        RequantError: A model cannot be loaded, or fails.
    """
    models = [load_model(path) for path in (float_model, int8_model)]
    if Weights.of(models[0]).large:
        return {}
    outputs = [_node_outputs(model) for model in models]
    common = {name: dequantized for name, (_, dequantized) in outputs[1].items() if name in outputs[0]}
    runs = [
        _runner(serialize(show_tensors(model, names)))
        for model, names in zip(models, (common, common.values()), strict=True)
    ]
    sums: dict[str, tuple[float, float]] = {}
    for sample in islice(samples, SAMPLES):
        before, after = (run(sample.feed) for run in runs)
        for name, dequantized in common.items():
            if is_float(before[name]) and is_float(after[dequantized]):
                signal, noise = powers(before[name], after[dequantized])
                old = sums.get(name, (0.0, 0.0))
                sums[name] = (old[0] + signal, old[1] + noise)
    return {outputs[1][name][0]: decibels(*both) for name, both in sums.items()}


def _runner(model: ModelSource) -> Callable[[Feed], dict[str, Array]]:
    """Return a model as a function of a feed; the runtime optimizes nothing."""
    session = open_session(model, optimize=False)
    names = [output.name for output in session.get_outputs()]

    def run(feed: Feed) -> dict[str, Array]:
        try:
            return dict(zip(names, session.run(None, dict(feed)), strict=True))
        except Exception as error:  # the runtime's exceptions share no base class of their own
            raise RequantError(f"{describe(model)}: the model fails: {runtime_message(error)}") from error

    return run


def _node_outputs(model: ir.Model) -> dict[str, tuple[str, str]]:
    """Return the node and the dequantized name of each tensor of the main graph by name."""
    return {
        value.name: (_row_name(node), _dequantized_name(value))
        for node in model.graph
        if node.op_type not in QDQ
        for value in node.outputs
        if value.name
    }


def _dequantized_name(value: ir.Value) -> str:
    """Return the name of a value; for a quantized value, the name of the output of its DequantizeLinear."""
    for quantize in value.consumers():
        if quantize.op_type == "QuantizeLinear":
            for reader in quantize.outputs[0].consumers():
                if reader.op_type == "DequantizeLinear" and reader.outputs[0].name:
                    return reader.outputs[0].name
    return str(value.name)
