"""Measure the network of the first INT8 results on TensorFlow 1.x, in the same table.

    python -m benchmarks.seed_table [--batch 128] [--threads 1] [--json]

The network has a 5x5 convolution to 32 channels, a pool, a 5x5 convolution to 64 channels, a pool and two dense layers.
The table compares float and INT8: accuracy at batch 1, throughput at the given batch, the time of the second
convolution and its share of the whole time. The runs of the two models alternate; times are minima. The original
results are 2.642x for the second convolution and 1.035x for the whole network.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.tables import plain_table, print_table
from requant.quantize import Comparison, Options, Setting, compare_models, quantize_model
from requant.quantize.runtime.inputs import open_data, stacked
from requant.quantize.runtime.profile import KernelRun, profiled

SAMPLES = Path(__file__).parent.parent / "sample_models"
MODEL, CALIBRATION, TEST = SAMPLES / "digits.onnx", f"{SAMPLES / 'digits.npz'}:calib", SAMPLES / "digits.npz"
ROUNDS = 5


def second_convolution(model: Path, feed: dict[str, Any], threads: int) -> tuple[KernelRun, float]:
    """Return the convolution with the most multiply-accumulates, and the sum of all kernel times in microseconds.

    The second convolution is the largest. Its name cannot identify it, because the runtime changes names.
    """
    runs = profiled(model, feed, threads=threads).runs
    return max(runs, key=lambda run: run.macs), sum(run.microseconds for run in runs)


def measure(int8: Path, batch: int, threads: int) -> tuple[Comparison, dict[str, Any]]:
    """Compare the two models and profile them in turn."""
    found = compare_models(MODEL, int8, TEST, batch=batch, setting=Setting(threads))
    feed = stacked(open_data(MODEL, TEST), batch).feed
    rounds = [[second_convolution(model, feed, threads) for model in (MODEL, int8)] for _ in range(ROUNDS)]
    best = [min((r[i] for r in rounds), key=lambda pair: pair[0].microseconds) for i in (0, 1)]
    rows = {
        name: {
            "kernel": f"{run.domain or 'ai.onnx'}:{run.op}",
            "conv2_us": run.microseconds,
            "share": run.microseconds / total,
        }
        for name, (run, total) in zip(("float", "int8"), best, strict=True)
    }
    return found, rows


@click.command()
@click.option("--batch", default=128, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(batch: int, threads: int, as_json: bool) -> None:
    """Measure and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        int8 = Path(folder) / "digits_int8.onnx"
        quantize_model(MODEL, CALIBRATION, int8, Options(batch=batch, threads=threads))
        found, rows = measure(int8, batch, threads)
    labelled, timed = found.accuracy.labelled, found.latencies[-1]
    assert labelled is not None
    speedup = rows["float"]["conv2_us"] / rows["int8"]["conv2_us"]
    if as_json:
        json.dump({**found.to_json(), "conv2": {**rows, "speedup": speedup}}, sys.stdout, indent=2)
        return
    columns = ("", "float", "int8", "ratio", "original ratio")
    table = plain_table(f"batch {batch}, {threads} thread(s)", columns, no_wrap=columns)
    right = [labelled.float_accuracy, labelled.int8_accuracy]
    table.add_row("accuracy, batch 1", *(f"{a:.4f}" for a in right), f"{right[1] - right[0]:+.4f}", "-0.0020")
    table.add_row(
        "images/s", *(f"{rate:.0f}" for rate in (timed.float_rate, timed.int8_rate)), f"{timed.speedup:.3f}x", "1.035x"
    )
    table.add_row(
        "second convolution, ms", *(f"{rows[k]['conv2_us'] / 1e3:.3f}" for k in rows), f"{speedup:.3f}x", "2.642x"
    )
    table.add_row("share of kernel time", *(f"{rows[k]['share']:.1%}" for k in rows), "", "")
    table.add_row("kernel", *(rows[k]["kernel"] for k in rows), "", "")
    print_table(table, width=120)


if __name__ == "__main__":
    main()
