"""Why a unit stays float: a code that programs compare and a text that users read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason: code compares `code`, users read `text`.

    Attributes:
        code: A kebab-case name; equal for all units that stay float for the same cause.
        text: One sentence, with names and figures filled in. A template holds ``{}`` until `about` fills it in.
    """

    code: str
    text: str

    def __str__(self) -> str:
        """Return the text, so that a reason can be printed."""
        return self.text

    def __bool__(self) -> bool:
        """Whether there is a reason: `NONE` is false."""
        return bool(self.code)

    def about(self, *values: object) -> Reason:
        """Return this reason with `values` filled into its text."""
        return Reason(self.code, self.text.format(*values))


NONE = Reason("", "")
"""No reason: the unit computes in integers."""


def other(reason: Reason | str) -> Reason:
    """Return a text without a code of its own as a reason with the code ``other``; return a `Reason` unchanged."""
    if isinstance(reason, Reason):
        return reason
    return Reason("other", reason) if reason else NONE


CHANNEL_SCALE = Reason(
    "no-kernel",
    "the runtime has no integer kernel for BatchNormalization; a native operator computes it in integers on tensors of "
    "two axes, and on images (four axes) beside convolutions",
)
CONTROL_FLOW = Reason("control-flow", "control flow runs in float; the operators in its {} are quantized")
FUSED_GROUP = Reason("fused-group", "the runtime fuses the group into one float kernel")
UNFUSED_GROUP = Reason(
    "unfused-group",
    "a mean over other axes than the last one; the runtime does not fuse the group, and has integer kernels for only "
    "some of its operators",
)
GATE_RANGE = Reason("gate-range", "its alpha or beta is outside the range of the integer form")
GELU = Reason("gelu", "one float kernel computes it; uint8 would need several kernels")
ALREADY = Reason("quantized-weights", "its weights are quantized already")
INTEGER = Reason("integer-already", "already computes in integers")
IN_BLOCKS = Reason("integer-already", "its weights are integers in blocks already")
LOOKUP = Reason("slow-lookup", "the integer table lookup is slower than the float kernel, alone and in a SiLU")
NEAREST_ONLY = Reason("interpolates", "only mode=nearest runs on uint8; interpolation and cropping run in float")
NO_KERNEL = Reason("no-kernel", "the runtime has no integer kernel for {}")
NORMALIZATION = Reason(
    "normalization", "a normalization squares and divides; the runtime computes it in one float kernel"
)
NOT_ABSORBED = Reason(
    "not-absorbed", "runs in integers only inside the kernel of a Conv, Gemm, MatMul, Add, Mul or LeakyRelu"
)
NOT_A_PRODUCT = Reason("not-a-product", "a MatMul cannot express it")
QUANTIZED_BEFORE = Reason("quantized-before", "part of a quantization that the input model already has")
SOFTMAX = Reason("slow-softmax", "an integer softmax is several times slower than the float one")
