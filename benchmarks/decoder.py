"""Tokens per second of a decoder of a billion weights, in float and in each integer form of its products.

    python -m benchmarks.decoder
    python -m benchmarks.decoder --layers 8 --forms dynamic,block-8-128 --threads 2
    python -m benchmarks.decoder --fused --forms dynamic,native     # as ONNX Runtime's model builder writes decoders
    python -m benchmarks.decoder --fused --forms native,native-cache --past 4000    # keys and values in bytes
    python -m benchmarks.decoder --forms native,native-4-32,openvino,openvino-4-32 --peers-python OTHER/bin/python

The model is a stack of some of the 24 layers of a llama of 1.1 billion weights (hidden 2048, 32 heads for 8 of keys and
values, feed-forward 5632), with a small vocabulary and random weights. Each form quantizes in a process of its own.
Then one process runs all models in turn: one token behind `--past` tokens, and a prompt of `--prompt` tokens without
any. The minimum counts, of CPU time with one thread. Tokens per second are those of 24 layers.

The forms of OpenVINO need its package; the compressed ones need an interpreter that has NNCF, too.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.contenders import ContenderError, call
from benchmarks.measurements import SAMPLES, load_feeds, save_feeds
from benchmarks.options import PEERS_PYTHON, chosen
from benchmarks.tables import plain_table, print_table

WIDTH, HEADS, GROUPS, INNER, LAYERS = 2048, 32, 8, 5632, 24
VOCABULARY, OPSET = 64, 17
SHORT = 8
"""The tokens of the prompt from which static ranges come: the evidence runs the model for each tensor."""


@dataclass(frozen=True, slots=True)
class Form:
    """An integer form of all matrix products.

    Attributes:
        strategy: The strategy of ``requant quantize``.
        bits: Bits of a weight in blocks.
        size: Weights in a block; 0 for other forms.
        native: Whether products and attention are native operators.
        cache: Whether keys and values of earlier tokens are bytes.
        runtime: A key of `measurements.LOADERS`. In OpenVINO a form without a strategy is the float model.
    """

    strategy: str
    bits: int = 8
    size: int = 0
    native: bool = False
    cache: bool = False
    runtime: str = "onnxruntime"


FORMS: Mapping[str, Form] = {
    "static-float": Form("static-float"),
    "dynamic": Form("dynamic"),
    "native": Form("auto", native=True),
    "native-cache": Form("auto", native=True, cache=True),
    "native-8-32": Form("block", 8, 32, native=True),
    "native-8-128": Form("block", 8, 128, native=True),
    "native-4-32": Form("block", 4, 32, native=True),
    "native-4-128": Form("block", 4, 128, native=True),
    "block-8-32": Form("block", 8, 32),
    "block-8-128": Form("block", 8, 128),
    "block-4-32": Form("block", 4, 32),
    "openvino": Form("", runtime="openvino"),
    "openvino-8": Form("compressed", 8, runtime="openvino"),
    "openvino-4-32": Form("compressed", 4, 32, runtime="openvino"),
    "openvino-4-128": Form("compressed", 4, 128, runtime="openvino"),
}
OWN = tuple(name for name, form in FORMS.items() if form.runtime == "onnxruntime" and not form.cache)


@dataclass(frozen=True, slots=True)
class Setting:
    """What the command line says.

    Attributes:
        layers: Layers in the stack.
        forms: The keys of `FORMS`.
        past: Tokens before the single one.
        prompt: Tokens of the prompt.
        fused: Whether attention and norms are operators of ONNX Runtime.
        threads: Threads inside one operator.
        seconds: The total time for which the models run at each size.
        peers_python: An interpreter that has NNCF; None for this one.
    """

    layers: int
    forms: Sequence[str]
    past: int
    prompt: int
    fused: bool
    threads: int
    seconds: float
    peers_python: str | None


def write(model: Path, layers: int, *, fused: bool) -> None:
    """Write a stack of layers with random weights, which stand in a file of their own."""
    import onnx

    sys.path.insert(0, str(SAMPLES))
    builder, language = (importlib.import_module(name) for name in ("graph_builder", "language"))
    made = builder.empty_model("decoder", OPSET)
    lengths = {"vocabulary": VOCABULARY, "width": WIDTH, "heads": HEADS, "inner": INNER, "groups": GROUPS}
    sizes = language.Llama(layers=layers, fused=fused, **lengths)
    if fused:
        made.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    language.llama(builder.Graph(0, OPSET, made.graph), 0, sizes)
    onnx.save(made, model, save_as_external_data=True, location=f"{model.name}.data")


def feed(setting: Setting, tokens: int, past: int, seed: int) -> dict[str, Any]:
    """Return `tokens` random tokens behind `past` earlier ones."""
    random = np.random.default_rng(seed)
    cache = (1, GROUPS, past, WIDTH // HEADS)
    pasts = {
        f"past_key_values.{layer}.{part}": random.normal(size=cache).astype(np.float32)
        for layer in range(setting.layers)
        for part in ("key", "value")
    }
    mask = {"attention_mask": np.ones((1, past + tokens), np.int64)} if setting.fused else {}
    return {"input_ids": random.integers(VOCABULARY, size=(1, tokens)), **mask, **pasts}


def in_bytes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a feed with the keys and values of earlier tokens in bytes, as `quantize_caches` has them."""
    made = {name: array for name, array in given.items() if not name.startswith("past")}
    for name in given.keys() - made.keys():
        scale = np.abs(given[name]).max(axis=-1, keepdims=True) / 127
        made[name] = (np.rint(given[name] / scale) + 128).astype(np.uint8)
        made[f"{name}_scale"] = scale.astype(np.float32)
    return made


