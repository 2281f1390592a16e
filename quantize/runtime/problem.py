"""The shapes on which a kernel computes, in oneDNN's notation."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from .executed import Kernel

Shape = tuple[int, ...]
Form = Literal["convolution", "product", "pooling", "binary"]

FORMS: dict[str, Form] = {
    **dict.fromkeys(
        "Conv FusedConv NhwcFusedConv QLinearConv ConvInteger ConvTranspose Convolution".split(), "convolution"
    ),
    **dict.fromkeys(
        "MatMul FusedMatMul Gemm FusedGemm MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QLinearMatMul "
        "QGemm MatMulNBits".split(),
        "product",
    ),
    **dict.fromkeys(
        "MaxPool NhwcMaxPool AveragePool QLinearAveragePool GlobalAveragePool GlobalMaxPool "
        "QLinearGlobalAveragePool".split(),
        "pooling",
    ),
    **dict.fromkeys("Add QLinearAdd Mul QLinearMul Sub Div".split(), "binary"),
}
"""How the problem of each operator is written; for other operators it is the shape of the first input."""


def is_convolution(kernel: Kernel) -> bool:
    """Return whether a kernel is a convolution, transposed or not."""
    return _form(kernel) == "convolution"


def problem(kernel: Kernel) -> str:
    """Write the shapes of a kernel's problem, batch and channels first.

    A convolution is ``mb1_ic32oc64_ih14oh14kh5sh1dh0ph2_iw14...``, a product is ``1x3136:3136x128:1x128``.
    """
    run, form = kernel.run, _form(kernel)
    if not run.inputs or not run.outputs:
        return "x".join(map(str, run.outputs[0])) if run.outputs else ""
    source, result = run.inputs[0], run.outputs[0]
    if _source_layout(kernel) == "NHWC":
        source, result = _channels_second(source), _channels_second(result)
    if form == "product":
        return f"{_dims(source)}:{_dims((*source[-1:], *result[-1:]))}:{_dims(result)}"
    if form in ("convolution", "pooling") and kernel.place is not None and len(source) > 2:
        return _window(kernel, kernel.place, source, result)
    if form == "binary":
        tensors = [s for s, t in zip(run.inputs, run.reads, strict=True) if t == run.reads[0] and s not in ((), (1,))]
        return ":".join(_dims(shape) for shape in (tensors[0], tensors[-1])) if tensors else _dims(source)
    return _dims(source)


def _form(kernel: Kernel) -> Form | None:
    """Return how the problem of a kernel is written: by its operator, else by that of its node."""
    return FORMS.get(kernel.run.op) or FORMS.get(kernel.op)


def _source_layout(kernel: Kernel) -> str:
    """Return the layout of the first input; the layout of a layout change is that of its output."""
    if kernel.kind != "layout":
        return kernel.layout
    if kernel.run.op == "Transpose":
        return "NCHW" if kernel.layout == "NHWC" else "NHWC"
    if kernel.run.op != "ReorderInput":
        return "NCHWc"
    last = kernel.place is not None and kernel.place.attributes.get_int("channels_last", 0) != 0
    return "NHWC" if last else "NCHW"


def _dims(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "1"


def _channels_second(shape: Shape) -> Shape:
    return (shape[0], shape[-1], *shape[1:-1]) if len(shape) > 2 else shape


def _window(kernel: Kernel, place: ir.Node, source: Shape, result: Shape) -> str:
    """Write the shapes of a convolution or pool: ``mb1_ic32oc64_ih14oh14kh5sh1dh0ph2_iw14ow14kw5sw1dw0pw2``."""
    space, pooling = len(source) - 2, _form(kernel) == "pooling"
    weight = () if pooling else next(iter(kernel.run.inputs[1:]), ())
    window = _kernel_shape(place, source, weight, pooling=pooling)
    strides = tuple(place.attributes.get_ints("strides", [1] * space))
    dilations = tuple(place.attributes.get_ints("dilations", [1] * space))
    pads = tuple(place.attributes.get_ints("pads", [0] * 2 * space))
    group = place.attributes.get_int("group", 1)
    head = f"mb{source[0]}ic{source[1]}" if pooling else f"mb{source[0]}_ic{source[1]}oc{result[1]}"
    parts = [(f"g{group}" if group > 1 else "") + head]
    for axis, letter in enumerate("dhw"[-space:]):
        lengths = ("i", source[2 + axis]), ("o", result[2 + axis]), ("k", window[axis])
        moves = ("s", strides[axis]), ("d", dilations[axis] - 1), ("p", pads[axis])
        parts.append("".join(f"{name}{letter}{length}" for name, length in (*lengths, *moves)))
    return "_".join(parts)


def _kernel_shape(place: ir.Node, source: Shape, weight: Shape, *, pooling: bool) -> Shape:
    """Return the kernel shape: from the attribute, else from the weight, else the whole input."""
    space = len(source) - 2
    said = place.attributes.get_ints("kernel_shape", ())
    if said:
        return tuple(said)
    if len(weight) >= len(source):  # groups may have an axis of their own
        return weight[-space:]
    for value in () if pooling else place.inputs[1:]:
        if value is not None and value.const_value is not None and len(value.const_value.shape) == space + 2:
            return tuple(value.const_value.shape.numpy()[2:])
    return source[2:] if pooling else (1,) * space
