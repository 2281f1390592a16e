"""Why a unit cannot have an integer form, or should not: one function per form, which returns the first reason."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ...transforms.graphs.queries import constant, is_float32
from ...transforms.int8.forms import RECURRENT
from ...transforms.int8.ops import ATTENTIONS, OPS, Kernel
from ...transforms.int8.plan import Impl, Unit
from ...transforms.int8.reasons import NONE, Reason
from ..options.declared import Strategy
from ..runtime.kernels import uint8_kernels
from . import reasons as why
from .attention_forms import attention_obstacle
from .facts import Facts
from .native_obstacles import native_obstacle
from .operator_obstacles import cell_obstacle, compute_obstacle, is_finite
from .uint8_obstacles import Rule, float_kernel, reads_zeros, static_obstacle, u8_obstacle

LEAST_STORED = 2**16  # bytes; smaller float32 weights of units that compute in float stay float32
# A smaller one is slower in integers. LSTM: at 128 0.8 to 0.95x, at 256 1.3 to 3.1x, at 512 3.4x. GRU, one item a step:
# at 128 0.5x, at 192 0.9x, at 224 1.2x, at 256 1.4x, at 400 1.9x; it becomes a Scan, whose steps cost microseconds.
LEAST_HIDDEN = {"LSTM": 192, "GRU": 224}
PEEPHOLES = 7  # among the inputs of an LSTM


def _gemm_form_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot be a convolution whose weights have a zero point."""
    node = facts.nodes[unit.nodes[0]]
    if not facts.zero_points or unit.op != "Conv" or node.attributes.get_int("group", 1) != 1:
        return why.NO_FORM
    return static_obstacle(unit, facts, strategy)


def _static_float_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot read uint8 and write float."""
    row = OPS[unit.op]
    if facts.signed and row.u8 is None and row.u8_float is not None:
        return why.UNSIGNED_ONLY.about(row.u8_float[1])
    return u8_obstacle(unit, facts, strategy, float_kernel(row, facts), unit.inputs)


def _dynamic_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot find its ranges at run time."""
    row = OPS[unit.op]
    has_scale = row.kind == "compute" and facts.static and not reads_zeros(unit, facts)
    if row.dynamic is None or (strategy is Strategy.AUTO and has_scale):
        return why.NO_FORM
    if found := _extension_obstacle(row.dynamic, facts):
        return found
    if unit.op not in RECURRENT:
        return _product_obstacle(unit, facts, Impl.DYNAMIC)
    found = _recurrent_obstacle(unit, facts, strategy) or _harm_obstacle(unit, facts, Impl.DYNAMIC)
    return found or (cell_obstacle(facts.nodes[unit.nodes[0]], facts) if unit.op == "GRU" else NONE)


def _native_dynamic_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot be a native product that finds its ranges at run time."""
    if not facts.native or facts.exact:  # its results differ from the results of its body
        return why.NO_FORM
    if unit.op in RECURRENT:
        return _native_recurrent_obstacle(unit, facts)
    if unit.op in ATTENTIONS:
        return attention_obstacle(unit, facts) or _harm_obstacle(unit, facts, Impl.DYNAMIC_NATIVE)
    return _dynamic_obstacle(unit, facts, strategy)


def _weight_only_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why the weights of `unit` cannot be int8 in the file while the unit computes in float."""
    anchor, row = facts.nodes[unit.nodes[0]], OPS[unit.op]
    if not row.stores or (strategy is Strategy.AUTO and row.u8 is not None and row.kind == "compute"):
        return why.NO_FORM
    found = [constant(anchor.inputs[index]) for index in row.stores if index < len(anchor.inputs)]
    weights = [tensor for tensor in found if tensor is not None]
    if len(weights) < len(found):
        return why.NO_FORM if unit.op == "Gather" else why.WEIGHTS_COMPUTED
    if any(tensor.dtype is not ir.DataType.FLOAT for tensor in weights):
        return why.WEIGHTS_NOT_FLOAT32
    if any(len(tensor.shape) < 2 for tensor in weights):
        return why.WEIGHTS_VECTOR
    if unit.op == "Gather" and anchor.attributes.get_int("axis", 0) % len(weights[0].shape) != 0:
        return why.NOT_ROWS
    if not all(map(is_finite, weights)):
        return why.WEIGHTS_NOT_FINITE
    least = 1 if strategy is Strategy.WEIGHT else LEAST_STORED
    return why.WEIGHTS_SMALL if all(tensor.nbytes < least for tensor in weights) else NONE


def _block_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot have weights in blocks."""
    anchor, row = facts.nodes[unit.nodes[0]], OPS[unit.op]
    if row.blocks is None or strategy is Strategy.AUTO:
        return why.NO_FORM
    if found := _extension_obstacle(row.blocks, facts):
        return found
    return _table_obstacle(anchor, facts) if unit.op == "Gather" else _product_obstacle(unit, facts, Impl.BLOCK)


def _native_block_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot be a native product with weights in blocks; a table has no native operator."""
    if not facts.native or facts.exact or unit.op == "Gather":  # its results may differ from the results of its body
        return why.NO_FORM
    return _block_obstacle(unit, facts, strategy)


