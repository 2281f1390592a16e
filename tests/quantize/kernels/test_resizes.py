"""The native Resize: the definition, refusals, which one it computes, and models with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from requant.calibration.model.session import Array
from requant.transforms.patterns.resizes import NEAREST, POSITIONS, Resizing, find_resizing

from ...native import needs_library
from .flow import check_alike, check_equal, native_operators, quantized
from .test_native import load, session

NEAR = 1e-3
"""Steps: values in float differ by at most some roundings of 255 steps, each of 2**-24 of it."""
STEP = np.asarray(0.02, np.float32)


def zero(value: int) -> Array:
    return np.asarray(value, np.uint8)


@dataclass(frozen=True)
class Case:
    """An image in NHWC and its new size."""

    x: Array
    positions: str
    nearest: str
    scales: tuple[float, ...]
    sizes: tuple[int, ...]
    y_scale: float
    zeros: tuple[int, int]
    threads: int

    @property
    def parameters(self) -> list[Array]:
        """The scales and zero points of the image and of the result."""
        return [STEP, zero(self.zeros[0]), np.asarray(self.y_scale, np.float32), zero(self.zeros[1])]

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the native operator."""
        lengths = dict(zip(("rows", "columns"), self.sizes, strict=False))
        scales = dict(zip(("scale_down", "scale_across"), self.scales, strict=False))
        way = {"positions": POSITIONS.index(self.positions), "nearest": NEAREST.index(self.nearest)}
        return {**way, **lengths, **scales}


@st.composite
def cases(draw: st.DrawFn, rounding: st.SearchStrategy[str]) -> Case:
    batch, channels = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 8, 16, 17, 64, 70, 130]))
    height, width = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    by_scale = draw(st.booleans())
    factors = st.sampled_from([0.5, 0.7, 1.0, 1.5, 2.0, 3.0])
    down, across = draw(factors), draw(factors)
    if min(int(height * down), int(width * across)) == 0:
        down = across = 1.0
    scales = (down, across) if by_scale else ()
    sizes = () if by_scale else (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    x = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (batch, height, width, channels))
    positions, nearest, threads = draw(st.sampled_from(POSITIONS)), draw(rounding), draw(st.integers(1, 3))
    zeros = draw(st.integers(0, 255)), draw(st.integers(0, 255))
    y_scale = float(STEP) * draw(st.sampled_from([0.5, 1.0, 1.3]))
    if nearest:
        zeros, y_scale = (zeros[0], zeros[0]), float(STEP)
    return Case(x.astype(np.uint8), positions, nearest, scales, sizes, y_scale, zeros, threads)


