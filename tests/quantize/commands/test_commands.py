"""What the command line does: results on stdout, everything else on stderr, exit codes, and a clear no to bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper

from requant.cli import main
from requant.quantize.placement.runs import MOST_SAMPLES

from ...texts import without_stages

SAMPLE_MODELS = Path(__file__).parents[3] / "sample_models"
DIGITS = SAMPLE_MODELS / "digits.onnx"
DATA = SAMPLE_MODELS / "digits.npz"
CALIBRATION = f"{DATA}:calib"

FORCE_INT8 = "--force-int8"  # so that the clock does not decide over the exit code

CONVOLUTION = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[{batch},8,6,6] image) => (float[{batch},8] scores) {{
  [first] a = Conv<pads = [1, 1, 1, 1]>(image, w)
  [second] r = Relu(a)
  [third] p = GlobalAveragePool(r)
  [fourth] scores = Flatten(p)
}}
"""


def invoke(*arguments: object) -> Result:
    """Run ``requant`` with these arguments in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")


def succeed(*arguments: object) -> Result:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def snapshot(folder: Path) -> dict[Path, bytes | None]:
    """Return everything below a folder; what Python caches of a module that it imports is not the program's doing."""
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def refused(folder: Path, arguments: Sequence[object], *mentions: str) -> None:
    """Assert that a request gets one clear line, exit code 2, and leaves every file below `folder` as it was.

    Args:
        folder: Where nothing may change.
        arguments: The request.
        mentions: What the line must say.
    """
    before = snapshot(folder)
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output or repr(result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("requant: ")
    assert len(line) < 400
    for mention in mentions:
        assert mention in line
    assert snapshot(folder) == before


def write_model(path: Path, *, batch: str = "N", seed: int = 0) -> Path:
    """Write a small convolutional network with an input `image` and an output `scores`."""
    proto = onnx.parser.parse_model(CONVOLUTION.format(batch=batch))
    weights = np.random.default_rng(seed).standard_normal((8, 8, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(proto, path)
    return path


def write_external(model: Path) -> tuple[Path, Path]:
    """Write a copy of `model` that keeps its weights in a file beside it; return both files."""
    copy, weights = model.with_name("external.onnx"), model.with_name("weights.bin")
    onnx.save_model(onnx.load(model), copy, save_as_external_data=True, location=weights.name, size_threshold=0)
    return copy, weights


def images(count: int = 6) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).standard_normal((count, 8, 6, 6)).astype(np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "float.onnx")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", image=images())
    return tmp_path / "data.npz"


@pytest.fixture(scope="module")
def digits_int8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The digits network, quantized once, with what ``requant quantize --json`` printed."""
    output = tmp_path_factory.mktemp("digits") / "int8.onnx"
    return output, succeed("quantize", DIGITS, "--data", CALIBRATION, "-o", output, "--json", FORCE_INT8)


# --------------------------------------------------------------------------------------------- what is there


def commands_of(group: click.Group) -> dict[str, click.Command]:
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


COMMANDS = commands_of(main)


def test_version_and_help() -> None:
    version = succeed("--version").stdout
    assert version.startswith("requant ")
    assert version.strip()[-1].isdigit()
    for name in COMMANDS:
        assert name in succeed("--help").stdout


def commands() -> list[click.Command]:
    return [main, *COMMANDS.values()]


GROUPS = [command for command in COMMANDS.values() if isinstance(command, click.Group)]
INNER = [
    pytest.param(group, command, id=f"{group.name} {command.name}")
    for group in GROUPS
    for command in group.commands.values()
]


@pytest.mark.parametrize(("group", "command"), INNER)
def test_the_examples_of_commands_in_groups_parse(group: click.Group, command: click.Command) -> None:
    """They have examples, which name options of that very command; the group names each of them."""
    name = f"requant {group.name} {command.name}"
    assert name in (group.help or "")
    shown = [line.split() for line in (command.help or "").splitlines() if line.strip().startswith(name)]
    assert shown
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for words in shown for word in words if word.startswith("-")} <= known
    assert name in succeed(str(group.name), str(command.name), "--help").stdout


@pytest.mark.parametrize("name", ["-h", "--help"])
@pytest.mark.parametrize("command", commands(), ids=lambda command: str(command.name))
def test_help_of_every_command_has_an_example(command: click.Command, name: str) -> None:
    arguments = [name] if command is main else [str(command.name), name]
    shown = succeed(*arguments).stdout
    prefix = "requant" if command is main else f"requant {command.name}"
    assert [line for line in shown.splitlines() if line.strip().startswith(prefix)]
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help or isinstance(parameter.type, click.Choice), f"{parameter.name} has no help"


@pytest.mark.parametrize("command", commands()[1:], ids=lambda command: str(command.name))
def test_the_examples_parse(command: click.Command) -> None:
    """Every option that an example names is an option of its command, or of one of the commands in it."""
    inside = command.commands.values() if isinstance(command, click.Group) else ()
    parameters = [parameter for each in (command, *inside) for parameter in each.params]
    known = {name for parameter in parameters for name in parameter.opts} | {"--help"}
    examples = [
        line.split() for line in (command.help or "").splitlines() if line.strip().startswith(f"requant {command.name}")
    ]
    assert {word for words in examples for word in words if word.startswith("-")} <= known


def test_an_unknown_command_or_option_is_a_wrong_request() -> None:
    for arguments in (["quantise"], ["quantize", "--frobnicate"], ["quantize"], ["compare", "a.onnx"]):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "requant: " in result.stderr


# ------------------------------------------------------------------------------------------------- quantize


def test_quantize_json_is_one_object_on_stdout_and_nothing_else(digits_int8: tuple[Path, Result]) -> None:
    output, result = digits_int8
    found = json.loads(result.stdout)
    assert result.stderr == ""
    assert found["output"] == str(output)
    assert set(found) >= {
        "output",
        "int8_nodes",
        "mac_share_int8",
        "float_nodes",
        "agreement",
        "sqnr_db",
        "latency",
        "size",
        "pipeline",
    }
    assert set(found["latency"]) >= {"float_ms", "int8_ms", "speedup"}
    assert found["size"] == {"float_bytes": DIGITS.stat().st_size, "int8_bytes": output.stat().st_size}
    assert 0.9 <= found["mac_share_int8"] <= 1
    assert all(set(node) == {"name", "operator", "reason", "us"} and node["reason"] for node in found["float_nodes"])
    assert sum(node["us"] for node in found["float_nodes"]) > 0
    assert {"conv1", "relu1"} <= {node["name"] for node in found["float_nodes"]}
    assert "fold_batch_norms" in found["pipeline"]


def test_quantize_writes_a_valid_model_of_the_same_inputs_and_outputs(digits_int8: tuple[Path, Result]) -> None:
    output, _ = digits_int8
    onnx.checker.check_model(output, full_check=True)
    before, after = (ort.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in (DIGITS, output))
    for ends in ("get_inputs", "get_outputs"):
        assert [(e.name, e.type, e.shape) for e in getattr(before, ends)()] == [
            (e.name, e.type, e.shape) for e in getattr(after, ends)()
        ]


def test_quantize_prints_its_table_on_stdout(tmp_path: Path, model: Path, data: Path) -> None:
    result = succeed("quantize", model, "--data", data, "-o", tmp_path / "int8.onnx", FORCE_INT8)
    verdict, *table = result.stdout.splitlines()
    assert verdict.endswith(" (calibration data)")
    for word in ("int8 nodes", "multiply-accumulates", "SQNR", "latency, batch 1", "size"):
        assert any(word in line for line in table)
        assert word not in result.stderr
    assert (tmp_path / "int8.onnx").is_file()


def test_quiet_prints_no_table_but_json(model: Path) -> None:
    for arguments in (("-q", "ops", "Relu"), ("inspect", model, "--quiet")):
        assert succeed(*arguments).output == ""
        assert json.loads(succeed(*arguments, "--json").stdout)


def test_quantize_takes_names_separated_by_commas(tmp_path: Path) -> None:
    output = tmp_path / "int8.onnx"
    names = ["--exclude-nodes", "conv2, fc1", "--exclude-ops", "MaxPool"]
    arguments = [*names, "--samples", "8", "--threads", "0", "--place", "rules", FORCE_INT8]
    found = json.loads(
        succeed("quantize", DIGITS, "--data", CALIBRATION, "-o", output, "--json", "--batch", "4", *arguments).stdout
    )
    reasons = {node["name"]: node["reason"] for node in found["float_nodes"]}
    assert reasons["conv2"] == reasons["fc1"] == "excluded by name"
    assert found["samples"] == MOST_SAMPLES  # others than the 8 that gave the ranges
    assert found["promise"]["samples_gave_no_ranges"]
    assert found["latency"]["batch"] == 4


@pytest.mark.slow
def test_quantize_as_qoperator(tmp_path: Path) -> None:
    output = tmp_path / "int8.onnx"
    arguments = ["quantize", DIGITS, "--data", CALIBRATION, "-o", output, "--format", "qoperator", "--json"]
    found = json.loads(succeed(*arguments, FORCE_INT8).stdout)
    assert found["format"] == "qoperator"
    assert {"QLinearConv", "QGemm"} <= {node.op_type for node in onnx.load(output).graph.node}


@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_int8_that_does_not_pay_is_a_goal_missed(
    tmp_path: Path,
    model: Path,
    data: Path,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    set_latency: Callable[..., None],
) -> None:
    set_latency(monkeypatch, float_ms=1.0, int8_ms=2.0)
    output = tmp_path / "out.onnx"
    arguments = ["quantize", model, "--data", data, "-o", output, *["--json"] * as_json]
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "int8 gains too little here: 0.50x" in result.stdout
    if not as_json:
        assert result.stdout.startswith("NOT INT8: int8 gains too little here: 0.50x")
        assert re.search(rf"^output +{re.escape(str(output))} \(float\)$", result.stdout, re.MULTILINE)
    assert "QuantizeLinear" not in {node.op_type for node in onnx.load(output).graph.node}
    succeed(*arguments, "--force", FORCE_INT8)
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(output).graph.node}


def test_int8_that_pays_is_a_goal_reached(tmp_path: Path, model: Path, data: Path, int8_wins: None) -> None:
    succeed("quantize", model, "--data", data, "-o", tmp_path / "out.onnx")


def test_force_replaces_an_output(tmp_path: Path, model: Path, data: Path) -> None:
    output = tmp_path / "out.onnx"
    output.write_text("something else")
    succeed("transform", model, output, "--transforms", "fold_constants", "--force")
    onnx.checker.check_model(output)


# -------------------------------------------------------------------------------------------------- compare


def test_compare_json(digits_int8: tuple[Path, Result]) -> None:
    output, _ = digits_int8
    result = succeed("compare", DIGITS, output, "--data", DATA, "--batch", "16", "--json")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert set(found) >= {"agreement", "broken", "fixed", "p_value", "sqnr_db", "latency"}
    assert found["items"] == found["samples"] == 797
    assert found["float_accuracy"] - found["int8_accuracy"] <= 0.003
    assert found["fixed"] - found["broken"] == round(797 * (found["int8_accuracy"] - found["float_accuracy"]))
    assert 0 < found["p_value"] <= 1
    assert (found["latency"]["batch"], found["latency_at_batch"]["batch"]) == (1, 16)


def test_compare_without_labels_says_null(tmp_path: Path, model: Path, data: Path) -> None:
    result = succeed("compare", model, shutil.copy(model, tmp_path / "same.onnx"), "--data", data, "--json")
    found = json.loads(result.stdout)
    assert found["broken"] is found["fixed"] is found["p_value"] is found["items"] is None
    assert found["agreement"] is None  # the outputs of a Relu are amounts
    assert found["sqnr_db"] is None  # no noise: JSON has no infinity


def test_compare_prints_its_table_on_stdout(tmp_path: Path, model: Path) -> None:
    np.savez(tmp_path / "data.npz", image=images(), labels=np.arange(6))
    result = succeed("compare", model, model, "--data", tmp_path / "data.npz")
    assert result.stderr == ""
    assert "top-1 accuracy" in result.stdout.splitlines()[0]
    for word in ("top-1", "0 broken, 0 fixed", "no difference", "latency, batch 1", "items/s"):
        assert word in result.stdout


# ------------------------------------------------------------------------------------------------ calibrate


def test_calibrate_writes_ranges_and_merges_them(tmp_path: Path, model: Path) -> None:
    for name, part in (("a", images()[:2]), ("b", images()[2:]), ("all", images())):
        np.savez(tmp_path / f"{name}.npz", image=part)
        arguments = ["--data", tmp_path / f"{name}.npz", "--calibration", "minmax"]
        succeed("calibrate", model, *arguments, "-o", tmp_path / f"{name}.json")
    result = succeed("calibrate", "--merge", tmp_path / "a.json", tmp_path / "b.json", "-o", tmp_path / "merged.json")
    assert result.stdout == ""
    merged, whole = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("merged", "all"))
    for found in (merged, whole):
        for row in found["tensors"].values():
            del row["runs"]["blocks"]  # the data of either part begin anew
    assert merged["tensors"] == whole["tensors"]
    assert merged["data"]["samples"] == 6
    assert merged["tensors"]["image"]["hi"] == float(images().max())


def test_the_flow_by_hand(tmp_path: Path) -> None:
    """Design, section 4: quantize weights and nodes, log, calibrate, freeze, fuse; every stage loads."""
    stages = {name: tmp_path / f"{name}.onnx" for name in ("dynamic", "logged", "frozen")}
    log = tmp_path / "min_max.log"
    pipelines = {
        "dynamic": "fold_constants fold_batch_norms quantize_weights quantize_nodes",
        "logged": 'insert_logging(op=RequantizationRange, show_name=true, message="__requant_min_max:")',
        "frozen": f'freeze_requantization_ranges(min_max_log_file="{log}") fuse_quantized_conv_and_requantize',
    }
    source = DIGITS
    for name, target in stages.items():
        if name == "frozen":
            succeed("calibrate", stages["logged"], "--data", CALIBRATION, "--samples", "8", "--log", log)
            source = stages["dynamic"]
        succeed("transform", source, target, "--transforms", pipelines[name])
        ort.InferenceSession(target, providers=["CPUExecutionProvider"])
        source = target
    lines = log.read_text().splitlines()
    assert lines
    assert all(line.startswith(";") and "__print__;__requant_min_max:[" in line for line in lines)
    found = json.loads(succeed("compare", DIGITS, stages["frozen"], "--data", DATA, "--json").stdout)
    assert found["int8_accuracy"] >= 0.98


# ------------------------------------------------------------------------------------------------ transform


def test_transform_json(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    result = succeed(
        "transform", DIGITS, output, "--transforms", " fold_constants  fold_batch_norms(max_gain=1e6)", "--json"
    )
    found = json.loads(result.stdout)
    assert found["output"] == str(output)
    assert found["pipeline"] == "fold_constants fold_batch_norms(max_gain=1000000.0)"
    assert [step["applied"] for step in found["steps"]] == [0, 2]
    assert "BatchNormalization" not in {node.op_type for node in onnx.load(output).graph.node}
    assert "fold_batch_norms" in result.stderr


def test_transform_cuts_the_graph_at_named_tensors(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    arguments = ["--inputs", "bn1_out", "--outputs", "relu2_out"]
    tensors = {name for node in onnx.load(DIGITS).graph.node for name in node.output}
    assert {"bn1_out", "relu2_out"} <= tensors
    succeed("transform", DIGITS, output, "--transforms", "strip_unused_nodes", *arguments)
    graph = onnx.load(output).graph
    assert [value.name for value in graph.input] == ["bn1_out"]
    assert [value.name for value in graph.output] == ["relu2_out"]


ATTRIBUTES = {
    "LSTM": ("float[1,20,8] w, float[1,20,5] r", "all, y = LSTM <hidden_size = 5> (x, w, r)", "hidden_size"),
    "Constant": ("", "c = Constant <value_float = 2.0> () y = Mul(x, c)", "value_float"),
    "Attention": ("float[8,24] w, float[24] b", "y = com.microsoft.Attention <num_heads = 2> (x, w, b)", "num_heads"),
}


@pytest.mark.parametrize(("inputs", "nodes", "name"), ATTRIBUTES.values(), ids=ATTRIBUTES)
@pytest.mark.parametrize("rename", [False, True], ids=["removed", "renamed"])
def test_an_attribute_that_the_runtime_needs_stays(
    tmp_path: Path, inputs: str, nodes: str, name: str, rename: bool
) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
        f"g ({', '.join(filter(None, ('float[1,3,8] x', inputs)))}) => (float[A,B,C] y) {{ {nodes} }}"
    )
    model = tmp_path / "m.onnx"
    onnx.save(proto, model)
    ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    asked = f"remove_attribute(attribute_name={name})"
    if rename:
        asked = f"rename_attribute(old_attribute_name={name}, new_attribute_name=other)"
    place = f"m.onnx: after {asked.partition('(')[0]}: "
    refused(tmp_path, ["transform", model, tmp_path / "o.onnx", "--transforms", asked], place)


def test_transforms_lists_describes_and_prints_json() -> None:
    listed = [line.split()[0] for line in succeed("transforms").stdout.splitlines()]
    assert "fold_batch_norms" in listed
    assert listed == sorted(listed)
    for name in listed:
        page = succeed("transforms", name).stdout
        assert page.startswith(name)
        (found,) = json.loads(succeed("transforms", name, "--json").stdout).items()
        assert found[0] == name
        assert found[1]["summary"] in page
    assert sorted(json.loads(succeed("transforms", "--json").stdout)) == listed


# ------------------------------------------------------------------------------------------ a process of its own


def test_streams_and_exit_codes_of_the_process(tmp_path: Path, model: Path, data: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "requant.cli", *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    output = tmp_path / "int8.onnx"
    done = run("quantize", model, "--data", data, "-o", output, "--json", FORCE_INT8)
    assert (done.returncode, without_stages(done.stderr)) == (0, "")
    assert json.loads(done.stdout)["output"] == str(output)
    before = output.read_bytes()
    again = run("quantize", model, "--data", data, "-o", output)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"requant: {output}: exists already; --force overwrites it (in Python: force=True)\n"
    assert output.read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ('"$1" -m requant inspect "$2" --json >&-', 0, ""),
        (
            'mkdir gone; cd gone; rmdir ../gone; "$1" -m requant transform "$2" out.onnx --transforms fold_constants',
            2,
            "requant: the current folder has been removed; change to another one\n",
        ),
    ],
    ids=["stdout is closed", "the current folder is gone"],
)
def test_a_shell_that_took_something_away(tmp_path: Path, model: Path, line: str, code: int, says: str) -> None:
    command = ["sh", "-c", line, "sh", sys.executable, str(model)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", says)


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_progress_is_shown_where_stderr_is_a_terminal(tmp_path: Path, model: Path, data: Path) -> None:
    terminal, stderr = os.openpty()
    command = [sys.executable, "-m", "requant.cli", *map(str, REQUESTS["quantize"](model, data, tmp_path / "out"))]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=stderr) as process:
        os.close(stderr)
        shown = b""
        with suppress(OSError):  # Linux ends a terminal that nobody writes to with EIO
            while part := os.read(terminal, 4096):
                shown += part
        os.close(terminal)
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["output"] == str(tmp_path / "out")
    assert process.returncode == 0
    last = shown.split(b"inspect")[-1]
    assert last != shown
    assert b"0/?" in last  # not the count of an earlier stage


# -------------------------------------------------------------------------------------------- bad input: models

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f\x15\xc4\x89"
NO_MODELS = {
    "random": np.random.default_rng(0).bytes(5000),
    "text": b"this is no model\n" * 20,
    "empty": b"",
    "png": PNG,
    "zeros": bytes(1000),
}
Request = Callable[[Path, Path, Path], list[object]]
REQUESTS: dict[str, Request] = {
    "quantize": lambda model, data, out: ["quantize", model, "--data", data, "-o", out, FORCE_INT8],
    "calibrate": lambda model, data, out: ["calibrate", model, "--data", data, "-o", out],
    "log": lambda model, data, out: ["calibrate", model, "--data", data, "--log", out],
    "compare": lambda model, data, out: ["compare", model, model, "--data", data],
    "transform": lambda model, data, out: ["transform", model, out, "--transforms", "fold_constants"],
}
every_request = pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
WRITING = {name: request for name, request in REQUESTS.items() if name != "compare"}
every_writing_request = pytest.mark.parametrize("request_", WRITING.values(), ids=WRITING)
READING = {name: request for name, request in REQUESTS.items() if name in ("quantize", "calibrate", "compare")}
every_reading_request = pytest.mark.parametrize("request_", READING.values(), ids=READING)


@every_request
@pytest.mark.parametrize("content", NO_MODELS.values(), ids=NO_MODELS)
def test_what_is_not_a_model_is_refused(tmp_path: Path, data: Path, request_: Request, content: bytes) -> None:
    (tmp_path / "no.onnx").write_bytes(content)
    refused(tmp_path, request_(tmp_path / "no.onnx", data, tmp_path / "out"), "no.onnx: not an ONNX model")


@every_request
@pytest.mark.parametrize("share", [0.5, 0.99], ids=["half", "99%"])
def test_a_truncated_model_is_refused(tmp_path: Path, data: Path, request_: Request, share: float) -> None:
    content = DIGITS.read_bytes()
    (tmp_path / "cut.onnx").write_bytes(content[: int(len(content) * share)])
    refused(tmp_path, request_(tmp_path / "cut.onnx", data, tmp_path / "out"), "cut.onnx: ", "truncated")


@every_request
def test_a_missing_model_is_refused(tmp_path: Path, data: Path, request_: Request) -> None:
    refused(tmp_path, request_(tmp_path / "gone.onnx", data, tmp_path / "out"), "gone.onnx: no such file")


@every_request
def test_a_folder_is_no_model(tmp_path: Path, data: Path, request_: Request) -> None:
    (tmp_path / "folder.onnx").mkdir()
    refused(tmp_path, request_(tmp_path / "folder.onnx", data, tmp_path / "out"), "folder.onnx: is a folder")


@every_request
@pytest.mark.parametrize("length", [None, 100], ids=["missing", "short"])
def test_missing_external_data_are_refused(
    tmp_path: Path, model: Path, data: Path, request_: Request, length: int | None
) -> None:
    external, weights = write_external(model)
    if length is None:
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:length])
    refused(tmp_path, request_(external, data, tmp_path / "out"), "external.onnx: ", "weights.bin")


def test_a_model_with_external_data_is_quantized(tmp_path: Path, model: Path, data: Path) -> None:
    external, weights = write_external(model)
    (tmp_path / "elsewhere").mkdir()
    for command in ("quantize", "transform"):
        output = tmp_path / "elsewhere" / f"{command}.onnx"
        succeed(*REQUESTS[command](external, data, output))
        onnx.checker.check_model(output, full_check=True)
        assert list(output.parent.glob("*.bin")) == []
    arguments = ["quantize", external, "--data", data, "-o", tmp_path / "out.onnx", "--json", FORCE_INT8]
    found = json.loads(succeed(*arguments).stdout)
    assert found["size"]["float_bytes"] == external.stat().st_size + weights.stat().st_size


# ---------------------------------------------------------------------------------------------- bad input: data

BAD_DATA: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "wrong name": ({"imgae": images()}, ("'imgae'", "not an input of the model", "did you mean 'image'?")),
    "a further name": ({"image": images(), "extra": images()}, ("'extra'", "not an input of the model")),
    "only labels": ({"labels": np.arange(6)}, ("image",)),
    "wrong shape": ({"image": images()[:, :4]}, ("'image'", "expected float32 (N, 8, 6, 6)", "(1, 4, 6, 6)")),
    "wrong rank": ({"image": images()[0, 0]}, ("'image'", "(N, 8, 6, 6)", "(6, 6)")),
    "integers": ({"image": images().astype(np.int32)}, ("'image'", "expected float32 (N, 8, 6, 6)", "int32")),
    "bytes": ({"image": (255 * images()).astype(np.uint8)}, ("'image'", "expected float32", "uint8")),
    "complex": ({"image": images().astype(np.complex64)}, ("'image'", "complex64")),
    "text": ({"image": np.array(["a", "b"])}, ("'image'",)),
    "empty": ({"image": images()[:0]}, ("holds no samples",)),
    "nan": ({"image": np.where(np.arange(6)[:, None, None, None] == 4, np.nan, images())}, ("'image'", "nan")),
    "infinity": ({"image": np.where(images() > 3, np.float32(np.inf), images())}, ("'image'", "inf")),
}


@every_reading_request
@pytest.mark.parametrize(("arrays", "mentions"), BAD_DATA.values(), ids=BAD_DATA)
def test_data_that_do_not_fit_are_refused(
    tmp_path: Path, model: Path, request_: Request, arrays: dict[str, Any], mentions: tuple[str, ...]
) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    refused(tmp_path, request_(model, tmp_path / "bad.npz", tmp_path / "out"), "bad.npz", *mentions)


def test_the_infinity_above_is_one() -> None:
    assert images().max() > 3


@every_reading_request
@pytest.mark.parametrize("content", [b"", b"no archive", PNG], ids=["empty", "text", "png"])
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, model: Path, request_: Request, content: bytes) -> None:
    (tmp_path / "no.npz").write_bytes(content)
    refused(tmp_path, request_(model, tmp_path / "no.npz", tmp_path / "out"), "no.npz: ")


@every_reading_request
@pytest.mark.parametrize(
    ("source", "mention"),
    [
        ("gone.npz", "no such file"),
        ("gone", "no such file or folder"),
        ("gone.py:feeds", "no such file"),
        ("float.onnx", "cannot be read as data"),
        ("data.npz:calib", "no split named 'calib'"),
        ("no_such_module:feeds", "no_such_module: cannot be imported"),
    ],
    ids=["npz", "folder", "python", "other", "split", "module"],
)
def test_a_source_that_is_not_there_is_refused(
    tmp_path: Path,
    model: Path,
    data: Path,
    request_: Request,
    source: str,
    mention: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(tmp_path, request_(model, Path(source), tmp_path / "out"), mention)


@every_reading_request
def test_an_empty_folder_is_refused(tmp_path: Path, model: Path, request_: Request) -> None:
    (tmp_path / "folder").mkdir()
    refused(tmp_path, request_(model, tmp_path / "folder", tmp_path / "out"), "folder: ")


BAD_SOURCES = {
    "raises": (
        "def feeds():\n    raise ValueError('two\\nlines')\n    yield\n",
        "failed at sample 0: ValueError: two lines",
    ),
    "raises later": (
        "import numpy as np\ndef feeds():\n    yield {'image': np.ones((1, 8, 6, 6), 'f')}\n    raise OSError('gone')\n",
        "failed at sample 1: OSError: gone",
    ),
    "other name": ("def feed():\n    yield {}\n", "did you mean 'feed'?"),
    "no code": ("def feeds(:\n", "SyntaxError"),
    "no feeds": ("feeds = 3\n", "an int is neither an iterable of feeds nor a callable"),
    "nothing": ("def feeds():\n    return iter(())\n", "holds no samples"),
    "none": ("def feeds():\n    pass\n", "feeds"),
    "arguments": ("def feeds(n):\n    yield {}\n", "TypeError"),
    "arrays": ("def feeds():\n    yield [1, 2]\n", "expected a dict of arrays"),
}


@every_reading_request
@pytest.mark.parametrize(("code", "mention"), BAD_SOURCES.values(), ids=BAD_SOURCES)
def test_a_python_source_that_fails_is_refused(
    tmp_path: Path, model: Path, request_: Request, code: str, mention: str
) -> None:
    (tmp_path / "reader.py").write_text(code)
    refused(tmp_path, request_(model, Path(f"{tmp_path}/reader.py:feeds"), tmp_path / "out"), "reader.py", mention)


@pytest.mark.parametrize(
    ("labels", "mention"),
    [(np.zeros((6, 2), np.int64), "2 label(s) for 1 prediction(s)"), (np.arange(5), "labels")],
    ids=["two each", "too few"],
)
def test_labels_that_do_not_fit_are_refused(tmp_path: Path, model: Path, labels: Any, mention: str) -> None:
    np.savez(tmp_path / "bad.npz", image=images(), labels=labels)
    refused(tmp_path, ["compare", model, model, "--data", tmp_path / "bad.npz"], "bad.npz", mention)


@pytest.mark.parametrize("command", ["quantize", "compare"])
def test_a_batch_on_a_fixed_batch_axis_is_refused(tmp_path: Path, data: Path, command: str) -> None:
    fixed = write_model(tmp_path / "fixed.onnx", batch="1")
    arguments = REQUESTS[command](fixed, data, tmp_path / "out")
    refused(tmp_path, [*arguments, "--batch", "4"], "'image'", "(1, 8, 6, 6)", "no batch of 4")


# ------------------------------------------------------------------------------------------- bad input: outputs


@every_writing_request
@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_an_output_that_is_the_input_is_refused(
    tmp_path: Path, model: Path, data: Path, request_: Request, force: list[str]
) -> None:
    (tmp_path / "link.onnx").symlink_to(model)
    for output in (model, tmp_path / "link.onnx", tmp_path / ".." / tmp_path.name / "float.onnx"):
        refused(tmp_path, [*request_(model, data, output), *force], "would overwrite the input")


@every_writing_request
def test_an_existing_output_is_refused(tmp_path: Path, model: Path, data: Path, request_: Request) -> None:
    (tmp_path / "out").write_text("precious")
    refused(tmp_path, request_(model, data, tmp_path / "out"), "out: exists already", "--force")


@every_writing_request
@pytest.mark.parametrize(
    ("output", "mention"),
    [
        ("gone/out", "no folder"),
        ("float.onnx/out", "no folder"),
        ("folder", "is a folder"),
        ("/proc/out", "cannot write to '/proc'"),
        (256 * "x", "File name too long"),
    ],
    ids=["missing folder", "below a file", "a folder", "unwritable", "long name"],
)
def test_an_output_that_cannot_be_written_is_refused(
    tmp_path: Path, model: Path, data: Path, request_: Request, output: str, mention: str
) -> None:
    (tmp_path / "folder").mkdir()
    refused(tmp_path, request_(model, data, tmp_path / output), mention)


def test_merged_ranges_do_not_replace_their_sources(tmp_path: Path, model: Path, data: Path) -> None:
    for name in "ab":
        succeed("calibrate", model, "--data", data, "-o", tmp_path / f"{name}.json")
    for name in "ab":
        arguments = ["calibrate", "--merge", tmp_path / "a.json", tmp_path / "b.json", "-o", tmp_path / f"{name}.json"]
        refused(tmp_path, [*arguments, "--force"], f"{name}.json: --output would overwrite the input")


# ------------------------------------------------------------------------------------------- bad input: options

BAD_OPTIONS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "node": (["--exclude-nodes", "first,secnd"], ("no node named 'secnd'", "'second'")),
    "excluded operator": (["--exclude-ops", "conv"], ("no operator in the model named 'conv'", "'Conv'")),
    "included operator": (["--include-ops", "Conv,MaxPool"], ("no operator in the model named 'MaxPool'",)),
    "rule": (["--calibration", "minmaks"], ("minmaks", "'minmax'")),
    "no number": (["--calibration", "percentile(abc)"], ("percentile", "abc")),
    "percentage": (["--calibration", "percentile(101)"], ("percentile", "101")),
}


@pytest.mark.parametrize(("options", "mentions"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_options_that_nothing_answers_to_are_refused(
    tmp_path: Path, model: Path, data: Path, options: list[str], mentions: tuple[str, ...]
) -> None:
    refused(tmp_path, [*REQUESTS["quantize"](model, data, tmp_path / "out"), *options], *mentions)


def test_a_rule_is_refused_by_calibrate_too(tmp_path: Path, model: Path, data: Path) -> None:
    arguments = REQUESTS["calibrate"](model, data, tmp_path / "out")
    refused(tmp_path, [*arguments, "--calibration", "percentile(abc)"], "abc")


@pytest.mark.parametrize(
    "options",
    [["--format", "tflite"], ["--samples", "0"], ["--batch", "0"], ["--threads", "-1"], ["--samples", "many"]],
    ids=" ".join,
)
def test_values_that_an_option_does_not_take_are_a_usage_error(
    tmp_path: Path, model: Path, data: Path, options: list[str]
) -> None:
    before = snapshot(tmp_path)
    result = invoke(*REQUESTS["quantize"](model, data, tmp_path / "out"), *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Invalid value for '{options[0]}'" in result.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["calibrate"],
        ["calibrate", "-o", "out"],
        ["calibrate", "a.onnx", "b.onnx", "--data", "d", "-o", "out"],
        ["calibrate", "--data", "d", "--merge", "a.json", "b.json", "-o", "out"],
        ["calibrate", "--merge", "a.json", "b.json", "--log", "out"],
        ["calibrate", "--merge", "a.json", "-o", "out"],
    ],
    ids=["nothing", "no model", "two models", "data and merge", "merge to a log", "merge of one"],
)
def test_calibrate_wants_a_model_and_an_output(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "requant: give " in result.stderr


BAD_PIPELINES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "transform": ("fold_constants fold_batch_norm", 15, ("no transform named 'fold_batch_norm'", "'fold_batch_norms'")),
    "option": ("fold_batch_norms(maxgain=2)", 17, ("no parameter 'maxgain'", "'max_gain'")),
    "value": ("fold_batch_norms(max_gain=big)", 26, ("max_gain must be a number",)),
    "parenthesis": ("fold_batch_norms(max_gain=2", 16, ("never closed",)),
    "missing option": ("remove_nodes", 0, ("remove_nodes needs op",)),
}


@pytest.mark.parametrize(("pipeline", "at", "mentions"), BAD_PIPELINES.values(), ids=BAD_PIPELINES)
def test_a_wrong_pipeline_is_refused_with_the_place(
    tmp_path: Path, model: Path, pipeline: str, at: int, mentions: tuple[str, ...]
) -> None:
    arguments = ["transform", model, tmp_path / "out", "--transforms", pipeline]
    refused(tmp_path, arguments, *mentions, f"(at character {at + 1} of {pipeline!r})")


def test_an_unknown_tensor_or_transform_is_refused(tmp_path: Path, model: Path) -> None:
    arguments = ["transform", model, tmp_path / "out", "--transforms", "strip_unused_nodes"]
    refused(tmp_path, [*arguments, "--outputs", "score"], "no tensor named 'score'", "'scores'")
    refused(tmp_path, ["transforms", "fold_constant"], "no transform named 'fold_constant'", "'fold_constants'")


@pytest.mark.parametrize(
    ("content", "mention"),
    [
        (";nobody__print__;__requant_min_max:[0][1]\n", "no RequantizationRange node named 'nobody'"),
        ("nothing of the kind\n", "log"),
        ("", "log"),
        (None, "log"),
    ],
    ids=["other names", "no record", "empty", "missing"],
)
def test_a_log_that_names_nothing_of_the_graph_is_refused(
    tmp_path: Path, model: Path, content: str | None, mention: str
) -> None:
    dynamic, log = tmp_path / "dynamic.onnx", tmp_path / "some.log"
    succeed("transform", model, dynamic, "--transforms", "quantize_weights quantize_nodes")
    if content is not None:
        log.write_text(content)
    pipeline = f'freeze_requantization_ranges(min_max_log_file="{log}")'
    refused(tmp_path, ["transform", dynamic, tmp_path / "out", "--transforms", pipeline], mention)


@pytest.mark.parametrize(
    ("other", "mention"),
    [("CONVOLUTION.input", "other inputs"), ("CONVOLUTION.output", "other outputs")],
    ids=["inputs", "outputs"],
)
def test_models_that_do_not_belong_together_are_not_compared(
    tmp_path: Path, model: Path, data: Path, other: str, mention: str
) -> None:
    proto = onnx.load(model)
    if other.endswith("input"):
        proto.graph.input[0].name = proto.graph.node[0].input[0] = "picture"
    else:
        proto.graph.output[0].name = proto.graph.node[-1].output[0] = "logits"
    onnx.save(proto, tmp_path / "other.onnx")
    refused(tmp_path, ["compare", model, tmp_path / "other.onnx", "--data", data], "other.onnx", mention)


# ------------------------------------------------------------------------------------------- cut short


@pytest.mark.parametrize("stage", ["steps.judge.judge_pair", "steps.judge.time_models", "runtime.runtimes.profiled"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError], ids=lambda error: str(error.__name__))
def test_a_run_that_is_cut_short_leaves_no_file(
    tmp_path: Path,
    model: Path,
    data: Path,
    stage: str,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut_short(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"requant.quantize.{stage}", cut_short)
    (tmp_path / "old.onnx").write_text("precious")
    before = snapshot(tmp_path)
    result = invoke("quantize", model, "--data", data, "-o", tmp_path / "old.onnx", "--force")
    assert result.exit_code == (130 if error is KeyboardInterrupt else 2)
    assert len(result.stderr.splitlines()) == 1
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["logged.onnx", "--data", "d.npz", "--log", "min_max.log", "--calibration", "minmax"],
        ["--merge", "a.json", "b.json", "-o", "c.json", "--samples", "3"],
        ["--merge", "a.json", "b.json", "-o", "c.json", "--calibration", "minmax"],
    ],
    ids=["rule-of-a-log", "samples-of-a-merge", "rule-of-a-merge"],
)
def test_an_option_that_would_do_nothing_is_refused(arguments: list[str]) -> None:
    result = invoke("calibrate", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("requant: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--samples", ""),  # not --state
        ("--jsn", " Did you mean '--json'?"),
        ("--al", " Did you mean '--all'?"),
    ],
)
def test_a_wrong_option_names_only_near_ones(typed: str, hint: str) -> None:
    done = CliRunner().invoke(main, ["explain", "model.onnx", typed, "2"], prog_name="requant")
    told = f"requant: No such option '{typed}'.{hint} (see 'requant explain --help')\n"
    assert (done.exit_code, done.stderr) == (2, told)
