"""Float16 models in float32: the same results within float16's rounding, in every kind of tensor, and nothing held twice."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from requant.transforms import REGISTRY, Change, run, signature, verify
from requant.transforms.graphs.rewriter import LARGE

widen_floats = REGISTRY["widen_floats"]

U16 = float(np.finfo(np.float16).eps) / 2
HALF = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
HEADER = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1, "my.domain" : 1]>\n'

ONES = "float16[1] {15360}"  # the text form holds the bits of a float16: 15360 is 1, 16384 is 2, 16896 is 3
EXACT = {
    "if": f"""g (float16[2,3] x, bool c) => (float16[2,3] y) {{
        y = If (c) <then_branch = t () => (float16[2,3] a) {{ k = Constant <value = {ONES}> ()  a = Add (x, k) }},
                    else_branch = e () => (float16[2,3] a) {{ a = Neg (x) }}>
    }}""",
    "loop": f"""g (float16[2,3] x, bool c) => (float16[2,3] y, float16[S,2,3] steps) <int64 three = {{3}}> {{
        y, steps = Loop (three, c, x) <body = b (int64 i, bool go, float16[2,3] state) => (bool next, float16[2,3] sum, float16[2,3] each) {{
            next = Identity (go)
            k = Constant <value = {ONES}> ()
            sum = Add (state, k)
            each = Add (sum, x)
        }}>
    }}""",
    "loop-passes-state-through": """g (float16[2,3] x, bool c) => (float16[2,3] y) <int64 two = {2}> {
        y = Loop (two, c, x) <body = b (int64 i, bool go, float16[2,3] state) => (bool go, float16[2,3] state) { k = Add (state, x) }>
    }""",
    "sequence": """g (float16[2,3] x, bool c) => (float16[2,3] y) <int64 zero = {0}> {
        e = SequenceEmpty <dtype = 10> ()
        s = SequenceInsert (e, x)
        y = SequenceAt (s, zero)
    }""",
    "optional": """g (float16[2,3] x, bool c) => (float16[2,3] y, bool there) {
        o = Optional <type = float16[2,3]> ()
        there = OptionalHasElement (o)
        p = Optional (x)
        y = OptionalGetElement (p)
    }""",
    "cast-chain": """g (float16[2,3] x, bool c) => (float16[2,3] y, float[2,3] wide, int64[2,3] whole, float16[2,3] again) {
        wide = Cast <to = 1> (x)
        short = Cast <to = 10> (wide)
        t = Add (short, x)
        double = Cast <to = 11> (t)
        back = Cast <to = 10> (double)
        whole = Cast <to = 7> (back)
        like = CastLike (whole, x)
        y = Add (back, like)
        again = Cast <to = 10> (wide)
    }""",
    "output-read-inside": """g (float16[2,3] x, bool c) => (float16[2,3] y, float16[2,3] z, float16[2,3] copy) {
        y = Add (x, x)
        z = Mul (y, x)
        copy = Identity (x)
    }""",
    "weight-is-output": f"""g (float16[2,3] x, bool c) => (float16[2,3] y, float16[1] w, float16[1] k) <float16[1] w = {{16384}}> {{
        k = Constant <value = {ONES}> ()
        t = Mul (x, w)
        y = Add (t, k)
    }}""",
    "weight-is-input": """g (float16[2,3] x, bool c, float16[1] w) => (float16[2,3] y) <float16[1] w = {16384}> { y = Mul (x, w) }""",
    "float32-beside": """g (float16[2,3] x, bool c) => (float16[2,3] y) <float[1] k = {2}> {
        wide = Cast <to = 1> (x)
        t = Mul (wide, k)
        y = Cast <to = 10> (t)
    }""",
    "microsoft": """g (float16[2,3] x, bool c) => (float16[2,3] y) <float16[2,3] w = {15360, 16384, 16896, 16384, 15360, 16384}> {
        t = com.microsoft.FusedMatMul <transB = 1, alpha = 2.0> (x, w)
        s = Relu (t)
        y = com.microsoft.FusedMatMul (s, w)
    }""",
    "quantized": """g (float16[2,3] x, bool c) => (float16[2,3] y) <float16 s = {15360}, int8 z = {0}> {
        q = QuantizeLinear (x, s, z)
        y = DequantizeLinear (q, s, z)
    }""",
}


def model(text: str) -> ir.Model:
    return ir.from_onnx_text(HEADER + text)


def results(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(result) for result in session.run(None, feeds)]


def short_values(model: ir.Model) -> set[str]:
    """Return the names of all values that are known to be short floats."""
    values = [
        v for g in model.graphs() for v in [*g.inputs, *g.initializers.values(), *(o for n in g for o in n.outputs)]
    ]
    return {str(value.name) for value in values if value.dtype in HALF}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("c", [True, False])
def test_whole_numbers_come_out_the_same(name: str, c: bool) -> None:
    before = model(EXACT[name])
    after = run("widen_floats", before).model
    feeds = {"x": np.array([[1, -2, 3], [0, 5, -6]], np.float16), "c": np.array(c)}
    feeds = {key: feed for key, feed in feeds.items() if key in {value.name for value in before.graph.inputs}}
    assert signature(after) == signature(before)
    for found, expected in zip(results(after, feeds), results(before, feeds), strict=True):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    ports = {str(value.name) for value in (*after.graph.inputs, *after.graph.outputs)}
    assert short_values(after) <= ports
    assert widen_floats(after) == Change()


def test_casts_that_change_nothing_any_more_are_removed() -> None:
    after = run("widen_floats", model(EXACT["cast-chain"])).model
    casts = {
        node.outputs[0].name: node.inputs[0].name for node in after.graph if node.op_type == "Cast" and node.inputs[0]
    }
    assert casts == {
        "x_float": "x",
        "wide": "x",
        "double": "t",  # float64 in between goes on cutting nothing off, but is not a short float
        "back": "double",
        "whole": "back",
        "y": "y_float",
        "again": "wide",
    }


RUN_ONLY_AFTERWARDS = {
    "EyeLike": ("{ y = EyeLike <dtype = 10> (wide)  wide = Cast <to = 1> (x) }", [[1, 0, 0], [0, 1, 0]]),
    "HannWindow": (
        """<int64 n = {3}> {
            w = HannWindow <output_datatype = 10, periodic = 0> (n)
            zeros = Sub (x, x)
            y = Add (zeros, w)
        }""",
        [[0, 1, 0], [0, 1, 0]],
    ),
    "RandomNormal": (
        "{ r = RandomNormal <dtype = 10, shape = [2, 3]> ()  n = Sub (r, r)  y = Add (n, x) }",
        [[1, -2, 3], [0, 5, -6]],
    ),
    "RandomUniformLike": (
        "{ r = RandomUniformLike <dtype = 10> (x)  n = Sub (r, r)  y = Add (n, x) }",
        [[1, -2, 3], [0, 5, -6]],
    ),
    "Multinomial": (
        """<int64[2] shape = {2, 3}> {
            m = Multinomial <sample_size = 3> (x)
            n = Sub (m, m)
            f = Cast <to = 10> (n)
            y = Add (f, x)
        }""",
        [[1, -2, 3], [0, 5, -6]],
    ),
}


@pytest.mark.parametrize("name", RUN_ONLY_AFTERWARDS)
def test_data_types_in_attributes_are_widened(name: str) -> None:
    text, expected = RUN_ONLY_AFTERWARDS[name]
    before = model("g (float16[2,3] x) => (float16[2,3] y) " + text)
    if name == "EyeLike":
        before.graph.sort()
    after = run("widen_floats", before).model
    (found,) = results(after, {"x": np.array([[1, -2, 3], [0, 5, -6]], np.float16)})
    assert found.dtype == np.float16
    assert np.array_equal(found, np.array(expected))


def test_bfloat16_is_widened_too() -> None:
    before = model("""g (float[2,2] x) => (float[2,2] y) {
        short = Cast <to = 16> (x)
        w = Constant <value = bfloat16[2,2] {16256, 16384, 16448, 16512}> ()
        t = MatMul (short, w)
        y = Cast <to = 1> (t)
    }""")
    after = run("widen_floats", before).model
    assert [node.op_type for node in after.graph] == ["Constant", "MatMul"]
    (found,) = results(after, {"x": np.array([[1, 2], [3, 4]], np.float32)})
    assert np.array_equal(found, np.array([[7, 10], [15, 22]]))  # the weights are 1, 2, 3 and 4


def with_weights(text: str, dtype: ir.DataType, weights: dict[str, np.ndarray]) -> ir.Model:
    """Parse a graph whose types are written T, and give it weights in the place of inputs of their names."""
    made = model(text.replace("T[", {ir.DataType.FLOAT16: "float16[", ir.DataType.FLOAT: "float["}[dtype]))
    for value in [value for value in made.graph.inputs if value.name in weights]:
        made.graph.inputs.remove(value)
        value.const_value = ir.Tensor(weights[str(value.name)].astype(dtype.numpy()), name=value.name)
        value.shape = ir.Shape(value.const_value.shape.numpy())
        made.graph.register_initializer(value)
    return made


CONVOLUTIONS = """g (T[2,3,6,6] x, T[4,3,3,3] w1, T[4] b1, T[4,1,3,3] w2, T[5,4] w3, T[5] b3) => (T[2,5] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    b = Relu (a)
    c = Conv <group = 4, pads = [1, 1, 1, 1]> (b, w2)
    d = Add (b, c)
    e = GlobalAveragePool (d)
    f = Flatten (e)
    y = Gemm <transB = 1> (f, w3, b3)
}"""
TRANSFORMER = """g (T[2,5,8] x, T[8] scale, T[8] shift, T[8,8] wq, T[8,8] wk, T[8,8] wv) => (T[2,5,8] y) {
    n = LayerNormalization (x, scale, shift)
    q = MatMul (n, wq)
    k = MatMul (n, wk)
    v = MatMul (n, wv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, kt)
    p = Softmax <axis = -1> (s)
    c = MatMul (p, v)
    g = Gelu (c)
    y = Add (x, g)
}"""


def random_weights(text: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return float16 numbers for every input of a graph, the first of which is x."""
    random = np.random.default_rng(seed)
    inputs = model(text.replace("T[", "float16[")).graph.inputs
    return {
        str(v.name): random.normal(0, 0.5, v.shape.numpy()).astype(np.float16) for v in inputs if v.shape is not None
    }


