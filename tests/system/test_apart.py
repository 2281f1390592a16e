"""Outputs that would overwrite an input, or each other, are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from requant import RequantError
from requant.system.apart import check_apart


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.onnx", "digits.npz", "reader.py", "a:b.npz"):
        Path(name).write_bytes(b"x")
    Path("photos").mkdir()
    Path("link.npz").symlink_to("digits.npz")


@pytest.mark.parametrize(
    ("output", "named"),
    [
        ("model.onnx", "model.onnx"),
        ("./model.onnx", "model.onnx"),
        ("digits.npz", "digits.npz:calib"),
        ("link.npz", "digits.npz:calib"),
        ("reader.py", "reader.py:samples"),
        ("a:b.npz", "a:b.npz"),
    ],
)
def test_an_output_that_is_an_input_is_refused(output: str, named: str) -> None:
    inputs = ["model.onnx", "digits.npz:calib", "reader.py:samples", "a:b.npz", "photos", "none.npz:calib", "\0", ""]
    with pytest.raises(RequantError, match=f"^{output}: --log would overwrite the input '{named}'; choose another"):
        check_apart({"--output": "new.onnx", "--log": output}, inputs)


def test_two_outputs_need_two_files() -> None:
    with pytest.raises(RequantError, match=r"^\./x: --junit and --markdown are one file"):
        check_apart({"--markdown": "x", "--junit": "./x"}, [])


def test_other_outputs_are_left_alone() -> None:
    """A folder of data may hold an output, and a file that another option names without a path is none."""
    check_apart(
        {"--output": "photos/q.onnx", "--log": "calib", "--report": "bad\0name"}, ["photos", "x:calib", "bad\0"]
    )
