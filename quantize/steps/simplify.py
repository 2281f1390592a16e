"""Simplify the float model before any decision. Its outputs stay the same."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ...transforms import Pipeline, PipelineResult, parse_groups, run
from ..runtime.progress import Progress

INLINE = "inline_functions(ignore_errors=true)"
LOAD = "remove_default_inputs"
WIDEN = f"{INLINE} {LOAD} widen_floats"
GATES = "unfuse_gates"
LITTLE = f"{LOAD} convert_opset(ignore_errors=true) strip_unused_nodes"


def pipelines(*, portable: bool = False) -> tuple[Pipeline, Pipeline]:
    """Return the group `simplify` in two: up to ``inline_functions``, and what works on a model without functions.

    The second one leaves a model alone that `quantize_model` has written.

    Args:
        portable: Whether gates stay single operators, and native operators are replaced: other runtimes need both.
    """
    steps = [step for step in parse_groups("simplify").steps if not (portable and step.name == GATES)]
    cut = 1 + [step.name for step in steps].index("inline_functions")
    if portable:
        steps[cut - 1] = replace(steps[cut - 1], options=(*steps[cut - 1].options, ("native", True)))
    return Pipeline(tuple(steps[:cut])), Pipeline(tuple(steps[cut:]), spares=True)


def simplify(model: ir.Model, progress: Progress, *, pipeline: Pipeline | str | None = None) -> PipelineResult:
    """Run a pipeline on a copy of `model`; None is what the group `simplify` does without functions."""
    chosen = pipelines()[1] if pipeline is None else pipeline
    return run(chosen, model, progress=lambda step: progress(f"simplify: {step.name}", 0, None))
