"""The table of TensorFlow transform names that run a part of another transform, or do nothing in ONNX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from math import inf

import onnx_ir as ir

from .fold_batch_norms import fold
from .fuse_pad_and_conv import fuse_pad_and_conv
from .patterns.linear import BY_CONSTANT
from .registry import Change, Function, transform


@dataclass(frozen=True, slots=True)
class Name:
    """One registered name, with the sections of its page.

    Attributes:
        function: The function of the transform.
        summary: The first line of the page.
        before: The section ``Before:``.
        result: The section ``After:``.
        left_alone: The section ``Left alone:``.
        options: The section ``Options:``, empty without options.
        after: Transforms that must come earlier in a pipeline.
    """

    function: Callable[..., Change]
    summary: str
    before: str
    result: str
    left_alone: str
    options: str = ""
    after: tuple[str, ...] = ("fold_constants",)

    def registered(self) -> Function:
        """Return a copy of the function with the page as its docstring."""

        @wraps(self.function)
        def function(model: ir.Model, **options: float | str) -> Change:
            return self.function(model, **options)

        sections = f"Before:  {self.before}\nAfter:   {self.result}\nLeft alone: {self.left_alone}"
        options = f"\n\nOptions:\n    {self.options}" if self.options else ""
        function.__doc__ = f"{self.summary}\n\n{sections}{options}"
        return function


def _fold_batch_normalization(model: ir.Model, *, max_gain: float = inf) -> Change:
    return fold(model, {"BatchNormalization"}, max_gain)


def _fold_arithmetic(model: ir.Model, *, max_gain: float = inf) -> Change:
    return fold(model, BY_CONSTANT, max_gain)


def _fold_numbers(model: ir.Model) -> Change:
    return fold(model, {"Mul"}, numbers=True)


def _nothing(model: ir.Model) -> Change:
    change = Change()
    change.skip("not-in-onnx")
    return change


def _no_device(model: ir.Model, *, device: str = "", if_default: bool = False) -> Change:
    return _nothing(model)


def _ignored(
    reason: str, before: str, note: str = "", options: str = "", function: Callable[..., Change] = _nothing
) -> Name:
    """Return the row of a transform that does nothing."""
    everything = "all graphs (``not-in-onnx``)."
    return Name(function, f"Do nothing: {reason}", before, f"the same{note}", everything, options, ())


DEVICE = "ONNX nodes have no device; the execution providers of a session choose the device."
MAX_GAIN = "max_gain: The largest factor by which the weights of a channel may grow."

NAMES = {
    "fold_convolutionwithbias_mul": Name(
        _fold_numbers,
        "Fold a Mul by a single number into the weight and the bias of the Conv before it.",
        "y = Add(x, Mul(Conv(x, W, b), 0.17)), the scaled branch of an Inception-ResNet",
        "y = Add(x, Conv(x, W * 0.17, b * 0.17))",
        "candidates that `fold_batch_norms` leaves alone; constants of several numbers; other operators than Conv and\n"
        "    Mul.",
    ),
    "fold_old_batch_norms": Name(
        _fold_batch_normalization,
        "Fold a BatchNormalization into a linear operator next to it: `fold_batch_norms` for this operator only.",
        "y = BatchNormalization(Concat(Conv(x, V), Conv(x, W)), gamma, beta, mean, var)",
        "y = Concat(Conv(x, V * g[:M], c[:M]), Conv(x, W * g[M:], c[M:])),\n"
        "         g = gamma / sqrt(var + epsilon),  c = beta - mean * g",
        "candidates that `fold_batch_norms` leaves alone; Mul, Div, Add and Sub.",
        MAX_GAIN,
    ),
    "fold_subdivmul_batch_norms": Name(
        _fold_arithmetic,
        "Fold a Sub, Div, Mul or Add with one constant per channel into a linear operator next to it.",
        "y = Add(Mul(Div(Sub(Conv(x, W, b), mean), deviation), gamma), beta)",
        "y = Conv(x, W * g, (b - mean) * g + beta),  g = gamma / deviation, shape (M,)",
        "candidates that `fold_batch_norms` leaves alone; BatchNormalization.",
        MAX_GAIN,
    ),
    "fuse_convolutions": Name(
        fuse_pad_and_conv,
        "Do the same as `fuse_pad_and_conv`, under the name in TensorFlow's documentation.",
        "t = Pad(x, pads=[0, 0, 1, 1, 0, 0, 1, 1]); y = Conv(t, W), pads [0, 0, 0, 0]",
        "y = Conv(x, W), pads [1, 1, 1, 1]",
        "candidates that `fuse_pad_and_conv` leaves alone; a Resize before a Conv: ONNX has no operator for both.",
    ),
    "fuse_resize_pad_and_conv": Name(
        fuse_pad_and_conv,
        "Do the same as `fuse_pad_and_conv`. A Resize before the Pad stays.",
        "t = Pad(Resize(x, s), p); y = Conv(t, W)",
        "y = Conv(Resize(x, s), W), pads p",
        "candidates that `fuse_pad_and_conv` leaves alone; the Resize: ONNX has no operator for Resize and Conv.",
    ),
    "mkl_fuse_pad_and_conv": Name(
        fuse_pad_and_conv,
        "Do the same as `fuse_pad_and_conv`. The graph may have QuantizeLinear/DequantizeLinear pairs.",
        "t = Pad(DequantizeLinear(q), p); y = QuantizeLinear(Conv(t, W))",
        "y = QuantizeLinear(Conv(DequantizeLinear(q), W)), pads p",
        "candidates that `fuse_pad_and_conv` leaves alone.",
    ),
    "remove_device": _ignored(DEVICE, "y = Relu(x)"),
    "set_device": _ignored(
        DEVICE,
        "y = Relu(x)",
        options="device: A device name; not used.\n    if_default: Whether to skip nodes that have a device; not used.",
        function=_no_device,
    ),
    "remove_control_dependencies": _ignored("ONNX nodes depend on each other only through tensors.", "y = Relu(x)"),
    "sparsify_gather": _ignored(
        "ONNX has no hash table that could replace a Gather from a table of mostly zero rows.",
        "y = Gather(W, i)",
        "; ``quantize_weights`` makes the rows int8",
    ),
    "backport_concatv2": _ignored(
        "ONNX has only one Concat operator; ``convert_opset`` changes the version of a model.", "y = Concat(a, b)"
    ),
    "backport_tensor_array_v3": _ignored(
        "ONNX has no tensor arrays, and only one kind of sequence.", "y = SequenceAt(s, i)"
    ),
    "fuse_resize_and_conv": _ignored(
        "ONNX has no operator that computes a Resize and a Conv together.",
        "y = Conv(Resize(x, s), W)",
        "; `fuse_pad_and_conv` fuses a Pad",
    ),
}
"""The registered names."""

for _name, _row in NAMES.items():
    transform(_name, after=_row.after)(_row.registered())
