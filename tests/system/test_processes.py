"""The processes of a command: crashes, signals, death of the parent, what is left over, what is imported and asked."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner

from requant import __main__ as program
from requant.cli import main
from requant.system import ending, notes, scratch, supervisor
from requant.system.imports import forget_empty_paths

from ..texts import without_stages

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SAMPLES = Path(__file__).parents[2] / "sample_models"
CRASHING = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[1,4] x) => (float[1,4] y, int64[1] z) <int64[1] a = {-9223372036854775808}, int64[1] b = {-1}> {
  y = Relu(x)
  z = Div(a, b)
}
"""
READER = """
import time
from pathlib import Path
import numpy as np

def feeds():
    for i in range(1000):
        if i == 1:
            Path(__file__).with_suffix(".begun").touch()
        time.sleep(0.01 if i == 0 else 0.1)
        yield {"x": np.full((1, 4), i, np.float32)}
"""
PLAIN = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[1,4] x) => (float[1,2] y) <float[4,2] w = {1, 2, 3, 4, 5, 6, 7, 8}> {
  m = MatMul(x, w)
  y = Relu(m)
}
"""


def save(text: str, path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def requant(*arguments: object, cwd: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own, outside of the checkout."""
    command = [sys.executable, "-P", "-m", "requant", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120, **settings)  # type: ignore[call-overload, no-any-return]


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Return whether a process runs; one that is dead and not yet awaited does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------ a tiny command

