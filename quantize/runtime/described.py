"""Describe what ran, in a runtime that shows its graph and in one that names the nodes of each kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from .attribution import LAYOUTS
from .executed import SHORT, Kernel, Kind, kernels
from .match import PRODUCTS, QUANTIZERS, Match, constants_of, match, members_of
from .profile import GraphProfile, KernelRun, Profile


def described(model: ir.Model, profile: Profile) -> tuple[tuple[Kernel, ...], Match]:
    """Return the kernels of a profile in order of execution, and which of them computes which node.

    Args:
        model: The model that was profiled; its nodes have names.
        profile: What ran.
    """
    nodes = {node.name: node for node in model.graph.all_nodes() if node.name}
    if isinstance(profile, GraphProfile):
        matched = match(model, profile.graph, [run.node for run in profile.runs])
        return kernels(profile.runs, profile.graph, nodes, matched), matched
    matched = _match_members(model, nodes, profile.runs)
    members = members_of(matched.kernels)
    return tuple(_kernel(run, nodes, matched, members.get(run.node, ())) for run in profile.runs), matched


def _match_members(model: ir.Model, nodes: Mapping[str, ir.Node], runs: Sequence[KernelRun]) -> Match:
    """Match nodes to the kernels that name them as members.

    A node that no kernel names belongs to the kernel of its reader if it is a product or a DequantizeLinear, else to
    the kernel whose result it reads.

    Args:
        model: The model.
        nodes: Its nodes by name.
        runs: The executed kernels in order of execution.
    """
    home: dict[str, str] = {}
    for run in runs:
        home.update({name: run.node for name in run.members if name in nodes and name not in home})
    constants = constants_of(model)
    unnamed = [name for name in nodes if name not in home]
    folded = {name for name in unnamed if constants.issuperset(value.name for value in nodes[name].outputs)}
    for name in (*reversed(unnamed), *unnamed):  # back from readers, then on from what the first pass found
        if name not in folded and name not in home and (found := _neighbour(nodes[name], home)) is not None:
            home[name] = found
    whole = {name: home.get(name) for name in nodes}
    principals = {kernel: _principal(names, nodes) for kernel, names in members_of(whole).items()}
    parts = {run.node: part for run in runs if run.node not in principals and (part := _part(run, nodes))}
    return Match(whole, frozenset(folded), principals, parts, constants)


def _neighbour(node: ir.Node, home: Mapping[str, str]) -> str | None:
    """Return the kernel of a reader of a product or DequantizeLinear; of others, the kernel whose result they read."""
    readers = [use.node.name for value in node.outputs for use in value.uses()]
    makers = [maker.name for value in node.inputs if value is not None and (maker := value.producer()) is not None]
    forwards = node.op_type == "DequantizeLinear" or node.op_type in PRODUCTS
    order = readers + makers if forwards else makers + readers
    return next((home[name] for name in order if name is not None and name in home), None)


def _principal(names: Sequence[str], nodes: Mapping[str, ir.Node]) -> str:
    """Return the node under which a kernel is reported: a product, else the last one that converts nothing."""
    ops = {name: nodes[name].op_type for name in names}
    return max(reversed(names), key=lambda name: (ops[name] in PRODUCTS, ops[name] not in QUANTIZERS))


def _part(run: KernelRun, nodes: Mapping[str, ir.Node]) -> str | None:
    """Return the node of which a kernel is one of several; None for a layout change."""
    return next((name for name in run.members if name in nodes and run.op not in LAYOUTS), None)


def _kernel(run: KernelRun, nodes: Mapping[str, ir.Node], match: Match, members: Sequence[str]) -> Kernel:
    """Describe one kernel with the nodes that it computes. Its place is the node under which it is reported."""
    name = match.principals.get(run.node) or match.parts.get(run.node)
    place = nodes.get(name or "")
    fused = [nodes[each].op_type for each in members if each != name]
    kind = _kind(run, place)
    op = place.op_type if place is not None else run.op
    return Kernel(run, kind, name, op, tuple(fused), "", _precision(run, kind), place)


def _kind(run: KernelRun, place: ir.Node | None) -> Kind:
    if run.macs or (place is not None and place.op_type in PRODUCTS):
        return "compute"
    if run.op in LAYOUTS and (place is None or place.op_type != "Transpose"):
        return "layout"
    converts = run.op in QUANTIZERS if place is None else place.op_type in QUANTIZERS
    return "conversion" if converts else "rest"


def _precision(run: KernelRun, kind: Kind) -> str:
    """Return the element types that a kernel reads and writes, as text."""
    reads = [SHORT.get(each, each) for each in run.reads[: 2 if kind == "compute" else 1]]
    writes = [SHORT.get(each, each) for each in run.writes[:1]]
    if {*reads, *writes} == {"f32"}:
        return "float32"
    before, after = "·".join(reads), "".join(writes)
    return before if before == after else f"{before}→{after}"
