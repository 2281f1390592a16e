"""Temporary files on a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from requant import RequantError
from requant.quantize import bench_model, quantize_model
from requant.system import scratch

DIGITS = Path(__file__).parents[2] / "sample_models" / "digits.onnx"


def test_a_full_disk_for_temporary_files_is_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scratch.check_room()
    monkeypatch.setattr(scratch, "LEAST_ROOM", 2**62)
    with pytest.raises(RequantError, match=rf"{tmp_path}: no space is left for temporary files; set TMPDIR to another"):
        quantize_model(DIGITS, DIGITS.with_suffix(".npz"), tmp_path / "out.onnx")
    with pytest.raises(RequantError, match="no space is left for temporary files"):
        bench_model(DIGITS)
    assert list(tmp_path.iterdir()) == []
