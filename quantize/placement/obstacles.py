"""Why a unit cannot have an integer form, or should not: one function per form, which returns the first reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import onnx_ir as ir

from ...transforms.graph import (
    DEEPEST,
    MS,
    constant,
    has_plain_window,
    is_float32,
    made_by,
    plain_shape,
    release,
    whole_first,
)
from ...transforms.int8.forms import RECURRENT, gate_obstacle
from ...transforms.int8.gru_form import FIRST_OPSET as FIRST_GRU_OPSET
from ...transforms.int8.ops import FUNCTION, GATE, GROUP_NORM, INTERPOLATION, OPS, TABLE, WHOLE, Kernel, Op, only_moves
from ...transforms.int8.plan import Impl, Unit
from ...transforms.int8.reasons import ALREADY, NONE, Reason
from ...transforms.int8.recurrent import ACTIVATIONS
from ...transforms.int8.units import activations
from ...transforms.patterns import pads
from ...transforms.patterns.conv_transposes import has_whole_strides
from ...transforms.patterns.elementwise import CHANNELWISE, Place, channels_of
from ...transforms.patterns.resizes import IMAGE, find_resizing
from ..options.declared import Strategy
from ..runtime.kernels import uint8_kernels
from . import reasons as why
from .attention_forms import attention_obstacle
from .facts import FIRST_INTEGER_OPSET, Facts

# A first convolution, of few channels and without groups, is slower as a QLinearConv below this many products per
# output: on 1 or 3 channels 3x3 and 5x5 take 2.4 to 3.6 times as long in int8, a 7x7 on 3 channels 0.7 times.
LEAST_PRODUCTS = 64
FEW_CHANNELS = 8
# Branches do not meet in uint8 if their ranges differ by more than this: the narrow one would keep under 4 bits.
WIDEST_SPREAD = 16.0
LEAST_STORED = 2**16  # bytes; smaller float32 weights of units that compute in float stay float32
# A smaller one is slower in integers. LSTM: at 128 0.8 to 0.95x, at 256 1.3 to 3.1x, at 512 3.4x. GRU, one item a step:
# at 128 0.5x, at 192 0.9x, at 224 1.2x, at 256 1.4x, at 400 1.9x; it becomes a Scan, whose steps cost microseconds.
LEAST_HIDDEN = {"LSTM": 192, "GRU": 224}
PEEPHOLES = 7  # among the inputs of an LSTM
RANKS = {"Conv": (3, 4, 5), "Gemm": (2,), f"{MS}.Attention": (2,)}
POOLS = frozenset({"AveragePool", "GlobalAveragePool", "MaxPool"})
PAIRS = frozenset({"Add", "Mul"})
TABLES = frozenset(op for op, row in OPS.items() if row.native_u8 == TABLE)
"""The functions of one element that only native operators compute in integers."""
FUNCTIONS = frozenset({GATE, "LeakyRelu", "Sigmoid", *TABLES}) - CHANNELWISE
"""The functions that a native convolution may absorb: the same one for all channels."""
NATIVE = frozenset(
    {"Conv", "ConvTranspose", "Concat", "DepthToSpace", "Resize", GROUP_NORM, INTERPOLATION}
    | {*POOLS, *PAIRS, *TABLES, *FUNCTIONS}
)
"""The units that native operators compute: of images, of two tensors, and functions of one element."""
FINITE: WeakKeyDictionary[ir.TensorProtocol, bool] = WeakKeyDictionary()
"""Whether all values of a tensor are finite; each tensor is read once."""

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
    return _tensor_obstacle(unit, facts, touched) or _compute_obstacle(node, OPS[unit.op])


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
    return found or (_cell_obstacle(facts.nodes[unit.nodes[0]], facts) if unit.op == "GRU" else NONE)


def _native_dynamic_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why `unit` cannot be a native product that finds its ranges at run time."""
    if not facts.native or facts.exact:  # its results are not those of its body
        return why.NO_FORM
    if unit.op in RECURRENT:
        return _native_recurrent_obstacle(unit, facts)
    if unit.op in WHOLE:
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
    if not all(map(_is_finite, weights)):
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
    return NONE if _is_finite(table) else why.WEIGHTS_NOT_FINITE


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
    """Return why rounding what a unit reads at run time would ruin an output; `NONE` without evidence of that."""
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
    return _compute_obstacle(anchor, OPS[unit.op])


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
        return _follower_obstacle(node, row, facts)
    if unit.op == "MatMul" and len(activations(node)) > 1:
        if made_by(node.inputs[1], "DequantizeLinear"):
            return ALREADY
        return NONE if strategy is not Strategy.AUTO or facts.allow_slow else why.BOTH_ACTIVATIONS
    return _compute_obstacle(node, row) or (NONE if facts.allow_slow or facts.portable else _few_products(node))


