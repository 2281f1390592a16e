"""Memory and time of quantizing a large model, compared with loading and saving it.

    python -m benchmarks.size [--gigabytes 3] [--kind matmul] [--json]

A model of the given size is generated, with its weights in an external file. Each row is one process: onnx loads and
saves the model (the baseline), `requant quantize` with two samples, `requant quantize --dynamic`. The peak is the peak
resident memory, including mapped pages of the file of weights. The anonymous part, sampled twenty times a second, is
the memory that the process itself allocates. The goals are at most 1.3 times the size of the model as memory, and at
most 3 times the time of the baseline.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.tables import plain_table, print_table

MEMORY, TIME = 1.3, 3.0
BASELINE = """
import sys, onnx
model = onnx.load(sys.argv[1])
onnx.save_model(model, sys.argv[2], save_as_external_data=True, location="copy.data")
"""
QUANTIZE = "from requant.cli import main; main()"
KINDS = {
    "matmul": ("MatMul", (8192, 8192)),
    "gemm": ("Gemm", (16384, 4096)),
    "conv": ("Conv", (2048, 2048, 3, 3)),
}
"""The operator of the generated model, and the shape of its weights."""


@dataclass(frozen=True, slots=True)
class Row:
    """Time and memory of one process.

    Attributes:
        name: The name of the row.
        seconds: The time.
        cpu: The CPU seconds; on a busy machine they vary less than the time.
        peak: The peak resident bytes.
        anonymous: The peak resident bytes that are not pages of files.
        peak_ratio: `peak` over the size of the model.
        time_ratio: `seconds` over the seconds of the baseline; None without a baseline.
        last_line: The last line of the output.
    """

    name: str
    seconds: float
    cpu: float
    peak: int
    anonymous: int
    peak_ratio: float
    time_ratio: float | None
    last_line: str


def weights(kind: str, count: int) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
    """Yield weights that keep the magnitude of the activations. Each array is the first one, rolled by some columns."""
    op, shape = KINDS[kind]
    inputs = shape[0] if op == "MatMul" else int(np.prod(shape[1:]))
    random = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    random *= np.float32(np.sqrt(2 / inputs))
    for index in range(count):
        yield np.roll(random, 7 * index, axis=1)


def generate(path: Path, kind: str, gigabytes: float) -> Path:
    """Write a chain of products, for a MatMul or Gemm after a small convolution; return a file with two samples."""
    op, shape = KINDS[kind]
    count = max(1, round(gigabytes * 1e9 / (4 * int(np.prod(shape)))))
    nodes, initializers, at, value = [], [], 0, "x"
    if op != "Conv":
        width = shape[0] if op == "MatMul" else shape[1]
        kernel = np.random.default_rng(1).standard_normal((1, 1, 3, 3), dtype=np.float32) / 3
        initializers = [
            numpy_helper.from_array(kernel, "kernel"),
            numpy_helper.from_array(np.array([-1, width]), "row"),
        ]
        nodes = [
            helper.make_node("Conv", ["x", "kernel"], ["map"], "first", pads=[1, 1, 1, 1]),
            helper.make_node("Reshape", ["map", "row"], ["flat"], "reshape"),
        ]
        value, sample = "flat", [1, 32, width // 32]
    else:
        sample = [shape[1], 4, 4]
    with open(path.with_suffix(".data"), "wb") as file:
        for index, array in enumerate(weights(kind, count)):
            transposed = op == "Gemm" and index % 2 == 0
            tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
            tensor.dims.extend(array.shape)
            for key, text in (("location", path.with_suffix(".data").name), ("offset", at), ("length", array.nbytes)):
                tensor.external_data.add(key=key, value=str(text))
            initializers.append(tensor)
            at += file.write(array.data)
            attributes = {"pads": [1, 1, 1, 1]} if op == "Conv" else {"transB": int(transposed)} if op == "Gemm" else {}
            nodes.append(helper.make_node(op, [value, tensor.name], [f"y{index}"], f"product{index}", **attributes))
            nodes.append(helper.make_node("Relu", [f"y{index}"], [f"z{index}"], f"relu{index}"))
            value = f"z{index}"
    nodes[-1].output[0] = "y"
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *sample])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", *sample] if op == "Conv" else ["N", None])]
    graph = helper.make_graph(nodes, kind, inputs, outputs, initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    data = path.with_suffix(".npz")
    np.savez(data, x=np.random.default_rng(2).standard_normal((2, *sample), dtype=np.float32))
    return data


def memory(process: int) -> tuple[int, int]:
    """Return the peak resident bytes of a process, and its present anonymous bytes; zeros if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines)
    return tuple(1024 * int(fields.get(key, "0 kB").split()[0]) for key in ("VmHWM", "RssAnon"))  # type: ignore[return-value]


