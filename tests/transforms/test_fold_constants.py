"""What `fold_constants` takes for a constant, and where it stops."""

import numpy as np
import onnx_ir as ir
import pytest

from requant import UnknownNameError
from requant.transforms import REGISTRY, Change

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


def test_a_condition_that_is_constant_leaves_the_branches_alone() -> None:
    _, change = folded("""g (float[2] x) => (float[2] y) <bool c = {1}> {
        a = If(c) <then_branch = t () => (float[2] b) { b = Neg(x) }, else_branch = e () => (float[2] d) { d = Relu(x) }>
        y = Abs(a)
    }""")
    assert change == Change(skipped={"control-flow": 1})  # type: ignore[arg-type]


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
