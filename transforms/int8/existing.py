"""Models that contain quantization already: keep its parameters and complete it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ... import NATIVE_DOMAIN
from ..graphs.queries import MS, constant, producer_of, sole_reader
from ..graphs.rewriter import add_initializer, insert_before, names, remove, remove_if_unread, replace, unused_name
from .ops import RELUS, row_of
from .qlinear import equal_parameters
from .qparams import Array, QParams, dequantize
from .reasons import INTEGER, QUANTIZED_BEFORE

COMPUTE = {"Conv": (1, 2), "Gemm": (1, 2), "MatMul": (1,)}
VERSION_KEY = "requant.version"
"""The key in the metadata of a model that `requant quantize` has written."""
MADE_KEY = "requant.made"
"""The key of what is needed to make the model again; a transform removes it."""
QUANTIZED = (np.dtype(np.uint8), np.dtype(np.int8))


def is_finished(model: ir.Model) -> bool:
    """Whether `requant quantize` wrote a model with integers; its operators have the forms that run fastest."""
    return VERSION_KEY in model.metadata_props and any(map(_holds_integers, model.graph.all_nodes()))


def _holds_integers(node: ir.Node) -> bool:
    """Whether a node computes integers, or converts from or to integers."""
    row = row_of(node)
    return node.domain == NATIVE_DOMAIN or (row is not None and row.why in (INTEGER, QUANTIZED_BEFORE))


def given_params(model: ir.Model) -> dict[str, QParams]:
    """Return the scale and zero point of the float tensors that have a pair in the model already, by tensor name."""
    params_of = {}
    for graph in model.graphs():
        for node in graph:
            params = _params(node)
            if params is None or constant(node.inputs[0]) is not None:
                continue
            tensor = node.inputs[0] if node.op_type == "QuantizeLinear" else node.outputs[0]
            params_of[str(tensor.name)] = params  # type: ignore[union-attr]
    return params_of


def is_linear(node: ir.Node | None, op_type: str) -> bool:
    """Whether `node` has the type `op_type` and is of the standard or the runtime's domain."""
    return node is not None and node.op_type == op_type and node.domain in ("", MS)


def _params(node: ir.Node) -> QParams | None:
    """Return the constant per-tensor parameters of a QuantizeLinear or DequantizeLinear of 8 bits, else None."""
    if not (is_linear(node, "QuantizeLinear") or is_linear(node, "DequantizeLinear")):
        return None
    scale, point = constant(node.inputs[1]), zero_point_of(node)
    if scale is None or point is None or scale.size != 1 or scale.dtype is not ir.DataType.FLOAT:
        return None
    point = point.reshape(())
    return QParams(scale=scale.numpy().reshape(()), zero_point=point) if point.dtype in QUANTIZED else None


def zero_point_of(node: ir.Node) -> Array | None:
    """Return the constant zero point of a QuantizeLinear or DequantizeLinear, None if it is computed.

    A missing zero point is 0, in uint8 for a QuantizeLinear and in the type of the data for a DequantizeLinear.
    """
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        zero = constant(node.inputs[2])
        return None if zero is None else zero.numpy()
    scale = constant(node.inputs[1])
    data = node.inputs[0] if node.op_type == "DequantizeLinear" else node.outputs[0]
    kind = data.dtype if data is not None else None
    if kind is None and node.op_type == "DequantizeLinear" and (tensor := constant(node.inputs[0])) is not None:
        kind = ir.DataType(tensor.dtype)
    dtype = np.dtype(np.uint8) if node.op_type == "QuantizeLinear" else kind.numpy() if kind is not None else None
    return None if dtype is None or scale is None else np.zeros(tuple(scale.shape.numpy()), dtype)


def insert_product(pair: ir.Node, taken: set[str], scale: ir.Value, zero: ir.Value | None = None) -> list[ir.Node]:
    """Insert Cast, Sub and Mul in front of a DequantizeLinear; return them. The last one has the same result.

    Before:  W = DequantizeLinear(W8, scale, zero)
    After:   W = Mul(Sub(Cast(W8), zero), scale); without a zero point Mul(Cast(W8), scale)
    Of constants, the runtime computes the product when it loads a model, and a DequantizeLinear in each run.

    Args:
        pair: The DequantizeLinear, which stays.
        taken: The names in use.
        scale: The scale, in a shape that broadcasts.
        zero: The zero point in float32, likewise; None for 0.
    """
    stem = str(pair.outputs[0].name)
    made = [insert_before(pair, taken, "Cast", pair.inputs[:1], {"to": ir.DataType.FLOAT.value}, stem=f"{stem}/whole")]
    if zero is not None:
        made.append(insert_before(pair, taken, "Sub", [made[-1], zero], stem=f"{stem}/shifted"))
    made.append(insert_before(pair, taken, "Mul", [made[-1], scale], stem=f"{stem}/product"))
    return [node for value in made if (node := value.producer()) is not None]


