"""A compiled model computes the same, loads as it is told to, and is refused elsewhere by whatever loads it."""

from __future__ import annotations

import json
import resource
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper

from requant import RequantError
from requant.calibration.model.session import Array
from requant.cli import main
from requant.quantize import compile_model
from requant.quantize.model import files
from requant.quantize.model.files import load_model
from requant.quantize.runtime import compiled_for as guard
from requant.quantize.runtime import isa
from requant.quantize.runtime.compiled_for import KEY, Target, compiled_for, this_machine
from requant.quantize.tools.bench import compile as compiling
from requant.quantize.tools.bench import probes
from requant.quantize.tools.bench.probes import BLOCKED, CHANNELS, KEPT, NAME, WIDTH

FORMATS = (".onnx", ".ort")
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")

CONVOLUTION = """
<ir_version: 8, opset_import: ["" : 17], metadata_props: ["owner" : "me"]>
net (float[N,32,6,6] x) => (float[N,32] y, int64[N] best) {
  [first] a = Conv<pads = [1, 1, 1, 1]>(x, w)
  [second] b = Relu(a)
  [third] c = GlobalAveragePool(b)
  [fourth] y = Flatten(c)
  [fifth] best = ArgMax<axis = 1, keepdims = 0>(y)
}
"""
INTEGER = """
<ir_version: 8, opset_import: ["" : 17]>
net (uint8[2,16] a) => (int32[2,4] y) { [product] y = MatMulInteger(a, w) }
"""
UNKNOWN = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[N,M] x) => (float[N,M] y) { y = Reshape(x, s) }
"""  # runs on none of the lengths that are tried


def write(path: Path, text: str, **weights: Array) -> Path:
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(proto, path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = np.random.default_rng(0).standard_normal((32, 32, 3, 3)).astype(np.float32)
    return write(tmp_path / "float.onnx", CONVOLUTION, w=weights)


@pytest.fixture
def integer(tmp_path: Path) -> Path:
    weights = np.random.default_rng(0).integers(-127, 127, (16, 4)).astype(np.int8)
    return write(tmp_path / "integer.onnx", INTEGER, w=weights)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    x = np.random.default_rng(1).standard_normal((6, 32, 6, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    return tmp_path / "data.npz"


def quick(model: Path, output: Path, data: object = None, **options: Any) -> compiling.Compiled:
    return compile_model(model, output, None if data is None else str(data), **options)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")


def session(path: Path, level: str = "ORT_ENABLE_ALL") -> ort.InferenceSession:
    """Load a model as any other program does."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def feed(path: Path) -> dict[str, Array]:
    shapes = {"x": (2, 32, 6, 6), "a": (2, 16)}
    inputs = session(path).get_inputs()
    random = np.random.default_rng(2)
    types = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8}
    return {value.name: random.uniform(0, 255, shapes[value.name]).astype(types[value.type]) for value in inputs}


# ----------------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", ["model", "integer"])
def test_outputs_are_those_of_the_original_bit_for_bit(
    tmp_path: Path, name: str, suffix: str, request: pytest.FixtureRequest
) -> None:
    original: Path = request.getfixturevalue(name)
    output = tmp_path / f"out{suffix}"
    found = quick(original, output)
    assert (found.identical, found.format) == (True, suffix[1:])
    given = feed(original)
    expected = session(original).run(None, given)
    for level in LEVELS:
        for one, other in zip(expected, session(output, level).run(None, given), strict=True):
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("suffix", FORMATS)
def test_interface_and_metadata_are_kept_and_the_target_is_added(tmp_path: Path, model: Path, suffix: str) -> None:
    output = tmp_path / f"out{suffix}"
    found = quick(model, output)
    before, after = session(model), session(output)
    for ends in ("get_inputs", "get_outputs"):
        assert [(e.name, e.type, e.shape) for e in getattr(before, ends)()] == [
            (e.name, e.type, e.shape) for e in getattr(after, ends)()
        ]
    props = after.get_modelmeta().custom_metadata_map
    assert props["owner"] == "me"
    assert compiled_for(output, props) == this_machine() == found.target
    assert this_machine().runtime == ort.__version__


def test_what_depends_on_the_cpu_is_probed(tmp_path: Path, model: Path, integer: Path) -> None:
    quick(model, tmp_path / "float.out")
    blocked = any(node.domain == BLOCKED for node in onnx.load(tmp_path / "float.out").graph.node)
    assert quick(model, tmp_path / "again.onnx").probes == (("layout",) if blocked else ())
    assert quick(integer, tmp_path / "integer.out").probes == ("products",)


