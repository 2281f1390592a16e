"""What the user supplies instead of data or on top of them: a range file or a log, and overrides."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from ... import RequantError
from ...calibration.files import RangeFile, load_ranges, shard_text
from ...calibration.identity import differences, fingerprint
from ...calibration.log import Log, is_log, load_log
from ...calibration.overrides import Overrides, load_overrides
from ...calibration.precision import Precision
from ...calibration.ranges import Rule, parse_rule
from ...transforms.qparams import Scheme
from .efforts import EFFORTS
from .options import Options


@dataclass(frozen=True, slots=True)
class Supply:
    """What was supplied.

    Attributes:
        ranges: The ranges; None when they are taken from data.
        source: Where the ranges are from, for messages.
        overrides: The user's own word on tensors.
        rule: The rule that chooses ranges, or has chosen them; None for a log.
    """

    ranges: RangeFile | Log | None
    source: str
    overrides: Overrides
    rule: Rule | None

    @property
    def calibration(self) -> str:
        """What chose the ranges, in a word."""
        return "log" if self.rule is None else str(self.rule)

    @property
    def description(self) -> str:
        """The ranges in words; empty when they are taken from data."""
        if isinstance(self.ranges, RangeFile):
            return f"{self.source}: {self.ranges.samples} samples of {self.ranges.data.description}"
        return self.source if self.ranges is not None else ""

    def is_of(self, original: ir.Model) -> bool:
        """Whether the ranges are of this model, as far as can be told before it is simplified."""
        return not isinstance(self.ranges, RangeFile) or self.ranges.model == fingerprint(original)

    def refuse(self, path: str | os.PathLike[str], simple: ir.Model, tensors: Iterable[str]) -> RequantError:
        """Return the error that tells how the ranges' model differs from this one."""
        theirs = self.ranges.digests if isinstance(self.ranges, RangeFile) else {}
        found = differences(simple, theirs, tensors)
        return RequantError(f"{self.source}: ranges of another model than {path} ({found}); calibrate this one")

    def check(self, *models: ir.Model) -> None:
        """Refuse names of tensors that none of these models, which are one in different forms, has.

        Raises:
            RequantError: There is one; the message lists near names.
        """
        known = {name for model in models for name in tensor_names(model)}
        self.overrides.check(known)
        if isinstance(self.ranges, Log):
            self.ranges.check(known)

    def remarks(self, simple: ir.Model, scheme: Scheme) -> list[str]:
        """Say what of it is not as the user may think."""
        known = tensor_names(simple)
        notes = self._precision_note(scheme)
        if isinstance(self.ranges, RangeFile) and self.ranges.data.shards:
            notes.append(f"{self.source}: the data of shard {', '.join(map(shard_text, self.ranges.data.shards))} only")
        notes += [
            f"{self.overrides.source}: tensor {name!r} was folded into its neighbours before anything else"
            for name in self.overrides.tensors
            if name not in known
        ]
        if isinstance(self.ranges, Log) and self.ranges.rejected:
            notes.append(f"{self.source}: {self.ranges.rejected} records cannot be read")
        return notes

    def _precision_note(self, scheme: Scheme) -> list[str]:
        """Say that the ranges were chosen for other integers, where that matters."""
        if not isinstance(self.ranges, RangeFile) or not self.ranges.rule.needs_precision:
            return []
        if self.ranges.precision == precision_of(scheme):
            return []
        rule = self.ranges.rule
        return [f"{self.source}: the ranges were chosen for other zero points; --calibration '{rule}' chooses anew"]


def load_supply(options: Options) -> Supply:
    """Read the files that the options name.

    Raises:
        RequantError: One cannot be read, or its ranges cannot be chosen as asked.
    """
    overrides = read_overrides(options.overrides)
    asked = None if options.calibration is None else parse_rule(options.calibration)
    if options.ranges is None:
        return Supply(None, "", overrides, asked or parse_rule(EFFORTS[options.effort].rule))
    if isinstance(options.ranges, RangeFile):
        return _of_file(options.ranges, "ranges", overrides, asked, options.scheme)
    source = os.fspath(options.ranges)
    if not is_log(options.ranges):
        return _of_file(load_ranges(options.ranges), source, overrides, asked, options.scheme)
    ruled = next((name for name, override in overrides.tensors.items() if override.rule is not None), None)
    if ruled is not None:
        raise RequantError(
            f"{overrides.source}: tensor {ruled!r}: no rule can choose from the log {source}; give a range"
        )
    if asked is not None:
        raise RequantError(f"{source}: a log holds ranges alone, from which the rule {asked} cannot choose")
    return Supply(load_log(options.ranges), source, overrides, None)


def _of_file(file: RangeFile, source: str, overrides: Overrides, asked: Rule | None, scheme: Scheme) -> Supply:
    """Return the ranges of a file, chosen anew where that is asked for, and with overrides."""
    try:
        file = file if asked is None else file.choose(asked, precision_of(scheme))
        file = file.overridden(overrides)
    except RequantError as error:
        raise RequantError(f"{source}: {error}") from error
    return Supply(file, source, file.overrides, file.rule)


def read_overrides(overrides: Overrides | str | os.PathLike[str] | None) -> Overrides:
    """Return overrides, from a file where they are named by its path.

    Raises:
        RequantError: The file cannot be read.
    """
    if overrides is None:
        return Overrides()
    return overrides if isinstance(overrides, Overrides) else load_overrides(overrides)


def precision_of(scheme: Scheme) -> Precision:
    """Return what ranges of activations are chosen for."""
    return Precision(symmetric=scheme.symmetric)


def tensor_names(model: ir.Model) -> set[str]:
    """Return the names of all tensors of the graph and of the bodies in it."""
    values = (
        value
        for graph in model.graphs()
        for value in (*graph.inputs, *graph.initializers.values(), *(o for node in graph for o in node.outputs))
    )
    return {value.name for value in values if value.name}
