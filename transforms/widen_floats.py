"""Convert a float16 or bfloat16 model to float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .graphs.inference import stand_ins
from .graphs.queries import MS, is_standard, own_values
from .graphs.rewriter import LARGE, can_replace, names, remove, replace, unused_name
from .parts.functions import DOMAIN
from .registry import Change, LeftAlone, transform

FLOAT = ir.DataType.FLOAT
HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

# Domains whose operators accept float32 wherever they accept float16 or bfloat16.
KNOWN = frozenset({"", "ai.onnx.ml", MS})
# Operators that read the bits of a value, not its number.
BITWISE = frozenset({("", "BitCast")})
# Standard operators that accept any type.
ANY_TYPE = frozenset({"Cast", "Shape", "Size"})
# Attributes of standard operators that hold a data type.
DTYPES = frozenset({"dtype", "output_datatype", "output_dtype", "precision", "softmax_precision", "stash_type", "to"})

Types = Mapping[ir.Value, ir.TypeProtocol | None]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The values that stay float16 or bfloat16, and the types before the conversion.

    Attributes:
        types: The type of each value, None if onnx cannot infer it.
        kept: Values that do not change: inputs of the graph, results of operators of unknown domains, and constants
            that only such operators or the caller read.
    """

    types: Types
    kept: frozenset[ir.Value]

    def widens(self, value: ir.Value | None) -> bool:
        """Whether `value` becomes float32."""
        return value is not None and value not in self.kept and _is_half(self.types.get(value))


@transform("widen_floats", after=("inline_functions",), changes_values=True)
def widen_floats(model: ir.Model) -> Change:
    """Convert a float16 or bfloat16 model to float32; its inputs and outputs keep their type.

    Before:  y = MatMul(x, W), all float16
    After:   y = Cast(MatMul(Cast(x, to=float32), float32(W)), to=float16)
        Weights, constants, data types in attributes and the types of tensors, sequences and bodies become float32. A
        Cast that then changes nothing is removed. Results are no longer rounded to 11 or 8 bits and no longer overflow:
        the outputs differ by the rounding of the short type. Weights of more than 1 MiB are converted when they are
        read. Operators of unknown domains and BitCast still read and write the short type, through Casts.
    Left alone: models without float16 or bfloat16; the whole model if it has functions (``functions``), an input or
        output that is a sequence or optional of a short float (``port-not-a-tensor``), or an operator of an unknown
        domain with a tensor of unknown type (``type-unknown``), a sequence of a short float (``foreign-sequence``) or a
        body (``foreign-body``).
    """
    change = Change()
    if not _has_half(model):
        return change
    try:
        if any(domain != DOMAIN for domain, *_ in model.functions):
            raise LeftAlone("functions")
        plan = _plan(model)
    except LeftAlone as left:
        change.skip(str(left))
        return change
    nodes = [(node, node.inputs[0] if node.inputs else None) for graph in model.graphs() for node in graph]
    values = list(_values(model))
    change.applied += _cast_between(model, plan, values)
    change.applied += sum(_widen_attributes(node, plan) for node, _ in nodes)
    change.applied += sum(_widen_value(value) for value in values if plan.widens(value))
    change.applied += sum(_remove_cast(node, before, plan) for node, before in nodes)
    return change


def _has_half(model: ir.Model) -> bool:
    """Whether the model has an input, a weight, a constant or a data type of a short float."""
    values = [*model.graph.inputs, *(value for graph in model.graphs() for value in graph.initializers.values())]
    nodes = (node for graph in model.graphs() for node in graph)
    return any(_is_half(value.type) for value in values) or any(_halves(node) for node in nodes)


def _is_half(type_: ir.TypeProtocol | None) -> bool:
    """Whether a type is float16 or bfloat16, or a sequence or optional of one."""
    return type_ is not None and type_.dtype in HALF


def _halves(node: ir.Node) -> list[ir.Attr]:
    """Return the attributes of a node that contain a short float tensor or a short float data type."""
    return [attribute for attribute in node.attributes.values() if not attribute.is_ref() and _holds(node, attribute)]


