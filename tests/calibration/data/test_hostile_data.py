"""Data that somebody made to break the reader: each is refused in one line, soon, and within little memory."""

from __future__ import annotations

import io
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import wave
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from requant import RequantError
from requant.calibration import DataError, DataSpec, InputSpec, Sample, open_source
from requant.quantize.accuracy.metrics import metric_named

F4, I8 = np.dtype("float32"), np.dtype("int64")
X = InputSpec("x", F4, ("N", 3))
PICTURE = InputSpec("x", F4, ("N", 3, 8, 8))
SOUND = InputSpec("x", F4, ("N", "T"))
IDS = InputSpec("ids", I8, ("N", "T"))
ROOM = 600 * 2**20
"""Bytes of memory above those of the libraries that reading hostile data may take."""


def npy(
    shape: object = (4, 3), descr: object = "<f4", body: bytes = bytes(48), *, length: int | None = None, **fields: Any
) -> bytes:
    header = fields.get(
        "header", f"{{'descr': {descr!r}, 'fortran_order': {fields.get('fortran', False)}, 'shape': {shape!r}}}"
    )
    text = bytes(header.encode() + b"\n")
    version, form = fields.get("version", (1, 0)), "<I" if fields.get("version") == (2, 0) else "<H"
    return b"\x93NUMPY" + bytes(version) + struct.pack(form, len(text) if length is None else length) + text + body


