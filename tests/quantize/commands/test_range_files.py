"""Range files, logs and overrides through the command line: from `requant calibrate` to `requant quantize`."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper

from requant.calibration import load_ranges
from requant.calibration.runs.checkpoint import Checkpoint
from requant.cli import main
from requant.quantize.model import files
from requant.transforms.int8.existing import MADE_KEY

from ...texts import without_stages

pytestmark = pytest.mark.usefixtures("int8_wins")
DIGITS = Path(__file__).parents[3] / "sample_models" / "digits.onnx"
CHAIN = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[N,16,12,12] x) => (float[N,16,12,12] y) {{
  [one] a = Conv <pads = [1, 1, 1, 1]> (x, u)
  [act] r = {act}(a)
  [two] b = Conv <pads = [1, 1, 1, 1]> (r, v)
  [scale] s = Mul(b, k)
  [three] y = Conv <pads = [1, 1, 1, 1]> (s, w)
}}
"""
PLANNED = {"x", "r", "s", "y"}  # Relu runs inside the first Conv, and the factor goes into the weights of the second


def invoke(*arguments: object) -> Result:
    """Run ``requant`` with these arguments in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")


def succeed(*arguments: object) -> Result:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def quantized(model: Path, output: Path, *arguments: object) -> dict[str, Any]:
    """Return what ``requant quantize --json`` prints, whether or not the INT8 model is worth having."""
    place = [] if "--place" in arguments else ["--place", "rules"]  # so that the clock does not decide what has a range
    effort = [] if "--effort" in arguments else ["--effort", "low"]
    forced = ["quantize", model, "-o", output, "--json", "--force-int8", *place, *effort]
    found: dict[str, Any] = json.loads(succeed(*forced, *arguments).stdout)
    return found


def refused(folder: Path, arguments: Sequence[object], *mentions: str) -> None:
    """Assert that a request gets one clear line and exit code 2, and leaves no file behind."""
    before = sorted(folder.iterdir())
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output or repr(result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("requant: ")
    for mention in mentions:
        assert mention in line
    assert sorted(folder.iterdir()) == before


def write_model(path: Path, *, act: str = "Relu", seed: int = 0) -> Path:
    """Write three convolutions; `seed` makes the weights of the last."""
    proto = onnx.parser.parse_model(CHAIN.format(act=act))
    for index, name in enumerate("uvw"):
        generator = np.random.default_rng(index if name != "w" else index + seed)
        array = generator.standard_normal((16, 16, 3, 3)).astype(np.float32) / 12
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(2).reshape(1), "k"))
    onnx.checker.check_model(proto)
    onnx.save(proto, path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "float.onnx")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    arrays = np.random.default_rng(1).standard_normal((7, 16, 12, 12)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=arrays)
    return tmp_path / "data.npz"


def reasons(found: dict[str, Any]) -> dict[str, str]:
    return {node["name"]: node["reason"] for node in found["float_nodes"]}


def scales(path: Path) -> dict[str, Any]:
    """Return the scale of the pair behind each tensor."""
    graph = onnx.load(path).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    return {node.input[0]: constants[node.input[1]][()] for node in nodes}


def emitted(path: Path) -> bytes:
    """Return a model without the entry of its metadata that says from which files it was made."""
    model = onnx.load(path)
    (entry,) = (each for each in model.metadata_props if each.key == MADE_KEY)
    model.metadata_props.remove(entry)
    return bytes(model.SerializeToString())


# ---------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("rule", ["minmax", "percentile(99)", "percentile", "mean_minmax", "mse"])
def test_ranges_from_a_file_give_the_same_model_as_the_data(tmp_path: Path, model: Path, data: Path, rule: str) -> None:
    succeed("calibrate", model, "--data", data, "--calibration", rule, "-o", tmp_path / "r.json")
    direct = quantized(model, tmp_path / "direct.onnx", "--data", data, "--calibration", rule)
    filed = quantized(model, tmp_path / "filed.onnx", "--data", data, "--ranges", tmp_path / "r.json")
    assert emitted(tmp_path / "filed.onnx") == emitted(tmp_path / "direct.onnx")
    assert direct["int8_nodes"] > 0
    assert filed["calibration"] == direct["calibration"]
    assert filed["ranges"] == f"{tmp_path / 'r.json'}: 7 samples of {data}"
    assert direct["ranges"] == ""


def test_ranges_from_a_log_give_the_same_parameters_as_the_data(tmp_path: Path, model: Path, data: Path) -> None:
    succeed("calibrate", model, "--data", data, "--log", tmp_path / "min_max.log")
    quantized(model, tmp_path / "direct.onnx", "--data", data, "--calibration", "minmax")
    logged = quantized(model, tmp_path / "logged.onnx", "--data", data, "--ranges", tmp_path / "min_max.log")
    direct, through = onnx.load(tmp_path / "direct.onnx"), onnx.load(tmp_path / "logged.onnx")
    assert logged["calibration"] == "log"
    assert through.graph == direct.graph  # biases and what corrects them included


@pytest.mark.slow
def test_another_rule_chooses_from_the_statistics_of_the_file(tmp_path: Path, model: Path, data: Path) -> None:
    succeed("calibrate", model, "--data", data, "--calibration", "percentile(99)", "-o", tmp_path / "r.json")
    anew = ["--ranges", tmp_path / "r.json", "--calibration", "percentile(90)", "--symmetric"]
    quantized(model, tmp_path / "anew.onnx", "--data", data, *anew)
    quantized(model, tmp_path / "direct.onnx", "--data", data, "--calibration", "percentile(90)", "--symmetric")
    assert emitted(tmp_path / "anew.onnx") == emitted(tmp_path / "direct.onnx")
    succeed("calibrate", model, "--data", data, "--calibration", "minmax", "-o", tmp_path / "extremes.json")
    arguments = ["quantize", model, "--ranges", tmp_path / "extremes.json", "-o", tmp_path / "out"]
    refused(tmp_path, [*arguments, "--calibration", "percentile"], "extremes.json: ", "needs histograms")


def test_without_data_the_ranges_are_used_and_the_result_is_not_judged(tmp_path: Path, model: Path, data: Path) -> None:
    succeed("calibrate", model, "--data", data, "-o", tmp_path / "r.json")
    quantized(model, tmp_path / "direct.onnx", "--data", data, "--calibration", "auto", "--effort", "low")
    found = quantized(model, tmp_path / "out.onnx", "--ranges", tmp_path / "r.json", "--effort", "low")
    assert emitted(tmp_path / "out.onnx") == emitted(tmp_path / "direct.onnx")
    assert any("the accuracy is not measured, since random inputs cannot judge it" in note for note in found["notes"])
    assert [found[name] for name in ("agreement", "predicted_drop", "sqnr_db")] == [None, None, None]
    arguments = ["quantize", model, "--ranges", tmp_path / "r.json", "-o", tmp_path / "other", "--samples", "3"]
    refused(tmp_path, arguments, "no data, so that samples would do nothing")


def test_ranges_that_were_chosen_for_other_zero_points_are_told(tmp_path: Path, model: Path, data: Path) -> None:
    succeed("calibrate", model, "--data", data, "--calibration", "mse", "-o", tmp_path / "r.json")
    arguments = ["--data", data, "--ranges", tmp_path / "r.json"]
    assert not quantized(model, tmp_path / "same.onnx", *arguments)["notes"]
    (note,) = quantized(model, tmp_path / "out.onnx", *arguments, "--symmetric")["notes"]
    assert "r.json: the ranges were chosen for other zero points; calibration 'mse' chooses new ones" in note


@pytest.mark.slow
def test_the_documentation_does_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/calibration.md, in a folder with the sample models."""
    root = Path(__file__).parents[3]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample_models").symlink_to(root / "sample_models")
    text = (root / "docs" / "calibration.md").read_text().replace("$D", "sample_models/digits.npz")
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    commands = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert {command[0] for command in commands if command} == {"requant"}
    settled = ["--force-int8", "--place", "rules"]  # so that the clock decides over nothing
    for command in commands:
        if command:
            succeed(*command[1:], *settled * (command[1] == "quantize"))
    assert Path("both.json").read_bytes() == Path("processes.json").read_bytes()
    assert Path("merged.json").read_bytes() == Path("processes.json").read_bytes()
    assert Path("digits_int8.onnx").exists()
    (overrides,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    Path("mine.toml").write_text(overrides)
    arguments = ["--ranges", "ranges.json", "--overrides", "mine.toml", "-o", "own.onnx", *settled]
    succeed("quantize", "sample_models/digits.onnx", *arguments)
    assert scales(Path("own.onnx"))["relu2_out"] == np.float32(6) / np.float32(255)


# ---------------------------------------------------------------------------------------------------- other models


def test_a_file_of_another_model_is_refused_with_where_it_differs(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed("calibrate", model, "--data", data, "-o", tmp_path / "r.json")
    monkeypatch.delattr("requant.quantize.steps.reference.open_for")  # it is refused before the data are looked at
    monkeypatch.delattr("requant.quantize.steps.reference.generated_source")
    last, act = write_model(tmp_path / "last.onnx", seed=1), write_model(tmp_path / "act.onnx", act="Tanh")
    for other, said in (
        (last, "computed differently: 'y')"),
        (act, "computed differently: 'r', and 2 tensors after it"),
    ):
        for more in ([], ["--data", data]):
            arguments = ["quantize", other, "--ranges", tmp_path / "r.json", *more, "-o", tmp_path / "out"]
            refused(tmp_path, arguments, "r.json: ranges of another model than", said, "calibrate this one")


def test_a_file_that_is_none_is_refused(tmp_path: Path, model: Path) -> None:
    arguments = ["quantize", model, "--ranges", tmp_path / "r.json", "-o", tmp_path / "out"]
    refused(tmp_path, arguments, "r.json: no such file")
    (tmp_path / "r.json").write_text('{"schema": 1}')
    refused(tmp_path, arguments, "r.json: range file of schema 1; this program reads 2: calibrate again")
    (tmp_path / "r.json").write_bytes(b"")
    refused(tmp_path, arguments, "[lo][hi], and not a range file, a JSON object, either")


# ---------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("batch", ["1", "2"])
def test_shards_merge_to_the_file_of_one_run(tmp_path: Path, model: Path, data: Path, batch: str) -> None:
    common = ["calibrate", model, "--data", data, "--batch", batch, "--calibration", "percentile(99)", "-o"]
    succeed(*common, tmp_path / "whole.json")
    parts = [tmp_path / f"{part}.json" for part in "abc"]
    for index, part in enumerate(parts):
        succeed(*common, part, "--shard", f"{index + 1}/3")
    for order in permutations(parts):
        succeed("calibrate", "--merge", *order, "-o", tmp_path / "merged.json", "--force")
        assert (tmp_path / "merged.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert sum(load_ranges(part).samples for part in parts) == 7
    refused(tmp_path, ["calibrate", "--merge", *parts, parts[1], "-o", tmp_path / "out"], "shard 2/3", "twice")
    found = quantized(model, tmp_path / "out.onnx", "--ranges", parts[1], "--data", data)
    assert any("the data of shard 2/3 only" in note for note in found["notes"])


def test_nothing_but_the_outputs_is_left(tmp_path: Path, model: Path, data: Path) -> None:
    (tmp_path / "out").mkdir()
    succeed("calibrate", model, "--data", data, "-o", tmp_path / "out" / "r.json", "--log", tmp_path / "out" / "r.log")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["r.json", "r.log"]


@pytest.mark.parametrize(
    "options",
    [
        ["--memory-limit", "much"],
        ["--memory-limit", "2XB"],
        ["--memory-limit", "9" * 400 + "GB"],
        ["--shard", "3/2"],
        ["--shard", "0/2"],
        ["--batch", "0"],
    ],
    ids=" ".join,
)
def test_values_that_an_option_does_not_take(tmp_path: Path, model: Path, data: Path, options: list[str]) -> None:
    arguments = ["calibrate", model, "--data", data, "-o", tmp_path / "out", *options]
    refused(tmp_path, arguments, f"Invalid value for '{options[0]}'")


READER = """
import os
from pathlib import Path
import numpy as np

class Feeds(list):
    def __getitem__(self, index):
        Path(__file__).with_name(f"read-by-{os.getpid()}").touch()
        return {"x": super().__getitem__(index)[None]}

feeds = Feeds(np.load(Path(__file__).with_name("data.npz"))["x"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["calibrate", "quantize"])
def test_processes_give_the_same_file(tmp_path: Path, model: Path, data: Path, command: str) -> None:
    data.with_name("reader.py").write_text(READER)
    common = [command, model, "--data", f"{tmp_path}/reader.py:feeds", "--calibration", "mse", "-o"]
    succeed(*common, tmp_path / "here")
    assert [path.name for path in tmp_path.glob("read-by-*")] == [f"read-by-{os.getpid()}"]
    succeed(*common, tmp_path / "there", "--executor", "processes", "--workers", "1", "--memory-limit", "1GB")
    assert len(list(tmp_path.glob("read-by-*"))) == 2
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("running", [False, True], ids=["started", "running"])
def test_dask_gives_the_same_file(tmp_path: Path, model: Path, data: Path, running: bool) -> None:
    succeed("calibrate", model, "--data", data, "-o", tmp_path / "a.json")
    command = ["calibrate", model, "--data", data, "-o", tmp_path / "b.json", "--workers", "2"]
    with ExitStack() as stack:
        if running:
            own = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
            cluster = stack.enter_context(pytest.importorskip("distributed").LocalCluster(**own))
            command += ["--scheduler", cluster.scheduler_address]  # that it is Dask's goes without saying
        else:
            command += ["--executor", "dask"]
        done = subprocess.run(
            [sys.executable, "-m", "requant.cli", *map(str, command)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert without_stages(done.stderr).splitlines()[0] == f"{tmp_path / 'b.json'}: 4 tensors, 7 samples"
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.slow
def test_executors_that_cannot_be_are_refused(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("requant.calibration.runs.executors.CONNECT_SECONDS", 0.5)
    arguments = ["calibrate", model, "--data", data, "-o", tmp_path / "out"]
    refused(tmp_path, [*arguments, "--executor", "threds"], "Invalid value for '--executor'", "'threads'")
    refused(
        tmp_path,
        [*arguments, "--executor", "processes", "--scheduler", "tcp://a:1"],
        "--scheduler needs --executor dask",
    )
    scheduler = ["--executor", "dask", "--scheduler", "tcp://127.0.0.1:9"]
    for command in (arguments, ["quantize", *arguments[1:]]):
        refused(tmp_path, [*command, *scheduler], "tcp://127.0.0.1:9: no Dask scheduler answers")


@pytest.mark.parametrize(
    "options", [["--workers", "2"], ["--executor", "processes"], ["--memory-limit", "1GB"]], ids=" ".join
)
def test_how_ranges_would_be_observed_where_none_are(
    tmp_path: Path, model: Path, data: Path, options: list[str]
) -> None:
    succeed("calibrate", model, "--data", data, "-o", tmp_path / "r.json")
    arguments = ["quantize", model, "--data", data, "--ranges", tmp_path / "r.json", "-o", tmp_path / "out"]
    refused(tmp_path, [*arguments, *options], f"{options[0]} would do nothing: no ranges are observed")
    refused(tmp_path, ["quantize", model, "--dynamic", "-o", tmp_path / "out", *options], f"{options[0]} would do")


# ---------------------------------------------------------------------------------------------------- interruptions

SLOW = """
import os, time
from pathlib import Path
import numpy as np

def feeds():
    for x in np.load(Path(__file__).with_name("many.npz"))["x"]:
        time.sleep(float(os.environ["DELAY"]))
        yield {"x": x[None]}
"""
PROGRAM = """
from requant.calibration import checkpoint
from requant.cli import main

checkpoint.SECONDS, checkpoint.SHARE = 0.0, 1e9  # after every piece of work
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
def test_the_same_command_goes_on_where_it_stopped(tmp_path: Path, model: Path, sent: signal.Signals) -> None:
    np.savez(tmp_path / "many.npz", x=np.random.default_rng(1).standard_normal((40, 16, 12, 12)).astype(np.float32))
    (tmp_path / "slow.py").write_text(SLOW)

    def start(output: str, delay: float) -> subprocess.Popen[str]:
        options = ["--data", "slow.py:feeds", "--calibration", "mse", "--workers", "1", "-o", output, "--json"]
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "calibrate", str(model), *options],
            env={**os.environ, "DELAY": str(delay)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    whole = start("whole.json", 0)
    told, error = whole.communicate(timeout=60)
    assert whole.returncode == 0, error
    running = start("cut.json", 0.2)  # of 8 seconds
    while not list(tmp_path.glob(".cut.json.checkpoint-*")):
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(sent)
    _, error = running.communicate(timeout=60)
    assert not (tmp_path / "cut.json").exists()
    (left,) = tmp_path.glob(".cut.json.checkpoint-*")
    assert 0 < json.loads(left.read_bytes())["seen"]["samples"] < 40
    if sent == signal.SIGINT:
        assert running.returncode == 130
        assert without_stages(error) == "requant: interrupted; the same command goes on where it stopped\n"
    resumed = start("cut.json", 0)
    again, error = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, error
    assert (tmp_path / "cut.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert json.loads(again) == {**json.loads(told), "output": "cut.json"}
    assert {path.name.split("-")[0] for path in tmp_path.glob(".*")} <= {".requant"}  # of who had no time to clean up


class Interruption:
    """An interruption of a program in front of its n-th call of a function."""

    def __init__(self, then: Any, calls: int) -> None:
        self.then, self.left = then, calls

    def __call__(self, *arguments: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return self.then(*arguments)


GOES_ON = (130, "", "requant: interrupted; the same command goes on where it stopped\n")


@pytest.mark.parametrize("staged", [False, True], ids=["inside", "staged"])
@pytest.mark.parametrize(
    ("place", "calls"),
    [
        ("requant.calibration.runs.checkpoint.Checkpoint.add", 2),
        ("requant.quantize.steps.calibrate.inspect_data", 1),
        ("requant.calibration.save_ranges", 1),
    ],
    ids=["running", "findings", "saving"],
)
def test_whatever_is_interrupted_goes_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, place: str, calls: int, staged: bool
) -> None:
    monkeypatch.setattr("requant.calibration.runs.checkpoint.SECONDS", 0.0)
    if staged:  # in a file with a name that no other run gives it
        monkeypatch.setattr("requant.quantize.model.files.INSIDE", 2000)
    x = np.random.default_rng(1).standard_normal((40, 16, 12, 12)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    arguments = ["calibrate", model, "--data", tmp_path / "data.npz", "--calibration", "mse", "--workers", "1", "-o"]
    succeed(*arguments, tmp_path / "whole.json")
    module, _, name = place.rpartition(".")
    owner = Checkpoint if name == "add" else importlib.import_module(module)
    for _ in range(2):  # the second run has nothing to add where the first one was complete
        with monkeypatch.context() as patch:
            interruption = Interruption(getattr(owner, name), calls)
            patch.setattr(owner, name, lambda *given, then=interruption: then(*given))
            result = invoke(*arguments, tmp_path / "cut.json")
        assert (result.exit_code, result.stdout, result.stderr) == GOES_ON
    (left,) = tmp_path.glob(".*")
    assert json.loads(left.read_bytes())["complete"] is (name != "add")
    done: list[int] = []
    add = Checkpoint.add

    def count(self: Checkpoint, units: Any, seen: Any) -> None:
        done.extend(units)
        add(self, units, seen)

    monkeypatch.setattr(Checkpoint, "add", count)
    succeed(*arguments, tmp_path / "cut.json")
    assert 0 < len(done) < 40 if name == "add" else not done
    assert (tmp_path / "cut.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_weights_that_changed_under_the_same_model_are_another_run(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of the whole model tells, though the file that names the weights is the same."""
    proto = onnx.load(model)
    onnx.save(proto, model, save_as_external_data=True, location="w.bin", size_threshold=0)
    arguments = ["calibrate", model, "--data", data, "-o", tmp_path / "r.json"]
    with monkeypatch.context() as patch:
        patch.setattr("requant.calibration.save_ranges", Interruption(None, 1))
        assert invoke(*arguments).exit_code == 130
    bits = bytearray((tmp_path / "w.bin").read_bytes())
    bits[3] ^= 0x80  # the sign of one weight
    (tmp_path / "w.bin").write_bytes(bits)
    succeed(*arguments)
    succeed(*arguments[:-1], tmp_path / "fresh.json")
    assert (tmp_path / "r.json").read_bytes() == (tmp_path / "fresh.json").read_bytes()


@pytest.mark.slow
def test_weights_are_staged_where_workers_see_them(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Path] = []
    move = files._move

    def moved(weights: Any, folder: Path) -> None:
        places.append(folder.parent)
        move(weights, folder)

    monkeypatch.setattr(files, "INSIDE", 2000)
    monkeypatch.setattr(files, "_move", moved)
    (tmp_path / "out").mkdir()
    succeed("calibrate", model, "--data", data, "-o", tmp_path / "out" / "r.json", "--executor", "processes")
    assert set(places) == {tmp_path / "out"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["r.json"]


def test_a_checkpoint_that_another_run_removes_meanwhile(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Path.iterdir
    gone = tmp_path / ".r.json.checkpoint-01234567"
    monkeypatch.setattr(Path, "iterdir", lambda self: iter([gone, *names(self)]))
    succeed("calibrate", model, "--data", data, "-o", tmp_path / "r.json")


def test_an_interruption_before_there_is_anything_to_go_on_with(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / ".out.checkpoint-01234567").write_text("of another run")
    monkeypatch.setattr("requant.quantize.steps.calibrate.prepare", interrupt)
    result = invoke("calibrate", model, "--data", data, "-o", tmp_path / "out")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "requant: interrupted\n")


def test_an_interruption_that_makes_a_library_fail(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("cannot join thread before it is started")

    monkeypatch.setattr("requant.quantize.steps.calibrate.prepare", interrupt)
    result = invoke("calibrate", model, "--data", data, "-o", tmp_path / "out")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "requant: interrupted\n")


@pytest.mark.parametrize("limit", ["2GB", "1.5 GiB", "900000000"])
def test_how_the_model_is_run_does_not_change_the_file(tmp_path: Path, model: Path, data: Path, limit: str) -> None:
    succeed("calibrate", model, "--data", data, "-o", tmp_path / "a.json")
    succeed("calibrate", model, "--data", data, "-o", tmp_path / "b.json", "--memory-limit", limit, "--workers", "2")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


# ---------------------------------------------------------------------------------------------------- logs


def test_a_float_model_gives_a_log_and_a_range_file_from_one_run(tmp_path: Path, model: Path, data: Path) -> None:
    arguments = ["--data", data, "-o", tmp_path / "r.json", "--log", tmp_path / "r.log", "--json"]
    found = json.loads(succeed("calibrate", model, *arguments, "--calibration", "percentile(90)").stdout)
    file = load_ranges(tmp_path / "r.json")
    assert found["tensors"] == {name: {"lo": lo, "hi": hi} for name, (lo, hi) in file.ranges.items()}
    assert found["samples"] == 7
    assert found["rule"] == "percentile(90)"
    assert (found["output"], found["log"]) == (str(tmp_path / "r.json"), str(tmp_path / "r.log"))
    assert set(file.ranges) == PLANNED
    lines = {
        f";{name}__print__;__requant_min_max:[{seen.lo!r}][{seen.hi!r}]"  # of all values, whatever the rule
        for name, seen in file.seen.ranges.items()
    }
    assert set((tmp_path / "r.log").read_text().splitlines()) == lines


def test_tensors_that_a_log_does_not_name_stay_float(tmp_path: Path, model: Path, data: Path) -> None:
    log = tmp_path / "some.log"
    log.write_text(";x__print__;__min:[-4]\n;x__print__;__max:[4]\n;r__print__;__requant_min_max:[0][3]\nhello\n")
    found = quantized(model, tmp_path / "out.onnx", "--ranges", log, "--data", data)
    assert f"has no range in {log}" in reasons(found).values()
    assert set(scales(tmp_path / "out.onnx")) <= {"x", "r"}
    assert scales(tmp_path / "out.onnx")["r"] == np.float32(3) / np.float32(255)
    assert [note for note in found["notes"] if "has no range" in note] == [
        f"{log}: has no range of 's', 'y': operators that need one stay float"
    ]


def test_tensors_that_a_range_file_lacks_are_told(tmp_path: Path, model: Path, data: Path) -> None:
    ranges = tmp_path / "ranges.json"
    succeed("calibrate", model, "--data", data, "-o", ranges)
    found = quantized(model, tmp_path / "whole.onnx", "--ranges", ranges)
    assert not [note for note in found["notes"] if "has no range" in note]
    document = json.loads(ranges.read_text())
    del document["tensors"]["r"]
    ranges.write_text(json.dumps(document))
    found = quantized(model, tmp_path / "int8.onnx", "--ranges", ranges)
    assert [note for note in found["notes"] if "has no range" in note] == [
        f"{ranges}: has no range of 'r': operators that need one stay float"
    ]


def test_logs_that_do_not_fit_are_refused(tmp_path: Path, model: Path, data: Path) -> None:
    log = tmp_path / "some.log"
    arguments = ["quantize", model, "--data", data, "--ranges", log, "-o", tmp_path / "out"]
    log.write_text(";x__print__;__requant_min_max:[0][3]\n;rr__print__;__requant_min_max:[0][3]\n")
    refused(tmp_path, arguments, "some.log: no tensor named 'rr'; did you mean 'r'?")
    log.write_text(";x__print__;__requant_min_max:[0][3]\n;r__print__;__requant_min_max:[3]\n")
    refused(tmp_path, [*arguments, "--calibration", "minmax"], "some.log: a log has no statistics for the rule minmax")
    assert f"{log}: 1 records cannot be read" in quantized(model, tmp_path / "o.onnx", *arguments[2:6])["notes"]
    log.write_text("hello\n")
    refused(tmp_path, arguments, "some.log: no range in this log")


def test_a_logging_model_takes_no_options_of_range_files(tmp_path: Path, data: Path) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\nnet (float[N,16,12,12] x) => (float l) { l = ReduceMax<keepdims=0>(x) }'
    )
    proto.graph.node[0].output[0] = proto.graph.output[0].name = ";x__print__;__max:"
    onnx.save(proto, tmp_path / "logging.onnx")
    arguments = ["calibrate", tmp_path / "logging.onnx", "--data", data, "--log", tmp_path / "out"]
    refused(tmp_path, [*arguments, "-o", tmp_path / "r.json"], "give -o RANGES.json or --log FILE, not both")
    refused(tmp_path, [*arguments, "--shard", "1/2"], "--shard would do nothing", "is a logging model")
    found = json.loads(succeed(*arguments, "--json").stdout)
    assert found == {"log": str(tmp_path / "out"), "lines": 7}


# ---------------------------------------------------------------------------------------------------- overrides


def overrides(folder: Path, text: str) -> Path:
    (folder / "mine.toml").write_text(text)
    return folder / "mine.toml"


def test_overrides_win(tmp_path: Path, model: Path, data: Path) -> None:
    text = "[tensors.r]\nrange = [0.0, 6.0]\n[tensors.x]\nrule = 'percentile(99.9)'\n[tensors.y]\nfloat = true\n"
    mine = overrides(tmp_path, text)
    quantized(model, tmp_path / "plain.onnx", "--data", data)
    quantized(model, tmp_path / "narrow.onnx", "--data", data, "--calibration", "percentile(99.9)")
    found = quantized(model, tmp_path / "own.onnx", "--data", data, "--overrides", mine)
    plain, narrow, own = (scales(tmp_path / f"{name}.onnx") for name in ("plain", "narrow", "own"))
    assert own["r"] == np.float32(6) / np.float32(255)
    assert own["x"] == narrow["x"] < plain["x"]
    assert own["s"] == plain["s"]
    assert "y/float" in plain
    assert not own.keys() & {"y", "y/float"}
    assert found["notes"] == []


def test_overrides_at_calibrating_and_at_quantizing_come_to_the_same(tmp_path: Path, model: Path, data: Path) -> None:
    mine = overrides(tmp_path, "[tensors.r]\nrange = [0.0, 6.0]\n[tensors.x]\nrule = 'percentile(99.9)'\n")
    succeed("calibrate", model, "--data", data, "--overrides", mine, "-o", tmp_path / "r.json")
    assert load_ranges(tmp_path / "r.json").ranges["r"] == (0.0, 6.0)
    quantized(model, tmp_path / "direct.onnx", "--data", data, "--overrides", mine, "--effort", "medium")
    quantized(model, tmp_path / "filed.onnx", "--data", data, "--ranges", tmp_path / "r.json", "--effort", "medium")
    assert emitted(tmp_path / "filed.onnx") == emitted(tmp_path / "direct.onnx")
    mine.write_text("[tensors.r]\nrange = [0.0, 3.0]\n")
    quantized(model, tmp_path / "again.onnx", "--ranges", tmp_path / "r.json", "--overrides", mine)
    assert scales(tmp_path / "again.onnx")["r"] == np.float32(3) / np.float32(255)
    assert scales(tmp_path / "again.onnx")["x"] == scales(tmp_path / "direct.onnx")["x"]


@pytest.mark.parametrize(
    "place", ["all", *(pytest.param(how, marks=pytest.mark.slow) for how in ("rules", "estimated"))]
)
def test_a_result_that_is_to_stay_float_does_wherever_int8_is_placed(
    tmp_path: Path, model: Path, data: Path, place: str
) -> None:
    """The last product then writes float, or computes in it."""
    for name, tensor, source in ((model, "y", data), (DIGITS, "logits", f"{DIGITS.with_suffix('.npz')}:calib")):
        mine = overrides(tmp_path, f"[tensors.{tensor}]\nfloat = true\n")
        output = tmp_path / f"{tensor}.onnx"
        quantized(name, output, "--data", source, "--overrides", mine, "--place", place)
        assert not scales(output).keys() & {tensor, f"{tensor}/float"}


def test_overrides_of_tensors_in_a_log(tmp_path: Path, model: Path, data: Path) -> None:
    succeed("calibrate", model, "--data", data, "--log", tmp_path / "r.log")
    mine = overrides(tmp_path, "[tensors.r]\nrange = [0.0, 6.0]\n[tensors.y]\nfloat = true\n")
    arguments = ["--ranges", tmp_path / "r.log", "--overrides", mine]
    quantized(model, tmp_path / "out.onnx", *arguments)
    assert scales(tmp_path / "out.onnx")["r"] == np.float32(6) / np.float32(255)
    assert not scales(tmp_path / "out.onnx").keys() & {"y", "y/float"}
    mine.write_text("[tensors.r]\nrule = 'minmax'\n")
    refused(
        tmp_path,
        ["quantize", model, *arguments, "-o", tmp_path / "o"],
        "mine.toml: tensor 'r': a rule cannot choose",
        "r.log",
    )


def test_overrides_win_over_pairs_in_the_model(tmp_path: Path) -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    net (float[N,64] x) => (float[N,64] y)
    <float scale = {1.0}, uint8 zero = {128}> {
      r = Relu(x)
      q = QuantizeLinear(r, scale, zero)
      d = DequantizeLinear(q, scale, zero)
      [product] y = MatMul(d, w)
    }
    """
    proto = onnx.parser.parse_model(text)
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(proto, tmp_path / "pairs.onnx")
    np.savez(tmp_path / "data.npz", x=20 * np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32))
    arguments = ["--data", tmp_path / "data.npz", "--force-int8"]
    quantized(tmp_path / "pairs.onnx", tmp_path / "plain.onnx", *arguments)
    assert scales(tmp_path / "plain.onnx") == {"r": 1}  # the model's own pair serves the product too
    mine = overrides(tmp_path, "[tensors.d]\nrange = [0, 127.5]\n")
    quantized(tmp_path / "pairs.onnx", tmp_path / "own.onnx", *arguments, "--overrides", mine)
    assert scales(tmp_path / "own.onnx") == {"r": 1, "d": 0.5}


def test_overrides_that_decide_nothing_are_told(tmp_path: Path, model: Path, data: Path) -> None:
    mine = overrides(
        tmp_path, "[tensors.b]\nrange = [0, 1]\n[tensors.s]\nrange = [0, 1]\n[tensors.w]\nrange = [0, 1]\n"
    )
    notes = quantized(model, tmp_path / "out.onnx", "--data", data, "--overrides", mine, "--exclude-nodes", "two,three")
    assert notes["notes"] == [
        f"{mine}: tensor 'b' was folded into its neighbours by simplification",
        f"{mine}: the range of tensor 's' is not used: it stays float",
        f"{mine}: the range of tensor 'w' is not used: it is a constant",
    ]


@pytest.mark.parametrize("command", ["quantize", "calibrate"])
def test_overrides_that_do_not_fit_are_refused(tmp_path: Path, model: Path, data: Path, command: str) -> None:
    mine = overrides(tmp_path, "[tensors.scor]\nfloat = true\n[tensors.rr]\nfloat = true\n")
    arguments = [command, model, "--data", data, "--overrides", mine, "-o", tmp_path / "out"]
    refused(tmp_path, arguments, "mine.toml: no tensor named 'scor'")
    mine.write_text("[tensors.r]\nrange = [1, 0]\n")
    refused(tmp_path, arguments, "mine.toml: tensor 'r': the lower end of 'range' is above the upper")
    refused(tmp_path, [*arguments[:-4], "--overrides", "gone.toml", "-o", tmp_path / "out"], "gone.toml: no such file")


def test_overrides_alone_are_no_ranges(tmp_path: Path, model: Path) -> None:
    mine = overrides(tmp_path, "[tensors.r]\nrange = [0, 1]\n")
    arguments = ["quantize", model, "--dynamic", "--overrides", mine, "-o", tmp_path / "out"]
    refused(tmp_path, arguments, "overrides would do nothing")


# ---------------------------------------------------------------------------------------------------- broken tensors

ROOT = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[N,64] x) => (float[N,64] y) {
  [root] s = Sqrt(x)
  [product] p = MatMul(s, w)
  nan = IsNaN(p)
  c = Where(nan, zero, p)
  [last] y = MatMul(c, w)
}
"""


def write_root(folder: Path, text: str) -> Any:
    """Write the model, and data with one negative number in sample 3; return the data."""
    proto = onnx.parser.parse_model(text)
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    for name, array in (("w", weights), ("zero", np.zeros(1, np.float32))):
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(proto, folder / "root.onnx")
    x = np.abs(np.random.default_rng(1).standard_normal((5, 64))).astype(np.float32)
    x[3, 0] = -1
    np.savez(folder / "data.npz", x=x)
    return x


def test_a_tensor_that_is_not_finite_stays_float(tmp_path: Path) -> None:
    x = write_root(tmp_path, ROOT)
    said = f"holds NaN or infinity: {tmp_path / 'data.npz'}, sample 3"
    found = quantized(tmp_path / "root.onnx", tmp_path / "direct.onnx", "--data", tmp_path / "data.npz")
    assert reasons(found)["product"] == f"{said}, made by Sqrt 'root' from finite 'x' (-1 to {x[3].max():.4g})"
    arguments = ["calibrate", tmp_path / "root.onnx", "--data", tmp_path / "data.npz", "-o", tmp_path / "r.json"]
    assert list(json.loads(succeed(*arguments, "--json").stdout)["broken"]) == ["s", "p"]  # and what it makes NaN
    arguments = ["--data", tmp_path / "data.npz", "--ranges", tmp_path / "r.json"]
    assert reasons(quantized(tmp_path / "root.onnx", tmp_path / "filed.onnx", *arguments))["product"] == said
    mine = overrides(tmp_path, "[tensors.s]\nrange = [0, 3]\n")
    arguments = ["--ranges", tmp_path / "r.json", "--overrides", mine]  # nothing judges what comes of it
    assert "product" not in reasons(quantized(tmp_path / "root.onnx", tmp_path / "out.onnx", *arguments))


def test_an_output_that_is_not_finite_has_no_range(tmp_path: Path) -> None:
    """`requant quantize` accepts such data too."""
    write_root(tmp_path, ROOT.replace("(float[N,64] y)", "(float[N,64] y, float[N,64] s)"))
    done = succeed("calibrate", tmp_path / "root.onnx", "--data", tmp_path / "data.npz", "-o", tmp_path / "r.json")
    assert f"'s' hold NaN or infinity at {tmp_path / 'data.npz'}, sample 3" in done.stderr
    assert "s" not in load_ranges(tmp_path / "r.json").ranges
    quantized(tmp_path / "root.onnx", tmp_path / "int8.onnx", "--ranges", tmp_path / "r.json")
