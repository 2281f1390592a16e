"""From a float ONNX model to a measured INT8 one: `quantize_model`, `compare_models`, `calibrate_model`."""

from ..transforms.qparams import Scheme
from .accuracy import Accuracy, Labelled
from .api import measure_costs, quantize_model, search_model
from .bench import Bench, Search, bench_model
from .calibrate import calibrate_model, log_model, merge_ranges
from .compare import Comparison, compare_models
from .compile import Compiled, compile_model
from .frontier import Frontier, Goal, Point
from .options import Options
from .planner import choose
from .result import Calibration, FloatNode, Result
from .runtime.timing import Latency
from .selection import Selection, Strategy
from .sensitivity import Sensitivity, TensorRow, UnitRow, measure_sensitivity

__all__ = [
    "Accuracy",
    "Bench",
    "Calibration",
    "Comparison",
    "Compiled",
    "FloatNode",
    "Frontier",
    "Goal",
    "Labelled",
    "Latency",
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
    "choose",
    "compare_models",
    "compile_model",
    "log_model",
    "measure_costs",
    "measure_sensitivity",
    "merge_ranges",
    "quantize_model",
    "search_model",
]
