"""Freeze the ranges that a log recorded: what was found in every run becomes a constant."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from .. import near
from .functions import DOMAIN
from .graph import add_initializer, constant, fresh_name, node_name, remove
from .min_max_log import MAX, MIN, REQUANT_MIN_MAX, Log, high_percentile, low_percentile, read_log
from .qparams import Array
from .registry import Change, TransformError, transform

Summary = Callable[[list[float], float], float]


@transform("freeze_requantization_ranges", after=("quantize_nodes",), changes_values=True)
def freeze_requantization_ranges(
    model: ir.Model, *, min_max_log_file: str, min_percentile: float = 5.0, max_percentile: float = 5.0
) -> Change:
    """Replace RequantizationRange nodes by the constant ranges that a log recorded.

    Before:  lo, hi = RequantizationRange(acc, ...);  q = Requantize(acc, ..., lo, hi)
    After:   q = Requantize(acc, ..., <node>/frozen_min, <node>/frozen_max)
    Of N records ``;<node>__print__;__requant_min_max:[min][max]`` the minimum at index round(N * min_percentile / 100)
    of the ascending minima is taken, and the maximum at round(N * (1 - max_percentile / 100)) of the ascending maxima;
    both are held to the node's own bounds, which are those of the Relu or Clip that it stands for.
    Left alone: nodes that the log does not name; they stay dynamic (``not-in-the-log``).

    Options:
        min_max_log_file: The log.
        min_percentile: How many percent of the lowest minima are dropped.
        max_percentile: How many percent of the highest maxima are dropped.

    Raises:
        TransformError: The log has no such record, or names a node that the graph does not have or that is no
            RequantizationRange; or a percentile is not one.
    """
    log = read_log(min_max_log_file, REQUANT_MIN_MAX)
    columns: list[tuple[int, str, Summary, float]] = [
        (0, "frozen_min", low_percentile, min_percentile),
        (1, "frozen_max", high_percentile, max_percentile),
    ]
    return _freeze(model, log, min_max_log_file, ("RequantizationRange", DOMAIN), columns)


@transform("freeze_min", after=("quantize_nodes",), changes_values=True)
def freeze_min(model: ir.Model, *, min_max_log_file: str, min_percentile: float = 5.0) -> Change:
    """Replace the ReduceMin in front of a Quantize by the constant that a log recorded.

    Before:  lo = ReduceMin(x);  q = Quantize(x, lo, hi)
    After:   q = Quantize(x, <node>/frozen_min_only, hi)
    Records are ``;<node>__print__;__min:[value]``; the percentile is that of `freeze_requantization_ranges`.
    Left alone: nodes that the log does not name (``not-in-the-log``), a ReduceMin of the model itself
    (``not-a-range``).

    Options:
        min_max_log_file: The log.
        min_percentile: How many percent of the lowest minima are dropped.

    Raises:
        TransformError: The log has no such record, or names a node that the graph does not have or that is no
            ReduceMin.
    """
    log = read_log(min_max_log_file, MIN)
    columns: list[tuple[int, str, Summary, float]] = [(0, "frozen_min_only", low_percentile, min_percentile)]
    return _freeze(model, log, min_max_log_file, ("ReduceMin", ""), columns)


@transform("freeze_max", after=("quantize_nodes",), changes_values=True)
def freeze_max(model: ir.Model, *, min_max_log_file: str, max_percentile: float = 5.0) -> Change:
    """Replace the ReduceMax in front of a Quantize by the constant that a log recorded.

    Before:  hi = ReduceMax(x);  q = Quantize(x, lo, hi)
    After:   q = Quantize(x, lo, <node>/frozen_max_only)
    Records are ``;<node>__print__;__max:[value]``; the percentile is that of `freeze_requantization_ranges`.
    Left alone: nodes that the log does not name (``not-in-the-log``), a ReduceMax of the model itself
    (``not-a-range``).

    Options:
        min_max_log_file: The log.
        max_percentile: How many percent of the highest maxima are dropped.

    Raises:
        TransformError: The log has no such record, or names a node that the graph does not have or that is no
            ReduceMax.
    """
    log = read_log(min_max_log_file, MAX)
    columns: list[tuple[int, str, Summary, float]] = [(0, "frozen_max_only", high_percentile, max_percentile)]
    return _freeze(model, log, min_max_log_file, ("ReduceMax", ""), columns)


def _freeze(
    model: ir.Model,
    log: Log,
    path: str,
    kind: tuple[str, str],
    columns: list[tuple[int, str, Summary, float]],
) -> Change:
    """Replace the outputs of the nodes of `kind` by constants; `columns` say which value, its name and its rule."""
    for _, suffix, _, percentile in columns:
        if not 0 <= percentile <= 100:
            raise TransformError(f"the percentile of {suffix} must lie in 0..100, not {percentile:g}")
    alike = {node_name(node): node for node in model.graph if (node.op_type, node.domain) == kind}
    nodes = {name: node for name, node in alike.items() if _in_range(node)}
    frozen = {str(name).rsplit("/", 1)[0] for name in model.graph.initializers if str(name).endswith(columns[0][1])}
    unknown = sorted(set(log.values) - set(alike) - frozen)
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise TransformError(
            f"{path}: no {kind[0]} node named {unknown[0]!r}{more} in the graph{near(unknown[0], nodes)}"
        )
    change = Change()
    if log.rejected:
        change.skipped["unreadable-records"] = log.rejected
    own = set(log.values) & (set(alike) - set(nodes))
    if own:  # a log of all ReduceMax nodes has those of the model itself
        change.skipped["not-a-range"] = len(own)
    for name, node in nodes.items():
        if name not in log.values:
            change.skip("not-in-the-log")
            continue
        for index, suffix, rule, percentile in columns:
            value = _bounded(node, np.float32(rule([record[index] for record in log.values[name]], percentile)))
            frozen_value = add_initializer(model.graph, fresh_name(model, f"{name}/{suffix}"), value)
            node.outputs[index].replace_all_uses_with(frozen_value)
        remove(node)
        change.applied += 1
    return change


def _bounded(node: ir.Node, value: np.float32) -> Array:
    """Return a logged value within the bounds of a RequantizationRange: a log by hand knows nothing of its Relu."""
    least, most = (constant(limit) for limit in node.inputs[4:6]) if node.domain == DOMAIN else (None, None)
    if least is None or most is None:
        return np.asarray(value)
    return np.asarray(np.clip(value, least.numpy(), most.numpy()))


def _in_range(node: ir.Node) -> bool:
    """Whether `node` finds a range for a Quantize or a Requantize, rather than being part of the model."""
    readers = [use.node for output in node.outputs for use in output.uses()]
    return any(reader.domain == DOMAIN for reader in readers)
