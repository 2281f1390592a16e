"""Calibration: run a model over data in one pass, keep statistics that merge exactly, choose ranges.

Functions import onnxruntime and onnx_ir when they need them; no module here imports them at the top.
"""

from .calibrator import Calibrator
from .exact import ExactSum
from .execution import Execution
from .executors import executor_named
from .extremes import MinMax
from .files import RangeFile, load_ranges, save_ranges, write_atomically
from .histogram import Histogram, Statistic
from .identity import fingerprint
from .observations import Observations, Place, merge
from .precision import Precision
from .ranges import RULES, Rule, auto, mean_minmax, minmax, parse_rule, percentile
from .rule_aciq import aciq
from .rule_entropy import entropy
from .rule_error import expected_error
from .rule_mse import mse
from .runner import observe, run_logged
from .samples import DataError, Sample
from .session import Array, Feed, InputSpec, ModelSource, Serialized, input_specs, open_session
from .sources import DataSource, DataSpec, Source, open_source
from .sums import Channels, Moments, Runs

__all__ = [
    "RULES",
    "Array",
    "Calibrator",
    "Channels",
    "DataError",
    "DataSource",
    "DataSpec",
    "ExactSum",
    "Execution",
    "Feed",
    "Histogram",
    "InputSpec",
    "MinMax",
    "ModelSource",
    "Moments",
    "Observations",
    "Place",
    "Precision",
    "RangeFile",
    "Rule",
    "Runs",
    "Sample",
    "Serialized",
    "Source",
    "Statistic",
    "aciq",
    "auto",
    "entropy",
    "executor_named",
    "expected_error",
    "fingerprint",
    "input_specs",
    "load_ranges",
    "mean_minmax",
    "merge",
    "minmax",
    "mse",
    "observe",
    "open_session",
    "open_source",
    "parse_rule",
    "percentile",
    "run_logged",
    "save_ranges",
    "write_atomically",
]
