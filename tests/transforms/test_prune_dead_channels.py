"""Channels that are constant, or that nothing reads, go from weights and readers; results stay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from requant.transforms.graphs.queries import constant
from requant.transforms.parts.channel_numbers import Classes
from requant.transforms.prune_dead_channels import BLOCK, prune_dead_channels

COUNTS = [17, 33, 40]


@dataclass
class Net:
    """A network with integer weights, so that sums are exact in any order, under construction."""

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"{op}_{name}", **attributes))
        return name

    def constant(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def kernel(self, count: int, channels: int, size: int, dead: float) -> str:
        """At most two weights of 1 or -1 per output channel, none in dead ones."""
        array = np.zeros((count, channels * size**2))
        for row in array[self.rng.random(count) >= dead]:
            row[self.rng.integers(0, len(row), 2)] = self.rng.choice([-1, 1])
        return self.constant(array.reshape(count, channels, size, size))

    def reader(self, source: str, channels: int, size: int, pad: int) -> str:
        """A Conv that reads about half of the channels."""
        array = self.rng.integers(-1, 2, (2, channels, size, size)) * (self.rng.random((channels, 1, 1)) < 0.5)
        return self.add("Conv", source, self.constant(array), pads=[pad] * 4)

    def conv(self, source: str, channels: int, count: int, size: int = 1, *, dead: float = 0.6, pad: int = 0) -> str:
        bias = self.constant(self.rng.integers(-1, 2, count))
        return self.add("Conv", source, self.kernel(count, channels, size, dead), bias, pads=[pad] * 4)

    def deep(self, source: str, channels: int) -> str:
        bias = self.constant(self.rng.integers(-1, 2, channels))
        kernel = self.kernel(channels, 1, 3, 0.5)
        return self.add("Conv", source, kernel, bias, group=channels, pads=[1] * 4)

    def between(self, kind: str, source: str, channels: int) -> str:
        other = self.rng.integers(-1, 3, (channels, 1, 1))
        match kind:
            case "PRelu" | "Mul" | "Add":
                return self.add(kind, source, self.constant(other))
            case "MaxPool" | "AveragePool":
                attributes = {} if kind == "MaxPool" else {"count_include_pad": 1}
                return self.add(kind, source, kernel_shape=[4, 4], pads=[2] * 4, **attributes)
            case "deep":
                return self.deep(source, channels)
            case "residual":
                return self.add("Add", source, self.conv(source, channels, channels))
            case "gate":
                gate = self.conv(self.add("GlobalMaxPool", source), channels, channels)
                return self.add(
                    "Mul", source, self.add("Clip", gate, self.constant(np.array(0)), self.constant(np.array(1)))
                )
            case "Resize":
                return self.add("Resize", source, "", self.constant(np.array([1, 1, 2, 2])), mode="nearest")
        return self.add(kind, source)

    def proto(self, *outputs: str) -> onnx.ModelProto:
        given_input = helper.make_tensor_value_info("x", 1, [1, 3, 4, 4])
        results = [helper.make_tensor_value_info(name, 1, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", [given_input], results, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


BETWEEN = ["Relu", "Abs", "PRelu", "Mul", "Add", "MaxPool", "AveragePool", "deep", "residual", "gate", "Resize"]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from(COUNTS),
    between=st.lists(st.sampled_from(BETWEEN), max_size=4),
    joined=st.booleans(),
    end=st.sampled_from(["conv", "padded", "turned", "gemm", "matmul", "output"]),
)
def test_results_stay(seed: int, count: int, between: list[str], joined: bool, end: str) -> None:
    net = Net(np.random.default_rng(seed))
    last = net.conv("x", 3, count, 3, pad=1)
    for kind in between:
        last = net.between(kind, last, count)
    channels, extra = count, []
    if joined:
        other = net.conv("x", 3, 33, dead=0.8)
        side = net.add("Concat", net.add("GlobalMaxPool", last), net.add("GlobalMaxPool", other), axis=1)
        extra, last, channels = [net.reader(last, count, 1, 0)], side, count + 33
    results = {
        "conv": lambda: net.reader(last, channels, 1, 0),
        "padded": lambda: net.reader(last, channels, 3, 1),
        "turned": lambda: net.add("ConvTranspose", last, net.kernel(channels, 2, 2, 0.2)),
        "gemm": lambda: net.add(
            "Gemm",
            net.add("Flatten", net.add("GlobalMaxPool", last)),
            net.constant(net.rng.integers(-1, 2, (channels, 2))),
            net.constant(np.array([3])),
            alpha=2.0,
            beta=0.5,
        ),
        "matmul": lambda: net.add(
            "MatMul",
            net.add("Flatten", net.add("GlobalMaxPool", last)),
            net.constant(net.rng.integers(-1, 2, (channels, 2))),
        ),
        "output": lambda: last,
    }
    proto = net.proto(results[end](), *extra)
    _compare(proto, net.rng)


def _compare(proto: onnx.ModelProto, rng: np.random.Generator) -> ir.Model:
    """Check that results and shapes stay, and that a second run finds nothing; return the pruned model."""
    made = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    before = {node.name: [value.name for value in node.outputs] for node in made.graph}
    prune_dead_channels(made)
    assert prune_dead_channels(made).applied == 0
    assert {node.name: [value.name for value in node.outputs] for node in made.graph} == before
    pruned = ir.to_proto(made)
    onnx.checker.check_model(pruned, full_check=True)  # the stored shapes agree with inferred ones
    feed = {"x": rng.integers(-2, 3, (1, 3, 4, 4)).astype(np.float32)}
    for old, new in zip(
        ReferenceEvaluator(proto).run(None, feed), ReferenceEvaluator(pruned).run(None, feed), strict=True
    ):
        np.testing.assert_array_equal(old, new)
    return made


@pytest.mark.parametrize(
    ("count", "dead", "kept"),
    [
        (17, 1, 16),
        (17, 17, 16),
        (16, 15, 16),
        (64, 15, 64),
        (64, 16, 48),
        (64, 31, 48),
        (72, 8, 64),
        (40, 7, 40),
        (40, 8, 32),
    ],
)
def test_whole_blocks_remain(count: int, dead: int, kept: int) -> None:
    net = Net(np.random.default_rng(1))
    kernel = np.ones((count, 3, 1, 1))
    kernel[:dead] = 0
    first = net.add("Conv", "x", net.constant(kernel))
    reader = net.constant(np.ones((1, count, 1, 1)))
    made = _compare(net.proto(net.add("Conv", first, reader)), net.rng)
    weights = made.graph.node(0).inputs[1]
    assert weights is not None
    assert weights.shape is not None
    assert (weights.shape[0], weights.name) == (kept, "w0")
    assert kept % BLOCK == 0 or kept == count


def test_a_weight_that_others_read_is_copied() -> None:
    net = Net(np.random.default_rng(1))
    kernel = np.ones((17, 3, 1, 1))
    kernel[5] = 0
    shared = net.constant(kernel)
    inner, outer = net.add("Conv", "x", shared), net.add("Conv", "x", shared)
    reader = net.constant(np.ones((1, 17, 1, 1)))
    made = _compare(net.proto(net.add("Conv", inner, reader), outer), net.rng)
    weights = [constant(made.graph.node(index).inputs[1]) for index in range(2)]
    assert [len(each.numpy()) for each in weights if each is not None] == [16, 17]


def test_what_a_body_reads_stays() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[1,1,2,2] x, bool c) => (float[1,1,2,2] y, float[1,17,2,2] z) {
        a = Conv(x, w)
        y = Conv(a, v)
        z = If(c) <
            then_branch = then () => (float[1,17,2,2] t) { t = Relu(a) },
            else_branch = else () => (float[1,17,2,2] e) { e = Abs(a) }
        >
    }"""
    proto = onnx.parser.parse_model(text)
    w, v = np.ones((17, 1, 1, 1), np.float32), np.ones((1, 17, 1, 1), np.float32)
    w[3] = 0
    proto.graph.initializer.extend([numpy_helper.from_array(w, "w"), numpy_helper.from_array(v, "v")])
    change = prune_dead_channels(ir.from_proto(proto))
    assert str(change) == "0 applied, 1 read-otherwise"


def test_classes_that_occur_in_the_same_tensors_are_a_bundle() -> None:
    classes = Classes()
    first, second = classes.new(3), classes.new(3)
    classes.join(first[:2], second[1:])
    tensors = [first, second, np.concatenate([first, classes.new(1)])]
    found = {tuple(sorted(map(int, bundle))) for bundle in classes.bundles(tensors)}
    assert found == {(0, 1), (2,), (3,), (6,)}
