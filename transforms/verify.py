"""Check a model after every rewrite."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx_ir.passes import PassError
from onnx_ir.passes.common import CheckerPass

from .. import RequantError
from .tensors import load_tensors

RUNTIME_ONLY = frozenset({"SimplifiedLayerNormalization"})
UNKNOWN = "unknown"
KEPT_AWAY = 1000  # bytes; the checker pass does not hand larger initializers to onnx


class VerifyError(RequantError):
    """A model is not valid."""


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a graph.

    Attributes:
        name: The tensor's name.
        type: The element type, such as ``"FLOAT"``; None if the model does not declare it.
        shape: Lengths; a name or None for a dynamic length. None if the rank is unknown.
    """

    name: str
    type: str | None
    shape: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        """Return ``"x: FLOAT [N, 3]"``."""
        shape = "" if self.shape is None else " [" + ", ".join("?" if d is None else str(d) for d in self.shape) + "]"
        return f"{self.name}: {self.type or 'unknown'}{shape}"

    def accepts(self, other: Port) -> bool:
        """Whether `other` may replace this port: equal name, the same type, and no different rank or length."""
        if self.name != other.name or (self.type and self.type != other.type):
            return False
        if self.shape is None:
            return True
        if other.shape is None or len(self.shape) != len(other.shape):
            return False
        pairs = zip(self.shape, other.shape, strict=True)
        return all(a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def signature(model: ir.Model) -> Signature:
    """Return the inputs and outputs of `model`."""
    return Signature(_ports(model.graph.inputs), _ports(model.graph.outputs))


def verify(model: ir.Model, *, like: Signature | None = None) -> None:
    """Check names, edges, order, operator sets, inputs and outputs, and run ``onnx.checker``.

    The cost does not grow with the size of the weights: ``onnx.checker`` reads only small ones.

    Args:
        model: The model; it is not changed.
        like: The inputs and outputs that the model must have.

    Raises:
        VerifyError: The model is not valid; the message names the first problem.
    """
    graphs = tuple(model.graphs())
    owned = set(graphs)
    for graph in graphs:
        _verify_names(graph)
        _verify_edges(graph, owned)
    _verify_domains(model)
    if like is not None:
        _verify_ports("input", like.inputs, _ports(model.graph.inputs))
        _verify_ports("output", like.outputs, _ports(model.graph.outputs))
    _run_checker(model)


def _ports(values: Iterable[ir.Value]) -> tuple[Port, ...]:
    """Describe graph inputs or outputs."""
    return tuple(
        Port(
            value.name or "",
            None if value.type is None else str(value.type),
            None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape),
        )
        for value in values
    )


def _verify_names(graph: ir.Graph) -> None:
    """Check that every value of `graph` has a unique name; ``""`` is an omitted output."""
    values = dict.fromkeys([*graph.inputs, *graph.initializers.values()])
    used: set[str] = set()
    for value in [*values, *(output for node in graph for output in node.outputs)]:
        node = value.producer()
        if value.name is None or (value.name == "" and (node is None or value.uses())):
            where = f"output {value.index()} of node {node.name!r} ({node.op_type})" if node else "an initializer"
            raise VerifyError(f"{where} has no name")
        if value.name in used:
            raise VerifyError(f"two values are named {value.name!r}")
        used.update({value.name} - {""})


def _verify_edges(graph: ir.Graph, owned: set[ir.Graph]) -> None:
    """Check that every value that is read exists in the model and is computed before its reader."""
    done: set[ir.Value] = set()
    for node in graph:
        for value in node.inputs:
            if value is None:
                continue
            if value.graph not in owned:
                raise VerifyError(f"node {node.name!r} ({node.op_type}) reads {value.name!r}, which nothing computes")
            if value.graph is graph and value.producer() is not None and value not in done:
                raise VerifyError(
                    f"node {node.name!r} ({node.op_type}) comes before the node that computes {value.name!r}"
                )
        done.update(node.outputs)
    for value in graph.outputs:
        producer = value.producer()
        exists = value.is_graph_input() or value.is_initializer() if producer is None else producer.graph is graph
        if not exists:
            raise VerifyError(f"nothing computes the graph output {value.name!r}")


def _verify_domains(model: ir.Model) -> None:
    """Check that the model imports the operator set of every node; `onnx_ir` calls the standard domain ``""``."""
    imported = {"" if domain == "ai.onnx" else domain for domain in model.opset_imports}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain not in imported:
            domains = ", ".join(sorted(domain or "ai.onnx" for domain in imported))
            raise VerifyError(
                f"node {node.name!r} ({node.op_type}) has domain {node.domain or 'ai.onnx'!r}, but the model imports "
                f"no operator set of this domain; it imports: {domains}"
            )


def _verify_ports(kind: str, before: tuple[Port, ...], after: tuple[Port, ...]) -> None:
    """Check that the ports `after` may replace the ports `before`."""
    if [port.name for port in before] != [port.name for port in after]:
        was, now = (", ".join(port.name for port in ports) or "none" for ports in (before, after))
        raise VerifyError(f"the graph {kind}s were {was} and are now {now}")
    for old, new in zip(before, after, strict=True):
        if not old.accepts(new):
            raise VerifyError(f"the graph {kind} was {old} and is now {new}")


def _checkable(model: ir.Model) -> ir.Model:
    """Return a copy that ``onnx.checker`` can check.

    ONNX Runtime's optimiser writes SimplifiedLayerNormalization nodes of the standard domain, which onnx does not have:
    the copy gives them a domain that onnx does not check. onnx would look for external tensors in the current folder:
    the copy holds them in memory, except large initializers of the graph, which the checker pass does not hand to onnx.
    onnx wants the shapes of inputs, and the types and shapes of outputs; the runtime does not: the copy has some shape
    and type where the model has none.
    """
    copy = model.clone()
    apart = {id(value.const_value) for value in copy.graph.initializers.values()}
    load_tensors(copy, keep=lambda tensor: id(tensor) in apart and tensor.nbytes > KEPT_AWAY)
    for port in (*copy.graph.inputs, *copy.graph.outputs):
        port.shape = ir.Shape([]) if port.shape is None else port.shape
    for port in copy.graph.outputs:
        port.type = port.type or ir.TensorType(ir.DataType.FLOAT)
    for node in copy.graph.all_nodes():
        if not node.domain and node.op_type in RUNTIME_ONLY:
            node.domain = UNKNOWN
            copy.opset_imports[UNKNOWN] = 1
    return copy


def _run_checker(model: ir.Model) -> None:
    """Run ``onnx.checker`` on a copy: the pass takes large weights out and puts them back in another order."""
    try:
        CheckerPass()(_checkable(model))
    except (PassError, onnx.checker.ValidationError) as error:
        cause = error.__cause__ or error
        text = str(cause).partition("==> Context")[0]
        raise VerifyError(f"onnx.checker: {' '.join(text.split())}") from error
