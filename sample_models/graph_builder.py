"""Write ONNX graphs layer by layer, with the names of PyTorch's exporter and weights drawn from a seed.

A layer has a scope, such as `/layer1/layer1.0/conv1`. Its nodes are `/layer1/layer1.0/conv1/Conv` and so on; a second
node of the same operator ends in `_1`. Its tensors are `NODE_output_0`, its parameters `layer1.0.conv1.weight` and so
on. Shapes and factors are Constant nodes. Initializers are only the parameters and the running statistics of
BatchNormalization. Nothing is folded or fused.

The random numbers of a parameter depend only on the seed and its name. If a network gets a new layer, the weights of
the other layers stay the same.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Floats = NDArray[np.float32]

RELU = math.sqrt(2)  # a ReLU divides the root mean square by this factor (He et al., 2015)
SPREAD = 0.25  # standard deviation of the logarithms of scales: most channels are within a factor of 2
SHIFT = (0.3, 0.5)  # mean and standard deviation of the bias of a batch normalization, in units of its output's std


@dataclass
class Graph:
    """An ONNX graph during writing.

    Attributes:
        seed: The seed of all weights.
        opset: The version of the default domain.
        proto: The graph.
        parent: The outer graph, if this graph is a body.
        keeps: Whether a body keeps its parameters; otherwise the parent stores them.
        used: The number of nodes for each name.
    """

    seed: int
    opset: int
    proto: onnx.GraphProto
    parent: Graph | None = None
    keeps: bool = True
    used: Counter[str] = field(default_factory=Counter)

    def body(self, name: str, *, keeps: bool) -> Graph:
        """Return an empty body for an If or a Loop of this graph."""
        return Graph(self.seed, self.opset, onnx.GraphProto(name=name), self, keeps, self.used)

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        """Declare an input; return its name."""
        self.proto.input.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, value: str, dtype: int, shape: Sequence[int | str]) -> None:
        """Rename a tensor and make it an output."""
        for node in self.proto.node:
            for names in (node.input, node.output):
                names[:] = [name if each == value else each for each in names]
        self.proto.output.append(helper.make_tensor_value_info(name, dtype, shape))

    def node(self, op: str, *inputs: str, at: str, **attributes: Any) -> str:
        """Append a node to the layer `at`; return the name of its output."""
        return self.node_with_outputs(op, *inputs, at=at, outputs=1, **attributes)[0]

    def node_with_outputs(self, op: str, *inputs: str, at: str, outputs: int, **attributes: Any) -> list[str]:
        """Append a node with several outputs to the layer `at`; return the names of the outputs."""
        name = f"{at}/{op}"
        count = self.used[name]
        self.used[name] += 1
        name += f"_{count}" if count else ""
        results = [f"{name}_output_{index}" for index in range(outputs)]
        self.proto.node.append(helper.make_node(op, inputs, results, name=name, **attributes))
        return results

    def constant(self, value: object, *, at: str) -> str:
        """Append a Constant; floats become float32. Return the name of its output."""
        array = np.asarray(value)
        array = array.astype(np.float32 if array.dtype.kind == "f" else array.dtype)
        return self.node("Constant", at=at, value=numpy_helper.from_array(array))

    def parameter(self, name: str, values: NDArray[Any]) -> str:
        """Store an initializer; return its name."""
        if self.parent is not None and not self.keeps:
            return self.parent.parameter(name, values)
        tensor = self.proto.initializer.add()
        tensor.name = name
        tensor.data_type = TensorProto.FLOAT
        tensor.dims.extend(values.shape)
        tensor.raw_data = np.ascontiguousarray(values, "<f4").tobytes()
        return name

    def stream(self, name: str) -> np.random.Generator:
        """Return the random number generator of a parameter."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def normal(self, name: str, shape: Sequence[int], std: float) -> Floats:
        """Draw the values of a parameter."""
        values = self.stream(name).standard_normal(tuple(shape), dtype=np.float32)
        values *= np.float32(std)
        return values

    def around_one(self, name: str, length: int) -> Floats:
        """Draw a factor for each channel, around 1."""
        return np.exp(self.normal(name, (length,), SPREAD))


