"""The cost of calibration: time compared with plain inference, memory, and scaling over workers.

    python -m benchmarks.calibration speed    # this project and ONNX Runtime's calibrators, and plain inference
    python -m benchmarks.calibration memory   # the same run with 64 and with 1024 samples
    python -m benchmarks.calibration dask     # one worker; two workers; two workers, one of them killed

The networks have random weights, and the samples are random. Each row of `speed` and `memory` is measured in a new
process: plain inference of the same samples and the calibration run in turn, and the minimum time of each counts.
Plain inference is ONNX Runtime with default options on the same number of threads. The time of a calibration includes
opening the sessions and choosing the ranges. This project calibrates the tensors that `requant quantize` would
calibrate; ONNX Runtime calibrates the operators that it quantizes by default.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from benchmarks.tables import plain_table

LEFT = ("network", "calibrator", "rule", "workers")  # the columns of text
SAMPLES = Path(__file__).parents[1] / "sample_models"
BOUNDS = {"resnet50": {"minmax": 1.5, "histogram": 2.6}, "mobilenet_v2": {"minmax": 2.2, "histogram": 5.0}}
RULES = ("minmax", "percentile", "mse", "entropy", "auto")
PEERS = {"MinMax": {}, "Percentile": {"percentile": 99.999}, "Entropy": {}}
"""ONNX Runtime's calibrators and their options; otherwise its defaults."""
GROWTH = 0.05  # the largest relative growth of memory with the number of samples
SCALING = 1.7  # the lowest speed-up of two workers over one


# ------------------------------------------------------------------------------------------ in the new process


def _inputs(count: int) -> np.ndarray[Any, Any]:
    """Return images, (count, 3, 224, 224) float32."""
    return np.random.default_rng(0).standard_normal((count, 3, 224, 224), dtype=np.float32)


def _tensors(model: str) -> tuple[str, ...]:
    """Return the tensors that `requant quantize` would calibrate."""
    import onnx_ir as ir

    from requant.quantize.placement.rules import choose

    return tuple(choose(ir.load(model)).quantized)


def _ours(model: str, feeds: list[dict[str, Any]], rule: str, threads: int) -> Callable[[], object]:
    """Return a function that calibrates with this project."""
    from requant.calibration import Calibrator, Execution

    tensors = _tensors(model)
    histogram = rule not in ("minmax", "mean_minmax")

    def calibrate() -> object:
        execution = Execution(workers=threads)
        return Calibrator(model, tensors, histogram=histogram, execution=execution).observe(feeds).ranges(rule)

    return calibrate


def _peer(
    model: str, feeds: list[dict[str, Any]], method: str, options: dict[str, Any], threads: int
) -> Callable[[], object]:
    """Return a function that calibrates with ONNX Runtime."""
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, create_calibrator

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = iter(feeds)

        def get_next(self) -> Any:
            return next(self.feeds, None)

    def calibrate() -> object:
        with tempfile.TemporaryDirectory() as folder:
            calibrator = create_calibrator(
                Path(model),
                augmented_model_path=f"{folder}/augmented.onnx",
                calibrate_method=getattr(CalibrationMethod, method),
                extra_options=options,
            )
            calibrator.infer_session = _session(f"{folder}/augmented.onnx", threads)
            calibrator.collect_data(Reader())
            return calibrator.compute_data()

    return calibrate


def _session(model: str, threads: int) -> Any:
    """Open a session with default options."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _row(model: str, what: str, method: str, samples: int, threads: int, turns: int) -> dict[str, Any]:
    """Time plain inference and a calibration in turn, in this process."""
    session = _session(model, threads)
    name = session.get_inputs()[0].name
    feeds = [{name: image[None]} for image in _inputs(samples)]
    run = (
        _ours(model, feeds, method, threads) if what == "ours" else _peer(model, feeds, method, PEERS[method], threads)
    )
    plain, calibration = [], []
    for _ in range(turns):
        plain.append(_timed(lambda: [session.run(None, feed) for feed in feeds]))
        calibration.append(_timed(run))
    data = sum(array.nbytes for feed in feeds for array in feed.values())
    peak = _peak()
    return {"plain": min(plain), "seconds": min(calibration), "peak": peak, "data": data}


def _peak() -> int:
    """Return the peak resident bytes of this process. The value of getrusage would include the parent process."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def _timed(work: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _streamed(model: str, rule: str, samples: int) -> dict[str, Any]:
    """Calibrate on samples that are generated while they are read; return the time and the peak memory."""
    from requant.calibration import Calibrator

    def feeds() -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng(0)
        for _ in range(samples):
            yield {name: rng.standard_normal((1, 3, 224, 224), dtype=np.float32)}

    name = _session(model, 1).get_inputs()[0].name
    seconds = _timed(lambda: Calibrator(model, _tensors(model), histogram=rule != "minmax").observe(feeds).ranges(rule))
    return {"seconds": seconds, "peak": _peak()}


def _clustered(model: str, data: str, workers: int, kill: bool, output: str) -> dict[str, Any]:
    """Calibrate on a local cluster, optionally kill one worker, and write the statistics."""
    from distributed import Client, LocalCluster

    from requant.calibration import Execution, input_specs, observe, open_session, open_source
    from requant.calibration.range_files.records import observations_to_json

    source = open_source(data, input_specs(open_session(model)))
    tensors = _tensors(model)
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        pids = sorted(client.run(os.getpid).values())
        client.run(_warm)
        victims = pids[:1] if kill else []

        def progress(done: int, total: int | None) -> None:
            if victims:
                os.kill(victims.pop(), signal.SIGKILL)

        execution = Execution(executor=client.get_executor(), workers=workers)
        began = time.perf_counter()
        seen = observe(model, tensors, source, histogram=True, execution=execution, progress=progress)
        seconds = time.perf_counter() - began
    Path(output).write_text(json.dumps(observations_to_json(seen)))
    return {"seconds": seconds}


