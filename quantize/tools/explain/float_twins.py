"""What an integer kernel would take in float: the same work on the same shapes, timed alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .... import RequantError
from ....calibration.session import Array
from ....transforms.ops import MS
from ...model.files import serialize
from ...runtime.executed import Kernel
from ...runtime.profile import profiled

LEAST_SHARE = 0.01  # of the time; a kernel that takes less explains nothing
MOST = 24  # distinct twins
TIMES = 8
OPSET = 17
LARGE = 2**26  # elements of a weight or an activation of which no copy is made to be timed

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Twin:
    """A float operator that does the work of an integer kernel.

    Attributes:
        op: The operator, ``domain.Operator`` outside the standard domain.
        inputs: Shapes of what it reads.
        weights: Shapes of its constants.
        attributes: What is set of it.
    """

    op: str
    inputs: tuple[Shape, ...]
    weights: tuple[Shape, ...] = ()
    attributes: tuple[tuple[str, int | float | str | tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Rival:
    """What the work of an integer kernel would take in float.

    Attributes:
        microseconds: Of the float kernel.
        what: How the integer kernel is called: those of one name are told of together.
        partner: A further executed node whose work the float kernel does as well; empty for none.
    """

    microseconds: float
    what: str
    partner: str = ""


def rivals(kernels: Iterable[Kernel], *, threads: int) -> dict[str, Rival]:
    """Return by name of an executed node the float kernel that would do its work.

    Only kernels of 8-bit tensors that matter are timed, all in one session. What the conversions around a float
    kernel would cost is not in it.

    Args:
        kernels: What ran.
        threads: Threads inside one operator.
    """
    kernels = list(kernels)
    least = LEAST_SHARE * sum(kernel.run.microseconds for kernel in kernels)
    pairs = _gates(kernels)
    alike: dict[Twin, list[Kernel]] = {}
    for kernel in kernels:
        name = kernel.run.node
        if name in pairs:
            twin: Twin | None = Twin(f"{MS}.QuickGelu", kernel.run.inputs[:1], (), (("alpha", 1.0),))
        elif name in pairs.values() or kernel.kind not in ("compute", "rest") or not _eight_bits(kernel):
            continue
        else:
            twin = twin_of(kernel)
        if twin is not None:
            alike.setdefault(twin, []).append(kernel)
    spent = {twin: sum(kernel.run.microseconds for kernel in group) for twin, group in alike.items()}
    chosen = sorted((twin for twin in alike if spent[twin] >= least), key=lambda twin: -spent[twin])[:MOST]
    try:
        times = timed(chosen, threads=threads)
    except RequantError:  # a form that the runtime does not take in float: then there is nothing to compare with
        return {}
    found = {}
    for twin, time in times.items():
        for kernel in alike[twin]:
            partner = pairs.get(kernel.run.node, "")
            what = "SiLU as QLinearSigmoid and QLinearMul" if partner else f"{kernel.run.op} on 8-bit tensors"
            found[kernel.run.node] = Rival(time, what, partner)
    return found


def _gates(kernels: Iterable[Kernel]) -> dict[str, str]:
    """Return by QLinearSigmoid the QLinearMul that multiplies its result by its input: one operator in float."""
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


def timed(twins: Iterable[Twin], *, threads: int) -> dict[Twin, float]:
    """Return the microseconds that each operator's kernel takes, alone; without the layout changes around it.

    Raises:
        RequantError: The runtime does not take one of them.
    """
    twins = list(twins)
    if not twins:
        return {}
    random = np.random.default_rng(0)
    inputs: list[ir.Value] = []
    nodes: list[tuple[ir.Node, list[ir.Value]]] = []
    feed: dict[str, Array] = {}
    for index, twin in enumerate(twins):
        read = [ir.val(f"i{index}_{k}", ir.DataType.FLOAT, shape) for k, shape in enumerate(twin.inputs)]
        held = [_constant(f"w{index}_{k}", shape, random) for k, shape in enumerate(twin.weights)]
        attributes = ir.convenience.convert_attributes(dict(twin.attributes))
        domain, _, op = twin.op.rpartition(".")
        node = ir.Node(domain, op, [*read, *held], attributes, num_outputs=1, name=f"twin{index}")
        node.outputs[0].name, node.outputs[0].type = f"y{index}", ir.TensorType(ir.DataType.FLOAT)
        inputs += read
        nodes.append((node, held))
        feed.update({value.name or "": _draw(shape, random) for value, shape in zip(read, twin.inputs, strict=True)})
    graph = ir.Graph(
        inputs,
        [node.outputs[0] for node, _ in nodes],
        nodes=[node for node, _ in nodes],
        initializers=[value for _, held in nodes for value in held],
        opset_imports={"": OPSET, MS: 1},
        name="twins",
    )
    profile = profiled(serialize(ir.Model(graph, ir_version=8)), feed, threads=threads, times=TIMES)
    named = {run.node.removesuffix("_nchwc"): run.microseconds for run in profile.runs}
    found = ((twin, named.get(f"twin{k}", named.get(f"y{k}", math.nan))) for k, twin in enumerate(twins))
    return {twin: time for twin, time in found if not math.isnan(time)}


def _draw(shape: Shape, random: np.random.Generator) -> Array:
    return random.standard_normal(shape, np.float32)


def _constant(name: str, shape: Shape, random: np.random.Generator) -> ir.Value:
    tensor = ir.tensor(_draw(shape, random), name=name)
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor)


def twin_of(kernel: Kernel) -> Twin | None:
    """Return the float operator that does the work of an integer kernel; None where none is known."""
    make = TWINS.get(kernel.run.op)
    if make is None or kernel.place is None or not kernel.run.inputs or not all(kernel.run.inputs[0]):
        return None
    twin = make(kernel, kernel.place)
    if twin is None or max(math.prod(shape) for shape in (*twin.inputs, *twin.weights)) > LARGE:
        return None
    return twin


def _plain(kernel: Kernel, place: ir.Node, shape: Shape) -> Shape:
    """Return a shape with the channels second, where it has them last."""
    last = place.attributes.get_int("channels_last", 0) or place.op_type.startswith("Nhwc")
    return (shape[0], shape[-1], *shape[1:-1]) if last and len(shape) > 2 else shape


def _kept(place: ir.Node, *names: str) -> tuple[tuple[str, int | float | str | tuple[int, ...]], ...]:
    """Return attributes of a node as they are."""
    found = ((name, place.attributes[name].value) for name in names if name in place.attributes)
    return tuple((name, tuple(value) if isinstance(value, (list, tuple)) else value) for name, value in found)


def _weight_shape(place: ir.Node, index: int) -> Shape | None:
    value = place.inputs[index] if index < len(place.inputs) else None
    if value is None or value.const_value is None:
        return None
    return tuple(int(n) for n in value.const_value.shape)  # type: ignore[arg-type]


WINDOW = ("kernel_shape", "pads", "strides", "dilations", "auto_pad")


def _convolution(kernel: Kernel, place: ir.Node) -> Twin | None:
    weight = _weight_shape(place, 3 if place.op_type == "QLinearConv" else 1)
    if weight is None:
        return None
    return Twin("Conv", (_plain(kernel, place, kernel.run.inputs[0]),), (weight,), _kept(place, "group", *WINDOW))


def _product(kernel: Kernel, place: ir.Node) -> Twin | None:
    weight = _weight_shape(place, 1 if place.op_type == "MatMulIntegerToFloat" else 3)
    if weight is None:
        return None
    if place.op_type == "QGemm" and place.attributes.get_int("transB", 0) == 1:
        weight = (weight[1], weight[0])
    return Twin("MatMul", (kernel.run.inputs[0],), (weight,))


def _pool(op: str) -> Callable[[Kernel, ir.Node], Twin | None]:
    def make(kernel: Kernel, place: ir.Node) -> Twin | None:
        window = () if op.startswith("Global") else _kept(place, *WINDOW[:3], "ceil_mode", "count_include_pad")
        return Twin(op, (_plain(kernel, place, kernel.run.inputs[0]),), (), window)

    return make


def _unary(op: str, *attributes: str) -> Callable[[Kernel, ir.Node], Twin | None]:
    return lambda kernel, place: Twin(op, kernel.run.inputs[:1], (), _kept(place, *attributes))


def _binary(op: str) -> Callable[[Kernel, ir.Node], Twin | None]:
    def make(kernel: Kernel, place: ir.Node) -> Twin | None:
        tensors = [s for s, t in zip(kernel.run.inputs, kernel.run.reads, strict=True) if t in ("uint8", "int8")]
        shapes = [shape for shape in tensors if shape not in ((), (1,))]  # the others are zero points
        return Twin(op, (shapes[0], shapes[-1])) if shapes else None

    return make


TWINS: Mapping[str, Callable[[Kernel, ir.Node], Twin | None]] = {
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
"""By integer kernel, how the float operator that does the same is made of it."""
