"""Broken images, sounds, records, tokenizers and readers."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from .data_arrays import Args, odd


def _png(width: int, height: int, body: bytes, *, kind: int = 2, depth: int = 8) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def _image(form: str, size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (10, 200, 30)).save(buffer, form)
    return buffer.getvalue()


def _damaged(random: Random, data: bytes) -> bytes:
    """Cut, flip or replace bytes."""
    kind = random.randrange(4)
    if kind == 0:
        return data[: random.randrange(len(data))]
    if kind == 1:
        flipped = bytearray(data)
        for _ in range(random.choice((1, 3, 20))):
            flipped[random.randrange(len(data))] ^= 1 << random.randrange(8)
        return bytes(flipped)
    return random.choice((b"", random.randbytes(200), data + random.randbytes(100)))


PREPROCESS = (
    "scale=255", "resize=8 crop=8 scale=255", "resize=99999999999x99999999999", "resize=100000 crop=8", "scale=0",
    "scale=nan", "mean=1,2,3,4", "crop=-1", "x=1", "scale", "=", "resize=" + "9" * 5000, "fill=300 pad=8", "std=0 scale=255",
    "layout=abc", "pad=1000000", "\x1b[31m=1", "scale=255 scale=1", "order=rgba", "resize=8x8x8", "scale=1e400",
)  # fmt: skip


def images(random: Random, folder: Path) -> Args:
    """Write a folder of images, one of them broken or hostile, with any processing."""
    here = folder / "d"
    here.mkdir()
    (here / "0.png").write_bytes(_image("PNG"))
    kind, form = random.randrange(8), random.choice(("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"))
    name = f"1.{form.lower()}"
    if kind == 0:
        side = random.choice((60_000, 20_000, 13_000, 2**31 - 1))
        (here / "1.png").write_bytes(_png(side, side, bytes(1000)))
    elif kind == 1:
        (here / "1.png").write_bytes(_png(random.choice((0, 8)), 0, b""))
    elif kind in (2, 3):
        (here / name).write_bytes(_damaged(random, _image(form)))
    elif kind == 4:
        odd(random, here, "1.png")
    elif kind == 5:
        (here / "1.png").write_bytes(_image(random.choice(("JPEG", "GIF", "TIFF"))))
    elif kind == 6:  # many bytes in few: a long row of zeros
        (here / "1.png").write_bytes(_png(9000, 9000, bytes(9000 * 3 + 1) * 500))
    else:
        (here / "1.png").write_bytes(_image("PNG", random.choice(((1, 1), (1, 5000), (7, 7)))))
    return (
        "--data",
        "d",
        *(
            ("--preprocess", random.choice(PREPROCESS))
            if random.random() < 0.5
            else ("--preprocess", "resize=8x8 scale=255")
        ),
    )


def _wav(
    frames: bytes, *, kind: int = 1, channels: int = 1, rate: int = 16000, bits: int = 16, claim: int = -1
) -> bytes:
    size = len(frames) if claim < 0 else claim
    block = max(1, channels * bits // 8) & 0xFFFF
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * block & 0xFFFFFFFF, block, bits)
    return (
        b"RIFF"
        + struct.pack("<I", 36 + len(frames))
        + b"WAVEfmt \x10\0\0\0"
        + form
        + b"data"
        + struct.pack("<I", size)
        + frames
    )


def sounds(random: Random, folder: Path) -> Args:
    """Write a folder of sounds, one of them broken or hostile."""
    here, frames = folder / "d", bytes(range(256)) * 4
    here.mkdir()
    (here / "0.wav").write_bytes(_wav(frames))
    kind = random.randrange(9)
    settings = {
        0: {"claim": random.choice((2**32 - 1, 2**31, 0, 10))},
        1: {"channels": random.choice((0, 2, 65535))},
        2: {"rate": random.choice((0, 1, 2**32 - 1))},
        3: {"bits": random.choice((0, 4, 12, 24, 64, 65535))},
        4: {"kind": random.choice((0, 3, 6, 0xFFFE))},
    }.get(kind, {})
    data = _wav(frames, **settings)
    if kind == 5:
        data = _damaged(random, data)
    elif kind == 6:
        data = _wav(b"")
    (here / "1.wav").write_bytes(data)
    if kind == 7:
        odd(random, here, "2.wav")
    extra = (
        "rate=16000",
        "seconds=1e18",
        "seconds=1000000",
        "seconds=-1",
        "seconds=nan",
        "mono=true",
        "rate=0",
        "mono=maybe",
        "rate=16000 seconds=0.01",
    )
    return ("--data", "d", *(("--preprocess", random.choice(extra)) if random.random() < 0.5 else ()))


def labels(random: Random, folder: Path) -> Args:
    """Write images with a damaged table of labels."""
    here = folder / "d"
    here.mkdir()
    for i in range(3):
        (here / f"{i}.png").write_bytes(_image("PNG"))
    table = random.choice(
        (
            b"", b"file,label\n", b"file,label\n0.png,1\n0.png,2\n", b"0.png\n1.png\n", b"file,label\n0.png," + b"9" * 5000,
            b'file,label\n"0.png,1\n1.png', b"\xff\xfe\0f", b"file,label\n0.png,\x1b[31m\n", b"file,label\n../0.png,1\n",
            b"\0" * 100, b"file,label\n" + b"x" * 200_000 + b",1\n", b"a,b,c\n1,2\n", b"file;label\n0.png;1",
        )
    )  # fmt: skip
    (folder / "l.csv").write_bytes(table)
    if random.random() < 0.2:
        (folder / "l.csv").unlink()
        odd(random, folder, "l.csv")
    return ("--data", "d", "--preprocess", "resize=8x8 scale=255", "--labels", "l.csv")


TOKENIZER = "def encode(*texts):\n    return {'ids': [3, 1, 2]}\n"


def records(random: Random, folder: Path) -> Args:
    """Write .csv, .tsv and .jsonl files with damaged records."""
    (folder / "tok.py").write_text(TOKENIZER)
    lines: tuple[bytes, ...] = (
        b'{"text": "a"}\n' * 3,
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"text": ' + b"9" * 10_000 + b"}\n",
        b'{"text": NaN}\n',
        b'{"text": "a", "label": 1e999}\n{"text": "b", "label": 2}\n',
        b'{"text": "a", "label": ' + b"9" * 400 + b"}\n" * 2,
        b"\xff\xfe{}",
        b'{"text": "\\ud800"}\n',
        b'{"text": "a\0b"}\n\0\n',
        b'{"text": null}\n',
        b"null\n7\n[]\n",
        b'{"text": "a", "text": "b"}\n',
        b"\n\n\n",
        b"",
        b'{"text": "a"}\n{"other": 1}\n',
        b'{"text": "a"}{"text": "b"}\n',
        b'{"\x1b[31m": "a", "label": {}}\n',
    )
    tables: tuple[bytes, ...] = (
        b"text,label\na,1\nb,2\n",
        b"text,label\na\n",
        b"text\n",
        b"",
        b'text\n"never closed\n' * 2,
        b"text,text\na,b\n",
        b"text\n" + b"x" * 300_000 + b"\n",
        b"text\na\0b\n",
        b"\xff\xfe",
        b"text,label\na,\x1b[31m\nb,1\n",
        b"text,label\na," + b"9" * 5000 + b"\nb,1\n",
        b"a" * 10 + b",\n" * 1000,
        b",,,\n,,,\n",
        b"\xef\xbb\xbftext\na\n",
    )
    name = random.choice(("r.jsonl", "r.jsonl", "r.csv", "r.tsv"))
    data = random.choice(lines if name == "r.jsonl" else tables)
    (folder / name).write_bytes(_damaged(random, data) if data and random.random() < 0.3 else data)
    column = ("text", "other", "*", "\x1b", "text,label", "text label=label", "x" * 1000)
    extra = ("--preprocess", f"column={random.choice(column)}") if random.random() < 0.4 else ()
    return ("--data", name, *(("--tokenizer", "tok.py:encode") if random.random() < 0.9 else ()), *extra)


RAISES = (
    "raise ValueError('\\x1b[31m\\n::stop-commands::x')", "raise SystemExit(0)", "raise SystemExit('text')", "raise KeyboardInterrupt",
    "raise MemoryError", "raise RecursionError", "raise GeneratorExit", "raise StopIteration", "raise BaseException", "import os; os._exit(0)",
    "raise Exception('x' * 100000)", "raise type('\\u202eE', (Exception,), {'__str__': lambda s: 1 / 0})()", "f = lambda: f()\n    f()",
    "raise UnicodeDecodeError('utf-8', b'', 0, 1, 'x')", "raise ExceptionGroup('g', [ValueError(1)])", "raise BrokenPipeError",
    "import sys; sys.stderr.close(); raise ValueError", "raise OSError(28, 'No space left')", "import os; os.abort()",
)  # fmt: skip
RESULTS = (
    "None", "7", "'text'", "b'bytes'", "[]", "{}", "[None]", "[{}]", "[7]", "[{'x': None}]", "[{'x': object()}]", "[{'x': 'text'}]",
    "[{1: 2}]", "[{'x': [[1, 2], [3]]}]", "[({'x': 1}, 2, 3)]", "[[[[[]]]]]", "object()", "lambda: 1", "lambda: [1]", "type", "iter([])",
    "[{'x': np.zeros((1, 16), object)}]", "[{'x': np.zeros((1, 16))}]", "[{'\\x1b[31m': np.zeros((1, 16), np.float32)}]",
    "[{'x': np.full((1, 16), np.nan, np.float32)}]", "[{'x': np.zeros((10 ** 9, 16), np.float32)}] * 2", "range(10 ** 18)",
    "[{'x': np.zeros((1, 16), np.float32)}] * 3", "[(np.zeros((1, 16), np.float32), '\\x1b[31m')] * 3",
    "[{'x': np.zeros((1, 16), np.float32), 'more' * 9999: 1}]", "[{'x': type('A', (), {'__array__': lambda s, *a, **k: 1 / 0})()}]",
    "type('L', (), {'__len__': lambda s: -1, '__getitem__': lambda s, i: {}})()",
    "type('L', (), {'__len__': lambda s: 2 ** 70, '__getitem__': lambda s, i: {}})()",
    "type('L', (), {'__len__': lambda s: 3, '__getitem__': lambda s, i: 1 / 0})()",
    "type('I', (), {'__iter__': lambda s: s})()", "type('I', (), {'__iter__': lambda s: s, '__next__': lambda s: 1 / 0})()",
)  # fmt: skip


def reader(random: Random, folder: Path) -> Args:
    """Write a reader function that raises anything, at any moment."""
    what, when = random.choice(RAISES), random.randrange(4)
    good = "    yield {'x': np.zeros((1, 16), np.float32)}\n"
    body = {
        0: f"import numpy as np\ndef feeds():\n    {what}\n",
        1: f"import numpy as np\ndef feeds():\n{good * 2}    {what}\n",
        2: f"def _now():\n    {what}\n_now()\ndef feeds():\n    return []\n",
        3: f"import numpy as np\ndef feeds():\n    try:\n    {good}    finally:\n        g()\ndef g():\n    {what}\n",
    }[when]
    (folder / "reader.py").write_text(body)
    return ("--data", "reader.py:feeds")


def reader_result(random: Random, folder: Path) -> Args:
    """Write a reader that returns anything, or a file that is no Python."""
    text = f"import numpy as np\ndef feeds():\n    return {random.choice(RESULTS)}\n"
    if random.random() < 0.5:
        text = f"import numpy as np\nfeeds = {random.choice(RESULTS)}\n"
    if random.random() < 0.2:
        text = random.choice(
            (
                "def feeds(:\n",
                "\0",
                "\ufeff" * 3,
                "(" * 500,
                "x = " + "-" * 100_000 + "1",
                "import nowhere\n",
                "feeds = 1 / 0\n",
            )
        )
    (folder / "reader.py").write_text(text)
    return (
        "--data",
        random.choice(("reader.py:feeds",) * 6 + ("reader.py:other", "reader.py:", "reader:feeds", "reader.py:np.x")),
    )


def tokenizer(random: Random, folder: Path) -> Args:
    """Write tokenizers that raise or return anything."""
    (folder / "r.jsonl").write_text("".join(json.dumps({"text": f"line {i}", "label": i % 2}) + "\n" for i in range(4)))
    results = (
        "None", "7", "{}", "{'ids': None}", "{'ids': 'text'}", "{'ids': [[1], [2, 3]]}", "{'other': [1]}", "{'ids': [10 ** 30]}",
        "{'ids': [1.5]}", "{'ids': []}", "[1, 2]", "{'ids': [99999]}", "{'\\x1b[31m': [1]}", "{'ids': [-5]}", "{7: [1]}",
    )  # fmt: skip
    what = random.choice(RAISES) if random.random() < 0.4 else f"return {random.choice(results)}"
    text = f"def encode(*texts):\n    {what}\n"
    if random.random() < 0.15:
        text = random.choice(
            ("encode = 7\n", "def encode(: pass", "raise SystemExit(3)\n", "", "import os; os.kill(os.getpid(), 15)\n")
        )
    (folder / "tok.py").write_text(text)
    return (
        "--data",
        "r.jsonl",
        "--tokenizer",
        random.choice(("tok.py:encode",) * 5 + ("tok.py:other", "tok.py", "nowhere:encode")),
    )


def shape_lies(random: Random, folder: Path) -> Args:
    """Give samples whose lengths change, or are so large that the model's results fill the memory."""
    lengths = random.choice(([1, 2, 3], [1, 10**4], [10**6], [0, 1], [1, 0]))
    body = f"import numpy as np\ndef feeds():\n    for n in {lengths}:\n        yield {{'x': np.zeros((n, 16), np.float32)}}\n"
    (folder / "reader.py").write_text(body)
    return ("--data", "reader.py:feeds")


def token_values() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    return {"ids": np.array([[1, 2, 3]] * 4)}


MEDIA: dict[str, tuple[str, Callable[[Random, Path], Args]]] = {
    "images": ("conv", images),
    "sounds": ("sound", sounds),
    "labels": ("conv", labels),
    "records": ("tokens", records),
    "tokenizer": ("tokens", tokenizer),
    "reader-raises": ("mlp", reader),
    "reader-returns": ("mlp", reader_result),
    "reader-lengths": ("mlp", shape_lies),
}
"""The model that reads the data, and the writer."""
