"""Outputs that a model selects by its own scores. Their length or order changes with the last bit of one score."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import onnx_ir as ir

from ...system.printable import one_line
from ...transforms.graphs.inference import inferred
from ...transforms.graphs.queries import constant, is_float32, producer_of
from .choices import (
    BEFORE_LAYERS,
    CHOOSES,
    SELECTS,
    Reader,
    chooses,
    computed_inputs,
    into,
    is_layer,
    is_replacement,
)
from .given_choices import given_choices, layered_choices, outputs_behind, readers_of
from .outputs import Accuracy
from .sqnr import decibels_text

NAME = 60  # the most characters of the name of an output in a sentence
SHOWN = 3  # tensors that a sentence names
REPLACED = "the model chooses {!r} by its own scores: what it chooses from is judged in its place, {}"
OWN_SQNR = "; the last bit of a score changes the choice, so that its own SQNR, {}, says little: give a metric"
RANKS = ("TopK", "Equal")  # operators that compare the scores of a detector, and read nothing else
SAME_SCORES = frozenset({"ReduceMax", "Sigmoid", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze"})
"""Operators whose result holds the scores, or the best ones, of their input."""

SAME_VALUES = frozenset({"Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose result holds values of their input, so that both have nearly the same SQNR."""


def outputs_without_signal(accuracy: Accuracy) -> list[str]:
    """Return the outputs without any signal left, for instance because their lengths differ."""
    return [name for name, value in accuracy.sqnr_db.items() if value == -math.inf]


def selected_from(model: ir.Model) -> list[Reader]:
    """Return the float tensors that `SELECTS` operators of a simplified model read."""
    if not any(node.op_type in SELECTS for node in model.graph):  # inference takes long
        return []
    known = inferred(model)
    return [
        (node.name, index, f"{value.name}{into(node.op_type)}")
        for node in model.graph
        if node.op_type in SELECTS and not node.domain
        for index, value in computed_inputs(node, known)
    ]


def chosen_outputs(model: ir.Model, given: Collection[str] = ()) -> dict[str, tuple[Reader, ...]]:
    """Return the outputs that a simplified model chooses by its own scores, and the float tensors it chooses them from.

    A TopK, an ArgMax, or the peaks of a map (``x == MaxPool(x)``) compare scores with each other. Where two of them are
    nearly equal, the last bit of one decides which entry comes first, and the outputs of two models differ in many
    numbers though neither is wrong. What the entries are taken from tells more: the scores, and the boxes beside them.
    An output is left out where layers read what was chosen, as the decoders of some detectors do: they must be judged.

    Args:
        model: A simplified float model.
        given: Nodes whose choice both models are given (`given_choices`): they choose nothing of their own.
    """
    if not any(node.op_type in CHOOSES for node in model.graph):
        return {}
    known = inferred(model)
    chosen: set[ir.Value] = set()
    beyond: set[ir.Value] = set()  # computed by layers from what was chosen
    for node in model.graph:
        inputs = {value for value in node.inputs if value is not None}
        if inputs & beyond or (inputs & chosen and is_layer(node)):
            beyond |= set(node.outputs)
        elif inputs & chosen or (node.name not in given and chooses(node, known)):
            chosen |= set(node.outputs)
    ranks = _ranked(model, known) if chosen else {}
    found: dict[str, tuple[Reader, ...]] = {}
    for output in model.graph.outputs:
        last = output.producer()
        if output in chosen and last is not None:
            behind = {v: (node.name, i, ranks.get(v, node.op_type)) for node, i, v in _behind(last, chosen, known)}
            operators = {value: op for value, (_, _, op) in behind.items()}
            found[str(output.name)] = tuple(
                (str(node), i, f"{value.name}{into(op)}")
                for value, (node, i, op) in behind.items()
                if not _repeats(value, operators)
            )
    return {name: readers for name, readers in found.items() if readers}


def _repeats(value: ir.Value, operators: Mapping[ir.Value, str]) -> bool:
    """Whether a tensor holds values of another one of some tensors, and the same operator reads both.

    Args:
        value: One of the tensors.
        operators: The operator that reads each of them.
    """
    operator, node = operators[value], producer_of(value)
    while node is not None and node.op_type in SAME_VALUES and node.inputs[0] is not None:
        if operators.get(node.inputs[0]) == operator:
            return True
        node = producer_of(node.inputs[0])
    return False


def replacements_for(
    model: ir.Model,
    lost: Collection[str],
    reshaped: Collection[str] = (),
    integers: Collection[str] = (),
    *,
    gives: bool = True,
) -> tuple[dict[str, tuple[Reader, ...]], list[str]]:
    """Return what to compare in place of outputs that lose much, and the nodes whose choice both models are to take.

    Args:
        model: A simplified float model.
        lost: The outputs that lose much.
        reshaped: Those whose shape differs too.
        integers: The outputs that are integers, which are not compared if layers compute them from a choice.
        gives: Whether choices may be given: the weights that lead to them are then twice in memory.
    """
    given = layered_choices(model) if lost and gives else []
    behind = outputs_behind(model, given)
    if not behind.intersection(lost):
        given, behind, integers = [], set(), ()
    chosen = chosen_outputs(model, given) if lost else {}
    every = tuple(selected_from(model)) if reshaped else ()
    replacements = {name: every for name in reshaped if name not in behind}
    return replacements | {name: chosen[name] for name in (*lost, *integers) if name in chosen}, given


