"""Functions put in the place of their calls: the same results, names of their own, and what must not be inlined."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant.transforms import REGISTRY, Change, TransformError, run, verify
from requant.transforms.inline_functions import ORIGIN
from requant.transforms.parts.functions import add_functions

inline_functions = REGISTRY["inline_functions"]

HEADER = '<ir_version: 10, opset_import: ["" : 21, "f" : 1]>\n'
FUNCTION = '<domain: "f", opset_import: ["" : 21, "f" : 1]>\n'

MODELS = {
    "attribute-given": (
        "g (float[N,4] x, bool c) => (float[N,4] y) { y = f.Leaky <alpha = 0.5> (x) }",
        "Leaky <alpha: float = 0.25> (a) => (b) { b = LeakyRelu <alpha: float = @alpha> (a) }",
    ),
    "attribute-default": (
        "g (float[N,4] x, bool c) => (float[N,4] y) { y = f.Leaky (x) }",
        "Leaky <alpha: float = 0.25> (a) => (b) { b = LeakyRelu <alpha: float = @alpha> (a) }",
    ),
    "attribute-absent": (
        "g (float[N,4] x, bool c) => (float[N,4] y) { y = f.Leaky (x) }",
        "Leaky <alpha> (a) => (b) { b = LeakyRelu <alpha: float = @alpha> (a) }",
    ),
    "attribute-passed-on": (
        "g (float[N,4] x, bool c) => (float[N,4] y) { y = f.Outer <slope = 0.5> (x) }",
        "Outer <slope> (a) => (b) { b = f.Leaky <alpha: float = @slope> (a) }",
        "Leaky <alpha: float = 0.25> (a) => (b) { b = LeakyRelu <alpha: float = @alpha> (a) }",
    ),
    "optional-input-absent": (
        "g (float[N,4] x, bool c) => (float[N,4] y) <float hi = {0.5}> { y = f.Bound (x, , hi) }",
        "Bound (a, lo, hi) => (b) { b = Clip (a, lo, hi) }",
    ),
    "trailing-input-absent": (
        "g (float[N,4] x, bool c) => (float[N,4] y) <float lo = {0.5}> { y = f.Bound (x, lo) }",
        "Bound (a, lo, hi) => (b) { b = Clip (a, lo, hi) }",
    ),
    "output-is-input": (
        "g (float[N,4] x, bool c) => (float[N,4] y, float[N,4] z) { y, z = f.Both (x) }",
        "Both (a) => (b, c) { b = Identity (a)  c = Identity (a) }",
    ),
    "called-twice": (
        "g (float[N,4] x, bool c) => (float[N,4] y) { t = f.Twice (x)  y = f.Twice (t) }",
        "Twice (x) => (y) { t = Add (x, x)  y = Relu (t) }",
    ),
    "call-in-body": (
        """g (float[N,4] x, bool c) => (float[N,4] y) {
            y = If (c) <then_branch = t () => (float[N,4] a) { a = f.Twice (x) },
                        else_branch = e () => (float[N,4] a) { t = f.Twice (x)  a = Neg (t) }>
        }""",
        "Twice (x) => (y) { t = Add (x, x)  y = Relu (t) }",
    ),
    "body-in-function": (
        "g (float[N,4] x, bool c) => (float[N,4] y) { t = f.Choose (x, c)  y = f.Choose (t, c) }",
        """Choose (x, c) => (y) {
            t = Abs (x)
            s = If (c) <then_branch = one () => (float[N,4] r) <float w = {3}> { k = f.Twice (t)  l = Mul (k, w)  r = Add (l, x) },
                        else_branch = two () => (float[N,4] r) { k = Neg (t)  r = Sub (k, x) }>
            y = Add (s, t)
        }""",
        "Twice (x) => (y) { t = Add (x, x)  y = Relu (t) }",
    ),
}


def model(*parts: str) -> ir.Model:
    """Parse a graph and the functions that it calls."""
    graph, *functions = parts
    return ir.from_onnx_text(HEADER + graph + "\n" + "\n".join(FUNCTION + function for function in functions))


def results(model: ir.Model, c: bool) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
    feeds = {value.name: value_ for value, value_ in zip(session.get_inputs(), (x, np.array(c)), strict=True)}
    return [np.asarray(result) for result in session.run(None, feeds)]


def names(model: ir.Model) -> list[str]:
    """Return the names of all nodes, and those of all values apart, which must not occur twice."""
    values = [
        value.name
        for graph in model.graphs()
        for value in [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
    ]
    nodes = [node.name for graph in model.graphs() for node in graph if node.name]
    assert len(set(values)) == len(values)
    assert len(set(nodes)) == len(nodes)
    return [str(name) for name in [*nodes, *values]]


@pytest.mark.parametrize("parts", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("c", [True, False])
def test_the_runtime_computes_the_same(parts: tuple[str, ...], c: bool) -> None:
    before = model(*parts)
    after = run("inline_functions", before).model
    assert not after.functions
    assert {node.domain for node in after.graph.all_nodes()} == {""}
    assert "f" not in after.opset_imports
    for found, expected in zip(results(after, c), results(before, c), strict=True):
        assert np.array_equal(found, expected)


def test_names_are_those_of_the_call_and_of_the_function() -> None:
    made = model(*MODELS["body-in-function"])
    made.graph[0].name = "first"
    assert inline_functions(made).applied == 2
    verify(made)
    found = names(made)
    assert {"first/t", "y/t", "first/k/t", "y/k/t"} <= set(found)
    assert {key for node in made.graph.all_nodes() for key in node.metadata_props} == {ORIGIN}


def test_inputs_that_are_passed_through_keep_their_names() -> None:
    made = model(
        "g (float[N,4] x) => (float[N,4] y, float[N,4] z) { y, z = f.Both (x) }", "Both (a) => (b, b) { b = Relu (a) }"
    )
    both = made.functions["f", "Both", ""]
    both.outputs[0] = both.inputs[0]
    inline_functions(made)
    verify(made)
    assert [node.op_type for node in made.graph] == ["Relu", "Identity"]
    assert [value.name for value in (*made.graph.inputs, *made.graph.outputs)] == ["x", "y", "z"]


def test_an_output_that_a_call_leaves_out_gets_a_name() -> None:
    made = model(
        "g (float[N,4] x) => (float[N,4] y) { , y = f.Two (x)  z = f.Two (x) }",
        "Two (a) => (b, c) { b = Relu (a)  c = Neg (b) }",
    )
    inline_functions(made)
    verify(made)
    assert [[value.name for value in node.inputs if value] for node in made.graph] == [["x"], ["y/b"], ["x"], ["z"]]


def test_an_output_that_a_node_leaves_out_stays_out() -> None:
    made = model(
        "g (float[1,1,4] x) => (float[1,1,2] y) { y = f.Pool (x) }",
        "Pool (a) => (c) { b, = MaxPool <kernel_shape = [3]> (a)  c = Relu (b) }",
    )
    made.functions["f", "Pool", ""][0].resize_outputs(2)
    made.functions["f", "Pool", ""][0].outputs[1].name = ""
    inline_functions(made)
    verify(made)
    assert [[value.name for value in node.outputs] for node in made.graph] == [["y/b", ""], ["y"]]


def test_shapes_of_the_function_are_not_taken_for_those_of_the_call() -> None:
    made = model(*MODELS["called-twice"])
    next(iter(made.functions.values()))[0].outputs[0].shape = ir.Shape([7])
    inline_functions(made)
    assert [node.outputs[0].shape for node in made.graph if node.op_type == "Add"] == [None, None]


@pytest.mark.parametrize(("version", "reason"), [(20, "other-opset"), (16, None)], ids=["changed", "unchanged"])
def test_functions_of_another_opset_come_in_where_their_operators_are_the_same(
    version: int, reason: str | None
) -> None:
    operator = "Identity" if reason else "LeakyRelu"  # Identity is new in opset 21, LeakyRelu the same since 16
    made = model(
        "g (float[N,4] x) => (float[N,4] y) { y = f.F (x) }",
        f"F (a) => (b) {{ t = {operator} (a)  b = f.G (t) }}",
        "G (a) => (b) { b = Relu (a) }",
    )
    made.functions["f", "F", ""].opset_imports[""] = version
    text = ir.to_onnx_text(made)
    change = inline_functions(made)
    if reason:
        assert change == Change(skipped={reason: 1, "called-by-function": 1})  # type: ignore[arg-type]
        assert ir.to_onnx_text(made) == text
    else:
        assert change == Change(applied=2)
        verify(made)


def test_a_domain_that_the_model_does_not_import_comes_with_the_function() -> None:
    made = model("g (float[N,4] x) => (float[N,4] y) { y = f.F (x) }", "F (a) => (b) { b = other.Op (a) }")
    made.functions["f", "F", ""].opset_imports["other"] = 3
    inline_functions(made)
    assert made.opset_imports == {"": 21, "other": 3}


def test_functions_of_quantization_stay() -> None:
    made = model("g (float[N,4] x) => (float[N,4] y) { y = f.F (x) }", "F (a) => (b) { b = Relu (a) }")
    add_functions(made)
    ours = set(made.functions) - {("f", "F", "")}
    assert inline_functions(made) == Change(applied=1)
    assert set(made.functions) == ours
    assert inline_functions(made) == Change()


def test_a_circle_is_refused() -> None:
    made = model(
        "g (float[N,4] x) => (float[N,4] y) { y = f.F (x) }",
        "F (a) => (b) { b = f.G (a) }",
        "G (a) => (b) { b = f.F (a) }",
    )
    with pytest.raises(TransformError, match=r"in a circle: f\.F -> f\.G -> f\.F"):
        inline_functions(made)


def test_a_call_with_too_many_inputs_is_refused() -> None:
    made = model("g (float[N,4] x) => (float[N,4] y) { y = f.F (x, x) }", "F (a) => (b) { b = Relu (a) }")
    with pytest.raises(TransformError, match=r"node 'y' calls function f\.F with 2 inputs, but it takes 1"):
        inline_functions(made)


def test_a_function_that_reads_what_nobody_computes_is_refused() -> None:
    made = model("g (float[N,4] x) => (float[N,4] y) { y = f.F (x) }", "F (a) => (b) { b = Add (a, a) }")
    made.functions["f", "F", ""][0].replace_input_with(1, made.graph.inputs[0])
    with pytest.raises(TransformError, match=r"function f\.F reads 'x', which nothing in it computes"):
        inline_functions(made)


def test_a_graph_as_attribute_stays() -> None:
    made = model("g (float[N,4] x) => (float[N,4] y) { y = f.F (x) }", "F <body> (a) => (b) { b = Relu (a) }")
    made.graph[0].attributes["body"] = ir.AttrGraph("body", ir.Graph([], [], nodes=[], name="empty"))
    assert inline_functions(made) == Change(skipped={"graph-attribute": 1})  # type: ignore[arg-type]
