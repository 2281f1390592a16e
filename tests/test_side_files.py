"""Files beside models and data: whatever their bytes are, reading gives a value or a refusal of one line."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from requant import RequantError
from requant.calibration import load_ranges, parse_rule, save_ranges
from requant.calibration.range_files.log import is_log, load_log, log_text
from requant.calibration.range_files.overrides import load_overrides
from requant.calibration.range_files.range_file import merge_files
from requant.cli import main
from requant.quantize import CheckOptions, Options, calibrate_model, check, log_model, quantize_model
from requant.quantize.accuracy.frontier import Frontier, Point
from requant.quantize.gate.blame import changed_layers, explained
from requant.quantize.gate.judge import judge
from requant.quantize.gate.lock import load_baseline
from requant.quantize.job import Evidence
from requant.quantize.options.build import build_options
from requant.quantize.options.declared import QUANTIZE
from requant.quantize.placement import costs
from requant.quantize.placement.plan_file import read_plan
from requant.quantize.project.check import check_options, quantize_arguments
from requant.quantize.project.file import load_project
from requant.quantize.report import Recorder, load_record
from requant.quantize.report.render import render_report
from requant.quantize.runtime.compiled_for import KEY, compiled_for, this_machine
from requant.quantize.runtime.machine import Machine
from requant.quantize.sensitivity import cache
from requant.quantize.steps import tried
from requant.quantize.steps.emit import plan_by_rules
from requant.system.log_records import MIN_MAX
from requant.transforms import run
from requant.transforms.parts.min_max_log import read_log

CASES = 40
"""Damaged files of each kind."""

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 3, 8, 8] x) => (float[N, 10] y) {
    c = Conv <pads=[1, 1, 1, 1]> (x, w)
    r = Relu(c)
    p = GlobalAveragePool(r)
    f = Flatten(p)
    y = MatMul(f, v)
}"""

OVERRIDES = """# mine
[tensors."r"]
range = [0.0, 6.0]
[tensors."c"]
rule = "percentile(99.9)"
[tensors.p]
float = true
"""
PROJECT = """model = "m.onnx"
output = "q.onnx"
[quantize]
data = "d.npz"
samples = 20
exclude_ops = ["Add"]
corrections = ["means", "bias"]
lambda = 0.5
batch = [1, 4]
memory_limit = "2GB"
[check]
data = "t.npz"
metric = ["top1"]
seconds = 0.0
[check.tolerance]
top1 = "0.5%"
latency = 0.1
"""


