"""The table of all models of kits: what it reads from kits, and what it concludes."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from requant.quantize.placement.facts import facts_of
from requant.quantize.placement.forms import possible_forms
from requant.quantize.placement.obstacles import OBSTACLES
from requant.quantize.placement.rules import choose_by
from requant.transforms import parse_groups, run
from requant.transforms.int8.plan import Impl
from requant.transforms.pipelines.groups import GROUPS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
contenders = importlib.import_module("benchmarks.contenders")
models = importlib.import_module("benchmarks.models")
parts = importlib.import_module("benchmarks.parts")
sys.path.remove(str(ROOT))

TABLE = """kwt1: 600 items
                            FP32      INT8    change
  top1                    0.9183    0.9167   -0.0017 *
  top5                    0.9533    0.9550   +0.0017
  agreement of predictions 99.17 %
  broken by INT8 3, fixed by INT8 2, of 600
"""


def row(**given: Any) -> Any:
    facts = {"kit": "kit", "task": "t", "contender": "default", "metric": "top1", "before": 0.9, "after": 0.9}
    return models.Row(**{**facts, "float_ms": 4.0, "simple_ms": 3.0, "ms": 2.0, **given})


def test_a_table_of_a_kit_is_read() -> None:
    assert models.judged(TABLE) == {
        "metric": "top1",
        "before": 0.9183,
        "after": 0.9167,
        "agreement": pytest.approx(0.9917),
        "broken": 3,
        "fixed": 2,
        "items": 600,
    }


@pytest.mark.parametrize(
    ("printed", "metric", "before", "after"),
    [
        ("mAP75 against float's boxes 1.0000 -> 0.9512, 63.1 -> 30.4 ms: 2.08x\n", "mAP75 against float's boxes", 1.0, 0.9512),
        ("SI-SDR gain, dB: -5.5 -> 5e-3\n", "SI-SDR gain, dB", -5.5, 0.005),
        ("perplexity 4.11 -> inf", "perplexity", 4.11, float("inf")),
    ],
)  # fmt: skip
def test_a_line_of_a_kit_is_read(printed: str, metric: str, before: float, after: float) -> None:
    found = models.judged(f"a remark\n{printed}")
    assert (found["metric"], found["before"], found["after"]) == (metric, before, after)
    assert "broken" not in found


def test_a_kit_that_prints_no_metric_is_an_error() -> None:
    with pytest.raises(contenders.ContenderError, match="the kit printed no metric: 'usage: kit'"):
        models.judged("usage: kit\n")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, []),
        ({"after": 0.897}, []),
        ({"after": 0.8969}, ["drop above 0.003"]),
        ({"after": 0.95}, []),
        ({"metric": "perplexity", "lower": True, "before": 4.0, "after": 4.04}, []),
        ({"metric": "perplexity", "lower": True, "before": 4.0, "after": 4.05}, ["drop above 0.04"]),
        ({"metric": "gain, dB", "before": -5.0, "after": -5.1}, ["drop above 0.05"]),
        ({"ms": 3.5}, ["slower than simplified float"]),
        ({"ms": 4.5}, ["slower than float", "slower than simplified float"]),
        ({"ms": 3.01}, []),
        ({"ms": 3.5, "simple_ms": None}, []),
        ({"after": None}, ["no result"]),
    ],
)
def test_what_is_missed(given: dict[str, Any], words: list[str]) -> None:
    assert models.missed(row(**given)) == words


def test_times_are_those_of_the_same_process() -> None:
    found = {"float": {"ms": 6.0}, "simplified": {"ms": 5.0}, "default": {"ms": 2.0}, "other": {"error": "no kernel"}}
    timed = models.with_times(row(), found)
    assert (timed.over_float, timed.over_simple, timed.error) == (3.0, 2.5, "")
    failed = models.with_times(row(contender="other"), found)
    assert (failed.ms, failed.over_float, failed.error) == (None, None, "no kernel")
    assert models.with_times(row(error="first"), found).error == "first"


def test_the_script_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match="0 scripts; name one"):
        models.script_of(tmp_path)
    (tmp_path / "kit.py").touch()
    assert models.script_of(tmp_path) == models.script_of(tmp_path / "kit.py") == tmp_path / "kit.py"
    (tmp_path / "other.py").touch()
    with pytest.raises(click.BadParameter, match="2 scripts; name one"):
        models.script_of(tmp_path)


KIT = """
import sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
TASKS = {"echo": SimpleNamespace(model=Path(__file__).parent / "echo.onnx"), "other": SimpleNamespace(model="none.onnx")}
def echo_calib():
    for size in (1, 2, 3, 4):
        yield {"x": np.ones((size, 4), np.float32)}
if __name__ == "__main__":
    print(f"share {0.5:.4f} -> {len(sys.argv) / 10:.4f}, broken by INT8 1, fixed by INT8 0, of 2")
