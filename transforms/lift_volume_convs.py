"""Compute convolutions of volumes and videos as convolutions of images, one for each frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.opsets import AXES_ARE_INPUT
from .graphs.queries import computing_graphs, constant
from .graphs.rewriter import add_initializer, discard, names, unused_name
from .parts.frame_rules import NORM, VOLUME, Framed, Taps, Volume, bytes_of, framed, volume_of
from .patterns.linear import convolves
from .registry import Change, transform

TURN = (0, 2, 1, 3, 4)
"""The order of axes in which the frames of a volume follow each other: it swaps depth and channels."""
BLOCK = 16
"""The fewest results with which a Conv of images is faster in ONNX Runtime than one of volumes, in float: a block of
the layout of images has so many channels. With 8 it takes 1.5 times as long, with 16 and more 0.6 times. A narrower
one computes on frames if it reads frames: a U-Net as a whole takes as long as if these stayed volumes, and their native
operators are much faster."""
LARGEST = 2**30  # bytes; the most that the joined taps of a volume may take


@transform("lift_volume_convs", after=("fold_constants", "fold_batch_norms", "fold_pad", "explicit_pads"))
def lift_volume_convs(model: ir.Model) -> Change:
    """Split volumes and videos that are convolved into frames: convolutions compute on images.

    Before:  y = Relu(Conv(x, W)),  x (N, C, D, H, W), W (M, C, K, P, Q)
    After:   f = Reshape(Transpose(x, perm=[0, 2, 1, 3, 4]), [N * D, C, H, W]);  t = Concat(f_1, ..., f_K), axis 1,
             f_k the frames that tap k of the depth reads, from a Pad and a Slice (N * D', C, H, W);
             z = Relu(Conv(t, W')), W' (M, K * C, P, Q);
             y = Transpose(Reshape(z, [N, D', M, H', W']), perm=[0, 2, 1, 3, 4])
        What stands between convolutions computes on frames too: functions of each value, also of two tensors, a Concat
        of channels, and pools, in each frame and then along the depth. A ConvTranspose with stride S computes S * M
        channels, which a Reshape makes frames. A tap that reads only pads is left out. An InstanceNormalization and a
        pool along the depth compute on images (N, C, D, H * W). Native operators and the blocked layout of ONNX Runtime
        are for images alone.
    Left alone: opsets below 13 (``opset``); computed weights, or pads by rule (``computed``); lengths that are unknown,
        except that of the batch (``shape-unknown``); several groups in a window of several frames (``groups``); a Conv
        with fewer than 16 results that reads no frames (``narrow``); other convolutions that read none, if they are
        ConvTransposes or have one value of a frame in their windows, and a ConvTranspose whose depth is dilated, or is
        not the stride times the depth of its input (``alone``); taps beyond 1 GiB (``large``).
    """
    change = Change()
    convs = [(node, graph) for graph in computing_graphs(model) for node in graph if convolves(node, VOLUME)]
    if not convs:
        return change
    if model.opset_imports.get("", 0) < AXES_ARE_INPUT:
        change.skip("opset")
        return change
    known, taken = Known(model), names(model)
    for graph in dict.fromkeys(graph for _, graph in convs):
        found = _found(graph, known)
        for node in (node for node, home in convs if home is graph):
            if node in found:
                change.applied += 1
            else:
                change.skip(_obstacle(node, known) or ("narrow" if _is_narrow(node) else "alone"))
        values = {value for node in found for value in (*node.inputs, node.outputs[0])}
        _declare(values, known)
        _Writer(graph, found, {value: volume_of(known, value) for value in values}, taken).write()
    return change


def _obstacle(node: ir.Node, known: Known) -> str:
    """Return why a convolution of volumes reads no frames, or an empty text."""
    weights = constant(node.inputs[1])
    if weights is None or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return "computed"
    volume = volume_of(known, node.inputs[0])
    if volume is None or volume_of(known, node.outputs[0]) is None:
        return "shape-unknown"
    if weights.shape[2] != 1 and node.attributes.get_int("group", 1) != 1:
        return "groups"
    form = framed(node, known)
    return "large" if form is not None and form.taps is not None and bytes_of(volume, form.taps) > LARGEST else ""


def _begins(node: ir.Node) -> bool:
    """Return whether a convolution gains although it reads a volume: a Conv whose window has several values a frame."""
    weights = constant(node.inputs[1])
    plain = weights is not None and node.op_type == "Conv" and not _is_narrow(node)
    return plain and weights is not None and tuple(weights.shape.numpy()[3:]) != (1, 1)


def _is_narrow(node: ir.Node) -> bool:
    """Return whether a Conv computes few channels."""
    weights = constant(node.inputs[1])
    return weights is not None and node.op_type == "Conv" and int(weights.shape.numpy()[0]) < BLOCK


def _declare(values: Iterable[ir.Value | None], known: Known) -> None:
    """Declare the inferred types of values: what is inserted behind them has these types."""
    for value in values:
        dtype = known.dtype(value)
        if value is not None and value.type is None and dtype is not None:
            value.type = ir.TensorType(dtype)


def _found(graph: ir.Graph, known: Known) -> dict[ir.Node, Framed]:
    """Return the nodes that compute on frames: convolutions, and what can follow them."""
    found: dict[ir.Node, Framed] = {}
    frames: set[ir.Value | None] = set()
    for node in graph:
        conv = convolves(node, VOLUME)
        if frames.isdisjoint(node.inputs) and not (conv and _begins(node)):
            continue
        form = None if conv and _obstacle(node, known) else framed(node, known)
        if form is not None and (conv or not frames.isdisjoint(node.inputs[index] for index in form.data)):
            found[node] = form
            frames.add(node.outputs[0])
    return found


@dataclass(frozen=True, slots=True)
class Step:
    """A node that is inserted.

    Attributes:
        op: The operator.
        attributes: Its attributes.
        arrays: The constants that it reads behind its data.
        lengths: The shape of its result; None for a length that is free.
        target: Whether it is a Reshape, to `lengths`.
    """

    op: str
    attributes: Mapping[str, int | list[int]] = field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()
    lengths: Sequence[int | None] = ()
    target: bool = False


@dataclass(frozen=True, slots=True)
class _Writer:
    """The graph that is rewritten.

    Attributes:
        graph: The graph.
        found: Its nodes that compute on frames.
        volumes: The lengths of the volumes that they read and write.
        taken: The names in use.
        frames: Volumes as frames.
    """

    graph: ir.Graph
    found: Mapping[ir.Node, Framed]
    volumes: Mapping[ir.Value | None, Volume | None]
    taken: set[str]
    frames: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def write(self) -> None:
        """Rewrite all nodes, and give volumes to the other readers of their results."""
        results = [node.outputs[0] for node in self.found]
        reads = {value: [(use.node, use.idx) for use in value.uses()] for value in results}
        others = {value: [read for read in uses if not self._is_data(*read)] for value, uses in reads.items()}
        for node, form in self.found.items():
            before, after = self._volume(node.inputs[form.data[0]]), self._volume(node.outputs[0])
            for index in form.data:
                value = node.inputs[index]
                assert value is not None
                node.replace_input_with(index, self._frames(value, self._volume(value), node))
            self._rewrite(node, form, after)
            if form.taps is not None:
                self._tap(node, form.taps, before)
            if form.phases > 1:
                self._part(node, form.phases, after)
            if node.op_type == NORM:
                self._normalize(node, after)
            if form.along:
                self._pool(node, form.along, replace(after, depth=before.depth), after)
        for value, uses in others.items():
            self._restore(value, self._volume(value), uses)

    def _is_data(self, node: ir.Node, index: int) -> bool:
        """Whether a node reads an input as frames."""
        return node in self.found and index in self.found[node].data

    def _volume(self, value: ir.Value | None) -> Volume:
        """Return the lengths of a volume that `framed` has found to be one."""
        volume = self.volumes.get(value)
        assert volume is not None
        return volume

    def _frames(self, value: ir.Value, volume: Volume, place: ir.Node) -> ir.Value:
        """Return a volume as frames (N * D, C, H, W), computed in front of the first reader."""
        if value not in self.frames:
            turned = Step("Transpose", {"perm": list(TURN)}, lengths=_five(volume))
            flat = Step("Reshape", target=True, lengths=_four(volume))
            nodes = self._chain(value, [flat] if 1 in (volume.channels, volume.depth) else [turned, flat], "frames")
            self.graph.insert_before(place, nodes)
            self.frames[value] = nodes[-1].outputs[0]
        return self.frames[value]

    def _rewrite(self, node: ir.Node, form: Framed, volume: Volume) -> None:
        """Give a node, whose inputs are frames, its new constants and attributes; `volume` is its result."""
        for index, array in form.constants.items():
            old = node.inputs[index]
            assert old is not None  # a constant
            name = unused_name(self.taken, f"{old.name}/frame")
            node.replace_input_with(index, add_initializer(self.graph, name, array, old.dtype))
            discard(old)
        for name, attribute in form.attributes.items():
            node.attributes[name] = next(iter(ir.convenience.convert_attributes({name: attribute})))
        result = node.outputs[0]
        result.shape, self.frames[result] = ir.Shape(_four(volume)), result

    def _tap(self, node: ir.Node, taps: Taps, volume: Volume) -> None:
        """Join the frames that a convolution of a volume reads along the channels of its input.

        Of a single volume, the first axis of the frames is the depth; of several, the depth gets an axis of its own.
        """
        value = node.inputs[0]
        assert value is not None
        if not taps.changes(volume.depth):
            return
        axis, lengths = (0, _four(volume)) if volume.batch == 1 else (1, _five(volume))
        front: list[Step] = []
        if axis:
            front.append(Step("Reshape", target=True, lengths=lengths))
        if any(taps.pads):
            padded = volume.depth + sum(taps.pads)
            lengths = (*lengths[:axis], padded, *lengths[axis + 1 :])
            pads = np.zeros((2, len(lengths)), np.int64)
            pads[:, axis] = taps.pads
            front.append(Step("Pad", arrays=(pads.reshape(-1),), lengths=lengths))
        nodes = self._chain(value, front, "padded")
        whole = nodes[-1].outputs[0] if nodes else value
        part = (*lengths[:axis], taps.count, *lengths[axis + 1 :])
        parts = [self._node([whole], each, f"{value.name}/tap") for each in _slices(taps, axis, part)]
        nodes += parts
        made = replace(volume, depth=taps.count, channels=volume.channels * len(parts))
        if len(parts) > 1:
            joined = Step("Concat", {"axis": axis + 1}, lengths=(_five(made) if axis else _four(made)))
            nodes.append(self._node([each.outputs[0] for each in parts], joined, f"{value.name}/taps"))
        if axis:
            nodes += self._chain(nodes[-1].outputs[0], [Step("Reshape", target=True, lengths=_four(made))], "taps")
        self.graph.insert_before(node, nodes)
        node.replace_input_with(0, nodes[-1].outputs[0])

    def _part(self, node: ir.Node, phases: int, volume: Volume) -> None:
        """Make frames of the channels of a ConvTranspose, whose result is `volume`."""
        result = node.outputs[0]
        nodes = self._chain(result, [Step("Reshape", target=True, lengths=_four(volume))], "frames")
        self.graph.insert_after(node, nodes)
        each = replace(volume, depth=volume.depth // phases, channels=volume.channels * phases)
        result.shape, self.frames[result] = ir.Shape(_four(each)), nodes[-1].outputs[0]

    def _normalize(self, node: ir.Node, volume: Volume) -> None:
        """Let an InstanceNormalization read and write images (N, C, D, H * W)."""
        value, result = node.inputs[0], node.outputs[0]
        assert value is not None
        nodes = self._chain(value, _to_image(volume), "image")
        self.graph.insert_before(node, nodes)
        node.replace_input_with(0, nodes[-1].outputs[0])
        nodes = self._chain(result, _to_frames(volume), "frames")
        self.graph.insert_after(node, nodes)
        result.shape, self.frames[result] = ir.Shape(_image(volume)), nodes[-1].outputs[0]

    def _pool(self, node: ir.Node, along: Mapping[str, int | list[int]], middle: Volume, volume: Volume) -> None:
        """Put a pool along the depth behind a pool of each frame: `middle` is its result, `volume` that of both."""
        result = node.outputs[0]
        second = Step(node.op_type, along, lengths=_image(volume))
        nodes = self._chain(result, [*_to_image(middle), second, *_to_frames(volume)], "frames")
        self.graph.insert_after(node, nodes)
        result.shape, self.frames[result] = ir.Shape(_four(middle)), nodes[-1].outputs[0]

    def _restore(self, value: ir.Value, volume: Volume, uses: Sequence[tuple[ir.Node, int]]) -> None:
        """Compute a volume from its frames for the readers that need it and for the user."""
        if not (uses or value.is_graph_output()):
            return
        frames = self.frames[value]
        turned = Step("Reshape", target=True, lengths=_five(volume))
        back = Step("Transpose", {"perm": list(TURN)}, lengths=_whole(volume))
        whole = Step("Reshape", target=True, lengths=_whole(volume))
        nodes = self._chain(frames, [whole] if 1 in (volume.channels, volume.depth) else [turned, back], "volume")
        producer, result = frames.producer(), nodes[-1].outputs[0]
        assert producer is not None
        self.graph.insert_after(producer, nodes)
        for reader, index in uses:
            reader.replace_input_with(index, result)
        for index, output in enumerate(self.graph.outputs):
            if output is value:
                self.graph.outputs[index] = result
                result.name, value.name = value.name, unused_name(self.taken, f"{value.name}/frames")

    def _chain(self, value: ir.Value, steps: Sequence[Step], made: str) -> list[ir.Node]:
        """Return nodes that are in no graph yet, each of which reads the one before; `made` ends their names."""
        nodes: list[ir.Node] = []
        for step in steps:
            source = nodes[-1].outputs[0] if nodes else value
            nodes.append(self._node([source], step, f"{value.name}/{made}"))
        return nodes

    def _node(self, inputs: Sequence[ir.Value], step: Step, stem: str) -> ir.Node:
        """Return the node of a step, which is in no graph yet."""
        name = unused_name(self.taken, stem)
        numbers = [-1 if length is None else length for length in step.lengths]
        arrays = (np.asarray(numbers, np.int64),) if step.target else step.arrays
        constants = [
            add_initializer(self.graph, unused_name(self.taken, f"{name}/{step.op.lower()}"), array) for array in arrays
        ]
        node = ir.node(step.op, [*inputs, *constants], step.attributes, name=name)
        result = node.outputs[0]
        result.name, result.type, result.shape = name, inputs[0].type, ir.Shape(step.lengths)
        return node


def _slices(taps: Taps, axis: int, lengths: Sequence[int | None]) -> list[Step]:
    """Return the steps that take the frames of each tap from padded frames; `lengths` is the shape of a result."""
    reach = (taps.count - 1) * taps.stride + 1
    bounds = [(start, start + reach, axis, taps.stride) for start in taps.starts]
    return [Step("Slice", arrays=[np.asarray([each], np.int64) for each in row], lengths=lengths) for row in bounds]


def _four(volume: Volume) -> tuple[int | None, ...]:
    """Return the shape of the frames of volumes."""
    return volume.frames, volume.channels, volume.rows, volume.columns


def _five(volume: Volume) -> tuple[int | None, ...]:
    """Return the shape of the frames of volumes where the depth has an axis of its own."""
    return volume.batch, volume.depth, volume.channels, volume.rows, volume.columns


def _whole(volume: Volume) -> tuple[int | None, ...]:
    """Return the shape of volumes."""
    return volume.batch, volume.channels, volume.depth, volume.rows, volume.columns


def _image(volume: Volume) -> tuple[int | None, ...]:
    """Return the shape of volumes as images whose rows are frames."""
    return volume.batch, volume.channels, volume.depth, volume.rows * volume.columns


def _to_image(volume: Volume) -> list[Step]:
    """Return the steps from frames to images whose rows are frames."""
    batch, channels, depth, pixels = _image(volume)
    apart = Step("Reshape", target=True, lengths=(batch, depth, channels, pixels))
    return [apart, Step("Transpose", {"perm": list(TURN[:-1])}, lengths=_image(volume))]


def _to_frames(volume: Volume) -> list[Step]:
    """Return the steps from images whose rows are frames to frames."""
    batch, channels, depth, pixels = _image(volume)
    turned = Step("Transpose", {"perm": list(TURN[:-1])}, lengths=(batch, depth, channels, pixels))
    return [turned, Step("Reshape", target=True, lengths=_four(volume))]
