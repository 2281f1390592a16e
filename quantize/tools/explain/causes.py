"""The causes of lost time in a model, as sentences with their costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from .... import NATIVE_DOMAIN
from ....transforms.graphs.queries import producer_of
from ...runtime.executed import Kernel
from ...runtime.match import QUANTIZERS, Match
from .float_reference import FloatReference
from .why_float import Obstacle

LEAST_SHARE = 0.005  # ignore causes below 0.5 % of the time
SLOWER = 1.15  # integer kernels below this multiple of the float kernel's time are not slow: less is noise
LEAST_REST = 0.02  # operators that are no products are not named below 2 % of the time
TICK = 1.0  # microseconds: the resolution of the profile
SAVED = {True: 3 / 4, False: 1 / 2}
"""The largest share of a float product's time that integers can save. If integer products are added exactly (True), one
instruction adds four products, otherwise two."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of lost time.

    Attributes:
        text: A sentence.
        microseconds: An estimate of its cost in one run.
        nodes: The executed nodes concerned.
    """

    text: str
    microseconds: float
    nodes: tuple[str, ...]


def causes(
    kernels: Sequence[Kernel],
    match: Match,
    reasons: Mapping[str, tuple[Obstacle, ...]],
    references: Mapping[str, FloatReference],
    *,
    rest: Mapping[str, str],
    exact: bool,
) -> tuple[Cause, ...]:
    """Return the causes of lost time, the most expensive first.

    Args:
        kernels: The executed kernels.
        match: Which kernel computes which node.
        reasons: Why nodes of the model ran in float, by node.
        references: The float kernel for the work of an executed node, by node.
        rest: Why operators that are no products ran as they did, by executed node.
        exact: Whether the machine adds integer products exactly (`requant.quantize.runtime.isa`).
    """
    total = sum(kernel.run.microseconds for kernel in kernels)
    slow = tuple(_slow_integers(kernels, references, total))
    told = {node for cause in slow for node in cause.nodes if cause.microseconds >= LEAST_SHARE * total}
    found = [
        *_conversions(kernels, match, total),
        *_layouts(kernels, total),
        *_float_products(kernels, reasons, total, exact=exact),
        *_rest([kernel for kernel in kernels if kernel.run.node not in told], rest, total),
        *slow,
        *_unfused(kernels, total),
    ]
    return tuple(sorted((c for c in found if c.microseconds >= LEAST_SHARE * total), key=lambda c: -c.microseconds))


def _cause(text: str, group: Iterable[Kernel], total: float, microseconds: float | None = None) -> Cause:
    """Return a cause with its share of the time in place of ``{share}``."""
    group = list(group)
    spent = sum(kernel.run.microseconds for kernel in group) if microseconds is None else microseconds
    return Cause(text.format(share=_percent(spent, total)), spent, tuple(kernel.run.node for kernel in group))


def _percent(part: float, total: float) -> str:
    share = part / total if total else 0.0
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _conversions(kernels: Sequence[Kernel], match: Match, total: float) -> Iterator[Cause]:
    """Group QuantizeLinear and DequantizeLinear by the float operator beside them."""
    by_place = {kernel.run.node: kernel for kernel in kernels}
    homes = [(name, home) for name, home in match.kernels.items() if home is not None and name not in by_place]
    by_place |= {name: by_place[home] for name, home in homes if home in by_place}
    groups: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.kind == "conversion" and kernel.place is not None:
            groups[_beside(kernel.place, by_place, match)].append(kernel)
    for place, group in groups.items():
        counts = Counter(kernel.run.op for kernel in group)
        listed = " and ".join(f"{count} {op}" for op, count in sorted(counts.items()))
        where = place if " " in place else f"{WHERE.get(''.join(counts), 'around')} {place}"
        yield _cause(f"{listed} {where} {'costs' if len(group) == 1 else 'cost'} {{share}} of the time", group, total)


WHERE = {"DequantizeLinear": "before", "QuantizeLinear": "after"}


def _beside(place: ir.Node, by_place: Mapping[str, Kernel], match: Match) -> str:
    """Return the float operator beside a conversion, or a text for its position."""
    data = place.inputs[0]
    if place.op_type == "DynamicQuantizeLinear":
        return "to find ranges in every run"
    if place.op_type == "DequantizeLinear":
        if data is not None and (data.is_initializer() or data.name in match.constants):
            return "of constants in every run"
        users = [by_place.get(use.node.name or "") for value in place.outputs for use in value.uses()]
        user = _past_layout(next((user for user in users if user is not None), None), by_place, forwards=True)
        return "at the model's outputs" if user is None else called(user)
    producer = producer_of(data)
    before = _past_layout(by_place.get(producer.name or "") if producer is not None else None, by_place, forwards=False)
    return "at the model's inputs" if before is None else called(before)


def called(kernel: Kernel) -> str:
    """Return the operator of the model's node, or of the kernel if it fuses several nodes."""
    fused = kernel.kind == "rest" and any(op not in QUANTIZERS for op in kernel.absorbs)
    return kernel.run.op if fused else kernel.op


