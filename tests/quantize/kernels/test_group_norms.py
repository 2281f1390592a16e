"""The native GroupNormalization: the definition, refusals, which normalizations it computes, and models with it."""

from __future__ import annotations

from collections.abc import Sequence
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
from onnx import numpy_helper

from requant.calibration.model.session import Array
from requant.quantize.options.selection import Selection
from requant.transforms.graphs.queries import plain_shape
from requant.transforms.patterns.group_norms import find_group_norm, group_norm_of

from ...native import needs_library
from .flow import check_alike, native_operators, quantized
from .test_native import load, session, through_curve

NEAR = 1e-3
"""Steps: a result is one product and one sum in float32, each of at most 2^13 steps here, rounded by 2^-24 of it."""


def zero(value: int) -> Array:
    return np.asarray(value, np.uint8)


@dataclass(frozen=True)
class Case:
    """An image in NHWC and how it is normalized."""

    x: Array
    groups: int
    x_scale: np.float32
    scale: Array
    shift: Array
    y_scale: np.float32
    y_zero: int
    bounds: tuple[int, int]
    threads: int

    @property
    def inputs(self) -> list[Array]:
        """The inputs of the operator; the zero point of x changes no result."""
        return [
            self.x,
            np.asarray(self.x_scale),
            zero(9),
            self.scale,
            self.shift,
            np.asarray(self.y_scale),
            zero(self.y_zero),
        ]

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the operator."""
        return {"num_groups": self.groups, "epsilon": 1e-5, "least": self.bounds[0], "most": self.bounds[1]}

    @property
    def normalized(self) -> Array:
        """The normalized image, in float64."""
        batch, height, width, _ = self.x.shape
        x = self.x.astype(np.float64).reshape(batch, height * width, self.groups, -1) * self.x_scale
        mean, variance = x.mean(axis=(1, 3), keepdims=True), x.var(axis=(1, 3), keepdims=True)
        normal = ((x - mean) / np.sqrt(variance + np.float32(1e-5))).reshape(self.x.shape)
        exact: Array = normal * self.scale + self.shift
        return exact

    @property
    def defined(self) -> Array:
        """What the operator rounds, in float64."""
        bounded: Array = np.clip(self.normalized / self.y_scale + self.y_zero, *self.bounds)
        return bounded


@st.composite
def cases(draw: st.DrawFn) -> Case:
    channels = draw(st.sampled_from([1, 3, 8, 16, 24, 64, 70, 130, 320]))
    groups = draw(st.sampled_from([each for each in range(1, channels + 1) if channels % each == 0]))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 20)), draw(st.integers(1, 20)), channels)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    low, high = sorted(draw(st.tuples(st.integers(0, 255), st.integers(0, 255))))
    x = rng.integers(low, high + 1, shape).astype(np.uint8)
    bounds = sorted(draw(st.tuples(st.integers(0, 60), st.integers(100, 255))))
    return Case(
        x,
        groups,
        np.float32(draw(st.sampled_from([0.01, 0.02, 0.3]))),
        rng.uniform(-2, 2, channels).astype(np.float32),
        rng.uniform(-1, 1, channels).astype(np.float32),
        np.float32(draw(st.sampled_from([0.02, 0.05]))),
        draw(st.integers(0, 255)),
        (bounds[0], bounds[1]),
        draw(st.integers(1, 3)),
    )


@needs_library
@given(case=cases())
def test_it_is_the_definition_rounded_once(case: Case) -> None:
    found = session("GroupNormalization", case.inputs, case.threads, **case.attributes).run(None, {"x": case.x})[0]
    assert found.shape == case.x.shape
    assert np.abs(found - case.defined).max() <= 0.5 + NEAR


@needs_library
@given(case=cases(), seed=st.integers(0, 99))
def test_a_curve_is_a_function_of_what_is_not_rounded(case: Case, seed: int) -> None:
    curve = np.random.default_rng(seed).integers([[-3000], [-32767]], [[18000], [32768]], (2, 64)).astype(np.int16)
    width = np.float32(case.y_scale * 4)
    grid = np.asarray([-case.y_zero / 4 * width, width], np.float32)
    attributes: dict[str, Any] = {"num_groups": case.groups, "epsilon": 1e-5, "curved": 1}
    opened = session("GroupNormalization", [*case.inputs, curve, grid], case.threads, **attributes)
    found = opened.run(None, {"x": case.x})[0]
    places = (case.normalized - grid[0]) / grid[1] * 1024 - 2**15
    near = 256 * NEAR  # a step of the result is 256 places
    either = [np.rint(places + away).clip(-(2**15), 2**15 - 1) for away in (-near, near)]
    assert np.any([found == through_curve(curve, each) for each in either], axis=0).all()


FURTHER: list[Array] = [np.zeros((2, 64), np.int16), np.ones(2, np.float32)]


@needs_library
def test_without_the_attribute_further_inputs_are_constants_of_the_body() -> None:
    x, ones, one = np.zeros((1, 2, 3, 4), np.uint8), np.ones(4, np.float32), np.asarray(0.1, np.float32)
    inputs: list[Array] = [x, one, zero(0), ones, ones, one, zero(0)]
    for more in (FURTHER, [np.arange(3)]):
        found = session("GroupNormalization", [*inputs, *more], **PLAIN).run(None, {"x": x})[0]
        np.testing.assert_array_equal(found, np.full(x.shape, 10))


@needs_library
@pytest.mark.parametrize(
    ("more", "attributes", "why"),
    [
        (FURTHER[:1], {}, "the curve must be int16, the grid float"),
        ([np.zeros((2, 64), np.float32), FURTHER[1]], {}, "the curve must be int16, the grid float"),
        ([np.zeros((2, 63), np.int16), FURTHER[1]], {}, "the curve must be .2, 64."),
        ([FURTHER[0], np.zeros(2, np.float32)], {}, "the grid must be a beginning and a width"),
        (FURTHER, {"least": 1}, "a curve has no bounds"),
    ],
    ids=str,
)
def test_it_refuses_other_curves(more: list[Array], attributes: dict[str, Any], why: str) -> None:
    x, ones, one = np.zeros((1, 2, 3, 4), np.uint8), np.ones(4, np.float32), np.asarray(0.1, np.float32)
    inputs: list[Array] = [x, one, zero(0), ones, ones, one, zero(0), *more]
    with pytest.raises(Exception, match=why):
        session("GroupNormalization", inputs, **PLAIN, curved=1, **attributes)


@needs_library
def test_large_images_are_added_in_parts() -> None:
    """Sums of more than 2^16 squares of 255 do not fit into 32 bits."""
    x = np.full((2, 300, 300, 3), 255, np.uint8)
    x[:, ::2] = 0
    case = Case(x, 1, np.float32(0.01), np.ones(3, "f4"), np.zeros(3, "f4"), np.float32(0.05), 128, (0, 255), 2)
    found = session("GroupNormalization", case.inputs, case.threads, **case.attributes).run(None, {"x": x})[0]
    assert np.abs(found - case.defined).max() <= 0.5 + NEAR


PLAIN: dict[str, Any] = {"num_groups": 2, "epsilon": 1e-5}
REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "groups that do not divide the channels": ({**PLAIN, "num_groups": 3}, (1, 2, 2, 4), 4),
    "no groups": ({**PLAIN, "num_groups": 0}, (1, 2, 2, 4), 4),
    "no epsilon": ({**PLAIN, "epsilon": 0.0}, (1, 2, 2, 4), 4),
    "bounds that are crossed": ({**PLAIN, "least": 9, "most": 8}, (1, 2, 2, 4), 4),
    "a bound that is no byte": ({**PLAIN, "most": 256}, (1, 2, 2, 4), 4),
    "other channels": (PLAIN, (1, 2, 2, 6), 4),
    "no image": (PLAIN, (2, 2, 4), 4),
}


@needs_library
@pytest.mark.parametrize(("attributes", "shape", "channels"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses(attributes: dict[str, Any], shape: tuple[int, ...], channels: int) -> None:
    x: Array = np.zeros(shape, np.uint8)
    ones, one = np.ones(channels, np.float32), np.asarray(0.1, np.float32)
    with pytest.raises(Exception, match=r"ai\.requant\.GroupNormalization"):
        session("GroupNormalization", [x, one, zero(0), ones, ones, one, zero(0)], **attributes).run(None, {"x": x})


@needs_library
@pytest.mark.parametrize(
    "scale", [np.full(4, np.inf, np.float32), np.full(4, np.nan, np.float32), np.ones(3, np.float32)]
)
def test_it_refuses_parameters_that_are_not_finite_or_too_few(scale: Array) -> None:
    x, one = np.zeros((1, 2, 2, 4), np.uint8), np.asarray(0.1, np.float32)
    inputs: list[Array] = [x, one, zero(0), scale, np.ones(4, np.float32), one, zero(0)]
    with pytest.raises(Exception, match=r"ai\.requant\.GroupNormalization"):
        session("GroupNormalization", inputs, **PLAIN)


@needs_library
def test_an_empty_batch_has_an_empty_result() -> None:
    x, ones, one = np.zeros((0, 2, 3, 4), np.uint8), np.ones(4, np.float32), np.asarray(0.1, np.float32)
    inputs: list[Array] = [x, one, zero(0), ones, ones, one, zero(0)]
    assert session("GroupNormalization", inputs, **PLAIN).run(None, {"x": x})[0].shape == (0, 2, 3, 4)


# ------------------------------------------------------------------------------------------ which normalization it is

PARTS = """a = Reshape(x, g) b = InstanceNormalization(a, ones2, zeros2) c = Reshape(b, s)
           d = Mul(c, w) y = Add(d, v)"""
SHAPES: dict[str, Any] = {"x": (1, 8, 5, 6), "a": (1, 2, 120), "b": (1, 2, 120), **dict.fromkeys("cdy", (1, 8, 5, 6))}


def nodes_of(text: str) -> list[ir.Node]:
    """Return the nodes of a graph in ONNX text, with the constants of `PARTS`."""
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 21]>
        net (float[1,8,5,6] x) => (float[a,b,c,d] y)
        <int64[3] g = {{1, 2, -1}}, int64[4] s = {{1, 8, 5, 6}}, float[2] ones2 = {{2, 3}}, float[2] zeros2 = {{4, 5}},
         float[8] ones8 = {{1, 1, 1, 1, 1, 1, 1, 1}}, float[8] zeros8 = {{0, 1, 2, 3, 4, 5, 6, 7}},
         float[8,1,1] w = {{1, 2, 3, 4, 5, 6, 7, 8}}, float[8,1,1] v = {{8, 7, 6, 5, 4, 3, 2, 1}},
         float[6] row = {{0, 1, 2, 3, 4, 5}}> {{ {text} }}""")
    return list(model.graph)


