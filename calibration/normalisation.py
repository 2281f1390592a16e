"""Whether data are preprocessed as they were in training, seen in the first layers of a model.

A BatchNormalization keeps the mean and the variance that its input had in training. With nothing but a convolution
between it and the data, a wrong scale or offset shows in all of its channels at once, while other pictures, blurred,
grey or drawn ones, leave some channels as they were. Where it is folded away, the convolution's bias and the first
gates still tell of data that are wrong by a large factor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import RequantError
from .first_layers import Biased, FirstLayers, Recorded, first_layers
from .samples import Sample
from .session import Array, Feed, ModelSource, Serialized, open_session, runtime_message
from .taps import load_copy

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnxruntime import InferenceSession

SAMPLES, FEW_SAMPLES = 16, 4
"""Samples that are looked at: where there is a BatchNormalization, and where there is none."""
TAIL = 0.2
"""The share of a BatchNormalization's channels, at either end, that need not show what the others have in common."""
CHANNELS = (2, 3, 4)
"""Channels of a picture whose layout can be judged."""
SMALLEST = 16
"""Rows and columns of such a picture at least."""
ROWS = 64
"""Rows of such a picture that are looked at."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far data are from what a BatchNormalization recorded.

    Attributes:
        node: The node.
        distance: The Kullback-Leibler divergence of what all channels have in common, in nats.
        scale: The factor that the standard deviations of all channels are off by at least; 1 if they share none.
        shift: The root mean square of what the channels' means are off by, in recorded standard deviations.
        samples: How many distinct samples tell so.
        source: The tensor of which the convolution before the node is made; None where there is no such tensor.
        seen: The means of its channels.
        recorded: The means from which the recorded ones follow, but for padding.
        deviation: The standard deviation of its values.
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
    """How large what a first layer makes of the data is beside its bias.

    Attributes:
        node: The layer.
        ratio: The median standard deviation of a channel over the median magnitude of a bias.
        lo: The smallest value that the layer reads.
        hi: The largest one.
    """

    node: str
    ratio: float
    lo: float
    hi: float


@dataclass(frozen=True, slots=True)
class Layout:
    """How much neighbouring rows of a picture differ: the mean squared difference over the variance, 2 for noise.

    Attributes:
        axes: What the model wants: ``"NCHW"`` or ``"NHWC"``.
        planes: The difference if the picture is stored as planes, one after the other.
        pixels: The difference if it is stored as pixels of all channels.
    """

    axes: str
    planes: float
    pixels: float


@dataclass(frozen=True, slots=True)
class Probe:
    """What some samples show in the first layers.

    Attributes:
        deviations: From what each of the first BatchNormalization nodes recorded.
        bias: What the bias of the first layer tells; None where it has none.
        saturated: The share of saturated values of each of the first gates.
        layouts: The inputs that look like pictures with several channels.
    """

    deviations: tuple[Deviation, ...] = ()
    bias: BiasRatio | None = None
    saturated: Mapping[str, float] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)


def expected_statistics(model: ModelSource) -> dict[str, Recorded]:
    """Return what the first BatchNormalization nodes of a model recorded in training, by the tensor that they read.

    Raises:
        RequantError: The model cannot be read.
    """
    return dict(first_layers(load_copy(model)[0].graph).norms)


def probe(model: ModelSource, samples: Iterable[Sample]) -> Probe:
    """Run the first layers of a model, and nothing else of it, over at most `SAMPLES` samples.

    Args:
        model: The model as it was trained: with its BatchNormalization nodes, where it has some.
        samples: Samples, of which the first are looked at; copies are looked at once.

    Raises:
        RequantError: The model cannot be read or run.
    """
    copy, folder = load_copy(model)
    first = first_layers(copy.graph)
    distinct = list(_distinct(islice(samples, SAMPLES if first.norms else FEW_SAMPLES)))
    names = _tensors(first)
    seen: dict[str, list[_Seen]] = {name: [] for name in names}
    saturated: dict[str, list[float]] = {gate.node: [] for gate in first.gates}
    session = _cut(copy, folder, names)
    for sample in distinct:
        values = _run(session, sample, names)
        for name, axis in _reduced(first).items():
            if values[name].size and axis < values[name].ndim > 1:
                seen[name].append(_Seen.of(values[name], axis))
        for gate in first.gates:
            if values[gate.tensor].size:
                beyond = (values[gate.tensor] < gate.lo) | (values[gate.tensor] > gate.hi)
                saturated[gate.node].append(float(beyond.mean()))
    merged = {name: _Seen.merged(parts) for name, parts in seen.items() if len({p.mean.size for p in parts}) == 1}
    deviations = [_deviation(row, merged[name], merged) for name, row in first.norms.items() if name in merged]
    return Probe(
        tuple(deviation for deviation in deviations if deviation is not None),
        None if first.biased is None else _bias_ratio(first.biased, merged),
        {name: float(np.mean(shares)) for name, shares in saturated.items() if shares},
        _layouts(distinct),
    )


def _distinct(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield samples whose feeds no earlier one had."""
    met = set()
    for sample in samples:
        digest = hashlib.blake2b(digest_size=16)
        for name, array in sorted(sample.feed.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(repr(array.tolist()).encode() if array.dtype.kind == "U" else array.tobytes())
        if digest.digest() not in met:
            met.add(digest.digest())
            yield sample


def _tensors(first: FirstLayers) -> list[str]:
    """Return the tensors to be fetched."""
    return list(dict.fromkeys([*_reduced(first), *(gate.tensor for gate in first.gates)]))


def _reduced(first: FirstLayers) -> dict[str, int]:
    """Return the channel axis of each tensor whose channels are looked at."""
    axes = dict.fromkeys(first.norms, 1) | {row.source: 1 for row in first.norms.values() if row.source is not None}
    if first.biased is not None:
        axes |= {first.biased.source: first.biased.axis, first.biased.tensor: first.biased.axis}
    return axes


def _cut(copy: ir.Model, folder: Path | None, names: Sequence[str]) -> InferenceSession | None:
    """Open a session of no more of a model than some tensors take; None where all of them are fed.

    Raises:
        RequantError: It cannot be opened.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    graph = copy.graph
    made = {value.name: value for node in graph for value in node.outputs}
    outputs = [made[name] for name in names if name in made]
    if not outputs:
        return None
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    RemoveUnusedNodesPass()(copy)
    return open_session(Serialized(ir.to_proto(copy).SerializeToString(), folder))


def _run(session: InferenceSession | None, sample: Sample, names: Sequence[str]) -> Feed:
    """Return tensors that a session gives or a sample feeds."""
    values = {name: array for name, array in sample.feed.items() if name in names}
    if session is None:
        return values
    inputs = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    feed = {name: array for name, array in sample.feed.items() if name in inputs}
    try:
        return values | dict(zip(outputs, session.run(outputs, feed), strict=True))
    except Exception as error:  # the runtime's exceptions share no base class of their own
        raise RequantError(f"{sample.where}: the model fails: {runtime_message(error)}") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """The channels of a tensor over samples, each of which counts the same.

    Attributes:
        mean: The mean of each channel, (C,) float64.
        square: The mean of the squares, (C,) float64.
        lo: The smallest value.
        hi: The largest one.
        samples: How many samples there are.
    """

    mean: Array
    square: Array
    lo: float
    hi: float
    samples: int = 1

    @classmethod
    def of(cls, array: Array, axis: int) -> _Seen:
        """Reduce a tensor."""
        values = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
        values = values.astype(np.float32 if values.dtype == np.float16 else values.dtype, copy=False)
        square = np.einsum("cn,cn->c", values, values).astype(np.float64) / values.shape[1]
        return cls(values.mean(1, dtype=np.float64), square, float(values.min()), float(values.max()))

    @classmethod
    def merged(cls, parts: Sequence[_Seen]) -> _Seen:
        """Merge samples with as many channels."""
        mean, square = (np.mean(rows, axis=0) for rows in ([p.mean for p in parts], [p.square for p in parts]))
        return cls(mean, square, min(part.lo for part in parts), max(part.hi for part in parts), len(parts))

    @property
    def variance(self) -> Array:
        """The variance of each channel, (C,)."""
        return np.asarray(np.maximum(self.square - np.square(self.mean), 0))


def _deviation(row: Recorded, seen: _Seen, others: Mapping[str, _Seen]) -> Deviation | None:
    """Set what was seen of a tensor against what was recorded; None where no channel can be judged.

    The distance is the divergence of normal distributions, ``(s + z**2 - 1 - ln s) / 2`` (Kullback and Leibler, On
    Information and Sufficiency, 1951), with the mean of z**2 over the channels, z being what the means are off by in
    recorded standard deviations. For s, the ratio of the variances, the value nearest to 1 is taken that lies between
    those of the channels, but for `TAIL` of them at either end.
    """
    if row.mean.shape != seen.mean.shape or not row.live.any():
        return None
    offset = ((seen.mean - row.mean) / np.sqrt(row.variance))[row.live]
    low, high = np.quantile((seen.variance / row.variance)[row.live], [TAIL, 1 - TAIL])
    common = max(float(low if low > 1 else min(high, 1.0)), 1e-12)  # data may be constant
    square = float(np.mean(np.square(offset)))
    distance = float(common + square - 1 - np.log(common)) / 2
    found = Deviation(row.node, distance, common**0.5, square**0.5, seen.samples)
    source = None if row.source is None else others.get(row.source)
    wanted = None if source is None else _recorded_means(row, source.mean.size)
    if source is None or wanted is None:
        return found
    deviation = max(float(source.square.mean() - source.mean.mean() ** 2), 0.0) ** 0.5
    return replace(found, source=row.source, seen=tuple(source.mean.tolist()), recorded=wanted, deviation=deviation)


def _recorded_means(row: Recorded, channels: int) -> tuple[float, ...] | None:
    """Return the means of a convolution's input from which the recorded means of its output follow, least squares.

    A mean goes through a convolution as through the sums of its kernels, but for the zeros at the border. None where
    there are fewer outputs than inputs, or the sums tell some inputs from each other badly.
    """
    if row.weight is None or row.bias is None or row.weight.shape != (row.mean.size, channels):
        return None
    scale = np.sqrt(row.variance[row.live])
    kernels = row.weight[row.live] / scale[:, None]
    means, _, rank, singular = np.linalg.lstsq(kernels, (row.mean - row.bias)[row.live] / scale, rcond=None)
    if rank < channels or singular[-1] < singular[0] / 100:
        return None
    return tuple(means.tolist())


def _bias_ratio(first: Biased, seen: Mapping[str, _Seen]) -> BiasRatio | None:
    """Set what a layer gives beside its bias; None where the bias is zero."""
    typical = float(np.median(np.abs(first.bias)))
    if not typical or first.source not in seen or first.tensor not in seen:
        return None
    ratio = float(np.median(np.sqrt(seen[first.tensor].variance))) / typical
    return BiasRatio(first.node, ratio, seen[first.source].lo, seen[first.source].hi)


def _layouts(samples: Sequence[Sample]) -> dict[str, Layout]:
    """Return how alike the neighbouring rows are of the pictures among the inputs, over the samples."""
    found: dict[str, list[Layout]] = {}
    for sample in samples:
        for name, array in sample.feed.items():
            layout = _layout(array)
            if layout is not None:
                found.setdefault(name, []).append(layout)
    return {
        name: Layout(rows[0].axes, *(float(np.mean([getattr(r, s) for r in rows])) for s in ("planes", "pixels")))
        for name, rows in found.items()
        if len({row.axes for row in rows}) == 1
    }


def _layout(array: Array) -> Layout | None:
    """Return how alike the neighbouring rows of a picture are; None for what is none, or is of one colour."""
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
