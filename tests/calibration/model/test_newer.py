"""Models newer than the runtime: lowered where every operator means the same in the older opset, else refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant import RequantError
from requant.calibration.model import newer
from requant.calibration.model.newer import lower, lower_message, newest_ir_version, newest_opset, same_definition
from requant.calibration.model.session import Serialized, open_session
from requant.quantize import Options, quantize_model
from requant.transforms.inline_functions import inline_functions

UNKNOWN = onnx.defs.onnx_opset_version() + 1
LONG = 400  # characters of a refusal
knows = pytest.mark.skipif(UNKNOWN <= 28, reason="the installed onnx does not know opset 28")

HEAD = '<ir_version: 8, opset_import: ["" : {opset}]> g (float[2,4] x) => (float[?,?] y) '
BODIES = """<ir_version: 8, opset_import: ["" : {opset}, "own" : 1]> g (float[2,4] x, bool b) => (float[?,?] y) {{
    c = Cast <to = 1> (x)
    t = own.Twice (c)
    y = If (b) <
        then_branch = th () => (float[?,?] u) {{ u = Einsum <equation = "ij->ji"> (t) }},
        else_branch = el () => (float[?,?] v) {{ v = Transpose (t) }}
    >
}}
<domain: "own", opset_import: ["" : {opset}]> Twice (a) => (o) {{ o = Add (a, a) }}"""

SEVERAL = "{{ a = Mod(x, x) b = BitShift(x, x) c = SpaceToDepth <blocksize = 2> (x) y = SwiGLU(a, b) }}"


def parsed(text: str, opset: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(text.format(opset=opset))


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runtime load opsets up to 26 and IR versions up to 7."""
    monkeypatch.setattr(newer, "newest_opset", lambda: 26)
    monkeypatch.setattr(newer, "newest_ir_version", lambda: 7)


def test_the_limits_are_what_the_runtime_loads() -> None:
    for version, fits in ((newest_ir_version(), True), (newest_ir_version() + 1, False)):
        made = parsed(HEAD + "{{ y = Relu(x) }}", 13)
        made.ir_version = version
        assert loads(made) == fits
    for opset, fits in ((newest_opset(), True), (newest_opset() + 1, False)):
        assert loads(parsed(HEAD + "{{ y = Relu(x) }}", opset)) == fits


def loads(model: onnx.ModelProto) -> bool:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - the runtime's exceptions have no common base class
        return False
    return True


@knows
@pytest.mark.parametrize("opset", [27, 28])
def test_a_model_of_a_newer_opset_is_lowered_with_its_bodies_and_functions(opset: int, older: None) -> None:
    model = parsed(BODIES, opset)
    expected = parsed(BODIES, 26)
    expected.ir_version = 7
    as_ir = ir.from_proto(model)
    lower(as_ir)
    assert as_ir.ir_version == 7
    assert (as_ir.opset_imports, [f.opset_imports for f in as_ir.functions.values()]) == (
        {"": 26, "own": 1},
        [{"": 26}],
    )
    lower_message(model)
    assert onnx.printer.to_text(model) == onnx.printer.to_text(expected)


def test_a_model_that_is_old_enough_stays(older: None) -> None:
    model = parsed(BODIES, 21)
    model.ir_version = 7
    before = model.SerializeToString()
    lower_message(model)
    assert model.SerializeToString() == before


@knows
@pytest.mark.parametrize(
    ("opset", "body", "names"),
    [
        pytest.param(27, "{{ y = Range(x, x, x) }}", "Range", id="changed"),
        pytest.param(28, "{{ y = SwiGLU(x, x) }}", "SwiGLU", id="new"),
        pytest.param(28, SEVERAL, "BitShift, Mod, SpaceToDepth and 1 more", id="several"),
    ],
)
def test_a_changed_operator_is_refused_in_one_line(opset: int, body: str, names: str, older: None) -> None:
    model = parsed(HEAD + body, opset)
    with pytest.raises(
        RequantError, match=rf"loads opset 26, .*opset {opset} has: {names}; install a newer onnxr"
    ) as one:
        lower_message(model)
    assert "\n" not in str(one.value)
    assert len(str(one.value)) <= LONG
    with pytest.raises(RequantError, match=f"has: {names};"):
        lower(ir.from_proto(model))


