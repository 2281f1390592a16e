"""Parts of this project that an ablation leaves out, one at a time.

    python -m benchmarks.parts MODEL...

Each model has a line with the steps of the group ``simplify`` that change it: without such a step the simplified model
is another one. `benchmarks.models` measures what a part gains: contenders ``without-PART`` and ``ablation``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import click
import onnx_ir as ir

from requant.quantize.options.declared import Strategy
from requant.quantize.placement.facts import Facts
from requant.quantize.placement.obstacles import OBSTACLES
from requant.quantize.placement.reasons import NO_FORM
from requant.quantize.placement.uint8_obstacles import Rule
from requant.transforms import parse_groups, run
from requant.transforms.int8.ops import ATTENTIONS
from requant.transforms.int8.plan import Impl, Unit
from requant.transforms.int8.reasons import Reason
from requant.transforms.pipelines.groups import GROUPS

GROUP = "simplify"
PRODUCTS, RECURRENT = frozenset({"MatMul", "Gemm"}), frozenset({"GRU", "LSTM"})
FORMS: Mapping[str, tuple[Impl, frozenset[str]]] = {
    "block": (Impl.BLOCK, PRODUCTS),
    "block-native": (Impl.BLOCK_NATIVE, PRODUCTS),
    "dynamic": (Impl.DYNAMIC, PRODUCTS),
    "gemm": (Impl.U8_GEMM, frozenset({"Conv"})),
    "native": (Impl.U8_NATIVE, frozenset()),
    "native-dynamic": (Impl.DYNAMIC_NATIVE, PRODUCTS),
    "native-attention": (Impl.DYNAMIC_NATIVE, ATTENTIONS),
    "native-recurrent": (Impl.DYNAMIC_NATIVE, RECURRENT),
    "recurrent": (Impl.DYNAMIC, RECURRENT),
}
"""The integer forms that units have only where they are measured to be faster, by the name of the part: the form, and
the operators of the units; empty for all."""
NEEDED = frozenset({"inline_functions", "remove_default_inputs", "fold_constants"})
STEPS: tuple[str, ...] = tuple(member.transform for member in GROUPS[GROUP] if member.transform not in NEEDED)
"""The steps of the group ``simplify``, without those that others need."""


def _without_form(impl: Impl, operators: frozenset[str]) -> None:
    rule = OBSTACLES[impl]

    def refused(unit: Unit, facts: Facts, strategy: Strategy) -> Reason:
        return NO_FORM if not operators or unit.op in operators else rule(unit, facts, strategy)

    cast("dict[Impl, Rule]", OBSTACLES)[impl] = refused


def _without_step(name: str) -> None:
    GROUPS[GROUP] = [member for member in GROUPS[GROUP] if member.transform != name]


PARTS: Mapping[str, Callable[[], None]] = {
    **{name: partial(_without_form, *form) for name, form in FORMS.items()},
    **{name: partial(_without_step, name) for name in STEPS},
}
"""Each removes a part from this process."""


def steps_of(model: Path) -> list[str]:
    """Return the steps of the group ``simplify`` without which the simplified model is another one."""
    kept = list(GROUPS[GROUP])
    whole, found = _simplified(model), []
    for name in STEPS:
        _without_step(name)
        if _simplified(model) != whole:
            found.append(name)
        GROUPS[GROUP] = list(kept)
    return found


def forms_of(units: Iterable[tuple[str, str]]) -> list[str]:
    """Return the parts that are forms of units.

    Args:
        units: The operator and the implementation of each unit of a plan.
    """
    known = set(units)
    return [
        name
        for name, (form, operators) in FORMS.items()
        if any(form == implementation and (not operators or op in operators) for op, implementation in known)
    ]


def _simplified(model: Path) -> str:
    """Return a digest of the simplified model."""
    made = run(parse_groups(GROUP), ir.load(model)).model
    made.metadata_props.clear()  # it names the steps
    return hashlib.sha256(ir.to_proto(made).SerializeToString(deterministic=True)).hexdigest()


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", type=click.Path(path_type=Path, exists=True))
def main(models: tuple[Path, ...]) -> None:
    """Print the steps of the group `simplify` that change each model."""
    for model in models:
        click.echo(f"{model.name}: {' '.join(steps_of(model))}")


if __name__ == "__main__":
    main()
