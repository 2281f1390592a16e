"""Types and shapes that onnx infers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant.transforms import run
from requant.transforms.graphs import inference
from requant.transforms.graphs.inference import ALIKE, Known, infer, inferred, stand_ins
from requant.transforms.patterns.lengths import Lengths

MODEL = """<ir_version: 8, opset_import: ["" : 17, "own" : 1]> g (float[2, N] x, bool c) => (float[M, K] y) <float[3] w = {1, 2, 3}> {
    a = Transpose (x)
    b = own.Unknown (a)
    [branch] y = If (c) <
        then_branch = yes () => (float[M, K] t) { [neg] q = Neg (a) t = Identity (q) },
        else_branch = no () => (float[M, K] e) { e = Identity (b) }>
}"""


def shapes(values: dict[str, ir.Value]) -> dict[str, list[int | str | None] | None]:
    return {
        name: None if value.shape is None else [axis if isinstance(axis, int) else axis.value for axis in value.shape]
        for name, value in values.items()
    }


def test_stand_ins_have_types_and_shapes_and_the_model_does_not_change() -> None:
    model = ir.from_onnx_text(MODEL)
    before = ir.to_proto(model).SerializeToString()
    found = inferred(model, bodies=True)
    assert shapes(found) == {
        "x": [2, "N"],
        "c": [],
        "w": [3],
        "a": ["N", 2],
        "b": None,
        "y": ["M", "K"],
        "q": ["N", 2],
        "t": ["M", 2],
        "e": ["M", "K"],
    }
    assert (found["q"].dtype, found["b"].dtype) == (ir.DataType.FLOAT, None)
    assert ir.to_proto(model).SerializeToString() == before


def test_the_main_graph_alone_has_no_values_of_bodies() -> None:
    assert [*inferred(ir.from_onnx_text(MODEL))] == ["x", "c", "w", "a", "b", "y"]


def test_stand_ins_share_no_shape_with_the_model_and_read_nothing() -> None:
    model = ir.from_onnx_text(MODEL)
    for value, other in stand_ins(model).items():
        assert other.name == value.name
        assert other.producer() is None
        assert not other.uses()
        assert value.shape is None or other.shape is not value.shape


def test_a_model_that_onnx_refuses_keeps_what_it_says() -> None:
    model = ir.from_onnx_text(MODEL.replace("Transpose (x)", "Add (x, w)").replace("float[2, N] x", "float[2, 7] x"))
    infer(model)
    known = {str(value.name): value for value in model.graph.inputs}
    assert shapes(known) == {"x": [2, 7], "c": []}
    assert model.graph.outputs[0].dtype is ir.DataType.FLOAT


BOXES = """<ir_version: 8, opset_import: ["": 17]>
g (float[B, N, 16] x) => (float[B, 54, 16] z, float[B, 4, 54, 4] y) <int64[1] m1 = {-1}, int64[1] c4 = {4}, int64[1] one = {1}> {
  z = Relu (x)
  s = Shape (z)
  n = Gather (s, one)
  to = Concat<axis = 0>(m1, n, c4, c4)
  v = Reshape (z, to)
  y = Transpose<perm = [0, 2, 1, 3]>(v)
}"""


def test_a_declared_length_is_none_where_the_length_is_that_of_an_input() -> None:
    """The model was exported with 54 boxes; the runtime takes any number, and only warns."""
    found = inferred(ir.from_onnx_text(BOXES))
    assert shapes(found)["z"] == ["B", "N", 16]
    open_ended = inferred(ir.from_onnx_text(BOXES.replace("Shape (z)", "Shape (x)")))
    assert 54 not in (open_ended["y"].shape or ())


def test_a_declared_length_counts_where_none_is_inferred() -> None:
    text = BOXES.replace("float[B, N, 16] x)", "float[B, N, 16] x, int64[3] lengths)").replace(
        "Relu (x)", "Reshape (x, lengths)"
    )
    assert shapes(inferred(ir.from_onnx_text(text)))["z"] == ["B", 54, 16]


def test_a_model_whose_output_declares_too_much_computes_the_same_simplified() -> None:
    proto = onnx.parser.parse_model(BOXES)
    simplified = run("fold_constants", ir.from_proto(proto)).model
    data = {"x": np.arange(2 * 20 * 16, dtype=np.float32).reshape(2, 20, 16)}
    models = (each.SerializeToString() for each in (proto, ir.to_proto(simplified)))
    before, after = (ort.InferenceSession(each).run(None, data) for each in models)
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


def like(node: str) -> ir.Model:
    """Return a model whose node reads x, float[N, 4, S], and makes y; a Transpose reads y."""
    return ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[N, 4, S] x, float[4] s, float[4] b, bool c) => (z) {{ {node} z = Transpose <perm = [1, 2, 0]> (y) }}""")