def path(at: str) -> str:
    """Return the prefix of the parameter names of a layer: `/layer1/layer1.0/conv1` gives `layer1.0.conv1`.

    If a step begins with the previous step and a dot, it replaces that step: it is a layer of a Sequential.
    """
    steps: list[str] = []
    for step in at.strip("/").split("/"):
        if steps and step.startswith(steps[-1] + "."):
            steps.pop()
        steps.append(step)
    return ".".join(steps)


def conv(
    graph: Graph,
    x: str,
    at: str,
    shape: Sequence[int],
    *,
    bias: float | None = None,
    gain: float = RELU,
    **window: int,
) -> str:
    """Append a square convolution.

    Args:
        graph: The graph.
        x: The input (N, C, H, W).
        at: The layer.
        shape: The shape of the weight, (M, C, K, K), or (C, 1, K, K) for a depthwise convolution.
        bias: The mean of the bias. None means no bias; then the scales of the channels differ, and a batch
            normalization makes them equal again.
        gain: The factor by which the root mean square grows.
        window: `stride`, by default 1, and `pad`, by default K // 2.
    """
    name = f"{path(at)}.weight"
    weight = graph.normal(name, shape, gain / math.sqrt(math.prod(shape[1:])))
    if bias is None:
        weight *= graph.around_one(f"{name}.scales", shape[0]).reshape(-1, 1, 1, 1)
    inputs = [x, graph.parameter(name, weight)]
    if bias is not None:
        inputs.append(_bias(graph, at, shape[0], bias))
    group = shape[0] if shape[1] == 1 else 1
    return graph.node("Conv", *inputs, at=at, **_window(shape[2], **window), group=group)