@pytest.mark.parametrize("text", [CONVOLUTIONS, TRANSFORMER], ids=["convolutions", "transformer"])
def test_result_is_the_float32_network_of_the_same_weights(text: str) -> None:
    numbers = random_weights(text)
    x = numbers.pop("x")
    after = run("widen_floats", with_weights(text, ir.DataType.FLOAT16, numbers)).model
    (expected,) = results(with_weights(text, ir.DataType.FLOAT, numbers), {"x": x.astype(np.float32)})
    (found,) = results(after, {"x": x})
    assert np.array_equal(found, expected.astype(np.float16))


def test_result_is_within_the_rounding_of_the_original() -> None:
    numbers = random_weights(CONVOLUTIONS)
    x = numbers.pop("x")
    before = with_weights(CONVOLUTIONS, ir.DataType.FLOAT16, numbers)
    (found,) = results(run("widen_floats", before).model, {"x": x})
    (expected,) = results(before, {"x": x})
    # Each operator rounds, and each sum of n terms does so n times at most; what rounds is below the network of
    # absolute values. The sums have 27 + 1, 9, 1, 36 and 4 + 1 terms; Cast and the outputs round once more each.
    largest = {name: np.abs(array) for name, array in numbers.items()}
    (terms,) = results(with_weights(CONVOLUTIONS, ir.DataType.FLOAT, largest), {"x": np.abs(x).astype(np.float32)})
    bound = ((1 + U16) ** (28 + 9 + 1 + 36 + 5 + 5) - 1) * terms
    assert np.all(np.abs(found.astype(np.float64) - expected) <= bound)