def archive(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as out:
        for name, content in members:
            out.writestr(name, content)
    return stream.getvalue()


def changed(data: bytes, field: int, value: bytes) -> bytes:
    """Change a field of the first entry of the archive's directory."""
    at = data.index(b"PK\x01\x02") + field
    return data[:at] + value + data[at + len(value) :]


def refusal(source: Any, *inputs: InputSpec) -> str:
    """Read everything; return the message of the refusal."""
    with pytest.raises(RequantError) as caught:
        list(open_source(source, inputs or [X]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


HEADERS = {
    "more than is there": (npy((10**12, 3)), "the array ends early"),
    "product beyond 64 bits": (npy((2**62, 2**62)), "the array ends early"),
    "negative": (npy((-4, -3)), "its header is wrong"),
    "no size": (npy((10**12, 3), "|S0"), "its header is wrong"),
    "Fortran": (npy((10**12, 3), fortran=True), "the array ends early"),
    "objects": (npy(descr="|O"), "contains pickled objects, which are never read"),
    "a long header": (npy(version=(2, 0), length=2**31), "its header has 2147483648 bytes"),
    "deep": (npy(header="(" * 5000), "cannot be parsed"),
    "signs": (npy(header="-" * 9000 + "1"), "cannot be parsed"),
    "an open text": (npy(header="{'descr': '''"), "cannot be parsed"),
    "version 3": (npy(version=(3, 0)), r"version \(3, 0\) .* is not supported"),
    "structured": (npy(descr=[("a", "<f4")]), "expected float32|version"),
    "short": (npy(body=bytes(20)), "the array ends early"),
    "another format": (b"PK\x03\x04" + bytes(100), "no array of the .npy format"),
    "empty": (b"", "no array of the .npy format"),
}


@pytest.mark.parametrize("kind", HEADERS)
@pytest.mark.parametrize("form", ["npz", "labels", "npy-folder", "npz-folder"])
def test_headers(tmp_path: Path, kind: str, form: str) -> None:
    content, problem = HEADERS[kind]
    good = ("x.npy", npy())
    files = {
        "npz": ("d.npz", archive(("x.npy", content))),
        "labels": ("d.npz", archive(good, ("labels.npy", content))),
        "npy-folder": ("a.npy", content),
        "npz-folder": ("a.npz", archive(("x.npy", content))),
    }
    name, data = files[form]
    (tmp_path / name).write_bytes(data)
    message = refusal(tmp_path if "folder" in form else tmp_path / name)
    assert str(tmp_path / name) in message
    if (kind, form) != ("structured", "labels"):
        assert re.search(problem, message), message


GOOD = archive(("x.npy", npy()))
ARCHIVES = {
    "encrypted": (changed(GOOD, 8, b"\x01"), "encrypted"),
    "a size that cannot be": (changed(GOOD, 24, b"\xf0\xff\xff\xff"), "cannot come from the bytes that are there"),
    "more compressed than there is": (changed(GOOD, 20, b"\xf0\xff\xff\xff"), "cannot come from"),
    "an offset behind the end": (changed(GOOD, 42, b"\xf0\xff\xff\xff"), "cannot"),
    "an unknown method": (changed(GOOD, 10, b"\x63"), "method 99"),
    "a method without a limit": (archive(("x.npy", npy()), method=zipfile.ZIP_BZIP2), "compressed by method 12"),
    "two of a name": (archive(("x.npy", npy()), ("x", npy())), "two arrays are named 'x'"),
    "a path": (archive(("../x", npy())), "no array named|no input named"),
    "an array": (npy(), "not a readable .npz file"),
    "an end alone": (GOOD[-22:], "cannot|not a readable"),
}


@pytest.mark.parametrize("kind", ARCHIVES)
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_archives(tmp_path: Path, kind: str, folder: bool) -> None:
    data, problem = ARCHIVES[kind]
    (tmp_path / "d.npz").write_bytes(data)
    with pytest.raises(DataError, match=problem):
        list(open_source(tmp_path if folder else tmp_path / "d.npz", [X]))


def test_an_array_named_npy_that_is_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(GOOD)
    assert "no array of the .npy format" in refusal(tmp_path)


def test_the_memory_limit_holds_for_a_sample(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 1000), np.float32))
    source = DataSpec(str(tmp_path / "d.npz"), memory_limit=3999)
    assert "needs 4000 bytes at once; the limit is 3999 bytes" in refusal(source, SOUND)
    assert len(list(open_source(str(tmp_path / "d.npz"), [SOUND], memory_limit=4000))) == 2


@pytest.mark.slow
def test_many_samples_of_zeros_are_a_trap_but_not_beside_others(tmp_path: Path) -> None:
    """The whole array is checked: its samples are small, and would be read for hours."""
    deflated(tmp_path / "d.npz", npy((2**27, 3), "|u1", b""), 3 * 2**27)
    assert "more than 100 to 1" in refusal(tmp_path / "d.npz", InputSpec("x", np.dtype(np.uint8), ("N", 3)))
    noise = np.random.default_rng(0).standard_normal((4096, 512)).astype(np.float32)
    mask = np.ones((4096, 2048), np.int64)
    np.savez_compressed(tmp_path / "e.npz", x=noise, mask=mask)
    assert open_source(tmp_path / "e.npz", [SOUND, InputSpec("mask", I8, ("N", "T"))]).length == 4096


# ---------------------------------------------------------------------------------------------------- special files


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    with socket.socket(socket.AF_UNIX) as end:
        os.chdir(path.parent)  # the path of a socket is short
        end.bind(path.name)
        os.chdir(here)


SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (fifo, "is a FIFO"),
    "socket": (unix_socket, "is a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "dangling": (lambda path: path.symlink_to("nothing"), "a link to a file that is not there"),
    "loop": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".png", ".wav", ".csv", ".jsonl", ".py", "0.pb"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str, suffix: str) -> None:
    make, problem = SPECIAL[kind]
    path = tmp_path / f"input_{suffix}"
    make(path)
    spec = DataSpec(str(tmp_path), preprocess="scale=255" if suffix == ".png" else None)
    if suffix in (".csv", ".jsonl"):
        spec = DataSpec(str(path), tokenizer=dict)
    if suffix == ".py":
        spec = DataSpec(f"{path}:feeds")
    message = refusal(spec, PICTURE if suffix == ".png" else X)
    assert str(path) in message
    assert problem in message


def test_a_table_of_labels_that_is_a_fifo(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "d" / "a.png")
    os.mkfifo(tmp_path / "l.csv")
    spec = DataSpec(str(tmp_path / "d"), preprocess="scale=255", labels=str(tmp_path / "l.csv"))
    assert "l.csv: is a FIFO" in refusal(spec, PICTURE)


@pytest.mark.parametrize("how", ["gone", "shorter", "other"])
@pytest.mark.parametrize("name", ["d.npz", "d.jsonl"])
def test_a_file_that_changes_between_two_passes(tmp_path: Path, how: str, name: str) -> None:
    path = tmp_path / name
    lines = b'{"text": "a"}\n' * 4
    content = archive(("x.npy", npy()), method=zipfile.ZIP_STORED) if name == "d.npz" else lines
    path.write_bytes(content)
    source = open_source(DataSpec(str(path), tokenizer=None if name == "d.npz" else lambda _: {"x": [1.0] * 3}), [X])
    assert len(list(source)) == 4
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:20] if how == "shorter" else content + content)
    for picked in (range(4), [3]):
        with pytest.raises(RequantError, match="no such file" if how == "gone" else "has changed|not a readable"):
            list(source.read(picked))


