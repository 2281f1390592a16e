"""The operators that replace a slow function compute what its definition says, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from requant.transforms.spell_slow_functions import POWERS, spell_body, spell_slow_functions

U = 2**-24
"""Half a unit in the last place of a float32, relative."""
TINY = 128 * 2**-126
"""Behind the least normal number, times the largest factor here, the runtime has fewer digits."""
SLOPES = {
    "flat": [[0.25], [1.0], [0.5]],
    "steep": [[-1.0], [2.0], [0.5]],
    "none": [[0.0], [0.5], [1.0]],
    "falling": [[-1.0], [0.5], [-0.25]],
}
SPECIAL = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.0, 90, -90, 19.999, 20.001, -17, 1e-30, -1e-30, 2e38])


def softplus(x: Any) -> Any:
    """Return log(1 + exp(x))."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def elu(alpha: float, divisor: float) -> Any:
    """Return an Elu or a Celu."""
    return lambda x: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0) / divisor))


def prelu(slopes: str) -> Any:
    """Return a PRelu of a tensor with three channels."""
    return lambda x: np.where(x >= 0, x, x * np.array(SLOPES[slopes]))


# Its nodes, its definition, and its error: relative, and absolute. An Exp and a Log of the runtime are exact to two
# units in the last place, 4 U; other operators to U.
FUNCTIONS: dict[str, tuple[str, Any, float, float]] = {
    # twice the error of Exp, a sum and a product; a sum, a quotient and a product
    "Mish": ("y = Mish(x)", lambda x: x * np.tanh(softplus(x)), 13 * U, TINY),
    "Mish of three": (
        "a = Softplus(x) b = Tanh(a) y = Mul(x, b)",
        lambda x: x * np.tanh(softplus(x)),
        13 * U,
        TINY,
    ),
    # Exp, Log, two sums; the missed part misses its quotient by 1 + e, at most U / log(2)
    "Softplus": ("y = Softplus(x)", softplus, 12 * U, TINY),
    # Exp and a difference next to 1, and two roundings of the result
    "Elu": ("y = Elu(x)", elu(1, 1), 2 * U, 5 * U),
    "Elu of 2": ("y = Elu <alpha = 2.0> (x)", elu(2, 1), 2 * U, 10 * U),
    # also a quotient, of which the exponential makes at most U / e
    "Celu of 2": ("y = Celu <alpha = 2.0> (x)", elu(2, 2), 2 * U, 12 * U),
    **{f"PRelu {name}": (f"y = PRelu(x, {name})", prelu(name), U, TINY) for name in SLOPES},
}


