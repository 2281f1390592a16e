"""What makes a unit of a QDQ model a call of a native operator: inputs, attributes, and the nodes of its body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ...calibration.model.session import Array
from ...transforms.graphs.queries import Shape, constant, has_plain_window, nodes_by_name, sole_reader, whole_first
from ...transforms.int8.ops import GROUP_NORM, INTERPOLATION, RELUS, SLOPED
from ...transforms.int8.plan import Unit
from ...transforms.int8.qlinear import equal_parameters
from ...transforms.int8.qparams import dequantize, quantize
from ...transforms.patterns.elementwise import CHANNELWISE, ELEMENTWISE, Place
from ...transforms.patterns.group_norms import OPERATORS, group_norm_of
from ...transforms.patterns.resizes import NEAREST, POSITIONS, find_resizing
from .call import Anchor, Call, Tensors, attributes_of
from .chains import INTEGER, Chain, chain_of, is_uint8
from .convolution_calls import convolution_call, transposed_call
from .site import (
    IMAGE,
    WINDOW,
    Site,
    X,
    Y,
    are_constants,
    clipping,
    dequantized,
    operands,
    parameters_of,
    with_defaults,
)

TABLE, LINES = ("x", "table"), ("x", "lines")
SLOPED_LINES = (*LINES, "slopes")
PAIR = (*X, "b", "b_scale", "b_zero_point", *Y, "table")
REQUANTIZED = (*X, *Y)
NORMALIZED = (*X, "scale", "B", *Y)
CONCAT = ("a", "a_table", "b", "b_table", "c", "c_table", "d", "d_table")
ALL = 255
STEEPEST = 2**21  # steps of the result for each step of x; half of ``kMost`` in the native sources


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What is known of the model of a unit.

    Attributes:
        model: The model.
        nodes: Its nodes by name.
        shapes: Shapes of the float tensors by name.
        convolves: Whether it has convolutions, so that tensors with four axes are images.
    """

    model: ir.Model
    nodes: Mapping[str, ir.Node]
    shapes: Mapping[str, Shape]
    convolves: bool

    @classmethod
    def of(cls, model: ir.Model, shapes: Mapping[str, Shape]) -> Surroundings:
        """Return what is known of a model; `shapes` are those of its float tensors by name."""
        return cls(model, nodes_by_name(model), shapes, any(node.op_type == "Conv" for node in model.graph))


def call_of(unit: Unit, around: Surroundings) -> Call | None:
    """Return the call of a native operator for a unit between uint8 tensors; None if it has another form."""
    last = around.nodes.get(unit.nodes[-1])
    reader = sole_reader(last.outputs[0]) if last is not None and last.graph is around.model.graph else None
    shapes = [around.shapes[name] for name in (*unit.inputs, unit.outputs[0]) if name in around.shapes]
    if reader is None or reader.op_type != "QuantizeLinear" or len(shapes) <= len(unit.inputs):
        return None
    if unit.op == "Concat" and last is not None:
        shapes = _with_constants(last, shapes)
    images = all(len(shape) == IMAGE for shape in shapes) and (around.convolves or unit.op in IMAGES)
    call = CALLS.get(unit.op, _table)(Site(unit, around.nodes, reader, shapes, images))
    if call is None or not images:
        return call
    order = call.tensors.order
    ordered = [*(shapes[place] for place in order), *shapes[len(order) :]]
    return replace(call, tensors=replace(call.tensors, shapes=ordered))


