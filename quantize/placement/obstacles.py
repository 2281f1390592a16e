"""Why a unit cannot have an integer form, or should not: one function per form, which returns the first reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import onnx_ir as ir

from ...transforms.graphs.queries import (
    DEEPEST,
    constant,
    has_plain_window,
    is_float32,
    made_by,
    plain_shape,
    whole_first,
)
from ...transforms.int8.forms import RECURRENT
from ...transforms.int8.ops import ATTENTIONS, FUNCTION, GATE, GROUP_NORM, INTERPOLATION, OPS, SLOPED, TABLE, Kernel, Op
from ...transforms.int8.plan import Impl, Unit
from ...transforms.int8.reasons import ALREADY, NONE, Reason
from ...transforms.int8.units import activations
from ...transforms.patterns.conv_transposes import has_whole_strides
from ...transforms.patterns.elementwise import CHANNELWISE, Place, channels_of
from ...transforms.patterns.resizes import IMAGE, find_resizing
from ...transforms.patterns.slopes import Sloped, slopes_channels, slopes_each
from ..options.declared import Strategy
from ..runtime.kernels import uint8_kernels
from . import reasons as why
from .attention_forms import attention_obstacle
from .facts import FIRST_INTEGER_OPSET, Facts
from .operator_obstacles import (
    cell_obstacle,
    compute_obstacle,
    few_products,
    follower_obstacle,
    is_finite,
)

LEAST_STORED = 2**16  # bytes; smaller float32 weights of units that compute in float stay float32
# A smaller one is slower in integers. LSTM: at 128 0.8 to 0.95x, at 256 1.3 to 3.1x, at 512 3.4x. GRU, one item a step:
# at 128 0.5x, at 192 0.9x, at 224 1.2x, at 256 1.4x, at 400 1.9x; it becomes a Scan, whose steps cost microseconds.
LEAST_HIDDEN = {"LSTM": 192, "GRU": 224}
PEEPHOLES = 7  # among the inputs of an LSTM
POOLS = frozenset({"AveragePool", "GlobalAveragePool", "MaxPool"})
PAIRS = frozenset({"Add", "Mul"})
TABLES = frozenset(op for op, row in OPS.items() if row.native_u8 == TABLE)
"""The functions of one element that only native operators compute in integers."""
FUNCTIONS = frozenset({GATE, "LeakyRelu", "Sigmoid", *TABLES}) - CHANNELWISE
"""The functions that a native convolution may absorb: the same one for all channels."""
NATIVE = frozenset(
    {"Conv", "ConvTranspose", "Concat", "DepthToSpace", "Resize", GROUP_NORM, INTERPOLATION, SLOPED}
    | {*POOLS, *PAIRS, *TABLES, *FUNCTIONS}
)
"""The units that native operators compute: of images, of two tensors, and functions of one element."""

Rule: TypeAlias = Callable[[Unit, Facts, Strategy], Reason]


def _static_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot or should not compute from uint8 to uint8, regardless of its neighbours."""
    row = OPS[unit.op]
    either = _float_kernel(row, facts) is not None and strategy is not Strategy.STATIC  # it may write float in the end
    touched = unit.inputs if either else (*unit.inputs, *unit.outputs)
    return _u8_obstacle(unit, facts, strategy, row.u8, touched)


