"""Groups of transforms: their order, their pipelines, and the models between their steps."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from requant import UnknownNameError
from requant.cli import main
from requant.quantize.runtime.progress import silent
from requant.quantize.steps.prepare import simplify_model
from requant.transforms import GROUPS, METADATA_KEY, PipelineError, TransformError, join, members, parse, parse_groups
from requant.transforms.pipelines.groups import groups_of

DIGITS = Path(__file__).parents[3] / "sample_models" / "digits.onnx"
SIMPLIFY = (
    "inline_functions(ignore_errors=true) remove_default_inputs hoist_loop_constants "
    "convert_opset(ignore_errors=true) widen_floats fold_constants unfuse_operators explicit_pads "
    "remove_no_ops sink_squeezes split_short_sums simplify_reshapes unshuffle_to_depth scale_resizes remove_expands "
    "fuse_channel_norms sink_transposes merge_transposes merge_clips fuse_leaky_relu fuse_prelu fuse_hard_sigmoid scale_before_clip unfuse_gates "
    "einsum_to_matmul lift_head_scales normalize_gemm lift_channel_scales fold_batch_norms fuse_pad_and_conv "
    "pointwise_conv_to_matmul long_conv_to_matmul fold_pad lift_sequence_convs lift_volume_convs reduce_mean_to_pool lrn_to_pool sum_to_add "
    "fold_gated_sums split_merged_heads where_to_add sum_without_concat flush_denormals "
    "prune_dead_channels flatten_transposes merge_duplicate_nodes nest_concats strip_unused_nodes"
)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")


def refusal(*arguments: object) -> str:
    """Return the one line with which a command is refused."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr.removesuffix("\n")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test join groups that are gone afterwards."""
    before = {name: list(steps) for name, steps in GROUPS.items()}
    yield
    GROUPS.clear()
    GROUPS.update(before)


def test_what_quantize_does_before_it_decides_anything() -> None:
    """A changed order changes every quantized model: it is to be meant."""
    assert str(parse_groups("simplify")) == SIMPLIFY


def test_quantize_runs_the_group(tmp_path: Path) -> None:
    simple = simplify_model(DIGITS, ir.load(DIGITS), tmp_path, silent)
    assert simple.model.metadata_props[METADATA_KEY] == SIMPLIFY


@pytest.mark.parametrize("group", ["freeze", "fuse", "quantize", "simplify"])
def test_a_group_prints_as_a_pipeline(group: str) -> None:
    printed = dict(line.split(": ", 1) for line in invoke("transforms", "--groups").stdout.splitlines())[group]
    assert parse(printed) == parse_groups(group)
    found = json.loads(invoke("transforms", "--groups", "--json").stdout)[group]
    assert found["pipeline"] == printed
    assert " ".join(row["step"] for row in found["steps"]) == printed
    assert [row["phase"] for row in found["steps"]] == sorted(row["phase"] for row in found["steps"])


@given(st.permutations([(0, "fold_constants"), (1, "sum_to_add"), (1, "widen_floats"), (2, "normalize_gemm")]))
def test_phases_ascend_and_ties_keep_the_order_of_joining(order: list[tuple[int, str]]) -> None:
    GROUPS.pop("mine", None)
    for phase, step in order:
        join("mine", phase, step)
    ties = [step for phase, step in order if phase == 1]
    try:
        assert [member.step for member in members("mine")] == ["fold_constants", *ties, "normalize_gemm"]
    finally:
        del GROUPS["mine"]


def test_a_step_of_a_group_has_its_options(groups: None) -> None:
    join("mine", 1, "remove_nodes(op=Identity)")
    join("mine", 0, " remove_nodes ( op = Dropout ) ".replace(" (", "("))
    assert str(parse_groups("mine")) == "remove_nodes(op=Dropout) remove_nodes(op=Identity)"
    assert groups_of("remove_nodes") == (("mine", 0), ("mine", 1))


@pytest.mark.parametrize(
    ("text", "pipeline"),
    [
        ("fuse simplify", f"{{fuse}} {SIMPLIFY}"),
        (
            "freeze(min_max_log_file=a.log)",
            (
                "freeze_max(min_max_log_file=a.log) freeze_min(min_max_log_file=a.log) "
                "freeze_requantization_ranges(min_max_log_file=a.log)"
            ),
        ),
        (
            "freeze(min_percentile=1)",
            (
                "freeze_max(min_max_log_file=min_max.log) freeze_min(min_max_log_file=min_max.log, min_percentile=1.0) "
                "freeze_requantization_ranges(min_max_log_file=min_max.log, min_percentile=1.0)"
            ),
        ),
        (
            "quantize(ignore_errors=true)",
            "quantize_weights(ignore_errors=true) quantize_nodes(ignore_errors=true)",
        ),
    ],
    ids=["two-groups", "an-option-of-all", "an-option-of-some", "ignore-errors"],
)
def test_options_go_to_the_steps_that_have_them(text: str, pipeline: str) -> None:
    assert str(parse_groups(text)) == pipeline.format(fuse=parse_groups("fuse"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no group is named"),
        ("simplfy", "no group named 'simplfy'; did you mean 'simplify'? (at character 1 of 'simplfy')"),
        ("fuse(", "'(' is never closed (at character 5 of 'fuse(')"),
        (
            "fuse simplify(size=1)",
            "no step of group simplify has a parameter 'size'; there are: ignore_errors, inputs, max_size, op, outputs, to",
        ),
        (
            "freeze(min_percentile=x)",
            "freeze_min: min_percentile must be a number, not 'x' (at character 23 of 'freeze(min_percentile=x)')",
        ),
    ],
    ids=["none", "unknown", "open", "unknown-option", "wrong-type"],
)
def test_a_wrong_group_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(PipelineError) as caught:
        parse_groups(text)
    assert str(caught.value).startswith(message.partition("; there are")[0])


