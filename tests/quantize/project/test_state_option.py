"""The option `state` on the command line, in a requant.toml, and for the data of a search."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner

from requant.calibration import DataSpec
from requant.cli import main
from requant.quantize import Options
from requant.quantize.options.build import build_data
from requant.quantize.project.request import build_goal
from requant.quantize.runtime.progress import silent
from requant.quantize.steps.prepare import prepare

ROWS = """
<ir_version: 8, opset_import: ["" : 17]>
rows (float[N, 8] x, float[N, 8] memory) => (float[N, 8] y, float[N, 8] kept) {
    sum = Add(x, memory)
    y = Relu(sum)
    kept = Tanh(sum)
}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "rows.onnx"
    onnx.save_model(onnx.parser.parse_model(ROWS), path)
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32))
    return path


@pytest.mark.parametrize("given", ["kept=memory", ["kept=memory"], ("kept=memory",)])
def test_a_project_names_one_or_several(given: Any) -> None:
    assert build_data({"data": "d.npz", "state": given}) == DataSpec("d.npz", state=("kept=memory",))


def test_the_data_of_a_search_have_the_same_state() -> None:
    values = {"max_drop": "1%", "metric": "sqnr", "eval_data": "e.npz"}
    for state, data in ((None, "e.npz"), (("none",), DataSpec("e.npz", state=("none",)))):
        goal = build_goal({**values, **({} if state is None else {"state": state})})
        assert goal is not None
        assert goal.data == data


@pytest.mark.parametrize(
    ("data", "evaluated", "same"),
    [
        ("photos_v1.1", "other_v1.2/", True),
        ("a.csv", "b.jsonl", True),
        ("photos_v1.1", "b.npz", False),
        ("a.npz:calib", "b.csv", False),
    ],
)
def test_data_of_the_same_kind_are_read_in_the_same_way(
    data: str, evaluated: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("photos_v1.1", "other_v1.2"):
        Path(folder).mkdir()
    reading: Any = {"preprocess": "scale=255", "tokenizer": "tok.py:encode"}
    goal = build_goal({"max_drop": "1%", "metric": "sqnr", "eval_data": evaluated, "data": data, **reading})
    assert goal is not None
    assert goal.data == (DataSpec(evaluated, **reading) if same else evaluated)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            [],
            "no array named 'memory' for the input; if an output of the model feeds it: --state OUT=memory (in Python",
        ),
        (["--state", "kept=memry"], "no input named 'memry'; did you mean 'memory'?"),
        (["--state", "kapt=memory"], "no output named 'kapt'; did you mean 'kept'?"),
        (["--state", "memory"], "'memory' is no pair; write OUT=IN"),
        (["--state", "y=memory", "--state", "kept=memory"], "input 'memory' is fed by more than one output"),
    ],
)
def test_wrong_requests_end_in_one_line(model: Path, state: list[str], message: str) -> None:
    data = ["--data", str(model.with_name("data.npz")), *state]
    output = model.with_name("q.onnx")
    for command in (["quantize", str(model), "-o", str(output)], ["compare", str(model), str(model)]):
        result = CliRunner().invoke(main, [*command, *data])
        assert result.exit_code == 2
        assert message in result.output
        assert result.output.count("\n") == 1
    assert not output.exists()


def test_the_only_possible_pair_is_proposed(tmp_path: Path) -> None:
    text = ROWS.replace("float[N, 8] y", "float[N] y").replace(
        "y = Relu(sum)", "y = ReduceMax<axes = [1], keepdims = 0>(sum)"
    )
    onnx.save_model(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((6, 8), np.float32))
    command = ["compare", *[str(tmp_path / "m.onnx")] * 2, "--data", str(tmp_path / "d.npz")]
    assert (
        "--state kept=memory (in Python: DataSpec(state=['kept=memory']))" in CliRunner().invoke(main, command).output
    )
    assert CliRunner().invoke(main, [*command, "--state", "kept=memory"]).exit_code == 0


def test_names_that_show_nothing_can_be_given(model: Path) -> None:
    data = ["--data", str(model.with_name("data.npz")), "--state", "kept=memory"]
    result = CliRunner().invoke(main, ["compare", str(model), str(model), *data])
    assert result.exit_code == 0, result.output
    assert "kept feeds memory" in result.output


