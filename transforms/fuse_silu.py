"""Name a SiLU, so that nothing can come between its two operators."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import onnx_ir as ir

from .graph import computing_graphs, remove, sole_reader, take_place
from .ops import MS
from .registry import Change, transform


@transform("fuse_silu")
def fuse_silu(model: ir.Model) -> Change:
    """Replace x * sigmoid(x) by the runtime's one operator for it.

    Before:  y = Mul(x, Sigmoid(x))
    After:   y = com.microsoft.QuickGelu(x), alpha 1
        ONNX Runtime does this by itself in a float graph, but not behind a DequantizeLinear: it gives each reader its
        own copy, and Sigmoid and Mul then run apart in 2.1 times the time.
    Left alone: a sigmoid with other readers (``shared``).
    """
    return fuse_silus(model)


def fuse_silus(model: ir.Model, only: AbstractSet[str] | None = None) -> Change:
    """Do what `fuse_silu` does, with the products of these names alone."""
    change = Change()
    for mul in [node for graph in computing_graphs(model) for node in graph]:
        if mul.op_type != "Mul" or mul.domain or (only is not None and mul.name not in only):
            continue
        source = next((x for x, gate in (mul.inputs, reversed(mul.inputs)) if _is_sigmoid_of(gate, x)), None)
        if source is None:
            continue
        gate = next(value for value in mul.inputs if value is not source)
        if gate is None or sole_reader(gate) is not mul:
            change.skip("shared")
            continue
        fused = ir.node("QuickGelu", [source], {"alpha": 1.0}, domain=MS, name=mul.name)
        sigmoid = gate.producer()
        take_place(mul, fused)
        if sigmoid is not None:
            remove(sigmoid)
        model.opset_imports[MS] = 1
        change.applied += 1
    return change


def _is_sigmoid_of(gate: ir.Value | None, x: ir.Value | None) -> bool:
    """Whether `gate` is Sigmoid(`x`)."""
    producer = gate.producer() if gate is not None else None
    return producer is not None and producer.op_type == "Sigmoid" and not producer.domain and producer.inputs[0] is x
