"""Shapes that only a run tells: those of tensors whose size follows from the values of others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import onnx_ir as ir

from .... import RequantError
from ....calibration.model.session import Array
from ....transforms.graphs.inference import infer
from ...model.files import serialize, staging
from ...model.shapes import Shaped
from ...runtime.session import Runner


def with_shapes_of_run(found: Shaped, feed: Mapping[str, Array]) -> Shaped:
    """Return a model with the shapes that its tensors have in one run, where inference does not find them.

    The length of the result of a NonZero, a Range or a NonMaxSuppression follows from values. Tensors in bodies get
    shapes as far as they follow from those around them. If the model does not run, it is returned as it is.

    Args:
        found: The model with inferred shapes; it does not change.
        feed: The inputs of the run, whose shapes the model has.
    """
    unknown = [str(value.name) for node in found.model.graph for value in node.outputs if _is_unknown(value)]
    if not unknown:
        return found
    shown = found.model.clone()
    known, values = {value.name for value in shown.graph.outputs}, ir.convenience.create_value_mapping(shown.graph)
    shown.graph.outputs.extend(values[name] for name in unknown if name not in known)
    with suppress(RequantError), staging(None) as folder:
        outputs = Runner(serialize(shown, folder), lean=True)(feed)
        return _with_shapes(found, {name: outputs[name].shape for name in unknown if hasattr(outputs[name], "shape")})
    return found


def _with_shapes(found: Shaped, shapes: Mapping[str, tuple[int, ...]]) -> Shaped:
    """Return a copy of a model with the shapes of some tensors, and with what follows from them."""
    copy = found.model.clone()
    places = dict(zip(found.model.graph.all_nodes(), copy.graph.all_nodes(), strict=True))
    values = ir.convenience.create_value_mapping(copy.graph)
    for name, shape in shapes.items():
        values[name].shape = ir.Shape(shape)
    infer(copy)
    return replace(found, model=copy, steps={places[node]: steps for node, steps in found.steps.items()})


def _is_unknown(value: ir.Value) -> bool:
    """Whether a tensor has a name, and an axis without a length or no shape at all."""
    return bool(value.name) and (value.shape is None or not value.shape.is_static())