FOUND_AS: dict[str, tuple[str, int]] = {
    "an instance norm": ("y = InstanceNormalization(x, ones8, zeros8)", 1),
    "a group norm": ("y = GroupNormalization <num_groups = 4> (x, ones8, zeros8)", 1),
    "a group norm with scales of groups": ("y = GroupNormalization <num_groups = 2> (x, ones2, zeros2)", 1),
    "a group norm in parts": (PARTS, 5),
    "an instance norm with scale and shift behind it": (
        "c = InstanceNormalization(x, ones8, zeros8) d = Mul(c, w) y = Add(v, d)",
        3,
    ),
    "without a shift": (PARTS.replace("d = Mul(c, w) y = Add(d, v)", "y = Mul(c, w)"), 4),
    "without scale and shift": (
        PARTS.replace("c = Reshape(b, s)\n           d = Mul(c, w) y = Add(d, v)", "y = Reshape(b, s)"),
        3,
    ),
    "with a shift alone": (PARTS.replace("d = Mul(c, w) y = Add(d, v)", "y = Add(c, v)"), 4),
    "with a factor for each column": (PARTS.replace("Mul(c, w)", "Mul(c, row)"), 3),
    "read between": (PARTS + " z = Neg(c)", 3),
    "read in front of it": (PARTS + " z = Neg(a)", 0),
    "computed scales": ("t = Neg(ones8) y = InstanceNormalization(x, t, zeros8)", 0),
    "no epsilon": ("y = InstanceNormalization <epsilon = 0.0> (x, ones8, zeros8)", 0),
    "another operator": ("y = Relu(x)", 0),
}


