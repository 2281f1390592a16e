"""Lower bounds of tensors: what the graph computes is never below them, and logarithms far from 0 are found."""

from __future__ import annotations

from math import inf

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import reference

from requant.transforms.patterns.logarithms import find_logarithm
from requant.transforms.patterns.lower_bounds import DEEPEST, lower_bound

ONE = ["Relu", "Abs", "Exp", "Sigmoid", "Softplus", "Neg", "Tanh", "Identity", "GlobalMaxPool", "GlobalAveragePool"]
TWO = ["Add", "Mul", "Max", "Min", "Sub", "Concat<axis = 0>"]
CONSTANTS = {"one": 1.0, "half": 0.5, "minus": -2.0}


def model(nodes: str) -> onnx.ModelProto:
    """Return a model of nodes that compute y from the image x, with constants of one element."""
    constants = ", ".join(f"float {name} = {{{number}}}" for name, number in CONSTANTS.items())
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[1,1,3,3] x) => (float y) <{constants}> {{ {nodes} }}'
    )


def bound_of(nodes: str) -> float:
    return lower_bound(ir.from_proto(model(nodes)).graph.outputs[0])


@pytest.mark.parametrize(
    ("nodes", "bound"),
    [
        ("r = Relu(x) y = Add(r, one)", 1.0),
        ("r = Relu(x) y = Add(half, r)", 0.5),
        ("y = Clip(x, half)", 0.5),
        ("y = Clip(x, minus, one)", -2.0),
        ("y = Clip(x)", -inf),
        ("y = Max(x, half)", 0.5),
        ("e = Exp(x) s = Sigmoid(x) p = Mul(e, s) y = Add(p, one)", 1.0),
        ("r = Relu(x) m = MaxPool<kernel_shape = [2, 2]>(r) f = Flatten(m) y = Add(f, one)", 1.0),
        ("r = Relu(x) y = Mul(r, minus)", -inf),
        ("y = Add(x, one)", -inf),
        ("r = Relu(x) y = Sub(r, one)", -inf),
        ("r = Relu(x) y = Min(r, minus)", -2.0),
    ],
)
def test_bounds(nodes: str, bound: float) -> None:
    assert bound_of(nodes) == bound


def test_a_long_row_of_operators_has_no_bound() -> None:
    row = " ".join(f"t{place + 1} = Identity(t{place})" for place in range(DEEPEST))
    assert bound_of(f"t0 = Relu(x) {row} y = Add(t{DEEPEST}, one)") == -inf


@given(data=st.data(), seed=st.integers(0, 2**16))
def test_no_value_is_below_its_bound(data: st.DataObject, seed: int) -> None:
    whole, numbers, nodes = ["x"], [*CONSTANTS], []
    for place in range(data.draw(st.integers(1, 6))):
        op = data.draw(st.sampled_from([*ONE, *TWO]))
        first = data.draw(st.sampled_from(whole))
        # a Concat joins the batch: its result is not read again by operators of two tensors of one batch
        second = (
            f", {data.draw(st.sampled_from([first] if 'Concat' in op else [*numbers, first]))}" if op in TWO else ""
        )
        nodes.append(f"t{place} = {op}({first}{second})")
        whole.append(f"t{place}")
    proto = model(" ".join([*nodes, f"y = Identity({whole[-1]})"]))
    bound = lower_bound(ir.from_proto(proto).graph.outputs[0])
    x = (3 * np.random.default_rng(seed).normal(size=(1, 1, 3, 3))).astype(np.float32)
    with np.errstate(all="ignore"):
        (y,) = reference.ReferenceEvaluator(proto).run(None, {"x": x})
    assert not (np.asarray(y) < bound - 1e-6 * abs(bound)).any() or bound == -inf


FOUND = {
    "SPLADE": ("r = Relu(x) s = Add(r, one) y = Log(s)", "r", 1.0, 2),
    "constant first": ("r = Abs(x) s = Add(half, r) y = Log(s)", "r", 0.5, 2),
    "Softplus": ("e = Exp(x) s = Add(e, one) y = Log(s)", "x", inf, 3),
    "shared Exp": ("e = Exp(x) s = Add(e, one) l = Log(s) y = Mul(l, e)", "e", 1.0, 2),
}


@pytest.mark.parametrize(("nodes", "x", "least", "count"), FOUND.values(), ids=FOUND)
def test_logarithms_far_from_0(nodes: str, x: str, least: float, count: int) -> None:
    (found,) = [each for node in ir.from_proto(model(nodes)).graph if (each := find_logarithm(node)) is not None]
    assert (found.x.name, found.least, len(found.nodes)) == (x, least, count)


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Log(x)",
        "s = Add(x, one) y = Log(s)",
        "r = Relu(x) s = Add(r, minus) y = Log(s)",
        "r = Relu(x) s = Add(r, one) l = Log(s) y = Mul(l, s)",
        "r = Relu(x) s = Sub(r, one) y = Log(s)",
        "r = Relu(x) s = Add(r, r) y = Log(s)",
    ],
    ids=["no sum", "no bound", "negative", "another reader", "difference", "no constant"],
)
def test_other_logarithms(nodes: str) -> None:
    assert not [node for node in ir.from_proto(model(nodes)).graph if find_logarithm(node)]
