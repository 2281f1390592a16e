"""What `fold_constants` takes for a constant, and where it stops."""

from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from requant import UnknownNameError
from requant.transforms import REGISTRY, Change, run
from requant.transforms.graphs.tensors import tensors

HEADER = '<ir_version: 8, opset_import: ["" : 17]>\n'

fold_constants = REGISTRY["fold_constants"]


def folded(text: str, **options: object) -> tuple[ir.Model, Change]:
    model = ir.from_onnx_text(HEADER + text)
    return model, fold_constants(model, **options)


def values(model: ir.Model) -> dict[str, list[float]]:
    return {name: tensor.numpy().tolist() for name, tensor in model.graph.initializers.tensor_items()}


def test_an_initializer_that_a_caller_can_override_is_no_constant() -> None:
    text = "g (float[2] x, float[2] w = {1, 4}) => (float[2] y) { s = Sqrt(w)  y = Mul(x, s) }"
    model, change = folded(text)
    assert change == Change()
    assert len(model.graph) == 2


def test_a_value_read_in_a_body_is_replaced_there() -> None:
    model, change = folded("""g (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 4}> {
        s = Sqrt(w)
        y = If(c) <then_branch = t () => (float[2] a) { a = Mul(x, s) }, else_branch = e () => (float[2] b) { b = Relu(x) }>
    }""")
    assert change.applied == 1
    assert values(model) == {"s": [1, 2]}


@pytest.mark.parametrize(("options", "kept"), [({}, ["Neg", "Abs"]), ({"exclude_op": ("If",)}, ["If", "Abs"])])
def test_a_constant_condition_takes_a_branch(options: dict[str, Any], kept: list[str]) -> None:
    model, _ = folded(
        """g (float[2] x) => (float[2] y) <bool c = {1}> {
        a = If(c) <then_branch = t () => (float[2] b) { b = Neg(x) }, else_branch = e () => (float[2] d) { d = Relu(x) }>
        y = Abs(a)
    }""",
        **options,
    )
    assert [node.op_type for node in model.graph] == kept


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("Shape(x)", None),
        ("Shape <start = 1> (x)", [2, 3]),
        ("Shape <start = -1> (x)", [3]),
        ("Shape <start = 1, end = 2> (x)", [2]),
        ("Size(x)", None),
        ("Size(w)", 2),
    ],
)
def test_shapes_fold_when_every_length_asked_for_is_fixed(node: str, expected: list[int] | None) -> None:
    text = "g (float[N,2,3] x) => (int64[M] y) <float[1,2] w = {1, 2}> { s = " + node + "  y = Neg(s) }"
    model, change = folded(text.replace("int64[M]", "int64") if "Size" in node else text)
    if expected is None:
        assert change.skipped == {"shape-not-fixed": 1}
        return
    assert change.applied == 1
    assert expected in values(model).values()


def test_a_result_may_exceed_the_limit_when_it_is_not_larger_than_its_inputs() -> None:
    text = "g (float[2,2] x) => (float[2,2] y) <float[2,2] w = {1, 2, 3, 4}> { t = Transpose(w)  y = Mul(x, t) }"
    assert folded(text, max_size_in_bytes=1)[1].applied == 1
    grown = "g (float[8] x) => (float[8] y) <float w = {1}, int64[1] n = {8}> { t = Expand(w, n)  y = Mul(x, t) }"
    assert folded(grown, max_size_in_bytes=31)[1].skipped == {"too-large": 1}
    assert folded(grown, max_size_in_bytes=32)[1].applied == 1


def test_an_excluded_node_must_exist() -> None:
    text = "g (float[2] x) => (float[2] y) <float[2] w = {1, 4}> { [root] s = Sqrt(w)  [mul] y = Mul(x, s) }"
    assert folded(text, exclude_node=("root",))[1].skipped == {"excluded": 1}
    with pytest.raises(UnknownNameError, match=r"^no node named 'rot'; did you mean 'root'\?$"):
        folded(text, exclude_node=("rot",))


def test_types_smaller_than_a_byte_survive() -> None:
    four = ir.DataType.INT4
    packed = ir.Tensor(np.array([-8, 7, 1]).astype(four.numpy()), dtype=four)
    constant = ir.node("Constant", [], {"value": packed})
    cast = ir.node("Cast", [constant.outputs[0]], {"to": int(ir.DataType.FLOAT)})
    output = ir.node("Neg", [cast.outputs[0]])
    graph = ir.Graph([], [output.outputs[0]], nodes=[constant, cast, output], opset_imports={"": 21})
    model = ir.Model(graph, ir_version=10)
    assert fold_constants(model, exclude_op=("Cast",)).applied == 1
    (stored,) = model.graph.initializers.tensors()
    assert stored.dtype == four
    assert stored.numpy().astype(int).tolist() == [-8, 7, 1]


