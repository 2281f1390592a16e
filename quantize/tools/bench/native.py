"""A compiled model with native operators: which ones make it faster here is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from .... import NATIVE_DOMAIN, RequantError
from ....calibration.model.session import Array
from ....system.given import check_kind
from ...kernels.bake import bake_convolutions, bake_tables, is_depthwise
from ...kernels.library import Kernels, kernels
from ...model.files import is_ort
from ...model.writing import save_model
from ...runtime.clock import race
from ...runtime.configured import GAIN, LIBRARY, Values, configured_run, threads_of

KERNELS = ("auto", "native", "stock")
STOCK, OWN = "stock", "own"
FORMS: Mapping[str, Callable[[ir.Node], bool]] = {
    "tables": lambda _: False,
    "tables, depthwise convolutions": is_depthwise,
    "tables, convolutions": lambda _: True,
}
"""The forms that are tried, and which convolutions are native in each."""
UNCHANGED: Values = {"graph_optimization_level": "off"}
"""The session options that run a compiled graph as it is."""


def native_library(asked: str, output: str | os.PathLike[str]) -> Kernels | None:
    """Return the native operators that may be used; None for the runtime's operators alone.

    Args:
        asked: One of `KERNELS`.
        output: The model to write; a model in ORT format has no native operators.

    Raises:
        RequantError: `asked` is not one of `KERNELS`, or it is ``native`` and there are no native operators here.
    """
    check_kind(asked, str, f"kernels must be one of {', '.join(KERNELS)}")
    if asked not in KERNELS:
        raise RequantError(f"no kernels {asked!r}; there are: {', '.join(KERNELS)}")
    as_ort = is_ort(output)
    if as_ort and asked == "native":
        raise RequantError(f"{output}: native operators need a model in ONNX; give a path that ends in .onnx")
    found = None if as_ort or asked == STOCK else kernels()
    if isinstance(found, str) and asked == "native":
        raise RequantError(found)
    return found if isinstance(found, Kernels) else None


def needed_library(model: ir.Model) -> Values:
    """Return the session option that loads the native operators of a model; empty if it has none, or there are none."""
    found = kernels() if NATIVE_DOMAIN in model.opset_imports else None
    return with_library({}, found if isinstance(found, Kernels) else None)


def native_models(model: ir.Model) -> dict[str, ir.Model]:
    """Return copies of a graph that the runtime has optimized, by form; forms with equal graphs once."""
    made: dict[str, ir.Model] = {}
    tables = model.clone()
    seen = set() if bake_tables(tables) else {0}  # by the number of native convolutions
    for form, wanted in FORMS.items():
        copy = tables.clone()
        count = bake_convolutions(copy, wanted)
        if count not in seen:
            made[form] = copy
            seen.add(count)
    return made


@dataclass(frozen=True, eq=False)
class Natives:
    """The native operators to try in a model, and how the model runs.

    Attributes:
        library: The native operators.
        asked: ``native``, or ``auto`` for the graph as it is if no form is `GAIN` times as fast.
        values: The session options.
        feed: The inputs of a run.
    """

    library: Kernels
    asked: str
    values: Values
    feed: Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class Chosen:
    """A graph with the operators that are fastest here.

    Attributes:
        model: The graph.
        form: Which of `FORMS` it has, `OWN` for the native operators of the original alone, or `STOCK`.
        tried: The minimum time of a run of each form, in milliseconds; empty if nothing could be tried.
        needed: The session option that loads its native operators; empty for `STOCK`.
    """

    model: ir.Model
    form: str
    tried: Mapping[str, float] = field(default_factory=dict)
    needed: Values = field(default_factory=dict)


def choose(model: ir.Model, needed: Values, natives: Natives | None, folder: Path, seconds: float) -> Chosen:
    """Time a graph with each form of native operators, and return the fastest one.

    Args:
        model: A graph that the runtime has optimized.
        needed: The session option that its native operators need; empty without any.
        natives: What to try; None for the graph as it is.
        folder: An empty folder for the forms.
        seconds: How long all runs together take, about.
    """
    plain = OWN if needed else STOCK
    forms = {plain: model, **(native_models(model) if natives is not None else {})}
    if natives is None or len(forms) == 1:
        return Chosen(model, plain, needed=needed)
    values = with_library({**UNCHANGED, **natives.values}, natives.library)
    runs = []
    for index, form in enumerate(forms.values()):
        save_model(form, path := folder / f"form-{index}.onnx")
        runs.append(configured_run(path, values, natives.feed))
    times = race(runs, seconds=seconds, threads=threads_of(values))
    tried = {form: 1e3 * each.least for form, each in zip(forms, times, strict=True)}
    best = min((form for form in tried if form != plain), key=tried.__getitem__)
    if natives.asked == "auto" and tried[plain] < GAIN * tried[best]:
        return Chosen(model, plain, tried, needed)
    return Chosen(forms[best], best, tried, with_library({}, natives.library))


def with_library(values: Values, library: Kernels | None) -> Values:
    """Return session options that load the native operators too."""
    return values if library is None else {**values, LIBRARY: str(library.library)}