@pytest.mark.parametrize(("text", "count"), FOUND_AS.values(), ids=FOUND_AS)
def test_what_a_group_norm_is(text: str, count: int) -> None:
    nodes = nodes_of(text)
    found = [each for node in nodes if (each := find_group_norm(node, SHAPES))]
    assert [len(each) for each in found] == ([count] if count else [])


@pytest.mark.parametrize(
    "changed",
    [{"a": (2, 2, 60)}, {"c": (1, 4, 10, 6)}, {"a": (1, 3, 80)}, {"x": (8, 5, 6)}, {"x": ()}, {"x": (1, "C", 5, 6)}],
    ids=str,
)
def test_a_norm_of_other_shapes_is_none(changed: dict[str, Any]) -> None:
    shapes = {**SHAPES, **changed}
    assert not any(find_group_norm(node, shapes) for node in nodes_of(PARTS))


def test_a_batch_of_unknown_length_is_kept_if_the_target_says_so() -> None:
    shapes = {**SHAPES, "x": ("N", 8, 5, 6), "a": (None, 2, 120), "c": (None, 8, 5, 6)}
    kept, other = nodes_of(PARTS), nodes_of(PARTS)
    target = kept[0].inputs[1]
    assert target is not None
    target.const_value = ir.tensor(np.array([0, 2, -1]))
    assert any(find_group_norm(node, shapes) for node in kept)
    assert not any(find_group_norm(node, shapes) for node in other)