class Counting:
    """A large float16 weight that counts how often it is computed."""

    def __init__(self) -> None:
        self.reads = 0
        self.length = LARGE // 2 + 1

    def tensor(self) -> ir.LazyTensor:
        return ir.LazyTensor(self.read, ir.DataType.FLOAT16, ir.Shape([self.length]), name="w")

    def read(self) -> ir.Tensor:  # type: ignore[type-arg]
        self.reads += 1
        return ir.Tensor(np.full(self.length, 1.5, np.float16), name="w")


def test_large_weights_are_not_computed_before_they_are_read() -> None:
    weight = Counting()
    made = model(
        f"g (float16[{weight.length}] x, float16[{weight.length}] w) => (float16[{weight.length}] y) {{ y = Add (x, w) }}"
    )
    value = made.graph.inputs.pop()
    value.const_value = weight.tensor()
    made.graph.register_initializer(value)
    widen_floats(made)
    assert weight.reads == 0
    wide = made.graph.initializers["w"].const_value
    assert wide is not None
    assert (wide.dtype, wide.nbytes) == (ir.DataType.FLOAT, 4 * weight.length)
    assert np.array_equal(wide.numpy(), np.full(weight.length, 1.5, np.float32))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("g (seq(float16[N]) x) => (float16[N] y) <int64 i = {0}> { y = SequenceAt (x, i) }", "port-not-a-tensor"),
        ("g (float16[N] x) => (float16[N] y) { t = my.domain.A (x)  y = my.domain.B (t) }", "type-unknown"),
        (
            "g (float16[N] x) => (float16[N] y) <seq(float16[N]) s> { s = SequenceConstruct (x)  y = my.domain.B (s) }",
            "foreign-sequence",
        ),
    ],
    ids=["sequence-in", "unknown-type", "sequence-to-unknown-operator"],
)
def test_models_that_stay(text: str, reason: str) -> None:
    made = model(text)
    before = ir.to_onnx_text(made)
    assert widen_floats(made) == Change(skipped={reason: 1})  # type: ignore[arg-type]
    assert ir.to_onnx_text(made) == before


