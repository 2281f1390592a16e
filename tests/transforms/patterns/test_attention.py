"""Which operators are attention, and what it reads."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from requant.transforms.int8.units import Compound, units
from requant.transforms.patterns.attention import FoundAttention, attention_among, find_attention, missing_form

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
ROWS = "float[N,S,4,8]"
HEADS = "float[N,4,S,8]"
BEFORE = "qt = Transpose<perm = [0,2,1,3]>(q) kt = Transpose<perm = [0,2,3,1]>(k) vt = Transpose<perm = [0,2,1,3]>(v)"
BEHIND = "a = Add(d, m) p = Softmax<axis = -1>(a) o = MatMul(p, vt) y = Transpose<perm = [0,2,1,3]>(o)"
TURNED = "kt = Transpose<perm = [0,1,3,2]>(k)"
WEIGHED = "p = Softmax<axis = 3>(t) y = MatMul(p, v)"
PLAIN = "kt = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, kt) [soft] p = Softmax(s)"


def found_in(nodes: str, tensors: str = HEADS, outputs: str = "float y") -> tuple[FoundAttention | None, ir.Model]:
    """Return the attention in a model with the inputs q, k, v and m, and the model."""
    graph = f"g ({tensors} q, {tensors} k, {tensors} v, float[N,1,1,S] m) => ({outputs})"
    constants = "float half = {0.5}, float[1] three = {3.0}, float[2] both = {1.0, 2.0}"
    model = ir.from_proto(onnx.parser.parse_model(f"{HEAD} {graph} <{constants}> {{ {nodes} }}"))
    return find_attention(next(node for node in model.graph if node.op_type == "Softmax")), model


@pytest.mark.parametrize(
    ("nodes", "tensors", "scale", "masked", "orders", "count"),
    [
        (f"{PLAIN} y = MatMul(p, v)", HEADS, 1, False, (0, 0, 0, 0), 4),
        (f"{PLAIN} o = MatMul(p, v) y = Transpose<perm = [2,0,1,3]>(o)", HEADS, 1, False, (0, 0, 0, 2), 5),
        (
            f"{BEFORE} s = MatMul(qt, kt) d = Div(s, three) {BEHIND}",
            ROWS,
            1 / 3,
            True,
            (1, 1, 1, 1),
            9,
        ),
        (
            f"{TURNED} a = Mul(half, q) b = Mul(kt, three) s = MatMul(a, b) t = Add(m, s) {WEIGHED}",
            HEADS,
            1.5,
            True,
            (0, 0, 0, 0),
            7,
        ),
        (
            "kt = Transpose<perm = [0,2,1]>(k) s = MatMul(q, kt) t = Mul(s, half) p = Softmax(t) y = MatMul(p, v)",
            "float[N,S,8]",
            0.5,
            False,
            (0, 0, 0, 0),
            5,
        ),
    ],
)
def test_attention_is_found_with_its_scale_mask_and_layout(
    nodes: str, tensors: str, scale: float, masked: bool, orders: tuple[int, ...], count: int
) -> None:
    found, model = found_in(nodes, tensors)
    assert found is not None
    assert [value.name for value in found.inputs] == ["q", "k", "v", *["m"] * masked]
    assert found.scale == pytest.approx(scale)
    assert found.orders == orders
    assert len(found.nodes) == count == len({*found.nodes})
    unit = units(model.graph, [Compound.attention(found)])[-1]
    assert (unit.op, unit.rounded, unit.outputs) == ("attention", ("q", "k", "v"), ("y",))


WINDOWS = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N,2,3,4] q, float[N,2,3,4] k, float[N,2,3,4] v) => (float[N,2,3,4] y)
    <int64[5] five = {-1, 5, 2, 3, 3}, int64[4] four = {-1, 2, 3, 3}> {
    kt = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, kt) b = Add(s, bias) w = Reshape(b, five) m = Add(w, mask)
    r = Reshape(m, four) p = Softmax(r) y = MatMul(p, v) }"""
BIAS, MASK = (1, 2, 3, 3), (1, 5, 1, 3, 3)


def with_windows(text: str, bias: tuple[int, ...], mask: tuple[int, ...]) -> FoundAttention | None:
    """Return the attention in a model whose bias and mask have these shapes; without axes they are inputs."""
    proto = onnx.parser.parse_model(text)
    for name, shape in (("bias", bias), ("mask", mask)):
        if shape:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name))
        else:
            proto.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return find_attention(next(node for node in ir.from_proto(proto).graph if node.op_type == "Softmax"))


@pytest.mark.parametrize(
    ("before", "after"),
    [("Add(w, mask)", "Add(mask, w)"), ("five = {-1, 5", "five = {1, 5"), ("four = {-1", "four = {5")],
)
def test_a_mask_of_windows_is_found(before: str, after: str) -> None:
    assert before in WINDOWS
    for text in (WINDOWS, WINDOWS.replace(before, after)):
        found = with_windows(text, BIAS, MASK)
        assert found is not None
        assert [value.name for value in found.inputs] == ["q", "k", "v", "bias", "mask"]
        assert len(found.nodes) == len({*found.nodes}) == 8