def test_a_model_of_nothing_that_depends_on_the_cpu_is_guarded_by_its_metadata_alone(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.onnx", UNKNOWN.replace("Reshape(x, s)", "Relu(x)"))
    found = quick(plain, tmp_path / "out.onnx")
    assert found.probes == ()
    assert KEY in load_model(tmp_path / "out.onnx").metadata_props


def test_weights_in_files_are_taken_inside(tmp_path: Path, model: Path) -> None:
    external = tmp_path / "from" / "external.onnx"
    external.parent.mkdir()
    onnx.save_model(onnx.load(model), external, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "to").mkdir()
    found = quick(external, tmp_path / "to" / "out.onnx")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["out.onnx"]
    assert found.bytes_after == (tmp_path / "to" / "out.onnx").stat().st_size
    assert found.bytes_before == sum(path.stat().st_size for path in external.parent.iterdir())
    given = feed(model)
    expected = session(model).run(None, given)
    assert expected[0].tobytes() == session(tmp_path / "to" / "out.onnx").run(None, given)[0].tobytes()


def test_more_weights_than_one_file_holds_go_beside_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PROTOBUF_LIMIT", 2**14)
    monkeypatch.setattr(files, "INSIDE", 2**12)
    (tmp_path / "to").mkdir()
    assert quick(model, tmp_path / "to" / "out.onnx").identical
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["out.onnx", "out.onnx.data"]
    assert (tmp_path / "to" / "out.onnx").stat().st_size < 2**14


def test_large_models_are_timed_one_after_the_other(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LARGE", 2**10)
    found = quick(model, tmp_path / "out.onnx")
    assert found.identical
    assert found.run is not None


def test_a_model_that_runs_on_no_random_input_needs_data(tmp_path: Path) -> None:
    """It may never run: it was compiled, and the exit code was 0."""
    model = write(tmp_path / "unknown.onnx", UNKNOWN, s=np.array([7, 11], np.int64))
    result = invoke("compile", model, "-o", tmp_path / "out.onnx")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"requant: {model}: the model runs on no random inputs; give data (Non-zero status code")
    assert "cannot be reshaped to the requested shape" in line
    assert not (tmp_path / "out.onnx").exists()
    np.savez(tmp_path / "wrong.npz", x=np.ones((2, 3), np.float32))
    assert invoke("compile", model, "-o", tmp_path / "out.onnx", "--data", tmp_path / "wrong.npz").exit_code == 2
    assert not (tmp_path / "out.onnx").exists()
    x = np.ones((7, 11), np.float32)
    assert compile_model(model, tmp_path / "out.onnx", [{"x": x}]).identical
    assert session(tmp_path / "out.onnx").run(None, {"x": x})[0].tobytes() == x.tobytes()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (np.zeros(2, np.float32), np.zeros(2, np.float32), True),
        (np.zeros(2, np.float32), -np.zeros(2, np.float32), False),
        (np.full(1, np.nan), np.full(1, np.nan), True),
        (np.zeros(2, np.float32), np.zeros(2, np.float64), False),
        (np.zeros((1, 2)), np.zeros((2, 1)), False),
        (np.array(["a"], object), np.array(["a"], object), True),
        (np.array(["a"], object), np.array(["b"], object), False),
        ([{1: 0.5}], [{1: 0.5}], True),
        ([{1: 0.5}], [{2: 0.5}], False),
        ([np.ones(1)], [np.ones(1), np.ones(1)], False),
    ],
    ids=["equal", "signs-of-zero", "nan", "types", "shapes", "strings", "other-strings", "maps", "keys", "lengths"],
)
def test_bit_for_bit_is_meant(one: object, other: object, same: bool) -> None:
    assert compiling._same(one, other) is same


# ---------------------------------------------------------------------------------------------------------- the probes