def _gemm_form_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot be a convolution whose weights have a zero point."""
    node = facts.nodes[unit.nodes[0]]
    if not facts.zero_points or unit.op != "Conv" or node.attributes.get_int("group", 1) != 1:
        return why.NO_FORM
    return _static_obstacle(unit, facts, strategy)


def _native_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot be a native operator."""
    node = facts.nodes[unit.nodes[0]]
    found = [plain_shape(facts.values.get(name)) for name in (*unit.inputs, *unit.outputs)]
    shapes = [shape for shape in found if shape is not None]
    if not facts.native or unit.op not in NATIVE or len(shapes) < len(found):
        return why.NO_FORM
    if unit.op in (*POOLS, "DepthToSpace") and (len(shapes[0]) != IMAGE or not has_plain_window(node)):
        return why.NO_FORM
    if unit.op in ("Resize", INTERPOLATION):
        return _resize_obstacle(unit, facts, strategy)
    if unit.op == "ConvTranspose":
        return _transposed_obstacle(unit, facts)
    if unit.op == GROUP_NORM:  # it adds in integers, its body in float
        return why.NO_FORM if facts.exact else _tensor_obstacle(unit, facts, (*unit.inputs, *unit.outputs))
    if unit.op == SLOPED:  # `sloped_obstacle` has seen its shapes
        return _tensor_obstacle(unit, facts, (*unit.inputs, *unit.outputs))
    images = len(shapes[-1]) == IMAGE and facts.convolves
    channel = 1 if images else len(shapes[-1]) - 1
    if unit.op in TABLES and len(shapes[0]) != len(shapes[-1]):  # a constant with more axes adds them
        return why.NO_FORM
    if unit.op in TABLES:
        return _table_form_obstacle(unit, facts, Place(len(shapes[-1]), channel))
    if unit.op in PAIRS and (len(shapes) != 3 or whole_first(shapes[0], shapes[1], shapes[2], channel) is None):
        return why.NO_FORM
    if unit.op == "Concat" and node.attributes.get_int("axis", 0) % len(shapes[-1]) != channel:
        return why.NO_FORM
    weights = plain_shape(node.inputs[1]) if unit.op == "Conv" else None
    if unit.op == "Conv" and (weights is None or len(weights) != IMAGE or not has_plain_window(node)):
        return why.NO_FORM
    if weights is not None and math.prod(each for each in weights[1:] if isinstance(each, int)) > DEEPEST:
        return why.NO_FORM
    return _static_obstacle(unit, facts, strategy)


def _resize_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why a Resize cannot be a native operator."""
    found, shape = find_resizing(facts.nodes[unit.nodes[0]]), plain_shape(facts.values.get(unit.inputs[0])) or ()
    if found is None or len(shape) != IMAGE or not found.keeps_others(shape):
        return why.NO_FORM
    if facts.exact and not found.nearest:
        return why.NO_FORM  # what is between pixels may differ by a step from that of the body
    return _tensor_obstacle(unit, facts, (*unit.inputs, *unit.outputs)) or _form_obstacle(unit, facts, strategy)


def _transposed_obstacle(unit: Unit, facts: Facts) -> Reason:
    """Return why a ConvTranspose cannot be a native operator."""
    node = facts.nodes[unit.nodes[0]]
    if facts.exact:  # the body adds in float: a result may differ by a step from that of the operator
        return why.NO_FORM
    if not has_whole_strides(node, constant(node.inputs[1])):
        return why.NO_FORM
    touched = (*unit.inputs, *unit.outputs)
    return _tensor_obstacle(unit, facts, touched) or compute_obstacle(node, OPS[unit.op])


def sloped_obstacle(found: Sloped, facts: Facts) -> Reason:
    """Return why a PRelu of two parts cannot be a native operator: its slopes are neither of channels nor of elements.

    The lines of each element may differ from the body by a step, where that is in the middle between two integers.
    """
    shape = plain_shape(facts.values.get(str(found.x.name)))
    if shape is None or plain_shape(facts.values.get(str(found.nodes[-1].outputs[0].name))) != shape:
        return why.NO_FORM
    channel = 1 if len(shape) == IMAGE and facts.convolves else len(shape) - 1
    fits = slopes_channels(found, Place(len(shape), channel)) or (slopes_each(found, shape) and not facts.exact)
    return NONE if fits else why.NO_FORM


def _table_form_obstacle(unit: Unit, facts: Facts, place: Place) -> Reason:
    """Return why a function of one element cannot be a native table."""
    functions = all(channels_of(facts.nodes[name], place) for name in unit.nodes)
    if len(unit.inputs) != 1 or len(unit.outputs) != 1 or not functions:
        return why.NO_FORM
    return _tensor_obstacle(unit, facts, (*unit.inputs, *unit.outputs))


def _static_float_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot read uint8 and write float."""
    row = OPS[unit.op]
    if facts.signed and row.u8 is None and row.u8_float is not None:
        return why.UNSIGNED_ONLY.about(row.u8_float[1])
    return _u8_obstacle(unit, facts, strategy, _float_kernel(row, facts), unit.inputs)


