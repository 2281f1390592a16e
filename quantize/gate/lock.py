"""The lock file: a baseline as JSON. It can be reviewed, and is replaced as a whole."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from ... import RequantError
from ...calibration.data.npy import DEFLATE
from ...calibration.model.session import Array
from ...calibration.range_files.decoding import (
    LARGE_FILE,
    Count,
    Finite,
    Number,
    convert,
    convert_rows,
    load_json,
    plain_number,
)
from ...system.given import check_path
from ...system.regular import check_replaceable
from ...system.writing import write_atomically
from ..accuracy.metrics import Score, metric_named
from ..runtime.runtimes import PLAIN, Setting
from .baseline import UPDATE, Baseline, Constant, DataSummary, Layer, Measured, Scored, Speed, tolerances

FORMAT = "requant.lock"
VERSION = 1
HEAD = 4096
"""Bytes at the beginning of a file that tell a baseline, whose first key is the format."""
MALFORMED = f"malformed, {UPDATE} writes a new one"
COPIED = ("float_model", "int8_model", "mac_share", "size", "opset")
"""Attributes of `Measured` that are written as they are."""
UNSEALED = frozenset({"format", "version", "checksum", "tolerances"})
"""What the checksum leaves out."""


class Packed(msgspec.Struct, frozen=True):
    """An array in the file: its bytes, deflated and in base 64."""

    type: Literal["<f8", "<i8"]
    shape: tuple[Count, ...]
    data: bytes


class ScoredRow(msgspec.Struct, frozen=True, rename={"before": "float", "after": "int8"}):
    """The scores in a metric, as the file has them."""

    higher_is_better: bool
    before: Number
    after: Number
    drop: Number
    interval: tuple[Number, Number] | None
    items: Packed | None
    rows: Packed | None


class RuntimeRow(msgspec.Struct, frozen=True):
    """What ran the models, as the file has it; files of old versions are of ONNX Runtime."""

    name: Literal["onnxruntime", "openvino"]
    precision: Literal["default", "f32"]
    identity: str


class Document(msgspec.Struct, frozen=True):
    """The file. Mappings with a row per line are converted row by row, so that errors name the row."""

    tolerances: dict[str, object]
    samples: Annotated[int, msgspec.Meta(ge=1, le=2**53)] | None
    float_model: str
    int8_model: str
    mac_share: Finite
    size: Count
    opset: Count
    metrics: dict[str, object]
    data: DataSummary
    latency: Speed | None
    kernels: dict[str, object]
    stored: dict[str, object]
    layers: dict[str, object]
    noise: dict[str, Number]
    runtime: RuntimeRow | None = None
    checksum: str | None = None  # files of old versions have none


class LayerRow(msgspec.Struct, frozen=True, array_like=True):
    """A layer, as the file has it: the operator, and by role the attributes of a `Constant`."""

    op: str
    constants: dict[str, tuple[str, str, Finite, Count]]


def save_baseline(path: str | os.PathLike[str], baseline: Baseline) -> None:
    """Write a lock file.

    Raises:
        RequantError: It cannot be written.
    """
    write_atomically(path, (_text(_document(baseline)) + "\n").encode())


def load_baseline(path: str | os.PathLike[str]) -> Baseline:
    """Read a lock file.

    Raises:
        RequantError: It is missing, malformed, of another version, or edited elsewhere than in its tolerances; or a
            tolerance is out of range.
    """
    check_path(path, "a baseline")
    name = os.fspath(path)
    if not os.path.lexists(path):
        raise RequantError(f"{name}: no such baseline; {UPDATE} measures and writes it")
    document = load_json(path, "baseline", most=LARGE_FILE)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RequantError(f'{name}: not a baseline: an object with "format": "{FORMAT}" is expected')
    if document.get("version") != VERSION:
        version = document.get("version")
        raise RequantError(
            f"{name}: baseline of version {version!r}; this program reads {VERSION}; {UPDATE} measures anew"
        )
    if "checksum" in document and document["checksum"] != checksum(document):
        raise RequantError(f"{name}: more than the tolerances was edited, or a part is missing: {UPDATE} measures anew")
    try:
        return _baseline(document, name)
    except RequantError as error:
        raise RequantError(f"{name}: {error}") from error


def is_baseline(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like a baseline, damaged or not.

    Raises:
        RequantError: It cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            return FORMAT.encode() in file.read(HEAD)
    except OSError as error:
        raise RequantError(f"{os.fspath(path)}: {error.strerror}") from error


def check_writable(*paths: Path | None) -> None:
    """Refuse outputs that cannot be written, before any long work.

    Raises:
        RequantError: A path is a folder, its folder does not exist, or the folder is read-only.
    """
    for path in paths:
        if path is None:
            continue
        folder = path.absolute().parent
        check_replaceable(path)
        if not os.path.isdir(folder):
            raise RequantError(f"{path}: no folder {str(path.parent)!r} to write to")
        if not os.access(folder, os.W_OK):
            raise RequantError(f"{path}: cannot write to {str(folder)!r}")


# ------------------------------------------------------------------------------------------------------------ write


def _document(baseline: Baseline) -> dict[str, Any]:
    """Return a baseline as plain JSON values."""
    measured, setting = baseline.measured, baseline.measured.setting
    found = {
        "tolerances": baseline.tolerances.to_json(),
        "samples": baseline.samples,
        **{name: getattr(measured, name) for name in COPIED},
        "runtime": {"name": setting.runtime, "precision": setting.precision, "identity": measured.runtime},
        "metrics": {name: _scored_json(scored) for name, scored in measured.scores.items()},
        "data": asdict(measured.data),
        "latency": None if measured.speed is None else asdict(measured.speed),
        "kernels": measured.kernels,
        "stored": measured.stored,
        "layers": {
            name: [layer.op, {role: [*asdict(each).values()] for role, each in layer.constants.items()}]
            for name, layer in measured.layers.items()
        },
        "noise": {name: plain_number(value) for name, value in measured.noise.items()},
    }
    return {"format": FORMAT, "version": VERSION, "checksum": checksum(found), **found}


def checksum(document: Mapping[str, Any]) -> str:
    """Return a digest of what the document of a baseline says, without the tolerances, which people edit."""
    said = {key: value for key, value in document.items() if key not in UNSEALED}
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=8).hexdigest()


def _scored_json(scored: Scored) -> dict[str, Any]:
    """Return the scores in a metric as plain JSON values."""
    after = scored.after
    return {
        "higher_is_better": scored.metric.higher_is_better,
        "float": plain_number(scored.before),
        "int8": plain_number(after.value),
        "drop": plain_number(scored.drop),
        "interval": scored.drop_interval and [*map(plain_number, scored.drop_interval)],
        "items": None if after.parts is None else pack(after.parts),
        "rows": None if after.rows is None else pack(after.rows),
    }


def _text(document: Mapping[str, Any]) -> str:
    """Return JSON with one row of a table per line, so that a change of the file can be reviewed."""
    lines = []
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            rows = [f"  {json.dumps(name)}: {json.dumps(row, allow_nan=False)}" for name, row in value.items()]
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(rows) + "\n }")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def pack(array: Array) -> dict[str, Any]:
    """Return an array as the plain JSON values of a `Packed`, in 64-bit floats or integers."""
    data = np.ascontiguousarray(array, "<f8" if array.dtype.kind == "f" else "<i8")
    return {
        "type": data.dtype.str,
        "shape": list(data.shape),
        "data": base64.b64encode(zlib.compress(data.tobytes(), 9)).decode(),
    }


# ------------------------------------------------------------------------------------------------------------- read


def unpack(packed: Packed | None, axes: int, place: str) -> Array | None:
    """Return the array of `pack`, with so many axes; None for None.

    Raises:
        RequantError: The array has other axes, its bytes are not deflated, or they do not fit the shape.
    """
    if packed is None:
        return None
    if len(packed.shape) != axes:
        raise RequantError(f"{place}: the array is damaged: {len(packed.shape)} axes instead of {axes}")
    size = 8 * math.prod(packed.shape)  # never unpack more, even if the file holds more
    if size > DEFLATE * (len(packed.data) + 1):
        raise RequantError(f"{place}: the array is damaged: {len(packed.data)} bytes cannot hold {packed.shape}")
    try:
        raw = zlib.decompressobj().decompress(packed.data, size + 1)
        return np.frombuffer(raw, packed.type).reshape(packed.shape)
    except (ValueError, OverflowError, zlib.error) as error:
        raise RequantError(f"{place}: the array is damaged: {error}") from error


def _baseline(document: object, name: str) -> Baseline:
    """Return the baseline of a document from a file of this name."""
    read = convert(document, Document, MALFORMED)
    rows = convert_rows(read.metrics, ScoredRow, f"{MALFORMED}: metrics")
    ran = read.runtime
    scores = {key: _scored(key, row, f"{MALFORMED}: metrics {key!r}") for key, row in rows.items()}
    measured = Measured(
        **{key: getattr(read, key) for key in COPIED},
        scores=scores,
        data=read.data,
        speed=read.latency,
        kernels=convert_rows(read.kernels, tuple[Count, Finite], f"{MALFORMED}: kernels"),
        stored=convert_rows(read.stored, Count, f"{MALFORMED}: stored"),
        layers={
            key: Layer(layer.op, {role: Constant(*row) for role, row in layer.constants.items()})
            for key, layer in convert_rows(read.layers, LayerRow, f"{MALFORMED}: layers").items()
        },
        noise={key: float(value) for key, value in read.noise.items()},
        setting=PLAIN if ran is None else Setting(runtime=ran.name, precision=ran.precision),
        runtime="" if ran is None else ran.identity,
    )
    allowed = tolerances(read.tolerances, [scored.metric for scored in scores.values()])
    return Baseline(measured, allowed, read.samples, name)


def _scored(name: str, row: ScoredRow, place: str) -> Scored:
    """Return the scores in a metric."""
    metric = metric_named(name, lower=not row.higher_is_better)
    items, rows = unpack(row.items, 2, place), unpack(row.rows, 1, place)
    if rows is not None and (items is None or len(rows) != len(items) or rows.dtype.kind != "i"):
        raise RequantError(f"{place}: the rows do not fit the items")
    score = Score(metric, float(row.after), items, rows)
    interval = None if row.interval is None else (float(row.interval[0]), float(row.interval[1]))
    return Scored(metric, float(row.before), score, float(row.drop), interval)