@pytest.mark.parametrize(
    ("before", "after", "bias", "mask"),
    [
        ("", "", BIAS, (1, 5, 2, 3, 3)),  # a mask for each head
        ("", "", BIAS, (1, 1, 1, 3, 3)),  # one for all windows
        ("", "", (1, 1, 3, 3), MASK),  # how many heads the scores have is unknown
        ("", "", (), MASK),
        ("", "", BIAS, ()),
        ("four = {-1, 2, 3, 3}", "four = {-1, 3, 2, 3}", BIAS, MASK),
        ("five = {-1, 5, 2, 3, 3}", "five = {-1, 5, 3, 2, 3}", BIAS, MASK),
        ("five = {-1, 5, 2, 3, 3}, int64[4]", "five = {0, 5, 2, 3, -1}, int64[4]", BIAS, MASK),
        ("p = Softmax(r)", "e = Relu(w) p = Softmax(r)", BIAS, MASK),  # another reader
        ("b = Add(s, bias)", "b = Mul(s, bias)", BIAS, MASK),
    ],
)
def test_other_masks_between_reshapes_are_none_of_windows(
    before: str, after: str, bias: tuple[int, ...], mask: tuple[int, ...]
) -> None:
    assert before in WINDOWS
    assert with_windows(WINDOWS.replace(before, after) if before else WINDOWS, bias, mask) is None


def test_a_softmax_of_an_older_opset_says_its_axis() -> None:
    for axis, expected in (("", False), ("<axis = 3>", True)):
        graph = f"g ({HEADS} q, {HEADS} k, {HEADS} v) => (float y)"
        nodes = f"{TURNED} s = MatMul(q, kt) p = Softmax{axis}(s) y = MatMul(p, v)"
        text = f'<ir_version: 8, opset_import: ["" : 12]> {graph} {{ {nodes} }}'
        model = ir.from_proto(onnx.parser.parse_model(text))
        found = find_attention(next(node for node in model.graph if node.op_type == "Softmax"))
        assert (found is not None) is expected


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ("s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v)", "float y"),  # keys that are not turned
        (f"{PLAIN} y = MatMul(v, p)", "float y"),
        (f"{PLAIN} y = MatMul(p, v)", "float y, float p"),  # another reader
        (f"{PLAIN} y = MatMul(p, v) z = Relu(s)", "float y, float z"),
        ("kt = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, kt) p = Softmax<axis = 1>(s) y = MatMul(p, v)", "float y"),
        ("kt = Transpose<perm = [0,1,3,2]>(q) s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, v)", "float y"),
        (
            "kt = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, kt) t = Mul(s, both) p = Softmax(t) y = MatMul(p, v)",
            "float y",
        ),
        (
            "kt = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, kt) a = Add(s, s) p = Softmax(a) y = MatMul(p, v)",
            "float y",
        ),
    ],
)
def test_other_operators_around_a_softmax_are_no_attention(nodes: str, outputs: str) -> None:
    assert found_in(nodes, outputs=outputs)[0] is None


@pytest.mark.parametrize(
    ("nodes", "scale", "masked", "orders", "heads", "causal", "count"),
    [
        ("y = Attention(q, k, v)", None, False, (0, 0, 0, 0), (0, 0), False, 1),
        ("o = Attention<scale = 0.5>(q, k, v, m) y = Relu(o)", 0.5, True, (0, 0, 0, 0), (0, 0), False, 1),
        (
            "o = Attention<is_causal = 1>(q, k, v) y = Transpose<perm = [0,2,1,3]>(o)",
            *(None, False, (0, 0, 0, 1), (0, 0), True, 2),
        ),
        (
            "o = Attention<q_num_heads = 4, kv_num_heads = 2>(q, k, v) y = Transpose<perm = [0,2,1]>(o)",
            *(None, False, (0, 0, 0, 0), (4, 2), False, 1),
        ),
    ],
)
def test_an_operator_that_is_attention_is_found(
    nodes: str,
    scale: float | None,
    masked: bool,
    orders: tuple[int, ...],
    heads: tuple[int, int],
    causal: bool,
    count: int,
) -> None:
    graph = f"g ({HEADS} q, {HEADS} k, {HEADS} v, bool[S,S] m) => (float y)"
    text = f'<ir_version: 10, opset_import: ["" : 23]> {graph} {{ {nodes} }}'
    model = ir.from_proto(onnx.parser.parse_model(text))
    found = attention_among(model.graph)
    assert found is not None
    assert [value.name for value in found.inputs] == ["q", "k", "v", *["m"] * masked]
    assert (found.scale, found.orders, found.heads, found.causal) == (scale, orders, heads, causal)
    assert (len(found.nodes), found.zero, missing_form(found.nodes[0])) == (count, True, "")
