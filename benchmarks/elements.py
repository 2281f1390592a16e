"""Times of single kernels: per element for element-wise kernels, int8 against float for products.

    python -m benchmarks.elements [--shape 1,64,56,56] [--json]
    python -m benchmarks.elements --products [--json]

Each model has one node. The time is the minimum time of the kernel in the profile of the runtime, on one thread,
without the kernels that change the layout around it. SHAPE gives the number of elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console

from benchmarks.kernels import Convolution, Product, one_node
from benchmarks.tables import plain_table, print_table

if TYPE_CHECKING:
    import onnx

TABLE = 256


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operator with its inputs.

    Attributes:
        op: The operator, with its domain before it.
        inputs: One letter per input. ``u``, ``f``: a uint8 or float tensor. ``i``: an int32 tensor with values below
            `TABLE`. ``g``, ``h``: a uint8 or float gate, one value per channel. ``s``: a scale. ``z``: a zero point.
            ``t``: a uint8 table. ``l``, ``m``: uint8 limits.
        output: ``u`` or ``f``.
        attributes: The attributes of the node.
    """

    op: str
    inputs: str
    output: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


UNARY, BINARY = "uszsz", "uszuszsz"
KERNELS: Mapping[str, Kernel] = {
    "QLinearSigmoid": Kernel("com.microsoft.QLinearSigmoid", UNARY, "u"),
    "QLinearLeakyRelu": Kernel("com.microsoft.QLinearLeakyRelu", UNARY, "u", {"alpha": 0.1}),
    "QLinearSoftmax": Kernel("com.microsoft.QLinearSoftmax", UNARY, "u", {"axis": -1, "opset": 13}),
    "QLinearMul": Kernel("com.microsoft.QLinearMul", BINARY, "u"),
    "QLinearMul by a gate": Kernel("com.microsoft.QLinearMul", "uszgszsz", "u"),
    "QLinearAdd": Kernel("com.microsoft.QLinearAdd", BINARY, "u"),
    "QLinearGlobalAveragePool": Kernel("com.microsoft.QLinearGlobalAveragePool", UNARY, "u", {"channels_last": 0}),
    "QuantizeLinear": Kernel("QuantizeLinear", "fsz", "u"),
    "DequantizeLinear": Kernel("DequantizeLinear", "usz", "f"),
    "Transpose of uint8 to NHWC": Kernel("Transpose", "u", "u", {"perm": [0, 2, 3, 1]}),
    "Clip of uint8": Kernel("Clip", "ulm", "u"),
    "Gather in 256 values": Kernel("Gather", "ti", "u"),
    "Sigmoid": Kernel("Sigmoid", "f", "f"),
    "HardSigmoid": Kernel("HardSigmoid", "f", "f"),
    "QuickGelu": Kernel("com.microsoft.QuickGelu", "f", "f", {"alpha": 1.0}),
    "Gelu": Kernel("com.microsoft.Gelu", "f", "f"),
    "Erf": Kernel("Erf", "f", "f"),
    "Softmax": Kernel("Softmax", "f", "f", {"axis": -1}),
    "Add": Kernel("Add", "ff", "f"),
    "Mul": Kernel("Mul", "ff", "f"),
    "Mul by a gate": Kernel("Mul", "fh", "f"),
    "Relu": Kernel("Relu", "f", "f"),
    "GlobalAveragePool": Kernel("GlobalAveragePool", "f", "f"),
}
"""The kernels: first integer kernels and conversions, then the float kernels."""
PRODUCTS: Mapping[str, Convolution | Product] = {
    "7x7, 3 to 64, 224x224, stride 2": Convolution(3, 224, 7, 64, stride=2),
    "3x3, 3 to 32, 224x224, stride 2": Convolution(3, 224, 3, 32, stride=2),
    "3x3, 3 to 32, 224x224": Convolution(3, 224, 3, 32),
    "3x3, 64 channels, 56x56": Convolution(64, 56, 3),
    "3x3, 256 channels, 14x14": Convolution(256, 14, 3),
    "3x3, 512 channels, 7x7": Convolution(512, 7, 3),
    "1x1, 16 to 96, 112x112": Convolution(16, 112, 1, 96),
    "1x1, 24 to 144, 56x56": Convolution(24, 56, 1, 144),
    "1x1, 64 to 256, 56x56": Convolution(64, 56, 1, 256),
    "1x1, 1024 to 256, 14x14": Convolution(1024, 14, 1, 256),
    "1x1, 480 to 20, 1x1 (a gate)": Convolution(480, 1, 1, 20),
    "depthwise 3x3, 32 channels, 112x112": Convolution(32, 112, 3, 32, 32),
    "depthwise 3x3, 96 channels, 112x112, stride 2": Convolution(96, 112, 3, 96, 96, stride=2),
    "depthwise 3x3, 144 channels, 56x56": Convolution(144, 56, 3, 144, 144),
    "depthwise 5x5, 240 channels, 28x28": Convolution(240, 28, 5, 240, 240),
    "depthwise 5x5, 672 channels, 14x14": Convolution(672, 14, 5, 672, 672),
    "5x5, 1 to 32, 28x28, batch 128": Convolution(1, 28, 5, 32, batch=128),
    "5x5, 32 to 64, 14x14, batch 128": Convolution(32, 14, 5, 64, batch=128),
    "197 rows, 768 by 768": Product(197, 768, 768),
    "128 rows, 768 by 3072": Product(128, 768, 3072),
    "1 row, 1280 by 1000": Product(1, 1280, 1000),
}
KINDS = ("float", "int8", "gemm", "native", "curve")


