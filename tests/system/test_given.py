"""Arguments of the Python API of another type than they must have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from requant import Calibrator, Options, RequantError, UnknownNameError, transform_model
from requant.system.given import names_of

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


def test_numbers_of_numpy_are_numbers() -> None:
    asked = Options(samples=np.int64(4), seconds=np.float32(0.5), batch=[1, np.int32(2)], corrections=["means"])  # type: ignore[arg-type]
    assert asked.batches == (1, 2)


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
