"""Models with denormal weights: INT8 is compared with a float model that they do not slow down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from requant.calibration.checks.denormals import SLOWER, denormal_shares, slow_here
from requant.calibration.checks.findings import findings
from requant.calibration.data.samples import Sample
from requant.calibration.model.session import Serialized
from requant.calibration.statistics.observations import Observations
from requant.quantize import Options, quantize_model
from requant.quantize.model.files import load_model
from requant.quantize.runtime.progress import silent
from requant.quantize.steps import reference
from requant.quantize.steps.prepare import prepare
from requant.quantize.steps.reference import FLUSHED, SLOW, WIDENED, reference_of
from requant.transforms import run
from requant.transforms.flush_denormals import count_denormals, denormals_in

TINY = float(np.finfo(np.float32).tiny)
TEXT = """<ir_version: 8, opset_import: ["" : 17]> net (float[N, 64] x) => (float[N, 64] y) {
    [first] a = MatMul (x, v)
    [act] b = Relu (a)
    [last] y = MatMul (b, w)
}"""


def saved(folder: Path, share: float) -> Path:
    """Write a model in which this share of the weights of the first product is denormal."""
    rng = np.random.default_rng(2)
    v, w = (rng.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    v[rng.random(v.shape) < share] *= np.float32(1e-39)
    proto = onnx.parser.parse_model(TEXT)
    proto.graph.initializer.extend([numpy_helper.from_array(v, "v"), numpy_helper.from_array(w, "w")])
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


def feeds() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [{"x": rng.standard_normal((2, 64)).astype(np.float32)} for _ in range(4)]


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_the_float_model_to_compare_with_has_no_denormal_weights(share: float, tmp_path: Path) -> None:
    path = saved(tmp_path, share)
    job = prepare(path, feeds(), Options(), tmp_path, silent)
    told = [note for note in job.notes if "1 weight tensors have denormal values" in note]
    assert bool(told) == bool(share)
    if not share:
        assert job.reference == path
        return
    assert isinstance(job.reference, Serialized)
    for source in (job.reference, job.float_source):
        assert isinstance(source, Serialized)
        weights = onnx.load_model_from_string(source.data).graph.initializer
        assert [denormals_in(numpy_helper.to_array(each)) for each in weights] == [0, 0]


def test_a_model_that_must_be_widened_is_compared_without_denormals_too(tmp_path: Path) -> None:
    """bfloat16 has the exponents of float32, so that its denormals are those of float32."""
    proto = onnx.load(saved(tmp_path, 0.25))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    for tensor in proto.graph.initializer:
        halves = (numpy_helper.to_array(tensor).view(np.uint32) >> 16).astype(np.uint16)
        name, shape = tensor.name, tuple(tensor.dims)
        tensor.CopyFrom(onnx.helper.make_tensor(name, onnx.TensorProto.BFLOAT16, shape, halves.tobytes(), raw=True))
    onnx.save(proto, tmp_path / "m.onnx")
    source, notes = reference_of(tmp_path / "m.onnx", load_model(tmp_path / "m.onnx"), tmp_path)
    assert notes == [WIDENED, FLUSHED.format(1, SLOW if slow_here() else "")]
    assert isinstance(source, Serialized)
    weights = [numpy_helper.to_array(each) for each in onnx.load_model_from_string(source.data).graph.initializer]
    floats = [each for each in weights if each.dtype == np.float32]
    assert len(floats) == 2
    assert [denormals_in(each) for each in floats] == [0, 0]


@pytest.mark.usefixtures("int8_wins")
def test_the_outputs_are_those_of_the_given_model(tmp_path: Path) -> None:
    result = quantize_model(saved(tmp_path, 0.1), feeds(), tmp_path / "q.onnx", Options(place="rules", seconds=0.01))
    assert result.accuracy.worst_sqnr_db > 30
    assert any("denormal values" in note for note in result.notes)


def test_zeros_keep_their_sign_and_the_smallest_normal_number_stays() -> None:
    values = np.array([1e-40, -1e-40, TINY, -TINY, np.nextafter(np.float32(TINY), np.float32(0)), 0, -0.0], np.float32)
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N,1] x) => (float[N,7] y) { y = Mul (x, w) }'
    )
    model.graph.register_initializer(ir.Value(name="w", const_value=ir.tensor(values, name="w")))
    for node in model.graph:
        node.replace_input_with(1, model.graph.initializers["w"])
    flushed = run("flush_denormals", model).model.graph.initializers["w"].const_value
    assert flushed is not None
    expected = np.array([0, -0.0, TINY, -TINY, 0, 0, -0.0], np.float32)
    np.testing.assert_array_equal(flushed.numpy(), expected)
    np.testing.assert_array_equal(np.signbit(flushed.numpy()), np.signbit(expected))


def test_an_external_tensor_without_denormals_stays_in_its_file(tmp_path: Path) -> None:
    model = ir.load(saved(tmp_path, 0.25))
    ir.save(model, tmp_path / "apart.onnx", external_data="apart.data")
    flushed = run("flush_denormals", ir.load(tmp_path / "apart.onnx"), check=False)
    weights = flushed.model.graph.initializers
    assert flushed.applied[0].change.applied == 1
    assert isinstance(weights["w"].const_value, ir.ExternalTensor)
    assert weights["v"].const_value is not None
    assert count_denormals(weights["v"].const_value) == 0


def test_a_large_weight_is_flushed_when_it_is_read() -> None:
    weights = np.full((1024, 512), 1e-40, np.float32)
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N,1024] x) => (float[N,512] y) { y = MatMul (x, w) }'
    model = ir.from_onnx_text(text)
    model.graph.register_initializer(ir.Value(name="w", const_value=ir.tensor(weights, name="w")))
    model.graph.node(0).replace_input_with(1, model.graph.initializers["w"])
    flushed = run("flush_denormals", model).model.graph.initializers["w"].const_value
    assert isinstance(flushed, ir.LazyTensor)
    assert not flushed.numpy().any()


def test_weights_of_float16_stay() -> None:
    """The smallest float16 is 6e-8, a normal number in the float32 in which the model is computed."""
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float16[N,1] x) => (float16[N,2] y) { y = Mul (x, w) }'
    model = ir.from_onnx_text(text)
    model.graph.register_initializer(
        ir.Value(name="w", const_value=ir.tensor(np.array([6e-8, 1], np.float16), name="w"))
    )
    model.graph.node(0).replace_input_with(1, model.graph.initializers["w"])
    done = run("widen_floats flush_denormals", model)
    assert [result.change.applied > 0 for result in done.applied] == [True, False]
    (weights,) = (value.const_value for value in done.model.graph.initializers.values())
    assert weights is not None
    assert weights.numpy()[0] > 0


@pytest.mark.parametrize("slow", [False, True], ids=["as fast", "slow"])
def test_only_a_slow_cpu_is_called_slow(slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "slow_here", lambda: slow)
    _, (note,) = reference_of(saved(tmp_path, 0.25), load_model(tmp_path / "m.onnx"), tmp_path)
    assert (SLOW in note, "Intel" in note) == (slow, False)
    monkeypatch.setattr("requant.calibration.checks.findings.slow_here", lambda: slow)
    (told,) = findings(Observations(), denormal={"x": 0.5})
    assert told.severity == ("warning" if slow else "note")
    assert ("set_denormal_as_zero" in told.message) == slow


def test_whether_a_cpu_is_slow_is_the_ratio_of_two_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio in (1, SLOWER - 1, SLOWER + 1):
        times = iter([[ratio * 1e-6], [1e-6]])
        monkeypatch.setattr("timeit.repeat", lambda *_, times=times, **__: next(times))
        assert slow_here.__wrapped__() == (ratio > SLOWER)


def test_denormal_activations_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requant.calibration.checks.findings.slow_here", lambda: True)
    path = saved(tmp_path, 0.0)
    x = np.ones((2, 64), np.float32)
    x[:, :16], x[:, 16:20] = 1e-40, 0
    shares = denormal_shares(path, ["x", "a", "no such tensor"], [Sample({"x": x}, None, "sample 0")])
    assert shares == {"x": 0.25}
    (told,) = findings(Observations(), denormal=shares)
    assert (told.kind, told.name, told.severity) == ("denormal", "x", "warning")
    assert "25.0% of 'x'" in told.message
    assert findings(Observations(), denormal={"x": 1e-4}) == ()
