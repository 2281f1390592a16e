"""Damage to the bytes of a model file."""

from __future__ import annotations

from pathlib import Path
from random import Random

import onnx
from google.protobuf.message import DecodeError

Model = onnx.ModelProto


def truncate(random: Random, model: Model, folder: Path) -> bytes:
    data: bytes = model.SerializeToString()
    return data[: random.randrange(len(data))]


def flip(random: Random, model: Model, folder: Path) -> bytes:
    """Change a few bits."""
    data = bytearray(model.SerializeToString())
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def flip_head(random: Random, model: Model, folder: Path) -> bytes:
    """Change bytes where the graph is described and not the weights."""
    for constant in model.graph.initializer:
        constant.ClearField("raw_data")
    return flip(random, model, folder)


def overwrite(random: Random, model: Model, folder: Path) -> bytes:
    """Replace a stretch by zeros, ones, noise or a stretch from elsewhere."""
    data = bytearray(model.SerializeToString())
    at, length = random.randrange(len(data)), random.choice((1, 4, 16, 256))
    other = random.randrange(len(data))
    new = random.choice(
        (bytes(length), b"\xff" * length, random.randbytes(length), bytes(data[other : other + length]))
    )
    data[at : at + length] = new
    return bytes(data)


def insert(random: Random, model: Model, folder: Path) -> bytes:
    data = bytearray(model.SerializeToString())
    at = random.randrange(len(data))
    data[at:at] = random.randbytes(random.choice((1, 3, 10, 100)))
    return bytes(data)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def splice(random: Random, model: Model, folder: Path) -> bytes:
    """Append fields that protobuf merges into the model: known numbers with any wire type."""
    data: bytes = model.SerializeToString()
    for _ in range(random.randint(1, 3)):
        number, wire = random.choice((1, 2, 3, 5, 7, 8, 14, 20, 25, 99)), random.choice((0, 1, 2, 2, 3, 4, 5))
        body = random.randbytes(random.choice((0, 1, 8, 40)))
        if wire == 2:
            body = _varint(random.choice((len(body), len(body), 2**31, 2**63))) + body
        data += _varint(number << 3 | wire) + body
    return data


def splice_graph(random: Random, model: Model, folder: Path) -> bytes:
    """Append a second graph field: protobuf merges both, so that everything is there twice."""
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    for field in random.sample(("node", "initializer", "input", "output", "name"), 2):
        graph.ClearField(field)
    inner = graph.SerializeToString()
    return bytes(model.SerializeToString() + _varint(7 << 3 | 2) + _varint(len(inner)) + inner)


def not_utf8(random: Random, model: Model, folder: Path) -> bytes:
    """Put bytes that are no UTF-8 where a name was. Protobuf keeps the length."""
    mark = "QQQQ"
    named = [*model.graph.node, *model.graph.initializer, *model.graph.input, *model.graph.output]
    chosen = random.choice(named)
    if chosen.name:
        old, chosen.name = chosen.name, mark
        for node in model.graph.node:
            node.input[:] = [mark if name == old else name for name in node.input]
            node.output[:] = [mark if name == old else name for name in node.output]
    else:
        model.graph.name = mark
    if random.random() < 0.3:
        model.producer_name = model.doc_string = mark
    new = random.choice((b"\xff\xfe\x80A", b"\xc3(\xa0\xa1", b"\xed\xa0\x80A", b"\x9b31m"))
    return bytes(model.SerializeToString()).replace(mark.encode(), new)


def foreign(random: Random, model: Model, folder: Path) -> bytes:
    """Write something else than a model."""
    return random.choice(
        (
            b"",
            b"\n",
            bytes(100),
            random.randbytes(1000),
            b"<html><body>404 Not Found</body></html>\n",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1\n",
            b"PK\x03\x04" + random.randbytes(50),
            b"\x89HDF\r\n\x1a\n" + random.randbytes(50),
            b"ORTM" + random.randbytes(100),
            model.graph.SerializeToString(),
            b"{" * 5000,
        )
    )


def deep(random: Random, model: Model, folder: Path) -> bytes:
    """Nest messages deeper than protobuf reads."""
    inner = b""
    for _ in range(random.choice((20, 60, 150, 2000))):
        # a graph (field 6) in an attribute (field 5) of a node (field 1)
        for number in (6, 5, 1):
            inner = _varint(number << 3 | 2) + _varint(len(inner)) + inner
    return bytes(model.SerializeToString() + _varint(7 << 3 | 2) + _varint(len(inner)) + inner)


def recombine(random: Random, model: Model, folder: Path) -> bytes:
    """Cut the file into parts and put them together in another order."""
    data: bytes = model.SerializeToString()
    cuts = sorted(random.sample(range(len(data)), 3))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    random.shuffle(parts)
    return b"".join(parts)


def flip_parsed(random: Random, model: Model, folder: Path) -> bytes:
    """Change bits until protobuf still reads the file: the damage reaches the code behind the parser."""
    data = flip_head(random, model, folder)
    for _ in range(50):
        try:
            found = Model.FromString(data)
        except DecodeError:
            data = flip(random, model, folder)
        else:
            return data if len(found.graph.node) else flip(random, model, folder)
    return data


MUTATIONS = {
    "bytes-truncated": truncate,
    "bytes-flipped": flip,
    "bytes-flipped-head": flip_head,
    "bytes-flipped-parsed": flip_parsed,
    "bytes-overwritten": overwrite,
    "bytes-inserted": insert,
    "bytes-shuffled": recombine,
    "fields-spliced": splice,
    "graph-merged-twice": splice_graph,
    "names-not-utf8": not_utf8,
    "not-a-model": foreign,
    "messages-deep": deep,
}