def write_with_bytes(model: Path, made: Path) -> None:
    """Write a model with its caches in bytes."""
    import onnx_ir as ir

    from requant.transforms import REGISTRY

    source = ir.load(model)
    if not REGISTRY["quantize_caches"](source).applied:
        raise click.ClickException("only a decoder of ONNX Runtime's operators has a cache in bytes: add --fused")
    ir.save(source, made, external_data=f"{made.name}.data")


def native_plan(model: str, path: str, product: str) -> Path:
    """Write a plan in which products by constants have a form, and attention is a native operator; return its path."""
    import onnx_ir as ir

    from requant.transforms.graphs.queries import key
    from requant.transforms.patterns.attention import GROUP_QUERY, find_attention

    graph, rows = ir.load(model).graph, {}
    for node in graph:
        weights = node.inputs[1] if node.op_type in ("MatMul", "Gemm") else None
        if weights is not None and weights.is_initializer():
            rows[str(node.name)] = {"operator": node.op_type, "implementation": product}
        found = find_attention(node) if node.op_type == "Softmax" else None
        if found is not None:
            rows[str(found.nodes[-1].name)] = {"operator": "attention", "implementation": "dynamic native"}
        if key(node) == GROUP_QUERY:
            rows[str(node.name)] = {"operator": GROUP_QUERY, "implementation": "dynamic native"}
    Path(path).write_text(json.dumps({"schema": 1, "units": rows}))
    return Path(path)


def quantize(model: str, feeds: str, output: str, form: Form) -> None:
    """Quantize the stack; every matrix product has the form."""
    from requant.quantize import Options, quantize_model
    from requant.quantize.options.declared import Strategy
    from requant.quantize.options.selection import Selection
    from requant.transforms.int8.qparams import Scheme

    product = "block native" if form.strategy == "block" else "dynamic native"
    plan = native_plan(model, f"{Path(output).parent}/native.json", product) if form.native else None
    options = Options(
        force=True,
        force_int8=True,
        effort="low",
        place="rules",
        plan=plan,
        selection=Selection(strategy=Strategy(form.strategy)),
        scheme=Scheme(block_bits=form.bits, block_size=form.size),
    )
    quantize_model(model, load_feeds(feeds) if form.strategy in ("static-float", "auto") else None, output, options)


