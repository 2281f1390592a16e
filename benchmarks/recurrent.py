"""Times of an LSTM or GRU in float, with the runtime's integer operators, and as native operators.

    python -m benchmarks.recurrent
    python -m benchmarks.recurrent --op GRU --direction bidirectional --states 400 --items 1 --steps 1

The model has layers of random weights, as wide as the state. One process runs its forms in turn, and the minimum of the
CPU time counts, with one thread.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from benchmarks.contenders import ContenderError, call
from benchmarks.measurements import load_feeds, save_feeds
from benchmarks.options import chosen
from benchmarks.tables import plain_table, print_table

if TYPE_CHECKING:
    import onnx

GATES = {"LSTM": 4, "GRU": 3}
FORMS = {"dynamic": "dynamic", "native": "dynamic native"}


def write(op: str, direction: str, layers: int, size: int) -> onnx.ModelProto:
    """Return a model of some layers; x is (steps, items, size)."""
    import onnx.parser
    from onnx import numpy_helper

    random, count, width, before = np.random.default_rng(0), 2 if direction == "bidirectional" else 1, size, "x"
    attributes = f'hidden_size = {size}, direction = "{direction}"' + ", linear_before_reset = 1" * (op == "GRU")
    arrays: dict[str, Any] = {"lengths": np.array([0, 0, count * size])}
    text = ""
    for layer in range(layers):
        rows = GATES[op] * size
        shapes = {"w": (count, rows, width), "r": (count, rows, size), "b": (count, 2 * rows)}
        for name, shape in shapes.items():
            arrays[f"{name}{layer}"] = random.normal(0, size**-0.5, shape).astype(np.float32)
        text += f"""[layer{layer}] y{layer} = {op} <{attributes}> ({before}, w{layer}, r{layer}, b{layer})
            t{layer} = Transpose <perm = [0, 2, 1, 3]> (y{layer})
            z{layer} = Reshape(t{layer}, lengths)"""
        before, width = f"z{layer}", count * size
    made = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        net (float[S,N,{size}] x) => (float[S,N,{width}] {before}) {{ {text} }}""")
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return made


def quantize(model: Path, feeds: Path, op: str, layers: int, form: str) -> Path:
    """Write the model with each layer in a form; return its path."""
    from requant.quantize import Options, quantize_model

    output, plan = model.with_name(f"{form}.onnx"), model.with_name(f"{form}.json")
    units = {f"layer{layer}": {"operator": op, "implementation": FORMS[form]} for layer in range(layers)}
    plan.write_text(json.dumps({"schema": 1, "units": units}))
    options = Options(plan=plan, force=True, force_int8=True, effort="low", seconds=0.1)
    quantize_model(model, load_feeds(str(feeds)), output, options)
    return output


def times(folder: Path, op: str, direction: str, layers: int, shape: tuple[int, int, int], seconds: float) -> Any:
    """Return the milliseconds of each form; `shape` is that of x."""
    import onnx

    model, feeds = folder / "float.onnx", folder / "feeds.npz"
    onnx.save(write(op, direction, layers, shape[-1]), model)
    save_feeds(str(feeds), [{"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)}])
    models = {"float": model} | {form: quantize(model, feeds, op, layers, form) for form in FORMS}
    cases = [{"name": name, "model": str(path), "runtime": "onnxruntime"} for name, path in models.items()]
    try:
        found = call("timed", cases=cases, feeds=str(feeds), threads=1, seconds=seconds, cpu=True)
    except ContenderError as error:
        raise click.ClickException(str(error)) from error
    return {name: row["ms"] for name, row in found.items()}


def numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> list[int]:
    """Return the numbers of a list."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError as error:
        raise click.BadParameter("give numbers with commas between them") from error


def print_rows(rows: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Print the times as a table."""
    table = plain_table(title, ["state, items", "float, ms", *(f"{form}, ms" for form in FORMS), *FORMS])
    for name, row in rows.items():
        cells = [f"{ms:.2f}" for ms in row.values()]
        table.add_row(name, *cells, *(f"{row['float'] / row[form]:.2f}x" for form in FORMS))
    print_table(table)


@click.command()
@click.option("--op", default="LSTM", show_default=True, help=f"Of {', '.join(GATES)}.")
@click.option("--direction", default="forward", show_default=True)
@click.option("--layers", default=2, show_default=True)
@click.option("--states", default="256,512", show_default=True, callback=numbers, help="Values of the state.")
@click.option("--items", default="1,8", show_default=True, callback=numbers, help="Sequences side by side.")
@click.option("--steps", default=100, show_default=True)
@click.option("--seconds", default=10.0, show_default=True, help="Total time for which the forms run at each size.")
@click.option("--json", "as_json", is_flag=True)
def main(op: str, states: list[int], items: list[int], steps: int, as_json: bool, **given: Any) -> None:
    """Time the forms of an LSTM or GRU."""
    (op,) = chosen(op, GATES, "operator")
    rows: dict[str, dict[str, float]] = {}
    for size in states:
        for count in items:
            with tempfile.TemporaryDirectory(prefix="requant-recurrent-") as folder:
                rows[f"{size}, {count}"] = times(Path(folder), op, shape=(steps, count, size), **given)
    if as_json:
        click.echo(json.dumps(rows))
    else:
        print_rows(rows, f"{op}, {given['layers']} layers, {steps} steps, 1 thread")


if __name__ == "__main__":
    main()