def build(kernel: Kernel, shape: tuple[int, ...]) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return a model with one kernel, and a feed."""
    from onnx import TensorProto

    rng = np.random.default_rng(0)
    gate = (shape[0], shape[1], *(1 for _ in shape[2:]))
    fed: Mapping[str, Callable[[], Any]] = {
        "u": lambda: rng.integers(0, 256, shape, np.uint8),
        "f": lambda: rng.standard_normal(shape, dtype=np.float32),
        "i": lambda: rng.integers(0, TABLE, shape, np.int32),
        "g": lambda: rng.integers(0, 256, gate, np.uint8),
        "h": lambda: rng.random(gate, np.float32),
    }
    constants = {
        "s": np.float32(0.02),
        "z": np.uint8(128),
        "t": np.arange(TABLE, dtype=np.uint8),
        "l": np.uint8(5),
        "m": np.uint8(250),
    }
    names = [f"{letter}{place}" for place, letter in enumerate(kernel.inputs)]
    feed = {name: fed[name[0]]() for name in names if name[0] in fed}
    used = {name: np.asarray(constants[name[0]]) for name in names if name[0] in constants}
    output = TensorProto.UINT8 if kernel.output == "u" else TensorProto.FLOAT
    return one_node(kernel.op, names, kernel.attributes, feed, used, output), feed


def nanoseconds(kernel: Kernel, shape: tuple[int, ...], times: int) -> float:
    """Return the time of a kernel per element, in nanoseconds."""
    from requant.quantize.runtime.profile import profiled

    model, feed = build(kernel, shape)
    runs = profiled(model.SerializeToString(), feed, threads=1, times=times).runs
    return 1e3 * sum(run.microseconds for run in runs) / math.prod(shape)


def product_times(shape: Convolution | Product, times: int) -> dict[str, float]:
    """Return the microseconds of a product in float and in int8; of a convolution in all of `KINDS` that run here."""
    from requant.quantize.kernels.library import kernels
    from requant.quantize.runtime.profile import profiled

    kinds = KINDS if isinstance(shape, Convolution) else KINDS[:2]
    found = {}
    for kind in kinds if not isinstance(kernels(), str) else kinds[:3]:
        model, feed = shape.case(kind)
        runs = profiled(model.SerializeToString(), feed, threads=1, times=times).runs
        found[kind] = sum(run.microseconds for run in runs if run.macs)
    return found


def print_products(found: Mapping[str, Mapping[str, float]]) -> None:
    """Print the products as a table."""
    columns = ("product", "float, us", "int8, us", "int8 gemm, us", "native, us", "with a curve, us", "ratio")
    table = plain_table("single kernels, 1 thread", columns, left=("product",), no_wrap=columns)
    for name, times in found.items():
        least = min(time for kind, time in times.items() if kind not in ("float", "curve"))
        cells = [f"{times[kind]:.0f}" if kind in times else "" for kind in KINDS]
        table.add_row(name, *cells, f"{times['float'] / least:.2f}x")
    print_table(table)


@click.command()
@click.option("--only", default="", help="Only kernels whose name contains this text.")
@click.option("--shape", default="1,64,56,56", show_default=True)
@click.option("--products", is_flag=True, help="Measure convolutions and matrix products.")
@click.option("--times", default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(only: str, shape: str, products: bool, times: int, as_json: bool) -> None:
    """Measure and print the table."""
    if products:
        pairs = {name: product_times(row, times) for name, row in PRODUCTS.items() if only.lower() in name.lower()}
        print(json.dumps(pairs, indent=2)) if as_json else print_products(pairs)
        return
    axes = tuple(map(int, shape.split(",")))
    found = {name: nanoseconds(row, axes, times) for name, row in KERNELS.items() if only.lower() in name.lower()}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = plain_table(f"{shape}, 1 thread", ("kernel", "ns per element"), left=("kernel",))
    for name, cost in found.items():
        table.add_row(name, f"{cost:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
