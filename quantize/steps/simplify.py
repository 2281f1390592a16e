"""Simplify the float model before any decision. Its outputs stay the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import onnx_ir as ir

from ...transforms import Pipeline, PipelineResult, Step, parse_groups, run
from ..runtime.progress import Progress

INLINE = "inline_functions(ignore_errors=true)"
LOAD = "remove_default_inputs"
WIDEN = f"{INLINE} {LOAD} widen_floats"
GATES = "unfuse_gates"
FLUSH = "flush_denormals"
RESTORE, UNPACK, CONSTANTS = "remove_dynamic_quantization", "dequantize_weights", "fold_constants"
LITTLE = f"{LOAD} convert_opset(ignore_errors=true) strip_unused_nodes"


def pipelines(*, portable: bool = False, dynamic: Iterable[str] | None = None) -> tuple[Pipeline, Pipeline]:
    """Return the group `simplify` in two: up to ``inline_functions``, and what works on a model without functions.

    The second one leaves a model alone that `quantize_model` has written.

    Args:
        portable: Whether gates stay single operators, and native operators are replaced: other runtimes need both.
        dynamic: The nodes that stay as they are where operators with ranges computed at run time, and weights in
            integers, become float; None if all stay.
    """
    steps = [step for step in parse_groups("simplify").steps if not (portable and step.name == GATES)]
    if dynamic is not None:
        excluded = tuple(dynamic)
        restore = Step(RESTORE, (("exclude_node", excluded),) if excluded else ())
        place = [step.name for step in steps].index(CONSTANTS)
        steps[place : place + 1] = [Step(UNPACK, ()), steps[place], restore]
    cut = 1 + [step.name for step in steps].index("inline_functions")
    if portable:
        steps[cut - 1] = replace(steps[cut - 1], options=(*steps[cut - 1].options, ("native", True)))
    return Pipeline(tuple(steps[:cut])), Pipeline(tuple(steps[cut:]), skips_finished=True)


def simplify(model: ir.Model, progress: Progress, *, pipeline: Pipeline | str | None = None) -> PipelineResult:
    """Run a pipeline on a copy of `model`; None runs the second pipeline of `pipelines`."""
    chosen = pipelines()[1] if pipeline is None else pipeline
    return run(chosen, model, progress=lambda step: progress(f"simplify: {step.name}", 0, None))
