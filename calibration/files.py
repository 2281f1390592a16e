"""The range file: all that was observed of one model's tensors and the chosen ranges, as JSON.

The file is of one model, and of no other. Files of shards of one run, and of runs over different data, merge to the
file of one run over all of it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, BinaryIO

from .. import RequantError
from .histogram import Histogram
from .observations import Observations
from .overrides import Overrides, overrides_from_json
from .precision import Precision
from .ranges import Range, Rule, parse_rule
from .records import natural, number, observations_from_json, observations_to_json, typed, with_name

SCHEMA = 2
"""The version of the file format that this program writes, and the only one that it reads."""
JOINT = " + "
"""What stands between the descriptions of data that were merged."""


@dataclass(frozen=True, slots=True)
class Data:
    """What data were observed, and how.

    Attributes:
        description: The data, in words.
        batch: Samples per run.
        shards: The parts of the run that are in here, as ``(i, n)``, ascending; empty when all are.
        histogram_values: How many values of a tensor histograms count per sample at most; None for all.
    """

    description: str
    batch: int = 1
    shards: tuple[tuple[int, int], ...] = ()
    histogram_values: int | None = None

    def __post_init__(self) -> None:
        """Bring the shards into the only form that there is for each set of them.

        Raises:
            ValueError: They are not some of the parts of one whole.
        """
        wholes = {parts for _, parts in self.shards}
        if len(wholes) > 1 or any(not 1 <= part <= parts for part, parts in self.shards):
            raise ValueError(f"no parts of one whole: {', '.join(map(shard_text, self.shards))}")
        if len(set(self.shards)) < len(self.shards):
            raise ValueError("a part is there twice")
        whole = wholes == {len(self.shards)}
        object.__setattr__(self, "shards", () if whole else tuple(sorted(self.shards)))


@dataclass(frozen=True, slots=True)
class RangeFile:
    """What a range file holds.

    Attributes:
        model: The `fingerprint` of the model.
        data: What data were observed.
        rule: The rule that chose the ranges.
        seen: What was observed.
        ranges: The chosen ranges; tensors without values, or that are to stay float, have none.
        digests: What computes each tensor that was to be observed, from `tensor_digests`.
        overrides: The user's own word on tensors, which `ranges` heed.
        precision: What the ranges were chosen for.
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
        """Choose the range of every tensor that was seen."""
        precision = precision or Precision()
        ranges = {name: rule(seen.ranges[name], seen.runs.get(name), precision) for name in sorted(seen.ranges)}
        return cls(model, data, rule, seen, ranges, digests, precision=precision)

    @property
    def samples(self) -> int:
        """How many samples were observed."""
        return self.seen.samples

    @property
    def has_histograms(self) -> bool:
        """Whether histograms were built, though tensors in bodies never have one."""
        asked = self.rule.needs_histogram or self.overrides.needs_histogram
        return asked or any(isinstance(statistic, Histogram) for statistic in self.seen.ranges.values())

    def choose(self, rule: Rule, precision: Precision | None = None) -> RangeFile:
        """Choose the ranges anew, with another rule, or for another precision.

        Raises:
            RequantError: The rule needs histograms, and there are only extremes.
        """
        if rule.needs_histogram and not self.has_histograms:
            raise RequantError(f"the rule {rule} needs histograms, of which there are none; calibrate with {rule}")
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
        """Return what the file is with the user's own word on tensors, besides that which it has on others.

        Raises:
            RequantError: A rule needs histograms, and there are only extremes.
        """
        if not overrides.tensors:
            return self
        if overrides.needs_histogram and not self.has_histograms:
            raise RequantError(f"{overrides.source}: a rule needs histograms, of which there are none")
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
    """Merge range files, at least one, in any order; the result is that of one run over all the data.

    Files of shards of one run, all of them, give the file of the whole run, and some of them a file of several shards.
    Files of different data give one of all data; the shards of each must be complete then.

    Raises:
        RequantError: The files are of different models, were made in different ways, or have data in common.
    """
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
                there = ", ".join(map(shard_text, data.shards))
                raise RequantError(
                    f"other shards of {description!r} than {there} are missing; all must be of data of the same name"
                )
    descriptions = sorted({part for description in wholes for part in description.split(JOINT)})
    merged = RangeFile.of(
        reduce(or_, [file.seen for file in files]),
        first.rule,
        model=first.model,
        data=replace(next(iter(wholes.values())), description=JOINT.join(descriptions)),
        # constants that were folded on different machines may differ in the last bit
        digests={name: min(f.digests[name] for f in files if name in f.digests) for f in files for name in f.digests},
        precision=first.precision,
    )
    return merged.overridden(first.overrides)


def _check_alike(one: RangeFile, other: RangeFile) -> None:
    """Refuse files that do not go together."""
    if one.model != other.model:
        raise RequantError(f"ranges of two models cannot be merged: {one.model[:12]} and {other.model[:12]}")
    if one.rule != other.rule:
        raise RequantError(f"ranges chosen by different rules cannot be merged: {one.rule} and {other.rule}")
    if one.precision != other.precision:
        raise RequantError(f"ranges for different precisions cannot be merged: {one.precision} and {other.precision}")
    if one.data.batch != other.data.batch:
        raise RequantError(f"runs of batches of {one.data.batch} and of {other.data.batch} cannot be merged")
    if one.overrides != other.overrides:
        names = {*one.overrides.tensors, *other.overrides.tensors}
        differing = sorted(n for n in names if one.overrides.tensors.get(n) != other.overrides.tensors.get(n))
        raise RequantError(f"ranges with different overrides cannot be merged: tensor {differing[0]!r} has two")
    values = [file.data.histogram_values or "all" for file in (one, other)]
    if values[0] != values[1]:
        raise RequantError(f"histograms of {values[0]} and of {values[1]} values per sample cannot be merged")


