"""Folders of ``.wav`` files as data. The standard library reads the PCM values."""

from __future__ import annotations

import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .. import RequantError
from .media import media_labels, media_rows, only_input
from .samples import DataError, Rows
from .session import Array, InputSpec
from .settings import Key, parse_settings, positive, truth, whole

SUFFIXES = frozenset((".wav", ".wave"))
"""The suffixes of sound files."""

KEYS: Mapping[str, Key] = {
    "rate": Key(whole, "samples per second"),
    "mono": Key(truth, "true or false"),
    "seconds": Key(positive, "a number above 0"),
}
"""The settings of `audio_folder`."""


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


def audio_folder(
    folder: str, files: Sequence[str], preprocess: str | None, labels: str | None, inputs: Sequence[InputSpec]
) -> Rows:
    """Read a folder of ``.wav`` files as float32 from -1 to 1; each file is one sample.

    Args:
        folder: The folder.
        files: Paths of the files.
        preprocess: The settings, see `KEYS`.
        labels: The path of a table of files and labels; None for the names of the sub-folders.
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
        settings = parse_settings(preprocess, KEYS)
    except RequantError as error:
        raise DataError(f"{folder}: {error}") from error
    rate = settings.get("rate") or _rate(files[0], f"{files[0]}, sample 0")
    length = max(1, round(settings["seconds"] * rate)) if "seconds" in settings else None
    recipe = Recipe(spec, rate, length, settings.get("mono", False))
    _check_length(folder, recipe)
    classes = media_labels(folder, files, labels)

    def decode(file: str, where: str) -> Array:
        return _array(file, recipe, where)

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
    with _opened(file, where) as stream:
        return stream.getframerate()


def _opened(file: str, where: str) -> wave.Wave_read:
    """Open a ``.wav`` file."""
    try:
        return wave.open(file, "rb")
    except (wave.Error, OSError, EOFError, RuntimeError) as error:
        reason = str(error) or "it ends early"
        raise DataError(f"{where}: not a readable .wav file with PCM: {reason}") from error


def _array(file: str, recipe: Recipe, where: str) -> Array:
    """Read a file and convert the values to the shape and type of the input."""
    with _opened(file, where) as stream:
        rate, width, channels = stream.getframerate(), stream.getsampwidth(), stream.getnchannels()
        if rate != recipe.rate:
            raise DataError(f"{where}: has {rate} samples per second, not {recipe.rate}; resample it first")
        # do not read samples beyond the length
        frames = stream.getnframes() if recipe.length is None else min(recipe.length, stream.getnframes())
        data = stream.readframes(frames)
    if len(data) != frames * width * channels:
        raise DataError(f"{where}: is truncated: {len(data) // (width * channels)} samples of {frames}")
    if not data:
        raise DataError(f"{where}: contains no sound")
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
