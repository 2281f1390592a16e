"""The benchmark of a decoder's integer forms, with layers of a few weights."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from .native import needs_library

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
decoder = importlib.import_module("benchmarks.decoder")
sys.path.remove(str(ROOT))


@pytest.mark.slow
@needs_library
def test_forms_are_timed_at_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"WIDTH": 64, "HEADS": 4, "GROUPS": 2, "INNER": 128}.items():
        monkeypatch.setattr(decoder, name, size)
    arguments = ["--layers", "1", "--forms", "static-float,block-8-32,native", "--past", "4", "--prompt", "8"]
    done = CliRunner().invoke(decoder.main, [*arguments, "--seconds", "0.2", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["layers"] == 1
    assert list(found["forms"]) == ["float", "static-float", "block-8-32", "native"]
    for row in found["forms"].values():
        assert row["8 tokens/s"] == pytest.approx(8e3 / row["8 ms"] / decoder.LAYERS)
        assert row["1 tokens/s"] == pytest.approx(1e3 / row["1 ms"] / decoder.LAYERS)
    assert found["forms"]["block-8-32"]["mb"] < found["forms"]["float"]["mb"]


@pytest.mark.slow
@needs_library
def test_a_cache_in_bytes_is_timed_beside_one_of_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"WIDTH": 64, "HEADS": 4, "GROUPS": 2, "INNER": 128}.items():
        monkeypatch.setattr(decoder, name, size)
    arguments = ["--fused", "--layers", "1", "--forms", "native,native-cache", "--past", "4", "--prompt", "8"]
    done = CliRunner().invoke(decoder.main, [*arguments, "--seconds", "0.2", "--json"])
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)["forms"]) == ["float", "native", "native-cache"]


def test_unknown_forms_are_refused() -> None:
    done = CliRunner().invoke(decoder.main, ["--forms", "block-2-32"])
    assert done.exit_code == 2
    assert "no form 'block-2-32'" in done.stderr
