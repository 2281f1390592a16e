"""Write bounds as one Relu or Clip, which integer kernels absorb."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import onnx_ir as ir

from .graphs.inference import Known
from .graphs.queries import computing_nodes, constant, graph_of, node_name, one_number, producer_of, sole_reader
from .graphs.rewriter import add_initializer, discard, names, remove, replace_node, unused_name
from .int8.ops import CLIP_TAKES_INPUTS
from .patterns.elementwise import bounds_of
from .registry import Change, transform

CLIPPED = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16})
CLIPS_DOUBLES = 12  # the opset from which the runtime has a kernel of Clip for float64
PRODUCTS = frozenset({"Gemm", "MatMul"})
Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Facts:
    """What all rewrites of a model need.

    Attributes:
        known: The types and shapes of tensors.
        taken: The names in use.
        opset: The version of the standard operators.
    """

    known: Known
    taken: set[str]
    opset: int

    def clips(self, value: ir.Value) -> bool:
        """Return whether the runtime has a kernel of Clip for the type of a tensor."""
        dtype = self.known.dtype(value)
        return dtype in CLIPPED and (dtype is not ir.DataType.DOUBLE or self.opset >= CLIPS_DOUBLES)


@transform("merge_clips", after=("fold_constants",))
def merge_clips(model: ir.Model) -> Change:
    """Write Max and Min with a constant as Clip or Relu, and merge consecutive Relu, Clip, Max and Min nodes.

    Before:  y = Min(Max(x, -1), 6);  z = Clip(Relu(x), -1, 4);  u = Max(x, 0);  v = Min(x, 6)
    After:   y = Clip(x, -1, 6);      z = Clip(x, 0, 4);         u = Relu(x);    v = Clip(x, -inf, 6)
        A Relu or Clip after a convolution, a matrix product or a LeakyRelu runs inside its integer kernel; Max and Min
        do not, and take several times as long in float. NaN stays NaN in all of them. A Clip without a bound takes the
        largest float for it; behind a Max or Min, the bound is infinite, so that infinite values stay.
    Left alone: bounds that are computed, or have several elements or more axes than the tensor; a lower bound above the
        upper bound (``bounds``); a tensor between two such nodes that other nodes read (``read-between``); a Max or Min
        behind a matrix product of integers, which keeps the runtime from fusing the two in float
        (``behind-integers``); integer tensors, tensors of unknown type, and float64 below opset 12, for which the
        runtime has no Clip (``not-float``).
    """
    change = Change()
    facts = _Facts(Known(model), names(model), model.opset_imports.get("", 0))
    for node in computing_nodes(model):
        bounds = None if node.domain else _bounds(node, facts)
        if bounds is None:
            continue
        if not facts.clips(node.outputs[0]):
            change.skip("not-float")
        elif node.op_type in ("Max", "Min") and _is_behind_integers(node):
            change.skip("behind-integers")
        elif _rewrite(node, bounds, facts, change):
            change.applied += 1
    return change


def _bounds(node: ir.Node, facts: _Facts) -> Bounds | None:
    """Return the constant bounds that a node applies to its tensor; None if the node does something else."""
    if node.op_type in ("Relu", "Clip"):
        return bounds_of(node)
    if node.op_type not in ("Max", "Min") or len(node.inputs) != 2:
        return None
    bound, tensor = node.inputs[_place(node)], _tensor(node)
    limit = None if tensor is None or constant(tensor) is not None else one_number(bound, facts.known.rank(tensor) or 0)
    if limit is None:
        return None
    return (limit, inf) if node.op_type == "Max" else (-inf, limit)


def _place(node: ir.Node) -> int:
    """Return the index of the bound among the inputs of a Max or Min."""
    return 0 if constant(node.inputs[0]) is not None else 1


def _tensor(node: ir.Node) -> ir.Value | None:
    """Return the tensor to which a node applies its bounds."""
    return node.inputs[1 - _place(node)] if node.op_type in ("Max", "Min") else node.inputs[0]


def _is_behind_integers(node: ir.Node) -> bool:
    """Whether a Max or Min follows a product of dequantized tensors, where requant has put it for a Relu."""
    source = _tensor(node)
    product = producer_of(source)
    if product is None or product.op_type not in PRODUCTS:
        return False
    sources = [value.producer() for value in product.inputs if value is not None]
    return any(each is not None and each.op_type == "DequantizeLinear" for each in sources)


def _rewrite(node: ir.Node, bounds: Bounds, facts: _Facts, change: Change) -> bool:
    """Merge a node with a bounding node before it, or rewrite it as Relu or Clip; return whether the graph changed."""
    source = _tensor(node)
    before = producer_of(source)
    merged = None if before is None or before.domain or before.graph is not node.graph else _bounds(before, facts)
    if merged is not None and before is not None and source is not None:
        if sole_reader(source) is not node:
            change.skip("read-between")
            merged = None
        elif merged[0] > merged[1] or bounds[0] > bounds[1]:
            change.skip("bounds")
            merged = None
    exact = node.op_type in ("Max", "Min")
    if merged is not None and before is not None:
        lo, hi = (min(max(limit, bounds[0]), bounds[1]) for limit in merged)
        _replace(node, _tensor(before), (lo, hi), facts, exact=exact or before.op_type in ("Max", "Min"))
        remove(before)
        return True
    plain = exact or (node.op_type == "Clip" and bounds == (0.0, inf))
    if plain:
        _replace(node, source, bounds, facts, exact=exact)
    return plain


def _replace(node: ir.Node, source: ir.Value | None, bounds: Bounds, facts: _Facts, *, exact: bool) -> None:
    """Replace a node by a Relu or Clip; with `exact`, infinite bounds are written."""
    inputs, name = tuple(node.inputs), node.name
    written = dict(zip(("min", "max"), bounds, strict=True))
    written = {key: limit for key, limit in written.items() if exact or abs(limit) != inf}
    if bounds == (0.0, inf):
        new = ir.node("Relu", [source], name=name)
    elif facts.opset < CLIP_TAKES_INPUTS:
        new = ir.node("Clip", [source], written, name=name)
    else:
        limits = [_limit(node, key, written[key], facts) if key in written else None for key in ("min", "max")]
        new = ir.node("Clip", [source, *(limits if limits[1] is not None else limits[:1])], name=name)
    replace_node(node, new)
    discard(*inputs)


def _limit(node: ir.Node, key: str, limit: float, facts: _Facts) -> ir.Value:
    """Return a bound of a Clip as an initializer."""
    dtype = facts.known.dtype(node.outputs[0])
    assert dtype is not None  # `merge_clips` leaves tensors of unknown type alone
    stem = unused_name(facts.taken, f"{node_name(node)}/{key}")
    return add_initializer(graph_of(node), stem, np.array(limit, dtype.numpy()))
