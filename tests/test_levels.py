"""An INT8 model at each optimization level of the runtime gives the outputs that docs/deploy.md says."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from requant.quantize import quantize_model

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
versions = importlib.import_module("benchmarks.versions")
runner = importlib.import_module("benchmarks.versions_run")
sys.path.remove(str(ROOT))

LEVELS = [level for level in runner.LEVELS if runner.level_of(level) is not None]
DIGITS = ROOT / "sample_models" / "digits.npz"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the outputs of a form of ``digits`` at each level, as `versions.compare` wants them."""
    folder = tmp_path_factory.mktemp("levels")
    with np.load(DIGITS) as file:
        feed = {"image": file["image"][: versions.IMAGES]}

    @cache
    def run(form: str, *, exact: bool = False) -> dict[str, Any]:
        path = ROOT / "sample_models" / "digits.onnx"
        if form != "float":
            options, needs_data = versions.FORMS[form]
            options = replace(options, samples=16 if needs_data else None, force=True)
            quantize_model(path, f"{DIGITS}:calib" if needs_data else None, path := folder / f"{form}.onnx", options)
        if exact:
            onnx.save(with_float_blocks(onnx.load(path)), path := folder / f"{form}-exact.onnx")
        return {f"digits-{form}|{level}": runner.run(path, runner.level_of(level), feed, "") for level in LEVELS}

    return run


@pytest.mark.parametrize("form", ["static", "dynamic", "block", "weight-only"])
def test_levels_change_less_than_rounding_does(form: str, outputs: Any) -> None:
    table = versions.levels_of({**outputs("float"), **outputs(form)})
    found = {level: row[f"digits-{form}"] for level, row in table.items()}
    assert set(found) == {*LEVELS} - {"off"}
    assert str(found["basic"]) == "equal"
    assert {level: one for level, one in found.items() if not one.good} == {}


def with_float_blocks(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose products in blocks may not round their activations."""
    for node in model.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)
    return model


def test_blocks_are_computed_in_integers_where_the_runtime_optimizes(outputs: Any) -> None:
    rounded, exact = outputs("block"), outputs("block", exact=True)
    assert (rounded["digits-block|extended"] != exact["digits-block|extended"]).any()
    assert np.allclose(rounded["digits-block|extended"], exact["digits-block|extended"], atol=0.1)
