"""From a float ONNX model to a measured INT8 one: `quantize_model`, `compare_models`, `calibrate_model`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..transforms.int8.qparams import Scheme
    from .accuracy.class_scores import ClassScores
    from .accuracy.compare import Comparison, compare_models
    from .accuracy.float_nodes import FloatNode
    from .accuracy.frontier import Frontier, Point
    from .accuracy.outputs import Accuracy, Labelled
    from .api import measure_costs, quantize_model, search_model
    from .gate.run import Check, CheckOptions, check
    from .model.shapes import Lengths
    from .options.declared import Strategy
    from .options.options import Options
    from .options.selection import Selection
    from .placement.rules import choose
    from .project.check import check_project
    from .project.fastest import quantize_fastest
    from .result import Result
    from .runtime.runtimes import Setting
    from .runtime.timing import Latency
    from .sensitivity.result import Sensitivity, TensorRow, UnitRow
    from .steps.calibrate import Calibration, calibrate_model, log_model, merge_ranges
    from .steps.search import Goal
    from .tools.bench.bench import Bench, Load, Search, bench_model
    from .tools.bench.compile import Compiled, compile_model
    from .tools.inspect.diff import Differences, diff_models
    from .tools.inspect.diff_graphs import Ignored
    from .tools.inspect.inspect import Inspection, inspect_model
    from .tools.sensitivity import measure_sensitivity
    from .tools.transform import Transformed, TransformOptions, transform_model

__all__ = [
    "Accuracy",
    "Bench",
    "Calibration",
    "Check",
    "CheckOptions",
    "ClassScores",
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
    "Setting",
    "Strategy",
    "TensorRow",
    "TransformOptions",
    "Transformed",
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
    "quantize_fastest",
    "quantize_model",
    "search_model",
    "transform_model",
]

HOMES = {
    "..transforms.int8.qparams": ("Scheme",),
    ".accuracy.class_scores": ("ClassScores",),
    ".accuracy.outputs": ("Accuracy", "Labelled"),
    ".api": ("measure_costs", "quantize_model", "search_model"),
    ".project.fastest": ("quantize_fastest",),
    ".tools.bench.bench": ("Bench", "Load", "Search", "bench_model"),
    ".steps.calibrate": ("Calibration", "calibrate_model", "log_model", "merge_ranges"),
    ".accuracy.compare": ("Comparison", "compare_models"),
    ".tools.bench.compile": ("Compiled", "compile_model"),
    ".tools.inspect.diff": ("Differences", "diff_models"),
    ".tools.inspect.diff_graphs": ("Ignored",),
    ".accuracy.frontier": ("Frontier", "Point"),
    ".steps.search": ("Goal",),
    ".gate.run": ("Check", "CheckOptions", "check"),
    ".tools.inspect.inspect": ("Inspection", "inspect_model"),
    ".options.options": ("Options",),
    ".placement.rules": ("choose",),
    ".project.check": ("check_project",),
    ".accuracy.float_nodes": ("FloatNode",),
    ".result": ("Result",),
    ".runtime.runtimes": ("Setting",),
    ".runtime.timing": ("Latency",),
    ".options.declared": ("Strategy",),
    ".options.selection": ("Selection",),
    ".sensitivity.result": ("Sensitivity", "TensorRow", "UnitRow"),
    ".tools.sensitivity": ("measure_sensitivity",),
    ".model.shapes": ("Lengths",),
    ".tools.transform": ("TransformOptions", "Transformed", "transform_model"),
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
