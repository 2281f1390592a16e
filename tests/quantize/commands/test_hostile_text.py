"""Names that attack a terminal, a log of CI, a page or a file never reach it raw: every command, every output."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from requant import RequantError
from requant.calibration.checks.findings import Finding
from requant.cli import main
from requant.quantize.commands.app import Commands
from requant.quantize.console.checked import print_check
from requant.quantize.console.progress import progress_bar
from requant.quantize.console.quantized import print_findings
from requant.quantize.console.terminal import Terminal
from requant.quantize.gate.judge import Line, Status
from requant.quantize.gate.lock import checksum
from requant.quantize.gate.outputs import github_lines, junit, markdown
from requant.quantize.gate.run import Check
from requant.system.printable import LINE, printable, printable_lines

from ...texts import HOSTILE, READABLE, SURROGATE, assert_printable, hostile_model

TEXTS = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
ANY_TEXTS = pytest.mark.parametrize("text", [*HOSTILE.values(), SURROGATE], ids=[*HOSTILE, "surrogate"])


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be no job on GitHub, wherever the tests run."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


def invoke(*arguments: object, code: int = 0) -> Result:
    """Run a command, and assert that both streams are printable and that it ends with this exit code."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="requant")
    assert result.exit_code == code, (result.output[-1000:], result.exception)
    assert_printable(result.stdout)
    assert_printable(result.stderr, LINE)
    return result


def refused(*arguments: object) -> str:
    """Run a command that refuses, and return its one line."""
    line, end = invoke(*arguments, code=2).stderr.split("\n")
    assert line.startswith("requant: ")
    assert end == ""
    return line


def assert_inert(page: str) -> None:
    """Assert that a page is printable, and that only its own scripts run."""
    assert_printable(page)
    assert "<img" not in page
    assert len(re.findall(r"<\s*/?\s*script", page, re.IGNORECASE)) == 6
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert data is not None
    assert data[1].isascii()
    json.loads(data[1])


# ---------------------------------------------------------------------------------------------- commands over models


@TEXTS
def test_inspect(text: str, tmp_path: Path) -> None:
    model = hostile_model(tmp_path / "m.onnx", text)
    invoke("inspect", model)
    invoke("inspect", model, "--print-structure")
    label = printable(f"{text}in").replace("\\", "\\\\").replace('"', '\\"')
    assert f'[shape=ellipse, label="{label}"]' in invoke("inspect", model, "--dot").stdout
    assert json.loads(invoke("inspect", model, "--json").stdout)["inputs"][0]["name"] == f"{text}in"
    if "=" not in text:
        invoke("inspect", model, "--nodes", "--dim", f"{text}N=2")
    refused("inspect", model, "--dim", "other=2")


@TEXTS
def test_diff(text: str, tmp_path: Path) -> None:
    first = hostile_model(tmp_path / "a.onnx", text)
    second = hostile_model(tmp_path / "b.onnx", f"{text}.")
    invoke("diff", first, second, "--all", code=1)
    invoke("diff", first, second, "--json", code=1)


@TEXTS
def test_transform(text: str, tmp_path: Path) -> None:
    model = hostile_model(tmp_path / "m.onnx", text)
    invoke("transform", model, tmp_path / "o.onnx", "--group", "simplify", "-v")
    invoke("transform", model, tmp_path / "p.onnx", "--transforms", "fold_constants", "--json")
    if "," not in text:
        refused("transform", model, tmp_path / "q.onnx", "--transforms", "strip_unused_nodes", "--outputs", text)


@TEXTS
def test_a_page_shows_names_and_runs_none(text: str, tmp_path: Path) -> None:
    invoke("view", hostile_model(tmp_path / "m.onnx", text), "-o", tmp_path / "m.html")
    assert_inert((tmp_path / "m.html").read_text(encoding="utf-8"))


@TEXTS
def test_a_project_is_the_one_of_its_template(text: str, tmp_path: Path) -> None:
    invoke("init", hostile_model(tmp_path / "m.onnx", text), "-o", tmp_path / "requant.toml")
    made = (tmp_path / "requant.toml").read_text(encoding="utf-8")
    assert_printable(made)
    assert tomllib.loads(made)["quantize"]["data"] == "calib.npz"


