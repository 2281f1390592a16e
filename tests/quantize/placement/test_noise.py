"""The noise of plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from requant.quantize import Options, quantize_model
from requant.quantize.placement.noise import Noises
from requant.transforms.int8.plan import Choice, Impl, Plan, Unit


def unit(name: str, op: str, inputs: tuple[str, ...], output: str) -> Unit:
    return Unit(name=name, op=op, nodes=(name,), inputs=inputs, outputs=(output,))


LOOKUP = unit("lookup", "Gather", (), "e")
PRODUCT = unit("product", "MatMul", ("e",), "y")
SHAPE = unit("shape", "Reshape", ("y",), "z")
NOISE = {"e": 0.1, "y": 0.2}


def test_a_lookup_by_index_has_no_input_whose_noise_it_moves() -> None:
    plan = Plan((LOOKUP, PRODUCT, SHAPE), dict.fromkeys(("lookup", "product", "shape"), Choice(Impl.U8)))
    noises = Noises.of(plan, NOISE, {}, {}, {})
    assert [noises.of_tensor(name) for name in ("e", "y", "z")] == [0.1, 0.2, 0.2]
    assert [noises.of_unit(unit, Impl.U8) for unit in plan.units] == [0.1, 0.2, 0.0]


def test_a_unit_that_only_reads_constants_may_stand_beside_a_concat() -> None:
    units = (unit("constant", "Reshape", (), "r"), unit("whole", "Concat", ("x", "r"), "c"))
    noises = Noises.of(Plan(units, dict.fromkeys(("constant", "whole"), Choice(Impl.FLOAT))), {"c": 0.1}, {}, {}, {})
    assert noises.of_unit(units[1], Impl.U8) == 0.0


def test_weights_in_int8_add_their_noise_in_every_form_but_blocks() -> None:
    forms = {Impl.DYNAMIC: {"e": 0.01}}
    noises = Noises.of(Plan((LOOKUP, PRODUCT, SHAPE), {}), NOISE, forms, {}, {"product": 0.4})
    found = {impl: noises.of_unit(PRODUCT, impl) for impl in (Impl.FLOAT, Impl.U8, Impl.DYNAMIC, Impl.BLOCK)}
    assert found == {Impl.FLOAT: 0.0, Impl.U8: pytest.approx(0.6), Impl.DYNAMIC: pytest.approx(0.41), Impl.BLOCK: 0.0}
    assert noises.total == pytest.approx(0.7)
    assert replace(noises, tensors={}).total == pytest.approx(0.41)  # there was time to try products alone
    choices = {"lookup": Choice(Impl.FLOAT), "shape": Choice(Impl.FLOAT)}
    of_plans = [
        noises.of_plan(Plan((LOOKUP, PRODUCT, SHAPE), {**choices, "product": Choice(impl)}))
        for impl in (Impl.FLOAT, Impl.DYNAMIC, Impl.U8_FLOAT)
    ]
    assert of_plans == [0.0, pytest.approx(0.41), pytest.approx(0.5)]  # uint8 rounds `e` besides


def test_a_concat_adds_no_noise_to_tensors_that_have_its_scale() -> None:
    names = ("one", "other", "grown", "whole", "more")
    units = (
        unit("one", "Conv", ("x",), "a"),
        unit("other", "Conv", ("x",), "b"),
        unit("grown", "Resize", ("b",), "g"),
        unit("whole", "Concat", ("a", "g"), "c"),
        unit("more", "Conv", ("c",), "y"),
    )
    plan = Plan(units, dict.fromkeys(names, Choice(Impl.U8)))
    noises = Noises.of(plan, {"x": 0.0, "a": 0.1, "b": 0.2, "c": 0.25, "y": 0.0}, {}, {}, {})
    assert [noises.of_unit(each, Impl.U8) for each in units] == [0.1, 0.2, 0.0, 0.0, 0.0]
    assert noises.of_plan(plan) == pytest.approx(0.3)
    alone = plan.with_choices({name: Choice(Impl.FLOAT) for name in names if name != "grown"})
    assert noises.of_plan(alone) == pytest.approx(0.2)  # the Resize reads and writes uint8, and nothing else does


def test_a_concat_adds_noise_to_a_tensor_with_another_scale() -> None:
    units = (
        unit("one", "Conv", ("x",), "a"),
        unit("whole", "Concat", ("a", "x"), "c"),
        unit("more", "Conv", ("a",), "y"),  # reads `a` too, which has a scale of its own for it
    )
    plan = Plan(units, dict.fromkeys(("one", "whole", "more"), Choice(Impl.U8)))
    noises = Noises.of(plan, {"x": 0.0, "a": 0.1, "c": 0.25}, {}, {}, {})
    assert noises.of_unit(units[1], Impl.U8) == 0.25
    assert noises.of_plan(plan) == pytest.approx(0.35)


@pytest.mark.usefixtures("int8_wins")
def test_a_model_with_embeddings_is_placed(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (int64[1,6] ids) => (float[1,6,16] y) {
      e = Gather(table, ids)
      h = MatMul(e, v)
      y = MatMul(h, w)
    }"""
    proto = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    for name, shape in (("table", (32, 64)), ("v", (64, 64)), ("w", (64, 16))):
        proto.graph.initializer.append(numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name))
    onnx.save(proto, tmp_path / "m.onnx")
    data = [{"ids": random.integers(0, 32, (1, 6))} for _ in range(8)]
    result = quantize_model(tmp_path / "m.onnx", data, tmp_path / "q.onnx", Options())
    assert result.int8_nodes >= 2
    assert result.accuracy.worst_sqnr_db > 20