def stored(model: ir.Model) -> int:
    return sum(tensor.nbytes for tensor in model.graph.initializers.tensors())


def large(body: str) -> ir.Model:
    """Return a model with 400 kB of weights, which may grow by 40 kB."""
    text = f"g (float[N,100] x) => (float[N,100] y) <float one = {{1}}, int64[2] small = {{50, 100}}> {{ {body} }}"
    model = ir.from_onnx_text(HEADER + text)
    weight = ir.tensor(np.ones((1000, 100), np.float32), name="w")
    value = next(value for node in model.graph for value in node.inputs if value is not None and value.name == "w")
    value.const_value = weight
    model.graph.register_initializer(value)
    return model


def test_the_file_grows_by_a_tenth_and_the_smallest_growths_come_first() -> None:
    """Of results of 80, 20 and 12 kB, the last two are stored."""
    body = (
        "k = Constant <value_ints = [0]> () i = Cast <to = 7> (x) v = Gather(w, i) z = ReduceSum <keepdims = 0> (v, k) "
    )
    for name, rows in {"a": 200, "b": 50, "c": 30}.items():
        body += f"n{name} = Constant <value_ints = [{rows}, 1, 100]> () {name} = Expand(one, n{name}) "
        body += f"s{name} = Add(x, {name}) z{name} = ReduceSum <keepdims = 0> (s{name}, k) "
    model = large(f"{body} u = Add(za, zb) q = Add(u, zc) y = Add(q, z)")
    before = stored(model)
    change = fold_constants(model)
    assert change.skipped["grows"] == 1
    assert {"b", "c"} <= set(model.graph.initializers)
    assert "a" not in model.graph.initializers
    assert stored(model) <= 1.1 * before


@pytest.mark.parametrize(
    ("read", "kept"),
    [
        ("", ["Mul"]),
        ("i = Cast <to = 7> (x) h = Gather(f, i) ", ["Cast", "Gather", "Mul"]),
        ("i = Cast <to = 7> (x) h = Gather(q, i) e = Gather(w, i) ", None),
    ],
    ids=["nothing else", "a result between them in place of the weight", "both"],
)
def test_results_that_need_not_be_stored_do_not_count(read: str, kept: list[str] | None) -> None:
    """The standardization of a weight: its differences are as large as the weight, which its mean reads too."""
    model = large(f"""m = ReduceMean <axes = [0]> (w) f = Sub(w, m) q = Mul(f, f) v = ReduceMean <axes = [0]> (q)
        r = Sqrt(v) d = Sub(f, r) g = ReduceMax <axes = [0], keepdims = 0> (d) {read} y = Mul(x, g)""")
    before = stored(model)
    change = fold_constants(model)
    assert stored(model) <= 1.1 * before
    if kept is None:
        assert change.skipped["grows"] > 0
    else:
        assert [node.op_type for node in model.graph] == kept
        assert values(model)["g"] == [0] * 100


def test_a_shape_between_nodes_that_fold_together_leaves_with_its_reader() -> None:
    """PyTorch's expand: lengths of -1 in the target of an Expand are 1."""
    model = ir.from_onnx_text(
        HEADER
        + """g (float[2,4,1] x) => (float[2,4,3] y)
        <int64[3] n = {-1, 4, 3}, int64 minus = {-1}> {
            s = Shape(n) ones = ConstantOfShape <value = int64[1] {1}> (s) m = Mul(ones, minus)
            e = Equal(n, m) t = Where(e, ones, n) y = Expand(x, t)
        }"""
    )
    fold_constants(model)
    assert [node.op_type for node in model.graph] == ["Expand"]
    assert values(model)["t"] == [1, 4, 3]


def test_nodes_of_which_one_cannot_be_computed_stay() -> None:
    model = large("""f = Sub(w, one) q = RandomNormalLike(f) v = ReduceMax <axes = [0], keepdims = 0> (q)
        i = Cast <to = 7> (x) h = Gather(w, i) y = Mul(x, v)""")
    fold_constants(model)
    assert "Sub" in [node.op_type for node in model.graph]


def test_the_weights_of_a_product_are_stored_though_the_file_grows() -> None:
    """A tied embedding, which a Gather reads too: only a constant can become int8."""
    body = (
        "i = Cast <to = 7> (x) r = Gather(w, i) k = Constant <value_ints = [1]> () h = ReduceSum <keepdims = 0> (r, k) "
    )
    model = large(f"{body} t = Transpose(w) l = MatMul(h, t) y = MatMul(l, w)")
    fold_constants(model)
    assert "t" in model.graph.initializers
    assert [node.op_type for node in model.graph] == ["Cast", "Gather", "ReduceSum", "MatMul", "MatMul"]


