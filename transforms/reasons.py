"""Why a unit stays float: codes that programs compare, with the texts that users read."""

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


FUSED_GROUP = Reason("fused-group", "the runtime fuses the group into one float kernel")
GELU = Reason("gelu", "float in one kernel; in uint8 it would fall apart into several")
IN_BODY = Reason("control-flow", "{} at run time; its {} quantized inside")
INTEGER = Reason("integer-already", "computes in integers already")
LOOKUP = Reason("slow-lookup", "alone or in a SiLU, the integer table lookup costs more than the float kernel")
NEAREST_ONLY = Reason("interpolates", "only mode=nearest selects values; interpolation and cropping are float")
NO_KERNEL = Reason("no-kernel", "the runtime has no integer kernel for {}")
NO_INTEGER = Reason("no-kernel", "the runtime has no integer {}")
NORMALIZATION = Reason(
    "normalization", "a normalisation squares and divides: the runtime computes it in float, in one kernel"
)
NOT_ABSORBED = Reason("not-absorbed", "no integer kernel where no Conv, Gemm, MatMul, Add or Mul absorbs it")
NOT_A_PRODUCT = Reason("not-a-product", "not a matrix product that MatMul could express")
QUANTIZED_BEFORE = Reason("quantized-before", "part of a quantization that was there before")
SOFTMAX = Reason("slow-softmax", "an integer softmax is several times slower than the float one")
