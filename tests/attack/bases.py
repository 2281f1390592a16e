"""Small valid models that the attacks damage, and data for them. Everything is a pure function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
SAMPLES = 6
SAMPLE_MODELS = Path(__file__).parents[2] / "sample_models"

_value = helper.make_tensor_value_info


def weights(name: str, *shape: int, seed: int = 0) -> onnx.TensorProto:
    """Return normally distributed float32 weights."""
    values = np.random.default_rng([seed, *name.encode()]).standard_normal(shape).astype(np.float32)
    return numpy_helper.from_array(values, name)


def tensor(name: str, values: Any, dtype: Any = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def texts(name: str, *values: bytes, dims: Sequence[int]) -> onnx.TensorProto:
    """Return a tensor of texts, which may be no UTF-8."""
    return onnx.TensorProto(name=name, data_type=onnx.TensorProto.STRING, dims=dims, string_data=values)


def build(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[onnx.TensorProto] = (),
    **settings: Any,
) -> onnx.ModelProto:
    """Return a model of opset 21 and IR version 10."""
    settings = {"opset_imports": [helper.make_opsetid("", 21)], "ir_version": 10, **settings}
    graph = helper.make_graph(list(nodes), "attacked", list(inputs), list(outputs), list(constants))
    return helper.make_model(graph, **settings)


def mlp() -> onnx.ModelProto:
    """Return two linear layers of x (N, 16)."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], "first"),
        helper.make_node("Add", ["h", "b1"], ["a"], "bias"),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["y"], "second"),
    ]
    constants = [weights("w1", 16, 32), weights("b1", 32), weights("w2", 32, 8), weights("b2", 8)]
    return build(nodes, [_value("x", FLOAT, ["N", 16])], [_value("y", FLOAT, ["N", 8])], constants)


def conv() -> onnx.ModelProto:
    """Return a convolution with batch normalization, a pooling and a linear layer of x (1, 3, 8, 8)."""
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], "conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "s", "s", "v"], ["n"], "norm"),
        helper.make_node("Relu", ["n"], ["r"], "relu"),
        helper.make_node("MaxPool", ["r"], ["p"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "w", "b"], ["y"], "head"),
    ]
    variance = numpy_helper.from_array(np.ones(8, np.float32), "v")
    constants = [weights("k", 8, 3, 3, 3), weights("s", 8), variance, weights("w", 128, 4), weights("b", 4)]
    return build(nodes, [_value("x", FLOAT, [1, 3, 8, 8])], [_value("y", FLOAT, [1, 4])], constants)


def branches() -> onnx.ModelProto:
    """Return an If whose branches hold a linear layer each."""
    bodies = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("MatMul", ["x", f"w_{name}"], [f"{name}_y"], f"{name}_product")],
            name,
            [],
            [_value(f"{name}_y", FLOAT, ["N", 8])],
            [weights(f"w_{name}", 16, 8)],
        )
        for name in ("then", "else")
    }
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], "mean", keepdims=0),
        helper.make_node("Greater", ["m", "zero"], ["c"], "greater"),
        helper.make_node("If", ["c"], ["i"], "choice", **bodies),
        helper.make_node("Relu", ["i"], ["y"], "relu"),
    ]
    constants = [tensor("zero", 0, np.float32)]
    return build(nodes, [_value("x", FLOAT, ["N", 16])], [_value("y", FLOAT, ["N", 8])], constants)


def loop() -> onnx.ModelProto:
    """Return a Loop of three steps around a linear layer."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state", "w"], ["next"], "step_product"),
            helper.make_node("Identity", ["going"], ["going_out"], "keep"),
        ],
        "body",
        [_value("step", INT64, []), _value("going", BOOL, []), _value("state", FLOAT, ["N", 16])],
        [_value("going_out", BOOL, []), _value("next", FLOAT, ["N", 16])],
    )
    nodes = [
        helper.make_node("Loop", ["three", "yes", "x"], ["l"], "loop", body=body),
        helper.make_node("Relu", ["l"], ["y"], "relu"),
    ]
    constants = [tensor("three", 3), tensor("yes", True, np.bool_), weights("w", 16, 16)]
    return build(nodes, [_value("x", FLOAT, ["N", 16])], [_value("y", FLOAT, ["N", 16])], constants)


def scan() -> onnx.ModelProto:
    """Return a Scan over the first axis of x (N, 16) that sums, and a linear layer."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["sum", "row"], ["sum_out"], "add"),
            helper.make_node("Identity", ["sum_out"], ["row_out"], "copy"),
        ],
        "body",
        [_value("sum", FLOAT, [16]), _value("row", FLOAT, [16])],
        [_value("sum_out", FLOAT, [16]), _value("row_out", FLOAT, [16])],
    )
    nodes = [
        helper.make_node("Scan", ["start", "x"], ["last", "rows"], "scan", body=body, num_scan_inputs=1),
        helper.make_node("MatMul", ["rows", "w"], ["y"], "product"),
    ]
    constants = [tensor("start", np.zeros(16), np.float32), weights("w", 16, 8)]
    return build(nodes, [_value("x", FLOAT, ["N", 16])], [_value("y", FLOAT, ["N", 8])], constants)


