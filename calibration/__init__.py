"""Data in, ranges out: runs a model over samples in one pass and keeps statistics that merge exactly.

No module here imports onnxruntime or onnx_ir before a function needs it.
"""

from .files import RangeFile, fingerprint, load_ranges, save_ranges, write_atomically
from .observers import ChannelMean, Histogram, MinMax, Statistic, merge
from .ranges import RULES, Rule, minmax, parse_rule, percentile
from .runner import Observations, observe, run_logged
from .samples import DataError, Sample
from .session import Array, Feed, InputSpec, ModelSource, Serialized, input_specs, open_session
from .sources import DataSource, Source, open_source

__all__ = [
    "RULES",
    "Array",
    "ChannelMean",
    "DataError",
    "DataSource",
    "Feed",
    "Histogram",
    "InputSpec",
    "MinMax",
    "ModelSource",
    "Observations",
    "RangeFile",
    "Rule",
    "Sample",
    "Serialized",
    "Source",
    "Statistic",
    "fingerprint",
    "input_specs",
    "load_ranges",
    "merge",
    "minmax",
    "observe",
    "open_session",
    "open_source",
    "parse_rule",
    "percentile",
    "run_logged",
    "save_ranges",
    "write_atomically",
]
