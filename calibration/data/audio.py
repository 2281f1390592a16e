"""Folders of ``.wav`` files as data. The standard library reads the PCM values."""

from __future__ import annotations

import wave
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ... import RequantError
from ...system.regular import open_regular, size_of
from ..model.session import Array, InputSpec
from .media import Reading, media_labels, media_rows, only_input
from .samples import DataError, Rows
from .settings import Key, parse_settings, positive, positive_integer, truth

SUFFIXES = frozenset((".wav", ".wave"))
"""The suffixes of sound files."""
WIDTHS = (1, 2, 3, 4)
"""The bytes of a PCM value."""

KEYS: Mapping[str, Key] = {
    "rate": Key(positive_integer, "samples per second"),
    "mono": Key(truth, "true or false"),
    "seconds": Key(positive, "a number above 0"),
}
"""The settings of `audio_folder`."""
VALUE_BYTES = 16
"""The most bytes per value while a sound is read: the PCM, its copy in 32 bits, and float64."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a sound becomes a model's input.

    Attributes:
        spec: The input: (T,), (N, T), (N, C, T) or (N, T, C).
        rate: The samples per second that every file must have.
        length: The number of samples in time; longer sounds are cut, shorter ones filled with 0. None keeps all.
        mono: Whether channels are averaged.
    """

    spec: InputSpec
    rate: int
    length: int | None = None
    mono: bool = False

    @property
    def channel_axis(self) -> int | None:
        """The channel axis of the input, counted from the end; None if there is no such axis."""
        if len(self.spec.shape) < 3:
            return None
        return -1 if self.spec.shape[-1] in (1, 2) and self.spec.shape[-2] not in (1, 2) else -2

    def __str__(self) -> str:
        """Return the recipe in words."""
        length = "" if self.length is None else f" cut or filled to {self.length} samples"
        return f"rate={self.rate}{' mono=true' if self.mono else ''}{length}"


def audio_folder(folder: str, files: Sequence[str], reading: Reading, inputs: Sequence[InputSpec]) -> Rows:
    """Read a folder of ``.wav`` files as float32 from -1 to 1; each file is one sample.

    Args:
        folder: The folder.
        files: Paths of the files.
        reading: The settings, see `KEYS`, the labels, and the memory of a sound.
        inputs: The model's inputs: one waveform.

    Raises:
        RequantError: The settings are wrong, the input is not a waveform, or a file has no label.
    """
    spec = only_input(folder, inputs, "a sound")
    if len(spec.shape) not in (1, 2, 3) or spec.dtype.kind != "f":
        raise DataError(
            f"{folder}: input {spec.name!r} is {spec}; a waveform is floats of shape (T,), (1, T), (1, C, T) or "
            "(1, T, C); for other features of a sound use FILE.py:NAME"
        )
    try:
        settings = parse_settings(reading.preprocess, KEYS)
    except RequantError as error:
        raise DataError(f"{folder}: {error}") from error
    rate = settings.get("rate") or _rate(files[0], f"{files[0]}, sample 0")
    seconds = settings.get("seconds")
    if seconds is not None and seconds * rate * VALUE_BYTES > reading.limit:
        raise DataError(f"{folder}: preprocess: seconds={seconds:g} needs more memory than {reading.limit} bytes")
    recipe = Recipe(spec, rate, None if seconds is None else max(1, round(seconds * rate)), settings.get("mono", False))
    _check_length(folder, recipe)
    classes = media_labels(folder, files, reading.labels)

    def decode(file: str, where: str) -> Array:
        return _array(file, recipe, reading.limit, where)

    return media_rows(f"{folder}, sounds with {recipe}", files, classes, spec, decode, batched=len(spec.shape) > 1)


