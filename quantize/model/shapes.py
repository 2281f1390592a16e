"""Lengths of free axes, from options or data, and the shapes of all tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from ... import RequantError, UnknownNameError
from ...calibration.model.session import Array
from ...system.given import check_kind, checked_integer, normalise_fields
from ...system.numbers import whole_number
from ...transforms.fold_constants import fold_constants
from ...transforms.graphs.inference import infer, inferred
from ...transforms.graphs.queries import computing_graphs, constant, is_standard, plain_shape
from ...transforms.graphs.rewriter import LARGE, quiet
from ...transforms.graphs.tensors import load_tensors
from ...transforms.inline_functions import ORIGIN, inline_functions
from ...transforms.pipelines.verify import KEPT_AWAY
from .types import runtime_types

SHAPES = frozenset({"Shape", "Size"})
RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

Shape: TypeAlias = tuple[int, ...]
Axes: TypeAlias = tuple[int | str | None, ...]
"""Lengths of axes, names of free axes, None for a free axis without a name."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the free axes of a model's inputs.

    Attributes:
        shapes: Whole shapes, by input.
        dims: Lengths, by the name of an axis in the model.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what is no length.

        Raises:
            RequantError: A length is no integer, or below 0.
        """
        normalise_fields(self)
        for name, shape in self.shapes.items():
            check_kind(shape, (tuple, list), f"the shape of input {name!r} must be a tuple")
        dims = {name: checked_integer(length, f"the length of axis {name!r}", 0) for name, length in self.dims.items()}
        shapes = {
            name: tuple(checked_integer(length, f"a length of input {name!r}", 0) for length in shape)
            for name, shape in self.shapes.items()
        }
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "shapes", shapes)

    def __bool__(self) -> bool:
        """Whether any length is given."""
        return bool(self.shapes or self.dims)

    @classmethod
    def of(cls, feed: Mapping[str, Array]) -> Lengths:
        """Return the shapes of a feed."""
        return cls({name: tuple(array.shape) for name, array in feed.items()})


def parse_lengths(shapes: Iterable[str], dims: Iterable[str]) -> Lengths:
    """Read ``input=1,3,224,224`` and ``batch=1``; the name of an input may contain ``=``.

    >>> parse_lengths(["x=1,3"], ["batch=2"])
    Lengths(shapes={'x': (1, 3)}, dims={'batch': 2})

    Raises:
        RequantError: A text has another form, or a name has two different values.
    """
    found: dict[str, Shape] = {}
    for text in shapes:
        name, equals, lengths = text.rpartition("=")
        parts = [whole_number(part.strip()) for part in lengths.split(",")] if lengths.strip() else []
        shape = tuple(part for part in parts if part is not None)
        if not equals or not name or len(shape) < len(parts):
            raise RequantError(f"{text!r} is not the shape of an input; write it as input=1,3,224,224")
        if found.setdefault(name, shape) != shape:
            raise RequantError(f"input {name!r} is given two shapes")
    named: dict[str, int] = {}
    for text in dims:
        name, equals, length = text.rpartition("=")
        number = whole_number(length.strip())
        if not equals or not name or number is None:
            raise RequantError(f"{text!r} is not the length of an axis; write it as batch=1")
        if named.setdefault(name, number) != number:
            raise RequantError(f"axis {name!r} is given two lengths")
    return Lengths(found, named)


def inputs_of(model: ir.Model) -> tuple[ir.Value, ...]:
    """Return the inputs that a caller must feed; inputs that are initializers have a default value."""
    return tuple(value for value in model.graph.inputs if not value.is_initializer())


def bind(model: ir.Model, lengths: Lengths) -> dict[str, int]:
    """Set the lengths of the inputs of a model, in place, and return the lengths by axis name.

    Raises:
        RequantError: As `resolve`.
    """
    inputs = {str(value.name): value for value in inputs_of(model)}
    axes = {name: plain_shape(v) for name, v in inputs.items()}
    shapes, dims = resolve(axes, lengths)
    for name, shape in shapes.items():
        if shape is not None:
            inputs[name].shape = ir.Shape(shape)
    return dims


def resolve(inputs: Mapping[str, Axes | None], lengths: Lengths) -> tuple[dict[str, Axes | None], dict[str, int]]:
    """Return the axes of inputs with the given lengths, and the lengths by axis name.

    Args:
        inputs: The axes of each input; None for an unknown rank.
        lengths: The given lengths.

    Raises:
        RequantError: An input or axis does not exist, an input has another rank or a fixed axis of another length, or
            two axes of the same name have different lengths.
    """
    for name in lengths.shapes:
        if name not in inputs:
            raise UnknownNameError("input", name, inputs)
    symbols = {axis for axes in inputs.values() for axis in axes or () if isinstance(axis, str)}
    for name in lengths.dims:
        if name not in symbols:
            raise UnknownNameError("free axis", name, symbols)
    dims = dict(lengths.dims)
    for name, shape in lengths.shapes.items():
        _match(name, inputs[name], shape, dims)
    found: dict[str, Axes | None] = {}
    for name, axes in inputs.items():
        given = lengths.shapes.get(name)
        found[name] = given if given is not None or axes is None else tuple(_length(axis, dims) for axis in axes)
    return found, dims


def _length(axis: int | str | None, dims: Mapping[str, int]) -> int | str | None:
    """Return the length of an axis, or its name if the length is unknown."""
    return dims.get(axis, axis) if isinstance(axis, str) else axis


def _match(name: str, axes: Axes | None, shape: Shape, dims: dict[str, int]) -> None:
    """Check a shape against the axes in the model, and add the lengths of its named axes to `dims`."""
    if axes is None:
        return
    wanted = ", ".join("?" if axis is None else str(axis) for axis in axes)
    given = ", ".join(map(str, shape))
    if len(axes) != len(shape):
        raise RequantError(f"input {name!r} has the shape ({wanted}), not ({given})")
    for axis, length in zip(axes, shape, strict=True):
        if isinstance(axis, int) and axis != length:
            raise RequantError(f"input {name!r} has the shape ({wanted}), which ({given}) does not fit")
        if isinstance(axis, str) and dims.setdefault(axis, length) != length:
            raise RequantError(f"axis {axis!r} of input {name!r} has two lengths, {length} and {dims[axis]}")


def free_axes(model: ir.Model) -> tuple[str, ...]:
    """Return the free axes of the inputs: their names, or ``"axis 0 of 'x'"`` for an axis without a name."""
    return open_axes(
        {
            str(value.name): plain_shape(value)
            for value in inputs_of(model)
            if value.shape is not None or isinstance(value.type, ir.TensorType)
        }
    )


def open_axes(inputs: Mapping[str, Axes | None]) -> tuple[str, ...]:
    """Return the axes without a length, by name or position."""
    found: dict[str, None] = {}
    for name, axes in inputs.items():
        if axes is None:
            found[f"the rank of {name!r}"] = None
        for place, axis in enumerate(axes or ()):
            if not isinstance(axis, int):
                found[axis if axis is not None else f"axis {place} of {name!r}"] = None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Shaped:
    """A model with inferred types and shapes.

    Attributes:
        model: The model, with inlined functions, and with constants as initializers.
        steps: The maximum number of runs of the body of each Loop and Scan; None if unknown.
    """

    model: ir.Model
    steps: Mapping[ir.Node, int | None]


def shaped(model: ir.Model, lengths: Lengths) -> Shaped:
    """Return a copy with inlined functions and with all types and shapes that can be inferred.

    Recorded shapes of inner tensors count only where inference finds none. Only small constants are read, because
    shapes may be computed from them. ONNX Runtime, which loads the model, infers the operators that onnx does not know.

    Args:
        model: The model; it does not change.
        lengths: Lengths of its inputs' free axes.

    Raises:
        RequantError: `lengths` does not fit the model.
    """
    copy = model.clone()
    inline_functions(copy, native=True)
    for node in copy.graph.all_nodes():
        node.metadata_props.pop(ORIGIN, None)
    with quiet():
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(copy)
    load_tensors(copy, keep=lambda tensor: tensor.nbytes > KEPT_AWAY)
    dims = bind(copy, lengths)
    for value in [value for graph in copy.graphs() if graph is not copy.graph for value in graph.inputs]:
        axes = plain_shape(value)
        if axes is not None:
            value.shape = ir.Shape([_length(axis, dims) for axis in axes])
    recorded: dict[ir.Value, ir.Shape] = {}
    for value in _results(copy):
        axes = plain_shape(value)
        if axes is not None:
            recorded[value] = ir.Shape([_length(axis, dims) for axis in axes])
            value.shape = None
    infer(copy)
    changed = _infer_with_runtime(copy)
    for value, shape in recorded.items():
        finer = _finer(value.shape, shape)
        changed = changed or finer != value.shape
        value.shape = finer
    steps = _steps(copy)
    if changed or steps:
        infer(copy)
    if not free_axes(copy) and any(not _known(value) for value in _results(copy)):
        _shapes_of_folded(copy)
    return Shaped(copy, steps)


def fed_shapes(model: ir.Model, feed: Mapping[str, Array]) -> dict[str, Shape]:
    """Return the shapes of tensors for the inputs of a feed, as far as they can be inferred."""
    fed = model.clone()
    for value in fed.graph.inputs:
        array = feed.get(str(value.name))
        value.shape = value.shape if array is None else ir.Shape(array.shape)
    for node in fed.graph:
        for value in node.outputs:
            value.shape = None  # recorded free axes would stay free
    found = {}
    for name, value in inferred(fed).items():
        if value.shape is not None and all(isinstance(axis, int) for axis in value.shape):
            found[name] = tuple(axis for axis in value.shape if isinstance(axis, int))
    return found


def of_shapes_alone(model: ir.Model) -> frozenset[str]:
    """Return the tensors that do not depend on the values of any input, for instance positions, also those in bodies.

    They depend on constants, and on the shapes of tensors (Shape, Size). A node with a body counts as depending on
    values, because its body reads tensors that are not among its inputs.
    """
    alone: set[ir.Value] = set()
    for graph in computing_graphs(model):
        alone |= {value for value in graph.initializers.values() if not value.is_graph_input()}
        for node in graph:
            has_body = any(attribute.type is ir.AttributeType.GRAPH for attribute in node.attributes.values())
            fixed = node.op_type in SHAPES or all(value is None or value in alone for value in node.inputs)
            if fixed and not has_body and node.op_type not in RANDOM:
                alone |= set(node.outputs)
    return frozenset(str(value.name) for value in alone)


def _results(model: ir.Model) -> list[ir.Value]:
    """Return the outputs of all nodes, also in bodies."""
    return [value for graph in model.graphs() for node in graph for value in node.outputs]


def _known(value: ir.Value) -> bool:
    return not value.name or (value.shape is not None and value.shape.is_static())


def _folded(model: ir.Model) -> ir.Model:
    """Return a copy with folded constants and shapes; nodes that read a large weight stay."""
    plain = model.clone()
    reads = [node for node in plain.graph.all_nodes() if any(_is_large(value) for value in node.inputs)]
    fold_constants(plain, exclude_node=tuple(str(node.name) for node in reads if node.name))
    return plain


def _is_large(value: ir.Value | None) -> bool:
    tensor = constant(value)
    return tensor is not None and tensor.nbytes > LARGE


def _shapes_of_folded(model: ir.Model) -> None:
    """Set the shapes that are known after constants and shapes are folded."""
    plain = _folded(model)
    infer(plain)
    for graph, other in zip(model.graphs(), plain.graphs(), strict=False):
        found = {value.name: value.shape for node in other for value in node.outputs}
        found |= {value.name: value.shape for value in other.initializers.values()}
        for value in (value for node in graph for value in node.outputs):
            shape = found.get(value.name)
            if not _known(value) and shape is not None:
                value.shape = _finer(value.shape, shape)


def _steps(model: ir.Model) -> dict[ir.Node, int | None]:
    """Return how often bodies run, and set this length in the stacked outputs of a Loop."""
    loops = [node for node in model.graph.all_nodes() if is_standard(node, "Loop", "Scan")]
    found: dict[ir.Node, int | None] = {}
    folded: dict[str | None, ir.Value | None] = {}
    if any(node.op_type == "Loop" for node in loops):
        plain = _folded(model)
        folded = {node.name: node.inputs[0] for node in plain.graph.all_nodes() if node.op_type == "Loop"}
    for node in loops:
        if node.op_type == "Scan":
            found[node] = _scanned(node)
            continue
        most = constant(folded.get(node.name))
        found[node] = None if most is None else max(0, int(most.numpy().reshape(())))
        carried = len(node.inputs) - 2
        body = node.attributes["body"].as_graph()
        for value, result in zip(node.outputs[:carried], body.outputs[1:], strict=False):
            if value.shape is None:  # onnx does not assume the same shape in every step
                value.shape = result.shape
        for value in node.outputs[carried:] if found[node] is not None else ():
            if value.shape is not None:
                value.shape = ir.Shape([found[node], *list(value.shape)[1:]])
    return found


def _scanned(node: ir.Node) -> int | None:
    """Return the length of the axis over which a Scan of opset 9 or later iterates."""
    count = node.attributes.get_int("num_scan_inputs", 0)
    value = node.inputs[len(node.inputs) - count] if 0 < count <= len(node.inputs) else None
    axis = next(iter(node.attributes.get_ints("scan_input_axes", [0])))
    lengths = value.shape.dims if value is not None and value.shape is not None else ()
    length = lengths[axis] if -len(lengths) <= axis < len(lengths) else None
    return length if isinstance(length, int) else None


def _finer(found: ir.Shape | None, said: ir.Shape) -> ir.Shape:
    """Return the inferred shape, with recorded lengths for unknown axes."""
    if found is None or len(found) != len(said):
        return said if found is None else found
    return ir.Shape(
        [a if isinstance(a, int) or not isinstance(b, int) else b for a, b in zip(found, said, strict=True)]
    )


def _infer_with_runtime(model: ir.Model) -> bool:
    """Set the shapes that onnx does not infer, and ONNX Runtime does, in the main graph; return whether there are any.

    A model that the runtime refuses keeps its unknown shapes.
    """
    open_axes = bool(free_axes(model))
    values = {str(v.name): v for node in model.graph for v in node.outputs if v.name}
    unknown = [
        name
        for name, value in values.items()
        if (value.shape is None or (not open_axes and not value.shape.is_static()))
        and (value.type is None or isinstance(value.type, ir.TensorType))
    ]
    changed = False
    for name, found in runtime_types(model, unknown).items():
        value = values[name]
        if value.dtype is None and found.dtype is not None:
            value.dtype = found.dtype
        if found.axes:
            finer = _finer(value.shape, ir.Shape(found.axes))
            changed = changed or finer != value.shape
            value.shape = finer
    return changed
