"""``requant.toml``: every option has its key, unknown keys are refused, and what it asks for is what is run."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

import click
import onnx
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from requant import RequantError
from requant.calibration import DataSpec
from requant.calibration.runs.executors import EXECUTORS
from requant.cli import main
from requant.quantize import check_project
from requant.quantize.options.build import build_options
from requant.quantize.options.declared import CHECK, QUANTIZE
from requant.quantize.options.efforts import CORRECTIONS
from requant.quantize.options.option import Kind
from requant.quantize.options.options import Options
from requant.quantize.project.check import quantize_arguments
from requant.quantize.project.file import Project, load_project, parse_project, requested_project
from requant.quantize.project.request import build_goal
from requant.quantize.project.template import template
from requant.quantize.runtime.inputs import open_data

SAMPLES = Path(__file__).parents[3] / "sample_models"
MODEL = 'model = "model.onnx"\noutput = "int8.onnx"\n'
ACTS = {"--help", "--quiet", "--verbose"}  # of the one command, not of what is wanted


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")


def options(command: str) -> set[str]:
    """Return the long options of a command."""
    found = main.get_command(click.Context(main), command)
    assert found is not None
    params = found.get_params(click.Context(found))
    return {opt for param in params for opt in param.opts if isinstance(param, click.Option) and opt.startswith("--")}


def flags(keys: tuple[Any, ...]) -> set[str]:
    return {f"--{key.name.replace('_', '-')}" for key in keys}


# ------------------------------------------------------------------------------------------------- the keys


def test_every_option_of_quantize_has_its_key() -> None:
    # the output is the key `output`; the JSON is what the check reads
    assert options("quantize") - ACTS - {"--output", "--json"} == flags(QUANTIZE)


def test_every_option_of_check_has_its_key() -> None:
    # the models are the keys `model` and `output`; a project that updates its baseline would judge nothing
    assert options("check") - ACTS - {"--float", "--model", "--update"} == flags(CHECK)


def test_declared_defaults_are_those_of_the_python_api() -> None:
    assert build_options({}) == Options()
    for row in QUANTIZE:
        if row.default is not None and row.name not in ("executor",):  # `Execution` takes the executor itself
            assert build_options({row.name: row.default}) == Options(), row.name
    executor = next(row for row in QUANTIZE if row.name == "executor")
    assert executor.choices == EXECUTORS
    assert executor.default == EXECUTORS[0]


@pytest.mark.parametrize("key", QUANTIZE, ids=lambda key: key.name)
def test_a_key_of_quantize_is_taken_as_its_option(key: Any) -> None:
    value = tomllib.loads(f"value = {key.example}")["value"]
    arguments = quantize_arguments(Project(path=None, model="m.onnx", output="q.onnx", quantize={key.name: value}))
    command = main.get_command(click.Context(main), "quantize")
    assert command is not None
    param = next(p for p in command.params if f"--{key.name.replace('_', '-')}" in p.opts)
    context = click.Context(command)
    parsed: dict[str, Any]
    parsed, _, _ = command.make_parser(context).parse_args(list(arguments[1:]))
    raw = parsed.get(str(param.name))
    assert raw is not None or value is False
    given = value if isinstance(value, list) else [value]
    if key.kind is Kind.EACH:
        assert list(raw or ()) == given
    elif key.kind is not Kind.FLAG:
        assert raw == ",".join(map(str, given))
        assert param.process_value(context, raw) is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MODEL + "[quantize]\nsmaples = 3", "no key in [quantize] named 'smaples'; did you mean 'samples'?"),
        (MODEL + "[check]\nmetrics = 'top1'", "no key in [check] named 'metrics'; did you mean 'metric'?"),
        (MODEL + "[chekc]", "no key named 'chekc'; did you mean 'check'?"),
        (MODEL + "[quantize]\nsamples = 'many'", "[quantize] samples: must be a whole number, not 'many'"),
        (MODEL + "[quantize]\nsamples = true", "[quantize] samples: must be a whole number, not True"),
        (MODEL + "[quantize]\nsymmetric = 1", "[quantize] symmetric: must be true or false, not 1"),
        (MODEL + "[check]\nmetric = [1]", "[check] metric: must be a text or a list of texts, not [1]"),
        ("model = 3\noutput = 'x'", "model: must be a text, not 3"),
        (MODEL + "quantize = 3", "quantize: must be a table of numbers or texts, not 3"),
        ('output = "x"', "no 'model'; write for instance model = \"model.onnx\""),
        (MODEL + "[check]\nmetric = oops", "line 4"),
    ],
    ids=["near", "plural", "table", "type", "bool", "flag", "list", "model", "no table", "missing", "no TOML"],
)
def test_what_is_wrong_in_a_project_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "requant.toml").write_text(text)
    with pytest.raises(RequantError) as error:
        load_project(tmp_path / "requant.toml")
    assert says in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "requant.toml"))
    result = invoke("check", tmp_path / "requant.toml")
    assert result.exit_code == 2
    assert result.stderr == f"requant: {error.value}\n"


def within(name: str, value: object) -> bool:
    """Return whether a value is one of the choices of an option, or in its range."""
    row = next(row for row in QUANTIZE if row.name == name)
    if type(value) is int:
        least = -(2**31) if row.least is None else row.least + row.above
        return least <= value <= row.most
    return not row.choices or value in row.choices


@given(st.dictionaries(st.sampled_from([key.name for key in QUANTIZE]), st.integers() | st.text() | st.booleans()))
def test_a_table_is_refused_or_taken_whole(values: dict[str, object]) -> None:
    kinds = {key.name: key.kind for key in QUANTIZE}
    wanted = {Kind.FLAG: bool, Kind.INT: int, Kind.INTS: int, Kind.NUMBER: int, Kind.TABLE: dict}
    fits = all(
        (type(value) is wanted.get(kinds[name], str) or (kinds[name] is Kind.AMOUNT and type(value) is int))
        and within(name, value)
        for name, value in values.items()
    )
    document = {"model": "model.onnx", "output": "int8.onnx", "quantize": values}
    if fits:
        assert parse_project(Path("requant.toml"), document).quantize == values
    else:
        with pytest.raises(RequantError):
            parse_project(Path("requant.toml"), document)


def test_an_empty_output_is_refused(tmp_path: Path) -> None:
    project = write_project(tmp_path)
    text = re.sub(r'^output = ".*"$', 'output = ""', project.read_text(), flags=re.MULTILINE)
    project.write_text(text)
    result = invoke("check", project)
    assert 'output = ""' in text
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("requant: ")


def test_a_project_is_a_path() -> None:
    with pytest.raises(RequantError, match="the project must be"):
        check_project(cast(Any, 5))


def test_an_absent_project_says_how_to_write_one(tmp_path: Path) -> None:
    result = invoke("check", tmp_path / "requant.toml")
    assert result.exit_code == 2
    assert "requant init" in result.stderr
    result = invoke("check", SAMPLES / "digits.onnx")
    assert result.exit_code == 2
    assert "a model, and no requant.toml; check a pair with --float FLOAT --model INT8" in result.stderr


def test_the_command_line_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "other.npz").write_bytes(b"")
    (folder / "requant.toml").write_text(
        MODEL + '[check]\ndata = "own.npz"\nsamples = 9\n[check.tolerance]\ntop1 = 0.1\nsize = 0.2'
    )
    monkeypatch.chdir(tmp_path)
    given = {"data": "other.npz:calib", "tolerance": {"top1": "1%"}, "metric": ("top1", "mod.py:f"), "junit": "a.xml"}
    found = requested_project("inside/requant.toml", given)
    assert found.check["data"] == f"{tmp_path / 'other.npz'}:calib"  # relative to where the command is given
    assert found.check["samples"] == 9
    assert found.check["tolerance"] == {"top1": "1%", "size": 0.2}
    assert found.check["metric"] == ["top1", "mod.py:f"]
    assert found.file("junit") == tmp_path / "a.xml"
    assert found.model == "model.onnx"


# ------------------------------------------------------------------------------------------------- a new one


@pytest.mark.parametrize("name", ["digits", "digits_mobile", "digits_transformer"])
def test_init_writes_a_project_that_is_valid_as_it_is_and_with_every_line(tmp_path: Path, name: str) -> None:
    model = SAMPLES / f"{name}.onnx"
    result = invoke("init", model, "-o", tmp_path / "requant.toml")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "requant.toml").read_text()
    found = load_project(tmp_path / "requant.toml")
    assert (tmp_path / found.model).resolve() == model.resolve()
    assert "input image: float32 (" in text
    assert max(map(len, text.splitlines())) <= 120
    whole = re.sub(r"^# (?=\w+ = |\[check\.tolerance\])", "", text, flags=re.MULTILINE)
    (tmp_path / "requant.toml").write_text(whole)
    complete = load_project(tmp_path / "requant.toml")
    assert set(complete.quantize or {}) == {key.name for key in QUANTIZE}
    assert set(complete.check) == {key.name for key in CHECK}


def write_model(path: Path, inputs: str) -> Path:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> net ({inputs}) => (float[?] y) {{ y = Cast<to = 1>(x) }}'
    )
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ("float[N, 3, 224, 224] x", 'preprocess = "resize=256 crop=224 scale=255"'),
        ("float[N, 96, 96, 3] x", 'preprocess = "resize=110 crop=96 scale=255"'),
        ("int64[N, T] x", 'tokenizer = "tokens.py:encode"'),
        ("float[N, 40] x", 'data = "calib.npz"'),
    ],
    ids=["image", "channels last", "tokens", "arrays"],
)
def test_init_suits_the_inputs(tmp_path: Path, inputs: str, says: str) -> None:
    text = template(write_model(tmp_path / "net.onnx", inputs), tmp_path / "requant.toml")
    assert any(line.startswith(says) for line in text.splitlines())
    assert "place" not in tomllib.loads(text)["quantize"]  # the plan beside the output decides
    assert '# corrections = ["bias", "rounding"]  #' in text
    assert {"bias", "rounding"} <= CORRECTIONS.keys()


FREE = "float[N, 3, H, W] x"


@pytest.mark.parametrize(
    ("inputs", "told", "says"),
    [
        (FREE, {"imgsz": "[64, 64]", "task": "classify"}, "resize=64 crop=64 scale=255"),
        (FREE, {"imgsz": "[480, 640]", "task": "detect"}, "pad=480x640 fill=114 scale=255"),
        ("float[N, 3, 320, 320] x", {"imgsz": "[640, 640]", "task": "detect"}, "pad=320x320 fill=114 scale=255"),
        (FREE, {"imgsz": "[64, 99999999999]"}, "resize=256 crop=224 scale=255"),
        (FREE, {}, "resize=256 crop=224 scale=255"),
        ("float[N, 3, 480, 640] x", {}, "resize=480x640 scale=255"),
        ("float[N, 480, 640, 3] x", {}, "resize=480x640 scale=255"),
    ],
)
def test_init_suggests_the_size_of_images(tmp_path: Path, inputs: str, told: dict[str, str], says: str) -> None:
    path = write_model(tmp_path / "net.onnx", inputs)
    proto = onnx.load(path)
    onnx.helper.set_model_props(proto, told)
    onnx.save(proto, path)
    done = CliRunner().invoke(main, ["init", str(path), "-o", str(tmp_path / "requant.toml")])
    assert done.exit_code == 0, done.stderr
    recipe = tomllib.loads((tmp_path / "requant.toml").read_text())["quantize"]["preprocess"]
    assert recipe == says
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (700, 500)).save(photos / "a.png")
    assert next(iter(open_data(path, DataSpec(str(photos), preprocess=recipe))))  # the settings suit the input


def test_init_refuses_to_overwrite_and_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "requant.toml").write_text("mine")
    result = invoke("init", SAMPLES / "digits.onnx", "-o", tmp_path / "requant.toml")
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert (tmp_path / "requant.toml").read_text() == "mine"
    result = invoke("init", SAMPLES / "digits.npz", "-o", tmp_path / "new.toml")
    assert result.exit_code == 2
    assert not (tmp_path / "new.toml").exists()


# ------------------------------------------------------------------------------------------------- the whole


def write_project(folder: Path, *, quantize: str = "", check: str = "", place: str = 'place = "all"') -> Path:
    """Write a project of the digits network."""
    (folder / "requant.toml").write_text(
        f'model = "{SAMPLES / "digits.onnx"}"\noutput = "int8.onnx"\n'
        f'[quantize]\ndata = "{SAMPLES / "digits.npz"}:calib"\n{place}\neffort = "low"\nsamples = 20\n{quantize}\n'
        f'[check]\ndata = "{SAMPLES / "digits.npz"}"\nseconds = 0\nsamples = 40\nmetric = "sqnr"\n{check}\n'
    )
    return folder / "requant.toml"


def test_a_project_quantizes_measures_and_judges(tmp_path: Path) -> None:
    project = write_project(tmp_path)
    result = invoke("check", project, "--update")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "int8.onnx").is_file()  # relative to the file, not to the current folder
    assert (tmp_path / "requant.lock.json").is_file()
    result = invoke("check", project, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["quantize"]["mac_share_int8"] == 1.0
    assert [line["name"] for line in found["lines"]] == ["data", "sqnr", "mac_share", "size", "opset", "layers"]


def units(folder: Path) -> dict[str, str]:
    """Return the implementation of each unit in the plan file of a project."""
    rows = json.loads((folder / "int8.plan.json").read_text())["units"]
    return {name: row["implementation"] for name, row in rows.items()}


@pytest.mark.slow
def test_the_plan_beside_the_output_decides_and_stays_as_it_is(tmp_path: Path) -> None:
    check_project(write_project(tmp_path, place=""), update=True)
    by_rules, plan = units(tmp_path), tmp_path / "int8.plan.json"
    assert by_rules["conv1"] == "float"
    check_project(write_project(tmp_path), update=True)
    wanted, model = plan.read_bytes(), onnx.load(tmp_path / "int8.onnx").graph
    assert units(tmp_path)["conv1"] != "float"
    result = invoke("check", write_project(tmp_path, place=""))
    assert result.exit_code == 0, result.output
    assert plan.read_bytes() == wanted
    assert onnx.load(tmp_path / "int8.onnx").graph == model
    assert result.stderr.startswith(f"{tmp_path / 'int8.onnx'}: written again; ")
    plan.write_text(json.dumps({"schema": 1, "units": dict.fromkeys(by_rules, "float")}))  # of a run that kept float
    check_project(write_project(tmp_path, place=""))
    assert units(tmp_path) == by_rules


def test_a_plan_beside_the_output_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "int8.plan.json").write_text('{"schema": 1, "units": {"conv9": "u8->u8"}}')
    result = invoke("check", write_project(tmp_path, place=""), "--update")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "no unit of int8.plan.json in the model named 'conv9'" in line
    assert line.endswith("; without int8.plan.json the model is placed anew")


def test_other_errors_that_name_the_plan_give_no_advice_about_it(tmp_path: Path) -> None:
    (tmp_path / "int8.plan.json").write_text('{"schema": 1, "units": {"conv1": "u8->u8"}}')
    project = write_project(tmp_path, place="")
    project.write_text(project.read_text().replace(f"{SAMPLES / 'digits.npz'}:calib", "int8.plan.json.npz"))
    result = invoke("check", project, "--update")
    assert result.exit_code == 2
    assert "int8.plan.json.npz" in result.stderr
    assert "placed anew" not in result.stderr


@pytest.mark.slow
def test_a_project_that_asks_for_less_fails(tmp_path: Path) -> None:
    check_project(write_project(tmp_path), update=True)
    found = check_project(write_project(tmp_path, quantize='exclude_nodes = ["conv2"]'))
    assert not found.ok
    assert "conv2" in str(found)


@pytest.mark.slow
def test_a_check_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = write_project(tmp_path)
    for name in ("requant", "numpy", "onnx"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    before = sys.path[:]
    assert check_project(project, update=True).ok
    assert sys.path == before


def test_what_quantize_refuses_is_refused(tmp_path: Path) -> None:
    project = write_project(tmp_path, quantize='exclude_nodes = ["conv9"]')
    result = invoke("check", project, "--update")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "[quantize]: no node named 'conv9'" in result.stderr
    assert not (tmp_path / "requant.lock.json").exists()


@pytest.mark.parametrize(
    ("search", "says"),
    [
        ("max_drop = -0.5", "'-0.5' is not a drop"),
        ("max_drop = 201", "the allowed drop of sqnr: 201 is out of range; the greatest drop is 200 dB"),
        ('max_drop = "200%"', "the allowed drop of sqnr: 200% is out of range; the greatest drop is 100%"),
        ("max_drop = true", "[quantize] max_drop: must be a number or a text, not True"),
    ],
)
def test_a_drop_is_a_number_or_a_text(tmp_path: Path, search: str, says: str) -> None:
    search = f'{search}\nmetric = "sqnr"\neval_data = "{SAMPLES / "digits.npz"}"'
    result = invoke("check", write_project(tmp_path, quantize=search, place=""), "--update")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"requant: {tmp_path / 'requant.toml'}: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "int8.onnx").exists()


def test_a_number_allows_the_same_drop_as_its_text() -> None:
    row = next(row for row in QUANTIZE if row.name == "max_drop")
    values = {"metric": "sqnr", "eval_data": "e.npz"}
    assert build_goal({**values, "max_drop": row.read(0.5)}) == build_goal({**values, "max_drop": row.read("0.5")})


def test_what_the_check_refuses_is_refused_before_anything_is_quantized(tmp_path: Path) -> None:
    project = write_project(tmp_path, check="[check.tolerance]\nsqnrr = 1")
    result = invoke("check", project, "--update")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"requant: {project}: [check]: no tolerance named 'sqnrr'; did you mean 'sqnr'?")
    result = invoke("check", write_project(tmp_path), "--update", "--tolerance", "sqnr=1e300")
    assert result.exit_code == 2
    assert result.stderr == (
        f"requant: {project}: [check] (given beside it: tolerance): tolerance 'sqnr': 1e+300 is out of range; "
        "the greatest drop is 200 dB\n"
    )
    assert not (tmp_path / "int8.onnx").exists()
