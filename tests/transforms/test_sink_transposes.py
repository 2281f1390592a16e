"""Transposes that are cancelled through random graphs leave the outputs as they were, and are never more."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, reference

from requant.transforms.sink_transposes import sink_transposes

ORDERS = ([0, 2, 1], [1, 2, 0], [2, 0, 1])
KINDS = ("Transpose", "Transpose", "Transpose", "Relu", "Mul", "Add", "Concat", "ReduceMax", "Softmax", "Gate")
LENGTH = 3  # of all axes, so that tensors may meet in any order
CONSTANTS: dict[str, Any] = {
    "column": np.arange(1, LENGTH + 1, dtype=np.float32).reshape(LENGTH, 1),
    "row": np.array([1, -2, 3], np.float32),
    "axis": np.array([1], np.int64),
    "last": np.array([-1], np.int64),
    "all but one": np.array([1, 2], np.int64),
    **{f"gate{axis}": np.array([-1 if each == axis else 1 for each in range(3)], np.int64) for axis in range(3)},
}


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Draw a graph of Transposes, operators that ignore the order of axes, and some that do not."""
    names, nodes = ["x"], []
    for index in range(draw(st.integers(2, 10))):
        kind, name = draw(st.sampled_from(KINDS)), f"t{index}"
        near = names[-3:]
        one, other = draw(st.sampled_from(near)), draw(st.sampled_from(near))
        keep = draw(st.booleans())
        parts: dict[str, tuple[list[str], dict[str, Any]]] = {
            "Transpose": ([one], {"perm": draw(st.sampled_from(ORDERS))}),
            "Relu": ([one], {}),
            "Mul": ([one, draw(st.sampled_from(["column", "row"]))], {}),
            "Add": ([one, other], {}),
            "Concat": ([one, other], {"axis": draw(st.integers(-3, 2))}),
            "ReduceMax": ([one, draw(st.sampled_from(["axis", "last"]))], {"keepdims": 1}),
            "Softmax": ([one], {"axis": draw(st.integers(0, 2))}),
            "Gate": ([other, f"{name}r"], {}),
        }
        if kind == "Gate":  # a factor for each channel, moved by a Reshape to the axis where the channels are
            nodes.append(helper.make_node("ReduceMax", [one, "all but one"], [f"{name}g"], name=f"g{index}"))
            shape = f"gate{draw(st.integers(0, 2))}"
            nodes.append(helper.make_node("Reshape", [f"{name}g", shape], [f"{name}r"], name=f"r{index}"))
            kind, parts["Mul"] = "Mul", parts["Gate"]
        nodes.append(helper.make_node(kind, *(parts[kind][0], [name]), name=f"n{index}", **parts[kind][1]))
        if kind == "Concat":  # back to equal lengths
            nodes.append(
                helper.make_node("ReduceMax", [name, "axis"], [f"{name}m"], keepdims=int(keep), name=f"m{index}")
            )
            nodes.append(helper.make_node("Add", [f"{name}m", "x"], [f"{name}s"], name=f"s{index}"))
            name = f"{name}s"
        names.append(name)
    outputs = sorted({names[-1], draw(st.sampled_from(names[1:]))})
    graph = helper.make_graph(
        nodes,
        "turned",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [LENGTH] * 3)],
        [helper.make_tensor_value_info(each, TensorProto.FLOAT, None) for each in outputs],
        [numpy_helper.from_array(array, name) for name, array in CONSTANTS.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def run(model: onnx.ModelProto) -> list[Any] | None:
    x = np.random.default_rng(0).standard_normal([LENGTH] * 3).astype(np.float32)
    try:
        return list(reference.ReferenceEvaluator(model).run(None, {"x": x}))
    except (TypeError, ValueError):  # the lengths of a Concat do not fit
        return None


def count(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "Transpose" for node in model.graph.node)


@given(graphs())
def test_the_outputs_stay_and_the_transposes_are_fewer(model: onnx.ModelProto) -> None:
    before = run(model)
    if before is None:
        return
    turned = ir.from_proto(model)
    same = ir.to_proto(turned)
    change = sink_transposes(turned)
    after = ir.to_proto(turned)
    assert count(after) < count(model) if change.applied else after == same
    for one, two in zip(before, run(after) or [], strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-6, atol=1e-6)