@dataclass
class Made:
    """A valid file of each kind, and what reading needs beside the file."""

    folder: Path
    texts: dict[str, bytes]
    readers: dict[str, Callable[[Path], object]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("side")
    model, feeds = _model(folder / "m.onnx"), _feeds()
    record, kept = folder / "run.json", []
    recorder = Recorder([record])

    def look(done: Any) -> None:
        recorder.look(done)
        facts, rules, _ = plan_by_rules(done.job, done.ranges, Evidence())
        kept.append((facts, rules))

    options = Options(place="rules", effort="low", force_int8=True, seconds=0.05, isa="vnni")
    recorder.write(quantize_model(model, feeds, folder / "q.onnx", options, look=look))
    labelled = lambda: ((feed, np.array([i % 10])) for i, feed in enumerate(feeds))
    check(model, folder / "q.onnx", labelled, folder / "lock.json", update=True, options=CheckOptions(seconds=0.05))
    ranges = calibrate_model(model, feeds, Options(calibration="auto")).file
    save_ranges(folder / "ranges.json", ranges)
    rows = {"Conv-0123456789abcdef": {"u8->u8": 3.5, "float": 7.25}, "Add-00": {"float": 1.0}}
    costs.save(costs.Costs(Machine("1.31.1", "a CPU", 1), rows), folder / "costs.json")
    trials = "".join(json.dumps([f"{i:02d}", {"y": [1.5, 0.25 * i]}]) + "\n" for i in range(3))
    texts = {
        "ranges.json": (folder / "ranges.json").read_bytes(),
        "plan.json": (folder / "q.plan.json").read_bytes(),
        "costs.json": (folder / "costs.json").read_bytes(),
        "lock.json": (folder / "lock.json").read_bytes(),
        "run.json": record.read_bytes(),
        "mine.toml": OVERRIDES.encode(),
        "mine.json": json.dumps({"tensors": {"r": {"range": [0, 6.5]}, "c": {"rule": "mse"}}}).encode(),
        "requant.toml": PROJECT.encode(),
        "min_max.log": log_text(ranges.seen.ranges).encode() * 2,
        "trials.jsonl": trials.encode(),
        "compiled": json.dumps(this_machine().to_json()).encode(),
    }
    baseline = load_baseline(folder / "lock.json")
    facts, rules = kept[0]
    readers: dict[str, Callable[[Path], object]] = {
        "ranges.json": lambda path: _use_ranges(path, folder),
        "plan.json": lambda path: read_plan(path, facts, rules),
        "costs.json": costs.read,
        "lock.json": lambda path: _use_baseline(path, baseline.measured),
        "run.json": lambda path: render_report(load_record(path)),
        "mine.toml": load_overrides,
        "mine.json": load_overrides,
        "requant.toml": _use_project,
        "min_max.log": lambda path: (is_log(path), load_log(path), read_log(path, MIN_MAX)),
        "trials.jsonl": lambda path: list(cache._read(path)),
        "compiled": lambda path: compiled_for("m", {KEY: path.read_text(errors="surrogateescape")}),
    }
    return Made(folder, texts, readers)


def _model(path: Path) -> Path:
    model, random_ = ir.from_onnx_text(TEXT), np.random.default_rng(1)
    for name, shape in (("w", (16, 3, 3, 3)), ("v", (16, 10))):
        array = random_.standard_normal(shape).astype(np.float32)
        model.graph.register_initializer(ir.Value(name=name, const_value=ir.tensor(array, name=name)))
    ir.save(model, path)
    return path


def _feeds() -> list[dict[str, Any]]:
    return [{"x": np.random.default_rng(i).standard_normal((1, 3, 8, 8)).astype(np.float32)} for i in range(12)]


def _use_ranges(path: Path, folder: Path) -> None:
    """Read a range file, and use all of it as commands do."""
    file = load_ranges(path)
    for rule in ("minmax", "mean_minmax", "percentile(99.9)", "auto"):
        file.choose(parse_rule(rule))
    merge_files([file, replace(file, data=replace(file.data, description="other", shards=()))])
    save_ranges(folder / "again.json", file)
    assert load_ranges(folder / "again.json") == file


def _use_baseline(path: Path, now: Any) -> None:
    """Read a lock file, and compare measurements with it."""
    baseline = load_baseline(path)
    if baseline.measured.scores.keys() <= now.scores.keys():
        changed = changed_layers(now, baseline.measured)
        for line in judge(now, baseline):
            json.dumps(explained(line, now, baseline.measured, changed).to_json(), allow_nan=False)


def _use_project(path: Path) -> None:
    """Read a project, and build the options of both tables."""
    project = load_project(path)
    given = project.quantize or {}
    build_options({row.name: row.read(given[row.name]) for row in QUANTIZE if row.name in given})
    check_options(project.check)
    quantize_arguments(project)


# ------------------------------------------------------------------------------------------------------ the damage

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, "", "x", "\u202e\x1b]0;a\x07\n::stop::", "nan", "inf", "\ud800", "a\0b", "x" * 3000),
    *(0, -1, 1, 2, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324),
    *(math.nan, math.inf, -math.inf, DEEP, [[]], [None], [1, 2, 3], {"a": 1}, {"": {}}, [0] * 5000, [1e308, 1e308]),
)
PIECES = (
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\n", b"9" * 30, b"9" * 5000),
    *(b"1e999", b"NaN", b"-Infinity", b"[" * 3000, b'{"a":' * 3000, b"\\u0000", b"\\ud800", b"-", b"0x" + b"f" * 6000),
    *(b'"schema": 1, ', b"a" + b".a" * 2000, b"=", b"\x1b[2J", b";x__print__;__requant_min_max:[1e999][nan]"),
)


