"""The lock file: a baseline as JSON that a review can read, written whole and read with suspicion."""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from ... import RequantError
from ...calibration.files import write_atomically
from ...calibration.session import Array
from ..accuracy.metrics import Score, metric_named
from ..runtime.machine import Machine
from .baseline import Baseline, Constant, Layer, Measured, Scored, Seen, Speed, Statistics, tolerances

FORMAT = "requant.lock"
VERSION = 1
PLAIN = ("float_model", "int8_model", "mac_share", "size", "opset")


def save_baseline(path: str | os.PathLike[str], baseline: Baseline) -> None:
    """Write a lock file.

    Raises:
        RequantError: It cannot be written.
    """
    try:
        write_atomically(Path(path), (_text(_document(baseline)) + "\n").encode())
    except OSError as error:
        raise RequantError(f"{os.fspath(path)}: cannot be written: {error.strerror}") from error


def load_baseline(path: str | os.PathLike[str]) -> Baseline:
    """Read a lock file.

    Raises:
        RequantError: It is missing, malformed, of a newer version, or a tolerance in it is out of range.
    """
    name = os.fspath(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RequantError(f"{name}: no such baseline; --update measures and writes it") from error
    except OSError as error:
        raise RequantError(f"{name}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8 or JSON; the message has the line
        raise RequantError(f"{name}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RequantError(f'{name}: no baseline of requant: an object with "format": "{FORMAT}" is wanted')
    if document.get("version") != VERSION:
        raise RequantError(f"{name}: of version {document.get('version')!r}, and this is for {VERSION}; --update")
    try:
        return _baseline(document, name)
    except RequantError as error:
        raise RequantError(f"{name}: {error}") from error


def check_writable(*paths: Path | None) -> None:
    """Refuse files that cannot be written, before any long work.

    Raises:
        RequantError: A path is a folder, is in none, or may not be written.
    """
    for path in paths:
        if path is None:
            continue
        folder = path.absolute().parent
        if path.is_dir():
            raise RequantError(f"{path}: is a folder; give the path of a file")
        if not folder.is_dir():
            raise RequantError(f"{path}: no folder {str(path.parent)!r} to write to")
        if not os.access(folder, os.W_OK):
            raise RequantError(f"{path}: cannot write to {str(folder)!r}")


def _document(baseline: Baseline) -> dict[str, Any]:
    """Return a baseline as plain JSON values."""
    found = baseline.measured
    plain = {name: getattr(found, name) for name in PLAIN}
    return {
        "format": FORMAT,
        "version": VERSION,
        "tolerances": baseline.tolerances.to_json(),
        "samples": baseline.samples,
        **plain,
        "metrics": {name: _scored_json(scored) for name, scored in found.scores.items()},
        "data": asdict(found.data),
        "latency": None if found.speed is None else asdict(found.speed),
        "kernels": found.kernels,
        "stored": found.stored,
        "layers": {
            name: [layer.op, {role: [*asdict(each).values()] for role, each in layer.constants.items()}]
            for name, layer in found.layers.items()
        },
        "noise": {name: _written(value) for name, value in found.noise.items()},
    }


def _scored_json(scored: Scored) -> dict[str, Any]:
    """Return the scores in a metric as plain JSON values."""
    after = scored.after
    return {
        "higher_is_better": scored.metric.higher_is_better,
        "float": _written(scored.before),
        "int8": _written(after.value),
        "drop": _written(scored.drop),
        "interval": scored.interval and [*map(_written, scored.interval)],
        "items": None if after.parts is None else _packed(after.parts),
        "rows": None if after.rows is None else _packed(after.rows),
    }


def _text(document: Mapping[str, Any]) -> str:
    """Return JSON with a row of a table per line, so that a change of the file can be read."""
    lines = []
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            rows = [f"  {json.dumps(name)}: {json.dumps(row, allow_nan=False)}" for name, row in value.items()]
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(rows) + "\n }")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _written(value: float) -> float | str:
    """Return a number, or a text where JSON has no number for it."""
    return value if math.isfinite(value) else str(value)


def _packed(array: Array) -> dict[str, Any]:
    """Return an array as JSON: its shape, and its bytes deflated and in base 64."""
    data = np.ascontiguousarray(array, "<f8" if array.dtype.kind == "f" else "<i8")
    return {
        "type": data.dtype.str,
        "shape": list(data.shape),
        "data": base64.b64encode(zlib.compress(data.tobytes(), 9)).decode(),
    }


def _unpacked(found: object, where: str) -> Array | None:
    """Return the array of `_packed`."""
    if found is None:
        return None
    try:
        if not isinstance(found, dict) or found["type"] not in ("<f8", "<i8"):
            raise ValueError(found)
        size = 8 * math.prod(map(int, found["shape"]))  # no more is unpacked, whatever there is
        raw = zlib.decompressobj().decompress(base64.b64decode(found["data"], validate=True), size + 1)
        return np.frombuffer(raw, found["type"]).reshape(found["shape"])
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise RequantError(f"{where}: malformed; --update writes it anew") from error


def _baseline(document: Mapping[str, Any], name: str) -> Baseline:
    """Read a whole document."""
    scores = {key: _scored(key, row) for key, row in _table(document, "metrics").items()}
    given = _table(document, "tolerances")
    latency = document.get("latency")
    with _reading("the baseline"):
        plain: dict[str, Any] = {
            "float_model": str(document["float_model"]),
            "int8_model": str(document["int8_model"]),
            "mac_share": float(document["mac_share"]),
            "size": int(document["size"]),
            "opset": int(document["opset"]),
            "samples": None if document["samples"] is None else int(document["samples"]),
        }
    samples = plain.pop("samples")
    measured = Measured(
        **plain,
        scores=scores,
        data=_seen(_table(document, "data")),
        speed=None if latency is None else _speed(latency),
        kernels=_rows(document, "kernels", lambda row: (int(row[0]), float(row[1]))),
        stored=_rows(document, "stored", int),
        layers=_rows(document, "layers", _layer),
        noise=_rows(document, "noise", float),
    )
    metrics = [scored.metric for scored in scores.values()]
    return Baseline(measured, tolerances(given, metrics), samples, name)


def _table(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object inside the document."""
    found = document.get(key)
    if not isinstance(found, dict):
        raise RequantError(f"{key}: an object is wanted, not {type(found).__name__}")
    return found


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Turn what reading a malformed value raises into one line that says where it is."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise RequantError(f"{where}: malformed ({what}); --update writes it anew") from error


def _rows(document: Mapping[str, Any], key: str, read: Callable[[Any], Any]) -> dict[str, Any]:
    """Read the rows of a table."""
    found = {}
    for name, row in _table(document, key).items():
        with _reading(f"{key}, {name!r}"):
            found[name] = read(row)
    return found


def _scored(name: str, row: Any) -> Scored:
    """Read the scores in a metric."""
    where = f"metrics, {name!r}"
    with _reading(where):
        metric = metric_named(name, lower=not row["higher_is_better"])
        before, after, drop = (float(row[key]) for key in ("float", "int8", "drop"))
        ends = row["interval"]
        interval = None if ends is None else (float(ends[0]), float(ends[1]))
        parts, rows = (_unpacked(row[key], where) for key in ("items", "rows"))
    return Scored(metric, before, Score(metric, after, parts, rows), drop, interval)


def _seen(row: Mapping[str, Any]) -> Seen:
    """Read what the data were."""
    with _reading("data"):
        statistics = {
            name: Statistics(**{**values, "channels": tuple(map(float, values["channels"]))})
            for name, values in row["statistics"].items()
        }
        inputs, labels = (str(row[key]) for key in ("inputs", "labels"))
        return Seen(str(row["description"]), int(row["samples"]), inputs, labels, statistics)


def _speed(row: Mapping[str, Any]) -> Speed:
    """Read how fast INT8 was."""
    with _reading("latency"):
        rounds = tuple(map(float, row["rounds"]))
        if not rounds or not all(math.isfinite(ratio) and ratio > 0 for ratio in rounds):
            raise ValueError("rounds must be numbers above 0")
        machine = Machine(**{each.name: row["machine"][each.name] for each in fields(Machine)})
        return Speed(rounds, float(row["float_ms"]), float(row["int8_ms"]), int(row["batch"]), machine)


def _layer(row: Any) -> Layer:
    """Read a layer."""
    op, constants = row
    return Layer(
        str(op),
        {role: Constant(str(d), str(h), float(norm), int(dead)) for role, (d, h, norm, dead) in constants.items()},
    )
