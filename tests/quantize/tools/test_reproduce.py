"""`requant reproduce`: the same bytes from the metadata and the plan, and what is said where they differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result

from requant.cli import main
from requant.quantize.model.metadata import OPTIONS_KEY
from requant.quantize.runtime.timing import Latency
from requant.transforms.int8.existing import MADE_KEY

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 3, 8, 8] x) => (float[N, 10] y) {
    c = Conv <pads=[1, 1, 1, 1]> (x, w)
    r = Relu(c)
    p = GlobalAveragePool(r)
    f = Flatten(p)
    y = MatMul(f, v)
}"""
FAST = ("--force-int8", "--place", "all")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")


def made(folder: Path, *more: object) -> Path:
    """Quantize ``m.onnx`` of a folder and return the result."""
    result = invoke("quantize", folder / "m.onnx", "-o", folder / "q.onnx", "--force", *more)
    assert result.exit_code in (0, 1), result.output
    return folder / "q.onnx"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_inputs(tmp_path)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model that no test changes."""
    folder = with_inputs(tmp_path_factory.mktemp("quantized"))
    made(folder, "--data", folder / "d.npz", "--force-int8", "--place", "rules")
    return folder


def with_inputs(folder: Path) -> Path:
    """Write a float model and data into a folder, and return it."""
    model, random = ir.from_onnx_text(TEXT), np.random.default_rng(1)
    for name, shape in (("w", (16, 3, 3, 3)), ("v", (16, 10))):
        array = random.standard_normal(shape).astype(np.float32)
        model.graph.register_initializer(ir.Value(name=name, const_value=ir.tensor(array, name=name)))
    ir.save(model, folder / "m.onnx")
    np.savez(folder / "d.npz", x=random.standard_normal((16, 3, 8, 8)).astype(np.float32))
    np.savez(folder / "other.npz", x=random.standard_normal((16, 3, 8, 8)).astype(np.float32))
    (folder / "o.toml").write_text("[tensors.r]\nrange = [0.0, 6.0]\n")
    return folder


def changed(path: Path, key: str, change: Callable[[Any], Any]) -> Path:
    """Change a JSON entry in the metadata of a model."""
    model = onnx.load(path)
    entry = next(entry for entry in model.metadata_props if entry.key == key)
    entry.value = json.dumps(change(json.loads(entry.value)))
    onnx.save(model, path)
    return path


VARIANTS = {
    "default": (*FAST,),
    "timed": ("--force-int8",),
    "float": ("--exclude-ops", "Conv,MatMul"),
    "high effort": (*FAST, "--effort", "high"),
    "portable": ("--force-int8", "--portable"),
    "weights outside": (*FAST, "--external-data"),
    "fused operators": (*FAST, "--format", "qoperator", "--isa", "avx2"),
    "overrides": (*FAST, "--overrides", "o.toml", "--symmetric", "--samples", 8),
    "single nodes": (
        "--force-int8",
        "--place",
        "estimated",
        "--strategy",
        "static-float",
        "--exclude-ops",
        "Relu",
        "--lambda",
        "0.5",
    ),
}


LONG = ("timed", "float", "high effort", "portable", "weights outside", "overrides")
"""Variants that only runs with slow tests try."""


@pytest.mark.parametrize(
    "more", [pytest.param(row, id=name, marks=[pytest.mark.slow] * (name in LONG)) for name, row in VARIANTS.items()]
)
def test_the_same_bytes_again(folder: Path, more: tuple[object, ...]) -> None:
    own = [folder / word if word == "o.toml" else word for word in more]
    model = made(folder, "--data", folder / "d.npz", *own)
    (folder / "m.onnx").rename(folder / "float.onnx")
    before = sorted(folder.iterdir())
    result = invoke("reproduce", model, "--data", folder / "d.npz", "--model", folder / "float.onnx")
    assert (result.exit_code, result.stdout) == (0, f"same bytes: {model}\n"), result.stderr
    assert sorted(folder.iterdir()) == before


def test_without_data_and_with_a_range_file(folder: Path) -> None:
    assert invoke("reproduce", made(folder, "--dynamic", "--force-int8")).exit_code == 0
    calibrated = ("calibrate", folder / "m.onnx", "--data", folder / "d.npz", "-o", folder / "r.json")
    assert invoke(*calibrated, "--calibration", "mse").exit_code == 0
    model = made(folder, *FAST, "--ranges", folder / "r.json")
    assert invoke("reproduce", model, "--ranges", folder / "r.json").stdout == f"same bytes: {model}\n"
    refused = invoke("reproduce", model, "--data", folder / "d.npz")
    assert (refused.exit_code, refused.stderr) == (2, f"requant: {model}: was made without --data\n")


@pytest.mark.parametrize(
    ("times", "written"), [((1.5, 1.0), "given"), ((1.5, 1.5), "simplified"), ((0.9, 0.5), "simplified")]
)
def test_a_float_model_that_simplification_makes_slower_is_the_given_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, times: tuple[float, float], written: str
) -> None:
    """The given model takes 1 ms, INT8 2 ms; the times are those of the simplified model, and of the given one again."""
    text = TEXT.replace("r = Relu(c)", "i = Identity(c) r = Softplus(i)")
    model = ir.from_onnx_text(text)
    for value in ir.load(folder / "m.onnx").graph.initializers.values():
        model.graph.register_initializer(ir.Value(name=value.name, const_value=value.const_value))
    ir.save(model, folder / "m.onnx")
    left = [*times]

    def timed(models: list[Any], *_: object, **__: object) -> Latency:
        each = 2.0 if len(models) > 2 else left.pop(0)
        return Latency(1.0, each, 1.0, each, runs=5)

    monkeypatch.setattr("requant.quantize.steps.judge.time_models", timed)
    data = ("--data", folder / "d.npz")
    result = invoke("quantize", folder / "m.onnx", "-o", folder / "q.onnx", "--place", "rules", *data)
    (verdict, *_) = result.stdout.splitlines()
    slower = "the given model, because simplification makes it slower here (1.5 instead of 1 ms)"
    assert result.exit_code == 1
    assert verdict.endswith(slower if written == "given" else "the output is the simplified float model")
    found = [node.op_type for node in onnx.load(folder / "q.onnx").graph.node]
    assert ("Identity" in found) is ("Softplus" in found) is (written == "given")
    assert not left or written == "simplified"
    assert invoke("reproduce", folder / "q.onnx", *data).stdout == f"same bytes: {folder / 'q.onnx'}\n"


def test_what_differs_is_said_and_the_remade_model_kept(folder: Path) -> None:
    model = made(folder, "--data", folder / "d.npz", *FAST)
    result = invoke("reproduce", model, "--data", folder / "other.npz", "-o", folder / "again.onnx", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["same"]) == (1, False)
    assert found["causes"] == ["the data that give the ranges are others"]
    assert "weight" in {each["kind"] for each in found["differences"]}
    assert invoke("diff", model, folder / "again.onnx").exit_code == 1
    shutil.move(folder / "again.onnx", folder / "q.onnx")
    assert invoke("reproduce", model, "--data", folder / "other.npz").exit_code == 0


@pytest.mark.slow
def test_another_environment_is_named_only_if_the_bytes_differ(folder: Path) -> None:
    model = made(folder, "--data", folder / "d.npz", *FAST)

    def older(made: dict[str, Any]) -> dict[str, Any]:
        made["environment"]["versions"]["onnx"] = "1.0"
        return made

    changed(model, MADE_KEY, older)
    again = folder / "again.onnx"
    result = invoke("reproduce", model, "--data", folder / "d.npz", "-o", again)
    if result.exit_code == 1:  # the protobuf library of this test may order the file differently
        assert "only the encoding of the file" in result.stdout
    assert invoke("reproduce", again, "--plan", folder / "q.plan.json", "--data", folder / "d.npz").exit_code == 0
    result = invoke("reproduce", again, "--plan", folder / "q.plan.json", "--data", folder / "other.npz")
    assert "made with onnx 1.0, here" in result.stdout


def test_inputs_that_are_missing_or_others_are_refused(folder: Path) -> None:
    model, data = made(folder, "--data", folder / "d.npz", *FAST), ("--data", folder / "d.npz")
    assert "was made with --data; give it" in invoke("reproduce", model).stderr
    other = onnx.load(folder / "m.onnx")
    other.graph.node[0].attribute[0].ints[:] = [0, 0, 0, 0]
    onnx.save(other, folder / "other.onnx")
    result = invoke("reproduce", model, *data, "--model", folder / "other.onnx")
    assert (result.exit_code, "other.onnx: another model than" in result.stderr) == (2, True)
    (folder / "m.onnx").rename(folder / "away.onnx")
    assert "no 'm.onnx' beside it; give --model FLOAT" in invoke("reproduce", model, *data).stderr
    (folder / "away.onnx").rename(folder / "m.onnx")
    shutil.copy(folder / "q.plan.json", folder / "plan.json")
    plan = json.loads((folder / "q.plan.json").read_text())
    next(iter(plan["units"].values()))["implementation"] = "float"
    (folder / "q.plan.json").write_text(json.dumps(plan))
    assert "was made with another plan" in invoke("reproduce", model, *data).stderr
    assert "requant did not write it" in invoke("reproduce", folder / "m.onnx", *data).stderr
    for taken in (model, folder / "m.onnx"):
        result = invoke("reproduce", model, *data, "--plan", folder / "plan.json", "-o", taken, "--force")
        assert (result.exit_code, "would overwrite the input" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("key", "change", "says"),
    [
        (MADE_KEY, lambda made: {**made, "source": "../m.onnx"}, "the recorded name is no file name"),
        (MADE_KEY, lambda made: {**made, "source": "/etc/passwd"}, "the recorded name is no file name"),
        (MADE_KEY, lambda made: {**made, "source": "a\0b"}, "the recorded name is no file name"),
        (MADE_KEY, lambda made: {**made, "written": "yes"}, "damaged metadata 'requant.made': 'written'"),
        (MADE_KEY, lambda made: [], "damaged metadata 'requant.made'"),
        (OPTIONS_KEY, lambda asked: {**asked, "plan": "/etc/passwd"}, "no key named 'plan'"),
        (OPTIONS_KEY, lambda asked: {**asked, "data": "evil.py:feeds"}, "no key named 'data'"),
        (OPTIONS_KEY, lambda asked: {**asked, "effort": "huge"}, "effort: must be one of low, medium, high"),
        (OPTIONS_KEY, lambda asked: {**asked, "samples": 10**30}, "'samples': the integer has more than 64 bits"),
        (OPTIONS_KEY, lambda asked: {**asked, "strategies": 3}, "an object is expected"),
        (OPTIONS_KEY, lambda asked: {**asked, "overrides": {"r": {"range": [1, 0]}}}, "tensor 'r': the lower end"),
    ],
)
def test_metadata_are_not_trusted(
    quantized: Path, tmp_path: Path, key: str, change: Callable[[Any], Any], says: str
) -> None:
    folder = shutil.copytree(quantized, tmp_path / "copy")
    result = invoke("reproduce", changed(folder / "q.onnx", key, change), "--data", folder / "d.npz")
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_metadata_tell_nothing_of_the_folders(folder: Path) -> None:
    model = onnx.load(made(folder, "--data", folder / "d.npz", "--overrides", folder / "o.toml", *FAST))
    assert not [entry for entry in model.metadata_props if str(folder) in entry.value]


def test_a_transformed_model(folder: Path) -> None:
    transformed = folder / "t.onnx"
    arguments = ("transform", folder / "m.onnx", transformed, "--transforms")
    assert invoke(*arguments, "fold_constants rename_node(old_node_name=node_0, new_node_name=b)").exit_code in (0, 2)
    assert invoke(*arguments, "fold_constants sort_by_execution_order", "--force").exit_code == 0
    assert "give --model IN" in invoke("reproduce", transformed).stderr
    assert invoke("reproduce", transformed, "--model", folder / "m.onnx").stdout == f"same bytes: {transformed}\n"
    twice = folder / "u.onnx"
    assert invoke("transform", transformed, twice, "--transforms", "remove_nodes(op=Flatten)").exit_code == 0
    assert invoke("reproduce", twice, "--model", transformed).exit_code == 0


@pytest.mark.slow
def test_a_model_that_was_changed_afterwards_is_not_made_again(folder: Path) -> None:
    model, changed = made(folder, "--data", folder / "d.npz", *FAST), folder / "t.onnx"
    assert invoke("transform", model, changed, "--transforms", "deduplicate_initializers").exit_code == 0
    assert "only 'requant transform' can be repeated" in invoke("reproduce", changed, "--data", folder / "d.npz").stderr
    assert invoke("reproduce", changed, "--model", model).stdout == f"same bytes: {changed}\n"
    assert invoke("compile", model, "-o", folder / "c.onnx").exit_code == 0
    result = invoke("reproduce", folder / "c.onnx", "--data", folder / "d.npz")
    assert (result.exit_code, "compiled for one machine" in result.stderr) == (2, True)
