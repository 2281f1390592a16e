"""Every row of the table of operators, run against the float model: what it claims of an operator really happens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from click.testing import Result as CliResult
from onnx import numpy_helper

from requant.calibration.model.session import Array
from requant.cli import main
from requant.quantize import Options, Result, Selection, Strategy, quantize_model
from requant.quantize.runtime.kernels import uint8_kernels
from requant.quantize.tools.inspect.operators import operators
from requant.transforms.graphs.queries import MS
from requant.transforms.int8.ops import ATTENTION, FUNCTION, GATE, GROUP_NORM, INTERPOLATION, OPS, SLOPED, Kernel, Op
from requant.transforms.int8.qparams import Scheme
from requant.transforms.patterns.attention import GROUP_QUERY

from ...native import needs_library

Feed = dict[str, Array]
Allowed = Callable[..., dict[str, float]]
Given = tuple[int, ...] | Array

SAMPLES = 3


@dataclass(frozen=True)
class Example:
    """A small model in which an operator stands where int8 can reach it.

    Attributes:
        name: What is special about it.
        body: Its nodes in ONNX text; the one in question is called ``op``. They read ``x``, ``x2``, ... and give ``y``.
        tensors: By name a shape, of which inputs and weights are drawn, or the constant itself.
        runs: The kernel that the runtime must execute for ``op``; empty for any.
        reads: Element type of an input of that kernel, scalars aside.
        why: Why ``op`` stays float; empty where it becomes int8.
        strategy: How ``op`` is to become int8.
        y: Type of the output where onnx cannot infer it.
        opset: Version of the standard operators.
        place: What decides where int8 pays.
        dynamic: Whether the whole model is dynamic, so that operators that find their ranges at run time stay.
    """

    name: str
    body: str
    tensors: Mapping[str, Given]
    runs: str = ""
    reads: str = "uint8"
    why: str = ""
    strategy: Strategy = Strategy.AUTO
    y: str = ""
    opset: int = 21
    place: str = "rules"
    dynamic: bool = False


def tensors(text: str) -> dict[str, Given]:
    """Read what a model is made of: ``"x 2x8; w 8x4; w8 8x4; i =0,-1; c =1.5"``.

    A shape is an input, if its name begins with x, or normal weights, int8 ones if the name ends with 8. After ``=``
    stand int64 in one dimension, or a float scalar.
    """
    found: dict[str, Given] = {}
    for name, value in (part.split() for part in text.split(";") if part.strip()):
        shape = tuple(map(int, value.split("x"))) if "=" not in value else ()
        if name[-1] == "8" and name[0] != "x":
            found[name] = np.random.default_rng(5).integers(-127, 128, shape).astype(np.int8)
        elif "=" not in value:
            found[name] = shape
        elif "." in value:
            found[name] = np.asarray(value[1:], np.float32)
        else:
            found[name] = np.array([int(number) for number in value[1:].split(",")])
    return found


def int8(runs: str, name: str, body: str, of: str, **facts: Any) -> Example:
    """Make an example that becomes int8."""
    return Example(name, body, tensors(of), runs, **facts)


def stored(name: str, body: str, of: str, **facts: Any) -> Example:
    """Make an example of which the weights are int8, and the kernel is any that computes in float."""
    return Example(name, body, tensors(of), strategy=Strategy.WEIGHT, **facts)


def dynamic(runs: str, name: str, body: str, of: str) -> Example:
    """Make an example that finds its ranges at run time."""
    return Example(name, body, tensors(of), runs, "float", strategy=Strategy.DYNAMIC)


def blocked(runs: str, name: str, body: str, of: str, reads: str = "uint8") -> Example:
    """Make an example with weights in blocks."""
    return Example(name, body, tensors(of), runs, reads, strategy=Strategy.BLOCK)


def floats(why: str, name: str, body: str, of: str, **facts: Any) -> Example:
    """Make an example that stays float."""
    return Example(name, body, tensors(of), why=why, **facts)


IMAGE = "x 2x8x8x8; v 8x8x3x3"  # a = Conv(x, v) is (2, 8, 6, 6)
ROWS = "x 2x6x16; v 16x24"  # a = MatMul(x, v) is (2, 6, 24)


def between_convs(
    runs: str, name: str, node: str, of: str = "", *, channels: int = 8, before: str = "", place: str = "rules"
) -> Example:
    """Put an operator between two convolutions: it reads ``a`` (2, 8, 6, 6), and what `before` makes of that."""
    body = f"[first] a = Conv(x, v) {before} [op] b = {node} [last] y = Conv(b, w)"
    return int8(runs, name, body, f"{IMAGE}; w 4x{channels}x1x1; {of}", place=place)


def behind_gate(why: str, name: str, node: str, before: str = "", place: str = "all") -> Example:
    """The same for what stays float."""
    body = f"[first] a = Conv(x, v) {before} [op] b = {node} [last] y = Conv(b, w)"
    return floats(why, name, body, f"{IMAGE}; w 4x8x1x1", place=place)


def between_pool_and_conv(runs: str, name: str, node: str, of: str) -> Example:
    """The same behind a pooling; ``a`` is (2, 8, 5, 5). The last convolution pads, so that no summand folds into it."""
    last = "[last] y = Conv <pads = [1, 1, 1, 1]> (b, w)"
    body = f"[first] p = Conv(x, v) a = AveragePool <kernel_shape=[2,2]> (p) [op] b = {node} {last}"
    return int8(runs, name, body, f"{IMAGE}; w 4x8x2x2; {of}")


def between_products(runs: str, name: str, node: str, of: str = "", *, width: int = 24, **facts: Any) -> Example:
    """Put an operator between two matrix products: it reads ``a`` (2, 6, 24)."""
    body = f"[first] a = MatMul(x, v) [op] b = {node} [last] y = MatMul(b, w)"
    return int8(runs, name, body, f"{ROWS}; w {width}x12; {of}", **facts)


def between_floats(op: str, name: str, node: str, of: str = "", opset: int = 21, before: str = "") -> Example:
    """The same for an operator that stays float."""
    body = f"[first] a = MatMul(x, v) {before} [op] b = {node.replace('OP', op)} [last] y = MatMul(b, w)"
    return floats(
        (OPS[op].slow or OPS[op].why).text, name, body, f"{ROWS}; w 24x12; {of}", y="float[a,b,c]", opset=opset
    )


def behind_conv(op: str, name: str, node: str, of: str) -> Example:
    """Put an operator that stays float between two convolutions: it reads ``a`` (2, 8, 6, 6)."""
    body = f"[first] a = Conv(x, v) [op] b = {node} [last] y = Conv(b, w)"
    return floats(OPS[op].why.text, name, body, f"{IMAGE}; w 4x8x1x1; {of}", y="float[a,b,c,d]")


def inside(op: str, runs: str, name: str, body: str, of: str) -> Example:
    """Make an example of control flow: it stays, and what is in its bodies becomes int8."""
    return Example(name, body, tensors(of), runs, why=OPS[op].why.text)


def ms(name: str) -> str:
    return f"{MS}.{name}"


def gemms() -> list[Example]:
    """Every transA, transB, alpha and beta, with each form of the bias."""
    found = []
    biases = {"no bias": "", "row": "; c 12", "matrix": "; c 20x12", "column": "; c 20x1"}
    for turned, other, alpha, beta, bias in product((0, 1), (0, 1), (1.0, 0.5), (1.0, 2.0), biases):
        name = f"transA={turned}, transB={other}, alpha={alpha}, beta={beta}"
        body = f"[op] y = Gemm <{name}> (x, w{', c' if biases[bias] else ''})"
        of = f"x {'32x20' if turned else '20x32'}; w {'12x32' if other else '32x12'}{biases[bias]}"
        found.append(int8("QGemm", f"{name}, {bias}", body, of))
    return found


def already(op: str, node: str, of: str) -> Example:
    """Put an operator that computes in integers behind a pair; it or a pair gives ``d``, and a product reads that."""
    name = op.removeprefix(f"{MS}.")
    pair = "q = QuantizeLinear(x, s, z)" + (" e = DequantizeLinear(q, s, z)" if "(e" in node else "")
    body = f"{pair} [op] {node.replace('OP', op)} [last] y = MatMul(d, w)"
    given = tensors(of)
    read = {key: value for key, value in (given | PARAMETERS).items() if f"({key}," in body or f" {key}" in body}
    reads = "float" if name.startswith("Dynamic") else "uint8"
    y = f"float[{','.join('abcd'[: len(given['x'])])}]" if op != name else ""
    runs = name if op not in ("QuantizeLinear", "DequantizeLinear") else ""  # the runtime fuses these
    dynamic = name.startswith("Dynamic")
    return Example("in the model", body, read, runs, reads, OPS[op].why.text, y=y, dynamic=dynamic)


def already_in_blocks(op: str, node: str, of: str) -> Example:
    """Put an operator with weights in blocks before a product."""
    codes = np.random.default_rng(5).integers(0, 256, (8, 1, 32)).astype(np.uint8)
    given: dict[str, Given] = {
        "codes": codes if op == "MatMulNBits" else codes[:, 0],
        "bs": np.full((8, 1), 0.002, np.float32),
    }
    body = f"{node.replace('OP', ms(op))} [last] y = MatMul(d, w)"
    read = "float" if op == "MatMulNBits" else "uint8"
    return Example("in the model", body, {**tensors(of), **given}, op, read, OPS[ms(op)].why.text, y="float[a,b]")


PARAMETERS: dict[str, Given] = {
    "s": np.asarray(0.03, np.float32),
    "z": np.asarray(128, np.uint8),
    "ws": np.asarray(0.002, np.float32),
    "wz": np.asarray(0, np.int8),
    "ps": np.asarray(1 / 256, np.float32),
    "pz": np.asarray(0, np.uint8),
    "gs": np.full((1, 32), 0.002, np.float32),
    "gz": np.zeros((1, 32), np.int8),
    "m": np.arange(32) % 2 == 0,
}
"""Scales and zero points of activations, weights, probabilities and gates; a mask."""

TO_FLOAT = "d = DequantizeLinear(r, s, z)"
HALF = np.indices((6, 6)).sum(0) % 2 == 0
CONV, MATMUL = "a = Conv(x, v)", "a = MatMul(x, v)"

EXAMPLES: dict[str, list[Example]] = {
    "Conv": [
        int8("QLinearConv", "1-D", "[op] y = Conv <pads=[1,1]> (x, w, b)", "x 2x16x20; w 8x16x3; b 8"),
        int8("QLinearConv", "2-D", "[op] y = Conv(x, w, b)", "x 2x8x8x8; w 8x8x3x3; b 8"),
        int8("QLinearConv", "3-D", "[op] y = Conv <strides=[1,2,2]> (x, w)", "x 1x8x4x6x6; w 8x8x3x3x3"),
        int8("QLinearConv", "depthwise", "[op] y = Conv <group=8> (x, w, b)", "x 2x8x8x8; w 8x1x3x3; b 8"),
        int8("QLinearConv", "depthwise, two each", "[op] y = Conv <group=8> (x, w)", "x 2x8x8x8; w 16x1x3x3"),
        int8("QLinearConv", "grouped", "[op] y = Conv <group=2> (x, w)", "x 2x8x8x8; w 6x4x3x3"),
        int8("QLinearConv", "dilated", "[op] y = Conv <dilations=[2,2]> (x, w)", "x 2x8x9x9; w 8x8x3x3"),
        int8("QLinearConv", "uneven", "[op] y = Conv <pads=[0,1,2,1], strides=[2,1]> (x, w)", "x 2x8x9x9; w 8x8x3x3"),
        *(
            int8("QLinearConv", pad, f'[op] y = Conv <auto_pad="{pad}", strides=[2,2]> (x, w)', "x 2x8x8x7; w 8x8x3x3")
            for pad in ("SAME_UPPER", "SAME_LOWER", "VALID")
        ),
        int8("QLinearConv", "Relu absorbed", "[op] a = Conv(x, v) r = Relu(a) y = Conv(r, w)", f"{IMAGE}; w 4x8x1x1"),
        int8(
            "QLinearConv",
            "Clip absorbed",
            "[op] a = Conv(x, v) r = Clip(a, low, high) y = Conv(r, w)",
            f"{IMAGE}; w 4x8x1x1; low =0.0; high =6.0",
        ),
        stored("weights only", "[op] y = Conv(x, w, b)", "x 2x8x8x8; w 8x8x3x3; b 8", runs="Conv", reads="float"),
        floats("27 products per output", "first layer", "[op] y = Conv(x, w)", "x 1x3x8x8; w 8x3x3x3"),
        floats("computed weights", "computed weights", "[op] y = Conv(x, x2)", "x 1x8x8x8; x2 8x8x3x3"),
        floats("a constant operand", "constant image", "[op] y = Conv(w, x)", "x 8x8x3x3; w 1x8x8x8"),
    ],
    "Gemm": [
        *gemms(),
        int8(
            "QGemm",
            "Relu absorbed",
            "[op] a = Gemm(x, w, c) r = Relu(a) y = Gemm(r, v)",
            "x 20x32; w 32x12; c 12; v 12x9",
        ),
        dynamic("DynamicQuantizeMatMul", "dynamic", "[op] y = Gemm(x, w, c)", "x 20x32; w 32x12; c 12"),
        dynamic(
            "DynamicQuantizeMatMul",
            "dynamic, B stored transposed",
            "[op] y = Gemm <transB=1> (x, w)",
            "x 20x32; w 12x32",
        ),
        blocked("MatMulNBits", "in blocks", "[op] y = Gemm(x, w, c)", "x 20x32; w 32x12; c 12", "float"),
        blocked("MatMulNBits", "in blocks, transposed", "[op] y = Gemm <transB=1> (x, w)", "x 20x40; w 12x40", "float"),
        stored("weights only", "[op] y = Gemm(x, w, c)", "x 20x32; w 32x12; c 12"),
        stored("weights only, stored transposed", "[op] y = Gemm <transB=1> (x, w)", "x 20x32; w 12x32"),
        floats("computed weights", "two activations", "[op] y = Gemm(x, x2)", "x 20x32; x2 32x12"),
        floats("a constant operand", "constant rows", "[op] y = Gemm(w, x)", "x 32x12; w 20x32"),
    ],
    "MatMul": [
        int8("QLinearMatMul", "to uint8", "[op] a = MatMul(x, w) y = MatMul(a, v)", "x 5x32; w 32x24; v 24x8"),
        int8(
            "QLinearMatMul",
            "Relu absorbed",
            "[op] a = MatMul(x, w) r = Relu(a) y = MatMul(r, v)",
            "x 5x32; w 32x24; v 24x8",
        ),
        int8("MatMulIntegerToFloat", "to float", "[op] y = MatMul(x, w)", "x 5x32; w 32x24"),
        int8("MatMulIntegerToFloat", "3-D activation", "[op] y = MatMul(x, w)", "x 2x5x32; w 32x24"),
        int8("MatMulIntegerToFloat", "4-D activation", "[op] y = MatMul(x, w)", "x 2x3x5x32; w 32x24"),
        int8("MatMulIntegerToFloat", "stack of weights", "[op] y = MatMul(x, w)", "x 2x3x5x32; w 3x32x24"),
        *(
            int8(
                runs,
                f"{name}, {strategy}",
                "[op] y = MatMul(x, x2)" if two else "[op] y = MatMul(x, w)",
                of,
                strategy=strategy,
            )
            for runs, strategy in (("QLinearMatMul", Strategy.STATIC), ("MatMulIntegerToFloat", Strategy.STATIC_FLOAT))
            for name, two, of in (
                ("stack of weights", False, "x 2x3x5x32; w 3x32x24"),
                ("two activations", True, "x 5x32; x2 32x7"),
                ("two stacks of activations", True, "x 2x3x5x32; x2 2x3x32x7"),
                ("a stack broadcast", True, "x 2x3x5x32; x2 32x7"),
            )
        ),
        dynamic("DynamicQuantizeMatMul", "dynamic", "[op] y = MatMul(x, w)", "x 2x5x32; w 32x24"),
        blocked("MatMulNBits", "in blocks", "[op] y = MatMul(x, w)", "x 2x5x40; w 40x24", "float"),
        stored("weights only", "[op] y = MatMul(x, w)", "x 2x5x32; w 32x24"),
        stored("stack of weights only", "[op] y = MatMul(x, w)", "x 2x3x5x32; w 3x32x24"),
        floats("both factors are activations", "two activations", "[op] y = MatMul(x, x2)", "x 5x32; x2 32x7"),
        floats("weights of rank 1", "a vector", "[op] y = MatMul(x, w)", "x 5x32; w 32"),
    ],
    ms("Attention"): [
        *(
            int8(
                "QAttention",
                name,
                f"n = Cast <to=6> (k) [op] y = {ms('Attention')} <{facts}> ({operands})",
                "x 2x5x16; w 16x48; b 48; k =5,3",
                y="float[2,5,16]",
            )
            for name, facts, operands in (
                ("no mask", "num_heads=2", "x, w, b"),
                ("causal", "num_heads=4, unidirectional=1", "x, w, b"),
                ("a mask", "num_heads=2", "x, w, b, n"),
                ("its own scale", "num_heads=2, scale=0.5", "x, w, b"),
            )
        ),
        floats(
            "QAttention does not support its inputs",
            "a bias of the scores",
            f"[op] y = {ms('Attention')} <num_heads=2> (x, w, b, , , t)",
            "x 2x5x16; w 16x48; b 48; t 2x2x5x5",
            y="float[2,5,16]",
        ),
    ],
    "ConvTranspose": [
        int8(
            "ConvTranspose",
            "large weights, Relu absorbed",
            "[op] c = ConvTranspose <strides=[2,2]> (x, w, b) y = Relu(c)",
            "x 1x64x5x5; w 64x32x3x3; b 32",
            reads="float",
        ),
        stored("weights only", "[op] y = ConvTranspose(x, w, b)", "x 1x8x5x5; w 8x4x3x3; b 4"),
        stored("weights only, grouped", "[op] y = ConvTranspose <group=2> (x, w)", "x 1x8x5x5; w 8x4x3x3"),
        floats(
            "no integer kernel for ConvTranspose",
            "small weights",
            "[op] y = ConvTranspose(x, w)",
            "x 1x8x5x5; w 8x4x3x3",
        ),
    ],
    "LSTM": [
        *(
            dynamic("DynamicQuantizeLSTM", name, f"n = Cast <to=6> (k) [op] {node}", f"x 7x2x24; k =7,4; {of}")
            for name, node, of in (
                ("forward", "y = LSTM <hidden_size=16> (x, w, r, b)", "w 1x64x24; r 1x64x16; b 1x128"),
                ("reverse", 'y = LSTM <hidden_size=16, direction="reverse"> (x, w, r)', "w 1x64x24; r 1x64x16"),
                (
                    "both directions",
                    'y, h, c = LSTM <hidden_size=16, direction="bidirectional"> (x, w, r, b)',
                    "w 2x64x24; r 2x64x16; b 2x128",
                ),
                (
                    "lengths and a state",
                    "y, h = LSTM <hidden_size=16> (x, w, r, , n, x2, x3)",
                    "w 1x64x24; r 1x64x16; x2 1x2x16; x3 1x2x16",
                ),
                ("peepholes", "y = LSTM <hidden_size=16> (x, w, r, , , , , p)", "w 1x64x24; r 1x64x16; p 1x48"),
                (
                    "coupled gates, clipped",
                    "y = LSTM <hidden_size=16, input_forget=1, clip=2.0> (x, w, r)",
                    "w 1x64x24; r 1x64x16",
                ),
                ("last state only", "h, y = LSTM <hidden_size=16> (x, w, r)", "w 1x64x24; r 1x64x16"),
            )
        ),
        floats(
            "its weights are not constants",
            "computed weights",
            "[op] y = LSTM <hidden_size=16> (x, x2, r)",
            "x 7x2x24; x2 1x64x24; r 1x64x16",
            strategy=Strategy.DYNAMIC,
        ),
    ],
    "GRU": [
        *(
            dynamic("DynamicQuantizeMatMul", name, f"n = Cast <to=6> (k) [op] {node}", f"x 7x2x24; k =7,4; {of}")
            for reset, of_reset in ((0, "reset first"), (1, "reset last"))
            for name, node, of in (
                (
                    f"forward, {of_reset}",
                    f"y = GRU <hidden_size=16, linear_before_reset={reset}> (x, w, r, b)",
                    "w 1x48x24; r 1x48x16; b 1x96",
                ),
                (
                    f"reverse, {of_reset}",
                    f'y = GRU <hidden_size=16, linear_before_reset={reset}, direction="reverse"> (x, w, r)',
                    "w 1x48x24; r 1x48x16",
                ),
                (
                    f"both directions, {of_reset}",
                    f'y, h = GRU <hidden_size=16, linear_before_reset={reset}, direction="bidirectional"> (x, w, r, b)',
                    "w 2x48x24; r 2x48x16; b 2x96",
                ),
                (
                    f"lengths and a state, {of_reset}",
                    f"y, h = GRU <hidden_size=16, linear_before_reset={reset}> (x, w, r, , n, x2)",
                    "w 1x48x24; r 1x48x16; x2 1x2x16",
                ),
                (
                    f"reverse with lengths, {of_reset}",
                    f'y, h = GRU <hidden_size=16, linear_before_reset={reset}, direction="reverse"> (x, w, r, b, n, x2)',
                    "w 1x48x24; r 1x48x16; b 1x96; x2 1x2x16",
                ),
                (
                    f"both directions with lengths, {of_reset}",
                    f'y, h = GRU <hidden_size=16, linear_before_reset={reset}, direction="bidirectional"> (x, w, r, b, n, x2)',
                    "w 2x48x24; r 2x48x16; b 2x96; x2 2x2x16",
                ),
                (
                    f"last state only, {of_reset}",
                    f"h, y = GRU <hidden_size=16, linear_before_reset={reset}> (x, w, r)",
                    "w 1x48x24; r 1x48x16",
                ),
            )
        ),
        *(
            floats(why, name, f"[op] y = GRU <hidden_size=16{attributes}> ({inputs})", of, strategy=Strategy.DYNAMIC)
            for why, name, attributes, inputs, of in (
                (
                    "its weights are not constants",
                    "computed weights",
                    "",
                    "x, x2, r",
                    "x 7x2x24; x2 1x48x24; r 1x48x16",
                ),
                ("a computed bias", "computed bias", "", "x, w, r, x2", "x 7x2x24; w 1x48x24; r 1x48x16; x2 1x96"),
                ("its state is clipped", "clipped", ", clip=2.0", "x, w, r", "x 7x2x24; w 1x48x24; r 1x48x16"),
                (
                    "other functions than sigmoid and tanh",
                    "activations",
                    ', activations=["HardSigmoid", "Tanh"]',
                    "x, w, r",
                    "x 7x2x24; w 1x48x24; r 1x48x16",
                ),
            )
        ),
        floats(
            "a state of 16 is too small",
            "small state",
            "[op] y = GRU <hidden_size=16> (x, w, r)",
            "x 7x2x24; w 1x48x24; r 1x48x16",
        ),
    ],
    "RNN": [
        floats(
            "no integer kernel for RNN",
            "forward",
            "[op] y = RNN <hidden_size=16> (x, w, r)",
            "x 7x2x24; w 1x16x24; r 1x16x16",
        )
    ],
    "Add": [
        between_convs("QLinearAdd", "a skip connection", "Add(a, x2)", "x2 2x8x6x6"),
        between_convs("QLinearAdd", "of itself", "Add(a, a)"),
        between_convs("QLinearAdd", "broadcast", "Add(x2, a)", "x2 8x1x6"),
        int8(
            "QLinearAdd",
            "Relu absorbed",
            f"{CONV} [op] b = Add(a, x2) r = Relu(b) y = Conv(r, w)",
            f"{IMAGE}; x2 2x8x6x6; w 4x8x1x1",
        ),
        between_pool_and_conv("QLinearAdd", "a constant per channel", "Add(a, c)", "c 8x1x1"),
        between_pool_and_conv("QLinearAdd", "a scalar", "Add(c, a)", "c =1.5"),
        floats(
            "nothing after it computes in integers",
            "read in float",
            f"{CONV} [op] y = Add(a, x2)",
            f"{IMAGE}; x2 2x8x6x6",
        ),
    ],
    "Mul": [
        between_convs("QLinearMul", "two activations", "Mul(a, x2)", "x2 2x8x6x6"),
        between_convs("QLinearMul", "a gate per channel", "Mul(a, x2)", "x2 2x8x1x1"),
        int8(
            "QLinearMul",
            "Relu absorbed",
            f"{CONV} [op] b = Mul(a, x2) r = Relu(b) y = Conv(r, w)",
            f"{IMAGE}; x2 2x8x6x6; w 4x8x1x1",
        ),
        between_pool_and_conv("QLinearMul", "a constant", "Mul(a, c)", "c 8x1x1"),
    ],
    "Concat": [
        between_convs("QLinearConcat", "channels", "Concat <axis=1> (a, x2)", "x2 2x4x6x6", channels=12),
        between_convs("QLinearConcat", "last axis", "Concat <axis=-1> (a, a, x2)", "x2 2x8x6x2"),
        between_convs("QLinearConcat", "a constant", "Concat <axis=1> (c, a)", "c 2x2x6x6", channels=10),
    ],
    "Where": [
        replace(made, tensors={**made.tensors, "m": HALF})
        for made in (
            between_convs("QLinearWhere", "two activations", "Where(m, a, x2)", "x2 2x8x6x6"),
            between_convs("QLinearWhere", "a constant", "Where(m, a, c)", "c =0.0"),
            between_convs("QLinearWhere", "a constant first", "Where(m, c, a)", "c =-1.0"),
        )
    ],
    "AveragePool": [
        between_convs("QLinearAveragePool", name, f"AveragePool <{facts}> (a)")
        for name, facts in (
            ("windows", "kernel_shape=[2,2], strides=[2,2]"),
            ("padded", "kernel_shape=[3,3], pads=[1,1,1,1]"),
            ("pads count", "kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1"),
            ("ceil_mode", "kernel_shape=[3,3], strides=[2,2], ceil_mode=1"),
            ("auto_pad", 'kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_UPPER"'),
        )
    ],
    "GlobalAveragePool": [between_convs("QLinearGlobalAveragePool", "2-D", "GlobalAveragePool(a)")],
    "LeakyRelu": [
        between_convs("QLinearLeakyRelu", "a slope", "LeakyRelu <alpha=0.1> (a)"),
        int8(
            "QLinearLeakyRelu",
            "Clip absorbed",
            "[first] a = Conv(x, v) [op] s = LeakyRelu <alpha=0.1> (a) [clip] b = Clip(s, low, high) [last] y = Conv(b, w)",
            f"{IMAGE}; w 4x8x1x1; low =-0.05; high =1.5",
        ),
    ],
    "DepthToSpace": [
        int8(
            "DepthToSpace",
            mode,
            f'{CONV} [op] b = DepthToSpace <blocksize=2, mode="{mode}"> (a) y = Conv(b, w)',
            f"{IMAGE}; w 4x2x6x6",
        )
        for mode in ("DCR", "CRD")
    ],
    "Expand": [
        int8(
            "Expand",
            "channels",
            f"{CONV} [op] b = Expand(a, n) y = Conv(b, w)",
            "x 2x8x8x8; v 1x8x3x3; w 4x8x1x1; n =2,8,6,6",
        ),
    ],
    "Flatten": [int8("Flatten", "to a matrix", f"{CONV} [op] b = Flatten(a) y = Gemm(b, w)", f"{IMAGE}; w 288x10")],
    "MaxPool": [
        *(
            between_convs("NhwcMaxPool", name, f"MaxPool <{facts}> (a)")
            for name, facts in (
                ("windows", "kernel_shape=[2,2], strides=[2,2]"),
                ("padded", "kernel_shape=[3,3], pads=[1,1,1,1]"),
                ("dilated", "kernel_shape=[2,2], dilations=[2,2]"),
                ("ceil_mode", "kernel_shape=[3,3], strides=[2,2], ceil_mode=1"),
                ("auto_pad", 'kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_LOWER"'),
            )
        ),
        int8(
            "NhwcMaxPool",
            "1-D",
            f"{CONV} [op] b = MaxPool <kernel_shape=[2]> (a) y = Conv(b, w)",
            "x 2x16x12; v 8x16x3; w 4x8x1",
        ),
    ],
    "ReduceMax": [
        between_products("ReduceMax", "an axis", "ReduceMax <keepdims=0> (a, i)", "i =1"),
        between_products("ReduceMax", "two axes kept", "ReduceMax(a, i)", "i =0,1"),
        between_products("ReduceMax", "axes as attribute", "ReduceMax <axes=[1]> (a)", opset=17),
    ],
    "ReduceMin": [between_products("ReduceMin", "an axis", "ReduceMin <keepdims=0> (a, i)", "i =1")],
    "Reshape": [
        between_products("Reshape", "to a matrix", "Reshape(a, n)", "n =-1,24"),
        between_products("Reshape", "a zero keeps", "Reshape(a, n)", "n =0,-1,12", width=12),
    ],
    "Slice": [
        between_products("Slice", "rows", "Slice(a, from, to, i)", "from =1; to =5; i =1"),
        between_products(
            "Slice", "backwards", "Slice(a, from, to, i, by)", "from =-1; to =-99; i =2; by =-2", width=12
        ),
    ],
    "Split": [
        int8(
            "Split",
            "in two",
            f"{MATMUL} [op] b, c = Split <axis=-1, num_outputs=2> (a) d = MatMul(b, w) e = MatMul(c, w) y = Add(d, e)",
            f"{ROWS}; w 12x12",
        ),
        int8(
            "Split",
            "unequal",
            f"{MATMUL} [op] b, c = Split <axis=-1> (a, n) d = MatMul(b, w) e = MatMul(c, u) y = Add(d, e)",
            f"{ROWS}; n =8,16; w 8x12; u 16x12",
        ),
    ],
    "Squeeze": [
        int8(
            "Squeeze", "an axis", f"{MATMUL} [op] b = Squeeze(a, i) y = MatMul(b, w)", "x 6x1x16; v 16x24; i =1; w 24x8"
        )
    ],
    "Tile": [between_products("Tile", "an axis", "Tile(a, n)", "n =1,2,1")],
    "Transpose": [between_products("Transpose", "two axes", "Transpose <perm=[1,0,2]> (a)")],
    "Unsqueeze": [between_products("Unsqueeze", "in front", "Unsqueeze(a, i)", "i =0")],
    "Gather": [
        between_products("Gather", "rows", "Gather <axis=1> (a, i)", "i =0,3,-1"),
        between_products("Gather", "columns", "Gather <axis=-1> (a, i)", "i =0,1,2,3,-1,-2", width=6),
        int8(
            "Gather",
            "a table",
            "[op] a = Gather(t, xi) y = MatMul(a, w)",
            "t 512x64; xi =3,500,77; w 64x8",
            reads="int8",
        ),
        blocked("GatherBlockQuantized", "in blocks", "[op] y = Gather(t, xi)", "t 20x40; xi =3,19,0"),
        stored("a small table", "[op] y = Gather(t, xi)", "t 20x8; xi =3,19,0", runs="Gather", reads="int8"),
    ],
    "Pad": [
        between_convs("Pad", "zeros", "Pad(a, n)", "n =0,1,0,0,0,1,0,0", channels=10),
        between_convs("Pad", "reflected", 'Pad <mode="reflect"> (a, n)', "n =0,0,1,1,0,0,1,1"),
        between_convs("Pad", "edge", 'Pad <mode="edge"> (a, n)', "n =0,0,1,1,0,0,1,1"),
    ],
    "SpaceToDepth": [between_convs("SpaceToDepth", "blocks", "SpaceToDepth <blocksize=2> (a)", channels=32)],
    "Resize": [
        between_convs("Resize", "nearest", 'Resize <mode="nearest"> (a, , , n)', "n =2,8,12,12"),
        between_convs(
            "Resize",
            "nearest below",
            'Resize <coordinate_transformation_mode="asymmetric", nearest_mode="floor"> (a, , , n)',
            "n =2,8,9,4",
        ),
        behind_conv("Resize", "cubic", 'Resize <mode="cubic"> (a, , , n)', "n =2,8,12,12"),
    ],
    INTERPOLATION: [
        behind_conv(INTERPOLATION, "to a size", 'Resize <mode="linear"> (a, , , n)', "n =2,8,12,12"),
        behind_conv(
            INTERPOLATION,
            "between the corners",
            'Resize <coordinate_transformation_mode="align_corners", mode="linear"> (a, , , n)',
            "n =2,8,9,4",
        ),
    ],
    **{
        op: [between_floats(op, "last axis", "OP <axis=-1> (a)"), between_floats(op, "another axis", "OP <axis=1> (a)")]
        for op in ("Softmax", "LogSoftmax")
    },
    **{
        op: [between_floats(op, "element by element", "OP(a)")]
        for op in "Celu Elu Erf Gelu Mish Selu Softplus Softsign Tanh".split()
    },
    "Sigmoid": [
        between_convs("QLinearSigmoid", "between convolutions", "Sigmoid(a)", place="all"),
        between_products("QLinearSigmoid", "between products", "Sigmoid(a)", place="all"),
        between_floats("Sigmoid", "by rule", "OP(a)"),
    ],
    "HardSigmoid": [
        between_convs("QLinearLeakyRelu", "between convolutions", "HardSigmoid(a)", place="all"),
        between_products("QLinearLeakyRelu", "a sixth", "HardSigmoid <alpha=0.16666667> (a)", place="all"),
        between_products("QLinearLeakyRelu", "steep and low", "HardSigmoid <alpha=3.0, beta=0.2> (a)", place="all"),
        between_floats("HardSigmoid", "by rule", "OP(a)"),
        behind_gate(OPS["HardSigmoid"].slow.text, "falling", "HardSigmoid <alpha=-0.2> (a)"),
    ],
    GATE: [
        *(
            between_convs(
                "QLinearMul",
                name,
                f"Mul({factors})",
                before=f"[gate] s = {gate}",
                place="all",
            )
            for name, gate, factors in (
                ("SiLU", "Sigmoid(a)", "a, s"),
                ("SiLU the other way", "Sigmoid(a)", "s, a"),
                ("hard-swish", "HardSigmoid <alpha=0.16666667> (a)", "a, s"),
            )
        ),
        behind_gate(OPS[GATE].slow.text, "by rule", "Mul(a, s)", "[gate] s = Sigmoid(a)", place="rules"),
    ],
    ATTENTION: [
        between_floats(
            ATTENTION,
            "without heads",
            "MatMul(p, x3)",
            "x2 2x6x24; x3 2x6x24",
            before="t = Transpose <perm=[0,2,1]> (x2) s = MatMul(a, t) p = Softmax <axis=-1> (s)",
        ),
    ],
    GROUP_QUERY: [
        floats(
            OPS[GROUP_QUERY].why.text,
            "all in one tensor",
            "[first] a = MatMul(x, v) l = Constant <value = int32[2] {5, 5}> () n = Constant <value = int32 {6}> ()"
            f"[op] b, k, z = {GROUP_QUERY} <num_heads = 2, kv_num_heads = 1> (a, , , , , l, n)"
            "[last] y = MatMul(b, w)",
            "x 2x6x16; v 16x64; w 32x12",
            y="float[a,b,c]",
        ),
    ],
    FUNCTION: [between_floats(FUNCTION, "Mish", "Mul(a, t)", before="s = Softplus(a) t = Tanh(s)")],
    "HardSwish": [between_convs("QLinearMul", "a gate and a product", "HardSwish(a)", place="rules")],
    "Swish": [
        between_products("QLinearMul", "a gate and a product", "Swish(a)", place="all", opset=24),
        between_floats("Swish", "of another slope", "Swish <alpha=2.0> (a)", opset=24),
    ],
    "PRelu": [between_floats("PRelu", "a slope each", "OP(a, c)", "c 24")],
    SLOPED: [between_floats(SLOPED, "the operator for it", "PRelu(a, c)", "c 6x24")],
    "Relu": [
        floats(
            OPS["Relu"].why.text,
            "behind a norm",
            f"{MATMUL} n = LayerNormalization(a, g) [op] b = Relu(n) y = MatMul(b, w)",
            f"{ROWS}; g 24; w 24x12",
        ),
    ],
    "Clip": [between_floats("Clip", "without zero", "OP(a, low, high)", "low =0.25; high =3.0")],
    "Sub": [between_floats("Sub", "two activations", "OP(a, x2)", "x2 2x6x24")],
    "Div": [between_floats("Div", "by a constant", "OP(h, c)", "c =3.0", before="h = Tanh(a)")],
    "ReduceMean": [between_floats("ReduceMean", "an axis", "OP(a, i)", "i =1")],
    ms("Gelu"): [between_floats(ms("Gelu"), "exact", "OP(a)")],
    ms("BiasGelu"): [between_floats(ms("BiasGelu"), "a bias", "OP(a, c)", "c 24")],
    ms("FastGelu"): [
        between_floats(ms("FastGelu"), "no bias", "OP(a)"),
        between_floats(ms("FastGelu"), "a bias", "OP(a, c)", "c 24"),
    ],
    ms("QuickGelu"): [between_floats(ms("QuickGelu"), "a slope", "OP <alpha=1.702> (a)")],
    "BatchNormalization": [
        floats(
            OPS["BatchNormalization"].why.text,
            "in front, Relu absorbed",
            "n = Exp(s) [op] a = BatchNormalization(x, g, c, m, n) r = Relu(a) y = Conv <pads=[1,1,1,1]> (r, w)",
            "x 2x8x6x6; g 8; c 8; m 8; s 8; w 4x8x1x1",
        ),
    ],
    "GroupNormalization": [
        behind_conv("GroupNormalization", "groups", "GroupNormalization <num_groups=2> (a, g, c)", "g 8; c 8"),
    ],
    GROUP_NORM: [
        behind_conv(GROUP_NORM, "instances", "InstanceNormalization(a, g, c)", "g 8; c 8"),
        floats(
            OPS[GROUP_NORM].why.text,
            "Relu absorbed",
            "[first] n = Conv(x, v) [op] a = InstanceNormalization(n, g, c) r = Relu(a) y = Conv(r, w)",
            f"{IMAGE}; w 4x8x1x1; g 8; c 8",
        ),
    ],
    "InstanceNormalization": [
        behind_conv("InstanceNormalization", "channels", "InstanceNormalization(a, g, c)", "g 8; c 8"),
    ],
    "LayerNormalization": [between_floats("LayerNormalization", "last axis", "OP(a, g, c)", "g 24; c 24")],
    "LpNormalization": [between_floats("LpNormalization", "last axis", "OP(a)")],
    "RMSNormalization": [between_floats("RMSNormalization", "last axis", "OP(a, g)", "g 24", opset=23)],
    "SimplifiedLayerNormalization": [between_floats("SimplifiedLayerNormalization", "last axis", "OP(a, g)", "g 24")],
    ms("EmbedLayerNormalization"): [
        floats(
            OPS[ms("EmbedLayerNormalization")].why.text,
            "two tables",
            f"""r = Reshape(xi, n) i = Cast <to=6> (r) [op] a, m = {ms("EmbedLayerNormalization")}(i, , t, u, , g, c)
            b = Add(a, x) [last] y = MatMul(b, w)""",
            "t 20x16; u 8x16; g 16; c 16; x 2x3x16; w 16x8; xi =3,1,4,1,5,9; n =2,3",
            y="float[2,3,8]",
        ),
    ],
    ms("SkipLayerNormalization"): [
        between_floats(ms("SkipLayerNormalization"), "a skip connection", "OP(a, x2, g, c)", "x2 2x6x24; g 24; c 24"),
    ],
    ms("SkipSimplifiedLayerNormalization"): [
        between_floats(ms("SkipSimplifiedLayerNormalization"), "a skip connection", "OP(a, x2, g)", "x2 2x6x24; g 24"),
    ],
    "Einsum": [
        floats(
            OPS["Einsum"].why.text,
            "a diagonal",
            f'{MATMUL} [op] b = Einsum <equation="bii->bi"> (a) y = MatMul(b, w)',
            "x 2x6x16; v 16x6; w 6x12",
        ),
    ],
    "QuantizeLinear": [already("QuantizeLinear", "r = OP(e, s, z) d = DequantizeLinear(r, s, z)", "x 5x32; w 32x6")],
    "DequantizeLinear": [already("DequantizeLinear", "d = OP(q, s, z)", "x 5x32; w 32x6")],
    "DynamicQuantizeLinear": [
        already("DynamicQuantizeLinear", "r, rs, rz = OP(e) d = DequantizeLinear(r, rs, rz)", "x 5x32; w 32x6"),
    ],
    "ConvInteger": [already("ConvInteger", "i = OP(q, w8, z) d = Cast <to=1> (i)", "x 2x8x6x6; w8 8x8x3x3; w 4x3")],
    "MatMulInteger": [already("MatMulInteger", "i = OP(q, w8, z) d = Cast <to=1> (i)", "x 5x32; w8 32x8; w 8x6")],
    "QLinearConv": [
        already("QLinearConv", f"r = OP(q, s, z, w8, ws, wz, s, z) {TO_FLOAT}", "x 2x8x6x6; w8 8x8x3x3; w 4x3")
    ],
    "QLinearMatMul": [
        already("QLinearMatMul", f"r = OP(q, s, z, w8, ws, wz, s, z) {TO_FLOAT}", "x 5x32; w8 32x8; w 8x6")
    ],
    **{
        ms(op): [already(ms(op), node, of)]
        for op, node, of in (
            ("QGemm", f"r = OP(q, s, z, w8, ws, wz, , s, z) {TO_FLOAT}", "x 5x32; w8 32x8; w 8x6"),
            ("MatMulIntegerToFloat", "d = OP(q, w8, s, ws, z, wz)", "x 5x32; w8 32x8; w 8x6"),
            ("DynamicQuantizeMatMul", "d = OP(e, w8, ws, wz)", "x 5x32; w8 32x8; w 8x6"),
            (
                "DynamicQuantizeLSTM",
                "l, d = OP <hidden_size=8> (e, w8, r8, , , , , , gs, gz, gs, gz)",
                "x 7x2x24; w8 1x24x32; r8 1x8x32; w 8x6",
            ),
            ("QAttention", "d = OP <num_heads=2> (q, w8, c, s, ws, , z, wz)", "x 2x5x8; w8 8x24; c 24; w 8x6"),
            ("QLinearAdd", f"r = OP(q, s, z, q, s, z, s, z) {TO_FLOAT}", "x 5x32; w 32x6"),
            ("QLinearMul", f"r = OP(q, s, z, q, s, z, s, z) {TO_FLOAT}", "x 5x32; w 32x6"),
            ("QLinearAveragePool", f"r = OP <kernel_shape=[3,3]> (q, s, z, s, z) {TO_FLOAT}", "x 2x8x6x6; w 4x3"),
            ("QLinearGlobalAveragePool", f"r = OP(q, s, z, s, z) {TO_FLOAT}", "x 2x8x6x6; w 1x3"),
            ("QLinearLeakyRelu", f"r = OP <alpha=0.1> (q, s, z, s, z) {TO_FLOAT}", "x 5x32; w 32x6"),
            ("QLinearConcat", f"r = OP <axis=1> (s, z, q, s, z, q, s, z) {TO_FLOAT}", "x 5x32; w 64x6"),
            ("QLinearSigmoid", "r = OP(q, s, z, ps, pz) d = DequantizeLinear(r, ps, pz)", "x 5x32; w 32x6"),
            (
                "QLinearSoftmax",
                "r = OP <axis=-1, opset=13> (q, s, z, ps, pz) d = DequantizeLinear(r, ps, pz)",
                "x 5x32; w 32x6",
            ),
            ("QLinearWhere", f"r = OP(m, q, s, z, q, s, z, s, z) {TO_FLOAT}", "x 5x32; w 32x6"),
        )
    },
    ms("MatMulNBits"): [
        already_in_blocks(
            "MatMulNBits",
            "[op] d = OP <K=32, N=8, bits=8, block_size=32, accuracy_level=4> (x, codes, bs)",
            "x 5x32; w 8x6",
        )
    ],
    ms("GatherBlockQuantized"): [
        already_in_blocks(
            "GatherBlockQuantized",
            "[op] d = OP <bits=8, block_size=32, gather_axis=0, quantize_axis=1> (codes, xi, bs)",
            "xi =3,0,7; w 32x6",
        )
    ],
    "If": [
        inside(
            "If",
            "QLinearConv",
            "two branches",
            """m = ReduceMean <keepdims=0> (x) low = Less(m, zero)
            [op] y = If <then_branch = one () => (float[2,8,6,6] p) { p = Conv(x, v) },
                         else_branch = two () => (float[2,8,6,6] q) { c = Conv(x, w) q = Relu(c) }> (low)""",
            f"{IMAGE}; w 8x8x3x3; zero =0.0",
        ),
    ],
    "Loop": [
        inside(
            "Loop",
            "MatMulIntegerToFloat",
            "a state",
            """four = Constant <value_int=4> () yes = Equal(four, four)
            [op] last, y = Loop <body = step (int64 i, bool going, float[5,16] h)
                                     => (bool on, float[5,16] n, float[5,16] each)
                { on = Identity(going) n = Neg(h) each = MatMul(n, w) }> (four, yes, x)""",
            "x 5x16; w 16x16",
        ),
    ],
    "Scan": [
        inside(
            "Scan",
            "MatMulIntegerToFloat",
            "over time",
            """[op] last, y = Scan <num_scan_inputs=1, body = step (float[5,16] h, float[5,16] t)
                                     => (float[5,16] n, float[5,16] each)
                { p = MatMul(t, w) a = Add(p, h) n = Tanh(a) each = Identity(n) }> (x, x2)""",
            "x 5x16; x2 7x5x16; w 16x16",
        ),
    ],
}


def test_every_row_has_examples_and_every_example_a_row() -> None:
    assert EXAMPLES.keys() == OPS.keys()
    assert all(EXAMPLES.values())


def claimed(row: Op) -> set[Kernel]:
    return {kernel for kernel in (row.u8, row.u8_float, row.dynamic, row.blocks) if kernel is not None}


def skip_missing(row: str) -> None:
    """Skip what this version of the runtime cannot show."""
    missing = sorted(name for _, name in claimed(OPS[row]) - uint8_kernels())
    if missing:
        pytest.skip(f"the installed runtime has no {', '.join(missing)}")


@pytest.mark.parametrize("row", sorted(OPS))
def test_every_claim_has_an_example(row: str) -> None:
    skip_missing(row)
    op, shown = OPS[row], {example.runs.removeprefix("Nhwc") for example in EXAMPLES[row]}
    assert {name for _, name in claimed(op)} <= shown
    assert not op.absorbs or any("absorbed" in example.name for example in EXAMPLES[row])
    assert not op.stores or any(
        example.strategy is Strategy.WEIGHT or "table" in example.name for example in EXAMPLES[row]
    )


def drawn(given: Given, random: np.random.Generator, *, weight: bool) -> Array:
    """Return normal values of a shape, or the array that was given; weights keep the power of what they multiply."""
    if isinstance(given, np.ndarray):
        return given
    values = random.standard_normal(given)
    terms = {1: 10, 2: max(given, default=1)}.get(len(given), int(np.prod(given[1:])))
    return np.asarray(values * (terms**-0.5 if weight else 1.0), np.float32)


def declared(given: Given) -> str:
    """Return the type of an input in ONNX text."""
    shape, dtype = (given.shape, given.dtype.name) if isinstance(given, np.ndarray) else (given, "float")
    return f"{dtype}[{','.join(map(str, shape))}]"


def build(example: Example) -> tuple[onnx.ModelProto, list[Feed]]:
    """Return the model of an example and feeds of normal values."""
    random = np.random.default_rng(11)
    inputs = {name: given for name, given in example.tensors.items() if name[0] == "x"}
    typed = ", ".join(f"{declared(given)} {name}" for name, given in inputs.items())
    head = f'<ir_version: 10, opset_import: ["" : {example.opset}, "{MS}" : 1]>'
    model = onnx.parser.parse_model(f"{head}\nexample ({typed}) => ({example.y} y) {{ {example.body} }}")
    for name, given in example.tensors.items():
        if name not in inputs:
            model.graph.initializer.append(numpy_helper.from_array(drawn(given, random, weight=True), name))
    model = onnx.shape_inference.infer_shapes(model)  # for the type of y
    del model.graph.value_info[:]
    feeds = [{name: drawn(given, random, weight=False) for name, given in inputs.items()} for _ in range(SAMPLES)]
    return model, feeds


@dataclass(frozen=True)
class Made:
    """An example, quantized."""

    example: Example
    model: onnx.ModelProto
    feeds: list[Feed]
    output: Path
    result: Result


def make(example: Example, folder: Path, **asked: Any) -> Made:
    """Quantize an example."""
    model, feeds = build(example)
    onnx.save(model, folder / "float.onnx")
    strategy = Strategy.DYNAMIC if example.dynamic else Strategy.AUTO
    by_node = {} if example.strategy is Strategy.AUTO else {"op": example.strategy}
    settled = {
        "force_int8": True,
        "seconds": 0.0,
        "effort": "low",
        "place": example.place,
        "selection": Selection(strategy=strategy, strategies=by_node),
    }
    options = Options(**{**settled, **asked})
    result = quantize_model(folder / "float.onnx", feeds, folder / "int8.onnx", options)
    return Made(example, model, feeds, folder / "int8.onnx", result)


def session(path: Path, *, optimize: bool = True, profile: str = "") -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def outputs(path: Path, feeds: list[Feed], *, optimize: bool = True) -> Array:
    """Return the values of the first output over all feeds."""
    loaded = session(path, optimize=optimize)
    return np.concatenate([np.ravel(loaded.run(None, feed)[0]) for feed in feeds]).astype(np.float64)


def kernels(path: Path, feed: Feed, folder: Path) -> set[tuple[str, str]]:
    """Return (operator, element type) of every kernel that runs, with the types of its inputs that are no scalars."""
    loaded = session(path, profile=str(folder / "profile"))
    loaded.run(None, feed)
    events = json.loads(Path(loaded.end_profiling()).read_text())
    ran = [event["args"] for event in events if event["name"].endswith("_kernel_time")]
    return {(a["op_name"], t) for a in ran for entry in a["input_type_shape"] for t, shape in entry.items() if shape}


# of each row the first example runs in `make test`: each takes a sixth of a second
def library_for(row: str) -> list[pytest.MarkDecorator]:
    """Return the mark of a row that has only a native operator."""
    return [needs_library] if OPS[row].native else []


ALL = [
    pytest.param(row, each, id=f"{row}: {each.name}", marks=[pytest.mark.slow] * bool(place) + library_for(row))
    for row, examples in EXAMPLES.items()
    for place, each in enumerate(examples)
]


def known(node: onnx.NodeProto) -> bool:
    """Whether onnx has the operator, if it stands in onnx's domain: the runtime has some more there."""
    return bool(node.domain) or onnx.defs.has(node.op_type)


