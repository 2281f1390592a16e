"""The units of an INT8 model in order, each on what the integer units before it really give."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from ...calibration.session import Array
from ...transforms.graph import constant, inferred, nodes_by_name
from ...transforms.int8_weights import Adjustment, FloatWeights, WeightWriter, bias_behind
from ...transforms.ops import OPS
from ...transforms.plan import Plan, Unit
from ...transforms.qparams import QParams, dequantize, quantize
from ...transforms.writer import Writer
from ..job import Candidate, Job
from ..model.files import serialize
from ..placement.joined_convs import with_common_scales
from ..runtime.session import Runner
from .stream import Stream

WALKED = frozenset({"Conv", "Gemm", "MatMul"})
Key: TypeAlias = tuple[object, ...]
MEMORY = 2**30
"""Bytes of tensors that both streams may hold; of more, the number of samples is halved."""


@dataclass(frozen=True, eq=False)
class Step:
    """A unit with what it reads and gives for each sample.

    Attributes:
        unit: The unit.
        node: Its node with the weights, of the float model.
        weights: Its weights before they become integers.
        params: Scale and zero point of what it reads.
        exact: What it reads in the float model, one array per sample.
        rough: What it reads in the INT8 model, dequantized.
        wanted: What the node gives in the float model.
        product: Computes the node: of an input, weights, and a bias or None.
    """

    unit: Unit
    node: ir.Node
    weights: FloatWeights
    params: QParams
    exact: list[Array]
    rough: list[Array]
    wanted: list[Array]
    product: Callable[[Array, Array, Array | None], Array] = field(repr=False)

    @property
    def has_bias(self) -> bool:
        """Whether its result can be shifted per output channel without an operator more."""
        return OPS[self.unit.op].bias is not None or bias_behind(self.node) is not None

    @property
    def channel_axis(self) -> int:
        """The axis of the output channels in what the node gives."""
        return 1 if self.node.op_type == "Conv" else -1

    @property
    def nearest(self) -> Array:
        """The nearest integers to its weights."""
        return quantize(self.weights.array, self.weights.params)

    def run(self, stored: Array | None) -> list[Array]:
        """Return what the node gives in the INT8 model with these integers as weights; None for the nearest."""
        weights = dequantize(self.nearest if stored is None else stored, self.weights.params)
        return [self.product(x, weights, self.weights.bias) for x in self.rough]


def walk(
    job: Job,
    candidate: Candidate,
    feeds: Sequence[Mapping[str, Array]],
    correct: Callable[[Step], tuple[Adjustment, list[Array]]],
) -> Iterator[tuple[str, Adjustment]]:
    """Yield for each unit with weights and uint8 inputs what is found for it.

    Both models run side by side, unit by unit; what is found for one is in force for those behind it.

    Args:
        job: The job.
        candidate: Its INT8 model.
        feeds: Samples, which are held with all tensors that are still to be read.
        correct: Finds what is to be adjusted of a unit, and what its node gives then.

    Raises:
        RequantError: The runtime does not run a piece of the models.
    """
    plan, nodes, emitted = candidate.plan, nodes_by_name(job.simple), nodes_by_name(candidate.model)
    units = [unit for unit in plan.units if _walked(job, plan, unit, nodes, emitted)]
    anchors = [(unit, nodes[unit.nodes[0]], emitted[unit.nodes[0]]) for unit in units]
    integers = {unit.name: _integers(node, nodes) for unit, _, node in anchors}
    types = inferred(job.simple)
    exact = Stream(job.simple, feeds, [node.outputs[0] for _, node, _ in anchors], types)
    rough = Stream(candidate.model, feeds, [node.outputs[0] for _, _, node in anchors], types)
    exact.plan([node.inputs[0] for _, node, _ in anchors if node.inputs[0] is not None])
    rough.plan([integers[unit.name] for unit in units])
    scales = with_common_scales(job, plan, candidate.qparams, {})
    writer = WeightWriter(
        Writer.of(job.simple, job.scheme), job.scheme.weight_params, adjusted=scales, exact=job.no_saturation
    )
    runners: dict[Key, Runner] = {}
    for unit, node, twin in anchors:
        params = candidate.qparams[plan.root(unit.inputs[0])]
        weights = writer.weights(node, unit, float(params.scale))
        product = _product(node, job.simple, runners)
        inputs = exact.take(node.inputs[0])  # type: ignore[arg-type]
        wanted = [product(x, weights.array, weights.bias) for x in inputs]
        step = Step(
            unit,
            node,
            weights,
            params,
            inputs,
            [dequantize(x, params) for x in rough.take(integers[unit.name])],
            wanted,
            product,
        )
        adjustment, given = correct(step)
        exact.put(node.outputs[0], wanted)
        rough.put(twin.outputs[0], given)
        if exact.nbytes + rough.nbytes > MEMORY and len(wanted) > 1:
            for stream in (exact, rough):  # both: what they give is compared sample by sample
                stream.shorten((len(wanted) + 1) // 2)
        yield unit.name, adjustment


def _walked(job: Job, plan: Plan, unit: Unit, nodes: Mapping[str, ir.Node], emitted: Mapping[str, ir.Node]) -> bool:
    """Whether a unit is one of those that are walked: at home in the main graph, and there in both models."""
    if not plan.impl(unit).reads_u8 or unit.op not in WALKED:
        return False
    node, twin = nodes[unit.nodes[0]], emitted.get(unit.nodes[0])
    return node.graph is job.simple.graph and twin is not None and constant(node.inputs[1]) is not None


def _integers(node: ir.Node, given: Collection[str]) -> ir.Value:
    """Return the uint8 tensor that an emitted node reads, before it is taken in blocks of pixels.

    Args:
        node: The node.
        given: The names of the nodes that the float model has: blocks may be the user's own.
    """
    value = node.inputs[0]
    while value is not None and (made := value.producer()) is not None:
        packed = made.op_type == "SpaceToDepth" and made.name not in given
        if not packed and made.op_type != "DequantizeLinear":
            break
        value = made.inputs[0]
    assert value is not None  # a unit of a plan reads something
    return value


def _product(
    node: ir.Node, model: ir.Model, runners: dict[Key, Runner]
) -> Callable[[Array, Array, Array | None], Array]:
    """Return a function that computes a node of any input, weights and bias.

    Args:
        node: The node.
        model: Its model.
        runners: One-node models opened so far. Nodes of the same operator, attributes and ranks share one.
    """
    attributes = tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items()))

    def compute(x: Array, weights: Array, bias: Array | None) -> Array:
        key = (node.domain, node.op_type, attributes, x.ndim, weights.ndim, None if bias is None else bias.ndim)
        if key not in runners:
            runners[key] = Runner(serialize(_alone(node, model, x, weights, bias)))
        result: Array = runners[key]({"x": x, "w": weights} | ({} if bias is None else {"b": bias}))["y"]
        return result

    return compute


def _alone(node: ir.Node, model: ir.Model, *arrays: Array | None) -> ir.Model:
    """Return a model of one node whose weights are inputs."""
    inputs = [
        ir.val(name, dtype=ir.DataType.FLOAT, shape=[None] * array.ndim)
        for name, array in zip("xwb", arrays, strict=True)
        if array is not None
    ]
    made = ir.node(node.op_type, inputs, dict(node.attributes), domain=node.domain)
    made.outputs[0].name, made.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(inputs, made.outputs, nodes=[made], opset_imports=model.opset_imports, name="unit")
    return ir.Model(graph, ir_version=model.ir_version)


def channel_means(arrays: Sequence[Array], axis: int) -> Array:
    """Return the mean of each channel, (samples, C) float64."""
    others = [tuple(i for i in range(array.ndim) if i != axis % array.ndim) for array in arrays]
    return np.stack([a.mean(axis=o, dtype=np.float64) for a, o in zip(arrays, others, strict=True)])
