"""Which tensors must not be uint8: each one is quantized alone, and the model's outputs tell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from .. import RequantError
from ..calibration.samples import Sample
from ..calibration.session import open_session, runtime_message
from ..transforms.graph import add_initializer, fresh_name
from ..transforms.qparams import QParams
from .accuracy import decibels, powers
from .files import Weights, serialize

# A tensor ruins a model when it alone leaves less than RUIN_DB at an output and stands out from the others: the
# tensors of a network that is merely hard to quantize are all alike, and none of them is worth a float unit.
RUIN_DB = 20.0
STANDS_OUT_DB = 10.0
FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)")
SWITCH = "requant_switch"


def ruinous(sqnr_db: Mapping[str, float]) -> dict[str, str]:
    """Return the tensors that must stay float, with the reason, from the SQNR that each alone leaves."""

    def limit(name: str) -> float:
        others = [value for other, value in sqnr_db.items() if other != name]
        return min(RUIN_DB, statistics.median(others) - STANDS_OUT_DB) if others else RUIN_DB

    return {
        name: f"in uint8 {name!r} alone leaves {value:.1f} dB at an output"
        for name, value in sqnr_db.items()
        if value < limit(name)
    }


def alone(
    model: ir.Model,
    qparams: Mapping[str, QParams],
    samples: Sequence[Sample],
    *,
    optimize: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Return the least SQNR, in dB, of the float outputs when one tensor at a time goes through uint8.

    One session serves all tensors: a further input selects which of them is quantized.

    Args:
        model: A float model.
        qparams: uint8 scale and zero point of each tensor to try.
        samples: A few samples; tensors times samples inferences are made.
        optimize: Whether the runtime may rewrite the graph: ONNX Runtime 1.31 aborts where it finds a DequantizeLinear,
            a Transpose or the like, and a reader in one of the bodies that are put in.
        progress: Called with how many tensors are done, and how many there are.
    """
    session = open_session(serialize(_with_switches(model, qparams)), optimize=optimize, lean=Weights.of(model).lumpy)
    outputs = [o.name for o in session.get_outputs() if o.type in FLOATS]
    if not outputs:
        return dict.fromkeys(qparams, math.inf)

    def run(sample: Sample, index: int) -> list[np.ndarray]:
        feed = {**sample.feed, SWITCH: np.asarray(index)}
        try:
            return [np.asarray(value) for value in session.run(outputs, feed)]
        except Exception as error:  # the runtime's exceptions share no base class of their own
            raise RequantError(f"{sample.where}: the model fails: {runtime_message(error)}") from error

    references = [run(sample, -1) for sample in samples]
    found = {}
    for index, name in enumerate(qparams):
        signal, noise = [0.0] * len(outputs), [0.0] * len(outputs)
        for sample, reference in zip(samples, references, strict=True):
            for position, (exact, value) in enumerate(zip(reference, run(sample, index), strict=True)):
                more = powers(exact, value)
                signal[position] += more[0]
                noise[position] += more[1]
        found[name] = min(decibels(s, n) for s, n in zip(signal, noise, strict=True))
        if progress is not None:
            progress(index + 1, len(qparams))
    return found


def _with_switches(model: ir.Model, qparams: Mapping[str, QParams]) -> ir.Model:
    """Return a copy in which tensor i is quantized and dequantized when the input `SWITCH` is i."""
    copy = model.clone()
    graph = copy.graph
    switch = ir.val(SWITCH, dtype=ir.DataType.INT64, shape=[])
    graph.inputs.append(switch)
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    for index, (name, params) in enumerate(qparams.items()):
        _insert_switch(copy, values[name], switch, index, params)
    return copy


def _insert_switch(model: ir.Model, value: ir.Value, switch: ir.Value, index: int, params: QParams) -> None:
    """Let the readers of `value` read its quantized copy when `switch` equals `index`."""
    graph, stem = model.graph, f"requant_switch_{index}"
    constants = [
        add_initializer(graph, fresh_name(model, f"{stem}_{part}"), np.asarray(array))
        for part, array in (("index", np.int64(index)), ("scale", params.scale), ("zero_point", params.zero_point))
    ]
    uses, producer = list(value.uses()), value.producer()
    equal = ir.node("Equal", [switch, constants[0]], name=f"{stem}_equal")
    branches = {"then_branch": _branch(value, stem, constants[1:]), "else_branch": _branch(value, stem, [])}
    choose = ir.node("If", [equal.outputs[0]], branches, name=stem)
    equal.outputs[0].name, choose.outputs[0].name = f"{stem}_chosen", f"{stem}_output"
    choose.outputs[0].type, choose.outputs[0].shape = value.type, value.shape
    if producer is None:
        graph.insert_before(graph[0], [equal, choose])
    else:
        graph.insert_after(producer, [equal, choose])
    for use in uses:
        use.node.replace_input_with(use.idx, choose.outputs[0])
    if value.is_graph_output():
        position = list(graph.outputs).index(value)
        graph.outputs[position] = choose.outputs[0]
        choose.outputs[0].name, value.name = value.name, f"{stem}_input"


def _branch(value: ir.Value, stem: str, parameters: Sequence[ir.Value]) -> ir.Graph:
    """Return a body that gives `value`, through uint8 when there are parameters."""
    if parameters:
        q = ir.node("QuantizeLinear", [value, *parameters], name=f"{stem}_q")
        last = ir.node("DequantizeLinear", [q.outputs[0], *parameters], name=f"{stem}_dq")
        q.outputs[0].name, nodes = f"{stem}_quantized", [q, last]
    else:
        last = ir.node("Identity", [value], name=f"{stem}_same")
        nodes = [last]
    output = last.outputs[0]
    output.name, output.type = (
        f"{stem}_{'then' if parameters else 'else'}",
        value.type or ir.TensorType(ir.DataType.FLOAT),
    )
    return ir.Graph([], [output], nodes=nodes, name=f"{stem}_body")
