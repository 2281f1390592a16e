"""The files that the commands of the documentation name: small models and data, made once and copied for each page."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from PIL import Image

from . import models

SAMPLES = models.SAMPLES
Arrays = Mapping[str, NDArray[Any]]


def _digits(split: str, count: int) -> dict[str, NDArray[Any]]:
    """Return digits with their labels."""
    with np.load(SAMPLES / "digits.npz") as stored:
        return {name: stored[f"{split}{name}"][:count] for name in ("image", "labels")}


def _model(build: Callable[[], onnx.ModelProto]) -> Callable[[Path], object]:
    return lambda path: onnx.save_model(build(), path)


def _arrays(draw: Callable[[], Arrays]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        arrays: dict[str, Any] = dict(draw())
        np.savez(path, **arrays)

    return write


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8")


def _copy(name: str) -> Callable[[Path], object]:
    return lambda path: shutil.copy(SAMPLES / name, path)


def _photos(folder: Path) -> None:
    """Write pictures of smooth noise."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(20):
        coarse = draw.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((320 + 16 * number, 300), Image.Resampling.BICUBIC).save(
            folder / f"{number}.png"
        )


def _clips(folder: Path) -> None:
    """Write sounds of one second in a folder for each class."""
    draw = np.random.default_rng(0)
    for number, name in enumerate(("down", "go", "stop", "up")):
        (folder / name).mkdir(parents=True)
        for clip in range(10):
            sound = np.sin(np.arange(16000) * 0.05 * (number + 1) + clip) * 8000 + draw.normal(0, 500, 16000)
            with wave.open(str(folder / name / f"{clip}.wav"), "wb") as file:
                file.setparams((1, 2, 16000, 0, "NONE", ""))
                file.writeframes(sound.astype("<i2").tobytes())


def _feeds(folder: Path) -> None:
    """Write a folder with a file for each sample."""
    folder.mkdir()
    for number, image in enumerate(_digits("calib/", 32)["image"]):
        np.savez(folder / f"{number:02}.npz", image=image[None])


def _reviews(path: Path) -> None:
    """Write a table of texts with labels."""
    draw = np.random.default_rng(0)
    words = ["good", "bad", "slow", "fast", "never", "again", "a", "the", "phone", "camera", "works", "broke"]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["text", "label"])
        for _ in range(80):
            table.writerow([" ".join(draw.choice(words, draw.integers(3, 12))), int(draw.integers(0, 2))])


def _labels(path: Path) -> None:
    """Write a table of the classes of the photos."""
    rows = "".join(f"{number}.png,{number % 10}\n" for number in range(20))
    path.write_text("file,label\n" + rows, encoding="utf-8")


def _big(path: Path) -> None:
    """Write a model whose weights lie in another file."""
    onnx.save_model(models.head(), path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)


def _simplified(path: Path) -> None:
    """Write the digits network with other names."""
    model = onnx.load_model(SAMPLES / "digits.onnx")
    for node in model.graph.node:
        node.name = f"{node.name}_again"
    onnx.save_model(model, path)


def _detected() -> Arrays:
    """Return pictures with true boxes."""
    draw = np.random.default_rng(0)
    corners = draw.uniform(0, 300, (8, 3, 2))
    boxes = np.concatenate(
        [corners, corners + draw.uniform(20, 100, (8, 3, 2)), draw.integers(0, 3, (8, 3, 1))], axis=2
    )
    images = draw.uniform(0, 1, (8, 3, 13, 13)).repeat(32, axis=2).repeat(32, axis=3)
    return {"images": images.astype(np.float32), "boxes": boxes.astype(np.float32)}


def _noise(name: str, shape: tuple[int, ...]) -> Callable[[], Arrays]:
    return lambda: {name: np.random.default_rng(0).normal(size=shape).astype(np.float32)}