@pytest.mark.parametrize(("domain", "op"), ALIKE, ids=[op for _, op in ALIKE])
def test_results_alike_have_the_form_of_the_input_and_so_has_what_follows(domain: str, op: str) -> None:
    model = like(f"y = {domain and domain + '.'}{op} (x, s, b)")
    before = ir.to_proto(model).SerializeToString()
    found = inferred(model)
    assert {name: shapes(found)[name] for name in "yz"} == {"y": ["N", 4, "S"], "z": [4, "S", "N"]}
    assert found["z"].dtype is ir.DataType.FLOAT
    assert ir.to_proto(model).SerializeToString() == before


def test_a_skip_tells_the_sum_and_not_the_statistics() -> None:
    found = inferred(like("y, mean, , sum = com.microsoft.SkipLayerNormalization (x, x, s)"))
    assert shapes(found)["mean"] is None
    assert shapes(found)["sum"] == ["N", 4, "S"]
    alone = inferred(like("a, , , y = com.microsoft.SkipLayerNormalization (x, x, s)"))
    assert shapes(alone)["z"] == [4, "S", "N"]


def test_forms_are_known_inside_and_behind_bodies() -> None:
    model = like("""a, , , b2 = com.microsoft.SkipLayerNormalization (x, x, s)
        y = If (c) <then_branch = yes () => (t) { t, , , u = com.microsoft.SkipLayerNormalization (b2, b2, s) },
                    else_branch = no () => (e) { r = com.microsoft.Gelu (x) e = Relu (r) }>""")
    found = inferred(model, bodies=True)
    assert [shapes(found)[name] for name in ("t", "u", "r", "e", "y")] == [["N", 4, "S"]] * 5


def test_a_function_of_the_model_is_no_operator_of_the_table() -> None:
    """The function makes another form; the model calls it by a name of the runtime."""
    text = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[N, 4, S] x) => (y) { y = com.microsoft.Gelu (x) }
        <domain: "com.microsoft", opset_import: ["" : 21]> Gelu (a) => (b) { b = Transpose <perm = [2, 0, 1]> (a) }"""
    assert shapes(inferred(ir.from_onnx_text(text)))["y"] == ["S", "N", 4]


@pytest.mark.parametrize(
    "node",
    [
        "y = GroupNormalization <num_groups = 2> (x, s, b)",
        "y = SimplifiedLayerNormalization <axis = 1> (x, x)",
        "y = com.microsoft.BiasGelu (x, last)",
        "y = com.microsoft.FastGelu (x, last)",
        "y = com.microsoft.Gelu (x)",
        "y = com.microsoft.QuickGelu (x)",
        "y = com.microsoft.RotaryEmbedding (x, at, waves, waves)",
        "y, , , u = com.microsoft.SkipLayerNormalization (x, x, last)",
        "u, , , y = com.microsoft.SkipLayerNormalization (x, x, last)",
        "y, , , u = com.microsoft.SkipSimplifiedLayerNormalization (x, x, last)",
        "u, , , y = com.microsoft.SkipSimplifiedLayerNormalization (x, x, last)",
    ],
)
def test_the_runtime_makes_the_form_that_the_table_says(node: str) -> None:
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[N, 4, 8] x, float[4] s, float[4] b, float[8] last, int64[1] at, float[9, 4] waves) => (float[A, B, C] y)
        {{ {node} }}""")
    sizes = {"x": (2, 4, 8), "s": 4, "b": 4, "last": 8, "at": 1, "waves": (9, 4)}
    feed = {name: np.ones(size, np.int64 if name == "at" else np.float32) for name, size in sizes.items()}
    (result,) = ort.InferenceSession(proto.SerializeToString()).run(None, feed)
    assert result.shape == (2, 4, 8)
    assert shapes(inferred(ir.from_proto(proto)))["y"] == ["N", 4, 8]


# --- when it is inferred


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[ir.Model]:
    """Return the list of the models of which types and shapes were inferred."""
    models: list[ir.Model] = []

    def spy(model: ir.Model) -> dict[ir.Value, ir.Value]:
        models.append(model)
        return stand_ins(model)

    monkeypatch.setattr(inference, "stand_ins", spy)
    return models


def test_shapes_are_inferred_once_and_only_where_one_is_asked_for(counted: list[ir.Model]) -> None:
    model = ir.from_onnx_text(MODEL)
    known, lengths = Known(model), Lengths(model)
    assert counted == []
    transposed = model.graph.node(0).outputs[0]
    assert (known.rank(transposed), known.dtype(transposed)) == (2, ir.DataType.FLOAT)
    assert counted == [model]
    assert lengths.of(transposed) == ["N", 2]
    assert lengths.origin(transposed, 0) == (model.graph.inputs[0], 1)
    assert counted == [model, model]


@pytest.mark.parametrize(
    ("name", "asks"), [("fuse_leaky_relu", 0), ("where_to_add", 0), ("simplify_reshapes", 0), ("merge_clips", 1)]
)
def test_a_transform_that_finds_nothing_of_its_pattern_infers_nothing(
    name: str, asks: int, counted: list[ir.Model]
) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { a = Neg (x)  y = Relu (a) }'
    run(name, ir.from_onnx_text(text))
    assert len(counted) == asks
