"""The models of pieces: each piece in the branch of an If, so that one session runs any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ...calibration.model.session import open_session
from ..model.files import serialize
from .pieces import Piece, Reads, extracted

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


class PieceModels:
    """Opens the pieces of a model."""

    def __init__(self, model: ir.Model, reads: Reads, types: Mapping[str, ir.Value]) -> None:
        """Know a model.

        Args:
            model: The model; it does not change.
            reads: What its nodes read.
            types: Values with known types and shapes, by name.
        """
        self._model, self._reads, self._types = model, reads, types

    def is_typed(self, piece: Piece) -> bool:
        """Whether all inputs and outputs of a piece have a known type and rank, and are no sequences and no texts."""
        return all(map(self._is_typed, (*piece.inputs, *piece.outputs)))

    def opened(self, pieces: Sequence[Piece], known: Mapping[ir.Value, Sequence[Any]]) -> InferenceSession:
        """Open the model of some pieces.

        Args:
            pieces: The pieces; several have types, see `is_typed`.
            known: The arrays of tensors that are known already.

        Raises:
            RequantError: The runtime does not load it.
        """
        graph = ir.Graph([], [], nodes=[], opset_imports=self._model.opset_imports, name=self._model.graph.name)
        for piece in pieces:
            self._append(graph, piece, known, choose=len(pieces) > 1)
        model = ir.Model(graph, ir_version=self._model.ir_version, functions=tuple(self._model.functions.values()))
        return open_session(serialize(model), threads=1, optimize=False, lean=True)

    def _append(self, graph: ir.Graph, piece: Piece, known: Mapping[ir.Value, Sequence[Any]], *, choose: bool) -> None:
        """Add a piece to a graph; where it can be chosen, in an If, and all inputs have defaults."""
        part = extracted(self._model.graph, self._reads, piece)
        nodes, inputs, outputs = list(part), list(part.inputs), list(part.outputs)
        weights = [value for value in part.initializers.values() if value not in inputs]
        for values in (part.inputs, part.outputs):
            values.clear()
        part.initializers.clear()
        part.remove(nodes)
        for value, source in zip(inputs, piece.inputs, strict=True):
            self._declare(value, source, known.get(source))
            value.name = piece.name(source)
        for value, source in zip(outputs, piece.outputs, strict=True):
            value.shape = None
            value.name = piece.name(source)
        if choose:
            inner = {*weights, *(value for node in nodes for value in node.outputs)}
            for value in inner:
                value.name = value.name and f"{piece.index}//{value.name}"
            body = ir.Graph([], outputs, nodes=nodes, initializers=weights, name=f"{piece.index}")
            flag = ir.val(piece.flag, dtype=ir.DataType.BOOL, shape=[])
            nodes, inputs = [self._chosen(flag, body, piece)], [*inputs, flag]
            outputs, weights = list(nodes[0].outputs), [_with_default(value) for value in inputs]
        graph.inputs.extend(inputs)
        for value in weights:
            graph.initializers.add(value)
        graph.extend(nodes)
        graph.outputs.extend(outputs)

    def _chosen(self, flag: ir.Value, body: ir.Graph, piece: Piece) -> ir.Node:
        """Return an If that runs a piece, or gives empty tensors."""
        empty = [ir.node("Constant", [], {"value": _empty(*self._type(source))}) for source in piece.outputs]
        for index, node in enumerate(empty):
            node.outputs[0].name = f"{piece.index}//empty {index}"
        other = ir.Graph([], [node.outputs[0] for node in empty], nodes=empty, name=f"{piece.index}//empty")
        branches = {"then_branch": body, "else_branch": other}
        chosen = ir.node("If", [flag], branches, num_outputs=len(piece.outputs))
        for values in (body.outputs, other.outputs, chosen.outputs):
            for value, source in zip(values, piece.outputs, strict=True):
                value.type = ir.TensorType(self._type(source)[0])
        for value, source in zip(body.outputs, piece.outputs, strict=True):
            value.name = f"{piece.name(source)}//inside"
        for value, source in zip(chosen.outputs, piece.outputs, strict=True):
            value.name = piece.name(source)
        return chosen

    def _declare(self, value: ir.Value, source: ir.Value, arrays: Sequence[Any] | None) -> None:
        """Give the input of a piece the type and the rank of the arrays, where they are known already."""
        if arrays is not None and isinstance(arrays[0], np.ndarray):
            value.shape = ir.Shape([None] * arrays[0].ndim)
            if arrays[0].dtype.kind not in "OSU":  # of strings, and of a sequence of tensors, the model has the type
                value.type = ir.TensorType(ir.DataType.from_numpy(arrays[0].dtype))
        elif self._is_typed(source):
            dtype, rank = self._type(source)
            value.type, value.shape = ir.TensorType(dtype), ir.Shape([None] * rank)

    def _is_typed(self, value: ir.Value) -> bool:
        """Whether a tensor has a known type and rank, and is no sequence and no text."""
        known, like = self._like(value)
        is_tensor = isinstance(known.type or like.type, ir.TensorType)
        return is_tensor and like.shape is not None and known.dtype is not ir.DataType.STRING

    def _type(self, value: ir.Value) -> tuple[ir.DataType, int]:
        """Return the type and the rank of a tensor that has them."""
        known, like = self._like(value)
        dtype = known.dtype or like.dtype
        assert dtype is not None and like.shape is not None  # `_is_typed`
        return dtype, len(like.shape)

    def _like(self, value: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return a value with the type of a tensor, and one with its rank: ``x`` has that of ``x/quantized``."""
        known = self._types.get(str(value.name), value)
        like = known if known.shape is not None else self._types.get(str(value.name).rpartition("/")[0], known)
        return known, like


def _with_default(value: ir.Value) -> ir.Value:
    """Make an input optional: an empty tensor, or False, is its default."""
    assert value.dtype is not None and value.shape is not None  # `PieceModels.is_typed`
    value.const_value = _empty(value.dtype, len(value.shape), value.name)
    return value


def _empty(dtype: ir.DataType, rank: int, name: str | None = None) -> ir.Tensor[Any]:
    """Return a tensor without elements; of rank 0, a zero."""
    return ir.Tensor(np.zeros([0] * rank, dtype.numpy()), dtype=dtype, name=name)