# ---------------------------------------------------------------------------------------------------- media and texts


def png(width: int, height: int, rows: bytes = b"", *, depth: int = 8, colour: int = 0) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "preprocess", "problem"),
    [
        (png(10**6, 10**6), "scale=255", "exceeds limit"),
        (png(10**4, 10**4), "scale=255", "exceeds limit"),
        (png(2**22, 1, zlib.compress(bytes(2**22 + 1))), "resize=256 crop=8 scale=255", "would be scaled to 256x"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", "scale=255", "cannot identify"),
        (b"P6\n99999999999999999999 1\n255\n", "scale=255", "cannot be read as an image"),
    ],
    ids=["pixels", "warned-pixels", "one-row", "a-program", "digits"],
)
def test_images(tmp_path: Path, content: bytes, preprocess: str, problem: str) -> None:
    (tmp_path / "a.png").write_bytes(content)
    message = refusal(DataSpec(str(tmp_path), preprocess=preprocess), PICTURE)
    assert str(tmp_path / "a.png") in message
    assert problem in message


@pytest.mark.parametrize("setting", ["resize=1000000000", "pad=9999999x9999999", f"crop={'9' * 5000}", "resize=0", "std=nan scale=255"])  # fmt: skip
def test_sizes_of_settings_are_refused_before_an_image_is_read(tmp_path: Path, setting: str) -> None:
    (tmp_path / "a.png").write_bytes(b"not read")
    assert "preprocess: " in refusal(
        DataSpec(str(tmp_path), preprocess=setting), InputSpec("x", F4, ("N", 3, "H", "W"))
    )


def wav(**fields: int) -> bytes:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes(bytes(200))
    data = bytearray(stream.getvalue())
    places = {"channels": (22, "<H"), "rate": (24, "<I"), "bits": (34, "<H"), "size": (40, "<I"), "riff": (4, "<I")}
    for name, value in fields.items():
        struct.pack_into(places[name][1], data, places[name][0], value)
    return bytes(data)


@pytest.mark.parametrize(
    ("fields", "preprocess", "problem"),
    [
        ({"channels": 0}, None, "not a readable .wav file"),
        ({"rate": 0}, "seconds=1", "0 samples per second"),
        ({"bits": 0}, None, "not a readable .wav file"),
        ({"bits": 40}, None, "40 bits"),
        ({"size": 2**32 - 1, "riff": 2**32 - 1}, None, "is truncated: 100 samples of 2147483647"),
        ({}, "seconds=1e300", "needs more memory than"),
    ],
    ids=["channels", "rate", "no-bits", "bits", "size", "seconds"],
)
def test_sounds(tmp_path: Path, fields: dict[str, int], preprocess: str | None, problem: str) -> None:
    (tmp_path / "a.wav").write_bytes(wav(**fields))
    assert problem in refusal(DataSpec(str(tmp_path), preprocess=preprocess), SOUND)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("d.jsonl", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
        ("d.jsonl", b'{"text": "' + b"a" * 2**23 + b'"}', "line 1: the record has more than 8388608 bytes"),
        (
            "d.csv",
            b"text,b\n" + (b'"' + b"a" * 1000 + b'\n",') * 2**14,
            "line 2: the record has more than 8388608 bytes",
        ),
        ("d.jsonl", b'{"text": "a", "label": ' + b"9" * 4000 + b"}", "label: an array of Python objects"),
        ("d.csv", b"text,label\na," + b"9" * 5000 + b"\nb,1\n", None),
    ],
    ids=["deep", "long", "many-lines", "big-label", "digits"],
)
def test_texts(tmp_path: Path, name: str, content: bytes, problem: str | None) -> None:
    (tmp_path / name).write_bytes(content)
    spec = DataSpec(str(tmp_path / name), tokenizer=lambda _: {"ids": [1]})
    if problem is None:  # a name of digits, not a number of 5000 digits
        assert [sample.label for sample in open_source(spec, [IDS])] == [1, 0]
    else:
        assert problem in refusal(spec, IDS)