def test_functions_are_inlined_first() -> None:
    made = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 21, "f" : 1]> g (float16[N] x) => (float16[N] y) { y = f.F (x) }
        <domain: "f", opset_import: ["" : 21]> F (a) => (b) { b = Relu (a) }"""
    )
    assert widen_floats(made).skipped == {"functions": 1}
    assert [step.change.applied > 0 for step in run("inline_functions widen_floats", made).applied] == [True, True]


def test_operators_of_unknown_domains_read_and_give_what_they_did() -> None:
    made = model("""g (float16[N] x, float16[N] z) => (float16[N] y)
        <float16[1] w = {15360}, float16[1] own = {15360}> {
        a = Mul (x, w)
        t = my.domain.Norm (a, w, own, z)
        b = Add (t, a)
        y = Mul (b, z)
    }""")
    foreign = made.graph[1]
    foreign.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
    widen_floats(made)
    verify(made)
    assert [value.dtype for value in (*foreign.inputs, *foreign.outputs) if value] == [ir.DataType.FLOAT16] * 5
    assert made.graph.initializers["own"].dtype == ir.DataType.FLOAT16  # nobody else reads it
    assert [value.dtype for value in (made.graph.initializers["w"],)] == [ir.DataType.FLOAT]
    assert widen_floats(made) == Change()


def test_float32_models_of_any_kind_stay_as_they_are() -> None:
    made = model("g (float[N] x) => (float[N] y) { t = my.domain.A (x)  c = Cast <to = 1> (t)  y = my.domain.B (c) }")
    assert widen_floats(made) == Change()
