"""`benchmarks.busy`: what a busy machine may change, and what it must tell."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

busy = importlib.import_module("benchmarks.busy")


def run(speedup: float, **changes: Any) -> Any:
    values = {"uncertainty": 0.01, "int8": True, "told": False, "seconds": 1.0, "output": Path("q.onnx")}
    return busy.Run(speedup, **{**values, **changes})


@pytest.mark.parametrize(
    ("second", "slower", "missed"),
    [
        (run(2.08), 1.04, ""),
        (run(2.12), 1.0, "speed-up"),
        (run(1.88), 1.06, "speed-up, placement"),
        (run(2.0, int8=False), 1.0, "verdict"),
        (run(15.0, int8=False, told=True), 1.2, ""),
    ],
)
def test_a_change_of_more_than_five_percent_must_be_told(second: Any, slower: float, missed: str) -> None:
    task = busy.Task("digits", Path("m.onnx"), "d.npz")
    assert busy.Row(task, run(2.0), second, slower).missed == missed


@pytest.mark.parametrize(
    ("latency", "placement", "sure", "told"),
    [(0.01, 0.01, True, False), (0.08, 0.0, True, True), (0.0, 0.0, False, True)],
)
def test_a_run_tells_what_its_json_says(latency: float, placement: float, sure: bool, told: bool) -> None:
    rejected = {"latency": {"speedup": 0.9, "uncertainty": latency}}
    found = {
        "rejected": rejected,
        "latency": {"speedup": 1.0, "uncertainty": 0.0},
        "placement": {"uncertainty": placement, "costs_sure": sure},
        "verdict": "NOT INT8: int8 gains too little here",
        "why_not": "int8 gains too little here",
    }
    heard = busy.said(found, 1.0, Path("q.onnx"))
    assert (heard.speedup, heard.told, heard.int8) == (0.9, told, False)
