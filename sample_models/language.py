"""Networks on sequences of tokens: BERT-base, a llama-style decoder with a cache, a tagger with bidirectional LSTM."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from graph_builder import (
    RELU,
    Floats,
    Graph,
    gelu,
    layer_norm,
    linear,
    path,
    reduce_mean,
    reshape,
    silu,
    token_linear,
    unsqueeze,
)
from onnx import TensorProto

LOWEST = float(np.finfo(np.float32).min)  # is added to the score of a masked token

BERT_VOCABULARY, BERT_POSITIONS, BERT_TYPES = 30522, 512, 2
BERT_WIDTH, BERT_HEADS, BERT_LAYERS, BERT_INNER, BERT_EPS = 768, 12, 12, 3072, 1e-12


def bert_base(graph: Graph, _size: int) -> None:
    """Write BERT-base, uncased, with pooler (Devlin et al., 2018), as exporters write Hugging Face's BertModel."""
    inputs = ["input_ids", "attention_mask", "token_type_ids"]
    tokens, mask, types = (graph.input(name, TensorProto.INT64, ["N", "sequence"]) for name in inputs)
    x = _embeddings(graph, tokens, types)
    mask = unsqueeze(graph, unsqueeze(graph, mask, [1], at=""), [2], at="")
    mask = graph.node("Cast", mask, at="", to=TensorProto.FLOAT)
    mask = graph.node("Sub", graph.constant(1.0, at=""), mask, at="")
    mask = graph.node("Mul", mask, graph.constant(LOWEST, at=""), at="")
    for layer in range(BERT_LAYERS):
        x = _bert_layer(graph, x, mask, f"/encoder/layer.{layer}")
    first = graph.node("Gather", x, graph.constant(0, at="/pooler"), at="/pooler", axis=1)
    pooled = linear(graph, first, "/pooler/dense", BERT_WIDTH, BERT_WIDTH)
    pooled = graph.node("Tanh", pooled, at="/pooler/activation")
    graph.output("last_hidden_state", x, TensorProto.FLOAT, ["N", "sequence", BERT_WIDTH])
    graph.output("pooler_output", pooled, TensorProto.FLOAT, ["N", BERT_WIDTH])


def _table(graph: Graph, at: str, rows: int, width: int, indices: str, std: float = 1.0) -> str:
    """Append a Gather of rows of an embedding."""
    name = f"{path(at)}.weight"
    return graph.node("Gather", graph.parameter(name, graph.normal(name, (rows, width), std)), indices, at=at)


def _length(graph: Graph, x: str, axis: int, at: str) -> str:
    """Append the length of an axis as a scalar."""
    return graph.node("Gather", graph.node("Shape", x, at=at), graph.constant(axis, at=at), at=at, axis=0)


def _embeddings(graph: Graph, tokens: str, types: str) -> str:
    """Append the sum of the embeddings of token, type and position."""
    at = "/embeddings"
    length = unsqueeze(graph, _length(graph, tokens, 1, at), [0], at=at)
    every = graph.constant(np.arange(BERT_POSITIONS).reshape(1, -1), at=at)
    start, axis = graph.constant([0], at=at), graph.constant([1], at=at)
    positions = graph.node("Slice", every, start, length, axis, at=at)
    x = _table(graph, f"{at}/word_embeddings", BERT_VOCABULARY, BERT_WIDTH, tokens)
    kind = _table(graph, f"{at}/token_type_embeddings", BERT_TYPES, BERT_WIDTH, types, 0.3)
    x = graph.node("Add", x, kind, at=at)
    place = _table(graph, f"{at}/position_embeddings", BERT_POSITIONS, BERT_WIDTH, positions, 0.3)
    return layer_norm(graph, graph.node("Add", x, place, at=at), f"{at}/LayerNorm", BERT_WIDTH, BERT_EPS)