def _holds(node: ir.Node, attribute: ir.Attr) -> bool:
    if attribute.type == ir.AttributeType.INT:
        return not node.domain and attribute.name in DTYPES and attribute.as_int() in HALF
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.as_tensor().dtype in HALF
    if attribute.type == ir.AttributeType.TENSORS:
        return any(tensor.dtype in HALF for tensor in attribute.as_tensors())
    return attribute.type == ir.AttributeType.TYPE_PROTO and _is_half(attribute.value.type)


def _is_foreign(node: ir.Node) -> bool:
    """Whether the types that a node reads and writes must not change."""
    return node.domain not in KNOWN | {DOMAIN} or (node.domain, node.op_type) in BITWISE


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """Yield every value of the graph and of bodies once."""
    for graph in model.graphs():
        yield from own_values(graph)


def _plan(model: ir.Model) -> _Plan:
    """Find the values that stay float16 or bfloat16.

    Raises:
        LeftAlone: The model cannot be converted.
    """
    types = {value: value.type or other.type for value, other in stand_ins(model).items()}
    if any(_is_half(v.type) and not isinstance(v.type, ir.TensorType) for v in _ports(model)):
        raise LeftAlone("port-not-a-tensor")
    kept = {value for value in model.graph.inputs if _is_half(value.type)}
    foreign = [node for graph in model.graphs() for node in graph if _is_foreign(node)]
    for node in foreign:
        if any(each.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for each in node.attributes.values()):
            raise LeftAlone("foreign-body")
        for value in [*node.inputs, *node.outputs]:
            type_ = types.get(value) if value is not None else None
            if type_ is None and value is not None and value.name:
                raise LeftAlone("type-unknown")
            if _is_half(type_) and not isinstance(type_, ir.TensorType):
                raise LeftAlone("foreign-sequence")
        kept.update(value for value in node.outputs if _is_half(types.get(value)))
    kept.update(value for value in _values(model) if _is_half(types.get(value)) and _is_for_others(model, value))
    return _Plan(types, frozenset(kept))


def _ports(model: ir.Model) -> Iterable[ir.Value]:
    """Return the inputs and outputs of a model."""
    return [*model.graph.inputs, *model.graph.outputs]


def _is_for_others(model: ir.Model, value: ir.Value) -> bool:
    """Whether only a caller or operators of unknown domains read a constant or the result of a Cast."""
    node = value.producer()
    readers = [_is_foreign(reader) for reader, _ in value.uses()]
    if node is None:
        return value.is_initializer() and (_is_output(model, value) or (bool(readers) and all(readers)))
    if not is_standard(node, "Cast", "Constant"):
        return False
    return all(readers) and (bool(readers) or _is_output(model, value))


def _is_output(model: ir.Model, value: ir.Value) -> bool:
    """Whether `value` is an output of the model."""
    return any(value is output for output in model.graph.outputs)


def _cast_between(model: ir.Model, plan: _Plan, values: Iterable[ir.Value]) -> int:
    """Insert a Cast between float32 values and values that stay short; return the number of Casts."""
    taken, count = names(model), 0
    for value in values:
        uses = tuple(value.uses())
        if value in plan.kept:
            uses = tuple(use for use in uses if not _takes_any(use.node))
            if uses:
                wide = _cast(value, FLOAT, unused_name(taken, f"{value.name}_float"), taken)
                count += 1
                for node, index in uses:
                    node.replace_input_with(index, wide)
        elif plan.widens(value):
            uses = tuple(use for use in uses if _is_foreign(use.node))
            if uses or _is_output(model, value):
                _cast_back(model, value, plan, uses, taken)
                count += 1
    return count


def _takes_any(node: ir.Node) -> bool:
    """Whether a node may read a short float after the conversion."""
    return _is_foreign(node) or (not node.domain and node.op_type in ANY_TYPE)


