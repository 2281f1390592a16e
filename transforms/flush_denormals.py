"""Replace denormal weights by zeros."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import numpy as np
import onnx_ir as ir

from .graphs.queries import MS, computing_graphs, constant, release
from .graphs.rewriter import LARGE
from .int8.ops import MOVES
from .int8.qparams import TINY, Array, blocks
from .registry import Change, transform

EVERY = frozenset(range(8))
FACTORS: dict[tuple[str, str], frozenset[int]] = {
    **{("", op): frozenset({1, 2}) for op in ("Conv", "ConvTranspose", "BatchNormalization", "InstanceNormalization")},
    **{("", op): frozenset({1, 2}) for op in ("LayerNormalization", "GroupNormalization", "RMSNormalization")},
    **{("", op): frozenset({1, 2, 3}) for op in ("LSTM", "GRU", "RNN")},
    **{("", op): EVERY for op in ("Gemm", "MatMul", "Einsum", "Mul")},
    **{(MS, op): EVERY for op in ("FusedConv", "FusedGemm", "FusedMatMul")},
    **{(MS, op): frozenset({1, 2}) for op in ("Attention", "SkipLayerNormalization")},
    ("", "Gather"): frozenset({0}),
}
"""The inputs of operators that are factors of products, terms of sums of products, or rows of a table."""
COUNTED: WeakKeyDictionary[ir.TensorProtocol, int] = WeakKeyDictionary()
"""The number of denormal values of a tensor; each tensor is read once."""


@transform("flush_denormals", after=("widen_floats", "fold_batch_norms"))
def flush_denormals(model: ir.Model) -> Change:
    """Replace denormal float32 weights by zeros of the same sign.

    Before:  y = MatMul(x, W), W float32 with values w, 0 < |w| < 2^-126
    After:   y = MatMul(x, W), with 0 or -0 in the place of these values, as a CPU that flushes denormals computes
        Many Intel CPUs take about a hundred times as long for an instruction with a denormal operand. A product with
        a weight below 2^-126 vanishes beside others. Weights are read one at a time and in blocks; weights of more
        than 1 MiB are changed when they are read. A tensor without denormals is the same object afterwards. Weights
        of float16 stay: what is denormal there is a normal number in the float32 of `widen_floats`.
    Left alone: other types than float32, initializers that a caller may override, and constants that operators read
        whose result could depend on such a value, for instance as a bound or as the epsilon of a logarithm or a
        division (``no-factor``).
    """
    change = Change()
    for value, tensor in _floats(model):
        if not count_denormals(tensor):
            continue
        if not _is_factor(value):
            change.skip("no-factor")
            continue
        flushed = _flushed(tensor)
        node = value.producer()
        if node is None:
            value.const_value = flushed
        else:
            node.attributes["value"] = ir.AttrTensor("value", flushed)
        change.applied += 1
    return change


def count_denormals(tensor: ir.TensorProtocol) -> int:
    """Return the number of denormal values of a float32 tensor."""
    if tensor not in COUNTED:
        array = tensor.numpy()
        COUNTED[tensor] = sum(denormals_in(array[index]) for index in blocks(array.shape))
        release(tensor)
    return COUNTED[tensor]


def denormals_in(array: Array) -> int:
    """Return the number of values of a float32 array with ``0 < |x| < 2^-126``."""
    low = np.abs(array) < np.float32(TINY)
    count = np.count_nonzero(low)
    return int(count and count - np.count_nonzero(array == 0))


def _floats(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Yield the float32 initializers and Constant nodes of the graph and its bodies."""
    for graph in computing_graphs(model):
        results = [node.outputs[0] for node in graph if node.op_type == "Constant" and "value" in node.attributes]
        for value in (*graph.initializers.values(), *results):
            tensor = constant(value)
            if tensor is not None and tensor.dtype is ir.DataType.FLOAT:
                yield value, tensor


def _is_factor(value: ir.Value) -> bool:
    """Whether a constant is only read as a factor of products, also after its elements were moved."""
    if value.is_graph_output() or not value.uses():
        return False
    for node, index in value.uses():
        moved = not node.domain and node.op_type in MOVES and index == 0
        if not (_is_factor(node.outputs[0]) if moved else index in FACTORS.get((node.domain, node.op_type), ())):
            return False
    return True


def _flushed(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return a float32 tensor without denormals; a large one is computed at each read."""

    def compute() -> ir.TensorProtocol:
        array = tensor.numpy()
        flushed = np.where(np.abs(array) < np.float32(TINY), np.copysign(np.float32(0), array), array)
        release(tensor)
        return ir.Tensor(flushed, name=tensor.name)

    if tensor.nbytes <= LARGE:
        return compute()
    return ir.LazyTensor(compute, ir.DataType.FLOAT, ir.Shape(tensor.shape.numpy()), name=tensor.name)
