"""Write the model and the data of `requant demo`: `digits.onnx` with one layer less, and a part of `digits.npz`.

    python sample_models/small.py --out quantize/project/digits

The script needs no packages beside requant, and takes a few seconds. It keeps both convolutions of `digits.onnx` and
puts one fully connected layer in the place of the last two: ridge regression of their logits on the calibration images,
each shifted by at most two pixels. `digits.npz` becomes 200 test images and 300 calibration images.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.utils import Extractor

from requant.calibration.model.session import open_session

HERE = Path(__file__).parent
SHIFT = 2
RIDGE = 100.0
FEATURES = "flatten_out"
TEST_IMAGES, MORE = 200, 100  # what the test split keeps, and what it gives to the calibration split
HEAD = ("fc.weight", "fc.bias")


def main() -> None:
    """Parse the command line, write both files, and print the accuracy on the whole test split."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for digits.onnx and digits.npz")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with np.load(HERE / "digits.npz") as stored:
        data = dict(stored)
    model = small(onnx.load(HERE / "digits.onnx"), data["calib/image"])
    onnx.save(model, out / "digits.onnx")
    np.savez_compressed(out / "digits.npz", **part_of(data))
    (logits,) = outputs(model, data["image"])
    print(f"{int((logits.argmax(axis=1) == data['labels']).sum())} of {len(logits)} test images")


def part_of(data: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Return fewer test images, and some of the others as calibration images, with their labels."""
    part: dict[str, Any] = {}
    for name in ("image", "labels"):
        kept, more, _ = np.split(data[name], [TEST_IMAGES, TEST_IMAGES + MORE])
        part |= {name: kept, f"calib/{name}": np.concatenate([data[f"calib/{name}"], more])}
    return part


def small(model: onnx.ModelProto, images: NDArray[np.float32]) -> onnx.ModelProto:
    """Return the convolutions of the digits network with one linear layer, fitted on images (N, 1, 28, 28)."""
    moved = np.concatenate([shifted(images, *by) for by in itertools.product(range(-SHIFT, SHIFT + 1), repeat=2)])
    body = Extractor(onnx.shape_inference.infer_shapes(model)).extract_model(["image"], [FEATURES])
    del body.graph.value_info[:]
    (logits,), (features,) = outputs(model, moved), outputs(body, moved)
    weight, bias = fit(features, logits)
    body.graph.initializer.extend(map(numpy_helper.from_array, (weight, bias), HEAD))
    body.graph.node.append(helper.make_node("Gemm", [FEATURES, *HEAD], ["logits"], name="fc"))
    del body.graph.output[:]
    body.graph.output.extend(model.graph.output)
    body.graph.name = "digits_small"
    onnx.checker.check_model(body, full_check=True)
    return body


def shifted(images: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """Return images (N, 1, H, W) moved by at most `SHIFT` pixels; what becomes free is black."""
    height, width = images.shape[2:]
    padded = np.pad(images, [(0, 0), (0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT)])
    return padded[:, :, SHIFT - rows :, SHIFT - columns :][:, :, :height, :width]


def outputs(model: onnx.ModelProto, images: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return the outputs of a model for images (N, 1, 28, 28), on one thread."""
    return [np.asarray(each) for each in open_session(model.SerializeToString()).run(None, {"image": images})]


def fit(features: NDArray[np.float32], logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the weight (F, 10) and bias (10,) of ridge regression from features (N, F) to centred logits (N, 10)."""
    known = np.c_[features, np.ones(len(features))].astype(np.float64)
    wanted = logits - logits.mean(axis=1, keepdims=True)
    found = np.linalg.solve(known.T @ known + RIDGE * np.eye(known.shape[1]), known.T @ wanted).astype(np.float32)
    return found[:-1], found[-1]


if __name__ == "__main__":
    main()
