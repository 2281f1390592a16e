"""Small models for the commands of the documentation, with random weights; each has the layers that its page is about."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

SAMPLES = Path(__file__).parents[2] / "sample_models"
OPSET = 17
WORDS, WIDTH = 64, 32

sys.path.insert(0, str(SAMPLES))
layers: Any = importlib.import_module("graph_builder")
streams: Any = importlib.import_module("streams")
sys.path.remove(str(SAMPLES))


def _begun(name: str) -> tuple[onnx.ModelProto, Any]:
    """Return an empty model and its graph."""
    model = layers.empty_model(name, OPSET)
    return model, layers.Graph(0, OPSET, model.graph)


def _grey_conv(graph: Any, x: str, at: str, outputs: int, kernel: int, **window: int) -> str:
    """Append a convolution of an image with one channel; the builder takes such a weight for a depthwise one."""
    result: str = layers.conv(graph, x, at, (outputs, 1, kernel, kernel), bias=0.1, **window)
    next(each for each in graph.proto.node[-1].attribute if each.name == "group").i = 1
    return result


def head() -> onnx.ModelProto:
    """Return a classifier of digits whose last layer is the MatMul `/head/MatMul`."""
    model, graph = _begun("head")
    x = graph.input("image", TensorProto.FLOAT, ["batch", 1, 28, 28])
    x = layers.relu(graph, _grey_conv(graph, x, "/conv1", 16, 5, stride=2), "/relu1")
    x = layers.relu(graph, layers.conv(graph, x, "/conv2", (32, 16, 3, 3), bias=0.1, stride=2), "/relu2")
    x = layers.reshape(graph, x, [-1, 32 * 49], at="/flatten")
    x = layers.token_linear(graph, x, "/head", 32 * 49, 10)
    graph.output("logits", x, TensorProto.FLOAT, ["batch", 10])
    return model


def detector(side: int = 416) -> onnx.ModelProto:
    """Return a detector in the layout of the YOLO family: (N, 4 + classes, anchors), three classes."""
    model, graph = _begun("detector")
    x = graph.input("images", TensorProto.FLOAT, ["N", 3, side, side])
    for number, (inputs, outputs) in enumerate([(3, 8), (8, 16), (16, 32), (32, 32)]):
        at = f"/model.{number}"
        x = layers.silu(graph, layers.conv(graph, x, at, (outputs, inputs, 3, 3), bias=0.1, stride=2), at)
    anchors = (side // 16) ** 2
    boxes = layers.conv(graph, x, "/head/boxes", (4, 32, 1, 1), bias=2.0, gain=0.5)
    boxes = graph.node("Mul", layers.relu(graph, boxes, "/head"), graph.constant(60.0, at="/head"), at="/head")
    scores = layers.sigmoid(graph, layers.conv(graph, x, "/head/scores", (3, 32, 1, 1), bias=-1.5), "/head")
    joined = graph.node("Concat", boxes, scores, at="/head", axis=1)
    graph.output("output0", layers.reshape(graph, joined, [0, 7, -1], at="/head"), TensorProto.FLOAT, ["N", 7, anchors])
    return model


def text() -> onnx.ModelProto:
    """Return a classifier of texts: an embedding, a feed-forward layer with GELU, a mean over the tokens."""
    model, graph = _begun("text")
    ids = graph.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    mask = graph.input("attention_mask", TensorProto.INT64, ["batch", "sequence"])
    table = graph.parameter("embed.weight", graph.normal("embed.weight", (WORDS, WIDTH), 1.0))
    x = graph.node("Gather", table, ids, at="/embed")
    y = layers.layer_norm(graph, x, "/norm1", WIDTH, 1e-5)
    y = layers.gelu(graph, layers.token_linear(graph, y, "/layer/up", WIDTH, 4 * WIDTH), "/layer/act")
    x = graph.node("Add", x, layers.token_linear(graph, y, "/layer/down", 4 * WIDTH, WIDTH), at="/layer")
    seen = layers.unsqueeze(graph, graph.node("Cast", mask, at="/pool", to=TensorProto.FLOAT), [2], at="/pool")
    total = graph.node(
        "ReduceSum", graph.node("Mul", x, seen, at="/pool"), graph.constant([1], at="/pool"), at="/pool", keepdims=0
    )
    count = graph.node("ReduceSum", seen, graph.constant([1], at="/pool"), at="/pool", keepdims=0)
    x = graph.node("Div", total, count, at="/pool")
    graph.output("logits", layers.linear(graph, x, "/classifier", WIDTH, 2, gain=3.0), TensorProto.FLOAT, ["batch", 2])
    return model


def voice() -> onnx.ModelProto:
    """Return a voice activity detector with a state: a frame and `h0` in, `mask` and `hn` out."""
    model: onnx.ModelProto = streams.build("gru_stream")
    return model


def decoder() -> onnx.ModelProto:
    """Return a decoder with a cache of keys and values."""
    model: onnx.ModelProto = streams.build("cached_decoder")
    return model


def denoiser() -> onnx.ModelProto:
    """Return an LSTM that takes a frame a run: `h0` and `c0` in, `hn` and `cn` out."""
    model, graph = _begun("denoiser")
    state: list[int | str] = [1, "N", 32]
    frame = graph.input("frame", TensorProto.FLOAT, ["N", 64])
    before = [graph.input(name, TensorProto.FLOAT, state) for name in ("h0", "c0")]
    shapes = {"W": (1, 128, 32), "R": (1, 128, 32), "B": (1, 256)}
    weights = [graph.parameter(f"lstm.{key}", graph.normal(f"lstm.{key}", shape, 0.2)) for key, shape in shapes.items()]
    x = layers.relu(graph, layers.linear(graph, frame, "/encoder", 64, 32), "/relu")
    x = layers.unsqueeze(graph, x, [0], at="/lstm")
    _, *after = graph.node_with_outputs("LSTM", x, *weights, "", *before, at="/lstm", outputs=3, hidden_size=32)
    for name, value in zip(("hn", "cn"), after, strict=True):
        graph.output(name, value, TensorProto.FLOAT, state)
    last = layers.reshape(graph, "hn", [-1, 32], at="/decoder")
    graph.output("clean", layers.linear(graph, last, "/decoder", 32, 64), TensorProto.FLOAT, ["N", 64])
    return model


def keywords() -> onnx.ModelProto:
    """Return a classifier of sounds of one second, (N, 1, 16000), four classes."""
    model, graph = _begun("keywords")
    x = graph.input("audio", TensorProto.FLOAT, ["N", 1, 16000])
    for at, shape, stride in (("/conv1", (16, 1, 64), 32), ("/conv2", (32, 16, 8), 4), ("/conv3", (32, 32, 8), 4)):
        name = f"{at[1:]}.weight"
        weight = graph.parameter(name, graph.normal(name, shape, 1.5 / float(np.prod(shape[1:])) ** 0.5))
        bias = graph.parameter(f"{at[1:]}.bias", graph.normal(f"{at[1:]}.bias", shape[:1], 0.1))
        x = graph.node("Conv", x, weight, bias, at=at, kernel_shape=[shape[2]], strides=[stride])
        x = layers.relu(graph, x, at)
    x = layers.reduce_mean(graph, x, [2], at="/pool", keepdims=0)
    graph.output("logits", layers.linear(graph, x, "/fc", 32, 4, gain=4.0), TensorProto.FLOAT, ["N", 4])
    return model


def super_resolution() -> onnx.ModelProto:
    """Return a network that doubles height and width of a grey image of any size."""
    model, graph = _begun("super_resolution")
    x = graph.input("image", TensorProto.FLOAT, ["N", 1, "H", "W"])
    x = layers.relu(graph, _grey_conv(graph, x, "/conv1", 32, 5), "/relu1")
    x = layers.relu(graph, layers.conv(graph, x, "/conv2", (32, 32, 3, 3), bias=0.1), "/relu2")
    x = layers.conv(graph, x, "/conv3", (4, 32, 3, 3), bias=0.0)
    x = graph.node("DepthToSpace", x, at="/shuffle", blocksize=2)
    graph.output("upscaled", x, TensorProto.FLOAT, ["N", 1, "2H", "2W"])
    return model


def relus() -> onnx.ModelProto:
    """Return a Conv with two Relus behind each other."""
    model, graph = _begun("relus")
    x = graph.input("image", TensorProto.FLOAT, ["N", 1, 28, 28])
    x = _grey_conv(graph, x, "/conv", 8, 3)
    model.graph.node.append(helper.make_node("Relu", [x], ["first"], name="relu_6"))
    model.graph.node.append(helper.make_node("Relu", ["first"], ["second"], name="relu_7"))
    x = layers.reshape(graph, layers.reduce_mean(graph, "second", [2, 3], at="/pool"), [0, 8], at="/flatten")
    graph.output("logits", layers.linear(graph, x, "/fc", 8, 10), TensorProto.FLOAT, ["N", 10])
    return model


def transcripts() -> onnx.ModelProto:
    """Return a network with scores of 8 characters and a blank at each frame, as for CTC."""
    model, graph = _begun("transcripts")
    x = graph.input("frames", TensorProto.FLOAT, ["N", "T", 32])
    x = layers.relu(graph, layers.token_linear(graph, x, "/encoder", 32, 64, gain=1.4), "/relu")
    graph.output("scores", layers.token_linear(graph, x, "/head", 64, 9, gain=3.0), TensorProto.FLOAT, ["N", "T", 9])
    return model


def photos() -> onnx.ModelProto:
    """Return a classifier of photos of 224x224."""
    model, graph = _begun("photos")
    x = graph.input("data", TensorProto.FLOAT, ["N", 3, 224, 224])
    for number, (inputs, outputs) in enumerate([(3, 16), (16, 32), (32, 64)]):
        x = layers.conv(graph, x, f"/conv{number}", (outputs, inputs, 3, 3), bias=0.1, stride=2)
        x = layers.relu(graph, x, f"/relu{number}")
    x = layers.reduce_mean(graph, x, [2, 3], at="/pool", keepdims=0)
    graph.output("scores", layers.linear(graph, x, "/fc", 64, 10, gain=3.0), TensorProto.FLOAT, ["N", 10])
    return model
