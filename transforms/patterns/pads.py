"""What a Pad adds: the lengths, and the value."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..graphs.queries import constant, integers_of

LENGTHS, VALUE, AXES = 1, 2, 3  # the inputs of a Pad from opset 11 on; the axes came with opset 18


def fills(pad: ir.Node) -> bool:
    """Whether a Pad adds one value; other modes repeat elements, and read no value."""
    return pad.attributes.get_string("mode", "constant") == "constant"


def given_lengths(pad: ir.Node) -> list[int] | None:
    """Return the constant lengths that a Pad has, for all axes or for selected ones; None if they are not known.

    Returns:
        All begins, then all ends, in elements; negative lengths cut.
    """
    if len(pad.inputs) <= LENGTHS:  # below opset 11
        attribute = pad.attributes.get_ints("pads", None)
        return None if attribute is None else list(attribute)
    return integers_of(pad.inputs[LENGTHS])


def lengths(pad: ir.Node, rank: int | None) -> tuple[list[int], list[int]] | None:
    """Return the constant lengths of all axes; None if they are not known, or the rank does not fit.

    Args:
        pad: The Pad.
        rank: The rank of its input; None if it is unknown, which matters only where axes are selected.

    Returns:
        The begins and the ends by axis, in elements.
    """
    given = given_lengths(pad)
    if given is None:
        return None
    begins, ends = given[: len(given) // 2], given[len(given) // 2 :]
    if not selects_axes(pad):
        return (begins, ends) if rank in (None, len(begins)) else None
    axes = integers_of(pad.inputs[AXES])
    if axes is None or rank is None:
        return None
    places = [axis % rank for axis in axes]
    return _spread(begins, places, rank), _spread(ends, places, rank)


def selects_axes(pad: ir.Node) -> bool:
    """Whether a Pad has lengths for selected axes alone."""
    return len(pad.inputs) > AXES and pad.inputs[AXES] is not None


def value(pad: ir.Node) -> float | None:
    """Return the value that a Pad adds, 0 by default; None if it is computed."""
    if len(pad.inputs) <= LENGTHS:
        return pad.attributes.get_float("value", 0.0)
    given = pad.inputs[VALUE] if len(pad.inputs) > VALUE else None
    if given is None:
        return 0.0
    tensor = constant(given)
    return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


def _spread(given: Sequence[int], axes: Sequence[int], rank: int) -> list[int]:
    """Return lengths of all axes from those of selected ones."""
    every = [0] * rank
    for axis, length in zip(axes, given, strict=True):
        every[axis] = length
    return every
