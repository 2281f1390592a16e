"""A model run piece by piece gives, bit for bit, what the whole model gives, and holds no more than it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from requant import RequantError
from requant.calibration.model.session import Array, open_session
from requant.quantize.corrections.stream import Stream
from requant.quantize.model.files import serialize

Feeds = list[dict[str, Array]]
SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
SAMPLES = 3

CHAIN = """chain (float[2,3] x) => (float[2,3] y) <float[3,3] v = {1, 2, -3, 4, 5, -6, 7, -8, 9}> {
    a = MatMul(x, v)
    b = Relu(a)
    c = MatMul(b, v)
    d = Add(b, c)
    e = Sigmoid(d)
    f = MatMul(e, v)
    y = Add(f, b)
}"""

BRANCH = """branch (float[2,3] x) => (float[2,3] y) <float zero = {0}> {
    a = Relu(x)
    b = Neg(x)
    total = ReduceSum<keepdims = 0>(x)
    some = Greater(total, zero)
    c = If (some) <
        then_branch = t () => (float[2,3] u) { u = Add(a, x) },
        else_branch = e () => (float[2,3] w) { w = Mul(b, b) }
    >
    d = Mul(c, b)
    y = Sub(d, b)
}"""

LOOP = """loop (float[2,3] x) => (float[2,3] y) <int64 n = {3}, float zero = {0}> {
    a = Relu(x)
    b = Exp(x)
    total = ReduceSum<keepdims = 0>(x)
    some = Greater(total, zero)
    c = Loop(n, some, a) <
        body = l (int64 i, bool keep, float[2,3] s) => (bool keep_, float[2,3] s_) {
            keep_ = Identity(keep)
            inner = If (keep) <
                then_branch = t () => (float[2,3] u) { u = Add(s, b) },
                else_branch = e () => (float[2,3] w) { w = Identity(s) }
            >
            s_ = Mul(inner, a)
        }
    >
    y = Add(c, a)
}"""

CONSTANTS = """constants (float[2,3] x) => (float[2,3] y) <float[3] k = {1, -2, 3}> {
    a = Identity(k)
    b = Relu(a)
    c = Add(x, b)
    y = Mul(c, c)
}"""

SEQUENCE = """sequence (float[2,3] x) => (float[3] y) <int64 zero = {0}, int64 one = {1}> {
    a = Relu(x)
    s = SplitToSequence<axis = 0, keepdims = 0>(a)
    b = SequenceAt(s, zero)
    c = Exp(b)
    d = SequenceAt(s, one)
    y = Add(d, c)
}"""


def model_of(text: str) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def feeds(count: int = SAMPLES) -> Feeds:
    random = np.random.default_rng(5)
    return [{"x": random.standard_normal((2, 3)).astype(np.float32)} for _ in range(count)]


def values(model: ir.Model) -> dict[str, ir.Value]:
    return {str(v.name): v for v in (*model.graph.inputs, *(o for node in model.graph for o in node.outputs))}


def whole(model: ir.Model, data: Sequence[Mapping[str, Array]], names: Sequence[str]) -> dict[str, list[Array]]:
    """Run the whole model once, without optimisation, with all of `names` as outputs."""
    tapped = model.clone()
    known, inputs = values(tapped), {str(v.name) for v in tapped.graph.inputs}
    tapped.graph.outputs[:] = [known[name] for name in dict.fromkeys(names) if name not in inputs]
    session = open_session(serialize(tapped), optimize=False, lean=True)
    made = [str(v.name) for v in tapped.graph.outputs]
    rows = [dict(zip(made, session.run(made, dict(feed)), strict=True)) for feed in data]
    return {name: [({**feed, **row})[name] for feed, row in zip(data, rows, strict=True)] for name in names}


def same(one: Sequence[Array], other: Sequence[Array]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(one, other, strict=True)
    )


CASES = {
    "residuals": (CHAIN, "", "b d y"),
    "stops": (CHAIN, "a c f", "x b e b y"),
    "inputs-alone": (CHAIN, "a", "x x y"),
    "the-same-again": (CHAIN, "", "e b b e y b"),
    "outputs-first": (CHAIN, "", "y e b a"),
    "if": (BRANCH, "", "a c d y"),
    "if-reads-a-stop": (BRANCH, "a", "x c y"),
    "if-after-what-it-captures": (BRANCH, "", "b a c y"),
    "loop": (LOOP, "", "a b c y"),
    "loop-reads-a-stop": (LOOP, "b", "x a c y"),
    "constants-alone": (CONSTANTS, "", "b c b y"),
    "constants-last": (CONSTANTS, "", "c y b"),
    "a-sequence-between-pieces": (SEQUENCE, "", "b y"),
}


@pytest.mark.parametrize(("text", "stops", "takes"), CASES.values(), ids=CASES)
def test_pieces_give_what_the_whole_gives(text: str, stops: str, takes: str) -> None:
    model, data = model_of(text), feeds()
    known, wanted = values(model), whole(model, data, [*takes.split(), *stops.split()])
    stream = Stream(model, data, [known[name] for name in stops.split()])
    stream.plan([known[name] for name in takes.split()])
    waiting = stops.split()
    for name in takes.split():
        assert same(stream.take(known[name]), wanted[name]), name
        if waiting and known[name] in known[waiting[0]].producer().inputs:  # type: ignore[union-attr]
            stop = waiting.pop(0)
            stream.put(known[stop], wanted[stop])
    assert not waiting
    assert stream.nbytes == 0


@pytest.mark.parametrize(
    ("text", "stop", "made"),
    [(CHAIN, "a", "MatMul(x, v)"), (BRANCH, "a", "Relu(x)"), (LOOP, "b", "Exp(x)")],
    ids=["chain", "if", "loop"],
)
def test_what_is_put_is_what_is_read_on(text: str, stop: str, made: str) -> None:
    """In bodies, that nothing else hands it to, too: the model that computes what is put gives the same."""
    model, data = model_of(text), feeds()
    other = whole(model_of(text.replace(f"{stop} = {made}", f"{stop} = Add(x, x)")), data, [stop, "y"])
    known = values(model)
    stream = Stream(model, data, [known[stop]])
    stream.plan([known["y"]])
    stream.put(known[stop], other[stop])
    assert same(stream.take(known["y"]), other["y"])
    assert not same(other["y"], whole(model, data, ["y"])["y"])


@pytest.mark.parametrize("name", ["digits", "digits_mobile", "digits_transformer"])
def test_a_network_cut_before_and_behind_each_product(name: str) -> None:
    model = ir.load(SAMPLE_MODELS / f"{name}.onnx")
    images = np.load(SAMPLE_MODELS / "digits.npz")["calib/image"]
    data: Feeds = [{"image": images[index : index + 1]} for index in range(2)]
    products = [node for node in model.graph if node.op_type in ("Conv", "Gemm", "MatMul")]
    inputs, outputs = [node.inputs[0] for node in products], [node.outputs[0] for node in products]
    wanted = whole(model, data, [str(v.name) for v in (*inputs, *outputs) if v is not None])
    stream = Stream(model, data, outputs)
    stream.plan([v for v in inputs if v is not None])
    for read, made in zip(inputs, outputs, strict=True):
        assert read is not None
        assert same(stream.take(read), wanted[str(read.name)]), read.name
        stream.put(made, wanted[str(made.name)])
    assert stream.nbytes == 0


# What is held after each step, worked out by hand: what a node that is still needed reads, and what is still taken.
HELD = [
    ("take", "x", "x"),  # a is put, but x is taken once more
    ("put", "a", "x a"),  # b is made of it
    ("take", "b", "x b"),  # for d, y and another take of b
    ("put", "c", "x b c"),  # c is read by d
    ("take", "e", "x b"),  # d and e have no other readers
    ("take", "b", "x b"),  # y reads it
    ("put", "f", "x b f"),
    ("take", "x", "b f"),
    ("take", "y", ""),
]


def test_nothing_is_held_that_is_not_needed() -> None:
    model, data = model_of(CHAIN), feeds()
    known, arrays = values(model), whole(model, data, list("xabcef"))
    each = sum(array.nbytes for array in arrays["x"])  # all tensors of this model are of one size
    stream = Stream(model, data, [known[name] for name in "acf"])
    assert stream.nbytes == each
    stream.plan([known[name] for step, name, _ in HELD if step == "take"])
    for step, name, held in HELD:
        if step == "take":
            stream.take(known[name])
        else:
            stream.put(known[name], arrays[name])
        assert stream.nbytes == each * len(held.split()), (step, name)


def test_what_nobody_will_take_is_not_held() -> None:
    model = model_of(CHAIN)
    stream = Stream(model, feeds(), [values(model)["a"]])
    stream.plan([])
    assert stream.nbytes == 0
    stream.put(values(model)["a"], [feed["x"] for feed in feeds()])
    assert stream.nbytes == 0


@pytest.mark.parametrize(("text", "first"), [(CHAIN, "b"), (CONSTANTS, "c"), (SEQUENCE, "b")], ids=["", "const", "seq"])
def test_fewer_samples_from_here_on(text: str, first: str) -> None:
    model, data = model_of(text), feeds(4)
    known, wanted = values(model), whole(model, data, ["y", "b"])
    stream = Stream(model, data, [])
    stream.plan([known[first], known["y"], known["b"]])
    stream.take(known[first])
    before = stream.nbytes
    stream.shorten(2)
    assert stream.nbytes <= before / 2 if text is not CONSTANTS else stream.nbytes < before
    assert same(stream.take(known["y"]), wanted["y"][:2])
    assert same(stream.take(known["b"]), wanted["b"][:2])


def test_inputs_that_need_not_be_fed() -> None:
    model = model_of("g (float[2,3] x, float k) => (float[2,3] y) <float k = {2}> { a = Relu(x) y = Mul(a, k) }")
    stream = Stream(model, feeds(), [])
    stream.plan([values(model)["a"], values(model)["y"]])
    a = stream.take(values(model)["a"])
    assert same(stream.take(values(model)["y"]), [2 * array for array in a])


def test_a_piece_that_does_not_run_is_refused() -> None:
    model = model_of("g (float[2,3] x) => (float[2,3] y) <int64[1] k = {5}> { a = Relu(x) y = Reshape(a, k) }")
    stream = Stream(model, feeds(), [])
    stream.plan([values(model)["y"]])
    with pytest.raises(RequantError, match=r"^g: the model fails: .*[Rr]eshape"):
        stream.take(values(model)["y"])
