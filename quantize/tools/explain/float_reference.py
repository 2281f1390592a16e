"""The time of float kernels for the work of integer kernels: the same shapes, timed alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .... import RequantError
from ....calibration.model.session import Array
from ....transforms.graphs.queries import MS
from ...model.files import serialize
from ...runtime.executed import Kernel
from ...runtime.profile import profiled

LEAST_SHARE = 0.01  # ignore kernels below 1 % of the time
MOST = 24  # distinct float operators that are timed
TIMES = 8
OPSET = 17
LARGE = 2**26  # elements of the largest weight or activation that is timed

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FloatOperator:
    """A float operator that does the work of an integer kernel.

    Attributes:
        op: The operator, ``domain.Operator`` outside the standard domain.
        inputs: Shapes of its computed inputs.
        weights: Shapes of its constants.
        attributes: Its attributes.
    """

    op: str
    inputs: tuple[Shape, ...]
    weights: tuple[Shape, ...] = ()
    attributes: tuple[tuple[str, int | float | str | tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class FloatReference:
    """The float kernel for the work of an integer kernel.

    Attributes:
        microseconds: Time of the float kernel.
        what: The text for the integer kernel; kernels with the same text are reported together.
        partner: Another executed node whose work the float kernel includes; empty if there is none.
    """

    microseconds: float
    what: str
    partner: str = ""


def float_references(kernels: Iterable[Kernel], *, threads: int) -> dict[str, FloatReference]:
    """Return the float kernel for the work of each executed node on 8-bit tensors, by the node's name.

    Only kernels above `LEAST_SHARE` of the time are timed, all in one session. The times exclude the conversions that a
    float kernel would need.

    Args:
        kernels: The executed kernels.
        threads: Threads inside one operator.
    """
    kernels = list(kernels)
    least = LEAST_SHARE * sum(kernel.run.microseconds for kernel in kernels)
    pairs = _gates(kernels)
    alike: dict[FloatOperator, list[Kernel]] = {}
    for kernel in kernels:
        name = kernel.run.node
        if name in pairs:
            each: FloatOperator | None = FloatOperator(f"{MS}.QuickGelu", kernel.run.inputs[:1], (), (("alpha", 1.0),))
        elif name in pairs.values() or kernel.kind not in ("compute", "rest") or not _eight_bits(kernel):
            continue
        else:
            each = float_operator(kernel)
        if each is not None:
            alike.setdefault(each, []).append(kernel)
    spent = {each: sum(kernel.run.microseconds for kernel in group) for each, group in alike.items()}
    chosen = sorted((each for each in alike if spent[each] >= least), key=lambda each: -spent[each])[:MOST]
    try:
        times = timed(chosen, threads=threads)
    except RequantError:  # the runtime has no float kernel for one of the operators
        return {}
    found = {}
    for each, time in times.items():
        for kernel in alike[each]:
            partner = pairs.get(kernel.run.node, "")
            what = "SiLU as QLinearSigmoid and QLinearMul" if partner else f"{kernel.run.op} on 8-bit tensors"
            found[kernel.run.node] = FloatReference(kernel.run.steps * time, what, partner)
    return found


def _gates(kernels: Iterable[Kernel]) -> dict[str, str]:
    """Return the QLinearMul that multiplies the input and the output of each QLinearSigmoid: one operator in float."""
    found = {}
    for kernel in kernels:
        place = kernel.place
        if kernel.run.op != "QLinearSigmoid" or place is None:
            continue
        users = [use.node for use in place.outputs[0].uses()]
        if len(users) == 1 and users[0].op_type == "QLinearMul" and place.inputs[0] in users[0].inputs:
            found[kernel.run.node] = users[0].name or ""
    return found


def _eight_bits(kernel: Kernel) -> bool:
    return kernel.run.reads[:1] in (("uint8",), ("int8",))


def timed(operators: Iterable[FloatOperator], *, threads: int) -> dict[FloatOperator, float]:
    """Return the microseconds of each operator's kernel, without layout changes.

    Raises:
        RequantError: The runtime does not load or run one of the operators.
    """
    operators = list(operators)
    if not operators:
        return {}
    random = np.random.default_rng(0)
    inputs: list[ir.Value] = []
    nodes: list[tuple[ir.Node, list[ir.Value]]] = []
    feed: dict[str, Array] = {}
    for index, each in enumerate(operators):
        read = [ir.val(f"i{index}_{k}", ir.DataType.FLOAT, shape) for k, shape in enumerate(each.inputs)]
        held = [_constant(f"w{index}_{k}", shape, random) for k, shape in enumerate(each.weights)]
        attributes = ir.convenience.convert_attributes(dict(each.attributes))
        domain, _, op = each.op.rpartition(".")
        node = ir.Node(domain, op, [*read, *held], attributes, num_outputs=1, name=f"operator{index}")
        node.outputs[0].name, node.outputs[0].type = f"y{index}", ir.TensorType(ir.DataType.FLOAT)
        inputs += read
        nodes.append((node, held))
        feed.update({value.name or "": _draw(shape, random) for value, shape in zip(read, each.inputs, strict=True)})
    graph = ir.Graph(
        inputs,
        [node.outputs[0] for node, _ in nodes],
        nodes=[node for node, _ in nodes],
        initializers=[value for _, held in nodes for value in held],
        opset_imports={"": OPSET, MS: 1},
        name="float_reference",
    )
    profile = profiled(serialize(ir.Model(graph, ir_version=8)), feed, threads=threads, times=TIMES)
    named = {run.node.removesuffix("_nchwc"): run.microseconds for run in profile.runs}
    found = ((each, named.get(f"operator{k}", named.get(f"y{k}", math.nan))) for k, each in enumerate(operators))
    return {each: time for each, time in found if not math.isnan(time)}


def _draw(shape: Shape, random: np.random.Generator) -> Array:
    return random.standard_normal(shape, np.float32)


def _constant(name: str, shape: Shape, random: np.random.Generator) -> ir.Value:
    tensor = ir.tensor(_draw(shape, random), name=name)
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor)


def float_operator(kernel: Kernel) -> FloatOperator | None:
    """Return the float operator for the work of an integer kernel; None if there is none."""
    make = FLOAT_OPERATORS.get(kernel.run.op)
    if make is None or kernel.place is None or not kernel.run.inputs or not all(kernel.run.inputs[0]):
        return None
    each = make(kernel, kernel.place)
    if each is None or max(math.prod(shape) for shape in (*each.inputs, *each.weights)) > LARGE:
        return None
    return each


def _plain(kernel: Kernel, place: ir.Node, shape: Shape) -> Shape:
    """Return a shape with the channels second, if the node has them last."""
    last = place.attributes.get_int("channels_last", 0) or place.op_type.startswith("Nhwc")
    return (shape[0], shape[-1], *shape[1:-1]) if last and len(shape) > 2 else shape


def _kept(place: ir.Node, *names: str) -> tuple[tuple[str, int | float | str | tuple[int, ...]], ...]:
    """Return the named attributes that a node has."""
    found = ((name, place.attributes[name].value) for name in names if name in place.attributes)
    return tuple((name, tuple(value) if isinstance(value, (list, tuple)) else value) for name, value in found)


def _weight_shape(place: ir.Node, index: int) -> Shape | None:
    value = place.inputs[index] if index < len(place.inputs) else None
    if value is None or value.const_value is None:
        return None
    return tuple(int(n) for n in value.const_value.shape)  # type: ignore[arg-type]


WINDOW = ("kernel_shape", "pads", "strides", "dilations", "auto_pad")


def _convolution(kernel: Kernel, place: ir.Node) -> FloatOperator | None:
    weight = _weight_shape(place, 3 if place.op_type == "QLinearConv" else 1)
    if weight is None:
        return None
    return FloatOperator(
        "Conv", (_plain(kernel, place, kernel.run.inputs[0]),), (weight,), _kept(place, "group", *WINDOW)
    )


def _product(kernel: Kernel, place: ir.Node) -> FloatOperator | None:
    weight = _weight_shape(place, 1 if place.op_type == "MatMulIntegerToFloat" else 3)
    if weight is None:
        return None
    if place.op_type == "QGemm" and place.attributes.get_int("transB", 0) == 1:
        weight = (weight[1], weight[0])
    return FloatOperator("MatMul", (kernel.run.inputs[0],), (weight,))


def _pool(op: str) -> Callable[[Kernel, ir.Node], FloatOperator | None]:
    def make(kernel: Kernel, place: ir.Node) -> FloatOperator | None:
        window = () if op.startswith("Global") else _kept(place, *WINDOW[:3], "ceil_mode", "count_include_pad")
        return FloatOperator(op, (_plain(kernel, place, kernel.run.inputs[0]),), (), window)

    return make


def _unary(op: str, *attributes: str) -> Callable[[Kernel, ir.Node], FloatOperator | None]:
    return lambda kernel, place: FloatOperator(op, kernel.run.inputs[:1], (), _kept(place, *attributes))


def _binary(op: str) -> Callable[[Kernel, ir.Node], FloatOperator | None]:
    def make(kernel: Kernel, place: ir.Node) -> FloatOperator | None:
        tensors = [s for s, t in zip(kernel.run.inputs, kernel.run.reads, strict=True) if t in ("uint8", "int8")]
        shapes = [shape for shape in tensors if shape not in ((), (1,))]  # scales and zero points
        return FloatOperator(op, (shapes[0], shapes[-1])) if shapes else None

    return make


FLOAT_OPERATORS: Mapping[str, Callable[[Kernel, ir.Node], FloatOperator | None]] = {
    **dict.fromkeys(("QLinearConv", "ConvInteger"), _convolution),
    **dict.fromkeys(("QLinearMatMul", "QGemm", "MatMulIntegerToFloat"), _product),
    **dict.fromkeys(("MaxPool", "NhwcMaxPool"), _pool("MaxPool")),
    "QLinearAveragePool": _pool("AveragePool"),
    "QLinearGlobalAveragePool": _pool("GlobalAveragePool"),
    "QLinearSoftmax": _unary("Softmax", "axis"),
    "QLinearSigmoid": _unary("Sigmoid"),
    "QLinearLeakyRelu": _unary("LeakyRelu", "alpha"),
    "QLinearAdd": _binary("Add"),
    "QLinearMul": _binary("Mul"),
}
"""The function that makes the float operator of each integer kernel."""
