"""What the runtime's blocked layout costs float convolutions whose neighbours do not share it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...transforms.plan import Unit
from ..runtime.attribution import Spent

BLOCK = 16  # channels to which the layout pads
INTO, OUT_OF = "ReorderInput", "ReorderOutput"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turned:
    """What changes of layout took in the float model, shared among the convolutions that asked for them.

    Between a float convolution and a neighbour that wants the plain layout, as the activation of a SiLU, both in float,
    there is a change of layout. It counts as a part of the convolution; where the neighbour is in integers instead, the
    conversion between the two has a change of layout in its price already, and so is cheaper by it.

    Attributes:
        input: By tensor that a float convolution reads, in microseconds.
        output: By tensor that it writes.
        readers: By tensor, how many convolutions read it, which share its change of layout.
    """

    input: Mapping[str, float] = field(default_factory=dict)
    output: Mapping[str, float] = field(default_factory=dict)
    readers: Mapping[str, int] = field(default_factory=dict)

    def of(self, unit: Unit) -> float:
        """Return what a unit costs more in float; 0 for what is no convolution."""
        if unit.op != "Conv":
            return 0.0
        read = self.input.get(unit.inputs[0], 0.0) / self.readers.get(unit.inputs[0], 1)
        return read + sum(self.output.get(tensor, 0.0) for tensor in unit.outputs)


def turned_by(units: Iterable[Unit], shapes: Mapping[str, Shape], whole: Spent) -> Turned:
    """Share the changes of layout in a profile of the float model among its convolutions, by shapes.

    Args:
        units: The units of the model.
        shapes: Shapes by tensor, as far as they are known.
        whole: The profile.
    """
    convs = [unit for unit in units if unit.op == "Conv"]
    read = Counter(unit.inputs[0] for unit in convs)
    written = {tensor for unit in convs for tensor in unit.outputs}
    return Turned(_shared(read, shapes, whole, INTO), _shared(written, shapes, whole, OUT_OF), read)


def _shared(tensors: Iterable[str], shapes: Mapping[str, Shape], whole: Spent, op: str) -> dict[str, float]:
    """Return what each tensor has of the time of one operator: tensors of one shape have equal parts."""
    took: dict[Shape, float] = defaultdict(float)
    for (kernel, shape), microseconds in whole.turned.items():
        if kernel == op:
            took[_blocked(shape)] += microseconds
    known = {tensor: _blocked(shapes[tensor]) for tensor in tensors if tensor in shapes}
    many = Counter(known.values())
    return {tensor: took[shape] / many[shape] for tensor, shape in known.items() if shape in took}


def _blocked(shape: Shape) -> Shape:
    """Return a shape whose channels fill whole blocks."""
    return (shape[0], -(-shape[1] // BLOCK) * BLOCK, *shape[2:]) if len(shape) > 1 else shape
