"""`inspect_model`: the parts of a model, the costs of a run, and the share of integer products."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from .... import RequantError
from ....calibration.data.sources import DataSource
from ....calibration.model.bodies import bodies_of
from ....system.given import or_default
from ....transforms.graphs.queries import constant, every_node, key, node_name, producer_of
from ....transforms.graphs.tensors import external_tensors
from ....transforms.pipelines.verify import Port, signature
from ...model.files import load_model
from ...model.shapes import Lengths, Shape, Shaped, free_axes, inputs_of, shaped
from ...runtime.inputs import open_data
from ...runtime.macs import MACS, accuracy_level, counted_as, multiplies_integers, multiply_accumulates
from .constants import Counted, count_weights
from .run_shapes import with_shapes_of_run

Precision = Literal["int8", "weight-only", "float", ""]
EIGHT = frozenset({ir.DataType.INT8, ir.DataType.UINT8})
SMALL = EIGHT | {ir.DataType.INT4, ir.DataType.UINT4}
"""Types of at most 8 bits in which weights are stored."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node of the model, of a body, or of a called function.

    Attributes:
        name: Its name; for a node of a function, after the names of the calls.
        op: Its operator, ``domain.Operator`` outside the standard domain.
        inside: The names of the nodes around its body, outermost first.
        inputs: The names of its inputs; ``""`` for an absent one.
        outputs: The names of its outputs.
        types: The type and shape of each output, ``"FLOAT [1, 64, 7, 7]"``.
        steps: How often it runs, more than once in the body of a loop; None if unknown.
        macs: Multiply-accumulates of all steps; None if shapes are unknown.
        output_bytes: Bytes of its outputs in one step; None if shapes are unknown.
        precision: ``int8``, ``weight-only`` (float activations) or ``float`` for products; empty for other nodes.
    """

    name: str
    op: str
    inside: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: tuple[str, ...]
    steps: int | None
    macs: int | None
    output_bytes: int | None
    precision: Precision

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "precision": self.precision or None}


@dataclass(frozen=True, slots=True)
class Inspection:
    """The parts of a model and the costs of a run.

    Attributes:
        path: Its path.
        file_bytes: Bytes of the file.
        external: Bytes of each file of external data, by its name.
        ir_version: Version of the format.
        producer: The program that wrote it, with its version.
        opsets: The operator set version of each domain; the standard domain is ``ai.onnx``.
        metadata: Its ``metadata_props``.
        inputs: The inputs without a default value.
        outputs: The outputs.
        operators: The number of nodes of each operator, also in bodies and functions; a function counts once.
        functions: Its model-local functions.
        weights: Parameters and other constants.
        tensors: The number of computed tensors of each type; None is an unknown type.
        depends: The free axes on which shapes depend: their names, or ``"axis 0 of 'x'"``.
        unknown: Reasons why a count is unknown although all inputs have lengths.
        macs: Multiply-accumulates of a run; of an If, as the most expensive body has them; None if unknown.
        peak_bytes: The largest memory of computed tensors at one time, if each lives from its node to its last reader;
            None if unknown. An estimate: the runtime reuses memory and fuses nodes.
        nodes: Every node, in file order.
    """

    path: str
    file_bytes: int
    external: Mapping[str, int]
    ir_version: int
    producer: str
    opsets: Mapping[str, int]
    metadata: Mapping[str, str]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    operators: Mapping[str, int]
    functions: tuple[str, ...]
    weights: Counted
    tensors: Mapping[str | None, int]
    depends: tuple[str, ...]
    unknown: tuple[str, ...]
    macs: int | None
    peak_bytes: int | None
    nodes: tuple[NodeFacts, ...]

    @property
    def coverage(self) -> dict[str, float] | None:
        """The share of the multiply-accumulates in each precision, 0..1; None if unknown or without products."""
        counted: Counter[str] = Counter()
        for node in self.nodes:
            if node.precision and node.macs is not None:
                counted[node.precision] += node.macs
        total = sum(counted.values())
        if self.macs is None or not total:
            return None
        return {name: counted[name] / total for name in ("int8", "weight-only", "float")}

    @property
    def products(self) -> dict[str, int]:
        """The number of products in each precision."""
        counted = Counter(node.precision for node in self.nodes if node.precision)
        return {name: counted[name] for name in ("int8", "weight-only", "float")}

    def why_unknown(self) -> str:
        """Return a clause that says why counts are unknown."""
        if self.depends:
            return "depends on " + ", ".join(self.depends)
        return self.unknown[0] if self.unknown else "is unknown"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "model": self.path,
            "file_bytes": self.file_bytes,
            "external_data": dict(self.external),
            "ir_version": self.ir_version,
            "producer": self.producer,
            "opsets": dict(self.opsets),
            "metadata": dict(self.metadata),
            "inputs": list(map(_port_json, self.inputs)),
            "outputs": list(map(_port_json, self.outputs)),
            "operators": dict(self.operators),
            "functions": list(self.functions),
            "weights": self.weights.to_json(),
            "tensors": {dtype or "unknown": count for dtype, count in self.tensors.items()},
            "depends_on": list(self.depends),
            "unknown": list(self.unknown),
            "macs": self.macs,
            "peak_activation_bytes": self.peak_bytes,
            "products": self.products,
            "mac_share": self.coverage,
            "nodes": [node.to_json() for node in self.nodes],
        }


def _port_json(port: Port) -> dict[str, Any]:
    """Return an input or output of a model as plain JSON values."""
    shape = None if port.shape is None else list(port.shape)
    return {"name": port.name, "type": port.type, "shape": shape}


def inspect_model(
    path: str | os.PathLike[str],
    lengths: Lengths | None = None,
    *,
    data: DataSource | None = None,
) -> Inspection:
    """Return the parts of a model and the costs of a run. Large weights are not read.

    Args:
        path: Path of the model.
        lengths: Lengths of the free axes of its inputs; counts that depend on missing lengths are None.
        data: A data source; its first sample gives the lengths. Shapes that follow from values are those of a run.

    Raises:
        RequantError: The file is not a model, or lengths or data do not fit it.
    """
    lengths = or_default(lengths, Lengths, "lengths")
    model = load_model(path, in_place=True)
    if data is not None and lengths:
        raise RequantError("lengths of axes are given twice, as options and by data; give one of the two")
    feed = None if data is None else next(iter(open_data(path, data))).feed
    found = shaped(model, lengths if feed is None else Lengths.of(feed))
    found = found if feed is None else with_shapes_of_run(found, feed)
    nodes = tuple(_facts(found, found.model.graph))
    depends = free_axes(found.model)
    macs = _total(found.model.graph, {(node.inside, node.name): node.macs for node in nodes}, ())
    peak = _peak(found.model.graph)
    return replace(
        _described(path, model),
        tensors=_types(found.model),
        depends=depends,
        unknown=_unknown(nodes) if not depends else (),
        macs=macs,
        peak_bytes=peak,
        nodes=nodes,
    )


def _described(path: str | os.PathLike[str], model: ir.Model) -> Inspection:
    """Return the facts that need no shapes."""
    called = signature(model)
    needed = {str(value.name) for value in inputs_of(model)}
    files = sorted({Path(tensor.path) for tensor in external_tensors(model)} - {Path(path).absolute()})
    producer = " ".join(filter(None, (model.producer_name, model.producer_version)))
    return Inspection(
        path=os.fspath(path),
        file_bytes=Path(path).stat().st_size,
        external={file.name: file.stat().st_size for file in files},
        ir_version=model.ir_version,
        producer=producer,
        opsets={domain or "ai.onnx": version for domain, version in sorted(model.opset_imports.items())},
        metadata=dict(model.metadata_props),
        inputs=tuple(port for port in called.inputs if port.name in needed),
        outputs=called.outputs,
        operators=dict(Counter(map(key, every_node(model))).most_common()),
        functions=tuple(".".join(filter(None, (f.domain, f.name))) for f in model.functions.values()),
        weights=count_weights(model),
        tensors={},
        depends=(),
        unknown=(),
        macs=None,
        peak_bytes=None,
        nodes=(),
    )


def _facts(found: Shaped, graph: ir.Graph, inside: tuple[str, ...] = (), steps: int | None = 1) -> Iterator[NodeFacts]:
    """Describe every node of a graph, each followed by the nodes of its bodies."""
    for node in graph:
        yield _node_facts(node, inside, steps)
        each = found.steps.get(node, 1)
        runs = None if steps is None or each is None else steps * each
        for body in bodies_of(node):
            yield from _facts(found, body, (*inside, node_name(node)), runs)


def _node_facts(node: ir.Node, inside: tuple[str, ...], steps: int | None) -> NodeFacts:
    """Describe a node that runs `steps` times; None if that is unknown."""
    return NodeFacts(
        name=node_name(node),
        op=key(node),
        inside=inside,
        inputs=tuple(str(value.name) if value is not None else "" for value in node.inputs),
        outputs=tuple(str(value.name) for value in node.outputs),
        types=tuple(map(_typed, node.outputs)),
        steps=steps,
        macs=_of_all_steps(node_macs(node), steps),
        output_bytes=_sum(_bytes(value) for value in node.outputs),
        precision=precision(node),
    )


def _of_all_steps(once: int | None, steps: int | None) -> int | None:
    """Return the multiply-accumulates of all steps from those of one step; None if they are not known."""
    if not once:
        return once
    return None if steps is None else once * steps


def _typed(value: ir.Value) -> str:
    """Return the type and shape of a tensor as text."""
    shape = "" if value.shape is None else " [" + ", ".join(_axis(axis) for axis in value.shape) + "]"
    return f"{value.dtype.name if value.dtype is not None else value.type or 'unknown'}{shape}"


def _axis(axis: int | ir.SymbolicDim) -> str:
    """Return the length of an axis, its name, or ``"?"``."""
    return str(axis) if isinstance(axis, int) else str(axis.value or "?")


def node_macs(node: ir.Node) -> int | None:
    """Return the multiply-accumulates of one run of a node; None if shapes are unknown."""
    op = counted_as(node.op_type, node.domain)
    if op not in MACS:
        return 0
    ends = [*node.inputs, *node.outputs[:1]]
    shapes = [_lengths(value) if value is not None else () for value in ends]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(ends):
        return None
    return multiply_accumulates(op, node, known[: len(node.inputs)], known[len(node.inputs) :])


def _lengths(value: ir.Value) -> Shape | None:
    """Return the shape of a tensor; None if a length is unknown."""
    shape = value.const_value.shape if value.const_value is not None else value.shape
    if shape is None or not all(isinstance(axis, int) for axis in shape):
        return None
    return tuple(shape)  # type: ignore[arg-type]


def _bytes(value: ir.Value) -> int | None:
    """Return the bytes of a tensor; None if unknown."""
    shape = _lengths(value)
    if not value.name:  # an absent output
        return 0
    if shape is None or value.dtype is None or value.dtype is ir.DataType.STRING:
        return None
    return math.ceil(math.prod(shape) * value.dtype.itemsize)


def _sum(numbers: Iterable[int | None]) -> int | None:
    """Add numbers; None if one is None."""
    found = list(numbers)
    return None if any(number is None for number in found) else sum(number or 0 for number in found)


def precision(node: ir.Node) -> Precision:
    """Return the precision of a product in the graph; empty for other nodes."""
    op = counted_as(node.op_type, node.domain)
    if op not in MACS:
        return ""
    if multiplies_integers(op, accuracy_level(node)):
        return "int8"
    factors = [_stored(value) for value in node.inputs[:2]]
    if all(dtype in EIGHT for dtype in factors):
        return "int8"
    weights = [value for value in node.inputs[1:3] if value is not None]
    packed = node.op_type == "MatMulNBits"
    return "weight-only" if packed or any(_stored(value) in SMALL for value in weights) else "float"


SAME_VALUES = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze"})
"""Operators between the stored weights of an LSTM and those that it reads."""


def _stored(value: ir.Value | None) -> ir.DataType | None:
    """Return the integer type before the DequantizeLinear that makes a tensor; None if there is none."""
    node = producer_of(value)
    while node is not None and node.op_type in SAME_VALUES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None:
        return None
    held = constant(node.inputs[0])
    if held is not None:
        return ir.DataType(held.dtype)
    if node.inputs[0].dtype is not None:
        return node.inputs[0].dtype
    zero = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    return None if zero is None else ir.DataType(zero.dtype)


Macs = Mapping[tuple[tuple[str, ...], str], int | None]


def _total(graph: ir.Graph, macs: Macs, inside: tuple[str, ...]) -> int | None:
    """Add the multiply-accumulates of a graph; a node with bodies counts its most expensive body."""
    parts: list[int | None] = []
    for node in graph:
        name = node_name(node)
        parts.append(macs[inside, name])
        within = [_total(body, macs, (*inside, name)) for body in bodies_of(node)]
        if within:
            parts.append(None if None in within else max(number or 0 for number in within))
    return _sum(parts)


def _peak(graph: ir.Graph) -> int | None:
    """Return the largest memory of computed tensors at one time, with the inputs of the graph; None if unknown."""
    nodes = list(graph)
    last = _last_reads(nodes)
    fixed = _computed_from_constants(nodes)
    end = len(nodes)
    change: Counter[int] = Counter()
    values = [(value, 0) for value in graph.inputs if not value.is_initializer()]
    values += [(value, place) for place, node in enumerate(nodes) for value in node.outputs if value not in fixed]
    for value, first in values:
        size = _bytes(value)
        if size is None:
            return None
        change[first] += size
        change[1 + (end if value.is_graph_output() or value.is_graph_input() else last.get(value, first))] -= size
    now = most = 0
    for place in range(end + 1):
        now += change[place]
        within = [_peak(body) for body in bodies_of(nodes[place])] if place < end else []
        if None in within:
            return None
        most = max(most, now + max((number or 0 for number in within), default=0))
    return most


def _last_reads(nodes: list[ir.Node]) -> dict[ir.Value, int]:
    """Return the position of the last node that reads each value, itself or in its bodies."""
    found: dict[ir.Value, int] = {}
    for place, node in enumerate(nodes):
        readers = [node, *(inner for body in bodies_of(node) for inner in body.all_nodes())]
        outer = [value for body in bodies_of(node) for value in body.outputs]
        found.update((v, place) for v in (*(v for each in readers for v in each.inputs), *outer) if v is not None)
    return found


def _computed_from_constants(nodes: list[ir.Node]) -> set[ir.Value]:
    """Return the tensors that are equal in every run, such as dequantized weights: a runtime computes them once."""
    found: set[ir.Value] = set()
    for node in nodes:
        values = [value for value in node.inputs if value is not None]
        if values and not bodies_of(node) and all(v in found or constant(v) is not None for v in values):
            found.update(node.outputs)
    return found


def _types(model: ir.Model) -> dict[str | None, int]:
    """Count the computed tensors of each type."""
    values = [value for graph in model.graphs() for node in graph for value in node.outputs if value.name]
    counted = Counter(None if value.dtype is None else value.dtype.name for value in values)
    return dict(counted.most_common())


def _unknown(nodes: Iterable[NodeFacts]) -> tuple[str, ...]:
    """Return why counts are unknown, for a model whose inputs all have lengths."""
    return tuple(dict.fromkeys(filter(None, map(_why_unknown, nodes))))


def _why_unknown(node: NodeFacts) -> str:
    """Return why a count of a node is unknown; empty if all are known."""
    if node.steps is None:
        return f"depends on how often the body of {node.inside[-1]!r} runs"
    if node.output_bytes is None or node.macs is None:
        return f"the output shape of {node.name!r} ({node.op}) is unknown"
    return ""