def _warm() -> None:
    """Import the packages that every worker needs, so that the measured time does not include the imports."""
    import onnx_ir
    import onnxruntime

    import requant.calibration.runs.work  # noqa: F401

    assert onnx_ir
    assert onnxruntime


# ------------------------------------------------------------------------------------------------- the programs


def _own_process(function: str, *arguments: Any) -> dict[str, Any]:
    """Call a function of this file in a new process."""
    program = (
        f"import sys, json; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from benchmarks import calibration as program\n"
        f"if __name__ == '__main__': print(json.dumps(program.{function}(*json.loads(sys.argv[1]))))"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.py"  # a file, because the workers of a cluster import the main program again
        path.write_text(program)
        done = subprocess.run(
            [sys.executable, str(path), json.dumps(arguments)], stdout=subprocess.PIPE, text=True, check=True
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _network(name: str, folder: str) -> str:
    """Write a network in the form that `requant quantize` calibrates: simplified."""
    import onnx_ir as ir

    sys.path.insert(0, str(SAMPLES))
    import architectures

    from requant.quantize.runtime.progress import silent
    from requant.quantize.steps.simplify import simplify

    path = f"{folder}/{name}.onnx"
    ir.save(simplify(ir.from_proto(architectures.build(name)), silent).model, path)
    return path


@click.group()
def main() -> None:
    """Measure the cost of calibration."""


@main.command()
@click.option("--samples", default=64, show_default=True)
@click.option("--threads", default="1,2", show_default=True, help="Threads of plain inference, workers of calibration.")
@click.option("--turns", default=3, show_default=True)
@click.option("--peers/--no-peers", default=True, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def speed(samples: int, threads: str, turns: int, peers: bool, as_json: bool) -> None:
    """Compare the time of calibrators with plain inference of the same samples."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for network, bounds in BOUNDS.items():
            model = _network(network, folder)
            for count in map(int, threads.split(",")):
                for rule in RULES:
                    found = _own_process("_row", model, "ours", rule, samples, count, turns)
                    bound = bounds["minmax" if rule == "minmax" else "histogram"]
                    rows.append({"network": network, "threads": count, "calibrator": rule, "bound": bound, **found})
                for method in PEERS if peers else ():
                    found = _own_process("_row", model, "peer", method, samples, count, 1)
                    rows.append({"network": network, "threads": count, "calibrator": f"ORT {method}", **found})
    for row in rows:
        row["ratio"] = row["seconds"] / row["plain"]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    columns = ("network", "threads", "calibrator", "over plain", "at most", "seconds", "peak MB")
    table = plain_table(f"{samples} samples", columns, left=LEFT)
    for row in rows:
        most = f"{row['bound']}x" if "bound" in row else ""
        peak = f"{(row['peak'] - row['data']) / 1e6:.0f}"
        figures = (f"{row['ratio']:.2f}x", most, f"{row['seconds']:.2f}", peak)
        table.add_row(row["network"], str(row["threads"]), row["calibrator"], *figures)
    Console().print(table)


@main.command()
@click.option("--samples", default="64,1024", show_default=True)
@click.option("--rules", default="minmax,percentile", show_default=True)
def memory(samples: str, rules: str) -> None:
    """Compare the peak memory of few and of many samples."""
    columns = ("network", "rule", *(f"{count} samples, MB" for count in samples.split(",")), "growth")
    table = plain_table("peak memory", columns, left=LEFT)
    with tempfile.TemporaryDirectory() as folder:
        for network in BOUNDS:
            model = _network(network, folder)
            for rule in rules.split(","):
                peaks = [_own_process("_streamed", model, rule, int(count))["peak"] for count in samples.split(",")]
                megabytes = [f"{peak / 1e6:.0f}" for peak in peaks]
                table.add_row(network, rule, *megabytes, f"{peaks[-1] / peaks[0] - 1:+.1%} (at most {GROWTH:.0%})")
    Console().print(table)


@main.command()
@click.option("--samples", default=512, show_default=True)
@click.option("--network", type=click.Choice(list(BOUNDS)), default="resnet50", show_default=True)
def dask(samples: int, network: str) -> None:
    """Compare one worker of a Dask cluster with two workers; then kill one of the two workers."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        model, data = _network(network, folder), f"{folder}/data"
        name = _session(model, 1).get_inputs()[0].name
        Path(data).mkdir()
        for index, image in enumerate(_inputs(samples)):
            np.savez(f"{data}/{index:05}.npz", **{name: image[None]})
        cases: Sequence[tuple[str, int, bool]] = (("one", 1, False), ("two", 2, False), ("two, one killed", 2, True))
        for case, workers, kill in cases:
            rows[case] = _own_process("_clustered", model, data, workers, kill, f"{folder}/{case}.json")["seconds"]
        whole = Path(f"{folder}/one.json").read_bytes()
        same = {case: Path(f"{folder}/{case}.json").read_bytes() == whole for case in rows}
    table = plain_table(f"{network}, {samples} samples", ("workers", "seconds", "over one", "statistics"), left=LEFT)
    for case, seconds in rows.items():
        goal = f" (at least {SCALING}x)" if case == "two" else ""
        table.add_row(
            case, f"{seconds:.1f}", f"{rows['one'] / seconds:.2f}x{goal}", "same bytes" if same[case] else "DIFFER"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
