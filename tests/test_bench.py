"""`requant bench`: the latency of one model, and the settings that are recommended for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result

from requant import RequantError
from requant.cli import main
from requant.quantize import Search, bench, bench_model, compile_model
from requant.quantize.runtime.settings import Settings, Trial

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "sample_models" / "digits.onnx"
DATA = f"{ROOT / 'sample_models' / 'digits.npz'}:calib"

FIXED = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[1,4] x) => (float[1,4] y) { y = Relu(x) }
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")


def test_json_tells_latency_and_rate() -> None:
    result = invoke("bench", DIGITS, "--data", DATA, "--batch", 4, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["model"], found["batch"], found["threads"], found["settings"]) == (str(DIGITS), 4, 1, None)
    assert found["data"] == DATA
    assert 0 < found["ms"] <= found["median_ms"]
    assert found["items_per_second"] == 1e3 * 4 / found["ms"]
    assert found["runs"] >= 5


def test_people_get_a_line_on_stderr_of_random_inputs() -> None:
    result = invoke("bench", DIGITS)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"{DIGITS}, batch 1, 1 thread(s), random inputs" in result.stderr
    assert "items/s" in result.stderr


FOUND = Settings(
    "m.onnx",
    {"intra_op_num_threads": 1},
    2.0,
    1.0,
    (Trial("intra_op_num_threads", 1, 2.0, 1.0, True), Trial("execution_mode", "parallel", reason="no time was left")),
)


@pytest.mark.parametrize(
    ("arguments", "threads"),
    [([], None), (["--threads", "1"], 1), (["--threads", "2"], 2)],
    ids=["free", "the-default-named", "two"],
)
def test_settings_are_looked_for_with_the_threads_that_were_asked_for(
    arguments: list[str], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def pretend(model: Path, feed: object, *, threads: int | None, seconds: float, progress: object) -> Settings:
        asked.append((model, threads, seconds))
        return FOUND

    monkeypatch.setattr(bench, "recommend", pretend)
    result = invoke("bench", DIGITS, "--settings", "--seconds", "0.5", "--json", *arguments)
    assert asked == [(DIGITS, threads, 0.5)]
    found = json.loads(result.stdout)["settings"]
    assert found["values"] == {"intra_op_num_threads": 1}
    assert found["speedup"] == 2.0
    assert [trial["speedup"] for trial in found["trials"]] == [2.0, None]
    assert "options.intra_op_num_threads = 1" in found["snippet"]
    table = invoke("bench", DIGITS, "--settings", *arguments).stderr
    for word in ("2.00x", "taken", "no time was left", "all together", "import onnxruntime as ort"):
        assert word in table


def test_settings_of_a_real_model() -> None:
    found = bench_model(DIGITS, DATA, seconds=0.01, search=Search(seconds=0.1))
    assert found.settings is not None
    assert found.settings.model == str(DIGITS)
    assert bench_model(DIGITS, DATA, seconds=0.01).settings is None


@pytest.mark.parametrize("suffix", [".onnx", ".ort"])
def test_a_compiled_model_is_timed_here_and_refused_elsewhere(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / f"out{suffix}"
    compile_model(DIGITS, output, seconds=0.01)
    assert bench_model(output, DATA, batch=2, seconds=0.01).rate > 0
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    result = invoke("bench", output)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"requant: {output}: compiled for ")
    assert "here abacus" in line


def test_what_cannot_be_timed_is_refused(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(FIXED), tmp_path / "fixed.onnx")
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 4), np.float32))
    (tmp_path / "no.ort").write_bytes(b"nothing")
    for arguments, said in (
        ((tmp_path / "fixed.onnx", "--data", tmp_path / "x.npz", "--batch", 2), "its first axis is fixed"),
        ((tmp_path / "none.onnx",), "none.onnx: no such file"),
        ((tmp_path / "none.ort",), "none.ort: no such file"),
        ((tmp_path / "no.ort",), "no.ort: "),
        ((DIGITS, "--data", tmp_path / "x.npz"), "x.npz"),
        ((DIGITS, "--seconds", "3"), "--seconds is for --settings"),
        ((DIGITS, "--settings", "--seconds", "0"), "--seconds"),
    ):
        result = invoke("bench", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        (line,) = result.stderr.splitlines()
        assert said in line
    with pytest.raises(RequantError, match="batch must be at least 1"):
        bench_model(DIGITS, batch=0)