def made(folder: Path, setting: Setting) -> dict[str, Path]:
    """Write the stack in float and in each form, each in a folder of its own; return the paths by name."""
    models = {"float": place(folder, "float")}
    write(models["float"], setting.layers, fused=setting.fused)
    sources = {False: (models["float"], folder / "feeds.npz"), True: (folder / "bytes.onnx", folder / "bytes.npz")}
    short = feed(setting, SHORT, 0, 0)
    for cache, given in ((False, short), (True, in_bytes(short))):
        save_feeds(str(sources[cache][1]), [given])
    if any(FORMS[name].cache for name in setting.forms):
        write_with_bytes(models["float"], sources[True][0])
    for name in setting.forms:
        form = FORMS[name]
        if not form.strategy:
            models[name] = models["float"]
            continue
        click.echo(f"quantize: {name}", err=True)
        if form.strategy == "compressed":
            models[name] = place(folder, name, ".xml")
            given = {"model": str(models["float"]), "output": str(models[name]), "bits": form.bits, "size": form.size}
            called("compressed", python=setting.peers_python, **given)
        else:
            models[name] = place(folder, name)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # its memory is released
                source, feeds = map(str, sources[form.cache])
                pool.submit(quantize, source, feeds, str(models[name]), form).result()
    return models


def place(folder: Path, name: str, suffix: str = ".onnx") -> Path:
    """Make the folder of a model, and return the model's path."""
    (folder / name).mkdir()
    return folder / name / f"model{suffix}"


def megabytes(model: Path) -> float:
    """Return the size of a model's files."""
    return sum(file.stat().st_size for file in model.parent.glob("model.*")) / 1e6


def called(function: str, **arguments: Any) -> dict[str, Any]:
    """Call a function of the contenders; an error becomes one line."""
    try:
        return call(function, **arguments)
    except ContenderError as error:
        raise click.ClickException(str(error)) from error


def timed(models: Mapping[str, Path], given: Mapping[str, Any], folder: Path, setting: Setting) -> dict[str, float]:
    """Return the least milliseconds of each model on a feed, which is written to a folder.

    Raises:
        click.ClickException: A model does not run.
    """
    feeds, bytes_of = (str(folder / name) for name in ("feed.npz", "feed_bytes.npz"))
    save_feeds(feeds, [given])
    save_feeds(bytes_of, [in_bytes(given)])
    forms = {name: FORMS.get(name, Form("")) for name in models}
    cases = [
        {
            "name": name,
            "model": str(models[name]),
            "runtime": form.runtime,
            **({"feeds": bytes_of} if form.cache else {}),
        }
        for name, form in forms.items()
    ]
    threads = setting.threads
    found = called("timed", cases=cases, feeds=feeds, threads=threads, seconds=setting.seconds, cpu=threads == 1)
    failed = next((f"{name}: {row['error']}" for name, row in found.items() if "error" in row), "")
    if failed:
        raise click.ClickException(failed)
    return {name: row["ms"] for name, row in found.items()}


@click.command()
@click.option("--layers", default=2, show_default=True, type=click.IntRange(1, LAYERS), help="Layers in the stack.")
@click.option("--forms", default=",".join(OWN), show_default=True, help=f"Of {', '.join(FORMS)}.")
@click.option("--past", default=128, show_default=True, help="Tokens before the single one.")
@click.option("--prompt", default=256, show_default=True, help="Tokens of the prompt.")
@click.option("--fused", is_flag=True, help="Attention and norms are operators of ONNX Runtime.")
@click.option("--threads", default=1, show_default=True)
@click.option("--seconds", default=20.0, show_default=True, help="Total time for which the models run at each size.")
@PEERS_PYTHON
@click.option("--json", "as_json", is_flag=True)
def main(as_json: bool, forms: str, **given: Any) -> None:
    """Time a decoder of a billion weights."""
    setting = Setting(forms=chosen(forms, FORMS, "form"), **given)
    with tempfile.TemporaryDirectory(prefix="requant-decoder-") as temporary:
        folder = Path(temporary)
        models = made(folder, setting)
        rows: dict[str, dict[str, float]] = {name: {"mb": megabytes(path)} for name, path in models.items()}
        for tokens, before in ((1, setting.past), (setting.prompt, 0)):
            given = feed(setting, tokens, before, 99)
            for name, ms in timed(models, given, folder, setting).items():
                rate = tokens * 1e3 / ms * setting.layers / LAYERS
                rows[name] |= {f"{tokens} ms": ms, f"{tokens} tokens/s": rate}
    if as_json:
        click.echo(json.dumps({"layers": setting.layers, "threads": setting.threads, "forms": rows}))
        return
    table = plain_table("", ["form", *rows["float"]], left=("form",))
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.4g}" for value in row.values()))
    print_table(table)


if __name__ == "__main__":
    main()
