"""The values of the constants of a plan's units after they are rounded to integers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from ...calibration.model.session import Array
from ...transforms.graphs.queries import constant, made_by, nodes_by_name, producer_of
from ...transforms.int8.forms import lookups_of, with_lookups
from ...transforms.int8.insert_qdq import constant_operands
from ...transforms.int8.ops import OPS
from ...transforms.int8.plan import Impl, Plan, Unit
from ...transforms.int8.qparams import QParams, Scheme, dequantize, quantize, symmetric_s8
from ...transforms.int8.recurrent import STATES, keeps_input
from ...transforms.int8.weights import WeightWriter, turned
from ...transforms.int8.writer import Writer


def integer_constants(
    model: ir.Model,
    plan: Plan,
    qparams: Mapping[str, QParams],
    *,
    scheme: Scheme | None = None,
    means: Mapping[str, Array] | None = None,
    exact: bool = True,
    units: Collection[str] | None = None,
) -> dict[str, dict[int, Array]]:
    """Return the dequantized values of the integer constants of a plan's units: weights, biases and operands.

    Arguments as of `insert_qdq`; of the units with names in `units`, if given. A bias that an operator of its own adds
    behind a MatMul is left out.
    """
    scheme = scheme or Scheme()
    copy = model.clone()
    writer = WeightWriter(
        Writer.of(copy, scheme),
        scheme.weight_params,
        means=means or {},
        exact=exact,
        blocks=scheme.blocks,
    )
    nodes = nodes_by_name(copy)
    qparams = with_lookups(lookups_of(plan, nodes), qparams)
    found = {}
    for unit in plan.units if units is None else (each for each in plan.units if each.name in units):
        node = nodes[unit.nodes[0]]
        if plan.impl(unit).reads_u8:
            found[unit.name] = _static(node, unit, qparams[plan.root(unit.inputs[0])], scheme, writer)
        elif plan.impl(unit).int8:
            found[unit.name] = _stored(node, unit, plan.impl(unit), writer)
    return {name: arrays for name, arrays in found.items() if arrays}


def _static(node: ir.Node, unit: Unit, x: QParams, scheme: Scheme, writer: WeightWriter) -> dict[int, Array]:
    """Return the dequantized constants of a unit that reads uint8."""
    if OPS[unit.op].kind == "compute":
        if constant(node.inputs[1]) is None:
            return {}
        writer.static(node, unit, float(x.scale))
        return {index: _behind(value) for index, value in enumerate(node.inputs) if _is_integer(value)}
    operands = constant_operands(node, unit, scheme)
    return {index: dequantize(stored, params) for index, stored, params in operands}


def _stored(node: ir.Node, unit: Unit, impl: Impl, writer: WeightWriter) -> dict[int, Array]:
    """Return the dequantized weights of a unit that reads float."""
    row, found = OPS[unit.op], {}
    if unit.op in STATES:
        stored = (2,) if impl is Impl.DYNAMIC_NATIVE and keeps_input(node) else (1, 2)
        return {index: _by_rows(node, index, unit, impl, writer) for index in stored}
    if row.native:  # attention has no weights
        return {}
    if impl.in_blocks:
        values = writer.blocked(node, unit).values()
        return {0: values} if unit.op == "Gather" else {1: turned(node, values)}
    for index in row.stores if impl is Impl.WEIGHT else (1,):
        tensor = constant(node.inputs[index])
        if tensor is None:
            continue
        array = tensor.numpy()
        if unit.op == "Gather":
            params = symmetric_s8(array, 0)
        else:
            params = writer.params(array, row.channel_axis(node) % array.ndim)
        found[index] = dequantize(quantize(array, params), params)
    return found


def _by_rows(node: ir.Node, index: int, unit: Unit, impl: Impl, writer: WeightWriter) -> Array:
    """Return the dequantized W or R (D, G H, K) of a GRU or LSTM: each row has its scale in all its forms."""
    array = writer.array(node, index)
    rows = array.reshape(-1, array.shape[-1])
    params = writer.params(rows, 0)
    if impl is Impl.DYNAMIC:
        params = writer.without_saturation(unit, rows, params, 0)
    return dequantize(quantize(rows, params), params).reshape(array.shape)


def _is_integer(value: ir.Value | None) -> bool:
    """Return whether a tensor is dequantized from a constant of integers."""
    dq = made_by(value, "DequantizeLinear")
    return dq is not None and constant(dq.inputs[0]) is not None


def _behind(value: ir.Value | None) -> Array:
    """Return the dequantized values of such a constant."""
    dq = producer_of(value)
    assert dq is not None
    stored, scale, zero = (constant(each) for each in dq.inputs[:3])
    assert stored is not None and scale is not None and zero is not None  # the writer has put them there
    axis = dq.attributes.get_int("axis", 1) if len(scale.shape) else None
    return dequantize(stored.numpy(), QParams(scale=scale.numpy(), zero_point=zero.numpy(), axis=axis))