READER = """\
import numpy as np


def {name}():
    draw = np.random.default_rng(0)
    for _ in range(6):
        yield [{{"frame": draw.normal(size=(1, 64)).astype(np.float32)}} for _ in range(16)]
"""
IMAGES = """\
import numpy as np


def feeds():
    for image in np.load("calib.npz")["image"][:64]:
        yield {"image": image[None]}
"""
OVERRIDES = '[tensors."relu2_out"]\nrange = [0.0, 6.0]\n'
METRIC = "def error(outputs, labels):\n    return [float(o['logits'].argmax() != l) for o, l in zip(outputs, labels)]\n"
METRIC += "\n\nerror.higher_is_better = False\n"
FILES: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(("model.onnx", "m.onnx", "a.onnx", "before.onnx", "digits.onnx"), _copy("digits.onnx")),
    **dict.fromkeys(("after.onnx", "b.onnx", "other.onnx"), _simplified),
    "in.onnx": _model(models.relus),
    "digits.npz": _copy("digits.npz"),
    "bert.onnx": _model(models.text),
    "vad.onnx": _model(models.voice),
    "decoder.onnx": _model(models.decoder),
    "denoiser.onnx": _model(models.denoiser),
    "detector.onnx": _model(models.detector),
    "keywords.onnx": _model(models.keywords),
    "ctc.onnx": _model(models.transcripts),
    "sr.onnx": _model(models.super_resolution),
    "resnet50.onnx": _model(models.photos),
    "big.onnx": _big,
    "calib.npz": _arrays(lambda: _digits("calib/", 200)),
    "other.npz": _arrays(lambda: _digits("calib/", 48)),
    **dict.fromkeys(("d.npz", "data.npz"), _arrays(lambda: _digits("calib/", 64))),
    "test.npz": _arrays(lambda: _digits("", 300)),
    "pixels.npz": _arrays(lambda: {"image": _digits("calib/", 200)["image"] * np.float32(255)}),
    "frames.npz": _arrays(_noise("frame", (60, 64))),
    "images.npz": _arrays(_noise("image", (24, 1, 48, 48))),
    "utterances.npz": _arrays(_noise("frames", (20, 40, 32))),
    "photos.npz": _arrays(_detected),
    "photos": _photos,
    "photos.csv": _labels,
    "clips": _clips,
    "folder": _feeds,
    "reviews.csv": _reviews,
    "d.py": _text(READER.format(name="clips")),
    "clips.py": _text(READER.format(name="feeds")),
    "reader.py": _text(IMAGES),
    "mine.toml": _text(OVERRIDES),
    "mine.py": _text(METRIC),
}
"""The maker of each file, by its name. A page gets the files whose names occur in it."""
INT8 = ("model_int8.onnx", "int8.onnx")
RECORDS = ("run.json", "other.json", "minmax.json", "auto.json", "high.json")
PLAN = ".plan.json"


def known() -> set[str]:
    """Return the names of all files that a page may use without making them."""
    plans = {name.replace(".onnx", PLAN) for name in INT8}
    return {*FILES, *INT8, *plans, *RECORDS, "theirs.onnx", "sample_models/digits.onnx", "sample_models/digits.npz"}


def make_all(store: Path, requant: Path) -> None:
    """Make all files in a folder; INT8 models and records come from `requant`."""
    for name, make in FILES.items():
        make(store / name)
    made = ["quantize", "model.onnx", "--data", "calib.npz", "-o", "model_int8.onnx", "--report", "run.json"]
    quiet = ["--force-int8", "--place", "rules", "--quiet"]
    subprocess.run([requant, *made, *quiet], cwd=store, check=True)
    for name in RECORDS[1:]:
        shutil.copy(store / "run.json", store / name)
    for name in INT8[1:]:
        for end in (".onnx", PLAN):
            shutil.copy(store / f"model_int8{end}", store / name.replace(".onnx", end))
    _theirs(store / "theirs.onnx", store / "model.onnx")


def _theirs(output: Path, model: Path) -> None:
    """Quantize with ONNX Runtime."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = list(_digits("calib/", 16)["image"])

        def get_next(self) -> dict[str, NDArray[Any]] | None:
            return {"image": self.left.pop()[None]} if self.left else None

    quantize_static(model, output, Reader())


def lay_out(folder: Path, store: Path, text: str) -> None:
    """Copy the files whose names occur in the text of a page."""
    folder.mkdir(parents=True)
    (folder / "sample_models").symlink_to(SAMPLES)
    for path in store.iterdir():
        name = path.name.removesuffix(".data").replace(PLAN, ".onnx")
        if re.search(rf"(?<![\w/.]){re.escape(name)}(?!\w)", text):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
