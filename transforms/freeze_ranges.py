"""Replace ranges computed at run time by constant ranges from a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .. import near
from ..system.log_records import MAX, MIN, MIN_MAX
from .graphs.queries import constant, node_name
from .graphs.rewriter import add_initializer, names, remove, unused_name
from .int8.qparams import Array
from .parts.functions import DOMAIN
from .parts.min_max_log import Log, high_percentile, low_percentile, read_log
from .registry import Change, TransformError, transform

Summary = Callable[[list[float], float], float]


@dataclass(frozen=True, slots=True)
class _Column:
    """One number of each log record, which becomes a constant.

    Attributes:
        index: The index of the number in a record, and of the output that it replaces.
        suffix: The constant is named ``<node>/<suffix>``.
        rule: Selects one of the logged numbers.
        percentile: The argument of the rule, in percent.
    """

    index: int
    suffix: str
    rule: Summary
    percentile: float


@transform("freeze_requantization_ranges", after=("quantize_nodes",), changes_values=True)
def freeze_requantization_ranges(
    model: ir.Model, *, min_max_log_file: str, min_percentile: float = 5.0, max_percentile: float = 5.0
) -> Change:
    """Replace RequantizationRange nodes by constant ranges from a log.

    Before:  lo, hi = RequantizationRange(acc, ...);  q = Requantize(acc, ..., lo, hi)
    After:   q = Requantize(acc, ..., <node>/frozen_min, <node>/frozen_max)
    From N records ``;<node>__print__;__requant_min_max:[min][max]`` the transform takes the minimum at index
    round(N * min_percentile / 100) of the ascending minima, and the maximum at index
    round(N * (1 - max_percentile / 100)) of the ascending maxima. Both are clipped to the node's own bounds, which come
    from the Relu or Clip that the node includes.
    Left alone: nodes without a record; their range is still computed at run time (``not-in-the-log``).

    Options:
        min_max_log_file: The path of the log.
        min_percentile: The share of the lowest minima to drop, in percent.
        max_percentile: The share of the highest maxima to drop, in percent.

    Raises:
        TransformError: The log has no such record, a record names no RequantizationRange of the graph, or a percentile
            is outside 0..100.
    """
    log = read_log(min_max_log_file, MIN_MAX)
    columns = [
        _Column(0, "frozen_min", low_percentile, min_percentile),
        _Column(1, "frozen_max", high_percentile, max_percentile),
    ]
    return _freeze(model, log, min_max_log_file, ("RequantizationRange", DOMAIN), columns)


@transform("freeze_min", after=("quantize_nodes",), changes_values=True)
def freeze_min(model: ir.Model, *, min_max_log_file: str, min_percentile: float = 5.0) -> Change:
    """Replace the ReduceMin in front of a Quantize by a constant from a log.

    Before:  lo = ReduceMin(x);  q = Quantize(x, lo, hi)
    After:   q = Quantize(x, <node>/frozen_min_only, hi)
    Records are ``;<node>__print__;__min:[value]``. The percentile works as in `freeze_requantization_ranges`.
    Left alone: nodes without a record (``not-in-the-log``); a ReduceMin of the original model (``not-a-range``).

    Options:
        min_max_log_file: The path of the log.
        min_percentile: The share of the lowest minima to drop, in percent.

    Raises:
        TransformError: The log has no such record, a record names no ReduceMin of the graph, or the percentile is
            outside 0..100.
    """
    column = _Column(0, "frozen_min_only", low_percentile, min_percentile)
    return _freeze(model, read_log(min_max_log_file, MIN), min_max_log_file, ("ReduceMin", ""), [column])


@transform("freeze_max", after=("quantize_nodes",), changes_values=True)
def freeze_max(model: ir.Model, *, min_max_log_file: str, max_percentile: float = 5.0) -> Change:
    """Replace the ReduceMax in front of a Quantize by a constant from a log.

    Before:  hi = ReduceMax(x);  q = Quantize(x, lo, hi)
    After:   q = Quantize(x, lo, <node>/frozen_max_only)
    Records are ``;<node>__print__;__max:[value]``. The percentile works as in `freeze_requantization_ranges`.
    Left alone: nodes without a record (``not-in-the-log``); a ReduceMax of the original model (``not-a-range``).

    Options:
        min_max_log_file: The path of the log.
        max_percentile: The share of the highest maxima to drop, in percent.

    Raises:
        TransformError: The log has no such record, a record names no ReduceMax of the graph, or the percentile is
            outside 0..100.
    """
    column = _Column(0, "frozen_max_only", high_percentile, max_percentile)
    return _freeze(model, read_log(min_max_log_file, MAX), min_max_log_file, ("ReduceMax", ""), [column])


def check_percentile(name: str, percentile: float) -> None:
    """Raise TransformError for a percentile outside 0..100."""
    if not 0 <= percentile <= 100:
        raise TransformError(f"{name} must lie in 0..100, not {percentile:g}")


def check_names(path: str, kind: str, unknown: Sequence[str], known: Iterable[str]) -> None:
    """Raise TransformError if a log names nodes or tensors that the graph does not have.

    Args:
        path: The path of the log.
        kind: ``"tensor"`` or a type of nodes, for the message.
        unknown: The names that the graph does not have.
        known: The names of the graph.
    """
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise TransformError(f"{path}: no {kind} named {unknown[0]!r}{more} in the graph{near(unknown[0], known)}")


def _freeze(model: ir.Model, log: Log, path: str, kind: tuple[str, str], columns: list[_Column]) -> Change:
    """Replace the outputs of nodes by constants from a log.

    Args:
        model: The model.
        log: The log.
        path: Its path, for messages.
        kind: Operator type and domain of the nodes.
        columns: The constants.
    """
    for column in columns:
        check_percentile(f"the percentile of {column.suffix}", column.percentile)
    same_type = {node_name(node): node for node in model.graph if (node.op_type, node.domain) == kind}
    nodes = {name: node for name, node in same_type.items() if _in_range(node)}
    frozen = {str(name).rsplit("/", 1)[0] for name in model.graph.initializers if str(name).endswith(columns[0].suffix)}
    check_names(path, f"{kind[0]} node", sorted(set(log.values) - set(same_type) - frozen), nodes)
    change, taken = Change(), names(model)
    if log.rejected:
        change.skipped["unreadable-records"] = log.rejected
    own = set(log.values) & (set(same_type) - set(nodes))
    if own:  # the log may also name ReduceMax nodes of the original model
        change.skipped["not-a-range"] = len(own)
    for name, node in nodes.items():
        if name not in log.values:
            change.skip("not-in-the-log")
            continue
        for column in columns:
            numbers = [record[column.index] for record in log.values[name]]
            value = _bounded(node, np.float32(column.rule(numbers, column.percentile)))
            frozen_value = add_initializer(model.graph, unused_name(taken, f"{name}/{column.suffix}"), value)
            node.outputs[column.index].replace_all_uses_with(frozen_value)
        remove(node)
        change.applied += 1
    return change


def _bounded(node: ir.Node, value: np.float32) -> Array:
    """Return a logged value clipped to the bounds of a RequantizationRange; a log written by hand may exceed them."""
    least, most = (constant(limit) for limit in node.inputs[4:6]) if node.domain == DOMAIN else (None, None)
    if least is None or most is None:
        return np.asarray(value)
    return np.asarray(np.clip(value, least.numpy(), most.numpy()))


def _in_range(node: ir.Node) -> bool:
    """Whether a Quantize or a Requantize reads `node`; other nodes belong to the original model."""
    readers = [use.node for output in node.outputs for use in output.uses()]
    return any(reader.domain == DOMAIN for reader in readers)
