"""The samples with the largest differences between float and INT8, with their pictures."""

from __future__ import annotations

import base64
import math
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ...calibration.data.samples import Sample
from ...calibration.model.session import Array
from ..accuracy.classes import Outputs, Tally, is_float
from ..accuracy.outputs import Accuracy
from ..accuracy.pair import judge_pair
from ..accuracy.probabilities import probability_outputs
from ..accuracy.sqnr import decibels, finite, output_powers
from ..accuracy.terms import Terms
from ..job import Job, Trial
from ..runtime.runtimes import Sessions
from ..steps.judge import judging_samples, with_selected_outputs
from .record import Item, Judged

SECONDS = 20.0  # time limit of the comparison
WORST = 12  # samples in the report
LARGEST = 96  # pixels of a side
LEAST = 4  # pixels of a side: a narrower array is no image


def judged_of(job: Job, trial: Trial) -> Judged | None:
    """Return the accuracy of the output, with the worst of the samples that it was measured on.

    Args:
        job: The job.
        trial: The model that was written, with its accuracy.

    Returns:
        The accuracy and the samples; None if the user gave no data.
    """
    if job.judging is None or not job.outputs_judge:
        return None
    samples = judging_samples(job, job.judging)
    probable = probability_outputs(job.simple)
    worst = _Worst(probable)

    def compare(before: Sessions, after: Sessions) -> Accuracy:
        nonlocal worst
        worst = _Worst(probable)
        terms = Terms("skip", probable)
        return judge_pair(before, after, _in_time(samples), weights=job.weights, watch=worst.add, terms=terms)

    with_selected_outputs(job, trial.candidate, compare)
    accuracy = trial.accuracy
    return Judged(
        data=job.judging.description,
        samples=accuracy.samples,
        predictions=accuracy.predictions,
        differing=accuracy.changed,
        predicted_drop=None if accuracy.predicted_drop is None else finite(accuracy.predicted_drop),
        labelled=accuracy.labelled,
        items=tuple(_item(row) for row in worst.rows),
        apart=job.held_out,
    )


def _in_time(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield samples until the time is up."""
    end = time.monotonic() + SECONDS
    for sample in samples:
        yield sample
        if time.monotonic() > end:
            return


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample with the predictions of both models."""

    sample: Sample
    before: Array | None
    after: Array | None
    sqnr_db: float
    broken: bool
    differs: bool

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The sort key: the worst sample comes first."""
        return not self.broken, not self.differs, self.sqnr_db


@dataclass
class _Worst:
    """The worst samples so far; the SQNR of outputs in `probabilities` is that of probabilities."""

    probabilities: frozenset[str] = frozenset()
    rows: list[_Row] = field(default_factory=list)

    def add(self, reference: Outputs, candidate: Outputs, sample: Sample) -> None:
        """Add a sample."""
        floats = {name: value for name, value in reference.items() if is_float(value)}
        sums = [pair for each in output_powers(floats, candidate, self.probabilities).values() for pair in each]
        before, after = Tally().add(reference, candidate, sample) or (None, None)
        differs = _unequal(before, after)
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
    """Return a mask of the predictions that differ."""
    if before is None:
        return np.zeros(0, bool)
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
        sqnr_db=finite(row.sqnr_db),
        picture=picture(row.sample.feed),
    )


def _classes(values: Array | None) -> str:
    """Return a class as text; empty unless there is exactly one."""
    return str(values.reshape(-1)[0]) if values is not None and values.size == 1 else ""


def picture(feed: dict[str, Array]) -> str:
    """Return the first image of a feed as a ``data:`` URI of a PNG; empty where there is none.

    An image is (N, C, H, W) or (N, H, W, C) with one or three channels. Its least value is black, its greatest white,
    because the normalisation of the colours is not known.
    """
    for array in feed.values():
        pixels = _pixels(array)
        if pixels is not None:
            return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()
    return ""


def _pixels(array: Array) -> Array | None:
    """Return the first entry as (H, W, 1 or 3) uint8; a large image keeps only every n-th row and column."""
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
    """Return a uint8 image (H, W, 1 or 3) as PNG (RFC 2083): one chunk of rows without filters."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
