"""Models before and after a pipeline, as text: each file of `cases` holds the pipeline, a model and what it becomes.

`pytest tests/test_golden.py --update-golden` writes what the transforms do now; the diff is for a reader to judge.
"""

from pathlib import Path

import onnx_ir as ir
import pytest

from requant.transforms import METADATA_KEY, parse, run

CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))
HEADER = "# transforms: "
OUTPUT = "# output\n"

EXPECTED_TRANSFORMS = (
    "convert_opset",
    "einsum_to_matmul",
    "equalize_weights",
    "fold_batch_norms",
    "fold_constants",
    "freeze_max",
    "freeze_min",
    "freeze_requantization_ranges",
    "fuse_quantized_conv_and_requantize",
    "fuse_quantized_matmul_and_requantize",
    "inline_functions",
    "insert_logging",
    "merge_duplicate_nodes",
    "normalize_gemm",
    "qdq_to_qoperator",
    "quantize_nodes",
    "quantize_weights",
    "remove_nodes",
    "strip_unused_nodes",
    "unfuse_operators",
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
