"""The range file: statistics and chosen ranges of one model's tensors, as JSON that refuses any other model."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from .. import RequantError
from .observers import Histogram, MinMax, Statistic, merge
from .ranges import Range, Rule, parse_rule

if TYPE_CHECKING:
    import onnx_ir as ir

SCHEMA = 1
"""The version of the file format that this program writes, and the only one that it reads."""


@dataclass(frozen=True, slots=True)
class RangeFile:
    """What a range file holds.

    Attributes:
        model: The `fingerprint` of the model.
        source: What data was observed, in words.
        samples: How many samples that was.
        rule: The rule that chose the ranges.
        statistics: What was observed, per tensor.
        ranges: The chosen range of each of these tensors.
    """

    model: str
    source: str
    samples: int
    rule: Rule
    statistics: Mapping[str, Statistic]
    ranges: Mapping[str, Range]

    @classmethod
    def choose(
        cls, statistics: Mapping[str, Statistic], rule: Rule, *, model: str, source: str, samples: int
    ) -> RangeFile:
        """Choose the range of every tensor with `rule`."""
        return cls(model, source, samples, rule, statistics, {name: rule(seen) for name, seen in statistics.items()})

    def __or__(self, other: RangeFile) -> RangeFile:
        """Merge two runs over different data; the statistics are those of one run over all of it.

        Raises:
            RequantError: The two are of different models, or were made in different ways.
        """
        if not isinstance(other, RangeFile):
            return NotImplemented
        if self.model != other.model:
            raise RequantError(f"ranges of two models cannot be merged: {self.model[:12]} and {other.model[:12]}")
        if self.rule != other.rule:
            raise RequantError(f"ranges chosen by different rules cannot be merged: {self.rule} and {other.rule}")
        sources = {part for file in (self, other) for part in file.source.split(" + ")}
        return RangeFile.choose(
            merge(self.statistics, other.statistics),
            self.rule,
            model=self.model,
            source=" + ".join(sorted(sources)),
            samples=self.samples + other.samples,
        )


def save_ranges(path: str | os.PathLike[str], file: RangeFile) -> None:
    """Write a range file, whole or not at all; the same content gives the same bytes.

    Raises:
        RequantError: The file cannot be written.
    """
    tensors = {
        name: {"lo": file.ranges[name][0], "hi": file.ranges[name][1], "statistic": _statistic_to_json(statistic)}
        for name, statistic in sorted(file.statistics.items())
    }
    head = {"schema": SCHEMA, "model": file.model, "source": file.source, "samples": file.samples}
    # repr, which json uses for floats, reads back as the same float
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row, allow_nan=False)}" for name, row in tensors.items())
    text = json.dumps(head | {"rule": str(file.rule)}, indent=0)[:-2] + f',\n"tensors": {{\n{rows}\n}}}}\n'
    write_atomically(path, text.encode())


def load_ranges(path: str | os.PathLike[str], *, model: str | None = None) -> RangeFile:
    """Read a range file.

    Args:
        path: The file.
        model: The `fingerprint` of the model that the ranges are for; None accepts any.

    Raises:
        RequantError: The file is missing, malformed, of another schema, or of another model.
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
        raise RequantError(f"{name}: range file of schema {document['schema']!r}; this program reads {SCHEMA}")
    try:
        file = _from_json(document)
    except (KeyError, TypeError, ValueError, RequantError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RequantError(f"{name}: malformed range file: {reason}") from error
    if model is not None and file.model != model:
        raise RequantError(
            f"{name}: ranges of another model (fingerprint {file.model[:12]}, this model has {model[:12]}); "
            "calibrate this one"
        )
    return file


def _statistic_to_json(statistic: Statistic) -> dict[str, Any]:
    """Return a statistic as JSON values."""
    if isinstance(statistic, MinMax):
        return {"kind": "minmax", "lo": statistic.lo, "hi": statistic.hi, "count": statistic.count}
    grid = {"exponent": statistic.exponent, "first": statistic.first, "counts": statistic.counts.tolist()}
    return {"kind": "histogram", "lo": statistic.lo, "hi": statistic.hi} | grid


def _from_json(document: Mapping[str, Any]) -> RangeFile:
    """Read the content of a range file; what is wrong raises KeyError, TypeError, ValueError or RequantError."""
    statistics, ranges = {}, {}
    for name, row in _typed(document, "tensors", dict).items():
        try:
            statistics[name] = _statistic_from_json(_typed(row, "statistic", dict))
            lo, hi = _number(row, "lo"), _number(row, "hi")
            if not lo <= hi:
                raise ValueError("'lo' is above 'hi'")
        except KeyError as error:
            raise ValueError(f"tensor {name!r}: {error} is missing") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"tensor {name!r}: {error}") from error
        ranges[name] = (lo, hi)
    model, source = _typed(document, "model", str), _typed(document, "source", str)
    rule = parse_rule(_typed(document, "rule", str))
    return RangeFile(model, source, _typed(document, "samples", int), rule, statistics, ranges)


