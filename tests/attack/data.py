"""Broken and hostile data, and the commands that read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import onnx
from onnx import helper

from .bases import BASES, FLOAT, INT64, build, weights
from .case import Command, Family, Writer
from .data_arrays import ARRAYS, Args
from .data_media import MEDIA

_value = helper.make_tensor_value_info

COMMANDS: tuple[Command, ...] = (
    ("calibrate", "m.onnx", "-o", "r.json"),
    ("calibrate", "m.onnx", "-o", "r.json", "--samples", "2", "--workers", "2"),
    ("calibrate", "m.onnx", "-o", "r.json", "--log", "min_max.log"),
    ("calibrate", "m.onnx", "-o", "r.json", "--batch", "3"),
    ("calibrate", "m.onnx", "-o", "r.json", "--memory-limit", "100MB"),
    ("quantize", "m.onnx", "-o", "q.onnx", "--effort", "low", "--place", "estimated"),
    ("quantize", "m.onnx", "-o", "q.onnx", "--effort", "low", "--place", "estimated", "--samples", "2", "--json"),
    ("compare", "m.onnx", "m.onnx"),
    ("compare", "m.onnx", "m.onnx", "--metric", "top1", "--json"),
    ("inspect", "m.onnx"),
    ("explain", "m.onnx"),
    ("bench", "m.onnx"),
    ("compile", "m.onnx", "-o", "c.onnx"),
    ("sensitivity", "m.onnx"),
    ("check", "--float", "m.onnx", "--model", "m.onnx", "--update", "--seconds", "0"),
)
"""``--data`` and its options are appended."""


def tokens() -> onnx.ModelProto:
    """Return an embedding and a linear layer of ids (1, L)."""
    nodes = [helper.make_node("Gather", ["table", "ids"], ["e"]), helper.make_node("MatMul", ["e", "w"], ["y"])]
    ends = [_value("ids", INT64, [1, "L"])], [_value("y", FLOAT, [1, "L", 4])]
    return build(nodes, *ends, [weights("table", 16, 8), weights("w", 8, 4)])


def sound() -> onnx.ModelProto:
    """Return a convolution over clip (1, 1, T)."""
    nodes = [helper.make_node("Conv", ["clip", "k"], ["y"], kernel_shape=[5])]
    return build(
        nodes, [_value("clip", FLOAT, [1, 1, "T"])], [_value("y", FLOAT, [1, 4, "S"])], [weights("k", 4, 1, 5)]
    )


MODELS = {**BASES, "tokens": tokens, "sound": sound}


def read_by(model: str, damage: Callable[[Random, Path], Args]) -> Writer:
    """Return the writer of a valid model and damaged data."""

    def write(random: Random, folder: Path) -> list[Command]:
        (folder / "m.onnx").write_bytes(MODELS[model]().SerializeToString())
        arguments = damage(random, folder)
        return [(*command, *arguments) for command in random.sample(COMMANDS, random.choice((1, 1, 2)))]

    return write


DATA = Family(
    {
        **{name: read_by("mlp", damage) for name, damage in ARRAYS.items()},
        **{name: read_by(model, damage) for name, (model, damage) in MEDIA.items()},
    },
    hungry=frozenset({"reader-lengths"}),
)
