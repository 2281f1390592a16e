"""Arguments of the Python API that are of another kind: one clear line, before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import onnx
import pytest

from requant import RequantError
from requant.calibration import Calibrator, save_ranges
from requant.quantize import (
    CheckOptions,
    Goal,
    Load,
    bench_model,
    compare_models,
    compile_model,
    quantize_model,
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
    "save a number": (lambda out: save_ranges(out, WRONG), "the ranges must be a RangeFile, not an int"),
    "parse nothing": (lambda _: parse(cast("Any", None)), "a pipeline must be a text, not None"),
    "parse no groups": (lambda _: parse_groups(cast("Any", None)), "a pipeline must be a text, not None"),
}


@pytest.mark.parametrize(("call", "says"), CASES.values(), ids=CASES)
def test_it_is_refused_in_one_line(call: Callable[[Path], object], says: str, tmp_path: Path) -> None:
    with pytest.raises(RequantError) as error:
        call(tmp_path / "out.onnx")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert [*tmp_path.iterdir()] == []
