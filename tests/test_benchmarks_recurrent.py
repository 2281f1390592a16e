"""The benchmark of the forms of an LSTM or GRU, with layers of a few weights."""

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
recurrent = importlib.import_module("benchmarks.recurrent")
sys.path.remove(str(ROOT))


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize(("op", "direction"), [("LSTM", "forward"), ("GRU", "bidirectional")])
def test_forms_are_timed_at_each_size(op: str, direction: str) -> None:
    arguments = ["--op", op, "--direction", direction, "--states", "8", "--items", "1,2", "--steps", "3"]
    done = CliRunner().invoke(recurrent.main, [*arguments, "--seconds", "0.1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found) == ["8, 1", "8, 2"]
    for row in found.values():
        assert list(row) == ["float", *recurrent.FORMS]
        assert min(row.values()) > 0


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--op", "RNN"], "no operator 'RNN'"), (["--items", "a"], "numbers with commas")]
)
def test_other_operators_and_sizes_are_refused(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(recurrent.main, arguments)
    assert done.exit_code == 2
    assert message in done.stderr