def resized(case: Case) -> Array:
    """Return what the runtime computes in float, NHWC; the model multiplies the integers without their zero point."""
    batch, _, _, channels = case.x.shape
    x = (case.x.transpose(0, 3, 1, 2).astype(np.float32) - case.zeros[0]) * STEP
    if case.scales:
        name, given_ = "scales", np.array([1, 1, *case.scales], np.float32)
        inputs = ["x", "", "scales"]
    else:
        name, given_ = "sizes", np.array([batch, channels, *case.sizes], np.int64)
        inputs = ["x", "", "", "sizes"]
    way = {"mode": "nearest", "nearest_mode": case.nearest} if case.nearest else {"mode": "linear"}
    node = helper.make_node("Resize", inputs, ["y"], coordinate_transformation_mode=case.positions, **way)
    ends = [helper.make_tensor_value_info(each, TensorProto.FLOAT, [None] * 4) for each in "xy"]
    graph = helper.make_graph([node], "one", ends[:1], ends[1:], [numpy_helper.from_array(given_, name)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    found: Array = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    return found.transpose(0, 2, 3, 1)


@needs_library
@given(case=cases(st.sampled_from(NEAREST[1:])))
def test_the_nearest_pixels_are_those_of_the_runtime(case: Case) -> None:
    found = session("Resize", [case.x, *case.parameters], case.threads, **case.attributes).run(None, {"x": case.x})[0]
    np.testing.assert_array_equal(found, np.rint(resized(case) / STEP) + case.zeros[0])


@needs_library
@given(case=cases(st.just("")))
def test_it_is_what_the_runtime_computes_in_float_rounded_once(case: Case) -> None:
    found = session("Resize", [case.x, *case.parameters], case.threads, **case.attributes).run(None, {"x": case.x})[0]
    exact = np.clip(resized(case).astype(np.float64) / case.y_scale + case.zeros[1], 0, 255)
    assert found.shape == exact.shape
    assert np.abs(found - exact).max(initial=0) <= 0.5 + NEAR


PLAIN: dict[str, Any] = {"scale_down": 2.0, "scale_across": 2.0}
REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "without a size": ({}, (1, 2, 2, 3)),
    "a negative scale": ({**PLAIN, "scale_down": -1.0}, (1, 2, 2, 3)),
    "a negative length": ({"rows": -1, "columns": 2}, (1, 2, 2, 3)),
    "other positions": ({**PLAIN, "positions": 4}, (1, 2, 2, 3)),
    "another rounding": ({**PLAIN, "nearest": 5}, (1, 2, 2, 3)),
    "no pixels": (PLAIN, (1, 0, 2, 3)),
    "no pixels in the result": ({"scale_down": 0.1, "scale_across": 1.0}, (1, 2, 2, 3)),
    "too many pixels": ({"scale_down": 1e7, "scale_across": 1.0}, (1, 2, 2, 1)),
    "no image": (PLAIN, (2, 2, 3)),
}


@needs_library
@pytest.mark.parametrize(("attributes", "shape"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(attributes: dict[str, Any], shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.uint8)
    with pytest.raises(Exception, match=r"ai\.requant\.Resize"):
        session("Resize", [x, STEP, zero(0), STEP, zero(0)], **attributes).run(None, {"x": x})


@needs_library
def test_the_nearest_pixels_keep_their_scale() -> None:
    x = np.zeros((1, 2, 2, 3), np.uint8)
    with pytest.raises(Exception, match="the nearest pixels keep their scale and zero point"):
        session("Resize", [x, STEP, zero(0), STEP, zero(1)], **PLAIN, nearest=1)


@needs_library
def test_an_empty_batch_has_an_empty_result() -> None:
    x = np.zeros((0, 2, 3, 4), np.uint8)
    found = session("Resize", [x, STEP, zero(0), STEP, zero(0)], **PLAIN).run(None, {"x": x})[0]
    assert found.shape == (0, 4, 6, 4)


# ------------------------------------------------------------------------------------------------ which Resize it is


def resize(attributes: str = 'mode="linear"', inputs: str = "x, , f", constants: str = "f =1,1,2,3") -> ir.Node:
    """Return a Resize; `constants` are floats, or with the name n integers."""
    name, _, values = constants.partition(" =")
    kind = "int64" if name == "n" else "float"
    count = len(values.split(","))
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
        net (float[N,C,H,W] x, float[4] computed) => (float[a,b,c,d] y) <{kind}[{count}] {name} = {{{values}}}> {{
          y = Resize<{attributes}>({inputs})
        }}"""
    (node,) = ir.from_onnx_text(text).graph
    return node


FOUND_AS: dict[str, tuple[ir.Node, Resizing | None]] = {
    "by factors": (resize(), Resizing("half_pixel", scales=(2.0, 3.0))),
    "to a size": (
        resize(inputs="x, , , n", constants="n =1,8,9,10"),
        Resizing("half_pixel", sizes=(9, 10), others=((0, 1), (1, 8))),
    ),
    "to a size of two axes": (
        resize('mode="linear", axes=[2,3]', "x, , , n", "n =9,10"),
        Resizing("half_pixel", sizes=(9, 10)),
    ),
    "of two axes": (resize('mode="linear", axes=[2,3]', constants="f =2,3"), Resizing("half_pixel", scales=(2.0, 3.0))),
    "other positions": (
        resize('mode="linear", coordinate_transformation_mode="align_corners"'),
        Resizing("align_corners", scales=(2.0, 3.0)),
    ),
    "nearest": (resize('mode="nearest"'), Resizing("half_pixel", "round_prefer_floor", scales=(2.0, 3.0))),
    "rounded down": (
        resize('nearest_mode="floor", coordinate_transformation_mode="asymmetric"'),
        Resizing("asymmetric", "floor", scales=(2.0, 3.0)),
    ),
    "rounded in another way": (resize('nearest_mode="simple"'), None),
    "cubic": (resize('mode="cubic"'), None),
    "cropped": (resize('mode="linear", coordinate_transformation_mode="tf_crop_and_resize"'), None),
    "smoothed": (resize('mode="linear", antialias=1'), None),
    "to a ratio": (resize('mode="linear", keep_aspect_ratio_policy="not_larger"', "x, , , n", "n =1,8,9,10"), None),
    "of channels": (resize(constants="f =1,2,2,3"), None),
    "of one axis": (resize('mode="linear", axes=[2]', constants="f =2"), None),
    "computed": (resize(inputs="x, , computed"), None),
}


@pytest.mark.parametrize(("node", "expected"), FOUND_AS.values(), ids=FOUND_AS)
def test_what_an_interpolation_is(node: ir.Node, expected: Resizing | None) -> None:
    assert find_resizing(node) == expected


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ((1, 8, 5, 5), True),
        ((1, 8, "H", "W"), True),
        (("N", 8, 5, 5), False),
        ((2, 8, 5, 5), False),
        ((1, 4, 5, 5), False),
    ],
)
def test_which_images_keep_batch_and_channels(shape: tuple[int | str, ...], kept: bool) -> None:
    assert Resizing("half_pixel", sizes=(9, 10), others=((0, 1), (1, 8))).keeps_others(shape) is kept
    assert Resizing("half_pixel", sizes=(9, 10)).keeps_others(shape)


# -------------------------------------------------------------------------------------------------------- models


@pytest.fixture(params=["linear"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return the path of two convolutions with a Resize of some mode between them, and its data beside it."""
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]>
        net (float[N,8,10,12] x) => (float[N,8,20,24] y) <float[4] f = {{1, 1, 2, 2}}> {{
          [first] a = Conv<pads = [1, 1, 1, 1]>(x, v)
          [up] b = Resize<mode = "{request.param}">(a, , f)
          [last] y = Conv<pads = [1, 1, 1, 1]>(b, w)
        }}""")
    for name in "vw":
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((8, 8, 3, 3)).astype("f4"), name))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((8, 8, 10, 12)).astype(np.float32))
    return tmp_path / "m.onnx"


@needs_library
def test_it_stands_between_native_convolutions_and_the_body_computes_the_same(model: Path) -> None:
    result, found = quantized(model, kernels="native")
    assert native_operators(found) == ["Convolution", "Resize", "Convolution"]
    assert result.forms["u8->u8 native"] == 3
    check_alike(model, found)


@needs_library
@pytest.mark.parametrize("model", ["nearest"], indirect=True)
def test_the_nearest_pixels_of_a_model_are_those_of_its_body(model: Path) -> None:
    _, found = quantized(model, kernels="exact")
    assert native_operators(found) == ["Convolution", "Resize", "Convolution"]
    check_equal(model, found)


@needs_library
@pytest.mark.parametrize("options", [{"kernels": "stock"}, {"kernels": "exact"}, {"portable": True, "place": "rules"}])
def test_it_stays_float_where_it_may_not_be_native(model: Path, options: dict[str, Any]) -> None:
    result, found = quantized(model, **options)
    assert not [node for node in found.graph.node if node.op_type == "Resize" and node.domain]
    (reason,) = [row.reason for row in result.float_nodes if row.operator == "Resize"]
    assert reason == "only mode=nearest runs on uint8; interpolation and cropping run in float"


@needs_library
@pytest.mark.parametrize("to", [(1, 8), (2, 8), (1, 4)])
def test_a_size_of_another_batch_or_other_channels_is_not_native(to: tuple[int, int], tmp_path: Path) -> None:
    """The native operator keeps both, whatever the sizes say."""
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]>
        net (float[N,8,10,12] x) => (float[A,8,20,24] y) <int64[4] n = {{{to[0]}, {to[1]}, 20, 24}}> {{
          [first] a = Conv<pads = [1, 1, 1, 1]>(x, v)
          [up] b = Resize<mode = "nearest">(a, , , n)
          [last] y = Conv<pads = [1, 1, 1, 1]>(b, w)
        }}""")
    for name, inputs in (("v", 8), ("w", to[1])):
        weights = rng.standard_normal((8, inputs, 3, 3)).astype("f4")
        proto.graph.initializer.append(numpy_helper.from_array(weights, name))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((8, 8, 10, 12)).astype(np.float32))
    _, found = quantized(tmp_path / "m.onnx", kernels="native")
    assert "Resize" not in native_operators(found)
    feed = {"x": np.load(tmp_path / "data.npz")["x"][:3]}
    before = ort.InferenceSession(str(tmp_path / "m.onnx")).run(None, feed)[0]
    assert load(found).run(None, feed)[0].shape == before.shape