@pytest.mark.parametrize("scaling", ["Mul(c, s)", "Mul(s, c)", "Div(c, s)", "Add(c, s)", "Sub(c, s)"])
def test_the_weights_of_a_product_may_be_integers_with_a_scale_and_a_zero_point(scaling: str) -> None:
    text = f"""g (float[2,64] x) => (float[2,64] y) <int8[64,64] w = {{}}, float[64] s = {{}}> {{
        c = Cast <to = 1> (w) m = {scaling} t = Transpose(m) y = MatMul(x, t)
    }}"""
    model = ir.from_onnx_text(HEADER + text)
    for name, array in (("w", np.ones((64, 64), np.int8)), ("s", np.full(64, 3, np.float32))):
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)
    fold_constants(model)
    assert [node.op_type for node in model.graph] == ["MatMul"]


@pytest.mark.parametrize(("count", "folds"), [(300, False), (1500, True)])
def test_weights_that_few_numbers_describe_are_not_stored(count: int, folds: bool) -> None:
    """A filter bank, nearly all 0, is written as places and values: 12 bytes for each value."""
    text = f"""g (float[2,128] x) => (float[2,256] y) <int64[{count}] places = {{}}, float[{count}] filters = {{}}> {{
        n = Constant <value_ints = [{128 * 256}]> () z = ConstantOfShape (n) s = ScatterElements (z, places, filters)
        t = Constant <value_ints = [128, 256]> () w = Reshape (s, t) y = MatMul(x, w)
    }}"""
    model = ir.from_onnx_text(HEADER + text)
    for name, array in (("places", np.arange(count)), ("filters", np.ones(count, np.float32))):
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)
    before = stored(model)
    fold_constants(model)
    assert ([node.op_type for node in model.graph] == ["MatMul"]) == folds
    assert folds or stored(model) <= max(1.1 * before, before + 4096)


def test_weights_of_a_recurrent_operator_are_put_in_order() -> None:
    """Each part makes the model larger, until the last one frees the whole."""
    gates = " ".join(f"g{i} = Slice(w, at{i}, at{i + 1}, zero)" for i in range(4))
    places = ", ".join(f"int64[1] at{i} = {{{250 * i}}}" for i in range(5))
    model = ir.from_onnx_text(
        HEADER
        + f"""g (float[L,N,100] x) => (float[L,D,N,h] y) <float[1,1000,250] r = {{}}, int64[1] zero = {{0}}, {places}> {{
          {gates} o = Concat <axis = 0> (g0, g3, g1, g2) u = Unsqueeze(o, zero)
          y = LSTM <hidden_size = 250> (x, u, r)
        }}"""
    )
    lstm = model.graph.node(-1)
    for value, shape in ((model.graph[0].inputs[0], (1000, 100)), (lstm.inputs[2], (1, 1000, 250))):
        assert value is not None
        value.const_value = ir.tensor(np.ones(shape, np.float32), name=value.name)
        value.shape = ir.Shape(shape)
        if value.name not in model.graph.initializers:
            model.graph.register_initializer(value)
    before = stored(model)
    fold_constants(model)
    assert [node.op_type for node in model.graph] == ["LSTM"]
    assert stored(model) <= before


# few numbers, large results: each folds as far as a limit allows, and never further
GROWING = {
    "doubling": "\n".join(
        ["c0 = Concat <axis = 0> (w, w)", *(f"c{i} = Concat <axis = 0> (c{i - 1}, c{i - 1})" for i in range(1, 40))]
    )
    + "\nr = ReduceSum <keepdims = 0> (c39)",
    "range": (
        "a = Constant <value_int = 0> ()  b = Constant <value_int = 100000000000> ()  c = Constant <value_int = 1> ()\n"
        "e = Range(a, b, c)  f = Cast <to = 1> (e)  r = ReduceSum <keepdims = 0> (f)"
    ),
    "range-of-a-product": (
        "a = Constant <value_int = 0> ()  b = Constant <value_int = 400000> ()  c = Constant <value_int = 1> ()\n"
        "d = Mul(b, b)  e = Range(a, d, c)  f = Cast <to = 1> (e)  r = ReduceSum <keepdims = 0> (f)"
    ),
    "expand": (
        "n = Constant <value_ints = [1000000, 1000000]> ()  o = Constant <value_float = 1.0> ()\n"
        "e = Expand(o, n)  r = ReduceSum <keepdims = 0> (e)"
    ),
    "tile": ("n = Constant <value_ints = [100000000000]> ()  e = Tile(w, n)  r = ReduceSum <keepdims = 0> (e)"),
}


@pytest.mark.parametrize("nodes", GROWING.values(), ids=GROWING)
def test_small_models_do_not_grow_into_large_constants(nodes: str) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) <float[2] w = {1, 2}> {\n'
    model = ir.from_onnx_text(text + nodes + "\ny = Add(x, r)\n}")
    before = getrusage(RUSAGE_SELF).ru_maxrss
    result = run("fold_constants", model).model
    assert max((tensor.nbytes for tensor in tensors(result)), default=0) <= 10 * 2**20
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 400_000  # kB