"""


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    folder = tmp_path / "kit"
    folder.mkdir()
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 4] y) { t = Identity(x) y = Relu(t) }'
    )
    onnx.save(onnx.parser.parse_model(text), folder / "echo.onnx")
    (folder / "tinykit.py").write_text(KIT)
    return folder


def copied(job: Any, output: Path) -> str:
    output.write_bytes(job.model.read_bytes())
    return "float is as fast"


def test_one_failing_row_does_not_end_the_table(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: Any, output: Path) -> str:
        raise contenders.ContenderError("no such operator")

    def here(function: str, **given: Any) -> Any:
        try:
            return contenders.FUNCTIONS[function](**given)
        except Exception as error:  # as from another process
            raise contenders.ContenderError(str(error)) from error

    monkeypatch.setattr(models, "call", here)  # one process is faster than five
    monkeypatch.setattr(
        models, "requant", lambda *arguments: Path(arguments[2]).write_bytes(Path(arguments[1]).read_bytes())
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("KIT_LIBRARY", "")
    monkeypatch.setattr(models, "CONTENDERS", {"copied": copied, "failing": failing, "absent": lambda job, output: ""})
    arguments = [str(kit), "--only", "echo", "--contenders", "copied,failing,absent", "--seconds", "0.2"]
    done = CliRunner().invoke(models.main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    copy, failed, absent = [json.loads(text) for text in done.stdout.splitlines()]
    assert (copy["metric"], copy["before"], copy["after"], copy["broken"]) == ("share", 0.5, 0.5, 1)
    assert copy["over_float"] > 0
    assert copy["over_simple"] > 0
    assert copy["verdict"] == "float is as fast"
    assert (failed["error"], failed["missed"]) == ("no such operator", ["no result"])
    assert "No such file" in absent["error"]


def test_an_ablation_leaves_out_what_changes_the_model(kit: Path, tmp_path: Path) -> None:
    (job,) = models.jobs([kit], "echo", tmp_path, "", 0.2)
    job.folder.mkdir(parents=True)
    assert models.parts_of(job) == ["remove_no_ops"]
    plan = job.output("default").with_suffix(".plan.json")
    pairs = {"a": ("MatMul", "block"), "b": ("Conv", "u8->u8 gemm"), "c": ("Relu", "float")}
    units = {name: {"operator": op, "implementation": form} for name, (op, form) in pairs.items()}
    plan.write_text(json.dumps({"units": units}))
    assert models.parts_of(job) == ["remove_no_ops", "block", "gemm"]
    assert parts.forms_of([("GRU", "dynamic"), ("GRU", "float")]) == ["recurrent"]
    assert parts.forms_of([("attention", "dynamic native"), ("Gemm", "dynamic")]) == ["dynamic", "native-attention"]
    assert parts.forms_of([("GRU", "float")]) == []


def test_an_ablation_has_a_row_for_each_part(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "requant", lambda *arguments: None)
    monkeypatch.setattr(models, "timed", lambda job, rows: rows)
    monkeypatch.setattr(models, "CONTENDERS", {"default": copied, "without-block": copied, "dynamic": copied})
    monkeypatch.setattr(models, "parts_of", lambda job: ["block"])
    (job,) = models.jobs([kit], "echo", tmp_path, "", 0.2)
    rows = models.measured(job, ["default", "ablation", "dynamic"], lambda text: None)
    assert [row.contender for row in rows] == ["default", "without-block", "dynamic"]
    assert not any(row.error for row in rows)


def test_a_part_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[1,4] x) => (float[1,4] y) { t = Identity(x) u = MatMul(t, w) y = Relu(u) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4), np.float32), "w"))
    model = ir.from_proto(proto)
    monkeypatch.setitem(GROUPS, "simplify", list(GROUPS["simplify"]))
    assert "Identity" not in {node.op_type for node in run(parse_groups("simplify"), model).model.graph}
    parts.PARTS["remove_no_ops"]()
    assert "Identity" in {node.op_type for node in run(parse_groups("simplify"), model).model.graph}
    for impl, _ in parts.FORMS.values():
        monkeypatch.setitem(OBSTACLES, impl, OBSTACLES[impl])
    facts = replace(facts_of(model), static=True, ranges=dict.fromkeys("xtuy", (-1.0, 1.0)))
    parts.PARTS["recurrent"]()
    assert {Impl.BLOCK, Impl.DYNAMIC} <= {
        *possible_forms(facts, choose_by(facts, model))["u"]
    }  # it is a part of other operators
    parts.PARTS["block"]()
    assert Impl.BLOCK not in possible_forms(facts, choose_by(facts, model))["u"]
    assert Impl.DYNAMIC in possible_forms(facts, choose_by(facts, model))["u"]


def test_unknown_tasks_and_scripts_that_are_no_kit_are_refused(kit: Path, tmp_path: Path) -> None:
    unknown = CliRunner().invoke(models.main, [str(kit), "--only", "yolo"])
    assert unknown.exit_code == 2
    assert "no task 'yolo'; there are: echo, other" in unknown.stderr
    (tmp_path / "plain.py").write_text("TASK = 1\n")
    refused = CliRunner().invoke(models.main, [str(tmp_path / "plain.py")])
    assert refused.exit_code == 1
    assert "TASKS" in refused.stderr


def test_the_table_has_a_title_for_every_cell() -> None:
    texts = [column.text(row(error="", broken=3, agreement=0.5)) for column in models.COLUMNS]
    assert len(models.line(texts)) <= len(models.line([column.title for column in models.COLUMNS])) + 60
    assert [text for text in texts if text][:5] == ["t", "default", "top1", "0.9000", "0.9000"]
    assert set(contenders.FUNCTIONS) >= {"described", "calibration", "timed", "static", "dynamic"}