@pytest.mark.parametrize(
    ("image", "result", "target", "count"),
    [
        (("N", 8, 5, None), ("N", 8, 5, None), [0, 8, 5, -1], 5),
        (("N", 8, 5, "u"), ("N", 8, 5, "v"), [0, 8, 5, -1], 5),
        (("N", 8, 5, "u"), ("N", 8, 5, 6), [0, 8, 5, 6], 5),
        (("N", 8, "u", None), ("N", 8, "u", None), [0, 8, 5, -1], 5),
        (("N", 8, 5, None), (None, 8, 5, None), [-1, 8, 5, 6], 0),
        (("N", 8, None, None), ("N", 8, 5, None), [0, 8, 5, -1], 0),
        (("N", 8, 5, None), ("N", 8, 6, None), [0, 8, 6, -1], 0),
        (("N", 8, 5, None), ("N", 4, 5, None), [0, 4, 5, -1], 0),
    ],
    ids=str,
)
def test_one_unknown_length_is_that_of_the_image(image: Any, result: Any, target: list[int], count: int) -> None:
    shapes = {**SHAPES, "x": image, "a": ("N", 2, None), **dict.fromkeys("cdy", result)}
    nodes = nodes_of(PARTS)
    for node, numbers in ((nodes[0], [0, 2, -1]), (nodes[2], target)):
        value = node.inputs[1]
        assert value is not None
        value.const_value = ir.tensor(np.array(numbers))
    found = [each for node in nodes if (each := find_group_norm(node, shapes))]
    assert [len(each) for each in found] == ([count] if count else [])


@pytest.mark.parametrize(
    ("text", "count"), [("t = Shape(x)", 5), ("t = Shape(b)", 0), ("t = Shape <start = 1> (x)", 0)]
)
def test_the_shape_of_the_image_is_that_of_the_result(text: str, count: int) -> None:
    free = ("N", 8, None, None)
    shapes = {**SHAPES, "x": free, "a": ("N", 2, None), **dict.fromkeys("cdy", (None, None, None, None))}
    nodes = nodes_of(f"{text} {PARTS.replace('Reshape(b, s)', 'Reshape(b, t)')}")
    groups = nodes[1].inputs[1]
    assert groups is not None
    groups.const_value = ir.tensor(np.array([0, 2, -1]))
    found = [each for node in nodes if (each := find_group_norm(node, shapes))]
    assert [len(each) for each in found] == ([count] if count else [])


def test_scales_of_groups_and_of_channels_are_one() -> None:
    found = group_norm_of(nodes_of(PARTS), 8)
    assert found is not None
    assert found.groups == 2
    assert found.epsilon == pytest.approx(1e-5)
    inner, outer = np.repeat([2, 3], 4), np.arange(1, 9)
    np.testing.assert_array_equal(found.scale, inner * outer)
    np.testing.assert_array_equal(found.shift, np.repeat([4, 5], 4) * outer + outer[::-1])


