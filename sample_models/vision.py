"""Image classifiers and a segmentation network, with the layers of torchvision and of milesial's PyTorch-UNet."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from graph_builder import (
    RELU,
    Graph,
    batch_norm,
    conv,
    conv_transpose,
    gelu,
    hard_sigmoid,
    hard_swish,
    layer_norm,
    linear,
    path,
    relu,
    relu6,
    reshape,
    sigmoid,
    silu,
    token_linear,
    unsqueeze,
)
from onnx import TensorProto

CLASSES = 1000
BRANCH = 0.3  # the standard deviation of a residual branch: the sum over a stage keeps a magnitude of about 1

Activation: TypeAlias = Callable[[Graph, str, str], str]


def resnet50(graph: Graph, size: int) -> None:
    """Write ResNet-50 (He et al., 2015), with the stride in the 3x3 convolution (v1.5 in torchvision)."""
    x = graph.input("input", TensorProto.FLOAT, ["N", 3, size, size])
    x = batch_norm(graph, conv(graph, x, "/conv1", (64, 3, 7, 7), stride=2), "/bn1", 64)
    x = relu(graph, x, "/relu")
    x = graph.node("MaxPool", x, at="/maxpool", kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2])
    channels = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for block in range(blocks):
            at = f"/layer{stage}/layer{stage}.{block}"
            x = _bottleneck(graph, x, at, (channels, width), stride=2 if stage > 1 and block == 0 else 1)
            channels = 4 * width
    _classifier(graph, x, "/fc", channels)


def _bottleneck(graph: Graph, x: str, at: str, channels: tuple[int, int], stride: int) -> str:
    """Append 1x1 to the width, 3x3, 1x1 to four times the width; the first block of a stage projects its shortcut."""
    inputs, width = channels
    y = batch_norm(graph, conv(graph, x, f"{at}/conv1", (width, inputs, 1, 1)), f"{at}/bn1", width)
    y = relu(graph, y, f"{at}/relu")
    y = conv(graph, y, f"{at}/conv2", (width, width, 3, 3), stride=stride)
    y = relu(graph, batch_norm(graph, y, f"{at}/bn2", width), f"{at}/relu")
    y = conv(graph, y, f"{at}/conv3", (4 * width, width, 1, 1))
    y = batch_norm(graph, y, f"{at}/bn3", 4 * width, gain=BRANCH)
    if inputs != 4 * width:
        down = f"{at}/downsample/downsample."
        x = conv(graph, x, f"{down}0", (4 * width, inputs, 1, 1), stride=stride)
        x = batch_norm(graph, x, f"{down}1", 4 * width)
    return relu(graph, graph.node("Add", y, x, at=at), f"{at}/relu")


def _classifier(graph: Graph, x: str, at: str, channels: int) -> None:
    """Append a pooling over all positions, and a fully connected layer."""
    pooled = graph.node("GlobalAveragePool", x, at="/avgpool")
    logits = linear(graph, graph.node("Flatten", pooled, at="", axis=1), at, channels, CLASSES, gain=2.0)
    graph.output("output", logits, TensorProto.FLOAT, ["N", CLASSES])


def _conv_norm(
    graph: Graph, x: str, at: str, shape: tuple[int, ...], act: Activation | None = None, **options: float
) -> str:
    """Append torchvision's Conv2dNormActivation: layers 0, 1 and 2 of the Sequential `at`."""
    eps, gain = options.pop("eps", 1e-5), options.pop("gain", 1.0)
    step = at.rsplit("/", 1)[1]
    x = conv(graph, x, f"{at}/{step}.0", shape, **options)  # type: ignore[arg-type]
    x = batch_norm(graph, x, f"{at}/{step}.1", shape[0], eps=eps, gain=gain)
    return act(graph, x, f"{at}/{step}.2") if act else x


