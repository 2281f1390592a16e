"""How long the group `simplify` takes on ViT-B/16, and how much memory, against loading and saving the file with onnx.

    python benchmarks/simplify.py [--model vit_b_16] [--times 5] [--json]

Each row is the least of some processes of their own: onnx loads and saves the model (the yardstick), and
`requant transform IN OUT --group simplify` reads it, runs every step, verifies the model after each, and writes it. The
peak is the most memory that was resident. Simplifying is to take less than 3 times the time of the yardstick and
less than 2.5 times the size of the file.
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
from rich.table import Table

TIME, MEMORY = 3.0, 2.5
SCRIPT = Path(__file__).parent.parent / "sample_models" / "architectures.py"
YARDSTICK = "import sys, onnx; onnx.save_model(onnx.load(sys.argv[1]), sys.argv[2])"
SIMPLIFY = (
    "import sys; from requant.cli import main; main(['transform', *sys.argv[1:], '--group', 'simplify', '--force'])"
)
ROWS = {"onnx load + save": YARDSTICK, "simplify": SIMPLIFY}


@dataclass(frozen=True, slots=True)
class Row:
    """What one kind of process took.

    Attributes:
        name: What it did.
        seconds: Its least time, start and imports included.
        cpu: The least of its seconds on a processor, which on a busy machine say more.
        peak: Most resident bytes.
        time_ratio: `seconds` by those of the yardstick.
        peak_ratio: `peak` by the size of the file.
    """

    name: str
    seconds: float
    cpu: float
    peak: int
    time_ratio: float
    peak_ratio: float


def run(code: str, source: Path, target: Path) -> tuple[float, float, int]:
    """Run a program on a model; return its seconds, those on a processor, and its most resident bytes."""
    start = time.perf_counter()
    command = [sys.executable, "-c", code, str(source), str(target)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        said = process.stderr.read() if process.stderr is not None else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"a process failed: {said}")
    target.unlink()
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def measure(name: str, times: int) -> list[Row]:
    """Measure both processes in turns."""
    with tempfile.TemporaryDirectory(prefix="requant-simplify-") as folder:
        source, target = Path(folder, "model.onnx"), Path(folder, "out.onnx")
        subprocess.run([sys.executable, str(SCRIPT), name, "-o", str(source)], check=True)
        found: dict[str, list[tuple[float, float, int]]] = {row: [] for row in ROWS}
        for _ in range(times):
            for row, code in ROWS.items():
                found[row].append(run(code, source, target))
        size = source.stat().st_size
    least = {row: [min(column) for column in zip(*values, strict=True)] for row, values in found.items()}
    peaks = {row: max(peak for _, _, peak in values) for row, values in found.items()}
    yardstick = least["onnx load + save"][0]
    return [
        Row(row, seconds, cpu, peaks[row], seconds / yardstick, peaks[row] / size)
        for row, (seconds, cpu, _) in least.items()
    ]


@click.command()
@click.option("--model", default="vit_b_16", show_default=True, help="A network of sample_models/architectures.py.")
@click.option("--times", type=click.IntRange(1), default=5, show_default=True, help="Processes of each kind.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(model: str, times: int, as_json: bool) -> None:
    """Measure, and exit with 1 where it takes more than it should."""
    rows = measure(model, times)
    if as_json:
        click.echo(json.dumps({"model": model, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for column in ("s", "CPU s", "times load + save", "peak MB", "times the file"):
            table.add_column(column, justify="right")
        for row in rows:
            numbers = f"{row.seconds:.2f}", f"{row.cpu:.2f}", f"{row.time_ratio:.2f}x"
            table.add_row(row.name, *numbers, f"{row.peak / 1e6:.0f}", f"{row.peak_ratio:.2f}x")
        Console(stderr=True).print(table)
    last = rows[-1]
    if last.time_ratio >= TIME or last.peak_ratio >= MEMORY:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
