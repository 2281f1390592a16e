"""Graph rewrites: from an ONNX model to an ONNX model, by name.

`run` applies a pipeline such as ``"fold_constants fold_batch_norms"`` to a copy of a model; `REGISTRY` holds every
transform.
"""

from . import (
    convert_opset,
    fold_batch_norms,
    fold_constants,
    freeze_ranges,
    fuse_pad_and_conv,
    fuse_quantized,
    fuse_silu,
    insert_logging,
    merge_duplicate_nodes,
    qdq_to_qoperator,
    quantize_nodes,
    quantize_weights,
    remove_nodes,
    strip_unused_nodes,
    sum_to_add,
)
from .pipeline import METADATA_KEY, Pipeline, PipelineError, PipelineResult, Step, StepResult, parse, run
from .registry import REGISTRY, REQUIRED, Change, Option, Transform, TransformError, load_plugins, lookup, transform
from .verify import Port, Signature, VerifyError, signature, verify

__all__ = [
    "METADATA_KEY",
    "REGISTRY",
    "REQUIRED",
    "Change",
    "Option",
    "Pipeline",
    "PipelineError",
    "PipelineResult",
    "Port",
    "Signature",
    "Step",
    "StepResult",
    "Transform",
    "TransformError",
    "VerifyError",
    "convert_opset",
    "fold_batch_norms",
    "fold_constants",
    "freeze_ranges",
    "fuse_pad_and_conv",
    "fuse_quantized",
    "fuse_silu",
    "insert_logging",
    "load_plugins",
    "lookup",
    "merge_duplicate_nodes",
    "parse",
    "qdq_to_qoperator",
    "quantize_nodes",
    "quantize_weights",
    "remove_nodes",
    "run",
    "signature",
    "strip_unused_nodes",
    "sum_to_add",
    "transform",
    "verify",
]
