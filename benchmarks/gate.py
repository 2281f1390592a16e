"""Test the gate: it must find ten planted regressions, and must pass re-runs of an unchanged pair under load.

    python -m benchmarks.gate
    python -m benchmarks.gate --runs 100 --load 2
    python -m benchmarks.gate --runs 0

The pair is the digits network and a new INT8 model of it. The exit code is 1 if the gate misses a regression, gives a
wrong reason or a wrong layer, or fails a re-run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from requant.calibration import save_ranges
from requant.quantize import Options, Selection, calibrate_model, quantize_model
from requant.quantize.gate.run import Check, CheckOptions, check

SAMPLES = Path(__file__).parents[1] / "sample_models"
FLOAT, DATA = SAMPLES / "digits.onnx", SAMPLES / "digits.npz"
BUSY = "import numpy as np\na = np.ones((512, 512))\nwhile True: a = np.tanh(a @ a / 512)"


@dataclass(frozen=True)
class Planted:
    """A regression, and the expected result of the gate.

    Attributes:
        name: A description.
        make: Makes the regression in the folder with ``int8.onnx``; returns the INT8 model and the data to check.
        line: The name of a line that must fail.
        says: A part of the reason of that line.
        layer: The beginning of the first layer that the line names; empty if no layer is the cause.
    """

    name: str
    make: Callable[[Path], tuple[Path, str]]
    line: str
    says: str
    layer: str = ""


def quantized(folder: Path, name: str = "int8.onnx", **options: object) -> Path:
    """Make an INT8 model with options that give the same plan in every run."""
    fixed = Options(**{"place": "all", "effort": "low", "seconds": 0.1, **options}, force=True, force_int8=True)  # type: ignore[arg-type]
    quantize_model(FLOAT, f"{DATA}:calib", folder / name, fixed)
    return folder / name


def edited(edit: Callable[[onnx.GraphProto], None], name: str = "edited.onnx") -> Callable[[Path], tuple[Path, str]]:
    """Return a function that makes an edited copy of the INT8 model."""

    def make(folder: Path) -> tuple[Path, str]:
        model = onnx.load(folder / "int8.onnx")
        edit(model.graph)
        onnx.save(model, folder / name)
        return folder / name, str(DATA)

    return make


def constant(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    """Return the initializer with this name."""
    tensor: onnx.TensorProto = next(tensor for tensor in graph.initializer if tensor.name == name)
    return tensor


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], tuple[Path, str]]:
    """Return a function that makes a copy of the INT8 model with one changed constant."""

    def edit(graph: onnx.GraphProto) -> None:
        tensor = constant(graph, name)
        tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))

    return edited(edit)


def no_channel(values: np.ndarray) -> np.ndarray:
    """Set one channel to zero."""
    values[5] = 0
    return values


def foreign_ranges(folder: Path) -> tuple[Path, str]:
    """Quantize with the ranges of a network that has the same layers but other weights."""
    other = onnx.load(FLOAT)
    for name, factor in (("conv1.weight", 3.0), ("bn1.bias", 0.3), ("bn2.bias", 2.0)):
        tensor = constant(other.graph, name)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), name))
    onnx.save(other, folder / "other.onnx")
    save_ranges(folder / "other.json", found := calibrate_model(folder / "other.onnx", f"{DATA}:calib").file)
    rows = [f'[tensors."{name}"]\nrange = [{lo}, {hi}]\n' for name, (lo, hi) in found.ranges.items() if name != "image"]
    (folder / "other.toml").write_text("".join(row for row in rows if "relu1_out" in row or "relu2_out" in row))
    return quantized(folder, "foreign.onnx", overrides=folder / "other.toml"), str(DATA)


def other_data(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], tuple[Path, str]]:
    """Return a function that gives the unchanged INT8 model and changed data."""

    def make(folder: Path) -> tuple[Path, str]:
        with np.load(DATA) as file:
            arrays = {name: file[name] for name in ("image", "labels")}
        change(arrays)
        np.savez(folder / "other.npz", **arrays)
        return folder / "int8.onnx", str(folder / "other.npz")

    return make


def unscaled(arrays: dict[str, np.ndarray]) -> None:
    """Scale the images to 0..255 instead of 0..1."""
    arrays["image"] = arrays["image"] * np.float32(255)


def swapped(arrays: dict[str, np.ndarray]) -> None:
    """Give the classes other numbers."""
    arrays["labels"] = (arrays["labels"] + 1) % 10


def slow(graph: onnx.GraphProto) -> None:
    """Add slow nodes that do not change the result."""
    first = graph.node[0].input[0]
    graph.initializer.append(numpy_helper.from_array(np.array([1, 96, 28, 28]), "many"))
    graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "nothing"))
    detour = [
        helper.make_node("Expand", [first, "many"], ["wide"], "detour.expand"),
        helper.make_node("Erf", ["wide"], ["slow"], "detour.erf"),
        helper.make_node("ReduceMean", ["slow"], ["mean"], "detour.mean", axes=[1], keepdims=1),
        helper.make_node("Mul", ["mean", "nothing"], ["zero"], "detour.mul"),
        helper.make_node("Add", [first, "zero"], ["same"], "detour.add"),
    ]
    graph.node[0].input[0] = "same"
    for node in reversed(detour):
        graph.node.insert(0, node)


def larger(graph: onnx.GraphProto) -> None:
    """Add float weights that no node reads."""
    graph.initializer.append(numpy_helper.from_array(np.ones((128, 512), np.float32), "fc1.weight.float"))


def older(folder: Path) -> tuple[Path, str]:
    """Set an older opset."""
    model = onnx.load(folder / "int8.onnx")
    for opset in model.opset_import:
        opset.version = 13 if not opset.domain else opset.version
    onnx.save(model, folder / "older.onnx")
    return folder / "older.onnx", str(DATA)


def half_float(folder: Path) -> tuple[Path, str]:
    """Keep half of the layers float."""
    selection = Selection(exclude_nodes=frozenset({"conv2", "fc2"}))
    return quantized(folder, "half.onnx", selection=selection), str(DATA)


PLANTED = (
    Planted(
        "one layer's scale doubled",
        changed("relu1_out/scale", lambda v: v * 2),
        "sqnr",
        "lost",
        "relu1: output scale x2",
    ),
    Planted("ranges of another model", foreign_ranges, "sqnr", "ranges changed", "relu"),
    Planted(
        "wrong preprocessing",
        other_data(unscaled),
        "data",
        "or preprocessing: the inputs changed: image mean",
    ),
    Planted(
        "one channel zeroed",
        changed("conv2.weight/int8", no_channel),
        "sqnr",
        "lost",
        "conv2: 1 channel of weight zero",
    ),
    Planted("a bias dropped", changed("fc1.bias/int32", np.zeros_like), "layers", "bias of fc1", "fc1: bias zero"),
    Planted("swapped labels", other_data(swapped), "data", "the data changed, not the model: the labels changed"),
    Planted("a slower model", edited(slow), "latency", "1 Erf instead of 0", "detour"),
    Planted("a larger file", edited(larger), "size", "fc1.weight.float new"),
    Planted(
        "half the layers float",
        half_float,
        "mac_share",
        "weights became float",
        "conv2: Conv -> FusedConv, weight int8 -> float",
    ),
    Planted("an older opset", older, "opset", "older opset: 17 -> 13"),
)


def caught(planted: Planted, found: Check) -> str:
    """Return what is wrong with the result of the gate; empty if the regression was caught correctly."""
    line = next((line for line in found.findings if line.name == planted.line), None)
    if line is None:
        return "missed"
    if planted.says not in line.reason:
        return f"wrong reason: {line.reason}"
    first = line.layers[0] if line.layers else ""
    return "" if first.startswith(planted.layer) else f"wrong layer: {first or 'none'}"


@contextmanager
def load(count: int) -> Iterator[None]:
    """Keep the machine busy with `count` processes."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def plant(folder: Path, options: CheckOptions) -> int:
    """Check every planted regression, print a table, and return the number of wrong results."""
    wrong = 0
    for planted in PLANTED:
        model, data = planted.make(folder)
        found = check(FLOAT, model, data, folder / "lock.json", options=options)
        problem = caught(planted, found)
        wrong += bool(problem)
        names = ", ".join(line.name for line in found.findings)
        print(f"{planted.name:26} {problem or 'caught':8} fails: {names}")
        line = next((line for line in found.findings if line.name == planted.line), None)
        if line is not None:
            print(f"{'':26} {line.name}: {'; '.join((line.reason, *line.layers[:1]))}")
    return wrong


