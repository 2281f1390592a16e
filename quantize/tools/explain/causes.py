"""Why a model is slow, in sentences with what each costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ...runtime.executed import Kernel
from ...runtime.match import CONVERSIONS, Match
from .float_twins import Rival
from .why_float import Reason

LEAST_SHARE = 0.005  # of the time; what costs less is not told
SLOWER = 1.15  # times the float kernel's time from which an integer kernel is called slow: less is noise
TICK = 1.0  # microseconds, in which the profile counts
SAVED = {True: 3 / 4, False: 1 / 2}
"""The share of a float product's time that integers save at best, by whether products are exact: four times the
multiply-accumulates per instruction where one instruction sums four products, else twice."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why a model takes the time it takes.

    Attributes:
        text: A sentence.
        microseconds: An estimate of what it costs in one run.
        nodes: Executed nodes that it is about.
    """

    text: str
    microseconds: float
    nodes: tuple[str, ...]


def causes(
    kernels: Sequence[Kernel],
    match: Match,
    reasons: Mapping[str, tuple[Reason, ...]],
    twins: Mapping[str, Rival],
    *,
    exact: bool,
) -> tuple[Cause, ...]:
    """Return why a model is slow, the dearest first.

    Args:
        kernels: What ran.
        match: Which kernel does the work of which node.
        reasons: By node of the model why it ran in float.
        twins: By executed node the float kernel that would do its work.
        exact: Whether the machine adds integer products exactly (`requant.quantize.runtime.isa`).
    """
    total = sum(kernel.run.microseconds for kernel in kernels)
    found = [
        *_conversions(kernels, match, total),
        *_layouts(kernels, total),
        *_float_products(kernels, reasons, total, exact=exact),
        *_slow_integers(kernels, twins, total),
        *_alone(kernels, total),
    ]
    return tuple(sorted((c for c in found if c.microseconds >= LEAST_SHARE * total), key=lambda c: -c.microseconds))


def _cause(text: str, group: Iterable[Kernel], total: float, microseconds: float | None = None) -> Cause:
    """Make a sentence of a text with ``{share}`` in it."""
    group = list(group)
    spent = sum(kernel.run.microseconds for kernel in group) if microseconds is None else microseconds
    return Cause(text.format(share=_percent(spent, total)), spent, tuple(kernel.run.node for kernel in group))


def _percent(part: float, total: float) -> str:
    share = part / total if total else 0.0
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _conversions(kernels: Sequence[Kernel], match: Match, total: float) -> Iterator[Cause]:
    """Group QuantizeLinear and DequantizeLinear by the float operator that they stand around."""
    by_place = {kernel.run.node: kernel for kernel in kernels}
    groups: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.kind == "conversion" and kernel.place is not None:
            groups[_beside(kernel, kernel.place, by_place, match)].append(kernel)
    for place, group in groups.items():
        counts = Counter(kernel.run.op for kernel in group)
        listed = " and ".join(f"{count} {op}" for op, count in sorted(counts.items()))
        where = place if " " in place else f"{WHERE.get(''.join(counts), 'around')} {place}"
        yield _cause(f"{listed} {where} {'costs' if len(group) == 1 else 'cost'} {{share}} of the time", group, total)


WHERE = {"DequantizeLinear": "before", "QuantizeLinear": "after"}


def _beside(kernel: Kernel, place: ir.Node, by_place: Mapping[str, Kernel], match: Match) -> str:
    """Return the float operator beside a conversion, or say in words where it stands."""
    data = place.inputs[0]
    if kernel.run.op == "DynamicQuantizeLinear":
        return "that find ranges in every run"
    if kernel.run.op == "DequantizeLinear":
        if data is not None and (data.is_initializer() or data.name in match.constants):
            return "of constants in every run"
        users = [by_place.get(use.node.name or "") for value in place.outputs for use in value.uses()]
        user = _past_layout(next((user for user in users if user is not None), None), by_place, forwards=True)
        return "at the model's outputs" if user is None else _called(user)
    producer = data.producer() if data is not None else None
    before = _past_layout(by_place.get(producer.name or "") if producer is not None else None, by_place, forwards=False)
    return "at the model's inputs" if before is None else _called(before)


def _called(kernel: Kernel) -> str:
    """Return the operator of the model or, where that is part of a fused one, of the kernel."""
    fused = kernel.kind == "rest" and any(op not in CONVERSIONS for op in kernel.absorbs)
    return kernel.run.op if fused else kernel.op


def _past_layout(kernel: Kernel | None, by_place: Mapping[str, Kernel], *, forwards: bool) -> Kernel | None:
    """Look past layout changes and other conversions for the operator that a conversion serves."""
    for _ in range(len(by_place)):
        if kernel is None or kernel.kind != "layout" or kernel.place is None:
            return kernel
        if forwards:
            nodes: list[ir.Node | None] = [use.node for value in kernel.place.outputs for use in value.uses()]
        else:
            nodes = [v.producer() for v in kernel.place.inputs[:1] if v is not None]
        kernel = next((by_place[n.name or ""] for n in nodes if n is not None and n.name in by_place), None)
    return kernel


def _layouts(kernels: Sequence[Kernel], total: float) -> Iterator[Cause]:
    group = [kernel for kernel in kernels if kernel.kind == "layout"]
    if group:
        counts = ", ".join(f"{n} {op}" for op, n in Counter(k.run.op for k in group).most_common())
        plural = "s" if len(group) > 1 else ""
        text = f"{len(group)} layout change{plural} that the runtime inserted ({counts}) cost {{share}} of the time"
        yield _cause(text if plural else text.replace(" cost ", " costs "), group, total)


def _float_products(
    kernels: Sequence[Kernel], reasons: Mapping[str, tuple[Reason, ...]], total: float, *, exact: bool
) -> Iterator[Cause]:
    """Group the products in float by operator and by what keeps them there."""
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.node is not None and kernel.node in reasons:
            groups[kernel.op, reasons[kernel.node][0].kind].append(kernel)
    for (op, kind), group in groups.items():
        spent = sum(kernel.run.microseconds for kernel in group)
        verb = "takes" if len(group) == 1 else "take"
        text = (
            f"{len(group)} {op} in float {verb} {_percent(spent, total)} of the time, "
            f"of which integers could save up to {{share}}: {_braced(kind)}"
        )
        yield _cause(text, group, total, SAVED[exact] * spent)


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _slow_integers(kernels: Sequence[Kernel], twins: Mapping[str, Rival], total: float) -> Iterator[Cause]:
    """Group the kernels of 8-bit tensors that are slower than those of floats."""
    by_name = {kernel.run.node: kernel for kernel in kernels}
    groups: dict[str, list[tuple[Kernel, ...]]] = defaultdict(list)
    for name, rival in twins.items():
        group = tuple(by_name[part] for part in (name, rival.partner) if part in by_name)
        spent = sum(kernel.run.microseconds for kernel in group)
        if spent > max(SLOWER * rival.microseconds, rival.microseconds + TICK * len(group)):
            groups[rival.what].append(group)
    for what, found in groups.items():
        spent = sum(kernel.run.microseconds for group in found for kernel in group)
        alone = sum(twins[group[0].run.node].microseconds for group in found)
        verb = "takes" if len(found) == 1 else "take"
        text = f"{len(found)} {what} {verb} {spent / max(alone, 1):.1f}x the time of the float kernel"
        parts = (kernel for group in found for kernel in group)
        yield _cause(f"{text}: {{share}} of the whole is lost", parts, total, spent - alone)


ALONE = {
    "Erf": "{count} GELU {verb} operator by operator: Erf alone takes {{share}} of the time",
    "BatchNormalization": "{count} BatchNormalization {verb} alone, folded into no convolution: {{share}} of the time",
}
"""By operator that the runtime fuses with others where nothing stands between, what it means to see it run."""


def _alone(kernels: Sequence[Kernel], total: float) -> Iterator[Cause]:
    """Tell of operators that ought to have vanished into others."""
    for op, text in ALONE.items():
        group = [kernel for kernel in kernels if kernel.run.op == op]
        if group:
            verb = "runs" if len(group) == 1 else "run"
            yield _cause(text.format(count=len(group), verb=verb), group, total)
