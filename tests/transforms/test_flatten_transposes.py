"""A Transpose without its axes of length 1 gives the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
from hypothesis import given
from hypothesis import strategies as st
from onnx import reference

from requant.transforms.flatten_transposes import flatten_transposes


@given(data=st.data(), lengths=st.lists(st.sampled_from([1, 1, 2, 3]), min_size=2, max_size=6), free=st.booleans())
def test_results_stay(data: st.DataObject, lengths: list[int], free: bool) -> None:
    perm = data.draw(st.permutations(range(len(lengths))))
    declared = ["N" if free and axis == 0 else str(length) for axis, length in enumerate(lengths)]
    result = [declared[axis] for axis in perm]
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        f"g (int32[{','.join(declared)}] x) => (int32[{','.join(result)}] y) {{ y = Transpose<perm = {[*perm]}>(x) }}"
    )
    model = ir.from_proto(proto)
    applied = flatten_transposes(model).applied
    x = np.arange(np.prod(lengths), dtype=np.int32).reshape(lengths)
    results: Any = reference.ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})
    np.testing.assert_array_equal(results[0], x.transpose(perm))
    assert [node.op_type for node in model.graph] == (["Reshape", "Transpose", "Reshape"] if applied else ["Transpose"])