SUPERVISED = """
import ctypes, os, signal, sys, time
from pathlib import Path
from requant.system import notes, scratch, stderr, supervisor
supervisor.GRACE = supervisor.NOTICE = 0.3

def command():
    Path("child").write_text(str(os.getpid()))
{body}

supervisor.supervised(command)
"""
STUCK = 'signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); Path("begun").touch(); time.sleep(60)'
HOLDS = 'with scratch.scratch_folder(".") as folder: (folder / "weights").touch(); '


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a supervised command in `tmp_path`, from the body of a function."""
    started = []

    def begin(body: str) -> subprocess.Popen[str]:
        code = SUPERVISED.format(body=textwrap.indent(textwrap.dedent(body), "    "))
        pipe = subprocess.PIPE
        command = [sys.executable, "-P", "-c", code]
        started.append(subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("print(input())", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 2, "requant: the process crashed: SIGSEGV; the model"),
        (f"{HOLDS} os.abort()", 2, "requant: the process crashed: SIGABRT"),
        (
            "notes.note(stage='load', model='m.onnx'); notes.note_written('q.onnx'); os.kill(os.getpid(), signal.SIGKILL)",
            2,
            r"requant: the process crashed: SIGKILL \(killed, .*memory.*\) in stage 'load' with 'm.onnx'; written: q.onnx\n$",
        ),
        (
            "with stderr.aside(): os.write(2, b'first\\nAssertion failed\\n'); os.abort()",
            2,
            r"requant: the process crashed: SIGABRT \(Assertion failed\);",
        ),
        ("with stderr.aside(): os.write(2, b'\\x1b[31ma warning\\n')", 0, r"note: \\x1b\[31ma warning\n$"),
        ("import atexit; atexit.register(os.abort); sys.exit(1)", 1, "$"),
        ("raise KeyboardInterrupt", 130, "requant: interrupted\n$"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", 143, "requant: interrupted by SIGTERM\n$"),
        ("os.kill(os.getppid(), signal.SIGHUP); time.sleep(60)", 129, "requant: interrupted by SIGHUP\n$"),
        # the terminal sends a signal to both, and the parent passes it on
        (
            """
            for pid in (os.getpid(), os.getppid()): os.kill(pid, signal.SIGINT)
            """,
            130,
            "requant: interrupted\n$",
        ),
    ],
    ids="output exit none crash abort told assertion warning at-exit interrupt child parent both".split(),
)
def test_how_a_command_ends(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path, body: str, code: int, said: str
) -> None:
    process = start(body)
    out, error = process.communicate("hello\n", timeout=60)
    assert (process.returncode, out) == (code, "hello\n" if body == "print(input())" else "")
    assert re.match(said, error), error
    assert len(error.splitlines()) <= 1
    assert {path.name for path in tmp_path.iterdir()} == {"child"}


def test_an_interrupt_that_nothing_heeds_says_how_to_end(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start(STUCK)
    wait_for((tmp_path / "begun").exists)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    told = process.stderr.readline()
    assert told == "requant: interrupted, and waits for the step that runs; Ctrl-C again ends it\n"
    time.sleep(2 * ending.TOGETHER)  # signals that come together count as one
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "requant: interrupted\n")


def test_a_command_that_does_not_listen_is_killed(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start(HOLDS + STUCK)
    wait_for((tmp_path / "begun").exists)
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (143, "requant: interrupted by SIGTERM\n")
    assert {path.name for path in tmp_path.iterdir()} == {"child", "begun"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_child_dies_with_its_parent_and_the_next_run_sweeps(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start(HOLDS + STUCK)
    wait_for((tmp_path / "begun").exists)
    child = int((tmp_path / "child").read_text())
    assert running(child)
    process.kill()
    wait_for(lambda: not running(child), 5.0)
    assert [path.name.startswith(".requant-") for path in tmp_path.glob(".*")] == [True]
    start(HOLDS.replace("folder:", "folder: pass").partition(" (folder")[0]).communicate(timeout=60)
    assert list(tmp_path.glob(".*")) == []


def test_a_stopped_command_goes_on(start: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    process = start("Path('begun').touch(); print(input())")
    wait_for((tmp_path / "begun").exists)
    process.send_signal(signal.SIGTSTP)
    wait_for(lambda: os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG))
    process.send_signal(signal.SIGCONT)
    assert process.communicate("on\n", timeout=60) == ("on\n", "")


def test_ignored_signals_stay_ignored(start: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = start("Path('begun').touch(); print(input())")
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for((tmp_path / "begun").exists)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    assert process.communicate("on\n", timeout=60) == ("on\n", "")


# ---------------------------------------------------------------------------------------------- temporary files


def test_what_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_swept", set[str]())
    dead = [f"{scratch.prefix()}{name}" for name in ("dead", "file.tmp")]
    (tmp_path / dead[0] / "inner").mkdir(parents=True)
    (tmp_path / dead[1]).touch()
    others = [".requant-0123abcd-other", ".requant-old", "requant-mine", f"{scratch.prefix()}link"]
    for name in others[:3]:
        (tmp_path / name).mkdir()
    (tmp_path / others[3]).symlink_to(tmp_path / others[2])
    with scratch.scratch_folder(tmp_path) as mine, scratch.scratch_file(tmp_path) as file:
        scratch.sweep(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {*others, mine.name, file.name}
    assert {path.name for path in tmp_path.iterdir()} == set(others)


@pytest.mark.parametrize("missing", [[], ["m.onnx"], ["m.onnx", "m.onnx.data"]], ids=["none", "model", "both"])
def test_files_that_were_being_replaced_are_put_back(tmp_path: Path, missing: list[str]) -> None:
    old = tmp_path / f"{scratch.prefix()}dead" / scratch.OLD
    old.mkdir(parents=True)
    for name in ("m.onnx", "m.onnx.data"):
        (old / name).write_text("old")
        (tmp_path / name).write_text("new")
    for name in missing:
        (tmp_path / name).unlink()
    scratch.sweep(tmp_path)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == dict.fromkeys(("m.onnx", "m.onnx.data"), "old" if missing else "new")


def test_notes_survive_a_crash_while_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_page", None)
    notes.share()
    notes.forget()
    notes.note(stage="one")
    notes.note(stage="two")
    page = notes._page
    assert page is not None
    slot = 1 + (1 - page[0]) * notes.SLOT
    page[slot : slot + 4] = b"torn"
    assert notes.read().stage == "two"


TWO = """
import sys, numpy as np, onnx_ir as ir
from requant.quantize.model.writing import save_model
number, output = int(sys.argv[1]), sys.argv[2]
w = ir.Value(name="w", const_value=ir.tensor(np.full(4000, number, np.float32)))
model = ir.Model(ir.Graph([], [w], nodes=[], initializers=[w], opset_imports={"": 21}), ir_version=10)
model.metadata_props["run"] = str(number)
for _ in range(25):
    save_model(model, output, external=True)
