"""`requant bench`: the latency of one model, and the settings that are recommended for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from click.testing import CliRunner, Result

from requant import NATIVE_DOMAIN, RequantError
from requant.cli import main
from requant.quantize import Lengths, Load, Search, bench_model, compile_model
from requant.quantize.runtime.configured import Values
from requant.quantize.runtime.executed import Kernel
from requant.quantize.runtime.problem import is_convolution, problem
from requant.quantize.runtime.profile import KernelRun
from requant.quantize.tools.bench import bench
from requant.quantize.tools.bench.settings import Settings, Trial

ROOT = Path(__file__).parents[3]
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


EIGHT = '<ir_version: 8, opset_import: ["" : 17]> g (float[8,4] x) => (float[8,4] y) { y = Relu(x) }'


@pytest.mark.parametrize("given", [False, True], ids=["random", "data"])
def test_a_fixed_batch_counts_its_items(tmp_path: Path, given: bool) -> None:
    onnx.save(onnx.parser.parse_model(EIGHT), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.zeros((16, 4), np.float32))
    data = ["--data", tmp_path / "d.npz"] if given else []
    found = json.loads(invoke("bench", tmp_path / "m.onnx", *data, "--no-profile", "--json").stdout)
    assert (found["shapes"], found["batch"]) == ({"x": [8, 4]}, 8)
    assert found["items_per_second"] == 1e3 * 8 / found["ms"]


def test_inputs_of_different_rows_have_no_items(tmp_path: Path) -> None:
    text = EIGHT.replace("float[8,4] x)", "float[N,4] x, float[E,4] z)").replace("Relu(x)", "Relu(x) w = Relu(z)")
    onnx.save(onnx.parser.parse_model(text.replace("[8,4] y", "[N,4] y, float[E,4] w")), tmp_path / "m.onnx")
    np.savez(tmp_path / "000.npz", x=np.zeros((3, 4), np.float32), z=np.zeros((5, 4), np.float32))
    (tmp_path / "d").mkdir()
    (tmp_path / "000.npz").rename(tmp_path / "d" / "000.npz")
    asked = ["bench", tmp_path / "m.onnx", "--data", tmp_path / "d", "--no-profile"]
    found = json.loads(invoke(*asked, "--json").stdout)
    assert (found["batch"], found["items_per_second"]) == (None, None)
    text = invoke(*asked).stdout
    assert ", one sample, 1 thread" in text
    assert "items/s" not in text


def test_people_get_a_line_on_stdout_of_random_inputs() -> None:
    result = invoke("bench", DIGITS)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{DIGITS}, ONNX Runtime {ort.__version__}, batch 1, 1 thread, random inputs" in result.stdout
    assert "items/s" in result.stdout


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

    def pretend(
        model: Path, feed: object, *, threads: int | None, seconds: float, needed: Values, progress: object
    ) -> Settings:
        assert needed == {}
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
    table = invoke("bench", DIGITS, "--settings", *arguments).stdout
    for word in ("2.00x", "taken", "no time was left", "all together", "import onnxruntime as ort"):
        assert word in table


def test_settings_of_a_real_model() -> None:
    found = bench_model(DIGITS, DATA, Load(seconds=0.01), search=Search(seconds=0.1))
    assert found.settings is not None
    assert found.settings.model == str(DIGITS)
    assert bench_model(DIGITS, DATA, Load(seconds=0.01)).settings is None


@pytest.mark.parametrize("suffix", [".onnx", ".ort"])
def test_a_compiled_model_is_timed_here_and_refused_elsewhere(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / f"out{suffix}"
    compile_model(DIGITS, output)
    assert bench_model(output, DATA, Load(batch=2, seconds=0.01)).batch == 2
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
        ((DIGITS, "--seconds", "3"), "--seconds needs --settings"),
        ((DIGITS, "--settings", "--seconds", "0"), "--seconds"),
    ):
        result = invoke("bench", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        (line,) = result.stderr.splitlines()
        assert said in line
    with pytest.raises(RequantError, match="batch must be at least 1"):
        bench_model(DIGITS, load=Load(batch=0))


# --- shapes

SEQUENCES = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[N,length,4] x, float[N,length,?] z) => (float[N,length,?] y) { y = Add(x, z) }
"""


@pytest.fixture
def sequences(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(SEQUENCES), tmp_path / "s.onnx")
    return tmp_path / "s.onnx"


