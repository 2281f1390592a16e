"""Tensors that stay in a file until they are read. The file is read, never mapped: a mapped file that shrinks kills."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from ... import RequantError
from ...system.regular import reason_of


class FileTensor(ir.ExternalTensor):
    """A tensor in a file. Each `numpy` reads it again, unless an array of an earlier call is still in use.

    A mapping would be as lazy, but the process dies with SIGBUS if the file becomes shorter.
    """

    __slots__ = ("_alive",)

    def __init__(self, *args: Any, **options: Any) -> None:
        """Describe the tensor; the arguments are those of `ir.ExternalTensor`."""
        super().__init__(*args, **options)
        self._alive: Callable[[], np.ndarray[Any, np.dtype[np.uint8]] | None] = lambda: None

    @classmethod
    def of(cls, tensor: ir.ExternalTensor, folder: str | os.PathLike[str]) -> FileTensor:
        """Return the same tensor, with the folder of its file."""
        return cls(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=str(tensor.name),
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
            base_dir=folder,
        )

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the tensor as an array that must not be written to.

        Raises:
            RequantError: The file is gone, or shorter than when the model was loaded.
        """
        if self.dtype.bitwidth < 8:  # elements share bytes
            array = np.asarray(ir.PackedTensor(self._bytes(), self.dtype, shape=self.shape).numpy())
        else:
            data = self._alive()
            if data is None:
                data = self._bytes()
                self._alive = weakref.ref(data)  # an array that the caller holds is a view of the same memory
            array = data.view(np.dtype(self.dtype.numpy()).newbyteorder("<")).reshape(self.shape.numpy())
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the tensor as an array of a type."""
        return np.array(self.numpy(), dtype, copy=copy)

    def tobytes(self) -> bytes:
        """Return the bytes in the file; raises as `numpy`."""
        return self._bytes().tobytes()

    def _bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read the bytes of the tensor."""
        self._check_path_containment()
        data = np.empty(self.nbytes, np.uint8)
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset or 0)
                rest = memoryview(data.data)
                while rest and (count := file.readinto(rest)):  # one call reads at most 2 GB
                    rest = rest[count:]
        except OSError as error:
            raise RequantError(f"{self.path}: cannot be read: {reason_of(error)}") from error
        if rest:
            raise RequantError(f"{self.path}: ends inside the weights {self.name!r}: the file became shorter")
        return data


def read_from_files(model: ir.Model, folder: str | os.PathLike[str]) -> list[FileTensor]:
    """Replace each tensor that is in a file of `folder` by a `FileTensor`, in place; return the new tensors."""
    found: list[FileTensor] = []

    def replaced(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor
        found.append(FileTensor.of(tensor, folder))
        return found[-1]

    functions = [graph for each in model.functions.values() for graph in (each.graph, *each.subgraphs())]
    for graph in (*model.graphs(), *functions):
        for value in graph.initializers.values() if isinstance(graph, ir.Graph) else ():
            value.const_value = None if value.const_value is None else replaced(value.const_value)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
                    node.attributes[name] = ir.AttrTensor(name, replaced(attribute.as_tensor()))
                elif attribute.type is ir.AttributeType.TENSORS and not attribute.is_ref():
                    node.attributes[name] = ir.AttrTensors(name, list(map(replaced, attribute.as_tensors())))
    return found
