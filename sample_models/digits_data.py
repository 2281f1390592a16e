"""The digits of scikit-learn as 28x28 images: the splits, the file `digits.npz`, and the augmentation for training."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn import functional

SIZE = 28
TEST_IMAGES = 797
CALIBRATION_IMAGES = 200
SPLIT_SEED = 0


@dataclass(frozen=True, slots=True)
class Split:
    """Images (N, 1, 28, 28) float32 in 0..1, each value k / 255 with an integer k, and their labels (N,) int64."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Digits:
    """The splits. `calibration` is a part of `train`; `test` shares no image with either."""

    train: Split
    calibration: Split
    test: Split


def load() -> Digits:
    """Enlarge scikit-learn's 1797 digits and split them. Every split has the same share of each class."""
    digits = load_digits()
    whole = Split(_enlarge(digits.images), digits.target.astype(np.int64))
    train, test = _part(whole, TEST_IMAGES)
    _, calibration = _part(train, CALIBRATION_IMAGES)
    return Digits(train, calibration, test)


def save(digits: Digits, path: Path) -> None:
    """Write the test split (`image`, `labels`) and the calibration split (`calib/image`, `calib/labels`)."""
    arrays: dict[str, Any] = {
        "image": digits.test.images,
        "labels": digits.test.labels,
        "calib/image": digits.calibration.images,
        "calib/labels": digits.calibration.labels,
    }
    np.savez_compressed(path, **arrays)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate (up to 12 degrees), scale (8 %), shear (0.1), shift (2 pixels) each image at random, and add noise (0.03).

    Args:
        images: (N, 1, 28, 28) in 0..1; the result has the same shape and range.
        generator: The source of every random number.
    """

    def uniform(bound: float) -> Tensor:
        return (torch.rand(len(images), generator=generator) * 2 - 1) * bound

    angle, zoom, slant = uniform(math.radians(12)), 1 + uniform(0.08), uniform(0.1)
    pixel = 2 / SIZE  # affine_grid counts from -1 to 1
    cos, sin = angle.cos() * zoom, angle.sin() * zoom
    rows = [cos, slant - sin, uniform(2 * pixel), sin, cos, uniform(2 * pixel)]
    theta = torch.stack(rows, dim=1).reshape(-1, 2, 3)
    grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
    moved = functional.grid_sample(images, grid, align_corners=False)
    noise = torch.randn(images.shape, generator=generator) * 0.03
    return (moved + noise).clamp(0, 1)


def _enlarge(images: NDArray[np.float64]) -> NDArray[np.float32]:
    """Enlarge (N, 8, 8) in 0..16 to (N, 1, 28, 28) in 0..1, bicubic. Rounding to k / 255 makes the file small."""
    small = torch.from_numpy(images / 16).unsqueeze(1)
    large = functional.interpolate(small, size=(SIZE, SIZE), mode="bicubic", align_corners=False).clamp(0, 1)
    levels: NDArray[np.float32] = np.rint(large.numpy() * 255).astype(np.float32)
    return levels / np.float32(255)


def _part(split: Split, count: int) -> tuple[Split, Split]:
    """Split off `count` images; return the other images and these images."""
    rest, aside = train_test_split(
        np.arange(len(split.labels)), test_size=count, stratify=split.labels, random_state=SPLIT_SEED
    )
    return Split(split.images[rest], split.labels[rest]), Split(split.images[aside], split.labels[aside])