def model(nodes: str, **constants: Any) -> onnx.ModelProto:
    """Return a model of one tensor."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> g (float[N,3,K] x) => (float[N,3,K] y) {{ {nodes} }}'
    )
    values = {**SLOPES, **constants}
    read = {name for node in proto.graph.node for name in node.input}
    for name in sorted(read & values.keys()):
        proto.graph.initializer.append(numpy_helper.from_array(np.array(values[name], np.float32), name))
    return proto


def computed(made: ir.Model, x: Any) -> Any:
    """Return the result of a model for one input."""
    results: Any = ort.InferenceSession(ir.to_proto(made).SerializeToString()).run(None, {"x": x})
    return results[0]


def spelled(proto: onnx.ModelProto) -> ir.Model:
    """Return a model of one slow function, with fast operators."""
    made = ir.from_proto(proto)
    assert spell_slow_functions(made).applied == 1
    assert not {node.op_type for node in made.graph} & {
        "Mish",
        "Softplus",
        "Tanh",
        "Elu",
        "Celu",
        "PRelu",
        "Pow",
        "Softmax",
    }
    assert not spell_slow_functions(made).applied
    return made


@given(
    name=st.sampled_from(list(FUNCTIONS)),
    size=st.sampled_from([1e-6, 1e-3, 0.1, 1, 10, 40]),
    length=st.integers(1, 70),
    seed=st.integers(0, 2**16),
)
def test_results_are_those_of_the_definition(name: str, size: float, length: int, seed: int) -> None:
    nodes, definition, relative, absolute = FUNCTIONS[name]
    x = np.random.default_rng(seed).normal(0, size, (2, 3, length)).astype(np.float32)
    wanted = definition(x.astype(np.float64))
    np.testing.assert_allclose(computed(spelled(model(nodes)), x), wanted, rtol=relative, atol=absolute)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_that_are_not_finite_or_large_stay(name: str) -> None:
    nodes, definition, relative, absolute = FUNCTIONS[name]
    x = np.broadcast_to(SPECIAL.astype(np.float32), (1, 3, SPECIAL.size)).copy()
    with np.errstate(all="ignore"):
        wanted = definition(x.astype(np.float64)).astype(np.float32)
    found = computed(spelled(model(nodes)), x)
    np.testing.assert_allclose(found, wanted, rtol=relative, atol=absolute)


@given(
    exponent=st.sampled_from(list(POWERS)),
    size=st.sampled_from([1e-6, 1.0, 1e6]),
    signed=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_powers(exponent: float, size: float, signed: bool, seed: int) -> None:
    """A square doubles an error; at most three roundings, two of which are doubled."""
    x = np.random.default_rng(seed).uniform(-size if signed else 0, size, (2, 3, 5)).astype(np.float32)
    with np.errstate(all="ignore"):
        wanted = np.power(x.astype(np.float64), exponent)
    found = computed(spelled(model("y = Pow(x, p)", p=exponent)), x)
    np.testing.assert_allclose(found, wanted, rtol=5 * U, atol=TINY)


@pytest.mark.parametrize("exponent", POWERS)
def test_powers_of_special_values(exponent: float) -> None:
    """All but those of -infinity to a power that is no integer."""
    x = SPECIAL[(-np.inf != SPECIAL) | (exponent % 1 == 0)].astype(np.float32)
    x = np.stack([x, x, x])[None]
    proto = model("y = Pow(x, p)", p=exponent)
    wanted = computed(ir.from_proto(proto), x)
    np.testing.assert_allclose(computed(spelled(proto), x), wanted, rtol=6 * U)


SOFTMAXES = {
    "channels": ((1, 3, 16, 16), 1),
    "channels of an unknown image": ((2, 5, 20, 9), 1),
    "two channels": ((2, 2, 16, 16), 1),
    "two classes of many boxes": ((1, 300, 2), -1),
    "two volumes": ((1, 2, 8, 8, 8), 1),
    "steps": ((40, 2, 1, 64), 0),
}
"""Shapes and axes that have a fast form."""


def softmax(shape: tuple[int, ...], axis: int, opset: int = 18) -> onnx.ModelProto:
    """Return a model of a Softmax; an image of 20 rows has axes of unknown lengths."""
    axes = ["N", str(shape[1]), "H", "W"] if 20 in shape else [str(length) for length in shape]
    of = ", ".join(axes)
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[{of}] x) => (float[{of}] y) '
        f"{{ y = Softmax <axis = {axis}> (x) }}"
    )


@given(
    name=st.sampled_from(list(SOFTMAXES)),
    opset=st.sampled_from([13, 17, 18, 22]),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_a_softmax_is_that_of_the_definition(name: str, opset: int, size: float, seed: int) -> None:
    """The difference of two logits is rounded, and its error is that of the power: U for each unit of the difference.

    An Exp is exact to 4 U, the sum of n powers to n U, the quotient to U.
    """
    shape, axis = SOFTMAXES[name]
    x = np.random.default_rng(seed).normal(0, size, shape).astype(np.float32)
    made = ir.from_proto(softmax(shape, axis, opset))
    assert spell_slow_functions(made).applied == 1
    power = np.exp(x.astype(np.float64) - x.max(axis, keepdims=True))
    difference = np.ptp(x, axis).max()
    relative = (2 * difference + 10 + shape[axis]) * U
    np.testing.assert_allclose(computed(made, x), power / power.sum(axis, keepdims=True), rtol=relative, atol=TINY)


def test_two_logits_that_are_far_apart_give_0_and_1() -> None:
    x = np.zeros((1, 300, 2), np.float32)
    x[0, :4] = np.array([[200, -200], [-3e38, 3e38], [np.nan, 0], [-np.inf, 0]])
    found = computed(spelled(softmax(x.shape, -1)), x)
    np.testing.assert_array_equal(found[0, :5], [[1, 0], [0, 1], [np.nan, np.nan], [0, 1], [0.5, 0.5]])


def test_the_operator_that_reads_the_logits_keeps_the_name() -> None:
    made = ir.from_proto(softmax((1, 300, 2), -1))
    made.graph.node(0).name = "head"
    spell_slow_functions(made)
    (head,) = (node for node in made.graph if node.name == "head")
    assert head.inputs[0] is made.graph.inputs[0]


@pytest.mark.parametrize(
    ("shape", "axis", "opset"),
    [
        ((1, 8, 64, 64), -1, 18),  # rows
        ((1, 8, 64, 64), 3, 18),
        ((1, 2), -1, 18),  # few values
        ((4, 3, 4, 4), 1, 18),
        ((64, 5, 4), 1, 18),  # few behind the axis
        ((1, 2, 16, 16), 1, 12),  # another definition
    ],
)
def test_a_softmax_that_is_as_fast_stays(shape: tuple[int, ...], axis: int, opset: int) -> None:
    assert not spell_slow_functions(ir.from_proto(softmax(shape, axis, opset))).applied


CONSTANTS = {"p": 0.5, "one": 1.0}
CHAINS = [
    "{y} = Softplus({x})",
    "{y} = Mish({x})",
    "a{y} = Softplus({x}) b{y} = Tanh(a{y}) {y} = Mul({x}, b{y})",
    "a{y} = Softplus({x}) b{y} = Tanh(a{y}) c{y} = Mul({x}, b{y}) {y} = Add(c{y}, a{y})",
    "{y} = Elu({x})",
    "{y} = PRelu({x}, flat)",
    "a{y} = Abs({x}) b{y} = Add(a{y}, one) {y} = Pow(b{y}, p)",
    "{y} = Tanh({x})",
]


@given(chosen=st.lists(st.sampled_from(CHAINS), min_size=1, max_size=5), seed=st.integers(0, 2**16))
def test_chains_of_functions_keep_their_results_also_in_bodies(chosen: list[str], seed: int) -> None:
    """Each function has a slope of at most 2 here, so that the error of a chain is a sum of a few errors."""
    names = ["x", *(f"t{place}" for place in range(1, len(chosen))), "y"]
    nodes = " ".join(text.format(x=names[i], y=names[i + 1]) for i, text in enumerate(chosen))
    proto = model(nodes, **CONSTANTS)
    x = np.random.default_rng(seed).normal(0, 3, (2, 3, 7)).astype(np.float32)
    wanted = computed(ir.from_proto(proto), x)
    made, body = ir.from_proto(proto), ir.from_proto(proto)
    spell_slow_functions(made)
    spell_body(body.graph)
    for each in (made, body):
        assert not {"Softplus", "Mish", "Elu"} & {node.op_type for node in each.graph}
        np.testing.assert_allclose(computed(each, x), wanted, rtol=0, atol=64 * 2 ** len(chosen) * U * np.abs(x).max())
    assert set(body.graph.initializers) <= {value.name for value in proto.graph.initializer}


def test_the_last_operator_has_the_name_of_the_function() -> None:
    made = ir.from_proto(model("[soft] a = Softplus(x) [gate] b = Tanh(a) [product] y = Mul(x, b)"))
    spell_slow_functions(made)
    *inner, last = [node.name for node in made.graph]
    assert last == "product"
    assert all(str(name).startswith("product/spelled") for name in inner)
