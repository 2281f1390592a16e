"""One line per executed kernel in the form of oneDNN's verbose output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from .executed import SHORT, Kernel

Shape = tuple[int, ...]

PRIMITIVES = {
    **dict.fromkeys("Conv FusedConv NhwcFusedConv QLinearConv ConvInteger".split(), "convolution"),
    "ConvTranspose": "deconvolution",
    **dict.fromkeys(
        "MatMul FusedMatMul Gemm FusedGemm MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QLinearMatMul "
        "QGemm MatMulNBits".split(),
        "matmul",
    ),
    **dict.fromkeys(
        "QuantizeLinear DequantizeLinear DynamicQuantizeLinear Transpose ReorderInput ReorderOutput Cast".split(),
        "reorder",
    ),
    **dict.fromkeys(
        "MaxPool NhwcMaxPool AveragePool QLinearAveragePool GlobalAveragePool GlobalMaxPool "
        "QLinearGlobalAveragePool".split(),
        "pooling",
    ),
    **dict.fromkeys(
        "Relu LeakyRelu QLinearLeakyRelu Sigmoid QLinearSigmoid HardSigmoid HardSwish Tanh Clip Erf Gelu FastGelu "
        "BiasGelu QuickGelu Elu Exp Log Sqrt Abs".split(),
        "eltwise",
    ),
    **dict.fromkeys("Add QLinearAdd Mul QLinearMul Sub Div".split(), "binary"),
    **dict.fromkeys(("Softmax", "QLinearSoftmax"), "softmax"),
    **dict.fromkeys(("LayerNormalization", "SkipLayerNormalization"), "layer_normalization"),
    **dict.fromkeys(("Concat", "QLinearConcat"), "concat"),
    **dict.fromkeys(("Resize", "Upsample"), "resampling"),
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax"), "reduction"),
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"), "rnn"),
}
"""The oneDNN primitive of each operator; other operators keep their own name."""

ALGORITHMS = {
    **dict.fromkeys(("MaxPool", "NhwcMaxPool", "GlobalMaxPool"), "pooling_max"),
    **dict.fromkeys(("AveragePool", "QLinearAveragePool"), "pooling_avg_exclude_padding"),
    **dict.fromkeys(("GlobalAveragePool", "QLinearGlobalAveragePool"), "pooling_avg_exclude_padding"),
    **dict.fromkeys(("Add", "QLinearAdd"), "binary_add"),
    **dict.fromkeys(("Mul", "QLinearMul"), "binary_mul"),
    "Sub": "binary_sub",
    "Div": "binary_div",
    **dict.fromkeys(("Relu", "LeakyRelu", "QLinearLeakyRelu"), "eltwise_relu"),
    **dict.fromkeys(("Sigmoid", "QLinearSigmoid"), "eltwise_logistic"),
    "HardSigmoid": "eltwise_hardsigmoid",
    "HardSwish": "eltwise_hardswish",
    "Tanh": "eltwise_tanh",
    "Clip": "eltwise_clip",
    **dict.fromkeys(("Gelu", "BiasGelu"), "eltwise_gelu_erf"),
    "FastGelu": "eltwise_gelu_tanh",
    "QuickGelu": "eltwise_swish",
    **dict.fromkeys(("Softmax", "QLinearSoftmax"), "softmax_accurate"),
}
"""The oneDNN algorithm of each operator, also used for post-operations."""

WEIGHT_SCALES = {"QLinearConv": 4, "QLinearMatMul": 4, "QGemm": 4, "MatMulIntegerToFloat": 3}
"""The index of the input with the scale of the weight, by operator."""


def verbose_lines(kernels: Iterable[Kernel], flags: Sequence[str]) -> Iterator[str]:
    """Write each kernel as a line of oneDNN's verbose output.

    Args:
        kernels: The executed kernels in order.
        flags: The CPU's features. The width of its registers is the block of blocked layouts.
    """
    block = 8 if "avx2" in flags and "avx512bw" not in flags else 16
    for kernel in kernels:
        primitive = PRIMITIVES.get(kernel.run.op, kernel.run.op.lower())
        fields = [
            "onednn_verbose",
            "exec",
            "cpu",
            primitive,
            f"ort:{kernel.spelled}",
            "undef" if primitive == "reorder" else "forward_inference",
            _memory(kernel, block),
            _attributes(kernel),
            _auxiliary(kernel, primitive),
            _problem(kernel, primitive),
            f"{kernel.run.microseconds / 1000:g}",
        ]
        yield ",".join(fields)


def _memory(kernel: Kernel, block: int) -> str:
    """Write source, weight and destination with their types and layouts."""
    run, layout = kernel.run, kernel.layout
    before, after = _turned(kernel) if kernel.kind == "layout" else (layout, layout)
    found = []
    if run.reads:
        found.append(f"src_{_short(run.reads[0])}::blocked:{_tag(run.inputs[0], before, block)}::f0")
    if kernel.weight:
        found.append(f"wei_{kernel.weight}::any::f0")  # packed by the runtime in an unknown order
    if run.writes:
        found.append(f"dst_{_short(run.writes[0])}::blocked:{_tag(run.outputs[0], after, block)}::f0")
    return " ".join(found)


def _turned(kernel: Kernel) -> tuple[str, str]:
    """Return the layouts before and after a layout change."""
    if kernel.run.op == "Transpose":
        return ("NCHW", "NHWC") if kernel.layout == "NHWC" else ("NHWC", "NCHW")
    last = kernel.place is not None and kernel.place.attributes.get_int("channels_last", 0) != 0
    plain = "NHWC" if last else "NCHW"
    return (plain, "NCHWc") if kernel.run.op == "ReorderInput" else ("NCHWc", plain)


def _short(dtype: str) -> str:
    return SHORT.get(dtype, dtype)


def _tag(shape: Shape, layout: str, block: int) -> str:
    """Return oneDNN's layout tag: axes as letters in the order of memory, blocked axes as capitals."""
    letters = "abcdefghijkl"[: len(shape)]
    if layout == "NHWC" and len(shape) > 2:
        return f"a{letters[2:]}b"
    if layout == "NCHWc" and len(shape) > 2:
        return f"aB{letters[2:]}{block}b"
    return letters or "a"