def test_no_two_equal_steps_and_no_odd_names(groups: None) -> None:
    with pytest.raises(TransformError, match="sum_to_add is in phase 180 of group 'simplify' already"):
        join("simplify", 180, "sum_to_add")
    with pytest.raises(TransformError, match="no group can be named 'a b'"):
        join("a b", 1, "sum_to_add")
    with pytest.raises(UnknownNameError, match="no group named 'frieze'; did you mean 'freeze'"):
        members("frieze")


# --- the command


def test_a_group_is_run_as_its_pipeline(tmp_path: Path) -> None:
    one, other = tmp_path / "one.onnx", tmp_path / "other.onnx"
    assert invoke("transform", DIGITS, one, "--group", "simplify").exit_code == 0
    assert invoke("transform", DIGITS, other, "--transforms", SIMPLIFY).exit_code == 0
    assert one.read_bytes() == other.read_bytes()


def test_one_of_transforms_and_group(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    assert "give --transforms '...' or --group NAME" in refusal("transform", DIGITS, out)
    both = refusal("transform", DIGITS, out, "--group", "fuse", "--transforms", "sum_to_add")
    assert "give --transforms '...' or --group NAME, not both" in both
    assert not out.exists()


PIPELINE = "fold_constants remove_nodes(op=Identity) fold_batch_norms"
NAMES = ["01_fold_constants.onnx", "02_remove_nodes.onnx", "03_fold_batch_norms.onnx"]


def dump(out: Path, folder: Path, *more: object, pipeline: str = PIPELINE) -> Result:
    return invoke("transform", DIGITS, out, "--transforms", pipeline, "--dump-dir", folder, *more)


def test_the_model_after_each_step(tmp_path: Path) -> None:
    out, folder = tmp_path / "out.onnx", tmp_path / "steps"
    assert dump(out, folder).exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    models = [onnx.load(folder / name) for name in NAMES]
    assert [props.value for model in models for props in model.metadata_props] == [
        "fold_constants",
        "fold_constants remove_nodes(op=Identity)",
        PIPELINE,
    ]
    norms = [sum(node.op_type == "BatchNormalization" for node in model.graph.node) for model in models]
    assert norms == [2, 2, 0]
    assert (folder / NAMES[-1]).read_bytes() == out.read_bytes()


def test_dumps_up_to_the_step_that_fails_stay(tmp_path: Path) -> None:
    failing = (
        "fold_constants strip_unused_nodes(outputs=nowhere, ignore_errors=true) sum_to_add quantize_nodes(input_min=1)"
    )
    result = dump(tmp_path / "out.onnx", tmp_path / "steps", pipeline=failing)
    assert result.exit_code == 2
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == [
        "01_fold_constants.onnx",
        "03_sum_to_add.onnx",
    ]
    assert not (tmp_path / "out.onnx").exists()


def test_large_weights_go_beside_each_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requant.quantize.model.files.PROTOBUF_LIMIT", 2**16)
    assert dump(tmp_path / "out.onnx", tmp_path / "steps").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == sorted(
        [*NAMES, *(f"{name}.data" for name in NAMES)]
    )
    onnx.load(tmp_path / "steps" / NAMES[-1])


def test_old_dumps_are_refused_or_removed(tmp_path: Path) -> None:
    out, folder = tmp_path / "out.onnx", tmp_path / "steps"
    folder.mkdir()
    (folder / "07_sum_to_add.onnx").write_bytes(b"old")
    (folder / "07_holiday.onnx").write_bytes(b"mine")
    assert refusal("transform", DIGITS, out, "--group", "fuse", "--dump-dir", folder) == (
        f"requant: {folder}: holds 1 dumps already, such as '07_sum_to_add.onnx'; --force removes them (in Python: force=True)"
    )
    assert dump(out, folder, "--force").exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == [*NAMES, "07_holiday.onnx"]


def test_a_folder_that_cannot_be_written_is_refused_before_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    copy = tmp_path / "01_fold_constants.onnx"
    copy.write_bytes(DIGITS.read_bytes())
    for arguments, said in (
        (
            (DIGITS, tmp_path / "out.onnx", "--dump-dir", tmp_path / "file"),
            "file: is a file; give a folder for the dumps",
        ),
        (
            (DIGITS, tmp_path / "out.onnx", "--dump-dir", tmp_path / "no" / "way"),
            "way: dumps cannot be written there: ",
        ),
        ((copy, tmp_path / "out.onnx", "--dump-dir", tmp_path, "--force"), "would overwrite the input"),
        ((DIGITS, tmp_path / "a" / "01_fold_constants.onnx", "--dump-dir", tmp_path / "a"), "a dump of the same name"),
    ):
        if arguments[1].parent.name == "a":
            arguments[1].parent.mkdir()
        assert said in refusal("transform", *arguments, "--transforms", "fold_constants")
    assert copy.read_bytes() == DIGITS.read_bytes()
    assert not (tmp_path / "out.onnx").exists()


# --- a large model


@pytest.mark.slow
def test_simplify_takes_less_memory_than_onnx_does_to_load_and_save() -> None:
    """benchmarks/simplify.py on ViT-B/16; its times are for a quiet machine."""
    sys.path.insert(0, str(DIGITS.parents[1]))
    benchmark = importlib.import_module("benchmarks.simplify")
    sys.path.pop(0)
    yardstick, simplify = benchmark.measure("vit_b_16", 1)
    assert simplify.peak_ratio < benchmark.MEMORY
    assert simplify.peak < yardstick.peak