def release_weights(model: ir.Model) -> int:
    """Replace dequantized weights by float constants where the operator computes in float, in place.

    Before:  y = Conv(x, DequantizeLinear(int8 W)), with a float x or a result that nothing quantizes
    After:   y = Conv(x, W)
    Quantized weights alone save no time. A float operator can be quantized as a whole; its weights get the same
    integers again if each channel fills the range.

    Returns:
        The number of constants that became float.
    """
    count, taken = 0, names(model)
    for graph in model.graphs():
        for node in list(graph):
            if not node.domain and node.op_type in COMPUTE and not _computes_in_integers(node):
                count += sum(_release(node, index, taken) for index in COMPUTE[node.op_type])
    return count


def _computes_in_integers(node: ir.Node) -> bool:
    """Whether the runtime fuses the pairs around an operator into an integer kernel."""
    if not node.inputs or not is_linear(node.inputs[0].producer() if node.inputs[0] else None, "DequantizeLinear"):
        return False
    reader = sole_reader(node.outputs[0])
    if reader is not None and reader.op_type in RELUS and not reader.domain:
        reader = sole_reader(reader.outputs[0])
    return node.op_type != "Conv" or is_linear(reader, "QuantizeLinear")


def released_name(dequantized: ir.Value) -> str:
    """Return the name of the float constant that `release_weights` puts in the place of a dequantized weight."""
    return f"{dequantized.name}/float"


def _release(node: ir.Node, index: int, taken: set[str]) -> int:
    """Replace input `index` of a node, if it is a dequantized constant, by a float constant; return 1 or 0."""
    value = node.inputs[index] if index < len(node.inputs) else None
    dq = producer_of(value)
    if value is None or dq is None or not is_linear(dq, "DequantizeLinear"):
        return 0
    data, scale, zero = constant(dq.inputs[0]), constant(dq.inputs[1]), zero_point_of(dq)
    if data is None or scale is None or zero is None or "block_size" in dq.attributes:
        return 0
    if not isinstance(node.graph, ir.Graph) or scale.dtype is not ir.DataType.FLOAT:
        return 0
    axis = dq.attributes.get_int("axis", 1) if len(scale.shape) else None
    params = QParams(scale=scale.numpy(), zero_point=zero, axis=axis)
    array = dequantize(data.numpy(), params)
    node.replace_input_with(index, add_initializer(node.graph, unused_name(taken, released_name(value)), array))
    remove_if_unread(dq)
    return 1


def drop_round_trips(model: ir.Model, *, mixed_domains: bool = True) -> int:
    """Remove each QuantizeLinear of a dequantized tensor with equal parameters, in place; return how many.

    Before:  q' = QuantizeLinear(DequantizeLinear(q, s, z), s, z)
    After:   q

    Args:
        model: The model.
        mixed_domains: Whether one node may be of the standard and the other one of the runtime's domain.
    """
    count = 0
    for graph in model.graphs():
        for node in list(graph):
            dq = producer_of(node.inputs[0]) if node.inputs else None
            source = dq.inputs[0] if dq is not None and dq.graph is graph else None
            if dq is None or source is None or not _undoes(node, dq) or not (mixed_domains or node.domain == dq.domain):
                continue
            replace(node.outputs[0], source)
            remove(node)
            remove_if_unread(dq)
            count += 1
    return count


def _undoes(quantize: ir.Node, dequantize: ir.Node) -> bool:
    """Whether the result of a QuantizeLinear is equal to the integers that the DequantizeLinear before it reads."""
    if not is_linear(quantize, "QuantizeLinear") or not is_linear(dequantize, "DequantizeLinear"):
        return False
    zeros = [zero_point_of(node) for node in (quantize, dequantize)]
    return (
        equal_parameters(quantize.inputs[1:], dequantize.inputs[1:])
        and (zeros[0] is None or zeros[1] is None or zeros[0].dtype == zeros[1].dtype)
        and quantize.attributes.get_int("axis", 1) == dequantize.attributes.get_int("axis", 1)
        and not quantize.outputs[0].is_graph_output()
    )