@knows
def test_a_changed_operator_in_a_function_is_refused(older: None) -> None:
    text = BODIES.replace("Add (a, a)", "Mod (a, a)")
    with pytest.raises(RequantError, match="opset 28 has: Mod;"):
        lower_message(parsed(text, 28))


def test_an_opset_that_onnx_does_not_know_is_refused(tmp_path: Path) -> None:
    model = parsed(HEAD + "{{ y = Relu(x) }}", UNKNOWN)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(RequantError, match=rf"m\.onnx: .*the model is of opset {UNKNOWN}, which neither knows;") as one:
        open_session(tmp_path / "m.onnx")
    assert "\n" not in str(one.value)
    assert len(str(one.value)) - len(str(tmp_path)) <= LONG


@knows
@pytest.mark.parametrize("form", ["file", "bytes", "serialized"])
@pytest.mark.parametrize("opset", [27, 28])
def test_a_session_opens_whatever_the_runtime_knows(opset: int, form: str, tmp_path: Path) -> None:
    data = parsed(BODIES.replace("Cast <to = 1>", "Identity"), opset).SerializeToString()  # opset 24 changed Cast
    (tmp_path / "m.onnx").write_bytes(data)
    session = open_session({"file": tmp_path / "m.onnx", "bytes": data, "serialized": Serialized(data)}[form])
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for flag in (True, False):
        (y,) = session.run(None, {"x": x, "b": np.array(flag)})
        assert np.array_equal(y, 2 * x.T)


@knows
def test_a_written_model_is_not_newer_than_the_runtime(
    int8_wins: None, older: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(newer, "newest_opset", lambda: 22)  # every supported runtime loads it
    text = HEAD.replace("[2,4]", "[2,64]") + "<float[64,8] w> {{ t = MatMul (x, w) y = Relu (t) }}"
    model = parsed(text, 28)
    weight = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    model.graph.initializer.extend([onnx.numpy_helper.from_array(weight, "w")])
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(1).normal(size=(8, 2, 64)).astype(np.float32))
    quantize_model(tmp_path / "m.onnx", tmp_path / "d.npz", tmp_path / "q.onnx", Options(place="all", force=True))
    written = onnx.load(tmp_path / "q.onnx")
    assert {each.version for each in written.opset_import if not each.domain} == {22}
    assert written.ir_version == 7


@knows
@pytest.mark.parametrize(
    ("operator", "versions", "same"),
    [
        ("Relu", (28, 26), True),  # no new version
        ("Cast", (28, 26), True),  # more types
        ("Cast", (28, 23), False),  # opset 24 gave it an attribute
        ("Transpose", (28, 23), True),  # other words
        ("QuantizeLinear", (28, 23), True),
        ("QuantizeLinear", (28, 21), False),  # opset 23 gave it an attribute
        ("ReduceLogSum", (28, 26), True),  # fewer types
        ("Range", (28, 26), False),
        ("SwiGLU", (28, 26), False),  # new
        ("Mod", (28, 27), False),
        ("Attention", (24, 23), False),
    ],
)
def test_a_definition_is_the_same_unless_more_than_its_types_changed(
    operator: str, versions: tuple[int, int], same: bool
) -> None:
    assert same_definition(operator, versions) == same


def test_a_function_of_an_unknown_opset_is_not_inlined() -> None:
    text = BODIES.replace('"own", opset_import: ["" : {opset}]', f'"own", opset_import: ["" : {UNKNOWN}]')
    model = ir.from_proto(parsed(text, 21))
    assert inline_functions(model).skipped == {"other-opset": 1}
