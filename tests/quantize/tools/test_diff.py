"""`requant diff`: what is equal under which names and in which order, and how a difference is told."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from requant.cli import main
from requant.quantize.console.differences import FIRST, difference_lines
from requant.quantize.tools.inspect import diff_weights as difference_weights
from requant.quantize.tools.inspect.diff import Differences, diff_models
from requant.quantize.tools.inspect.diff_graphs import Difference, Ignored
from requant.quantize.tools.inspect.diff_weights import Apart, apart, digest

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
MODELS = sorted(SAMPLE_MODELS.glob("*.onnx"))
STRICT, LOOSE = Ignored(), Ignored(names=True, order=True)
each_mode = pytest.mark.parametrize("ignored", [STRICT, LOOSE, Ignored(names=True)], ids=["strict", "loose", "names"])


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, arguments)], prog_name="requant")


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "my" : 1]> {text}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("diff")


def differences(folder: Path, first: onnx.ModelProto, second: onnx.ModelProto, ignored: Ignored = LOOSE) -> list[str]:
    """Save two models and return the lines that tell their differences."""
    onnx.save(first, folder / "a.onnx")
    onnx.save(second, folder / "b.onnx")
    found = diff_models(folder / "a.onnx", folder / "b.onnx", ignored)
    back = diff_models(folder / "b.onnx", folder / "a.onnx", ignored)
    turned = {"-": "+", "+": "-", "~": "~"}
    assert sorted(d.change for d in found.found) == sorted(turned[d.change] for d in back.found)
    return [str(each) for each in found.found]


# --- equal


@each_mode
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_model_equals_itself(path: Path, ignored: Ignored) -> None:
    assert diff_models(path, path, ignored).equal


def renamed(model: onnx.ModelProto, pick: random.Random) -> onnx.ModelProto:
    """Return a copy with other names inside and another order of nodes and initializers."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    kept = {end.name for end in (*made.graph.input, *made.graph.output)}
    names: dict[str, str] = {"": ""}

    def new(name: str) -> str:
        return name if name in kept else names.setdefault(name, f"t{pick.getrandbits(40)}")

    for tensor in made.graph.initializer:
        tensor.name = new(tensor.name)
    for node in made.graph.node:
        node.name = f"n{pick.getrandbits(40)}"
        node.input[:] = map(new, node.input)
        node.output[:] = map(new, node.output)
    tensors = list(made.graph.initializer)
    pick.shuffle(tensors)
    del made.graph.value_info[:], made.graph.initializer[:]
    made.graph.initializer.extend(tensors)
    waiting, ready = (
        list(made.graph.node),
        {*kept - {end.name for end in made.graph.output}, "", *(t.name for t in tensors)},
    )
    order = []
    while waiting:
        node = pick.choice([node for node in waiting if set(node.input) <= ready])
        waiting.remove(node)
        ready.update(node.output)
        order.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in order]
    del made.graph.node[:]
    made.graph.node.extend(copies)
    return made


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", [pytest.param("digits_transformer", marks=pytest.mark.slow), "digits_mobile"])
def test_names_and_order_can_be_ignored(name: str, seed: int, folder: Path) -> None:
    model = onnx.load(SAMPLE_MODELS / f"{name}.onnx")
    other = renamed(model, random.Random(seed))
    assert differences(folder, model, other) == []
    assert differences(folder, model, other, STRICT) != []


OTHER = {"Add": "Sub", "Mul": "Div", "Relu": "Abs", "Erf": "Tanh"}
"""Operators and others that take the same inputs."""


