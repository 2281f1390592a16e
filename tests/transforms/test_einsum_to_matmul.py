"""Einsum as matrix products: any equation of one or two operands against numpy, and the operators that it takes."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from requant.transforms import REGISTRY, Change, run
from requant.transforms.graphs.rewriter import LARGE

einsum_to_matmul = REGISTRY["einsum_to_matmul"]


def model(equation: str, lengths: dict[str, int], constant: int | None, fixed: str, opset: int) -> ir.Model:
    """Build a model of one Einsum of ``a`` and ``b``.

    Args:
        equation: With an arrow.
        lengths: The length of each letter.
        constant: Which operand is constant, if any; its numbers are those of `operand`.
        fixed: The letters whose lengths the model says.
        opset: The version of the standard operators.
    """
    terms, _, out = equation.replace(" ", "").partition("->")
    operands = list(zip("ab", terms.split(","), strict=False))
    graph = helper.make_graph(
        [helper.make_node("Einsum", [name for name, _ in operands], ["y"], name="product", equation=equation)],
        "g",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [lengths[k] if k in fixed else None for k in term])
            for i, (name, term) in enumerate(operands)
            if i != constant
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(out))],
        [numpy_helper.from_array(operand(lengths, t), name) for i, (name, t) in enumerate(operands) if i == constant],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))


def operand(lengths: dict[str, int], term: str) -> np.ndarray:
    """Return whole numbers, whose products float32 sums without rounding."""
    shape = [lengths[letter] for letter in term]
    return np.random.default_rng(len(term)).integers(-9, 10, shape).astype(np.float32)


def result(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def check(made: ir.Model, equation: str, lengths: dict[str, int], constant: int | None) -> None:
    """Compare with numpy, exactly."""
    terms, _, _ = equation.replace(" ", "").partition("->")
    arrays = {name: operand(lengths, term) for name, term in zip("ab", terms.split(","), strict=False)}
    feeds = {name: array for i, (name, array) in enumerate(arrays.items()) if i != constant}
    expected = np.einsum(equation, *arrays.values())
    found = result(made, feeds)
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@st.composite
def equations(draw: st.DrawFn) -> str:
    """Draw an equation of one or two operands without an ellipsis or a letter twice in one."""
    term = st.permutations("abcde").flatmap(lambda order: st.integers(1, 5).map(lambda n: "".join(order[:n])))
    terms = draw(st.lists(term, min_size=1, max_size=2))
    letters = sorted(set("".join(terms)))
    out = draw(st.permutations(letters))[: draw(st.integers(0, len(letters)))]
    return f"{','.join(terms)}->{''.join(out)}"


@given(
    equation=equations(),
    lengths=st.tuples(*[st.integers(1, 4)] * 5).map(lambda numbers: dict(zip("abcde", numbers, strict=True))),
    constant=st.sampled_from([None, 0, 1]),
    fixed=st.sets(st.sampled_from("abcde")).map("".join),
    opset=st.sampled_from([12, 13, 18]),
)
@settings(max_examples=100)
def test_any_equation_gives_the_same(
    equation: str, lengths: dict[str, int], constant: int | None, fixed: str, opset: int
) -> None:
    made = model(equation, lengths, constant if "," in equation else None, fixed, opset)
    if einsum_to_matmul(made).applied:
        assert "Einsum" not in [node.op_type for node in made.graph]
        check(made, equation, lengths, constant if "," in equation else None)


@pytest.mark.parametrize(
    ("equation", "constant", "operators"),
    [
        ("bhqd,bhkd->bhqk", None, "Transpose MatMul"),
        ("bhqk,bhkd->bhqd", None, "MatMul"),
        ("bqhd,bkhd->bhqk", None, "Transpose Transpose MatMul"),
        ("bhqk,bkhd->bqhd", None, "Transpose MatMul Transpose"),
        ("bij,jk->bik", None, "MatMul"),
        ("bij,jk", 1, "MatMul"),
        ("bsd,ed->bse", 1, "MatMul"),
        ("ed,bsd->bse", 0, "MatMul"),
        ("jk,bij->bik", None, "MatMul"),
        ("bqhd,hdm->bqm", 1, "Reshape MatMul"),
        ("bqm,mhd->bqhd", 1, "MatMul Reshape"),
        ("bhwc,hkc->bhwk", None, "Transpose MatMul"),
        ("bij,bjk->bk", None, "ReduceSum Unsqueeze MatMul Squeeze"),
        ("ij->ji", None, "Transpose"),
        ("bij->b", None, "ReduceSum"),
        ("ij->ij", None, "Identity"),
    ],
)
def test_it_takes_these_operators_whatever_the_lengths(equation: str, constant: int | None, operators: str) -> None:
    full = equation if "->" in equation else f"{equation}->bik"
    lengths = {letter: 2 + index for index, letter in enumerate(dict.fromkeys(full.replace(",", "").replace("->", "")))}
    made = run("einsum_to_matmul", model(full, lengths, constant, "", 17)).model
    assert [node.op_type for node in made.graph] == operators.split()
    assert [node.name for node in made.graph if node.op_type == "MatMul"] in ([], ["product"])
    check(made, full, lengths, constant)


def test_equations_without_an_arrow_give_what_occurs_once_in_alphabetical_order() -> None:
    lengths = {"a": 2, "b": 3, "k": 4}
    made = model("bk,ka->ab", lengths, None, "", 17)
    made.graph[0].attributes["equation"] = ir.AttrString("equation", "bk, ka")
    assert einsum_to_matmul(made) == Change(applied=1)
    check(made, "bk,ka->ab", lengths, None)


@pytest.mark.parametrize("fixed", ["", "h", "hd"])
def test_several_columns_of_activations_need_all_lengths_but_one(fixed: str) -> None:
    lengths = {"q": 2, "m": 3, "h": 4, "d": 5}
    made = model("qm,mhd->qhd", lengths, None, fixed, 17)
    change = einsum_to_matmul(made)
    if fixed:
        assert change == Change(applied=1)
        check(made, "qm,mhd->qhd", lengths, None)
    else:
        assert change == Change(skipped={"dynamic": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("equation", "reason"),
    [
        ("ij,jk,kl->il", "operands"),
        ("...ij,jk->...ik", "ellipsis"),
        ("ii->i", "repeated-letter"),
        ("ii,ij->j", "repeated-letter"),
        ("ij,ij->ij", "no-product"),
        ("i,j->ij", "no-product"),
    ],
)
def test_what_is_no_product_of_two_stays(equation: str, reason: str) -> None:
    terms, _, out = equation.partition("->")
    shapes = {name: [3] * len(term.replace("...", "k")) for name, term in zip("abc", terms.split(","), strict=False)}
    graph = helper.make_graph(
        [helper.make_node("Einsum", list(shapes), ["y"], equation=equation)],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3] * len(out.replace("...", "k")))],
    )
    made = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert einsum_to_matmul(made) == Change(skipped={reason: 1})  # type: ignore[arg-type]


def test_lengths_that_differ_stay() -> None:
    made = model("ij,jk->ik", {"i": 2, "j": 1, "k": 3}, 1, "ijk", 17)
    made.graph.inputs[0].shape = ir.Shape([2, 4])
    assert einsum_to_matmul(made) == Change(skipped={"stretched": 1})  # type: ignore[arg-type]


def test_weights_of_other_readers_get_a_copy_and_weights_in_place_none() -> None:
    made = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,2] x) => (float[N,2] y, float[N,2] z, float[N,2] u) <float[2,2] w = {1, 2, 3, 4}> {
        y = Einsum <equation = "ni,oi->no"> (x, w)
        z = Einsum <equation = "ni,io->no"> (x, w)
        u = MatMul (x, w)
    }""")
    einsum_to_matmul(made)
    assert [node.inputs[1].name for node in made.graph if node.inputs[1]] == ["w_matrix", "w", "w"]
    assert np.array_equal(made.graph.initializers["w"].const_value.numpy(), [[1, 2], [3, 4]])  # type: ignore[union-attr]