@pytest.mark.parametrize("dims", [[-1, 3], [10**9, 3], [2**62, 4]], ids=str)
def test_tensors_whose_shape_is_not_that_of_the_values(tmp_path: Path, dims: list[int]) -> None:
    tensor = onnx.TensorProto(name="x", data_type=1, dims=dims, raw_data=bytes(12))
    (tmp_path / "input_0.pb").write_bytes(tensor.SerializeToString())
    assert "cannot be read as a TensorProto" in refusal(tmp_path)


@pytest.mark.parametrize("code", [0x110005, 0xD800], ids=hex)
def test_texts_that_are_not_unicode(code: int) -> None:
    text = np.frombuffer(struct.pack("=I", code), "U1")
    assert "holds text that is not Unicode" in refusal([{"x": text}], InputSpec("x", np.dtype("U"), ("N",)))


def test_a_truth_value_is_zero_or_one() -> None:
    """Code that the runtime compiled for bytes of 0 and 1 does not meet others."""
    (sample,) = open_source([{"x": np.frombuffer(b"\x02\x00", "?")}], [InputSpec("x", np.dtype(bool), ("N",))])
    assert sample.feed["x"].tobytes() == b"\x01\x00"


# ---------------------------------------------------------------------------------------------------- readers


class Failing:
    """An object whose every use raises an error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def fail(self, *_: object, **__: object) -> Any:
        raise self.error

    __array__ = __len__ = __iter__ = __getitem__ = __call__ = fail


class Row(dict[str, Any]):
    """A dict that cannot be read."""

    def keys(self) -> Any:
        raise GeneratorExit

    __iter__ = keys


class UnprintableError(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError


ERRORS = (
    ValueError("two\nlines"),
    RecursionError(),
    MemoryError(),
    SystemExit(3),
    StopIteration(),
    GeneratorExit(),
    OSError(5, "io"),
    BaseException("base"),
    UnprintableError(),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_reader_raises_is_a_refusal(error: BaseException) -> None:
    def feeds() -> Iterator[object]:
        yield {"x": np.zeros((1, 3), np.float32)}
        raise error

    class Attributes:
        def __getattr__(self, name: str) -> Any:
            raise error

        def __iter__(self) -> Iterator[object]:
            return iter([self])

    sources = (feeds, Failing(error), Attributes(), [{"x": Failing(error)}], [({"x": [[1.0] * 3]}, Failing(error))], [Row()])  # fmt: skip
    for source in sources:
        refusal(source)


def test_an_error_in_the_cleanup_of_a_reader_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def feeds() -> Iterator[object]:
        try:
            yield {"x": np.zeros((1, 3), np.float32)}
            yield {"x": np.zeros((1, 3), np.float32)}
        finally:
            raise ValueError

    source = open_source(feeds, [X])
    assert len(list(source.samples(1))) == 1
    assert next(iter(source))
    assert not capfd.readouterr().err


def test_ctrl_c_in_a_reader_ends_the_run() -> None:
    with pytest.raises(KeyboardInterrupt):
        list(open_source([{"x": Failing(KeyboardInterrupt())}], [X]))


@pytest.mark.parametrize("n", [10**30, 2**63])
def test_absurd_numbers_of_samples(n: int) -> None:
    def feeds() -> Iterator[object]:
        yield {"x": [[1.0] * 3]}

    for source in (open_source(feeds, [X]).samples(n), open_source([{"x": [[1.0] * 3]}], [X]).stretches(n)):
        assert len(list(source)) == 1
        assert source.description


def test_more_samples_than_memory_can_list() -> None:
    class Many:
        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, index: int) -> object:
            return {"x": np.zeros(3, np.float32)}

    many: Any = Many()
    source = open_source(many, [X])
    assert source.samples(10).length == 10
    for n in (None, 10**11):
        with pytest.raises(RequantError, match="at most 16777216"):
            source.stretches(n)


LABELS = (
    -1,
    2**62,
    np.inf,
    np.nan,
    np.uint64(2**63),
    True,
    np.zeros((1, 0)),
    np.zeros((1, 5, 6)),
    np.full((1, 5), 2**40),
)
OUTPUTS = (np.zeros((1, 5), np.float32), np.zeros((1, 0), np.float32), np.full((1, 5), np.inf), np.zeros((1, 5), np.int64), np.float32(3))  # fmt: skip


@pytest.mark.parametrize("name", ["top1", "psnr", "perplexity", "miou", "f1", "recall@5", "map", "wer", "sisdr", "mse"])
def test_labels_and_outputs_of_any_kind(name: str) -> None:
    """A metric takes them or refuses them; classes beyond all maps would need a table of their number."""
    metric = metric_named(name)
    for label in LABELS:
        for output in OUTPUTS:
            sample = Sample({"x": np.zeros((1, 3), np.float32)}, np.atleast_1d(label), "d, sample 0")
            with suppress(RequantError):
                metric.contributions({"y": np.asarray(output)}, sample, {})


# ---------------------------------------------------------------------------------------------------- memory


def deflated(path: Path, header: bytes, size: int) -> None:
    """Write an array of zeros that is small in the file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out, out.open("x.npy", "w", force_zip64=True) as stream:  # fmt: skip
        stream.write(header)
        for _ in range(size // 2**24):
            stream.write(bytes(2**24))


def bombs(folder: Path) -> list[str]:
    """Write files that are small and claim or hold much; return the data sources."""
    (folder / "claim.npz").write_bytes(archive(("x.npy", npy((10**12, 1, 8, 8)))))
    deflated(folder / "sample.npz", npy((1, 3 * 2**26), body=b""), 3 * 2**28)
    (folder / "grey").mkdir()
    (folder / "grey" / "a.png").write_bytes(png(9000, 9000, zlib.compress(bytes(9000 * 18001), 1), depth=16))
    (folder / "cells.csv").write_bytes(b"text\n" + b"," * (2**23 - 100))
    (folder / "objects.jsonl").write_bytes(b'{"text": "a", "b": [' + b"{}," * 2_700_000 + b"1]}")
    return ["claim.npz", "sample.npz", "grey", "cells.csv", "objects.jsonl"]


@pytest.mark.slow
def test_bombs_need_little_memory(tmp_path: Path) -> None:
    """A child process reads the files; its peak of resident memory tells what they took."""
    (tmp_path / "job.py").write_text(
        "import resource, sys\n"
        "import numpy as np, PIL.Image\n"
        "from requant import RequantError\n"
        "from requant.calibration import DataSpec, InputSpec, open_source\n"
        "def tokens(text): return {'x': [1.0]}\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for name in sys.argv[1:]:\n"
        "    shape = ('N', 3, 8, 8) if '.' not in name else ('N', 1, 8, 8) if 'claim' in name else ('N', 'T')\n"
        "    spec = DataSpec(name, tokenizer=tokens if name.endswith(('csv', 'jsonl')) else None,\n"
        "                    preprocess='resize=8x8 scale=255' if '.' not in name else None)\n"
        "    try:\n"
        "        for sample in open_source(spec, [InputSpec('x', np.dtype('float32'), shape)]): pass\n"
        "    except RequantError as error: print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "job.py", *bombs(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30,) * 2),
    )
    *messages, peak = done.stdout.splitlines()
    assert [message.split(":")[0].split(",")[0] for message in messages[:2]] == ["claim.npz", "sample.npz"]
    assert int(peak) < ROOM, messages


def test_an_error_of_the_users_code_is_printable() -> None:
    """A notebook shows the text of an exception as it is."""

    def feeds() -> Iterator[dict[str, np.ndarray]]:
        raise ValueError("boom\x1b[31m\nline two")
        yield {}

    with pytest.raises(DataError) as error:
        list(open_source(feeds, [InputSpec("x", np.dtype(np.float32), (None, 3))]))
    assert "boom" in str(error.value)
    assert str(error.value).isprintable()