def _statistic_from_json(row: Mapping[str, Any]) -> Statistic:
    """Read one statistic; its own invariants are checked where it is made."""
    kind, lo, hi = _typed(row, "kind", str), _number(row, "lo"), _number(row, "hi")
    if kind == "minmax":
        return MinMax(lo, hi, _typed(row, "count", int))
    if kind == "histogram":
        counts = _typed(row, "counts", list)
        if not all(type(count) is int for count in counts):
            raise TypeError("'counts' must be integers")
        return Histogram(lo, hi, _typed(row, "exponent", int), _typed(row, "first", int), np.array(counts, np.int64))
    raise ValueError(f"unknown kind of statistic {kind!r}")


def _typed(row: Any, key: str, kind: type) -> Any:
    """Return ``row[key]``, which must be of `kind`."""
    if not isinstance(row, dict):
        raise TypeError(f"an object with {key!r} is wanted, not {type(row).__name__}")
    if type(row[key]) is not kind:
        raise TypeError(f"{key!r} must be of type {kind.__name__}, not {type(row[key]).__name__}")
    return row[key]


def _number(row: Mapping[str, Any], key: str) -> float:
    """Return the finite number ``row[key]``."""
    if type(row[key]) not in (int, float) or not math.isfinite(row[key]):
        raise TypeError(f"{key!r} must be a finite number")
    return float(row[key])


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


def fingerprint(model: ir.Model) -> str:
    """Return the SHA-256, in hex, of what a model computes with: nodes, values' names, constants, opsets.

    Doc strings, metadata, node names, inferred shapes and the way constants are stored do not matter.
    Constants are read one at a time.
    """
    digest = hashlib.sha256()

    def write(text: str) -> None:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)  # lengths, so that no two models write the same bytes

    write(repr(sorted(model.opset_imports.items())))
    for part in _graph_parts(model.graph, digest.update):
        write(part)
    for identifier, function in sorted(model.functions.items()):
        write(repr((identifier, sorted(function.opset_imports.items()))))
        write(repr(sorted(function.attributes)))
        for part in _graph_parts(function, digest.update):
            write(part)
    return digest.hexdigest()


def _graph_parts(graph: ir.Graph | ir.Function, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield a graph as a sequence of texts; the bytes of constants go to `data` in between."""
    for kind, values in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        yield f"{kind} {[(value.name, str(value.type), str(value.shape)) for value in values]}"
    for name, value in sorted(getattr(graph, "initializers", {}).items()):
        yield f"initializer {name}"
        if value.const_value is not None:
            yield from _tensor_parts(value.const_value, data)
    for node in graph:
        names = [value.name if value is not None else None for value in node.inputs]
        yield f"node {node.op_identifier()} {names} {[value.name for value in node.outputs]}"
        for name, attribute in sorted(node.attributes.items()):
            yield f"attribute {name} {attribute.type}"
            yield from _attribute_parts(attribute, data)


def _attribute_parts(attribute: ir.Attr, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield the value of an attribute, with the tensors and graphs inside it."""
    import onnx_ir as ir

    if attribute.is_ref():
        yield f"reference {attribute.ref_attr_name}"
        return
    several = isinstance(attribute.value, (list, tuple))
    for value in attribute.value if several else [attribute.value]:
        if isinstance(value, ir.Graph):
            yield from _graph_parts(value, data)
        elif isinstance(value, ir.TensorProtocol):
            yield from _tensor_parts(value, data)
        else:
            yield repr(value)
    yield "end"


def _tensor_parts(tensor: ir.TensorProtocol, data: Callable[[bytes], None]) -> Iterator[str]:
    """Yield a tensor's type and shape, and hand its bytes to `data`."""
    import onnx_ir as ir

    yield f"tensor {tensor.dtype} {tensor.shape}"
    if tensor.dtype == ir.DataType.STRING:
        yield repr(tensor.numpy().tolist())
    else:
        data(tensor.tobytes())
        if isinstance(tensor, ir.ExternalTensor):
            tensor.release()  # the mapping, whose pages count as memory