@pytest.mark.parametrize(
    ("arguments", "shapes", "batch"),
    [
        (("--dim", "length=5", "--shape", "z=1,5,4"), {"x": [1, 5, 4], "z": [1, 5, 4]}, 1),
        (("--shape", "z=3,5,1"), {"x": [3, 5, 4], "z": [3, 5, 1]}, 3),
        (("--shape", "z=2,5,1", "--batch", "2"), {"x": [2, 5, 4], "z": [2, 5, 1]}, 2),
    ],
    ids=["lengths", "the-first-axis-too", "and-the-batch"],
)
def test_lengths_are_given(
    arguments: tuple[str, ...], shapes: dict[str, list[int]], batch: int, sequences: Path
) -> None:
    result = invoke("bench", sequences, *arguments, "--no-profile", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["shapes"], found["batch"]) == (shapes, batch)
    assert found["items_per_second"] == 1e3 * batch / found["ms"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            (),
            "the shapes of the inputs depend on length, axis 2 of 'z'; give --dim, --shape (in Python: lengths) or data",
        ),
        (
            ("--dim", "length=5"),
            "the shapes of the inputs depend on axis 2 of 'z'; give --dim, --shape (in Python: lengths) or data",
        ),
        (("--shape", "z=3,5,1", "--batch", "2"), "the first axes of the inputs have different lengths: 2, 3"),
        (("--shape", "z=1,5,3"), "the model runs on no random inputs of these shapes; give data (Non-zero status code"),
        (("--dim", "lenght=5"), "no free axis named 'lenght'; did you mean 'length'?"),
        (("--dim", "length=5", "--data", "x.npz"), "lengths of axes are given twice, as options and by data"),
    ],
    ids=["nothing", "a-part", "another-batch", "shapes-that-do-not-run", "no-such-axis", "data-too"],
)
def test_lengths_are_never_guessed(arguments: tuple[str, ...], said: str, sequences: Path) -> None:
    result = invoke("bench", sequences, *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert said in line


def test_a_fixed_model_takes_no_batch(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(FIXED), tmp_path / "fixed.onnx")
    assert invoke("bench", tmp_path / "fixed.onnx", "--no-profile").exit_code == 0
    result = invoke("bench", tmp_path / "fixed.onnx", "--batch", "2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the first axes of the inputs are fixed, so the model takes no batch of 2" in result.stderr


# --- against another model, and where the time goes


def test_two_models_in_turns() -> None:
    result = invoke("bench", DIGITS, "--compare", DIGITS, "--data", DATA, "--no-profile", "--json")
    found = json.loads(result.stdout)
    compared = found["compare"]
    assert compared["model"] == str(DIGITS)
    assert compared["ratio"] == compared["ms"] / found["ms"]
    assert compared["median_ratio"] == compared["median_ms"] / found["median_ms"]
    assert compared["runs"] == found["runs"]
    assert min(found["load_ms"], found["first_ms"], compared["load_ms"], compared["first_ms"]) > 0
    assert found["profile"] is None
    told = invoke("bench", DIGITS, "--compare", DIGITS, "--data", DATA, "--no-profile").stdout
    assert "x as fast by minimum times, " in told


def test_large_models_are_timed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requant.quantize.tools.bench.bench.LARGE", 2**20)
    found = bench_model(DIGITS, DATA, Load(seconds=0.01, profile=False), other=DIGITS)
    assert found.notes == (
        "the models were timed one after the other, because together they are too large for the memory",
    )
    assert found.ratio is not None


def test_a_model_of_other_inputs_is_refused(sequences: Path) -> None:
    result = invoke("bench", DIGITS, "--compare", sequences)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{sequences}: the model fails" in result.stderr


CONV1 = "mb2_ic1oc32_ih28oh28kh5sh1dh0ph2_iw28ow28kw5sw1dw0pw2"
CONV2 = "mb2_ic32oc64_ih14oh14kh5sh1dh0ph2_iw14ow14kw5sw1dw0pw2"


def test_where_the_time_goes() -> None:
    found = bench_model(DIGITS, load=Load(batch=2, seconds=0.01)).profile
    assert found is not None
    assert [(each.node, each.problem) for each in found.convolutions] == [("conv1", CONV1), ("conv2", CONV2)]
    assert [each.macs for each in found.convolutions] == [2 * 28 * 28 * 32 * 25, 2 * 14 * 14 * 64 * 32 * 25]
    assert sum(each.microseconds for each in found.operators) == pytest.approx(1e3 * found.kernels_ms, rel=1e-12)
    assert sum(each.share for each in found.operators) == pytest.approx(1.0, abs=1e-12)  # sums of some ten floats
    spent = [each.microseconds for each in found.slowest]
    assert spent == sorted(spent, reverse=True)
    assert len(spent) <= 10
    assert sum(each.macs for each in found.operators) == 2 * (
        28 * 28 * 32 * 25 + 14 * 14 * 64 * 800 + 3136 * 128 + 1280
    )


def test_the_profile_is_printed_and_in_the_json() -> None:
    table = invoke("bench", DIGITS, "--batch", "2").stdout
    assert "with the profiler on" in table
    assert "slowest nodes" in table
    assert "convolutions, in order of execution" in table
    profile = json.loads(invoke("bench", DIGITS, "--json").stdout)["profile"]
    assert set(profile) == {"runs", "milliseconds", "kernels_ms", "operators", "slowest", "convolutions"}
    assert profile["convolutions"][1]["problem"] == CONV2.replace("mb2", "mb1")


def test_of_ort_files_no_profile_is_told(tmp_path: Path) -> None:
    compile_model(DIGITS, tmp_path / "m.ort")
    found = bench_model(tmp_path / "m.ort", load=Load(seconds=0.01, lengths=Lengths({}, {"N": 3})))
    assert (found.profile, found.batch) == (None, 3)
    assert found.notes == ("only ONNX files can be profiled",)


def test_the_problem_of_a_native_convolution_is_read_from_its_weights() -> None:
    weights = ir.val("w", const_value=ir.tensor(np.zeros((8, 4, 3, 3), np.int8)))
    node = ir.node("Convolution", [ir.val("x"), weights], {"strides": [2, 2], "pads": [1, 1, 1, 1]})
    run = KernelRun("n", NATIVE_DOMAIN, "Convolution", 1.0, 1, ((1, 4, 4, 8),), ((1, 8, 8, 4), ()), ("uint8", "float"))
    kernel = Kernel(run, "compute", None, "Convolution", (), "NHWC", "", node)
    assert is_convolution(kernel)
    assert problem(kernel) == "mb1_ic4oc8_ih8oh4kh3sh2dh0ph1_iw8ow4kw3sw2dw0pw1"