def check(made: Made, allowed_error: Allowed, **asked: str) -> None:
    """Check that the output is valid, loads, and is as near to the float model as eight bits allow.

    The runtime's fused kernels round on their own, once where the graph as it is written rounds: the same holds for
    the two ways to run the output.
    """
    assert not made.result.why_not
    if all(known(node) for node in made.model.graph.node):
        onnx.checker.check_model(onnx.load(made.output), full_check=True)
    exact = outputs(made.output.with_name("float.onnx"), made.feeds, optimize=False)
    fused, plain = (outputs(made.output, made.feeds, optimize=each) for each in (True, False))
    allowed = allowed_error(made.model, made.feeds, **asked)["y"]
    assert np.sum((fused - exact) ** 2) <= allowed
    assert np.sum((plain - exact) ** 2) <= allowed
    assert np.sum((fused - plain) ** 2) <= allowed


@pytest.mark.parametrize(("row", "example"), ALL)
def test_example(row: str, example: Example, tmp_path: Path, allowed_error: Allowed) -> None:
    skip_missing(row)
    made = make(example, tmp_path)
    floats = {node.name: node.reason for node in made.result.float_nodes}
    if example.why:
        assert any(example.why in reason for name, reason in floats.items() if name.startswith("op"))
    else:
        assert "op" not in floats
    assert not {"first", "last"}.intersection(floats)
    if example.runs:
        assert (example.runs, example.reads) in kernels(made.output, made.feeds[0], tmp_path)
    check(made, allowed_error)


