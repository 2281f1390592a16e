"""Folders of test_data_set_*: names, order, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from requant.calibration import DataError, DataSpec, InputSpec, input_specs, open_session, open_source
from requant.calibration.model.session import Array

F4, I8 = np.dtype(np.float32), np.dtype(np.int64)
X, IDS = InputSpec("x", F4, ("N", 2)), InputSpec("ids", I8, ("N",))


def put(folder: Path, number: int, array: Array, name: str = "", kind: str = "input") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}_{number}.pb"
    path.write_bytes(numpy_helper.from_array(array, name).SerializeToString())
    return path


def x(value: float) -> Array:
    return np.full((1, 2), value, F4)


def test_sets_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        put(tmp_path / f"test_data_set_{number}", 0, x(number))
        put(tmp_path / f"test_data_set_{number}", 0, x(-1), kind="output")
    (tmp_path / "model.onnx").write_bytes(b"")
    source = open_source(str(tmp_path), [X])
    assert [sample.feed["x"][0, 0] for sample in source] == [0, 2, 10]
    assert [sample.label for sample in source] == [None] * 3
    assert (source.length, source.rows.random) == (3, True)
    assert [sample.where for sample in source.samples(1)] == [f"{tmp_path / 'test_data_set_0'}, sample 0"]
    (one,) = open_source(tmp_path / "test_data_set_2", [X])
    assert one.feed["x"][0, 0] == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [("x", "ids"), ("", ""), ("gpu_0/x", "gpu_0/ids")],
    ids=["by-name", "by-position", "foreign-names"],
)
def test_inputs_by_name_or_position(tmp_path: Path, first: str, second: str) -> None:
    put(tmp_path, 0, x(7), first)
    put(tmp_path, 1, np.array([5]), second)
    (sample,) = open_source(str(tmp_path), [X, IDS])
    assert (sample.feed["x"].tolist(), sample.feed["ids"].tolist()) == ([[7, 7]], [5])


def test_names_win_over_positions(tmp_path: Path) -> None:
    put(tmp_path, 0, np.array([5]), "ids")
    put(tmp_path, 1, x(7), "x")
    (sample,) = open_source(str(tmp_path), [X, IDS])
    assert (sample.feed["x"].tolist(), sample.feed["ids"].tolist()) == ([[7, 7]], [5])


def test_texts(tmp_path: Path) -> None:
    put(tmp_path, 0, np.array(["\u00e4b", "c"], dtype=object))
    (sample,) = open_source(str(tmp_path), [InputSpec("t", np.dtype(np.str_), ("N",))])
    assert sample.feed["t"].tolist() == ["\u00e4b", "c"]


def external(array: Array) -> bytes:
    tensor = numpy_helper.from_array(array)
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "/etc/hostname"
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    return bytes(tensor.SerializeToString())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xff" * 9, r"input_0.pb, sample 0: cannot be read as a TensorProto"),
        (external(x(1)), r"input_0.pb, sample 0: has external data, which are not read here"),
        (numpy_helper.from_array(x(1)).SerializeToString()[:-3], r"input_0.pb, sample 0: cannot be read as a TensorProto"),
        (onnx.TensorProto(dims=[1, 2], data_type=1, raw_data=b"123").SerializeToString(), r"input_0.pb, sample 0: cannot be read"),
        (onnx.TensorProto(dims=[1, 2], data_type=99).SerializeToString(), r"input_0.pb, sample 0: cannot be read"),
        (numpy_helper.from_array(np.zeros((1, 3), F4)).SerializeToString(), r"sample 0, input 'x': expected float32 \(N, 2\)"),
    ],
    ids=["garbage", "external", "truncated", "short", "type", "shape"],
)  # fmt: skip
def test_bad_tensors_name_file_and_sample(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "input_0.pb").write_bytes(content)
    with pytest.raises(DataError, match=problem) as caught:
        list(open_source(str(tmp_path), [X]))
    assert "\n" not in str(caught.value)


def test_tensors_that_do_not_fit_the_model(tmp_path: Path) -> None:
    put(tmp_path, 0, x(1))
    with pytest.raises(DataError, match=r"has input_0.pb, none named as an input; the model has inputs ids, x"):
        list(open_source(str(tmp_path), [X, IDS]))  # fmt: skip
    put(tmp_path, 0, x(1), "x")
    put(tmp_path, 1, np.array([1]), "idz")
    with pytest.raises(DataError, match=r"sample 0: the model has no input named 'idz'; did you mean 'ids'"):
        list(open_source(str(tmp_path), [X, IDS]))
    put(tmp_path, 1, x(1), "x")
    with pytest.raises(DataError, match=r"input_1.pb, sample 0: a second tensor for the model's input 'x'"):
        list(open_source(str(tmp_path), [X, IDS]))


def test_an_empty_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_data_set_0").mkdir()
    with pytest.raises(DataError, match=r"test_data_set_0, sample 0: has no input_0.pb"):
        list(open_source(str(tmp_path), [X]))


@pytest.mark.parametrize("option", ["preprocess", "labels", "tokenizer"])
def test_options_are_refused(tmp_path: Path, option: str) -> None:
    given: dict[str, Any] = {option: "x"}
    put(tmp_path, 0, x(1))
    with pytest.raises(DataError, match=rf"test_data_set_\* takes no {option}; it is for"):
        open_source(DataSpec(str(tmp_path), **given), [X])


def test_published_models_run_on_their_data() -> None:
    """Models of the ONNX project with the data that they come with, of operators that only move or compare values."""
    root = Path(onnx.__file__).parent / "backend" / "test" / "data" / "pytorch-converted"
    if not root.is_dir():
        pytest.skip("this onnx comes without its test data")
    for name in ("test_Embedding", "test_MaxPool2d", "test_ReLU"):
        session = open_session(root / name / "model.onnx")
        source = open_source(root / name, input_specs(session))
        for sample, folder in zip(source, sorted((root / name).glob("test_data_set_*")), strict=True):
            (got,) = session.run(None, sample.feed)
            wanted = numpy_helper.to_array(onnx.load_tensor(str(folder / "output_0.pb")))
            assert np.asarray(got).tolist() == wanted.tolist()
