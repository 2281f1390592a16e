"""`requant quantize` on onnx's backend test suite: the result is valid and accurate, or a refusal with a reason."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from requant.quantize import Options, quantize_model

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
cases = importlib.import_module("benchmarks.backend_cases")
judge = importlib.import_module("benchmarks.backend_judge")
suite = importlib.import_module("benchmarks.backend_suite")
sys.path.remove(str(ROOT))


def outcomes(*arguments: str) -> list[dict[str, Any]]:
    """Run the program; print its table, and return every outcome."""
    command = [sys.executable, "-m", "benchmarks.backend_suite", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = [judge.Outcome(**row) for row in json.loads(done.stdout)["outcomes"]]
    suite.print_counts(found)
    return [vars(row) for row in found]


def failures(found: list[dict[str, Any]]) -> list[str]:
    return [f"{o['name']}, {o['form']}: {o['detail']}: {o['message']}" for o in found if o["result"] == "failed"]


def number(found: list[dict[str, Any]], result: str, *details: str) -> int:
    return sum(o["result"] == result and (not details or o["detail"] in details) for o in found)


@pytest.mark.slow
def test_every_model_of_the_suite_comes_out_right_or_is_refused_with_a_reason() -> None:
    found = outcomes()
    assert failures(found) == []
    assert len({o["name"] for o in found}) > 2000
    assert len({o["operator"] for o in found}) >= 75
    assert number(found, "float", "equal") >= 150
    assert number(found, "refused") < len(found) / 3
    assert {o["detail"] for o in found if o["result"] == "refused"} <= set(judge.REASONS)
    assert number(found, "int8", judge.BOUNDED) >= 500
    assert number(found, "int8", judge.DECIBELS) < number(found, "int8", judge.BOUNDED) / 2


TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N,8] x) => (float[N,6] y) {
    a = MatMul(x, w)
    y = Add(a, b)
}"""


@pytest.fixture
def task() -> Any:
    """Return a task: a product and a sum with random weights."""
    random = np.random.default_rng(0)
    model = onnx.parser.parse_model(TEXT)
    for name, shape in (("w", (8, 6)), ("b", (6,))):
        values = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    feeds = tuple({"x": random.standard_normal((5, 8)).astype(np.float32)} for _ in range(3))
    return cases.Task("net", "own", "*net", cases.UNCHANGED, model.SerializeToString(), feeds)


def two_steps_off(model: onnx.ModelProto) -> None:
    """Change the weights of one channel by two steps."""
    (tensor,) = (t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 2)
    array = numpy_helper.to_array(tensor).copy()
    array[:, 0] -= np.sign(array[:, 0]) * 2
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def other_scale(model: onnx.ModelProto) -> None:
    """Increase the scale of the weights by 10 %."""
    (tensor,) = (t for t in model.graph.initializer if t.name == "w/scale")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.1), tensor.name))


def nothing(model: onnx.ModelProto) -> None:
    """Do not change the model."""


@pytest.mark.parametrize(
    ("change", "result"),
    [(nothing, "int8"), (two_steps_off, "failed"), (other_scale, "failed")],
    ids=["as emitted", "weights two steps off", "another scale"],
)
def test_bound_shows_what_is_wrong_in_a_model(
    task: Any, change: Callable[[onnx.ModelProto], None], result: str, tmp_path: Path
) -> None:
    source, output = tmp_path / "net.onnx", tmp_path / "int8.onnx"
    source.write_bytes(task.model)
    assert quantize_model(source, task.feeds, output, Options(force_int8=True, seconds=0.01)).forms
    model = onnx.load(output)
    change(model)
    onnx.save(model, output)
    verdict = judge.compare(task, output, judge.run_float(task), int8=True)
    assert (verdict.result, verdict.message != "") == (result, result == "failed")


@pytest.mark.parametrize(
    ("message", "ran", "reason"),
    [
        ("net.onnx: an operator has no CPU kernel: Cast(25)", False, judge.CANNOT_RUN),
        ("net.onnx: an operator has no CPU kernel: Cast(25)", True, ""),
        ("net.onnx: something else", False, ""),
        ("net.onnx: an operator has no CPU kernel:\nCast(25)", False, ""),
    ],
    ids=["true", "untrue", "unknown", "two lines"],
)
def test_only_a_true_reason_in_one_line_is_a_reason(message: str, ran: bool, reason: str) -> None:
    assert judge.reason_of(message, [] if ran else "no kernel") == reason


class Abort:
    """An object that ends the process that receives it, like an abort of the runtime."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (7,)


@pytest.mark.slow
def test_a_process_that_dies_costs_its_own_task_only(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)  # the worker processes inherit this path
    deadly = replace(task, name="deadly", feeds=(Abort(),))
    found = suite.outcomes([deadly, task], jobs=1)
    assert [(o.name, o.result) for o in found] == [("deadly", "failed"), ("net", "int8")]
    assert found[0].message == "exit code 7"


def test_sample_has_each_operator_before_any_twice(task: Any) -> None:
    everything = [replace(task, name=f"{op}{i}", operator=op) for op in ("Add", "Conv") for i in range(3)]
    assert {case.operator for case in cases.stratified(everything, 2)} == {"Add", "Conv"}
    assert len(cases.stratified(everything, 5)) == 5
