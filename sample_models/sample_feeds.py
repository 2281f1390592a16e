"""Random inputs that resemble real data: images of smooth noise, and tokens with a few frequent values."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Feed: TypeAlias = dict[str, NDArray[Any]]
PAST = 32  # the number of tokens in the cache of a decoder


def images(random: np.random.Generator, batch: int, size: int, *, channels: int = 3) -> NDArray[np.float32]:
    """Draw images (batch, channels, size, size) with mean about 0 and variance about 1, as after normalization.

    The amplitude is proportional to 1 / frequency, as in photographs (Field, 1987). The channels of an image are
    similar. Contrast and brightness differ from image to image.
    """
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None]) * size
    amplitude = 1 / np.maximum(frequency, 1)
    amplitude[0, 0] = 0
    noise = random.standard_normal((batch, channels + 1, size, size))
    waves = np.fft.irfft2(np.fft.rfft2(noise) * amplitude, s=(size, size))
    waves /= waves.std(axis=(2, 3), keepdims=True)
    mixed = 0.9 * waves[:, :1] + 0.44 * waves[:, 1:]
    contrast = random.uniform(0.5, 1.2, (batch, 1, 1, 1))
    brightness = random.normal(0, 0.4, (batch, 1, 1, 1)) + random.normal(0, 0.2, (batch, channels, 1, 1))
    return (mixed * contrast + brightness).astype(np.float32)


def normalised(random: np.random.Generator, batch: int, size: int) -> Feed:
    """Draw `input`: images with mean 0 and variance 1."""
    return {"input": images(random, batch, size)}


def pixels(random: np.random.Generator, batch: int, size: int, *, name: str = "input") -> Feed:
    """Draw images in 0..1; the values are multiples of 1 / 255."""
    levels = np.rint(np.clip(0.45 + 0.25 * images(random, batch, size), 0, 1) * 255)
    return {name: (levels / 255).astype(np.float32)}


def detector(random: np.random.Generator, batch: int, size: int) -> Feed:
    """Draw `images`: images in 0..1."""
    return pixels(random, batch, size, name="images")


def tokens(random: np.random.Generator, batch: int, length: int, *, vocabulary: int) -> Feed:
    """Draw `input_ids` (batch, length): token k with a probability of about 1 / k (Zipf's law)."""
    ranks = np.exp(random.uniform(0, np.log(vocabulary), (batch, length)))
    return {"input_ids": np.minimum(ranks.astype(np.int64), vocabulary - 1)}


def sentences(random: np.random.Generator, batch: int, length: int) -> Feed:
    """Draw pairs of sentences for BERT. `attention_mask` is 0 after the end of a pair; the first token stays."""
    feed = tokens(random, batch, length, vocabulary=30522)
    ends = random.integers(max(1, length // 2), length + 1, (batch, 1))
    breaks = (ends * random.uniform(0.3, 0.7, (batch, 1))).astype(np.int64)
    places = np.arange(length)
    inside = places < ends
    feed["input_ids"] *= inside
    feed["attention_mask"] = inside.astype(np.int64)
    feed["token_type_ids"] = (inside & (places >= breaks)).astype(np.int64)
    return feed


def continued(random: np.random.Generator, batch: int, length: int) -> Feed:
    """Draw tokens for the decoder, and the keys and values of 32 earlier tokens."""
    feed = tokens(random, batch, length, vocabulary=32000)
    for layer in range(6):
        for part in ("key", "value"):
            cache = random.standard_normal((batch, 6, PAST, 48), dtype=np.float32)
            feed[f"past_key_values.{layer}.{part}"] = cache
    return feed


def words(random: np.random.Generator, batch: int, length: int) -> Feed:
    """Draw tokens for the tagger."""
    return tokens(random, batch, length, vocabulary=20000)


def series(random: np.random.Generator, batch: int, length: int) -> Feed:
    """Draw `input` (batch, length, 64): series in which neighbouring steps are similar."""
    steps = random.standard_normal((batch, length, 64))
    for step in range(1, length):
        steps[:, step] = 0.8 * steps[:, step - 1] + 0.6 * steps[:, step]
    return {"input": steps.astype(np.float32)}
