"""Random graphs of operators from the table: the INT8 model is always valid, and as accurate as eight bits allow."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from requant import RequantError
from requant.calibration.model.session import Array
from requant.quantize import Options, Result, Selection, Strategy, quantize_model
from requant.quantize.options.declared import FORMATS
from requant.quantize.runtime.session import Runner
from requant.transforms.int8.ops import OPS
from requant.transforms.int8.qparams import Scheme

Feed = dict[str, Array]
Allowed = Callable[..., dict[str, float]]
Shape = tuple[int, ...]
Draw = Callable[[st.SearchStrategy[Any]], Any]

OPSET = 21
SAMPLES = 3
LARGEST = 4096  # the largest number of values of a tensor
LONGEST = 64  # the largest length of an axis
LEAST, MOST = 3, 15  # the largest number of operators of a graph


@dataclass(frozen=True)
class Tensor:
    """A float tensor of the generated graph."""

    name: str
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass
class Graph:
    """A generated graph: nodes, constants, and the tensors that further nodes may read."""

    random: np.random.Generator
    draw: Draw
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    @property
    def operators(self) -> int:
        return sum(node.op_type != "Constant" for node in self.nodes)

    def one_of(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def number(self, least: int, most: int) -> int:
        return int(self.draw(st.integers(least, most)))

    def chance(self) -> bool:
        return bool(self.draw(st.booleans()))

    def add(self, op: str, inputs: list[str], shape: Shape, domain: str = "", **attributes: Any) -> Tensor:
        """Append a node with one output."""
        return self.add_split(op, inputs, [shape], domain, **attributes)[0]

    def add_split(
        self, op: str, inputs: list[str], shapes: list[Shape], domain: str = "", **attributes: Any
    ) -> list[Tensor]:
        """Append a node; its outputs become readable."""
        made = [Tensor(f"t{len(self.nodes)}" + "'" * k, tuple(shape)) for k, shape in enumerate(shapes)]
        name = "" if self.number(0, 7) == 0 else f"/{op.lower()}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [t.name for t in made], name=name, domain=domain, **attributes))
        self.tensors.extend(made)
        return made

    def scalar(self, value: float) -> str:
        return self.constant(np.asarray(value, np.float32))

    def constant(self, array: Array) -> str:
        """Return the name of a constant. Sometimes it is an existing constant, or a Constant node."""
        if self.number(0, 3) == 0:
            for name, other in self.constants.items():
                if other.shape == array.shape and other.dtype == array.dtype == np.float32 and other.ndim > 1:
                    return name
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        if self.number(0, 5) == 0:
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        return name

    def normal(self, *shape: int, scale: float = 1.0, about: float = 0.0) -> str:
        """Return the name of a constant with normally distributed values."""
        return self.constant((about + scale * self.random.standard_normal(shape)).astype(np.float32))

    def weights(self, *shape: int, terms: int) -> str:
        """Return the name of weights that keep the variance if a result is a sum of `terms` products.

        Sometimes the weights are integers that a DequantizeLinear reads.
        """
        if self.number(0, 15) != 7:
            return self.normal(*shape, scale=terms**-0.5)
        stored = self.constant(self.random.integers(-127, 128, shape).astype(np.int8))
        read = [stored, self.scalar(terms**-0.5 / 42), self.constant(np.zeros((), np.int8))]
        name = f"{stored}/float"
        self.nodes.append(helper.make_node("DequantizeLinear", read, [name]))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))


Builder = Callable[[Graph, Tensor], Tensor | list[Tensor] | None]


def window(g: Graph, x: Tensor, *, dilated: bool) -> tuple[list[int], list[int], list[int], list[int]] | None:
    """Draw kernel, strides, dilations and pads (begins, ends) that fit the spatial axes of `x`."""
    space = x.shape[2:]
    kernel = [g.number(1, min(3, n)) for n in space]
    dilations = [g.number(1, 2) if dilated and 2 * (k - 1) + 1 <= n else 1 for k, n in zip(kernel, space, strict=True)]
    strides = [g.number(1, 2) for _ in space]
    pads = [g.number(0, k - 1) for k in kernel * 2]
    return kernel, strides, dilations, pads


def slid(space: Shape, kernel: list[int], strides: list[int], dilations: list[int], pads: list[int]) -> Shape:
    """Return the spatial shape of the result of a window without ceil_mode."""
    count = len(space)
    return tuple(
        (space[i] + pads[i] + pads[count + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1
        for i in range(count)
    )


def conv(g: Graph, x: Tensor) -> Tensor | None:
    if x.rank < 3:
        return None
    channels = x.shape[1]
    kernel, strides, dilations, pads = window(g, x, dilated=True)  # type: ignore[misc]
    groups = [n for n in (1, 2, channels) if channels % n == 0]
    group = g.one_of(*groups)
    outputs = group * (g.number(1, 3) if group > 2 else g.one_of(4, 8, 12, g.number(1, 8)))
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": group}
    same = g.number(0, 3) == 0
    if same:
        attributes |= {"auto_pad": g.one_of("SAME_UPPER", "SAME_LOWER"), "dilations": [1] * len(kernel)}
        space = tuple(-(-n // s) for n, s in zip(x.shape[2:], strides, strict=True))
    elif g.number(0, 5) == 0:
        attributes |= {"auto_pad": "VALID"}
        space = slid(x.shape[2:], kernel, strides, dilations, [0] * (2 * len(kernel)))
    else:
        attributes |= {"pads": pads}
        space = slid(x.shape[2:], kernel, strides, dilations, pads)
    terms = channels // group * math.prod(kernel)
    inputs = [x.name, g.weights(outputs, channels // group, *kernel, terms=terms)]
    if g.chance():
        inputs.append(g.normal(outputs, scale=0.3))
    return g.add("Conv", inputs, (x.shape[0], outputs, *space), **attributes)


def conv_transpose(g: Graph, x: Tensor) -> Tensor | None:
    if x.rank not in (3, 4):
        return None
    channels = x.shape[1]
    kernel = [g.number(1, 3) for _ in x.shape[2:]]
    strides = [g.number(1, 2) for _ in kernel]
    outputs = g.number(1, 6)
    space = tuple((n - 1) * s + k for n, s, k in zip(x.shape[2:], strides, kernel, strict=True))
    inputs = [x.name, g.weights(channels, outputs, *kernel, terms=channels * math.prod(kernel))]
    if g.chance():
        inputs.append(g.normal(outputs, scale=0.3))
    return g.add("ConvTranspose", inputs, (x.shape[0], outputs, *space), kernel_shape=kernel, strides=strides)


def gemm(g: Graph, x: Tensor) -> Tensor | None:
    if x.rank != 2:
        return None
    turned, stored = g.number(0, 4) == 0, g.number(0, 1)
    rows, terms = (x.shape[1], x.shape[0]) if turned else x.shape
    outputs = g.number(1, 16)
    shape = (outputs, terms) if stored else (terms, outputs)
    inputs = [x.name, g.weights(*shape, terms=terms)]
    bias = g.one_of((), None, (1,), (outputs,), (1, outputs), (rows, outputs), (rows, 1))
    if bias is not None:
        inputs.append(g.normal(*bias, scale=0.3))
    attributes = {"alpha": g.one_of(1.0, 1.0, 0.5), "beta": g.one_of(1.0, 1.0, 2.0), "transB": stored}
    return g.add("Gemm", inputs, (rows, outputs), transA=int(turned), **attributes)


def matmul(g: Graph, x: Tensor) -> Tensor | None:
    terms, outputs = x.shape[-1], g.number(1, 16)
    if x.rank > 2 and g.number(0, 2) == 0:  # a stack of matrices, one for each index of the last batch axis
        weight = g.weights(x.shape[-3], terms, outputs, terms=terms)
    elif g.number(0, 5) == 0:  # a vector
        return g.add("MatMul", [x.name, g.weights(terms, terms=terms)], x.shape[:-1])
    elif g.number(0, 5) == 0 and x.rank == 2:  # constant on the left
        left = g.weights(outputs, x.shape[0], terms=x.shape[0])
        return g.add("MatMul", [left, x.name], (outputs, x.shape[1]))
    else:
        weight = g.weights(terms, outputs, terms=terms)
    y = g.add("MatMul", [x.name, weight], (*x.shape[:-1], outputs))
    return g.add("Add", [y.name, g.normal(outputs, scale=0.3)], y.shape) if g.chance() else y


def products(g: Graph, x: Tensor) -> Tensor | None:
    """Multiply two activations."""
    turned = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
    other = g.add("Transpose", [x.name], tuple(x.shape[i] for i in turned), perm=turned)
    scaled = g.add("Mul", [x.name, g.scalar(x.shape[-1] ** -0.5)], x.shape)
    return g.add("MatMul", [scaled.name, other.name], (*x.shape[:-1], x.shape[-2]))


def einsum(g: Graph, x: Tensor) -> Tensor | None:
    if x.rank != 3:
        return None
    outputs = g.number(1, 8)
    weight = g.weights(outputs, x.shape[2], terms=x.shape[2])
    return g.add("Einsum", [x.name, weight], (*x.shape[:2], outputs), equation="bik,jk->bij")


def recurrent(op: str, gates: int) -> Builder:
    def build(g: Graph, x: Tensor) -> Tensor | list[Tensor] | None:
        if x.rank != 3:
            return None
        steps, batch, width = x.shape
        hidden = g.number(1, 8)
        directions = g.number(1, 2) if op == "LSTM" else 1
        inputs = [
            x.name,
            g.weights(directions, gates * hidden, width, terms=width),
            g.weights(directions, gates * hidden, hidden, terms=hidden),
        ]
        if g.chance():
            inputs.append(g.normal(directions, 2 * gates * hidden, scale=0.3))
        direction = "bidirectional" if directions == 2 else g.one_of("forward", "reverse")
        shapes = [(steps, directions, batch, hidden), (directions, batch, hidden)][: g.number(1, 2)]
        return g.add_split(op, inputs, shapes, hidden_size=hidden, direction=direction)

    return build


def with_other(op: str) -> Builder:
    """Append an operator with two operands; the second one is a tensor that broadcasts, or a constant."""

    def build(g: Graph, x: Tensor) -> Tensor | None:
        fitting = [t for t in g.tensors if t.shape and broadcasts(x.shape, t.shape)]
        about = 3.0 if op == "Div" else 0.0  # away from zero
        kind = g.number(0, 3)
        if kind < 2 and op != "Div":
            other = g.one_of(*fitting)
            name, shape = other.name, np.broadcast_shapes(x.shape, other.shape)
        elif kind == 2:
            name, shape = g.normal(*x.shape[-1:], scale=0.5, about=about), x.shape
        else:
            name, shape = g.scalar(g.one_of(0.5, 1.5, -2.0, 3.0)), x.shape
        if math.prod(shape) > LARGEST:
            return None
        inputs = [x.name, name] if op == "Div" or g.chance() else [name, x.name]
        return g.add(op, inputs, tuple(map(int, shape)))

    return build


def broadcasts(one: Shape, other: Shape) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(one[::-1], other[::-1], strict=False))


def several(op: str) -> Builder:
    """Append a Sum, Max or Min of one to three tensors of the same shape."""

    def build(g: Graph, x: Tensor) -> Tensor:
        alike = [t for t in g.tensors if t.shape == x.shape]
        return g.add(op, [x.name, *(g.one_of(*alike).name for _ in range(g.number(0, 2)))], x.shape)

    return build


def concat(g: Graph, x: Tensor) -> Tensor | None:
    axis = g.number(0, x.rank - 1)
    alike = [t for t in g.tensors if t.rank == x.rank and cut(t.shape, axis) == cut(x.shape, axis)]
    parts = [x, *(g.one_of(*alike) for _ in range(g.number(0, 2)))]
    names, length = [t.name for t in parts], sum(t.shape[axis] for t in parts)
    if g.number(0, 4) == 0:
        names.append(g.normal(*x.shape[:axis], 1, *x.shape[axis + 1 :]))
        length += 1
    if length > 24:
        return None
    return g.add("Concat", names, (*x.shape[:axis], length, *x.shape[axis + 1 :]), axis=axis - g.one_of(0, x.rank))


def cut(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def split(g: Graph, x: Tensor) -> list[Tensor] | None:
    axis = g.number(0, x.rank - 1)
    length = x.shape[axis]
    if length < 2:
        return None
    first = g.number(1, length - 1)
    parts = [first, length - first]
    if g.chance() and length % 2 == 0:
        shapes = [(*x.shape[:axis], length // 2, *x.shape[axis + 1 :])] * 2
        return g.add_split("Split", [x.name], shapes, axis=axis, num_outputs=2)
    shapes = [(*x.shape[:axis], n, *x.shape[axis + 1 :]) for n in parts]
    return g.add_split("Split", [x.name, g.ints(*parts)], shapes, axis=axis)


def slice_(g: Graph, x: Tensor) -> Tensor | None:
    axis = g.number(0, x.rank - 1)
    length = x.shape[axis]
    step = g.one_of(1, 1, 2, -1)
    start = g.number(0, length - 1)
    end = g.number(start + 1, length)
    kept = range(start, end, step) if step > 0 else range(end - 1, start - 1, step)
    low, high = (start, end) if step > 0 else (end - 1, start - 1 if start else -length - 1)
    inputs = [x.name, g.ints(low), g.ints(high), g.ints(axis), g.ints(step)]
    return g.add("Slice", inputs, (*x.shape[:axis], len(kept), *x.shape[axis + 1 :]))


def gather(g: Graph, x: Tensor) -> Tensor | None:
    axis = g.number(0, x.rank - 1)
    shape = g.one_of((), (3,), (2, 2)) if x.rank > 2 else (3,)
    if x.rank + len(shape) - 1 > 5:
        return None
    indices = g.random.integers(-x.shape[axis], x.shape[axis], shape)
    shape = (*x.shape[:axis], *shape, *x.shape[axis + 1 :])
    return g.add("Gather", [x.name, g.constant(np.asarray(indices, np.int64))], shape, axis=axis)


def reshape(g: Graph, x: Tensor) -> Tensor:
    shape = g.one_of(
        (x.size // x.shape[-1], x.shape[-1]),
        (x.shape[0], x.size // x.shape[0]),
        (*x.shape[:1], x.size // x.shape[0] // x.shape[-1], x.shape[-1]),
    )
    free = g.number(0, len(shape) - 1)
    wanted = [-1 if axis == free and g.chance() else n for axis, n in enumerate(shape)]
    return g.add("Reshape", [x.name, g.ints(*wanted)], shape)


def transpose(g: Graph, x: Tensor) -> Tensor:
    perm = g.draw(st.permutations(range(x.rank)))
    return g.add("Transpose", [x.name], tuple(x.shape[i] for i in perm), perm=list(perm))


def flatten(g: Graph, x: Tensor) -> Tensor:
    axis = g.number(1, x.rank - 1)
    return g.add("Flatten", [x.name], (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), axis=axis)


def unsqueeze(g: Graph, x: Tensor) -> Tensor | None:
    axis = g.number(0, x.rank)
    return g.add("Unsqueeze", [x.name, g.ints(axis)], (*x.shape[:axis], 1, *x.shape[axis:])) if x.rank < 5 else None


def squeeze(g: Graph, x: Tensor) -> Tensor | None:
    ones = [axis for axis, n in enumerate(x.shape) if n == 1]
    if not ones or x.rank < 3:
        return None
    axis = g.one_of(*ones)
    return g.add("Squeeze", [x.name, g.ints(axis)], cut(x.shape, axis))


def expand(g: Graph, x: Tensor) -> Tensor | None:
    shape = tuple(2 if n == 1 else n for n in x.shape)
    return g.add("Expand", [x.name, g.ints(*shape)], shape)


def tile(g: Graph, x: Tensor) -> Tensor | None:
    repeats = [g.number(1, 2) for _ in x.shape]
    shape = tuple(n * r for n, r in zip(x.shape, repeats, strict=True))
    return g.add("Tile", [x.name, g.ints(*repeats)], shape)


def resize(g: Graph, x: Tensor) -> Tensor | None:
    if x.rank != 4:
        return None
    factors = [1, 1, g.number(1, 2), g.number(1, 2)]
    shape = tuple(n * f for n, f in zip(x.shape, factors, strict=True))
    mode = g.one_of("nearest", "nearest", "linear", "cubic")
    if g.chance():
        return g.add("Resize", [x.name, "", "", g.ints(*shape)], shape, mode=mode)
    scales = g.constant(np.array(factors, np.float32))
    return g.add("Resize", [x.name, "", scales], shape, mode=mode)


def pad(g: Graph, x: Tensor) -> Tensor:
    mode = g.one_of("constant", "constant", "reflect", "edge")
    pads = [g.number(0, min(2, n - 1)) for n in x.shape * 2]
    shape = tuple(n + pads[i] + pads[x.rank + i] for i, n in enumerate(x.shape))
    inputs = [x.name, g.ints(*pads)]
    if mode == "constant" and g.chance():
        inputs.append(g.scalar(g.one_of(0.0, 0.0, 1.0)))
    return g.add("Pad", inputs, shape, mode=mode)


def pooling(op: str) -> Builder:
    def build(g: Graph, x: Tensor) -> Tensor | None:
        if x.rank < 3:
            return None
        kernel, strides, dilations, pads = window(g, x, dilated=op == "MaxPool")  # type: ignore[misc]
        attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "pads": pads}
        if op == "MaxPool":
            attributes |= {"dilations": dilations}
        else:
            attributes |= {"count_include_pad": g.number(0, 1)}
        space = slid(x.shape[2:], kernel, strides, dilations, pads)
        return g.add(op, [x.name], (*x.shape[:2], *space), **attributes)

    return build


def global_pooling(op: str) -> Builder:
    def build(g: Graph, x: Tensor) -> Tensor | None:
        return g.add(op, [x.name], (*x.shape[:2], *[1] * (x.rank - 2))) if x.rank > 2 else None

    return build


def reduction(op: str) -> Builder:
    def build(g: Graph, x: Tensor) -> Tensor | None:
        axes = sorted({g.number(0, x.rank - 1), g.number(0, x.rank - 1)})
        keep = 1 if x.rank - len(axes) < 2 else g.number(0, 1)
        shape = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape) if keep or axis not in axes)
        return g.add(op, [x.name, g.ints(*axes)], shape, keepdims=keep)

    return build


def element_wise(op: str, domain: str = "", **attributes: Any) -> Builder:
    return lambda g, x: g.add(op, [x.name], x.shape, domain, **attributes)


def softmax(op: str) -> Builder:
    return lambda g, x: g.add(op, [x.name], x.shape, axis=g.number(-1, x.rank - 1))


def clip(g: Graph, x: Tensor) -> Tensor:
    low, high = g.one_of((0.0, 6.0), (-1.0, 1.0), (0.0, None), (None, 0.5), (0.25, 3.0))
    bounds = ["" if bound is None else g.scalar(bound) for bound in (low, high)]
    return g.add("Clip", [x.name, *bounds], x.shape)


def leaky(g: Graph, x: Tensor) -> Tensor:
    return g.add("LeakyRelu", [x.name], x.shape, alpha=g.one_of(0.01, 0.1, 0.3))


def prelu(g: Graph, x: Tensor) -> Tensor:
    slopes = g.normal(x.shape[-1], scale=0.1, about=0.25)
    return g.add("PRelu", [x.name, slopes], x.shape)


def gated(g: Graph, x: Tensor) -> Tensor:
    """Append x * sigmoid(x)."""
    return g.add("Mul", [x.name, g.add("Sigmoid", [x.name], x.shape).name], x.shape)


def gelu(g: Graph, x: Tensor) -> Tensor:
    """Append x / 2 * (1 + erf(x / sqrt 2)), in one of the orders that exporters write."""
    scaled = g.add("Div", [x.name, g.scalar(2**0.5)], x.shape)
    erf = g.add("Erf", [scaled.name], x.shape)
    raised = g.add("Add", [erf.name, g.scalar(1)], x.shape)
    return g.add("Mul", [g.add("Mul", [x.name, raised.name], x.shape).name, g.scalar(0.5)], x.shape)


def where(g: Graph, x: Tensor) -> Tensor:
    alike = [t for t in g.tensors if t.shape == x.shape]
    mask = g.constant(g.random.random(x.shape) < 0.5)
    other = g.one_of(*alike).name if g.chance() else g.scalar(g.one_of(0.0, -1.0))
    return g.add("Where", [mask, x.name, other], x.shape)


def to_space(g: Graph, x: Tensor) -> Tensor | None:
    if x.rank != 4 or x.shape[1] % 4:
        return None
    n, c, h, w = x.shape
    return g.add("DepthToSpace", [x.name], (n, c // 4, 2 * h, 2 * w), blocksize=2, mode=g.one_of("DCR", "CRD"))


def to_depth(g: Graph, x: Tensor) -> Tensor | None:
    if x.rank != 4 or x.shape[2] % 2 or x.shape[3] % 2:
        return None
    n, c, h, w = x.shape
    return g.add("SpaceToDepth", [x.name], (n, 4 * c, h // 2, w // 2), blocksize=2)


def layer_norm(g: Graph, x: Tensor) -> Tensor | None:
    if x.shape[-1] < 4:
        return None
    parameters = [g.normal(x.shape[-1], scale=0.1, about=1.0), g.normal(x.shape[-1], scale=0.1)]
    return g.add("LayerNormalization", [x.name, *parameters], x.shape, epsilon=1e-2)


def channel_norm(op: str) -> Builder:
    def build(g: Graph, x: Tensor) -> Tensor | None:
        if x.rank < 3 or (op == "InstanceNormalization" and math.prod(x.shape[2:]) < 4):
            return None
        parameters = [g.normal(x.shape[1], scale=0.1, about=1.0), g.normal(x.shape[1], scale=0.1)]
        if op == "BatchNormalization":
            parameters.append(g.normal(x.shape[1], scale=0.2))
            parameters.append(g.constant(g.random.uniform(0.5, 2.0, x.shape[1]).astype(np.float32)))
        return g.add(op, [x.name, *parameters], x.shape, epsilon=1e-2)

    return build


def rms_norm(g: Graph, x: Tensor) -> Tensor | None:
    """Append x / sqrt(mean(x^2) + eps) * g as several nodes."""
    if x.shape[-1] < 4:
        return None
    squares = g.add("Pow", [x.name, g.scalar(2)], x.shape)
    mean = g.add("ReduceMean", [squares.name, g.ints(-1)], (*x.shape[:-1], 1))
    root = g.add("Sqrt", [g.add("Add", [mean.name, g.scalar(1e-2)], mean.shape).name], mean.shape)
    return g.add(
        "Mul", [g.add("Div", [x.name, root.name], x.shape).name, g.normal(x.shape[-1], about=1.0, scale=0.1)], x.shape
    )


def pair(g: Graph, x: Tensor) -> Tensor:
    """Append a QuantizeLinear and a DequantizeLinear, as in a partly quantized model."""
    zero = g.one_of(np.uint8(128), np.uint8(0), np.int8(0))
    parameters = [g.scalar(1 / 32), g.constant(np.asarray(zero))]
    quantized = g.add("QuantizeLinear", [x.name, *parameters], x.shape)
    g.tensors.remove(quantized)  # no other node reads integers
    return g.add("DequantizeLinear", [quantized.name, *parameters], x.shape)


def either(g: Graph, x: Tensor) -> Tensor:
    """Append an If around two products that read `x` and outer weights. Noise cannot change the condition."""
    outputs, taken = g.number(1, 8), g.one_of("Less", "Greater")
    size = g.add("Abs", [x.name], x.shape)
    mean = g.add("ReduceMean", [size.name], (), keepdims=0)
    condition = g.add(taken, [mean.name, g.scalar(-1)], ())
    g.tensors = [t for t in g.tensors if t not in (mean, condition)]
    shape = (*x.shape[:-1], outputs)
    bodies = []
    for name in (f"{condition.name}/then", f"{condition.name}/else"):
        weights = g.weights(x.shape[-1], outputs, terms=x.shape[-1])
        nodes = [helper.make_node("MatMul", [x.name, weights], [f"{name}/y"], name=f"{name}/matmul")]
        if g.chance():
            nodes.append(helper.make_node("Relu", [f"{name}/y"], [f"{name}/z"]))
        result = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, shape)
        bodies.append(helper.make_graph(nodes, name, [], [result]))
    return g.add("If", [condition.name], shape, then_branch=bodies[0], else_branch=bodies[1])


def scan(g: Graph, x: Tensor) -> Tensor | None:
    """Append a Scan over the first axis that multiplies by outer weights."""
    if x.rank < 3:
        return None
    outputs = g.number(1, 8)
    weights = g.weights(x.shape[-1], outputs, terms=x.shape[-1])
    name = f"scan{len(g.nodes)}"
    node = helper.make_node("MatMul", [f"{name}/t", weights], [f"{name}/y"])
    shape = (*x.shape[1:-1], outputs)
    read = helper.make_tensor_value_info(f"{name}/t", TensorProto.FLOAT, x.shape[1:])
    made = helper.make_tensor_value_info(f"{name}/y", TensorProto.FLOAT, shape)
    body = helper.make_graph([node], name, [read], [made])
    return g.add("Scan", [x.name], (x.shape[0], *shape), num_scan_inputs=1, body=body)


BUILDERS: dict[str, Builder] = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Gemm": gemm,
    "MatMul": matmul,
    "products": products,
    "Einsum": einsum,
    "LSTM": recurrent("LSTM", 4),
    "GRU": recurrent("GRU", 3),
    "RNN": recurrent("RNN", 1),
    **{op: with_other(op) for op in ("Add", "Sub", "Mul", "Div")},
    **{op: several(op) for op in ("Sum", "Max", "Min")},
    "Concat": concat,
    "Split": split,
    "Slice": slice_,
    "Gather": gather,
    "Reshape": reshape,
    "Transpose": transpose,
    "Flatten": flatten,
    "Unsqueeze": unsqueeze,
    "Squeeze": squeeze,
    "Expand": expand,
    "Tile": tile,
    "Resize": resize,
    "Pad": pad,
    **{op: pooling(op) for op in ("MaxPool", "AveragePool")},
    **{op: global_pooling(op) for op in ("GlobalAveragePool", "GlobalMaxPool")},
    **{op: reduction(op) for op in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum")},
    **{op: softmax(op) for op in ("Softmax", "LogSoftmax")},
    **{
        op: element_wise(op)
        for op in "Sigmoid Relu Tanh Elu Erf HardSigmoid HardSwish Mish Selu Softplus Gelu Identity Abs Neg".split()
    },
    **{op: element_wise(op, "com.microsoft") for op in ("FastGelu", "QuickGelu")},
    "Clip": clip,
    "LeakyRelu": leaky,
    "PRelu": prelu,
    "gated": gated,
    "gelu": gelu,
    "Where": where,
    "DepthToSpace": to_space,
    "SpaceToDepth": to_depth,
    "LayerNormalization": layer_norm,
    "rms_norm": rms_norm,
    "pair": pair,
    "If": either,
    "Scan": scan,
    **{op: channel_norm(op) for op in ("BatchNormalization", "InstanceNormalization")},
}
WEIGHTED = ["Conv", "Gemm", "MatMul"]
FOLLOWING = [name for name in BUILDERS if name in OPS and OPS[name].kind in ("same", "arith")]
OTHERS = [name for name in BUILDERS if name not in (*WEIGHTED, *FOLLOWING)]
DRAWN = [WEIGHTED] * 3 + [FOLLOWING] * 2 + [OTHERS]  # products are more frequent; otherwise few operators would be int8


@dataclass(frozen=True, repr=False)
class Case:
    """A model, its data, and the options."""

    model: onnx.ModelProto
    feeds: list[Feed]
    options: Options

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the graph for Hypothesis."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        """Return the graph with the shapes of its constants, for the message of a failure."""
        shapes = {t.name: list(t.dims) for t in self.model.graph.initializer}
        values = [f"{v.name} {axes(v)}" for v in self.model.graph.input]
        lines = [f"({', '.join(values)}) -> {[v.name for v in self.model.graph.output]}, {self.options}"]
        for node in self.model.graph.node:
            facts = {
                a.name: helper.get_attribute_value(a)
                for a in node.attribute
                if a.type not in (onnx.AttributeProto.TENSOR, onnx.AttributeProto.GRAPH)
            }
            read = ", ".join(f"{name}{shapes.get(name, '')}" for name in node.input)
            lines.append(f"{', '.join(node.output)} = {node.op_type} {facts}({read})")
        return "\n    ".join(lines)


def axes(value: onnx.ValueInfoProto) -> list[int | str]:
    return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]


def grow(g: Graph, count: int) -> None:
    """Append operators on tensors of at least two axes, until there are `count`."""
    for _ in range(4 * count):
        if g.operators >= count:
            return
        usable = [t for t in g.tensors if t.rank > 1]
        x = g.one_of(*(usable[-3:] if g.number(0, 3) else usable))
        before = (list(g.nodes), dict(g.constants), list(g.tensors))
        BUILDERS[g.one_of(*g.random.permutation(g.one_of(*DRAWN)))](g, x)
        if g.operators > MOST or any(too_large(t) for t in g.tensors[len(before[2]) :]):
            g.nodes, g.constants, g.tensors = before


def too_large(t: Tensor) -> bool:
    return not 0 < t.size <= LARGEST or t.rank > 5 or max(t.shape, default=1) > LONGEST


@st.composite
def cases(draw: Draw) -> Case:
    """Draw a graph of 3 to 15 operators, feeds with normally distributed values, and options."""
    g = Graph(np.random.default_rng(draw(st.integers(0, 2**16))), draw)
    inputs = [Tensor(f"x{k}", g.one_of(*INPUTS)) for k in range(g.number(1, 2))]
    g.tensors += inputs
    grow(g, g.number(LEAST, MOST))
    assume(g.operators >= LEAST)
    feeds = [{t.name: g.random.standard_normal(t.shape).astype(np.float32) for t in inputs} for _ in range(SAMPLES)]
    return Case(model_of(g, inputs), feeds, draw(asked()))


def model_of(g: Graph, inputs: list[Tensor]) -> onnx.ModelProto:
    """Return the model. Tensors without readers are outputs; sometimes other tensors are outputs too."""
    read = {name for node in g.nodes for name in node.input}
    outputs = [t for t in g.tensors[len(inputs) :] if t.name not in read or g.number(0, 7) == 0]
    free, overridable = g.number(0, 3) == 2, g.number(0, 15) == 7

    def declared(t: Tensor) -> onnx.ValueInfoProto:
        shape = [f"{t.name}_{axis}" if free else n for axis, n in enumerate(t.shape)]
        return helper.make_tensor_value_info(t.name, TensorProto.FLOAT, shape)

    nodes = {name for node in g.nodes if node.op_type == "Constant" for name in node.output}
    stored = {name: array for name, array in g.constants.items() if name not in nodes}
    weights = [
        Tensor(name, a.shape) for name, a in stored.items() if overridable and a.ndim > 1 and a.dtype == np.float32
    ]
    graph = helper.make_graph(
        g.nodes,
        "random",
        [declared(t) for t in (*inputs, *weights)],
        [declared(t) for t in outputs],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


INPUTS = ((4, 16), (1, 12), (2, 5, 8), (1, 8, 16), (1, 8, 8, 8), (2, 3, 7, 6), (1, 12, 1, 5), (1, 8, 3, 4, 5))
SCHEMES = (Scheme(), Scheme(symmetric=True), Scheme("s8"), Scheme("u8", "u8"), Scheme("s8", "s8", symmetric=True))


def asked() -> st.SearchStrategy[Options]:
    """Draw options; half of the time the default options."""
    usual = Options(force_int8=True, seconds=0.0)
    others = st.builds(
        lambda form, scheme, isa, strategy: replace(
            usual, format=form, scheme=scheme, isa=isa, selection=Selection(strategy=strategy)
        ),
        st.sampled_from(FORMATS),
        st.sampled_from(SCHEMES),
        st.sampled_from(["auto", "avx2"]),
        st.sampled_from(Strategy),
    )
    return st.just(usual) | others


def run(path: Path, feeds: list[Feed], *, optimize: bool = True) -> dict[str, Array]:
    """Return the outputs on all feeds, as vectors."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    results = zip(*(session.run(None, feed) for feed in feeds), strict=True)
    names = [value.name for value in session.get_outputs()]
    return {n: np.concatenate([np.ravel(v) for v in r]).astype(float) for n, r in zip(names, results, strict=True)}