def _window(kernel: int, *, stride: int = 1, pad: int | None = None) -> dict[str, list[int]]:
    """Return the attributes of a square window."""
    pads = [kernel // 2 if pad is None else pad] * 4
    return {"dilations": [1, 1], "kernel_shape": [kernel] * 2, "pads": pads, "strides": [stride] * 2}


def conv_transpose(graph: Graph, x: str, at: str, shape: Sequence[int]) -> str:
    """Append a transposed convolution with bias, weight (C, M, K, K) and stride K; it enlarges by K."""
    name = f"{path(at)}.weight"
    weight = graph.parameter(name, graph.normal(name, shape, RELU / math.sqrt(shape[0])))
    window = _window(shape[2], stride=shape[2], pad=0)
    return graph.node("ConvTranspose", x, weight, _bias(graph, at, shape[1]), at=at, **window, group=1)


def _bias(graph: Graph, at: str, length: int, mean: float = 0.0) -> str:
    """Store a bias."""
    name = f"{path(at)}.bias"
    return graph.parameter(name, graph.normal(name, (length,), 0.1) + np.float32(mean))


def batch_norm(graph: Graph, x: str, at: str, channels: int, *, eps: float = 1e-5, gain: float = 1.0) -> str:
    """Append a batch normalization. `normalise` later sets its running statistics.

    Args:
        graph: The graph.
        x: The input (N, channels, H, W).
        at: The layer.
        channels: The number of channels.
        eps: The number that is added to the variance.
        gain: The mean of the scales, which is the standard deviation of the outputs.
    """
    start = path(at)
    scale = graph.around_one(f"{start}.weight", channels) * np.float32(gain)
    shift = (graph.normal(f"{start}.bias", (channels,), SHIFT[1]) + np.float32(SHIFT[0])) * np.float32(gain)
    inputs = [graph.parameter(f"{start}.weight", scale), graph.parameter(f"{start}.bias", shift)]
    inputs.append(graph.parameter(f"{start}.running_mean", np.zeros(channels, np.float32)))
    inputs.append(graph.parameter(f"{start}.running_var", np.ones(channels, np.float32)))
    return graph.node("BatchNormalization", x, *inputs, at=at, epsilon=eps, momentum=0.9)


def linear(graph: Graph, x: str, at: str, inputs: int, outputs: int, *, gain: float = 1.0) -> str:
    """Append a fully connected layer on (N, inputs): a Gemm."""
    name = f"{path(at)}.weight"
    weight = graph.parameter(name, graph.normal(name, (outputs, inputs), gain / math.sqrt(inputs)))
    return graph.node("Gemm", x, weight, _bias(graph, at, outputs), at=at, alpha=1.0, beta=1.0, transB=1)


def token_linear(
    graph: Graph, x: str, at: str, inputs: int, outputs: int, *, gain: float = 1.0, bias: bool = True
) -> str:
    """Append a fully connected layer on (..., inputs): a MatMul and an Add, because Gemm takes only matrices."""
    name = f"{path(at)}.weight"
    weight = graph.parameter(name, graph.normal(name, (inputs, outputs), gain / math.sqrt(inputs)))
    product = graph.node("MatMul", x, weight, at=at)
    return graph.node("Add", _bias(graph, at, outputs), product, at=at) if bias else product


def layer_norm(graph: Graph, x: str, at: str, width: int, eps: float) -> str:
    """Append a layer normalization over the last axis: one node, or nine nodes below opset 17."""
    start = path(at)
    scale = graph.parameter(f"{start}.weight", graph.around_one(f"{start}.weight", width))
    shift = graph.parameter(f"{start}.bias", graph.normal(f"{start}.bias", (width,), 0.1))
    if graph.opset >= 17:
        return graph.node("LayerNormalization", x, scale, shift, at=at, axis=-1, epsilon=eps)
    centred = graph.node("Sub", x, reduce_mean(graph, x, [-1], at=at), at=at)
    squared = graph.node("Pow", centred, graph.constant(2.0, at=at), at=at)
    variance = graph.node("Add", reduce_mean(graph, squared, [-1], at=at), graph.constant(eps, at=at), at=at)
    normed = graph.node("Div", centred, graph.node("Sqrt", variance, at=at), at=at)
    return graph.node("Add", graph.node("Mul", normed, scale, at=at), shift, at=at)


def reduce_mean(graph: Graph, x: str, axes: Sequence[int], *, at: str, keepdims: int = 1) -> str:
    """Append a ReduceMean. From opset 18 on, the axes are an input."""
    if graph.opset >= 18:
        return graph.node("ReduceMean", x, graph.constant(list(axes), at=at), at=at, keepdims=keepdims)
    return graph.node("ReduceMean", x, at=at, axes=list(axes), keepdims=keepdims)


def unsqueeze(graph: Graph, x: str, axes: Sequence[int], *, at: str) -> str:
    """Append an Unsqueeze."""
    return graph.node("Unsqueeze", x, graph.constant(list(axes), at=at), at=at)


def reshape(graph: Graph, x: str, shape: Sequence[int], *, at: str) -> str:
    """Append a Reshape; 0 keeps the length of an axis, -1 computes it."""
    return graph.node("Reshape", x, graph.constant(list(shape), at=at), at=at)


def relu(graph: Graph, x: str, at: str) -> str:
    """Append max(x, 0)."""
    return graph.node("Relu", x, at=at)


def sigmoid(graph: Graph, x: str, at: str) -> str:
    """Append 1 / (1 + exp(-x))."""
    return graph.node("Sigmoid", x, at=at)


def silu(graph: Graph, x: str, at: str) -> str:
    """Append x * sigmoid(x), in two nodes."""
    return graph.node("Mul", x, graph.node("Sigmoid", x, at=at), at=at)


def relu6(graph: Graph, x: str, at: str) -> str:
    """Append min(max(x, 0), 6)."""
    return graph.node("Clip", x, graph.constant(0.0, at=at), graph.constant(6.0, at=at), at=at)


def hard_sigmoid(graph: Graph, x: str, at: str) -> str:
    """Append min(max(x / 6 + 1 / 2, 0), 1); the default alpha of ONNX is 0.2."""
    return graph.node("HardSigmoid", x, at=at, alpha=1 / 6, beta=0.5)


def hard_swish(graph: Graph, x: str, at: str) -> str:
    """Append x * hard_sigmoid(x): a HardSwish from opset 14 on, else two nodes."""
    if graph.opset >= 14:
        return graph.node("HardSwish", x, at=at)
    return graph.node("Mul", x, hard_sigmoid(graph, x, at), at=at)


def gelu(graph: Graph, x: str, at: str) -> str:
    """Append 0.5 x (1 + erf(x / sqrt(2))), in five nodes."""
    erf = graph.node("Erf", graph.node("Div", x, graph.constant(math.sqrt(2), at=at), at=at), at=at)
    product = graph.node("Mul", x, graph.node("Add", erf, graph.constant(1.0, at=at), at=at), at=at)
    return graph.node("Mul", product, graph.constant(0.5, at=at), at=at)


def normalise(graph: Graph, draw: Callable[[], dict[str, NDArray[Any]]]) -> None:
    """Set the running statistics of every batch normalization to the statistics on the feed that `draw` returns.

    The graph runs once with batch normalizations in training mode: each channel is normalized with its own mean and
    variance. These are the statistics. The run uses one thread, so that the order of sums is fixed.
    """
    import onnxruntime as ort

    norms = [node for node in graph.proto.node if node.op_type == "BatchNormalization"]
    if not norms:
        return
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(_training(graph), options, providers=["CPUExecutionProvider"])
    measured = dict(zip([end.name for end in session.get_outputs()], session.run(None, draw()), strict=True))
    for tensor in graph.proto.initializer:
        if tensor.name in measured:
            tensor.raw_data = np.ascontiguousarray(measured[tensor.name].ravel(), "<f4").tobytes()


def _training(graph: Graph) -> bytes:
    """Return a model with batch normalizations in training mode, whose outputs are their statistics."""
    model = empty_model("training", graph.opset)
    copy = Graph(graph.seed, graph.opset, model.graph)
    statistics = {name for node in graph.proto.node if node.op_type == "BatchNormalization" for name in node.input[3:]}
    copy.proto.initializer.extend(each for each in graph.proto.initializer if each.name not in statistics)
    copy.proto.input.extend(graph.proto.input)
    for node in graph.proto.node:
        if node.op_type != "BatchNormalization":
            copy.proto.node.append(node)
            continue
        x, scale, shift, *names = node.input
        mean, variance = _moments(copy, x, node.name)
        eps = copy.constant(helper.get_node_attr_value(node, "epsilon"), at=node.name)
        centred = copy.node("Sub", x, mean, at=node.name)
        root = copy.node("Sqrt", copy.node("Add", variance, eps, at=node.name), at=node.name)
        factor = copy.node("Div", _channels(copy, scale, node.name), root, at=node.name)
        scaled = copy.node("Mul", centred, factor, at=node.name)
        copy.node("Add", scaled, _channels(copy, shift, node.name), at=node.name)
        copy.proto.node[-1].output[0] = node.output[0]
        for name, value in zip(names, (mean, variance), strict=True):
            copy.proto.node.append(helper.make_node("Identity", [value], [name]))
            copy.proto.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "C", 1, 1]))
    return bytes(model.SerializeToString())


def _moments(graph: Graph, x: str, at: str) -> tuple[str, str]:
    """Append the mean and the variance (1, C, 1, 1) of each channel of (N, C, H, W)."""
    mean = reduce_mean(graph, graph.node("GlobalAveragePool", x, at=at), [0], at=at)
    centred = graph.node("Sub", x, mean, at=at)
    squares = graph.node("GlobalAveragePool", graph.node("Mul", centred, centred, at=at), at=at)
    return mean, reduce_mean(graph, squares, [0], at=at)


def _channels(graph: Graph, x: str, at: str) -> str:
    """Append a Reshape of (C,) to (1, C, 1, 1)."""
    return reshape(graph, x, [1, -1, 1, 1], at=at)


def empty_model(name: str, opset: int) -> onnx.ModelProto:
    """Return a model without nodes, with the oldest IR version for its opset."""
    opsets = [helper.make_opsetid("", opset)]
    version = helper.find_min_ir_version_for(opsets)
    model = onnx.ModelProto(ir_version=version, producer_name="requant sample_models", opset_import=opsets)
    model.graph.name = name
    return model
