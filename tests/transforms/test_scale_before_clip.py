"""A factor and a summand behind bounds give the same results in front of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
from hypothesis import given
from hypothesis import strategies as st
from onnx import reference

from requant.transforms.scale_before_clip import scale_before_clip

NUMBERS = st.sampled_from([-2.0, -0.25, 0.5, 3.0])
STEPS = st.tuples(st.sampled_from(["Mul", "Div", "Add", "Sub"]), NUMBERS)
BOUNDS = st.sampled_from(["Relu(c)", "Clip(c, low)", "Clip(c, , high)", "Clip(c, low, high)", "Clip(c)"])


@given(bounds=BOUNDS, steps=st.lists(STEPS, min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_results_stay(bounds: str, steps: list[tuple[str, float]], seed: int) -> None:
    constants = ", ".join(f"float k{place} = {{{number}}}" for place, (_, number) in enumerate(steps))
    nodes = " ".join(
        f"{'y' if place == len(steps) - 1 else f't{place + 1}'} = {op}(t{place}, k{place})"
        for place, (op, _) in enumerate(steps)
    )
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> bounded (float[1,1,4,4] x) => (float[1,1,4,4] y)
        <float[1,1,1,1] w = {{2}}, float low = {{-0.5}}, float high = {{1.5}}, {constants}>
        {{ c = Conv(x, w) t0 = {bounds} {nodes} }}"""
    )
    made = ir.from_proto(proto)
    assert scale_before_clip(made).applied == len(steps)
    assert [node.op_type for node in made.graph][-1] in ("Relu", "Clip")
    x = np.random.default_rng(seed).normal(size=(1, 1, 4, 4)).astype(np.float32)
    after, before = (computed(each, x) for each in (ir.to_proto(made), proto))
    np.testing.assert_allclose(after, before, rtol=0, atol=4 * 2**-23 * 100)  # four roundings of values below 100


def test_bounds_that_exclude_each_other_stay() -> None:
    """The upper one counts in ONNX, whichever sign a factor has."""
    text = "c = Conv(x, w) t = Clip(c, high, low) y = Mul(t, low)"
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> bounded (float[1,1,4,4] x) => (float[1,1,4,4] y)
        <float[1,1,1,1] w = {{2}}, float low = {{-0.5}}, float high = {{1.5}}> {{ {text} }}"""
    )
    change = scale_before_clip(ir.from_proto(proto))
    assert (change.applied, dict(change.skipped)) == (0, {"bounds": 1})


def computed(proto: onnx.ModelProto, x: Any) -> Any:
    """Return the first result of a model."""
    results: Any = reference.ReferenceEvaluator(proto).run(None, {"x": x})
    return results[0]
