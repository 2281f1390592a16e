"""Models before and after a pipeline, as text: each file of `cases` holds the pipeline, a model and what it becomes.

`pytest tests/transforms/test_golden.py --update-golden` writes what the transforms do now; the diff is for a reader to judge.
"""

from pathlib import Path

import onnx_ir as ir
import pytest

from requant.transforms import METADATA_KEY, parse, run

CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))
HEADER = "# transforms: "
OUTPUT = "# output\n"

EXPECTED_TRANSFORMS = (
    "add_default_attributes",
    "backport_concatv2",
    "backport_tensor_array_v3",
    "convert_opset",
    "deduplicate_initializers",
    "dequantize_weights",
    "einsum_to_matmul",
    "equalize_weights",
    "explicit_pads",
    "externalize_weights",
    "extract_subgraph",
    "flatten_atrous_conv",
    "flatten_transposes",
    "fold_batch_norms",
    "fold_constants",
    "fold_gated_sums",
    "fold_convolutionwithbias_mul",
    "fold_old_batch_norms",
    "fold_pad",
    "fold_subdivmul_batch_norms",
    "freeze_max",
    "freeze_min",
    "freeze_requantization_ranges",
    "fuse_convolutions",
    "fuse_channel_norms",
    "fuse_gelu",
    "fuse_hard_sigmoid",
    "fuse_leaky_relu",
    "fuse_pad_and_conv",
    "fuse_prelu",
    "fuse_quantized_conv_and_requantize",
    "fuse_quantized_matmul_and_requantize",
    "fuse_resize_and_conv",
    "fuse_resize_pad_and_conv",
    "fuse_silu",
    "hoist_loop_constants",
    "inline_functions",
    "insert_logging",
    "insert_qdq",
    "lift_channel_scales",
    "lift_head_scales",
    "lift_sequence_convs",
    "lift_volume_convs",
    "long_conv_to_matmul",
    "lrn_to_pool",
    "merge_clips",
    "merge_duplicate_nodes",
    "merge_transposes",
    "nest_concats",
    "mkl_fuse_pad_and_conv",
    "normalize_gemm",
    "obfuscate_names",
    "pointwise_conv_to_matmul",
    "prune_dead_channels",
    "qdq_to_qoperator",
    "qoperator_to_qdq",
    "quantize_caches",
    "quantize_nodes",
    "quantize_weights",
    "reduce_mean_to_pool",
    "remove_attribute",
    "remove_control_dependencies",
    "remove_default_inputs",
    "remove_device",
    "remove_expands",
    "remove_no_ops",
    "remove_nodes",
    "remove_qdq",
    "rename_attribute",
    "rename_node",
    "rename_op",
    "rerange_quantized_concat",
    "round_weights",
    "set_device",
    "scale_before_clip",
    "scale_resizes",
    "simplify_reshapes",
    "sink_squeezes",
    "sink_transposes",
    "sort_by_execution_order",
    "sparsify_gather",
    "spell_slow_functions",
    "split_shared_weights",
    "split_short_sums",
    "strip_unused_nodes",
    "sum_to_add",
    "split_merged_heads",
    "sum_without_concat",
    "where_to_add",
    "unfuse_gates",
    "unfuse_operators",
    "unshuffle_to_depth",
    "widen_floats",
)


def split(path: Path) -> tuple[str, str, str]:
    """Return the pipeline, the model's text and the expected output of a case."""
    text = path.read_text(encoding="utf-8")
    header, _, rest = text.partition("\n")
    assert header.startswith(HEADER), f"{path.name}: the first line must start with {HEADER!r}"
    before, _, after = rest.partition(OUTPUT)
    return header.removeprefix(HEADER), before, after


def output(pipeline: str, text: str) -> str:
    """Return what each step reports, as comments, and the text of the model after the last."""
    result = run(pipeline, ir.from_onnx_text(text))
    del result.model.metadata_props[METADATA_KEY]
    names = [node.name for node in result.model.graph if node.name]
    assert len(names) == len(set(names))  # the runtime refuses two nodes of one name
    notes = [f"# {step.step.name}: {step.change}" for step in result.applied]
    return "\n".join([*notes, ir.to_onnx_text(result.model), ""])


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_model_becomes_what_is_expected(
    path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)  # where min_max.log is
    pipeline, before, expected = split(path)
    found = output(pipeline, before)
    if request.config.getoption("--update-golden"):
        path.write_text(f"{HEADER}{pipeline}\n{before}{OUTPUT}{found}", encoding="utf-8")
        return
    assert found == expected


@pytest.mark.parametrize("name", EXPECTED_TRANSFORMS)
def test_there_are_two_cases_at_least(name: str) -> None:
    first_steps = [parse(split(path)[0]).steps[0].name for path in CASES]
    assert first_steps.count(name) >= 2
