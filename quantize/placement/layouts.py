"""The cost of the runtime's blocked layout, where the neighbours of a float convolution need the plain layout."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...transforms.int8.plan import Unit
from ..model.shapes import Shape
from ..runtime.attribution import Spent

BLOCK = 16  # the blocked layout pads channels to a multiple of this
INTO, OUT_OF = "ReorderInput", "ReorderOutput"


@dataclass(frozen=True, slots=True)
class LayoutCosts:
    """The time of the changes of layout in the float model, shared among the convolutions that cause them.

    A change of layout runs between a float convolution and a float neighbour that needs the plain layout, such as the
    activation of a SiLU. It counts as a part of the convolution. Where the neighbour is int8, the estimate of the
    conversion between the two includes a change of layout already, and the conversion costs that much less.

    Attributes:
        input: Microseconds by tensor that a float convolution reads.
        output: Microseconds by tensor that a float convolution writes.
        readers: The number of convolutions that read a tensor, and share its change of layout.
    """

    input: Mapping[str, float] = field(default_factory=dict)
    output: Mapping[str, float] = field(default_factory=dict)
    readers: Mapping[str, int] = field(default_factory=dict)

    def of(self, unit: Unit) -> float:
        """Return the time of the changes of layout around a float convolution; 0 for other operators."""
        if unit.op != "Conv" or not unit.inputs:
            return 0.0
        read = self.input.get(unit.inputs[0], 0.0) / self.readers.get(unit.inputs[0], 1)
        return read + sum(self.output.get(tensor, 0.0) for tensor in unit.outputs)


def layout_costs(units: Iterable[Unit], shapes: Mapping[str, Shape], profile: Spent) -> LayoutCosts:
    """Share the changes of layout in a profile of the float model among its convolutions, by shapes.

    Args:
        units: The units of the model.
        shapes: Shapes by tensor, as far as they are known.
        profile: The profile of the float model.
    """
    convs = [unit for unit in units if unit.op == "Conv" and unit.inputs]
    read = Counter(unit.inputs[0] for unit in convs)
    written = {tensor for unit in convs for tensor in unit.outputs}
    return LayoutCosts(_shared(read, shapes, profile, INTO), _shared(written, shapes, profile, OUT_OF), read)


def _shared(tensors: Iterable[str], shapes: Mapping[str, Shape], profile: Spent, op: str) -> dict[str, float]:
    """Return each tensor's part of the time of one operator: tensors of one shape have equal parts."""
    took: dict[Shape, float] = defaultdict(float)
    for (kernel, shape), microseconds in profile.turned.items():
        if kernel == op:
            took[_blocked(shape)] += microseconds
    known = {tensor: _blocked(shapes[tensor]) for tensor in tensors if tensor in shapes}
    many = Counter(known.values())
    return {tensor: took[shape] / many[shape] for tensor, shape in known.items() if shape in took}


def _blocked(shape: Shape) -> Shape:
    """Return a shape with its channels padded to whole blocks."""
    return (shape[0], -(-shape[1] // BLOCK) * BLOCK, *shape[2:]) if len(shape) > 1 else shape
