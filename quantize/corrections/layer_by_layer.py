"""Visit the layers of an INT8 model in order, each with the inputs that the integer layers before it compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, overload

import numpy as np
import onnx_ir as ir

from ...calibration.model.session import Array, release_memory
from ...transforms.graphs.inference import inferred
from ...transforms.graphs.queries import constant, made_by, nodes_by_name
from ...transforms.int8.block_weights import Blocked
from ...transforms.int8.ops import OPS
from ...transforms.int8.packed_conv import packing_of
from ...transforms.int8.plan import Unit
from ...transforms.int8.qparams import BlockForm, QParams, dequantize, quantize
from ...transforms.int8.weights import Adjustment, FloatWeights, WeightWriter, bias_of_product, turned
from ...transforms.int8.writer import Writer
from ..job import Candidate, Job
from ..model.files import serialize
from ..placement.joined_convs import with_common_scales
from ..runtime.session import Runner
from ..runtime.spread import spread
from .stream import Stream

WALKED = frozenset({"Conv", "Gemm", "MatMul"})
Key: TypeAlias = tuple[object, ...]
Product: TypeAlias = Callable[[Array, Array, Array | None], Array]
MEMORY = 2**30
"""Bytes of tensors that both streams may hold. Above this the number of samples is halved."""
LARGE = 2**27
"""Bytes of tensors from which freed memory is given back after each layer: the C library keeps some gigabytes."""
SHARE = 4
"""Both streams may hold one of so many parts of the memory limit of the process, where the user sets one."""


@dataclass(frozen=True, eq=False)
class Dequantized(Sequence[Array]):
    """Integers that are dequantized each time they are read: of images, the floats of all samples are gigabytes.

    Attributes:
        integers: The integers, one array per sample.
        params: Their scale and zero point.
    """

    integers: Sequence[Array]
    params: QParams

    def __len__(self) -> int:
        return len(self.integers)

    @overload
    def __getitem__(self, index: int) -> Array: ...

    @overload
    def __getitem__(self, index: slice) -> Dequantized: ...

    def __getitem__(self, index: int | slice) -> Array | Dequantized:
        """Return the floats of a sample, or some of the samples."""
        if isinstance(index, slice):
            return Dequantized(self.integers[index], self.params)
        return dequantize(self.integers[index], self.params)


@dataclass(frozen=True, eq=False)
class Layer:
    """A unit with weights, and its inputs and results for each sample.

    Attributes:
        unit: The unit.
        node: Its node with the weights, in the float model.
        weights: Its weights before they become integers.
        params: Scale and zero point of its input.
        int8_inputs: Its input in the INT8 model, dequantized, one array per sample.
        float_results: Its result in the float model, one array per sample.
        product: Computes the node from an input, weights, and a bias or None.
    """

    unit: Unit
    node: ir.Node
    weights: FloatWeights
    params: QParams
    int8_inputs: Sequence[Array]
    float_results: list[Array]
    product: Product = field(repr=False)

    @property
    def has_bias(self) -> bool:
        """Whether its result can be shifted per output channel without another operator."""
        return OPS[self.unit.op].bias is not None or bias_of_product(self.node) is not None

    @property
    def channel_axis(self) -> int:
        """The axis of the output channels in the result."""
        return 1 if self.node.op_type == "Conv" else -1

    @property
    def nearest(self) -> Array:
        """The weights rounded to the nearest integers."""
        return quantize(self.weights.array, self.weights.params)

    def run(self, integers: Array | None) -> list[Array]:
        """Return the results in the INT8 model with these integer weights; None for the nearest integers."""
        array = dequantize(self.nearest if integers is None else integers, self.weights.params)
        return list(results_of(self.product, array, self.weights.bias, self.int8_inputs))

    def run_float(self) -> Iterator[Array]:
        """Yield the results of the float weights on the inputs in the INT8 model."""
        return results_of(self.product, self.weights.array, self.weights.bias, self.int8_inputs)


@dataclass(frozen=True, eq=False)
class BlockLayer:
    """A matrix product with weights in blocks, and its inputs and results for each sample.

    Attributes:
        node: Its node in the float model.
        rows: Its float weights, (N, K).
        form: The form of the blocks.
        int8_inputs: Its input in the INT8 model, float32, one array per sample.
        float_results: Its result in the float model, one array per sample.
        bias: Its bias, (N,); None without one.
        product: Computes the node from an input, weights, and a bias or None.
    """

    node: ir.Node
    rows: Array
    form: BlockForm
    int8_inputs: list[Array]
    float_results: list[Array]
    bias: Array | None
    product: Product = field(repr=False)

    def run(self, blocked: Blocked) -> list[Array]:
        """Return the results in the INT8 model with these weights; the kernel's rounding of the input is left out."""
        return list(results_of(self.product, turned(self.node, blocked.values()), self.bias, self.int8_inputs))


