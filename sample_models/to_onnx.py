"""Write a network of `networks.py` as an ONNX graph. Nothing is folded, and every node has the name of its module.

A node has the dotted name of its module (`conv1`, `block2.expand.bn`), or this name and a part (`layer1.mlp.gelu.erf`).
Its output is `NODE_out`, its initializers are `NODE.weight`, `NODE.bias` and so on.
"""

import math
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

import networks
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

OPSET = 17  # the first opset with LayerNormalization
IR_VERSION = 8  # was released together with opset 17


@dataclass
class Graph:
    """An ONNX graph during writing."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, TensorProto] = field(default_factory=dict)

    def node(self, op_type: str, name: str, *inputs: str, **attributes: Any) -> str:
        """Append a node; return the name of its output."""
        output = f"{name}_out"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=name, **attributes))
        return output

    def constant(self, name: str, value: Tensor | np.ndarray[Any, Any]) -> str:
        """Store an initializer once; return its name."""
        array = value.detach().numpy() if isinstance(value, Tensor) else value
        self.initializers.setdefault(name, numpy_helper.from_array(array, name))
        return name


def to_onnx(network: nn.Module, name: str) -> onnx.ModelProto:
    """Return a network (N, 1, 28, 28) -> (N, 10) as a model with the input `image` and the output `logits`."""
    graph = Graph()
    emit(network, graph, "", "image")
    graph.nodes[-1].output[0] = "logits"
    proto = helper.make_graph(
        graph.nodes,
        name,
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 28, 28])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])],
        initializer=list(graph.initializers.values()),
    )
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(proto, opset_imports=opsets, ir_version=IR_VERSION, producer_name="requant sample_models")
    onnx.checker.check_model(model, full_check=True)
    return model


@singledispatch
def emit(module: nn.Module, graph: Graph, name: str, x: str) -> str:
    """Append the nodes of `module` for the input tensor `x`, with the prefix `name`; return the output tensor."""
    raise TypeError(f"{name}: no ONNX form for {type(module).__name__}; register one with @emit.register")


@emit.register
def _(module: nn.Sequential, graph: Graph, name: str, x: str) -> str:
    for child, part in module.named_children():
        x = emit(part, graph, f"{name}.{child}" if name else child, x)
    return x


@emit.register
def _(module: nn.Conv2d, graph: Graph, name: str, x: str) -> str:
    parameters = [graph.constant(f"{name}.weight", module.weight)]
    if module.bias is not None:
        parameters.append(graph.constant(f"{name}.bias", module.bias))
    return graph.node(
        "Conv",
        name,
        x,
        *parameters,
        kernel_shape=module.kernel_size,
        strides=module.stride,
        pads=[*module.padding, *module.padding],
        group=module.groups,
    )


@emit.register
def _(module: nn.BatchNorm2d, graph: Graph, name: str, x: str) -> str:
    statistics = {"scale": module.weight, "bias": module.bias, "mean": module.running_mean, "var": module.running_var}
    parameters = [graph.constant(f"{name}.{key}", value) for key, value in statistics.items() if value is not None]
    return graph.node("BatchNormalization", name, x, *parameters, epsilon=module.eps)


@emit.register
def _(module: nn.LayerNorm, graph: Graph, name: str, x: str) -> str:
    scale, bias = graph.constant(f"{name}.scale", module.weight), graph.constant(f"{name}.bias", module.bias)
    return graph.node("LayerNormalization", name, x, scale, bias, axis=-1, epsilon=module.eps)


@emit.register
def _(module: nn.Linear, graph: Graph, name: str, x: str) -> str:
    weight, bias = graph.constant(f"{name}.weight", module.weight), graph.constant(f"{name}.bias", module.bias)
    return graph.node("Gemm", name, x, weight, bias, transB=1)


@emit.register
def _(module: networks.TokenLinear, graph: Graph, name: str, x: str) -> str:
    product = graph.node("MatMul", f"{name}.matmul", x, graph.constant(f"{name}.weight", module.weight.T))
    return graph.node("Add", f"{name}.add", product, graph.constant(f"{name}.bias", module.bias))


@emit.register
def _(module: nn.ReLU, graph: Graph, name: str, x: str) -> str:
    return graph.node("Relu", name, x)


@emit.register
def _(module: nn.Hardswish, graph: Graph, name: str, x: str) -> str:
    return graph.node("HardSwish", name, x)


@emit.register
def _(module: nn.Hardsigmoid, graph: Graph, name: str, x: str) -> str:
    return graph.node("HardSigmoid", name, x, alpha=1 / 6, beta=0.5)  # ONNX's default alpha is 0.2


@emit.register
def _(module: nn.GELU, graph: Graph, name: str, x: str) -> str:
    """Append 0.5 x (1 + erf(x / sqrt(2))) as five nodes, as exporters write it below opset 20."""
    root, one, half = (
        graph.constant(f"gelu.{key}", np.asarray(value, np.float32))
        for key, value in {"sqrt2": math.sqrt(2), "one": 1, "half": 0.5}.items()
    )
    erf = graph.node("Erf", f"{name}.erf", graph.node("Div", f"{name}.div", x, root))
    product = graph.node("Mul", f"{name}.mul", x, graph.node("Add", f"{name}.add", erf, one))
    return graph.node("Mul", f"{name}.half", product, half)


@emit.register
def _(module: nn.MaxPool2d, graph: Graph, name: str, x: str) -> str:
    size = [module.kernel_size] * 2
    return graph.node("MaxPool", name, x, kernel_shape=size, strides=size)


@emit.register
def _(module: nn.AdaptiveAvgPool2d, graph: Graph, name: str, x: str) -> str:
    return graph.node("GlobalAveragePool", name, x)


@emit.register
def _(module: nn.Flatten, graph: Graph, name: str, x: str) -> str:
    return graph.node("Flatten", name, x)


@emit.register
def _(module: networks.Residual, graph: Graph, name: str, x: str) -> str:
    return graph.node("Add", f"{name}.add", x, emit(module.body, graph, name, x))


@emit.register
def _(module: networks.SqueezeExcite, graph: Graph, name: str, x: str) -> str:
    return graph.node("Mul", f"{name}.mul", x, emit(module.gate, graph, name, x))


@emit.register
def _(module: networks.Tokens, graph: Graph, name: str, x: str) -> str:
    shape = graph.constant(f"{name}.shape", np.asarray([0, 0, -1]))  # 0 keeps the length of an axis
    return graph.node(
        "Transpose", f"{name}.transpose", graph.node("Reshape", f"{name}.reshape", x, shape), perm=[0, 2, 1]
    )


@emit.register
def _(module: networks.Positions, graph: Graph, name: str, x: str) -> str:
    return graph.node("Add", name, x, graph.constant(f"{name}.embedding", module.embedding))


@emit.register
def _(module: networks.Attention, graph: Graph, name: str, x: str) -> str:
    apart = graph.constant("attention.split", np.asarray([0, 0, module.heads, module.depth]))
    together = graph.constant("attention.join", np.asarray([0, 0, module.heads * module.depth]))
    root = graph.constant("attention.sqrt_depth", np.asarray(math.sqrt(module.depth), np.float32))

    def split(linear: nn.Module, part: str, perm: list[int]) -> str:
        heads = graph.node("Reshape", f"{name}.{part}.split", emit(linear, graph, f"{name}.{part}", x), apart)
        return graph.node("Transpose", f"{name}.{part}.transpose", heads, perm=perm)

    query = split(module.query, "query", [0, 2, 1, 3])
    key = split(module.key, "key", [0, 2, 3, 1])  # (N, heads, depth, T): transposed for the product
    value = split(module.value, "value", [0, 2, 1, 3])
    scores = graph.node("Div", f"{name}.scale", graph.node("MatMul", f"{name}.scores", query, key), root)
    mixed = graph.node("MatMul", f"{name}.mix", graph.node("Softmax", f"{name}.softmax", scores, axis=-1), value)
    joined = graph.node("Transpose", f"{name}.transpose", mixed, perm=[0, 2, 1, 3])
    return emit(module.project, graph, f"{name}.project", graph.node("Reshape", f"{name}.join", joined, together))


@emit.register
def _(module: networks.TokenMean, graph: Graph, name: str, x: str) -> str:
    return graph.node("ReduceMean", name, x, axes=[1], keepdims=0)
