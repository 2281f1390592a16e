"""Find tensors with denormal values in a run of a model."""

from __future__ import annotations

import timeit
from collections.abc import Iterable
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.samples import Sample
from ..model.bodies import free_prefix, tensors_of
from ..model.copies import infer_types, load_copy
from ..model.session import ModelSource, run_session
from .normalisation import cut

if TYPE_CHECKING:
    import onnx_ir as ir

SAMPLES = 2
"""The number of samples that are read."""
FIRST_OPSET = 13
"""The opset from which all operators of the search take the inputs that it gives them."""
ELEMENTS = 4096
SLOWER = 4
"""How many times as long products of denormal numbers take at least on a slow CPU, compared with other products."""


@cache
def slow_here() -> bool:
    """Return whether this CPU multiplies denormal numbers slowly; it is measured once, in less than a millisecond.

    Many Intel CPUs take about a hundred times as long, most AMD and Arm CPUs do not.
    """
    result = np.empty(ELEMENTS, np.float32)

    def seconds(number: float) -> float:
        array = np.full(ELEMENTS, number, np.float32)
        return min(timeit.repeat(lambda: np.multiply(array, np.float32(0.75), out=result), number=1, repeat=9))

    return seconds(1e-40) > SLOWER * seconds(1.0)


def denormal_shares(model: ModelSource, tensors: Iterable[str], samples: Iterable[Sample]) -> dict[str, float]:
    """Return the share of values with ``0 < |x| < 2^-126`` of each float32 tensor that has any.

    The values are counted inside the runtime, so that no tensor leaves it.

    Args:
        model: The model.
        tensors: Tensors of the main graph; others are left out.
        samples: Samples; only the first `SAMPLES` are read.

    Raises:
        RequantError: The model cannot be read or run.
    """
    import onnx_ir as ir

    copy, folder = load_copy(model)
    values = tensors_of(copy.graph)
    wanted = [name for name in tensors if name in values]
    infer_types(copy, wanted)
    places = {name: place for place, name in enumerate(values)}
    # Nodes that are appended last run as soon as their input exists, so that the tensor is freed early.
    wanted = sorted(
        (name for name in wanted if values[name].dtype is ir.DataType.FLOAT), key=places.__getitem__, reverse=True
    )
    if copy.graph.opset_imports.get("", 0) < FIRST_OPSET or not wanted:
        return {}
    prefix = free_prefix(copy.graph, "requant_denormal")
    shares = {f"{prefix}{index}": name for index, name in enumerate(wanted)}
    bounds = (
        _constant(copy.graph, 0, f"{prefix}_zero"),
        _constant(copy.graph, float(np.finfo(np.float32).tiny), f"{prefix}_least"),
    )
    for share, name in shares.items():
        _count(copy.graph, values[name], bounds, share)
    session = cut(copy, folder, tuple(shares))
    if session is None:
        return {}
    rows = [run_session(session, tuple(shares), each.feed, each.where) for each in islice(samples, SAMPLES)]
    means = {name: float(np.mean([row[share] for row in rows])) for share, name in shares.items() if rows}
    return {name: mean for name, mean in means.items() if mean > 0}


def _constant(graph: ir.Graph, number: float, name: str) -> ir.Value:
    """Append a float32 scalar to a graph and return it."""
    import onnx_ir as ir

    node = ir.node("Constant", [], {"value": ir.tensor(np.asarray(number, np.float32))})
    node.name = node.outputs[0].name = name
    graph.append(node)
    return node.outputs[0]


def _count(graph: ir.Graph, value: ir.Value, bounds: tuple[ir.Value, ir.Value], name: str) -> None:
    """Append nodes that compute the share of values between two bounds of magnitude, as a scalar of this name."""
    import onnx_ir as ir

    def add(op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(op, inputs, attributes)
        graph.append(node)
        node.name = node.outputs[0].name = f"{name}_{op}_{len(graph)}"
        return node.outputs[0]

    zero, least = bounds
    magnitude = add("Abs", value)
    low = add("And", add("Less", magnitude, least), add("Greater", magnitude, zero))
    share = add("ReduceMean", add("Cast", low, to=ir.DataType.FLOAT.value), keepdims=0)
    share.name = name
