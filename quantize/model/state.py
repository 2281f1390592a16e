"""What a user must know of the state of a model: what is carried, what the data give, and what may be a state."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from ...calibration.data.sources import Source
from ...calibration.model.state import hint, summary
from ...transforms.graphs.queries import is_standard, producer_of

ALONE = "the data give it: each sample is judged alone, and errors that add up in a carried state are not seen"


def passed_on(model: ir.Model) -> frozenset[str]:
    """Return the outputs that are inputs, passed on unchanged, such as a mask for the next model: they are no state."""
    found = set()
    for output in model.graph.outputs:
        value: ir.Value | None = output
        while is_standard(node := producer_of(value), "Identity"):
            value = node.inputs[0]
        if value is not None and value.is_graph_input():
            found.add(str(output.name))
    return frozenset(found)


def state_notes(source: Source | None, passed: Collection[str]) -> list[str]:
    """Return what is carried from sample to sample, what the data give in its place, and what may be a state.

    Args:
        source: The data.
        passed: The outputs that are inputs, passed on: they are no state, whatever their names say.
    """
    if source is None:
        return []
    links = [link for link in source.given if link.output not in passed]
    carried = (f"state: {text}" for text in summary(source.links))
    return [*carried, *(f"state: {text}, but {ALONE}" for text in summary(links)), *possible_state(source, passed)]


def possible_state(source: Source, passed: Collection[str]) -> list[str]:
    """Return a line that names the outputs that may be a state by their shapes alone; no line if there are none.

    Args:
        source: The data.
        passed: The outputs that are inputs, passed on.
    """
    links = [link for link in source.possible if link.output not in passed]
    return [f"state: {hint(links)}"] if links else []
