"""Assign executed kernels to the units of a model, by their names."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from ...transforms.graphs.queries import QDQ
from ...transforms.int8.ops import OPS
from ...transforms.int8.plan import Unit
from .profile import KernelRun

COUNTED = re.compile(r"^fused |_token_\d+$")
"""Prefixes and suffixes that the runtime adds to names of nodes."""
WORDS = (
    "quantize dequantize quantized lookup blocks packed apart cast int8 scale dynamicquantizematmul split scan "
    "spelled".split()
)
MADE = re.compile(rf"(/({'|'.join(WORDS)})|/\w+Fusion/?|(_bn)?_nchwc|_nhwc|_q|_dq)(_\d+)?$")
"""Suffixes that the emitters and the runtime add to the name of a tensor or a node."""
WITH_FUNCTION = frozenset({"Conv", "FusedConv", "NhwcFusedConv", "FusedGemm"})
"""Executed products that may include the operator behind them, and have its name."""
BATCH_NORM = re.compile(r"_bn_nchwc(_\d+)?$")
"""The end of the name of a Conv that is a BatchNormalization in the blocked layout, and includes no other operator."""
LAYOUTS = frozenset({"Transpose", "ReorderInput", "ReorderOutput"})


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the time of a run went, in microseconds.

    Attributes:
        units: Kernel time of each unit that had a kernel of its own.
        conversions: Time of QuantizeLinear and DequantizeLinear.
        layouts: Time of layout changes that the runtime added.
        rest: Time of kernels that belong to no unit.
        sizes: Elements of the first output of each unit that had a kernel.
        turned: Time of layout changes, by operator and shape of the result.
    """

    units: Mapping[str, float]
    conversions: float
    layouts: float
    rest: float
    sizes: Mapping[str, int] = field(default_factory=dict)
    turned: Mapping[tuple[str, tuple[int, ...]], float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return math.fsum((*self.units.values(), self.conversions, self.layouts, self.rest))


class Owners:
    """The units of a model, by the names of their nodes and of the outputs of these nodes."""

    def __init__(self, model: ir.Model, units: Iterable[Unit], leads: Mapping[str, str] | None = None) -> None:
        """Collect the names.

        Args:
            model: The simplified model.
            units: Its units.
            leads: Another unit for each unit whose kernel times count with that other one.
        """
        self.leads = leads or {}
        found = list(units)
        self.by_node = {name: unit.name for unit in found for name in unit.nodes}
        self.products = {unit.name for unit in found if unit.op in OPS and OPS[unit.op].kind == "compute"}
        made = ((value, node) for graph in model.graphs() for node in graph for value in node.outputs)
        self.by_tensor = {
            str(value.name): self.by_node[str(node.name)] for value, node in made if node.name in self.by_node
        }
        writers = {tensor: place for place, unit in enumerate(found) for tensor in unit.outputs}
        self.before: dict[str, str] = {}  # by unit without a product, the last product that it reads
        for unit in found:
            places = [writers[tensor] for tensor in unit.inputs if tensor in writers]
            products = [place for place in places if found[place].name in self.products]
            if products and unit.name not in self.products:
                self.before[unit.name] = found[max(products)].name

    def of(self, name: str) -> str | None:
        """Return the unit of a node of the executed graph, or None."""
        name = COUNTED.sub("", name)
        while True:
            owner = self.by_node.get(name) or self.by_tensor.get(name)
            shorter = MADE.sub("", name)
            if owner is not None or shorter == name:
                return owner
            name = shorter

    def owner(self, run: KernelRun) -> str | None:
        """Return the unit of an executed kernel, or None.

        If the kernel computes several units, it belongs to the first one with a product, else to the last one. The
        runtime may name a product after the function or sum that it includes: it belongs to the unit before that one.
        If it computes only conversions, it belongs to the unit whose tensor they convert. The time of a unit in `leads`
        belongs to the other unit there.
        """
        members = run.members or (run.node,)
        nodes = [name for name in members if COUNTED.sub("", name) in self.by_node]
        found = [owner for owner in map(self.of, nodes or members) if owner is not None]
        owner = next((owner for owner in found if owner in self.products), found[-1] if found else None)
        if owner is None:
            return None
        if run.op in WITH_FUNCTION and not BATCH_NORM.search(run.node):
            owner = self.before.get(owner, owner)
        return self.leads.get(owner, owner)

    def knows(self, run: KernelRun) -> bool:
        """Return whether an executed kernel is a node of the model, and not one that emitter or runtime inserted."""
        return any(COUNTED.sub("", name) in self.by_node for name in (run.node, *run.members))

    def spent(self, runs: Iterable[KernelRun]) -> Spent:
        """Sum the kernel times. A unit that a kernel of another one computes, as far as the runtime tells, takes 0."""
        units: dict[str, float] = defaultdict(float)
        sizes: dict[str, int] = {}
        turned: dict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
        conversions, layouts, rest = [0.0], [0.0], [0.0]
        for run in runs:
            known = self.knows(run)
            if run.op in QDQ and not known:
                conversions.append(run.microseconds)
            elif run.op in LAYOUTS and not known:
                layouts.append(run.microseconds)
                turned[run.op, run.outputs[0] if run.outputs else ()] += run.microseconds
            elif (owner := self.owner(run)) is not None:
                units[owner] += run.microseconds
                for member in filter(None, map(self.of, run.members)):
                    units[member] += 0.0
                if run.outputs:
                    sizes[owner] = math.prod(run.outputs[0])
            else:
                rest.append(run.microseconds)
        return Spent(dict(units), math.fsum(conversions), math.fsum(layouts), math.fsum(rest), sizes, dict(turned))