def _attributes(kernel: Kernel) -> str:
    """Write scales, zero points, and the operators fused behind a product."""
    found, index, place = [], WEIGHT_SCALES.get(kernel.run.op), kernel.place
    if index is not None and place is not None:
        scale = place.inputs[index] if index < len(place.inputs) else None
        held = scale.const_value if scale is not None else None
        mask = 1 if held is not None and held.size > 1 else 0
        out = "+dst:0:f32" if kernel.run.writes[:1] in (("uint8",), ("int8",)) else ""
        found += [f"attr-scales:src0:0:f32{out}+wei:{mask}:f32", f"attr-zero-points:src0:0:s32{out.replace('f', 's')}"]
    posts = [ALGORITHMS[op] for op in kernel.absorbs if ALGORITHMS.get(op, "").startswith(("eltwise", "binary"))]
    if kernel.kind == "compute" and posts:
        found.append("attr-post-ops:" + "+".join(posts))
    return " ".join(found)


def _auxiliary(kernel: Kernel, primitive: str) -> str:
    if primitive in ("convolution", "deconvolution"):
        return f"alg:{primitive}_auto"
    algorithm = ALGORITHMS.get(kernel.run.op)
    return f"alg:{algorithm}" if algorithm else ""


def problem(kernel: Kernel) -> str:
    """Write the shapes of a kernel's problem; for a convolution ``mb1_ic32oc64_ih14oh14kh5sh1dh0ph2_iw14...``."""
    return _problem(kernel, PRIMITIVES.get(kernel.run.op, kernel.run.op.lower()))


def _problem(kernel: Kernel, primitive: str) -> str:
    """Write the shapes in the order batch, channels, spatial axes."""
    run = kernel.run
    if not run.inputs or not run.outputs:
        return "x".join(map(str, run.outputs[0])) if run.outputs else ""
    source, result = run.inputs[0], run.outputs[0]
    before = _turned(kernel)[0] if kernel.kind == "layout" else kernel.layout
    if before == "NHWC":
        source, result = _channels_second(source), _channels_second(result)
    if primitive == "matmul":
        return f"{_dims(source)}:{_dims((*source[-1:], *result[-1:]))}:{_dims(result)}"
    if primitive in ("convolution", "deconvolution", "pooling") and kernel.place is not None and len(source) > 2:
        return _window(kernel.place, source, result, pooling=primitive == "pooling")
    if primitive == "binary":
        tensors = [s for s, t in zip(run.inputs, run.reads, strict=True) if t == run.reads[0] and s not in ((), (1,))]
        return ":".join(_dims(shape) for shape in (tensors[0], tensors[-1])) if tensors else _dims(source)
    return _dims(source)


def _dims(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "1"


def _channels_second(shape: Shape) -> Shape:
    return (shape[0], shape[-1], *shape[1:-1]) if len(shape) > 2 else shape


def _window(place: ir.Node, source: Shape, result: Shape, *, pooling: bool) -> str:
    """Write the shapes of a convolution or pool: ``mb1_ic32oc64_ih14oh14kh5sh1dh0ph2_iw14ow14kw5sw1dw0pw2``."""
    space = len(source) - 2
    kernel = _kernel_shape(place, source, space, pooling=pooling)
    strides = tuple(place.attributes.get_ints("strides", [1] * space))
    dilations = tuple(place.attributes.get_ints("dilations", [1] * space))
    pads = tuple(place.attributes.get_ints("pads", [0] * 2 * space))
    group = place.attributes.get_int("group", 1)
    head = f"mb{source[0]}ic{source[1]}" if pooling else f"mb{source[0]}_ic{source[1]}oc{result[1]}"
    parts = [(f"g{group}" if group > 1 else "") + head]
    for axis, letter in enumerate("dhw"[-space:]):
        lengths = ("i", source[2 + axis]), ("o", result[2 + axis]), ("k", kernel[axis])
        moves = ("s", strides[axis]), ("d", dilations[axis] - 1), ("p", pads[axis])
        parts.append("".join(f"{name}{letter}{length}" for name, length in (*lengths, *moves)))
    return "_".join(parts)


def _kernel_shape(place: ir.Node, source: Shape, space: int, *, pooling: bool) -> Shape:
    """Return the kernel shape: from the attribute, else from the weight, else the whole input."""
    said = place.attributes.get_ints("kernel_shape", ())
    if said:
        return tuple(said)
    for value in () if pooling else place.inputs[1:]:
        if value is not None and value.const_value is not None and len(value.const_value.shape) == space + 2:
            return tuple(int(n) for n in value.const_value.shape[2:])  # type: ignore[arg-type]
    return source[2:] if pooling else (1,) * space
