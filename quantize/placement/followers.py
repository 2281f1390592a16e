"""Operators that stay float and that a runtime may compute in the kernel of the product before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...transforms.int8.ops import OPS
from ...transforms.int8.plan import Impl, Unit
from ..model.shapes import Shape


def followers_of(
    units: Sequence[Unit], forms: Mapping[str, Sequence[Impl]], shapes: Mapping[str, Shape]
) -> dict[str, Unit]:
    """Return the product behind which each follower runs, by the name of the follower.

    A follower has no integer form. All its inputs come from one product or from other followers of it, and have the
    shape of its output: a SiLU, not the gate of a squeeze-and-excitation. No other unit reads the product, so that one
    kernel may compute all of them.

    Args:
        units: The units in order.
        forms: The possible implementations by unit.
        shapes: Shapes by tensor, as far as they are known.
    """
    products = {unit.name: unit for unit in units if unit.op in OPS and OPS[unit.op].kind == "compute"}
    lead: dict[str, str] = {}  # the product behind which a tensor is made
    found: dict[str, str] = {}
    for unit in units:
        behind = {lead.get(tensor, "") for tensor in unit.inputs}
        if unit.name in products:
            lead.update(dict.fromkeys(unit.outputs, unit.name))
        elif len(behind) == 1 and behind <= products.keys() and _may_follow(unit, forms, shapes):
            found[unit.name] = behind.pop()
            lead.update(dict.fromkeys(unit.outputs, found[unit.name]))
    # a product that another unit reads too has no followers
    written = {tensor: name for name, unit in products.items() for tensor in unit.outputs}
    read = {written[t] for unit in units for t in unit.inputs if t in written and found.get(unit.name) != written[t]}
    return {name: products[product] for name, product in found.items() if product not in read}


def _may_follow(unit: Unit, forms: Mapping[str, Sequence[Impl]], shapes: Mapping[str, Shape]) -> bool:
    """Return whether a unit stays float and keeps the shape of its inputs."""
    known = {shapes.get(tensor) for tensor in (*unit.inputs, *unit.outputs)}
    return tuple(forms[unit.name]) == (Impl.FLOAT,) and bool(unit.inputs) and len(known) == 1 and None not in known
