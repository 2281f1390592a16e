"""Why a unit cannot be a native operator from uint8 to uint8: a table of the operators with what each of them needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ...transforms.graphs.queries import DEEPEST, Shape, constant, has_plain_window, plain_shape, whole_first
from ...transforms.int8.ops import FUNCTION, GATE, GROUP_NORM, INTERPOLATION, OPS, SLOPED, TABLE
from ...transforms.int8.plan import Unit
from ...transforms.int8.reasons import NONE, Reason
from ...transforms.patterns.conv_transposes import has_whole_strides
from ...transforms.patterns.elementwise import CHANNELWISE, Place, channels_of
from ...transforms.patterns.logarithms import find_logarithm
from ...transforms.patterns.resizes import IMAGE, find_resizing
from ...transforms.patterns.slopes import Sloped, slopes_channels, slopes_each
from ..options.declared import Strategy
from . import reasons as why
from .facts import Facts
from .operator_obstacles import compute_obstacle
from .uint8_obstacles import Rule, form_obstacle, static_obstacle, tensor_obstacle

TABLES = frozenset(op for op, row in OPS.items() if row.native_u8 == TABLE)
"""The functions of one element that only native operators compute in integers."""
FUNCTIONS = frozenset({GATE, "LeakyRelu", "Sigmoid", *TABLES}) - CHANNELWISE
"""The functions that a native convolution may absorb: the same one for all channels."""

HIGHEST_OF_LOG = 32
"""The largest x in ``Log(x + c)``, as a multiple of c; see `_function_obstacle`."""


@dataclass(frozen=True, slots=True)
class _Site:
    """A unit whose shapes are all known.

    Attributes:
        unit: The unit.
        node: Its first node.
        facts: The input of the rules.
        shapes: The shapes of its inputs, then of its outputs.
    """

    unit: Unit
    node: ir.Node
    facts: Facts
    shapes: Sequence[Shape]

    @property
    def place(self) -> Place:
        """The rank of its last output, and its axis of channels."""
        return _place(len(self.shapes[-1]), self.facts)


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a unit needs so that a native operator can compute it.

    Attributes:
        fits: Whether the operator computes a unit with such shapes, attributes and constants.
        others: The obstacles that do not depend on the operator being native.
        exact: Whether the operator computes bit for bit what the ONNX operators in its place compute.
    """

    fits: Callable[[_Site], bool]
    others: Rule = static_obstacle
    exact: bool = True


