"""Images that become pixels of uint8: with the library, without it, and before; on every instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from requant import NATIVE_DOMAIN
from requant.calibration.model.session import open_session
from requant.quantize import Options, quantize_model
from requant.quantize.kernels.pixels import wrap_pixels

from ...native import needs_library

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N, {channels}, H, W] x) => ({result} y{more})
<float s = {{{scale}}}, {zero_type} z = {{{zero}}}> {{
    [image] q = QuantizeLinear (x, s, z)
    [turn] y = Transpose <perm = [{order}]> (q)
}}"""
NHWC = "0, 2, 3, 1"


def model(channels: int = 3, scale: float = 0.01, zero: int = 100, **other: str) -> ir.Model:
    """Return a model that quantizes an image and turns it; `other` replaces parts of its text."""
    parts = {"order": NHWC, "zero_type": "uint8", "result": f"uint8[N, H, W, {channels}]", "more": "", **other}
    return ir.from_onnx_text(TEXT.format(channels=channels, scale=f"{scale:.9g}", zero=zero, **parts))


def wrapped(made: ir.Model) -> int:
    """Wrap the images of a model."""
    (x,) = made.graph.inputs
    assert x.shape is not None
    return wrap_pixels(made, {"x": ("N", x.shape[1] if isinstance(x.shape[1], int) else None, "H", "W")})


def bytes_of(made: ir.Model) -> bytes:
    """Return a model as bytes."""
    return bytes(ir.to_proto(made).SerializeToString())


@needs_library
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 20), st.integers(1, 30)),
    scale=st.floats(2**-10, 8, width=32),
    zero=st.integers(0, 255),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_operator_computes_what_its_body_does(
    isa: str, size: tuple[int, int, int, int], scale: float, zero: int, threads: int, seed: int
) -> None:
    del isa
    random = np.random.default_rng(seed)
    x = (random.uniform(-300, 300, size) * scale).astype(np.float32)
    x[random.random(size) < 0.1] = scale / 2  # rounded to even
    x[random.random(size) < 0.05] = np.inf
    x[random.random(size) < 0.05] = -1e38
    made = model(size[1], scale, zero)
    (before,) = ort.InferenceSession(bytes_of(made), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    assert wrapped(made) == 1
    (call,) = made.graph
    assert (call.domain, call.op_type) == (NATIVE_DOMAIN, "Quantize")
    for opened in (
        ort.InferenceSession(bytes_of(made), providers=["CPUExecutionProvider"]),
        open_session(bytes_of(made), threads=threads),
    ):
        np.testing.assert_array_equal(opened.run(None, {"x": x})[0], before)


@needs_library
def test_an_image_of_several_tasks(isa: str) -> None:
    del isa
    x = np.random.default_rng(0).uniform(-1, 1, (2, 3, 111, 223)).astype(np.float32)
    made = model()
    wrapped(made)
    (found,) = open_session(bytes_of(made), threads=2).run(None, {"x": x})
    wanted = np.clip(np.rint(x / np.float32(0.01)) + 100, 0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(found, wanted)


LEFT: dict[str, dict[str, Any]] = {
    "more channels": {"channels": 4},
    "another order": {"order": "0, 3, 2, 1", "result": "uint8[N, W, H, 3]"},
    "signed integers": {"zero_type": "int8", "result": "int8[N, H, W, 3]"},
    "a scale that overflows": {"scale": 1e30},
    "another reader": {"more": ", uint8[N, 3, H, W] q"},
}


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT)
def test_other_images_are_left_alone(case: dict[str, Any]) -> None:
    made = model(**case)
    before = bytes_of(made)
    assert wrapped(made) == 0
    assert bytes_of(made) == before


@needs_library
def test_an_image_that_comes_in_nhwc_is_quantized_as_it_is_without_a_transpose(tmp_path: Path) -> None:
    made = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17]>
    net (float[N, H, W, 3] x) => (uint8[N, H, W, 3] y) <float s = {0.01}, uint8 z = {100}> {
        turned = Transpose <perm = [0, 3, 1, 2]> (x)
        q = QuantizeLinear (turned, s, z)
        y = Transpose <perm = [0, 2, 3, 1]> (q)
    }""")
    assert wrap_pixels(made, {"turned": ("N", 3, "H", "W")}) == 0
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(bytes_of(made), options, providers=["CPUExecutionProvider"])
    assert [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node] == ["QuantizeLinear"]


@needs_library
@pytest.mark.parametrize("shape", [(1, 4, 4, 4), (3, 4, 4)], ids=["channels", "axes"])
def test_other_images_are_refused(shape: tuple[int, ...]) -> None:
    made = model()
    wrapped(made)
    proto = ir.to_proto(made)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(Exception, match=r"ai\.requant\.Quantize: x must"):
        open_session(proto.SerializeToString()).run(None, {"x": np.zeros(shape, np.float32)})


@needs_library
def test_a_quantized_model_begins_with_the_operator(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[N, 3, 16, 16] x) => (float[N, 8, 14, 14] y) { [conv] y = Conv (x, w, b) }"""
    random = np.random.default_rng(0)
    tensors = {"w": random.normal(size=(8, 3, 3, 3)), "b": random.normal(size=8)}
    made = ir.from_onnx_text(text, initializers=[ir.tensor(t.astype(np.float32), name=n) for n, t in tensors.items()])
    ir.save(made, tmp_path / "m.onnx")
    feeds = [{"x": random.normal(size=(2, 3, 16, 16)).astype(np.float32)} for _ in range(4)]
    found = {}
    for kernels in ("native", "stock"):
        asked = Options(place="all", force_int8=True, seconds=0.01, force=True, kernels=kernels)
        quantize_model(tmp_path / "m.onnx", feeds, tmp_path / "q.onnx", asked)
        found[kernels] = [node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node]
    assert found["native"][:2] == ["Quantize", "Convolution"]
    assert "Quantize" not in found["stock"]
