"""Compute nodes with constant inputs in onnx's reference evaluator."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ..registry import LeftAlone
from .queries import release


def evaluated(
    nodes: Iterable[ir.Node],
    constants: Mapping[str, ir.TensorProtocol],
    results: Iterable[str],
    opsets: Mapping[str, int],
) -> list[object]:
    """Return tensors that nodes compute from constants.

    Args:
        nodes: The nodes, in order of execution.
        constants: The tensors that no node computes, by name; the memory of external ones is released.
        results: The names of the tensors to return.
        opsets: The operator set of each domain.

    Raises:
        LeftAlone: The evaluator cannot compute them.
    """
    feeds = {name: tensor.numpy() for name, tensor in constants.items()}
    for tensor in constants.values():
        release(tensor)
    graph = onnx.GraphProto(name="constants", node=[ir.to_proto(node) for node in nodes])
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in feeds)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in results)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return list(ReferenceEvaluator(graph, opsets=dict(opsets)).run(None, feeds))
    except Exception as error:  # the evaluator raises any error of numpy, and its own for missing operators
        raise LeftAlone("cannot-evaluate") from error
