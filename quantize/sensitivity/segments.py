"""A model cut into segments, so that a trial of one tensor runs only the nodes that can see it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from ...calibration.data.samples import Sample
from ...transforms.graphs.inference import inferred
from ...transforms.graphs.queries import constant
from ...transforms.strip_unused_nodes import strip_unused_nodes
from ..model.files import serialize
from ..runtime.session import Runner
from ..runtime.spread import spread

LEAST, MOST = 48, 8
"""Tensors of a segment, at least, and the number of segments, at most. YOLOX-Nano with 210 tensors and 4 samples takes
20.7 s in one segment, 12.5 s in four, 12.7 s in eight, 14.2 s in fifteen: each segment opens two sessions."""


@dataclass(frozen=True)
class Segment:
    """Some tensors of a model, and the part of the model from there to the outputs.

    Attributes:
        model: The part. Its inputs are the tensors before it that it reads.
        tensors: The tensors; all are in the part.
        samples: Its inputs for each sample.
    """

    model: ir.Model
    tensors: Sequence[str]
    samples: Sequence[Sample]


def segments(model: ir.Model, tensors: Collection[str], samples: Sequence[Sample]) -> Iterator[Segment]:
    """Yield the segments of a model in order; one, the whole model, if it is small or has control flow.

    Args:
        model: A float model.
        tensors: Names of tensors.
        samples: Some samples.

    Raises:
        RequantError: The model fails on a sample.
    """
    if not _is_plain(model):
        yield Segment(model, tuple(tensors), samples)
        return
    places = {node: place for place, node in enumerate(model.graph)}
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    made = {name: _place(value, places) for name, value in values.items()}
    ordered = sorted(tensors, key=made.__getitem__)
    count = min(MOST, len(ordered) // LEAST)
    if count < 2:
        yield Segment(model, tuple(tensors), samples)
        return
    size = -(-len(ordered) // count)
    part = model
    for index in range(0, len(ordered), size):
        names = ordered[index : index + size]
        first = made[names[0]]
        if first:
            alive = tuple(name for name, value in values.items() if _is_read_from(value, first, places))
            samples = _captured(part, alive, samples)
            outputs = tuple(str(v.name) for v in model.graph.outputs if _place(v, places) >= first)
            part = model.clone()
            strip_unused_nodes(part, inputs=alive, outputs=outputs)
        yield Segment(part, names, samples)


def _is_plain(model: ir.Model) -> bool:
    """Return whether a model has no control flow, no inputs with defaults, and no tensors of unknown type."""
    bodies = any(attribute.type is ir.AttributeType.GRAPH for n in model.graph for attribute in n.attributes.values())
    if bodies or any(value.is_initializer() for value in model.graph.inputs):
        return False
    return all(isinstance(value.type, ir.TensorType) for value in inferred(model).values())


def _place(value: ir.Value, places: Mapping[ir.Node, int]) -> int:
    """Return the place of the node that computes a tensor; 0 for an input."""
    producer = value.producer()
    return 0 if producer is None else places[producer]


def _is_read_from(value: ir.Value, first: int, places: Mapping[ir.Node, int]) -> bool:
    """Return whether a tensor is known before a node, and read by it or by a later one."""
    before = _place(value, places) < first and constant(value) is None
    return before and any(places[use.node] >= first for use in value.uses())


def _captured(model: ir.Model, names: Collection[str], samples: Sequence[Sample]) -> list[Sample]:
    """Return samples whose feeds are some tensors of a model, its inputs among them."""
    given = {value.name for value in model.graph.inputs}
    copy = model.clone()
    strip_unused_nodes(copy, outputs=tuple(name for name in names if name not in given))
    runner = Runner(serialize(copy), threads=1)
    found = spread(lambda sample: {**sample.feed, **runner(sample.feed)}, samples)
    feeds = [{name: feed[name] for name in names} for feed in found]
    return [replace(sample, feed=feed) for sample, feed in zip(samples, feeds, strict=True)]