def _bert_layer(graph: Graph, x: str, mask: str, at: str) -> str:
    """Append attention and perceptron; each result is added to its input and then normalized."""
    y = _bert_attention(graph, x, mask, f"{at}/attention/self")
    y = token_linear(graph, y, f"{at}/attention/output/dense", BERT_WIDTH, BERT_WIDTH)
    y = graph.node("Add", y, x, at=f"{at}/attention/output")
    x = layer_norm(graph, y, f"{at}/attention/output/LayerNorm", BERT_WIDTH, BERT_EPS)
    y = token_linear(graph, x, f"{at}/intermediate/dense", BERT_WIDTH, BERT_INNER, gain=RELU)
    y = gelu(graph, y, f"{at}/intermediate/intermediate_act_fn")
    y = token_linear(graph, y, f"{at}/output/dense", BERT_INNER, BERT_WIDTH)
    return layer_norm(graph, graph.node("Add", y, x, at=f"{at}/output"), f"{at}/output/LayerNorm", BERT_WIDTH, BERT_EPS)


def _bert_attention(graph: Graph, x: str, mask: str, at: str) -> str:
    """Append softmax(q k^T / sqrt(64) + mask) v for 12 heads; the shapes are computed, as exporters write them."""
    depth = BERT_WIDTH // BERT_HEADS

    def split(part: str, perm: list[int]) -> str:
        y = token_linear(graph, x, f"{at}/{part}", BERT_WIDTH, BERT_WIDTH)
        shape = _shape_of(graph, y, [BERT_HEADS, depth], at)
        return graph.node("Transpose", graph.node("Reshape", y, shape, at=at), at=at, perm=perm)

    key, value, query = split("key", [0, 2, 3, 1]), split("value", [0, 2, 1, 3]), split("query", [0, 2, 1, 3])
    scores = graph.node("MatMul", query, key, at=at)
    scores = graph.node("Div", scores, graph.constant(math.sqrt(depth), at=at), at=at)
    weights = graph.node("Softmax", graph.node("Add", scores, mask, at=at), at=at, axis=-1)
    mixed = graph.node("Transpose", graph.node("MatMul", weights, value, at=at), at=at, perm=[0, 2, 1, 3])
    return graph.node("Reshape", mixed, _shape_of(graph, mixed, [BERT_WIDTH], at), at=at)


def _shape_of(graph: Graph, x: str, rest: list[int], at: str) -> str:
    """Append a shape: the first two lengths of a tensor, then `rest`."""
    lengths = [unsqueeze(graph, _length(graph, x, axis, at), [0], at=at) for axis in range(2)]
    return graph.node("Concat", *lengths, *(graph.constant([length], at=at) for length in rest), at=at, axis=0)


