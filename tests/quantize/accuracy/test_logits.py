"""The logits behind outputs that are probabilities."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from requant.quantize.accuracy.logits import logits_of

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("net (float[N,9] x) => (float[N,9] y) { [p] y = Softmax(x) }", {"y": ("p", 0, "x (into Softmax)")}),
        (
            "net (float[N,9,1,1] x) => (float[N,9] y) { [p] a = Softmax<axis = 1>(x) [f] y = Flatten(a) }",
            {"y": ("p", 0, "x (into Softmax)")},
        ),
        (
            "net (float[N,9] x) => (float[N,9] y, float[N,9] z) { [p] y = Softmax(x) [q] z = Relu(x) }",
            {"y": ("p", 0, "x (into Softmax)")},
        ),
        ("net (float[N,9] x) => (float[N,9] y) { [p] y = Sigmoid(x) }", {}),
        ("net (float[N,9] x) => (float[N,9] y) { [p] y = com.other.Softmax(x) }", {}),
        ("net (float[N,9] x) => (float[N,9] x) { }", {}),
        ("net (float[N,9,8,8] x) => (float[N,9,8,8] y) { [p] y = Softmax<axis = 1>(x) }", {}),
    ],
    ids=["a row", "reshaped", "beside others", "sigmoid", "another domain", "no operator", "a map"],
)
def test_logits_are_found_behind_probabilities(text: str, found: dict[str, tuple[str, int, str]]) -> None:
    header = HEADER.replace("17]", '17, "com.other" : 1]')
    assert logits_of(ir.from_proto(onnx.parser.parse_model(header + text))) == found
