"""Arguments of the Python API that are of another kind: one clear line, before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest

from requant import RequantError
from requant.calibration import (
    Calibrator,
    Channels,
    DataSpec,
    ExactSum,
    Histogram,
    MinMax,
    Moments,
    observe,
    save_ranges,
)
from requant.quantize import (
    CheckOptions,
    Goal,
    Lengths,
    Load,
    Options,
    Scheme,
    Selection,
    Strategy,
    bench_model,
    calibrate_model,
    check,
    check_project,
    compare_models,
    compile_model,
    log_model,
    measure_costs,
    measure_sensitivity,
    quantize_fastest,
    quantize_model,
    search_model,
    transform_model,
)
from requant.quantize.accuracy.drop import parse_drop
from requant.quantize.accuracy.metrics import metric_named
from requant.transforms import parse, parse_groups

DIGITS = Path(__file__).parents[2] / "sample_models" / "digits.onnx"
FEEDS = f"{DIGITS.with_suffix('.npz')}:calib"
WRONG: Any = 3
CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "transform a message": (
        lambda out: transform_model(cast("Any", onnx.ModelProto()), out, "fold_constants"),
        "a model must be the path of a file, not a ModelProto",
    ),
    "transform into nothing": (
        lambda _: transform_model(DIGITS, cast("Any", None), "fold_constants"),
        "an output must be the path of a file, not None",
    ),
    "time bytes": (lambda _: bench_model(cast("Any", b"")), "a model must be the path of a file, not a bytes"),
    "search with a number": (lambda _: bench_model(DIGITS, search=WRONG), "search must be a Search, not an int"),
    "compile into nothing": (
        lambda _: compile_model(DIGITS, cast("Any", None)),
        "an output must be the path of a file, not None",
    ),
    "look with a number": (
        lambda out: quantize_model(DIGITS, FEEDS, out, look=WRONG),
        "look must be a function, not an int",
    ),
    "progress with a number": (
        lambda out: quantize_model(DIGITS, FEEDS, out, progress=WRONG),
        "progress must be a function, not an int",
    ),
    "compare with the progress of a number": (
        lambda _: compare_models(DIGITS, DIGITS, FEEDS, progress=WRONG),
        "progress must be a function, not an int",
    ),
    "compare many at once": (
        lambda _: compare_models(DIGITS, DIGITS, FEEDS, batch=10**9),
        "batch must be at most 65536, not 1000000000",
    ),
    "time many at once": (lambda _: Load(batch=10**9), "batch must be at most 65536"),
    "check many at once": (lambda _: CheckOptions(batch=10**9), "batch must be at most 65536"),
    "check a number": (lambda _: CheckOptions(metrics=[WRONG]), "a metric must be a name, FILE.py:NAME or a Metric"),
    "a goal by name": (
        lambda _: Goal(metric=cast("Any", "top1"), allowance=parse_drop("1%"), data=FEEDS),
        "the metric must be a Metric, such as metric_named('top1'), not a str",
    ),
    "a goal with a number": (
        lambda _: Goal(metric=metric_named("top1"), allowance=cast("Any", 0.01), data=FEEDS),
        "the allowance must be an Allowance, such as parse_drop('0.5%'), not a float",
    ),
    "a goal without an end": (
        lambda _: Goal(metric=metric_named("top1"), allowance=parse_drop("1%"), data=FEEDS, seconds=cast("Any", "x")),
        "seconds must be a number, not a str",
    ),
    "observe a text of samples": (
        lambda _: Calibrator(DIGITS).observe(FEEDS, samples=cast("Any", "3")),
        "samples must be an integer, not a str",
    ),
    "a limit with a unit": (
        lambda _: DataSpec(FEEDS, memory_limit=cast("Any", "2GB")),
        "memory_limit must be an integer, not a str",
    ),
    "a state as a text": (
        lambda _: DataSpec(FEEDS, state=cast("Any", "none")),
        "state must be a sequence of names, not 'none'",
    ),
    "a state as a number": (lambda _: DataSpec(FEEDS, state=WRONG), "state must be a sequence of names, not 3"),
    "preprocess by a number": (lambda _: DataSpec(FEEDS, preprocess=WRONG), "preprocess must be a text, not an int"),
    "tokenize by a number": (lambda _: DataSpec(FEEDS, tokenizer=WRONG), "tokenizer must be a function, not an int"),
    "a shape as a number": (
        lambda _: Lengths(shapes={"x": WRONG}),
        "the shape of input 'x' must be a tuple, not an int",
    ),
    "extremes of a list": (lambda _: MinMax.of(cast("Any", [1.0])), "values must be a NumPy array, not a list"),
    "count a list": (lambda _: Histogram.of(cast("Any", [1.0])), "values must be a NumPy array, not a list"),
    "moments of a list": (lambda _: Moments.of(cast("Any", [1.0])), "values must be a NumPy array, not a list"),
    "channels of a list": (lambda _: Channels.of(cast("Any", [[1.0]]), 0), "values must be a NumPy array, not a list"),
    "channels of a text": (
        lambda _: Channels.of(np.ones((2, 2)), cast("Any", "x")),
        "axis must be an integer, not a str",
    ),
    "sum a list": (lambda _: ExactSum.of(cast("Any", [1.0])), "values must be a NumPy array, not a list"),
    "observe a text of tensors": (
        lambda _: observe(DIGITS, "image", [], histogram=False),
        "tensors must be a sequence of names, not 'image'",
    ),
    "observe by a number": (
        lambda _: observe(DIGITS, ["image"], [], histogram=False, execution=WRONG),
        "execution must be an Execution, not an int",
    ),
    "choose by a name": (
        lambda _: calibrate_model(DIGITS, FEEDS, Options(samples=2)).file.choose(cast("Any", "mse")),
        "the rule must be a Rule, such as parse_rule('mse'), not a str",
    ),
    "save a number": (lambda out: save_ranges(out, WRONG), "the ranges must be a RangeFile, not an int"),
    "parse nothing": (lambda _: parse(cast("Any", None)), "a pipeline must be a text, not None"),
    "parse no groups": (lambda _: parse_groups(cast("Any", None)), "a pipeline must be a text, not None"),
}


AGREED = Goal(metric=metric_named("agreement"), allowance=parse_drop("1%"), data=FEEDS)
REPORTING: dict[str, Callable[[Path], object]] = {
    "observe": lambda _: observe(DIGITS, ["image"], [], histogram=False, progress=WRONG),
    "Calibrator": lambda _: Calibrator(DIGITS).observe(FEEDS, progress=WRONG),
    "calibrate_model": lambda _: calibrate_model(DIGITS, FEEDS, progress=WRONG),
    "check": lambda out: check(DIGITS, DIGITS, FEEDS, out, update=True, progress=WRONG),
    "check_project": lambda out: check_project(out, progress=WRONG),
    "compile_model": lambda out: compile_model(DIGITS, out, progress=WRONG),
    "log_model": lambda out: log_model(DIGITS, FEEDS, out, progress=WRONG),
    "measure_costs": lambda _: measure_costs(DIGITS, FEEDS, progress=WRONG),
    "measure_sensitivity": lambda _: measure_sensitivity(DIGITS, FEEDS, progress=WRONG),
    "quantize_fastest": lambda out: quantize_fastest(DIGITS, FEEDS, out, progress=WRONG),
    "search_model": lambda out: search_model(DIGITS, FEEDS, out, AGREED, progress=WRONG),
    "transform_model": lambda out: transform_model(DIGITS, out, "fold_constants", progress=WRONG),
}
CASES |= {
    f"{name} with the progress of a number": (call, "progress must be a function, not an int")
    for name, call in REPORTING.items()
}


@pytest.mark.parametrize(("call", "says"), CASES.values(), ids=CASES)
def test_it_is_refused_in_one_line(call: Callable[[Path], object], says: str, tmp_path: Path) -> None:
    with pytest.raises(RequantError) as error:
        call(tmp_path / "out.onnx")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert [*tmp_path.iterdir()] == []


CONTRADICTIONS: list[dict[str, Any]] = [
    {"portable": True, "format": "qoperator"},
    {"portable": True, "selection": Selection(strategy=Strategy.BLOCK)},
    {"scheme": Scheme(block_size=64)},
    {"kernels": "native", "portable": True},
    {"kernels": "native", "format": "qoperator"},
    {"kernels": "native", "runtime": "openvino"},
    {"precision": "f32"},
    {"runtime": "auto", "portable": True},
    {"runtime": "openvino", "format": "qoperator"},
    {"runtime": "openvino", "place": "estimated"},
]


@pytest.mark.parametrize("given", CONTRADICTIONS, ids=str)
def test_options_are_named_as_in_python(given: dict[str, Any]) -> None:
    with pytest.raises(RequantError) as error:
        Options(**given)
    assert "--" not in str(error.value)