def damaged(valid: bytes, chance: random.Random) -> bytes:
    """Return the bytes of a file after one or two kinds of damage."""
    for _ in range(chance.choice((1, 1, 2))):
        valid = chance.choice((_in_bytes, _in_bytes, _in_values, _in_values, _in_values))(valid, chance)
    return valid


def _in_bytes(valid: bytes, chance: random.Random) -> bytes:
    """Cut, copy, turn or insert bytes."""
    start = chance.randrange(len(valid) + 1)
    stop = min(len(valid), start + chance.choice((1, 3, 30, 300, 10**6)))
    part = chance.choice((b"", valid[start:stop] * 2, chance.choice(PIECES), chance.randbytes(3)))
    return valid[:start] + part + valid[chance.choice((start, stop)) :]


def _in_values(valid: bytes, chance: random.Random) -> bytes:
    """Change a value, a key or the order in a JSON document; in other files, bytes."""
    try:
        document = json.loads(valid)
    except (ValueError, RecursionError):
        return _in_bytes(valid, chance)
    places = list(_places(document))
    if not places:
        return json.dumps(chance.choice(VALUES)).encode()
    for _ in range(chance.choice((1, 1, 3))):
        holder, key = chance.choice(places)
        try:
            held = holder[key]
        except (LookupError, TypeError):
            continue
        how = chance.randrange(6)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[chance.choice(("", "x", *map(str, holder)))] = holder.pop(key)
        elif how == 2 and isinstance(held, int | float):
            holder[key] = chance.choice((-held, held + 1, held * 2**40, 1.5, str(held), [held]))
        else:
            holder[key] = chance.choice(VALUES)
    return json.dumps(document).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the list or object and the key of every value; of long lists, the first ones."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 8)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


KINDS = (
    *("ranges.json", "plan.json", "costs.json", "lock.json", "run.json", "mine.toml", "mine.json", "requant.toml"),
    *("min_max.log", "trials.jsonl", "compiled"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("error")
def test_damaged_files_are_read_or_refused_in_one_line(
    made: Made, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / kind
    path.write_bytes(made.texts[kind])
    made.readers[kind](path)
    lines: list[str] = []
    for seed in range(CASES):
        path.write_bytes(damaged(made.texts[kind], random.Random(f"{kind} {seed}")))
        try:
            made.readers[kind](path)
        except RequantError as error:
            lines.append(str(error))
        except Exception as error:
            raise AssertionError(f"{kind}, seed {seed}") from error
    assert not [line for line in lines if "\n" in line]
    assert lines or kind in ("trials.jsonl", "min_max.log")  # which leave damaged lines out


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("compiled", "trials.jsonl")])
def test_what_is_no_file_is_refused(made: Made, tmp_path: Path, kind: str) -> None:
    read, name = made.readers[kind], kind.split(".")[0]
    folder, pipe, empty = tmp_path / f"{name}-folder.toml", tmp_path / f"{name}-pipe.json", tmp_path / f"{name}.json"
    folder.mkdir()
    os.mkfifo(pipe)
    empty.touch()
    for path, reason in ((folder, "is a folder"), (pipe, "is a FIFO"), (Path(os.devnull), "is a device")):
        with pytest.raises(RequantError, match=f"{path}: {reason}, not a file"):
            read(path)
    with pytest.raises(RequantError, match=str(tmp_path / "none")):
        read(tmp_path / "none.toml")
    if kind not in ("mine.toml",):
        with pytest.raises(RequantError):
            read(empty)
    with open(empty, "wb") as file:
        file.truncate(2**40)  # a sparse file
    with pytest.raises(RequantError, match=r"has more than [0-9]+ MiB"):
        read(empty)


# ------------------------------------------------------------------------------------------- caches, and metadata


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 10**5, b'{"schema": 1, "runtime": 3}', b"\xff\xfe\0"], ids=range(5))
def test_damaged_costs_are_measured_anew_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    monkeypatch.setenv("REQUANT_CACHE", str(tmp_path))
    machine = Machine("1", "a", 1)
    costs.path_of(machine).write_bytes(text)
    assert costs.load(machine).rows == {}
    assert "the cache begins anew" in caplog.text
    costs.keep(costs.Costs(machine, {"Add-0": {"float": 1.0}}))
    assert costs.load(machine).rows == {"Add-0": {"float": 1.0}}


