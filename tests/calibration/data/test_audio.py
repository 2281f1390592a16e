"""Folders of .wav files: values, shapes, settings, refusals."""

from __future__ import annotations

import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from requant.calibration import DataError, DataSpec, InputSpec, open_source
from requant.calibration.model.session import Array

F2, F4 = np.dtype(np.float16), np.dtype(np.float32)


def spec(*shape: int | str | None, dtype: np.dtype[Any] = F4) -> InputSpec:
    return InputSpec("x", dtype, shape)


def write(path: Path, data: bytes, *, width: int = 2, channels: int = 1, rate: int = 16000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as stream:
        stream.setnchannels(channels)
        stream.setsampwidth(width)
        stream.setframerate(rate)
        stream.writeframes(data)
    return path


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}h", *values)


def read(path: Path, wanted: InputSpec, preprocess: str | None = None) -> list[Array]:
    return [sample.feed["x"] for sample in open_source(DataSpec(str(path), preprocess), [wanted])]


@pytest.mark.parametrize(
    ("width", "data", "expected"),
    [
        (1, bytes([0, 64, 128, 255]), [-1, -0.5, 0, 127 / 128]),
        (2, words(-32768, -16384, 0, 32767), [-1, -0.5, 0, 32767 / 32768]),
        (
            3,
            b"".join(value.to_bytes(3, "little", signed=True) for value in (-(2**23), -(2**22), 0, 1, 2**23 - 1)),
            [-1, -0.5, 0, 2.0**-23, 1 - 2.0**-23],
        ),
        (4, struct.pack("<4i", -(2**31), -(2**30), 0, 2**7), [-1, -0.5, 0, 2.0**-24]),
    ],
    ids=["8-bit", "16-bit", "24-bit", "32-bit"],
)
def test_values_lie_between_minus_one_and_one(tmp_path: Path, width: int, data: bytes, expected: list[float]) -> None:
    write(tmp_path / "d" / "a.wav", data, width=width)
    (got,) = read(tmp_path / "d", spec("N", "T"))
    assert (got.dtype, got.tolist()) == (F4, [expected])  # exact: all of them are float32 numbers


STEREO = words(0, 16384, 16384, 0, -32768, -16384)
LEFT, RIGHT = [0.0, 0.5, -1.0], [0.5, 0.0, -0.5]


@pytest.mark.parametrize(
    ("wanted", "preprocess", "channels", "expected"),
    [
        (spec("T"), None, 1, LEFT),
        (spec("N", "T"), None, 1, [LEFT]),
        (spec("N", 1, "T"), None, 1, [[LEFT]]),
        (spec("N", "T", 1), None, 1, [[[value] for value in LEFT]]),
        (spec("N", 2, "T"), None, 2, [[LEFT, RIGHT]]),
        (spec("N", "T", 2), None, 2, [[list(pair) for pair in zip(LEFT, RIGHT, strict=True)]]),
        (spec("N", None, None), None, 2, [[LEFT, RIGHT]]),
        (spec("N", "T"), "mono=true", 2, [[0.25, 0.25, -0.75]]),
        (spec("N", "T", dtype=F2), "mono=true", 2, [[0.25, 0.25, -0.75]]),
        (spec("N", "T"), "mono=true", 1, [LEFT]),
    ],
    ids=["T", "NT", "N1T", "NT1", "N2T", "NT2", "NCT", "mean", "half", "mean-of-one"],
)
def test_shapes(tmp_path: Path, wanted: InputSpec, preprocess: str | None, channels: int, expected: list[Any]) -> None:
    data = STEREO if channels == 2 else words(0, 16384, -32768)
    write(tmp_path / "d" / "a.wav", data, channels=channels)
    (got,) = read(tmp_path / "d", wanted, preprocess)
    assert (got.dtype, got.tolist()) == (wanted.dtype, expected)


@pytest.mark.parametrize(
    ("preprocess", "length"),
    [("seconds=0.5", 4), ("seconds=0.25 rate=8", 2), ("seconds=1", 8), (None, 5)],
    ids=["cut", "cut-more", "filled", "whole"],
)
def test_seconds_cut_or_fill_with_zeros(tmp_path: Path, preprocess: str | None, length: int) -> None:
    values = [100, 200, 300, 400, 500]
    write(tmp_path / "d" / "a.wav", words(*values), rate=8)
    (got,) = read(tmp_path / "d", spec("N", "T"), preprocess)
    assert (got[0] * 32768).tolist() == (values + [0] * 3)[:length]