# ------------------------------------------------------------------------------------------ operators with weights


def _compute_obstacle(node: ir.Node, row: Op) -> Reason:
    """Return what keeps an operator with weights from computing in integers."""
    weight = constant(node.inputs[1])
    if weight is None:
        return ALREADY if made_by(node.inputs[1], "DequantizeLinear") else why.WEIGHTS_COMPUTED
    if weight.dtype is not ir.DataType.FLOAT:
        return why.WEIGHTS_NOT_FLOAT32
    shape = weight.shape.numpy()
    if len(shape) not in RANKS.get(node.op_type, range(2, 9)):
        return why.WEIGHTS_RANK.about(len(shape))
    if not weight.size or not _is_finite(weight):
        return why.WEIGHTS_NOT_FINITE if weight.size else why.WEIGHTS_EMPTY
    bias = node.inputs[row.bias] if row.bias is not None and len(node.inputs) > row.bias else None
    if found := _bias_obstacle(bias):
        return found
    rule = {"Gemm": _gemm_obstacle, "Attention": _attention_obstacle}.get(node.op_type)
    return rule(node, shape, bias) if rule is not None else NONE


def _bias_obstacle(bias: ir.Value | None) -> Reason:
    """Return what keeps a bias from being added in integers, or written anew; `NONE` without a bias."""
    if bias is None:
        return NONE
    tensor = constant(bias)
    if tensor is None:
        return why.BIAS_COMPUTED
    return NONE if _is_finite(tensor) else why.BIAS_NOT_FINITE


def _few_products(node: ir.Node) -> Reason:
    """Return why a convolution is expected to be slower in integers."""
    weight = constant(node.inputs[1])
    if node.op_type != "Conv" or weight is None:
        return NONE
    shape = weight.shape.numpy()
    products = math.prod(shape[1:])
    if node.attributes.get_int("group", 1) == 1 and products < LEAST_PRODUCTS and shape[1] < FEW_CHANNELS:
        return why.FEW_PRODUCTS.about(products)
    return NONE