def test_every_shape_comes_from_the_given_ones() -> None:
    """The shapes that a model declares may be those of another run."""
    (node,) = nodes_of("y = InstanceNormalization(x, ones8, zeros8)")
    assert plain_shape(node.inputs[0]) == (1, 8, 5, 6)
    assert not find_group_norm(node, {})


# -------------------------------------------------------------------------------------------------------- models

GROUPED = "a0 = Reshape(a, g) a1 = InstanceNormalization(a0, ones2, zeros2)"
NORMS = {
    "instance": "b = InstanceNormalization(a, ones16, zeros16)",
    "instance and Relu": "b0 = InstanceNormalization(a, ones16, zeros16) b = Relu(b0)",
    "instance and Clip": "b0 = InstanceNormalization(a, ones16, zeros16) b = Clip(b0, low, high)",
    "group": "b = GroupNormalization <num_groups = 4> (a, ones16, zeros16)",
    "group in parts": f"""{GROUPED} a2 = Reshape(a1, s) a3 = Mul(a2, w) b = Add(a3, v)""",
}


def between(norm: str, folder: Path, image: Sequence[int | str]) -> Path:
    """Return the path of a model of two convolutions with a normalization between them, and its data beside it.

    Args:
        norm: The normalization, from a to b, in ONNX text.
        folder: Where both are.
        image: The lengths of a sequence or an image; a name for a free one.
    """
    rng = np.random.default_rng(0)
    axes, row = len(image), [16, *[1] * len(image)]
    target = str([0, 16, *(each if isinstance(each, int) else -1 for each in image)])[1:-1]
    lengths = f"N,16,{str([*image])[1:-1]}".replace("'", "")
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        net (float[{lengths}] x) => (float[{lengths}] y)
        <int64[3] g = {{0, 2, -1}}, int64[{axes + 2}] s = {{{target}}}, float[2] ones2 = {{0.7, 0.5}},
         float[2] zeros2 = {{0.3, 0}}, float low = {{-0.5}}, float high = {{0.7}}, float steep = {{90}}, float inverse = {{0.70710678}},
         float one = {{1}}, float half = {{0.5}}, float[{lengths}] b> {{
          [first] a = Conv<pads = {[1] * axes * 2}>(x, v1)
          {norm}
          [last] y = Conv<pads = {[1] * axes * 2}>(b, v2)
        }}""")
    for name in ("v1", "v2"):
        weights = rng.standard_normal((16, 16, *[3] * axes)).astype("f4")
        proto.graph.initializer.append(numpy_helper.from_array(weights, name))
    for name, shape in {"ones16": [16], "zeros16": [16], "w": row, "v": row}.items():
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype("f4"), name))
    onnx.save(proto, folder / "m.onnx")
    given = [each if isinstance(each, int) else 12 for each in image]
    np.savez(folder / "data.npz", x=rng.standard_normal((8, 16, *given)).astype(np.float32))
    return folder / "m.onnx"


@pytest.fixture(params=[*NORMS.values()], ids=[*NORMS])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return the path of two convolutions of images with a normalization between them, and its data beside it."""
    return between(request.param, tmp_path, (10, 12))


@needs_library
def test_it_stands_between_native_convolutions_and_the_body_computes_the_same(model: Path) -> None:
    result, found = quantized(model, kernels="native")
    assert native_operators(found) == ["Convolution", "GroupNormalization", "Convolution"]
    assert result.forms["u8->u8 native"] == 3
    check_alike(model, found)


CURVES = {
    "SiLU": "b1 = Sigmoid(b0) b = Mul(b0, b1)",
    "LeakyRelu": "b = LeakyRelu <alpha = 0.1> (b0)",
    "GELU": "b1 = Mul(b0, inverse) b2 = Erf(b1) b3 = Add(b2, one) b4 = Mul(b0, b3) b = Mul(b4, half)",
}


