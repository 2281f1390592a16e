"""Ranges that the user gives: a range file or a min/max log, and overrides."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from ... import RequantError
from ...calibration.model.identity import differences, listed
from ...calibration.range_files.log import Log, is_log, load_log
from ...calibration.range_files.overrides import Overrides, load_overrides
from ...calibration.range_files.range_file import RangeFile, load_ranges, shard_text
from ...calibration.rules.precision import Precision
from ...calibration.rules.ranges import Rule, parse_rule
from ...system.printable import number_of
from ...transforms.int8.qparams import Scheme
from .efforts import EFFORTS
from .options import Options


@dataclass(frozen=True, slots=True)
class GivenRanges:
    """The ranges and overrides of the user.

    Attributes:
        ranges: The ranges; None if data give them.
        source: The origin of the ranges, for messages.
        overrides: The overrides of single tensors.
        rule: The rule that chooses the ranges, or that chose the ranges of the file; None for a log.
    """

    ranges: RangeFile | Log | None
    source: str
    overrides: Overrides
    rule: Rule | None

    @property
    def calibration(self) -> str:
        """The rule of the ranges as text, or ``log``."""
        return "log" if self.rule is None else str(self.rule)

    @property
    def description(self) -> str:
        """The ranges in words; empty if data give them."""
        if isinstance(self.ranges, RangeFile):
            return f"{self.source}: {number_of(self.ranges.samples, 'sample')} of {self.ranges.data.description}"
        return self.source if self.ranges is not None else ""

    def known(self, *, judged: bool) -> bool:
        """Return whether there are ranges: the user gives them, or data, which `judged` says."""
        return judged or self.ranges is not None

    def is_of(self, identity: str) -> bool:
        """Return whether the ranges are for the model with this fingerprint, computed before simplification."""
        return not isinstance(self.ranges, RangeFile) or self.ranges.model == identity

    def refuse(self, path: str | os.PathLike[str], simple: ir.Model, tensors: Iterable[str]) -> RequantError:
        """Return an error that names differences between the model of the ranges and this one."""
        digests = self.ranges.digests if isinstance(self.ranges, RangeFile) else {}
        difference = differences(simple, digests, tensors)
        return RequantError(f"{self.source}: ranges of another model than {path} ({difference}); calibrate this one")

    def check(self, *models: ir.Model) -> None:
        """Refuse names of tensors that no form of the model has.

        Args:
            models: The model before and after simplification.

        Raises:
            RequantError: A name is unknown; the message lists similar names.
        """
        known = {name for model in models for name in tensor_names(model)}
        self.overrides.check(known)
        if isinstance(self.ranges, Log):
            self.ranges.check(known)

    def remarks(self, simple: ir.Model, scheme: Scheme, tensors: Iterable[str]) -> list[str]:
        """Return notes on ranges and overrides that have less effect than the user may expect.

        Args:
            simple: The simplified model.
            scheme: The integer types.
            tensors: Its tensors that may become integers.
        """
        known = tensor_names(simple)
        notes = [*self._precision_note(scheme), *self._missing_note(tensors)]
        if isinstance(self.ranges, RangeFile) and self.ranges.data.shards:
            notes.append(f"{self.source}: the data of shard {', '.join(map(shard_text, self.ranges.data.shards))} only")
        notes += [
            f"{self.overrides.source}: tensor {name!r} was folded into its neighbours by simplification"
            for name in self.overrides.tensors
            if name not in known
        ]
        if isinstance(self.ranges, Log) and self.ranges.rejected:
            notes.append(f"{self.source}: {self.ranges.rejected} records cannot be read")
        return notes

    def _missing_note(self, tensors: Iterable[str]) -> list[str]:
        """Return a note if the ranges lack tensors; a tensor without values in the data is not lacking."""
        if self.ranges is None:
            return []
        seen = self.ranges.digests if isinstance(self.ranges, RangeFile) else {}
        known = {*seen, *self.ranges.ranges, *self.overrides.tensors}
        missing = [name for name in tensors if name not in known]
        if not missing:
            return []
        return [f"{self.source}: has no range of {listed(missing)}: operators that need one stay float"]

    def _precision_note(self, scheme: Scheme) -> list[str]:
        """Return a note if the ranges were chosen for other integer types and the rule depends on them."""
        if not isinstance(self.ranges, RangeFile) or not self.ranges.rule.needs_precision:
            return []
        if self.ranges.precision == precision_of(scheme):
            return []
        rule = self.ranges.rule
        return [f"{self.source}: the ranges were chosen for other zero points; calibration '{rule}' chooses new ones"]


def load_given_ranges(options: Options) -> GivenRanges:
    """Read the ranges and overrides of the options.

    Raises:
        RequantError: A file cannot be read, or the rule cannot choose from its ranges.
    """
    overrides = read_overrides(options.overrides)
    rule = None if options.calibration is None else parse_rule(options.calibration)
    if options.ranges is None:
        return GivenRanges(None, "", overrides, rule or parse_rule(EFFORTS[options.effort].rule))
    if isinstance(options.ranges, RangeFile):
        return _of_file(options.ranges, "ranges", overrides, rule, options.scheme)
    source = os.fspath(options.ranges)
    if not is_log(options.ranges):
        return _of_file(load_ranges(options.ranges), source, overrides, rule, options.scheme)
    ruled = next((name for name, override in overrides.tensors.items() if override.rule is not None), None)
    if ruled is not None:
        raise RequantError(
            f"{overrides.source}: tensor {ruled!r}: a rule cannot choose from the log {source}; give a range"
        )
    if rule is not None:
        raise RequantError(f"{source}: a log has no statistics for the rule {rule}; leave it out")
    return GivenRanges(load_log(options.ranges), source, overrides, None)


def _of_file(file: RangeFile, source: str, overrides: Overrides, rule: Rule | None, scheme: Scheme) -> GivenRanges:
    """Return the ranges of a file with overrides; a rule chooses them again."""
    try:
        file = file if rule is None else file.choose(rule, precision_of(scheme))
        file = file.overridden(overrides)
    except RequantError as error:
        raise RequantError(f"{source}: {error}") from error
    return GivenRanges(file, source, file.overrides, file.rule)


def read_overrides(overrides: Overrides | str | os.PathLike[str] | None) -> Overrides:
    """Return overrides; a path is read.

    Raises:
        RequantError: The file cannot be read.
    """
    if overrides is None:
        return Overrides()
    return overrides if isinstance(overrides, Overrides) else load_overrides(overrides)


def precision_of(scheme: Scheme) -> Precision:
    """Return the precision for which ranges of activations are chosen."""
    return Precision(symmetric=scheme.symmetric)


def tensor_names(model: ir.Model) -> set[str]:
    """Return the names of all tensors of the graph and of its subgraphs."""
    values = (
        value
        for graph in model.graphs()
        for value in (*graph.inputs, *graph.initializers.values(), *(o for node in graph for o in node.outputs))
    )
    return {value.name for value in values if value.name}
