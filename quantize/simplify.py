"""The float rewrites that come before any decision: the same outputs from a plainer graph."""

from __future__ import annotations

import onnx_ir as ir

from ..transforms import PipelineResult, run
from .progress import Progress

SIMPLIFY = (
    "convert_opset(ignore_errors=true) widen_floats fold_constants "
    "unfuse_operators remove_nodes(op=Identity, op=Dropout) einsum_to_matmul normalize_gemm fold_batch_norms "
    "fuse_pad_and_conv sum_to_add merge_duplicate_nodes strip_unused_nodes"
)


INLINE = "inline_functions(ignore_errors=true)"
WIDEN = f"{INLINE} widen_floats"
LITTLE = "convert_opset(ignore_errors=true) strip_unused_nodes"


def simplify(model: ir.Model, progress: Progress, *, pipeline: str = SIMPLIFY) -> PipelineResult:
    """Run `SIMPLIFY`, or another pipeline, on a copy of `model`."""
    return run(pipeline, model, progress=lambda step: progress(f"simplify: {step.name}", 0, None))
