"""`explain_model`: the kernels that a model runs on this machine, their times, and why the model is not faster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx_ir as ir

from .... import RequantError
from ....calibration.data.samples import Sample
from ....calibration.data.sources import DataSource
from ....calibration.model.session import ModelSource
from ...model.files import load_model, serialize
from ...runtime.described import described
from ...runtime.executed import Kernel
from ...runtime.inputs import open_data
from ...runtime.isa import Isa, probe
from ...runtime.machine import flags
from ...runtime.match import PRODUCTS, Match
from ...runtime.profile import integer_share
from ...runtime.progress import Progress, silent
from ...runtime.random_inputs import generated_source, refusal, runs_on_none
from ...runtime.runtimes import PLAIN, STOCK, Identity, Setting
from .causes import Cause, called, causes
from .float_reference import FloatReference, float_references
from .why_float import Obstacle, parameters, why_float, why_rest

TIMES = 10  # runs under the profiler; the time of a kernel is its minimum
EXACT = 2 * 255 * 127


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node of the model.

    Attributes:
        name: Its name.
        op: Its operator.
        role: ``run`` by its own kernel; ``absorbed`` by the kernel of another node; ``folded`` into a constant at load
            time; ``gone`` if nothing was left to compute.
        kernel: The kernel that computes it, as ``domain.Operator``; empty if there is none.
        executed: The node of this kernel in the optimized graph.
        into: The node whose kernel absorbed it; empty for other roles.
        layout: The layout of the kernel, as in `Kernel`.
        precision: The precision of the kernel, as in `Kernel`.
        microseconds: The time of its own kernels, all parts included; 0 if it has none.
        share: This time over the time of all kernels, 0..1.
        macs: Multiply-accumulates of its kernels.
        integer: Whether its kernels multiply integers.
        reasons: Why a product ran in float, the most important first.
    """

    name: str
    op: str
    role: str
    kernel: str
    executed: str
    into: str
    layout: str
    precision: str
    microseconds: float
    share: float
    macs: int
    integer: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Where the time of one run goes, in microseconds.

    Attributes:
        run: A whole run under the profiler.
        kernels: All kernels; the rest of `run` is mostly the profiler.
        compute: Kernels that multiply and accumulate.
        conversions: QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear.
        layout: Layout changes that the runtime inserted.
        rest: Other kernels.
    """

    run: float
    kernels: float
    compute: float
    conversions: float
    layout: float
    rest: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The kernels that a model runs, and why it is not faster.

    Attributes:
        model: The model's file.
        data: A text for the inputs of the run.
        threads: Threads inside one operator; 0 is the runtime's choice.
        runtime: The runtime with its version.
        nodes: The model's nodes, in the model's order.
        kernels: The executed kernels, in order of execution.
        totals: The time of a run in parts.
        mac_share_int8: Share of the multiply-accumulates in integer kernels, 0..1.
        flags: The CPU's features for integer products.
        probe: The runtime's ``255 * 127 + 255 * 127``; 64770 if products are added exactly.
        causes: The causes of lost time, the most expensive first.
    """

    model: str
    data: str
    threads: int
    runtime: Identity
    nodes: tuple[NodeFacts, ...]
    kernels: tuple[Kernel, ...]
    totals: Totals
    mac_share_int8: float
    flags: tuple[str, ...]
    probe: int
    causes: tuple[Cause, ...]

    @property
    def exact(self) -> bool:
        """Whether the runtime adds integer products exactly."""
        return self.probe == EXACT

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        total = self.totals.kernels
        inserted = [kernel for kernel in self.kernels if kernel.node is None]
        return {
            "model": self.model,
            "data": self.data,
            "threads": self.threads,
            "runtime": str(self.runtime),
            "nodes": [asdict(node) for node in self.nodes],
            "inserted": [
                {
                    "executed": kernel.run.node,
                    "kernel": kernel.spelled,
                    "kind": kernel.kind,
                    "layout": kernel.layout,
                    "precision": kernel.precision,
                    "microseconds": kernel.run.microseconds,
                    "share": _share(kernel.run.microseconds, total),
                }
                for kernel in inserted
            ],
            "totals": asdict(self.totals),
            "mac_share_int8": self.mac_share_int8,
            "isa": {"name": str(Isa.VNNI if self.exact else Isa.AVX2), "flags": list(self.flags)},
            "probe": {"sum": self.probe, "exact": self.exact},
            "findings": [
                {"text": c.text, "microseconds": c.microseconds, "share": _share(c.microseconds, total)}
                for c in self.causes
            ],
        }


