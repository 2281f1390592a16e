"""Cutting a graph at names that a user gives: what is refused, and with which words."""

import onnx_ir as ir
import pytest

from requant import UnknownNameError
from requant.transforms import REGISTRY, TransformError, verify

MODEL = """<ir_version: 8, opset_import: ["" : 17, "my.domain" : 1]>
g (float[N,4] x, float[N,4] z) => (float[N,4] y) <float[4] w = {1, 2, 3, 4}> {
    [custom] a = my.domain.Norm(x)
    [sum] b = Add(x, z)
    [scaled] c = Mul(b, w)
    [last] y = Add(a, c)
}"""

strip_unused_nodes = REGISTRY["strip_unused_nodes"]


def model() -> ir.Model:
    return ir.from_onnx_text(MODEL)


@pytest.mark.parametrize(
    ("inputs", "outputs", "error", "message"),
    [
        (("bb",), (), UnknownNameError, "no tensor named 'bb'; did you mean 'b'?"),
        ((), ("yy",), UnknownNameError, "no tensor named 'yy'; did you mean 'y'?"),
        (
            ("x",),
            ("c",),
            TransformError,
            "the outputs also need the input 'z', which is not one of the inputs x",
        ),
        (("b",), ("b",), TransformError, "tensor 'b' is named as input and as output; name it only once"),
        (("y",), (), TransformError, "tensor 'y' is an output of the graph; name other outputs to cut there"),
        (
            (),
            ("a",),
            TransformError,
            (
                "the type of tensor 'a' is not known, so it cannot be an input or output of the graph; "
                "add its type to the model's value_info, or name a tensor before any operator of an unknown domain"
            ),
        ),
    ],
    ids=["unknown-input", "unknown-output", "missing-input", "both", "output-as-input", "unknown-type"],
)
def test_names_that_cannot_be_met_are_refused(
    inputs: tuple[str, ...], outputs: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        strip_unused_nodes(model(), inputs=inputs, outputs=outputs)
    assert str(caught.value) == message


@pytest.mark.parametrize(("shape", "expected"), [("", []), ("N, 4", ["N", 4])])
def test_a_tensor_of_unknown_type_becomes_an_input_of_the_type_that_is_said(
    shape: str, expected: list[str | int]
) -> None:
    cut = model()
    strip_unused_nodes(cut, inputs=("a", "z", "x"), type="float", shape=shape)
    verify(cut)
    first = cut.graph.inputs[0]
    assert (first.name, first.dtype) == ("a", ir.DataType.FLOAT)
    assert first.shape == ir.Shape(expected)
    assert cut.graph.inputs[1].shape == ir.Shape(["N", 4])  # what is known stays


def test_a_type_that_there_is_not_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="no type named 'flaot'; did you mean 'float'"):
        strip_unused_nodes(model(), inputs=("a", "z", "x"), type="flaot")


def test_a_weight_can_become_an_input() -> None:
    cut = model()
    strip_unused_nodes(cut, inputs=("b", "w"), outputs=("c",))
    verify(cut)
    assert [str(value.name) for value in cut.graph.inputs] == ["b", "w"]
    assert [node.name for node in cut.graph] == ["scaled"]
    assert not cut.graph.initializers


def test_the_order_of_the_names_is_the_order_of_the_inputs() -> None:
    cut = model()
    assert strip_unused_nodes(cut, inputs=("z", "x")).applied == 1
    assert [value.name for value in cut.graph.inputs] == ["z", "x"]
    assert strip_unused_nodes(cut, inputs=("z", "x")).applied == 0
