"""From a float ONNX model to a measured INT8 one: `quantize_model`, `compare_models`, `calibrate_model`."""

from ..transforms.qparams import Scheme
from .accuracy import Accuracy, Labelled
from .api import quantize_model
from .calibrate import calibrate_model, log_model, merge_ranges
from .compare import Comparison, compare_models
from .options import Options
from .planner import choose
from .result import Calibration, FloatNode, Result
from .runtime.timing import Latency
from .selection import Selection, Strategy

__all__ = [
    "Accuracy",
    "Calibration",
    "Comparison",
    "FloatNode",
    "Labelled",
    "Latency",
    "Options",
    "Result",
    "Scheme",
    "Selection",
    "Strategy",
    "calibrate_model",
    "choose",
    "compare_models",
    "log_model",
    "merge_ranges",
    "quantize_model",
]