def test_a_state_needs_data(model: Path) -> None:
    asked = ["quantize", str(model), "-o", str(model.with_name("q.onnx")), "--dynamic", "--state", "kept=memory"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 2
    assert "--state needs --data SRC" in result.output


def test_an_input_that_is_passed_on_is_no_state(model: Path) -> None:
    """The encoder of a translator passes its mask to the decoder."""
    text = ROWS.replace("kept", "memory_out").replace(
        "memory_out = Tanh(sum)", "m = Identity(memory) memory_out = Identity(m)"
    )
    assert "Identity(memory)" in text
    onnx.save_model(onnx.parser.parse_model(text), model)
    rows = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    np.savez(model.with_name("data.npz"), x=rows, memory=rows)
    made = prepare(model, str(model.with_name("data.npz")), Options(), model.parent, silent)
    assert [note for note in made.notes if note.startswith("state: ")] == []


def test_a_list_of_feeds_proposes_the_option(model: Path) -> None:
    script = "import numpy as np\nx = np.ones((1, 8), np.float32)\nsteps = [[{'x': x}, {'x': x}]] * 4\n"
    model.with_name("steps.py").write_text(script)
    data = ["--data", f"{model.with_name('steps.py')}:steps"]
    result = CliRunner().invoke(main, ["compare", str(model), str(model), *data])
    assert result.exit_code == 2
    assert "for a model with a state (--state OUT=IN, in Python: DataSpec(state=['OUT=IN']))" in result.output


def test_a_state_in_the_data_is_told(model: Path) -> None:
    """The errors of one step are not those of a stream."""
    onnx.save_model(onnx.parser.parse_model(ROWS.replace("kept", "memory_out")), model)
    rows = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    np.savez(model.with_name("data.npz"), x=rows, memory=rows)
    made = prepare(model, str(model.with_name("data.npz")), Options(), model.parent, silent)
    (note,) = [note for note in made.notes if note.startswith("state: ")]
    assert note.startswith("state: memory_out feeds memory, but the data give it")


FRAMES = """
<ir_version: 8, opset_import: ["" : 17]>
frames (float[1, 16] x, float[1, 2, 8] input_3) => (float[1, 16] mask, float[1, 2, 8] stack)
<float[16, 16] w, int64[2] wide, int64[3] deep> {
    flat = Reshape(input_3, wide)
    sum = Add(x, flat)
    made = MatMul(sum, w)
    mask = Sigmoid(made)
    next = Tanh(made)
    stack = Reshape(next, deep)
}
"""


def frames(folder: Path, text: str = FRAMES) -> list[str]:
    """Write a model of frames whose names do not tell its state, and data with a state in each sample."""
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    del model.graph.initializer[:]
    for name, value in (
        ("w", rng.standard_normal((16, 16)).astype(np.float32)),
        ("wide", np.array([1, 16])),
        ("deep", np.array([1, 2, 8])),
    ):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save_model(model, folder / "frames.onnx")
    (folder / "calib").mkdir()
    for index in range(6):
        x, state = rng.standard_normal((1, 16)), rng.standard_normal((1, 2, 8))
        np.savez(folder / "calib" / f"{index}.npz", x=x.astype(np.float32), input_3=state.astype(np.float32))
    return [str(folder / "frames.onnx"), "--data", str(folder / "calib")]


HINT = "state: output 'stack' has the shape of input 'input_3': if it feeds the next run, say --state stack=input_3"


def test_a_state_that_only_shapes_show_is_proposed_and_not_carried(tmp_path: Path) -> None:
    model, *data = frames(tmp_path)
    output = str(tmp_path / "ranges.json")
    for command in (["compare", model, model, *data], ["calibrate", model, *data, "-o", output, "--force"]):
        for state, expected in (((), 1), (("--state", "none"), 0), (("--state", "stack=input_3"), 0)):
            result = CliRunner().invoke(main, [*command, *state])
            assert result.exit_code == 0, result.output
            assert " ".join(result.output.split()).count(HINT) == expected
    made = prepare(model, data[1], Options(), tmp_path, silent)
    assert [note for note in made.notes if note.startswith("state: ")] == [HINT]


def test_a_tensor_that_is_passed_on_is_not_proposed(tmp_path: Path) -> None:
    model, *data = frames(tmp_path, FRAMES.replace("stack = Reshape(next, deep)", "stack = Identity(input_3)"))
    result = CliRunner().invoke(main, ["compare", model, model, *data])
    assert result.exit_code == 0, result.output
    assert "--state" not in result.output
