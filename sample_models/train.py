"""Train the sample models, and write the models and their data into a folder.

    python sample_models/train.py --out sample_models

The script needs PyTorch and scikit-learn in addition to requant (`pip install torch scikit-learn`); requant itself
never imports them. It takes about ten minutes on one core, and downloads nothing. All seeds are fixed, so the same
PyTorch on the same kind of CPU writes the same files. Another version or CPU may give other weights; then update the
accuracies in README.md.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import digits_data
import networks
import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from to_onnx import to_onnx
from torch import Tensor, nn
from torch.nn import functional

SEED = 0
BATCH = 50  # divides the 1000 training images


@dataclass(frozen=True, slots=True)
class Recipe:
    """A network and its training: AdamW with a one-cycle learning rate whose maximum is `rate`."""

    make: Callable[[], nn.Module]
    epochs: int
    rate: float
    weight_decay: float = 0.02


RECIPES = {
    "digits": Recipe(networks.convolutional, epochs=60, rate=2e-3),
    "digits_mobile": Recipe(networks.mobile, epochs=120, rate=4e-3),
    "digits_transformer": Recipe(networks.transformer, epochs=150, rate=1.5e-3, weight_decay=0.05),
}


def main() -> None:
    """Parse the command line, train, write, and print the accuracy of each model on the test split."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the three .onnx files and digits.npz")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # with more threads the order of float32 sums, and so the weights, would depend on cores
    digits = digits_data.load()
    digits_data.save(digits, out / "digits.npz")
    for name, recipe in RECIPES.items():
        network = train(recipe, digits.train)
        model = to_onnx(network, name)
        verify(model, network, digits.calibration.images)
        onnx.save(model, out / f"{name}.onnx")
        correct = int((classify(network, digits.test.images) == digits.test.labels).sum())
        total = len(digits.test.labels)
        print(f"{name}: {correct} of {total} test images, {100 * correct / total:.2f} %", flush=True)


def train(recipe: Recipe, split: digits_data.Split) -> nn.Module:
    """Train a network with a fixed seed; return it after the last epoch. Test images do not select an epoch."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    network = recipe.make()
    images, labels = torch.from_numpy(split.images), torch.from_numpy(split.labels)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay)
    steps = recipe.epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=recipe.rate, total_steps=steps, pct_start=0.2)
    for _ in range(recipe.epochs):
        for chosen in torch.randperm(len(images), generator=generator).reshape(-1, BATCH):
            logits = network(digits_data.augment(images[chosen], generator))
            loss = functional.cross_entropy(logits, labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


@torch.no_grad()
def classify(network: nn.Module, images: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the class (N,) of each image (N, 1, 28, 28)."""
    classes: Tensor = network(torch.from_numpy(images)).argmax(dim=1)
    return classes.numpy()


@torch.no_grad()
def verify(model: onnx.ModelProto, network: nn.Module, images: NDArray[np.float32]) -> None:
    """Check that the ONNX graph, in ONNX's reference implementation, computes the same as the network.

    Both are compared with the network in float64. The error of the graph may be four times the error of PyTorch's
    float32, because the order of operations differs. A wrong constant gives a much larger error.

    Raises:
        ArithmeticError: The error of the graph is larger.
    """
    inputs = torch.from_numpy(images)
    single = network(inputs).numpy()
    exact = network.double()(inputs.double()).numpy()
    network.float()
    (written,) = ReferenceEvaluator(model).run(None, {"image": images})
    error, bound = np.abs(written - exact).max(), 4 * np.abs(single - exact).max()
    if not error <= bound:
        raise ArithmeticError(f"{model.graph.name}: error of logits {error:.3g}, bound {bound:.3g}; check to_onnx.py")


if __name__ == "__main__":
    main()
