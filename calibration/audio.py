"""Folders of ``.wav`` files as data: PCM read by the standard library."""

from __future__ import annotations

import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .. import RequantError
from .media import media_labels, the_input
from .samples import DataError, Picked, Rows, Sample, in_batches
from .session import Array, InputSpec
from .settings import Key, parse_settings, positive, truth, whole

SUFFIXES = frozenset((".wav", ".wave"))
"""How the names of sounds end."""

KEYS: Mapping[str, Key] = {
    "rate": Key(whole, "samples per second"),
    "mono": Key(truth, "true or false"),
    "seconds": Key(positive, "a number above 0"),
}
"""What `audio_folder` may be told."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a sound becomes a model's input.

    Attributes:
        spec: The input: (T,), (N, T), (N, C, T) or (N, T, C).
        rate: Samples per second that every file must have.
        length: How many samples of time are kept, the missing ones being 0; None for all there are.
        mono: Whether channels are averaged.
    """

    spec: InputSpec
    rate: int
    length: int | None = None
    mono: bool = False

    @property
    def channel_axis(self) -> int | None:
        """Where the input has its channels, counted from the end; None where it has no such axis."""
        if len(self.spec.shape) < 3:
            return None
        return -1 if self.spec.shape[-1] in (1, 2) and self.spec.shape[-2] not in (1, 2) else -2

    def __str__(self) -> str:
        """Return it in words."""
        length = "" if self.length is None else f" cut or filled to {self.length} samples"
        return f"rate={self.rate}{' mono=true' if self.mono else ''}{length}"


def audio_folder(
    folder: str, files: Sequence[str], preprocess: str | None, labels: str | None, inputs: Sequence[InputSpec]
) -> Rows:
    """Read a folder of ``.wav`` files, one sample each, as float32 from -1 to 1.

    Args:
        folder: The folder.
        files: Paths of the files.
        preprocess: Settings of `KEYS`.
        labels: Path of a table of files and labels; None takes the names of sub-folders.
        inputs: What the model wants: one waveform.

    Raises:
        RequantError: The settings are wrong, the input is no waveform, or a file has no label.
    """
    spec = the_input(folder, inputs, "a sound")
    if len(spec.shape) not in (1, 2, 3) or spec.dtype.kind != "f":
        raise DataError(
            f"{folder}: input {spec.name!r} is {spec}; a waveform is floats of shape (T,), (1, T), (1, C, T) or "
            "(1, T, C); what else is computed from it comes from FILE.py:NAME"
        )
    try:
        given = parse_settings(preprocess, KEYS)
    except RequantError as error:
        raise DataError(f"{folder}: {error}") from error
    rate = given.get("rate") or _rate(files[0], f"{files[0]}, sample 0")
    length = max(1, round(given["seconds"] * rate)) if "seconds" in given else None
    recipe = Recipe(spec, rate, length, given.get("mono", False))
    _check_length(folder, recipe)
    classes = media_labels(folder, files, labels)

    def read(picked: Picked) -> Iterator[Sample]:
        for index in range(len(files)) if picked is None else picked:
            where = f"{files[index]}, sample {index}"
            yield Sample({spec.name: _array(files[index], recipe, where)}, classes[index], where)

    rows = Rows(f"{folder}, sounds with {recipe}", len(files), read, random=True)
    return in_batches(rows, spec) if len(spec.shape) > 1 else rows


def _check_length(folder: str, recipe: Recipe) -> None:
    """Check that the length asked for is the input's, where that is fixed."""
    spec = recipe.spec
    wanted = spec.shape[-2] if recipe.channel_axis == -1 else spec.shape[-1]
    if recipe.length is not None and isinstance(wanted, int) and wanted != recipe.length:
        raise DataError(
            f"{folder}: preprocess: seconds makes {recipe.length} samples at rate={recipe.rate}, and input "
            f"{spec.name!r}, {spec}, takes {wanted}: seconds={wanted / recipe.rate:g}"
        )


def _rate(file: str, where: str) -> int:
    """Return the samples per second of a file."""
    with _opened(file, where) as stream:
        return stream.getframerate()


def _opened(file: str, where: str) -> wave.Wave_read:
    """Open a file."""
    try:
        return wave.open(file, "rb")
    except (wave.Error, OSError, EOFError, RuntimeError) as error:
        reason = str(error) or "it ends early"
        raise DataError(f"{where}: cannot be read as PCM in a .wav file: {reason}") from error


def _array(file: str, recipe: Recipe, where: str) -> Array:
    """Read a file and bring it into the form of the input."""
    with _opened(file, where) as stream:
        rate, width, channels = stream.getframerate(), stream.getsampwidth(), stream.getnchannels()
        if rate != recipe.rate:
            raise DataError(f"{where}: has {rate} samples per second, not {recipe.rate}; resample it first")
        # what would be cut off need not be read
        frames = stream.getnframes() if recipe.length is None else min(recipe.length, stream.getnframes())
        data = stream.readframes(frames)
    if len(data) != frames * width * channels:
        raise DataError(f"{where}: is truncated: {len(data) // (width * channels)} samples of {frames}")
    if not data:
        raise DataError(f"{where}: holds no sound")
    values = _floats(data, width).reshape(-1, channels).T
    if recipe.mono:
        values = values.mean(axis=0, keepdims=True, dtype=np.float64).astype(np.float32)
    if recipe.length is not None:
        values = np.pad(values, ((0, 0), (0, recipe.length - values.shape[1])))
    return _shaped(values, recipe, where)


def _floats(data: bytes, width: int) -> Array:
    """Return PCM values of `width` bytes as float32 from -1 to below 1; 8 bits are unsigned, the others signed."""
    if width == 1:
        data = (np.frombuffer(data, np.uint8) ^ 0x80).tobytes()  # the offset of 128 becomes a sign
    if width == 3:
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, width = padded.tobytes(), 4  # the sign is in the upper byte; the lower one is divided away
    words: Array = np.frombuffer(data, np.dtype(f"<i{width}"))
    return np.asarray(words / 2.0 ** (8 * width - 1), np.float32)


def _shaped(values: Array, recipe: Recipe, where: str) -> Array:
    """Return values of shape (C, T) in the shape of the input."""
    rank, axis = len(recipe.spec.shape), recipe.channel_axis
    wanted = 1 if axis is None else recipe.spec.shape[axis]
    if isinstance(wanted, int) and wanted != len(values):
        hint = "; say mono=true for their mean" if wanted == 1 else ""
        raise DataError(
            f"{where}: has {len(values)} channels, and input {recipe.spec.name!r}, {recipe.spec}, takes {wanted}{hint}"
        )
    values = values.astype(recipe.spec.dtype)
    if rank == 1:
        return values.reshape(-1)
    if rank == 2:
        return values
    return np.ascontiguousarray(values.T if axis == -1 else values)[None]
