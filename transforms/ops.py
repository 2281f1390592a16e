"""What int8 needs to know of each operator, as a table. An operator that is not here stays float.

Whether the installed runtime really has the kernels named here is asked of the runtime (`requant.quantize.runtime`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from onnx_ir import Node

Kernel = tuple[str, str]  # domain, operator
MS = "com.microsoft"
RELUS = frozenset({"Relu", "Clip"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """How one operator lives in an INT8 graph.

    Attributes:
        kind: ``compute`` multiplies by constant weights; ``arith`` has an integer kernel with scales of its own;
            ``same`` moves or selects values, so that its output has its input's scale; ``float`` has no integer
            kernel worth running.
        activations: Indices of the inputs that carry activations; None for all.
        weight: Index of the constant weight.
        channel_axis: The output-channel axis of the weight, from the node.
        bias: Index of the bias, int32 with scale ``s_x * s_w``.
        u8: Kernel that reads and writes uint8.
        u8_float: Kernel that reads uint8 and writes float.
        absorbs: Operators after it that run inside its kernel.
        why: Why it stays float, or what to mind.
    """

    kind: Literal["compute", "arith", "same", "float"]
    activations: tuple[int, ...] | None = (0,)
    weight: int | None = None
    channel_axis: Callable[[Node], int] = lambda node: 0
    bias: int | None = None
    u8: Kernel | None = None
    u8_float: Kernel | None = None
    absorbs: frozenset[str] = frozenset()
    why: str = ""


def _gemm_channels(node: Node) -> int:
    """B of a Gemm is (N, K) where transB is set, else (K, N)."""
    return 0 if node.attributes.get_int("transB", 0) else 1


def _same(name: str) -> Op:
    return Op(kind="same", u8=("", name))


def _float(why: str) -> Op:
    return Op(kind="float", activations=None, why=why)


OPS: dict[str, Op] = {
    "Conv": Op(kind="compute", weight=1, bias=2, u8=("", "QLinearConv"), absorbs=RELUS),
    "Gemm": Op(
        kind="compute",
        weight=1,
        channel_axis=_gemm_channels,
        bias=2,
        u8=(MS, "QGemm"),
        u8_float=(MS, "QGemm"),
        absorbs=RELUS,
    ),
    "MatMul": Op(
        kind="compute",
        weight=1,
        channel_axis=lambda node: -1,
        u8=("", "QLinearMatMul"),
        u8_float=(MS, "MatMulIntegerToFloat"),
        absorbs=RELUS,
    ),
    "Add": Op(kind="arith", activations=None, u8=(MS, "QLinearAdd"), absorbs=RELUS),
    "Mul": Op(kind="arith", activations=None, u8=(MS, "QLinearMul"), absorbs=RELUS),
    "Concat": Op(kind="arith", activations=None, u8=(MS, "QLinearConcat")),
    "AveragePool": Op(kind="arith", u8=(MS, "QLinearAveragePool")),
    "GlobalAveragePool": Op(kind="arith", u8=(MS, "QLinearGlobalAveragePool")),
    "LeakyRelu": Op(kind="arith", u8=(MS, "QLinearLeakyRelu")),
    **{
        name: _same(name)
        for name in (
            "DepthToSpace",
            "Flatten",
            "Gather",
            "MaxPool",
            "Reshape",
            "Slice",
            "SpaceToDepth",
            "Squeeze",
            "Transpose",
            "Unsqueeze",
        )
    },
    "Resize": Op(kind="same", u8=("", "Resize"), why="only mode=nearest selects values; interpolation is float"),
    "ConvTranspose": _float("the runtime has no integer ConvTranspose"),
    "Softmax": _float("an integer softmax is several times slower than the float one"),
    "Sigmoid": _float("alone or in a SiLU, the integer table lookup costs more than the float kernel"),
    "Relu": _float("no integer kernel where no Conv, Gemm, MatMul, Add or Mul absorbs it"),
    "Clip": _float("no integer kernel where no Conv, Gemm, MatMul, Add or Mul absorbs it"),
}


def only_moves(node: Node) -> bool:
    """Whether a node of kind ``same`` really gives nothing but values of its first input."""
    interpolates = node.op_type == "Resize" and node.attributes.get_string("mode", "nearest") != "nearest"
    return len(node.outputs) == 1 and not interpolates


NO_KERNEL = "the runtime has no integer kernel for {}"


def why_float(op_type: str) -> str:
    """Say why an operator without an integer form stays float."""
    row = OPS.get(op_type)
    return row.why if row is not None and row.why else NO_KERNEL.format(op_type)