def _cast_back(
    model: ir.Model, value: ir.Value, plan: _Plan, uses: Iterable[tuple[ir.Node, int]], taken: set[str]
) -> None:
    """Cast `value` back to its old type for the caller and for the readers `uses`."""
    type_, name = plan.types[value], value.name
    assert type_ is not None
    if not _is_output(model, value):
        short = _cast(value, type_.dtype, unused_name(taken, f"{name}_{type_.dtype.name.lower()}"), taken)
    else:
        value.name = unused_name(taken, f"{name}_float")
        short = _cast(value, type_.dtype, str(name), taken)
        short.doc_string, value.doc_string = value.doc_string, None
        for index, output in enumerate(model.graph.outputs):
            if output is value:
                model.graph.outputs[index] = short
    for node, index in uses:
        node.replace_input_with(index, short)


def _cast(value: ir.Value, to: ir.DataType, name: str, taken: set[str]) -> ir.Value:
    """Insert a Cast of `value` right after its producer; return the result, with this name."""
    node = ir.node("Cast", [value], {"to": to.value}, name=unused_name(taken, f"{name}/cast"))
    result = node.outputs[0]
    result.name, result.type, result.shape = name, ir.TensorType(to), value.shape
    graph, producer = value.graph, value.producer()
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"value {value.name!r} is in no graph")
    if producer is not None:
        graph.insert_after(producer, [node])
    else:
        graph.insert_before(graph[0], [node])
    return result


def _widen_attributes(node: ir.Node, plan: _Plan) -> int:
    """Convert the short floats in the attributes of a node to float32; return the number of changed attributes."""
    if _is_foreign(node) or any(value in plan.kept for value in node.outputs):
        return 0
    halves = _halves(node)
    for attribute in halves:
        node.attributes[attribute.name] = ir.Attr(attribute.name, attribute.type, _wide_content(attribute))
    return len(halves)


def _wide_content(attribute: ir.Attr) -> object:
    """Return the value of an attribute in float32."""
    if attribute.type == ir.AttributeType.INT:
        return FLOAT.value
    if attribute.type == ir.AttributeType.TENSOR:
        return _wide_tensor(attribute.as_tensor())
    if attribute.type == ir.AttributeType.TENSORS:
        return [_wide_tensor(tensor) for tensor in attribute.as_tensors()]
    return ir.TypeAndShape(_wide_type(attribute.value.type), attribute.value.shape)


def _wide_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return a tensor as float32; a large one is converted when it is read."""
    if tensor.dtype not in HALF:
        return tensor

    def convert() -> ir.TensorProtocol:
        return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)

    if tensor.nbytes <= LARGE:
        return convert()
    return ir.LazyTensor(convert, FLOAT, ir.Shape(tensor.shape.numpy()), name=tensor.name)


def _wide_type(type_: ir.TypeProtocol) -> ir.TypeProtocol:
    """Return the type with float32 elements."""
    if isinstance(type_, ir.SequenceType | ir.OptionalType):
        return type(type_)(_wide_type(type_.elem_type), denotation=type_.denotation)
    return type(type_)(FLOAT, denotation=type_.denotation)  # type: ignore[call-arg]


def _remove_cast(node: ir.Node, before: ir.Value | None, plan: _Plan) -> int:
    """Remove a Cast from float32 to float32 if its result may take another name; return whether it was removed.

    Args:
        node: Any node.
        before: The first input of the node before the conversion.
        plan: The types before the conversion.
    """
    if not is_standard(node, "Cast") or node.attributes.get_int("to", 0) != FLOAT:
        return 0
    type_ = plan.types.get(before) if before is not None else None
    source, result = node.inputs[0], node.outputs[0]
    if source is None or type_ is None or not (plan.widens(before) or type_.dtype == FLOAT):
        return 0
    if not can_replace(result, source):
        return 0
    result.type = ir.TensorType(FLOAT)
    replace(result, source)
    remove(node)
    return 1


def _widen_value(value: ir.Value) -> int:
    """Convert the type and the content of a value to float32; return whether the value is an initializer."""
    if value.type is not None:
        value.type = _wide_type(value.type)
    if value.const_value is not None:
        value.const_value = _wide_tensor(value.const_value)
    return int(value.is_initializer())