def functions() -> onnx.ModelProto:
    """Return a model with a local function that another local function calls."""
    opset = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    inner = helper.make_function(
        "own", "Dense", ["a", "k"], ["b"], [helper.make_node("MatMul", ["a", "k"], ["b"], "product")], opset
    )
    outer = helper.make_function(
        "own",
        "Layer",
        ["a", "k"],
        ["c"],
        [
            helper.make_node("Dense", ["a", "k"], ["b"], "inner", domain="own"),
            helper.make_node("Relu", ["b"], ["c"], "relu"),
        ],
        opset,
    )
    nodes = [
        helper.make_node("Layer", ["x", "w1"], ["h"], "one", domain="own"),
        helper.make_node("Dense", ["h", "w2"], ["y"], "two", domain="own"),
    ]
    return build(
        nodes,
        [_value("x", FLOAT, ["N", 16])],
        [_value("y", FLOAT, ["N", 8])],
        [weights("w1", 16, 16), weights("w2", 16, 8)],
        functions=[inner, outer],
        opset_imports=opset,
    )


def qdq() -> onnx.ModelProto:
    """Return a linear layer with QuantizeLinear and DequantizeLinear around it, and int8 weights."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zx"], ["qx"], "quantize"),
        helper.make_node("DequantizeLinear", ["qx", "sx", "zx"], ["dx"], "dequantize"),
        helper.make_node("DequantizeLinear", ["w", "sw", "zw"], ["dw"], "weights", axis=1),
        helper.make_node("MatMul", ["dx", "dw"], ["h"], "product"),
        helper.make_node("QuantizeLinear", ["h", "sy", "zx"], ["qy"], "quantize_y"),
        helper.make_node("DequantizeLinear", ["qy", "sy", "zx"], ["y"], "dequantize_y"),
    ]
    stored = np.random.default_rng(1).integers(-127, 128, (16, 8)).astype(np.int8)
    constants = [
        tensor("sx", 0.03, np.float32),
        tensor("zx", 128, np.uint8),
        tensor("w", stored, np.int8),
        tensor("sw", np.full(8, 0.01), np.float32),
        tensor("zw", np.zeros(8), np.int8),
        tensor("sy", 0.2, np.float32),
    ]
    return build(nodes, [_value("x", FLOAT, ["N", 16])], [_value("y", FLOAT, ["N", 8])], constants)


def shapes() -> onnx.ModelProto:
    """Return a linear layer between reshapes whose shapes are computed from Shape, as exporters write them."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], "shape"),
        helper.make_node("Gather", ["s", "zero"], ["n"], "batch"),
        helper.make_node("Unsqueeze", ["n", "axes"], ["u"], "unsqueeze"),
        helper.make_node("Concat", ["u", "rest"], ["t"], "target", axis=0),
        helper.make_node("Reshape", ["x", "t"], ["r"], "reshape"),
        helper.make_node("MatMul", ["r", "w"], ["h"], "product"),
        helper.make_node("Softmax", ["h"], ["y"], "softmax"),
    ]
    constants = [tensor("zero", 0), tensor("axes", [0]), tensor("rest", [4, 4]), weights("w", 4, 4)]
    return build(nodes, [_value("x", FLOAT, ["N", 16])], [_value("y", FLOAT, ["N", 4, 4])], constants)


BASES: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp": mlp,
    "conv": conv,
    "branches": branches,
    "loop": loop,
    "scan": scan,
    "functions": functions,
    "qdq": qdq,
    "shapes": shapes,
    "digits": lambda: onnx.load(SAMPLE_MODELS / "digits.onnx"),
}
"""The small models by name. `digits` is a sample model, the others are built."""


def feeds(base: str) -> dict[str, Any]:
    """Return the arrays of a data file for a base: `SAMPLES` samples of its input."""
    random = np.random.default_rng(7)
    if base == "digits":
        return {"image": random.random((SAMPLES, 1, 28, 28), np.float32)}
    shape = (3, 8, 8) if base == "conv" else (16,)
    return {"x": random.standard_normal((SAMPLES, *shape)).astype(np.float32)}
