"""Write two small models with state, for tests and examples: a GRU that takes a frame a run, a decoder with a cache.

    python sample_models/streams.py gru_stream -o gru_stream.onnx
    requant quantize gru_stream.onnx -o gru_int8.onnx --data sample_models/streams.py:gru_stream_data

Weights are drawn from a seed. `NAME_data` yields lists: each list is a sequence whose state is carried. Its samples
have the inputs that a program feeds, without the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import onnx
from graph_builder import (
    RELU,
    Graph,
    empty_model,
    gelu,
    layer_norm,
    linear,
    relu,
    reshape,
    sigmoid,
    token_linear,
    unsqueeze,
)
from onnx import TensorProto
from sample_feeds import Feed, series, tokens

OPSET = 17
FRAME, HIDDEN = 64, 96
VOCABULARY, WIDTH, HEADS, LAYERS, PLACES = 512, 64, 4, 2, 256
DEPTH = WIDTH // HEADS
SEQUENCES, STEPS = 6, 24
PROMPT = 16


def gru_stream(graph: Graph) -> None:
    """Write a mask estimator that takes one frame of a spectrum: linear, GRU, linear, sigmoid.

    The inputs are `frame` (N, 64) and the state `h0` (1, N, 96), the outputs `mask` (N, 64) and `hn` (1, N, 96).
    """
    frame = graph.input("frame", TensorProto.FLOAT, ["N", FRAME])
    before = graph.input("h0", TensorProto.FLOAT, [1, "N", HIDDEN])
    x = relu(graph, linear(graph, frame, "/encoder", FRAME, HIDDEN, gain=RELU), "/relu")
    shapes = {"W": (1, 3 * HIDDEN, HIDDEN), "R": (1, 3 * HIDDEN, HIDDEN), "B": (1, 6 * HIDDEN)}
    stds = {"W": HIDDEN**-0.5, "R": 1.5 * HIDDEN**-0.5, "B": 0.1}
    weights = [graph.parameter(f"gru.{key}", graph.normal(f"gru.{key}", shapes[key], stds[key])) for key in shapes]
    x = unsqueeze(graph, x, [0], at="/gru")
    _, after = graph.node_with_outputs(
        "GRU", x, *weights, "", before, at="/gru", outputs=2, hidden_size=HIDDEN, linear_before_reset=1
    )
    graph.output("hn", after, TensorProto.FLOAT, [1, "N", HIDDEN])
    last = reshape(graph, "hn", [-1, HIDDEN], at="/decoder")
    mask = sigmoid(graph, linear(graph, last, "/decoder", HIDDEN, FRAME, gain=2.0), "/sigmoid")
    graph.output("mask", mask, TensorProto.FLOAT, ["N", FRAME])


def cached_decoder(graph: Graph) -> None:
    """Write a decoder with learned positions, and a cache of keys and values that grows with every run.

    The inputs are `input_ids` and `position_ids` (N, sequence), `attention_mask` (N, total) and
    `past_key_values.LAYER.key` and `.value` (N, 4, past, 16); the outputs are `logits` (N, sequence, 512) and
    `present.LAYER.key` and `.value`.
    """
    axes: dict[str, list[int | str]] = {"input_ids": ["N", "sequence"], "attention_mask": ["N", "total"]}
    axes["position_ids"] = axes["input_ids"]
    ids, mask, places = (graph.input(name, TensorProto.INT64, shape) for name, shape in axes.items())
    cache: list[int | str] = ["N", HEADS, "past", DEPTH]
    pasts = [
        [graph.input(f"past_key_values.{layer}.{part}", TensorProto.FLOAT, cache) for part in ("key", "value")]
        for layer in range(LAYERS)
    ]
    table, positions = (
        graph.parameter(name, graph.normal(name, (rows, WIDTH), std))
        for name, rows, std in (("embed.weight", VOCABULARY, 1.0), ("positions.weight", PLACES, 0.3))
    )
    rows = (graph.node("Gather", weight, index, at="/embed") for weight, index in ((table, ids), (positions, places)))
    x = graph.node("Add", *rows, at="/embed")
    hidden = _hidden(graph, mask, places)
    for layer, past in enumerate(pasts):
        at = f"/layers.{layer}"
        y = _attention(graph, layer_norm(graph, x, f"{at}/norm1", WIDTH, 1e-5), past, hidden, layer)
        x = graph.node("Add", x, y, at=at)
        y = token_linear(graph, layer_norm(graph, x, f"{at}/norm2", WIDTH, 1e-5), f"{at}/up", WIDTH, 4 * WIDTH)
        y = token_linear(graph, gelu(graph, y, f"{at}/act"), f"{at}/down", 4 * WIDTH, WIDTH)
        x = graph.node("Add", x, y, at=at)
    logits = token_linear(graph, layer_norm(graph, x, "/norm", WIDTH, 1e-5), "/head", WIDTH, VOCABULARY, gain=2.0)
    graph.output("logits", logits, TensorProto.FLOAT, ["N", "sequence", VOCABULARY])


def _hidden(graph: Graph, mask: str, places: str) -> str:
    """Append the mask that is added to the scores (N, 1, sequence, total): the lowest float32 for hidden tokens."""
    at, one = "/mask", graph.constant(1, at="/mask")
    ends = graph.node("Cast", mask, at=at, to=TensorProto.INT64)
    order = graph.node("Sub", graph.node("CumSum", ends, one, at=at), one, at=at)
    later = graph.node("Greater", unsqueeze(graph, order, [1], at=at), unsqueeze(graph, places, [2], at=at), at=at)
    lowest = graph.constant(float(np.finfo(np.float32).min), at=at)
    return unsqueeze(graph, graph.node("Where", later, lowest, graph.constant(0.0, at=at), at=at), [1], at=at)


def _attention(graph: Graph, x: str, past: list[str], hidden: str, layer: int) -> str:
    """Append softmax(q k^T / 4 + mask) v; k and v include the past tokens, and are outputs."""
    at = f"/layers.{layer}/attention"

    def split(part: str) -> str:
        y = reshape(graph, token_linear(graph, x, f"{at}/{part}", WIDTH, WIDTH), [0, 0, HEADS, DEPTH], at=at)
        return graph.node("Transpose", y, at=at, perm=[0, 2, 1, 3])

    query = split("q")
    total: list[int | str] = ["N", HEADS, "total", DEPTH]
    for part, before in zip(("key", "value"), past, strict=True):
        new = graph.node("Concat", before, split(part[0]), at=at, axis=2)
        graph.output(f"present.{layer}.{part}", new, TensorProto.FLOAT, total)
    key = graph.node("Transpose", f"present.{layer}.key", at=at, perm=[0, 1, 3, 2])
    scores = graph.node("MatMul", query, key, at=at)
    scores = graph.node("Mul", scores, graph.constant(DEPTH**-0.5, at=at), at=at)
    weights = graph.node("Softmax", graph.node("Add", scores, hidden, at=at), at=at, axis=-1)
    mixed = graph.node("MatMul", weights, f"present.{layer}.value", at=at)
    mixed = reshape(graph, graph.node("Transpose", mixed, at=at, perm=[0, 2, 1, 3]), [0, 0, WIDTH], at=at)
    return token_linear(graph, mixed, f"{at}/o", WIDTH, WIDTH)


MODELS: dict[str, Callable[[Graph], None]] = {"gru_stream": gru_stream, "cached_decoder": cached_decoder}


def build(name: str, *, seed: int = 0) -> onnx.ModelProto:
    """Return a model of `MODELS`; the same seed gives the same weights."""
    model = empty_model(name, OPSET)
    MODELS[name](Graph(seed, OPSET, model.graph))
    return model


def gru_stream_data() -> Iterator[list[Feed]]:
    """Yield sequences of frames in which neighbouring frames are similar."""
    for number in range(SEQUENCES):
        frames = series(np.random.default_rng([1, number]), 1, STEPS)["input"][0]
        yield [{"frame": frame[None]} for frame in frames]


def cached_decoder_data() -> Iterator[list[Feed]]:
    """Yield sequences of tokens: a prompt, then one token a sample."""
    for number in range(SEQUENCES):
        (ids,) = tokens(np.random.default_rng([2, number]), 1, PROMPT + STEPS, vocabulary=VOCABULARY).values()
        steps = [ids[:, :PROMPT], *np.split(ids[:, PROMPT:], STEPS, axis=1)]
        yield [{"input_ids": step} for step in steps]


@click.command()
@click.argument("name", type=click.Choice(list(MODELS)))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The model to write.")
def main(name: str, output: Path) -> None:
    """Write the model NAME."""
    onnx.save_model(build(name), output)


if __name__ == "__main__":
    main()
