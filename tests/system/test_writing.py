"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from requant import RequantError
from requant.system.writing import write_atomically


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for data in (b"one", b"two"):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_writing_follows_links_and_keeps_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "target")
    write_atomically(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "target").read_bytes() == b"x"
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "folder" / "target").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_failed_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RequantError, match=r"f: cannot be written: No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_writing_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequantError, match=r"none/f: cannot be written: No such file"):
        write_atomically(tmp_path / "none" / "f", b"")