def _past_layout(kernel: Kernel | None, by_place: Mapping[str, Kernel], *, forwards: bool) -> Kernel | None:
    """Follow layout changes to the operator beside a conversion."""
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
    kernels: Sequence[Kernel], reasons: Mapping[str, tuple[Obstacle, ...]], total: float, *, exact: bool
) -> Iterator[Cause]:
    """Group the products in float by operator and by reason."""
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.node is not None and kernel.node in reasons:
            groups[kernel.op, reasons[kernel.node][0].kind].append(kernel)
    for (op, kind), group in groups.items():
        spent = sum(kernel.run.microseconds for kernel in group)
        verb = "takes" if len(group) == 1 else "take"
        text = (
            f"{len(group)} {op} in float {verb} {_percent(spent, total)} of the time, "
            f"integers could save up to {{share}}: {_braced(kind)}"
        )
        yield _cause(text, group, total, SAVED[exact] * spent)


def _rest(kernels: Sequence[Kernel], rest: Mapping[str, str], total: float) -> Iterator[Cause]:
    """Group the operators that are no products by operator and by reason, if they take `LEAST_REST` of the time."""
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.run.node in rest and kernel.run.op not in UNFUSED:
            groups[_named(kernel), rest[kernel.run.node]].append(kernel)
    for (name, why), group in groups.items():
        if sum(kernel.run.microseconds for kernel in group) >= LEAST_REST * total:
            verb = "takes" if len(group) == 1 else "take"
            yield _cause(f"{len(group)} {name} {verb} {{share}} of the time: {_braced(why)}", group, total)


def _named(kernel: Kernel) -> str:
    """Return the operator and its precision: ``Softmax in float``, ``Transpose on u8``, ``ai.requant.Mul on u8``."""
    in_float = kernel.precision == "float32"
    name = called(kernel) if in_float and kernel.run.domain != NATIVE_DOMAIN else kernel.spelled
    place = "in float" if in_float else f"on {kernel.precision or 'other types'}"
    return f"{name.removeprefix('com.microsoft.')} {place}"


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _slow_integers(
    kernels: Sequence[Kernel], references: Mapping[str, FloatReference], total: float
) -> Iterator[Cause]:
    """Group the kernels on 8-bit tensors that are slower than float kernels."""
    by_name = {kernel.run.node: kernel for kernel in kernels}
    groups: dict[str, list[tuple[Kernel, ...]]] = defaultdict(list)
    for name, reference in references.items():
        group = tuple(by_name[part] for part in (name, reference.partner) if part in by_name)
        spent = sum(kernel.run.microseconds for kernel in group)
        if spent > max(SLOWER * reference.microseconds, reference.microseconds + TICK * len(group)):
            groups[reference.what].append(group)
    for what, found in groups.items():
        spent = sum(kernel.run.microseconds for group in found for kernel in group)
        in_float = sum(references[group[0].run.node].microseconds for group in found)
        verb = "takes" if len(found) == 1 else "take"
        text = f"{len(found)} {what} {verb} {spent / max(in_float, 1):.1f}x the time of the float kernel"
        parts = (kernel for group in found for kernel in group)
        yield _cause(f"{text}: this costs {{share}} of the time", parts, total, spent - in_float)


UNFUSED = {
    "Erf": "{count} GELU {verb} as single operators: Erf takes {{share}} of the time",
    "BatchNormalization": "{count} BatchNormalization {verb}, not folded into a convolution: {{share}} of the time",
}
"""The meaning of operators that the runtime fuses with others, unless a QDQ pair separates them."""


def _unfused(kernels: Sequence[Kernel], total: float) -> Iterator[Cause]:
    """Report operators that should have been fused."""
    for op, text in UNFUSED.items():
        group = [kernel for kernel in kernels if kernel.run.op == op]
        if group:
            verb = "runs" if len(group) == 1 else "run"
            yield _cause(text.format(count=len(group), verb=verb), group, total)
