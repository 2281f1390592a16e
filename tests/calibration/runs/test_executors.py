"""Executors: wherever the work is done, and whatever dies meanwhile, the statistics are the same bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx_ir as ir
import pytest

from requant import RequantError, UnknownNameError
from requant.calibration import (
    DataError,
    Execution,
    Observations,
    executor_named,
    input_specs,
    observe,
    open_session,
    open_source,
)
from requant.calibration.data.samples import Rows
from requant.calibration.data.sources import DataSpec, Source
from requant.calibration.execution import quarter_of_memory
from requant.calibration.model.session import Array, Serialized
from requant.calibration.runs.stamps import data_stamp, model_stamp

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) {
    c = Conv(x, w)
    y = Relu(c)
}"""
TENSORS = ("x", "c", "y")
SAMPLES = 40


def weights() -> Array:
    return np.random.default_rng(1).standard_normal((4, 3, 3, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = ir.from_onnx_text(TEXT)
    tensor = ir.tensor(weights(), name="w")
    made.graph.register_initializer(ir.Value(name="w", const_value=tensor))
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    ir.save(made, path)
    return path


@pytest.fixture(scope="module")
def data(model: Path) -> Path:
    x = np.random.default_rng(2).standard_normal((SAMPLES, 3, 8, 8)).astype(np.float32)
    np.savez(model.with_name("d.npz"), x=x)
    return model.with_name("d.npz")


def run(model: Any, data: Any, **options: Any) -> Observations:
    source = open_source(data, input_specs(open_session(model)))
    axes = {"x": 1, "c": 1}
    return observe(model, TENSORS, source, histogram=True, channel_axis=axes, execution=Execution(**options))


@pytest.fixture(scope="module")
def expected(model: Path, data: Path) -> Observations:
    return run(model, str(data), workers=1)


def test_it_does_not_matter_how_many_threads_there_are(model: Path, data: Path, expected: Observations) -> None:
    assert run(model, str(data), workers=4) == expected
    with ThreadPoolExecutor(2) as threads:
        assert run(model, str(data), executor=threads) == expected


def test_memory_limits_change_no_bit_and_split_the_tensors(model: Path, data: Path, expected: Observations) -> None:
    assert run(model, str(data), memory_limit=4096) == expected  # every tensor is a group of its own


@pytest.mark.parametrize("given", ["path", pytest.param("bytes", marks=pytest.mark.slow)])
def test_processes(model: Path, data: Path, expected: Observations, given: str) -> None:
    with executor_named("processes", 2) as make:
        assert run(model if given == "path" else model.read_bytes(), str(data), executor=make) == expected


@pytest.mark.slow
def test_data_that_exist_here_alone_are_sent(model: Path, data: Path, expected: Observations) -> None:
    feeds = [{"x": x[None]} for x in np.load(data)["x"]]
    with executor_named("processes", 1) as make:
        seen = run(model, feeds, executor=make)
    assert (seen.ranges, seen.runs, seen.channels) == (expected.ranges, expected.runs, expected.channels)


FATAL = """
import os
from pathlib import Path
import numpy as np

HERE = Path(__file__).parent

class Feeds(list):
    def __getitem__(self, index):
        if index == 25 and os.getpid() != int((HERE / "parent").read_text()):
            try:
                (HERE / "died").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os._exit(9)
        return {"x": super().__getitem__(index)[None]}

feeds = Feeds(np.load(HERE / "d.npz")["x"])
"""


@pytest.fixture
def fatal(tmp_path: Path, data: Path) -> str:
    """Data that kill the first other process that reads to sample 25."""
    (tmp_path / "d.npz").write_bytes(data.read_bytes())
    (tmp_path / "parent").write_text(str(os.getpid()))
    (tmp_path / "reader.py").write_text(FATAL)
    return f"{tmp_path}/reader.py:feeds"


def alike(seen: Observations, expected: Observations) -> bool:
    """Whether two runs saw the same, though the samples are called otherwise."""
    same = (seen.ranges, seen.runs, seen.channels, seen.moments, seen.samples)
    return same == (expected.ranges, expected.runs, expected.channels, expected.moments, expected.samples)


@pytest.mark.slow
def test_work_of_a_process_that_dies_is_done_again_and_counts_once(
    model: Path, fatal: str, expected: Observations, tmp_path: Path
) -> None:
    with executor_named("processes", 2) as make:
        seen = run(model, fatal, executor=make)
    assert (tmp_path / "died").exists()
    assert alike(seen, expected)


def test_an_executor_that_cannot_be_made_anew(model: Path, fatal: str) -> None:
    problem = "the executor is broken: a worker died; pass a function that creates executors"
    spawned = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with spawned as pool, pytest.raises(RequantError, match=problem):
        run(model, fatal, executor=pool)


def test_failures_of_work_elsewhere_are_told_as_here(model: Path, tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(
        "def feeds():\n    yield {'x': __import__('numpy').ones((1, 3, 8, 9), 'float32')}\n"
    )
    with (
        executor_named("processes", 1) as make,
        pytest.raises(DataError, match=r"sample 0, input 'x': expected float32"),
    ):
        run(model, f"{tmp_path}/reader.py:feeds", executor=make)


class Flaky(Executor):
    """An executor that loses each piece of work once, after it was done."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.inner = ThreadPoolExecutor(1)

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        if fn in self.begun:
            return self.inner.submit(fn, *args, **kwargs)
        self.begun.append(fn)
        return self.inner.submit(partial(self._lose, fn))

    def _lose(self, work: Any) -> None:
        work()
        raise ConnectionResetError("lost")


def test_work_that_is_lost_on_the_way_counts_once(model: Path, data: Path, expected: Observations) -> None:
    flaky = Flaky()
    assert run(model, str(data), executor=flaky) == expected
    assert len(flaky.begun) > 2


class Broken(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return ThreadPoolExecutor(1).submit(lambda: 1 / 0)


def test_what_always_fails_ends(model: Path, data: Path) -> None:
    with pytest.raises(RequantError, match=r"^a worker failed 3 times: ZeroDivisionError: division by zero$"):
        run(model, str(data), executor=Broken())


def test_refusals() -> None:
    with (
        pytest.raises(UnknownNameError, match="no executor named 'process'; did you mean 'processes'"),
        executor_named("process"),
    ):
        pass
    with (
        pytest.raises(RequantError, match="only the executor dask has a scheduler"),
        executor_named("threads", scheduler="tcp://a:1"),
    ):
        pass
    with pytest.raises(RequantError, match="invalid shard 3/2: write i/n with 1 <= i <= n"):
        Execution(shard=(3, 2))
    with pytest.raises(RequantError, match="workers must be at least 1, not 0"):
        Execution(workers=0)
    with pytest.raises(RequantError, match="the first position must be at least 0, not -1"):
        Execution(first=-1)


def test_the_memory_of_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr(Path, "read_text", lambda self: "max")
    assert quarter_of_memory() == 2**30


# ------------------------------------------------------------------------------------------------------ Dask

DASK = """
import os, signal, sys, threading, time
from distributed import Client, LocalCluster
from requant.calibration import Execution, input_specs, observe, open_session, open_source

def main(model, data):
    source = open_source(data, input_specs(open_session(model)))
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        pids = sorted(client.run(os.getpid).values())
        killed = []

        def progress(done, total):
            if not killed:
                os.kill(pids[0], signal.SIGKILL)
                killed.append(pids[0])

        seen = observe(model, ("x", "c", "y"), source, histogram=True, channel_axis={"x": 1, "c": 1},
                       execution=Execution(executor=client.get_executor()), progress=progress)
    assert killed
    from requant.calibration.range_files.records import observations_to_json
    import json
    print(json.dumps(observations_to_json(seen)))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.slow
def test_a_dask_cluster_of_two_workers_of_which_one_is_killed(
    model: Path, data: Path, expected: Observations, tmp_path: Path
) -> None:
    import json

    from requant.calibration.range_files.records import observations_from_json

    (tmp_path / "program.py").write_text(DASK)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", model, data], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert observations_from_json(json.loads(done.stdout.splitlines()[-1])) == expected


@pytest.mark.slow
def test_a_scheduler_that_nobody_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requant.calibration.runs.executors.CONNECT_SECONDS", 0.5)
    nobody = executor_named("dask", scheduler="tcp://127.0.0.1:9")
    with pytest.raises(RequantError, match=r"tcp://127.0.0.1:9: no Dask scheduler answers"), nobody:
        pass


# ------------------------------------------------------------------------------------------------ checkpoints

SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started without
from pathlib import Path
import numpy as np
from requant.calibration import Execution, input_specs, observe, open_session, open_source
from requant.calibration.runs import checkpoint
from requant.calibration.range_files.records import observations_to_json
import json

checkpoint.SECONDS, checkpoint.SHARE = 0.0, 1e9  # after every piece
model, data, folder, delay = sys.argv[1:]

def feeds():
    for x in np.load(data)["x"]:
        time.sleep(float(delay))
        yield {"x": x[None]}

source = open_source(feeds, input_specs(open_session(model)))
execution = Execution(checkpoint=Path(folder, "c"), workers=1)
seen = observe(model, ("x", "c", "y"), source, histogram=True, channel_axis={"x": 1, "c": 1}, execution=execution,
               progress=lambda done, total: print(done, flush=True))
Path(folder, "seen.json").write_text(json.dumps(observations_to_json(seen)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
def test_an_interrupted_run_goes_on_and_ends_the_same(
    model: Path, data: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    program = [sys.executable, "-c", textwrap.dedent(SLOW), str(model), str(data)]
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    subprocess.run([*program, str(tmp_path / "whole"), "0"], check=True, capture_output=True)
    running = subprocess.Popen(
        [*program, str(tmp_path / "cut"), "0.03"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert running.stdout is not None
    before = int(running.stdout.readline())
    before = int(running.stdout.readline())
    running.send_signal(sent)
    running.communicate(timeout=30)
    assert running.returncode != 0
    (left,) = (tmp_path / "cut").iterdir()
    assert left.name.startswith("c-")
    resumed = subprocess.run([*program, str(tmp_path / "cut"), "0"], check=True, capture_output=True, text=True)
    assert int(resumed.stdout.split()[0]) > before  # counted from where it was
    assert len(resumed.stdout.split()) < len(range(0, SAMPLES, 4))
    whole, cut = ((tmp_path / name / "seen.json").read_bytes() for name in ("whole", "cut"))
    assert cut == whole
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["seen.json"]


def interrupted(model: Any, feeds: list[Any], checkpoint: Path) -> list[Any]:
    """Leave the checkpoint of a run behind that somebody interrupted; return the data."""

    def stop(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    source = open_source(feeds, input_specs(open_session(model)))
    execution = Execution(checkpoint=checkpoint, workers=1)
    with pytest.raises(KeyboardInterrupt):
        observe(
            model, TENSORS, source, histogram=True, channel_axis={"x": 1, "c": 1}, execution=execution, progress=stop
        )
    return feeds


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"{",
        lambda text: text.replace(b'"done": [', b'"done": [[0, 900000000000], '),
        lambda text: text.replace(b'"samples"', b'"sample"'),
        lambda text: b"[" * 100_000,
    ],
    ids=["torn", "far too many batches", "a key is missing", "nested"],
)
def test_a_run_with_a_damaged_checkpoint_starts_anew(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    feeds = [{"x": np.random.default_rng(i).random((1, 3, 8, 8), np.float32)} for i in range(30)]
    interrupted(model, feeds, tmp_path / "c")
    (left,) = tmp_path.iterdir()
    damaged = damage(left.read_bytes())
    assert damaged != left.read_bytes()
    left.write_bytes(damaged)
    assert alike(run(model, feeds, checkpoint=tmp_path / "c", workers=1), run(model, feeds, workers=1))
    assert "the run starts anew" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_a_link_is_not_written_through(model: Path, tmp_path: Path) -> None:
    feeds = interrupted(model, [{"x": np.ones((1, 3, 8, 8), np.float32)}] * 30, tmp_path / "c")
    (left,) = tmp_path.iterdir()
    left.unlink()
    (tmp_path / "mine").write_text("mine")
    left.symlink_to("mine")
    interrupted(model, feeds, tmp_path / "c")
    assert run(model, feeds, checkpoint=tmp_path / "c", workers=1).samples == 30
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_checkpoint_that_is_a_pipe_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    feeds = interrupted(model, [{"x": np.ones((1, 3, 8, 8), np.float32)}] * 30, tmp_path / "c")
    (left,) = tmp_path.iterdir()
    left.unlink()
    os.mkfifo(left)
    assert run(model, feeds, checkpoint=tmp_path / "c", workers=1).samples == 30


def test_runs_of_other_kinds_do_not_meet(model: Path, data: Path, tmp_path: Path, expected: Observations) -> None:
    feeds = [{"x": x[None]} for x in np.load(data)["x"]]
    interrupted(model, feeds, tmp_path / "c")
    assert alike(run(model, feeds, checkpoint=tmp_path / "c", shard=(1, 1), batch=2), run(model, feeds, batch=2))
    assert len(list(tmp_path.iterdir())) == 1  # that of the other run
    assert alike(run(model, feeds, checkpoint=tmp_path / "c"), expected)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a checkpoint after every piece of work."""
    monkeypatch.setattr("requant.calibration.runs.checkpoint.SECONDS", 0.0)
    monkeypatch.setattr("requant.calibration.runs.checkpoint.SHARE", 1e9)


def changed(folder: Path, how: str) -> None:
    """Change data so that their first sample, and what messages call them, stay."""
    x = np.random.default_rng(3).standard_normal((1, 3, 8, 8)).astype(np.float32)
    if how == "deleted":
        (folder / "3.npz").unlink()
    else:
        np.savez(folder / "3.npz", x=x)
    if how == "replaced":
        np.savez(folder / "1.npz", x=x)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("how", ["deleted", "mended", "replaced"])
def test_data_that_changed_are_another_run(model: Path, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for index, x in enumerate(np.random.default_rng(2).standard_normal((6, 1, 3, 8, 8)).astype(np.float32)):
        np.savez(folder / f"{index}.npz", x=x if index != 3 else np.full_like(x, np.nan))
    with pytest.raises(DataError, match="finite"):
        run(model, str(folder), checkpoint=tmp_path / "c", workers=1)
    assert len(list(tmp_path.glob("c-*"))) == 1
    changed(folder, how)
    assert run(model, str(folder), checkpoint=tmp_path / "c", workers=1) == run(model, str(folder))


@pytest.mark.parametrize("role", ["text", "split", "folder", "labels", "tokenizer", "module"])
def test_stamps_of_data_are_of_all_files_that_are_named(tmp_path: Path, role: str) -> None:
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "requant_stamped.py"
    file.write_text("def read(): ...")
    named = {
        "text": f"{file}:read",
        "split": f"{file}:x",
        "folder": f"{tmp_path}/data",
        "module": "requant_stamped:read",
    }
    others: dict[str, dict[str, Any]] = {"labels": {"labels": str(file)}, "tokenizer": {"tokenizer": f"{file}:read"}}
    spec = DataSpec(named.get(role, "somewhere"), **others.get(role, {}))

    def stamp() -> object:
        return data_stamp(Source((), Rows("data", 3, lambda _: iter(())), reference=spec), 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "requant_stamped", SimpleNamespace(__file__=str(file)))
        before = stamp()
        (tmp_path / "data" / ".ranges.json.checkpoint-01234567").write_text("our own")
        assert stamp() == before
        os.utime(file, ns=(0, file.stat().st_mtime_ns))  # it was read
        assert stamp() == before
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
        assert stamp() != before


def test_stamps_of_data_tell_how_many_samples_there_are_and_which() -> None:
    source = Source((), Rows("data", 12, lambda _: iter(())))
    stamps = {
        repr(data_stamp(some, some.length)) for some in (source, source.samples(5), replace(source, picked=(1, 2)))
    }
    assert len(stamps) == 3


def outside(folder: Path, seed: int) -> Path:
    """Write a model whose weights lie in a file beside it; the model itself is the same for every seed."""
    made = ir.from_onnx_text(TEXT)
    array = np.random.default_rng(seed).standard_normal((4, 3, 3, 3)).astype(np.float32)
    made.graph.register_initializer(ir.Value(name="w", const_value=ir.tensor(array, name="w")))
    ir.save(made, folder / "e.onnx", external_data="e.onnx.data", size_threshold_bytes=0)
    return folder / "e.onnx"


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("given", ["path", "memory"])
def test_external_weights_that_changed_are_another_run(tmp_path: Path, given: str) -> None:
    path = outside(tmp_path, 1)
    source = path if given == "path" else Serialized(path.read_bytes(), tmp_path)
    feeds = [{"x": x[None]} for x in np.random.default_rng(2).standard_normal((30, 3, 8, 8)).astype(np.float32)]
    interrupted(source, feeds, tmp_path / "c")
    before = path.read_bytes()
    assert outside(tmp_path, 2).read_bytes() == before
    assert run(source, feeds, checkpoint=tmp_path / "c") == run(source, feeds)


def test_stamps_of_a_model_in_memory_do_not_depend_on_where_its_weights_were_put(tmp_path: Path) -> None:
    stamps = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        made = ir.load(outside(tmp_path, 1))
        ir.save(made, tmp_path / place / "m.onnx", external_data=f"{place}.data", size_threshold_bytes=0)
        stamps.append(model_stamp(Serialized((tmp_path / place / "m.onnx").read_bytes(), tmp_path / place)))
    assert stamps[0] == stamps[1]


def test_external_data_in_bodies_and_attributes_are_found(tmp_path: Path) -> None:
    tensor = {f"{name}.bin": onnx.TensorProto(name=name, data_type=1, dims=[1]) for name in "abcd"}
    for file, proto in tensor.items():
        proto.data_location = onnx.TensorProto.EXTERNAL
        proto.external_data.add(key="location", value=file)
        (tmp_path / file).write_bytes(b"1234")
    constant = [onnx.helper.make_node("Constant", [], [name], value=tensor[f"{name}.bin"]) for name in "cd"]
    then, otherwise = (onnx.GraphProto(name=name, output=[onnx.ValueInfoProto(name=name)]) for name in "bc")
    then.initializer.append(tensor["b.bin"])
    otherwise.node.append(constant[0])
    standard = onnx.helper.make_opsetid("", 17)
    function = onnx.FunctionProto(name="f", domain="my", output=["d"], node=[constant[1]], opset_import=[standard])
    graph = onnx.parser.parse_graph("outer (bool k) => (float[1] y, float[1] a) { }")
    graph.initializer.append(tensor["a.bin"])
    graph.node.append(onnx.helper.make_node("If", ["k"], ["y"], then_branch=then, else_branch=otherwise))
    imports = [standard, onnx.helper.make_opsetid("my", 1)]
    model = onnx.ModelProto(ir_version=8, graph=graph, functions=[function], opset_import=imports)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    for file in tensor:
        before = model_stamp(tmp_path / "m.onnx"), model_stamp(Serialized(model.SerializeToString(), tmp_path))
        (tmp_path / file).write_bytes(b"12345")
        after = model_stamp(tmp_path / "m.onnx"), model_stamp(Serialized(model.SerializeToString(), tmp_path))
        assert before[0] != after[0]
        assert before[1] != after[1]


def test_a_complete_checkpoint_is_given_away_and_gives_the_result_at_once(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Observations
) -> None:
    kept: list[Path] = []
    assert run(model, str(data), checkpoint=tmp_path / "c", kept=kept.append) == expected
    assert kept == list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("requant.calibration.runs.runner._results", None)
        assert run(model, str(data), checkpoint=tmp_path / "c", kept=kept.append) == expected
        assert kept[0] == kept[1]
        assert run(model, str(data), checkpoint=tmp_path / "c") == expected
    assert not list(tmp_path.iterdir())


def test_a_request_that_cannot_be_met_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    feeds = [{"x": np.ones((1, 3, 8, width), np.float32)} for width in (8, 8, 9)]
    with pytest.raises(DataError):
        run(model, feeds, checkpoint=tmp_path / "c", workers=1)
    assert not list(tmp_path.iterdir())
