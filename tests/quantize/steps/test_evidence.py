"""The evidence: which weights cost accuracy in int8."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import quantize_static

from requant.calibration.execution import Execution
from requant.quantize import Options
from requant.quantize.job import Evidence
from requant.quantize.runtime.progress import silent
from requant.quantize.sensitivity import each_tensor
from requant.quantize.sensitivity.integer_constants import integer_constants
from requant.quantize.sensitivity.switch_model import Constants, Switchboard, constant_switches
from requant.quantize.steps import evidence
from requant.quantize.steps.forecast import forecast
from requant.quantize.steps.prepare import prepare
from requant.quantize.steps.ranges import find_ranges

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[N,8,8,8] x) => (float[N,8,8,8] y) {
      [first] a = Conv<pads = [1, 1, 1, 1]>(x, u)
      [coarse] b = Conv<pads = [1, 1, 1, 1]>(a, v)
      [last] y = Conv<pads = [1, 1, 1, 1]>(b, w)
    }"""


JOINED = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[N,8,8,8] x) => (float[N,8,8,8] y) {
      [first] a = Conv<pads = [1, 1, 1, 1]>(x, u)
      [other] b = Conv<pads = [1, 1, 1, 1]>(x, w)
      [join] c = Concat<axis = 1>(a, b)
      [coarse] y = Conv<pads = [1, 1, 1, 1], group = 2>(c, v)
    }"""

LOGARITHM = TEXT.replace("[last] y =", "[last] c =").replace(
    "\n    }",
    """
      [least] l = Constant<value_float = 0.000001>()
      [square] d = Mul(c, c)
      [positive] e = Max(d, l)
      [bounded] f = Asinh(e)
      [logarithm] y = Log(f)
    }""",
)

CLASSES = (
    TEXT.replace("[last] y =", "[last] c =")
    .replace("(float[N,8,8,8] y)", "(float[N,512] y)")
    .replace(
        "\n    }",
        """
      [flat] d = Flatten(c)
      [sharper] g = Constant<value_float = %s>()
      [sure] e = Mul(d, g)
      [classes] y = Softmax(e)
    }""",
    )
)


def gathered(folder: Path, text: str = TEXT, **options: Any) -> Evidence:
    """Return the evidence of a model whose second convolution has one huge weight for a channel that is always 0."""
    random = np.random.default_rng(0)
    arrays = {name: random.normal(0, 0.2, (8, 8, 3, 3)).astype(np.float32) for name in "uvw"}
    arrays["u"][0] = 0
    arrays["v"][:, 0] = 20  # all other weights of its output channels have steps of 20 / 127
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(proto, folder / "m.onnx")
    np.savez(folder / "d.npz", x=random.normal(size=(16, 8, 8, 8)).astype(np.float32))
    job = prepare(folder / "m.onnx", str(folder / "d.npz"), Options(**options), folder, silent)
    return evidence.gather_evidence(job, find_ranges(job))


def test_the_weights_that_lose_most_by_rounding_have_most_noise(tmp_path: Path) -> None:
    found = gathered(tmp_path, corrections=("means",)).noise_of_weights
    assert set(found) == {"first", "coarse", "last"}
    # an error of 20 / 127 / sqrt(12) beside weights of 0.2: their square, 0.05, within a factor of two
    assert 0.025 < found["coarse"] < 0.1
    assert max(found["first"], found["last"]) < 1e-3


def test_few_constants_are_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all units, with the copies of a session, took eight times the weights of the model."""
    made = integer_constants
    held: list[list[str]] = []

    def kept(*arguments: Any, **options: Any) -> Any:
        held.append([*(found := made(*arguments, **options))])
        return found

    monkeypatch.setattr("requant.quantize.steps.evidence.integer_constants", kept)
    together = gathered(tmp_path, corrections=("means",)).noise_of_weights
    monkeypatch.setattr(each_tensor, "TOGETHER", 2 * 8 * 8 * 3 * 3 * 4)  # bytes of two of the three weights
    assert gathered(tmp_path, corrections=("means",)).noise_of_weights == pytest.approx(together, rel=1e-6)
    assert held == [["first", "coarse", "last"], ["first", "coarse"], ["last"]]


def test_corrections_that_learn_leave_a_part_of_the_noise(tmp_path: Path) -> None:
    rounded, corrected = (
        gathered(tmp_path, corrections=names).noise_of_weights for names in (("means",), ("means", "bias", "rounding"))
    )
    assert corrected == {unit: pytest.approx(evidence.NOISE_LEFT * power) for unit, power in rounded.items()}


def test_low_effort_tries_nothing(tmp_path: Path) -> None:
    assert not gathered(tmp_path, effort="low").noise_of_weights


QUANTIZED = TEXT.replace(
    "\n    }",
    """
      [sum] s = Add(c, x)
      [gate] y = Sigmoid(s)
    }""",
).replace("[last] y =", "[last] c =")


