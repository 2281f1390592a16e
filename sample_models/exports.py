"""Small models as exporters write them: the spellings of PyTorch, TensorFlow, Keras and PaddlePaddle, and old files.

`EXPORTS` holds the models by name. The tests run every transform and the commands on each of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Export:
    """A small model.

    Attributes:
        text: Its graph and functions, in ONNX's text form.
        weights: The shapes of its random weights, by name; they are initializers.
        opset: The version of the standard operators.
        ir: The IR version.
        change: What the text form cannot express; it edits the model in place.
    """

    text: str
    weights: Mapping[str, Shape] = field(default_factory=dict)
    opset: int = 17
    ir: int = 8
    change: Callable[[onnx.ModelProto], None] = lambda model: None

    def build(self) -> onnx.ModelProto:
        """Return the model."""
        imports = f'"" : {self.opset}, "com.microsoft" : 1, "blocks" : 1'
        model = onnx.parser.parse_model(f"<ir_version: {self.ir}, opset_import: [{imports}]>\n{self.text}")
        used = {node.domain for graph in (model.graph, *model.functions) for node in graph.node}
        kept = [each for each in model.opset_import if each.domain in {"", *used}]
        del model.opset_import[:]
        model.opset_import.extend(kept)
        for name, shape in self.weights.items():
            model.graph.initializer.append(numpy_helper.from_array(_weight(name, shape), name))
        self.change(model)
        return model


def _weight(name: str, shape: Shape) -> NDArray[np.float32]:
    """Draw a weight whose product keeps the variance, or a vector around 1."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    fan_in = math.prod(shape[1:]) if len(shape) == 4 else shape[-2] if len(shape) > 1 else 25
    values = random.standard_normal(shape) / math.sqrt(fan_in)
    return (values + (len(shape) == 1)).astype(np.float32)


def feed(model: onnx.ModelProto, seed: int = 0) -> dict[str, NDArray[np.generic]]:
    """Return random values of the inputs that are no initializers: floats of variance 1, integers in 0..7, True.

    An axis with a name has the length 2.
    """
    random = np.random.default_rng(seed)
    defaults = {tensor.name for tensor in model.graph.initializer}
    made: dict[str, NDArray[np.generic]] = {}
    for value in model.graph.input:
        if value.name in defaults:
            continue
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [axis.dim_value or 2 for axis in value.type.tensor_type.shape.dim]
        numbers = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 8, shape)
        made[value.name] = np.asarray(numbers).astype(dtype)
    return made


def list_initializers(model: onnx.ModelProto) -> None:
    """Make each initializer an input too, as IR version 3 requires and some exporters still do."""
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))


def _import_again(*imports: tuple[str, int]) -> Callable[[onnx.ModelProto], None]:
    """Return a change that imports operator sets once more; the last one counts."""

    def change(model: onnx.ModelProto) -> None:
        model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in imports)

    return change


def _forget_shape(model: onnx.ModelProto) -> None:
    """Remove the shape of the output."""
    model.graph.output[0].type.tensor_type.ClearField("shape")


def _forget_type(model: onnx.ModelProto) -> None:
    """Remove the type and the shape of the output."""
    model.graph.output[0].ClearField("type")


PADS = "<pads = [1, 1, 1, 1]>"
PLAIN, TURN = "<allowzero = 1>", "<perm = [0, 2, 1, 3]>"
PRODUCTS = {"up": (32, 64), "down": (64, 32)}
HEADS = {"query": (32, 32), "key": (32, 32), "value": (32, 32), "out": (32, 32)}
CONVS = {"w": (16, 8, 3, 3), "b": (16,), "v": (16, 16, 3, 3)}
TWO_CONVS = f"""g (float[N,8,16,16] x) => (float[N,16,16,16] y) {{
    c = Conv{PADS}(x, w, b)  r = Relu(c)  y = Conv{PADS}(r, v)
}}"""