def ends(path: Path) -> list[tuple[str, int, list[int | str]]]:
    """Return the inputs without a default, which becomes a constant, and the outputs."""
    graph = onnx.load(path).graph
    defaults = {tensor.name for tensor in graph.initializer}
    values = [*(value for value in graph.input if value.name not in defaults), *graph.output]
    return [(v.name, v.type.tensor_type.elem_type, axes(v)) for v in values]


def near(one: dict[str, Array], other: dict[str, Array], allowed: dict[str, float]) -> bool:
    return all(np.sum((one[name] - other[name]) ** 2) <= allowed[name] for name in one)


def check(case: Case, allowed_error: Allowed) -> Result:
    """Quantize a graph and check the result."""
    with tempfile.TemporaryDirectory() as name:
        before, after = Path(name) / "float.onnx", Path(name) / "int8.onnx"
        onnx.save(case.model, before)
        exact = run(before, case.feeds, optimize=False)
        allowed = allowed_error(case.model, case.feeds, isa=case.options.isa)
        assume(computed_rightly(before, case.feeds, exact, allowed))
        result = quantize_model(before, case.feeds, after, case.options)
        assert not result.why_not
        onnx.checker.check_model(onnx.load(after), full_check=True)
        assert ends(before) == ends(after)
        fused, plain = run(after, case.feeds), run(after, case.feeds, optimize=False)
        assert near(exact, fused, allowed)
        assert near(exact, plain, allowed)
        assert near(plain, fused, allowed)
        assert all(node.reason for node in result.float_nodes)
        return result


def computed_rightly(path: Path, feeds: list[Feed], exact: dict[str, Array], allowed: dict[str, float]) -> bool:
    """Whether optimizations of the runtime keep the results of a float graph: some break a Transpose before a MatMul."""
    try:
        Runner(path)(feeds[0])
    except RequantError:
        return False
    return near(exact, run(path, feeds), allowed)


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
PHASES = [Phase.explicit, Phase.generate]  # shrinking takes minutes, and the graphs are small
common = settings(derandomize=True, suppress_health_check=CHECKS, phases=PHASES)


@settings(common, max_examples=5)
@given(case=cases())
def test_random_graph(allowed_error: Allowed, case: Case) -> None:
    check(case, allowed_error)


@pytest.mark.slow
@settings(common, max_examples=2000)
@given(case=cases())
def test_many_random_graphs(allowed_error: Allowed, case: Case) -> None:
    check(case, allowed_error)
