"""What the graph of the float model tells about its outputs: whose values are frames, and which a Sigmoid writes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import onnx_ir as ir

from .above_half import sigmoid_outputs
from .classes import open_rows
from .outputs import Accuracy


def with_kinds_of(model: ir.Model, accuracy: Accuracy, outputs: Iterable[ir.Value] | None = None) -> Accuracy:
    """Return a comparison without the counts that make no sense for the outputs of a model.

    Args:
        model: The float model.
        accuracy: The comparison, which knows only the values of the outputs.
        outputs: The outputs of the model with inferred shapes; None if the model has these shapes itself.
    """
    frames = open_rows(model.graph.outputs if outputs is None else outputs)
    vectors = {name: found for name, found in accuracy.cosines.items() if name not in frames}
    accuracy = replace(accuracy, cosines=vectors)
    return with_sigmoids(without_classes_of_frames(accuracy, frames), sigmoid_outputs(model))


def without_classes_of_frames(accuracy: Accuracy, frames: Collection[str]) -> Accuracy:
    """Return a comparison without classes if no labels were given and the output with the classes is one of `frames`.

    Probabilities of frames that are all 0 or 1 stay `saturated`: they hide noise as those of classes do.

    Args:
        accuracy: The comparison.
        frames: The outputs whose values are frames, as `open_rows` returns them.
    """
    if accuracy.labelled is not None or accuracy.class_output not in frames:
        return accuracy
    return replace(accuracy, scores=None)


def with_sigmoids(accuracy: Accuracy, sigmoids: Collection[str]) -> Accuracy:
    """Return a comparison that counts values above 0.5 only in the outputs that a Sigmoid writes, and no cosines."""
    counted = {name: found for name, found in accuracy.above_half.items() if name in sigmoids}
    vectors = {name: found for name, found in accuracy.cosines.items() if name not in sigmoids}
    return replace(accuracy, above_half=counted, cosines=vectors)