def mutations() -> dict[str, Callable[[onnx.ModelProto, random.Random], None]]:
    """Return what changes a model in one place, by name."""

    def weight(model: onnx.ModelProto, pick: random.Random) -> None:
        tensor = pick.choice([tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT])
        array = numpy_helper.to_array(tensor).copy()
        place = pick.randrange(array.size)
        array.reshape(-1)[place] = np.nextafter(array.reshape(-1)[place], np.float32(np.inf))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    def attribute(model: onnx.ModelProto, pick: random.Random) -> None:
        attributes = [each for node in model.graph.node for each in node.attribute if each.type == each.INT]
        pick.choice(attributes).i += 1

    def operator(model: onnx.ModelProto, pick: random.Random) -> None:
        node = pick.choice([node for node in model.graph.node if node.op_type in OTHER])
        node.op_type = OTHER[node.op_type]

    def output(model: onnx.ModelProto, pick: random.Random) -> None:
        model.graph.output.append(onnx.ValueInfoProto(name=model.graph.node[0].output[0]))

    def twice(model: onnx.ModelProto, pick: random.Random) -> None:
        node = model.graph.node.add()
        node.CopyFrom(pick.choice([node for node in model.graph.node if len(node.output) == 1][:-1]))
        node.name, node.output[0] = "again", "again"

    return {each.__name__: each for each in (weight, attribute, operator, output, twice)}


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("ignored", [STRICT, LOOSE], ids=["strict", "loose"])
@pytest.mark.parametrize("kind", mutations())
def test_every_change_in_one_place_is_found(kind: str, ignored: Ignored, seed: int, folder: Path) -> None:
    pick = random.Random(seed)
    model = onnx.load(SAMPLE_MODELS / "digits_transformer.onnx")
    other = onnx.ModelProto()
    other.CopyFrom(model)
    mutations()[kind](other, pick)
    if ignored.names:
        other = renamed(other, pick)
    (line, *more) = differences(folder, model, other, ignored)
    if kind == "weight":
        assert line.startswith("~ weight ")
        assert "1 of " in line
    if kind in ("weight", "attribute", "twice"):
        assert more == []


def test_how_weights_are_stored_is_no_difference(tmp_path: Path) -> None:
    model = onnx.load(MODELS[0])
    onnx.save(model, tmp_path / "outside.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    typed = onnx.load(MODELS[0])
    for tensor in typed.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if tensor.data_type == TensorProto.FLOAT:
            tensor.ClearField("raw_data")
            tensor.float_data.extend(array.reshape(-1).tolist())
    onnx.save(typed, tmp_path / "typed.onnx")
    for name in ("outside", "typed"):
        assert diff_models(MODELS[0], tmp_path / f"{name}.onnx").equal


# --- what is told

TWO = "g (float[2,4] x) => (float[2,4] y) <float[4] w = {1, 2, 3, 4}, float[4] v = {5, 6, 7, 8}>"
BASE = f"{TWO} {{ [a] s = Mul(x, w) [b] t = Relu(s) [c] y = Add(t, v) }}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{TWO} {{ [a] s = Mul(x, w) [c] y = Add(s, v) }}", ["- node b (Relu)"]),
        (
            f"{TWO} {{ [a] s = Mul(x, w) [b] t = Relu(s) [d] u = Relu(t) [c] y = Add(u, v) }}",
            ["+ node d (Relu)"],
        ),
        (f"{TWO} {{ [a] s = Mul(x, w) [b] t = Neg(s) [c] y = Add(t, v) }}", ["- node b (Relu)", "+ node b (Neg)"]),
        (
            f"{TWO.replace('{1, 2, 3, 4}', '{1, 2.5, 3, 8}')} {{ [a] s = Mul(x, w) [b] t = Relu(s) [c] y = Add(t, v) }}",
            ["~ weight w FLOAT [4]: 2 of 4 values differ, by at most 4"],
        ),
        (
            f"{TWO} {{ [a] s = Mul(x, v) [b] t = Relu(s) [c] y = Add(t, w) }}",
            [
                "~ weight w FLOAT [4]: 4 of 4 values differ, by at most 4",
                "~ weight v FLOAT [4]: 4 of 4 values differ, by at most 4",
            ],
        ),
        (f"{TWO} {{ [a] s = Mul(x, w) [b] t = Relu(s) [c] y = Add(t, x) }}", ["~ node c (Add): reads 'v' -> 'x'"]),
        (
            f"{TWO} {{ [a] s = Mul(x, w) [b] t = Relu(s) [c] y = Add(v, t) }}",
            ["~ node c (Add): reads 't' -> 'v'", "~ node c (Add): reads 'v' -> 't'"],
        ),
        (
            f"{TWO.replace('y)', 'z)')} {{ [a] s = Mul(x, w) [b] t = Relu(s) [c] z = Add(t, v) }}",
            ["- output y: FLOAT [2, 4]", "+ output z: FLOAT [2, 4]"],
        ),
        (
            BASE.replace("float[2,4] x", "float[3,4] x"),
            ["~ input x: x: FLOAT [2, 4] -> x: FLOAT [3, 4]"],
        ),
    ],
    ids=[
        *("a-node-less", "a-node-more", "another-operator", "a-weight", "weights-exchanged", "another-input"),
        *("inputs-exchanged", "another-output", "another-shape"),
    ],
)
def test_what_differs_is_told_without_what_follows_from_it(text: str, told: list[str], folder: Path) -> None:
    assert differences(folder, parsed(BASE), parsed(text)) == told