VARIANTS: dict[str, dict[str, Any]] = {
    "qoperator": {"format": "qoperator"},
    "s8 activations": {"scheme": Scheme(activation="s8")},
    "u8 weights": {"scheme": Scheme(weight="u8")},
    "symmetric": {"scheme": Scheme(symmetric=True)},
    "avx2": {"isa": "avx2"},
    "wherever it can be": {"place": "all"},
    "wherever it can be, avx2": {"place": "all", "isa": "avx2"},
}


VARIED = [
    pytest.param(variant, row, example, id=f"{variant}-{row}: {example.name}")
    for variant in VARIANTS
    for row, examples in EXAMPLES.items()
    for example in examples
    if row != "Scan" or "place" not in VARIANTS[variant]  # of tensors in bodies the allowed error knows nothing
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "row", "example"), VARIED)
def test_example_with_options(variant: str, row: str, example: Example, tmp_path: Path, allowed_error: Allowed) -> None:
    made = make(example, tmp_path, **VARIANTS[variant])
    check(made, allowed_error, isa=VARIANTS[variant].get("isa", "auto"))


PRODUCTS = {
    "MatMul": int8("", "MatMul", "[op] y = MatMul(x, w)", "x 5x32; w 32x24"),
    "Gemm": int8("", "Gemm", "[op] y = Gemm(x, w, c)", "x 5x32; w 32x24; c 24"),
    "Gemm transB": int8("", "Gemm transB", "[op] y = Gemm <transB=1> (x, w, c)", "x 5x32; w 24x32; c 24"),
}
FORMS = {
    Strategy.STATIC: "u8->u8",
    Strategy.STATIC_FLOAT: "u8->float",
    Strategy.DYNAMIC: "dynamic",
    Strategy.BLOCK: "block",
    Strategy.WEIGHT: "weight-only",
}