def picks(block: int) -> set[int]:
    """Return which places ReorderOutput reads of a constant in blocks of `block` channels, by its definition."""
    axes = (CHANNELS // block, WIDTH, block)
    places = np.arange(CHANNELS * WIDTH).reshape(axes).transpose(0, 2, 1).reshape(CHANNELS, WIDTH)
    return set(places[:KEPT].ravel().tolist())


def mask(block: int) -> Array:
    found = np.ones(CHANNELS * WIDTH, np.float32)
    found[list(picks(block))] = 0
    return found.reshape(1, CHANNELS, 1, WIDTH)


BLOCKS = (1, 2, 4, 8, 16, 32)


def test_no_other_block_picks_what_one_picks() -> None:
    assert [(a, b) for a in BLOCKS for b in BLOCKS if a != b and picks(a) <= picks(b)] == []


def test_this_machine_reads_in_one_of_the_blocks() -> None:
    assert any(np.array_equal(probes._picked(), mask(block)) for block in BLOCKS)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    "level",
    [pytest.param(level, marks=[pytest.mark.slow] * ("DISABLE" in level or "BASIC" in level)) for level in LEVELS],
)
@pytest.mark.parametrize("probe", ["layout", "products"])
def test_any_program_fails_on_a_cpu_that_computes_otherwise(
    tmp_path: Path, probe: str, level: str, suffix: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine stays, and the model pretends to be from another: compiled where blocks, or sums, are others."""
    original: Path = request.getfixturevalue({"layout": "model", "products": "integer"}[probe])
    here = probes._picked()
    other = next(block for block in (8, 16) if not np.array_equal(here, mask(block)))
    monkeypatch.setattr(probes, "_picked", lambda: mask(other))
    total = isa.probe()
    monkeypatch.setattr(probes, "probe", lambda: {64770: 32767, 32767: 64770}[total])
    monkeypatch.setattr(compiling, "_outputs", lambda *_: [])
    monkeypatch.setattr(compiling, "islice", lambda *_: [])
    found = quick(original, tmp_path / f"out{suffix}")
    if probe not in found.probes:
        pytest.skip("this runtime lays nothing out in blocks")
    given = feed(original)
    with pytest.raises(Exception, match=NAME):  # the runtime's exceptions share no base class of their own
        session(tmp_path / f"out{suffix}", level).run(None, given)


# ------------------------------------------------------------------------------------------------------- the refusals


def test_weights_that_cannot_be_written_name_the_folder(tmp_path: Path) -> None:
    """A limit of the sizes of files is the nearest thing to a full disk."""
    text = """<ir_version: 8, opset_import: ["" : 17]> wide (float[1, 64] x) => (float[1, 64] y)
        <float[64, 64] w> { y = MatMul (x, w) }"""
    proto = onnx.parser.parse_model(text)
    weights = np.random.default_rng(0).random((64, 64), np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    (tmp_path / "staged").mkdir()
    model, before = load_model(tmp_path / "m.onnx"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # Python ignores the signal: writing fails
    try:
        with pytest.raises(RequantError) as caught:
            compiling._optimised(tmp_path / "m.onnx", model, {}, tmp_path / "staged")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == (
        f"{tmp_path}: the runtime cannot write the weights of its graph here; is there space for a copy of the model?"
    )


HERE = Target("1.31.1", "x86_64", ("avx2", "avx512_vnni"))


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (HERE, ""),
        (Target("1.30.0", "x86_64", HERE.cpu), "ONNX Runtime 1.30.0, here 1.31.1"),
        (Target("1.31.1", "aarch64", HERE.cpu), "aarch64, here x86_64"),
        (Target("1.31.1", "x86_64", ("amx_int8", *HERE.cpu)), "a CPU with amx_int8"),
        (Target("1.31.1", "x86_64", ("avx2",)), "a CPU without avx512_vnni"),
        (Target("1.31.1", "x86_64", ("avx2", "avx_vnni")), "a CPU with avx_vnni, without avx512_vnni"),
        (Target("1.30.0", "x86_64", ("avx2",)), "ONNX Runtime 1.30.0, here 1.31.1; a CPU without avx512_vnni"),
    ],
    ids=["nothing", "runtime", "machine", "more", "less", "other", "two"],
)
def test_what_differs_is_named(there: Target, said: str) -> None:
    assert there.unlike(HERE) == said


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"runtime": "1", "machine": "x"}', '{"cpu": 3}', "null"])
def test_a_damaged_entry_is_refused(text: str) -> None:
    with pytest.raises(RequantError, match=r"m\.onnx: 'requant\.compiled' in its metadata is damaged"):
        compiled_for("m.onnx", {KEY: text})


COMMANDS: dict[str, Callable[[Path, Path, Path, Path], Sequence[object]]] = {
    "quantize": lambda there, here, data, out: ["quantize", there, "--data", data, "-o", out],
    "calibrate": lambda there, here, data, out: ["calibrate", there, "--data", data, "-o", out],
    "compare": lambda there, here, data, out: ["compare", there, here, "--data", data],
    "compare-second": lambda there, here, data, out: ["compare", here, there, "--data", data],
    "transform": lambda there, here, data, out: ["transform", there, out, "--transforms", "fold_constants"],
    "compile": lambda there, here, data, out: ["compile", there, "-o", out],
    "bench": lambda there, here, data, out: ["bench", there, "--data", data],
    "explain": lambda there, here, data, out: ["explain", there, "--data", data],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_refuses_a_model_of_another_machine(
    tmp_path: Path, model: Path, data: Path, command: Callable[..., Sequence[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there.onnx"
    quick(model, there)
    monkeypatch.setattr(guard, "flags", lambda: ("avx2", "one_more"))
    result = invoke(*command(there, model, data, tmp_path / "out"))
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"requant: {there}: compiled for a CPU ")
    assert "without one_more" in line
    assert line.endswith("; compile the original here")
    assert not (tmp_path / "out").exists()


def test_on_its_own_machine_a_compiled_model_is_like_any_other(tmp_path: Path, model: Path, data: Path) -> None:
    quick(model, tmp_path / "here.onnx")
    result = invoke("compare", model, tmp_path / "here.onnx", "--data", data, "--json")
    assert result.exit_code == 0, result.stderr
    sqnr_db = json.loads(result.stdout)["sqnr_db"]
    assert sqnr_db is None or sqnr_db > 100  # None: no noise; floats may be added in another order


def test_a_compiled_model_is_not_compiled_again(tmp_path: Path, model: Path) -> None:
    quick(model, tmp_path / "here.onnx")
    with pytest.raises(RequantError, match=r"here\.onnx: the model is already compiled; compile the original"):
        quick(tmp_path / "here.onnx", tmp_path / "again.onnx")


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_can_be_refused_is_refused_before_the_work(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.onnx").write_text("precious")
    np.savez(tmp_path / "wrong.npz", x=np.zeros((3, 31, 6, 6), np.float32))
    monkeypatch.setattr(compiling, "_optimised", lambda *_: pytest.fail("work was done"))
    monkeypatch.setattr(compiling, "PROTOBUF_LIMIT", 2**10)
    before = snapshot(tmp_path)
    for arguments, said in (
        ((model, "-o", model), "would overwrite the input"),
        ((model, "-o", tmp_path / "old.onnx"), "exists already; --force overwrites it"),
        ((model, "-o", tmp_path / "none" / "out.onnx"), "no folder"),
        ((model, "-o", tmp_path / "out.ort"), "out.ort: the ORT format holds 2 GB; give a path that ends in .onnx"),
        ((model, "-o", tmp_path / "out.onnx", "--data", tmp_path / "wrong.npz"), "wrong.npz"),
        ((tmp_path / "none.onnx", "-o", tmp_path / "out.onnx"), "none.onnx: no such file"),
        ((data, "-o", tmp_path / "out.onnx"), "data.npz: not an ONNX model"),
    ):
        result = invoke("compile", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        (line,) = result.stderr.splitlines()
        assert said in line
    assert snapshot(tmp_path) == before


def test_a_runtime_without_the_ort_format_is_told_of(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RequantError("not built for it")

    monkeypatch.setattr(compiling, "open_session", refuse)
    with pytest.raises(RequantError, match=r"out\.ort: the installed runtime cannot write the ORT format: not built"):
        quick(model, tmp_path / "out.ort")
    assert not (tmp_path / "out.ort").exists()


@pytest.mark.parametrize("suffix", [".onnx", ".ort"])
def test_what_does_not_run_when_compiled_is_not_written(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    run = compiling._outputs

    def refuse(path: Any, *rest: Any) -> Any:
        if Path(path) != model:
            raise RequantError("it does not load")
        return run(path, *rest)

    monkeypatch.setattr(compiling, "_outputs", refuse)
    output = tmp_path / f"out{suffix}"
    output.write_text("an older file")
    before = snapshot(tmp_path)
    with pytest.raises(RequantError, match="it does not load"):
        quick(model, output, force=True)
    assert snapshot(tmp_path) == before


# --------------------------------------------------------------------------------------------------- the command line


def test_json_tells_what_was_measured_and_how_to_load_it(tmp_path: Path, model: Path, data: Path) -> None:
    output = tmp_path / "out.onnx"
    result = invoke("compile", model, "-o", output, "--data", data, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["output"], found["format"], found["identical"]) == (str(output), "onnx", True)
    assert found["compiled_for"] == this_machine().to_json()
    assert found["sqnr_db_by_output"] == {"y": None}
    assert found["samples"] == 6
    for change in (found["load"], found["run"]):
        assert change["speedup"] == change["before_ms"] / change["after_ms"]
        assert change["before_ms"] <= change["before_median_ms"]
        assert change["count"] >= 5
    assert found["settings"]["graph_optimization_level"] in ("off", "basic")
    assert found["settings"]["intra_op_num_threads"] == found["threads"] == 1
    (tmp_path / "load.py").write_text(found["snippet"])
    made = runpy.run_path(str(tmp_path / "load.py"))
    given = feed(model)
    assert made["session"].run(None, given)[0].tobytes() == session(model).run(None, given)[0].tobytes()


def test_people_get_a_table_on_stdout(tmp_path: Path, model: Path) -> None:
    result = invoke("compile", model, "-o", tmp_path / "out.onnx")
    assert (result.exit_code, result.stderr) == (0, "")
    for word in ("compiled for", ort.__version__, "equal bit for bit on ", "load ", "run, 1 thread", "import onnx"):
        assert word in result.stdout


def test_force_replaces_an_output(tmp_path: Path, model: Path) -> None:
    (tmp_path / "out.onnx").write_text("something else")
    assert invoke("compile", model, "-o", tmp_path / "out.onnx", "--force").exit_code == 0
    assert KEY in load_model(tmp_path / "out.onnx").metadata_props