L = TypeVar("L", Layer, BlockLayer)


def _layer(
    visit: _Visit,
    writer: WeightWriter,
    params: QParams,
    float_inputs: list[Array],
    int8_inputs: Sequence[Array],
    product: Product,
) -> Layer:
    """Return a layer that reads uint8, from its inputs in both models; `float_inputs` is empty afterwards."""
    weights = writer.weights(visit.node, visit.unit, float(params.scale))
    results = list(results_of(product, weights.array, weights.bias, _emptied(float_inputs)))
    rounded = Dequantized([_rounded(x, params) for x in int8_inputs], params)
    return Layer(visit.unit, visit.node, weights, params, rounded, results, product)


def _block_layer(
    visit: _Visit, form: BlockForm, float_inputs: Sequence[Array], int8_inputs: list[Array], product: Product
) -> BlockLayer:
    """Return a layer with weights in blocks, from its inputs in both models."""
    node = visit.node
    tensor, bias = constant(node.inputs[1]), constant(node.inputs[2]) if len(node.inputs) > 2 else None
    assert tensor is not None  # `_is_walked` has checked it
    array = tensor.numpy()
    row = None if bias is None else bias.numpy().reshape(-1)
    results = list(results_of(product, array, row, float_inputs))
    return BlockLayer(node, turned(node, array), form, int8_inputs, results, row, product)


def _emptied(arrays: list[Array]) -> Iterator[Array]:
    """Yield the arrays of a list, and drop each from it."""
    arrays.reverse()
    while arrays:
        yield arrays.pop()


def results_of(product: Product, array: Array, bias: Array | None, inputs: Iterable[Array]) -> Iterator[Array]:
    """Yield the results of some weights and a bias on some inputs."""
    return spread(lambda x: product(x, array, bias), inputs)


