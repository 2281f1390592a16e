"""The table of operators: how each one can become int8. An operator without a row stays float.

`requant.quantize.runtime` checks which of these kernels the installed runtime has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from onnx_ir import Node

from ..graphs.queries import MS, key
from ..patterns.attention import GROUP_QUERY
from . import reasons
from .reasons import NONE, Reason

Kernel = tuple[str, str]  # domain, operator
RELUS = frozenset({"Relu", "Clip"})
MOVES = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators of one tensor that keep every element and its value."""
GATE = "gate"
"""The name of the group ``x * sigmoid(x)`` (SiLU) or ``x * hardsigmoid(x)`` (hard-swish)."""
GATES = frozenset({"Sigmoid", "HardSigmoid"})
FUNCTION = "function"
"""The name of a group of elementwise operators that is another function of one tensor, as a Mish or a GELU."""
TABLE = "Table"
"""The native operator of functions of one element."""
ATTENTION = "attention"
"""The name of the group ``softmax(q k' + mask) v``; see `attention.find_attention`."""
INTERPOLATION = "interpolation"
"""The name of a Resize that interpolates; see `resizes.interpolates`."""
GROUP_NORM = "group norm"
"""The name of a normalization of an image by groups of channels; see `group_norms.find_group_norm`."""
SLOPED = "sloped"
"""The name of a PRelu of two parts, ``Relu(x) + Clip(x, max=0) * slopes``; see `slopes.find_sloped`."""
ATTENTIONS = frozenset({ATTENTION, GROUP_QUERY})
"""Units without weights that native operators compute from float to float; the body has the nodes of the unit."""
CLIP_TAKES_INPUTS = 11  # the opset from which the bounds of a Clip are inputs
GEMM_NEEDS_NO_C = 11  # the opset from which a Gemm may have no C


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """How one operator can become int8.

    Attributes:
        kind: ``compute`` multiplies by constant weights; ``arith`` has an integer kernel whose result has its own
            scale; ``same`` moves or selects values, so its result has the scale of its input; ``float`` has no
            integer kernel that pays with static ranges.
        activations: Indices of the inputs that carry activations; None for all.
        weight: Index of the constant weight.
        channel_axis: Returns the output-channel axis of the weight of a node.
        bias: Index of the bias, int32 with scale ``s_x * s_w``.
        u8: Kernel that reads and writes uint8.
        u8_float: Kernel that reads uint8 and writes float.
        dynamic: Kernel that reads and writes float and computes in integers; it finds ranges at run time.
        blocks: Kernel that reads and writes float, with a matrix of integers in blocks, each with its scale.
        native: Operator of ``ai.requant`` that computes it from float to float, in integers.
        native_u8: Operator of ``ai.requant`` that computes it from uint8 to uint8, where nothing else does.
        rounds: How many of its first inputs are rounded in forms from float to float.
        stores: Indices of constant inputs that can be int8 in the file while the operator computes in float.
        absorbs: Following operators that run inside its kernel.
        bare: Whether it must read the uint8 tensor directly, because the runtime does not fuse it with a
            DequantizeLinear and QuantizeLinear around it.
        slow: Why it stays float unless a measurement shows that its integer kernel pays.
        why: Why it stays float, or a restriction of its integer form.
    """

    kind: Literal["compute", "arith", "same", "float"]
    activations: tuple[int, ...] | None = (0,)
    weight: int | None = None
    channel_axis: Callable[[Node], int] = lambda node: 0
    bias: int | None = None
    u8: Kernel | None = None
    u8_float: Kernel | None = None
    dynamic: Kernel | None = None
    blocks: Kernel | None = None
    native: str = ""
    native_u8: str = ""
    rounds: int = 1
    stores: tuple[int, ...] = ()
    absorbs: frozenset[str] = frozenset()
    bare: bool = False
    slow: Reason = NONE
    why: Reason = NONE


def _gemm_channels(node: Node) -> int:
    """Return the axis of N: B of a Gemm is (N, K) if transB is set, else (K, N)."""
    return 0 if node.attributes.get_int("transB", 0) else 1