@pytest.mark.parametrize("product_", PRODUCTS)
@pytest.mark.parametrize("strategy", FORMS)
@pytest.mark.parametrize("by_node", [False, True], ids=["for all", "by node"])
def test_strategy(product_: str, strategy: Strategy, by_node: bool, tmp_path: Path, allowed_error: Allowed) -> None:
    selection = Selection(strategies={"op": strategy}) if by_node else Selection(strategy=strategy)
    made = make(PRODUCTS[product_], tmp_path, selection=selection)
    assert made.result.forms == {FORMS[strategy]: 1}
    check(made, allowed_error)


TWO = int8("", "two", "[first] a = MatMul(x, v) [op] y = MatMul(a, w)", "x 5x32; v 32x24; w 24x8")


def test_strategy_of_a_node_wins(tmp_path: Path, allowed_error: Allowed) -> None:
    selection = Selection(strategy=Strategy.DYNAMIC, strategies={"op": Strategy.WEIGHT})
    made = make(TWO, tmp_path, selection=selection)
    assert made.result.forms == {"dynamic": 1, "weight-only": 1}
    check(made, allowed_error)


@pytest.mark.parametrize("product_", PRODUCTS)
@pytest.mark.parametrize("strategy", [Strategy.DYNAMIC, Strategy.BLOCK, Strategy.WEIGHT])
def test_strategy_without_data(product_: str, strategy: Strategy, tmp_path: Path, allowed_error: Allowed) -> None:
    model, feeds = build(PRODUCTS[product_])
    onnx.save(model, tmp_path / "float.onnx")
    options = Options(selection=Selection(strategy=strategy), force_int8=True, seconds=0.0)
    result = quantize_model(tmp_path / "float.onnx", None, tmp_path / "int8.onnx", options)
    assert result.forms == {FORMS[strategy]: 1}
    assert result.data.startswith("random inputs")
    check(Made(PRODUCTS[product_], model, feeds, tmp_path / "int8.onnx", result), allowed_error)


