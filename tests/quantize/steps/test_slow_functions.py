"""What stays float is written in operators that the runtime computes fast, and found by its functions before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from requant.quantize import Options, Result, Selection, quantize_model
from requant.quantize.runtime.attribution import Owners
from requant.transforms.int8.units import units
from requant.transforms.spell_slow_functions import spell_slow_functions

from ...native import needs_library

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N, 3, 16, 16] x) => (float[N, 8, 14, 14] y) {
    [first] a = Conv <pads = [1, 1, 1, 1]> (x, w1)
    [soft] b = Softplus (a)
    [gate] c = Tanh (b)
    [mish] d = Mul (a, c)
    [second] e = Conv <pads = [1, 1, 1, 1]> (d, w2)
    [bent] f = PRelu (e, slopes)
    [last] y = Conv (f, w3)
}"""
SHAPES = {"w1": (8, 3, 3, 3), "w2": (8, 8, 3, 3), "w3": (8, 8, 3, 3), "slopes": (8, 1, 1)}
SLOW = {"Softplus", "Tanh", "PRelu"}


def quantized(folder: Path, options: Options) -> tuple[Result, onnx.ModelProto, dict[str, Any]]:
    """Quantize the model; return the result, the model and the units of its plan by name."""
    rng = np.random.default_rng(0)
    weights = {name: rng.uniform(-0.5, 0.5, shape).astype(np.float32) for name, shape in SHAPES.items()}
    made = ir.from_onnx_text(TEXT, initializers=[ir.tensor(array, name=name) for name, array in weights.items()])
    ir.save(made, folder / "m.onnx")
    feeds = [{"x": rng.uniform(-1, 1, (2, 3, 16, 16)).astype(np.float32)} for _ in range(8)]
    asked = replace(options, seconds=0.01, effort="low", force=True)
    result = quantize_model(folder / "m.onnx", feeds, folder / "q.onnx", asked)
    plan = json.loads((folder / "q.plan.json").read_text(encoding="utf-8"))
    return result, onnx.load(folder / "q.onnx"), plan["units"]


def operators(model: onnx.ModelProto) -> set[str]:
    """Return the operators of a model and of its functions."""
    return {node.op_type for graph in (model.graph, *model.functions) for node in graph.node}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(Options(kernels="stock", place="all", force_int8=True), id="float units beside integers"),
        pytest.param(Options(kernels="native", place="all", force_int8=True), marks=needs_library, id="bodies"),
        pytest.param(Options(selection=Selection(exclude_ops=frozenset({"Conv"})), kernels="stock"), id="float"),
    ],
)
def test_what_stays_float_is_spelled_and_the_plan_has_the_functions(options: Options, tmp_path: Path) -> None:
    _, model, planned = quantized(tmp_path, options)
    assert not operators(model) & SLOW
    assert "Exp" in operators(model)
    assert planned.keys() == {"first", "mish", "second", "bent", "last"}


def test_the_time_of_spelled_operators_is_that_of_the_function() -> None:
    made = ir.from_onnx_text(TEXT)
    owners = Owners(made, units(made.graph))
    spell_slow_functions(made)
    found = {owners.of(str(node.name)) for node in made.graph if node.op_type in ("Exp", "Min", "Div")}
    assert found == {"mish", "bent"}


def test_a_portable_model_keeps_the_operators(tmp_path: Path) -> None:
    """Other runtimes may have fast kernels for them."""
    _, model, _ = quantized(tmp_path, Options(portable=True))
    assert operators(model) >= SLOW
