"""Time and memory of the group `simplify` on ViT-B/16, compared with loading and saving the file with onnx.

    python -m benchmarks.simplify [--model vit_b_16] [--times 5] [--json]

Each row is the minimum of several processes. In the first row onnx loads and saves the model (the baseline). In the
second row `requant transform IN OUT --group simplify` reads the model, runs every step, verifies the model after each
step, and writes the model. The peak is the peak resident memory. The goals of `simplify` are less than 3 times the time
of the baseline, and less memory than 2.5 times the size of the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console

from benchmarks.tables import plain_table

TIME, MEMORY = 3.0, 2.5
SCRIPT = Path(__file__).parent.parent / "sample_models" / "architectures.py"
BASELINE = "import sys, onnx; onnx.save_model(onnx.load(sys.argv[1]), sys.argv[2])"
SIMPLIFY = (
    "import sys; from requant.cli import main; main(['transform', *sys.argv[1:], '--group', 'simplify', '--force'])"
)
PEAK = (
    "import atexit; status = open('/proc/self/status').read; "
    "atexit.register(lambda: print('\\nVmHWM:', status().split('VmHWM:')[1].split()[0]))\n"
)
"""Prints the peak memory of the program, in kB. What the system tells of it begins with the memory of its parent."""
ROWS = {"onnx load + save": BASELINE, "simplify": SIMPLIFY}


@dataclass(frozen=True, slots=True)
class Row:
    """Time and memory of one kind of process.

    Attributes:
        name: The name of the row.
        seconds: The minimum time, including start and imports.
        cpu: The minimum CPU seconds; on a busy machine they vary less than the time.
        peak: The peak resident bytes.
        time_ratio: `seconds` over the seconds of the baseline.
        peak_ratio: `peak` over the size of the file.
    """

    name: str
    seconds: float
    cpu: float
    peak: int
    time_ratio: float
    peak_ratio: float


def run(code: str, source: Path, target: Path) -> tuple[float, float, int]:
    """Run a program on a model; return its seconds, its CPU seconds and its peak resident bytes."""
    start = time.perf_counter()
    command = [sys.executable, "-c", PEAK + code, str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        told = process.stdout.read() if process.stdout is not None else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"a process failed: {told}")
    target.unlink()
    return seconds, usage.ru_utime + usage.ru_stime, 1024 * int(told.rpartition("VmHWM:")[2])


def measure(name: str, times: int) -> list[Row]:
    """Measure both processes in turn."""
    with tempfile.TemporaryDirectory(prefix="requant-simplify-") as folder:
        source, target = Path(folder, "model.onnx"), Path(folder, "out.onnx")
        subprocess.run([sys.executable, str(SCRIPT), name, "-o", str(source)], check=True)
        runs: dict[str, list[tuple[float, float, int]]] = {row: [] for row in ROWS}
        for _ in range(times):
            for row, code in ROWS.items():
                runs[row].append(run(code, source, target))
        size = source.stat().st_size
    least = {row: [min(column) for column in zip(*values, strict=True)] for row, values in runs.items()}
    peaks = {row: max(peak for _, _, peak in values) for row, values in runs.items()}
    baseline = least["onnx load + save"][0]
    return [
        Row(row, seconds, cpu, peaks[row], seconds / baseline, peaks[row] / size)
        for row, (seconds, cpu, _) in least.items()
    ]


@click.command()
@click.option("--model", default="vit_b_16", show_default=True, help="A network of sample_models/architectures.py.")
@click.option("--times", type=click.IntRange(1), default=5, show_default=True, help="Number of processes of each kind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(model: str, times: int, as_json: bool) -> None:
    """Measure and print the table. The exit code is 1 if a goal is missed."""
    rows = measure(model, times)
    if as_json:
        click.echo(json.dumps({"model": model, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        table = plain_table("", ("", "s", "CPU s", "times load + save", "peak MB", "times the file"))
        for row in rows:
            numbers = f"{row.seconds:.2f}", f"{row.cpu:.2f}", f"{row.time_ratio:.2f}x"
            table.add_row(row.name, *numbers, f"{row.peak / 1e6:.0f}", f"{row.peak_ratio:.2f}x")
        Console(stderr=True).print(table)
    last = rows[-1]
    if last.time_ratio >= TIME or last.peak_ratio >= MEMORY:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