def _same(name: str, **facts: object) -> Op:
    """Return the row of a standard operator that moves or selects values, also in uint8."""
    return Op(kind="same", u8=("", name), **facts)  # type: ignore[arg-type]


def _arith(kernel: str, **facts: object) -> Op:
    """Return the row of an operator with an integer kernel of com.microsoft, without weights."""
    return Op(kind="arith", u8=(MS, kernel), **facts)  # type: ignore[arg-type]


def _float(why: Reason, **facts: object) -> Op:
    """Return the row of an operator that stays float, at least with static ranges."""
    return Op(kind="float", activations=None, why=why, **facts)  # type: ignore[arg-type]


SAME_OPERATORS = (
    *"DepthToSpace Expand Flatten MaxPool ReduceMax ReduceMin".split(),
    *"Reshape Slice Split Squeeze Tile Transpose Unsqueeze".split(),
)
"""Operators that move or select values, and need no more than a row of `_same`."""
INTEGER_OPERATORS = (
    *("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"),
    *(f"{MS}.{name}" for name in "DynamicQuantizeLSTM DynamicQuantizeMatMul MatMulIntegerToFloat QAttention".split()),
    *(f"{MS}.{name}" for name in "QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearGlobalAveragePool".split()),
    *(f"{MS}.{name}" for name in "QLinearLeakyRelu QLinearMul QLinearSigmoid QLinearSoftmax QLinearWhere".split()),
)
"""Operators that compute integers already."""
OPS: dict[str, Op] = {
    "Conv": Op(kind="compute", weight=1, bias=2, u8=("", "QLinearConv"), stores=(1,), absorbs=RELUS),
    "Gemm": Op(
        kind="compute",
        weight=1,
        channel_axis=_gemm_channels,
        bias=2,
        u8=(MS, "QGemm"),
        u8_float=(MS, "QGemm"),
        dynamic=(MS, "DynamicQuantizeMatMul"),
        blocks=(MS, "MatMulNBits"),
        stores=(1,),
        absorbs=RELUS,
    ),
    "MatMul": Op(
        kind="compute",
        activations=(0, 1),
        weight=1,
        channel_axis=lambda node: -1,
        u8=("", "QLinearMatMul"),
        u8_float=(MS, "MatMulIntegerToFloat"),
        dynamic=(MS, "DynamicQuantizeMatMul"),
        blocks=(MS, "MatMulNBits"),
        stores=(1,),
        absorbs=RELUS,
    ),
    ATTENTION: _float(reasons.SOFTMAX, native="Attention", rounds=3),
    GROUP_QUERY: _float(reasons.SOFTMAX, native="CachedAttention", rounds=3),
    f"{MS}.Attention": Op(kind="compute", weight=1, channel_axis=lambda node: -1, u8_float=(MS, "QAttention")),
    "ConvTranspose": Op(
        kind="compute",
        weight=1,
        channel_axis=lambda node: 1,
        bias=2,
        native_u8="ConvTranspose",
        stores=(1,),
        absorbs=RELUS,
        why=reasons.NO_KERNEL.about("ConvTranspose"),
    ),
    "LSTM": _float(
        reasons.NO_KERNEL.about("an LSTM with static ranges"), dynamic=(MS, "DynamicQuantizeLSTM"), native="LSTM"
    ),
    "GRU": _float(
        reasons.NO_KERNEL.about("a GRU with static ranges"), dynamic=(MS, "DynamicQuantizeMatMul"), native="GRU"
    ),
    "RNN": _float(reasons.NO_KERNEL.about("RNN")),
    "Add": _arith("QLinearAdd", activations=None, absorbs=RELUS),
    "Mul": _arith("QLinearMul", activations=None, absorbs=RELUS),
    "Concat": _arith("QLinearConcat", activations=None),
    "Where": _arith("QLinearWhere", activations=(1, 2)),
    "AveragePool": _arith("QLinearAveragePool"),
    "GlobalAveragePool": _arith("QLinearGlobalAveragePool"),
    "LeakyRelu": _arith("QLinearLeakyRelu", absorbs=RELUS),
    "Sigmoid": _arith("QLinearSigmoid", slow=reasons.LOOKUP),
    "HardSigmoid": _arith("QLinearLeakyRelu", slow=reasons.NO_KERNEL.about("HardSigmoid")),
    GATE: _arith("QLinearMul", slow=reasons.FUSED_GROUP),
    **{name: _same(name) for name in SAME_OPERATORS},
    "Gather": _same("Gather", blocks=(MS, "GatherBlockQuantized"), stores=(0,)),
    "Pad": _same("Pad", bare=True),
    "SpaceToDepth": _same("SpaceToDepth", bare=True),
    "Resize": _same("Resize", why=reasons.NEAREST_ONLY),
    INTERPOLATION: Op(kind="float", native_u8="Resize", why=reasons.NEAREST_ONLY),
    GROUP_NORM: Op(kind="float", native_u8="GroupNormalization", absorbs=RELUS, why=reasons.NORMALIZATION),
    SLOPED: _float(reasons.NO_KERNEL.about("PRelu"), native_u8="Lines"),
    "Softmax": _float(reasons.SOFTMAX),
    "LogSoftmax": _float(reasons.SOFTMAX),
    FUNCTION: _float(reasons.FUSED_GROUP, native_u8=TABLE),
    "Relu": _float(reasons.NOT_ABSORBED, native_u8=TABLE),
    "Clip": _float(reasons.NOT_ABSORBED, native_u8=TABLE),
    "Sub": _float(reasons.NO_KERNEL.about("Sub")),
    "Div": _float(reasons.NO_KERNEL.about("Div")),
    "ReduceMean": _float(reasons.NO_KERNEL.about("a mean, except GlobalAveragePool")),
    "Gelu": _float(reasons.GELU, native_u8=TABLE),
    f"{MS}.Gelu": _float(reasons.GELU),
    f"{MS}.BiasGelu": _float(reasons.GELU),
    f"{MS}.FastGelu": _float(reasons.GELU),
    f"{MS}.QuickGelu": _float(reasons.GELU),
    "BatchNormalization": _float(reasons.CHANNEL_SCALE, native_u8=TABLE, absorbs=RELUS),
    **dict.fromkeys(
        (
            "GroupNormalization",
            "InstanceNormalization",
            "LayerNormalization",
            "LpNormalization",
            "RMSNormalization",
            f"{MS}.EmbedLayerNormalization",
            "SimplifiedLayerNormalization",
            f"{MS}.SkipLayerNormalization",
            f"{MS}.SkipSimplifiedLayerNormalization",
        ),
        _float(reasons.NORMALIZATION),
    ),
    **{
        name: _float(reasons.NO_KERNEL.about(name), native_u8=TABLE)
        for name in "Celu Elu Erf HardSwish Mish PRelu Selu Softplus Softsign Swish Tanh".split()
    },
    "Einsum": _float(reasons.NOT_A_PRODUCT),
    **dict.fromkeys(
        ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
        _float(reasons.QUANTIZED_BEFORE),
    ),
    **dict.fromkeys(INTEGER_OPERATORS, _float(reasons.INTEGER)),
    **dict.fromkeys((f"{MS}.GatherBlockQuantized", f"{MS}.MatMulNBits"), _float(reasons.IN_BLOCKS)),
    "If": _float(reasons.CONTROL_FLOW.about("branches")),
    "Loop": _float(reasons.CONTROL_FLOW.about("body")),
    "Scan": _float(reasons.CONTROL_FLOW.about("body")),
}


def row_of(node: Node) -> Op | None:
    """Return the row of a node's operator, or None if there is none."""
    return OPS.get(key(node))


def only_moves(node: Node) -> bool:
    """Whether a node of kind ``same`` only moves or selects values of its first input."""
    resize = node.attributes if node.op_type == "Resize" else {}
    mode, where = (resize.get(name) for name in ("mode", "coordinate_transformation_mode"))
    interpolates = mode is not None and mode.as_string() != "nearest"
    interpolates = interpolates or (where is not None and where.as_string() == "tf_crop_and_resize")  # fills in a value
    return (len(node.outputs) == 1 or node.op_type == "Split") and not interpolates


def float_reason(op: str) -> Reason:
    """Return why an operator without an integer form stays float."""
    row = OPS.get(op)
    return row.why if row is not None and row.why else reasons.NO_KERNEL.about(op)
