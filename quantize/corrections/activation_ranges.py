"""Ranges of tensors that only an activation function reads: the error of the function's result decides."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import onnx_ir as ir

from ...calibration.model.session import Array, open_session, run_session
from ...calibration.rules.ranges import Range
from ...calibration.rules.result import Function, least_result_error
from ...calibration.statistics.histogram import Histogram, Statistic
from ...transforms.graphs.queries import is_standard
from ..job import Job
from ..options.given_ranges import precision_of

FUNCTIONS = frozenset(
    {"Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Selu", "Sigmoid", "Softplus", "Tanh"}
)
"""Elementwise, nonlinear operators of the ONNX standard with one input."""


def ranges_by_results(job: Job, seen: Mapping[str, Statistic], ranges: Mapping[str, Range]) -> dict[str, Range]:
    """Return the range with the least error of the function's result, for each tensor that only a function reads.

    Args:
        job: The model and the integer types.
        seen: Statistics by tensor; tensors without a histogram are left out.
        ranges: The tensors that have a range now.

    Raises:
        RequantError: The runtime rejects a function.
    """
    values = ir.convenience.create_value_mapping(job.simple.graph)
    better = {}
    for name in ranges:
        statistic, value = seen.get(name), values.get(name)
        nodes = _function_of(value) if value is not None and isinstance(statistic, Histogram) else ()
        if nodes and value is not None and isinstance(statistic, Histogram):
            function = _compiled(_model_of(value, nodes, job.simple.opset_imports[""]))
            better[name] = least_result_error(statistic, function, precision_of(job.scheme))
    return better


def _function_of(value: ir.Value) -> tuple[ir.Node, ...]:
    """Return the nodes of the only function that reads a tensor: one of `FUNCTIONS`, or x * f(x) (a SiLU)."""
    readers = tuple(dict.fromkeys(use.node for use in value.uses()))
    if value.is_graph_output():
        return ()
    functions = [node for node in readers if node.op_type in FUNCTIONS and not node.domain]
    if len(readers) == 1 == len(functions):
        return readers
    products = [node for node in readers if is_standard(node, "Mul")]
    if len(readers) != 2 or len(functions) != 1 or len(products) != 1:
        return ()
    result = functions[0].outputs[0]
    alone = len(result.uses()) == 1 and not result.is_graph_output()
    return (functions[0], products[0]) if alone and set(products[0].inputs) == {value, result} else ()


def _model_of(value: ir.Value, nodes: tuple[ir.Node, ...], opset: int) -> bytes:
    """Return a function as a model. Equal functions give equal bytes, because the names are fixed."""
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[None])
    copied = {value: x}
    copies = []
    for index, node in enumerate(nodes):
        inputs = [copied[each] for each in node.inputs if each is not None]
        copy = ir.node(node.op_type, inputs, dict(node.attributes), name=f"function_{index}")
        copy.outputs[0].name = f"result_{index}"
        copied[node.outputs[0]] = copy.outputs[0]
        copies.append(copy)
    y = copies[-1].outputs[0]
    y.name, y.type = "y", x.type
    graph = ir.Graph([x], [y], nodes=copies, opset_imports={"": opset}, name="function")
    return bytes(ir.to_proto(ir.Model(graph, ir_version=8)).SerializeToString())


@cache
def _compiled(model: bytes) -> Function:
    """Return a function that computes the model, for arrays of any shape."""
    session = open_session(model, threads=1)

    def function(values: Array) -> Array:
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        return run_session(session, ["y"], {"x": flat}, "an activation function")["y"].reshape(values.shape)

    return function