def native_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why a unit cannot be a native operator; `NONE` if it can."""
    needs, site = NEEDS.get(unit.op), _site(unit, facts)
    if not facts.native or needs is None or site is None or (facts.exact and not needs.exact) or not needs.fits(site):
        return why.NO_FORM
    return needs.others(unit, facts, strategy)


def _place(rank: int, facts: Facts) -> Place:
    """Return a rank with the axis of channels: axis 1 of images in a model with convolutions, else the last axis."""
    return Place(rank, 1 if rank == IMAGE and facts.convolves else rank - 1)


def _site(unit: Unit, facts: Facts) -> _Site | None:
    """Return a unit with its shapes; None if one is not known."""
    found = [plain_shape(facts.values.get(name)) for name in (*unit.inputs, *unit.outputs)]
    shapes = [shape for shape in found if shape is not None]
    return _Site(unit, facts.nodes[unit.nodes[0]], facts, shapes) if len(shapes) == len(found) else None


# ------------------------------------------------------------------------------------------------ what fits an operator


def _fits_always(site: _Site) -> bool:
    """Return True: the operator computes every unit of its kind."""
    return True


def _fits_image_window(site: _Site) -> bool:
    """Return whether a unit reads an image and has a plain window."""
    return len(site.shapes[0]) == IMAGE and has_plain_window(site.node)


def _fits_table(site: _Site) -> bool:
    """Return whether a unit is a function of one element; a constant with more axes than the input would add them."""
    functions = (channels_of(site.facts.nodes[name], site.place) for name in site.unit.nodes)
    single = len(site.unit.inputs) == len(site.unit.outputs) == 1
    return single and len(site.shapes[0]) == len(site.shapes[-1]) and all(functions)


def _fits_pair(site: _Site) -> bool:
    """Return whether a unit combines two tensors of which one has the shape of the result."""
    shapes = site.shapes
    return len(shapes) == 3 and whole_first(shapes[0], shapes[1], shapes[2], site.place.axis) is not None


def _fits_concat(site: _Site) -> bool:
    """Return whether a Concat joins channels."""
    return site.node.attributes.get_int("axis", 0) % site.place.rank == site.place.axis


def _fits_convolution(site: _Site) -> bool:
    """Return whether a Conv of images has a plain window and sums that fit in int32."""
    weights = plain_shape(site.node.inputs[1])
    if weights is None or len(weights) != IMAGE or not has_plain_window(site.node):
        return False
    return math.prod(length for length in weights[1:] if isinstance(length, int)) <= DEEPEST


def _fits_transposed(site: _Site) -> bool:
    """Return whether each stride of a ConvTranspose divides the lengths that `has_whole_strides` names."""
    return has_whole_strides(site.node, constant(site.node.inputs[1]))


def _fits_resize(site: _Site) -> bool:
    """Return whether a Resize changes the size of images alone.

    The ONNX operator may differ by a step in the values between pixels.
    """
    found, shape = find_resizing(site.node), site.shapes[0]
    if found is None or len(shape) != IMAGE or not found.keeps_others(shape):
        return False
    return bool(found.nearest) or not site.facts.exact


def sloped_obstacle(found: Sloped, facts: Facts) -> Reason:
    """Return why a PRelu of two parts cannot be a native operator: its slopes are neither of channels nor of elements.

    With a slope for each element, a value in the middle between two integers may be rounded to the other one than the
    ONNX operators round it to.
    """
    shape = plain_shape(facts.values.get(str(found.x.name)))
    if shape is None or plain_shape(facts.values.get(str(found.nodes[-1].outputs[0].name))) != shape:
        return why.NO_FORM
    fits = slopes_channels(found, _place(len(shape), facts)) or (slopes_each(found, shape) and not facts.exact)
    return NONE if fits else why.NO_FORM


# ----------------------------------------------------------------------------------------------------- other obstacles


def _touched_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why the tensors that a unit reads and writes cannot be uint8."""
    return tensor_obstacle(unit, facts, (*unit.inputs, *unit.outputs))


def _function_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why a function of several operators cannot be a table, also if it is steep: a logarithm near 0.

    Half a step of x, ``hi / 510``, changes ``Log(x + c)`` by at most ``hi / (510 c)``. The limit is 1/16, which is
    ``hi = 32 c``. The result then reaches to ``c`` times 33, and 1/16 is 5 of its steps. Half a step of an input from
    -10 to 10 changes a Tanh by as many.
    """
    for name in unit.nodes:
        found = find_logarithm(facts.nodes[name])
        if found is not None:
            _, high = facts.ranges.get(str(found.x.name), (0.0, 0.0))
            if high > HIGHEST_OF_LOG * found.least:
                return why.LOGARITHM.about(high / found.least)
    return _touched_obstacle(unit, facts, strategy)


def _resize_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why a Resize cannot compute on uint8; the runtime may have no such kernel."""
    return _touched_obstacle(unit, facts, strategy) or form_obstacle(unit, facts, strategy)


def _transposed_obstacle(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
    """Return why a ConvTranspose cannot compute in integers."""
    return _touched_obstacle(unit, facts, strategy) or compute_obstacle(facts.nodes[unit.nodes[0]], OPS[unit.op])


NEEDS: Mapping[str, _Needs] = {
    **dict.fromkeys((GATE, "LeakyRelu", "Sigmoid"), _Needs(_fits_always)),
    **dict.fromkeys(TABLES, _Needs(_fits_table, _touched_obstacle)),
    FUNCTION: _Needs(_fits_table, _function_obstacle),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "MaxPool", "DepthToSpace"), _Needs(_fits_image_window)),
    **dict.fromkeys(("Add", "Mul"), _Needs(_fits_pair)),
    **dict.fromkeys(("Resize", INTERPOLATION), _Needs(_fits_resize, _resize_obstacle)),
    "Concat": _Needs(_fits_concat),
    "Conv": _Needs(_fits_convolution),
    "ConvTranspose": _Needs(_fits_transposed, _transposed_obstacle, exact=False),  # the ONNX operator adds in float
    GROUP_NORM: _Needs(_fits_always, _touched_obstacle, exact=False),  # the ONNX operators add in float
    SLOPED: _Needs(_fits_always, _touched_obstacle),  # `sloped_obstacle` has seen its shapes
}
"""By the operator of a unit, what it needs to be native: of images, of two tensors, and functions of one element."""
