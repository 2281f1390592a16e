"""Attention whose heads are merged with the batch has an axis for heads behind `split_merged_heads`, and equal outputs."""

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

from requant.transforms.patterns.attention import find_attention
from requant.transforms.split_merged_heads import split_merged_heads

ROWS_FIRST = """
    qr = Reshape(x, tq) q0 = Transpose<perm = [1, 0, 2]>(qr) q = Mul(q0, scale)
    kr = Reshape(z, tk) k = Transpose<perm = [1, 2, 0]>(kr)
    vr = Reshape(w, tk) v = Transpose<perm = [1, 0, 2]>(vr)
    s = MatMul(q, k) {mask} p = Softmax<axis = {axis}>(m) a = MatMul(p, v)
    t = Transpose<perm = [1, 0, 2]>(a) y = Reshape(t, to)"""
BATCH_FIRST = """
    xs = Reshape(x, sq) xt = Transpose<perm = [0, 2, 1, 3]>(xs) q0 = Reshape(xt, tq) q = Mul(q0, scale)
    zs = Reshape(z, sk) zt = Transpose<perm = [0, 2, 1, 3]>(zs) kr = Reshape(zt, tk) k = Transpose<perm = [0, 2, 1]>(kr)
    ws = Reshape(w, sk) wt = Transpose<perm = [0, 2, 1, 3]>(ws) v = Reshape(wt, tk)
    s = MatMul(q, k) {mask} p = Softmax<axis = {axis}>(m) a = MatMul(p, v)
    a4 = Reshape(a, ta) t = Transpose<perm = [0, 2, 1, 3]>(a4) y = Reshape(t, to)"""
MASKS = {
    "none": ("m = Div(s, scale)", ""),
    "shared": ("m = Add(mask, s)", "{rows},{keys}"),
    "of one": ("m = Add(s, mask)", "1,{rows},{keys}"),
    "split": ("s4 = Reshape(s, ts) m4 = Add(s4, mask) m = Reshape(m4, tm)", "{batch},1,{rows},{keys}"),
    "merged": ("m3 = Reshape(mask, tm) m = Add(s, m3)", "{batch},{heads},{rows},{keys}"),
}
"""What stands between the scores and the Softmax, and the shape of the mask."""


@dataclass(frozen=True)
class Sizes:
    """The lengths of attention; with `free` targets have -1 where they can."""

    batch: int = 2
    heads: int = 3
    rows: int = 4
    keys: int = 5
    depth: int = 2
    free: bool = False


def model_of(sizes: Sizes, *, rows_first: bool, mask: str = "none", axis: int = -1) -> onnx.ModelProto:
    """Return attention with merged heads."""
    batch, heads, rows, keys, depth = sizes.batch, sizes.heads, sizes.rows, sizes.keys, sizes.depth
    merged, count = (-1, -1) if sizes.free else (batch * heads, batch)
    targets = {
        "tq": (rows, merged, depth) if rows_first else (merged, rows, depth),
        "tk": (keys, merged, depth) if rows_first else (merged, keys, depth),
        "sq": (count, rows, heads, depth),
        "sk": (count, keys, heads, depth),
        "ts": (count, heads, rows, keys),
        "tm": (merged, rows, keys),
        "ta": (count, heads, rows, depth),
        "to": (rows, count, heads * depth) if rows_first else (count, rows, heads * depth),
    }
    between, shape = MASKS[mask]
    of_mask = f", float[{shape.format(**vars(sizes))}] mask" if shape else ""
    width = heads * depth
    inputs = [(rows, batch), (keys, batch)] if rows_first else [(batch, rows), (batch, keys)]
    q, k = (f"float[{one},{other},{width}]" for one, other in inputs)
    written = ", ".join(
        f"int64[{len(each)}] {name} = {{{', '.join(map(str, each))}}}" for name, each in targets.items()
    )
    body = (ROWS_FIRST if rows_first else BATCH_FIRST).format(mask=between, axis=axis)
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> merged ({q} x, {k} z, {k} w{of_mask}) => (float[A,B,{width}] y) '
        f"<{written}, float scale = {{0.5}}> {{ {body} }}"
    )