def _resize(mode: str) -> str:
    """Return a model with a Resize to given lengths, with empty scales and an empty region."""
    return f"""g (float[1,8,16,16] x) => (float[1,16,32,32] y)
    <float[0] roi = {{}}, float[0] scales = {{}}, int64[4] sizes = {{1, 16, 32, 32}}> {{
        c = Conv{PADS}(x, w, b)  r = Relu(c)  u = Resize<mode = "{mode}">(r, roi, scales, sizes)  y = Conv{PADS}(u, v)
    }}"""


EXPORTS: dict[str, Export] = {
    # old files
    "listed-ir3": Export(text=TWO_CONVS, weights=CONVS, opset=8, ir=3, change=list_initializers),
    "listed-ir6": Export(text=TWO_CONVS, weights=CONVS, opset=11, ir=6, change=list_initializers),
    "listed-ir8": Export(text=TWO_CONVS, weights=CONVS, change=list_initializers),
    "resize-10": Export(
        text=f"""g (float[1,8,16,16] x) => (float[1,16,32,32] y) <float[4] scales = {{1, 1, 2, 2}}> {{
            c = Conv{PADS}(x, w, b)  r = Relu(c)  u = Resize<mode = "nearest">(r, scales)  y = Conv{PADS}(u, v)
        }}""",
        weights=CONVS,
        opset=10,
        ir=5,
    ),
    "resize-11": Export(text=_resize("nearest"), weights=CONVS, opset=11, ir=6),
    "resize-11-listed": Export(text=_resize("linear"), weights=CONVS, opset=11, ir=6, change=list_initializers),
    "resize-13-listed": Export(text=_resize("nearest"), weights=CONVS, opset=13, change=list_initializers),
    "imports-twice": Export(text=TWO_CONVS, weights=CONVS, change=_import_again(("", 17))),
    "imports-two-names": Export(text=TWO_CONVS, weights=CONVS, opset=11, ir=6, change=_import_again(("ai.onnx", 17))),
    "output-without-shape": Export(text=TWO_CONVS, weights=CONVS, change=_forget_shape),
    "output-without-type": Export(text=TWO_CONVS, weights=CONVS, opset=11, ir=6, change=_forget_type),
    # bounds: TensorFlow and Keras write Max and Min, older PyTorch a Max of two multiples
    "bounds": Export(
        text=f"""g (float[N,8,16,16] x) => (float[N,16,16,16] y) <float[1] low = {{-1}}, float high = {{3}}> {{
            c = Conv{PADS}(x, w, b)  s = LeakyRelu<alpha = 0.1>(c)  m = Max(low, s)  r = Min(m, high)
            d = Conv{PADS}(r, v)  y = Min(d, high)
        }}""",
        weights=CONVS,
    ),
    "leaky-max": Export(
        text=f"""g (float[N,8,16,16] x) => (float[N,16,16,16] y) <float[1] slope = {{0.2}}> {{
            c = Conv{PADS}(x, w, b)  m = Mul(slope, c)  r = Max(m, c)  y = Conv{PADS}(r, v)
        }}""",
        weights=CONVS,
    ),
    # hard-swish: PaddlePaddle with constants of shape (1,), PyTorch and Keras with a scalar
    "paddle-hard-swish": Export(
        text=f"""g (float[N,8,16,16] x) => (float[N,16,16,16] y)
        <float[1] three = {{3}}, float zero = {{0}}, float six = {{6}}, float[1] divisor = {{6}}> {{
            c = Conv{PADS}(x, w, b)  p = Add(c, three)  q = Clip(p, zero, six)  m = Mul(c, q)  r = Div(m, divisor)
            y = Conv{PADS}(r, v)
        }}""",
        weights=CONVS,
        opset=11,
        ir=6,
    ),
    "keras-hard-swish": Export(
        text=f"""g (float[N,8,16,16] x) => (float[N,16,16,16] y)
        <float three = {{3}}, float zero = {{0}}, float six = {{6}}, float sixth = {{0.16666667}}> {{
            c = Conv{PADS}(x, w, b)  p = Add(c, three)  l = Relu(p)  q = Min(l, six)  m = Mul(q, sixth)  r = Mul(c, m)
            y = Conv{PADS}(r, v)
        }}""",
        weights=CONVS,
    ),
    # PyTorch's exporter of the years 2024 to 2026: opset 18 to 24, operators of whole layers, functions
    "functions-18": Export(
        text="""g (float[N,8,32] x) => (float[N,8,32] y) {
            a = blocks.Linear(x, up)  b = blocks.Gelu(a)  y = blocks.Linear(b, down)
        }
        <domain: "blocks", opset_import: ["" : 18]> Linear (u, w) => (z) { z = MatMul(u, w) }
        <domain: "blocks", opset_import: ["" : 18]> Gelu (u) => (z) {
            half = Constant<value_float = 0.5>()  one = Constant<value_float = 1.0>()
            root = Constant<value_float = 1.4142135>()
            d = Div(u, root)  e = Erf(d)  f = Add(e, one)  g = Mul(u, f)  z = Mul(g, half)
        }""",
        weights=PRODUCTS,
        opset=18,
    ),
    "gelu-20": Export(
        text="g (float[N,8,32] x) => (float[N,8,32] y) { a = MatMul(x, up)  b = Gelu(a)  y = MatMul(b, down) }",
        weights=PRODUCTS,
        opset=20,
        ir=9,
    ),
    "layer-norm-21": Export(
        text="""g (float[N,8,32] x) => (float[N,8,32] y) {
            n = LayerNormalization<axis = -1>(x, scale, shift)  a = MatMul(n, up)  r = Relu(a)  p = MatMul(r, down)
            y = Add(x, p)
        }""",
        weights={**PRODUCTS, "scale": (32,), "shift": (32,)},
        opset=21,
        ir=10,
    ),
    "hard-swish-22": Export(
        text=f"""g (float[N,8,16,16] x) => (float[N,16,16,16] y) {{
            c = Conv{PADS}(x, w, b)  r = HardSwish(c)  y = Conv{PADS}(r, v)
        }}""",
        weights=CONVS,
        opset=22,
        ir=10,
    ),
    "attention-23": Export(
        text="""g (float[N,8,32] x) => (float[N,8,32] y) {
            n = RMSNormalization<axis = -1>(x, scale)
            a = MatMul(n, query)  b = MatMul(n, key)  c = MatMul(n, value)
            t = Attention<q_num_heads = 4, kv_num_heads = 4, is_causal = 1>(a, b, c)  p = MatMul(t, out)  y = Add(x, p)
        }""",
        weights={**HEADS, "scale": (32,)},
        opset=23,
        ir=10,
    ),
    "rotary-23": Export(
        text="""g (float[N,8,32] x, int64[N,8] places) => (float[N,8,32] y) {
            a = MatMul(x, query)  r = RotaryEmbedding<num_heads = 4>(a, cosines, sines, places)
            b = MatMul(x, key)  s = RotaryEmbedding<num_heads = 4>(b, cosines, sines, places)
            c = MatMul(x, value)  t = Attention<q_num_heads = 4, kv_num_heads = 4>(r, s, c)  y = MatMul(t, out)
        }""",
        weights={**HEADS, "cosines": (8, 4), "sines": (8, 4)},
        opset=23,
        ir=10,
    ),
    "attention-24": Export(
        text="""g (float[N,8,32] x) => (float[N,8,32] y) {
            a = MatMul(x, query)  b = MatMul(x, key)  c = MatMul(x, value)
            t = Attention<q_num_heads = 4, kv_num_heads = 4>(a, b, c)  p = MatMul(t, out)  y = Swish(p)
        }""",
        weights=HEADS,
        opset=24,
        ir=10,
    ),
    # PyTorch 2.13: attention with fixed lengths, with free ones, and by hand; a norm; a learned affine function
    "sdpa-fixed": Export(
        text=f"""g (float[1,12,32] x) => (float[1,12,32] y)
            <int64[4] apart = {{1, 12, -1, 8}}, int64[3] whole = {{1, 12, -1}}, int64[3] flat = {{-1, 12, 8}},
            int64[4] back = {{1, 4, 8, 12}}, float half = {{0.59460354}}> {{
            a = MatMul(x, query)  q0 = Add(a, left)  b = MatMul(x, key)  c = MatMul(x, value)  v0 = Add(c, right)
            q1 = Reshape{PLAIN}(q0, apart)  k1 = Reshape{PLAIN}(b, apart)  v1 = Reshape{PLAIN}(v0, apart)
            q2 = Transpose{TURN}(q1)  k2 = Transpose{TURN}(k1)  v = Transpose{TURN}(v1)
            k3 = Reshape(k2, flat)  k4 = Transpose<perm = [0, 2, 1]>(k3)  k5 = Reshape(k4, back)
            q = Mul(q2, half)  k = Mul(k5, half)  s = MatMul(q, k)  p = Softmax<axis = -1>(s)  o = MatMul(p, v)
            t = Transpose{TURN}(o)  r = Reshape{PLAIN}(t, whole)  u = MatMul(r, out)  w = Add(u, left)  y = Add(x, w)
        }}""",
        weights={**HEADS, "left": (32,), "right": (32,)},
        opset=18,
    ),
    "sdpa-free": Export(
        text=f"""g (float[batch,length,32] x, bool[batch,1,length,length] mask) => (float[batch,length,32] y)
            <int64[1] rest = {{-1}}, int64[1] eight = {{8}}, int64[1] last = {{-1}}, int64[1] before = {{-2}},
            int64[1] first = {{-9223372036854775808}}, float half = {{0.59460354}},
            float zero = {{0}}, float none = {{-inf}}> {{
            n = Shape<start = 0, end = 1>(x)  m = Shape<start = 1, end = 2>(x)
            apart = Concat<axis = 0>(n, m, rest, eight)  whole = Concat<axis = 0>(n, m, rest)
            a = MatMul(x, query)  b = MatMul(x, key)  c = MatMul(x, value)
            q1 = Reshape{PLAIN}(a, apart)  k1 = Reshape{PLAIN}(b, apart)  v1 = Reshape{PLAIN}(c, apart)
            q2 = Transpose{TURN}(q1)  k2 = Transpose{TURN}(k1)  v = Transpose{TURN}(v1)
            l = Shape(k2)  rows = Slice(l, before, last)  outer = Slice(l, first, before)
            flat = Concat<axis = 0>(rest, rows, eight)  back = Concat<axis = 0>(outer, eight, rows)
            k3 = Reshape(k2, flat)  k4 = Transpose<perm = [0, 2, 1]>(k3)  k5 = Reshape(k4, back)
            q = Mul(q2, half)  k = Mul(k5, half)  s = MatMul(q, k)  seen = Where(mask, zero, none)  e = Add(s, seen)
            p = Softmax<axis = -1>(e)  i = IsNaN(p)  g = Where(i, zero, p)  o = MatMul(g, v)
            t = Transpose{TURN}(o)  r = Reshape{PLAIN}(t, whole)  y = MatMul(r, out)
        }}""",
        weights=HEADS,
        opset=18,
    ),
    # torch.nn.MultiheadAttention: its function for attention, and where shares are returned too; older transformers
    "multi-head": Export(
        text="""g (float[1,12,32] x) => (float[1,12,32] y)
            <int64[5] apart = {1, 12, 1, 3, 32}, int64[1] three = {3}, int64 i = {0}, int64 j = {1}, int64 k = {2},
            int64[3] heads = {12, 4, 8}, int64[4] back = {1, 4, 12, 8}, int64[2] flat = {12, 32},
            int64[3] whole = {12, 1, 32}, float half = {0.59460354}> {
            r = Transpose<perm = [1, 0, 2]>(x)  a = MatMul(r, packed)  b = Add(left, a)  c = Reshape(b, apart)
            d = Transpose<perm = [3, 1, 2, 0, 4]>(c)  e = Squeeze(d, three)
            q0 = Gather(e, i)  k0 = Gather(e, j)  v0 = Gather(e, k)
            q1 = Reshape(q0, heads)  k1 = Reshape(k0, heads)  v1 = Reshape(v0, heads)
            q2 = Transpose<perm = [1, 0, 2]>(q1)  k2 = Transpose<perm = [1, 0, 2]>(k1)
            v2 = Transpose<perm = [1, 0, 2]>(v1)  q3 = Reshape(q2, back)  k3 = Reshape(k2, back)  v = Reshape(v2, back)
            k4 = Transpose<perm = [0, 1, 3, 2]>(k3)  q = Mul(q3, half)  kt = Mul(k4, half)  s = MatMul(q, kt)
            p = Softmax<axis = -1>(s)  o = MatMul(p, v)  t = Transpose<perm = [2, 0, 1, 3]>(o)  u = Reshape(t, flat)
            w = Gemm<transB = 1>(u, out, right)  z = Reshape(w, whole)  n = Transpose<perm = [1, 0, 2]>(z)
            y = Add(x, n)
        }""",
        weights={"packed": (32, 96), "left": (96,), "out": (32, 32), "right": (32,)},
    ),
    "multi-head-shares": Export(
        text="""g (float[N,12,32] x) => (float[N,12,32] y)
            <int64[3] heads = {12, -1, 8}, int64[2] flat = {-1, 32}, int64[3] whole = {12, -1, 32},
            float scale = {0.35355338}> {
            r = Transpose<perm = [1, 0, 2]>(x)  a = MatMul(r, query)  b = MatMul(r, key)  c = MatMul(r, value)
            q1 = Reshape(a, heads)  k1 = Reshape(b, heads)  v1 = Reshape(c, heads)
            q2 = Transpose<perm = [1, 0, 2]>(q1)  k2 = Transpose<perm = [1, 0, 2]>(k1)
            v = Transpose<perm = [1, 0, 2]>(v1)  q = Mul(q2, scale)  k = Transpose<perm = [0, 2, 1]>(k2)
            s = MatMul(q, k)  p = Softmax<axis = -1>(s)  o = MatMul(p, v)  t = Transpose<perm = [1, 0, 2]>(o)
            u = Reshape(t, flat)  w = MatMul(u, out)  z = Reshape(w, whole)  n = Transpose<perm = [1, 0, 2]>(z)
            y = Add(x, n)
        }""",
        weights=HEADS,
    ),
    "merged-heads": Export(
        text=f"""g (float[N,12,32] x, float[N,1,12,12] mask) => (float[N,12,32] y)
            <int64[4] apart = {{-1, 12, 4, 8}}, int64[3] flat = {{-1, 12, 8}}, int64[4] scores = {{-1, 4, 12, 12}},
            int64[3] back = {{-1, 12, 12}}, int64[4] split = {{-1, 4, 12, 8}}, int64[3] whole = {{-1, 12, 32}},
            float scale = {{0.35355338}}> {{
            a = MatMul(x, query)  a2 = Mul(a, scale)  b = MatMul(x, key)  c = MatMul(x, value)
            q1 = Reshape(a2, apart)  k1 = Reshape(b, apart)  v1 = Reshape(c, apart)
            q2 = Transpose{TURN}(q1)  k2 = Transpose{TURN}(k1)  v2 = Transpose{TURN}(v1)
            q = Reshape(q2, flat)  k3 = Reshape(k2, flat)  v = Reshape(v2, flat)  k = Transpose<perm = [0, 2, 1]>(k3)
            s = MatMul(q, k)  s4 = Reshape(s, scores)  m = Add(s4, mask)  s3 = Reshape(m, back)
            p = Softmax<axis = -1>(s3)  o = MatMul(p, v)  o4 = Reshape(o, split)  t = Transpose{TURN}(o4)
            r = Reshape(t, whole)  y = MatMul(r, out)
        }}""",
        weights=HEADS,
    ),
    "masked-fill": Export(
        text=f"""g (float[N,8,32] x, int64[N,1,1,8] mask) => (float[N,8,32] y)
            <int64[4] apart = {{0, 0, 4, 8}}, int64[3] whole = {{0, 0, 32}}, float root = {{2.828427}},
            int64 none = {{0}}, float low = {{-3.4e38}}, float zero = {{0}}> {{
            a = MatMul(x, query)  b = MatMul(x, key)  c = MatMul(x, value)
            q1 = Reshape(a, apart)  k1 = Reshape(b, apart)  v1 = Reshape(c, apart)
            q = Transpose{TURN}(q1)  k = Transpose<perm = [0, 2, 3, 1]>(k1)  v = Transpose{TURN}(v1)
            s = MatMul(q, k)  d = Div(s, root)  m = Equal(mask, none)  f = Where(m, low, d)
            p = Softmax<axis = -1>(f)  g = Where(m, zero, p)  o = MatMul(g, v)
            t = Transpose{TURN}(o)  r = Reshape(t, whole)  y = MatMul(r, out)
        }}""",
        weights=HEADS,
    ),
    "disentangled": Export(
        text=f"""g (float[N,6,32] x, bool[N,1,6,6] mask, int64[1,6,6] places) => (float[N,6,32] y)
            <int64[4] apart = {{0, 0, 4, 8}}, int64[3] flat = {{-1, 6, 8}}, int64[4] scores = {{-1, 4, 6, 6}},
            int64[3] back = {{-1, 6, 6}}, int64[4] split = {{-1, 4, 6, 8}}, int64[3] whole = {{0, 0, 32}},
            float root = {{4.898979}}, float low = {{-3.4e38}}, int64[1] zero = {{0}}, int64[1] four = {{4}},
            int64[2] rest = {{6, 6}}, int64[2] once = {{1, 1}}> {{
            a = MatMul(x, query)  b = MatMul(x, key)  c = MatMul(x, value)
            q1 = Reshape(a, apart)  k1 = Reshape(b, apart)  v1 = Reshape(c, apart)
            q2 = Transpose{TURN}(q1)  k2 = Transpose{TURN}(k1)  v2 = Transpose{TURN}(v1)
            q = Reshape(q2, flat)  k = Reshape(k2, flat)  v = Reshape(v2, flat)
            kt = Transpose<perm = [0, 2, 1]>(k)  kd = Div(kt, root)  s = MatMul(q, kd)
            l = Shape(x)  n = Gather(l, zero)  h = Mul(n, four)  te = Concat<axis = 0>(h, rest)
            e = Expand(places, te)  tt = Concat<axis = 0>(n, once)  pk = Tile(keys, tt)  pq = Tile(queries, tt)
            pkt = Transpose<perm = [0, 2, 1]>(pk)  pqt = Transpose<perm = [0, 2, 1]>(pq)
            f = MatMul(q, pkt)  fg = GatherElements<axis = -1>(f, e)  fd = Div(fg, root)
            i = MatMul(k, pqt)  ig = GatherElements<axis = -1>(i, e)  it = Transpose<perm = [0, 2, 1]>(ig)
            id = Div(it, root)  r = Add(fd, id)  m = Add(s, r)  m4 = Reshape(m, scores)  hidden = Not(mask)
            w = Where(hidden, low, m4)
            p4 = Softmax<axis = -1>(w)  p = Reshape(p4, back)  o = MatMul(p, v)  o4 = Reshape(o, split)
            t = Transpose{TURN}(o4)  z = Reshape(t, whole)  y = MatMul(z, out)
        }}""",
        weights={**HEADS, "keys": (4, 8, 8), "queries": (4, 8, 8)},
    ),
    "rms-norm-in-parts": Export(
        text="""g (float[N,8,32] x) => (float[N,8,32] y) <float two = {2}, float small = {1e-6}, int64[1] last = {-1}> {
            e = Pow(x, two)  m = ReduceMean(e, last)  a = Add(m, small)  r = Sqrt(a)  i = Reciprocal(r)  n = Mul(x, i)
            g = Mul(gain, n)  u = MatMul(g, up)  v = Sigmoid(u)  w = Mul(u, v)  d = MatMul(w, down)  y = Add(x, d)
        }""",
        weights={**PRODUCTS, "gain": (32,)},
        opset=18,
    ),
    "learned-affine": Export(
        text=f"""g (float[N,8,16,16] x) => (float[N,16,16,16] y) <float[1] scale = {{0.7}}, float[1] shift = {{-0.3}}>
            {{ c = Conv{PADS}(x, w, b)  r = Relu(c)  s = Mul(scale, r)  t = Add(s, shift)  y = Conv{PADS}(t, v) }}""",
        weights=CONVS,
    ),
}
"""The models by name."""