def test_duplicates_are_counted(folder: Path) -> None:
    merged = "g (float[2] x) => (float[2] y) { a = Relu(x) y = Add(a, a) }"
    doubled = "g (float[2] x) => (float[2] y) { a = Relu(x) b = Relu(x) y = Add(a, b) }"
    assert differences(folder, parsed(doubled), parsed(doubled)) == []
    assert len(differences(folder, parsed(merged), parsed(doubled))) == 1


def test_branches_that_look_alike_are_told_apart_by_their_weights(folder: Path) -> None:
    head = "g (float[2,4] x) => (float[2,4] y) <float[4] w = {1, 2, 3, 4}, float[4] v = {5, 6, 7, 8}>"
    one = f"{head} {{ [a] p = Mul(x, w) [b] q = Mul(x, v) [c] y = Sub(p, q) }}"
    assert (
        differences(folder, parsed(one), parsed(f"{head} {{ [i] r = Mul(x, v) [k] s = Mul(x, w) [l] y = Sub(s, r) }}"))
        == []
    )
    exchanged = differences(
        folder, parsed(one), parsed(f"{head} {{ [a] p = Mul(x, w) [b] q = Mul(x, v) [c] y = Sub(q, p) }}")
    )
    assert exchanged == ["~ node c (Sub): reads 'p' -> 'q'", "~ node c (Sub): reads 'q' -> 'p'"]


def test_names_and_order_without_ignoring_them(folder: Path) -> None:
    one = f"{TWO} {{ [a] s = Mul(x, w) [b] t = Add(x, v) [c] y = Add(s, t) }}"
    other = f"{TWO} {{ [b] t = Add(x, v) [a] s = Mul(x, w) [c] y = Add(s, t) }}"
    order = ["~ order nodes: a (Mul) is at the position of b (Add)"]
    assert differences(folder, parsed(one), parsed(other), STRICT) == order
    assert differences(folder, parsed(one), parsed(other), Ignored(order=True)) == []
    assert differences(folder, parsed(one), parsed(other), Ignored(names=True)) == order
    named = one.replace("[a]", "[mul]")
    assert differences(folder, parsed(one), parsed(named), STRICT) == ["~ name a (Mul): 'a' -> 'mul'"]
    assert differences(folder, parsed(one), parsed(named), Ignored(names=True)) == []


def test_by_name_a_node_keeps_its_partner(folder: Path) -> None:
    other = f"{TWO} {{ [a] t = Mul(x, w) [c] y = Add(t, v) }}"
    assert differences(folder, parsed(BASE), parsed(other), STRICT) == [
        "- node b (Relu)",
        "~ node a (Mul): writes s -> t",
    ]


LOOP = """g (float[2] x, int64 n) => (float[2] y) <float[2] w = {1, 2}, bool yes = {1}> {
  [loop] y = Loop(n, yes, x) <body = b (int64 i, bool go, float[2] s) => (bool on, float[2] t) {
    [on] on = Identity(go) [step] u = Mul(s, w) [act] t = Relu(u)
  }>
}"""


@each_mode
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("t = Relu(u)", "t = Neg(u)", "loop body > act (Relu)"),
        ("Mul(s, w)", "Add(s, w)", "loop body > step (Mul)"),
    ],
    ids=["at-the-end", "inside"],
)
def test_bodies_are_looked_into(before: str, after: str, told: str, ignored: Ignored, folder: Path) -> None:
    found = differences(folder, parsed(LOOP), parsed(LOOP.replace(before, after)), ignored)
    assert told in found[0]
    assert all("loop body > " in line for line in found)


def test_functions_are_looked_into(folder: Path) -> None:
    text = """g (float[2] x) => (float[2] y) { y = my.F(x) }
    <domain: "my", opset_import: ["" : 21]> F (a) => (c) { [first] b = Relu(a) [last] c = Neg(b) }"""
    assert differences(folder, parsed(text), parsed(text.replace("= Neg", "= Abs"))) == [
        "- node my.F > last (Neg)",
        "+ node my.F > last (Abs)",
    ]
    assert (
        differences(
            folder, parsed(text), parsed(text.replace("(a) => (c)", "(p) => (c)").replace("Relu(a)", "Relu(p)"))
        )
        == []
    )


