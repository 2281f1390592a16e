"""The float rewrites that come before any decision: the same outputs from a plainer graph."""

from __future__ import annotations

import onnx_ir as ir

from ..transforms import PipelineResult, run
from .progress import Progress

SIMPLIFY = (
    "convert_opset(ignore_errors=true) fold_constants remove_nodes(op=Identity, op=Dropout) "
    "fold_batch_norms fuse_pad_and_conv sum_to_add merge_duplicate_nodes strip_unused_nodes"
)


def simplify(model: ir.Model, progress: Progress) -> PipelineResult:
    """Run `SIMPLIFY` on a copy of `model`."""
    return run(SIMPLIFY, model, progress=lambda step: progress(f"simplify: {step.name}", 0, None))