@dataclass(frozen=True, slots=True)
class Llama:
    """The sizes of a llama (Touvron et al., 2023); by default those of stories15M.

    Attributes:
        vocabulary: The number of tokens.
        width: The length of the vector of a token.
        heads: The heads of each attention.
        layers: The number of layers.
        inner: The width inside a gated perceptron.
        groups: The heads of keys and values, each for several neighbouring queries (Ainslie et al., 2023); 0 for as
            many as queries.
        fused: Whether attention and norms are operators of ONNX Runtime, as its model builder writes them.
        positions: The places for which a fused model has cosines and sines.
    """

    vocabulary: int = 32000
    width: int = 288
    heads: int = 6
    layers: int = 6
    inner: int = 768
    groups: int = 0
    fused: bool = False
    positions: int = 4096

    @property
    def depth(self) -> int:
        """The length of a query."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """The heads of keys and values."""
        return self.groups or self.heads


LLAMA, LLAMA_EPS = Llama(), 1e-5
LLAMA_BRANCH = 0.15  # the gain of a residual branch; the stream begins with embeddings of magnitude 2 / sqrt(288)


def llama(graph: Graph, _size: int, sizes: Llama = LLAMA) -> None:
    """Write a llama with a cache of keys and values.

    The inputs are the new tokens `input_ids` (N, sequence), and the keys and values of `past` earlier tokens,
    `past_key_values.LAYER.key` and `.value` (N, key heads, past, depth). The outputs `present.*` are the keys and
    values of all tokens. A fused model has the input `attention_mask` (N, past + sequence) beside them: ones.
    """
    tokens = graph.input("input_ids", TensorProto.INT64, ["N", "sequence"])
    cache: list[int | str] = ["N", sizes.key_heads, "past", sizes.depth]
    pasts = [
        {part: graph.input(f"past_key_values.{layer}.{part}", TensorProto.FLOAT, cache) for part in ("key", "value")}
        for layer in range(sizes.layers)
    ]
    name = "model.embed_tokens.weight"
    table = graph.parameter(name, graph.normal(name, (sizes.vocabulary, sizes.width), 2 / math.sqrt(sizes.width)))
    x = graph.node("Gather", table, tokens, at="/model/embed_tokens")
    places = _fused_places(graph, sizes) if sizes.fused else _places(graph, tokens, pasts[0]["key"], sizes)
    presents = []
    for layer, past in enumerate(pasts):
        x, present = _llama_layer(graph, x, past, places, f"/model/layers.{layer}", sizes)
        presents.append(present)
    x = _rms_norm(graph, x, "/model/norm", sizes)
    logits = graph.node("MatMul", x, graph.node("Transpose", table, at="/lm_head", perm=[1, 0]), at="/lm_head")
    graph.output("logits", logits, TensorProto.FLOAT, ["N", "sequence", sizes.vocabulary])
    for layer, present in enumerate(presents):
        for part, value in present.items():
            shape: list[int | str] = ["N", sizes.key_heads, "past + sequence", sizes.depth]
            graph.output(f"present.{layer}.{part}", value, TensorProto.FLOAT, shape)


@dataclass(frozen=True, slots=True)
class Places:
    """The position tensors that all layers share.

    Attributes:
        cos: The cosines of the rotations of the new tokens, (1, 1, sequence, depth); those of all places, (positions,
            depth / 2), in a fused model.
        sin: The sines of the rotations.
        mask: Is added to the scores (sequence, past + sequence): the lowest float32 for later tokens, else 0.
        lengths: The tokens of each item, less one, int32 (N,); in a fused model only.
        total: The tokens of the longest item, int32; in a fused model only.
    """

    cos: str
    sin: str
    mask: str = ""
    lengths: str = ""
    total: str = ""


def _speeds(sizes: Llama) -> Floats:
    """Return by how much each pair is rotated from one place to the next."""
    return np.asarray(10000.0 ** -(np.arange(0, sizes.depth, 2) / sizes.depth))


def _fused_places(graph: Graph, sizes: Llama) -> Places:
    """Append the lengths, from a mask of ones; the rotations of all places are constants."""
    mask, at = graph.input("attention_mask", TensorProto.INT64, ["N", "past + sequence"]), "/model/attn_mask"
    counts = graph.node("ReduceSum", mask, graph.constant([1], at=at), at=at, keepdims=0)
    lengths = graph.node("Sub", counts, graph.constant([1], at=at), at=at)
    lengths, total = (
        graph.node("Cast", value, at=at, to=TensorProto.INT32) for value in (lengths, _length(graph, mask, 1, at))
    )
    angles = np.outer(np.arange(sizes.positions), _speeds(sizes))
    names = [graph.parameter(f"{name}_cache", of(angles)) for name, of in (("cos", np.cos), ("sin", np.sin))]
    return Places(*names, lengths=lengths, total=total)


def _places(graph: Graph, tokens: str, past: str, sizes: Llama) -> Places:
    """Append the rotations and the mask; they are computed from the lengths of the inputs."""
    at = "/model"
    before = _length(graph, past, 2, at)
    total = graph.node("Add", before, _length(graph, tokens, 1, at), at=at)
    zero, one = graph.constant(0, at=at), graph.constant(1, at=at)
    new, every = (graph.node("Range", start, total, one, at=at) for start in (before, zero))
    hidden = graph.node("Greater", every, unsqueeze(graph, new, [1], at=at), at=at)
    mask = graph.node("Where", hidden, graph.constant(LOWEST, at=at), graph.constant(0.0, at=at), at=at)
    at = "/model/rotary_emb"
    positions = unsqueeze(graph, graph.node("Cast", new, at=at, to=TensorProto.FLOAT), [0, 1], at=at)
    speeds = graph.constant(_speeds(sizes).reshape(1, -1, 1), at=at)
    angles = graph.node("MatMul", speeds, positions, at=at)
    angles = graph.node("Transpose", angles, at=at, perm=[0, 2, 1])
    angles = graph.node("Concat", angles, angles, at=at, axis=-1)
    cos, sin = (unsqueeze(graph, graph.node(op, angles, at=at), [1], at=at) for op in ("Cos", "Sin"))
    return Places(cos, sin, mask)


def _llama_layer(
    graph: Graph, x: str, past: dict[str, str], places: Places, at: str, sizes: Llama
) -> tuple[str, dict[str, str]]:
    """Append attention and gated perceptron; each normalizes its input, and its result is added to the input."""
    y = _rms_norm(graph, x, f"{at}/input_layernorm", sizes)
    attention = _fused_attention if sizes.fused else _llama_attention
    y, present = attention(graph, y, past, places, f"{at}/self_attn", sizes)
    x = graph.node("Add", x, y, at=at)
    y = _rms_norm(graph, x, f"{at}/post_attention_layernorm", sizes)
    gate = token_linear(graph, y, f"{at}/mlp/gate_proj", sizes.width, sizes.inner, gain=RELU, bias=False)
    up = token_linear(graph, y, f"{at}/mlp/up_proj", sizes.width, sizes.inner, bias=False)
    y = graph.node("Mul", silu(graph, gate, f"{at}/mlp/act_fn"), up, at=f"{at}/mlp")
    y = token_linear(graph, y, f"{at}/mlp/down_proj", sizes.inner, sizes.width, gain=LLAMA_BRANCH, bias=False)
    return graph.node("Add", x, y, at=at), present


def _llama_attention(
    graph: Graph, x: str, past: dict[str, str], places: Places, at: str, sizes: Llama
) -> tuple[str, dict[str, str]]:
    """Append softmax(q k^T / sqrt(depth) + mask) v; q and k are rotated, k and v include the past tokens."""

    def split(part: str, heads: int) -> str:
        y = token_linear(graph, x, f"{at}/{part}_proj", sizes.width, heads * sizes.depth, bias=False)
        y = reshape(graph, y, [0, 0, heads, sizes.depth], at=at)
        return graph.node("Transpose", y, at=at, perm=[0, 2, 1, 3])

    query, new_key, new_value = (
        split(part, heads) for part, heads in zip("qkv", (sizes.heads, sizes.key_heads, sizes.key_heads), strict=True)
    )
    query, new_key = (_rotated(graph, y, places, at, sizes) for y in (query, new_key))
    present = {
        "key": graph.node("Concat", past["key"], new_key, at=at, axis=2),
        "value": graph.node("Concat", past["value"], new_value, at=at, axis=2),
    }
    key, value = (_repeated(graph, y, at, sizes) for y in present.values())
    scores = graph.node("MatMul", query, graph.node("Transpose", key, at=at, perm=[0, 1, 3, 2]), at=at)
    scores = graph.node("Mul", scores, graph.constant(sizes.depth**-0.5, at=at), at=at)
    weights = graph.node("Softmax", graph.node("Add", scores, places.mask, at=at), at=at, axis=-1)
    mixed = graph.node("Transpose", graph.node("MatMul", weights, value, at=at), at=at, perm=[0, 2, 1, 3])
    mixed = reshape(graph, mixed, [0, 0, sizes.width], at=at)
    result = token_linear(graph, mixed, f"{at}/o_proj", sizes.width, sizes.width, gain=LLAMA_BRANCH, bias=False)
    return result, present


def _fused_attention(
    graph: Graph, x: str, past: dict[str, str], places: Places, at: str, sizes: Llama
) -> tuple[str, dict[str, str]]:
    """Append the same attention as one operator, which rotates, and appends the new keys and values to the past."""
    projections = [
        token_linear(graph, x, f"{at}/{part}_proj", sizes.width, heads * sizes.depth, bias=False)
        for part, heads in zip("qkv", (sizes.heads, sizes.key_heads, sizes.key_heads), strict=True)
    ]
    mixed, *presents = graph.node_with_outputs(
        "GroupQueryAttention",
        *projections,
        *past.values(),
        places.lengths,
        places.total,
        places.cos,
        places.sin,
        at=at,
        outputs=3,
        domain="com.microsoft",
        num_heads=sizes.heads,
        kv_num_heads=sizes.key_heads,
        do_rotary=1,
    )
    result = token_linear(graph, mixed, f"{at}/o_proj", sizes.width, sizes.width, gain=LLAMA_BRANCH, bias=False)
    return result, dict(zip(past, presents, strict=True))


def _repeated(graph: Graph, x: str, at: str, sizes: Llama) -> str:
    """Append a copy of the keys or values of each head for all queries that share them, as exporters write it."""
    if sizes.key_heads == sizes.heads:
        return x
    times = graph.constant([1, 1, sizes.heads // sizes.key_heads, 1, 1], at=at)
    copies = graph.node("Expand", unsqueeze(graph, x, [2], at=at), times, at=at)
    return reshape(graph, copies, [0, sizes.heads, -1, sizes.depth], at=at)


def _rotated(graph: Graph, x: str, places: Places, at: str, sizes: Llama) -> str:
    """Append x cos + (-x2, x1) sin; x1 and x2 are the halves of the last axis (Su et al., 2021)."""
    half, last = sizes.depth // 2, graph.constant([-1], at=at)
    first, second = (
        graph.node("Slice", x, graph.constant([start], at=at), graph.constant([start + half], at=at), last, at=at)
        for start in (0, half)
    )
    turned = graph.node("Concat", graph.node("Neg", second, at=at), first, at=at, axis=-1)
    parts = (graph.node("Mul", x, places.cos, at=at), graph.node("Mul", turned, places.sin, at=at))
    return graph.node("Add", *parts, at=at)


def _rms_norm(graph: Graph, x: str, at: str, sizes: Llama) -> str:
    """Append x / sqrt(mean(x^2) + eps) * weight: seven nodes, as exporters write it, or one."""
    name = f"{path(at)}.weight"
    if sizes.fused:
        weight = graph.parameter(name, graph.around_one(name, sizes.width))
        return graph.node("SimplifiedLayerNormalization", x, weight, at=at, axis=-1, epsilon=LLAMA_EPS, stash_type=1)
    squares = graph.node("Pow", x, graph.constant(2.0, at=at), at=at)
    mean = reduce_mean(graph, squares, [-1], at=at)
    root = graph.node("Sqrt", graph.node("Add", mean, graph.constant(LLAMA_EPS, at=at), at=at), at=at)
    normed = graph.node("Mul", x, graph.node("Div", graph.constant(1.0, at=at), root, at=at), at=at)
    return graph.node("Mul", graph.parameter(name, graph.around_one(name, sizes.width)), normed, at=at)


TAGGER_VOCABULARY, TAGGER_EMBEDDING, TAGGER_HIDDEN, TAGGER_TAGS = 20000, 100, 200, 9


def lstm_tagger(graph: Graph, _size: int) -> None:
    """Write an embedding, a bidirectional LSTM and a linear layer.

    The input is `input_ids` (N, sequence), the output `tags` (N, sequence, 9). Embedding and state have the widths
    of Ma and Hovy (2016); CoNLL-2003 has 9 tags.
    """
    hidden, at = TAGGER_HIDDEN, "/lstm"
    tokens = graph.input("input_ids", TensorProto.INT64, ["N", "sequence"])
    x = _table(graph, "/embedding", TAGGER_VOCABULARY, TAGGER_EMBEDDING, tokens)
    batch = unsqueeze(graph, _length(graph, x, 0, at), [0], at=at)
    x = graph.node("Transpose", x, at=at, perm=[1, 0, 2])
    shape = graph.node("Concat", graph.constant([2], at=at), batch, graph.constant([hidden], at=at), at=at, axis=0)
    start = graph.node("ConstantOfShape", shape, at=at)
    shapes = {"W": (2, 4 * hidden, TAGGER_EMBEDDING), "R": (2, 4 * hidden, hidden), "B": (2, 8 * hidden)}
    stds = {"W": TAGGER_EMBEDDING**-0.5, "R": hidden**-0.5, "B": 0.1}
    weights = [graph.parameter(f"lstm.{key}", graph.normal(f"lstm.{key}", shapes[key], stds[key])) for key in shapes]
    outputs = graph.node_with_outputs(
        "LSTM", x, *weights, "", start, start, at=at, outputs=3, direction="bidirectional", hidden_size=hidden
    )
    x = graph.node("Transpose", outputs[0], at=at, perm=[0, 2, 1, 3])
    x = graph.node("Transpose", reshape(graph, x, [0, 0, -1], at=at), at=at, perm=[1, 0, 2])
    tags = token_linear(graph, x, "/tags", 2 * hidden, TAGGER_TAGS, gain=2.0)
    graph.output("tags", tags, TensorProto.FLOAT, ["N", "sequence", TAGGER_TAGS])