def test_without_data_nothing_gets_static_ranges(tmp_path: Path) -> None:
    example = int8("", "mixed", "[conv] a = Conv(x, v) [op] y = MatMul(a, w)", f"{IMAGE}; w 6x24")
    onnx.save(build(example)[0], tmp_path / "float.onnx")
    options = Options(selection=Selection(strategy=Strategy.DYNAMIC), force_int8=True, seconds=0.0)
    result = quantize_model(tmp_path / "float.onnx", None, tmp_path / "int8.onnx", options)
    assert result.forms == {"dynamic": 1}
    assert [(node.name, node.reason) for node in result.float_nodes] == [("conv", "no ranges without data")]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Write two matrix products and a Relu, with data beside them."""
    relu = replace(TWO, body=TWO.body.replace("y =", "b =") + " [relu] y = Relu(b)")
    model, feeds = build(relu)
    onnx.save(model, tmp_path / "two.onnx")
    np.savez(tmp_path / "data.npz", x=np.concatenate([feed["x"] for feed in feeds]))
    return tmp_path / "two.onnx"


def invoke(*arguments: object) -> CliResult:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")


def test_dynamic_on_the_command_line(two: Path) -> None:
    found = invoke("quantize", two, "--dynamic", "--force-int8", "-o", two.with_name("out.onnx"), "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["forms"] == {"dynamic": 2}


def test_strategies_on_the_command_line(two: Path) -> None:
    output, data = two.with_name("out.onnx"), two.with_name("data.npz")
    strategies = "static-float,op=weight-only"
    found = invoke("quantize", two, "--data", data, "--strategy", strategies, "--force-int8", "-o", output, "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["forms"] == {"u8->float": 1, "weight-only": 1}


@pytest.mark.slow
def test_a_transformer_in_blocks(tmp_path: Path) -> None:
    """Its forms, its kernels, the round trip of its plan, and nothing is left to quantize."""
    first, again, third = (tmp_path / f"{name}.onnx" for name in ("first", "again", "third"))
    options = Options(selection=Selection(strategy=Strategy.BLOCK), force_int8=True, seconds=0.0, place="rules")
    result = quantize_model("sample_models/digits_transformer.onnx", None, first, options)
    assert result.forms == {"block": 25}
    assert result.kernels["MatMulNBits"] == 25
    plan = first.with_suffix(".plan.json")
    quantize_model("sample_models/digits_transformer.onnx", None, again, replace(options, plan=plan))
    assert again.with_suffix(".plan.json").read_bytes() == plan.read_bytes()
    found = invoke("inspect", first, "--json")
    assert json.loads(found.stdout)["products"] == {"int8": 25, "weight-only": 0, "float": 9}
    left = quantize_model(first, None, third, replace(options, force_int8=False))
    assert left.why_not.startswith("nothing more in this model can become int8")
    reasons = [node.reason for node in left.float_nodes if node.operator == "MatMulNBits"]
    assert reasons == ["its weights are integers in blocks already"] * 25


def test_four_bits_on_the_command_line(two: Path) -> None:
    output = two.with_name("out.onnx")
    asked = ["--strategy", "block", "--block-bits", "4", "--block-size", "16", "--force-int8", "--json"]
    found = invoke("quantize", two, *asked, "-o", output)
    assert found.exit_code == 0, found.stderr
    codes = [t for t in onnx.load(output).graph.initializer if t.name.endswith("/codes")]
    assert [list(t.dims) for t in codes] == [[24, 2, 8], [8, 2, 8]]


REFUSED = {
    "blocks for other runtimes": (
        ["--portable", "--strategy", "block"],
        "portable does not go with the strategy block: only ONNX Runtime has MatMulNBits",
    ),
    "bits without blocks": (["--dynamic", "--block-bits", "4"], "would do nothing without the strategy block"),
    "bits without a kernel": (["--strategy", "block", "--block-bits", "5"], "--block-bits 5: there are 4, 8"),
    "unknown strategy": (
        ["--dynamic", "--strategy", "op=dynamc"],
        "no strategy named 'dynamc'; did you mean 'dynamic'",
    ),
    "unknown node": (["--dynamic", "--strategy", "opp=dynamic"], "no node named 'opp'; did you mean 'op'"),
    "node without strategies": (
        ["--dynamic", "--strategy", "relu=dynamic"],
        "node 'relu': a Relu cannot be dynamic",
    ),
    "two for all": (["--dynamic", "--strategy", "static"], "one strategy for all, not 2: dynamic, static"),
    "no data": ([], "give --data SRC"),
    "no data for one node": (["--strategy", "op=dynamic"], "give --data SRC"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_strategies(case: str, two: Path) -> None:
    arguments, message = REFUSED[case]
    output = two.with_name("out.onnx")
    found = invoke("quantize", two, *arguments, "-o", output)
    assert found.exit_code == 2
    assert found.stdout == ""
    assert message in found.stderr.splitlines()[-1]
    assert not output.exists()


def test_ops_lists_every_row() -> None:
    found = invoke("ops", "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout).keys() == OPS.keys()


@pytest.mark.parametrize("row", ["Conv", "Gemm", "MatMul", "ConvTranspose", "LSTM", "Softmax", f"{MS}.Attention"])
def test_ops_tells_of_one_row(row: str) -> None:
    skip_missing(row)
    facts = json.loads(invoke("ops", row, "--json").stdout)[row]
    op = OPS[row]
    assert {kernel.rpartition(".")[2] for kernel in facts["kernels"].values()} == {name for _, name in claimed(op)}
    assert facts["missing"] == []
    assert facts["why"] == op.why.text
    assert facts["absorbs"] == sorted(op.absorbs)


def test_ops_prints_a_table() -> None:
    found = CliRunner().invoke(main, ["ops", "LSTM"], env={"COLUMNS": "200"})
    assert found.exit_code == 0
    assert "DynamicQuantizeLSTM" in found.stdout
    assert OPS["LSTM"].why.text in found.stdout


def test_ops_knows_near_names() -> None:
    found = invoke("ops", "Matmul")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "no operator in the table named 'Matmul'; did you mean 'MatMul'" in found.stderr


def test_ops_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "requant.quantize.tools.inspect.operators.uint8_kernels", lambda: frozenset({("", "QLinearMatMul")})
    )
    (facts,) = operators("MatMul")
    assert facts.kernels == {"u8->u8": "QLinearMatMul"}
    missing = ("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits")
    assert facts.missing == tuple(f"{MS}.{name}" for name in missing)
