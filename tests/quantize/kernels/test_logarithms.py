"""A logarithm far from 0 is one table, with the same results without the library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from ...native import needs_library
from .flow import check_equal, native_operators, quantized

CHAINS = {
    "SPLADE": "r = Relu(c) s = Add(r, one) b = Log(s)",
    "scaled": "r = Abs(c) s = Add(half, r) l = Log(s) b = Mul(l, half)",
    "Softplus": "e = Exp(c) s = Add(e, one) b = Log(s)",
}


@needs_library
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_chain_is_one_table(chain: str, tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N,30,64] x) => (float[N,30,64] y)
        <float one = {{1}}, float half = {{0.5}}> {{ c = MatMul(x, w) {chain} y = MatMul(b, w) }}"""
    )
    random = np.random.default_rng(1)
    weights = (random.normal(size=(64, 64)) / 8).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=random.normal(size=(16, 30, 64)).astype(np.float32))
    result, found = quantized(tmp_path / "m.onnx")
    assert native_operators(found).count("Table") >= 1
    assert not {"Log", "Exp"} & {node.op_type for node in found.graph.node}
    check_equal(tmp_path / "m.onnx", found)
    assert result.accuracy.worst_sqnr_db > 20
