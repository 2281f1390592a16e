"""A compiled model with native operators: which ones make it faster here is measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from .... import RequantError
from ...kernels.bake import bake_convolutions, bake_tables, is_depthwise
from ...kernels.library import Kernels, kernels
from ...model.files import save_model
from ...runtime.configured import GAIN, LIBRARY, Values
from ...runtime.timing import interleave

KERNELS = ("auto", "native", "stock")
STOCK = "stock"
FORMS: Mapping[str, Callable[[ir.Node], bool] | None] = {
    "tables": None,
    "tables, depthwise convolutions": is_depthwise,
    "tables, convolutions": lambda _: True,
}
"""The forms that are tried: which convolutions are native."""


def native_library(asked: str, output: str | os.PathLike[str]) -> Kernels | None:
    """Return the native operators that may be used; None for the runtime's kernels alone.

    Args:
        asked: One of `KERNELS`.
        output: The model to write; in ORT format it has none.

    Raises:
        RequantError: They are asked for and cannot be had, or there is no such choice.
    """
    if Path(output).suffix.lower() == ".ort":
        if asked == "native":
            raise RequantError(f"{output}: native operators need a model in ONNX; give a path that ends in .onnx")
        return None
    if asked not in KERNELS:
        raise RequantError(f"no kernels {asked!r}; there are: {', '.join(KERNELS)}")
    found = None if asked == STOCK else kernels()
    if isinstance(found, str) and asked == "native":
        raise RequantError(found)
    return found if isinstance(found, Kernels) else None


def native_models(model: ir.Model) -> dict[str, ir.Model]:
    """Return copies of a graph that the runtime has optimized, by form; a form that changes nothing is left out."""
    made: dict[str, ir.Model] = {}
    tables = model.clone()
    count = bake_tables(tables)
    for form, wanted in FORMS.items():
        copy = tables.clone()
        replaced = bake_convolutions(copy, wanted) if wanted is not None else 0
        if replaced or (wanted is None and count):
            made[form] = copy
    return made


@dataclass(frozen=True, eq=False)
class Chosen:
    """A graph with the operators that are fastest here.

    Attributes:
        model: The graph.
        form: Which of `FORMS` it has, or `STOCK`.
        tried: The minimum time of a run of each form, in milliseconds; empty if nothing could be tried.
        library: The native operators that it needs; None for `STOCK`.
    """

    model: ir.Model
    form: str = STOCK
    tried: Mapping[str, float] = field(default_factory=dict)
    library: Kernels | None = None


def choose(
    model: ir.Model, library: Kernels, asked: str, run: Callable[[Path], Callable[[], object]], seconds: float
) -> Chosen:
    """Time a graph with each form of native operators, and return the fastest one.

    Args:
        model: A graph that the runtime has optimized.
        library: The native operators.
        asked: ``native``, or ``auto`` for the runtime's operators if no form is `GAIN` times as fast.
        run: Loads a model, and returns a function that runs it once.
        seconds: How long all runs together take, about.
    """
    forms = {STOCK: model, **native_models(model)}
    if len(forms) == 1:
        return Chosen(model)
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for index, form in enumerate(forms.values()):
            save_model(form, path := Path(folder, f"form-{index}.onnx"))
            runs.append(run(path))
        found = interleave(runs, seconds=seconds)
        del runs
    tried = {form: 1e3 * min(each) for form, each in zip(forms, found, strict=True)}
    best = min((form for form in tried if form != STOCK), key=tried.__getitem__)
    if asked == "auto" and tried[STOCK] < GAIN * tried[best]:
        return Chosen(model, STOCK, tried)
    return Chosen(forms[best], best, tried, library)


def with_library(values: Values, library: Kernels | None) -> Values:
    """Return session options that load the native operators too."""
    return values if library is None else {**values, LIBRARY: str(library.library)}