@needs_library
@pytest.mark.parametrize("norm", ["instance", "group in parts"])
@pytest.mark.parametrize("lengths", [(10, 12), (12,)], ids=["image", "sequence"])
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_a_function_behind_it_is_its_curve(tmp_path: Path, norm: str, lengths: Sequence[int], curve: str) -> None:
    model = between(f"{NORMS[norm].replace('b =', 'b0 =')} {curve}", tmp_path, lengths)
    _, found = quantized(model, kernels="native")
    assert native_operators(found) == ["Convolution", "GroupNormalization", "Convolution"]
    feed = {"x": np.load(model.with_name("data.npz"))["x"]}
    here = load(found).run(None, feed)[0]
    elsewhere, before = (
        ort.InferenceSession(source).run(None, feed)[0] for source in (found.SerializeToString(), str(model))
    )
    assert np.square(before - here).mean() < np.square(before - elsewhere).mean()


SAME_SHAPE = f"{GROUPED} s0 = Shape(a) a2 = Reshape(a1, s0) a3 = Mul(a2, w) b = Add(a3, v)"
LENGTHS: dict[str, tuple[Sequence[int | str], str]] = {
    **{f"a sequence, {name}": ((12,), norm) for name, norm in NORMS.items()},
    **{f"a sequence of any length, {name}": (("T",), norm) for name, norm in NORMS.items()},
    "a sequence with its own shape": ((12,), SAME_SHAPE),
    "a sequence of any length with its own shape": (("T",), SAME_SHAPE),
    "images with any number of columns": ((10, "W"), NORMS["group in parts"]),
    "images of any size": (("H", "W"), SAME_SHAPE),
}


@needs_library
@pytest.mark.parametrize(("lengths", "norm"), LENGTHS.values(), ids=LENGTHS)
def test_sequences_are_images_with_one_row(tmp_path: Path, lengths: Sequence[int | str], norm: str) -> None:
    model = between(norm, tmp_path, lengths)
    _, found = quantized(model, kernels="native")
    assert native_operators(found) == ["Convolution", "GroupNormalization", "Convolution"]
    check_alike(model, found)
    other = [5 if isinstance(each, str) else each for each in lengths]
    x = np.random.default_rng(1).standard_normal((2, 16, *other)).astype(np.float32)
    before, here = (each.run(None, {"x": x})[0] for each in (ort.InferenceSession(str(model)), load(found)))
    assert np.square(before - here).mean() < np.square(before).mean() / 100


FUNCTIONS = {
    "another reader": "b0 = InstanceNormalization(a, ones16, zeros16) b1 = Sigmoid(b0) b2 = Mul(b0, b1)"
    " b3 = Conv<pads = [1, 1, 1, 1]>(b0, v1) b = Add(b2, b3)",
    "too sharp for a curve": "b0 = InstanceNormalization(a, ones16, zeros16) b1 = Mul(b0, steep) b = Sigmoid(b1)",
}


@needs_library
@pytest.mark.parametrize("model", FUNCTIONS.values(), ids=FUNCTIONS, indirect=True)
def test_other_functions_stay_behind_it(model: Path) -> None:
    _, found = quantized(model, kernels="native")
    assert native_operators(found)[:3] == ["Convolution", "GroupNormalization", "Table"]


@needs_library
@pytest.mark.parametrize("options", [{"kernels": "stock"}, {"kernels": "exact"}, {"portable": True, "place": "rules"}])
def test_it_stays_float_where_it_may_not_be_native(model: Path, options: dict[str, Any]) -> None:
    result, found = quantized(model, **options)
    assert not [node for node in found.graph.node if node.op_type == "GroupNormalization" and node.domain]
    reasons = {row.reason for row in result.float_nodes if row.operator.endswith("Normalization")}
    assert reasons == {"a normalization squares and divides; the runtime computes it in one float kernel"}


@needs_library
@pytest.mark.parametrize("model", [NORMS["instance"]], indirect=True)
@pytest.mark.parametrize(
    "options", [{"exclude_nodes": frozenset({"norm"})}, {"exclude_ops": frozenset({"InstanceNormalization"})}]
)
def test_the_user_can_exclude_it(model: Path, options: dict[str, Any]) -> None:
    proto = onnx.load(model)
    proto.graph.node[1].name = "norm"
    onnx.save(proto, model)
    _, found = quantized(model, kernels="native", selection=Selection(**options))
    assert "GroupNormalization" not in native_operators(found)