def _check_length(folder: str, recipe: Recipe) -> None:
    """Check that the length from the settings is the input's fixed length, if it has one."""
    spec = recipe.spec
    fixed = spec.shape[-2] if recipe.channel_axis == -1 else spec.shape[-1]
    if recipe.length is not None and isinstance(fixed, int) and fixed != recipe.length:
        raise DataError(
            f"{folder}: preprocess: seconds gives {recipe.length} samples at rate={recipe.rate}, but input "
            f"{spec.name!r}, {spec}, needs {fixed}: seconds={fixed / recipe.rate:g}"
        )


def _rate(file: str, where: str) -> int:
    """Return the samples per second of a file."""
    with _opened(file, where) as (sound, _):
        return sound.getframerate()


@contextmanager
def _opened(file: str, where: str) -> Iterator[tuple[wave.Wave_read, int]]:
    """Open a ``.wav`` file; also return its size in bytes.

    Raises:
        DataError: The file is no such file, or its header is wrong.
    """
    with open_regular(file) as stream:
        try:
            sound = wave.open(stream, "rb")  # noqa: SIM115 - closed below
            if not sound.getframerate() or sound.getsampwidth() not in WIDTHS:
                raise wave.Error(f"{8 * sound.getsampwidth()} bits, {sound.getframerate()} samples per second")
        except Exception as error:  # wave raises errors of several types for damaged headers
            raise DataError(f"{where}: not a readable .wav file with PCM: {str(error) or 'it ends early'}") from error
        with sound:
            yield sound, size_of(stream)


def _array(file: str, recipe: Recipe, limit: int, where: str) -> Array:
    """Read a file and convert the values to the shape and type of the input."""
    with _opened(file, where) as (sound, size):
        rate, width, channels = sound.getframerate(), sound.getsampwidth(), sound.getnchannels()
        if rate != recipe.rate:
            raise DataError(f"{where}: has {rate} samples per second, not {recipe.rate}; resample it first")
        # do not read samples beyond the length
        frames = sound.getnframes() if recipe.length is None else min(recipe.length, sound.getnframes())
        data = sound.readframes(min(frames, size // (width * channels)))  # a header may claim more than is there
    if len(data) != frames * width * channels:
        raise DataError(f"{where}: is truncated: {len(data) // (width * channels)} samples of {frames}")
    if not data:
        raise DataError(f"{where}: contains no sound")
    if frames * channels * VALUE_BYTES > limit:
        raise DataError(f"{where}: {frames} samples need more memory than {limit} bytes; cut it with seconds=")
    values = _floats(data, width).reshape(-1, channels).T
    if recipe.mono:
        values = values.mean(axis=0, keepdims=True, dtype=np.float64).astype(np.float32)
    if recipe.length is not None:
        values = np.pad(values, ((0, 0), (0, recipe.length - values.shape[1])))
    return _shaped(values, recipe, where)


def _floats(data: bytes, width: int) -> Array:
    """Return PCM values of `width` bytes as float32 in [-1, 1). Values of 8 bits are unsigned, the others signed."""
    if width == 1:
        data = (np.frombuffer(data, np.uint8) ^ 0x80).tobytes()  # offset 128 to two's complement
    if width == 3:
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, width = padded.tobytes(), 4  # the value is in the upper 3 bytes, so its sign stays in place
    words: Array = np.frombuffer(data, np.dtype(f"<i{width}"))
    return np.asarray(words / 2.0 ** (8 * width - 1), np.float32)


def _shaped(values: Array, recipe: Recipe, where: str) -> Array:
    """Return values of shape (C, T) in the shape of the input."""
    rank, axis = len(recipe.spec.shape), recipe.channel_axis
    channels = 1 if axis is None else recipe.spec.shape[axis]
    if isinstance(channels, int) and channels != len(values):
        hint = "; mono=true averages them" if channels == 1 else ""
        raise DataError(
            f"{where}: has {len(values)} channels, but input {recipe.spec.name!r}, {recipe.spec}, has {channels}{hint}"
        )
    values = values.astype(recipe.spec.dtype)
    if rank == 1:
        return values.reshape(-1)
    if rank == 2:
        return values
    return np.ascontiguousarray(values.T if axis == -1 else values)[None]
