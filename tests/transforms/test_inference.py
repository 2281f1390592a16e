"""Types and shapes that onnx infers."""

from __future__ import annotations

import onnx_ir as ir

from requant.transforms.inference import infer, inferred, stand_ins

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