def test_labels_and_the_order_of_files(tmp_path: Path) -> None:
    for name in ("yes/b.wav", "yes/a.WAV", "no/z.wav"):
        write(tmp_path / name, words(1))
    (tmp_path / "yes" / "notes.md").write_text("ignored")
    source = open_source(DataSpec(str(tmp_path)), [spec("N", "T")])
    assert [(sample.where, sample.label) for sample in source] == [
        (f"{tmp_path / 'no' / 'z.wav'}, sample 0", 0),
        (f"{tmp_path / 'yes' / 'a.WAV'}, sample 1", 1),
        (f"{tmp_path / 'yes' / 'b.wav'}, sample 2", 1),
    ]
    assert (source.length, source.rows.random) == (3, True)
    (tmp_path / "l.csv").write_text("z.wav,4\na.WAV,5\nb.wav,6\n")
    spoken = open_source(DataSpec(str(tmp_path), labels=str(tmp_path / "l.csv")), [spec("N", "T")])
    assert [sample.label for sample in spoken] == [4, 5, 6]


def test_a_fixed_batch_is_filled(tmp_path: Path) -> None:
    for index in range(4):
        write(tmp_path / f"{index}.wav", words(index, index))
    assert [(got * 32768).tolist() for got in read(tmp_path, spec(2, 2))] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]
    write(tmp_path / "3.wav", words(3))
    with pytest.raises(
        DataError, match=r"2.wav, sample 2 to .*3.wav, sample 3: arrays of different shapes cannot be stacked"
    ):
        read(tmp_path, spec(2, "T"))


@pytest.mark.parametrize(
    ("wanted", "preprocess", "problem"),
    [
        (spec("N", "T"), "rte=16000", r"d: no key of preprocess named 'rte'; did you mean 'rate'"),
        (spec("N", "T"), "rate=16k", r"d: preprocess: rate=16k: expected samples per second"),
        (spec("N", "T"), "seconds=0", r"d: preprocess: seconds=0: expected a number above 0"),
        (spec("N", "T"), "mono=yes", r"d: preprocess: mono=yes: expected true or false"),
        (spec("N", "T"), "rate=8000", r"a.wav, sample 0: has 16000 samples per second, not 8000; resample it first"),
        (spec("N", "T"), None, r"b.wav, sample 1: has 8000 samples per second, not 16000; resample it first"),
        (spec(1, 16000), "seconds=2", r"d: preprocess: seconds gives 32000 .* needs 16000: seconds=1"),
        (spec("N", 16000, 1), "seconds=2", r"d: preprocess: seconds gives 32000 .* needs 16000: seconds=1"),
        (spec("N", 98, 40, 1), None, r"a waveform is floats of shape \(T,\).* use FILE.py:NAME"),
        (spec("N", "T", dtype=np.dtype(np.int16)), None, r"a waveform is floats"),
        (spec(1, 99), None, r"a.wav, sample 0, input 'x': expected float32 \(1, 99\), got float32 \(1, 2\)"),
    ],
    ids=[
        "key",
        "rate",
        "seconds",
        "mono",
        "given-rate",
        "first-rate",
        "length",
        "length-last",
        "rank",
        "type",
        "fixed",
    ],
)
def test_what_is_refused(tmp_path: Path, wanted: InputSpec, preprocess: str | None, problem: str) -> None:
    write(tmp_path / "d" / "a.wav", words(1, 2))
    write(tmp_path / "d" / "b.wav", words(1, 2), rate=8000)
    with pytest.raises(DataError, match=problem):
        read(tmp_path / "d", wanted, preprocess)


def test_stereo_is_not_mixed_unasked(tmp_path: Path) -> None:
    write(tmp_path / "d" / "a.wav", STEREO, channels=2)
    with pytest.raises(DataError, match=r"a.wav, sample 0: has 2 channels, .* has 1; mono=true averages them"):
        read(tmp_path / "d", spec("N", "T"))


@pytest.mark.parametrize("kind", ["text", "empty", "float", "truncated", "silent"])
def test_bad_files_name_file_and_sample(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "d" / "a.wav", words(1, 2))
    bad = write(tmp_path / "d" / "b.wav", b"" if kind == "silent" else words(*range(100)))
    data = bytearray(bad.read_bytes())
    data[20] = 3  # the format of IEEE floats
    contents = {"text": b"text", "empty": b"", "float": bytes(data), "truncated": bad.read_bytes()[:100]}
    bad.write_bytes(contents.get(kind, bad.read_bytes()))
    with pytest.raises(DataError, match=rf"^{bad}, sample 1: ") as caught:
        read(tmp_path / "d", spec("N", "T"))
    assert "\n" not in str(caught.value)


def test_two_inputs_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "d" / "a.wav", words(1))
    with pytest.raises(
        DataError, match=r"each file is a sound, but the model has 2 inputs: 'x', 'state'; give FILE.py"
    ):
        open_source(DataSpec(str(tmp_path / "d")), [spec("N", "T"), InputSpec("state", F4, (2, 1))])