def mobilenet_v2(graph: Graph, size: int) -> None:
    """Write MobileNetV2 (Sandler et al., 2018), width 1.0."""
    x = graph.input("input", TensorProto.FLOAT, ["N", 3, size, size])
    x = _conv_norm(graph, x, "/features/features.0", (32, 3, 3, 3), relu6, stride=2)
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    inputs, block = 32, 0
    for expand, outputs, count, first in rows:
        for stride in [first] + [1] * (count - 1):
            block += 1
            at = f"/features/features.{block}"
            y = _linear_bottleneck(graph, x, f"{at}/conv", (inputs, inputs * expand, outputs), stride)
            x = graph.node("Add", x, y, at=at) if stride == 1 and inputs == outputs else y
            inputs = outputs
    x = _conv_norm(graph, x, "/features/features.18", (1280, 320, 1, 1), relu6)
    _classifier(graph, x, "/classifier/classifier.1", 1280)


def _linear_bottleneck(graph: Graph, x: str, at: str, channels: tuple[int, int, int], stride: int) -> str:
    """Append expand 1x1, depthwise 3x3, project 1x1 without activation."""
    inputs, width, outputs = channels
    layer = 0
    if width != inputs:
        x = _conv_norm(graph, x, f"{at}/conv.0", (width, inputs, 1, 1), relu6)
        layer = 1
    x = _conv_norm(graph, x, f"{at}/conv.{layer}", (width, 1, 3, 3), relu6, stride=stride)
    x = conv(graph, x, f"{at}/conv.{layer + 1}", (outputs, width, 1, 1))
    gain = BRANCH if stride == 1 and inputs == outputs else 1.0
    return batch_norm(graph, x, f"{at}/conv.{layer + 2}", outputs, gain=gain)


MOBILENET_V3_LARGE = (
    # kernel, expanded, outputs, squeezed, activation, stride
    (3, 16, 16, 0, relu, 1),
    (3, 64, 24, 0, relu, 2),
    (3, 72, 24, 0, relu, 1),
    (5, 72, 40, 24, relu, 2),
    (5, 120, 40, 32, relu, 1),
    (5, 120, 40, 32, relu, 1),
    (3, 240, 80, 0, hard_swish, 2),
    (3, 200, 80, 0, hard_swish, 1),
    (3, 184, 80, 0, hard_swish, 1),
    (3, 184, 80, 0, hard_swish, 1),
    (3, 480, 112, 120, hard_swish, 1),
    (3, 672, 112, 168, hard_swish, 1),
    (5, 672, 160, 168, hard_swish, 2),
    (5, 960, 160, 240, hard_swish, 1),
    (5, 960, 160, 240, hard_swish, 1),
)


def mobilenet_v3_large(graph: Graph, size: int) -> None:
    """Write MobileNetV3-Large (Howard et al., 2019): squeeze-and-excite with HardSigmoid, hard-swish."""
    x = graph.input("input", TensorProto.FLOAT, ["N", 3, size, size])
    x = _conv_norm(graph, x, "/features/features.0", (16, 3, 3, 3), hard_swish, stride=2, eps=1e-3)
    inputs = 16
    for block, (kernel, width, outputs, squeezed, act, stride) in enumerate(MOBILENET_V3_LARGE, 1):
        at = f"/features/features.{block}"
        skip = stride == 1 and inputs == outputs
        layers = iter(f"{at}/block/block.{layer}" for layer in range(4))
        y = x
        if width != inputs:
            y = _conv_norm(graph, y, next(layers), (width, inputs, 1, 1), act, eps=1e-3)
        shape = (width, 1, kernel, kernel)
        y = _conv_norm(graph, y, next(layers), shape, act, stride=stride, eps=1e-3)
        if squeezed:
            y = _squeeze_excite(graph, y, next(layers), (width, squeezed), relu, hard_sigmoid)
        gain = BRANCH if skip else 1.0
        y = _conv_norm(graph, y, next(layers), (outputs, width, 1, 1), eps=1e-3, gain=gain)
        x = graph.node("Add", y, x, at=at) if skip else y
        inputs = outputs
    x = _conv_norm(graph, x, "/features/features.16", (960, 160, 1, 1), hard_swish, eps=1e-3)
    x = graph.node("Flatten", graph.node("GlobalAveragePool", x, at="/avgpool"), at="", axis=1)
    x = hard_swish(graph, linear(graph, x, "/classifier/classifier.0", 960, 1280, gain=2.0), "/classifier/classifier.1")
    logits = linear(graph, x, "/classifier/classifier.3", 1280, CLASSES, gain=2.0)
    graph.output("output", logits, TensorProto.FLOAT, ["N", CLASSES])