def _float_kernel(row: Op, facts: Facts) -> Kernel | None:
    """Return the kernel that reads uint8 and writes float; in other runtimes every product may write float."""
    own = row.u8 if facts.portable and row.kind == "compute" else None
    return own or row.u8_float


def _dynamic_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot find its ranges at run time."""
    row = OPS[unit.op]
    has_scale = row.kind == "compute" and facts.static and not _reads_zeros(unit, facts)
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
    if not facts.native or facts.exact:  # its results are not those of its body
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
    if not facts.native or facts.exact or unit.op == "Gather":  # its results are not bit for bit those of its body
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
    Impl.U8: _static_obstacle,
    Impl.U8_GEMM: _gemm_form_obstacle,
    Impl.U8_NATIVE: _native_obstacle,
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


# ---------------------------------------------------------------------------------------------------- uint8 inputs


def _u8_obstacle(unit: Unit, facts: Facts, strategy: Strategy, kernel: Kernel | None, touched: Iterable[str]) -> Reason:
    """Return why `unit` cannot run on a kernel that reads uint8; `touched` are the tensors that are uint8 then."""
    if kernel is None:
        return why.NO_FORM
    if kernel not in uint8_kernels():
        return why.NOT_INSTALLED.about(kernel[1])
    return _tensor_obstacle(unit, facts, touched) or _form_obstacle(unit, facts, strategy)


def _tensor_obstacle(unit: Unit, facts: Facts, touched: Iterable[str]) -> Reason:
    """Return why tensors that `unit` reads and writes cannot be uint8; `touched` are those that are uint8 then."""
    if any(not is_float32(facts.values.get(name)) for name in (*unit.inputs, *unit.outputs)):
        return why.NOT_FLOAT32
    kept = next((facts.kept_float[tensor] for tensor in touched if tensor in facts.kept_float), "")
    if kept:
        return why.KEPT_FLOAT.about(kept)
    # what a float operator writes is rounded for integer readers alone, except inside a function of several operators
    rounded = {*unit.inputs, *unit.outputs} if unit.op == FUNCTION else {*unit.outputs}
    return why.DIVISOR if facts.divisors & rounded.intersection(touched) else _range_obstacle(unit, facts)


def _range_obstacle(unit: Unit, facts: Facts) -> Reason:
    """Return why `unit` cannot have static scales, or only useless ones."""
    if OPS[unit.op].kind == "compute" and _reads_zeros(unit, facts):
        return why.ZERO_INPUT
    if facts.opset < FIRST_INTEGER_OPSET:
        return why.OLD_OPSET.about(facts.opset)
    return NONE if facts.static else why.NO_RANGES


def _reads_zeros(unit: Unit, facts: Facts) -> bool:
    """Whether the first input of a unit is zero in all the data."""
    return facts.ranges.get(unit.inputs[0], (-1.0, 1.0)) == (0.0, 0.0)


def _form_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return what in its attributes and constants keeps an operator from computing on uint8."""
    node, row = facts.nodes[unit.nodes[0]], OPS[unit.op]
    if row.kind != "compute":
        return follower_obstacle(node, row, facts)
    if unit.op == "MatMul" and len(activations(node)) > 1:
        if made_by(node.inputs[1], "DequantizeLinear"):
            return ALREADY
        return NONE if strategy is not Strategy.AUTO or facts.allow_slow else why.BOTH_ACTIVATIONS
    return compute_obstacle(node, row) or (NONE if facts.allow_slow or facts.portable else few_products(node))


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
