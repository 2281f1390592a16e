"""A float model with a switch for every int8 part of a plan: one session tries any combination."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx_ir as ir

from ... import RequantError
from ...calibration.data.samples import Sample
from ...calibration.execution import cpus
from ...calibration.model.session import Array, Feed, open_session, runtime_message
from ...calibration.runs.stamps import model_stamp
from ...transforms.graphs.queries import nodes_by_name
from ...transforms.int8.plan import Plan
from ...transforms.int8.qparams import QParams
from ..accuracy.choices import PREFIX
from ..accuracy.parts import Balance, balance
from ..accuracy.sqnr import FAINT, output_powers, worst_powers
from ..model.files import Weights, serialize
from .switch_graph import (
    SWITCHES,
    Part,
    Rounding,
    Switch,
    Tap,
    insert_part,
    insert_tap,
    is_computed_output,
    taps_of,
    wires_of,
)

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)")

Powers: TypeAlias = dict[str, tuple[float, float]]
"""The sums of squares of each output and of its noise."""
Constants: TypeAlias = Mapping[str, Mapping[int, Array]]
"""The dequantized constants, float32, by unit and input index of its first node."""


@dataclass(frozen=True)
class Switchboard:
    """A model that runs with any part of a plan in integers; `switchboard` and `tensor_switches` create it.

    Attributes:
        session: The session, with one thread, so that runs can be concurrent.
        outputs: The float outputs.
        switches: The switches, with their positions in the input that sets them.
        parts: The units with switches, each with the position of the switch for the whole unit.
        plan: The plan whose units can be integers.
        identity: Identifies the model with its weights, scales and switches.
    """

    session: InferenceSession
    outputs: tuple[str, ...]
    switches: Mapping[Switch, int]
    parts: Mapping[str, int] = field(default_factory=dict)
    plan: Plan = field(default_factory=lambda: Plan((), {}))
    identity: str = ""

    @property
    def everything(self) -> frozenset[Switch]:
        """All switches: the outputs are those of the integer model."""
        return frozenset(self.switches)

    def unit(self, name: str) -> frozenset[Switch]:
        """The switches of a unit: its constants, its inputs, and its outputs for readers without a switch."""
        outputs = {tensor for unit in self.plan.units if unit.name == name for tensor in unit.outputs}
        return frozenset(s for s in self.switches if s.unit == name or (not s.unit and s.tensor in outputs))

    def tensor(self, name: str) -> frozenset[Switch]:
        """The switches of all tensors with the scale of this tensor, for all readers."""
        return frozenset(s for s in self.switches if s.tensor and self.plan.root(s.tensor) == name)

    def constants(self, unit: str) -> frozenset[Switch]:
        """The switch of the constants of a unit; empty without constants."""
        return frozenset({Switch(unit, "")} & self.switches.keys())

    def run(self, feed: Feed, on: Collection[Switch] = ()) -> dict[str, Array]:
        """Return the float outputs with some switches on.

        Raises:
            RequantError: The runtime refuses the feed.
        """
        fed = dict(feed)
        if self.switches:
            fed[SWITCHES] = np.zeros(len(self.switches) + len(self.parts), np.bool_)
            fed[SWITCHES][[self.switches[switch] for switch in on]] = True
            fed[SWITCHES][[self.parts[switch.unit] for switch in on if switch.unit]] = True
        try:
            return dict(zip(self.outputs, self.session.run(list(self.outputs), fed), strict=True))
        except Exception as error:  # the runtime's exceptions share no base class of their own
            raise RequantError(f"the model fails: {runtime_message(error)}") from error


def switchboard(
    model: ir.Model,
    plan: Plan,
    qparams: Mapping[str, QParams],
    constants: Constants | None = None,
    *,
    optimize: bool = True,
    folder: Path | None = None,
) -> Switchboard:
    """Open a session in which any part of a plan can be in integers.

    The session holds the weights three times, twice in float: leave out the weights of a large model.

    Args:
        model: The simplified float model of the plan.
        plan: The plan whose units can be integers.
        qparams: Scale and zero point of every tensor in ``plan.observed``.
        constants: The result of `integer_constants`; other units keep their float constants.
        optimize: Whether the runtime may rewrite the graph. ONNX Runtime 1.31 aborts if a DequantizeLinear is followed
            by a Transpose or a similar operator, with a reader in an inserted body.
        folder: A folder for large weights.

    Raises:
        RequantError: The runtime cannot load it.
    """
    copy = _without_lengths(model)
    taps = taps_of(copy, plan, qparams)
    arrays = {name: found for name, found in (constants or {}).items() if found}
    switches = [*taps, *(Switch(name, "") for name in arrays)]
    parts = [unit for unit in plan.units if any(switch.unit == unit.name for switch in switches)]
    wires = wires_of(copy, len(switches) + len(parts))
    wired = dict(zip(switches, wires, strict=False))
    for index, switch in enumerate(taps):
        if not switch.unit:
            insert_tap(taps[switch], wired[switch], f"requant_tap_{index}")
    nodes = nodes_by_name(copy)
    for index, (unit, some) in enumerate(zip(parts, wires[len(switches) :], strict=True)):
        part = Part(
            [nodes[name] for name in unit.nodes],
            [(taps[switch], wired[switch]) for switch in taps if switch.unit == unit.name],
            arrays.get(unit.name, {}),
            wired.get(Switch(unit.name, "")),
            some,
        )
        insert_part(part, f"requant_unit_{index}")
    places = {unit.name: len(switches) + index for index, unit in enumerate(parts)}
    return _opened(copy, switches, places, plan, optimize=optimize, folder=folder)


def _without_lengths(model: ir.Model) -> ir.Model:
    """Return a copy that declares no lengths of its outputs.

    A file may declare the lengths that its exporter saw. The runtime reserves memory for the result of an If by them.
    """
    copy = model.clone()
    for output in copy.graph.outputs:
        output.shape = None if output.shape is None else ir.Shape([None] * len(output.shape))
    return copy


def tensor_switches(
    model: ir.Model,
    qparams: Mapping[str, Rounding],
    *,
    readers: Collection[str] | None = None,
    optimize: bool = True,
) -> Switchboard:
    """Open a session with one switch, ``Switch("", name)``, per given tensor, in the main graph or in a body.

    Args:
        model: A float model.
        qparams: How each tensor is rounded.
        readers: The names of the nodes that read the rounded tensors; None for all, without those of a given choice.
        optimize: As for `switchboard`.

    Raises:
        RequantError: The runtime cannot load it.
    """
    copy = _without_lengths(model)
    values = ir.convenience.create_value_mapping(copy.graph)
    taps = {}
    for name, params in qparams.items():
        value = values[name]
        own = [use for use in value.uses() if not str(use.node.name).startswith(PREFIX)]
        uses = [(use.node, use.idx) for use in own if readers is None or use.node.name in readers]
        taps[Switch("", name)] = Tap(value, uses, readers is None and is_computed_output(value), params)
    for index, (tap, wire) in enumerate(zip(taps.values(), wires_of(copy, len(taps)), strict=True)):
        insert_tap(tap, wire, f"requant_tap_{index}")
    return _opened(copy, list(taps), {}, Plan((), {}), optimize=optimize, folder=None)


def constant_switches(model: ir.Model, constants: Constants, *, optimize: bool = True) -> Switchboard:
    """Open a session with one switch, ``Switch(node, "")``, for the constants of each given node of the main graph.

    Args:
        model: A float model.
        constants: The other constants by the name of a node and the index of its input.
        optimize: As for `switchboard`.

    Raises:
        RequantError: The runtime cannot load it.
    """
    copy, count = _without_lengths(model), len(constants)
    nodes, wires = nodes_by_name(copy), wires_of(copy, 2 * count)
    for index, (name, arrays) in enumerate(constants.items()):
        part = Part([nodes[name]], (), arrays, wires[index], wires[count + index])
        insert_part(part, f"requant_unit_{index}")
    switches = [Switch(name, "") for name in constants]
    places = {name: count + index for index, name in enumerate(constants)}
    return _opened(copy, switches, places, Plan((), {}), optimize=optimize, folder=None)


def noises(
    board: Switchboard,
    trials: Iterable[Collection[Switch]],
    samples: Sequence[Sample],
    workers: int | None = None,
    *,
    probabilities: Collection[str] = (),
) -> Iterator[Powers]:
    """Yield the powers of the outputs and of their noise for each trial, a set of switches that are on.

    If the parts or the channels of an output differ in magnitude, for instance boxes joined with scores, the noise of
    each one counts relative to its own power (`balance`), if this gives more noise. Of an output of probabilities the
    worse one of its pairs of `output_powers` counts.

    Several trials run at a time; their number does not change the results.

    Args:
        board: The model.
        trials: The switches that are on, by trial.
        samples: The samples of each trial.
        workers: Number of concurrent trials; None for one per CPU.
        probabilities: The outputs whose values are probabilities, see `probability_outputs`.

    Raises:
        RequantError: The model fails on a sample.
    """

    def outputs(sample: Sample, on: Collection[Switch]) -> dict[str, Array]:
        try:
            return board.run(sample.feed, on)
        except RequantError as error:
            raise RequantError(f"{sample.where}: {error}") from error

    def trial(on: Collection[Switch]) -> Powers:
        total = {name: np.zeros((2 if name in probabilities else 1, 2)) for name in board.outputs}
        balanced = dict.fromkeys(board.outputs, 0.0)
        for sample, reference in zip(samples, references, strict=True):
            found = outputs(sample, on)
            for name, pairs in output_powers(reference, found, probabilities).items():
                weights = balances[name]
                total[name] += pairs
                balanced[name] += 0.0 if weights is None else weights.noise(reference[name], found[name])
        for name, more in balanced.items():  # not np.maximum: it would return NaN, the noise of what is not finite
            total[name][0, 1] = max(total[name][0, 1], more)
        return {name: worst_powers((float(a), float(b)) for a, b in sums) for name, sums in total.items()}

    def weights_of(name: str) -> Balance | None:
        least = FAINT**2 if name in probabilities else 0.0
        return balance([reference[name] for reference in references], least)

    pool = ThreadPoolExecutor(workers or cpus())
    try:
        references = list(pool.map(lambda sample: outputs(sample, ()), samples))
        balances = {name: weights_of(name) for name in board.outputs}
        yield from pool.map(trial, trials)
    finally:
        pool.shutdown(cancel_futures=True)


def _opened(
    copy: ir.Model,
    switches: Sequence[Switch],
    parts: Mapping[str, int],
    plan: Plan,
    *,
    optimize: bool,
    folder: Path | None,
) -> Switchboard:
    """Open the session of a model with its switches."""
    source = serialize(copy, folder)
    session = open_session(source, threads=1, optimize=optimize, lean=Weights.of(copy).lumpy)
    outputs = tuple(output.name for output in session.get_outputs() if output.type in FLOATS)
    places = {switch: index for index, switch in enumerate(switches)}
    return Switchboard(session, outputs, places, parts, plan, repr((model_stamp(source), switches)))