def _squeeze_excite(graph: Graph, x: str, at: str, channels: tuple[int, int], act: Activation, gate: Activation) -> str:
    """Append a factor in 0..1 for each channel. The factors are computed from the means of all channels."""
    width, squeezed = channels
    y = graph.node("GlobalAveragePool", x, at=f"{at}/avgpool")
    y = act(graph, conv(graph, y, f"{at}/fc1", (squeezed, width, 1, 1), bias=0.0), f"{at}/activation")
    y = conv(graph, y, f"{at}/fc2", (width, squeezed, 1, 1), bias=1.0)
    return graph.node("Mul", gate(graph, y, f"{at}/scale_activation"), x, at=at)


EFFICIENTNET_B0 = (
    # expansion, kernel, stride, outputs, blocks
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def efficientnet_b0(graph: Graph, size: int) -> None:
    """Write EfficientNet-B0 (Tan and Le, 2019): SiLU, squeeze-and-excite with sigmoid."""
    x = graph.input("input", TensorProto.FLOAT, ["N", 3, size, size])
    x = _conv_norm(graph, x, "/features/features.0", (32, 3, 3, 3), silu, stride=2)
    inputs = 32
    for stage, (expand, kernel, first, outputs, blocks) in enumerate(EFFICIENTNET_B0, 1):
        for block in range(blocks):
            at = f"/features/features.{stage}/features.{stage}.{block}"
            stride = first if block == 0 else 1
            x = _mbconv(graph, x, at, (inputs, inputs * expand, outputs), kernel, stride)
            inputs = outputs
    x = _conv_norm(graph, x, "/features/features.8", (1280, 320, 1, 1), silu)
    _classifier(graph, x, "/classifier/classifier.1", 1280)


def _mbconv(graph: Graph, x: str, at: str, channels: tuple[int, int, int], kernel: int, stride: int) -> str:
    """Append expand 1x1, depthwise, squeeze-and-excite, project 1x1."""
    inputs, width, outputs = channels
    skip = stride == 1 and inputs == outputs
    layers = iter(f"{at}/block/block.{layer}" for layer in range(4))
    y = x
    if width != inputs:
        y = _conv_norm(graph, y, next(layers), (width, inputs, 1, 1), silu)
    y = _conv_norm(graph, y, next(layers), (width, 1, kernel, kernel), silu, stride=stride)
    y = _squeeze_excite(graph, y, next(layers), (width, max(1, inputs // 4)), silu, sigmoid)
    y = _conv_norm(graph, y, next(layers), (outputs, width, 1, 1), gain=BRANCH if skip else 1.0)
    return graph.node("Add", y, x, at=at) if skip else y


SQUEEZENET1_1 = (
    # squeezed channels, channels of each of the two expansions; None is a pooling layer
    None,
    (16, 64),
    (16, 64),
    None,
    (32, 128),
    (32, 128),
    None,
    (48, 192),
    (48, 192),
    (64, 256),
    (64, 256),
)


def squeezenet1_1(graph: Graph, size: int) -> None:
    """Write SqueezeNet 1.1 (Iandola et al., 2016): no batch normalization, a Concat of two convolutions per module."""
    x = graph.input("input", TensorProto.FLOAT, ["N", 3, size, size])
    x = conv(graph, x, "/features/features.0", (64, 3, 3, 3), stride=2, pad=0, bias=0.0)
    x = relu(graph, x, "/features/features.1")
    inputs = 64
    for layer, row in enumerate(SQUEEZENET1_1, 2):
        at = f"/features/features.{layer}"
        if row is None:
            x = graph.node("MaxPool", x, at=at, ceil_mode=1, kernel_shape=[3, 3], strides=[2, 2])
        else:
            x = _fire(graph, x, at, (inputs, *row))
            inputs = 2 * row[1]
    x = conv(graph, x, "/classifier/classifier.1", (CLASSES, inputs, 1, 1), bias=0.0)
    x = relu(graph, x, "/classifier/classifier.2")
    x = graph.node("GlobalAveragePool", x, at="/classifier/classifier.3")
    graph.output("output", graph.node("Flatten", x, at="", axis=1), TensorProto.FLOAT, ["N", CLASSES])


def _fire(graph: Graph, x: str, at: str, channels: tuple[int, int, int]) -> str:
    """Append squeeze 1x1, then expand 1x1 and 3x3 in parallel."""
    inputs, squeezed, width = channels
    x = relu(graph, conv(graph, x, f"{at}/squeeze", (squeezed, inputs, 1, 1), bias=0.0), f"{at}/squeeze_activation")
    parts = []
    for kernel in (1, 3):
        name = f"{at}/expand{kernel}x{kernel}"
        part = conv(graph, x, name, (width, squeezed, kernel, kernel), bias=0.0)
        parts.append(relu(graph, part, f"{name}_activation"))
    return graph.node("Concat", *parts, at=at, axis=1)


def unet(graph: Graph, size: int) -> None:
    """Write U-Net (Ronneberger et al., 2015) with ConvTranspose, 3 channels, 2 classes (milesial's PyTorch-UNet).

    Exporters write Pad nodes for the alignment; they pad by 0 if the size is a multiple of 16.
    """
    x = graph.input("input", TensorProto.FLOAT, ["N", 3, size, size])
    x = _double_conv(graph, x, "/inc", (3, 64))
    skips = []
    for level in range(1, 5):
        skips.append(x)
        at = f"/down{level}/maxpool_conv"
        x = graph.node("MaxPool", x, at=f"{at}/maxpool_conv.0", kernel_shape=[2, 2], strides=[2, 2])
        x = _double_conv(graph, x, f"{at}/maxpool_conv.1", (32 << level, 64 << level))
    for level, skip in enumerate(reversed(skips), 1):
        at, width = f"/up{level}", 1024 >> level
        x = conv_transpose(graph, x, f"{at}/up", (2 * width, width, 2, 2))
        x = graph.node("Pad", x, graph.constant([0] * 8, at=at), at=at, mode="constant")
        x = graph.node("Concat", skip, x, at=at, axis=1)
        x = _double_conv(graph, x, f"{at}/conv", (2 * width, width))
    x = conv(graph, x, "/outc/conv", (2, 64, 1, 1), bias=0.0)
    graph.output("output", x, TensorProto.FLOAT, ["N", 2, size, size])


def _double_conv(graph: Graph, x: str, at: str, channels: tuple[int, int]) -> str:
    """Append 3x3 convolution, batch normalization and ReLU, twice."""
    inputs, width = channels
    for layer, depth in ((0, inputs), (3, width)):
        start = f"{at}/double_conv/double_conv."
        x = batch_norm(graph, conv(graph, x, f"{start}{layer}", (width, depth, 3, 3)), f"{start}{layer + 1}", width)
        x = relu(graph, x, f"{start}{layer + 2}")
    return x


VIT_TOKENS, VIT_WIDTH, VIT_HEADS, VIT_LAYERS = 197, 768, 12, 12


def vit_b_16(graph: Graph, size: int) -> None:
    """Write ViT-B/16 (Dosovitskiy et al., 2020) for images of 224 x 224: 196 patches and the class token."""
    x = graph.input("input", TensorProto.FLOAT, ["N", 3, size, size])
    x = conv(graph, x, "/conv_proj", (VIT_WIDTH, 3, 16, 16), stride=16, pad=0, bias=0.0, gain=1.0)
    x = graph.node("Transpose", reshape(graph, x, [0, VIT_WIDTH, -1], at=""), at="", perm=[0, 2, 1])
    token = graph.parameter("class_token", graph.normal("class_token", (1, 1, VIT_WIDTH), 1.0))
    batch = graph.node("Gather", graph.node("Shape", x, at=""), graph.constant([0], at=""), at="", axis=0)
    shape = graph.node("Concat", batch, graph.constant([1, VIT_WIDTH], at=""), at="", axis=0)
    x = graph.node("Concat", graph.node("Expand", token, shape, at=""), x, at="", axis=1)
    name = "encoder.pos_embedding"
    x = graph.node("Add", x, graph.parameter(name, graph.normal(name, (1, VIT_TOKENS, VIT_WIDTH), 0.5)), at="/encoder")
    for layer in range(VIT_LAYERS):
        x = _encoder_block(graph, x, f"/encoder/layers/encoder_layer_{layer}")
    x = layer_norm(graph, x, "/encoder/ln", VIT_WIDTH, 1e-6)
    x = graph.node("Gather", x, graph.constant(0, at=""), at="", axis=1)
    graph.output("output", linear(graph, x, "/heads/head", VIT_WIDTH, CLASSES), TensorProto.FLOAT, ["N", CLASSES])


def _encoder_block(graph: Graph, x: str, at: str) -> str:
    """Append attention and perceptron; each normalizes its input, and its result is added to the input."""
    attention = f"{at}/self_attention"
    y = _attention(graph, layer_norm(graph, x, f"{at}/ln_1", VIT_WIDTH, 1e-6), attention)
    x = graph.node("Add", y, x, at=at)
    y = layer_norm(graph, x, f"{at}/ln_2", VIT_WIDTH, 1e-6)
    y = token_linear(graph, y, f"{at}/mlp/mlp.0", VIT_WIDTH, 4 * VIT_WIDTH, gain=RELU)
    y = token_linear(graph, gelu(graph, y, f"{at}/mlp/mlp.1"), f"{at}/mlp/mlp.3", 4 * VIT_WIDTH, VIT_WIDTH)
    return graph.node("Add", x, y, at=at)


def _attention(graph: Graph, x: str, at: str) -> str:
    """Append PyTorch's MultiheadAttention as exporters write it: one projection to the three parts, tokens first."""
    width, depth = VIT_WIDTH, VIT_WIDTH // VIT_HEADS
    x = graph.node("Transpose", x, at=at, perm=[1, 0, 2])
    weight, bias = f"{path(at)}.in_proj_weight", f"{path(at)}.in_proj_bias"
    values = graph.normal(weight, (width, 3 * width), 1 / math.sqrt(width))
    x = graph.node("MatMul", x, graph.parameter(weight, values), at=at)
    x = graph.node("Add", graph.parameter(bias, graph.normal(bias, (3 * width,), 0.1)), x, at=at)
    x = unsqueeze(graph, reshape(graph, x, [0, 0, 3, width], at=at), [0], at=at)
    x = graph.node(
        "Squeeze", graph.node("Transpose", x, at=at, perm=[3, 1, 2, 0, 4]), graph.constant([3], at=at), at=at
    )
    parts = []
    for part in range(3):
        y = graph.node("Gather", x, graph.constant(part, at=at), at=at, axis=0)
        y = graph.node("Transpose", reshape(graph, y, [VIT_TOKENS, -1, depth], at=at), at=at, perm=[1, 0, 2])
        parts.append(reshape(graph, y, [-1, VIT_HEADS, VIT_TOKENS, depth], at=at))
    query, key, value = parts
    root = graph.constant(depth**-0.25, at=at)  # PyTorch multiplies both query and key by the root of the scale
    query = graph.node("Mul", query, root, at=at)
    key = graph.node("Mul", graph.node("Transpose", key, at=at, perm=[0, 1, 3, 2]), root, at=at)
    weights = graph.node("Softmax", graph.node("MatMul", query, key, at=at), at=at, axis=-1)
    mixed = graph.node("MatMul", weights, value, at=at)
    mixed = reshape(graph, graph.node("Transpose", mixed, at=at, perm=[2, 0, 1, 3]), [-1, width], at=at)
    mixed = linear(graph, mixed, f"{at}/out_proj", width, width)
    return graph.node("Transpose", reshape(graph, mixed, [VIT_TOKENS, -1, width], at=at), at=at, perm=[1, 0, 2])


CCT_WIDTH, CCT_HEADS, CCT_LAYERS, CCT_CLASSES = 256, 4, 7, 10


def cct_7(graph: Graph, size: int) -> None:
    """Write CCT-7/3x1 for CIFAR-10 (Hassani et al., 2021): tokens from a convolution, a mean weighted by a softmax."""
    width, tokens = CCT_WIDTH, (size // 2) ** 2
    x = graph.input("input", TensorProto.FLOAT, ["N", 3, size, size])
    x = relu(graph, conv(graph, x, "/tokenizer/conv", (width, 3, 3, 3)), "/tokenizer/relu")
    x = graph.node("MaxPool", x, at="/tokenizer/pool", kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2])
    x = graph.node("Transpose", reshape(graph, x, [0, width, -1], at="/tokenizer"), at="/tokenizer", perm=[0, 2, 1])
    name = "classifier.positional_emb"
    x = graph.node("Add", x, graph.parameter(name, graph.normal(name, (1, tokens, width), 0.2)), at="/classifier")
    for layer in range(CCT_LAYERS):
        x = _cct_block(graph, x, f"/classifier/blocks.{layer}")
    x = layer_norm(graph, x, "/classifier/norm", width, 1e-5)
    weights = token_linear(graph, x, "/classifier/attention_pool", width, 1)
    weights = graph.node("Softmax", weights, at="/classifier", axis=1)
    weights = graph.node("Transpose", weights, at="/classifier", perm=[0, 2, 1])
    pooled = graph.node("MatMul", weights, x, at="/classifier")
    pooled = graph.node("Squeeze", pooled, graph.constant([1], at="/classifier"), at="/classifier")
    graph.output("output", linear(graph, pooled, "/classifier/fc", width, CCT_CLASSES), TensorProto.FLOAT, ["N", 10])


def _cct_block(graph: Graph, x: str, at: str) -> str:
    """Append attention of normalized tokens, and a perceptron of their normalized sum."""
    width = CCT_WIDTH
    y = _cct_attention(graph, layer_norm(graph, x, f"{at}/pre_norm", width, 1e-5), f"{at}/self_attn")
    x = layer_norm(graph, graph.node("Add", x, y, at=at), f"{at}/norm1", width, 1e-5)
    y = gelu(graph, token_linear(graph, x, f"{at}/linear1", width, 2 * width, gain=RELU), f"{at}/activation")
    return graph.node("Add", x, token_linear(graph, y, f"{at}/linear2", 2 * width, width), at=at)


def _cct_attention(graph: Graph, x: str, at: str) -> str:
    """Append attention as timm writes it: one projection without a bias, of which each part has all heads."""
    width, depth = CCT_WIDTH, CCT_WIDTH // CCT_HEADS
    x = token_linear(graph, x, f"{at}/qkv", width, 3 * width, bias=False)
    x = reshape(graph, x, [0, 0, 3, CCT_HEADS, depth], at=at)
    x = graph.node("Transpose", x, at=at, perm=[2, 0, 3, 1, 4])
    q, k, v = (graph.node("Gather", x, graph.constant(part, at=at), at=at, axis=0) for part in range(3))
    scores = graph.node("MatMul", q, graph.node("Transpose", k, at=at, perm=[0, 1, 3, 2]), at=at)
    scores = graph.node("Mul", scores, graph.constant(depth**-0.5, at=at), at=at)
    mixed = graph.node("MatMul", graph.node("Softmax", scores, at=at, axis=-1), v, at=at)
    mixed = graph.node("Transpose", mixed, at=at, perm=[0, 2, 1, 3])
    return token_linear(graph, reshape(graph, mixed, [0, 0, width], at=at), f"{at}/proj", width, width)