def _joined(description: str, files: Sequence[RangeFile]) -> Data:
    """Return what files of the same data are together."""
    shards = [shard for file in files for shard in file.data.shards]
    for shard, times in Counter(shards).items():
        if times > 1:
            raise RequantError(f"shard {shard_text(shard)} of {description!r} is there twice")
    if len(files) > 1 and shards and any(not file.data.shards for file in files):
        raise RequantError(f"{description!r} is there as a whole and as shard {shard_text(shards[0])} of it too")
    if len({parts for _, parts in shards}) > 1:
        one, another = min(shards, key=lambda shard: shard[1]), max(shards, key=lambda shard: shard[1])
        raise RequantError(f"shards of two divisions cannot be merged: {shard_text(one)} and {shard_text(another)}")
    if any(file.seen.repeated and file.seen == files[0].seen for file in files[1:]):
        raise RequantError(f"the same run over {description!r} is there twice")
    return replace(files[0].data, shards=tuple(shards))


def shard_text(shard: tuple[int, int]) -> str:
    """Return ``"1/2"``."""
    return f"{shard[0]}/{shard[1]}"


def save_ranges(path: str | os.PathLike[str], file: RangeFile) -> None:
    """Write a range file, whole or not at all; the same content gives the same bytes.

    Raises:
        RequantError: The file cannot be written.
    """
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
    """Return an entry of the document as text, tables with a line for each row."""
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
    name = os.fspath(path)
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise RequantError(f"{name}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RequantError(f"{name}: not a range file: {error}") from error
    if not isinstance(document, dict) or "schema" not in document:
        raise RequantError(f"{name}: not a range file: no 'schema'")
    if document["schema"] != SCHEMA:
        raise RequantError(
            f"{name}: range file of schema {document['schema']!r}; this program reads {SCHEMA}: calibrate again"
        )
    try:
        return _from_json(document, name)
    except (KeyError, TypeError, ValueError, RequantError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RequantError(f"{name}: malformed range file: {reason}") from error


def _from_json(document: Mapping[str, Any], name: str) -> RangeFile:
    """Read the content of a range file; what is wrong raises KeyError, TypeError, ValueError or RequantError."""
    told, rows = typed(document, "data", dict), typed(document, "tensors", dict)
    ranges: dict[str, Range] = {}
    digests: dict[str, str] = {}
    overridden = {}
    for tensor, row in rows.items():
        with_name(f"tensor {tensor!r}", _read_chosen, tensor, row, ranges, digests)
        if "override" in row:
            overridden[tensor] = row["override"]
    seen = observations_from_json({**document, "samples": natural(told, "samples", least=0)})
    shards = tuple(_read_shard(text) for text in typed(told, "shards", list))
    for tensor in sorted(seen.ranges.keys() - ranges.keys() - overridden.keys()):
        raise ValueError(f"tensor {tensor!r}: 'lo' is missing")
    wanted = typed(document, "precision", dict)
    return RangeFile(
        model=typed(document, "model", str),
        data=Data(
            typed(told, "description", str),
            natural(told, "batch"),
            shards,
            natural(told, "histogram_values") if "histogram_values" in told else None,
        ),
        rule=parse_rule(typed(document, "rule", str)),
        seen=seen,
        ranges=ranges,
        digests=digests,
        overrides=Overrides(overrides_from_json(overridden), name),
        precision=Precision(typed(wanted, "bits", int), typed(wanted, "symmetric", bool)),
    )


def _read_chosen(name: str, row: Any, ranges: dict[str, Range], digests: dict[str, str]) -> None:
    """Read a tensor's range and digest, where there are any, into the mappings."""
    if not isinstance(row, dict):
        raise TypeError(f"an object is wanted, not {type(row).__name__}")
    if "lo" in row or "hi" in row:
        lo, hi = number(row, "lo"), number(row, "hi")
        if not lo <= hi:
            raise ValueError("'lo' is above 'hi'")
        ranges[name] = lo, hi
    if "digest" in row:
        digests[name] = typed(row, "digest", str)


def _read_shard(text: object) -> tuple[int, int]:
    """Read ``"1/2"``."""
    part, _, parts = text.partition("/") if isinstance(text, str) else ("", "", "")
    if not (part.isdecimal() and parts.isdecimal()):
        raise ValueError(f"'shards' must be texts like \"1/2\", not {text!r}")
    return int(part), int(parts)


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all: into a temporary file beside it, which is then renamed.

    Raises:
        RequantError: The file cannot be written; what was there before is untouched.
    """
    try:
        with replacing(Path(os.path.realpath(path))) as file:  # a link keeps pointing where it did
            file.write(data)
    except OSError as error:
        raise RequantError(f"{os.fspath(path)}: cannot be written: {error.strerror}") from error


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the place of `target` once all is written; if anything fails, nothing changes.

    Raises:
        OSError: The file cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
