"""Stamps that change when a model or data change. They are computed without running the model or reading the data."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.samples import Sample
from ..data.sources import Source
from ..model.messages import bodies, with_inner
from ..model.session import ModelSource, Serialized

if TYPE_CHECKING:
    import onnx

LOCATION = "location"
"""The key of the file name in the external data of an ONNX tensor."""
BLOCK = 2**20
"""Bytes of a file that are in memory at once."""


def model_stamp(model: ModelSource) -> object:
    """Return a value that changes when a model changes.

    For a model in a file, external data count by size and modification time. For a model in memory, external data count
    by content, without the file names, because they may be temporary files.
    """
    if isinstance(model, bytes):
        return hashlib.sha256(model).hexdigest()
    if isinstance(model, Serialized):
        return _serialized(model)
    path = Path(os.fspath(model))
    digest, outside = hashlib.sha256(), False
    with path.open("rb") as file:  # not mapped: a mapped file that shrinks kills the process
        before = b""
        while block := file.read(BLOCK):
            digest.update(block)
            outside = outside or LOCATION.encode() in before + block
            before = block[1 - len(LOCATION) :]
    places = _locations(path) if outside else []  # otherwise the graph need not be parsed
    return digest.hexdigest(), [(name, _changed(path.parent / name)) for name in places]


def _locations(path: Path) -> list[str]:
    """Return the files of a model's external data, relative to its folder."""
    from ..model.onnx_files import read_proto

    return locations(read_proto(path))


def locations(proto: onnx.ModelProto) -> list[str]:
    """Return the files of a model's external data, relative to its folder, each once."""
    return sorted({entry.value for entry in _places(proto)})


def _serialized(model: Serialized) -> object:
    """Return the digest of a model in memory in which digests of the external data replace the file names."""
    arrays = [(name, str(array.dtype), array.shape, _digest(array.tobytes())) for name, array in model.weights.items()]
    if model.folder is None:
        return hashlib.sha256(model.data).hexdigest(), sorted(arrays)
    import onnx

    proto = onnx.load_model_from_string(model.data)
    contents: dict[str, str] = {}
    for entry in _places(proto):
        if entry.value not in contents:
            contents[entry.value] = _content(model.folder / entry.value)
        entry.value = contents[entry.value]
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest(), sorted(arrays)


def _places(proto: onnx.ModelProto) -> Iterator[onnx.StringStringEntryProto]:
    """Yield the entries of a model that name the files of external data."""
    nodes = (proto.graph.node, *(function.node for function in proto.functions))
    for tensor in (*_listed(proto.graph), *(tensor for each in nodes for tensor in _in_nodes(each))):
        yield from (entry for entry in tensor.external_data if entry.key == LOCATION)


def _listed(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers of a graph."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)


def _in_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """Yield the tensors in the attributes of nodes, and in their bodies."""
    for node in with_inner(nodes):
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
        for body in bodies(node):
            yield from _listed(body)


def _digest(data: bytes) -> str:
    """Return a digest of bytes."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _content(path: Path) -> str:
    """Return a digest of a file's bytes; empty for a missing file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, hashlib.blake2b).hexdigest()  # about a second per gigabyte
    except OSError:
        return ""


def data_stamp(source: Iterable[Sample], length: int | None) -> object:
    """Return a value that changes when data change: number and choice of the samples, and the files that name them.

    For Python objects that are no `Source` it is only the length.

    Args:
        source: The samples.
        length: The number of samples; None if it is unknown before reading.
    """
    if not isinstance(source, Source):
        return length
    spec = source.reference
    picked = source.picked if isinstance(source.picked, (range, type(None))) else tuple(source.picked)
    if spec is None:
        return source.description, length, picked
    tokenizer = spec.tokenizer if isinstance(spec.tokenizer, str) else getattr(spec.tokenizer, "__qualname__", "")
    names = [name for name in (spec.text, spec.labels, tokenizer) if name and isinstance(name, str)]
    return source.description, length, picked, spec.preprocess, [(name, _files(name)) for name in names]


def _files(name: str) -> list[tuple[str, object]]:
    """Return the size and time of each file that a text names: a file, a folder's files, FILE:NAME, or MODULE:NAME.

    Hidden files are left out, because this program writes hidden files beside its output.
    """
    if os.path.isdir(name):
        paths = []
        for parent, folders, files in os.walk(name):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            paths += [os.path.join(parent, file) for file in files if not file.startswith(".")]
        return sorted((os.path.relpath(file, name), _changed(file)) for file in paths)
    path = name if os.path.exists(name) else name.rpartition(":")[0]
    path = getattr(sys.modules.get(path), "__file__", None) or path
    return [(path, _changed(path))]


def _changed(path: str | Path) -> tuple[int, int] | None:
    """Return a file's size in bytes and its modification time in nanoseconds; None if there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
