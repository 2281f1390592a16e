"""Models of one convolution or matrix product, in float and in each integer kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from requant import NATIVE_DOMAIN

if TYPE_CHECKING:
    import onnx

Case: TypeAlias = "tuple[onnx.ModelProto, dict[str, Any]]"
"""A model and its feed."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution with as much padding as keeps the size of the image at stride 1.

    Attributes:
        channels: The number of input channels.
        side: The side of the image.
        kernel: The side of the kernel.
        out: The number of output channels; 0 for `channels`.
        group: The number of channel groups.
        batch: The number of images.
        stride: The stride.
    """

    channels: int
    side: int
    kernel: int
    out: int = 0
    group: int = 1
    batch: int = 1
    stride: int = 1

    def case(self, form: str) -> Case:
        """Return a model and a feed.

        Args:
            form: ``float``; ``int8``, a QLinearConv; ``gemm``, one that runs as a matrix product, because its weights
                have a zero point; ``native``, the operator of ``ai.requant``, in NHWC; or ``curve``, the same with a
                function behind it.
        """
        from onnx import TensorProto

        from requant.quantize.kernels.convolution_calls import CONVOLUTION
        from requant.quantize.kernels.nodes import OMITTED

        attributes = {"pads": [self.kernel // 2] * 4, "group": self.group, "strides": [self.stride] * 2}
        shape = (self.out or self.channels, self.channels // self.group, self.kernel, self.kernel)
        nchw = (self.batch, self.channels, self.side, self.side)
        if form == "float":
            weights = {"w": random(shape, np.float32)}
            feed = {"x": random(nchw, np.float32)}
            return one_node("Conv", ["x", "w"], attributes, feed, weights, TensorProto.FLOAT), feed
        constants = {"w": random(shape, np.int8), "s": np.float32(0.01), "t": np.float32(30.0), "z": np.uint8(128)}
        constants["n"] = np.int8(-1 if form == "gemm" else 0)
        inputs = ["x", "s", "z", "w", "s", "n", "t", "z"]
        feed = {"x": random(nchw, np.uint8)}
        if form not in ("native", "curve"):
            return one_node("QLinearConv", inputs, attributes, feed, constants, TensorProto.UINT8), feed
        feed = {"x": np.ascontiguousarray(feed["x"].transpose(0, 2, 3, 1))}
        given = dict(zip(CONVOLUTION, inputs, strict=False))
        if form == "curve":
            constants["curve"] = random((2, 64), np.int8).astype(np.int16)
            constants["grid"] = np.array([-3840, 120], np.float32)
            given |= {"curve": "curve", "grid": "grid"}
        named = [given.get(name, OMITTED) for name in CONVOLUTION]
        constants[OMITTED] = np.False_
        return one_node(f"{NATIVE_DOMAIN}.Convolution", named, attributes, feed, constants, TensorProto.UINT8), feed


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product with constant weights, (rows, common) by (common, columns)."""

    rows: int
    common: int
    columns: int

    def case(self, form: str) -> Case:
        """Return a model and a feed; `form` is ``float`` or ``int8``, a MatMulInteger."""
        from onnx import TensorProto

        integer = form == "int8"
        weight = random((self.common, self.columns), np.int8 if integer else np.float32)
        feed = {"x": random((self.rows, self.common), np.uint8 if integer else np.float32)}
        op, result = ("MatMulInteger", TensorProto.INT32) if integer else ("MatMul", TensorProto.FLOAT)
        return one_node(op, ["x", "w"], {}, feed, {"w": weight}, result), feed


def random(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    """Return random numbers of this dtype: of float32, or of all values of an integer dtype."""
    rng = np.random.default_rng(0)
    if not issubclass(dtype, np.integer):
        return rng.standard_normal(shape, dtype=np.float32)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)


def one_node(
    op: str,
    inputs: Sequence[str],
    attributes: Mapping[str, Any],
    feed: Mapping[str, Any],
    constants: Mapping[str, Any],
    output: int,
) -> onnx.ModelProto:
    """Return a model of one node; `op` has its domain before it, if that is not the one of ONNX."""
    from onnx import helper, numpy_helper

    from requant.quantize.kernels.library import VERSION

    domain, _, name = op.rpartition(".")
    graph = helper.make_graph(
        [helper.make_node(name, inputs, ["y"], name=name, domain=domain, **attributes)],
        "kernel",
        [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feed.items()],
        [helper.make_tensor_value_info("y", output, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    versions = {NATIVE_DOMAIN: VERSION, "com.microsoft": 1}
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(*each) for each in versions.items())]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return model
