"""Broken and hostile models, and the commands that read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import onnx

from . import model_bytes, model_fields, model_graphs
from .bases import BASES, feeds
from .case import LOOKING, Command, Family, Writer

Mutation = Callable[[Random, onnx.ModelProto, Path], bytes | None]

QUANTIZE = ("quantize", "m.onnx", "-o", "q.onnx", "--effort", "low", "--place", "estimated")
COMMANDS: tuple[Command, ...] = (
    ("inspect", "m.onnx"),
    ("inspect", "m.onnx", "--nodes", "--dim", "N=1"),
    ("inspect", "m.onnx", "--print-structure"),
    ("inspect", "m.onnx", "--dot"),
    ("inspect", "m.onnx", "--json"),
    ("view", "m.onnx", "-o", "page.html"),
    ("explain", "m.onnx", "--data", "d.npz"),
    ("explain", "m.onnx"),
    ("calibrate", "m.onnx", "--data", "d.npz", "-o", "r.json"),
    ("calibrate", "m.onnx", "--data", "d.npz", "--log", "min_max.log"),
    ("transform", "m.onnx", "t.onnx", "--group", "simplify"),
    ("transform", "m.onnx", "t.onnx", "--transforms", "inline_functions fold_constants"),
    ("transform", "m.onnx", "t.onnx", "--transforms", "insert_logging", "--json"),
    ("transform", "m.onnx", "t.onnx", "--group", "simplify", "--external-data"),
    (*QUANTIZE, "--data", "d.npz"),
    (*QUANTIZE, "--data", "d.npz", "--force-int8", "--report", "run.html", "--report", "run.json"),
    (*QUANTIZE, "--dynamic", "--force-int8"),
    (*QUANTIZE, "--data", "d.npz", "--portable"),
    (*QUANTIZE, "--data", "d.npz", "--json", "--external-data"),
    ("diff", "base.onnx", "m.onnx"),
    ("diff", "m.onnx", "base.onnx", "--ignore-names", "--all"),
    ("compare", "base.onnx", "m.onnx", "--data", "d.npz"),
    ("bench", "m.onnx", "--data", "d.npz"),
    ("compile", "m.onnx", "-o", "c.onnx"),
    ("sensitivity", "m.onnx", "--data", "d.npz", "-o", "s.json"),
    ("check", "--float", "base.onnx", "--model", "m.onnx", "--data", "d.npz", "--update", "--seconds", "0"),
    ("init", "m.onnx"),
    ("costs", "measure", "m.onnx", "--data", "d.npz", "-o", "costs.json"),
)
"""`m.onnx` is the attacked model, `base.onnx` a valid one, `d.npz` data for both."""
READING = tuple(command for command in COMMANDS if command[0] in LOOKING)
"""The commands that do not run the model."""


def _commands(random: Random, commands: tuple[Command, ...] = COMMANDS) -> list[Command]:
    return random.sample(commands, random.choice((1, 1, 2)))


def _write(folder: Path, base: str, valid: onnx.ModelProto, data: bytes) -> None:
    (folder / "m.onnx").write_bytes(data)
    (folder / "base.onnx").write_bytes(valid.SerializeToString())
    np.savez(folder / "d.npz", **feeds(base))


def mutated(mutate: Mutation) -> Writer:
    """Return the writer of a damage to one of `BASES`."""

    def write(random: Random, folder: Path) -> list[Command]:
        base = random.choice([*[name for name in BASES if name != "digits"] * 3, "digits"])
        valid = BASES[base]()
        model = onnx.ModelProto()
        model.CopyFrom(valid)
        data = mutate(random, model, folder)
        _write(folder, base, valid, model.SerializeToString() if data is None else data)
        return _commands(random)

    return write


def built(graph: Callable[[Random], onnx.ModelProto], commands: tuple[Command, ...] = COMMANDS) -> Writer:
    """Return the writer of a model that is hostile as a whole."""

    def write(random: Random, folder: Path) -> list[Command]:
        _write(folder, "mlp", BASES["mlp"](), graph(random).SerializeToString())
        return _commands(random, commands)

    return write


def twice(random: Random, model: onnx.ModelProto, folder: Path) -> bytes | None:
    """Damage two fields."""
    for mutate in random.sample(list(model_fields.MUTATIONS.values()), 2):
        try:
            mutate(random, model, folder)
        except (LookupError, ValueError, TypeError):  # the first damage removed what the second one needs
            return None
    return None


MODELS = Family(
    {
        **{name: mutated(mutate) for name, mutate in model_bytes.MUTATIONS.items()},
        **{name: mutated(mutate) for name, mutate in model_fields.MUTATIONS.items()},
        "two-fields": mutated(twice),
        **{name: built(graph) for name, graph in model_graphs.GRAPHS.items()},
        "most-nodes": built(model_graphs.most_nodes, READING),  # to run it takes minutes, as the model asks
    },
    hungry=frozenset({"doubling", "live-doubling", "growing-loop", "huge-constant", "many-nodes"}),
)
