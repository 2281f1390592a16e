"""What the planner makes int8, and why not, on small models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from requant import RequantError, UnknownNameError
from requant.quantize import Selection, Strategy, choose
from requant.quantize.placement.facts import facts_of
from requant.quantize.placement.forms import FLOAT_FORMS, plan_to_calibrate, possible_forms
from requant.quantize.placement.noise import Noises
from requant.quantize.placement.rules import choose_by
from requant.transforms.graphs.queries import node_name
from requant.transforms.int8.plan import Choice, Domain, Impl, Plan
from requant.transforms.int8.reasons import other

Shape = tuple[int, ...]
Ranges = Mapping[str, tuple[float, float]]

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
PADS = "<pads = [1, 1, 1, 1]>"
FLOAT, U8, U8_FLOAT = Impl.FLOAT, Impl.U8, Impl.U8_FLOAT
STOCK_FORMS = tuple(form for form in FLOAT_FORMS if not form.native)


def build(body: str, **constants: Shape | np.ndarray) -> ir.Model:
    """Make a model of ONNX text; constants are arrays, or shapes of float32 weights."""
    proto = onnx.parser.parse_model(HEAD + body)
    generator = np.random.default_rng(0)
    for name, content in constants.items():
        array = generator.standard_normal(content).astype(np.float32) if isinstance(content, tuple) else content
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(proto, full_check=True)
    return ir.from_proto(proto)


def impls(plan: Plan) -> dict[str, Impl]:
    """Return the implementation of every node, by its name."""
    return {node: plan.impl(unit) for unit in plan.units for node in unit.nodes}


def reason(plan: Plan, name: str) -> str:
    (unit,) = [unit for unit in plan.units if name in unit.nodes]
    return plan.choices[unit.name].reason.text


def check(model: ir.Model, plan: Plan) -> None:
    """Assert what holds of every plan."""
    nodes = [node_name(node) for node in model.graph]
    assert sorted(node for unit in plan.units for node in unit.nodes) == sorted(nodes)
    assert set(plan.choices) == {unit.name for unit in plan.units}
    for unit in plan.units:
        choice = plan.choices[unit.name]
        assert bool(choice.reason) == (choice.impl is FLOAT), f"{unit.name}: {choice}"
        if choice.impl is not FLOAT:
            assert set(unit.inputs) <= set(plan.quantized)
        for tensor in unit.outputs:
            assert (plan.domain(tensor) is Domain.U8) == (choice.impl is U8)
    assert {plan.root(tensor) for tensor in plan.quantized} == set(plan.observed)
    assert len(set(plan.observed)) == len(plan.observed)
    assert all(plan.root(root) == root for root in plan.observed)
    assert set(plan.quantized) == plan.produced_u8 | plan.read_u8


def planned(
    model: ir.Model,
    selection: Selection | None = None,
    *,
    ranges: Ranges | None = None,
    kept_float: Mapping[str, str] | None = None,
) -> Plan:
    """Choose, and check the plan and that the model is as it was."""
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    plan = choose(model, selection, ranges=ranges, kept_float=kept_float)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    check(model, plan)
    assert choose(model, selection, ranges=ranges, kept_float=kept_float) == plan
    return plan


def chain() -> ir.Model:
    """A convolution on one channel, then two on many, a pooling and a dense layer."""
    return build(
        f"""net (float[N,1,8,8] x) => (float[N,10] y) {{
          [first] a = Conv{PADS}(x, w1)
          [relu] r = Relu(a)
          [second] b = Conv{PADS}(r, w2, b2)
          [clip] c = Clip(b, zero, six)
          [pool] p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(c)
          [third] d = Conv{PADS}(p, w3)
          [flatten] f = Flatten(d)
          [dense] y = Gemm(f, w4, b4)
        }}""",
        w1=(16, 1, 3, 3),
        w2=(16, 16, 3, 3),
        b2=(16,),
        w3=(8, 16, 3, 3),
        w4=(128, 10),
        b4=(10,),
        zero=np.array(0, np.float32),
        six=np.array(6, np.float32),
    )


def test_a_chain_is_int8_from_the_second_convolution_to_the_dense_layer() -> None:
    plan = planned(chain())
    assert impls(plan) == {
        "first": FLOAT,
        "relu": FLOAT,
        "second": U8,
        "clip": U8,
        "pool": U8,
        "third": U8,
        "flatten": U8,
        "dense": U8_FLOAT,
    }
    assert reason(plan, "first") == reason(plan, "relu") == "9 products per output are too few for the integer kernel"
    assert plan.observed == ("r", "c", "d")
    assert plan.quantized == ("r", "c", "p", "d", "f")
    assert (plan.root("p"), plan.root("f"), plan.root("y")) == ("c", "d", "y")
    native = plan.with_choices({name: Choice(Impl.U8_NATIVE) for name in ("second", "pool", "third")})
    assert (native.root("p"), native.observed) == ("c", plan.observed)
    assert [plan.domain(t) for t in ("x", "r", "c", "p", "f", "y")] == [
        Domain.FLOAT,
        Domain.FLOAT,
        Domain.U8,
        Domain.U8,
        Domain.U8,
        Domain.FLOAT,
    ]


@pytest.mark.parametrize(
    ("channels", "kernel", "group", "impl"),
    [
        (1, 5, 1, FLOAT),
        (3, 3, 1, FLOAT),
        (3, 7, 1, U8),
        (8, 1, 1, U8),
        (16, 3, 1, U8),
        (16, 3, 16, U8),
    ],
    ids=["1 channel", "3 channels", "3 channels, 7x7", "8 channels, 1x1", "wide", "depthwise"],
)
def test_a_convolution_of_few_products_stays_float(channels: int, kernel: int, group: int, impl: Impl) -> None:
    text = f"""net (float[N,{channels},9,9] x) => (float[N,16,?,?] y) {{
      [conv] y = Conv<group = {group}>(x, w)
    }}"""
    text = text.replace("?,?", f"{10 - kernel},{10 - kernel}")
    assert impls(planned(build(text, w=(16, channels // group, kernel, kernel)))) == {"conv": impl}


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_convolution_over_any_number_of_axes_is_int8(axes: int) -> None:
    before, after = ",".join(["9"] * axes), ",".join(["7"] * axes)
    text = f"net (float[N,16,{before}] x) => (float[N,8,{after}] y) {{ [conv] y = Conv(x, w) }}"
    assert impls(planned(build(text, w=(8, 16, *[3] * axes)))) == {"conv": U8}


# ------------------------------------------------------------------------------------------------ matrix products


def test_a_product_writes_float_for_float_readers_and_uint8_for_integer_ones() -> None:
    model = build(
        """net (float[N,64] x) => (float[N,64] y, float[N,64] z) {
          [inner] a = MatMul(x, v)
          [last] y = MatMul(a, w)
          [other] b = MatMul(x, v)
          [tanh] z = Tanh(b)
        }""",
        v=(64, 64),
        w=(64, 64),
    )
    assert impls(planned(model)) == {"inner": U8, "last": U8_FLOAT, "other": U8_FLOAT, "tanh": FLOAT}
    assert planned(model).observed == ("x", "a")


def test_a_product_of_activations_stays_float() -> None:
    model = build(
        """net (float[N,8,64] x) => (float[N,8,8] y) {
          [q] a = MatMul(x, v)
          [k] b = MatMul(x, w)
          [t] c = Transpose<perm = [0, 2, 1]>(b)
          [scores] y = MatMul(a, c)
        }""",
        v=(64, 64),
        w=(64, 64),
    )
    plan = planned(model)
    assert impls(plan) == {"q": U8_FLOAT, "k": U8_FLOAT, "t": FLOAT, "scores": FLOAT}
    assert "both factors are activations" in reason(plan, "scores")


@pytest.mark.parametrize(
    ("attributes", "bias", "why"),
    [
        ("transA = 1", (16,), "a transposed activation"),
        ("alpha = 0.5", (16,), "alpha or beta is not 1"),
        ("beta = 2.0", (16,), "alpha or beta is not 1"),
        ("transA = 0", (1, 1), "its bias is not one value per column"),
        ("transB = 1", (16,), ""),
    ],
    ids=lambda value: str(value),
)
def test_a_gemm_that_no_integer_kernel_computes_stays_float(attributes: str, bias: Shape, why: str) -> None:
    text = f"net (float[16,16] x) => (float[16,16] y) {{ [gemm] y = Gemm<{attributes}>(x, w, b) }}"
    plan = planned(build(text, w=(16, 16), b=bias))
    assert impls(plan) == {"gemm": FLOAT if why else U8_FLOAT}
    assert reason(plan, "gemm") == why


def test_what_is_computed_or_not_float32_stays_float() -> None:
    model = build(
        """net (float[N,16,9,9] x, float[8,16,3,3] w, float[8] b, double[N,16] z) => (float[N,8,7,7] y, float[N,8,7,7] t, double[N,16] u) {
          [weights] y = Conv(x, w)
          [bias] t = Conv(x, v, b)
          [double] u = MatMul(z, m)
        }""",
        v=(8, 16, 3, 3),
        m=np.ones((16, 16)),
    )
    plan = planned(model)
    assert set(impls(plan).values()) == {FLOAT}
    assert reason(plan, "weights") == "computed weights"
    assert reason(plan, "bias") == "a computed bias"
    assert reason(plan, "double") == "its tensors are not float32"
    assert plan.observed == plan.quantized == ()


# --------------------------------------------------------------------------------------------- branches that join


def residual(middle: str = "", after: str = "") -> ir.Model:
    """Two convolutions whose outputs are added; a third reads the sum."""
    return build(
        f"""net (float[N,16,8,8] x) => (float[N,16,8,8] y) {{
          [left] a = Conv{PADS}(x, w1)
          [right] {"b" if not middle else "r"} = Conv{PADS}(x, w2)
          {middle}
          [add] c = Add(a, b)
          {after}
          [after] y = Conv{PADS}({"d" if after else "c"}, w3)
        }}""",
        w1=(16, 16, 3, 3),
        w2=(16, 16, 3, 3),
        w3=(16, 16, 3, 3),
    )


def joined(outputs: str = "float[N,8,8,8] y", between: str = "", left: str = "a", more: str = "") -> ir.Model:
    """Two convolutions whose results are joined; another one reads that."""
    return build(
        f"""net (float[N,16,16,16] x) => ({outputs}) {{
          [first] a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w1)
          [second] b = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w2)
          {between}
          [join] c = Concat<axis = 1>({left}, b)
          {more}
          [after] y = Conv{PADS}(c, w3)
        }}""",
        w1=(16, 16, 3, 3),
        w2=(8, 16, 3, 3),
        w3=(8, 24, 3, 3),
        w4=(16, 16, 3, 3),
    )


POOL = "[pool] p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(a)"
OTHER = f"[other] z = Conv{PADS}(a, w4)"
TWO = "float[N,8,8,8] y, float[N,16,8,8] "


@pytest.mark.parametrize(
    ("model", "own"),
    [
        (joined(), ()),
        (joined(between=POOL, left="p"), ()),
        (joined(between=POOL, left="p", more=OTHER, outputs=TWO + "z"), ("a",)),
        (joined(more=OTHER, outputs=TWO + "z"), ("a",)),
        (joined(outputs=TWO + "a"), ("a",)),
    ],
    ids=["alone", "behind a pool", "read in front of the pool too", "read twice", "read by the user"],
)
def test_what_only_a_concat_reads_has_the_scale_of_its_result(model: ir.Model, own: tuple[str, ...]) -> None:
    plan = planned(model)
    plan = plan.with_choices({unit.name: Choice(U8) for unit in plan.units})
    assert {plan.root(tensor) for tensor in plan.quantized if tensor not in {"x", "y", "z"}} == {*own, "c"}
    assert plan.root("b") == "c"
    apart = plan.with_choices({"join": Choice(FLOAT, other("a test"))})
    assert {apart.root("a"), apart.root("b")} == {"a", "b"}


def test_a_chain_of_concats_has_one_scale() -> None:
    """The first values are rounded once, not in each link, though convolutions read the results between."""
    model = build(
        f"""net (float[N,16,8,8] x) => (float[N,8,8,8] y, float[N,16,8,8] z) {{
          [first] a = Conv{PADS}(x, w1)
          [second] b = Conv{PADS}(x, w1)
          [one] c = Concat<axis = 1>(a, b)
          [third] d = Conv{PADS}(c, w2)
          [two] e = Concat<axis = 1>(c, d)
          [fourth] f = Conv{PADS}(e, w3)
          [three] g = Concat<axis = 1>(e, f)
          [after] y = Conv{PADS}(g, w4)
          [beside] z = Conv{PADS}(a, w5)
        }}""",
        w1=(16, 16, 3, 3),
        w2=(8, 32, 3, 3),
        w3=(8, 40, 3, 3),
        w4=(8, 48, 3, 3),
        w5=(16, 16, 3, 3),
    )
    plan = planned(model)
    plan = plan.with_choices({unit.name: Choice(U8) for unit in plan.units})
    assert {tensor: plan.root(tensor) for tensor in "abcdefg"} == dict.fromkeys("bcdefg", "g") | {"a": "a"}


def test_a_sum_between_integer_convolutions_is_int8() -> None:
    plan = planned(residual(after="[relu] d = Relu(c)"))
    assert impls(plan) == {"left": U8, "right": U8, "add": U8, "relu": U8, "after": U8}
    assert plan.observed == ("x", "a", "b", "d", "y")


def test_a_sum_is_int8_where_one_conversion_replaces_two() -> None:
    """In uint8 the other branch is quantized; in float the first is dequantized and the sum is quantized again."""
    plan = planned(
        build(
            f"""net (float[N,16,8,8] x) => (float[N,16,8,8] y) {{
              [conv] a = Conv{PADS}(x, w)
              [sin] b = Sin(x)
              [add] c = Add(a, b)
              [after] y = Conv{PADS}(c, w)
            }}""",
            w=(16, 16, 3, 3),
        )
    )
    assert impls(plan) == {"conv": U8, "sin": FLOAT, "add": U8, "after": U8}
    assert plan.observed == ("x", "a", "b", "c", "y")


def test_a_sum_is_float_where_uint8_would_need_more_conversions() -> None:
    both_float = build(
        f"""net (float[N,16,8,8] x) => (float[N,16,8,8] y) {{
          [tanh] a = Tanh(x)
          [sin] b = Sin(x)
          [add] c = Add(a, b)
          [after] y = Conv{PADS}(c, w)
        }}""",
        w=(16, 16, 3, 3),
    )
    plan = planned(both_float)
    assert impls(plan)["add"] is FLOAT
    assert reason(plan, "add") == "its inputs come in float"
    assert plan.observed == ("c", "y")


def test_a_sum_that_only_float_reads_is_float() -> None:
    plan = planned(residual(after="[tanh] d = Tanh(c)"))
    assert impls(plan)["add"] is FLOAT
    assert reason(plan, "add") == "nothing after it computes in integers"


@pytest.mark.parametrize(
    ("constant", "why"),
    [
        (np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, 16, 1, 1), ""),
        (np.full((1, 16, 1, 1), np.inf, np.float32), "a constant operand that is not finite"),
        (np.full((1, 16, 1, 1), 1000, np.float32), "the ranges that meet in its unit differ 1000-fold"),
    ],
    ids=["of like range", "infinite", "of another range"],
)
def test_adding_a_constant_is_int8_where_their_ranges_agree(constant: np.ndarray, why: str) -> None:
    model = build(
        f"""net (float[N,16,8,8] x) => (float[N,16,8,8] y) {{
          [conv] a = Conv{PADS}(x, w)
          [add] b = Add(a, k)
          [after] y = Conv{PADS}(b, w)
        }}""",
        w=(16, 16, 3, 3),
        k=constant,
    )
    plan = planned(model, ranges={"x": (-1, 1), "a": (-0.5, 0.5), "b": (-1, 1), "y": (-1, 1)})
    assert reason(plan, "add") == why


def factors(*values: float) -> np.ndarray:
    """Return a factor for each of 16 channels: the given ones, repeated."""
    return np.resize(np.array(values, np.float32), (1, 16, 1, 1))


LARGE = [0.001] * 15
"""The factors of most channels where one is larger."""


@pytest.mark.parametrize(
    ("constant", "why"),
    [
        (factors(*LARGE, 0.01), ""),
        (factors(*LARGE, 0.02), ""),
        (factors(*LARGE, 30.0), "the largest value is 30000 times the median one"),
        (factors(*LARGE, -0.1), "the largest value is 100 times the median one"),
        (factors(0.0, 0.0, 0.0, 1000.0), ""),
        (factors(0.0), ""),
        (np.random.default_rng(1).normal(size=(1, 16, 8, 8)).astype(np.float32), ""),
    ],
    ids=["10-fold", "20-fold", "30000-fold", "negative", "zeros", "nothing else than zeros", "normal"],
)
def test_a_factor_that_one_scale_rounds_too_much_stays_float(constant: np.ndarray, why: str) -> None:
    """A factor far below the largest one is 0 in uint8, and a product with it too."""
    model = build(
        f"""net (float[N,16,8,8] x) => (float[N,16,8,8] y) {{
          [conv] a = Conv{PADS}(x, w)
          [mul] b = Mul(k, a)
          [after] y = Conv{PADS}(b, w)
        }}""",
        w=(16, 16, 3, 3),
        k=constant,
    )
    plan = planned(model, ranges={"x": (-1, 1), "a": (-0.5, 0.5), "b": (-1, 1), "y": (-1, 1)})
    assert why in str(reason(plan, "mul"))
    assert impls(plan)["mul"] is (FLOAT if why else U8)


def concatenation() -> ir.Model:
    return build(
        f"""net (float[N,16,8,8] x) => (float[N,16,8,8] y) {{
          [left] a = Conv{PADS}(x, w1)
          [right] b = Conv{PADS}(x, w2)
          [concat] c = Concat<axis = 1>(a, b)
          [after] y = Conv{PADS}(c, w3)
        }}""",
        w1=(16, 16, 3, 3),
        w2=(16, 16, 3, 3),
        w3=(16, 32, 3, 3),
    )


@pytest.mark.parametrize("model", [concatenation(), residual()], ids=["Concat", "Add"])
@pytest.mark.parametrize(
    ("narrow", "impl"),
    [((-1.0, 1.0), U8), ((0.0, 8.0), U8), ((0.0, 0.5), FLOAT), ((0.2, 0.5), FLOAT), ((0.0, 0.0), U8)],
    ids=["equal", "16-fold", "256-fold", "away from zero", "constant"],
)
def test_branches_whose_ranges_differ_widely_do_not_meet_in_uint8(
    model: ir.Model, narrow: tuple[float, float], impl: Impl
) -> None:
    wide = (-64.0, 64.0) if narrow[0] >= 0 else (-1.0, 1.0)
    name = "concat" if "concat" in {node.name for node in model.graph} else "add"
    assert impls(planned(model))[name] is U8  # before calibration everything that might be int8 is observed
    for ranges in ({"a": wide, "b": narrow}, {"a": narrow, "b": wide}):
        plan = planned(model, ranges={"x": (-1, 1), "c": wide, "y": (-9, 9), **ranges})
        assert impls(plan)[name] is impl
        if impl is FLOAT:
            assert "ranges that meet in its unit differ" in reason(plan, name)
            assert impls(plan)["after"] is U8


# ------------------------------------------------------------------------------------ operators that move values


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        ("MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)", "16,4,4"),
        ("Reshape(a, target)", "16,4,16"),
        ("Transpose<perm = [0, 1, 3, 2]>(a)", "16,8,8"),
        ("SpaceToDepth<blocksize = 2>(a)", "64,4,4"),
        ('Resize<mode = "nearest">(a, , scales)', "16,16,16"),
    ],
    ids=["MaxPool", "Reshape", "Transpose", "SpaceToDepth", "Resize"],
)
def test_what_moves_values_follows_its_neighbours(step: str, shape: str) -> None:
    channels = shape.split(",")[0]
    text = f"""net (float[N,16,8,8] x) => (float[N,8,H,W] y, float[N,{channels},I,J] z) {{
      [before] a = Conv{PADS}(x, w)
      [moves] b = {step}
      [after] y = Conv{PADS}(b, v)
      [in_float] s = Sin(x)
      [moves_float] z = {step.replace("(a", "(s")}
    }}"""
    constants = {"target": np.array([0, 16, 4, 16]), "scales": np.array([1, 1, 2, 2], np.float32)}
    used = {name: array for name, array in constants.items() if name in step}
    plan = planned(build(text, w=(16, 16, 3, 3), v=(8, int(channels), 3, 3), **used))
    assert impls(plan) == {"before": U8, "moves": U8, "after": U8, "in_float": FLOAT, "moves_float": FLOAT}
    assert plan.root("b") == "a"
    assert "b" not in plan.observed


def test_an_interpolating_resize_is_float() -> None:
    model = build(
        f"""net (float[N,16,8,8] x) => (float[N,16,16,16] y) {{
          [before] a = Conv{PADS}(x, w)
          [resize] b = Resize<mode = "linear">(a, , scales)
          [after] y = Conv{PADS}(b, w)
        }}""",
        w=(16, 16, 3, 3),
        scales=np.array([1, 1, 2, 2], np.float32),
    )
    plan = planned(model)
    assert impls(plan) == {"before": U8, "resize": FLOAT, "after": U8}
    assert "nearest" in reason(plan, "resize")


# -------------------------------------------------------------------------------------------------------- groups

GROUPS = {
    "SiLU": "[g1] s = Sigmoid(a)\n[g2] b = Mul(a, s)",
    "GELU": "[g1] d = Div(a, two)\n[g2] e = Erf(d)\n[g3] f = Add(e, one)\n[g4] g = Mul(a, f)\n[g5] b = Mul(g, half)",
    "hard-swish": "[g1] h = HardSigmoid(a)\n[g2] b = Mul(a, h)",
}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_an_activation_of_several_operators_is_one_unit(group: str) -> None:
    """In float, but for a hard-swish, of which the runtime makes two kernels there as well."""
    constants = {
        name: np.array(value, np.float32) for name, value in (("two", 2), ("one", 1), ("half", 0.5)) if name in group
    }
    model = build(
        f"""net (float[N,16,8,8] x) => (float[N,16,8,8] y) {{
          [before] a = Conv{PADS}(x, w)
          {group}
          [after] y = Conv{PADS}(b, w)
        }}""",
        w=(16, 16, 3, 3),
        **constants,
    )
    plan = planned(model)
    inside = [name for name in impls(plan) if name.startswith("g")]
    hard = "HardSigmoid" in group
    assert {impls(plan)[name] for name in inside} == {U8 if hard else FLOAT}
    joined = [unit for unit in plan.units if "g1" in unit.nodes]
    assert [unit.op for unit in joined] == ["function" if "Erf" in group else "gate"]
    assert {"g1", "g2"} <= set(joined[0].nodes)
    assert reason(plan, "g1") == ("" if hard else "the runtime fuses the group into one float kernel")
    assert impls(plan)["before"] is impls(plan)["after"] is U8


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ("-1", "the runtime fuses the group into one float kernel"),
        ("2, 3", "the runtime fuses the group into one float kernel"),
        ("1", "a mean over other axes than the last one; the runtime does not fuse the group"),
    ],
)
def test_a_group_is_called_fused_only_where_the_runtime_may_fuse_it(axes: str, says: str) -> None:
    model = between(f"[mean] m = ReduceMean <axes = [{axes}]> (a) [difference] b = Sub(a, m)")
    assert reason(planned(model), "mean").startswith(says)


# ------------------------------------------------------------------------------------- what a measurement may decide


def between(nodes: str, **constants: np.ndarray) -> ir.Model:
    """Put nodes that read ``a`` and give ``b`` between two convolutions."""
    text = f"net (float[N,16,8,8] x) => (float[N,16,8,8] y) {{ [before] a = Conv{PADS}(x, w) {nodes} [after] y = Conv{PADS}(b, w) }}"
    return build(text, w=(16, 16, 3, 3), **constants)


def forms(model: ir.Model, activation: str = "u8", **known: Any) -> dict[str, tuple[Impl, ...]]:
    """Return what `possible_forms` allows of each unit, by its name."""
    facts = dataclasses.replace(facts_of(model, activation=activation), **known)
    return possible_forms(facts, choose_by(facts, model))


EITHER, ONE = (FLOAT, U8), (FLOAT,)
ABLE = {
    "SiLU": (GROUPS["SiLU"], "u8", EITHER),
    "SiLU-signed": (GROUPS["SiLU"], "s8", EITHER),
    "hard-swish": (GROUPS["hard-swish"], "u8", EITHER),
    "hard-swish-signed": (GROUPS["hard-swish"], "s8", ONE),
    "hard-swish-falling": ("[g1] h = HardSigmoid <alpha = -0.2> (a) [g2] b = Mul(a, h)", "u8", ONE),
    "hard-swish-low": ("[g1] h = HardSigmoid <beta = 0.002> (a) [g2] b = Mul(a, h)", "u8", ONE),
    "hard-swish-off-grid": ("[g1] h = HardSigmoid <beta = 0.1> (a) [g2] b = Mul(a, h)", "u8", ONE),
    "hard-swish-on-grid": ("[g1] h = HardSigmoid <beta = 0.2> (a) [g2] b = Mul(a, h)", "u8", EITHER),
    "Tanh": ("[g1] s = Tanh(a) [g2] b = Mul(a, s)", "u8", ONE),
    "Sigmoid": ("[g2] b = Sigmoid(a)", "u8", EITHER),
    "HardSigmoid": ("[g2] b = HardSigmoid(a)", "u8", EITHER),
    "HardSigmoid-signed": ("[g2] b = HardSigmoid(a)", "s8", ONE),
    "HardSigmoid-flat": ("[g2] b = HardSigmoid <alpha = 0.0> (a)", "u8", ONE),
    "HardSigmoid-high": ("[g2] b = HardSigmoid <beta = 1.0> (a)", "u8", ONE),
    "Elu": ("[g2] b = Elu(a)", "u8", ONE),
}


@pytest.mark.parametrize(("nodes", "activation", "expected"), ABLE.values(), ids=ABLE)
def test_what_a_gate_may_become(nodes: str, activation: str, expected: tuple[Impl, ...]) -> None:
    found = forms(between(nodes), activation)
    assert found == {"before": EITHER, "g2": expected, "after": EITHER}


NATIVE = {
    "sum": ("[g] b = Add(a, x)", True),
    "product and Relu": ("[g] m = Mul(x, a) [relu] b = Relu(m)", True),
    "gate": ("s = GlobalAveragePool(a) [g] b = Mul(a, s)", True),
    "gate, turned": ("s = GlobalAveragePool(a) [g] b = Mul(s, a)", True),
    "row": ("s = MaxPool <kernel_shape = [8, 1]> (a) [g] b = Add(a, s)", False),
    "twice": ("[g] b = Add(a, a)", False),
    "channels": (
        "t = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a) [g] u = Concat <axis = 1> (a, t) b = Conv(u, v)",
        True,
    ),
    "rows": (
        "t = MaxPool <kernel_shape = [1, 1]> (a) [g] u = Concat <axis = 2> (a, t) b = MaxPool <kernel_shape = [9, 1]> (u)",
        False,
    ),
    "constant": ("[g] b = Mul(a, two)", False),
}


@pytest.mark.parametrize(("nodes", "native"), NATIVE.values(), ids=NATIVE)
def test_sums_products_and_concatenations_that_fit_may_be_native(nodes: str, native: bool) -> None:
    constants = {"two": np.asarray(2, np.float32)} if "two" in nodes else {}
    constants |= {"v": np.ones((16, 32, 1, 1), np.float32)} if "v)" in nodes else {}
    assert (Impl.U8_NATIVE in forms(between(nodes, **constants), native=True)["g"]) is native
    assert Impl.U8_NATIVE not in forms(between(nodes, **constants))["g"]


def test_what_is_slow_by_rule_is_a_choice_all_the_same() -> None:
    found = forms(chain())
    assert found == {
        "first": EITHER,
        "second": EITHER,
        "pool": EITHER,
        "third": EITHER,
        "flatten": EITHER,
        "dense": (FLOAT, U8, U8_FLOAT, *STOCK_FORMS),
    }


@pytest.mark.parametrize(
    ("tensor", "name", "left"),
    [
        ("y", "dense", (FLOAT, U8_FLOAT, *STOCK_FORMS)),
        ("f", "dense", (FLOAT, *STOCK_FORMS)),
        ("d", "third", ONE),
        ("r", "second", ONE),
    ],
    ids=["result of a product", "input of a product", "result", "input"],
)
def test_no_choice_makes_uint8_of_what_is_kept_in_float(tensor: str, name: str, left: tuple[Impl, ...]) -> None:
    assert forms(chain(), kept_float={tensor: "it ruins"})[name] == left


def test_what_the_user_has_fixed_is_no_choice() -> None:
    strategies = {"dense": Strategy.STATIC, "third": Strategy.WEIGHT}
    selection = Selection(exclude_nodes=frozenset({"second"}), strategies=strategies)
    found = forms(chain(), selection=selection)
    assert {name: found[name] for name in ("second", "third", "dense")} == {
        "second": ONE,
        "third": (Impl.WEIGHT,),
        "dense": (U8,),
    }
    assert found["first"] == found["pool"] == EITHER


def test_an_operator_of_another_domain_stays_float() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "mine" : 1]>
    net (float[N,64] x) => (float[N,64] y) {
      [before] a = MatMul(x, w)
      [mine] b = mine.MatMul(a, w)
      [after] y = MatMul(b, w)
    }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    plan = planned(ir.from_proto(proto))
    assert impls(plan)["mine"] is FLOAT
    assert reason(plan, "mine") == "an operator of domain mine"


# ----------------------------------------------------------------------------------------------- the user's wishes


def test_excluded_nodes_stay_float_with_what_they_absorb() -> None:
    for name in ("second", "clip"):
        plan = planned(chain(), Selection(exclude_nodes=frozenset({name})))
        assert impls(plan)["second"] is impls(plan)["clip"] is FLOAT
        assert reason(plan, "second") == "excluded by name"
        assert impls(plan)["third"] is U8


def test_not_all_included_operators_are_excluded() -> None:
    with pytest.raises(RequantError, match="all included operators are excluded: Conv, Gemm"):
        Selection(include_ops=frozenset({"Conv", "Gemm"}), exclude_ops=frozenset({"Conv", "Gemm", "MatMul"}))


def test_excluded_and_included_operators() -> None:
    plan = planned(chain(), Selection(exclude_ops=frozenset({"Conv"})))
    assert {node for node, impl in impls(plan).items() if impl is not FLOAT} == {"dense"}
    assert reason(plan, "second") == "excluded: Conv"
    plan = planned(chain(), Selection(include_ops=frozenset({"Gemm"})))
    assert {node for node, impl in impls(plan).items() if impl is not FLOAT} == {"dense"}
    assert reason(plan, "second") == "not among the included operators"
    both = Selection(include_ops=frozenset({"Gemm", "Conv"}), exclude_ops=frozenset({"Gemm"}))
    assert {node for node, impl in impls(planned(chain(), both)).items() if impl is not FLOAT} == {
        "second",
        "clip",
        "third",
    }


@pytest.mark.parametrize(
    ("selection", "near"),
    [
        (Selection(exclude_nodes=frozenset({"secnd"})), "no node named 'secnd'; did you mean 'second'?"),
        (Selection(exclude_ops=frozenset({"Convolution"})), "no operator in the model named 'Convolution'"),
        (Selection(include_ops=frozenset({"gemm"})), "named 'gemm'; did you mean 'Gemm'?"),
    ],
    ids=["node", "excluded operator", "included operator"],
)
def test_names_that_the_model_does_not_have_are_refused(selection: Selection, near: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        selection.check(chain())
    assert near in str(caught.value)


def test_names_that_the_model_has_are_accepted() -> None:
    Selection(frozenset({"pool"}), frozenset({"Flatten"}), frozenset({"Conv"})).check(chain())


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [("c", {"third", "flatten", "dense"}), ("r", {"third", "flatten", "dense"}), ("f", {"second", "clip", "pool"})],
    ids=["output", "input", "of the last"],
)
def test_a_tensor_kept_in_float_is_neither_read_nor_written_in_uint8(tensor: str, expected: set[str]) -> None:
    plan = planned(chain(), kept_float={tensor: "it ruins"})
    integer = {node for node, impl in impls(plan).items() if impl is not FLOAT}
    assert tensor not in plan.quantized
    assert expected <= integer
    assert "it ruins" in {choice.reason.text for choice in plan.choices.values()}


def test_a_product_may_write_a_tensor_that_is_kept_in_float() -> None:
    model = build(
        "net (float[N,64] x) => (float[N,64] y) {\n[a] a = MatMul(x, v)\n[b] y = MatMul(a, w)\n}",
        v=(64, 64),
        w=(64, 64),
    )
    assert impls(planned(model, kept_float={"a": "it ruins"})) == {"a": U8_FLOAT, "b": FLOAT}


# ------------------------------------------------------------------------------------------------ plans as values


def test_a_plan_and_its_parts_are_frozen_values() -> None:
    plan = choose(chain())
    unit = plan.units[0]
    assert hash(unit) == hash(dataclasses.replace(unit))
    assert hash(plan.choices[unit.name]) == hash(dataclasses.replace(plan.choices[unit.name]))
    assert hash(Selection(frozenset({"a"}))) == hash(Selection(frozenset({"a"})))
    for value, name in (
        (plan, "units"),
        (unit, "name"),
        (Choice(FLOAT, other("why")), "reason"),
        (Selection(), "exclude_ops"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


def test_choices_can_be_replaced_in_a_new_plan() -> None:
    plan = choose(chain())
    changed = plan.with_choices({"third": Choice(FLOAT, other("too noisy"))})
    assert impls(changed)["third"] is FLOAT
    assert impls(plan)["third"] is U8
    assert changed.domain("d") is Domain.FLOAT
    assert changed.units == plan.units


def test_an_opset_without_integer_operators_stays_float() -> None:
    model = chain()
    model.opset_imports[""] = 9
    assert set(impls(choose(model)).values()) == {FLOAT}


def test_what_moves_values_into_a_body_stays_uint8() -> None:
    model = build(
        """g (float[2,64] x, bool c) => (float[A,B] y) {
            [m] m = MatMul(x, w)
            [r] r = Reshape(m, shape)
            [y] y = If(c) <
                then_branch = a () => (float[A,B] p) { p = Relu(r) }, else_branch = b () => (float[A,B] q) { q = Abs(r) }
            >
        }""",
        w=(64, 64),
        shape=np.array([4, 32]),
    )
    assert impls(choose(model)) == {"m": U8, "r": U8, "p": FLOAT, "q": FLOAT, "y": FLOAT}


def test_an_embedding_moves_no_tensor_that_has_noise() -> None:
    model = build(
        "embedding (int64[N, 4] ids) => (float[N, 4, 2] y) { x = Gather(table, ids) y = MatMul(x, w) }",
        table=(8, 16),
        w=(16, 2),
    )
    assert Noises.of(choose(model), {"x": 0.5}, {}, {}, {}).of_tensor("x") == 0.5


@pytest.mark.parametrize("portable", [False, True], ids=["here", "portable"])
def test_what_any_placement_may_quantize_is_calibrated(portable: bool) -> None:
    text = """g (float[1,4,8,8] x) => (float[1,8,8,8] y) {
        [first] a = Conv <pads = [1, 1, 1, 1]> (x, v)
        [sigmoid] s = Sigmoid(a)  [silu] b = Mul(a, s)
        [second] c = Conv <pads = [1, 1, 1, 1]> (b, w)
        [sin] y = Sin(c)
    }"""
    made = build(text, v=(8, 4, 3, 3), w=(8, 8, 3, 3))
    facts = dataclasses.replace(facts_of(made), portable=portable)
    plan = choose_by(facts, made)
    options = possible_forms(facts, plan)
    read = {t for unit in plan.units for form in options[unit.name] if form.reads_u8 for t in unit.inputs}
    written = {t for unit in plan.units for form in options[unit.name] if form.writes_u8 for t in unit.outputs}
    assert {"a", "c"} <= written
    assert read | written <= set(plan_to_calibrate(facts, plan).quantized)


@pytest.mark.parametrize(("axes", "native"), [("8,8", True), ("1,8,8", False), ("8,8,8", False)])
def test_a_batch_normalization_is_a_scale_and_a_shift_that_native_operators_compute(axes: str, native: bool) -> None:
    model = build(
        f"""net (float[1,4,{axes}] x) => (float[1,4,{axes}] y) {{
          [conv] a = Conv(x, w)
          [tanh] t = Tanh(a)
          [norm] y = BatchNormalization(t, g, g, g, v)
        }}""",
        w=(4, 4, *[1] * (axes.count(",") + 1)),
        g=(4,),
        v=np.ones(4, np.float32),
    )
    facts = dataclasses.replace(facts_of(model), static=True, native=True)
    plan = choose_by(facts, model)
    assert "no integer kernel for BatchNormalization; a native operator computes it" in reason(plan, "norm")
    (unit,) = [unit for unit in plan.units if "norm" in unit.nodes]
    assert (Impl.U8_NATIVE in possible_forms(facts, plan)[unit.name]) is native


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ({"kept_float": {"b": "in uint8 'b' alone leaves 3 dB"}}, "in uint8 'b' alone leaves 3 dB"),
        ({"native": False}, "the runtime has no integer kernel for Elu"),
        ({}, "the runtime has no integer kernel for Elu"),  # of the rules, which have no native form for it
    ],
    ids=["kept-float", "stock", "free"],
)
def test_a_function_that_native_operators_compute_has_its_own_reason(known: dict[str, Any], says: str) -> None:
    model = between("[g] b = Elu(a)")
    facts = dataclasses.replace(facts_of(model), **{"static": True, "native": True, **known})
    assert reason(choose_by(facts, model), "g") == says
