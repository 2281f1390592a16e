"""Random inputs for a model without data: good for running it, not for judging it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from ... import RequantError
from ...calibration.data.objects import python_object
from ...calibration.data.sources import Source
from ...calibration.execution import quarter_of_memory
from ...calibration.model.session import Array, InputSpec, ModelSource, describe
from .session import Runner

FREE = (8, 1, 16, 32, 64, 224)  # lengths to try for free axes; the first axis is a batch of 1
FEEDS = 4


def generated_source(model: ModelSource) -> Source | None:
    """Return random feeds on which a model runs; None if there are none, or if an input is not an array.

    Floats are normally distributed. Integers are 0 or 1 (ids and masks), or all 0 if the model refuses these (an axis).
    Booleans are true.

    Raises:
        RequantError: The runtime cannot load the model, or an input is too large.
    """
    run = Runner(model, lean=True)
    try:
        specs = run.inputs
    except RequantError:
        return None
    free = any(not isinstance(axis, int) for spec in specs for axis in spec.shape[1:])
    integers = any(spec.dtype.kind in "iu" for spec in specs)
    for length, below in product(FREE if free else FREE[:1], (2, 1) if integers else (2,)):
        feeds = _feeds(specs, length, below)
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds[0].items())
        source = Source(specs, python_object(feeds, f"random inputs ({shapes})"))
        try:
            for sample in source:
                run(sample.feed)
        except RequantError:
            continue
        return source
    return None


def refusal(model: ModelSource) -> str:
    """Return why random inputs are refused, with 1 for free first axes and 8 for others; empty if they are not.

    Raises:
        RequantError: The runtime cannot load the model, or an input is too large.
    """
    run = Runner(model, lean=True)
    try:
        run(_feeds(run.inputs, FREE[0], 2)[0])
    except RequantError as error:
        return _reason(error)
    return ""


def runs_on_none(why: str, hint: str = "; give data") -> str:
    """Return what a user is told of a model that runs on no random inputs, with the runtime's reason where it is known.

    Args:
        why: The `refusal`.
        hint: What may help.
    """
    return f"the model runs on no random inputs{hint}{why and f' ({why})'}"


def _reason(error: RequantError) -> str:
    """Return what the runtime said, without the name of the model."""
    return str(error).rpartition("the model fails: ")[2]


def source_of_shapes(model: ModelSource, shapes: Mapping[str, tuple[int, ...]]) -> Source:
    """Return random feeds of given shapes, drawn as by `generated_source`.

    Raises:
        RequantError: The runtime cannot load the model, or an input is too large, or cannot be fed from arrays, or the
            model refuses the feeds; then the message has the runtime's reason.
    """
    run = Runner(model, lean=True)
    specs = [replace(spec, shape=shapes[spec.name]) for spec in run.inputs]
    reason = ""
    for below in (2, 1):
        feeds = _feeds(specs, 0, below)
        told = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds[0].items())
        try:
            run(feeds[0])
        except RequantError as error:
            reason = _reason(error)
            continue
        return Source(tuple(specs), python_object(feeds, f"random inputs ({told})"))
    raise RequantError(f"{describe(model)}: the model runs on no random inputs of these shapes; give data ({reason})")


def _feeds(specs: Sequence[InputSpec], length: int, below: int) -> list[dict[str, Array]]:
    """Return random feeds: free axes after the first have `length`, integers are below `below`; see `_array`."""
    random = np.random.default_rng(0)
    return [{spec.name: _array(spec, length, below, random) for spec in specs} for _ in range(FEEDS)]


def _array(spec: InputSpec, length: int, below: int, random: np.random.Generator) -> Array:
    """Return a random array for one input.

    Raises:
        RequantError: The arrays of all feeds would take more than a quarter of the memory.
    """
    shape = [axis if isinstance(axis, int) else 1 if place == 0 else length for place, axis in enumerate(spec.shape)]
    if FEEDS * math.prod(shape) * np.dtype(np.float64).itemsize > quarter_of_memory():
        raise RequantError(f"input {spec.name!r} of shape {shape} is too large for random inputs; give data")
    if spec.dtype.kind == "f":
        return random.standard_normal(shape).astype(spec.dtype)
    if spec.dtype.kind == "b":
        return np.ones(shape, np.bool_)
    if spec.dtype.kind in "iu":
        return random.integers(0, below, shape).astype(spec.dtype)
    return np.full(shape, "a")
