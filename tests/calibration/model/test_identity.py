"""Which model ranges belong to: fingerprints, digests of tensors, and where two models begin to differ."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from requant.calibration import fingerprint
from requant.calibration.model.identity import Differences, differences, tensor_digests

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 2] x, bool c) => (float[N, 2] y)
<float[2] w = {1, 2}, float[1] v = {3}> {
    a = Add(x, w)
    b = LeakyRelu <alpha = 0.5> (a)
    y = If (c) <
        then_branch = t () => (float[N, 2] ty) { ty = Mul(b, v) },
        else_branch = e () => (float[N, 2] ey) { ey = Sub(b, v) }
    >
}"""


def test_fingerprint_ignores_what_does_not_compute() -> None:
    plain = fingerprint(ir.from_onnx_text(TEXT))
    noted = ir.from_onnx_text(TEXT)
    noted.doc_string, noted.producer_name, noted.graph.doc_string, noted.graph.name = "d", "p", "g", "h"
    noted.metadata_props["k"] = "v"
    for node in noted.graph:
        node.name, node.doc_string = f"n{id(node)}", "doc"
        node.metadata_props["k"] = "v"
        node.outputs[0].shape = ir.Shape(["N", 2])
    assert fingerprint(noted) == plain


def test_fingerprint_ignores_where_constants_are(tmp_path: Path) -> None:
    model = ir.from_onnx_text(TEXT)
    plain = fingerprint(model)
    ir.save(model, tmp_path / "in.onnx")
    ir.save(model, tmp_path / "ex.onnx", external_data="ex.data", size_threshold_bytes=0)
    assert fingerprint(ir.load(tmp_path / "in.onnx")) == plain
    assert fingerprint(ir.load(tmp_path / "ex.onnx")) == plain


CHANGES = [
    ("{1, 2}", "{1, 3}"),
    ("float[1] v = {3}", "float[1] v = {4}"),
    ("0.5", "0.25"),
    ("LeakyRelu", "Elu"),
    ("Add(x, w)", "Add(w, x)"),
    ("Sub(b, v)", "Sub(v, b)"),
    ("ey = Sub", "ey = Div"),
    (": 17", ": 16"),
    ("float[N, 2] x", "float[M, 2] x"),
    ("(float[N, 2] y)", "(float[N, 2] y, float[N, 2] b)"),
]


@pytest.mark.parametrize(("old", "new"), CHANGES, ids=[new for _, new in CHANGES])
def test_fingerprint_sees_what_computes(old: str, new: str) -> None:
    assert old in TEXT
    assert fingerprint(ir.from_onnx_text(TEXT.replace(old, new))) != fingerprint(ir.from_onnx_text(TEXT))


def test_fingerprint_of_functions_and_texts() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "f" : 1]>
    g (float[N] x) => (float[N] y, string[1] s) {
        y = f.double(x)
        s = Constant <value = string[1] {"a"}> ()
    }
    <domain: "f", opset_import: ["" : 17]>
    double (x) => (y) { y = Add(x, x) }"""
    seen = {
        fingerprint(ir.from_onnx_text(text.replace(*change))) for change in (("", ""), ("Add", "Mul"), ('"a"', '"b"'))
    }
    assert len(seen) == 3


# ---------------------------------------------------------------------------------------------------- digests


def names(model: ir.Model) -> set[str]:
    values = (value.name for node in model.graph.all_nodes() for value in node.outputs)
    return {name for name in (*values, *(value.name for value in model.graph.inputs)) if name}


def digests(text: str) -> dict[str, str]:
    model = ir.from_onnx_text(text)
    return tensor_digests(model, names(model))


def changed(old: str, new: str) -> set[str]:
    """Return the tensors whose digests differ when a part of `TEXT` is another."""
    assert old in TEXT
    before, after = digests(TEXT), digests(TEXT.replace(old, new))
    return {name for name, digest in before.items() if after.get(name) != digest}


@pytest.mark.parametrize(
    ("old", "new", "differing"),
    [
        ("{1, 2}", "{1, 3}", {"a", "b", "ty", "ey", "y"}),
        ("float[1] v = {3}", "float[1] v = {4}", {"ty", "ey", "y"}),
        ("0.5", "0.25", {"b", "ty", "ey", "y"}),
        ("LeakyRelu", "ThresholdedRelu", {"b", "ty", "ey", "y"}),
        ("Add(x, w)", "Add(w, x)", {"a", "b", "ty", "ey", "y"}),
        ("Sub(b, v)", "Sub(v, b)", {"ey", "y"}),
        ("Mul(b, v)", "Mul(b, b)", {"ty", "y"}),
        ("float[N, 2] x", "double[N, 2] x", {"x", "a", "b", "ty", "ey", "y"}),
        ("float[N, 2] x", "float[M, 2] x", set()),
        (": 17", ": 16", {"a", "b", "ty", "ey", "y"}),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_digest_is_of_all_that_computes_a_tensor(old: str, new: str, differing: set[str]) -> None:
    assert changed(old, new) == differing


def test_a_digest_does_not_know_names_nor_where_constants_are(tmp_path: Path) -> None:
    before = digests(TEXT)
    renamed = digests(TEXT.replace("a = Add", "q = Add").replace("(a)", "(q)").replace(" w", " u"))
    assert renamed["q"] == before["a"]
    assert {name: digest for name, digest in renamed.items() if name != "q"}.items() <= before.items()
    model = ir.from_onnx_text(TEXT)
    ir.save(model, tmp_path / "ex.onnx", external_data="ex.data", size_threshold_bytes=0)
    assert tensor_digests(ir.load(tmp_path / "ex.onnx"), before) == before


def test_outputs_of_one_operator_are_told_apart() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[2, 4] x) => (float[2, 2] a, float[2, 2] b) { a, b = Split <axis = 1> (x) }"""
    found = digests(text)
    assert len(set(found.values())) == len(found) == 3
    assert all(len(digest) == 16 and int(digest, 16) for digest in found.values())