"""


@pytest.mark.slow
def test_two_runs_with_the_same_output_leave_the_files_of_one(tmp_path: Path) -> None:
    output = tmp_path / "m.onnx"
    runs = [subprocess.Popen([sys.executable, "-P", "-c", TWO, str(n), str(output)]) for n in (1, 2)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    model = onnx.load(output)
    (number,) = {prop.value for prop in model.metadata_props if prop.key == "run"}
    assert set(onnx.numpy_helper.to_array(model.graph.initializer[0])) == {float(number)}
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "m.onnx.data"}


# --------------------------------------------------------------------------------------------------- the program


@pytest.mark.slow
def test_a_crash_of_the_runtime_is_one_line(tmp_path: Path) -> None:
    save(CRASHING, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 4), np.float32))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = requant(
        *("quantize", "m.onnx", "--data", "d.npz", "-o", "q.onnx"),
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = without_stages(done.stderr).splitlines()
    assert re.match(r"requant: onnxruntime crashed: SIGFPE \(.*\).* with 'm.onnx'; ", line)
    assert {path.name for path in tmp_path.rglob("*")} == {"m.onnx", "d.npz", "tmp"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)],
    ids=["term", "kill"],
)
def test_workers_end_with_the_command(tmp_path: Path, sent: int, code: int) -> None:
    save(PLAIN, tmp_path / "m.onnx")
    (tmp_path / "slow.py").write_text(READER)
    options = ["--data", "slow.py:feeds", "-o", "r.json", "--executor", "processes", "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "requant", "calibrate", "m.onnx", *options],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for((tmp_path / "slow.begun").exists)
    wait_for(lambda: len(descendants(process.pid)) == 3)  # the command, a worker, and what tracks semaphores
    family = descendants(process.pid)
    process.send_signal(sent)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code
    if sent == signal.SIGTERM:
        assert re.fullmatch(
            r"requant: interrupted by SIGTERM(; the same command goes on where it stopped)?\n", without_stages(error)
        )
        assert {path.name.partition(".json")[0] for path in tmp_path.glob(".*")} <= {".r"}  # a checkpoint
    wait_for(lambda: not any(map(running, family)), 10.0)


def test_an_interrupt_waits_until_the_workers_have_started(start: Callable[[str], subprocess.Popen[str]]) -> None:
    process = start("""
    import concurrent.futures.process as library
    from requant.calibration.runs.executors import executor_named
    begin = library._ExecutorManagerThread.start
    def interrupted(thread):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # the interpreter runs the handler here
        begin(thread)
    library._ExecutorManagerThread.start = interrupted
    with executor_named("processes", 1) as make, make() as pool:
        pool.submit(len, "abc")
    """)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, output, error) == (130, "", "requant: interrupted\n")


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


@pytest.mark.slow
def test_output_that_nobody_reads_or_holds(tmp_path: Path) -> None:
    command = f"'{sys.executable}' -P -m requant"
    script = f"{command} ops | head -1; echo ${{PIPESTATUS[0]}}; {command} --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0].startswith("operator")
    assert set(done.stdout.splitlines()[1:]) <= {"0", "141"}
    if Path("/dev/full").exists():
        save(PLAIN, tmp_path / "m.onnx")
        with open("/dev/full", "w") as full:
            for arguments in (["inspect", "m.onnx", "--json"], ["transforms", "--markdown"], ["--help"]):
                process = subprocess.run(
                    [sys.executable, "-P", "-m", "requant", *arguments],
                    cwd=tmp_path,
                    stdout=full,
                    stderr=subprocess.PIPE,
                    text=True,
                    check=False,
                )
                said = "requant: standard output: No space left on device\n"
                assert (process.returncode, process.stderr) == (2, said)


STREAMS = ["2>&-", "<&- >&- 2>&-", *(["2>/dev/full"] if Path("/dev/full").exists() else [])]


@pytest.mark.parametrize("streams", STREAMS)
def test_a_command_needs_no_stderr(streams: str, tmp_path: Path) -> None:
    """A program without a terminal, or with its log on a full disk: what cannot be told is dropped."""
    save(PLAIN, tmp_path / "m.onnx")
    command = f"'{sys.executable}' -P -m requant"
    script = f"{command} transform m.onnx t.onnx --group simplify {streams}; echo $?; {command} inspect none {streams}"
    done = subprocess.run(
        ["bash", "-c", f"{script}; echo $?"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == "2"
    assert "0" in done.stdout.split()
    assert (tmp_path / "t.onnx").is_file()


def test_a_report_that_cannot_be_written_does_not_hide_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, output = os.fsync, tmp_path / "q.onnx"

    def full(fd: int) -> None:
        if output.exists():
            raise OSError(28, os.strerror(28))
        sync(fd)

    monkeypatch.setattr("requant.system.writing.os.fsync", full)
    arguments = ["quantize", SAMPLES / "digits.onnx", "--data", f"{SAMPLES / 'digits.npz'}:calib", "--samples", "20"]
    arguments += ["--place", "rules", "--force-int8", "--effort", "low", "-o", output]
    arguments += ["--external-data", "--report", tmp_path / "q.html"]
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == 2
    assert done.stderr == (
        f"requant: {tmp_path / 'q.html'}: cannot be written: No space left on device; "
        f"written: {output}.data, {output}, {tmp_path / 'q.plan.json'}\n"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"q.onnx", "q.onnx.data", "q.plan.json"}


# ------------------------------------------------------------------------------------------- what is imported, asked


def hostile(folder: Path, names: set[str]) -> Path:
    """Fill a folder with modules that leave a trace when they are imported, and return the file of traces."""
    traces = folder / "traces"
    for name in names:
        (folder / f"{name}.py").write_text(f"with open({str(traces)!r}, 'a') as file: file.write('{name} ')\n")
    return traces


THIRD = {"requant", "click", "numpy", "onnx", "onnx_ir", "onnxruntime", "msgspec", "rich", "igraph", "distributed"}


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes", "dask"])
def test_nothing_of_the_current_folder_is_imported(tmp_path: Path, executor: str) -> None:
    traces = hostile(tmp_path, {*sys.stdlib_module_names, *THIRD, "sitecustomize", "usercustomize"})
    save(PLAIN, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32))
    script = Path(sys.executable).with_name("requant")
    command = [script if script.exists() else sys.executable, *([] if script.exists() else ["-P", "-m", "requant"])]
    options = ["--data", "d.npz", "-o", "r.json", "--executor", executor, "--workers", "1"]
    done = subprocess.run(
        [*map(str, command), "calibrate", "m.onnx", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not traces.exists()


@pytest.mark.slow
def test_python_m_and_empty_paths_import_no_library_of_the_current_folder(tmp_path: Path) -> None:
    # what Python imports before the first line of requant can only be kept out by -P
    traces = hostile(tmp_path, THIRD - {"requant"})
    save(PLAIN, tmp_path / "m.onnx")
    for module in ("requant", "requant.cli"):
        command = [sys.executable, "-m", module, "inspect", "m.onnx", "--json"]
        environment = dict(os.environ)
        if module == "requant":
            environment["PYTHONPATH"] = os.pathsep.join(("", os.environ.get("PYTHONPATH", "")))
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["operators"]
    assert not traces.exists()


@pytest.mark.parametrize(
    ("paths", "kept", "variable"),
    [("", True, None), (":/a", False, "/a"), ("/a::", False, "/a"), (".:/a", True, ".:/a"), (":.", True, ".")],
)
def test_empty_entries_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: str, kept: bool, variable: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [os.getcwd(), "/lib"])
    if paths:
        monkeypatch.setenv("PYTHONPATH", paths)
    else:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    forget_empty_paths()
    assert sys.path == [*([os.getcwd()] if kept else []), "/lib"]
    assert os.environ.get("PYTHONPATH") == variable


def test_telemetry_of_the_runtime_is_off_unless_the_user_wants_it(tmp_path: Path) -> None:
    """It reads the variable when it is imported, which is later."""
    code = "import os, sys, requant; print(os.environ['ORT_DISABLE_TELEMETRY'], 'onnxruntime' in sys.modules)"
    told = []
    for given in ({}, {"ORT_DISABLE_TELEMETRY": "0"}):
        environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"} | given
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        told.append(done.stdout.strip())
    assert told == ["1 False", "0 False"]


SCRIPT = """
set -e
requant() { "$PYTHON" -P -m requant "$@" -q; }
requant calibrate m.onnx --data d.npz -o out/r.json
requant quantize m.onnx --data d.npz -o out/q.onnx --force-int8 --place rules --report out/q.json
requant compare m.onnx out/q.onnx --data d.npz
requant inspect m.onnx
requant report out/q.json -o out/q.html
requant check --float m.onnx --model out/q.onnx --data d.npz --update --baseline out/lock.json
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_no_command_asks_a_network_or_writes_elsewhere(tmp_path: Path) -> None:
    for name in ("out", "home", "tmp"):
        (tmp_path / name).mkdir()
    shutil.copy(SAMPLES / "digits.onnx", tmp_path / "m.onnx")
    with np.load(SAMPLES / "digits.npz") as arrays:
        np.savez(tmp_path / "d.npz", image=arrays["calib/image"][:20])
    own = {"PYTHON": sys.executable, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    environment = {**os.environ, **own, "REQUANT_CACHE": str(tmp_path / "home" / "requant")}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    done = subprocess.run(
        ["strace", "-f", "-qq", "-o", "trace", "-e", "trace=network", "bash", "-c", SCRIPT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not re.search(r"AF_INET|AF_NETLINK|connect\(", (tmp_path / "trace").read_text())
    assert list((tmp_path / "tmp").iterdir()) == []
    assert {path.name for path in (tmp_path / "home").iterdir()} <= {"requant"}


@pytest.mark.parametrize(
    ("before", "during"),
    [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)],
    ids=["usual", "ignored"],
)
def test_an_interrupt_during_the_imports_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, before: Any, during: Any
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(supervisor, "supervised", lambda command: seen.append(signal.getsignal(signal.SIGINT)))
    kept = signal.signal(signal.SIGINT, before)
    try:
        program.run()
    finally:
        signal.signal(signal.SIGINT, kept)
    assert seen == [during]
