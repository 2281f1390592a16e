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

from benchmarks import roofline
from benchmarks.tables import plain_table

if TYPE_CHECKING:
    import onnx

TABLE = 256


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operator with its inputs.

    Attributes:
        op: The operator; ``ms.`` stands for the domain of the runtime.
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
    "QLinearSigmoid": Kernel("ms.QLinearSigmoid", UNARY, "u"),
    "QLinearLeakyRelu": Kernel("ms.QLinearLeakyRelu", UNARY, "u", {"alpha": 0.1}),
    "QLinearSoftmax": Kernel("ms.QLinearSoftmax", UNARY, "u", {"axis": -1, "opset": 13}),
    "QLinearMul": Kernel("ms.QLinearMul", BINARY, "u"),
    "QLinearMul by a gate": Kernel("ms.QLinearMul", "uszgszsz", "u"),
    "QLinearAdd": Kernel("ms.QLinearAdd", BINARY, "u"),
    "QLinearGlobalAveragePool": Kernel("ms.QLinearGlobalAveragePool", UNARY, "u", {"channels_last": 0}),
    "QuantizeLinear": Kernel("QuantizeLinear", "fsz", "u"),
    "DequantizeLinear": Kernel("DequantizeLinear", "usz", "f"),
    "Transpose of uint8 to NHWC": Kernel("Transpose", "u", "u", {"perm": [0, 2, 3, 1]}),
    "Clip of uint8": Kernel("Clip", "ulm", "u"),
    "Gather in 256 values": Kernel("Gather", "ti", "u"),
    "Sigmoid": Kernel("Sigmoid", "f", "f"),
    "HardSigmoid": Kernel("HardSigmoid", "f", "f"),
    "QuickGelu": Kernel("ms.QuickGelu", "f", "f", {"alpha": 1.0}),
    "Gelu": Kernel("ms.Gelu", "f", "f"),
    "Erf": Kernel("Erf", "f", "f"),
    "Softmax": Kernel("Softmax", "f", "f", {"axis": -1}),
    "Add": Kernel("Add", "ff", "f"),
    "Mul": Kernel("Mul", "ff", "f"),
    "Mul by a gate": Kernel("Mul", "fh", "f"),
    "Relu": Kernel("Relu", "f", "f"),
    "GlobalAveragePool": Kernel("GlobalAveragePool", "f", "f"),
}
"""The kernels: first integer kernels and conversions, then the float kernels."""
PRODUCTS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "3x3, 64 channels, 56x56": ("convolution", (64, 56, 3)),
    "3x3, 256 channels, 14x14": ("convolution", (256, 14, 3)),
    "1x1, 64 to 256, 56x56": ("convolution", (64, 56, 1, 256)),
    "1x1, 24 to 144, 56x56": ("convolution", (24, 56, 1, 144)),
    "1x1, 16 to 96, 112x112": ("convolution", (16, 112, 1, 96)),
    "1x1, 480 to 20, 1x1 (a gate)": ("convolution", (480, 1, 1, 20)),
    "depthwise 3x3, 144 channels, 56x56": ("convolution", (144, 56, 3, 144, 144)),
    "depthwise 5x5, 240 channels, 28x28": ("convolution", (240, 28, 5, 240, 240)),
    "3x3, 3 to 32, 224x224": ("convolution", (3, 224, 3, 32)),
    "5x5, 1 to 32, 28x28, batch 128": ("convolution", (1, 28, 5, 32, 1, 128)),
    "5x5, 32 to 64, 14x14, batch 128": ("convolution", (32, 14, 5, 64, 1, 128)),
    "197 rows, 768 by 768": ("product", (197, 768, 768)),
    "128 rows, 768 by 3072": ("product", (128, 768, 3072)),
    "1 row, 1280 by 1000": ("product", (1, 1280, 1000)),
}
"""The products: a function of `benchmarks.roofline` and its arguments."""
KINDS = ("float", "int8", "gemm")


def build(kernel: Kernel, shape: tuple[int, ...]) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return a model with one kernel, and a feed."""
    from onnx import TensorProto, helper, numpy_helper

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
    domain, _, op = kernel.op.rpartition(".")
    node = helper.make_node(
        op, names, ["y"], name="kernel", domain="com.microsoft" if domain else "", **kernel.attributes
    )
    graph = helper.make_graph(
        [node],
        "element",
        [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feed.items()],
        [helper.make_tensor_value_info("y", TensorProto.UINT8 if kernel.output == "u" else TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(constants[n[0]]), n) for n in names if n[0] in constants],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), feed


def nanoseconds(kernel: Kernel, shape: tuple[int, ...], times: int) -> float:
    """Return the time of a kernel per element, in nanoseconds."""
    from requant.quantize.runtime.profile import profiled

    model, feed = build(kernel, shape)
    runs = profiled(model.SerializeToString(), feed, threads=1, times=times).runs
    return 1e3 * sum(run.microseconds for run in runs) / math.prod(shape)


def product_times(name: str, times: int) -> dict[str, float]:
    """Return the microseconds of a product in float and in int8; for a convolution also as an int8 matrix product."""
    from requant.quantize.runtime.profile import profiled

    function, arguments = PRODUCTS[name]
    kinds: dict[str, dict[str, Any]] = {"float": {"integer": False}, "int8": {"integer": True}}
    if function == "convolution":
        kinds["gemm"] = {"integer": True, "zero_point": -1}
    times_of_kinds = {}
    for kind, options in kinds.items():
        model, feed = getattr(roofline, function)(*arguments, **options)
        runs = profiled(model.SerializeToString(), feed, threads=1, times=times).runs
        times_of_kinds[kind] = sum(run.microseconds for run in runs if run.macs)
    return times_of_kinds


def print_products(found: Mapping[str, Mapping[str, float]]) -> None:
    """Print the products as a table."""
    columns = ("product", "float, us", "int8, us", "int8 gemm, us", "ratio")
    table = plain_table("single kernels, 1 thread", columns, left=("product",))
    for name, times in found.items():
        least = min(times["int8"], times.get("gemm", math.inf))
        cells = [f"{times[kind]:.0f}" if kind in times else "" for kind in KINDS]
        table.add_row(name, *cells, f"{times['float'] / least:.2f}x")
    Console().print(table)


@click.command()
@click.option("--only", default="", help="Only kernels whose name contains this text.")
@click.option("--shape", default="1,64,56,56", show_default=True)
@click.option("--products", is_flag=True, help="Measure convolutions and matrix products.")
@click.option("--times", default=50, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(only: str, shape: str, products: bool, times: int, as_json: bool) -> None:
    """Measure and print the table."""
    if products:
        pairs = {name: product_times(name, times) for name in PRODUCTS if only.lower() in name.lower()}
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