def again(folder: Path, runs: int, busy: int, options: CheckOptions) -> int:
    """Check the unchanged pair `runs` times under load, print a summary, and return the number of false alarms."""
    alarms, ratios, widest = 0, [], 1.0
    began = time.monotonic()
    with load(busy):
        for _ in range(runs):
            found = check(FLOAT, folder / "int8.onnx", DATA, folder / "lock.json", options=options)
            speed = found.measured.speed
            assert speed is not None
            ratios.append(speed.ratio)
            widest = max(widest, max(speed.rounds) / min(speed.rounds))
            if not found.ok:
                alarms += 1
                print(found)
    print(
        f"{runs} re-runs with {busy} busy processes in {time.monotonic() - began:.0f} s: {alarms} false alarms; "
        f"speed-up {min(ratios):.2f}x to {max(ratios):.2f}x, rounds of a run differ by up to {widest - 1:.0%}"
    )
    return alarms


def main() -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=100, help="number of re-runs of the unchanged pair")
    parser.add_argument("--load", type=int, default=2, help="number of busy processes during the re-runs")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of one measurement of the latency")
    arguments = parser.parse_args()
    options = CheckOptions(seconds=arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="requant-") as name:
        folder = Path(name)
        model = quantized(folder)
        baseline = check(FLOAT, model, DATA, folder / "lock.json", update=True, options=options)
        assert baseline.measured.speed is not None
        print(f"baseline: speed-up {baseline.measured.speed.ratio:.2f}x")
        wrong = plant(folder, options)
        alarms = again(folder, arguments.runs, arguments.load, options) if arguments.runs else 0
    return 1 if wrong or alarms else 0


if __name__ == "__main__":
    raise SystemExit(main())
