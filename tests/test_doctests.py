"""The examples in docstrings give the results that they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    f"requant.{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}"
    for folder in ("calibration", "quantize", "transforms")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed


def test_every_public_method_of_the_calibrator_has_an_example() -> None:
    from requant.calibration import Calibrator

    public = [*(name for name in vars(Calibrator) if not name.startswith("_")), "__iter__", "__getitem__"]
    methods = [vars(Calibrator)[name] for name in public if callable(vars(Calibrator)[name])]
    assert len(methods) >= 6
    assert all(">>> " in (method.__doc__ or "") for method in methods)