def children() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(name: str, arguments: list[str], size: int, baseline: float | None) -> Row:
    """Run a Python program; return its time and memory."""
    start, peak, anonymous, before = time.perf_counter(), 0, 0, children()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, "-c", *arguments], stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            now = memory(process.pid)
            peak, anonymous = max(peak, now[0]), max(anonymous, now[1])
            time.sleep(0.05)
        seconds = time.perf_counter() - start
        output.seek(0)
        lines = output.read().strip().splitlines()
    if process.returncode:
        raise click.ClickException(f"{name}: exit code {process.returncode}: " + " ".join(lines[-3:]))
    ratio = None if baseline is None else seconds / baseline
    return Row(name, seconds, children() - before, peak, anonymous, peak / size, ratio, lines[-1] if lines else "")


def measure(folder: Path, kind: str, gigabytes: float, *, baseline: bool, dynamic: bool) -> list[Row]:
    """Generate the model, and run all processes on it."""
    model, output = folder / f"{kind}.onnx", folder / "int8.onnx"
    data = generate(model, kind, gigabytes)
    size = sum(path.stat().st_size for path in (model, model.with_suffix(".data")))
    rows, unit = [], None
    if baseline:
        rows.append(run("onnx.load, onnx.save", [BASELINE, str(model), str(folder / "copy.onnx")], size, None))
        unit = rows[0].seconds
        for copy in folder.glob("copy.*"):
            copy.unlink()
    ways = {"requant quantize --data": ["--data", str(data)]} | (
        {"requant quantize --dynamic": ["--dynamic"]} if dynamic else {}
    )
    for name, options in ways.items():
        command = [QUANTIZE, "quantize", str(model), "-o", str(output), "--force", "--force-int8", *options]
        rows.append(run(name, command, size, unit))
        output.unlink()
    return rows


@click.command()
@click.option("--gigabytes", default=3.0, show_default=True)
@click.option("--kind", type=click.Choice(sorted(KINDS)), default="matmul", show_default=True)
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False), help="Folder of the files. [default: temporary]"
)
@click.option("--baseline/--no-baseline", default=True)
@click.option("--dynamic/--no-dynamic", default=True)
@click.option("--json", "as_json", is_flag=True)
def main(gigabytes: float, kind: str, folder: Path | None, baseline: bool, dynamic: bool, as_json: bool) -> None:
    """Measure and print the table."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        rows = measure(Path(name), kind, gigabytes, baseline=baseline, dynamic=dynamic)
    if as_json:
        json.dump({"kind": kind, "gigabytes": gigabytes, "rows": [asdict(row) for row in rows]}, sys.stdout, indent=2)
        return
    title = f"{gigabytes:g} GB of {kind}; goals: {MEMORY} times the size, {TIME:g} times the baseline"
    columns = ("", "peak, GB", "times the size", "anonymous, GB", "seconds", "times the baseline", "CPU seconds")
    table = plain_table(title, columns, no_wrap=columns)
    for row in rows:
        ratio = "" if row.time_ratio is None else f"{row.time_ratio:.2f}"
        figures = (f"{row.peak / 1e9:.2f}", f"{row.peak_ratio:.2f}", f"{row.anonymous / 1e9:.2f}", f"{row.seconds:.1f}")
        table.add_row(row.name, *figures, ratio, f"{row.cpu:.1f}")
    print_table(table, width=120)


if __name__ == "__main__":
    main()
