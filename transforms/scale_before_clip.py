"""Scale and shift what a convolution computes before its bounds apply, so that both fold into the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import computing_nodes, graph_of, node_name, one_number, producer_of, sole_reader
from .graphs.rewriter import add_initializer, can_replace, names, remove, replace_node, unused_name
from .int8.ops import CLIP_TAKES_INPUTS
from .patterns.elementwise import bounds_of
from .registry import Change, transform

TAKES_SCALE = frozenset({"BatchNormalization", "Conv", "ConvTranspose", "Gemm"})
"""Operators into which a scale and a shift behind them fold."""


@transform("scale_before_clip", after=("fold_constants", "merge_clips"))
def scale_before_clip(model: ir.Model) -> Change:
    """Move a factor and a summand of one element from behind a Relu or Clip in front of it, behind a linear operator.

    Before:  y = Add(Mul(Relu(Conv(x)), 0.9), -0.2)
    After:   y = Clip(Add(Mul(Conv(x), 0.9), -0.2), -0.2)
        `fold_batch_norms` folds both into the weights. HGNetV2 and PP-LCNetV3, the backbones of PaddleOCR, D-FINE and
        RT-DETR, learn such an affine function behind each activation. A negative factor swaps the bounds.
    Left alone: a Relu or Clip with other readers (``shared``), bounds that are computed, or the lower one above the
        upper one (``bounds``), a factor of 0 (``zero``), other types than float32 (``not-float32``), and opsets below
        11.
    """
    change, known, taken = Change(), Known(model), names(model)
    if model.opset_imports.get("", 0) < CLIP_TAKES_INPUTS:
        return change
    for node in computing_nodes(model, "Relu", "Clip"):
        linear = producer_of(node.inputs[0])
        rank = known.rank(node.outputs[0]) or 0
        if linear is None or linear.domain or linear.op_type not in TAKES_SCALE or _step_behind(node, rank) is None:
            continue
        if known.dtype(node.inputs[0]) is not ir.DataType.FLOAT:
            change.skip("not-float32")
            continue
        clip: ir.Node | None = node
        while clip is not None and (step := _step_behind(clip, rank)) is not None:
            clip = _moved(clip, step, taken, change)
    return change


@dataclass(frozen=True, slots=True)
class _Step:
    """A Mul, Div, Add or Sub with a number.

    Attributes:
        node: The operator.
        factor: What it multiplies by; 1 for a sum.
        summand: What it adds; 0 for a product.
    """

    node: ir.Node
    factor: float = 1.0
    summand: float = 0.0


def _step_behind(clip: ir.Node, rank: int) -> _Step | None:
    """Return the operator behind a Relu or Clip that scales or shifts its result; None without one."""
    reader = sole_reader(clip.outputs[0])
    if reader is None or reader.domain:
        return None
    for index in (0, 1) if reader.op_type in ("Add", "Mul") else (0,) if reader.op_type in ("Div", "Sub") else ():
        number = one_number(reader.inputs[1 - index], rank)
        if reader.inputs[index] is clip.outputs[0] and number is not None and math.isfinite(number):
            if reader.op_type in ("Add", "Sub"):
                return _Step(reader, summand=number if reader.op_type == "Add" else -number)
            return _Step(reader, factor=number if reader.op_type == "Mul" else 1 / number if number else 0.0)
    return None


def _moved(clip: ir.Node, step: _Step, taken: set[str], change: Change) -> ir.Node | None:
    """Move one operator in front of the bounds, and return the new Relu or Clip; None if they stay."""
    x, bounds = clip.inputs[0], bounds_of(clip)
    if x is None or sole_reader(x) is not clip or not can_replace(step.node.outputs[0], clip.outputs[0]):
        change.skip("shared")
    elif bounds is None or bounds[0] > bounds[1]:
        change.skip("bounds")
    elif step.factor == 0:
        change.skip("zero")
    else:
        change.applied += 1
        return _swapped(clip, step, sorted(bound * step.factor + step.summand for bound in bounds), taken)
    return None


def _swapped(clip: ir.Node, step: _Step, bounds: list[float], taken: set[str]) -> ir.Node:
    """Put an operator in front of a Relu or Clip, which gets new bounds; return it."""
    graph, name = graph_of(clip), node_name(clip)
    inputs = [clip.inputs[0] if value is clip.outputs[0] else value for value in step.node.inputs]
    before = ir.node(step.node.op_type, inputs, name=node_name(step.node))
    before.outputs[0].name = unused_name(taken, f"{name}/scaled")
    before.outputs[0].type, before.outputs[0].shape = clip.outputs[0].type, clip.outputs[0].shape
    graph.insert_before(step.node, [before])
    limits: list[ir.Value | None] = []
    plain = (bounds[0], bounds[1]) == (0, math.inf)
    for word, bound in () if plain else (("least", bounds[0]), ("most", bounds[1])):
        limit = np.array(bound, np.float32)
        finite = math.isfinite(bound)
        if finite or word == "least":  # a bound behind the last one is left out
            limits.append(add_initializer(graph, unused_name(taken, f"{name}/{word}"), limit) if finite else None)
    new = ir.node("Relu" if plain else "Clip", [*before.outputs, *limits], name=name)
    replace_node(step.node, new)
    remove(clip)
    return new