def _recurrent_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return what keeps an LSTM from being a DynamicQuantizeLSTM, and a GRU from computing in integers."""
    if found := _type_obstacle(unit, facts):
        return found
    node = facts.nodes[unit.nodes[0]]
    weights = [constant(value) for value in node.inputs[1:3]]
    if any(tensor is None or tensor.dtype is not ir.DataType.FLOAT or not tensor.size for tensor in weights):
        return why.WEIGHTS_NOT_CONSTANT
    if not all(map(_is_finite, weights)):
        return why.WEIGHTS_NOT_FINITE
    if node.attributes.get_int("layout", 0):
        return why.BATCH_FIRST
    hidden = node.attributes.get_int("hidden_size", 0)
    small = strategy is Strategy.AUTO and hidden < LEAST_HIDDEN[node.op_type]
    return why.SMALL_STATE.about(hidden) if small else NONE


def _cell_obstacle(node: ir.Node, facts: Facts) -> Reason:
    """Return what keeps a GRU from being integer products and a Scan, and a GRU or LSTM from being native."""
    if found := _bias_obstacle(node.inputs[3] if len(node.inputs) > 3 else None):
        return found
    named = [name.lower() for name in node.attributes.get_strings("activations", ())]
    usual = [name.lower() for name in ACTIVATIONS[node.op_type]]
    if "clip" in node.attributes or named != usual * (len(named) // len(usual)):
        return why.OTHER_ACTIVATIONS
    return why.OLD_OPSET.about(facts.opset) if facts.opset < FIRST_GRU_OPSET else NONE


def _native_recurrent_obstacle(unit: Unit, facts: Facts) -> Reason:
    """Return what keeps a GRU or LSTM from being a native operator."""
    node = facts.nodes[unit.nodes[0]]
    coupled = node.attributes.get_int("input_forget", 0)
    if coupled or any(value is not None for value in node.inputs[PEEPHOLES:]):
        return why.PEEPHOLES
    found = _recurrent_obstacle(unit, facts, Strategy.DYNAMIC)
    return found or _harm_obstacle(unit, facts, Impl.DYNAMIC_NATIVE) or _cell_obstacle(node, facts)


def _attention_obstacle(node: ir.Node, shape: Sequence[int], bias: ir.Value | None) -> Reason:
    """Return what keeps an Attention from being a QAttention."""
    spare = [value for value in node.inputs[5:] if value is not None]
    sizes = node.attributes.get_ints("qkv_hidden_sizes", None)
    rotary: list[int] = [node.attributes.get_int(name, 0) for name in ("do_rotary", "rotary_embedding_dim")]
    if spare or sizes or any(rotary):
        return why.ATTENTION
    return why.BIAS_MISSING if len(node.inputs) < 3 or constant(node.inputs[2]) is None else NONE


def _gemm_obstacle(node: ir.Node, shape: Sequence[int], bias: ir.Value | None) -> Reason:
    """Return what keeps a Gemm from being a QGemm."""
    if node.attributes.get_int("transA", 0):
        return why.TRANSPOSED
    if node.attributes.get_float("alpha", 1.0) != 1.0 or node.attributes.get_float("beta", 1.0) != 1.0:
        return why.ALPHA_BETA
    channels = shape[0 if node.attributes.get_int("transB", 0) else 1]
    tensor = constant(bias)
    per_column = tensor is None or tensor.size == channels == (tensor.shape[-1] if len(tensor.shape) else 1)
    return NONE if per_column else why.BIAS_SHAPE


# ---------------------------------------------------------------------------------------- operators without weights


def _follower_obstacle(node: ir.Node, row: Op, facts: Facts) -> Reason:
    """Return what keeps an operator that follows its neighbours from running on uint8."""
    read = [v for v in activations(node) if v.name]
    if not read:
        return why.OPERAND_CONSTANT
    if node.op_type == "HardSigmoid":
        unusual = gate_obstacle(node)
        return why.SIGNED_GATE if facts.signed else why.UNUSUAL_GATE.about(unusual) if unusual else NONE
    if row.kind == "same":
        return _moved_obstacle(node, row, facts)
    if node.op_type == "AveragePool" and any(step != 1 for step in node.attributes.get_ints("dilations", ())):
        return why.DILATED_POOL
    if node.op_type == "AveragePool" and all(node.attributes.get_int(n, 0) for n in ("ceil_mode", "count_include_pad")):
        return why.CUT_WINDOW
    constants = [constant(node.inputs[index]) for index in row.activations or range(len(node.inputs))]
    known = [tensor for tensor in constants if tensor is not None]
    for tensor in known:
        if tensor.dtype is not ir.DataType.FLOAT or not tensor.size:
            return why.OPERAND_NOT_FLOAT32
        if not _is_finite(tensor):
            return why.OPERAND_NOT_FINITE
    ranges = [facts.ranges[str(v.name)] for v in read if v.name in facts.ranges]
    ranges += [(float(tensor.numpy().min()), float(tensor.numpy().max())) for tensor in known]
    spread = _spread(ranges) if node.op_type != "Mul" else 1.0  # each factor of a product keeps its own scale
    return why.RANGES_DIFFER.about(spread) if spread > WIDEST_SPREAD else NONE


def _moved_obstacle(node: ir.Node, row: Op, facts: Facts) -> Reason:
    """Return why the output of an operator of kind ``same`` has other values than its first input."""
    if not only_moves(node):
        return row.why or why.SEVERAL_OUTPUTS
    if node.op_type != "Pad" or not pads.fills(node):
        return NONE
    value = pads.value(node)
    if facts.opset < 13 or value is None:
        return why.PAD_FORM
    return NONE if value == 0.0 else why.PAD_VALUE


def _spread(ranges: Iterable[tuple[float, float]]) -> float:
    """Return the ratio of the widest range to the narrowest; 1 for fewer than two. Zero is exact on any scale."""
    spans = [span for lo, hi in ranges if (span := max(hi, 0.0) - min(lo, 0.0)) > 0]
    return max(spans) / min(spans) if spans else 1.0


# -------------------------------------------------------------------------------------------------------- tensors


def _is_finite(tensor: ir.TensorProtocol | None) -> bool:
    """Return whether all values of a float tensor are finite; True without a tensor."""
    if tensor is None:
        return True
    if tensor not in FINITE:
        FINITE[tensor] = bool(np.isfinite(tensor.numpy().sum(dtype=np.float64)))  # of float32 no such sum overflows
        release(tensor)
    return FINITE[tensor]