def compared_readers(model: ir.Model, compared: Collection[str]) -> list[Reader]:
    """Return the readers of tensors that were compared in place of outputs, from the names of what was compared."""
    given = given_choices(model, compared)
    chosen = (reader for found in chosen_outputs(model, given).values() for reader in found)
    readers = (*selected_from(model), *chosen, *readers_of(model, given))
    every = {label: (name, index, label) for name, index, label in readers}
    return [reader for label, reader in every.items() if label in compared]


def holds_scores(label: str) -> bool:
    """Whether a tensor that is compared in place of an output holds the scores of a detector, from its label."""
    return label.endswith(tuple(into(op, where) for op in RANKS for where in ("", BEFORE_LAYERS)))


def worst_place(sqnr_db: Mapping[str, float]) -> str:
    """Return where the SQNR is worst: one of several outputs by name, or what is compared in its place by its label."""
    worst = min(sqnr_db, key=sqnr_db.__getitem__, default="")
    return one_line(worst, NAME) if is_replacement(worst) or len(sqnr_db) > 1 else "the output"


def replaced_notes(model: ir.Model, accuracy: Accuracy) -> Iterator[str]:
    """Yield what was compared in place of each output that a simplified model chooses, with its own SQNR.

    Args:
        model: A simplified float model.
        accuracy: The comparison.
    """
    chosen = chosen_outputs(model) if accuracy.replaced else {}
    compared = [label for label in accuracy.sqnr_db if is_replacement(label)]
    for name, own in accuracy.replaced.items():
        labels = [label for _, _, label in chosen.get(name, ()) if label in compared] or compared
        told = ", ".join(one_line(label, NAME) for label in labels[:SHOWN])
        more = f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else ""
        yield REPLACED.format(one_line(name, NAME), f"{told}{more}") + (
            "" if math.isnan(own) else OWN_SQNR.format(decibels_text(own))
        )


def _ranked(model: ir.Model, known: Mapping[str, ir.Value]) -> dict[ir.Value, str]:
    """Return the tensors of scores that `RANKS` operators compare, with the operator that compares them."""
    found: dict[ir.Value, str] = {}
    for node in reversed(model.graph):
        operator = node.op_type if node.op_type in RANKS and chooses(node, known) else None
        if operator is None and node.op_type in SAME_SCORES and node.outputs[0] in found:
            operator = found[node.outputs[0]]
        if operator is not None and node.inputs[0] is not None:
            found[node.inputs[0]] = operator
    return found


def _behind(
    node: ir.Node, chosen: Collection[ir.Value], known: Mapping[str, ir.Value]
) -> Iterator[tuple[ir.Node, int, ir.Value]]:
    """Yield a reader and the index of its input for each float tensor from which a node takes what was chosen."""
    nodes, seen = [node], {node}
    while nodes:
        node = nodes.pop()
        for index, value in enumerate(node.inputs):
            before = producer_of(value)
            if value is None or constant(value) is not None:
                continue
            if value in chosen and before is not None:
                nodes += [] if before in seen else [before]
                seen.add(before)
            elif is_float32(known.get(str(value.name))):
                yield node, index, value


def has_readers(model: ir.Model, sources: Iterable[Reader]) -> bool:
    """Whether an INT8 model still has some nodes that read tensors: a native operator may have taken their place."""
    nodes = {node.name: node for node in model.graph}
    return all(name in nodes and index < len(nodes[name].inputs) for name, index, _ in sources)


def with_tensors_as_outputs(model: ir.Model, sources: Iterable[Reader], outputs: Collection[str]) -> ir.Model:
    """Return a copy of a model in which inputs of nodes replace some outputs.

    Args:
        model: The float model, or the INT8 model made from it: the node names are the same.
        sources: The inputs of nodes that become outputs.
        outputs: The names of the outputs to remove.
    """
    copy = model.clone()
    nodes = {node.name: node for node in copy.graph}
    kept = [output for output in copy.graph.outputs if output.name not in outputs]
    for name, index, label in sources:
        value = nodes[name].inputs[index]
        shown = ir.node("Identity", [value], name=label)
        shown.outputs[0].name, shown.outputs[0].type = label, ir.TensorType(ir.DataType.FLOAT)
        copy.graph.append(shown)
        kept.append(shown.outputs[0])
    copy.graph.outputs.clear()
    copy.graph.outputs.extend(kept)
    return copy
