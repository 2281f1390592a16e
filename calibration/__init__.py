"""Calibration: run a model over data in one pass, keep statistics that merge exactly, choose ranges.

Functions import onnxruntime and onnx_ir when they need them; no module here imports them at the top.
"""

from ..system.writing import write_atomically
from .calibrator import Calibrator
from .checks.findings import Finding, findings
from .data.samples import DataError, Sample
from .data.sources import DataSource, DataSpec, Source, open_source
from .execution import Execution
from .model.identity import fingerprint
from .model.session import OPERATORS, Array, Feed, InputSpec, ModelSource, Serialized, input_specs, open_session
from .range_files.range_file import RangeFile, load_ranges, save_ranges
from .rules.aciq import aciq
from .rules.entropy import entropy
from .rules.error import expected_error
from .rules.mse import mse
from .rules.precision import Precision
from .rules.ranges import RULES, Rule, auto, mean_minmax, minmax, parse_rule, percentile
from .runs.executors import executor_named
from .runs.runner import observe, run_logged
from .statistics.exact import ExactSum
from .statistics.extremes import MinMax
from .statistics.histogram import Histogram, Statistic
from .statistics.observations import Observations, Place, merge
from .statistics.sums import Channels, Moments, Runs

__all__ = [
    "OPERATORS",
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
    "Finding",
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
    "findings",
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