def test_models_as_a_whole(folder: Path) -> None:
    one, other = parsed(BASE), parsed(BASE)
    other.ir_version = 9
    other.opset_import[0].version = 20
    other.producer_name = "me"
    helper.set_model_props(one, {"kept": "1", "lost": "2"})
    helper.set_model_props(other, {"kept": "3"})
    assert differences(folder, one, other, STRICT) == [
        "~ format IR version: 10 -> 9",
        "~ opset ai.onnx: 21 -> 20",
        "+ metadata producer_name: me",
        "~ metadata kept: 1 -> 3",
        "- metadata lost: 2",
    ]
    assert differences(folder, one, other, Ignored(metadata=True, versions=True)) == []


# --- constants


def tensor(array: object) -> ir.TensorProtocol:
    return ir.tensor(np.asarray(array, np.float32))


@pytest.mark.parametrize("block", [4, 8, 12, 400])
def test_blocks_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference_weights, "BLOCK", block)
    one, other = tensor([[1, 2, np.nan], [np.inf, -0.0, 6]]), tensor([[1, 5, np.nan], [7, 0.0, 6]])
    assert apart(one, other) == Apart(3, 6, 3.0, finite=False)
    assert digest(one) != digest(other)
    monkeypatch.setattr(difference_weights, "BLOCK", 28)
    again = digest(one)
    monkeypatch.setattr(difference_weights, "BLOCK", block)
    assert digest(one) == again


def test_four_bits_are_compared_however_they_are_stored(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", ["w", "s"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
        [
            helper.make_tensor("w", TensorProto.INT4, [3], [1, -8, 7]),
            helper.make_tensor("s", TensorProto.FLOAT, [], [0.5]),
        ],
    )
    model = helper.make_model(graph)
    onnx.save(model, tmp_path / "a.onnx")
    model.graph.initializer[0].CopyFrom(helper.make_tensor("w", TensorProto.INT4, [3], b"\x81\x07", raw=True))
    onnx.save(model, tmp_path / "raw.onnx")
    onnx.save(model, tmp_path / "out.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    for name in ("raw", "out"):
        for ignored in (STRICT, LOOSE):
            assert diff_models(tmp_path / "a.onnx", tmp_path / f"{name}.onnx", ignored).equal
    model.graph.initializer[0].CopyFrom(helper.make_tensor("w", TensorProto.INT4, [3], [1, -8, 5]))
    onnx.save(model, tmp_path / "b.onnx")
    (found,) = diff_models(tmp_path / "out.onnx", tmp_path / "b.onnx").found
    assert str(found) == "~ weight w INT4 [3]: 1 of 3 values differ, by at most 2"


def test_equal_bytes_of_other_types_differ(folder: Path) -> None:
    one = "g (float[2,4] x) => (int64[4] y) <int64[4] w = {1, 2, 3, 4}> { y = Identity(w) }"
    other = one.replace("int64", "uint64")
    assert "~ weight w: INT64 [4] -> UINT64 [4]" in differences(folder, parsed(one), parsed(other))


# --- the command


def test_exit_codes(tmp_path: Path) -> None:
    assert (invoke(MODELS[0], MODELS[0]).exit_code, invoke(MODELS[0], MODELS[0]).stdout) == (0, "equal\n")
    different = invoke(MODELS[0], MODELS[1])
    assert (different.exit_code, different.stderr) == (1, "")
    missing = invoke(MODELS[0], tmp_path / "no.onnx")
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert missing.stderr == f"requant: {tmp_path / 'no.onnx'}: no such file\n"


def test_json(tmp_path: Path) -> None:
    onnx.save(parsed(BASE), tmp_path / "a.onnx")
    onnx.save(parsed(BASE.replace("[b] t = Relu(s)", "[b] t = Neg(s)")), tmp_path / "b.onnx")
    result = invoke(tmp_path / "a.onnx", tmp_path / "b.onnx", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "first": str(tmp_path / "a.onnx"),
        "second": str(tmp_path / "b.onnx"),
        "equal": False,
        "differences": [{"kind": "node", "change": "~", "what": "b (Relu)", "text": "Relu -> Neg"}],
    }


def test_of_many_the_first_are_shown() -> None:
    many = tuple(Difference("node", "-", f"n{number} (Relu)") for number in range(FIRST + 3))
    found = Differences("a", "b", (*many, Difference("weight", "+", "w")))
    lines = list(difference_lines(found))
    assert len(lines) == FIRST + 2
    assert lines[FIRST:] == ["- node: 3 more; --all lists them", "+ weight w"]
    assert len(list(difference_lines(found, everything=True))) == FIRST + 4
