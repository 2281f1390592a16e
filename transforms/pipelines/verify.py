"""Check a model after every rewrite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx_ir.passes import PassError
from onnx_ir.passes.common import CheckerPass

from ... import RequantError
from ...system.given import check_kind
from ...system.regular import check_stored
from ..graphs.calls import check_calls
from ..graphs.queries import constant, is_standard
from ..graphs.tensors import external_tensors, load_tensors
from ..registry import TransformError

RUNTIME_ONLY = frozenset({"SimplifiedLayerNormalization"})
TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_datatype"})
"""Attributes of standard operators that hold an element type."""
TYPES = frozenset(each.value for each in ir.DataType if each is not ir.DataType.UNDEFINED)
UNKNOWN = "unknown"
PLAIN_IR = 4
"""The first IR version in which an initializer need not be an input; the runtime asks for it in no version."""
MOST_STEPS = 10**8
"""The most steps of a Loop whose condition is always true. ONNX Runtime takes some microseconds for a step."""
MODEL = "takes an onnx_ir.Model, as onnx_ir.load returns it"
"""What functions of the Python API say of another argument, after their name."""
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
    """Return the inputs and outputs of `model`.

    Raises:
        RequantError: It is no model.
    """
    check_kind(model, ir.Model, f"signature {MODEL}")
    return Signature(_ports(model.graph.inputs), _ports(model.graph.outputs))


def check_model(model: object, taker: str) -> None:
    """Refuse what is no model in memory, and a model whose external data cannot be read.

    Args:
        model: What the caller of the Python API gave.
        taker: The name of the function, for the error.

    Raises:
        RequantError: It is refused.
    """
    check_kind(model, ir.Model, f"{taker} {MODEL}")
    assert isinstance(model, ir.Model)
    for tensor in external_tensors(model):
        check_stored(tensor)


def verify(model: ir.Model, *, like: Signature | None = None, message: onnx.ModelProto | None = None) -> None:
    """Check names, edges, order, operator sets, inputs and outputs, and run ``onnx.checker``.

    The cost does not grow with the size of the weights: ``onnx.checker`` reads only small ones.

    Args:
        model: The model; it is not changed.
        like: The inputs and outputs that the model must have.
        message: The same model as a message, if there is one; it saves making one, which is most of the work.

    Raises:
        VerifyError: The model is not valid; the message names the first problem.
        RequantError: An argument is of another type, or external data cannot be read.
    """
    check_model(model, "verify")
    if like is not None:
        check_kind(like, Signature, "like must be a Signature, as signature() returns it")
    if message is not None:
        check_kind(message, onnx.ModelProto, "message must be a ModelProto")
    if (model.ir_version or 0) > onnx.IR_VERSION:
        raise VerifyError(
            f"the model is of IR version {model.ir_version}, and the installed onnx {onnx.__version__} knows "
            f"{onnx.IR_VERSION}: install a newer onnx, or export the model for an older one"
        )
    graphs = tuple(model.graphs())
    owned = set(graphs)
    for graph in graphs:
        _verify_names(graph)
        _verify_edges(graph, owned)
    _verify_nodes(model)
    _verify_functions(model)
    if like is not None:
        _verify_ports("input", like.inputs, _ports(model.graph.inputs))
        _verify_ports("output", like.outputs, _ports(model.graph.outputs))
    if message is None:
        _run_checker(model)
    else:
        _check_message(message)


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
        if not exists and not value.name:
            raise VerifyError("a graph output has no name")
        if not exists:
            raise VerifyError(f"nothing computes the graph output {value.name!r}")


def _verify_nodes(model: ir.Model) -> None:
    """Check the attributes and the domain of every node; `onnx_ir` calls the standard domain ``""``."""
    imported = {"" if domain == "ai.onnx" else domain for domain in model.opset_imports}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for attribute in node.attributes.values():
            _verify_attribute(node, attribute)
        _verify_steps(node)
        if node.domain not in imported:
            domains = ", ".join(sorted(domain or "ai.onnx" for domain in imported)) or "nothing"
            raise VerifyError(
                f"node {node.name!r} ({node.op_type}) has domain {node.domain or 'ai.onnx'!r}, but the model imports "
                f"no operator set of this domain; it imports: {domains}"
            )


def _verify_functions(model: ir.Model) -> None:
    """Check that functions call each other in no circle, and become a bounded number of nodes."""
    try:
        check_calls(model)
    except TransformError as error:
        raise VerifyError(str(error)) from error


def _verify_attribute(node: ir.Node, attribute: ir.Attr) -> None:
    """Check that an attribute of a graph's node has a value, and that a type is a type."""
    if attribute.is_ref():
        raise VerifyError(
            f"attribute {attribute.name!r} of node {node.name!r} ({node.op_type}) refers to an attribute of a "
            "function, but the node is in no function"
        )
    if not node.domain and attribute.name in TYPE_ATTRIBUTES and attribute.value not in TYPES:
        raise VerifyError(
            f"attribute {attribute.name!r} of node {node.name!r} ({node.op_type}) is {attribute.value}, which is no "
            "element type"
        )


