"""Quantize a float model by fixed rules, with ranges from a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..system.log_records import MIN_MAX
from .freeze_ranges import check_names, check_percentile
from .graphs.inference import inferred
from .graphs.queries import constant, nodes_by_name
from .graphs.rewriter import separate_bodies
from .int8.existing import is_linear
from .int8.insert_qdq import insert_qdq
from .int8.ops import OPS, Op, only_moves
from .int8.plan import Choice, Impl, Plan, Unit
from .int8.qparams import Scheme
from .int8.units import units
from .parts.min_max_log import high_percentile, low_percentile, read_log
from .registry import Change, LeftAlone, TransformError, transform

FIRST_OPSET = 10  # the first opset with QuantizeLinear
Ranges = Mapping[str, tuple[float, float]]


@dataclass
class _Chooser:
    """Chooses the implementation of each unit, in execution order.

    Attributes:
        nodes: The nodes of the graph by name.
        values: The tensors by name, with inferred types.
        ranges: The ranges by tensor.
        ignore_op: Operator types that stay float.
        integer: Tensors that an integer kernel writes; `choose` reads them for later units.
    """

    nodes: Mapping[str, ir.Node]
    values: Mapping[str, ir.Value]
    ranges: Ranges
    ignore_op: tuple[str, ...]
    integer: set[str] = field(default_factory=set)

    def choose(self, unit: Unit) -> Impl:
        """Return the implementation of a unit.

        Raises:
            LeftAlone: The unit has an integer form but stays float.
        """
        row, node = OPS.get(unit.op), self.nodes[unit.nodes[0]]
        if row is None or row.kind == "float" or row.u8 is None or row.slow or unit.op == "HardSigmoid":
            return Impl.FLOAT
        if node.op_type in self.ignore_op:
            raise LeftAlone("ignored")
        known = self.integer | self.ranges.keys()
        if row.kind == "same":
            follows = only_moves(node) and self.integer.issuperset(unit.inputs) and len(unit.inputs) > 0
            return Impl.U8 if follows else Impl.FLOAT
        self._check_form(node, row)
        if not unit.inputs or not known.issuperset(unit.inputs):
            raise LeftAlone("not-in-the-log")
        if known.issuperset(unit.outputs):
            return Impl.U8
        if row.u8_float is None:
            raise LeftAlone("not-in-the-log")
        return Impl.U8_FLOAT

    def _check_form(self, node: ir.Node, row: Op) -> None:
        """Raise LeftAlone for an operator whose operands do not fit its integer form."""
        read = [value for value in node.inputs if value is not None]
        if any((producer := value.producer()) and producer.op_type == "DequantizeLinear" for value in read):
            raise LeftAlone("quantized-already")
        kinds = {self.values.get(str(value.name), value).dtype for value in (*read, node.outputs[0])}
        if row.kind != "compute":
            if kinds - {ir.DataType.BOOL} != {ir.DataType.FLOAT}:
                raise LeftAlone("not-float32")
            return
        if kinds != {ir.DataType.FLOAT}:
            raise LeftAlone("not-float32")
        weight, bias = (constant(node.inputs[index]) if len(node.inputs) > index else None for index in (1, 2))
        if weight is None:
            raise LeftAlone("weight-not-constant")
        if node.op_type != "Conv" and len(weight.shape) != 2:
            raise LeftAlone("batched-weights")
        if len(node.inputs) > 2 and node.inputs[2] is not None and (bias is None or len(bias.shape) != 1):
            raise LeftAlone("bias-form")
        factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        transposed = node.op_type == "Gemm" and node.attributes.get_int("transA", 0) != 0
        if node.op_type == "Gemm" and (factors != [1.0, 1.0] or transposed):
            raise LeftAlone("gemm-form")


@transform("insert_qdq", after=("fold_constants", "fold_batch_norms", "normalize_gemm"), changes_values=True)
def insert_qdq_from_log(
    model: ir.Model,
    *,
    min_max_log_file: str,
    min_percentile: float = 5.0,
    max_percentile: float = 5.0,
    ignore_op: tuple[str, ...] = (),
) -> Change:
    """Insert QuantizeLinear and DequantizeLinear around the operators whose tensors have a range in a log.

    Before:  y = Relu(Conv(x, W, b))
    After:   x' = DequantizeLinear(QuantizeLinear(x)),  W' = DequantizeLinear(int8 W, axis=0),
             b' = DequantizeLinear(int32 b, scale s_x * s_w),
             y = DequantizeLinear(QuantizeLinear(Relu(Conv(x', W', b'))))
        Records are ``;<tensor>__print__;__requant_min_max:[min][max]``, as ``requant calibrate --log`` writes them. The
        percentiles work as in `freeze_requantization_ranges`. Gemm and MatMul have a float result if the result has no
        record. Operators that only move values keep the scale of their input. This transform measures nothing;
        ``requant quantize`` measures which operators are faster in integers.
    Left alone: operators without an integer form, or with a slower one; tensors without a record (``not-in-the-log``);
        computed weights (``weight-not-constant``); weights of more than two dimensions (``batched-weights``); a Gemm
        with factors (``gemm-form``) or a bias that is not a constant vector (``bias-form``), which `normalize_gemm`
        rewrites; other types than float32 (``not-float32``); operators that are quantized already
        (``quantized-already``), and records of tensors that this quantization removed (``not-in-the-graph``); ignored
        operators (``ignored``); the bodies of control flow.

    Options:
        min_max_log_file: The path of the log.
        min_percentile: The share of the lowest minima to drop, in percent.
        max_percentile: The share of the highest maxima to drop, in percent.
        ignore_op: Operator types that stay float.

    Raises:
        TransformError: The log has no such record, a record names a tensor that a graph without quantization does not
            have, a percentile is outside 0..100, or the model's opset has no integer operators.
    """
    opset = model.opset_imports.get("", 0)
    if opset < FIRST_OPSET:
        raise TransformError(f"opset {opset} has no integer operators; run convert_opset first")
    check_percentile("min_percentile", min_percentile)
    check_percentile("max_percentile", max_percentile)
    change = Change()
    ranges = _ranges(model, min_max_log_file, (min_percentile, max_percentile), change)
    plan = _plan(model, ranges, ignore_op, change)
    if not plan.quantized:
        return change
    separate_bodies(model)
    qparams = {name: Scheme().activation_params(*ranges[name]) for name in plan.observed}
    change.applied += insert_qdq(model, plan=plan, qparams=qparams).applied
    return change


def _ranges(model: ir.Model, path: str, percentiles: tuple[float, float], change: Change) -> Ranges:
    """Return the ranges of the graph's tensors from a log; `change` counts unused records."""
    log = read_log(path, MIN_MAX)
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    unknown = sorted(set(log.values) - set(values))
    if unknown and any(is_linear(node, "QuantizeLinear") for node in model.graph):
        change.skipped["not-in-the-graph"] = len(unknown)  # quantization removes some tensors of the float graph
    else:
        check_names(path, "tensor", unknown, values)
    if log.rejected:
        change.skipped["unreadable-records"] = log.rejected
    low, high = percentiles
    return {
        name: (
            float(np.float32(low_percentile([record[0] for record in records], low))),
            float(np.float32(high_percentile([record[1] for record in records], high))),
        )
        for name, records in log.values.items()
        if name in values
    }


def _plan(model: ir.Model, ranges: Ranges, ignore_op: tuple[str, ...], change: Change) -> Plan:
    """Return a plan with an implementation for each unit of the graph."""
    chooser = _Chooser(nodes_by_name(model), inferred(model), ranges, ignore_op)
    graph_units = units(model.graph)
    choices = {}
    for unit in graph_units:
        try:
            impl = chooser.choose(unit)
        except LeftAlone as left:
            change.skip(str(left))
            impl = Impl.FLOAT
        choices[unit.name] = Choice(impl)
        if impl is Impl.U8:
            chooser.integer.update(unit.outputs)
    return Plan(graph_units, choices, results=frozenset(str(value.name) for value in model.graph.outputs))
