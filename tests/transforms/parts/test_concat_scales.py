"""The parts of a Concat get factors, the weights behind it take them out, and the model computes the same."""

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.transforms import verify
from requant.transforms.graphs.queries import constant, node_name
from requant.transforms.graphs.rewriter import names
from requant.transforms.parts.concat_scales import find_joined, scale_parts, scales_part
from tests.transforms.parts.test_equalize import feed_of, made, outputs

JOIN = "e, f = Split<axis = 1, num_outputs = 2>(x) j = Concat<axis = 1>(e, f)"
IMAGE, MATRIX = "2,4,8,8", "2,3,4"
FREE = {
    "Conv": (f"{JOIN} y = Conv(j, k, a)", IMAGE),
    "an input": ("e, f = Split<axis = 1, num_outputs = 2>(x) j = Concat<axis = 1>(f, e) y = Conv(j, k, a)", IMAGE),
    "groups": (f"{JOIN} y = Conv<group = 4>(j, d, a)", IMAGE),
    "ConvTranspose": (f"{JOIN} y = ConvTranspose(j, p, a)", IMAGE),
    "Relu, MaxPool": (f"{JOIN} s = Relu(j) m = MaxPool<kernel_shape = [2, 2]>(s) y = Conv(m, k)", IMAGE),
    "Transpose": (f"{JOIN} s = Transpose<perm = [0, 2, 3, 1]>(j) y = MatMul(s, v)", IMAGE),
    "two readers": (f"{JOIN} s = LeakyRelu(j) m = Conv(s, k, a) n = Conv(j, l) y = Add(m, n)", IMAGE),
    "shared weights": (f"{JOIN} m = Conv(j, k, a) n = Conv(x, k, a) y = Add(m, n)", IMAGE),
    "its shape": (f"{JOIN} s = Shape(j) m = Expand(half, s) n = Conv(j, k) y = Add(m, n)", IMAGE),
    "MatMul": ("e, f = Split<axis = -1, num_outputs = 2>(x) j = Concat<axis = 2>(e, f) y = MatMul(j, v)", MATRIX),
}
BOUND = {
    "an output": (f"{JOIN} y = Conv(j, k, a)", IMAGE, "y j"),
    "a sum": (f"{JOIN} m = Conv(j, k, a) y = Add(m, j)", IMAGE, "y"),
    "a Sigmoid": (f"{JOIN} s = Sigmoid(j) y = Conv(s, k, a)", IMAGE, "y"),
    "computed weights": (f"{JOIN} m = Identity(k) y = Conv(j, m, a)", IMAGE, "y"),
    "rows": ("j = Concat<axis = 2>(x, x) y = Conv(j, k)", IMAGE, "y"),
    "the weights": (
        "e, f = Split<axis = 0, num_outputs = 2>(v) j = Concat<axis = 0>(e, f) y = MatMul(x, j)",
        MATRIX,
        "y",
    ),
    "no reader": ("e, f = Split<axis = 1, num_outputs = 2>(x) j = Concat<axis = 1>(e, f) y = Shape(j)", IMAGE, "y"),
    "another Concat": (f"{JOIN} s = Concat<axis = 2>(j, j) y = Conv(s, k, a)", IMAGE, "y"),
    "one part": ("j = Concat<axis = 1>(x) y = Conv(j, k, a)", IMAGE, "y"),
}


def model_of(body: str, shape: str, results: str = "y") -> ir.Model:
    return made(body, shape, results, 18)


@pytest.mark.parametrize("name", FREE)
@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(-6, 9), min_size=4, max_size=4))
def test_powers_of_two_leave_the_results_as_they_were(name: str, exponents: list[int]) -> None:
    body, shape = FREE[name]
    model, feed = model_of(body, shape), feed_of(tuple(map(int, shape.split(","))))
    before = outputs(model, feed)
    (found,) = find_joined(model)
    assert found.lengths == (2, 2)
    factors = 2.0 ** np.asarray(exponents)
    assert scale_parts(found, factors, names(model))
    verify(model)
    assert sum(node.op_type == "Mul" for node in model.graph) == (factors.reshape(2, 2) != 1).any(axis=1).sum()
    for one, other in zip(before, outputs(model, feed), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(np.abs(one).max()))


@pytest.mark.parametrize("name", BOUND)
def test_a_concat_with_other_readers_is_not_found(name: str) -> None:
    assert find_joined(model_of(*BOUND[name])) == []


def test_the_weights_tell_one_unknown_length() -> None:
    assert find_joined(model_of("j = Concat<axis = 1>(x, x) y = Conv(j, k, a)", "2,M,8,8")) == []
    one = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 3, 4, 4] x, float[1, M, 4, 4] z) => (float[1, 1, 4, 4] y)
        <float[1, 5, 1, 1] w = {1, 2, 3, 4, 5}> { j = Concat <axis = 1> (z, x) y = Conv (j, w) }"""
    )
    (found,) = find_joined(one)
    assert found.lengths == (2, 3)


def test_weights_that_would_not_stay_finite_are_left_alone() -> None:
    model = model_of(*FREE["Conv"])
    before = ir.to_proto(model)
    (found,) = find_joined(model)
    assert not scale_parts(found, np.array([1, 1, 1, 1e-39]), names(model))
    assert ir.to_proto(model) == before


def test_the_name_of_an_operator_tells_that_it_scales_a_part() -> None:
    model = model_of(*FREE["Conv"])
    (found,) = find_joined(model)
    concat = node_name(found.node)
    assert scale_parts(found, np.array([1.0, 1, 4, 4]), names(model))
    (product,) = (node for node in model.graph if node.op_type == "Mul")
    name, factor = node_name(product), constant(product.inputs[1])
    assert factor is not None
    assert factor.shape.numpy() == ()  # one number for equal factors
    assert scales_part(name, {concat})
    assert not scales_part(name, {"other"})
    assert not scales_part(concat, {concat})
