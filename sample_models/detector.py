"""A detector with the layers of Ultralytics' YOLOv8n, with and without non-maximum suppression in the graph."""

from __future__ import annotations

import numpy as np
from graph_builder import Graph, batch_norm, conv, path, reshape, sigmoid, silu, unsqueeze
from onnx import TensorProto

CLASSES = 80
BINS = 16  # the position of a side of a box is the mean of a distribution over 16 distances
STRIDES = (8, 16, 32)
RARE = -4.0  # the bias of class logits: scores are about 0.02, because nearly all anchors contain no object
MAX_PER_CLASS, IOU, SCORE = 100, 0.45, 0.25


HEAD = "/model.22"


def yolo(graph: Graph, size: int) -> None:
    """Write YOLOv8n. The output `output0` (N, 84, anchors) has center and size of a box in pixels, and 80 scores."""
    boxes, scores = _detect(graph, size)
    result = graph.node("Concat", boxes, scores, at=HEAD, axis=1)
    graph.output("output0", result, TensorProto.FLOAT, ["N", 4 + CLASSES, sum((size // s) ** 2 for s in STRIDES)])


def yolo_nms(graph: Graph, size: int) -> None:
    """Write YOLOv8n with NonMaxSuppression.

    The output `detections` (detected, 7) has image, x1, y1, x2, y2 in pixels, class, score.
    """
    boxes, scores = _detect(graph, size)
    at = "/nms"
    centre, extent = graph.node_with_outputs("Split", boxes, graph.constant([2, 2], at=at), at=at, outputs=2, axis=1)
    half = graph.node("Mul", extent, graph.constant(0.5, at=at), at=at)
    ends = [graph.node(op, centre, half, at=at) for op in ("Sub", "Add")]
    corners = graph.node("Transpose", graph.node("Concat", *ends, at=at, axis=1), at=at, perm=[0, 2, 1])
    limits = [graph.constant([value], at=at) for value in (MAX_PER_CLASS, IOU, SCORE)]
    found = graph.node("NonMaxSuppression", corners, scores, *limits, at=at)
    image, label, anchor = (
        graph.node("Gather", found, graph.constant([column], at=at), at=at, axis=1) for column in range(3)
    )
    place = graph.node("Concat", image, anchor, at=at, axis=1)
    score = graph.node("GatherND", scores, found, at=at)
    columns = [
        graph.node("Cast", image, at=at, to=TensorProto.FLOAT),
        graph.node("GatherND", corners, place, at=at),
        graph.node("Cast", label, at=at, to=TensorProto.FLOAT),
        unsqueeze(graph, score, [1], at=at),
    ]
    graph.output("detections", graph.node("Concat", *columns, at=at, axis=1), TensorProto.FLOAT, ["detected", 7])


def _detect(graph: Graph, size: int) -> tuple[str, str]:
    """Write the network up to boxes (N, 4, anchors), center and size in pixels, and scores (N, 80, anchors)."""
    scales = []
    for scale, (x, channels) in enumerate(_features(graph, size)):
        box = _branch(graph, x, f"{HEAD}/cv2.{scale}/cv2.{scale}.", (channels, 64, 4 * BINS), (1.0, 1.0))
        label = _branch(graph, x, f"{HEAD}/cv3.{scale}/cv3.{scale}.", (channels, CLASSES, CLASSES), (RARE, 0.9))
        both = graph.node("Concat", box, label, at=HEAD, axis=1)
        scales.append(reshape(graph, both, [0, 4 * BINS + CLASSES, -1], at=HEAD))
    joined = graph.node("Concat", *scales, at=HEAD, axis=2)
    sizes = graph.constant([4 * BINS, CLASSES], at=HEAD)
    distances, labels = graph.node_with_outputs("Split", joined, sizes, at=HEAD, outputs=2, axis=1)
    return _boxes(graph, distances, size), sigmoid(graph, labels, HEAD)


def _branch(graph: Graph, x: str, at: str, channels: tuple[int, int, int], logits: tuple[float, float]) -> str:
    """Append two 3x3 convolutions, and a 1x1 convolution for the logits; `logits` are its bias and gain."""
    inputs, width, outputs = channels
    bias, gain = logits
    x = _conv(graph, x, f"{at}0", (width, inputs, 3, 3))
    x = _conv(graph, x, f"{at}1", (width, width, 3, 3))
    return conv(graph, x, f"{at}2", (outputs, width, 1, 1), bias=bias, gain=gain)


def _boxes(graph: Graph, x: str, size: int) -> str:
    """Append boxes (N, 4, anchors), from logits (N, 64, anchors) of the four distances from an anchor to the sides."""
    at = f"{HEAD}/dfl"
    x = graph.node("Transpose", reshape(graph, x, [0, 4, BINS, -1], at=at), at=at, perm=[0, 2, 1, 3])
    x = graph.node("Softmax", x, at=at, axis=1)
    weight = graph.parameter(f"{path(at)}.conv.weight", np.arange(BINS, dtype=np.float32).reshape(1, BINS, 1, 1))
    x = graph.node("Conv", x, weight, at=f"{at}/conv", dilations=[1, 1], group=1, kernel_shape=[1, 1], strides=[1, 1])
    x = reshape(graph, x, [0, 4, -1], at=at)
    sides = graph.constant([2, 2], at=HEAD)
    before, after = graph.node_with_outputs("Split", x, sides, at=HEAD, outputs=2, axis=1)
    centres = [(np.mgrid[: size // s, : size // s][::-1] + 0.5).reshape(1, 2, -1) for s in STRIDES]
    anchors = graph.constant(np.concatenate(centres, axis=2), at=HEAD)
    start, end = graph.node("Sub", anchors, before, at=HEAD), graph.node("Add", anchors, after, at=HEAD)
    middle = graph.node("Div", graph.node("Add", start, end, at=HEAD), graph.constant(2.0, at=HEAD), at=HEAD)
    boxes = graph.node("Concat", middle, graph.node("Sub", end, start, at=HEAD), at=HEAD, axis=1)
    pixels = np.concatenate([np.full((1, (size // s) ** 2), float(s)) for s in STRIDES], axis=1)
    return graph.node("Mul", boxes, graph.constant(pixels, at=HEAD), at=HEAD)


def _features(graph: Graph, size: int) -> list[tuple[str, int]]:
    """Write backbone and neck; return the inputs of the heads at strides 8, 16 and 32, and their channels."""
    x = graph.input("images", TensorProto.FLOAT, ["N", 3, size, size])
    x = _conv(graph, x, "/model.0", (16, 3, 3, 3), stride=2)
    kept, channels = [], 16
    for stage, blocks in enumerate((1, 2, 2, 1)):
        x = _conv(graph, x, f"/model.{2 * stage + 1}", (2 * channels, channels, 3, 3), stride=2)
        channels *= 2
        x = _c2f(graph, x, f"/model.{2 * stage + 2}", (channels, channels), blocks, skip=True)
        kept.append(x)
    _, fine, middle, _ = kept
    coarse = _pool_pyramid(graph, x, "/model.9", 256)
    x = _enlarge(graph, coarse, middle, 10)
    wide = _c2f(graph, x, "/model.12", (256 + 128, 128), 1, skip=False)
    x = _enlarge(graph, wide, fine, 13)
    found = [_c2f(graph, x, "/model.15", (128 + 64, 64), 1, skip=False)]
    for layer, (skip, inputs, width) in zip((16, 19), ((wide, 64, 128), (coarse, 128, 256)), strict=True):
        x = _conv(graph, found[-1], f"/model.{layer}", (inputs, inputs, 3, 3), stride=2)
        x = graph.node("Concat", x, skip, at=f"/model.{layer + 1}", axis=1)
        found.append(_c2f(graph, x, f"/model.{layer + 2}", (inputs + width, width), 1, skip=False))
    return list(zip(found, (64, 128, 256), strict=True))


def _conv(
    graph: Graph, x: str, at: str, shape: tuple[int, int, int, int], *, stride: int = 1, gain: float = 1.0
) -> str:
    """Append convolution, batch normalization and SiLU."""
    x = conv(graph, x, f"{at}/conv", shape, stride=stride)
    return silu(graph, batch_norm(graph, x, f"{at}/bn", shape[0], eps=1e-3, gain=gain), f"{at}/act")


def _c2f(graph: Graph, x: str, at: str, channels: tuple[int, int], blocks: int, *, skip: bool) -> str:
    """Append a Split into two halves, residual blocks on one half, and a Concat of all results."""
    inputs, outputs = channels
    half = outputs // 2
    x = _conv(graph, x, f"{at}/cv1", (outputs, inputs, 1, 1))
    sizes = graph.constant([half, half], at=at)
    parts = graph.node_with_outputs("Split", x, sizes, at=at, outputs=2, axis=1)
    for block in range(blocks):
        step = f"{at}/m.{block}"
        y = _conv(graph, parts[-1], f"{step}/cv1", (half, half, 3, 3))
        y = _conv(graph, y, f"{step}/cv2", (half, half, 3, 3))
        parts.append(graph.node("Add", parts[-1], y, at=step) if skip else y)
    x = graph.node("Concat", *parts, at=at, axis=1)
    return _conv(graph, x, f"{at}/cv2", (outputs, len(parts) * half, 1, 1))


def _pool_pyramid(graph: Graph, x: str, at: str, channels: int) -> str:
    """Append SPPF: a Concat of the input and its maxima over 5x5, 9x9 and 13x13 positions."""
    parts = [_conv(graph, x, f"{at}/cv1", (channels // 2, channels, 1, 1))]
    for _ in range(3):
        pooled = graph.node("MaxPool", parts[-1], at=f"{at}/m", kernel_shape=[5, 5], pads=[2] * 4, strides=[1, 1])
        parts.append(pooled)
    x = graph.node("Concat", *parts, at=at, axis=1)
    return _conv(graph, x, f"{at}/cv2", (channels, 2 * channels, 1, 1))


def _enlarge(graph: Graph, x: str, other: str, layer: int) -> str:
    """Append a Resize by 2 and a Concat with a tensor of that size: layers `layer` and `layer + 1`."""
    at = f"/model.{layer}"
    scales = graph.constant([1.0, 1.0, 2.0, 2.0], at=at)
    options = {"coordinate_transformation_mode": "asymmetric", "mode": "nearest", "nearest_mode": "floor"}
    x = graph.node("Resize", x, "", scales, at=at, **options)
    return graph.node("Concat", x, other, at=f"/model.{layer + 1}", axis=1)
