"""The accuracy benchmark: its conclusions from measurements, and resuming an interrupted table."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from rich.console import Console

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
accuracy = importlib.import_module("benchmarks.accuracy")
accuracy_rows = importlib.import_module("benchmarks.accuracy_rows")
contenders = importlib.import_module("benchmarks.contenders")
measurements = importlib.import_module("benchmarks.measurements")
sys.path.remove(str(ROOT))


def row(contender: str, value: float | None, task: str = "mbv1_075", **more: Any) -> Any:
    speed = more.pop("speed", 2.0)
    drop = None if value is None else 0.76 - value
    facts = {"metric": "top1", "drop": drop, "float_ms": 4.0, "ms": 4.0 / speed}
    return accuracy_rows.Row(task, contender, value=value, **{**facts, **more})


FLOAT = row("float", 0.76, speed=1.0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("medium", 0.7575)], []),
        ([row("medium", 0.757)], []),
        ([row("medium", 0.7565)], ["drop above 0.003"]),
        ([row("high", 0.7575)], ["drop above 0.0015"]),
        ([row("low", 0.5)], []),
        ([row("medium", None)], ["no model"]),
        ([row("medium", 0.76), row("minmax", 0.76, speed=2.5)], ["slower than ORT minmax"]),
        ([row("medium", 0.76), row("minmax", 0.76, speed=2.02)], []),
        ([row("medium", 0.76), row("minmax", 0.75, speed=2.5)], []),
        ([row("medium", 0.76), row("minmax", 0.76, speed=2.5, invalid="no")], []),
        ([row("medium", 0.76), row("low", 0.76, speed=2.5)], []),
        ([row("medium", 0.75), row("nncf", 0.76, speed=2.5)], ["drop above 0.003", "slower than NNCF"]),
        ([row("medium", 0.76), row("minmax", 0.76, speed=2.5, asked=10)], []),
        ([row("medium", 0.76, task="ultraface_rfb_320")], []),
    ],
    ids=[
        "reached",
        "reached exactly",
        "drop",
        "high wants half",
        "low promises nothing",
        "no model",
        "slower than a peer",
        "peer within noise",
        "peer misses the accuracy",
        "peer invalid",
        "not against ourselves",
        "both",
        "other items",
        "no goal",
    ],
)
def test_what_is_missed_is_named(rows: Sequence[Any], words: list[str]) -> None:
    assert accuracy_rows.missed(rows[0], [FLOAT, *rows]) == words


@pytest.mark.parametrize(
    ("goal", "value", "drop", "agreement", "words"),
    [
        (accuracy_rows.Goal(drop=0.01, relative=True), 4.13, 0.04, None, ""),
        (accuracy_rows.Goal(drop=0.01, relative=True), 4.2, 0.05, None, "drop above 0.041"),
        (accuracy_rows.Goal(least=0.999), 0.999, 0.001, None, ""),
        (accuracy_rows.Goal(least=0.999), 0.998, 0.002, None, "below 0.999"),
        (accuracy_rows.Goal(agreement=0.993), 0.9, 0.0, 0.993, ""),
        (accuracy_rows.Goal(agreement=0.993), 0.9, 0.0, 0.992, "agreement below 99.3%"),
    ],
)
def test_goals(goal: Any, value: float, drop: float, agreement: float | None, words: str) -> None:
    assert goal.missed(row("medium", value, drop=drop, agreement=agreement), 4.1) == words


def test_a_correction_helps_where_it_alone_is_better_than_none() -> None:
    rows = [
        row("none", 0.70, sqnr_db=10.0),
        row("bias", 0.75, sqnr_db=12.0),
        row("means", 0.70, sqnr_db=9.0),
        row("none", 0.70, task="kwt1", sqnr_db=None),
        row("bias", 0.69, task="kwt1", sqnr_db=20.0),
        row("means", None, task="kwt1"),
    ]
    assert accuracy_rows.helping(rows, ["bias", "means"]) == [
        "bias: better on mbv1_075; worse on kwt1; less noise on mbv1_075",
        "means: better on none; worse on none; less noise on none",
    ]


def test_what_this_version_has_not_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "has", lambda package, python=None: python == "other/python")
    coming = accuracy_rows.Contender("ours, twice", "configured", {"options": {"twice": True}}, ours=True)
    monkeypatch.setattr(accuracy, "CONTENDERS", {**accuracy_rows.CONTENDERS, "coming": coming})
    found, notes = accuracy.available(["minmax", "nncf", "medium", "coming"], None)
    assert list(found) == ["minmax", "medium"]
    assert [note.partition(":")[0] for note in notes] == ["NNCF", "ours, twice"]
    assert "nncf" in accuracy.available(["nncf"], "other/python")[0]


def test_every_contender_is_a_function_of_the_program() -> None:
    assert {contender.function for contender in accuracy_rows.CONTENDERS.values()} <= set(contenders.FUNCTIONS)
    assert set(accuracy_rows.USUAL) <= set(accuracy_rows.CONTENDERS)
    assert set(accuracy_rows.GOALS) <= set(accuracy_rows.CONTENDERS)


def test_rows_are_kept_and_made_anew_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    rows = [FLOAT, row("nncf", None, error="fails"), row("medium", 0.7, interval=(0.0, 0.1))]
    accuracy._keeping(file)(rows)
    assert accuracy.kept(file, "") == rows
    assert accuracy.kept(file, "medium,float") == rows[1:2]
    assert accuracy.kept(file, "all") == []
    assert accuracy.kept(tmp_path / "none.json", "") == []
    file.write_text(json.dumps([1]))
    with pytest.raises(click.ClickException, match="no rows of this program"):
        accuracy.kept(file, "")


class Calls:
    """A replacement for the processes; the contender `failing` makes no model."""

    def __init__(self, failing: str = "") -> None:
        self.made: list[str] = []
        self.failing = failing

    def __call__(self, function: str, *, python: str | None = None, **given: Any) -> dict[str, Any]:
        if function == "task":
            Path(given["model"]).touch()
            return {"operators": ["Conv"]}
        if function == "clocked":
            name = Path(given["output"]).stem
            self.made.append(name)
            if name == self.failing:
                raise contenders.ContenderError("too many bins")
            Path(given["output"]).touch()
            return {"seconds": 1.5}
        if function == "evaluated":
            Path(given["reference"]).touch()
            return {"metric": "top1", "lower": False, "value": 0.7, "items": 10, "drop": 0.0, "invalid": ""}
        assert function == "timed"
        return {case["name"]: {"ms": 2.0 if case["name"] == "float" else 1.0} for case in given["cases"]}


def test_a_table_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(failing="percentile")
    monkeypatch.setattr(accuracy, "call", calls)
    setting = accuracy.Setting(tmp_path, tmp_path, place="all")
    rows: list[Any] = []
    some = {name: accuracy_rows.CONTENDERS[name] for name in ("minmax", "products", "percentile")}
    accuracy.measured(setting, "kwt1", some, rows)
    assert calls.made == ["minmax", "percentile"]  # a model without MatMul has no products
    assert [(r.contender, r.speedup, r.error) for r in rows] == [
        ("float", 1.0, ""),
        ("minmax", 2.0, ""),
        ("percentile", None, "too many bins"),
    ]
    before = list(rows)
    accuracy.measured(setting, "kwt1", some, rows)
    assert rows == before
    assert all(one is two for one, two in zip(rows, before, strict=True))  # nothing was measured again
    accuracy.measured(setting, "kwt1", {**some, "high": accuracy_rows.CONTENDERS["high"]}, rows)
    assert calls.made == ["minmax", "percentile", "high-all"]
    assert [(r.contender, r.place, r.speedup) for r in rows if r.contender == "high"] == [("high", "all", 2.0)]
    shown = Console(width=300, record=True)
    shown.print(accuracy_rows.to_table("", accuracy_rows.ordered(rows, ["kwt1"])))
    assert "fails: too many bins" in shown.export_text()


def test_an_ablation_has_a_row_for_none_and_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(accuracy, "call", calls)
    rows: list[Any] = []
    for _ in range(2):
        accuracy.alone(accuracy.Setting(tmp_path, tmp_path, place="all"), "kwt1", ["bias", "means"], rows)
    assert calls.made == ["none-all", "bias-all", "means-all"]
    assert [r.contender for r in rows] == ["float", "none", "bias", "means"]


def test_what_single_items_tell_of_two_results() -> None:
    before, after = ({"correct": np.array(right)} for right in ([1, 1, 1, 0], [1, 0, 0, 1]))
    before, after = ({"correct": r["correct"].astype(bool)} for r in (before, after))
    found = measurements._paired("top1", before, after)
    assert (found["broken"], found["fixed"], found["p_value"]) == (2, 1, 1.0)
    assert found["interval"][0] < 0.25 < found["interval"][1]
    assert (
        measurements._paired("perplexity", before, after)["interval"] is None
    )  # single tokens are right or wrong; losses are not
    quality = {"quality": np.arange(8.0)}, {"quality": np.arange(8.0) - 0.5}
    assert measurements._paired("PSNR_dB", *quality)["interval"] == (0.5, 0.5)
    assert measurements._paired("finite", {}, {}) == {}


def test_the_time_that_a_function_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "FUNCTIONS", {"give": lambda **given: given})
    found = contenders.clocked("give", model="m")
    assert found["model"] == "m"
    assert found["seconds"] >= 0