@pytest.mark.parametrize("name", ['b\x1b]0;x\x07\n::y\u202e[red] "q"', "😀é日本", "a\\b\x7f"])
def test_paths_are_shown_printable_and_written_so_that_they_are_read_back(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    model = hostile_model(folder / "m.onnx", "", input_name="in")
    invoke("inspect", model)
    invoke("inspect", folder / "none.onnx", code=2)
    invoke("view", model, "-o", folder / "m.html")
    assert_inert((folder / "m.html").read_text(encoding="utf-8"))
    invoke("init", model, "-o", tmp_path / "requant.toml")
    assert tomllib.loads((tmp_path / "requant.toml").read_text())["model"] == f"{name}/m.onnx"
    timed = invoke("bench", model, "--dim", "N=1", "--no-profile", "--settings", "--seconds", "0.01").stdout
    code = timed[timed.index("import onnxruntime") :]
    session = re.search(r"InferenceSession\((\".*\"), options", code)
    assert session is not None
    assert eval(session[1]) == str(model)


def test_a_path_that_is_no_utf8_is_refused_where_toml_must_hold_it(tmp_path: Path) -> None:
    folder = os.fsdecode(bytes(tmp_path) + b"/\xff")
    os.mkdir(folder)
    model = hostile_model(Path(folder) / "m.onnx", "", input_name="in")
    assert "not UTF-8" in refused("init", model, "-o", tmp_path / "requant.toml")
    assert not (tmp_path / "requant.toml").exists()
    assert "\\udcff/m.onnx" in "".join(invoke("inspect", model).stdout.split())
    assert str(model) in json.loads(invoke("inspect", model, "--json").stdout).values()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantize a model with every hostile text in its names, and return the folder with all reports."""
    folder = tmp_path_factory.mktemp("run")
    text = "".join(each[:40] for each in HOSTILE.values())
    model = hostile_model(folder / "m.onnx", text, input_name=text.replace("\x00", ""))
    feeds: Any = {text.replace("\x00", ""): np.random.default_rng(1).normal(size=(8, 1, 8)).astype(np.float32)}
    np.savez(folder / "d.npz", **feeds)
    reports = ("--report", folder / "r.html", "--report", folder / "r.json")
    fast = ("--effort", "low", "--place", "estimated", "--force-int8")
    shown = invoke("quantize", model, "--data", folder / "d.npz", "-o", folder / "q.onnx", *fast, *reports, "-v")
    assert "\\x1b]0;owned" in shown.stdout
    return folder


def test_reports(run: Path) -> None:
    assert_inert((run / "r.html").read_text(encoding="utf-8"))
    invoke("report", run / "r.json", run / "r.json", "-o", run / "two.html")
    assert_inert((run / "two.html").read_text(encoding="utf-8"))
    for written in (run / "r.json", run / "q.plan.json"):
        assert written.read_text(encoding="utf-8").isascii()


@pytest.mark.parametrize(
    "arguments",
    [
        ("calibrate", "m.onnx", "--data", "d.npz", "-o", "c.json"),
        ("explain", "q.onnx", "--data", "d.npz", "--all"),
        ("compare", "m.onnx", "q.onnx", "--data", "d.npz"),
        ("compare", "m.onnx", "q.onnx", "--data", "d.npz", "--json"),
        ("sensitivity", "m.onnx", "--data", "d.npz", "--fresh"),
        ("bench", "m.onnx", "--data", "d.npz"),
        ("compile", "q.onnx", "-o", "h.onnx", "--data", "d.npz"),
        ("costs", "measure", "m.onnx", "--data", "d.npz", "-o", "costs.json"),
    ],
    ids=" ".join,
)
def test_commands_that_run_models(arguments: tuple[str, ...], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    invoke(*arguments)
    for path in run.glob("c*.json"):
        assert path.read_text(encoding="utf-8").isascii()


def test_the_gate(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    pair = ("check", "--float", "m.onnx", "--model", "q.onnx", "--data", "d.npz", "--seconds", "0")
    invoke(*pair, "--baseline", "lock.json", "--update")
    assert (run / "lock.json").read_text(encoding="utf-8").isascii()
    baseline = json.loads((run / "lock.json").read_text())
    newer = {**baseline, "opset": 99}
    (run / "lock.json").write_text(json.dumps({**newer, "checksum": checksum(newer)}))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(run / "summary.md"))
    shown = invoke(*pair, "--baseline", "lock.json", "--junit", "j.xml", "--markdown", "m.md", code=1)
    commands = [line for line in shown.output.split("\n") if line.lstrip().startswith("::")]
    assert {line.partition(" title=")[0] for line in commands} == {"::error"}
    ElementTree.parse(run / "j.xml")
    for name in ("j.xml", "m.md", "summary.md"):
        assert_printable((run / name).read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------- outputs by themselves


def failed_check(text: str) -> Check:
    """Return a check with one line that fails, and the same text everywhere."""
    texts: Any = dict.fromkeys(("name", "baseline", "measured", "tolerance", "reason"), text)
    line = Line(status=Status.FAIL, layers=(text, text), **texts)
    models: Any = dict.fromkeys(("float_model", "int8_model", "baseline", "measured"), text)
    return Check(lines=(line,), **models)


@ANY_TEXTS
def test_outputs_of_a_check(text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check = failed_check(text)
    (case,) = ElementTree.fromstring(junit(check)).iter("testcase")
    assert_printable(case.attrib["name"])
    assert_printable("".join(case.itertext()))
    assert_printable(str(check))
    rows = markdown(check)
    assert_printable(rows)
    assert [line[:2] for line in rows.split("\n")] == ["##", "", "| ", "|-", "| ", "", "- ", "  ", "  ", ""]
    assert not re.search(r"(?<!\\)[<\[$]", re.sub(r"`[^`\n]*`", "", rows.split("tolerance |")[1]))
    (command,) = github_lines(check)
    assert_printable(command)
    assert re.fullmatch(r"::error title=requant check%3A [^:,]*::[^\r\n]*", command)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    print_check(check)
    shown = capsys.readouterr().err
    assert_printable(shown, LINE)
    assert "::" not in shown


@ANY_TEXTS
def test_tables_and_findings_are_plain_text(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_findings([Finding("few", text, text, "warning", curve=((1, 0.5),))])
    Terminal().print(text, soft_wrap=True)
    Terminal().print_code(text[:1000])
    streams = capsys.readouterr()
    if len(text) < 100:
        assert streams.out == f"{printable(text)}\n{printable_lines(text)}\n"
    assert_printable(streams.err, LINE)
    assert_printable(streams.out)
    monkeypatch.setenv("FORCE_COLOR", "1")
    Terminal().print(text)
    assert "\x1b" not in capsys.readouterr().out  # neither markup nor a highlighter styles a name


@ANY_TEXTS
def test_stages_of_progress(text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    with progress_bar() as show:
        show(text, 1, 2)
    assert_own_codes(capsys.readouterr().err)


@pytest.mark.parametrize("text", READABLE)
def test_legitimate_names_stay_readable(text: str, tmp_path: Path) -> None:
    model = hostile_model(tmp_path / "m.onnx", text)
    assert f"{text}first (MatMul)" in invoke("inspect", model, "--print-structure").stdout
    shown = invoke("inspect", model, "--nodes", "--dim", f"{text}N=2").stdout
    assert f"{text}first" in shown
    invoke("view", model, "-o", tmp_path / "m.html")
    assert f'data-name="{text}first"' in (tmp_path / "m.html").read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------- errors and streams


@ANY_TEXTS
def test_what_is_asked_for_is_refused_in_one_line(text: str) -> None:
    assert refused("ops", f"x{text}")[:18] == "requant: no operat"
    assert refused("inspect", f"none{text.replace(chr(0), '')[:200]}")[:13] == "requant: none"
    assert refused(f"--{text}").endswith("(see 'requant --help')")
    assert refused(f"x{text}").startswith("requant: no command named 'x")
    assert refused("inspect", "--shape", f"{text}", "m.onnx")


def test_the_help_of_a_group_is_not_an_error() -> None:
    assert invoke("costs", code=2).stderr.startswith("Usage: requant costs")
    assert invoke(code=2).stderr.startswith("Usage: requant ")


@click.group(cls=Commands)
def group() -> None:
    """Commands that fail."""


@group.command()
@click.argument("kind")
@click.argument("text")
def fail(kind: str, text: str) -> None:
    """Raise an error with a text."""
    if kind == "interrupt":
        raise KeyboardInterrupt(text)
    raise RequantError(text) from ValueError(text)


@ANY_TEXTS
@pytest.mark.parametrize("kind", ["interrupt", "refuse", "-v"])
def test_interrupts_refusals_and_tracebacks(kind: str, text: str) -> None:
    result = CliRunner().invoke(group, ["fail", kind, f"x{text}"])
    assert_printable(result.stderr, LINE)
    assert result.stderr.rstrip("\n").split("\n")[-1].startswith("requant: ")


SCRIPT = """
import logging, sys, warnings
import click
from requant.quantize.commands.app import Commands

@click.group(cls=Commands)
def group():
    pass

@group.command()
def fail():
    text = "\\x1b]0;owned\\x07\\n::stop-commands::x\\ud800" + 1000 * "n"
    warnings.warn(text)
    logging.getLogger("library").warning(text)
    click.echo("é µ 日本", err=False)
    raise ValueError(text)

group(["fail"])
"""


def test_warnings_log_records_and_crashes_are_printable() -> None:
    streams = {"PYTHONIOENCODING": "latin-1", "PYTHONWARNINGS": "always"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, env={**os.environ, **streams}, timeout=60, check=False
    )
    shown = done.stderr.decode()
    assert_printable(shown, LINE)
    assert shown.count("\\x1b]0;owned") == 3
    assert shown.startswith("warning: ")
    assert "ValueError" in shown
    assert done.stdout == b"\xe9 \xb5 \\u65e5\\u672c\n"
    assert done.returncode == 1


# ------------------------------------------------------------------------------------------------------------- terminal

OWN_CODES = re.compile(r"\x1b\[(?:(?:0|[1-9]|3[0-9]|9[0-7]|38;5;\d+|;)*m|\?25[lh]|1A|2K)|\r")
"""What rich writes: styles, hiding the cursor, and going back to the beginning of the bar."""


def assert_own_codes(shown: str) -> None:
    assert_printable(OWN_CODES.sub("", shown))


@pytest.mark.slow
def test_a_terminal_gets_the_codes_of_tables_and_of_nothing_else(tmp_path: Path) -> None:
    path = hostile_model(tmp_path / "m\x1b]0;owned\x07[red].onnx", HOSTILE["escape"] + HOSTILE["markup"])
    shown = typed("explain", path)
    assert_own_codes(shown)
    assert "left:" in shown  # the bar is there
    assert "\x1b[1m" in shown  # and so are styles of tables
    assert "\\x1b]0;owned\\x07\\x1b[31mred[red]a" in "".join(OWN_CODES.sub("", shown).split())


def typed(*arguments: object) -> str:
    """Run requant in a terminal of 200 columns, and return what it shows."""
    keyboard, screen = pty.openpty()
    command = [sys.executable, "-m", "requant.cli", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    with subprocess.Popen(command, stdin=screen, stdout=screen, stderr=screen, env=environment) as child:
        os.close(screen)
        shown = io.BytesIO()
        while True:
            try:
                shown.write(os.read(keyboard, 65536))
            except OSError:  # the child has closed its end
                break
        child.wait(timeout=60)
    os.close(keyboard)
    assert child.returncode == 0, shown.getvalue()
    return shown.getvalue().decode()


def test_completion_offers_options_and_choices_and_no_name_of_a_model() -> None:
    for typed_word in ("", "--", "--eff", "\x1b]0;x", "[red]", "##[group]"):
        words = f"requant quantize {typed_word}"
        environment: dict[str, Any] = {"_REQUANT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "2"}
        offered = CliRunner().invoke(main, [], prog_name="requant", env=environment)
        assert offered.exit_code == 0
        repeated = {f"file,{typed_word}", ""}  # the shell completes paths itself
        assert {line for line in offered.stdout.split("\n") if not re.fullmatch("plain,[a-z0-9-]+", line)} <= repeated
