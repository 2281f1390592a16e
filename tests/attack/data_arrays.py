"""Broken arrays: .npz and .npy files, folders of them, and ONNX test data."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from .bases import feeds, texts
from .judge import SECRET

Args = tuple[str, ...]


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def header(text: str, payload: bytes = bytes(64), version: tuple[int, int] = (1, 0)) -> bytes:
    """Return an .npy file with any text as its header."""
    data = text.encode("latin1", errors="replace")
    size = struct.pack("<H" if version == (1, 0) else "<I", len(data) & (0xFFFF if version == (1, 0) else 0xFFFFFFFF))
    return b"\x93NUMPY" + bytes(version) + size + data + payload


def _valid() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **feeds("mlp"))
    return buffer.getvalue()


def _zip(folder: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Args:
    with zipfile.ZipFile(folder / "d.npz", "w", kind) as file:
        for name, data in members.items():
            file.writestr(zipfile.ZipInfo(name or "x"), data, kind)  # without the time of day
    return ("--data", "d.npz")


SHAPES = (
    "(1000000000000, 16)", "(1000000000, 16)", "(200000000, 16)", "(-1, 16)", "(4611686018427387904, 16)",
    "(99999999999999999999999, 16)", "(16,)", "()", "(6, 16, 1, 1, 1)", "(0, 16)", "(6, 0)", "(1.5, 16)", "(True, 16)",
    "(6, 16, " + "1, " * 70 + ")", "16", "None", "[6, 16]", "('6', 16)", "(1e3, 16)",
)  # fmt: skip
TYPES = (
    "'<f4'", "'|O'", "'<U5'", "'>f4'", "'<f8'", "'<c8'", "'|V16'", "'|S4'", "'<M8[s]'", "'nonsense'", "''", "3",
    "[('a', '<f4')]", "'<f99'", "'<U1000000000'", "'|b1'", "'<f2'", "'<f16'",
)  # fmt: skip


def npy_header(random: Random, folder: Path) -> Args:
    """Write an .npz file whose header claims any shape, type and order."""
    shape = random.choice(SHAPES) if random.random() < 0.7 else "(6, 16)"
    kind = random.choice(TYPES) if random.random() < 0.6 else "'<f4'"
    text = f"{{'descr': {kind}, 'fortran_order': {random.choice(('False', 'True', 'None', '7'))}, 'shape': {shape}, }}"
    if random.random() < 0.2:
        text = random.choice(
            (
                "",
                "{",
                "{}",
                "[]",
                "None",
                "(" * 3000,
                "{'descr': '<f4'}",
                "__import__('os')",
                text + ", 'x': 1}",
                "\0" * 40,
            )
        )
    version = random.choice(((1, 0), (1, 0), (2, 0), (3, 0), (9, 9)))
    member = header(text + "\n", random.choice((bytes(6 * 16 * 4), b"", bytes(17))), version)
    if random.random() < 0.3:
        (folder / "d").mkdir()
        (folder / "d" / "0.npy").write_bytes(member)
        return ("--data", "d")
    return _zip(folder, {"x.npy": member}, random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))


def pickled(random: Random, folder: Path) -> Args:
    """Write pickles: they must not be read."""
    array = np.array([{"a": 1}, [SECRET]], dtype=object)
    if random.random() < 0.5:
        return _zip(folder, {"x.npy": npy(array)})
    (folder / "d.npz").write_bytes(random.choice((b"\x80\x04]\x94.", b"cos\nsystem\n(S'touch owned'\ntR.")))
    return ("--data", "d.npz")


def damaged_zip(random: Random, folder: Path) -> Args:
    """Damage the bytes of a valid .npz file."""
    data = bytearray(_valid())
    kind = random.randrange(6)
    if kind == 0:
        data = data[: random.randrange(len(data))]
    elif kind == 1:
        for _ in range(random.choice((1, 4, 40))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == 2:
        data[-22:] = random.randbytes(22)
    elif kind == 3:
        data = data[random.randrange(40) :]
    elif kind == 4:
        data += random.randbytes(1000)
    else:  # the directory at the end
        at = data.rindex(b"PK\x01\x02")
        for _ in range(3):
            data[random.randrange(at, len(data))] = random.randrange(256)
    (folder / "d.npz").write_bytes(data)
    return ("--data", "d.npz")


def encrypted(random: Random, folder: Path) -> Args:
    """Set the flag of encryption, or a compression that is unknown."""
    data = bytearray(_valid())
    for mark, flag, method in ((b"PK\x03\x04", 6, 8), (b"PK\x01\x02", 8, 10)):
        at = data.index(mark)
        if random.random() < 0.7:
            data[at + flag] |= 1
        else:
            data[at + method : at + method + 2] = struct.pack("<H", random.choice((1, 6, 9, 12, 14, 93, 97, 99)))
    (folder / "d.npz").write_bytes(data)
    return ("--data", "d.npz")


def bomb(random: Random, folder: Path) -> Args:
    """Compress gigabytes of zeros behind the array, or into an array of a wrong shape; or claim them."""
    size = random.choice((100, 200, 400)) * 2**20
    shape = random.choice(("(6, 16)", f"(6, {size // 24})", f"({size // 4},)", f"({size // 128}, 2, 16)"))
    head = header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n", b"")
    if random.random() < 0.3:
        data = _raw_zip(b"x.npy", head + bytes(100), 0, random.choice((size, 2**32 - 2)), 0)
    else:
        packer, zeros, crc = zlib.compressobj(1, zlib.DEFLATED, -15), bytes(2**20), zlib.crc32(head)
        packed = bytearray(packer.compress(head))
        for _ in range(size // 2**20):
            packed += packer.compress(zeros)
            crc = zlib.crc32(zeros, crc)
        packed += packer.flush()
        data = _raw_zip(random.choice((b"x.npy", b"x.npy", b"more.npy")), bytes(packed), crc, size + len(head), 8)
    (folder / "d.npz").write_bytes(data)
    return ("--data", "d.npz")


def _raw_zip(name: bytes, packed: bytes, crc: int, size: int, method: int) -> bytes:
    """Return a zip file with one member, whose sizes may be lies."""
    common = struct.pack("<HHHHHLLLHH", 20, 0, method, 0, 33, crc, len(packed), size, len(name), 0)
    local = b"PK\x03\x04" + common + name + packed
    central = b"PK\x01\x02" + struct.pack("<H", 20) + common + struct.pack("<HHHLL", 0, 0, 0, 0, 0) + name
    end = b"PK\x05\x06" + struct.pack("<HHHHLLH", 0, 0, 1, 1, len(central), len(local), 0)
    return local + central + end


def members(random: Random, folder: Path) -> Args:
    """Write members that do not belong there: other names, twice, folders, links, none."""
    x = npy(feeds("mlp")["x"])
    names = (
        "y.npy",
        "x",
        "../x.npy",
        "/x.npy",
        "a/x.npy",
        "\x1b[31m.npy",
        "x" * 60_000,
        "\u202e.npy",
        "",
        "labels.npy",
    )
    kind = random.randrange(6)
    if kind == 0:
        return _zip(folder, {})
    if kind == 1:
        return _zip(folder, {"x.npy": b"", random.choice(names): x})
    if kind == 2:
        return _zip(folder, {"x.npy": x, random.choice(names): random.choice((x, b"", npy(np.zeros(3))))})
    if kind == 3:
        return _zip(folder, {f"m{i}/x.npy": x for i in range(random.choice((2, 2000)))})
    if kind == 4:
        (folder / "d.npz").write_bytes(x)
        return ("--data", "d.npz")
    _zip(folder, {random.choice(names): x})
    return (
        "--data",
        random.choice(("d.npz", "d.npz:", "d.npz:a", "d.npz:\x1b[31m", "d.npz:a:b", "d.npz:" + "x" * 900)),
    )


def values(random: Random, folder: Path) -> Args:
    """Write arrays of wrong types, shapes and values, with labels that do not fit."""
    x: Any = feeds("mlp")["x"]
    kind = random.randrange(12)
    if kind == 0:
        x[random.randrange(6), random.randrange(16)] = random.choice((np.nan, np.inf, -np.inf, 3.4e38))
    elif kind == 1:
        x = x.astype(random.choice((np.int8, np.float64, np.complex64, np.bool_, np.uint64, np.float16)))
    elif kind == 2:
        x = x.reshape(random.choice(((96,), (16, 6), (6, 4, 4), (6, 1, 16), (1, 6, 16), (6, 2, 8), (3, 32))))
    elif kind == 3:
        x = x[:0]
    elif kind == 4:
        x = np.array(["a"] * 6)
    elif kind == 5:
        x = x[0, 0]
    elif kind == 6:
        x = np.zeros((6, 16), np.float32)
    elif kind == 7:
        x = np.asfortranarray(x)
    extra: dict[str, Any] = {}
    if kind > 7:
        labels = (
            np.zeros(5),
            np.full(6, np.nan),
            np.array(["\x1b[31m"] * 6),
            np.full(6, 2**62),
            np.zeros((6, 2, 2)),
            -np.ones(6, np.int64),
        )
        extra = {random.choice(("labels", "labels", "sequence", "more")): random.choice(labels)}
    np.savez(folder / "d.npz", x=x, **extra)
    return ("--data", "d.npz")


def folder_of_arrays(random: Random, folder: Path) -> Args:
    """Write a folder with files that cannot be read beside files that can."""
    here = folder / "d"
    here.mkdir()
    (here / "0.npz").write_bytes(_valid())
    odd(random, here, random.choice(("1.npz", "1.npz", "1.npy", "1.txt", ".npz", "1.npz.npz")))
    return ("--data", "d")


def odd(random: Random, here: Path, name: str) -> None:
    """Make something with a name that is no readable file."""
    path, kind = here / name, random.randrange(10)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("nowhere")
    elif kind == 2:
        path.symlink_to(name)
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        (here / "up").symlink_to("..")
        (here / "deep").symlink_to(".")
    elif kind == 5:
        path.symlink_to("/dev/zero")
    elif kind == 6:
        path.write_bytes(b"")
    elif kind == 7:
        path.write_bytes(random.randbytes(500))
    elif kind == 8:
        (here / f"\x1b]0;x\x07\u202e\n::stop-commands::{name}").write_bytes(b"rubbish")
    else:
        os.mknod(here / f"{'n' * 200}{path.suffix}")
        with open(path, "wb") as sparse:
            sparse.truncate(2**40)


def special_path(random: Random, folder: Path) -> Args:
    """Name something that is no data at all."""
    os.mkfifo(folder / "pipe.npz")
    (folder / "loop").symlink_to("loop")
    (folder / "empty").mkdir()
    (folder / "d.dat").write_bytes(b"x")
    places = (
        "pipe.npz", "loop", "empty", "d.dat", "/dev/zero", "/dev/null", "/proc/self/mem", "", ".", "nowhere.npz",
        "nowhere/", "\x1b[31m.npz", "x" * 5000, "a\nb", "m.onnx", "os:system", "os.path:", ":", "d.py:", ":x", "-", "pipe.npz:x",
        "http://localhost/x.npz", "file:///etc/passwd", "~", "*", "/proc/self/fd/0",
    )  # fmt: skip
    return ("--data", random.choice(places))


def onnx_set(random: Random, folder: Path) -> Args:
    """Write a folder of ONNX test data with damaged tensors."""
    here = folder / "d" / "test_data_set_0"
    here.mkdir(parents=True)
    tensor = numpy_helper.from_array(feeds("mlp")["x"][:1], "x")
    kind = random.randrange(12)
    if kind == 0:
        tensor.dims[0] = random.choice((-1, 10**12, 0, 2**62))
    elif kind == 1:
        tensor.data_type = random.choice((0, 8, 99, 7, 16))
    elif kind == 2:
        tensor.raw_data = tensor.raw_data[:-3]
    elif kind == 3:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="/etc/passwd")
    elif kind == 4:
        tensor.name = random.choice(("\x1b[31m", "other", "", "x" * 100_000))
    elif kind == 5:
        tensor.CopyFrom(texts("x", b"a", b"\xff", dims=[1, 2]))
    data = tensor.SerializeToString()
    if kind == 6:
        data = data[: random.randrange(len(data))]
    elif kind == 7:
        data = random.randbytes(300)
    elif kind == 8:
        data = b""
    (here / "input_0.pb").write_bytes(data)
    if kind == 9:
        odd(random, here, "input_1.pb")
    elif kind == 10:
        odd(random, folder / "d", "test_data_set_1")
    elif kind == 11:
        (here / "input_0.pb").rename(
            here / random.choice(("input_7.pb", "input_x.pb", "input_99999999999999999999.pb"))
        )
    return ("--data", random.choice(("d", "d/test_data_set_0")))


ARRAYS: dict[str, Callable[[Random, Path], Args]] = {
    "npy-header": npy_header,
    "pickle": pickled,
    "zip-damaged": damaged_zip,
    "zip-encrypted": encrypted,
    "zip-bomb": bomb,
    "zip-members": members,
    "values": values,
    "folder-of-arrays": folder_of_arrays,
    "special-path": special_path,
    "onnx-set": onnx_set,
}
