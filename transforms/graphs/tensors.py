"""The tensors of a model: initializers and attributes, in memory and in external files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir

from .queries import every_graph, every_node, release


def tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yield every tensor: initializers and attributes, in bodies and functions too."""
    for graph in every_graph(model):
        yield from (value.const_value for value in graph.initializers.values() if value.const_value is not None)
    for node in every_node(model):
        for attribute in node.attributes.values():
            yield from _tensors_of(attribute)


def _tensors_of(attribute: ir.Attr) -> Sequence[ir.TensorProtocol]:
    """Return the tensors in an attribute."""
    if attribute.is_ref() or attribute.value is None:
        return ()
    if attribute.type is ir.AttributeType.TENSOR:
        return (attribute.as_tensor(),)
    return attribute.as_tensors() if attribute.type is ir.AttributeType.TENSORS else ()


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield every tensor in an external file."""
    return (tensor for tensor in tensors(model) if isinstance(tensor, ir.ExternalTensor))


def load_tensors(model: ir.Model, *, keep: Callable[[ir.ExternalTensor], bool]) -> None:
    """Load external tensors into memory, except those for which `keep` is true."""
    for graph in every_graph(model):
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = _loaded(value.const_value, keep)
    for node in every_node(model):
        for name, attribute in list(node.attributes.items()):
            old_tensors = _tensors_of(attribute)
            loaded = [_loaded(tensor, keep) for tensor in old_tensors]
            if any(new is not old for new, old in zip(loaded, old_tensors, strict=True)):
                several = attribute.type is ir.AttributeType.TENSORS
                node.attributes[name] = ir.Attr(name, attribute.type, loaded if several else loaded[0])


def _loaded(tensor: ir.TensorProtocol, keep: Callable[[ir.ExternalTensor], bool]) -> ir.TensorProtocol:
    """Return an external tensor as a tensor in memory, unless `keep` is true for it; any other tensor unchanged."""
    if not isinstance(tensor, ir.ExternalTensor) or keep(tensor):
        return tensor
    array = tensor.numpy().copy()
    release(tensor)
    return ir.Tensor(array, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name, doc_string=tensor.doc_string)
