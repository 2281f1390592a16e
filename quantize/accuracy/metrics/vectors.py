"""Embeddings: the cosine between two models' vectors, and retrieval by the nearest vector."""

from __future__ import annotations

import numpy as np

from .... import RequantError
from ....calibration.data.samples import DataError, Sample
from ....calibration.model.session import Array
from ..classes import Outputs
from ..labels import class_labels
from .items import CHUNK, Items, equal_items, floats, items_of_entries

NO_VECTOR = -2.0
"""The similarity to a vector with NaN: below that of any other vector."""


def embedding(outputs: Outputs, where: str) -> Array:
    """Return the vectors (N, D) of an embedding, or (N, T, D) of tokens.

    It is the first float output with one vector per entry, else the first with one vector per token. Axes of length 1
    are dropped. A map of features (N, C, H, W) is one vector.

    Raises:
        RequantError: No float output has at least two values per entry.
    """
    found = [value.reshape(len(value), *(n for n in value.shape[1:] if n != 1)) for value in floats(outputs)]
    found = [value if value.ndim < 4 else value.reshape(len(value), -1) for value in found if value.ndim > 1]
    found.sort(key=lambda value: value.ndim)
    if not found:
        raise RequantError(f"{where}: no float output holds vectors")
    return found[0]


def vectors(outputs: Outputs, sample: Sample) -> Outputs:
    """Return the part of the float model's outputs that `cosines` needs."""
    return {"vectors": embedding(outputs, sample.where)}


def cosines(outputs: Outputs, sample: Sample, reference: Outputs) -> Items:
    """Return the cosine between each vector and the float model's: ``a b / (|a| |b|)``.

    Two zero vectors have the cosine 1. One zero vector has 0, and a vector with NaN has -1.

    Raises:
        RequantError: The vectors have another shape than the float model's.
    """
    one, two = (np.asarray(each, np.float64) for each in (reference["vectors"], embedding(outputs, sample.where)))
    if one.shape != two.shape:
        raise RequantError(f"{sample.where}: vectors of shape {two.shape}, but the float model's have {one.shape}")
    return equal_items(cosine_of_rows(one, two), len(one))


def cosine_of_rows(one: Array, two: Array) -> Array:
    """Return the cosine between the vectors of two arrays (..., D), float64 (...); see `cosines` for zeros and NaN."""
    one, two = (np.asarray(each, np.float64) for each in (one, two))
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = [np.linalg.norm(each, axis=-1) for each in (one, two)]
        cosine = (_unit(one) * _unit(two)).sum(axis=-1)
    cosine = np.where((lengths[0] == 0) & (lengths[1] == 0), 1.0, np.clip(cosine, -1.0, 1.0))
    return np.where(np.isnan(cosine), -1.0, cosine)


def _unit(values: Array) -> Array:
    """Return vectors of length 1; a zero vector stays zero."""
    length = np.linalg.norm(values, axis=-1, keepdims=True)
    return np.asarray(values / np.where(length == 0, 1.0, length))


def retrieval_rows(outputs: Outputs, sample: Sample, _: Outputs) -> Items:
    """Return, for each entry: its group, whether it is a query, whether it is searched, and its vector of length 1.

    The labels are the groups (N,), or (N, 2): the group, and 0 for an entry that is only a query or 1 for one that is
    only searched. An entry with a group below 0 is only searched.

    Raises:
        RequantError: The model has a vector per token, or the labels do not fit.
    """
    found = embedding(outputs, sample.where).astype(np.float64)
    if found.ndim != 2:
        raise RequantError(
            f"{sample.where}: vectors of shape {found.shape}, one per token; recall@K:FILE.py:NAME names a function "
            "that pools them"
        )
    labels, n = class_labels(sample), len(found)
    if labels.size not in (n, 2 * n):
        raise DataError(f"{sample.where}: {labels.size} labels for {n} vectors; recall@K needs (N,) or (N, 2)")
    table = labels.reshape(n, -1)
    sides = table[:, 1:] if table.shape[1] == 2 else np.full((n, 1), -1)
    if not np.isin(sides, (-1, 0, 1)).all():
        raise DataError(f"{sample.where}: the second column of labels must be 0 (a query) or 1 (searched)")
    asks = (table[:, :1] >= 0) & (sides != 1)
    with np.errstate(invalid="ignore", over="ignore"):
        return items_of_entries(np.hstack([table[:, :1], asks, sides != 0, _unit(found)]).astype(np.float64), n)


def recall_hits(parts: Array, *, k: int) -> Array:
    """Return, for each query, 1 if one of its group is among the `k` nearest vectors by cosine, else 0; and weights.

    Recall@K of Jegou, Douze and Schmid, "Product quantization for nearest neighbor search", IEEE TPAMI 33 (2011)
    117-128. An entry is not its own neighbour. Of equally near vectors, those of other groups come first. A query
    without another searched entry of its group has weight 0.

    Args:
        parts: As `retrieval_rows` returns them, (n, 3 + D).
        k: The number of neighbours.
    """
    group, asks, place = parts[:, 0], parts[:, 1] > 0, np.arange(len(parts))
    gallery = np.flatnonzero(parts[:, 2] > 0)
    shown = parts[gallery, 3:].T
    result = np.zeros((len(parts), 2))
    for start in range(0, len(parts), CHUNK):
        rows = place[start : start + CHUNK]
        near = parts[rows, 3:] @ shown
        near = np.where(np.isnan(near), NO_VECTOR, near)
        other = gallery != rows[:, None]
        right = (group[gallery] == group[rows][:, None]) & other
        best = np.where(right, near, -np.inf).max(axis=1, initial=-np.inf)
        ahead = (other & ~right & (near >= best[:, None])).sum(axis=1)
        counts = asks[rows] & right.any(axis=1)
        result[rows] = np.stack([counts & (ahead < k), counts], axis=1)
    return result
