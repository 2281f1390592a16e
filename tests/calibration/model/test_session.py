"""Sessions: what a model wants, and every way of failing to load in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from requant import RequantError
from requant.calibration import InputSpec, Serialized, input_specs, open_session
from requant.calibration.model.session import LONGEST_MESSAGE, runtime_message

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 3] x, int64[N, 2, ?] ids, string[N] names, bool flag) => (float[N, 3] y)
<float[3] w = {1, 2, 3}> {
    a = Mul(x, w)
    b = Relu(a)
    c = Identity(b)
    y = Add(c, w)
}"""


def binary(model: str | ir.Model) -> bytes:
    parsed = ir.from_onnx_text(model) if isinstance(model, str) else model
    return bytes(ir.to_proto(parsed).SerializeToString())


def test_input_specs() -> None:
    assert input_specs(open_session(binary(MODEL))) == (
        InputSpec("x", np.dtype(np.float32), ("N", 3)),
        InputSpec("ids", np.dtype(np.int64), ("N", 2, None)),
        InputSpec("names", np.dtype(np.str_), ("N",)),
        InputSpec("flag", np.dtype(np.bool_), ()),
    )


@pytest.mark.parametrize("ir_version", [3, 8])
def test_initializers_among_the_inputs_are_not_required(ir_version: int) -> None:
    model = f"""<ir_version: {ir_version}, opset_import: ["" : 11]>
    g (float[N, 2] x, float[2] w) => (float[N, 2] y) <float[2] w = {{1, 2}}> {{ y = Add(x, w) }}"""
    assert [spec.name for spec in input_specs(open_session(binary(model)))] == ["x"]


def test_input_that_arrays_cannot_feed() -> None:
    model = """<ir_version: 8, opset_import: ["" : 17]>
    g (seq(float[N]) x, int64 i) => (float[N] y) { y = SequenceAt(x, i) }"""
    with pytest.raises(RequantError, match=r"input 'x' is seq\(tensor\(float\)\); arrays cannot be fed"):
        input_specs(open_session(binary(model)))


def test_options_reach_the_runtime(tmp_path: Path) -> None:
    optimized = tmp_path / "optimized.onnx"
    session = open_session(binary(MODEL), threads=1, optimize=False, profile=tmp_path / "run", save_optimized=optimized)
    options = session.get_session_options()
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert (options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level) == (1, 1, 4)
    profile = Path(session.end_profiling())
    assert profile.parent == tmp_path
    assert profile.name.startswith("run")
    assert json.loads(profile.read_text())
    assert len(ir.load(optimized).graph) == 4
    open_session(binary(MODEL), save_optimized=optimized)
    assert len(ir.load(optimized).graph) < 4


def test_lean_sessions_pack_nothing() -> None:
    options = open_session(binary(MODEL), lean=True).get_session_options()
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    assert options.graph_optimization_level.name == "ORT_ENABLE_EXTENDED"
    options = open_session(binary(MODEL), lean=True, optimize=False).get_session_options()
    assert options.graph_optimization_level.name == "ORT_DISABLE_ALL"


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def external(folder: Path) -> Path:
    model = ir.from_onnx_text(MODEL)
    big = ir.Tensor(np.ones((100, 100), np.float32), name="big")
    model.graph.register_initializer(
        ir.Value(name="big", const_value=big, type=ir.TensorType(big.dtype), shape=big.shape)
    )
    node = ir.node("MatMul", [model.graph.initializers["big"], model.graph.initializers["big"]])
    node.outputs[0].name = "z"
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    ir.save(model, folder / "m.onnx", external_data="m.data", size_threshold_bytes=1000)
    return folder / "m.onnx"


UNKNOWN_OP = '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { y = Blur(x) }'
OLD = '<ir_version: 3, opset_import: ["" : 5]> g (float[N] x) => (float[N] y) { y = Relu(x) }'
NO_KERNEL = '<ir_version: 8, opset_import: ["" : 17]> g (bfloat16[N] x) => (bfloat16[N] y) { y = Sin(x) }'


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("m.onnx", b"hello, world", "not an ONNX model, or a truncated one|not a valid ONNX model"),
        (
            "m.onnx",
            b"",
            "not an ONNX model: the file is empty|not a valid ONNX model|the runtime cannot load the model: ModelProto does not have a graph",
        ),
        ("m.onnx", binary(MODEL)[:-20], "not an ONNX model, or a truncated one"),
        ("m.onnx", binary(UNKNOWN_OP), "the runtime rejects the graph: .*Blur"),
        ("m.onnx", binary(UNKNOWN_OP.replace("Blur", "Conv")), "the runtime rejects the graph: .*Conv"),
        (
            "m.onnx",
            binary(NO_KERNEL),
            r"an operator has no CPU kernel: .*Sin|the runtime rejects the graph: .*bfloat16",
        ),
        ("m.onnx", binary(OLD), "opset 5 is older than 7, .* 'requant transform' .*with convert_opset .*: .*Relu"),
    ],
    ids=["text", "empty", "truncated", "operator", "invalid", "kernel", "old"],
)
@pytest.mark.parametrize("from_file", [True, False], ids=["file", "bytes"])
def test_models_that_cannot_be_loaded(
    tmp_path: Path, name: str, data: bytes, problem: str, from_file: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / name, data)
    start = str(path) if from_file else "the model"
    with pytest.raises(RequantError, match=rf"^{start}: ({problem})") as caught:
        open_session(path if from_file else data)
    assert "\n" not in str(caught.value)
    assert "ONNXRuntimeError" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequantError, match=r"none.onnx: no such file$"):
        open_session(tmp_path / "none.onnx")
    with pytest.raises(RequantError, match="is a folder, not a model"):
        open_session(tmp_path)
    path = external(tmp_path)
    open_session(path)
    (tmp_path / "m.data").write_bytes(b"short")
    with pytest.raises(RequantError, match=r"m.onnx: the runtime cannot load the model: .*big.*file_length: 5"):
        open_session(path)
    (tmp_path / "m.data").unlink()
    with pytest.raises(RequantError, match=r"m.onnx: the runtime cannot load the model: .*m\.data") as caught:
        open_session(path)
    assert "\n" not in str(caught.value)
    assert ".cc:" not in str(caught.value)  # a line of the runtime's source tells the user nothing


def test_external_data_of_bytes_is_looked_for_in_the_folder(tmp_path: Path) -> None:
    data = external(tmp_path).read_bytes()
    open_session(Serialized(data, tmp_path))
    for source in (data, Serialized(data)):
        with pytest.raises(RequantError, match=r"^the model: .*m\.data"):
            open_session(source)


def test_long_names_in_an_error_are_cut() -> None:
    """The expressions that clean a message take quadratic time."""
    told = runtime_message(RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : {'a' * 10**6} is no operator"))
    assert told.startswith("aaa")
    assert told.endswith("is no operator")
    assert len(told) <= LONGEST_MESSAGE + 5