def test_large_weights_are_put_in_order_when_they_are_read() -> None:
    reads = []

    def read() -> ir.TensorProtocol:
        reads.append(1)
        return ir.Tensor(np.arange(LARGE // 2, dtype=np.float32).reshape(2, -1), name="b")

    made = model("ni,oi->no", {"n": 1, "o": 2, "i": 1}, 1, "", 17)
    made.graph.initializers["b"].const_value = ir.LazyTensor(
        read, ir.DataType.FLOAT, ir.Shape([2, LARGE // 4]), name="b"
    )
    made.graph.initializers["b"].shape = ir.Shape([2, LARGE // 4])
    assert einsum_to_matmul(made) == Change(applied=1)
    assert not reads
    weight = made.graph.initializers["b_matrix"].const_value
    assert weight is not None
    assert np.array_equal(weight.numpy(), np.arange(LARGE // 2, dtype=np.float32).reshape(2, -1).T)
    assert "b" not in made.graph.initializers


def test_an_einsum_in_a_body_reads_weights_from_outside() -> None:
    before = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,2,3] x, bool c) => (float[N,4] y) <float[4,2,3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
         13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24}> {
        y = If (c) <then_branch = t () => (float[N,4] a) { a = Einsum <equation = "nhd,ohd->no"> (x, w) },
                    else_branch = e () => (float[N,4] a) { b = Einsum <equation = "nhd,ohd->no"> (x, w)  a = Neg (b) }>
    }""")
    after = run("einsum_to_matmul", before).model
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    for c in (True, False):
        feeds = {"x": x, "c": np.array(c)}
        assert np.array_equal(result(after, feeds), result(before, feeds))
    assert "w" not in after.graph.initializers
