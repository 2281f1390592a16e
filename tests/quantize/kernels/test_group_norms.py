"""The native GroupNormalization: the definition, refusals, which normalizations it computes, and models with it."""

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
from numpy.typing import NDArray
from onnx import numpy_helper

from requant.quantize.options.selection import Selection
from requant.transforms.graph import plain_shape
from requant.transforms.patterns.group_norms import find_group_norm, group_norm_of

from ...native import needs_library
from .flow import check_alike, native_operators, quantized
from .test_native import load, session, through_curve

Array = NDArray[Any]

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

NORMS = {
    "instance": "b = InstanceNormalization(a, ones8, zeros8)",
    "instance and Relu": "b0 = InstanceNormalization(a, ones8, zeros8) b = Relu(b0)",
    "instance and Clip": "b0 = InstanceNormalization(a, ones8, zeros8) b = Clip(b0, low, high)",
    "group": "b = GroupNormalization <num_groups = 4> (a, ones8, zeros8)",
    "group in parts": """a0 = Reshape(a, g) a1 = InstanceNormalization(a0, ones2, zeros2) a2 = Reshape(a1, s)
                         a3 = Mul(a2, w) b = Add(a3, v)""",
}


@pytest.fixture(params=[*NORMS.values()], ids=[*NORMS])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return the path of two convolutions with a normalization between them, and its data beside it."""
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        net (float[N,8,10,12] x) => (float[N,8,10,12] y)
        <int64[3] g = {{0, 2, -1}}, int64[4] s = {{0, 8, 10, 12}}, float[2] ones2 = {{2, 3}}, float[2] zeros2 = {{1, 0}},
         float low = {{-0.5}}, float high = {{0.7}}, float steep = {{90}}, float[N,8,10,12] b> {{
          [first] a = Conv<pads = [1, 1, 1, 1]>(x, v1)
          {request.param}
          [last] y = Conv<pads = [1, 1, 1, 1]>(b, v2)
        }}""")
    for name in ("v1", "v2"):
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((8, 8, 3, 3)).astype("f4"), name))
    for name, shape in {"ones8": (8,), "zeros8": (8,), "w": (8, 1, 1), "v": (8, 1, 1)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype("f4"), name))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((8, 8, 10, 12)).astype(np.float32))
    return tmp_path / "m.onnx"


@needs_library
def test_it_stands_between_native_convolutions_and_the_body_computes_the_same(model: Path) -> None:
    result, found = quantized(model, kernels="native")
    assert native_operators(found) == ["Convolution", "GroupNormalization", "Convolution"]
    assert result.forms["u8->u8 native"] == 3
    check_alike(model, found)


SILU = "b1 = Sigmoid(b0) b = Mul(b0, b1)"


@needs_library
@pytest.mark.parametrize("model", [f"{NORMS['instance'].replace('b =', 'b0 =')} {SILU}"], indirect=True)
def test_a_function_behind_it_is_its_curve(model: Path) -> None:
    _, found = quantized(model, kernels="native")
    assert native_operators(found) == ["Convolution", "GroupNormalization", "Convolution"]
    feed = {"x": np.load(model.with_name("data.npz"))["x"]}
    here = load(found).run(None, feed)[0]
    elsewhere, before = (
        ort.InferenceSession(source).run(None, feed)[0] for source in (found.SerializeToString(), str(model))
    )
    assert np.square(before - here).mean() < np.square(before - elsewhere).mean()


FUNCTIONS = {
    "another reader": "b0 = InstanceNormalization(a, ones8, zeros8) b1 = Sigmoid(b0) b2 = Mul(b0, b1)"
    " b3 = Conv<pads = [1, 1, 1, 1]>(b0, v1) b = Add(b2, b3)",
    "too sharp for a curve": "b0 = InstanceNormalization(a, ones8, zeros8) b1 = Mul(b0, steep) b = Sigmoid(b1)",
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
