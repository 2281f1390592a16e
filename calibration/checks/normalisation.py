"""Checks in the first layers of a model whether the data are preprocessed as in training.

A BatchNormalization stores the mean and the variance that its input had in training. If only a convolution lies between
it and the data, a wrong scale or offset changes all of its channels at once. Other kinds of images (blurred, grey,
drawn) leave some channels unchanged. If the BatchNormalization is folded away, the convolution's bias and the first
gates still show data that are wrong by a large factor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..data.samples import Sample
from ..model.copies import load_copy
from ..model.session import Array, Feed, ModelSource, Serialized, open_session, run_session
from .first_layers import Biased, FirstLayers, Recorded, first_layers

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxruntime import InferenceSession

SAMPLES, FEW_SAMPLES = 16, 4
"""The number of samples that are read: with a BatchNormalization, and without one."""
TAIL = 0.2
"""The share of channels at either end that may deviate from the change that all channels have in common."""
CHANNELS = (2, 3, 4)
"""The numbers of channels of an image whose layout can be checked."""
SMALLEST = 16
"""The least number of rows and columns of such an image."""
ROWS = 64
"""The number of rows of such an image that are read."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far the data deviate from the statistics that a BatchNormalization stores.

    Attributes:
        node: The node.
        distance: The Kullback-Leibler divergence of the change that all channels have in common, in nats.
        scale: The least factor by which the standard deviations of all channels are wrong; 1 if they have no common
            factor.
        shift: The root mean square of the differences between the channel means, in stored standard deviations.
        samples: The number of distinct samples.
        source: The tensor that the convolution before the node reads; None if there is no such tensor.
        seen: The channel means of `source` in the data.
        recorded: The channel means of `source` from which the stored means follow, apart from padding.
        deviation: The standard deviation of the values of `source`.
    """

    node: str
    distance: float
    scale: float
    shift: float
    samples: int
    source: str | None = None
    seen: tuple[float, ...] = ()
    recorded: tuple[float, ...] = ()
    deviation: float = 0.0


@dataclass(frozen=True, slots=True)
class BiasRatio:
    """The ratio between the output of a first layer and its bias.

    Attributes:
        node: The layer.
        ratio: The median standard deviation of a channel, divided by the median magnitude of a bias.
        lo: The smallest input value of the layer.
        hi: The largest input value.
    """

    node: str
    ratio: float
    lo: float
    hi: float


@dataclass(frozen=True, slots=True)
class Layout:
    """How much neighbouring rows of an image differ: the mean squared difference over the variance. Noise gives 2.

    Attributes:
        axes: The layout that the model expects: ``"NCHW"`` or ``"NHWC"``.
        planes: The difference if the image is stored plane by plane.
        pixels: The difference if the image is stored pixel by pixel, with all channels of a pixel together.
    """

    axes: str
    planes: float
    pixels: float


@dataclass(frozen=True, slots=True)
class Probe:
    """The properties of some samples in the first layers.

    Attributes:
        deviations: The deviation from each of the first BatchNormalization nodes.
        bias: The ratio for the first layer; None if it has no bias.
        saturated: The share of saturated values of each of the first gates.
        layouts: The inputs that look like images with several channels.
    """

    deviations: tuple[Deviation, ...] = ()
    bias: BiasRatio | None = None
    saturated: Mapping[str, float] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)


def probe(model: ModelSource, samples: Iterable[Sample]) -> Probe:
    """Run only the first layers of a model, over at most `SAMPLES` samples.

    Args:
        model: The model as it was trained, with its BatchNormalization nodes, if it has any.
        samples: Samples; only the first ones are read. Copies count once.

    Raises:
        RequantError: The model cannot be read or run.
    """
    copy, folder = load_copy(model)
    first = first_layers(copy.graph)
    distinct = list(_distinct(islice(samples, SAMPLES if first.norms else FEW_SAMPLES)))
    names = _tensors(first)
    parts: dict[str, list[_ChannelMeans]] = {name: [] for name in names}
    saturated: dict[str, list[float]] = {gate.node: [] for gate in first.gates}
    session = cut(copy, folder, names)
    for sample in distinct:
        values = _run(session, sample, names)
        for name, axis in _reduced(first).items():
            if values[name].size and axis < values[name].ndim > 1:
                parts[name].append(_ChannelMeans.of(values[name], axis))
        for gate in first.gates:
            if values[gate.tensor].size:
                outside = (values[gate.tensor] < gate.lo) | (values[gate.tensor] > gate.hi)
                saturated[gate.node].append(float(outside.mean()))
    merged = {name: _ChannelMeans.merged(rows) for name, rows in parts.items() if len({r.mean.size for r in rows}) == 1}
    deviations = [_deviation(row, merged[name], merged) for name, row in first.norms.items() if name in merged]
    return Probe(
        tuple(deviation for deviation in deviations if deviation is not None),
        None if first.biased is None else _bias_ratio(first.biased, merged),
        {name: float(np.mean(shares)) for name, shares in saturated.items() if shares},
        _layouts(distinct),
    )


def _distinct(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the samples without repeated feeds."""
    digests = set()
    for sample in samples:
        digest = hashlib.blake2b(digest_size=16)
        for name, array in sorted(sample.feed.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(repr(array.tolist()).encode() if array.dtype.kind == "U" else array.tobytes())
        if digest.digest() not in digests:
            digests.add(digest.digest())
            yield sample


def _tensors(first: FirstLayers) -> list[str]:
    """Return the tensors to fetch."""
    return list(dict.fromkeys([*_reduced(first), *(gate.tensor for gate in first.gates)]))


def _reduced(first: FirstLayers) -> dict[str, int]:
    """Return the channel axis of each tensor whose channels are reduced."""
    axes = dict.fromkeys(first.norms, 1) | {row.source: 1 for row in first.norms.values() if row.source is not None}
    if first.biased is not None:
        axes |= {first.biased.source: first.biased.axis, first.biased.tensor: first.biased.axis}
    return axes


def cut(copy: ir.Model, folder: Path | None, names: Sequence[str]) -> InferenceSession | None:
    """Open a session of only that part of a model that computes some tensors; None if all of them are model inputs.

    Raises:
        RequantError: The session cannot be opened.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    graph = copy.graph
    values = {value.name: value for node in graph for value in node.outputs}
    outputs = [values[name] for name in names if name in values]
    if not outputs:
        return None
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    RemoveUnusedNodesPass()(copy)
    return open_session(Serialized(ir.to_proto(copy).SerializeToString(), folder))


def _run(session: InferenceSession | None, sample: Sample, names: Sequence[str]) -> Feed:
    """Return the named tensors from the session's outputs and the sample's feed."""
    values = {name: array for name, array in sample.feed.items() if name in names}
    if session is None:
        return values
    inputs = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    feed = {name: array for name, array in sample.feed.items() if name in inputs}
    return values | run_session(session, outputs, feed, sample.where)


@dataclass(frozen=True, slots=True, eq=False)
class _ChannelMeans:
    """The channels of a tensor over samples. Each sample has the same weight.

    Attributes:
        mean: The mean of each channel, (C,) float64.
        square: The mean square of each channel, (C,) float64.
        lo: The smallest value.
        hi: The largest value.
        samples: The number of samples.
    """

    mean: Array
    square: Array
    lo: float
    hi: float
    samples: int = 1

    @classmethod
    def of(cls, array: Array, axis: int) -> _ChannelMeans:
        """Reduce a tensor."""
        values = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
        values = values.astype(np.float32 if values.dtype == np.float16 else values.dtype, copy=False)
        square = np.einsum("cn,cn->c", values, values).astype(np.float64) / values.shape[1]
        return cls(values.mean(1, dtype=np.float64), square, float(values.min()), float(values.max()))

    @classmethod
    def merged(cls, parts: Sequence[_ChannelMeans]) -> _ChannelMeans:
        """Merge samples with equal numbers of channels."""
        mean, square = (np.mean(rows, axis=0) for rows in ([p.mean for p in parts], [p.square for p in parts]))
        return cls(mean, square, min(part.lo for part in parts), max(part.hi for part in parts), len(parts))

    @property
    def variance(self) -> Array:
        """The variance of each channel, (C,)."""
        return np.asarray(np.maximum(self.square - np.square(self.mean), 0))


def _deviation(row: Recorded, seen: _ChannelMeans, others: Mapping[str, _ChannelMeans]) -> Deviation | None:
    """Compare a tensor with the statistics that a BatchNormalization stores; None if no channel can be compared.

    The distance is the divergence of normal distributions, ``(s + z**2 - 1 - ln s) / 2`` (Kullback and Leibler, On
    Information and Sufficiency, 1951). z**2 is the mean over the channels, where z is the difference of the means in
    stored standard deviations. s is the ratio of the variances: the value nearest to 1 that lies within the range of
    the channels without `TAIL` of them at either end.
    """
    if row.mean.shape != seen.mean.shape or not row.live.any():
        return None
    offset = ((seen.mean - row.mean) / np.sqrt(row.variance))[row.live]
    low, high = np.quantile((seen.variance / row.variance)[row.live], [TAIL, 1 - TAIL])
    common = max(float(low if low > 1 else min(high, 1.0)), 1e-12)  # data may be constant
    square = float(np.mean(np.square(offset)))
    distance = float(common + square - 1 - np.log(common)) / 2
    deviation = Deviation(row.node, distance, common**0.5, square**0.5, seen.samples)
    source = None if row.source is None else others.get(row.source)
    means = None if source is None else _recorded_means(row, source.mean.size)
    if source is None or means is None:
        return deviation
    spread = max(float(source.square.mean() - source.mean.mean() ** 2), 0.0) ** 0.5
    return replace(deviation, source=row.source, seen=tuple(source.mean.tolist()), recorded=means, deviation=spread)


def _recorded_means(row: Recorded, channels: int) -> tuple[float, ...] | None:
    """Return the channel means of a convolution's input that explain the stored means of its output, by least squares.

    A convolution multiplies a mean by the sums of its kernels, apart from the zeros at the border. The result is None
    if the convolution has fewer outputs than inputs, or if the system is ill-conditioned.
    """
    if row.weight is None or row.bias is None or row.weight.shape != (row.mean.size, channels):
        return None
    scale = np.sqrt(row.variance[row.live])
    kernels = row.weight[row.live] / scale[:, None]
    means, _, rank, singular = np.linalg.lstsq(kernels, (row.mean - row.bias)[row.live] / scale, rcond=None)
    if rank < channels or singular[-1] < singular[0] / 100:
        return None
    return tuple(means.tolist())


def _bias_ratio(first: Biased, seen: Mapping[str, _ChannelMeans]) -> BiasRatio | None:
    """Return the ratio between a layer's output and its bias; None if the bias is zero."""
    typical = float(np.median(np.abs(first.bias)))
    if not typical or first.source not in seen or first.tensor not in seen:
        return None
    ratio = float(np.median(np.sqrt(seen[first.tensor].variance))) / typical
    return BiasRatio(first.node, ratio, seen[first.source].lo, seen[first.source].hi)


def _layouts(samples: Sequence[Sample]) -> dict[str, Layout]:
    """Return the layout of each input that is an image, averaged over the samples."""
    layouts: dict[str, list[Layout]] = {}
    for sample in samples:
        for name, array in sample.feed.items():
            layout = _layout(array)
            if layout is not None:
                layouts.setdefault(name, []).append(layout)
    return {
        name: Layout(rows[0].axes, *(float(np.mean([getattr(r, s) for r in rows])) for s in ("planes", "pixels")))
        for name, rows in layouts.items()
        if len({row.axes for row in rows}) == 1
    }


def _layout(array: Array) -> Layout | None:
    """Return how much neighbouring rows of an image differ; None for other arrays and for images of one colour."""
    if array.ndim != 4 or array.dtype.kind not in "fiu" or not array.size:
        return None
    axes = "NCHW" if array.shape[1] in CHANNELS else "NHWC"
    channels, height, width = (array.shape[axes.index(axis)] for axis in "CHW")
    if channels not in CHANNELS or min(height, width) < SMALLEST:
        return None
    rows = (width, channels * width)
    values = array.reshape(-1)[array.size // 2 :][: ROWS * channels * width].astype(np.float64)
    variance = float(values.var())
    if not variance:
        return None
    return Layout(axes, *(float(np.square(values[n:] - values[:-n]).mean()) / variance for n in rows))
