"""Weighted sums of pieces stay equal without the Concat of the pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.transforms.sum_without_concat import LONGEST, sum_without_concat

HEAD = '<ir_version: 8, opset_import: ["" : 18]>'


def build(lengths: list[int], stacked: bool, keep: bool, swapped: bool, axes: str) -> str:
    """Return a model that sums weighted pieces of shape (N, 3, 5, length); weights are of shape (N, 1, 5, sum)."""
    inputs = [f"float[N,3,5,{length}] x{i}" for i, length in enumerate(lengths)]
    names = [f"x{i}" for i in range(len(lengths))]
    steps = [f"u{i} = Unsqueeze(x{i}, inner)" for i in range(len(lengths))] if stacked else []
    names = [f"u{i}" for i in range(len(lengths))] if stacked else names
    steps.append(f"c = Concat<axis = {-2 if stacked else -1}>({', '.join(names)})")
    steps += ["r = Reshape(c, target)"] if stacked else []
    value = "r" if stacked else "c"
    steps.append(f"p = Mul({'w, ' + value if swapped else value + ', w'})")
    steps.append(f"y = ReduceSum<keepdims = {int(keep)}>(p, axes)")
    return (
        f"{HEAD} sums ({', '.join(inputs)}, float[N,1,5,{sum(lengths)}] w) => (float y)\n"
        f"<int64[1] inner = {{-2}}, int64[{axes.count(',') + 1}] axes = {{{axes}}}, "
        f"int64[4] target = {{-1, 3, 5, {sum(lengths)}}}> {{ {' '.join(steps)} }}"
    )


def computed(model: ir.Model, feed: dict[str, Any]) -> Any:
    """Return the first result of a model."""
    results: Any = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, feed)
    return results[0]


@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=2, max_size=5),
    equal=st.booleans(),
    stacked=st.booleans(),
    keep=st.booleans(),
    swapped=st.booleans(),
    axes=st.sampled_from(["-1", "3", "1, -1"]),
    seed=st.integers(0, 2**16),
)
def test_sums_stay(
    lengths: list[int], equal: bool, stacked: bool, keep: bool, swapped: bool, axes: str, seed: int
) -> None:
    lengths = [lengths[0]] * len(lengths) if equal or stacked else lengths
    model = ir.from_proto(onnx.parser.parse_model(build(lengths, stacked, keep, swapped, axes)))
    model.graph.outputs[0].shape = None
    random = np.random.default_rng(seed)
    feed: dict[str, Any] = {
        f"x{i}": random.normal(size=(2, 3, 5, length)).astype(np.float32) for i, length in enumerate(lengths)
    }
    feed["w"] = random.random((2, 1, 5, sum(lengths))).astype(np.float32)
    before = computed(model, feed)
    assert sum_without_concat(model).applied == 1
    assert not [node for node in model.graph if node.op_type in ("Concat", "Unsqueeze")]
    np.testing.assert_allclose(computed(model, feed), before, rtol=0, atol=1e-6 * 3 * sum(lengths) * 6)


@pytest.mark.parametrize(
    ("old", "new"),
    [("axis = -2", "axis = -3"), ("-1, 3, 5", "-1, 5, 3"), (": 18", ": 12")],
    ids=["another axis", "rows in another order", "a Split without sizes"],
)
def test_other_forms_stay(old: str, new: str) -> None:
    text = build([4, 4], True, False, False, "-1").replace(old, new).replace("float[N,1,5,8]", "float[N,1,1,8]")
    assert sum_without_concat(ir.from_proto(onnx.parser.parse_model(text))).applied == 0
