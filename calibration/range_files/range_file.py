"""The range file: the statistics of one model's tensors and the chosen ranges, as JSON.

A file belongs to one model. Files of shards of one run merge to the file of the whole run, and files of runs over
different data to the file of one run over all the data.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from ... import RequantError
from ...system.given import check_kind, check_path, or_default
from ...system.numbers import FLOAT_MAX
from ...system.writing import write_atomically
from ..rules.precision import Precision
from ..rules.ranges import Range, Rule, parse_rule
from ..statistics.histogram import Histogram
from ..statistics.observations import Observations
from .decoding import LARGE_FILE, Count, Finite, Positive, convert_rows, load_document
from .overrides import Overrides, overrides_from_json
from .records import observations_from_json, observations_to_json

SCHEMA = 2
"""The version of the file format: the one that `save_ranges` writes, and the only one that `load_ranges` reads."""
JOINT = " + "
"""The separator between the descriptions of merged data."""


@dataclass(frozen=True, slots=True)
class Data:
    """The observed data and the settings of the run.

    Attributes:
        description: The data, in words.
        batch: Samples per run.
        shards: The shards of the run, as ``(i, n)``, ascending; empty for a whole run.
        histogram_values: The most values of a tensor that a histogram counts per sample; None for all.
    """

    description: str
    batch: int = 1
    shards: tuple[tuple[int, int], ...] = ()
    histogram_values: int | None = None

    def __post_init__(self) -> None:
        """Sort the shards; all shards of a run become an empty tuple.

        Raises:
            ValueError: The shards are not different shards of one run.
        """
        wholes = {parts for _, parts in self.shards}
        if len(wholes) > 1 or any(not 1 <= part <= parts for part, parts in self.shards):
            raise ValueError(f"not shards of one run: {', '.join(map(shard_text, self.shards))}")
        if len(set(self.shards)) < len(self.shards):
            raise ValueError("a shard occurs twice")
        whole = wholes == {len(self.shards)}
        object.__setattr__(self, "shards", () if whole else tuple(sorted(self.shards)))


@dataclass(frozen=True, slots=True)
class RangeFile:
    """The content of a range file.

    Attributes:
        model: The `fingerprint` of the model.
        data: The observed data.
        rule: The rule that chose the ranges.
        seen: The statistics.
        ranges: The chosen ranges, with the overrides applied. Tensors without values and tensors that stay float have
            none.
        digests: A digest of the computation of each tensor, from `tensor_digests`.
        overrides: The ranges and rules that the user sets for single tensors.
        precision: The integers that the ranges were chosen for.
    """

    model: str
    data: Data
    rule: Rule
    seen: Observations
    ranges: Mapping[str, Range]
    digests: Mapping[str, str] = field(default_factory=dict)
    overrides: Overrides = field(default_factory=Overrides)
    precision: Precision = field(default_factory=Precision)

    @classmethod
    def of(
        cls,
        seen: Observations,
        rule: Rule,
        *,
        model: str,
        data: Data,
        digests: Mapping[str, str],
        precision: Precision | None = None,
    ) -> RangeFile:
        """Choose a range for every observed tensor."""
        precision = or_default(precision, Precision, "precision")
        ranges = {name: rule(seen.ranges[name], seen.runs.get(name), precision) for name in sorted(seen.ranges)}
        return cls(model, data, rule, seen, ranges, digests, precision=precision)

    @property
    def samples(self) -> int:
        """How many samples were observed."""
        return self.seen.samples

    @property
    def has_histograms(self) -> bool:
        """Whether the run built histograms. Tensors in bodies never have one."""
        needed = self.rule.needs_histogram or self.overrides.needs_histogram
        return needed or any(isinstance(statistic, Histogram) for statistic in self.seen.ranges.values())

    def choose(self, rule: Rule, precision: Precision | None = None) -> RangeFile:
        """Return a file with ranges for another rule or another precision.

        Raises:
            RequantError: The rule needs histograms, and there are only extremes.
        """
        check_kind(rule, Rule, "the rule must be a Rule, such as parse_rule('mse')")
        if rule.needs_histogram and not self.has_histograms:
            raise RequantError(f"the rule {rule} needs histograms, and there are none; calibrate with {rule}")
        file = RangeFile.of(
            self.seen,
            rule,
            model=self.model,
            data=self.data,
            digests=self.digests,
            precision=precision or self.precision,
        )
        return file.overridden(self.overrides)

    def overridden(self, overrides: Overrides) -> RangeFile:
        """Return a file with these overrides in addition to its own; for a tensor in both, these apply.

        Raises:
            RequantError: A rule needs histograms, and there are only extremes.
        """
        if not overrides.tensors:
            return self
        if overrides.needs_histogram and not self.has_histograms:
            raise RequantError(f"{overrides.source}: a rule needs histograms, and there are none")
        ranges = dict(self.ranges)
        for name, own in overrides.tensors.items():
            ranges.pop(name, None)
            if own.range is not None:
                ranges[name] = own.range
            elif name in self.seen.ranges and not own.keep_float:
                rule = own.rule or self.rule
                ranges[name] = rule(self.seen.ranges[name], self.seen.runs.get(name), self.precision)
        both = Overrides({**self.overrides.tensors, **overrides.tensors}, overrides.source)
        return replace(self, ranges=ranges, overrides=both)

    def __or__(self, other: RangeFile) -> RangeFile:
        """Merge two files, see `merge_files`."""
        if not isinstance(other, RangeFile):
            return NotImplemented
        return merge_files([self, other])


def merge_files(files: Sequence[RangeFile]) -> RangeFile:
    """Merge one or more range files, in any order, to the file of one run over all the data.

    All shards of a run give the file of the whole run, some of them give a file of several shards. Before files of
    different data are merged, the shards of each must be complete.

    Raises:
        RequantError: The files belong to different models, come from runs with different settings, or share data.
    """
    if not files:
        raise RequantError("there are no range files to merge")
    first = files[0]
    for other in files[1:]:
        _check_alike(first, other)
    by_data: dict[str, list[RangeFile]] = {}
    for file in files:
        by_data.setdefault(file.data.description, []).append(file)
    wholes = {description: _joined(description, parts) for description, parts in by_data.items()}
    if len(wholes) > 1:
        for description, data in wholes.items():
            if data.shards:
                present = ", ".join(map(shard_text, data.shards))
                raise RequantError(
                    f"only shard {present} of {description!r} is given; all its shards are needed, of the same "
                    "data source"
                )
    descriptions = sorted({part for description in wholes for part in description.split(JOINT)})
    merged = RangeFile.of(
        reduce(or_, [file.seen for file in files]),
        first.rule,
        model=first.model,
        data=replace(next(iter(wholes.values())), description=JOINT.join(descriptions)),
        digests=_merged_digests(files),
        precision=first.precision,
    )
    return merged.overridden(first.overrides)


def _merged_digests(files: Sequence[RangeFile]) -> dict[str, str]:
    """Return one digest per tensor: constants that were folded on different machines may differ in the last bit."""
    merged: dict[str, str] = {}
    for name, digest in (row for file in files for row in file.digests.items()):
        merged[name] = min(digest, merged.get(name, digest))
    return merged


def _check_alike(one: RangeFile, other: RangeFile) -> None:
    """Refuse files of different models or settings."""
    if one.model != other.model:
        raise RequantError(f"ranges of two models cannot be merged: {one.model[:12]} and {other.model[:12]}")
    if one.rule != other.rule:
        raise RequantError(f"ranges chosen by different rules cannot be merged: {one.rule} and {other.rule}")
    if one.precision != other.precision:
        raise RequantError(f"ranges for different precisions cannot be merged: {one.precision} and {other.precision}")
    if one.data.batch != other.data.batch:
        raise RequantError(f"runs with batch {one.data.batch} and batch {other.data.batch} cannot be merged")
    if one.overrides != other.overrides:
        names = {*one.overrides.tensors, *other.overrides.tensors}
        differing = sorted(n for n in names if one.overrides.tensors.get(n) != other.overrides.tensors.get(n))
        raise RequantError(f"ranges with different overrides cannot be merged: see tensor {differing[0]!r}")
    values = [file.data.histogram_values or "all" for file in (one, other)]
    if values[0] != values[1]:
        raise RequantError(f"histograms of {values[0]} and of {values[1]} values per sample cannot be merged")


def _joined(description: str, files: Sequence[RangeFile]) -> Data:
    """Return the data of merged files that have the same description."""
    shards = [shard for file in files for shard in file.data.shards]
    for shard, times in Counter(shards).items():
        if times > 1:
            raise RequantError(f"shard {shard_text(shard)} of {description!r} is given twice")
    if len(files) > 1 and shards and any(not file.data.shards for file in files):
        raise RequantError(f"{description!r} is given both whole and as shard {shard_text(shards[0])}")
    if len({parts for _, parts in shards}) > 1:
        one, another = min(shards, key=lambda shard: shard[1]), max(shards, key=lambda shard: shard[1])
        raise RequantError(
            f"shards of different divisions cannot be merged: {shard_text(one)} and {shard_text(another)}"
        )
    if any(file.seen.repeated and file.seen == files[0].seen for file in files[1:]):
        raise RequantError(f"the same run over {description!r} is given twice")
    return replace(files[0].data, shards=tuple(shards))


def shard_text(shard: tuple[int, int]) -> str:
    """Return ``"1/2"``."""
    return f"{shard[0]}/{shard[1]}"


def save_ranges(path: str | os.PathLike[str], file: RangeFile) -> None:
    """Write a range file atomically. The same content gives the same bytes.

    Raises:
        RequantError: The file cannot be written.
    """
    check_path(path, "a range file")
    check_kind(file, RangeFile, "the ranges must be a RangeFile")
    seen = observations_to_json(file.seen)
    overrides = file.overrides.to_json()
    limit = file.data.histogram_values
    tensors = {}
    for name in sorted({*seen["tensors"], *file.digests, *file.ranges, *overrides}):
        row: dict[str, Any] = {}
        if name in file.ranges:
            row["lo"], row["hi"] = file.ranges[name]
        if name in overrides:
            row["override"] = overrides[name]
        if name in file.digests:
            row["digest"] = file.digests[name]
        tensors[name] = row | seen["tensors"].get(name, {})
    document = {
        "schema": SCHEMA,
        "model": file.model,
        "data": {
            "description": file.data.description,
            "samples": file.samples,
            "batch": file.data.batch,
            "shards": list(map(shard_text, file.data.shards)),
            **({"histogram_values": limit} if limit is not None else {}),
        },
        "rule": str(file.rule),
        "precision": {"bits": file.precision.bits, "symmetric": file.precision.symmetric},
        "inputs": seen["inputs"],
        "tensors": tensors,
        "feeds": seen["feeds"],
    }
    entries = (f"{json.dumps(key)}: {_text(key, value)}" for key, value in document.items())
    write_atomically(path, ("{\n" + ",\n".join(entries) + "\n}\n").encode())


def _text(key: str, value: Any) -> str:
    """Return an entry of the document as text. Tables have one line per row."""
    if key not in ("inputs", "tensors", "feeds") or not value:
        return json.dumps(value, allow_nan=False)
    # repr, which json uses for floats, reads back as the same float
    rows = (f"{json.dumps(name)}: {json.dumps(row, allow_nan=False)}" for name, row in value.items())
    return "{\n" + ",\n".join(rows) + "\n}"


def load_ranges(path: str | os.PathLike[str]) -> RangeFile:
    """Read a range file.

    Raises:
        RequantError: The file is missing, malformed, or of another schema.
    """
    check_path(path, "a range file")
    name = os.fspath(path)
    document = load_document(path, _Document, "range file", SCHEMA, hint="calibrate again", most=LARGE_FILE)
    place = f"{name}: malformed range file"
    rows = convert_rows(document.tensors, _TensorRow, f"{place}: tensor")
    try:
        return _range_file(document, rows, name)
    except (TypeError, ValueError, RequantError) as error:
        raise RequantError(f"{place}: {error}") from error


class _DataRow(msgspec.Struct, frozen=True):
    """The entry ``data`` of a range file."""

    description: str
    samples: Count
    batch: Positive
    shards: list[Annotated[str, msgspec.Meta(pattern="^[0-9]{1,18}/[0-9]{1,18}$")]]
    histogram_values: Positive | UnsetType = UNSET


class _Integers(msgspec.Struct, frozen=True):
    """The entry ``precision`` of a range file."""

    bits: int
    symmetric: bool


class _TensorRow(msgspec.Struct, frozen=True):
    """A row of ``tensors`` in a range file, without the statistics."""

    lo: Finite | UnsetType = UNSET
    hi: Finite | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    override: Any = UNSET

    def __post_init__(self) -> None:
        """Check the range."""
        if (self.lo is UNSET) != (self.hi is UNSET):
            raise ValueError(f"{'lo' if self.lo is UNSET else 'hi'!r} is missing")
        if self.lo is not UNSET and self.hi is not UNSET and self.lo > self.hi:
            raise ValueError("'lo' is above 'hi'")
        if any(bound is not UNSET and abs(bound) > FLOAT_MAX for bound in (self.lo, self.hi)):
            raise ValueError("the range is beyond float32")


class _Document(msgspec.Struct, frozen=True):
    """A range file. `observations_from_json` checks the statistics."""

    model: str
    data: _DataRow
    rule: str
    precision: _Integers
    inputs: dict[str, Any]
    tensors: dict[str, Any]
    feeds: dict[str, Any]


def _range_file(document: _Document, rows: Mapping[str, _TensorRow], source: str) -> RangeFile:
    """Return the content of a range file, from the document, its rows by tensor, and the path."""
    data = document.data
    seen = observations_from_json(
        {"samples": data.samples, "tensors": document.tensors, "inputs": document.inputs, "feeds": document.feeds}
    )
    # + 0.0: no -0.0
    ranges = {
        tensor: (row.lo + 0.0, row.hi + 0.0)
        for tensor, row in rows.items()
        if row.lo is not UNSET and row.hi is not UNSET
    }
    overrides = {tensor: row.override for tensor, row in rows.items() if row.override is not UNSET}
    without = sorted(seen.ranges.keys() - ranges.keys() - overrides.keys())
    if without:
        raise ValueError(f"tensor {without[0]!r}: 'lo' is missing")
    return RangeFile(
        model=document.model,
        data=Data(
            data.description,
            data.batch,
            tuple((int(part), int(parts)) for part, _, parts in (text.partition("/") for text in data.shards)),
            None if data.histogram_values is UNSET else data.histogram_values,
        ),
        rule=parse_rule(document.rule),
        seen=seen,
        ranges=ranges,
        digests={tensor: row.digest for tensor, row in rows.items() if row.digest is not UNSET},
        overrides=Overrides(overrides_from_json(overrides), source),
        precision=Precision(document.precision.bits, document.precision.symmetric),
    )