def _table_obstacle(node: ir.Node, facts: Facts) -> Reason:
    """Return why the table of a Gather cannot be in blocks."""
    table = constant(node.inputs[0])
    if table is None:
        return why.WEIGHTS_COMPUTED
    if table.dtype is not ir.DataType.FLOAT:
        return why.WEIGHTS_NOT_FLOAT32
    if not table.size:
        return why.WEIGHTS_EMPTY
    if len(table.shape) != 2:
        return why.WEIGHTS_RANK.about(len(table.shape))
    if node.attributes.get_int("axis", 0) % 2 != 0:
        return why.NOT_ROWS
    if table.shape.numpy()[1] * facts.blocks.bits % 8:
        return why.HALF_BYTE
    return NONE if is_finite(table) else why.WEIGHTS_NOT_FINITE


OBSTACLES: Mapping[Impl, Rule] = {
    Impl.U8: static_obstacle,
    Impl.U8_GEMM: _gemm_form_obstacle,
    Impl.U8_NATIVE: native_obstacle,
    Impl.U8_FLOAT: _static_float_obstacle,
    Impl.DYNAMIC: _dynamic_obstacle,
    Impl.DYNAMIC_NATIVE: _native_dynamic_obstacle,
    Impl.BLOCK: _block_obstacle,
    Impl.BLOCK_NATIVE: _native_block_obstacle,
    Impl.WEIGHT: _weight_only_obstacle,
}
"""By integer form, the function that returns why a unit cannot have it; `NONE` if it can."""


# -------------------------------------------------------------------------------------------- from float to float


def _extension_obstacle(kernel: Kernel, facts: Facts) -> Reason:
    """Return why a unit cannot have a kernel that only ONNX Runtime has."""
    if facts.portable:
        return why.NOT_PORTABLE.about(kernel[1])
    return NONE if kernel in uint8_kernels() else why.NOT_INSTALLED.about(kernel[1])


def _harm_obstacle(unit: Unit, facts: Facts, form: Impl) -> Reason:
    """Return why rounding the inputs of a unit at run time would ruin an output; `NONE` without evidence of that."""
    harmed = facts.harmed_by.get(form, {})
    harm = next((harmed[tensor] for tensor in unit.rounded if tensor in harmed), "")
    return why.KEPT_FLOAT.about(harm) if harm else NONE


def _type_obstacle(unit: Unit, facts: Facts) -> Reason:
    """Return `NOT_FLOAT32` if the first input or an output of a unit is not known to be float32."""
    names = (*unit.inputs[:1], *unit.outputs)
    return NONE if all(is_float32(facts.values.get(name)) for name in names) else why.NOT_FLOAT32


def _product_obstacle(unit: Unit, facts: Facts, form: Impl) -> Reason:
    """Return why a matrix product cannot have a form that reads and writes float."""
    anchor = facts.nodes[unit.nodes[0]]
    if found := _type_obstacle(unit, facts) or _harm_obstacle(unit, facts, form):
        return found
    weight = constant(anchor.inputs[1])
    if weight is not None and len(weight.shape) != 2:
        return why.WEIGHTS_RANK.about(len(weight.shape))
    return compute_obstacle(anchor, OPS[unit.op])


# ------------------------------------------------------------------------------------------- recurrent operators


def _recurrent_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return what keeps an LSTM from being a DynamicQuantizeLSTM, and a GRU from computing in integers."""
    if found := _type_obstacle(unit, facts):
        return found
    node = facts.nodes[unit.nodes[0]]
    weights = [constant(value) for value in node.inputs[1:3]]
    if any(tensor is None or tensor.dtype is not ir.DataType.FLOAT or not tensor.size for tensor in weights):
        return why.WEIGHTS_NOT_CONSTANT
    if not all(map(is_finite, weights)):
        return why.WEIGHTS_NOT_FINITE
    if node.attributes.get_int("layout", 0):
        return why.BATCH_FIRST
    hidden = node.attributes.get_int("hidden_size", 0)
    small = strategy is Strategy.AUTO and hidden < LEAST_HIDDEN[node.op_type]
    return why.SMALL_STATE.about(hidden) if small else NONE


def _native_recurrent_obstacle(unit: Unit, facts: Facts) -> Reason:
    """Return what keeps a GRU or LSTM from being a native operator."""
    node = facts.nodes[unit.nodes[0]]
    coupled = node.attributes.get_int("input_forget", 0)
    if coupled or any(value is not None for value in node.inputs[PEEPHOLES:]):
        return why.PEEPHOLES
    found = _recurrent_obstacle(unit, facts, Strategy.DYNAMIC)
    return found or _harm_obstacle(unit, facts, Impl.DYNAMIC_NATIVE) or cell_obstacle(node, facts)