LOOP = """<ir_version: 8, opset_import: ["" : 17]>
g (float[2] x, int64 n, bool c) => (float[2] y) {
    s = Relu(x)
    y = Loop (n, c, s) <body = step (int64 i, bool go, float[2] z) => (bool more, float[2] next) {
        more = Identity(go)
        next = Sin(z)
    }>
}"""


def test_what_goes_into_a_loop_computes_the_tensors_in_its_body() -> None:
    before, after = digests(LOOP), digests(LOOP.replace("Relu", "Abs"))
    assert {name for name in before if before[name] != after[name]} == {"s", "more", "next", "y"}


def test_the_meaning_of_a_function_is_part_of_a_digest() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "f" : 1]>
    g (float[N] x) => (float[N] y) { y = f.double(x) }
    <domain: "f", opset_import: ["" : 17]>
    double (x) => (y) { y = Add(x, x) }"""
    assert digests(text)["y"] != digests(text.replace("Add", "Mul"))["y"]


# ---------------------------------------------------------------------------------------------------- differences


def compared(ours: str, theirs: str) -> Differences:
    return differences(ir.from_onnx_text(ours), digests(theirs), names(ir.from_onnx_text(ours)))


def test_differences_begin_where_all_inputs_are_equal() -> None:
    found = compared(TEXT, TEXT.replace("0.5", "0.25"))
    assert found == Differences(begin=["b"], follow=["ey", "ty", "y"], theirs=[], ours=[])
    assert str(found) == "computed differently: 'b', and 3 tensors after it"
    found = compared(TEXT, TEXT.replace("0.5", "0.25").replace("Sub(b, v)", "Sub(v, b)"))
    assert found.begin == ["b"]
    found = compared(TEXT, TEXT.replace("Sub(b, v)", "Sub(v, b)").replace("Mul(b, v)", "Mul(v, b)"))
    assert (list(found.begin), list(found.follow)) == (["ey", "ty"], ["y"])
    assert str(found) == "computed differently: 'ey', 'ty', and 1 tensor after them"


def test_a_difference_in_a_body_goes_on_behind_its_node() -> None:
    found = compared(LOOP, LOOP.replace("Sin", "Cos"))
    assert (list(found.begin), list(found.follow)) == (["next"], ["y"])
    found = compared(LOOP, LOOP.replace("Relu", "Abs"))
    assert (list(found.begin), set(found.follow)) == (["s"], {"more", "next", "y"})


def test_tensors_of_one_model_only_are_named() -> None:
    found = compared(TEXT, TEXT.replace("a = Add", "q = Add").replace("(a)", "(q)"))
    assert found == Differences(begin=[], follow=[], theirs=["q"], ours=["a"])
    assert str(found) == "only in the file: 'q'; only in this model: 'a'"
    many = Differences([], [], list("abcdefg"), [])
    assert str(many) == "only in the file: 'a', 'b', 'c' and 4 more"


def test_models_whose_tensors_are_alike_say_so() -> None:
    assert "the tensors with ranges are equal" in str(compared(TEXT, TEXT.replace("[N, 2] x", "[M, 2] x")))