def computed(proto: onnx.ModelProto, seed: int, output: str = "y") -> Any:
    """Return a result of a model for random inputs."""
    random, session = np.random.default_rng(seed), ort.InferenceSession(proto.SerializeToString())
    results: Any = session.run(
        [output], {each.name: random.normal(size=each.shape).astype(np.float32) for each in session.get_inputs()}
    )
    return results[0]


@given(
    sizes=st.builds(
        Sizes,
        batch=st.integers(1, 3),
        heads=st.integers(2, 4),
        rows=st.integers(1, 4),
        keys=st.integers(1, 5),
        depth=st.integers(1, 4),
        free=st.booleans(),
    ),
    rows_first=st.booleans(),
    mask=st.sampled_from(sorted(MASKS)),
    axis=st.sampled_from([-1, 2]),
    seed=st.integers(0, 2**16),
)
def test_outputs_stay(sizes: Sizes, rows_first: bool, mask: str, axis: int, seed: int) -> None:
    proto = model_of(sizes, rows_first=rows_first, mask=mask, axis=axis)
    model = ir.from_proto(proto)
    assert split_merged_heads(model).applied == 1 + (mask == "split")  # in front of the mask, and behind it
    np.testing.assert_allclose(computed(ir.to_proto(model), seed), computed(proto, seed), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rows_first", [True, False], ids=["rows first", "batch first"])
def test_shares_may_be_returned(rows_first: bool) -> None:
    text = onnx.printer.to_text(model_of(Sizes(), rows_first=rows_first))
    shares = "p4 = Reshape(p, ts) mean = ReduceMean<axes = [1], keepdims = 0>(p4) }"
    proto = onnx.parser.parse_model(text[: text.rindex("}")].replace("] y)", "] y, float[C,D,E] mean)") + shares)
    model = ir.from_proto(proto)
    assert split_merged_heads(model).applied == 1
    (split,) = (node for node in model.graph if node.op_type == "ReduceMean")
    assert split.inputs[0] is next(node.outputs[0] for node in model.graph if node.op_type == "Softmax")
    for name in ("y", "mean"):
        found, wanted = (computed(each, 0, name) for each in (ir.to_proto(model), proto))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


def test_a_mask_with_more_axes_than_scores_stays() -> None:
    shape = "{batch},1,{rows},{keys}"
    text = onnx.printer.to_text(model_of(Sizes(batch=1), rows_first=True, mask="of one")).replace(
        "float[1,4,5] mask", f"float[{shape.format(**vars(Sizes(batch=1)))}] mask"
    )
    model = ir.from_proto(onnx.parser.parse_model(text))
    change = split_merged_heads(model)
    assert (change.applied, [*change.skipped]) == (0, ["operators"])


@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize("rows_first", [True, False], ids=["rows first", "batch first"])
def test_the_rest_is_attention(rows_first: bool, mask: str) -> None:
    model = ir.from_proto(model_of(Sizes(), rows_first=rows_first, mask=mask))
    split_merged_heads(model)
    found = find_attention(next(node for node in model.graph if node.op_type == "Softmax"))
    assert found is not None
    assert (found.mask is not None) == (mask != "none")
    assert found.orders == ((2, 2, 2, 2) if rows_first else (1, 1, 1, 1))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Softmax<axis = -1>", "Softmax<axis = 1>", "operators"),
        ("m = Div(s, scale)", "m = Abs(s)", "operators"),
        ("m = Div(s, scale)", "r = Reshape(s, tm) m = Add(s, r)", "heads"),
        ("t = Transpose<perm = [1, 0, 2]>(a)", "t = Neg(a)", "operators"),
        ("vr = Reshape(w, tk) v = Transpose<perm = [1, 0, 2]>(vr)", "v = Reshape(w, tm)", "heads"),
    ],
    ids=["another axis", "another operator", "a computed mask", "no split", "values"],
)
def test_other_products_stay(old: str, new: str, reason: str) -> None:
    text = onnx.printer.to_text(model_of(Sizes(), rows_first=True))
    body = ROWS_FIRST.format(mask=MASKS["none"][0], axis=-1)
    assert old in body
    text = text[: text.rindex("{")] + "{" + body.replace(old, new) + "}"
    model = ir.from_proto(onnx.parser.parse_model(text))
    before = ir.to_proto(model).SerializeToString()
    change = split_merged_heads(model)
    assert (change.applied, [*change.skipped]) == (0, [reason])
    assert ir.to_proto(model).SerializeToString() == before
