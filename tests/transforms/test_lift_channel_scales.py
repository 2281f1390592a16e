"""Factors above 0 behind activations and poolings give the same results in the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import reference

from requant.transforms.fold_batch_norms import fold_batch_norms
from requant.transforms.lift_channel_scales import lift_channel_scales

BETWEEN = [
    "Relu({})",
    "LeakyRelu<alpha = -0.5>({})",
    "PRelu({}, slope)",
    "MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>({})",
    "AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>({})",
    "GlobalAveragePool({})",
]
ENDS = {
    "Mul": "y = Mul({}, k)",
    "Div": "y = Div({}, k)",
    "norm": "y = BatchNormalization<epsilon = 0.0>({}, k1, beta, mean, variance)",
}
FACTORS = st.sampled_from([1e-3, 0.5, 1.0, 30.0])
BOUND = 64 * 2**-23  # roundings of sums of two products, of a norm and of means of nine values


@given(
    linear=st.sampled_from(["Conv(x, w, b)", "ConvTranspose(x, w, b)"]),
    between=st.lists(st.sampled_from(BETWEEN), min_size=1, max_size=3),
    end=st.sampled_from([*ENDS]),
    factors=st.tuples(FACTORS, FACTORS),
    inner_norm=st.booleans(),
)
def test_results_stay(
    linear: str, between: list[str], end: str, factors: tuple[float, float], inner_norm: bool
) -> None:
    nodes, last = [f"c = {linear}"], "c"
    if inner_norm:
        nodes.append("n = BatchNormalization<epsilon = 0.0>(c, variance, mean, beta, variance)")
        last = "n"
    for place, text in enumerate(between):
        nodes.append(f"t{place} = {text.format(last)}")
        last = f"t{place}"
    proto = model(" ".join([*nodes, ENDS[end].format(last)]), factors)
    made = ir.from_proto(proto)
    assert lift_channel_scales(made).applied == 1
    assert lift_channel_scales(made).applied == 0
    assert fold_batch_norms(made).applied == 1 + inner_norm
    kept = [node.op_type for node in made.graph]
    assert len(kept) == 1 + len(between) + (end == "norm")
    assert kept[-1] == "Add" if end == "norm" else "Add" not in kept
    x = np.random.default_rng(7).normal(size=(1, 2, 4, 4)).astype(np.float32)
    after, before = (computed(each, x) for each in (ir.to_proto(made), proto))
    largest = 100 * max(1.0, *factors, *(1 / np.array(factors)))  # of the values, which are sums of a few of 10 or less
    np.testing.assert_allclose(after, before, rtol=0, atol=BOUND * largest)


@pytest.mark.parametrize(("pads", "kept"), [("", ["Conv", "Relu", "Conv"]), ("<pads = [1, 1, 1, 1]>", 4)])
def test_the_summand_goes_into_the_next_product_unless_it_pads(pads: str, kept: list[str] | int) -> None:
    text = f"c = Conv(x, w, b) r = Relu(c) {ENDS['norm'].format('r').replace('y =', 'n =')} y = Conv{pads}(n, w)"
    proto = model(text, (0.5, 30.0))
    made = ir.from_proto(proto)
    assert lift_channel_scales(made).applied == 1
    fold_batch_norms(made)
    found = [node.op_type for node in made.graph]
    assert found == kept if isinstance(kept, list) else len(found) == kept
    x = np.random.default_rng(7).normal(size=(1, 2, 4, 4)).astype(np.float32)
    after, before = (computed(each, x) for each in (ir.to_proto(made), proto))
    np.testing.assert_allclose(after, before, rtol=0, atol=BOUND * 30 * 100)


@pytest.mark.parametrize("between", ["t", "Relu(t)"], ids=["last", "before a Relu"])
def test_a_pooling_whose_indices_are_read_stays(between: str) -> None:
    text = f"c = Conv(x, w, b) t, i = MaxPool<kernel_shape = [2, 2]>(c) r = {between} y = Mul(r, k)"
    made = ir.from_proto(model(text.replace("r = t y = Mul(r", "y = Mul(t"), (0.5, 2.0)))
    assert lift_channel_scales(made).applied == 0


def model(nodes: str, factors: tuple[float, float]) -> onnx.ModelProto:
    """Return a model of nodes that compute y from the image x."""
    k = ", ".join(map(str, factors))
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> scaled (float[1,2,4,4] x) => (float[1,2,h,w] y)
        <float[2,2,1,1] w = {{1, -2, -3, 2}}, float[2] b = {{-0.5, 1}}, float[2,1,1] k = {{{k}}},
         float[2] k1 = {{{k}}}, float[2] beta = {{1, -1}}, float[2] mean = {{0.5, 2}}, float[2] variance = {{4, 0.25}},
         float[2,1,1] slope = {{0.25, -0.5}}> {{ {nodes} }}"""
    )


def computed(proto: onnx.ModelProto, x: Any) -> Any:
    """Return the first result of a model."""
    results: Any = reference.ReferenceEvaluator(proto).run(None, {"x": x})
    return results[0]
