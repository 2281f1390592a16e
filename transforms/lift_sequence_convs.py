"""Compute convolutions of sequences as convolutions of images with one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.opsets import AXES_ARE_INPUT
from .graphs.queries import axes_of, computing_graphs, constant, is_standard, made_by, sole_reader
from .graphs.rewriter import add_initializer, discard, names, unused_name
from .patterns import pads
from .patterns.elementwise import CHANNELWISE, ELEMENTWISE
from .patterns.group_norms import INSTANCE, OPERATORS
from .patterns.linear import CONVOLUTIONS, convolves
from .registry import Change, transform

SEQUENCE = 3  # axes: batch, channels, time
ROW = 2  # the axis of the only row of an image, in front of time
NARROW = range(4, 16)
"""Channels with which ONNX Runtime may take longer for a convolution of an image than of a sequence: a block has 16."""
LONG_ENOUGH = {"Conv": ((16, 3), (12, 5), (7, 7)), "ConvTranspose": ((1, 3),)}
"""By operator: results, at least, and the shortest window with which narrow inputs take no longer as images in ONNX
Runtime's float kernels with AVX-512. A long window, or many results, outweigh the channels that fill up a block. A
ConvTranspose has no blocked layout."""
FEW, WINDOW = 5, 8
"""Results of a dense convolution, at most, and values that each of them reads, at least, with which the blocked layout
is slower: it computes 16 channels. With one result an image takes twice as long as a sequence, with 4 results 1.2 times
as long, with 8 as long."""
WHOLE = frozenset({"GlobalAveragePool", "GlobalMaxPool"})
"""Pools over a whole sequence or image."""
BY_AXIS = {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 0}
"""Attributes of a window with a value for each axis, and the value for a row."""


@dataclass(frozen=True, slots=True)
class Lifted:
    """How a node computes on images.

    Attributes:
        data: The indices of the inputs that are images then.
        constants: New values of constant inputs, by index.
        attributes: New values of attributes.
        images: Whether the results are images too.
    """

    data: Sequence[int] = (0,)
    constants: Mapping[int, np.ndarray] = field(default_factory=dict)
    attributes: Mapping[str, int | list[int]] = field(default_factory=dict)
    images: bool = True


Rule = Callable[[ir.Node], Lifted | None]


@transform("lift_sequence_convs", after=("fold_constants", "fold_batch_norms", "fold_pad"))
def lift_sequence_convs(model: ir.Model) -> Change:
    """Add an axis of length 1 to sequences that are convolved: convolutions compute on images with one row.

    Before:  y = Add(Relu(Conv(x, W)), x),  x (N, C, T), W (M, C, K)
    After:   z = Unsqueeze(x, 2), (N, C, 1, T);  y = Squeeze(Add(Relu(Conv(z, W')), z), 2),  W' (M, C, 1, K)
    Before:  y = Reshape(InstanceNormalization(Reshape(x, (N, groups, -1))), (N, C, T)): a group norm before opset 21
    After:   y = Squeeze(Reshape(InstanceNormalization(Reshape(z, (N, groups, -1))), (N, C, 1, T)), 2)
        What stands between convolutions computes on images too. ONNX Runtime takes several times as long for a
        depthwise convolution of a sequence as for one of an image, and it has its blocked layout, as we have native
        operators, for images alone.
    Left alone: opsets below 13 (``opset``); computed weights (``computed``); convolutions that would be slower on
        images (``narrow``): Conv with at most 5 results; Conv of 4 to 15 channels with at most 6 results, or with
        windows shorter than 7 (shorter than 5 from 12 results on, than 3 from 16 on); ConvTranspose of 4 to 15
        channels with windows shorter than 3.
    """
    change = Change()
    convs = [(node, graph) for graph in computing_graphs(model) for node in graph if convolves(node, SEQUENCE)]
    if not convs:
        return change
    if model.opset_imports.get("", 0) < AXES_ARE_INPUT:
        change.skip("opset")
        return change
    known, taken = Known(model), names(model)

    for graph in dict.fromkeys(graph for _, graph in convs):
        found = _found(graph, known)
        _Writer(graph, found, taken).write()
        for node in (node for node, home in convs if home is graph):
            if node in found:
                change.applied += 1
            else:
                change.skip("narrow" if _is_narrow(node) else "computed")
    return change


def _is_narrow(node: ir.Node) -> bool:
    """Return whether a convolution in one group reads few channels in a short window, or a Conv writes few."""
    weights = constant(node.inputs[1])
    if weights is None or node.attributes.get_int("group", 1) != 1:
        return False
    first, second, length = weights.shape.numpy()
    outputs, inputs = (first, second) if node.op_type == "Conv" else (second, first)
    if node.op_type == "Conv" and outputs <= FEW and inputs * length >= WINDOW:
        return True
    enough = LONG_ENOUGH[node.op_type]
    return inputs in NARROW and not any(outputs >= least and length >= window for least, window in enough)


def _found(graph: ir.Graph, known: Known) -> dict[ir.Node, Lifted]:
    """Return the nodes that compute on images: convolutions, and what can follow them."""
    found: dict[ir.Node, Lifted] = {}
    images: set[ir.Value] = set()
    for node in graph:
        read = [value for value in node.inputs if value is not None]
        begins = convolves(node, SEQUENCE)
        reads = bool(images.intersection(read)) or _regrouping(node) in found
        if node.domain or not (reads or begins) or (begins and _is_narrow(node)):
            continue
        lifted = RULES[node.op_type](node) if node.op_type in RULES else None
        if lifted is None or any(known.rank(value) != SEQUENCE for value in _data(node, lifted) if value not in images):
            continue
        found[node] = lifted
        if lifted.images:
            images.update(node.outputs)
    return found


def _regrouping(back: ir.Node) -> ir.Node | None:
    """Return the Reshape to groups whose norm this Reshape gives the form of a sequence again; None for other nodes."""
    norm = made_by(back.inputs[0], INSTANCE) if is_standard(back, "Reshape") else None
    return None if norm is None or norm.domain else made_by(norm.inputs[0], "Reshape")


def _data(node: ir.Node, lifted: Lifted) -> list[ir.Value]:
    """Return the inputs of a node that are images."""
    return [value for index in lifted.data if (value := node.inputs[index]) is not None]


# ----------------------------------------------------------------------------------------------------------- rules


def _window(node: ir.Node) -> Lifted | None:
    """A convolution with constant weights, or a pool: the window has one row."""
    if "output_shape" in node.attributes or any(value.name for value in node.outputs[1:]):
        return None
    constants = {}
    if node.op_type in CONVOLUTIONS:
        weights = constant(node.inputs[1])
        if weights is None:
            return None
        constants[1] = np.expand_dims(weights.numpy(), ROW)
    attributes: dict[str, int | list[int]] = {
        name: [row, *node.attributes.get_ints(name, ())] for name, row in BY_AXIS.items() if name in node.attributes
    }
    if "pads" in node.attributes:
        before, behind = node.attributes.get_ints("pads", ())
        attributes["pads"] = [0, before, 0, behind]
    return Lifted(constants=constants, attributes=attributes)


def _alike(node: ir.Node) -> Lifted | None:
    """A function of each element, perhaps of two tensors; constants for each channel or step get an axis."""
    data, constants = [], {}
    for index, value in enumerate(node.inputs):
        tensor = constant(value)
        if value is None or (node.op_type == "BatchNormalization" and index):
            continue
        if tensor is None:
            data.append(index)
        elif len(tensor.shape) > SEQUENCE:
            return None
        elif len(tensor.shape) > 1:
            constants[index] = np.expand_dims(tensor.numpy(), -2)
    return Lifted(tuple(data), constants) if data and len(node.outputs) == 1 else None


def _along(node: ir.Node) -> Lifted | None:
    """A Concat, Split or Softmax: its axis counts from the front."""
    axis = node.attributes.get_int("axis", 0 if node.op_type == "Split" else -1) % SEQUENCE
    data = range(len(node.inputs)) if node.op_type == "Concat" else (0,)
    return Lifted(data, attributes={"axis": axis + (axis >= ROW)})


def _sliced(node: ir.Node) -> Lifted | None:
    """A Slice with given axes."""
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
    if axes is None:
        return None
    places = axes.numpy() % SEQUENCE
    return Lifted(constants={3: (places + (places >= ROW)).astype(axes.numpy().dtype)})


def _padded(node: ir.Node) -> Lifted | None:
    """A Pad with constant pads for all axes."""
    lengths = pads.lengths(node, SEQUENCE)
    if lengths is None or len(node.inputs) <= pads.LENGTHS or pads.selects_axes(node):
        return None
    return Lifted(constants={pads.LENGTHS: np.insert(np.asarray(lengths, np.int64), ROW, 0, axis=1).reshape(-1)})


def _mean(node: ir.Node) -> Lifted | None:
    """A ReduceMean over time: the mean over the row too, as `reduce_mean_to_pool` finds it."""
    if [axis % SEQUENCE for axis in axes_of(node) or ()] != [ROW]:
        return None
    kept = node.attributes.get_int("keepdims", 1) == 1
    both = [ROW, ROW + 1]
    if "axes" in node.attributes:
        return Lifted(attributes={"axes": both}, images=kept)
    return Lifted(constants={1: np.asarray(both, np.int64)}, images=kept)


def _reshaped(node: ir.Node) -> Lifted | None:
    """The two Reshapes of a group norm: to groups, which reads an image, and back, which writes one."""
    target = constant(node.inputs[1])
    lengths = [] if target is None else target.numpy().tolist()
    if len(lengths) != SEQUENCE or lengths[ROW] == 0:  # a 0 would copy the length of the row
        return None
    if _regrouping(node) is not None:
        return Lifted((), {1: np.insert(np.asarray(lengths, np.int64), ROW, 1)})
    norm = sole_reader(node.outputs[0])
    back = sole_reader(norm.outputs[0]) if is_standard(norm, INSTANCE) else None
    return Lifted(images=False) if back is not None and _regrouping(back) is node else None


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE | CHANNELWISE | OPERATORS | WHOLE | {"Identity"}, _alike),
    **dict.fromkeys((*CONVOLUTIONS, "AveragePool", "MaxPool"), _window),
    **dict.fromkeys(("Concat", "Split", "Softmax"), _along),
    "Slice": _sliced,
    "Pad": _padded,
    "ReduceMean": _mean,
    "Reshape": _reshaped,
}
"""How an operator computes on images, by its type; others read sequences."""


# --------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class _Writer:
    """The graph that is rewritten.

    Attributes:
        graph: The graph.
        found: Its nodes that compute on images.
        taken: The names in use.
        axes: The initializer with the axis of the row, once it exists.
        lifted: Sequences as images.
    """

    graph: ir.Graph
    found: Mapping[ir.Node, Lifted]
    taken: set[str]
    axes: list[ir.Value] = field(default_factory=list)
    lifted: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def write(self) -> None:
        """Rewrite all nodes, and put Squeeze nodes behind the images that others read."""
        images = dict.fromkeys(v for node, lifted in self.found.items() if lifted.images for v in node.outputs)
        for node, lifted in self.found.items():
            for index in lifted.data:
                value = node.inputs[index]
                if value is not None and value not in images:
                    node.replace_input_with(index, self._unsqueezed(value, node))
            self._rewrite(node, lifted)
        for value in images:
            self._squeeze(value)

    def _rewrite(self, node: ir.Node, lifted: Lifted) -> None:
        """Give a node its new constants and attributes."""
        for index, array in lifted.constants.items():
            old = node.inputs[index]
            assert old is not None  # a constant
            name = unused_name(self.taken, f"{old.name}/row")
            node.replace_input_with(index, add_initializer(self.graph, name, array, old.dtype))
            discard(old)
        for name, value in lifted.attributes.items():
            node.attributes[name] = next(iter(ir.convenience.convert_attributes({name: value})))

    def _unsqueezed(self, value: ir.Value, place: ir.Node) -> ir.Value:
        """Return a sequence as an image: the result of an Unsqueeze in front of the first reader."""
        if value not in self.lifted:
            self.lifted[value] = self._changed("Unsqueeze", value, "image")
            self.lifted[value].shape = _with_row(value.shape)
            node = self.lifted[value].producer()
            assert node is not None
            self.graph.insert_before(place, [node])
        return self.lifted[value]

    def _squeeze(self, value: ir.Value) -> None:
        """Give an image its shape, and a Squeeze to the readers that need the sequence and to the user."""
        shape = value.shape
        value.shape = _with_row(shape)
        uses = [use for use in value.uses() if use.idx not in self._data_of(use.node)]
        if not uses and not value.is_graph_output():
            return
        result = self._changed("Squeeze", value, "sequence")
        result.shape = shape
        producer, node = value.producer(), result.producer()
        assert producer is not None
        assert node is not None
        self.graph.insert_after(producer, [node])
        for use in uses:
            use.node.replace_input_with(use.idx, result)
        for index, output in enumerate(self.graph.outputs):
            if output is value:
                self.graph.outputs[index] = result
                result.name, value.name = value.name, unused_name(self.taken, f"{value.name}/image")

    def _data_of(self, node: ir.Node) -> Sequence[int]:
        """Return the indices of the inputs of a node that are images."""
        return self.found[node].data if node in self.found else ()

    def _changed(self, op: str, value: ir.Value, made: str) -> ir.Value:
        """Return the result of an Unsqueeze or Squeeze that is in no graph yet; `made` ends its name."""
        if not self.axes:
            self.axes.append(
                add_initializer(self.graph, unused_name(self.taken, "row/axis"), np.asarray([ROW], np.int64))
            )
        node = ir.node(op, [value, *self.axes], name=unused_name(self.taken, f"{value.name}/{op.lower()}"))
        result = node.outputs[0]
        result.name, result.type = unused_name(self.taken, f"{value.name}/{made}"), value.type
        return result


def _with_row(shape: ir.Shape | None) -> ir.Shape | None:
    """Return the shape of an image with one row."""
    if shape is None:
        return None
    lengths = list(shape)
    return ir.Shape([*lengths[:ROW], 1, *lengths[ROW:]])
