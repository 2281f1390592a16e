"""From a float ONNX model to a measured INT8 one: `quantize_model`, `compare_models`, `calibrate_model`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..transforms.qparams import Scheme
    from .accuracy import Accuracy, Labelled
    from .api import measure_costs, quantize_model, search_model
    from .bench import Bench, Load, Search, bench_model
    from .calibrate import calibrate_model, log_model, merge_ranges
    from .compare import Comparison, compare_models
    from .compile import Compiled, compile_model
    from .difference import Differences, Ignored, diff_models
    from .frontier import Frontier, Goal, Point
    from .gate.run import Check, CheckOptions, check
    from .inspection import Inspection, inspect_model
    from .options import Options
    from .planner import choose
    from .project import check_project
    from .result import Calibration, FloatNode, Result
    from .runtime.timing import Latency
    from .selection import Selection, Strategy
    from .sensitivity import Sensitivity, TensorRow, UnitRow, measure_sensitivity
    from .shapes import Lengths

__all__ = [
    "Accuracy",
    "Bench",
    "Calibration",
    "Check",
    "CheckOptions",
    "Comparison",
    "Compiled",
    "Differences",
    "FloatNode",
    "Frontier",
    "Goal",
    "Ignored",
    "Inspection",
    "Labelled",
    "Latency",
    "Lengths",
    "Load",
    "Options",
    "Point",
    "Result",
    "Scheme",
    "Search",
    "Selection",
    "Sensitivity",
    "Strategy",
    "TensorRow",
    "UnitRow",
    "bench_model",
    "calibrate_model",
    "check",
    "check_project",
    "choose",
    "compare_models",
    "compile_model",
    "diff_models",
    "inspect_model",
    "log_model",
    "measure_costs",
    "measure_sensitivity",
    "merge_ranges",
    "quantize_model",
    "search_model",
]

HOMES = {
    "..transforms.qparams": ("Scheme",),
    ".accuracy": ("Accuracy", "Labelled"),
    ".api": ("measure_costs", "quantize_model", "search_model"),
    ".bench": ("Bench", "Load", "Search", "bench_model"),
    ".calibrate": ("calibrate_model", "log_model", "merge_ranges"),
    ".compare": ("Comparison", "compare_models"),
    ".compile": ("Compiled", "compile_model"),
    ".difference": ("Differences", "Ignored", "diff_models"),
    ".frontier": ("Frontier", "Goal", "Point"),
    ".gate.run": ("Check", "CheckOptions", "check"),
    ".inspection": ("Inspection", "inspect_model"),
    ".options": ("Options",),
    ".planner": ("choose",),
    ".project": ("check_project",),
    ".result": ("Calibration", "FloatNode", "Result"),
    ".runtime.timing": ("Latency",),
    ".selection": ("Selection", "Strategy"),
    ".sensitivity": ("Sensitivity", "TensorRow", "UnitRow", "measure_sensitivity"),
    ".shapes": ("Lengths",),
}
"""The module of each name, imported when the name is wanted first: of a part, the rest is not paid for."""


def __getattr__(name: str) -> Any:
    """Import the module of a name."""
    home = next((module for module, names in HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(home, __name__), name))


def __dir__() -> list[str]:
    """Return the names, imported or not."""
    return sorted({*globals(), *__all__})