def test_a_folder_or_a_pipe_in_the_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUANT_CACHE", str(tmp_path))
    one, other = Machine("1", "a", 1), Machine("1", "b", 1)
    costs.path_of(one).mkdir()
    os.mkfifo(costs.path_of(other))
    for machine in (one, other):
        assert costs.load(machine).rows == {}
    costs.keep(costs.Costs(one, {"Add-0": {"float": 1.0}}))
    assert costs.kept() == []
    with pytest.raises(RequantError, match="cannot be removed: Is a directory"):
        costs.clear()


def test_damaged_trials_are_left_out_with_one_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text('["a", {"y": [1.0, "inf"]}]\n["b", {"y": [1]}]\n[[]]\n["c", {"y": [0.5, 2]}]\n["d", {')
    assert dict(cache._read(path)) == {"a": {"y": (1.0, math.inf)}, "c": {"y": (0.5, 2.0)}}
    assert caplog.text.count("2 damaged lines are left out") == 1


def test_a_search_with_a_damaged_state_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tried, "plan_key", str)
    state, point = tmp_path / "q.onnx.search.json", Point(0.1, math.inf, 2.0, 3, True, "plan at 0.1")
    plan_at: Any = "plan at {}".format
    tried.save_tried(state, "k", Frontier("sqnr", True, math.inf, 20.0, points=(point,)))
    assert tried.load_tried(state, lambda: "k", plan_at) == (point,)
    state.write_text(state.read_text().replace('"speedup": 2.0', '"speedup": "fast"'))
    assert tried.load_tried(state, lambda: "k", plan_at) == ()
    assert "the search begins anew" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, "3", '{"a": "b"}', '{"a": 1e999}', '{"a": ' + "9" * 5000 + "}"])
def test_damaged_metadata_of_a_logging_model_are_refused(tmp_path: Path, text: str) -> None:
    model = ir.load(_model(tmp_path / "m.onnx"))
    model.metadata_props["requant.log_first_n"] = text
    with pytest.raises(RequantError, match=r"metadata 'requant\.log_first_n' is damaged"):
        run("insert_logging(op=Relu, show_name=true)", model)
    ir.save(run("insert_logging(op=Relu, show_name=true)", ir.load(tmp_path / "m.onnx")).model, tmp_path / "log.onnx")
    logging = ir.load(tmp_path / "log.onnx")
    logging.metadata_props["requant.log_first_n"] = text
    ir.save(logging, tmp_path / "log.onnx")
    with pytest.raises(RequantError, match=r"'requant\.log_first_n' must be a JSON object of numbers"):
        log_model(tmp_path / "log.onnx", _feeds(), tmp_path / "min_max.log")


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, "3", "[1]", '{"a": 1}', "NaN"])
def test_damaged_names_of_inlined_nodes_are_ignored(tmp_path: Path, text: str) -> None:
    model = ir.load(_model(tmp_path / "m.onnx"))
    for node in model.graph:
        node.metadata_props["requant.origin"] = text
    ir.save(model, tmp_path / "m.onnx")
    options = Options(place="rules", effort="low", seconds=0.01)
    assert quantize_model(tmp_path / "m.onnx", _feeds(), tmp_path / "q.onnx", options).output


@pytest.mark.parametrize(
    "line",
    [
        "time_budget = nan",
        "time_budget = inf",
        "samples = 0",
        "effort = 'huge'",
        "threads = 5000",
        "workers = 99999999999",
    ],
)
def test_options_of_a_project_are_checked_when_it_is_read(tmp_path: Path, line: str) -> None:
    (tmp_path / "requant.toml").write_text(f"model = 'm'\noutput = 'q'\n[quantize]\n{line}\n")
    with pytest.raises(RequantError, match=line.partition(" ")[0]):
        load_project(tmp_path / "requant.toml")


def test_numbers_on_the_command_line_are_finite() -> None:
    result = CliRunner().invoke(main, ["quantize", "m.onnx", "-o", "q.onnx", "--lambda", "nan"])
    assert (result.exit_code, "'nan' is not a number" in result.stderr) == (2, True)
