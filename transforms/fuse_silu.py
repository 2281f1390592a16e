"""Fuse the two operators of a SiLU, so that no quantize/dequantize pair separates them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import onnx_ir as ir

from .graphs.queries import MS, computing_nodes, is_standard, producer_of, sole_reader
from .graphs.rewriter import remove, replace_node
from .registry import Change, transform


@transform("fuse_silu")
def fuse_silu(model: ir.Model) -> Change:
    """Replace x * sigmoid(x) by the runtime's operator for it.

    Before:  y = Mul(x, Sigmoid(x))
    After:   y = com.microsoft.QuickGelu(x), alpha 1
        ONNX Runtime fuses the two in a float graph, but not behind a DequantizeLinear: it gives each reader its own
        copy of the DequantizeLinear, and separate Sigmoid and Mul take 2.1 times as long.
    Left alone: a sigmoid with other readers (``shared``).
    """
    return fuse_silus(model)


def fuse_silus(model: ir.Model, only: AbstractSet[str] | None = None) -> Change:
    """Do the same as `fuse_silu`, for the Mul nodes named in `only`; None means all."""
    change = Change()
    for mul in computing_nodes(model, "Mul"):
        if only is not None and mul.name not in only:
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
        replace_node(mul, fused)
        if sigmoid is not None:
            remove(sigmoid)
        model.opset_imports[MS] = 1
        change.applied += 1
    return change


def _is_sigmoid_of(gate: ir.Value | None, x: ir.Value | None) -> bool:
    """Whether `gate` is Sigmoid(`x`)."""
    producer = producer_of(gate)
    return is_standard(producer, "Sigmoid") and producer.inputs[0] is x
