"""Placement of models with operators in control flow that can compute in integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from requant.quantize import Options, quantize_model
from requant.quantize.placement import bodies
from requant.quantize.placement.bodies import FLOAT_BODIES, with_float_bodies
from requant.quantize.placement.facts import facts_of
from requant.quantize.placement.rules import choose_by
from requant.transforms.int8.plan import Impl

BRANCHES = """then_branch = one () => (float[N, 64] a) { [inside] a = MatMul(b, w) },
              else_branch = two () => (float[N, 64] d) { d = Relu(b) }"""
OUTSIDE = "[outside] b = MatMul(x, w)"


def saved(folder: Path, first: str) -> Path:
    """Write a model with a product in the branch of an If."""
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        net (float[N, 64] x, bool c) => (float[N, 64] y) {{
            {first}
            y = If (c) <{BRANCHES}>
        }}""")
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


def feeds() -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal((16, 64)).astype(np.float32), "c": np.array(True)} for _ in range(8)]


def placed(folder: Path, first: str) -> Any:
    return quantize_model(
        saved(folder, first), feeds(), folder / "q.onnx", Options(effort="low", force_int8=True, seconds=0.1)
    )


@pytest.mark.parametrize("slow", ["rules", FLOAT_BODIES])
def test_the_faster_of_both_models_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """The times are given: which one is faster depends on the machine."""

    def timed(sizes: Any, runners: dict[str, Any], seconds: float) -> tuple[list[dict[str, float]], float]:
        assert [*runners] == ["rules", FLOAT_BODIES]
        return [{name: 2.0 if name == slow else 1.0 for name in runners}], 0.0

    monkeypatch.setattr(bodies, "least_milliseconds", timed)
    placement = placed(tmp_path, OUTSIDE).placement
    quick = {"rules": FLOAT_BODIES, FLOAT_BODIES: "rules"}[slow]
    assert (placement.how, placement.chosen, placement.tried) == ("rules", quick, {slow: 2.0, quick: 1.0})
    (choice,) = (node for node in onnx.load(tmp_path / "q.onnx").graph.node if node.op_type == "If")
    inside = [node.op_type for node in choice.attribute[0].g.node]
    assert (inside == ["MatMul"]) == (quick == FLOAT_BODIES)


def test_without_integers_outside_there_is_one_plan(tmp_path: Path) -> None:
    placement = placed(tmp_path, "b = Relu(x)").placement
    assert (placement.how, placement.tried, placement.chosen) == ("rules", {}, "")
    assert placement.why == "operators in the control flow of the model may be int8, and their costs are not known"


def test_units_in_bodies_become_float_with_a_reason(tmp_path: Path) -> None:
    model = ir.load(saved(tmp_path, OUTSIDE))
    plan = choose_by(facts_of(model), model)
    assert all(plan.choices[name].impl.int8 for name in ("inside", "outside"))
    found = with_float_bodies(model, plan).choices
    assert found["outside"] == plan.choices["outside"]
    assert (found["inside"].impl, found["inside"].reason.code) == (Impl.FLOAT, "slower-in-body")