def walk_layers(
    job: Job,
    candidate: Candidate,
    feeds: Sequence[Mapping[str, Array]],
    correct: Callable[[Layer], tuple[Adjustment, list[Array]]],
    correct_blocks: Callable[[BlockLayer], tuple[Adjustment, list[Array]]],
) -> Iterator[tuple[str, Adjustment]]:
    """Yield the name and the adjustment of each unit with weights that reads uint8, or has its weights in blocks.

    Both models run side by side, unit by unit. The units behind a corrected unit read its corrected result.

    Args:
        job: The job.
        candidate: Its INT8 model.
        feeds: One feed per sample. Memory holds the tensors that later units still read.
        correct: Returns the adjustment of a layer, and the layer's results with it.
        correct_blocks: The same for a layer with weights in blocks.

    Raises:
        RequantError: The runtime rejects a piece of the models.
    """
    plan = candidate.plan
    visits = _visits(job, candidate)
    floats, integers = _streams(job, candidate, feeds, visits)
    scales = with_common_scales(job, plan, candidate.qparams, {})
    writer = WeightWriter(
        Writer.of(job.simple, job.scheme),
        job.scheme.weight_params,
        adjusted=scales,
        exact=job.no_saturation,
        portable=job.policy.portable,
    )
    limit = job.options.execution.memory_limit
    room = MEMORY if limit is None else min(MEMORY, limit // SHARE)
    runners: dict[Key, Runner] = {}
    for visit in visits:
        product = _product(visit.node, job.simple, runners)
        # no local variable holds inputs, results or a layer longer than they are needed: of images they are 100 MB each
        before, after = [*floats.take(visit.float_input)], integers.take(visit.int8_input)
        if not _are_alike(before, after):
            return
        if plan.impl(visit.unit).in_blocks:
            layer_in_blocks = _block_layer(visit, job.scheme.blocks, before, after, product)
            del before, after
            adjustment, float_results, int8_results = _corrected(layer_in_blocks, correct_blocks)
            del layer_in_blocks
        else:
            params = candidate.qparams[plan.root(visit.unit.inputs[0])]
            layer = _layer(visit, writer, params, before, after, product)
            del before, after
            adjustment, float_results, int8_results = _corrected(layer, correct)
            del layer
        count = len(float_results)
        integers.put(visit.int8_node.outputs[0], int8_results)
        floats.put(visit.node.outputs[0], float_results)
        del float_results, int8_results
        _make_room((floats, integers), count, room)
        yield visit.unit.name, adjustment


def _make_room(streams: Sequence[Stream], count: int, room: int) -> None:
    """Halve the samples of both streams where they hold more than `room` bytes, and give freed memory back.

    Args:
        streams: The streams.
        count: The number of their samples. Corrections compare both streams sample by sample.
        room: The bytes that both may hold.
    """
    held = sum(stream.nbytes for stream in streams)
    if held > room and count > 1:
        for stream in streams:
            stream.shorten((count + 1) // 2)
    if held > LARGE:
        release_memory()


def _are_alike(before: Sequence[Array], after: Sequence[Array]) -> bool:
    """Return whether the inputs of a layer have the same lengths in the float model and in the INT8 model.

    Lengths that depend on data, such as the duration of a sound, may differ: then no value belongs to another one, and
    neither do those behind it.
    """
    return [each.shape for each in before] == [each.shape for each in after]


def _corrected(
    layer: L, correct: Callable[[L], tuple[Adjustment, list[Array]]]
) -> tuple[Adjustment, list[Array], list[Array]]:
    """Return the adjustment of a layer, its results in the float model, and those in the INT8 model."""
    adjustment, int8_results = correct(layer)
    return adjustment, layer.float_results, int8_results


@dataclass(frozen=True, eq=False)
class _Visit:
    """A unit to visit, with its node and its input tensor in both models."""

    unit: Unit
    node: ir.Node
    int8_node: ir.Node
    float_input: ir.Value
    int8_input: ir.Value

    @staticmethod
    def of(unit: Unit, float_nodes: Mapping[str, ir.Node], int8_nodes: Mapping[str, ir.Node]) -> _Visit:
        """Find the nodes and inputs of a unit."""
        node, int8_node = float_nodes[unit.nodes[0]], int8_nodes[unit.nodes[0]]
        float_input = node.inputs[0]
        assert float_input is not None  # a unit of a plan has an input
        blocks = int8_node.op_type == "MatMulNBits"
        int8_input = int8_node.inputs[0] if blocks else _integer_input(int8_node, float_nodes)
        assert int8_input is not None
        return _Visit(unit, node, int8_node, float_input, int8_input)


def _visits(job: Job, candidate: Candidate) -> list[_Visit]:
    """Return the units to visit, in the order of the plan."""
    plan, float_nodes, int8_nodes = candidate.plan, nodes_by_name(job.simple), nodes_by_name(candidate.model)
    chosen = [unit for unit in plan.units if plan.impl(unit).reads_u8 or plan.impl(unit).in_blocks]
    units = [unit for unit in chosen if _is_walked(job, unit, float_nodes, int8_nodes)]
    return [_Visit.of(unit, float_nodes, int8_nodes) for unit in units]


def _streams(
    job: Job, candidate: Candidate, feeds: Sequence[Mapping[str, Array]], visits: Sequence[_Visit]
) -> tuple[Stream, Stream]:
    """Return the tensors of the float model and of the INT8 model, up to each input of the units to visit."""
    types = inferred(job.simple)
    floats = Stream(job.simple, feeds, [visit.node.outputs[0] for visit in visits], types)
    integers = Stream(candidate.model, feeds, [visit.int8_node.outputs[0] for visit in visits], types)
    floats.plan([visit.float_input for visit in visits])
    integers.plan([visit.int8_input for visit in visits])
    return floats, integers


def _is_walked(job: Job, unit: Unit, float_nodes: Mapping[str, ir.Node], int8_nodes: Mapping[str, ir.Node]) -> bool:
    """Whether to visit a unit in integers: it is in the main graph of both models, and has constant weights."""
    if unit.op not in WALKED:
        return False
    node = float_nodes[unit.nodes[0]]
    in_both = node.graph is job.simple.graph and unit.nodes[0] in int8_nodes
    return in_both and constant(node.inputs[1]) is not None


def _integer_input(int8_node: ir.Node, float_nodes: Collection[str]) -> ir.Value:
    """Return the uint8 tensor that a node of the INT8 model reads.

    If it holds blocks of pixels, return the tensor before they were packed, uint8 or float (`Packing.source`).

    Args:
        int8_node: The node.
        float_nodes: The names of the float model's nodes. A SpaceToDepth among them belongs to the user's model.
    """
    dequantizes = made_by(int8_node.inputs[0], "DequantizeLinear")
    value = int8_node.inputs[0] if dequantizes is None else dequantizes.inputs[0]
    packing = packing_of(value)
    if packing is not None and packing.blocks.name not in float_nodes:
        value = packing.source
    assert value is not None  # a unit of a plan has an input
    return value


def _rounded(array: Array, params: QParams) -> Array:
    """Return integers as they are, and floats quantized."""
    return array if array.dtype.kind in "iu" else quantize(array, params)


def _product(node: ir.Node, model: ir.Model, runners: dict[Key, Runner]) -> Product:
    """Return a function that computes a node from an input, weights, and a bias or None.

    Args:
        node: The node.
        model: Its model.
        runners: The open one-node models. Nodes with the same operator, attributes and ranks share one. They have no
            arena: its blocks do not fit other shapes, and the walk over MobileNetV1 took 9.3 s instead of 6.4 to 7.7.
    """
    attributes = tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items()))

    def compute(x: Array, weights: Array, bias: Array | None) -> Array:
        key = (node.domain, node.op_type, attributes, x.ndim, weights.ndim, None if bias is None else bias.ndim)
        if key not in runners:
            runners[key] = Runner(serialize(_single_node_model(node, model, x, weights, bias)), threads=1, arena=False)
        result: Array = runners[key]({"x": x, "w": weights} | ({} if bias is None else {"b": bias}))["y"]
        return result

    return compute


def _single_node_model(node: ir.Node, model: ir.Model, *arrays: Array | None) -> ir.Model:
    """Return a model with one node; its weights and bias are graph inputs."""
    inputs = [
        ir.val(name, dtype=ir.DataType.FLOAT, shape=[None] * array.ndim)
        for name, array in zip("xwb", arrays, strict=True)
        if array is not None
    ]
    copy = ir.node(node.op_type, inputs, dict(node.attributes), domain=node.domain)
    copy.outputs[0].name, copy.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(inputs, copy.outputs, nodes=[copy], opset_imports=model.opset_imports, name="unit")
    return ir.Model(graph, ir_version=model.ir_version)


def channel_means(arrays: Iterable[Array], axis: int) -> Array:
    """Return the mean of each channel, (samples, C) float64."""
    return np.stack([_means(array, axis % array.ndim) for array in arrays])


def _means(array: Array, axis: int) -> Array:
    """Return the mean of each channel of one array, (C,) float64."""
    return np.asarray(array.mean(axis=tuple(i for i in range(array.ndim) if i != axis), dtype=np.float64))