def _verify_steps(node: ir.Node) -> None:
    """Check that a Loop whose condition is always true ends, and has at most `MOST_STEPS` steps if that is constant."""
    if not is_standard(node, "Loop") or len(node.inputs) < 2 or "body" not in node.attributes:
        return
    most, body = constant(node.inputs[0]), node.attributes["body"].as_graph()
    if not body.outputs or len(body.inputs) < 2:
        return
    counted = most is not None and most.dtype is ir.DataType.INT64 and most.size == 1
    if node.inputs[0] is not None and not counted:
        return
    steps = math.inf if most is None else int(most.numpy().reshape(()))
    goes_on = body.outputs[0]
    while (maker := goes_on.producer()) is not None and maker.op_type == "Identity" and maker.inputs[0] is not None:
        goes_on = maker.inputs[0]
    begins = node.inputs[1] is None or _is_true(node.inputs[1])
    if steps > MOST_STEPS and (_is_true(goes_on) or (goes_on is body.inputs[1] and begins)):
        how = "never ends" if most is None else f"runs {steps:,} times, which takes many minutes at least"
        raise VerifyError(f"node {node.name!r} (Loop) {how}")


def _is_true(value: ir.Value) -> bool:
    """Whether a condition is a constant that is true."""
    held = constant(value)
    return held is not None and held.size == 1 and bool(held.numpy().reshape(()))


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
    copy.ir_version = max(copy.ir_version or 0, PLAIN_IR)
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
        raise _refused(error.__cause__ or error) from error


def _check_message(message: onnx.ModelProto) -> None:
    """Run ``onnx.checker`` on a copy of a message with the differences of `_checkable`, and without weights."""
    copy = onnx.ModelProto()
    copy.CopyFrom(message)
    copy.ir_version = max(copy.ir_version, PLAIN_IR)
    for port in copy.graph.output:
        if port.type.WhichOneof("value") is None:
            port.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for port in (*copy.graph.input, *copy.graph.output):
        if port.type.HasField("tensor_type"):
            port.type.tensor_type.shape.SetInParent()
    _lighten(copy.graph.node, copy.graph.initializer)
    for function in copy.functions:
        _lighten(function.node)
    copy.opset_import.append(onnx.helper.make_opsetid(UNKNOWN, 1))
    try:
        onnx.checker.check_model(copy)
    except onnx.checker.ValidationError as error:
        raise _refused(error) from error


def _lighten(nodes: Iterable[onnx.NodeProto], initializers: Iterable[onnx.TensorProto] = ()) -> None:
    """Empty large and external tensors, and rename the domain of `RUNTIME_ONLY` nodes, in place, also in bodies."""
    for tensor in initializers:
        _empty(tensor)
    for node in nodes:
        if not node.domain and node.op_type in RUNTIME_ONLY:
            node.domain = UNKNOWN
        for attribute in node.attribute:
            for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
                _empty(tensor)
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _lighten(body.node, body.initializer)


def _empty(tensor: onnx.TensorProto) -> None:
    """Make a large or external tensor one without elements, in place: the checker needs no more than its type."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.ByteSize() > KEPT_AWAY:
        name, kind = tensor.name, tensor.data_type
        tensor.Clear()
        tensor.name, tensor.data_type = name, kind
        tensor.dims.append(0)


def _refused(error: BaseException) -> VerifyError:
    """Return the error of onnx's checker as one line."""
    text = str(error).partition("==> Context")[0]
    return VerifyError(f"onnx.checker: {' '.join(text.split())}")
