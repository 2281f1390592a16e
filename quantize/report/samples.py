"""What a report tells of samples: which came out worst, with their pictures."""

from __future__ import annotations

import base64
import math
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ...calibration.samples import Sample
from ...calibration.session import FEW, Array, ModelSource
from ..accuracy.outputs import Accuracy, Outputs, decibels, is_float, powers, predictions
from ..accuracy.pair import judge_pair
from ..accuracy.selected_outputs import selected_from, showing, unlike
from ..job import Job
from ..model.files import serialize
from .record import Item, Judged, Labelled

JUDGED = 256  # samples at most
SECONDS = 20.0  # after which no further one is run
WORST = 12  # that are shown
LARGEST = 96  # pixels of a side
LEAST = 4  # pixels of a side: what is narrower is no image


def judged_of(job: Job, output: ir.Model, path: str) -> Judged | None:
    """Compare the float model with the one that was written, sample by sample; None without data of the user's.

    Where outputs are selected by scores, and come out in another number, what they are selected from is compared.

    Args:
        job: The job.
        output: The model that was written.
        path: Its file.
    """
    if job.source is None or not job.judged:
        return None
    seen, accuracy = _compared(job, job.reference, path)
    different = unlike(accuracy)
    sources = selected_from(job.simple) if different else []
    if sources:
        before, after = (serialize(showing(model, sources, different), job.folder) for model in (job.simple, output))
        seen, accuracy = _compared(job, before, after)
    foretold = accuracy.predicted_drop
    return Judged(
        data=job.source.description,
        samples=accuracy.samples,
        predictions=accuracy.predictions,
        differing=seen.differing,
        predicted_drop=foretold if foretold is not None and math.isfinite(foretold) else None,
        labelled=_labelled(accuracy),
        items=tuple(_item(row) for row in seen.rows),
    )


def _compared(job: Job, before: ModelSource, after: ModelSource) -> tuple[_Worst, Accuracy]:
    """Run two models over the samples."""
    assert job.source is not None
    seen = _Worst()
    samples = job.source.samples(FEW if job.weights.large else JUDGED)
    return seen, judge_pair(before, after, _in_time(samples), weights=job.weights, watch=seen.add)


def _in_time(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield samples until the time is up."""
    end = time.monotonic() + SECONDS
    for sample in samples:
        yield sample
        if time.monotonic() > end:
            return


def _labelled(accuracy: Accuracy) -> Labelled | None:
    """Return the counts against labels."""
    found = accuracy.labelled
    if found is None:
        return None
    return Labelled(
        items=found.items,
        float_correct=found.float_correct,
        int8_correct=found.int8_correct,
        broken=found.broken,
        fixed=found.fixed,
        interval=found.drop_interval,
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample with what both models make of it."""

    sample: Sample
    before: Array | None
    after: Array | None
    sqnr_db: float
    broken: bool
    differs: bool

    @property
    def order(self) -> tuple[bool, bool, float]:
        """What comes first is worse."""
        return not self.broken, not self.differs, self.sqnr_db


@dataclass
class _Worst:
    """The worst samples so far."""

    rows: list[_Row] = field(default_factory=list)
    differing: int = 0

    def add(self, reference: Outputs, candidate: Outputs, sample: Sample) -> None:
        """Look at one more sample."""
        sums = [powers(value, candidate[name]) for name, value in reference.items() if is_float(value)]
        before, after = predictions(reference), predictions(candidate)
        differs = _unequal(before, after)
        self.differing += int(differs.sum())
        labels = None if sample.label is None else np.asarray(sample.label).reshape(-1)
        broken = False
        if labels is not None and before is not None and labels.size == before.size and labels.dtype.kind in "iub":
            broken = bool((differs & (before.reshape(-1) == labels)).any())
        sqnr = min((decibels(*each) for each in sums), default=math.inf)
        row = _Row(sample, before, after, sqnr, broken, bool(differs.any()))
        if not differs.any() and sqnr == math.inf:
            return
        self.rows = sorted([*self.rows, row], key=lambda each: each.order)[:WORST]


def _unequal(before: Array | None, after: Array | None) -> Array:
    """Return which predictions differ."""
    if before is None:
        return np.zeros(0, bool)
    if after is None or after.shape != before.shape:
        return np.ones(before.size, bool)
    return np.asarray(before != after).reshape(-1)


def _item(row: _Row) -> Item:
    """Describe a sample."""
    label = row.sample.label
    return Item(
        where=row.sample.where,
        label=_classes(None if label is None else np.asarray(label)),
        before=_classes(row.before),
        after=_classes(row.after),
        broken=row.broken,
        sqnr_db=row.sqnr_db if math.isfinite(row.sqnr_db) else None,
        picture=picture(row.sample.feed),
    )


def _classes(values: Array | None) -> str:
    """Return a class as text; empty where there is not just one."""
    return str(values.reshape(-1)[0]) if values is not None and values.size == 1 else ""


def picture(feed: dict[str, Array]) -> str:
    """Return the first image of a feed as a ``data:`` URI of a PNG; empty where there is none.

    An image is (N, C, H, W) or (N, H, W, C) with one or three channels. Its least value is black, its greatest white:
    what normalisation has made of the colours is not known.
    """
    for array in feed.values():
        pixels = _pixels(array)
        if pixels is not None:
            return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()
    return ""


def _pixels(array: Array) -> Array | None:
    """Return the first entry as (H, W, 1 or 3) uint8, made smaller by leaving out rows and columns."""
    if array.ndim != 4 or array.dtype.kind not in "fu" or not array.size:
        return None
    image = array[0]
    if image.shape[0] in (1, 3) and min(image.shape[1:]) >= LEAST:
        image = image.transpose(1, 2, 0)
    elif image.shape[2] not in (1, 3) or min(image.shape[:2]) < LEAST:
        return None
    step = -(-max(image.shape[:2]) // LARGEST)
    image = image[::step, ::step].astype(np.float64)
    if not np.isfinite(image).all():
        return None
    least, span = image.min(), np.ptp(image)
    return np.asarray(np.rint((image - least) * (255 / span if span else 0.0)), np.uint8)


def png(pixels: Array) -> bytes:
    """Return an image (H, W, 1 or 3) of uint8 as PNG (RFC 2083): one chunk of rows without filters."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
