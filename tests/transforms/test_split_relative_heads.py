"""Scores with relative positions have an axis for heads behind `split_merged_heads`, and outputs are equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requant.transforms import parse, run
from requant.transforms.patterns.attention import find_attention
from requant.transforms.split_merged_heads import split_merged_heads

HEADS, DEPTH, PLACES = 3, 2, 5
STEPS = "fold_constants simplify_reshapes split_merged_heads"
COUNTED = """
    ids = Shape(x) b1 = Gather(ids, i0) l1 = Gather(ids, i1)
    merged = Mul(b1, heads) tq = Concat<axis = 0>(minus, l1, depth) ta = Concat<axis = 0>(minus, heads, l1, l1)
    te = Concat<axis = 0>(merged, l1, l1) n = Div(merged, heads) tt = Concat<axis = 0>(n, i1, i1)
    to = Concat<axis = 0>(minus, heads, l1, depth)"""
"""Lengths that are computed, as in exports with free axes."""
BODY = """
    q = Reshape(x, tq) k = Reshape(z, tq) v = Reshape(w, tq) kt = Transpose<perm = [0, 2, 1]>(k)
    ks = Shape(k) kd = Gather(ks, i2) kf = Cast<to = 1>(kd) k3 = Mul(kf, three) scale = Sqrt(k3) kn = Div(kt, scale)
    s = MatMul(q, kn) c = Tile(weights, tt) ct = Transpose<perm = [0, 2, 1]>(c) e = Expand(places, te)
    qc = MatMul(q, ct) qg = GatherElements<axis = -1>(qc, e) qn = Div(qg, scale)
    kc = MatMul(k, ct) kg = GatherElements<axis = 2>(kc, e) kgt = Transpose<perm = [0, 2, 1]>(kg) kgn = Div(kgt, scale)
    r = Add(qn, kgn) t = Add(s, r) t4 = Reshape(t, ta) masked = Where(m, lowest, t4)
    p = Softmax<axis = -1>(masked) p3 = Reshape(p, te) a = MatMul(p3, v) a4 = Reshape(a, to)
    y = Transpose<perm = [0, 2, 1, 3]>(a4)"""


@dataclass(frozen=True)
class Sizes:
    """The batch and the number of rows; with `free` the model does not know them."""

    batch: int = 2
    rows: int = 4
    free: bool = True


def model_of(sizes: Sizes, *replaced: tuple[str, str]) -> onnx.ModelProto:
    """Return disentangled attention with merged heads; parts of its text may be others."""
    batch, rows = ("N", "L") if sizes.free else (sizes.batch, sizes.rows)
    places = {"minus": -1, "heads": HEADS, "depth": DEPTH, "i0": 0, "i1": 1, "i2": 2}
    written = ", ".join(f"int64[1] {name} = {{{number}}}" for name, number in places.items())
    given = ", ".join(f"float[{batch},{HEADS},{rows},{DEPTH}] {name}" for name in "xzw")
    weights = np.random.default_rng(0).normal(size=HEADS * PLACES * DEPTH).round(3)
    body = COUNTED.replace("Gather(ids, i1)", "Gather(ids, i2)") + BODY
    for old, new in replaced:
        assert old in body
        body = body.replace(old, new)
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> merged ({given}, int64[1,{rows},{rows}] places, '
        f"bool[{batch},1,{rows},{rows}] m) => (float[{batch},{rows},{HEADS},{DEPTH}] y) <{written}, "
        f"float three = {{3}}, float lowest = {{-3.4e38}}, float[{HEADS},{PLACES},{DEPTH}] weights = "
        f"{{{', '.join(map(str, weights))}}}> {{ {body} }}"
    )


def computed(proto: onnx.ModelProto, sizes: Sizes, seed: int) -> Any:
    """Return the result of a model for random inputs; the first row of scores is hidden."""
    random, session = np.random.default_rng(seed), ort.InferenceSession(proto.SerializeToString())
    shape = (sizes.batch, HEADS, sizes.rows, DEPTH)
    feed: dict[str, Any] = {name: random.normal(size=shape).astype(np.float32) for name in "xzw"}
    feed["places"] = random.integers(0, PLACES, (1, sizes.rows, sizes.rows))
    feed["m"] = random.random((sizes.batch, 1, sizes.rows, sizes.rows)) < 0.3
    feed["m"][:, :, 0] = True
    results: Any = session.run(None, feed)
    return results[0]


@given(
    sizes=st.builds(Sizes, batch=st.integers(1, 3), rows=st.integers(1, 6), free=st.booleans()),
    seed=st.integers(0, 2**16),
    masked=st.booleans(),
)
def test_outputs_stay(sizes: Sizes, seed: int, masked: bool) -> None:
    proto = model_of(sizes)
    model = ir.from_proto(proto)
    made = ir.to_proto(run(parse(STEPS + " where_to_add" * masked), model).model)
    np.testing.assert_allclose(computed(made, sizes, seed), computed(proto, sizes, seed), rtol=0, atol=2e-5)


@pytest.mark.parametrize("free", [True, False])
def test_the_rest_is_attention_whose_mask_is_computed(free: bool) -> None:
    model = ir.from_proto(model_of(Sizes(free=free)))
    made = run(parse(f"{STEPS} where_to_add"), model).model
    assert not any(node.op_type in ("Tile", "Reshape", "Sqrt") for node in made.graph)
    found = find_attention(next(node for node in made.graph if node.op_type == "Softmax"))
    assert found is not None
    assert found.mask is not None
    assert found.scale == pytest.approx((3 * DEPTH) ** -0.5)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("t = Add(s, r)", "t0 = Add(s, r) t = Abs(t0)", "operators"),
        ("kt = Transpose<perm = [0, 2, 1]>(k)", "ka = Abs(k) kt = Transpose<perm = [0, 2, 1]>(ka)", "operators"),
        ("GatherElements<axis = -1>", "GatherElements<axis = 1>", "operators"),
        ("Concat<axis = 0>(n, i1, i1)", "Concat<axis = 0>(n, i2, i1)", "lengths"),
        ("Concat<axis = 0>(merged, l1, l1)", "Concat<axis = 0>(b1, l1, l1)", "lengths"),
    ],
    ids=["another operator", "another reader", "another axis", "repeated rows", "fewer indices"],
)
def test_other_operators_stay(old: str, new: str, reason: str) -> None:
    model = ir.from_proto(model_of(Sizes(), (old, new)))
    before = ir.to_proto(model).SerializeToString()
    change = split_merged_heads(model)
    assert reason in change.skipped
    assert change.applied or ir.to_proto(model).SerializeToString() == before
