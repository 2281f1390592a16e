"""Trains the sample models and writes them, with their data, into a folder.

    python sample_models/train.py --out sample_models

needs, beside the packages that requant installs, PyTorch and scikit-learn (`pip install torch scikit-learn`); requant
itself never imports either. It takes about ten minutes on one core and downloads nothing. Every random number comes
from a fixed seed, so the same PyTorch on the same kind of CPU writes the same files; another may end in weights that
differ, and then the accuracies in README.md have to be brought up to date.
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
    """How one network is made and trained: AdamW with a one-cycle learning rate that peaks at `rate`."""

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
    torch.set_num_threads(1)  # the order of float32 sums, and so the weights, would depend on the number of cores
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
    """Train a network from its seed. It is the last epoch that is kept: nothing is chosen by looking at test images."""
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
    """Check that the ONNX graph, run by ONNX's own reference implementation, computes what the network computes.

    Both are measured against the network in float64. The graph may be off by four times what PyTorch's float32 is off:
    the same operations, rounded in another order. A wrong constant is off by far more.

    Raises:
        ArithmeticError: The graph is farther off.
    """
    inputs = torch.from_numpy(images)
    single = network(inputs).numpy()
    exact = network.double()(inputs.double()).numpy()
    network.float()
    (written,) = ReferenceEvaluator(model).run(None, {"image": images})
    error, bound = np.abs(written - exact).max(), 4 * np.abs(single - exact).max()
    if not error <= bound:
        raise ArithmeticError(f"{model.graph.name}: logits off by {error:.3g}, allowed {bound:.3g}; compare to_onnx.py")


if __name__ == "__main__":
    main()
