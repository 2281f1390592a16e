"""Write the padding of convolutions and poolings as numbers."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import computing_nodes
from .registry import Change, LeftAlone, transform

CONVOLUTIONS = ("Conv", "ConvTranspose")
POOLS = ("MaxPool", "AveragePool")
RULES = frozenset({"SAME_UPPER", "SAME_LOWER", "VALID"})
"""The values of ``auto_pad`` that compute pads."""


@dataclass(frozen=True, slots=True)
class Window:
    """The window that a convolution or a pooling moves over its input, with one number for each spatial axis.

    Attributes:
        extents: The distance between the first and the last element that one result reads, plus one.
        strides: The steps between two results.
    """

    extents: tuple[int, ...]
    strides: tuple[int, ...]


@transform("explicit_pads", after=("fold_constants",))
def explicit_pads(model: ir.Model) -> Change:
    """Write the pads of a Conv, ConvTranspose, MaxPool or AveragePool as numbers, in place of a rule (``auto_pad``).

    Before:  y = Conv(x, W, auto_pad=SAME_UPPER),  x (N, C, n, ...), W (M, C, k, ...), strides s, dilations d
    After:   y = Conv(x, W, pads=[t // 2, ..., t - t // 2, ...]),  t = (ceil(n / s) - 1) * s + (k - 1) * d + 1 - n
        SAME_LOWER pads t - t // 2 in front and t // 2 behind. With a stride of 1, t = (k - 1) * d needs no length; nor
        does a Conv of kernel 1 and stride 2, where t is 0 or -1 and nothing is padded. A ConvTranspose has
        t = (k - 1) * d + 1 - s. VALID pads nothing. ONNX Runtime refuses the rule for a Conv with dilations, and
        computes the numbers. Other transforms and the native operators read numbers alone.
    Left alone: a stride above 1 over an axis of free length (``free-length``); a window so much shorter than its
        stride that t is negative, of which ONNX Runtime cuts the input (``cut``), but for a Conv with t = -1, where no
        result reads what is cut; a pooling with dilations, whose numbers ONNX Runtime may refuse (``dilations``); a
        ConvTranspose with output_shape or output_padding (``output-shape``); a node that has pads too (``pads-too``);
        a kernel of unknown lengths, or strides or dilations that do not fit it (``window``).
    """
    change = Change()
    nodes = [node for node in computing_nodes(model, *CONVOLUTIONS, *POOLS) if _rule(node) in RULES]
    if not nodes:
        return change
    known = Known(model)
    for node in nodes:
        try:
            pads = _pads(node, known)
        except LeftAlone as reason:
            change.skip(str(reason))
            continue
        del node.attributes["auto_pad"]
        node.attributes["pads"] = ir.AttrInt64s("pads", pads)
        change.applied += 1
    return change


def _rule(node: ir.Node) -> str:
    return node.attributes.get_string("auto_pad", "NOTSET")


def _pads(node: ir.Node, known: Known) -> list[int]:
    """Return the pads of a node with a rule: those in front by axis, then those behind.

    Raises:
        LeftAlone: They are not known, or the numbers do not mean the same.
    """
    rule, window = _rule(node), _window(node, known)
    if "pads" in node.attributes:
        raise LeftAlone("pads-too")
    if "output_shape" in node.attributes or any(node.attributes.get_ints("output_padding", ())):
        raise LeftAlone("output-shape")
    if rule == "VALID":
        return [0] * (2 * len(window.extents))
    if node.op_type in POOLS and any(step != 1 for step in node.attributes.get_ints("dilations", ())):
        raise LeftAlone("dilations")
    totals = _totals(node, window, known)
    less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return less + more if rule == "SAME_UPPER" else more + less


def _window(node: ir.Node, known: Known) -> Window:
    """Return the window of a node.

    Raises:
        LeftAlone: Its numbers are not known, contradict each other or are not above 0.
    """
    get = node.attributes.get_ints
    kernel = get("kernel_shape", None) or _kernel(node, known)
    strides, dilations = get("strides", [1] * len(kernel)), get("dilations", [1] * len(kernel))
    if not kernel or not len(kernel) == len(strides) == len(dilations) or min(*kernel, *strides, *dilations) < 1:
        raise LeftAlone("window")
    extents = ((size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True))
    return Window(tuple(extents), tuple(strides))


def _kernel(node: ir.Node, known: Known) -> tuple[int, ...]:
    """Return the spatial shape of the weights of a convolution; nothing if it is not known."""
    lengths = (known.lengths(node.inputs[1] if len(node.inputs) > 1 else None) or ())[2:]
    found = tuple(n for n in lengths if n is not None)
    return found if len(found) == len(lengths) else ()


def _totals(node: ir.Node, window: Window, known: Known) -> list[int]:
    """Return the padding of each axis in front and behind together.

    Raises:
        LeftAlone: One is not known, or negative.
    """
    found = known.lengths(node.inputs[0])
    rank = len(window.extents)
    lengths = found[2:] if found is not None and len(found) == rank + 2 else (None,) * rank
    axes = zip(window.extents, window.strides, lengths, strict=True)
    if node.op_type == "ConvTranspose":
        totals = [extent - stride for extent, stride, _ in axes]
    else:
        totals = [_total(node, extent, stride, length) for extent, stride, length in axes]
    if min(totals) < 0:
        raise LeftAlone("cut")
    return totals


def _total(node: ir.Node, extent: int, stride: int, length: int | None) -> int:
    """Return the padding of one axis of a Conv or a pooling; negative where the runtime cuts the input."""
    may_cut_one = node.op_type == "Conv"  # behind the last result
    if stride == 1:
        return extent - 1
    if may_cut_one and extent == 1 and stride == 2:
        return 0
    if length is None:
        raise LeftAlone("free-length")
    total = (-(-length // stride) - 1) * stride + extent - length
    return 0 if may_cut_one and total == -1 else total