def explain_model(
    model: str | os.PathLike[str],
    data: DataSource | None = None,
    *,
    setting: Setting = PLAIN,
    whole: bool = True,
    progress: Progress = silent,
) -> Explanation:
    """Run a model, float or quantized by any tool, and return its kernels with their times.

    Args:
        model: Path of the model.
        data: A data source, whose first sample is run; None for random inputs.
        setting: The runtime, and its threads.
        whole: Whether to time float kernels too, for comparison with the integer kernels; only in ONNX Runtime.
        progress: Called with a stage, how much of it is done, and how much there is (None: unknown).

    Raises:
        RequantError: The runtime is not installed; the model cannot be loaded or run, the data do not fit, or the model
            runs on no random inputs.
    """
    runtime = setting.opened()
    loaded = load_model(model)
    source = replace(serialize(loaded), name=os.fspath(model))
    progress("profile", 0, None)
    inputs, sample = _sample(loaded, source, data, os.fspath(model))
    try:
        profile = runtime.profile(source, sample.feed, threads=setting.threads, times=TIMES)
    except RequantError as error:
        raise RequantError(f"{error}{_hint(loaded)}") from error
    nodes = {node.name: node for node in loaded.graph.all_nodes() if node.name}
    ran, matched = described(loaded, profile)
    reasons = _reasons(loaded, nodes, ran, ends=runtime is STOCK)
    references: Mapping[str, FloatReference] = {}
    if whole and runtime is STOCK:
        progress("compare with float kernels", 0, None)
        references = float_references(ran, threads=setting.threads)
    total = probe()
    return Explanation(
        model=os.fspath(model),
        data=inputs,
        threads=setting.threads,
        runtime=runtime.identity,
        nodes=_facts(nodes, ran, matched, reasons),
        kernels=ran,
        totals=_totals(ran, profile.microseconds),
        mac_share_int8=integer_share(profile.runs),
        flags=flags(),
        probe=total,
        causes=causes(
            ran,
            matched,
            reasons,
            references,
            rest=_rest_reasons(ran, nodes) if runtime is STOCK else {},
            exact=total == EXACT,
        ),
    )


def _sample(model: ir.Model, source: ModelSource, data: DataSource | None, name: str) -> tuple[str, Sample]:
    """Return the inputs of the run, with their description.

    Raises:
        RequantError: The data do not fit, or the model runs on no random inputs.
    """
    opened = generated_source(source) if data is None else open_data(source, data)
    if opened is None:
        raise RequantError(f"{name}: {runs_on_none(refusal(source), _hint(model) or '; give data')}")
    return opened.description, next(iter(opened))


def _hint(model: ir.Model) -> str:
    """Return a hint about an activation with one scale per channel: the runtime may choose a kernel that fails."""
    for node in model.graph.all_nodes():
        data = node.inputs[0] if node.inputs else None
        if node.op_type != "DequantizeLinear" or data is None or data.producer() is None:
            continue
        scale, _ = parameters(node)
        quantize = data.producer()
        if scale is not None and scale.size > 1 and quantize is not None and quantize.op_type == "QuantizeLinear":
            held = quantize.inputs[0]
            if held is not None and not held.is_initializer():
                return f"; activation {held.name!r} has {scale.size} scales, but integer kernels take one"
    return ""


def _reasons(
    model: ir.Model, nodes: Mapping[str, ir.Node], ran: Sequence[Kernel], *, ends: bool
) -> dict[str, tuple[Obstacle, ...]]:
    """Return why products ran in float, by node; arguments as of `why_float`."""
    return {
        kernel.node: why_float(model, nodes[kernel.node], ends=ends)
        for kernel in ran
        if kernel.kind == "compute" and not kernel.integer and kernel.node is not None and kernel.op in PRODUCTS
    }


def _rest_reasons(ran: Sequence[Kernel], nodes: Mapping[str, ir.Node]) -> dict[str, str]:
    """Return why kernels that are no products ran as they did, by executed node."""
    return {
        kernel.run.node: why_rest(kernel, called(kernel), nodes.get(kernel.node or ""))
        for kernel in ran
        if kernel.kind == "rest"
    }


def _share(part: float, total: float) -> float:
    return part / total if total else 0.0


def _totals(ran: Sequence[Kernel], run: float) -> Totals:
    """Add up the kernels by kind."""
    spent = dict.fromkeys(("compute", "conversion", "layout", "rest"), 0.0)
    for kernel in ran:
        spent[kernel.kind] += kernel.run.microseconds
    return Totals(run, sum(spent.values()), *spent.values())


def _facts(
    nodes: Mapping[str, ir.Node], ran: Sequence[Kernel], matched: Match, reasons: Mapping[str, tuple[Obstacle, ...]]
) -> tuple[NodeFacts, ...]:
    """Describe every node of the model."""
    by_node = {kernel.run.node: kernel for kernel in ran}
    own: dict[str, list[Kernel]] = {}
    for part in ran:
        if part.node is not None:
            own.setdefault(part.node, []).append(part)
    total = sum(kernel.run.microseconds for kernel in ran)
    found = []
    for name, node in nodes.items():
        home = matched.kernels.get(name)
        kernel = by_node.get(home or "")
        mine = own.get(name, [])
        role = "run" if mine else "absorbed" if kernel else "folded" if name in matched.folded else "gone"
        spent = sum(part.run.microseconds for part in mine)
        found.append(
            NodeFacts(
                name=name,
                op=node.op_type,
                role=role,
                kernel=kernel.spelled if kernel is not None else "",
                executed=home or "",
                into=(kernel.node or "") if kernel is not None and role == "absorbed" else "",
                layout=kernel.layout if kernel is not None else "",
                precision=kernel.precision if kernel is not None else "",
                microseconds=spent,
                share=_share(spent, total),
                macs=sum(part.run.macs for part in mine),
                integer=any(part.integer for part in mine),
                reasons=tuple(reason.text for reason in reasons.get(name, ())),
            )
        )
    return tuple(found)
