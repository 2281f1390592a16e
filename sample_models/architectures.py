"""Write well-known networks as ONNX models with random weights, for benchmarks and tests.

    python sample_models/architectures.py resnet50 -o resnet50.onnx
    requant quantize resnet50.onnx -o resnet50_int8.onnx --data sample_models/architectures.py:resnet50_feeds

Shapes and parameter counts are the published ones. Weights are drawn from a seed. They are scaled so that activations
keep their magnitude from layer to layer. Each batch normalization has the statistics of its input. `--list` prints all
networks. `NAME_feeds` are eight random inputs of a network, `NAME_96_feeds` are eight inputs of size 96.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import control_flow
import detector
import language
import numpy as np
import onnx
import sample_feeds
import vision
from graph_builder import Graph, empty_model, normalise
from sample_feeds import Feed

from requant import RequantError, UnknownNameError

OPSETS = range(13, 27)
FEEDS = 8
MEASURED = range(4, 17)  # the number of images for the statistics of batch normalizations; small images need more


@dataclass(frozen=True, slots=True)
class Architecture:
    """A network.

    Attributes:
        write: Appends the nodes to a graph, for images of the given side.
        draw: Draws a feed of the given batch and size.
        parameters: The number of trainable parameters.
        source: Who published that number, or the sum that gives it.
        size: The default side of the images, or length of the sequences.
        step: Another size must be a multiple of this; 0 if there is only one size.
        free: Whether the size is a dynamic axis of the model. Then only feeds have a size.
    """

    write: Callable[[Graph, int], None]
    draw: Callable[[np.random.Generator, int, int], Feed]
    parameters: int
    source: str
    size: int = 224
    step: int = 32
    free: bool = False


ARCHITECTURES = {
    "resnet50": Architecture(vision.resnet50, sample_feeds.normalised, 25_557_032, "torchvision, ResNet50_Weights"),
    "mobilenet_v2": Architecture(
        vision.mobilenet_v2, sample_feeds.normalised, 3_504_872, "torchvision, MobileNet_V2_Weights"
    ),
    "mobilenet_v3_large": Architecture(
        vision.mobilenet_v3_large, sample_feeds.normalised, 5_483_032, "torchvision, MobileNet_V3_Large_Weights"
    ),
    "efficientnet_b0": Architecture(
        vision.efficientnet_b0, sample_feeds.normalised, 5_288_548, "torchvision, EfficientNet_B0_Weights"
    ),
    "squeezenet1_1": Architecture(
        vision.squeezenet1_1, sample_feeds.normalised, 1_235_496, "torchvision, SqueezeNet1_1_Weights"
    ),
    "vit_b_16": Architecture(
        vision.vit_b_16, sample_feeds.normalised, 86_567_656, "torchvision, ViT_B_16_Weights", step=0
    ),
    "cct_7": Architecture(
        vision.cct_7,
        sample_feeds.normalised,
        3_760_139,
        "Compact Transformers, CCT-7/3x1 of CIFAR-10, 3.76 million",
        size=32,
        step=0,
    ),
    "bert_base": Architecture(
        language.bert_base,
        sample_feeds.sentences,
        109_482_240,
        "Hugging Face transformers, BertModel of bert-base-uncased",
        size=128,
        step=1,
        free=True,
    ),
    "yolo": Architecture(
        detector.yolo, sample_feeds.detector, 3_157_200, "Ultralytics, yolov8n before its layers are fused", size=640
    ),
    "yolo_nms": Architecture(
        detector.yolo_nms, sample_feeds.detector, 3_157_200, "as yolo; NonMaxSuppression has none", size=640
    ),
    "llama": Architecture(
        language.llama,
        sample_feeds.continued,
        15_191_712,
        "llama2.c, stories15M: 32000 x 288 + 6 x (4 x 288^2 + 3 x 288 x 768 + 2 x 288) + 288",
        size=16,
        step=1,
        free=True,
    ),
    "lstm_tagger": Architecture(
        language.lstm_tagger,
        sample_feeds.words,
        2_486_809,
        "20000 x 100 + 2 x 4 x (200 x (100 + 200) + 2 x 200) + 400 x 9 + 9",
        size=40,
        step=1,
        free=True,
    ),
    "unet": Architecture(
        vision.unet,
        sample_feeds.pixels,
        31_037_698,
        "milesial PyTorch-UNet, 2 classes, ConvTranspose",
        size=256,
        step=16,
    ),
    "if_branches": Architecture(
        control_flow.if_branches,
        sample_feeds.normalised,
        12_394,
        "3 x 32 x 9 + 2 x 32 + (32^2 x 9 + 32) + (32 x 25 + 32) + (32^2 + 32) + 32 x 10 + 10",
        size=32,
        step=8,
    ),
    "loop_rnn": Architecture(
        control_flow.loop_rnn,
        sample_feeds.series,
        53_536,
        "2 x (192 x 128 + 128) + 128 x 32 + 32",
        size=20,
        step=1,
        free=True,
    ),
}

NAMES = tuple(ARCHITECTURES)


def build(name: str, *, seed: int = 0, opset: int = 17, size: int | None = None) -> onnx.ModelProto:
    """Return a network as a model.

    The same seed gives the same weights. The statistics of batch normalizations are measured, so the bytes are equal
    only with the same runtime on the same kind of CPU.

    Args:
        name: One of `NAMES`.
        seed: The seed of the weights, 0 or more.
        opset: The version of the default operators.
        size: The side of the images; None for the default size.

    Raises:
        RequantError: There is no such network, opset or size.
    """
    row = _row(name)
    if opset not in OPSETS:
        raise RequantError(f"opset {opset}: the networks are written for opsets {OPSETS[0]} to {OPSETS[-1]}")
    if size is not None and row.free:
        raise RequantError(f"{name}: takes sequences of any length; a size is for its feeds alone")
    size = _size(name, size)
    model = empty_model(name, opset)
    graph = Graph(seed, opset, model.graph)
    row.write(graph, size)
    images = min(max(MEASURED[0], MEASURED[0] * row.size**2 // size**2), MEASURED[-1])
    normalise(graph, lambda: row.draw(graph.stream("statistics"), images, size))
    return model


def feeds(name: str, *, batch: int = 1, seed: int = 0, count: int = FEEDS, size: int | None = None) -> list[Feed]:
    """Return random feeds of a network. Each feed has all inputs of the model.

    Args:
        name: One of `NAMES`.
        batch: The length of the first axis.
        seed: The seed of the feeds, 0 or more.
        count: The number of feeds.
        size: The side of the images or length of the sequences; None for the default size.

    Raises:
        RequantError: There is no such network or size.
    """
    row, size = _row(name), _size(name, size)
    return [row.draw(np.random.default_rng([seed, index]), batch, size) for index in range(count)]


def parameters(model: onnx.ModelProto) -> int:
    """Return the number of trainable parameters: all initializers except the statistics of batch normalizations."""
    graphs = list(_graphs(model.graph))
    nodes = [node for graph in graphs for node in graph.node]
    statistics = {name for node in nodes if node.op_type == "BatchNormalization" for name in node.input[3:]}
    tensors = [tensor for graph in graphs for tensor in graph.initializer if tensor.name not in statistics]
    return sum(math.prod(tensor.dims) for tensor in tensors)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and its bodies."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _row(name: str) -> Architecture:
    """Return the row of a network."""
    if name not in ARCHITECTURES:
        raise UnknownNameError("network", name, NAMES)
    return ARCHITECTURES[name]


def _size(name: str, size: int | None) -> int:
    """Check a size and return it; None gives the default size of the network."""
    row = _row(name)
    if size is None or size == row.size:
        return row.size
    if row.step == 0:
        raise RequantError(f"{name}: size {size}: the network takes images of {row.size} x {row.size} alone")
    if size < 1 or size % row.step:
        raise RequantError(f"{name}: size {size}: must be a multiple of {row.step}")
    return size


def _listing() -> str:
    """Return a table of the networks: name, parameters, inputs, source."""
    lines = []
    for name, row in ARCHITECTURES.items():
        inputs: dict[str, list[str]] = {}
        for key, value in feeds(name, count=1)[0].items():
            inputs.setdefault(f"{value.dtype} {value.shape}", []).append(key)
        kinds = [f"{keys[0] if len(keys) == 1 else f'{keys[0]} .. {keys[-1]}'} {kind}" for kind, keys in inputs.items()]
        lines.append(f"{name:20}{row.parameters:>12,}  {row.source}\n{'':34}{', '.join(kinds)}")
    return "\n".join(lines)


def __getattr__(attribute: str) -> Callable[[], list[Feed]]:
    """Return the function for an attribute `NAME_SIZE_feeds`. Python calls this for attributes that do not exist."""
    for name in NAMES:
        if match := re.fullmatch(rf"{name}_(\d+)_feeds", attribute):
            return partial(feeds, name, size=int(match[1]))
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")


globals().update({f"{name}_feeds": partial(feeds, name) for name in NAMES})


class Refusal(click.ClickException):
    """An error that prints one line on stderr and gives exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the message."""
        click.echo(f"architectures.py: {self.format_message()}", err=True, file=file)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The path of the new model.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The seed of the weights.")
@click.option("--opset", type=int, default=17, show_default=True, help=f"{OPSETS[0]} to {OPSETS[-1]}.")
@click.option("--size", type=int, help="Side of the images. [default: depends on the network]")
@click.option("--list", "listing", is_flag=True, help="Print the networks, their parameters, sources and inputs.")
@click.option("--force", is_flag=True, help="Overwrite an existing output.")
def main(
    name: str | None, output: Path | None, seed: int, opset: int, size: int | None, listing: bool, force: bool
) -> None:
    """Write the network NAME with random weights as an ONNX model."""
    try:
        if listing:
            click.echo(_listing())
            return
        if name is None or output is None:
            raise RequantError("give a network and -o FILE; --list prints the networks")
        _row(name)
        if output.exists() and not force:
            raise RequantError(f"{output}: exists already; --force overwrites it")
        if not output.parent.is_dir():
            raise RequantError(f"{output.parent}: no such folder")
        _write(build(name, seed=seed, opset=opset, size=size), output)
    except RequantError as error:
        raise Refusal(str(error)) from error


def _write(model: onnx.ModelProto, output: Path) -> None:
    """Save a model to a temporary file, then move the file to `output`."""
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        part = Path(folder) / output.name
        onnx.save(model, part)
        os.replace(part, output)


if __name__ == "__main__":
    main()