def _with_constants(node: ir.Node, shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes of all inputs of a node and of its result, from those of its computed inputs and its result."""
    known, found = iter(shapes), []
    for value in node.inputs:
        pair = dequantized(value)
        tensor = None if pair is None else constant(pair.inputs[0])
        found.append(next(known, ()) if tensor is None else tuple(tensor.shape.numpy()))
    return [*found, *known]


# ------------------------------------------------------------------------------------------------------------ pools


def _mean(site: Site) -> Call | None:
    """Return the call for a GlobalAveragePool or an AveragePool; None if it has another form."""
    (anchor,) = (site.nodes[name] for name in site.unit.nodes)
    pair = dequantized(anchor.inputs[0])
    if pair is None or not site.images or not has_plain_window(anchor):
        return None
    inputs = [*operands(pair), *operands(site.quantize)[1:]]
    if not are_constants(inputs[1:]):
        return None
    body = [pair, anchor, site.quantize]
    if anchor.op_type == "GlobalAveragePool":
        return Call(anchor.op_type, str(anchor.name), REQUANTIZED, inputs, body)
    more = {name: anchor.attributes.get_int(name, 0) for name in ("ceil_mode", "count_include_pad")}
    if all(more.values()) or any(step != 1 for step in anchor.attributes.get_ints("dilations", ())):
        return None
    window = {name: default for name, default in WINDOW.items() if name != "dilations"}  # from opset 19 on
    attributes = with_defaults(anchor, window, kernel_shape=_kernel(anchor), **more)
    return Call(anchor.op_type, str(anchor.name), REQUANTIZED, inputs, body, attributes, Anchor(anchor))


def _maximum(site: Site) -> Call | None:
    """Return the call for a MaxPool; None if it has another form."""
    (anchor,) = (site.nodes[name] for name in site.unit.nodes)
    pair = dequantized(anchor.inputs[0])
    if pair is None or len(anchor.outputs) > 1 or not site.images or not has_plain_window(anchor):
        return None
    if not equal_parameters(pair.inputs[1:3], site.quantize.inputs[1:3]) or not is_uint8(site.quantize, 2):
        return None
    ceil = anchor.attributes.get_int("ceil_mode", 0)
    attributes = with_defaults(anchor, WINDOW, kernel_shape=_kernel(anchor), ceil_mode=ceil)
    return Call(
        "MaxPool", str(anchor.name), ("x",), [pair.inputs[0]], [pair, anchor, site.quantize], attributes, Anchor(anchor)
    )


def _shuffled(site: Site) -> Call | None:
    """Return the call for a DepthToSpace; None if it has another form."""
    (anchor,) = (site.nodes[name] for name in site.unit.nodes)
    pair = dequantized(anchor.inputs[0])
    if pair is None or not site.images or not is_uint8(site.quantize, 2):
        return None
    if not equal_parameters(pair.inputs[1:3], site.quantize.inputs[1:3]):
        return None
    depth_first = anchor.attributes.get_string("mode", "DCR") == "DCR"
    values = {"blocksize": anchor.attributes.get_int("blocksize", 1), "depth_first": int(depth_first)}
    body = [pair, anchor, site.quantize]
    return Call("DepthToSpace", str(anchor.name), ("x",), [pair.inputs[0]], body, attributes_of(values))


def _kernel(pool: ir.Node) -> list[int]:
    """Return the lengths of the kernel of a pool."""
    return list(pool.attributes.get_ints("kernel_shape", ()))


def _resized(site: Site) -> Call | None:
    """Return the call for a Resize; None if it has another form."""
    (anchor,) = (site.nodes[name] for name in site.unit.nodes)
    pair, found = dequantized(anchor.inputs[0]), find_resizing(anchor)
    if pair is None or found is None or not site.images or not found.keeps_others(site.shapes[0]):
        return None
    if found.nearest and not equal_parameters(pair.inputs[1:3], site.quantize.inputs[1:3]):
        return None
    inputs = [*operands(pair), *operands(site.quantize)[1:]]
    if not are_constants(inputs[1:]):
        return None
    lengths = dict(zip(("rows", "columns"), found.sizes, strict=False))
    scales = dict(zip(("scale_down", "scale_across"), found.scales, strict=False))
    way = {"positions": POSITIONS.index(found.positions), "nearest": NEAREST.index(found.nearest)}
    attributes = attributes_of({**way, **lengths, **scales})
    return Call("Resize", str(anchor.name), REQUANTIZED, inputs, [pair, anchor, site.quantize], attributes)


def _normalized(site: Site) -> Call | None:
    """Return the call for a normalization by groups of channels, with the Relu or Clip that it absorbs."""
    nodes = [site.nodes[name] for name in site.unit.nodes]
    pair, channels = dequantized(nodes[0].inputs[0]), site.shapes[0][1] if site.images else None
    found = group_norm_of(nodes, channels) if isinstance(channels, int) else None
    if pair is None or found is None:
        return None
    inputs = [*operands(pair), None, None, *operands(site.quantize)[1:]]
    if not are_constants([*operands(pair)[1:], *operands(site.quantize)[1:]]):
        return None
    anchor = next(node for node in nodes if node.op_type in OPERATORS)
    kept = clipping([node for node in nodes if node.op_type in RELUS], site.quantize).get("table", np.arange(256))
    values = {"num_groups": found.groups, "epsilon": found.epsilon, "least": int(kept[0]), "most": int(kept[-1])}
    beside = ("least", "most") if "num_groups" in anchor.attributes else ("num_groups", "least", "most")
    return Call(
        "GroupNormalization",
        str(anchor.name),
        NORMALIZED,
        inputs,
        [pair, *nodes, site.quantize],
        attributes_of(values),
        Anchor(anchor, beside),
        values={"scale": found.scale, "B": found.shift},
    )


# --------------------------------------------------------------------------------------- functions of each element


def _pair(site: Site) -> Call | None:
    """Return the call for an Add or Mul of two tensors, with the Relu or Clip that it absorbs.

    The second tensor has the shape of the first, or a value for each channel. None if it has another form.
    """
    anchor, *absorbed = (site.nodes[name] for name in site.unit.nodes)
    pairs = [pair for pair in map(dequantized, anchor.inputs) if pair is not None]
    if len(pairs) != 2 or len(site.shapes) != 3 or pairs[0].inputs[0] is pairs[1].inputs[0]:
        return None
    order = whole_first(site.shapes[0], site.shapes[1], site.shapes[2], site.channel)
    if order is None:
        return None
    a, b = (operands(pairs[place]) for place in order)
    inputs = [*a, *b, *operands(site.quantize)[1:]]
    if not are_constants([*a[1:], *b[1:], *operands(site.quantize)[1:]]):
        return None
    values = clipping(absorbed, site.quantize)
    body = [*pairs, anchor, *absorbed, site.quantize]
    tensors = Tensors((0, PAIR.index("b")), order)
    return Call(anchor.op_type, str(anchor.name), PAIR, inputs, body, values=values, tensors=tensors)


def _concat(site: Site) -> Call | None:
    """Return the call for a Concat of two to four tensors along their channels; None if it has another form."""
    (anchor,) = (site.nodes[name] for name in site.unit.nodes)
    pairs = [pair for pair in map(dequantized, anchor.inputs) if pair is not None]
    joined = [pair.inputs[0] for pair in pairs]
    fits = len(anchor.inputs) == len(pairs) == len(set(joined)) <= len(CONCAT) // 2
    if not fits or len(pairs) < 2 or anchor.attributes.get_int("axis", 0) % len(site.shapes[-1]) != site.channel:
        return None
    if not are_constants(value for node in (*pairs, site.quantize) for value in operands(node)[1:]):
        return None
    inputs: list[ir.Value | None] = [value for tensor in joined for value in (tensor, None)]
    values = {
        CONCAT[2 * index + 1]: _requantized(pair, site.quantize)
        for index, pair in enumerate(pairs)
        if not equal_parameters(pair.inputs[1:3], site.quantize.inputs[1:3])
    }
    tensors = Tensors(range(0, 2 * len(pairs), 2))
    body = [*pairs, anchor, site.quantize]
    return Call("Concat", str(anchor.name), CONCAT, inputs, body, values=values, tensors=tensors)


def _requantized(pair: ir.Node, quantize_node: ir.Node) -> Array:
    """Return the results of a QuantizeLinear for the 256 values of a DequantizeLinear: uint8 (256,)."""
    before, after = (parameters_of(node) for node in (pair, quantize_node))
    return quantize(dequantize(np.arange(256, dtype=np.uint8), before), after)


def _table(site: Site) -> Call | None:
    """Return the call for a unit that is a function of one element; None if it is not."""
    nodes = [site.nodes[name] for name in reversed(site.unit.nodes) if name in site.nodes]  # the gate may be replaced
    for pair in map(dequantized, (value for node in nodes for value in node.inputs)):
        root = None if pair is None else pair.inputs[0]
        chains: dict[ir.Value, Chain] = {}
        if root is not None:
            _find_chains(site.end, root, chains, Place(len(site.shapes[-1]), site.channel))
        if site.end in chains and chains[site.end].root is root:
            return Call("Table", site.unit.name, TABLE, [root], chains[site.end].nodes, chain=chains[site.end])
    return None


def _sloped(site: Site) -> Call | None:
    """Return the call for a PRelu of two parts: lines of each channel or of each element; None if it is another form.

    A result may differ by a step from that of the body, where it is in the middle between two integers.
    """
    relu, clip, mul, add = nodes = [site.nodes[name] for name in site.unit.nodes]
    pairs = [pair for node in (relu, clip) if (pair := dequantized(node.inputs[0])) is not None]
    if (table := _table(site)) is not None or len(pairs) < 2 or pairs[0].inputs[0] is not pairs[1].inputs[0]:
        return table
    slopes = next(value for value in mul.inputs if value is not clip.outputs[0])
    if not are_constants([*operands(pairs[0])[1:], slopes, *operands(site.quantize)[1:]]):
        return None
    before, after = (parameters_of(node) for node in (pairs[0], site.quantize))
    rise = before.scale.item() / after.scale.item()
    lines, factors = np.array([[rise], [rise], [after.zero_point.item()]], np.float32), constant(slopes)
    if factors is None or not rise * max(1, np.abs(factors.numpy()).max()) < STEEPEST:
        return None
    told = attributes_of({"bend": before.zero_point.item(), "most": ALL, "sloped": 1, "planes": int(site.images)})
    inputs, body = [pairs[0].inputs[0], None, slopes], [*dict.fromkeys(pairs), *nodes, site.quantize]
    return Call("Lines", str(add.name), SLOPED_LINES, inputs, body, told, values={"lines": lines})


def _find_chains(value: ir.Value, root: ir.Value, chains: dict[ir.Value, Chain], place: Place) -> None:
    """Add to `chains` those that compute a tensor, and the tensors between it and `root`, from uint8 tensors."""
    node, known = value.producer(), INTEGER.keys() | ELEMENTWISE | CHANNELWISE
    if value is root or value in chains or node is None or node.op_type not in known:
        return
    for each in node.inputs:
        if each is not None and constant(each) is None:
            _find_chains(each, root, chains, place)
    chain = chain_of(node, chains, place)
    if chain is not None:
        chains[value] = chain


CALLS: Mapping[str, Callable[[Site], Call | None]] = {
    "Conv": convolution_call,
    "ConvTranspose": transposed_call,
    "AveragePool": _mean,
    "GlobalAveragePool": _mean,
    "MaxPool": _maximum,
    "Add": _pair,
    "Mul": _pair,
    "Concat": _concat,
    "DepthToSpace": _shuffled,
    "Resize": _resized,
    INTERPOLATION: _resized,
    GROUP_NORM: _normalized,
    SLOPED: _sloped,
}
"""What makes the call of a unit, by its operator; `_table` for all others."""
IMAGES = frozenset(CALLS) - {"Add", "Mul", "Concat", SLOPED}
"""The units whose tensors are images in any model."""
