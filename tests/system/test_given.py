"""Arguments of the Python API of another type than they must have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from requant import (
    Calibrator,
    Options,
    RequantError,
    Setting,
    TransformOptions,
    UnknownNameError,
    compare_models,
    quantize_model,
    transform_model,
)
from requant.calibration import Execution, parse_rule
from requant.quantize import (
    CheckOptions,
    Ignored,
    Lengths,
    Load,
    Search,
    bench_model,
    check,
    compile_model,
    diff_models,
    inspect_model,
    measure_sensitivity,
    merge_ranges,
)
from requant.system.given import names_of
from requant.transforms import join

MODEL = Path(__file__).parents[2] / "sample_models/digits.onnx"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranges": 5}, "ranges must be a text or a path or a RangeFile or None, not an int"),
        ({"overrides": {}}, "overrides must be a text or a path or an Overrides or None, not a dict"),
        ({"plan": {}}, "plan must be a text or a path or None, not a dict"),
        ({"costs": 5}, "costs must be a text or a path or None, not an int"),
        ({"batch": "a"}, "batch must be an integer or a tuple, not a str"),
        ({"batch": (1, "b")}, "batch must be an integer or several, not 'b'"),
        ({"batch": 2**31}, "batch must be at most 65536, not 2147483648"),
        ({"threads": None}, "threads must be an integer, not None"),
        ({"threads": 1.5}, "threads must be an integer, not a float"),
        ({"threads": 10**6}, "threads must be 0 (the runtime chooses) to 4096, not 1000000"),
        ({"seconds": "x"}, "seconds must be a number, not a str"),
        ({"noise_weight": "a"}, "noise_weight must be a number, not a str"),
        ({"scheme": None}, "scheme must be a Scheme, not None"),
        ({"selection": None}, "selection must be a Selection, not None"),
        ({"execution": None}, "execution must be an Execution, not None"),
        ({"corrections": (5,)}, "corrections must be a sequence of names, which are texts, not an int"),
        ({"force": "no"}, "force must be True or False, not a str"),
        ({"effort": None}, "effort must be a text, not None"),
    ],
    ids=lambda each: ", ".join(f"{name}={value}" for name, value in each.items()) if isinstance(each, dict) else "",
)
def test_options_of_another_type_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequantError, match=f"^{re.escape(says)}$"):
        Options(**given)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (CheckOptions, {"tolerances": ["top1"]}, "tolerances must be a mapping, not a list"),
        (CheckOptions, {"samples": 1.5}, "samples must be an integer or None, not a float"),
        (Execution, {"batch": 2.5}, "batch must be an integer, not a float"),
        (Execution, {"executor": 3}, "executor must be an Executor or a function or None, not an int"),
        (Ignored, {"names": ["a"]}, "names must be True or False, not a list"),
        (Lengths, {"dims": {"N": -1}}, "the length of axis 'N' must be at least 0, not -1"),
        (Lengths, {"shapes": {"x": (1, "a")}}, "a length of input 'x' must be an integer, not a str"),
        (Load, {"batch": 0}, "batch must be at least 1, not 0"),
        (Load, {"seconds": -1}, "seconds must be 0 or more, not -1"),
        (Load, {"setting": 2}, "setting must be a Setting, not an int"),
        (Search, {"threads": "all"}, "threads must be an integer or None, not a str"),
        (Setting, {"threads": True}, "threads must be an integer, not a bool"),
        (TransformOptions, {"inputs": "x"}, "inputs must be a tuple, not a str"),
    ],
    ids=str,
)
def test_other_settings_of_another_type_are_refused(kind: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequantError, match=f"^{re.escape(says)}$"):
        kind(**given)


def test_numbers_of_numpy_become_numbers_that_json_holds() -> None:
    asked = Options(samples=np.int64(4), seconds=np.float32(0.5), batch=[1, np.int32(2)], corrections=["means"])  # type: ignore[arg-type]
    assert asked.batches == (1, 2)
    assert json.loads(json.dumps([asked.samples, asked.seconds, asked.batch])) == [4, 0.5, [1, 2]]
    numbers: dict[str, Any] = {"samples": np.int64(50), "threads": np.int32(1), "batch": np.int16(2)}
    checked = CheckOptions(**numbers)
    assert json.dumps([checked.samples, checked.threads, checked.batch]) == "[50, 1, 2]"
    dims: dict[str, Any] = {"N": np.int64(2)}
    assert {type(length) for length in Lengths(dims=dims).dims.values()} == {int}


call: Any = partial
"""Mypy refuses these arguments too."""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (call(inspect_model, MODEL, {"N": 1}), "lengths must be a Lengths, not a dict"),
        (call(diff_models, MODEL, MODEL, ["names"]), "ignored must be an Ignored, not a list"),
        (call(bench_model, MODEL, None, {"batch": 1}), "load must be a Load, not a dict"),
        (call(check, MODEL, MODEL, [], options={}), "options must be a CheckOptions, not a dict"),
        (call(quantize_model, MODEL, None, "out.onnx", {}), "options must be an Options, not a dict"),
        (
            call(transform_model, MODEL, "out.onnx", "fold_constants", {}),
            "options must be a TransformOptions, not a dict",
        ),
        (call(compare_models, MODEL, MODEL, [], setting={}), "the setting must be a Setting, not a dict"),
        (call(compare_models, MODEL, MODEL, [], batch=7.5), "batch must be an integer, not a float"),
        (call(compare_models, MODEL, MODEL, [], batch=0), "batch must be at least 1, not 0"),
        (call(compile_model, MODEL, "out.onnx", threads="x"), "threads must be an integer, not a str"),
        (call(merge_ranges, "ranges.json"), "paths must be a sequence of range files, not a str"),
        (call(parse_rule, None), "a rule must be a text such as 'mse', not None"),
        (call(measure_sensitivity, MODEL, [], samples=2.5), "samples must be an integer, not a float"),
        (call(join, "simplify", "x", "fold_constants"), "the phase of fold_constants must be an integer, not a str"),
    ],
    ids=lambda each: each.func.__name__ if isinstance(each, partial) else "",
)
def test_arguments_of_another_type_are_refused(function: Callable[[], object], says: str) -> None:
    with pytest.raises(RequantError, match=f"^{re.escape(says)}"):
        function()


@pytest.mark.parametrize("transforms", [["fold_constants"], None])
def test_transforms_are_a_text_or_a_pipeline(transforms: Any, tmp_path: Path) -> None:
    with pytest.raises(RequantError, match=r"^transforms must be a text or a Pipeline, not "):
        transform_model(MODEL, tmp_path / "out.onnx", transforms)


def test_a_calibrator_is_merged_with_another_one() -> None:
    calibrator = Calibrator(str(MODEL))
    with pytest.raises(RequantError, match=r"^a calibrator is merged with another one, not None$"):
        calibrator.merge(None)  # type: ignore[arg-type]
    with pytest.raises(RequantError, match=r"cannot be merged with itself: its samples would count twice"):
        calibrator.merge(calibrator)


def test_names_are_texts() -> None:
    assert names_of(iter(["a", ""]), "tensors") == ("a", "")
    for value in ("ab", b"ab", 5, ["a", 5]):
        with pytest.raises(RequantError, match=r"^tensors must be a sequence of names"):
            names_of(value, "tensors")


def test_an_unknown_tensor_is_refused_at_once() -> None:
    with pytest.raises(UnknownNameError, match=r"^no tensor named 'zzz'"):
        Calibrator(str(MODEL), ["zzz"])