@pytest.mark.parametrize("excluded", [pytest.param(frozenset(), id="all"), pytest.param({"coarse"}, id="one is float")])
def test_tensors_are_tried_where_a_product_is_not_in_integers_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excluded: frozenset[str]
) -> None:
    tried: list[Any] = []

    def spied(*given: Any, **how: Any) -> dict[str, float]:
        tried.append(given)
        return {}

    monkeypatch.setattr(evidence, "sqnr_by_tensor", spied)
    random = np.random.default_rng(0)
    proto = onnx.parser.parse_model(QUANTIZED)
    for name in "uvw":
        array = random.normal(0, 0.2, (8, 8, 3, 3)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(proto, tmp_path / "m.onnx")
    images = random.normal(size=(16, 8, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=images)
    feeds = iter([{"x": images}])
    reader = SimpleNamespace(get_next=lambda: next(feeds, None))
    quantize_static(
        tmp_path / "m.onnx",
        tmp_path / "q.onnx",
        reader,
        op_types_to_quantize=["Conv"],
        nodes_to_exclude=sorted(excluded),
    )
    job = prepare(tmp_path / "q.onnx", str(tmp_path / "d.npz"), Options(), tmp_path, silent)
    assert any(unit.op == "Add" and job.all_int8_plan.impl(unit).int8 for unit in job.all_int8_plan.units)
    evidence.gather_evidence(job, find_ranges(job))
    assert bool(tried) == bool(excluded)
    assert ("try tensors alone" in forecast(job).stages) == bool(excluded)


def test_tensors_that_have_the_scale_of_a_concat_are_tried_too(tmp_path: Path) -> None:
    noise = gathered(tmp_path, JOINED).noise
    assert set(noise) == {"x", "a", "b", "c", "y"}
    assert noise["c"] == pytest.approx(noise["a"] + noise["b"], rel=1e-3)  # the same errors


def test_a_lost_output_has_a_finite_noise(tmp_path: Path) -> None:
    """One infinite noise would make the price of all others 0, so that no plan is quieter than another."""
    found = gathered(tmp_path, LOGARITHM)
    assert found.noise["e"] == 1.0  # its least value becomes 0, whose logarithm is infinite behind an operator, too
    assert 0 < found.noise["a"] < 1.0
    assert "e" in found.kept_float


def test_the_noise_before_a_softmax_does_not_depend_on_how_sure_the_classes_are(tmp_path: Path) -> None:
    """Four samples with probabilities near 0 and 1 say nothing of the order of tensors: their logits do."""
    sure, vague = (gathered(tmp_path, CLASSES % factor).noise for factor in ("10.0", "0.1"))
    assert set(sure) == set(vague) >= {"x", "a", "b"}
    assert {name: sure[name] for name in "xab"} == pytest.approx({name: vague[name] for name in "xab"}, rel=0.01)
    # the channels of an image are balanced, those of rows are not
    assert sure["b"] == pytest.approx(gathered(tmp_path, TEXT).noise["b"], rel=0.1)


GATES = {"GRU": 3, "LSTM": 4}


def recurrent(folder: Path, op: str, outputs: str) -> Evidence:
    """Return the evidence of two layers; a row of the first one's W has a huge weight for an input that is always 0."""
    random, size = np.random.default_rng(0), 256
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        net (float[6,N,24] x) => (float[1,N,{size}] h) {{
          [flat] f = Mul(x, m)
          [coarse] {outputs} = {op}<hidden_size = {size}>(f, w, r)
          axis = Constant<value_ints = [1]>()
          [one] s = Squeeze(a, axis)
          [fine] b, h = {op}<hidden_size = {size}>(s, v, q)
        }}""")
    rows = GATES[op] * size
    shapes = {"w": (1, rows, 24), "r": (1, rows, size), "v": (1, rows, size), "q": (1, rows, size)}
    arrays = {name: random.normal(0, 0.06, shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["w"][..., 0] = 8
    arrays["m"] = np.array([0, *[1] * 23], np.float32)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(proto, folder / "m.onnx")
    samples = [{"x": random.normal(size=(6, 1, 24)).astype(np.float32)} for _ in range(6)]
    job = prepare(folder / "m.onnx", samples, Options(), folder, silent)
    return evidence.gather_evidence(job, find_ranges(job))


@pytest.mark.parametrize("outputs", ["a", "a, c"])
@pytest.mark.parametrize("op", [*GATES])
def test_the_weights_of_recurrent_operators_are_tried_too(tmp_path: Path, op: str, outputs: str) -> None:
    """Nothing learns them, so that all their noise counts, whatever the corrections are."""
    found = recurrent(tmp_path, op, outputs).noise_of_weights
    assert set(found) == {"coarse", "fine"}
    assert found["fine"] < 1e-3
    assert found["coarse"] > 1e-2


@pytest.mark.parametrize(("limit", "apart"), [(None, False), (2**30, False), (4 * 2304, True)])
def test_the_limit_of_memory_bounds_the_weights_of_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, apart: bool
) -> None:
    """Each convolution has 2,304 bytes of weights; a session holds them several times."""
    opened: list[int] = []

    def spied(model: ir.Model, constants: Constants, **how: Any) -> Switchboard:
        opened.append(len(constants))
        return constant_switches(model, constants, **how)

    monkeypatch.setattr(each_tensor, "constant_switches", spied)
    found = gathered(tmp_path, execution=Execution(memory_limit=limit))
    assert opened == ([1, 1, 1] if apart else [3])
    assert set(found.noise_of_weights) == {"first", "coarse", "last"}
